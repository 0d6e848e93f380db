//! How far a long operation is, and how to stop it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{ImageError, ImageErrorKind};

/// How far a long operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the image dealt with; holes count as soon as they are passed. Of an import that sends its data object once the image
    /// is dealt with, those that are sent too; of a verification that reads data objects as a whole then, those of these.
    pub done_bytes: u64,
    /// Bytes of the image, and from when it is sent on those of the data object; of a verification with those of data objects that it
    /// reads as a whole.
    pub total_bytes: u64,
}

/// Stops a long operation from another thread or a signal handler. Clones are one switch.
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

    /// A switch that is on, too, once `cancelled` says so. It is asked at each step of the operation: also where there is
    /// no progress to be told of.
    pub fn when(cancelled: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { switch: Arc::default(), also: Some(Arc::new(cancelled)) }
    }

    /// Stops the operation at its next step. It then fails with [`ImageErrorKind::Cancelled`] and leaves
    /// nothing behind.
    pub fn cancel(&self) {
        self.switch.store(true, Ordering::Relaxed);
    }

    /// Whether it was stopped.
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
