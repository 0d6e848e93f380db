//! A volume as it was at one instant, as a read-only [`Device`]. A version is made from it while the machine
//! continues.

use std::sync::Arc;

use headwater_block::{
    Attempt, ByteRange, Completion, CompletionQueue, Device, Extent, Geometry, IoError, IoErrorKind, Op,
    Request,
};
use headwater_writecache::{Found, FrozenCache, Kind, Residence};

use crate::pieces::pieces;
use crate::read::{self, Side};
use crate::volume::{Inner, bad_buffer, extend, first_run, read_base_now};

/// The state of a volume at one instant. Dropping it frees the space that only it needed.
pub struct FrozenView {
    inner: Arc<Inner>,
    cache: Arc<FrozenCache>,
}

/// A run of bytes that the machine changed, or that are as in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedRun {
    /// Length in bytes; never 0.
    pub len: u64,
    /// Whether the run was written or discarded. It may still equal the image.
    pub changed: bool,
}

impl FrozenView {
    pub(crate) fn new(inner: &Arc<Inner>) -> Result<Arc<Self>, IoError> {
        let cache = Arc::new(inner.cache.freeze()?);
        Ok(Arc::new(Self { inner: Arc::clone(inner), cache }))
    }

    /// The runs of `range` that the machine changed or did not change, in order and without gaps, in whole
    /// blocks. At most `max_runs`, so the answer may end before the range does.
    pub fn changed(&self, range: ByteRange, max_runs: usize) -> Vec<ChangedRun> {
        let mut found: Vec<ChangedRun> = Vec::new();
        let mut rest = range;
        while !rest.is_empty() {
            let (kind, run) = first_run(rest, &|first, end| self.cache.run_at(first, end));
            let changed = kind != Kind::Absent;
            let full = found.len() >= max_runs.max(1);
            match found.last_mut() {
                Some(last) if last.changed == changed => last.len += run.len(),
                _ if full => break,
                _ => found.push(ChangedRun { len: run.len(), changed }),
            }
            let Some(next) = ByteRange::new(run.end(), rest.end() - run.end()) else { break };
            rest = next;
        }
        found
    }

    /// Calls `each` with all blocks of 4 KiB that the machine changed and that take space, in order: the
    /// first block of a run, the run's length, and its residence at this moment. Stops at the first error of
    /// `each`.
    pub fn places<E>(&self, each: &mut dyn FnMut(u32, u32, Residence) -> Result<(), E>) -> Result<(), E> {
        self.cache.places(&mut |first, blocks, place| each(first.0, blocks, place))
    }

    /// The device below the write cache. It has the contents of unchanged blocks, even after this view has
    /// ended.
    pub fn below(&self) -> &Arc<dyn Device> {
        &self.inner.base_of_views
    }

    fn read_now(&self, range: ByteRange, into: &mut [u8]) -> Result<Attempt, IoError> {
        let mut absent: Option<ByteRange> = None;
        for piece in pieces(range) {
            let Some(part) = into.get_mut(piece.start..piece.start + piece.len) else {
                return Err(bad_buffer());
            };
            let mut found = self.cache.read(piece.block, piece.skip, part);
            if found == Found::Partial {
                found =
                    read::of_one_kind(&mut |each| self.cache.read_parts(piece.block, piece.skip, part, each));
            }
            match found {
                Found::Done(_) => {
                    if let Some(run) = absent.take()
                        && read_base_now(&self.inner.base_of_views, range, run, into)? == Attempt::MustWait
                    {
                        return Ok(Attempt::MustWait);
                    }
                }
                Found::Absent => absent = extend(absent, piece),
                Found::Spilled(_) | Found::Partial => return Ok(Attempt::MustWait),
            }
        }
        match absent {
            Some(run) => read_base_now(&self.inner.base_of_views, range, run, into),
            None => Ok(Attempt::Done),
        }
    }
}

fn read_only() -> IoError {
    IoError::new(IoErrorKind::ReadOnly, "a frozen view of a volume is read-only")
}

impl Device for FrozenView {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, volatile_cache: false, ..self.inner.geometry }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { range, into } => self.read_now(range, into),
            Op::Flush => Ok(Attempt::Done),
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } => Err(read_only()),
        }
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { range, buffer } => {
                read::start(&self.inner, Side::Frozen(Arc::clone(&self.cache)), range, buffer, done);
            }
            Request::Flush => done.complete(Ok(()), Vec::new()),
            Request::Prefetch { range } => self.inner.base.submit(Request::Prefetch { range }, done),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.inner.cache.completion_queue()
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.inner.extents(range, max_extents, |first, end| self.cache.run_at(first, end))
    }
}

impl std::fmt::Debug for FrozenView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FrozenView").field("cache", &self.cache).finish_non_exhaustive()
    }
}
