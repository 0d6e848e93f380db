//! Damage is repaired from a store that has the same version.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Noting, check, object_path, repair_object, repair_with_progress};
use crate::fixture::{disk_of, flip, import_bytes, noise, read_all, store};
use headwater_image::verify::DAMAGED_LISTED_MAX;
use headwater_image::{
    Cancel, ChunkCache, ImageErrorKind, ImportOptions, Manifests, Progress, RepairProgress, Verified,
    VerifyRound, VersionReader, repair, repair_manifest, verify_in, versions_touched,
};
use headwater_store::{Access, Copied, LocalDir, Store, Version};

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
    // This reader is open all the time: a repair in place is visible to readers that have the object open.
    let reader = VersionReader::open(&here, version.manifest, ChunkCache::new(0)).unwrap();

    assert_eq!(repair_object(&here, &version, &sources), headwater_image::Repaired::default());
    for at in [20, 70_000, 1_000_000, good.len() as u64 - 1] {
        flip(&path, at);
    }
    let done = repair_object(&here, &version, &sources);
    assert_eq!((done.chunks, done.objects, done.left.is_sound()), (4, 0, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
    assert!(read_all(reader.as_ref()) == disk);

    flip(&path, 3);
    assert_eq!(repair_object(&here, &version, &sources).objects, 1);
    File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    assert_eq!(repair_object(&here, &version, &sources).objects, 1);
    fs::remove_file(&path).unwrap();
    assert_eq!(repair_object(&here, &version, &sources).objects, 1);
    assert!(fs::read(&path).unwrap() == good);
    assert!(check(&here, &version).is_sound());

    // What is damaged in the other store too stays damaged, and the rest is repaired.
    let theirs = object_path(other_dir.path(), &version);
    flip(&theirs, 100);
    flip(&path, 90);
    flip(&path, 200_000);
    let done = repair_object(&here, &version, &sources);
    assert_eq!((done.chunks, done.left.damaged_chunks, done.reasons.len()), (1, 1, 1));
    assert!(done.reasons[0].contains("hash"), "{:?}", done.reasons);
    let done = repair_object(&here, &version, &[]);
    assert_eq!((done.chunks, done.left.damaged_chunks), (0, 1));
    assert!(done.reasons[0].contains("no other store"), "{:?}", done.reasons);
    // A second source has it.
    let (_kept, third) = store();
    import_bytes(&third, "disk", &disk);
    let done = repair_object(&here, &version, &[Arc::new(other), Arc::new(third)]);
    assert!(done.left.is_sound(), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
}

#[test]
fn a_repair_reports_repaired_places_and_their_rereading() {
    let mut disk = vec![0; 4 << 20];
    noise(&mut disk[..2 << 20], 1);
    let ((dir, here), (_other_dir, other)) = (store(), store());
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "copy", &disk);
    let sources: [Arc<dyn Store>; 1] = [Arc::new(other)];
    let path = object_path(dir.path(), &version);
    let len_bytes = fs::metadata(&path).unwrap().len();
    let mended = |sources: &[Arc<dyn Store>]| {
        let mut reported = Vec::new();
        let done = repair_with_progress(&here, &version, sources, &mut |at| reported.push(at));
        let again = reported.iter().position(|at| matches!(at, RepairProgress::Verifying(_)));
        let repairing = reported[..again.unwrap_or(reported.len())].to_vec();
        (done, repairing, again.map(|_| reported[reported.len() - 1]))
    };
    let at = |done, listed, copied_bytes| RepairProgress::Repairing { done, listed, copied_bytes };
    let through = RepairProgress::Verifying(Progress { done_bytes: 4 << 20, total_bytes: 4 << 20 });

    assert_eq!(mended(&sources).1, []);
    for place in [20, 70_000, 1_000_000] {
        flip(&path, place);
    }
    // No source has the chunks: each chunk was tried, and nothing needs to be read again.
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

    // If an object is copied as a whole, its chunks are repaired with it.
    fs::remove_file(&path).unwrap();
    let (done, repairing, again) = mended(&sources);
    assert_eq!((done.objects, again), (1, Some(through)));
    assert_eq!(repairing.first(), Some(&at(0, 1 + 32, 0)));
    assert_eq!(repairing.last(), Some(&at(1 + 32, 1 + 32, len_bytes)));
}

/// The smallest chunks.
const SMALL: usize = 4096;

/// A store with the smallest chunks.
fn small_chunks() -> (tempfile::TempDir, LocalDir) {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(dir.path(), Access::Write { new_chunk_bytes: SMALL as u32 }).unwrap();
    (dir, store)
}

#[test]
fn many_chunks_are_repaired_in_little_memory_without_space() {
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
    let round = VerifyRound::new(None);
    let done =
        repair(&here, version.manifest, &found, (&round, &sources), &Cancel::new(), &mut |_| {}).unwrap();
    assert!(done.left.is_sound(), "{} are left", done.left.damaged_chunks);
    assert_eq!((done.chunks, done.reasons.len()), (found.damaged_chunks, 0));
    assert!(fs::read(&path).unwrap() == good);
    let most = here.patched_bytes.load(Ordering::Relaxed);
    assert!((1..(32 << 20) + 2 * SMALL).contains(&most), "{most} bytes at once");
}

/// A disk on which all chunks are different.
fn numbered_chunks(count: usize) -> Vec<u8> {
    let mut disk = vec![0; count * SMALL];
    for (chunk, number) in disk.chunks_mut(SMALL).zip(1_u64..) {
        chunk[..8].copy_from_slice(&number.to_le_bytes());
    }
    disk
}

/// More chunks are damaged than are listed, so that the repair has a second pass.
#[test]
fn an_object_without_enough_space_is_tried_once_per_repair() {
    const CHUNKS: usize = DAMAGED_LISTED_MAX + 500;
    let ((dir, here), (_other_dir, other)) = (small_chunks(), small_chunks());
    let disk = numbered_chunks(CHUNKS);
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&other, "copy", &disk);
    let path = object_path(dir.path(), &version);
    let good = fs::read(&path).unwrap();
    // The header is damaged, too, so the object cannot be used as a whole.
    File::options().write(true).open(&path).unwrap().write_all_at(&vec![0; good.len()], 0).unwrap();
    let found = check(&here, &version);
    assert_eq!((found.objects.len(), found.damaged_chunks), (1, CHUNKS as u64));
    let (here, sources): (_, [Arc<dyn Store>; 1]) = (Noting::new(here), [Arc::new(other)]);
    let repair_object = |found: &Verified| {
        let how = (&VerifyRound::new(None), sources.as_slice());
        repair(&here, version.manifest, found, how, &Cancel::new(), &mut |_| {}).unwrap()
    };
    here.is_full.store(true, Ordering::Relaxed);
    let done = repair_object(&found);
    assert_eq!((done.chunks, done.objects, done.left.objects.len()), (CHUNKS as u64, 0, 1));
    assert_eq!((done.left.damaged_chunks, here.refusals.load(Ordering::Relaxed)), (0, 1));
    // The reason is reported nevertheless.
    assert_eq!(done.reasons.len(), 1, "{:?}", done.reasons);
    assert!(done.reasons[0].contains("there is no room"), "{:?}", done.reasons);
    // The next repair looks for room again.
    here.is_full.store(false, Ordering::Relaxed);
    let done = repair_object(&done.left);
    assert_eq!((done.objects, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
}

/// Without this, all that is still damaged would be read again after each ten thousand chunks.
#[test]
fn a_completely_damaged_object_is_copied_without_rereading() {
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
    let round = VerifyRound::new(None);
    let done =
        repair(&here, version.manifest, &found, (&round, &sources), &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((done.objects, done.chunks, done.left.is_sound()), (1, 0, true), "{:?}", done.reasons);
    assert!(done.reasons.is_empty() && fs::read(&path).unwrap() == good);
    let (most, read_bytes) = (2 * good.len() as u64, [here.take_read(), there.take_read()]);
    assert!(read_bytes.iter().all(|read_bytes| *read_bytes < most), "{read_bytes:?} of {}", good.len());
    assert_eq!(here.patched_bytes.load(Ordering::Relaxed), 0);
    // A reader that has the old file open finds the new one.
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
    // The pin still protects the version.
    assert!(here.remove(&"disk".parse().unwrap(), Some(1)).is_err());
    drop(pin);

    // An import of the same bytes repairs it as well.
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
    // A version that was removed does not come back.
    here.remove(&"disk".parse().unwrap(), Some(1)).unwrap();
    assert_eq!(
        repair_manifest(&here, version.manifest, &sources).unwrap_err().kind(),
        ImageErrorKind::NotFound
    );
}

#[test]
fn a_verification_holds_its_rate() {
    let mut disk = vec![0; 2 << 20];
    noise(&mut disk, 5);
    let (_kept, store) = store();
    let version = import_bytes(&store, "disk", &disk).version;
    let began = Instant::now();
    let found =
        verify_in(&store, version.manifest, &VerifyRound::new(Some(4 << 20)), &Cancel::new(), &mut |_| {})
            .unwrap();
    assert!(found.is_sound());
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
}

#[test]
fn a_round_reads_shared_chunks_once_and_reports_each_version() {
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
    let check = |version: &Version, round: &VerifyRound| {
        verify_in(&here, version.manifest, round, &Cancel::new(), &mut |_| {}).unwrap()
    };
    let round = VerifyRound::new(None);
    assert!(check(&first, &round).is_sound());
    assert!(here.take_read() >= 4 << 20);
    let found = check(&second, &round);
    assert_eq!((found.is_sound(), found.chunks), (true, 64));
    assert!((1..FEW_BYTES).contains(&here.take_read()));

    // The next round reads the whole object again, and the report of each version names what is damaged in
    // it.
    flip(&object_path(dir.path(), &first), 3 << 20);
    let round = VerifyRound::new(None);
    let found = check(&first, &round);
    assert_eq!((found.damaged_chunks, check(&second, &round).damaged_chunks), (1, 1));
    let mut reported = Vec::new();
    let mut report = |seen: u64, all: u64| reported.push((seen, all));
    let touched = versions_touched(&here, &found, &round, &Cancel::new(), &mut report).unwrap();
    assert_eq!(touched, ["disk@1", "disk@2"]);
    assert_eq!(reported, [(0, 2), (1, 2)]);
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
    headwater_store::copy(store, &target, &what, &Manifests, true, &mut |_| Ok(())).unwrap()
}

#[test]
fn unneeded_damaged_bytes_are_found_and_repaired_once_a_round() {
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
    // The result of a check, how many bytes it read, and the total of its last progress report.
    let verified = |version: &Version, round: &VerifyRound| {
        let mut reported = Vec::new();
        let report = &mut |at: Progress| reported.push((at.done_bytes, at.total_bytes));
        noting.take_read();
        let found = verify_in(&noting, version.manifest, round, &Cancel::new(), report).unwrap();
        let (done, total) = reported[reported.len() - 1];
        assert!(
            reported.is_sorted() && reported.iter().all(|(_, all)| *all == total) && done == total,
            "{reported:?}"
        );
        (found, noting.take_read(), total)
    };
    // While the first version is there, its chunks are all chunks of the object.
    let round = VerifyRound::new(None);
    let mut read_bytes = 0;
    for version in [&third, &second, &first] {
        let (found, more, total) = verified(version, &round);
        assert!(found.is_sound() && total == image_bytes, "{found:?}");
        read_bytes += more;
    }
    assert!((object_bytes..object_bytes + FEW_BYTES).contains(&read_bytes), "{read_bytes} bytes");

    here.remove(&"disk".parse().unwrap(), Some(1)).unwrap();
    // The last version of the round that needs the object reads it as a whole, once.
    let round = VerifyRound::new(None);
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
    let round = VerifyRound::new(None);
    assert!(verified(&second, &round).0.is_sound());
    let found = verified(&third, &round).0;
    assert_eq!((found.objects.len(), found.damaged_chunks), (1, 0), "{found:?}");
    assert!(found.damage()[0].contains("its hash is not the one in its name"), "{:?}", found.damage());
    let touched = versions_touched(&here, &found, &round, &Cancel::new(), &mut |_, _| {}).unwrap();
    assert_eq!(touched, ["disk@2", "disk@3"]);
    let copied = synced(&here);
    assert_eq!((copied.versions, copied.failed.len()), (0, 2), "{copied:?}");
    let repair_object = |sources: &[Arc<dyn Store>]| {
        repair(&here, third.manifest, &found, (&round, sources), &Cancel::new(), &mut |_| {}).unwrap()
    };
    let done = repair_object(&[]);
    assert_eq!((done.objects, done.left.objects.len(), done.reasons.len()), (0, 1, 1), "{done:?}");
    let sources: [Arc<dyn Store>; 1] = [Arc::new(other)];
    let done = repair_object(&sources);
    assert_eq!((done.objects, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good);
    let copied = synced(&here);
    assert_eq!((copied.versions, copied.failed.len()), (2, 0), "{copied:?}");
}

/// What no version needs is checked only when all chunks that are needed are right.
#[test]
fn a_repair_continues_with_newly_found_damage() {
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
    let done = repair_object(&here, &second, &[Arc::new(other)]);
    assert_eq!((done.chunks, done.objects, done.left.is_sound()), (1, 1, true), "{:?}", done.reasons);
    assert!(fs::read(&path).unwrap() == good && check(&here, &second).is_sound());
}
