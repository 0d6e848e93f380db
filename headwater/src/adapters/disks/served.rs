//! An open disk of a machine that is on: its volume, the server on its socket, and all that is open with it. [`super`] creates it; the
//! service closes it, changes its limits, freezes it for a seal, and reads its counters, through the trait [`Disk`].
//!
//! It ends in one of two ways: `close` ends the disk, and `hand_over` leaves it to the next disk process while the machine continues.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use headwater_api::{
    CacheContents, CacheMode, CacheSettings, DiskCounters, DiskTransport, ImageVersion, ProblemKind, Sample,
};
use headwater_block::{Device, IoError};
use headwater_image::BackgroundProgress;
use headwater_nbd::{Address, SingleExport};
use headwater_service::backend::{BackendError, Disk, DiskRequest, FrozenDisk, Shortage, TaskControl};
use headwater_store::{Pin, Store};
use headwater_volume::Volume;
use parking_lot::Mutex;
use uuid::Uuid;

use super::in_keeper::DiskInKeeper;
use super::recordings::Recording;
use super::scratch::Scratch;
use super::shortage::Failing;
use super::{at_least, blocking, kind_of};
use crate::adapters::contents::{self, ScanPermit, Scans};
use crate::adapters::frozen::FrozenVolume;
use crate::adapters::metrics;
use crate::adapters::persistent_disks::PersistentDiskFiles;
use crate::adapters::release::release;
use crate::adapters::snapshot_leases::{Reader, SnapshotLeases, being_read};
use crate::adapters::totals::Totals;
use crate::streaming::Streamed;

/// The server on the machine's socket.
pub(super) enum Server {
    VhostUser(headwater_vhost_user::Server),
    Nbd(headwater_nbd::Server),
}

impl Server {
    pub(super) fn bind(
        request: &DiskRequest,
        socket: &Path,
        serial: String,
        device: Arc<dyn Device>,
        is_recovered: bool,
    ) -> Result<Self, BackendError> {
        let machine = &request.machine;
        let failed = || BackendError::new(ProblemKind::Failed, "cannot serve the machine's disk");
        match request.transport {
            DiskTransport::VhostUser => {
                let options = headwater_vhost_user::Options {
                    name: format!("machine {machine}"),
                    serial,
                    // Each start has a disk of its own.
                    resume: None,
                    recovered: is_recovered,
                    // The guest's memory is a memfd from QEMU. A compromised QEMU must not crash the disk process of the others.
                    sealed_memory: true,
                    limits: headwater_vhost_user::Limits::default(),
                };
                let server = headwater_vhost_user::Server::bind(socket, device, options);
                server.map(Self::VhostUser).map_err(|e| failed().because(e))
            }
            DiskTransport::Nbd => {
                let export = SingleExport::new(device, format!("machine {machine}"));
                let limits = headwater_nbd::Limits::default();
                let server = headwater_nbd::Server::bind(Address::Unix(socket.to_owned()), export, limits);
                server.map(Self::Nbd).map_err(|e| failed().because(e))
            }
        }
    }

    pub(super) fn stop(&self) {
        match self {
            Self::VhostUser(server) => server.stop(),
            Self::Nbd(server) => server.stop(),
        }
    }

    /// The number of writes that wait for space in the server, which retries them. Their guest has no answer yet.
    pub(super) fn waiting_writes(&self) -> usize {
        match self {
            Self::VhostUser(server) => server.waiting_writes(),
            // NBD clients get the error, and QEMU then pauses the machine.
            Self::Nbd(_) => 0,
        }
    }
}

/// The use of a persistent disk by a machine that is on. It is marked beside the disk, so that a seal does not make a version without the
/// last writes, however the use ends.
#[derive(Clone, Copy)]
pub(super) struct PersistentUse {
    id: Uuid,
    /// The last writes of an earlier use may be missing.
    was_incomplete: bool,
}

impl PersistentUse {
    /// Begins before the machine can write.
    pub(super) fn begin(files: &PersistentDiskFiles, id: Uuid, machine: &str) -> Result<Self, BackendError> {
        let was_incomplete = files.begin_use(id)?;
        if was_incomplete {
            tracing::warn!(machine, disk = %id, "the last writes of an earlier run may be missing on its persistent disk: check its files");
        }
        Ok(Self { id, was_incomplete })
    }

    /// Ends after the last writes were saved, or not. A use without a request must not clear an earlier record of lost writes.
    pub(super) fn end(
        self,
        files: &PersistentDiskFiles,
        saved: Result<(), IoError>,
        is_used: bool,
    ) -> Result<(), BackendError> {
        saved.map_err(not_saved)?;
        if (is_used || !self.was_incomplete)
            && let Err(error) = files.set_incomplete(self.id, false)
        {
            tracing::error!(disk = %self.id, %error, "cannot record that a persistent disk has its last writes: no version can be made of it until the next stop of its machine");
        }
        Ok(())
    }
}

/// An open disk of a machine that is on.
pub(super) struct ServedVolume {
    pub(super) machine: String,
    pub(super) mode: CacheMode,
    pub(super) files: PersistentDiskFiles,
    /// The use of the persistent disk, if it is one.
    pub(super) kept: Option<PersistentUse>,
    /// Since when the write cache could not be saved.
    pub(super) failing: Mutex<Failing>,
    pub(super) store: Arc<dyn Store>,
    /// The version on which the disk is based.
    pub(super) below: ImageVersion,
    pub(super) socket: PathBuf,
    pub(super) transport: DiskTransport,
    pub(super) volume: Arc<Volume>,
    /// The background work for the image while the disk is open.
    pub(super) image: Weak<Streamed>,
    /// The snapshots that external readers use.
    pub(super) snapshot_leases: SnapshotLeases,
    pub(super) totals: Arc<Totals>,
    pub(super) in_keeper: Arc<DiskInKeeper>,
    pub(super) scans: Arc<Scans>,
    /// `None` once the disk is closed.
    pub(super) parts: Arc<Mutex<Option<ServedParts>>>,
    /// Held while the disk is closed: who closes it again waits until its last writes are saved.
    pub(super) closing: Arc<Mutex<()>>,
}

/// The parts of an open disk.
pub(super) struct ServedParts {
    pub(super) server: Server,
    pub(super) recording: Option<Recording>,
    pub(super) scratch: Option<Scratch>,
    /// As in [`super::Opened`].
    pub(super) pin: Pin,
    pub(super) version: Arc<Pin>,
}

impl ServedVolume {
    /// The progress of the copy of the image to this host; zero if no copy is made.
    pub(super) fn copied(&self) -> BackgroundProgress {
        self.image.upgrade().and_then(|image| image.copied()).unwrap_or_default()
    }

    /// Fails if the next process could not continue with this disk. First flushes it, so that less is left to save in
    /// [`ServedVolume::hand_over`]; the machine may write meanwhile.
    pub(super) fn can_hand_over(&self) -> Result<(), BackendError> {
        if self.parts.lock().is_none() {
            return Ok(());
        }
        let machine = &self.machine;
        headwater_block::blocking::flush(&*self.volume).map_err(|error| {
            let message = format!("the persistent disk of machine '{machine}' cannot be saved");
            BackendError::new(kind_of(&error), message).because(error)
        })?;
        if self.in_keeper.is_possible() {
            return Ok(());
        }
        let message = format!("the disk of machine '{machine}' cannot be handed over");
        let advice = "the log of the disk process says why; stop the machine first";
        Err(BackendError::new(ProblemKind::Conflict, message).advise(advice))
    }

    /// Passes the disk to the next disk process while the machine runs. Every answered write is included. A persistent disk is
    /// saved.
    pub(super) fn hand_over(&self) -> Result<(), BackendError> {
        let Some(parts) = self.parts.lock().take() else { return Ok(()) };
        drop(self.snapshot_leases.take_back());
        let ServedParts { server, recording, scratch, pin, version } = parts;
        // What has no answer by then, the front-end sends again.
        server.stop();
        if let Some(scratch) = &scratch {
            scratch.stop();
        }
        drop(recording);
        if let Some(kept) = self.kept {
            let closed = self.volume.try_close();
            if closed.is_err() {
                return kept.end(&self.files, closed, is_used(&self.volume));
            }
            let caches = super::in_keeper::caches(&self.volume, scratch.as_ref());
            let caches = caches.map_err(|e| BackendError::from_io("cannot hand over its scratch disk", e))?;
            self.in_keeper.hand_over(&caches).map_err(|e| {
                BackendError::new(
                    ProblemKind::Failed,
                    format!("the keeper of disks does not take the disk: {e:#}"),
                )
            })?;
            // Last: without the mark of an open disk, a process that takes too long is killed.
            kept.end(&self.files, closed, is_used(&self.volume))?;
        }
        release((pin, version));
        Ok(())
    }

    pub(super) fn open_reader(&self) -> Result<Reader, BackendError> {
        self.snapshot_leases.borrow(|| self.frozen())
    }

    /// Opens a snapshot for a scan of the write cache.
    pub(super) fn open_scan(&self) -> Result<Reader, BackendError> {
        self.snapshot_leases.borrow_for_scan(|| self.frozen())
    }

    /// Freezes the disk for one caller, without sharing the view.
    pub(super) fn freeze_alone(&self) -> Result<FrozenVolume, BackendError> {
        self.snapshot_leases.freeze_alone(|| self.frozen())
    }

    fn frozen(&self) -> Result<FrozenVolume, BackendError> {
        // A closed disk is not lent: its closing takes it back from readers after this lock.
        let parts = self.parts.lock();
        let Some(parts) = &*parts else {
            return Err(BackendError::new(ProblemKind::Conflict, "the machine is being switched off"));
        };
        FrozenVolume::of_machine(&self.store, &self.below, &self.volume, Arc::clone(&parts.version))
    }
}

#[async_trait]
impl Disk for ServedVolume {
    fn socket(&self) -> &Path {
        &self.socket
    }

    fn sector_bytes(&self) -> u32 {
        self.volume.geometry().logical_block_bytes
    }

    fn counters(&self) -> DiskCounters {
        let (volume, copied) = (self.volume.counters(), self.copied());
        DiskCounters {
            reads: volume.read_ops,
            writes: volume.write_ops,
            read_bytes: volume.read_bytes,
            written_bytes: volume.write_bytes,
            image_read_bytes: volume.image_read_bytes,
            live_bytes: volume.cache.live_bytes,
            ram_used_bytes: volume.cache.ram_used_bytes,
            disk_used_bytes: volume.cache.disk_used_bytes,
            spilled_bytes: volume.cache.spilled_bytes,
            pauses: volume.cache.paused_writes,
            iops: 0,
            to_copy_bytes: copied.total_bytes,
            copied_bytes: copied.done_bytes,
        }
    }

    fn has_booted(&self) {
        if let Some(image) = self.image.upgrade() {
            image.has_booted();
        }
    }

    fn metrics(&self) -> Vec<Sample> {
        let counters = self.volume.counters();
        let mut samples = metrics::volume(&counters);
        samples.push(metrics::cache_info(self.mode, &counters.cache));
        samples.extend(metrics::hydration(self.copied()));
        samples
    }

    fn can_freeze(&self) -> Result<(), BackendError> {
        // A scan ends now, and not while the guest's file systems are frozen.
        self.snapshot_leases.end_scan();
        match self.snapshot_leases.readers() {
            0 => Ok(()),
            readers => Err(being_read(readers)),
        }
    }

    fn freeze(&self) -> Result<Box<dyn FrozenDisk>, BackendError> {
        Ok(Box::new(self.freeze_alone()?))
    }

    fn check_limits(&self, cache: &CacheSettings) -> Result<(), BackendError> {
        let disk_bytes = (self.mode != CacheMode::Ram).then_some(at_least(cache.disk_bytes));
        self.volume
            .check_limits(None, disk_bytes)
            .map_err(|e| BackendError::new(kind_of(&e), "its write cache cannot have that limit").because(e))
    }

    fn set_limits(&self, cache: &CacheSettings) {
        self.volume.set_weight(cache.weight);
        self.in_keeper.set_limits(cache);
        // The buffer of mode `disk` has a size of its own, and mode `ram` no disk.
        if self.mode != CacheMode::Disk {
            self.volume.set_ram_bytes(cache.ram_bytes);
        }
        if self.mode != CacheMode::Ram {
            self.volume.set_disk_bytes(at_least(cache.disk_bytes));
        }
    }

    fn shortage(&self) -> Option<Shortage> {
        self.trouble()
    }

    fn relieve(&self) {
        if !self.is_full() {
            return;
        }
        let readers = self.snapshot_leases.take_back().readers;
        if readers > 0 {
            tracing::warn!(machine = %self.machine, readers, "the machine's write cache is full: the snapshot that NBD clients read has ended, to free its space");
        }
    }

    async fn contents(&self, control: Arc<TaskControl>) -> Result<CacheContents, BackendError> {
        let permit = ScanPermit::take(&self.scans)?;
        let reader = self.open_scan()?;
        blocking("scan the write cache", move || contents::scan(reader, permit, control)).await
    }

    async fn close(&self) -> Result<(), BackendError> {
        let (volume, parts, snapshot_leases) =
            (self.volume.clone(), self.parts.clone(), self.snapshot_leases.clone());
        let (totals, files, kept) = (Arc::clone(&self.totals), self.files.clone(), self.kept);
        let (in_keeper, closing) = (Arc::clone(&self.in_keeper), Arc::clone(&self.closing));
        blocking("close the disk", move || {
            let _alone = closing.lock();
            let parts = parts.lock().take();
            // Otherwise readers would keep the machine's data after the close.
            drop(snapshot_leases.take_back());
            // No process goes on with it.
            in_keeper.end();
            volume.end();
            // Makes writes that wait for space give up; otherwise the server would wait for them.
            let saved = volume.try_close();
            let is_first = parts.is_some();
            if let Some(ServedParts { server, recording, scratch, pin, version }) = parts {
                server.stop();
                if let Some(scratch) = scratch {
                    scratch.close(&totals);
                }
                drop((server, recording));
                release((pin, version));
            }
            totals.closed(&volume);
            match kept {
                // Closing again has nothing to save.
                Some(kept) if is_first => kept.end(&files, saved, is_used(&volume)),
                _ => saved.map_err(not_saved),
            }
        })
        .await
    }
}

/// Whether a machine has sent a request.
fn is_used(volume: &Volume) -> bool {
    let used = volume.counters();
    used.read_ops + used.write_ops > 0
}

fn not_saved(error: IoError) -> BackendError {
    let message = "the machine's last writes are lost, and its persistent disk has the state of the last successful flush, or a later state";
    BackendError::new(kind_of(&error), message).because(error).advise(
        "start the machine, check its files, and stop it: until it has stopped with all writes saved, no version can be made of its disk",
    )
}
