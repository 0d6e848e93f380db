//! Page-aligned memory that the kernel can send without a copy.
//!
//! A socket may keep pages long after the system call that sent them. So these pages must never change again,
//! and must not return to an allocator that reuses them. Each buffer is therefore a mapping of its own.
//! Unmapping or replacing it leaves the old pages to the kernel, which frees them when they are sent
//! (`vmsplice(2)`, without the gift flag).
#![expect(
    unsafe_code,
    reason = "memory is mapped, so that the kernel can keep its pages after this process has dropped them"
)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::copy_alignment::lead_bytes;

/// Buffers smaller than this begin at a page's start: an additional page would be a large part of them.
const LED_MIN_BYTES: usize = 32 << 10;

/// A zero-initialised buffer in pages of its own. Its only owner may write to it.
pub struct Pages {
    mapping: NonNull<u8>,
    /// Offset of the buffer in the mapping: less than a page.
    lead: usize,
    len: usize,
    /// Whether the kernel may still read the pages, because they were handed to it.
    was_handed_out: AtomicBool,
}

// SAFETY: the mapping belongs to this value alone and is bound to no thread.
unsafe impl Send for Pages {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Pages {}

impl Pages {
    /// Creates a buffer of `len` zeroes. Fails if the process may map no more memory.
    pub fn new(len: usize) -> std::io::Result<Self> {
        Self::with_lead(len, lead_of(len))
    }

    /// Creates `count` buffers with the system calls of one.
    pub fn many(count: usize, len: usize) -> std::io::Result<Vec<Self>> {
        Self::many_with_lead(count, len, lead_of(len))
    }

    fn with_lead(len: usize, lead: usize) -> std::io::Result<Self> {
        Self::many_with_lead(1, len, lead)?.pop().ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
    }

    fn many_with_lead(count: usize, len: usize, lead: usize) -> std::io::Result<Vec<Self>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let each_bytes = mapped_bytes(lead, len);
        let bytes = each_bytes.checked_mul(count).ok_or(std::io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new private mapping at an address of the kernel's choice touches no memory that is in use.
        let mapping = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let mapping: NonNull<u8> =
            NonNull::new(mapping.cast()).ok_or_else(|| std::io::Error::other("a mapping at address 0"))?;
        // Without this advice, adjacent buffers would share a huge page, which is split when one of them is
        // unmapped, and is sent more slowly.
        // SAFETY: the mapping above; the advice changes no contents.
        let _ = unsafe { rustix::mm::madvise(mapping.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
        populate(mapping, bytes);
        let piece = |number: usize| {
            // SAFETY: within the mapping, which has `count` pieces. Each is unmapped separately.
            let mapping = unsafe { mapping.add(each_bytes.saturating_mul(number)) };
            Self { mapping, lead, len, was_handed_out: AtomicBool::new(false) }
        };
        Ok((0..count).map(piece).collect())
    }

    /// The memory it occupies: whole pages.
    pub fn memory_bytes(&self) -> usize {
        mapped_bytes(self.lead, self.len)
    }

    /// Drops its pages, which the kernel frees unless it still reads them; the next access gets new zeroed
    /// pages. `false`: it failed, and the old pages remain.
    fn leave(&mut self) -> bool {
        let (start, bytes) = (self.mapping.as_ptr().cast(), self.memory_bytes());
        // SAFETY: the mapping of this value, which nobody borrows; it reads as zeroes afterwards.
        unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxDontNeed) }.is_ok()
    }

    /// Makes it immutable and shareable.
    pub fn share(self) -> SharedPages {
        SharedPages(Arc::new(self))
    }

    /// Creates a buffer with a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> std::io::Result<Self> {
        let mut pages = Self::new(bytes.len())?;
        pages.copy_from_slice(bytes);
        Ok(pages)
    }
}

impl std::ops::Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has at least `lead + len` bytes, all of them initialised (zeroes), and nobody writes to them while
        // they are borrowed from here.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().add(self.lead), self.len) }
    }
}

impl std::ops::DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably. The kernel does not read these pages either: they
        // are handed out only while they are shared, and [`SharedPages::take_back`] replaces pages that were
        // handed out.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.as_ptr().add(self.lead), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let (start, bytes) = (self.mapping.as_ptr().cast(), self.memory_bytes());
        // SAFETY: mapped with this length by `new`, and nothing borrows from it any more. Pages that the
        // kernel still sends stay allocated until they are sent.
        if unsafe { rustix::mm::munmap(start, bytes) }.is_err() {
            // Unmapping failed, because it would have split a mapping and the process has reached its limit
            // of mappings. The address range stays reserved; its memory is freed.
            self.leave();
        }
    }
}

/// Allocates all pages at once, because all of them are about to be written, and sixteen page faults cost
/// more than one call. Kernels before 5.14 do not support this; the pages are then allocated by faults.
fn populate(mapping: NonNull<u8>, bytes: usize) {
    // SAFETY: a mapping of the caller's; its contents stay.
    let _ = unsafe { rustix::mm::madvise(mapping.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) };
}

/// The offset in a page at which a buffer of `len` bytes begins.
fn lead_of(len: usize) -> usize {
    if len < LED_MIN_BYTES { 0 } else { lead_bytes() }
}

fn mapped_bytes(lead: usize, len: usize) -> usize {
    // Rounded up to whole pages, because adjacent buffers are unmapped one by one.
    lead.saturating_add(len).max(1).next_multiple_of(rustix::param::page_size())
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pages({} bytes)", self.len)
    }
}

/// [`Pages`] that never change again, with any number of owners.
#[derive(Clone, Debug)]
pub struct SharedPages(Arc<Pages>);

impl SharedPages {
    /// As [`Pages::memory_bytes`].
    pub fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    /// Returns the memory for writing; with new pages if the kernel may still read the old ones. Returns
    /// `None`, and drops its reference, if there is another owner.
    pub fn take_back(self) -> Option<Pages> {
        let mut pages = Arc::try_unwrap(self.0).ok()?;
        if *pages.was_handed_out.get_mut() {
            if !pages.leave() {
                return None;
            }
            *pages.was_handed_out.get_mut() = false;
            populate(pages.mapping, pages.memory_bytes());
        }
        Some(pages)
    }
}

impl std::ops::Deref for SharedPages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Immutable bytes in a device's memory, lent to a front-end that sends them.
#[derive(Clone, Debug)]
pub struct SharedSlice {
    holder: SharedPages,
    start: usize,
    end: usize,
}

impl SharedSlice {
    /// A part of `holder`; `None` if the range is not inside it.
    pub fn new(holder: SharedPages, start: usize, len: usize) -> Option<Self> {
        let end = start.checked_add(len).filter(|end| *end <= holder.len())?;
        Some(Self { holder, start, end })
    }

    /// The bytes, for the kernel to keep for any time: afterwards their pages are never written again.
    pub fn hand_out(&self) -> &[u8] {
        self.holder.0.was_handed_out.store(true, Ordering::Release);
        self
    }
}

impl std::ops::Deref for SharedSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.holder.get(self.start..self.end).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_not_written_again() {
        let shared = Pages::copy_of(&[7; 5000]).unwrap().share();
        let lent = SharedSlice::new(shared.clone(), 4000, 1000).unwrap();
        assert_eq!(*lent, [7; 1000]);
        assert!(shared.clone().take_back().is_none(), "somebody has it");
        drop(lent);
        let mut again = shared.take_back().unwrap();
        again.fill(8);
        let shared = again.share();
        assert_eq!(*SharedSlice::new(shared.clone(), 0, 5000).unwrap().hand_out(), [8; 5000]);
        let place = shared.as_ptr();
        let renewed = shared.take_back().unwrap();
        assert_eq!(renewed.as_ptr(), place);
        assert_eq!(*renewed, [0; 5000], "the kernel may have the old pages");
    }

    #[test]
    fn pages_are_complete_at_every_alignment() {
        const LEN: usize = 65_536;
        let page_bytes = rustix::param::page_size();
        for (lead, memory_bytes) in [(0, LEN), (64, LEN + page_bytes)] {
            let mut pages = Pages::with_lead(LEN, lead).unwrap();
            assert_eq!((pages.len(), pages.memory_bytes()), (LEN, memory_bytes));
            assert_eq!(pages.as_ptr().addr() % page_bytes, lead);
            pages.fill(9);
            let shared = pages.share();
            assert_eq!(*SharedSlice::new(shared.clone(), 0, LEN).unwrap().hand_out(), [9; LEN]);
            assert_eq!(*shared.take_back().unwrap(), [0; LEN]);
        }
        assert_eq!(Pages::new(4096).unwrap().as_ptr().addr() % page_bytes, 0, "a small one is not led");
    }

    #[test]
    fn pieces_of_one_mapping_go_one_by_one() {
        let pieces = Pages::many(5, 70_000).unwrap();
        let mut shared: Vec<SharedPages> = Vec::new();
        for (mut piece, number) in pieces.into_iter().zip(1..) {
            assert_eq!(*piece, [0; 70_000]);
            piece.fill(number);
            shared.push(piece.share());
        }
        for gone in [2, 0, 2] {
            drop(shared.remove(gone));
        }
        assert_eq!(*shared[0], [2; 70_000]);
        assert_eq!(*shared[1], [4; 70_000]);
        SharedSlice::new(shared[0].clone(), 0, 1).unwrap().hand_out();
        assert_eq!(*shared.remove(0).take_back().unwrap(), [0; 70_000]);
        assert_eq!(*shared[0], [4; 70_000]);
    }

    #[test]
    fn only_existing_bytes_are_shared() {
        let shared = Pages::new(4096).unwrap().share();
        assert!(SharedSlice::new(shared.clone(), 0, 4096).is_some_and(|lent| *lent == [0; 4096]));
        assert!(SharedSlice::new(shared.clone(), 1, 4096).is_none());
        assert!(SharedSlice::new(shared, usize::MAX, 2).is_none());
        assert!(Pages::new(0).unwrap().is_empty());
    }
}
