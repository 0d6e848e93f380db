//! Starting a guest again that restarts: at once, and ever later where it does nothing else.

use std::time::Duration;

use headwater_api::{MachineState, Wanted};
use headwater_db::{MachineRecord, PersistentDisk};
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use crate::Service;
use crate::caller::Caller;
use crate::lifecycle::LifecycleError;

/// The longest pause before a start, in seconds.
const LONGEST_PAUSE_S: u64 = 60;

/// How often a pause looks whether the daemon stops, or the version of the machine's disk is made.
const LOOK: Duration = Duration::from_millis(200);

/// How long a guest waits for its next start after so many quick boots in a row: the first restart is that of an
/// installer or an update.
pub(super) fn pause(quick_boots: u32) -> Duration {
    let seconds = match quick_boots.checked_sub(2) {
        None => 0,
        Some(doublings) => 1_u64.checked_shl(doublings).unwrap_or(LONGEST_PAUSE_S).min(LONGEST_PAUSE_S),
    };
    Duration::from_secs(seconds)
}

/// Why a machine is off that was on, or was to be started again, when the daemon ended in order. It stays wanted.
pub(super) const DAEMON_ENDED: &str = "the daemon ended while it was wanted; start it, or have 'headwater serve --resume' start all such machines";
/// Why a machine of a node is off that another host may run. It stays wanted.
pub(crate) const FENCED: &str =
    "its host had not heard the controller for the time of its lease, so another host may run it";
/// Why a machine stays off that was to be started again.
pub(super) const BROKE_OFF: &str = "it was to be started again, and that broke off; start it";

/// Whether a machine is off because a daemon or a lease ended, and is to be on: `serve --resume` or the next lease starts it.
fn is_left_wanted(record: &MachineRecord) -> bool {
    let says_so = record.reason.as_ref().is_some_and(|it| it.contains(DAEMON_ENDED) || it.contains(FENCED));
    says_so && record.wanted == Wanted::Running && record.state == MachineState::Stopped
}

impl Service {
    /// Notes of a machine that is off, and was to be started again, why nobody does so any more. If the daemon ends, it stays wanted. The caller has its turn.
    pub(super) async fn not_started_again(
        &self,
        mut record: MachineRecord,
        why: &str,
    ) -> Result<(), LifecycleError> {
        let is_off = record.state == MachineState::Stopped || self.is_unrecorded_restart(&record);
        if record.wanted != Wanted::Running || !is_off || is_left_wanted(&record) {
            return Ok(());
        }
        if why != DAEMON_ENDED {
            record.wanted = Wanted::Stopped;
        }
        record.state = MachineState::Stopped;
        record.reason = Some(why.to_owned());
        self.save(&record, &Caller::daemon(), "state", why).await
    }

    /// Whether a machine is noted as off until it is started again, and nobody does that: who was to could note no more than
    /// that it is off. What the end of the daemon leaves so, it notes itself.
    pub(super) fn is_left_off(&self, record: &MachineRecord) -> bool {
        let is_waiting = record.wanted == Wanted::Running && record.state == MachineState::Stopped;
        let is_cared_for = self.active(record.uuid).is_some() || self.is_restarting(record.uuid);
        is_waiting && !is_cared_for && !self.is_stopping() && !is_left_wanted(record)
    }

    /// What a machine that is not off does. One whose guest restarted is off only for a while.
    pub(super) fn not_off(&self, record: &MachineRecord) -> Option<&'static str> {
        if self.active(record.uuid).is_some() {
            return Some(record.state.name());
        }
        let restarts = record.wanted == Wanted::Running && self.is_restarting(record.uuid);
        restarts.then_some("off only until it is started again, as its guest restarted")
    }

    pub(super) fn is_any_sealing(&self, kept: &[PersistentDisk]) -> bool {
        kept.iter().any(|disk| self.is_sealing(disk.id))
    }

    /// Waits for the end of the pause, and while a version is made of one of its disks. Without the machine's turn, so that
    /// it can be stopped meanwhile. Returns the turn and the record as it is by then; `None` where somebody else decided
    /// about the machine, or the daemon stops.
    pub(super) async fn pause_restart(
        &self,
        pause: Duration,
        kept: &[PersistentDisk],
        mut turn: OwnedMutexGuard<()>,
        before: MachineRecord,
    ) -> Result<Option<(OwnedMutexGuard<()>, MachineRecord)>, LifecycleError> {
        if pause.is_zero() && !self.is_any_sealing(kept) {
            return Ok(Some((turn, before)));
        }
        let end = Instant::now() + pause;
        loop {
            drop(turn);
            while (Instant::now() < end || self.is_any_sealing(kept)) && !self.is_stopping() {
                let next = Instant::now() + LOOK;
                tokio::time::sleep_until(if Instant::now() < end { end.min(next) } else { next }).await;
            }
            turn = self.lock(before.uuid).await;
            // Whoever had it meanwhile may have begun another version.
            if !self.is_any_sealing(kept) || self.is_stopping() {
                break;
            }
        }
        let record = self.db().read().await?.machines().by_uuid(before.uuid).await?;
        let is_waiting = |record: &MachineRecord| {
            record.wanted == Wanted::Running
                && record.state == MachineState::Stopped
                && record.started_at_ms == before.started_at_ms
                && !self.is_stopping()
        };
        Ok(record.filter(is_waiting).map(|record| (turn, record)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_minute() {
        let seconds = |boots| pause(boots).as_secs();
        assert_eq!([0, 1, 2, 3, 4, 7, 8, 9, 80, u32::MAX].map(seconds), [0, 0, 1, 2, 4, 32, 60, 60, 60, 60]);
    }
}
