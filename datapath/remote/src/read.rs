//! A read: choose a server, ask it, ask another one when it is late or fails, check, wait when nobody is left.
//!
//! | a server | for this read | for all others |
//! |---|---|---|
//! | does not have it | where nobody has it, it is asked once more, past caches; then not again soon; before that is said, and by reads that wait, it is asked whether it has a store at all | nothing |
//! | has another length of it | the same | nothing |
//! | sends wrong bytes | it is asked once more, past caches between, and of a part of an object again when it has said what of that is gone there; then not again | it is distrusted |
//! | sends wrong bytes of a part of an object, and says that it gave its space back, or cannot say | it is asked once more; then as one that does not have it | those who read the object ask others first |
//! | said before that this part of an object is gone there | by reads without a check it is not asked, unless all others answer that they do not have it | nothing |
//! | breaks off, answers with 5xx | it is asked again when a probe was answered | it is down until then |
//! | answers something else, such as 403 or a redirect | it is asked again when a probe was answered | it is put aside until then |
//! | breaks off or answers so again after a probe | it is asked again after a pause; at last it is not, if it gives the file `store` past caches: else it is away | for a minute, reads of the same file ask twice only |
//! | refuses the token | it is asked once more, with what is in the token's file now; then as above | it is put aside |
//! | is gone, is busy, does not reach what it reads from (502, 504) | it is asked again when it is back | it is down |
//! | is busy, and says when to ask again | reads that do not wait for servers wait for it, within a limit | it is down |
//! | is busy again after a probe | it is asked again when it says so | nothing |

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

/// A server that breaks off or answers oddly so often in one read, and for as long as is waited for better bytes, has none.
const BREAKS_MAX: u32 = 3;
/// A read that does not wait for servers waits for the probe of one that broke off, for at most so many times as long as
/// comes before the first probe.
pub(crate) const PROBE_WAITS: u32 = 10;

/// What is to be read.
pub(crate) struct Ask<'a> {
    /// Below the servers' base URLs.
    pub path: &'a str,
    pub wanted: Wanted,
    /// Of which object it is a part. What of it is gone on a server comes as other bytes.
    pub object: Option<Hash>,
    /// Whether to wait for a server when none is left.
    pub retrying: bool,
    /// Whether to wait for servers that are busy, for as long as [`Servers::while_busy`] says, where it is not patient.
    pub waits_while_busy: bool,
    /// Whether a good server may not have this, and may then answer in ways of its own.
    pub optional: bool,
    /// Whether who waits for it has clients that wait, too, and no longer than it would wait.
    pub hasty: bool,
    pub choice: ServerChoice,
}

impl Ask<'_> {
    /// After how long without a byte the server that is asked is down.
    pub(crate) fn stall(&self, servers: &Servers) -> Duration {
        if self.hasty { servers.limits.stall / 2 } else { servers.limits.stall }
    }
}

/// What was read.
pub(crate) struct Answer {
    pub body: Vec<u8>,
    /// How long the whole is of which a part was asked for, as the server says.
    pub total: Option<u64>,
    /// Who gave it.
    pub server: usize,
}

/// Why a server has no good bytes, although it answers.
enum Verdict {
    /// Not there, and not to be asked for again until then while others may have it.
    Missing {
        again_at: Instant,
        /// Whether the server has its store, and is not one whose directory is gone.
        is_sure: bool,
        /// What it answers, where that is more than that it does not have it.
        why: Option<String>,
        /// It has what else there is of the same file.
        is_given_back: bool,
    },
    Wrong(StoreError),
    /// It said that what is asked for is gone there, before it was asked.
    GivenBack,
}

/// What came of asking one server in one read.
#[derive(Default)]
struct AttemptResult {
    verdict: Option<Verdict>,
    breaks: Option<Breaks>,
    /// What came was wrong, or nothing, which may be the fault of a cache in between: it is asked past caches.
    past_caches: bool,
    /// Whether what came was given back, as it said, or may be. It is asked once more after that: one that has servers itself has heard what
    /// is gone on these by now, and goes to those that have it.
    gave_back: Option<bool>,
    /// It refused the token, and was asked once more with what was in the token's file then.
    token_renewed: bool,
    /// It was busy, and wants to be asked again then.
    busy_until: Option<Instant>,
    /// It said so itself.
    says_when: bool,
    /// How often it was.
    busy_times: u32,
}

/// It broke off, or answered something else.
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

    /// Whether it answers, and what it would give is known to be wrong.
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

    /// Whether it can be asked only later, as it is busy and said so.
    fn is_busy(&self, now: Instant) -> bool {
        self.says_when && self.busy_until.is_some_and(|at| at > now)
    }

    /// Whether it fails with what is asked for although it is there.
    fn is_there(&self) -> bool {
        self.breaks.as_ref().is_some_and(|breaks| breaks.count > 1)
    }

    fn failed(&mut self, servers: &Servers, ask: &Ask<'_>, server: usize, fault: Fault) {
        match fault {
            Fault::Missing => self.lacks(servers, None),
            Fault::Odd(why) | Fault::Wrong(why) if ask.optional => self.lacks(servers, Some(why)),
            // Whether it has this is not known, and nobody else needs to hear of it.
            Fault::Refused(why) if ask.optional => {
                self.verdict = Some(Verdict::Wrong(StoreError::new(StoreErrorKind::Io, why)));
            }
            Fault::Wrong(why) => self.cannot_give(servers, ask, server, why),
            Fault::Broke(_) | Fault::Odd(_) | Fault::Refused(_) => self.broke(servers, ask, server, fault),
            Fault::Busy(Busy { wait, says_when, .. }) => {
                self.says_when = says_when;
                // What it reads from may have been away, which may be why it broke off.
                self.breaks = None;
                // One that says "at once" again and again is asked more rarely.
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

    /// It broke off, or answered something else.
    fn broke(&mut self, servers: &Servers, ask: &Ask<'_>, server: usize, fault: Fault) {
        let now = Instant::now();
        let has_failed_file = servers.has_failed_file(server, ask.path);
        let Some(breaks) = &mut self.breaks else {
            self.breaks = Some(Breaks { count: 1, first: now, again_at: now });
            if let Some(breaks) = self.breaks.as_mut().filter(|_| has_failed_file) {
                // Once more, in case that it ends and starts again just now. All others go on.
                breaks.again_at = now + servers.pause_after(0);
                return;
            }
            return servers.failed(server, ask.path, &fault);
        };
        // It has answered a probe since. So it is there, for all reads but this one.
        breaks.count = breaks.count.saturating_add(1);
        // Time in which it was gone says nothing about what it has.
        let since = Some(breaks.first).max(servers.back_at(server));
        let is_long = since.is_none_or(|since| now.duration_since(since) >= servers.limits.wait_for_better);
        if has_failed_file || (breaks.count >= BREAKS_MAX && is_long) {
            // What stands before it may have answered the probe, and it is away: then reads wait.
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

/// Reads until somebody gives what `check` accepts.
pub(crate) fn read(servers: &Servers, ask: &Ask<'_>, check: &mut Check<'_>) -> Result<Answer, StoreError> {
    let mut reading = Reading::new(servers, ask);
    loop {
        match reading.go_on(servers, ask, check)? {
            Step::Read(answer) => return Ok(answer),
            Step::Waits(until) => servers.wait(until),
        }
    }
}

/// The same, without a thread while it waits. `None`: it waits, and goes on when the same is asked with this `waiting`.
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
        // Before it looks at the servers, so that it hears of what changes meanwhile.
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

/// A read under way: who was asked, and what came of it.
struct Reading {
    started: Instant,
    tried: Vec<AttemptResult>,
    once_more: Option<usize>,
    failed_before: bool,
    probed_until: Option<Instant>,
    better_until: Option<Instant>,
    waiting_since: Option<Instant>,
    /// Since when it waits only for servers that are busy.
    busy_since: Option<Instant>,
    /// Who does not have it may be asked again.
    has_waited: bool,
}

enum Step {
    Read(Answer),
    /// Nobody is left now: it is to go on when the state of a server has changed, or then.
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

    /// Goes on until it is read, cannot be, or waits.
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

    /// The store was closed. If a server failed this read before, that is why the read was still under way.
    fn closed(&self, servers: &Servers, ask: &Ask<'_>) -> StoreError {
        let mut message = format!("the store was closed during a read of {}", ask.path);
        if self.failed_before {
            let status = servers.status();
            let said = status.servers.iter().filter_map(|server| Some((&server.url, server.why.as_ref()?)));
            said.for_each(|(url, why)| message.push_str(&format!("; {url}: {why}")));
        }
        StoreError::new(StoreErrorKind::Io, message)
    }

    /// Nobody can be asked now. `None`: somebody may be, after all. Else until when to wait.
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
            // Whether it is there tells what cannot be had at all from what can be had later.
            let longest = servers.limits.probe_after.saturating_mul(PROBE_WAITS);
            if servers.wait_for_probe(excluded, *self.probed_until.get_or_insert(now + longest)) {
                return Ok(None);
            }
            // Who hears that it is not there may forget what it knows of it.
            if !ask.optional && self.tried.iter().all(|tried| tried.missing_until().is_some()) {
                look_for_stores(servers, &mut self.tried);
            }
            return Err(hopeless(servers, ask, &self.tried));
        }
        look_for_stores(servers, &mut self.tried);
        if self.tried.iter().any(AttemptResult::is_wrong) {
            // Somebody who is away may have better bytes, but not for ever.
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

    /// Until when a read that does not wait for servers that are gone waits for those that are busy.
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

    /// Whether those that were left out, as what is asked for is gone there, are asked for it now: all others have answered that they do not
    /// have it. One that fails may have it.
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

    /// Until when to wait for servers that are away, or for one that is to be asked again. They may have what others do not.
    fn wait_until(&self, servers: &Servers, ask: &Ask<'_>) -> Option<Instant> {
        let now = Instant::now();
        let missing_until = self.tried.iter().filter_map(AttemptResult::missing_until).min();
        if missing_until.is_some() {
            servers.waits_for_others(ask.path);
        }
        let again_at = self.tried.iter().filter_map(|tried| tried.paused_until(now)).min();
        [self.better_until, again_at, missing_until].into_iter().flatten().min()
    }

    /// What came of asking somebody: the answer, if it is good.
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
                                // It may have been lost on the way to its list: then others come first.
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

    /// What was wrong with a server where another one has given a good answer, so that nobody is asked again.
    fn failed_beside(&self, servers: &Servers, ask: &Ask<'_>, server: usize, fault: &Fault) {
        // That concerns this file alone, and may be the fault of a cache.
        let is_of_file = matches!(fault, Fault::Missing | Fault::Wrong(_) | Fault::Stale);
        // It was down for this before, and has answered a probe since: so it is there for all else.
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

/// What this server sent was wrong: whether it is to be asked once more, past caches.
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

/// Whether a server gave wrong bytes because what is asked for is gone there, or may be: where it cannot say so now. It may have given that
/// back since it was asked last.
fn gave_it_back(servers: &Servers, ask: &Ask<'_>, server: usize) -> bool {
    let (Some(object), Wanted::Range { first, len, total: Some(total) }) = (ask.object, ask.wanted) else {
        return false;
    };
    is_gone_there(servers, ask, (object, total), &(first..first.saturating_add(len)), server)
}

/// Nobody has it: whether some are to be asked once more, past caches. One may remember that it was not there, or that its
/// server was not.
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

/// This server refused the token: whether it is to be asked once more, as there may be another one in the file by now.
fn may_take_token(servers: &Servers, tried: &mut [AttemptResult], server: usize) -> bool {
    let first = |tried: &mut AttemptResult| !std::mem::replace(&mut tried.token_renewed, true);
    tried.get_mut(server).is_some_and(first) && servers.renew_token()
}

/// Servers that do not have what is asked for are asked for their store: where a web server's directory is gone, nothing is
/// there, and that may be back.
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

/// What is wrong with bytes that are checked only as a whole.
pub(crate) fn wrong_as_a_whole() -> StoreError {
    StoreError::new(StoreErrorKind::Damaged, "as a whole it does not have the hash that is its name")
}

/// Who is to be asked: where one is to give all of an object, that one while it is there.
pub(crate) fn choose(servers: &Servers, ask: &Ask<'_>, len: u64, excluded: &[bool]) -> Option<usize> {
    let choose = |is_out: &dyn Fn(usize) -> bool| {
        let excluded = excluded.iter().enumerate().map(|(index, out)| *out || is_out(index));
        servers.choose(len, &excluded.collect::<Vec<_>>())
    };
    let the_same = ask.choice.first.and_then(|first| choose(&|index| index != first));
    // Those that are to be asked last are added one by one.
    let last = &ask.choice.last;
    let mut later = (0..=last.len()).map(|added| last.get(added..).unwrap_or_default());
    the_same.or_else(|| later.find_map(|later| choose(&|index| later.contains(&index))))
}

/// Nobody has it, or nobody is there.
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
    // Who waits gets it when they are back.
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
        // Of an object of which there are other parts it is these bytes that are wrong.
        let kind = if is_given_back { StoreErrorKind::Damaged } else { StoreErrorKind::NotFound };
        return StoreError::new(kind, message);
    }
    let mut message = format!("no server gives {what}: {}", others.join("; "));
    if !missing.is_empty() {
        message.push_str(&format!("; not at {}", missing.join(", ")));
    }
    if ask.retrying && is_given_back {
        // It was waited for as long as for better bytes. With what is gone on those that are there the object can be read all the same.
        kind = StoreErrorKind::Damaged;
    }
    StoreError::new(kind, message)
}
