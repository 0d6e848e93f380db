//! Reads a file or a range from the servers: chooses a server, asks another one if the answer is late, fails
//! or does not pass the check, and waits if no server is left.
//!
//! Terms of the table: a server is *down* (not asked until a probe succeeds), *put aside* (the same, after an
//! unexpected answer) or *distrusted* (asked only if no other is left); see `health.rs`. It is *excluded* if
//! this read does not ask it again. It is *busy* if it answers 429, 502, 503 or 504. It *breaks off* if its
//! answer ends early. A *hole* is a range of an object whose bytes a server deleted. A *probe* requests the
//! file `store`, which each server of a store has. "Uncached" requests bypass HTTP caches.
//!
//! | the server | in this read | in other reads |
//! |---|---|---|
//! | does not have the file (404) | if no other server has it, the server is asked once more, uncached; then not again for [`Limits::wait_for_better`](crate::limits::Limits::wait_for_better). Before "not found" is returned, and before the read waits, a probe checks that the server has a store at all | no effect |
//! | has the file with another length | as for 404 | no effect |
//! | sends wrong bytes | 1st time: asked again, uncached. 2nd time, for a range of an object: its list of holes is requested, then it is asked again. Then it is excluded | it is distrusted |
//! | sends wrong bytes of a range in one of its holes, or cannot say whether it is | it is asked once more; then it counts as a server without the range | readers of the object ask other servers first |
//! | has reported a hole in the range before | reads without a check ask it only if all other servers answer that they do not have the range | no effect |
//! | breaks off, or answers with 5xx | it is asked again after a successful probe | it is down until then |
//! | sends another answer, such as 403 or a redirect | it is asked again after a successful probe | it is put aside until then |
//! | breaks off or sends such an answer again after a probe | it is asked again after a pause. After three such failures, if it gives the file `store` uncached, only this file is bad, and the server is excluded. If not, it is down and the read waits | for a minute, reads of the same file ask it only twice |
//! | refuses the token (401) | it is asked once more with the present content of the token file; then as for 403 | it is put aside |
//! | cannot be reached, is busy, or is a proxy that cannot reach its own server (502, 504) | it is asked again when it is back | it is down |
//! | is busy, and says when to retry | reads that do not wait for servers wait for it, within a limit | it is down |
//! | is busy again after a probe | it is asked again at the time it gave | no effect |

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use headwater_store::{Check, Hash, StoreError, StoreErrorKind, Waiting};

use crate::attempt::{Attempt, attempt};
use crate::blame::ServerChoice;
use crate::holes::is_gone_there;
use crate::probe;
use crate::servers::{Servers, SuspendedRead, WAIT_MAX};
use crate::transfer::{Busy, Fault, Wanted};

/// After this many failures in one read, a server that breaks off or sends unexpected answers is excluded, if
/// at least [`Limits::wait_for_better`](crate::limits::Limits::wait_for_better) has passed since the first
/// one.
const BREAKS_MAX: u32 = 3;
/// The longest time for which a read that does not wait for servers waits for the probe of a server that
/// broke off, as a multiple of the pause before the first probe.
pub(crate) const PROBE_WAITS: u32 = 10;

/// A request for a file or a range of it.
pub(crate) struct Ask<'a> {
    /// The path below the servers' base URLs.
    pub path: &'a str,
    pub wanted: Wanted,
    /// The object to which the range belongs. It is needed to ask for holes.
    pub object: Option<Hash>,
    /// Whether to wait for a server when none is left.
    pub retrying: bool,
    /// If it is not retrying, whether to wait for busy servers, for as long as [`Servers::while_busy`] says.
    pub waits_while_busy: bool,
    /// Whether a good server may lack this file, and may then send unexpected answers.
    pub optional: bool,
    /// Halves the stall timeout, because the caller has clients of its own, which wait no longer than the
    /// caller.
    pub short_timeout: bool,
    pub choice: ServerChoice,
}

impl Ask<'_> {
    /// The stall timeout: a server that sends nothing for this long is down.
    pub(crate) fn stall(&self, servers: &Servers) -> Duration {
        if self.short_timeout { servers.limits.stall / 2 } else { servers.limits.stall }
    }
}

/// The result of a read.
pub(crate) struct Answer {
    pub body: Vec<u8>,
    /// The length of the whole file, as the server reported it, if a range was requested.
    pub total: Option<u64>,
    /// The server that sent the body.
    pub server: usize,
}

/// Why a server has no good bytes, although it answers.
enum Verdict {
    /// The server does not have it, and is not asked again before `again_at` while others may have it.
    Missing {
        again_at: Instant,
        /// Whether a probe found that the server has a store, so that its directory is not merely missing.
        is_sure: bool,
        /// The server's reason, if it says more than that the file is missing.
        why: Option<String>,
        /// The server has other parts of the same object, and deleted this one.
        is_given_back: bool,
    },
    Wrong(StoreError),
    /// The server reported a hole in the range before this read.
    GivenBack,
}

/// The results of asking one server in one read.
#[derive(Default)]
struct AttemptResult {
    verdict: Option<Verdict>,
    breaks: Option<Breaks>,
    /// The answer was wrong or missing, perhaps because of a cache in between: requests bypass caches.
    bypass_caches: bool,
    /// Whether the wrong range is, or may be, in a hole of the server. After that, the server is asked once
    /// more: a relay knows the holes of its servers by then, and asks those that have the range.
    gave_back: Option<bool>,
    /// The server refused the token, and was asked once more with the new content of the token file.
    token_renewed: bool,
    /// The server was busy, and is asked again at this time.
    busy_until: Option<Instant>,
    /// The server itself gave that time.
    says_when: bool,
    /// How often the server was busy.
    busy_times: u32,
}

/// Counts how often a server broke off or sent an unexpected answer.
struct Breaks {
    count: u32,
    first: Instant,
    again_at: Instant,
}

impl AttemptResult {
    fn lacks(&mut self, servers: &Servers, why: Option<String>) {
        let again_at = Instant::now() + servers.limits.wait_for_better;
        self.verdict = Some(Verdict::Missing { again_at, is_sure: false, why, is_given_back: false });
    }

    fn has_given_back(&mut self, servers: &Servers) {
        let again_at = Instant::now() + servers.limits.wait_for_better;
        let why = Some("it was deleted there, because no version on that server needs it".to_owned());
        self.verdict = Some(Verdict::Missing { again_at, is_sure: false, why, is_given_back: true });
    }

    /// Whether the server has other parts of the same object, and deleted this one.
    fn is_given_back(&self) -> bool {
        matches!(self.verdict, Some(Verdict::GivenBack | Verdict::Missing { is_given_back: true, .. }))
    }

    /// Whether the server answers, and its bytes are known to be wrong.
    fn is_wrong(&self) -> bool {
        matches!(self.verdict, Some(Verdict::Wrong(_) | Verdict::GivenBack))
    }

    /// If the server does not have it: when to ask again.
    fn missing_until(&self) -> Option<Instant> {
        match self.verdict {
            Some(Verdict::Missing { again_at, .. }) => Some(again_at),
            _ => None,
        }
    }

    fn is_judged(&self) -> bool {
        self.verdict.is_some()
    }

    /// When the server can be asked again, if that is later than `now`.
    fn paused_until(&self, now: Instant) -> Option<Instant> {
        let again_at = self.breaks.as_ref().map(|breaks| breaks.again_at).max(self.busy_until);
        again_at.filter(|at| *at > now && !self.is_judged())
    }

    /// Whether the server can be asked only later, because it is busy and said so.
    fn is_busy(&self, now: Instant) -> bool {
        self.says_when && self.busy_until.is_some_and(|at| at > now)
    }

    /// Whether the request fails although the server is available.
    fn is_there(&self) -> bool {
        self.breaks.as_ref().is_some_and(|breaks| breaks.count > 1)
    }

    fn failed(&mut self, servers: &Servers, ask: &Ask<'_>, server: usize, fault: Fault) {
        match fault {
            Fault::Missing => self.lacks(servers, None),
            Fault::Odd(why) | Fault::Wrong(why) if ask.optional => self.lacks(servers, Some(why)),
            // The server may have the file, and other reads are not affected.
            Fault::Refused(why) if ask.optional => {
                self.verdict = Some(Verdict::Wrong(StoreError::new(StoreErrorKind::Io, why)));
            }
            Fault::Wrong(why) => self.cannot_give(servers, ask, server, why),
            Fault::Broke(_) | Fault::Odd(_) | Fault::Refused(_) => self.broke(servers, ask, server, fault),
            Fault::Busy(Busy { wait, says_when, .. }) => {
                self.says_when = says_when;
                // The server behind a proxy may have been away, which may be why the answer broke off.
                self.breaks = None;
                // A server that says "retry at once" again and again is asked more rarely.
                let wait = wait.max(servers.busy_for(self.busy_times));
                self.busy_times = self.busy_times.saturating_add(1);
                match self.busy_until.replace(Instant::now() + wait) {
                    None => servers.failed(server, ask.path, &fault),
                    Some(_) => servers.cannot_give_now(server, ask.path),
                }
            }
            Fault::Gone(_) | Fault::Stale => {
                // The server was gone in between, which may be why the answer broke off.
                (self.breaks, self.busy_until, self.busy_times) = (None, None, 0);
                servers.failed(server, ask.path, &fault);
            }
        }
    }

    /// Handles a server that broke off, or sent an unexpected answer.
    fn broke(&mut self, servers: &Servers, ask: &Ask<'_>, server: usize, fault: Fault) {
        let now = Instant::now();
        let has_failed_file = servers.has_failed_file(server, ask.path);
        let Some(breaks) = &mut self.breaks else {
            self.breaks = Some(Breaks { count: 1, first: now, again_at: now });
            if let Some(breaks) = self.breaks.as_mut().filter(|_| has_failed_file) {
                // Asks once more, in case the server is just being restarted. Other reads continue.
                breaks.again_at = now + servers.pause_after(0);
                return;
            }
            return servers.failed(server, ask.path, &fault);
        };
        // The server has answered a probe since, so it is available for all reads except this one.
        breaks.count = breaks.count.saturating_add(1);
        // Time in which the server was gone says nothing about its contents.
        let since = Some(breaks.first).max(servers.back_at(server));
        let is_long = since.is_none_or(|since| now.duration_since(since) >= servers.limits.wait_for_better);
        if has_failed_file || (breaks.count >= BREAKS_MAX && is_long) {
            // A cache may have answered the probe while the server behind it is away: then reads wait.
            if let Err(fault) = probe::ask(servers, server, true) {
                self.breaks = None;
                return servers.failed(server, "store", &probe::no_store(fault));
            }
            servers.note_failed_file(server, ask.path);
            let why = format!("{fault}; this happened {} times", breaks.count);
            return self.cannot_give(servers, ask, server, why);
        }
        breaks.again_at = now + servers.pause_after(breaks.count);
    }

    fn cannot_give(&mut self, servers: &Servers, ask: &Ask<'_>, server: usize, why: String) {
        servers.cannot_give(server, ask.path, &why);
        self.verdict = Some(Verdict::Wrong(StoreError::new(StoreErrorKind::Damaged, why)));
    }
}

/// Reads until a server sends bytes that `check` accepts.
pub(crate) fn read(servers: &Servers, ask: &Ask<'_>, check: &mut Check<'_>) -> Result<Answer, StoreError> {
    let mut reading = Reading::new(servers, ask);
    loop {
        match reading.go_on(servers, ask, check)? {
            Step::Read(answer) => return Ok(answer),
            Step::Waits(until) => servers.wait(until),
        }
    }
}

/// As [`read`], without occupying a thread while it waits. Returns `None` if it waits; the read continues
/// when the call is repeated with the same `waiting`.
pub(crate) fn read_or_wait(
    servers: &Arc<Servers>,
    ask: &Ask<'_>,
    check: &mut Check<'_>,
    waiting: &mut Waiting,
) -> Result<Option<Answer>, StoreError> {
    let mut reading = match waiting.end::<(Reading, SuspendedRead)>() {
        Some((reading, _)) => reading,
        None => Reading::new(servers, ask),
    };
    loop {
        // Taken before the servers are checked, so that later changes are noticed.
        let seen = servers.changes();
        let until = match reading.go_on(servers, ask, check)? {
            Step::Read(answer) => return Ok(Some(answer)),
            Step::Waits(until) => until,
        };
        let Some(suspended) = servers.suspend(until) else { continue };
        let (theirs, until) = (Arc::clone(servers), suspended.until);
        waiting.begin((reading, suspended), move |now| now >= until || theirs.changes() != seen);
        return Ok(None);
    }
}

/// A read in progress: the servers that were asked, and the results.
struct Reading {
    started: Instant,
    tried: Vec<AttemptResult>,
    once_more: Option<usize>,
    failed_before: bool,
    probed_until: Option<Instant>,
    better_until: Option<Instant>,
    waiting_since: Option<Instant>,
    /// Since when the read waits only for busy servers.
    busy_since: Option<Instant>,
    /// The read has waited, so servers without the file may be asked again.
    has_waited: bool,
}

enum Step {
    Read(Answer),
    /// No server is left now. The read continues when the state of a server has changed, or at this time.
    Waits(Option<Instant>),
}

impl Reading {
    fn new(servers: &Servers, ask: &Ask<'_>) -> Self {
        let before = |index| {
            let is_excluded = ask.choice.servers_with_wrong_bytes.contains(&index);
            let given_back = || ask.choice.without.contains(&index).then_some(Verdict::GivenBack);
            is_excluded.then(|| Verdict::Wrong(wrong_as_a_whole())).or_else(given_back)
        };
        let bypass_caches = ask.choice.bypass_caches;
        let before =
            |index| AttemptResult { verdict: before(index), bypass_caches, ..AttemptResult::default() };
        Self {
            started: Instant::now(),
            tried: (0..servers.list.len()).map(before).collect(),
            once_more: None,
            failed_before: false,
            probed_until: None,
            better_until: None,
            waiting_since: None,
            busy_since: None,
            has_waited: false,
        }
    }

    /// Continues until the read is done, fails, or waits.
    fn go_on(&mut self, servers: &Servers, ask: &Ask<'_>, check: &mut Check<'_>) -> Result<Step, StoreError> {
        let outcome = self.ask_servers(servers, ask, check);
        if !matches!(outcome, Ok(Step::Waits(_))) {
            servers.counting.read_took(self.started.elapsed());
        }
        outcome
    }

    fn ask_servers(
        &mut self,
        servers: &Servers,
        ask: &Ask<'_>,
        check: &mut Check<'_>,
    ) -> Result<Step, StoreError> {
        let len = ask.wanted.len_bytes();
        loop {
            if servers.is_closed() {
                return Err(self.closed(servers, ask));
            }
            let now = Instant::now();
            if std::mem::take(&mut self.has_waited) {
                let no_more =
                    |tried: &&mut AttemptResult| tried.missing_until().is_some_and(|until| until <= now);
                self.tried.iter_mut().filter(no_more).for_each(|tried| tried.verdict = None);
            }
            let is_out = |tried: &AttemptResult| tried.is_judged() || tried.paused_until(now).is_some();
            let excluded: Vec<bool> = self.tried.iter().map(is_out).collect();
            let bypass_caches: Vec<bool> = self.tried.iter().map(|tried| tried.bypass_caches).collect();
            let Some(first) = self.once_more.take().or_else(|| choose(servers, ask, len, &excluded)) else {
                if let Some(until) = self.no_server_left(servers, ask, &excluded, now)? {
                    return Ok(Step::Waits(until));
                }
                continue;
            };
            if let Some(since) = self.waiting_since.take() {
                servers.counting.waited(since.elapsed());
            }
            let asked = attempt(servers, ask, first, &excluded, &bypass_caches);
            if let Some(answer) = self.judge(servers, ask, check, asked) {
                return Ok(Step::Read(answer));
            }
        }
    }

    /// The error if the store was closed. It names the servers that failed, because they are why the read was
    /// still in progress.
    fn closed(&self, servers: &Servers, ask: &Ask<'_>) -> StoreError {
        let mut message = format!("the store was closed during a read of {}", ask.path);
        if self.failed_before {
            let status = servers.status();
            let said = status.servers.iter().filter_map(|server| Some((&server.url, server.why.as_ref()?)));
            said.for_each(|(url, why)| message.push_str(&format!("; {url}: {why}")));
        }
        StoreError::new(StoreErrorKind::Io, message)
    }

    /// No server can be asked now. Returns `None` if a server can be asked after all, otherwise until when to
    /// wait (`Some(None)`: until the state of a server changes).
    fn no_server_left(
        &mut self,
        servers: &Servers,
        ask: &Ask<'_>,
        excluded: &[bool],
        now: Instant,
    ) -> Result<Option<Option<Instant>>, StoreError> {
        if ask_past_caches(ask, &mut self.tried) || self.may_read_bytes_in_holes(servers, ask) {
            return Ok(None);
        }
        if !ask.retrying {
            if let Some(until) = self.busy_until(servers, ask, now)? {
                self.waiting_since.get_or_insert_with(Instant::now);
                return Ok(Some(Some(until)));
            }
            // Only a reachable server proves that the bytes do not exist.
            let longest = servers.limits.probe_after.saturating_mul(PROBE_WAITS);
            if servers.wait_for_probe(excluded, *self.probed_until.get_or_insert(now + longest)) {
                return Ok(None);
            }
            // A probe may have found a server up again since it was looked for.
            if choose(servers, ask, ask.wanted.len_bytes(), excluded).is_some() {
                return Ok(None);
            }
            // A caller that gets "not found" may discard what it knows about the file.
            if !ask.optional && self.tried.iter().all(|tried| tried.missing_until().is_some()) {
                look_for_stores(servers, &mut self.tried);
            }
            return Err(hopeless(servers, ask, &self.tried));
        }
        look_for_stores(servers, &mut self.tried);
        if self.tried.iter().any(AttemptResult::is_wrong) {
            // A server that is away may have better bytes, but the wait is limited.
            self.better_until.get_or_insert_with(|| now + servers.limits.wait_for_better);
        }
        if self.tried.iter().all(AttemptResult::is_judged)
            || self.better_until.is_some_and(|until| now >= until)
        {
            return Err(hopeless(servers, ask, &self.tried));
        }
        self.waiting_since.get_or_insert_with(Instant::now);
        self.has_waited = true;
        Ok(Some(self.wait_until(servers, ask)))
    }

    /// Until when a read that does not wait for unreachable servers waits for busy ones.
    fn busy_until(
        &mut self,
        servers: &Servers,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Result<Option<Instant>, StoreError> {
        let is_busy = |(server, tried): (usize, &AttemptResult)| {
            !tried.is_judged() && (tried.is_busy(now) || servers.is_busy(server))
        };
        if !ask.waits_while_busy || !self.tried.iter().enumerate().any(is_busy) {
            return Ok(None);
        }
        let longest = servers.while_busy.until(*self.busy_since.get_or_insert(now));
        if longest.is_some_and(|at| now >= at) {
            return Ok(None);
        }
        let why = servers.status().reasons();
        if !servers.while_busy.report(&why) {
            let message = format!("stopped while waiting for {}: {why}", ask.path);
            return Err(StoreError::new(StoreErrorKind::Io, message));
        }
        let again_at = self.tried.iter().filter_map(|tried| tried.paused_until(now)).min();
        Ok([longest, again_at, Some(now + WAIT_MAX)].into_iter().flatten().min())
    }

    /// Whether to ask servers with a hole in the range after all: all other servers have answered that they
    /// do not have the range. A server that fails may have it.
    fn may_read_bytes_in_holes(&mut self, servers: &Servers, ask: &Ask<'_>) -> bool {
        let is_left_out = |tried: &AttemptResult| matches!(tried.verdict, Some(Verdict::GivenBack));
        let lack_it = |tried: &[AttemptResult]| {
            tried.iter().all(|tried| is_left_out(tried) || tried.missing_until().is_some())
        };
        if !ask.choice.or_bytes_in_holes || !self.tried.iter().any(is_left_out) || !lack_it(&self.tried) {
            return false;
        }
        look_for_stores(servers, &mut self.tried);
        if !lack_it(&self.tried) {
            return false;
        }
        self.tried.iter_mut().filter(|tried| is_left_out(tried)).for_each(|tried| tried.verdict = None);
        true
    }

    /// Until when to wait for servers that are away, or for one that should be asked again. They may have
    /// bytes that the other servers lack.
    fn wait_until(&self, servers: &Servers, ask: &Ask<'_>) -> Option<Instant> {
        let now = Instant::now();
        let missing_until = self.tried.iter().filter_map(AttemptResult::missing_until).min();
        if missing_until.is_some() {
            servers.waits_for_others(ask.path);
        }
        let again_at = self.tried.iter().filter_map(|tried| tried.paused_until(now)).min();
        [self.better_until, again_at, missing_until].into_iter().flatten().min()
    }

    /// Evaluates an attempt, and returns the answer if it is good.
    fn judge(
        &mut self,
        servers: &Servers,
        ask: &Ask<'_>,
        check: &mut Check<'_>,
        asked: Attempt,
    ) -> Option<Answer> {
        match asked {
            Attempt::Closed => {}
            Attempt::Answer { server, answer, times, fault, faults } => match check(&answer.body) {
                Ok(()) => {
                    servers.answered(server, u64::try_from(answer.body.len()).unwrap_or(u64::MAX), times);
                    self.failed_before |= !faults.is_empty();
                    if let Some(fault) = fault.filter(|_| !ask.optional) {
                        servers.failed(server, ask.path, &fault);
                    }
                    for (other, fault) in &faults {
                        self.failed_beside(servers, ask, *other, fault);
                    }
                    if self.failed_before {
                        servers.counting.failovers.fetch_add(1, Ordering::Relaxed);
                    }
                    return Some(answer);
                }
                Err(why) => {
                    self.failed_before = true;
                    for (other, fault) in faults {
                        self.failed(servers, ask, other, fault);
                    }
                    if is_past_caches(ask, &mut self.tried, server) {
                        self.once_more = Some(server);
                        return None;
                    }
                    if let Some(tried) = self.tried.get_mut(server) {
                        match tried.gave_back {
                            None if ask.object.is_some() => {
                                tried.gave_back = Some(is_in_hole(servers, ask, server));
                                // The list that this server gave as a relay may be outdated because an answer
                                // was lost: then other servers are asked first.
                                self.once_more = Some(server).filter(|server| servers.is_there(*server));
                                return None;
                            }
                            Some(true) => {
                                tried.has_given_back(servers);
                                return None;
                            }
                            None | Some(false) => {}
                        }
                    }
                    if !ask.optional {
                        servers.gave_wrong_bytes(server, ask.path, &why);
                    }
                    if let Some(tried) = self.tried.get_mut(server) {
                        tried.verdict = Some(Verdict::Wrong(why));
                    }
                }
            },
            Attempt::Failed(faults) => {
                self.failed_before = true;
                for (server, fault) in faults {
                    self.failed(servers, ask, server, fault);
                }
            }
        }
        None
    }

    /// Records the fault of a server if another one has given a good answer, so that no server is asked
    /// again.
    fn failed_beside(&self, servers: &Servers, ask: &Ask<'_>, server: usize, fault: &Fault) {
        // The fault affects only this file, and may be the fault of a cache.
        let is_of_file = matches!(fault, Fault::Missing | Fault::Wrong(_) | Fault::Stale);
        // The server was down for this reason before, and has answered a probe since, so it is available for
        // everything else.
        let again = |tried: &AttemptResult| tried.breaks.is_some() || tried.busy_until.is_some();
        let is_known = self.tried.get(server).is_some_and(again) || servers.has_failed_file(server, ask.path);
        if !(ask.optional || is_of_file || is_known) {
            servers.failed(server, ask.path, fault);
        }
    }

    fn failed(&mut self, servers: &Servers, ask: &Ask<'_>, server: usize, fault: Fault) {
        if (matches!(fault, Fault::Wrong(_)) && is_past_caches(ask, &mut self.tried, server))
            || (matches!(fault, Fault::Refused(_)) && may_take_token(servers, &mut self.tried, server))
        {
            self.once_more = Some(server);
        } else if let Some(tried) = self.tried.get_mut(server) {
            tried.failed(servers, ask, server, fault);
        }
    }
}

/// Returns whether to ask a server that sent wrong bytes once more, bypassing caches.
fn is_past_caches(ask: &Ask<'_>, tried: &mut [AttemptResult], server: usize) -> bool {
    let first = |tried: &mut AttemptResult| !std::mem::replace(&mut tried.bypass_caches, true);
    let is_first = !ask.optional && tried.get_mut(server).is_some_and(first);
    if is_first {
        tracing::info!(
            server,
            what = ask.path,
            "a server sent wrong bytes: it is asked once more, bypassing caches"
        );
    }
    is_first
}

/// Whether a server's bytes were wrong because the range is in one of its holes, or may be, if the server
/// cannot say so now. The server may have deleted the range since it was last asked.
fn is_in_hole(servers: &Servers, ask: &Ask<'_>, server: usize) -> bool {
    let (Some(object), Wanted::Range { first, len, total: Some(total) }) = (ask.object, ask.wanted) else {
        return false;
    };
    is_gone_there(servers, ask, (object, total), &(first..first.saturating_add(len)), server)
}

/// Returns whether to ask servers once more, bypassing caches, if no server has the file. A cache may
/// remember that the file, or its server, was missing.
fn ask_past_caches(ask: &Ask<'_>, tried: &mut [AttemptResult]) -> bool {
    let mut is_any = false;
    for tried in tried.iter_mut().filter(|tried| !ask.optional && tried.missing_until().is_some()) {
        if !std::mem::replace(&mut tried.bypass_caches, true) {
            tried.verdict = None;
            is_any = true;
        }
    }
    is_any
}

/// Returns whether to ask a server that refused the token once more, because the token file may have a new
/// content.
fn may_take_token(servers: &Servers, tried: &mut [AttemptResult], server: usize) -> bool {
    let first = |tried: &mut AttemptResult| !std::mem::replace(&mut tried.token_renewed, true);
    tried.get_mut(server).is_some_and(first) && servers.renew_token()
}

/// Asks servers without the file for their store: if the directory of a web server is missing, all files are,
/// and may come back.
fn look_for_stores(servers: &Servers, tried: &mut [AttemptResult]) {
    for (server, tried) in tried.iter_mut().enumerate() {
        if let Some(Verdict::Missing { is_sure, .. }) = &mut tried.verdict
            && !*is_sure
        {
            match probe::ask(servers, server, true) {
                Ok(_) => *is_sure = true,
                Err(fault) => {
                    servers.failed(server, "store", &probe::no_store(fault));
                    tried.verdict = None;
                }
            }
        }
    }
}

/// The error for an object whose hash is wrong.
pub(crate) fn wrong_as_a_whole() -> StoreError {
    StoreError::new(StoreErrorKind::Damaged, "the hash of the whole object is not the one in its name")
}

/// Chooses the server to ask. If one server should give all of an object, it is that one while it is
/// available.
pub(crate) fn choose(servers: &Servers, ask: &Ask<'_>, len: u64, excluded: &[bool]) -> Option<usize> {
    let choose = |is_out: &dyn Fn(usize) -> bool| {
        let excluded = excluded.iter().enumerate().map(|(index, out)| *out || is_out(index));
        servers.choose(len, &excluded.collect::<Vec<_>>())
    };
    let the_same = ask.choice.first.and_then(|first| choose(&|index| index != first));
    // Servers that should be asked last are added one by one.
    let last = &ask.choice.last;
    let mut later = (0..=last.len()).map(|added| last.get(added..).unwrap_or_default());
    the_same.or_else(|| later.find_map(|later| choose(&|index| later.contains(&index))))
}

/// The error if no server has it, or none is available.
fn hopeless(servers: &Servers, ask: &Ask<'_>, tried: &[AttemptResult]) -> StoreError {
    let wrong = tried.iter().enumerate().find_map(|(server, tried)| match &tried.verdict {
        Some(Verdict::Wrong(why)) => Some((server, why)),
        _ => None,
    });
    let what = ask.path;
    if let Some((server, why)) = wrong {
        let message = match servers.list.get(server).filter(|_| ask.optional) {
            Some(server) => format!("no server gives {what}: {}: {why}", server.url),
            None => format!("no server has good bytes of {what}: {why}"),
        };
        return StoreError::new(why.kind(), message);
    }
    let status = servers.status();
    let (mut missing, mut others) = (Vec::new(), Vec::new());
    // A caller that waits gets it when these servers are back.
    let mut kind = StoreErrorKind::Io;
    for (server, tried) in status.servers.iter().zip(tried) {
        match &tried.verdict {
            Some(Verdict::GivenBack) => missing.push(format!(
                "{} (it was deleted there, because no version on that server needs it)",
                server.url
            )),
            Some(Verdict::Missing { why: Some(why), .. }) => missing.push(format!("{} ({why})", server.url)),
            Some(_) => missing.push(server.url.clone()),
            None => others.push(format!("{}: {}", server.url, server.why.as_deref().unwrap_or("unknown"))),
        }
        if !tried.is_judged() && !tried.is_there() {
            kind = StoreErrorKind::Unreachable;
        }
    }
    let is_given_back = tried.iter().any(AttemptResult::is_given_back);
    if others.is_empty() {
        let message = format!("there is no {what} at {}", missing.join(", "));
        // If other parts of the object exist, the error is damage to the object, not a missing object.
        let kind = if is_given_back { StoreErrorKind::Damaged } else { StoreErrorKind::NotFound };
        return StoreError::new(kind, message);
    }
    let mut message = format!("no server gives {what}: {}", others.join("; "));
    if !missing.is_empty() {
        message.push_str(&format!("; not at {}", missing.join(", ")));
    }
    if ask.retrying && is_given_back {
        // The read waited as long as for better bytes. With the holes of the available servers the object can
        // still be read.
        kind = StoreErrorKind::Damaged;
    }
    StoreError::new(kind, message)
}
