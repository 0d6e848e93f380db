//! The log of a cache: which segment is filled next, which are full, clean, free. Bookkeeping only.
//!
//! Everything here happens under one lock, held for some tens of nanoseconds, never across I/O; longer where the emptiest
//! segment is looked for, and once in as many full segments as there are numbers, when a queue is gone through. The
//! queues may hold entries that are out of date (the segment was freed or has another state by now):
//! whoever takes an entry checks the segment's state.

use std::collections::VecDeque;

use crate::clean::MIN_GAIN;
use crate::memory::{MemoryPool, SegmentMemory};
use crate::segment::{Segment, SegmentTable, State, Word};
use crate::units::{BlockNumber, SLOT_COUNT, SegmentId, Slot};

/// A dirty segment with at most this many live slots is filled again instead of being spilled.
pub const REFILL_LIVE: u32 = (SLOT_COUNT as u32 / 4) * 3;

/// Which blocks go together: those written by the machine, and those moved by cleaning, which are older.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Written by the machine.
    Fresh,
    /// Moved by cleaning.
    Cleaned,
}

/// A segment that takes blocks, and where to look for its next dead slot.
#[derive(Clone, Copy, Debug)]
struct Filling {
    id: SegmentId,
    next: usize,
}

/// Where a new block goes.
#[derive(Clone, Copy, Debug)]
pub struct NewSlot {
    /// The segment.
    pub id: SegmentId,
    /// The slot.
    pub slot: Slot,
    /// The segment's RAM.
    pub address: usize,
}

/// What freeing a segment gave back.
#[derive(Debug, Default)]
pub struct Released {
    /// Its RAM.
    pub memory: Option<SegmentMemory>,
    /// Its place on disk.
    pub position: Option<u32>,
    /// It was packed.
    pub packed: bool,
}

/// See the file's head.
#[derive(Debug, Default)]
pub struct Log {
    fresh: Option<Filling>,
    cleaned: Option<Filling>,
    dirty: VecDeque<SegmentId>,
    /// Full segments of the cleaned stream: spilled first, because cleaning waits for their RAM.
    dirty_cleaned: VecDeque<SegmentId>,
    /// Dirty segments that do not pack: spilled before the others.
    dirty_unpackable: VecDeque<SegmentId>,
    /// Some of those were tried by the weak packer only.
    pub weakly_tried: bool,
    packed: VecDeque<SegmentId>,
    clean: VecDeque<SegmentId>,
    refill: VecDeque<SegmentId>,
    /// Persistent: slots are claimed in order and never again.
    append_only: bool,
    /// Persistent: segments with RAM that may have slots which are not on disk.
    unsaved: Vec<SegmentId>,
    /// Persistent: segments that were full and dead at once.
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

/// Entries of a queue, of a cache with so many numbers, that are not looked at for being out of date.
fn most_queued(numbers: u32) -> usize {
    2 * numbers as usize + 64
}

/// Whether a segment that had room again still has.
fn is_refillable(segment: &Segment) -> bool {
    segment.word().state() == State::Dirty && segment.live() <= REFILL_LIVE
}

impl Log {
    /// Numbers ever used: what the records cost.
    pub fn numbers_used(&self) -> u32 {
        self.next_id
    }

    /// A slot in the segment being filled, claimed for `block`; `None` when a new segment is needed.
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
            // All that was put in died again: begin anew.
            filling.next = 1;
            segment.claim(Slot(0), block);
            return Some(NewSlot { id, slot: Slot(0), address: segment.word().ram()? });
        }
        *place = None;
        self.close(segment, id, stream);
        self.prune(table, most_queued(self.next_id));
        None
    }

    /// Takes out of queues that are longer than `most` what has another state by now, and the earlier of two entries. What
    /// dies before anybody takes it out would stay there.
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

    /// Whether a slot is to be had without taking memory. With `any_dead`, also where a dirty segment has but a few.
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

    /// Goes on filling a dirty segment that has many dead slots. Whether there was one.
    pub fn refill(&mut self, table: &SegmentTable, stream: Stream) -> bool {
        while let Some(id) = self.refill.pop_front() {
            let Some(segment) = table.get(id).filter(|segment| is_refillable(segment)) else { continue };
            self.dirty_segments -= 1;
            self.open(segment, id, stream, segment.word().ram().unwrap_or(0));
            return true;
        }
        false
    }

    /// Goes on filling the dirty segment with the most dead slots, few as they may be: for a cache that has no
    /// other way to get room. Whether there was one.
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

    /// Remembers that a dirty segment has room again.
    pub fn has_room(&mut self, id: SegmentId) {
        if !self.append_only {
            self.refill.push_back(id);
        }
    }

    /// Begins to fill a new segment in `memory`, which has this number in a memory file; gives it back if no number of a segment is
    /// left, or no memory for its record.
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
        // One that was not closed would be filling for ever.
        debug_assert!(place.is_none(), "a segment is begun beside one that is being filled");
        *place = Some(Filling { id, next: 0 });
    }

    /// Whether full segments of the cleaned stream wait. Those that died or are filled again do not count: nothing else is cleaned
    /// meanwhile, and where no place on disk is to be had nobody takes them out.
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

    /// The coldest dirty segment, now `Frozen`: cleaned ones first, then by second chance.
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

    /// Whether there may be a dirty segment that packing was not tried on in vain.
    pub fn has_untried(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// The coldest dirty segment that packing was not tried on in vain, now `Frozen`.
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

    /// Lets segments that did not pack be tried once more, where only the weak packer had tried them.
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

    /// The oldest packed segment, now `PackedFrozen`.
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

    /// The write of a packed segment is over.
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

    /// A frozen segment was packed. Returns its RAM; the caller sweeps its leaves before anybody else gets it.
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

    /// The write of a frozen segment is over. Frees it where nothing in it lives any more.
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
                // Still the first to be written, and until then nothing else is cleaned: with a disk that reads
                // and does not write, everything would end up in RAM.
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
        // Tickets of what was here hold no more, also when the number and the place are soon used again for
        // the same block.
        segment.set_generation(0);
        segment.set_word(Word::new(State::Free, 0));
        self.free_ids.push(id);
        Some(Released { memory, position, packed: word.is_packed() })
    }

    /// The coldest clean segment, now `Spilled`, with the RAM that it had. The caller sweeps its leaves
    /// before anybody else gets that RAM.
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

    /// Persistent caches: the segments with these numbers are in use, on disk, and slots are never claimed twice.
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

    /// Takes over the segments below this number from another process, in the states that they have.
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

    /// Segments that were full and dead at once, to be freed.
    pub fn take_emptied(&mut self) -> Vec<SegmentId> {
        std::mem::take(&mut self.emptied)
    }

    /// Closes an epoch: every slot claimed so far is closed to overwriting. Returns the segments with slots
    /// that are not on disk, pinned, and up to which slot they have to be written. With the gate closed.
    pub fn close_epoch(&mut self, table: &SegmentTable) -> Vec<(SegmentId, u16)> {
        let mut due = Vec::new();
        let claimed = |filling: Option<Filling>, id| {
            filling.filter(|f| f.id == id).and_then(|f| u16::try_from(f.next).ok())
        };
        let (fresh, cleaned) = (self.fresh, self.cleaned);
        // A number may be there twice, when it was freed and used again.
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

    /// A commit has written the segment's slots up to `saved`, or failed to. What is whole on disk is clean
    /// from now on; what died meanwhile is freed.
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

    /// The write of a frozen segment of a persistent cache failed: it is dirty again, and keeps its place.
    pub fn thaw_unsaved(&mut self, segment: &Segment, id: SegmentId) -> Option<Released> {
        self.frozen_segments -= 1;
        self.dirty_segments += 1;
        // A part of it may be on disk, under this generation: no slot gets other contents under it.
        segment.set_stable(SLOT_COUNT);
        segment.set_word(Word::new(State::Dirty, segment.word().ram().unwrap_or(0)));
        // As in `thaw`.
        let again = if segment.is_cleaned() { &mut self.dirty_cleaned } else { &mut self.dirty };
        again.push_front(id);
        self.release(segment, id)
    }
}

#[cfg(test)]
mod tests;
