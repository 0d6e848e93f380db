//! Reading, verification and repair of a store in S3, against a real server on loopback.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::fixture::{disk_of, noise, read_all, store};
use headwater_block::{ByteRange, Completion, Device, Request};
use headwater_image::{
    Basis, Cancel, ChunkCache, ImageErrorKind, ImportOptions, Verified, VerifyRound, VersionReader, import,
    repair, verify,
};
use headwater_store::{Access, Keys, S3Options, S3Store, Store, Version};
use headwater_testkit::s3::{KEY_ID, KEY_SECRET, S3Server, serve_if_asked};
use headwater_testkit::{Fault, HttpRelay, test_name, wait_until};

/// The server is this program, started again by this test.
fn served_by() -> &'static str {
    test_name(an_unreachable_server_is_not_damage)
}

struct Served {
    server: S3Server,
    store: S3Store,
    /// The directory of the keys.
    keys: PathBuf,
    _dir: tempfile::TempDir,
}

fn served() -> Served {
    let dir = tempfile::tempdir().unwrap();
    let server = S3Server::start(dir.path(), served_by());
    let keys = server.bucket("images").join("store");
    let store = open(server.address(), Access::WRITE);
    Served { server, store, keys, _dir: dir }
}

fn open(address: SocketAddr, access: Access) -> S3Store {
    let url = format!("s3://images/store?endpoint=http://{address}").parse().unwrap();
    let mut options = S3Options::new("tester");
    options.keys = Keys::Given { id: KEY_ID.into(), secret: KEY_SECRET.into() };
    options.timeout = Some(Duration::from_secs(20));
    options.pause = Duration::from_millis(5);
    S3Store::open(&url, access, &options).unwrap()
}

fn import_to(store: &dyn Store, disk: &[u8]) -> Version {
    import_as("disk", store, disk)
}

fn import_as(name: &str, store: &dyn Store, disk: &[u8]) -> Version {
    let options = ImportOptions::new(name.parse().unwrap(), 1_700_000_000);
    let source = disk_of(disk.to_vec());
    import(source, store, &options, &mut |_| {}).unwrap().version
}

#[test]
fn an_unreachable_server_is_not_damage() {
    serve_if_asked();
    let mut served = served();
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk, 1);
    let version = import_to(&served.store, &disk);
    let (store, mut began) = (served.store.clone(), false);
    // The server fails when the objects are open, before a chunk is read.
    let error = verify(&store, version.manifest, &Cancel::new(), &mut |_| {
        if !std::mem::replace(&mut began, true) {
            served.server.kill();
        }
    });
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Io, "{error}");
    assert!(error.to_string().contains("can be reached"), "{error}");
    served.server.revive();
    assert!(verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap().is_sound());
    // If the server is up and an object is missing, this is damage.
    fs::remove_file(served.keys.join("objects").join(version.objects[0].to_string())).unwrap();
    let found = verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((found.objects.len(), found.damaged_chunks), (1, 64));
}

#[test]
fn sparse_objects_of_a_bucket_are_compacted_too() {
    let served = served();
    let (store, name) = (&served.store, "disk".parse().unwrap());
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk, 1);
    let first = import_to(store, &disk);
    let sparse = first.objects[0];
    noise(&mut disk[..3 << 20], 2);
    let second = import_to(store, &disk);
    store.remove(&name, Some(first.number)).unwrap();
    assert!(second.objects.contains(&sparse));
    // An import of the same disk makes no new version, and leaves nothing behind.
    let objects = || fs::read_dir(served.keys.join("objects")).unwrap().count();
    assert_eq!(objects(), 2);
    let mut options = ImportOptions::new(name.clone(), 1_700_000_000);
    options.unless_newest = true;
    assert!(!import(disk_of(disk.clone()), store, &options, &mut |_| {}).unwrap().is_new);
    assert_eq!(objects(), 2);

    let mut after = disk;
    noise(&mut after[..4096], 3);
    options.unless_newest = false;
    let changes = Arc::new(|range: ByteRange, _: usize| match range.offset() {
        0 => vec![(4096, true), (range.len() - 4096, false)],
        _ => vec![(range.len(), false)],
    });
    options.basis = Some(Basis { parent: second.manifest, changes });
    let sealed = import(disk_of(after.clone()), store, &options, &mut |_| {}).unwrap();
    assert_eq!(sealed.read_bytes, 65_536);
    assert!(!sealed.version.objects.contains(&sparse));
    store.remove(&name, Some(second.number)).unwrap();
    assert!(!served.keys.join("objects").join(sparse.to_string()).exists());
    let reader = VersionReader::open(store, sealed.version.manifest, ChunkCache::new(8 << 20)).unwrap();
    assert!(read_all(&*reader) == after);
}

#[test]
fn a_cancelled_upload_ends_with_the_parts_under_way() {
    let served = served();
    let relay = Arc::new(HttpRelay::start(served.server.address()));
    let store = open(relay.address(), Access::WRITE);
    // More than four parts of 16 MiB, which are sent together.
    let mut disk = vec![0; 72 << 20];
    noise(&mut disk, 1);
    let disk_bytes = disk.len() as u64;
    let seen = Arc::new(Mutex::new(Vec::<String>::new()));
    let is_part = |request: &String| request.starts_with("PUT") && request.contains("partNumber=");
    let mut options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
    // The daemon's client disconnects like this when the first request is in progress.
    options.cancel = Cancel::when({
        let (relay, seen) = (Arc::clone(&relay), Arc::clone(&seen));
        move || {
            let mut seen = seen.lock().unwrap();
            seen.extend(relay.take_seen());
            seen.iter().any(is_part)
        }
    });
    let mut reported = Vec::new();
    let error =
        import(disk_of(disk), &store, &options, &mut |at| reported.push((at.done_bytes, at.total_bytes)))
            .unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Cancelled, "{error}");
    let mut seen = seen.lock().unwrap();
    seen.extend(relay.take_seen());
    // If the server is slow, the same part may have been sent twice.
    let number = |it: &String| Some(it.split("partNumber=").nth(1)?.split('&').next()?.to_owned());
    let parts: BTreeSet<_> = seen.iter().filter(|it| is_part(it)).filter_map(number).collect();
    assert_eq!(parts.len(), 4, "{seen:?}");
    assert!(!seen.iter().any(|it| it.starts_with("POST") && it.contains("uploadId=")), "it was put together");
    assert!(seen.iter().any(|it| it.starts_with("DELETE") && it.contains("uploadId=")), "parts are left");
    let keys = |dir: &str| fs::read_dir(served.keys.join(dir)).map_or(0, Iterator::count);
    assert_eq!([keys("objects"), keys("manifests"), keys("images"), keys("locks")], [0; 4]);

    // Sent bytes are counted after the bytes that were read, and the progress never claims that the sending
    // is finished.
    assert!(reported.is_sorted());
    let sending: Vec<_> = reported.iter().filter(|(_, total)| *total > disk_bytes).collect();
    assert_eq!(sending.first().unwrap().0, disk_bytes, "nothing is sent yet");
    assert_eq!(sending.last().unwrap().0, disk_bytes + (64 << 20));
    assert!(sending.iter().all(|(done, total)| done < total));
    // Leftovers of the import disturb no later import.
    let version = import_to(&store, &vec![1; 1 << 20]);
    store.remove(&"disk".parse().unwrap(), None).unwrap();
    assert_eq!((version.number, keys("objects")), (1, 0));
}

#[test]
fn reads_of_a_silent_bucket_delay_no_others() {
    let served = served();
    let [disk, other] = [1, 2].map(|seed| {
        let mut disk = vec![0; 8 << 20];
        noise(&mut disk, seed);
        disk
    });
    let here = import_to(&served.store, &disk);
    let away = import_as("other", &served.store, &other);
    let relay = HttpRelay::start(served.server.address());
    let silent = open(relay.address(), Access::Read).retrying().unwrap();
    let cache = ChunkCache::new(64 << 20);
    let here = VersionReader::open(&served.store, here.manifest, Arc::clone(&cache)).unwrap();
    let away = VersionReader::open(&*silent, away.manifest, cache).unwrap();
    relay.fail("GET", "/objects/", Fault::Silence, u32::MAX);
    relay.take_seen();

    // More reads than there are threads, and more than may be in flight. No two of their chunks are adjacent.
    let (waiting, answers) = mpsc::channel();
    let offsets: Vec<u64> = (0..other.len() as u64).step_by(128 << 10).collect();
    for at in offsets.clone() {
        let waiting = waiting.clone();
        let range = ByteRange::new(at, 4096).unwrap();
        let done = Completion::new(move |out| waiting.send((at, out.result.map(|()| out.buffer))).unwrap());
        away.submit(Request::Read { range, buffer: vec![0; 4096] }, done);
    }
    drop(waiting);
    let mut asked = 0;
    wait_until("as many are on their way as there are threads", || {
        asked += relay.take_seen().len();
        asked >= headwater_image::FETCH_THREADS
    });
    let (all, read) = mpsc::channel();
    let reader = Arc::clone(&here);
    std::thread::spawn(move || all.send(read_all(reader.as_ref())));
    let read = read.recv_timeout(Duration::from_secs(60));
    assert!(answers.try_recv().is_err(), "who does not answer has answered");
    relay.heal();
    assert!(read.expect("what is there waits for what is not") == disk);
    let answers: Vec<_> = answers.iter().collect();
    assert_eq!(answers.len(), offsets.len());
    for (at, read) in answers {
        assert!(read.unwrap() == other[at as usize..][..4096], "{at}");
    }
    assert_eq!(silent.traffic().unwrap().waiting, 0);
}

#[test]
fn reads_of_a_bucket_that_does_not_answer_end_when_it_is_closed() {
    let served = served();
    let mut disk = vec![0; 8 << 20];
    noise(&mut disk, 1);
    let version = import_to(&served.store, &disk);
    let relay = HttpRelay::start(served.server.address());
    let silent = open(relay.address(), Access::Read).retrying().unwrap();
    let reader = VersionReader::open(&*silent, version.manifest, ChunkCache::new(64 << 20)).unwrap();
    relay.fail("GET", "/objects/", Fault::Silence, u32::MAX);
    relay.take_seen();
    let (waiting, answers) = mpsc::channel();
    for at in (0..disk.len() as u64).step_by(128 << 10) {
        let waiting = waiting.clone();
        let range = ByteRange::new(at, 4096).unwrap();
        let done = Completion::new(move |out| waiting.send(out.result).unwrap());
        reader.submit(Request::Read { range, buffer: vec![0; 4096] }, done);
    }
    drop(waiting);
    wait_until("something is asked for", || !relay.take_seen().is_empty());
    silent.close();
    for _ in (0..disk.len()).step_by(128 << 10) {
        answers.recv_timeout(Duration::from_secs(60)).expect("the read ends").unwrap_err();
    }
}

#[test]
fn an_object_with_further_damage_is_copied_as_a_whole() {
    let served = served();
    let (_dir, other) = store();
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk, 1);
    let mut half = disk.clone();
    half[..2 << 20].fill(0);
    let versions = [&disk, &half].map(|disk| {
        import_to(&other, disk);
        import_to(&served.store, disk)
    });
    assert_eq!(versions[0].objects, versions[1].objects);
    // Only the second version remains, and it needs the second half of the object.
    served.store.remove(&"disk".parse().unwrap(), Some(1)).unwrap();
    let object = versions[1].objects[0];
    let path = served.keys.join("objects").join(object.to_string());
    let good = fs::read(&path).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    for at in [1 << 20, 3 << 20] {
        file.write_all_at(b"rotten", at).unwrap();
    }
    let manifest = versions[1].manifest;
    let found = verify(&served.store, manifest, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((found.objects.len(), found.damaged_chunks), (0, 1));
    let sources: [Arc<dyn Store>; 1] = [Arc::new(other)];
    let repair_object = |found: &Verified| {
        let round = VerifyRound::new(None);
        repair(&served.store, manifest, found, (&round, &sources), &Cancel::new(), &mut |_| {}).unwrap()
    };
    let done = repair_object(&found);
    assert_eq!((done.objects, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);

    // Such damage is found even if nothing else is damaged: no copy of the version could be made.
    File::options().write(true).open(&path).unwrap().write_all_at(b"rotten", 1 << 20).unwrap();
    let found = verify(&served.store, manifest, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((found.objects.len(), found.damaged_chunks), (1, 0), "{found:?}");
    let done = repair_object(&found);
    assert_eq!((done.objects, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
}
