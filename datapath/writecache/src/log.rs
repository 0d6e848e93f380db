//! The log of a cache: keeps track of which segment is filled next, and which are full, clean or free. It
//! moves no data.
//!
//! Everything here happens under one lock, held for some tens of nanoseconds, never across I/O. It is held
//! longer when the emptiest segment is searched for, and when a queue is pruned, which happens once in as
//! many full segments as there are numbers. Entries of the queues may be stale (the segment was freed or has
//! another state by now): a thread that takes an entry checks the segment's state.

use std::collections::VecDeque;

use crate::clean::MIN_GAIN;
use crate::memory::{MemoryPool, SegmentMemory};
use crate::segment::{Segment, SegmentTable, State, Word};
use crate::units::{BlockNumber, SLOT_COUNT, SegmentId, Slot};

/// A dirty segment with at most this many live slots is filled again instead of being spilled.
pub const REFILL_LIVE: u32 = (SLOT_COUNT as u32 / 4) * 3;

/// The two kinds of blocks that are kept in separate segments: blocks written by the machine, and older
/// blocks moved by cleaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Written by the machine.
    Fresh,
    /// Moved by cleaning.
    Cleaned,
}

/// A segment that is being filled, and where to search for its next dead slot.
#[derive(Clone, Copy, Debug)]
struct Filling {
    id: SegmentId,
    next: usize,
}

/// The slot of a new block.
#[derive(Clone, Copy, Debug)]
pub struct NewSlot {
    /// The segment.
    pub id: SegmentId,
    /// The slot.
    pub slot: Slot,
    /// The segment's RAM.
    pub address: usize,
}

/// The resources of a freed segment.
#[derive(Debug, Default)]
pub struct Released {
    /// Its RAM.
    pub memory: Option<SegmentMemory>,
    /// Its position on disk.
    pub position: Option<u32>,
    /// Whether it was packed.
    pub packed: bool,
}

/// The log of one cache; see the module's documentation.
#[derive(Debug, Default)]
pub struct Log {
    fresh: Option<Filling>,
    cleaned: Option<Filling>,
    dirty: VecDeque<SegmentId>,
    /// Full segments of the cleaned stream: spilled first, because cleaning waits for their RAM.
    dirty_cleaned: VecDeque<SegmentId>,
    /// Dirty segments that do not compress: spilled before the others.
    dirty_unpackable: VecDeque<SegmentId>,
    /// Whether some of those were tried only with the weak packer.
    pub weakly_tried: bool,
    packed: VecDeque<SegmentId>,
    clean: VecDeque<SegmentId>,
    refill: VecDeque<SegmentId>,
    /// For persistent caches: slots are claimed in order, and never again.
    append_only: bool,
    /// For persistent caches: segments with RAM that may have slots which are not on disk.
    unsaved: Vec<SegmentId>,
    /// For persistent caches: segments that became full when all their slots were dead.
    emptied: Vec<SegmentId>,
    free_ids: Vec<SegmentId>,
    next_id: u32,
    /// Segments with RAM.
    pub ram_segments: u32,
    /// Segments in state `Dirty`.
    pub dirty_segments: u32,
    /// Segments in state `Frozen`.
    pub frozen_segments: u32,
    /// Segments in state `Clean`.
    pub clean_segments: u32,
}

/// The length up to which a queue is not pruned, for a cache with this many segment numbers.
fn most_queued(numbers: u32) -> usize {
    2 * numbers as usize + 64
}

/// Whether a segment in the queue of refillable ones still has enough dead slots.
fn is_refillable(segment: &Segment) -> bool {
    segment.word().state() == State::Dirty && segment.live() <= REFILL_LIVE
}

impl Log {
    /// Numbers ever used: each has a record in memory.
    pub fn numbers_used(&self) -> u32 {
        self.next_id
    }

    /// Claims a slot in the segment being filled for `block`; `None` if a new segment is needed.
    pub fn claim(&mut self, table: &SegmentTable, stream: Stream, block: BlockNumber) -> Option<NewSlot> {
        let place = match stream {
            Stream::Fresh => &mut self.fresh,
            Stream::Cleaned => &mut self.cleaned,
        };
        let filling = place.as_mut()?;
        let id = filling.id;
        let segment = table.get(id)?;
        if let Some(slot) = segment.next_dead(filling.next) {
            filling.next = usize::from(slot.0) + 1;
            segment.claim(slot, block);
            return Some(NewSlot { id, slot, address: segment.word().ram()? });
        }
        if segment.live() == 0 && !self.append_only {
            // All blocks in the segment have died: start at its beginning.
            filling.next = 1;
            segment.claim(Slot(0), block);
            return Some(NewSlot { id, slot: Slot(0), address: segment.word().ram()? });
        }
        *place = None;
        self.close(segment, id, stream);
        self.prune(table, most_queued(self.next_id));
        None
    }

    /// If a queue is longer than `most`, removes its stale entries, and the earlier of two entries of one
    /// segment. Entries of segments that died would otherwise stay.
    fn prune(&mut self, table: &SegmentTable, most: usize) {
        let queues = [
            (&mut self.dirty, State::Dirty),
            (&mut self.dirty_cleaned, State::Dirty),
            (&mut self.dirty_unpackable, State::Dirty),
            (&mut self.refill, State::Dirty),
            (&mut self.packed, State::Packed),
            (&mut self.clean, State::Clean),
        ];
        for (queue, state) in queues.into_iter().filter(|(queue, _)| queue.len() > most) {
            let mut seen = vec![false; self.next_id as usize];
            let is_in =
                |id: &SegmentId| table.get(*id).is_some_and(|segment| segment.word().state() == state);
            let mut is_last = |id: &SegmentId| {
                seen.get_mut(id.0 as usize).is_some_and(|seen| !std::mem::replace(seen, true))
            };
            let rest: Vec<SegmentId> = queue.drain(..).rev().filter(|id| is_in(id) && is_last(id)).collect();
            queue.extend(rest.into_iter().rev());
        }
    }

    /// Whether there is a slot without taking memory. With `any_dead`, a dirty segment with few dead slots
    /// counts, too.
    pub fn has_slot(&self, table: &SegmentTable, any_dead: bool) -> bool {
        let filling = self.fresh.as_ref().and_then(|filling| Some((table.get(filling.id)?, filling.next)));
        filling.is_some_and(|(segment, next)| {
            segment.next_dead(next).is_some() || (segment.live() == 0 && !self.append_only)
        }) || self.refill.iter().any(|id| table.get(*id).is_some_and(is_refillable))
            || (any_dead && self.emptiest(table).is_some())
    }

    fn close(&mut self, segment: &Segment, id: SegmentId, stream: Stream) {
        segment.set_word(Word::new(State::Dirty, segment.word().ram().unwrap_or(0)));
        self.dirty_segments += 1;
        match stream {
            Stream::Fresh => self.dirty.push_back(id),
            Stream::Cleaned => self.dirty_cleaned.push_back(id),
        }
        if self.append_only {
            if segment.live() == 0 {
                self.emptied.push(id);
            }
        } else if segment.live() <= REFILL_LIVE {
            self.refill.push_back(id);
        }
    }

    /// Continues to fill a dirty segment that has many dead slots. Returns whether there was one.
    pub fn refill(&mut self, table: &SegmentTable, stream: Stream) -> bool {
        while let Some(id) = self.refill.pop_front() {
            let Some(segment) = table.get(id).filter(|segment| is_refillable(segment)) else { continue };
            self.dirty_segments -= 1;
            self.open(segment, id, stream, segment.word().ram().unwrap_or(0));
            return true;
        }
        false
    }

    /// Continues to fill the dirty segment with the most dead slots, however few: for a cache that has no
    /// other way to get space. Returns whether there was one.
    pub fn refill_emptiest(&mut self, table: &SegmentTable) -> bool {
        let Some(id) = self.emptiest(table) else { return false };
        let Some(segment) = table.get(id) else { return false };
        self.dirty_segments -= 1;
        self.open(segment, id, Stream::Fresh, segment.word().ram().unwrap_or(0));
        true
    }

    /// The dirty segment with the most dead slots, if it has enough of them.
    fn emptiest(&self, table: &SegmentTable) -> Option<SegmentId> {
        if self.append_only {
            return None;
        }
        (0..self.next_id)
            .map(SegmentId)
            .filter_map(|id| {
                let segment = table.get(id)?;
                (segment.word().state() == State::Dirty).then_some((segment.live(), id))
            })
            .filter(|(live, _)| live + MIN_GAIN <= u32::from(SLOT_COUNT))
            .min_by_key(|(live, _)| *live)
            .map(|(_, id)| id)
    }

    /// Notes that a dirty segment has enough dead slots to be refilled.
    pub fn has_room(&mut self, id: SegmentId) {
        if !self.append_only {
            self.refill.push_back(id);
        }
    }

    /// Begins to fill a new segment in `memory`, which has this number in a memory file. Returns `memory` if
    /// there is no free segment number, or no memory for the segment's record.
    pub fn begin(
        &mut self,
        table: &SegmentTable,
        stream: Stream,
        (memory, number): (SegmentMemory, Option<u32>),
    ) -> Result<(), SegmentMemory> {
        let id = match self.free_ids.pop() {
            Some(id) => id,
            None if self.next_id < SegmentId::LIMIT && table.reserve(SegmentId(self.next_id)) => {
                self.next_id += 1;
                SegmentId(self.next_id - 1)
            }
            None => return Err(memory),
        };
        let Some(segment) = table.get(id) else { return Err(memory) };
        number.into_iter().for_each(|number| segment.set_memory(number));
        segment.take_touch();
        segment.set_stable(0);
        segment.set_saved(0);
        segment.set_logged(0);
        if self.append_only {
            self.unsaved.push(id);
        }
        self.ram_segments += 1;
        self.open(segment, id, stream, memory.address());
        Ok(())
    }

    fn open(&mut self, segment: &Segment, id: SegmentId, stream: Stream, address: usize) {
        segment.set_unpackable(false);
        segment.set_cleaned(stream == Stream::Cleaned);
        segment.set_word(Word::new(State::Filling, address));
        let place = match stream {
            Stream::Fresh => &mut self.fresh,
            Stream::Cleaned => &mut self.cleaned,
        };
        // A segment that was not closed would stay in state `Filling` for ever.
        debug_assert!(place.is_none(), "a segment is begun beside one that is being filled");
        *place = Some(Filling { id, next: 0 });
    }

    /// Whether full segments of the cleaned stream wait to be written. Segments that died or are filled again
    /// do not count: otherwise nothing else would be cleaned, and if no position on disk is free, no thread
    /// takes them out.
    pub fn has_dirty_cleaned(&mut self, table: &SegmentTable) -> bool {
        let waits = |segment: &Segment| segment.word().state() == State::Dirty && segment.is_cleaned();
        while let Some(id) = self.dirty_cleaned.front() {
            if table.get(*id).is_some_and(waits) {
                return true;
            }
            self.dirty_cleaned.pop_front();
        }
        false
    }

    /// Takes the coldest dirty segment and makes it `Frozen`: cleaned ones first, then by second chance.
    pub fn freeze_victim(&mut self, table: &SegmentTable, cleaned_only: bool) -> Option<SegmentId> {
        while let Some(id) = self.dirty_cleaned.pop_front() {
            if self.freeze(table, id) {
                return Some(id);
            }
        }
        if cleaned_only {
            return None;
        }
        while let Some(id) = self.dirty_unpackable.pop_front() {
            if self.freeze(table, id) {
                return Some(id);
            }
        }
        self.freeze_coldest(table)
    }

    /// Whether there may be a dirty segment for which packing has not failed.
    pub fn has_untried(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Takes the coldest dirty segment for which packing has not failed, and makes it `Frozen`.
    pub fn freeze_coldest(&mut self, table: &SegmentTable) -> Option<SegmentId> {
        let mut chances = self.dirty.len();
        while let Some(id) = self.dirty.pop_front() {
            let Some(segment) = table.get(id) else { continue };
            if segment.word().state() != State::Dirty || segment.is_unpackable() {
                continue;
            }
            if chances > 0 && segment.take_touch() {
                chances -= 1;
                self.dirty.push_back(id);
                continue;
            }
            if self.freeze(table, id) {
                return Some(id);
            }
        }
        None
    }

    /// Lets segments be packed again for which only the weak packer has failed.
    pub fn reconsider_unpackable(&mut self, table: &SegmentTable) {
        if !std::mem::take(&mut self.weakly_tried) {
            return;
        }
        while let Some(id) = self.dirty_unpackable.pop_front() {
            let Some(segment) = table.get(id) else { continue };
            if segment.word().state() == State::Dirty {
                segment.set_unpackable(false);
                self.dirty.push_back(id);
            }
        }
    }

    /// Takes the oldest packed segment and makes it `PackedFrozen`.
    pub fn freeze_packed(&mut self, table: &SegmentTable) -> Option<SegmentId> {
        while let Some(id) = self.packed.pop_front() {
            let Some(segment) = table.get(id) else { continue };
            if segment.word().state() == State::Packed {
                segment.set_word(Word::new(State::PackedFrozen, 0));
                self.frozen_segments += 1;
                return Some(id);
            }
        }
        None
    }

    /// Ends the write of a packed segment.
    pub fn thaw_packed(&mut self, segment: &Segment, id: SegmentId, written: bool) {
        self.frozen_segments -= 1;
        if written {
            segment.set_word(Word::new(State::Spilled, 0));
        } else {
            segment.set_word(Word::new(State::Packed, 0));
            segment.set_position(None);
            self.packed.push_front(id);
        }
    }

    /// Marks a frozen segment as packed. Returns its RAM; the caller sweeps its leaves before the RAM is used
    /// again.
    pub fn pack(&mut self, segment: &Segment, id: SegmentId) -> Option<SegmentMemory> {
        let memory = segment.word().ram().and_then(MemoryPool::reclaim)?;
        segment.set_word(Word::new(State::Packed, 0));
        self.frozen_segments -= 1;
        self.ram_segments -= 1;
        self.packed.push_back(id);
        Some(memory)
    }

    fn freeze(&mut self, table: &SegmentTable, id: SegmentId) -> bool {
        let Some(segment) = table.get(id) else { return false };
        let word = segment.word();
        if word.state() != State::Dirty {
            return false;
        }
        segment.set_word(Word::new(State::Frozen, word.ram().unwrap_or(0)));
        self.dirty_segments -= 1;
        self.frozen_segments += 1;
        true
    }

    /// Ends the write of a frozen segment. Frees the segment if nothing in it lives any more.
    pub fn thaw(&mut self, segment: &Segment, id: SegmentId, written: bool) -> Option<Released> {
        self.frozen_segments -= 1;
        let address = segment.word().ram().unwrap_or(0);
        if written {
            segment.set_word(Word::new(State::Clean, address));
            self.clean_segments += 1;
            self.clean.push_back(id);
        } else {
            segment.set_word(Word::new(State::Dirty, address));
            segment.set_position(None);
            self.dirty_segments += 1;
            if segment.is_cleaned() {
                // It is still the first to be written, and until then nothing else is cleaned: with a disk
                // that can be read but not written, everything would otherwise end up in RAM.
                self.dirty_cleaned.push_front(id);
            } else if segment.is_unpackable() {
                self.dirty_unpackable.push_back(id);
            } else {
                self.dirty.push_front(id);
            }
            if segment.live() <= REFILL_LIVE {
                self.refill.push_back(id);
            }
        }
        (segment.live() == 0).then(|| self.release(segment, id)).flatten()
    }

    /// Frees a segment without live slots, unless its state forbids that for now.
    pub fn release(&mut self, segment: &Segment, id: SegmentId) -> Option<Released> {
        let word = segment.word();
        if segment.live() != 0 || segment.is_pinned() {
            return None;
        }
        match word.state() {
            State::Dirty => self.dirty_segments -= 1,
            State::Clean => self.clean_segments -= 1,
            State::Spilled | State::Packed => {}
            State::Free | State::Filling | State::Frozen | State::PackedFrozen => return None,
        }
        let memory = word.ram().and_then(MemoryPool::reclaim);
        if memory.is_some() {
            self.ram_segments -= 1;
        }
        let position = segment.position();
        segment.set_position(None);
        // Tickets of the old contents become stale, even if the number and the position are soon used again
        // for the same block.
        segment.set_generation(0);
        segment.set_word(Word::new(State::Free, 0));
        self.free_ids.push(id);
        Some(Released { memory, position, packed: word.is_packed() })
    }

    /// Takes the coldest clean segment and makes it `Spilled`; returns it with its RAM. The caller sweeps its
    /// leaves before the RAM is used again.
    pub fn evict_victim(&mut self, table: &SegmentTable) -> Option<(SegmentId, SegmentMemory)> {
        let mut chances = self.clean.len();
        while let Some(id) = self.clean.pop_front() {
            let Some(segment) = table.get(id) else { continue };
            if segment.word().state() != State::Clean {
                continue;
            }
            if chances > 0 && segment.take_touch() {
                chances -= 1;
                self.clean.push_back(id);
                continue;
            }
            return self.evict(segment, id);
        }
        None
    }

    /// Takes the RAM of one clean segment.
    pub fn evict(&mut self, segment: &Segment, id: SegmentId) -> Option<(SegmentId, SegmentMemory)> {
        let word = segment.word();
        if word.state() != State::Clean {
            return None;
        }
        let memory = word.ram().and_then(MemoryPool::reclaim)?;
        segment.set_word(Word::new(State::Spilled, 0));
        self.clean_segments -= 1;
        self.ram_segments -= 1;
        Some((id, memory))
    }

    /// The segment being filled.
    pub fn filling(&self, stream: Stream) -> Option<SegmentId> {
        let filling = match stream {
            Stream::Fresh => self.fresh,
            Stream::Cleaned => self.cleaned,
        };
        filling.map(|f| f.id)
    }

    /// For persistent caches: marks the segments with these numbers as in use and on disk. Slots are never
    /// claimed twice.
    pub fn restore(&mut self, used: &[u32]) {
        self.append_only = true;
        self.next_id = used.last().map_or(0, |last| last + 1);
        let mut used = used.iter().copied().peekable();
        for number in 0..self.next_id {
            if used.next_if_eq(&number).is_none() {
                self.free_ids.push(SegmentId(number));
            }
        }
    }

    /// Takes over the segments below this number from another process, in their states.
    pub(crate) fn adopt(&mut self, table: &SegmentTable, numbers: u32) {
        self.next_id = numbers;
        for id in (0..numbers).map(SegmentId) {
            let Some(segment) = table.get(id) else { continue };
            match segment.word().state() {
                State::Dirty => {
                    self.dirty.push_back(id);
                    self.dirty_segments += 1;
                    if segment.live() <= REFILL_LIVE {
                        self.refill.push_back(id);
                    }
                }
                State::Clean => {
                    self.clean.push_back(id);
                    self.clean_segments += 1;
                }
                State::Packed => self.packed.push_back(id),
                State::Free => self.free_ids.push(id),
                State::Spilled | State::Filling | State::Frozen | State::PackedFrozen => {}
            }
            self.ram_segments += u32::from(segment.word().ram().is_some());
        }
    }

    /// Removes and returns the segments that became full when all their slots were dead. The caller frees
    /// them.
    pub fn take_emptied(&mut self) -> Vec<SegmentId> {
        std::mem::take(&mut self.emptied)
    }

    /// Closes an epoch: every slot claimed so far can no longer be overwritten. Returns the segments with
    /// slots that are not on disk, pinned, and the slot up to which each has to be written. The caller has
    /// closed the gate.
    pub fn close_epoch(&mut self, table: &SegmentTable) -> Vec<(SegmentId, u16)> {
        let mut due = Vec::new();
        let claimed = |filling: Option<Filling>, id| {
            filling.filter(|f| f.id == id).and_then(|f| u16::try_from(f.next).ok())
        };
        let (fresh, cleaned) = (self.fresh, self.cleaned);
        // A number occurs twice if it was freed and used again.
        self.unsaved.sort_unstable();
        self.unsaved.dedup();
        self.unsaved.retain(|id| {
            let Some(segment) = table.get(*id) else { return false };
            let state = segment.word().state();
            if !matches!(state, State::Filling | State::Dirty) || segment.saved() == SLOT_COUNT {
                return false;
            }
            let end = claimed(fresh, *id).or(claimed(cleaned, *id)).unwrap_or(SLOT_COUNT);
            segment.set_stable(end);
            if end > segment.saved() {
                segment.set_pinned(true);
                due.push((*id, end));
            }
            true
        });
        due
    }

    /// Ends a commit's write of the segment's slots up to `saved`, whether it succeeded or not. A segment
    /// that is completely on disk is clean from now on; a segment that died meanwhile is freed.
    pub fn unpin(&mut self, segment: &Segment, id: SegmentId) -> Option<Released> {
        segment.set_pinned(false);
        if segment.word().state() == State::Dirty && segment.saved() == SLOT_COUNT {
            self.dirty_segments -= 1;
            self.clean_segments += 1;
            segment.set_word(Word::new(State::Clean, segment.word().ram().unwrap_or(0)));
            self.clean.push_back(id);
        }
        self.release(segment, id)
    }

    /// Ends a failed write of a frozen segment of a persistent cache: it is dirty again, and keeps its
    /// position.
    pub fn thaw_unsaved(&mut self, segment: &Segment, id: SegmentId) -> Option<Released> {
        self.frozen_segments -= 1;
        self.dirty_segments += 1;
        // A part of it may be on disk with this generation: no slot may get other contents with the same
        // generation.
        segment.set_stable(SLOT_COUNT);
        segment.set_word(Word::new(State::Dirty, segment.word().ram().unwrap_or(0)));
        // As in [`Log::thaw`].
        let again = if segment.is_cleaned() { &mut self.dirty_cleaned } else { &mut self.dirty };
        again.push_front(id);
        self.release(segment, id)
    }
}

#[cfg(test)]
mod tests;
