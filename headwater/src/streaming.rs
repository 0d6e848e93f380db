//! Opens versions of a store for machines: creates the caches, and starts prefetching, the recording of boots, and copying in the background.
//! The reading itself is in `headwater_image`. Stores on this host pass here too, because boots of their versions are recorded.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Args;
use headwater_block::size;
use headwater_image::{
    Background, BackgroundProgress, ChunkCache, DiskCache, ImageError, RateLimit, Trace, VersionReader,
};
use headwater_store::{Hash, Pin, Store};
use serde::Serialize;

use crate::adapters::disks::host_memory_bytes;
use crate::adapters::release::Released;
use crate::recording::Recording;
use crate::traces::{BOOTS_RECORDED, TraceOutbox, Traces};

/// The default memory for chunks of images is the host's memory divided by this, within the bounds below.
const CHUNK_CACHE_DIVISOR: u64 = 8;
const CHUNK_CACHE_MIN_BYTES: u64 = 32 << 20;
const CHUNK_CACHE_MAX_BYTES: u64 = 1 << 30;
/// The part of the memory for chunks that a prefetched boot trace may use, as numerator and denominator. The rest is for other reads.
const PREFETCH_SHARE: (u64, u64) = (3, 4);

/// Timeout of reads in flight when an export ends, even if no server is known to have failed.
const READS_END_AFTER: Duration = Duration::from_secs(10);
/// How often it is checked, when an export ends, whether reads wait.
const READS_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A chunk cache on disk: its directory and size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCachePlace {
    /// The directory.
    pub dir: PathBuf,
    /// The most bytes that it may take.
    pub size_bytes: u64,
}

impl std::str::FromStr for DiskCachePlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (dir, bytes) = text
            .rsplit_once(':')
            .filter(|(dir, _)| !dir.is_empty())
            .ok_or_else(|| format!("'{text}' is not DIR:SIZE, for instance /var/cache/headwater:20G"))?;
        Ok(Self { dir: dir.into(), size_bytes: size::parse(bytes)? })
    }
}

/// Parses a rate in bytes per second, greater than 0.
pub fn rate(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        0 => Err("a rate of 0 would read nothing".into()),
        bytes => Ok(bytes),
    }
}

/// The rate of copying an image: bytes per second, or `None` for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRate(pub Option<u64>);

impl std::str::FromStr for CopyRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "max" => Ok(Self(None)),
            text => rate(text)
                .map(|bytes| Self(Some(bytes)))
                .map_err(|e| format!("{e}; write bytes per second, or max")),
        }
    }
}

/// Whether boots are recorded, and recorded boots are prefetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum BootTrace {
    /// Record the first boots of a version; prefetch what they read if the image is on another host
    #[default]
    Auto,
    /// Neither record nor prefetch
    Off,
}

/// Whether chunks are prefetched for a reader that reads sequentially.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Ahead {
    /// As much as the chunk cache and the latency of the store make useful
    #[default]
    Auto,
    /// Fetch only requested chunks
    Off,
}

/// How images are read, in particular those on other hosts.
#[derive(Clone, Debug, Default, Args)]
pub struct StreamArgs {
    /// Keep at most this much uncompressed image data in memory, for all volumes together [default: an eighth of the
    /// host's memory, 32M to 1G; 64M for export from a store on this host]
    #[arg(long, value_name = "SIZE", value_parser = chunk_memory)]
    pub chunk_memory: Option<u64>,
    /// Also keep chunks of images from other hosts on this disk, at most SIZE; other files of the cache may take a tenth of it more
    #[arg(long, value_name = "DIR:SIZE")]
    pub chunk_cache: Option<DiskCachePlace>,
    /// Copy images in use completely to the chunk cache, all together at this rate in bytes per second (or max);
    /// copied images need no server
    #[arg(long, value_name = "RATE", requires = "chunk_cache")]
    pub hydrate: Option<CopyRate>,
    /// Whether the first boots are recorded, and later boots prefetch what those read
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    pub boot_trace: BootTrace,
    /// Whether data is prefetched if a disk is read sequentially
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    pub readahead: Ahead,
}

impl StreamArgs {
    /// Warns that a chunk cache on disk has no use for images on this host.
    pub fn warn_of_no_use(&self, what: &str) {
        if self.chunk_cache.is_some() {
            tracing::warn!("{what} is on this host, so --chunk-cache and --hydrate have no effect on it");
        }
    }

    /// Opens the chunk cache on disk, if one was requested.
    pub fn open_disk(&self) -> Result<Option<Arc<DiskCache>>, ImageError> {
        self.chunk_cache.as_ref().map(|place| DiskCache::open(&place.dir, place.size_bytes)).transpose()
    }
}

/// The least memory; less would hold hardly more than the chunks in flight.
const CHUNK_MEMORY_MIN_BYTES: u64 = 16 << 20;

fn chunk_memory(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes if bytes < CHUNK_MEMORY_MIN_BYTES => {
            Err(format!("images need {} of memory or more", size::format(CHUNK_MEMORY_MIN_BYTES)))
        }
        bytes => Ok(bytes),
    }
}

/// A store, its caches, and the background work on it.
pub struct Streaming {
    store: Arc<dyn Store>,
    chunks: Arc<ChunkCache>,
    traces: Arc<Traces>,
    /// The rate limit of all copies together, if images are copied.
    pace: Option<Arc<RateLimit>>,
    copies: Copies,
    boot_trace: BootTrace,
    readahead: Ahead,
}

/// The copies of versions in use: one for all machines of a version.
type Copies = Mutex<HashMap<Hash, Weak<VersionCopy>>>;

/// A version that is copied to this host, and kept there while this lives.
struct VersionCopy {
    work: Background,
    /// A reader of the version, which stays open for the copy.
    _reader: Arc<VersionReader>,
}

/// A version that is not copied.
struct NotCopied {
    total_bytes: u64,
}

impl Streaming {
    /// Creates the caches, with `disk` as the chunk cache on disk. The memory for chunks is that of the arguments,
    /// else `ram_bytes`, else a share of the host's memory.
    pub fn new(
        store: Arc<dyn Store>,
        args: &StreamArgs,
        disk: Option<Arc<DiskCache>>,
        ram_bytes: Option<u64>,
        outbox: Option<Arc<TraceOutbox>>,
    ) -> Self {
        let share =
            (host_memory_bytes() / CHUNK_CACHE_DIVISOR).clamp(CHUNK_CACHE_MIN_BYTES, CHUNK_CACHE_MAX_BYTES);
        let ram_bytes = args.chunk_memory.or(ram_bytes).unwrap_or(share);
        if !store.is_remote() {
            args.warn_of_no_use("the store");
        }
        let chunks = match disk {
            Some(disk) => ChunkCache::with_disk(ram_bytes, disk),
            None => ChunkCache::new(ram_bytes),
        };
        // A guest's reads wait for a bucket that does not answer, as they do for servers.
        let store = store.retrying().unwrap_or(store);
        let (boot_trace, readahead) = (args.boot_trace, args.readahead);
        let pace = args.hydrate.map(|CopyRate(rate)| Arc::new(RateLimit::new(rate)));
        let traces = Traces::new(Arc::clone(&store), Arc::clone(&chunks)).through(outbox);
        let traces = Arc::new(match boot_trace {
            BootTrace::Auto => traces,
            BootTrace::Off => traces.without_recordings(),
        });
        Self { store, chunks, traces, pace, copies: Copies::default(), boot_trace, readahead }
    }

    /// Pins a version, which keeps it from being removed.
    pub fn pin(&self, manifest: Hash) -> Result<Pin, ImageError> {
        let disk = self.chunks.disk().filter(|_| self.store.is_remote());
        headwater_image::pin(&*self.store, manifest, disk.map(Arc::as_ref))
    }

    /// The chunk cache in memory.
    pub fn chunks(&self) -> &Arc<ChunkCache> {
        &self.chunks
    }

    /// The boot traces of the store's versions.
    pub fn traces(&self) -> &Arc<Traces> {
        &self.traces
    }

    /// Opens a version for a machine that boots from it. `disk` is the state of the disk above it.
    pub fn open(&self, manifest: Hash, disk: DiskState) -> Result<Streamed, ImageError> {
        let pin = self.pin(manifest);
        let pin = pin.map_err(|e| e.context(format!("cannot open version {}", manifest.short())))?;
        // The last user of the reader must not wait for the store.
        let pin = Pin::new(Released::soon(pin));
        let reader = VersionReader::open_pinned(&*self.store, manifest, Arc::clone(&self.chunks), pin)?;
        if self.readahead == Ahead::Off {
            reader.stop_readahead();
        }
        let (mut prefetch, mut recording) = (None, None);
        if self.boot_trace == BootTrace::Auto {
            let trace = self.traces.find(manifest).map(|(trace, _)| trace);
            if let Some(trace) = trace.as_ref().filter(|_| reader.is_remote()) {
                prefetch = Some(reader.prefetch(trace, self.budget_bytes(trace, &reader)?)?);
            }
            if disk == DiskState::Empty && trace.as_ref().map_or(0, |trace| trace.boots) < BOOTS_RECORDED {
                recording = Some(Recording::start(&self.traces, &reader)?);
            }
        }
        let pace = self.pace.as_ref().filter(|_| reader.is_remote());
        let copy = pace.map(|pace| {
            // If the copy fails, the machine boots anyway.
            self.copy(&reader, pace).map_err(|e| {
                tracing::warn!(version = %manifest.short(), error = %e,
                    "an image cannot be copied to this host: its machines still need a server");
                NotCopied { total_bytes: reader.to_copy_bytes().unwrap_or_default() }
            })
        });
        Ok(Streamed { reader, _prefetch: prefetch, copy, recording })
    }

    /// The copy of a version, of which there is one, however many machines read it.
    fn copy(
        &self,
        reader: &Arc<VersionReader>,
        pace: &Arc<RateLimit>,
    ) -> Result<Arc<VersionCopy>, ImageError> {
        // Held until the copy has begun (which reads nothing), because two machines at a time would otherwise begin
        // two copies.
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copies.get(&reader.id()).and_then(Weak::upgrade) {
            return Ok(copy);
        }
        copies.retain(|_, copy| copy.strong_count() > 0);
        let copy = Arc::new(VersionCopy { work: reader.hydrate(pace)?, _reader: Arc::clone(reader) });
        copies.insert(reader.id(), Arc::downgrade(&copy));
        Ok(copy)
    }

    /// How many stored bytes of a trace fit into memory or the disk cache. Prefetching more would evict the chunks
    /// that the machine reads first.
    fn budget_bytes(&self, trace: &Trace, reader: &VersionReader) -> Result<u64, ImageError> {
        let in_memory = self.memory_budget_bytes(trace, reader)?;
        let Some(disk) = self.chunks.disk() else { return Ok(in_memory) };
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if copies.get(&reader.id()).is_some_and(|copy| copy.strong_count() > 0) {
            // All chunks are in the copy, or will be, and stay there.
            return Ok(u64::MAX);
        }
        drop(copies);
        Ok(in_memory.max(disk.room_bytes()))
    }

    fn memory_budget_bytes(&self, trace: &Trace, reader: &VersionReader) -> Result<u64, ImageError> {
        let (part, of) = PREFETCH_SHARE;
        let room = self.chunks.counters().capacity_bytes / of * part;
        let unpacked = u64::from(reader.outline().chunk_bytes()) * trace.chunks.len() as u64;
        if unpacked <= room {
            return Ok(u64::MAX);
        }
        // Assumes that the chunks of a trace have the same compression ratio.
        let stored = trace.stored_bytes(&*reader.manifest()?);
        let part = u128::from(stored) * u128::from(room) / u128::from(unpacked.max(1));
        Ok(u64::try_from(part).unwrap_or(u64::MAX))
    }

    /// The reason for people, if reads wait because no server can be used.
    pub fn trouble(&self) -> Option<String> {
        reads_wait(&*self.store)
    }

    /// The counters of the store and the caches.
    pub fn counters(&self) -> StreamCounters {
        let chunks = self.chunks.counters();
        let disk = self.chunks.disk().map(|disk| disk.counters());
        let traffic = self.store.traffic().unwrap_or_default();
        StreamCounters {
            ram_hits: chunks.hits,
            fetches: chunks.fetches,
            joined: chunks.joined,
            ahead: chunks.ahead,
            failures: chunks.failures,
            store_bytes: chunks.fetched_bytes,
            disk_hits: disk.map_or(0, |disk| disk.hits),
            disk_writes: disk.map_or(0, |disk| disk.writes),
            disk_evictions: disk.map_or(0, |disk| disk.evictions),
            disk_damaged: disk.map_or(0, |disk| disk.damaged),
            disk_bytes: disk.map_or(0, |disk| disk.held_bytes),
            servers: traffic.servers,
            servers_up: traffic.servers_up,
            requests: traffic.requests,
            received_bytes: traffic.fetched_bytes,
            failovers: traffic.failovers,
            hedges: traffic.hedges,
            wrong_answers: traffic.wrong_answers,
            waits: traffic.waits,
            waited_ms: traffic.waited_ms,
            longest_wait_ms: traffic.longest_wait_ms,
            longest_read_ms: traffic.longest_read_ms,
        }
    }

    /// Makes waiting reads fail.
    pub fn close(&self) {
        self.store.close();
    }

    /// While the result lives, the end of this process does not wait for servers: reads that wait fail at once if no server can be used, and
    /// all reads fail after `READS_END_AFTER`.
    pub fn ending(&self) -> Ending {
        if !self.store.is_remote() {
            return Ending { end: None, thread: None };
        }
        let store = Arc::clone(&self.store);
        let (end, ended) = mpsc::channel();
        let watch = move || {
            let until = Instant::now() + READS_END_AFTER;
            while ended.recv_timeout(READS_POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let trouble = reads_wait(&*store);
                if trouble.is_none() && Instant::now() < until {
                    continue;
                }
                match trouble {
                    Some(why) => tracing::warn!(
                        "reads wait for a server of the image, and fail now, because this process ends: {why}"
                    ),
                    None => tracing::warn!(
                        "this process has not ended within {} s: reads that still wait for a server fail now",
                        READS_END_AFTER.as_secs()
                    ),
                }
                return store.close();
            }
        };
        let thread = std::thread::Builder::new().name("ending".into()).spawn(watch);
        let thread = thread
            .inspect_err(|e| tracing::error!("cannot start the thread that ends waiting reads: {e}"))
            .ok();
        Ending { end: Some(end), thread }
    }
}

/// An end that does not wait for servers. See [`Streaming::ending`].
pub struct Ending {
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that ends waiting reads crashed because of a bug");
        }
    }
}

/// Counters of reads, by their source.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct StreamCounters {
    /// Lookups of a chunk that found it in memory.
    pub ram_hits: u64,
    /// Chunks that were not in memory and were fetched.
    pub fetches: u64,
    /// Requests for a chunk that another request was already fetching.
    pub joined: u64,
    /// Chunks that were prefetched.
    pub ahead: u64,
    /// Fetches that failed.
    pub failures: u64,
    /// Compressed bytes read from the store.
    pub store_bytes: u64,
    /// Chunks found in the chunk cache on disk.
    pub disk_hits: u64,
    /// Chunks written to the chunk cache on disk.
    pub disk_writes: u64,
    /// Chunks evicted from the chunk cache on disk.
    pub disk_evictions: u64,
    /// Chunks that were damaged in the chunk cache on disk, and were fetched again.
    pub disk_damaged: u64,
    /// Bytes that the chunk cache on disk uses.
    pub disk_bytes: u64,
    /// The number of servers.
    pub servers: u64,
    /// The number of servers that can be used now.
    pub servers_up: u64,
    /// Requests sent to servers.
    pub requests: u64,
    /// Bytes received from servers.
    pub received_bytes: u64,
    /// Reads that were retried on another server.
    pub failovers: u64,
    /// Reads that were sent to a second server because the first was slow.
    pub hedges: u64,
    /// Answers of servers with wrong bytes.
    pub wrong_answers: u64,
    /// Reads that waited because no server could be used.
    pub waits: u64,
    /// The total duration of these waits.
    pub waited_ms: u64,
    /// The longest of these waits.
    pub longest_wait_ms: u64,
    /// The duration of the longest read from the servers, until the bytes were received and verified.
    pub longest_read_ms: u64,
}

/// The state of the disk over a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// A disk without changes. Every boot with such a disk reads the same data of the version.
    Empty,
    /// A disk that was in use before. Its changed blocks are not read from the version, so its boot says little about
    /// others.
    Written,
}

/// A version in use.
pub struct Streamed {
    /// The version.
    pub reader: Arc<VersionReader>,
    /// The prefetch of its boot trace, which ends when this is dropped.
    _prefetch: Option<Background>,
    copy: Option<Result<Arc<VersionCopy>, NotCopied>>,
    recording: Option<Recording>,
}

impl Streamed {
    /// The guest is up, so the reads so far were its boot.
    pub fn has_booted(&self) {
        if let Some(recording) = &self.recording {
            recording.has_booted();
        }
    }

    /// The progress of the copy to the local disk. A copy that could not be begun counts as over, with no bytes.
    pub fn copied(&self) -> Option<BackgroundProgress> {
        self.copy.as_ref().map(|copy| match copy {
            Ok(copy) => copy.work.progress(),
            Err(none) => BackgroundProgress { total_bytes: none.total_bytes, done_bytes: 0, is_over: true },
        })
    }
}

/// Why reads wait, if they wait because no server can be used; for people.
pub fn reads_wait(store: &dyn Store) -> Option<String> {
    let traffic = store.traffic()?;
    (traffic.waiting > 0 && traffic.servers_up == 0).then_some(traffic.reasons)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_images_is_a_size_that_is_worth_while() {
        assert_eq!(chunk_memory("2G"), Ok(2 << 30));
        assert!(chunk_memory("1M").unwrap_err().contains("16.0 MiB"));
        assert!(chunk_memory("much").is_err());
    }

    #[test]
    fn places_and_rates_are_read() {
        let place: DiskCachePlace = "/var/cache:x:20G".parse().unwrap();
        assert_eq!((place.dir.to_str(), place.size_bytes), (Some("/var/cache:x"), 20 << 30));
        for bad in ["/var/cache", ":1G", "/x:", "/x:none"] {
            assert!(bad.parse::<DiskCachePlace>().is_err(), "{bad}");
        }
        assert_eq!("max".parse(), Ok(CopyRate(None)));
        assert_eq!("50M".parse(), Ok(CopyRate(Some(50 << 20))));
        assert!("0".parse::<CopyRate>().is_err() && "fast".parse::<CopyRate>().is_err());
    }

    /// A server with one version of this size in MiB.
    fn served(dir: &std::path::Path, mib: u64) -> (headwater_testkit::FileServer, Hash, Vec<u8>) {
        use headwater_image::{ImportOptions, import, open_source};
        use headwater_store::{Access, LocalDir};

        let (raw, at) = (dir.join("disk.raw"), dir.join("store"));
        let mut rng = headwater_testkit::Rng::new(5);
        let disk: Vec<u8> = (0..mib << 17).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
        std::fs::write(&raw, &disk).unwrap();
        let local = LocalDir::open(&at, Access::WRITE).unwrap();
        let options = ImportOptions::new("disk".parse().unwrap(), 0);
        let imported = import(open_source(&raw, None).unwrap(), &local, &options, &mut |_| {}).unwrap();
        (headwater_testkit::FileServer::start(&at, None), imported.version.manifest, disk)
    }

    /// Its reader with the smallest chunk cache, which copies versions.
    fn copying(dir: &std::path::Path, server: &headwater_testkit::FileServer) -> Streaming {
        cached(dir, server, Some(CopyRate(None)))
    }

    fn cached(
        dir: &std::path::Path,
        server: &headwater_testkit::FileServer,
        hydrate: Option<CopyRate>,
    ) -> Streaming {
        let store =
            crate::stores::open(&server.url(), headwater_store::Access::Read, &Default::default()).unwrap();
        let chunk_cache = DiskCachePlace { dir: dir.join("cache"), size_bytes: 64 << 20 };
        let args = StreamArgs {
            chunk_cache: Some(chunk_cache),
            chunk_memory: Some(16 << 20),
            hydrate,
            boot_trace: BootTrace::Off,
            ..StreamArgs::default()
        };
        let disk = args.open_disk().unwrap();
        Streaming::new(store, &args, disk, None, None)
    }

    #[test]
    fn a_version_that_does_not_fit_is_read_without_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let (server, manifest, disk) = served(dir.path(), 56);
        let streaming = copying(dir.path(), &server);
        let opened = streaming.open(manifest, DiskState::Empty).unwrap();
        let copied = opened.copied().unwrap();
        assert!(copied.total_bytes >= 56 << 20 && copied.done_bytes == 0 && copied.is_over, "{copied:?}");
        let mut read = vec![0; 1 << 20];
        headwater_block::blocking::read(opened.reader.as_ref(), 0, &mut read).unwrap();
        assert!(read == disk[..1 << 20]);
    }

    #[test]
    fn as_much_of_a_trace_is_fetched_ahead_as_memory_has_a_share_for() {
        let dir = tempfile::tempdir().unwrap();
        let (server, manifest, _) = served(dir.path(), 24);
        let store = || crate::stores::open(&server.url(), headwater_store::Access::Read, &Default::default());
        let args =
            StreamArgs { chunk_memory: Some(16 << 20), boot_trace: BootTrace::Off, ..StreamArgs::default() };
        let in_memory = Streaming::new(store().unwrap(), &args, None, None, None);
        let room = in_memory.chunks.counters().capacity_bytes / 4 * 3;
        assert_eq!(room, 12 << 20);
        let opened = in_memory.open(manifest, DiskState::Empty).unwrap();
        // The budget for this number of incompressible chunks of 64 KiB.
        let budget = |streaming: &Streaming, chunks: u64| {
            let touched: Vec<_> = (0..chunks).map(|chunk| (chunk, 1)).collect();
            streaming.budget_bytes(&Trace::of_boot(manifest, &touched), &opened.reader).unwrap()
        };
        assert_eq!((budget(&in_memory, 10), budget(&in_memory, 192)), (u64::MAX, u64::MAX));
        assert_eq!((budget(&in_memory, 193), budget(&in_memory, 384)), (room, room));
        // With a disk cache: what fits into it; and all of a version that is copied.
        let on_disk = cached(dir.path(), &server, None);
        assert_eq!(budget(&on_disk, 384), (64 << 20) / 16 * 13);
        drop(on_disk);
        let copied = copying(dir.path(), &server);
        let _opened = copied.open(manifest, DiskState::Empty).unwrap();
        assert_eq!(budget(&copied, 384), u64::MAX);
    }

    #[test]
    fn what_a_boot_reads_first_is_not_driven_out_by_the_rest_of_its_trace() {
        let dir = tempfile::tempdir().unwrap();
        // More than the size of the disk cache.
        let (server, manifest, disk) = served(dir.path(), 80);
        let streaming = cached(dir.path(), &server, None);
        let opened = streaming.open(manifest, DiskState::Empty).unwrap();
        let touched: Vec<_> = (0..80 << 4).map(|chunk| (chunk, 1)).collect();
        let trace = Trace::of_boot(manifest, &touched);
        let budget = streaming.budget_bytes(&trace, &opened.reader).unwrap();
        let prefetch = opened.reader.prefetch(&trace, budget).unwrap();
        let fetched = budget / (64 << 10);
        headwater_testkit::wait_until("it is fetched, and kept", || {
            prefetch.progress().is_over && streaming.counters().disk_writes >= fetched
        });
        let asked = server.object_requests();
        let mut read = vec![0; 32 << 20];
        headwater_block::blocking::read(opened.reader.as_ref(), 0, &mut read).unwrap();
        assert!(read == disk[..32 << 20]);
        assert_eq!(server.object_requests(), asked);
    }

    #[test]
    fn machines_of_one_version_share_its_copy() {
        use headwater_testkit::{HttpFault, wait_until};

        let dir = tempfile::tempdir().unwrap();
        let (mut server, manifest, disk) = served(dir.path(), 8);
        let streaming = copying(dir.path(), &server);
        // No chunk of it is fetched before all are requested.
        server.fail(HttpFault::Hang);
        let first = streaming.open(manifest, DiskState::Empty).unwrap();
        let others = [
            streaming.open(manifest, DiskState::Empty).unwrap(),
            streaming.open(manifest, DiskState::Empty).unwrap(),
        ];
        let before = first.copied().unwrap();
        assert!(!before.is_over && before.total_bytes >= 8 << 20, "{before:?}");
        // The copy does not belong to the machine that was the first.
        drop(first);
        server.fail(HttpFault::None);
        server.kill();
        server.revive();
        let copied = std::fmt::from_fn(|f| write!(f, "the copy is made: {:?}", others[0].copied()));
        wait_until(copied, || others.iter().all(|machine| machine.copied().unwrap().is_over));
        for machine in &others {
            let copied = machine.copied().unwrap();
            assert_eq!(copied.done_bytes, copied.total_bytes);
        }
        assert!(server.body_bytes() < 9 << 20, "{} bytes came", server.body_bytes());
        // A later machine uses the same copy; after the last machine it is not kept.
        assert!(streaming.open(manifest, DiskState::Empty).unwrap().copied().unwrap().is_over);
        // Also while no server can be used.
        server.kill();
        let again = streaming.open(manifest, DiskState::Empty).unwrap();
        let mut read = vec![0; disk.len()];
        headwater_block::blocking::read(again.reader.as_ref(), 0, &mut read).unwrap();
        assert!(read == disk);
        drop((others, again));
        assert!(streaming.copies.lock().unwrap().values().all(|copy| copy.strong_count() == 0));
    }
}
