//! Where completions from other threads wait for the connection's thread.
//!
//! | connection's thread | a completion does |
//! |---|---|
//! | running | puts its answer on the list |
//! | about to sleep or asleep (`asleep` set) | the same, clears `asleep`, writes to the eventfd |
//!
//! The thread sets `asleep` before it looks at `filled` for the last time, and a completion sets `filled`
//! before it looks at `asleep`; both sequentially consistent, so one of them sees the other and no wake-up is lost.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use headwater_block::Outcome;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;

use crate::wire::reply::Answered;

/// What a completion needs to become a reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    pub(super) to: Answered,
    pub(super) command: u16,
    /// What the request counts in bytes in flight.
    pub(super) bytes: usize,
}

pub(super) struct Outbox {
    answers: Mutex<Vec<(Ticket, Outcome)>>,
    filled: AtomicBool,
    asleep: AtomicBool,
    event: OwnedFd,
}

impl Outbox {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            answers: Mutex::default(),
            filled: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Posts an answer; called on any thread.
    pub(super) fn post(&self, ticket: Ticket, outcome: Outcome) {
        self.answers.lock().push((ticket, outcome));
        self.filled.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            // It cannot fail: the counter is far from full.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Moves all answers to `into`, which is empty. Costs one load when there are none.
    pub(super) fn take(&self, into: &mut Vec<(Ticket, Outcome)>) {
        if self.filled.load(Ordering::SeqCst) {
            self.filled.store(false, Ordering::SeqCst);
            std::mem::swap(&mut *self.answers.lock(), into);
        }
    }

    /// Announces sleep. `false`: there are answers, do not sleep.
    pub(super) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.filled.load(Ordering::SeqCst) {
            self.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Ends sleep. The event is taken back whenever it is seen, since a completion that found the thread
    /// asleep may write it late, after the thread was woken by its socket.
    pub(super) fn wake_up(&self, event_seen: bool) {
        self.asleep.store(false, Ordering::SeqCst);
        if event_seen {
            let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        }
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
