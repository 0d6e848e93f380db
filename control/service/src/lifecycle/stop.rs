//! Stops, resets and removes machines, for the operations, for tasks, and at the end of the daemon. A stop that waits for a guest can be
//! interrupted by a forced one. The end of a VM that nobody requested is handled in `watch.rs`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_api::{MachineState, Wanted};
use headwater_db::{MachineRecord, PersistentDisk, Purpose};
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::Service;
use crate::answer::{Explain, problem};
use crate::backend::VmExit;
use crate::caller::Caller;
use crate::lifecycle::record::joined;
use crate::lifecycle::restart::DAEMON_ENDED;
use crate::lifecycle::start::StartReason;
use crate::lifecycle::{Active, LifecycleError, STOP_GRACE_MS};

/// How long a stop waits for the database before it continues anyway. Many concurrent writers wait for each other and for
/// the disk.
const RECORD_TIMEOUT: Duration = Duration::from_secs(10);

impl Service {
    /// Stops a machine: asks the guest, and kills it after the grace time, or at once with `force`. A machine that
    /// is off stays off. Its disk is discarded unless it is persistent.
    pub(crate) async fn stop(
        &self,
        name: &str,
        force: bool,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        let record = self.record(name).await?;
        if force && !self.is_own(&record) && record.connection.is_none() {
            // Another call may hold its lock and wait for the guest.
            return self.change_remote(record, "stop", "stop?force=true", caller).await;
        }
        self.stop_record(record, force, caller).await
    }

    /// The same for a machine that was looked up.
    pub(super) async fn stop_record(
        &self,
        record: MachineRecord,
        force: bool,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        let (name, uuid) = (record.name, record.uuid);
        let _turn = if force {
            self.lock_by_killing("stop", &name, uuid, caller).await?
        } else {
            self.lock(uuid).await
        };
        let record = self.record_of(uuid, &name).await?;
        if record.to_start
            && let Err(error) = self.stays_off(uuid).await
        {
            not_noted(&name, &error);
        }
        if record.connection.is_some() {
            return self.stop_in_cloud(record, caller).await;
        }
        if !self.is_own(&record) {
            let how = if force { "stop?force=true" } else { "stop" };
            return self.change_remote(record, "stop", how, caller).await;
        }
        self.stop_locked(record, force, caller).await
    }

    /// The same if the caller holds its lock.
    pub(crate) async fn stop_locked(
        &self,
        record: MachineRecord,
        force: bool,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        self.stop_for(record, force, caller, Wanted::Stopped).await
    }

    /// Locks the machine for a forced stop. If another task holds the lock, which may wait for the guest, the VM is
    /// ended first; the history records the caller before that. The VM is ended even if the history cannot be written.
    async fn lock_by_killing(
        &self,
        what: &'static str,
        name: &str,
        uuid: Uuid,
        caller: &Caller,
    ) -> Result<OwnedMutexGuard<()>, LifecycleError> {
        if let Some(turn) = self.try_lock(uuid) {
            return Ok(turn);
        }
        if let Some(active) = self.active(uuid) {
            let event = self.event(caller, format!("machine {name}"), what, "by force".to_owned());
            if what == "stop" {
                recorded_in_time(name, self.append(event)).await;
            } else {
                self.append(event).await?;
            }
            active.vm.kill().await.map_err(LifecycleError::backend(what, name))?;
        }
        Ok(self.lock_by_force(uuid).await)
    }

    /// Stops a machine, and sets its wanted state, which is `Running` if only the daemon ends.
    async fn stop_for(
        &self,
        mut record: MachineRecord,
        force: bool,
        caller: &Caller,
        wanted: Wanted,
    ) -> Result<MachineRecord, LifecycleError> {
        let Some(active) = self.active(record.uuid) else {
            if record.wanted != Wanted::Stopped {
                record.wanted = Wanted::Stopped;
                if record.state == MachineState::Stopped || self.is_unrecorded_restart(&record) {
                    record.state = MachineState::Stopped;
                    // The reason said that the machine is restarted, which is not true any more.
                    record.reason = None;
                }
                let detail = if force { "it is off" } else { "it was off already" };
                self.save(&record, caller, "stop", detail).await?;
            }
            return Ok(record);
        };
        let is_left_wanted = wanted == Wanted::Running && record.wanted == Wanted::Running;
        if !is_left_wanted {
            record.wanted = Wanted::Stopped;
        }
        record.state = MachineState::Stopping;
        let how = if force { "by force" } else { "by ACPI" };
        // On a full disk, the machine's own writes may be the reason why this cannot be recorded.
        let is_noted = recorded_in_time(&record.name, self.save(&record, caller, "stop", how)).await;
        let grace = if force { Duration::ZERO } else { Duration::from_millis(STOP_GRACE_MS) };
        let asked_at = Instant::now();
        let exit = active.vm.stop(grace).await.map_err(LifecycleError::backend("stop", &record.name))?;
        let reason = (exit == VmExit::Killed && !force).then(|| match asked_at.elapsed() {
            waited if waited < grace => {
                format!("it was killed {} s after it was asked to shut down", waited.as_secs())
            }
            _ => format!("it did not shut down within {} s and was killed", grace.as_secs()),
        });
        let mut unsaved = None;
        if !is_noted {
            unsaved = self.put_away(record.uuid, &record.name).await;
            if let Err(e) = self.save(&record, caller, "stop", how).await {
                not_noted(&record.name, &e);
            }
        }
        let detail = reason.clone().unwrap_or_else(|| "it is off".to_owned());
        let reason = joined(joined(reason, unsaved), is_left_wanted.then(|| DAEMON_ENDED.to_owned()));
        match self.switched_off(&mut record, caller, MachineState::Stopped, reason, detail).await {
            Err(LifecycleError::Db(source)) => {
                Err(LifecycleError::OffNotNoted { machine: record.name, source })
            }
            outcome => outcome.map(|()| record),
        }
    }

    /// Gives a machine a pristine disk, even if its disk is persistent. A machine that is on is switched off like by its
    /// reset button and restarted; so is one that waits for its restart because its guest rebooted.
    pub(crate) async fn reset(&self, name: &str, caller: &Caller) -> Result<MachineRecord, LifecycleError> {
        let (_turn, mut record) = self.turn_of(name).await?;
        if record.connection.is_some() {
            return self.reset_in_cloud(record, caller).await;
        }
        if !self.is_own(&record) {
            return self.change_remote(record, "reset", "reset", caller).await;
        }
        let uuid = record.uuid;
        Self::is_vm("reset", &record)?;
        self.not_in_maintenance("reset", &record).await?;
        let kept = self.persistent_disk(uuid, Purpose::Persistent).await?;
        if let Some(kept) = &kept
            && self.is_sealing(kept.id)
        {
            return Err(LifecycleError::BeingSealed { what: "reset", machine: record.name });
        }
        let active = self.active(uuid);
        // If its guest rebooted, it is off only until its restart.
        let is_restarting = record.wanted == Wanted::Running && self.is_restarting(uuid);
        if active.is_none() && !is_restarting {
            record.state =
                if record.state == MachineState::Created { record.state } else { MachineState::Stopped };
            record.wanted = Wanted::Stopped;
            record.reason = None;
            self.forget_for_reset(&record, kept.as_ref(), caller).await?;
            return Ok(record);
        }
        // Check the store first: if it does not answer, the machine stays as it is.
        self.version_of("reset", &record, record.reference()).await?;
        if active.is_none() {
            record.state = MachineState::Stopped;
            record.reason = None;
        }
        self.save(&record, caller, "reset", "its disk is discarded and it restarts").await?;
        self.reset_to_start(record, active, kept, caller).await.map_err(|e| match e {
            LifecycleError::Db(source) => LifecycleError::OffNotReset { machine: name.to_owned(), source },
            e => e,
        })
    }

    /// The steps of a reset after it was recorded. If the database fails in between, the machine is off.
    async fn reset_to_start(
        &self,
        mut record: MachineRecord,
        active: Option<Arc<Active>>,
        kept: Option<PersistentDisk>,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        if let Some(active) = active {
            self.kill_locked(&active, &mut record, caller, "reset").await?;
        }
        if let Some(kept) = kept {
            self.forget_persistent(&kept, None).await?;
        }
        self.start_locked(record, caller, StartReason::Reset).await
    }

    /// Discards the disk of a machine that is off, together with the event that names the caller.
    async fn forget_for_reset(
        &self,
        record: &MachineRecord,
        kept: Option<&PersistentDisk>,
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        let detail = "its disk is pristine at its next start";
        let event = self.event(caller, format!("machine {}", record.name), "reset", detail.to_owned());
        let mut repo = self.db().write().await?;
        if !repo.machines().update_state(record).await? {
            return Err(LifecycleError::Unknown(record.name.clone()));
        }
        // It stays off, also if it was moved and was to be started.
        repo.machines().is_started(record.uuid).await?;
        if let Some(kept) = kept {
            repo.persistent_disks().remove(kept.id).await?;
        }
        repo.events().append(event).await?;
        repo.save().await?;
        tracing::info!(machine = %record.name, caller = %caller.principal, "reset: {detail}");
        if let Some(kept) = kept {
            self.discard_files(kept).await;
            self.release_disk(kept).await;
        }
        Ok(())
    }

    /// Removes a machine that is off; with `force` also a machine that is on.
    pub(crate) async fn remove(
        &self,
        name: &str,
        force: bool,
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        let seen = self.record(name).await?;
        let uuid = seen.uuid;
        if self.is_own(&seen) {
            // Checked first, so that nothing is killed that is not removed then.
            self.check_removable(&seen).await?;
        }
        let _turn = if force {
            self.lock_by_killing("remove", name, uuid, caller).await?
        } else {
            self.lock(uuid).await
        };
        let mut record = self.record_of(uuid, name).await?;
        if record.connection.is_some() {
            return self.remove_in_cloud(record, force, caller).await;
        }
        if !self.is_own(&record) {
            return self.remove_remote(record, force, caller).await;
        }
        // Check again: another task may have begun a maintenance session or a seal meanwhile.
        let kept = self.check_removable(&record).await?;
        if !force && let Some(state) = self.state_if_not_off(&record) {
            return Err(LifecycleError::NotOff { machine: record.name, state });
        }
        if let Some(active) = self.active(uuid) {
            record.wanted = Wanted::Stopped;
            self.save(&record, caller, "remove", "by force").await?;
            self.kill_locked(&active, &mut record, caller, "remove").await?;
        }
        // Before the name is free, because then the directory may belong to another machine.
        self.remove_sockets(name).await;
        self.remove_logs(name).await;
        let mut repo = self.db().write().await?;
        if let Some(kept) = &kept {
            repo.persistent_disks().remove(kept.id).await?;
        }
        repo.machines().remove(uuid).await?;
        let event = self.event(caller, format!("machine {name}"), "removed", format!("{uuid}"));
        repo.events().append(event).await?;
        repo.save().await?;
        tracing::info!(machine = %name, caller = %caller.principal, "removed");
        self.is_fenced(uuid, name, false).await;
        self.roots_changed();
        if let Some(kept) = &kept {
            // Only now: without these files, a machine that stays could not read its disk. Their names are those of the
            // disk.
            let _ = tokio::fs::remove_file(self.kept_variables(name, kept)).await;
            let _ = tokio::fs::remove_dir_all(self.kept_tpm(name, kept)).await;
        }
        // Fails if it already has files of another machine of this name.
        let _ = tokio::fs::remove_dir(self.run_dir(name)).await;
        if let Some(kept) = &kept {
            self.discard_files(kept).await;
            self.release_disk(kept).await;
        }
        self.forget_lock(uuid);
        Ok(())
    }

    /// The persistent disk that is removed with a machine. Fails if the machine has a maintenance session, or its disk is
    /// being sealed.
    async fn check_removable(
        &self,
        record: &MachineRecord,
    ) -> Result<Option<PersistentDisk>, LifecycleError> {
        self.not_in_maintenance("remove", record).await?;
        let kept = self.persistent_disk(record.uuid, Purpose::Persistent).await?;
        if kept.as_ref().is_some_and(|kept| self.is_sealing(kept.id)) {
            return Err(LifecycleError::BeingSealed { what: "remove", machine: record.name.clone() });
        }
        Ok(kept)
    }

    async fn kill_locked(
        &self,
        active: &Arc<Active>,
        record: &mut MachineRecord,
        caller: &Caller,
        what: &'static str,
    ) -> Result<(), LifecycleError> {
        active.vm.stop(Duration::ZERO).await.map_err(LifecycleError::backend(what, &record.name))?;
        self.put_away_forgotten(record.uuid, &record.name).await;
        self.switched_off(record, caller, MachineState::Stopped, None, format!("killed to {what}")).await
    }

    /// Whether a machine is on.
    pub fn has_machines_on(&self) -> bool {
        !self.active_map().is_empty()
    }

    /// Waits until the VMs of all machines that are on now have ended, so that nothing uses their disks. The machines
    /// are collected at the call, not at the first poll.
    pub fn vms_ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let active: Vec<_> = self.active_map().values().cloned().collect();
        async move {
            for machine in active {
                machine.vm.exited().await;
            }
        }
    }

    async fn stop_for_the_end(&self, machine: &MachineRecord, force: bool) -> Result<(), LifecycleError> {
        if force && let Some(active) = self.active(machine.uuid) {
            active.vm.kill().await.map_err(LifecycleError::backend("stop", &machine.name))?;
        }
        // Another task with its lock may be starting it. After the daemon began to stop, no new start begins.
        let _turn =
            if force { self.lock_by_force(machine.uuid).await } else { self.lock(machine.uuid).await };
        let is_on = self.active(machine.uuid).is_some();
        if !is_on && force {
            // If another task has stopped it, the database may be closed by now.
            return Ok(());
        }
        let read = async { self.db().read().await?.machines().by_uuid(machine.uuid).await };
        match (read.await, self.active(machine.uuid)) {
            (Ok(Some(record)), Some(_)) => {
                self.stop_for(record, force, &Caller::daemon(), Wanted::Running).await.map(drop)
            }
            (Ok(Some(record)), None) => self.record_not_restarted(record, DAEMON_ENDED).await,
            (Ok(None), _) => Ok(()),
            (Err(e), Some(active)) => {
                tracing::error!(
                    "cannot read the record of machine '{}', which is stopped anyway: {}",
                    machine.name,
                    problem(&e)
                );
                self.stop_active(machine.uuid, &active).await
            }
            (Err(e), None) => Err(e.into()),
        }
    }

    /// Stops a machine whose record cannot be read, so that its guest can write its data. The
    /// record does not change, and the next daemon finds the machine lost.
    async fn stop_unread(&self, uuid: Uuid, active: &Active, force: bool) -> Result<(), LifecycleError> {
        if force {
            active.vm.kill().await.map_err(LifecycleError::backend("stop", &active.name))?;
        }
        let _turn = if force { self.lock_by_force(uuid).await } else { self.lock(uuid).await };
        match self.active(uuid) {
            Some(active) => self.stop_active(uuid, &active).await,
            None => Ok(()),
        }
    }

    /// Stops a machine that is on, without recording it. The caller holds its lock.
    async fn stop_active(&self, uuid: Uuid, active: &Active) -> Result<(), LifecycleError> {
        let grace = Duration::from_millis(STOP_GRACE_MS);
        active.vm.stop(grace).await.map_err(LifecycleError::backend("stop", &active.name))?;
        self.put_away(uuid, &active.name).await;
        Ok(())
    }

    /// Stops all machines of this host at the same time, including those that are being started. Called when the daemon
    /// ends and must not leave machines on. With `force`, also interrupts stops that wait for guests.
    pub async fn stop_all(&self, force: bool) {
        let stops: Vec<_> = match self.own_machines().await {
            Ok(machines) => machines
                .into_iter()
                .map(|machine| {
                    let service = self.clone();
                    spawn_stop(machine.name.clone(), async move {
                        service.stop_for_the_end(&machine, force).await
                    })
                })
                .collect(),
            Err(e) => {
                let on: Vec<_> = self.active_map().iter().map(|(uuid, it)| (*uuid, it.clone())).collect();
                // A repeated call after all machines are off finds the database closed.
                if !on.is_empty() {
                    tracing::error!(
                        "cannot list the machines to stop, so only those that are on are stopped: {}",
                        problem(&e)
                    );
                }
                on.into_iter()
                    .map(|(uuid, active)| {
                        let service = self.clone();
                        spawn_stop(active.name.clone(), async move {
                            service.stop_unread(uuid, &active, force).await
                        })
                    })
                    .collect()
            }
        };
        for stop in stops {
            // A thread that panicked has reported that itself.
            let _ = stop.await;
        }
    }
}

/// Stops one machine concurrently with others, even if nobody waits any more.
fn spawn_stop(
    machine: String,
    stop: impl Future<Output = Result<(), LifecycleError>> + Send + 'static,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        if let Err(e) = stop.await {
            tracing::error!(%machine, "{}", problem(&e));
        }
    })
}

/// Waits until a stop is recorded, with a timeout. After it, the stop continues, and is recorded later: it frees space,
/// and a guest that is not shut down loses data.
async fn recorded_in_time<E: Explain + 'static>(
    machine: &str,
    noting: impl Future<Output = Result<(), E>>,
) -> bool {
    match tokio::time::timeout(RECORD_TIMEOUT, noting).await {
        Ok(Ok(())) => return true,
        Ok(Err(e)) => not_noted(machine, &e),
        Err(_) => {
            let seconds = RECORD_TIMEOUT.as_secs();
            tracing::error!(
                machine,
                "a machine is being stopped, but that could not be recorded within {seconds} s"
            );
        }
    }
    false
}

fn not_noted(machine: &str, error: &(impl Explain + 'static)) {
    tracing::error!(
        machine,
        "a machine is being stopped, but that cannot be recorded now: {}",
        problem(error)
    );
}
