//! One attempt at a request: sends it to one server and, if that server is late, to a second one too (a *hedged
//! request*). The first complete answer counts.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};

use crate::probe;
use crate::read::{Answer, Ask, choose};
use crate::servers::Servers;
use crate::transfer::{Fault, PriorRequests, Transfer};

/// The longest single wait for sockets, so that a closed store is noticed.
const POLL_MAX: Duration = Duration::from_millis(250);
/// At most one read in this many is sent to a second server because the first one is late.
const HEDGE_SHARE: u64 = 20;
/// This many reads may be sent to a second server in addition to the share.
const HEDGE_FREE: u64 = 8;
/// A server is too slow if an answer takes longer than this many times `hedge_after_max`, plus the time that the bytes
/// that arrived take at [`SLOWEST_BYTES_S`]. Its reads are hedged even if the share is used up. Otherwise a server
/// that sends a byte now and then would keep all its reads.
const TOO_SLOW_AFTER: u32 = 4;
/// The slowest transfer that is accepted, in bytes per second.
const SLOWEST_BYTES_S: u64 = 16 << 10;

/// A connection may take this many times as long as an answer to become ready.
const UNREADY_TIMES: u32 = 3;

/// A request under way.
struct Running<'a> {
    server: usize,
    transfer: Transfer,
    /// The read is late if the answer takes longer than this after the request was sent.
    late_after: Duration,
    /// The read is also late if the connection is not ready after this time.
    unready_after: Duration,
    _counted: Counted<'a>,
}

impl Running<'_> {
    /// When the read is late. The time to set up a new connection says nothing about the time of an answer, so
    /// lateness counts from when the request was sent.
    fn late_at(&self) -> Instant {
        match self.transfer.sent() {
            Some(sent) => sent + self.late_after,
            None => self.transfer.started() + self.unready_after,
        }
    }

    /// How long the answer has been waited for. `None`: the connection is not ready yet, and may still become
    /// ready.
    fn waited(&self) -> Option<Duration> {
        match self.transfer.sent() {
            Some(sent) => Some(sent.elapsed()),
            None => Some(self.transfer.started().elapsed()).filter(|waited| *waited >= self.unready_after),
        }
    }
}

/// A request that `add` has counted at its server. Dropping it uncounts the request.
struct Counted<'a>(&'a Servers, usize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.in_flight(self.1, false);
    }
}

/// The result of an attempt.
pub(crate) enum Attempt {
    /// The body, and the server that sent it.
    Answer {
        server: usize,
        answer: Answer,
        /// Time from the request to the first byte, and to the end of the answer.
        times: (Duration, Duration),
        /// A fault that came with the answer. The body may still be good.
        fault: Option<Fault>,
        /// Other servers that were asked and failed, except unreachable ones, whose faults were already
        /// recorded.
        faults: Vec<(usize, Fault)>,
    },
    /// All servers that were asked failed. The list has their faults, except those of servers that became
    /// unreachable while another server was still asked: these were already recorded.
    Failed(Vec<(usize, Fault)>),
    /// The store was closed.
    Closed,
}

/// Asks `first` and, if it is late, a second server too. For each server, `excluded` says whether it must not be that second
/// server, and `bypass_caches` whether its request must bypass caches on the way.
pub(crate) fn attempt(
    servers: &Servers,
    ask: &Ask<'_>,
    first: usize,
    excluded: &[bool],
    bypass_caches: &[bool],
) -> Attempt {
    let len = ask.wanted.len_bytes();
    let bypasses = |server: usize| bypass_caches.get(server).copied().unwrap_or(false);
    let mut faults = Vec::new();
    let mut running: Vec<Running<'_>> = Vec::with_capacity(2);
    if let Err(fault) = add(servers, ask, first, bypasses(first), false, &mut running) {
        return Attempt::Failed(vec![(first, fault)]);
    }
    // No second server is asked before this time.
    let mut not_before = Instant::now();
    let mut hedge: Option<usize> = None;
    let may_hedge = servers.list.len() > 1 && !ask.choice.alone;
    loop {
        let mut at = 0;
        while let Some(run) = running.get_mut(at) {
            match advance(servers, ask, &mut run.transfer) {
                Ok(false) => at += 1,
                Ok(true) => return answer(servers, running, at, hedge, faults),
                Err(fault) => {
                    let server = run.server;
                    running.remove(at);
                    let again = match fault {
                        Fault::Stale => add(servers, ask, server, bypasses(server), true, &mut running),
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
        // This holds even if two servers were asked, and one of them failed.
        let late_at = match running.as_slice() {
            [single] if may_hedge => Some(single.late_at().max(not_before)),
            _ => None,
        };
        let stuck = running.iter().any(|run| is_stuck(servers, &run.transfer));
        if late_at.is_some_and(|at| now >= at) && (stuck || affordable(servers)) {
            if let Some(second) = second(servers, ask, excluded, &running, &faults, stuck) {
                match add(servers, ask, second, bypasses(second), false, &mut running) {
                    Ok(()) => {
                        servers.counting.hedges.fetch_add(1, Ordering::Relaxed);
                        hedge = Some(second);
                        not_before = now + servers.late_after(second, len);
                        continue;
                    }
                    Err(fault) => note(servers, ask, (second, fault), &running, &mut faults),
                }
            }
            // No server can be asked now. Another one may come back while the present one is still too slow.
            not_before = now + POLL_MAX;
        }
        let until = late_at.filter(|at| *at > now).map_or(POLL_MAX, |at| at.duration_since(now));
        wait_for_sockets(&running, until.min(POLL_MAX));
    }
}

/// Whether the answer has arrived completely.
fn advance(servers: &Servers, ask: &Ask<'_>, transfer: &mut Transfer) -> Result<bool, Fault> {
    let whole = transfer.advance()?;
    let silent = transfer.last_progress().elapsed();
    if !whole && !ask.retrying {
        in_time(ask.stall(servers), transfer)?;
    }
    if whole || silent < ask.stall(servers) {
        return Ok(whole);
    }
    let doing = if transfer.connection().is_connected() { "sent nothing" } else { "did not answer" };
    Err(Fault::Gone(format!("it {doing} for {:.1} s", silent.as_secs_f64())))
}

/// Records a fault of a server. If another one is still asked, an unreachable server is recorded at once. It
/// can then be chosen again when it is back, which may be long before the other one has answered.
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

/// Chooses the second server. `stuck`: the first one hangs or is too slow.
fn second(
    servers: &Servers,
    ask: &Ask<'_>,
    excluded: &[bool],
    running: &[Running<'_>],
    faults: &[(usize, Fault)],
    stuck: bool,
) -> Option<usize> {
    let mut excluded = excluded.to_vec();
    running.iter().for_each(|run| exclude(&mut excluded, run.server));
    faults.iter().for_each(|(server, _)| exclude(&mut excluded, *server));
    if !stuck {
        // A server that may have wrong bytes would answer first. It is used only if the first server does not
        // answer.
        ask.choice.last.iter().for_each(|server| exclude(&mut excluded, *server));
    }
    choose(servers, ask, ask.wanted.len_bytes(), &excluded)
}

/// Fails a read that must fail fast (not `retrying`) if its server is too slow, for instance if it sends a byte now and then.
fn in_time(stall: Duration, transfer: &Transfer) -> Result<(), Fault> {
    match takes_longer(transfer, stall.saturating_mul(probe::TOTAL_TIMEOUT_STALLS)) {
        Some(longest) => {
            let longest_s = longest.as_secs_f64();
            Err(Fault::Gone(format!("it did not send the whole answer within {longest_s:.1} s")))
        }
        None => Ok(()),
    }
}

/// Whether a second server is asked even if the share of such reads is used up.
fn is_stuck(servers: &Servers, transfer: &Transfer) -> bool {
    let longest = servers.limits.hedge_after_max;
    transfer.last_progress().elapsed() >= longest
        || takes_longer(transfer, longest.saturating_mul(TOO_SLOW_AFTER)).is_some()
}

/// Returns how long the transfer has taken, if that is longer than `than` plus the time allowed for the bytes
/// that arrived.
fn takes_longer(transfer: &Transfer, than: Duration) -> Option<Duration> {
    let longest = than + Duration::from_secs(transfer.got_bytes() / SLOWEST_BYTES_S);
    (transfer.started().elapsed() >= longest).then_some(longest)
}

fn exclude(excluded: &mut [bool], server: usize) {
    if let Some(flag) = excluded.get_mut(server) {
        *flag = true;
    }
}

/// Whether the share of reads that may be sent to a second server is not used up.
fn affordable(servers: &Servers) -> bool {
    let hedges = servers.counting.hedges.load(Ordering::Relaxed);
    hedges.saturating_mul(HEDGE_SHARE)
        <= servers.counting.requests.load(Ordering::Relaxed) + HEDGE_SHARE * HEDGE_FREE
}

/// Sends the request to a server. `fresh`: on a new connection.
fn add<'a>(
    servers: &'a Servers,
    ask: &Ask<'_>,
    server: usize,
    bypass_caches: bool,
    fresh: bool,
    running: &mut Vec<Running<'a>>,
) -> Result<(), Fault> {
    let late_after = servers.late_after(server, ask.wanted.len_bytes());
    // A new connection costs two additional round trips, one of which includes the computations of TLS. It is
    // abandoned at the latest when an unreachable server is.
    let unready_after =
        late_after.saturating_mul(UNREADY_TIMES).min(servers.limits.hedge_after_max).max(late_after);
    let prior = PriorRequests { caches: bypass_caches, reading: ask.choice.reading };
    let transfer = servers.start(server, ask.path, ask.wanted, prior, fresh)?;
    servers.in_flight(server, true);
    running.push(Running { server, transfer, late_after, unready_after, _counted: Counted(servers, server) });
    Ok(())
}

/// The transfer at `at` is complete; the others are cancelled, and their connections closed.
fn answer(
    servers: &Servers,
    mut running: Vec<Running<'_>>,
    at: usize,
    hedge: Option<usize>,
    faults: Vec<(usize, Fault)>,
) -> Attempt {
    let done = running.swap_remove(at);
    for late in &running {
        if let Some(waited) = late.waited() {
            servers.was_late(late.server, waited);
        }
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
    Attempt::Answer { server, answer: Answer { body, total, server }, times, fault, faults }
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
    // A signal or a lack of memory ends the wait early, which does no harm: all transfers are checked again.
    let _ = poll(&mut sockets, Some(&longest));
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use headwater_testkit::{TestTls, wait_until};

    use super::*;
    use crate::blame::ServerChoice;
    use crate::health::Health;
    use crate::transfer::Wanted;

    #[test]
    fn avoided_servers_are_second_only_if_the_first_hangs() {
        let urls = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"];
        let urls = urls.map(|url| url.parse().unwrap()).to_vec();
        let servers =
            Servers::new(urls, None, None, (crate::Limits::default(), headwater_store::WhileBusy::default()))
                .unwrap();
        servers.state.lock().records.iter_mut().for_each(|record| record.health = Health::Up);
        let wanted = Wanted::Range { first: 0, len: 1, total: None };
        let choice = ServerChoice { last: vec![1, 0], bypass_caches: true, ..ServerChoice::default() };
        let ask = Ask {
            path: "objects/1",
            wanted,
            object: None,
            retrying: true,
            waits_while_busy: false,
            optional: false,
            short_timeout: false,
            choice,
        };
        for (excluded, expected) in [
            ([false, false, false], [Some(2), Some(2)]),
            ([false, false, true], [None, Some(1)]),
            ([false, true, true], [None, Some(0)]),
            ([true, true, true], [None, None]),
        ] {
            let found = [false, true].map(|stuck| second(&servers, &ask, &excluded, &[], &[], stuck));
            assert_eq!(found, expected, "{excluded:?}");
        }
    }

    #[test]
    fn an_answer_is_late_by_when_its_connection_was_ready() {
        let dir = tempfile::tempdir().unwrap();
        let ca_file = dir.path().join("ca");
        std::fs::write(&ca_file, &TestTls::new().ca_pem).unwrap();
        let never = Duration::from_secs(3600);
        let limits = crate::Limits { hedge_after_max: never, ..crate::Limits::default() };
        let wanted = Wanted::Range { first: 0, len: 1, total: None };
        let ask = Ask {
            path: "objects/1",
            wanted,
            object: None,
            retrying: true,
            waits_while_busy: false,
            optional: false,
            short_timeout: false,
            choice: ServerChoice::default(),
        };
        // No server answers. Without TLS the connection is ready as soon as it is established.
        for (scheme, is_ready) in [("http", true), ("https", false)] {
            let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
            let address = listener.local_addr().unwrap();
            let url = format!("{scheme}://{address}").parse().unwrap();
            let servers = Servers::new(
                vec![url],
                Some(&ca_file),
                None,
                (limits, headwater_store::WhileBusy::default()),
            )
            .unwrap();
            servers.list[0].set_addresses(vec![address]);
            let mut running = Vec::new();
            add(&servers, &ask, 0, false, false, &mut running).unwrap();
            let run = &mut running[0];
            run.unready_after = never;
            let started = run.transfer.started();
            // Its socket was not checked yet.
            assert_eq!((run.late_at(), run.waited()), (started + never, None));
            wait_until("it stands", || {
                assert_eq!(run.transfer.advance(), Ok(false));
                run.transfer.connection().is_connected()
            });
            assert_eq!(run.transfer.sent().is_some(), is_ready);
            if let Some(sent) = run.transfer.sent() {
                assert_eq!(run.late_at(), sent + run.late_after);
                assert!(sent >= started && run.late_after < never && run.waited().is_some());
            } else {
                assert_eq!((run.late_at(), run.waited()), (started + never, None));
                run.unready_after = Duration::ZERO;
                assert!(run.late_at() == started && run.waited().is_some());
            }
        }
    }
}
