//! Probes which servers are available: when the store is opened, after failures, and, if there are several
//! servers, from time to time those without requests, to measure them. The thread of [`run`] starts a thread
//! for each probe, so that a server that hangs delays no other. Further threads look up names, and inform
//! servers which versions are in use. Answers to these requests have a few bytes and a total timeout.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use headwater_store::Hash;
use rustix::event::{PollFd, Timespec, poll};

use crate::health::Health;
use crate::servers::Servers;
use crate::transfer::{Fault, PriorRequests, Transfer, Wanted};

/// The speed of a server without requests for this long is measured.
const MEASURE_AFTER: Duration = Duration::from_secs(5);
/// The total timeout of an answer, as a multiple of the stall timeout. So a server that sends a byte now and
/// then delays nobody.
pub(crate) const TOTAL_TIMEOUT_STALLS: u32 = 3;

/// The start of the file `store`: enough to know that the server is one of a store, and that it supports
/// ranges.
const START: Wanted = Wanted::Range { first: 0, len: 16, total: Some(64) };
const MAGIC: &[u8] = b"HWSTORE\n";

/// Probes until the store is closed.
pub(crate) fn run(servers: &Arc<Servers>) {
    let mut keep_at = Instant::now() + servers.limits.keep_every;
    let keeping = Arc::new(AtomicBool::new(false));
    while !servers.is_closed() {
        // If this thread did not close the idle connections of a server without requests, nobody would.
        servers.list.iter().for_each(|server| server.drop_old(servers.limits.idle));
        let now = Instant::now();
        let (due, mut next) = take_due(servers, now);
        for index in due {
            let probing = Arc::clone(servers);
            // A server that hangs must not keep the others waiting.
            let started = std::thread::Builder::new()
                .name(format!("probe-{index}"))
                .spawn(move || probe(&probing, index));
            if let Err(e) = started {
                tracing::warn!(error = %e, "cannot start a thread that probes a server; trying again");
                done(servers, index);
            }
        }
        if now >= keep_at {
            keep_at = now + servers.limits.keep_every;
            servers.state.lock().pins_due = true;
        }
        next = next.min(keep_at);
        if servers.state.lock().pins_due {
            keep_in_background(servers, &keeping);
        }
        let mut state = servers.state.lock();
        // Opening a version does not wake this thread. If servers are being informed of other versions, the
        // end of that wakes it.
        if !servers.is_closed() && (!state.pins_due || keeping.load(Ordering::Acquire)) {
            servers.changed.wait_until(&mut state, next.max(now + Duration::from_millis(10)));
        }
    }
}

/// The servers to probe now, which are marked as probed, and the time at which the next one is due.
fn take_due(servers: &Servers, now: Instant) -> (Vec<usize>, Instant) {
    let mut due = Vec::new();
    let mut next = now + MEASURE_AFTER;
    let several = servers.list.len() > 1;
    for (index, record) in servers.state.lock().records.iter_mut().enumerate() {
        let at = match record.health {
            Health::Down { probe_at, .. } | Health::Aside { probe_at, .. } => probe_at,
            Health::Up if several => record.sampled_at + MEASURE_AFTER,
            _ => continue,
        };
        if record.probing {
            continue;
        }
        if at <= now {
            record.probing = true;
            due.push(index);
        } else {
            next = next.min(at);
        }
    }
    (due, next)
}

fn done(servers: &Servers, index: usize) {
    if let Some(record) = servers.state.lock().records.get_mut(index) {
        record.probing = false;
        record.probes += 1;
    }
    servers.announce_change();
}

fn probe(servers: &Arc<Servers>, index: usize) {
    let health = servers.state.lock().records.get(index).map(|record| record.health.clone());
    // A server that was put aside is probed past caches, because a cached `store` would hide its fault. A
    // server that is down is probed through caches, because a cache may still serve its data.
    let outcome = ask(servers, index, matches!(health, Some(Health::Aside { .. })));
    if outcome.is_err() {
        resolve_in_background(servers, index);
    }
    match outcome {
        Ok(first_byte) => servers.is_back(index, first_byte),
        Err(fault) => servers.probe_failed(index, &no_store(fault)),
    }
    done(servers, index);
}

/// Interprets the failure of a server to give the file `store`.
pub(crate) fn no_store(fault: Fault) -> Fault {
    match fault {
        Fault::Missing => Fault::Odd("there is no store at this URL (status 404)".into()),
        Fault::Wrong(why) => Fault::Odd(why),
        Fault::Stale => Fault::Gone(fault.to_string()),
        other => other,
    }
}

/// Asks a server for the start of the file `store`, bypassing caches or not. Returns the time to the first
/// byte.
pub(crate) fn ask(servers: &Servers, index: usize, bypass_caches: bool) -> Result<Duration, Fault> {
    let Some(server) = servers.list.get(index) else { return Err(Fault::Missing) };
    // Its known addresses first: a name server that does not answer must not delay a server that does.
    if server.address_count() == 0 {
        server.resolve()?;
    }
    servers.renew_token();
    let mut outcome = Err(Fault::Gone("its name has no address".into()));
    for _ in 0..server.address_count() {
        outcome = servers
            .start(index, "store", START, PriorRequests::caches(bypass_caches), true)
            .and_then(|transfer| finish(servers, transfer));
        match &outcome {
            // The next address of the name.
            Err(Fault::Gone(_) | Fault::Broke(_) | Fault::Busy(_)) => server.next_address(),
            _ => break,
        }
    }
    let (body, first_byte) = outcome?;
    if body.starts_with(MAGIC) {
        return Ok(first_byte);
    }
    Err(Fault::Odd("what is at this URL is not an image store".into()))
}

/// Looks the name up for the next probe, unless a lookup is in progress: it may have other addresses by now.
fn resolve_in_background(servers: &Arc<Servers>, index: usize) {
    let Some(server) = servers.list.get(index) else { return };
    if server.address_count() == 0 || server.resolving.swap(true, Ordering::AcqRel) {
        return;
    }
    let theirs = Arc::clone(servers);
    let started = std::thread::Builder::new().name(format!("resolve-{index}")).spawn(move || {
        let Some(server) = theirs.list.get(index) else { return };
        if let Err(fault) = server.resolve() {
            tracing::debug!(?fault, "cannot look up a server's name");
        }
        server.resolving.store(false, Ordering::Release);
    });
    if let Err(e) = started {
        tracing::warn!(error = %e, "cannot start a thread that looks up a server's name; trying again");
        server.resolving.store(false, Ordering::Release);
    }
}

fn finish(servers: &Servers, mut transfer: Transfer) -> Result<(Vec<u8>, Duration), Fault> {
    let longest = servers.limits.stall.saturating_mul(TOTAL_TIMEOUT_STALLS);
    while !transfer.advance()? {
        if transfer.started().elapsed() >= longest {
            let longest_s = longest.as_secs_f64();
            return Err(Fault::Gone(format!("it did not send the whole answer within {longest_s:.1} s")));
        }
        let silent = transfer.last_progress().elapsed();
        if servers.is_closed() || silent >= servers.limits.stall {
            return Err(Fault::Gone(format!("it did not answer for {:.1} s", silent.as_secs_f64())));
        }
        let connection = transfer.connection();
        let mut socket = [PollFd::from_borrowed_fd(connection.fd(), connection.interest())];
        let longest = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };
        let _ = poll(&mut socket, Some(&longest));
    }
    let (first_byte, _) = transfer.times();
    Ok((transfer.finish().0, first_byte))
}

/// Informs servers which versions are in use, unless that is still in progress.
fn keep_in_background(servers: &Arc<Servers>, keeping: &Arc<AtomicBool>) {
    if keeping.swap(true, Ordering::AcqRel) {
        return;
    }
    let (telling, is_done) = (Arc::clone(servers), Arc::clone(keeping));
    let started = std::thread::Builder::new().name("keep-versions".into()).spawn(move || {
        keep_versions(&telling);
        is_done.store(false, Ordering::Release);
        // Other versions may have been opened meanwhile.
        telling.announce_change();
    });
    if let Err(e) = started {
        tracing::warn!(error = %e, "cannot start a thread that tells servers which versions are in use");
        // The next attempt is after `keep_every`.
        servers.state.lock().pins_due = false;
        keeping.store(false, Ordering::Release);
    }
}

/// Requests the first byte of each manifest in use, bypassing caches. A server that gets this request keeps
/// the version for an hour.
fn keep_versions(servers: &Servers) {
    let (pins, up) = {
        let mut state = servers.state.lock();
        state.pins_due = false;
        let pins: Vec<Hash> = state.pins.iter().map(|(manifest, _)| *manifest).collect();
        let is_up = |health: &Health| matches!(health, Health::Up | Health::Distrusted { .. });
        let up = state.records.iter().enumerate().filter(|(_, record)| is_up(&record.health));
        (pins, up.map(|(index, _)| index).collect::<Vec<_>>())
    };
    if !pins.is_empty() {
        // Reads renew a replaced token; without reads, this must.
        servers.renew_token();
    }
    for server in up {
        for manifest in &pins {
            if servers.is_closed() {
                return;
            }
            let path = format!("manifests/{manifest}");
            let wanted = Wanted::Range { first: 0, len: 1, total: None };
            let asked = servers
                .start(server, &path, wanted, PriorRequests::caches(true), true)
                .and_then(|transfer| finish(servers, transfer));
            let Err(fault) = asked else { continue };
            tracing::debug!(server, ?fault, %manifest, "cannot inform a server that a version is in use");
            if !matches!(fault, Fault::Missing | Fault::Wrong(_)) {
                // The server would not get the requests for the other versions either.
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    #[test]
    fn connections_that_nobody_uses_are_closed() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let url = format!("http://{address}").parse().unwrap();
        let limits = crate::Limits { idle: Duration::ZERO, ..crate::Limits::default() };
        let servers =
            Servers::new(vec![url], None, None, (limits, headwater_store::WhileBusy::default())).unwrap();
        servers.list[0].set_addresses(vec![address]);
        servers.keep(0, servers.list[0].connect().unwrap());
        let (mut end, _) = listener.accept().unwrap();
        let probing = Arc::clone(&servers);
        let thread = std::thread::spawn(move || run(&probing));
        end.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(end.read(&mut [0]).unwrap(), 0);
        servers.close();
        thread.join().unwrap();
    }

    #[test]
    fn an_address_that_answers_is_asked_without_a_lookup() {
        // The name has another address, where nothing listens.
        let listener = TcpListener::bind(("127.0.0.2", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let answering = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            assert!(stream.read(&mut request).unwrap() > 0);
            let head = "HTTP/1.1 206 x\r\nContent-Length: 16\r\nContent-Range: bytes 0-15/64\r\n\r\n";
            stream.write_all(&[head.as_bytes(), MAGIC, &[0; 8]].concat()).unwrap();
        });
        let url = format!("http://127.0.0.1:{}", address.port()).parse().unwrap();
        let servers = Servers::new(
            vec![url],
            None,
            None,
            (crate::Limits::default(), headwater_store::WhileBusy::default()),
        )
        .unwrap();
        servers.list[0].set_addresses(vec![address]);
        probe(&servers, 0);
        assert!(matches!(servers.state.lock().records[0].health, Health::Up), "{:?}", servers.status());
        answering.join().unwrap();
        // The server is gone now, so its name is looked up for the following probes.
        probe(&servers, 0);
        assert!(!matches!(servers.state.lock().records[0].health, Health::Up));
        let until = Instant::now() + Duration::from_secs(60);
        while servers.list[0].known_addresses() == [address] {
            assert!(Instant::now() < until, "the name was not looked up");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
