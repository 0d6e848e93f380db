//! Allocates RAM for segments: pieces of 2 MiB, mapped from the operating system and returned to it. Also has
//! [`AlignedBuffer`], the memory for direct I/O.
//!
//! Segments are not on the heap, so that their memory is counted exactly, returned at once, left out of core
//! dumps, and backed by huge pages if the kernel has them (a random access costs one TLB miss less).
//!
//! `unsafe` here: mapping memory, and touching slots through raw pointers. A slot's bytes are guarded by
//! the lock of the leaf whose block lives in it (see [`crate::map`]), which the type system cannot see;
//! the callers pass the lock as a [`LeafHeld`] proof.
#![expect(unsafe_code, reason = "memory is mapped and slots are reached through raw pointers; see above")]

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_block::BLOCK_BYTES;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::map::LeafHeld;
use crate::memory_file::{Mapping, MemoryFile, crash, give_back, reserve};
use crate::sync::{Mutex, UNDER_MODEL_CHECKER, point};
use crate::units::{SEGMENT_BYTES, SLOTS, Slot};

/// Segments in one mapping of 128 MiB: address space is taken for a mapping, memory only as it is touched.
const SEGMENTS_PER_MAPPING: usize = PIECES_PER_CHUNK as usize;

/// Pieces (of 2 MiB, each for one segment) in a chunk, the part of the pool's file in one mapping.
const PIECES_PER_CHUNK: u32 = 64;

/// Pieces that are returned to the system at a time (128 MiB): the thread that does it also serves writers.
const TRIM_PIECES: usize = 64;

const BLOCK: usize = BLOCK_BYTES as usize;

/// The RAM of one segment. Its address is a multiple of 2 MiB.
///
/// Dropping it does not give the memory back: return it with [`MemoryPool::give`].
#[derive(Debug, PartialEq, Eq)]
pub struct SegmentMemory(NonNull<u8>);

// SAFETY: the memory is owned by this value; all access goes through the locks described above.
unsafe impl Send for SegmentMemory {}
// SAFETY: as above.
unsafe impl Sync for SegmentMemory {}

impl SegmentMemory {
    /// The address, for packing into a segment's word.
    pub fn address(&self) -> usize {
        self.0.as_ptr().expose_provenance()
    }

    /// The bytes of a piece that belongs to no segment and from which no thread copies any more.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: a piece that is mapped, and initialised by the kernel; nobody else uses it, as said above.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), SEGMENT_BYTES) }
    }

    /// Takes ownership again, from an address that came from [`SegmentMemory::address`].
    ///
    /// # Safety
    /// The address belongs to a live piece of a pool, and nobody else takes it back.
    pub unsafe fn from_address(address: usize) -> Option<Self> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(address)).map(Self)
    }
}

fn slot_pointer(address: usize, slot: Slot) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut::<u8>(address).wrapping_add((slot.0 as usize % SLOTS) * BLOCK)
}

/// Copies bytes. Under the model checker it copies in two halves, and lets other threads run before each,
/// so that a copy to or from memory that another thread uses meanwhile is detected. Tests of this crate copy
/// in halves, too, because a process may end between them.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
#[inline(always)]
unsafe fn copy_bytes(from: *const u8, to: *mut u8, len: usize) {
    let in_halves = UNDER_MODEL_CHECKER || cfg!(test);
    let first = if in_halves { len / 2 } else { len };
    point();
    // SAFETY: the first part of what the caller vouches for.
    unsafe { std::ptr::copy_nonoverlapping(from, to, first) };
    if in_halves {
        point();
        crash::point();
        // SAFETY: the rest of it.
        unsafe { std::ptr::copy_nonoverlapping(from.add(first), to.add(first), len - first) };
    }
}

/// Copies bytes out of a slot, or nothing if they are not inside it. The memory at `address` stays mapped while
/// `_held` is locked.
#[inline]
pub fn copy_out(address: usize, slot: Slot, skip: usize, into: &mut [u8], _held: &impl LeafHeld) {
    if skip.saturating_add(into.len()) > BLOCK {
        return;
    }
    // SAFETY: in bounds by the check above; the leaf's lock keeps the memory mapped and unwritten.
    unsafe {
        copy_bytes(slot_pointer(address, slot).add(skip), into.as_mut_ptr(), into.len());
    }
}

/// Copies bytes into a slot, or nothing if they would not be inside it. The leaf must be locked for writing.
#[inline]
pub fn copy_in(address: usize, slot: Slot, skip: usize, from: &[u8], _held: &crate::map::LeafWrite<'_>) {
    if skip.saturating_add(from.len()) > BLOCK {
        return;
    }
    // SAFETY: in bounds by the check above; the leaf's write lock excludes readers and writers of the slot.
    unsafe {
        copy_bytes(from.as_ptr(), slot_pointer(address, slot).add(skip), from.len());
    }
}

/// Copies a whole block into a slot with non-temporal stores: the old contents are not loaded, and the
/// processor's caches keep their contents. The leaf must be locked for writing, and [`settle`] called before
/// it is unlocked.
#[inline]
pub fn copy_in_past_caches(address: usize, slot: Slot, from: &[u8; BLOCK], held: &crate::map::LeafWrite<'_>) {
    #[cfg(target_arch = "x86_64")]
    if !UNDER_MODEL_CHECKER {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        const WIDTH: usize = size_of::<__m128i>();
        let (from, to) = (from.as_ptr().cast::<__m128i>(), slot_pointer(address, slot).cast::<__m128i>());
        for line in (0..BLOCK / WIDTH).step_by(4) {
            // SAFETY: inside both blocks; a slot is aligned, and the leaf's write lock excludes its readers and writers.
            unsafe {
                let parts = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(line + part)));
                for (part, value) in parts.into_iter().enumerate() {
                    _mm_stream_si128(to.add(line + part), value);
                }
            }
        }
        return;
    }
    copy_in(address, slot, 0, from, held);
}

/// Makes the copies of [`copy_in_past_caches`] visible to threads that lock the leaf afterwards.
#[inline]
pub fn settle() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: an instruction that every such processor has.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Calls `use_it` with a whole slot of a frozen segment, without a lock: no thread writes a frozen segment,
/// and its memory stays until the thread that froze it releases it. The caller has frozen the segment, and
/// then swept the leaves: locked each of them once, so that no write from before is in progress.
pub fn with_frozen<T>(address: usize, slot: Slot, use_it: impl FnOnce(&[u8; BLOCK]) -> T) -> T {
    if UNDER_MODEL_CHECKER {
        // Copied, so that the model checker detects a concurrent write.
        let mut copy = [0; BLOCK];
        copy_frozen(address, slot, &mut copy);
        return use_it(&copy);
    }
    // SAFETY: as said above; the address is that of a segment, and the slot inside it.
    use_it(unsafe { &*slot_pointer(address, slot).cast_const().cast::<[u8; BLOCK]>() })
}

/// Copies a whole slot of a frozen segment out; see [`with_frozen`].
pub fn copy_frozen(address: usize, slot: Slot, into: &mut [u8]) {
    if into.len() != BLOCK {
        return;
    }
    // SAFETY: as said above; the caller froze the segment and swept the leaves.
    unsafe {
        copy_bytes(slot_pointer(address, slot), into.as_mut_ptr(), BLOCK);
    }
}

#[derive(Debug, Default)]
struct Free {
    /// Freed a moment ago, still backed by RAM.
    warm: Vec<SegmentMemory>,
    /// Address space without RAM.
    cold: Vec<SegmentMemory>,
    /// Mappings to unmap when the pool is dropped: address and length.
    mappings: Vec<(usize, usize)>,
    /// Mappings of a file, by address, with the number of their first piece.
    of_file: BTreeMap<usize, (Mapping, u32)>,
    /// The numbers of the chunks that are mapped.
    chunks: BTreeSet<u32>,
}

/// A pool of RAM for segments: one for all volumes of a host, and one for each volume whose memory is in a
/// file.
#[derive(Debug, Default)]
pub struct MemoryPool {
    free: Mutex<Free>,
    file: Option<Arc<MemoryFile>>,
    /// Bytes of warm pieces: RAM that no segment uses, until [`MemoryPool::trim`] returns it.
    warm_bytes: AtomicU64,
}

impl MemoryPool {
    /// An empty pool.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// A pool in a file. All memory of the file is free.
    pub(crate) fn in_file(file: Arc<MemoryFile>) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), file: Some(file), warm_bytes: AtomicU64::new(0) })
    }

    /// Takes over the pieces with these numbers, which another process left in use. Returns their addresses
    /// by number. `None`: there is not enough address space.
    pub(crate) fn adopt(&self, used: &BTreeSet<u32>) -> Option<BTreeMap<u32, usize>> {
        let file = self.file.as_ref()?;
        let mut free = self.free.lock();
        for number in used {
            let chunk = number / PIECES_PER_CHUNK;
            if !free.chunks.contains(&chunk) {
                Self::map_chunk(&mut free, file, chunk)?;
            }
        }
        let numbers: Vec<Option<u32>> = free.cold.iter().map(|piece| Self::number_in(&free, piece)).collect();
        let mut addresses = BTreeMap::new();
        for (piece, number) in std::mem::take(&mut free.cold).into_iter().zip(numbers) {
            match number.filter(|number| used.contains(number)) {
                Some(number) => drop(addresses.insert(number, piece.address())),
                None => free.cold.push(piece),
            }
        }
        Some(addresses)
    }

    /// Whether the piece with this number in the file is in use: mapped and not cold. Only right while no piece
    /// is warm.
    pub(crate) fn has_number(&self, number: u32) -> bool {
        let free = self.free.lock();
        let is_free = |piece: &SegmentMemory| Self::number_in(&free, piece) == Some(number);
        free.chunks.contains(&(number / PIECES_PER_CHUNK)) && !free.cold.iter().any(is_free)
    }

    /// The number of a piece in the pool's file.
    pub(crate) fn number_of(&self, piece: &SegmentMemory) -> Option<u32> {
        self.file.as_ref()?;
        Self::number_in(&self.free.lock(), piece)
    }

    fn number_in(free: &Free, piece: &SegmentMemory) -> Option<u32> {
        let (start, (_, first)) = free.of_file.range(..=piece.address()).next_back()?;
        u32::try_from((piece.address() - start) / SEGMENT_BYTES).ok()?.checked_add(*first)
    }

    /// Bytes that are resident but free.
    pub fn warm_bytes(&self) -> u64 {
        self.warm_bytes.load(Ordering::Relaxed)
    }

    /// Takes a piece of 2 MiB; `None` if the system has no address space or memory left.
    pub fn take(&self) -> Option<SegmentMemory> {
        let mut free = self.free.lock();
        if let Some(memory) = free.warm.pop() {
            self.warm_bytes.fetch_sub(SEGMENT_BYTES as u64, Ordering::Relaxed);
            return Some(memory);
        }
        if free.cold.is_empty() {
            match &self.file {
                None => Self::map_more(&mut free)?,
                Some(file) => {
                    let chunk = (0..).find(|chunk| !free.chunks.contains(chunk))?;
                    Self::map_chunk(&mut free, file, chunk)?;
                }
            }
        }
        let memory = free.cold.pop()?;
        if let Some(file) = &self.file {
            let number = Self::number_in(&free, &memory)?;
            // Reserves the memory, so that a full file system gives an error here instead of a signal at the
            // first access.
            if !reserve(file.file(), (memory.address(), file.segment_offset(number)), SEGMENT_BYTES) {
                give_back(memory.address(), SEGMENT_BYTES);
                free.cold.push(memory);
                return None;
            }
        }
        Some(memory)
    }

    /// Frees a piece. The next [`MemoryPool::trim`] returns its RAM to the system, unless the piece is taken
    /// before.
    pub fn give(&self, memory: SegmentMemory) {
        self.warm_bytes.fetch_add(SEGMENT_BYTES as u64, Ordering::Relaxed);
        self.free.lock().warm.push(memory);
    }

    /// Returns the RAM of some free pieces to the system. Returns whether there is more.
    pub fn trim(&self) -> bool {
        let (warm, has_more) = {
            let mut free = self.free.lock();
            let count = free.warm.len().min(TRIM_PIECES);
            // Pieces that were freed last are taken next, so keep them.
            let warm: Vec<SegmentMemory> = free.warm.drain(..count).collect();
            self.warm_bytes.fetch_sub((warm.len() * SEGMENT_BYTES) as u64, Ordering::Relaxed);
            (warm, !free.warm.is_empty())
        };
        for memory in &warm {
            if self.file.is_some() {
                give_back(memory.address(), SEGMENT_BYTES);
                continue;
            }
            // SAFETY: the piece is ours and nobody uses it; its contents may go.
            let done = unsafe {
                rustix::mm::madvise(memory.0.as_ptr().cast(), SEGMENT_BYTES, Advice::LinuxDontNeed)
            };
            if let Err(error) = done {
                tracing::warn!(%error, "cannot return {SEGMENT_BYTES} bytes of unused write-cache memory to the kernel: the process keeps this RAM, and no data is affected");
            }
        }
        self.free.lock().cold.extend(warm);
        has_more
    }

    /// Takes over a segment's RAM from the address in its word. Called once, by the thread that removes the
    /// address from the word, under the log's lock.
    pub fn reclaim(address: usize) -> Option<SegmentMemory> {
        // SAFETY: the address is that of a piece which a segment owned until now; see above.
        unsafe { SegmentMemory::from_address(address) }
    }

    /// Maps a chunk of a file; its contents stay.
    fn map_chunk(free: &mut Free, file: &MemoryFile, chunk: u32) -> Option<()> {
        let first = chunk * PIECES_PER_CHUNK;
        let mapping = match file.map_segments(first, SEGMENTS_PER_MAPPING) {
            Ok(mapping) => mapping,
            Err(error) => {
                tracing::debug!(%error, "there is no address space for a write cache in a file");
                return None;
            }
        };
        for piece in (0..SEGMENTS_PER_MAPPING).rev() {
            // SAFETY: inside the new mapping, each piece once.
            let memory = unsafe { SegmentMemory::from_address(mapping.address() + piece * SEGMENT_BYTES) };
            free.cold.extend(memory);
        }
        free.of_file.insert(mapping.address(), (mapping, first));
        free.chunks.insert(chunk);
        Some(())
    }

    fn map_more(free: &mut Free) -> Option<()> {
        let wanted = (SEGMENTS_PER_MAPPING + 1) * SEGMENT_BYTES;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                wanted,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        }
        .ok()?;
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontDump] {
            // SAFETY: advice on our own new mapping; it changes no contents. A kernel without it says no.
            let _ = unsafe { rustix::mm::madvise(start, wanted, advice) };
        }
        let address = start.expose_provenance();
        free.mappings.push((address, wanted));
        let first = address.next_multiple_of(SEGMENT_BYTES);
        for piece in (0..SEGMENTS_PER_MAPPING).rev() {
            // SAFETY: inside the new mapping, each piece once.
            let memory = unsafe { SegmentMemory::from_address(first + piece * SEGMENT_BYTES) };
            free.cold.extend(memory);
        }
        Some(())
    }
}

impl Drop for MemoryPool {
    fn drop(&mut self) {
        for (address, len) in self.free.get_mut().mappings.drain(..) {
            // SAFETY: every segment holds the pool alive, so none is left; the mapping is ours.
            let _ = unsafe { rustix::mm::munmap(std::ptr::with_exposed_provenance_mut(address), len) };
        }
    }
}

/// A page-aligned buffer for direct I/O, made once and reused by its owner.
#[derive(Debug)]
pub struct AlignedBuffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain owned memory.
unsafe impl Send for AlignedBuffer {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// Zeroed memory of `len` bytes, rounded up to pages. `None`: the system has no memory.
    pub fn new(len: usize) -> Option<Self> {
        let len = len.max(1).next_multiple_of(4096);
        // SAFETY: a new anonymous mapping.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .ok()?;
        // SAFETY: advice on our own mapping.
        let _ = unsafe { rustix::mm::madvise(start, len, Advice::LinuxDontDump) };
        Some(Self { start: NonNull::new(start.cast())?, len })
    }

    /// The address of the first byte, for I/O that the kernel does later.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl std::ops::Deref for AlignedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: mapped for the life of `self`, initialised by the kernel.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_machines_write_is_not_dumped() {
        use crate::overflow::key_memory::tests::flags_of;
        let pool = MemoryPool::new();
        let piece = pool.take().unwrap();
        let buffer = AlignedBuffer::new(8192).unwrap();
        for address in [piece.address(), piece.address() + SEGMENT_BYTES - 1, buffer.start.as_ptr().addr()] {
            assert!(flags_of(address).iter().any(|flag| flag == "dd"), "{address:#x}");
        }
    }

    #[test]
    fn a_block_is_the_same_whichever_way_it_is_copied() {
        let (pool, map) = (MemoryPool::new(), crate::map::Map::new(SLOTS as u64));
        let leaf = map.write(0).unwrap();
        let address = pool.take().unwrap().address();
        let bytes: Vec<u8> =
            (0..2 * BLOCK as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        // From any offset on, into this slot and no other.
        for skip in [0, 1, 8, 15, 16, 63, 64, 4095] {
            let from: &[u8; BLOCK] = bytes[skip..][..BLOCK].try_into().unwrap();
            copy_in(address, Slot(0), 0, &[1; BLOCK], &leaf);
            copy_in(address, Slot(2), 0, &[2; BLOCK], &leaf);
            copy_in_past_caches(address, Slot(1), from, &leaf);
            settle();
            let mut found = [0; 3 * BLOCK];
            for (slot, into) in found.chunks_mut(BLOCK).enumerate() {
                copy_out(address, Slot(slot as u16), 0, into, &leaf);
            }
            assert!(found == [&[1; BLOCK][..], from, &[2; BLOCK]].concat()[..], "from byte {skip}");
        }
    }

    #[test]
    fn pieces_are_aligned_distinct_and_reused() {
        let pool = MemoryPool::new();
        let pieces: Vec<_> = (0..SEGMENTS_PER_MAPPING + 1).map(|_| pool.take().unwrap()).collect();
        let mut addresses: Vec<_> = pieces.iter().map(SegmentMemory::address).collect();
        assert!(addresses.iter().all(|a| a % SEGMENT_BYTES == 0));
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), SEGMENTS_PER_MAPPING + 1);
        for piece in pieces {
            pool.give(piece);
        }
        assert_eq!(pool.warm_bytes(), ((SEGMENTS_PER_MAPPING + 1) * SEGMENT_BYTES) as u64);
        while pool.trim() {}
        assert_eq!(pool.warm_bytes(), 0);
        assert!(addresses.contains(&pool.take().unwrap().address()));
    }

    #[test]
    fn no_trim_returns_more_than_its_part() {
        let pool = MemoryPool::new();
        let pieces: Vec<_> = (0..2 * TRIM_PIECES + 1).map(|_| pool.take().unwrap()).collect();
        let last = pieces.last().unwrap().address();
        pieces.into_iter().for_each(|piece| pool.give(piece));
        for left in [TRIM_PIECES + 1, 1] {
            assert!(pool.trim());
            assert_eq!(pool.warm_bytes(), (left * SEGMENT_BYTES) as u64);
        }
        assert_eq!(pool.take().unwrap().address(), last, "the piece that was freed last is taken first");
        assert!(!pool.trim());
    }
}
