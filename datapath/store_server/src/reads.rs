//! Room for what blocks on the store. A store that is gone must not take all threads that the process has for blocking.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most that blocks on the store at a time; more wait.
pub const READS_MAX: usize = 64;
/// How long a request waits for its turn before it is refused.
pub const READ_WAIT: Duration = Duration::from_secs(3);

/// Room for what blocks on the store. Who waits for it takes no thread, and leaves the line when its client goes.
#[derive(Clone)]
pub(crate) struct Reads {
    send_memory: Arc<Semaphore>,
    wait: Duration,
}

/// Held as long as the thread is, and not only as long as somebody waits for what it does.
pub(crate) type ReadPermit = OwnedSemaphorePermit;

impl Reads {
    pub(crate) fn new(most: usize, wait: Duration) -> Self {
        Self { send_memory: Arc::new(Semaphore::new(most)), wait }
    }

    /// A place, or `None` when there is none for too long.
    pub(crate) async fn place_soon(&self) -> Option<ReadPermit> {
        tokio::time::timeout(self.wait, self.place()).await.ok().flatten()
    }

    /// A place, however long it takes. The room is never closed.
    pub(crate) async fn place(&self) -> Option<ReadPermit> {
        Arc::clone(&self.send_memory).acquire_owned().await.ok()
    }
}
