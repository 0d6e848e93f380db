//! Asking servers once: one of them, and where that is late a second one.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};

use crate::probe;
use crate::read::{Answer, Ask};
use crate::servers::Servers;
use crate::transfer::{Fault, Transfer};

/// How long one wait for sockets lasts at most, so that a closed store is noticed.
const POLL_MAX: Duration = Duration::from_millis(250);
/// A read that is late is asked for a second time at most for one in so many ..
const HEDGE_SHARE: u64 = 20;
/// .. apart from so many.
const HEDGE_FREE: u64 = 8;
/// .. and from those that crawl: that take so many times the longest wait for a byte, and a second for each so many bytes that have
/// come. Else a server that sends a byte now and then would keep all reads that it has when that share is used up.
const CRAWLS_AFTER: u32 = 4;
/// A read that does not wait for servers takes as long as a probe, and a second for each so many bytes that have come.
const SLOWEST_BYTES_S: u64 = 16 << 10;

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

pub(crate) enum Attempt {
    /// The body, and who sent it.
    Answer {
        server: usize,
        answer: Answer,
        times: Option<(Duration, Duration)>,
        /// What was wrong beside it: the body may be good all the same.
        fault: Option<Fault>,
    },
    /// All that were asked failed: these, and those that were gone while another one was still asked, which are known to be.
    Failed(Vec<(usize, Fault)>),
    Closed,
}

/// Asks `first`, and when it is late a second one too.
pub(crate) fn attempt(
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
    let mut late_at = Instant::now() + servers.late_after(first, len);
    let mut hedge: Option<usize> = None;
    let may_hedge = servers.list.len() > 1 && !ask.whom.alone;
    loop {
        let mut at = 0;
        while let Some(run) = running.get_mut(at) {
            match advance(servers, ask, &mut run.transfer) {
                Ok(false) => at += 1,
                Ok(true) => return answer(servers, running, at, hedge),
                Err(fault) => {
                    let server = run.server;
                    running.remove(at);
                    let again = match fault {
                        Fault::Stale => add(servers, ask, server, is_past(server), true, &mut running),
                        fault => Err(fault),
                    };
                    if let Err(fault) = again {
                        note(servers, ask, (server, fault), &running, &mut faults);
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
        // Also where there were two, and one of them has failed.
        let is_single = may_hedge && running.len() == 1;
        if is_single
            && now >= late_at
            && (affordable(servers) || running.iter().any(|run| is_stuck(servers, &run.transfer)))
        {
            if let Some(second) = servers.choose(len, &without(excluded, &running, &faults)) {
                match add(servers, ask, second, is_past(second), false, &mut running) {
                    Ok(()) => {
                        servers.counting.hedges.fetch_add(1, Ordering::Relaxed);
                        hedge = Some(second);
                        late_at = now + servers.late_after(second, len);
                        continue;
                    }
                    Err(fault) => note(servers, ask, (second, fault), &running, &mut faults),
                }
            }
            // Nobody can be asked now. Somebody may be back while this one still crawls.
            late_at = now + POLL_MAX;
        }
        let until = if is_single && now < late_at { late_at.duration_since(now) } else { POLL_MAX };
        wait_for_sockets(&running, until.min(POLL_MAX));
    }
}

/// Whether the answer is there in full.
fn advance(servers: &Servers, ask: &Ask<'_>, transfer: &mut Transfer) -> Result<bool, Fault> {
    let whole = transfer.advance()?;
    let silent = transfer.last_progress().elapsed();
    if !whole && !ask.patient {
        in_time(servers, transfer)?;
    }
    if whole || silent < servers.limits.stall {
        return Ok(whole);
    }
    let doing = if transfer.connection().is_connected() { "sent nothing" } else { "did not answer" };
    Err(Fault::Gone(format!("it {doing} for {:.1} s", silent.as_secs_f64())))
}

/// Takes down what is wrong with a server. While another one is still asked, one that is gone is told at once: it is chosen again when
/// it is back, which may be long before the other one has answered.
fn note(
    servers: &Servers,
    ask: &Ask<'_>,
    (server, fault): (usize, Fault),
    running: &[Running<'_>],
    faults: &mut Vec<(usize, Fault)>,
) {
    if matches!(fault, Fault::Gone(_)) && !running.is_empty() {
        servers.failed(server, ask.path, &fault);
    } else {
        faults.push((server, fault));
    }
}

/// Who is not to be asked as a second one.
fn without(excluded: &[bool], running: &[Running<'_>], faults: &[(usize, Fault)]) -> Vec<bool> {
    let mut excluded = excluded.to_vec();
    running.iter().for_each(|run| exclude(&mut excluded, run.server));
    faults.iter().for_each(|(server, _)| exclude(&mut excluded, *server));
    excluded
}

/// Who does not wait for servers does not wait for one that sends a byte now and then, either.
fn in_time(servers: &Servers, transfer: &Transfer) -> Result<(), Fault> {
    match takes_longer(transfer, servers.limits.stall.saturating_mul(probe::STALLS_MAX)) {
        Some(longest) => {
            Err(Fault::Gone(format!("it did not answer in full for {:.1} s", longest.as_secs_f64())))
        }
        None => Ok(()),
    }
}

/// Whether it is asked for a second time whatever the share of those is.
fn is_stuck(servers: &Servers, transfer: &Transfer) -> bool {
    let longest = servers.limits.hedge_after_max;
    transfer.last_progress().elapsed() >= longest
        || takes_longer(transfer, longest.saturating_mul(CRAWLS_AFTER)).is_some()
}

/// Whether it takes longer than this, and than what came may take. How long that is.
fn takes_longer(transfer: &Transfer, than: Duration) -> Option<Duration> {
    let longest = than + Duration::from_secs(transfer.got_bytes() / SLOWEST_BYTES_S);
    (transfer.started().elapsed() >= longest).then_some(longest)
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
