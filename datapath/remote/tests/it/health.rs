//! How the state of servers changes, and which reads notice it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{
    Answers, MANIFEST, all_up, before, is_slow, limits, object, open, open_with_short_timeouts, options,
    read, short_timeouts, status, store, until,
};
use headwater_remote::{Limits, Options, RemoteStore, ServerState};
use headwater_store::{Check, Hash, Object, Store, StoreError, StoreErrorKind, Waiting};
use headwater_testkit::{FileServer, HttpFault, wait_until};

#[test]
fn a_replaced_token_is_used_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let token = dir.path().join("token");
    std::fs::write(&token, "old").unwrap();
    server.ask_for_token("old");
    let remote =
        RemoteStore::open(Options { token_file: Some(token.clone()), ..options(&[&server]) }).unwrap();
    let object = object(&remote, &bytes);
    read(&*object, &bytes, 0, 1000).unwrap();
    std::fs::write(&token, "new").unwrap();
    server.ask_for_token("new");
    std::thread::scope(|scope| {
        for n in 0..8 {
            let (object, bytes) = (&object, &bytes);
            scope.spawn(move || read(&**object, bytes, n * 1000, 1000).unwrap());
        }
    });
    let status = remote.status();
    assert_eq!((status.servers[0].state, status.servers[0].failures), (ServerState::Up, 0), "{status:?}");
    assert_eq!(remote.counters().waits, 0);
}

#[test]
fn a_read_that_waits_needs_no_thread_until_its_server_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let mut server = FileServer::start(dir.path(), None);
    let remote = open(&[&server]);
    let object = object(&remote, &bytes);
    server.kill();
    // All of them on this thread.
    let mut into = vec![0; 1000];
    let mut waiting: Vec<Waiting> = (0..40).map(|_| Waiting::default()).collect();
    let mut go_on = |number: usize, waiting: &mut Waiting| {
        let at = number * 1000;
        let check: &mut Check<'_> = &mut |_| Ok(());
        let is_read = object.read_or_wait(at as u64, &mut into, check, waiting).unwrap();
        assert!(!is_read || into == bytes[at..at + 1000], "read {number}");
        is_read
    };
    for (number, waiting) in waiting.iter_mut().enumerate() {
        assert!(!go_on(number, waiting), "read {number}");
    }
    assert_eq!(remote.status().waiting, 40);
    // A read that was cancelled is no longer counted.
    waiting.pop();
    assert_eq!((remote.status().waiting, remote.counters().waits), (39, 0));
    server.revive();
    for (number, waiting) in waiting.iter_mut().enumerate() {
        until(&remote, "it is read", || waiting.is_due(Instant::now()) && go_on(number, waiting));
    }
    assert_eq!((remote.status().waiting, remote.counters().waits), (0, 39));
    // Closing the store ends reads that wait.
    server.kill();
    let mut waiting = Waiting::default();
    until(&remote, "the server is missed", || !go_on(0, &mut waiting));
    remote.close();
    assert!(waiting.is_due(Instant::now()));
    assert!(object.read_or_wait(0, &mut [0; 10], &mut |_| Ok(()), &mut waiting).is_err());
}

/// Waits until a thread is done. If a read hangs, its test fails.
fn joined<T>(thread: std::thread::JoinHandle<T>, remote: &RemoteStore) -> T {
    until(remote, "the read ends", || thread.is_finished());
    thread.join().unwrap()
}

/// A read of an object that is damaged on all servers.
fn failing(object: &Arc<dyn Object>) -> std::thread::JoinHandle<StoreError> {
    let object = Arc::clone(object);
    std::thread::spawn(move || object.read_range(0, &mut [0; 10]).unwrap_err())
}

/// A name for which the web server answers 403, as it does for everything that is not a file.
fn refused(dir: &Path) -> Hash {
    let name = Hash::of(b"refused");
    std::fs::create_dir(dir.join("objects").join(name.to_string())).unwrap();
    name
}

#[test]
fn an_object_that_a_server_refuses_concerns_reads_of_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let remote = open(&[&server]);
    let (good, bad) = (object(&remote, &bytes), remote.open_object_of(refused(dir.path()), 1 << 20).unwrap());
    let failed = failing(&bad);
    let until = Instant::now() + Duration::from_secs(60);
    while !failed.is_finished() && Instant::now() < until {
        read(&*good, &bytes, 0, 1000).unwrap();
    }
    let error = joined(failed, &remote);
    assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
    assert!(error.to_string().contains("status 403"), "{error}");
    // The refusal counts for other parts of the object, too: the server is not put aside again.
    all_up(&remote);
    for _ in 0..3 {
        let before = server.object_requests();
        assert_eq!(joined(failing(&bad), &remote).kind(), StoreErrorKind::Damaged);
        assert_eq!(server.object_requests(), before + 2);
        assert_eq!(remote.status().servers[0].state, ServerState::Up);
    }
    read(&*good, &bytes, 0, 1000).unwrap();
}

/// Opens a store through a proxy before a server.
fn open_behind(server: &FileServer, answers: Arc<Answers>) -> RemoteStore {
    let url = before(server, answers).parse().unwrap();
    RemoteStore::open(Options { limits: limits(), ..Options::new(vec![url]) }).unwrap()
}

/// A read of good bytes.
fn reading(remote: &RemoteStore, bytes: &[u8]) -> std::thread::JoinHandle<Result<(), StoreError>> {
    let (object, bytes) = (object(remote, bytes), bytes.to_vec());
    std::thread::spawn(move || read(&*object, &bytes, 1000, 5000))
}

#[test]
fn a_refused_token_is_not_reported_as_a_missing_list() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let remote = open(&[&server]);
    // If the server has no list, the error says what the server answers.
    let text = remote.images().unwrap_err().to_string();
    assert!(text.contains("do not list") && text.contains("status 403"), "{text}");
    server.ask_for_token("sesame");
    let error = remote.images().unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), StoreErrorKind::Io, "{text}");
    assert!(text.contains("status 401") && text.contains(&server.url()), "{text}");
    assert!(!text.contains("do not list"), "{text}");
    assert!(remote.trace(Hash::of(MANIFEST)).is_err());
}

#[test]
fn a_file_missing_in_a_cache_is_requested_uncached() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let remembers = |asked: &str, _| {
        let is_hit = asked.contains(" /objects/") && !asked.contains("no-cache");
        if is_hit { status(404) } else { None }
    };
    let remote = open_behind(&server, Arc::new(remembers));
    joined(reading(&remote, &bytes), &remote).unwrap();
    assert_eq!(remote.status().servers[0].state, ServerState::Up);
}

#[test]
fn reads_wait_for_a_missing_directory_behind_a_cache() {
    let dir = tempfile::tempdir().unwrap();
    let (at, away) = (dir.path().join("store"), dir.path().join("away"));
    let bytes = store(&at);
    let server = FileServer::start(&at, None);
    let kept = std::fs::read(at.join("store")).unwrap()[..16].to_vec();
    let opened = Arc::new(AtomicBool::new(false));
    let is_open = Arc::clone(&opened);
    let has_store = move |asked: &str, _| {
        let is_hit = asked.contains(" /store ") && !asked.contains("no-cache");
        let head = "HTTP/1.1 206 x\r\nContent-Length: 16\r\nContent-Range: bytes 0-15/64\r\n\r\n";
        (is_hit && is_open.load(Ordering::SeqCst)).then(|| [head.as_bytes(), &kept].concat())
    };
    let remote = open_behind(&server, Arc::new(has_store));
    opened.store(true, Ordering::SeqCst);
    std::fs::rename(&at, &away).unwrap();
    let read = reading(&remote, &bytes);
    // It is put aside, and stays so although the cache has the file `store`.
    until(&remote, "it is asked without the cache", || read.is_finished() || server.requests() >= 8);
    std::fs::rename(&away, &at).unwrap();
    joined(read, &remote).unwrap();
}

#[test]
fn open_versions_are_announced_to_servers_uncached() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let mut server = FileServer::start(dir.path(), None);
    let reported = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&reported);
    // A cache that has all manifests.
    let has_manifests = move |asked: &str, _| {
        if !asked.contains(" /manifests/") {
            return None;
        }
        if asked.contains("Cache-Control: no-cache") && asked.contains("Range: bytes=0-0") {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        let head = "HTTP/1.1 206 x\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/64\r\n\r\na";
        Some(head.as_bytes().to_vec())
    };
    // The server is notified of each version when it is opened, and of all of them when it is back. Otherwise
    // the next notification would come only after ten minutes.
    let remote = open_behind(&server, Arc::new(has_manifests));
    let _pins = [b"1", b"2"].map(|version| {
        let before = reported.load(Ordering::SeqCst);
        let pin = remote.pin(Hash::of(version)).unwrap();
        until(&remote, "the server is notified", || reported.load(Ordering::SeqCst) > before);
        pin
    });
    let before = reported.load(Ordering::SeqCst);
    server.kill();
    let asking = remote.clone();
    let name = "debian".parse().unwrap();
    until(&remote, "the server is missed", || asking.image(&name).is_err());
    server.revive();
    until(&remote, "it is notified again", || reported.load(Ordering::SeqCst) >= before + 2);
}

#[test]
fn a_list_of_images_without_an_end_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let lines = Arc::new(AtomicUsize::new(1));
    let repeated = Arc::clone(&lines);
    let lists = move |asked: &str, _| {
        if !asked.contains(" /images/ ") {
            return None;
        }
        let list = "debian\n".repeat(repeated.load(Ordering::SeqCst));
        Some(format!("HTTP/1.1 200 x\r\nContent-Length: {}\r\n\r\n{list}", list.len()).into_bytes())
    };
    let remote = open_behind(&server, Arc::new(lists));
    assert_eq!(remote.images().unwrap().len(), 1);
    for (count, says) in [(2, "no list of images"), (4 << 20, "at most 16777216 are possible")] {
        lines.store(count, Ordering::SeqCst);
        let error = remote.images().unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn a_lost_directory_is_not_reported_as_missing_files() {
    let dir = tempfile::tempdir().unwrap();
    let (at, away) = (dir.path().join("store"), dir.path().join("away"));
    let bytes = store(&at);
    let (a, b) = (FileServer::start(&at, None), FileServer::start(&at, None));
    let name = "debian".parse().unwrap();
    for servers in [&[&a][..], &[&a, &b][..]] {
        // Each read begins with servers that are up: the first of these reads has them put aside.
        for look in [0, 1, 2] {
            let remote = open(servers);
            all_up(&remote);
            std::fs::rename(&at, &away).unwrap();
            let error = match look {
                0 => remote.image(&name).unwrap_err(),
                1 => remote.manifest(Hash::of(MANIFEST)).unwrap_err(),
                _ => remote.open_object(Hash::of(&bytes)).map(drop).unwrap_err(),
            };
            assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error}");
            assert!(error.to_string().contains("there is no store at this URL"), "{error}");
            std::fs::rename(&away, &at).unwrap();
            all_up(&remote);
            assert!(remote.image(&name).unwrap().is_some());
            // What the store does not have is reported as missing.
            assert!(remote.image(&"other".parse().unwrap()).unwrap().is_none());
        }
    }
}

#[test]
fn reads_wait_for_a_server_that_a_proxy_cannot_reach() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    for gateway in [502, 504] {
        let server = FileServer::start(dir.path(), None);
        let asked_times = Arc::new(AtomicU64::new(0));
        let is_back = Arc::new(AtomicBool::new(false));
        let (counted, reached) = (Arc::clone(&asked_times), Arc::clone(&is_back));
        let answers = move |asked: &str, _| {
            if !asked.contains(" /objects/") || reached.load(Ordering::SeqCst) {
                return None;
            }
            counted.fetch_add(1, Ordering::SeqCst);
            status(gateway)
        };
        let remote = open_behind(&server, Arc::new(answers));
        let read = reading(&remote, &bytes);
        // More attempts than at a server that breaks connections off, and a longer time than reads wait for
        // better bytes.
        until(&remote, "it is asked again", || read.is_finished() || asked_times.load(Ordering::SeqCst) >= 5);
        is_back.store(true, Ordering::SeqCst);
        joined(read, &remote).unwrap();
    }
}

#[test]
fn opening_and_listing_end_where_a_server_sends_a_byte_now_and_then() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let remote = open_with_short_timeouts(&Options { limits: short_timeouts(), ..options(&[&server]) });
    server.fail_all(HttpFault::Drip(Duration::from_millis(50)));
    let asking = remote.clone();
    let asked = std::thread::spawn(move || asking.manifest(Hash::of(MANIFEST)).unwrap_err());
    let error = joined(asked, &remote);
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error}");
    assert!(is_slow(&error.to_string()), "{error}");
}

#[test]
fn a_crawling_server_does_not_keep_reads_from_others() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let (crawling, good) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    // So that many reads all prefer the other server.
    good.fail_all(HttpFault::Delay(Duration::from_millis(200)));
    let remote = open(&[&crawling, &good]);
    all_up(&remote);
    crawling.fail(HttpFault::Drip(Duration::from_millis(50)));
    let reads: Vec<_> = (0..40).map(|_| reading(&remote, &bytes)).collect();
    reads.into_iter().for_each(|read| joined(read, &remote).unwrap());
}

#[test]
fn a_server_with_wrong_bytes_is_asked_again_if_others_hang() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let (hanging, gave) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    // No attempt times out.
    let limits = Limits { stall: Duration::from_secs(3600), ..limits() };
    let remote = RemoteStore::open(Options { limits, ..options(&[&hanging, &gave]) }).unwrap();
    all_up(&remote);
    hanging.fail(HttpFault::Hang);
    let object = object(&remote, &bytes);
    let mut into = vec![0; 1000];
    object.read_range(0, &mut into).unwrap();
    assert!(into == bytes[..1000]);
    let hung = hanging.object_requests();
    let read = std::thread::spawn(move || {
        let mut into = vec![0; 1000];
        object.read_range_past_caches(0, &mut into, None).map(|()| into)
    });
    let again = joined(read, &remote).unwrap();
    assert!(again == bytes[..1000]);
    // It was asked nevertheless, after the other server.
    assert!(hanging.object_requests() > hung);
    assert!(remote.counters().hedges_won >= 1, "{:?}", remote.counters());
}

#[test]
fn a_fault_is_recorded_if_another_server_answers() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let (mut first, second) = (FileServer::start(dir.path(), None), FileServer::start(dir.path(), None));
    // So that the first server is preferred, from the first probe on and on a busy host too.
    second.fail_all(HttpFault::Delay(Duration::from_millis(200)));
    let [is_asked, may_answer] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (asked_now, answers_now) = (Arc::clone(&is_asked), Arc::clone(&may_answer));
    let waits = move |asked: &str, _: usize| -> Option<Vec<u8>> {
        if asked.contains(" /objects/") {
            asked_now.store(true, Ordering::SeqCst);
            wait_until("the second one may answer", || answers_now.load(Ordering::SeqCst));
        }
        None
    };
    let urls = vec![first.url().parse().unwrap(), before(&second, Arc::new(waits)).parse().unwrap()];
    let remote = RemoteStore::open(Options { limits: limits(), ..Options::new(urls) }).unwrap();
    all_up(&remote);
    // It is late, and breaks off when the second one has been asked and has not answered.
    first.fail(HttpFault::HangAfter(1000));
    let read = reading(&remote, &bytes);
    until(&remote, "the second one is asked", || is_asked.load(Ordering::SeqCst));
    first.kill();
    may_answer.store(true, Ordering::SeqCst);
    joined(read, &remote).unwrap();
    let status = remote.status();
    assert_eq!((status.servers[0].state, remote.counters().failovers), (ServerState::Down, 1), "{status:?}");
}

#[test]
fn a_kept_connection_that_is_ended_with_408_is_not_the_servers_fault() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let ends = |asked: &str, nth| {
        let is_late = asked.contains(" /objects/") && nth > 0;
        is_late.then(|| b"HTTP/1.1 408 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec())
    };
    let remote = open_behind(&server, Arc::new(ends));
    let failures = remote.status().servers[0].failures;
    for _ in 0..5 {
        joined(reading(&remote, &bytes), &remote).unwrap();
    }
    let status = remote.status();
    assert_eq!((status.servers[0].state, status.servers[0].failures), (ServerState::Up, failures));
}

#[test]
fn a_read_ended_by_close_reports_the_earlier_fault() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let limits = Limits { wait_for_better: Duration::from_secs(600), ..limits() };
    let remote = RemoteStore::open(Options { limits, ..options(&[&server]) }).unwrap();
    let object = object(&remote, &bytes);
    server.fail(HttpFault::Short);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&*object, &bytes, 0, 1000));
        until(&remote, "it is asked again", || server.object_requests() >= 2);
        remote.close();
        let error = reading.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("closed during a read of objects/"), "{error}");
        assert!(error.contains("it sends 999 bytes") && error.contains(&server.url()), "{error}");
    });
}
