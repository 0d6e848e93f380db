//! The write cache of one volume. It finishes requests that RAM can serve (the hit path). For other requests, the
//! result says what the caller has to wait for.
//!
//! A request ([`read`](WriteCache::read), [`write`](WriteCache::write), [`clear`](WriteCache::clear)) is
//! executed on the thread that received it. It holds the lock of one leaf of the index (`map`) and,
//! within that, at most the lock of the log of segments (`log`). It makes no I/O. It allocates only a
//! leaf's first table and, during a freeze, the copy of a leaf that changes.
//!
//! | file | contents |
//! |---|---|
//! | `options` | the options of a cache |
//! | `answers` | the types of the cache's parameters and results |
//! | `read`, `write` | the hit path |
//! | `part` | writes of parts of blocks |
//! | `together` | the hit path of several overwrites at once |
//! | `freeze` | the state at one instant, kept while the machine continues |
//! | `recover` | takes over the cache that another process left in a file |
//! | `dedup_scan` | frees blocks that equal the base, off the hit path |
//! | `space` | takes and frees slots and RAM |
//! | `limits` | the limits, and how much of them is in use |
//! | `statistics` | the counters |

mod answers;
mod dedup_scan;
mod freeze;
mod limits;
mod options;
mod part;
mod read;
mod recover;
mod space;
mod statistics;
mod together;
mod write;

use std::fmt::Display;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use headwater_block::{BLOCK_BYTES, FaultLog, IoError, IoErrorKind, VOLUME_MAX_BYTES};

pub use self::answers::{
    Admission, Cleared, Found, Kind, Now, Old, ReadTally, Residence, Ticket, UnloggedBlocks, WriteResult,
};
pub use self::dedup_scan::BaseImage;
use self::dedup_scan::DedupScan;
pub(crate) use self::dedup_scan::DedupSchedule;
pub use self::freeze::FrozenCache;
pub use self::options::{CacheOptions, LittleSpace, MIN_DISK_BYTES, MIN_RAM_BYTES, OverflowOptions};
pub use self::part::FetchedOld;
pub use self::read::EachPart;
pub use self::together::{Block, TOGETHER};
use crate::budget::Share;
use crate::clean::Cleaner;
use crate::counters::Counters;
use crate::host::HostShared;
use crate::log::Log;
use crate::map::Map;
use crate::memory::MemoryPool;
use crate::memory_file::{Handover, MemoryFile};
use crate::overflow::Overflow;
use crate::packed::PackedTable;
use crate::persist::{self, Persist};
use crate::segment::SegmentTable;
use crate::sync::Mutex;
use crate::throttle::Throttle;
use crate::units::{SEGMENT_BYTES, SegmentId};
use crate::write_queue::Waiting;

const BLOCK: usize = BLOCK_BYTES as usize;

/// The most warnings in ten seconds about a failing disk or damaged blocks. A machine that reads such a block
/// again and again would otherwise fill the log; the counters have all of them.
const WARNINGS_PER_10_S: u32 = 20;

/// The segments that a cache may always have in RAM, however large its index and however short the host's RAM
/// is: one to fill, one that is being written to disk, one for cleaning, and one more.
const MIN_SEGMENTS: u64 = 4;

/// The RAM of these segments: a cache may always have it, in addition to its index. [`MIN_RAM_BYTES`] is another limit: the least
/// that may be configured.
pub const GUARANTEED_SEGMENT_BYTES: u64 = MIN_SEGMENTS * SEGMENT_BYTES as u64;

/// The most segments that a cache may keep when its index grows into their RAM. With fewer, writers that are as fast
/// as the disk would stop each time that the host's thread runs a moment late
/// (`docs/decisions/0015-disks-of-little-ram.md`).
const SEGMENTS_BESIDE_INDEX: u64 = 8;

/// The write cache of one volume. See the crate's documentation.
pub struct WriteCache {
    pub(crate) name: String,
    /// The index: where each block is.
    pub(crate) map: Map,
    pub(crate) segments: SegmentTable,
    pub(crate) log: Mutex<Log>,
    pub(crate) host: Arc<HostShared>,
    /// The pool of its segments' RAM: the host's, or its own in the memory file.
    pub(crate) pool: Arc<MemoryPool>,
    /// The memory that outlives the process.
    pub(crate) memory: Option<Arc<MemoryFile>>,
    /// Whether it was ended: then the contents of its memory file and its overflow are dropped with it.
    ended: AtomicBool,
    pub(crate) overflow: Option<Arc<Overflow>>,
    pub(crate) waiting: Waiting,
    pub(crate) cleaner: Cleaner,
    pub(crate) packed: PackedTable,
    pub(crate) persist: Option<Arc<Persist>>,
    pub(crate) counters: Counters,
    pub(crate) faults: FaultLog,
    /// Rate limit for warnings about missing space. Separate, because a failing disk may be the cause of
    /// missing space.
    pub(crate) shortages: FaultLog,
    pub(crate) throttle: Throttle,
    base: Option<Arc<dyn BaseImage>>,
    dedup_scan: DedupScan,
    ram_bytes: AtomicU64,
    /// Its part of the host's budget.
    pub(crate) share: Share,
    disk_bytes: AtomicU64,
    pub(crate) pause_limit: Duration,
    /// The size of the index that was last reported to the host's budget.
    reported_index: AtomicU64,
    /// Whether the last write to the overflow disk failed or found the disk full.
    pub(crate) disk_failed_or_full: AtomicBool,
}

impl WriteCache {
    /// Opens a cache: an empty one, or the persistent one as it was left.
    pub fn open(options: &CacheOptions, host: &Arc<HostShared>) -> Result<Arc<Self>, IoError> {
        let invalid = |why: String| IoError::new(IoErrorKind::Invalid, why);
        let blocks = check(options)?;
        let map = Map::new(blocks);
        let segments = SegmentTable::new(SegmentId::LIMIT);
        let mut log = Log::default();
        let mut persist = None;
        let overflow = match (&options.overflow, &options.persistent) {
            (None, None) => None,
            (None, Some(_)) => return Err(invalid("a persistent cache needs an overflow disk".into())),
            (Some(place), None) => Some(Overflow::open(place, Arc::clone(&host.engine))?),
            (Some(place), Some(how)) => {
                let into = (&map, &segments);
                let size = options.size_bytes;
                let opened = persist::open(place, how, size, &host.engine, into)?;
                log.restore(&opened.recovered.used);
                persist = Some(opened.persist);
                Some(opened.overflow)
            }
        };
        let cache =
            Self::of_parts(options, host, Parts { map, segments, log, persist, overflow, memory: None });
        if let Some(persist) = &cache.persist {
            persist.start(&cache)?;
        }
        host.register(&cache);
        Ok(cache)
    }

    /// Opens an empty cache whose memory is in `file`, a memfd or a file of a tmpfs. When this process has
    /// ended, in whatever way, another process can take it over with the descriptors of
    /// [`WriteCache::handover`] ([`WriteCache::recover`]). The file is emptied first.
    ///
    /// Dropping such a cache keeps its contents for the next process, unless [`WriteCache::end`] was called
    /// before.
    pub fn open_in(file: File, options: &CacheOptions, host: &Arc<HostShared>) -> Result<Arc<Self>, IoError> {
        let blocks = check(options)?;
        refuse_persistent(options)?;
        let (overflow, memory) = match &options.overflow {
            None => (None, MemoryFile::create(file, blocks, None)?),
            Some(place) => {
                let make = |key: &_| MemoryFile::create(file, blocks, Some(key));
                let (overflow, memory) = Overflow::open_surviving(place, Arc::clone(&host.engine), make)?;
                (Some(overflow), memory)
            }
        };
        let parts = Parts {
            map: Map::with_file(blocks, Some(Arc::clone(&memory))),
            segments: SegmentTable::with_file(SegmentId::LIMIT, Some(Arc::clone(&memory))),
            log: Log::default(),
            persist: None,
            overflow,
            memory: Some((Arc::clone(&memory), MemoryPool::in_file(memory))),
        };
        let cache = Self::of_parts(options, host, parts);
        host.register(&cache);
        Ok(cache)
    }

    /// The descriptors with which the next process can take over this cache. `None`: its memory is not in a
    /// file.
    pub fn handover(&self) -> std::io::Result<Option<Handover>> {
        let Some(memory) = &self.memory else { return Ok(None) };
        let (overflow, key) = match &self.overflow {
            None => (None, None),
            Some(overflow) => {
                let (file, key) = overflow.handover()?;
                (Some(file), key)
            }
        };
        Ok(Some(Handover { memory: memory.file().try_clone()?.into(), overflow, key }))
    }

    /// Lets the memory file and the overflow be emptied when the cache is dropped: no process takes it over.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    fn of_parts(options: &CacheOptions, host: &Arc<HostShared>, parts: Parts) -> Arc<Self> {
        let (memory, pool) = parts.memory.unzip();
        let cache = Arc::new(Self {
            name: options.name.clone(),
            map: parts.map,
            segments: parts.segments,
            log: Mutex::new(parts.log),
            host: Arc::clone(host),
            pool: pool.unwrap_or_else(|| Arc::clone(&host.pool)),
            memory,
            ended: AtomicBool::new(false),
            overflow: parts.overflow.map(Arc::new),
            waiting: Waiting::default(),
            cleaner: Cleaner::default(),
            packed: PackedTable::default(),
            persist: parts.persist,
            counters: Counters::default(),
            faults: FaultLog::new("write cache", WARNINGS_PER_10_S),
            shortages: FaultLog::new("write cache", WARNINGS_PER_10_S),
            throttle: Throttle::default(),
            base: options.base.clone(),
            dedup_scan: DedupScan::default(),
            ram_bytes: AtomicU64::new(options.ram_bytes),
            share: Share::new(options.weight),
            disk_bytes: AtomicU64::new(options.overflow.as_ref().map_or(0, |o| o.limit_bytes)),
            pause_limit: options.pause_limit,
            reported_index: AtomicU64::new(0),
            disk_failed_or_full: AtomicBool::new(false),
        });
        if cache.overflow.is_some() {
            host.budget.join_spilling();
        }
        cache
    }

    /// Logs a fault of this cache, at a limited rate.
    pub(crate) fn warn(&self, what: &dyn Display) {
        self.faults.warn(&format_args!("volume '{}'", self.name), what);
    }
}

/// The parts of a cache that are made first.
struct Parts {
    map: Map,
    segments: SegmentTable,
    log: Log,
    persist: Option<Arc<Persist>>,
    overflow: Option<Overflow>,
    memory: Option<(Arc<MemoryFile>, Arc<MemoryPool>)>,
}

/// Refuses options that no cache can have. Returns the number of the volume's blocks.
fn check(options: &CacheOptions) -> Result<u64, IoError> {
    limits::check_ram_bytes(options.ram_bytes)?;
    if let Some(place) = options.overflow.as_ref().filter(|it| it.little_space == LittleSpace::Refused) {
        limits::check_disk_bytes(place.limit_bytes)?;
    }
    if options.size_bytes > VOLUME_MAX_BYTES {
        let why = format!(
            "the volume has {} bytes; the maximum is {VOLUME_MAX_BYTES} (8 KiB less than 16 TiB)",
            options.size_bytes
        );
        return Err(IoError::new(IoErrorKind::Invalid, why));
    }
    Ok(options.size_bytes.div_ceil(u64::from(BLOCK_BYTES)))
}

/// A persistent cache is recovered from its disk, not from memory.
fn refuse_persistent(options: &CacheOptions) -> Result<(), IoError> {
    if options.persistent.is_none() {
        return Ok(());
    }
    let why = "a persistent write cache cannot have its memory in a file that outlives the process: it is recovered from its disk";
    Err(IoError::new(IoErrorKind::Invalid, why))
}

impl Drop for WriteCache {
    fn drop(&mut self) {
        if let Some(memory) = &self.memory {
            memory.hand_over();
        }
        // The disk threads keep the cache alive while a segment is being written, so nothing is in flight
        // here.
        if let Some(buffer) = self.cleaner.take_buffer() {
            self.host.give_staging(buffer);
        }
        let mut log = self.log.lock();
        let mut bytes = self.reported_index.load(Ordering::Relaxed) + self.packed.bytes();
        for number in 0..log.numbers_used() {
            let Some(segment) = self.segments.get(SegmentId(number)) else { continue };
            if let Some(memory) = segment.word().ram().and_then(crate::memory::MemoryPool::reclaim) {
                self.pool.give(memory);
                bytes += SEGMENT_BYTES as u64;
            }
        }
        log.ram_segments = 0;
        drop(log);
        if let Some(persist) = &self.persist {
            persist.stop();
            bytes += persist.buffer_bytes();
        }
        // The index is freed before the host is informed: the host's thread then returns the memory to the
        // system.
        self.map = Map::new(0);
        self.segments = SegmentTable::new(0);
        if self.ended.load(Ordering::Acquire)
            && let Some(memory) = &self.memory
        {
            memory.end();
            self.overflow.iter().for_each(|overflow| overflow.end());
        }
        self.host.give_ram(bytes);
        if self.overflow.is_some() {
            self.host.budget.leave_spilling();
        }
        self.host.signal();
    }
}
