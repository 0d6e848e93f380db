//! Reading images across a network: the flags, the caches, boot traces, and copying in the background.

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

/// The most memory for chunks of images, as a share of the host's memory, and its bounds.
const CHUNK_CACHE_SHARE: u64 = 8;
const CHUNK_CACHE_MIN_BYTES: u64 = 32 << 20;
const CHUNK_CACHE_MAX_BYTES: u64 = 1 << 30;
/// A boot trace is fetched up to this part of the memory for chunks, of which the rest is for other reads.
const PREFETCH_SHARE: (u64, u64) = (3, 4);

/// How long reads that are under way when an export ends may take, even if nobody knows yet that a server is gone.
const READS_END_AFTER: Duration = Duration::from_secs(10);
/// How often it is looked then whether reads wait.
const READS_LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// A chunk cache on disk: where, and how large.
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

/// Reads bytes a second, which are more than none.
pub fn rate(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        0 => Err("at a rate of nothing nothing is ever read".into()),
        bytes => Ok(bytes),
    }
}

/// How fast an image is copied: bytes a second, or `None` for as fast as it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRate(pub Option<u64>);

impl std::str::FromStr for CopyRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "max" => Ok(Self(None)),
            text => rate(text)
                .map(|bytes| Self(Some(bytes)))
                .map_err(|e| format!("{e}; write bytes a second, or max")),
        }
    }
}

/// Whether boots are recorded, and what was recorded is fetched ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum BootTrace {
    /// Record the first boots of a version; fetch ahead what they read where the image is on another host
    #[default]
    Auto,
    /// Neither
    Off,
}

/// Whether chunks are fetched before a reader that goes through the disk in order asks for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Ahead {
    /// As far as the chunk cache and the distance of the store make it worth while
    #[default]
    Auto,
    /// Only what is asked for is fetched
    Off,
}

/// How images are read, and those that lie on other hosts above all.
#[derive(Clone, Debug, Default, Args)]
pub struct StreamArgs {
    /// Keep at most so much of images in memory, unpacked, for all volumes together [default: an eighth of the
    /// host's memory, 32M to 1G; 64M for export from a store on this host]
    #[arg(long, value_name = "SIZE", value_parser = chunk_memory)]
    pub chunk_memory: Option<u64>,
    /// Keep chunks of images of other hosts on this disk too, at most SIZE
    #[arg(long, value_name = "DIR:SIZE")]
    pub chunk_cache: Option<DiskCachePlace>,
    /// Copy images in use to the chunk cache, whole, all together at so many bytes a second (or max); from then on they
    /// need no server
    #[arg(long, value_name = "RATE", requires = "chunk_cache")]
    pub hydrate: Option<CopyRate>,
    /// Whether first boots are recorded, and later ones have ahead what those read
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    pub boot_trace: BootTrace,
    /// Whether more is fetched than was asked for where a disk is read in order
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    pub readahead: Ahead,
}

impl StreamArgs {
    /// Says that a chunk cache on disk is of no use for what lies on this host.
    pub fn warn_of_no_use(&self, what: &str) {
        if self.chunk_cache.is_some() {
            tracing::warn!(
                "{what} is on this host: --chunk-cache keeps, and --hydrate copies, nothing of it"
            );
        }
    }

    /// Opens the chunk cache on disk, if there is to be one.
    pub fn open_disk(&self) -> Result<Option<Arc<DiskCache>>, ImageError> {
        self.chunk_cache.as_ref().map(|place| DiskCache::open(&place.dir, place.size_bytes)).transpose()
    }
}

/// Less than this holds hardly more than the chunks that are on their way.
const CHUNK_MEMORY_MIN_BYTES: u64 = 16 << 20;

fn chunk_memory(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes if bytes < CHUNK_MEMORY_MIN_BYTES => {
            Err(format!("images need {} of memory or more", size::format(CHUNK_MEMORY_MIN_BYTES)))
        }
        bytes => Ok(bytes),
    }
}

/// A store, the caches over it, and what is done in the background.
pub struct Streaming {
    store: Arc<dyn Store>,
    chunks: Arc<ChunkCache>,
    traces: Arc<Traces>,
    /// The pace of all copies together, if copies are made.
    pace: Option<Arc<RateLimit>>,
    copies: Copies,
    boot_trace: BootTrace,
    readahead: Ahead,
}

/// The copies of versions that are in use: one for all machines of a version.
type Copies = Mutex<HashMap<Hash, Weak<VersionCopy>>>;

/// A version that is copied to this host, and kept there while this lives.
struct VersionCopy {
    work: Background,
    /// Any one reader of it: of the machine that was the first.
    _reader: Arc<VersionReader>,
}

/// A version of which no copy is made.
struct NotCopied {
    total_bytes: u64,
}

impl Streaming {
    /// Makes the caches, over that on `disk`. Unless the arguments say how much of images is kept in memory it is `ram_bytes`,
    /// and without that a share of the host's memory.
    pub fn new(
        store: Arc<dyn Store>,
        args: &StreamArgs,
        disk: Option<Arc<DiskCache>>,
        ram_bytes: Option<u64>,
        outbox: Option<Arc<TraceOutbox>>,
    ) -> Self {
        let share =
            (host_memory_bytes() / CHUNK_CACHE_SHARE).clamp(CHUNK_CACHE_MIN_BYTES, CHUNK_CACHE_MAX_BYTES);
        let ram_bytes = args.chunk_memory.or(ram_bytes).unwrap_or(share);
        if !store.is_remote() {
            args.warn_of_no_use("the store");
        }
        let chunks = match disk {
            Some(disk) => ChunkCache::with_disk(ram_bytes, disk),
            None => ChunkCache::new(ram_bytes),
        };
        // A guest's reads wait for a bucket that is gone, as they do for servers.
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

    /// Keeps a version from being removed.
    pub fn pin(&self, manifest: Hash) -> Result<Pin, ImageError> {
        let disk = self.chunks.disk().filter(|_| self.store.is_remote());
        headwater_image::pin(&*self.store, manifest, disk.map(Arc::as_ref))
    }

    /// The chunks in memory.
    pub fn chunks(&self) -> &Arc<ChunkCache> {
        &self.chunks
    }

    /// What boots of its versions read.
    pub fn traces(&self) -> &Arc<Traces> {
        &self.traces
    }

    /// Opens a version for a machine that boots from it, with `disk` above it.
    pub fn open(&self, manifest: Hash, disk: Above) -> Result<Streamed, ImageError> {
        let pin = self.pin(manifest);
        let pin = pin.map_err(|e| e.context(format!("cannot open version {}", manifest.short())))?;
        // Whoever is the last to use the reader is not to wait for the store.
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
            if disk == Above::Empty && trace.as_ref().map_or(0, |trace| trace.boots) < BOOTS_RECORDED {
                recording = Some(Recording::start(&self.traces, &reader)?);
            }
        }
        let pace = self.pace.as_ref().filter(|_| reader.is_remote());
        let copy = pace.map(|pace| {
            // A machine boots without a copy as well.
            self.copy(&reader, pace).map_err(|e| {
                tracing::warn!(version = %manifest.short(), error = %e,
                    "an image is not copied to this host: its machines go on needing a server");
                NotCopied { total_bytes: reader.to_copy_bytes().unwrap_or_default() }
            })
        });
        Ok(Streamed { reader, _prefetch: prefetch, copy, recording })
    }

    /// The copy of a version, which is made once however many machines read it.
    fn copy(
        &self,
        reader: &Arc<VersionReader>,
        pace: &Arc<RateLimit>,
    ) -> Result<Arc<VersionCopy>, ImageError> {
        // Held until the copy has begun, which reads nothing: or two machines at a time would begin one each.
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copies.get(&reader.id()).and_then(Weak::upgrade) {
            return Ok(copy);
        }
        copies.retain(|_, copy| copy.strong_count() > 0);
        let copy = Arc::new(VersionCopy { work: reader.hydrate(pace)?, _reader: Arc::clone(reader) });
        copies.insert(reader.id(), Arc::downgrade(&copy));
        Ok(copy)
    }

    /// How much of a trace, as it is stored, fits into memory or onto the disk below: what is fetched beyond that drives out what the
    /// machine reads first.
    fn budget_bytes(&self, trace: &Trace, reader: &VersionReader) -> Result<u64, ImageError> {
        let in_memory = self.memory_budget_bytes(trace, reader)?;
        let Some(disk) = self.chunks.disk() else { return Ok(in_memory) };
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if copies.get(&reader.id()).is_some_and(|copy| copy.strong_count() > 0) {
            // It is there or comes, and stays.
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
        // The chunks of a trace are packed to a like degree.
        let stored = trace.stored_bytes(&*reader.manifest()?);
        let part = u128::from(stored) * u128::from(room) / u128::from(unpacked.max(1));
        Ok(u64::try_from(part).unwrap_or(u64::MAX))
    }

    /// What reads wait for, if they wait: for people.
    pub fn trouble(&self) -> Option<String> {
        reads_wait(&*self.store)
    }

    /// Counters of all of it.
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

    /// Ends reads that wait for servers.
    pub fn close(&self) {
        self.store.close();
    }

    /// Sees to it, while the answer lives, that an end does not wait for servers: nobody comes to answer reads that wait.
    pub fn ending(&self) -> Ending {
        if !self.store.is_remote() {
            return Ending { end: None, thread: None };
        }
        let store = Arc::clone(&self.store);
        let (end, ended) = mpsc::channel();
        let watch = move || {
            let until = Instant::now() + READS_END_AFTER;
            while ended.recv_timeout(READS_LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let trouble = reads_wait(&*store);
                if trouble.is_none() && Instant::now() < until {
                    continue;
                }
                let trouble = trouble.unwrap_or_else(|| "a server takes too long".into());
                tracing::warn!("ending while reads wait for a server of the image: {trouble}");
                return store.close();
            }
        };
        let thread = std::thread::Builder::new().name("ending".into()).spawn(watch);
        let thread = thread.inspect_err(|e| tracing::error!("nobody looks after reads that wait: {e}")).ok();
        Ending { end: Some(end), thread }
    }
}

/// An end that does not wait for servers; see [`Streaming::ending`].
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
            tracing::error!("whoever looks after reads at the end failed by a bug");
        }
    }
}

/// What was read from where.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct StreamCounters {
    /// Lookups of a chunk that found it in memory.
    pub ram_hits: u64,
    /// Chunks fetched, each time one was needed and not in memory.
    pub fetches: u64,
    /// Requests that joined a fetch that was under way.
    pub joined: u64,
    /// Chunks fetched before anybody asked for them.
    pub ahead: u64,
    /// Fetches that failed.
    pub failures: u64,
    /// Bytes read from the store, packed.
    pub store_bytes: u64,
    /// Chunks found in the chunk cache on disk.
    pub disk_hits: u64,
    /// Chunks written to it.
    pub disk_writes: u64,
    /// Chunks dropped from it.
    pub disk_evictions: u64,
    /// Chunks in it that were damaged, and were fetched again.
    pub disk_damaged: u64,
    /// Bytes that it takes.
    pub disk_bytes: u64,
    /// Servers.
    pub servers: u64,
    /// Of which are used now.
    pub servers_up: u64,
    /// Requests sent to servers.
    pub requests: u64,
    /// Bytes that came from them.
    pub received_bytes: u64,
    /// Reads that went on at another server.
    pub failovers: u64,
    /// Reads that were asked for a second time because a server was late.
    pub hedges: u64,
    /// Answers of servers whose bytes were wrong.
    pub wrong_answers: u64,
    /// Reads that waited because no server was left.
    pub waits: u64,
    /// How long they waited, together.
    pub waited_ms: u64,
    /// How long the longest of them waited.
    pub longest_wait_ms: u64,
    /// How long the longest read of the servers took, until the bytes were here and checked.
    pub longest_read_ms: u64,
}

/// What lies above a version that is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Above {
    /// A disk without changes. What a boot reads of the version is what every other boot of it reads.
    Empty,
    /// One that was in use before. Of what was changed nothing is read of the version any more, so a boot says little about others.
    Written,
}

/// A version in use.
pub struct Streamed {
    /// The version.
    pub reader: Arc<VersionReader>,
    /// Ends what it does when it is dropped.
    _prefetch: Option<Background>,
    copy: Option<Result<Arc<VersionCopy>, NotCopied>>,
    recording: Option<Recording>,
}

impl Streamed {
    /// The guest is up: what was read until then was a boot.
    pub fn has_booted(&self) {
        if let Some(recording) = &self.recording {
            recording.has_booted();
        }
    }

    /// How far the copy to the local disk is. One that was not begun is over, and has nothing.
    pub fn copied(&self) -> Option<BackgroundProgress> {
        self.copy.as_ref().map(|copy| match copy {
            Ok(copy) => copy.work.progress(),
            Err(none) => BackgroundProgress { total_bytes: none.total_bytes, done_bytes: 0, is_over: true },
        })
    }
}

/// Why reads wait, if they wait because no server is left: for people.
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

    /// A store with one version of so many MiB, on a server.
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

    /// Its reader with the smallest chunk cache, of which copies are made.
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
        let opened = streaming.open(manifest, Above::Empty).unwrap();
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
        let opened = in_memory.open(manifest, Above::Empty).unwrap();
        // So many chunks of 64 KiB, which cannot be packed: each is stored as long as it is.
        let budget = |streaming: &Streaming, chunks: u64| {
            let touched: Vec<_> = (0..chunks).map(|chunk| (chunk, 1)).collect();
            streaming.budget_bytes(&Trace::of_boot(manifest, &touched), &opened.reader).unwrap()
        };
        assert_eq!((budget(&in_memory, 10), budget(&in_memory, 192)), (u64::MAX, u64::MAX));
        assert_eq!((budget(&in_memory, 193), budget(&in_memory, 384)), (room, room));
        // With a disk below, what fits there; and all of a version that is copied.
        let on_disk = cached(dir.path(), &server, None);
        assert_eq!(budget(&on_disk, 384), (64 << 20) / 16 * 13);
        drop(on_disk);
        let copied = copying(dir.path(), &server);
        let _opened = copied.open(manifest, Above::Empty).unwrap();
        assert_eq!(budget(&copied, 384), u64::MAX);
    }

    #[test]
    fn what_a_boot_reads_first_is_not_driven_out_by_the_rest_of_its_trace() {
        let dir = tempfile::tempdir().unwrap();
        // More than the disk cache has.
        let (server, manifest, disk) = served(dir.path(), 80);
        let streaming = cached(dir.path(), &server, None);
        let opened = streaming.open(manifest, Above::Empty).unwrap();
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
        // None of it comes before all are there.
        server.fail(HttpFault::Hang);
        let first = streaming.open(manifest, Above::Empty).unwrap();
        let others = [
            streaming.open(manifest, Above::Empty).unwrap(),
            streaming.open(manifest, Above::Empty).unwrap(),
        ];
        let before = first.copied().unwrap();
        assert!(!before.is_over && before.total_bytes >= 8 << 20, "{before:?}");
        // The copy is not that of the machine that was the first.
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
        // Who comes later has it, too; when nobody is left it is not kept any more.
        assert!(streaming.open(manifest, Above::Empty).unwrap().copied().unwrap().is_over);
        // Also while no server is left.
        server.kill();
        let again = streaming.open(manifest, Above::Empty).unwrap();
        let mut read = vec![0; disk.len()];
        headwater_block::blocking::read(again.reader.as_ref(), 0, &mut read).unwrap();
        assert!(read == disk);
        drop((others, again));
        assert!(streaming.copies.lock().unwrap().values().all(|copy| copy.strong_count() == 0));
    }
}
