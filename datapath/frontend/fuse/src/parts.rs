//! The thread that writes parts of blocks: it reads the block, changes it and writes it back, while no other
//! change of these blocks runs ([`super::flow::Gate`]).
//!
//! Writes of whole blocks that come meanwhile wait here too, so that no reader thread has to wait.

use std::sync::{Arc, mpsc};

use headwater_block::{Attempt, ByteRange, IoError, IoErrorKind, Op, Request, blocking};
use rustix::io::Errno;

use crate::data::{Answer, Asker, Disk};
use crate::flow::{Direction, Entry};

/// How a range is cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clear {
    /// Zeroes that need no space (`FALLOC_FL_PUNCH_HOLE`). Unlike a discard, it may not be skipped.
    Hole,
    /// Zeroes that keep their space (`FALLOC_FL_ZERO_RANGE`).
    Zero,
}

impl Clear {
    pub(crate) fn op(self, range: ByteRange) -> Op<'static> {
        match self {
            Clear::Hole => Op::WriteZeroes { range, may_unmap: true, fua: false },
            Clear::Zero => Op::WriteZeroes { range, may_unmap: false, fua: false },
        }
    }

    pub(crate) fn entry(self) -> Entry {
        match self {
            Clear::Hole => Entry::Discard,
            Clear::Zero => Entry::Write,
        }
    }

    pub(crate) fn request(self, range: ByteRange) -> Request {
        match self {
            Clear::Hole => Request::WriteZeroes { range, may_unmap: true, fua: false },
            Clear::Zero => Request::WriteZeroes { range, may_unmap: false, fua: false },
        }
    }
}

/// The change to make.
pub(crate) enum Work {
    Write { range: ByteRange, data: Vec<u8>, fua: bool },
    Clear { range: ByteRange, clear: Clear },
}

impl Work {
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Work::Write { data, .. } => data.len(),
            Work::Clear { .. } => 0,
        }
    }

    fn entry(&self) -> Entry {
        match self {
            Work::Write { .. } => Entry::Write,
            Work::Clear { clear, .. } => clear.entry(),
        }
    }

    fn range(&self) -> ByteRange {
        match self {
            Work::Write { range, .. } | Work::Clear { range, .. } => *range,
        }
    }
}

/// A change, and the request to answer.
pub(crate) struct Job {
    pub(crate) asker: Asker,
    pub(crate) work: Work,
}

/// Works until all senders are dropped.
pub(crate) fn run(disk: &Arc<Disk>, jobs: &mpsc::Receiver<Job>) {
    while let Ok(Job { asker, work }) = jobs.recv() {
        let (bytes, entry, range) = (work.bytes(), work.entry(), work.range());
        // Only this thread closes the gate, so it may enter here.
        if disk.is_whole(range) && disk.gate.try_enter(entry, range) {
            let (request, answer) = match work {
                Work::Write { range, data, fua } => {
                    let written = Answer::Written(u32::try_from(data.len()).unwrap_or(u32::MAX));
                    (Request::Write { range, buffer: data, fua }, written)
                }
                Work::Clear { range, clear } => (clear.request(range), Answer::Nothing),
            };
            disk.submit(asker, request, answer, bytes, Some(entry));
            continue;
        }
        match disk.gate.alone(disk.widen(range).unwrap_or(range), || change(disk, &work)) {
            // The file system is unmounted: nobody waits for the answer.
            None => asker.fail(Errno::SHUTDOWN),
            Some(Ok(answer)) => asker.succeed(&answer, &[]),
            Some(Err(error)) => asker.fail(disk.failed(&format_args!("a change of {range}"), &error)),
        }
        disk.in_flight.remove(Direction::Write, bytes);
    }
}

/// Executes the change and waits for the device.
fn change(disk: &Disk, work: &Work) -> Result<Answer, IoError> {
    match work {
        Work::Write { range, data, fua } => {
            overwrite(disk, *range, data, *fua)?;
            Ok(Answer::Written(u32::try_from(data.len()).unwrap_or(u32::MAX)))
        }
        Work::Clear { range, clear } => {
            let inner = inner_blocks(disk, *range);
            let start = inner.map_or(range.end(), |inner| inner.offset());
            let end = inner.map_or(range.end(), |inner| inner.end());
            // Punch the hole first: that frees space, which the edges may need.
            if let Some(inner) = inner
                && disk.device.try_now(clear.op(inner))? == Attempt::MustWait
            {
                blocking::wait(&*disk.device, clear.request(inner))?;
            }
            for (from, to) in [(range.offset(), start), (end, range.end())] {
                let zeroes = vec![0; usize::try_from(to.saturating_sub(from)).unwrap_or(0)];
                if let Some(edge) =
                    ByteRange::new(from, to.saturating_sub(from)).filter(|edge| !edge.is_empty())
                {
                    overwrite(disk, edge, &zeroes, false)?;
                }
            }
            Ok(Answer::Nothing)
        }
    }
}

/// The whole logical blocks inside of the range, if there are any.
fn inner_blocks(disk: &Disk, range: ByteRange) -> Option<ByteRange> {
    let block = u64::from(disk.geometry.logical_block_bytes);
    let start = range.offset().checked_next_multiple_of(block)?;
    let end = range.end().checked_sub(range.end().checked_rem(block)?)?;
    ByteRange::new(start, end.checked_sub(start)?).filter(|inner| !inner.is_empty())
}

/// Reads the blocks, copies the data over them, and writes them back.
fn overwrite(disk: &Disk, range: ByteRange, data: &[u8], fua: bool) -> Result<(), IoError> {
    let odd = || IoError::new(IoErrorKind::Invalid, format!("the range {range} is not on the device"));
    let whole = disk.widen(range).ok_or_else(odd)?;
    let mut buffer = vec![0; usize::try_from(whole.len()).map_err(|_| odd())?];
    blocking::read(&*disk.device, whole.offset(), &mut buffer)?;
    let first = usize::try_from(range.offset().saturating_sub(whole.offset())).map_err(|_| odd())?;
    let place = buffer.get_mut(first..first.saturating_add(data.len())).ok_or_else(odd)?;
    place.copy_from_slice(data);
    match disk.device.try_now(Op::Write { range: whole, from: &buffer, fua })? {
        Attempt::Done => Ok(()),
        Attempt::MustWait => {
            blocking::wait(&*disk.device, Request::Write { range: whole, buffer, fua }).map(drop)
        }
    }
}
