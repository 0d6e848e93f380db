//! Stopping, resetting and removing a machine.

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

/// How long a stop waits until it is noted before it is done all the same: many at once take turns, and each waits for the disk.
const NOTE_PATIENCE: Duration = Duration::from_secs(10);

impl Service {
    /// Stops a machine: asks the guest, and kills it after the grace time, or at once with `force`. One that
    /// is off stays off. What it wrote is forgotten, unless its disk is kept.
    pub(crate) async fn stop(
        &self,
        name: &str,
        force: bool,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        let record = self.record(name).await?;
        if force && !self.is_own(&record) {
            // Another call may have its turn, and wait for the guest.
            return self.change_remote(record, "stop", "stop?force=true", caller).await;
        }
        self.stop_record(record, force, caller).await
    }

    /// The same of a machine that was looked up.
    pub(super) async fn stop_record(
        &self,
        record: MachineRecord,
        force: bool,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        let (name, uuid) = (record.name, record.uuid);
        let _turn = if force {
            self.turn_by_force("stop", &name, uuid, caller).await?
        } else {
            self.lock(uuid).await
        };
        let record = self.record_of(uuid, &name).await?;
        if record.to_start
            && let Err(error) = self.stays_off(uuid).await
        {
            not_noted(&name, &error);
        }
        if !self.is_own(&record) {
            let how = if force { "stop?force=true" } else { "stop" };
            return self.change_remote(record, "stop", how, caller).await;
        }
        self.stop_locked(record, force, caller).await
    }

    /// The same of one whose turn the caller has.
    pub(crate) async fn stop_locked(
        &self,
        record: MachineRecord,
        force: bool,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        self.stop_for(record, force, caller, Wanted::Stopped).await
    }

    /// The machine's turn. Where somebody else has it, who may be waiting for the guest, the VM is ended first; who wanted
    /// that is in the history before. A stop ends it also where that cannot be written.
    async fn turn_by_force(
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
                noted_in_time(name, self.append(event)).await;
            } else {
                self.append(event).await?;
            }
            active.vm.kill().await.map_err(LifecycleError::backend(what, name))?;
        }
        Ok(self.lock_by_force(uuid).await)
    }

    /// Stops a machine, after which this is wanted of it: it is to be on again where the daemon ends.
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
                    // It said that the machine is started again.
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
        // On a full disk it may be the machine's own writes that leave no room to note this.
        let is_noted = noted_in_time(&record.name, self.save(&record, caller, "stop", how)).await;
        let grace = if force { Duration::ZERO } else { Duration::from_millis(STOP_GRACE_MS) };
        let asked_at = Instant::now();
        let exit = active.vm.stop(grace).await.map_err(LifecycleError::backend("stop", &record.name))?;
        let reason = (exit == VmExit::Killed && !force).then(|| match asked_at.elapsed() {
            waited if waited < grace => {
                format!("it was killed {} s after it was asked to switch itself off", waited.as_secs())
            }
            _ => format!("it did not switch itself off within {} s and was killed", grace.as_secs()),
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

    /// Gives a machine its pristine disk, also one whose disk is kept: one that is on is switched off like by its
    /// reset button, and started again, and so is one that waits for that because its guest restarted.
    pub(crate) async fn reset(&self, name: &str, caller: &Caller) -> Result<MachineRecord, LifecycleError> {
        let (_turn, mut record) = self.turn_of(name).await?;
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
        // One whose guest restarted is off only until it is started again.
        let is_restarting = record.wanted == Wanted::Running && self.is_restarting(uuid);
        if active.is_none() && !is_restarting {
            record.state =
                if record.state == MachineState::Created { record.state } else { MachineState::Stopped };
            record.wanted = Wanted::Stopped;
            record.reason = None;
            self.forget_for_reset(&record, kept.as_ref(), caller).await?;
            return Ok(record);
        }
        // Where the store does not answer, it is better off as it is.
        self.version_of("reset", &record, record.reference()).await?;
        if active.is_none() {
            record.state = MachineState::Stopped;
            record.reason = None;
        }
        self.save(&record, caller, "reset", "its disk is forgotten and it starts again").await?;
        self.reset_to_start(record, active, kept, caller).await.map_err(|e| match e {
            LifecycleError::Db(source) => LifecycleError::OffNotReset { machine: name.to_owned(), source },
            e => e,
        })
    }

    /// The steps of a reset that is noted: where the database fails in one of them, the machine is off.
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

    /// Forgets the disk of a machine that is off, together with the event that says who wanted that: nothing of it comes back.
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

    /// Removes a machine that is off; with `force` also one that is on.
    pub(crate) async fn remove(
        &self,
        name: &str,
        force: bool,
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        let seen = self.record(name).await?;
        let uuid = seen.uuid;
        if self.is_own(&seen) {
            // First, as nothing is to be killed that is not removed then.
            self.may_go(&seen).await?;
        }
        let _turn = if force {
            self.turn_by_force("remove", name, uuid, caller).await?
        } else {
            self.lock(uuid).await
        };
        let mut record = self.record_of(uuid, name).await?;
        if !self.is_own(&record) {
            return self.remove_remote(record, force, caller).await;
        }
        // Again: whoever had the turn may have begun an edit or a version.
        let kept = self.may_go(&record).await?;
        if !force && let Some(state) = self.not_off(&record) {
            return Err(LifecycleError::NotOff { machine: record.name, state });
        }
        if let Some(active) = self.active(uuid) {
            record.wanted = Wanted::Stopped;
            self.save(&record, caller, "remove", "by force").await?;
            self.kill_locked(&active, &mut record, caller, "remove").await?;
        }
        // While the name is this machine's: once it is free, the directory may be that of another one.
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
            // Only now: without them, a machine that stays could not read its disk. Their names are those of the disk.
            let _ = tokio::fs::remove_file(self.kept_variables(name, kept)).await;
            let _ = tokio::fs::remove_dir_all(self.kept_tpm(name, kept)).await;
        }
        // Fails if it has files of another machine of this name already.
        let _ = tokio::fs::remove_dir(self.run_dir(name)).await;
        if let Some(kept) = &kept {
            self.discard_files(kept).await;
            self.release_disk(kept).await;
        }
        self.forget_lock(uuid);
        Ok(())
    }

    /// The disk that goes with a machine. Refuses one that edits an image, or whose disk a version is being made of.
    async fn may_go(&self, record: &MachineRecord) -> Result<Option<PersistentDisk>, LifecycleError> {
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

    /// Waits until the VMs of all machines that are on now have ended: from then on nothing sees their disks. Asked before it is
    /// waited for.
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
        // Somebody who has its turn may be starting it. Once the daemon stops, nobody does so after that.
        let _turn =
            if force { self.lock_by_force(machine.uuid).await } else { self.lock(machine.uuid).await };
        let is_on = self.active(machine.uuid).is_some();
        if !is_on && force {
            // Where somebody else has stopped it, the database may be closed by now.
            return Ok(());
        }
        let read = async { self.db().read().await?.machines().by_uuid(machine.uuid).await };
        match (read.await, self.active(machine.uuid)) {
            (Ok(Some(record)), Some(_)) => {
                self.stop_for(record, force, &Caller::daemon(), Wanted::Running).await.map(drop)
            }
            (Ok(Some(record)), None) => self.not_started_again(record, DAEMON_ENDED).await,
            (Ok(None), _) => Ok(()),
            (Err(e), Some(active)) => {
                tracing::error!("cannot read what is noted of machine '{}', and stops it: {e}", machine.name);
                self.stop_active(machine.uuid, &active).await
            }
            (Err(e), None) => Err(e.into()),
        }
    }

    /// Stops a machine of which the database does not tell: its guest is to write out what it has all the same. What is
    /// noted of it stays as it is, and the next daemon finds it lost.
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

    /// Stops a machine that is on, and notes nothing. With its turn.
    async fn stop_active(&self, uuid: Uuid, active: &Active) -> Result<(), LifecycleError> {
        let grace = Duration::from_millis(STOP_GRACE_MS);
        active.vm.stop(grace).await.map_err(LifecycleError::backend("stop", &active.name))?;
        self.put_away(uuid, &active.name).await;
        Ok(())
    }

    /// Stops all machines of this host, at the same time, and those that are being started too. Called when the daemon ends
    /// and is not to leave them on. With `force` also while another call waits for guests that take their time.
    pub async fn stop_all(&self, force: bool) {
        let stops: Vec<_> =
            match self.own_machines().await {
                Ok(machines) => machines
                    .into_iter()
                    .map(|machine| {
                        let service = self.clone();
                        beside(machine.name.clone(), async move {
                            service.stop_for_the_end(&machine, force).await
                        })
                    })
                    .collect(),
                Err(e) => {
                    let on: Vec<_> = self.active_map().iter().map(|(uuid, it)| (*uuid, it.clone())).collect();
                    // Who asks again when all is off finds the database closed.
                    if !on.is_empty() {
                        tracing::error!("cannot list the machines to stop, and stops those that are on: {e}");
                    }
                    on.into_iter()
                        .map(|(uuid, active)| {
                            let service = self.clone();
                            beside(active.name.clone(), async move {
                                service.stop_unread(uuid, &active, force).await
                            })
                        })
                        .collect()
                }
            };
        for stop in stops {
            // A panic there was reported by its own thread.
            let _ = stop.await;
        }
    }
}

/// Stops one machine while others are stopped, also where nobody waits for that any more.
fn beside(
    machine: String,
    stop: impl Future<Output = Result<(), LifecycleError>> + Send + 'static,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        if let Err(e) = stop.await {
            tracing::error!(%machine, "{}", problem(&e));
        }
    })
}

/// Whether a stop could be noted. It is done all the same, and noted afterwards: it gives back room, and a guest that is not stopped
/// in order loses what it has not written out.
async fn noted_in_time<E: Explain + 'static>(
    machine: &str,
    noting: impl Future<Output = Result<(), E>>,
) -> bool {
    match tokio::time::timeout(NOTE_PATIENCE, noting).await {
        Ok(Ok(())) => return true,
        Ok(Err(e)) => not_noted(machine, &e),
        Err(_) => {
            let seconds = NOTE_PATIENCE.as_secs();
            tracing::error!(machine, "it is stopped, and that could not be noted within {seconds} s");
        }
    }
    false
}

fn not_noted(machine: &str, error: &(impl Explain + 'static)) {
    tracing::error!(machine, "it is stopped, and that cannot be noted now: {}", problem(error));
}
