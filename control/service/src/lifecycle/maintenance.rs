//! Maintenance sessions: a machine gets a private disk over an image's newest version, until the disk is sealed or discarded. The making
//! of the version is in `seal.rs`.
//!
//! ```text
//!   edit     recorded in the database: from its next start on, the machine boots the private disk
//!   seal     machine off -> version made of the disk -> session removed from the database -> files removed
//!   discard  machine off ->                             session removed from the database -> files removed
//! ```
//! If the daemon dies between the second and the third step of a seal, or its database fails there, the version *and* the session exist.
//! The version's source names the disk and its last start: the next daemon, seal or start recognises it and ends the session. The disk is
//! not booted again, because its later writes would be in no version. If that happened anyway, because a store showed the version only
//! later, the session stays, and a seal makes another version.

use std::time::Duration;

use headwater_api::name::ImageRef;
use headwater_api::{Channel, ImageVersion, ProblemKind};
use headwater_db::{DbError, MachineRecord, PersistentDisk, Purpose, Repository};
use tokio::time::Instant;

use crate::Service;
use crate::answer::problem;
use crate::backend::BackendError;
use crate::caller::Caller;
use crate::lifecycle::LifecycleError;

/// How long a daemon waits at its start for the store to report which sessions were sealed.
const SESSIONS_TIMEOUT: Duration = Duration::from_secs(10);

/// The action in errors of [`Service::edit_image`].
const EDIT: &str = "edit an image on";

impl Service {
    /// Begins a maintenance session on a machine that is off.
    pub(crate) async fn edit_image(
        &self,
        image: &str,
        machine: &str,
        caller: &Caller,
    ) -> Result<(PersistentDisk, MachineRecord), LifecycleError> {
        let (_turn, record) = self.turn_of(machine).await?;
        Self::is_vm(EDIT, &record)?;
        self.must_be_own(EDIT, &record).await?;
        self.can_seal(EDIT, machine)?;
        let uuid = record.uuid;
        if let Some(state) = self.state_if_not_off(&record) {
            let (what, machine) = (format!("edit image '{image}' on it"), record.name);
            return Err(LifecycleError::StillOn { what, machine, state });
        }
        self.not_in_maintenance("begin a maintenance session on", &record).await?;
        let _using = self.using_versions_for(uuid).await.map_err(LifecycleError::backend(EDIT, machine))?;
        let newest = ImageRef { image: image.to_owned(), version: None, channel: Some(Channel::Maintenance) };
        let version = self.unless_given_up(uuid, self.images().resolve(&newest)).await;
        let version = version.map_err(LifecycleError::backend(EDIT, machine))?;
        let disk = self.new_disk(uuid, Purpose::MaintenanceSession, &version, caller)?;
        if let Err(e) = self.retain_disk(&disk, machine).await {
            self.release_disk(&disk).await;
            return Err(LifecycleError::backend(EDIT, machine)(e));
        }
        let mut repo = self.db().write().await?;
        let added = repo.persistent_disks().add(&disk).await;
        match added {
            Err(DbError::Taken { .. }) => {
                let holder = editor(&mut *repo, image).await?;
                let (image, machine) = (image.to_owned(), record.name);
                let holder = holder.unwrap_or_else(|| machine.clone());
                drop(repo);
                self.release_disk(&disk).await;
                return Err(LifecycleError::Held { image, machine, holder });
            }
            other => other?,
        }
        let detail = format!("machine {machine}, over {}", disk.below());
        repo.events().append(self.event(caller, format!("image {image}"), "edit", detail)).await?;
        let detail = format!("edits {} from its next start on", disk.below());
        repo.events().append(self.event(caller, format!("machine {machine}"), "edit", detail)).await?;
        repo.save().await?;
        tracing::info!(image, machine, caller = %caller.principal, "a maintenance session begins");
        Ok((disk, record))
    }

    /// Fails if the store is read-only, before anybody works for a seal.
    pub(crate) fn can_seal(&self, what: &'static str, machine: &str) -> Result<(), LifecycleError> {
        if !self.images().is_read_only() {
            return Ok(());
        }
        let error = BackendError::new(
            ProblemKind::Invalid,
            "this daemon reads its store from servers, and cannot write to it",
        )
        .advise("do it on a daemon that has the store itself: a directory, or s3://..");
        Err(LifecycleError::backend(what, machine)(error))
    }

    /// Discards a maintenance session.
    pub(crate) async fn discard_session(
        &self,
        image: &str,
        caller: &Caller,
    ) -> Result<PersistentDisk, LifecycleError> {
        let what = "discard the maintenance session";
        let (edit, record) = self.session_of(what, image).await?;
        let _turn = self.lock(record.uuid).await;
        self.still_session_of(what, &edit).await?;
        self.off_for_maintenance("discard the maintenance session of", &edit, &record)?;
        if self.is_sealing(edit.id) {
            return Err(LifecycleError::BeingSealed {
                what: "discard the maintenance session on",
                machine: record.name,
            });
        }
        let detail = format!("the session of machine {} over {}", record.name, edit.below());
        let event = self.event(caller, format!("image {image}"), "discarded", detail);
        let may_have_run = self.may_have_run(&record, &edit).await.unwrap_or(true);
        self.forget_persistent(&edit, Some(event)).await?;
        if may_have_run {
            // The console log also shows what was done in the session.
            self.remove_logs(&record.name).await;
        }
        tracing::info!(image, machine = %record.name, caller = %caller.principal, "a maintenance session was discarded");
        Ok(edit)
    }

    /// The machine of an image's maintenance session, if there is one.
    pub(crate) async fn maintainer_of(&self, image: &str) -> Result<Option<String>, LifecycleError> {
        Ok(editor(&mut *self.db().read().await?, image).await?)
    }

    /// The maintenance session of an image, and its machine.
    pub(crate) async fn session_of(
        &self,
        what: &'static str,
        image: &str,
    ) -> Result<(PersistentDisk, MachineRecord), LifecycleError> {
        let mut repo = self.db().read().await?;
        let none = || LifecycleError::NoEdit { what, image: image.to_owned() };
        let edit = repo.persistent_disks().session_of(image).await?.ok_or_else(none)?;
        let record = repo.machines().by_uuid(edit.machine).await?.ok_or_else(none)?;
        Ok((edit, record))
    }

    /// Fails if the session has ended, even if another one has begun. Otherwise returns its machine as it is now. The
    /// caller holds the machine's lock.
    pub(crate) async fn still_session_of(
        &self,
        what: &'static str,
        edit: &PersistentDisk,
    ) -> Result<MachineRecord, LifecycleError> {
        let (now, record) = self.session_of(what, &edit.image).await?;
        if now.id != edit.id {
            return Err(LifecycleError::NoEdit { what, image: edit.image.clone() });
        }
        Ok(record)
    }

    /// Fails if the machine is on. The caller holds its lock.
    pub(crate) fn off_for_maintenance(
        &self,
        what: &str,
        edit: &PersistentDisk,
        record: &MachineRecord,
    ) -> Result<(), LifecycleError> {
        if self.active(record.uuid).is_none() {
            return Ok(());
        }
        let (what, machine) = (format!("{what} image '{}'", edit.image), record.name.clone());
        Err(LifecycleError::StillOn { what, machine, state: "on, and writes to its disk" })
    }

    /// Fails if the machine has a maintenance session.
    pub(crate) async fn not_in_maintenance(
        &self,
        what: &'static str,
        record: &MachineRecord,
    ) -> Result<(), LifecycleError> {
        match self.persistent_disk(record.uuid, Purpose::MaintenanceSession).await? {
            Some(edit) => {
                Err(LifecycleError::Edits { what, machine: record.name.clone(), image: edit.image })
            }
            None => Ok(()),
        }
    }

    /// The last step of a seal: ends the session.
    pub(crate) async fn end_session(
        &self,
        edit: &PersistentDisk,
        machine: &str,
        version: &ImageVersion,
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        // Needed even if the session cannot be ended.
        self.store_changed();
        let detail =
            format!("version {} from the session of machine {machine} over {}", version.number, edit.below());
        let event = self.event(caller, format!("image {}", edit.image), "sealed", detail);
        self.forget_persistent(edit, Some(event)).await
    }

    /// Ends the sessions that were sealed by a daemon that died before it could end them. If a session cannot be
    /// checked now, or not in time, it stays: its next start or seal checks again.
    pub(crate) async fn end_sealed_sessions(&self) -> Result<(), LifecycleError> {
        let disks = self.db().read().await?.persistent_disks().list().await?;
        let end = Instant::now() + SESSIONS_TIMEOUT;
        for edit in disks.into_iter().filter(|disk| disk.purpose == Purpose::MaintenanceSession) {
            let record = self.db().read().await?.machines().by_uuid(edit.machine).await?;
            let started_at_ms = record.as_ref().and_then(|record| record.started_at_ms);
            let look = self.sealed_from(&edit, started_at_ms);
            let Ok(sealed) = tokio::time::timeout_at(end, look).await else {
                let seconds = SESSIONS_TIMEOUT.as_secs();
                tracing::warn!(image = %edit.image, "the store did not answer within {seconds} s whether the maintenance session was sealed");
                return Ok(());
            };
            let sealed = sealed.unwrap_or_else(|e| {
                tracing::error!(image = %edit.image, "cannot determine whether the maintenance session was sealed: {}", problem(&e));
                None
            });
            if let Some(version) = sealed {
                let machine = record.map_or_else(|| edit.machine.to_string(), |record| record.name);
                tracing::warn!(image = %edit.image, version = version.number, "a maintenance session was sealed before, and is ended now");
                self.end_session(&edit, &machine, &version, &Caller::daemon()).await?;
            }
        }
        Ok(())
    }

    /// The version that was made of a session since its machine's last start, if there is one. After an earlier
    /// version, the machine's later changes are in no version.
    pub(crate) async fn sealed_from(
        &self,
        edit: &PersistentDisk,
        started_at_ms: Option<u64>,
    ) -> Result<Option<ImageVersion>, LifecycleError> {
        let failed = |e| LifecycleError::Orphans("look for sealed versions", e);
        let image = self.unless_given_up(edit.machine, self.images().image(&edit.image)).await;
        // A session retains its image: if the store shows no such image, that proves nothing about its versions.
        let image = image.and_then(|image| image.ok_or_else(|| no_image(edit))).map_err(failed)?;
        Ok(image.versions.into_iter().find(|it| ends_session(it, edit, started_at_ms)))
    }
}

async fn editor(repo: &mut dyn Repository, image: &str) -> Result<Option<String>, DbError> {
    let Some(edit) = repo.persistent_disks().session_of(image).await? else { return Ok(None) };
    Ok(repo.machines().by_uuid(edit.machine).await?.map(|record| record.name))
}

fn no_image(edit: &PersistentDisk) -> BackendError {
    let image = &edit.image;
    let message = format!("the store has no image '{image}', although it has a maintenance session");
    BackendError::new(ProblemKind::NotFound, message).advise(format!(
        "try again when the store has it; 'headwater image discard {image}' discards the session"
    ))
}

/// Whether a version was made of a session since its machine's last start.
fn ends_session(version: &ImageVersion, edit: &PersistentDisk, started_at_ms: Option<u64>) -> bool {
    // Earlier releases did not name the start. Versions have whole seconds: a version of the same second may be from
    // before the start, and does not count. A mistake costs one more version; the opposite mistake would lose work.
    let is_since = started_at_ms.is_none_or(|ms| version.created_at_ms > ms);
    version.source.ends_with(&mark(edit, started_at_ms))
        || (is_since && version.source.ends_with(&mark_of_disk(edit)))
}

/// The source text of a version that is made of a session.
pub(crate) fn source(edit: &PersistentDisk, machine: &MachineRecord) -> String {
    let mark = mark(edit, machine.started_at_ms);
    format!("{} edited by machine {}{mark}", edit.below(), machine.name)
}

/// The source text of a version that is made of a machine's disk without ending its session.
pub(crate) fn source_of_copy(parent: &str, machine: &str, edit: Option<&PersistentDisk>) -> String {
    format!("{parent} as machine {machine} had it{}", edit.map(mark_of_copy).unwrap_or_default())
}

/// Whether a version was made of a session that continued: a later seal of the session includes its changes.
pub(crate) fn is_copy(version: &ImageVersion, edit: &PersistentDisk) -> bool {
    version.source.ends_with(&mark_of_copy(edit)) || version.source.contains(&mark_of_disk(edit))
}

/// This text does not contain [`mark`], so it does not end the session.
fn mark_of_copy(edit: &PersistentDisk) -> String {
    format!(", so far on disk {}", edit.id)
}

/// The text that identifies a start, which separates the disk's contents from later changes. Starts are compared for
/// equality and not ordered, because a clock may be set. Only versions of earlier releases have nothing but the time.
fn mark(edit: &PersistentDisk, started_at_ms: Option<u64>) -> String {
    let since = started_at_ms.map(|ms| format!(" since its start at {ms} ms")).unwrap_or_default();
    mark_of_disk(edit) + &since
}

fn mark_of_disk(edit: &PersistentDisk) -> String {
    format!(", disk {}", edit.id)
}
