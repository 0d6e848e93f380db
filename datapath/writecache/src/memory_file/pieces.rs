//! Allocates the 2 KiB blocks ("pieces") that hold the index of a write cache whose memory is in a file.
//! Arenas are 2 MiB ranges of that file. [`crate::index_memory`] does the same in process memory.
//!
//! A caller of [`FilePieces::take`] has a leaf locked and cannot handle "file system full". So free pieces
//! are reserved before ([`FilePieces::has_spare`]).

use std::collections::BTreeSet;
use std::fs::File;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::{Mapping, PAGE, PARTIAL_PIECES, give_back, reserve};
use crate::index_memory;

/// Size of a piece in bytes.
const PIECE: usize = index_memory::PIECE;

/// Size of an arena in bytes: a huge page.
const ARENA: usize = 2 << 20;

/// Number of pieces in an arena.
const PIECES: usize = ARENA / PIECE;

const PAGES: usize = ARENA / PAGE;
const PIECES_PER_PAGE: usize = PAGE / PIECE;

/// The reserve of free pieces. The threads of a volume together take fewer than this between two calls of
/// [`FilePieces::has_spare`].
const SPARE: usize = 256;

/// Number of pages that are reserved at a time.
const RESERVED_PAGES: usize = 64;

/// An arena with fewer free pages keeps them, because freeing some splits a huge page.
const LEAST_FREE_PAGES: usize = PAGES / 8;

/// Size of the region in bytes: the tables of all leaves, and the same size again for fragmentation.
pub(super) fn region_bytes(leaves: u64) -> u64 {
    let pieces = leaves * (1 + PARTIAL_PIECES as u64) + 4 * PIECES as u64;
    (2 * pieces * PIECE as u64).next_multiple_of(ARENA as u64)
}

#[derive(Debug)]
struct Arena {
    mapping: Mapping,
    offset: u64,
    used: Box<[bool; PIECES]>,
    /// Pages that are reserved.
    reserved: Box<[bool; PAGES]>,
    /// Free pieces on reserved pages.
    spare: usize,
    /// Number of pages that are not reserved.
    unreserved_pages: usize,
}

#[derive(Debug, Default)]
struct Arenas {
    /// By number.
    all: Vec<Arena>,
    /// Arenas with spare pieces. The first one is used first, so that the others become empty.
    with_spare: BTreeSet<usize>,
    /// Arenas with pages that are not reserved.
    with_unreserved: BTreeSet<usize>,
    /// Arenas in which a piece was freed since they were trimmed.
    given: BTreeSet<usize>,
}

/// The allocator of one memory file; see the module's documentation.
#[derive(Debug)]
pub(crate) struct FilePieces {
    this: Weak<Self>,
    file: File,
    /// Offset of the region in the file.
    start: u64,
    arenas: Mutex<Arenas>,
    /// Number of free pieces on reserved pages.
    spare: AtomicUsize,
}

impl Arena {
    fn address_of(&self, piece: usize) -> usize {
        self.mapping.address() + piece * PIECE
    }

    fn take(&mut self) -> Option<usize> {
        let is_reserved = |piece: &usize| self.reserved.get(piece / PIECES_PER_PAGE) == Some(&true);
        let is_free = |piece: &usize| self.used.get(*piece) == Some(&false);
        let piece = (0..PIECES).find(|piece| is_free(piece) && is_reserved(piece))?;
        *self.used.get_mut(piece)? = true;
        self.spare = self.spare.saturating_sub(1);
        Some(piece)
    }

    fn is_free(&self, page: usize) -> bool {
        let first = page * PIECES_PER_PAGE;
        self.reserved.get(page) == Some(&true)
            && self.used.get(first..first + PIECES_PER_PAGE).is_some_and(|used| !used.contains(&true))
    }
}

impl FilePieces {
    pub(super) fn new(file: File, start: u64) -> Arc<Self> {
        Arc::new_cyclic(|this| {
            let (this, spare) = (Weak::clone(this), AtomicUsize::new(0));
            Self { this, file, start, arenas: Mutex::default(), spare }
        })
    }

    /// Whether there are enough free pieces for a change. `false`: the file system is full.
    pub(crate) fn has_spare(&self) -> bool {
        self.spare.load(Ordering::Relaxed) >= SPARE || self.make_spare()
    }

    #[cold]
    fn make_spare(&self) -> bool {
        let mut arenas = self.arenas.lock();
        while self.spare.load(Ordering::Relaxed) < SPARE {
            let number = match arenas.with_unreserved.first() {
                Some(number) => *number,
                None => match self.add(&mut arenas) {
                    Some(number) => number,
                    None => return false,
                },
            };
            if !self.reserve_some(&mut arenas, number) {
                return false;
            }
        }
        true
    }

    /// Reserves some pages of an arena.
    fn reserve_some(&self, arenas: &mut Arenas, number: usize) -> bool {
        let Arenas { all, with_spare, with_unreserved, .. } = arenas;
        let Some(arena) = all.get_mut(number) else { return false };
        let Some(first) = arena.reserved.iter().position(|reserved| !reserved) else { return false };
        let run =
            arena.reserved.iter().skip(first).take(RESERVED_PAGES).take_while(|reserved| !**reserved).count();
        let (at, len) = (first * PAGE, run * PAGE);
        if !reserve(&self.file, (arena.mapping.address() + at, arena.offset + at as u64), len) {
            return false;
        }
        for page in first..first + run {
            arena.reserved.get_mut(page).into_iter().for_each(|reserved| *reserved = true);
            let pieces = page * PIECES_PER_PAGE..(page + 1) * PIECES_PER_PAGE;
            let free = arena.used.get(pieces).map_or(0, |used| used.iter().filter(|used| !**used).count());
            arena.spare += free;
            self.spare.fetch_add(free, Ordering::Relaxed);
        }
        arena.unreserved_pages = arena.unreserved_pages.saturating_sub(run);
        if arena.unreserved_pages == 0 {
            with_unreserved.remove(&number);
        }
        if arena.spare > 0 {
            with_spare.insert(number);
        }
        true
    }

    /// Adds an arena, without pages.
    fn add(&self, arenas: &mut Arenas) -> Option<usize> {
        let number = arenas.all.len();
        let offset = self.start + number as u64 * ARENA as u64;
        let mapping = match Mapping::new(&self.file, offset, ARENA, ARENA) {
            Ok(mapping) => mapping,
            Err(error) => {
                tracing::debug!(%error, "no address space for the index of a write cache in a memory file");
                return None;
            }
        };
        mapping.prefer_huge_pages();
        index_memory::know_arena(mapping.address(), Weak::clone(&self.this));
        let (used, reserved) = (Box::new([false; PIECES]), Box::new([false; PAGES]));
        arenas.all.push(Arena { mapping, offset, used, reserved, spare: 0, unreserved_pages: PAGES });
        arenas.with_unreserved.insert(number);
        Some(number)
    }

    /// Takes a piece; also returns its number. `None`: there is none, although [`FilePieces::has_spare`]
    /// returned true.
    pub(crate) fn take(&self) -> Option<(NonNull<u8>, u32)> {
        if self.spare.load(Ordering::Relaxed) == 0 {
            self.make_spare();
        }
        let mut arenas = self.arenas.lock();
        let number = *arenas.with_spare.first()?;
        let Arenas { all, with_spare, .. } = &mut *arenas;
        let arena = all.get_mut(number)?;
        let piece = arena.take()?;
        if arena.spare == 0 {
            with_spare.remove(&number);
        }
        self.spare.fetch_sub(1, Ordering::Relaxed);
        let address = NonNull::new(std::ptr::with_exposed_provenance_mut(arena.address_of(piece)))?;
        Some((address, u32::try_from(number * PIECES + piece).ok()?))
    }

    /// Frees a piece. Its contents stay until it is taken again.
    pub(crate) fn give(&self, address: usize) {
        let mut arenas = self.arenas.lock();
        let start = address - address % ARENA;
        let Some(number) = arenas.all.iter().position(|arena| arena.mapping.address() == start) else {
            return;
        };
        let Arenas { all, with_spare, given, .. } = &mut *arenas;
        let Some(arena) = all.get_mut(number) else { return };
        if let Some(used) = arena.used.get_mut(address % ARENA / PIECE) {
            *used = false;
        }
        arena.spare += 1;
        with_spare.insert(number);
        given.insert(number);
        self.spare.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes over a piece that another process left in use. `None`: the number is invalid, or was taken over
    /// already.
    pub(crate) fn adopt(&self, number: u32) -> Option<NonNull<u8>> {
        let (number, piece) = (number as usize / PIECES, number as usize % PIECES);
        let mut arenas = self.arenas.lock();
        while arenas.all.len() <= number {
            self.add(&mut arenas)?;
        }
        let arena = arenas.all.get_mut(number)?;
        let used = arena.used.get_mut(piece)?;
        if std::mem::replace(used, true) {
            return None;
        }
        // A piece in use has memory.
        if let Some(reserved) = arena.reserved.get_mut(piece / PIECES_PER_PAGE)
            && !std::mem::replace(reserved, true)
        {
            arena.unreserved_pages = arena.unreserved_pages.saturating_sub(1);
        }
        NonNull::new(std::ptr::with_exposed_provenance_mut(arena.address_of(piece)))
    }

    /// Ends a recovery: all pieces in use were taken over, so the others are counted as free.
    pub(super) fn adopted_all(&self) {
        let mut arenas = self.arenas.lock();
        let Arenas { all, with_spare, with_unreserved, .. } = &mut *arenas;
        for (number, arena) in all.iter_mut().enumerate() {
            let on_page = |piece: usize| arena.reserved.get(piece / PIECES_PER_PAGE) == Some(&true);
            let spare =
                arena.used.iter().enumerate().filter(|(piece, used)| !**used && on_page(*piece)).count();
            arena.spare = spare;
            self.spare.fetch_add(spare, Ordering::Relaxed);
            if spare > 0 {
                with_spare.insert(number);
            }
            if arena.unreserved_pages > 0 {
                with_unreserved.insert(number);
            }
        }
    }

    /// Whether a page of the file is reserved.
    pub(super) fn is_page_reserved(&self, offset: u64) -> bool {
        let at = offset.saturating_sub(self.start);
        let (Ok(number), Ok(page)) = (usize::try_from(at / ARENA as u64), usize::try_from(at % ARENA as u64))
        else {
            return false;
        };
        let arenas = self.arenas.lock();
        arenas.all.get(number).is_some_and(|arena| arena.reserved.get(page / PAGE) == Some(&true))
    }

    /// Whether [`FilePieces::trim`] may have work to do.
    pub(crate) fn wants_trim(&self) -> bool {
        !self.arenas.lock().given.is_empty()
    }

    /// Returns pages without pieces in use to the system, in arenas with enough of them.
    pub(crate) fn trim(&self) {
        let mut arenas = self.arenas.lock();
        for number in std::mem::take(&mut arenas.given) {
            let Arenas { all, with_spare, with_unreserved, .. } = &mut *arenas;
            let Some(arena) = all.get_mut(number) else { continue };
            let pages: Vec<usize> = (0..PAGES).filter(|page| arena.is_free(*page)).collect();
            let pieces = pages.len() * PIECES_PER_PAGE;
            let left = self.spare.load(Ordering::Relaxed).saturating_sub(pieces);
            if pages.len() < LEAST_FREE_PAGES || left < 2 * SPARE {
                continue;
            }
            for run in pages.chunk_by(|one, next| one + 1 == *next) {
                let Some(first) = run.first() else { continue };
                give_back(arena.mapping.address() + first * PAGE, run.len() * PAGE);
                for page in run {
                    arena.reserved.get_mut(*page).into_iter().for_each(|reserved| *reserved = false);
                }
            }
            arena.spare = arena.spare.saturating_sub(pieces);
            arena.unreserved_pages += pages.len();
            self.spare.fetch_sub(pieces, Ordering::Relaxed);
            with_unreserved.insert(number);
            if arena.spare == 0 {
                with_spare.remove(&number);
            }
        }
    }
}

impl Drop for FilePieces {
    fn drop(&mut self) {
        index_memory::forget_arenas(self.arenas.get_mut().all.iter().map(|arena| arena.mapping.address()));
    }
}
