//! Copies of stores that are damaged, or that change during the copy.

use std::cell::RefCell;
use std::fs;

use headwater_store::copy::OnProgress;
use headwater_store::{
    Access, Channel, ChannelMove, CopiedImage, Hash, NewVersion, Pointer, Store, StoreError, StoreErrorKind,
};

use super::{Place, kind, name, objects_of, publish, writable};

/// Every undamaged version is copied. The damaged ones are named, and are copied once they are repaired.
pub fn damage_at_the_source_blocks_only_the_damaged_versions(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    let words = [("a", "one"), ("a", "two"), ("a", "three"), ("b", "four"), ("c", "five"), ("d", "six")];
    for (image, word) in words {
        publish(&source, image, word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    }
    publish(&source, "d", b"", &[Hash::of(b"six")], b"m-six").unwrap();
    publish(&source, "e", b"seven", &[], b"m-seven").unwrap();
    let to = Pointer { channel: Channel::Production, version: 2, at_s: 3, author: "ben".into() };
    source.change(&name("a"), &mut |image| image.promote(to.clone()).map(drop)).unwrap();
    let sync = || {
        let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
        let what = headwater_store::copy::everything(&source).unwrap();
        headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |_| Ok(())).unwrap()
    };
    let file = |sub: &str, bytes: &[u8]| elsewhere.path().join(sub).join(Hash::of(bytes).to_string());
    // A wrong object, a truncated one, a missing one, and a missing manifest.
    fs::write(file("objects", b"two"), b"2wo").unwrap();
    fs::write(file("objects", b"four"), b"fou").unwrap();
    fs::remove_file(file("objects", b"six")).unwrap();
    fs::remove_file(file("manifests", b"m-five")).unwrap();
    let copied = sync();
    let mut failed: Vec<_> = copied.failed.iter().map(|it| format!("{}@{}", it.image, it.number)).collect();
    failed.sort();
    // Version 3 must not be copied: without version 2, which is production, machines would boot version 3.
    assert_eq!(failed, ["a@2", "a@3", "b@1", "c@1", "d@1", "d@2"], "{copied:?}");
    assert!(copied.failed.iter().all(|it| it.error.kind() == StoreErrorKind::Damaged), "{copied:?}");
    assert_eq!((copied.versions, copied.objects, copied.bytes), (2, 2, 8));
    let store = place.open(Access::Read).unwrap();
    assert_eq!(store.resolve(&"a".parse().unwrap()).unwrap().number, 1);
    assert_eq!(store.resolve(&"e".parse().unwrap()).unwrap().number, 1);

    for word in ["two", "four", "six"] {
        fs::write(file("objects", word.as_bytes()), word).unwrap();
    }
    fs::write(file("manifests", b"m-five"), "m-five").unwrap();
    let copied = sync();
    assert_eq!((copied.versions, copied.present, copied.failed.len()), (6, 2, 0), "{copied:?}");
    assert_eq!(place.open(Access::Read).unwrap().images().unwrap(), source.images().unwrap());

    // If the production version was copied earlier, it stays production when the source loses it.
    publish(&source, "a", b"eight", &[], b"m-eight").unwrap();
    fs::remove_file(file("manifests", b"m-two")).unwrap();
    let copied = sync();
    assert_eq!((copied.versions, copied.failed.len()), (1, 1), "{copied:?}");
    let image = place.open(Access::Read).unwrap().image(&name("a")).unwrap().unwrap();
    assert_eq!((image.versions.len(), image.channel(Channel::Production).unwrap().version), (4, 2));
}

/// A version that is to be copied cannot be removed at the source until it is copied.
pub fn a_removal_at_the_source_waits_for_the_copy(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    for word in ["one", "two"] {
        publish(&source, "a", word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    }
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let what = headwater_store::copy::everything(&source).unwrap();
    let mut refused = 0;
    let copied = headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |at| {
        // Each version is pinned when its manifest is read.
        if at.total_bytes < 6 {
            return Ok(());
        }
        assert_eq!(kind(source.remove(&name("a"), Some(2))), StoreErrorKind::InUse);
        refused += 1;
        Ok(())
    });
    let copied = copied.unwrap();
    assert_eq!((copied.versions, copied.failed.len()), (2, 0), "{copied:?}");
    assert!(refused > 0);
    source.remove(&name("a"), Some(2)).unwrap();
}

/// A version that the target has already is not pinned at the source.
pub fn versions_that_the_target_has_can_be_removed_at_the_source_meanwhile(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    publish(&source, "a", b"one", &[], b"m-one").unwrap();
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let sync = |progress: &mut headwater_store::copy::OnProgress<'_>| {
        let what = headwater_store::copy::everything(&source).unwrap();
        headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, progress).unwrap()
    };
    assert_eq!(sync(&mut |_| Ok(())).versions, 1);
    publish(&source, "a", b"two", &[], b"m-two").unwrap();
    let mut removed = false;
    let copied = sync(&mut |at| {
        // Version 2 is missing at the target, and is counted when all manifests are read.
        if at.total_bytes > 0 && !removed {
            removed = true;
            source.remove(&name("a"), Some(1))?;
        }
        Ok(())
    });
    assert!(removed);
    assert_eq!((copied.versions, copied.present, copied.failed.len()), (1, 1, 0), "{copied:?}");
    assert_eq!(target.image(&name("a")).unwrap().unwrap().versions.len(), 2);
}

/// Production is set as soon as the version to which it points at the source is copied, and before newer
/// versions are.
pub fn an_interrupted_copy_makes_no_sealed_version_bootable(place: &dyn Place) {
    // Once with an empty target, and once with a target that has the image.
    for (image, is_there) in [("a", false), ("b", true)] {
        let elsewhere = tempfile::tempdir().unwrap();
        let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
        let sync = |stops: bool| {
            let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
            let what = headwater_store::copy::everything(&source).unwrap();
            headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |_| {
                let there = target.image(&name(image))?;
                if stops && there.is_some_and(|it| it.versions.iter().any(|version| version.number == 2)) {
                    return Err(StoreError::new(StoreErrorKind::Io, "stopped"));
                }
                Ok(())
            })
        };
        publish(&source, image, b"one", &[], b"m-one").unwrap();
        if is_there {
            assert_eq!(sync(false).unwrap().versions, 1);
        }
        let mut publication = source.publish().unwrap();
        publication.append(b"two").unwrap();
        publication.finish_object().unwrap();
        let sealed = NewVersion {
            name: &name(image),
            manifest: b"m-two",
            objects: &[Hash::of(b"two")],
            size_bytes: 512,
            created_at_s: 0,
            source: "",
            note: "",
            author: "",
            unless_newest: false,
            newest_at_most: None,
            is_sealed: true,
            keeps_identity: false,
        };
        assert_eq!(publication.commit(sealed).unwrap().production, Some(1));
        publish(&source, image, b"three", &[], b"m-three").unwrap();
        assert_eq!(kind(sync(true)), StoreErrorKind::Io);
        let store = place.open(Access::Read).unwrap();
        let numbers: Vec<u32> =
            store.image(&name(image)).unwrap().unwrap().versions.iter().map(|it| it.number).collect();
        assert_eq!((numbers, store.resolve(&image.parse().unwrap()).unwrap().number), (vec![1, 2], 1));
        assert_eq!(sync(false).unwrap().versions, 1);
        assert_eq!(writable(place).image(&name(image)).unwrap(), source.image(&name(image)).unwrap());
    }
}

/// Only the present and the scheduled targets of channels count.
pub fn a_lost_earlier_target_of_a_channel_blocks_no_channel(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    for word in ["one", "two", "three"] {
        publish(&source, "a", word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    }
    let to = |channel, version, at_s| Pointer { channel, version, at_s, author: "ben".into() };
    let change = |pointer: Pointer| {
        source.change(&name("a"), &mut |image| image.promote(pointer.clone()).map(drop)).unwrap();
    };
    change(to(Channel::Test, 1, 3));
    change(to(Channel::Production, 1, 4));
    change(to(Channel::Test, 3, 5));
    change(to(Channel::Production, 2, 6));
    let manifest = elsewhere.path().join("manifests").join(Hash::of(b"m-one").to_string());
    fs::remove_file(&manifest).unwrap();
    let sync = || {
        let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
        let what = headwater_store::copy::everything(&source).unwrap();
        headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |_| Ok(())).unwrap()
    };
    let copied = sync();
    assert_eq!((copied.versions, copied.failed.len()), (2, 1), "{copied:?}");
    let image = place.open(Access::Read).unwrap().image(&name("a")).unwrap().unwrap();
    assert_eq!(image.pointers(), [to(Channel::Test, 3, 5), to(Channel::Production, 2, 6)]);
    // The channels are set together with their version.
    fs::write(&manifest, "m-one").unwrap();
    assert_eq!(sync().versions, 1);
    assert_eq!(place.open(Access::Read).unwrap().images().unwrap(), source.images().unwrap());
}

/// The progress is the number of manifests read until the missing versions are known. After that it is the
/// number of bytes, if there are any.
pub fn a_copy_reports_its_progress_from_the_first_manifest_on(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    for word in ["one", "two", "three"] {
        publish(&source, "a", word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    }
    // It is known at once that this version cannot be copied.
    fs::remove_file(elsewhere.path().join("manifests").join(Hash::of(b"m-two").to_string())).unwrap();
    let copy = || {
        let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
        let what = headwater_store::copy::everything(&source).unwrap();
        let mut reported = Vec::new();
        let copied = headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |at| {
            reported.push(at);
            Ok(())
        });
        (copied.unwrap(), reported)
    };
    let (copied, reported) = copy();
    assert_eq!((copied.versions, copied.failed.len()), (2, 1), "{copied:?}");
    assert!(reported.iter().all(|at| at.versions == 3), "{reported:?}");
    assert!(reported.iter().map(|at| at.read_versions).is_sorted(), "{reported:?}");
    for read in 0..=3 {
        assert!(reported.iter().any(|at| at.read_versions == read), "{read} are not reported: {reported:?}");
    }
    assert!(reported.iter().all(|at| at.read_versions == 3 || at.done_bytes == 0), "{reported:?}");
    let all_bytes = "one".len() as u64 + "three".len() as u64;
    assert!(
        reported.iter().any(|at| (at.done_bytes, at.total_bytes) == (all_bytes, all_bytes)),
        "{reported:?}"
    );
    // While the last version is copied, the others are finished.
    assert_eq!(reported.last().unwrap().done_versions, 2, "{reported:?}");

    let (copied, reported) = copy();
    assert_eq!((copied.versions, copied.present), (0, 2), "{copied:?}");
    assert!(reported.iter().any(|at| at.read_versions == 3), "{reported:?}");
    assert!(reported.iter().all(|at| at.total_bytes == 0), "{reported:?}");

    // Bytes that were read of a damaged object are not subtracted from the progress before another object
    // begins.
    publish(&source, "b", b"four", &[], b"m-four").unwrap();
    fs::write(elsewhere.path().join("objects").join(Hash::of(b"four").to_string()), "4our").unwrap();
    let (copied, reported) = copy();
    assert_eq!((copied.versions, copied.failed.len()), (0, 2), "{copied:?}");
    assert!(reported.iter().map(|at| at.done_bytes).is_sorted(), "{reported:?}");
}

/// Also a copy that copies no version. A channel that is already as at the source is not reported again.
pub fn a_copy_reports_the_channels_that_it_changed(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    for (image, word) in [("a", "one"), ("a", "two"), ("b", "three")] {
        publish(&source, image, word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    }
    let sync = |channels| {
        let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
        let what = headwater_store::copy::everything(&source).unwrap();
        let copied =
            headwater_store::copy(&source, target.as_ref(), &what, &objects_of, channels, &mut |_| Ok(()));
        let copied = copied.unwrap();
        (copied.versions, copied.present, copied.followed)
    };
    assert_eq!(sync(true), (3, 0, 0));
    let promote = |version| {
        let to = Pointer { channel: Channel::Production, version, at_s: 3, author: "ben".into() };
        source.change(&name("a"), &mut |image| image.promote(to.clone()).map(drop)).unwrap();
    };
    // The channel is set before the versions are copied, and moved after them.
    for version in [1, 2] {
        promote(version);
        assert_eq!((sync(true), sync(true)), ((0, 3, 1), (0, 3, 0)), "to version {version}");
    }
    source.change(&name("b"), &mut |image| image.set_note(1, "another one").map(drop)).unwrap();
    promote(1);
    assert_eq!((sync(false), sync(true), sync(true)), ((0, 3, 0), (0, 3, 2), (0, 3, 0)));
    assert_eq!(place.open(Access::Read).unwrap().images().unwrap(), source.images().unwrap());
    // A version number that the source will not use again is not visible.
    publish(&source, "b", b"four", &[], b"m-four").unwrap();
    source.remove(&name("b"), Some(2)).unwrap();
    assert_eq!(sync(true), (0, 3, 0));
}

/// Each image is reported when it is done, and nothing is reported that other processes changed meanwhile.
pub fn a_copy_reports_for_each_image_only_its_own_changes(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    let add = |image: &str, word: &str| {
        publish(&source, image, word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    };
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let to = |channel, version, at_s| Pointer { channel, version, at_s, author: "ben".into() };
    let promote = |store: &dyn Store, image: &str, to: Pointer| {
        store.change(&name(image), &mut |image| image.promote(to.clone()).map(drop)).unwrap();
    };
    let reported = RefCell::new(Vec::new());
    let copy = |channels: bool, progress: &mut OnProgress<'_>, each: &dyn Fn(&CopiedImage)| {
        reported.borrow_mut().clear();
        let what = headwater_store::copy::everything(&source).unwrap();
        let mut each_is_told = |did: CopiedImage| {
            each(&did);
            reported.borrow_mut().push(did);
        };
        let tell = (progress, &mut each_is_told as &mut headwater_store::copy::OnImage<'_>);
        headwater_store::copy_telling(&source, target.as_ref(), &what, &objects_of, channels, tell)
    };
    let versions = || -> Vec<(String, Vec<u32>)> {
        reported.borrow().iter().map(|did| (did.name.to_string(), did.versions.clone())).collect()
    };
    let of = |image: &str, versions: &[u32]| (image.to_owned(), versions.to_vec());
    for (image, word) in [("a", "one"), ("a", "two"), ("b", "three"), ("b", "four")] {
        add(image, word);
    }
    copy(true, &mut |_| Ok(()), &|_| ()).unwrap();
    assert_eq!(versions(), [of("a", &[1, 2]), of("b", &[1, 2])]);
    assert!(reported.borrow().iter().all(|did| did.has_newest && !did.is_followed && did.tried.is_none()));
    assert!(reported.borrow().iter().all(|did| (did.booted, did.boots) == (None, Some(2))));
    copy(true, &mut |_| Ok(()), &|_| ()).unwrap();
    assert!(versions().is_empty());

    add("a", "five");
    promote(&source, "a", to(Channel::Production, 3, 5));
    promote(&source, "a", to(Channel::Test, 1, 6));
    source.change(&name("a"), &mut |image| image.set_note(1, "another one").map(drop)).unwrap();
    let planned = to(Channel::Production, 2, 90);
    target.change(&name("a"), &mut |image| image.schedule(planned.clone()).map(drop)).unwrap();
    copy(true, &mut |_| Ok(()), &|_| ()).unwrap();
    assert_eq!(versions(), [of("a", &[3])]);
    let did = reported.borrow()[0].clone();
    let moved = |channel, version| ChannelMove { channel, from: None, to: Some(version) };
    assert_eq!(did.moves, [moved(Channel::Production, 3), moved(Channel::Test, 1)]);
    assert_eq!((&did.forgotten[..], &did.scheduled[..]), (&[planned][..], &[][..]));
    assert_eq!((&did.noted[..], &did.retired[..], did.is_followed), (&[1][..], &[][..], true));
    assert_eq!((did.booted, did.boots), (Some(2), Some(3)));

    // Another process promotes a version of the second image when the first one is done.
    add("a", "six");
    add("b", "seven");
    let promotes = |did: &CopiedImage| {
        if did.name == name("a") {
            promote(target.as_ref(), "b", to(Channel::Production, 1, 7));
        }
    };
    copy(false, &mut |_| Ok(()), &promotes).unwrap();
    assert_eq!(versions(), [of("a", &[4]), of("b", &[3])]);
    let did = reported.borrow()[1].clone();
    assert!(did.moves.is_empty() && !did.is_followed && did.has_newest, "{did:?}");
    assert_eq!((did.booted, did.boots), (Some(1), Some(1)));

    // What was done is reported even if the copy ends then.
    add("a", "eight");
    add("b", "nine");
    let stopped = copy(
        false,
        &mut |_| match reported.borrow().len() {
            0 => Ok(()),
            _ => Err(StoreError::new(StoreErrorKind::Io, "stopped")),
        },
        &|_| (),
    );
    assert_eq!(kind(stopped), StoreErrorKind::Io);
    assert_eq!(versions(), [of("a", &[5])]);
}
