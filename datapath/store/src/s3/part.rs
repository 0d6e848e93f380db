//! Parts of objects that are on their way, whether or not a thread waits for them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use crate::error::{StoreError, StoreErrorKind};
use crate::s3::bucket::Bucket;

/// Parts of one bucket that may be on their way for reads that can wait without a thread: as many as threads fetch, so that a slow
/// line is not shared by more than can come in the time that a request has.
const UNDER_WAY_MAX: usize = 8;
/// Of which so many may be parts that nobody waits for yet.
const AHEAD_MAX: usize = 6;
/// So long a thread waits for a part: most are here by then, and whoever waits without a thread looks only now and then.
const THREAD_WAITS: Duration = Duration::from_secs(1);
/// The same while parts of the bucket take longer.
const THREAD_WAITS_LATE: Duration = Duration::from_millis(50);

/// The parts of one bucket.
pub(super) struct Parts {
    room: Arc<Semaphore>,
    room_ahead: Arc<Semaphore>,
    /// Whether the last part that was heard of took longer than [`THREAD_WAITS`].
    are_late: AtomicBool,
}

impl Default for Parts {
    fn default() -> Self {
        let room = |parts| Arc::new(Semaphore::new(parts));
        Self { room: room(UNDER_WAY_MAX), room_ahead: room(AHEAD_MAX), are_late: AtomicBool::new(false) }
    }
}

impl Parts {
    /// Whether one more part can be asked for.
    pub(super) fn has_room(&self, is_ahead: bool) -> bool {
        let has_room = |room: &Semaphore| room.available_permits() > 0;
        has_room(&self.room) && (!is_ahead || has_room(&self.room_ahead))
    }
}

/// A part that was asked for. Dropping it gives it up.
pub(super) struct Part {
    parts: Arc<Parts>,
    began: Instant,
    outcome: mpsc::Receiver<Result<Bytes, StoreError>>,
    /// Whether there is an outcome, or never will be one.
    is_over: Arc<AtomicBool>,
    work: AbortHandle,
    _room: OwnedSemaphorePermit,
    _room_ahead: Option<OwnedSemaphorePermit>,
}

/// Says that it is over, also where the work panics or is aborted.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Part {
    /// Asks for it. `None`: too many are on their way.
    pub(super) fn ask(bucket: &Bucket, key: &str, offset: u64, len: usize, is_ahead: bool) -> Option<Self> {
        let parts = Arc::clone(bucket.parts());
        let take = |room: &Arc<Semaphore>| Arc::clone(room).try_acquire_owned().ok();
        let room_ahead = if is_ahead { Some(take(&parts.room_ahead)?) } else { None };
        let room = take(&parts.room)?;
        let (done, outcome) = mpsc::sync_channel(1);
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Over(Arc::clone(&is_over));
        let asked = bucket.clone().get_range_later(key.to_owned(), offset, len);
        let work = bucket.spawn(async move {
            // Dropped after the outcome is there.
            let _over = over;
            let _ = done.send(asked.await);
        });
        let began = Instant::now();
        Some(Self { parts, began, outcome, is_over, work, _room: room, _room_ahead: room_ahead })
    }

    /// Waits for it, not for long. `Err`: it is still on its way.
    pub(super) fn wait(self) -> Result<Result<Bytes, StoreError>, Self> {
        let are_late = self.parts.are_late.load(Ordering::Relaxed);
        let outcome = match self.outcome.recv_timeout(if are_late { THREAD_WAITS_LATE } else { THREAD_WAITS })
        {
            Ok(outcome) => outcome,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                self.parts.are_late.store(true, Ordering::Relaxed);
                return Err(self);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(StoreError::new(StoreErrorKind::Io, "a read of a bucket was given up"))
            }
        };
        self.parts.are_late.store(self.began.elapsed() >= THREAD_WAITS, Ordering::Relaxed);
        Ok(outcome)
    }

    /// Says whether it is over, for who does not wait.
    pub(super) fn is_over(&self) -> impl Fn() -> bool + Send + Sync + use<> {
        let is_over = Arc::clone(&self.is_over);
        move || is_over.load(Ordering::Acquire)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.work.abort();
    }
}
