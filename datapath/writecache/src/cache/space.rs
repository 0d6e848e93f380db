//! Takes and frees slots and RAM: begins segments, and frees the space of segments that are not needed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{MIN_SEGMENTS, WriteCache};
use crate::counters::count;
use crate::log::{Log, NewSlot, Released, Stream};
use crate::memory::SegmentMemory;
use crate::overflow::Overflow;
use crate::persist;
use crate::segment::Segment;
use crate::spill::RESERVED_POSITIONS;
use crate::units::{BlockNumber, SEGMENT_BYTES, SegmentId};

impl WriteCache {
    /// Frees a segment whose last block was freed.
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
        self.cleaner.unstick();
        if let (Some(position), Some(overflow)) = (released.position, &self.overflow) {
            match &self.persist {
                Some(persist) => persist.freed(position),
                None => overflow.give_position(position),
            }
        }
        if let Some(memory) = released.memory {
            self.pool.give(memory);
            self.host.give_ram(SEGMENT_BYTES as u64);
        }
        self.host.signal();
    }

    /// Takes a slot for a block, in the segment being filled or in a new one.
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
            // No signal here: the write that finds no space queues, which signals. A signal from the host's
            // thread itself, which retries queued writes, would keep it running until the disk has finished.
            return None;
        }
        // There may be memory again for a cache that was refused before.
        if log.dirty_segments > self.dirty_limit(&log)
            || log.has_dirty_cleaned(&self.segments)
            || self.waiting.is_full()
        {
            self.host.signal();
        }
        log.claim(&self.segments, stream, block)
    }

    /// Whether a write would find a slot now. Takes nothing, and asks the host for nothing.
    pub(crate) fn would_find_room(&self) -> bool {
        let cannot_spill = self.cannot_spill();
        let log = self.log.lock();
        if log.has_slot(&self.segments, cannot_spill) {
            return true;
        }
        // A segment of a persistent cache needs a position on disk, too.
        if self.lacks_place() {
            return false;
        }
        let reserve = u32::from(self.overflow.is_some());
        let is_allowed = log.ram_segments.saturating_add(reserve) < self.allowed_segments(&log);
        let is_there =
            u64::from(log.ram_segments) < MIN_SEGMENTS || self.host.budget.has(SEGMENT_BYTES as u64);
        log.clean_segments > 0 || (is_allowed && is_there)
    }

    /// Whether no dirty segment can be written to disk now: there is no disk, the disk limit is used up, or
    /// the last write failed.
    pub(crate) fn cannot_spill(&self) -> bool {
        let is_full =
            |o: &Arc<Overflow>| o.free_positions() <= RESERVED_POSITIONS || o.lacks_space(RESERVED_POSITIONS);
        self.overflow.as_ref().is_none_or(is_full) || self.disk_failed_or_full.load(Ordering::Relaxed)
    }

    fn begin_segment(&self, log: &mut Log, stream: Stream) -> bool {
        let (Some(persist), Some(overflow)) = (&self.persist, &self.overflow) else {
            return self.begin_in_ram(log, stream);
        };
        // No signal if there is no position: the host's thread, which retries queued writes, would keep
        // itself awake.
        let Some(reserved) = persist.reserve(overflow, stream) else { return false };
        if !self.begin_in_ram(log, stream) {
            overflow.give_position(reserved.position);
            return false;
        }
        if overflow.ready_positions() <= RESERVED_POSITIONS as usize + persist::READY_POSITIONS / 2 {
            self.host.signal();
        }
        if let Some(segment) = log.filling(stream).and_then(|id| self.segments.get(id)) {
            segment.set_position(Some(reserved.position));
            segment.set_generation(reserved.generation);
        }
        true
    }

    fn begin_in_ram(&self, log: &mut Log, stream: Stream) -> bool {
        self.report_index(log);
        // Cleaning frees more space than it takes, so limits that may have been lowered below the present use
        // do not bind it: one segment at a time.
        let cleaning = stream == Stream::Cleaned && !log.has_dirty_cleaned(&self.segments);
        // One segment is reserved for moved blocks.
        let reserve = u32::from(self.overflow.is_some() && stream == Stream::Fresh);
        if !cleaning && log.ram_segments.saturating_add(reserve) >= self.allowed_segments(log) {
            // Also if the index has outgrown the limit: otherwise a share from a time when the host's RAM was
            // short would stay in force.
            if self.share.bytes() < self.most_bytes(self.index_bytes(log)) {
                self.ask_for_more();
            }
            return false;
        }
        // The segments without which no block can be moved are taken even if the host's budget is used up.
        let bytes = SEGMENT_BYTES as u64;
        if !self.host.take_ram(bytes) {
            self.ask_for_more();
            if !cleaning && u64::from(log.ram_segments) >= MIN_SEGMENTS {
                return false;
            }
            self.host.add_ram(bytes);
        }
        let Some(memory) = self.pool.take() else {
            self.host.give_ram(bytes);
            return false;
        };
        let number = self.pool.number_of(&memory);
        match log.begin(&self.segments, stream, (memory, number)) {
            Ok(()) => {
                if log.ram_segments == 1 {
                    // From now on the host's thread checks for memory pressure.
                    self.host.signal();
                }
                true
            }
            Err(memory) => {
                self.pool.give(memory);
                self.host.give_ram(bytes);
                false
            }
        }
    }

    /// Notes that the host's limit keeps this cache below its own limit.
    fn ask_for_more(&self) {
        self.share.ask();
        if self.host.budget.refused() {
            self.host.signal();
        }
    }

    /// Frees RAM without I/O by dropping the coldest clean copy. Returns whether there was one. The caller
    /// must hold no leaf's lock.
    pub fn make_room(&self) -> bool {
        // If positions on disk are missing, RAM does not help, and reads would lose the copies.
        !self.lacks_place() && self.evict_one()
    }

    /// Whether a segment cannot be begun because no position on disk is free, which each segment of a
    /// persistent cache needs.
    pub(crate) fn lacks_place(&self) -> bool {
        let both = self.persist.as_ref().zip(self.overflow.as_ref());
        both.is_some_and(|(persist, overflow)| !persist.could_begin(overflow))
    }

    /// Whether cleaning or a commit is about to free positions of a persistent cache.
    pub(crate) fn places_come_back(&self) -> bool {
        self.cleaner.is_busy() || self.persist.as_ref().is_some_and(|persist| persist.frees_places())
    }

    /// Drops the coldest clean copy. Returns whether there was one.
    pub(crate) fn evict_one(&self) -> bool {
        let victim = self.log.lock().evict_victim(&self.segments);
        let Some((id, memory)) = victim else { return false };
        self.forget_ram(id, memory);
        count(&self.counters.evicted_segments, 1);
        true
    }

    /// Frees a segment's RAM after its address was taken out of the segment's word: waits for threads that
    /// still copy from it.
    pub(crate) fn forget_ram(&self, id: SegmentId, memory: SegmentMemory) {
        if let Some(segment) = self.segments.get(id) {
            self.map.sweep(segment.live_slots().map(|(_, block)| block));
        }
        self.pool.give(memory);
        self.host.give_ram(SEGMENT_BYTES as u64);
        // Another cache of the host may wait for the RAM.
        self.host.signal_if_waiting();
    }
}
