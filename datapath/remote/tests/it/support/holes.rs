//! Stores that freed parts of an object, each store different parts.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_remote::RemoteStore;
use headwater_store::{
    Access, Copied, Hash, Holes, LocalDir, Needs, NewVersion, Object, ObjectHashing, Store, StoreError,
};

use super::{MANIFEST, OBJECT_BYTES, store};

/// The version that is copied.
pub const KEPT: &[u8] = b"a manifest that stays";
/// The manifests of the first server and of the second one.
pub const OWN: [&[u8]; 2] = [b"a manifest of one", b"a manifest of the other"];

/// The part of the object that the version with this manifest needs. The version that is removed needs the
/// whole object. Of the others the one on the first server needs more, so the first server has fewer holes.
pub fn needed_by(manifest: &[u8]) -> Range<u64> {
    match manifest {
        KEPT => 300_000..350_000,
        it if it == OWN[0] => 400_000..550_000,
        it if it == OWN[1] => 600_000..700_000,
        _ => 0..OBJECT_BYTES as u64,
    }
}

/// What versions of this object need.
pub struct Parts(pub Hash);

impl Needs for Parts {
    fn objects(&self, _: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        Ok(vec![(self.0, OBJECT_BYTES as u64)])
    }

    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        needed(self.0, needed_by(manifest));
        Ok(())
    }
}

/// A store with the object, and its bytes: the first version needs all of it, two more need parts.
pub fn with_versions(dir: &Path, own: &[u8]) -> (LocalDir, Vec<u8>) {
    let bytes = store(dir);
    let store = LocalDir::open(dir, Access::WRITE).unwrap();
    for manifest in [KEPT, own] {
        let version = NewVersion {
            name: &"debian".parse().unwrap(),
            manifest,
            objects: &[Hash::of(&bytes)],
            size_bytes: 4096,
            created_at_s: 1_700_000_001,
            source: "",
            note: "",
            author: "",
            unless_newest: false,
            newest_at_most: None,
            is_sealed: false,
            keeps_identity: false,
        };
        store.publish().unwrap().commit(version).unwrap();
    }
    (store, bytes)
}

/// Removes the version that needs the whole object, and frees the parts that no other version needs.
pub fn free_parts(store: &LocalDir, bytes: &[u8]) {
    let version = store.resolve(&"debian@1".parse().unwrap()).unwrap();
    assert_eq!(version.manifest, Hash::of(MANIFEST));
    store.remove(&"debian".parse().unwrap(), Some(1)).unwrap();
    assert!(store.trim(&Parts(Hash::of(bytes))).unwrap() > 500_000);
}

/// Stores of two servers, with different holes, and the bytes of their object.
pub fn two_stores() -> ([tempfile::TempDir; 2], Vec<u8>) {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut bytes = Vec::new();
    for (dir, own) in dirs.iter().zip(OWN) {
        let (store, of_this) = with_versions(dir.path(), own);
        free_parts(&store, &of_this);
        bytes = of_this;
    }
    (dirs, bytes)
}

pub fn list_of(dir: &Path, bytes: &[u8]) -> PathBuf {
    dir.join("holes").join(Hash::of(bytes).to_string())
}

/// The holes that a store's directory lists.
pub fn listed(dir: &Path, bytes: &[u8]) -> Holes {
    Holes::decode("there", &fs::read(list_of(dir, bytes)).unwrap(), OBJECT_BYTES as u64).unwrap()
}

/// Replaces the list.
pub fn put_list(dir: &Path, bytes: &[u8], list: &[u8]) {
    fs::write(dir.join("new"), list).unwrap();
    fs::rename(dir.join("new"), list_of(dir, bytes)).unwrap();
}

/// Copies the version that stays to a new store.
pub fn copied(remote: &RemoteStore, bytes: &[u8], to: &Path) -> Copied {
    copied_version("debian@2", remote, bytes, to)
}

/// Copies a version to a store, which may be new.
pub fn copied_version(version: &str, remote: &RemoteStore, bytes: &[u8], to: &Path) -> Copied {
    let target = LocalDir::open(to, Access::Copy { new_chunk_bytes: remote.chunk_bytes() }).unwrap();
    let what = headwater_store::copy::selected(remote, &[version.parse().unwrap()]).unwrap();
    let needs = Parts(Hash::of(bytes));
    headwater_store::copy(remote, &target, &what, &needs, false, &mut |_| Ok(())).unwrap()
}

/// Copies this object alone to a store, which may be new, and returns the holes of the copy.
pub fn holes_of_copy(source: &dyn Object, remote: &RemoteStore, to: &Path) -> Holes {
    let target = LocalDir::open(to, Access::Copy { new_chunk_bytes: remote.chunk_bytes() }).unwrap();
    let mut publication = target.publish().unwrap();
    headwater_store::copy_object(publication.as_mut(), source, &mut |_| Ok(())).unwrap();
    let copy = target.open_object(source.id()).unwrap();
    Holes::clone(&copy.holes().unwrap())
}

/// Checks a copy that has these holes: its hash, and what the versions with these manifests need.
pub fn check_copy(to: &Path, bytes: &[u8], holes: &Holes, versions: &[&[u8]]) {
    let (target, id) = (LocalDir::open(to, Access::Read).unwrap(), Hash::of(bytes));
    let object = target.open_object(id).unwrap();
    assert_eq!(*object.holes().unwrap(), *holes);
    let there = fs::read(to.join("objects").join(id.to_string())).unwrap();
    let mut hashing = ObjectHashing::new(holes, OBJECT_BYTES as u64);
    hashing.update(&there);
    assert_eq!(hashing.finish(), id);
    assert_ne!(Hash::of(&there), id);
    for version in versions {
        let needed = needed_by(version);
        let mut part = vec![0; (needed.end - needed.start) as usize];
        object.read_range(needed.start, &mut part).unwrap();
        assert!(part == bytes[needed.start as usize..needed.end as usize]);
    }
    assert_eq!(target.manifest(Hash::of(KEPT)).unwrap(), KEPT);
}

/// The ranges that are holes on both.
pub fn common(lists: &[Holes; 2]) -> Holes {
    lists[0].common(&lists[1])
}

/// Opens the object as a reader does that found wrong bytes in it before.
pub fn found_wrong(remote: &RemoteStore, bytes: &[u8]) -> Arc<dyn Object> {
    remote.open_object_uncached(Hash::of(bytes)).unwrap()
}
