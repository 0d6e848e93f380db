//! Reads, writes, flushes and discards of the file. Requests that need no waiting are executed on the
//! caller's thread, others by the device.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, FaultLog, Geometry, IoError, IoErrorKind, Op, Outcome, Request,
};
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::channel::Channel;
use crate::flow::{Direction, Entry, Gate, InFlight};
use crate::limits::MAX_TRANSFER_BYTES;
use crate::parts::{Clear, Job, Work};
use crate::wire::{ANSWER_HEADER_BYTES, answer_header};

/// `O_DSYNC`, and the additional bit of `O_SYNC`: answer when the data is durable.
const SYNC_FLAGS: u32 = 0o10_000 | 0o4_000_000;

/// The volume behind a file.
pub(crate) struct Disk {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) geometry: Geometry,
    pub(crate) gate: Gate,
    pub(crate) in_flight: InFlight,
    pub(crate) faults: FaultLog,
    /// The name of the file in the log.
    pub(crate) name: String,
    /// Whether anything was written since the file's time was last requested.
    pub(crate) written: AtomicBool,
    /// Sends writes to the thread that writes partial blocks; `None` when all readers have ended.
    pub(crate) parts: Mutex<Option<mpsc::Sender<Job>>>,
}

/// The request that an answer belongs to, and its channel.
#[derive(Clone)]
pub(crate) struct Asker {
    pub(crate) channel: Arc<Channel>,
    pub(crate) unique: u64,
}

/// The contents of a successful answer.
pub(crate) enum Answer {
    Nothing,
    /// This many bytes were written.
    Written(u32),
    /// This part of the buffer is the data of a read.
    Part(Range<usize>),
}

impl Asker {
    pub(crate) fn fail(&self, errno: Errno) {
        self.channel.fail(self.unique, errno);
    }

    pub(crate) fn answer(&self, body: &[u8]) {
        self.channel.answer(self.unique, body);
    }

    pub(crate) fn succeed(&self, answer: &Answer, buffer: &[u8]) {
        match answer {
            Answer::Nothing => self.answer(&[]),
            Answer::Written(bytes) => {
                let mut whole = [0; ANSWER_HEADER_BYTES + 8];
                let header = answer_header(self.unique, 8, None);
                let fields = header.into_iter().chain(bytes.to_ne_bytes());
                whole.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
                self.channel.send(&whole);
            }
            Answer::Part(part) => match buffer.get(part.clone()) {
                Some(bytes) => self.answer(bytes),
                None => self.fail(Errno::IO),
            },
        }
    }
}

/// The errno of a device's error.
pub(crate) fn errno(error: &IoError) -> Errno {
    match error.kind() {
        IoErrorKind::Invalid => Errno::INVAL,
        IoErrorKind::ReadOnly => Errno::ROFS,
        IoErrorKind::NoSpace => Errno::NOSPC,
        IoErrorKind::Corrupt | IoErrorKind::Device => Errno::IO,
        IoErrorKind::Closed => Errno::SHUTDOWN,
        IoErrorKind::Unsupported => Errno::OPNOTSUPP,
    }
}

impl Disk {
    /// The part of `offset..offset + len` that lies in the file; `None` if it is empty.
    fn clip(&self, offset: u64, len: u64) -> Option<ByteRange> {
        let len = len.min(self.geometry.size_bytes.checked_sub(offset)?);
        ByteRange::new(offset, len).filter(|range| !range.is_empty())
    }

    /// Whether the range consists of whole logical blocks.
    pub(crate) fn is_whole(&self, range: ByteRange) -> bool {
        self.widen(range) == Some(range)
    }

    /// The logical blocks that the range touches.
    pub(crate) fn widen(&self, range: ByteRange) -> Option<ByteRange> {
        let mask = u64::from(self.geometry.logical_block_bytes).checked_sub(1)?;
        let start = range.offset() & !mask;
        let end = range.end().checked_add(mask)? & !mask;
        ByteRange::new(start, end.checked_sub(start)?)
    }

    /// Called when no more requests come. Requests that the device has continue; requests that wait for the
    /// partial-block thread are dropped.
    pub(crate) fn end(&self) {
        self.in_flight.end();
        self.gate.end();
    }

    pub(crate) fn warn(&self, what: &dyn std::fmt::Display) {
        self.faults.warn(&self.name, what);
    }

    /// Logs an error and returns its errno. Lack of space is not logged here; the write cache logs it.
    pub(crate) fn failed(&self, what: &dyn std::fmt::Display, error: &IoError) -> Errno {
        if !matches!(error.kind(), IoErrorKind::NoSpace | IoErrorKind::ReadOnly) {
            let cause = std::error::Error::source(error);
            let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
            self.warn(&format_args!("{what} failed: {error}{cause}"));
        }
        errno(error)
    }

    /// Submits a request to the device. `bytes` were added to the bytes in flight before; `gated` is its
    /// entry in the gate, if any.
    pub(crate) fn submit(
        self: &Arc<Self>,
        asker: Asker,
        request: Request,
        answer: Answer,
        bytes: usize,
        gated: Option<Entry>,
    ) {
        let disk = Arc::clone(self);
        let what = describe(&request);
        let direction =
            if matches!(request, Request::Read { .. }) { Direction::Read } else { Direction::Write };
        let done = move |outcome: Outcome| {
            if let Some(entry) = gated {
                disk.gate.leave(entry);
            }
            match outcome.result {
                Ok(()) => asker.succeed(&answer, &outcome.buffer),
                Err(error) => asker.fail(disk.failed(&what, &error)),
            }
            // After the answer, because the buffer is in use until then.
            disk.in_flight.remove(direction, bytes);
        };
        self.device.submit(request, Completion::new(done));
    }

    /// `FUSE_READ`. `reply` has space for a header, the longest read, and a block at each side of it.
    pub(crate) fn read(self: &Arc<Self>, asker: Asker, offset: u64, len: u32, reply: &mut [u8]) {
        let len = u64::from(len.min(MAX_TRANSFER_BYTES));
        let Some(range) = self.clip(offset, len) else { return asker.answer(&[]) };
        let Some(whole) = self.widen(range) else { return asker.fail(Errno::INVAL) };
        let size = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
        let (bytes, wanted) = (size(whole.len()), size(range.len()));
        // Programs may read parts of blocks, and the kernel does if it splits a read into an unaligned
        // buffer.
        let first = size(range.offset().saturating_sub(whole.offset()));
        let end = bytes.saturating_add(ANSWER_HEADER_BYTES);
        if let Some(into) = reply.get_mut(ANSWER_HEADER_BYTES..end) {
            match self.device.try_now(Op::Read { range: whole, into }) {
                Ok(Attempt::Done) => {
                    if first > 0 {
                        into.copy_within(first..first.saturating_add(wanted), 0);
                    }
                    let header = answer_header(asker.unique, wanted, None);
                    reply.iter_mut().zip(header).for_each(|(to, from)| *to = from);
                    let answer = reply.get(..wanted.saturating_add(ANSWER_HEADER_BYTES));
                    return asker.channel.send(answer.unwrap_or_default());
                }
                Ok(Attempt::MustWait) => {}
                Err(error) => {
                    return asker.fail(self.failed(&format_args!("a read of {range}"), &error));
                }
            }
        }
        let part = Answer::Part(first..first.saturating_add(wanted));
        self.in_flight.add(Direction::Read, bytes);
        let request = Request::Read { range: whole, buffer: vec![0; bytes] };
        self.submit(asker, request, part, bytes, None);
    }

    /// `FUSE_WRITE`.
    pub(crate) fn write(self: &Arc<Self>, asker: Asker, offset: u64, data: &[u8], flags: u32) {
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        if self.geometry.read_only {
            return asker.fail(Errno::ROFS);
        }
        if data.is_empty() {
            return asker.succeed(&Answer::Written(0), &[]);
        }
        // Like a block device: the part before the end of the file is written; behind the end there is no
        // space.
        let Some(range) = self.clip(offset, len) else { return asker.fail(Errno::NOSPC) };
        let written = usize::try_from(range.len()).unwrap_or(usize::MAX);
        let Some(from) = data.get(..written) else { return asker.fail(Errno::INVAL) };
        let fua = flags & SYNC_FLAGS != 0;
        self.note_written();
        if !self.is_whole(range) || !self.gate.try_enter(Entry::Write, range) {
            return self.take_turn(asker, Work::Write { range, data: from.to_vec(), fua });
        }
        let answer = Answer::Written(u32::try_from(written).unwrap_or(u32::MAX));
        match self.device.try_now(Op::Write { range, from, fua }) {
            Ok(Attempt::Done) => {
                self.gate.leave(Entry::Write);
                asker.succeed(&answer, &[]);
            }
            Ok(Attempt::MustWait) => {
                // Must not wait for the limit while in the gate: the thread that wants exclusive access has
                // its bytes counted already, and waits for this entry to leave.
                if !self.in_flight.try_add(Direction::Write, written) {
                    self.gate.leave(Entry::Write);
                    return self.take_turn(asker, Work::Write { range, data: from.to_vec(), fua });
                }
                let request = Request::Write { range, buffer: from.to_vec(), fua };
                self.submit(asker, request, answer, written, Some(Entry::Write));
            }
            Err(error) => {
                self.gate.leave(Entry::Write);
                asker.fail(self.failed(&format_args!("a write of {range}"), &error));
            }
        }
    }

    /// `FUSE_FSYNC`.
    pub(crate) fn flush(self: &Arc<Self>, asker: Asker) {
        match self.device.try_now(Op::Flush) {
            Ok(Attempt::Done) => asker.answer(&[]),
            Ok(Attempt::MustWait) => self.submit(asker, Request::Flush, Answer::Nothing, 0, None),
            Err(error) => asker.fail(self.failed(&"a flush", &error)),
        }
    }

    /// Discards or zeroes the part of the range that lies in the file.
    pub(crate) fn clear(self: &Arc<Self>, asker: Asker, offset: u64, len: u64, clear: Clear) {
        if self.geometry.read_only {
            return asker.fail(Errno::ROFS);
        }
        // The range behind the end of the file has no data anyway.
        let Some(range) = self.clip(offset, len) else { return asker.answer(&[]) };
        self.note_written();
        if !self.is_whole(range) || !self.gate.try_enter(clear.entry(), range) {
            return self.take_turn(asker, Work::Clear { range, clear });
        }
        match self.device.try_now(clear.op(range)) {
            Ok(Attempt::Done) => {
                self.gate.leave(clear.entry());
                asker.answer(&[]);
            }
            Ok(Attempt::MustWait) => {
                self.submit(asker, clear.request(range), Answer::Nothing, 0, Some(clear.entry()))
            }
            Err(error) => {
                self.gate.leave(clear.entry());
                asker.fail(self.failed(&format_args!("clearing {range}"), &error));
            }
        }
    }

    fn take_turn(&self, asker: Asker, work: Work) {
        if let Work::Write { data, .. } = &work {
            self.in_flight.add(Direction::Write, data.len());
        }
        let unsent = match &*self.parts.lock() {
            Some(parts) => parts.send(Job { asker, work }).err().map(|mpsc::SendError(job)| job),
            None => Some(Job { asker, work }),
        };
        if let Some(Job { asker, work }) = unsent {
            self.in_flight.remove(Direction::Write, work.bytes());
            asker.fail(Errno::SHUTDOWN);
        }
    }

    /// Reads the flag before it writes it, so that threads do not invalidate each other's cache line at each
    /// write.
    fn note_written(&self) {
        if !self.written.load(Ordering::Relaxed) {
            self.written.store(true, Ordering::Relaxed);
        }
    }
}

fn describe(request: &Request) -> String {
    match request {
        Request::Read { range, .. } => format!("a read of {range}"),
        Request::Write { range, .. } => format!("a write of {range}"),
        Request::WriteZeroes { range, .. } | Request::Discard { range } => format!("clearing {range}"),
        Request::Flush => "a flush".into(),
        Request::Prefetch { range } => format!("prefetching {range}"),
    }
}
