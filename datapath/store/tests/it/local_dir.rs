//! The directory store: the suite of all stores, and tests of what only a directory has, such as its single
//! writer and orphaned files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::suite::{Place, files, kind, name, publish};
use headwater_store::{Access, Hash, LocalDir, Object, Store, StoreError, StoreErrorKind};
use headwater_testkit::wait_until;

struct Directory(PathBuf);

impl Place for Directory {
    fn open(&self, access: Access) -> Result<Arc<dyn Store>, StoreError> {
        Ok(Arc::new(LocalDir::open(&self.0, access)?))
    }

    fn dir(&self) -> &Path {
        &self.0
    }
}

fn with_place(test: impl FnOnce(&dyn Place)) {
    let dir = tempfile::tempdir().unwrap();
    test(&Directory(dir.path().to_owned()));
}

fn writable(dir: &Path) -> LocalDir {
    LocalDir::open(dir, Access::WRITE).unwrap()
}

store_suite!(with_place);

#[test]
fn orphans_of_a_crash_are_deleted_when_a_writer_opens() {
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
fn a_tree_or_trace_that_cannot_be_removed_blocks_no_other() {
    let dir = tempfile::tempdir().unwrap();
    drop(writable(dir.path()));
    let left = |sub: &str| {
        let entries = fs::read_dir(dir.path().join(sub)).unwrap();
        entries.filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_file()).count()
    };
    for sub in ["trees", "traces"] {
        let names = (0u8..20).map(|number| dir.path().join(sub).join(Hash::of(&[number]).to_string()));
        for (number, path) in names.enumerate() {
            // This is not a file, so it is not removed as one. The system lists entries in any order.
            let made = if number % 5 == 0 { fs::create_dir(path) } else { fs::write(path, b"advice") };
            made.unwrap();
        }
    }
    assert_eq!((left("trees"), left("traces")), (16, 16));
    writable(dir.path());
    assert_eq!((left("trees"), left("traces")), (0, 0));
}

#[test]
fn a_removal_succeeds_although_its_space_is_freed_later() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    publish(&store, "a", b"object", &[], b"m").unwrap();
    // It has the name of an object, but it is a directory and so is not removed.
    let in_the_way = dir.path().join("objects").join(Hash::of(b"in the way").to_string());
    fs::create_dir(&in_the_way).unwrap();
    let removed = store.remove(&name("a"), Some(1)).unwrap();
    assert_eq!(removed.versions, [1]);
    assert!(store.image(&name("a")).unwrap().unwrap().versions.is_empty());
    store.reclaim_left().unwrap_err();
    fs::remove_dir(&in_the_way).unwrap();
    store.reclaim_left().unwrap();
    let left: Vec<_> = fs::read_dir(dir.path().join("objects")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn no_orphans_are_deleted_while_a_list_of_versions_is_unreadable() {
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
fn a_damaged_list_of_versions_hides_no_other_image() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    for name in ["a", "b", "c"] {
        publish(&store, name, b"object", &[], b"m").unwrap();
    }
    fs::write(dir.path().join("images/b"), b"nonsense").unwrap();
    let listed = store.listed().unwrap();
    let names: Vec<_> = listed.images.iter().map(|image| image.name.to_string()).collect();
    let [(bad, why)] = &listed.unreadable[..] else { panic!("{:?}", listed.unreadable) };
    assert_eq!((names, bad.to_string()), (vec!["a".to_owned(), "c".to_owned()], "b".to_owned()));
    assert!(why.to_string().contains("'b'"), "{why}");
}

#[test]
fn unreadable_sectors_count_as_damage() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    let version = publish(&store, "a", b"object", &[], b"m").unwrap();
    let path = dir.path().join("objects").join(version.objects[0].to_string());
    fs::remove_file(&path).unwrap();
    // Reading its first bytes is an I/O error: nothing is mapped there.
    std::os::unix::fs::symlink("/proc/self/mem", &path).unwrap();
    let error = store.open_object(version.objects[0]).unwrap().read_range(0, &mut [0; 6]).unwrap_err();
    assert_eq!(error.os_error().and_then(std::io::Error::raw_os_error), Some(5), "{error}");
    assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
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
fn an_interrupted_creation_is_finished_with_the_same_chunk_size() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("images")).unwrap();
    let store = LocalDir::open(dir.path(), Access::Write { new_chunk_bytes: 8192 }).unwrap();
    assert_eq!(store.chunk_bytes(), 8192);
    drop(store);
    assert_eq!(writable(dir.path()).chunk_bytes(), 8192);

    let mut settings = fs::read(dir.path().join("store")).unwrap();
    settings[8] = 3;
    fs::write(dir.path().join("store"), settings).unwrap();
    let error = LocalDir::open(dir.path(), Access::Read).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::UnknownFormat);
    assert!(error.to_string().contains("format 3"), "{error}");
}

#[test]
fn readers_can_save_a_boot_trace_and_it_is_removed_with_its_version() {
    let dir = tempfile::tempdir().unwrap();
    let store = writable(dir.path());
    let version = publish(&store, "debian", b"object", &[], b"manifest").unwrap();
    // A store of an earlier release looks like this.
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

#[test]
fn a_directory_that_is_not_a_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(kind(LocalDir::open(dir.path(), Access::Read)), StoreErrorKind::NotFound);
    assert_eq!(
        kind(LocalDir::open(dir.path(), Access::Write { new_chunk_bytes: 5000 })),
        StoreErrorKind::Invalid
    );
    fs::write(dir.path().join("holiday.jpg"), b"").unwrap();
    let error = LocalDir::open(dir.path(), Access::WRITE).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
    assert!(error.to_string().contains("holiday.jpg"), "{error}");
    assert!(!dir.path().join("objects").exists());
    for access in [Access::Read, Access::WRITE] {
        let error = LocalDir::open(&dir.path().join("holiday.jpg"), access).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Invalid);
        assert!(error.to_string().contains("holiday.jpg as a store: it is a file"), "{error}");
    }
}

#[test]
fn a_directory_of_another_program_is_not_used() {
    let object = format!("objects/{}", Hash::of(b"of another program"));
    for file in [object.as_str(), "tmp/report.txt", "tmp/store", "images/a", "traces/a", "lock", "spare"] {
        let dir = tempfile::tempdir().unwrap();
        // A repository with Git LFS looks like this.
        for folder in ["objects", "tmp"] {
            fs::create_dir(dir.path().join(folder)).unwrap();
        }
        let path = dir.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"of another program").unwrap();
        let names = || {
            let entries = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
            entries.collect::<std::collections::BTreeSet<_>>()
        };
        let before = names();
        for access in [Access::WRITE, Access::Copy { new_chunk_bytes: 65_536 }] {
            let error = LocalDir::open(dir.path(), access).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains(file), "{error}");
        }
        assert_eq!(fs::read(&path).unwrap(), b"of another program");
        assert_eq!(names(), before);
    }
}

#[test]
fn a_pin_waits_for_a_removal_that_may_fail() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    let version = publish(&store, "a", b"object", &[], b"m").unwrap();
    // A removal has the manifest open like this, and then finds another version of the image in use.
    let manifest = dir.path().join("manifests").join(version.manifest.to_string());
    let removal = std::fs::File::open(&manifest).unwrap();
    removal.try_lock().unwrap();
    std::thread::scope(|scope| {
        let pinning = scope.spawn(|| store.pin(version.manifest));
        // The pin also has the manifest open, and checks again and again.
        wait_until("the pin waits", || {
            assert!(!pinning.is_finished(), "it does not wait for the removal");
            let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
            open.filter(|file| fs::read_link(file.path()).is_ok_and(|path| path == manifest)).count() == 2
        });
        drop(removal);
        pinning.join().unwrap().unwrap();
    });
}

#[test]
fn an_object_copied_twice_at_once_is_correct() {
    let (elsewhere, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = writable(elsewhere.path());
    let bytes: Vec<u8> = (0..700_000u32).flat_map(u32::to_le_bytes).collect();
    let id = publish(&source, "a", &bytes, &[], b"m").unwrap().objects[0];
    let object = source.open_object(id).unwrap();
    let store = writable(dir.path());
    let (mut first, mut second) = (store.publish().unwrap(), store.publish().unwrap());
    let mut calls = 0;
    // When the first copy has one piece, the second copy is made from beginning to end.
    let copied = &mut |_| {
        calls += 1;
        if calls == 2 {
            second.copy_object(object.as_ref(), &mut |_| Ok(()))?;
        }
        Ok(())
    };
    first.copy_object(object.as_ref(), copied).unwrap();
    assert!(calls > 2);
    assert!(fs::read(dir.path().join("objects").join(id.to_string())).unwrap() == bytes);
    assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
}

#[test]
fn only_the_next_copy_uses_the_part_of_a_failed_copy() {
    let (elsewhere, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = writable(elsewhere.path());
    let bytes: Vec<u8> = (0..700_000u32).flat_map(u32::to_le_bytes).collect();
    let id = publish(&source, "a", &bytes, &[], b"m").unwrap().objects[0];
    let object = source.open_object(id).unwrap();
    let part = dir.path().join("tmp").join(format!("{id}.part"));
    let stop_at_second = |store: &LocalDir| {
        let mut calls = 0;
        let copied = &mut |_| {
            calls += 1;
            if calls > 2 { Err(StoreError::new(StoreErrorKind::Io, "stopped")) } else { Ok(()) }
        };
        store.publish().unwrap().copy_object(object.as_ref(), copied).unwrap_err()
    };
    // A repair in a daemon: no process continues it.
    let store = writable(dir.path());
    stop_at_second(&store);
    assert!(!part.exists());
    drop(store);
    let mirror = || LocalDir::open(dir.path(), Access::Copy { new_chunk_bytes: 65_536 }).unwrap();
    let store = mirror();
    stop_at_second(&store);
    assert!(part.metadata().unwrap().len() > 0);
    fs::remove_file(&part).unwrap();
    // Whatever is added to this file, the disk is full.
    std::os::unix::fs::symlink("/dev/full", &part).unwrap();
    let full = store.publish().unwrap().copy_object(object.as_ref(), &mut |_| Ok(()));
    assert_eq!(kind(full), StoreErrorKind::NoSpace);
    assert!(!part.is_symlink(), "the part of a copy that filled the disk stays");
    drop(store);

    // What no process continued for a week is removed, even if only copies write.
    let tmp = dir.path().join("tmp");
    let (old, new) = (format!("{id}.part"), format!("{}.part", Hash::of(b"new")));
    for (name, days) in [(&old, 8), (&new, 6), (&"copy-1".to_owned(), 0)] {
        let file = fs::File::create(tmp.join(name)).unwrap();
        file.set_modified(std::time::SystemTime::now() - Duration::from_secs(days * 24 * 3600)).unwrap();
    }
    mirror();
    let left: Vec<_> = fs::read_dir(&tmp).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [new.as_str()]);
}

const MIB: u64 = 1 << 20;

/// An object of 3 MiB in another store. It notes which ranges are read, and can become unreadable.
struct Noting {
    id: Hash,
    bytes: Vec<u8>,
    reads: Mutex<Vec<u64>>,
    /// From this offset on, reads fail.
    cut_at: AtomicU64,
}

impl Noting {
    fn new() -> Self {
        let bytes: Vec<u8> = (0..3u32 << 18).flat_map(u32::to_le_bytes).collect();
        let (id, reads) = (Hash::of(&bytes), Mutex::default());
        Self { id, bytes, reads, cut_at: AtomicU64::new(u64::MAX) }
    }

    /// The offsets of the reads since the last call.
    fn take_reads(&self) -> Vec<u64> {
        std::mem::take(&mut *self.reads.lock().unwrap())
    }

    /// Opens a store for copying and copies the object into it. Returns how many bytes are there according to
    /// the progress.
    fn copy_to(&self, dir: &Path) -> Result<u64, StoreError> {
        let store = LocalDir::open(dir, Access::Copy { new_chunk_bytes: 65_536 })?;
        let mut publication = store.publish()?;
        let mut there = 0;
        publication.copy_object(self, &mut |more| {
            there += more;
            Ok(())
        })?;
        Ok(there)
    }
}

impl Object for Noting {
    fn id(&self) -> Hash {
        self.id
    }

    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.reads.lock().unwrap().push(offset);
        if offset >= self.cut_at.load(Ordering::Relaxed) {
            return Err(StoreError::new(StoreErrorKind::Unreachable, "the source is unreachable"));
        }
        into.copy_from_slice(&self.bytes[offset as usize..][..into.len()]);
        Ok(())
    }
}

/// A store into which the first MiB of an object was copied before the source failed for a while. Also the
/// object, and the file with its first part.
fn interrupted() -> (tempfile::TempDir, Noting, PathBuf) {
    let (dir, source) = (tempfile::tempdir().unwrap(), Noting::new());
    source.cut_at.store(MIB, Ordering::Relaxed);
    assert_eq!(kind(source.copy_to(dir.path())), StoreErrorKind::Unreachable);
    assert_eq!(source.take_reads(), [0, MIB]);
    source.cut_at.store(u64::MAX, Ordering::Relaxed);
    let part = dir.path().join("tmp").join(format!("{}.part", source.id));
    assert_eq!(fs::read(&part).unwrap().len() as u64, MIB);
    (dir, source, part)
}

/// Checks that the store has the whole object, and nothing else.
fn must_have(dir: &Path, source: &Noting) {
    assert_eq!(files(dir), [(format!("objects/{}", source.id), 3 * MIB)]);
    let path = dir.join("objects").join(source.id.to_string());
    assert!(fs::read(path).unwrap() == source.bytes);
}

#[test]
fn a_stopped_copy_continues_in_the_middle_of_an_object() {
    let (dir, source, _) = interrupted();
    assert_eq!(source.copy_to(dir.path()).unwrap(), 3 * MIB);
    assert_eq!(source.take_reads(), [MIB, 2 * MIB]);
    must_have(dir.path(), &source);
}

#[test]
fn a_copy_with_a_wrong_leftover_part_starts_again() {
    let (dir, source, part) = interrupted();
    let mut left = fs::read(&part).unwrap();
    left[1_000_000] ^= 1;
    fs::write(&part, left).unwrap();
    assert_eq!(source.copy_to(dir.path()).unwrap(), 3 * MIB);
    assert_eq!(source.take_reads(), [MIB, 2 * MIB, 0, MIB, 2 * MIB]);
    must_have(dir.path(), &source);
    // A part that is longer than the object is not continued at all.
    let (dir, source, part) = interrupted();
    fs::write(&part, vec![7_u8; source.bytes.len() + 1]).unwrap();
    assert_eq!(source.copy_to(dir.path()).unwrap(), 3 * MIB);
    assert_eq!(source.take_reads(), [0, MIB, 2 * MIB]);
    must_have(dir.path(), &source);
}

#[test]
fn a_damaged_source_is_blamed_in_new_and_continued_copies() {
    let (dir, mut source, _) = interrupted();
    source.bytes[2_500_000] ^= 1;
    for reads in [&[MIB, 2 * MIB, 0, MIB, 2 * MIB][..], &[0, MIB, 2 * MIB]] {
        let error = source.copy_to(dir.path()).unwrap_err();
        assert_eq!((error.kind(), source.take_reads().as_slice()), (StoreErrorKind::Damaged, reads));
        let says = format!("the data object {} is damaged at the source", source.id);
        assert!(error.to_string().contains(&says), "{error}");
        assert_eq!(files(dir.path()), []);
    }
}

#[test]
fn an_open_object_is_correct_after_a_complete_copy() {
    let (dir, other_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (store, other) = (writable(dir.path()), writable(other_dir.path()));
    for store in [&store, &other] {
        publish(store, "a", b"the object", &[], b"m").unwrap();
    }
    let id = Hash::of(b"the object");
    // This is true for a reader in another process, too.
    let reader = LocalDir::open(dir.path(), Access::Read).unwrap();
    let opened = [store.open_object(id).unwrap(), reader.open_object(id).unwrap()];
    let path = dir.path().join("objects").join(id.to_string());
    let right = |object: &dyn headwater_store::Object| {
        let mut bytes = [0; 10];
        let outcome = object.read_checked(0, &mut bytes, &mut |bytes| match bytes {
            b"the object" => Ok(()),
            _ => Err(StoreError::new(StoreErrorKind::Damaged, "wrong")),
        });
        outcome.and_then(|()| object.read_range(4, &mut bytes[..6]))
    };
    let repair = || {
        let copied =
            store.publish().unwrap().copy_object(other.open_object(id).unwrap().as_ref(), &mut |_| Ok(()));
        copied.unwrap();
    };
    for damage in [b"the".as_slice(), b"the abject", b""] {
        fs::write(&path, damage).unwrap();
        for object in &opened {
            assert_eq!(kind(right(object.as_ref())), StoreErrorKind::Damaged);
        }
        repair();
        for object in &opened {
            right(object.as_ref()).unwrap();
        }
    }
    // What is removed stays readable for readers that have it open.
    store.remove(&name("a"), None).unwrap();
    assert!(!path.exists());
    right(opened[0].as_ref()).unwrap();
}
