//! Releases pins of versions, without waiting for a store that does not answer. A pin ([`Pin`]) keeps a version from being removed while
//! a disk, a reader or a seal uses it; releasing it writes to the store. Used by [`super::disks`] when a disk closes.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use headwater_store::Pin;

/// How long the end of a disk waits for the release of its version.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
/// The wait of a caller that is in a hurry: long enough for a store that answers.
const RELEASE_TIMEOUT_SHORT: Duration = Duration::from_millis(100);

/// A pin that is released with [`release`] when its last owner drops it: a failed open, an external reader, or
/// a seal.
pub struct Released {
    pin: Option<Pin>,
    within: Duration,
}

impl Released {
    /// Wraps a pin.
    pub fn new(pin: Pin) -> Self {
        Self { pin: Some(pin), within: RELEASE_TIMEOUT }
    }

    /// Like [`Released::new`], for a pin that a thread may drop on which others wait.
    pub fn soon(pin: Pin) -> Self {
        Self { pin: Some(pin), within: RELEASE_TIMEOUT_SHORT }
    }
}

impl Drop for Released {
    fn drop(&mut self) {
        if let Some(pin) = self.pin.take() {
            release_within(pin, self.within);
        }
    }
}

/// Drops the owner of a version on a new thread, and waits for that for a while, so that the version is usually free
/// afterwards. If the store does not answer, neither a machine's stop nor the daemon's end waits for it (the runtime
/// waits only for its own threads).
pub fn release(held: impl Send + 'static) {
    release_within(held, RELEASE_TIMEOUT);
}

fn release_within(held: impl Send + 'static, within: Duration) {
    let (releasing, released) = mpsc::channel::<()>();
    let run = move || {
        drop(held);
        drop(releasing);
    };
    match std::thread::Builder::new().name("release".into()).spawn(run) {
        Ok(_) if released.recv_timeout(within) == Err(RecvTimeoutError::Timeout) => {
            tracing::warn!("a disk is closed, but its store has not released the version yet");
        }
        Ok(_) => {}
        // If no thread could be started, it was dropped here.
        Err(e) => tracing::error!("cannot start the thread that releases a version: {e}"),
    }
}
