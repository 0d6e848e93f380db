//! The report of what occupies a machine's write cache, by kind, partition, directory and file: the answer to
//! `headwater cache contents`. Only its types: the crate in `datapath/attribution` finds out which file a block
//! belongs to.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bytes of a disk whose newest contents are in its write cache. Packed (compressed) blocks count with their uncompressed
/// size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeldBytes {
    /// The sum of the three fields below.
    pub total_bytes: u64,
    /// Uncompressed in RAM.
    pub ram_bytes: u64,
    /// Compressed in RAM (uncompressed size).
    pub packed_bytes: u64,
    /// On the overflow disk.
    pub disk_bytes: u64,
}

/// The purpose of changed blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ContentsKind {
    /// Files and directories.
    File,
    /// Free in the guest's file system: deleted and not trimmed, or written a moment ago and not yet committed by the guest.
    Free,
    /// The journal or log of a file system.
    Journal,
    /// Swap partitions, swap files, page files, hibernation.
    Swap,
    /// Metadata of file systems.
    Metadata,
    /// In a partition whose file system is not supported, or is damaged, or on a disk without a readable partition.
    Unknown,
    /// Outside of all partitions.
    Outside,
    /// A kind that a newer daemon added.
    #[serde(other)]
    Other,
}

/// The bytes of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KindContents {
    /// The kind.
    pub kind: ContentsKind,
    /// Its bytes in the write cache.
    pub held: HeldBytes,
}

/// The bytes of one partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PartitionContents {
    /// From 1; 0 is the whole disk.
    pub number: u32,
    /// What is in it: `ext4`, `NTFS`, `LVM with the volumes ..`.
    pub file_system: String,
    /// Its bytes in the write cache.
    pub held: HeldBytes,
    /// The part of `held` that is free in the file system.
    pub free_bytes: u64,
    /// Notes on incomplete figures.
    pub remarks: Vec<String>,
}

/// A file or a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PathContents {
    /// The number of its partition; 0 is the whole disk.
    pub partition: u32,
    /// From the root of its file system. Control characters, bidirectional control characters and bytes that are not UTF-8
    /// are written as `\u{..}` and `\xNN`, and a backslash as two. `(no name, 17)`: no path leads to inode 17.
    pub path: String,
    /// Its purpose.
    pub kind: ContentsKind,
    /// Its bytes in the write cache; for a directory the sum of everything below it.
    pub held: HeldBytes,
}

/// An action that would free space in the write cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheHint {
    /// What occupies how much, and how to free it.
    pub message: String,
    /// The command that does so, if a single command does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// The report of what occupies a machine's write cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheContents {
    /// The machine.
    pub machine: String,
    /// When the scan began.
    pub at_ms: u64,
    /// How long the scan took.
    pub took_ms: u64,
    /// All blocks that take space in the write cache, with their uncompressed size.
    pub held: HeldBytes,
    /// The bytes by kind, largest first. Their sum is `held`.
    pub kinds: Vec<KindContents>,
    /// The bytes by partition.
    pub partitions: Vec<PartitionContents>,
    /// The largest directories, largest first, each with everything below it.
    pub directories: Vec<PathContents>,
    /// The largest files, largest first.
    pub files: Vec<PathContents>,
    /// The number of files with blocks in the write cache.
    pub files_total: u64,
    /// Actions that would free space in the write cache, the largest gain first.
    pub hints: Vec<CacheHint>,
}
