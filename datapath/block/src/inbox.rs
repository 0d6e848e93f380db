//! A queue from any threads to one thread, for answers of a device, events and orders, with an eventfd to
//! wake the receiving thread.
//!
//! | the receiving thread is | a posting thread |
//! |---|---|
//! | awake | appends its item |
//! | asleep or about to sleep (`asleep` is set) | appends its item, clears `asleep`, writes to the eventfd |
//!
//! The receiving thread sets `asleep` before it reads `filled` for the last time, and a posting thread sets
//! `filled` before it reads `asleep`. Both are sequentially consistent, so at least one of the two threads
//! sees the other, and no wake-up is lost.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::EventfdFlags;

/// Items for one thread, from any threads.
pub struct Inbox<T> {
    items: Mutex<Vec<T>>,
    filled: AtomicBool,
    asleep: AtomicBool,
    event: OwnedFd,
}

impl<T> Inbox<T> {
    /// Creates an empty inbox. Fails if the system has no eventfd left.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            items: Mutex::new(Vec::new()),
            filled: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Posts an item; called on any thread.
    pub fn post(&self, item: T) {
        self.items.lock().push(item);
        self.nudge();
    }

    /// Wakes the thread, as an item would.
    pub fn nudge(&self) {
        self.filled.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            // The write cannot fail: the counter is far from full.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Whether there are items.
    pub fn is_filled(&self) -> bool {
        self.filled.load(Ordering::SeqCst)
    }

    /// Moves all items to `into`, which must be empty. Costs one atomic load if there are none.
    pub fn take(&self, into: &mut Vec<T>) {
        if self.is_filled() {
            self.filled.store(false, Ordering::SeqCst);
            std::mem::swap(&mut *self.items.lock(), into);
        }
    }

    /// Prepares to sleep. `false`: there are items, so do not sleep.
    pub fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.is_filled() {
            self.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Ends sleep. Resets the event whenever it was seen. A posting thread may write it late, after something
    /// else woke the thread; then the next sleep ends at once.
    pub fn wake_up(&self, event_seen: bool) {
        self.asleep.store(false, Ordering::SeqCst);
        if event_seen {
            let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        }
    }

    /// Readable if the sleeping thread must wake up.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags};
    use std::sync::Arc;

    /// A reader that sleeps whenever it may gets every item, from three writers.
    #[test]
    fn no_item_and_no_wake_up_is_lost() {
        const EACH: usize = 20_000;
        let inbox = Arc::new(Inbox::new().unwrap());
        let writers: Vec<_> = (0..3)
            .map(|writer| {
                let inbox = Arc::clone(&inbox);
                std::thread::spawn(move || (0..EACH).for_each(|number| inbox.post((writer, number))))
            })
            .collect();
        let (mut next, mut items) = ([0; 3], Vec::new());
        while next != [EACH; 3] {
            inbox.take(&mut items);
            for (writer, number) in items.drain(..) {
                assert_eq!(number, next[writer], "out of order");
                next[writer] += 1;
            }
            if inbox.fall_asleep() {
                let mut fds = [PollFd::from_borrowed_fd(inbox.event(), PollFlags::IN)];
                let woken = next == [EACH; 3] || rustix::event::poll(&mut fds, None).unwrap() == 1;
                inbox.wake_up(woken && fds[0].revents().contains(PollFlags::IN));
            }
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    }
}
