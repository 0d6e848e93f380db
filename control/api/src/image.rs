//! Images (named golden disks) and their versions (immutable states of an image): types of the requests and answers
//! for lists, channels, import, export, copies from other stores, comparison and verification. `control/service`
//! answers; the crates in `datapath/store` and `datapath/image` do the work.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Problem;
use crate::maintenance::MaintenanceSession;

/// One immutable state of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageVersion {
    /// The image.
    pub image: String,
    /// The number of the version: 1, 2, .. for each image.
    pub number: u64,
    /// BLAKE3 of the version's manifest: its identity, 64 hexadecimal digits.
    pub hash: String,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Compressed bytes that this version added to the store when it was made. Data that the store already had is not
    /// counted, even if the image that
    /// it came from was removed since.
    pub stored_bytes: u64,
    /// When it was made.
    pub created_at_ms: u64,
    /// Where it came from.
    pub source: String,
    /// A note for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// The caller that made it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub author: String,
    /// Whether it was retired (taken out of use).
    #[serde(default)]
    pub retired: bool,
    /// Whether it was not generalised, so that it may contain the identity of a machine, such as its private SSH host key.
    /// `production` is promoted to such a version only with `force`.
    #[serde(default)]
    pub keeps_identity: bool,
    /// The channels that point to it now.
    #[serde(default)]
    pub channels: Vec<Channel>,
}

/// The role of a machine. A channel of an image points to the version that machines of this role boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Channel {
    /// The newest version that is not retired; cannot be set.
    Maintenance,
    /// The version to test before `production` points to it.
    Test,
    /// The version that machines boot if they name the image without a channel or version.
    Production,
}

impl Channel {
    /// The channel's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Maintenance => "maintenance",
            Self::Test => "test",
            Self::Production => "production",
        }
    }

    /// Parses the output of [`Channel::name`].
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

/// A past, present or scheduled position of a channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChannelPointer {
    /// The channel.
    pub channel: Channel,
    /// The version's number.
    pub version: u64,
    /// When it began, or is scheduled to begin.
    pub at_ms: u64,
    /// The caller that requested it.
    pub author: String,
}

/// The result of a promotion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Promoted {
    /// The channel.
    pub channel: Channel,
    /// The version to which it points now, or will point at `at_ms`.
    pub version: u64,
    /// When this begins.
    pub at_ms: u64,
    /// The caller that requested it.
    pub author: String,
    /// The scheduled promotion of the same channel that this one replaced; it will not happen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forgets: Option<ChannelPointer>,
}

/// The result of reverting a promotion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reverted {
    /// The channel.
    pub channel: Channel,
    /// The version to which it points now. Absent: the channel is not set, as before its first promotion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// When this began.
    pub at_ms: u64,
    /// The caller that requested it.
    pub author: String,
}

/// The promotion of the version that the path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PromoteRequest {
    /// The channel that will point to the version.
    pub channel: Channel,
    /// When. Absent: now. A scheduled promotion takes place when the daemon's clock reaches this time,
    /// or at the daemon's next start after it.
    #[serde(default)]
    pub at_ms: Option<u64>,
    /// Whether to promote `production` to the version even if it was not generalised.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// A channel of the image that the path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChannelRequest {
    /// The channel.
    pub channel: Channel,
}

/// The request to retire a version, or to bring it back into use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetireRequest {
    /// `true` retires the version, `false` brings it back into use.
    pub retired: bool,
}

/// A note about the version that the path names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NoteRequest {
    /// One line for people, at most 1024 bytes. An empty note removes the present one.
    pub note: String,
}

/// A named golden disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// Its versions, oldest first.
    pub versions: Vec<ImageVersion>,
    /// The positions of its channels, oldest first. The last entry of a channel is its present position.
    #[serde(default)]
    pub pointers: Vec<ChannelPointer>,
    /// Scheduled promotions.
    #[serde(default)]
    pub scheduled: Vec<ChannelPointer>,
    /// Its maintenance session, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edit: Option<MaintenanceSession>,
}

/// All images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageList {
    /// Ordered by name.
    pub images: Vec<Image>,
    /// Why other images are missing from the list: their version lists are damaged, or were written by a later release.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<Problem>,
}

/// The request to import a disk as a version of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportRequest {
    /// The image's name. If the image exists, it gets a new version.
    pub name: String,
    /// An absolute path on the daemon's host (raw, qcow2, VHD, VHDX, VMDK), or an NBD URI such as
    /// `nbd+unix:///name?socket=/path` or `nbd://127.0.0.1:10809/name`.
    pub source: String,
    /// The file's format. Absent: it is detected from the first bytes. The guest writes the first bytes of a raw disk, and
    /// can make it look
    /// like a qcow2 image with a backing file of the host: specify `raw` if the guest is not trusted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<SourceFormat>,
    /// Whether a qcow2 image may have devices as backing files, or files outside of its own directory. The author of the
    /// image chooses their
    /// names, so this permits any file that the daemon can read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub backing: bool,
    /// The name of the source in the version and in errors, if it is not `source`.
    #[serde(default)]
    pub source_name: Option<String>,
    /// The identity of the file that `source` must name. If the daemon finds another file there, the import is refused. For
    /// paths whose meaning
    /// depends on the process, such as `/proc/PID/fd/NUMBER` from another container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_id: Option<FileId>,
    /// Size of the disk's sectors: 512 or 4096. Absent: it is taken from the partition table, or else from the file, device
    /// or server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sector_bytes: Option<u32>,
    /// One line about the version, for people.
    #[serde(default)]
    pub note: String,
}

/// The request to copy versions from another store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullRequest {
    /// The store to copy from: an absolute path of a directory on the daemon's host, `s3://BUCKET/PREFIX`, or
    /// `https://HOST[,https://HOST..]`.
    /// Servers get the daemon's token only if all of them were named when the daemon was started.
    pub source: String,
    /// Versions, each as `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH` of that store. Empty: all versions, with
    /// the channels, scheduled
    /// promotions, notes and retired marks.
    #[serde(default)]
    pub images: Vec<String>,
}

/// The result of a pull.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PullReport {
    /// The number of versions that are new in this store.
    pub versions: u32,
    /// The number of versions that this store already had.
    pub present: u32,
    /// The number of data objects that were copied.
    pub objects: u32,
    /// Bytes of these data objects.
    pub bytes: u64,
    /// The number of images whose channels, scheduled promotions, notes or retired marks were changed to those of the
    /// source.
    pub followed: u32,
    /// The images that were changed.
    pub images: Vec<PulledImage>,
    /// Why other versions did not come: the source has lost or damaged some of them, or a list of versions cannot be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_copied: Vec<Problem>,
}

/// The changes that a pull made to one image. Changes by others at the same time are not included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PulledImage {
    /// Its name.
    pub image: String,
    /// The numbers of its versions that are new in this store.
    pub versions: Vec<u64>,
    /// Whether one of these was the newest version of the image when it was copied.
    pub newest: bool,
    /// Whether its channels, scheduled promotions, notes or retired marks were changed to those of the source.
    pub followed: bool,
    /// The channels that were moved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub channels: Vec<ChannelMove>,
    /// Scheduled promotions that were cancelled, because the source does not have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forgets: Vec<ChannelPointer>,
    /// Scheduled promotions that were copied from the source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scheduled: Vec<ChannelPointer>,
    /// Versions that existed here and whose note was changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub noted: Vec<u64>,
    /// Versions that existed here and were retired.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retired: Vec<u64>,
    /// Versions that existed here and were brought back into use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unretired: Vec<u64>,
    /// The version that machines booted before the pull if they name only the image. Absent: there was none. Equal to
    /// `boots` if the pull did not
    /// change it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub booted: Option<u64>,
    /// The version that these machines boot from their next start on. Absent: there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boots: Option<u64>,
    /// The machine of the image's maintenance session, if the pull brought a version that is newer than the one below its
    /// disk. To seal the
    /// session, the request then needs `over_newer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edited_by: Option<String>,
}

/// The change of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChannelMove {
    /// The channel.
    pub channel: Channel,
    /// The version to which it pointed before. Absent: it was not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<u64>,
    /// The version to which it points now. Absent: it is not set any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<u64>,
}

/// The identity of a file on a host, as `stat` returns it.
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
    /// QEMU's format, including the backing files that it names.
    Qcow2,
    /// The older format of Hyper-V, from Virtual PC; qemu-img calls it `vpc`.
    #[serde(alias = "vpc")]
    Vhd,
    /// The format of Hyper-V.
    Vhdx,
    /// The format of VMware, in one file.
    Vmdk,
}

impl SourceFormat {
    /// The format's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vhd => "vhd",
            Self::Vhdx => "vhdx",
            Self::Vmdk => "vmdk",
        }
    }

    /// Parses the output of [`SourceFormat::name`], or `vpc`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let called = if text == "vpc" { "vhd" } else { text };
        [Self::Raw, Self::Qcow2, Self::Vhd, Self::Vhdx, Self::Vmdk]
            .into_iter()
            .find(|it| it.name() == called)
            .ok_or_else(|| {
                format!("'{text}' is not a format of disks; write raw, qcow2, vhd (or vpc), vhdx or vmdk")
            })
    }
}

/// The format of an exported disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportFormat {
    /// The bytes of the disk in a sparse file.
    #[default]
    Raw,
    /// QEMU's format, not compressed.
    Qcow2,
    /// The older format of Hyper-V (VHD), dynamic; written by qemu-img, which calls it `vpc`.
    #[serde(alias = "vpc")]
    Vhd,
    /// VHD with a fixed size, as Azure needs it: the disk in whole MiB, then a footer.
    #[serde(rename = "vhd-fixed")]
    VhdFixed,
    /// The format of Hyper-V; written by qemu-img.
    Vhdx,
    /// The format of VMware, in one sparse file; written by qemu-img.
    Vmdk,
}

/// File extensions of formats that cannot be written. Other programs would take a raw disk with such a name for that
/// format.
const NOT_WRITTEN: [&str; 5] = ["vdi", "qed", "hdd", "dmg", "ova"];

impl ExportFormat {
    /// The format's name in requests.
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

    /// The format of a file name by its extension; raw if the extension is unknown. Fails for a format that cannot be
    /// written.
    pub fn of_file_name(path: &std::path::Path) -> Result<Self, String> {
        let extension = path.extension().and_then(|text| text.to_str()).unwrap_or_default();
        let extension = extension.to_ascii_lowercase();
        if NOT_WRITTEN.contains(&extension.as_str()) {
            return Err(format!(
                "'{}' has the extension of a format that cannot be written (only raw, qcow2, vhd, vhd-fixed, vhdx and vmdk can): give it another \
                 name, or say --format",
                path.display()
            ));
        }
        Ok(Self::parse(&extension).unwrap_or_default())
    }

    /// Parses the output of [`ExportFormat::name`], or `vpc`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let called = if text == "vpc" { "vhd" } else { text };
        [Self::Raw, Self::Qcow2, Self::Vhd, Self::VhdFixed, Self::Vhdx, Self::Vmdk]
            .into_iter()
            .find(|it| it.name() == called)
            .ok_or_else(|| {
                format!("'{text}' is not a format of disks; write raw, qcow2, vhd (or vpc), vhd-fixed, vhdx or vmdk")
            })
    }
}

/// The request to write a version to a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    /// An absolute path on the daemon's host. No file of that name may exist yet.
    pub target: String,
    /// The format. Default: raw.
    #[serde(default)]
    pub format: ExportFormat,
}

/// The result of a verification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VerifyReport {
    /// The version that was read.
    pub version: ImageVersion,
    /// Bytes that were read and compared with their hashes.
    pub checked_bytes: u64,
    /// Damage that remains, one line each: its position on the disk and what is wrong. Empty: there is none.
    pub damage: Vec<String>,
    /// The number of chunks that remain damaged. It can exceed the number of lines in `damage`. 0 if the manifest is
    /// damaged.
    #[serde(default)]
    pub damaged_chunks: u64,
    /// The number of damaged chunks and data objects that were repaired.
    #[serde(default)]
    pub repaired: u64,
    /// Files that cannot be read because of the damage.
    #[serde(default)]
    pub files: Vec<String>,
    /// What could not be examined, so that more files may be damaged; one line each.
    #[serde(default)]
    pub remarks: Vec<String>,
    /// The versions that contain the damaged data: this one and others that share it, as `IMAGE@NUMBER`.
    #[serde(default)]
    pub versions: Vec<String>,
    /// Machines, catalogs, channels and persistent disks that use these versions. If that could not be determined, the
    /// reason.
    #[serde(default)]
    pub uses: Vec<String>,
}

/// The options of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VerifyRequest {
    /// Stores and servers that may have intact copies of damaged data: absolute paths of directories on the daemon's host,
    /// `s3://BUCKET/PREFIX`, `https://HOST[,https://HOST..]`. The first one that has a copy is used. Servers get the
    /// daemon's token
    /// only if all servers of a list were named when the daemon was started.
    #[serde(default)]
    pub repair_from: Vec<String>,
    /// The most bytes to read from the store per second, greater than 0. Absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bytes_s: Option<u64>,
}

/// The version to compare with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiffRequest {
    /// `IMAGE@NUMBER` or `IMAGE@HASH`; it may be a version of another image.
    pub with: String,
}

/// What happened to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileChange {
    /// It was added.
    Added,
    /// It was removed.
    Removed,
    /// Its content, type or link target was changed.
    Changed,
    /// Its owner, mode or time was changed; its content was not.
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

/// The changes in a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PartitionDifference {
    /// Its number, from 1; 0 is the whole disk.
    pub number: u32,
    /// Its first byte on the disk.
    pub offset_bytes: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Bytes in it that changed, in blocks of 4 KiB.
    pub changed_bytes: u64,
    /// Changed files by path. Absent if nothing changed, or if no file system could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<ChangedFile>>,
    /// Why files are missing from the list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
}

/// The differences between two versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffReport {
    /// The older version, which the path names.
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

/// The result of a removal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Removed {
    /// The names of what was removed.
    pub removed: Vec<String>,
    /// Space that was freed.
    pub freed_bytes: u64,
}
