//! The progress of a long operation, such as an import or a verification, and the switch with which its
//! caller cancels it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{ImageError, ImageErrorKind};

/// The progress of a long operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the image that were processed; holes count as soon as they are skipped. Some operations add
    /// more: an import counts the bytes of its data object if that is sent after the image was read, and a
    /// verification counts those of data objects that it then reads as a whole.
    pub done_bytes: u64,
    /// The total for `done_bytes`: bytes of the image, plus those of the data object after it starts to be
    /// sent, or of the data objects that a verification reads as a whole.
    pub total_bytes: u64,
}

/// Cancels a long operation from another thread or a signal handler. Clones share one switch.
#[derive(Clone, Default)]
pub struct Cancel {
    switch: Arc<AtomicBool>,
    also: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

impl std::fmt::Debug for Cancel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cancel({})", self.is_cancelled())
    }
}

impl Cancel {
    /// A switch that is off.
    pub fn new() -> Self {
        Self::default()
    }

    /// A switch that is also on once `cancelled` returns true. `cancelled` is called at each step of the
    /// operation, even if there is no progress to report.
    pub fn when(cancelled: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { switch: Arc::default(), also: Some(Arc::new(cancelled)) }
    }

    /// Cancels the operation at its next step. It then fails with [`ImageErrorKind::Cancelled`] and leaves
    /// nothing behind.
    pub fn cancel(&self) {
        self.switch.store(true, Ordering::Relaxed);
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.switch.load(Ordering::Relaxed) || self.also.as_ref().is_some_and(|also| also())
    }

    pub(crate) fn check(&self, what: &str) -> Result<(), ImageError> {
        if self.is_cancelled() {
            return Err(ImageError::new(ImageErrorKind::Cancelled, format!("{what} was cancelled")));
        }
        Ok(())
    }
}
