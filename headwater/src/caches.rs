//! What the write caches of all machines have in common: the flags of `serve` and `run`.

use std::time::Duration;

use clap::Args;
use headwater_block::size;
use headwater_volume::{Buffering, DEFAULT_PAUSE_LIMIT};
use headwater_writecache::MIN_RAM_BYTES;

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
