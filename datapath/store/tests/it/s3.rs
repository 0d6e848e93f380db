//! The store in S3, against a real server on loopback: the suite of all stores, several writers, holders that
//! die, and failures of the network and of the server.

mod changes;
mod faults;
mod features;
pub mod holed;
mod uploads;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::suite::{self, Place, files, kind, name, publish};
use headwater_store::retention::RetentionPurpose;
use headwater_store::{
    Access, Hash, Keys, LocalDir, NewVersion, ReadFor, RetentionRoot, S3Options, S3Store, S3Url, Store,
    StoreError, StoreErrorKind, Waiting,
};
use headwater_testkit::s3::{KEY_ID, KEY_SECRET, S3Server, serve_if_asked};
use headwater_testkit::{Fault, HttpRelay, test_name, wait_until};

/// The server is this program, started again by this test.
fn served_by() -> &'static str {
    test_name(temporary_failures_are_retried)
}

fn server() -> &'static S3Server {
    static SERVER: OnceLock<(S3Server, tempfile::TempDir)> = OnceLock::new();
    let started = SERVER.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        (S3Server::start(dir.path(), served_by()), dir)
    });
    &started.0
}

static NEXT: AtomicU32 = AtomicU32::new(1);

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(3600);

/// A bucket with a prefix, as several processes open it.
struct InBucket {
    url: S3Url,
    dir: PathBuf,
    stale_after: Duration,
    timeout: Duration,
}

impl InBucket {
    fn new(address: std::net::SocketAddr) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let bucket = format!("bucket-{}-{number}", std::process::id());
        let dir = server().bucket(&bucket).join("some/prefix");
        let url = format!("s3://{bucket}/some/prefix?endpoint=http://{address}").parse().unwrap();
        Self { url, dir, stale_after: Duration::from_secs(600), timeout: Duration::from_secs(20) }
    }

    fn options(&self) -> S3Options {
        let mut options = S3Options::new(format!("tester-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        options.keys = Keys::Given { id: KEY_ID.into(), secret: KEY_SECRET.into() };
        options.stale_after = self.stale_after;
        options.timeout = Some(self.timeout);
        options.pause = Duration::from_millis(5);
        options
    }

    /// The same place, without the relay.
    fn direct(&self) -> Self {
        let url = S3Url { endpoint: Some(format!("http://{}", server().address())), ..self.url.clone() };
        Self { url, dir: self.dir.clone(), stale_after: self.stale_after, timeout: self.timeout }
    }

    fn keys(&self, folder: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.dir.join(folder)) else { return Vec::new() };
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Place for InBucket {
    fn open(&self, access: Access) -> Result<Arc<dyn Store>, StoreError> {
        Ok(Arc::new(S3Store::open(&self.url, access, &self.options())?))
    }

    fn dir(&self) -> &Path {
        &self.dir
    }
}

fn with_place(test: impl FnOnce(&dyn Place)) {
    let place = InBucket::new(server().address());
    test(&place);
    assert_eq!(place.keys("locks"), [] as [&str; 0], "a lock is left");
}

store_suite!(with_place);

/// A store behind a relay that can fail, with one version whose object has many bytes.
fn behind_a_relay() -> (InBucket, HttpRelay, Vec<u8>) {
    let relay = HttpRelay::start(server().address());
    let place = InBucket::new(relay.address());
    let object: Vec<u8> = (0..100_000u32).flat_map(|n| n.to_le_bytes()).collect();
    publish(suite::writable(&place).as_ref(), "a", &object, &[], b"manifest").unwrap();
    relay.take_seen();
    (place, relay, object)
}

#[test]
fn temporary_failures_are_retried() {
    serve_if_asked();
    let (mut place, relay, object) = behind_a_relay();
    place.timeout = Duration::from_secs(1);
    let store = place.open(Access::Read).unwrap();
    let opened = store.open_object(Hash::of(&object)).unwrap();
    let faults =
        [Fault::Status(500), Fault::Status(503), Fault::Refuse, Fault::Cut, Fault::Silence, Fault::Trickle];
    for fault in faults {
        relay.fail("GET", "/objects/", fault, 2);
        let mut bytes = vec![0; object.len() - 3];
        opened.read_range(3, &mut bytes).unwrap_or_else(|e| panic!("{fault:?}: {e}"));
        assert!(bytes == object[3..], "{fault:?}");
        relay.fail("GET", "/manifests/", fault, 2);
        assert_eq!(store.manifest(Hash::of(b"manifest")).unwrap(), b"manifest", "{fault:?}");
        relay.heal();
    }
}

#[test]
fn permanent_failures_end_with_advice() {
    let (mut place, relay, object) = behind_a_relay();
    let store = place.open(Access::Read).unwrap();
    place.timeout = Duration::from_secs(1);
    let fail_fast = place.open(Access::Read).unwrap();
    let open = |store: &dyn Store| store.open_object(Hash::of(&object)).unwrap();
    let (opened, opened_impatiently) = (open(store.as_ref()), open(fail_fast.as_ref()));
    let key = format!("some/prefix/objects/{}", Hash::of(&object));
    let cases = [
        (Fault::Status(500), 5, "500 (Injected: by the relay). The server has a problem"),
        (Fault::Status(403), 1, "AWS_ACCESS_KEY_ID"),
        (Fault::Refuse, 5, "Check that http://127.0.0.1"),
        (Fault::Silence, 5, "did not answer in full within 1.0 s"),
        (Fault::Trickle, 5, "did not answer in full within 1.0 s"),
        (Fault::Cut, 5, "Check that http://127.0.0.1"),
    ];
    for (fault, requests, says) in cases {
        relay.take_seen();
        relay.fail("GET", "/objects/", fault, u32::MAX);
        let mut bytes = vec![0; 70_000];
        let is_slow = matches!(fault, Fault::Silence | Fault::Trickle);
        let reads = if is_slow { &opened_impatiently } else { &opened };
        let error = reads.read_range(0, &mut bytes).unwrap_err();
        relay.heal();
        let refused = fault == Fault::Status(403);
        let wanted = if refused { StoreErrorKind::Io } else { StoreErrorKind::Unreachable };
        assert_eq!(error.kind(), wanted, "{error}");
        let message = error.to_string();
        for word in ["cannot read", &place.url.bucket, &key, says] {
            assert!(message.contains(word), "{fault:?}: no '{word}' in: {message}");
        }
        assert_eq!(relay.take_seen().len(), requests, "{fault:?}");
    }
    // Reads go on when the server works again.
    opened.read_range(0, &mut [0; 10]).unwrap();
}

#[test]
fn volume_reads_wait_only_for_temporary_failures() {
    let (place, relay, object) = behind_a_relay();
    let store = place.open(Access::Read).unwrap().retrying().unwrap();
    let opened = store.open_object(Hash::of(&object)).unwrap();
    let read = || opened.read_range(0, &mut [0; 70_000]);
    for status in [400, 401, 403, 404] {
        relay.fail("GET", "/objects/", Fault::Status(status), u32::MAX);
        let wanted = if status == 404 { StoreErrorKind::NotFound } else { StoreErrorKind::Io };
        assert_eq!(kind(read()), wanted, "{status}");
        relay.heal();
    }
    // If an object was cut short, the error says so, whether the range begins before its end or after it.
    let key = place.dir().join("objects").join(Hash::of(&object).to_string());
    fs::write(&key, &object[..1000]).unwrap();
    for offset in [0, 2000] {
        assert_eq!(kind(opened.read_range(offset, &mut [0; 2000])), StoreErrorKind::Damaged, "{offset}");
    }
    fs::write(&key, &object).unwrap();
    assert_eq!(store.traffic().unwrap().waits, 0);
    // More failures than a request has attempts.
    relay.fail("GET", "/objects/", Fault::Status(503), 7);
    read().unwrap();
    assert_eq!(store.traffic().unwrap().waits, 1);
}

#[test]
fn prefetches_leave_capacity_for_awaited_reads() {
    let (mut place, relay, object) = behind_a_relay();
    place.timeout = NEVER;
    let store = place.open(Access::Read).unwrap().retrying().unwrap();
    let opened = store.open_object(Hash::of(&object)).unwrap();
    relay.fail("GET", "/objects/", Fault::Silence, u32::MAX);
    relay.take_seen();
    let mut seen = 0;
    let mut are_asked_for = |wanted: usize| {
        wait_until(format!("{wanted} parts are asked for"), || {
            seen += relay.take_seen().iter().filter(|it| it.starts_with("GET")).count();
            seen >= wanted
        });
        assert_eq!(seen, wanted);
    };
    let read = |read_for| {
        let mut waiting = Waiting::default();
        waiting.set_read_for(read_for);
        assert!(!opened.read_or_wait(0, &mut [0; 10], &mut |_| Ok(()), &mut waiting).unwrap());
        waiting
    };
    let mut ahead: Vec<Waiting> = (0..9).map(|_| read(ReadFor::Later)).collect();
    are_asked_for(6);
    // A prefetch for which a read now waits is sent as well.
    assert!(!ahead[8].is_due(Instant::now()));
    ahead[8].set_read_for(ReadFor::Now);
    assert!(!opened.read_or_wait(0, &mut [0; 10], &mut |_| Ok(()), &mut ahead[8]).unwrap());
    are_asked_for(7);
    let _waited_for = read(ReadFor::Now);
    are_asked_for(8);
    let later = read(ReadFor::Now);
    assert!(!later.is_due(Instant::now()));
    // Copies have their own limit of concurrent requests.
    let _copies: Vec<Waiting> = (0..3).map(|_| read(ReadFor::Copy)).collect();
    are_asked_for(10);
    // Cancelled reads no longer count.
    drop(ahead);
    assert!(later.is_due(Instant::now()));
}

#[test]
fn closing_the_store_ends_reads_in_progress() {
    let (mut place, relay, object) = behind_a_relay();
    place.timeout = NEVER;
    let store = place.open(Access::Read).unwrap().retrying().unwrap();
    let opened = store.open_object(Hash::of(&object)).unwrap();
    let pin = store.pin(Hash::of(b"manifest")).unwrap();
    relay.fail("GET", "/objects/", Fault::Silence, u32::MAX);
    relay.take_seen();
    let (ended, outcome) = std::sync::mpsc::channel();
    let theirs = Arc::clone(&opened);
    std::thread::spawn(move || ended.send(theirs.read_range(0, &mut [0; 10])).unwrap());
    wait_until("something is asked for", || !relay.take_seen().is_empty());
    store.close();
    let ended = outcome.recv_timeout(Duration::from_secs(60)).expect("the read ends");
    assert_eq!(kind(ended), StoreErrorKind::Io);
    relay.heal();
    assert_eq!(kind(opened.read_range(0, &mut [0; 10])), StoreErrorKind::Io);
    // A closed store still removes its marks, because other processes read them.
    drop(pin);
    assert_eq!(place.keys(&format!("pins/{}", Hash::of(b"manifest"))), [] as [&str; 0]);
}

#[test]
fn bytes_that_change_in_transit_are_requested_again() {
    let (place, relay, object) = behind_a_relay();
    let store = place.open(Access::Read).unwrap();
    relay.fail("GET", "/manifests/", Fault::Flip, 1);
    assert_eq!(store.manifest(Hash::of(b"manifest")).unwrap(), b"manifest");
    relay.fail("GET", "/manifests/", Fault::Flip, u32::MAX);
    assert_eq!(kind(store.manifest(Hash::of(b"manifest"))), StoreErrorKind::Damaged);
    relay.heal();

    let opened = store.open_object(Hash::of(&object)).unwrap();
    let (mut bytes, right) = (vec![0; 100], object[..100].to_vec());
    let mut check = |bytes: &[u8]| {
        let wrong = || StoreError::new(StoreErrorKind::Damaged, "wrong");
        if bytes == right { Ok(()) } else { Err(wrong()) }
    };
    relay.fail("GET", "/objects/", Fault::Flip, 1);
    opened.read_checked(0, &mut bytes, &mut check).unwrap();
    relay.fail("GET", "/objects/", Fault::Flip, u32::MAX);
    assert_eq!(kind(opened.read_checked(0, &mut bytes, &mut check)), StoreErrorKind::Damaged);
    relay.heal();

    relay.fail("GET", "/images/", Fault::Flip, u32::MAX);
    assert_eq!(kind(store.image(&name("a"))), StoreErrorKind::Damaged);
}

#[test]
fn a_missing_bucket_or_key_is_named() {
    let mut place = InBucket::new(server().address());
    place.url.bucket = "no-such-bucket".into();
    let error = place.open(Access::WRITE).map(drop).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::NotFound, "{error}");
    let message = error.to_string();
    assert!(message.contains("no-such-bucket") && message.contains("Make the bucket"), "{message}");

    let place = InBucket::new(server().address());
    let mut options = place.options();
    options.keys = Keys::Given { id: KEY_ID.into(), secret: "wrong".into() };
    let message = S3Store::open(&place.url, Access::WRITE, &options).unwrap_err().to_string();
    assert!(message.contains("AWS_SECRET_ACCESS_KEY") && message.contains("s3:GetObject"), "{message}");

    let mut place = InBucket::new("127.0.0.1:1".parse().unwrap());
    place.timeout = Duration::from_millis(500);
    let message = place.open(Access::Read).map(drop).unwrap_err().to_string();
    assert!(message.contains("http://127.0.0.1:1") && message.contains("can be reached"), "{message}");
}

#[test]
fn a_prefix_with_other_keys_is_not_used() {
    let place = InBucket::new(server().address());
    fs::create_dir_all(place.dir()).unwrap();
    fs::write(place.dir().join("holiday.jpg"), b"sun").unwrap();
    let error = place.open(Access::WRITE).map(drop).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
    assert!(error.to_string().contains("holiday.jpg"), "{error}");
    assert_eq!(kind(place.open(Access::Read)), StoreErrorKind::NotFound);
    fs::remove_file(place.dir().join("holiday.jpg")).unwrap();
    // A prefix whose keys have the names of a store's keys is not taken for a store, either.
    let object = format!("objects/{}", Hash::of(b"of another program"));
    for key in [object.as_str(), "storefront.html", "store-1/a", "tmp/report.txt", "images/a", "locks/a"] {
        let path = place.dir().join(key);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"of another program").unwrap();
        for access in [Access::WRITE, Access::Copy { new_chunk_bytes: 8192 }] {
            let error = place.open(access).map(drop).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Invalid, "{key}");
            assert!(error.to_string().contains(key), "{error}");
        }
        assert_eq!(fs::read(&path).unwrap(), b"of another program");
        fs::remove_file(path).unwrap();
    }
    let odd = place.open(Access::Write { new_chunk_bytes: 5000 });
    assert_eq!(kind(odd), StoreErrorKind::Invalid);
    let store = place.open(Access::Write { new_chunk_bytes: 8192 }).unwrap();
    assert_eq!(store.chunk_bytes(), 8192);
    assert_eq!(suite::writable(&place).chunk_bytes(), 8192);
    assert_eq!(fs::read(place.dir().join("store")).unwrap().len(), 64);
}

#[test]
fn leftover_marks_are_distinguished_from_foreign_keys() {
    let place = InBucket::new(server().address());
    let store = suite::writable(&place);
    publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    let pin = store.pin(Hash::of(b"m")).unwrap();
    for folder in ["images", "manifests", "objects"] {
        fs::remove_dir_all(place.dir().join(folder)).unwrap();
    }
    fs::remove_file(place.dir().join("store")).unwrap();
    let refused = || place.open(Access::WRITE).map(drop).unwrap_err().to_string();
    let hint = "delete the remaining keys below pins/ and locks/";
    let shown = refused();
    assert!(shown.contains("(it has pins/") && shown.contains(hint), "{shown}");
    // Next to other keys they do not show that there is a store.
    let other = place.dir().join("pins.txt");
    fs::write(&other, b"of another program").unwrap();
    let shown = refused();
    assert!(shown.contains("is not empty") && !shown.contains(hint), "{shown}");
    fs::remove_file(other).unwrap();
    // A holder that releases its mark leaves nothing behind.
    drop(pin);
    assert_eq!(suite::writable(&place).images().unwrap(), []);
}

#[test]
fn a_store_created_by_another_process_at_the_same_time_is_recognised() {
    let (place, relay, object) = behind_a_relay();
    // At the first check the key is not there yet, and it is there when other keys are found.
    relay.fail("GET", "/prefix/store", Fault::Status(404), 1);
    let store = place.open(Access::Write { new_chunk_bytes: 8192 }).unwrap();
    assert_eq!(store.chunk_bytes(), suite::writable(&place.direct()).chunk_bytes());
    store.open_object(Hash::of(&object)).unwrap();
}

#[test]
fn a_false_length_of_the_source_is_not_reported_as_missing_space() {
    let from = InBucket::new(server().address());
    let source = suite::writable(&from);
    for (image, word, manifest) in [("a", b"short", b"m-short"), ("b", b"right", b"m-right")] {
        publish(source.as_ref(), image, word, &[], manifest).unwrap();
    }
    // More than any disk or bucket can store.
    let objects_of = |manifest: &[u8]| -> Result<Vec<(Hash, u64)>, StoreError> {
        let word = manifest.strip_prefix(b"m-").unwrap();
        Ok(vec![(Hash::of(word), if word == b"short" { 1 << 60 } else { 5 })])
    };
    let what = headwater_store::copy::everything(source.as_ref()).unwrap();
    let access = Access::Copy { new_chunk_bytes: source.chunk_bytes() };
    let (dir, to) = (tempfile::tempdir().unwrap(), InBucket::new(server().address()));
    let targets: [Arc<dyn Store>; 2] =
        [Arc::new(LocalDir::open(dir.path(), access).unwrap()), to.open(access).unwrap()];
    for target in targets {
        let copied = headwater_store::copy(
            source.as_ref(),
            target.as_ref(),
            &what,
            &objects_of,
            true,
            &mut |_| Ok(()),
        );
        let copied = copied.unwrap();
        let [failed] = copied.failed.as_slice() else { panic!("{copied:?}") };
        assert_eq!((&failed.image, failed.error.kind()), (&name("a"), StoreErrorKind::Damaged), "{copied:?}");
        assert_eq!(copied.versions, 1, "{copied:?}");
    }
}

#[test]
fn missing_space_is_reported_without_a_source_length() {
    let relay = HttpRelay::start(server().address());
    let from = InBucket::new(relay.address());
    let source = suite::writable(&from);
    publish(source.as_ref(), "a", b"word", &[], b"m-word").unwrap();
    // More than any disk has.
    let objects_of =
        |_: &[u8]| -> Result<Vec<(Hash, u64)>, StoreError> { Ok(vec![(Hash::of(b"word"), 1 << 60)]) };
    let what = headwater_store::copy::everything(source.as_ref()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let target = LocalDir::open(dir.path(), Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    for fault in [Fault::Status(500), Fault::Status(403)] {
        relay.fail("GET", "/objects/", fault, u32::MAX);
        let copied =
            headwater_store::copy(source.as_ref(), &target, &what, &objects_of, true, &mut |_| Ok(()));
        relay.heal();
        assert_eq!(kind(copied), StoreErrorKind::NoSpace, "{fault:?}");
    }
}

/// Sets the time that the server reports for the last renewal of a mark.
fn make_older(file: &Path, by: Duration) {
    let long_ago = std::time::SystemTime::now() - by;
    fs::File::options().write(true).open(file).unwrap().set_modified(long_ago).unwrap();
}

#[test]
fn a_dead_writer_blocks_others_only_for_a_time_and_is_cleaned_up() {
    let place = InBucket::new(server().address());
    let store = suite::writable(&place);
    publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    let before = files(place.dir());
    // A process that was killed leaves this.
    fs::create_dir_all(place.dir().join("locks")).unwrap();
    let writer = place.dir().join("locks/writer-dead-1");
    fs::write(&writer, b"dead\n").unwrap();
    for (folder, bytes) in [("objects", b"orphan"), ("manifests", b"parent")] {
        fs::write(place.dir().join(folder).join(Hash::of(bytes).to_string()), bytes).unwrap();
    }
    // As long as that process may be alive, no space is freed, and no image is removed as a whole.
    suite::writable(&place);
    assert_eq!(files(place.dir()).len(), before.len() + 2);
    let error = store.remove(&name("a"), None).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::InUse);
    assert!(error.to_string().contains("dead"), "{error}");
    make_older(&writer, Duration::from_secs(700));
    suite::writable(&place);
    assert_eq!(files(place.dir()), before);
    assert_eq!(place.keys("locks"), [] as [&str; 0]);
}

#[test]
fn a_lock_expires_only_if_its_process_is_dead() {
    let place = InBucket::new(server().address());
    let store = suite::writable(&place);
    let version = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    publish(store.as_ref(), "a", b"second", &[], b"m2").unwrap();
    fs::create_dir_all(place.dir().join("locks")).unwrap();
    let lock = place.dir().join("locks/exclusive");
    fs::write(&lock, b"dead-1\n").unwrap();
    make_older(&lock, Duration::from_secs(700));
    publish(store.as_ref(), "b", b"another", &[], b"m3").unwrap();
    let pin = store.pin(version.manifest).unwrap();
    assert_eq!(kind(store.remove(&name("a"), Some(1))), StoreErrorKind::InUse);
    drop(pin);
    let folder = format!("pins/{}", version.manifest);
    fs::create_dir_all(place.dir().join(&folder)).unwrap();
    fs::write(place.dir().join(&folder).join("dead-2"), b"dead-2\n").unwrap();
    let error = store.remove(&name("a"), Some(1)).unwrap_err();
    assert!(error.to_string().contains("dead-2"), "{error}");
    make_older(&place.dir().join(&folder).join("dead-2"), Duration::from_secs(700));
    store.remove(&name("a"), Some(1)).unwrap();
    assert!(!place.dir().join("objects").join(Hash::of(b"object").to_string()).exists());

    // A removal waits for a process that is alive.
    fs::write(&lock, b"alive\n").unwrap();
    let since = Instant::now();
    let freeing = std::thread::spawn({
        let lock = lock.clone();
        move || {
            std::thread::sleep(Duration::from_millis(600));
            fs::remove_file(lock).unwrap();
        }
    });
    publish(store.as_ref(), "b", b"later", &[], b"m4").unwrap();
    assert!(since.elapsed() >= Duration::from_millis(600));
    freeing.join().unwrap();
}

/// A hold on a version of image `a`.
fn root(manifest: Hash, daemon: &str, purpose: RetentionPurpose) -> RetentionRoot {
    let (image, daemon) = (name("a"), daemon.to_owned());
    RetentionRoot {
        image,
        manifest,
        purpose,
        id: "disk-1".into(),
        holder: format!("machine 'lab' of {daemon}"),
        daemon,
    }
}

/// The number of holds. The server leaves empty folders.
fn holds_in(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().map(Result::unwrap);
    entries.map(|entry| if entry.path().is_dir() { holds_in(&entry.path()) } else { 1 }).sum()
}

#[test]
fn a_held_version_stays_while_its_daemon_is_off() {
    let place = InBucket::new(server().address());
    let (one, other) = (suite::writable(&place), suite::writable(&place));
    let first = publish(one.as_ref(), "a", b"object", &[], b"m").unwrap();
    publish(one.as_ref(), "a", b"second", &[], b"m2").unwrap();
    publish(one.as_ref(), "b", b"object", &[], b"m").unwrap();
    let held = root(first.manifest, "d1", RetentionPurpose::Disk);
    one.retain(&held).unwrap();
    one.retain(&held).unwrap();
    drop(one);
    // The hold does not expire.
    let key = place.dir().join(format!("holds/{}/a/disk.d1.disk-1", first.manifest));
    assert_eq!(fs::read_to_string(&key).unwrap(), "machine 'lab' of d1\n");
    make_older(&key, NEVER);
    for number in [Some(1), None] {
        let refused = other.remove(&name("a"), number).unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::InUse);
        let shown = refused.to_string();
        for says in
            ["a@1", "machine 'lab' of d1 has a persistent disk over it", "gone for ever", "disk.d1.disk-1"]
        {
            assert!(shown.contains(says), "no {says} in {shown}");
        }
    }
    // The hold protects neither other versions nor the same version of another image.
    other.remove(&name("a"), Some(2)).unwrap();
    other.remove(&name("b"), None).unwrap();
    // The version is not removed even if the list of its image is lost.
    let list = fs::read(place.dir().join("images/a")).unwrap();
    fs::remove_file(place.dir().join("images/a")).unwrap();
    publish(other.as_ref(), "b", b"third", &[], b"m3").unwrap();
    other.remove(&name("b"), None).unwrap();
    fs::write(place.dir().join("images/a"), list).unwrap();
    assert_eq!(other.manifest(first.manifest).unwrap(), b"m");
    other.open_object(first.objects[0]).unwrap();

    let mine = other.roots_of("d1").unwrap();
    assert_eq!((mine.len(), mine[0].manifest, other.roots_of("d2").unwrap().len()), (1, first.manifest, 0));
    other.release(&mine[0]).unwrap();
    other.release(&mine[0]).unwrap();
    assert_eq!(holds_in(&place.dir().join("holds")), 0);
    other.remove(&name("a"), None).unwrap();
    assert_eq!(files(place.dir()), []);
    // A removed version cannot be held any more, and the attempt leaves nothing behind.
    assert_eq!(kind(other.retain(&held)), StoreErrorKind::NotFound);
    assert_eq!(holds_in(&place.dir().join("holds")), 0);
}

#[test]
fn a_held_version_stays_under_every_number_with_its_bytes() {
    let place = InBucket::new(server().address());
    let store = suite::writable(&place);
    let first = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    publish(store.as_ref(), "a", b"second", &[], b"m2").unwrap();
    publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    let held = root(first.manifest, "d1", RetentionPurpose::Disk);
    store.retain(&held).unwrap();
    // The hold does not say by which number the holder opened the version.
    for number in [1, 3] {
        let refused = store.remove(&name("a"), Some(number)).unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::InUse);
        let shown = format!("a@{number}: machine 'lab' of d1 has a persistent disk over it");
        assert!(refused.to_string().contains(&shown), "{refused}");
    }
    store.release(&held).unwrap();
    store.remove(&name("a"), Some(1)).unwrap();
    assert_eq!(store.manifest(first.manifest).unwrap(), b"m");
}

#[test]
fn an_image_is_edited_by_one_daemon_of_a_bucket() {
    let place = InBucket::new(server().address());
    let store = suite::writable(&place);
    let first = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    let second = publish(store.as_ref(), "a", b"second", &[], b"m2").unwrap();
    store.retain(&root(first.manifest, "d1", RetentionPurpose::MaintenanceSession)).unwrap();
    let refused =
        store.retain(&root(second.manifest, "d2", RetentionPurpose::MaintenanceSession)).unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::InUse);
    assert!(refused.to_string().contains("machine 'lab' of d1 edits image 'a' already"), "{refused}");
    assert_eq!(store.roots_of("d2").unwrap(), []);
    store.retain(&root(second.manifest, "d2", RetentionPurpose::Disk)).unwrap();
    store.release(&root(first.manifest, "d1", RetentionPurpose::MaintenanceSession)).unwrap();
    store.retain(&root(second.manifest, "d2", RetentionPurpose::MaintenanceSession)).unwrap();
}

#[test]
fn setting_a_retention_root_waits_for_a_removal() {
    let place = InBucket::new(server().address());
    let store = suite::writable(&place);
    let version = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    fs::create_dir_all(place.dir().join("locks")).unwrap();
    fs::write(place.dir().join("locks/exclusive"), b"alive\n").unwrap();
    let holding = std::thread::spawn({
        let store = Arc::clone(&store);
        move || store.retain(&root(version.manifest, "d1", RetentionPurpose::Disk))
    });
    wait_until("the root is noted", || holds_in(&place.dir().join("holds")) == 1);
    // The removal continues.
    fs::remove_file(place.dir().join("images/a")).unwrap();
    fs::remove_file(place.dir().join("locks/exclusive")).unwrap();
    assert_eq!(kind(holding.join().unwrap()), StoreErrorKind::NotFound);
    assert_eq!(holds_in(&place.dir().join("holds")), 0);
}

#[test]
fn a_suspended_removal_spares_versions_published_meanwhile() {
    let (mut place, relay, object) = behind_a_relay();
    place.timeout = NEVER;
    let (store, other) = (suite::writable(&place), suite::writable(&place.direct()));
    // It has removed the version from the list, and looks for objects that no version needs.
    relay.fail("GET", "objects", Fault::Silence, u32::MAX);
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| store.remove(&name("a"), Some(1)));
        wait_until("the removal lists the objects", || {
            relay.take_seen().iter().any(|it| it.contains("objects"))
        });
        make_older(&place.dir().join("locks/exclusive"), Duration::from_secs(700));
        publish(other.as_ref(), "b", &object, &[], b"manifest").unwrap();
        relay.heal();
        // The version is removed. What it needed is left for a later removal.
        assert_eq!(removing.join().unwrap().unwrap().freed_bytes, 0);
    });
    let version = store.resolve(&"b".parse().unwrap()).unwrap();
    assert_eq!(store.manifest(version.manifest).unwrap(), b"manifest");
    let mut bytes = vec![0; object.len()];
    store.open_object(version.objects[0]).unwrap().read_range(0, &mut bytes).unwrap();
    assert!(bytes == object);
    assert_eq!(place.keys("locks"), ["sweep"], "the next writer frees what is left");
}

#[test]
fn a_suspended_image_removal_spares_the_new_list() {
    let (mut place, relay, object) = behind_a_relay();
    place.timeout = NEVER;
    let (store, other) = (suite::writable(&place), suite::writable(&place.direct()));
    // It has taken the lock, confirmed it, and emptied the list.
    relay.fail("PUT", "/locks/exclusive", Fault::Delay(Duration::ZERO), 2);
    relay.fail("PUT", "/locks/exclusive", Fault::Silence, u32::MAX);
    for (method, target) in [("POST", "delete"), ("DELETE", "/images/")] {
        relay.fail(method, target, Fault::Silence, u32::MAX);
    }
    let is_empty = || other.image(&name("a")).unwrap().is_some_and(|image| image.versions.is_empty());
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| store.remove(&name("a"), None));
        wait_until("the list is empty", is_empty);
        make_older(&place.dir().join("locks/exclusive"), Duration::from_secs(700));
        publish(other.as_ref(), "a", &object, &[], b"manifest").unwrap();
        relay.heal();
        assert_eq!(kind(removing.join().unwrap()), StoreErrorKind::Locked);
    });
    let version = other.resolve(&"a".parse().unwrap()).unwrap();
    assert_eq!(other.manifest(version.manifest).unwrap(), b"manifest");
    other.open_object(version.objects[0]).unwrap();
    assert_eq!(place.keys("locks"), ["sweep"], "the next writer frees what is left");
}

#[test]
fn a_stale_writer_cannot_commit_after_the_reclaim_check() {
    let (mut place, relay, _) = behind_a_relay();
    // It cannot continue before the test allows it.
    place.timeout = NEVER;
    let store = suite::writable(&place);
    fs::create_dir_all(place.dir().join("locks")).unwrap();
    let writer = place.dir().join("locks/writer-dead-1");
    fs::write(&writer, b"dead-1\n").unwrap();
    make_older(&writer, Duration::from_secs(700));
    // It looks for objects when it has read all lists of versions.
    let listing = "objects";
    relay.fail("GET", listing, Fault::Silence, u32::MAX);
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| store.remove(&name("a"), Some(1)));
        wait_until("the removal lists the objects", || {
            relay.take_seen().iter().any(|it| it.contains(listing))
        });
        let is_there = writer.exists();
        relay.heal();
        removing.join().unwrap().unwrap();
        assert!(!is_there, "the writer could have woken up and committed");
    });
    assert_eq!(place.keys("objects"), [] as [&str; 0]);
}

#[test]
fn a_stale_writer_cannot_commit_during_an_image_removal() {
    let (mut place, relay, _) = behind_a_relay();
    place.timeout = NEVER;
    let store = suite::writable(&place);
    fs::create_dir_all(place.dir().join("locks")).unwrap();
    let writer = place.dir().join("locks/writer-dead-1");
    fs::write(&writer, b"dead-1\n").unwrap();
    make_older(&writer, Duration::from_secs(700));
    // Whatever a publication adds to the list after this would be lost with the list.
    relay.fail("PUT", "/images/a", Fault::Silence, u32::MAX);
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| store.remove(&name("a"), None));
        let empties = |request: &String| request.starts_with("PUT") && request.contains("/images/a");
        wait_until("it empties the list", || relay.take_seen().iter().any(empties));
        let is_there = writer.exists();
        relay.heal();
        removing.join().unwrap().unwrap();
        assert!(!is_there, "the writer could have woken up and committed");
    });
    assert!(store.image(&name("a")).unwrap().is_none());
    for folder in ["objects", "manifests", "locks"] {
        assert_eq!(place.keys(folder), [] as [&str; 0], "{folder}");
    }
}

#[test]
fn a_writer_considered_dead_does_not_commit() {
    let place = InBucket::new(server().address());
    let store = suite::writable(&place);
    publish(store.as_ref(), "a", b"shared", &[], b"m1").unwrap();
    let sleeper = suite::writable(&place);
    let publication = sleeper.publish().unwrap();
    let writer = place.keys("locks").into_iter().find(|key| key.starts_with("writer-")).unwrap();
    make_older(&place.dir().join("locks").join(writer), Duration::from_secs(700));
    store.remove(&name("a"), Some(1)).unwrap();
    let refused = publication.commit(NewVersion {
        name: &name("b"),
        manifest: b"m2",
        objects: &[Hash::of(b"shared")],
        size_bytes: 512,
        created_at_s: 0,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    });
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Locked);
    assert!(error.to_string().contains("try again"), "{error}");
    assert!(store.image(&name("b")).unwrap().is_none());
}

#[test]
fn a_copy_considered_dead_publishes_nothing_without_objects() {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    publish(&source, "a", b"object", &[], b"m").unwrap();
    let place = InBucket::new(server().address());
    let other = suite::writable(&place);
    let target = suite::writable(&place);
    let what = headwater_store::copy::everything(&source).unwrap();
    let copy = |progress: &mut headwater_store::copy::OnProgress<'_>| {
        let objects_of = |_: &[u8]| Ok(vec![(Hash::of(b"object"), 6)]);
        headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, progress)
    };
    let mut slept = false;
    let refused = copy(&mut |at| {
        if at.total_bytes > 0 && at.done_bytes == at.total_bytes && !slept {
            slept = true;
            // The object is there. The host sleeps for longer than its mark lasts, and another host removes a
            // version.
            let locks = place.keys("locks");
            let writer = locks.into_iter().find(|key| key.starts_with("writer-")).unwrap();
            make_older(&place.dir().join("locks").join(writer), Duration::from_secs(700));
            publish(other.as_ref(), "b", b"other", &[], b"m2")?;
            other.remove(&name("b"), Some(1))?;
        }
        Ok(())
    });
    assert!(slept);
    assert_eq!(place.keys("objects"), [] as [&str; 0], "it was not reclaimed");
    assert_eq!(kind(refused), StoreErrorKind::Locked);
    assert!(target.image(&name("a")).unwrap().is_none_or(|image| image.versions.is_empty()));
    // A repeated copy makes it whole.
    assert_eq!(copy(&mut |_| Ok(())).unwrap().objects, 1);
    let version = target.resolve(&"a".parse().unwrap()).unwrap();
    assert!(target.open_object(version.objects[0]).is_ok());
}

/// Replaces the exclusive lock by one of another process, as a process does that considers the holder dead.
fn take_the_lock(place: &InBucket) {
    server().replace(&place.url.bucket, "some/prefix/locks/exclusive", b"successor\n");
}

#[test]
fn a_removal_considered_dead_leaves_the_new_lock() {
    let (mut place, relay, _) = behind_a_relay();
    place.timeout = NEVER;
    let store = suite::writable(&place);
    relay.fail("GET", "/images/", Fault::Silence, 4);
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| store.remove(&name("a"), Some(1)));
        // It has the lock by then.
        let looks = |request: &String| request.contains("/images/a");
        wait_until("it looks at the image", || relay.take_seen().iter().any(looks));
        take_the_lock(&place);
        relay.heal();
        assert_eq!(kind(removing.join().unwrap()), StoreErrorKind::Locked);
    });
    assert_eq!(fs::read(place.dir().join("locks/exclusive")).unwrap(), b"successor\n");
    assert_eq!(store.image(&name("a")).unwrap().unwrap().versions.len(), 1);
    fs::remove_file(place.dir().join("locks/exclusive")).unwrap();
}

#[test]
fn a_removal_considered_dead_stops_removing() {
    let (mut place, relay, _) = behind_a_relay();
    place.timeout = NEVER;
    let store = suite::writable(&place);
    for orphan in 0..200u8 {
        let id = Hash::of(&[orphan]);
        fs::write(place.dir().join("objects").join(id.to_string()), [orphan]).unwrap();
    }
    // The first eight of a batch of 32 are removed. The others wait until the lock is taken.
    for (method, target) in [("POST", "delete"), ("DELETE", "/objects/")] {
        relay.fail(method, target, Fault::Delay(Duration::ZERO), 8);
        relay.fail(method, target, Fault::Silence, u32::MAX);
    }
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| store.remove(&name("a"), Some(1)));
        wait_until("something is removed", || place.keys("objects").len() < 200);
        take_the_lock(&place);
        relay.heal();
        assert_eq!(removing.join().unwrap().unwrap().freed_bytes, 0);
    });
    let left = place.keys("objects").len();
    assert!(left > 100, "{left} are left");
    assert_eq!(fs::read(place.dir().join("locks/exclusive")).unwrap(), b"successor\n");
}

#[test]
fn a_removal_succeeds_although_its_space_is_freed_later() {
    let (place, relay, _) = behind_a_relay();
    let store = suite::writable(&place);
    relay.fail("GET", "objects", Fault::Status(403), u32::MAX);
    let removed = store.remove(&name("a"), Some(1)).unwrap();
    assert_eq!((removed.versions.as_slice(), removed.freed_bytes), (&[1][..], 0));
    assert!(store.image(&name("a")).unwrap().unwrap().versions.is_empty());
    relay.heal();
    assert!(store.reclaim_left().unwrap() > 0);
    for folder in ["objects", "manifests", "locks"] {
        assert_eq!(place.keys(folder), [] as [&str; 0], "{folder}");
    }
}

#[test]
fn marks_renewed_during_their_confirmation_block_nobody() {
    let relay = HttpRelay::start(server().address());
    let mut place = InBucket::new(relay.address());
    place.stale_after = Duration::from_secs(10);
    let store = suite::writable(&place);
    // Longer than the pause between two renewals.
    relay.fail("PUT", "/locks/writer", Fault::Delay(Duration::from_millis(1200)), u32::MAX);
    let published = std::sync::atomic::AtomicU32::new(0);
    let (store, published) = (Arc::new(store), Arc::new(published));
    for writer in 0..4u8 {
        let (store, published) = (Arc::clone(&store), Arc::clone(&published));
        // Not joined: if the thread hangs, this test would hang too.
        std::thread::spawn(move || {
            publish(store.as_ref().as_ref(), "a", &[writer; 9], &[], &[writer; 7]).unwrap();
            published.fetch_add(1, Ordering::SeqCst);
        });
    }
    wait_until("all are published", || published.load(Ordering::SeqCst) == 4);
    relay.heal();
    assert_eq!(store.image(&name("a")).unwrap().unwrap().versions.len(), 4);
}

#[test]
fn marks_are_renewed_while_they_are_held() {
    let mut place = InBucket::new(server().address());
    place.stale_after = Duration::from_secs(60);
    let store = suite::writable(&place);
    let version = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    let pin = store.pin(version.manifest).unwrap();
    // The mark looks as if it was set long ago.
    let folder = format!("pins/{}", version.manifest);
    let mark = place.dir().join(&folder).join(&place.keys(&folder)[0]);
    make_older(&mark, Duration::from_secs(700));
    wait_until("it is renewed", || {
        let written = fs::metadata(&mark).unwrap().modified().unwrap();
        written.elapsed().is_ok_and(|age| age < Duration::from_secs(300))
    });
    assert_eq!(kind(store.remove(&name("a"), Some(1))), StoreErrorKind::InUse);
    drop(pin);
    store.remove(&name("a"), Some(1)).unwrap();
}

#[test]
fn a_version_in_use_is_pinned_when_its_bucket_is_back() {
    let (mut place, relay, _) = behind_a_relay();
    // No renewal comes in this test.
    place.stale_after = NEVER;
    let store = place.open(Access::Read).unwrap();
    relay.fail("PUT", "/pins/", Fault::Status(503), u32::MAX);
    relay.take_seen();
    let pin = store.pin_later(Hash::of(b"manifest")).unwrap();
    wait_until("it is tried", || relay.take_seen().iter().any(|it| it.contains("/pins/")));
    let pins = || place.keys(&format!("pins/{}", Hash::of(b"manifest")));
    assert!(pins().is_empty());
    relay.heal();
    wait_until("it is pinned", || pins().len() == 1);
    drop(pin);
    assert!(pins().is_empty());
}

/// One object in a store, without the small appends of the suite.
fn publish_whole(store: &dyn Store, bytes: &[u8]) -> Hash {
    let mut publication = store.publish().unwrap();
    publication.append(bytes).unwrap();
    let (id, _) = publication.finish_object().unwrap().unwrap();
    let new = NewVersion {
        name: &name("large"),
        manifest: b"large",
        objects: &[id],
        size_bytes: 512,
        created_at_s: 0,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    };
    publication.commit(new).unwrap();
    id
}
