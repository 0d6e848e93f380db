//! Copies of stores that are damaged, or change meanwhile.

use std::fs;

use headwater_store::{Access, Channel, Hash, Pointer, Store, StoreErrorKind};

use super::{Place, kind, name, objects_of, publish};

/// Every other version comes, and the damaged ones are named and come once they are whole.
pub fn what_the_source_has_not_whole_stands_in_the_way_of_itself_only(place: &dyn Place) {
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
    // Wrong, cut, gone, and a manifest that is gone.
    fs::write(file("objects", b"two"), b"2wo").unwrap();
    fs::write(file("objects", b"four"), b"fou").unwrap();
    fs::remove_file(file("objects", b"six")).unwrap();
    fs::remove_file(file("manifests", b"m-five")).unwrap();
    let copied = sync();
    let mut failed: Vec<_> = copied.failed.iter().map(|it| format!("{}@{}", it.image, it.number)).collect();
    failed.sort();
    // Without version 2, which is production, version 3 would be booted.
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

    // Where production was copied earlier, it stays what it is when the source loses it.
    publish(&source, "a", b"eight", &[], b"m-eight").unwrap();
    fs::remove_file(file("manifests", b"m-two")).unwrap();
    let copied = sync();
    assert_eq!((copied.versions, copied.failed.len()), (1, 1), "{copied:?}");
    let image = place.open(Access::Read).unwrap().image(&name("a")).unwrap().unwrap();
    assert_eq!((image.versions.len(), image.channel(Channel::Production).unwrap().version), (4, 2));
}

/// What is to be copied is not removed at the source before it is.
pub fn a_removal_at_the_source_waits_for_the_copy(place: &dyn Place) {
    let elsewhere = tempfile::tempdir().unwrap();
    let source = headwater_store::LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
    for word in ["one", "two"] {
        publish(&source, "a", word.as_bytes(), &[], format!("m-{word}").as_bytes()).unwrap();
    }
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let what = headwater_store::copy::everything(&source).unwrap();
    let mut refused = 0;
    let copied = headwater_store::copy(&source, target.as_ref(), &what, &objects_of, true, &mut |_| {
        assert_eq!(kind(source.remove(&name("a"), Some(2))), StoreErrorKind::InUse);
        refused += 1;
        Ok(())
    });
    let copied = copied.unwrap();
    assert_eq!((copied.versions, copied.failed.len()), (2, 0), "{copied:?}");
    assert!(refused > 0);
    source.remove(&name("a"), Some(2)).unwrap();
}
