//! The root disk: streams the image, puts a write cache over it, and attaches the result as a block device of the
//! kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use headwater_attach::{Attached, Options, Way, choose};
use headwater_block::{Device, size};
use headwater_boot_script::{CA_FILE, Settings, TOKEN_FILE};
use headwater_image::{ChunkCache, VersionReader};
use headwater_nbd::{Address, Limits, Server, SingleExport};
use headwater_remote::{RemoteStore, ServerUrl};
use headwater_store::{Hash, Store};
use headwater_volume::{Buffering, CacheMode, DEFAULT_WEIGHT, LittleSpace, Volume, VolumeOptions};
use headwater_writecache::Host;

use crate::console::say;

/// The write cache takes at most 1/2 of the memory.
const CACHE_SHARE: u64 = 2;
/// Cached chunks of the image take 1/8 of the memory, within the two bounds below.
const CHUNKS_SHARE: u64 = 8;
const CHUNKS_MIN_BYTES: u64 = 16 << 20;
const CHUNKS_MAX_BYTES: u64 = 256 << 20;
/// How long a write waits for free space in the write cache before it fails.
const PAUSE_LIMIT: Duration = Duration::from_secs(30);
/// Shortest and longest pause between attempts to reach the image servers.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(10);
/// How long the kernel may take to find the partitions.
const PARTITION_TIMEOUT: Duration = Duration::from_secs(60);
/// The socket of the NBD server, relative to the agent's directory. It is removed as soon as the kernel is connected.
const NBD_SOCKET: &str = "nbd.sock";

/// An attached root disk. Dropping it detaches the disk.
pub(crate) struct RootDisk {
    attached: Attached,
    way: Way,
    _server: Option<Server>,
    _volume: Arc<Volume>,
    _host: Host,
}

/// Opens the version with an empty write cache, and attaches it.
pub(crate) fn open(settings: &Settings) -> anyhow::Result<RootDisk> {
    let memory_bytes =
        memory_bytes(&fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?)
            .context("/proc/meminfo does not say how much memory there is")?;
    let reader = read_image(settings, memory_bytes)?;
    let ram_bytes = cache_bytes(settings.cache_ram_bytes, memory_bytes);
    if ram_bytes < settings.cache_ram_bytes {
        let text = format!(
            "the write cache gets {} of RAM instead of {}, because that is half of the memory",
            size::format(ram_bytes),
            size::format(settings.cache_ram_bytes)
        );
        say(&text);
        tracing::warn!("{text}");
    }
    let host = Host::start(ram_bytes).map_err(anyhow::Error::msg).context("cannot make the write cache")?;
    let options = VolumeOptions {
        name: settings.version.clone(),
        base: reader as Arc<dyn Device>,
        mode: CacheMode::Ram,
        ram_bytes,
        weight: DEFAULT_WEIGHT,
        disk_bytes: 0,
        cache_dir: PathBuf::new(),
        buffering: Buffering::default(),
        little_space: LittleSpace::Refused,
        pause_limit: PAUSE_LIMIT,
        persistent: None,
    };
    let volume = Volume::open(&options, &host).context("cannot make the write cache")?;
    let device: Arc<dyn Device> = Arc::clone(&volume) as _;
    let (way, why) = choose(None).context("the root disk cannot be attached")?;
    let (server, options) = match way {
        Way::Ublk => (None, Options::default()),
        Way::Nbd => {
            let export = SingleExport::new(Arc::clone(&device), settings.version.clone());
            let server = Server::bind(Address::Unix(NBD_SOCKET.into()), export, Limits::default())
                .context("the root disk cannot be served to this kernel")?;
            (Some(server), Options { nbd_socket: NBD_SOCKET.into(), ..Options::default() })
        }
    };
    let attached = Attached::start(way, &device, &options).context("the root disk cannot be attached")?;
    // The kernel is connected, and no other client may connect.
    let _ = fs::remove_file(NBD_SOCKET);
    say(&format!("attached by {way}: {why}; write cache of {} in RAM", size::format(ram_bytes)));
    Ok(RootDisk { attached, way, _server: server, _volume: volume, _host: host })
}

/// Opens the image. Retries without end: restarting the machine instead would not help.
fn read_image(settings: &Settings, memory_bytes: u64) -> anyhow::Result<Arc<VersionReader>> {
    let manifest: Hash = settings.manifest.parse().ok().context("the boot server sent no valid manifest")?;
    let servers =
        ServerUrl::parse_list(&settings.servers).context("the boot server sent no valid servers")?;
    let mut options = headwater_remote::Options::new(servers);
    options.token_file = Some(TOKEN_FILE.into()).filter(|file: &PathBuf| file.exists());
    options.ca_file = Some(CA_FILE.into()).filter(|file: &PathBuf| file.exists());
    let chunks = (memory_bytes / CHUNKS_SHARE).clamp(CHUNKS_MIN_BYTES, CHUNKS_MAX_BYTES);
    let chunks = ChunkCache::new(chunks);
    let mut pause = RETRY_MIN;
    let open = || -> anyhow::Result<Arc<VersionReader>> {
        let store: Arc<dyn Store> = Arc::new(RemoteStore::open(options.clone())?);
        let store = store.retrying().unwrap_or(store);
        Ok(VersionReader::open(&*store, manifest, Arc::clone(&chunks))?)
    };
    loop {
        match open() {
            Ok(reader) => return Ok(reader),
            Err(error) => say(&format!("waiting for {}: {error:#}", settings.servers)),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(RETRY_MAX);
    }
}

fn memory_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn cache_bytes(wanted: u64, memory_bytes: u64) -> u64 {
    wanted.min(memory_bytes / CACHE_SHARE)
}

impl RootDisk {
    /// The path of a partition, as soon as the kernel has found it; partition 0 is the whole disk.
    pub(crate) fn partition(&self, number: u32) -> anyhow::Result<PathBuf> {
        let disk = self.way.device(self.attached.number());
        let path = if number == 0 { disk.clone() } else { format!("{disk}p{number}") };
        let begin = Instant::now();
        loop {
            // Opening the device makes the kernel's NBD client read the partition table.
            drop(fs::File::open(&disk));
            if Path::new(&path).exists() {
                return Ok(path.into());
            }
            if begin.elapsed() > PARTITION_TIMEOUT {
                bail!("the kernel has found no {path} within {} s", PARTITION_TIMEOUT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Whether the block device was removed.
    pub(crate) fn is_gone(&self) -> bool {
        self.attached.is_gone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_cache_leaves_half_of_the_memory() {
        let meminfo = "MemTotal:        1015628 kB\nMemFree:          100 kB\n";
        let memory = memory_bytes(meminfo).unwrap();
        assert_eq!(memory, 1_015_628 * 1024);
        assert_eq!(cache_bytes(256 << 20, memory), 256 << 20);
        assert_eq!(cache_bytes(1 << 30, memory), memory / 2);
        assert_eq!(memory_bytes("MemTotal: many"), None);
    }
}
