//! Spilling: cold dirty segments go to the overflow disk, early, and stay in RAM as clean copies.
//!
//! ```text
//!  Dirty --freeze, sweep--> Frozen --seal into a staging buffer, write--> Clean --evict, sweep--> Spilled
//! ```
//! A packed segment goes `Packed -> PackedFrozen -> Spilled`, without a copy that stays. All but the end of a write happens on the host's thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use headwater_block::BLOCK_BYTES;

use crate::cache::WriteCache;
use crate::counters::count;
use crate::log::Log;
use crate::memory::{AlignedBuffer, with_frozen};
use crate::overflow::encrypt::{ENCRYPTED_SEGMENT_BYTES, ENCRYPTED_SLOT_BYTES};
use crate::overflow::{NoPosition, Overflow};
use crate::packed::{Dead, Packed, Packing};
use crate::panic_guard::UnlessAnswered;
use crate::persist::{Persist, READY_POSITIONS};
use crate::segment::Segment;
use crate::sync::UNDER_MODEL_CHECKER;
use crate::throttle::Room;
use crate::units::{SEGMENT_BYTES, SegmentId};

/// Positions that only cleaning may use: what it writes frees more than it takes.
pub const RESERVED_POSITIONS: u32 = 2;

/// Nothing more is packed in a turn of the host's thread that began so long ago.
pub(crate) const PACKING_TURN: Duration = Duration::from_millis(5);

fn is_lack_of_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Whether a turn of the host's thread that began then packs no more.
fn took_long(began: Instant) -> bool {
    // Time stands still where schedules are explored.
    !UNDER_MODEL_CHECKER && began.elapsed() >= PACKING_TURN
}

/// What a turn of the host's thread left behind.
#[derive(Debug, Default)]
pub struct TurnResult {
    /// When a waiting write is to be refused.
    pub deadline: Option<Instant>,
    /// The disk failed: try again after a while.
    pub disk_failed: bool,
}

/// How far starting to write cold segments came, or to clean one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// All that can be moved is on its way.
    All,
    /// The caches of the host have all staging buffers in use: one that comes back is a turn of its own.
    LacksBuffer,
    /// The disk took nothing, or is to be asked again after a while.
    DiskRests,
}

impl WriteCache {
    /// Does what there is to do for this cache, as far as it goes without waiting for the disk.
    pub(crate) fn work(self: &Arc<Self>, now: Instant) -> TurnResult {
        // Before what takes long, and after it.
        let _ = self.serve_throttled(now);
        let mut turned = self.turn(now);
        if self.throttle.is_on() {
            self.throttle.look(self.room(&self.log.lock()));
        }
        turned.deadline = turned.deadline.into_iter().chain(self.serve_throttled(Instant::now())).min();
        // Tables come and go without a segment, too.
        self.report_index(&self.log.lock());
        turned
    }

    fn turn(self: &Arc<Self>, now: Instant) -> TurnResult {
        if let (Some(persist), Some(overflow)) = (&self.persist, &self.overflow) {
            return self.work_persistent(now, persist, overflow);
        }
        self.serve_waiting(now, false);
        let (mut disk_failed, mut lacks_buffer) = (false, false);
        if let Some(overflow) = &self.overflow {
            self.move_cleaned(overflow);
        }
        // The ladder: pack what gets smaller, then spill, then clean. A writer that waits is better served
        // by the disk, which is faster, where that takes anything.
        let mut more_to_pack = false;
        if !self.waiting.any() || self.cannot_spill() {
            more_to_pack = self.pack_cold(now) || self.shrink_further(now);
        }
        if let Some(overflow) = &self.overflow {
            let begun = [self.destage(overflow, more_to_pack), self.clean(overflow)];
            lacks_buffer = begun.contains(&Begun::LacksBuffer);
            disk_failed = begun.contains(&Begun::DiskRests);
        }
        self.shrink();
        // Room may have come up meanwhile.
        let nothing_moves = self.log.lock().frozen_segments == 0 && !self.cleaner.is_busy();
        let hopeless = nothing_moves && !more_to_pack && !lacks_buffer;
        let deadline = self.serve_waiting(now, hopeless);
        self.look_for_room();
        if more_to_pack {
            self.host.signal();
        }
        TurnResult { deadline, disk_failed }
    }

    /// As [`WriteCache::work`] for a persistent cache, whose own thread does the writing: nothing is packed,
    /// and positions come back with commits.
    fn work_persistent(
        self: &Arc<Self>,
        now: Instant,
        persist: &Persist,
        overflow: &Arc<Overflow>,
    ) -> TurnResult {
        let emptied = self.log.lock().take_emptied();
        for id in emptied {
            if let Some(segment) = self.segments.get(id) {
                self.release(segment, id);
            }
        }
        let Some(refused) = persist.while_open(|| self.claim_ahead(persist, overflow)) else {
            // Nothing is written any more, and nothing waits.
            self.move_cleaned(overflow);
            self.shrink();
            return TurnResult::default();
        };
        // Where it is broken, nothing is committed any more: spilling goes on, and what cleaning frees would not come back.
        let is_broken = persist.is_broken();
        let mut disk_failed = refused || overflow.is_resting() || (persist.disk_fails() && !is_broken);
        self.serve_waiting(now, false);
        self.move_cleaned(overflow);
        let cleaning = if is_broken { Begun::All } else { self.clean(overflow) };
        disk_failed |= cleaning == Begun::DiskRests;
        if !overflow.is_resting() {
            persist.ask_spill(self.wants_spill());
            let short = overflow.free_positions() <= 2 * RESERVED_POSITIONS;
            persist.ask_for_room(short || disk_failed || self.waiting.any());
        }
        self.shrink();
        let nothing_moves =
            self.log.lock().frozen_segments == 0 && !self.cleaner.is_busy() && !persist.brings_room();
        let hopeless = nothing_moves && cleaning != Begun::LacksBuffer;
        let deadline = self.serve_waiting(now, hopeless);
        self.look_for_room();
        TurnResult { deadline, disk_failed }
    }

    /// Claims space for the segments to be begun next, and for the map. Whether the disk refused.
    fn claim_ahead(&self, persist: &Persist, overflow: &Overflow) -> bool {
        let refused = match overflow.prepare(READY_POSITIONS) {
            Ok(()) => {
                self.disk_full.store(false, Ordering::Relaxed);
                false
            }
            Err(why) => self.no_position(why),
        };
        !self.claim_map(persist, overflow) || refused
    }

    /// Claims space for the map of a persistent cache, if need be at the cost of a place for data. Whether it has enough.
    fn claim_map(&self, persist: &Persist, overflow: &Overflow) -> bool {
        while let Err(error) = persist.claim_map() {
            if persist.has_map_room() {
                break;
            }
            if is_lack_of_space(&error) && overflow.punch_one(RESERVED_POSITIONS) {
                continue;
            }
            tracing::debug!(%error, "there is no space for the map of a persistent cache");
            // What is noted is committed while it fits; not at once again where that has just failed.
            if !overflow.is_resting() {
                persist.ask_for_commit();
            }
            break;
        }
        persist.has_map_room()
    }

    /// Gives RAM back after the limit was lowered.
    fn shrink(&self) {
        loop {
            let log = self.log.lock();
            let over = log.ram_segments > self.allowed_segments(&log);
            drop(log);
            if !over || !self.evict_one() {
                return;
            }
        }
    }

    pub(crate) fn wants_spill(&self) -> bool {
        let waits = self.waiting.any();
        // What is dead in RAM keeps its place until cleaning finds it on disk.
        let waits_for_place = waits && self.lacks_place() && !self.places_come_back();
        let mut log = self.log.lock();
        log.has_dirty_cleaned(&self.segments)
            || log.dirty_segments > self.dirty_limit(&log)
            || self.packed.bytes() > self.packed_limit_bytes(&log)
            || (waits && log.dirty_segments > 0 && (log.clean_segments == 0 || waits_for_place))
    }

    // Where nothing is to be tried, no memory is taken for it either: giving that back would wake this thread again and again.
    fn wants_pack(&self) -> bool {
        let log = self.log.lock();
        log.has_untried()
            && log.dirty_segments > self.dirty_limit(&log)
            && self.packed.bytes() < self.packed_limit_bytes(&log)
    }

    /// Gives back what dead slots of packed segments take, until so many bytes are enough. How many it gave back.
    fn shrink_packed(&self, dead: Dead, is_enough: impl Fn(u64) -> bool) -> u64 {
        let records = |id| self.segments.get(id);
        let freed = self.packed.shrink(dead, (records, self.memory.as_ref()), is_enough);
        self.host.give_ram(freed);
        freed
    }

    /// The same of those that lost a few slots, for a write that waits where packing brought no room. Each costs a copy of nearly all of
    /// it for little, so no more of them in a turn than make room for a segment, or than there is time for. Whether it gave something
    /// back: then a later turn may give more.
    fn shrink_further(&self, now: Instant) -> bool {
        if !self.waiting.any() || !self.cannot_spill() || self.would_find_room() {
            return false;
        }
        let is_enough = |freed: u64| freed >= SEGMENT_BYTES as u64 || (freed > 0 && took_long(now));
        self.shrink_packed(Dead::Few, is_enough) > 0
    }

    /// Packs cold segments, while that pays and there is room for packed ones. Whether there is more to do, in a
    /// later turn: one segment takes some milliseconds, in which writers and other caches wait. `now`: when this turn began.
    fn pack_cold(&self, now: Instant) -> bool {
        if self.packed_is_full() || (self.packed.bytes() > 0 && self.waiting.any()) {
            // Dead slots of packed segments first: that costs a copy of what is alive, and no I/O.
            self.shrink_packed(Dead::Quarter, |_| false);
        }
        let packing = if self.cannot_spill() { Packing::Alone } else { Packing::BesideADisk };
        if packing == Packing::Alone {
            self.log.lock().reconsider_unpackable(&self.segments);
        }
        if !self.wants_pack() {
            return false;
        }
        let Some(mut scratch) = self.host.scratch() else { return false };
        let mut tried = 0;
        let mut packer = self.host.packer.lock();
        while self.wants_pack() {
            if tried > 0 && packing == Packing::BesideADisk && self.waiting.any() {
                return false;
            }
            if tried > 0 && (packing == Packing::Alone || self.packed_for_long(now)) {
                return true;
            }
            tried += 1;
            let victim = self.log.lock().freeze_coldest(&self.segments);
            let Some((id, segment)) = victim.and_then(|id| Some((id, self.segments.get(id)?))) else {
                return false;
            };
            self.map.sweep(segment.live_slots().map(|(_, block)| block));
            self.scan_segment(segment, id);
            let address = segment.word().ram().unwrap_or(0);
            let into = (scratch.bytes(), self.memory.as_ref());
            let packed = packer.pack(segment, address, packing, into);
            match packed {
                Some(packed) => self.swap_for_packed(id, segment, packed),
                None => {
                    segment.set_unpackable(true);
                    let released = {
                        let mut log = self.log.lock();
                        log.weakly_tried |= packing == Packing::BesideADisk;
                        log.thaw(segment, id, false)
                    };
                    self.take_back(released);
                }
            }
        }
        false
    }

    /// Whether other caches are to have a turn: a write of one waits, for which only this thread does something, or may before long.
    fn packed_for_long(&self, now: Instant) -> bool {
        took_long(now)
            || self.host.waiting_writes.load(Ordering::Acquire) != 0
            || self.host.throttled_writes.load(Ordering::Acquire) != 0
    }

    fn swap_for_packed(&self, id: SegmentId, segment: &Segment, packed: Packed) {
        count(&self.counters.packed_segments, 1);
        count(&self.counters.packed_blocks, u64::from(segment.live()));
        self.host.add_ram(packed.bytes());
        segment.set_packed(packed.offset());
        self.packed.insert(id, packed);
        let memory = self.log.lock().pack(segment, id);
        if let Some(memory) = memory {
            self.forget_ram(id, memory);
        }
        if segment.live() == 0 {
            self.release(segment, id);
        }
    }

    /// Starts writes of cold segments. With `more_to_pack` not of those that may be packed instead in a later turn, unless writes wait.
    fn destage(self: &Arc<Self>, overflow: &Arc<Overflow>, more_to_pack: bool) -> Begun {
        while self.wants_spill() {
            // Looked at each time: a write that was started here may have failed by now.
            if overflow.is_resting() {
                return Begun::DiskRests;
            }
            let lacks_space = self.lacks_space(overflow);
            let keeps_others = more_to_pack && !self.waiting.any() && !self.cannot_spill();
            let mut cleaned_only =
                keeps_others || lacks_space || overflow.free_positions() <= RESERVED_POSITIONS;
            let has_cleaned = self.log.lock().has_dirty_cleaned(&self.segments);
            if cleaned_only && !has_cleaned {
                return if lacks_space { Begun::DiskRests } else { Begun::All };
            }
            let Some(buffer) = self.host.take_staging() else { return Begun::LacksBuffer };
            let taken = overflow.take_position().or_else(|why| {
                if !has_cleaned {
                    return Err(why);
                }
                // What was cleaned gave more back than it takes now.
                cleaned_only = true;
                overflow.take_beyond(why)
            });
            let position = match taken {
                Ok(position) => position,
                Err(why) => {
                    self.host.give_staging(buffer);
                    return if self.no_position(why) { Begun::DiskRests } else { Begun::All };
                }
            };
            self.disk_full.store(false, Ordering::Relaxed);
            let packed = !cleaned_only && self.packed_is_full();
            let victim = {
                let mut log = self.log.lock();
                let oldest = if packed { log.freeze_packed(&self.segments) } else { None };
                oldest.or_else(|| log.freeze_victim(&self.segments, cleaned_only))
            };
            match victim.and_then(|id| Some((id, self.segments.get(id)?))) {
                Some((id, segment)) => self.write_out(overflow, id, segment, position, buffer),
                None => {
                    overflow.give_position(position);
                    self.host.give_staging(buffer);
                    return Begun::All;
                }
            }
        }
        Begun::All
    }

    /// Whether the file system gives no more, and what is claimed is only enough to go on cleaning. Asks it again.
    fn lacks_space(&self, overflow: &Overflow) -> bool {
        if !overflow.lacks_space(RESERVED_POSITIONS) {
            return false;
        }
        match overflow.prepare(RESERVED_POSITIONS as usize + 1) {
            Ok(()) => overflow.lacks_space(RESERVED_POSITIONS),
            Err(why) => {
                self.no_position(why);
                true
            }
        }
    }

    fn no_position(&self, why: NoPosition) -> bool {
        let NoPosition::Disk(error) = why else { return false };
        count(&self.counters.disk_errors, 1);
        if !self.disk_full.swap(true, Ordering::Relaxed) {
            self.warn(&format_args!(
                "the overflow disk gives no more space: {error}; cleaning, then writers wait"
            ));
        }
        true
    }

    fn write_out(
        self: &Arc<Self>,
        overflow: &Arc<Overflow>,
        id: SegmentId,
        segment: &Segment,
        position: u32,
        mut buffer: AlignedBuffer,
    ) {
        self.throttle.writes();
        let this = Arc::clone(self);
        let otherwise = UnlessAnswered::new(move || {
            this.written(id, position, 0, Err(io::Error::other("its write was given up")), None);
        });
        // Those who saw the segment as writable have left once each of its leaves was locked again.
        self.map.sweep(segment.live_slots().map(|(_, block)| block));
        self.scan_segment(segment, id);
        if segment.live() == 0 && segment.word().ram().is_some() {
            otherwise.answered();
            self.throttle.wrote_nothing();
            overflow.give_position(position);
            self.host.give_staging(buffer);
            let released = self.log.lock().thaw(segment, id, false);
            return self.take_back(released);
        }
        let generation = overflow.next_generation();
        segment.set_generation(generation);
        segment.set_position(Some(position));
        let ram = segment.word().ram();
        let packed = if ram.is_none() { self.packed.get(id) } else { None };
        let mut blocks = 0;
        for (slot, _) in segment.live_slots() {
            let start = usize::from(slot.0) * ENCRYPTED_SLOT_BYTES;
            let Some(encrypted) = buffer.get_mut(start..start + ENCRYPTED_SLOT_BYTES) else { continue };
            let done = if let Some(address) = ram {
                with_frozen(address, slot, |plain| overflow.encrypt(generation, slot, plain, encrypted))
            } else {
                let mut plain = [0; BLOCK_BYTES as usize];
                packed.as_ref().is_some_and(|packed| packed.unpack(slot, &mut plain))
                    && overflow.encrypt(generation, slot, &plain, encrypted)
            };
            if !done {
                self.faults.error(&"memory", &"a block could not be unpacked or sealed");
                encrypted.fill(0);
            }
            blocks += 1;
        }
        let this = Arc::clone(self);
        overflow.write_segment(position, buffer, move |result, buffer| {
            otherwise.answered();
            this.written(id, position, blocks, result, Some(buffer));
        });
    }

    /// The end of a write, on a disk thread.
    fn written(
        &self,
        id: SegmentId,
        position: u32,
        blocks: u64,
        result: io::Result<()>,
        buffer: Option<AlignedBuffer>,
    ) {
        match buffer {
            Some(buffer) => self.host.give_staging(buffer),
            None => self.host.lost_staging(),
        }
        let (Some(segment), Some(overflow)) = (self.segments.get(id), &self.overflow) else { return };
        match &result {
            Ok(()) => {
                count(&self.counters.spilled_segments, 1);
                count(&self.counters.spilled_blocks, blocks);
                count(&self.counters.spilled_bytes, ENCRYPTED_SEGMENT_BYTES as u64);
            }
            Err(error) => {
                count(&self.counters.disk_errors, 1);
                self.warn(&format_args!(
                    "a segment could not be written to position {position} of the overflow disk: {error}; it stays in RAM"
                ));
                self.disk_full.store(true, Ordering::Relaxed);
                overflow.failed();
            }
        }
        if segment.word().is_packed() {
            let mut log = self.log.lock();
            log.thaw_packed(segment, id, result.is_ok());
            if result.is_ok() {
                // Before the number can be used again.
                self.host.give_ram(self.packed.remove(id));
            }
            drop(log);
            if segment.live() == 0 {
                self.release(segment, id);
            }
        } else {
            let released = self.log.lock().thaw(segment, id, result.is_ok());
            self.take_back(released);
        }
        if result.is_err() {
            // Only now: of two records with one position, the next process would not know which one has it.
            overflow.give_position_last(position);
        }
        self.cleaner.unstick();
        let room = self.room(&self.log.lock());
        self.throttle.written(result.is_ok(), room, &self.host.spinner);
        self.host.signal();
    }

    /// A segment of a persistent cache, which packs nothing, has been written out, or not.
    pub(crate) fn tell_pace(&self, is_written: bool) {
        let (others, room) = {
            let log = self.log.lock();
            (log.frozen_segments > 0, self.room(&log))
        };
        self.throttle.landed(is_written, others, room, &self.host.spinner);
    }

    fn room(&self, log: &Log) -> Room {
        Room { allowed: self.allowed_segments(log), taken: log.dirty_segments + log.frozen_segments }
    }

    /// Whether the overflow has surplus space to punch out, or would have it after a commit.
    pub(crate) fn wants_trim(&self) -> bool {
        match &self.persist {
            Some(persist) if persist.is_closed() => false,
            Some(persist) => self.has_surplus() || persist.holds_surplus(),
            None => self.has_surplus() || self.has_surplus_memory(),
        }
    }

    /// The same of memory in a file. That of all other caches is the host's.
    fn has_surplus_memory(&self) -> bool {
        let memory = self.memory.as_ref();
        memory.is_some_and(|memory| self.pool.warm_bytes() > 0 || memory.pieces.wants_trim())
    }

    fn has_surplus(&self) -> bool {
        self.overflow.as_ref().is_some_and(|overflow| overflow.wants_trim())
    }

    /// Whether there are buffers that may not be needed.
    pub(crate) fn has_spare_buffers(&self) -> bool {
        self.persist.as_ref().is_some_and(|persist| persist.has_spare_buffers())
            || self
                .overflow
                .as_ref()
                .is_some_and(|overflow| !UNDER_MODEL_CHECKER && overflow.has_spare_buffers())
    }

    /// Gives spare buffers back, and punches surplus space out; where a commit has to come first, asks for that.
    pub(crate) fn trim(&self) {
        match (&self.overflow, &self.persist) {
            (Some(overflow), Some(persist)) => {
                persist.while_open(|| overflow.trim());
            }
            (Some(overflow), None) => overflow.trim(),
            (None, _) => {}
        }
        if let Some(memory) = &self.memory {
            self.pool.trim();
            memory.pieces.trim();
        }
        if let Some(overflow) = &self.overflow {
            overflow.trim_buffers();
        }
        if let Some(persist) = &self.persist {
            self.host.give_ram(persist.trim_buffers());
            if persist.holds_surplus() {
                persist.ask_for_room(true);
            }
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::sync::mpsc;

    use headwater_block::IoError;
    use headwater_testkit::{Rng, wait_until};

    use super::*;
    use crate::cache::{
        Admission, CacheOptions, LittleSpace, OverflowOptions, Residence, UnloggedBlocks, WriteResult,
    };
    use crate::host::Host;
    use crate::log::Stream;
    use crate::overflow::buffering::Buffering;
    use crate::overflow::io::open_engine;
    use crate::pressure::NoPressure;
    use crate::units::{BlockNumber, Location, SLOT_COUNT};
    use crate::write_queue::{QueuedWrite, RetryResult};

    const BLOCK: usize = BLOCK_BYTES as usize;
    const SLOTS_EACH: u32 = SLOT_COUNT as u32;

    /// A cache whose host's thread does not run.
    fn cache(overflow: Option<OverflowOptions>) -> (Host, Arc<WriteCache>) {
        let host = Host::prepare(u64::MAX, open_engine().unwrap(), NoPressure).0;
        let options = CacheOptions {
            name: "tested".into(),
            size_bytes: 1 << 30,
            ram_bytes: 64 << 20,
            weight: crate::DEFAULT_WEIGHT,
            overflow,
            pause_limit: Duration::from_secs(24 * 3600),
            persistent: None,
            base: None,
        };
        let cache = WriteCache::open(&options, &host.shared()).unwrap();
        (host, cache)
    }

    /// A write of a block that does not pack.
    struct Waits {
        cache: Arc<WriteCache>,
        block: u32,
        answer: mpsc::Sender<()>,
    }

    impl QueuedWrite for Waits {
        fn retry(self: Box<Self>) -> Result<RetryResult, Box<dyn QueuedWrite>> {
            let data = Rng::new(u64::from(self.block)).bytes(BLOCK);
            if self.cache.write(BlockNumber(self.block), &data, Admission::Waited) != WriteResult::Done {
                return Err(self);
            }
            self.answer.send(()).unwrap();
            Ok(RetryResult::Stored)
        }

        fn refuse(self: Box<Self>, error: IoError) {
            panic!("it is refused: {error}");
        }
    }

    /// Writes from this block on, of which so many bytes do not pack, until there is no room. The first block that it has not.
    fn fill(cache: &WriteCache, mut block: u32, random_bytes: usize) -> u32 {
        let mut rng = Rng::new(u64::from(block) + 1);
        loop {
            let data = [rng.bytes(random_bytes), vec![7; BLOCK - random_bytes]].concat();
            if cache.write(BlockNumber(block), &data, Admission::Waited) != WriteResult::Done {
                return block;
            }
            block += 1;
        }
    }

    /// The same with what does not pack, until packing brings no room either.
    fn fill_all(cache: &Arc<WriteCache>, mut block: u32) -> u32 {
        loop {
            block = fill(cache, block, BLOCK);
            let _ = cache.work(Instant::now());
            if !cache.would_find_room() && !cache.wants_pack() {
                return block;
            }
        }
    }

    /// Lets less than a quarter of each packed segment die. How many segments that are.
    fn kill_a_few(cache: &WriteCache) -> usize {
        // Each has as many blocks as follow each other.
        let is_packed = |first: &u32| cache.residence(BlockNumber(*first)) == Residence::Packed;
        let packed: Vec<u32> = (0..64).map(|segment| segment * SLOTS_EACH).filter(is_packed).collect();
        for first in &packed {
            cache.clear(
                BlockNumber(first + 1),
                BlockNumber(first + 121),
                Location::ZERO,
                UnloggedBlocks::Stay,
            );
        }
        packed.len()
    }

    #[test]
    fn packed_segments_with_a_few_dead_slots_are_made_smaller_last_and_a_few_at_a_time() {
        let (_host, cache) = cache(None);
        let wait = |block| {
            let (answer, answered) = mpsc::channel();
            cache.queue_for_space(Box::new(Waits { cache: Arc::clone(&cache), block, answer }));
            answered
        };
        // By a clock that is ahead of all, no turn takes long; by one that is behind, each does.
        let ahead = Instant::now() + Duration::from_secs(3600);
        let work = |now| {
            let before = cache.packed.bytes();
            let _ = cache.work(now);
            before.checked_sub(cache.packed.bytes())
        };
        let mut block = 0;
        while cache.packed.bytes() < 4 << 20 {
            block = fill(&cache, block, BLOCK / 2);
            assert_ne!(work(Instant::now()), Some(0), "there is nothing to pack");
        }
        block = fill(&cache, block, BLOCK / 2);
        let packed: Vec<_> =
            (0..64).map(SegmentId).filter_map(|id| Some((id, cache.packed.get(id)?))).collect();
        assert_eq!(kill_a_few(&cache), packed.len());
        // Where packing brings room, they stay as they are.
        let answered = wait(block);
        wait_until("packing brings room", || {
            assert_eq!(work(ahead), None, "nothing is packed");
            answered.try_recv().is_ok()
        });
        let is_as_it_was = |(id, packed): &(SegmentId, Arc<Packed>)| {
            cache.packed.get(*id).is_some_and(|now| Arc::ptr_eq(&now, packed))
        };
        assert!(packed.iter().all(is_as_it_was));

        block = fill_all(&cache, block + 1);
        assert!(kill_a_few(&cache) > 24, "{:?}", cache.snapshot());
        // One in each turn that takes long, until there is room.
        let answered = wait(block);
        let segment_bytes = SEGMENT_BYTES as u64;
        while answered.try_recv().is_err() {
            let freed = work(Instant::now() - PACKING_TURN);
            assert!(freed.is_some_and(|freed| freed > 0 && freed < segment_bytes / 4), "{freed:?}");
        }
        // As many in others as make room for a segment.
        block = fill_all(&cache, block + 1);
        let _answered = wait(block);
        let freed = work(ahead);
        let is_enough = |freed: u64| freed >= segment_bytes && freed < segment_bytes * 5 / 4;
        assert!(freed.is_some_and(is_enough), "{freed:?}");
    }

    #[test]
    fn what_was_cleaned_is_written_beyond_a_limit_that_was_lowered() {
        let dir = tempfile::tempdir().unwrap();
        let place = OverflowOptions {
            at: dir.path().to_owned(),
            limit_bytes: 64 << 20,
            buffering: Buffering::Buffered,
            little_space: LittleSpace::Refused,
        };
        let (_host, cache) = cache(Some(place));
        let overflow = Arc::clone(cache.overflow.as_ref().unwrap());
        // All that is claimed is in use.
        let first = overflow.take_position().unwrap();
        let taken: Vec<u32> =
            [first].into_iter().chain(std::iter::from_fn(|| overflow.take_ready(0))).collect();
        cache.set_disk_bytes(4 * ENCRYPTED_SEGMENT_BYTES as u64);
        // One more closes the segment.
        for block in 0..=SLOTS_EACH {
            cache.take_slot(Stream::Cleaned, BlockNumber(block)).unwrap();
        }
        assert!(cache.log.lock().has_dirty_cleaned(&cache.segments));
        assert_eq!(cache.destage(&overflow, false), Begun::All);
        assert!(!cache.log.lock().has_dirty_cleaned(&cache.segments), "it found no place");
        wait_until("it is written", || cache.log.lock().clean_segments == 1);
        let position = cache.segments.get(SegmentId(0)).unwrap().position().unwrap();
        assert!(!taken.contains(&position), "{position}");
        assert_eq!(overflow.used_bytes(), (taken.len() as u64 + 1) * ENCRYPTED_SEGMENT_BYTES as u64);
    }
}
