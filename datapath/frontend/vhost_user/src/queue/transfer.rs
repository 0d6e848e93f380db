//! Reads and writes between a request's buffers and the device.
//!
//! 1. The range and all buffers are checked before anything is done.
//! 2. A request in one buffer, or in buffers that are whole 4 KiB blocks, goes to the device piece by piece, straight
//!    between guest memory and the device.
//! 3. Any other one is put together in a buffer of ours, because only whole requests keep a block whole.
//! 4. What must wait is put together too, from the first piece that must wait to the end: one request below.

use headwater_block::{Attempt, BLOCK_BYTES, ByteRange, Device, Geometry, IoError, IoErrorKind, Op};

use super::chain::{Buffer, total_bytes};
use crate::memory::{GuestMemory, Segment};

/// Which way the data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the device to the guest.
    Read,
    /// From the guest to the device.
    Write {
        /// Durable before it is answered.
        fua: bool,
    },
}

/// How far a request got without waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// To its end.
    Done,
    /// To this buffer, which belongs to this offset.
    Until(usize, u64),
}

/// A buffer of ours, kept no longer than it is reasonably small.
const SCRATCH_BYTES: usize = 1 << 20;

/// Carries out as much as is possible without waiting.
pub(crate) fn attempt(
    device: &dyn Device,
    geometry: &Geometry,
    transfer: &Transfer<'_>,
    scratch: &mut Vec<u8>,
) -> Result<Progress, IoError> {
    let range = transfer.check(geometry)?;
    if !transfer.is_whole_blocks() {
        let progress = transfer.attempt_together(device, range, scratch);
        scratch.truncate(SCRATCH_BYTES);
        scratch.shrink_to(SCRATCH_BYTES);
        return progress;
    }
    let mut at = transfer.at;
    for (index, buffer) in transfer.buffers.iter().enumerate() {
        let mut segment = transfer.segment(*buffer)?;
        let range = range_of(at, u64::from(buffer.len))?;
        let attempt = match transfer.direction {
            Direction::Read => segment.lend_mut(|into| device.try_now(Op::Read { range, into })),
            Direction::Write { fua } => segment.lend(|from| device.try_now(Op::Write { range, from, fua })),
        };
        match attempt? {
            Attempt::Done => at = range.end(),
            Attempt::MustWait => return Ok(Progress::Until(index, at)),
        }
    }
    Ok(Progress::Done)
}

/// One read or write.
#[derive(Clone, Copy)]
pub(crate) struct Transfer<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) direction: Direction,
    pub(crate) at: u64,
    pub(crate) buffers: &'a [Buffer],
}

impl<'a> Transfer<'a> {
    fn check(&self, geometry: &Geometry) -> Result<ByteRange, IoError> {
        let range = range_of(self.at, total_bytes(self.buffers))?;
        geometry.check_data(range)?;
        if self.buffers.len() > 1 {
            for buffer in self.buffers {
                self.segment(*buffer)?;
            }
        }
        Ok(range)
    }

    fn segment(&self, buffer: Buffer) -> Result<Segment<'a>, IoError> {
        self.memory.segment(buffer.addr, u64::from(buffer.len)).ok_or_else(|| {
            let why = format!("{} bytes at {:#x} are not in the machine's memory", buffer.len, buffer.addr);
            IoError::new(IoErrorKind::Invalid, why)
        })
    }

    fn is_whole_blocks(&self) -> bool {
        match self.buffers {
            [] | [_] => true,
            [first @ .., _] => {
                self.at.is_multiple_of(u64::from(BLOCK_BYTES))
                    && first.iter().all(|buffer| buffer.len.is_multiple_of(BLOCK_BYTES))
            }
        }
    }

    fn attempt_together(
        &self,
        device: &dyn Device,
        range: ByteRange,
        scratch: &mut Vec<u8>,
    ) -> Result<Progress, IoError> {
        let len = usize::try_from(range.len()).unwrap_or(usize::MAX);
        scratch.resize(len, 0);
        let attempt = match self.direction {
            Direction::Read => device.try_now(Op::Read { range, into: scratch })?,
            Direction::Write { fua } => {
                self.gather(scratch)?;
                device.try_now(Op::Write { range, from: scratch, fua })?
            }
        };
        if attempt == Attempt::MustWait {
            return Ok(Progress::Until(0, self.at));
        }
        if self.direction == Direction::Read {
            self.scatter(scratch)?;
        }
        Ok(Progress::Done)
    }

    /// Copies the buffers out, one after the other.
    pub(crate) fn gather(&self, mut into: &mut [u8]) -> Result<(), IoError> {
        for buffer in self.buffers {
            let segment = self.segment(*buffer)?;
            let Some((part, rest)) = into.split_at_mut_checked(segment.len()) else {
                return Err(too_short());
            };
            segment.copy_to(part);
            into = rest;
        }
        Ok(())
    }

    /// Copies into the buffers, one after the other.
    pub(crate) fn scatter(&self, mut from: &[u8]) -> Result<(), IoError> {
        for buffer in self.buffers {
            let mut segment = self.segment(*buffer)?;
            let Some((part, rest)) = from.split_at_checked(segment.len()) else { return Err(too_short()) };
            segment.copy_from(part);
            from = rest;
        }
        Ok(())
    }
}

fn range_of(offset: u64, len: u64) -> Result<ByteRange, IoError> {
    ByteRange::new(offset, len).ok_or_else(|| IoError::new(IoErrorKind::Invalid, "a range past 64 bits"))
}

fn too_short() -> IoError {
    IoError::new(IoErrorKind::Device, "the device gave a request's buffer back with another length")
}
