//! Damage is repaired from a store that has the same version, or reported with the files that it touches.

mod fixture;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fixture::{import_bytes, noise, read_all, run_ok, store};
use headwater_image::{
    Cancel, ChunkCache, ImageErrorKind, Verified, VersionReader, files_touched, repair, repair_manifest,
    verify, verify_at,
};
use headwater_store::{LocalDir, Store, Version};

fn object_path(dir: &Path, version: &Version) -> PathBuf {
    dir.join("objects").join(version.objects[0].to_string())
}

fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

fn check(store: &LocalDir, version: &Version) -> Verified {
    verify(store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap()
}

fn mend(store: &LocalDir, version: &Version, sources: &[Arc<dyn Store>]) -> headwater_image::Repaired {
    repair(store, version.manifest, &check(store, version), sources, &Cancel::new()).unwrap()
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
    let source = Arc::new(fixture::MemoryDisk::new(disk));
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
    run_ok("mke2fs", &["-q", "-t", "ext4", "-d", tree.to_str().unwrap(), image.to_str().unwrap(), "16M"]);
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
    let touched = files_touched(&store, version.manifest, &found.damaged, &Cancel::new()).unwrap();
    assert_eq!((touched.files, touched.remarks), (vec!["partition 0: /two".to_owned()], vec![]));
    assert!(files_touched(&store, version.manifest, &[], &Cancel::new()).unwrap().files.is_empty());
    // A version that cannot be opened at all is told so.
    fs::remove_file(&path).unwrap();
    let touched = files_touched(&store, version.manifest, &found.damaged, &Cancel::new()).unwrap();
    assert_eq!((touched.files.len(), touched.remarks.len()), (0, 1));
}

#[test]
fn a_verification_holds_its_rate() {
    let mut disk = vec![0; 2 << 20];
    noise(&mut disk, 5);
    let (_kept, store) = store();
    let version = import_bytes(&store, "disk", &disk).version;
    let began = Instant::now();
    let found = verify_at(&store, version.manifest, Some(4 << 20), &Cancel::new(), &mut |_| {}).unwrap();
    assert!(found.is_sound());
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
}
