//! Options of opening a volume.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use headwater_block::Device;
use headwater_writecache::MIN_RAM_BYTES;
pub use headwater_writecache::PersistentOptions;
pub use headwater_writecache::{Buffering, DEFAULT_WEIGHT, LittleSpace};
use serde::{Deserialize, Serialize};

/// The place of a machine's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CacheMode {
    /// RAM only: when it is full, writes wait, then fail with "no space".
    #[serde(rename = "ram")]
    Ram,
    /// RAM first, cold segments to the overflow disk.
    #[serde(rename = "ram+disk")]
    RamDisk,
    /// The overflow disk, with a fixed small buffer in RAM ([`disk_mode_ram_bytes`]).
    #[serde(rename = "disk")]
    Disk,
}

impl CacheMode {
    /// All modes, for help texts.
    pub const ALL: [Self; 3] = [Self::RamDisk, Self::Ram, Self::Disk];

    /// The name on the command line and in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::RamDisk => "ram+disk",
            Self::Disk => "disk",
        }
    }

    /// Whether the mode needs an overflow disk.
    pub fn has_disk(self) -> bool {
        self != Self::Ram
    }
}

impl std::fmt::Display for CacheMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for CacheMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.as_str() == text)
            .ok_or_else(|| format!("'{text}' is not a cache mode; the modes are ram+disk, ram and disk"))
    }
}

/// RAM of mode `disk`, whatever limit is given: a buffer of 16 MiB, and memory for the host's staging
/// buffers. A persistent cache gets only the 16 MiB, because each segment that it begins in RAM reserves a position on
/// disk, and a small disk has few positions.
pub const fn disk_mode_ram_bytes(is_persistent: bool) -> u64 {
    if is_persistent { MIN_RAM_BYTES } else { MIN_RAM_BYTES + (8 << 20) }
}

/// Default limit of the time that a write waits for space before it is refused.
pub const DEFAULT_PAUSE_LIMIT: Duration = Duration::from_secs(30);

/// The options of a volume.
#[derive(Clone)]
pub struct VolumeOptions {
    /// Name of the volume for messages.
    pub name: String,
    /// The base below the write cache: its size is the volume's. Never written.
    pub base: Arc<dyn Device>,
    /// Where writes go.
    pub mode: CacheMode,
    /// RAM limit in bytes, including index and buffers. Mode `disk` uses [`disk_mode_ram_bytes`] instead.
    pub ram_bytes: u64,
    /// Weight among the host's volumes when the host's RAM limit is short; [`DEFAULT_WEIGHT`] by default.
    pub weight: u32,
    /// Disk limit; ignored by mode `ram`.
    pub disk_bytes: u64,
    /// Directory or block device of the overflow; ignored by mode `ram`.
    pub cache_dir: PathBuf,
    /// Whether the overflow bypasses the page cache; ignored by mode `ram`.
    pub buffering: Buffering,
    /// What happens if the disk has less free space than the disk limit; ignored by mode `ram`.
    pub little_space: LittleSpace,
    /// How long a write waits for space before it is refused.
    pub pause_limit: Duration,
    /// Makes the write cache outlive the volume; `None`: its contents are lost when the volume is closed. Not for mode `ram`.
    pub persistent: Option<PersistentOptions>,
}
