//! How a long operation says how far it is, and learns that it should stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use headwater_api::Progress;

/// Shared between a long operation and whoever watches it.
///
/// The operation calls [`JobControl::report`] and asks [`JobControl::is_cancelled`] at least every few
/// mebibytes; when cancelled it cleans up and returns an error of kind `Cancelled`.
#[derive(Debug, Default)]
pub struct JobControl {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    begun: AtomicBool,
    cancelled: AtomicBool,
    stopping: Arc<AtomicBool>,
}

impl JobControl {
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
    }

    /// Whether the operation should stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.stopping.load(Ordering::Relaxed)
    }

    /// Asks the operation to stop.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        Progress {
            done_bytes: self.done_bytes.load(Ordering::Relaxed),
            total_bytes: self.total_bytes.load(Ordering::Relaxed),
        }
    }
}
