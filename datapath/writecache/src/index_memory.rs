//! Allocates memory for the index: pieces of 512 values of four bytes (2 KiB), cut from huge pages.
//!
//! The index of a large cache does not fit into the processor's caches, and with pages of 4 KiB each access
//! would also walk the page tables (decision 16). The heap would also keep the memory of a closed cache; here
//! it is returned to the system within a second ([`trim`]).
//!
//! There is one allocator for the process, like the heap: so a piece has no header, and any thread may drop
//! it. The pieces of a cache whose memory is in a file come from that file ([`crate::memory_file`]).
#![expect(unsafe_code, reason = "memory is mapped, and cut into pieces that own a part of it")]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::memory_file::{FilePieces, crash};
use crate::sync::UNDER_MODEL_CHECKER;
use crate::units::{Location, SLOTS};

/// Bytes of a piece.
pub(crate) const PIECE: usize = 2048;

/// Size of an arena in bytes: a huge page.
const ARENA: usize = 2 << 20;

const PIECES: usize = ARENA / PIECE;

/// Size of a page in bytes; a page is returned to the system when both its pieces are free.
const PAGE: usize = 2 * PIECE;

/// An arena with fewer free pages keeps them: returning some splits the huge page.
const LEAST_FREE_PAGES: usize = ARENA / PAGE / 8;

/// 512 values of 4 bytes.
pub struct Piece<T>(NonNull<[T; SLOTS]>);

// SAFETY: it owns its values as a box does.
unsafe impl<T: Send> Send for Piece<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Piece<T> {}

impl<T> Piece<T> {
    /// The model checker's atomics are larger, and its segments smaller, so its pieces come from the heap.
    const OF_HEAP: bool = UNDER_MODEL_CHECKER;
    const LAYOUT: Layout = Layout::new::<[T; SLOTS]>();

    /// Makes a piece with values from `each`.
    pub fn new(each: impl FnMut() -> T) -> Self {
        const { assert!(UNDER_MODEL_CHECKER || (size_of::<[T; SLOTS]>() == PIECE && align_of::<T>() <= PIECE)) };
        let memory = if Self::OF_HEAP {
            // SAFETY: the layout has a size.
            NonNull::new(unsafe { alloc(Self::LAYOUT) })
        } else {
            ARENAS.lock().take()
        };
        let Some(memory) = memory else { handle_alloc_error(Self::LAYOUT) };
        Self::filled(memory, each)
    }

    /// Makes a piece in memory of the right size and alignment that has no other owner.
    fn filled(memory: NonNull<u8>, mut each: impl FnMut() -> T) -> Self {
        let values = memory.cast::<T>();
        for index in 0..SLOTS {
            // SAFETY: inside the piece, which is large enough for as many and aligned for them.
            unsafe { values.add(index).write(each()) };
        }
        Self(values.cast())
    }
}

impl Piece<Location> {
    /// Makes a piece in a memory file; also returns its number there.
    pub(crate) fn new_in(pieces: &Arc<FilePieces>, fill: Location) -> (Self, u32) {
        // As for the heap: whoever needs a piece looks before whether there are some.
        let Some((memory, number)) = pieces.take() else { handle_alloc_error(Self::LAYOUT) };
        (Self::filled(memory, || fill), number)
    }

    /// Takes over a piece of a memory file that another process filled. `None`: the number is invalid, or in
    /// use.
    pub(crate) fn adopt(pieces: &Arc<FilePieces>, number: u32) -> Option<Self> {
        let memory = pieces.adopt(number)?;
        // Any four bytes are a valid location, and the caller checks the values.
        Some(Self(memory.cast()))
    }
}

/// Stores the location of a block. A process that reads the location also sees all stores before it.
#[inline(always)]
pub(crate) fn publish(place: &mut Location, location: Location) {
    crash::point();
    if crash::is_dead() {
        return;
    }
    // SAFETY: the place is borrowed alone, is four bytes long and aligned, and every value of them is a location.
    let place = unsafe { AtomicU32::from_ptr(std::ptr::from_mut(place).cast()) };
    place.store(location.bits(), Ordering::Release);
}

impl<T> Drop for Piece<T> {
    fn drop(&mut self) {
        // SAFETY: the values were made by `new` and are dropped once.
        unsafe { self.0.as_ptr().drop_in_place() };
        let memory = self.0.cast::<u8>();
        if Self::OF_HEAP {
            // SAFETY: it came from the heap with this layout.
            unsafe { dealloc(memory.as_ptr(), Self::LAYOUT) };
        } else {
            let of_file = ARENAS.lock().give(memory);
            match of_file {
                Some(pieces) => pieces.give(memory.as_ptr().expose_provenance()),
                None => GIVEN.store(true, Ordering::Relaxed),
            }
        }
    }
}

impl<T> Deref for Piece<T> {
    type Target = [T; SLOTS];
    #[inline]
    fn deref(&self) -> &Self::Target {
        // SAFETY: initialised by `new`, and there as long as the piece is.
        unsafe { self.0.as_ref() }
    }
}

impl<T> DerefMut for Piece<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        // SAFETY: as above, and the piece is borrowed alone.
        unsafe { self.0.as_mut() }
    }
}

impl<T: Copy> Clone for Piece<T> {
    fn clone(&self) -> Self {
        let [first, rest @ ..] = &**self;
        let mut rest = std::iter::once(first).chain(rest);
        Self::new(|| *rest.next().unwrap_or(first))
    }
}

impl<T: fmt::Debug> fmt::Debug for Piece<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.deref().fmt(f)
    }
}

/// Registers an arena of a memory file.
pub(crate) fn know_arena(base: usize, pieces: Weak<FilePieces>) {
    ARENAS.lock().of_files.insert(base, pieces);
}

/// Removes the arenas of a memory file at these addresses, which are about to be unmapped. None of their
/// pieces is in use.
pub(crate) fn forget_arenas(bases: impl Iterator<Item = usize>) {
    let mut arenas = ARENAS.lock();
    bases.for_each(|base| {
        arenas.of_files.remove(&base);
    });
}

/// Whether pieces were freed since the last [`trim`].
pub fn wants_trim() -> bool {
    GIVEN.load(Ordering::Relaxed)
}

/// Returns the memory of free pieces to the system: empty arenas, and pages of arenas with enough free pages.
pub fn trim() {
    GIVEN.store(false, Ordering::Relaxed);
    let given = std::mem::take(&mut ARENAS.lock().given);
    for base in given {
        // One arena at a time: a thread that needs a piece meanwhile holds locks for which others wait.
        ARENAS.lock().trim(base);
    }
}

static GIVEN: AtomicBool = AtomicBool::new(false);

static ARENAS: parking_lot::Mutex<Arenas> = parking_lot::const_mutex(Arenas::new());

/// The pieces of an arena that are in use, and its pages that were returned to the system: a bit for each.
#[derive(Debug)]
struct Arena {
    used: [u64; PIECES / 64],
    gone: [u64; PIECES / 128],
    free: usize,
}

/// The arenas by address; addresses are multiples of [`ARENA`].
#[derive(Debug)]
struct Arenas {
    all: BTreeMap<usize, Arena>,
    /// Arenas with free pieces. The first one is used first, so that the others become empty.
    with_room: BTreeSet<usize>,
    /// Arenas in which a piece was freed since they were trimmed.
    given: BTreeSet<usize>,
    /// Arenas in memory files.
    of_files: BTreeMap<usize, Weak<FilePieces>>,
}

/// The arena that contains an address.
fn arena_of(address: usize) -> usize {
    address - address % ARENA
}

impl Arena {
    const NEW: Self = Self { used: [0; PIECES / 64], gone: [0; PIECES / 128], free: PIECES };

    fn take(&mut self) -> Option<usize> {
        let (word, bits) = self.used.iter_mut().enumerate().find(|(_, bits)| **bits != u64::MAX)?;
        let piece = word * 64 + bits.trailing_ones() as usize;
        *bits |= 1 << (piece % 64);
        self.free = self.free.saturating_sub(1);
        if let Some(gone) = self.gone.get_mut(piece / 128) {
            *gone &= !(1 << (piece / 2 % 64));
        }
        Some(piece)
    }

    fn give(&mut self, piece: usize) {
        if let Some(bits) = self.used.get_mut(piece / 64) {
            *bits &= !(1 << (piece % 64));
            self.free += 1;
        }
    }

    /// Pages that have memory but no piece in use.
    fn free_pages(&self) -> impl Iterator<Item = usize> {
        (0..PIECES / 2).filter(|page| {
            let used = self.used.get(page / 32).is_none_or(|bits| bits >> (page % 32 * 2) & 3 != 0);
            let gone = self.gone.get(page / 64).is_none_or(|bits| bits >> (page % 64) & 1 != 0);
            !used && !gone
        })
    }
}

impl Arenas {
    const fn new() -> Self {
        Self {
            all: BTreeMap::new(),
            with_room: BTreeSet::new(),
            given: BTreeSet::new(),
            of_files: BTreeMap::new(),
        }
    }

    /// Takes a piece. `None`: the system has no memory.
    fn take(&mut self) -> Option<NonNull<u8>> {
        let base = match self.with_room.first() {
            Some(base) => *base,
            None => self.add()?,
        };
        let arena = self.all.get_mut(&base)?;
        let was_split = arena.gone.iter().any(|bits| *bits != 0);
        let piece = arena.take()?;
        if was_split && arena.gone.iter().all(|bits| *bits == 0) {
            advise(base, ARENA, Advice::LinuxHugepage);
        }
        if arena.free == 0 {
            self.with_room.remove(&base);
        }
        NonNull::new(std::ptr::with_exposed_provenance_mut(base + piece * PIECE))
    }

    /// Frees a piece. If it belongs to a memory file, returns that file.
    fn give(&mut self, memory: NonNull<u8>) -> Option<Arc<FilePieces>> {
        let address = memory.as_ptr().expose_provenance();
        let base = arena_of(address);
        if let Some(arena) = self.all.get_mut(&base) {
            arena.give(address % ARENA / PIECE);
            self.with_room.insert(base);
            self.given.insert(base);
            return None;
        }
        self.of_files.get(&base).and_then(Weak::upgrade)
    }

    /// Adds a new, empty arena.
    fn add(&mut self) -> Option<usize> {
        // Twice as long as needed, so that it contains a whole aligned huge page.
        let (len, flags) = (2 * ARENA, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)
        };
        let start = start.ok()?.expose_provenance();
        let base = start.next_multiple_of(ARENA);
        unmap(start, base - start);
        unmap(base + ARENA, start + ARENA - base);
        // A kernel without huge pages refuses this.
        advise(base, ARENA, Advice::LinuxHugepage);
        self.all.insert(base, Arena::NEW);
        self.with_room.insert(base);
        Some(base)
    }

    fn trim(&mut self, base: usize) {
        let Some(arena) = self.all.get_mut(&base) else { return };
        if arena.free == PIECES {
            self.all.remove(&base);
            self.with_room.remove(&base);
            self.given.remove(&base);
            unmap(base, ARENA);
            return;
        }
        let pages: Vec<usize> = arena.free_pages().collect();
        if pages.len() < LEAST_FREE_PAGES {
            return;
        }
        if arena.gone.iter().all(|bits| *bits == 0) {
            // Otherwise the kernel would soon merge the rest into a huge page again, and all of it would have
            // memory again.
            advise(base, ARENA, Advice::LinuxNoHugepage);
        }
        for run in pages.chunk_by(|one, next| one + 1 == *next) {
            let Some(first) = run.first() else { continue };
            // No piece of these pages is in use, and none is handed out during this borrow.
            if advise(base + first * PAGE, run.len() * PAGE, Advice::LinuxDontNeed) {
                for page in run {
                    if let Some(gone) = arena.gone.get_mut(page / 64) {
                        *gone |= 1 << (page % 64);
                    }
                }
            }
        }
    }
}

/// Advises the kernel on a part of our own mapping; returns whether it accepted. If the advice drops
/// contents, none of them are in use.
fn advise(start: usize, len: usize, advice: Advice) -> bool {
    // SAFETY: as said above.
    unsafe { rustix::mm::madvise(std::ptr::with_exposed_provenance_mut(start), len, advice) }.is_ok()
}

/// Unmaps address space that is not in use.
fn unmap(address: usize, len: usize) {
    if len > 0 {
        // SAFETY: a part of our own mapping, without a piece in use.
        let _ = unsafe { rustix::mm::munmap(std::ptr::with_exposed_provenance_mut(address), len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Bytes of this range that have memory.
    fn resident(base: usize, len: usize) -> usize {
        let mut pages = vec![0u8; len / 4096];
        let start = std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(base);
        // SAFETY: one byte for each page of the range.
        let done = unsafe { libc::mincore(start, len, pages.as_mut_ptr()) };
        assert_eq!(done, 0);
        pages.iter().filter(|page| **page & 1 == 1).count() * 4096
    }

    fn trim_all(arenas: &mut Arenas) {
        std::mem::take(&mut arenas.given).into_iter().for_each(|base| arenas.trim(base));
    }

    #[test]
    fn pieces_hold_their_values_and_share_nothing() {
        let mut pieces: Vec<Piece<u32>> = (0..3000).map(|n| Piece::new(|| n)).collect();
        let addresses: HashSet<usize> = pieces.iter().map(|p| p.as_ptr().addr()).collect();
        assert_eq!(addresses.len(), 3000);
        pieces[7][511] = 9;
        let copy = pieces[7].clone();
        drop(pieces.drain(..2000).collect::<Vec<_>>());
        assert_eq!((copy[0], copy[511]), (7, 9));
        assert!(pieces.iter().enumerate().all(|(n, p)| p.iter().all(|v| *v as usize == n + 2000)));
    }

    #[test]
    fn free_memory_goes_back_and_is_used_again() {
        let mut arenas = Arenas::new();
        let mut pieces: Vec<_> = (0..PIECES + 1).map(|_| arenas.take().unwrap()).collect();
        assert_eq!(arenas.all.len(), 2);
        for piece in &pieces {
            // SAFETY: a piece of 2 KiB that nobody else has.
            unsafe { piece.as_ptr().write_bytes(0xa5, PIECE) };
        }
        let last = pieces.pop().unwrap().as_ptr().addr();
        let full = pieces[0].as_ptr().addr() / ARENA * ARENA;
        assert_ne!(last / ARENA * ARENA, full);
        assert_eq!(resident(full, ARENA), ARENA);
        // Free one piece of each page: no page can be returned. Then free all but the last page.
        let (even, odd): (Vec<_>, Vec<_>) = pieces.into_iter().partition(|p| p.as_ptr().addr() % PAGE == 0);
        even.iter().for_each(|piece| drop(arenas.give(*piece)));
        trim_all(&mut arenas);
        assert_eq!(resident(full, ARENA), ARENA);
        odd[..PIECES / 2 - 1].iter().for_each(|piece| drop(arenas.give(*piece)));
        trim_all(&mut arenas);
        assert_eq!(resident(full, ARENA), PAGE);
        // Pieces that are handed out again have memory again, and the piece that stayed in use kept its
        // contents.
        let again: Vec<_> = (0..PIECES).map(|_| arenas.take().unwrap()).collect();
        assert_eq!(arenas.all.len(), 2);
        assert!(!again.contains(&odd[PIECES / 2 - 1]));
        // SAFETY: the piece is still ours.
        assert!(unsafe { std::slice::from_raw_parts(odd[PIECES / 2 - 1].as_ptr(), PIECE) } == [0xa5; PIECE]);
        again.into_iter().for_each(|piece| drop(arenas.give(piece)));
        arenas.give(odd[PIECES / 2 - 1]);
        trim_all(&mut arenas);
        // One piece of the other arena is still in use.
        assert_eq!(arenas.all.keys().copied().collect::<Vec<_>>(), vec![last / ARENA * ARENA]);
        arenas.give(NonNull::new(std::ptr::with_exposed_provenance_mut(last)).unwrap());
        trim_all(&mut arenas);
        assert!(arenas.all.is_empty() && arenas.with_room.is_empty());
    }
}
