//! Maps parts of a memory file, and reserves and frees their pages.
//!
//! `unsafe` here: mapping memory, and references into it. Numbers that two threads may access are atomics;
//! bytes have one owner, a [`Run`].
#![expect(unsafe_code, reason = "parts of a file are mapped; see above")]

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::FallocateFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::MemoryFile;
use super::crash;

/// A part of a file, mapped shared. Its pages exist after they were reserved ([`reserve`]); other pages must
/// not be accessed.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: usize,
    len: usize,
}

impl Mapping {
    /// Maps a part of the file at an address that is a multiple of `align`.
    pub(crate) fn new(file: &File, offset: u64, len: usize, align: usize) -> io::Result<Self> {
        let wanted = len.saturating_add(align);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice, which takes address space only.
        let space =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), wanted, ProtFlags::empty(), flags) }?;
        let space = space.expose_provenance();
        let address = space.next_multiple_of(align);
        let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: inside the address space that was taken above, which nobody uses.
        let mapped = unsafe {
            rustix::mm::mmap(with_exposed_provenance_mut(address), len, access, shared, file, offset)
        };
        if let Err(error) = mapped {
            unmap(space, wanted);
            return Err(error.into());
        }
        unmap(space, address - space);
        unmap(address + len, space + wanted - address - len);
        let mapping = Self { address, len };
        mapping.advise(Advice::LinuxDontDump);
        Ok(mapping)
    }

    /// Asks the kernel for huge pages, if the file's file system has them.
    pub(crate) fn prefer_huge_pages(&self) {
        self.advise(Advice::LinuxHugepage);
    }

    /// Gives advice that changes no contents. A kernel without it refuses.
    fn advise(&self, advice: Advice) {
        // SAFETY: our own mapping, as said above.
        let _ = unsafe { rustix::mm::madvise(with_exposed_provenance_mut(self.address), self.len, advice) };
    }

    /// Its first address.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Locks the page at this offset in RAM, if the system allows that.
    pub(crate) fn lock_page(&self, at: usize) -> bool {
        let page = with_exposed_provenance_mut(self.address + at.min(self.len.saturating_sub(PAGE)));
        // SAFETY: a page of our own mapping.
        unsafe { rustix::mm::mlock(page, PAGE) }.is_ok()
    }

    /// The number at this offset, whose page was reserved.
    pub(crate) fn u32_at(&self, at: usize) -> Option<&AtomicU32> {
        let is_inside = at.is_multiple_of(4) && at.checked_add(4)? <= self.len;
        // SAFETY: inside the mapping, which lives as long as `self`, and aligned.
        is_inside.then(|| unsafe { &*with_exposed_provenance::<AtomicU32>(self.address + at) })
    }

    /// Like [`Mapping::u32_at`], with 8 bytes.
    pub(crate) fn u64_at(&self, at: usize) -> Option<&AtomicU64> {
        let is_inside = at.is_multiple_of(8) && at.checked_add(8)? <= self.len;
        // SAFETY: as above.
        is_inside.then(|| unsafe { &*with_exposed_provenance::<AtomicU64>(self.address + at) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.address, self.len);
    }
}

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

fn unmap(address: usize, len: usize) {
    if len > 0 {
        // SAFETY: a part of our own mapping that nobody uses.
        let _ = unsafe { rustix::mm::munmap(with_exposed_provenance_mut(address), len) };
    }
}

/// Reserves the pages of a mapped part of a file. `false`: the file system is full. Without a reservation,
/// the first access to a page in a full file system would end the process.
///
/// The pages are populated through the mapping, because only then the kernel uses huge pages if the mapping
/// asks for them. A kernel that cannot do that (before Linux 5.14) reserves space in the file.
pub(crate) fn reserve(file: &File, (address, offset): (usize, u64), len: usize) -> bool {
    if crash::is_dead() {
        return false;
    }
    let start = with_exposed_provenance_mut(address);
    // SAFETY: our own mapping; its contents stay.
    match unsafe { rustix::mm::madvise(start, len, Advice::LinuxPopulateWrite) } {
        Ok(()) => true,
        Err(rustix::io::Errno::INVAL) => {
            rustix::fs::fallocate(file, FallocateFlags::empty(), offset, len as u64).is_ok()
        }
        Err(error) => {
            tracing::debug!(%error, "there is no memory for a write cache in a file");
            false
        }
    }
}

/// Frees the pages of a mapped part of a file. Their contents are not needed any more.
pub(crate) fn give_back(address: usize, len: usize) {
    if crash::is_dead() {
        return;
    }
    // SAFETY: our own mapping; its contents may go, as said above.
    let done = unsafe { rustix::mm::madvise(with_exposed_provenance_mut(address), len, Advice::LinuxRemove) };
    if let Err(error) = done {
        tracing::warn!(%error, "cannot return unused memory of a write cache to the kernel: it stays in use, and no data is affected");
    }
}

/// Bytes of a memory file with one owner. Dropping it frees its pages, unless the process hands the file
/// over.
pub(crate) struct Run {
    file: Arc<MemoryFile>,
    address: NonNull<u8>,
    len: usize,
    /// Its offset in the file.
    offset: u64,
}

// SAFETY: plain owned memory.
unsafe impl Send for Run {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Run {}

impl Run {
    /// Takes ownership of a part of the file. Its pages were reserved, it stays mapped as long as `file`
    /// exists, and no other run has it.
    pub(super) fn new(file: Arc<MemoryFile>, address: usize, len: usize, offset: u64) -> Option<Self> {
        let address = NonNull::new(with_exposed_provenance_mut(address))?;
        Some(Self { file, address, len, offset })
    }

    /// Its offset in the file.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }
}

impl Deref for Run {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: as `new` says; the kernel initialised the bytes.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }
}

impl DerefMut for Run {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.file.give_run(self.offset, (self.address.as_ptr().expose_provenance(), self.len));
    }
}
