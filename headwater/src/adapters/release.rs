//! Letting go of versions in a store that perhaps does not answer.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use headwater_store::Pin;

/// How long the end of a disk waits until its version is let go of.
const RELEASED_WITHIN: Duration = Duration::from_secs(5);
/// The same of who has something else to do: long enough for a store that answers.
const RELEASED_SOON: Duration = Duration::from_millis(100);

/// A pin that is given back by [`release`], whoever is the last to hold it: a disk that could not be opened, a reader
/// outside, who makes a version.
pub struct Released {
    pin: Option<Pin>,
    within: Duration,
}

impl Released {
    /// Holds a pin.
    pub fn new(pin: Pin) -> Self {
        Self { pin: Some(pin), within: RELEASED_WITHIN }
    }

    /// The same where it may be let go of by a thread that others wait for.
    pub fn soon(pin: Pin) -> Self {
        Self { pin: Some(pin), within: RELEASED_SOON }
    }
}

impl Drop for Released {
    fn drop(&mut self) {
        if let Some(pin) = self.pin.take() {
            release_within(pin, self.within);
        }
    }
}

/// Drops what holds a version, on a thread of its own, and waits for that a while: who comes next finds the version free.
/// A store that does not answer keeps neither a machine's stop nor the daemon's end: the runtime waits for its own threads.
pub fn release(held: impl Send + 'static) {
    release_within(held, RELEASED_WITHIN);
}

fn release_within(held: impl Send + 'static, within: Duration) {
    let (releasing, released) = mpsc::channel::<()>();
    let run = move || {
        drop(held);
        drop(releasing);
    };
    match std::thread::Builder::new().name("release".into()).spawn(run) {
        Ok(_) if released.recv_timeout(within) == Err(RecvTimeoutError::Timeout) => {
            tracing::warn!("a disk is closed, and its store takes its time to let go of the version");
        }
        Ok(_) => {}
        // What could not be moved there was dropped here.
        Err(e) => tracing::error!("cannot start a thread that lets go of a version: {e}"),
    }
}
