//! Buffers in memory that this process shares with the server.
//!
//! # Why `unsafe`
//! The driver takes raw pointers: the server writes to a buffer while a request is in flight, so there must be no
//! slice of it. A buffer belongs to one request at a time, and this process does not access it while the request is
//! in flight.
#![expect(unsafe_code, reason = "buffers are shared with another process by address")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use anyhow::{Context, Result};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use virtio_driver::{VirtioBlkQueue, VirtioBlkTransport};

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the disk to the buffer.
    Read,
    /// From the buffer to the disk.
    Write,
}

/// A request for the queue.
pub struct Request {
    /// The number of its buffer.
    pub slot: usize,
    /// Its direction.
    pub direction: Direction,
    /// Offset of its first byte on the disk.
    pub at: u64,
    /// The value that a write puts into its buffer, so that its data is new.
    pub stamp: u64,
}

/// One buffer for each request in flight. They stay mapped until the process ends, because the transport has mapped
/// them for the server.
pub struct Buffers {
    first: NonNull<u8>,
    bytes: usize,
    count: usize,
}

impl Buffers {
    /// Makes `count` buffers of `bytes` with random data, and shares them with the server.
    pub fn share(transport: &mut VirtioBlkTransport, count: usize, bytes: usize, seed: u64) -> Result<Self> {
        let all = count * bytes;
        let file: File = rustix::fs::memfd_create("measure", MemfdFlags::CLOEXEC)?.into();
        file.set_len(u64::try_from(all)?)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses; it is never unmapped.
        let first = unsafe { rustix::mm::mmap(std::ptr::null_mut(), all, protection, flags, &file, 0) }?;
        let first: NonNull<u8> = NonNull::new(first.cast()).context("no memory for buffers")?;
        let mut random = super::Random(seed | 1);
        for word in 0..all / 8 {
            // SAFETY: inside the mapping, and aligned.
            unsafe { first.cast::<u64>().add(word).write(random.next()) };
        }
        transport.map_mem_region(first.as_ptr() as usize, all, file.as_raw_fd(), 0)?;
        Ok(Self { first, bytes, count })
    }

    /// Queues a request. Its buffer must not be in use.
    pub fn queue<C>(
        &mut self,
        queue: &mut VirtioBlkQueue<'static, C>,
        request: Request,
        context: C,
    ) -> Result<()> {
        let Request { slot, direction, at, stamp } = request;
        assert!(slot < self.count);
        // SAFETY: inside the mapping.
        let buffer = unsafe { self.first.add(slot * self.bytes) };
        let queued = match direction {
            // SAFETY: the buffer belongs to this request until it is completed.
            Direction::Read => unsafe { queue.read_raw(at, buffer.as_ptr(), self.bytes, context) },
            Direction::Write => {
                // SAFETY: as above, and buffers are whole pages.
                unsafe {
                    buffer.cast::<u64>().write(stamp);
                    queue.write_raw(at, buffer.as_ptr(), self.bytes, context)
                }
            }
        };
        queued.context("the queue is full")
    }
}
