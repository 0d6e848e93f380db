//! Copies from a store that at first reports too large holes in an object, and copies to a store whose own
//! object is damaged.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_store::copy::{everything, selected};
use headwater_store::{
    Copied, CopyProgress, Hash, Holes, Image, ImageName, ImageReference, LocalDir, Object, Pin, Publication,
    Removed, Store, StoreError, StoreErrorKind, Version, copy, copy_object,
};
use parking_lot::Mutex;

use crate::suite::{kind, name};
use crate::trim::{
    BLOCK, LEFT, Lines, append, bytes, commit, holes, is_whole_but_for_holes, open, path, remove, with_two,
};

/// What an object answers when it is asked for its holes a second time.
type Again = dyn Fn(&dyn Object) -> Result<Arc<Holes>, StoreError> + Send + Sync;

/// A store in which one object reports too large holes at first. So does a store with several servers, if
/// some of them have not answered yet.
struct PartlyAnswered {
    store: LocalDir,
    id: Hash,
    first: Arc<Holes>,
    again: Arc<Again>,
    /// How often that object was asked for its holes a second time.
    asked: Arc<AtomicU64>,
    /// How many of its bytes were read.
    read_bytes: Arc<AtomicU64>,
}

impl PartlyAnswered {
    /// A store with an object of these bytes. At first, what the second version of [`with_two`] does not need
    /// is reported as a hole.
    fn new(store: &LocalDir, bytes: &[u8], again: Arc<Again>) -> Self {
        let (id, first) = (Hash::of(bytes), without_the_first(bytes));
        let (asked, read_bytes) = (Arc::default(), Arc::default());
        Self { store: store.clone(), id, first, again, asked, read_bytes }
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

/// The holes that the object has in another store with the same versions after the first version is removed.
fn without_the_first(bytes: &[u8]) -> Arc<Holes> {
    let dir = tempfile::tempdir().unwrap();
    let (store, theirs, [first, _]) = with_two(dir.path());
    assert!(theirs == bytes);
    remove(&store, &first);
    store.trim(&Lines).unwrap();
    store.open_object(Hash::of(bytes)).unwrap().holes().unwrap()
}

struct PartlyAnsweredObject {
    object: Arc<dyn Object>,
    holes: Mutex<Arc<Holes>>,
    again: Arc<Again>,
    asked: Arc<AtomicU64>,
    read_bytes: Arc<AtomicU64>,
}

impl Object for PartlyAnsweredObject {
    fn id(&self) -> Hash {
        self.object.id()
    }

    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    /// The servers that have answered send zeroes for their holes.
    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.read_bytes.fetch_add(into.len() as u64, Ordering::Relaxed);
        self.object.read_range(offset, into)?;
        let holes = Arc::clone(&self.holes.lock());
        for (at, byte) in (offset..).zip(into) {
            if holes.overlap(&(at..at + 1)) {
                *byte = 0;
            }
        }
        Ok(())
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        Ok(Arc::clone(&self.holes.lock()))
    }

    fn holes_uncached(&self) -> Result<Arc<Holes>, StoreError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let now = (self.again)(self.object.as_ref())?;
        *self.holes.lock() = Arc::clone(&now);
        Ok(now)
    }
}

impl Store for PartlyAnswered {
    fn chunk_bytes(&self) -> u32 {
        self.store.chunk_bytes()
    }

    fn shown(&self) -> String {
        self.store.shown()
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.store.images()
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        self.store.image(name)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.store.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        let object = self.store.open_object(id)?;
        if id != self.id {
            return Ok(object);
        }
        Ok(Arc::new(PartlyAnsweredObject {
            object,
            holes: Mutex::new(Arc::clone(&self.first)),
            again: Arc::clone(&self.again),
            asked: Arc::clone(&self.asked),
            read_bytes: Arc::clone(&self.read_bytes),
        }))
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.store.pin(manifest)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        self.store.publish()
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.store.change(name, change)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.store.remove(name, number)
    }
}

/// Adds a version that needs these blocks of an object.
fn add(store: &LocalDir, bytes: &[u8], blocks: (u64, u64)) -> Version {
    commit(store.publish().unwrap(), Hash::of(bytes), bytes.len() as u64, &[blocks])
}

/// Adds a version with another object, which it needs as a whole.
fn add_other(store: &LocalDir) -> (Version, Vec<u8>) {
    let other = bytes(2, 8 * BLOCK);
    let (publication, id) = append(store, &other);
    (commit(publication, id, other.len() as u64, &[(0, 8)]), other)
}

/// Copies all versions. Also returns the progress reports.
fn copy_all(source: &dyn Store, target: &dyn Store) -> (Copied, Vec<CopyProgress>) {
    let (what, mut reported) = (everything(source).unwrap(), Vec::new());
    let copied = copy(source, target, &what, &Lines, false, &mut |at| {
        assert!(at.done_bytes <= at.total_bytes, "{at:?}");
        reported.push(at);
        Ok(())
    });
    (copied.unwrap(), reported)
}

fn failed(copied: &Copied) -> Vec<u32> {
    copied.failed.iter().map(|failed| failed.number).collect()
}

fn numbers(store: &dyn Store) -> Vec<u32> {
    store.image(&name("a")).unwrap().unwrap().versions.iter().map(|version| version.number).collect()
}

#[test]
fn missing_parts_are_requested_and_copied_once_more() {
    let (dir, target_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (store, bytes, _) = with_two(dir.path());
    add(&store, &bytes, (20, 30));
    let (_, other) = add_other(&store);
    let source = PartlyAnswered::new(&store, &bytes, Arc::new(|object: &dyn Object| object.holes()));
    let target = open(target_dir.path());
    let (copied, reported) = copy_all(&source, &target);
    assert_eq!((copied.versions, failed(&copied)), (4, vec![]), "{copied:?}");
    // The first and the third version need what was copied the second time.
    assert_eq!(source.asked(), 1);
    assert!(holes(&target, &bytes).is_empty() && is_whole_but_for_holes(&target, &bytes));
    assert_eq!(numbers(&target), [1, 2, 3, 4]);
    assert_eq!((copied.objects, copied.bytes), (2, (bytes.len() + other.len()) as u64));
    // The progress went on in both copies.
    assert!(reported.iter().map(|at| at.done_bytes).is_sorted(), "{reported:?}");
    let all_bytes = (2 * bytes.len() + other.len()) as u64;
    let at = reported[reported.len() - 1];
    assert_eq!((at.done_bytes, at.total_bytes), (all_bytes, all_bytes));
}

#[test]
fn parts_missing_at_the_source_stay_holes() {
    let (dir, target_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (store, bytes, [first, _]) = with_two(dir.path());
    add(&store, &bytes, (20, 30));
    add(&store, &bytes, (22, 24));
    remove(&store, &first);
    store.trim(&Lines).unwrap();
    let there: [Range<u64>; 4] = [1..3, 9..20, 30..40, 41..64];
    assert_eq!(holes(&store, &bytes), there);
    let source = PartlyAnswered::new(&store, &bytes, Arc::new(|object: &dyn Object| object.holes()));
    let target = open(target_dir.path());
    let (copied, _) = copy_all(&source, &target);
    assert_eq!((failed(&copied), source.asked()), (vec![], 1), "{copied:?}");
    assert_eq!((numbers(&target), holes(&target, &bytes)), (vec![2, 3, 4], there.to_vec()));
    assert!(is_whole_but_for_holes(&target, &bytes));
}

#[test]
fn an_incomplete_version_fails_alone_after_one_more_request() {
    let (dir, target_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (store, bytes, _) = with_two(dir.path());
    add(&store, &bytes, (20, 30));
    add_other(&store);
    let gone = without_the_first(&bytes);
    let source = PartlyAnswered::new(&store, &bytes, Arc::new(move |_: &dyn Object| Ok(Arc::clone(&gone))));
    let target = open(target_dir.path());
    let (copied, reported) = copy_all(&source, &target);
    assert_eq!((copied.versions, failed(&copied)), (2, vec![1, 3]), "{copied:?}");
    for failed in &copied.failed {
        assert_eq!(failed.error.kind(), StoreErrorKind::Damaged);
        let says = format!("lacks parts of the data object {} that the version needs", Hash::of(&bytes));
        assert!(failed.error.to_string().contains(&says), "{}", failed.error);
    }
    // It was not copied a second time.
    assert_eq!(source.asked(), 1);
    assert_eq!(source.read_bytes.load(Ordering::Relaxed), 8 * BLOCK + 100);
    let at = reported[reported.len() - 1];
    let all_bytes = bytes.len() as u64 + 8 * BLOCK;
    assert_eq!((at.done_bytes, at.total_bytes), (all_bytes, all_bytes));
    assert_eq!((numbers(&target), holes(&target, &bytes)), (vec![2, 4], LEFT.to_vec()));
}

#[test]
fn a_source_failing_on_the_second_request_blocks_only_the_version() {
    for away in [false, true] {
        let (dir, target_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (store, bytes, _) = with_two(dir.path());
        add(&store, &bytes, (20, 30));
        let kind_of = if away { StoreErrorKind::Unreachable } else { StoreErrorKind::Io };
        let fails = move |_: &dyn Object| -> Result<Arc<Holes>, StoreError> {
            Err(StoreError::new(kind_of, "it is refused"))
        };
        let source = PartlyAnswered::new(&store, &bytes, Arc::new(fails));
        let target = open(target_dir.path());
        if away {
            let what = everything(&source).unwrap();
            let ended = copy(&source, &target, &what, &Lines, false, &mut |_| Ok(()));
            assert_eq!(kind(ended), StoreErrorKind::Unreachable);
            continue;
        }
        let (copied, _) = copy_all(&source, &target);
        assert_eq!((failed(&copied), source.asked()), (vec![1, 3], 1), "{copied:?}");
        for failed in &copied.failed {
            assert_eq!(failed.error.to_string(), "it is refused");
        }
        assert_eq!(numbers(&target), [2]);
    }
}

#[test]
fn a_damaged_target_object_blocks_only_its_version() {
    let (dir, target_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (store, bytes, [first, _]) = with_two(dir.path());
    let third = add(&store, &bytes, (50, 60));
    let fourth = add(&store, &bytes, (20, 30));
    let (fifth, other) = add_other(&store);
    let target = open(target_dir.path());
    let copy_them = |numbers: &[u32]| {
        let reference = |number: &u32| format!("a@{number}").parse::<ImageReference>().unwrap();
        let references: Vec<_> = numbers.iter().map(reference).collect();
        let what = selected(&store, &references).unwrap();
        copy(&store, &target, &what, &Lines, false, &mut |_| Ok(())).unwrap()
    };
    // Each of the two stores has something that the other one lacks.
    assert!(copy_them(&[first.number, third.number]).failed.is_empty());
    remove(&target, &first);
    target.trim(&Lines).unwrap();
    remove(&store, &first);
    remove(&store, &third);
    store.trim(&Lines).unwrap();
    assert_eq!(holes(&target, &bytes), [1..50, 60..64]);
    assert_eq!(holes(&store, &bytes), [1..3, 9..20, 30..40, 41..64]);

    let file = file_of(&target_dir, &bytes);
    let at = 55 * BLOCK;
    file.write_all_at(&[bytes[at as usize] ^ 1], at).unwrap();
    let copied = copy_them(&[fourth.number, fifth.number]);
    assert_eq!((copied.versions, failed(&copied)), (1, vec![fourth.number]), "{copied:?}");
    let says = "damaged in the target store";
    assert!(copied.failed[0].error.to_string().contains(says), "{copied:?}");
    assert_eq!(numbers(&target), [third.number, fifth.number]);
    assert!(is_whole_but_for_holes(&target, &other));

    file.write_all_at(&[bytes[at as usize]], at).unwrap();
    // The same if the list of holes is damaged.
    let list = target_dir.path().join("holes").join(Hash::of(&bytes).to_string());
    let good = fs::read(&list).unwrap();
    fs::write(&list, b"nonsense").unwrap();
    let copied = copy_them(&[fourth.number, fifth.number]);
    assert_eq!((copied.present, failed(&copied)), (1, vec![fourth.number]), "{copied:?}");
    assert!(copied.failed[0].error.to_string().contains(says), "{copied:?}");

    fs::write(&list, good).unwrap();
    let copied = copy_them(&[fourth.number, fifth.number]);
    assert_eq!((copied.versions, failed(&copied)), (1, vec![]), "{copied:?}");
    assert_eq!(holes(&target, &bytes), [1..3, 9..20, 30..40, 41..50, 60..64]);
    assert!(is_whole_but_for_holes(&target, &bytes));
}

#[test]
fn a_complete_source_object_repairs_the_target() {
    for has_all in [false, true] {
        let (dir, target_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (store, bytes, [first, _]) = with_two(dir.path());
        let third = add(&store, &bytes, (50, 60));
        let fourth = add(&store, &bytes, (20, 30));
        let fifth = add(&store, &bytes, (51, 52));
        let target = open(target_dir.path());
        let copy_them = |source: &dyn Store, numbers: &[u32]| {
            let reference = |number: &u32| format!("a@{number}").parse::<ImageReference>().unwrap();
            let references: Vec<_> = numbers.iter().map(reference).collect();
            let what = selected(source, &references).unwrap();
            copy(source, &target, &what, &Lines, false, &mut |_| Ok(())).unwrap()
        };
        assert!(copy_them(&store, &[first.number, third.number, fifth.number]).failed.is_empty());
        remove(&target, &first);
        target.trim(&Lines).unwrap();
        // A range that the source does not seem to have at first.
        let at = 55 * BLOCK;
        file_of(&target_dir, &bytes).write_all_at(&[bytes[at as usize] ^ 1], at).unwrap();
        let gone = without_the_first(&bytes);
        let again = move |object: &dyn Object| if has_all { object.holes() } else { Ok(Arc::clone(&gone)) };
        let source = PartlyAnswered::new(&store, &bytes, Arc::new(again));
        let copied = copy_them(&source, &[third.number, fourth.number, fifth.number]);
        // According to its list, the target lacks nothing, so nothing is copied, before the attempt and after
        // it.
        assert_eq!((copied.present, source.asked()), (2, 1), "{copied:?}");
        assert_eq!(is_whole_but_for_holes(&target, &bytes), has_all);
        if has_all {
            assert_eq!((copied.versions, failed(&copied)), (1, vec![]), "{copied:?}");
            assert!(holes(&target, &bytes).is_empty());
        } else {
            assert_eq!((copied.versions, failed(&copied)), (0, vec![fourth.number]), "{copied:?}");
            // All that the source has was read twice: for the copy, and to find out which side is wrong.
            assert_eq!(source.read_bytes.load(Ordering::Relaxed), 2 * (8 * BLOCK + 100));
        }
    }
}

/// An object in which a block is wrong this many times. After each time it is asked for its holes again.
struct WrongAtFirst {
    object: Arc<dyn Object>,
    block: u64,
    times: AtomicU64,
}

impl Object for WrongAtFirst {
    fn id(&self) -> Hash {
        self.object.id()
    }

    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.object.read_range(offset, into)?;
        let at = (self.block * BLOCK).checked_sub(offset).map(|at| at as usize);
        if let Some(byte) =
            at.and_then(|at| into.get_mut(at)).filter(|_| self.times.load(Ordering::Relaxed) > 0)
        {
            *byte ^= 1;
        }
        Ok(())
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        self.object.holes()
    }

    fn was_wrong(&self) -> bool {
        let is_left = |left: u64| left.checked_sub(1);
        self.times.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_left).is_ok()
    }
}

#[test]
fn the_target_is_repaired_after_a_wrong_first_answer() {
    let (dir, target_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (store, bytes, [first, _]) = with_two(dir.path());
    let target = open(target_dir.path());
    assert!(copy_all(&store, &target).0.failed.is_empty());
    remove(&store, &first);
    store.trim(&Lines).unwrap();
    // The source has these blocks, but does not have all blocks that the target has.
    file_of(&target_dir, &bytes).write_all_at(&[bytes[5 * BLOCK as usize] ^ 1], 5 * BLOCK).unwrap();
    let repair = |times: u64| {
        let object = store.open_object(Hash::of(&bytes)).unwrap();
        let source = WrongAtFirst { object, block: 7, times: AtomicU64::new(times) };
        copy_object(target.publish().unwrap().as_mut(), &source, &mut |_| Ok(()))
    };
    // An object that is always wrong is blamed, whatever the target has.
    let object = store.open_object(Hash::of(&bytes)).unwrap();
    let faulty = WrongAtFirst { object, block: 7, times: AtomicU64::new(1) };
    let error = target.publish().unwrap().copy_object(&faulty, &mut |_| Ok(())).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
    assert!(error.to_string().contains("damaged at the source"), "{error}");
    repair(2).unwrap();
    assert!(holes(&target, &bytes).is_empty() && is_whole_but_for_holes(&target, &bytes));
    // A wrong block that only the target has is the target's fault, whatever the source sends.
    file_of(&target_dir, &bytes).write_all_at(&[bytes[50 * BLOCK as usize] ^ 1], 50 * BLOCK).unwrap();
    let error = repair(0).unwrap_err();
    assert!(error.to_string().contains("damaged in the target store"), "{error}");
}

fn file_of(dir: &tempfile::TempDir, bytes: &[u8]) -> fs::File {
    fs::File::options().write(true).open(path(dir.path(), bytes)).unwrap()
}
