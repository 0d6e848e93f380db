//! The stored record of a segment, for the next process: a copy of the segment's own record on the heap.
//!
//! A segment's record changes under the log's lock, and is changed here first. So no thread acts on a state
//! that is not stored yet.
//!
//! `unsafe` here: a record is accessed through its address in a mapping. Its owner,
//! [`crate::segment::SegmentTable`], keeps the file alive.
#![expect(unsafe_code, reason = "records are reached by their addresses; see above")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{MemoryFile, crash};
use crate::segment::{NOWHERE, State};
use crate::units::SegmentId;

/// In `state`: the segment has memory.
const HAS_MEMORY: u32 = 8;

/// The record in the file. All zero: a segment that was never used.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Stored {
    /// The state, and [`HAS_MEMORY`].
    state: AtomicU32,
    /// The number of its memory. Stored before a state with [`HAS_MEMORY`], and unchanged while the state has
    /// it.
    memory: AtomicU32,
    generation: AtomicU64,
    /// The position on the overflow disk, plus one.
    position: AtomicU32,
    unused: u32,
    /// Offset of its packed slots in the file.
    packed: AtomicU64,
}

const _: () = assert!(size_of::<Stored>() == 64 && std::mem::offset_of!(Stored, packed) == 24);

/// The record of one segment.
#[derive(Debug)]
pub(crate) struct Record(NonNull<Stored>);

// SAFETY: atomics only, which any thread may use.
unsafe impl Send for Record {}
// SAFETY: as above.
unsafe impl Sync for Record {}

impl Record {
    fn stored(&self) -> Option<&Stored> {
        crash::point();
        // SAFETY: the address is that of a record, in a file that the owner has as long as it has this.
        let stored = unsafe { self.0.as_ref() };
        (!crash::is_dead()).then_some(stored)
    }

    pub(crate) fn set_state(&self, state: State, has_memory: bool) {
        let value = state as u32 | if has_memory { HAS_MEMORY } else { 0 };
        self.stored().into_iter().for_each(|stored| stored.state.store(value, Ordering::Release));
    }

    pub(crate) fn set_memory(&self, number: u32) {
        self.stored().into_iter().for_each(|stored| stored.memory.store(number, Ordering::Release));
    }

    pub(crate) fn set_generation(&self, generation: u64) {
        self.stored().into_iter().for_each(|stored| stored.generation.store(generation, Ordering::Release));
    }

    pub(crate) fn set_position(&self, position: Option<u32>) {
        let value = position.map_or(0, |position| position + 1);
        self.stored().into_iter().for_each(|stored| stored.position.store(value, Ordering::Release));
    }

    pub(crate) fn set_packed(&self, offset: u64) {
        self.stored().into_iter().for_each(|stored| stored.packed.store(offset, Ordering::Release));
    }
}

impl MemoryFile {
    /// The record of a segment. The caller must keep the file alive while it has the record.
    pub(crate) fn record(&self, id: SegmentId) -> Option<Record> {
        let address = self.address_of_record(id)?;
        NonNull::new(std::ptr::with_exposed_provenance_mut(address)).map(Record)
    }
}

/// The contents of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordValue {
    pub(crate) state: State,
    pub(crate) piece: Option<u32>,
    pub(crate) generation: u64,
    pub(crate) position: Option<u32>,
    pub(crate) packed: u64,
}

impl RecordValue {
    /// Decodes the bytes of a record. `None`: the state is unknown.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let small = |at: usize| bytes.get(at..at + 4)?.first_chunk().copied().map(u32::from_le_bytes);
        let number = |at: usize| bytes.get(at..at + 8)?.first_chunk().copied().map(u64::from_le_bytes);
        let value = small(0)?;
        let position = small(16)?.checked_sub(1);
        Some(Self {
            state: State::of(value & (HAS_MEMORY - 1)).filter(|_| value < 2 * HAS_MEMORY)?,
            piece: small(4).filter(|_| value & HAS_MEMORY != 0),
            generation: number(8)?,
            position: position.filter(|position| *position != NOWHERE),
            packed: number(24)?,
        })
    }
}
