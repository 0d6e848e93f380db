//! A read: choose a server, ask it, ask another one when it is late or fails, check, wait when nobody is left.
//!
//! | a server | for this read | for all others |
//! |---|---|---|
//! | does not have it | where nobody has it, it is asked once more, past caches; then not again soon; reads that wait make sure that it has a store at all | nothing |
//! | has another length of it | the same | nothing |
//! | sends wrong bytes | it is asked once more, past caches between; then not again | it is distrusted |
//! | breaks off, answers with 5xx | it is asked again when a probe was answered | it is down until then |
//! | answers something else, such as 403 or a redirect | it is asked again when a probe was answered | it is put aside until then |
//! | breaks off or answers so again after a probe | it is asked again after a pause; at last it is not, if it gives the file `store` past caches: else it is away | for a minute, reads of the same file ask twice only |
//! | refuses the token | it is asked once more, with what is in the token's file now; then as above | it is put aside |
//! | is gone, is busy, does not reach what it reads from (502, 504) | it is asked again when it is back | it is down |
//! | is busy again after a probe | it is asked again when it says so | nothing |

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use headwater_store::{Check, StoreError, StoreErrorKind};
use rustix::event::{PollFd, Timespec, poll};

use crate::probe;
use crate::servers::Servers;
use crate::transfer::{Fault, Transfer, Wanted};
use crate::whole::Whom;

/// How long one wait for sockets lasts at most, so that a closed store is noticed.
const POLL_MAX: Duration = Duration::from_millis(250);
/// A server that breaks off or answers oddly so often in one read, and for as long as is waited for better bytes, has none.
const BREAKS_MAX: u32 = 3;
/// A read that is late is asked for a second time at most for one in so many ..
const HEDGE_SHARE: u64 = 20;
/// .. apart from so many.
const HEDGE_FREE: u64 = 8;
/// A read that does not wait for servers waits for the probe of one that broke off, for at most so many times as long as
/// comes before the first probe.
const PROBE_WAITS: u32 = 10;

/// A read that does not wait for servers takes as long as a probe, and a second for each so many bytes that have come.
const SLOWEST_BYTES_S: u64 = 16 << 10;

/// What is to be read.
pub(crate) struct Ask<'a> {
    /// Below the servers' base URLs.
    pub path: &'a str,
    pub wanted: Wanted,
    /// Whether to wait for a server when none is left.
    pub patient: bool,
    /// Whether a good server may not have this, and may then answer in ways of its own.
    pub optional: bool,
    pub whom: Whom,
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
    },
    Wrong(StoreError),
}

/// What came of asking one server in one read.
#[derive(Default)]
struct Tried {
    verdict: Option<Verdict>,
    breaks: Option<Breaks>,
    /// What came was wrong, or nothing, which may be the fault of a cache in between: it is asked past caches.
    past_caches: bool,
    /// It refused the token, and was asked once more with what was in the token's file then.
    token_renewed: bool,
    /// It was busy, and wants to be asked again then.
    busy_until: Option<Instant>,
    /// How often it was.
    busy_times: u32,
}

/// It broke off, or answered something else.
struct Breaks {
    count: u32,
    first: Instant,
    again_at: Instant,
}

impl Tried {
    fn lacks(&mut self, servers: &Servers, why: Option<String>) {
        let again_at = Instant::now() + servers.limits.wait_for_better;
        self.verdict = Some(Verdict::Missing { again_at, is_sure: false, why });
    }

    fn is_wrong(&self) -> bool {
        matches!(self.verdict, Some(Verdict::Wrong(_)))
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
            Fault::Busy(wait, _) => {
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
        let was_broken = servers.was_broken(server, ask.path);
        let Some(breaks) = &mut self.breaks else {
            self.breaks = Some(Breaks { count: 1, first: now, again_at: now });
            if let Some(breaks) = self.breaks.as_mut().filter(|_| was_broken) {
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
        if was_broken || (breaks.count >= BREAKS_MAX && is_long) {
            // What stands before it may have answered the probe, and it is away: then reads wait.
            if let Err(fault) = probe::ask(servers, server, true) {
                self.breaks = None;
                return servers.failed(server, "store", &probe::no_store(fault));
            }
            servers.is_broken(server, ask.path);
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

/// A request under way.
struct Running<'a> {
    server: usize,
    transfer: Transfer,
    _counted: Counted<'a>,
}

/// Counts a request at its server while it lives.
struct Counted<'a>(&'a Servers, usize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.in_flight(self.1, false);
    }
}

enum Attempt {
    /// The body, and who sent it.
    Answer {
        server: usize,
        answer: Answer,
        times: Option<(Duration, Duration)>,
        /// What was wrong beside it: the body may be good all the same.
        fault: Option<Fault>,
    },
    /// All that were asked failed; they have been told.
    Failed(Vec<(usize, Fault)>),
    Closed,
}

/// Reads until somebody gives what `check` accepts.
pub(crate) fn read(servers: &Servers, ask: &Ask<'_>, check: &mut Check<'_>) -> Result<Answer, StoreError> {
    let started = Instant::now();
    let outcome = read_somewhere(servers, ask, check);
    servers.counting.read_took(started.elapsed());
    outcome
}

fn read_somewhere(servers: &Servers, ask: &Ask<'_>, check: &mut Check<'_>) -> Result<Answer, StoreError> {
    let before = |index| ask.whom.liars.contains(&index).then(|| Verdict::Wrong(wrong_as_a_whole()));
    let before = |index| Tried { verdict: before(index), ..Tried::default() };
    let mut tried: Vec<Tried> = (0..servers.list.len()).map(before).collect();
    let len = match ask.wanted {
        Wanted::Range { len, .. } => len,
        Wanted::Whole { .. } => 0,
    };
    let mut once_more: Option<usize> = None;
    let (mut failed_before, mut probed_until, mut better_until, mut waiting_since) =
        (false, None, None, None);
    loop {
        if servers.is_closed() {
            return Err(StoreError::new(StoreErrorKind::Io, "the store was closed during a read"));
        }
        let now = Instant::now();
        let is_out = |tried: &Tried| tried.is_judged() || tried.paused_until(now).is_some();
        let excluded: Vec<bool> = tried.iter().map(is_out).collect();
        let past_caches: Vec<bool> = tried.iter().map(|tried| tried.past_caches).collect();
        let Some(first) = once_more.take().or_else(|| choose(servers, ask, len, &excluded)) else {
            if ask_past_caches(ask, &mut tried) {
                continue;
            }
            if !ask.patient {
                // Whether it is there tells what cannot be had at all from what can be had later.
                let longest = servers.limits.probe_after.saturating_mul(PROBE_WAITS);
                if servers.wait_for_probe(&excluded, *probed_until.get_or_insert(now + longest)) {
                    continue;
                }
                return Err(hopeless(servers, ask, &tried));
            }
            look_for_stores(servers, &mut tried);
            if tried.iter().any(Tried::is_wrong) {
                // Somebody who is away may have better bytes, but not for ever.
                better_until.get_or_insert_with(|| now + servers.limits.wait_for_better);
            }
            if tried.iter().all(Tried::is_judged) || better_until.is_some_and(|until| now >= until) {
                return Err(hopeless(servers, ask, &tried));
            }
            waiting_since.get_or_insert_with(Instant::now);
            wait(servers, ask, &mut tried, better_until);
            continue;
        };
        if let Some(since) = waiting_since.take() {
            servers.counting.waited(since.elapsed());
        }
        match attempt(servers, ask, first, &excluded, &past_caches, len) {
            Attempt::Closed => {}
            Attempt::Answer { server, answer, times, fault } => match check(&answer.body) {
                Ok(()) => {
                    servers.answered(server, u64::try_from(answer.body.len()).unwrap_or(u64::MAX), times);
                    if let Some(fault) = fault.filter(|_| !ask.optional) {
                        servers.failed(server, ask.path, &fault);
                    }
                    if failed_before {
                        servers.counting.failovers.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(answer);
                }
                Err(why) => {
                    failed_before = true;
                    if is_past_caches(ask, &mut tried, server) {
                        once_more = Some(server);
                        continue;
                    }
                    if !ask.optional {
                        servers.gave_wrong_bytes(server, ask.path, &why);
                    }
                    if let Some(tried) = tried.get_mut(server) {
                        tried.verdict = Some(Verdict::Wrong(why));
                    }
                }
            },
            Attempt::Failed(faults) => {
                failed_before = true;
                for (server, fault) in faults {
                    if matches!(fault, Fault::Wrong(_)) && is_past_caches(ask, &mut tried, server) {
                        once_more = Some(server);
                        continue;
                    }
                    if matches!(fault, Fault::Refused(_)) && may_take_token(servers, &mut tried, server) {
                        once_more = Some(server);
                        continue;
                    }
                    if let Some(tried) = tried.get_mut(server) {
                        tried.failed(servers, ask, server, fault);
                    }
                }
            }
        }
    }
}

/// What this server sent was wrong: whether it is to be asked once more, past caches.
fn is_past_caches(ask: &Ask<'_>, tried: &mut [Tried], server: usize) -> bool {
    let first = |tried: &mut Tried| !std::mem::replace(&mut tried.past_caches, true);
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

/// Nobody has it: whether some are to be asked once more, past caches. One may remember that it was not there, or that its
/// server was not.
fn ask_past_caches(ask: &Ask<'_>, tried: &mut [Tried]) -> bool {
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
fn may_take_token(servers: &Servers, tried: &mut [Tried], server: usize) -> bool {
    let first = |tried: &mut Tried| !std::mem::replace(&mut tried.token_renewed, true);
    tried.get_mut(server).is_some_and(first) && servers.renew_token()
}

/// Servers that do not have what is asked for are asked for their store: where a web server's directory is gone, nothing is
/// there, and that may be back.
fn look_for_stores(servers: &Servers, tried: &mut [Tried]) {
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

/// Waits for servers that are away, or until one is to be asked again. They may have what others do not.
fn wait(servers: &Servers, ask: &Ask<'_>, tried: &mut [Tried], better_until: Option<Instant>) {
    let now = Instant::now();
    let missing_until = tried.iter().filter_map(Tried::missing_until).min();
    if missing_until.is_some() {
        servers.waits_for_others(ask.path);
    }
    let again_at = tried.iter().filter_map(|tried| tried.paused_until(now)).min();
    servers.wait([better_until, again_at, missing_until].into_iter().flatten().min());
    let now = Instant::now();
    for tried in tried.iter_mut().filter(|tried| tried.missing_until().is_some_and(|until| until <= now)) {
        tried.verdict = None;
    }
}

/// What is wrong with bytes that are checked only as a whole.
pub(crate) fn wrong_as_a_whole() -> StoreError {
    StoreError::new(StoreErrorKind::Damaged, "as a whole it does not have the hash that is its name")
}

/// Who is to be asked: where one is to give all of an object, that one while it is there.
fn choose(servers: &Servers, ask: &Ask<'_>, len: u64, excluded: &[bool]) -> Option<usize> {
    let the_same = ask.whom.first.and_then(|first| {
        let others = excluded.iter().enumerate().map(|(index, out)| *out || index != first);
        servers.choose(len, &others.collect::<Vec<_>>())
    });
    the_same.or_else(|| servers.choose(len, excluded))
}

/// Nobody has it, or nobody is there.
fn hopeless(servers: &Servers, ask: &Ask<'_>, tried: &[Tried]) -> StoreError {
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
            Some(Verdict::Missing { why: Some(why), .. }) => missing.push(format!("{} ({why})", server.url)),
            Some(_) => missing.push(server.url.clone()),
            None => others.push(format!("{}: {}", server.url, server.why.as_deref().unwrap_or("unknown"))),
        }
        if !tried.is_judged() && !tried.is_there() {
            kind = StoreErrorKind::Unreachable;
        }
    }
    if others.is_empty() {
        let message = format!("there is no {what} at {}", missing.join(", "));
        return StoreError::new(StoreErrorKind::NotFound, message);
    }
    let mut message = format!("no server gives {what}: {}", others.join("; "));
    if !missing.is_empty() {
        message.push_str(&format!("; not at {}", missing.join(", ")));
    }
    StoreError::new(kind, message)
}

/// Asks `first`, and when it is late a second one too.
fn attempt(
    servers: &Servers,
    ask: &Ask<'_>,
    first: usize,
    excluded: &[bool],
    past_caches: &[bool],
    len: u64,
) -> Attempt {
    let is_past = |server: usize| past_caches.get(server).copied().unwrap_or(false);
    let mut faults = Vec::new();
    let mut running: Vec<Running<'_>> = Vec::with_capacity(2);
    if let Err(fault) = add(servers, ask, first, is_past(first), false, &mut running) {
        return Attempt::Failed(vec![(first, fault)]);
    }
    let late_at = Instant::now() + servers.late_after(first, len);
    let mut hedge: Option<usize> = None;
    let mut may_hedge = servers.list.len() > 1 && !ask.whom.alone;
    loop {
        let mut at = 0;
        while let Some(run) = running.get_mut(at) {
            let outcome = run.transfer.advance().and_then(|whole| {
                let silent = run.transfer.last_progress().elapsed();
                if !whole && !ask.patient {
                    in_time(servers, &run.transfer)?;
                }
                if whole || silent < servers.limits.stall {
                    return Ok(whole);
                }
                let doing =
                    if run.transfer.connection().is_connected() { "sent nothing" } else { "did not answer" };
                Err(Fault::Gone(format!("it {doing} for {:.1} s", silent.as_secs_f64())))
            });
            match outcome {
                Ok(false) => at += 1,
                Ok(true) => return answer(servers, running, at, hedge),
                Err(fault) => {
                    let server = run.server;
                    running.remove(at);
                    if fault == Fault::Stale {
                        if let Err(fault) = add(servers, ask, server, is_past(server), true, &mut running) {
                            faults.push((server, fault));
                        }
                    } else {
                        faults.push((server, fault));
                    }
                }
            }
        }
        if servers.is_closed() {
            return Attempt::Closed;
        }
        if running.is_empty() {
            return Attempt::Failed(faults);
        }
        let now = Instant::now();
        if may_hedge && now >= late_at && running.len() == 1 {
            let silent = running.first().map_or(Duration::ZERO, |run| run.transfer.last_progress().elapsed());
            if affordable(servers) || silent >= servers.limits.hedge_after_max {
                may_hedge = false;
                let mut excluded = excluded.to_vec();
                running.iter().for_each(|run| exclude(&mut excluded, run.server));
                faults.iter().for_each(|(server, _)| exclude(&mut excluded, *server));
                if let Some(second) = servers.choose(len, &excluded)
                    && add(servers, ask, second, is_past(second), false, &mut running).is_ok()
                {
                    servers.counting.hedges.fetch_add(1, Ordering::Relaxed);
                    hedge = Some(second);
                }
                continue;
            }
        }
        let until = if may_hedge && now < late_at { late_at.duration_since(now) } else { POLL_MAX };
        wait_for_sockets(&running, until.min(POLL_MAX));
    }
}

/// Who does not wait for servers does not wait for one that sends a byte now and then, either.
fn in_time(servers: &Servers, transfer: &Transfer) -> Result<(), Fault> {
    let longest = servers.limits.stall.saturating_mul(probe::STALLS_MAX)
        + Duration::from_secs(transfer.got_bytes() / SLOWEST_BYTES_S);
    if transfer.started().elapsed() < longest {
        return Ok(());
    }
    Err(Fault::Gone(format!("it did not answer in full for {:.1} s", longest.as_secs_f64())))
}

fn exclude(excluded: &mut [bool], server: usize) {
    if let Some(flag) = excluded.get_mut(server) {
        *flag = true;
    }
}

/// Whether few enough reads were asked for twice.
fn affordable(servers: &Servers) -> bool {
    let hedges = servers.counting.hedges.load(Ordering::Relaxed);
    hedges.saturating_mul(HEDGE_SHARE)
        <= servers.counting.requests.load(Ordering::Relaxed) + HEDGE_SHARE * HEDGE_FREE
}

fn add<'a>(
    servers: &'a Servers,
    ask: &Ask<'_>,
    server: usize,
    past_caches: bool,
    fresh: bool,
    running: &mut Vec<Running<'a>>,
) -> Result<(), Fault> {
    let transfer = servers.start(server, ask.path, ask.wanted, past_caches, fresh)?;
    servers.in_flight(server, true);
    running.push(Running { server, transfer, _counted: Counted(servers, server) });
    Ok(())
}

/// The one at `at` is done; others are given up, with their connections.
fn answer(servers: &Servers, mut running: Vec<Running<'_>>, at: usize, hedge: Option<usize>) -> Attempt {
    let done = running.swap_remove(at);
    for late in &running {
        servers.was_late(late.server, late.transfer.started().elapsed());
    }
    let server = done.server;
    if hedge == Some(server) {
        servers.counting.hedges_won.fetch_add(1, Ordering::Relaxed);
    }
    let times = done.transfer.times();
    let total = done.transfer.total();
    let (body, connection) = done.transfer.finish();
    let mut fault = None;
    match connection {
        Ok(Some(connection)) => servers.keep(server, connection),
        Ok(None) => {}
        Err(found) => fault = Some(found),
    }
    Attempt::Answer { server, answer: Answer { body, total, server }, times, fault }
}

fn wait_for_sockets(running: &[Running<'_>], longest: Duration) {
    let interest = |run: &Running<'_>| run.transfer.connection().interest();
    let mut sockets: Vec<PollFd<'_>> = running
        .iter()
        .map(|run| PollFd::from_borrowed_fd(run.transfer.connection().fd(), interest(run)))
        .collect();
    let longest = Timespec {
        tv_sec: i64::try_from(longest.as_secs()).unwrap_or(1),
        tv_nsec: i64::from(longest.subsec_nanos()),
    };
    // A signal or a lack of memory ends the wait early, which does no harm: all are looked at again.
    let _ = poll(&mut sockets, Some(&longest));
}
