//! Reads that miss RAM: the parts are fetched side by side into one buffer. One that is the image's as a whole is the image's
//! to answer, with the buffer that it came with.

use std::sync::Arc;
use std::time::Instant;

use headwater_block::{Attempt, BLOCK_BYTES, ByteRange, Completion, Device, IoError, Request};
use headwater_writecache::{Fetched, Found, FrozenCache, ReadTally, Ticket};
use parking_lot::Mutex;

use crate::counters::Own;
use crate::latency::Class;
use crate::pieces::{Piece, pieces};
use crate::volume::{Inner, bad_buffer, extend, is_absent, read_base_now};

/// Which state is read.
#[derive(Clone)]
pub(crate) enum Side {
    /// The newest, by the machine: it is counted.
    Now,
    /// A frozen one.
    Frozen(Arc<FrozenCache>),
}

impl Side {
    pub(crate) fn is_machine(&self) -> bool {
        matches!(self, Side::Now)
    }

    fn base<'a>(&self, inner: &'a Inner) -> &'a Arc<dyn Device> {
        if self.is_machine() { &inner.base } else { &inner.base_of_views }
    }

    /// Whether all of a range is the image's.
    fn is_absent(&self, inner: &Inner, range: ByteRange) -> bool {
        match self {
            Self::Now => is_absent(range, &|first, end| inner.cache.run_at(first, end)),
            Self::Frozen(cache) => is_absent(range, &|first, end| cache.run_at(first, end)),
        }
    }
}

struct State {
    buffer: Vec<u8>,
    /// Gone before the answer: a frozen view ends with whoever uses it, not a little later.
    side: Side,
    /// Parts under way, and one for the one who starts them.
    parts: usize,
    error: Option<IoError>,
    /// The slowest place that a part came from.
    class: Class,
    done: Option<Completion>,
}

/// A read under way.
struct Gather {
    inner: Arc<Inner>,
    range: ByteRange,
    since: Instant,
    state: Mutex<State>,
}

/// Starts a read.
pub(crate) fn start(inner: &Arc<Inner>, side: Side, range: ByteRange, buffer: Vec<u8>, done: Completion) {
    if side.is_absent(inner, range) {
        return read_image(inner, side, range, buffer, done);
    }
    let (class, done) = (Class::ReadRam, Some(done));
    let state = Mutex::new(State { buffer, side, parts: 1, error: None, class, done });
    let gather = Arc::new(Gather { inner: Arc::clone(inner), range, since: Instant::now(), state });
    gather.look_up(pieces(range));
    gather.part_done(Ok(()));
}

/// Reads what is the image's as a whole. Whoever asks tried before what needs no waiting.
fn read_image(inner: &Arc<Inner>, side: Side, range: ByteRange, buffer: Vec<u8>, done: Completion) {
    let (is_machine, since) = (side.is_machine(), Instant::now());
    let base = side.base(inner);
    // As in `State`: a frozen view is gone before the answer.
    drop(side);
    let this = Arc::clone(inner);
    let done = Completion::new(move |outcome| {
        if is_machine {
            this.counters.add(Own::ImageBytes, range.len());
            this.latencies.waited(Class::ReadImage, since);
        }
        drop(this);
        done.complete(outcome.result, outcome.buffer);
    });
    base.submit(Request::Read { range, buffer }, done);
}

impl Gather {
    /// Looks pieces up: copies what is in RAM, and starts fetching the rest.
    fn look_up(self: &Arc<Self>, wanted: impl Iterator<Item = Piece>) {
        let mut tally = ReadTally::default();
        let mut absent: Vec<ByteRange> = Vec::new();
        let mut spilled: Vec<(Piece, Ticket)> = Vec::new();
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            for piece in wanted {
                let Some(part) = state.buffer.get_mut(piece.start..piece.start + piece.len) else {
                    state.error.get_or_insert(bad_buffer());
                    return;
                };
                let found = match &state.side {
                    Side::Now => self.inner.cache.read(piece.block, piece.skip, part),
                    Side::Frozen(cache) => cache.read(piece.block, piece.skip, part),
                };
                match found {
                    Found::Done(from) => tally.add(from),
                    Found::Spilled(ticket) => spilled.push((piece, ticket)),
                    Found::Absent => {
                        let adjoins =
                            absent.last().is_some_and(|r| Some(r.end()) == piece.range().map(|p| p.offset()));
                        let run = if adjoins { absent.pop() } else { None };
                        absent.extend(extend(run, piece));
                    }
                }
            }
            if state.side.is_machine() {
                self.inner.cache.count_reads(tally);
            }
            state.parts += absent.len();
            if !absent.is_empty() {
                state.class = Class::ReadImage;
            } else if !spilled.is_empty() && state.class != Class::ReadImage {
                state.class = Class::ReadDisk;
            }
        }
        absent.into_iter().for_each(|run| self.read_base(run));
        self.read_spilled(spilled);
    }

    fn read_base(self: &Arc<Self>, run: ByteRange) {
        let (base, attempt) = {
            let mut state = self.state.lock();
            let state = &mut *state;
            let base = state.side.base(&self.inner);
            (base, read_base_now(base, self.range, run, &mut state.buffer))
        };
        match attempt {
            Ok(Attempt::Done) => {
                self.count_image(run);
                return self.part_done(Ok(()));
            }
            Err(error) => return self.part_done(Err(error)),
            Ok(Attempt::MustWait) => {}
        }
        let this = Arc::clone(self);
        let buffer = vec![0; usize::try_from(run.len()).unwrap_or(0)];
        let done = Completion::new(move |outcome| {
            let result = outcome.result.and_then(|()| this.put(run, &outcome.buffer));
            this.count_image(run);
            this.part_done(result);
        });
        base.submit(Request::Read { range: run, buffer }, done);
    }

    fn count_image(&self, run: ByteRange) {
        if self.state.lock().side.is_machine() {
            self.inner.counters.add(Own::ImageBytes, run.len());
        }
    }

    fn put(&self, run: ByteRange, bytes: &[u8]) -> Result<(), IoError> {
        let start = usize::try_from(run.offset() - self.range.offset()).map_err(|_| bad_buffer())?;
        let mut state = self.state.lock();
        let part = state.buffer.get_mut(start..start + bytes.len()).ok_or_else(bad_buffer)?;
        part.copy_from_slice(bytes);
        Ok(())
    }

    fn read_spilled(self: &Arc<Self>, spilled: Vec<(Piece, Ticket)>) {
        let mut rest = spilled.as_slice();
        while let Some((_, first)) = rest.first() {
            let count = 1 + rest
                .iter()
                .skip(1)
                .zip(1..)
                .take_while(|((_, t), n)| first.is_followed_by(t, *n))
                .count();
            let Some((run, others)) = rest.split_at_checked(count) else { return };
            rest = others;
            self.fetch(run.to_vec());
        }
    }

    fn fetch(self: &Arc<Self>, run: Vec<(Piece, Ticket)>) {
        self.state.lock().parts += run.len();
        let tickets = run.iter().map(|(_, ticket)| *ticket).collect();
        let this = Arc::clone(self);
        self.inner.cache.fetch(tickets, move |index, fetched| {
            let Some((piece, _)) = run.get(index).copied() else { return };
            match fetched {
                Fetched::Data(block) => this.part_done(this.put_piece(&piece, block)),
                Fetched::Failed(error) => this.part_done(Err(error)),
                Fetched::Moved => {
                    this.look_up(std::iter::once(piece));
                    this.part_done(Ok(()));
                }
            }
        });
    }

    fn put_piece(&self, piece: &Piece, block: &[u8; BLOCK_BYTES as usize]) -> Result<(), IoError> {
        let mut state = self.state.lock();
        let to = state.buffer.get_mut(piece.start..piece.start + piece.len);
        let from = block.get(piece.skip..piece.skip + piece.len);
        let (Some(to), Some(from)) = (to, from) else { return Err(bad_buffer()) };
        to.copy_from_slice(from);
        Ok(())
    }

    fn part_done(&self, result: Result<(), IoError>) {
        let mut state = self.state.lock();
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        state.parts -= 1;
        if state.parts > 0 {
            return;
        }
        let Some(done) = state.done.take() else { return };
        let side = std::mem::replace(&mut state.side, Side::Now);
        if side.is_machine() {
            self.inner.latencies.waited(state.class, self.since);
        }
        let buffer = std::mem::take(&mut state.buffer);
        let result = state.error.take().map_or(Ok(()), Err);
        drop(state);
        drop(side);
        done.complete(result, buffer);
    }
}
