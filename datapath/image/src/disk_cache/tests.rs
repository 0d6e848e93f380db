//! Tests of the chunk cache on disk: bounds, damage, crashes, retained versions.

use super::*;

const CAPACITY: u64 = DISK_CACHE_MIN_BYTES;

fn chunk(n: u32) -> (Hash, Vec<u8>) {
    let bytes = n.to_le_bytes().repeat(25_000);
    (Hash::of(&bytes), bytes)
}

/// Opens a cache that was just closed. A child process of another test holds the lock for a moment, between
/// its fork and its exec.
pub fn open_again(dir: &Path) -> Arc<DiskCache> {
    let mut opened = None;
    headwater_testkit::wait_until("the cache is not in use", || {
        let result = DiskCache::open(dir, CAPACITY);
        let is_busy = result.as_ref().is_err_and(|e| e.kind() == ImageErrorKind::Busy);
        opened = Some(result);
        !is_busy
    });
    opened.unwrap().unwrap()
}

fn put(cache: &DiskCache, n: u32) {
    let (hash, bytes) = chunk(n);
    cache.put(&hash, &bytes);
}

/// Whether a chunk is cached and right.
fn has(cache: &DiskCache, n: u32) -> bool {
    let (hash, bytes) = chunk(n);
    let mut got = Vec::new();
    cache.get(&hash, &mut got) && got == bytes
}

fn bytes_on_disk(dir: &Path) -> u64 {
    let segments = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    segments
        .filter(|e| e.file_name().to_string_lossy().starts_with("segment-"))
        .map(|e| e.metadata().unwrap().len())
        .sum()
}

/// From now on the segment accepts writes, and syncs fail: its file is replaced by one that is not on a disk.
pub fn fail_syncs(cache: &DiskCache, number: u64) {
    let no_file = File::options().read(true).write(true).open("/dev/null").unwrap();
    cache.state.lock().segment_mut(number).unwrap().file = Arc::new(no_file);
}

/// Syncs, and expects that to fail for a segment. Its chunks can still be read.
pub fn sync_in_vain(cache: &DiskCache, number: u64) {
    let file = Arc::clone(&cache.state.lock().segment_mut(number).unwrap().file);
    fail_syncs(cache, number);
    let failed = cache.sync().unwrap_err().to_string();
    assert!(failed.contains(&format!("segment-{number}")), "{failed}");
    cache.state.lock().segment_mut(number).unwrap().file = file;
}

#[test]
fn unsynced_chunks_are_lacking_and_all_others_synced() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let known = |range: std::ops::Range<u32>| range.filter(|n| !cache.lacks(&chunk(*n).0)).count();
    let durable = |range: std::ops::Range<u32>| range.filter(|n| cache.is_durable(&chunk(*n).0)).count();
    // Each segment has 41 chunks.
    (0..50).for_each(|n| put(&cache, n));
    fail_syncs(&cache, 0);
    let failed = cache.sync().unwrap_err().to_string();
    assert!(failed.contains("segment-0"), "{failed}");
    assert_eq!((known(0..41), known(41..50)), (0, 9));
    assert_eq!((durable(0..41), durable(41..50)), (0, 9));
    // The next sync has nothing left that fails, and makes no lost chunk durable.
    cache.sync().unwrap();
    assert_eq!((known(0..41), cache.counters().failures), (0, 1));

    // Durable chunks stay durable, whatever is added to the same segment.
    (50..60).for_each(|n| put(&cache, n));
    fail_syncs(&cache, 1);
    assert!(cache.sync().unwrap_err().to_string().contains("segment-1"));
    assert_eq!((known(41..50), known(50..60)), (9, 0));
    // Chunks that are put again go to another segment.
    (50..60).for_each(|n| put(&cache, n));
    assert_eq!((known(50..60), durable(50..60)), (10, 0));
    cache.sync().unwrap();
    assert!((50..60).all(|n| has(&cache, n)));
    assert_eq!((durable(41..50), durable(50..60)), (9, 10));

    // A later process learns it from the file's name, because the system does not report the failure again:
    // the chunks are read, and must be written again.
    drop(cache);
    let cache = open_again(dir.path());
    assert!((0..60).all(|n| has(&cache, n)));
    cache.sync().unwrap();
    let (lacking, durable): (Vec<u32>, Vec<u32>) = (0..60).partition(|n| cache.lacks(&chunk(*n).0));
    assert_eq!((lacking, durable), ((0..50).collect(), (50..60).collect()));
    (0..50).for_each(|n| put(&cache, n));
    cache.sync().unwrap();
    assert!((0..60).all(|n| cache.is_durable(&chunk(n).0)));
}

#[test]
fn unsynced_chunks_are_readable_and_evicted_first() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let _kept = cache.keep(Hash::of(b"v"), (41..82).map(|n| (chunk(n).0, 100_000))).unwrap();
    // Each segment has 41 chunks.
    (0..90).for_each(|n| put(&cache, n));
    sync_in_vain(&cache, 1);
    assert!((0..90).all(|n| has(&cache, n)));
    assert!((0..90).all(|n| cache.lacks(&chunk(n).0) == (41..82).contains(&n)));
    // A chunk that is written once more is in another segment, and becomes durable there.
    put(&cache, 41);
    assert!(!cache.lacks(&chunk(41).0));
    cache.sync().unwrap();
    assert!(cache.is_durable(&chunk(41).0) && !cache.is_durable(&chunk(42).0));
    for n in 1000..2000 {
        if !dir.path().join("lost-1").exists() {
            break;
        }
        put(&cache, n);
    }
    // It is not the oldest segment, and all its other chunks are retained.
    assert!(!dir.path().join("lost-1").exists() && dir.path().join("segment-0").exists());
    assert!((0..42).chain(82..90).all(|n| has(&cache, n)) && (42..82).all(|n| !has(&cache, n)));
    assert_eq!(cache.counters().held_bytes, bytes_on_disk(dir.path()));
}

#[test]
fn chunks_put_during_a_sync_are_not_durable_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    (0..3).for_each(|n| put(&cache, n));
    let to_sync = cache.state.lock().to_sync(0).unwrap();
    // One chunk is found damaged and fetched again, and another one is new: both are in the same segment.
    cache.forget(&chunk(1).0, &"a bit flipped");
    put(&cache, 1);
    put(&cache, 3);
    cache.state.lock().was_synced(0, &to_sync.chunks);
    let durable = || (0..4).map(|n| cache.is_durable(&chunk(n).0)).collect::<Vec<_>>();
    assert_eq!(durable(), [true, false, true, false]);
    cache.sync().unwrap();
    assert_eq!(durable(), [true; 4]);
    // Nothing is left that fails.
    fail_syncs(&cache, 0);
    cache.sync().unwrap();
    assert_eq!(durable(), [true; 4]);
}

#[test]
fn durable_chunks_stay_durable_after_failed_moves_and_syncs() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let _kept = cache.keep(Hash::of(b"v"), (0..20).map(|n| (chunk(n).0, 100_000))).unwrap();
    // Half of a segment is retained, and half of that is durable.
    (100..105).chain(0..10).for_each(|n| put(&cache, n));
    cache.sync().unwrap();
    (105..116).chain(10..20).for_each(|n| put(&cache, n));
    // The disk is full at the destination.
    let moving = dir.path().join("moving");
    std::os::unix::fs::symlink("/dev/full", &moving).unwrap();
    for n in 1000..2000 {
        if cache.counters().failures > 0 {
            break;
        }
        put(&cache, n);
    }
    assert!(!moving.is_symlink() && dir.path().join("segment-0").exists(), "the segment was not moved");
    assert!((0..20).all(|n| has(&cache, n)) && (100..116).all(|n| !has(&cache, n)));
    sync_in_vain(&cache, 0);
    assert!((0..10).all(|n| cache.is_durable(&chunk(n).0)));
    assert!((10..20).all(|n| cache.lacks(&chunk(n).0)));
}

#[test]
fn golden_bytes_of_the_mark() {
    let dir = tempfile::tempdir().unwrap();
    drop(DiskCache::open(dir.path(), CAPACITY).unwrap());
    let written = fs::read(dir.path().join("cache")).unwrap();
    assert_eq!(written, [b'H', b'W', b'C', b'H', b'U', b'N', b'K', b'S', 1, 0, 0, 0, 0, 0, 0, 0]);
    // A directory of an earlier release is read.
    drop(open_again(dir.path()));
}

#[test]
fn an_interrupted_cache_creation_is_repeated() {
    for cut in [&[][..], &[0; 16]] {
        let dir = tempfile::tempdir().unwrap();
        let in_dir = |name: &str| dir.path().join(name);
        fs::write(in_dir("lock"), "").unwrap();
        fs::write(in_dir("cache"), cut).unwrap();
        fs::write(in_dir("cache-part"), &MARK[..5]).unwrap();
        drop(DiskCache::open(dir.path(), CAPACITY).unwrap());
        assert_eq!(fs::read(in_dir("cache")).unwrap(), MARK);
        assert!(!in_dir("cache-part").exists());
        // An empty file of that name does not turn other files into a cache.
        fs::write(in_dir("cache"), cut).unwrap();
        fs::write(in_dir("letter.txt"), "dear").unwrap();
        let refused = DiskCache::open(dir.path(), CAPACITY).unwrap_err().to_string();
        assert!(refused.contains("letter.txt"), "{refused}");
    }
}

#[test]
fn chunks_are_found_again_by_the_next_process() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    (0..50).for_each(|n| put(&cache, n));
    assert!((0..50).all(|n| has(&cache, n)) && !has(&cache, 50));
    let busy = DiskCache::open(dir.path(), CAPACITY).unwrap_err();
    assert_eq!(busy.kind(), ImageErrorKind::Busy);
    drop(cache);
    let cache = open_again(dir.path());
    assert!((0..50).all(|n| has(&cache, n)));
    put(&cache, 50);
    assert!(has(&cache, 50) && has(&cache, 49));
    assert_eq!(cache.counters().held_bytes, bytes_on_disk(dir.path()));
}

#[test]
fn the_cache_keeps_its_limit_and_used_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    put(&cache, 0);
    for n in 1..2000 {
        assert!(has(&cache, 0), "before {n}");
        put(&cache, n);
        assert!(bytes_on_disk(dir.path()) <= CAPACITY);
    }
    assert!(has(&cache, 1999) && !has(&cache, 1));
    assert!(cache.counters().evictions > 1000);
    drop(cache);
    // Surplus segments are removed if the limit becomes smaller.
    let small = open_again(dir.path());
    assert!(has(&small, 1999) && bytes_on_disk(dir.path()) <= CAPACITY);
}

#[test]
fn a_retained_version_stays_whatever_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let kept = cache.keep(Hash::of(b"v"), (0..400).map(|n| (chunk(n).0, 100_000))).unwrap();
    (0..3000).for_each(|n| put(&cache, n));
    assert!((0..400).all(|n| has(&cache, n)));
    assert!(bytes_on_disk(dir.path()) <= CAPACITY);
    let too_large = cache.keep(Hash::of(b"w"), (1000..1200).map(|n| (chunk(n).0, 100_000))).unwrap_err();
    assert_eq!(too_large.kind(), ImageErrorKind::NoSpace);
    drop(kept);
    // Two rounds: in the first one each chunk stays because it was used.
    (3000..6000).for_each(|n| put(&cache, n));
    assert!((0..400).filter(|n| has(&cache, *n)).count() < 100);
}

#[test]
fn segments_of_retained_chunks_only_are_not_moved() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let _kept = cache.keep(Hash::of(b"v"), (0..500).map(|n| (chunk(n).0, 100_000))).unwrap();
    (0..500).for_each(|n| put(&cache, n));
    let next_number = || cache.state.lock().next_number;
    // Each segment has 41 chunks; the last of them is not retained.
    let places = || {
        let state = cache.state.lock();
        (0..492).map(|n| state.index.get(&chunk(n).0).unwrap().segment).collect::<Vec<_>>()
    };
    let before = places();
    for n in 1000..3000 {
        let before = next_number();
        put(&cache, n);
        assert!(next_number() - before <= 2, "one put moved several segments");
    }
    assert!(places() == before, "a segment of retained chunks was moved");
    assert!((0..500).all(|n| has(&cache, n)) && has(&cache, 2999));
    assert!(bytes_on_disk(dir.path()) <= CAPACITY);
}

#[test]
fn space_is_made_if_all_segments_have_retained_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let is_kept = |n: &u32| !n.is_multiple_of(6);
    let _kept = cache.keep(Hash::of(b"v"), (0..580).filter(is_kept).map(|n| (chunk(n).0, 100_000))).unwrap();
    (0..580).for_each(|n| put(&cache, n));
    for n in 1000..1500 {
        let before = cache.state.lock().next_number;
        put(&cache, n);
        assert!(cache.state.lock().next_number - before <= 2, "one put moved several segments");
        assert!(bytes_on_disk(dir.path()) <= CAPACITY);
    }
    assert!((0..580).filter(is_kept).all(|n| has(&cache, n)));
    assert!((1400..1500).filter(|n| has(&cache, *n)).count() > 10, "{:?}", cache.counters());
}

#[test]
fn a_process_that_ends_anywhere_leaves_complete_chunks_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    (0..5).for_each(|n| put(&cache, n));
    drop(cache);
    let path = dir.path().join("segment-0");
    let whole = fs::read(&path).unwrap();
    for len in (0..whole.len()).step_by(9973) {
        fs::remove_file(dir.path().join("segment-1")).unwrap_or_default();
        fs::write(&path, &whole[..len]).unwrap();
        let cache = open_again(dir.path());
        let expected = u32::try_from(len / (100_000 + RECORD_HEADER_BYTES)).unwrap();
        for n in 0..5 {
            assert_eq!(has(&cache, n), n < expected, "chunk {n} of {len} bytes");
        }
        put(&cache, 4);
        assert!(has(&cache, 4));
    }
}

#[test]
fn records_after_a_failed_write_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    (0..3).for_each(|n| put(&cache, n));
    // The disk is full for a moment: nothing, or only a part, is written where the chunk should be.
    cache.claim(100_048).unwrap().unwrap();
    put(&cache, 3);
    let (_, file, at) = cache.claim(300_048).unwrap().unwrap();
    file.write_all_at(&record_header(&Hash::of(b"cut"), 300_000)[..20], at).unwrap();
    (4..10).for_each(|n| put(&cache, n));
    drop(cache);
    let cache = open_again(dir.path());
    assert_eq!((0..10).filter(|n| has(&cache, *n)).count(), 10);
    // A record with a damaged header is the only one lost.
    drop(cache);
    let segment = File::options().write(true).open(dir.path().join("segment-0")).unwrap();
    segment.write_all_at(&[0], 100_048 + 9).unwrap();
    let cache = open_again(dir.path());
    assert_eq!((0..10).filter(|n| !has(&cache, *n)).collect::<Vec<_>>(), [1]);
}

#[test]
fn damaged_chunks_are_dropped_and_foreign_directories_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    put(&cache, 1);
    // The cache detects a truncated file; the reader detects changed bytes.
    File::options().write(true).open(dir.path().join("segment-0")).unwrap().set_len(1000).unwrap();
    assert!(!has(&cache, 1));
    assert_eq!(cache.counters().damaged, 1);
    put(&cache, 1);
    assert!(has(&cache, 1));

    let foreign = tempfile::tempdir().unwrap();
    fs::write(foreign.path().join("letter.txt"), "dear").unwrap();
    let refused = DiskCache::open(foreign.path(), CAPACITY).unwrap_err().to_string();
    assert!(refused.contains("letter.txt"), "{refused}");
    let later = tempfile::tempdir().unwrap();
    fs::write(later.path().join("cache"), b"HWCHUNKS\x02\0\0\0\0\0\0\0").unwrap();
    assert_eq!(DiskCache::open(later.path(), CAPACITY).unwrap_err().kind(), ImageErrorKind::Unsupported);
    assert_eq!(DiskCache::open(later.path(), 1000).unwrap_err().kind(), ImageErrorKind::Invalid);
}

#[test]
fn of_duplicate_records_the_newer_one_counts() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    // Each segment has 41 chunks.
    (0..450).for_each(|n| put(&cache, n));
    drop(cache);
    // The process ended when the first segment had been copied and not yet removed.
    fs::copy(dir.path().join("segment-0"), dir.path().join("segment-20")).unwrap();
    let cache = open_again(dir.path());
    {
        let state = cache.state.lock();
        assert!(state.segments.len() > SCANS_AT_A_TIME);
        for n in 0..450 {
            let expected = if n < 41 { 20 } else { u64::from(n) / 41 };
            assert_eq!(state.index.get(&chunk(n).0).unwrap().segment, expected, "chunk {n}");
        }
        let numbers: Vec<u64> = state.segments.iter().map(|segment| segment.number).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20]);
        assert_eq!(state.next_number, 21);
    }
    assert!((0..450).all(|n| has(&cache, n)));
    assert_eq!(cache.counters().held_bytes, bytes_on_disk(dir.path()));
}

#[test]
fn a_segment_with_an_interrupted_move_is_removed_first() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    // As many as fit.
    (0..615).for_each(|n| put(&cache, n));
    drop(cache);
    // Twenty chunks of a segment in the middle were to stay and are copied; the others were to be dropped.
    let moved = fs::read(dir.path().join("segment-5")).unwrap();
    fs::write(dir.path().join("segment-20"), &moved[..20 * (RECORD_HEADER_BYTES + 100_000)]).unwrap();
    let cache = open_again(dir.path());
    assert!(!dir.path().join("segment-5").exists());
    for n in 0..615 {
        let was_to_go = (5 * 41 + 20..6 * 41).contains(&n);
        assert_eq!(has(&cache, n), !was_to_go, "chunk {n}");
    }
}

#[test]
fn symbolic_links_instead_of_its_files_are_not_followed() {
    let links = tempfile::tempdir().unwrap();
    let target = links.path().join("target");
    let link = |at: &Path| std::os::unix::fs::symlink(&target, at).unwrap();
    for name in ["lock", "cache"] {
        let dir = tempfile::tempdir().unwrap();
        link(&dir.path().join(name));
        assert!(DiskCache::open(dir.path(), CAPACITY).is_err(), "{name}");
        assert!(!target.exists(), "{name}");
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    fs::create_dir(dir.path().join("traces")).unwrap();
    // Whatever the number in the file's name.
    (0..4096).for_each(|n| link(&dir.path().join("traces").join(format!("part-{n}"))));
    link(&dir.path().join("segment-0"));
    assert!(cache.set_trace(Hash::of(b"m"), Some(b"trace")).is_err());
    put(&cache, 1);
    assert!(!target.exists() && !has(&cache, 1));
    drop(cache);
    assert!(DiskCache::open(dir.path(), CAPACITY).is_err());
}

#[test]
fn traces_are_kept_beside_the_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let manifest = Hash::of(b"m");
    assert_eq!(cache.trace(manifest), None);
    cache.set_trace(manifest, Some(b"trace")).unwrap();
    assert_eq!(cache.trace(manifest).as_deref(), Some(&b"trace"[..]));
    cache.set_trace(manifest, None).unwrap();
    cache.set_trace(manifest, None).unwrap();
    assert_eq!(cache.trace(manifest), None);
}

#[test]
fn a_retained_version_stays_during_concurrent_puts() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let _kept = cache.keep(Hash::of(b"v"), (0..400).map(|n| (chunk(n).0, 100_000))).unwrap();
    (0..400).for_each(|n| put(&cache, n));
    let wrong = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 1..5 {
            let cache = &cache;
            scope.spawn(move || (0..1000).for_each(|n| put(cache, thread * 10_000 + n)));
        }
        // They can be read all the time, even while they are moved.
        scope.spawn(|| {
            for n in (0..400).cycle().take(4000) {
                wrong.fetch_add(u32::from(!has(&cache, n)), Ordering::Relaxed);
            }
        });
    });
    let lost = (0..400).filter(|n| !has(&cache, *n)).count();
    assert_eq!((lost, wrong.into_inner()), (0, 0));
    assert!(cache.counters().evictions > 100, "{:?}", cache.counters());
    assert!(bytes_on_disk(dir.path()) <= CAPACITY);
    assert_eq!(cache.counters().held_bytes, bytes_on_disk(dir.path()));
}

#[test]
fn a_retained_version_stays_if_it_cannot_be_moved() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let kept = cache.keep(Hash::of(b"v"), (0..300).map(|n| (chunk(n).0, 100_000))).unwrap();
    // Each segment also has a chunk that is not retained, so that its removal frees something.
    (0..300).for_each(|n| [n, 50_000 + n].iter().for_each(|n| put(&cache, *n)));
    // The disk is always full at the destination.
    let moving = dir.path().join("moving");
    let mut next = 1000;
    let mut fail_once = || {
        std::os::unix::fs::symlink("/dev/full", &moving).unwrap();
        let before = cache.counters().failures;
        while cache.counters().failures == before {
            put(&cache, next);
            next += 1;
            assert!(next < 10_000, "nothing failed");
        }
        assert!(!moving.is_symlink(), "the file of the failed move is removed");
    };
    fail_once();
    fail_once();
    assert!((0..300).all(|n| has(&cache, n)));
    // The cache works again as soon as the disk does.
    (20_000..21_000).for_each(|n| put(&cache, n));
    assert!((0..300).all(|n| has(&cache, n)) && has(&cache, 20_999));
    assert!(bytes_on_disk(dir.path()) <= CAPACITY);
    // Unretained chunks are dropped rather than stopping the cache.
    drop(kept);
    assert!((0..300).all(|n| has(&cache, n)));
    std::os::unix::fs::symlink("/dev/full", &moving).unwrap();
    (30_000..33_000).for_each(|n| put(&cache, n));
    assert!(has(&cache, 32_999));
}

#[test]
fn a_shrunk_cache_stays_in_bounds_while_moving_chunks() {
    let dir = tempfile::tempdir().unwrap();
    // Segments of 16 MiB, of which a smaller cache has room for three, and 4 MiB to move a segment.
    let cache = DiskCache::open(dir.path(), CAPACITY * 4).unwrap();
    (0..450).for_each(|n| put(&cache, n));
    drop(cache);
    let cache = open_again(dir.path());
    let longest = |cache: &DiskCache| {
        let state = cache.state.lock();
        state.segments.iter().map(|segment| segment.len).max().unwrap_or_default()
    };
    assert!(longest(&cache) <= cache.segment_bytes, "one of {} bytes is left", longest(&cache));
    assert_eq!(cache.counters().held_bytes, bytes_on_disk(dir.path()));
    // The cache continues as usual, and never exceeds its limit.
    let _kept = cache.keep(Hash::of(b"v"), (0..450).map(|n| (chunk(n).0, 100_000))).unwrap();
    for n in (0..450).chain(1000..2000) {
        put(&cache, n);
        assert!(bytes_on_disk(dir.path()) <= CAPACITY);
    }
    assert!((0..450).all(|n| has(&cache, n)));
}

#[test]
fn a_process_that_ends_while_it_moves_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    (0..10).for_each(|n| put(&cache, n));
    drop(cache);
    fs::write(dir.path().join("moving"), vec![1; 5000]).unwrap();
    let cache = open_again(dir.path());
    assert!((0..10).all(|n| has(&cache, n)) && !dir.path().join("moving").exists());
}

#[test]
fn a_version_with_chunks_that_are_too_large_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let refused = cache.keep(Hash::of(b"v"), [(Hash::of(b"c"), 3 << 20)].into_iter()).unwrap_err();
    assert_eq!(refused.kind(), ImageErrorKind::NoSpace);
    assert!(refused.to_string().contains("chunks"), "{refused}");
}

#[test]
fn shared_chunks_are_kept_once() {
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(dir.path(), CAPACITY).unwrap();
    let keep = |name: &[u8], chunks: std::ops::Range<u32>| {
        cache.keep(Hash::of(name), chunks.map(|n| (chunk(n).0, 100_000)))
    };
    // 40 of at most 52 MiB; each further version has a few chunks of its own.
    let first = keep(b"1", 0..400).unwrap();
    let second = keep(b"2", 5..405).unwrap();
    let _third = keep(b"3", 10..410).unwrap();
    let _again = keep(b"3", 10..410).unwrap();
    let refused = keep(b"4", 400..600).err().unwrap();
    assert_eq!(refused.kind(), ImageErrorKind::NoSpace);
    (0..3000).for_each(|n| put(&cache, n));
    assert!((0..410).all(|n| has(&cache, n)));
    // Chunks that only the first two versions have no longer count.
    drop((first, second));
    assert_eq!(keep(b"5", 405..540).err().map(|e| e.kind()), None);
}
