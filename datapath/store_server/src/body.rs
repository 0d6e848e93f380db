//! Bodies of answers: bytes in memory, or a range of an object that is read while it is sent.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use headwater_store::{Object, StoreError, StoreErrorKind};
use hyper::body::{Frame, SizeHint};
use tokio::task::JoinHandle;

use crate::progress::Progress;
use crate::reads::{ReadPermit, Reads};
use crate::send_memory::{AnswerMemory, SendMemoryPermit};

/// How much of an object is read at a time, if there is memory. While one piece is sent, the next is read.
pub const PIECE_BYTES: usize = 256 << 10;

/// A body.
pub(crate) enum AnswerBody {
    /// Bytes in memory.
    Whole(Option<Bytes>),
    /// A range of an object.
    Object(Box<Reading>),
}

/// A range of an object that is being read.
pub(crate) struct Reading {
    object: Arc<dyn Object>,
    /// The offset of the next piece to read.
    at: u64,
    end: u64,
    /// Bytes that were not sent yet.
    left_bytes: u64,
    next: Option<JoinHandle<Result<Bytes, StoreError>>>,
    /// The first piece, once it has arrived.
    first: Option<Bytes>,
    reads: Reads,
    send_memory: AnswerMemory,
    progress: Arc<Progress>,
    again: Option<Again>,
}

/// A piece, with its memory permit, which lasts as long as any part of the piece is used.
struct Piece {
    bytes: Vec<u8>,
    _held: SendMemoryPermit,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// What is needed to read the body of an object.
pub(crate) struct ReadContext {
    pub reads: Reads,
    /// For the first piece.
    pub permit: ReadPermit,
    pub send_memory: AnswerMemory,
    pub progress: Arc<Progress>,
    /// Set if the client found the earlier bytes wrong.
    pub again: Option<Again>,
}

/// Details of a request that a client repeats because the bytes were wrong.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Again {
    /// The attempt number of a full re-read of the object.
    pub reading: Option<u32>,
}

impl AnswerBody {
    pub(crate) fn whole(bytes: Bytes) -> Self {
        Self::Whole(Some(bytes).filter(|bytes| !bytes.is_empty()))
    }

    /// A body of `len_bytes` from `at`. The range must be inside the object.
    pub(crate) fn object(object: Arc<dyn Object>, at: u64, len_bytes: u64, context: ReadContext) -> Self {
        let end = at.saturating_add(len_bytes);
        let ReadContext { reads, permit, send_memory, progress, again } = context;
        let mut reading = Reading {
            object,
            at,
            end,
            left_bytes: len_bytes,
            next: None,
            first: None,
            reads,
            send_memory,
            progress,
            again,
        };
        reading.read_on(Some(permit));
        Self::Object(Box::new(reading))
    }

    /// Waits for the first piece, so that no answer promises an unreadable object.
    pub(crate) async fn first_piece(&mut self) -> Result<(), StoreError> {
        let Self::Object(reading) = self else { return Ok(()) };
        let Some(next) = reading.next.as_mut() else { return Ok(()) };
        let read = next.await;
        reading.next = None;
        let given_up = |_| StoreError::new(StoreErrorKind::Io, "a read of the store was cancelled");
        reading.first = Some(read.map_err(given_up)??);
        Ok(())
    }
}

impl Reading {
    fn read_on(&mut self, permit: Option<ReadPermit>) {
        let len = usize::try_from(self.end - self.at).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
        if len == 0 {
            return;
        }
        let (object, at, again) = (Arc::clone(&self.object), self.at, self.again);
        let (reads, send_memory, progress) =
            (self.reads.clone(), self.send_memory.clone(), Arc::clone(&self.progress));
        // A task of its own: if the body were not polled, its permit would be lost to all others.
        self.next = Some(tokio::spawn(async move {
            let (len, held) = send_memory.take(len).await;
            // Only now does the server count as busy, because until here it may have waited for the client.
            let busy = progress.busy();
            let permit = match permit {
                Some(permit) => Some(permit),
                None => reads.permit().await,
            };
            let read = move || {
                let _until_read = (busy, permit);
                let mut bytes = vec![0; len];
                match again {
                    Some(again) => object.read_range_past_caches(at, &mut bytes, again.reading)?,
                    None => object.read_range(at, &mut bytes)?,
                }
                Ok(Bytes::from_owner(Piece { bytes, _held: held }))
            };
            let failed = |_| StoreError::new(StoreErrorKind::Io, "a read of the store panicked");
            tokio::task::spawn_blocking(read).await.map_err(failed)?
        }));
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(self.sent(first))));
        }
        let Some(next) = self.next.as_mut() else { return Poll::Ready(None) };
        let piece = match std::task::ready!(Pin::new(next).poll(cx)) {
            Ok(Ok(piece)) => piece,
            Ok(Err(e)) => {
                self.next = None;
                tracing::error!(object = %self.object.id(), error = %e, "cannot read a data object, so the answer to a client is cut short");
                return Poll::Ready(Some(Err(std::io::Error::other(e))));
            }
            Err(e) => {
                self.next = None;
                return Poll::Ready(Some(Err(std::io::Error::other(e))));
            }
        };
        self.next = None;
        Poll::Ready(Some(Ok(self.sent(piece))))
    }

    /// Starts to read the next piece while this one is sent.
    fn sent(&mut self, piece: Bytes) -> Frame<Bytes> {
        let len_bytes = u64::try_from(piece.len()).unwrap_or(u64::MAX);
        self.at = self.at.saturating_add(len_bytes);
        self.left_bytes = self.left_bytes.saturating_sub(len_bytes);
        self.read_on(None);
        Frame::data(piece)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // Nobody needs the piece: the task needs no thread, unless it already has one.
        if let Some(next) = &self.next {
            next.abort();
        }
    }
}

impl hyper::body::Body for AnswerBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Object(reading) => reading.poll_piece(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Object(reading) => reading.left_bytes == 0,
        }
    }

    fn size_hint(&self) -> SizeHint {
        let left_bytes = match self {
            Self::Whole(bytes) => bytes.as_ref().map_or(0, |b| u64::try_from(b.len()).unwrap_or(u64::MAX)),
            Self::Object(reading) => reading.left_bytes,
        };
        SizeHint::with_exact(left_bytes)
    }
}
