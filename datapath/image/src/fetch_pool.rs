//! The threads that wait for files and servers, so that nobody else has to.
//!
//! There are three pools in a process: one for what machines read of files and stores on this host, one for stores on
//! others, one for files that images are made of. So servers that are gone do not hold up what lies here, and a file on a
//! slow disk or a share that hangs holds up no machine. What somebody waits for goes first; what is fetched ahead never
//! takes all threads. What waits for a server that is away takes none: it is put aside, and goes on when it says so.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

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

/// One thread that has nothing else to do looks this often whether what is put aside can go on.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Something to be done by a thread of a pool.
pub(crate) trait Task: Send {
    /// Does it. What waits for a store that is away gives itself back.
    fn run(self: Box<Self>) -> Option<Box<dyn Task>>;

    /// Whether what gave itself back is to be run again.
    fn is_due(&self, now: Instant) -> bool {
        let _ = now;
        true
    }

    /// Whether somebody waits by now for what was to be read ahead.
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
    task: Box<dyn Task>,
}

/// What a thread took, and the chunks that it reads ahead.
struct Taken {
    task: Box<dyn Task>,
    ahead: Option<Vec<Hash>>,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Box<dyn Task>>,
    ahead: VecDeque<Ahead>,
    /// What waits for its store. Bounded as the other two are: by those who push.
    aside: Vec<Taken>,
    /// When it was last looked at, and whether a thread without work looks after it.
    looked: Option<Instant>,
    has_looker: bool,
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
        self.push_task(Box::new(Once(task)));
    }

    /// The same for a task that may wait for its store.
    pub(crate) fn push_task(&self, task: Box<dyn Task>) {
        self.0.queue.lock().tasks.push_back(task);
        self.0.not_empty.notify_one();
    }

    /// Queues `task`, which nobody waits for yet, and which brings these chunks. Bounded by those who push, see
    /// `room_ahead`.
    pub(crate) fn push_ahead(&self, chunks: Vec<Hash>, task: impl FnOnce() + Send + 'static) {
        self.push_task_ahead(chunks, Box::new(Once(task)));
    }

    /// The same for a task that may wait for its store.
    pub(crate) fn push_task_ahead(&self, chunks: Vec<Hash>, task: Box<dyn Task>) {
        self.0.queue.lock().ahead.push_back(Ahead { chunks, task });
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

    /// Queues again what waited for its store and can go on, now and then.
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

    /// Puts what brings any of these chunks behind what is waited for. Returns how many tasks that were.
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
            // goes on for the others.
            let left = std::panic::catch_unwind(AssertUnwindSafe(|| task.run())).unwrap_or_else(|_| {
                tracing::error!("reading an image panicked; the request is failed");
                None
            });
            let mut queue = self.queue.lock();
            let is_ahead = ahead.is_some();
            if let Some(task) = left {
                // While it ran, `promote` did not find it.
                let ahead = ahead.filter(|_| !task.is_waited_for());
                queue.aside.push(Taken { task, ahead });
            }
            if is_ahead {
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

    /// The next task, waited for. `None`: the pool is closed, and nothing is left.
    fn next(&self) -> Option<Taken> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(taken) = queue.take() {
                let has_ahead = !queue.ahead.is_empty() && queue.ahead_running < AHEAD_THREADS;
                if !queue.tasks.is_empty() || !queue.aside.is_empty() || has_ahead {
                    // Several may have been put back at once, and somebody is to look after the others.
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

/// What a read-only device answers to a write.
pub(crate) fn read_only() -> IoError {
    IoError::new(IoErrorKind::ReadOnly, "an image cannot be written to")
}
