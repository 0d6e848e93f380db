//! Who fills a machine's write cache.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bytes of a disk that are in its write cache, by where their newest contents are. A packed block counts with its unpacked size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeldBytes {
    /// In RAM, packed and on disk together.
    pub total_bytes: u64,
    /// In RAM.
    pub ram_bytes: u64,
    /// In RAM, packed.
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
    /// What file systems keep for themselves.
    Metadata,
    /// In a partition whose file system is not read, or is damaged.
    Unknown,
    /// Outside of all partitions.
    Outside,
    /// Something that only a later daemon knows.
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
    /// How much of that is free in its file system.
    pub free_bytes: u64,
    /// Sentences about figures that are not whole.
    pub remarks: Vec<String>,
}

/// A file or a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PathContents {
    /// The number of its partition; 0 is the whole disk.
    pub partition: u32,
    /// From the root of its file system. Control characters, marks of writing direction and bytes that are no UTF-8 are written as
    /// `\u{..}` and `\xNN`, and a backslash as two. `(no name, 17)`: it has no name that leads to the root.
    pub path: String,
    /// Its purpose.
    pub kind: ContentsKind,
    /// Its bytes in the write cache; of a directory with everything below it.
    pub held: HeldBytes,
}

/// Something that makes the write cache smaller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheHint {
    /// What takes how much, and what to do.
    pub message: String,
    /// The command that does it, if one command does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// Who fills a machine's write cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CacheContents {
    /// The machine.
    pub machine: String,
    /// When the scan began.
    pub at_ms: u64,
    /// How long the scan took.
    pub took_ms: u64,
    /// All blocks that take space in the write cache.
    pub held: HeldBytes,
    /// By kind, largest first. They add up to `held`.
    pub kinds: Vec<KindContents>,
    /// By partition.
    pub partitions: Vec<PartitionContents>,
    /// The largest directories, largest first, each with everything below it.
    pub directories: Vec<PathContents>,
    /// The largest files, largest first.
    pub files: Vec<PathContents>,
    /// How many files have something in the write cache.
    pub files_total: u64,
    /// What makes the write cache smaller, the largest gain first.
    pub hints: Vec<CacheHint>,
}
