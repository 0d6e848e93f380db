//! Writes that cannot be finished at once: they fetch the rest of a block, or wait for space.

use std::sync::Arc;

use headwater_block::{
    Attempt, BLOCK_BYTES, ByteRange, Completion, IoError, IoErrorKind, Op, Outcome, Request,
};
use headwater_writecache::{
    Admission, Cleared, Fetched, FetchedOld, Old, QueuedWrite, RetryResult, UnloggedBlocks, WriteResult,
};
use parking_lot::Mutex;

use crate::counters::Own;
use crate::pieces::{Piece, piece_at, straddling};
use crate::volume::{Inner, LONG_CLEAR_BYTES, bad_buffer, closed, split};

const BLOCK: usize = BLOCK_BYTES as usize;

/// The most fetched blocks and slots that a write keeps: a block is in at most eight places, one of which may
/// be the image.
const MOST_FETCHED: usize = 8;

/// A write in flight.
struct Task {
    inner: Arc<Inner>,
    range: ByteRange,
    buffer: Vec<u8>,
    /// Bytes of the request that are stored.
    stored: usize,
    /// The parts of the block at `stored` that were fetched.
    fetched: Vec<FetchedOld>,
    done: Completion,
}

enum Step {
    Finished,
    /// It waits for space.
    NoRoom,
    /// It waits until the disk has caught up with writers.
    Throttled,
    Fetch(Piece, Old),
    Failed(IoError),
}

/// Starts a write.
pub(crate) fn start(inner: &Arc<Inner>, range: ByteRange, buffer: Vec<u8>, done: Completion) {
    let task = Task { inner: Arc::clone(inner), range, buffer, stored: 0, fetched: Vec::new(), done };
    Box::new(task).go_on();
}

/// What happens to the parts of a range that cannot be cleared for lack of space: partial blocks at the ends,
/// whose other sectors have to be kept, and blocks without a slot while a persistent cache can log no more of
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clear {
    /// They wait, and are refused in the end.
    ZeroWrite,
    /// They stay unchanged. A machine that discards to free space must not be refused for lack of it.
    Discard,
}

impl Clear {
    pub(crate) fn slotless(self) -> UnloggedBlocks {
        match self {
            Clear::ZeroWrite => UnloggedBlocks::Wait,
            Clear::Discard => UnloggedBlocks::Stay,
        }
    }
}

/// Starts a discard or zero write.
pub(crate) fn start_clear(inner: &Arc<Inner>, range: ByteRange, what: Clear, done: Completion) {
    let (head, left, tail) = split(range, inner.geometry.size_bytes);
    Box::new(ClearTask { inner: Arc::clone(inner), left, ends: [head, tail], what, done }).start();
}

/// A discard or zero write in flight.
struct ClearTask {
    inner: Arc<Inner>,
    /// The whole blocks that are left.
    left: ByteRange,
    ends: [ByteRange; 2],
    what: Clear,
    done: Completion,
}

impl ClearTask {
    fn start(self: Box<Self>) {
        if self.left.len() <= LONG_CLEAR_BYTES {
            return self.go_on();
        }
        let clearing = Arc::clone(&self.inner.clearing);
        clearing.push(Box::new(move || self.go_on()));
    }

    fn go_on(mut self: Box<Self>) {
        match self.inner.clear_blocks(self.left, self.what) {
            Cleared::All => self.clear_ends(),
            Cleared::Closed => self.done.complete(Err(closed()), Vec::new()),
            Cleared::UpTo(block) => {
                let (at, end) = (u64::from(block.0) * BLOCK as u64, self.left.end());
                self.left = ByteRange::new(at, end.saturating_sub(at)).unwrap_or(self.left);
                let cache = Arc::clone(&self.inner.cache);
                cache.queue_for_space(self);
            }
        }
    }

    fn clear_ends(self) {
        let Self { inner, ends, what, done, .. } = self;
        let ends: Vec<ByteRange> = ends.into_iter().filter(|end| !end.is_empty()).collect();
        let joined = Join::new(ends.len(), done);
        for end in ends {
            let zeroes = vec![0; usize::try_from(end.len()).unwrap_or(0)];
            let joined = Arc::clone(&joined);
            start(
                &inner,
                end,
                zeroes,
                Completion::new(move |outcome: Outcome| {
                    joined.part_done(match outcome.result {
                        Err(error) if error.kind() == IoErrorKind::NoSpace && what == Clear::Discard => {
                            Ok(())
                        }
                        result => result,
                    });
                }),
            );
        }
        joined.part_done(Ok(()));
    }
}

impl QueuedWrite for ClearTask {
    fn retry(self: Box<Self>) -> Result<RetryResult, Box<dyn QueuedWrite>> {
        if !self.inner.cache.takes_clears() {
            return Err(self);
        }
        self.start();
        // It takes no slot.
        Ok(RetryResult::Gone)
    }

    fn refuse(self: Box<Self>, error: IoError) {
        self.done.complete(Err(error), Vec::new());
    }
}

/// Answers once all parts are done.
struct Join(Mutex<JoinState>);

struct JoinState {
    parts: usize,
    error: Option<IoError>,
    done: Option<Completion>,
}

impl Join {
    fn new(parts: usize, done: Completion) -> Arc<Self> {
        Arc::new(Self(Mutex::new(JoinState { parts: parts + 1, error: None, done: Some(done) })))
    }

    fn part_done(&self, result: Result<(), IoError>) {
        let mut state = self.0.lock();
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        state.parts -= 1;
        if state.parts == 0
            && let Some(done) = state.done.take()
        {
            let result = state.error.take().map_or(Ok(()), Err);
            drop(state);
            done.complete(result, Vec::new());
        }
    }
}

impl Task {
    /// Stores as many blocks as there is space for.
    fn step(&mut self, admission: Admission) -> Step {
        while let Some(piece) = piece_at(self.range, self.stored) {
            let Some(data) = self.buffer.get(piece.start..piece.start + piece.len) else {
                return Step::Failed(bad_buffer());
            };
            let cache = &self.inner.cache;
            let admission =
                if admission == Admission::New && self.stored > 0 { Admission::Rest } else { admission };
            let (wrote, len) = match &*self.fetched {
                _ if piece.is_whole() => (self.inner.write_whole(piece.block, data, admission), piece.len),
                [] => match self.write_pair(admission) {
                    Some(wrote) => (wrote, self.buffer.len()),
                    None => (self.inner.write_part(&piece, data, admission), piece.len),
                },
                fetched => (cache.merge(piece.block, piece.skip, data, fetched, admission), piece.len),
            };
            match wrote {
                WriteResult::Done => {
                    self.stored += len;
                    self.fetched.clear();
                }
                WriteResult::NeedOld(old) => return Step::Fetch(piece, old),
                WriteResult::Closed => return Step::Failed(closed()),
                // Dropping a clean copy frees RAM without I/O. No new slot is taken ahead of waiting writes.
                WriteResult::NoRoom if cache.make_room() => {}
                WriteResult::NoRoom | WriteResult::Queued => return Step::NoRoom,
                WriteResult::Throttled => return Step::Throttled,
            }
        }
        Step::Finished
    }

    /// Stores the whole request if it covers the end of one block and the beginning of the next.
    fn write_pair(&self, admission: Admission) -> Option<WriteResult> {
        let first = straddling(self.range).filter(|_| self.stored == 0)?;
        self.inner.write_pair(&first, self.buffer.get(..usize::try_from(self.range.len()).ok()?)?, admission)
    }

    fn go_on(mut self: Box<Self>) {
        match self.step(Admission::New) {
            Step::NoRoom => {
                let cache = Arc::clone(&self.inner.cache);
                cache.queue_for_space(self);
            }
            Step::Throttled => {
                let cache = Arc::clone(&self.inner.cache);
                cache.queue_for_disk(self);
            }
            step => self.after(step),
        }
    }

    fn after(self: Box<Self>, step: Step) {
        match step {
            Step::Finished => self.end(Ok(())),
            Step::Failed(error) => self.end(Err(error)),
            Step::Fetch(piece, old) => self.fetch(piece, old),
            Step::NoRoom | Step::Throttled => {
                let why = "the write cache is full: raise its RAM or disk limit, or free space in the guest";
                self.end(Err(IoError::new(IoErrorKind::NoSpace, why)))
            }
        }
    }

    fn end(self, result: Result<(), IoError>) {
        self.done.complete(result, self.buffer);
    }

    fn fetch(self: Box<Self>, piece: Piece, old: Old) {
        match old {
            Old::Spilled(ticket) => {
                let cache = Arc::clone(&self.inner.cache);
                let mut task = Some(self);
                cache.fetch(vec![ticket], move |_, fetched| {
                    let Some(mut task) = task.take() else { return };
                    match fetched {
                        Fetched::Data(block) => task.add_fetched(old, block.to_vec()),
                        Fetched::Moved => {}
                        Fetched::Failed(error) => return task.end(Err(error)),
                    }
                    task.go_on();
                });
            }
            Old::Absent => self.fetch_base(piece, old),
        }
    }

    fn add_fetched(&mut self, old: Old, block: Vec<u8>) {
        // If the block is overwritten all the time, fetched parts become stale: then all are dropped.
        if self.fetched.len() > MOST_FETCHED {
            self.fetched.clear();
        }
        self.fetched.push((old, block));
    }

    fn fetch_base(mut self: Box<Self>, piece: Piece, old: Old) {
        let offset = u64::from(piece.block.0) * BLOCK as u64;
        let len = (self.inner.geometry.size_bytes - offset).min(BLOCK as u64);
        let Some(range) = ByteRange::new(offset, len) else { return self.end(Err(bad_buffer())) };
        let mut block = vec![0; usize::try_from(len).unwrap_or(0)];
        self.inner.counters.add(Own::ImageBytes, len);
        match self.inner.base.try_now(Op::Read { range, into: &mut block }) {
            Ok(Attempt::Done) => {
                block.resize(BLOCK, 0);
                self.add_fetched(old, block);
                self.go_on();
            }
            Err(error) => self.end(Err(of_base(error))),
            Ok(Attempt::MustWait) => {
                let base = Arc::clone(&self.inner.base);
                let done = Completion::new(move |outcome| {
                    let mut task = self;
                    match outcome.result {
                        Err(error) => task.end(Err(of_base(error))),
                        Ok(()) => {
                            let mut block = outcome.buffer;
                            block.resize(BLOCK, 0);
                            task.add_fetched(old, block);
                            task.go_on();
                        }
                    }
                });
                base.submit(Request::Read { range, buffer: block }, done);
            }
        }
    }
}

/// Converts the error of a closed base, such as a server on another host, to a device error: the volume
/// itself is not closed, and a front-end that reads "closed" lets its client reconnect.
fn of_base(error: IoError) -> IoError {
    if error.kind() != IoErrorKind::Closed {
        return error;
    }
    IoError::with_source(IoErrorKind::Device, "the base below the volume is closed", error)
}

impl QueuedWrite for Task {
    fn retry(mut self: Box<Self>) -> Result<RetryResult, Box<dyn QueuedWrite>> {
        let step = self.step(Admission::Waited);
        let retried = match step {
            Step::NoRoom | Step::Throttled => return Err(self),
            Step::Finished => RetryResult::Stored,
            Step::Fetch(..) | Step::Failed(_) => RetryResult::Gone,
        };
        self.after(step);
        Ok(retried)
    }

    fn refuse(self: Box<Self>, error: IoError) {
        self.end(Err(error));
    }
}
