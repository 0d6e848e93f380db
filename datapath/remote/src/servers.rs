//! Chooses which server of a store to ask next, and waits if none is available. `health.rs` tracks the state
//! of each server.
//!
//! # Lock order
//! `state` is never held together with another lock, and neither are `idle` and `addresses` of a server. None
//! is held across I/O.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_block::small_file;
use headwater_store::{Hash, StoreError, StoreErrorKind, WhileBusy};
use parking_lot::{Condvar, Mutex};
use rustls::pki_types::ServerName;

use crate::connection::{Connection, TlsPeer};
use crate::failed_files::FailedFile;
use crate::health::Health;
use crate::hole_lists::RememberedLists;
use crate::limits::Limits;
use crate::relay_order::GivenPart;
use crate::server::Server;
use crate::speed::Speed;
use crate::status::{Counting, ServerState, ServerStatus, Status};
use crate::transfer::{Fault, PriorRequests, Transfer, Wanted, request};
use crate::url::ServerUrl;

/// The most servers of one store.
pub const SERVERS_MAX: usize = 16;

/// The largest token file.
const TOKEN_FILE_MAX_BYTES: u64 = 64 << 10;

/// A waiting read checks the servers again after this time at the latest.
pub(crate) const WAIT_MAX: Duration = Duration::from_millis(500);

/// The variable state of a server.
#[derive(Debug)]
pub(crate) struct Record {
    pub health: Health,
    pub why: Option<String>,
    pub speed: Speed,
    pub sampled_at: Instant,
    /// When it last came back after it was gone.
    pub back_at: Instant,
    pub in_flight: u64,
    /// Failures since the last answer that was used.
    pub strikes: u32,
    /// Waiting for its list of holes was useless.
    pub is_without_lists: bool,
    /// Since when it has been down or put aside.
    pub away_since: Instant,
    /// Its last failure was an overload, and it said when to retry.
    pub is_busy: bool,
    pub probing: bool,
    pub probes: u64,
    pub answers: u64,
    pub bytes: u64,
    pub failures: u64,
}

impl Record {
    /// Whether it cannot be used, for another reason than being busy.
    pub(crate) fn is_away(&self) -> bool {
        matches!(self.health, Health::Down { .. } | Health::Aside { .. }) && !self.is_busy_now()
    }

    /// Whether it is down only because it is busy.
    pub(crate) fn is_busy_now(&self) -> bool {
        self.is_busy && matches!(self.health, Health::Down { .. })
    }
}

#[derive(Debug)]
pub(crate) struct State {
    pub records: Vec<Record>,
    pub waiting: u64,
    pub gone_since: Option<Instant>,
    /// When it was last logged that reads wait for servers that are away, because the others lack the data.
    pub lacking_said: Option<Instant>,
    /// Files whose transfer from a server kept failing, oldest first.
    pub failed_files: VecDeque<FailedFile>,
    /// Ranges of objects that were read without a check, oldest first.
    pub given: VecDeque<GivenPart>,
    /// Holes of objects, as servers reported them, oldest first.
    pub remembered: VecDeque<RememberedLists>,
    /// Open versions, and how often each is open.
    pub pins: Vec<(Hash, usize)>,
    /// Whether servers must be informed of the open versions.
    pub pins_due: bool,
}

/// The servers of a store; shared by the store, its objects and its threads.
pub(crate) struct Servers {
    pub list: Vec<Server>,
    pub limits: Limits,
    /// How long requests that do not wait for missing servers wait for busy ones.
    pub while_busy: WhileBusy,
    pub counting: Counting,
    pub state: Mutex<State>,
    pub changed: Condvar,
    /// Number of changes so far.
    changes: AtomicU64,
    token_file: Option<PathBuf>,
    token: Mutex<Option<String>>,
    closed: AtomicBool,
}

/// A read that waits without a thread; it is counted while this lives.
pub(crate) struct SuspendedRead {
    servers: Arc<Servers>,
    pub until: Instant,
}

impl Drop for SuspendedRead {
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
        (limits, while_busy): (Limits, WhileBusy),
    ) -> Result<Arc<Self>, StoreError> {
        let invalid = |why: String| StoreError::new(StoreErrorKind::Invalid, why);
        if urls.is_empty() || urls.len() > SERVERS_MAX {
            return Err(invalid(format!("1 to {SERVERS_MAX} servers can be given, not {}", urls.len())));
        }
        let open = urls.iter().find(|url| !url.may_have_a_token());
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
                        .map_err(|_| invalid(format!("'{}' is not a valid server name", url.host)))?;
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
            is_without_lists: false,
            away_since: now,
            is_busy: false,
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
            while_busy,
            counting: Counting::default(),
            state: Mutex::new(State {
                records,
                waiting: 0,
                gone_since: None,
                lacking_said: None,
                failed_files: VecDeque::new(),
                given: VecDeque::new(),
                remembered: VecDeque::new(),
                pins: Vec::new(),
                pins_due: false,
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

    /// Reads the token again. `false`: there is no token file, or it cannot be read, and the earlier token
    /// stays.
    pub(crate) fn renew_token(&self) -> bool {
        if let Err(e) = self.read_token() {
            tracing::warn!(error = %e, "cannot read the token again: the earlier token is used");
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
            let why = format!("{}: the file must have exactly one word", tried());
            return Err(StoreError::new(StoreErrorKind::Invalid, why));
        }
        *self.token.lock() = Some(token.to_owned());
        Ok(())
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // A waiting thread checks the flag and starts to wait under this lock, so it cannot miss the change.
        drop(self.state.lock());
        self.announce_change();
    }

    /// Wakes waiting reads, because the state of a server changed.
    pub(crate) fn announce_change(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_all();
    }

    /// The number of changes so far. Read it before the servers are checked, so that no change is missed.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The server to ask for `len` bytes: the one that is expected to send them completely first.
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

    /// Starts a request at a server; on an idle connection if there is one and `fresh` is false.
    pub(crate) fn start(
        &self,
        index: usize,
        path: &str,
        wanted: Wanted,
        past: PriorRequests,
        fresh: bool,
    ) -> Result<Transfer, Fault> {
        let Some(server) = self.list.get(index) else {
            return Err(Fault::Gone("there is no server with this number".into()));
        };
        self.counting.requests.fetch_add(1, Ordering::Relaxed);
        let target = format!("{}/{path}", server.url.path);
        let token = self.token.lock().clone();
        let request = request(&server.url.authority(), &target, token.as_deref(), wanted, past);
        if !fresh && let Some(kept) = server.kept(self.limits.idle) {
            return Transfer::start(kept, true, &request, wanted);
        }
        let connection = server.connect()?;
        Transfer::start(connection, false, &request, wanted)
    }

    /// Keeps a connection for the next request.
    pub(crate) fn keep(&self, index: usize, connection: Connection) {
        if let Some(server) = self.list.get(index) {
            server.keep(connection, self.limits.idle_connections, self.limits.idle);
        }
    }

    pub(crate) fn in_flight(&self, index: usize, more: bool) {
        if let Some(record) = self.state.lock().records.get_mut(index) {
            record.in_flight = if more { record.in_flight + 1 } else { record.in_flight.saturating_sub(1) };
        }
    }

    /// After what time a read of `len` bytes from this server is late.
    pub(crate) fn late_after(&self, index: usize, len: u64) -> Duration {
        let estimate = self.state.lock().records.get(index).map_or(Duration::ZERO, |r| r.speed.estimate(len));
        estimate.saturating_mul(3).clamp(self.limits.hedge_after, self.limits.hedge_after_max)
    }

    /// Waits, at most until `at`, for the probe of a server that broke off and may still be available.
    /// `false`: there is none.
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

    /// Waits until the state of a server changes, or until `at`. Logs if no server is left.
    pub(crate) fn wait(&self, at: Option<Instant>) {
        let mut state = self.state.lock();
        let Some(until) = self.begin_wait(&mut state, at) else { return };
        self.changed.wait_until(&mut state, until);
        state.waiting = state.waiting.saturating_sub(1);
    }

    /// As [`Servers::wait`], for a read that occupies no thread while it waits.
    pub(crate) fn suspend(self: &Arc<Self>, at: Option<Instant>) -> Option<SuspendedRead> {
        let until = self.begin_wait(&mut self.state.lock(), at)?;
        Some(SuspendedRead { servers: Arc::clone(self), until })
    }

    /// Counts a waiting read, and logs if no server is left. Returns when the read must check again at the
    /// latest; `None`: at once.
    fn begin_wait(&self, state: &mut State, at: Option<Instant>) -> Option<Instant> {
        let usable = |record: &Record| matches!(record.health, Health::Up | Health::Distrusted { .. });
        if self.is_closed() {
            return None;
        }
        let nobody = !state.records.iter().any(usable);
        if nobody && state.gone_since.is_none() {
            state.gone_since = Some(Instant::now());
            let reasons = self.status_of(state).reasons();
            tracing::error!(%reasons, "no server of the image store can be reached: reads wait until one is back");
        }
        if !nobody && at.is_none() {
            return None;
        }
        state.waiting += 1;
        let longest = Instant::now() + WAIT_MAX;
        Some(at.map_or(longest, |at| at.min(longest)))
    }

    /// The current status.
    pub(crate) fn status(&self) -> Status {
        self.status_of(&self.state.lock())
    }

    pub(crate) fn status_of(&self, state: &State) -> Status {
        let status = |(server, record): (&Server, &Record)| ServerStatus {
            url: server.url.to_string(),
            state: match record.health {
                Health::Up => ServerState::Up,
                Health::Down { .. } => ServerState::Down,
                Health::Distrusted { .. } | Health::Aside { .. } => ServerState::Aside,
            },
            why: record.why.clone(),
            away_for: record.is_away().then(|| record.away_since.elapsed()),
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
