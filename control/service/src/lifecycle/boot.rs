//! Decides what a machine boots: a version, and the disk over it. `start.rs` calls this, and opens the disk.
//!
//! | the machine | version | disk |
//! |---|---|---|
//! | in a maintenance session | the session's version | the session's private disk, until it is sealed or discarded |
//! | with a persistent write cache | the version of its first start, until a reset | its own persistent disk |
//! | any other | its pin, its catalog's pin, or the version to which its image resolves now | a fresh disk at each start |
//!
//! Names with "kept" are of what belongs to a persistent disk (the disk itself, firmware variables, TPM state): it is not discarded when
//! the machine stops.

use std::path::PathBuf;

use headwater_api::name::ImageRef;
use headwater_api::{CacheMode, CacheSettings, ImageVersion};
use headwater_db::{MachineRecord, NewEvent, PersistentDisk, Purpose};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::backend::{BackendError, PersistentDiskRef};
use crate::caller::Caller;
use crate::lifecycle::LifecycleError;

/// What a machine boots.
pub(crate) struct Boot {
    pub(crate) version: ImageVersion,
    pub(crate) cache: CacheSettings,
    /// The disk, if it is persistent.
    pub(crate) kept: Option<PersistentDisk>,
    /// Whether the disk was created for this start.
    pub(crate) begun: bool,
}

/// The ending of names of files with firmware variables that belong to a persistent disk.
pub(crate) const KEPT_VARIABLES_END: &str = ".kept-vars";

/// The ending of names of directories with TPM state that belong to a persistent disk.
pub(crate) const KEPT_TPM_END: &str = ".kept-tpm";

/// The disk with which a file or directory of this name is kept.
fn disk_of(name: &str) -> Option<Uuid> {
    let id = name.strip_suffix(KEPT_VARIABLES_END).or_else(|| name.strip_suffix(KEPT_TPM_END))?;
    Uuid::parse_str(id).ok()
}

/// A persistent disk as its opener knows it.
pub(crate) fn files_of(disk: &PersistentDisk) -> PersistentDiskRef {
    PersistentDiskRef { id: disk.id, is_begun: disk.is_begun }
}

impl Boot {
    /// The disk in words, for the history.
    pub(crate) fn in_words(&self) -> &'static str {
        match &self.kept {
            None => "",
            Some(_) if self.begun => ", on a new persistent disk",
            Some(kept) if kept.purpose == Purpose::MaintenanceSession => {
                ", on the private disk of its maintenance session"
            }
            Some(_) => ", on its persistent disk",
        }
    }
}

/// The write cache of a maintenance session: always persistent, so never without a disk.
pub(crate) fn session_cache(cache: CacheSettings) -> CacheSettings {
    let mode = if cache.mode == CacheMode::Ram { CacheMode::RamDisk } else { cache.mode };
    let disk_bytes =
        if cache.disk_bytes == 0 { CacheSettings::default_disk_bytes() } else { cache.disk_bytes };
    CacheSettings { mode, disk_bytes, persistent: true, ..cache }
}

impl Service {
    /// The write cache of the machine's present disk: that of a maintenance session may differ from the machine's settings.
    pub(crate) async fn cache_in_use(&self, record: &MachineRecord) -> Result<CacheSettings, LifecycleError> {
        let edit = self.persistent_disk(record.uuid, Purpose::MaintenanceSession).await?;
        Ok(if edit.is_some() { session_cache(record.cache) } else { record.cache })
    }

    /// Decides what a machine boots now. Creates its persistent disk if it should have one and does not.
    pub(crate) async fn what_to_boot(
        &self,
        record: &MachineRecord,
        caller: &Caller,
    ) -> Result<Boot, LifecycleError> {
        let disks = self.db().read().await?.persistent_disks().of_machine(record.uuid).await?;
        let find = |purpose| disks.iter().find(|disk| disk.purpose == purpose).cloned();
        if let Some(edit) = find(Purpose::MaintenanceSession) {
            self.not_sealed_yet(record, &edit, caller).await?;
            let cache = session_cache(record.cache);
            return self.boot_persistent(record, edit, cache).await;
        }
        if !record.cache.persistent {
            let version = self.version_of("start", record, record.reference()).await?;
            return Ok(Boot { version, cache: record.cache, kept: None, begun: false });
        }
        if let Some(kept) = find(Purpose::Persistent) {
            if self.is_sealing(kept.id) || self.may_have_run(record, &kept).await? {
                return self.boot_persistent(record, kept, record.cache).await;
            }
            // A start that failed left it.
            self.forget_persistent(&kept, None).await?;
        }
        let using = self.using_versions_for(record.uuid).await;
        let _using = using.map_err(LifecycleError::backend("start", &record.name))?;
        let version = self.version_of("start", record, record.reference()).await?;
        let kept = self.new_disk(record.uuid, Purpose::Persistent, &version, caller)?;
        self.retain_disk(&kept, &record.name)
            .await
            .map_err(LifecycleError::backend("start", &record.name))?;
        let mut repo = self.db().write().await?;
        repo.persistent_disks().add(&kept).await?;
        repo.save().await?;
        Ok(Boot { version, cache: record.cache, kept: Some(kept), begun: true })
    }

    /// Fails if a version was made of a session's disk, and ends the session: what the machine would write from
    /// now on would be in no version. The caller holds the machine's lock.
    async fn not_sealed_yet(
        &self,
        record: &MachineRecord,
        edit: &PersistentDisk,
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        if self.is_sealing(edit.id) {
            return Err(LifecycleError::BeingSealed { what: "start", machine: record.name.clone() });
        }
        let Some(version) = self.sealed_from(edit, record.started_at_ms).await? else { return Ok(()) };
        self.end_session(edit, &record.name, &version, caller).await?;
        let version = format!("{}@{}", version.image, version.number);
        Err(LifecycleError::EditOver { machine: record.name.clone(), image: edit.image.clone(), version })
    }

    /// Whether a machine may have had a persistent disk open. This is recorded afterwards, so a disk that exists counts
    /// too.
    pub(super) async fn may_have_run(
        &self,
        record: &MachineRecord,
        kept: &PersistentDisk,
    ) -> Result<bool, LifecycleError> {
        if kept.is_begun {
            return Ok(true);
        }
        self.disks().is_there(kept.id).await.map_err(LifecycleError::backend("start", &record.name))
    }

    async fn boot_persistent(
        &self,
        record: &MachineRecord,
        kept: PersistentDisk,
        cache: CacheSettings,
    ) -> Result<Boot, LifecycleError> {
        if self.is_sealing(kept.id) {
            return Err(LifecycleError::BeingSealed { what: "start", machine: record.name.clone() });
        }
        let version = self.version_of("start", record, &kept.below()).await?;
        Ok(Boot { version, cache, kept: Some(kept), begun: false })
    }

    /// The version to which a reference resolves now. The caller may hold the machine's lock.
    pub(crate) async fn version_of(
        &self,
        what: &'static str,
        record: &MachineRecord,
        reference: &str,
    ) -> Result<ImageVersion, LifecycleError> {
        let reference = ImageRef::parse(reference)
            .map_err(|source| LifecycleError::Reference { machine: record.name.clone(), source })?;
        let resolved = self.unless_given_up(record.uuid, self.images().resolve(&reference)).await;
        resolved.map_err(LifecycleError::backend(what, &record.name))
    }

    /// A new persistent disk that is not in the database yet.
    pub(crate) fn new_disk(
        &self,
        machine: Uuid,
        purpose: Purpose,
        version: &ImageVersion,
        caller: &Caller,
    ) -> Result<PersistentDisk, LifecycleError> {
        let mut id = [0; 16];
        self.random().fill(&mut id).map_err(|e| {
            LifecycleError::Orphans(
                "name a disk",
                BackendError::from_io("the system gave no random numbers", e),
            )
        })?;
        Ok(PersistentDisk {
            id: uuid::Builder::from_random_bytes(id).into_uuid(),
            machine,
            purpose,
            image: version.image.clone(),
            version: version.number,
            hash: version.hash.clone(),
            author: caller.principal.clone(),
            created_at_ms: self.now_ms(),
            is_begun: false,
        })
    }

    /// Removes the disk that a start created and on which no machine ran: it would tie the machine to a version that it
    /// never ran.
    pub(crate) async fn forget_begun(&self, boot: &Boot, machine: &str) {
        let Some(kept) = boot.kept.as_ref().filter(|_| boot.begun) else { return };
        if let Err(stays) = self.forget_persistent(kept, None).await {
            tracing::warn!(
                machine,
                "cannot remove the disk that a failed start created; it may stay until a reset: {}",
                problem(&stays)
            );
        }
    }

    /// Removes a persistent disk whose machine is off: first from the database, together with the event that says why, then
    /// its files. If the daemon dies in between, the next one removes them.
    pub(crate) async fn forget_persistent(
        &self,
        disk: &PersistentDisk,
        event: Option<NewEvent>,
    ) -> Result<(), LifecycleError> {
        let mut repo = self.db().write().await?;
        repo.persistent_disks().remove(disk.id).await?;
        if let Some(event) = event {
            repo.events().append(event).await?;
        }
        repo.save().await?;
        self.discard_files(disk).await;
        self.release_disk(disk).await;
        Ok(())
    }

    /// The file with the firmware variables that belong to a persistent disk: its boot entries name loaders on that disk.
    pub(crate) fn kept_variables(&self, machine: &str, disk: &PersistentDisk) -> PathBuf {
        self.run_dir(machine).join(format!("{}{KEPT_VARIABLES_END}", disk.id))
    }

    /// The directory with the TPM state that belongs to a persistent disk: the disk's contents may be encrypted with keys
    /// in the TPM.
    pub(crate) fn kept_tpm(&self, machine: &str, disk: &PersistentDisk) -> PathBuf {
        self.run_dir(machine).join(format!("{}{KEPT_TPM_END}", disk.id))
    }

    /// Removes firmware variables and TPM states of disks that the database does not know: an earlier daemon died after it had removed the
    /// disk there, and before it removed these files.
    pub(super) async fn sweep_kept(&self, known: &[Uuid]) {
        let Ok(mut machines) = tokio::fs::read_dir(self.run_root()).await else { return };
        while let Ok(Some(machine)) = machines.next_entry().await {
            let Ok(mut entries) = tokio::fs::read_dir(machine.path()).await else { continue };
            let mut has_swept = false;
            while let Ok(Some(entry)) = entries.next_entry().await {
                let Some(disk) = entry.file_name().to_str().and_then(disk_of) else { continue };
                if known.contains(&disk) {
                    continue;
                }
                let (name, path) = (entry.file_name(), entry.path());
                let removed = match entry.file_type().await {
                    Ok(kind) if kind.is_dir() => tokio::fs::remove_dir_all(&path).await,
                    _ => tokio::fs::remove_file(&path).await,
                };
                match removed {
                    Ok(()) => {
                        has_swept = true;
                        tracing::warn!("removed what an earlier daemon left: {}", name.display());
                    }
                    Err(error) => tracing::error!("cannot remove {}: {error}", path.display()),
                }
            }
            if has_swept {
                // Fails if there is something else, as the logs of a machine that is there.
                let _ = tokio::fs::remove_dir(machine.path()).await;
            }
        }
    }

    /// Removes what was kept together with a disk in its machine's directory. A machine that is removed takes its directory with it.
    async fn remove_kept(&self, disk: &PersistentDisk) {
        let machine = async { self.db().read().await?.machines().by_uuid(disk.machine).await };
        if let Ok(Some(machine)) = machine.await {
            // No other disk ever has this name, so a file that could not be removed is never used.
            let _ = tokio::fs::remove_file(self.kept_variables(&machine.name, disk)).await;
            let _ = tokio::fs::remove_dir_all(self.kept_tpm(&machine.name, disk)).await;
        }
    }

    /// Removes the files of a disk that is no longer in the database.
    pub(crate) async fn discard_files(&self, disk: &PersistentDisk) {
        self.remove_kept(disk).await;
        if let Err(e) = self.disks().discard(disk.id).await {
            tracing::error!(disk = %disk.id, "cannot remove the files of a disk that is not needed any more; the daemon tries again at its next start: {}", problem(&e));
        }
    }

    /// The persistent disk of a machine for a purpose, if there is one.
    pub(crate) async fn persistent_disk(
        &self,
        machine: Uuid,
        purpose: Purpose,
    ) -> Result<Option<PersistentDisk>, LifecycleError> {
        let disks = self.db().read().await?.persistent_disks().of_machine(machine).await?;
        Ok(disks.into_iter().find(|disk| disk.purpose == purpose))
    }
}
