//! A machine loses its power between any two of its changes to a store in S3. Nothing that was confirmed is
//! lost. What was not confirmed is there as a whole or not at all. When the marks of the machine have
//! expired, the next process that opens the store removes the rest. An interrupted upload of a large object
//! is continued, or its parts are removed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use headwater_store::copy::selected;
use headwater_store::retention::RetentionPurpose;
use headwater_store::{
    Access, Channel, Hash, ImageName, Keys, LocalDir, Needs, NewVersion, ObjectHashing, Patch, Pin, Pointer,
    RetentionRoot, S3Options, S3Store, S3Url, Store, StoreError, StoreErrorKind, Version, copy,
};
use headwater_testkit::rounds::is_long;
use headwater_testkit::s3::{KEY_ID, KEY_SECRET, S3Server, serve_if_asked};
use headwater_testkit::{Fault, HttpRelay, Rng, rounds, test_name};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::s3::holed::{Lines, copy_all, holed, whole};

/// The server is this program, started again by this test.
fn served_by() -> &'static str {
    test_name(a_crash_between_any_two_s3_changes_loses_nothing)
}

/// The daemon that owns these holds.
const DAEMON: &str = "0f-1";

fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

/// The manifest of a version with this object of its own.
fn manifest(own: &[u8]) -> Vec<u8> {
    format!("manifest of {}", Hash::of(own)).into_bytes()
}

fn manifest_id(own: &[u8]) -> Hash {
    Hash::of(&manifest(own))
}

/// Publishes a version with an object of its own, which also needs the objects of `older`.
fn publish(store: &dyn Store, image: &str, own: &[u8], older: &[Hash]) -> Result<(), StoreError> {
    let mut publication = store.publish()?;
    publication.append(own)?;
    publication.finish_object()?;
    let objects = [older, &[Hash::of(own)]].concat();
    let manifest = manifest(own);
    let version = NewVersion {
        name: &name(image),
        manifest: &manifest,
        objects: &objects,
        size_bytes: 4096,
        created_at_s: 5,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    };
    publication.commit(version).map(drop)
}

/// Begins an import and abandons it.
fn give_up(store: &dyn Store) -> Result<(), StoreError> {
    let mut publication = store.publish()?;
    publication.append(b"nobody needs this")?;
    publication.finish_object().map(drop)
}

fn promote(store: &dyn Store, image: &str, version: u32) -> Result<(), StoreError> {
    store.change(&name(image), &mut |image| {
        let pointer = Pointer { channel: Channel::Production, version, at_s: 7, author: "anna".into() };
        image.promote(pointer).map(drop)
    })
}

type Step = fn(&dyn Store) -> Result<(), StoreError>;

fn root(image: &str, manifest: Hash) -> RetentionRoot {
    RetentionRoot {
        image: name(image),
        manifest,
        purpose: RetentionPurpose::Pin,
        daemon: DAEMON.to_owned(),
        id: "pin.lab".to_owned(),
        holder: "machine 'lab' of host h".to_owned(),
    }
}

/// Copies the one version of image `c` of another store.
fn copy_from(source: &dyn Store, store: &dyn Store) -> Result<(), StoreError> {
    let what = selected(source, &["c".parse().unwrap()])?;
    let with_length = |id: &Hash| (*id, source.open_object(*id).unwrap().len_bytes());
    let objects: Vec<(Hash, u64)> = what[0].1[0].objects.iter().map(with_length).collect();
    copy(source, store, &what, &|_: &[u8]| Ok(objects.clone()), false, &mut |_| Ok(())).map(drop)
}

fn copy_from_elsewhere(store: &dyn Store) -> Result<(), StoreError> {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    publish(&elsewhere, "c", b"from elsewhere", &[]).unwrap();
    copy_from(&elsewhere, store)
}

/// What the machine does, step by step.
const LIFE: [Step; 23] = [
    |store| publish(store, "a", b"one", &[]),
    |store| publish(store, "a", b"two", &[Hash::of(b"one")]),
    |store| publish(store, "b", b"three", &[Hash::of(b"one")]),
    |store| promote(store, "a", 1),
    |store| promote(store, "a", 2),
    give_up,
    |store| store.remove(&name("b"), Some(1)).map(drop),
    |store| {
        let version = store.resolve(&"a@1".parse().unwrap())?;
        store.pin(version.manifest).map(drop)
    },
    |store| {
        store.change(&name("a"), &mut |image| {
            let pointer = Pointer { channel: Channel::Test, version: 1, at_s: 7, author: "ben".into() };
            image.schedule(pointer).map(drop)
        })
    },
    |store| {
        // The scheduled promotion is due.
        store.change(&name("a"), &mut |image| {
            image.promote_due(9);
            Ok(())
        })
    },
    |store| store.change(&name("a"), &mut |image| image.revert(Channel::Production).map(drop)),
    |store| store.change(&name("a"), &mut |image| image.retire(2, true)),
    |store| store.set_trace(manifest_id(b"two"), Some(b"a trace")),
    // This boot trace is removed with its version.
    |store| store.set_trace(manifest_id(b"one"), Some(b"another trace")),
    |store| store.set_trace(manifest_id(b"two"), None),
    |store| store.retain(&root("a", manifest_id(b"two"))),
    |store| store.repair_object(Hash::of(b"one"), &[Patch { offset: 1, bytes: b"n".to_vec() }]),
    |store| store.repair_manifest(manifest_id(b"two"), &manifest(b"two")),
    copy_from_elsewhere,
    |store| store.release(&root("a", manifest_id(b"two"))),
    |store| store.remove(&name("a"), None).map(drop),
    |store| publish(store, "a", b"four", &[]),
    |store| store.remove(&name("a"), None).map(drop),
];

/// What is known of an image.
#[derive(Debug, Default, PartialEq, Eq)]
struct Known {
    /// Each with whether it is retired, and its boot trace.
    versions: Vec<(u32, Hash, bool, Option<Vec<u8>>)>,
    channels: Vec<(Channel, u32)>,
    scheduled: Vec<(Channel, u32)>,
    held: Vec<Hash>,
}

/// What is known of each image. An image without versions counts as removed: the removal of a whole image
/// removes the versions first.
type Lists = BTreeMap<String, Known>;

fn lists(store: &dyn Store) -> Lists {
    let images = store.images().unwrap().into_iter().filter(|image| !image.versions.is_empty());
    let holds = store.roots_of(DAEMON).unwrap();
    images
        .map(|image| {
            let trace = |version: &Version| store.trace(version.manifest).unwrap();
            let known = Known {
                versions: image
                    .versions
                    .iter()
                    .map(|v| (v.number, v.manifest, v.retired, trace(v)))
                    .collect(),
                channels: image.pointers().iter().map(|p| (p.channel, p.version)).collect(),
                scheduled: image.scheduled().iter().map(|p| (p.channel, p.version)).collect(),
                held: holds
                    .iter()
                    .filter(|root| root.image == image.name)
                    .map(|root| root.manifest)
                    .collect(),
            };
            (image.name.to_string(), known)
        })
        .collect()
}

fn keys(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// From this size on, the test reads the server's files directly, since the server's protocol takes long. It
/// copies them with hard links, since the server never writes to an existing file.
const LARGE_BYTES: u64 = 1 << 20;

/// The hash of an object without its holes.
fn object_hash(store: &dyn Store, dir: &Path, id: Hash) -> Hash {
    let object = store.open_object(id).unwrap();
    let mut hashing = ObjectHashing::new(&object.holes().unwrap(), object.len_bytes());
    if object.len_bytes() >= LARGE_BYTES {
        hashing.update(&fs::read(dir.join("objects").join(id.to_string())).unwrap());
    } else {
        let mut bytes = vec![0; usize::try_from(object.len_bytes()).unwrap()];
        object.read_range(0, &mut bytes).unwrap();
        hashing.update(&bytes);
    }
    hashing.finish()
}

/// The folders that may have nothing that no version needs. The last one has the notes of uploads in
/// progress.
const FOLDERS: [&str; 6] = ["manifests", "objects", "holed", "traces", "locks", "tmp"];

/// Checks that everything that is listed is there and undamaged, and that these folders have nothing else.
fn check(store: &dyn Store, dir: &Path, folders: &[&str], when: &str) {
    let mut needed = BTreeSet::new();
    for image in store.images().unwrap() {
        for version in &image.versions {
            let manifest = store.manifest(version.manifest).unwrap();
            assert_eq!(Hash::of(&manifest), version.manifest);
            needed.insert(version.manifest.to_string());
            for id in &version.objects {
                assert_eq!(object_hash(store, dir, *id), *id, "{when}");
                needed.insert(id.to_string());
            }
            let must_be = |id, stretch| {
                let holes = store.open_object(id).unwrap().holes().unwrap();
                assert!(!holes.overlap(&stretch), "{stretch:?} of {id} is gone {when}");
            };
            Lines.stretches(&manifest, &mut { must_be }).unwrap();
        }
    }
    for folder in folders {
        for key in keys(&dir.join(folder)) {
            let key = key.file_name().unwrap().to_str().unwrap().to_owned();
            // The name of a copy with holes is the hash of the object followed by that of its list.
            let name = if *folder == "holed" { key.split('.').next().unwrap() } else { key.as_str() };
            assert!(needed.contains(name), "{folder}/{key} is left {when}");
        }
    }
}

/// Makes the keys of a folder look as if they were written this long ago.
fn make_older(folder: &Path, age: Duration) {
    let then = SystemTime::now() - age;
    for key in keys(folder) {
        fs::File::options().write(true).open(key).unwrap().set_modified(then).unwrap();
    }
}

/// After this time a process that did not renew its marks counts as dead.
const LAPSED: Duration = Duration::from_secs(700);
/// After this time no process continues an upload.
const ABANDONED: Duration = Duration::from_secs(8 * 24 * 3600);

const BUCKET: &str = "crash";

fn open(address: SocketAddr, owner: &str) -> Result<S3Store, StoreError> {
    let url = format!("s3://{BUCKET}/store?endpoint=http://{address}");
    let mut options = S3Options::new(owner);
    options.keys = Keys::Given { id: KEY_ID.into(), secret: KEY_SECRET.into() };
    options.attempts = 1;
    // Several large parts wait for one another, and a host can be busy.
    options.timeout = Some(Duration::from_secs(300));
    S3Store::open(&url.parse::<S3Url>().unwrap(), Access::WRITE, &options)
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (metadata, to) = (entry.metadata().unwrap(), to.join(entry.file_name()));
        if metadata.is_dir() {
            copy_dir(&entry.path(), &to);
        } else if metadata.len() >= LARGE_BYTES {
            fs::hard_link(entry.path(), to).unwrap();
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// The upload that is noted in a store: the server's name for it, and how many of its parts the note lists.
fn noted_upload(store: &Path) -> Option<(String, usize)> {
    let state = fs::read_to_string(keys(&store.join("tmp")).first()?).unwrap();
    let mut lines = state.lines().skip(2);
    let upload = lines.next().unwrap().to_owned();
    Some((upload, lines.count()))
}

/// A server of its own with one bucket, which can be restored to an earlier state.
struct Place {
    server: S3Server,
    served: PathBuf,
    /// The keys of the store.
    store: PathBuf,
    dir: tempfile::TempDir,
}

impl Place {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let served = dir.path().join("served");
        fs::create_dir(&served).unwrap();
        let server = S3Server::start(&served, served_by());
        let store = server.bucket(BUCKET).join("store");
        Self { server, served, store, dir }
    }

    /// Runs this many steps of a machine's life, and keeps what the server has before each change: the
    /// machine can end there.
    fn live(&self, steps: usize, mut act: impl FnMut(&dyn Store, usize)) -> Life {
        let answered = Arc::new(AtomicUsize::new(0));
        let ends = Arc::new(Mutex::new(Vec::new()));
        let relay = HttpRelay::start(self.server.address());
        let (kept, root) = (self.dir.path().to_owned(), self.served.clone());
        let (so_far, found) = (Arc::clone(&answered), Arc::clone(&ends));
        relay.before_changes(move |changes| {
            let copy = kept.join(changes.to_string());
            copy_dir(&root, &copy);
            found.lock().unwrap().push((copy, so_far.load(Ordering::SeqCst)));
            true
        });
        let machine = open(relay.address(), "machine").unwrap();
        let mut states = vec![lists(&machine)];
        for step in 0..steps {
            act(&machine, step);
            answered.fetch_add(1, Ordering::SeqCst);
            states.push(lists(&machine));
        }
        drop((act, machine, relay));
        let ends = std::mem::take(&mut *ends.lock().unwrap());
        Life { states, ends }
    }

    /// Restores the server from this copy.
    fn restore(&self, copy: &Path) {
        fs::remove_dir_all(&self.served).unwrap();
        copy_dir(copy, &self.served);
    }

    /// Whether the server has an upload that is not complete.
    fn has_upload(&self) -> bool {
        keys(&self.served).iter().any(|path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(".upload"))
        })
    }

    /// A relay to the server. For an upload that is already complete the server answers 403, where others
    /// answer that there is no such upload. The relay answers as the others do.
    fn relay(&self) -> HttpRelay {
        let relay = HttpRelay::start(self.server.address());
        if let Some((upload, _)) = noted_upload(&self.store)
            && !self.has_upload()
        {
            relay.fail("", &format!("uploadId={upload}"), Fault::Status(404), u32::MAX);
        }
        relay
    }
}

/// The lists before a life and after each of its steps. For each change of the bucket: what the server had
/// before it, and how many steps were confirmed by then.
struct Life {
    states: Vec<Lists>,
    ends: Vec<(PathBuf, usize)>,
}

impl Life {
    fn when(&self, changes: usize) -> String {
        format!("after {changes} of {} changes and {} steps", self.ends.len(), self.ends[changes].1)
    }
}

/// The machine ended before this change, and the next one starts so late that it continues nothing. It finds
/// every step that was confirmed, the other step as a whole or not at all, and nothing else. The store can
/// still be used.
fn end_before(place: &Place, life: &Life, changes: usize) {
    let (copy, answered) = &life.ends[changes];
    let when = life.when(changes);
    place.restore(copy);
    let (relay, noted) = (place.relay(), noted_upload(&place.store));
    make_older(&place.store.join("locks"), LAPSED);
    make_older(&place.store.join("tmp"), ABANDONED);
    let next = open(relay.address(), "next").unwrap_or_else(|e| panic!("{e} {when}"));
    let found = lists(&next);
    let allowed = &life.states[*answered..life.states.len().min(answered + 2)];
    assert!(allowed.contains(&found), "{found:?} {when}, and not one of {allowed:?}");
    check(&next, &place.store, &FOLDERS, &when);
    // Parts that are not noted are known only to the server: a rule of the bucket removes them.
    assert!(noted.is_none() || !place.has_upload(), "parts are left {when}");
    publish(&next, "a", b"the store goes on", &[]).unwrap_or_else(|e| panic!("{e} {when}"));
    check(&next, &place.store, &FOLDERS, &when);
}

/// All of these instants in `make long`. In `make test` each third one, beginning with one that is chosen by
/// the day.
fn some(instants: std::ops::Range<usize>) -> impl Iterator<Item = usize> {
    let step = if is_long() { 1 } else { 3 };
    let day = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs() / 86_400) as usize;
    instants.skip(day % step).step_by(step)
}

#[test]
fn a_crash_between_any_two_s3_changes_loses_nothing() {
    serve_if_asked();
    let place = Place::start();
    let life = place.live(LIFE.len(), |store, step| LIFE[step](store).unwrap());
    let total = life.ends.len();
    assert!(total > 50, "{total}");
    for changes in some(0..total) {
        end_before(&place, &life, changes);
    }

    // The same with a machine that lives on but cannot reach the server any more: a step that it still
    // confirms has been done.
    let mut refused = 0;
    for (step, act) in LIFE.iter().enumerate() {
        let mut of_step = life.ends.iter().filter(|(_, answered)| *answered == step);
        let Some((before, _)) = of_step.next() else { continue };
        // Opening a store makes changes, too: the probe alone writes three times and removes once.
        for passing in some(0..of_step.count() + 7) {
            place.restore(before);
            let relay = HttpRelay::start(place.server.address());
            relay.before_changes(move |changes| changes < passing as u64);
            let Ok(machine) = open(relay.address(), "machine") else { continue };
            if act(&machine).is_err() {
                refused += 1;
                continue;
            }
            drop(machine);
            let found = lists(&open(place.server.address(), "next").unwrap());
            assert_eq!(found, life.states[step + 1], "step {step} was answered after {passing} changes");
        }
    }
    // It is a sample, of which most steps are carried out.
    assert!(refused > 5, "{refused} steps were refused");
}

/// `src/s3/upload.rs` sends larger objects in parts of this size.
const PART_BYTES: usize = 16 << 20;

/// An object of this many whole parts with different bytes, and a short one.
fn in_parts(whole: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in 1..=whole {
        bytes.resize(bytes.len() + PART_BYTES, part);
    }
    bytes.extend_from_slice(b"the end");
    bytes
}

/// Does a step, and can repeat it.
type Act<'a> = dyn Fn(&dyn Store, usize) -> Result<(), StoreError> + 'a;

/// The machine ended before this change, and the next one soon does the same step. If an upload was in
/// progress, it is completed, and only the parts that were not noted are sent. Returns whether there was one.
fn go_on(place: &Place, life: &Life, changes: usize, act: &Act<'_>) -> bool {
    let (copy, answered) = &life.ends[changes];
    let when = life.when(changes);
    place.restore(copy);
    let (relay, noted, is_open) = (place.relay(), noted_upload(&place.store), place.has_upload());
    if noted.is_none() && !is_open {
        return false;
    }
    make_older(&place.store.join("locks"), LAPSED);
    let next = open(relay.address(), "next").unwrap_or_else(|e| panic!("{e} {when}"));
    assert_eq!(lists(&next), life.states[*answered], "{when}");
    check(&next, &place.store, &FOLDERS[..5], &when);
    assert_eq!(noted_upload(&place.store), noted, "{when}");
    relay.take_seen();
    // If the server has completed the upload, it does not know it any more, and by now the object is removed:
    // the copy begins again from the start.
    act(&next, *answered).unwrap_or_else(|e| panic!("{e} {when}"));
    let seen = relay.take_seen();
    let sent = seen.iter().filter(|request| request.starts_with("PUT") && request.contains("partNumber"));
    let parts = if *answered == 1 { 2 } else { 5 };
    let there = noted.filter(|_| is_open).map_or(0, |(_, there)| there);
    assert_eq!(sent.count(), parts - there, "parts were sent {when}");
    assert_eq!(lists(&next), life.states[answered + 1], "{when}");
    check(&next, &place.store, &FOLDERS, &when);
    true
}

#[test]
fn a_crash_during_an_upload_leaves_continuable_or_discardable_parts() {
    let place = Place::start();
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    // Four parts are sent at a time and then noted. So there is a time when some are noted and one is
    // missing.
    publish(&elsewhere, "c", &in_parts(4), &[]).unwrap();
    let imported = in_parts(1);
    let act: &Act<'_> = &|store, step| match step {
        0 => publish(store, "a", b"one", &[]),
        1 => publish(store, "a", &imported, &[Hash::of(b"one")]),
        _ => copy_from(&elsewhere, store),
    };
    let life = place.live(3, |store, step| act(store, step).unwrap());
    let mut gone_on = 0;
    for changes in 0..life.ends.len() {
        end_before(&place, &life, changes);
        gone_on += u32::from(go_on(&place, &life, changes, act));
    }
    // For the import: before each of two parts, and before the completion. For the copy: before each of five
    // parts, before the two notes of the parts that are there, before the completion, and before the removal
    // of the note.
    assert!(gone_on >= 12, "{gone_on}");
}

#[test]
fn a_crash_during_a_partial_copy_keeps_all_versions_complete() {
    let place = Place::start();
    let object = Rng::new(31).bytes(300_000);
    let dirs = [0; 3].map(|_| tempfile::tempdir().unwrap());
    let sources = [
        holed(dirs[0].path(), "c", &object, &(20_000..30_000)),
        // Each of these two needs what the other one lacks.
        holed(dirs[1].path(), "d", &object, &(100_000..110_000)),
        whole(dirs[2].path(), "e", &object),
    ];
    let act: &Act<'_> = &|store, step| match sources.get(step) {
        Some(source) => copy_all(source, store).map(drop),
        None => store.remove(&name(["e", "c", "d"][step - sources.len()]), None).map(drop),
    };
    let life = place.live(6, |store, step| act(store, step).unwrap());
    assert!(life.ends.len() > 25, "{}", life.ends.len());
    for changes in some(0..life.ends.len()) {
        end_before(&place, &life, changes);

        // The same if the next machine continues at once.
        let (copy, answered) = &life.ends[changes];
        let when = life.when(changes);
        place.restore(copy);
        make_older(&place.store.join("locks"), LAPSED);
        let next = open(place.server.address(), "next").unwrap_or_else(|e| panic!("{e} {when}"));
        for step in *answered..sources.len() {
            act(&next, step).unwrap_or_else(|e| panic!("{e} {when}"));
        }
        check(&next, &place.store, &FOLDERS, &when);
    }
}

/// What a machine does to an image, to a version of it, or to the store.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Publish,
    GiveUp,
    Copy,
    Promote,
    Schedule,
    PromoteDue,
    Revert,
    Retire,
    SetTrace,
    RemoveTrace,
    RetentionRoot,
    Release,
    /// A machine runs the version: a pin in the store.
    Run,
    Stop,
    Mend,
    MendManifest,
    RemoveVersion,
    RemoveImage,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => Just(Operation::Publish), 1 => Just(Operation::GiveUp), 2 => Just(Operation::Copy),
        2 => Just(Operation::Promote), 2 => Just(Operation::Schedule), 1 => Just(Operation::PromoteDue),
        1 => Just(Operation::Revert), 1 => Just(Operation::Retire), 2 => Just(Operation::SetTrace),
        1 => Just(Operation::RemoveTrace), 1 => Just(Operation::RetentionRoot), 1 => Just(Operation::Release),
        1 => Just(Operation::Run), 1 => Just(Operation::Stop), 1 => Just(Operation::Mend),
        1 => Just(Operation::MendManifest), 3 => Just(Operation::RemoveVersion),
        1 => Just(Operation::RemoveImage),
    ]
}

/// An operation, on the version with this number of an image.
type Drawn = (Operation, &'static str, u32);

fn apply(
    store: &dyn Store,
    (operation, image, number): Drawn,
    pins: &mut Vec<Pin>,
) -> Result<(), StoreError> {
    let channel = if number == 1 { Channel::Test } else { Channel::Production };
    let pointer = |at_s| Pointer { channel, version: number, at_s, author: "anna".into() };
    let version = || store.resolve(&format!("{image}@{number}").parse().unwrap());
    let change = |change: &mut dyn FnMut(&mut headwater_store::Image) -> Result<(), StoreError>| {
        store.change(&name(image), change)
    };
    match operation {
        Operation::Publish => {
            let newest = store.image(&name(image))?.and_then(|image| image.newest().cloned());
            let older = newest.map(|newest| newest.objects).unwrap_or_default();
            publish(store, image, format!("{number} after {older:?}").as_bytes(), &older)
        }
        Operation::GiveUp => give_up(store),
        Operation::Copy => copy_from_elsewhere(store),
        Operation::Promote => change(&mut |image| image.promote(pointer(7)).map(drop)),
        Operation::Schedule => change(&mut |image| image.schedule(pointer(8)).map(drop)),
        Operation::PromoteDue => change(&mut |image| {
            image.promote_due(9);
            Ok(())
        }),
        Operation::Revert => change(&mut |image| image.revert(channel).map(drop)),
        Operation::Retire => change(&mut |image| image.retire(number, true)),
        Operation::SetTrace => store.set_trace(version()?.manifest, Some(b"a trace")),
        Operation::RemoveTrace => store.set_trace(version()?.manifest, None),
        Operation::RetentionRoot => store.retain(&root(image, version()?.manifest)),
        Operation::Release => store.release(&root(image, version()?.manifest)),
        Operation::Run => {
            pins.push(store.pin(version()?.manifest)?);
            Ok(())
        }
        Operation::Stop => {
            pins.clear();
            Ok(())
        }
        Operation::Mend => {
            let object = store.open_object(version()?.objects[0])?;
            let mut first = [0];
            object.read_range(0, &mut first)?;
            store.repair_object(object.id(), &[Patch { offset: 0, bytes: first.to_vec() }])
        }
        Operation::MendManifest => {
            let id = version()?.manifest;
            store.repair_manifest(id, &store.manifest(id)?)
        }
        Operation::RemoveVersion => store.remove(&name(image), Some(number)).map(drop),
        Operation::RemoveImage => store.remove(&name(image), None).map(drop),
    }
}

/// Tries an operation. If it is refused, it must have changed nothing.
fn try_to(store: &dyn Store, drawn: Drawn, pins: &mut Vec<Pin>) {
    let before = lists(store);
    let Err(e) = apply(store, drawn, pins) else { return };
    let expected = [StoreErrorKind::NotFound, StoreErrorKind::Invalid, StoreErrorKind::InUse];
    assert!(expected.contains(&e.kind()), "{drawn:?}: {e}");
    assert_eq!(lists(store), before, "{drawn:?} failed and changed something");
}

proptest! {
    // The same histories each time, since each needs a server of its own.
    #![proptest_config(ProptestConfig {
        cases: rounds(12) as u32,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_crash_anywhere_in_an_s3_history_loses_nothing(
        history in prop::collection::vec(
            (operation(), prop::sample::select(vec!["a", "c"]), 1..4_u32), 6..16,
        ),
        at in any::<prop::sample::Index>(),
    ) {
        let place = Place::start();
        let (steps, mut pins) = (history.len(), Vec::new());
        let life = place.live(steps, move |store, step| try_to(store, history[step], &mut pins));
        end_before(&place, &life, at.index(life.ends.len()));
    }
}
