//! Packed segments: segments whose live slots are compressed in RAM; the step between dirty segments and the
//! disk.
//!
//! A packed segment is immutable: its slots are read, or die, until it is spilled or freed. If many of them
//! have died, it is replaced by a smaller one with the same slots ([`PackedTable::shrink`]). Packing is first
//! tried on a few slots to see whether it pays; a slot that does not get smaller is kept uncompressed. Each
//! slot is compressed by itself, so that a read decompresses 4 KiB; docs/decisions/0014 measures groups of
//! slots and dictionaries.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::clean::MIN_GAIN;
use crate::memory::{AlignedBuffer, with_frozen};
use crate::memory_file::{MemoryFile, Run};
use crate::segment::Segment;
use crate::sync::RwLock;
use crate::units::{SLOT_COUNT, SLOTS, SegmentId, Slot};
use headwater_block::BLOCK_BYTES;
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into};
use zstd::bulk::{Compressor, Decompressor};

const BLOCK: usize = BLOCK_BYTES as usize;

/// Slots that are tried before a whole segment is packed.
const SAMPLES: usize = 8;

/// The level of zstd. On 4 KiB, level 1 is no faster, and level 6 saves another 2 % at a third of the speed.
const ZSTD_LEVEL: i32 = 3;

/// The purpose of packing, which determines the algorithm and how much it has to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Cold segments can be spilled instead: LZ4, which hardly delays that; it has to save a third.
    BesideADisk,
    /// There is no other way to get space: zstd, which is several times slower and compresses a quarter
    /// better; it has to save a tenth.
    Alone,
}

impl Packing {
    /// The most bytes to which this many may be compressed for packing to pay.
    fn most(self, bytes: usize) -> usize {
        let tenths = match self {
            Packing::BesideADisk => 7,
            Packing::Alone => 9,
        };
        bytes * tenths / 10
    }
}

/// How many slots of a packed segment must have died before a smaller one replaces it, which costs a copy of
/// the live ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dead {
    /// A quarter of its slots.
    Quarter,
    /// [`MIN_GAIN`] slots: for a cache that has no other way to get space.
    Few,
}

impl Dead {
    /// The most slots that may still live if `live` slots did when the segment was packed.
    fn most_live(self, live: u32) -> u32 {
        let after_quarter = live / 4 * 3;
        match self {
            Dead::Quarter => after_quarter,
            Dead::Few => after_quarter.max(live.saturating_sub(MIN_GAIN)),
        }
    }
}

thread_local! {
    /// The decompressor of a thread, about 100 KiB. The threads that read packed blocks are few and live
    /// long.
    static UNPACKER: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

fn unpack_zstd(entry: &[u8], into: &mut [u8; BLOCK]) -> bool {
    UNPACKER.with_borrow_mut(|context| {
        if context.is_none() {
            *context = Decompressor::new().ok();
        }
        let written = context.as_mut().and_then(|c| c.decompress_to_buffer(entry, &mut into[..]).ok());
        written == Some(BLOCK)
    })
}

/// The memory of a packed segment.
enum Blob {
    Process(AlignedBuffer),
    /// In a memory file, after a header ([`Header`]).
    File(Run),
}

impl Blob {
    fn entries(&self) -> &[u8] {
        match self {
            Blob::Process(buffer) => buffer,
            Blob::File(run) => run.get(Header::BYTES..).unwrap_or_default(),
        }
    }

    fn entries_mut(&mut self) -> &mut [u8] {
        match self {
            Blob::Process(buffer) => buffer,
            Blob::File(run) => run.get_mut(Header::BYTES..).unwrap_or_default(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Blob::Process(buffer) => buffer.len(),
            Blob::File(run) => run.len(),
        }
    }
}

/// The header before the compressed slots in a memory file: the algorithm, the number of slots that were
/// live, the start of each slot and the end of the last, and the CRC32C of these. Numbers of four bytes.
struct Header {
    packing: Packing,
    live: u32,
    starts: Box<[u32]>,
}

impl Header {
    const STARTS: usize = SLOTS + 1;
    const NUMBERS: usize = 2 + Self::STARTS;
    const BYTES: usize = (Self::NUMBERS + 1) * size_of::<u32>();

    fn encode(packing: Packing, live: u32, starts: &[u32]) -> Vec<u8> {
        let packing = match packing {
            Packing::BesideADisk => 1,
            Packing::Alone => 2,
        };
        let numbers = [packing, live].into_iter().chain(starts.iter().copied());
        let mut bytes: Vec<u8> = numbers.flat_map(u32::to_le_bytes).collect();
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (numbers, sum) = bytes.get(..Self::BYTES)?.split_at_checked(Self::NUMBERS * size_of::<u32>())?;
        if crc32c::crc32c(numbers).to_le_bytes() != *sum {
            return None;
        }
        let mut numbers = numbers.as_chunks().0.iter().map(|number| u32::from_le_bytes(*number));
        let packing = match numbers.next()? {
            1 => Packing::BesideADisk,
            2 => Packing::Alone,
            _ => return None,
        };
        let live = numbers.next()?;
        let starts: Box<[u32]> = numbers.collect();
        let most = u32::try_from(crate::units::SEGMENT_BYTES).ok()?;
        (starts.is_sorted() && starts.last()? <= &most).then_some(Self { packing, live, starts })
    }
}

/// One packed segment.
pub struct Packed {
    packing: Packing,
    blob: Blob,
    /// The start of each slot in the blob, and the end of the last one; a slot that was dead takes no bytes.
    starts: Box<[u32]>,
    /// Number of slots that were live when the segment was packed.
    live: u32,
    /// Bytes of memory that it takes, for the budget.
    bytes: u64,
}

impl Packed {
    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes a packed segment of these entries, in a memory file if there is one.
    fn new(
        packing: Packing,
        parts: &[&[u8]],
        starts: Vec<u32>,
        live: u32,
        file: Option<&Arc<MemoryFile>>,
    ) -> Option<Self> {
        let len = parts.iter().map(|part| part.len()).sum();
        let mut blob = match file {
            None => Blob::Process(AlignedBuffer::new(len)?),
            Some(file) => {
                let mut run = file.take_run(Header::BYTES + len)?;
                let header = Header::encode(packing, live, &starts);
                run.get_mut(..Header::BYTES)?.copy_from_slice(&header);
                Blob::File(run)
            }
        };
        let mut rest = blob.entries_mut();
        for part in parts {
            rest.split_off_mut(..part.len())?.copy_from_slice(part);
        }
        Some(Self::of_blob(packing, blob, starts.into_boxed_slice(), live))
    }

    fn of_blob(packing: Packing, blob: Blob, starts: Box<[u32]>, live: u32) -> Self {
        let bytes = (blob.len() + starts.len() * size_of::<u32>() + size_of::<Self>()) as u64;
        Self { packing, blob, starts, live, bytes }
    }

    /// Takes over a packed segment of another process in a memory file. `None`: it is invalid, or another
    /// segment has it.
    pub(crate) fn adopt(file: &Arc<MemoryFile>, offset: u64) -> Option<Self> {
        let mut header = [0; Header::BYTES];
        file.file().read_exact_at(&mut header, offset).ok()?;
        let Header { packing, live, starts } = Header::decode(&header)?;
        let entries = usize::try_from(*starts.last()?).ok()?;
        let run = file.adopt_run(offset, Header::BYTES + entries)?;
        Some(Self::of_blob(packing, Blob::File(run), starts, live))
    }

    /// Its offset in the memory file.
    pub(crate) fn offset(&self) -> Option<u64> {
        match &self.blob {
            Blob::Process(_) => None,
            Blob::File(run) => Some(run.offset()),
        }
    }

    /// Bytes that it takes in the memory file.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.blob.len() as u64
    }

    /// Whether it contains a slot.
    pub(crate) fn has(&self, slot: Slot) -> bool {
        self.entry(slot).is_some_and(|entry| !entry.is_empty())
    }

    /// The compressed bytes of a slot; `None` if the slot was dead.
    fn entry(&self, slot: Slot) -> Option<&[u8]> {
        let index = usize::from(slot.0);
        let (start, end) = (self.starts.get(index)?, self.starts.get(index + 1)?);
        self.blob.entries().get(usize::try_from(*start).ok()?..usize::try_from(*end).ok()?)
    }

    /// A copy without the slots that died since, if enough did.
    fn without_dead(&self, segment: &Segment, dead: Dead, file: Option<&Arc<MemoryFile>>) -> Option<Self> {
        let live = segment.live();
        if live == 0 || live > dead.most_live(self.live) {
            return None;
        }
        let (mut entries, mut end) = (Vec::with_capacity(SLOTS), 0);
        let mut starts = Vec::with_capacity(SLOTS + 1);
        for slot in 0..SLOT_COUNT {
            starts.push(u32::try_from(end).ok()?);
            if segment.owner(Slot(slot)).is_some() {
                let entry = self.entry(Slot(slot))?;
                entries.push(entry);
                end += entry.len();
            }
        }
        starts.push(u32::try_from(end).ok()?);
        Self::new(self.packing, &entries, starts, live, file).filter(|smaller| smaller.bytes < self.bytes)
    }

    /// Decompresses a slot. `false`: the slot was dead when the segment was packed.
    pub fn unpack(&self, slot: Slot, into: &mut [u8; BLOCK]) -> bool {
        let Some(entry) = self.entry(slot) else { return false };
        if let Ok(plain) = <&[u8; BLOCK]>::try_from(entry) {
            *into = *plain;
            return true;
        }
        match self.packing {
            _ if entry.is_empty() => false,
            Packing::BesideADisk => decompress_into(entry, into).is_ok_and(|written| written == BLOCK),
            Packing::Alone => unpack_zstd(entry, into),
        }
    }
}

/// Packs segments one after the other. It keeps its buffers; only zstd's contain data of earlier segments.
#[derive(Default)]
pub struct Packer {
    lz4: CompressTable,
    /// Made when first needed.
    zstd: Option<Compressor<'static>>,
    /// Number of slots that it has compressed, including those without success.
    #[cfg(test)]
    tried: u64,
}

/// The compressed slots one after the other, in memory of a segment's size: no entry is larger than its slot.
struct Entries<'a> {
    memory: &'a mut [u8],
    len: usize,
}

impl Packer {
    /// Packs the live slots of a frozen segment. `None`: that would not pay. `scratch` has a segment's size.
    pub fn pack(
        &mut self,
        segment: &Segment,
        address: usize,
        packing: Packing,
        (scratch, file): (&mut [u8], Option<&Arc<MemoryFile>>),
    ) -> Option<Packed> {
        if packing == Packing::Alone && self.zstd.is_none() {
            match Compressor::new(ZSTD_LEVEL) {
                Ok(compressor) => self.zstd = Some(compressor),
                Err(error) => {
                    tracing::warn!(%error, "cannot set up compression to pack a segment; the segment stays unpacked in RAM");
                    return None;
                }
            }
        }
        let live = usize::try_from(segment.live()).ok()?.max(1);
        if !self.sample_pays(segment, address, live, packing, scratch)? {
            return None;
        }
        let most = packing.most(live * BLOCK);
        let mut entries = Entries { memory: scratch, len: 0 };
        let mut starts = Vec::with_capacity(SLOTS + 1);
        for slot in 0..SLOT_COUNT {
            starts.push(u32::try_from(entries.len).ok()?);
            if segment.owner(Slot(slot)).is_none() {
                continue;
            }
            with_frozen(address, Slot(slot), |plain| self.append(plain, packing, &mut entries))?;
            if entries.len > most {
                return None;
            }
        }
        starts.push(u32::try_from(entries.len).ok()?);
        Packed::new(packing, &[entries.memory.get(..entries.len)?], starts, segment.live(), file)
    }

    /// Adds a slot; uncompressed if it does not get smaller.
    fn append(&mut self, plain: &[u8; BLOCK], packing: Packing, entries: &mut Entries<'_>) -> Option<()> {
        #[cfg(test)]
        {
            self.tried += 1;
        }
        let rest = entries.memory.get_mut(entries.len..)?;
        let len = match packing {
            Packing::BesideADisk => compress_into_with_table(plain, rest, &mut self.lz4).ok(),
            Packing::Alone => self.zstd.as_mut().and_then(|zstd| zstd.compress_to_buffer(plain, rest).ok()),
        };
        entries.len += match len.filter(|len| *len < BLOCK) {
            Some(len) => len,
            None => {
                rest.get_mut(..BLOCK)?.copy_from_slice(plain);
                BLOCK
            }
        };
        Some(())
    }

    fn sample_pays(
        &mut self,
        segment: &Segment,
        address: usize,
        live: usize,
        packing: Packing,
        scratch: &mut [u8],
    ) -> Option<bool> {
        let mut samples = Entries { memory: scratch, len: 0 };
        let mut tried = 0;
        for (slot, _) in segment.live_slots().step_by(live.div_ceil(SAMPLES)) {
            with_frozen(address, slot, |plain| self.append(plain, packing, &mut samples))?;
            tried += 1;
        }
        Some(samples.len <= packing.most(tried * BLOCK))
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

    /// Uncompressed size of the live blocks in all packed segments.
    pub fn held_bytes<'a>(&self, record: impl Fn(SegmentId) -> Option<&'a Segment>) -> u64 {
        let live = |id: &SegmentId| record(*id).map_or(0, |segment| u64::from(segment.live()));
        self.segments.read().keys().map(live).sum::<u64>() * BLOCK as u64
    }

    /// The packed form of a segment.
    pub fn get(&self, id: SegmentId) -> Option<Arc<Packed>> {
        self.segments.read().get(&id).cloned()
    }

    /// Adds a packed segment.
    pub fn insert(&self, id: SegmentId, packed: Packed) {
        self.bytes.fetch_add(packed.bytes, Ordering::Relaxed);
        self.segments.write().insert(id, Arc::new(packed));
    }

    /// Replaces packed segments of which enough slots died by smaller ones, until `is_enough` says that
    /// enough bytes were freed. Returns the number of freed bytes.
    pub fn shrink<'a>(
        &self,
        dead: Dead,
        (record, file): (impl Fn(SegmentId) -> Option<&'a Segment>, Option<&Arc<MemoryFile>>),
        is_enough: impl Fn(u64) -> bool,
    ) -> u64 {
        let mut ids: Vec<SegmentId> = self.segments.read().keys().copied().collect();
        // In a fixed order, so that the model checker can replay a schedule.
        ids.sort_unstable_by_key(|id| id.0);
        let mut freed = 0;
        for id in ids {
            if is_enough(freed) {
                break;
            }
            let (Some(packed), Some(segment)) = (self.get(id), record(id)) else { continue };
            let Some(smaller) = packed.without_dead(segment, dead, file) else { continue };
            let mut segments = self.segments.write();
            // Meanwhile the segment may have been freed and its number used again.
            let Some(place) = segments.get_mut(&id).filter(|place| Arc::ptr_eq(place, &packed)) else {
                continue;
            };
            freed += packed.bytes.saturating_sub(smaller.bytes);
            segment.set_packed(smaller.offset());
            *place = Arc::new(smaller);
        }
        self.bytes.fetch_sub(freed, Ordering::Relaxed);
        freed
    }

    /// Damages all entries.
    #[cfg(test)]
    pub fn damage(&self) {
        let mut segments = self.segments.write();
        segments
            .values_mut()
            .filter_map(Arc::get_mut)
            .for_each(|packed| packed.blob.entries_mut().fill(0xff));
    }

    /// Removes a packed segment; its memory is freed with its last reader. Returns its size in bytes.
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
    use crate::units::{BlockNumber, SEGMENT_BYTES};

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

    fn pack(packer: &mut Packer, segment: &Segment, address: usize, packing: Packing) -> Option<Packed> {
        packer.pack(segment, address, packing, (&mut vec![0; SEGMENT_BYTES], None))
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
        for packing in [Packing::BesideADisk, Packing::Alone] {
            unpacked(packing);
        }
    }

    fn unpacked(packing: Packing) {
        let (segment, _pool, address) = segment(mixed);
        let packed = pack(&mut Packer::default(), &segment, address, packing).unwrap();
        assert!(packed.bytes() < 400 * BLOCK as u64 / 3);
        let mut out = [0; BLOCK];
        for slot in 0..512 {
            let live = slot < 400 && slot != 7;
            assert_eq!(packed.unpack(Slot(slot), &mut out), live, "slot {slot}");
            assert!(!live || out[..] == mixed(slot)[..], "slot {slot}");
        }
        let gain = u16::try_from(MIN_GAIN).unwrap();
        (8..8 + gain).for_each(|slot| {
            assert!(packed.without_dead(&segment, Dead::Few, None).is_none(), "slot {slot}");
            segment.kill(Slot(slot));
        });
        assert!(packed.without_dead(&segment, Dead::Quarter, None).is_none());
        let fewer = packed.without_dead(&segment, Dead::Few, None).unwrap();
        assert!(fewer.unpack(Slot(300), &mut out) && out[..] == mixed(300)[..]);
        assert!(fewer.bytes() < packed.bytes() && !fewer.unpack(Slot(8), &mut out));
        for slot in (0..200).filter(|slot| *slot != 7 && !(8..8 + gain).contains(slot)) {
            segment.kill(Slot(slot));
        }
        let smaller = packed.without_dead(&segment, Dead::Quarter, None).unwrap();
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
        for packing in [Packing::BesideADisk, Packing::Alone] {
            let mut packer = Packer::default();
            assert!(pack(&mut packer, &segment, address, packing).is_none());
            // Only a few slots were tried.
            assert_eq!(packer.tried, SAMPLES as u64);
        }
    }

    #[test]
    fn what_hardly_gets_smaller_is_packed_where_there_is_no_other_way() {
        // Each byte has six random bits: nothing repeats, so only zstd saves something, at most a quarter.
        let (segment, _pool, address) = segment(|slot| {
            let mut state = u32::from(slot) + 1;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 26) as u8
            };
            (0..BLOCK).map(|_| next()).collect()
        });
        let mut packer = Packer::default();
        assert!(pack(&mut packer, &segment, address, Packing::BesideADisk).is_none());
        let packed = pack(&mut packer, &segment, address, Packing::Alone).unwrap();
        let all = 399 * BLOCK as u64;
        assert!(packed.bytes() < all * 4 / 5 && packed.bytes() > all * 3 / 4, "{}", packed.bytes());
    }

    #[test]
    fn a_damaged_entry_is_no_block() {
        let (segment, _pool, address) = segment(|slot| mixed(slot * 10 + 1));
        for packing in [Packing::BesideADisk, Packing::Alone] {
            let mut packed = pack(&mut Packer::default(), &segment, address, packing).unwrap();
            packed.blob.entries_mut().fill(0xff);
            assert!(!packed.unpack(Slot(3), &mut [0; BLOCK]));
        }
    }
}
