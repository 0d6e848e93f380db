//! Compaction in a store to which versions are added and from which versions are removed: new versions copy
//! the needed chunks out of data objects that are mostly unneeded, so the size of a store follows its present
//! content, and not all content that it ever had.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::fixture::{disk_of, files, flip, import_bytes, noise, read_all, store};
use headwater_block::{ByteRange, IoErrorKind};
use headwater_image::{
    Basis, Cancel, ChunkCache, ImportOptions, Imported, Manifest, VersionReader, import, verify,
};
use headwater_store::{Access, Hash, LocalDir, Store, Version};
use headwater_testkit::{Rng, on_small_file_system, test_name};

const CHUNK: usize = 65_536;
const CHUNKS: usize = 48;
/// Versions that are kept.
const KEPT: usize = 3;

/// Seals `new`, which was made from `parent`.
fn seal(store: &LocalDir, parent: Hash, old: &[u8], new: &[u8]) -> Imported {
    let differs: Vec<bool> = old.chunks(4096).zip(new.chunks(4096)).map(|(a, b)| a != b).collect();
    let changes = move |range: ByteRange, max: usize| {
        let mut runs: Vec<(u64, bool)> = Vec::new();
        for block in range.offset() / 4096..range.end().div_ceil(4096) {
            let (changed, len) = (differs[block as usize], 4096.min(range.end() - block * 4096));
            let is_full = runs.len() == max.min(7);
            match runs.last_mut() {
                Some((so_far, last)) if *last == changed => *so_far += len,
                _ if is_full => break,
                _ => runs.push((len, changed)),
            }
        }
        runs
    };
    let mut options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
    options.basis = Some(Basis { parent, changes: Arc::new(changes) });
    import(disk_of(new.to_vec()), store, &options, &mut |_| {}).unwrap()
}

fn remove(store: &LocalDir, version: &Version) {
    store.remove(&"disk".parse().unwrap(), Some(version.number)).unwrap();
}

fn manifest_of(store: &LocalDir, version: &Version) -> Manifest {
    Manifest::decode(&store.manifest(version.manifest).unwrap()).unwrap()
}

/// A disk with `count` changed chunks: one anywhere, the others in its second half, so that most of an object
/// is soon unneeded.
fn changed(disk: &[u8], count: usize, rng: &mut Rng) -> Vec<u8> {
    let mut out = disk.to_vec();
    for n in 0..count {
        let at = if n == 0 { rng.below(CHUNKS as u64) } else { 24 + rng.below(24) };
        noise(&mut out[at as usize * CHUNK..][..CHUNK], rng.next_u64());
    }
    out
}

/// 52 weeks. Each week, `next` makes a version from the previous one, and all versions that are kept are read
/// completely.
fn a_year(mut next: impl FnMut(&LocalDir, Hash, &[u8], &[u8]) -> Imported) {
    let (dir, store) = store();
    let mut rng = Rng::new(11);
    let mut disk = vec![0; CHUNKS * CHUNK];
    noise(&mut disk, 1);
    let mut kept = vec![(import_bytes(&store, "disk", &disk).version, disk)];
    let (mut came, mut first_carried) = (0, 0);
    for week in 0..52 {
        let (newest, before) = kept.last().unwrap();
        let disk = changed(before, 6, &mut rng);
        let imported = next(&store, newest.manifest, before, &disk);
        came += imported.version.stored_bytes;
        let distinct = before.chunks(CHUNK).zip(disk.chunks(CHUNK)).filter(|(a, b)| a != b).count();
        let more = imported.version.stored_bytes > ((distinct + 1) * CHUNK) as u64;
        if more && first_carried == 0 {
            first_carried = week;
        }
        kept.push((imported.version, disk));
        if kept.len() > KEPT {
            remove(&store, &kept.remove(0).0);
        }
        let mut needed = HashSet::new();
        for (version, disk) in &kept {
            let found = verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
            assert!(found.is_sound(), "week {week}: {found:?}");
            let reader = VersionReader::open(&store, version.manifest, ChunkCache::new(8 << 20)).unwrap();
            assert!(read_all(&*reader) == *disk, "week {week}");
            needed.extend(manifest_of(&store, version).data().map(|(_, chunk)| chunk.hash));
        }
        // An object stays at most a third longer than the versions that need it. For that time the chunks
        // that they need are in the store twice.
        let objects: u64 =
            files(dir.path()).iter().filter(|(name, _)| name.starts_with("objects/")).map(|f| f.1).sum();
        let needed = (needed.len() * CHUNK) as u64;
        assert!(objects < needed * 5 / 2, "week {week}: {objects} bytes for {needed}");
    }
    assert!(first_carried > 2, "nothing is carried out while all that came is needed, and something later");
    assert!(came > (6 * CHUNKS * CHUNK) as u64 / 2, "{came} bytes came, and too few to show anything");
}

#[test]
fn the_size_of_a_store_of_imports_follows_its_versions() {
    a_year(|store, _, _, disk| import_bytes(store, "disk", disk));
}

#[test]
fn the_size_of_a_store_of_seals_follows_its_versions() {
    a_year(|store, parent, before, disk| {
        let sealed = seal(store, parent, before, disk);
        let distinct = before.chunks(CHUNK).zip(disk.chunks(CHUNK)).filter(|(a, b)| a != b).count();
        assert_eq!(sealed.read_bytes, (distinct * CHUNK) as u64, "what is carried out is no change");
        sealed
    });
}

/// A store whose first object is needed only for a quarter, by a version that was made from another one.
fn with_a_sparse_object() -> (tempfile::TempDir, LocalDir, Version, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let (store, version, disk) = with_a_sparse_object_in(dir.path());
    (dir, store, version, disk)
}

fn with_a_sparse_object_in(dir: &Path) -> (LocalDir, Version, Vec<u8>) {
    let store = LocalDir::open(dir, Access::WRITE).unwrap();
    // The last chunk is shorter than the others.
    let mut disk = vec![0; CHUNKS * CHUNK + 1536];
    noise(&mut disk, 1);
    let first = import_bytes(&store, "disk", &disk).version;
    noise(&mut disk[..CHUNKS * CHUNK * 3 / 4], 2);
    let second = import_bytes(&store, "disk", &disk).version;
    remove(&store, &first);
    (store, second, disk)
}

fn import_unless_newest(store: &LocalDir, disk: &[u8]) -> Imported {
    let mut options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
    options.unless_newest = true;
    import(disk_of(disk.to_vec()), store, &options, &mut |_| {}).unwrap()
}

fn is_sound(store: &LocalDir, version: &Version) -> bool {
    verify(store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap().is_sound()
}

/// The sparse object that a version needs, and where its last chunk is in it.
fn sparse_object(dir: &Path, store: &LocalDir, version: &Version) -> (PathBuf, u64) {
    let manifest = manifest_of(store, version);
    let (_, last) = manifest.data().last().unwrap();
    (dir.join(format!("objects/{}", manifest.objects()[last.object as usize].id)), last.offset)
}

#[test]
fn the_same_disk_again_makes_no_new_version_for_compaction() {
    let (dir, store, newest, disk) = with_a_sparse_object();
    let before = files(dir.path());
    let again = import_unless_newest(&store, &disk);
    assert_eq!((again.is_new, again.version.number), (false, newest.number));
    assert_eq!(again.shared_bytes, again.data_bytes);
    assert_eq!(files(dir.path()), before, "nothing is left of it");
    // Another image needs nothing of the sparse object, so the object is removed with the version that needs
    // it.
    let other = import_bytes(&store, "other", &disk).version;
    let (sparse, _) = sparse_object(dir.path(), &store, &newest);
    assert_ne!(sparse_object(dir.path(), &store, &other).0, sparse);
    // Now the store has all chunks twice. The same disk still makes no new version.
    assert!(!import_unless_newest(&store, &disk).is_new);
    remove(&store, &newest);
    assert!(!sparse.exists() && is_sound(&store, &other));
}

#[test]
fn a_newest_version_with_damage_in_a_sparse_object_is_made_again() {
    let (dir, store, newest, disk) = with_a_sparse_object();
    let (sparse, at) = sparse_object(dir.path(), &store, &newest);
    flip(&sparse, at + 100);
    let again = import_unless_newest(&store, &disk);
    assert!(again.is_new && is_sound(&store, &again.version) && !is_sound(&store, &newest));
    // The same if the store has those chunks in a second place.
    let (dir, store, newest, disk) = with_a_sparse_object();
    import_bytes(&store, "other", &disk);
    std::fs::remove_file(sparse_object(dir.path(), &store, &newest).0).unwrap();
    let again = import_unless_newest(&store, &disk);
    assert!(again.is_new && is_sound(&store, &again.version));
}

#[test]
fn a_seal_refers_to_no_damaged_second_copy() {
    let (dir, store, newest, disk) = with_a_sparse_object();
    let other = import_bytes(&store, "other", &disk).version;
    let (copy, at) = sparse_object(dir.path(), &store, &other);
    flip(&copy, at + 100);
    let mut after = disk.clone();
    noise(&mut after[..4096], 9);
    let sealed = seal(&store, newest.manifest, &disk, &after);
    assert_eq!(sealed.read_bytes, CHUNK as u64);
    assert!(is_sound(&store, &sealed.version) && !is_sound(&store, &other));
    remove(&store, &newest);
    let reader = VersionReader::open(&store, sealed.version.manifest, ChunkCache::new(8 << 20)).unwrap();
    assert!(read_all(&*reader) == after);
}

#[test]
fn unreadable_chunks_to_compact_do_not_prevent_a_seal() {
    let (_dir, store, newest, disk) = with_a_sparse_object();
    let mut after = disk.clone();
    noise(&mut after[..4096], 9);
    let source = disk_of(after.clone());
    // The machine's disk has the damage of the version below it, in a chunk of the sparse object.
    source.fail(ByteRange::new(40 * CHUNK as u64, 512).unwrap(), IoErrorKind::Device);
    let changes = Arc::new(|range: ByteRange, _: usize| match range.offset() {
        0 => vec![(4096, true), (range.len() - 4096, false)],
        _ => vec![(range.len(), false)],
    });
    let mut options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
    options.basis = Some(Basis { parent: newest.manifest, changes });
    let sealed = import(source, &store, &options, &mut |_| {}).unwrap();
    assert_eq!(sealed.read_bytes, CHUNK as u64);
    assert_eq!(
        manifest_of(&store, &sealed.version).objects().len(),
        3,
        "all are as they were, and the change"
    );
    let reader = VersionReader::open(&store, sealed.version.manifest, ChunkCache::new(8 << 20)).unwrap();
    assert!(read_all(&*reader) == after);
}

#[test]
fn nothing_is_compacted_unless_all_versions_can_be_read() {
    let (dir, store, newest, disk) = with_a_sparse_object();
    let other = import_bytes(&store, "other", &[7; CHUNK]).version;
    flip(&dir.path().join(format!("manifests/{}", other.manifest)), 50);
    let mut after = disk;
    noise(&mut after[..4096], 9);
    let next = import_bytes(&store, "disk", &after).version;
    assert_eq!(manifest_of(&store, &next).objects().len(), manifest_of(&store, &newest).objects().len() + 1);
}

#[test]
fn a_full_store_seals_changes_without_compaction() {
    let dir = tempfile::tempdir().unwrap();
    let this = test_name(a_full_store_seals_changes_without_compaction);
    on_small_file_system(this, dir.path(), 8, |dir| {
        let (store, newest, disk) = with_a_sparse_object_in(&dir.join("store"));
        let mut ballast = File::create(dir.join("ballast")).unwrap();
        // There is space left for a quarter of the chunks to copy.
        while free_bytes(dir) > 3 * CHUNK as u64 {
            ballast.write_all(&[7; 4096]).unwrap();
        }
        let mut after = disk.clone();
        noise(&mut after[..4096], 9);
        let sealed = seal(&store, newest.manifest, &disk, &after).version;
        assert!(is_sound(&store, &sealed) && manifest_of(&store, &sealed).objects().len() == 3);
        // With enough space the chunks are copied.
        drop(ballast);
        std::fs::remove_file(dir.join("ballast")).unwrap();
        let mut last = after.clone();
        noise(&mut last[..4096], 10);
        let sealed = seal(&store, sealed.manifest, &after, &last).version;
        assert!(is_sound(&store, &sealed) && manifest_of(&store, &sealed).objects().len() == 2);
    });
}

fn free_bytes(dir: &Path) -> u64 {
    let stats = rustix::fs::statvfs(dir).unwrap();
    stats.f_bavail * stats.f_frsize
}
