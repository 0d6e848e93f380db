//! Memory for pieces of answers that are being sent: clients that request much and read little must not fill
//! the host's memory.
//!
//! A piece counts from before it is read until it is sent, or copied for encryption. If the server or the
//! connection has no memory left, an answer continues with small pieces, one at a time: it is slower, and
//! waits only for its own client.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory for pieces of all answers, not counting small ones.
pub const PIECES_BYTES: usize = 256 << 20;
/// At most this much of it is used by one connection.
pub const CONNECTION_PIECES_BYTES: usize = 4 << 20;
/// A piece for which there is no other memory; each answer has at most one.
pub const SMALL_PIECE_BYTES: usize = 16 << 10;

/// Memory for the pieces of a connection.
#[derive(Clone)]
pub(crate) struct SendMemory {
    server: Arc<Semaphore>,
    connection: Arc<Semaphore>,
}

/// Memory for the pieces of an answer.
#[derive(Clone)]
pub(crate) struct AnswerRoom {
    connection: SendMemory,
    small: Arc<Semaphore>,
}

/// Returns the memory on drop.
pub(crate) struct SendMemoryPermit(#[expect(dead_code, reason = "held, not used")] Vec<OwnedSemaphorePermit>);

impl SendMemoryPermit {
    /// For bytes that are not counted.
    pub(crate) fn nothing() -> Self {
        Self(Vec::new())
    }

    /// `bytes` of `send_memory`, if it has them.
    pub(crate) fn of(send_memory: &Arc<Semaphore>, bytes: usize) -> Option<Self> {
        let bytes = u32::try_from(bytes).ok()?;
        Some(Self(vec![Arc::clone(send_memory).try_acquire_many_owned(bytes).ok()?]))
    }
}

impl SendMemory {
    pub(crate) fn of_server() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(PIECES_BYTES))
    }

    pub(crate) fn of_connection(server: &Arc<Semaphore>) -> Self {
        let connection = Arc::new(Semaphore::new(CONNECTION_PIECES_BYTES));
        Self { server: Arc::clone(server), connection }
    }

    pub(crate) fn of_answer(&self) -> AnswerRoom {
        AnswerRoom { connection: self.clone(), small: Arc::new(Semaphore::new(1)) }
    }
}

impl AnswerRoom {
    /// Memory for a piece of `len` bytes or, once the previous small piece is sent, for a smaller one.
    /// Returns the length.
    pub(crate) async fn take(&self, len: usize) -> (usize, SendMemoryPermit) {
        if let Some(held) = self.try_take(len) {
            return (len, held);
        }
        // Never closed.
        let small = Arc::clone(&self.small).acquire_owned().await;
        (len.min(SMALL_PIECE_BYTES), SendMemoryPermit(small.into_iter().collect()))
    }

    fn try_take(&self, len: usize) -> Option<SendMemoryPermit> {
        let bytes = u32::try_from(len).ok()?;
        let of = |send_memory: &Arc<Semaphore>| Arc::clone(send_memory).try_acquire_many_owned(bytes).ok();
        Some(SendMemoryPermit(vec![of(&self.connection.connection)?, of(&self.connection.server)?]))
    }
}
