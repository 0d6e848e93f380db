//! Thread pools for reads that block on files and servers, so that no other thread has to wait.
//!
//! A process has three pools: for files and stores on this host, for stores on other hosts, and for files
//! from which images are made. So unreachable servers do not delay local reads, and a file on a slow disk or
//! a hanging share delays no machine. Reads that a request waits for have precedence; prefetches never occupy
//! all threads. A task that waits for a server occupies no thread: it is set aside, and continues when it is
//! due.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use headwater_block::{IoError, IoErrorKind};
use headwater_store::Hash;
use parking_lot::{Condvar, Mutex};

/// Threads of a pool: how many reads of files, or of remote stores, run at the same time.
pub const FETCH_THREADS: usize = 8;
/// How many of them may prefetch.
const AHEAD_THREADS: usize = 6;
/// How many prefetches may wait for a thread: enough for [`PREFETCH_MAX_BYTES`] of adjacent chunks of a store
/// on this host. Further ones are dropped.
pub(crate) const AHEAD_QUEUE_MAX: usize = 128;

/// The most bytes that one prefetch reads. A prefetch is a hint, and a client must not be able to cause reads
/// of a whole image with one request.
pub(crate) const PREFETCH_MAX_BYTES: u64 = 32 << 20;

/// How often an idle thread checks whether tasks that were set aside can continue.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Work for a thread of a pool.
pub(crate) trait Task: Send {
    /// Runs the task. A task that waits for a store that is away returns itself.
    fn run(self: Box<Self>) -> Option<Box<dyn Task>>;

    /// Whether a task that returned itself should run again.
    fn is_due(&self, now: Instant) -> bool {
        let _ = now;
        true
    }

    /// Whether a request now waits for what began as a prefetch.
    fn is_waited_for(&self) -> bool {
        false
    }
}

/// A task that does not wait for a store.
pub(crate) struct Once<F>(pub F);

impl<F: FnOnce() + Send> Task for Once<F> {
    fn run(self: Box<Self>) -> Option<Box<dyn Task>> {
        (self.0)();
        None
    }
}

/// Selects a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// For reads of machines on this host.
    Here,
    /// For stores on other hosts.
    Remote,
    /// For files from which images are made.
    Source,
}

/// Whether a request waits for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    Waited,
    Ahead,
}

/// A prefetch task, and the chunks that it reads.
struct Ahead {
    chunks: Vec<Hash>,
    task: Box<dyn Task>,
}

/// A task that a thread took, and the chunks that it prefetches.
struct Taken {
    task: Box<dyn Task>,
    ahead: Option<Vec<Hash>>,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Box<dyn Task>>,
    ahead: VecDeque<Ahead>,
    /// Tasks that wait for their store. Bounded like the other two queues: by the callers that push.
    aside: Vec<Taken>,
    /// When `aside` was last checked, and whether an idle thread checks it.
    looked: Option<Instant>,
    has_looker: bool,
    /// Threads that prefetch at this moment.
    ahead_running: usize,
    /// Set when the last handle is dropped: the threads finish what is queued and end.
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    not_empty: Condvar,
}

/// A small pool of threads for blocking reads, shared by all devices of the process. The threads end when the
/// last device that uses them is dropped.
pub(crate) struct FetchPool(Arc<Shared>);

/// The pools of the process, while they exist.
static POOLS: [Mutex<Weak<FetchPool>>; 3] = [const { Mutex::new(Weak::new()) }; 3];

impl FetchPool {
    /// The pool of the process; starts it if necessary.
    pub(crate) fn shared(place: Place) -> Result<Arc<Self>, IoError> {
        let [here, remote, source] = &POOLS;
        let (pool, name) = match place {
            Place::Here => (here, "fetch"),
            Place::Remote => (remote, "remote"),
            Place::Source => (source, "source"),
        };
        let mut pool = pool.lock();
        if let Some(pool) = pool.upgrade() {
            return Ok(pool);
        }
        let started = Arc::new(Self::start(name)?);
        *pool = Arc::downgrade(&started);
        Ok(started)
    }

    fn start(name: &str) -> Result<Self, IoError> {
        // If a thread cannot be started, dropping this ends those that were started.
        let pool = Self(Arc::default());
        for number in 0..FETCH_THREADS {
            let shared = Arc::clone(&pool.0);
            std::thread::Builder::new()
                .name(format!("{name}-{number}"))
                .spawn(move || shared.run())
                .map_err(|e| IoError::from_os("cannot start a thread that reads images", e))?;
        }
        Ok(pool)
    }

    /// Queues a task that a request waits for. It never blocks: while no server answers, nothing leaves the
    /// queue, and the caller may also serve writes and cache hits of all machines. The queue is bounded by
    /// the requests that front-ends accept.
    pub(crate) fn push(&self, task: impl FnOnce() + Send + 'static) {
        self.push_task(Box::new(Once(task)));
    }

    /// As [`FetchPool::push`], for a task that may wait for its store.
    pub(crate) fn push_task(&self, task: Box<dyn Task>) {
        self.0.queue.lock().tasks.push_back(task);
        self.0.not_empty.notify_one();
    }

    /// Queues a prefetch of these chunks. Bounded by the callers, see `room_ahead`.
    pub(crate) fn push_ahead(&self, chunks: Vec<Hash>, task: impl FnOnce() + Send + 'static) {
        self.push_task_ahead(chunks, Box::new(Once(task)));
    }

    /// As [`FetchPool::push_ahead`], for a task that may wait for its store.
    pub(crate) fn push_task_ahead(&self, chunks: Vec<Hash>, task: Box<dyn Task>) {
        self.0.queue.lock().ahead.push_back(Ahead { chunks, task });
        self.0.not_empty.notify_one();
    }

    /// Called when a request waits for these chunks: tasks that read them move to the queue of tasks with
    /// waiting requests.
    pub(crate) fn promote(&self, chunks: &[Hash]) {
        if chunks.is_empty() {
            return;
        }
        let promoted = self.0.queue.lock().promote(chunks);
        (0..promoted).for_each(|_| {
            self.0.not_empty.notify_one();
        });
    }

    /// How many more prefetch tasks may be queued.
    pub(crate) fn room_ahead(&self) -> usize {
        let queue = self.0.queue.lock();
        let aside = queue.aside.iter().filter(|taken| taken.ahead.is_some()).count();
        AHEAD_QUEUE_MAX.saturating_sub(queue.ahead.len() + aside)
    }
}

impl Drop for FetchPool {
    fn drop(&mut self) {
        self.0.queue.lock().closed = true;
        self.0.not_empty.notify_all();
    }
}

impl Queue {
    /// The next task.
    fn take(&mut self) -> Option<Taken> {
        self.look_aside();
        if let Some(task) = self.tasks.pop_front() {
            return Some(Taken { task, ahead: None });
        }
        if self.ahead_running >= AHEAD_THREADS && !self.closed {
            return None;
        }
        let Ahead { chunks, task } = self.ahead.pop_front()?;
        self.ahead_running += 1;
        Some(Taken { task, ahead: Some(chunks) })
    }

    /// Queues tasks again that waited for their store and can continue. Checks only from time to time.
    fn look_aside(&mut self) {
        if self.aside.is_empty() {
            return;
        }
        let now = Instant::now();
        if self.looked.is_some_and(|looked| now.duration_since(looked) < LOOK_INTERVAL) {
            return;
        }
        self.looked = Some(now);
        for Taken { task, ahead } in self.aside.extract_if(.., |taken| taken.task.is_due(now)) {
            match ahead {
                None => self.tasks.push_back(task),
                Some(chunks) => self.ahead.push_back(Ahead { chunks, task }),
            }
        }
    }

    /// Moves the prefetches of any of these chunks to the end of the queue of tasks with waiting requests.
    /// Returns their number.
    fn promote(&mut self, chunks: &[Hash]) -> usize {
        let (wanted, others) = std::mem::take(&mut self.ahead)
            .into_iter()
            .partition(|ahead: &Ahead| ahead.chunks.iter().any(|chunk| chunks.contains(chunk)));
        self.ahead = others;
        let wanted: VecDeque<Ahead> = wanted;
        let promoted = wanted.len();
        let is_wanted = |ahead: &Vec<Hash>| ahead.iter().any(|chunk| chunks.contains(chunk));
        for taken in self.aside.iter_mut().filter(|taken| taken.ahead.as_ref().is_some_and(is_wanted)) {
            taken.ahead = None;
        }
        self.tasks.extend(wanted.into_iter().map(|ahead| ahead.task));
        promoted
    }
}

impl Shared {
    fn run(&self) {
        while let Some(Taken { task, ahead }) = self.next() {
            // A task that panics drops its completion, which answers the request with an error. The thread
            // continues with other tasks.
            let left = std::panic::catch_unwind(AssertUnwindSafe(|| task.run())).unwrap_or_else(|_| {
                tracing::error!("a read of an image panicked: its request gets an error");
                None
            });
            let mut queue = self.queue.lock();
            let is_ahead = ahead.is_some();
            if let Some(task) = left {
                // While the task ran, `promote` did not find it.
                let ahead = ahead.filter(|_| !task.is_waited_for());
                queue.aside.push(Taken { task, ahead });
            }
            if is_ahead {
                queue.ahead_running = queue.ahead_running.saturating_sub(1);
                let more = !queue.ahead.is_empty();
                drop(queue);
                if more {
                    // This thread may take another task, so another thread checks too.
                    self.not_empty.notify_one();
                }
            }
        }
    }

    /// Waits for the next task. `None`: the pool is closed and empty.
    fn next(&self) -> Option<Taken> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(taken) = queue.take() {
                let has_ahead = !queue.ahead.is_empty() && queue.ahead_running < AHEAD_THREADS;
                if !queue.tasks.is_empty() || !queue.aside.is_empty() || has_ahead {
                    // Several tasks may have been queued again at once, and another thread has to take the
                    // others.
                    self.not_empty.notify_one();
                }
                return Some(taken);
            }
            if queue.aside.is_empty() || queue.has_looker {
                if queue.closed {
                    return None;
                }
                self.not_empty.wait(&mut queue);
            } else {
                queue.has_looker = true;
                self.not_empty.wait_for(&mut queue, LOOK_INTERVAL);
                queue.has_looker = false;
            }
        }
    }
}

/// The answer of a read-only device to a write.
pub(crate) fn read_only() -> IoError {
    IoError::new(IoErrorKind::ReadOnly, "an image cannot be written to")
}
