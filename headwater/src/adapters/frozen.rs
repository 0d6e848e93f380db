//! Makes versions of disks: the snapshot of a volume is imported as a version whose parent is the version below the volume. The snapshot
//! is of a machine that runs, or of a persistent disk whose machine is off. The service calls this through its trait [`FrozenDisk`] when
//! it seals; before that, it has asked the guest to freeze its file systems. Readers get their snapshots from [`super::snapshot_leases`].

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use headwater_api::{ImageVersion, ProblemKind};
use headwater_block::{Device, IoError};
use headwater_image::{Basis, Changes, ImportOptions};
use headwater_service::backend::{
    BackendError, FrozenDisk, Given, IdentityLeft, NOTE_MAX_BYTES, SealOrder, SealOutcome, TaskControl,
};
use headwater_store::{ImageName, Pin, Store};
use headwater_volume::{FrozenView, Volume};

use crate::adapters::disks::blocking;
use crate::adapters::identity;
use crate::adapters::images::{
    cancel_of, end_of, forward, hash_of, image_failed, made, number_of, store_failed,
};

// The service refuses longer notes before it asks a guest for anything.
const _: () = assert!(NOTE_MAX_BYTES == headwater_store::NOTE_MAX_BYTES);

/// The snapshot of a disk, from which a version is made or which readers read. It ends when it is dropped.
pub struct FrozenVolume {
    store: Arc<dyn Store>,
    below: ImageVersion,
    view: Arc<FrozenView>,
    /// Keeps the version below from being removed.
    pin: Arc<Pin>,
    /// The volume, if it was opened only for this and must be closed with it.
    opened: Option<Arc<Volume>>,
}

impl FrozenVolume {
    /// A snapshot of a volume that a machine uses. `pin` holds the volume's version. Does not use the store.
    pub fn of_machine(
        store: &Arc<dyn Store>,
        below: &ImageVersion,
        volume: &Volume,
        pin: Arc<Pin>,
    ) -> Result<Self, BackendError> {
        let view = volume.freeze().map_err(in_use)?;
        Ok(Self { store: store.clone(), below: below.clone(), view, pin, opened: None })
    }

    /// A snapshot of a volume that was opened only for this.
    pub fn of_nobody(
        store: &Arc<dyn Store>,
        below: ImageVersion,
        volume: Arc<Volume>,
        pin: Pin,
    ) -> Result<Self, BackendError> {
        let view = volume.freeze().map_err(in_use)?;
        Ok(Self { store: store.clone(), below, view, pin: Arc::new(pin), opened: Some(volume) })
    }

    /// Ends the snapshot. Returns the pin of its version, because dropping that can take as long as the store takes.
    pub fn end(self) -> Arc<Pin> {
        Arc::clone(&self.pin)
    }

    /// The snapshot as a device.
    pub fn view(&self) -> &Arc<FrozenView> {
        &self.view
    }

    /// The version below the snapshot.
    pub fn below(&self) -> &ImageVersion {
        &self.below
    }

    fn seal(&self, order: &SealOrder, control: &Arc<TaskControl>) -> Result<SealOutcome, BackendError> {
        let view = Arc::clone(&self.view);
        let changes = Arc::new(move |range, max_runs| {
            view.changed(range, max_runs).into_iter().map(|run| (run.len, run.changed)).collect()
        });
        let source: Arc<dyn Device> = Arc::clone(&self.view) as _;
        seal(&*self.store, &self.below, source, changes, order, control)
    }
}

/// Makes a version of `source` with the parent `below`. `changes` contains all ranges that differ from the parent.
pub fn seal(
    store: &dyn Store,
    below: &ImageVersion,
    source: Arc<dyn Device>,
    changes: Changes,
    order: &SealOrder,
    control: &Arc<TaskControl>,
) -> Result<SealOutcome, BackendError> {
    let name: ImageName = below.image.parse().map_err(store_failed)?;
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut options = ImportOptions::new(name.clone(), since_1970.as_secs());
    options.source = end_of(&order.source);
    options.note.clone_from(&order.note);
    options.author.clone_from(&order.author);
    options.is_sealed = true;
    options.keeps_identity = order.keeps_identity;
    options.newest_at_most = order.newest_at_most.map(number_of).transpose()?;
    options.basis = Some(Basis { parent: hash_of(below)?, changes });
    options.cancel = cancel_of(control);
    let imported = headwater_image::import(source, store, &options, &mut forward(control)).map_err(|e| {
        let nothing = e.kind() == headwater_image::ImageErrorKind::Unchanged;
        let failed = image_failed(e);
        let first = "change something on the machine first";
        if nothing { failed.advise(or_discard(first, name.as_str(), order.is_edit)) } else { failed }
    })?;
    let version = made(store, name, &imported.version);
    let production = imported.production.map(u64::from);
    Ok(SealOutcome { version, changed_bytes: imported.read_bytes, production })
}

#[async_trait]
impl FrozenDisk for FrozenVolume {
    async fn identity_left(
        &self,
        given: Given,
        control: Arc<TaskControl>,
    ) -> Result<IdentityLeft, BackendError> {
        let view = Arc::clone(&self.view);
        blocking("look for the machine's identity", move || identity::left_on(&view, &given, &control)).await
    }

    async fn seal(
        self: Box<Self>,
        order: SealOrder,
        control: Arc<TaskControl>,
    ) -> Result<SealOutcome, BackendError> {
        blocking("make a version", move || FrozenVolume::seal(&self, &order, &control)).await
    }
}

impl Drop for FrozenVolume {
    fn drop(&mut self) {
        if let Some(volume) = &self.opened {
            volume.close();
        }
    }
}

/// The advice if there is nothing to seal. Discarding is suggested only for the machine's own session: the image's session
/// may be the work of another machine.
pub fn or_discard(first: &str, image: &str, is_edit: bool) -> String {
    if !is_edit {
        return first.to_owned();
    }
    format!("{first}; 'headwater image discard {image}' ends a maintenance session without changes")
}

fn in_use(error: IoError) -> BackendError {
    BackendError::new(ProblemKind::Conflict, "cannot freeze the disk").because(error)
}
