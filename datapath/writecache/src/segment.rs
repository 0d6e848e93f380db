//! A segment: 512 slots that move together between RAM and the overflow disk.
//!
//! | state | RAM | disk | overwritten in place | next |
//! |---|---|---|---|---|
//! | `Free` | - | - | - | `Filling` |
//! | `Filling` | yes | - | yes | `Dirty` when no slot is left |
//! | `Dirty` | yes | - | yes | `Frozen`; `Filling` again when it has many dead slots; `Free` |
//! | `Frozen` | yes | being written | no | `Clean`; `Packed`; `Dirty` when neither worked |
//! | `Packed` | packed | - | no | `PackedFrozen`; `Free` |
//! | `PackedFrozen` | packed | being written | no | `Spilled`; `Packed` when the write failed |
//! | `Clean` | yes | yes | no | `Spilled`; `Free` |
//! | `Spilled` | - | yes | no | `Free` |
//!
//! A segment of any state becomes `Free` when its last live slot dies, except that `Filling` and frozen
//! segments do so when they leave that state. State and RAM address share one word, so that the hit path
//! loads both at once. States change under the log's lock; see [`crate::map`] for what a change must do
//! afterwards.
//!
//! In a persistent cache, slots are claimed in order, and never again. Slots below [`Segment::stable`] belong
//! to a closed epoch and are not overwritten in place. Slots below [`Segment::saved`] are on disk, even while
//! the segment is still `Filling` or `Dirty`. Slots below [`Segment::logged`] are at least in the map. A
//! pinned segment is not freed, because a commit reads it.

use std::sync::{Arc, OnceLock};

use crate::index_memory::Piece;
use crate::memory_file::{MemoryFile, Record, RecordValue};
use crate::sync::UNDER_MODEL_CHECKER;
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::units::{BlockNumber, SEGMENT_BYTES, SLOT_COUNT, SLOTS, SegmentId, Slot};

/// The state of a segment; see the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not in use.
    Free = 0,
    /// Taking new blocks.
    Filling = 1,
    /// Full, in RAM only.
    Dirty = 2,
    /// Being written to the overflow disk.
    Frozen = 3,
    /// On disk, with a copy in RAM.
    Clean = 4,
    /// On disk only.
    Spilled = 5,
    /// Compressed in RAM.
    Packed = 6,
    /// Compressed in RAM, and being written to the overflow disk.
    PackedFrozen = 7,
}

/// State and RAM address, read together in one load.
#[derive(Clone, Copy, Debug)]
pub struct Word(usize);

const STATE_MASK: usize = 7;

impl State {
    /// The state with this number.
    pub(crate) fn of(number: u32) -> Option<Self> {
        Some(match number {
            0 => State::Free,
            1 => State::Filling,
            2 => State::Dirty,
            3 => State::Frozen,
            4 => State::Clean,
            5 => State::Spilled,
            6 => State::Packed,
            7 => State::PackedFrozen,
            _ => return None,
        })
    }
}

impl Word {
    /// A word with the given parts; `address` is 0 or a multiple of 2 MiB.
    pub fn new(state: State, address: usize) -> Self {
        debug_assert_eq!(address % SEGMENT_BYTES, 0);
        Self(address | state as usize)
    }

    /// The state.
    #[inline]
    pub fn state(self) -> State {
        match self.0 & STATE_MASK {
            1 => State::Filling,
            2 => State::Dirty,
            3 => State::Frozen,
            4 => State::Clean,
            5 => State::Spilled,
            6 => State::Packed,
            7 => State::PackedFrozen,
            _ => State::Free,
        }
    }

    /// The address of the segment's RAM, if it has any.
    #[inline]
    pub fn ram(self) -> Option<usize> {
        let address = self.0 & !STATE_MASK;
        (address != 0).then_some(address)
    }

    /// Whether the slots are in the packed form.
    #[inline]
    pub fn is_packed(self) -> bool {
        matches!(self.state(), State::Packed | State::PackedFrozen)
    }

    /// The address, if slots may be overwritten in place.
    #[inline]
    pub fn writable(self) -> Option<usize> {
        matches!(self.state(), State::Filling | State::Dirty).then(|| self.ram()).flatten()
    }
}

/// In `owners`: the slot is dead.
const DEAD: u32 = u32::MAX;

/// In `position`: not on disk.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// In `marks`: set by a hit, cleared by the search for cold segments.
const USED: u8 = 1;

/// In `marks`: set by a write, cleared by the dedup scan.
const CHANGED: u8 = 2;

type Owners = Piece<AtomicU32>;

/// The record of one segment, in a cache line of its own: a large cache's records are not in the processor's
/// caches, so each access should load one line only.
#[derive(Debug)]
#[repr(align(64))]
pub struct Segment {
    word: AtomicUsize,
    live: AtomicU32,
    /// [`USED`] and [`CHANGED`].
    marks: AtomicU8,
    /// Packing was tried and does not pay. Cleared when the segment is filled again.
    unpackable: AtomicBool,
    /// Filled by cleaning, and not written to disk since.
    cleaned: AtomicBool,
    /// A commit is reading the segment.
    pinned: AtomicBool,
    /// Slots below this are not overwritten in place.
    stable: AtomicU16,
    /// Slots below this are on disk.
    saved: AtomicU16,
    /// Slots below this are encrypted in the map of a persistent cache, or on disk.
    logged: AtomicU16,
    /// Position on the overflow disk.
    position: AtomicU32,
    /// Number of the write that put the segment at its position; part of the nonce.
    generation: AtomicU64,
    /// The block in each slot. Kept when the segment is freed, because the next user needs the memory again.
    owners: OnceLock<Owners>,
    /// Its record in the memory file, if the cache outlives the process.
    record: Option<Record>,
}

const _: () = assert!(UNDER_MODEL_CHECKER || size_of::<Segment>() == 64);

impl Default for Segment {
    fn default() -> Self {
        Self {
            word: AtomicUsize::new(0),
            live: AtomicU32::new(0),
            marks: AtomicU8::new(0),
            unpackable: AtomicBool::new(false),
            cleaned: AtomicBool::new(false),
            pinned: AtomicBool::new(false),
            stable: AtomicU16::new(0),
            saved: AtomicU16::new(0),
            logged: AtomicU16::new(0),
            position: AtomicU32::new(NOWHERE),
            generation: AtomicU64::new(0),
            owners: OnceLock::new(),
            record: None,
        }
    }
}

impl Segment {
    /// State and address.
    #[inline]
    pub fn word(&self) -> Word {
        Word(self.word.load(Ordering::Acquire))
    }

    /// Sets state and address. Only under the log's lock.
    pub fn set_word(&self, word: Word) {
        if let Some(record) = &self.record {
            record.set_state(word.state(), word.ram().is_some());
        }
        self.word.store(word.0, Ordering::Release);
    }

    /// Number of live slots.
    pub fn live(&self) -> u32 {
        self.live.load(Ordering::Acquire)
    }

    /// Marks the segment as recently used.
    #[inline]
    pub fn touch(&self) {
        self.mark(USED);
    }

    /// Marks the segment as used and overwritten. Under the leaf's write lock, before the block changes.
    #[inline]
    pub fn touch_to_write(&self) {
        self.mark(USED | CHANGED);
    }

    /// The marks are nearly always set already; then the cache line stays shared.
    #[inline]
    fn mark(&self, marks: u8) {
        if self.marks.load(Ordering::Relaxed) & marks != marks {
            self.marks.fetch_or(marks, Ordering::Relaxed);
        }
    }

    /// Clears the mark of use; returns whether it was set.
    pub fn take_touch(&self) -> bool {
        self.marks.fetch_and(!USED, Ordering::Relaxed) & USED != 0
    }

    /// Clears the mark of writes; returns whether it was set. Later writes set it again; earlier writes are
    /// visible to a thread that locks the block's leaf after this call.
    pub fn take_changed(&self) -> bool {
        self.marks.fetch_and(!CHANGED, Ordering::AcqRel) & CHANGED != 0
    }

    /// Whether packing was tried and does not pay.
    pub fn is_unpackable(&self) -> bool {
        self.unpackable.load(Ordering::Relaxed)
    }

    /// Sets the value of [`Segment::is_unpackable`].
    pub fn set_unpackable(&self, unpackable: bool) {
        self.unpackable.store(unpackable, Ordering::Relaxed);
    }

    /// Whether cleaning fills it, or filled it last.
    pub fn is_cleaned(&self) -> bool {
        self.cleaned.load(Ordering::Relaxed)
    }

    /// Sets the value of [`Segment::is_cleaned`].
    pub fn set_cleaned(&self, cleaned: bool) {
        self.cleaned.store(cleaned, Ordering::Relaxed);
    }

    /// The address of the segment's RAM, if this slot may be overwritten in place.
    #[inline]
    pub fn writable(&self, slot: Slot) -> Option<usize> {
        self.word().writable().filter(|_| slot.0 >= self.stable.load(Ordering::Acquire))
    }

    /// Forbids overwriting of slots below this. In a persistent cache, with its gate closed.
    pub fn set_stable(&self, slots: u16) {
        self.stable.store(slots, Ordering::Release);
    }

    /// Slots below this are on disk; for persistent caches.
    pub fn saved(&self) -> u16 {
        self.saved.load(Ordering::Acquire)
    }

    /// Sets the value of [`Segment::saved`].
    pub fn set_saved(&self, slots: u16) {
        self.saved.store(slots, Ordering::Release);
    }

    /// Slots below this, or below [`Segment::saved`], are durable; for persistent caches.
    pub fn logged(&self) -> u16 {
        self.logged.load(Ordering::Acquire)
    }

    /// Sets the value of [`Segment::logged`].
    pub fn set_logged(&self, slots: u16) {
        self.logged.store(slots, Ordering::Release);
    }

    /// Whether a commit reads the segment, so that it must not be freed.
    pub fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Acquire)
    }

    /// Sets the value of [`Segment::is_pinned`]. Under the log's lock.
    pub fn set_pinned(&self, pinned: bool) {
        self.pinned.store(pinned, Ordering::Release);
    }

    /// Position on the overflow disk.
    pub fn position(&self) -> Option<u32> {
        Some(self.position.load(Ordering::Acquire)).filter(|p| *p != NOWHERE)
    }

    /// Sets or clears the position.
    pub fn set_position(&self, position: Option<u32>) {
        if let Some(record) = &self.record {
            record.set_position(position);
        }
        self.position.store(position.unwrap_or(NOWHERE), Ordering::Release);
    }

    /// Generation of the copy on disk.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Sets the generation before a write to disk begins.
    pub fn set_generation(&self, generation: u64) {
        if let Some(record) = &self.record {
            record.set_generation(generation);
        }
        self.generation.store(generation, Ordering::Release);
    }

    /// Records for the next process which memory of the file the segment has. Called before its word says
    /// that it has some.
    pub(crate) fn set_memory(&self, number: u32) {
        if let Some(record) = &self.record {
            record.set_memory(number);
        }
    }

    /// Records for the next process where the packed slots are. Called before the word says that they are
    /// packed, and before earlier ones are freed.
    pub(crate) fn set_packed(&self, offset: Option<u64>) {
        if let (Some(record), Some(offset)) = (&self.record, offset) {
            record.set_packed(offset);
        }
    }

    /// Takes over the record of another process, in the state that follows from it; `address` is that of the
    /// segment's memory. The record in the file is unchanged until [`Segment::publish`].
    pub(crate) fn adopt(&self, found: &RecordValue, address: usize) {
        let state = match found.state {
            State::Free => State::Free,
            // The other process's write may have failed, or may still complete: it does not count.
            State::Filling | State::Dirty | State::Frozen => State::Dirty,
            State::Packed | State::PackedFrozen => State::Packed,
            State::Clean => State::Clean,
            State::Spilled => State::Spilled,
        };
        let is_on_disk = matches!(state, State::Clean | State::Spilled);
        let position = found.position.filter(|_| is_on_disk).unwrap_or(NOWHERE);
        self.position.store(position, Ordering::Release);
        self.generation.store(found.generation, Ordering::Release);
        self.word.store(Word::new(state, address).0, Ordering::Release);
    }

    /// Records the present state for the next process.
    pub(crate) fn publish(&self) {
        self.set_position(self.position());
        self.set_word(self.word());
    }

    fn owners(&self) -> &Owners {
        self.owners.get_or_init(|| Piece::new(|| AtomicU32::new(DEAD)))
    }

    /// Gives a slot to a block. Under the log's lock, in state `Filling`.
    pub fn claim(&self, slot: Slot, block: BlockNumber) {
        if let Some(owner) = self.owners().get(slot.0 as usize) {
            owner.store(block.0, Ordering::Release);
            self.live.fetch_add(1, Ordering::AcqRel);
            self.mark(CHANGED);
        }
    }

    /// Marks a slot as dead, because its block moved or was freed. Under the leaf's write lock. Returns how
    /// many slots are still live.
    #[inline]
    pub fn kill(&self, slot: Slot) -> u32 {
        if let Some(owner) = self.owners().get(slot.0 as usize) {
            owner.store(DEAD, Ordering::Release);
        }
        self.live.fetch_sub(1, Ordering::AcqRel).saturating_sub(1)
    }

    /// Makes the block that shares a slot its owner. Under the leaf's write lock, which covers both blocks.
    pub fn set_owner(&self, slot: Slot, block: BlockNumber) {
        if let Some(owner) = self.owners().get(slot.0 as usize) {
            owner.store(block.0, Ordering::Release);
        }
    }

    /// The block of a live slot; for a shared slot, its owner.
    pub fn owner(&self, slot: Slot) -> Option<BlockNumber> {
        let owner = self.owners.get()?.get(slot.0 as usize)?.load(Ordering::Acquire);
        (owner != DEAD).then_some(BlockNumber(owner))
    }

    /// Prefetches the memory that [`Segment::kill`] will change.
    #[inline]
    pub fn expect_kill(&self, slot: Slot) {
        if !UNDER_MODEL_CHECKER {
            std::hint::black_box(self.owner(slot));
        }
    }

    /// The live slots with their blocks, in order of slots.
    pub fn live_slots(&self) -> impl Iterator<Item = (Slot, BlockNumber)> + '_ {
        (0..SLOT_COUNT).filter_map(|slot| Some((Slot(slot), self.owner(Slot(slot))?)))
    }

    /// The first dead slot at or after `from`.
    pub fn next_dead(&self, from: usize) -> Option<Slot> {
        let owners = self.owners();
        (from..SLOTS)
            .find(|index| owners.get(*index).is_some_and(|o| o.load(Ordering::Acquire) == DEAD))
            .and_then(|index| u16::try_from(index).ok())
            .map(Slot)
    }
}

/// All segments of a volume, by number; records are made as numbers are first used and never move.
#[derive(Debug)]
pub struct SegmentTable {
    /// Allocated when first used, so that the table of a small volume is small.
    shelves: Box<[OnceLock<Shelf>]>,
    groups: usize,
    /// The memory file with the records for the next process. Declared after the records that point into it,
    /// so dropped later.
    file: Option<Arc<MemoryFile>>,
}

type Group = Box<[Segment]>;
type Shelf = Box<[OnceLock<Group>]>;

const GROUP: usize = SLOTS;

/// Number of groups on a shelf: 128 GiB of cache.
const SHELF: usize = 128;

/// Memory of a segment's record and owners in bytes, for the budget.
pub const RECORD_BYTES: u64 = (size_of::<Segment>() + SLOTS * size_of::<AtomicU32>()) as u64;

impl SegmentTable {
    /// A table for up to `limit` segments.
    pub fn new(limit: u32) -> Self {
        Self::with_file(limit, None)
    }

    /// Like [`SegmentTable::new`], for a cache whose memory is in a file.
    pub(crate) fn with_file(limit: u32, file: Option<Arc<MemoryFile>>) -> Self {
        let groups = (limit as usize).div_ceil(GROUP);
        Self { shelves: (0..groups.div_ceil(SHELF)).map(|_| OnceLock::new()).collect(), groups, file }
    }

    /// Reserves memory for the record of this segment in the file. `false`: there is none. Under the log's
    /// lock.
    pub(crate) fn reserve(&self, id: SegmentId) -> bool {
        self.file.as_ref().is_none_or(|file| file.reserve_record(id))
    }

    #[cold]
    fn make_group(&self, number: usize) -> Group {
        let first = number * GROUP;
        let record = |index: usize| {
            let file = self.file.as_ref()?;
            file.record(SegmentId(u32::try_from(first + index).ok()?))
        };
        (0..GROUP).map(|index| Segment { record: record(index), ..Segment::default() }).collect()
    }

    /// The record, or `None` past the limit.
    #[inline]
    pub fn get(&self, id: SegmentId) -> Option<&Segment> {
        let id = id.0 as usize;
        let (number, shelf) = (id / GROUP, id / GROUP / SHELF);
        let groups = || SHELF.min(self.groups.saturating_sub(shelf * SHELF));
        let shelf = self.shelves.get(shelf)?.get_or_init(|| (0..groups()).map(|_| OnceLock::new()).collect());
        let group = shelf.get(number % SHELF)?;
        let group = group.get_or_init(|| self.make_group(number));
        group.get(id % GROUP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_state_and_address() {
        let word = Word::new(State::Clean, 6 * SEGMENT_BYTES);
        assert_eq!(word.state(), State::Clean);
        assert_eq!(word.ram(), Some(6 * SEGMENT_BYTES));
        assert_eq!(word.writable(), None);
        assert_eq!(Word::new(State::Dirty, SEGMENT_BYTES).writable(), Some(SEGMENT_BYTES));
        assert_eq!(Word::new(State::Spilled, 0).ram(), None);
    }

    #[test]
    fn a_table_takes_what_is_used_of_it() {
        let table = SegmentTable::new(SegmentId::LIMIT);
        assert!(size_of_val(&*table.shelves) <= 4 << 10);
        let last = SegmentId(SegmentId::LIMIT - 1);
        for id in [SegmentId(0), last] {
            table.get(id).unwrap().set_generation(u64::from(id.0) + 1);
        }
        assert_eq!(table.get(SegmentId(0)).unwrap().generation(), 1);
        assert_eq!(table.get(last).unwrap().generation(), u64::from(SegmentId::LIMIT));
        assert_eq!(table.shelves.iter().filter(|shelf| shelf.get().is_some()).count(), 2);
        // Only as much as needed, in whole groups.
        let small = SegmentTable::new(4);
        assert!(
            small.get(SegmentId(GROUP as u32 - 1)).is_some() && small.get(SegmentId(GROUP as u32)).is_none()
        );
    }

    #[test]
    fn slots_live_and_die() {
        let segment = Segment::default();
        segment.claim(Slot(0), BlockNumber(9));
        segment.claim(Slot(1), BlockNumber(8));
        assert_eq!(segment.live(), 2);
        assert_eq!(segment.kill(Slot(0)), 1);
        assert_eq!(segment.next_dead(0), Some(Slot(0)));
        assert_eq!(segment.next_dead(1), Some(Slot(2)));
        assert_eq!(segment.live_slots().collect::<Vec<_>>(), vec![(Slot(1), BlockNumber(8))]);
    }
}
