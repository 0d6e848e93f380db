//! Reads that miss RAM: the parts are fetched side by side into one buffer. One that is the image's as a whole is the image's
//! to answer, with the buffer that it came with.
//!
//! A read holds its volume, and its frozen state, while there is anything to look up. What waits for the image alone holds
//! neither: the image's store may be away for hours. A view that was dropped would keep the volume frozen for so long, and a
//! volume that is closed its key, its memory and its overflow file.

use std::sync::{Arc, Weak};
use std::time::Instant;

use headwater_block::{Attempt, BLOCK_BYTES, ByteRange, Completion, Device, IoError, IoErrorKind, Request};
use headwater_writecache::{EachPart, Fetched, Found, FrozenCache, ReadTally, Ticket};
use parking_lot::{Mutex, MutexGuard};

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

    /// Whether all of a range is the image's.
    fn is_absent(&self, inner: &Inner, range: ByteRange) -> bool {
        match self {
            Self::Now => is_absent(range, &|first, end| inner.cache.run_at(first, end)),
            Self::Frozen(cache) => is_absent(range, &|first, end| cache.run_at(first, end)),
        }
    }
}

/// The image, as the machine or a view reads it.
fn image_of(inner: &Inner, is_machine: bool) -> &Arc<dyn Device> {
    if is_machine { &inner.base } else { &inner.base_of_views }
}

/// What was found of a partial block, if all of it was the same kind and needs no waiting for the disk; [`Found::Partial`] otherwise.
pub(crate) fn of_one_kind(read_parts: &mut dyn FnMut(EachPart<'_>)) -> Found {
    let mut all = None;
    read_parts(&mut |_, _, found| {
        all = Some(match (all, found) {
            (None, found) => found,
            (Some(Found::Done(_)), Found::Done(from)) => Found::Done(from),
            (Some(Found::Absent), Found::Absent) => Found::Absent,
            _ => Found::Partial,
        });
    });
    all.unwrap_or(Found::Partial)
}

/// A part of a partial block, which is a piece of its own.
fn part_of(piece: &Piece, at: usize, len: usize) -> Piece {
    Piece { skip: piece.skip + at, start: piece.start + at, len, ..*piece }
}

/// What a read under way holds of its volume.
enum Held {
    /// All of it, to look up what the machine reads.
    Now(Arc<Inner>),
    /// All of it, and a frozen state.
    Frozen(Arc<Inner>, Arc<FrozenCache>),
    /// Nothing: a read of the machine is counted where the volume is still there at its end.
    Count(Weak<Inner>),
    /// Nothing.
    Nothing,
}

impl Held {
    fn is_machine(&self) -> bool {
        matches!(self, Self::Now(_) | Self::Count(_))
    }

    /// Looks a piece up. `None` once it is let go of.
    fn read(&self, piece: &Piece, into: &mut [u8]) -> Option<Found> {
        match self {
            Self::Now(inner) => Some(inner.cache.read(piece.block, piece.skip, into)),
            Self::Frozen(_, cache) => Some(cache.read(piece.block, piece.skip, into)),
            Self::Count(_) | Self::Nothing => None,
        }
    }

    /// The same of a partial block, for each place that has a part of it.
    fn read_parts(&self, piece: &Piece, into: &mut [u8], each: &mut dyn FnMut(Piece, Found)) {
        let each: EachPart<'_> = &mut |at, len, found| each(part_of(piece, at, len), found);
        match self {
            Self::Now(inner) => inner.cache.read_parts(piece.block, piece.skip, into, each),
            Self::Frozen(_, cache) => cache.read_parts(piece.block, piece.skip, into, each),
            Self::Count(_) | Self::Nothing => {}
        }
    }

    fn inner(&self) -> Option<Arc<Inner>> {
        match self {
            Self::Now(inner) | Self::Frozen(inner, _) => Some(Arc::clone(inner)),
            Self::Count(_) | Self::Nothing => None,
        }
    }

    /// Gives away what only look-ups need. To be dropped without a lock: it may be the last of a volume.
    fn let_go(&mut self) -> Self {
        let rest = match self {
            Self::Now(inner) => Self::Count(Arc::downgrade(inner)),
            Self::Frozen(..) | Self::Count(_) | Self::Nothing => Self::Nothing,
        };
        std::mem::replace(self, rest)
    }

    /// Ends it, and counts a read of the machine.
    fn end(self, count: impl FnOnce(&Inner)) {
        match self {
            Self::Now(inner) => count(&inner),
            Self::Count(inner) => {
                if let Some(inner) = inner.upgrade() {
                    count(&inner);
                }
            }
            Self::Frozen(..) | Self::Nothing => {}
        }
    }
}

/// A fault of ours: what is looked up in is there until the last look-up is over.
fn let_go_early() -> IoError {
    IoError::new(IoErrorKind::Device, "a block was looked up when its request no longer held the volume")
}

struct State {
    buffer: Vec<u8>,
    /// Gone before the answer: a frozen view ends with whoever uses it, not a little later.
    held: Held,
    /// Look-ups under way: that of the one who starts them, and of each block that is fetched.
    lookups: usize,
    /// Runs under way that are the image's.
    runs: usize,
    image_bytes: u64,
    error: Option<IoError>,
    /// The slowest place that a part came from.
    class: Class,
    done: Option<Completion>,
}

/// A part of a read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    LookUp,
    Image,
}

/// A read under way.
struct Gather {
    range: ByteRange,
    since: Instant,
    state: Mutex<State>,
}

/// Starts a read.
pub(crate) fn start(inner: &Arc<Inner>, side: Side, range: ByteRange, buffer: Vec<u8>, done: Completion) {
    if side.is_absent(inner, range) {
        return read_image(inner, side, range, buffer, done);
    }
    let held = match side {
        Side::Now => Held::Now(Arc::clone(inner)),
        Side::Frozen(cache) => Held::Frozen(Arc::clone(inner), cache),
    };
    let (class, done) = (Class::ReadRam, Some(done));
    let state = State { buffer, held, lookups: 1, runs: 0, image_bytes: 0, error: None, class, done };
    let gather = Arc::new(Gather { range, since: Instant::now(), state: Mutex::new(state) });
    gather.look_up(inner, pieces(range));
    gather.part_done(Part::LookUp, Ok(()));
}

/// Reads what is the image's as a whole. Whoever asks tried before what needs no waiting.
fn read_image(inner: &Arc<Inner>, side: Side, range: ByteRange, buffer: Vec<u8>, done: Completion) {
    let is_machine = side.is_machine();
    // As in `State`: a frozen view is gone before the answer.
    drop(side);
    let counted = is_machine.then(|| (Arc::downgrade(inner), Instant::now()));
    let image = image_of(inner, is_machine);
    // Of the volume, only the image stays until it has answered.
    let held = Arc::clone(image);
    let done = Completion::new(move |outcome| {
        if let Some((inner, since)) = counted
            && let Some(inner) = inner.upgrade()
        {
            inner.counters.read(Class::ReadImage, range.len());
            inner.counters.add(Own::ImageBytes, range.len());
            inner.latencies.waited(Class::ReadImage, since);
        }
        drop(held);
        done.complete(outcome.result, outcome.buffer);
    });
    image.submit(Request::Read { range, buffer }, done);
}

impl Gather {
    /// Looks pieces up: copies what is in RAM, and starts fetching the rest.
    fn look_up(self: &Arc<Self>, inner: &Inner, wanted: impl Iterator<Item = Piece>) {
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
                let Some(found) = state.held.read(&piece, part) else {
                    state.error.get_or_insert(let_go_early());
                    return;
                };
                let mut take = |piece: Piece, found| match found {
                    Found::Done(from) => tally.add(from),
                    Found::Spilled(ticket) => spilled.push((piece, ticket)),
                    Found::Absent => {
                        let adjoins =
                            absent.last().is_some_and(|r| Some(r.end()) == piece.range().map(|p| p.offset()));
                        let run = if adjoins { absent.pop() } else { None };
                        absent.extend(extend(run, piece));
                    }
                    // Of a part, there is no such answer.
                    Found::Partial => {}
                };
                if found == Found::Partial {
                    state.held.read_parts(&piece, part, &mut take);
                } else {
                    take(piece, found);
                }
            }
            if state.held.is_machine() {
                inner.cache.count_reads(tally);
            }
            state.runs += absent.len();
            state.image_bytes += absent.iter().map(ByteRange::len).sum::<u64>();
            if !absent.is_empty() {
                state.class = Class::ReadImage;
            } else if !spilled.is_empty() && state.class != Class::ReadImage {
                state.class = Class::ReadDisk;
            }
        }
        absent.into_iter().for_each(|run| self.read_base(inner, run));
        self.read_spilled(inner, &spilled);
    }

    /// Looks a block up that was not where it was to be fetched.
    fn look_up_again(self: &Arc<Self>, piece: Piece) -> Result<(), IoError> {
        let inner = self.state.lock().held.inner().ok_or_else(let_go_early)?;
        self.look_up(&inner, std::iter::once(piece));
        Ok(())
    }

    fn read_base(self: &Arc<Self>, inner: &Inner, run: ByteRange) {
        let (image, attempt) = {
            let mut state = self.state.lock();
            let image = image_of(inner, state.held.is_machine());
            (image, read_base_now(image, self.range, run, &mut state.buffer))
        };
        match attempt {
            Ok(Attempt::Done) => return self.part_done(Part::Image, Ok(())),
            Err(error) => return self.part_done(Part::Image, Err(error)),
            Ok(Attempt::MustWait) => {}
        }
        // As in `read_image`: of the volume, only the image stays until it has answered.
        let (this, held) = (Arc::clone(self), Arc::clone(image));
        let buffer = vec![0; usize::try_from(run.len()).unwrap_or(0)];
        let done = Completion::new(move |outcome| {
            let result = outcome.result.and_then(|()| this.put(run, &outcome.buffer));
            drop(held);
            this.part_done(Part::Image, result);
        });
        image.submit(Request::Read { range: run, buffer }, done);
    }

    fn put(&self, run: ByteRange, bytes: &[u8]) -> Result<(), IoError> {
        let start = usize::try_from(run.offset() - self.range.offset()).map_err(|_| bad_buffer())?;
        let mut state = self.state.lock();
        let part = state.buffer.get_mut(start..start + bytes.len()).ok_or_else(bad_buffer)?;
        part.copy_from_slice(bytes);
        Ok(())
    }

    fn read_spilled(self: &Arc<Self>, inner: &Inner, spilled: &[(Piece, Ticket)]) {
        let mut rest = spilled;
        while let Some((_, first)) = rest.first() {
            let mut tickets = vec![*first];
            // Blocks side by side, and parts of neighbours that share a slot.
            let mut is_next = |ticket: &Ticket| {
                if tickets.last().is_some_and(|last| last.is_same_slot(ticket)) {
                    return true;
                }
                let follows = first.is_followed_by(ticket, tickets.len());
                if follows {
                    tickets.push(*ticket);
                }
                follows
            };
            let count = 1 + rest.iter().skip(1).take_while(|(_, ticket)| is_next(ticket)).count();
            let Some((run, others)) = rest.split_at_checked(count) else { return };
            rest = others;
            self.fetch(inner, tickets, run.to_vec());
        }
    }

    /// Fetches the slots of these tickets, for the pieces in them.
    fn fetch(self: &Arc<Self>, inner: &Inner, tickets: Vec<Ticket>, run: Vec<(Piece, Ticket)>) {
        self.state.lock().lookups += tickets.len();
        let this = Arc::clone(self);
        let mut rest = run.into_iter().peekable();
        inner.cache.fetch(tickets, move |_, fetched| {
            let Some((mut piece, ticket)) = rest.next() else { return };
            let result = loop {
                let result = match &fetched {
                    Fetched::Data(block) => this.put_piece(&piece, block),
                    Fetched::Failed(error) => Err(error.clone()),
                    Fetched::Moved => this.look_up_again(piece),
                };
                // The others in the same slot.
                match rest.next_if(|(_, other)| ticket.is_same_slot(other)) {
                    Some((other, _)) if result.is_ok() => piece = other,
                    Some(_) => {}
                    None => break result,
                }
            };
            this.part_done(Part::LookUp, result);
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

    fn part_done(&self, part: Part, result: Result<(), IoError>) {
        let mut state = self.state.lock();
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        if part == Part::LookUp && state.lookups == 1 && state.runs > 0 {
            // The image alone is waited for. This look-up counts as under way until all is let go of: or the image's answer, on
            // its own thread, would answer the read while there is still a view.
            let unneeded = state.held.let_go();
            MutexGuard::unlocked(&mut state, || drop(unneeded));
        }
        match part {
            Part::LookUp => state.lookups -= 1,
            Part::Image => state.runs -= 1,
        }
        if state.lookups + state.runs > 0 {
            return;
        }
        let Some(done) = state.done.take() else { return };
        let held = std::mem::replace(&mut state.held, Held::Nothing);
        let (class, image_bytes) = (state.class, state.image_bytes);
        let buffer = std::mem::take(&mut state.buffer);
        let result = state.error.take().map_or(Ok(()), Err);
        drop(state);
        held.end(|inner| {
            if image_bytes > 0 {
                inner.counters.add(Own::ImageBytes, image_bytes);
            }
            inner.counters.read(class, self.range.len());
            inner.latencies.waited(class, self.since);
        });
        done.complete(result, buffer);
    }
}
