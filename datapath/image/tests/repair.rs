//! Damage is repaired from a store that has the same version, or reported with the files that it touches.

mod fixture;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fixture::{flip, import_bytes, noise, read_all, store};
use headwater_image::verify::DAMAGED_LISTED_MAX;
use headwater_image::{
    Cancel, ChunkCache, ImageErrorKind, Round, Verified, VersionReader, files_touched, repair,
    repair_manifest, verify, verify_in, versions_touched,
};
use headwater_store::{
    Access, Hash, Image, ImageName, LocalDir, Object, Patch, Pin, Publication, Removed, Store, StoreError,
    Version,
};
use headwater_testkit::run;

fn object_path(dir: &Path, version: &Version) -> PathBuf {
    dir.join("objects").join(version.objects[0].to_string())
}

fn check(store: &LocalDir, version: &Version) -> Verified {
    verify(store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap()
}

fn mend(store: &LocalDir, version: &Version, sources: &[Arc<dyn Store>]) -> headwater_image::Repaired {
    repair(store, version.manifest, &check(store, version), sources, &Round::new(None), &Cancel::new())
        .unwrap()
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

/// A store that notes the most bytes that were put right at once, and how many were read of its objects.
struct Noting(LocalDir, AtomicUsize, Arc<AtomicU64>);

impl Noting {
    fn new(store: LocalDir) -> Self {
        Self(store, AtomicUsize::new(0), Arc::default())
    }

    /// The bytes that were read since the last time.
    fn take_read(&self) -> u64 {
        self.2.swap(0, Ordering::Relaxed)
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
        self.0.chunk_bytes()
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.0.images()
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        self.0.image(name)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.0.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(NotingObject(self.0.open_object(id)?, Arc::clone(&self.2))))
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.0.pin(manifest)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        self.0.publish()
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.0.change(name, change)
    }

    fn mend(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        self.1.fetch_max(patches.iter().map(|patch| patch.bytes.len()).sum(), Ordering::Relaxed);
        self.0.mend(object, patches)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.0.remove(name, number)
    }
}

#[test]
fn any_number_of_chunks_is_repaired_in_little_memory() {
    const CHUNK: usize = 4096;
    let mut disk = vec![0; (DAMAGED_LISTED_MAX + 500) * CHUNK];
    noise(&mut disk, 1);
    let small = || {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(dir.path(), Access::Write { new_chunk_bytes: CHUNK as u32 }).unwrap();
        (dir, store)
    };
    let ((dir, here), (_other_dir, other)) = (small(), small());
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "copy", &disk);
    let path = object_path(dir.path(), &version);
    let good = fs::read(&path).unwrap();
    let mut bad = good.clone();
    for at in (64..bad.len()).step_by(CHUNK / 2) {
        bad[at] ^= 1;
    }
    File::options().write(true).open(&path).unwrap().write_all_at(&bad, 0).unwrap();
    let found = check(&here, &version);
    assert_eq!(found.damaged_chunks, DAMAGED_LISTED_MAX as u64 + 500);
    let (here, sources): (_, [Arc<dyn Store>; 1]) = (Noting::new(here), [Arc::new(other)]);
    let done = repair(&here, version.manifest, &found, &sources, &Round::new(None), &Cancel::new()).unwrap();
    assert!(done.left.is_sound(), "{} are left", done.left.damaged_chunks);
    assert_eq!((done.chunks, done.reasons.len()), (found.damaged_chunks, 0));
    assert!(fs::read(&path).unwrap() == good);
    let most = here.1.load(Ordering::Relaxed);
    assert!((1..(32 << 20) + 2 * CHUNK).contains(&most), "{most} bytes at once");
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
    let mut options = headwater_image::ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
    options.unless_newest = true;
    let source = fixture::disk_of(disk);
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
    let touched =
        files_touched(&store, version.manifest, &found.damaged, &Round::new(None), &Cancel::new()).unwrap();
    assert_eq!((touched.files, touched.remarks), (vec!["partition 0: /two".to_owned()], vec![]));
    // The search reads 3 MiB and more, and holds the rate of its round, too.
    let (began, round) = (Instant::now(), Round::new(Some(6 << 20)));
    let touched = files_touched(&store, version.manifest, &found.damaged, &round, &Cancel::new()).unwrap();
    assert_eq!(touched.files, ["partition 0: /two"]);
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
    assert!(
        files_touched(&store, version.manifest, &[], &Round::new(None), &Cancel::new())
            .unwrap()
            .files
            .is_empty()
    );
    // A version that cannot be opened at all is told so.
    fs::remove_file(&path).unwrap();
    let touched =
        files_touched(&store, version.manifest, &found.damaged, &Round::new(None), &Cancel::new()).unwrap();
    assert_eq!((touched.files.len(), touched.remarks.len()), (0, 1));
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
    let touched = versions_touched(&here, &found, &round, &Cancel::new()).unwrap();
    assert_eq!(touched, ["disk@1", "disk@2"]);
    here.take_read();
    // What was repaired is read again, and nothing else.
    let done = repair(&here, first.manifest, &found, &sources, &round, &Cancel::new()).unwrap();
    assert_eq!((done.chunks, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!((1..FEW_BYTES).contains(&here.take_read()));
    assert!(check(&second, &round).is_sound());
    assert!((1..FEW_BYTES).contains(&here.take_read()));
}
