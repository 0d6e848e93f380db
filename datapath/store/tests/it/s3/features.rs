//! Servers without a feature that writing to a store needs, busy servers, and proxies that make tags weak.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use headwater_store::{
    Access, Keys, S3Options, S3Store, S3Url, Store, StoreError, StoreErrorKind, WhileBusy,
};
use headwater_testkit::s3::{KEY_ID, KEY_SECRET, S3Quirk, S3Server};
use headwater_testkit::{Fault, HttpRelay};

use super::{InBucket, served_by, server};
use crate::suite::{self, Place, name, publish};

/// A server for one test, which may therefore lack a feature.
struct Own {
    server: S3Server,
    dir: tempfile::TempDir,
}

impl Own {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = S3Server::start(dir.path(), served_by());
        server.bucket("images");
        Self { server, dir }
    }

    fn open(&self, access: Access) -> Result<S3Store, StoreError> {
        let url = format!("s3://images/a?endpoint=http://{}", self.server.address());
        let mut options = S3Options::new("tester");
        options.keys = Keys::Given { id: KEY_ID.into(), secret: KEY_SECRET.into() };
        // With this pause the test would take very long if a request that cannot succeed were repeated.
        options.pause = Duration::from_secs(600);
        S3Store::open(&url.parse::<S3Url>().unwrap(), access, &options)
    }

    fn files(&self, folder: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.dir.path().join("images/a").join(folder)) else {
            return Vec::new();
        };
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

#[test]
fn no_store_is_made_where_conditional_writes_are_not_supported() {
    let own = Own::start();
    for (quirk, says) in [
        (
            S3Quirk::IgnoresIfNoneMatch,
            "ignores conditional writes (it accepted a PUT with 'If-None-Match: *'",
        ),
        (S3Quirk::IgnoresIfMatch, "ignores conditional writes (it accepted a PUT with 'If-Match'"),
        (S3Quirk::ConditionsAre501, "does not support conditional writes"),
        (S3Quirk::ConditionsAre400, "does not support conditional writes"),
    ] {
        own.server.set_quirk(Some(quirk));
        let error = own.open(Access::WRITE).unwrap_err();
        assert!(error.to_string().contains(says), "{quirk:?}: {error}");
        assert!(!error.to_string().contains("try again"), "{quirk:?}: {error}");
        assert_ne!(error.kind(), StoreErrorKind::Unreachable, "{quirk:?}");
        assert_eq!((own.files("locks"), own.files("")), (Vec::new(), vec!["locks".to_owned()]), "{quirk:?}");
    }
    own.server.set_quirk(None);
    own.open(Access::WRITE).unwrap();
}

#[test]
fn a_store_is_read_and_not_written_where_conditions_are_ignored() {
    let own = Own::start();
    publish(&own.open(Access::WRITE).unwrap(), "a", b"object", &[], b"manifest").unwrap();
    for quirk in [S3Quirk::IgnoresIfNoneMatch, S3Quirk::IgnoresIfMatch, S3Quirk::ConditionsAre501] {
        own.server.set_quirk(Some(quirk));
        let store = own.open(Access::Read).unwrap();
        assert_eq!(store.image(&name("a")).unwrap().unwrap().versions.len(), 1, "{quirk:?}");
        for access in [Access::WRITE, Access::Copy { new_chunk_bytes: store.chunk_bytes() }] {
            let error = own.open(access).unwrap_err();
            assert!(error.to_string().contains("can still be read"), "{quirk:?}: {error}");
        }
        // A daemon that started while the bucket was unreachable finds this out before its first write.
        let url: S3Url = format!("s3://images/a?endpoint=http://{}", own.server.address()).parse().unwrap();
        let mut options = S3Options::new("unseen");
        options.keys = Keys::Given { id: KEY_ID.into(), secret: KEY_SECRET.into() };
        let unseen = S3Store::open_unseen(&url, Access::WRITE, &options, store.chunk_bytes()).unwrap();
        let error = unseen.change(&name("a"), &mut |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("can still be read"), "{quirk:?}: {error}");
        assert_eq!(own.files("locks"), [] as [&str; 0], "{quirk:?}");
    }
}

#[test]
fn a_server_without_multipart_uploads_is_reported_at_once() {
    let own = Own::start();
    let store = own.open(Access::WRITE).unwrap();
    let object = vec![7; 17 << 20];
    for quirk in [S3Quirk::PartsAre501, S3Quirk::PartsAre400] {
        own.server.set_quirk(Some(quirk));
        let error = publish(&store, "a", &object, &[], b"manifest").unwrap_err();
        let message = error.to_string();
        assert!(message.contains("does not support uploads in parts"), "{quirk:?}: {message}");
        assert!(!message.contains("try again"), "{quirk:?}: {message}");
    }
    own.server.set_quirk(None);
    publish(&store, "a", &object, &[], b"manifest").unwrap();
}

#[test]
fn leftovers_of_a_dead_probe_are_harmless_and_removed() {
    let own = Own::start();
    let locks = own.dir.path().join("images/a/locks");
    fs::create_dir_all(&locks).unwrap();
    let old = locks.join("probe-one-1");
    fs::write(&old, [1]).unwrap();
    let long_ago = SystemTime::now() - Duration::from_secs(700);
    fs::File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
    // The key of a probe that may still be running.
    fs::write(locks.join("probe-two-1"), [1]).unwrap();
    let chunk_bytes = own.open(Access::Copy { new_chunk_bytes: 65_536 }).unwrap().chunk_bytes();
    assert_eq!((chunk_bytes, own.files("locks")), (65_536, vec!["probe-two-1".to_owned()]));
}

#[test]
fn opening_for_writing_writes_one_key_three_times() {
    let relay = HttpRelay::start(server().address());
    let place = InBucket::new(relay.address());
    place.open(Access::WRITE).unwrap();
    relay.take_seen();
    place.open(Access::WRITE).unwrap();
    let seen = relay.take_seen();
    let changes: Vec<_> = seen.iter().filter(|request| !request.starts_with("GET")).collect();
    assert_eq!(changes.len(), 4, "{seen:?}");
    assert!(
        changes[..3].iter().all(|request| request.starts_with("PUT") && request.contains("/locks/probe-"))
    );
    place.open(Access::Read).unwrap();
    assert!(relay.take_seen().iter().all(|request| request.starts_with("GET")));
}

#[test]
fn a_busy_server_is_asked_again_when_it_says() {
    let relay = HttpRelay::start(server().address());
    let place = InBucket::new(relay.address());
    publish(suite::writable(&place).as_ref(), "a", b"object", &[], b"manifest").unwrap();
    // More refusals than a failing request has attempts.
    relay.fail("GET", "/store", Fault::Busy(0), 7);
    let (url, mut options) = (&place.url, place.options());
    let reported = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&reported);
    options.while_busy = WhileBusy::as_long_as(move |why| {
        assert!(why.contains("busy") && why.contains("503"), "{why}");
        counted.fetch_add(1, Ordering::SeqCst);
        true
    });
    let store = S3Store::open(url, Access::Read, &options).unwrap();
    assert!(reported.load(Ordering::SeqCst) >= 7);
    relay.fail("GET", "/images/", Fault::Busy(1), 1);
    assert_eq!(store.image(&name("a")).unwrap().unwrap().versions.len(), 1);

    // The callback ends the wait.
    relay.fail("GET", "/store", Fault::Busy(600), u32::MAX);
    options.while_busy = WhileBusy::as_long_as(|_| false);
    let error = S3Store::open(url, Access::Read, &options).unwrap_err().to_string();
    assert!(error.contains("stopped while waiting"), "{error}");
    // The server asks for a longer wait than the limit allows.
    options.while_busy = WhileBusy::default().at_most(Duration::from_secs(1));
    let error = S3Store::open(url, Access::Read, &options).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("the server is busy"), "{error}");
}

#[test]
fn weak_tags_are_compared_like_the_original_strong_ones() {
    let relay = HttpRelay::start(server().address());
    let place = InBucket::new(relay.address());
    relay.fail("", "", Fault::WeakTags, u32::MAX);
    let store = place.open(Access::WRITE).unwrap();
    let object = vec![7; 17 << 20];
    publish(store.as_ref(), "a", &object, &[], b"one").unwrap();
    publish(store.as_ref(), "a", b"second", &[], b"two").unwrap();
    assert_eq!(store.image(&name("a")).unwrap().unwrap().versions.len(), 2);
}
