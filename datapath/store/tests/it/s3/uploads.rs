//! Multipart uploads of objects: copies that continue where another one stopped, simultaneous copies of one
//! object, and servers that have lost an upload.

use std::sync::atomic::AtomicBool;

use headwater_store::{Object, Patch};
use headwater_testkit::Rng;

use super::*;

#[test]
fn large_objects_are_sent_in_parts_and_interrupted_copies_continue() {
    let relay = HttpRelay::start(server().address());
    let place = InBucket::new(relay.address());
    let elsewhere = tempfile::tempdir().unwrap();
    let source = LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    let bytes = Rng::new(1).bytes(84 << 20);
    let version = publish_whole(&source, &bytes);
    let object = source.open_object(version).unwrap();

    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    // The second round of parts fails for good. The parts of the first round stay.
    relay.fail("PUT", "partNumber=5", Fault::Status(403), u32::MAX);
    let error = target.publish().unwrap().copy_object(object.as_ref(), &mut |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("s3:PutObject"), "{error}");
    relay.heal();
    assert_eq!(place.keys("tmp"), [format!("{version}.upload")]);
    drop(target);
    relay.take_seen();
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let mut copied = 0;
    let mut publication = target.publish().unwrap();
    publication
        .copy_object(object.as_ref(), &mut |bytes| {
            copied += bytes;
            Ok(())
        })
        .unwrap();
    assert_eq!(copied, bytes.len() as u64);
    let sent: Vec<String> =
        relay.take_seen().into_iter().filter(|r| r.starts_with("PUT") && r.contains("partNumber")).collect();
    assert_eq!(sent.len(), 2, "{sent:?}");
    assert_eq!(place.keys("tmp"), [] as [&str; 0]);
    let copy = target.open_object(version).unwrap();
    let mut back = vec![0; bytes.len()];
    copy.read_range(0, &mut back).unwrap();
    assert!(back == bytes);
}

#[test]
fn parts_without_progress_for_a_week_are_discarded() {
    let (place, relay, _) = behind_a_relay();
    let elsewhere = tempfile::tempdir().unwrap();
    let source = LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    let bytes = Rng::new(3).bytes(17 << 20);
    let id = publish_whole(&source, &bytes);
    let object = source.open_object(id).unwrap();
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let stop = |_| Err(StoreError::new(StoreErrorKind::Io, "stopped"));
    target.publish().unwrap().copy_object(object.as_ref(), &mut { stop }).unwrap_err();
    let (old, new) = (format!("{id}.upload"), format!("{}.upload", Hash::of(b"new")));
    assert_eq!(place.keys("tmp"), [old.as_str()]);
    fs::write(place.dir().join("tmp").join(&new), b"headwater upload 2\n16777216\nanother\n").unwrap();
    for (state, days) in [(&old, 8), (&new, 6)] {
        make_older(&place.dir().join("tmp").join(state), Duration::from_secs(days * 24 * 3600));
    }
    // While the server refuses to discard it, the note stays, and blocks nothing else.
    relay.fail("DELETE", "uploadId", Fault::Status(403), 1);
    let store = suite::writable(&place);
    store.remove(&name("a"), Some(1)).unwrap();
    assert_eq!(place.keys("tmp").len(), 2);
    relay.take_seen();
    publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    store.remove(&name("a"), Some(2)).unwrap();
    assert_eq!(place.keys("tmp"), [new]);
    let given_back = format!("objects/{id}?uploadId=");
    let seen = relay.take_seen();
    assert!(seen.iter().any(|it| it.starts_with("DELETE") && it.contains(&given_back)), "{seen:?}");
}

/// An object with one wrong byte.
struct Flipped(Arc<dyn Object>);

impl Object for Flipped {
    fn id(&self) -> Hash {
        self.0.id()
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.0.read_range(offset, into)?;
        if offset == 0 {
            into[1000] ^= 1;
        }
        Ok(())
    }
}

#[test]
fn parts_of_an_interrupted_copy_count_only_if_right() {
    let relay = HttpRelay::start(server().address());
    let place = InBucket::new(relay.address());
    let elsewhere = tempfile::tempdir().unwrap();
    let source = LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    let bytes = Rng::new(2).bytes(84 << 20);
    let version = publish_whole(&source, &bytes);
    let object = source.open_object(version).unwrap();
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let copy = |object: &dyn Object| target.publish().unwrap().copy_object(object, &mut |_| Ok(()));

    // The first of the remaining parts is wrong.
    relay.fail("PUT", "partNumber=5", Fault::Status(403), u32::MAX);
    copy(&Flipped(Arc::clone(&object))).unwrap_err();
    relay.heal();
    assert_eq!(place.keys("tmp"), [format!("{version}.upload")]);
    relay.take_seen();
    copy(object.as_ref()).unwrap();
    let is_part = |request: &String| request.starts_with("PUT") && request.contains("partNumber");
    let sent: Vec<String> = relay.take_seen().into_iter().filter(is_part).collect();
    assert_eq!(sent.len(), 3, "the wrong one and the two that were missing: {sent:?}");
    let mut back = vec![0; bytes.len()];
    target.open_object(version).unwrap().read_range(0, &mut back).unwrap();
    assert!(back == bytes);
}

#[test]
fn parts_that_cannot_be_continued_are_discarded() {
    let relay = HttpRelay::start(server().address());
    let place = InBucket::new(relay.address());
    let elsewhere = tempfile::tempdir().unwrap();
    let source = LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    let bytes = Rng::new(3).bytes(17 << 20);
    let id = publish_whole(&source, &bytes);
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    fs::create_dir_all(place.dir().join("tmp")).unwrap();
    let state = place.dir().join("tmp").join(format!("{id}.upload"));
    fs::write(&state, "headwater upload 1\n16777216\nof-an-old-release\n").unwrap();
    relay.take_seen();
    let object = source.open_object(id).unwrap();
    target.publish().unwrap().copy_object(object.as_ref(), &mut |_| Ok(())).unwrap();
    let given_back = |request: &String| {
        request.starts_with("DELETE") && request.contains(&format!("objects/{id}?uploadId=of-an-old-release"))
    };
    let seen = relay.take_seen();
    assert!(seen.iter().any(given_back), "{seen:?}");
    assert!(!state.exists());
}

/// A bucket behind a relay, and an object of six parts that is copied to it.
struct Copying {
    place: InBucket,
    relay: HttpRelay,
    object: Arc<dyn Object>,
    bytes: Vec<u8>,
    _elsewhere: tempfile::TempDir,
}

impl Copying {
    fn new(seed: u64) -> Self {
        let relay = HttpRelay::start(server().address());
        let place = InBucket::new(relay.address());
        let elsewhere = tempfile::tempdir().unwrap();
        let source = LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
        let bytes = Rng::new(seed).bytes(84 << 20);
        let id = publish_whole(&source, &bytes);
        let object = source.open_object(id).unwrap();
        Self { place, relay, object, bytes, _elsewhere: elsewhere }
    }

    /// The bucket, opened through the relay that can fail, and opened without it.
    fn open(&self) -> [Arc<dyn Store>; 2] {
        [&self.place, &self.place.direct()]
            .map(|place| place.open(Access::Copy { new_chunk_bytes: 65_536 }).unwrap())
    }

    /// Copies the object, and calls a function when the first parts are there. Returns the number of bytes
    /// that the copy reported.
    fn copy(&self, store: &dyn Store, meanwhile: &mut dyn FnMut()) -> Result<u64, StoreError> {
        let (mut reported_bytes, mut is_first) = (0, true);
        let mut publication = store.publish()?;
        publication.copy_object(self.object.as_ref(), &mut |more_bytes| {
            reported_bytes += more_bytes;
            if std::mem::take(&mut is_first) {
                meanwhile();
            }
            Ok(())
        })?;
        Ok(reported_bytes)
    }

    /// The requests of one kind since the last call.
    fn seen(&self, method: &str, target: &str) -> Vec<String> {
        let seen = self.relay.take_seen().into_iter();
        seen.filter(|it| it.starts_with(method) && it.contains(target)).collect()
    }

    fn key(&self) -> PathBuf {
        self.place.dir().join("objects").join(self.object.id().to_string())
    }

    /// The file with the state of the copy.
    fn state(&self) -> PathBuf {
        self.place.dir().join("tmp").join(format!("{}.upload", self.object.id()))
    }

    /// Checks that the whole object is in the bucket, and that no upload is noted.
    fn must_be_done(&self, reported_bytes: Result<u64, StoreError>) {
        assert_eq!(reported_bytes.unwrap(), self.bytes.len() as u64);
        assert!(fs::read(self.key()).unwrap() == self.bytes);
        assert_eq!(self.place.keys("tmp"), [] as [&str; 0]);
    }
}

#[test]
fn two_simultaneous_copies_of_one_object_both_succeed() {
    let copying = Copying::new(6);
    let [one, other] = copying.open();
    let reported_bytes = copying.copy(one.as_ref(), &mut || {
        // It continues the same upload, and completes it.
        copying.must_be_done(copying.copy(other.as_ref(), &mut || {}));
        // For a completed upload the server of these tests answers 403, and others answer that there is none.
        copying.relay.fail("", "uploadId=", Fault::Status(404), u32::MAX);
        copying.relay.take_seen();
    });
    copying.must_be_done(reported_bytes);
    assert_eq!(copying.seen("POST", "uploads"), [] as [&str; 0], "it was sent once more");
}

#[test]
fn a_copy_restarts_once_if_its_upload_is_lost() {
    let copying = Copying::new(7);
    let [one, other] = copying.open();
    // In the first case another copy with a damaged source aborts the upload. In the second case another copy
    // replaces a part meanwhile, and the server refuses to complete the upload.
    for (is_aborted, method, fault) in
        [(true, "", Fault::Status(404)), (false, "POST", Fault::Refusal(400, "InvalidPart"))]
    {
        let mut upload = String::new();
        let reported_bytes = copying.copy(one.as_ref(), &mut || {
            upload = fs::read_to_string(copying.state()).unwrap().lines().nth(2).unwrap().to_owned();
            if is_aborted {
                let damaged = Flipped(Arc::clone(&copying.object));
                let copied = other.publish().unwrap().copy_object(&damaged, &mut |_| Ok(()));
                assert_eq!(kind(copied), StoreErrorKind::Damaged);
            }
            copying.relay.fail(method, &format!("uploadId={upload}"), fault, u32::MAX);
            copying.relay.take_seen();
        });
        copying.must_be_done(reported_bytes);
        let anew: Vec<String> =
            copying.seen("PUT", "partNumber").into_iter().filter(|it| !it.contains(&upload)).collect();
        assert_eq!(anew.len(), 6, "{anew:?}");
        copying.relay.heal();
        fs::remove_file(copying.key()).unwrap();
    }
    // It restarts only once.
    copying.relay.take_seen();
    copying.relay.fail("PUT", "uploadId=", Fault::Status(404), u32::MAX);
    let error = copying.copy(one.as_ref(), &mut || {}).unwrap_err();
    assert!(error.to_string().contains("the server lost the parts that were sent; try again"), "{error}");
    assert_eq!(copying.seen("POST", "uploads").len(), 2);
    assert!(!copying.key().exists());
    assert_eq!(copying.place.keys("tmp"), [] as [&str; 0]);
}

#[test]
fn a_restarted_copy_leaves_the_state_of_another_copy() {
    let copying = Copying::new(9);
    let [one, other] = copying.open();
    let noted = || fs::read_to_string(copying.state()).unwrap();
    let upload_of = |noted: &str| noted.lines().nth(2).unwrap().to_owned();
    let (mut lost, mut theirs) = (String::new(), String::new());
    let failed = copying.copy(one.as_ref(), &mut || {
        lost = upload_of(&noted());
        // A copy with a damaged source aborts the upload. Then another copy begins, and stops.
        let damaged = Flipped(Arc::clone(&copying.object));
        let copied = other.publish().unwrap().copy_object(&damaged, &mut |_| Ok(()));
        assert_eq!(kind(copied), StoreErrorKind::Damaged);
        let stop = |_| Err(StoreError::new(StoreErrorKind::Io, "stopped"));
        let stopped = other.publish().unwrap().copy_object(copying.object.as_ref(), &mut { stop });
        assert_eq!(kind(stopped), StoreErrorKind::Io);
        theirs = noted();
        copying.relay.fail("", &format!("uploadId={lost}"), Fault::Status(404), u32::MAX);
        // So the second upload of the first copy fails, too.
        copying.relay.fail("PUT", "partNumber=6", Fault::Status(403), u32::MAX);
        copying.relay.take_seen();
    });
    assert!(failed.unwrap_err().to_string().contains("s3:PutObject"));
    assert_ne!(upload_of(&theirs), lost);
    assert_eq!(noted(), theirs);
    let given_up: Vec<String> =
        copying.seen("DELETE", "uploadId=").into_iter().filter(|it| !it.contains(&lost)).collect();
    assert!(given_up.len() == 1 && !given_up[0].contains(&upload_of(&theirs)), "{given_up:?}");
    // The upload of the other copy can be continued.
    copying.relay.heal();
    copying.must_be_done(copying.copy(one.as_ref(), &mut || {}));
    let sent = copying.seen("PUT", "partNumber");
    assert!(sent.len() == 2 && sent.iter().all(|it| it.contains(&upload_of(&theirs))), "{sent:?}");
}

/// An object. At the first read of it another copy of it starts, and stops when its first parts are there.
struct Contested {
    object: Arc<dyn Object>,
    other: Arc<dyn Store>,
    is_first: AtomicBool,
}

impl Object for Contested {
    fn id(&self) -> Hash {
        self.object.id()
    }

    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        if self.is_first.swap(false, Ordering::SeqCst) {
            let stop = |_| Err(StoreError::new(StoreErrorKind::Io, "stopped"));
            let stopped = self.other.publish()?.copy_object(self.object.as_ref(), &mut { stop });
            assert_eq!(kind(stopped), StoreErrorKind::Io);
        }
        self.object.read_range(offset, into)
    }
}

#[test]
fn of_two_simultaneous_copies_only_one_records_its_state() {
    let copying = Copying::new(10);
    let [one, other] = copying.open();
    // The first copy has started and sent nothing yet when the other one starts.
    let object = Arc::clone(&copying.object);
    let contested = Contested { object, other, is_first: AtomicBool::new(true) };
    copying.relay.fail("PUT", "partNumber=6", Fault::Status(403), u32::MAX);
    let failed = one.publish().unwrap().copy_object(&contested, &mut |_| Ok(()));
    assert!(failed.unwrap_err().to_string().contains("s3:PutObject"));
    let noted = fs::read_to_string(copying.state()).unwrap();
    let theirs = noted.lines().nth(2).unwrap();
    let given_up = copying.seen("DELETE", "uploadId=");
    assert!(given_up.len() == 1 && !given_up[0].contains(theirs), "{given_up:?}");
    // The upload of the other copy can be continued.
    copying.relay.heal();
    copying.must_be_done(copying.copy(one.as_ref(), &mut || {}));
    let sent = copying.seen("PUT", "partNumber");
    assert!(sent.len() == 2 && sent.iter().all(|it| it.contains(theirs)), "{sent:?}");
}

#[test]
fn an_unreadable_state_fails_no_copy_and_keeps_no_parts() {
    let copying = Copying::new(11);
    let [one, _] = copying.open();
    for (is_lost, method, target) in
        [(false, "GET", ".upload"), (false, "POST", "delete"), (true, "GET", ".upload")]
    {
        let reported_bytes = copying.copy(one.as_ref(), &mut || {
            copying.relay.fail(method, target, Fault::Status(403), 1);
            if is_lost {
                copying.relay.fail("POST", "uploadId=", Fault::Refusal(400, "InvalidPart"), 1);
            }
            copying.relay.take_seen();
        });
        assert_eq!(reported_bytes.unwrap(), copying.bytes.len() as u64, "{method} {target}");
        assert!(fs::read(copying.key()).unwrap() == copying.bytes);
        assert_eq!(copying.seen("DELETE", "uploadId=").len(), usize::from(is_lost));
        copying.relay.heal();
        for left in [copying.state(), copying.key()] {
            fs::remove_file(left).unwrap();
        }
    }
}

#[test]
fn a_repair_that_the_server_skipped_is_not_reported_as_done() {
    let relay = HttpRelay::start(server().address());
    let place = InBucket::new(relay.address());
    let store = suite::writable(&place);
    let bytes = Rng::new(8).bytes(17 << 20);
    let id = publish_whole(store.as_ref(), &bytes);
    let key = place.dir().join("objects").join(id.to_string());
    let mut damaged = bytes.clone();
    damaged[1000] ^= 1;
    fs::write(&key, &damaged).unwrap();
    // The server reports times in seconds.
    make_older(&key, Duration::from_secs(60));
    let repair_object = || store.repair_object(id, &[Patch { offset: 1000, bytes: vec![bytes[1000]] }]);
    // The first request does not reach the server.
    for first in [Fault::Status(500), Fault::LoseAnswer] {
        relay.fail("POST", "uploadId=", first, 1);
        relay.fail("POST", "uploadId=", Fault::Status(404), u32::MAX);
        let mended = repair_object();
        relay.heal();
        let is_made = first == Fault::LoseAnswer;
        assert_eq!(mended.is_ok(), is_made, "{first:?}: {mended:?}");
        let wanted = if is_made { &bytes } else { &damaged };
        assert!(fs::read(&key).unwrap() == *wanted, "{first:?}");
    }
}

/// An object that claims to be longer than a bucket can store.
struct Huge;

impl Object for Huge {
    fn id(&self) -> Hash {
        Hash::of(b"huge")
    }

    fn len_bytes(&self) -> u64 {
        9001 << 30
    }

    fn read_range(&self, _: u64, _: &mut [u8]) -> Result<(), StoreError> {
        panic!("it is read")
    }
}

#[test]
fn an_object_that_needs_too_large_parts_is_not_started() {
    let (place, relay, _) = behind_a_relay();
    let target = place.open(Access::Copy { new_chunk_bytes: 65_536 }).unwrap();
    let error = target.publish().unwrap().copy_object(&Huge, &mut |_| Ok(())).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::NoSpace);
    assert!(
        error
            .to_string()
            .contains("the object has 9001 GiB, and an object in a bucket can have at most 9000 GiB"),
        "{error}"
    );
    assert!(!relay.take_seen().iter().any(|request| request.contains("upload")));
}
