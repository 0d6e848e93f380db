//! Command line options of write caches: the limits of one write cache, and settings that all write caches of a host
//! share.

use std::time::Duration;

use clap::Args;
use headwater_api::{CacheMode, CacheSettings, Problem, ProblemKind};
use headwater_block::size;
use headwater_volume::{Buffering, DEFAULT_PAUSE_LIMIT};
use headwater_writecache::{GUARANTEED_SEGMENT_BYTES, MIN_RAM_BYTES};

use crate::adapters::disks::host_memory_bytes;

/// The limits of the write cache of a machine or an export.
#[derive(Args, Clone, Debug)]
pub struct LimitArgs {
    /// Where writes go: ram, ram+disk or disk [default: ram+disk]
    #[arg(long, value_name = "MODE", value_parser = CacheMode::parse)]
    pub cache: Option<CacheMode>,
    /// The most memory of the write cache, 16M or more; not with --cache disk [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub ram: Option<u64>,
    /// The most disk space of the write cache, 16M or more; not with --cache ram [default: 10G]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub disk: Option<u64>,
}

impl LimitArgs {
    /// The mode, by default ram+disk.
    pub fn mode(&self) -> CacheMode {
        self.cache.unwrap_or(CacheSettings::default_mode())
    }

    /// The settings for the API: values that were not given are taken from `base`. Fails for a limit that the mode
    /// does not have.
    pub fn settings(&self, base: CacheSettings) -> Result<CacheSettings, Problem> {
        let mode = self.cache.unwrap_or(base.mode);
        if let Some((limit, why)) = unfit_limit(mode, self.ram, self.disk) {
            let message = format!("{limit} was given, but the cache mode '{mode}' {why}");
            let advice = format!("leave {limit} out, or give --cache ram+disk");
            return Err(Problem::new(ProblemKind::Invalid, message).advise(advice));
        }
        Ok(CacheSettings {
            mode,
            ram_bytes: self.ram.unwrap_or(base.ram_bytes),
            disk_bytes: self.disk.unwrap_or(base.disk_bytes),
            ..base
        })
    }
}

/// New limits of an existing write cache. The command has a group `limits`, of which at least one must be given.
#[derive(Args, Clone, Copy, Debug)]
pub struct NewLimits {
    /// The most memory of the write cache, 16M or more; not if it was created with --cache disk
    #[arg(long, value_name = "SIZE", value_parser = size::parse, group = "limits")]
    pub ram: Option<u64>,
    /// The most disk space of the write cache, 16M or more; not if it was created with --cache ram, except during a maintenance
    /// session
    #[arg(long, value_name = "SIZE", value_parser = size::parse, group = "limits")]
    pub disk: Option<u64>,
}

/// How write caches handle writes.
#[derive(Args, Clone, Debug)]
pub struct WritingArgs {
    /// How long a write waits for space in its write cache before it is refused. Over vhost-user, and for guests of the daemon, it is
    /// then tried again instead
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_PAUSE_LIMIT.as_secs())]
    pub pause: u64,
    /// How overflow is written: direct (past the page cache), buffered, or auto (measured once)
    #[arg(long, value_name = "HOW", default_value_t = Buffering::Direct)]
    pub buffering: Buffering,
}

impl Default for WritingArgs {
    fn default() -> Self {
        Self { pause: DEFAULT_PAUSE_LIMIT.as_secs(), buffering: Buffering::Direct }
    }
}

impl WritingArgs {
    /// How long a write waits for space.
    pub fn pause_limit(&self) -> Duration {
        Duration::from_secs(self.pause)
    }
}

/// Settings that all machines, or all volumes of an export, share.
#[derive(Args, Clone, Debug, Default)]
pub struct CacheArgs {
    /// How write caches handle writes
    #[command(flatten)]
    pub writing: WritingArgs,
    /// Memory that the write caches of all machines together may use, 16M or more [default: all memory of this
    /// host, or of its cgroup if that has less]
    #[arg(long, value_name = "SIZE", value_parser = cache_ram)]
    pub cache_ram: Option<u64>,
}

impl CacheArgs {
    /// The memory for all write caches together. Fails if it is more than the host has.
    pub fn ram_bytes(&self) -> Result<u64, String> {
        let most = host_memory_bytes();
        let ram_bytes = self.cache_ram.unwrap_or(most);
        if ram_bytes > most {
            return Err(format!(
                "cannot give write caches {} of RAM: this host has {}",
                size::format(ram_bytes),
                size::format(most)
            ));
        }
        Ok(ram_bytes)
    }

    /// Fails if one write cache of an export may use more than --cache-ram or, without --cache-ram, if all of them together
    /// may use more than the host has.
    pub fn check_limits(&self, each_bytes: impl IntoIterator<Item = u64>) -> Result<(), String> {
        let Some(ram_bytes) = self.cache_ram else {
            return check_host_memory(each_bytes.into_iter().fold(0, u64::saturating_add));
        };
        each_bytes.into_iter().max().filter(|bytes| *bytes > ram_bytes).map_or(Ok(()), |bytes| {
            Err(format!(
                "a write cache of {} of memory (--ram) is larger than the limit of {} for all together (--cache-ram): give a smaller --ram or a larger --cache-ram",
                size::format(bytes),
                size::format(ram_bytes)
            ))
        })
    }

    /// Fails if there are more write caches than the limit for all together permits.
    pub fn check_count(&self, caches: usize) -> Result<(), String> {
        let least_bytes = GUARANTEED_SEGMENT_BYTES.saturating_mul(caches as u64);
        self.cache_ram.filter(|ram_bytes| *ram_bytes < least_bytes).map_or(Ok(()), |ram_bytes| {
            Err(format!(
                "{caches} write caches need at least {} of memory, but the limit for all together is {}: give a larger --cache-ram",
                size::format(least_bytes),
                size::format(ram_bytes)
            ))
        })
    }
}

/// A limit that was given although the mode does not have it, and why not.
pub fn unfit_limit(
    mode: CacheMode,
    ram: Option<u64>,
    disk: Option<u64>,
) -> Option<(&'static str, &'static str)> {
    match mode {
        CacheMode::Ram if disk.is_some() => Some(("--disk", "has no disk")),
        CacheMode::Disk if ram.is_some() => Some(("--ram", "uses a fixed amount of memory")),
        _ => None,
    }
}

/// Fails for a write cache with more memory than all together may use.
pub fn check_share(wanted_bytes: u64, ram_bytes: u64) -> Result<(), String> {
    if wanted_bytes <= ram_bytes {
        return Ok(());
    }
    Err(format!(
        "a write cache of {} of memory is larger than this host's {} for all write caches",
        size::format(wanted_bytes),
        size::format(ram_bytes)
    ))
}

/// Fails for write caches that together need more memory than this host has.
fn check_host_memory(wanted_bytes: u64) -> Result<(), String> {
    let total = host_memory_bytes();
    if wanted_bytes <= total {
        return Ok(());
    }
    Err(format!(
        "write caches with a sum of {} of memory were requested, but this host has {}: give a smaller --ram",
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
