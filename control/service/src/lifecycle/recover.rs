//! Compares the database with reality: once after an earlier daemon has ended, then at every tick. A machine that is recorded as on and
//! is not becomes lost; a machine that is on and should be off is stopped. The daemon calls `recover`, `resume` and `keep_reconciling`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use headwater_api::{MachineState, Wanted};
use headwater_db::MachineRecord;
use tokio::sync::Semaphore;

use crate::Service;
use crate::answer::{Explain, problem};
use crate::caller::Caller;
use crate::lifecycle::restart::{BROKE_OFF, DAEMON_ENDED};
use crate::lifecycle::start::StartReason;
use crate::lifecycle::watch::is_behind;
use crate::lifecycle::{LifecycleError, TICK_MS};

/// How long a start waits until the store knows which versions are needed.
const ROOTS_TIMEOUT: Duration = Duration::from_secs(10);

/// How many of the machines that were on when the last daemon ended are started at the same time.
const RESUMED_AT_A_TIME: usize = 4;

/// What must be done about a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing: the database and reality agree.
    Fine,
    /// The database says that it is on, but it is not. Its disk is lost, so it is not restarted silently.
    Lost,
    /// It is on although it should be off: a stop was not completed.
    StopIt,
}

/// Compares the wanted state and the last recorded state with reality.
pub const fn verdict(wanted: Wanted, state: MachineState, is_on: bool) -> Verdict {
    match (state.is_active(), is_on, wanted) {
        (true, false, _) => Verdict::Lost,
        (_, true, Wanted::Stopped) => Verdict::StopIt,
        (true, true, Wanted::Running) | (false, false, _) | (false, true, Wanted::Running) => Verdict::Fine,
    }
}

impl Service {
    /// Restores a consistent state after an earlier daemon: takes over the machines that kept running, ends the other
    /// VMs, removes overflow files and run directories, and marks machines that have ended as lost. A machine that was
    /// about to be restarted stays off, with a reason. Must be called once, before requests are served.
    pub async fn recover(&self) -> Result<(), LifecycleError> {
        self.note_own_host().await?;
        self.recall_alarms().await;
        self.persistent_disks_are_known().await?;
        tracing::info!("cleaning up after an earlier daemon");
        let run_root = self.run_root();
        let adopted = self.adopt_machines().await?;
        let orphans = self
            .hypervisor()
            .sweep_orphans(&run_root, &adopted.machines)
            .await
            .map_err(|e| LifecycleError::Orphans("end the machines that it left", e))?;
        self.close_left(adopted.left).await;
        self.end_sealed_sessions().await?;
        let kept: Vec<_> = self.db().read().await?.persistent_disks().list().await?;
        let kept_ids: Vec<_> = kept.iter().map(|disk| disk.id).collect();
        for file in self
            .disks()
            .sweep(&kept_ids)
            .await
            .map_err(|e| LifecycleError::Orphans("remove the overflow files that it left", e))?
        {
            tracing::warn!("removed {file}");
        }
        self.sweep_kept(&kept_ids).await;
        let orphans: BTreeSet<String> = orphans.into_iter().collect();
        let machines = self.own_machines().await?;
        for record in machines {
            if self.active(record.uuid).is_some() {
                continue;
            }
            self.remove_sockets(&record.name).await;
            if verdict(record.wanted, record.state, false) == Verdict::Lost {
                let process = if orphans.contains(&record.name) {
                    "its process still ran and was ended"
                } else {
                    "its process was gone"
                };
                let how = format!("the daemon ended while it was {}; {process}", record.state);
                self.mark_lost(record, &how).await?;
            } else {
                self.record_not_restarted(record, DAEMON_ENDED).await?;
            }
        }
        self.watch_for_missing_nodes().await?;
        self.end_claims_of_former().await?;
        // Removes roots that a crash left in the store, and adds roots that an earlier release did not write.
        self.roots_changed();
        if tokio::time::timeout(ROOTS_TIMEOUT, self.roots_due()).await.is_err() {
            // A store that does not answer gets the roots later; machines that start wait for that themselves.
            self.roots_changed();
        }
        Ok(())
    }

    /// Fails if the database was lost and created anew: with it, all persistent disks would be removed as orphans.
    async fn persistent_disks_are_known(&self) -> Result<(), LifecycleError> {
        let mut repo = self.db().read().await?;
        // If only the last machine was removed, there is a history; an orphaned disk is then removed later.
        if !repo.machines().list().await?.is_empty() || !repo.events().newest(None, 1).await?.is_empty() {
            return Ok(());
        }
        drop(repo);
        let keys = self
            .disks()
            .persistent_keys()
            .await
            .map_err(|e| LifecycleError::Orphans("look for persistent disks", e))?;
        match keys.iter().min() {
            Some(first) => {
                Err(LifecycleError::Forgotten { count: keys.len(), first: first.display().to_string() })
            }
            None => Ok(()),
        }
    }

    /// Restarts the machines that were on, or about to be, when the last daemon ended. Several at a time, each with
    /// retries until it is on or nobody wants it any more. Data of disks that are not persistent is lost anyway.
    pub async fn resume(&self) {
        let machines = self.own_machines().await.unwrap_or_else(|e| {
            tracing::error!(
                "cannot list the machines that were on, so none of them is restarted: {}",
                problem(&e)
            );
            Vec::new()
        });
        let was_on = |record: &MachineRecord| {
            let is_off = matches!(record.state, MachineState::Stopped | MachineState::Lost);
            is_off && record.wanted == Wanted::Running && self.active(record.uuid).is_none()
        };
        self.start_until_on(machines.into_iter().filter(was_on), StartReason::Resume);
    }

    /// Starts machines that are off and wanted. Several at a time, each with retries until it is on or nobody wants it any
    /// more.
    pub(crate) fn start_until_on(
        &self,
        machines: impl Iterator<Item = MachineRecord>,
        occasion: StartReason,
    ) {
        let places = Arc::new(Semaphore::new(RESUMED_AT_A_TIME));
        for MachineRecord { uuid, name, .. } in machines {
            // Mark it now, so that no other task takes the machine for one whose restart was interrupted.
            let restart = self.begin_restart(uuid);
            let (service, places) = (self.clone(), Arc::clone(&places));
            tokio::spawn(async move {
                let _restart = restart;
                let started = {
                    // The semaphore is never closed.
                    let _permit = places.acquire_owned().await;
                    service.start_if_wanted(uuid, &name, occasion).await
                };
                if let Err(e) = started {
                    service.start_again(uuid, &name, occasion, e).await;
                }
            });
        }
    }

    async fn mark_lost(&self, mut record: MachineRecord, how: &str) -> Result<(), LifecycleError> {
        let kept = self.db().read().await?.persistent_disks().of_machine(record.uuid).await?;
        let reason = match kept.is_empty() {
            true => format!("{how}; what it wrote is lost; start it to boot a fresh disk"),
            false => {
                format!("{how}; its persistent disk is as after a power cut; start it to boot the disk again")
            }
        };
        record.state = MachineState::Lost;
        record.reason = Some(reason.clone());
        self.save(&record, &Caller::daemon(), "state", reason).await
    }

    /// Asks the hypervisor how machines run on this host, and logs it. The hypervisor caches the answer.
    pub async fn look_at_hypervisor(&self) {
        match self.hypervisor().describe().await {
            Ok(how) => tracing::info!("machines are run by {how}"),
            Err(e) => tracing::warn!("this host cannot run machines: {}", problem(&e)),
        }
    }

    /// Runs every tick: compares wanted and actual state, and samples counters. Ends when all other handles of the service
    /// are dropped.
    pub async fn keep_reconciling(&self) {
        // The first read of the status then has an answer, even if the store fails in the meantime.
        let service = self.clone();
        tokio::spawn(async move { service.store_figures().await });
        let mut tick = tokio::time::interval(Duration::from_millis(TICK_MS));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // In a task of its own: a remote store may be slow, and machines must not wait for it.
        let mut promoting: Option<tokio::task::JoinHandle<()>> = None;
        loop {
            tick.tick().await;
            self.sample_rates();
            self.sample_host();
            if !self.is_stopping() && promoting.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
                let (service, under_way) = (self.clone(), self.begin_operation());
                promoting = Some(tokio::spawn(async move {
                    service.promote_due().await;
                    // What follows is not recorded in the history, so an orderly end need not wait for it.
                    drop(under_way);
                    service.roots_due().await;
                    service.reclaim_due().await;
                }));
            }
            self.check_alarms().await;
            log_failure("look after claims", self.look_after_claims().await);
            log_failure("keep machines ready", self.keep_pools().await);
            log_failure("look after lost hosts", self.look_after_lost_hosts().await);
            log_failure("compare wanted and actual state", self.reconcile().await);
        }
    }

    async fn reconcile(&self) -> Result<(), LifecycleError> {
        let Some(look) = self.look_for_changes() else { return Ok(()) };
        let mut is_well = true;
        let machines = self.own_machines().await?;
        for seen in machines {
            let active = self.active(seen.uuid);
            let is_behind = active.as_ref().is_some_and(|active| is_behind(&seen, active));
            let is_fine = verdict(seen.wanted, seen.state, active.is_some()) == Verdict::Fine;
            if is_fine && !is_behind && !self.restart_was_lost(&seen) {
                continue;
            }
            is_well = false;
            // Another task holds the lock and changes the machine now: check again at the next tick.
            let Some(turn) = self.try_lock(seen.uuid) else { continue };
            let Ok(record) = self.record_of(seen.uuid, &seen.name).await else { continue };
            let active = self.active(record.uuid);
            match verdict(record.wanted, record.state, active.is_some()) {
                Verdict::Fine => match active {
                    Some(active) => self.catch_up(record, &active).await?,
                    None if self.restart_was_lost(&record) => {
                        // A machine with a reason may be off because of it.
                        let why = record.reason.clone().unwrap_or_else(|| BROKE_OFF.to_owned());
                        self.record_not_restarted(record, &why).await?;
                    }
                    None => {}
                },
                // This is recorded when the machine is restarted.
                Verdict::Lost if self.is_unrecorded_restart(&record) => {}
                Verdict::Lost => {
                    tracing::error!(machine = %record.name, "the machine is recorded as {}, but is not on", record.state);
                    let how =
                        format!("it ended while it was {}, which could not be recorded then", record.state);
                    self.mark_lost(record, &how).await?;
                }
                Verdict::StopIt => {
                    drop(turn);
                    tracing::warn!(machine = %record.name, "the machine is on but should be off; stopping it");
                    self.stop_record(record, true, &Caller::daemon()).await?;
                }
            }
        }
        self.has_compared(look, is_well);
        Ok(())
    }
}

/// Logs the failure of something that is retried at each tick. A database that cannot be reached is already in the log.
fn log_failure(what: &str, outcome: Result<(), impl Explain + 'static>) {
    if let Err(error) = outcome
        && error.retry_after_s().is_none()
    {
        tracing::error!("cannot {what}: {}", problem(&error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_truth_wins_over_the_database() {
        use MachineState::{Booting, Crashed, Created, Lost, Running, Starting, Stopped, Stopping};
        for state in [Starting, Booting, Running, Stopping] {
            assert_eq!(verdict(Wanted::Running, state, false), Verdict::Lost);
            assert_eq!(verdict(Wanted::Stopped, state, false), Verdict::Lost);
            assert_eq!(verdict(Wanted::Running, state, true), Verdict::Fine);
            assert_eq!(verdict(Wanted::Stopped, state, true), Verdict::StopIt);
        }
        for state in [Created, Stopped, Crashed, Lost] {
            // Wanted and not on: reported, and never restarted silently.
            assert_eq!(verdict(Wanted::Running, state, false), Verdict::Fine);
            assert_eq!(verdict(Wanted::Stopped, state, false), Verdict::Fine);
            assert_eq!(verdict(Wanted::Stopped, state, true), Verdict::StopIt);
        }
    }
}
