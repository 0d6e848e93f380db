//! Serves one request: decodes it, executes it if that needs no waiting, otherwise submits it, and answers
//! it.

use std::collections::VecDeque;
use std::sync::Arc;

use headwater_block::{Attempt, Completion, IoError, IoErrorKind, Op, Outcome};

use super::chain::total_bytes;
use super::job::{Job, Work};
use super::post::Post;
use super::request::{Command, Header, Piece, RANGE_BYTES, RANGES, Status, decode_ranges};
use super::thread::QueueThread;
use super::together;
use super::transfer::{self, Direction, Progress, Transfer};
use crate::fault::RingFault;
use crate::memory::GuestMemory;

/// The most buffers that are kept for reuse by requests that must wait, and the longest of them.
const KEPT_BUFFERS: usize = 16;
const KEPT_BUFFER_BYTES: usize = 128 << 10;

/// The status of a request that did not have to wait, with the reason of an error.
type Finished = Result<Status, (Status, String)>;

enum Step {
    /// The request is done; so many bytes were written besides the status.
    Done(Finished, u64),
    Wait(Work, u64),
    /// Like `Wait`, after the device reported that it has no space.
    Starve(Work),
}

/// Serves the request in the queue's chain. Returns how many bytes of data it moved.
pub(super) fn request(
    queue: &mut QueueThread,
    head: u16,
    memory: &Arc<GuestMemory>,
) -> Result<u64, RingFault> {
    let status = queue.chain.take_status().ok_or(RingFault::NoStatus)?;
    if memory.segment(status, 1).is_none() {
        return Err(RingFault::NoStatus);
    }
    let moved = total_bytes(&queue.chain.readable).max(total_bytes(&queue.chain.writable));
    let step = match queue.chain.take_header(memory).map(Header::decode) {
        Some(header) if together::gather(queue, (head, status), &header, memory) => return Ok(moved),
        Some(header) => step(queue, header, memory),
        None => Step::Done(Err((Status::IoError, "its header is not in the machine's memory".into())), 0),
    };
    conclude(queue, (head, status), step, memory);
    Ok(moved)
}

/// Executes one read or write.
pub(super) fn go_through(
    queue: &mut QueueThread,
    of: (u16, u64),
    transfer: &Transfer<'_>,
    memory: &Arc<GuestMemory>,
) {
    let step = attempt(queue, transfer);
    conclude(queue, of, step, memory);
}

/// Answers a request (its chain's head, its status byte), or submits it.
fn conclude(queue: &mut QueueThread, (head, status): (u16, u64), step: Step, memory: &Arc<GuestMemory>) {
    let job = |work, written: u64| {
        let written = u32::try_from(written).unwrap_or(u32::MAX).saturating_add(1);
        Job { head, status, written, memory: Arc::clone(memory), work }
    };
    match step {
        Step::Done(Ok(code), written) => {
            let written = u32::try_from(written).unwrap_or(u32::MAX).saturating_add(1);
            queue.finish(head, status, code, written, memory);
        }
        Step::Done(Err((code, why)), _) => {
            queue.warn(&format_args!("a request failed: {why}"));
            queue.finish(head, status, code, 1, memory);
        }
        Step::Wait(work, written) => queue.submit_in_turn(job(work, written)),
        Step::Starve(work) => queue.starve(job(work, 0)),
    }
}

fn step(queue: &mut QueueThread, header: Header, memory: &GuestMemory) -> Step {
    match header.command {
        Command::Read => transfer(queue, Direction::Read, header.offset, memory),
        Command::Write => {
            let fua = queue.disk.write_through();
            transfer(queue, Direction::Write { fua }, header.offset, memory)
        }
        Command::Flush => match queue.disk.device.try_now(Op::Flush) {
            Ok(Attempt::Done) => Step::Done(Ok(Status::Ok), 0),
            Ok(Attempt::MustWait) => Step::Wait(Work::Flush, 0),
            Err(error) => failed("a flush", &error),
        },
        Command::Id => {
            let mut rest = &queue.disk.serial[..];
            let mut written = 0_u64;
            for buffer in &queue.chain.writable {
                let len = usize::try_from(buffer.len).unwrap_or(usize::MAX);
                let (part, later) = rest.split_at(rest.len().min(len));
                if !memory.has(buffer.addr, u64::from(buffer.len))
                    || memory.write(buffer.addr, part).is_none()
                {
                    let why = "a buffer is not in the machine's memory";
                    return Step::Done(Err((Status::IoError, why.into())), 0);
                }
                rest = later;
                written = written.saturating_add(u64::try_from(part.len()).unwrap_or(0));
            }
            Step::Done(Ok(Status::Ok), written)
        }
        Command::Discard | Command::WriteZeroes => ranges(queue, header.command, memory),
        // Not a fault: a driver may try a command that only other devices support.
        Command::Unknown(_) => Step::Done(Ok(Status::Unsupported), 0),
    }
}

fn failed(what: &str, error: &IoError) -> Step {
    let mut why = format!("{what}: {error}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        why.push_str(": ");
        why.push_str(&cause.to_string());
        source = cause.source();
    }
    Step::Done(Err((Status::from_kind(error.kind()), why)), 0)
}

fn transfer(queue: &mut QueueThread, direction: Direction, at: Option<u64>, memory: &GuestMemory) -> Step {
    let Some(at) = at else {
        return Step::Done(Err((Status::IoError, "its sector is past 64 bits".into())), 0);
    };
    // Put back below, so that its memory is reused.
    let buffers = std::mem::take(match direction {
        Direction::Read => &mut queue.chain.writable,
        Direction::Write { .. } => &mut queue.chain.readable,
    });
    let step = attempt(queue, &Transfer { memory, direction, at, buffers: &buffers });
    match direction {
        Direction::Read => queue.chain.writable = buffers,
        Direction::Write { .. } => queue.chain.readable = buffers,
    }
    step
}

fn attempt(queue: &mut QueueThread, transfer: &Transfer<'_>) -> Step {
    let Transfer { direction, at, buffers, .. } = *transfer;
    let written = if direction == Direction::Read { total_bytes(buffers) } else { 0 };
    match transfer::attempt(&*queue.disk.device, &queue.disk.geometry, transfer, &mut queue.scratch) {
        Ok(Progress::Done) => Step::Done(Ok(Status::Ok), written),
        Ok(Progress::Until(index, at)) => {
            let buffers = buffers.get(index..).unwrap_or_default().to_vec();
            Step::Wait(Work::Transfer { direction, at, buffers }, written)
        }
        Err(error) if error.kind() == IoErrorKind::NoSpace && direction != Direction::Read => {
            Step::Starve(Work::Transfer { direction, at, buffers: buffers.to_vec() })
        }
        Err(error) => {
            let name = if direction == Direction::Read { "a read" } else { "a write" };
            failed(&format!("{name} at byte {at}"), &error)
        }
    }
}

fn ranges(queue: &mut QueueThread, command: Command, memory: &GuestMemory) -> Step {
    let discard = command == Command::Discard;
    let mut bytes = [0_u8; RANGE_BYTES * RANGES as usize];
    let total = total_bytes(&queue.chain.readable);
    let Some(bytes) = usize::try_from(total).ok().and_then(|total| bytes.get_mut(..total)) else {
        let why = format!("its ranges have {total} bytes; at most {RANGES} ranges are allowed");
        return Step::Done(Err((Status::IoError, why)), 0);
    };
    let list = Transfer { memory, direction: Direction::Read, at: 0, buffers: &queue.chain.readable };
    if let Err(error) = list.gather(bytes) {
        return failed("a list of ranges", &error);
    }
    let pieces = match decode_ranges(bytes, command) {
        Ok(pieces) => pieces,
        Err(refused) => return Step::Done(Err(refused), 0),
    };
    for piece in &pieces {
        if let Err(error) = queue.disk.geometry.check(piece.range) {
            return failed("a discard or zero write", &error);
        }
    }
    let work = Work::Ranges { pieces: pieces.into(), discard, fua: !discard && queue.disk.write_through() };
    go_on(queue, work)
}

/// Executes ranges until one has to wait.
fn go_on(queue: &QueueThread, mut work: Work) -> Step {
    while let Work::Ranges { pieces, discard, fua } = &mut work {
        let Some(&Piece { range, may_unmap }) = pieces.front() else { break };
        let op =
            if *discard { Op::Discard { range } } else { Op::WriteZeroes { range, may_unmap, fua: *fua } };
        match queue.disk.device.try_now(op) {
            Ok(Attempt::Done) => drop(pieces.pop_front()),
            Ok(Attempt::MustWait) => return Step::Wait(work, 0),
            Err(error) if error.kind() == IoErrorKind::NoSpace => return Step::Starve(work),
            Err(error) => return failed(&format!("a discard or zero write of {range}"), &error),
        }
    }
    Step::Done(Ok(Status::Ok), 0)
}

impl QueueThread {
    /// Gives a request to the device; the answer arrives in the queue's inbox.
    pub(super) fn submit(&mut self, job: Job) {
        let free = &mut self.free;
        let request = job.request(|len| {
            let mut buffer = free.pop().unwrap_or_default();
            buffer.resize(len, 0);
            buffer
        });
        let request = match request {
            Ok(request) => request,
            Err(error) => return self.fail(&job, &error),
        };
        self.in_flight = self.in_flight.saturating_add(1);
        self.bytes_in_flight = self.bytes_in_flight.saturating_add(job.bytes());
        if job.is_read() {
            self.read_bytes_in_flight = self.read_bytes_in_flight.saturating_add(job.bytes());
        }
        let posts = Arc::clone(&self.posts);
        let done = Completion::new(move |outcome| posts.post(Post::Answer(job, outcome)));
        self.disk.device.submit(request, done);
    }

    /// Processes an answer of the device.
    pub(super) fn answer(&mut self, mut job: Job, outcome: Outcome) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.bytes_in_flight = self.bytes_in_flight.saturating_sub(job.bytes());
        if job.is_read() {
            self.read_bytes_in_flight = self.read_bytes_in_flight.saturating_sub(job.bytes());
        }
        let answered = outcome.result.and_then(|()| job.answered(&outcome.buffer));
        if self.free.len() < KEPT_BUFFERS && outcome.buffer.capacity() <= KEPT_BUFFER_BYTES {
            self.free.push(outcome.buffer);
        }
        match answered {
            Ok(true) => self.finish(job.head, job.status, Status::Ok, job.written, &job.memory),
            Ok(false) => self.go_on_with(job),
            Err(error) if error.kind() == IoErrorKind::NoSpace && job.may_lack_space() => self.starve(job),
            Err(error) if error.kind() == IoErrorKind::Closed && !job.is_read() => self.leave(job),
            Err(error) => self.fail(&job, &error),
        }
    }

    fn go_on_with(&mut self, mut job: Job) {
        let empty = Work::Ranges { pieces: VecDeque::new(), discard: false, fua: false };
        match go_on(self, std::mem::replace(&mut job.work, empty)) {
            Step::Done(Ok(status), _) => self.finish(job.head, job.status, status, job.written, &job.memory),
            Step::Done(Err((status, why)), _) => {
                self.warn(&format_args!("a request failed: {why}"));
                self.finish(job.head, job.status, status, 1, &job.memory);
            }
            Step::Wait(work, _) => self.submit(Job { work, ..job }),
            Step::Starve(work) => self.starve(Job { work, ..job }),
        }
    }

    fn fail(&mut self, job: &Job, error: &IoError) {
        if let Step::Done(Err((status, why)), _) = failed("a request", error) {
            self.warn(&why);
            self.finish(job.head, job.status, status, 1, &job.memory);
        }
    }
}
