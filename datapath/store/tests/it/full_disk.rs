//! A store on a full file system: operations that free space still succeed.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use headwater_store::{
    Access, Channel, Image, ImageName, LocalDir, NOTE_MAX_BYTES, NewVersion, Pointer, Store, StoreError,
    StoreErrorKind,
};
use headwater_testkit::{on_small_file_system, test_name};

const SIZE_MIB: u64 = 8;

#[test]
fn a_full_file_system_does_not_prevent_freeing_space() {
    let dir = tempfile::tempdir().unwrap();
    let this = test_name(a_full_file_system_does_not_prevent_freeing_space);
    on_small_file_system(this, dir.path(), SIZE_MIB, in_it);
}

/// Uses up all free space, like another program.
fn fill(dir: &Path) {
    let mut ballast = File::options().append(true).create(true).open(dir.join("ballast")).unwrap();
    let full = std::iter::repeat_with(|| ballast.write(&[7; 4096]).map(|_| ())).find_map(Result::err);
    assert_eq!(full.unwrap().kind(), ErrorKind::StorageFull);
    // Not even one byte can be written.
    let probe = dir.join("probe");
    assert_eq!(fs::write(&probe, b"x").unwrap_err().kind(), ErrorKind::StorageFull);
    fs::remove_file(probe).unwrap();
}

fn name() -> ImageName {
    "a".parse().unwrap()
}

/// A version with one object of a mebibyte.
fn publish(store: &LocalDir, fill: u8) -> Result<(), StoreError> {
    let mut publication = store.publish()?;
    publication.append(&vec![fill; 1 << 20])?;
    let object = publication.finish_object()?.unwrap().0;
    let new = NewVersion {
        name: &name(),
        manifest: &[fill; 20],
        objects: &[object],
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
    publication.commit(new).map(drop)
}

fn to_version(version: u32) -> Pointer {
    Pointer { channel: Channel::Production, version, at_s: 7, author: "anna".into() }
}

/// The part of the test above that runs in the child process.
fn in_it(dir: &Path) {
    let place = dir.join("store");
    let spare = || fs::metadata(place.join("spare")).map(|file| file.len()).ok();
    let store = LocalDir::open(&place, Access::WRITE).unwrap();
    let image = || store.image(&name()).unwrap().unwrap();
    let numbers = || image().versions.iter().map(|version| version.number).collect::<Vec<_>>();
    let production = || image().pointers().iter().map(|pointer| pointer.version).next_back();
    for version in 1..=5u8 {
        publish(&store, version).unwrap();
    }
    let kept = spare().unwrap();
    assert!(kept >= 64 << 10);

    // The removal of one of several versions writes a list. It frees space, and the spare file is there
    // again.
    fill(dir);
    assert_eq!(publish(&store, 9).unwrap_err().kind(), StoreErrorKind::NoSpace);
    assert_eq!(spare(), Some(kept), "a publication took it");
    fill(dir);
    let removed = store.remove(&name(), Some(1)).unwrap();
    assert!(removed.freed_bytes >= 1 << 20, "{removed:?}");
    assert_eq!((numbers(), spare()), (vec![2, 3, 4, 5], Some(kept)));

    // Changes of channels succeed, too, if there was free space between them to make the spare file again.
    type Change = fn(&mut Image) -> Result<(), StoreError>;
    let changes: [Change; 6] = [
        |image| image.promote(to_version(3)).map(drop),
        |image| image.promote(to_version(4)).map(drop),
        |image| image.revert(Channel::Production).map(drop),
        |image| image.retire(2, true),
        |image| image.set_note(2, &"x".repeat(NOTE_MAX_BYTES)).map(drop),
        |image| image.schedule(to_version(5)).map(drop),
    ];
    for (number, mut change) in changes.into_iter().enumerate() {
        fill(dir);
        store.change(&name(), &mut change).unwrap_or_else(|e| panic!("change {number}: {e}"));
        fs::remove_file(dir.join("ballast")).unwrap();
        store.reclaim_left().unwrap();
        assert_eq!(spare(), Some(kept), "change {number}");
    }
    assert_eq!(production(), Some(3));
    fill(dir);
    let due = &mut |image: &mut Image| {
        image.promote_due(9);
        Ok(())
    };
    store.change(&name(), due).unwrap();
    assert_eq!(production(), Some(5));

    // In a store of an earlier release, without a spare file, a removal fails and changes nothing.
    let _ = fs::remove_file(place.join("spare"));
    fill(dir);
    let before = fs::read(place.join("images/a")).unwrap();
    let refused = store.remove(&name(), Some(2)).map(drop);
    assert_eq!(refused.unwrap_err().kind(), StoreErrorKind::NoSpace);
    assert_eq!(fs::read(place.join("images/a")).unwrap(), before);
    drop(store);

    // A writer can still open the store, and the whole image can be removed.
    let store = LocalDir::open(&place, Access::WRITE).unwrap();
    assert!(spare().is_none() && left(&place.join("tmp")).is_empty());
    let removed = store.remove(&name(), None).unwrap();
    assert_eq!((removed.versions, spare()), (vec![2, 3, 4, 5], Some(kept)));
    assert!(left(&place.join("objects")).is_empty());
}

fn left(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}
