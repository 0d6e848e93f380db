//! The write cache of one volume: the hit path.
//!
//! What a request needs ([`read`](WriteCache::read), [`write`](WriteCache::write), [`clear`](WriteCache::clear))
//! is done on the thread that took it, holding one leaf's lock and at most the log's lock inside it; no I/O,
//! and no allocation but a leaf's first table.
//!
//! | file | what |
//! |---|---|
//! | `options` | what a cache is made of |
//! | `answers` | the words between the cache and who uses it |
//! | `read`, `write` | the hit path |
//! | `part` | writes of parts of blocks |
//! | `together` | the hit path of several overwrites at once |
//! | `freeze` | the state at one instant, while the machine goes on |
//! | `dedup_scan` | blocks that turned out to hold what the image holds |
//! | `room` | slots and RAM: begun, given back |
//! | `limits` | what the cache may take, and takes |
//! | `statistics` | the counters |

mod answers;
mod dedup_scan;
mod freeze;
mod limits;
mod options;
mod part;
mod read;
mod space;
mod statistics;
mod together;
mod write;

use std::fmt::Display;
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
use crate::overflow::Overflow;
use crate::packed::PackedTable;
use crate::persist::{self, Persist};
use crate::segment::SegmentTable;
use crate::sync::Mutex;
use crate::throttle::Throttle;
use crate::units::{SEGMENT_BYTES, SegmentId};
use crate::write_queue::Waiting;

const BLOCK: usize = BLOCK_BYTES as usize;

/// Lines about a disk that fails or a block that is damaged, in ten seconds. A machine that reads such a block again and again
/// would else fill the log; the counters have them all.
const WARNINGS_PER_10_S: u32 = 20;

/// Segments that a cache may always have in RAM, however large its index grows and however short the host's RAM is: one to fill,
/// one on its way to the disk, one for cleaning, and one more.
const MIN_SEGMENTS: u64 = 4;

/// What those take: RAM that a cache may always have, beside its index.
pub const LEAST_RAM_BYTES: u64 = MIN_SEGMENTS * SEGMENT_BYTES as u64;

/// An index that grows leaves a cache so many segments, if it had them: with fewer, writers that are as fast as the disk stand still each
/// time that the host's thread comes a moment later (`docs/decisions/0015-disks-of-little-ram.md`).
const SEGMENTS_BESIDE_INDEX: u64 = 8;

/// The write cache of one volume. See the crate's documentation.
pub struct WriteCache {
    pub(crate) name: String,
    pub(crate) map: Map,
    pub(crate) segments: SegmentTable,
    pub(crate) log: Mutex<Log>,
    pub(crate) host: Arc<HostShared>,
    pub(crate) overflow: Option<Arc<Overflow>>,
    pub(crate) waiting: Waiting,
    pub(crate) cleaner: Cleaner,
    pub(crate) packed: PackedTable,
    pub(crate) persist: Option<Arc<Persist>>,
    pub(crate) counters: Counters,
    pub(crate) faults: FaultLog,
    /// Lines about room: apart, for a disk that fails is why there is none.
    pub(crate) shortages: FaultLog,
    pub(crate) throttle: Throttle,
    base: Option<Arc<dyn BaseImage>>,
    dedup_scan: DedupScan,
    ram_bytes: AtomicU64,
    /// Its part of the host's budget.
    pub(crate) share: Share,
    disk_bytes: AtomicU64,
    pub(crate) pause_limit: Duration,
    /// Index bytes that the host's budget knows of.
    reported_index: AtomicU64,
    /// The overflow disk failed or was full at the last try.
    pub(crate) disk_full: AtomicBool,
}

impl WriteCache {
    /// Opens a cache: an empty one, or a persistent one as it was left.
    pub fn open(options: &CacheOptions, host: &Arc<HostShared>) -> Result<Arc<Self>, IoError> {
        let invalid = |why: String| IoError::new(IoErrorKind::Invalid, why);
        limits::check_ram_bytes(options.ram_bytes)?;
        if let Some(place) = options.overflow.as_ref().filter(|it| it.little_space == LittleSpace::Refused) {
            limits::check_disk_bytes(place.limit_bytes)?;
        }
        let blocks = options.size_bytes.div_ceil(u64::from(BLOCK_BYTES));
        if options.size_bytes > VOLUME_MAX_BYTES {
            return Err(invalid(format!(
                "the volume has {} bytes; at most {VOLUME_MAX_BYTES} work (8 KiB less than 16 TiB)",
                options.size_bytes
            )));
        }
        let map = Map::new(blocks);
        let segments = SegmentTable::new(SegmentId::LIMIT);
        let mut log = Log::default();
        let mut persist = None;
        let overflow = match (&options.overflow, &options.persistent) {
            (None, None) => None,
            (None, Some(_)) => return Err(invalid("a persistent cache needs a disk to be on".into())),
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
        let overflow = overflow.map(Arc::new);
        let cache = Arc::new(Self {
            name: options.name.clone(),
            map,
            segments,
            log: Mutex::new(log),
            host: Arc::clone(host),
            overflow,
            waiting: Waiting::default(),
            cleaner: Cleaner::default(),
            packed: PackedTable::default(),
            persist,
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
            disk_full: AtomicBool::new(false),
        });
        if cache.overflow.is_some() {
            host.budget.join_spilling();
        }
        if let Some(persist) = &cache.persist {
            persist.start(&cache)?;
        }
        host.register(&cache);
        Ok(cache)
    }

    /// Has the log say what went wrong with this cache.
    pub(crate) fn warn(&self, what: &dyn Display) {
        self.faults.warn(&format_args!("volume '{}'", self.name), what);
    }
}

impl Drop for WriteCache {
    fn drop(&mut self) {
        // The disk threads hold the cache while a segment is on its way, so nothing is in flight here.
        if let Some(buffer) = self.cleaner.take_buffer() {
            self.host.give_staging(buffer);
        }
        let mut log = self.log.lock();
        let mut bytes = self.reported_index.load(Ordering::Relaxed) + self.packed.bytes();
        for number in 0..log.numbers_used() {
            let Some(segment) = self.segments.get(SegmentId(number)) else { continue };
            if let Some(memory) = segment.word().ram().and_then(crate::memory::MemoryPool::reclaim) {
                self.host.pool.give(memory);
                bytes += SEGMENT_BYTES as u64;
            }
        }
        log.ram_segments = 0;
        drop(log);
        if let Some(persist) = &self.persist {
            persist.stop();
            bytes += persist.buffer_bytes();
        }
        // The index goes before the host hears of it, and its thread returns the memory to the system.
        self.map = Map::new(0);
        self.segments = SegmentTable::new(0);
        self.host.give_ram(bytes);
        if self.overflow.is_some() {
            self.host.budget.leave_spilling();
        }
        self.host.signal();
    }
}
