//! The region of requests in flight: memory that outlives the server, with a mark for each request that was
//! taken and is not answered (vhost-user, "Inflight I/O tracking", split rings).
//!
//! The front-end keeps the region's file and hands it to the next server. That server first takes the marked
//! requests, in the order in which they were taken.
//!
//! ```text
//!  one queue, aligned to 64 bytes        one descriptor
//!   0 features, 0                         0 mark: taken and not answered
//!   8 version, 1                          6 next: the answer before this one in its batch
//!  10 number of descriptors               8 counter: the order in which requests were taken
//!  12 head of the last answer
//!  14 used index when marks were cleared last
//!  16 descriptors, 16 bytes each
//! ```
//!
//! # Order of stores
//! A killed server stops between two stores, so their order decides what the next server finds:
//!
//! | step | killed after it |
//! |---|---|
//! | counter, then mark of a request that is taken | the request is taken again |
//! | `next`, then head of the last answer, for each answer of a batch | the requests are taken again |
//! | used index of the ring | the ring is ahead of the region: that many answers, from the head of the last one, are cleared |
//! | marks of the batch, then used index of the region | nothing is left to do |
//!
//! # Why `unsafe`
//! The region is mapped, and each field is an atomic at an address in it. [`Region::open`] checks that all
//! queues are inside the file, which is sealed against shrinking. The front-end may change the bytes at any
//! time: numbers are checked when they are used, and wrong ones damage the front-end's own disk only.
#![expect(unsafe_code, reason = "fields are atomics at addresses in mapped memory; see above")]

use std::fs::File;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::QUEUE_SIZE;
use crate::memory::has_huge_pages;

const VERSION: u16 = 1;
const HEAD_BYTES: usize = 16;
const DESCRIPTOR_BYTES: usize = 16;
const ALIGN_BYTES: usize = 64;

const AT_VERSION: usize = 8;
const AT_COUNT: usize = 10;
const AT_LAST: usize = 12;
const AT_USED: usize = 14;
const AT_NEXT: usize = 6;
const AT_COUNTER: usize = 8;

/// Why a region cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegionFault {
    #[error("a vhost-user inflight region for {queues} queues of {entries} entries is not possible")]
    Shape { queues: u16, entries: u16 },
    #[error(
        "the vhost-user inflight region was not made by this program: its file is too short or can be truncated"
    )]
    File,
    #[error("cannot map the vhost-user inflight region: {0}")]
    Map(#[from] std::io::Error),
    #[error(
        "the vhost-user inflight region does not belong to its ring: the ring has {ring} answers, the region {region}"
    )]
    Ring { ring: u16, region: u16 },
    #[error("the vhost-user inflight region is for {region} entries, the ring has {ring}")]
    Entries { ring: u16, region: u16 },
    #[error("the vhost-user inflight region has version {0}")]
    Version(u16),
}

fn bytes_of_queue(entries: u16) -> usize {
    (HEAD_BYTES + DESCRIPTOR_BYTES * usize::from(entries)).next_multiple_of(ALIGN_BYTES)
}

fn check_shape(queues: u16, entries: u16) -> Result<usize, RegionFault> {
    if queues == 0 || entries == 0 || entries > QUEUE_SIZE {
        return Err(RegionFault::Shape { queues, entries });
    }
    bytes_of_queue(entries).checked_mul(queues.into()).ok_or(RegionFault::Shape { queues, entries })
}

/// Makes the file of an empty region. Returns its length, too.
pub(crate) fn make(queues: u16, entries: u16) -> Result<(File, u64), RegionFault> {
    let bytes = check_shape(queues, entries)? as u64;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("vhost-in-flight", flags).map_err(std::io::Error::from)?);
    file.set_len(bytes)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(std::io::Error::from)?;
    Ok((file, bytes))
}

/// The region of all queues of a front-end, mapped.
pub(crate) struct Region {
    first: NonNull<u8>,
    len: usize,
    queues: u16,
    entries: u16,
}

// SAFETY: a mapping is plain memory, valid on every thread until it is dropped; all access is atomic.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps a region that [`make`] made.
    pub(crate) fn open(
        file: &File,
        (bytes, offset): (u64, u64),
        queues: u16,
        entries: u16,
    ) -> Result<Arc<Self>, RegionFault> {
        let len = check_shape(queues, entries)?;
        let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
        let is_whole = file.metadata()?.len() >= len as u64;
        // A huge page can be taken out of a sealed file: the next store would end this process.
        let lasts = seals.contains(SealFlags::SHRINK) && !has_huge_pages(file);
        if offset != 0 || bytes != len as u64 || !is_whole || !lasts {
            return Err(RegionFault::File);
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an unused address, so no memory of this process is touched.
        let first =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) }
                .map_err(std::io::Error::from)?;
        let first =
            NonNull::new(first.cast()).ok_or(std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
        Ok(Arc::new(Self { first, len, queues, entries }))
    }

    /// The part of one queue, after repair. `ring` is its number of entries, `used` the used index of the ring, and `is_reset` says
    /// that the driver may have begun with an empty ring. None: the region has no part for this queue.
    pub(crate) fn queue(
        self: &Arc<Self>,
        number: usize,
        ring: u16,
        used: u16,
        is_reset: bool,
    ) -> Result<Option<Marks>, RegionFault> {
        if number >= usize::from(self.queues) {
            return Ok(None);
        }
        if ring > self.entries {
            return Err(RegionFault::Entries { ring, region: self.entries });
        }
        let offset = bytes_of_queue(self.entries).wrapping_mul(number);
        // SAFETY: `open` checked that the region has all its queues.
        let first = unsafe { self.first.add(offset) };
        let mut marks = Marks {
            _region: Arc::clone(self),
            first,
            entries: ring,
            is_new: false,
            counter: 0,
            batch: Vec::new(),
        };
        marks.repair(used, is_reset)?;
        Ok(Some(marks))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped in `open` with this length; `Marks` keep the region.
        if let Err(error) = unsafe { rustix::mm::munmap(self.first.as_ptr().cast(), self.len) } {
            tracing::error!("cannot unmap a vhost-user inflight region: {error}");
        }
    }
}

/// The marks of one queue.
pub(crate) struct Marks {
    _region: Arc<Region>,
    first: NonNull<u8>,
    /// Entries of the ring.
    entries: u16,
    /// No server has used the region before, so it does not tell which requests were taken.
    pub(crate) is_new: bool,
    counter: u64,
    /// Heads that were answered since the used index of the region was stored.
    batch: Vec<u16>,
}

// SAFETY: the pointer goes into the region that the value keeps; all access is atomic.
unsafe impl Send for Marks {}

impl Marks {
    fn u16_at(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers give even offsets inside the queue's part.
        unsafe { AtomicU16::from_ptr(self.first.add(offset).cast().as_ptr()) }
    }

    fn descriptor(&self, head: u16) -> Option<usize> {
        (head < self.entries).then(|| HEAD_BYTES + DESCRIPTOR_BYTES * usize::from(head))
    }

    fn mark(&self, descriptor: usize) -> &AtomicU8 {
        // SAFETY: inside the queue's part.
        unsafe { AtomicU8::from_ptr(self.first.add(descriptor).as_ptr()) }
    }

    fn counter(&self, descriptor: usize) -> &AtomicU64 {
        // SAFETY: inside the queue's part, and aligned to 8.
        unsafe { AtomicU64::from_ptr(self.first.add(descriptor + AT_COUNTER).cast().as_ptr()) }
    }

    /// Makes the region agree with the ring.
    fn repair(&mut self, used: u16, is_reset: bool) -> Result<(), RegionFault> {
        let region = self.u16_at(AT_USED).load(Ordering::Acquire);
        let ahead = used.wrapping_sub(region);
        match self.u16_at(AT_VERSION).load(Ordering::Relaxed) {
            VERSION if ahead <= self.entries => self.clear_last(ahead),
            // Requests of an earlier driver.
            VERSION if is_reset => self.clear(),
            VERSION => return Err(RegionFault::Ring { ring: used, region }),
            0 => {
                self.is_new = true;
                self.clear();
                self.u16_at(AT_COUNT).store(self.entries, Ordering::Relaxed);
            }
            other => return Err(RegionFault::Version(other)),
        }
        self.u16_at(AT_USED).store(used, Ordering::Release);
        // Last: a region without a version is empty.
        self.u16_at(AT_VERSION).store(VERSION, Ordering::Release);
        Ok(())
    }

    /// Clears the marks of the last answers, which the driver sees.
    fn clear_last(&self, count: u16) {
        let mut head = self.u16_at(AT_LAST).load(Ordering::Relaxed);
        for _ in 0..count {
            let Some(descriptor) = self.descriptor(head) else { return };
            self.mark(descriptor).store(0, Ordering::Release);
            head = self.u16_at(descriptor + AT_NEXT).load(Ordering::Relaxed);
        }
    }

    /// Clears all marks: all requests that were taken are answered, or never will be.
    pub(crate) fn clear(&self) {
        for descriptor in (0..self.entries).filter_map(|head| self.descriptor(head)) {
            self.mark(descriptor).store(0, Ordering::Release);
        }
    }

    /// The requests that were taken and not answered, in the order in which they were taken.
    pub(crate) fn taken(&mut self) -> Vec<u16> {
        let marked = |head| {
            let descriptor = self.descriptor(head)?;
            let is_marked = self.mark(descriptor).load(Ordering::Acquire) != 0;
            is_marked.then(|| (self.counter(descriptor).load(Ordering::Relaxed), head))
        };
        let mut marked: Vec<_> = (0..self.entries).filter_map(marked).collect();
        marked.sort_unstable();
        self.counter = marked.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        marked.into_iter().map(|(_, head)| head).collect()
    }

    /// Marks a request before it is served.
    #[inline]
    pub(crate) fn take(&mut self, head: u16) {
        let Some(descriptor) = self.descriptor(head) else { return };
        if stores() {
            self.counter(descriptor).store(self.counter, Ordering::Relaxed);
        }
        self.counter = self.counter.wrapping_add(1);
        if stores() {
            self.mark(descriptor).store(1, Ordering::Release);
        }
    }

    /// Takes the mark of a request that goes back into the ring.
    pub(crate) fn give_back(&self, head: u16) {
        if let Some(descriptor) = self.descriptor(head)
            && stores()
        {
            self.mark(descriptor).store(0, Ordering::Release);
        }
    }

    /// Records an answer that the driver does not see yet.
    #[inline]
    pub(crate) fn answer(&mut self, head: u16) {
        let Some(descriptor) = self.descriptor(head) else { return };
        if stores() {
            let before = self.u16_at(AT_LAST).load(Ordering::Relaxed);
            self.u16_at(descriptor + AT_NEXT).store(before, Ordering::Relaxed);
        }
        if stores() {
            self.u16_at(AT_LAST).store(head, Ordering::Release);
        }
        self.batch.push(head);
    }

    /// Clears the marks of all answers, which the driver sees now that the used index of its ring is `used`.
    #[inline]
    pub(crate) fn seen(&mut self, used: u16) {
        for head in self.batch.drain(..) {
            // As in `descriptor`, which would borrow all of it.
            let descriptor = HEAD_BYTES + DESCRIPTOR_BYTES * usize::from(head);
            if stores() {
                // SAFETY: `answer` checked that the head is in the queue's part.
                unsafe { AtomicU8::from_ptr(self.first.add(descriptor).as_ptr()) }
                    .store(0, Ordering::Release);
            }
        }
        if stores() {
            self.u16_at(AT_USED).store(used, Ordering::Release);
        }
    }
}

/// Lets `count` more stores of this thread reach memory, and none after them. Returns how many were left before.
#[cfg(test)]
pub(super) fn limit_stores(count: usize) -> usize {
    LEFT.replace(count)
}

#[cfg(test)]
thread_local! {
    /// How many stores of the thread reach memory before it counts as killed.
    static LEFT: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
}

/// Whether the next store reaches memory: a test stops a thread after any number of them.
#[cfg(test)]
pub(super) fn stores() -> bool {
    LEFT.with(|left| {
        let now = left.get();
        left.set(now.saturating_sub(1));
        now > 0
    })
}

/// Whether the next store reaches memory.
#[cfg(not(test))]
#[inline(always)]
pub(super) const fn stores() -> bool {
    true
}

#[cfg(test)]
mod tests;
