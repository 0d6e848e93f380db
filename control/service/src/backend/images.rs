//! The trait [`Images`], through which the service uses the store of golden images.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_api::name::ImageRef;
use headwater_api::platform::Firmware;
use headwater_api::{
    BootTrace, Channel, DiffReport, ExportFormat, FileId, Image, ImageVersion, PullReport, PulledImage,
    Removed, SourceFormat, VerifyReport, VerifyRequest,
};
use tokio::sync::mpsc;

use crate::backend::{BackendError, TaskControl};

/// The result of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportOutcome {
    /// The version that holds the source's bytes.
    pub version: ImageVersion,
    /// Whether the import made it; `false` where the newest version held the same bytes already.
    pub created: bool,
    /// Chunks that were damaged in the store, to which this version does not refer; older ones do.
    pub damaged_chunks: u64,
    /// Remarks on the disk, a line each.
    pub remarks: Vec<String>,
}

/// The options of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportOrder {
    /// The image.
    pub name: String,
    /// An absolute path, or an NBD URI.
    pub source: String,
    /// The file's format; `None`: it is detected from the first bytes.
    pub format: Option<SourceFormat>,
    /// Whether its backing files may be outside of its directory.
    pub backing: bool,
    /// The name of the source in the version, if it is not `source`.
    pub source_name: Option<String>,
    /// The identity of the file that the path must name, if the client knows it.
    pub source_id: Option<FileId>,
    /// Size of the disk's sectors; `None`: it is detected.
    pub sector_bytes: Option<u32>,
    /// A note for people.
    pub note: String,
    /// The caller.
    pub author: String,
}

/// The options of a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullOrder {
    /// The store: an absolute path, or a URL.
    pub source: String,
    /// The versions. Empty: all versions, with the channels.
    pub images: Vec<ImageRef>,
}

/// The changes that a pull made to one image. Reported after each image, even if the pull fails later.
#[derive(Debug)]
pub struct Pulled {
    /// What people call the store that it came from.
    pub source: String,
    /// The changes; its `edited_by` is not set yet. If `tried` is set, there may be none.
    pub image: PulledImage,
    /// The error of a change that may or may not have been made.
    pub tried: Option<BackendError>,
}

/// The result of a pull that has handled all images.
#[derive(Debug, Default)]
pub struct PullOutcome {
    /// The report; the images were reported before, and `not_copied` is separate.
    pub report: PullReport,
    /// Versions or images that were not copied, and why.
    pub not_copied: Vec<(String, BackendError)>,
}

/// A channel that is to point, or points now, to a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// The image.
    pub image: String,
    /// The version's number.
    pub version: u64,
    /// The channel.
    pub channel: Channel,
    /// When it takes effect.
    pub at_ms: u64,
    /// The caller.
    pub author: String,
}

/// The images of the store.
#[derive(Debug, Default)]
pub struct Listed {
    /// The images that can be read, by name.
    pub images: Vec<Image>,
    /// The errors of the other images. Each names its image.
    pub unreadable: Vec<BackendError>,
}

/// The results of the promotions that were due.
#[derive(Debug, Default)]
pub struct Promoted {
    /// The promotions that were made, each with the version to which its channel pointed before.
    pub done: Vec<(Promotion, Option<u64>)>,
    /// The images whose promotions failed, and why. These promotions stay due.
    pub failed: Vec<(String, BackendError)>,
}

/// Why a version or image is retained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetentionPurpose {
    /// A persistent disk is based on it.
    Disk,
    /// It is the base of a maintenance session. All daemons of a store together have at most one for each image.
    MaintenanceSession,
    /// A machine or a catalog names this version.
    Pin,
    /// Machines or catalogs boot a channel of the image.
    Follow,
}

/// A retention root: keeps other daemons from removing a version or an image that this daemon needs, even if no disk is
/// open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionRoot {
    /// The reason.
    pub purpose: RetentionPurpose,
    /// An identifier within this daemon: letters, digits, `-` and `.`.
    pub id: String,
    /// The image.
    pub image: String,
    /// The hash of the version's manifest. `None`: the image is retained, not a version.
    pub hash: Option<String>,
    /// The user, for people: `machine 'lab'`. Empty in roots that were read from the store.
    pub holder: String,
}

impl RetentionRoot {
    /// Whether both are the same root.
    pub fn is_same(&self, other: &Self) -> bool {
        let Self { purpose, id, image, hash, holder: _ } = self;
        (*purpose, id, image, hash) == (other.purpose, &other.id, &other.image, &other.hash)
    }
}

/// The store of images.
///
/// # Contract
/// - Names and references were checked by the caller.
/// - A failed or cancelled import or export leaves nothing behind. A failed pull leaves complete versions only.
/// - The error of a change says if the change may or may not have been made ([`BackendError::is_unknown`]).
/// - Long operations run on their own threads, not on the caller's.
#[async_trait]
pub trait Images: Send + Sync + 'static {
    /// All images. A damaged image does not hide the others.
    async fn list(&self) -> Result<Listed, BackendError>;

    /// One image; `None` if it does not exist.
    async fn image(&self, name: &str) -> Result<Option<Image>, BackendError>;

    /// The version to which a reference resolves now. An error of kind `NotFound` lists the existing ones.
    async fn resolve(&self, reference: &ImageRef) -> Result<ImageVersion, BackendError>;

    /// Fails if a machine with this firmware cannot boot the version, as far as the disk shows that: an error of kind
    /// `Invalid` that says what was found.
    async fn check_bootable(&self, version: &ImageVersion, firmware: Firmware) -> Result<(), BackendError> {
        let _ = (version, firmware);
        Ok(())
    }

    /// Makes a version from a disk.
    async fn import(
        &self,
        order: ImportOrder,
        control: Arc<TaskControl>,
    ) -> Result<ImportOutcome, BackendError>;

    /// Copies versions from another store, where each keeps its number. The changes of an image are reported when they are
    /// complete, before the next image begins and before an error ends the pull: versions that were copied completely stay.
    async fn pull(
        &self,
        order: PullOrder,
        control: Arc<TaskControl>,
        told: mpsc::Sender<Pulled>,
    ) -> Result<PullOutcome, BackendError>;

    /// Points a channel to a version now, and cancels a scheduled promotion of that channel. Returns the previous version,
    /// and the cancelled promotion.
    async fn promote(&self, promotion: &Promotion) -> Result<(Option<u64>, Option<Promotion>), BackendError>;

    /// Schedules a promotion. It replaces a scheduled promotion of the same channel, which is returned.
    async fn schedule(&self, promotion: &Promotion) -> Result<Option<Promotion>, BackendError>;

    /// Cancels the scheduled promotion of a channel, and returns it.
    async fn cancel_promotion(&self, image: &str, channel: Channel) -> Result<Promotion, BackendError>;

    /// Makes the promotions that are due. A failure for one image does not affect others.
    /// Cheap if none is due.
    async fn promote_due(&self, now_ms: u64) -> Result<Promoted, BackendError>;

    /// Points a channel to the previous version, or unsets it if there was none. Returns the versions before and after.
    async fn revert(&self, image: &str, channel: Channel) -> Result<(u64, Option<u64>), BackendError>;

    /// Retires a version, or brings it back into use.
    async fn retire(&self, version: &ImageVersion, retired: bool) -> Result<(), BackendError>;

    /// Changes the note of a version; an empty note removes it. Returns the previous note. A note that is too long is an
    /// error of kind `Invalid`.
    async fn set_note(&self, version: &ImageVersion, note: &str) -> Result<String, BackendError>;

    /// Reads a version completely, at most at the given rate, and compares it with its hashes. Repairs damage from the
    /// first of the given stores that has an intact copy. `uses` of the report is not set.
    async fn verify(
        &self,
        version: &ImageVersion,
        request: &VerifyRequest,
        control: Arc<TaskControl>,
    ) -> Result<VerifyReport, BackendError>;

    /// Compares two versions.
    async fn diff(
        &self,
        from: &ImageVersion,
        to: &ImageVersion,
        control: Arc<TaskControl>,
    ) -> Result<DiffReport, BackendError>;

    /// Writes a version to a new file, and returns the file's size.
    async fn export(
        &self,
        version: &ImageVersion,
        target: &Path,
        format: ExportFormat,
        control: Arc<TaskControl>,
    ) -> Result<u64, BackendError>;

    /// Removes one version, or the whole image if the reference names no version. The caller has checked that no machine
    /// and no pin uses it. If a channel points to it, now or by schedule, that is an error of kind `Conflict`, unless a
    /// whole image is removed `with_channels`.
    async fn remove(&self, reference: &ImageRef, with_channels: bool) -> Result<Removed, BackendError>;

    /// Whether the store is read-only, like a store that is read from servers.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Why boots of its versions are not recorded. `None`: they are.
    fn boots_unrecorded(&self) -> Option<String> {
        None
    }

    /// Whether other daemons also remove versions from the store, so that this daemon must call [`Images::retain`] for
    /// those that it needs.
    fn keeps_roots(&self) -> bool {
        false
    }

    /// Keeps other daemons from removing a version until it is released. If another daemon has a maintenance session of the
    /// image, that is an error of kind `Conflict`; a version that was removed is one of kind `NotFound`. After any other
    /// error, the root may or may not exist.
    async fn retain(&self, root: &RetentionRoot) -> Result<(), BackendError> {
        let _ = root;
        Ok(())
    }

    /// Removes the root. It need not exist.
    async fn release(&self, root: &RetentionRoot) -> Result<(), BackendError> {
        let _ = root;
        Ok(())
    }

    /// The roots of this daemon.
    async fn holds(&self) -> Result<Vec<RetentionRoot>, BackendError> {
        Ok(Vec::new())
    }

    /// Frees the data of removed versions that was in use when they were removed, and is not any more. Called every second;
    /// does nothing most of the time. Returns the bytes freed.
    async fn reclaim_due(&self, now_ms: u64) -> Result<u64, BackendError> {
        let _ = now_ms;
        Ok(0)
    }

    /// The boot trace of a version. An error of kind `NotFound` if there is none.
    async fn trace(&self, version: &ImageVersion) -> Result<BootTrace, BackendError>;

    /// Merges the boot trace of a file into that of the version. Returns the result.
    async fn merge_trace(&self, version: &ImageVersion, source: &Path) -> Result<BootTrace, BackendError>;

    /// Writes a version's boot trace to a new file.
    async fn save_trace(&self, version: &ImageVersion, target: &Path) -> Result<BootTrace, BackendError>;

    /// Removes the boot trace of a version, and returns it.
    async fn remove_trace(&self, version: &ImageVersion) -> Result<BootTrace, BackendError>;

    /// Bytes of the store's files.
    async fn stored_bytes(&self) -> Result<u64, BackendError>;

    /// The servers of the store that cannot be reached, if others can. Does not block.
    fn servers_gone(&self) -> Option<ServersGone> {
        None
    }
}

/// Servers of a store that cannot be reached, although others can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServersGone {
    /// The number of servers that cannot be reached.
    pub gone: u64,
    /// The number of all servers.
    pub servers: u64,
    /// How long the first of them has not been reached.
    pub gone_for: Duration,
    /// Their names and errors, for people.
    pub why: String,
}
