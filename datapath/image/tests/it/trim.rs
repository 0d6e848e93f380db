//! Space that removed versions used in objects that other versions need: a removal frees exactly this space.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::fixture::{flip, import_bytes, noise, read_all, store};
use headwater_image::{Cancel, ChunkCache, Manifest, Manifests, VerifyRound, VersionReader, repair, verify};
use headwater_store::{Access, Hash, LocalDir, Store, Version};
use headwater_testkit::Rng;

const CHUNK: usize = 65_536;
const CHUNKS: usize = 24;

fn manifest_of(store: &LocalDir, version: &Version) -> Manifest {
    Manifest::decode(&store.manifest(version.manifest).unwrap()).unwrap()
}

fn remove(store: &LocalDir, image: &str, version: &Version) -> u64 {
    let removed = store.remove(&image.parse().unwrap(), Some(version.number)).unwrap();
    removed.freed_bytes + store.trim(&Manifests).unwrap()
}

/// The space that an object takes on the disk; 0 if it does not exist.
fn taken_bytes(dir: &Path, object: &Hash) -> u64 {
    let Ok(file) = File::open(dir.join("objects").join(object.to_string())) else { return 0 };
    file.sync_all().unwrap();
    file.metadata().unwrap().blocks() * 512
}

/// The space that these versions need in an object: each chunk, one block at each of its ends, which it may
/// share with other chunks, and the header.
fn needed_bytes(store: &LocalDir, versions: &[&Version], object: &Hash) -> u64 {
    let mut places = HashSet::new();
    for version in versions {
        let manifest = manifest_of(store, version);
        let in_it = |number: u32| manifest.objects()[number as usize].id == *object;
        let chunks = manifest.data().filter(|(_, chunk)| in_it(chunk.object));
        places.extend(chunks.map(|(_, chunk)| (chunk.offset, chunk.stored_bytes)));
    }
    4096 + places.iter().map(|(_, stored)| u64::from(*stored) + 2 * 4096).sum::<u64>()
}

fn has(store: &dyn Store, version: &Version, disk: &[u8]) -> bool {
    let reader = VersionReader::open(store, version.manifest, ChunkCache::new(4 << 20)).unwrap();
    read_all(&*reader) == disk
        && verify(store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap().is_sound()
}

/// Two versions. The second one has a third of the first one, and half of that is compressible.
fn with_two() -> (tempfile::TempDir, LocalDir, [(Version, Vec<u8>); 2]) {
    let (dir, store) = store();
    let mut disk = vec![0; CHUNKS * CHUNK + 1536];
    noise(&mut disk, 1);
    for chunk in 0..CHUNKS / 2 {
        disk[chunk * CHUNK + CHUNK / 3..][..CHUNK / 2].fill(chunk as u8);
    }
    let first = import_bytes(&store, "disk", &disk).version;
    let before = disk.clone();
    for chunk in (0..CHUNKS).filter(|chunk| chunk % 3 > 0) {
        noise(&mut disk[chunk * CHUNK..][..CHUNK], 100 + chunk as u64);
    }
    let second = import_bytes(&store, "disk", &disk).version;
    (dir, store, [(first, before), (second, disk)])
}

#[test]
fn a_removal_frees_the_bytes_of_that_version_only() {
    let (dir, store, [(first, before), (second, disk)]) = with_two();
    let object = first.objects[0];
    let taken = taken_bytes(dir.path(), &object);
    let freed = remove(&store, "disk", &first);
    let left = taken_bytes(dir.path(), &object);
    assert!(left <= needed_bytes(&store, &[&second], &object), "{left} bytes are left of {taken}");
    // The manifest was removed, too.
    assert!(freed >= taken - left && freed < taken - left + 65_536, "{freed} of {taken} to {left}");
    assert!(has(&store, &second, &disk));
    // The next version of the same disk refers to what the store has, and nothing is stored again.
    let again = import_bytes(&store, "other", &disk);
    assert_eq!(again.shared_bytes, again.data_bytes);
    // Freed content is stored as new content.
    let third = import_bytes(&store, "disk", &before).version;
    assert!(has(&store, &third, &before) && has(&store, &second, &disk));
    assert!(third.stored_bytes > taken / 4, "{third:?}");
}

#[test]
fn damage_beside_holes_is_repaired_from_any_store() {
    for with_holes in [false, true] {
        let (dir, store, [(first, before), (second, disk)]) = with_two();
        let elsewhere = tempfile::tempdir().unwrap();
        let other = LocalDir::open(elsewhere.path(), Access::WRITE).unwrap();
        let what = headwater_store::copy::everything(&store).unwrap();
        headwater_store::copy(&store, &other, &what, &Manifests, true, &mut |_| Ok(())).unwrap();
        remove(&store, "disk", &first);
        if with_holes {
            remove(&other, "disk", &first);
        }
        let object = manifest_of(&store, &second).objects()[0].id;
        let path = dir.path().join("objects").join(object.to_string());
        let other: Arc<dyn Store> = Arc::new(other);
        let round = VerifyRound::new(None);
        let check = || verify(&store, second.manifest, &Cancel::new(), &mut |_| {}).unwrap();
        let repair_all = |found| {
            let sources = [Arc::clone(&other)];
            repair(&store, second.manifest, found, (&round, &sources), &Cancel::new(), &mut |_| {}).unwrap()
        };
        // A chunk.
        flip(&path, 100);
        let found = check();
        assert_eq!(found.damaged_chunks, 1);
        let done = repair_all(&found);
        assert!(done.left.is_sound() && has(&store, &second, &disk), "{:?}", done.reasons);
        // The whole object, and its list of holes.
        std::fs::remove_file(&path).unwrap();
        assert!(repair_all(&check()).left.is_sound() && has(&store, &second, &disk));
        // The list is correct afterwards: another store can copy the object with it.
        let third = tempfile::tempdir().unwrap();
        let third = LocalDir::open(third.path(), Access::WRITE).unwrap();
        let what = headwater_store::copy::everything(&store).unwrap();
        let copied = headwater_store::copy(&store, &third, &what, &Manifests, true, &mut |_| Ok(())).unwrap();
        assert!(copied.failed.is_empty() && has(&third, &second, &disk), "{copied:?}");
        let first_there = !with_holes && has(&*other, &first, &before);
        assert_eq!(first_there, !with_holes);
    }
}

#[test]
fn a_lost_object_is_copied_from_a_complete_source() {
    let (dir, store, [(first, before), (second, _)]) = with_two();
    // The first source does not need the first version, and has freed its part.
    let elsewhere = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let sources: Vec<Arc<dyn Store>> = elsewhere
        .iter()
        .enumerate()
        .map(|(number, dir)| {
            let other = LocalDir::open(dir.path(), Access::WRITE).unwrap();
            let what = headwater_store::copy::everything(&store).unwrap();
            headwater_store::copy(&store, &other, &what, &Manifests, true, &mut |_| Ok(())).unwrap();
            if number == 0 {
                remove(&other, "disk", &first);
            }
            Arc::new(other) as Arc<dyn Store>
        })
        .collect();
    let object = manifest_of(&store, &first).objects()[0].id;
    assert!(second.objects.contains(&object));
    std::fs::remove_file(dir.path().join("objects").join(object.to_string())).unwrap();
    let round = VerifyRound::new(None);
    let found = verify(&store, first.manifest, &Cancel::new(), &mut |_| {}).unwrap();
    let from = |sources: &[Arc<dyn Store>]| {
        repair(&store, first.manifest, &found, (&round, sources), &Cancel::new(), &mut |_| {}).unwrap()
    };
    let none = from(&sources[..1]);
    assert!(!none.left.is_sound());
    assert!(none.reasons.iter().any(|why| why.contains("has deleted parts")), "{:?}", none.reasons);
    let done = from(&sources);
    assert!(done.left.is_sound() && has(&store, &first, &before), "{:?}", done.reasons);
}

/// Versions are added to two stores and removed from them, and the stores copy from each other. Each listed
/// version stays complete, and no unneeded space stays.
#[test]
fn versions_in_two_changing_stores_stay_complete() {
    for seed in 1..7 {
        history(seed);
    }
}

type Kept = BTreeMap<u32, (Version, Vec<u8>)>;

fn history(seed: u64) {
    let mut rng = Rng::new(seed);
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let stores = dirs.each_ref().map(|dir| LocalDir::open(dir.path(), Access::WRITE).unwrap());
    let mut disks: [Vec<u8>; 2] = [vec![0; CHUNKS * CHUNK], vec![0; CHUNKS * CHUNK]];
    let mut kept: [Kept; 2] = [Kept::new(), Kept::new()];
    for step in 0..28 {
        let at = rng.below(2) as usize;
        match rng.below(8) {
            0..=2 => {
                for _ in 0..=rng.below(6) {
                    let chunk = &mut disks[at][rng.below(CHUNKS as u64) as usize * CHUNK..][..CHUNK];
                    // Few different contents, so that removed content appears again.
                    noise(chunk, rng.below(40));
                    if rng.below(2) == 0 {
                        chunk[..CHUNK / 2].fill(3);
                    }
                }
                let imported = import_bytes(&stores[at], &format!("disk-{at}"), &disks[at]);
                // An import may repeat the newest version, so each import is a version.
                kept[at].insert(
                    1000 * at as u32 + imported.version.number,
                    (imported.version, disks[at].clone()),
                );
            }
            3..=5 => {
                let numbers: Vec<u32> = kept[at].keys().copied().collect();
                if numbers.len() > 1 {
                    let number = numbers[rng.below(numbers.len() as u64) as usize];
                    let (version, _) = kept[at].remove(&number).unwrap();
                    remove(&stores[at], &format!("disk-{}", number / 1000), &version);
                }
            }
            _ => {
                let what = headwater_store::copy::everything(&stores[1 - at]).unwrap();
                let copied = headwater_store::copy(
                    &stores[1 - at],
                    &stores[at],
                    &what,
                    &Manifests,
                    false,
                    &mut |_| Ok(()),
                )
                .unwrap();
                assert!(copied.failed.is_empty(), "seed {seed}, step {step}: {:?}", copied.failed);
                let theirs = kept[1 - at].clone();
                kept[at].extend(theirs);
            }
        }
        for (store, kept) in stores.iter().zip(&kept) {
            for (version, disk) in kept.values() {
                assert!(has(store, version, disk), "seed {seed}, step {step}: version {}", version.number);
            }
        }
    }
    // A range that a copy restored is checked when a version that shares the object is removed next.
    for ((store, mut left), dir) in stores.iter().zip(kept).zip(&dirs) {
        while let Some((number, (version, _))) = left.pop_first() {
            remove(store, &format!("disk-{}", number / 1000), &version);
            assert!(left.values().all(|(version, disk)| has(store, version, disk)), "seed {seed}");
            let versions: Vec<&Version> = left.values().map(|(version, _)| version).collect();
            for object in &version.objects {
                let (taken, needed) =
                    (taken_bytes(dir.path(), object), needed_bytes(store, &versions, object));
                assert!(taken <= needed, "seed {seed}: {taken} bytes of {object} for {needed}");
            }
        }
        for folder in ["objects", "holes"] {
            assert!(std::fs::read_dir(dir.path().join(folder)).unwrap().next().is_none(), "{folder}");
        }
    }
}
