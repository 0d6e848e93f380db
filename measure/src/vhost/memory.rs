//! Buffers that the server reads and writes by itself.
//!
//! # Why `unsafe`
//! The driver takes raw buffers: the server writes to them while a request is in flight, which a slice must not be lent for. A
//! buffer belongs to one request at a time, and this process looks at none while it is in flight.
#![expect(unsafe_code, reason = "buffers are shared with another process by address")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use anyhow::{Context, Result};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use virtio_driver::{VirtioBlkQueue, VirtioBlkTransport};

/// Which way data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

/// A request for the queue.
pub struct Request {
    /// Its buffer.
    pub slot: usize,
    /// Which way.
    pub direction: Direction,
    /// The first byte on the disk.
    pub at: u64,
    /// What a write changes in its buffer.
    pub stamp: u64,
}

/// As many buffers as there are requests in flight. They stay mapped until the process ends, because the transport
/// keeps them mapped for the server.
pub struct Buffers {
    first: NonNull<u8>,
    bytes: usize,
    count: usize,
}

impl Buffers {
    /// Makes `count` buffers of `bytes`, full of random data, and shares them.
    pub fn share(transport: &mut VirtioBlkTransport, count: usize, bytes: usize, seed: u64) -> Result<Self> {
        let all = count * bytes;
        let file: File = rustix::fs::memfd_create("measure", MemfdFlags::CLOEXEC)?.into();
        file.set_len(u64::try_from(all)?)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice, never unmapped.
        let first = unsafe { rustix::mm::mmap(std::ptr::null_mut(), all, protection, flags, &file, 0) }?;
        let first: NonNull<u8> = NonNull::new(first.cast()).context("no memory for buffers")?;
        let mut random = super::Random(seed | 1);
        for word in 0..all / 8 {
            // SAFETY: inside of the mapping, and aligned.
            unsafe { first.cast::<u64>().add(word).write(random.next()) };
        }
        transport.map_mem_region(first.as_ptr() as usize, all, file.as_raw_fd(), 0)?;
        Ok(Self { first, bytes, count })
    }

    /// Puts a request for a slot, which no request uses now, into the queue.
    pub fn queue<C>(
        &mut self,
        queue: &mut VirtioBlkQueue<'static, C>,
        request: Request,
        context: C,
    ) -> Result<()> {
        let Request { slot, direction, at, stamp } = request;
        assert!(slot < self.count);
        // SAFETY: inside of the mapping.
        let buffer = unsafe { self.first.add(slot * self.bytes) };
        let queued = match direction {
            // SAFETY: the slot is the request's own until it is completed.
            Direction::Read => unsafe { queue.read_raw(at, buffer.as_ptr(), self.bytes, context) },
            Direction::Write => {
                // SAFETY: as above, and buffers are whole pages.
                unsafe {
                    buffer.cast::<u64>().write(stamp);
                    queue.write_raw(at, buffer.as_ptr(), self.bytes, context)
                }
            }
        };
        queued.context("the queue has no room")
    }
}
