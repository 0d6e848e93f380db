//! Machines' disks, as the service needs them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use headwater_api::{CacheSettings, DiskCounters, DiskTransport, ImageVersion, Sample};

use crate::backend::BackendError;

/// A disk to open.
#[derive(Clone, Debug)]
pub struct DiskRequest {
    /// Whose it is.
    pub machine: String,
    /// The machine's directory; the disk's socket goes there.
    pub run_dir: PathBuf,
    /// What lies under the write cache.
    pub version: ImageVersion,
    /// The write cache.
    pub cache: CacheSettings,
    /// What its socket speaks.
    pub transport: DiskTransport,
}

/// A disk whose writes find no room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What is full.
    pub message: String,
    /// What to do.
    pub advice: String,
}

/// Opens disks.
#[async_trait]
pub trait Disks: Send + Sync + 'static {
    /// Whether this host can give such a write cache: enough memory, a usable overflow directory.
    async fn check(&self, cache: &CacheSettings) -> Result<(), BackendError>;

    /// Opens a fresh, ephemeral disk and serves it on a socket in the machine's directory.
    async fn open(&self, request: DiskRequest) -> Result<Arc<dyn Disk>, BackendError>;

    /// What all disks together use.
    fn metrics(&self) -> Vec<Sample>;

    /// Cleans what a daemon that died left in its overflow directory. Returns what was removed. Called once,
    /// before the first disk is opened.
    async fn sweep(&self) -> Result<Vec<String>, BackendError>;
}

/// An open disk. What was written to it is forgotten when it is closed or dropped.
#[async_trait]
pub trait Disk: Send + Sync + 'static {
    /// The socket that serves it.
    fn socket(&self) -> &Path;

    /// What it did so far; `iops` is left 0.
    fn counters(&self) -> DiskCounters;

    /// Its metrics. The machine is not named yet.
    fn metrics(&self) -> Vec<Sample>;

    /// Changes its limits; takes effect at once. The mode stays.
    fn set_limits(&self, cache: &CacheSettings);

    /// Whether writes find no room: not the short waits of a disk that is slower than its machine.
    fn shortage(&self) -> Option<Shortage>;

    /// Ends it: no further requests, all space given back. Closing twice is harmless.
    async fn close(&self) -> Result<(), BackendError>;
}
