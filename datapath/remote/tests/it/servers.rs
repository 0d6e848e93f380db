//! Servers that die, hang, send wrong bytes and come back, while reads go on.

use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{
    MANIFEST, OBJECT_BYTES, all_up, before, is_slow, limits, message, object, open, open_with_short_timeouts,
    options, read, short_timeouts, store, trace, until,
};
use headwater_remote::{Limits, Options, RemoteStore, ServerState};
use headwater_store::{Access, Hash, ImageName, LocalDir, Store, StoreError, StoreErrorKind};
use headwater_testkit::{FileServer, HttpFault, TestTls, run};

#[test]
fn a_store_is_read_through_a_plain_web_server() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let remote = open(&[&server]);
    assert!(remote.is_remote());
    assert_eq!(remote.chunk_bytes(), 65_536);
    let version = remote.resolve(&"debian".parse().unwrap()).unwrap();
    assert_eq!((version.number, version.manifest), (1, Hash::of(MANIFEST)));
    assert!(remote.image(&"nothing".parse().unwrap()).unwrap().is_none());
    assert_eq!(remote.manifest(version.manifest).unwrap(), MANIFEST);
    assert_eq!(remote.trace(version.manifest).unwrap().as_deref(), Some(&trace()[..]));
    assert_eq!(remote.trace(Hash::of(b"other")).unwrap(), None);
    assert_eq!(remote.manifest(Hash::of(b"other")).unwrap_err().kind(), StoreErrorKind::NotFound);
    // A plain web server has no list, and says so in a way that helps.
    let no_list = remote.images().unwrap_err().to_string();
    assert!(no_list.contains("do not list") && no_list.contains("name the image"), "{no_list}");

    assert_eq!(remote.open_object(Hash::of(&bytes)).unwrap().len_bytes(), bytes.len() as u64);
    let object = object(&remote, &bytes);
    for (at, len) in [(0, 1), (0, OBJECT_BYTES), (OBJECT_BYTES - 1, 1), (12_345, 70_000), (5, 0)] {
        read(&*object, &bytes, at, len).unwrap();
    }
    assert_eq!(object.read_range(1 << 20, &mut [0]).unwrap_err().kind(), StoreErrorKind::Damaged);
    let missing = remote.open_object_of(Hash::of(b"none"), 5).unwrap();
    assert_eq!(missing.read_range(0, &mut [0; 5]).unwrap_err().kind(), StoreErrorKind::NotFound);
    let debian = "debian".parse().unwrap();
    let changed = remote.change(&debian, &mut |_| Ok(()));
    for (refused, what) in [
        (remote.publish().map(drop), "make a version"),
        (remote.remove(&debian, None).map(drop), "remove image 'debian'"),
        (remote.remove(&debian, Some(3)).map(drop), "remove debian@3"),
        (changed, "change image 'debian'"),
    ] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::ReadOnly);
        let tried = format!("cannot {what} at {}: ", server.url());
        assert!(refused.to_string().starts_with(&tried), "{refused}");
    }
    let _pin = remote.pin(version.manifest).unwrap();
}

#[test]
fn servers_without_an_answer_are_not_reported_to_lack_a_list() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let (plain, silent) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    let open = |servers: &[&FileServer]| {
        open_with_short_timeouts(&Options { limits: short_timeouts(), ..options(servers) })
    };
    let both = open(&[&plain, &silent]);
    let alone = open(&[&silent]);
    all_up(&both);
    silent.fail_all(HttpFault::Hang);
    let error = alone.images().unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{text}");
    assert!(text.starts_with("cannot list images: no server answers: "), "{text}");
    assert!(text.contains(&silent.url()) && is_slow(&text), "{text}");
    assert!(!text.contains("do not list"), "{text}");
    let error = alone.image(&"debian".parse().unwrap()).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{text}");
    assert!(
        text.starts_with("cannot find out whether image 'debian' exists: no server gives images/debian: "),
        "{text}"
    );
    assert!(text.ends_with("try again)"), "{text}");
    let mut text = String::new();
    until(&both, "the one that answers does so in time", || {
        text = both.images().unwrap_err().to_string();
        text.contains(&format!("not at {}", plain.url()))
    });
    assert!(text.starts_with("cannot list images: no server gives images/: "), "{text}");
}

#[test]
fn connections_are_reused() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let remote = open(&[&server]);
    let object = object(&remote, &bytes);
    read(&*object, &bytes, 0, 1).unwrap();
    let before = server.connections();
    for n in 0..100 {
        read(&*object, &bytes, n * 1000, 1000).unwrap();
    }
    assert_eq!(server.connections(), before);
    assert!(remote.counters().fetched_bytes >= 100_000);
}

#[test]
fn tls_is_verified_and_tokens_are_sent() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let (tls, other) = (TestTls::new(), TestTls::new());
    let server = FileServer::start(dir.path(), Some(&tls));
    server.ask_for_token("sesame");
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        Some(path)
    };
    let (ca, wrong_ca) = (write("ca", &tls.ca_pem), write("wrong-ca", &other.ca_pem));
    let (token, wrong_token) = (write("token", "sesame\n"), write("wrong-token", "simsim"));
    let try_open = |ca_file: &Option<_>, token_file: &Option<_>| {
        let (ca_file, token_file) = (ca_file.clone(), token_file.clone());
        RemoteStore::open(Options { ca_file, token_file, ..options(&[&server]) })
    };
    let remote = try_open(&ca, &token).unwrap();
    read(&*object(&remote, &bytes), &bytes, 1000, 500_000).unwrap();
    let refused = try_open(&wrong_ca, &token).unwrap_err().to_string();
    assert!(refused.contains("trusted") && refused.contains(&server.url()), "{refused}");
    assert!(refused.contains("--ca FILE") && !refused.contains("UnknownIssuer"), "{refused}");
    let of_authority = TestTls::of_authority();
    let own = FileServer::start(dir.path(), Some(&of_authority));
    let ca_file = write("own-ca", &of_authority.ca_pem);
    let refused = RemoteStore::open(Options { ca_file, ..options(&[&own]) }).unwrap_err().to_string();
    assert!(refused.contains("CA:FALSE") && !refused.contains("OtherError"), "{refused}");
    for bad in [&wrong_token, &None] {
        let refused = try_open(&ca, bad).unwrap_err().to_string();
        assert!(refused.contains("token"), "{refused}");
    }
    let empty = write("empty", "\n");
    assert!(try_open(&ca, &empty).unwrap_err().to_string().contains("exactly one word"));
    // A token is never sent over a network without encryption.
    let urls = vec!["http://192.0.2.1".parse().unwrap()];
    let clear = RemoteStore::open(Options { token_file: token, ..Options::new(urls) });
    assert!(clear.unwrap_err().to_string().contains("unencrypted"));
}

#[test]
fn a_failed_open_names_the_answer_of_each_server() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let empty = tempfile::tempdir().unwrap();
    let (mut dead, other) = (FileServer::start(dir.path(), None), FileServer::start(empty.path(), None));
    dead.kill();
    let refused = RemoteStore::open(options(&[&dead, &other])).unwrap_err().to_string();
    for part in [dead.url(), "refused".into(), other.url(), "no store at this URL".into()] {
        assert!(refused.contains(&part), "{part}: {refused}");
    }
    // One server is enough.
    let good = FileServer::start(dir.path(), None);
    open(&[&dead, &other, &good]);
    assert_eq!(RemoteStore::open(Options::new(Vec::new())).unwrap_err().kind(), StoreErrorKind::Invalid);
}

/// The delay of a server that is not to be preferred: longer than a probe of another one takes on a busy
/// host.
const SLOW: HttpFault = HttpFault::Delay(Duration::from_millis(200));

#[test]
fn a_server_with_wrong_bytes_is_put_aside_and_others_continue() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    for (fault, says) in [
        (HttpFault::WrongBytes, "wrong bytes"),
        (HttpFault::Short, "instead of"),
        (HttpFault::Endless, "without a length"),
        // The fault is noticed with this answer, or at the beginning of the next one.
        (HttpFault::TooMuch, ""),
        (HttpFault::Redirect("http://192.0.2.1/".into()), "redirects to 'http://192.0.2.1/'"),
        (HttpFault::NoRanges, "range requests"),
        (HttpFault::Garbage, "not HTTP/1.1"),
        (HttpFault::Status(418), "status 418"),
        (HttpFault::Status(403), "token"),
    ] {
        let (faulty, good) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
        let limits = Limits {
            probe_after: Duration::from_secs(5),
            probe_after_max: Duration::from_secs(5),
            ..limits()
        };
        // So that the server with wrong bytes is preferred, from the first probe on and on a busy host too.
        good.fail_all(SLOW);
        let remote = RemoteStore::open(Options { limits, ..options(&[&faulty, &good]) }).unwrap();
        all_up(&remote);
        let object = object(&remote, &bytes);
        faulty.fail(fault.clone());
        for n in 0..50 {
            read(&*object, &bytes, n % 5 * 40_000, 40_000).unwrap();
            if n >= 4 && remote.status().servers[0].state == ServerState::Aside {
                break;
            }
        }
        let status = remote.status();
        assert_eq!(
            status.servers[0].state,
            ServerState::Aside,
            "{fault:?}: {status:?} {:?}",
            remote.counters()
        );
        assert!(status.servers[0].why.as_ref().unwrap().contains(says), "{fault:?}: {status:?}");
        assert_eq!(status.servers[1].state, ServerState::Up);
        // Good bytes are used, whatever comes after them.
        assert!(remote.counters().failovers >= 1 || fault == HttpFault::TooMuch, "{fault:?}");
        assert_eq!(remote.counters().waits, 0, "{fault:?}");
    }
}

/// A caching proxy before a server. Its copies of objects have a wrong bit, except for requests with
/// `no-cache`.
struct BadCache {
    address: SocketAddr,
    past: Arc<AtomicU64>,
}

impl BadCache {
    fn before(server: &FileServer) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (address, behind) = (listener.local_addr().unwrap(), server.address());
        let past = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&past);
        // Both end with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, past) = (client.unwrap(), Arc::clone(&counted));
                std::thread::spawn(move || relay(client, TcpStream::connect(behind).unwrap(), &past));
            }
        });
        Self { address, past }
    }
}

fn relay(mut client: TcpStream, mut server: TcpStream, past: &AtomicU64) -> Option<()> {
    let (mut asks, mut answers) =
        (BufReader::new(client.try_clone().unwrap()), BufReader::new(server.try_clone().unwrap()));
    while let Some((asked, _)) = message(&mut asks) {
        server.write_all(asked.as_bytes()).ok()?;
        let (head, mut body) = message(&mut answers)?;
        if asked.contains("Cache-Control: no-cache") {
            past.fetch_add(1, Ordering::SeqCst);
        } else if asked.contains(" /objects/") {
            body[0] ^= 1;
        }
        client.write_all(&[head.as_bytes(), &body].concat()).ok()?;
    }
    Some(())
}

#[test]
fn a_cache_with_wrong_bytes_is_bypassed() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let cache = BadCache::before(&server);
    let url = format!("http://{}", cache.address).parse().unwrap();
    let remote = RemoteStore::open(Options { limits: limits(), ..Options::new(vec![url]) }).unwrap();
    read(&*object(&remote, &bytes), &bytes, 1000, 100_000).unwrap();
    assert_eq!(cache.past.load(Ordering::SeqCst), 1);
    // The server is not blamed.
    assert_eq!(remote.status().servers[0].state, ServerState::Up);
    // It is blamed if its own bytes are wrong.
    server.fail(HttpFault::WrongBytes);
    let error = read(&*object(&remote, &bytes), &bytes, 0, 3000).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Damaged);
    assert_eq!(remote.counters().wrong_answers, 1);
}

#[test]
fn damage_on_every_server_fails_only_that_read() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let (a, b) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    let remote = open(&[&a, &b]);
    all_up(&remote);
    let object = object(&remote, &bytes);
    a.fail(HttpFault::WrongBytes);
    b.fail(HttpFault::WrongBytes);
    let error = read(&*object, &bytes, 0, 1000).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Damaged);
    assert!(error.to_string().contains("no server has good bytes"), "{error}");
    assert_eq!(remote.counters().wrong_answers, 2);
    // Both are distrusted, but are used if no other server is left.
    a.fail(HttpFault::None);
    read(&*object, &bytes, 0, 1000).unwrap();
}

#[test]
fn readers_do_not_notice_a_server_killed_during_reads() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let (mut a, b) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    // So that the server that dies is preferred until then.
    b.fail_all(SLOW);
    let remote = open(&[&a, &b]);
    all_up(&remote);
    let object = object(&remote, &bytes);
    // Answers are on their way when it dies.
    let delay = HttpFault::Delay(Duration::from_millis(5));
    a.fail(delay.clone());
    std::thread::scope(|scope| {
        for reader in 0..4usize {
            let (object, bytes) = (&object, &bytes);
            scope.spawn(move || {
                for n in 0..100 {
                    read(&**object, bytes, (reader * 100 + n) * 2000, 30_000).unwrap();
                }
            });
        }
        until(&remote, "it is asked", || a.object_requests() > 4);
        b.fail(delay);
        a.kill();
    });
    let counters = remote.counters();
    assert_eq!(counters.waits, 0, "{counters:?}");
    assert!(a.object_requests() > 0 && b.object_requests() > a.object_requests());
    // It is used again when it is back.
    a.revive();
    all_up(&remote);
}

#[test]
fn a_server_that_breaks_off_or_hangs_delays_reads_briefly() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    for fault in
        [HttpFault::BreakAfter(1000), HttpFault::HangAfter(1000), HttpFault::Hang, HttpFault::Status(500)]
    {
        let (bad, good) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
        good.fail_all(SLOW);
        let remote = open(&[&bad, &good]);
        all_up(&remote);
        let object = object(&remote, &bytes);
        bad.fail(fault.clone());
        for n in 0..10 {
            read(&*object, &bytes, n * 100_000, 100_000).unwrap();
        }
        let counters = remote.counters();
        assert_eq!(counters.waits, 0, "{fault:?}: {counters:?}");
        assert!(good.object_requests() >= 10 && bad.object_requests() > 0, "{fault:?}");
        if matches!(fault, HttpFault::Hang | HttpFault::HangAfter(_)) {
            assert!(counters.hedges_won >= 1, "{fault:?}: {counters:?}");
        }
    }
}

#[test]
fn a_crawling_read_moves_to_a_server_that_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    // Either the other server is known to be down when the read is late, or the read finds that out.
    for is_known in [true, false] {
        let (crawling, mut other) =
            (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
        other.fail_all(SLOW);
        if is_known {
            other.kill();
        }
        let remote = open(&[&crawling, &other]);
        if !is_known {
            all_up(&remote);
            other.kill();
        }
        crawling.fail(HttpFault::Drip(Duration::from_millis(20)));
        let (object, content, begun) = (object(&remote, &bytes), bytes.clone(), Instant::now());
        let reader = std::thread::spawn(move || read(&*object, &content, 0, 1000));
        until(&remote, "the read is late, and no other server is up", || {
            crawling.object_requests() > 0
                && begun.elapsed() > limits().hedge_after_max * 3
                && remote.status().servers[1].state == ServerState::Down
        });
        other.fail(HttpFault::None);
        other.revive();
        until(&remote, "the read continues at the other server", || reader.is_finished());
        reader.join().unwrap().unwrap();
        assert_eq!(remote.counters().hedges_won, 1, "{:?}", remote.counters());
    }
}

#[test]
fn the_faster_server_is_preferred() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let (slow, fast) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    slow.fail_all(SLOW);
    let remote = open(&[&slow, &fast]);
    all_up(&remote);
    let object = object(&remote, &bytes);
    for n in 0..100 {
        read(&*object, &bytes, n * 1000, 10_000).unwrap();
    }
    assert!(fast.object_requests() >= 80, "{} and {}", slow.object_requests(), fast.object_requests());
}

/// The address of a relay to a server that delays the first bytes of each connection. Over TLS, those are the
/// handshake's. It ends with the test's process.
fn slow_to_begin(server: &FileServer, pause: Duration) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (address, behind) = (listener.local_addr().unwrap(), server.address());
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(behind).unwrap());
            for end in [&client, &server] {
                end.set_nodelay(true).unwrap();
            }
            let (mut asks, mut asked) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut asks, &mut asked));
            std::thread::spawn(move || {
                let mut first = [0; 4096];
                let len = server.read(&mut first)?;
                std::thread::sleep(pause);
                client.write_all(&first[..len])?;
                std::io::copy(&mut server, &mut client)
            });
        }
    });
    address
}

#[test]
fn connection_setup_does_not_count_as_slowness() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let tls = TestTls::new();
    let (slow, fast) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), Some(&tls)));
    slow.fail_all(SLOW);
    let line = slow_to_begin(&fast, Duration::from_millis(800));
    let ca_file = dir.path().join("ca");
    std::fs::write(&ca_file, &tls.ca_pem).unwrap();
    let urls = vec![slow.url().parse().unwrap(), format!("https://{line}").parse().unwrap()];
    // A request on a new connection is not dropped in favour of another server.
    let never = Duration::from_secs(60);
    let limits = Limits { hedge_after: never, hedge_after_max: never, ..limits() };
    let options = Options { ca_file: Some(ca_file), limits, ..Options::new(urls) };
    let remote = RemoteStore::open(options).unwrap();
    all_up(&remote);
    let object = object(&remote, &bytes);
    for n in 0..30 {
        read(&*object, &bytes, n * 1000, 10_000).unwrap();
    }
    assert!(fast.object_requests() >= 25, "{} and {}", slow.object_requests(), fast.object_requests());
}

#[test]
fn a_read_on_a_new_connection_is_not_late_before_that_is_ready() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let tls = TestTls::new();
    let (other, server) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), Some(&tls)));
    // The other server is up, and is not preferred.
    other.fail_all(SLOW);
    let line = slow_to_begin(&server, Duration::from_secs(2));
    let ca_file = dir.path().join("ca");
    std::fs::write(&ca_file, &tls.ca_pem).unwrap();
    let urls = vec![other.url().parse().unwrap(), format!("https://{line}").parse().unwrap()];
    // The limit of lateness is below the delay of the relay, and far above the time of an answer. Each read
    // is on a new connection.
    let limits = Limits {
        hedge_after: Duration::from_millis(1500),
        hedge_after_max: Duration::from_secs(60),
        idle: Duration::ZERO,
        ..limits()
    };
    let options = Options { ca_file: Some(ca_file), limits, ..Options::new(urls) };
    let remote = RemoteStore::open(options).unwrap();
    all_up(&remote);
    let object = object(&remote, &bytes);
    let before = (server.object_requests(), remote.counters().hedges);
    for n in 0..2 {
        read(&*object, &bytes, n * 1000, 10_000).unwrap();
    }
    let after = (server.object_requests(), remote.counters().hedges);
    assert_eq!(after, (before.0 + 2, before.1), "{:?}", remote.status());
}

#[test]
fn reads_wait_while_all_servers_are_down() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let (mut a, mut b) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    let remote = open(&[&a, &b]);
    all_up(&remote);
    let object = object(&remote, &bytes);
    read(&*object, &bytes, 0, 1000).unwrap();
    a.kill();
    b.kill();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|n| {
                let (object, bytes) = (&object, &bytes);
                scope.spawn(move || read(&**object, bytes, n * 5000, 5000))
            })
            .collect();
        until(&remote, "all of them wait", || remote.status().waiting >= 3);
        let status = remote.status();
        assert!(status.servers.iter().all(|server| server.state == ServerState::Down), "{status:?}");
        assert!(status.reasons().contains("refused"), "{}", status.reasons());
        assert!(readers.iter().all(|reader| !reader.is_finished()));
        b.revive();
        for reader in readers {
            reader.join().unwrap().unwrap();
        }
    });
    assert_eq!(remote.counters().waits, 3);
    assert_eq!(remote.status().waiting_for, Duration::ZERO);

    // Closing ends a wait.
    b.kill();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&*object, &bytes, 0, 10));
        until(&remote, "the read waits", || remote.status().waiting != 0);
        remote.close();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("closed"), "{error}");
    });
}

#[test]
fn fail_fast_reads_fail_while_all_servers_are_down() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let mut server = FileServer::start(dir.path(), None);
    let remote = open(&[&server]);
    let fail_fast = remote.fail_fast().unwrap();
    assert!(fail_fast.fail_fast().is_none());
    let (waits, fails) = (object(&remote, &bytes), fail_fast.open_object(Hash::of(&bytes)).unwrap());
    read(&*fails, &bytes, 0, 1000).unwrap();
    server.kill();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&*waits, &bytes, 0, 1000));
        assert_eq!(read(&*fails, &bytes, 0, 1000).unwrap_err().kind(), StoreErrorKind::Unreachable);
        server.revive();
        waiting.join().unwrap().unwrap();
    });
    all_up(&remote);
    read(&*fails, &bytes, 0, 1000).unwrap();
    // Reads do not wait for a server that is up but cannot give this.
    server.fail(HttpFault::Status(500));
    let error = read(&*fails, &bytes, 0, 1000).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Io, "{error}");
    server.fail(HttpFault::Status(503));
    assert_eq!(read(&*fails, &bytes, 0, 1000).unwrap_err().kind(), StoreErrorKind::Unreachable);
}

#[test]
fn a_single_server_that_breaks_off_is_asked_again_until_it_answers() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let limits = Limits { wait_for_better: Duration::from_secs(600), ..limits() };
    let remote = RemoteStore::open(Options { limits, ..options(&[&server]) }).unwrap();
    let object = object(&remote, &bytes);
    server.fail(HttpFault::BreakAfter(10));
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&*object, &bytes, 0, 100_000));
        until(&remote, "it is asked again and again", || server.object_requests() >= 5);
        server.fail(HttpFault::None);
        reading.join().unwrap().unwrap();
    });
    // A busy server gets no requests for a moment, and is then asked again.
    server.fail(HttpFault::Status(503));
    std::thread::scope(|scope| {
        let before = server.object_requests();
        let reading = scope.spawn(|| read(&*object, &bytes, 0, 100_000));
        until(&remote, "the server refused once", || server.object_requests() != before);
        server.fail(HttpFault::None);
        reading.join().unwrap().unwrap();
    });
}

#[test]
fn the_time_during_which_a_server_was_down_does_not_count_as_damage() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let mut server = FileServer::start(dir.path(), None);
    let wait_for_better = Duration::from_secs(8);
    let limits = Limits { wait_for_better, probe_after: Duration::from_millis(200), ..limits() };
    let remote = RemoteStore::open(Options { limits, ..options(&[&server]) }).unwrap();
    let object = object(&remote, &bytes);
    server.fail(HttpFault::BreakAfter(10));
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&*object, &bytes, 0, 100_000));
        let asked = |server: &FileServer, times: u64| {
            until(&remote, "it is asked", || server.object_requests() >= times || reading.is_finished());
        };
        asked(&server, 1);
        server.kill();
        // The server is away for as long as reads wait for a better answer. If this time counted, the next
        // broken answer would end the read.
        std::thread::sleep(wait_for_better);
        let before = server.object_requests();
        server.revive();
        asked(&server, before + 2);
        server.fail(HttpFault::None);
        reading.join().unwrap().unwrap();
    });
}

/// A copy of a store whose one object is cut short.
fn cut_short(store: &Path, bytes: &[u8], len: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    run("coreutils", "cp", &["-r", &format!("{}/.", store.display()), &dir.path().display().to_string()]);
    let object = dir.path().join("objects").join(Hash::of(bytes).to_string());
    run("coreutils", "chmod", &["u+w", &object.display().to_string()]);
    std::fs::File::options().write(true).open(object).unwrap().set_len(len).unwrap();
    dir
}

#[test]
fn a_truncated_object_on_a_server_fails_only_its_own_reads() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let cut_dir = cut_short(dir.path(), &bytes, 1000);
    let cut = FileServer::start(cut_dir.path(), None);
    // The server has nothing of the range, or a part of it, or all of it with a wrong length.
    let reads = [(5000, 100), (900, 200), (0, 100)];
    let remote = open(&[&cut]);
    let alone = object(&remote, &bytes);
    for (at, len) in reads {
        let error = read(&*alone, &bytes, at, len).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
        assert!(error.to_string().contains("no server has good bytes"), "{error}");
        // The server can be used for everything else: calls that do not wait find it.
        assert_eq!(remote.manifest(Hash::of(MANIFEST)).unwrap(), MANIFEST);
    }
    assert_eq!((remote.counters().waits, remote.counters().wrong_answers), (0, 3));

    let whole = FileServer::start(dir.path(), None);
    // So that the other server is preferred.
    whole.fail_all(SLOW);
    let remote = open(&[&cut, &whole]);
    all_up(&remote);
    let object = object(&remote, &bytes);
    for (at, len) in reads {
        read(&*object, &bytes, at, len).unwrap();
    }
    let status = remote.status();
    assert!(status.servers.iter().all(|server| server.state == ServerState::Up), "{status:?}");
    assert!(remote.counters().failovers >= 1, "{:?}", remote.counters());
}

#[test]
fn a_file_that_always_breaks_off_fails_only_its_reads() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    for fault in [HttpFault::BreakAfter(10), HttpFault::Status(500)] {
        let server = FileServer::start(dir.path(), None);
        let remote = open(&[&server]);
        let object = object(&remote, &bytes);
        server.fail(fault.clone());
        let error = read(&*object, &bytes, 0, 1000).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Damaged, "{fault:?}: {error}");
        assert!(server.object_requests() >= 3, "{fault:?}");
        assert_eq!(remote.manifest(Hash::of(MANIFEST)).unwrap(), MANIFEST, "{fault:?}");
        // The reader knows, or finds out soon, that the server lacks other parts of the object.
        let before = server.object_requests();
        assert_eq!(read(&*object, &bytes, 5000, 1000).unwrap_err().kind(), StoreErrorKind::Damaged);
        assert_eq!(server.object_requests(), before + 2, "{fault:?}");
        assert_eq!(remote.status().servers[0].state, ServerState::Up, "{fault:?}");
        server.fail(HttpFault::None);
        read(&*object, &bytes, 0, 1000).unwrap();
    }
}

/// Starts a read of the object, waits until `waits` is true, calls `back`, and returns the result of the
/// read.
fn reading_while(
    remote: &RemoteStore,
    bytes: &[u8],
    waits: impl Fn() -> bool,
    back: impl FnOnce(),
) -> Result<(), StoreError> {
    let object = object(remote, bytes);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&*object, bytes, 5000, 300_000));
        until(remote, "it waits", || waits() || reading.is_finished());
        if !waits() {
            panic!("{:?}: {:?}", reading.join(), remote.status());
        }
        back();
        reading.join().unwrap()
    })
}

#[test]
fn reads_wait_for_the_data_of_a_missing_server() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let bytes = store(dir.path());
    store(other.path());
    std::fs::remove_file(other.path().join("objects").join(Hash::of(&bytes).to_string())).unwrap();
    let (mut holder, lacking) = (FileServer::start(dir.path(), None), FileServer::start(other.path(), None));
    let remote = open(&[&holder, &lacking]);
    all_up(&remote);
    holder.kill();
    // It is asked again and again, since it may get the object meanwhile.
    let waits = || lacking.object_requests() >= 4;
    reading_while(&remote, &bytes, waits, || holder.revive()).unwrap();
    // It gets the object, and the other server does not come back.
    holder.kill();
    let asked = lacking.object_requests();
    let get = || {
        let name = |dir: &Path| dir.join("objects").join(Hash::of(&bytes).to_string());
        std::fs::copy(name(dir.path()), other.path().join("new")).unwrap();
        std::fs::rename(other.path().join("new"), name(other.path())).unwrap();
    };
    reading_while(&remote, &bytes, || lacking.object_requests() >= asked + 2, get).unwrap();
    // An object that no server has does not exist.
    holder.revive();
    all_up(&remote);
    let missing = remote.open_object_of(Hash::of(b"none"), 5).unwrap();
    assert_eq!(missing.read_range(0, &mut [0; 5]).unwrap_err().kind(), StoreErrorKind::NotFound);
}

#[test]
fn reads_wait_for_a_web_server_without_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (at, away) = (dir.path().join("store"), dir.path().join("away"));
    let bytes = store(&at);
    let server = FileServer::start(&at, None);
    let remote = open(&[&server]);
    std::fs::rename(&at, &away).unwrap();
    let waits = || remote.status().servers[0].state == ServerState::Aside;
    reading_while(&remote, &bytes, waits, || std::fs::rename(&away, &at).unwrap()).unwrap();
}

#[test]
fn metadata_that_is_wrong_on_one_server_comes_from_another() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let image: ImageName = "debian".parse().unwrap();
    for fault in [
        HttpFault::WrongBytes,
        HttpFault::Short,
        HttpFault::Endless,
        HttpFault::TooMuch,
        HttpFault::Redirect("http://127.0.0.1:9/".into()),
        HttpFault::Garbage,
        HttpFault::Status(403),
        HttpFault::Status(500),
        HttpFault::Status(404),
    ] {
        type Ask<'a> = &'a dyn Fn(&RemoteStore) -> Result<bool, StoreError>;
        let asked: [(&str, Ask<'_>); 3] = [
            ("manifest", &|remote| remote.manifest(Hash::of(MANIFEST)).map(|bytes| bytes == MANIFEST)),
            ("image", &|remote| {
                remote.image(&image).map(|image| image.is_some_and(|image| image.versions.len() == 1))
            }),
            ("trace", &|remote| remote.trace(Hash::of(MANIFEST)).map(|bytes| bytes == Some(trace()))),
        ];
        for (what, ask) in asked {
            let (faulty, good) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
            // So that the server with wrong bytes is preferred, from the first probe on.
            good.fail_all(SLOW);
            let remote = open(&[&faulty, &good]);
            all_up(&remote);
            faulty.fail_all(fault.clone());
            let before = faulty.requests();
            for _ in 0..2 {
                assert!(ask(&remote).unwrap(), "{what} {fault:?}");
            }
            assert!(faulty.requests() > before, "{what} {fault:?}: the faulty server was not asked");
        }
    }

    // If all servers send wrong bytes, the read ends.
    let (faulty, other) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    let remote = open(&[&faulty, &other]);
    all_up(&remote);
    faulty.fail_all(HttpFault::WrongBytes);
    other.fail_all(HttpFault::WrongBytes);
    // A trace is only a hint: no server is put aside for a wrong one.
    let error = remote.trace(Hash::of(MANIFEST)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
    assert_eq!(remote.counters().wrong_answers, 0);
    let error = remote.manifest(Hash::of(MANIFEST)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
}

/// Copies the one object from these servers to a new store. Returns the result.
fn copied(remote: &RemoteStore, bytes: &[u8], to: &Path) -> Result<(), StoreError> {
    let target = LocalDir::open(to, Access::Copy { new_chunk_bytes: remote.chunk_bytes() }).unwrap();
    let (object, mut most) = (object(remote, bytes), 0);
    let mut publication = target.publish()?;
    headwater_store::copy_object(publication.as_mut(), object.as_ref(), &mut |there| {
        most = there.max(most);
        Ok(())
    })?;
    assert_eq!(most, bytes.len() as u64);
    let mut back = vec![0; bytes.len()];
    target.open_object(Hash::of(bytes))?.read_range(0, &mut back)?;
    assert!(back == bytes);
    Ok(())
}

#[test]
fn a_copy_with_a_wrong_hash_continues_at_another_server() {
    let (dir, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let bytes = store(dir.path());
    let (faulty, good) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    // So that the server with wrong bytes is preferred, from the first probe on.
    good.fail_all(SLOW);
    let remote = open(&[&faulty, &good]);
    all_up(&remote);
    faulty.fail(HttpFault::WrongBytes);
    // The beginning that an earlier copy left is wrong, too.
    drop(LocalDir::open(to.path(), Access::WRITE).unwrap());
    std::fs::write(to.path().join("tmp").join(format!("{}.part", Hash::of(&bytes))), [9; 1000]).unwrap();
    copied(&remote, &bytes, to.path()).unwrap();
    assert_eq!(remote.counters().wrong_answers, 1, "{:?}", remote.counters());

    // If all servers send wrong bytes, the copy ends.
    good.fail(HttpFault::WrongBytes);
    let to = tempfile::tempdir().unwrap();
    let error = copied(&remote, &bytes, to.path()).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
    assert!(remote.status().servers.iter().all(|server| server.state == ServerState::Aside));
}

#[test]
fn a_copy_bypasses_a_cache_with_wrong_bytes() {
    let (dir, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let cache = BadCache::before(&server);
    let url = format!("http://{}", cache.address).parse().unwrap();
    let remote = RemoteStore::open(Options { limits: limits(), ..Options::new(vec![url]) }).unwrap();
    copied(&remote, &bytes, to.path()).unwrap();
    assert!(cache.past.load(Ordering::SeqCst) > 0);
    // The server is not blamed here. It is blamed if its own bytes are wrong.
    assert_eq!(remote.counters().wrong_answers, 0);
    assert_eq!(remote.status().servers[0].state, ServerState::Up);
    server.fail(HttpFault::WrongBytes);
    let to = tempfile::tempdir().unwrap();
    assert_eq!(copied(&remote, &bytes, to.path()).unwrap_err().kind(), StoreErrorKind::Damaged);
    // It was read once more, since there may be several servers behind one address.
    assert_eq!(remote.counters().wrong_answers, 2);
}

#[test]
fn a_full_reread_sends_its_attempt_number() {
    let (dir, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let said = Arc::<Mutex<Vec<Option<String>>>>::default();
    let says = Arc::clone(&said);
    let note = move |asked: &str, _: usize| {
        let reading = asked.lines().find_map(|line| line.strip_prefix("Headwater-Reading: "));
        let is_past = asked.contains("Cache-Control: no-cache");
        if asked.contains(" /objects/") {
            assert_eq!(reading.is_some(), is_past, "{asked}");
            says.lock().unwrap().push(reading.map(str::to_owned));
        }
        None::<Vec<u8>>
    };
    let url = before(&server, Arc::new(note)).parse().unwrap();
    let remote = RemoteStore::open(Options { limits: limits(), ..Options::new(vec![url]) }).unwrap();
    server.fail(HttpFault::WrongBytes);
    assert_eq!(copied(&remote, &bytes, to.path()).unwrap_err().kind(), StoreErrorKind::Damaged);
    let mut said = said.lock().unwrap().clone();
    said.dedup();
    assert_eq!(said, [None, Some("1".to_owned()), Some("2".to_owned())]);
}

#[test]
fn an_object_cut_short_on_one_server_is_copied_from_others() {
    let [dir, cut_dir, to] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let bytes = store(dir.path());
    assert!(store(cut_dir.path()) == bytes);
    let id = Hash::of(&bytes);
    let object = cut_dir.path().join("objects").join(id.to_string());
    std::fs::File::options().write(true).open(object).unwrap().set_len(1000).unwrap();
    let (cut, whole) = (FileServer::start(cut_dir.path(), None), FileServer::start(dir.path(), None));
    // So that the server with the cut object is preferred, from the first probe on.
    whole.fail_all(SLOW);
    let remote = open(&[&cut, &whole]);
    all_up(&remote);
    let target = LocalDir::open(to.path(), Access::Copy { new_chunk_bytes: remote.chunk_bytes() }).unwrap();
    let what = headwater_store::copy::selected(&remote, &["debian".parse().unwrap()]).unwrap();
    let objects_of = |_: &[u8]| Ok(vec![(id, bytes.len() as u64)]);
    let copied = headwater_store::copy(&remote, &target, &what, &objects_of, false, &mut |_| Ok(())).unwrap();
    assert_eq!((copied.versions, copied.failed.len()), (1, 0), "{copied:?}");
    assert_eq!(copied.bytes, bytes.len() as u64);
    assert!(std::fs::read(to.path().join("objects").join(id.to_string())).unwrap() == bytes);
}

#[test]
fn an_endless_answer_does_not_delay_other_probes() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let (endless, mut other) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    let limits = Limits { keep_every: Duration::from_millis(100), ..short_timeouts() };
    let remote = open_with_short_timeouts(&Options { limits, ..options(&[&endless, &other]) });
    all_up(&remote);
    let state = |server: usize| remote.status().servers[server].state;
    let object = object(&remote, &bytes);
    other.kill();
    until(&remote, "the other one is down", || {
        read(&*object, &bytes, 0, 1000).unwrap();
        state(1) == ServerState::Down
    });
    let _pin = remote.pin(Hash::of(MANIFEST)).unwrap();
    // The server is notified that the version is in use, and its answer to that never ends.
    endless.fail_all(HttpFault::Drip(Duration::from_millis(50)));
    let before = endless.requests();
    until(&remote, "it is notified of the version", || endless.requests() > before);
    other.revive();
    until(&remote, "the other one is back", || state(1) == ServerState::Up);
    until(&remote, "the endless one is down", || state(0) == ServerState::Down);
    let status = remote.status();
    assert!(is_slow(status.servers[0].why.as_ref().unwrap()), "{status:?}");

    // Opening ends, too, if there is no other server.
    let alone = Options { limits: short_timeouts(), ..options(&[&endless]) };
    let refused = RemoteStore::open(alone).unwrap_err().to_string();
    assert!(is_slow(&refused), "{refused}");
}
