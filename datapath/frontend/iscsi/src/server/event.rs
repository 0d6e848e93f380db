//! Where completions from other threads wait for the session's thread.
//!
//! | session's thread | a completion does |
//! |---|---|
//! | running | puts its event on the list |
//! | about to sleep or asleep (`asleep` set) | the same, clears `asleep`, writes to the eventfd |
//!
//! The thread sets `asleep` before it looks at `filled` for the last time, and a completion sets `filled` before it looks at
//! `asleep`; both sequentially consistent, so one of them sees the other and no wake-up is lost.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use headwater_scsi::{FunctionResult, Outcome};
use parking_lot::Mutex;
use rustix::event::EventfdFlags;

/// What happened.
#[derive(Debug)]
pub(super) enum Event {
    /// A task ended.
    Task {
        /// Its initiator task tag.
        tag: u32,
        /// Its serial number in the session.
        serial: u64,
        /// How.
        outcome: Outcome,
    },
    /// A task management function ended.
    Managed {
        /// The serial number of the function.
        serial: u64,
        /// How.
        result: FunctionResult,
    },
}

pub(super) struct Outbox {
    events: Mutex<Vec<Event>>,
    filled: AtomicBool,
    asleep: AtomicBool,
    eventfd: OwnedFd,
}

impl Outbox {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            events: Mutex::default(),
            filled: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            eventfd: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Posts an event; called on any thread.
    pub(super) fn post(&self, event: Event) {
        self.events.lock().push(event);
        self.filled.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            // It cannot fail: the counter is far from full.
            let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
        }
    }

    /// Moves all events to `into`, which is empty. Costs one load when there are none.
    pub(super) fn take(&self, into: &mut Vec<Event>) {
        if self.filled.load(Ordering::SeqCst) {
            self.filled.store(false, Ordering::SeqCst);
            std::mem::swap(&mut *self.events.lock(), into);
        }
    }

    /// Announces sleep. `false`: there are events, do not sleep.
    pub(super) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.filled.load(Ordering::SeqCst) {
            self.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Ends sleep. The eventfd is read whenever it is seen, since a completion that found the thread asleep may write it late,
    /// after the thread was woken by its socket.
    pub(super) fn wake_up(&self, event_seen: bool) {
        self.asleep.store(false, Ordering::SeqCst);
        if event_seen {
            let _ = rustix::io::read(&self.eventfd, &mut [0_u8; 8]);
        }
    }

    pub(super) fn eventfd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}
