//! Limits how many threads block on the store. A store that does not answer must not occupy all blocking
//! threads of the process.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most threads that block on the store; further requests wait.
pub const READS_MAX: usize = 64;
/// How long a request waits for a permit before it is refused.
pub const READ_WAIT: Duration = Duration::from_secs(3);

/// The permits for blocking on the store. A waiting request uses no thread, and leaves the queue when its
/// client disconnects.
#[derive(Clone)]
pub(crate) struct Reads {
    send_memory: Arc<Semaphore>,
    wait: Duration,
}

/// Held as long as the thread runs, even if no request waits for its result any more.
pub(crate) type ReadPermit = OwnedSemaphorePermit;

impl Reads {
    pub(crate) fn new(most: usize, wait: Duration) -> Self {
        Self { send_memory: Arc::new(Semaphore::new(most)), wait }
    }

    /// Returns a permit, or `None` if none is free within the limit of time.
    pub(crate) async fn permit_soon(&self) -> Option<ReadPermit> {
        tokio::time::timeout(self.wait, self.permit()).await.ok().flatten()
    }

    /// Returns a permit, however long it takes. The semaphore is never closed.
    pub(crate) async fn permit(&self) -> Option<ReadPermit> {
        Arc::clone(&self.send_memory).acquire_owned().await.ok()
    }
}
