//! Letting go of versions in a store that perhaps does not answer.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use headwater_store::Pin;

/// How long the end of a disk waits until its version is let go of.
const RELEASED_WITHIN: Duration = Duration::from_secs(5);

/// A pin that is given back by [`release`], whoever is the last to hold it: a disk that could not be opened, a reader
/// outside, who makes a version.
pub struct Released(Option<Pin>);

impl Released {
    /// Holds a pin.
    pub fn new(pin: Pin) -> Self {
        Self(Some(pin))
    }
}

impl Drop for Released {
    fn drop(&mut self) {
        if let Some(pin) = self.0.take() {
            release(pin);
        }
    }
}

/// Drops what holds a version, on a thread of its own, and waits for that a while: who comes next finds the version free.
/// A store that does not answer keeps neither a machine's stop nor the daemon's end: the runtime waits for its own threads.
pub fn release(held: impl Send + 'static) {
    let (releasing, released) = mpsc::channel::<()>();
    let run = move || {
        drop(held);
        drop(releasing);
    };
    match std::thread::Builder::new().name("release".into()).spawn(run) {
        Ok(_) if released.recv_timeout(RELEASED_WITHIN) == Err(RecvTimeoutError::Timeout) => {
            tracing::warn!("a disk is closed, and its store takes its time to let go of the version");
        }
        Ok(_) => {}
        // What could not be moved there was dropped here.
        Err(e) => tracing::error!("cannot start a thread that lets go of a version: {e}"),
    }
}
