//! Status and counters of the servers, for users and metrics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The state of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerState {
    /// The server is used.
    Up,
    /// The server does not answer, or is busy. It is probed from time to time.
    Down,
    /// The server gave a wrong answer, and is probed later. Or it sent wrong bytes (it is distrusted), and is asked
    /// only if no other server is left.
    Aside,
}

impl std::fmt::Display for ServerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Aside => "put aside",
        })
    }
}

/// One server.
#[derive(Clone, Debug)]
pub struct ServerStatus {
    /// The server's base URL.
    pub url: String,
    /// Whether it is used.
    pub state: ServerState,
    /// Why the server is not used, or why it last was not.
    pub why: Option<String>,
    /// For how long the server could not be used. `None`: it is used, or only busy.
    pub away_for: Option<Duration>,
    /// Time to the first byte of an answer, if measured.
    pub first_byte: Option<Duration>,
    /// Answers that were used.
    pub answers: u64,
    /// Bytes of these answers.
    pub bytes: u64,
    /// Requests without a usable answer.
    pub failures: u64,
}

/// All servers of a store.
#[derive(Clone, Debug)]
pub struct Status {
    /// In the configured order.
    pub servers: Vec<ServerStatus>,
    /// Reads that wait because no server is left.
    pub waiting: u64,
    /// For how long they have been waiting.
    pub waiting_for: Duration,
}

impl Status {
    /// The reason for each server that is not up, in one line.
    pub fn reasons(&self) -> String {
        let why = |server: &ServerStatus| {
            format!("{}: {}", server.url, server.why.as_deref().unwrap_or("not tried yet"))
        };
        let unusable = self.servers.iter().filter(|server| server.state != ServerState::Up);
        unusable.map(why).collect::<Vec<_>>().join("; ")
    }
}

/// Counters since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests sent.
    pub requests: u64,
    /// Bytes of bodies that were used.
    pub fetched_bytes: u64,
    /// Reads that continued at another server after one had failed.
    pub failovers: u64,
    /// Reads that were sent to a second server because the first one was late.
    pub hedges: u64,
    /// How many times the second server was faster.
    pub hedges_won: u64,
    /// Answers whose bytes were wrong.
    pub wrong_answers: u64,
    /// Reads that had to wait because no server was left.
    pub waits: u64,
    /// How long they waited in total.
    pub waited_ms: u64,
    /// How long the longest of them waited.
    pub longest_wait_ms: u64,
    /// How long the longest read took, waits and other servers included.
    pub longest_read_ms: u64,
}

/// The counters that are incremented.
#[derive(Debug, Default)]
pub(crate) struct Counting {
    pub requests: AtomicU64,
    pub fetched_bytes: AtomicU64,
    pub failovers: AtomicU64,
    pub hedges: AtomicU64,
    pub hedges_won: AtomicU64,
    pub wrong_answers: AtomicU64,
    pub waits: AtomicU64,
    pub waited_ms: AtomicU64,
    pub longest_wait_ms: AtomicU64,
    pub longest_read_ms: AtomicU64,
}

impl Counting {
    pub(crate) fn view(&self) -> Counters {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            requests: value(&self.requests),
            fetched_bytes: value(&self.fetched_bytes),
            failovers: value(&self.failovers),
            hedges: value(&self.hedges),
            hedges_won: value(&self.hedges_won),
            wrong_answers: value(&self.wrong_answers),
            waits: value(&self.waits),
            waited_ms: value(&self.waited_ms),
            longest_wait_ms: value(&self.longest_wait_ms),
            longest_read_ms: value(&self.longest_read_ms),
        }
    }

    /// A read ended, successfully or not.
    pub(crate) fn read_took(&self, time: Duration) {
        self.longest_read_ms.fetch_max(as_ms(time), Ordering::Relaxed);
    }

    pub(crate) fn waited(&self, time: Duration) {
        let ms = as_ms(time);
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.waited_ms.fetch_add(ms, Ordering::Relaxed);
        self.longest_wait_ms.fetch_max(ms, Ordering::Relaxed);
    }
}

fn as_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
