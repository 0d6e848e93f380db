//! Making versions of disks: of an edit whose machine is off, and of a machine that runs.
//!
//! ```text
//!   a machine that runs:  guest freezes its file systems (where its agent answers)
//!                           -> disk frozen: one instant, and the machine goes on writing beside it
//!                           -> guest thaws -> in the background: what changed is read, packed, stored
//! ```

use std::sync::Arc;
use std::time::Instant;

use headwater_api::name::ImageRef;
use headwater_api::{ImageVersion, MachineState, Pause, ProblemKind, Sealed};
use headwater_db::{KeptDisk, MachineRecord, Purpose};

use crate::Service;
use crate::answer::problem;
use crate::backend::{BackendError, FrozenDisk, JobControl, KeptRequest, SealOrder};
use crate::extract::Actor;
use crate::life::boot::{cache_of_edit, files_of};
use crate::life::edit::source;
use crate::life::{Active, LifeError};

impl Service {
    /// Makes a version of what was edited, and ends the edit.
    pub(crate) async fn seal_edit(
        &self,
        image: &str,
        note: String,
        actor: &Actor,
        job: Arc<JobControl>,
    ) -> Result<Sealed, LifeError> {
        let (edit, record) = self.edit_of("seal", image).await?;
        let sealing = || LifeError::Sealing { what: "seal what was edited on", machine: record.name.clone() };
        let (guard, record) = {
            let _turn = self.lock(record.uuid).await;
            self.off_for_edit("seal", &edit, &record)?;
            let guard = self.begin_sealing(edit.id).ok_or_else(sealing)?;
            // Now that nobody else ends it.
            (guard, self.still_edit_of("seal", &edit).await?)
        };
        let (version, changed_bytes) = match self.sealed_from(&edit).await? {
            Some(version) => (version, 0),
            None => {
                let frozen = self.open_kept(&record, &edit).await?;
                let order = SealOrder { source: source(&edit, &record.name), note, author: actor.0.clone() };
                let outcome =
                    frozen.seal(order, job).await.map_err(LifeError::backend("seal", &record.name))?;
                (outcome.version, outcome.changed_bytes)
            }
        };
        self.end_edit(&edit, &record.name, &version, actor).await.map_err(|e| LifeError::EditStays {
            version: format!("{}@{}", version.image, version.number),
            source: Box::new(e),
        })?;
        drop(guard);
        tracing::info!(image, version = version.number, actor = %actor.0, "sealed");
        Ok(Sealed { version, parent: edit.below(), changed_bytes, pause: None })
    }

    async fn open_kept(
        &self,
        record: &MachineRecord,
        disk: &KeptDisk,
    ) -> Result<Box<dyn FrozenDisk>, LifeError> {
        let version = self.version_of("seal", record, &disk.below()).await?;
        let cache = if disk.purpose == Purpose::Edit { cache_of_edit(record.cache) } else { record.cache };
        let request = KeptRequest { kept: files_of(disk), version, cache };
        self.disks().open_kept(request).await.map_err(LifeError::backend("seal", &record.name))
    }

    /// Makes a version of a machine's disk: of one that runs as it is at this moment, of one that is off and whose
    /// disk is kept as it was left. The machine goes on as it did.
    pub(crate) async fn seal_machine(
        &self,
        name: &str,
        note: String,
        actor: &Actor,
        job: Arc<JobControl>,
    ) -> Result<Sealed, LifeError> {
        let (turn, record) = self.turn_of(name).await?;
        let uuid = record.uuid;
        let kept = match self.kept_disk(uuid, Purpose::Edit).await? {
            Some(edit) => Some(edit),
            None if record.cache.persistent => self.kept_disk(uuid, Purpose::Persistent).await?,
            None => None,
        };
        // A kept disk is not opened again before the version is made of what it was.
        let sealing = || LifeError::Sealing { what: "seal", machine: name.to_owned() };
        let guard = match &kept {
            Some(kept) => Some(self.begin_sealing(kept.id).ok_or_else(sealing)?),
            None => None,
        };
        let (frozen, pause, parent) = match (self.active(uuid), &kept) {
            (Some(active), _) => {
                let parent = self.version_that_runs(&record, &active).await?;
                let (frozen, pause) = self.freeze(&record, &active, &job).await?;
                (frozen, Some(pause), parent)
            }
            (None, Some(kept)) => {
                let parent = self.version_of("seal", &record, &kept.below()).await?;
                (self.open_kept(&record, kept).await?, None, parent)
            }
            (None, None) => {
                let (machine, state) = (record.name, record.state.name());
                return Err(LifeError::NotOn { what: "seal", machine, state });
            }
        };
        drop(turn);
        let parent = format!("{}@{}", parent.image, parent.number);
        let source = format!("{parent} as machine {name} had it");
        let order = SealOrder { source, note, author: actor.0.clone() };
        let outcome = frozen.seal(order, job).await.map_err(LifeError::backend("seal", name))?;
        drop(guard);
        let version = outcome.version;
        let detail = format!("version {} of the disk of machine {name} over {parent}", version.number);
        self.image_changed(actor, &version.image, "sealed", detail).await?;
        let detail = format!("its disk is {}@{}", version.image, version.number);
        self.append(self.event(actor, format!("machine {name}"), "sealed", detail)).await?;
        Ok(Sealed { version, parent, changed_bytes: outcome.changed_bytes, pause })
    }

    async fn version_that_runs(
        &self,
        record: &MachineRecord,
        active: &Active,
    ) -> Result<ImageVersion, LifeError> {
        let running = record.version.as_deref().unwrap_or_default();
        let image = ImageRef::parse(running).map(|reference| reference.image).unwrap_or_default();
        self.version_of("seal", record, &format!("{image}@{}", active.version_hash)).await
    }

    /// Freezes a machine's disk, and its guest's file systems for so long, where its agent does that.
    async fn freeze(
        &self,
        record: &MachineRecord,
        active: &Active,
        job: &JobControl,
    ) -> Result<(Box<dyn FrozenDisk>, Pause), LifeError> {
        let failed = || LifeError::backend("seal", &record.name);
        let cancelled =
            || BackendError::new(ProblemKind::Cancelled, "it was stopped before its disk was frozen");
        let running = record.state == MachineState::Running;
        let mut outcome = if running { active.vm.write_file_systems_out().await } else { Ok(()) };
        // A slow guest takes minutes, and who asked may be gone: it is not frozen for nothing.
        if job.is_cancelled() {
            return Err(failed()(cancelled()));
        }
        // The guest's writers stand still from the moment when the first of its file systems is being frozen, which is
        // before the answer: what is still dirty is written out meanwhile.
        let asked = Instant::now();
        if running && outcome.is_ok() {
            outcome = active.vm.freeze_file_systems().await;
        }
        let remark = match outcome {
            Err(error) => Some(problem(&error).to_string()),
            Ok(()) if !running => Some(format!("the guest is not up: the machine is {}", record.state)),
            Ok(()) => None,
        };
        let since = Instant::now();
        let frozen = if job.is_cancelled() { Err(cancelled()) } else { active.disk.freeze() };
        let disk_us = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
        let mut guest_ms = None;
        if remark.is_none() {
            // Whatever became of the disk. A guest that stays frozen is worse than a version that is not made.
            let thawed = active.vm.thaw_file_systems().await;
            guest_ms = Some(u64::try_from(asked.elapsed().as_millis()).unwrap_or(u64::MAX));
            thawed.map_err(LifeError::backend("thaw the file systems of", &record.name))?;
        }
        Ok((frozen.map_err(failed())?, Pause { disk_us, guest_ms, remark }))
    }
}
