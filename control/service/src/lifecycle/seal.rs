//! Seals: makes versions of disks, of a maintenance session whose machine is off, or of a machine that runs. Each is a task, which the
//! operations begin. Sessions begin and end in `maintenance.rs`; the store's side is in the program (`adapters/frozen.rs`).
//!
//! ```text
//!   a machine that runs:  guest syncs (if its agent answers); the machine can be stopped and changed meanwhile
//!                           -> guest freezes its file systems
//!                           -> snapshot of the disk: one instant, after which the machine continues to write
//!                           -> guest thaws -> in the background: changed blocks are read, compressed, stored
//!   a maintenance session of a machine that is on: the machine's identity is removed in the guest -> switched off
//! ```
//! Before a version is made, the disk is searched for its machine's identity (`generalise.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use headwater_api::name::ImageRef;
use headwater_api::{Change, ImageVersion, MachineState, Pause, ProblemKind, SealRequest, Sealed};
use headwater_db::{MachineRecord, PersistentDisk, Purpose};
use tokio::sync::OwnedMutexGuard;

use crate::Service;
use crate::answer::{Explain, problem};
use crate::backend::{
    BackendError, FrozenDisk, IdentityLeft, NOTE_MAX_BYTES, PersistentDiskRequest, SealOrder, SealOutcome,
    TaskControl,
};
use crate::caller::Caller;
use crate::lifecycle::boot::{files_of, session_cache};
use crate::lifecycle::generalise::keeps_identity;
use crate::lifecycle::maintenance::{is_copy, source, source_of_copy};
use crate::lifecycle::{Active, LifecycleError, alarm};

/// How often a seal checks whether its client still waits.
const CANCEL_POLL: Duration = Duration::from_millis(100);

/// The parent version of a seal, and newer versions.
struct Over {
    image: String,
    /// The parent, as `IMAGE@NUMBER`.
    parent: String,
    /// The newest version that is newer than the parent, unless it was made of the same session.
    newer: Option<String>,
    /// The highest number of a version that is not retired.
    newest: u64,
}

impl Over {
    /// Fails if the changes of newer versions would be missing, unless the caller permits that.
    fn allowed(&self, what: &str, over_newer: bool) -> Result<(), LifecycleError> {
        match &self.newer {
            Some(newer) if !over_newer => Err(LifecycleError::Newer {
                what: what.to_owned(),
                image: self.image.clone(),
                parent: self.parent.clone(),
                newer: newer.clone(),
            }),
            _ => Ok(()),
        }
    }
}

impl Service {
    /// Makes a version of a maintenance session, and ends the session.
    pub(crate) async fn seal_session(
        &self,
        image: &str,
        request: SealRequest,
        caller: &Caller,
        control: Arc<TaskControl>,
    ) -> Result<Sealed, LifecycleError> {
        let (edit, record) = self.session_of("seal", image).await?;
        let sealing = || LifecycleError::BeingSealed {
            what: "seal the maintenance session of",
            machine: record.name.clone(),
        };
        let what = format!("image '{image}'");
        let mut removed = None;
        let (guard, record) = {
            let _turn = self.lock(record.uuid).await;
            if request.keep_identity {
                self.off_for_maintenance("seal", &edit, &record)?;
            }
            let guard = self.begin_sealing(edit.id).ok_or_else(sealing)?;
            // Check again, now that no other task can end the session.
            let mut record = self.still_session_of("seal", &edit).await?;
            if let Some(active) = self.active(record.uuid) {
                let over = self.over(&record, &edit.image, edit.version, Some(&edit)).await?;
                over.allowed(&what, request.over_newer)?;
                check_note(&request.note).map_err(LifecycleError::backend("seal", &record.name))?;
                removed = Some(self.generalise(&edit, &record, &active, &control).await?);
                record = self.switch_off_generalised(&edit, record, caller).await?;
            }
            (guard, record)
        };
        let mut left = IdentityLeft::default();
        let sealed = self.sealed_from(&edit, record.started_at_ms).await?;
        let (version, changed_bytes, newer, production) = match sealed {
            Some(version) => (version, 0, None, None),
            None => {
                let over = self.over(&record, &edit.image, edit.version, Some(&edit)).await?;
                over.allowed(&what, request.over_newer)?;
                let parent = self.version_of("seal", &record, &edit.below()).await?;
                let frozen = self.open_persistent(&record, &edit).await?;
                // If the identity is kept, no search is needed, and a failing search must not prevent the seal.
                if !request.keep_identity {
                    left = self.identity_left(&*frozen, &record, &control).await?;
                }
                if !left.found.is_empty() {
                    let (image, machine) = (Some(edit.image.clone()), record.name);
                    return Err(LifecycleError::KeepsIdentity { what, image, machine, found: left.found });
                }
                let order = SealOrder {
                    source: source(&edit, &record),
                    note: request.note,
                    author: caller.principal.clone(),
                    newest_at_most: (!request.over_newer).then_some(over.newest),
                    is_edit: true,
                    keeps_identity: request.keep_identity
                        || keeps_identity(&left, &parent, removed.is_some()),
                };
                let sealed = frozen.seal(order, control).await;
                let tried =
                    format!("a version from the session of machine {} over {}", record.name, edit.below());
                let outcome = match self.or_tried(caller, image, ("seal tried", &tried), sealed).await {
                    Ok(outcome) => outcome,
                    Err(e) => return Err(self.not_sealed(e, &what, &record, &edit).await),
                };
                self.production_kept(&outcome, caller).await;
                (outcome.version, outcome.changed_bytes, over.newer, outcome.production)
            }
        };
        self.end_session(&edit, &record.name, &version, caller).await.map_err(|e| {
            LifecycleError::EditStays {
                version: format!("{}@{}", version.image, version.number),
                source: Box::new(e),
            }
        })?;
        drop(guard);
        tracing::info!(image, version = version.number, caller = %caller.principal, "sealed");
        Ok(Sealed {
            version,
            parent: edit.below(),
            newer,
            changed_bytes,
            production,
            pause: None,
            removed: removed.unwrap_or_default(),
            identity: left.found,
            not_looked_into: left.unread,
        })
    }

    async fn open_persistent(
        &self,
        record: &MachineRecord,
        disk: &PersistentDisk,
    ) -> Result<Box<dyn FrozenDisk>, LifecycleError> {
        let version = self.version_of("seal", record, &disk.below()).await?;
        let is_edit = disk.purpose == Purpose::MaintenanceSession;
        let cache = if is_edit { session_cache(record.cache) } else { record.cache };
        let request = PersistentDiskRequest { kept: files_of(disk), version, cache, is_edit };
        self.disks().open_persistent(request).await.map_err(LifecycleError::backend("seal", &record.name))
    }

    /// Makes a version of a machine's disk. If the machine is on, of the disk as it is now; if it is off, of its
    /// persistent disk. The machine's state does not change.
    pub(crate) async fn seal_machine(
        &self,
        name: &str,
        request: SealRequest,
        caller: &Caller,
        control: Arc<TaskControl>,
    ) -> Result<Sealed, LifecycleError> {
        let (turn, record) = self.turn_of(name).await?;
        self.can_seal("seal", name)?;
        // The store checks this too, but only after the guest was frozen.
        check_note(&request.note).map_err(LifecycleError::backend("seal", name))?;
        let uuid = record.uuid;
        let kept = match self.persistent_disk(uuid, Purpose::MaintenanceSession).await? {
            Some(edit) => Some(edit),
            None if record.cache.persistent => self.persistent_disk(uuid, Purpose::Persistent).await?,
            None => None,
        };
        // The lock keeps others from opening a persistent disk before its version is made, and from a second seal,
        // which must fail before the guest is frozen for it.
        let sealing = || LifecycleError::BeingSealed { what: "seal", machine: name.to_owned() };
        let disk = kept.as_ref().map_or(uuid, |kept| kept.id);
        let guard = self.begin_sealing(disk).ok_or_else(sealing)?;
        let not_on = || {
            let (machine, state) = (record.name.clone(), record.state.name());
            LifecycleError::NotOn { what: "seal", machine, state }
        };
        let active = self.active(uuid);
        let below = match (&active, &kept) {
            (Some(active), _) => self.version_that_runs(&record, active).await?,
            (None, Some(kept)) => self.version_of("seal", &record, &kept.below()).await?,
            (None, None) => return Err(not_on()),
        };
        let edit = kept.as_ref().filter(|kept| kept.purpose == Purpose::MaintenanceSession);
        let (what, is_bound) = (format!("machine '{name}'"), edit.is_some() && !request.over_newer);
        let over = self.over(&record, &below.image, below.number, edit).await?;
        over.allowed(&what, !is_bound)?;
        let (frozen, pause) = match (&active, &kept) {
            (Some(active), _) => {
                let (frozen, pause) = self.freeze(turn, &record, active, &control).await?;
                (frozen, Some(pause))
            }
            (None, Some(kept)) => {
                let frozen = self.open_persistent(&record, kept).await?;
                drop(turn);
                (frozen, None)
            }
            (None, None) => return Err(not_on()),
        };
        let left = match request.keep_identity {
            true => IdentityLeft::default(),
            false => self.identity_left(&*frozen, &record, &control).await?,
        };
        if active.is_none() && !left.found.is_empty() {
            let image = edit.map(|edit| edit.image.clone());
            return Err(LifecycleError::KeepsIdentity {
                what,
                image,
                machine: record.name,
                found: left.found,
            });
        }
        let parent = over.parent;
        let order = SealOrder {
            source: source_of_copy(&parent, name, edit),
            note: request.note,
            author: caller.principal.clone(),
            newest_at_most: is_bound.then_some(over.newest),
            is_edit: edit.is_some(),
            keeps_identity: request.keep_identity || keeps_identity(&left, &below, false),
        };
        let sealed = frozen.seal(order, control).await;
        let tried = format!("a version of the disk of machine {name} over {parent}");
        let sealed = self.or_tried(caller, &over.image, ("seal tried", &tried), sealed).await;
        let outcome = match (sealed, edit) {
            (Ok(outcome), _) => outcome,
            (Err(e), Some(edit)) => return Err(self.not_sealed(e, &what, &record, edit).await),
            (Err(e), None) => return Err(LifecycleError::backend("seal", name)(e)),
        };
        drop(guard);
        self.production_kept(&outcome, caller).await;
        let SealOutcome { version, changed_bytes, production } = outcome;
        let detail = format!("version {} of the disk of machine {name} over {parent}", version.number);
        self.image_changed(caller, &version.image, "sealed", detail).await;
        let detail = format!("its disk is {}@{}", version.image, version.number);
        self.note(self.event(caller, format!("machine {name}"), "sealed", detail)).await;
        Ok(Sealed {
            version,
            parent,
            newer: over.newer,
            changed_bytes,
            production,
            pause,
            removed: Vec::new(),
            identity: left.found,
            not_looked_into: left.unread,
        })
    }

    /// The versions above the version from which a disk was made.
    async fn over(
        &self,
        machine: &MachineRecord,
        image: &str,
        parent: u64,
        edit: Option<&PersistentDisk>,
    ) -> Result<Over, LifecycleError> {
        let found = self.unless_given_up(machine.uuid, self.images().image(image)).await;
        let found = found.map_err(|e| LifecycleError::Orphans("look for newer versions", e))?;
        let versions = found.map(|image| image.versions).unwrap_or_default();
        let mut over = Over {
            image: image.to_owned(),
            parent: format!("{image}@{parent}"),
            newer: None,
            newest: parent,
        };
        for version in versions.iter().filter(|it| it.number > parent && !it.retired) {
            over.newest = over.newest.max(version.number);
            if !edit.is_some_and(|edit| is_copy(version, edit)) {
                over.newer = Some(format!("{image}@{}", version.number));
            }
        }
        Ok(over)
    }

    /// Records that a seal also set `production`.
    async fn production_kept(&self, outcome: &SealOutcome, caller: &Caller) {
        let Some(production) = outcome.production else { return };
        let ImageVersion { image, number, .. } = &outcome.version;
        let detail = format!("production to version {production}, when version {number} was sealed");
        let change = Change::of("production", None::<u64>, production);
        self.image_settings_changed(caller, image, "promoted", detail, change).await;
    }

    /// The error of a failed seal. If a newer version was made at the same moment, the error is the same as if it had
    /// existed before.
    async fn not_sealed(
        &self,
        error: BackendError,
        what: &str,
        machine: &MachineRecord,
        edit: &PersistentDisk,
    ) -> LifecycleError {
        if error.kind() == ProblemKind::Conflict
            && let Ok(over) = self.over(machine, &edit.image, edit.version, Some(edit)).await
            && let Err(newer) = over.allowed(what, false)
        {
            return newer;
        }
        LifecycleError::backend("seal", &machine.name)(error)
    }

    async fn version_that_runs(
        &self,
        record: &MachineRecord,
        active: &Active,
    ) -> Result<ImageVersion, LifecycleError> {
        // Compare the number: it tells which versions are later, and other numbers may have the same hash.
        let running = record.version.as_deref().unwrap_or_default();
        match self.version_of("seal", record, running).await {
            Ok(version) if version.hash == active.version_hash => return Ok(version),
            Err(e) if e.kind() != ProblemKind::NotFound => return Err(e),
            _ => {}
        }
        // Another daemon has removed that number, which is permitted if another number has the same hash.
        let image = ImageRef::parse(running).map(|reference| reference.image).unwrap_or_default();
        self.version_of("seal", record, &format!("{image}@{}", active.version_hash)).await
    }

    /// Freezes a machine's disk, and during that its guest's file systems if the agent can do that. The machine's lock
    /// is released while the guest syncs: that takes long if its write cache is full, and the caller that gives the
    /// cache more space, or stops the machine, needs the lock.
    async fn freeze(
        &self,
        turn: OwnedMutexGuard<()>,
        record: &MachineRecord,
        active: &Arc<Active>,
        control: &TaskControl,
    ) -> Result<(Box<dyn FrozenDisk>, Pause), LifecycleError> {
        let failed = || LifecycleError::backend("seal", &record.name);
        let can_freeze = || active.disk.can_freeze().map_err(failed());
        can_freeze()?;
        let running = record.state == MachineState::Running;
        let (written, _turn) = if running {
            drop(turn);
            let written = write_out(active, control).await;
            (written, self.turn_again(record, active, control).await.map_err(failed())?)
        } else {
            (Ok(()), turn)
        };
        // The sync, or the lock, may have taken minutes, and the client may be gone: do not freeze a guest for nothing.
        if control.is_cancelled() {
            return Err(failed()(cancelled()));
        }
        // A reader may have begun to read the disk meanwhile.
        can_freeze()?;
        let mut remark = match written {
            Err(error) => Some(problem(&error).to_string()),
            Ok(()) if !running => Some(format!("the guest has not booted: the machine is {}", record.state)),
            // The sync would wait for space, and whoever provides space waits for the lock.
            Ok(()) => alarm::cause(active)
                .map(|shortage| format!("the guest was not asked to freeze, because {}", shortage.message)),
        };
        // Writers in the guest pause from the moment at which its first file system is being frozen, which is
        // before the answer: dirty data is written meanwhile.
        let asked_at = Instant::now();
        if remark.is_none()
            && let Err(error) = active.vm.freeze_file_systems().await
        {
            remark = Some(problem(&error).to_string());
        }
        let refused = if control.is_cancelled() {
            Some(cancelled())
        } else {
            // The task that records the machine's end waits for the lock; until then the machine counts as on.
            active.vm.exited().now_or_never().map(|_| gone())
        };
        let since = Instant::now();
        let frozen = refused.map_or_else(|| active.disk.freeze(), Err);
        let disk_us = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
        let mut guest_ms = None;
        if remark.is_none() {
            // Thaw in every case: a guest that stays frozen is worse than a seal that fails.
            let thawed = active.vm.thaw_file_systems().await;
            guest_ms = Some(u64::try_from(asked_at.elapsed().as_millis()).unwrap_or(u64::MAX));
            thawed.map_err(LifecycleError::backend("thaw the file systems of", &record.name))?;
        }
        Ok((frozen.map_err(failed())?, Pause { disk_us, guest_ms, remark }))
    }

    /// Takes the lock of a machine again during a seal. Fails if the machine was off meanwhile, even if it is on again,
    /// because its disk is another one, or was reopened.
    async fn turn_again(
        &self,
        record: &MachineRecord,
        active: &Arc<Active>,
        control: &TaskControl,
    ) -> Result<OwnedMutexGuard<()>, BackendError> {
        let turn = tokio::select! {
            biased;
            // Waits for the end before the lock: a machine that was removed has no lock any more. Returns at once,
            // because the old disk, with its RAM, must not exist beside that of the next start.
            _ = active.vm.exited() => return Err(gone()),
            () = given_up(control) => return Err(cancelled()),
            turn = self.lock(record.uuid) => turn,
        };
        if self.is_present(record.uuid, active) { Ok(turn) } else { Err(gone()) }
    }
}

/// The error if no client waits for the version any more.
pub(super) fn cancelled() -> BackendError {
    BackendError::new(ProblemKind::Cancelled, "the seal was cancelled before the disk was frozen")
}

/// The error if the machine to be sealed has ended.
fn gone() -> BackendError {
    let why = "the machine was stopped or restarted before its disk was frozen";
    BackendError::new(ProblemKind::Conflict, why).advise("seal it again once it is on")
}

/// Waits until no client waits for the version any more, or the daemon stops.
pub(super) async fn given_up(control: &TaskControl) {
    while !control.is_cancelled() {
        tokio::time::sleep(CANCEL_POLL).await;
    }
}

fn check_note(note: &str) -> Result<(), BackendError> {
    let len = note.len();
    if len <= NOTE_MAX_BYTES {
        return Ok(());
    }
    let message = format!("the note has {len} bytes, and at most {NOTE_MAX_BYTES} are allowed");
    Err(BackendError::new(ProblemKind::Invalid, message))
}

/// Lets a guest sync, until the machine is off, no client waits for the version any more, or the daemon stops.
async fn write_out(active: &Active, control: &TaskControl) -> Result<(), BackendError> {
    tokio::select! {
        biased;
        written = active.vm.write_file_systems_out() => written,
        // The shell in the guest is killed. A `sync` that it started runs to its end, which is harmless. The caller reports
        // the cancellation.
        () = given_up(control) => Ok(()),
        // The caller reports that the machine is off.
        _ = active.vm.exited() => Ok(()),
    }
}
