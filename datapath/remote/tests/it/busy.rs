//! Servers that answer that they are busy. Reads and calls that do not wait for unreachable servers do wait
//! for busy ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use headwater_remote::{Options, RemoteStore};
use headwater_store::{Hash, Object, Store, StoreError, StoreErrorKind, WhileBusy};
use headwater_testkit::{FileServer, HttpFault};

use crate::support::{MANIFEST, options, read, store, trace};

const ALWAYS: HttpFault = HttpFault::Busy { each: 1, status: 503, retry_after: 1 };

fn open(server: &FileServer, while_busy: WhileBusy) -> Result<RemoteStore, StoreError> {
    RemoteStore::open(Options { while_busy, ..options(&[server]) })
}

fn object_of(store: &dyn Store, bytes: &[u8]) -> Arc<dyn Object> {
    store.open_object_of(Hash::of(bytes), bytes.len() as u64).unwrap()
}

#[test]
fn nothing_fails_at_a_server_that_is_sometimes_busy() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    for (each, status) in [(4, 503), (3, 429)] {
        server.fail_all(HttpFault::Busy { each, status, retry_after: 1 });
        let remote = open(&server, WhileBusy::default()).unwrap();
        let image = remote.image(&"debian".parse().unwrap()).unwrap().unwrap();
        assert_eq!(image.versions.len(), 1);
        assert_eq!(remote.manifest(Hash::of(MANIFEST)).unwrap(), MANIFEST);
        assert_eq!(remote.trace(Hash::of(MANIFEST)).unwrap(), Some(trace()));
        let fail_fast = remote.fail_fast().unwrap();
        let object = fail_fast.open_object(Hash::of(&bytes)).unwrap();
        assert!(object.holes().unwrap().is_empty());
        for at in 0..4 {
            read(&*object, &bytes, at * 1000, 1000).unwrap();
        }
    }
}

#[test]
fn the_error_names_a_server_that_stays_busy() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let briefly = || WhileBusy::default().at_most(Duration::from_millis(1500));
    let remote = open(&server, briefly()).unwrap();
    let object = object_of(&*remote.fail_fast().unwrap(), &bytes);
    server.fail_all(ALWAYS);
    let errors = [
        remote.image(&"debian".parse().unwrap()).map(drop).unwrap_err(),
        remote.listed().map(drop).unwrap_err(),
        read(&*object, &bytes, 0, 1000).unwrap_err(),
        object.holes().map(drop).unwrap_err(),
        open(&server, briefly()).map(drop).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error}");
        let message = error.to_string();
        assert!(message.contains("too busy") && !message.contains("start"), "{message}");
    }
}

#[test]
fn waits_for_busy_servers_are_reported_and_can_end() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let server = Arc::new(FileServer::start(dir.path(), None));
    server.fail_all(ALWAYS);
    let stopped = open(&server, WhileBusy::as_long_as(|_| false)).map(drop).unwrap_err();
    assert!(stopped.to_string().contains("too busy"), "{stopped}");

    let (reported, theirs) = (Arc::new(AtomicU32::new(0)), Arc::clone(&server));
    let counted = Arc::clone(&reported);
    let remote = open(
        &server,
        WhileBusy::as_long_as(move |why| {
            assert!(why.contains("too busy"), "{why}");
            if counted.fetch_add(1, Ordering::SeqCst) == 3 {
                theirs.fail_all(HttpFault::None);
            }
            true
        }),
    )
    .unwrap();
    assert!(reported.load(Ordering::SeqCst) >= 4);
    assert!(remote.image(&"debian".parse().unwrap()).unwrap().is_some());
}

#[test]
fn a_relay_reports_a_busy_server_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = store(dir.path());
    let server = FileServer::start(dir.path(), None);
    let remote = open(&server, WhileBusy::as_long_as(|why| panic!("it waits: {why}"))).unwrap();
    let short_timeout = remote.with_short_timeout().unwrap();
    assert!(short_timeout.with_short_timeout().is_none());
    let object = object_of(&*short_timeout, &bytes);
    server.fail_all(ALWAYS);
    let read = object.read_range(0, &mut [0; 1000]).unwrap_err();
    assert_eq!(read.kind(), StoreErrorKind::Unreachable, "{read}");
    let looked_up = short_timeout.image(&"debian".parse().unwrap()).unwrap_err();
    assert_eq!(looked_up.kind(), StoreErrorKind::Unreachable, "{looked_up}");
}
