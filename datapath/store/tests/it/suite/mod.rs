//! What every kind of store must do: publishing, removing, pins, channels, copies, damage.
//!
//! Each function is a test that gets a place where there is no store yet. What a store keeps are files below
//! [`Place::dir`], also those of the S3 server of the tests, so that their bytes can be looked at and changed.

mod copies;
mod removals;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use headwater_store::{
    Access, Adopted, Channel, Committed, Hash, Image, ImageName, NOTE_MAX_BYTES, NewVersion, Object, Patch,
    Pointer, Store, StoreError, StoreErrorKind, Version,
};

pub use copies::{
    a_copy_reports_for_each_image_only_its_own_changes,
    a_copy_reports_its_progress_from_the_first_manifest_on, a_copy_reports_the_channels_that_it_changed,
    a_lost_earlier_target_of_a_channel_blocks_no_channel, a_removal_at_the_source_waits_for_the_copy,
    an_interrupted_copy_makes_no_sealed_version_bootable,
    damage_at_the_source_blocks_only_the_damaged_versions,
    versions_that_the_target_has_can_be_removed_at_the_source_meanwhile,
};

pub use removals::a_promotion_during_a_removal_of_the_image_is_not_lost;

/// Where a store can be made and opened again. Each time it is opened as another process would open it.
pub trait Place {
    fn open(&self, access: Access) -> Result<Arc<dyn Store>, StoreError>;
    /// The directory of its files.
    fn dir(&self) -> &Path;
}

pub fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

pub fn writable(place: &dyn Place) -> Arc<dyn Store> {
    place.open(Access::WRITE).unwrap()
}

/// Publishes a version with one object of its own (unless `own` is empty) that also needs `older`.
pub fn publish(
    store: &dyn Store,
    image: &str,
    own: &[u8],
    older: &[Hash],
    manifest: &[u8],
) -> Result<Version, StoreError> {
    let mut publication = store.publish()?;
    let mut objects = older.to_vec();
    if !own.is_empty() {
        // At most a few hundred parts: each is a write to a file.
        for part in own.chunks(3.max(own.len() / 256)) {
            publication.append(part)?;
        }
        let (id, len) = publication.finish_object()?.unwrap();
        assert_eq!((id, len), (Hash::of(own), own.len() as u64));
        objects.push(id);
    }
    let committed = publication.commit(NewVersion {
        name: &name(image),
        manifest,
        objects: &objects,
        size_bytes: 4096,
        created_at_s: 1_700_000_000,
        source: "/disk.raw",
        note: "a note",
        author: "anna",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    })?;
    assert!(committed.is_new);
    Ok(committed.version)
}

/// All files below `dir` with their lengths, without locks and pins.
pub fn files(dir: &Path) -> Vec<(String, u64)> {
    let mut out = Vec::new();
    for sub in ["images", "manifests", "objects", "holes", "tmp"] {
        // A bucket has no empty folders.
        let Ok(entries) = fs::read_dir(dir.join(sub)) else { continue };
        for entry in entries {
            let entry = entry.unwrap();
            out.push((format!("{sub}/{}", entry.file_name().display()), entry.metadata().unwrap().len()));
        }
    }
    out.sort();
    out
}

pub fn kind<T>(result: Result<T, StoreError>) -> StoreErrorKind {
    result.map(drop).unwrap_err().kind()
}

pub fn a_version_is_published_found_and_read(place: &dyn Place) {
    let store = writable(place);
    let version = publish(store.as_ref(), "debian", b"object bytes", &[], b"manifest").unwrap();
    assert_eq!((version.number, version.manifest), (1, Hash::of(b"manifest")));
    assert_eq!(version.stored_bytes, 12 + 8);
    publish(store.as_ref(), "debian", b"", &[Hash::of(b"object bytes")], b"manifest 2").unwrap();
    publish(store.as_ref(), "alpine", b"", &[], b"manifest 3").unwrap();

    // As a reader next to the writer sees it.
    let reader = place.open(Access::Read).unwrap();
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

pub fn a_removal_frees_unneeded_space_and_numbers_continue(place: &dyn Place) {
    let store = writable(place);
    publish(store.as_ref(), "a", b"shared", &[], b"m1").unwrap();
    publish(store.as_ref(), "a", b"own", &[Hash::of(b"shared")], b"m2").unwrap();
    publish(store.as_ref(), "b", b"", &[Hash::of(b"shared")], b"m1").unwrap();

    let removed = store.remove(&name("a"), Some(2)).unwrap();
    assert_eq!((removed.versions.as_slice(), removed.freed_bytes), (&[2][..], 3 + 2));
    assert_eq!(publish(store.as_ref(), "a", b"", &[], b"m3").unwrap().number, 3);
    // The manifest and the object are those of b@1, too.
    let removed = store.remove(&name("a"), None).unwrap();
    assert_eq!((removed.versions.as_slice(), removed.freed_bytes), (&[1, 3][..], 2));
    assert!(store.open_object(Hash::of(b"shared")).is_ok());
    assert!(store.image(&name("a")).unwrap().is_none());
    store.remove(&name("b"), None).unwrap();
    assert_eq!(files(place.dir()), []);
    assert_eq!(kind(store.remove(&name("b"), None)), StoreErrorKind::NotFound);
}

pub fn an_image_with_one_manifest_under_two_numbers_is_removed_as_a_whole(place: &dyn Place) {
    let store = writable(place);
    let first = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    publish(store.as_ref(), "a", b"other", &[], b"m2").unwrap();
    let third = publish(store.as_ref(), "a", b"", &first.objects, b"m").unwrap();
    assert_eq!((third.number, third.manifest), (3, first.manifest));
    let before = files(place.dir());
    let pin = store.pin(first.manifest).unwrap();
    assert_eq!(kind(store.remove(&name("a"), None)), StoreErrorKind::InUse);
    assert_eq!(files(place.dir()), before);
    drop(pin);
    let removed = store.remove(&name("a"), None).unwrap();
    assert_eq!((removed.versions.as_slice(), removed.freed_bytes), (&[1, 2, 3][..], 6 + 1 + 5 + 2));
    assert_eq!(files(place.dir()), []);
}

pub fn a_refused_removal_of_a_pinned_version_loses_nothing(place: &dyn Place) {
    let store = writable(place);
    let version = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    let before = files(place.dir());
    // Pinned through another handle, as another process would.
    let reader = place.open(Access::Read).unwrap();
    let pin = reader.pin(version.manifest).unwrap();
    let second = reader.pin(version.manifest).unwrap();
    drop(second);
    let error = store.remove(&name("a"), Some(1)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::InUse);
    assert!(error.to_string().contains("a@1"), "{error}");
    assert_eq!(files(place.dir()), before);
    drop(pin);
    store.remove(&name("a"), Some(1)).unwrap();
    let left: Vec<String> = files(place.dir()).into_iter().map(|(file, _)| file).collect();
    assert_eq!(left, ["images/a"]);
    assert_eq!(kind(reader.pin(version.manifest)), StoreErrorKind::NotFound);
}

pub fn a_dropped_publication_leaves_nothing(place: &dyn Place) {
    let store = writable(place);
    let mut publication = store.publish().unwrap();
    publication.append(b"some").unwrap();
    drop(publication);
    assert_eq!(files(place.dir()), []);

    let mut publication = store.publish().unwrap();
    publication.append(b"some").unwrap();
    publication.finish_object().unwrap();
    drop(publication);
    assert_eq!(files(place.dir()), []);

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
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    });
    assert_eq!(kind(refused), StoreErrorKind::Invalid);
    assert_eq!(files(place.dir()), []);
}

pub fn nothing_is_freed_while_a_publication_may_refer_to_it(place: &dyn Place) {
    let store = writable(place);
    publish(store.as_ref(), "a", b"shared", &[], b"m1").unwrap();
    let publication = store.publish().unwrap();
    assert_eq!(store.remove(&name("a"), Some(1)).unwrap().freed_bytes, 0);
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
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    };
    publication.commit(new).unwrap();
    // The object stays for b@1. The manifest of a@1 is removed later.
    assert!(store.open_object(objects[0]).is_ok());
    let left: Vec<String> = files(place.dir()).into_iter().map(|(file, _)| file).collect();
    let (object, manifest) = (Hash::of(b"shared"), Hash::of(b"m2"));
    let expected = ["images/a", "images/b", &format!("manifests/{manifest}"), &format!("objects/{object}")];
    assert_eq!(left, expected);
}

/// The pinning process read the list of versions before the removal, and the space is given back only after
/// the pin.
pub fn a_version_pinned_after_its_removal_stays_until_the_pin_ends(place: &dyn Place) {
    let store = writable(place);
    let version = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    let publication = store.publish().unwrap();
    assert_eq!(store.remove(&name("a"), Some(1)).unwrap().freed_bytes, 0);
    let reader = place.open(Access::Read).unwrap();
    let pin = reader.pin(version.manifest).unwrap();
    let can_be_read = || {
        assert_eq!(reader.manifest(version.manifest).unwrap(), b"m");
        let mut bytes = [0; 6];
        reader.open_object(version.objects[0]).unwrap().read_range(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"object");
    };
    drop(publication);
    can_be_read();
    publish(store.as_ref(), "b", b"other", &[], b"m2").unwrap();
    store.remove(&name("b"), Some(1)).unwrap();
    can_be_read();
    drop(store);
    let store = writable(place);
    can_be_read();
    drop(pin);
    drop(store.publish().unwrap());
    let left: Vec<String> = files(place.dir()).into_iter().map(|(file, _)| file).collect();
    assert_eq!(left, ["images/a", "images/b"]);
}

pub fn the_space_that_a_late_pin_kept_is_freed_after_it(place: &dyn Place) {
    let store = writable(place);
    let version = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    let publication = store.publish().unwrap();
    assert_eq!(store.remove(&name("a"), Some(1)).unwrap().freed_bytes, 0);
    assert_eq!(store.reclaim_left().unwrap(), 0);
    let reader = place.open(Access::Read).unwrap();
    let pin = reader.pin(version.manifest).unwrap();
    drop(publication);
    assert_eq!((store.reclaim_left().unwrap(), reader.reclaim_left().unwrap()), (0, 0));
    assert!(reader.open_object(version.objects[0]).is_ok());
    drop(pin);
    assert_eq!((reader.reclaim_left().unwrap(), store.reclaim_left().unwrap()), (0, 6 + 1));
    assert_eq!(files(place.dir()).into_iter().map(|(file, _)| file).collect::<Vec<_>>(), ["images/a"]);
    assert_eq!(store.reclaim_left().unwrap(), 0);
}

pub fn a_damaged_manifest_is_noticed(place: &dyn Place) {
    let store = writable(place);
    let version = publish(store.as_ref(), "a", b"", &[], b"manifest").unwrap();
    fs::write(place.dir().join("manifests").join(version.manifest.to_string()), b"manifesT").unwrap();
    assert_eq!(kind(store.manifest(version.manifest)), StoreErrorKind::Damaged);
    // Publishing the same content again repairs it.
    publish(store.as_ref(), "a", b"", &[], b"manifest").unwrap();
    assert_eq!(store.manifest(version.manifest).unwrap(), b"manifest");
}

pub fn numbers_are_not_used_again_while_the_image_exists(place: &dyn Place) {
    let store = writable(place);
    publish(store.as_ref(), "a", b"one", &[], b"m1").unwrap();
    publish(store.as_ref(), "a", b"two", &[], b"m2").unwrap();
    store.remove(&name("a"), Some(2)).unwrap();
    store.remove(&name("a"), Some(1)).unwrap();
    assert!(store.image(&name("a")).unwrap().unwrap().versions.is_empty());
    assert_eq!(kind(store.resolve(&"a".parse().unwrap())), StoreErrorKind::NotFound);
    drop(store);
    let store = writable(place);
    assert_eq!(publish(store.as_ref(), "a", b"one", &[], b"m1").unwrap().number, 3);
    // The image is removed, and a new image of the same name begins at version 1.
    store.remove(&name("a"), None).unwrap();
    assert_eq!(files(place.dir()), []);
    assert_eq!(publish(store.as_ref(), "a", b"one", &[], b"m1").unwrap().number, 1);
}

pub fn a_channel_is_durable_and_holds_its_version(place: &dyn Place) {
    let store = writable(place);
    publish(store.as_ref(), "a", b"one", &[], b"m1").unwrap();
    publish(store.as_ref(), "a", b"two", &[], b"m2").unwrap();
    let to = |channel, version, at_s| Pointer { channel, version, at_s, author: "anna".into() };
    let promoted = to(Channel::Production, 1, 5);
    store.change(&name("a"), &mut |image| image.promote(promoted.clone()).map(drop)).unwrap();
    store.change(&name("a"), &mut |image| image.schedule(to(Channel::Test, 2, 9)).map(drop)).unwrap();
    let reader = place.open(Access::Read).unwrap();
    assert_eq!(reader.resolve(&"a".parse().unwrap()).unwrap().number, 1);
    assert_eq!(kind(reader.change(&name("a"), &mut |_| Ok(()))), StoreErrorKind::ReadOnly);
    for (number, word) in [(1, "production"), (2, "promoted to test")] {
        let error = store.remove(&name("a"), Some(number)).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::InUse);
        assert!(error.to_string().contains(word), "{error}");
    }
    // A change that fails half way changes nothing.
    let refused = store.change(&name("a"), &mut |image| {
        image.promote(to(Channel::Production, 2, 6))?;
        image.cancel(Channel::Production).map(drop)
    });
    assert_eq!(kind(refused), StoreErrorKind::NotFound);
    drop(store);
    let store = writable(place);
    let image = store.image(&name("a")).unwrap().unwrap();
    assert_eq!(image.pointers(), [promoted]);
    assert_eq!(image.scheduled(), [to(Channel::Test, 2, 9)]);
    assert_eq!(kind(store.change(&name("b"), &mut |_| Ok(()))), StoreErrorKind::NotFound);
    // If the caller asks for it, the whole image is removed with its channels.
    let error = store.remove_unless_promoted(&name("a")).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::InUse);
    for word in ["production points to version 1", "version 2 will be promoted to test", "--force"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    assert_eq!(store.image(&name("a")).unwrap().unwrap(), image);
    store.remove(&name("a"), None).unwrap();
    assert_eq!(files(place.dir()), []);
}

pub fn the_same_content_again_is_the_existing_version_if_requested(place: &dyn Place) {
    let store = writable(place);
    let first = publish(store.as_ref(), "a", b"one", &[], b"m1").unwrap();
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
            newest_at_most: None,
            is_sealed: false,
            keeps_identity: false,
        };
        store.publish().unwrap().commit(new).unwrap()
    };
    assert_eq!(again(&first.objects), Committed { version: first.clone(), is_new: false, production: None });
    store.change(&name("a"), &mut |image| image.retire(1, true)).unwrap();
    // A version that was retired does not come back by itself.
    let second = again(&first.objects);
    assert_eq!((second.version.number, second.is_new), (2, true));
    store.change(&name("a"), &mut |image| image.retire(2, true)).unwrap();
    // Of several processes at once, one made the version.
    let together = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| again(&first.objects))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(together.iter().all(|one| one.version.number == 3), "{together:?}");
    assert_eq!(together.iter().filter(|one| one.is_new).count(), 1, "{together:?}");
}

pub fn no_version_is_published_above_an_unknown_newer_one(place: &dyn Place) {
    let store = writable(place);
    publish(store.as_ref(), "a", b"one", &[], b"m1").unwrap();
    publish(store.as_ref(), "a", b"two", &[], b"m2").unwrap();
    let image = name("a");
    let over_first = || {
        let new = NewVersion {
            name: &image,
            manifest: b"m3",
            objects: &[Hash::of(b"one")],
            size_bytes: 4096,
            created_at_s: 9,
            source: "",
            note: "",
            author: "",
            unless_newest: false,
            newest_at_most: Some(1),
            is_sealed: false,
            keeps_identity: false,
        };
        store.publish().unwrap().commit(new)
    };
    let before = files(place.dir());
    let refused = over_first().unwrap_err();
    assert!(refused.kind() == StoreErrorKind::InUse && refused.to_string().contains("a@2"), "{refused}");
    assert_eq!(files(place.dir()), before);
    store.change(&image, &mut |image| image.retire(2, true)).unwrap();
    assert_eq!(over_first().unwrap().version.number, 3);
}

/// The image with its first version is made in one step.
pub fn a_sealed_version_is_not_bootable_before_its_promotion(place: &dyn Place) {
    let store = writable(place);
    let image = name("a");
    let seal = |manifest: &[u8]| {
        let new = NewVersion {
            name: &image,
            manifest,
            objects: &[],
            size_bytes: 4096,
            created_at_s: 9,
            source: "",
            note: "",
            author: "anna",
            unless_newest: false,
            newest_at_most: None,
            is_sealed: true,
            keeps_identity: false,
        };
        store.publish().unwrap().commit(new).unwrap()
    };
    let boots = || store.resolve(&"a".parse().unwrap()).unwrap().number;
    publish(store.as_ref(), "a", b"one", &[], b"m1").unwrap();
    let later = Pointer { channel: Channel::Production, version: 1, at_s: 99, author: "ben".into() };
    store.change(&image, &mut |image| image.schedule(later.clone()).map(drop)).unwrap();
    let sealed = seal(b"m2");
    assert_eq!((sealed.version.number, sealed.production, boots()), (2, Some(1), 1));
    let listed = store.image(&image).unwrap().unwrap();
    let set = Pointer { channel: Channel::Production, version: 1, at_s: 9, author: "anna".into() };
    assert_eq!((listed.pointers(), listed.scheduled()), (&[set][..], &[later][..]));
    assert_eq!(seal(b"m3").production, None);
    store.change(&image, &mut |image| image.revert(Channel::Production).map(drop)).unwrap();
    assert_eq!(boots(), 3);
}

/// The note of a retired version can be changed, too. It stays until the next change.
pub fn a_changed_note_is_durable(place: &dyn Place) {
    let store = writable(place);
    publish(store.as_ref(), "a", b"one", &[], b"m1").unwrap();
    publish(store.as_ref(), "a", b"two", &[], b"m2").unwrap();
    let set = |number, note: &str| {
        let mut before = String::new();
        let changed = store.change(&name("a"), &mut |image| {
            before = image.set_note(number, note)?;
            Ok(())
        });
        changed.map(|()| before)
    };
    store.change(&name("a"), &mut |image| image.retire(1, true)).unwrap();
    assert_eq!(set(1, "the first").unwrap(), "a note");
    assert_eq!(set(2, "").unwrap(), "a note");
    let left = files(place.dir());
    assert_eq!(kind(set(2, &"x".repeat(NOTE_MAX_BYTES + 1))), StoreErrorKind::Invalid);
    assert_eq!(kind(set(3, "a note")), StoreErrorKind::NotFound);
    let nowhere = store.change(&name("b"), &mut |image| image.set_note(1, "a note").map(drop));
    assert_eq!(kind(nowhere), StoreErrorKind::NotFound);
    assert_eq!(files(place.dir()), left);

    // Another process sees the same.
    let image = place.open(Access::Read).unwrap().image(&name("a")).unwrap().unwrap();
    let reported: Vec<_> =
        image.versions.iter().map(|it| (it.number, it.note.as_str(), it.retired)).collect();
    assert_eq!(reported, [(1, "the first", true), (2, "", false)]);
}

/// The newest note of the source is taken, even if the target had its own. A copy of single versions does not
/// change it.
pub fn a_sync_copies_notes_that_changed_at_the_source(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    publish(&source, "a", b"one", &[], b"m-one").unwrap();
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let copy = |channels| {
        let what = headwater_store::copy::everything(&source).unwrap();
        headwater_store::copy(&source, target.as_ref(), &what, &objects_of, channels, &mut |_| Ok(()))
            .unwrap();
        target.image(&name("a")).unwrap().unwrap().versions[0].note.clone()
    };
    let set = |store: &dyn Store, note: &str| {
        store.change(&name("a"), &mut |image| image.set_note(1, note).map(drop)).unwrap();
    };
    assert_eq!(copy(true), "a note");
    set(target.as_ref(), "of the target");
    set(&source, "of the source");
    assert_eq!(copy(false), "of the target");
    assert_eq!(copy(true), "of the source");
    set(&source, "");
    assert_eq!(copy(true), "");
}

/// Objects, versions and channels of one store are copied to another one, once.
pub fn a_version_is_copied_with_its_number_and_only_once(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    publish(&source, "a", b"one", &[], b"m1").unwrap();
    let second = publish(&source, "a", b"two two", &[Hash::of(b"one")], b"m2").unwrap();
    let promote = |image: &mut headwater_store::Image| {
        let pointer = Pointer { channel: Channel::Production, version: 2, at_s: 3, author: "ben".into() };
        image.promote(pointer).map(drop)
    };
    source.change(&name("a"), &mut |image| promote(image)).unwrap();

    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let copy = |target: &dyn Store| {
        let mut publication = target.publish().unwrap();
        for id in &second.objects {
            let mut copied = 0;
            let object = source.open_object(*id).unwrap();
            publication
                .copy_object(object.as_ref(), &mut |bytes| {
                    copied += bytes;
                    Ok(())
                })
                .unwrap();
            assert_eq!(copied, object.len_bytes());
        }
        publication.adopt(&name("a"), &second, b"m2")
    };
    let adopted = copy(target.as_ref()).unwrap();
    assert_eq!(adopted, Some(Adopted { is_newest: true, booted: None, boots: Some(2) }));
    assert_eq!(copy(target.as_ref()).unwrap(), None);
    let theirs = source.image(&name("a")).unwrap().unwrap();
    let follow = |image: &mut headwater_store::Image| {
        image.follow(&theirs);
        Ok(())
    };
    target.change(&name("a"), &mut |image| follow(image)).unwrap();
    drop(target);

    let target = writable(place);
    let image = target.image(&name("a")).unwrap().unwrap();
    assert_eq!(image.versions, std::slice::from_ref(&second));
    assert_eq!(image.pointers(), theirs.pointers());
    assert_eq!(target.manifest(second.manifest).unwrap(), b"m2");
    assert_eq!(publish(target.as_ref(), "a", b"", &[], b"m3").unwrap().number, 3);
    // Another version with the same number is not taken for the same one.
    let other = publish(&source, "a", b"three", &[], b"other m3").unwrap();
    let refused = target.publish().unwrap().adopt(&name("a"), &other, b"other m3");
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::InUse);
    assert!(error.to_string().contains("a@3"), "{error}");
    assert_eq!(target.image(&name("a")).unwrap().unwrap().versions.len(), 2);
}

/// An object whose contents do not match its hash.
struct Lying(Hash);

impl Object for Lying {
    fn id(&self) -> Hash {
        self.0
    }

    fn len_bytes(&self) -> u64 {
        5
    }

    fn read_range(&self, _: u64, into: &mut [u8]) -> Result<(), StoreError> {
        into.fill(b'x');
        Ok(())
    }
}

/// An object that does not have the hash that is its name is not accepted.
pub fn a_damaged_object_is_not_copied(place: &dyn Place) {
    let store = place.open(Access::Copy { new_chunk_bytes: 4096 }).unwrap();
    let mut publication = store.publish().unwrap();
    let id = Hash::of(b"right");
    let refused = publication.copy_object(&Lying(id), &mut |_| Ok(()));
    assert_eq!(kind(refused), StoreErrorKind::Damaged);
    assert_eq!(kind(store.open_object(id).map(drop)), StoreErrorKind::NotFound);
    drop(publication);
    assert_eq!(files(place.dir()), []);
}

/// Correct bytes replace damaged ones, also for readers that have the object open.
pub fn a_damaged_object_is_repaired(place: &dyn Place) {
    let store = writable(place);
    let version = publish(store.as_ref(), "a", b"some object", &[], b"m").unwrap();
    let id = version.objects[0];
    let reader = store.open_object(id).unwrap();
    let file = place.dir().join("objects").join(id.to_string());
    fs::write(&file, b"some oXXect").unwrap();
    store.repair_object(id, &[Patch { offset: 6, bytes: b"bj".to_vec() }]).unwrap();
    let mut bytes = [0; 11];
    reader.read_range(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"some object");
    assert_eq!(Hash::of(&fs::read(&file).unwrap()), id);
    let beyond = Patch { offset: 10, bytes: b"bj".to_vec() };
    assert!(store.repair_object(Hash::of(b"other"), &[beyond]).is_err());
    let reader = place.open(Access::Read).unwrap();
    assert_eq!(kind(reader.repair_object(id, &[])), StoreErrorKind::ReadOnly);
    assert!(store.stored_bytes().unwrap() >= 12);
    assert!(!store.shown().is_empty());
}

/// A boot trace is written, is replaced, and is removed with its version.
pub fn a_boot_trace_goes_with_its_version(place: &dyn Place) {
    let store = writable(place);
    let version = publish(store.as_ref(), "a", b"object", &[], b"m").unwrap();
    assert_eq!(store.trace(version.manifest).unwrap(), None);
    assert_eq!(kind(store.set_trace(Hash::of(b"other"), Some(b"x"))), StoreErrorKind::NotFound);
    store.set_trace(version.manifest, Some(b"first")).unwrap();
    store.set_trace(version.manifest, Some(b"second")).unwrap();
    assert_eq!(store.trace(version.manifest).unwrap().as_deref(), Some(&b"second"[..]));
    store.remove(&name("a"), Some(1)).unwrap();
    assert_eq!(store.trace(version.manifest).unwrap(), None);
}

/// Whichever processes write at the same time: afterwards every version is there, each with a number of its
/// own.
pub fn two_writers_on_one_image_lose_nothing(place: &dyn Place) {
    let first = writable(place);
    // A directory has one writer, so two of its threads write there.
    let second = place.open(Access::WRITE).unwrap_or_else(|_| Arc::clone(&first));
    let each = 6;
    std::thread::scope(|scope| {
        for (store, word) in [(&first, "x"), (&second, "y")] {
            scope.spawn(move || {
                for number in 0..each {
                    let text = format!("{word}{number}");
                    publish(store.as_ref(), "a", text.as_bytes(), &[], format!("m{text}").as_bytes())
                        .unwrap();
                    let note = Pointer { channel: Channel::Test, version: 1, at_s: number, author: text };
                    store.change(&name("a"), &mut |image| image.promote(note.clone()).map(drop)).unwrap();
                }
            });
        }
    });
    let image = first.image(&name("a")).unwrap().unwrap();
    let numbers: Vec<u32> = image.versions.iter().map(|version| version.number).collect();
    assert_eq!(numbers, (1..=2 * u32::try_from(each).unwrap()).collect::<Vec<_>>());
    for version in &image.versions {
        assert_eq!(Hash::of(&first.manifest(version.manifest).unwrap()), version.manifest);
        assert!(first.open_object(version.objects[0]).is_ok());
    }
}

/// Either the version is removed, or it is promoted: never both.
pub fn simultaneous_promotion_and_removal_leave_no_dangling_channel(place: &dyn Place) {
    let first = writable(place);
    let second = place.open(Access::WRITE).unwrap_or_else(|_| Arc::clone(&first));
    publish(first.as_ref(), "a", b"kept", &[], b"kept").unwrap();
    for round in 0..8u8 {
        let version = publish(first.as_ref(), "a", &[round; 9], &[], &[round; 5]).unwrap();
        let pointer =
            Pointer { channel: Channel::Test, version: version.number, at_s: 1, author: String::new() };
        let (promoted, removed) = std::thread::scope(|scope| {
            let promote = scope
                .spawn(|| second.change(&name("a"), &mut |image| image.promote(pointer.clone()).map(drop)));
            let removed = first.remove(&name("a"), Some(version.number));
            (promote.join().unwrap(), removed)
        });
        let image = first.image(&name("a")).unwrap().unwrap();
        let is_there = image.versions.iter().any(|there| there.number == version.number);
        match (promoted, removed) {
            (Ok(()), Err(e)) => {
                assert_eq!(e.kind(), StoreErrorKind::InUse, "{e}");
                assert!(
                    is_there && image.channel(Channel::Test).is_some_and(|p| p.version == version.number)
                );
            }
            (Err(e), Ok(_)) => {
                assert_eq!(e.kind(), StoreErrorKind::NotFound, "{e}");
                assert!(!is_there);
            }
            both => panic!("round {round}: {both:?}"),
        }
    }
}

/// Times come from the caller, and a clock that goes back does no harm.
pub fn a_clock_that_is_set_back_changes_no_order(place: &dyn Place) {
    let store = writable(place);
    let at = |created_at_s: u64, manifest: &[u8]| {
        let new = NewVersion {
            name: &name("a"),
            manifest,
            objects: &[],
            size_bytes: 4096,
            created_at_s,
            source: "",
            note: "",
            author: "",
            unless_newest: false,
            newest_at_most: None,
            is_sealed: false,
            keeps_identity: false,
        };
        store.publish().unwrap().commit(new).unwrap()
    };
    at(2_000_000_000, b"m1");
    at(1_000, b"m2");
    let to = |version, at_s| {
        let pointer = Pointer { channel: Channel::Production, version, at_s, author: String::new() };
        store.change(&name("a"), &mut |image| image.promote(pointer.clone()).map(drop)).unwrap();
    };
    to(1, 2_000_000_000);
    to(2, 500);
    let store = place.open(Access::Read).unwrap();
    let image = store.image(&name("a")).unwrap().unwrap();
    assert_eq!(image.newest().unwrap().number, 2);
    assert_eq!(image.channel(Channel::Production).unwrap().version, 2);
    assert_eq!(store.resolve(&"a".parse().unwrap()).unwrap().number, 2);
}

/// What a manifest `m-WORD` of these tests says: that the version needs the object `WORD`.
fn objects_of(manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
    let word = manifest.strip_prefix(b"m-").unwrap();
    Ok(vec![(Hash::of(word), word.len() as u64)])
}

/// A list of versions that names other objects than the manifest does not lead to an incomplete version.
pub fn a_version_with_other_objects_than_its_manifest_is_not_copied(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    publish(&source, "a", b"one", &[], b"m-one").unwrap();
    publish(&source, "b", b"", &[Hash::of(b"one")], b"m-two").unwrap();
    publish(&source, "c", b"", &[], b"m-one").unwrap();
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let copy = |image: &str| {
        let what = headwater_store::copy::selected(&source, &[image.parse().unwrap()]).unwrap();
        headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |_| Ok(()))
    };
    for image in ["b", "c"] {
        let copied = copy(image).unwrap();
        let [failed] = &copied.failed[..] else { panic!("{copied:?}") };
        assert_eq!((failed.image.to_string(), failed.number), (image.to_owned(), 1));
        assert_eq!((copied.versions, failed.error.kind()), (0, StoreErrorKind::Damaged));
        assert!(failed.error.to_string().contains("the manifest of version 1 needs"), "{copied:?}");
    }
    assert_eq!(target.images().unwrap(), []);
    assert_eq!(copy("a").unwrap().versions, 1);
}

/// A sync copies what is missing, in any number of attempts, and a second one copies nothing.
pub fn a_sync_copies_missing_versions_and_continues_after_a_stop(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    for (image, word) in [("a", "one"), ("a", "two"), ("b", "three")] {
        publish(&source, image, word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    }
    let pointer = Pointer { channel: Channel::Test, version: 1, at_s: 3, author: "ben".into() };
    source.change(&name("a"), &mut |image| image.promote(pointer.clone()).map(drop)).unwrap();
    let trace = Hash::of(b"m-two");
    source.set_trace(trace, Some(b"trace")).unwrap();

    let sync = |limit_bytes: u64| {
        let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
        let what = headwater_store::copy::everything(&source).unwrap();
        let mut total_bytes = 0;
        let outcome = headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |at| {
            // It grows until all manifests are read.
            total_bytes = at.total_bytes;
            if at.done_bytes > limit_bytes {
                return Err(StoreError::new(StoreErrorKind::Io, "stopped"));
            }
            Ok(())
        });
        (outcome, total_bytes)
    };
    let (stopped, total_bytes) = sync(5);
    assert!(stopped.is_err());
    assert_eq!(total_bytes, 11);
    let (copied, total_bytes) = sync(u64::MAX);
    let copied = copied.unwrap();
    assert!(total_bytes < 11, "it began from the start");
    // The first version was there before the sync stopped.
    assert_eq!((copied.versions, copied.present, copied.bytes), (2, 1, total_bytes));
    let (again, _) = sync(u64::MAX);
    let again = again.unwrap();
    assert_eq!((again.versions, again.present, again.objects), (0, 3, 0));
    let target = writable(place);
    assert_eq!(target.images().unwrap(), source.images().unwrap());
    assert_eq!(target.trace(trace).unwrap().as_deref(), Some(&b"trace"[..]));
    for image in target.images().unwrap() {
        for version in &image.versions {
            assert!(target.open_object(version.objects[0]).is_ok());
        }
    }
    // Another chunk size is refused before anything is copied.
    let other = tempfile::tempdir().unwrap();
    let other =
        headwater_store::LocalDir::open(other.path(), Access::Write { new_chunk_bytes: 4096 }).unwrap();
    let what = headwater_store::copy::selected(&source, &["b".parse().unwrap()]).unwrap();
    let refused = headwater_store::copy(&source, &other, &what, &objects_of, false, &mut |_| Ok(()));
    assert!(refused.unwrap_err().to_string().contains("chunk sizes"));
}

/// The next sync copies what the source changed since the last one. What the source removed stays.
pub fn a_second_sync_copies_later_changes_of_the_source(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    let sync = || {
        let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
        let what = headwater_store::copy::everything(&source).unwrap();
        let copied =
            headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |_| Ok(()));
        let copied = copied.unwrap();
        (copied.versions, copied.present)
    };
    let theirs = |image: &str| source.image(&name(image)).unwrap().unwrap();
    let ours = |image: &str| place.open(Access::Read).unwrap().image(&name(image)).unwrap().unwrap();
    let change = |change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>| {
        source.change(&name("a"), change).unwrap();
    };
    let to = |channel, version, at_s| Pointer { channel, version, at_s, author: "ben".into() };
    let numbers = |image: &Image| -> Vec<(u32, bool)> {
        image.versions.iter().map(|version| (version.number, version.retired)).collect()
    };
    for (image, word) in [("a", "one"), ("a", "two"), ("a", "three"), ("a", "four"), ("b", "five")] {
        publish(&source, image, word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    }
    change(&mut |image| {
        image.promote(to(Channel::Test, 1, 3))?;
        image.promote(to(Channel::Production, 1, 4))?;
        image.schedule(to(Channel::Production, 4, 50))?;
        image.retire(2, true)
    });
    assert_eq!(sync(), (5, 0));
    assert_eq!((ours("a"), ours("b")), (theirs("a"), theirs("b")));
    assert_eq!((ours("a").scheduled().len(), numbers(&ours("a"))[1]), (1, (2, true)));

    // At the source a version is restored and promoted to test, another one is retired, one scheduled
    // promotion is cancelled, and another one is scheduled.
    change(&mut |image| {
        image.retire(2, false)?;
        image.promote(to(Channel::Test, 2, 5))?;
        image.cancel(Channel::Production)?;
        image.schedule(to(Channel::Test, 1, 60))?;
        image.retire(3, true)
    });
    source.remove(&name("a"), Some(4)).unwrap();
    source.remove(&name("b"), None).unwrap();
    publish(&source, "a", b"six", &[], b"m-six").unwrap();
    assert_eq!(sync(), (1, 3));
    let image = ours("a");
    assert_eq!(image.pointers(), theirs("a").pointers());
    assert_eq!(image.channel(Channel::Test).unwrap().version, 2);
    assert_eq!(image.scheduled(), [to(Channel::Test, 1, 60)]);
    assert_eq!(numbers(&theirs("a")), [(1, false), (2, false), (3, true), (5, false)]);
    assert_eq!(numbers(&image), [(1, false), (2, false), (3, true), (4, false), (5, false)]);
    assert_eq!(numbers(&ours("b")), [(1, false)]);

    // All of that is undone.
    change(&mut |image| {
        image.cancel(Channel::Test)?;
        image.revert(Channel::Test)?;
        image.retire(3, false)
    });
    assert_eq!(sync(), (0, 4));
    let image = ours("a");
    assert_eq!((image.pointers(), image.scheduled()), (theirs("a").pointers(), &[][..]));
    assert_eq!(image.channel(Channel::Test).unwrap().version, 1);
    assert!(numbers(&image).iter().all(|(_, is_retired)| !is_retired));
    // What was removed at the source can be read, too.
    let store = place.open(Access::Read).unwrap();
    for version in image.versions.iter().chain(&ours("b").versions) {
        let needed = objects_of(&store.manifest(version.manifest).unwrap()).unwrap();
        assert_eq!(needed.iter().map(|(id, _)| *id).collect::<Vec<_>>(), version.objects);
        store.open_object(needed[0].0).unwrap();
    }
}

/// A copy whose last step fails keeps what it copied, and the next one continues with that.
pub fn a_copy_whose_last_step_failed_is_continued(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    for word in ["one", "two"] {
        publish(&source, "a", word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    }
    let sync = || {
        let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
        let what = headwater_store::copy::everything(&source).unwrap();
        headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |_| Ok(()))
    };
    writable(place);
    // No manifest can be written: in a directory no temporary file, and in a bucket not its key.
    let tmp = place.dir().join("tmp");
    let in_the_way: Vec<_> = match tmp.exists() {
        true => (1..9).map(|number| tmp.join(format!("manifest-{number}"))).collect(),
        false => vec![place.dir().join("manifests").join(Hash::of(b"m-two").to_string())],
    };
    in_the_way.iter().for_each(|path| fs::create_dir_all(path.join("x")).unwrap());
    let present = if tmp.exists() { 0 } else { 1 };
    sync().unwrap_err();
    let objects = u32::try_from(fs::read_dir(place.dir().join("objects")).unwrap().count()).unwrap();
    assert_eq!(
        objects,
        present + 1,
        "what was copied is there, and nothing came after the target had failed"
    );
    in_the_way.iter().for_each(|path| fs::remove_dir_all(path).unwrap());
    let copied = sync().unwrap();
    assert_eq!((copied.versions, copied.present, copied.objects), (2 - present, present, 2 - objects));
    assert_eq!(writable(place).images().unwrap(), source.images().unwrap());
}

/// Makes a test of each function of the suite. `$with` is called with it and gives it a new place.
#[macro_export]
macro_rules! store_suite {
    ($with:path) => {
        $crate::store_suite!(
            $with:
            a_version_is_published_found_and_read,
            a_removal_frees_unneeded_space_and_numbers_continue,
            an_image_with_one_manifest_under_two_numbers_is_removed_as_a_whole,
            a_refused_removal_of_a_pinned_version_loses_nothing,
            a_dropped_publication_leaves_nothing,
            nothing_is_freed_while_a_publication_may_refer_to_it,
            a_version_pinned_after_its_removal_stays_until_the_pin_ends,
            the_space_that_a_late_pin_kept_is_freed_after_it,
            a_damaged_manifest_is_noticed,
            numbers_are_not_used_again_while_the_image_exists,
            a_channel_is_durable_and_holds_its_version,
            the_same_content_again_is_the_existing_version_if_requested,
            no_version_is_published_above_an_unknown_newer_one,
            a_sealed_version_is_not_bootable_before_its_promotion,
            a_changed_note_is_durable,
            a_sync_copies_notes_that_changed_at_the_source,
            a_version_is_copied_with_its_number_and_only_once,
            a_damaged_object_is_not_copied,
            a_sync_copies_missing_versions_and_continues_after_a_stop,
            a_second_sync_copies_later_changes_of_the_source,
            a_copy_whose_last_step_failed_is_continued,
            a_copy_reports_its_progress_from_the_first_manifest_on,
            a_copy_reports_the_channels_that_it_changed,
            a_copy_reports_for_each_image_only_its_own_changes,
            an_interrupted_copy_makes_no_sealed_version_bootable,
            damage_at_the_source_blocks_only_the_damaged_versions,
            a_lost_earlier_target_of_a_channel_blocks_no_channel,
            a_removal_at_the_source_waits_for_the_copy,
            versions_that_the_target_has_can_be_removed_at_the_source_meanwhile,
            a_version_with_other_objects_than_its_manifest_is_not_copied,
            a_damaged_object_is_repaired,
            a_boot_trace_goes_with_its_version,
            two_writers_on_one_image_lose_nothing,
            simultaneous_promotion_and_removal_leave_no_dangling_channel,
            a_promotion_during_a_removal_of_the_image_is_not_lost,
            a_clock_that_is_set_back_changes_no_order,
        );
    };
    ($with:path: $($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                $with(|place| $crate::suite::$name(place));
            }
        )*
    };
}
