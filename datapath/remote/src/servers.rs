//! Which servers there are, which one to ask next, and waiting when there is none.
//!
//! | state | becomes | when |
//! |---|---|---|
//! | up | down | it does not answer, breaks off for the first time in a read, or is busy |
//! | up | aside | it answers something else than what was asked for |
//! | up | distrusted | its bytes were wrong, and another server's were right |
//! | down, aside | up | a probe gets the right answer; the longer it failed, the rarer the probes |
//! | distrusted | up | its time is over |
//!
//! A server that has something else than it should under one name stays as it is: see [`crate::read`].
//! A distrusted server is asked where no other one is left: what it sends is checked like everything.
//!
//! # Lock order
//! `state`, then nothing. `idle` and `addresses` of a server alone. None is held across I/O.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_block::small_file;
use headwater_store::{Hash, StoreError, StoreErrorKind};
use parking_lot::{Condvar, Mutex};
use rustls::pki_types::ServerName;

use crate::broken::Broken;
use crate::connection::{Connection, TlsPeer};
use crate::limits::Limits;
use crate::server::Server;
use crate::speed::Speed;
use crate::status::{Counting, ServerState, ServerStatus, Status};
use crate::transfer::{Fault, Transfer, Wanted, request};
use crate::url::ServerUrl;

/// The most servers of one store.
pub const SERVERS_MAX: usize = 16;

/// The largest file of a token.
const TOKEN_FILE_MAX_BYTES: u64 = 64 << 10;

/// So often the least time doubles for which a busy server is left alone: it stays below what servers ask for.
const BUSY_DOUBLINGS_MAX: u32 = 3;

/// A read that waits looks at the servers again after so long at the latest.
const WAIT_MAX: Duration = Duration::from_millis(500);

#[derive(Clone, Debug)]
pub(crate) enum Health {
    Up,
    Distrusted {
        until: Instant,
    },
    /// It is gone, unless it only broke off or failed with what one read asked for.
    Down {
        probe_at: Instant,
        is_gone: bool,
    },
    /// Its store is gone, unless it only answered wrongly what one read asked for.
    Aside {
        probe_at: Instant,
        is_gone: bool,
    },
}

/// What changes about a server.
#[derive(Debug)]
pub(crate) struct Record {
    pub health: Health,
    pub why: Option<String>,
    pub speed: Speed,
    pub sampled_at: Instant,
    /// When it last was back after it was gone.
    back_at: Instant,
    pub in_flight: u64,
    /// Failures since the last answer that was used.
    pub strikes: u32,
    pub probing: bool,
    pub probes: u64,
    answers: u64,
    bytes: u64,
    failures: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub records: Vec<Record>,
    waiting: u64,
    gone_since: Option<Instant>,
    /// When it was last said that reads wait for servers that are away, while others do not have what they read.
    lacking_said: Option<Instant>,
    /// Files that servers broke off until they were given up, oldest first.
    pub broken: VecDeque<Broken>,
    /// Versions that are open, and how often.
    pub pins: Vec<(Hash, usize)>,
}

/// The servers of a store; lives as long as anybody reads from it.
pub(crate) struct Servers {
    pub list: Vec<Server>,
    pub limits: Limits,
    pub counting: Counting,
    pub state: Mutex<State>,
    pub changed: Condvar,
    /// How often it was told that something has changed.
    changes: AtomicU64,
    token_file: Option<PathBuf>,
    token: Mutex<Option<String>>,
    closed: AtomicBool,
}

/// A read that waits without a thread; counted while it does.
pub(crate) struct Resting {
    servers: Arc<Servers>,
    pub until: Instant,
}

impl Drop for Resting {
    fn drop(&mut self) {
        let waiting = &mut self.servers.state.lock().waiting;
        *waiting = waiting.saturating_sub(1);
    }
}

impl Servers {
    pub(crate) fn new(
        urls: Vec<ServerUrl>,
        ca_file: Option<&Path>,
        token_file: Option<PathBuf>,
        limits: Limits,
    ) -> Result<Arc<Self>, StoreError> {
        let invalid = |why: String| StoreError::new(StoreErrorKind::Invalid, why);
        if urls.is_empty() || urls.len() > SERVERS_MAX {
            return Err(invalid(format!("1 to {SERVERS_MAX} servers can be given, not {}", urls.len())));
        }
        let open = urls.iter().find(|url| !url.tls && !url.is_loopback());
        if let (Some(url), Some(_)) = (open, &token_file) {
            return Err(invalid(format!("a token would be sent to {url} unencrypted: use https://")));
        }
        let uses_tls = urls.iter().any(|url| url.tls);
        let config = if uses_tls { Some(crate::tls::client_config(ca_file)?) } else { None };
        let mut list = Vec::new();
        for url in urls {
            let tls = match (&config, url.tls) {
                (Some(config), true) => {
                    let name = ServerName::try_from(url.host.clone())
                        .map_err(|_| invalid(format!("'{}' is not the name of a server", url.host)))?;
                    Some(TlsPeer { config: Arc::clone(config), name })
                }
                _ => None,
            };
            list.push(Server::new(url, tls));
        }
        let now = Instant::now();
        let record = |_: &Server| Record {
            health: Health::Down { probe_at: now, is_gone: true },
            why: None,
            speed: Speed::default(),
            sampled_at: now,
            back_at: now,
            in_flight: 0,
            strikes: 0,
            probing: false,
            probes: 0,
            answers: 0,
            bytes: 0,
            failures: 0,
        };
        let records = list.iter().map(record).collect();
        let servers = Arc::new(Self {
            list,
            limits,
            counting: Counting::default(),
            state: Mutex::new(State {
                records,
                waiting: 0,
                gone_since: None,
                lacking_said: None,
                broken: VecDeque::new(),
                pins: Vec::new(),
            }),
            changed: Condvar::new(),
            changes: AtomicU64::new(0),
            token_file,
            token: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        servers.read_token()?;
        Ok(servers)
    }

    /// Reads the token again. `false`: there is none, or it cannot be read, and the one from before stays.
    pub(crate) fn renew_token(&self) -> bool {
        if let Err(e) = self.read_token() {
            tracing::warn!(error = %e, "going on with the token that was read before");
            return false;
        }
        self.token_file.is_some()
    }

    fn read_token(&self) -> Result<(), StoreError> {
        let Some(file) = &self.token_file else { return Ok(()) };
        let tried = || format!("cannot read the token in {}", file.display());
        let text = small_file::read(file, TOKEN_FILE_MAX_BYTES).and_then(small_file::text);
        let text = text.map_err(|e| match e.kind() {
            ErrorKind::InvalidData => StoreError::new(StoreErrorKind::Invalid, format!("{}: {e}", tried())),
            _ => StoreError::from_os(tried(), e),
        })?;
        let token = text.trim();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            let why = format!("{}: it holds none, or one that is not a single word", tried());
            return Err(StoreError::new(StoreErrorKind::Invalid, why));
        }
        *self.token.lock() = Some(token.to_owned());
        Ok(())
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // Whoever looks at the flag and then waits does so under the lock.
        drop(self.state.lock());
        self.tell();
    }

    /// Has those who wait look again.
    pub(crate) fn tell(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_all();
    }

    /// How often something has changed. To be asked before one looks at the servers, so that no change is missed.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The server to ask for `len` bytes: the one that is expected to be the first to have sent them.
    pub(crate) fn choose(&self, len: u64, excluded: &[bool]) -> Option<usize> {
        let mut state = self.state.lock();
        let now = Instant::now();
        let mut best: Option<(bool, u128, usize)> = None;
        for (index, record) in state.records.iter_mut().enumerate() {
            if let Health::Distrusted { until } = record.health
                && until <= now
            {
                record.health = Health::Up;
            }
            let distrusted = match record.health {
                Health::Up => false,
                Health::Distrusted { .. } => true,
                Health::Down { .. } | Health::Aside { .. } => continue,
            };
            if excluded.get(index).copied().unwrap_or(false) {
                continue;
            }
            let cost = record.speed.estimate(len).as_nanos() * u128::from(8 + record.in_flight);
            let candidate = (distrusted, cost, index);
            if best.is_none_or(|best| candidate < best) {
                best = Some(candidate);
            }
        }
        best.map(|(_, _, index)| index)
    }

    /// Starts a request at a server; on a kept connection if there is one and `fresh` is not wanted. Caches on the way
    /// are to ask it too where `past_caches` says so.
    pub(crate) fn start(
        &self,
        index: usize,
        path: &str,
        wanted: Wanted,
        past_caches: bool,
        fresh: bool,
    ) -> Result<Transfer, Fault> {
        let Some(server) = self.list.get(index) else {
            return Err(Fault::Gone("it is not in the list".into()));
        };
        self.counting.requests.fetch_add(1, Ordering::Relaxed);
        let target = format!("{}/{path}", server.url.path);
        let token = self.token.lock().clone();
        let request = request(&server.url.authority(), &target, token.as_deref(), wanted, past_caches);
        if !fresh && let Some(kept) = server.kept(self.limits.idle) {
            return Transfer::start(kept, true, &request, wanted);
        }
        let connection = server.connect()?;
        Transfer::start(connection, false, &request, wanted)
    }

    /// Keeps a connection for the next request.
    pub(crate) fn keep(&self, index: usize, connection: Connection) {
        if let Some(server) = self.list.get(index) {
            server.keep(connection, self.limits.idle_connections);
        }
    }

    pub(crate) fn in_flight(&self, index: usize, more: bool) {
        if let Some(record) = self.state.lock().records.get_mut(index) {
            record.in_flight = if more { record.in_flight + 1 } else { record.in_flight.saturating_sub(1) };
        }
    }

    /// When a read of `len` bytes from this server is late.
    pub(crate) fn late_after(&self, index: usize, len: u64) -> Duration {
        let estimate = self.state.lock().records.get(index).map_or(Duration::ZERO, |r| r.speed.estimate(len));
        estimate.saturating_mul(3).clamp(self.limits.hedge_after, self.limits.hedge_after_max)
    }

    pub(crate) fn was_late(&self, index: usize, waited: Duration) {
        if let Some(record) = self.state.lock().records.get_mut(index) {
            record.speed.was_late(waited);
        }
    }

    /// Its answer was right.
    pub(crate) fn answered(&self, index: usize, len: u64, times: Option<(Duration, Duration)>) {
        self.counting.fetched_bytes.fetch_add(len, Ordering::Relaxed);
        if let Some(record) = self.state.lock().records.get_mut(index) {
            record.answers += 1;
            record.bytes += len;
            record.strikes = 0;
            if let Some((first_byte, whole)) = times {
                record.speed.answered(len, first_byte, whole);
                record.sampled_at = Instant::now();
            }
        }
    }

    /// Its bytes were wrong, whatever the reason.
    pub(crate) fn gave_wrong_bytes(&self, index: usize, what: &str, why: &StoreError) {
        self.counting.wrong_answers.fetch_add(1, Ordering::Relaxed);
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        let until = Instant::now() + self.limits.distrust;
        let seconds = self.limits.distrust.as_secs();
        let mut state = self.state.lock();
        if let Some(record) = state.records.get_mut(index) {
            record.failures += 1;
            record.why = Some(format!("it sent wrong bytes for {what}: {why}"));
            if matches!(record.health, Health::Up) {
                tracing::warn!(server = %url, %what, error = %why,
                    "a server sent wrong bytes; it is put aside for {seconds} s, unless no other is left");
            }
            record.health = Health::Distrusted { until };
        }
    }

    /// It answers, and cannot give `what`. That concerns reads of this alone: it is asked for all else as before.
    pub(crate) fn cannot_give(&self, index: usize, what: &str, why: &str) {
        self.counting.wrong_answers.fetch_add(1, Ordering::Relaxed);
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        let why = format!("it has no good {what}: {why}");
        let mut state = self.state.lock();
        let Some(record) = state.records.get_mut(index) else { return };
        record.failures += 1;
        if record.why.as_ref() != Some(&why) {
            tracing::warn!(server = %url, %why, "a server cannot give a file of the store; others are asked for it");
        }
        record.why = Some(why);
    }

    /// It answers, and cannot give `what` now, which it said again after a probe. It is asked for all else as before.
    pub(crate) fn cannot_give_now(&self, index: usize, what: &str) {
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        let mut state = self.state.lock();
        let Some(record) = state.records.get_mut(index) else { return };
        record.failures += 1;
        let why = "it answers, and says that it cannot give all of the store now";
        if record.why.as_deref() != Some(why) {
            tracing::warn!(server = %url, %what, %why, "reads go on at others, or wait");
            record.why = Some(why.into());
        }
    }

    /// No server that is there has `what`, and others are waited for. Says so now and then.
    pub(crate) fn waits_for_others(&self, what: &str) {
        let mut state = self.state.lock();
        if state.lacking_said.is_none_or(|said| said.elapsed() >= self.limits.distrust) {
            state.lacking_said = Some(Instant::now());
            let reasons = self.status_of(&state).reasons();
            tracing::warn!(%what, %reasons, "no server that is there has this: reads of it wait for those that are away");
        }
    }

    /// It gave a read no answer that can be used. `what` was asked for.
    pub(crate) fn failed(&self, index: usize, what: &str, fault: &Fault) {
        self.note_failure(index, what, fault, false);
    }

    /// It gave a probe no answer that can be used.
    pub(crate) fn probe_failed(&self, index: usize, fault: &Fault) {
        self.note_failure(index, "store", fault, true);
    }

    fn note_failure(&self, index: usize, what: &str, fault: &Fault, is_probe: bool) {
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        if let Some(server) = self.list.get(index) {
            server.drop_kept();
        }
        let mut state = self.state.lock();
        let Some(record) = state.records.get_mut(index) else { return };
        let now = Instant::now();
        let was_up = matches!(record.health, Health::Up | Health::Distrusted { .. });
        record.failures += 1;
        if !was_up && !is_probe {
            // Reads that were under way together fail together, which is one failure: the others put no probe off.
            if let (Health::Down { is_gone, .. }, Fault::Gone(_) | Fault::Busy(..)) =
                (&mut record.health, fault)
            {
                *is_gone = true;
            }
            return;
        }
        let (pause, busy_for) = (self.pause_after(record.strikes), self.busy_for(record.strikes));
        record.strikes = record.strikes.saturating_add(1);
        match fault {
            Fault::Missing | Fault::Wrong(_) | Fault::Stale => {}
            Fault::Busy(wait, _) => {
                record.why = Some(fault.to_string());
                record.health = Health::Down { probe_at: now + busy_for.max(*wait), is_gone: true };
            }
            Fault::Gone(why) | Fault::Broke(why) => {
                let is_gone = matches!(fault, Fault::Gone(_));
                record.health = Health::Down { probe_at: now + pause, is_gone };
                if was_up {
                    tracing::warn!(server = %url, %what, %why, "a server is gone; others are asked");
                }
                record.why = Some(why.clone());
            }
            Fault::Odd(why) | Fault::Refused(why) => {
                // It may be what one read asked for alone. What a probe finds wrong is put right by people.
                let pause = if is_probe { (pause * 10).min(self.limits.distrust) } else { pause };
                record.health = Health::Aside { probe_at: now + pause, is_gone: is_probe };
                if was_up || record.why.as_deref() != Some(why) {
                    tracing::warn!(server = %url, %what, %why, "a server answers wrongly and is put aside");
                }
                record.why = Some(why.clone());
            }
        }
        drop(state);
        self.tell();
    }

    /// When it last was back after it was gone.
    pub(crate) fn back_at(&self, index: usize) -> Option<Instant> {
        self.state.lock().records.get(index).map(|record| record.back_at)
    }

    /// How long a server is left alone after so many failures before this one.
    pub(crate) fn pause_after(&self, failures: u32) -> Duration {
        let doubled = self.limits.probe_after.saturating_mul(1 << failures.min(10));
        doubled.min(self.limits.probe_after_max)
    }

    /// How long a server that was busy so often before is left alone at least.
    pub(crate) fn busy_for(&self, times: u32) -> Duration {
        self.pause_after(times.min(BUSY_DOUBLINGS_MAX))
    }

    /// A probe got the right answer.
    pub(crate) fn is_back(&self, index: usize, first_byte: Duration) {
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        let mut state = self.state.lock();
        let waiting = state.waiting;
        let Some(record) = state.records.get_mut(index) else { return };
        record.speed.probed(first_byte);
        record.sampled_at = Instant::now();
        if matches!(record.health, Health::Down { is_gone: false, .. }) {
            // What it broke off was that file's fault: the next one who finds it so is not to wait longer for its probe.
            record.strikes = 0;
        }
        if matches!(record.health, Health::Down { .. } | Health::Aside { .. }) {
            if matches!(
                record.health,
                Health::Down { is_gone: true, .. } | Health::Aside { is_gone: true, .. }
            ) {
                record.back_at = Instant::now();
            }
            if record.why.is_some() {
                tracing::info!(server = %url, "a server is back");
            }
            record.health = Health::Up;
            if let Some(since) = state.gone_since.take() {
                tracing::warn!(server = %url, gone_s = since.elapsed().as_secs_f64(), reads = waiting,
                    "a server is back after none was left: reads go on");
            }
        }
        drop(state);
        self.tell();
    }

    /// Waits, at most until `at`, for the probe of a server that broke off and may be there all the same. `false`: there
    /// is none.
    pub(crate) fn wait_for_probe(&self, excluded: &[bool], at: Instant) -> bool {
        let mut state = self.state.lock();
        let is_probed = |(record, out): (&Record, &bool)| {
            !out && matches!(record.health, Health::Down { is_gone: false, .. })
        };
        if self.is_closed() || Instant::now() >= at || !state.records.iter().zip(excluded).any(is_probed) {
            return false;
        }
        self.changed.wait_until(&mut state, at);
        true
    }

    /// Waits until the state of a server changes, or until `at`. Says so when nobody is left.
    pub(crate) fn wait(&self, at: Option<Instant>) {
        let mut state = self.state.lock();
        let Some(until) = self.begin_wait(&mut state, at) else { return };
        self.changed.wait_until(&mut state, until);
        state.waiting = state.waiting.saturating_sub(1);
    }

    /// As [`Servers::wait`], for a read that takes no thread while it waits.
    pub(crate) fn rest(self: &Arc<Self>, at: Option<Instant>) -> Option<Resting> {
        let until = self.begin_wait(&mut self.state.lock(), at)?;
        Some(Resting { servers: Arc::clone(self), until })
    }

    /// Counts a read that waits, and says so where nobody is left. When it is to look again at the latest; `None`: at once.
    fn begin_wait(&self, state: &mut State, at: Option<Instant>) -> Option<Instant> {
        let usable = |record: &Record| matches!(record.health, Health::Up | Health::Distrusted { .. });
        if self.is_closed() {
            return None;
        }
        let nobody = !state.records.iter().any(usable);
        if nobody && state.gone_since.is_none() {
            state.gone_since = Some(Instant::now());
            let reasons = self.status_of(state).reasons();
            tracing::error!(%reasons, "no server of the image is left: reads wait until one is back");
        }
        if !nobody && at.is_none() {
            return None;
        }
        state.waiting += 1;
        let longest = Instant::now() + WAIT_MAX;
        Some(at.map_or(longest, |at| at.min(longest)))
    }

    /// How things are.
    pub(crate) fn status(&self) -> Status {
        self.status_of(&self.state.lock())
    }

    fn status_of(&self, state: &State) -> Status {
        let status = |(server, record): (&Server, &Record)| ServerStatus {
            url: server.url.to_string(),
            state: match record.health {
                Health::Up => ServerState::Up,
                Health::Down { .. } => ServerState::Down,
                Health::Distrusted { .. } | Health::Aside { .. } => ServerState::Aside,
            },
            why: record.why.clone(),
            first_byte: record.speed.first_byte(),
            answers: record.answers,
            bytes: record.bytes,
            failures: record.failures,
        };
        Status {
            servers: self.list.iter().zip(&state.records).map(status).collect(),
            waiting: state.waiting,
            waiting_for: state.gone_since.map_or(Duration::ZERO, |since| since.elapsed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_busy_for_no_time_is_asked_more_and_more_rarely() {
        let url = "http://127.0.0.1:1".parse().unwrap();
        let servers = Servers::new(vec![url], None, None, Limits::default()).unwrap();
        let pauses = [0, 1, 2, 3, 4, 1000].map(|times| servers.busy_for(times).as_millis());
        assert_eq!(pauses, [100, 200, 400, 800, 800, 800]);
    }

    #[test]
    fn a_server_that_refuses_what_one_read_asks_for_is_soon_probed() {
        let url = "http://127.0.0.1:1".parse().unwrap();
        let servers = Servers::new(vec![url], None, None, Limits::default()).unwrap();
        servers.is_back(0, Duration::ZERO);
        servers.failed(0, "objects/1", &Fault::Odd("status 403".into()));
        let probe_at = |servers: &Servers| match servers.state.lock().records[0].health {
            Health::Aside { probe_at, .. } => probe_at,
            _ => panic!("it is not aside: {:?}", servers.status()),
        };
        assert!(probe_at(&servers) <= Instant::now() + servers.limits.probe_after);
        // It refuses the probe too, so that it concerns all reads.
        let before = Instant::now();
        servers.probe_failed(0, &Fault::Odd("status 403".into()));
        assert!(probe_at(&servers) >= before + servers.limits.probe_after * 10);
    }

    #[test]
    fn reads_that_fail_together_are_one_failure() {
        let url = "http://127.0.0.1:1".parse().unwrap();
        let servers = Servers::new(vec![url], None, None, Limits::default()).unwrap();
        let probe_at = || match servers.state.lock().records[0].health {
            Health::Down { probe_at, .. } | Health::Aside { probe_at, .. } => probe_at,
            _ => panic!("it is up: {:?}", servers.status()),
        };
        let why = || "for a moment".into();
        for fault in [Fault::Gone(why()), Fault::Odd(why()), Fault::Refused(why()), Fault::Broke(why())] {
            servers.is_back(0, Duration::ZERO);
            servers.answered(0, 1, None);
            servers.failed(0, "objects/1", &fault);
            let first = probe_at();
            for _ in 1..8 {
                servers.failed(0, "objects/1", &fault);
            }
            assert_eq!(probe_at(), first, "{fault:?}");
            assert_eq!(servers.state.lock().records[0].strikes, 1, "{fault:?}");
            // What a probe finds is new.
            servers.probe_failed(0, &fault);
            assert!(probe_at() > first, "{fault:?}");
            assert_eq!(servers.state.lock().records[0].strikes, 2, "{fault:?}");
        }
    }
}
