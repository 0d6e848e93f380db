//! The options of a cache.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{BaseImage, MIN_SEGMENTS};
use crate::overflow::buffering::Buffering;
use crate::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;
use crate::persist::PersistentOptions;
use crate::spill::RESERVED_POSITIONS;
use crate::units::SEGMENT_BYTES;

/// The least RAM limit: with less, the fixed buffers would not fit.
pub const MIN_RAM_BYTES: u64 = 8 * SEGMENT_BYTES as u64;

/// The least disk limit: disk space for the minimum number of segments, plus the space reserved for cleaning.
pub const MIN_DISK_BYTES: u64 = 8 * SEGMENT_BYTES as u64;

const _: () = assert!(
    MIN_DISK_BYTES >= (MIN_SEGMENTS + RESERVED_POSITIONS as u64) * ENCRYPTED_SEGMENT_BYTES as u64,
    "a persistent cache has a position on disk for each segment"
);

/// What happens if the file system has less free space than the limit when the overflow is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LittleSpace {
    /// The open fails: better before a machine starts than while it runs.
    #[default]
    Refused,
    /// A warning is logged: for a machine that was on a moment ago and continues.
    Logged,
    /// Free space is not checked: the cache is only read.
    Accepted,
}

/// The overflow of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverflowOptions {
    /// Path of a directory, or of a block device.
    pub at: PathBuf,
    /// Disk space that the cache may use, in bytes; at least [`MIN_DISK_BYTES`].
    pub limit_bytes: u64,
    /// Whether the overflow bypasses the page cache.
    pub buffering: Buffering,
    /// What happens if the disk has less free space than the limit.
    pub little_space: LittleSpace,
}

/// The options of a cache.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Name of the volume for messages.
    pub name: String,
    /// Size of the volume.
    pub size_bytes: u64,
    /// RAM limit in bytes, including index and buffers; at least [`MIN_RAM_BYTES`].
    pub ram_bytes: u64,
    /// Weight among the caches of the host when the host's limit is short; see [`crate::budget`].
    pub weight: u32,
    /// The overflow; `None`: RAM only.
    pub overflow: Option<OverflowOptions>,
    /// How long a write waits for space before it is refused.
    pub pause_limit: Duration,
    /// Makes the cache outlive the volume; it must have an overflow in a directory. `None`: it is forgotten.
    pub persistent: Option<PersistentOptions>,
    /// The base below the cache. Blocks that equal it need not be kept.
    pub base: Option<Arc<dyn BaseImage>>,
}
