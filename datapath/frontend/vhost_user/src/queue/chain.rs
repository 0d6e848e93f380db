//! Chains of descriptors: the parts of one request, with checks of everything that can be wrong.
//!
//! Each descriptor is copied once and the copy is checked, because the guest may change the original at any
//! time.

use super::rings::{Descriptor, Rings};
use crate::fault::RingFault;
use crate::memory::GuestMemory;

/// Most descriptors of an indirect table.
pub(crate) const INDIRECT_DESCRIPTORS: u32 = 1024;

/// A part of a request in guest memory, by guest address; the address is not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    pub(crate) addr: u64,
    pub(crate) len: u32,
}

/// One request as buffers; reused for the next one.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// Buffers that the device reads, in order; without empty ones.
    pub(crate) readable: Vec<Buffer>,
    /// Buffers that the device writes, in order; without empty ones.
    pub(crate) writable: Vec<Buffer>,
}

impl Chain {
    /// Follows the chain that starts at `head`.
    pub(crate) fn load(&mut self, rings: &Rings, head: u16, indirect: bool) -> Result<(), RingFault> {
        self.readable.clear();
        self.writable.clear();
        let mut index = head;
        // The chain can visit each entry once; one visit more is a loop.
        for _ in 0..rings.entries() {
            if index >= rings.entries() {
                return Err(RingFault::DescriptorIndex(index));
            }
            let descriptor = rings.descriptor(index);
            if descriptor.flags & Descriptor::INDIRECT != 0 {
                if !indirect {
                    return Err(RingFault::IndirectForbidden);
                }
                if descriptor.flags & Descriptor::NEXT != 0 {
                    return Err(RingFault::NestedIndirect);
                }
                return self.load_indirect(rings.memory(), descriptor);
            }
            self.add(descriptor)?;
            if descriptor.flags & Descriptor::NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(RingFault::Loop)
    }

    fn load_indirect(&mut self, memory: &GuestMemory, table: Descriptor) -> Result<(), RingFault> {
        let count = table.len / Descriptor::BYTES;
        if !table.len.is_multiple_of(Descriptor::BYTES) || count == 0 || count > INDIRECT_DESCRIPTORS {
            return Err(RingFault::IndirectLength(table.len));
        }
        let entry = |index: u32| {
            // No overflow: the index is below the count, and an address past the end of memory is not found.
            let addr = table.addr.wrapping_add(u64::from(index.wrapping_mul(Descriptor::BYTES)));
            let mut bytes = [0_u8; 16];
            memory.read(addr, &mut bytes)?;
            let [a, b, c, d, e, f, g, h, rest @ ..] = bytes;
            Some(Descriptor::from_words(
                u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
                u64::from_ne_bytes(rest),
            ))
        };
        let mut index = 0;
        for _ in 0..count {
            let descriptor = entry(index).ok_or(RingFault::IndirectAddress(table.addr))?;
            if descriptor.flags & Descriptor::INDIRECT != 0 {
                return Err(RingFault::NestedIndirect);
            }
            self.add(descriptor)?;
            if descriptor.flags & Descriptor::NEXT == 0 {
                return Ok(());
            }
            index = u32::from(descriptor.next);
            if index >= count {
                return Err(RingFault::DescriptorIndex(descriptor.next));
            }
        }
        Err(RingFault::Loop)
    }

    fn add(&mut self, descriptor: Descriptor) -> Result<(), RingFault> {
        let writable = descriptor.flags & Descriptor::WRITE != 0;
        if !writable && !self.writable.is_empty() {
            return Err(RingFault::Order);
        }
        if descriptor.len > 0 {
            let list = if writable { &mut self.writable } else { &mut self.readable };
            list.push(Buffer { addr: descriptor.addr, len: descriptor.len });
        }
        Ok(())
    }

    /// Takes the request's status byte, the last one that the device writes, and returns its address.
    pub(crate) fn take_status(&mut self) -> Option<u64> {
        let last = self.writable.last_mut()?;
        last.len = last.len.checked_sub(1)?;
        let addr = last.addr.checked_add(u64::from(last.len))?;
        if last.len == 0 {
            self.writable.pop();
        }
        Some(addr)
    }

    /// Takes the request's header, the first bytes that the device reads, however they are divided.
    pub(crate) fn take_header<const N: usize>(&mut self, memory: &GuestMemory) -> Option<[u8; N]> {
        let mut header = [0_u8; N];
        let mut have = 0;
        let mut used_up = 0_usize;
        for buffer in &mut self.readable {
            let rest = header.get_mut(have..).filter(|rest| !rest.is_empty());
            let Some(rest) = rest else { break };
            let len = u32::try_from(rest.len()).ok()?.min(buffer.len);
            let part = rest.get_mut(..usize::try_from(len).ok()?)?;
            memory.read(buffer.addr, part)?;
            have = have.saturating_add(part.len());
            buffer.addr = buffer.addr.wrapping_add(u64::from(len));
            buffer.len = buffer.len.saturating_sub(len);
            if buffer.len == 0 {
                used_up = used_up.saturating_add(1);
            }
        }
        if have < N {
            return None;
        }
        self.readable.drain(..used_up);
        Some(header)
    }
}

/// Bytes of all buffers together.
pub(crate) fn total_bytes(buffers: &[Buffer]) -> u64 {
    // At most 2 * 1024 buffers below 4 GiB: no overflow.
    buffers.iter().fold(0_u64, |sum, buffer| sum.wrapping_add(u64::from(buffer.len)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::RegionSpec;
    use crate::memory::tests::memfd;

    #[test]
    fn header_and_status_are_taken_however_they_are_divided() {
        let spec = RegionSpec { guest: 0, user: 0, len: 4096, file_offset: 0 };
        let memory = GuestMemory::default().with(spec, &memfd(4096)).unwrap();
        let bytes: Vec<u8> = (0..64).collect();
        memory.segment(0, 64).unwrap().copy_from(&bytes);
        let buffer = |addr, len| Buffer { addr, len };
        let mut chain = Chain {
            readable: vec![buffer(0, 3), buffer(3, 1), buffer(4, 20)],
            writable: vec![buffer(100, 5), buffer(200, 1)],
        };
        let header: [u8; 8] = chain.take_header(&memory).unwrap();
        assert_eq!(header, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(chain.readable, [buffer(8, 16)]);
        assert_eq!(chain.take_status(), Some(200));
        assert_eq!(chain.writable, [buffer(100, 5)]);
        assert_eq!(chain.take_status(), Some(104));
        assert_eq!(chain.writable, [buffer(100, 4)]);
        assert_eq!(chain.take_header::<17>(&memory), None);
        chain.readable = vec![buffer(4090, 20)];
        assert_eq!(chain.take_header::<16>(&memory), None, "past the end of memory");
        chain.writable.clear();
        assert_eq!(chain.take_status(), None);
    }
}
