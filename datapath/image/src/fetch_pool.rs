//! The threads that wait for files, so that nobody else has to.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};

use headwater_block::{IoError, IoErrorKind};
use parking_lot::{Condvar, Mutex};

/// Threads of the pool: how many reads of files are under way at a time.
pub const FETCH_THREADS: usize = 8;
/// Reads that wait for a thread. Whoever submits one more waits for room.
pub const FETCH_QUEUE_MAX: usize = 4096;

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// Set when the last handle is gone: the threads finish what is queued and end.
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    not_empty: Condvar,
    not_full: Condvar,
}

/// A small pool of threads for blocking reads, shared by all devices of the process. The threads end when
/// the last device that uses them is gone.
pub(crate) struct FetchPool(Arc<Shared>);

thread_local! {
    /// Whether this thread belongs to a pool. Such a one must not wait for room in the queue that it empties.
    static IN_POOL: Cell<bool> = const { Cell::new(false) };
}

/// The pool of the process, while there is one.
static POOL: Mutex<Weak<FetchPool>> = Mutex::new(Weak::new());

impl FetchPool {
    /// The pool of the process; started if need be.
    pub(crate) fn shared() -> Result<Arc<Self>, IoError> {
        let mut pool = POOL.lock();
        if let Some(pool) = pool.upgrade() {
            return Ok(pool);
        }
        let started = Arc::new(Self::start()?);
        *pool = Arc::downgrade(&started);
        Ok(started)
    }

    fn start() -> Result<Self, IoError> {
        // If a thread cannot be started, dropping this ends those that were.
        let pool = Self(Arc::default());
        for number in 0..FETCH_THREADS {
            let shared = Arc::clone(&pool.0);
            std::thread::Builder::new()
                .name(format!("fetch-{number}"))
                .spawn(move || shared.run())
                .map_err(|e| IoError::from_os("cannot start a thread that reads images", e))?;
        }
        Ok(pool)
    }

    /// Queues `task`; waits while [`FETCH_QUEUE_MAX`] are queued, unless called by a task.
    pub(crate) fn push(&self, task: impl FnOnce() + Send + 'static) {
        let mut queue = self.0.queue.lock();
        if !IN_POOL.get() {
            self.0.not_full.wait_while(&mut queue, |queue| queue.tasks.len() >= FETCH_QUEUE_MAX);
        }
        queue.tasks.push_back(Box::new(task));
        drop(queue);
        self.0.not_empty.notify_one();
    }
}

impl Drop for FetchPool {
    fn drop(&mut self) {
        self.0.queue.lock().closed = true;
        self.0.not_empty.notify_all();
    }
}

impl Shared {
    fn run(&self) {
        IN_POOL.set(true);
        loop {
            let mut queue = self.queue.lock();
            self.not_empty.wait_while(&mut queue, |queue| queue.tasks.is_empty() && !queue.closed);
            let Some(task) = queue.tasks.pop_front() else {
                return;
            };
            drop(queue);
            self.not_full.notify_one();
            // A task that panics drops its completion, which answers the request with an error. The thread
            // goes on for the others.
            if std::panic::catch_unwind(AssertUnwindSafe(task)).is_err() {
                tracing::error!("reading an image panicked; the request is failed");
            }
        }
    }
}

/// What a read-only device answers to a write.
pub(crate) fn read_only() -> IoError {
    IoError::new(IoErrorKind::ReadOnly, "an image cannot be written to")
}
