//! A read: choose a server, ask it, ask another one if it is late or fails, check, and wait when no server is
//! left.
//!
//! | a server | for this read | for all others |
//! |---|---|---|
//! | does not have it | if no server has it, it is asked once more, bypassing caches; then not again soon. Before the answer "not found", and in reads that wait, it is asked whether it has a store at all | nothing |
//! | has it with another length | the same | nothing |
//! | sends wrong bytes | it is asked once more, bypassing caches; for a part of an object once again after it reported the holes there; then not again | it is distrusted |
//! | sends wrong bytes of a part of an object, and reports that part as gone, or cannot report it | it is asked once more; then it counts as not having it | readers of the object ask others first |
//! | reported this part of an object as gone before | reads without a check do not ask it, unless all others answer that they do not have it | nothing |
//! | breaks off, answers with 5xx | it is asked again when a probe was answered | it is down until then |
//! | answers something else, such as 403 or a redirect | it is asked again when a probe was answered | it is put aside until then |
//! | breaks off or answers so again after a probe | it is asked again after a pause. In the end it is given up if it gives the file `store` with caches bypassed; otherwise it is away | for a minute, reads of the same file ask it only twice |
//! | refuses the token | it is asked once more, with the present content of the token file; then as above | it is put aside |
//! | is gone, is busy, does not reach its own source (502, 504) | it is asked again when it is back | it is down |
//! | is busy, and says when to retry | reads that do not wait for servers wait for it, within a limit | it is down |
//! | is busy again after a probe | it is asked again at the time it gave | nothing |

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

/// A server has no good bytes if it breaks off or gives unexpected answers this often in one read, for at
/// least as long as reads wait for better bytes.
const BREAKS_MAX: u32 = 3;
/// A read that does not wait for servers waits for the probe of one that broke off, for at most this many
/// times the pause before the first probe.
pub(crate) const PROBE_WAITS: u32 = 10;

/// What to read.
pub(crate) struct Ask<'a> {
    /// The path below the servers' base URLs.
    pub path: &'a str,
    pub wanted: Wanted,
    /// The object of which it is a part. If the part is gone on a server, other bytes come from there.
    pub object: Option<Hash>,
    /// Whether to wait for a server when none is left.
    pub retrying: bool,
    /// If it is not retrying, whether to wait for busy servers, for as long as [`Servers::while_busy`] says.
    pub waits_while_busy: bool,
    /// Whether a good server may lack this, and may then give unexpected answers.
    pub optional: bool,
    /// Whether the caller has clients of its own, which wait no longer than it would.
    pub hasty: bool,
    pub choice: ServerChoice,
}

impl Ask<'_> {
    /// After how long without a byte the asked server is down.
    pub(crate) fn stall(&self, servers: &Servers) -> Duration {
        if self.hasty { servers.limits.stall / 2 } else { servers.limits.stall }
    }
}

/// The result of a read.
pub(crate) struct Answer {
    pub body: Vec<u8>,
    /// If a part was requested: the length of the whole, as the server reported it.
    pub total: Option<u64>,
    /// The server that gave it.
    pub server: usize,
}

/// Why a server has no good bytes, although it answers.
enum Verdict {
    /// It is missing there, and is not requested again before `again_at` while others may have it.
    Missing {
        again_at: Instant,
        /// Whether the server has its store, and is not one whose directory is gone.
        is_sure: bool,
        /// Its answer, if it says more than that the file is missing.
        why: Option<String>,
        /// It has other parts of the same object.
        is_given_back: bool,
    },
    Wrong(StoreError),
    /// It reported the part as gone before it was asked.
    GivenBack,
}

/// The results of asking one server in one read.
#[derive(Default)]
struct AttemptResult {
    verdict: Option<Verdict>,
    breaks: Option<Breaks>,
    /// Its answer was wrong or missing, perhaps because of a cache in between: it is asked with caches
    /// bypassed.
    past_caches: bool,
    /// Whether the wrong part was in a hole, as the server reported, or may have been. After that it is asked
    /// once more: a server that relays knows the holes of its servers by now, and asks those that have the
    /// part.
    gave_back: Option<bool>,
    /// It refused the token, and was asked once more with the new content of the token file.
    token_renewed: bool,
    /// It was busy, and wants to be asked again at this time.
    busy_until: Option<Instant>,
    /// The server itself gave that time.
    says_when: bool,
    /// How often it was busy.
    busy_times: u32,
}

/// It broke off, or gave an unexpected answer.
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
        let why = Some("its space was given back".to_owned());
        self.verdict = Some(Verdict::Missing { again_at, is_sure: false, why, is_given_back: true });
    }

    /// Whether it has other parts of the same object, and this one is gone.
    fn is_given_back(&self) -> bool {
        matches!(self.verdict, Some(Verdict::GivenBack | Verdict::Missing { is_given_back: true, .. }))
    }

    /// Whether it answers, and its bytes are known to be wrong.
    fn is_wrong(&self) -> bool {
        matches!(self.verdict, Some(Verdict::Wrong(_) | Verdict::GivenBack))
    }

    /// When to ask again a server that does not have it.
    fn missing_until(&self) -> Option<Instant> {
        match self.verdict {
            Some(Verdict::Missing { again_at, .. }) => Some(again_at),
            _ => None,
        }
    }

    fn is_judged(&self) -> bool {
        self.verdict.is_some()
    }

    /// When it can be asked again, if that is later than `now`.
    fn paused_until(&self, now: Instant) -> Option<Instant> {
        let again_at = self.breaks.as_ref().map(|breaks| breaks.again_at).max(self.busy_until);
        again_at.filter(|at| *at > now && !self.is_judged())
    }

    /// Whether it can be asked only later, because it is busy and said so.
    fn is_busy(&self, now: Instant) -> bool {
        self.says_when && self.busy_until.is_some_and(|at| at > now)
    }

    /// Whether it fails for this request although it is available.
    fn is_there(&self) -> bool {
        self.breaks.as_ref().is_some_and(|breaks| breaks.count > 1)
    }

    fn failed(&mut self, servers: &Servers, ask: &Ask<'_>, server: usize, fault: Fault) {
        match fault {
            Fault::Missing => self.lacks(servers, None),
            Fault::Odd(why) | Fault::Wrong(why) if ask.optional => self.lacks(servers, Some(why)),
            // It is unknown whether it has this, and other reads are not affected.
            Fault::Refused(why) if ask.optional => {
                self.verdict = Some(Verdict::Wrong(StoreError::new(StoreErrorKind::Io, why)));
            }
            Fault::Wrong(why) => self.cannot_give(servers, ask, server, why),
            Fault::Broke(_) | Fault::Odd(_) | Fault::Refused(_) => self.broke(servers, ask, server, fault),
            Fault::Busy(Busy { wait, says_when, .. }) => {
                self.says_when = says_when;
                // The source of the server may have been away, which may be why it broke off.
                self.breaks = None;
                // A server that says "at once" again and again is asked more rarely.
                let wait = wait.max(servers.busy_for(self.busy_times));
                self.busy_times = self.busy_times.saturating_add(1);
                match self.busy_until.replace(Instant::now() + wait) {
                    None => servers.failed(server, ask.path, &fault),
                    Some(_) => servers.cannot_give_now(server, ask.path),
                }
            }
            Fault::Gone(_) | Fault::Stale => {
                // It was gone in between, which may be why it broke off.
                (self.breaks, self.busy_until, self.busy_times) = (None, None, 0);
                servers.failed(server, ask.path, &fault);
            }
        }
    }

    /// Handles a server that broke off, or gave an unexpected answer.
    fn broke(&mut self, servers: &Servers, ask: &Ask<'_>, server: usize, fault: Fault) {
        let now = Instant::now();
        let has_failed_file = servers.has_failed_file(server, ask.path);
        let Some(breaks) = &mut self.breaks else {
            self.breaks = Some(Breaks { count: 1, first: now, again_at: now });
            if let Some(breaks) = self.breaks.as_mut().filter(|_| has_failed_file) {
                // Once more, in case it is just being restarted. Other reads continue.
                breaks.again_at = now + servers.pause_after(0);
                return;
            }
            return servers.failed(server, ask.path, &fault);
        };
        // It has answered a probe since, so it is available for all reads except this one.
        breaks.count = breaks.count.saturating_add(1);
        // Time in which it was gone says nothing about its contents.
        let since = Some(breaks.first).max(servers.back_at(server));
        let is_long = since.is_none_or(|since| now.duration_since(since) >= servers.limits.wait_for_better);
        if has_failed_file || (breaks.count >= BREAKS_MAX && is_long) {
            // A cache in front of it may have answered the probe while the server is away: then reads wait.
            if let Err(fault) = probe::ask(servers, server, true) {
                self.breaks = None;
                return servers.failed(server, "store", &probe::no_store(fault));
            }
            servers.note_failed_file(server, ask.path);
            let why = format!("{fault}, and so it did {} times", breaks.count);
            return self.cannot_give(servers, ask, server, why);
        }
        breaks.again_at = now + servers.pause_after(breaks.count);
    }

    fn cannot_give(&mut self, servers: &Servers, ask: &Ask<'_>, server: usize, why: String) {
        servers.cannot_give(server, ask.path, &why);
        self.verdict = Some(Verdict::Wrong(StoreError::new(StoreErrorKind::Damaged, why)));
    }
}

/// Reads until a server gives bytes that `check` accepts.
pub(crate) fn read(servers: &Servers, ask: &Ask<'_>, check: &mut Check<'_>) -> Result<Answer, StoreError> {
    let mut reading = Reading::new(servers, ask);
    loop {
        match reading.go_on(servers, ask, check)? {
            Step::Read(answer) => return Ok(answer),
            Step::Waits(until) => servers.wait(until),
        }
    }
}

/// The same, without a thread while it waits. `None`: it waits, and continues when the call is repeated with
/// this `waiting`.
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
        let Some(resting) = servers.rest(until) else { continue };
        let (theirs, until) = (Arc::clone(servers), resting.until);
        waiting.begin((reading, resting), move |now| now >= until || theirs.changes() != seen);
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
    /// Since when it waits only for busy servers.
    busy_since: Option<Instant>,
    /// Servers that do not have it may be asked again.
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
            let is_liar = ask.choice.liars.contains(&index);
            let given_back = || ask.choice.without.contains(&index).then_some(Verdict::GivenBack);
            is_liar.then(|| Verdict::Wrong(wrong_as_a_whole())).or_else(given_back)
        };
        let past_caches = ask.choice.past_caches;
        let before =
            |index| AttemptResult { verdict: before(index), past_caches, ..AttemptResult::default() };
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
            let past_caches: Vec<bool> = self.tried.iter().map(|tried| tried.past_caches).collect();
            let Some(first) = self.once_more.take().or_else(|| choose(servers, ask, len, &excluded)) else {
                if let Some(until) = self.nobody(servers, ask, &excluded, now)? {
                    return Ok(Step::Waits(until));
                }
                continue;
            };
            if let Some(since) = self.waiting_since.take() {
                servers.counting.waited(since.elapsed());
            }
            let asked = attempt(servers, ask, first, &excluded, &past_caches);
            if let Some(answer) = self.judge(servers, ask, check, asked) {
                return Ok(Step::Read(answer));
            }
        }
    }

    /// The error if the store was closed. If a server failed this read before, that is why the read was still
    /// in progress.
    fn closed(&self, servers: &Servers, ask: &Ask<'_>) -> StoreError {
        let mut message = format!("the store was closed during a read of {}", ask.path);
        if self.failed_before {
            let status = servers.status();
            let said = status.servers.iter().filter_map(|server| Some((&server.url, server.why.as_ref()?)));
            said.for_each(|(url, why)| message.push_str(&format!("; {url}: {why}")));
        }
        StoreError::new(StoreErrorKind::Io, message)
    }

    /// No server can be asked now. `None`: one may be available after all. Otherwise until when to wait.
    fn nobody(
        &mut self,
        servers: &Servers,
        ask: &Ask<'_>,
        excluded: &[bool],
        now: Instant,
    ) -> Result<Option<Option<Instant>>, StoreError> {
        if ask_past_caches(ask, &mut self.tried) || self.takes_what_lies_there(servers, ask) {
            return Ok(None);
        }
        if !ask.retrying {
            if let Some(until) = self.busy_until(servers, ask, now)? {
                self.waiting_since.get_or_insert_with(Instant::now);
                return Ok(Some(Some(until)));
            }
            // Only if the server is available is it certain that the bytes cannot be had at all.
            let longest = servers.limits.probe_after.saturating_mul(PROBE_WAITS);
            if servers.wait_for_probe(excluded, *self.probed_until.get_or_insert(now + longest)) {
                return Ok(None);
            }
            // A caller that gets "not found" may forget what it knows about the file.
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

    /// Until when a read that does not wait for missing servers waits for busy ones.
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
        if !servers.while_busy.tell(&why) {
            let message = format!("stopped while waiting for {}: {why}", ask.path);
            return Err(StoreError::new(StoreErrorKind::Io, message));
        }
        let again_at = self.tried.iter().filter_map(|tried| tried.paused_until(now)).min();
        Ok([longest, again_at, Some(now + WAIT_MAX)].into_iter().flatten().min())
    }

    /// Whether servers that were left out because the part is gone there are asked for it now: all others
    /// have answered that they do not have it. A server that fails may have it.
    fn takes_what_lies_there(&mut self, servers: &Servers, ask: &Ask<'_>) -> bool {
        let is_left_out = |tried: &AttemptResult| matches!(tried.verdict, Some(Verdict::GivenBack));
        let have_it_not = |tried: &[AttemptResult]| {
            tried.iter().all(|tried| is_left_out(tried) || tried.missing_until().is_some())
        };
        if !ask.choice.or_what_lies_there || !self.tried.iter().any(is_left_out) || !have_it_not(&self.tried)
        {
            return false;
        }
        look_for_stores(servers, &mut self.tried);
        if !have_it_not(&self.tried) {
            return false;
        }
        self.tried.iter_mut().filter(|tried| is_left_out(tried)).for_each(|tried| tried.verdict = None);
        true
    }

    /// Until when to wait for servers that are away, or for one that should be asked again. They may have
    /// what others lack.
    fn wait_until(&self, servers: &Servers, ask: &Ask<'_>) -> Option<Instant> {
        let now = Instant::now();
        let missing_until = self.tried.iter().filter_map(AttemptResult::missing_until).min();
        if missing_until.is_some() {
            servers.waits_for_others(ask.path);
        }
        let again_at = self.tried.iter().filter_map(|tried| tried.paused_until(now)).min();
        [self.better_until, again_at, missing_until].into_iter().flatten().min()
    }

    /// Evaluates an attempt: returns the answer if it is good.
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
                                tried.gave_back = Some(gave_it_back(servers, ask, server));
                                // Its list may be outdated because of a lost answer: then others come first.
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
        // That concerns only this file, and may be the fault of a cache.
        let is_of_file = matches!(fault, Fault::Missing | Fault::Wrong(_) | Fault::Stale);
        // It was down for this before, and has answered a probe since, so it is available for everything
        // else.
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

/// This server sent wrong bytes: returns whether to ask it once more, bypassing caches.
fn is_past_caches(ask: &Ask<'_>, tried: &mut [AttemptResult], server: usize) -> bool {
    let first = |tried: &mut AttemptResult| !std::mem::replace(&mut tried.past_caches, true);
    let is_first = !ask.optional && tried.get_mut(server).is_some_and(first);
    if is_first {
        tracing::info!(
            server,
            what = ask.path,
            "what came was wrong: the server is asked once more, past caches"
        );
    }
    is_first
}

/// Whether a server's bytes were wrong because the part is gone there, or may be if the server cannot say so
/// now. It may have given the space back since it was last asked.
fn gave_it_back(servers: &Servers, ask: &Ask<'_>, server: usize) -> bool {
    let (Some(object), Wanted::Range { first, len, total: Some(total) }) = (ask.object, ask.wanted) else {
        return false;
    };
    is_gone_there(servers, ask, (object, total), &(first..first.saturating_add(len)), server)
}

/// No server has it: whether to ask some once more, bypassing caches. A cache may remember that it was
/// missing, or that its server was.
fn ask_past_caches(ask: &Ask<'_>, tried: &mut [AttemptResult]) -> bool {
    let mut is_any = false;
    for tried in tried.iter_mut().filter(|tried| !ask.optional && tried.missing_until().is_some()) {
        if !std::mem::replace(&mut tried.past_caches, true) {
            tried.verdict = None;
            is_any = true;
        }
    }
    is_any
}

/// This server refused the token: whether to ask it once more, because the file may contain another one by
/// now.
fn may_take_token(servers: &Servers, tried: &mut [AttemptResult], server: usize) -> bool {
    let first = |tried: &mut AttemptResult| !std::mem::replace(&mut tried.token_renewed, true);
    tried.get_mut(server).is_some_and(first) && servers.renew_token()
}

/// Asks servers without the file for their store: if a web server's directory is gone, everything is missing
/// there, and it may come back.
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

/// The error for bytes that are checked only as a whole.
pub(crate) fn wrong_as_a_whole() -> StoreError {
    StoreError::new(StoreErrorKind::Damaged, "as a whole it does not have the hash that is its name")
}

/// Which server to ask: if one should give all of an object, that one while it is available.
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
    // A caller that waits gets it when they are back.
    let mut kind = StoreErrorKind::Io;
    for (server, tried) in status.servers.iter().zip(tried) {
        match &tried.verdict {
            Some(Verdict::GivenBack) => missing.push(format!("{} (its space was given back)", server.url)),
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
        // If other parts of the object exist, it is these bytes that are wrong.
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
