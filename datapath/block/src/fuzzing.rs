//! Helpers for the fuzzers of several crates: a disk in memory, and a reader of a fuzzer's input.

use parking_lot::Mutex;

use crate::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Outcome, Request,
};

/// A function that a fuzzer or a test calls with bytes. It panics if the code under test is wrong.
pub type Oracle = fn(&[u8]);

/// A fuzzer's input, consumed from the front. After the last byte it returns zeroes, so every input is valid.
#[derive(Clone, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether all bytes are consumed, so that only zeroes follow.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// A number below `limit`, from one byte; 0 if `limit` is 0.
    pub fn below(&mut self, limit: u8) -> u8 {
        self.byte().checked_rem(limit).unwrap_or(0)
    }

    /// `N` bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        array.iter_mut().zip(self.some(N)).for_each(|(to, from)| *to = *from);
        array
    }

    /// The next `len` bytes, or as many as remain.
    pub fn some(&mut self, len: usize) -> &'a [u8] {
        let (now, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        now
    }
}

/// Joins several inputs to one file. Each input is its length in four bytes, little-endian, and its bytes.
pub fn pack<'a>(inputs: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut file = Vec::new();
    for input in inputs {
        let Ok(len) = u32::try_from(input.len()) else { continue };
        file.extend(len.to_le_bytes());
        file.extend(input);
    }
    file
}

/// Splits such a file into inputs. An incomplete last input is omitted.
pub fn unpack(mut file: &[u8]) -> Vec<&[u8]> {
    let mut inputs = Vec::new();
    while let Some((len, rest)) = file.split_first_chunk() {
        let Some(len) = usize::try_from(u32::from_le_bytes(*len)).ok() else { break };
        let Some((input, rest)) = rest.split_at_checked(len) else { break };
        inputs.push(input);
        file = rest;
    }
    inputs
}

/// A disk in memory that checks that requests keep the contract of [`Device`]. It answers at once, or, while
/// it is held, when [`PlainDisk::release`] is called.
#[derive(Debug)]
pub struct PlainDisk {
    geometry: Geometry,
    contents: Mutex<Vec<u8>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_held: bool,
    waiting: Vec<(Request, Completion)>,
}

impl PlainDisk {
    /// A disk with these contents.
    pub fn new(geometry: Geometry, contents: Vec<u8>) -> Self {
        assert_eq!(u64::try_from(contents.len()), Ok(geometry.size_bytes));
        Self { geometry, contents: Mutex::new(contents), state: Mutex::default() }
    }

    /// A copy of all bytes.
    pub fn contents(&self) -> Vec<u8> {
        self.contents.lock().clone()
    }

    /// While `is_held`, new requests wait until [`PlainDisk::release`]; otherwise they are answered at once.
    /// Requests that already wait keep waiting.
    pub fn hold(&self, is_held: bool) {
        self.state.lock().is_held = is_held;
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.state.lock().waiting.len()
    }

    /// Whether a request waits, or a new one would wait.
    pub fn has_or_holds_requests(&self) -> bool {
        let state = self.state.lock();
        state.is_held || !state.waiting.is_empty()
    }

    /// Completes the waiting request number `place`; 0 is the oldest. Returns whether there is such a
    /// request.
    pub fn release(&self, place: usize) -> bool {
        let mut state = self.state.lock();
        if place >= state.waiting.len() {
            return false;
        }
        let (request, done) = state.waiting.remove(place);
        drop(state);
        let Outcome { result, buffer } = self.carry_out(request);
        done.complete(result, buffer);
        true
    }

    fn check(&self, range: ByteRange, len: Option<usize>) {
        let checked = match len {
            Some(_) => self.geometry.check_data(range),
            None => self.geometry.check(range),
        };
        assert!(checked.is_ok(), "a request breaks the contract: {checked:?}");
        assert!(
            len.is_none_or(|len| u64::try_from(len) == Ok(range.len())),
            "a buffer of {len:?} for {range}"
        );
    }

    fn with(&self, range: ByteRange, act: impl FnOnce(&mut [u8])) {
        let place = usize::try_from(range.offset()).ok().zip(usize::try_from(range.end()).ok());
        let mut contents = self.contents.lock();
        if let Some(part) = place.and_then(|(from, to)| contents.get_mut(from..to)) {
            act(part);
        }
    }

    fn apply(&self, op: Op<'_>) {
        match op {
            Op::Read { range, into } => {
                self.check(range, Some(into.len()));
                self.with(range, |part| into.copy_from_slice(part));
            }
            Op::Write { range, from, .. } => {
                self.check(range, Some(from.len()));
                self.with(range, |part| part.copy_from_slice(from));
            }
            Op::WriteZeroes { range, .. } | Op::Discard { range } => {
                self.check(range, None);
                self.with(range, |part| part.fill(0));
            }
            Op::Flush => {}
        }
    }

    fn carry_out(&self, request: Request) -> Outcome {
        let buffer = match request {
            Request::Read { range, mut buffer } => {
                self.apply(Op::Read { range, into: &mut buffer });
                buffer
            }
            Request::Write { range, buffer, fua } => {
                self.apply(Op::Write { range, from: &buffer, fua });
                buffer
            }
            Request::WriteZeroes { range, may_unmap, fua } => {
                self.apply(Op::WriteZeroes { range, may_unmap, fua });
                Vec::new()
            }
            Request::Discard { range } => {
                self.apply(Op::Discard { range });
                Vec::new()
            }
            Request::Flush => Vec::new(),
            Request::Prefetch { range } => {
                self.check(range, None);
                Vec::new()
            }
        };
        Outcome { result: Ok(()), buffer }
    }
}

impl Device for PlainDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        if self.state.lock().is_held {
            return Ok(Attempt::MustWait);
        }
        self.apply(op);
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        let mut state = self.state.lock();
        if state.is_held {
            state.waiting.push((request, done));
            return;
        }
        drop(state);
        let Outcome { result, buffer } = self.carry_out(request);
        done.complete(result, buffer);
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        self.check(range, None);
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn zeroes_follow_the_bytes() {
        let mut input = Input::new(&[1, 2, 3, 7, 9]);
        assert_eq!((input.byte(), input.array::<2>(), input.below(4)), (1, [2, 3], 3));
        assert_eq!((input.some(5), input.is_empty()), (&[9][..], true));
        assert_eq!((input.byte(), input.array::<3>(), input.below(0)), (0, [0; 3], 0));
    }

    #[test]
    fn a_held_disk_answers_after_release() {
        let geometry = Geometry {
            size_bytes: 4096,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            read_only: false,
            volatile_cache: false,
        };
        let disk = PlainDisk::new(geometry, vec![0; 4096]);
        let range = ByteRange::new(512, 512).unwrap();
        let ended = Arc::new(AtomicUsize::new(0));
        let submit = |byte: u8| {
            let ended = Arc::clone(&ended);
            let done = Completion::new(move |_| {
                ended.fetch_add(1, Ordering::SeqCst);
            });
            disk.submit(Request::Write { range, buffer: vec![byte; 512], fua: false }, done);
        };
        disk.hold(true);
        submit(1);
        submit(2);
        assert_eq!((disk.waiting(), ended.load(Ordering::SeqCst)), (2, 0));
        assert!(matches!(disk.try_now(Op::Flush), Ok(Attempt::MustWait)));
        assert!(disk.release(1) && disk.contents()[512] == 2);
        disk.hold(false);
        assert!(disk.release(0) && disk.contents()[512] == 1 && !disk.release(0));
        submit(3);
        assert_eq!((disk.contents()[1023], disk.contents()[1024], ended.load(Ordering::SeqCst)), (3, 0, 3));
    }

    #[test]
    fn packed_pieces_round_trip() {
        let inputs: [&[u8]; 3] = [b"one", b"", b"the third"];
        let file = pack(inputs);
        assert_eq!(file.len(), 3 * 4 + 12);
        assert_eq!(unpack(&file), inputs);
        assert_eq!(unpack(&file[..file.len() - 1]), inputs[..2]);
        assert_eq!(unpack(&file[..11]), inputs[..2]);
        assert_eq!(unpack(&file[..9]), inputs[..1]);
        assert_eq!(unpack(&file[..6]), inputs[..0]);
        assert!(unpack(&[0xff; 7]).is_empty());
    }
}
