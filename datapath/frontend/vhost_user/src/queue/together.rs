//! Gives writes that arrived together to the device together, which may cost less than one after the other.
//!
//! A write is gathered only if it consists of whole blocks in one piece of guest memory. It is not given to the
//! device alone before. [`store`] runs when [`TOGETHER`] writes are gathered, and at the end of each round of the
//! queue's thread. It answers the writes that the device stores; each other write is then executed alone.

use std::sync::Arc;

use headwater_block::{BLOCK_BYTES, ByteRange};

use super::chain::Buffer;
use super::request::{Command, Header, Status};
use super::serve;
use super::thread::QueueThread;
use super::transfer::{Direction, Transfer};
use crate::memory::GuestMemory;

/// The most writes that are gathered: the guest waits for the first while the last is examined.
const TOGETHER: usize = 8;

/// The longest gathered write, in bytes. A longer write has so many blocks that it gains nothing from others.
const LONGEST_BYTES: u32 = 16 << 10;

/// A write that was taken from the ring.
#[derive(Clone, Copy)]
pub(super) struct Gathered {
    /// The number of its first descriptor.
    head: u16,
    /// The guest address of its status byte.
    status: u64,
    range: ByteRange,
    buffer: Buffer,
}

/// Gathers the write in the queue's chain. Returns `false`, and does nothing, if the request must be executed
/// alone.
pub(super) fn gather(
    queue: &mut QueueThread,
    (head, status): (u16, u64),
    header: &Header,
    memory: &Arc<GuestMemory>,
) -> bool {
    let (Command::Write, Some(at), [buffer]) = (header.command, header.offset, &*queue.chain.readable) else {
        return false;
    };
    let buffer = *buffer;
    if buffer.len > LONGEST_BYTES
        || !buffer.len.is_multiple_of(BLOCK_BYTES)
        || !at.is_multiple_of(u64::from(BLOCK_BYTES))
        || queue.disk.write_through()
        || memory.segment(buffer.addr, u64::from(buffer.len)).is_none()
    {
        return false;
    }
    let Some(range) = ByteRange::new(at, u64::from(buffer.len)) else { return false };
    if queue.disk.geometry.check_data(range).is_err() {
        return false;
    }
    queue.gathered.push(Gathered { head, status, range, buffer });
    if queue.gathered.len() >= TOGETHER {
        store(queue, memory);
    }
    true
}

/// Gives the gathered writes to the device, and answers them.
pub(super) fn store(queue: &mut QueueThread, memory: &Arc<GuestMemory>) {
    let mut gathered = std::mem::take(&mut queue.gathered);
    let mut stored = [false; TOGETHER];
    if let [first, _, ..] = &*gathered {
        let mut segments = [const { None }; TOGETHER];
        for (segment, write) in segments.iter_mut().zip(&gathered) {
            *segment = memory.segment(write.buffer.addr, u64::from(write.buffer.len));
        }
        let mut writes = [(first.range, &[][..]); TOGETHER];
        for ((segment, write), place) in segments.iter().zip(&gathered).zip(&mut writes) {
            *place = (write.range, segment.as_ref().map_or(&[], |segment| segment.bytes()));
        }
        if let (Some(writes), Some(stored)) = (writes.get(..gathered.len()), stored.get_mut(..gathered.len()))
        {
            queue.disk.device.write_together(writes, stored);
        }
    }
    for (write, stored) in gathered.iter().zip(stored) {
        if stored {
            queue.finish(write.head, write.status, Status::Ok, 1, memory);
        } else {
            let transfer = Transfer {
                memory,
                direction: Direction::Write { fua: false },
                at: write.range.offset(),
                buffers: &[write.buffer],
            };
            serve::go_through(queue, (write.head, write.status), &transfer, memory);
        }
    }
    gathered.clear();
    queue.gathered = gathered;
}
