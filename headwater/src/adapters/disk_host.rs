//! What a daemon needs from the disks of its host in addition to [`Disks`]: external readers (NBD clients of the daemon), boot traces,
//! and the last known state of the store. The disks are in this process ([`super::disks::Volumes`]) or in a separate one
//! ([`crate::disk_process`]); the daemon uses both through the trait [`DiskHost`].

use std::sync::Arc;
use std::time::SystemTime;

use headwater_api::ImageVersion;
use headwater_block::{Device, Geometry};
use headwater_image::{DiskCache, Trace};
use headwater_service::backend::{BackendError, Disks, PersistentDiskRef, PersistentDiskRequest};
use headwater_store::{Hash, Image, ImageName};

use crate::adapters::disks::Volumes;
use crate::adapters::images::image_failed;
use crate::traces::{Place, Traces};

/// A snapshot of a disk for an external reader.
pub struct OpenReader {
    /// The disk, read-only.
    pub device: Arc<dyn Device>,
    /// Whether the snapshot was made for this reader, and not for an earlier one.
    pub is_first: bool,
}

/// The disks of this host.
pub trait DiskHost: Disks {
    /// Size and sectors of the disk of a machine that is on, for a reader outside. `None`: the machine is off.
    fn geometry_of(&self, machine: &str) -> Result<Option<Geometry>, BackendError>;

    /// Size and sectors of a disk over a version, for an external reader.
    fn geometry_over(&self, version: &ImageVersion) -> Result<Geometry, BackendError>;

    /// Whether a persistent disk has any data.
    fn is_begun(&self, kept: PersistentDiskRef) -> bool;

    /// Opens a snapshot of the disk of a machine that is on: a new one, or that of present readers. `None`: the machine is
    /// off.
    fn open_reader(&self, machine: &str) -> Result<Option<OpenReader>, BackendError>;

    /// Opens a persistent disk whose machine is off.
    fn read_persistent(&self, request: &PersistentDiskRequest) -> Result<OpenReader, BackendError>;

    /// The boot traces of the store's versions.
    fn boot_traces(&self) -> Arc<dyn BootTraces>;

    /// Why reads of images wait, if they do.
    fn reads_wait(&self) -> Option<String>;

    /// Makes reads that wait for the store fail, and later reads too.
    fn close_store(&self);
}

/// The boot traces of a store's versions.
pub trait BootTraces: Send + Sync {
    /// Why boots are not recorded, if that is known.
    fn unrecorded(&self) -> Option<String>;

    /// The trace of a version, and its location.
    fn find(&self, manifest: Hash) -> Result<Option<(Trace, Place)>, BackendError>;

    /// Merges boots with the stored trace. Returns the result.
    fn merge(&self, boots: Trace) -> Result<(Trace, Place), BackendError>;

    /// Removes the trace of a version.
    fn remove(&self, manifest: Hash) -> Result<(), BackendError>;
}

/// Stores the last known state of a remote store for the next process.
pub trait KnownStore: Send + Sync {
    /// Stores the chunk size of a store.
    fn keep_store(&self, store: &str, chunk_bytes: u32);

    /// The chunk size of a store, and when it was stored.
    fn kept_store(&self, store: &str) -> Option<(u32, SystemTime)>;

    /// Stores the versions of an image.
    fn keep_image(&self, store: &str, image: &Image);

    /// The versions of an image, and when they were stored.
    fn kept_image(&self, store: &str, name: &ImageName) -> Option<(Image, SystemTime)>;

    /// Removes an image that the store does not have any more.
    fn forget_image(&self, store: &str, name: &ImageName);
}

impl DiskHost for Volumes {
    fn geometry_of(&self, machine: &str) -> Result<Option<Geometry>, BackendError> {
        Ok(Self::geometry_of(self, machine))
    }

    fn geometry_over(&self, version: &ImageVersion) -> Result<Geometry, BackendError> {
        Self::geometry_over(self, version)
    }

    fn is_begun(&self, kept: PersistentDiskRef) -> bool {
        Self::is_begun(self, kept)
    }

    fn open_reader(&self, machine: &str) -> Result<Option<OpenReader>, BackendError> {
        let reader = Self::open_reader(self, machine).transpose()?;
        Ok(reader.map(|reader| OpenReader { is_first: reader.is_first(), device: Arc::new(reader) }))
    }

    fn read_persistent(&self, request: &PersistentDiskRequest) -> Result<OpenReader, BackendError> {
        let reader = Self::read_persistent(self, request)?;
        Ok(OpenReader { is_first: reader.is_first(), device: Arc::new(reader) })
    }

    fn boot_traces(&self) -> Arc<dyn BootTraces> {
        self.traces()
    }

    fn reads_wait(&self) -> Option<String> {
        Self::reads_wait(self)
    }

    fn close_store(&self) {
        Self::close_store(self);
    }
}

impl BootTraces for Traces {
    fn unrecorded(&self) -> Option<String> {
        Self::unrecorded(self).map(str::to_owned)
    }

    fn find(&self, manifest: Hash) -> Result<Option<(Trace, Place)>, BackendError> {
        Ok(Self::find(self, manifest))
    }

    fn merge(&self, boots: Trace) -> Result<(Trace, Place), BackendError> {
        Self::merge(self, boots).map_err(image_failed)
    }

    fn remove(&self, manifest: Hash) -> Result<(), BackendError> {
        Self::remove(self, manifest).map_err(image_failed)
    }
}

impl KnownStore for DiskCache {
    fn keep_store(&self, store: &str, chunk_bytes: u32) {
        Self::keep_store(self, store, chunk_bytes);
    }

    fn kept_store(&self, store: &str) -> Option<(u32, SystemTime)> {
        Self::kept_store(self, store)
    }

    fn keep_image(&self, store: &str, image: &Image) {
        Self::keep_image(self, store, image);
    }

    fn kept_image(&self, store: &str, name: &ImageName) -> Option<(Image, SystemTime)> {
        Self::kept_image(self, store, name)
    }

    fn forget_image(&self, store: &str, name: &ImageName) {
        Self::forget_image(self, store, name);
    }
}
