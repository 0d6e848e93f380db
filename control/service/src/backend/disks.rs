//! Machines' disks, as the service needs them.

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
    /// Whose it is.
    pub machine: String,
    /// The machine's identity, of which the disk's serial number is made.
    pub uuid: Uuid,
    /// The machine's directory; the disk's socket goes there.
    pub run_dir: PathBuf,
    /// What lies under the write cache.
    pub version: ImageVersion,
    /// The write cache.
    pub cache: CacheSettings,
    /// The disk that is kept: it is opened as it was left, or begun. `None`: a fresh one, forgotten at its end.
    pub kept: Option<PersistentDiskRef>,
    /// The machine was on just now, and is to go on: where there is less space than its limit, the log alone says so.
    pub goes_on: bool,
    /// Whether the requests of the machine are recorded in a file.
    pub is_recorded: bool,
    /// What its socket speaks.
    pub transport: DiskTransport,
    /// What the machine boots with: a version that it cannot boot is refused.
    pub firmware: Firmware,
    /// Whether that runs signed loaders only: a version whose loader is not signed is refused.
    pub secure_boot: bool,
    /// Size of the machine's scratch disk, which is opened and closed together with this disk; 0: it has none.
    pub scratch_bytes: u64,
}

/// A disk that stayed open after the program that opened it had ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenDisk {
    /// The name of its machine.
    pub machine: String,
    /// The identity of its machine.
    pub uuid: Uuid,
    /// The version under its write cache.
    pub version: ImageVersion,
}

/// A disk that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistentDiskRef {
    /// It.
    pub id: Uuid,
    /// A machine had it open: if nothing of it is there, it is lost, and to begin it is an error.
    pub is_begun: bool,
}

/// A persistent disk whose machine is off.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PersistentDiskRequest {
    /// The disk.
    pub kept: PersistentDiskRef,
    /// What lies under it.
    pub version: ImageVersion,
    /// Its write cache.
    pub cache: CacheSettings,
    /// It is what the machine does to an image, and not the machine's own: there is an edit that can be given up.
    pub is_edit: bool,
}

/// The longest note that a store takes. A longer one is refused before a guest is frozen for it.
pub const NOTE_MAX_BYTES: usize = 1024;

/// What a version that is made of a disk is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealOrder {
    /// Where it came from.
    pub source: String,
    /// A line for people, at most [`NOTE_MAX_BYTES`].
    pub note: String,
    /// Who wants it.
    pub author: String,
    /// The highest number that a version of the image may have by then, retired ones aside. A newer one is an error of
    /// kind `Conflict`.
    pub newest_at_most: Option<u64>,
    /// The disk is what its machine does to an image, and not the machine's own: there is an edit that can be given up.
    pub is_edit: bool,
    /// The version may hold its machine's identity, and says so.
    pub keeps_identity: bool,
}

/// The identity that a machine was given, as far as its guest has it in files.
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
    /// What was found, each in words: `/etc/machine-id (its machine-id)`.
    pub found: Vec<String>,
    /// File systems that could not be looked into, each with why.
    pub unread: Vec<String>,
}

/// A version that was made of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealOutcome {
    /// It.
    pub version: ImageVersion,
    /// Bytes in chunks that the machine changed.
    pub changed_bytes: u64,
    /// Where `production` was pointed with it, which was not set, so that nobody boots it before it is promoted.
    pub production: Option<u64>,
}

/// A disk whose writes find no room, or that cannot do something else that its machine relies on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// What is full, or wrong.
    pub message: String,
    /// What to do.
    pub advice: String,
}

/// Opens disks.
#[async_trait]
pub trait Disks: Send + Sync + 'static {
    /// Whether this host can give such a write cache: enough memory, a usable overflow directory.
    async fn check(&self, cache: &CacheSettings) -> Result<(), BackendError>;

    /// The same of new limits: what stays as it was is not refused, whatever other limits there are by now.
    async fn check_change(&self, before: &CacheSettings, after: &CacheSettings) -> Result<(), BackendError>;

    /// Why a disk with such a write cache, `kept` or a fresh one, or the scratch disk beside it (0: none) could not be opened now for want
    /// of space. No limit is reserved ahead, so this may change at any time.
    async fn check_space(
        &self,
        cache: &CacheSettings,
        kept: Option<PersistentDiskRef>,
        scratch_bytes: u64,
    ) -> Result<(), BackendError>;

    /// Opens a disk and serves it on a socket in the machine's directory.
    async fn open(&self, request: DiskRequest) -> Result<Arc<dyn Disk>, BackendError>;

    /// The disks that are open without an owner, because the program that opened them has ended. Always empty if disks end with it.
    async fn left_open(&self) -> Result<Vec<OpenDisk>, BackendError> {
        Ok(Vec::new())
    }

    /// Takes over a disk of [`Disks::left_open`].
    async fn adopt(&self, disk: &OpenDisk) -> Result<Arc<dyn Disk>, BackendError> {
        let message = format!("machine '{}' has no open disk", disk.machine);
        Err(BackendError::new(ProblemKind::NotFound, message))
    }

    /// Opens a persistent disk that no machine uses, to make a version of it. Refuses one whose last close did not save all, until one does.
    async fn open_persistent(
        &self,
        request: PersistentDiskRequest,
    ) -> Result<Box<dyn FrozenDisk>, BackendError>;

    /// Who fills the write cache of a persistent disk that no machine uses. Whoever opens or discards the disk ends the scan.
    async fn persistent_contents(
        &self,
        request: PersistentDiskRequest,
        control: Arc<TaskControl>,
    ) -> Result<CacheContents, BackendError> {
        let _ = (request, control);
        Err(no_scan())
    }

    /// Forgets a persistent disk that nobody has open: first its key, so that it cannot be read, then its files. One that is
    /// not there is no error.
    async fn discard(&self, id: Uuid) -> Result<(), BackendError>;

    /// Whether there is anything of a persistent disk. If not, no machine ever wrote to it, or it was lost.
    async fn is_there(&self, id: Uuid) -> Result<bool, BackendError>;

    /// The memory that all disks share.
    fn host_ram(&self) -> HostRam;

    /// What all disks together use.
    fn metrics(&self) -> Vec<Sample>;

    /// The key files of the persistent disks that there are, whoever knows them. One without a key cannot be read.
    async fn persistent_keys(&self) -> Result<Vec<PathBuf>, BackendError>;

    /// Cleans what a daemon that died left in its overflow directory, and all persistent disks but `keep`. Returns what was
    /// removed. Called once, before the first disk is opened.
    async fn sweep(&self, keep: &[Uuid]) -> Result<Vec<String>, BackendError>;
}

/// An open disk. What was written to it is forgotten when it is closed or dropped, unless it is kept.
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

    /// What it did so far; `iops` is left 0.
    fn counters(&self) -> DiskCounters;

    /// The guest is up: what was read until now was its boot. Takes no time to speak of.
    fn has_booted(&self);

    /// Its metrics. The machine is not named yet.
    fn metrics(&self) -> Vec<Sample>;

    /// Refuses limits for which there is no space now, as a start does.
    fn check_limits(&self, cache: &CacheSettings) -> Result<(), BackendError>;

    /// Changes its limits; takes effect at once. The mode stays.
    fn set_limits(&self, cache: &CacheSettings);

    /// Whether writes find no room (not the short waits of a disk that is slower than its machine), flushes fail for good,
    /// or for a while, or reads wait.
    fn shortage(&self) -> Option<Shortage>;

    /// Gives its writes the room that only those need who read the disk from outside, where they find no other: they are
    /// disconnected. Harmless where there is room.
    fn relieve(&self);

    /// Why its state could not be kept now: somebody reads it from outside. Asked before a guest does anything for that. Takes no time to
    /// speak of.
    fn can_freeze(&self) -> Result<(), BackendError>;

    /// Its state at this moment, while the machine goes on. Takes no time to speak of. One at a time.
    fn freeze(&self) -> Result<Box<dyn FrozenDisk>, BackendError>;

    /// Who fills its write cache at this moment, while the machine goes on. Names of machine and time, and hints, are left out. A cancelled
    /// task ends it, and so does whoever freezes or reads the disk. One at a time.
    async fn contents(&self, control: Arc<TaskControl>) -> Result<CacheContents, BackendError> {
        let _ = control;
        Err(no_scan())
    }

    /// Ends it: no further requests, all space given back. An error says that what was written last is not on a persistent disk.
    /// Closing twice is harmless, and the second time says nothing of that.
    async fn close(&self) -> Result<(), BackendError>;
}

fn no_scan() -> BackendError {
    BackendError::new(ProblemKind::Invalid, "these disks have no write cache that can be scanned")
}

/// The state of a disk at one moment. Dropping it gives back what only it needed.
#[async_trait]
pub trait FrozenDisk: Send + Sync {
    /// Looks for a machine's identity: in the file systems that can be read, and for its private key in all blocks that it
    /// wrote. That reads all of these.
    async fn identity_left(
        &self,
        given: Given,
        control: Arc<TaskControl>,
    ) -> Result<IdentityLeft, BackendError>;

    /// Makes a version of it, whose parent is the version below. A failure, a cancelled task or a crash leaves no
    /// trace.
    async fn seal(
        self: Box<Self>,
        order: SealOrder,
        control: Arc<TaskControl>,
    ) -> Result<SealOutcome, BackendError>;
}
