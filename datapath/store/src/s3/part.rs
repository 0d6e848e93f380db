//! Reads ranges ("parts") of objects concurrently, with a limit for each purpose. A part that was requested
//! arrives whether or not a thread waits for it, unless its [`Part`] is dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use crate::error::{StoreError, StoreErrorKind};
use crate::s3::bucket::Bucket;
use crate::waiting::ReadFor;

/// The most parts of one bucket in progress for reads whose caller need not block ([`Part::is_over`]). It is the number of
/// fetching threads, so that a slow link is not shared by more parts than can arrive before their requests
/// time out.
const UNDER_WAY_MAX: usize = 8;
/// At most this many of them may be parts that no client waits for yet.
const AHEAD_MAX: usize = 6;
/// Parts of background copies, in addition to all of these.
const COPIED_MAX: usize = 2;
/// How long a thread waits for a part. Most parts arrive in that time, and a reader that waits without a
/// thread checks only from time to time.
const THREAD_WAITS: Duration = Duration::from_secs(1);
/// The same limit while parts of the bucket are slow.
const THREAD_WAITS_LATE: Duration = Duration::from_millis(50);

/// The parts of one bucket in progress.
pub(super) struct Parts {
    permits: Arc<Semaphore>,
    permits_ahead: Arc<Semaphore>,
    permits_copied: Arc<Semaphore>,
    /// Whether the last wait for a part timed out, or that part took [`THREAD_WAITS`] or longer.
    are_late: AtomicBool,
}

impl Default for Parts {
    fn default() -> Self {
        let permits = |parts| Arc::new(Semaphore::new(parts));
        Self {
            permits: permits(UNDER_WAY_MAX),
            permits_ahead: permits(AHEAD_MAX),
            permits_copied: permits(COPIED_MAX),
            are_late: AtomicBool::new(false),
        }
    }
}

impl Parts {
    /// Whether one more part can be requested.
    pub(super) fn has_permits(&self, read_for: ReadFor) -> bool {
        self.semaphores(read_for).into_iter().flatten().all(|semaphore| semaphore.available_permits() > 0)
    }

    /// The semaphores from which a part needs a permit.
    fn semaphores(&self, read_for: ReadFor) -> [Option<&Arc<Semaphore>>; 2] {
        match read_for {
            ReadFor::Now => [None, Some(&self.permits)],
            ReadFor::Later => [Some(&self.permits_ahead), Some(&self.permits)],
            ReadFor::Copy => [None, Some(&self.permits_copied)],
        }
    }
}

/// A part that was requested. Dropping it cancels the request.
pub(super) struct Part {
    parts: Arc<Parts>,
    began: Instant,
    outcome: mpsc::Receiver<Result<Bytes, StoreError>>,
    /// Whether there is an outcome, or never will be one.
    is_over: Arc<AtomicBool>,
    work: AbortHandle,
    read_for: ReadFor,
    _permits: Vec<OwnedSemaphorePermit>,
}

/// Sets the flag on drop, even if the task panics or is aborted.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Part {
    /// Requests a part. `None`: too many are in progress.
    pub(super) fn ask(
        bucket: &Bucket,
        key: &str,
        offset: u64,
        len: usize,
        read_for: ReadFor,
    ) -> Option<Self> {
        let parts = Arc::clone(bucket.range_reads());
        let take = |semaphore: &Arc<Semaphore>| Arc::clone(semaphore).try_acquire_owned().ok();
        let permits =
            parts.semaphores(read_for).into_iter().flatten().map(take).collect::<Option<Vec<_>>>()?;
        let (done, outcome) = mpsc::sync_channel(1);
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Over(Arc::clone(&is_over));
        let asked = bucket.clone().get_range_later(key.to_owned(), offset, len);
        let work = bucket.spawn(async move {
            // Dropped after the outcome is sent.
            let _over = over;
            let _ = done.send(asked.await);
        });
        let began = Instant::now();
        Some(Self { parts, began, outcome, is_over, work, read_for, _permits: permits })
    }

    /// Waits a short time for the part. `Err`: it is still in progress.
    pub(super) fn wait(self) -> Result<Result<Bytes, StoreError>, Self> {
        let are_late = self.parts.are_late.load(Ordering::Relaxed);
        let outcome = match self.outcome.recv_timeout(if are_late { THREAD_WAITS_LATE } else { THREAD_WAITS })
        {
            Ok(outcome) => outcome,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                self.note_late(true);
                return Err(self);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(StoreError::new(StoreErrorKind::Io, "a read of the bucket was cancelled"))
            }
        };
        self.note_late(self.began.elapsed() >= THREAD_WAITS);
        Ok(outcome)
    }

    /// Parts of background copies do not count: they wait for free capacity, so their time says nothing about
    /// other reads.
    fn note_late(&self, is_late: bool) {
        if self.read_for != ReadFor::Copy {
            self.parts.are_late.store(is_late, Ordering::Relaxed);
        }
    }

    /// Returns a check of whether the part is finished, for a reader that does not block.
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
