//! Holes in the objects of a directory: ranges that no version needs are freed, and needed ranges never are.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex};

use headwater_store::copy::selected;
use headwater_store::{
    Access, Hash, Holes, LocalDir, Needs, NewVersion, Object, ObjectHashing, Patch, Publication, Store,
    StoreError, StoreErrorKind, Version, copy, copy_object,
};
use headwater_testkit::Rng;

use crate::suite::{files, kind, name};

pub(crate) const BLOCK: u64 = 4096;

/// What a manifest of these tests says. Each line has an object, its length, and a needed range.
pub(crate) struct Lines;

impl Lines {
    fn read(manifest: &[u8]) -> Vec<(Hash, u64, Range<u64>)> {
        let line = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| words[at].parse().unwrap();
            (words[0].parse().unwrap(), number(1), number(2)..number(3))
        };
        std::str::from_utf8(manifest).unwrap().lines().map(line).collect()
    }
}

impl Needs for Lines {
    fn objects(&self, manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        let mut objects: Vec<_> = Self::read(manifest).into_iter().map(|(id, len, _)| (id, len)).collect();
        objects.dedup();
        Ok(objects)
    }

    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        Self::read(manifest).into_iter().for_each(|(id, _, stretch)| needed(id, stretch));
        Ok(())
    }
}

pub(crate) fn open(dir: &Path) -> LocalDir {
    LocalDir::open(dir, Access::WRITE).unwrap()
}

pub(crate) fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

pub(crate) fn append(store: &LocalDir, bytes: &[u8]) -> (Box<dyn Publication>, Hash) {
    let mut publication = store.publish().unwrap();
    publication.append(bytes).unwrap();
    let (id, _) = publication.finish_object().unwrap().unwrap();
    (publication, id)
}

/// Adds a version that needs these ranges, in blocks, of an object of this length.
pub(crate) fn commit(
    publication: Box<dyn Publication>,
    id: Hash,
    len: u64,
    blocks: &[(u64, u64)],
) -> Version {
    let line = |(from, to): &(u64, u64)| format!("{id} {len} {} {}\n", from * BLOCK, (to * BLOCK).min(len));
    let manifest: String = blocks.iter().map(line).collect();
    let image = name("a");
    let new = NewVersion {
        name: &image,
        manifest: manifest.as_bytes(),
        objects: &[id],
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
    publication.commit(new).unwrap().version
}

pub(crate) fn remove(store: &LocalDir, version: &Version) {
    store.remove(&name("a"), Some(version.number)).unwrap();
}

/// A store with an object of 64 blocks and a few bytes. Its first version needs all of it, and its second
/// version blocks 3 to 9 and 40.
pub(crate) fn with_two(dir: &Path) -> (LocalDir, Vec<u8>, [Version; 2]) {
    let store = open(dir);
    let bytes = bytes(1, 64 * BLOCK + 100);
    let (publication, id) = append(&store, &bytes);
    let first = commit(publication, id, bytes.len() as u64, &[(0, 65)]);
    let second = commit(store.publish().unwrap(), id, bytes.len() as u64, &[(3, 9), (40, 41)]);
    (store, bytes, [first, second])
}

pub(crate) fn holes(store: &dyn Store, bytes: &[u8]) -> Vec<Range<u64>> {
    let holes = store.open_object(Hash::of(bytes)).unwrap().holes().unwrap().stretches();
    holes.into_iter().map(|hole| hole.start / BLOCK..hole.end / BLOCK).collect()
}

/// Whether an object has its hash, has all bytes outside of its holes, and has zeroes in its holes.
pub(crate) fn is_whole_but_for_holes(store: &dyn Store, bytes: &[u8]) -> bool {
    let object = store.open_object(Hash::of(bytes)).unwrap();
    let mut found = vec![0; bytes.len()];
    object.read_range(0, &mut found).unwrap();
    let holes = object.holes().unwrap();
    let mut hashing = ObjectHashing::new(&holes, bytes.len() as u64);
    hashing.update(&found);
    let mut expected = bytes.to_vec();
    holes.stretches().into_iter().for_each(|it| expected[it.start as usize..it.end as usize].fill(0));
    found == expected && hashing.finish() == Hash::of(bytes)
}

pub(crate) fn path(dir: &Path, bytes: &[u8]) -> std::path::PathBuf {
    dir.join("objects").join(Hash::of(bytes).to_string())
}

fn blocks_of(dir: &Path, bytes: &[u8]) -> u64 {
    let file = fs::File::open(path(dir, bytes)).unwrap();
    file.sync_all().unwrap();
    file.metadata().unwrap().blocks() * 512 / BLOCK
}

pub(crate) const LEFT: [Range<u64>; 3] = [1..3, 9..40, 41..64];

#[test]
fn trimmed_objects_keep_their_hash() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, second]) = with_two(dir.path());
    assert_eq!((store.trim(&Lines).unwrap(), blocks_of(dir.path(), &bytes)), (0, 65));
    assert_eq!(fs::read(dir.path().join("store")).unwrap()[8], 1);
    remove(&store, &first);
    assert_eq!(holes(&store, &bytes), []);
    assert_eq!(store.trim(&Lines).unwrap(), 56 * BLOCK);
    assert_eq!((holes(&store, &bytes), blocks_of(dir.path(), &bytes)), (LEFT.to_vec(), 9));
    assert!(is_whole_but_for_holes(&store, &bytes));
    // Releases that do not know holes refuse the store.
    assert_eq!(fs::read(dir.path().join("store")).unwrap()[8], 2);
    assert!(!dir.path().join("trim").exists());
    // No more space can be freed, and other processes see the same.
    let before = files(dir.path());
    assert_eq!(store.trim(&Lines).unwrap(), 0);
    drop(store);
    let reader = LocalDir::open(dir.path(), Access::Read).unwrap();
    assert!(is_whole_but_for_holes(&reader, &bytes) && reader.trim(&Lines).unwrap() == 0);
    let store = open(dir.path());
    assert_eq!((store.trim(&Lines).unwrap(), files(dir.path()) == before), (0, true));
    // A third version needs less. The list is removed with the object.
    let id = Hash::of(&bytes);
    let third = commit(store.publish().unwrap(), id, bytes.len() as u64, &[(40, 41)]);
    remove(&store, &second);
    assert_eq!(store.trim(&Lines).unwrap(), 6 * BLOCK);
    assert_eq!(holes(&store, &bytes), [1..40, 41..64]);
    assert!(is_whole_but_for_holes(&store, &bytes));
    let removed = store.remove(&name("a"), Some(third.number)).unwrap();
    assert!(removed.freed_bytes < 20 * BLOCK, "{removed:?}");
    assert!(fs::read_dir(dir.path().join("holes")).unwrap().next().is_none());
}

#[test]
fn nothing_is_trimmed_during_a_publication_or_a_use() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, _]) = with_two(dir.path());
    let id = Hash::of(&bytes);
    let publication = store.publish().unwrap();
    remove(&store, &first);
    assert_eq!(store.trim(&Lines).unwrap(), 0);
    // It needs more than the remaining versions.
    commit(publication, id, bytes.len() as u64, &[(50, 60)]);
    assert_eq!(store.trim(&Lines).unwrap(), (56 - 10) * BLOCK);
    assert_eq!(holes(&store, &bytes), [1..3, 9..40, 41..50, 60..64]);
    // A version that another process reads keeps everything, though no list of versions names it.
    let next = commit(store.publish().unwrap(), id, bytes.len() as u64, &[(4, 5)]);
    let manifest = dir.path().join("manifests").join(next.manifest.to_string());
    let copy = fs::read(&manifest).unwrap();
    remove(&store, &next);
    fs::write(&manifest, copy).unwrap();
    let reader = LocalDir::open(dir.path(), Access::Read).unwrap();
    let pin = reader.pin(next.manifest).unwrap();
    drop(store);
    let store = open(dir.path());
    store.remove(&name("a"), Some(2)).unwrap();
    assert_eq!(store.trim(&Lines).unwrap(), 0);
    drop(pin);
    store.reclaim_left().unwrap();
    assert_eq!(store.trim(&Lines).unwrap(), 7 * BLOCK);
    assert_eq!(holes(&store, &bytes), [1..50, 60..64]);
}

/// While the needs of the versions are determined, one more version is published, or is begun.
struct Racing<'a> {
    race: &'a (dyn Fn() + Sync),
}

impl Needs for Racing<'_> {
    fn objects(&self, manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        Lines.objects(manifest)
    }

    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        (self.race)();
        Lines.stretches(manifest, needed)
    }
}

#[test]
fn a_version_published_during_a_trim_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, _]) = with_two(dir.path());
    let (id, len) = (Hash::of(&bytes), bytes.len() as u64);
    remove(&store, &first);
    let begun = Mutex::new(Vec::new());
    let begin = || begun.lock().unwrap().push(store.publish().unwrap());
    assert_eq!(store.trim(&Racing { race: &begin }).unwrap(), 0);
    assert_eq!(holes(&store, &bytes), []);
    begun.lock().unwrap().clear();
    let third = Mutex::new(None);
    let come = || {
        third.lock().unwrap().get_or_insert_with(|| commit(store.publish().unwrap(), id, len, &[(20, 30)]));
    };
    assert_eq!(store.trim(&Racing { race: &come }).unwrap(), 0);
    assert_eq!(holes(&store, &bytes), []);
    assert_eq!(store.trim(&Lines).unwrap(), (56 - 10) * BLOCK);
    assert!(is_whole_but_for_holes(&store, &bytes));
    // A version that is removed meanwhile is another reason to determine them again.
    let go = || {
        if let Some(third) = third.lock().unwrap().take() {
            remove(&store, &third);
        }
    };
    let fourth = commit(store.publish().unwrap(), id, len, &[(4, 5)]);
    remove(&store, &fourth);
    store.trim(&Racing { race: &go }).unwrap();
    assert_eq!(store.trim(&Lines).unwrap(), 10 * BLOCK);
    assert_eq!((holes(&store, &bytes), store.trim(&Lines).unwrap()), (LEFT.to_vec(), 0));
}

#[test]
fn no_trim_continues_during_a_publication() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, _]) = with_two(dir.path());
    remove(&store, &first);
    store.trim(&Lines).unwrap();
    drop(store);
    // The list is complete, and the object is being written again.
    fs::write(dir.path().join("trim"), format!("{}\n", Hash::of(&bytes))).unwrap();
    fs::write(path(dir.path(), &bytes), &bytes).unwrap();
    let store = open(dir.path());
    let begun = Mutex::new(Vec::new());
    let begin = || begun.lock().unwrap().push(store.publish().unwrap());
    store.trim(&Racing { race: &begin }).unwrap();
    assert_eq!(blocks_of(dir.path(), &bytes), 65);
    begun.lock().unwrap().clear();
    store.trim(&Lines).unwrap();
    assert_eq!(blocks_of(dir.path(), &bytes), 9);
}

#[test]
fn the_next_process_continues_an_interrupted_trim() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, _]) = with_two(dir.path());
    // The process died before it freed anything.
    remove(&store, &first);
    drop(store);
    let note = fs::read(dir.path().join("trim")).unwrap();
    assert_eq!(note, format!("{}\n", Hash::of(&bytes)).as_bytes());
    let store = open(dir.path());
    assert_eq!((store.trim(&Lines).unwrap(), blocks_of(dir.path(), &bytes)), (56 * BLOCK, 9));
    drop(store);
    // The process died after the list was written.
    fs::write(dir.path().join("trim"), note).unwrap();
    fs::write(path(dir.path(), &bytes), &bytes).unwrap();
    assert_eq!(blocks_of(dir.path(), &bytes), 65);
    let store = open(dir.path());
    store.trim(&Lines).unwrap();
    assert!(blocks_of(dir.path(), &bytes) == 9 && is_whole_but_for_holes(&store, &bytes));
    assert!(!dir.path().join("trim").exists());
    drop(store);
    // A note that cannot be read is ignored.
    fs::write(dir.path().join("trim"), b"\xff\nnonsense\n").unwrap();
    assert_eq!(open(dir.path()).trim(&Lines).unwrap(), 0);
}

#[test]
fn writing_the_same_object_again_makes_it_whole() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, _]) = with_two(dir.path());
    remove(&store, &first);
    store.trim(&Lines).unwrap();
    let (publication, id) = append(&store, &bytes);
    assert_eq!((holes(&store, &bytes), blocks_of(dir.path(), &bytes)), (vec![], 65));
    let again = commit(publication, id, bytes.len() as u64, &[(0, 65)]);
    assert!(is_whole_but_for_holes(&store, &bytes));
    remove(&store, &again);
    assert_eq!(store.trim(&Lines).unwrap(), 56 * BLOCK);
}

/// Copies one version, and returns what could not be copied.
fn copy_one(source: &dyn Store, target: &dyn Store, number: u32) -> Vec<StoreError> {
    let what = selected(source, &[format!("a@{number}").parse().unwrap()]).unwrap();
    let copied = copy(source, target, &what, &Lines, false, &mut |_| Ok(())).unwrap();
    copied.failed.into_iter().map(|failed| failed.error).collect()
}

#[test]
fn a_copy_has_the_same_holes_until_versions_need_more() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, second]) = with_two(dir.path());
    let whole = tempfile::tempdir().unwrap();
    let with_all = open(whole.path());
    assert!(copy_one(&store, &with_all, first.number).is_empty());
    remove(&store, &first);
    store.trim(&Lines).unwrap();

    let elsewhere = tempfile::tempdir().unwrap();
    let target = open(elsewhere.path());
    assert!(copy_one(&store, &target, second.number).is_empty());
    assert_eq!((holes(&target, &bytes), blocks_of(elsewhere.path(), &bytes)), (LEFT.to_vec(), 9));
    assert!(is_whole_but_for_holes(&target, &bytes));
    assert_eq!(fs::read(elsewhere.path().join("store")).unwrap()[8], 2);
    // Again: nothing is missing.
    let before = files(elsewhere.path());
    assert!(copy_one(&store, &target, second.number).is_empty());
    assert_eq!(files(elsewhere.path()), before);
    // The target does not know whether its object is whole, so the object is copied again.
    assert!(copy_one(&with_all, &target, first.number).is_empty());
    assert_eq!((holes(&target, &bytes), blocks_of(elsewhere.path(), &bytes)), (vec![], 65));
    assert!(is_whole_but_for_holes(&target, &bytes));
    // In the other direction: an object with holes replaces no bytes of a whole one.
    let object = store.open_object(Hash::of(&bytes)).unwrap();
    copy_object(target.publish().unwrap().as_mut(), object.as_ref(), &mut |_| Ok(())).unwrap();
    assert_eq!(holes(&target, &bytes), []);
    assert!(is_whole_but_for_holes(&target, &bytes));
}

#[test]
fn stores_with_different_parts_complete_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let (one, bytes, [first, second]) = with_two(dir.path());
    let elsewhere = tempfile::tempdir().unwrap();
    let two = open(elsewhere.path());
    assert!(copy_one(&one, &two, first.number).is_empty());
    let id = Hash::of(&bytes);
    let third = commit(two.publish().unwrap(), id, bytes.len() as u64, &[(20, 30)]);
    assert_ne!(third.number, second.number + 1);
    remove(&one, &first);
    remove(&two, &first);
    one.trim(&Lines).unwrap();
    two.trim(&Lines).unwrap();
    // One of the two stores uses the number already.
    let listed = Version { number: 9, ..third };
    let mut publication = one.publish().unwrap();
    let object = two.open_object(id).unwrap();
    publication.copy_object(object.as_ref(), &mut |_| Ok(())).unwrap();
    let manifest = two.manifest(listed.manifest).unwrap();
    publication.adopt(&name("a"), &listed, &manifest).unwrap().unwrap();
    assert_eq!(holes(&one, &bytes), [1..3, 9..20, 30..40, 41..64]);
    assert!(is_whole_but_for_holes(&one, &bytes));
}

/// An object of another store. While it is read, a function is called.
struct Meanwhile<F: Fn()>(Arc<dyn Object>, F);

impl<F: Fn() + Send + Sync> Object for Meanwhile<F> {
    fn id(&self) -> Hash {
        self.0.id()
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        self.0.holes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.0.read_range(offset, into)?;
        (self.1)();
        Ok(())
    }
}

#[test]
fn a_copy_uses_nothing_of_a_simultaneous_one() {
    let dir = tempfile::tempdir().unwrap();
    let (one, bytes, [first, _]) = with_two(dir.path());
    let elsewhere = tempfile::tempdir().unwrap();
    let (whole, ..) = with_two(elsewhere.path());
    remove(&one, &first);
    one.trim(&Lines).unwrap();
    let id = Hash::of(&bytes);
    for is_there in [false, true] {
        let target_dir = tempfile::tempdir().unwrap();
        let target = open(target_dir.path());
        if is_there {
            assert!(copy_one(&one, &target, 2).is_empty());
        }
        let copy_whole = || {
            let object = whole.open_object(id).unwrap();
            copy_object(target.publish().unwrap().as_mut(), object.as_ref(), &mut |_| Ok(())).unwrap();
        };
        // The same with another copy of another version, or with an import of the object.
        let import = || drop(append(&target, &bytes));
        let ways: [&(dyn Fn() + Sync); 2] = [&copy_whole, &import];
        for way in ways {
            let object = Meanwhile(one.open_object(id).unwrap(), way);
            let mut publication = target.publish().unwrap();
            copy_object(publication.as_mut(), &object, &mut |_| Ok(())).unwrap();
            assert_eq!(holes(&target, &bytes), []);
            assert!(is_whole_but_for_holes(&target, &bytes));
            assert!(fs::read_dir(target_dir.path().join("tmp")).unwrap().next().is_none());
        }
    }
    // Each of the two stores has something that the other one lacks.
    let other_dir = tempfile::tempdir().unwrap();
    let other = open(other_dir.path());
    assert!(copy_one(&whole, &other, 1).is_empty());
    let third = commit(other.publish().unwrap(), id, bytes.len() as u64, &[(20, 30)]);
    assert_ne!(third.number, 1);
    other.remove(&name("a"), Some(1)).unwrap();
    other.trim(&Lines).unwrap();
    let target_dir = tempfile::tempdir().unwrap();
    let target = open(target_dir.path());
    let copy_other = || {
        let object = other.open_object(id).unwrap();
        copy_object(target.publish().unwrap().as_mut(), object.as_ref(), &mut |_| Ok(())).unwrap();
    };
    let object = Meanwhile(one.open_object(id).unwrap(), copy_other);
    let mut reported = 0;
    let mut publication = target.publish().unwrap();
    copy_object(publication.as_mut(), &object, &mut |bytes| {
        reported = bytes;
        Ok(())
    })
    .unwrap();
    assert_eq!((reported, holes(&target, &bytes)), (bytes.len() as u64, vec![1..3, 9..20, 30..40, 41..64]));
    assert!(is_whole_but_for_holes(&target, &bytes));
}

#[test]
fn a_damaged_store_blames_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let (one, bytes, [first, _]) = with_two(dir.path());
    remove(&one, &first);
    one.trim(&Lines).unwrap();
    let object = one.open_object(Hash::of(&bytes)).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let (whole, ..) = with_two(elsewhere.path());
    let fails = || {
        let mut publication = whole.publish().unwrap();
        let error = copy_object(publication.as_mut(), object.as_ref(), &mut |_| Ok(())).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Io, "{error}");
        assert!(error.to_string().contains("damaged in the target store"), "{error}");
    };
    let file = fs::File::options().write(true).open(path(elsewhere.path(), &bytes)).unwrap();
    file.write_all_at(&[bytes[20 * BLOCK as usize] ^ 1], 20 * BLOCK).unwrap();
    fails();
    file.write_all_at(&[bytes[20 * BLOCK as usize]], 20 * BLOCK).unwrap();
    let list = elsewhere.path().join("holes").join(Hash::of(&bytes).to_string());
    fs::write(&list, b"nonsense").unwrap();
    fails();
    fs::remove_file(&list).unwrap();
    copy_object(whole.publish().unwrap().as_mut(), object.as_ref(), &mut |_| Ok(())).unwrap();
    assert!(holes(&whole, &bytes).is_empty() && is_whole_but_for_holes(&whole, &bytes));
}

#[test]
fn an_object_that_cannot_be_trimmed_blocks_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let (store, one, [first, _]) = with_two(dir.path());
    let two = bytes(2, 64 * BLOCK);
    let (publication, id) = append(&store, &two);
    let third = commit(publication, id, two.len() as u64, &[(0, 64)]);
    commit(store.publish().unwrap(), id, two.len() as u64, &[(2, 3)]);
    let list = dir.path().join("holes").join(Hash::of(&one).to_string());
    fs::write(&list, b"nonsense").unwrap();
    remove(&store, &first);
    remove(&store, &third);
    assert_eq!(store.trim(&Lines).unwrap(), 62 * BLOCK);
    assert_eq!(holes(&store, &two), [1..2, 3..64]);
    // The object is noted. It is tried again at the next removal, or by the next process.
    let note = fs::read_to_string(dir.path().join("trim")).unwrap();
    assert_eq!(note, format!("{}\n", Hash::of(&one)));
    assert_eq!(store.trim(&Lines).unwrap(), 0);
    fs::remove_file(&list).unwrap();
    drop(store);
    let store = open(dir.path());
    assert_eq!((store.trim(&Lines).unwrap(), holes(&store, &one)), (56 * BLOCK, LEFT.to_vec()));
}

#[test]
fn needed_parts_in_a_hole_list_are_not_punched_again() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, _]) = with_two(dir.path());
    remove(&store, &first);
    store.trim(&Lines).unwrap();
    let list = dir.path().join("holes").join(Hash::of(&bytes).to_string());
    let old = fs::read(&list).unwrap();
    // The object was restored, and the process died before it removed the list. By now a version needs the
    // object.
    let (publication, id) = append(&store, &bytes);
    commit(publication, id, bytes.len() as u64, &[(20, 24)]);
    drop(store);
    fs::write(&list, old).unwrap();
    fs::write(dir.path().join("trim"), format!("{id}\n")).unwrap();
    let store = open(dir.path());
    assert_eq!(store.trim(&Lines).unwrap(), 0);
    let mut there = vec![0; 4 * BLOCK as usize];
    store.open_object(id).unwrap().read_range(20 * BLOCK, &mut there).unwrap();
    assert_eq!(there, bytes[20 * BLOCK as usize..24 * BLOCK as usize]);
    assert!(blocks_of(dir.path(), &bytes) < 65);
}

#[test]
fn a_source_that_lacks_needed_parts_is_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, _]) = with_two(dir.path());
    // Its list of holes is that of another store, which did not have this version.
    let elsewhere = tempfile::tempdir().unwrap();
    let (other, _, [other_first, _]) = with_two(elsewhere.path());
    remove(&other, &other_first);
    other.trim(&Lines).unwrap();
    let list = Path::new("holes").join(Hash::of(&bytes).to_string());
    fs::copy(elsewhere.path().join(&list), dir.path().join(&list)).unwrap();
    let target_dir = tempfile::tempdir().unwrap();
    let target = open(target_dir.path());
    let failed = copy_one(&store, &target, first.number);
    assert_eq!(failed.len(), 1);
    assert!(failed[0].kind() == StoreErrorKind::Damaged && failed[0].to_string().contains("lacks parts of"));
    assert!(target.image(&name("a")).unwrap().is_none());
    assert!(copy_one(&store, &target, 2).is_empty());
}

#[test]
fn repairs_skip_holes_and_fix_existing_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, _]) = with_two(dir.path());
    remove(&store, &first);
    store.trim(&Lines).unwrap();
    let id = Hash::of(&bytes);
    let patch =
        |at: u64, len: u64| Patch { offset: at, bytes: bytes[at as usize..][..len as usize].to_vec() };
    let flip = |at: u64| {
        let file = fs::File::options().read(true).write(true).open(path(dir.path(), &bytes)).unwrap();
        file.write_all_at(&[bytes[at as usize] ^ 1], at).unwrap();
    };
    flip(5 * BLOCK);
    assert!(!is_whole_but_for_holes(&store, &bytes));
    store.repair_object(id, &[patch(5 * BLOCK - 7, 100)]).unwrap();
    assert!(is_whole_but_for_holes(&store, &bytes));
    for (at, len) in [(9 * BLOCK - 1, 2), (20 * BLOCK, 1), (40 * BLOCK - 1, 2)] {
        let refused = store.repair_object(id, &[patch(at, len)]);
        assert_eq!(kind(refused), StoreErrorKind::Damaged, "{at}");
    }
    assert!(is_whole_but_for_holes(&store, &bytes));
    // From a store with the whole object, the whole object is copied, and it has no holes any more.
    flip(5 * BLOCK);
    let elsewhere = tempfile::tempdir().unwrap();
    let (other, ..) = with_two(elsewhere.path());
    let object = other.open_object(id).unwrap();
    copy_object(store.publish().unwrap().as_mut(), object.as_ref(), &mut |_| Ok(())).unwrap();
    assert!(holes(&store, &bytes).is_empty() && is_whole_but_for_holes(&store, &bytes));
}

#[test]
fn a_damaged_hole_list_is_reported_and_affects_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, second]) = with_two(dir.path());
    remove(&store, &first);
    store.trim(&Lines).unwrap();
    let id = Hash::of(&bytes);
    let list = dir.path().join("holes").join(id.to_string());
    let good = fs::read(&list).unwrap();
    let mut bad = good.clone();
    bad[40] ^= 1;
    fs::write(&list, &bad).unwrap();
    let object = store.open_object(id).unwrap();
    let error = object.holes().unwrap_err();
    assert!(
        error.kind() == StoreErrorKind::Damaged && error.to_string().contains("list of holes"),
        "{error}"
    );
    // The needed bytes can be read, no more space is freed, and unknown bytes are not copied.
    let mut block = vec![0; BLOCK as usize];
    object.read_range(4 * BLOCK, &mut block).unwrap();
    assert_eq!(block, bytes[4 * BLOCK as usize..][..BLOCK as usize]);
    let elsewhere = tempfile::tempdir().unwrap();
    let target = open(elsewhere.path());
    assert_eq!(copy_one(&store, &target, second.number)[0].kind(), StoreErrorKind::Damaged);
    let third = commit(store.publish().unwrap(), id, bytes.len() as u64, &[(40, 41)]);
    remove(&store, &second);
    assert_eq!((store.trim(&Lines).unwrap(), blocks_of(dir.path(), &bytes)), (0, 9));
    assert_eq!(fs::read(&list).unwrap(), bad);
    // A store with the whole object repairs it.
    let (other, ..) = with_two(elsewhere.path().join("other").as_path());
    let object = other.open_object(id).unwrap();
    copy_object(store.publish().unwrap().as_mut(), object.as_ref(), &mut |_| Ok(())).unwrap();
    assert!(!list.exists() && is_whole_but_for_holes(&store, &bytes));
    remove(&store, &third);
}

#[test]
fn an_object_whose_needs_are_not_known_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (store, bytes, [first, second]) = with_two(dir.path());
    let manifest = dir.path().join("manifests").join(second.manifest.to_string());
    let good = fs::read(&manifest).unwrap();
    fs::write(&manifest, &good[1..]).unwrap();
    remove(&store, &first);
    assert_eq!((store.trim(&Lines).unwrap(), holes(&store, &bytes)), (0, vec![]));
    // The object is noted, and its needs are determined at the next removal.
    assert!(dir.path().join("trim").exists());
    fs::write(&manifest, good).unwrap();
    let third = commit(store.publish().unwrap(), Hash::of(&bytes), bytes.len() as u64, &[(40, 41)]);
    remove(&store, &third);
    assert_eq!(store.trim(&Lines).unwrap(), 56 * BLOCK);
}
