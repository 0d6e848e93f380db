//! What other threads tell a queue's thread: answers of the device, and orders of the control thread.
//!
//! | queue's thread | a post does |
//! |---|---|
//! | awake | puts itself on the list |
//! | going to sleep or asleep (`asleep` set) | the same, clears `asleep`, writes to the eventfd |
//!
//! Both flags are sequentially consistent: the thread sets `asleep` and then looks at `filled`, a post sets `filled`
//! and then looks at `asleep`, so at least one of them sees the other, and no wake-up is lost.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;

use headwater_block::Outcome;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;

use super::job::Job;
use crate::memory::GuestMemory;

/// Something for a queue's thread.
pub(crate) enum Post {
    /// The device has answered.
    Answer(Job, Outcome),
    /// The machine's memory is another one now; acknowledged when the old one is not used for new requests.
    Memory(Arc<GuestMemory>, SyncSender<()>),
    /// Interrupt here from now on, or never.
    Call(Option<OwnedFd>),
    /// Tell broken rings here.
    Error(Option<OwnedFd>),
    /// Take no more requests, and end when those taken are answered.
    Stop,
}

/// The list, and how its reader is woken.
pub(crate) struct PostBox {
    posts: Mutex<Vec<Post>>,
    filled: AtomicBool,
    asleep: AtomicBool,
    event: OwnedFd,
}

impl PostBox {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            posts: Mutex::default(),
            filled: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Posts; on any thread.
    pub(crate) fn post(&self, post: Post) {
        self.posts.lock().push(post);
        self.filled.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            // Cannot fail: the counter is far from its limit.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Whether there is something.
    pub(crate) fn is_filled(&self) -> bool {
        self.filled.load(Ordering::SeqCst)
    }

    /// Moves all posts to `into`, which is empty.
    pub(crate) fn take(&self, into: &mut Vec<Post>) {
        self.filled.store(false, Ordering::SeqCst);
        std::mem::swap(&mut *self.posts.lock(), into);
    }

    /// Announces sleep. `false`: something was posted, stay awake.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.is_filled() {
            self.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Ends sleep. A post that found the thread asleep may write the event late, when a kick had woken it;
    /// then the next sleep ends at once, and takes the event back.
    pub(crate) fn wake_up(&self, event_seen: bool) {
        self.asleep.store(false, Ordering::SeqCst);
        if event_seen {
            let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        }
    }

    /// Readable when a sleeping thread must wake up.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
