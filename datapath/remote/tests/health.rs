//! How the state of servers changes, and whom that concerns.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_remote::{Options, RemoteStore, ServerState};
use headwater_store::{Hash, Object, Store, StoreError, StoreErrorKind};
use headwater_testkit::FileServer;
use support::{all_up, object, open, options, read, store};

mod support;

#[test]
fn a_token_that_was_replaced_is_shown_at_once() {
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

/// Waits until a thread is done, so that a read that hangs is a failure of its test.
fn joined<T>(thread: std::thread::JoinHandle<T>, remote: &RemoteStore) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    while !thread.is_finished() {
        assert!(Instant::now() < until, "it still waits: {:?}", remote.status());
        std::thread::sleep(Duration::from_millis(5));
    }
    thread.join().unwrap()
}

/// A read of what is no good on any server.
fn failing(object: &Arc<dyn Object>) -> std::thread::JoinHandle<StoreError> {
    let object = Arc::clone(object);
    std::thread::spawn(move || object.read_range(0, &mut [0; 10]).unwrap_err())
}

/// A name for which a web server answers 403, as for all that is no file.
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
    // Of other parts of it that is known: the server is not put aside again.
    all_up(&remote);
    for _ in 0..3 {
        let before = server.object_requests();
        assert_eq!(joined(failing(&bad), &remote).kind(), StoreErrorKind::Damaged);
        assert_eq!(server.object_requests(), before + 2);
        assert_eq!(remote.status().servers[0].state, ServerState::Up);
    }
    read(&*good, &bytes, 0, 1000).unwrap();
}
