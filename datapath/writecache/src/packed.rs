//! Packed segments: each live slot compressed with LZ4, in RAM, between the dirty segments and the disk.
//!
//! A packed segment is immutable: its slots are read, or die, until it is spilled or freed. Where many have
//! died it is replaced by a smaller one, with the same slots ([`PackedTable::shrink`]). Whether packing pays is tried on a few slots first; a slot that does not get smaller is kept as it is.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory::{AlignedBuffer, copy_frozen};
use crate::segment::Segment;
use crate::sync::RwLock;
use crate::units::{SLOT_COUNT, SLOTS, SegmentId, Slot};
use headwater_block::BLOCK_BYTES;
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

const BLOCK: usize = BLOCK_BYTES as usize;

/// Slots begin at multiples of this in the blob, so that 16 bits are enough to say where.
const UNIT: usize = 32;

/// Slots that are tried before a whole segment is packed.
const SAMPLES: usize = 8;

/// How much packing has to leave at most, in tenths, so that it is worth its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worth(usize);

impl Worth {
    /// Where cold segments can go to a disk instead: it has to save a third.
    pub const BESIDE_A_DISK: Self = Self(7);
    /// Where packing is the only way to get room: whatever it saves, a tenth at least.
    pub const ALONE: Self = Self(9);

    fn most(self, bytes: usize) -> usize {
        bytes * self.0 / 10
    }
}

/// One packed segment.
pub struct Packed {
    blob: AlignedBuffer,
    /// Where each slot begins and ends, in units; equal for a slot that was dead.
    starts: Box<[u16]>,
    /// Slots that were live when it was made.
    live: u32,
    /// Bytes that it takes, for the budget.
    bytes: u64,
}

impl Packed {
    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn new(scratch: &[u8], starts: Vec<u16>, live: u32) -> Option<Self> {
        let mut blob = AlignedBuffer::new(scratch.len())?;
        blob.get_mut(..scratch.len())?.copy_from_slice(scratch);
        let bytes = (blob.len() + starts.len() * 2 + size_of::<Self>()) as u64;
        Some(Self { blob, starts: starts.into_boxed_slice(), live, bytes })
    }

    /// Where a slot's entry is in the blob; empty for a slot that was dead.
    fn entry(&self, slot: Slot) -> Option<&[u8]> {
        let index = usize::from(slot.0);
        let (start, end) = (self.starts.get(index)?, self.starts.get(index + 1)?);
        self.blob.get(usize::from(*start) * UNIT..usize::from(*end) * UNIT)
    }

    /// The same without the slots that died since, where enough of them did.
    fn without_dead(&self, segment: &Segment) -> Option<Self> {
        let live = segment.live();
        if live == 0 || live > self.live / 4 * 3 {
            return None;
        }
        let mut scratch = Vec::new();
        let mut starts = Vec::with_capacity(SLOTS + 1);
        for slot in 0..SLOT_COUNT {
            starts.push(u16::try_from(scratch.len() / UNIT).ok()?);
            if segment.owner(Slot(slot)).is_some() {
                scratch.extend_from_slice(self.entry(Slot(slot))?);
            }
        }
        starts.push(u16::try_from(scratch.len() / UNIT).ok()?);
        Self::new(&scratch, starts, live).filter(|smaller| smaller.bytes < self.bytes)
    }

    /// Unpacks a slot. `false`: it was dead when the segment was packed.
    pub fn unpack(&self, slot: Slot, into: &mut [u8; BLOCK]) -> bool {
        let Some(entry) = self.entry(slot) else { return false };
        let Some((head, body)) = entry.split_at_checked(2) else { return false };
        let len = usize::from(u16::from_le_bytes([
            head.first().copied().unwrap_or(0),
            head.last().copied().unwrap_or(0),
        ]));
        let Some(body) = body.get(..len) else { return false };
        if len == BLOCK {
            into.copy_from_slice(body);
            return true;
        }
        decompress_into(body, into).is_ok_and(|written| written == BLOCK)
    }
}

/// Packs segments, one after the other; keeps its buffers.
#[derive(Default)]
pub struct Packer {
    table: CompressTable,
    scratch: Vec<u8>,
}

impl Packer {
    /// Packs the live slots of a frozen segment. `None`: that would not pay.
    pub fn pack(&mut self, segment: &Segment, address: usize, worth: Worth) -> Option<Packed> {
        let live = usize::try_from(segment.live()).ok()?.max(1);
        if !self.sample_pays(segment, address, live, worth) {
            return None;
        }
        let most = worth.most(live * BLOCK);
        self.scratch.clear();
        let mut starts = Vec::with_capacity(SLOTS + 1);
        for slot in 0..u16::try_from(SLOTS).ok()? {
            starts.push(u16::try_from(self.scratch.len() / UNIT).ok()?);
            if segment.owner(Slot(slot)).is_none() {
                continue;
            }
            let mut plain = [0; BLOCK];
            copy_frozen(address, Slot(slot), &mut plain);
            self.append(&plain)?;
            if self.scratch.len() > most {
                return None;
            }
        }
        starts.push(u16::try_from(self.scratch.len() / UNIT).ok()?);
        Packed::new(&self.scratch, starts, segment.live())
    }

    fn append(&mut self, plain: &[u8; BLOCK]) -> Option<()> {
        let at = self.scratch.len();
        self.scratch.resize(at + 2 + get_maximum_output_size(BLOCK), 0);
        let body = self.scratch.get_mut(at + 2..)?;
        let mut len = compress_into_with_table(plain, body, &mut self.table).unwrap_or(BLOCK);
        if len >= BLOCK {
            len = BLOCK;
            body.get_mut(..BLOCK)?.copy_from_slice(plain);
        }
        let header = u16::try_from(len).ok()?.to_le_bytes();
        self.scratch.get_mut(at..at + 2)?.copy_from_slice(&header);
        self.scratch.resize((at + 2 + len).next_multiple_of(UNIT), 0);
        Some(())
    }

    fn sample_pays(&mut self, segment: &Segment, address: usize, live: usize, worth: Worth) -> bool {
        let mut plain = [0; BLOCK];
        self.scratch.clear();
        let mut tried = 0;
        for (slot, _) in segment.live_slots().step_by(live.div_ceil(SAMPLES)) {
            copy_frozen(address, slot, &mut plain);
            if self.append(&plain).is_none() {
                return false;
            }
            tried += 1;
        }
        self.scratch.len() <= worth.most(tried * BLOCK)
    }
}

/// The packed segments of a cache.
#[derive(Default)]
pub struct PackedTable {
    segments: RwLock<HashMap<SegmentId, Arc<Packed>>>,
    bytes: AtomicU64,
}

impl PackedTable {
    /// Memory of all packed segments.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The packed form of a segment.
    pub fn get(&self, id: SegmentId) -> Option<Arc<Packed>> {
        self.segments.read().get(&id).cloned()
    }

    /// Adds one.
    pub fn insert(&self, id: SegmentId, packed: Packed) {
        self.bytes.fetch_add(packed.bytes, Ordering::Relaxed);
        self.segments.write().insert(id, Arc::new(packed));
    }

    /// Replaces those that lost a quarter of their slots or more by smaller ones. Returns the bytes that
    /// this freed.
    pub fn shrink<'a>(&self, record: impl Fn(SegmentId) -> Option<&'a Segment>) -> u64 {
        let mut ids: Vec<SegmentId> = self.segments.read().keys().copied().collect();
        // In the same order each time, so that a schedule can be explored again.
        ids.sort_unstable_by_key(|id| id.0);
        let mut freed = 0;
        for id in ids {
            let (Some(packed), Some(segment)) = (self.get(id), record(id)) else { continue };
            let Some(smaller) = packed.without_dead(segment) else { continue };
            let mut segments = self.segments.write();
            // It may have been freed, and its number used again, meanwhile.
            let Some(place) = segments.get_mut(&id).filter(|place| Arc::ptr_eq(place, &packed)) else {
                continue;
            };
            freed += packed.bytes.saturating_sub(smaller.bytes);
            *place = Arc::new(smaller);
        }
        self.bytes.fetch_sub(freed, Ordering::Relaxed);
        freed
    }

    /// Takes one out; its memory goes with its last reader. Returns its bytes.
    pub fn remove(&self, id: SegmentId) -> u64 {
        let bytes = self.segments.write().remove(&id).map_or(0, |packed| packed.bytes);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Map;
    use crate::memory::MemoryPool;
    use crate::memory::copy_in;
    use crate::units::BlockNumber;

    fn segment(fill: impl Fn(u16) -> Vec<u8>) -> (Segment, Arc<MemoryPool>, usize) {
        let pool = MemoryPool::new();
        let memory = pool.take().unwrap();
        let segment = Segment::default();
        let map = Map::new(512);
        for slot in 0..400 {
            segment.claim(Slot(slot), BlockNumber(u32::from(slot)));
            copy_in(memory.address(), Slot(slot), 0, &fill(slot), &map.write(0).unwrap());
        }
        segment.kill(Slot(7));
        (segment, pool, memory.address())
    }

    fn mixed(slot: u16) -> Vec<u8> {
        let mut bytes = vec![slot as u8; BLOCK];
        if slot.is_multiple_of(10) {
            let mut state = u32::from(slot) + 1;
            bytes.iter_mut().for_each(|b| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *b = (state >> 24) as u8;
            });
        }
        bytes
    }

    #[test]
    fn what_was_packed_is_unpacked() {
        let (segment, _pool, address) = segment(mixed);
        let packed = Packer::default().pack(&segment, address, Worth::BESIDE_A_DISK).unwrap();
        assert!(packed.bytes() < 400 * BLOCK as u64 / 3);
        let mut out = [0; BLOCK];
        for slot in 0..512 {
            let live = slot < 400 && slot != 7;
            assert_eq!(packed.unpack(Slot(slot), &mut out), live, "slot {slot}");
            assert!(!live || out[..] == mixed(slot)[..], "slot {slot}");
        }
        for slot in 0..200 {
            segment.kill(Slot(slot));
        }
        let smaller = packed.without_dead(&segment).unwrap();
        assert!(smaller.bytes() < packed.bytes() * 2 / 3);
        assert!(smaller.unpack(Slot(300), &mut out) && out[..] == mixed(300)[..]);
        assert!(!smaller.unpack(Slot(100), &mut out));
        let table = PackedTable::default();
        let bytes = packed.bytes();
        table.insert(SegmentId(3), packed);
        assert_eq!(table.bytes(), bytes);
        assert!(table.get(SegmentId(3)).is_some() && table.get(SegmentId(4)).is_none());
        assert_eq!(table.remove(SegmentId(3)), bytes);
        assert_eq!((table.bytes(), table.remove(SegmentId(3))), (0, 0));
    }

    #[test]
    fn what_does_not_get_smaller_is_left_alone() {
        let (segment, _pool, address) = segment(|slot| mixed(slot * 10));
        assert!(Packer::default().pack(&segment, address, Worth::BESIDE_A_DISK).is_none());
    }
}
