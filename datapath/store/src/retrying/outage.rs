//! Tracks for [`super`] whether the store can be reached, which reads wait for it, and when they are
//! retried.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{StoreError, StoreErrorKind};
use crate::store::Traffic;
use crate::waiting::Waiting;

/// The pause before the first retry of a read. It doubles with each retry, up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(100);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(3);

/// Whether the store can be reached, and the reads that wait for it.
#[derive(Default)]
pub(super) struct Outage {
    shown: String,
    state: Mutex<State>,
    /// The last failed attempt to open a version while the store could not be reached: its time and its
    /// error.
    pub(super) away: Mutex<Option<(Instant, StoreError)>>,
    changed: Condvar,
    closed: AtomicBool,
    /// How often the store answered a read while others waited. Changed under the lock of `state`.
    answers: AtomicU64,
    requests: AtomicU64,
    fetched_bytes: AtomicU64,
    waits: AtomicU64,
    waited_ms: AtomicU64,
    longest_wait_ms: AtomicU64,
    longest_read_ms: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Reads that wait or retry.
    waiting: u64,
    /// Since when there have been such reads.
    gone_since: Option<Instant>,
    why: String,
}

/// A read that waits for the store.
struct WaitingRead {
    outage: Arc<Outage>,
    since: Instant,
    pause: Duration,
    /// The read failed again after the store had answered another read, so it keeps its pauses from now on.
    was_woken: bool,
}

impl WaitingRead {
    /// Begins to wait. The first waiting read logs the outage.
    fn begin(outage: &Arc<Outage>, why: &StoreError) -> Self {
        let since = Instant::now();
        let mut state = outage.state.lock();
        state.waiting += 1;
        state.why = why.to_string();
        if state.gone_since.is_none() {
            state.gone_since = Some(since);
            tracing::error!(reasons = %why, "no server of the image store can be reached: reads wait until one is back");
        }
        drop(state);
        Self { outage: Arc::clone(outage), since, pause: PAUSE, was_woken: false }
    }

    /// Begins a pause. It ends after its time or, for the first time only, when another read is answered.
    fn pause(&mut self, why: &StoreError) -> Pause {
        let until = Instant::now() + self.pause;
        self.pause = self.pause.saturating_mul(2).min(PAUSE_MAX);
        self.outage.state.lock().why = why.to_string();
        let answers = self.outage.answers.load(Ordering::Acquire);
        Pause { outage: Arc::clone(&self.outage), until, answers, can_be_woken: !self.was_woken }
    }

    /// Called when a pause is over.
    fn has_paused(&mut self, pause: &Pause) {
        self.was_woken |= pause.is_woken();
    }
}

impl Drop for WaitingRead {
    fn drop(&mut self) {
        let outage = &self.outage;
        let ms = as_ms(self.since.elapsed());
        outage.waits.fetch_add(1, Ordering::Relaxed);
        outage.waited_ms.fetch_add(ms, Ordering::Relaxed);
        outage.longest_wait_ms.fetch_max(ms, Ordering::Relaxed);
        let mut state = outage.state.lock();
        state.waiting = state.waiting.saturating_sub(1);
        if state.waiting == 0
            && let Some(since) = state.gone_since.take()
            && !outage.closed.load(Ordering::Acquire)
        {
            let gone_s = since.elapsed().as_secs_f64();
            tracing::warn!(server = %outage.shown, gone_s, "a server is back after none could be reached: reads go on");
        }
    }
}

/// A pause of a waiting read.
#[derive(Clone)]
struct Pause {
    outage: Arc<Outage>,
    until: Instant,
    /// Number of answers to other reads before the pause.
    answers: u64,
    can_be_woken: bool,
}

impl Pause {
    fn is_woken(&self) -> bool {
        self.can_be_woken && self.outage.answers.load(Ordering::Acquire) != self.answers
    }

    fn is_over(&self, now: Instant) -> bool {
        now >= self.until || self.outage.closed.load(Ordering::Acquire) || self.is_woken()
    }

    fn wait(&self) {
        let mut state = self.outage.state.lock();
        while !self.is_over(Instant::now()) {
            self.outage.changed.wait_until(&mut state, self.until);
        }
    }
}

/// A read that waits without a thread.
struct SuspendedRead {
    started: Instant,
    /// Set while the store is away.
    away: Option<WaitingRead>,
    pause: Option<Pause>,
    /// The read in progress in the store below.
    below: Waiting,
}

pub(super) fn as_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Tries to read once.
pub(super) type Attempt<'a> = dyn FnMut() -> Result<(), StoreError> + 'a;

/// Tries to read once, or waits in the store below.
pub(super) type AttemptOrWait<'a> = dyn FnMut(&mut Waiting) -> Result<bool, StoreError> + 'a;

impl Outage {
    /// Creates the state for the store with this displayed name.
    pub(super) fn new(shown: String) -> Self {
        Self { shown, ..Self::default() }
    }

    /// Reads `len` bytes, with as many retries as it takes.
    pub(super) fn read(self: &Arc<Self>, len: u64, attempt: &mut Attempt<'_>) -> Result<(), StoreError> {
        let started = Instant::now();
        let mut away: Option<WaitingRead> = None;
        loop {
            self.must_be_open()?;
            self.requests.fetch_add(1, Ordering::Relaxed);
            match attempt() {
                Err(e) if e.kind() == StoreErrorKind::Unreachable => {
                    let away = away.get_or_insert_with(|| WaitingRead::begin(self, &e));
                    let pause = away.pause(&e);
                    pause.wait();
                    away.has_paused(&pause);
                }
                outcome => {
                    self.ended(len, started, &outcome);
                    return outcome;
                }
            }
        }
    }

    /// As [`Outage::read`], without using a thread while it waits; see [`Object::read_or_wait`].
    pub(super) fn read_or_wait(
        self: &Arc<Self>,
        len: u64,
        waiting: &mut Waiting,
        attempt: &mut AttemptOrWait<'_>,
    ) -> Result<bool, StoreError> {
        let mut read = waiting.end::<SuspendedRead>().unwrap_or_else(|| SuspendedRead {
            started: Instant::now(),
            away: None,
            pause: None,
            below: Waiting::default(),
        });
        self.must_be_open()?;
        if let (Some(away), Some(pause)) = (&mut read.away, read.pause.take()) {
            away.has_paused(&pause);
        }
        if !read.below.has_begun() {
            self.requests.fetch_add(1, Ordering::Relaxed);
        }
        read.below.set_read_for(waiting.read_for());
        match attempt(&mut read.below) {
            Ok(false) => {
                let (outage, is_due) = (Arc::clone(self), read.below.due());
                waiting.begin(read, move |now| outage.closed.load(Ordering::Acquire) || is_due(now));
                Ok(false)
            }
            Err(e) if e.kind() == StoreErrorKind::Unreachable => {
                let pause = read.away.get_or_insert_with(|| WaitingRead::begin(self, &e)).pause(&e);
                read.pause = Some(pause.clone());
                waiting.begin(read, move |now| pause.is_over(now));
                Ok(false)
            }
            outcome => {
                let outcome = outcome.map(|_| ());
                self.ended(len, read.started, &outcome);
                outcome.map(|()| true)
            }
        }
    }

    fn must_be_open(&self) -> Result<(), StoreError> {
        if self.closed.load(Ordering::Acquire) {
            let state = self.state.lock();
            let mut message = "the store was closed during a read".to_owned();
            if state.gone_since.is_some() {
                // The read ended because the store was closed. The message also says why the read was
                // waiting.
                message.push_str(&format!(", which waited: {}", state.why));
            }
            return Err(StoreError::new(StoreErrorKind::Io, message));
        }
        Ok(())
    }

    /// Called when a read ends.
    fn ended(&self, len: u64, started: Instant, outcome: &Result<(), StoreError>) {
        self.answered();
        if outcome.is_ok() {
            self.fetched_bytes.fetch_add(len, Ordering::Relaxed);
        }
        self.longest_read_ms.fetch_max(as_ms(started.elapsed()), Ordering::Relaxed);
    }

    /// Wakes the waiting reads.
    fn answered(&self) {
        let state = self.state.lock();
        if state.waiting > 0 {
            self.answers.fetch_add(1, Ordering::AcqRel);
            self.changed.notify_all();
        }
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // A thread checks the flag and starts to wait under this lock.
        drop(self.state.lock());
        self.changed.notify_all();
    }

    pub(super) fn traffic(&self) -> Traffic {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let state = self.state.lock();
        let is_gone = state.gone_since.is_some();
        Traffic {
            servers: 1,
            servers_up: u64::from(!is_gone),
            requests: value(&self.requests),
            fetched_bytes: value(&self.fetched_bytes),
            waits: value(&self.waits),
            waited_ms: value(&self.waited_ms),
            longest_wait_ms: value(&self.longest_wait_ms),
            longest_read_ms: value(&self.longest_read_ms),
            waiting: state.waiting,
            reasons: if is_gone { state.why.clone() } else { String::new() },
            ..Traffic::default()
        }
    }
}
