//! Where what other threads have for a thread waits for it: answers of a device, events, orders.
//!
//! | the thread | who posts does |
//! |---|---|
//! | awake | puts its item on the list |
//! | about to sleep or asleep (`asleep` set) | the same, clears `asleep`, writes to the eventfd |
//!
//! The thread sets `asleep` before it looks at `filled` for the last time, and who posts sets `filled` before it looks at
//! `asleep`; both sequentially consistent, so one of them sees the other and no wake-up is lost.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::EventfdFlags;

/// Items for one thread, from any.
pub struct Inbox<T> {
    items: Mutex<Vec<T>>,
    filled: AtomicBool,
    asleep: AtomicBool,
    event: OwnedFd,
}

impl<T> Inbox<T> {
    /// An empty one. Fails where the system gives no eventfd.
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
            // It cannot fail: the counter is far from full.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Whether there is something.
    pub fn is_filled(&self) -> bool {
        self.filled.load(Ordering::SeqCst)
    }

    /// Moves all items to `into`, which is empty. Costs one load when there are none.
    pub fn take(&self, into: &mut Vec<T>) {
        if self.is_filled() {
            self.filled.store(false, Ordering::SeqCst);
            std::mem::swap(&mut *self.items.lock(), into);
        }
    }

    /// Announces sleep. `false`: there is something, do not sleep.
    pub fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.is_filled() {
            self.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Ends sleep. The event is taken back whenever it is seen, since who found the thread asleep may write it late, after
    /// something else had woken it; then the next sleep ends at once.
    pub fn wake_up(&self, event_seen: bool) {
        self.asleep.store(false, Ordering::SeqCst);
        if event_seen {
            let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        }
    }

    /// Readable when a sleeping thread must wake up.
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
