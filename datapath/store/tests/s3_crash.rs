//! A machine loses its power between any two of its changes to a store in S3: nothing that was answered is lost,
//! what was not is there as a whole or not at all, and once its marks lapse, who opens the store removes the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use headwater_store::copy::selected;
use headwater_store::hold::Purpose;
use headwater_store::{
    Access, Channel, Hash, Hold, ImageName, Keys, LocalDir, NewVersion, Patch, Pointer, S3Options, S3Store,
    S3Url, Store, StoreError, Version, copy,
};
use headwater_testkit::HttpRelay;
use headwater_testkit::s3::{KEY_ID, KEY_SECRET, S3Server, serve_if_asked};

/// The server is this program once more, in this test.
const SERVED_BY: &str = "a_machine_that_ends_between_any_two_changes_in_s3_loses_nothing_and_leaves_nothing";

/// Whose holds these are.
const DAEMON: &str = "0f-1";

fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

/// A version with an object of its own, which also needs those of `older`.
fn publish(store: &dyn Store, image: &str, own: &[u8], older: &[&[u8]]) -> Result<(), StoreError> {
    let mut publication = store.publish()?;
    publication.append(own)?;
    publication.finish_object()?;
    let objects: Vec<Hash> = older.iter().chain([&own]).map(|bytes| Hash::of(bytes)).collect();
    let manifest = [b"manifest of ", own].concat();
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
    };
    publication.commit(version).map(drop)
}

fn promote(store: &dyn Store, image: &str, version: u32) -> Result<(), StoreError> {
    store.change(&name(image), &mut |image| {
        let pointer = Pointer { channel: Channel::Production, version, at_s: 7, author: "anna".into() };
        image.promote(pointer).map(drop)
    })
}

type Step = fn(&dyn Store) -> Result<(), StoreError>;

fn hold() -> Hold {
    Hold {
        image: name("a"),
        manifest: Hash::of(b"manifest of two"),
        purpose: Purpose::Pin,
        daemon: DAEMON.to_owned(),
        id: "pin.lab".to_owned(),
        holder: "machine 'lab' of host h".to_owned(),
    }
}

/// Copies the one version of another store.
fn copy_from_elsewhere(store: &dyn Store) -> Result<(), StoreError> {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    publish(&elsewhere, "c", b"from elsewhere", &[]).unwrap();
    let what = selected(&elsewhere, &["c".parse().unwrap()])?;
    let objects = what[0].1[0].objects.clone();
    copy(&elsewhere, store, &what, &|_| Ok(objects.clone()), false, &mut |_| Ok(())).map(drop)
}

/// What the machine does, step by step.
const LIFE: [Step; 19] = [
    |store| publish(store, "a", b"one", &[]),
    |store| publish(store, "a", b"two", &[b"one"]),
    |store| publish(store, "b", b"three", &[b"one"]),
    |store| promote(store, "a", 1),
    |store| promote(store, "a", 2),
    |store| {
        // An import that is given up.
        let mut publication = store.publish()?;
        publication.append(b"nobody needs this")?;
        publication.finish_object().map(drop)
    },
    |store| store.remove(&name("b"), Some(1)).map(drop),
    |store| {
        let version = store.resolve(&"a@1".parse().unwrap())?;
        store.pin(version.manifest).map(drop)
    },
    |store| {
        store.change(&name("a"), &mut |image| {
            let pointer = Pointer { channel: Channel::Test, version: 1, at_s: 7, author: "ben".into() };
            image.schedule(pointer)
        })
    },
    |store| store.change(&name("a"), &mut |image| image.revert(Channel::Production).map(drop)),
    |store| store.change(&name("a"), &mut |image| image.retire(2, true)),
    |store| store.set_trace(Hash::of(b"manifest of two"), Some(b"a trace")),
    |store| store.hold(&hold()),
    |store| store.mend(Hash::of(b"one"), &[Patch { offset: 1, bytes: b"n".to_vec() }]),
    copy_from_elsewhere,
    |store| store.release(&hold()),
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

/// What is known of each image. One without versions is as good as one that is not there: a removal as a whole takes away the
/// versions first.
type Lists = BTreeMap<String, Known>;

fn lists(store: &dyn Store) -> Lists {
    let images = store.images().unwrap().into_iter().filter(|image| !image.versions.is_empty());
    let holds = store.holds_of(DAEMON).unwrap();
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
                    .filter(|hold| hold.image == image.name)
                    .map(|hold| hold.manifest)
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

/// All that is listed is there and whole, and nothing else is there.
fn check(store: &dyn Store, dir: &Path, when: &str) {
    let mut needed = BTreeSet::new();
    for image in store.images().unwrap() {
        for version in &image.versions {
            assert_eq!(Hash::of(&store.manifest(version.manifest).unwrap()), version.manifest);
            needed.insert(version.manifest.to_string());
            for id in &version.objects {
                let object = store.open_object(*id).unwrap();
                let mut bytes = vec![0; usize::try_from(object.len_bytes()).unwrap()];
                object.read_range(0, &mut bytes).unwrap();
                assert_eq!(Hash::of(&bytes), *id, "{when}");
                needed.insert(id.to_string());
            }
        }
    }
    for folder in ["manifests", "objects", "traces", "locks", "tmp"] {
        for key in keys(&dir.join(folder)) {
            let key = key.file_name().unwrap().to_str().unwrap().to_owned();
            assert!(needed.contains(&key), "{folder}/{key} is left {when}");
        }
    }
}

/// As if the last sign of life of all who hold something were long ago.
fn let_marks_lapse(dir: &Path) {
    let long_ago = SystemTime::now() - Duration::from_secs(700);
    for key in keys(&dir.join("locks")) {
        fs::File::options().write(true).open(key).unwrap().set_modified(long_ago).unwrap();
    }
}

const BUCKET: &str = "crash";

fn open(address: SocketAddr, owner: &str) -> Result<S3Store, StoreError> {
    let url = format!("s3://{BUCKET}/store?endpoint=http://{address}");
    let mut options = S3Options::new(owner);
    options.keys = Keys::Given { id: KEY_ID.into(), secret: KEY_SECRET.into() };
    options.attempts = 1;
    S3Store::open(&url.parse::<S3Url>().unwrap(), Access::WRITE, &options)
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

#[test]
fn a_machine_that_ends_between_any_two_changes_in_s3_loses_nothing_and_leaves_nothing() {
    serve_if_asked();
    let dir = tempfile::tempdir().unwrap();
    let served = dir.path().join("served");
    fs::create_dir(&served).unwrap();
    let server = S3Server::start(&served, SERVED_BY);
    let bucket = server.bucket(BUCKET);

    // One life, and what the server has before each of its changes: there the machine may end.
    let answered = Arc::new(AtomicUsize::new(0));
    let ends = Arc::new(Mutex::new(Vec::new()));
    let relay = HttpRelay::start(server.address());
    let (kept, steps, found) = (dir.path().to_owned(), Arc::clone(&answered), Arc::clone(&ends));
    let root = served.clone();
    relay.before_changes(move |changes| {
        let copy = kept.join(changes.to_string());
        copy_dir(&root, &copy);
        found.lock().unwrap().push((copy, steps.load(Ordering::SeqCst)));
        true
    });
    let machine = open(relay.address(), "machine").unwrap();
    let mut states = vec![lists(&machine)];
    for step in LIFE {
        step(&machine).unwrap();
        answered.fetch_add(1, Ordering::SeqCst);
        states.push(lists(&machine));
    }
    drop(machine);
    drop(relay);

    let ends = std::mem::take(&mut *ends.lock().unwrap());
    let total = ends.len();
    assert!(total > 50, "{total}");
    let restore = |copy: &Path| {
        fs::remove_dir_all(&served).unwrap();
        copy_dir(copy, &served);
    };
    for (changes, (copy, answered)) in ends.iter().enumerate() {
        let answered = *answered;
        restore(copy);
        let store = bucket.join("store");
        let_marks_lapse(&store);
        let when = format!("after {changes} of {total} changes and {answered} steps");
        let next = open(server.address(), "next").unwrap_or_else(|e| panic!("{e} {when}"));
        let found = lists(&next);
        let allowed = &states[answered..states.len().min(answered + 2)];
        assert!(allowed.contains(&found), "{found:?} {when}, and not one of {allowed:?}");
        check(&next, &store, &when);
        publish(&next, "a", b"the store goes on", &[]).unwrap_or_else(|e| panic!("{e} {when}"));
        check(&next, &store, &when);
    }

    // The same with a machine that lives on and reaches the server no more: a step that it answers all the same has been done.
    let mut refused = 0;
    for (step, act) in LIFE.iter().enumerate() {
        let mut of_step = ends.iter().filter(|(_, answered)| *answered == step);
        let Some((before, _)) = of_step.next() else { continue };
        // Opening changes something, too.
        for passing in 0..of_step.count() as u64 + 3 {
            restore(before);
            let relay = HttpRelay::start(server.address());
            relay.before_changes(move |changes| changes < passing);
            let Ok(machine) = open(relay.address(), "machine") else { continue };
            if act(&machine).is_err() {
                refused += 1;
                continue;
            }
            drop(machine);
            let found = lists(&open(server.address(), "next").unwrap());
            assert_eq!(found, states[step + 1], "step {step} was answered after {passing} changes");
        }
    }
    assert!(refused > 50, "{refused} steps were refused");
}
