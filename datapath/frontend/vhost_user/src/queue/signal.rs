//! What a queue tells the front-end by: a counter (`eventfd`) of its own.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;

/// The call or the error descriptor of a queue. That a write to it would wait is the front-end's choice, whose description it is: one that
/// waits on it itself would no longer do so if that were changed here. One that changes it later holds up its own disk, until
/// it takes its interrupts or this process ends.
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

    /// Counts one more, or nothing where that would wait: a counter at its limit is one that nobody looked at yet.
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
