//! A per-thread io_uring for overflow reads. The thread reaps its own completions in its event loop
//! ([`CompletionQueue::take`]), so no completion thread is woken. Writes, and reads beyond [`DEPTH`], use the
//! shared ring in the parent module.
//!
//! With `DEFER_TASKRUN` the kernel posts completions only when the thread enters the kernel; `TASKRUN_FLAG`
//! lets the thread see that there are some. The ring's descriptor does not become readable for such deferred
//! work. So before the thread sleeps in `poll`, it enables an eventfd, and disables it on waking. The
//! submissions of one round of the thread go to the kernel in one system call.
//!
//! `unsafe` here: as in the shared ring, the kernel writes to buffers outside the compiler's view. They are
//! in boxed [`Flight`]s whose addresses are `user_data`; the ring is closed only when all of them were taken
//! back.
#![expect(unsafe_code, reason = "the kernel uses the buffers of submitted entries; see above")]

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use headwater_block::CompletionQueue;
use io_uring::{EnterFlags, IoUring};
use rustix::event::EventfdFlags;

use super::flight::{Flight, Landing};

/// The most reads of a thread in its own ring; further reads use the shared ring.
const DEPTH: u32 = 64;

thread_local! {
    /// The ring of this thread, while it keeps one.
    static OWN: RefCell<Option<Rc<OwnRing>>> = const { RefCell::new(None) };
}

struct OwnRing {
    ring: RefCell<IoUring>,
    in_flight: Cell<u32>,
    event: OwnedFd,
    /// Eventfd notification is enabled, so `event` may be readable.
    is_notifying: Cell<bool>,
}

/// Keeps the thread's ring open.
pub(super) struct OwnQueue {
    own: Rc<OwnRing>,
}

impl OwnQueue {
    /// Opens a ring for this thread. `None`: it has one already, or the kernel does not support this kind
    /// (before 6.1).
    pub(super) fn open() -> Option<Box<dyn CompletionQueue>> {
        OWN.with_borrow_mut(|place| {
            if place.is_some() {
                return None;
            }
            let own = match OwnRing::open() {
                Ok(own) => Rc::new(own),
                Err(error) => {
                    tracing::debug!(%error, "a thread has no ring of its own, so its reads use the shared ring");
                    return None;
                }
            };
            *place = Some(Rc::clone(&own));
            Some(Box::new(Self { own }) as Box<dyn CompletionQueue>)
        })
    }
}

/// Adds an operation to the ring of this thread. Returns it if there is no ring, or the ring is full.
pub(super) fn start(flight: Box<Flight>) -> Result<(), Box<Flight>> {
    match OWN.with_borrow(Option::clone) {
        Some(own) if own.in_flight.get() < DEPTH => own.push(flight),
        _ => Err(flight),
    }
}

impl OwnRing {
    fn open() -> io::Result<Self> {
        let mut builder = IoUring::builder();
        builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_cqsize(2 * DEPTH);
        let mut ring = builder.build(DEPTH)?;
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        ring.completion().disable_eventfd();
        Ok(Self { ring: RefCell::new(ring), in_flight: Cell::new(0), event, is_notifying: Cell::new(false) })
    }

    /// Whether the kernel has completions for this thread.
    fn is_answered(&self) -> bool {
        let mut ring = self.ring.borrow_mut();
        let left_for_us = ring.submission().taskrun();
        left_for_us || !ring.completion().is_empty()
    }

    /// Enables the eventfd: the kernel writes to it from now on.
    fn enable_eventfd(&self) {
        if !self.is_notifying.replace(true) {
            self.ring.borrow_mut().completion().enable_eventfd();
            // Either the kernel sees this store, or this thread sees the completions from before.
            fence(Ordering::SeqCst);
        }
        if self.is_answered() {
            // Cannot fail: the counter is far from its limit.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    fn disable_eventfd(&self) {
        if self.is_notifying.replace(false) {
            self.ring.borrow_mut().completion().disable_eventfd();
            let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        }
    }

    fn push(&self, mut flight: Box<Flight>) -> Result<(), Box<Flight>> {
        let entry = flight.entry(u32::MAX);
        let address = Box::into_raw(flight);
        let entry = entry.user_data(address.expose_provenance() as u64);
        // SAFETY: the entry's buffer and file live until its completion was seen (see `Flight`).
        if unsafe { self.ring.borrow_mut().submission().push(&entry) }.is_err() {
            // SAFETY: the kernel never saw the entry, so the box is still ours alone.
            return Err(unsafe { Box::from_raw(address) });
        }
        self.in_flight.set(self.in_flight.get() + 1);
        Ok(())
    }

    /// Submits the waiting entries and lets the kernel post completions; waits for `want` completions.
    fn enter(&self, want: u32) {
        let mut ring = self.ring.borrow_mut();
        let queue = ring.submission();
        let (waiting, answered) = (queue.len(), queue.taskrun() || queue.cq_overflow());
        drop(queue);
        if waiting == 0 && !answered && want == 0 {
            return;
        }
        // Always set, so that operations that end during the submission are posted, too.
        let flags = EnterFlags::GETEVENTS.bits();
        let waiting = u32::try_from(waiting).unwrap_or(u32::MAX);
        // SAFETY: the entries are valid (see `push`), and no argument is passed.
        let entered = unsafe { ring.submitter().enter::<libc::sigset_t>(waiting, want, flags, None) };
        if let Err(error) = entered {
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // Completions or the kernel's memory are in the way for a moment; the entries stay and are
                // submitted the next time.
                Some(libc::EBUSY | libc::EAGAIN) => std::thread::yield_now(),
                _ => {
                    tracing::error!(%error, "cannot start reads of the disk; trying again");
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
            }
        }
    }

    fn next(&self) -> Option<(u64, i32)> {
        let entry = self.ring.borrow_mut().completion().next()?;
        Some((entry.user_data(), entry.result()))
    }

    /// Calls the callbacks of completed operations. The ring is not borrowed meanwhile, because a callback
    /// may submit.
    fn call_back(&self) {
        while let Some((user_data, result)) = self.next() {
            #[expect(clippy::cast_possible_truncation, reason = "it was an address, and so fits in one")]
            let address = std::ptr::with_exposed_provenance_mut::<Flight>(user_data as usize);
            // SAFETY: the address came from `Box::into_raw` in `push`, and its one completion is here.
            let mut flight = unsafe { Box::from_raw(address) };
            self.in_flight.set(self.in_flight.get() - 1);
            match flight.landed(result) {
                Landing::Over(outcome) => flight.end(outcome),
                Landing::Again => {
                    if let Err(flight) = self.push(flight) {
                        flight.end(Err(io::Error::other("the disk queue is full")));
                    }
                }
            }
        }
    }
}

impl CompletionQueue for OwnQueue {
    fn take(&self) {
        self.own.disable_eventfd();
        while self.own.in_flight.get() > 0 {
            self.own.enter(0);
            self.own.call_back();
            // The callbacks may have submitted operations.
            if self.own.ring.borrow_mut().submission().is_empty() {
                return;
            }
        }
    }

    fn is_ready(&self) -> bool {
        self.own.in_flight.get() > 0 && self.own.is_answered()
    }

    fn ready(&self) -> BorrowedFd<'_> {
        if self.own.in_flight.get() > 0 {
            self.own.enable_eventfd();
        }
        self.own.event.as_fd()
    }
}

impl Drop for OwnQueue {
    fn drop(&mut self) {
        // Operations that callbacks submit from here on use the shared ring.
        OWN.with_borrow_mut(Option::take);
        while self.own.in_flight.get() > 0 {
            self.own.enter(1);
            self.own.call_back();
        }
    }
}
