//! The memory of a queue: the kernel's descriptors, which are mapped read-only, and a buffer for each request, from and into
//! which the kernel copies.
#![expect(unsafe_code, reason = "the kernel writes to mappings, which Rust cannot see")]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::abi::{DESCRIPTOR_BYTES, Descriptor, MAX_QUEUE_DEPTH};

const PAGE_BYTES: usize = 4096;

/// One mapping, unmapped when dropped.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the owner of this value, and depends on no thread.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(start: *mut std::ffi::c_void, bytes: usize) -> std::io::Result<Self> {
        let start =
            NonNull::new(start.cast()).ok_or_else(|| std::io::Error::other("a mapping at address 0"))?;
        Ok(Self { start, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length by the constructors below, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// The kernel's request for each tag of a queue.
pub(super) struct Descriptors {
    mapping: Mapping,
    depth: u16,
}

impl Descriptors {
    pub(super) fn map(device: BorrowedFd<'_>, queue: u16, depth: u16) -> std::io::Result<Self> {
        let bytes = (usize::from(depth) * DESCRIPTOR_BYTES).next_multiple_of(PAGE_BYTES);
        // ublk places the descriptors of each queue as if it had the maximum depth.
        let each = (MAX_QUEUE_DEPTH * DESCRIPTOR_BYTES as u64).next_multiple_of(PAGE_BYTES as u64);
        let offset = u64::from(queue) * each;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                device,
                offset,
            )
        }?;
        Ok(Self { mapping: Mapping::new(start, bytes)?, depth })
    }

    pub(super) fn get(&self, tag: u16) -> Option<Descriptor> {
        if tag >= self.depth {
            return None;
        }
        // SAFETY: the mapping has `depth` descriptors. The kernel writes this one before it completes the command that
        // brought us here, and not again before we commit its result; a volatile read takes it from memory once.
        let bytes = unsafe {
            let at = self.mapping.start.as_ptr().add(usize::from(tag) * DESCRIPTOR_BYTES);
            at.cast::<[u8; DESCRIPTOR_BYTES]>().read_volatile()
        };
        Some(Descriptor::decode(&bytes))
    }
}

/// A buffer for each tag of a queue.
pub(super) struct Buffers {
    mapping: Mapping,
    each_bytes: usize,
    depth: u16,
}

impl Buffers {
    pub(super) fn new(depth: u16, each_bytes: usize) -> std::io::Result<Self> {
        let bytes = usize::from(depth) * each_bytes;
        // SAFETY: a new private mapping at an address of the kernel's choice touches no memory that is in use.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        Ok(Self { mapping: Mapping::new(start, bytes)?, each_bytes, depth })
    }

    /// The address of a tag's buffer, for the kernel.
    pub(super) fn address(&self, tag: u16) -> u64 {
        let at = self.mapping.start.as_ptr().addr() + usize::from(tag) * self.each_bytes;
        u64::try_from(at).unwrap_or(0)
    }

    /// The first `len` bytes of a tag's buffer; `None` if it is shorter, or the queue has no such tag. May be called only between the
    /// arrival of the tag's request and the commit of its result: the rest of the time the buffer belongs to
    /// the kernel.
    pub(super) fn get(&mut self, tag: u16, len: usize) -> Option<&mut [u8]> {
        if tag >= self.depth || len > self.each_bytes {
            return None;
        }
        // SAFETY: inside of the mapping, checked above; borrowed from `self`, so no two slices overlap. The kernel
        // copies in and out only in calls of `io_uring_enter` by this thread, during which no slice lives.
        unsafe {
            let at = self.mapping.start.as_ptr().add(usize::from(tag) * self.each_bytes);
            Some(std::slice::from_raw_parts_mut(at, len))
        }
    }
}
