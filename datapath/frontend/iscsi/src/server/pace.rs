//! Measures how fast data arrives that commands wait for, and how long they may wait while others need their
//! memory.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use headwater_block::MAX_REQUEST_BYTES;

use super::serve::End;
use super::session::Session;
use super::tasks::{Collecting, Order};

/// The slowest accepted line: 256 kbit/s, in bytes a second. It applies to all data that one session owes
/// before that of a command.
const SLOWEST_BYTES_S: u64 = 32 << 10;

/// What a session knows about the arrival of data.
pub(super) struct Pace {
    begun: Instant,
    /// How much of the time since then nothing was read, whatever the initiator sent.
    deaf: Duration,
    /// When data was last requested or arrived, in time in which the session listened.
    heard: Duration,
    /// Bytes of data that arrived.
    came_bytes: u64,
}

/// The state when a command began to wait for data.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Since {
    listened: Duration,
    came_bytes: u64,
    /// Commands of other sessions whose unsolicited data had found no memory.
    refused: u64,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { begun: Instant::now(), deaf: Duration::ZERO, heard: Duration::ZERO, came_bytes: 0 }
    }

    fn listened(&self) -> Duration {
        self.begun.elapsed().saturating_sub(self.deaf)
    }

    /// Called when data is requested or announced.
    pub(super) fn since_now(&mut self, refused: u64) -> Since {
        self.heard = self.listened();
        Since { listened: self.heard, came_bytes: self.came_bytes, refused }
    }

    pub(super) fn came(&mut self, bytes: usize) {
        self.heard = self.listened();
        self.came_bytes = self.came_bytes.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
    }

    /// Nothing was read during this time.
    pub(super) fn was_deaf(&mut self, time: Duration) {
        self.deaf = self.deaf.saturating_add(time);
    }

    /// How long no data has arrived.
    pub(super) fn silent(&self) -> Duration {
        self.listened().saturating_sub(self.heard)
    }

    /// How long a command has waited for its data, and how much arrived meanwhile. Only if that is longer
    /// than `stall` plus the time that the slowest line takes for what arrived, counting at most
    /// `most_bytes`, which is more than can have been requested before.
    pub(super) fn late(&self, since: &Since, stall: Duration, most_bytes: u64) -> Option<(Duration, u64)> {
        let came_bytes = self.came_bytes.saturating_sub(since.came_bytes);
        let waited = self.listened().saturating_sub(since.listened);
        let longest = stall + Duration::from_secs(came_bytes.min(most_bytes) / SLOWEST_BYTES_S);
        (waited >= longest).then_some((waited, came_bytes))
    }
}

impl Session<'_> {
    /// Ends a session whose initiator does not send requested or announced data, or sends it too slowly,
    /// while others wait for the memory that is reserved for it.
    pub(super) fn check_data_comes(&mut self) -> Result<(), End> {
        let limit = self.limits.send_stall_ms;
        let stall = Duration::from_millis(limit);
        if (self.tasks.is_clear() && self.held_bytes == 0) || self.pace_seen.elapsed() < stall / 8 {
            return Ok(());
        }
        self.pace_seen = Instant::now();
        let wanted = [self.share.is_wanted(false), self.share.is_wanted(true)];
        let refused = self.refused_others();
        let is_wanted = |order: &Order, collecting: &Collecting| {
            let [others, stores] = wanted;
            match collecting.unasked {
                // Others do not wait for unsolicited data, but are refused because of it.
                Some(_) => refused > collecting.since.refused,
                None if order.expected.needs_room => stores,
                None => others,
            }
        };
        // More than can have been requested when a command's turn came, including its own data.
        let most_bytes = self.limits.bytes_collected.saturating_add(2 * u64::from(MAX_REQUEST_BYTES));
        let mut awaiting =
            self.tasks.awaiting_data().filter(|(order, collecting)| is_wanted(order, collecting));
        let what = "of the data that it was asked for, and others waited for its memory";
        if self.pace.silent() >= stall && awaiting.next().is_some() {
            return Err(End::Fault(format!("it sent nothing for {limit} ms {what}")));
        }
        let late = |since: &Since| self.pace.late(since, stall, most_bytes);
        if let Some((waited, bytes)) = awaiting.find_map(|(_, collecting)| late(&collecting.since)) {
            let seconds = waited.as_secs_f64();
            return Err(End::Fault(format!("it sent only {bytes} bytes in {seconds:.1} s {what}")));
        }
        if self.held_bytes > 0 && refused > self.held_since.refused && late(&self.held_since).is_some() {
            let number = self.window.next();
            return Err(End::Fault(format!(
                "it did not send command number {number}, for which others wait, and other initiators found no memory"
            )));
        }
        Ok(())
    }

    /// How many commands of other sessions found no memory for their unsolicited data.
    pub(super) fn refused_others(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed).saturating_sub(self.refused_here)
    }

    /// Counts a command whose unsolicited data found no memory.
    pub(super) fn count_refused(&mut self) {
        self.shared.refused.fetch_add(1, Ordering::Relaxed);
        self.refused_here = self.refused_here.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_secs(10);
    const MOST: u64 = 20 * SLOWEST_BYTES_S;

    /// A pace after listening for `seconds`, in which `came_bytes` arrived.
    fn after(seconds: u64, came_bytes: u64) -> Pace {
        let begun = Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        Pace { begun, came_bytes, ..Pace::new() }
    }

    #[test]
    fn arriving_data_extends_the_time_up_to_a_limit() {
        let late = |pace: &Pace| pace.late(&Since::default(), STALL, MOST).is_some();
        assert!(!late(&after(5, 0)) && late(&after(10, 0)));
        assert!(!late(&after(14, 5 * SLOWEST_BYTES_S)) && late(&after(15, 5 * SLOWEST_BYTES_S)));
        assert!(!late(&after(29, u64::MAX)) && late(&after(30, u64::MAX)), "as much as may be before it");
    }

    #[test]
    fn time_in_which_nothing_was_read_does_not_count() {
        let mut pace = after(100, 0);
        pace.was_deaf(Duration::from_secs(95));
        assert_eq!(pace.late(&Since::default(), STALL, MOST), None);
        assert!(pace.silent() < STALL);
    }
}
