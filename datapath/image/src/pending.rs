//! Requests to a version that wait for chunks, and the division of a request into pieces of one chunk each.
//! [`crate::reader`] uses them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use headwater_block::{Completion, IoError, IoErrorKind, Outcome};
use parking_lot::{Mutex, MutexGuard};

/// A part of a request inside one chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Number of the chunk.
    pub index: u64,
    /// Its offset in the chunk.
    pub from: usize,
    pub len: usize,
    /// Its offset in the request's buffer.
    pub to: usize,
}

pub(crate) fn copy_piece(chunk: &[u8], piece: Piece, target: &mut [u8]) -> Result<(), IoError> {
    let source = chunk.get(piece.from..).and_then(|tail| tail.get(..target.len()));
    target.copy_from_slice(source.ok_or_else(wrong_buffer)?);
    Ok(())
}

pub(crate) fn wrong_buffer() -> IoError {
    IoError::new(IoErrorKind::Invalid, "a bug: the buffer's length differs from the request's")
}

/// Delays an answer until [`HeldAnswer`] is dropped. The receiver of an answer may remove things that the
/// answering thread still uses.
pub(crate) fn root(done: Completion) -> (Completion, HeldAnswer) {
    let answer = Arc::new(Mutex::new(Answer { done: Some(done), outcome: None, is_held: true }));
    let held = HeldAnswer(Arc::clone(&answer));
    let completion = Completion::new(move |outcome| {
        let mut answer = answer.lock();
        answer.outcome = Some(outcome);
        if !answer.is_held {
            give(answer);
        }
    });
    (completion, held)
}

struct Answer {
    done: Option<Completion>,
    outcome: Option<Outcome>,
    is_held: bool,
}

/// Delays an answer until it is dropped.
pub(crate) struct HeldAnswer(Arc<Mutex<Answer>>);

impl Drop for HeldAnswer {
    fn drop(&mut self) {
        let mut answer = self.0.lock();
        answer.is_held = false;
        give(answer);
    }
}

/// Sends the answer, if there is one.
fn give(mut answer: MutexGuard<'_, Answer>) {
    let Some(Outcome { result, buffer }) = answer.outcome.take() else { return };
    let done = answer.done.take();
    drop(answer);
    if let Some(done) = done {
        done.complete(result, buffer);
    }
}

/// A request that waits for chunks.
pub(crate) struct PendingRead {
    /// Pieces that have not arrived.
    left: AtomicUsize,
    state: Mutex<ReadState>,
}

struct ReadState {
    buffer: Vec<u8>,
    result: Result<(), IoError>,
    done: Option<Completion>,
}

impl PendingRead {
    /// Waits for this many pieces, and then answers the request.
    pub(crate) fn start(pieces: usize, buffer: Vec<u8>, done: Completion) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicUsize::new(pieces),
            state: Mutex::new(ReadState { buffer, result: Ok(()), done: Some(done) }),
        })
    }

    pub(crate) fn piece_is_here(&self, piece: Piece, bytes: Result<&[u8], &IoError>) {
        let mut state = self.state.lock();
        let copied = bytes.map_err(IoError::clone).and_then(|bytes| {
            let target = state.buffer.get_mut(piece.to..).and_then(|tail| tail.get_mut(..piece.len));
            copy_piece(bytes, piece, target.ok_or_else(wrong_buffer)?)
        });
        if let Err(e) = copied {
            state.result = Err(e);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let result = std::mem::replace(&mut state.result, Ok(()));
        let buffer = std::mem::take(&mut state.buffer);
        let done = state.done.take();
        drop(state);
        if let Some(done) = done {
            done.complete(result, buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_delayed_answer_is_sent_exactly_once() {
        let held_answer = || {
            let (tx, rx) = mpsc::channel();
            let done =
                Completion::new(move |outcome| tx.send(outcome.result.map(|()| outcome.buffer)).unwrap());
            let (done, held) = root(done);
            (done, held, rx)
        };
        let (done, held, answered) = held_answer();
        done.complete(Ok(()), vec![7]);
        assert!(answered.try_recv().is_err());
        drop(held);
        assert_eq!(answered.recv().unwrap().unwrap(), [7]);
        assert!(answered.recv().is_err());
        let (done, held, answered) = held_answer();
        drop(held);
        assert!(answered.try_recv().is_err());
        done.complete(Ok(()), vec![8]);
        assert_eq!(answered.recv().unwrap().unwrap(), [8]);
        // Lost because of a bug.
        let (done, held, answered) = held_answer();
        drop(done);
        drop(held);
        assert!(answered.recv().unwrap().is_err());
    }
}
