//! The pause before a machine whose guest rebooted is started again, and the record of why it is not started again. The
//! pause is 0 at first, and grows if the guest keeps rebooting.
//!
//! Nothing here starts a machine: `watch.rs` waits here when the VM has ended with a reboot, and then starts the machine
//! with `start.rs`; `recover.rs` finds machines whose restart was lost.

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

/// How often a pause checks whether the daemon stops, or a version of the machine's disk is complete.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The pause before the next start, after this number of quick boots in a row: boots that ended soon, see `active.rs`.
/// The first restart has no pause, because installers and updates reboot too.
pub(super) fn pause(quick_boots: u32) -> Duration {
    let seconds = match quick_boots.checked_sub(2) {
        None => 0,
        Some(doublings) => 1_u64.checked_shl(doublings).unwrap_or(LONGEST_PAUSE_S).min(LONGEST_PAUSE_S),
    };
    Duration::from_secs(seconds)
}

/// The reason of a machine that was on, or about to be restarted, when the daemon ended in order. It stays wanted.
pub(super) const DAEMON_ENDED: &str = "the daemon ended while the machine was wanted; start it, or use 'headwater serve --resume', which starts all such machines";
/// The reason of a node's machine that another host may run. It stays wanted.
pub(crate) const FENCED: &str =
    "its host had not heard the controller for the time of its lease, so another host may run it";
/// The reason of a machine whose restart was interrupted.
pub(super) const BROKE_OFF: &str = "its restart was interrupted; start it";

/// Whether a machine is off because a daemon or a lease ended, and is wanted: `serve --resume` or the next lease starts it.
fn is_wanted_after_end(record: &MachineRecord) -> bool {
    let says_so = record.reason.as_ref().is_some_and(|it| it.contains(DAEMON_ENDED) || it.contains(FENCED));
    says_so && record.wanted == Wanted::Running && record.state == MachineState::Stopped
}

impl Service {
    /// Records why a machine that was to be restarted is not restarted. If the daemon ends, the machine stays wanted. The
    /// caller holds the machine's lock.
    pub(super) async fn record_not_restarted(
        &self,
        mut record: MachineRecord,
        why: &str,
    ) -> Result<(), LifecycleError> {
        let is_off = record.state == MachineState::Stopped || self.is_unrecorded_restart(&record);
        if record.wanted != Wanted::Running || !is_off || is_wanted_after_end(&record) {
            return Ok(());
        }
        if why != DAEMON_ENDED {
            record.wanted = Wanted::Stopped;
        }
        record.state = MachineState::Stopped;
        record.reason = Some(why.to_owned());
        self.save(&record, &Caller::daemon(), "state", why).await
    }

    /// Whether a machine is wanted and recorded as off, but no task is restarting it: the task failed after it had
    /// recorded that the machine is off. `false` while the daemon stops, because the stop records the reason.
    pub(super) fn restart_was_lost(&self, record: &MachineRecord) -> bool {
        let is_waiting = record.wanted == Wanted::Running && record.state == MachineState::Stopped;
        let is_cared_for = self.active(record.uuid).is_some() || self.is_restarting(record.uuid);
        is_waiting && !is_cared_for && !self.is_stopping() && !is_wanted_after_end(record)
    }

    /// The state of a machine that is not off, in words. If its guest rebooted, it is off only until its restart.
    pub(super) fn state_if_not_off(&self, record: &MachineRecord) -> Option<&'static str> {
        if self.active(record.uuid).is_some() {
            return Some(record.state.name());
        }
        let restarts = record.wanted == Wanted::Running && self.is_restarting(record.uuid);
        restarts.then_some("off only until its restart, because its guest rebooted")
    }

    pub(super) fn is_any_sealing(&self, kept: &[PersistentDisk]) -> bool {
        kept.iter().any(|disk| self.is_sealing(disk.id))
    }

    /// Waits for the end of the pause, and while a version is made of one of the machine's persistent disks (`kept`).
    /// Does not hold the machine's lock (`turn`) meanwhile, so that the machine can be stopped. Returns the lock and the
    /// record after that; `None` if the machine was changed meanwhile, or the daemon stops.
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
                let next = Instant::now() + POLL_INTERVAL;
                tokio::time::sleep_until(if Instant::now() < end { end.min(next) } else { next }).await;
            }
            turn = self.lock(before.uuid).await;
            // Another task that held the lock meanwhile may have begun to make another version.
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
