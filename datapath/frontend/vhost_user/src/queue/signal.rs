//! The notification of the front-end by a queue: a counter (`eventfd`).

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;

/// The call or the error descriptor of a queue. Whether a write to it may block is the front-end's choice,
/// because it owns the file description. If this program made it non-blocking, a front-end that itself waits
/// on it would no longer block. A front-end that makes it blocking later delays only its own disk, until it
/// takes its interrupts or this process ends.
#[derive(Debug)]
pub(crate) struct Signal {
    counter: OwnedFd,
    may_wait: bool,
}

impl Signal {
    pub(crate) fn new(counter: File) -> Self {
        let may_wait = !rustix::fs::fcntl_getfl(&counter).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
        Self { counter: counter.into(), may_wait }
    }

    pub(crate) fn try_clone(&self) -> std::io::Result<Self> {
        Ok(Self { counter: self.counter.try_clone()?, may_wait: self.may_wait })
    }

    /// Adds one to the counter; does nothing if that would block. A counter at its limit has not been read
    /// yet, so the front-end is notified anyway.
    pub(crate) fn send(&self) {
        if !self.may_wait || self.is_writable() {
            let _ = rustix::io::write(&self.counter, &1_u64.to_ne_bytes());
        }
    }

    fn is_writable(&self) -> bool {
        let mut fds = [PollFd::new(&self.counter, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }
}
