//! Golden images, as the service needs them.

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

/// What an import came to.
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

/// What to import, and as what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportOrder {
    /// The image.
    pub name: String,
    /// An absolute path, or an NBD URI.
    pub source: String,
    /// The file's format; `None`: what its bytes look like.
    pub format: Option<SourceFormat>,
    /// Whether its backing files may be anywhere.
    pub backing: bool,
    /// What the version's source is called, where that is something else.
    pub source_name: Option<String>,
    /// The file that the path must be, where whoever named it knows.
    pub source_id: Option<FileId>,
    /// Size of the disk's sectors; `None`: what the disk says.
    pub sector_bytes: Option<u32>,
    /// A line for people.
    pub note: String,
    /// Who wants it.
    pub author: String,
}

/// What is to come from another store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullOrder {
    /// The store: an absolute path, or a URL.
    pub source: String,
    /// The versions. None: all that it has, with the channels.
    pub images: Vec<ImageRef>,
}

/// What a pull did to one image, told when it is done with that, also where the pull then ends.
#[derive(Debug)]
pub struct Pulled {
    /// What people call the store that it came from.
    pub source: String,
    /// What it did. It does not yet say who edits the image; nothing may have been done of which it is known.
    pub image: PulledImage,
    /// The error of a change of which it is not known whether it was made.
    pub tried: Option<BackendError>,
}

/// What a pull came to that has dealt with all images.
#[derive(Debug, Default)]
pub struct PullOutcome {
    /// What came. The images were told before, and what did not come is beside it.
    pub report: PullReport,
    /// What did not come, and why.
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
    /// When.
    pub at_ms: u64,
    /// Who asked for it.
    pub author: String,
}

/// The images of the store.
#[derive(Debug, Default)]
pub struct Listed {
    /// Those that can be read, by name.
    pub images: Vec<Image>,
    /// Why the others cannot be, one error each that names the image.
    pub unreadable: Vec<BackendError>,
}

/// What came of the promotions that were due.
#[derive(Debug, Default)]
pub struct Promoted {
    /// Those that were carried out, each with where its channel pointed before.
    pub done: Vec<(Promotion, Option<u64>)>,
    /// The images of which that failed, and why. What was not carried out stays due.
    pub failed: Vec<(String, BackendError)>,
}

/// What a version is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetentionPurpose {
    /// A disk over it is kept.
    Disk,
    /// It is edited, on one machine of all daemons of the store.
    MaintenanceSession,
    /// A machine or a catalog names it.
    Pin,
    /// Machines or catalogs boot what the channels of the image say.
    Follow,
}

/// This daemon's need of a version or an image, also while no disk is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionRoot {
    /// What for.
    pub purpose: RetentionPurpose,
    /// What of this daemon's: letters, digits, `-` and `.`.
    pub id: String,
    /// The image.
    pub image: String,
    /// The hash of the version's manifest. `None`: of the image, whichever versions it has.
    pub hash: Option<String>,
    /// Who: `machine 'lab'`. Not told of those that are there.
    pub holder: String,
}

impl RetentionRoot {
    /// Whether both are the same need.
    pub fn is_same(&self, other: &Self) -> bool {
        let Self { purpose, id, image, hash, holder: _ } = self;
        (*purpose, id, image, hash) == (other.purpose, &other.id, &other.image, &other.hash)
    }
}

/// The store of images.
///
/// # Contract
/// - Names and references were checked by the caller.
/// - A failed or cancelled import or export leaves nothing behind, a pull whole versions and no part of one.
/// - The error of a change says where it is not known whether that was made ([`BackendError::is_unknown`]).
/// - Whatever takes long runs on threads of its own and never on the caller's.
#[async_trait]
pub trait Images: Send + Sync + 'static {
    /// All images. One that is damaged does not hide the others.
    async fn list(&self) -> Result<Listed, BackendError>;

    /// One image; `None` if there is none of that name.
    async fn image(&self, name: &str) -> Result<Option<Image>, BackendError>;

    /// The version that a reference means now. An error of kind `NotFound` says which there are.
    async fn resolve(&self, reference: &ImageRef) -> Result<ImageVersion, BackendError>;

    /// Refuses a version that a machine with this firmware cannot boot, as far as that can be seen: an error of kind `Invalid` that says
    /// what was seen.
    async fn check_bootable(&self, version: &ImageVersion, firmware: Firmware) -> Result<(), BackendError> {
        let _ = (version, firmware);
        Ok(())
    }

    /// Makes a version of what a source holds.
    async fn import(
        &self,
        order: ImportOrder,
        control: Arc<TaskControl>,
    ) -> Result<ImportOutcome, BackendError>;

    /// Brings versions of another store, each under its own number. What was done to an image is told when that is over, before the
    /// next one is begun, and before an error that then ends the pull: versions that are here as a whole stay.
    async fn pull(
        &self,
        order: PullOrder,
        control: Arc<TaskControl>,
        told: mpsc::Sender<Pulled>,
    ) -> Result<PullOutcome, BackendError>;

    /// Points a channel to a version now, and forgets the scheduled promotion of that channel. Returns where it pointed before, and what is
    /// forgotten.
    async fn promote(&self, promotion: &Promotion) -> Result<(Option<u64>, Option<Promotion>), BackendError>;

    /// Keeps a promotion for later, in the place of an earlier one to the same channel, which is returned.
    async fn schedule(&self, promotion: &Promotion) -> Result<Option<Promotion>, BackendError>;

    /// Forgets the scheduled promotion of a channel, and returns it.
    async fn cancel_promotion(&self, image: &str, channel: Channel) -> Result<Promotion, BackendError>;

    /// Carries out the promotions whose time has come; an image where that fails does not keep the others from theirs.
    /// Cheap when there are none.
    async fn promote_due(&self, now_ms: u64) -> Result<Promoted, BackendError>;

    /// Points a channel where it pointed before, nowhere where that was its first promotion. Returns from where and to where.
    async fn revert(&self, image: &str, channel: Channel) -> Result<(u64, Option<u64>), BackendError>;

    /// Takes a version out of use, or brings it back.
    async fn retire(&self, version: &ImageVersion, retired: bool) -> Result<(), BackendError>;

    /// Changes the note of a version; an empty one takes it away. Returns the one that it had. One that is too long is an error of
    /// kind `Invalid`.
    async fn set_note(&self, version: &ImageVersion, note: &str) -> Result<String, BackendError>;

    /// Reads all of a version, at most at the rate asked for, and compares it with its hashes; repairs what is damaged from the
    /// first of the stores named that has it. The report does not yet say who uses what is left.
    async fn verify(
        &self,
        version: &ImageVersion,
        request: &VerifyRequest,
        control: Arc<TaskControl>,
    ) -> Result<VerifyReport, BackendError>;

    /// Says what changed between two versions.
    async fn diff(
        &self,
        from: &ImageVersion,
        to: &ImageVersion,
        control: Arc<TaskControl>,
    ) -> Result<DiffReport, BackendError>;

    /// Writes a version to a new file in a format. Returns the file's size.
    async fn export(
        &self,
        version: &ImageVersion,
        target: &Path,
        format: ExportFormat,
        control: Arc<TaskControl>,
    ) -> Result<u64, BackendError>;

    /// Removes one version, or the whole image where the reference names none. The caller made sure that no machine and no pin uses
    /// it; what a channel points to, or will, is an error of kind `Conflict`, but of a whole image `with_channels`.
    async fn remove(&self, reference: &ImageRef, with_channels: bool) -> Result<Removed, BackendError>;

    /// Whether nothing can be changed in the store from here, as where it is read through servers.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Why boots of its versions are not recorded, where they are not.
    fn boots_unrecorded(&self) -> Option<String> {
        None
    }

    /// Whether other daemons remove versions from the store, too, and so are to be told by [`Images::root`] what this one needs.
    fn keeps_roots(&self) -> bool {
        false
    }

    /// Keeps a version from being removed by other daemons until it is released. An image that another daemon edits is an error of
    /// kind `Conflict`, a version that is gone of kind `NotFound`; after any other error it may be held.
    async fn retain(&self, root: &RetentionRoot) -> Result<(), BackendError> {
        let _ = root;
        Ok(())
    }

    /// Lets go of it. What is not held is no error.
    async fn release(&self, root: &RetentionRoot) -> Result<(), BackendError> {
        let _ = root;
        Ok(())
    }

    /// What this daemon holds.
    async fn holds(&self) -> Result<Vec<RetentionRoot>, BackendError> {
        Ok(Vec::new())
    }

    /// Frees what a removal had to leave because somebody used it, if nobody does any more. Asked every second; looks when it is time
    /// to. Returns the bytes freed.
    async fn reclaim_due(&self, now_ms: u64) -> Result<u64, BackendError> {
        let _ = now_ms;
        Ok(0)
    }

    /// A version's boot trace. Where there is none: an error of kind `NotFound`.
    async fn trace(&self, version: &ImageVersion) -> Result<BootTrace, BackendError>;

    /// Takes the boot trace of a file into that of the version. Returns what came of both.
    async fn merge_trace(&self, version: &ImageVersion, source: &Path) -> Result<BootTrace, BackendError>;

    /// Writes a version's boot trace to a new file.
    async fn save_trace(&self, version: &ImageVersion, target: &Path) -> Result<BootTrace, BackendError>;

    /// Forgets a version's boot trace. Returns what it was.
    async fn remove_trace(&self, version: &ImageVersion) -> Result<BootTrace, BackendError>;

    /// Bytes that the store's files take.
    async fn stored_bytes(&self) -> Result<u64, BackendError>;

    /// Which servers of the store are gone, while others are there. This does not block.
    fn servers_gone(&self) -> Option<ServersGone> {
        None
    }
}

/// Some servers of a store are gone, and others are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServersGone {
    /// How many.
    pub gone: u64,
    /// Of how many.
    pub servers: u64,
    /// For how long the first of them is gone.
    pub gone_for: Duration,
    /// Which, and why, for people.
    pub why: String,
}
