//! What the write caches of all machines have in common: the flags of `serve` and `run`.

use std::time::Duration;

use clap::Args;
use headwater_block::size;
use headwater_volume::{Buffering, DEFAULT_PAUSE_LIMIT};

/// How write caches are used.
#[derive(Args, Clone, Debug)]
pub struct CacheArgs {
    /// How long a write waits for room in its write cache before the machine is told that there is none
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_PAUSE_LIMIT.as_secs())]
    pub pause: u64,
    /// Memory that the write caches of all machines together may take [default: all that this host has]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_ram: Option<u64>,
    /// How overflow is written: direct (past the page cache), buffered, or auto (measured once)
    #[arg(long, value_name = "HOW", default_value_t = Buffering::Direct)]
    pub buffering: Buffering,
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
