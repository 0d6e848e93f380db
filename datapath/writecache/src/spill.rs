//! Spilling: writes cold dirty segments to the overflow disk early; they stay in RAM as clean copies.
//!
//! ```text
//!  Dirty --freeze, sweep--> Frozen --encrypt into a staging buffer, write--> Clean --evict, sweep--> Spilled
//! ```
//! A packed segment goes `Packed -> PackedFrozen -> Spilled`, without a clean copy. All steps except the end
//! of a write run on the host's thread.

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

/// Positions that only cleaning may use: it frees more positions than it takes.
pub const RESERVED_POSITIONS: u32 = 2;

/// A round of the host's thread that has run for this time packs no more segments.
pub(crate) const PACKING_TIME_MAX: Duration = Duration::from_millis(5);

fn is_lack_of_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Whether a round of the host's thread that began at this time packs no more segments.
fn took_long(began: Instant) -> bool {
    // Time stands still while schedules are explored.
    !UNDER_MODEL_CHECKER && began.elapsed() >= PACKING_TIME_MAX
}

/// The result of a round of the host's thread for one cache.
#[derive(Debug, Default)]
pub struct RoundResult {
    /// When the first waiting write has to be refused.
    pub deadline: Option<Instant>,
    /// The disk failed: try again later.
    pub disk_failed: bool,
}

/// The result of starting to write cold segments, or to clean one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// Everything that can be moved is being moved.
    All,
    /// All staging buffers of the host are in use: when one is given back, the thread is woken.
    LacksBuffer,
    /// The disk failed or is full, and is tried again later.
    DiskRests,
}

impl WriteCache {
    /// Does the work of this cache that can be done without waiting for the disk.
    pub(crate) fn work(self: &Arc<Self>, now: Instant) -> RoundResult {
        // Both before the work that may take long, and after it.
        let _ = self.serve_throttled(now);
        let mut result = self.run_round(now);
        if self.throttle.is_on() {
            self.throttle.check_space(self.room(&self.log.lock()));
        }
        result.deadline = result.deadline.into_iter().chain(self.serve_throttled(Instant::now())).min();
        // Tables are also added and removed without a change of segments.
        self.report_index(&self.log.lock());
        result
    }

    fn run_round(self: &Arc<Self>, now: Instant) -> RoundResult {
        if let (Some(persist), Some(overflow)) = (&self.persist, &self.overflow) {
            return self.work_persistent(now, persist, overflow);
        }
        self.serve_waiting(now, false);
        let (mut disk_failed, mut lacks_buffer) = (false, false);
        if let Some(overflow) = &self.overflow {
            self.move_cleaned(overflow);
        }
        // In this order: pack segments that compress, then spill, then clean. If the disk accepts segments,
        // it serves a waiting writer faster than packing.
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
        // Meanwhile space may have become free.
        let nothing_moves = self.log.lock().frozen_segments == 0 && !self.cleaner.is_busy();
        let hopeless = nothing_moves && !more_to_pack && !lacks_buffer;
        let deadline = self.serve_waiting(now, hopeless);
        self.check_for_space();
        if more_to_pack {
            self.host.signal();
        }
        RoundResult { deadline, disk_failed }
    }

    /// Like [`WriteCache::work`], for a persistent cache: its own thread writes segments, nothing is packed,
    /// and positions are freed by commits.
    fn work_persistent(
        self: &Arc<Self>,
        now: Instant,
        persist: &Persist,
        overflow: &Arc<Overflow>,
    ) -> RoundResult {
        let emptied = self.log.lock().take_emptied();
        for id in emptied {
            if let Some(segment) = self.segments.get(id) {
                self.release(segment, id);
            }
        }
        let Some(refused) = persist.while_open(|| self.claim_ahead(persist, overflow)) else {
            // Nothing is written any more, and no write waits.
            self.move_cleaned(overflow);
            self.shrink();
            return RoundResult::default();
        };
        // A broken cache makes no commits: spilling continues, but positions that cleaning frees would not
        // become usable.
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
        self.check_for_space();
        RoundResult { deadline, disk_failed }
    }

    /// Reserves file system space for the next segments and for the map. Returns whether the disk refused.
    fn claim_ahead(&self, persist: &Persist, overflow: &Overflow) -> bool {
        let refused = match overflow.prepare(READY_POSITIONS) {
            Ok(()) => {
                self.disk_failed_or_full.store(false, Ordering::Relaxed);
                false
            }
            Err(why) => self.no_position(why),
        };
        !self.claim_map(persist, overflow) || refused
    }

    /// Reserves file system space for the map of a persistent cache, at the cost of a position for data if
    /// necessary. Returns whether it has enough.
    fn claim_map(&self, persist: &Persist, overflow: &Overflow) -> bool {
        while let Err(error) = persist.claim_map() {
            if persist.has_map_room() {
                break;
            }
            if is_lack_of_space(&error) && overflow.punch_one(RESERVED_POSITIONS) {
                continue;
            }
            tracing::debug!(volume = self.name, %error, "cannot reserve space for the map file of a persistent cache: changes are committed early");
            // Commit the logged changes while they fit; but not again at once if a commit has just failed.
            if !overflow.is_resting() {
                persist.ask_for_commit();
            }
            break;
        }
        persist.has_map_room()
    }

    /// Frees RAM after the limit was lowered.
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
        // Dead blocks in RAM keep their positions until cleaning finds them on disk.
        let waits_for_place = waits && self.lacks_place() && !self.places_come_back();
        let mut log = self.log.lock();
        log.has_dirty_cleaned(&self.segments)
            || log.dirty_segments > self.dirty_limit(&log)
            || self.packed.bytes() > self.packed_limit_bytes(&log)
            || (waits && log.dirty_segments > 0 && (log.clean_segments == 0 || waits_for_place))
    }

    // If there is nothing to pack, no memory is taken for packing: giving it back would wake this thread
    // again and again.
    fn wants_pack(&self) -> bool {
        let log = self.log.lock();
        log.has_untried()
            && log.dirty_segments > self.dirty_limit(&log)
            && self.packed.bytes() < self.packed_limit_bytes(&log)
    }

    /// Frees the memory of dead slots in packed segments, until `is_enough` says that enough bytes were
    /// freed. Returns the number of freed bytes.
    fn shrink_packed(&self, dead: Dead, is_enough: impl Fn(u64) -> bool) -> u64 {
        let records = |id| self.segments.get(id);
        let freed = self.packed.shrink(dead, (records, self.memory.as_ref()), is_enough);
        self.host.give_ram(freed);
        freed
    }

    /// Like [`WriteCache::shrink_packed`], for segments that lost few slots, when a write waits and packing
    /// gave no space. Each costs a copy of nearly all its contents for little space, so a round does only as
    /// many as give space for one segment, or as it has time for. Returns whether anything was freed: then a
    /// later round may free more.
    fn shrink_further(&self, now: Instant) -> bool {
        if !self.waiting.any() || !self.cannot_spill() || self.would_find_room() {
            return false;
        }
        let is_enough = |freed: u64| freed >= SEGMENT_BYTES as u64 || (freed > 0 && took_long(now));
        self.shrink_packed(Dead::Few, is_enough) > 0
    }

    /// Packs cold segments, while that pays and packed segments may take more RAM. Returns whether there is
    /// more to do in a later round: a segment takes some milliseconds, in which writers and other caches
    /// wait. `now`: when this round began.
    fn pack_cold(&self, now: Instant) -> bool {
        if self.packed_is_full() || (self.packed.bytes() > 0 && self.waiting.any()) {
            // First frees dead slots of packed segments: that costs a copy of the live ones, and no I/O.
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

    /// Whether packing has to pause for other caches: a write waits that only this thread serves, or soon may
    /// wait.
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

    /// Starts writes of cold segments. With `more_to_pack`, segments that a later round may pack are not
    /// written unless writes wait.
    fn destage(self: &Arc<Self>, overflow: &Arc<Overflow>, more_to_pack: bool) -> Begun {
        while self.wants_spill() {
            // Checked for each segment: a write that was started here may have failed meanwhile.
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
                // Cleaning freed more than the cleaned segment takes.
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
            self.disk_failed_or_full.store(false, Ordering::Relaxed);
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

    /// Whether the file system gives no more space, and the reserved space is only enough to continue
    /// cleaning. Tries to reserve again.
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
        if !self.disk_failed_or_full.swap(true, Ordering::Relaxed) {
            self.warn(&format_args!(
                "cannot get more space on the overflow disk: {error}; segments are cleaned to free space, and if that is not enough, writes wait"
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
            this.written(id, position, 0, Err(io::Error::other("the write ended without an answer")), None);
        });
        // Threads that saw the segment as writable have finished when each of its leaves was locked once
        // more.
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
                self.faults.error(&"memory", &"a block could not be unpacked or encrypted");
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

    /// Ends a write, on a disk thread.
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
                self.disk_failed_or_full.store(true, Ordering::Relaxed);
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
            // Only now: if two records had the same position, the next process could not tell which one is
            // valid.
            overflow.give_position_last(position);
        }
        self.cleaner.unstick();
        let room = self.room(&self.log.lock());
        self.throttle.written(result.is_ok(), room, &self.host.spinner);
        self.host.signal();
    }

    /// Reports to the throttle that a segment of a persistent cache, which packs nothing, was written or
    /// failed to be.
    pub(crate) fn report_write(&self, is_written: bool) {
        let (others, room) = {
            let log = self.log.lock();
            (log.frozen_segments > 0, self.room(&log))
        };
        self.throttle.landed(is_written, others, room, &self.host.spinner);
    }

    fn room(&self, log: &Log) -> Room {
        Room { allowed: self.allowed_segments(log), taken: log.dirty_segments + log.frozen_segments }
    }

    /// Whether the overflow has surplus space to punch out, or would have after a commit.
    pub(crate) fn wants_trim(&self) -> bool {
        match &self.persist {
            Some(persist) if persist.is_closed() => false,
            Some(persist) => self.has_surplus() || persist.holds_surplus(),
            None => self.has_surplus() || self.has_surplus_memory(),
        }
    }

    /// Whether a cache whose memory is in a file has memory to return. The host returns that of all other
    /// caches.
    fn has_surplus_memory(&self) -> bool {
        let memory = self.memory.as_ref();
        memory.is_some_and(|memory| self.pool.warm_bytes() > 0 || memory.pieces.wants_trim())
    }

    fn has_surplus(&self) -> bool {
        self.overflow.as_ref().is_some_and(|overflow| overflow.wants_trim())
    }

    /// Whether there are buffers that may be unneeded.
    pub(crate) fn has_spare_buffers(&self) -> bool {
        self.persist.as_ref().is_some_and(|persist| persist.has_spare_buffers())
            || self
                .overflow
                .as_ref()
                .is_some_and(|overflow| !UNDER_MODEL_CHECKER && overflow.has_spare_buffers())
    }

    /// Frees spare buffers, and punches surplus space out; if a commit has to come first, requests one.
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

    /// A cache whose host's thread is not started.
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

    /// A write of an incompressible block.
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

    /// Writes blocks from this number on, with this many incompressible bytes each, until there is no space.
    /// Returns the first block that was not stored.
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

    /// Like [`fill`] with incompressible blocks, until packing gives no more space either.
    fn fill_all(cache: &Arc<WriteCache>, mut block: u32) -> u32 {
        loop {
            block = fill(cache, block, BLOCK);
            let _ = cache.work(Instant::now());
            if !cache.would_find_room() && !cache.wants_pack() {
                return block;
            }
        }
    }

    /// Lets less than a quarter of each packed segment die. Returns the number of these segments.
    fn kill_a_few(cache: &WriteCache) -> usize {
        // Each packed segment has a run of blocks.
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
        // With a clock that is ahead, no round takes long; with one that is behind, each does.
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
        // If packing gives space, they stay as they are.
        let answered = wait(block);
        wait_until("packing gives space", || {
            assert_eq!(work(ahead), None, "nothing is packed");
            answered.try_recv().is_ok()
        });
        let is_as_it_was = |(id, packed): &(SegmentId, Arc<Packed>)| {
            cache.packed.get(*id).is_some_and(|now| Arc::ptr_eq(&now, packed))
        };
        assert!(packed.iter().all(is_as_it_was));

        block = fill_all(&cache, block + 1);
        assert!(kill_a_few(&cache) > 24, "{:?}", cache.snapshot());
        // One in each round that takes long, until there is space.
        let answered = wait(block);
        let segment_bytes = SEGMENT_BYTES as u64;
        while answered.try_recv().is_err() {
            let freed = work(Instant::now() - PACKING_TIME_MAX);
            assert!(freed.is_some_and(|freed| freed > 0 && freed < segment_bytes / 4), "{freed:?}");
        }
        // In other segments, as many as give space for a segment.
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
        // All reserved space is in use.
        let first = overflow.take_position().unwrap();
        let taken: Vec<u32> =
            [first].into_iter().chain(std::iter::from_fn(|| overflow.take_ready(0))).collect();
        cache.set_disk_bytes(4 * ENCRYPTED_SEGMENT_BYTES as u64);
        // One more block closes the segment.
        for block in 0..=SLOTS_EACH {
            cache.take_slot(Stream::Cleaned, BlockNumber(block)).unwrap();
        }
        assert!(cache.log.lock().has_dirty_cleaned(&cache.segments));
        assert_eq!(cache.destage(&overflow, false), Begun::All);
        assert!(!cache.log.lock().has_dirty_cleaned(&cache.segments), "it found no position");
        wait_until("it is written", || cache.log.lock().clean_segments == 1);
        let position = cache.segments.get(SegmentId(0)).unwrap().position().unwrap();
        assert!(!taken.contains(&position), "{position}");
        assert_eq!(overflow.used_bytes(), (taken.len() as u64 + 1) * ENCRYPTED_SEGMENT_BYTES as u64);
    }
}
