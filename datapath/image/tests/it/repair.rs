//! Damage is repaired from a store that has the same version, or reported with the files that it touches.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::fixture::{disk_of, files, flip, import_bytes, noise, read_all, store};
use headwater_image::import::LEVEL_DEFAULT;
use headwater_image::manifest::ChunkRef;
use headwater_image::verify::DAMAGED_LISTED_MAX;
use headwater_image::{
    Cancel, ChunkCache, DamagedChunk, ImageErrorKind, ImportOptions, Manifest, Progress, RepairProgress,
    Round, Verified, VersionReader, files_touched, objects_of, repair, repair_manifest, verify, verify_in,
    versions_touched,
};
use headwater_store::{
    Access, Copied, Hash, Image, ImageName, LocalDir, Object, Patch, Pin, Publication, Removed, Store,
    StoreError, StoreErrorKind, Version,
};
use headwater_testkit::{Rng, run};

fn object_path(dir: &Path, version: &Version) -> PathBuf {
    dir.join("objects").join(version.objects[0].to_string())
}

fn check(store: &LocalDir, version: &Version) -> Verified {
    verify(store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap()
}

fn mend(store: &LocalDir, version: &Version, sources: &[Arc<dyn Store>]) -> headwater_image::Repaired {
    mend_telling(store, version, sources, &mut |_| {})
}

/// The same, and tells how far it is.
fn mend_telling(
    store: &LocalDir,
    version: &Version,
    sources: &[Arc<dyn Store>],
    progress: &mut dyn FnMut(RepairProgress),
) -> headwater_image::Repaired {
    let (found, round) = (check(store, version), Round::new(None));
    repair(store, version.manifest, &found, (&round, sources), &Cancel::new(), progress).unwrap()
}

#[test]
fn every_kind_of_damage_is_repaired_from_another_store() {
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk[..2 << 20], 1);
    let ((dir, here), (other_dir, other)) = (store(), store());
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "copy", &disk);
    let sources: [Arc<dyn Store>; 1] = [Arc::new(other.clone())];
    let path = object_path(dir.path(), &version);
    let good = fs::read(&path).unwrap();
    // Open all the time: what is repaired in place is right for who has it open.
    let reader = VersionReader::open(&here, version.manifest, ChunkCache::new(0)).unwrap();

    assert_eq!(mend(&here, &version, &sources), headwater_image::Repaired::default());
    for at in [20, 70_000, 1_000_000, good.len() as u64 - 1] {
        flip(&path, at);
    }
    let done = mend(&here, &version, &sources);
    assert_eq!((done.chunks, done.objects, done.left.is_sound()), (4, 0, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
    assert!(read_all(reader.as_ref()) == disk);

    flip(&path, 3);
    assert_eq!(mend(&here, &version, &sources).objects, 1);
    File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    assert_eq!(mend(&here, &version, &sources).objects, 1);
    fs::remove_file(&path).unwrap();
    assert_eq!(mend(&here, &version, &sources).objects, 1);
    assert!(fs::read(&path).unwrap() == good);
    assert!(check(&here, &version).is_sound());

    // What is damaged there too stays, and the rest is repaired.
    let theirs = object_path(other_dir.path(), &version);
    flip(&theirs, 100);
    flip(&path, 90);
    flip(&path, 200_000);
    let done = mend(&here, &version, &sources);
    assert_eq!((done.chunks, done.left.damaged_chunks, done.reasons.len()), (1, 1, 1));
    assert!(done.reasons[0].contains("hash"), "{:?}", done.reasons);
    let done = mend(&here, &version, &[]);
    assert_eq!((done.chunks, done.left.damaged_chunks), (0, 1));
    assert!(done.reasons[0].contains("no other store"), "{:?}", done.reasons);
    // A second source has it.
    let (_kept, third) = store();
    import_bytes(&third, "disk", &disk);
    let done = mend(&here, &version, &[Arc::new(other), Arc::new(third)]);
    assert!(done.left.is_sound(), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
}

#[test]
fn a_repair_tells_how_many_places_are_done_and_that_it_reads_them_again() {
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk[..2 << 20], 1);
    let ((dir, here), (_other_dir, other)) = (store(), store());
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "copy", &disk);
    let sources: [Arc<dyn Store>; 1] = [Arc::new(other)];
    let path = object_path(dir.path(), &version);
    let len_bytes = fs::metadata(&path).unwrap().len();
    let mended = |sources: &[Arc<dyn Store>]| {
        let mut told = Vec::new();
        let done = mend_telling(&here, &version, sources, &mut |at| told.push(at));
        let again = told.iter().position(|at| matches!(at, RepairProgress::Verifying(_)));
        let repairing = told[..again.unwrap_or(told.len())].to_vec();
        (done, repairing, again.map(|_| told[told.len() - 1]))
    };
    let at = |done, listed, copied_bytes| RepairProgress::Repairing { done, listed, copied_bytes };
    let through = RepairProgress::Verifying(Progress { done_bytes: 4 << 20, total_bytes: 4 << 20 });

    assert_eq!(mended(&sources).1, []);
    for place in [20, 70_000, 1_000_000] {
        flip(&path, place);
    }
    // Nobody has them: each was tried, and nothing needs to be read again.
    let (done, repairing, again) = mended(&[]);
    assert_eq!((done.left.damaged_chunks, again), (3, None));
    for done in 0..=3 {
        assert!(repairing.contains(&at(done, 3, 0)), "{done}: {repairing:?}");
    }
    let (done, repairing, again) = mended(&sources);
    assert_eq!((done.chunks, again), (3, Some(through)));
    for done in 0..=3 {
        assert!(repairing.contains(&at(done, 3, 0)), "{done}: {repairing:?}");
    }

    // An object that is copied as a whole has its chunks with it.
    fs::remove_file(&path).unwrap();
    let (done, repairing, again) = mended(&sources);
    assert_eq!((done.objects, again), (1, Some(through)));
    assert_eq!(repairing.first(), Some(&at(0, 1 + 32, 0)));
    assert_eq!(repairing.last(), Some(&at(1 + 32, 1 + 32, len_bytes)));
}

/// A store that notes the most bytes that were put right at once, and how many were read of its objects.
struct Noting {
    store: LocalDir,
    mended_bytes: AtomicUsize,
    read_bytes: Arc<AtomicU64>,
    /// It has no room for a data object more.
    is_full: AtomicBool,
    /// How often it was to take one all the same.
    refusals: AtomicUsize,
    /// How often it was asked for a manifest.
    asked: AtomicUsize,
    /// It does not answer when it is asked for a manifest, so many times more.
    falters: AtomicUsize,
}

impl Noting {
    fn new(store: LocalDir) -> Self {
        let [mended_bytes, refusals, asked, falters] = [0; 4].map(AtomicUsize::new);
        let (read_bytes, is_full) = (Arc::default(), AtomicBool::new(false));
        Self { store, mended_bytes, read_bytes, is_full, refusals, asked, falters }
    }

    /// How many manifests it was asked for since the last time.
    fn take_asked(&self) -> usize {
        self.asked.swap(0, Ordering::Relaxed)
    }

    /// The bytes that were read since the last time.
    fn take_read(&self) -> u64 {
        self.read_bytes.swap(0, Ordering::Relaxed)
    }
}

struct NotingObject(Arc<dyn Object>, Arc<AtomicU64>);

impl Object for NotingObject {
    fn id(&self) -> Hash {
        self.0.id()
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.1.fetch_add(into.len() as u64, Ordering::Relaxed);
        self.0.read_range(offset, into)
    }
}

impl Store for Noting {
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
        self.asked.fetch_add(1, Ordering::Relaxed);
        let falters = self.falters.load(Ordering::Relaxed);
        if falters > 0 {
            self.falters.store(falters - 1, Ordering::Relaxed);
            return Err(StoreError::new(StoreErrorKind::Unreachable, "it does not answer"));
        }
        self.store.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(NotingObject(self.store.open_object(id)?, Arc::clone(&self.read_bytes))))
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.store.pin(manifest)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        if self.is_full.load(Ordering::Relaxed) {
            self.refusals.fetch_add(1, Ordering::Relaxed);
            return Err(StoreError::new(StoreErrorKind::NoSpace, "there is no room"));
        }
        self.store.publish()
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.store.change(name, change)
    }

    fn mend(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        self.mended_bytes.fetch_max(patches.iter().map(|patch| patch.bytes.len()).sum(), Ordering::Relaxed);
        self.store.mend(object, patches)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.store.remove(name, number)
    }
}

/// The smallest chunks.
const SMALL: usize = 4096;

/// A store of such.
fn small_chunks() -> (tempfile::TempDir, LocalDir) {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(dir.path(), Access::Write { new_chunk_bytes: SMALL as u32 }).unwrap();
    (dir, store)
}

#[test]
fn any_number_of_chunks_is_repaired_in_little_memory_where_there_is_no_room_for_a_copy() {
    let mut disk = vec![0; (DAMAGED_LISTED_MAX + 500) * SMALL];
    noise(&mut disk, 1);
    let ((dir, here), (_other_dir, other)) = (small_chunks(), small_chunks());
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "copy", &disk);
    let path = object_path(dir.path(), &version);
    let good = fs::read(&path).unwrap();
    let mut bad = good.clone();
    for at in (64..bad.len()).step_by(SMALL / 2) {
        bad[at] ^= 1;
    }
    File::options().write(true).open(&path).unwrap().write_all_at(&bad, 0).unwrap();
    let found = check(&here, &version);
    assert_eq!(found.damaged_chunks, DAMAGED_LISTED_MAX as u64 + 500);
    let (here, sources): (_, [Arc<dyn Store>; 1]) = (Noting::new(here), [Arc::new(other)]);
    here.is_full.store(true, Ordering::Relaxed);
    let round = Round::new(None);
    let done =
        repair(&here, version.manifest, &found, (&round, &sources), &Cancel::new(), &mut |_| {}).unwrap();
    assert!(done.left.is_sound(), "{} are left", done.left.damaged_chunks);
    assert_eq!((done.chunks, done.reasons.len()), (found.damaged_chunks, 0));
    assert!(fs::read(&path).unwrap() == good);
    let most = here.mended_bytes.load(Ordering::Relaxed);
    assert!((1..(32 << 20) + 2 * SMALL).contains(&most), "{most} bytes at once");
}

/// A disk of which each chunk is another one.
fn numbered_chunks(count: usize) -> Vec<u8> {
    let mut disk = vec![0; count * SMALL];
    for (chunk, number) in disk.chunks_mut(SMALL).zip(1_u64..) {
        chunk[..8].copy_from_slice(&number.to_le_bytes());
    }
    disk
}

/// More chunks are damaged than are listed, so that it has a second pass.
#[test]
fn an_object_for_which_there_is_no_room_is_tried_once_in_a_repair() {
    const CHUNKS: usize = DAMAGED_LISTED_MAX + 500;
    let ((dir, here), (_other_dir, other)) = (small_chunks(), small_chunks());
    let disk = numbered_chunks(CHUNKS);
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "copy", &disk);
    let path = object_path(dir.path(), &version);
    let good = fs::read(&path).unwrap();
    // Its header, too: it is no good as a whole.
    File::options().write(true).open(&path).unwrap().write_all_at(&vec![0; good.len()], 0).unwrap();
    let found = check(&here, &version);
    assert_eq!((found.objects.len(), found.damaged_chunks), (1, CHUNKS as u64));
    let (here, sources): (_, [Arc<dyn Store>; 1]) = (Noting::new(here), [Arc::new(other)]);
    let mend = |found: &Verified| {
        let how = (&Round::new(None), sources.as_slice());
        repair(&here, version.manifest, found, how, &Cancel::new(), &mut |_| {}).unwrap()
    };
    here.is_full.store(true, Ordering::Relaxed);
    let done = mend(&found);
    assert_eq!((done.chunks, done.objects, done.left.objects.len()), (CHUNKS as u64, 0, 1));
    assert_eq!((done.left.damaged_chunks, here.refusals.load(Ordering::Relaxed)), (0, 1));
    // It is told all the same.
    assert_eq!(done.reasons.len(), 1, "{:?}", done.reasons);
    assert!(done.reasons[0].contains("there is no room"), "{:?}", done.reasons);
    // The next repair looks for room again.
    here.is_full.store(false, Ordering::Relaxed);
    let done = mend(&done.left);
    assert_eq!((done.objects, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
}

/// Chunk by chunk, all that is still damaged is read again after each ten thousand.
#[test]
fn an_object_of_which_all_is_damaged_is_copied_and_not_read_again_for_each_list_of_damage() {
    const CHUNKS: usize = 35_000;
    let disk = numbered_chunks(CHUNKS);
    let ((dir, here), (_other_dir, other)) = (small_chunks(), small_chunks());
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "copy", &disk);
    let path = object_path(dir.path(), &version);
    let good = fs::read(&path).unwrap();
    let reader = VersionReader::open(&here, version.manifest, ChunkCache::new(0)).unwrap();
    let zeroes = vec![0; good.len() - 16];
    File::options().write(true).open(&path).unwrap().write_all_at(&zeroes, 16).unwrap();
    let found = check(&here, &version);
    assert_eq!((found.damaged_chunks, found.damaged.len()), (CHUNKS as u64, DAMAGED_LISTED_MAX));

    let (here, there) = (Noting::new(here), Arc::new(Noting::new(other)));
    let sources: [Arc<dyn Store>; 1] = [there.clone()];
    let round = Round::new(None);
    let done =
        repair(&here, version.manifest, &found, (&round, &sources), &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((done.objects, done.chunks, done.left.is_sound()), (1, 0, true), "{:?}", done.reasons);
    assert!(done.reasons.is_empty() && fs::read(&path).unwrap() == good);
    let (most, read_bytes) = (2 * good.len() as u64, [here.take_read(), there.take_read()]);
    assert!(read_bytes.iter().all(|read_bytes| *read_bytes < most), "{read_bytes:?} of {}", good.len());
    assert_eq!(here.mended_bytes.load(Ordering::Relaxed), 0);
    // Who has the old file open finds the new one.
    assert!(read_all(reader.as_ref()) == disk);
}

#[test]
fn a_manifest_is_repaired_from_another_store_and_stays_in_use() {
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk[..2 << 20], 1);
    let ((dir, here), (_other_dir, other)) = (store(), store());
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "copy", &disk);
    let sources: [Arc<dyn Store>; 1] = [Arc::new(other)];
    let path = dir.path().join("manifests").join(version.manifest.to_string());
    let good = fs::read(&path).unwrap();
    assert!(!repair_manifest(&here, version.manifest, &sources).unwrap());

    let pin = here.pin(version.manifest).unwrap();
    flip(&path, 60);
    File::options().append(true).open(&path).unwrap().write_all_at(b"more", good.len() as u64).unwrap();
    let alone = repair_manifest(&here, version.manifest, &[]).unwrap_err();
    assert_eq!(alone.kind(), ImageErrorKind::Damaged);
    assert!(alone.to_string().contains("no other store"), "{alone}");
    assert!(repair_manifest(&here, version.manifest, &sources).unwrap());
    assert!(fs::read(&path).unwrap() == good && check(&here, &version).is_sound());
    // Whoever holds the version still does.
    assert!(here.remove(&"disk".parse().unwrap(), Some(1)).is_err());
    drop(pin);

    // The same bytes from their source do it as well.
    flip(&path, 60);
    let mut options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
    options.unless_newest = true;
    let source = disk_of(disk);
    let again = headwater_image::import(source, &here, &options, &mut |_| {}).unwrap();
    assert_eq!(again.version.number, 1);
    assert!(fs::read(&path).unwrap() == good);

    fs::remove_file(&path).unwrap();
    assert!(repair_manifest(&here, version.manifest, &sources).unwrap());
    assert!(check(&here, &version).is_sound());
    // One that was removed does not come back.
    here.remove(&"disk".parse().unwrap(), Some(1)).unwrap();
    assert_eq!(
        repair_manifest(&here, version.manifest, &sources).unwrap_err().kind(),
        ImageErrorKind::NotFound
    );
}

#[test]
fn damage_is_reported_with_the_files_that_it_touches() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("etc")).unwrap();
    for (name, seed) in [("one", 1), ("two", 2), ("etc/three", 3)] {
        let mut bytes = vec![0; 1 << 20];
        noise(&mut bytes, seed);
        fs::write(tree.join(name), bytes).unwrap();
    }
    let image = dir.path().join("fs.img");
    run(
        "e2fsprogs",
        "mke2fs",
        &["-q", "-t", "ext4", "-d", tree.to_str().unwrap(), image.to_str().unwrap(), "16M"],
    );
    let disk = fs::read(&image).unwrap();
    let mut second = vec![0; 1 << 20];
    noise(&mut second, 2);
    let place = disk.windows(64).position(|window| window == &second[500_000..500_064]).unwrap();

    let (kept, store) = store();
    let version = import_bytes(&store, "disk", &disk).version;
    let path = object_path(kept.path(), &version);
    // The chunk of the image that holds the middle of the file, found by the verification that it breaks.
    let object = fs::read(&path).unwrap();
    let at = object.windows(64).position(|window| window == &disk[place..place + 64]).unwrap();
    flip(&path, at as u64);
    let found = check(&store, &version);
    assert_eq!(found.damaged_chunks, 1);
    let search = |damaged: &[DamagedChunk], round: &Round, progress: &mut dyn FnMut(u64)| {
        files_touched(&store, version.manifest, damaged, round, &Cancel::new(), progress).unwrap()
    };
    let mut told = Vec::new();
    let touched = search(&found.damaged, &Round::new(None), &mut |read_bytes| told.push(read_bytes));
    assert_eq!((touched.files, touched.remarks), (vec!["partition 0: /two".to_owned()], vec![]));
    // Two of the files can be read to the end.
    assert!(told.is_sorted() && told.last() >= Some(&(2 << 20)), "{told:?}");
    // The search reads 3 MiB and more, and holds the rate of its round, too.
    let (began, round) = (Instant::now(), Round::new(Some(6 << 20)));
    let touched = search(&found.damaged, &round, &mut |_| {});
    assert_eq!(touched.files, ["partition 0: /two"]);
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
    assert!(search(&[], &Round::new(None), &mut |_| {}).files.is_empty());
    // A version that cannot be opened at all is told so.
    fs::remove_file(&path).unwrap();
    let touched = search(&found.damaged, &Round::new(None), &mut |_| {});
    assert_eq!((touched.files.len(), touched.remarks.len()), (0, 1));
}

/// An ext4 with `/many/large`, of 1 MiB, changed by commands in which `EMPTY` is an empty file outside.
fn ext4_with(dir: &Path, commands: &str) -> (PathBuf, Vec<u8>) {
    let (tree, image, script) = (dir.join("tree"), dir.join("fs.img"), dir.join("script"));
    fs::create_dir_all(tree.join("many")).unwrap();
    let mut large = vec![0; 1 << 20];
    noise(&mut large, 2);
    fs::write(tree.join("many/large"), &large).unwrap();
    let (tree, text) = (tree.to_str().unwrap(), image.to_str().unwrap());
    let options = ["-q", "-t", "ext4", "-b", "4096", "-I", "256", "-N", "2048", "-d", tree, text, "16M"];
    run("e2fsprogs", "mke2fs", &options);
    let empty = dir.join("empty");
    fs::write(&empty, "").unwrap();
    fs::write(&script, commands.replace("EMPTY", empty.to_str().unwrap())).unwrap();
    run("e2fsprogs", "debugfs", &["-w", "-f", script.to_str().unwrap(), text]);
    (image, large)
}

/// The files that damage touches of an image, in which the chunks with these places are damaged.
fn touched_by(disk: &[u8], places: &[usize]) -> headwater_image::Touched {
    let (kept, store) = store();
    let version = import_bytes(&store, "disk", disk).version;
    for at in places {
        spoil(kept.path(), place(&store, &version, (at / CHUNK_BYTES) as u64));
    }
    let found = check(&store, &version);
    assert_eq!(found.damaged_chunks, places.len() as u64);
    let round = Round::new(None);
    files_touched(&store, version.manifest, &found.damaged, &round, &Cancel::new(), &mut |_| {}).unwrap()
}

/// Where debugfs says that the inode of a file lies.
fn inode_place(image: &Path, file: &str) -> usize {
    let said = run("e2fsprogs", "debugfs", &["-R", &format!("imap {file}"), image.to_str().unwrap()]);
    let (_, said) = said.split_once("located at block ").expect("no place in what debugfs says");
    let (block, offset) = said.trim().split_once(", offset 0x").unwrap();
    block.parse::<usize>().unwrap() * 4096 + usize::from_str_radix(offset, 16).unwrap()
}

#[test]
fn a_file_whose_inode_is_damaged_hides_no_other_one() {
    let dir = tempfile::tempdir().unwrap();
    // Inodes are given out one after another, and read up to 96 KiB ahead. Those of 300 files have 75 KiB.
    let commands: String = (0..900).map(|n| format!("write \"EMPTY\" /many/file-{n}\n")).collect();
    let (image, large) = ext4_with(dir.path(), &commands);
    let disk = fs::read(&image).unwrap();
    let content = disk.windows(64).position(|window| window == &large[500_000..500_064]).unwrap();
    let touched = touched_by(&disk, &[inode_place(&image, "/many/file-890"), content]);
    assert_eq!(touched.remarks, Vec::<String>::new());
    let is_named = |path: &str| touched.files.contains(&format!("partition 0: {path}"));
    assert!(is_named("/many/file-890") && is_named("/many/large"), "{:?}", touched.files);
    for sound in ["/", "/many", "/many/file-0", "/many/file-300"] {
        assert!(!is_named(sound), "{sound} in {:?}", touched.files);
    }
}

/// Reading as many zeroes as it claims would take hours.
#[test]
fn a_sparse_file_is_searched_for_damage_no_further_than_its_partition_is_large() {
    let dir = tempfile::tempdir().unwrap();
    let commands = "write \"EMPTY\" /many/sparse\nset_inode_field /many/sparse size 1099511627776\n";
    let (image, large) = ext4_with(dir.path(), commands);
    let disk = fs::read(image).unwrap();
    let content = disk.windows(64).position(|window| window == &large[500_000..500_064]).unwrap();
    let touched = touched_by(&disk, &[content]);
    assert_eq!(touched.files, ["partition 0: /many/large"]);
    assert_eq!(touched.remarks.len(), 1);
    assert!(touched.remarks[0].contains("end: 1, the first is /many/sparse"), "{:?}", touched.remarks);
}

/// Each table of logical partitions says where the next one is.
#[test]
fn a_damaged_table_of_logical_partitions_hides_no_primary_one() {
    let dir = tempfile::tempdir().unwrap();
    let (image, large) = ext4_with(dir.path(), "write \"EMPTY\" /many/empty\n");
    let primary = fs::read(image).unwrap();
    let start = 1_usize << 20;
    let extended = start + primary.len();
    let mut disk = vec![0; extended + (2 << 20)];
    disk[start..extended].copy_from_slice(&primary);
    for (slot, kind, start, len) in [(0, 0x83, start, primary.len()), (1, 0x05, extended, 2 << 20)] {
        let entry = &mut disk[446 + 16 * slot..][..16];
        entry[4] = kind;
        entry[8..12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
        entry[12..].copy_from_slice(&((len / 512) as u32).to_le_bytes());
    }
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    // What the table says does not matter: it cannot be read.
    noise(&mut disk[extended..extended + CHUNK_BYTES], 3);
    let content = disk.windows(64).position(|window| window == &large[500_000..500_064]).unwrap();
    let touched = touched_by(&disk, &[content, extended]);
    assert_eq!(touched.files, ["partition 1: /many/large"]);
    assert_eq!(touched.remarks.len(), 1, "{:?}", touched.remarks);
    assert!(touched.remarks[0].contains("logical partitions may be missing"), "{:?}", touched.remarks);
}

#[test]
fn a_verification_holds_its_rate() {
    let mut disk = vec![0; 2 << 20];
    noise(&mut disk, 5);
    let (_kept, store) = store();
    let version = import_bytes(&store, "disk", &disk).version;
    let began = Instant::now();
    let found =
        verify_in(&store, version.manifest, &Round::new(Some(4 << 20)), &Cancel::new(), &mut |_| {}).unwrap();
    assert!(found.is_sound());
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
}

#[test]
fn a_round_reads_what_versions_share_once_and_tells_damage_of_each() {
    const FEW_BYTES: u64 = 4 * (64 << 10);
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk, 1);
    let ((dir, here), (_other_dir, other)) = (store(), store());
    let first = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "disk", &disk);
    disk[1 << 20] ^= 1;
    let second = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "disk", &disk);
    let (here, sources): (_, [Arc<dyn Store>; 1]) = (Noting::new(here), [Arc::new(other)]);
    let check = |version: &Version, round: &Round| {
        verify_in(&here, version.manifest, round, &Cancel::new(), &mut |_| {}).unwrap()
    };
    let round = Round::new(None);
    assert!(check(&first, &round).is_sound());
    assert!(here.take_read() >= 4 << 20);
    let found = check(&second, &round);
    assert_eq!((found.is_sound(), found.chunks), (true, 64));
    assert!((1..FEW_BYTES).contains(&here.take_read()));

    // The next round reads all of it again, and each version is told of what is damaged in it.
    flip(&object_path(dir.path(), &first), 3 << 20);
    let round = Round::new(None);
    let found = check(&first, &round);
    assert_eq!((found.damaged_chunks, check(&second, &round).damaged_chunks), (1, 1));
    let mut told = Vec::new();
    let mut tell = |seen: u64, all: u64| told.push((seen, all));
    let touched = versions_touched(&here, &found, &round, &Cancel::new(), &mut tell).unwrap();
    assert_eq!(touched, ["disk@1", "disk@2"]);
    assert_eq!(told, [(0, 2), (1, 2)]);
    here.take_read();
    // What was repaired is read again, and nothing else.
    let done =
        repair(&here, first.manifest, &found, (&round, &sources), &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!((1..FEW_BYTES).contains(&here.take_read()));
    assert!(check(&second, &round).is_sound());
    assert!((1..FEW_BYTES).contains(&here.take_read()));
}

/// Copies all that a store has to a new one.
fn synced(store: &LocalDir) -> Copied {
    let dir = tempfile::tempdir().unwrap();
    let target = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    let what = headwater_store::copy::everything(store).unwrap();
    headwater_store::copy(store, &target, &what, &objects_of, true, &mut |_| Ok(())).unwrap()
}

#[test]
fn what_no_version_needs_any_more_is_read_once_in_a_round_and_repaired_before_a_copy_fails_of_it() {
    const FEW_BYTES: u64 = 4 * (64 << 10);
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk, 1);
    let ((dir, here), (_other_dir, other)) = (store(), store());
    let first = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "disk", &disk);
    // A quarter of it is in the first version only.
    disk[..1 << 20].fill(0);
    let second = import_bytes(&here, "disk", &disk).version;
    noise(&mut disk[2 << 20..][..64 << 10], 2);
    let third = import_bytes(&here, "disk", &disk).version;
    assert_eq!((&second.objects, third.objects[0]), (&first.objects, first.objects[0]));
    let path = object_path(dir.path(), &first);
    let good = fs::read(&path).unwrap();
    let (object_bytes, image_bytes) = (good.len() as u64, disk.len() as u64);
    let noting = Noting::new(here.clone());
    // What comes of it, how many bytes were read, and of how many it told at its end.
    let verified = |version: &Version, round: &Round| {
        let mut told = Vec::new();
        let tell = &mut |at: Progress| told.push((at.done_bytes, at.total_bytes));
        noting.take_read();
        let found = verify_in(&noting, version.manifest, round, &Cancel::new(), tell).unwrap();
        let (done, total) = told[told.len() - 1];
        assert!(told.is_sorted() && told.iter().all(|(_, all)| *all == total) && done == total, "{told:?}");
        (found, noting.take_read(), total)
    };
    // While the first version is there its chunks are all of the object.
    let round = Round::new(None);
    let mut read_bytes = 0;
    for version in [&third, &second, &first] {
        let (found, more, total) = verified(version, &round);
        assert!(found.is_sound() && total == image_bytes, "{found:?}");
        read_bytes += more;
    }
    assert!((object_bytes..object_bytes + FEW_BYTES).contains(&read_bytes), "{read_bytes} bytes");

    here.remove(&"disk".parse().unwrap(), Some(1)).unwrap();
    // The last of those that need it has it read as a whole, once.
    let round = Round::new(None);
    let (found, read_bytes, total) = verified(&third, &round);
    assert!(found.is_sound() && read_bytes < object_bytes && total == image_bytes, "{read_bytes} bytes");
    let (found, read_bytes, total) = verified(&second, &round);
    assert!(found.is_sound() && total == image_bytes + object_bytes, "{found:?}");
    assert!((object_bytes..object_bytes + FEW_BYTES).contains(&read_bytes), "{read_bytes} bytes");
    for version in [&third, &second] {
        let (found, read_bytes, total) = verified(version, &round);
        assert!(found.is_sound() && read_bytes < FEW_BYTES && total == image_bytes, "{read_bytes} bytes");
    }
    assert_eq!(synced(&here).failed.len(), 0);

    flip(&path, 100_000);
    let round = Round::new(None);
    assert!(verified(&second, &round).0.is_sound());
    let found = verified(&third, &round).0;
    assert_eq!((found.objects.len(), found.damaged_chunks), (1, 0), "{found:?}");
    assert!(found.damage()[0].contains("does not have the hash that is its name"), "{:?}", found.damage());
    let touched = versions_touched(&here, &found, &round, &Cancel::new(), &mut |_, _| {}).unwrap();
    assert_eq!(touched, ["disk@2", "disk@3"]);
    let copied = synced(&here);
    assert_eq!((copied.versions, copied.failed.len()), (0, 2), "{copied:?}");
    let mend = |sources: &[Arc<dyn Store>]| {
        repair(&here, third.manifest, &found, (&round, sources), &Cancel::new(), &mut |_| {}).unwrap()
    };
    let done = mend(&[]);
    assert_eq!((done.objects, done.left.objects.len(), done.reasons.len()), (0, 1, 1), "{done:?}");
    let sources: [Arc<dyn Store>; 1] = [Arc::new(other)];
    let done = mend(&sources);
    assert_eq!((done.objects, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
    let copied = synced(&here);
    assert_eq!((copied.versions, copied.failed.len()), (2, 0), "{copied:?}");
}

/// What no version needs is looked at only when all chunks that are needed are right.
#[test]
fn a_repair_goes_on_with_damage_that_it_finds_behind_what_it_has_repaired() {
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk, 1);
    let ((dir, here), (_other_dir, other)) = (store(), store());
    let first = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "disk", &disk);
    disk[..1 << 20].fill(0);
    let second = import_bytes(&here, "disk", &disk).version;
    here.remove(&"disk".parse().unwrap(), Some(1)).unwrap();
    let path = object_path(dir.path(), &first);
    let good = fs::read(&path).unwrap();
    flip(&path, 100_000);
    flip(&path, 3 << 20);
    let found = check(&here, &second);
    assert_eq!((found.objects.len(), found.damaged_chunks), (0, 1), "{found:?}");
    let done = mend(&here, &second, &[Arc::new(other)]);
    assert_eq!((done.chunks, done.objects, done.left.is_sound()), (1, 1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good && check(&here, &second).is_sound());
}

const CHUNK_BYTES: usize = 65_536;
/// A chunk of [`Sites`] that is packed, and one that is stored as it is.
const PACKED: u64 = 3;
const AS_IT_IS: u64 = 11;

/// Bytes that pack, each level of zstd in its own way; the same ones for one seed.
fn words(into: &mut [u8], seed: u64) {
    let mut rng = Rng::new(seed);
    let mut words = vec![0; 64 * 16];
    rng.fill(&mut words);
    for place in into.chunks_mut(16) {
        let word = rng.index(64) * 16;
        place.copy_from_slice(&words[word..word + place.len()]);
    }
}

/// In which data object a version has a chunk, and where there.
fn place(store: &LocalDir, version: &Version, index: u64) -> (Hash, ChunkRef) {
    let manifest = Manifest::decode(&store.manifest(version.manifest).unwrap()).unwrap();
    let chunk = *manifest.chunk(index).unwrap();
    (manifest.objects()[chunk.object as usize].id, chunk)
}

/// Makes bytes in the middle of a chunk wrong.
fn spoil(dir: &Path, (object, chunk): (Hash, ChunkRef)) {
    let middle = chunk.offset + u64::from(chunk.stored_bytes / 2);
    (middle..middle + 32).for_each(|at| flip(&dir.join("objects").join(object.to_string()), at));
}

/// Two stores that have the same disk. There it is all they ever had; here most of it is in the data object of an older version.
struct Sites {
    dir: tempfile::TempDir,
    here: LocalDir,
    older: Version,
    newest: Version,
    there_dir: tempfile::TempDir,
    there: LocalDir,
    theirs: Version,
    disk: Vec<u8>,
}

impl Sites {
    /// There it is packed at this level, here as usual.
    fn new(level_there: i32) -> Self {
        let ((dir, here), (there_dir, there)) = (store(), store());
        let mut disk = vec![0; 16 * CHUNK_BYTES];
        words(&mut disk[..8 * CHUNK_BYTES], 1);
        noise(&mut disk[8 * CHUNK_BYTES..], 2);
        let older = import_bytes(&here, "disk", &disk).version;
        words(&mut disk[..CHUNK_BYTES], 3);
        let newest = import_bytes(&here, "disk", &disk).version;
        let mut options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
        options.level = level_there;
        let source = disk_of(disk.clone());
        let theirs = headwater_image::import(source, &there, &options, &mut |_| {}).unwrap().version;
        let [packed, as_it_is] = [PACKED, AS_IT_IS].map(|index| place(&here, &newest, index));
        assert_eq!([packed.0, as_it_is.0], [older.objects[0]; 2]);
        assert!((packed.1.stored_bytes as usize) < CHUNK_BYTES);
        assert_eq!(as_it_is.1.stored_bytes as usize, CHUNK_BYTES);
        assert!(there.open_object(older.objects[0]).is_err());
        Self { dir, here, older, newest, there_dir, there, theirs, disk }
    }

    /// The data object of the older version.
    fn shared(&self) -> PathBuf {
        object_path(self.dir.path(), &self.older)
    }

    fn spoil(&self, indices: &[u64]) {
        for index in indices {
            spoil(self.dir.path(), place(&self.here, &self.newest, *index));
        }
    }

    /// Repairs the newest version from the other store.
    fn mend(&self) -> headwater_image::Repaired {
        mend(&self.here, &self.newest, &[Arc::new(self.there.clone())])
    }

    /// Repairs a packed chunk, which must fail, for this one reason, and change nothing.
    fn must_refuse(&self, says: &str) {
        self.spoil(&[PACKED]);
        let (bytes, listed) = (fs::read(self.shared()).unwrap(), files(self.dir.path()));
        let done = self.mend();
        assert_eq!((done.chunks, done.objects, done.left.damaged_chunks), (0, 0, 1));
        assert_eq!(done.reasons.len(), 1, "{:?}", done.reasons);
        assert!(done.reasons[0].contains(says), "{:?}", done.reasons);
        assert!(fs::read(self.shared()).unwrap() == bytes);
        assert_eq!(files(self.dir.path()), listed);
    }
}

#[test]
fn a_chunk_is_repaired_from_another_data_object_of_a_store_with_another_history() {
    let sites = Sites::new(LEVEL_DEFAULT);
    let good = fs::read(sites.shared()).unwrap();
    let reader = VersionReader::open(&sites.here, sites.newest.manifest, ChunkCache::new(0)).unwrap();
    let there = Arc::new(Noting::new(sites.there.clone()));
    let sources: [Arc<dyn Store>; 1] = [there.clone()];
    for spoilt in [&[PACKED][..], &[AS_IT_IS], &[PACKED, PACKED + 1, AS_IT_IS, AS_IT_IS + 1]] {
        sites.spoil(spoilt);
        assert!(fs::read(sites.shared()).unwrap() != good);
        there.take_read();
        let done = mend(&sites.here, &sites.newest, &sources);
        assert_eq!((done.chunks, done.objects), (spoilt.len() as u64, 0), "{:?}", done.reasons);
        assert!(done.left.is_sound() && done.reasons.is_empty(), "{:?}", done.reasons);
        assert!(fs::read(sites.shared()).unwrap() == good);
        // Who has it open reads the right bytes, too.
        assert!(read_all(reader.as_ref()) == sites.disk);
        let read_bytes = there.take_read();
        let most_bytes = (spoilt.len() * CHUNK_BYTES) as u64;
        assert!((1..=most_bytes).contains(&read_bytes), "{read_bytes} bytes of data objects were read there");
    }
    assert!(check(&sites.here, &sites.older).is_sound());
    assert!(files(sites.dir.path()).iter().all(|(name, _)| !name.starts_with("tmp/")));
}

#[test]
fn a_store_that_did_not_answer_is_asked_again_for_the_next_version_and_one_that_has_no_copy_is_not() {
    let sites = Sites::new(LEVEL_DEFAULT);
    sites.spoil(&[PACKED]);
    let mend = |version: &Version, round: &Round, sources: &[Arc<dyn Store>]| {
        let found = verify_in(&sites.here, version.manifest, round, &Cancel::new(), &mut |_| {}).unwrap();
        assert_eq!(found.damaged_chunks, 1);
        let (manifest, how) = (version.manifest, (round, sources));
        repair(&sites.here, manifest, &found, how, &Cancel::new(), &mut |_| {}).unwrap()
    };
    let (_empty_dir, empty) = store();
    let (round, lacking): (_, [Arc<dyn Store>; 1]) = (Round::new(None), [Arc::new(empty)]);
    for (version, is_known) in [(&sites.older, false), (&sites.newest, true)] {
        let done = mend(version, &round, &lacking);
        assert_eq!((done.chunks, done.reasons.len()), (0, 1), "{:?}", done.reasons);
        assert_eq!(done.reasons[0].contains("found out for another version"), is_known, "{:?}", done.reasons);
    }

    let there = Arc::new(Noting::new(sites.there.clone()));
    let (round, sources): (_, [Arc<dyn Store>; 1]) = (Round::new(None), [there.clone()]);
    there.falters.store(1, Ordering::Relaxed);
    let done = mend(&sites.older, &round, &sources);
    assert_eq!((done.chunks, done.left.damaged_chunks), (0, 1));
    assert!(done.reasons[0].contains("it does not answer"), "{:?}", done.reasons);
    let done = mend(&sites.newest, &round, &sources);
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
}

/// Repairs the older and the newest version in turn, so many times, and returns how many manifests were read for each, here and there,
/// and why its one damaged chunk stays.
fn mended_in_turn(sites: &Sites, there: &Arc<Noting>, times: usize) -> Vec<(usize, usize, String)> {
    let (here, round) = (Noting::new(sites.here.clone()), Round::new(None));
    let sources: [Arc<dyn Store>; 1] = [Arc::clone(there) as Arc<dyn Store>];
    let versions = [&sites.older, &sites.newest].into_iter().cycle().take(times);
    let mended = versions.map(|version| {
        let found = verify_in(&here, version.manifest, &round, &Cancel::new(), &mut |_| {}).unwrap();
        assert_eq!(found.damaged_chunks, 1);
        here.take_asked();
        there.take_asked();
        let how = (&round, sources.as_slice());
        let done = repair(&here, version.manifest, &found, how, &Cancel::new(), &mut |_| {}).unwrap();
        assert_eq!((done.chunks, done.reasons.len()), (0, 1), "{:?}", done.reasons);
        (here.take_asked(), there.take_asked(), done.reasons[0].clone())
    });
    mended.collect()
}

#[test]
fn a_copy_that_is_damaged_too_is_looked_for_once_in_a_round() {
    let sites = Sites::new(LEVEL_DEFAULT);
    sites.spoil(&[PACKED]);
    spoil(sites.there_dir.path(), place(&sites.there, &sites.theirs, PACKED));
    let there = Arc::new(Noting::new(sites.there.clone()));
    // That of the version itself, and for the first one all that the stores have.
    let mended = mended_in_turn(&sites, &there, 3);
    let read: Vec<_> = mended.iter().map(|(here, there, _)| (*here, *there)).collect();
    assert_eq!(read, [(1 + 2, 1), (1, 0), (1, 0)]);
    assert!(mended[0].2.contains("has it too"), "{}", mended[0].2);
    assert!(mended[1].2.contains("found out for another version"), "{}", mended[1].2);
}

#[test]
fn a_store_that_never_answers_is_given_up_for_the_round_and_others_are_not_read_again_for_it() {
    let sites = Sites::new(LEVEL_DEFAULT);
    sites.spoil(&[PACKED]);
    let there = Arc::new(Noting::new(sites.there.clone()));
    there.falters.store(usize::MAX, Ordering::Relaxed);
    let mended = mended_in_turn(&sites, &there, 5);
    let read: Vec<_> = mended.iter().map(|(here, there, _)| (*here, *there)).collect();
    assert_eq!(read, [(1 + 2, 1), (1, 1), (1, 1), (1, 0), (1, 0)]);
    for (number, (_, _, why)) in mended.iter().enumerate() {
        assert_eq!(why.contains("it does not answer"), number < 3, "{why}");
        assert_eq!(why.contains("asked for again in the next round"), number >= 3, "{why}");
    }
    // In the next round it is.
    there.falters.store(0, Ordering::Relaxed);
    let done = mend(&sites.here, &sites.newest, &[there]);
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
}

#[test]
fn a_chunk_that_is_packed_otherwise_elsewhere_is_refused_and_nothing_is_changed() {
    // Into another length.
    let sites = Sites::new(19);
    let here = place(&sites.here, &sites.newest, PACKED).1;
    let there = place(&sites.there, &sites.theirs, PACKED).1;
    assert_ne!(here.stored_bytes, there.stored_bytes);
    sites.must_refuse("packed otherwise");

    // Into as many bytes, of which one is another one: no reader looks at this bit of the header of a frame.
    let sites = Sites::new(LEVEL_DEFAULT);
    let (object, chunk) = place(&sites.there, &sites.theirs, PACKED);
    let theirs = sites.there_dir.path().join("objects").join(object.to_string());
    let unused_bit_at = chunk.offset + 4;
    flip(&theirs, unused_bit_at);
    assert!(check(&sites.there, &sites.theirs).is_sound());
    sites.must_refuse("its hash is not its name");
    flip(&theirs, unused_bit_at);
    let done = sites.mend();
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
}

#[test]
fn of_an_object_with_more_damage_only_what_is_stored_as_it_is_is_repaired_from_another_one() {
    let sites = Sites::new(LEVEL_DEFAULT);
    // The older version alone needs this one, and no other store has it.
    spoil(sites.dir.path(), place(&sites.here, &sites.older, 0));
    sites.spoil(&[PACKED, AS_IT_IS]);
    let done = sites.mend();
    assert_eq!((done.chunks, done.left.damaged_chunks), (1, 1), "{:?}", done.reasons);
    assert_eq!(done.left.damaged[0].image_offset, PACKED * CHUNK_BYTES as u64);
    assert_eq!(done.reasons.len(), 1, "{:?}", done.reasons);
    assert!(done.reasons[0].contains("it is damaged elsewhere too"), "{:?}", done.reasons);
    assert_eq!(check(&sites.here, &sites.older).damaged_chunks, 2);
}

#[test]
fn a_chunk_is_repaired_from_another_data_object_of_the_store_itself() {
    let (dir, here) = store();
    let mut disk = vec![0; 4 * CHUNK_BYTES];
    words(&mut disk, 1);
    let version = import_bytes(&here, "disk", &disk).version;
    let path = object_path(dir.path(), &version);
    let good = fs::read(&path).unwrap();
    spoil(dir.path(), place(&here, &version, 2));
    // An import of the same disk finds it damaged, and stores it again.
    assert_eq!(import_bytes(&here, "again", &disk).damaged_chunks, 1);
    let done = mend(&here, &version, &[]);
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
}
