//! The three rings of a split virtqueue in guest memory (virtio 2.7), as a device uses them.
//!
//! # Why `unsafe`
//! Rings are shared with the guest's processors, so each field is an atomic at an address in mapped memory.
//! [`Rings::new`] finds all three rings inside mapped regions, checks their alignment, and keeps the memory;
//! indices are taken modulo the queue size, a power of two, so no access leaves the rings.
//!
//! # Order of accesses
//! | here | pairs with the driver's |
//! |---|---|
//! | load `avail.idx` (acquire), then entries and descriptors | entries and descriptors, then store `avail.idx` |
//! | used elements, then store `used.idx` (release) | load `used.idx`, then elements |
//! | store `used.idx`, full fence, load `used_event` or `avail.flags` | store `used_event`, full fence, load `used.idx` |
//! | store `avail_event` or `used.flags`, full fence, load `avail.idx` | store `avail.idx`, full fence, load `avail_event` |
#![expect(unsafe_code, reason = "ring fields are atomics at addresses in mapped memory; see above")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use super::marks::stores;
use crate::fault::RingFault;
use crate::memory::GuestMemory;

/// Most entries of a queue.
pub(crate) const QUEUE_SIZE: u16 = 1024;

/// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const NO_INTERRUPT: u16 = 1;
/// `VIRTQ_USED_F_NO_NOTIFY`.
const NO_NOTIFY: u16 = 1;

/// `flags` and `idx` before the entries of the available and the used ring.
const RING_HEADER_BYTES: usize = 4;

/// The addresses of the rings in the front-end's process, as it reported them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// One descriptor, copied out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    pub(crate) const BYTES: u32 = 16;
    pub(crate) const NEXT: u16 = 1;
    pub(crate) const WRITE: u16 = 2;
    pub(crate) const INDIRECT: u16 = 4;

    /// From the two halves of a descriptor, as they are in memory.
    pub(crate) fn from_words(addr: u64, rest: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = u64::from_le(rest).to_le_bytes();
        Self {
            addr: u64::from_le(addr),
            len: u32::from_le_bytes([a, b, c, d]),
            flags: u16::from_le_bytes([e, f]),
            next: u16::from_le_bytes([g, h]),
        }
    }
}

/// The rings of one queue.
pub(crate) struct Rings {
    entries: u16,
    descriptors: NonNull<u8>,
    available: NonNull<u8>,
    used: NonNull<u8>,
    event_idx: bool,
    /// Keeps the memory of the three rings mapped.
    memory: Arc<GuestMemory>,
}

// SAFETY: the pointers go into memory that the value keeps; all access is atomic.
unsafe impl Send for Rings {}

impl Rings {
    /// Finds the rings in memory.
    pub(crate) fn new(
        memory: &Arc<GuestMemory>,
        entries: u16,
        addresses: RingAddresses,
        event_idx: bool,
    ) -> Result<Self, RingFault> {
        if !entries.is_power_of_two() || entries > QUEUE_SIZE {
            return Err(RingFault::QueueSize(entries));
        }
        let count = u64::from(entries);
        // The event fields after both rings are included even if they are not used.
        let find = |name, addr, len, align| {
            let segment = memory.segment_of_user(addr, len).ok_or(RingFault::RingAddress { name, addr })?;
            if !segment.first().addr().get().is_multiple_of(align) {
                return Err(RingFault::RingAddress { name, addr });
            }
            Ok(segment.first())
        };
        Ok(Self {
            entries,
            descriptors: find("descriptor table", addresses.descriptors, count * 16, 16)?,
            available: find("available ring", addresses.available, count * 2 + 6, 2)?,
            used: find("used ring", addresses.used, count * 8 + 6, 4)?,
            event_idx,
            memory: Arc::clone(memory),
        })
    }

    /// Number of entries.
    pub(crate) fn entries(&self) -> u16 {
        self.entries
    }

    /// The memory that the rings and their buffers are in.
    pub(crate) fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & self.entries.wrapping_sub(1))
    }

    /// A 16-bit field of one of the rings.
    fn field(&self, ring: NonNull<u8>, offset: usize) -> &AtomicU16 {
        // SAFETY: callers give offsets inside the ring that are even; `new` has checked place and alignment.
        unsafe { AtomicU16::from_ptr(ring.add(offset).cast().as_ptr()) }
    }

    /// The driver's index of available requests.
    pub(crate) fn available_index(&self) -> u16 {
        u16::from_le(self.field(self.available, 2).load(Ordering::Acquire))
    }

    /// The head of a chain, as the driver wrote it.
    pub(crate) fn available_head(&self, index: u16) -> u16 {
        let offset = RING_HEADER_BYTES.wrapping_add(self.slot(index).wrapping_mul(2));
        u16::from_le(self.field(self.available, offset).load(Ordering::Relaxed))
    }

    /// A descriptor of the table; `index` must be below the size.
    pub(crate) fn descriptor(&self, index: u16) -> Descriptor {
        let offset = self.slot(index).wrapping_mul(16);
        // SAFETY: inside the table, which is aligned to 16.
        let (addr, rest) = unsafe {
            let first = self.descriptors.add(offset).cast::<u64>();
            let addr = AtomicU64::from_ptr(first.as_ptr()).load(Ordering::Relaxed);
            (addr, AtomicU64::from_ptr(first.add(1).as_ptr()).load(Ordering::Relaxed))
        };
        Descriptor::from_words(addr, rest)
    }

    /// The used index when the queue was started.
    pub(crate) fn used_index(&self) -> u16 {
        u16::from_le(self.field(self.used, 2).load(Ordering::Acquire))
    }

    /// Whether each used element is the answer to a block request: a head of the table, and at least a
    /// status. That is so after the indices have wrapped around to 0, and not when the driver has just set up
    /// its rings.
    pub(crate) fn is_full_of_answers(&self) -> bool {
        (0..self.entries).all(|index| {
            let (head, written) = self.used_element(index);
            head < u32::from(self.entries) && written > 0
        })
    }

    fn used_element(&self, index: u16) -> (u32, u32) {
        let offset = RING_HEADER_BYTES.wrapping_add(self.slot(index).wrapping_mul(8));
        // SAFETY: inside the used ring, which is aligned to 4.
        let (head, written) = unsafe {
            let first = self.used.add(offset).cast::<u32>();
            let head = AtomicU32::from_ptr(first.as_ptr()).load(Ordering::Relaxed);
            (head, AtomicU32::from_ptr(first.add(1).as_ptr()).load(Ordering::Relaxed))
        };
        (u32::from_le(head), u32::from_le(written))
    }

    /// Fills a used element; the driver does not see it before [`Rings::publish`].
    pub(crate) fn set_used(&self, index: u16, head: u16, written: u32) {
        if !stores() {
            return;
        }
        let offset = RING_HEADER_BYTES.wrapping_add(self.slot(index).wrapping_mul(8));
        // SAFETY: inside the used ring, which is aligned to 4.
        unsafe {
            let first = self.used.add(offset).cast::<u32>();
            AtomicU32::from_ptr(first.as_ptr()).store(u32::from(head).to_le(), Ordering::Relaxed);
            AtomicU32::from_ptr(first.add(1).as_ptr()).store(written.to_le(), Ordering::Relaxed);
        }
    }

    /// Makes all used elements before `index` visible to the driver.
    pub(crate) fn publish(&self, index: u16) {
        if !stores() {
            return;
        }
        self.field(self.used, 2).store(index.to_le(), Ordering::Release);
    }

    /// Whether the driver wants an interrupt, now that the used index went from `old` to `new`.
    pub(crate) fn interrupt_wanted(&self, old: u16, new: u16) -> bool {
        fence(Ordering::SeqCst);
        if self.event_idx {
            let offset = RING_HEADER_BYTES.wrapping_add(usize::from(self.entries).wrapping_mul(2));
            let event = u16::from_le(self.field(self.available, offset).load(Ordering::Relaxed));
            return passed(event, old, new);
        }
        u16::from_le(self.field(self.available, 0).load(Ordering::Relaxed)) & NO_INTERRUPT == 0
    }

    /// Asks the driver for a kick at the next request after `next`. `false`: there is a request already.
    pub(crate) fn ask_for_kick(&self, next: u16) -> bool {
        if self.event_idx {
            let offset = RING_HEADER_BYTES.wrapping_add(usize::from(self.entries).wrapping_mul(8));
            self.field(self.used, offset).store(next.to_le(), Ordering::Relaxed);
        } else {
            self.field(self.used, 0).store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.available_index() == next
    }

    /// Asks the driver not to kick. With event indices nothing is done, because the requested index has
    /// passed.
    pub(crate) fn ask_for_silence(&self) {
        if !self.event_idx {
            self.field(self.used, 0).store(NO_NOTIFY.to_le(), Ordering::Relaxed);
        }
    }
}

/// `vring_need_event` of virtio 2.7.7.2: whether `event` is among `old .. new`.
fn passed(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_passed_exactly_when_it_is_in_between() {
        assert!(passed(5, 5, 6));
        assert!(passed(5, 3, 6));
        assert!(!passed(6, 3, 6));
        assert!(!passed(2, 3, 6));
        assert!(!passed(5, 6, 6));
        assert!(passed(u16::MAX, u16::MAX - 1, 1));
        assert!(!passed(1, u16::MAX - 1, 1));
    }

    #[test]
    fn descriptors_are_little_endian() {
        let rest = u64::from_le_bytes([0, 0x10, 0, 0, 3, 0, 7, 0]);
        let descriptor = Descriptor::from_words(0x1234_u64.to_le(), rest);
        assert_eq!(descriptor, Descriptor { addr: 0x1234, len: 4096, flags: 3, next: 7 });
    }
}
