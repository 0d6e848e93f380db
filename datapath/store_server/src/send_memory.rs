//! Limits the memory for pieces of answers that are being sent: clients that request much and read little
//! must not fill the host's memory.
//!
//! A piece counts from before it is read until it is sent, or copied for encryption. If the limit of the
//! server or of the connection is reached, an answer continues with small pieces, one at a time. It is then
//! slower, and waits only for its own client.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The limit for pieces of all answers, without small ones.
pub const PIECES_BYTES: usize = 256 << 20;
/// The part of this limit that one connection may use.
pub const CONNECTION_PIECES_BYTES: usize = 4 << 20;
/// The size of a piece beyond the limits; each answer has at most one.
pub const SMALL_PIECE_BYTES: usize = 16 << 10;

/// Memory for the pieces of a connection: what is left of the limit of the server, and of that of the connection.
#[derive(Clone)]
pub(crate) struct SendMemory {
    server: Arc<Semaphore>,
    own: Arc<Semaphore>,
}

/// Memory for the pieces of an answer.
#[derive(Clone)]
pub(crate) struct AnswerMemory {
    connection: SendMemory,
    small: Arc<Semaphore>,
}

/// Memory that is in use, and that is returned on drop. `contents.rs` uses such permits for another pool, too: cached
/// manifests, lists and traces.
pub(crate) struct SendMemoryPermit(#[expect(dead_code, reason = "held, not used")] Vec<OwnedSemaphorePermit>);

impl SendMemoryPermit {
    /// A permit for bytes that do not count.
    pub(crate) fn nothing() -> Self {
        Self(Vec::new())
    }

    /// A permit for `bytes`, if that much is free.
    pub(crate) fn of(send_memory: &Arc<Semaphore>, bytes: usize) -> Option<Self> {
        let bytes = u32::try_from(bytes).ok()?;
        Some(Self(vec![Arc::clone(send_memory).try_acquire_many_owned(bytes).ok()?]))
    }
}

impl SendMemory {
    /// The limit of a server, for [`SendMemory::of_connection`].
    pub(crate) fn of_server() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(PIECES_BYTES))
    }

    pub(crate) fn of_connection(server: &Arc<Semaphore>) -> Self {
        Self { server: Arc::clone(server), own: Arc::new(Semaphore::new(CONNECTION_PIECES_BYTES)) }
    }

    pub(crate) fn of_answer(&self) -> AnswerMemory {
        AnswerMemory { connection: self.clone(), small: Arc::new(Semaphore::new(1)) }
    }
}

impl AnswerMemory {
    /// Takes memory for a piece of `len` bytes or, after the previous small piece is sent, for a smaller one.
    /// Returns the length.
    pub(crate) async fn take(&self, len: usize) -> (usize, SendMemoryPermit) {
        if let Some(held) = self.try_take(len) {
            return (len, held);
        }
        // The semaphore is never closed.
        let small = Arc::clone(&self.small).acquire_owned().await;
        (len.min(SMALL_PIECE_BYTES), SendMemoryPermit(small.into_iter().collect()))
    }

    fn try_take(&self, len: usize) -> Option<SendMemoryPermit> {
        let bytes = u32::try_from(len).ok()?;
        let of = |send_memory: &Arc<Semaphore>| Arc::clone(send_memory).try_acquire_many_owned(bytes).ok();
        Some(SendMemoryPermit(vec![of(&self.connection.own)?, of(&self.connection.server)?]))
    }
}
