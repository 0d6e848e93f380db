//! How a long operation says how far it is, and learns that it should stop.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use headwater_api::Progress;
use tokio::sync::Notify;

/// Shared between a long operation and whoever watches it.
///
/// The operation calls [`TaskControl::report`] and asks [`TaskControl::is_cancelled`] at least every few
/// mebibytes; when cancelled it cleans up and returns an error of kind `Cancelled`.
#[derive(Debug, Default)]
pub struct TaskControl {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    /// What it does that the bytes do not say.
    doing: Mutex<Option<String>>,
    begun: AtomicBool,
    cancelled: AtomicBool,
    /// Wakes who waits for that.
    cancelling: Notify,
    stopping: Arc<AtomicBool>,
}

impl TaskControl {
    /// A control that is also cancelled by `stopping`, the daemon's flag.
    pub fn new(stopping: Arc<AtomicBool>) -> Self {
        Self { stopping, ..Self::default() }
    }

    /// It was its turn.
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// Whether it was its turn already.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Says how far the operation is.
    pub fn report(&self, done_bytes: u64, total_bytes: u64) {
        // The two are read together for people only; a mix of two reports does no harm.
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
        self.done_bytes.store(done_bytes, Ordering::Relaxed);
        *self.doing() = None;
    }

    /// Says what the operation does while the bytes stay what they are, and how far that is; until the next report of bytes.
    pub fn report_doing(&self, doing: String) {
        *self.doing() = Some(doing);
    }

    fn doing(&self) -> MutexGuard<'_, Option<String>> {
        // It is whole between any two statements.
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the operation should stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.stopping.load(Ordering::Relaxed)
    }

    /// Whether somebody asked the operation to stop: the daemon's end does not count.
    pub(crate) fn is_asked_to_stop(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Asks the operation to stop.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        // Somebody who begins to wait after that is woken too.
        self.cancelling.notify_one();
    }

    /// Waits until somebody asks the operation to stop. The daemon's end does not wake it. One at a time may wait.
    pub(crate) async fn cancelled(&self) {
        while !self.cancelled.load(Ordering::Relaxed) {
            self.cancelling.notified().await;
        }
    }

    /// How far it is.
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
