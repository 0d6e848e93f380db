//! What a cache is made of, as its owner says.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{BaseImage, MIN_SEGMENTS};
use crate::overflow::buffering::Buffering;
use crate::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;
use crate::persist::PersistentOptions;
use crate::spill::RESERVED_POSITIONS;
use crate::units::SEGMENT_BYTES;

/// The least RAM that makes a cache: below it the fixed buffers would not fit.
pub const MIN_RAM_BYTES: u64 = 8 * SEGMENT_BYTES as u64;

/// The least disk that makes an overflow: places for the segments that a cache may always have, and those kept for cleaning.
pub const MIN_DISK_BYTES: u64 = 8 * SEGMENT_BYTES as u64;

const _: () = assert!(
    MIN_DISK_BYTES >= (MIN_SEGMENTS + RESERVED_POSITIONS as u64) * ENCRYPTED_SEGMENT_BYTES as u64,
    "a persistent cache has a place on disk for each segment"
);

/// What becomes of a limit that the file system could not hold when the overflow is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LittleSpace {
    /// It is refused: better before a machine runs than in its middle.
    #[default]
    Refused,
    /// The log says so, for a machine that was on just now and goes on.
    Logged,
    /// Nothing: the cache is only read.
    Accepted,
}

/// Where a cache overflows to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverflowOptions {
    /// A directory, or a block device.
    pub at: PathBuf,
    /// Disk that the cache may use; at least [`MIN_DISK_BYTES`].
    pub limit_bytes: u64,
    /// Whether it goes past the page cache.
    pub buffering: Buffering,
    /// What where the disk has less free than that.
    pub little_space: LittleSpace,
}

/// What a cache is made of.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// What its owner calls the volume, for messages.
    pub name: String,
    /// Size of the volume.
    pub size_bytes: u64,
    /// RAM that the cache may use, index and buffers included; at least [`MIN_RAM_BYTES`].
    pub ram_bytes: u64,
    /// Its weight among the caches of the host while the host's limit is short; see [`crate::budget`].
    pub weight: u32,
    /// Where it overflows to; `None`: RAM only.
    pub overflow: Option<OverflowOptions>,
    /// How long a write waits for space before it is refused.
    pub pause_limit: Duration,
    /// Whether the cache survives; then it has an overflow in a directory. `None`: it is forgotten.
    pub persistent: Option<PersistentOptions>,
    /// What it lies over, where blocks equal to that need not be kept.
    pub base: Option<Arc<dyn BaseImage>>,
}
