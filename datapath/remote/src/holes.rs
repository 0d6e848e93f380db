//! Asks the servers of a store which holes an object has.
//!
//! A *hole* is a range of an object whose bytes a server deleted, because none of its versions needs them; it
//! reads as zeroes. Servers can have different versions, so their holes differ. All available servers are
//! asked at the same time. The holes of the object are the ranges that are holes on all of them (see
//! `hole_lists.rs`).
//!
//! | the server | consequence |
//! |---|---|
//! | sends a list of holes | its list counts |
//! | has no list (404), or answers with an error of the client, such as 403 | it counts as a server without holes, because servers that do not know holes answer like this. If other servers have holes, the server is asked whether it has the object |
//! | sends an invalid list | it is asked once more, bypassing caches. If that list is invalid too, the server is distrusted and left out |
//! | sends a list for another length of the object, or in a later format | it is left out |
//! | is distrusted | it is asked only if no other server has answered |
//! | breaks off, answers with 5xx, is busy, refuses the token | it is left out, and its state stays: it may still be able to give the bytes |
//! | does not answer | it is left out, and is down |
//!
//! A server that was left out is used for a range only if no other server has that range. Its bytes can make
//! the object's hash wrong. Then all servers are asked again.
//!
//! How long a call waits for servers that were left out depends on [`ListWait`].

use std::ops::Range;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use headwater_store::{HOLES_MAX_BYTES, Hash, Holes, StoreError, StoreErrorKind};

use crate::attempt::{Attempt, attempt};
use crate::blame::ServerChoice;
use crate::hole_lists::HoleLists;
use crate::read::{Answer, Ask, PROBE_WAITS};
use crate::servers::Servers;
use crate::transfer::{Busy, Fault, Wanted};

/// A caller that does not wait for servers no longer asks a server that has failed this often.
const FAILURES_MAX: u32 = 2;
/// A waiting caller checks the servers again after this time at the latest.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// How long a call waits for servers that were left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListWait {
    /// Returns at once, for the first request of a reader that can wait for bytes. If no server gave a list,
    /// the reader assumes no holes: a cache on the way may have all bytes of the object while the server with
    /// the list is away.
    None,
    /// For readers that cannot wait, such as a relay. If no server gave a list, waits for the probe of a
    /// server that has just failed; then the call fails.
    ForProbe,
    /// For readers that found the object wrong or incomplete, and can wait for bytes. Waits once for servers
    /// that were left out, at most [`Limits::wait_for_better`](crate::limits::Limits::wait_for_better); if no
    /// server gave a list and none is available, without a limit.
    ForBetter,
}

/// The object, and how to ask for its holes.
pub(crate) struct Question<'a> {
    pub id: Hash,
    pub len_bytes: u64,
    /// Halves the timeout, because the caller has clients that wait for it; see [`Ask`].
    pub short_timeout: bool,
    pub choice: &'a ServerChoice,
    /// Whether the caller waits for busy servers.
    pub waits_while_busy: bool,
    /// The number to send as `Headwater-Reading` if the whole object is read again from this server.
    pub reading: &'a (dyn Fn(usize) -> Option<u32> + Sync),
}

/// What is known about a server's holes.
#[derive(Debug, Default)]
enum Known {
    #[default]
    Nothing,
    /// The server gave this list.
    Said(Arc<Holes>),
    /// The server has no list, so it has no holes, if it has the object at all.
    NoList,
    /// The server has no list that can be used here, and is not asked again.
    Never(StoreError),
    /// The server failed this often, the last time with this error, and may be asked again at `again_at`.
    Failed { why: StoreError, times: u32, again_at: Option<Instant>, is_busy: bool },
}

impl Known {
    fn times(&self) -> u32 {
        match self {
            Self::Failed { times, .. } => *times,
            _ => 0,
        }
    }

    fn has_answered(&self) -> bool {
        matches!(self, Self::Said(_) | Self::NoList)
    }

    /// Whether the list is damaged.
    fn is_wrong(&self) -> bool {
        matches!(self, Self::Never(why) if why.kind() == StoreErrorKind::Damaged)
    }

    /// Whether the server is reachable, and said when to retry.
    fn is_busy(&self) -> bool {
        matches!(self, Self::Failed { is_busy: true, .. })
    }

    fn again_at(&self) -> Option<Instant> {
        match self {
            Self::Failed { again_at, .. } => *again_at,
            _ => None,
        }
    }

    fn why(&self) -> Option<&StoreError> {
        match self {
            Self::Never(why) | Self::Failed { why, .. } => Some(why),
            _ => None,
        }
    }
}

/// Asks the servers for the holes of an object.
pub(crate) fn ask(
    servers: &Servers,
    question: &Question<'_>,
    waits: ListWait,
) -> Result<HoleLists, StoreError> {
    let known = servers.list.iter().map(|_| Known::Nothing).collect();
    let began = Instant::now();
    let mut asking = PendingQuery { servers, question, known, order: Vec::new(), began, failing_since: None };
    let mut waiting_since = None;
    loop {
        if servers.is_closed() {
            return Err(closed());
        }
        asking.ask_available_servers();
        let Some(until) = asking.waits_until(waits) else { break };
        waiting_since.get_or_insert_with(Instant::now);
        servers.wait(Some(until));
    }
    if let Some(since) = waiting_since {
        servers.counting.waited(since.elapsed());
    }
    asking.into_hole_lists()
}

fn closed() -> StoreError {
    StoreError::new(StoreErrorKind::Io, "the store was closed during a read")
}

/// Whether a range that a server gave wrongly is, or may be, in one of its holes: then the server is not to
/// blame. It is asked for its list with caches bypassed.
pub(crate) fn is_gone_there(
    servers: &Servers,
    ask: &Ask<'_>,
    (id, len_bytes): (Hash, u64),
    part: &Range<u64>,
    server: usize,
) -> bool {
    let said = servers.said(id, server, servers.limits.wait_for_better);
    if said.is_some_and(|holes| holes.overlap(part)) {
        return true;
    }
    let choice = ServerChoice { bypass_caches: true, ..ServerChoice::default() };
    let (short_timeout, waits_while_busy) = (!ask.retrying, ask.waits_while_busy);
    let question =
        Question { id, len_bytes, short_timeout, waits_while_busy, choice: &choice, reading: &|_| None };
    match ask_for_list(servers, &question, server, 0) {
        Known::Said(holes) => {
            let is_gone = holes.overlap(part);
            servers.remember_list(id, server, holes);
            is_gone
        }
        Known::NoList => {
            servers.remember_list(id, server, Arc::default());
            false
        }
        Known::Failed { .. } => true,
        // A list in a later format is not the server's fault.
        Known::Never(why) => why.kind() == StoreErrorKind::UnknownFormat,
        Known::Nothing => false,
    }
}

/// A question in progress.
struct PendingQuery<'a> {
    servers: &'a Servers,
    question: &'a Question<'a>,
    /// By server.
    known: Vec<Known>,
    /// Servers that were asked, in the order in which reads prefer them.
    order: Vec<usize>,
    began: Instant,
    /// Since when a reachable server has been failing. If all servers are away, that time does not count,
    /// because it says nothing about their lists.
    failing_since: Option<Instant>,
}

impl PendingQuery<'_> {
    fn of(&self, server: usize) -> &Known {
        self.known.get(server).unwrap_or(&Known::Nothing)
    }

    fn has_answered(&self) -> bool {
        self.known.iter().any(Known::has_answered)
    }

    /// Servers that have not reported their holes, and may still do so.
    fn open(&self) -> Vec<usize> {
        let has_answered = self.has_answered();
        let is_open = |server: &usize| {
            let may_say = matches!(self.of(*server), Known::Nothing | Known::Failed { .. });
            let is_better = !(has_answered && self.servers.is_distrusted(*server));
            may_say && is_better && !self.question.choice.servers_with_wrong_bytes.contains(server)
        };
        (0..self.known.len()).filter(is_open).collect()
    }

    /// Asks all servers that may be asked now; distrusted ones only if no other gave a list.
    fn ask_available_servers(&mut self) {
        let now = Instant::now();
        for (server, known) in self.known.iter_mut().enumerate() {
            // The server is asked when it is back, however long that takes.
            if let Known::Failed { again_at, .. } = known
                && !self.servers.is_there(server)
            {
                *again_at = None;
            }
        }
        for distrusted in [false, true] {
            if distrusted && self.has_answered() {
                break;
            }
            let open = self.open();
            let is_out = |server: usize| {
                !open.contains(&server)
                    || self.servers.is_distrusted(server) != distrusted
                    || self.of(server).again_at().is_some_and(|at| at > now)
            };
            let mut excluded: Vec<bool> = (0..self.known.len()).map(is_out).collect();
            let mut due = Vec::new();
            while let Some(server) = self.servers.choose(0, &excluded) {
                if let Some(is_out) = excluded.get_mut(server) {
                    *is_out = true;
                }
                due.push(server);
            }
            self.ask_each(&due, ask_for_list);
            self.order.extend(due);
        }
        // A 404 for the list does not prove that the server has the whole object; read one byte.
        let has_holes = |known: &Known| matches!(known, Known::Said(holes) if !holes.is_empty());
        if self.known.iter().any(has_holes) {
            let is_unsure = |server: &usize| matches!(self.of(*server), Known::NoList);
            let unsure: Vec<usize> = (0..self.known.len()).filter(is_unsure).collect();
            self.ask_each(&unsure, ask_for_a_byte);
        }
    }

    /// Asks several servers concurrently, so that it takes only as long as the slowest of them: the caller
    /// may be a relay with waiting clients.
    fn ask_each(&mut self, due: &[usize], ask: fn(&Servers, &Question<'_>, usize, u32) -> Known) {
        let Some((first, others)) = due.split_first() else { return };
        let (servers, question) = (self.servers, self.question);
        let times: Vec<u32> = self.known.iter().map(Known::times).collect();
        let ask = &|server: usize| ask(servers, question, server, times.get(server).copied().unwrap_or(0));
        let answers: Vec<(usize, Known)> = std::thread::scope(|scope| {
            let start = |server: usize| {
                let thread = std::thread::Builder::new().name(format!("holes-{server}"));
                (server, thread.spawn_scoped(scope, move || ask(server)).ok())
            };
            let started: Vec<_> = others.iter().copied().map(start).collect();
            let answer = |(server, thread): (usize, Option<ScopedJoinHandle<'_, Known>>)| {
                // If no thread can be started, this thread asks.
                (server, thread.and_then(|thread| thread.join().ok()).unwrap_or_else(|| ask(server)))
            };
            let first = (*first, ask(*first));
            std::iter::once(first).chain(started.into_iter().map(answer)).collect()
        });
        for (server, answer) in answers {
            if let Some(known) = self.known.get_mut(server) {
                *known = answer;
            }
        }
    }

    /// Until when to wait for servers that were left out. `None`: do not wait any longer.
    fn waits_until(&mut self, waits: ListWait) -> Option<Instant> {
        let (now, has_answered) = (Instant::now(), self.has_answered());
        let mut open = self.open();
        match waits {
            ListWait::None => return None,
            ListWait::ForProbe if has_answered => return None,
            ListWait::ForProbe => return self.busy_until(now).or_else(|| self.probed_until(now)),
            // Each server is waited for only once.
            ListWait::ForBetter if has_answered => {
                open.retain(|server| !self.servers.is_without_lists(*server))
            }
            ListWait::ForBetter => {}
        }
        if open.is_empty() {
            return None;
        }
        let is_failing = open.iter().any(|server| self.servers.is_there(*server));
        self.failing_since = self.failing_since.filter(|_| is_failing).or(Some(now).filter(|_| is_failing));
        let others_are_wrong = !self.question.choice.servers_with_wrong_bytes.is_empty()
            || self.known.iter().any(Known::is_wrong);
        let since = if has_answered || others_are_wrong { Some(self.began) } else { self.failing_since };
        let until = since.map(|since| since + self.servers.limits.wait_for_better);
        if until.is_some_and(|until| now >= until) {
            if has_answered {
                open.iter().for_each(|server| self.servers.has_lists(*server, false));
            }
            return None;
        }
        let again_at =
            open.iter().filter_map(|server| self.of(*server).again_at()).filter(|at| *at > now).min();
        // `Servers::wait` also returns when a server's state changes.
        Some([until, again_at].into_iter().flatten().min().unwrap_or(now + WAIT_MAX))
    }

    /// Until when to wait for a busy server whose answer is needed.
    fn busy_until(&self, now: Instant) -> Option<Instant> {
        let is_busy = |server: &usize| self.of(*server).is_busy() || self.servers.is_busy(*server);
        let busy: Vec<usize> = self.open().into_iter().filter(is_busy).collect();
        let while_busy = &self.servers.while_busy;
        let longest = while_busy.until(self.began);
        let is_over =
            busy.is_empty() || !self.question.waits_while_busy || longest.is_some_and(|at| now >= at);
        if is_over || !while_busy.report(&self.servers.status().reasons()) {
            return None;
        }
        let again_at =
            busy.iter().filter_map(|server| self.of(*server).again_at()).filter(|at| *at > now).min();
        [longest, again_at, Some(now + WAIT_MAX)].into_iter().flatten().min()
    }

    /// Until when to wait for a server that failed just now, and may still be reachable.
    fn probed_until(&self, now: Instant) -> Option<Instant> {
        let longest = self.began + self.servers.limits.probe_after.saturating_mul(PROBE_WAITS);
        let is_first = |server: &usize| self.of(*server).times() < FAILURES_MAX;
        let open = self.open();
        let again_at = open.iter().copied().filter(is_first).filter_map(|server| self.of(server).again_at());
        if let Some(at) = again_at.filter(|at| *at > now).min() {
            return Some(at).filter(|at| *at <= longest);
        }
        let is_probed = open.iter().any(|server| self.servers.is_probed_soon(*server));
        Some(longest).filter(|_| is_probed && now < longest)
    }

    fn into_hole_lists(self) -> Result<HoleLists, StoreError> {
        if !self.has_answered() {
            return Err(self.why_not());
        }
        let mut lists: Vec<(usize, Arc<Holes>)> = Vec::new();
        for server in &self.order {
            let holes = match self.of(*server) {
                Known::Said(holes) => Arc::clone(holes),
                Known::NoList => Arc::default(),
                Known::Nothing | Known::Never(_) | Known::Failed { .. } => continue,
            };
            if !lists.iter().any(|(before, _)| before == server) {
                lists.push((*server, holes));
            }
        }
        Ok(lists.into_iter().collect())
    }

    /// The error if no server gave a list. The answer of a reachable server has precedence over the absence
    /// of another one.
    fn why_not(&self) -> StoreError {
        let is_open = !self.open().is_empty();
        let weight = |why: &&StoreError| match why.kind() {
            StoreErrorKind::Unreachable => 1,
            // A server that is away may have a list that can be read here.
            StoreErrorKind::UnknownFormat if is_open => 0,
            StoreErrorKind::UnknownFormat => 4,
            StoreErrorKind::Damaged => 3,
            _ => 2,
        };
        let why = self.known.iter().filter_map(Known::why).max_by_key(weight).filter(|why| weight(why) > 0);
        let why = why.cloned().unwrap_or_else(|| {
            let (id, reasons) = (self.question.id, self.servers.status().reasons());
            let why = format!("cannot get the list holes/{id}, because no server can be asked: {reasons}");
            StoreError::new(StoreErrorKind::Unreachable, why)
        });
        if why.kind() == StoreErrorKind::Unreachable
            && !self.question.choice.servers_with_wrong_bytes.is_empty()
        {
            let why = format!("{why}; the other servers have wrong bytes of this object");
            return StoreError::new(StoreErrorKind::Damaged, why);
        }
        why
    }
}

/// Asks one server, without a second one if it is late. `Err(None)`: the store was closed.
fn fetch(
    servers: &Servers,
    question: &Question<'_>,
    (path, wanted): (&str, Wanted),
    server: usize,
    bypass_caches: bool,
) -> Result<(Answer, (Duration, Duration)), Option<Fault>> {
    let choice = ServerChoice { alone: true, reading: (question.reading)(server), ..ServerChoice::default() };
    let short_timeout = question.short_timeout;
    let ask = Ask {
        path,
        wanted,
        object: None,
        retrying: false,
        waits_while_busy: false,
        optional: true,
        short_timeout,
        choice,
    };
    let bypass_caches = vec![bypass_caches; servers.list.len()];
    let mut token_renewed = false;
    loop {
        let fault = match attempt(servers, &ask, server, &[], &bypass_caches) {
            Attempt::Closed => return Err(None),
            Attempt::Answer { answer, times, .. } => return Ok((answer, times)),
            Attempt::Failed(faults) => faults.into_iter().next().map_or(Fault::Stale, |(_, fault)| fault),
        };
        let is_refused = matches!(fault, Fault::Refused(_));
        if !is_refused || std::mem::replace(&mut token_renewed, true) || !servers.renew_token() {
            return Err(Some(fault));
        }
    }
}

/// Asks a server, which has failed `times` times, for its list, and once more with caches bypassed if the
/// list is invalid.
fn ask_for_list(servers: &Servers, question: &Question<'_>, server: usize, times: u32) -> Known {
    let path = format!("holes/{}", question.id);
    let wanted = Wanted::Whole { max_bytes: HOLES_MAX_BYTES };
    let mut bypass_caches = question.choice.bypass_caches;
    loop {
        let (body, took) = match fetch(servers, question, (&path, wanted), server, bypass_caches) {
            Ok((answer, took)) => (answer.body, took),
            Err(Some(fault @ (Fault::Missing | Fault::Odd(_) | Fault::Wrong(_)))) => {
                tracing::debug!(server, answer = %fault, "the server gave no list of holes: assuming that it has all of the object");
                return Known::NoList;
            }
            Err(fault) => return failed(servers, &path, (server, times), fault),
        };
        let why = match Holes::decode("at this server", &body, question.len_bytes) {
            Ok(holes) => {
                servers.answered(server, u64::try_from(body.len()).unwrap_or(u64::MAX), took);
                servers.has_lists(server, true);
                return Known::Said(Arc::new(holes));
            }
            Err(why) => why,
        };
        // The length of the object may have come from another server, and may be wrong.
        if why.kind() == StoreErrorKind::Damaged && !is_of_another_length(&body) {
            if !std::mem::replace(&mut bypass_caches, true) {
                continue;
            }
            servers.gave_wrong_bytes(server, &path, &why);
        }
        return Known::Never(no_list(servers, &path, server, why.kind(), &why));
    }
}

/// Whether `list` is a valid list of holes for some other length of the object.
fn is_of_another_length(list: &[u8]) -> bool {
    let len_bytes = list.get(16..).and_then(|rest| rest.first_chunk::<8>());
    len_bytes.is_some_and(|len_bytes| Holes::decode("", list, u64::from_le_bytes(*len_bytes)).is_ok())
}

/// Whether a server without a list has the object.
fn ask_for_a_byte(servers: &Servers, question: &Question<'_>, server: usize, times: u32) -> Known {
    let path = format!("objects/{}", question.id);
    let wanted = Wanted::Range { first: 0, len: 1, total: Some(question.len_bytes) };
    match fetch(servers, question, (&path, wanted), server, question.choice.bypass_caches) {
        Ok(_) => Known::Said(Arc::default()),
        Err(Some(fault @ (Fault::Missing | Fault::Odd(_) | Fault::Wrong(_)))) => {
            Known::Never(no_list(servers, &path, server, StoreErrorKind::NotFound, &fault))
        }
        Err(fault) => failed(servers, &path, (server, times), fault),
    }
}

/// What a failed request means for `Known`. `None`: the store was closed.
fn failed(servers: &Servers, path: &str, (server, times): (usize, u32), fault: Option<Fault>) -> Known {
    let (kind, pause) = match &fault {
        Some(Fault::Busy(Busy { wait, .. })) => {
            (StoreErrorKind::Unreachable, Some(servers.busy_for(times).max(*wait)))
        }
        Some(Fault::Gone(_) | Fault::Stale) => (StoreErrorKind::Unreachable, None),
        _ => (StoreErrorKind::Io, Some(servers.pause_after(times))),
    };
    let why = match &fault {
        None => closed(),
        Some(fault) => {
            tracing::debug!(server, answer = %fault, what = path, "a server gave no list of holes");
            if pause.is_none() {
                servers.failed(server, path, fault);
            }
            no_list(servers, path, server, kind, fault)
        }
    };
    let is_busy = matches!(fault, Some(Fault::Busy(Busy { says_when: true, .. })));
    let again_at = pause.map(|pause| Instant::now() + pause);
    Known::Failed { why, times: times.saturating_add(1), again_at, is_busy }
}

fn no_list(
    servers: &Servers,
    path: &str,
    server: usize,
    kind: StoreErrorKind,
    why: &dyn std::fmt::Display,
) -> StoreError {
    let url = servers.list.get(server).map(|server| server.url.to_string()).unwrap_or_default();
    StoreError::new(kind, format!("no server gives {path}: {url}: {why}"))
}
