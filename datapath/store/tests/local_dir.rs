//! The directory store from outside: publishing, removing, locking, pins, leftovers, damage.

use std::fs;
use std::path::Path;

use headwater_store::{
    Access, Channel, Hash, ImageName, LocalDir, NewVersion, Pointer, Store, StoreError, StoreErrorKind,
    Version,
};

fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

fn writable(dir: &Path) -> LocalDir {
    LocalDir::open(dir, Access::WRITE).unwrap()
}

/// Publishes a version with one object of its own (unless `own` is empty) that also needs `older`.
fn publish(
    store: &LocalDir,
    image: &str,
    own: &[u8],
    older: &[Hash],
    manifest: &[u8],
) -> Result<Version, StoreError> {
    let mut publication = store.publish()?;
    let mut objects = older.to_vec();
    if !own.is_empty() {
        for part in own.chunks(3) {
            publication.append(part)?;
        }
        let (id, len) = publication.finish_object()?.unwrap();
        assert_eq!((id, len), (Hash::of(own), own.len() as u64));
        objects.push(id);
    }
    publication.commit(NewVersion {
        name: &name(image),
        manifest,
        objects: &objects,
        size_bytes: 4096,
        created_at_s: 1_700_000_000,
        source: "/disk.raw",
        note: "a note",
        author: "anna",
        unless_newest: false,
    })
}

/// All files below `dir`, with their lengths, but the lock.
fn files(dir: &Path) -> Vec<(String, u64)> {
    let mut out = Vec::new();
    for sub in ["images", "manifests", "objects", "tmp"] {
        for entry in fs::read_dir(dir.join(sub)).unwrap() {
            let entry = entry.unwrap();
            out.push((format!("{sub}/{}", entry.file_name().display()), entry.metadata().unwrap().len()));
        }
    }
    out.sort();
    out
}

fn kind<T>(result: Result<T, StoreError>) -> StoreErrorKind {
    result.map(drop).unwrap_err().kind()
}

#[test]
fn a_version_is_published_found_and_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    let version = publish(&store, "debian", b"object bytes", &[], b"manifest").unwrap();
    assert_eq!((version.number, version.manifest), (1, Hash::of(b"manifest")));
    assert_eq!(version.stored_bytes, 12 + 8);
    publish(&store, "debian", b"", &[Hash::of(b"object bytes")], b"manifest 2").unwrap();
    publish(&store, "alpine", b"", &[], b"manifest 3").unwrap();

    // Seen by a reader beside the writer.
    let reader = LocalDir::open(dir.path(), Access::Read).unwrap();
    let names: Vec<String> = reader.images().unwrap().iter().map(|i| i.name.to_string()).collect();
    assert_eq!(names, ["alpine", "debian"]);
    let found = reader.resolve(&"debian@1".parse().unwrap()).unwrap();
    assert_eq!(found, version);
    assert_eq!(reader.resolve(&"debian".parse().unwrap()).unwrap().number, 2);
    assert_eq!(reader.manifest(found.manifest).unwrap(), b"manifest");
    let object = reader.open_object(found.objects[0]).unwrap();
    let mut bytes = [0; 5];
    object.read_range(7, &mut bytes).unwrap();
    assert_eq!((&bytes, object.len_bytes()), (b"bytes", 12));
    assert_eq!(kind(object.read_range(8, &mut bytes)), StoreErrorKind::Damaged);
    assert_eq!(kind(reader.publish()), StoreErrorKind::ReadOnly);
    assert_eq!(kind(reader.remove(&name("debian"), None)), StoreErrorKind::ReadOnly);
    assert_eq!(kind(reader.resolve(&"nothing".parse().unwrap())), StoreErrorKind::NotFound);
}

#[test]
fn removing_frees_what_nobody_else_needs_and_numbers_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    publish(&store, "a", b"shared", &[], b"m1").unwrap();
    publish(&store, "a", b"own", &[Hash::of(b"shared")], b"m2").unwrap();
    publish(&store, "b", b"", &[Hash::of(b"shared")], b"m1").unwrap();

    let removed = store.remove(&name("a"), Some(2)).unwrap();
    assert_eq!((removed.versions.as_slice(), removed.freed_bytes), (&[2][..], 3 + 2));
    assert_eq!(publish(&store, "a", b"", &[], b"m3").unwrap().number, 3);
    // The manifest and the object are those of b@1 too.
    let removed = store.remove(&name("a"), None).unwrap();
    assert_eq!((removed.versions.as_slice(), removed.freed_bytes), (&[1, 3][..], 2));
    assert!(store.open_object(Hash::of(b"shared")).is_ok());
    assert!(store.image(&name("a")).unwrap().is_none());
    store.remove(&name("b"), None).unwrap();
    assert_eq!(files(dir.path()), []);
    assert_eq!(kind(store.remove(&name("b"), None)), StoreErrorKind::NotFound);
}

#[test]
fn a_pinned_version_is_not_removed_and_nothing_is_lost_in_the_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    let version = publish(&store, "a", b"object", &[], b"m").unwrap();
    let before = files(dir.path());
    // Pinned through another handle, as another process would.
    let reader = LocalDir::open(dir.path(), Access::Read).unwrap();
    let pin = reader.pin(version.manifest).unwrap();
    let second = reader.pin(version.manifest).unwrap();
    drop(second);
    let error = store.remove(&name("a"), Some(1)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::InUse);
    assert!(error.to_string().contains("a@1"), "{error}");
    assert_eq!(files(dir.path()), before);
    drop(pin);
    store.remove(&name("a"), Some(1)).unwrap();
    let left: Vec<String> = files(dir.path()).into_iter().map(|(file, _)| file).collect();
    assert_eq!(left, ["images/a"]);
    assert_eq!(kind(reader.pin(version.manifest)), StoreErrorKind::NotFound);
}

#[test]
fn a_dropped_publication_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    let mut publication = store.publish().unwrap();
    publication.append(b"some").unwrap();
    assert_eq!(files(dir.path()).len(), 1);
    drop(publication);
    assert_eq!(files(dir.path()), []);

    let mut publication = store.publish().unwrap();
    publication.append(b"some").unwrap();
    publication.finish_object().unwrap();
    drop(publication);
    assert_eq!(files(dir.path()), []);

    let long = "x".repeat(2000);
    let mut publication = store.publish().unwrap();
    publication.append(b"some").unwrap();
    let refused = publication.commit(NewVersion {
        name: &name("a"),
        manifest: b"m",
        objects: &[],
        size_bytes: 512,
        created_at_s: 0,
        source: "",
        note: &long,
        author: "",
        unless_newest: false,
    });
    assert_eq!(kind(refused), StoreErrorKind::Invalid);
    assert_eq!(files(dir.path()), []);
}

#[test]
fn nothing_is_reclaimed_while_a_publication_may_refer_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    publish(&store, "a", b"shared", &[], b"m1").unwrap();
    let publication = store.publish().unwrap();
    assert_eq!(store.remove(&name("a"), None).unwrap().freed_bytes, 0);
    let objects = [Hash::of(b"shared")];
    let new = NewVersion {
        name: &name("b"),
        manifest: b"m2",
        objects: &objects,
        size_bytes: 512,
        created_at_s: 0,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
    };
    publication.commit(new).unwrap();
    // The object stays for b@1; the manifest of a@1 is gone, late.
    assert!(store.open_object(objects[0]).is_ok());
    assert_eq!(files(dir.path()).len(), 3);
}

#[test]
fn leftovers_of_a_crash_are_swept_when_a_writer_opens() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    publish(&store, "a", b"object", &[], b"m").unwrap();
    let before = files(dir.path());
    drop(store);
    for left in ["tmp/object-1", "tmp/image-3"] {
        fs::write(dir.path().join(left), b"half").unwrap();
    }
    for (sub, bytes) in [("objects", b"orphan"), ("manifests", b"parent")] {
        fs::write(dir.path().join(sub).join(Hash::of(bytes).to_string()), bytes).unwrap();
    }
    // A reader must not touch what a writer may be about to publish.
    LocalDir::open(dir.path(), Access::Read).unwrap();
    assert_eq!(files(dir.path()).len(), before.len() + 4);
    writable(dir.path());
    assert_eq!(files(dir.path()), before);
}

#[test]
fn nothing_is_swept_while_a_list_of_versions_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    publish(&writable(dir.path()), "a", b"object", &[], b"m").unwrap();
    let list = dir.path().join("images/a");
    let good = fs::read(&list).unwrap();
    fs::write(&list, &good[..good.len() - 1]).unwrap();
    let store = writable(dir.path());
    assert!(store.open_object(Hash::of(b"object")).is_ok());
    let error = store.images().unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Damaged);
    assert!(error.to_string().contains("'a'"), "{error}");
}

#[test]
fn only_one_writes_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    let error = LocalDir::open(dir.path(), Access::WRITE).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Locked);
    assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
    drop(store);
    writable(dir.path());
}

#[test]
fn a_damaged_manifest_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    let version = publish(&store, "a", b"", &[], b"manifest").unwrap();
    fs::write(dir.path().join("manifests").join(version.manifest.to_string()), b"manifesT").unwrap();
    assert_eq!(kind(store.manifest(version.manifest)), StoreErrorKind::Damaged);
    // Publishing the same content again repairs it.
    publish(&store, "a", b"", &[], b"manifest").unwrap();
    assert_eq!(store.manifest(version.manifest).unwrap(), b"manifest");
}

#[test]
fn what_is_not_a_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(kind(LocalDir::open(dir.path(), Access::Read)), StoreErrorKind::NotFound);
    assert_eq!(
        kind(LocalDir::open(dir.path(), Access::Write { new_chunk_bytes: 5000 })),
        StoreErrorKind::Invalid
    );
    fs::write(dir.path().join("holiday.jpg"), b"").unwrap();
    let error = LocalDir::open(dir.path(), Access::WRITE).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::UnknownFormat);
    assert!(error.to_string().contains("holiday.jpg"), "{error}");
    assert!(!dir.path().join("objects").exists());
}

#[test]
fn an_interrupted_making_is_finished_and_the_chunk_size_stays() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("images")).unwrap();
    let store = LocalDir::open(dir.path(), Access::Write { new_chunk_bytes: 8192 }).unwrap();
    assert_eq!(store.chunk_bytes(), 8192);
    drop(store);
    assert_eq!(writable(dir.path()).chunk_bytes(), 8192);

    let mut settings = fs::read(dir.path().join("store")).unwrap();
    settings[8] = 2;
    fs::write(dir.path().join("store"), settings).unwrap();
    let error = LocalDir::open(dir.path(), Access::Read).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::UnknownFormat);
    assert!(error.to_string().contains("format 2"), "{error}");
}

#[test]
fn numbers_are_not_used_again_while_the_image_exists() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    publish(&store, "a", b"one", &[], b"m1").unwrap();
    publish(&store, "a", b"two", &[], b"m2").unwrap();
    store.remove(&name("a"), Some(2)).unwrap();
    store.remove(&name("a"), Some(1)).unwrap();
    assert!(store.image(&name("a")).unwrap().unwrap().versions.is_empty());
    assert_eq!(kind(store.resolve(&"a".parse().unwrap())), StoreErrorKind::NotFound);
    drop(store);
    let store = writable(dir.path());
    assert_eq!(publish(&store, "a", b"one", &[], b"m1").unwrap().number, 3);
    // The image goes, and another one of its name begins at 1.
    store.remove(&name("a"), None).unwrap();
    assert_eq!(files(dir.path()), []);
    assert_eq!(publish(&store, "a", b"one", &[], b"m1").unwrap().number, 1);
}

#[test]
fn a_channel_is_durable_and_holds_its_version() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    publish(&store, "a", b"one", &[], b"m1").unwrap();
    publish(&store, "a", b"two", &[], b"m2").unwrap();
    let to = |channel, version, at_s| Pointer { channel, version, at_s, author: "anna".into() };
    let promoted = to(Channel::Production, 1, 5);
    store.change(&name("a"), &mut |image| image.promote(promoted.clone()).map(drop)).unwrap();
    store.change(&name("a"), &mut |image| image.schedule(to(Channel::Test, 2, 9))).unwrap();
    let reader = LocalDir::open(dir.path(), Access::Read).unwrap();
    assert_eq!(reader.resolve(&"a".parse().unwrap()).unwrap().number, 1);
    assert_eq!(kind(reader.change(&name("a"), &mut |_| Ok(()))), StoreErrorKind::ReadOnly);
    for (number, word) in [(1, "production"), (2, "promoted to test")] {
        let error = store.remove(&name("a"), Some(number)).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::InUse);
        assert!(error.to_string().contains(word), "{error}");
    }
    // A change that fails half way is no change.
    let refused = store.change(&name("a"), &mut |image| {
        image.promote(to(Channel::Production, 2, 6))?;
        image.cancel(Channel::Production).map(drop)
    });
    assert_eq!(kind(refused), StoreErrorKind::NotFound);
    drop(store);
    let store = writable(dir.path());
    let image = store.image(&name("a")).unwrap().unwrap();
    assert_eq!(image.pointers(), [promoted]);
    assert_eq!(image.scheduled(), [to(Channel::Test, 2, 9)]);
    assert_eq!(kind(store.change(&name("b"), &mut |_| Ok(()))), StoreErrorKind::NotFound);
    // The whole image goes with its channels.
    store.remove(&name("a"), None).unwrap();
    assert_eq!(files(dir.path()), []);
}

#[test]
fn the_same_content_again_is_the_version_that_is_there_where_that_is_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    let first = publish(&store, "a", b"one", &[], b"m1").unwrap();
    let again = |objects: &[Hash]| {
        let new = NewVersion {
            name: &name("a"),
            manifest: b"m1",
            objects,
            size_bytes: 4096,
            created_at_s: 9,
            source: "",
            note: "",
            author: "",
            unless_newest: true,
        };
        store.publish().unwrap().commit(new).unwrap()
    };
    assert_eq!(again(&first.objects), first);
    store.change(&name("a"), &mut |image| image.retire(1, true)).unwrap();
    // What was taken out of use does not come back by itself.
    assert_eq!(again(&first.objects).number, 2);
}

#[test]
fn a_boot_trace_is_kept_by_readers_too_and_goes_with_its_version() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    let version = publish(&store, "debian", b"object", &[], b"manifest").unwrap();
    // As a store of an earlier release is.
    fs::remove_dir(dir.path().join("traces")).unwrap();
    assert_eq!(store.trace(version.manifest).unwrap(), None);
    store.set_trace(version.manifest, None).unwrap();
    assert_eq!(kind(store.set_trace(Hash::of(b"other"), Some(b"x"))), StoreErrorKind::NotFound);

    let reader = LocalDir::open(dir.path(), Access::Read).unwrap();
    reader.set_trace(version.manifest, Some(b"first")).unwrap();
    reader.set_trace(version.manifest, Some(b"second")).unwrap();
    assert_eq!(store.trace(version.manifest).unwrap().as_deref(), Some(&b"second"[..]));
    let left = dir.path().join("traces").join(format!("{}.1-1.part", version.manifest));
    fs::write(left, b"half").unwrap();
    store.remove(&name("debian"), Some(1)).unwrap();
    assert_eq!(fs::read_dir(dir.path().join("traces")).unwrap().count(), 0);

    let version = publish(&store, "debian", b"object", &[], b"manifest").unwrap();
    store.set_trace(version.manifest, Some(b"third")).unwrap();
    store.set_trace(version.manifest, None).unwrap();
    assert_eq!(store.trace(version.manifest).unwrap(), None);
}
