//! Gives writes that arrived together to the device together, which may cost less than one after the other.
//!
//! Only writes that can be stored directly from guest memory, in one piece, are gathered, and none of them is
//! executed before. A gathered write that the device does not store is then served like any other.

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

/// The longest gathered write, in bytes: a longer one has enough blocks by itself.
const LONGEST_BYTES: u32 = 16 << 10;

/// A write that was taken from the ring.
#[derive(Clone, Copy)]
pub(super) struct Gathered {
    head: u16,
    status: u64,
    range: ByteRange,
    buffer: Buffer,
}

/// Keeps the write in the queue's chain for later, if it can be given to the device with others.
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

/// Gives the gathered writes to the device.
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
