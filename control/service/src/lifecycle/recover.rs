//! Comparing what the database says with what is there: after a daemon that died, and now and then.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use headwater_api::{MachineState, Wanted};
use headwater_db::MachineRecord;
use tokio::sync::Semaphore;

use crate::Service;
use crate::answer::Explain;
use crate::caller::Caller;
use crate::lifecycle::restart::{BROKE_OFF, DAEMON_ENDED};
use crate::lifecycle::start::StartReason;
use crate::lifecycle::watch::is_behind;
use crate::lifecycle::{LifecycleError, TICK_MS};

/// How long a start waits for the store to be told which versions are needed.
const ROOTS_WAIT: Duration = Duration::from_secs(10);

/// How many machines are started at a time that were on when the last daemon ended.
const RESUMED_AT_A_TIME: usize = 4;

/// What to do about a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing: the database and the facts agree.
    Fine,
    /// The database says that it is on, and it is not: its disk is gone, so it is not restarted silently.
    Lost,
    /// It is on although it should be off: a stop did not come to its end.
    StopIt,
}

/// Compares what is wanted and what was noted last with whether the machine is on.
pub const fn verdict(wanted: Wanted, state: MachineState, is_on: bool) -> Verdict {
    match (state.is_active(), is_on, wanted) {
        (true, false, _) => Verdict::Lost,
        (_, true, Wanted::Stopped) => Verdict::StopIt,
        (true, true, Wanted::Running) | (false, false, _) | (false, true, Wanted::Running) => Verdict::Fine,
    }
}

impl Service {
    /// Tells the truth after an earlier daemon: takes over the machines that went on without it, ends the other VMs that it left,
    /// cleans its overflow files and run directories, and marks machines that have ended as lost. A machine that was about to be
    /// started again stays off, and its reason says so. Call it before serving; nothing is on yet.
    pub async fn recover(&self) -> Result<(), LifecycleError> {
        self.note_own_host().await?;
        self.recall_alarms().await;
        self.persistent_disks_are_known().await?;
        tracing::info!("looking for what an earlier daemon left");
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
        for name in self
            .disks()
            .sweep(&kept_ids)
            .await
            .map_err(|e| LifecycleError::Orphans("remove the overflow files that it left", e))?
        {
            tracing::warn!("removed what an earlier daemon left: {name}");
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
                    "its process was still there and was ended"
                } else {
                    "its process was gone"
                };
                let how = format!("the daemon ended while it was {}; {process}", record.state);
                self.mark_lost(record, &how).await?;
            } else {
                self.not_started_again(record, DAEMON_ENDED).await?;
            }
        }
        self.wait_for_nodes().await?;
        self.end_claims_of_former().await?;
        // What a crash left in the store, and what an earlier release did not tell it.
        self.roots_changed();
        if tokio::time::timeout(ROOTS_WAIT, self.roots_due()).await.is_err() {
            // A store that does not answer is told later; a machine that starts waits for that itself.
            self.roots_changed();
        }
        Ok(())
    }

    /// Refuses a database that was lost and made anew: for that one, every disk that is kept is a leftover.
    async fn persistent_disks_are_known(&self) -> Result<(), LifecycleError> {
        let mut repo = self.db().read().await?;
        // Where the last machine was removed there is a history, and what a crash left of its disk is swept.
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

    /// Starts the machines that were on, or were to be, when the last daemon ended, in order or not: a few at a time, each until that works
    /// or nobody wants it any more. Writes to a disk that is not kept are gone all the same.
    pub async fn resume(&self) {
        let machines = self.own_machines().await.unwrap_or_else(|e| {
            tracing::error!("cannot list the machines that were on, and starts none of them: {e}");
            Vec::new()
        });
        let was_on = |record: &MachineRecord| {
            let is_off = matches!(record.state, MachineState::Stopped | MachineState::Lost);
            is_off && record.wanted == Wanted::Running && self.active(record.uuid).is_none()
        };
        self.start_until_on(machines.into_iter().filter(was_on), StartReason::Resume);
    }

    /// Starts machines that are off and wanted, a few at a time, each until that works or nobody wants it any more.
    pub(crate) fn start_until_on(
        &self,
        machines: impl Iterator<Item = MachineRecord>,
        occasion: StartReason,
    ) {
        let places = Arc::new(Semaphore::new(RESUMED_AT_A_TIME));
        for MachineRecord { uuid, name, .. } in machines {
            // From now on: nobody is to take it for one whose restart broke off.
            let restart = self.begin_restart(uuid);
            let (service, places) = (self.clone(), Arc::clone(&places));
            tokio::spawn(async move {
                let _restart = restart;
                let started = {
                    // It is never closed.
                    let _place = places.acquire_owned().await;
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
            true => format!("{how}; what it wrote is gone; start it to boot it afresh"),
            false => format!("{how}; its disk is kept, as after a power cut; start it to boot it again"),
        };
        record.state = MachineState::Lost;
        record.reason = Some(reason.clone());
        self.save(&record, &Caller::daemon(), "state", reason).await
    }

    /// Finds out how machines run on this host, and logs it. The hypervisor remembers the answer.
    pub async fn look_at_hypervisor(&self) {
        match self.hypervisor().describe().await {
            Ok(how) => tracing::info!("machines are run by {how}"),
            Err(e) => tracing::warn!("machines cannot be run: {e}"),
        }
    }

    /// Compares wanted and actual state, and samples counters, until the service is dropped by all others.
    pub async fn keep_reconciling(&self) {
        // Whoever looks first then has something to see, also where the store goes away in between.
        let service = self.clone();
        tokio::spawn(async move { service.store_figures().await });
        let mut tick = tokio::time::interval(Duration::from_millis(TICK_MS));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Beside the rest: a store across a network may take its time, and machines are not to wait for it.
        let mut promoting: Option<tokio::task::JoinHandle<()>> = None;
        loop {
            tick.tick().await;
            self.sample_rates();
            self.sample_host();
            if !self.is_stopping() && promoting.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
                let (service, under_way) = (self.clone(), self.begin_operation());
                promoting = Some(tokio::spawn(async move {
                    service.promote_due().await;
                    // What follows is in no history, and an orderly end need not wait for it.
                    drop(under_way);
                    service.roots_due().await;
                    service.reclaim_due().await;
                }));
            }
            self.look_for_alarms().await;
            tell("look after claims", self.look_after_claims().await);
            tell("keep machines ready", self.keep_pools().await);
            tell("look after lost hosts", self.look_after_lost_hosts().await);
            tell("compare wanted and actual state", self.reconcile().await);
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
            if is_fine && !is_behind && !self.is_left_off(&seen) {
                continue;
            }
            is_well = false;
            // Somebody who holds the lock is changing the machine right now: look again at the next tick.
            let Some(turn) = self.try_lock(seen.uuid) else { continue };
            let Ok(record) = self.record_of(seen.uuid, &seen.name).await else { continue };
            let active = self.active(record.uuid);
            match verdict(record.wanted, record.state, active.is_some()) {
                Verdict::Fine => match active {
                    Some(active) => self.catch_up(record, &active).await?,
                    None if self.is_left_off(&record) => {
                        // One that has a reason may be off for that alone.
                        let why = record.reason.clone().unwrap_or_else(|| BROKE_OFF.to_owned());
                        self.not_started_again(record, &why).await?;
                    }
                    None => {}
                },
                // Noted when it is started again.
                Verdict::Lost if self.is_unrecorded_restart(&record) => {}
                Verdict::Lost => {
                    tracing::error!(machine = %record.name, "it is noted as {} and is not on", record.state);
                    let how = format!("it ended while it was {}, and that could not be noted", record.state);
                    self.mark_lost(record, &how).await?;
                }
                Verdict::StopIt => {
                    drop(turn);
                    tracing::warn!(machine = %record.name, "it is on and should be off; stopping it");
                    self.stop_record(record, true, &Caller::daemon()).await?;
                }
            }
        }
        self.has_compared(look, is_well);
        Ok(())
    }
}

/// Logs why something did not work that is tried again at each tick. That the database is away is in the log already.
fn tell(what: &str, outcome: Result<(), impl Explain>) {
    if let Err(error) = outcome
        && error.retry_after_s().is_none()
    {
        tracing::error!("cannot {what}: {error}");
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
            // Wanted and not on: said, and never restarted silently.
            assert_eq!(verdict(Wanted::Running, state, false), Verdict::Fine);
            assert_eq!(verdict(Wanted::Stopped, state, false), Verdict::Fine);
            assert_eq!(verdict(Wanted::Stopped, state, true), Verdict::StopIt);
        }
    }
}
