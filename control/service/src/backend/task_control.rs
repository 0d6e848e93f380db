//! The connection between a long operation and its task: progress in one direction, cancellation in the other.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use headwater_api::Progress;
use tokio::sync::Notify;

/// Shared between a long operation and the task that watches it.
///
/// The operation calls [`TaskControl::report`] and asks [`TaskControl::is_cancelled`] at least every few
/// mebibytes; when cancelled it cleans up and returns an error of kind `Cancelled`.
#[derive(Debug, Default)]
pub struct TaskControl {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    /// The present step, if the bytes do not show it.
    doing: Mutex<Option<String>>,
    begun: AtomicBool,
    cancelled: AtomicBool,
    /// Wakes [`TaskControl::cancelled`].
    cancelling: Notify,
    stopping: Arc<AtomicBool>,
}

impl TaskControl {
    /// A control that is also cancelled when `stopping` is set, which the daemon does when it ends.
    pub fn new(stopping: Arc<AtomicBool>) -> Self {
        Self { stopping, ..Self::default() }
    }

    /// Marks the operation as begun.
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// Whether the operation has begun.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Reports the progress in bytes.
    pub fn report(&self, done_bytes: u64, total_bytes: u64) {
        // The two are read together for people only; a mix of two reports does no harm.
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
        self.done_bytes.store(done_bytes, Ordering::Relaxed);
        *self.doing() = None;
    }

    /// Reports the present step in words, for the time in which the bytes do not change. The next report of bytes replaces
    /// it.
    pub fn report_doing(&self, doing: String) {
        *self.doing() = Some(doing);
    }

    fn doing(&self) -> MutexGuard<'_, Option<String>> {
        // No statement leaves the value inconsistent, so a poisoned lock is harmless.
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the operation should stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.stopping.load(Ordering::Relaxed)
    }

    /// Whether a user has cancelled the operation. The daemon's end does not count.
    pub(crate) fn is_asked_to_stop(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Cancels the operation.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        // A caller that begins to wait after this is woken too.
        self.cancelling.notify_one();
    }

    /// Waits until a user cancels the operation. The daemon's end does not wake it. Only one caller may wait at a time.
    pub(crate) async fn cancelled(&self) {
        while !self.cancelled.load(Ordering::Relaxed) {
            self.cancelling.notified().await;
        }
    }

    /// The last reported progress.
    pub fn progress(&self) -> Progress {
        Progress {
            done_bytes: self.done_bytes.load(Ordering::Relaxed),
            total_bytes: self.total_bytes.load(Ordering::Relaxed),
            doing: self.doing().clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_without_bytes_is_told_until_bytes_are() {
        let control = TaskControl::default();
        control.report(5, 9);
        control.report_doing("repairing: 1 of 2 places".to_owned());
        let doing = Some("repairing: 1 of 2 places".to_owned());
        assert_eq!(control.progress(), Progress { done_bytes: 5, total_bytes: 9, doing });
        control.report(6, 9);
        assert_eq!(control.progress(), Progress { done_bytes: 6, total_bytes: 9, doing: None });
    }
}
