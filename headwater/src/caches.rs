//! What the write caches of all machines have in common: the flags of `serve` and `run`.

use std::time::Duration;

use clap::Args;
use headwater_api::CacheMode;
use headwater_block::size;
use headwater_volume::{Buffering, DEFAULT_PAUSE_LIMIT};
use headwater_writecache::MIN_RAM_BYTES;

use crate::adapters::disks::host_memory_bytes;

/// How write caches are used.
#[derive(Args, Clone, Debug)]
pub struct CacheArgs {
    /// How long a write waits for room in its write cache before the machine is told that there is none
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_PAUSE_LIMIT.as_secs())]
    pub pause: u64,
    /// Memory that the write caches of all machines together may take, 16M or more [default: all that this host has]
    #[arg(long, value_name = "SIZE", value_parser = cache_ram)]
    pub cache_ram: Option<u64>,
    /// How overflow is written: direct (past the page cache), buffered, or auto (measured once)
    #[arg(long, value_name = "HOW", default_value_t = Buffering::Direct)]
    pub buffering: Buffering,
}

/// A limit that was given and that the mode does not have, and why not.
pub fn unfit_limit(
    mode: CacheMode,
    ram: Option<u64>,
    disk: Option<u64>,
) -> Option<(&'static str, &'static str)> {
    match mode {
        CacheMode::Ram if disk.is_some() => Some(("--disk", "has no disk")),
        CacheMode::Disk if ram.is_some() => Some(("--ram", "has a little memory of a fixed size")),
        _ => None,
    }
}

/// Refuses write caches of more memory in all than this host has.
pub fn check_host_memory(wanted_bytes: u64) -> Result<(), String> {
    let total = host_memory_bytes();
    if wanted_bytes <= total {
        return Ok(());
    }
    Err(format!(
        "write caches of {} of memory in all were asked for, and this machine has {}: give a smaller --ram",
        size::format(wanted_bytes),
        size::format(total)
    ))
}

fn cache_ram(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes if bytes < MIN_RAM_BYTES => {
            Err(format!("a write cache needs {} of memory or more", size::format(MIN_RAM_BYTES)))
        }
        bytes => Ok(bytes),
    }
}

impl Default for CacheArgs {
    fn default() -> Self {
        Self { pause: DEFAULT_PAUSE_LIMIT.as_secs(), cache_ram: None, buffering: Buffering::Direct }
    }
}

impl CacheArgs {
    /// How long a write waits for room.
    pub fn pause_limit(&self) -> Duration {
        Duration::from_secs(self.pause)
    }
}
