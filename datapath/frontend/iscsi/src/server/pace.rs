//! Measures how fast the data of waiting commands arrives, and ends sessions whose data is too slow.
//!
//! A session is ended in three cases, and only while other sessions wait for its memory, or were refused
//! because of it:
//!
//! - No data arrives of commands whose data R2Ts requested or the commands announced.
//! - That data arrives too slowly.
//! - A command does not arrive for which later commands of the session wait.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use headwater_block::MAX_REQUEST_BYTES;

use super::serve::End;
use super::session::Session;
use super::tasks::{Collecting, Order};

/// The slowest accepted rate of a session: 256 kbit/s, in bytes a second. The time limit of a command takes into
/// account all data of the session that arrived since the command began to wait, not only the command's data.
const SLOWEST_BYTES_S: u64 = 32 << 10;

/// The arrival of a session's data over time.
pub(super) struct Pace {
    begun: Instant,
    /// Time since `begun` in which the session did not receive.
    excluded: Duration,
    /// When data was last requested or arrived, measured in time in which the session received.
    last_data: Duration,
    /// Bytes of data that have arrived.
    received_bytes: u64,
}

/// The [`Pace`] when a command began to wait for data.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Since {
    listened: Duration,
    received_bytes: u64,
    /// How many commands of other sessions had been refused for lack of memory for unsolicited data.
    refused: u64,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { begun: Instant::now(), excluded: Duration::ZERO, last_data: Duration::ZERO, received_bytes: 0 }
    }

    fn listened(&self) -> Duration {
        self.begun.elapsed().saturating_sub(self.excluded)
    }

    /// The state now. Called when data is requested or announced.
    pub(super) fn since_now(&mut self, refused: u64) -> Since {
        self.last_data = self.listened();
        Since { listened: self.last_data, received_bytes: self.received_bytes, refused }
    }

    pub(super) fn received(&mut self, bytes: usize) {
        self.last_data = self.listened();
        self.received_bytes = self.received_bytes.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
    }

    /// Excludes time in which the session did not receive.
    pub(super) fn exclude(&mut self, time: Duration) {
        self.excluded = self.excluded.saturating_add(time);
    }

    /// How long no data has arrived.
    pub(super) fn silent(&self) -> Duration {
        self.listened().saturating_sub(self.last_data)
    }

    /// How long a command has waited for its data, and how many bytes arrived meanwhile, if the data is late:
    /// if it took longer than `stall` plus the time that the slowest line takes for these bytes. At most
    /// `most_bytes` count.
    pub(super) fn late(&self, since: &Since, stall: Duration, most_bytes: u64) -> Option<(Duration, u64)> {
        let received_bytes = self.received_bytes.saturating_sub(since.received_bytes);
        let waited = self.listened().saturating_sub(since.listened);
        let longest = stall + Duration::from_secs(received_bytes.min(most_bytes) / SLOWEST_BYTES_S);
        (waited >= longest).then_some((waited, received_bytes))
    }
}

impl Session<'_> {
    /// Ends a session in the three cases of the module's comment.
    pub(super) fn check_data_comes(&mut self) -> Result<(), End> {
        let limit = self.limits.send_stall_ms;
        let stall = Duration::from_millis(limit);
        if (self.tasks.is_clear() && self.held_bytes == 0) || self.pace_checked.elapsed() < stall / 8 {
            return Ok(());
        }
        self.pace_checked = Instant::now();
        // Whether other sessions wait for memory that this one has, for commands of each kind.
        let stores_wait = self.share.is_wanted(true);
        let others_wait = self.share.is_wanted(false);
        let refused = self.refused_others();
        let is_wanted = |order: &Order, collecting: &Collecting| match collecting.unsolicited {
            // Nobody waits for the memory of unsolicited data: a command that finds none is refused. So this
            // compares the commands that were refused since this command began.
            Some(_) => refused > collecting.since.refused,
            None if order.expected.needs_room => stores_wait,
            None => others_wait,
        };
        // An upper bound of the bytes that R2Ts can have requested until this command is complete.
        let most_bytes = self.limits.bytes_collected.saturating_add(2 * u64::from(MAX_REQUEST_BYTES));
        let mut awaiting =
            self.tasks.awaiting_data().filter(|(order, collecting)| is_wanted(order, collecting));
        let what = "while other initiators needed the memory that is reserved for that data";
        if self.pace.silent() >= stall && awaiting.next().is_some() {
            let why = format!("the initiator sent no data of its write commands for {limit} ms, {what}");
            return Err(End::Fault(why));
        }
        let late = |since: &Since| self.pace.late(since, stall, most_bytes);
        if let Some((waited, bytes)) = awaiting.find_map(|(_, collecting)| late(&collecting.since)) {
            let seconds = waited.as_secs_f64();
            return Err(End::Fault(format!(
                "the initiator sent only {bytes} bytes of data of its writes in {seconds:.1} s, {what}"
            )));
        }
        if self.held_bytes > 0 && refused > self.held_since.refused && late(&self.held_since).is_some() {
            let number = self.window.next();
            return Err(End::Fault(format!(
                "the initiator did not send command number {number}, for which its later commands wait, while commands of other initiators were refused for lack of memory"
            )));
        }
        Ok(())
    }

    /// How many commands of other sessions were refused for lack of memory for their unsolicited data.
    pub(super) fn refused_others(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed).saturating_sub(self.refused_here)
    }

    /// Counts a command that is refused for lack of memory for its unsolicited data.
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

    /// A pace after receiving for `seconds`, in which `received_bytes` arrived.
    fn after(seconds: u64, received_bytes: u64) -> Pace {
        let begun = Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        Pace { begun, received_bytes, ..Pace::new() }
    }

    #[test]
    fn arriving_data_extends_the_time_up_to_a_limit() {
        let late = |pace: &Pace| pace.late(&Since::default(), STALL, MOST).is_some();
        assert!(!late(&after(5, 0)) && late(&after(10, 0)));
        assert!(!late(&after(14, 5 * SLOWEST_BYTES_S)) && late(&after(15, 5 * SLOWEST_BYTES_S)));
        assert!(!late(&after(29, u64::MAX)) && late(&after(30, u64::MAX)), "at most `most_bytes` count");
    }

    #[test]
    fn time_in_which_nothing_was_read_does_not_count() {
        let mut pace = after(100, 0);
        pace.exclude(Duration::from_secs(95));
        assert_eq!(pace.late(&Since::default(), STALL, MOST), None);
        assert!(pace.silent() < STALL);
    }
}
