//! One queue: its rings, and the thread that serves them.
//!
//! - `rings`: the rings in guest memory. `chain`: the descriptors of one request. `request`: their meaning.
//! - `thread`: the loop. `serve`: one request. `together`: several writes. `transfer`: the data of reads and
//!   writes. `job`: requests that wait.
//! - `marks`: requests in flight, for the next server. `post`: messages from other threads. `signal`:
//!   notifications to the front-end.

pub(crate) mod chain;
mod job;
pub(crate) mod marks;
mod post;
pub(crate) mod request;
pub(crate) mod rings;
mod serve;
mod signal;
mod thread;
mod together;
mod transfer;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use crate::disk::{Disk, RingState, RunningQueue};
use crate::fault::RingFault;
use crate::memory::GuestMemory;
use crate::positions::ResumePositionFault;
use marks::{Marks, Region, RegionFault};
use post::{Post, PostBox};
use rings::Rings;
pub(crate) use rings::{QUEUE_SIZE, RingAddresses};
pub(crate) use signal::Signal;

/// Everything needed to start a queue.
pub(crate) struct Setup {
    pub(crate) disk: Arc<Disk>,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) number: usize,
    pub(crate) entries: u16,
    pub(crate) addresses: RingAddresses,
    /// The first available entry to take, according to the front-end.
    pub(crate) base: u16,
    pub(crate) event_idx: bool,
    pub(crate) indirect: bool,
    pub(crate) kick: OwnedFd,
    pub(crate) call: Option<Signal>,
    pub(crate) error: Option<Signal>,
    /// The region in which requests in flight are marked.
    pub(crate) region: Option<Arc<Region>>,
}

/// Why a queue does not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Rings(#[from] RingFault),
    #[error(transparent)]
    Region(#[from] RegionFault),
    #[error(transparent)]
    ResumePosition(#[from] ResumePositionFault),
    #[error("cannot start its thread: {0}")]
    System(#[from] std::io::Error),
}

/// How often a wait for a queue's thread checks whether to give up.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// A queue that is being served.
pub(crate) struct Queue {
    posts: Arc<PostBox>,
    ended: Receiver<Option<u16>>,
}

/// How a queue ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// All requests that it took are answered or back in the ring; the next available entry.
    At(u16),
    /// The device was closed before all was answered.
    Unanswered,
    /// The wait was given up; the queue ends by itself.
    GivenUp,
}

impl Queue {
    /// Starts the thread.
    pub(crate) fn start(mut setup: Setup) -> Result<Self, StartError> {
        let (rings, marked) = begin(&mut setup)?;
        // The position is unknown until the queue ends.
        setup.disk.ended(setup.number, None);
        let (disk, number) = (Arc::clone(&setup.disk), setup.number);
        let posts = Arc::new(PostBox::new()?);
        let (end, ended) = sync_channel(1);
        let name = format!("vhost-queue-{}", setup.number);
        let builder = std::thread::Builder::new().name(name).stack_size(256 << 10);
        let running = RunningQueue::new(&disk);
        builder.spawn({
            let posts = Arc::clone(&posts);
            move || {
                let position = thread::QueueThread::new(setup, rings, posts, marked).run();
                // In this order: a caller that finds no running queue finds all final positions.
                disk.ended(number, position);
                drop(running);
                // Nobody receives it if the wait was given up.
                let _ = end.send(position);
            }
        })?;
        Ok(Self { posts, ended })
    }

    /// Changes the descriptor for interrupts.
    pub(crate) fn set_call(&self, call: Option<Signal>) {
        self.posts.post(Post::Call(call));
    }

    /// Changes the descriptor for faults.
    pub(crate) fn set_error(&self, error: Option<Signal>) {
        self.posts.post(Post::Error(error));
    }

    /// Replaces the machine's memory; returns when new requests use it.
    pub(crate) fn set_memory(&self, memory: Arc<GuestMemory>, give_up: &dyn Fn() -> bool) {
        let (done, seen) = sync_channel(1);
        self.posts.post(Post::Memory(memory, done));
        wait(&seen, give_up);
    }

    /// Tells the thread to end; [`Queue::wait_end`] waits for that.
    pub(crate) fn stop(&self) {
        self.posts.post(Post::Stop);
    }

    /// Waits until the device has no more requests, or waiting is given up.
    pub(crate) fn wait_end(self, give_up: &dyn Fn() -> bool) -> End {
        match wait(&self.ended, give_up) {
            Some(Some(position)) => End::At(position),
            Some(None) => End::Unanswered,
            None => End::GivenUp,
        }
    }
}

/// The marks of a queue, and the requests that the previous server took and did not answer.
type Marked = (Option<Marks>, Vec<u16>);

/// Finds the rings and the position at which the queue starts.
fn begin(setup: &mut Setup) -> Result<(Rings, Marked), StartError> {
    let rings = Rings::new(&setup.memory, setup.entries, setup.addresses, setup.event_idx)?;
    let used = rings.used_index();
    let mut marks = match &setup.region {
        Some(region) => {
            let is_reset = setup.base == 0 && used == 0;
            region.queue(setup.number, setup.entries, used, is_reset)?
        }
        None => None,
    };
    let again = marks.as_mut().map(Marks::taken).unwrap_or_default();
    let taken = u16::try_from(again.len()).unwrap_or(u16::MAX);
    let is_known = marks.as_ref().is_some_and(|marks| !marks.is_new);
    let ring = RingState { base: setup.base, used, marked: is_known.then_some(taken) };
    setup.base = setup.disk.start_of(setup.number, ring, || rings.is_full_of_answers())?;
    Ok((rings, (marks, again)))
}

fn wait<T>(receiver: &Receiver<T>, give_up: &dyn Fn() -> bool) -> Option<T> {
    loop {
        match receiver.recv_timeout(CHECK_EVERY) {
            Ok(value) => return Some(value),
            Err(RecvTimeoutError::Timeout) if !give_up() => {}
            Err(_) => return None,
        }
    }
}
