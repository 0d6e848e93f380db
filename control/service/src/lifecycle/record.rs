//! Reads a machine's record from the database, saves it together with the event about the change in one transaction, and makes views of
//! it: machines as clients see them. All of `lifecycle` uses it. It also takes a machine's lock (`turn_of`).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use headwater_api::platform::Display;
use headwater_api::{BootFrom, ImageVersion, Machine, MachineState};
use headwater_db::{DbError, MachineRecord, PersistentDisk, Purpose};
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::lifecycle::boot::{KEPT_TPM_END, KEPT_VARIABLES_END};
use crate::lifecycle::{Active, LifecycleError};

/// Combines two reasons.
pub(super) fn joined(one: Option<String>, other: Option<String>) -> Option<String> {
    match (one, other) {
        (Some(one), Some(other)) => Some(format!("{one}; {other}")),
        (one, other) => one.or(other),
    }
}

impl Service {
    /// The record of a machine; an error if it does not exist.
    pub(crate) async fn record(&self, name: &str) -> Result<MachineRecord, LifecycleError> {
        let found = self.db().read().await?.machines().by_name(name).await?;
        found.ok_or_else(|| LifecycleError::Unknown(name.to_owned()))
    }

    /// A machine that is on, and its UUID. The database, which may be unavailable, is asked only about machines that are
    /// not on.
    pub(crate) async fn on(
        &self,
        what: &'static str,
        name: &str,
    ) -> Result<(Uuid, Arc<Active>), LifecycleError> {
        let named =
            |(uuid, active): (&Uuid, &Arc<Active>)| (active.name == name).then(|| (*uuid, active.clone()));
        if let Some(found) = self.active_map().iter().find_map(named) {
            return Ok(found);
        }
        let record = self.record(name).await?;
        match self.active(record.uuid) {
            Some(active) => Ok((record.uuid, active)),
            None => {
                let state = record.state.name();
                Err(LifecycleError::NotOn { what, machine: name.to_owned(), state })
            }
        }
    }

    /// The same, of a machine that was looked up before: another one may have its name by now.
    pub(crate) async fn still_on(
        &self,
        what: &'static str,
        uuid: Uuid,
        name: &str,
    ) -> Result<Arc<Active>, LifecycleError> {
        if let Some(active) = self.active(uuid) {
            return Ok(active);
        }
        let state = self.record_of(uuid, name).await?.state.name();
        Err(LifecycleError::NotOn { what, machine: name.to_owned(), state })
    }

    /// The record of a machine that was looked up before.
    pub(crate) async fn record_of(&self, uuid: Uuid, name: &str) -> Result<MachineRecord, LifecycleError> {
        let found = self.db().read().await?.machines().by_uuid(uuid).await?;
        found.ok_or_else(|| LifecycleError::Unknown(name.to_owned()))
    }

    /// Locks the machine that has this name now, and reads its record under the lock. If it is removed meanwhile it is
    /// unknown, even if another machine then has its name, because that has another lock.
    pub(crate) async fn turn_of(
        &self,
        name: &str,
    ) -> Result<(OwnedMutexGuard<()>, MachineRecord), LifecycleError> {
        let uuid = self.record(name).await?.uuid;
        let turn = self.lock(uuid).await;
        Ok((turn, self.record_of(uuid, name).await?))
    }

    /// Fails for a machine that the daemon does not run itself.
    pub(crate) fn is_vm(what: &'static str, record: &MachineRecord) -> Result<(), LifecycleError> {
        match record.boot {
            BootFrom::Vm => Ok(()),
            BootFrom::Network => Err(LifecycleError::Target { what, machine: record.name.clone() }),
        }
    }

    /// Saves the changed state and its event in one transaction.
    pub(crate) async fn save(
        &self,
        record: &MachineRecord,
        caller: &Caller,
        action: &'static str,
        detail: impl Into<String>,
    ) -> Result<(), LifecycleError> {
        let detail = detail.into();
        tracing::info!(machine = %record.name, state = %record.state, caller = %caller.principal, action, "{detail}");
        let event = self.event(caller, format!("machine {}", record.name), action, detail);
        let mut repo = self.db().write().await?;
        if !repo.machines().update_state(record).await? {
            return Err(LifecycleError::Unknown(record.name.clone()));
        }
        repo.events().append(event).await?;
        Ok(repo.save().await?)
    }

    /// A machine as clients see it.
    pub(crate) fn view(&self, record: MachineRecord) -> Machine {
        let active = self.active(record.uuid);
        let scheme_old = record.has_old_scheme();
        let has_screen = active.is_some() && record.platform.display != Display::None;
        let display_socket = has_screen
            .then(|| self.hypervisor().display_socket(&self.run_dir(&record.name)).display().to_string());
        Machine {
            warning: None,
            fenced: record.fenced,
            alarm: self.alarm_of(&record),
            disk: active.as_ref().map(|active| active.counters()),
            pid: active.as_ref().map(|active| active.vm.pid()),
            accelerator: active.as_ref().map(|active| active.vm.accelerator()),
            name: record.name,
            uuid: record.uuid,
            host: None,
            connection: record.connection,
            cloud: record.cloud,
            mac: record.mac,
            boot: record.boot,
            image: record.image,
            pin: record.pin.or(record.catalog_pin),
            catalog: record.catalog,
            version: record.version,
            claimed_for: None,
            scheme: record.scheme,
            scheme_old,
            next_version: None,
            old: false,
            kept: record.kept,
            edits: None,
            cache: record.cache,
            transport: record.transport,
            memory_bytes: record.memory_bytes,
            cpus: record.cpus,
            display_socket,
            firmware: record.platform.firmware,
            secure_boot: record.platform.secure_boot,
            tpm: record.platform.tpm,
            display: record.platform.display,
            network: record.platform.network,
            scratch_bytes: record.platform.scratch_bytes,
            wanted: record.wanted,
            state: record.state,
            reason: record.reason,
            boot_ms: record.boot_ms,
            started_at_ms: record.started_at_ms,
            created_at_ms: record.created_at_ms,
            identity: record.identity,
        }
    }

    /// Machines as clients see them, with what each would boot now.
    pub(crate) async fn views(&self, records: Vec<MachineRecord>) -> Result<Vec<Machine>, DbError> {
        let mut seen = self.seen_on_nodes(&records).await?;
        let kept = self.db().read().await?.persistent_disks().list().await?;
        let mut holders = self.holders().await?;
        // All references are resolved at the same time.
        let references: HashSet<&str> = records.iter().map(MachineRecord::reference).collect();
        let views = references.into_iter().map(|reference| {
            let version = self.version_to_show(reference);
            let reference = reference.to_owned();
            async move { (reference, version.await) }
        });
        let known: HashMap<String, Option<ImageVersion>> = join_all(views).await.into_iter().collect();
        let mut views = Vec::new();
        for record in records {
            let next = known.get(record.reference()).cloned().flatten();
            let disk = |purpose| kept.iter().find(|it| it.machine == record.uuid && it.purpose == purpose);
            let (edit, own) = (disk(Purpose::MaintenanceSession), disk(Purpose::Persistent));
            let own = own.filter(|_| record.cache.persistent);
            let running = self.active(record.uuid).map(|active| active.version_hash.clone());
            let has = running.or_else(|| own.map(|disk| disk.hash.clone()));
            // Off without a persistent disk: the last version is shown beside the next one.
            let last = record.version.clone();
            let host = record.host;
            let mut view = self.view(record);
            if let Some(next) = next {
                let number = format!("{}@{}", next.image, next.number);
                let differs =
                    has.map_or_else(|| last.is_some_and(|last| last != number), |has| has != next.hash);
                view.old = edit.is_none() && differs;
                view.next_version = Some(number);
            }
            if let Some(disk) = edit.or(own) {
                view.next_version = Some(disk.below());
            }
            view.claimed_for = holders.remove(&view.uuid);
            view.kept = own.map(PersistentDisk::below).or(view.kept);
            view.edits = edit.map(PersistentDisk::below);
            seen.complete(host, &mut view);
            views.push(view);
        }
        Ok(views)
    }

    /// One machine, as [`Service::views`] shows it.
    pub(crate) async fn full_view(&self, record: MachineRecord) -> Result<Machine, LifecycleError> {
        let name = record.name.clone();
        self.views(vec![record]).await?.pop().ok_or(LifecycleError::Unknown(name))
    }

    /// The view of a machine that was just changed. If it cannot be read completely this is not an error, because the
    /// client must not repeat the change.
    pub(crate) async fn changed_view(&self, record: MachineRecord) -> Machine {
        self.full_view(record.clone()).await.unwrap_or_else(|error| {
            tracing::warn!(
                machine = record.name,
                "cannot determine what a machine boots next: {}",
                problem(&error)
            );
            self.view(record)
        })
    }

    /// Closes the disk of a machine whose VM ended, unless that was done before, and saves the new state.
    pub(crate) async fn switched_off(
        &self,
        record: &mut MachineRecord,
        caller: &Caller,
        state: MachineState,
        reason: Option<String>,
        detail: impl Into<String>,
    ) -> Result<(), LifecycleError> {
        let unsaved = self.put_away(record.uuid, &record.name).await;
        record.state = state;
        record.reason = joined(reason, unsaved);
        self.save(record, caller, "state", detail).await
    }

    /// Removes a machine from the ones that are on, closes its disk and removes its sockets. Its VM has ended. Returns
    /// an error of the disk, which is also in the history.
    pub(crate) async fn put_away(&self, uuid: Uuid, name: &str) -> Option<String> {
        let unsaved = self.close_disk(uuid, name).await?;
        let event = self.event(&Caller::daemon(), format!("machine {name}"), "not saved", unsaved.clone());
        self.note(event).await;
        Some(unsaved)
    }

    /// The same if the disk is discarded, so that an error of the disk does not matter.
    pub(crate) async fn put_away_forgotten(&self, uuid: Uuid, name: &str) {
        self.close_disk(uuid, name).await;
    }

    async fn close_disk(&self, uuid: Uuid, name: &str) -> Option<String> {
        let active = self.active_map().remove(&uuid);
        let closed = match active {
            Some(active) => {
                self.note_run(&active);
                active.disk.close().await
            }
            None => Ok(()),
        };
        self.remove_sockets(name).await;
        // The machine is off anyway.
        let unsaved = problem(&closed.err()?).to_string();
        tracing::error!(machine = %name, "closing the disk of a machine failed: {unsaved}");
        Some(unsaved)
    }

    /// Removes the files in a machine's directory, except its logs, and files that belong to a
    /// persistent disk.
    pub(crate) async fn remove_sockets(&self, machine: &str) {
        self.remove_files(machine, |is_log| !is_log).await;
    }

    /// Removes the logs of a machine that is off.
    pub(crate) async fn remove_logs(&self, machine: &str) {
        self.remove_files(machine, |is_log| is_log).await;
    }

    async fn remove_files(&self, machine: &str, go: impl Fn(bool) -> bool) {
        let Ok(mut entries) = tokio::fs::read_dir(self.run_dir(machine)).await else { return };
        while let Ok(Some(entry)) = entries.next_entry().await {
            let name = entry.file_name();
            let is_log = [&b".log"[..], b".log.old"].iter().any(|end| name.as_encoded_bytes().ends_with(end));
            let is_kept = [KEPT_VARIABLES_END, KEPT_TPM_END]
                .iter()
                .any(|end| name.as_encoded_bytes().ends_with(end.as_bytes()));
            if go(is_log) && !is_kept {
                // A file that cannot be removed now is replaced at the next start.
                let _ = tokio::fs::remove_file(entry.path()).await;
            }
        }
    }

    /// Takes a sample of every active disk's counters.
    pub(crate) fn sample_rates(&self) {
        let now = Instant::now();
        let all: Vec<_> = self.active_map().values().cloned().collect();
        for active in all {
            active.sample(now);
        }
    }
}
