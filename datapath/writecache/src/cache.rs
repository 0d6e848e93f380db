//! The write cache of one volume: the hit path.
//!
//! Everything in this file is done on the thread that took the request, holding one leaf's lock and at
//! most the log's lock inside it; no I/O, and no allocation but a leaf's first table.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use headwater_block::{BLOCK_BYTES, IoError, IoErrorKind};

use crate::budget::{Holding, Share};
use crate::clean::Cleaner;
use crate::counters::{Counters, Hot, Snapshot, count};
use crate::host::HostShared;
use crate::log::{Log, NewSlot, REFILL_LIVE, Released, Stream};
use crate::map::{Leaf, LeafWrite, Map, split};
use crate::memory::{copy_in, copy_out};
use crate::overflow::Overflow;
use crate::overflow::buffering::Buffering;
use crate::packed::PackedTable;
use crate::park::Waiting;
use crate::persist::{self, Persist, PersistentOptions};
use crate::segment::{RECORD_BYTES, Segment, SegmentTable, State};
use crate::spill::RESERVED_POSITIONS;
use crate::sync::Mutex;
use crate::units::{BlockNumber, Location, SEGMENT_BYTES, SLOTS, SegmentId, Slot};

const BLOCK: usize = BLOCK_BYTES as usize;

/// Segments that a cache may always have in RAM, however large its index grows: one to fill, one on its
/// way to the disk, one for cleaning, and one more.
const MIN_SEGMENTS: u64 = 4;

/// The least RAM that makes a cache: below it the fixed buffers would not fit.
pub const MIN_RAM_BYTES: u64 = 8 * SEGMENT_BYTES as u64;

/// Where a cache overflows to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverflowOptions {
    /// A directory, or a block device.
    pub at: PathBuf,
    /// Disk that the cache may use.
    pub limit_bytes: u64,
    /// Whether it goes past the page cache.
    pub buffering: Buffering,
}

/// What a cache is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Size of the volume.
    pub size_bytes: u64,
    /// RAM that the cache may use, index and buffers included; at least [`MIN_RAM_BYTES`].
    pub ram_bytes: u64,
    /// Its weight among the caches of the host while the host's limit is short; see [`crate::budget`].
    pub weight: u32,
    /// Where it overflows to; `None`: RAM only.
    pub overflow: Option<OverflowOptions>,
    /// How long a write waits for space before it is refused.
    pub pause_limit: Duration,
    /// Whether the cache survives; then it has an overflow in a directory. `None`: it is forgotten.
    pub persistent: Option<PersistentOptions>,
}

/// Which write goes first when space is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A new request: it queues behind those that wait for space.
    New,
    /// One of those that waited.
    Waited,
}

/// What [`WriteCache::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The bytes were copied (or zeroes filled in).
    Done,
    /// The block was not changed: read the image.
    Absent,
    /// The block is on the overflow disk.
    Spilled(Ticket),
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residence {
    /// In RAM.
    Ram,
    /// In RAM, packed.
    Packed,
    /// Nowhere: it is all zero.
    Zero,
    /// On the overflow disk only.
    Disk,
    /// Not in the cache: it is as in the image.
    Absent,
}

/// Where on the overflow disk a block was when it was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(crate) block: BlockNumber,
    pub(crate) id: SegmentId,
    pub(crate) slot: Slot,
    pub(crate) position: u32,
    pub(crate) generation: u64,
}

/// What a write did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrote {
    /// Stored.
    Done,
    /// There is no slot now: make room, or wait.
    NoRoom,
    /// Part of a block whose other part has to be fetched first.
    NeedOld(Old),
}

/// What is known of a block before a write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Now {
    /// It would be overwritten where it is.
    InPlace,
    /// It would take a new slot.
    Elsewhere,
}

/// What the cache holds of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing: the image has it.
    Absent,
    /// It reads as zeroes.
    Zero,
    /// Data.
    Data,
}

impl Kind {
    fn of(location: Location) -> Self {
        match location {
            Location::ABSENT => Kind::Absent,
            Location::ZERO => Kind::Zero,
            _ => Kind::Data,
        }
    }
}

/// Where the rest of a partly written block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Old {
    /// In the image.
    Absent,
    /// On the overflow disk.
    Spilled(Ticket),
}

/// The write cache of one volume. See the crate's documentation.
pub struct WriteCache {
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
        if options.ram_bytes < MIN_RAM_BYTES {
            return Err(invalid(format!(
                "a write cache needs at least {} of RAM, and {} were asked for",
                headwater_block::size::format(MIN_RAM_BYTES),
                headwater_block::size::format(options.ram_bytes),
            )));
        }
        let blocks = options.size_bytes.div_ceil(u64::from(BLOCK_BYTES));
        if blocks > u64::from(u32::MAX - 1) {
            return Err(invalid(format!("the volume has {} bytes; at most 16 TiB work", options.size_bytes)));
        }
        let map = Map::new(blocks);
        let segments = SegmentTable::new(SegmentId::LIMIT);
        let mut log = Log::default();
        let mut persist = None;
        let overflow = match (&options.overflow, &options.persistent) {
            (None, None) => None,
            (None, Some(_)) => return Err(invalid("a persistent cache needs a disk to be on".into())),
            (Some(place), None) => {
                let opened = Overflow::open(place, Arc::clone(&host.engine))
                    .map_err(|why| IoError::new(IoErrorKind::Device, why))?;
                Some(opened)
            }
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

    /// Copies `into.len()` bytes of a block, beginning `skip` bytes into it.
    #[inline]
    pub fn read(&self, block: BlockNumber, skip: usize, into: &mut [u8]) -> Found {
        let (leaf, index) = split(block);
        let Some(leaf) = self.map.read(leaf) else { return Found::Absent };
        let location = leaf.get(index);
        let Some((id, slot)) = location.place() else {
            if location == Location::ABSENT {
                return Found::Absent;
            }
            into.fill(0);
            self.counters.hot(Hot::ReadZero, 1);
            return Found::Done;
        };
        let Some(segment) = self.segments.get(id) else { return Found::Absent };
        let word = segment.word();
        if let Some(address) = word.ram() {
            segment.touch();
            copy_out(address, slot, skip, into, &leaf);
            self.counters.hot(Hot::ReadRam, 1);
            return Found::Done;
        }
        let mut whole = [0u8; BLOCK];
        if word.is_packed() && self.unpack(id, slot, &mut whole) {
            let Some(part) = whole.get(skip..skip.saturating_add(into.len())) else { return Found::Absent };
            into.copy_from_slice(part);
            self.counters.hot(Hot::ReadPacked, 1);
            return Found::Done;
        }
        Found::Spilled(self.ticket(block, id, slot))
    }

    /// Where a block is at this moment, for statistics: it may move in the next.
    pub fn residence(&self, block: BlockNumber) -> Residence {
        let (leaf, index) = split(block);
        let Some(leaf) = self.map.read(leaf) else { return Residence::Absent };
        let location = leaf.get(index);
        let Some((id, _)) = location.place() else {
            return if location == Location::ABSENT { Residence::Absent } else { Residence::Zero };
        };
        match self.segments.get(id).map(|segment| segment.word()) {
            Some(word) if word.ram().is_some() => Residence::Ram,
            Some(word) if word.is_packed() => Residence::Packed,
            Some(_) => Residence::Disk,
            None => Residence::Absent,
        }
    }

    fn unpack(&self, id: SegmentId, slot: Slot, into: &mut [u8; BLOCK]) -> bool {
        self.packed.get(id).is_some_and(|packed| packed.unpack(slot, into))
    }

    fn ticket(&self, block: BlockNumber, id: SegmentId, slot: Slot) -> Ticket {
        let segment = self.segments.get(id);
        Ticket {
            block,
            id,
            slot,
            position: segment.and_then(|s| s.position()).unwrap_or(u32::MAX),
            generation: segment.map_or(0, |s| s.generation()),
        }
    }

    /// Stores a whole block.
    #[inline]
    pub fn write(&self, block: BlockNumber, data: &[u8], turn: Turn) -> Wrote {
        self.write_unless(block, data, turn, |_| false)
    }

    /// Stores a whole block, unless the image holds the same: then the block becomes absent, takes no space,
    /// and what it took is free. `same` is told what the block is now, before anything is copied; it runs
    /// under the block's lock, and so must neither wait nor use the cache.
    #[inline]
    pub fn write_unless(
        &self,
        block: BlockNumber,
        data: &[u8],
        turn: Turn,
        same: impl FnOnce(Now) -> bool,
    ) -> Wrote {
        let _entered = self.enter();
        let (leaf, index) = split(block);
        let Some(mut leaf) = self.map.write(leaf) else { return Wrote::NoRoom };
        if is_zero(data) {
            if leaf.get(index) != Location::ZERO {
                self.note(block, 1, Location::ZERO);
            }
            self.replace(&mut leaf, index, Location::ZERO);
            // A disk that is zeroed from one end to the other must not fill the index.
            leaf.fold();
            self.counters.hot(Hot::ElidedZero, 1);
            return Wrote::Done;
        }
        let old = leaf.get(index);
        if let Some((id, slot)) = old.place()
            && let Some(segment) = self.segments.get(id)
            && let Some(address) = segment.writable(slot)
        {
            if same(Now::InPlace) {
                return self.elide(&mut leaf, index, block);
            }
            segment.touch();
            copy_in(address, slot, 0, data, &leaf);
            self.counters.hot(Hot::WriteInPlace, 1);
            return Wrote::Done;
        }
        if same(Now::Elsewhere) {
            return self.elide(&mut leaf, index, block);
        }
        self.store(&mut leaf, index, block, data, turn)
    }

    /// The image holds what is written: the block is as if it had never been changed.
    #[cold]
    fn elide(&self, leaf: &mut LeafWrite<'_>, index: usize, block: BlockNumber) -> Wrote {
        if leaf.get(index) != Location::ABSENT {
            self.note(block, 1, Location::ABSENT);
            self.replace(leaf, index, Location::ABSENT);
        }
        if index == SLOTS - 1 {
            // Where a whole leaf was written, its table goes too; looking at each block would cost too much.
            leaf.fold();
        }
        self.counters.hot(Hot::ElidedEqual, 1);
        Wrote::Done
    }

    /// Stores a part of a block.
    pub fn write_part(&self, block: BlockNumber, skip: usize, data: &[u8], turn: Turn) -> Wrote {
        let _entered = self.enter();
        let (leaf, index) = split(block);
        let Some(mut leaf) = self.map.write(leaf) else { return Wrote::NoRoom };
        let old = leaf.get(index);
        let mut whole = [0u8; BLOCK];
        if let Some((id, slot)) = old.place() {
            let Some(segment) = self.segments.get(id) else { return Wrote::NoRoom };
            let word = segment.word();
            if let Some(address) = segment.writable(slot) {
                segment.touch();
                copy_in(address, slot, skip, data, &leaf);
                self.counters.hot(Hot::WriteInPlace, 1);
                return Wrote::Done;
            }
            if let Some(address) = word.ram() {
                copy_out(address, slot, 0, &mut whole, &leaf);
            } else if !(word.is_packed() && self.unpack(id, slot, &mut whole)) {
                return Wrote::NeedOld(Old::Spilled(self.ticket(block, id, slot)));
            }
        } else if old == Location::ABSENT {
            return Wrote::NeedOld(Old::Absent);
        }
        self.overlay(&mut leaf, index, block, (whole, skip, data), turn)
    }

    /// Stores a part of a block whose other part was fetched. Where the block changed meanwhile, this is
    /// as [`WriteCache::write_part`], and may ask for the old contents again.
    pub fn merge(
        &self,
        block: BlockNumber,
        skip: usize,
        data: &[u8],
        fetched: (Old, &[u8]),
        turn: Turn,
    ) -> Wrote {
        {
            let _entered = self.enter();
            let (leaf, index) = split(block);
            let Some(mut leaf) = self.map.write(leaf) else { return Wrote::NoRoom };
            let same = match fetched.0 {
                Old::Absent => leaf.get(index) == Location::ABSENT,
                Old::Spilled(ticket) => self.holds(&ticket, leaf.get(index)),
            };
            let mut whole = [0u8; BLOCK];
            if same && fetched.1.len() == BLOCK {
                whole.copy_from_slice(fetched.1);
                return self.overlay(&mut leaf, index, block, (whole, skip, data), turn);
            }
        }
        self.write_part(block, skip, data, turn)
    }

    fn overlay(
        &self,
        leaf: &mut LeafWrite<'_>,
        index: usize,
        block: BlockNumber,
        (mut whole, skip, data): ([u8; BLOCK], usize, &[u8]),
        turn: Turn,
    ) -> Wrote {
        let Some(part) = whole.get_mut(skip..skip.saturating_add(data.len())) else { return Wrote::NoRoom };
        part.copy_from_slice(data);
        self.store(leaf, index, block, &whole, turn)
    }

    /// Whether the block is still where the ticket says.
    pub(crate) fn holds(&self, ticket: &Ticket, location: Location) -> bool {
        location == Location::at(ticket.id, ticket.slot)
            && self
                .segments
                .get(ticket.id)
                .is_some_and(|s| s.position() == Some(ticket.position) && s.generation() == ticket.generation)
    }

    /// Whether the block is still where the ticket says.
    pub fn is_current(&self, ticket: &Ticket) -> bool {
        let (leaf, index) = split(ticket.block);
        self.map.read(leaf).is_some_and(|leaf| self.holds(ticket, leaf.get(index)))
    }

    /// Makes the whole blocks `first..end` absent or zero.
    pub fn clear(&self, first: BlockNumber, end: BlockNumber, to: Location) {
        let mut block = first.0;
        let mut cleared = 0;
        while block < end.0 {
            let (leaf_number, start) = split(BlockNumber(block));
            let count = u32::try_from(SLOTS - start).unwrap_or(1).min(end.0 - block);
            block += count;
            if to == Location::ABSENT && self.map.group_is_untouched(leaf_number) {
                continue;
            }
            let _entered = self.enter();
            let Some(mut leaf) = self.map.write(leaf_number) else { break };
            let range = start..start + count as usize;
            if self.persist.is_some() && range.clone().any(|index| leaf.get(index) != to) {
                self.note(BlockNumber(block - count), count, to);
            }
            for index in range {
                if leaf.get(index) != to {
                    self.replace(&mut leaf, index, to);
                    cleared += 1;
                }
            }
            leaf.fold();
        }
        self.counters.hot(Hot::Discarded, cleared);
        if self.waiting.any() || self.host.pool.warm_bytes() > 0 {
            self.host.signal();
        }
    }

    /// What the block `first` holds, and how many blocks from there, below `end`, hold the same kind.
    pub fn run_at(&self, first: BlockNumber, end: BlockNumber) -> (Kind, u32) {
        let mut block = first.0;
        let mut found = None;
        while block < end.0 {
            let (leaf_number, start) = split(BlockNumber(block));
            let rest = u32::try_from(SLOTS - start).unwrap_or(1).min(end.0 - block);
            let leaf = self.map.read(leaf_number);
            let of = |index: usize| Kind::of(leaf.as_ref().map_or(Location::ABSENT, |l| l.get(index)));
            let kind = *found.get_or_insert_with(|| of(start));
            let same = match leaf.as_deref() {
                Some(Leaf::Table(_)) => {
                    (start..start + rest as usize).take_while(|index| of(*index) == kind).count()
                }
                _ if of(start) == kind => rest as usize,
                _ => 0,
            };
            let same = u32::try_from(same).unwrap_or(rest);
            block += same;
            if same < rest {
                break;
            }
        }
        (found.unwrap_or(Kind::Absent), block - first.0)
    }

    fn store(
        &self,
        leaf: &mut LeafWrite<'_>,
        index: usize,
        block: BlockNumber,
        data: &[u8],
        turn: Turn,
    ) -> Wrote {
        if turn == Turn::New && self.waiting.any() {
            return Wrote::NoRoom;
        }
        let Some(new) = self.take_slot(Stream::Fresh, block) else { return Wrote::NoRoom };
        copy_in(new.address, new.slot, 0, data, leaf);
        self.replace(leaf, index, Location::at(new.id, new.slot));
        self.note(block, 1, Location::at(new.id, new.slot));
        self.counters.hot(Hot::WriteNew, 1);
        Wrote::Done
    }

    /// Keeps an epoch of a persistent cache from ending while the map is changed.
    #[inline]
    pub(crate) fn enter(&self) -> Option<parking_lot::RwLockReadGuard<'_, ()>> {
        self.persist.as_ref().map(|persist| persist.enter())
    }

    /// Points a block somewhere else and gives its old slot back.
    pub(crate) fn replace(&self, leaf: &mut LeafWrite<'_>, index: usize, to: Location) {
        let old = leaf.get(index);
        leaf.set(index, to);
        let Some((id, slot)) = old.place() else { return };
        let Some(segment) = self.segments.get(id) else { return };
        let live = segment.kill(slot);
        if live == 0 {
            self.release(segment, id);
        } else if live == REFILL_LIVE && segment.word().state() == State::Dirty {
            self.log.lock().has_room(id);
            if self.waiting.any() {
                self.host.signal();
            }
        }
    }

    /// Frees a segment whose last block has gone.
    pub(crate) fn release(&self, segment: &Segment, id: SegmentId) {
        let mut log = self.log.lock();
        let released = log.release(segment, id);
        if released.as_ref().is_some_and(|r| r.packed) {
            // Before the number can be used again.
            self.host.give_ram(self.packed.remove(id));
        }
        drop(log);
        self.take_back(released);
    }

    pub(crate) fn take_back(&self, released: Option<Released>) {
        let Some(released) = released else { return };
        if let (Some(position), Some(overflow)) = (released.position, &self.overflow) {
            match &self.persist {
                Some(persist) => persist.freed(position),
                None => overflow.give_position(position),
            }
        }
        if let Some(memory) = released.memory {
            self.host.pool.give(memory);
            self.host.give_ram(SEGMENT_BYTES as u64);
        }
        self.host.signal();
    }

    /// A slot for a block, in the segment being filled or a new one.
    pub(crate) fn take_slot(&self, stream: Stream, block: BlockNumber) -> Option<NewSlot> {
        let mut log = self.log.lock();
        if let Some(new) = log.claim(&self.segments, stream, block) {
            return Some(new);
        }
        let fresh = stream == Stream::Fresh;
        let opened = (fresh && log.refill(&self.segments, stream))
            || self.begin_segment(&mut log, stream)
            || (fresh && self.cannot_spill() && log.refill_emptiest(&self.segments));
        if !opened {
            // No signal here: who finds no room parks, which signals. One from the host's thread itself,
            // trying parked writes in vain, would keep it going round until the disk is done.
            return None;
        }
        if log.dirty_segments > self.dirty_limit() || log.has_dirty_cleaned() {
            self.host.signal();
        }
        log.claim(&self.segments, stream, block)
    }

    /// Whether no dirty segment can go to a disk now.
    pub(crate) fn cannot_spill(&self) -> bool {
        self.overflow.as_ref().is_none_or(|o| o.free_positions() <= RESERVED_POSITIONS)
    }

    fn begin_segment(&self, log: &mut Log, stream: Stream) -> bool {
        let (Some(persist), Some(overflow)) = (&self.persist, &self.overflow) else {
            return self.begin_in_ram(log, stream);
        };
        let keep = if stream == Stream::Fresh { RESERVED_POSITIONS } else { 0 };
        let reserved = persist.reserve(overflow, keep);
        if overflow.ready_positions() <= persist::READY_POSITIONS / 2 {
            self.host.signal();
        }
        let Some(reserved) = reserved else { return false };
        if !self.begin_in_ram(log, stream) {
            overflow.give_position(reserved.position);
            return false;
        }
        if let Some(segment) = log.filling(stream).and_then(|id| self.segments.get(id)) {
            segment.set_position(Some(reserved.position));
            segment.set_generation(reserved.generation);
        }
        true
    }

    fn begin_in_ram(&self, log: &mut Log, stream: Stream) -> bool {
        self.report_index(log);
        // What cleaning fills makes room for more than it takes, so it is not bound by limits that may have
        // been lowered under what is in use: one segment at a time.
        let cleaning = stream == Stream::Cleaned && !log.has_dirty_cleaned();
        let reserve = u32::from(self.overflow.is_some());
        if !cleaning && log.ram_segments.saturating_add(reserve) >= self.allowed_segments(log) {
            if self.share.bytes() < self.ram_bytes.load(Ordering::Relaxed) {
                self.ask_for_more();
            }
            return false;
        }
        // The segments without which nothing moves are taken even where the host's budget is used up.
        let bytes = SEGMENT_BYTES as u64;
        if !self.host.take_ram(bytes) {
            self.ask_for_more();
            if !cleaning && u64::from(log.ram_segments) >= MIN_SEGMENTS {
                return false;
            }
            self.host.add_ram(bytes);
        }
        let Some(memory) = self.host.pool.take() else {
            self.host.give_ram(bytes);
            return false;
        };
        match log.begin(&self.segments, stream, memory) {
            Ok(()) => {
                if log.ram_segments == 1 {
                    // From now on the host's thread looks for memory pressure.
                    self.host.signal();
                }
                true
            }
            Err(memory) => {
                self.host.pool.give(memory);
                self.host.give_ram(bytes);
                false
            }
        }
    }

    /// The host's limit keeps this cache from what its own would allow.
    fn ask_for_more(&self) {
        self.share.ask();
        if self.host.budget.refused() {
            self.host.signal();
        }
    }

    /// RAM that the cache may use now: its own limit, or its share of the host's where that is less.
    fn ram_limit_bytes(&self) -> u64 {
        self.ram_bytes.load(Ordering::Relaxed).min(self.share.bytes())
    }

    /// Its part of the host's staging buffers.
    fn staging_bytes(&self) -> u64 {
        if self.overflow.is_some() { self.host.budget.staging_part_bytes() } else { 0 }
    }

    /// What the host's thread needs to know to divide the budget.
    pub(crate) fn holding(&self) -> Holding {
        let (segments, index_bytes) = {
            let log = self.log.lock();
            (u64::from(log.ram_segments), self.index_bytes(&log))
        };
        let fixed = index_bytes + self.staging_bytes();
        let hits = [Hot::ReadRam, Hot::ReadPacked, Hot::WriteInPlace, Hot::WriteNew];
        Holding {
            max_bytes: self.ram_bytes.load(Ordering::Relaxed),
            least_bytes: fixed + MIN_SEGMENTS * SEGMENT_BYTES as u64,
            used_bytes: fixed + self.packed.bytes() + segments * SEGMENT_BYTES as u64,
            hits: hits.into_iter().map(|which| self.counters.total(which)).sum(),
        }
    }

    fn index_bytes(&self, log: &Log) -> u64 {
        self.map.table_bytes() + u64::from(log.numbers_used()) * RECORD_BYTES
    }

    fn report_index(&self, log: &Log) {
        let now = self.index_bytes(log);
        let before = self.reported_index.swap(now, Ordering::Relaxed);
        if now >= before {
            self.host.add_ram(now - before);
        } else {
            self.host.give_ram(before - now);
        }
    }

    /// How many segments may be in RAM.
    pub(crate) fn allowed_segments(&self, log: &Log) -> u32 {
        let fixed = self.index_bytes(log) + self.packed.bytes() + self.staging_bytes();
        let left = self.ram_limit_bytes().saturating_sub(fixed) / SEGMENT_BYTES as u64;
        u32::try_from(left.max(MIN_SEGMENTS)).unwrap_or(u32::MAX)
    }

    /// Above this many dirty segments, cold ones are packed or written out.
    pub(crate) fn dirty_limit(&self) -> u32 {
        let allowed = self.ram_limit_bytes() / SEGMENT_BYTES as u64;
        let index = self.map.table_bytes() * 2;
        let taken = (index + self.packed.bytes() + self.staging_bytes()).div_ceil(SEGMENT_BYTES as u64);
        let left = |reserve: u64| allowed.saturating_sub(taken + reserve).max(MIN_SEGMENTS);
        let limit = match self.overflow {
            Some(_) => left(1) * 7 / 10,
            None => left(1).saturating_sub(2),
        };
        u32::try_from(limit).unwrap_or(u32::MAX)
    }

    /// Packed segments may take so much of the RAM.
    pub(crate) fn packed_limit_bytes(&self) -> u64 {
        let ram = self.ram_limit_bytes();
        match self.overflow {
            Some(_) => {
                let segments = MIN_SEGMENTS * SEGMENT_BYTES as u64;
                let others = self.map.table_bytes() * 2 + self.staging_bytes() + segments;
                (ram / 2).min(ram.saturating_sub(others))
            }
            None => ram.saturating_sub((MIN_SEGMENTS + 1) * SEGMENT_BYTES as u64),
        }
    }

    /// Frees RAM without I/O, by dropping the coldest clean copy. Whether there was one. To be called
    /// without any leaf's lock.
    pub fn make_room(&self) -> bool {
        let victim = self.log.lock().evict_victim(&self.segments);
        let Some((id, memory)) = victim else { return false };
        self.forget_ram(id, memory);
        count(&self.counters.evicted_segments, 1);
        true
    }

    /// After the RAM address was taken out of a segment's word: waits for those who still copy from there.
    pub(crate) fn forget_ram(&self, id: SegmentId, memory: crate::memory::SegmentMemory) {
        if let Some(segment) = self.segments.get(id) {
            self.map.sweep(segment.live_slots().map(|(_, block)| block));
        }
        self.host.pool.give(memory);
        self.host.give_ram(SEGMENT_BYTES as u64);
        // Another cache of the host may wait for it.
        self.host.signal_if_waiting();
    }

    /// Changes the RAM limit; takes effect at once.
    pub fn set_ram_bytes(&self, ram_bytes: u64) {
        self.ram_bytes.store(ram_bytes.max(MIN_RAM_BYTES), Ordering::Relaxed);
        self.not_full();
        self.host.signal();
    }

    /// Changes the weight among the caches of the host.
    pub fn set_weight(&self, weight: u32) {
        self.share.set_weight(weight);
        self.host.budget.refused();
        self.host.signal();
    }

    /// Changes the disk limit; takes effect at once.
    pub fn set_disk_bytes(&self, disk_bytes: u64) {
        self.disk_bytes.store(disk_bytes, Ordering::Relaxed);
        if let Some(overflow) = &self.overflow {
            overflow.set_limit_bytes(disk_bytes);
        }
        self.not_full();
        self.host.signal();
    }

    /// The counters at this moment.
    pub fn snapshot(&self) -> Snapshot {
        let (segments, index_bytes) = {
            let log = self.log.lock();
            (u64::from(log.ram_segments), self.index_bytes(&log))
        };
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counters;
        Snapshot {
            ram_target_bytes: load(&self.ram_bytes),
            ram_share_bytes: self.ram_limit_bytes(),
            host_limit_bytes: self.host.budget.limit_bytes(),
            pressure_shrinks: self.host.pressure_shrinks(),
            ram_used_bytes: segments * SEGMENT_BYTES as u64 + index_bytes + self.packed.bytes(),
            packed_bytes: self.packed.bytes(),
            index_bytes,
            disk_limit_bytes: load(&self.disk_bytes),
            buffering: self.overflow.as_ref().map_or_else(String::new, |o| o.buffering().to_owned()),
            disk_used_bytes: self.overflow.as_ref().map_or(0, |o| o.used_bytes()),
            read_ram_blocks: c.total(Hot::ReadRam),
            read_packed_blocks: c.total(Hot::ReadPacked),
            read_zero_blocks: c.total(Hot::ReadZero),
            read_disk_blocks: load(&c.read_disk_blocks),
            write_in_place_blocks: c.total(Hot::WriteInPlace),
            write_new_blocks: c.total(Hot::WriteNew),
            elided_zero_blocks: c.total(Hot::ElidedZero),
            elided_equal_blocks: c.total(Hot::ElidedEqual),
            discarded_blocks: c.total(Hot::Discarded),
            packed_segments: load(&c.packed_segments),
            packed_blocks: load(&c.packed_blocks),
            spilled_segments: load(&c.spilled_segments),
            spilled_blocks: load(&c.spilled_blocks),
            spilled_bytes: load(&c.spilled_bytes),
            cleaned_segments: load(&c.cleaned_segments),
            cleaned_blocks: load(&c.cleaned_blocks),
            evicted_segments: load(&c.evicted_segments),
            paused_writes: load(&c.paused_writes),
            paused_ns: load(&c.paused_ns),
            refused_writes: load(&c.refused_writes),
            disk_errors: load(&c.disk_errors),
            corrupt_blocks: load(&c.corrupt_blocks),
            commits: self.persist.as_ref().map_or(0, |persist| persist.commits()),
        }
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
        if let Some(persist) = &self.persist {
            persist.stop();
            bytes += persist.buffer_bytes();
        }
        self.host.give_ram(bytes);
        if self.overflow.is_some() {
            self.host.budget.leave_spilling();
        }
        self.host.signal();
    }
}

/// Whether all bytes are zero. Data that is not zero shows it in its first words, nearly always.
fn is_zero(data: &[u8]) -> bool {
    let (head, rest) = data.split_at(data.len().min(64));
    head.iter().all(|b| *b == 0) && rest.chunks(256).all(|c| c.iter().fold(0, |sum, b| sum | b) == 0)
}

#[cfg(test)]
mod tests {
    use super::is_zero;

    #[test]
    fn zero_blocks_are_recognised() {
        let mut block = vec![0u8; 4096];
        assert!(is_zero(&block));
        for at in [0, 63, 64, 255, 256, 4095] {
            block[at] = 1;
            assert!(!is_zero(&block), "byte {at}");
            block[at] = 0;
        }
    }
}
