//! Reads that miss RAM: all parts are fetched concurrently into one buffer. A read whose whole range comes
//! from the image is passed to the image, with its buffer.
//!
//! A read holds its volume, and its frozen state, only as long as it has blocks to look up. A read that waits
//! only for the image holds neither: the image's store may be unreachable for hours. Otherwise a dropped view
//! would keep the volume frozen for that time, and a closed volume would keep its key, memory and overflow
//! file.

use std::sync::{Arc, Weak};
use std::time::Instant;

use headwater_block::{Attempt, BLOCK_BYTES, ByteRange, Completion, Device, IoError, IoErrorKind, Request};
use headwater_writecache::{EachPart, Fetched, Found, FrozenCache, ReadTally, Ticket};
use parking_lot::{Mutex, MutexGuard};

use crate::counters::Own;
use crate::latency::Class;
use crate::pieces::{Piece, pieces};
use crate::volume::{Inner, bad_buffer, extend, is_absent, read_base_now};

/// The state that is read.
#[derive(Clone)]
pub(crate) enum Side {
    /// The newest state, read by the machine; such reads are counted.
    Now,
    /// A frozen one.
    Frozen(Arc<FrozenCache>),
}

impl Side {
    pub(crate) fn is_machine(&self) -> bool {
        matches!(self, Side::Now)
    }

    /// Whether the whole range comes from the image.
    fn is_absent(&self, inner: &Inner, range: ByteRange) -> bool {
        match self {
            Self::Now => is_absent(range, &|first, end| inner.cache.run_at(first, end)),
            Self::Frozen(cache) => is_absent(range, &|first, end| cache.run_at(first, end)),
        }
    }
}

/// The image for reads of the machine, or for reads of a view.
fn image_of(inner: &Inner, is_machine: bool) -> &Arc<dyn Device> {
    if is_machine { &inner.base } else { &inner.base_of_views }
}

/// The result for a partial block if all its parts are of the same kind and none is on the disk;
/// [`Found::Partial`] otherwise.
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

/// A part of a piece of a partial block, as a piece of its own.
fn part_of(piece: &Piece, at: usize, len: usize) -> Piece {
    Piece { skip: piece.skip + at, start: piece.start + at, len, ..*piece }
}

/// The references to its volume that a read in flight holds.
enum Held {
    /// The volume, to look up blocks of the newest state.
    Now(Arc<Inner>),
    /// The volume and a frozen state.
    Frozen(Arc<Inner>, Arc<FrozenCache>),
    /// Nothing but a weak reference, to count a read of the machine if the volume still exists at its end.
    Count(Weak<Inner>),
    /// Nothing.
    Nothing,
}

impl Held {
    fn is_machine(&self) -> bool {
        matches!(self, Self::Now(_) | Self::Count(_))
    }

    /// Looks up a piece. `None` after [`Held::release`].
    fn read(&self, piece: &Piece, into: &mut [u8]) -> Option<Found> {
        match self {
            Self::Now(inner) => Some(inner.cache.read(piece.block, piece.skip, into)),
            Self::Frozen(_, cache) => Some(cache.read(piece.block, piece.skip, into)),
            Self::Count(_) | Self::Nothing => None,
        }
    }

    /// Like [`Held::read`], for a partial block: calls `each` for each place that has a part of it.
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

    /// Gives up the references that only lookups need, and returns them. The caller drops them without
    /// holding a lock: they may be the last of the volume.
    fn release(&mut self) -> Self {
        let rest = match self {
            Self::Now(inner) => Self::Count(Arc::downgrade(inner)),
            Self::Frozen(..) | Self::Count(_) | Self::Nothing => Self::Nothing,
        };
        std::mem::replace(self, rest)
    }

    /// Ends the read, and counts it if it is the machine's.
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

/// The error for a bug here: references must exist until the last lookup has ended.
fn released_early() -> IoError {
    IoError::new(
        IoErrorKind::Device,
        "internal error: a read continued after it had released the volume; please report this as a bug",
    )
}

struct State {
    buffer: Vec<u8>,
    /// Dropped before the answer, so that a frozen view ends with its user, not a little later.
    held: Held,
    /// Lookups in flight: the first one, and one for each block that is fetched.
    lookups: usize,
    /// Reads of runs from the image in flight.
    runs: usize,
    image_bytes: u64,
    error: Option<IoError>,
    /// The slowest place that served a part.
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

/// Reads a range whose whole contents come from the image. The caller has tried to read without waiting.
fn read_image(inner: &Arc<Inner>, side: Side, range: ByteRange, buffer: Vec<u8>, done: Completion) {
    let is_machine = side.is_machine();
    // As for `State`: a frozen view is dropped before the answer.
    drop(side);
    let counted = is_machine.then(|| (Arc::downgrade(inner), Instant::now()));
    let image = image_of(inner, is_machine);
    // The read keeps only the image alive until it has answered.
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
    /// Looks up pieces: copies those in RAM, and starts to fetch the others.
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
                    state.error.get_or_insert(released_early());
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
                    // Parts of a partial block are never partial blocks.
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

    /// Looks up a block that had moved before it was fetched.
    fn look_up_again(self: &Arc<Self>, piece: Piece) -> Result<(), IoError> {
        let inner = self.state.lock().held.inner().ok_or_else(released_early)?;
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
        // As in `read_image`: the read keeps only the image alive until it has answered.
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
            // Neighbouring blocks, and parts of neighbours that share a slot.
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
                // The other pieces in the same slot.
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
            // Now the read waits only for the image. This lookup counts as in flight until the references are
            // dropped: otherwise the image's answer, on its own thread, could complete the read while a view
            // still exists.
            let unneeded = state.held.release();
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
