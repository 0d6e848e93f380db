//! Collects the answers of submitted requests. A worker's thread reads its own completion queue, and sleeps until
//! either that queue or another thread has an answer.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};
use headwater_block::{Completion, CompletionQueue, Device, Outcome};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::Slot;

struct Arrived {
    answers: Mutex<VecDeque<(Slot, Outcome)>>,
    /// An eventfd, readable after another thread has added an answer.
    wake: OwnedFd,
    owner: std::thread::ThreadId,
}

/// Whether the worker sleeps if no answer has arrived.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    /// Does not sleep.
    No,
    /// Sleeps until an answer arrives.
    ForAnswer,
    /// Sleeps until an answer arrives, but no longer than until this time.
    Until(Instant),
}

/// The answers of one worker. It must stay on the thread that created it.
pub(super) struct Answers {
    arrived: Arc<Arrived>,
    /// `None`: the device has no completion queue, and completes requests on its own threads.
    queue: Option<Box<dyn CompletionQueue>>,
}

impl Answers {
    pub(super) fn new(device: &dyn Device) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .context("cannot make an event descriptor")?;
        let owner = std::thread::current().id();
        let arrived = Arc::new(Arrived { answers: Mutex::default(), wake, owner });
        Ok(Self { arrived, queue: device.completion_queue() })
    }

    /// The completion of a submitted request.
    pub(super) fn completion(&self, slot: Slot) -> Completion {
        let arrived = Arc::clone(&self.arrived);
        Completion::new(move |outcome| {
            arrived.answers.lock().unwrap_or_else(PoisonError::into_inner).push_back((slot, outcome));
            if std::thread::current().id() != arrived.owner {
                // This fails only if the counter is full; then the eventfd is readable anyway.
                let _ = rustix::io::write(&arrived.wake, &1_u64.to_ne_bytes());
            }
        })
    }

    /// Takes all answers that have arrived. Also submits the requests in the thread's queue.
    pub(super) fn take(&self, wait: Wait) -> Result<VecDeque<(Slot, Outcome)>> {
        loop {
            if let Some(queue) = &self.queue {
                queue.take();
            }
            let mut answers = self.arrived.answers.lock().unwrap_or_else(PoisonError::into_inner);
            let taken = std::mem::take(&mut *answers);
            drop(answers);
            let left = match wait {
                Wait::No => return Ok(taken),
                Wait::ForAnswer => None,
                Wait::Until(end) => Some(end.saturating_duration_since(Instant::now())),
            };
            if !taken.is_empty() || left.is_some_and(|left| left.is_zero()) {
                return Ok(taken);
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut waits = vec![PollFd::new(&self.arrived.wake, PollFlags::IN)];
            if let Some(queue) = &self.queue {
                waits.push(PollFd::from_borrowed_fd(queue.ready(), PollFlags::IN));
            }
            match poll(&mut waits, left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for answers"),
            }
            // Cleared before the list is read: an answer that is added after this wakes the thread again.
            let _ = rustix::io::read(self.arrived.wake.as_fd(), &mut [0_u8; 8]);
        }
    }
}
