//! How far a long operation is, and how to stop it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{ImageError, ImageErrorKind};

/// How far a long operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the image dealt with; holes count as soon as they are passed.
    pub done_bytes: u64,
    /// Bytes of the image.
    pub total_bytes: u64,
}

/// Stops a long operation from another thread or a signal handler. Clones are one switch.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A switch that is off.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stops the operation at its next step. It then fails with [`ImageErrorKind::Cancelled`] and leaves
    /// nothing behind.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was stopped.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn check(&self, what: &str) -> Result<(), ImageError> {
        if self.is_cancelled() {
            return Err(ImageError::new(ImageErrorKind::Cancelled, format!("{what} was cancelled")));
        }
        Ok(())
    }
}
