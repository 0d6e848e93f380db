//! Images and their versions.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Problem;
use crate::maintenance::MaintenanceSession;

/// One immutable state of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageVersion {
    /// The image.
    pub image: String,
    /// Counts from 1 for each image.
    pub number: u64,
    /// BLAKE3 of the version's manifest: its identity, 64 hexadecimal digits.
    pub hash: String,
    /// Size of the disk.
    pub size_bytes: u64,
    /// What this version added to the store when it was made, compressed: what was there already is not counted, also where it was
    /// another image's that is gone.
    pub stored_bytes: u64,
    /// When it was made.
    pub created_at_ms: u64,
    /// Where it came from.
    pub source: String,
    /// What people say about it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// Who made it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub author: String,
    /// Whether it was taken out of use.
    #[serde(default)]
    pub retired: bool,
    /// Whether it is not generalised: it may hold the identity of one machine, such as its private SSH host key. Such a version is
    /// promoted to `production` only with `force`.
    #[serde(default)]
    pub keeps_identity: bool,
    /// The channels that point to it now.
    #[serde(default)]
    pub channels: Vec<Channel>,
}

/// A role that machines have, and the version that it boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Channel {
    /// The newest version that is not retired; cannot be set.
    Maintenance,
    /// What is tried before everybody gets it.
    Test,
    /// What everybody gets who asks for the image and no more.
    Production,
}

impl Channel {
    /// As written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Maintenance => "maintenance",
            Self::Test => "test",
            Self::Production => "production",
        }
    }

    /// Reads a channel.
    pub fn parse(text: &str) -> Result<Self, String> {
        [Self::Maintenance, Self::Test, Self::Production].into_iter().find(|it| it.name() == text).ok_or_else(
            || format!("'{}' is not a channel; there are maintenance, test, production", text.escape_debug()),
        )
    }
}

impl std::fmt::Display for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a channel points, pointed, or will point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChannelPointer {
    /// The channel.
    pub channel: Channel,
    /// The version's number.
    pub version: u64,
    /// Since when, or from when on.
    pub at_ms: u64,
    /// Who asked for it.
    pub author: String,
}

/// What came of a promotion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Promoted {
    /// The channel.
    pub channel: Channel,
    /// The version to which it points now, or will.
    pub version: u64,
    /// Since when, or from when on.
    pub at_ms: u64,
    /// Who asked for it.
    pub author: String,
    /// The scheduled promotion of the channel whose place it took, and that will not happen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forgets: Option<ChannelPointer>,
}

/// What came of taking a promotion back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reverted {
    /// The channel.
    pub channel: Channel,
    /// Where it points now. Absent: it is not set any more, as before its first promotion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// Since when.
    pub at_ms: u64,
    /// Who asked for it.
    pub author: String,
}

/// A version to promote: the one that the path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PromoteRequest {
    /// Where to.
    pub channel: Channel,
    /// When; absent: now. A scheduled promotion is carried out when the daemon's clock has reached that time,
    /// or when the daemon starts after it.
    #[serde(default)]
    pub at_ms: Option<u64>,
    /// Whether a version that is not generalised may become `production`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// A channel of the image that the path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChannelRequest {
    /// It.
    pub channel: Channel,
}

/// Whether a version is taken out of use, or brought back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetireRequest {
    /// `false` brings it back.
    pub retired: bool,
}

/// A note of the version that the path names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NoteRequest {
    /// A line for people, at most 1024 bytes; an empty one takes the note away.
    pub note: String,
}

/// A named golden disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// Its versions, oldest first.
    pub versions: Vec<ImageVersion>,
    /// Where its channels pointed, oldest first; the last one of a channel is where it points.
    #[serde(default)]
    pub pointers: Vec<ChannelPointer>,
    /// Promotions to come.
    #[serde(default)]
    pub scheduled: Vec<ChannelPointer>,
    /// Who edits it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edit: Option<MaintenanceSession>,
}

/// All images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageList {
    /// Ordered by name.
    pub images: Vec<Image>,
    /// Why other images are missing here: their lists of versions are damaged or of a later release.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<Problem>,
}

/// What to import, and under which name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportRequest {
    /// The image's name. An image that exists gets a new version.
    pub name: String,
    /// An absolute path on the daemon's host (raw, qcow2, VHD, VHDX, VMDK), or an NBD URI such as
    /// `nbd+unix:///name?socket=/path` or `nbd://127.0.0.1:10809/name`.
    pub source: String,
    /// The file's format; absent: what its bytes look like. The first bytes of a raw disk are its guest's, who can make it
    /// look like a qcow2 image that is backed by a file of the host: say `raw` where the guest is not trusted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<SourceFormat>,
    /// Whether a qcow2 image may have backing files outside of its own directory, and devices: who made it can have it
    /// name whatever the daemon may read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub backing: bool,
    /// What the source is called in the version and in errors, where that is something else.
    #[serde(default)]
    pub source_name: Option<String>,
    /// The file that `source` must be: where the daemon finds another one there, the import is refused. For paths that can mean
    /// something else to the daemon, such as `/proc/PID/fd/NUMBER` to one in another container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_id: Option<FileId>,
    /// Size of the disk's sectors: 512 or 4096. Absent: what its partition table says, or the file, device or server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sector_bytes: Option<u32>,
    /// A line for people about the version.
    #[serde(default)]
    pub note: String,
}

/// The store whose versions are to come here, and which of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullRequest {
    /// A directory of the daemon's host by its absolute path, `s3://BUCKET/PREFIX`, or `https://HOST[,https://HOST..]`. Servers are
    /// shown the daemon's token only where all of them were named when it was started.
    pub source: String,
    /// Versions, each as `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH` of that store. Empty: all that it has, with the
    /// channels, scheduled promotions, notes and what is retired.
    #[serde(default)]
    pub images: Vec<String>,
}

/// What a pull did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PullReport {
    /// Versions that are new here.
    pub versions: u32,
    /// Versions that were here already.
    pub present: u32,
    /// Data objects that were copied.
    pub objects: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Images whose channels, scheduled promotions, notes or retired versions are the source's now, and were not.
    pub followed: u32,
    /// The images that are not what they were.
    pub images: Vec<PulledImage>,
    /// Why other versions did not come: the source has lost or damaged some of them, or a list of versions cannot be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_copied: Vec<Problem>,
}

/// What a pull did to an image, itself: what others did to it meanwhile is not told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PulledImage {
    /// Its name.
    pub image: String,
    /// The numbers of its versions that are new here.
    pub versions: Vec<u64>,
    /// Whether one of these was the newest version of the image when it came.
    pub newest: bool,
    /// Whether its channels, scheduled promotions, notes or retired versions are the source's now, and were not.
    pub followed: bool,
    /// Its channels that point elsewhere now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub channels: Vec<ChannelMove>,
    /// Promotions to come that will not happen: the source has no such ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forgets: Vec<ChannelPointer>,
    /// Promotions to come that came from the source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scheduled: Vec<ChannelPointer>,
    /// Versions that were here and have another note now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub noted: Vec<u64>,
    /// Versions that were here and are taken out of use now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retired: Vec<u64>,
    /// Versions that were here and are in use again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unretired: Vec<u64>,
    /// The version that machines booted which name the image alone. Absent: there was none. The same as in `boots` where the pull did
    /// not change that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub booted: Option<u64>,
    /// The one that they boot from their next boot on. Absent: there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boots: Option<u64>,
    /// The machine that edits the image, over an older version than the newest, which came now: what it does is sealed over that
    /// only where the request says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edited_by: Option<String>,
}

/// A channel that points elsewhere now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChannelMove {
    /// The channel.
    pub channel: Channel,
    /// The version that it pointed to. Absent: it was not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<u64>,
    /// The one that it points to. Absent: it is not set any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<u64>,
}

/// What tells a file of a host from all others, as `stat` gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FileId {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// The format of a file that is imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SourceFormat {
    /// The bytes of the file are the disk, whatever they look like.
    Raw,
    /// QEMU's, with the backing files that it names.
    Qcow2,
    /// Virtual PC's and Hyper-V's older one; qemu-img calls it `vpc`.
    #[serde(alias = "vpc")]
    Vhd,
    /// Hyper-V's.
    Vhdx,
    /// VMware's, in one file.
    Vmdk,
}

impl SourceFormat {
    /// As written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vhd => "vhd",
            Self::Vhdx => "vhdx",
            Self::Vmdk => "vmdk",
        }
    }

    /// Reads a format.
    pub fn parse(text: &str) -> Result<Self, String> {
        let called = if text == "vpc" { "vhd" } else { text };
        [Self::Raw, Self::Qcow2, Self::Vhd, Self::Vhdx, Self::Vmdk]
            .into_iter()
            .find(|it| it.name() == called)
            .ok_or_else(|| format!("'{text}' is not a format; there are raw, qcow2, vhd (vpc), vhdx, vmdk"))
    }
}

/// The format of an exported disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportFormat {
    /// The bytes of the disk, zeroes as holes.
    #[default]
    Raw,
    /// QEMU's, not compressed.
    Qcow2,
    /// Virtual PC's and Hyper-V's older one, dynamic; written by qemu-img, which calls it `vpc`.
    #[serde(alias = "vpc")]
    Vhd,
    /// The same with a fixed size, which Azure needs: the disk in whole MiB and a footer.
    #[serde(rename = "vhd-fixed")]
    VhdFixed,
    /// Hyper-V's; written by qemu-img.
    Vhdx,
    /// VMware's, in one sparse file; written by qemu-img.
    Vmdk,
}

/// Extensions of formats that are not written. A raw disk of such a name would be taken for one of these.
const NOT_WRITTEN: [&str; 5] = ["vdi", "qed", "hdd", "dmg", "ova"];

impl ExportFormat {
    /// As written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vhd => "vhd",
            Self::VhdFixed => "vhd-fixed",
            Self::Vhdx => "vhdx",
            Self::Vmdk => "vmdk",
        }
    }

    /// What a file's name says by its extension; raw where that is no format's. One that is not written is an error.
    pub fn of_file_name(path: &std::path::Path) -> Result<Self, String> {
        let extension = path.extension().and_then(|text| text.to_str()).unwrap_or_default();
        let extension = extension.to_ascii_lowercase();
        if NOT_WRITTEN.contains(&extension.as_str()) {
            return Err(format!(
                "'{}' is called like a format that is not written; there are raw, qcow2, vhd, vhd-fixed, vhdx, vmdk: give it another \
                 name, or say --format",
                path.display()
            ));
        }
        Ok(Self::parse(&extension).unwrap_or_default())
    }

    /// Reads a format.
    pub fn parse(text: &str) -> Result<Self, String> {
        let called = if text == "vpc" { "vhd" } else { text };
        [Self::Raw, Self::Qcow2, Self::Vhd, Self::VhdFixed, Self::Vhdx, Self::Vmdk]
            .into_iter()
            .find(|it| it.name() == called)
            .ok_or_else(|| {
                format!("'{text}' is not a format; there are raw, qcow2, vhd (vpc), vhd-fixed, vhdx, vmdk")
            })
    }
}

/// Where to write a version, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    /// An absolute path on the daemon's host. It must not exist yet.
    pub target: String,
    /// The format; raw where absent.
    #[serde(default)]
    pub format: ExportFormat,
}

/// What a verification found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VerifyReport {
    /// The version that was read.
    pub version: ImageVersion,
    /// Bytes that were read and compared with their hashes.
    pub checked_bytes: u64,
    /// What is damaged still, one line each: where in the disk, and what is wrong. Empty: all is well.
    pub damage: Vec<String>,
    /// Chunks that are damaged still, more of them than have a line where there are very many. None where the manifest is.
    #[serde(default)]
    pub damaged_chunks: u64,
    /// Chunks and data objects that were damaged and are right again.
    #[serde(default)]
    pub repaired: u64,
    /// Files that cannot be read because of the damage.
    #[serde(default)]
    pub files: Vec<String>,
    /// Why there may be more of them: what could not be looked into, one line each.
    #[serde(default)]
    pub remarks: Vec<String>,
    /// The versions that hold what is damaged: this one, and others that share it, as `IMAGE@NUMBER`.
    #[serde(default)]
    pub versions: Vec<String>,
    /// Who uses these versions: machines, catalogs, channels, persistent disks. Where that cannot be told, why.
    #[serde(default)]
    pub uses: Vec<String>,
}

/// How to verify a version.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VerifyRequest {
    /// Stores and servers that may have what is damaged here: directories of the daemon's host by their absolute paths,
    /// `s3://BUCKET/PREFIX`, `https://HOST[,https://HOST..]`. The first one that has it is taken. Servers are shown the daemon's token
    /// only where all of a list were named when it was started.
    #[serde(default)]
    pub repair_from: Vec<String>,
    /// How many bytes of the store are read a second at most; absent: as many as it gives. Not 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bytes_s: Option<u64>,
}

/// The version to compare with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiffRequest {
    /// `IMAGE@NUMBER` or `IMAGE@HASH`, also of another image.
    pub with: String,
}

/// What happened to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileChange {
    /// It is new.
    Added,
    /// It is gone.
    Removed,
    /// Its content, type or link target is another.
    Changed,
    /// Owner, mode or time is another; the content is the same.
    Attributes,
}

/// A file that changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChangedFile {
    /// Its path in the file system.
    pub path: String,
    /// What happened to it.
    pub change: FileChange,
    /// Its size now, or before it was removed.
    pub size_bytes: u64,
}

/// What changed in a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PartitionDifference {
    /// Its number, from 1; 0 is the whole disk.
    pub number: u32,
    /// Where it starts.
    pub offset_bytes: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Bytes in it that changed, in blocks of 4 KiB.
    pub changed_bytes: u64,
    /// Changed files by path; absent where nothing changed, or no file system could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<ChangedFile>>,
    /// Why files are missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
}

/// What changed between two versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffReport {
    /// The older one: that of the path.
    pub from: ImageVersion,
    /// The newer one.
    pub to: ImageVersion,
    /// Chunks that differ.
    pub changed_chunks: u64,
    /// Bytes in blocks of 4 KiB that differ.
    pub changed_bytes: u64,
    /// By partition of the newer one.
    pub partitions: Vec<PartitionDifference>,
}

/// What was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Removed {
    /// The names of what is gone.
    pub removed: Vec<String>,
    /// Space that became free.
    pub freed_bytes: u64,
}
