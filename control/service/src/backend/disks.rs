//! The trait [`Disks`], through which the service opens, seals and discards machines' disks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use headwater_api::platform::Firmware;
use headwater_api::{
    CacheContents, CacheSettings, DiskCounters, DiskTransport, HostRam, ImageVersion, ProblemKind, Sample,
};
use headwater_db::Secret;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::backend::{BackendError, TaskControl};

/// A disk to open.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskRequest {
    /// The machine's name.
    pub machine: String,
    /// The machine's UUID, from which the disk's serial number is made.
    pub uuid: Uuid,
    /// The machine's directory, for the disk's socket.
    pub run_dir: PathBuf,
    /// The version below the write cache.
    pub version: ImageVersion,
    /// The write cache.
    pub cache: CacheSettings,
    /// The persistent disk to open or create. `None`: a fresh disk, which is discarded at its end.
    pub kept: Option<PersistentDiskRef>,
    /// Whether the machine was on just now and must continue: too little free space for its limit is then only logged.
    pub goes_on: bool,
    /// Whether the requests of the machine are recorded in a file.
    pub is_recorded: bool,
    /// The protocol of its socket.
    pub transport: DiskTransport,
    /// The machine's firmware. A version that it cannot boot is an error.
    pub firmware: Firmware,
    /// Whether the firmware runs only signed loaders. A version with an unsigned loader is then an error.
    pub secure_boot: bool,
    /// Size of the machine's scratch disk, which is opened and closed together with this disk; 0: it has none.
    pub scratch_bytes: u64,
}

/// A disk that stayed open after its daemon had ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenDisk {
    /// The name of its machine.
    pub machine: String,
    /// The identity of its machine.
    pub uuid: Uuid,
    /// The version below its write cache.
    pub version: ImageVersion,
}

/// A reference to a persistent disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistentDiskRef {
    /// Its identity.
    pub id: Uuid,
    /// Whether a machine had it open: if its files are missing, it is then lost, and creating it anew is an error.
    pub is_begun: bool,
}

/// A persistent disk whose machine is off.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PersistentDiskRequest {
    /// The disk.
    pub kept: PersistentDiskRef,
    /// The version below it.
    pub version: ImageVersion,
    /// Its write cache.
    pub cache: CacheSettings,
    /// Whether it belongs to a maintenance session. The advice of errors then also names 'headwater image discard'.
    pub is_edit: bool,
}

/// The longest note that a store accepts. A longer note fails before a guest is frozen for the seal.
pub const NOTE_MAX_BYTES: usize = 1024;

/// The options of a seal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealOrder {
    /// The text for the version's source.
    pub source: String,
    /// A note for people, at most [`NOTE_MAX_BYTES`].
    pub note: String,
    /// The caller.
    pub author: String,
    /// The highest number that a version of the image may have when the version is made, except for retired versions. A
    /// newer version is an error of kind `Conflict`.
    pub newest_at_most: Option<u64>,
    /// Whether the disk belongs to a maintenance session. The advice of errors then also names 'headwater image discard'.
    pub is_edit: bool,
    /// Whether the version is marked because it may contain its machine's identity.
    pub keeps_identity: bool,
}

/// The identity that a machine was given, as far as its guest stores it in files.
#[derive(Clone, Debug)]
pub struct Given {
    /// Its host name.
    pub host_name: String,
    /// Its machine-id.
    pub machine_id: String,
    /// The private half of its SSH host key.
    pub ssh_host_key_private: Secret,
}

/// The parts of a machine's identity that are still on its disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityLeft {
    /// What was found, in words: `/etc/machine-id (its machine-id)`.
    pub found: Vec<String>,
    /// File systems that could not be searched, each with the reason.
    pub unread: Vec<String>,
}

/// The result of a seal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealOutcome {
    /// The new version.
    pub version: ImageVersion,
    /// Bytes in chunks that the machine changed.
    pub changed_bytes: u64,
    /// The version to which `production` was set at the same time, because it was not set and machines would otherwise boot
    /// the new version before it is promoted.
    pub production: Option<u64>,
}

/// A problem of a disk: its writes find no space, or it cannot do something else on which its machine relies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// What is full or wrong.
    pub message: String,
    /// What to do.
    pub advice: String,
}

/// Opens and manages disks.
#[async_trait]
pub trait Disks: Send + Sync + 'static {
    /// Fails if this host cannot provide such a write cache: too little memory, an unusable overflow directory.
    async fn check(&self, cache: &CacheSettings) -> Result<(), BackendError>;

    /// The same for new limits of an existing write cache. Limits that do not change are not checked again.
    async fn check_change(&self, before: &CacheSettings, after: &CacheSettings) -> Result<(), BackendError>;

    /// Fails if there is no space now to open a disk with such a write cache (the persistent disk `kept`, or a fresh disk),
    /// or its scratch disk (0: none). No limit is reserved ahead, so this may change at any time.
    async fn check_space(
        &self,
        cache: &CacheSettings,
        kept: Option<PersistentDiskRef>,
        scratch_bytes: u64,
    ) -> Result<(), BackendError>;

    /// Opens a disk and serves it on a socket in the machine's directory.
    async fn open(&self, request: DiskRequest) -> Result<Arc<dyn Disk>, BackendError>;

    /// The disks that an earlier daemon left open. Always empty if disks end with the daemon.
    async fn left_open(&self) -> Result<Vec<OpenDisk>, BackendError> {
        Ok(Vec::new())
    }

    /// Takes over a disk of [`Disks::left_open`].
    async fn adopt(&self, disk: &OpenDisk) -> Result<Arc<dyn Disk>, BackendError> {
        let message = format!("machine '{}' has no open disk", disk.machine);
        Err(BackendError::new(ProblemKind::NotFound, message))
    }

    /// Opens a persistent disk that no machine uses, to seal it. Fails if the last close of the disk could not save all
    /// writes; this lasts until a later close saves them.
    async fn open_persistent(
        &self,
        request: PersistentDiskRequest,
    ) -> Result<Box<dyn FrozenDisk>, BackendError>;

    /// The report of what occupies the write cache of a persistent disk that no machine uses. Opening or discarding the
    /// disk ends the scan.
    async fn persistent_contents(
        &self,
        request: PersistentDiskRequest,
        control: Arc<TaskControl>,
    ) -> Result<CacheContents, BackendError> {
        let _ = (request, control);
        Err(no_scan())
    }

    /// Removes a persistent disk that nobody has open: first its key, so that it cannot be read, then its files. It need
    /// not exist.
    async fn discard(&self, id: Uuid) -> Result<(), BackendError>;

    /// Whether a persistent disk has files. If not, no machine ever wrote to it, or it was lost.
    async fn is_there(&self, id: Uuid) -> Result<bool, BackendError>;

    /// The memory that all disks share.
    fn host_ram(&self) -> HostRam;

    /// Metrics of all disks together.
    fn metrics(&self) -> Vec<Sample>;

    /// The key files of all existing persistent disks. A disk without its key cannot be read.
    async fn persistent_keys(&self) -> Result<Vec<PathBuf>, BackendError>;

    /// Removes orphans of an earlier daemon in its overflow directory, and all persistent disks except `keep`. Says in words
    /// which files were removed, and why. Called once, before the first disk is opened.
    async fn sweep(&self, keep: &[Uuid]) -> Result<Vec<String>, BackendError>;
}

/// An open disk. Its contents are discarded when it is closed or dropped, unless it is persistent.
#[async_trait]
pub trait Disk: Send + Sync + 'static {
    /// The socket that serves it.
    fn socket(&self) -> &Path;

    /// Waits until the disk is gone while its machine is on, and says why. Never returns if that cannot happen.
    async fn lost(&self) -> String {
        std::future::pending().await
    }

    /// Size of its sectors: 512 or 4,096.
    fn sector_bytes(&self) -> u32 {
        512
    }

    /// Its counters so far; `iops` is left 0.
    fn counters(&self) -> DiskCounters;

    /// Records that the guest has booted: the reads so far were its boot. Returns at once.
    fn has_booted(&self);

    /// Its metrics, without the label of the machine.
    fn metrics(&self) -> Vec<Sample>;

    /// Fails for limits for which there is no space now, like a start.
    fn check_limits(&self, cache: &CacheSettings) -> Result<(), BackendError>;

    /// Changes its limits at once. The mode stays.
    fn set_limits(&self, cache: &CacheSettings);

    /// The problem of the disk, if writes find no space (more than the short waits of a slow overflow disk), flushes fail
    /// permanently or for a while, or reads wait.
    fn shortage(&self) -> Option<Shortage>;

    /// If its writes find no space, frees the space that only snapshots need, by revoking them from external readers.
    /// Does nothing if there is space.
    fn relieve(&self);

    /// Fails if a snapshot cannot be made now because somebody reads the disk. Checked before a guest does anything for it.
    /// Returns at once.
    fn can_freeze(&self) -> Result<(), BackendError>;

    /// Makes a snapshot while the machine runs. Returns at once. One at a time.
    fn freeze(&self) -> Result<Box<dyn FrozenDisk>, BackendError>;

    /// The report of what occupies its write cache now, while the machine runs. Names, times and hints are not filled in. A
    /// cancelled task, a seal or a reader ends it. One at a time.
    async fn contents(&self, control: Arc<TaskControl>) -> Result<CacheContents, BackendError> {
        let _ = control;
        Err(no_scan())
    }

    /// Closes the disk: no further requests, all space freed. An error says that the last writes could not be saved to the
    /// persistent disk. Closing twice is harmless; the second call does not report such an error again.
    async fn close(&self) -> Result<(), BackendError>;
}

fn no_scan() -> BackendError {
    BackendError::new(ProblemKind::Invalid, "these disks have no write cache that can be scanned")
}

/// A snapshot of a disk. Dropping it frees what only it needed.
#[async_trait]
pub trait FrozenDisk: Send + Sync {
    /// Searches for a machine's identity: in the file systems that can be read, and for its private key in all blocks that
    /// it wrote, which reads all of these.
    async fn identity_left(
        &self,
        given: Given,
        control: Arc<TaskControl>,
    ) -> Result<IdentityLeft, BackendError>;

    /// Makes a version of the snapshot, whose parent is the version below. A failure, a cancelled task or a crash leaves
    /// nothing behind.
    async fn seal(
        self: Box<Self>,
        order: SealOrder,
        control: Arc<TaskControl>,
    ) -> Result<SealOutcome, BackendError>;
}
