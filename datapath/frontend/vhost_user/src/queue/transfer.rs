//! Reads and writes between a request's buffers and the device.
//!
//! 1. The range and all buffers are checked before anything is done.
//! 2. If a request has one buffer, or buffers of whole 4 KiB blocks, its pieces move directly between guest
//!    memory and the device. The device first gets the pieces of a write together, as many blocks at a time
//!    as it accepts. Pieces that it did not store then follow one by one.
//! 3. Any other request is assembled in a buffer of ours, because only whole requests keep a block whole. The
//!    same holds for a request with a buffer in several regions of memory, which is contiguous only for the
//!    guest.
//! 4. The part that must wait is assembled too, from the first piece that must wait to the end: one request
//!    for the device.

use headwater_block::{Attempt, BLOCK_BYTES, ByteRange, Device, Geometry, IoError, IoErrorKind, Op};

use super::chain::{Buffer, total_bytes};
use crate::memory::GuestMemory;

/// The direction of the data.
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
    /// It is complete.
    Done,
    /// It stopped at this buffer, which belongs to this offset.
    Until(usize, u64),
}

/// The largest buffer that is kept for reuse.
const SCRATCH_BYTES: usize = 1 << 20;

/// The most blocks of a write, and so the most buffers, that are given to the device together.
const TOGETHER: usize = 16;

/// Executes as much as is possible without waiting.
pub(crate) fn attempt(
    device: &dyn Device,
    geometry: &Geometry,
    transfer: &Transfer<'_>,
    scratch: &mut Vec<u8>,
) -> Result<Progress, IoError> {
    let (range, in_place) = transfer.check(geometry)?;
    if !in_place {
        return transfer.attempt_together(device, range, scratch);
    }
    let mut at = transfer.at;
    let mut together = Together::new(transfer);
    for (index, buffer) in transfer.buffers.iter().enumerate() {
        if together.has(device, transfer, index, at) {
            at = at.saturating_add(u64::from(buffer.len));
            continue;
        }
        let Some(mut segment) = transfer.memory.segment(buffer.addr, u64::from(buffer.len)) else {
            // The only buffer of its request, which was not checked before.
            transfer.find(*buffer)?;
            return transfer.attempt_together(device, range, scratch);
        };
        let range = range_of(at, u64::from(buffer.len))?;
        let attempt = match transfer.direction {
            Direction::Read => segment.lend_mut(|into| device.try_now(Op::Read { range, into })),
            Direction::Write { fua } => device.try_now(Op::Write { range, from: segment.bytes(), fua }),
        };
        match attempt? {
            Attempt::Done => at = range.end(),
            // Later buffers may be stored already. The device gets them again with the rest of the request,
            // which is not answered before.
            Attempt::MustWait => return Ok(Progress::Until(index, at)),
        }
    }
    Ok(Progress::Done)
}

/// Buffers of one write that the device gets together, before they are processed one by one.
struct Together {
    /// The buffers that it got last.
    first: usize,
    len: usize,
    stored: [bool; TOGETHER],
    /// The device stored none of the last ones: the rest follows one by one.
    is_useless: bool,
}

impl Together {
    fn new(transfer: &Transfer<'_>) -> Self {
        let can_be = transfer.buffers.len() > 1 && transfer.direction == Direction::Write { fua: false };
        Self { first: 0, len: 0, stored: [false; TOGETHER], is_useless: !can_be }
    }

    /// Whether this buffer, which belongs to this offset, is stored: by an earlier call, or now together with
    /// the buffers after it.
    #[inline]
    fn has(&mut self, device: &dyn Device, transfer: &Transfer<'_>, index: usize, at: u64) -> bool {
        if index.wrapping_sub(self.first) >= self.len {
            if self.is_useless {
                return false;
            }
            self.store(device, transfer, index, at);
        }
        self.stored.get(index.wrapping_sub(self.first)).is_some_and(|stored| *stored)
    }

    fn store(&mut self, device: &dyn Device, transfer: &Transfer<'_>, index: usize, mut at: u64) {
        let mut segments = [const { None }; TOGETHER];
        let (mut len, mut blocks) = (0, 0);
        for (place, buffer) in segments.iter_mut().zip(transfer.buffers.iter().skip(index)) {
            blocks += u64::from(buffer.len) / u64::from(BLOCK_BYTES);
            if !buffer.len.is_multiple_of(BLOCK_BYTES) || blocks > TOGETHER as u64 {
                break;
            }
            let Some(segment) = transfer.memory.segment(buffer.addr, u64::from(buffer.len)) else { break };
            *place = Some(segment);
            len += 1;
        }
        // A single buffer is written by itself; those after it are examined later.
        (self.first, self.len, self.stored) = (index, len.max(1), [false; TOGETHER]);
        let (Some(segments @ [_, _, ..]), Ok(none)) = (segments.get(..len), range_of(at, 0)) else { return };
        let mut writes = [(none, &[][..]); TOGETHER];
        for (write, segment) in writes.iter_mut().zip(segments) {
            let bytes = segment.as_ref().map_or(&[][..], |segment| segment.bytes());
            // A part of the request's range, which was checked.
            let Ok(range) = range_of(at, bytes.len() as u64) else { return };
            *write = (range, bytes);
            at = range.end();
        }
        if let (Some(writes), Some(stored)) = (writes.get(..len), self.stored.get_mut(..len)) {
            device.write_together(writes, stored);
            // Buffers that follow new blocks are usually new, too.
            self.is_useless = !stored.contains(&true);
        }
    }
}

/// One read or write.
#[derive(Clone, Copy)]
pub(crate) struct Transfer<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) direction: Direction,
    pub(crate) at: u64,
    pub(crate) buffers: &'a [Buffer],
}

impl Transfer<'_> {
    /// The range, and whether data may move directly between the buffers and the device.
    fn check(&self, geometry: &Geometry) -> Result<(ByteRange, bool), IoError> {
        let range = range_of(self.at, total_bytes(self.buffers))?;
        geometry.check_data(range)?;
        let mut in_place = self.is_whole_blocks();
        if self.buffers.len() > 1 {
            for buffer in self.buffers {
                if self.memory.segment(buffer.addr, u64::from(buffer.len)).is_none() {
                    self.find(*buffer)?;
                    in_place = false;
                }
            }
        }
        Ok((range, in_place))
    }

    /// Checks a buffer that is not in one region; it may lie in several.
    #[cold]
    fn find(&self, buffer: Buffer) -> Result<(), IoError> {
        match self.memory.has(buffer.addr, u64::from(buffer.len)) {
            true => Ok(()),
            false => Err(outside(buffer)),
        }
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
        let progress = self.attempt_in(device, range, scratch);
        scratch.truncate(SCRATCH_BYTES);
        scratch.shrink_to(SCRATCH_BYTES);
        progress
    }

    fn attempt_in(
        &self,
        device: &dyn Device,
        range: ByteRange,
        scratch: &mut [u8],
    ) -> Result<Progress, IoError> {
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

    /// Copies the buffers into `into`, one after the other.
    pub(crate) fn gather(&self, mut into: &mut [u8]) -> Result<(), IoError> {
        for buffer in self.buffers {
            let len = usize::try_from(buffer.len).unwrap_or(usize::MAX);
            let Some((part, rest)) = into.split_at_mut_checked(len) else { return Err(too_short()) };
            self.memory.read(buffer.addr, part).ok_or_else(|| outside(*buffer))?;
            into = rest;
        }
        Ok(())
    }

    /// Copies `from` into the buffers, one after the other.
    pub(crate) fn scatter(&self, mut from: &[u8]) -> Result<(), IoError> {
        for buffer in self.buffers {
            let len = usize::try_from(buffer.len).unwrap_or(usize::MAX);
            let Some((part, rest)) = from.split_at_checked(len) else { return Err(too_short()) };
            self.memory.write(buffer.addr, part).ok_or_else(|| outside(*buffer))?;
            from = rest;
        }
        Ok(())
    }
}

fn range_of(offset: u64, len: u64) -> Result<ByteRange, IoError> {
    let why = "the range ends past 64 bits";
    ByteRange::new(offset, len).ok_or_else(|| IoError::new(IoErrorKind::Invalid, why))
}

fn outside(buffer: Buffer) -> IoError {
    let why = format!("{} bytes at {:#x} are not in the machine's memory", buffer.len, buffer.addr);
    IoError::new(IoErrorKind::Invalid, why)
}

fn too_short() -> IoError {
    IoError::new(IoErrorKind::Device, "the device returned a request's buffer with another length")
}
