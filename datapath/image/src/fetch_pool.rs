//! The threads that wait for files and servers, so that nobody else has to.
//!
//! There are three pools in a process: one for what machines read of files and stores on this host, one for stores on
//! others, one for files that images are made of. So servers that are gone do not hold up what lies here, and a file on a
//! slow disk or a share that hangs holds up no machine. What somebody waits for goes first; what is fetched ahead never
//! takes all threads.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};

use headwater_block::{IoError, IoErrorKind};
use headwater_store::Hash;
use parking_lot::{Condvar, Mutex};

/// Threads of a pool: how many reads of files, or of remote stores, are under way at a time.
pub const FETCH_THREADS: usize = 8;
/// Of which so many may fetch ahead.
const AHEAD_THREADS: usize = 6;
/// Reads ahead that wait for a thread: as many as bring [`PREFETCH_MAX_BYTES`] of a store on this host whose chunks lie
/// side by side. One more is left out.
pub(crate) const AHEAD_QUEUE_MAX: usize = 128;

/// What one prefetch brings at most: it is a hint, and a client must not have a whole image read with one request.
pub(crate) const PREFETCH_MAX_BYTES: u64 = 32 << 20;

type Task = Box<dyn FnOnce() + Send>;

/// Which pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// What machines read on this host.
    Here,
    /// Stores on others.
    Remote,
    /// Files that images are made of.
    Source,
}

/// Whether somebody waits for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    Waited,
    Ahead,
}

/// A task that reads ahead, and the chunks that it brings.
struct Ahead {
    chunks: Vec<Hash>,
    task: Task,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    ahead: VecDeque<Ahead>,
    /// Threads that fetch ahead at this moment.
    ahead_running: usize,
    /// Set when the last handle is gone: the threads finish what is queued and end.
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    not_empty: Condvar,
}

/// A small pool of threads for blocking reads, shared by all devices of the process. The threads end when
/// the last device that uses them is gone.
pub(crate) struct FetchPool(Arc<Shared>);

/// The pools of the process, while there are any.
static POOLS: [Mutex<Weak<FetchPool>>; 3] = [const { Mutex::new(Weak::new()) }; 3];

impl FetchPool {
    /// The pool of the process; started if need be.
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
        // If a thread cannot be started, dropping this ends those that were.
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

    /// Queues `task`, which somebody waits for. Never waits: while no server answers, nothing leaves the queue, and who comes
    /// here may serve writes and hits of all machines too. Bounded by the requests that front-ends take in.
    pub(crate) fn push(&self, task: impl FnOnce() + Send + 'static) {
        self.0.queue.lock().tasks.push_back(Box::new(task));
        self.0.not_empty.notify_one();
    }

    /// Queues `task`, which nobody waits for yet, and which brings these chunks. Bounded by those who push, see
    /// `room_ahead`.
    pub(crate) fn push_ahead(&self, chunks: Vec<Hash>, task: impl FnOnce() + Send + 'static) {
        self.0.queue.lock().ahead.push_back(Ahead { chunks, task: Box::new(task) });
        self.0.not_empty.notify_one();
    }

    /// Somebody waits for these chunks from now on: what brings them no longer goes behind all that is waited for.
    pub(crate) fn promote(&self, chunks: &[Hash]) {
        if chunks.is_empty() {
            return;
        }
        let promoted = self.0.queue.lock().promote(chunks);
        (0..promoted).for_each(|_| {
            self.0.not_empty.notify_one();
        });
    }

    /// How many more tasks may be queued that read ahead.
    pub(crate) fn room_ahead(&self) -> usize {
        AHEAD_QUEUE_MAX.saturating_sub(self.0.queue.lock().ahead.len())
    }
}

impl Drop for FetchPool {
    fn drop(&mut self) {
        self.0.queue.lock().closed = true;
        self.0.not_empty.notify_all();
    }
}

impl Queue {
    /// The next task, and whether it is one that reads ahead.
    fn take(&mut self) -> Option<(Task, Urgency)> {
        if let Some(task) = self.tasks.pop_front() {
            return Some((task, Urgency::Waited));
        }
        if self.ahead_running >= AHEAD_THREADS && !self.closed {
            return None;
        }
        let ahead = self.ahead.pop_front()?;
        self.ahead_running += 1;
        Some((ahead.task, Urgency::Ahead))
    }

    /// Puts what brings any of these chunks behind what is waited for. Returns how many tasks that were.
    fn promote(&mut self, chunks: &[Hash]) -> usize {
        let (wanted, others) = std::mem::take(&mut self.ahead)
            .into_iter()
            .partition(|ahead: &Ahead| ahead.chunks.iter().any(|chunk| chunks.contains(chunk)));
        self.ahead = others;
        let wanted: VecDeque<Ahead> = wanted;
        let promoted = wanted.len();
        self.tasks.extend(wanted.into_iter().map(|ahead| ahead.task));
        promoted
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let mut queue = self.queue.lock();
            let (task, urgency) = loop {
                if let Some(taken) = queue.take() {
                    break taken;
                }
                if queue.closed {
                    return;
                }
                self.not_empty.wait(&mut queue);
            };
            drop(queue);
            // A task that panics drops its completion, which answers the request with an error. The thread
            // goes on for the others.
            if std::panic::catch_unwind(AssertUnwindSafe(task)).is_err() {
                tracing::error!("reading an image panicked; the request is failed");
            }
            if urgency == Urgency::Ahead {
                let mut queue = self.queue.lock();
                queue.ahead_running = queue.ahead_running.saturating_sub(1);
                let more = !queue.ahead.is_empty();
                drop(queue);
                if more {
                    // This thread may take something else, so another one looks too.
                    self.not_empty.notify_one();
                }
            }
        }
    }
}

/// What a read-only device answers to a write.
pub(crate) fn read_only() -> IoError {
    IoError::new(IoErrorKind::ReadOnly, "an image cannot be written to")
}
