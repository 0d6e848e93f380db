//! Imports, and reading the versions again.

use crate::fixture::{self, disk_of, files, hung_disk, import_bytes, noise, read_all, store};
use headwater_block::{ByteRange, Device, ExtentKind, IoErrorKind, VOLUME_MAX_BYTES, blocking};
use headwater_image::{
    Cancel, ChunkCache, ImageErrorKind, ImportOptions, VersionReader, import, null_device,
};
use headwater_store::{Access, LocalDir, Store};
use headwater_testkit::{ReferenceDisk, ReferenceOptions};
use proptest::prelude::*;
use std::sync::Arc;

#[test]
fn an_image_comes_back_as_it_went_in() {
    let (_dir, store) = store();
    let mut disk = vec![0; (5 << 20) + 1536];
    noise(&mut disk[100_000..900_000], 1);
    disk[2 << 20..3 << 20].fill(7);
    noise(&mut disk[5 << 20..], 2);
    let imported = import_bytes(&store, "disk", &disk);
    assert_eq!(imported.version.size_bytes, disk.len() as u64);
    let cache = ChunkCache::new(64 << 20);
    let reader = VersionReader::open(&store, imported.version.manifest, Arc::clone(&cache)).unwrap();
    assert_eq!(read_all(reader.as_ref()), disk);
    let counters = cache.counters();
    // 14 chunks of noise from 100,000 to 900,000 (1..=13), one of sevens, one at the end.
    assert_eq!(counters.fetches, reader.outline().data_chunks() - 15, "equal chunks are fetched once");
    assert_eq!(blocking::write(reader.as_ref(), 0, &[0; 512]).unwrap_err().kind(), IoErrorKind::ReadOnly);

    let whole = ByteRange::new(0, disk.len() as u64).unwrap();
    let kinds: Vec<_> = reader.extents(whole, 100).unwrap();
    assert_eq!(kinds.iter().map(|e| e.len).sum::<u64>(), disk.len() as u64);
    assert_eq!(
        kinds.iter().map(|e| e.kind == ExtentKind::Data).collect::<Vec<_>>(),
        [false, true, false, true, false, true]
    );
}

#[test]
fn an_impossible_disk_is_refused_before_anything_is_written() {
    let (dir, store) = store();
    let before = files(dir.path());
    let options = ImportOptions::new("disk".parse().unwrap(), 0);
    let source = null_device(VOLUME_MAX_BYTES + 512).unwrap();
    let error = import(source, &store, &options, &mut |_| {}).unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Invalid);
    assert!(error.to_string().contains("a machine's disk can have at most 17592186036224"), "{error}");
    assert_eq!(files(dir.path()), before);
}

#[test]
fn the_number_of_threads_does_not_change_the_version() {
    let mut disk = vec![0; 24 << 20];
    noise(&mut disk, 3);
    // Equal chunks that are far apart, so that different workers get them.
    for n in 0..20usize {
        let from = (n * 37 % 300) * 65_536;
        disk.copy_within(from..from + 65_536, (n * 101 % 380) * 65_536);
    }
    let mut versions = Vec::new();
    for threads in [1, 2, 3, 8] {
        for _ in 0..3 {
            let (_dir, store) = store();
            let mut options = ImportOptions::new("disk".parse().unwrap(), 0);
            options.threads = Some(threads);
            let source = disk_of(disk.clone());
            versions.push(import(source, &store, &options, &mut |_| {}).unwrap().version.manifest);
        }
    }
    versions.dedup();
    assert_eq!(versions.len(), 1);
}

#[test]
fn equal_chunks_are_stored_once_across_versions_and_images() {
    let (_dir, store) = store();
    let mut disk = vec![0; 8 << 20];
    noise(&mut disk[..4 << 20], 4);
    let first = import_bytes(&store, "a", &disk);
    assert_eq!((first.data_bytes, first.shared_bytes), (4 << 20, 0));

    let again = import_bytes(&store, "b", &disk);
    assert_eq!(again.version.manifest, first.version.manifest);
    assert_eq!((again.shared_bytes, again.version.stored_bytes), (4 << 20, 0));

    noise(&mut disk[6 << 20..(6 << 20) + 65_536], 5);
    let third = import_bytes(&store, "a", &disk);
    assert_eq!(third.version.number, 2);
    assert_eq!(third.version.objects.len(), 2);
    assert_eq!((third.data_bytes, third.shared_bytes), ((4 << 20) + 65_536, 4 << 20));

    // What the second version shares stays when the first one is removed.
    store.remove(&"b".parse().unwrap(), None).unwrap();
    store.remove(&"a".parse().unwrap(), Some(1)).unwrap();
    let reader = VersionReader::open(&store, third.version.manifest, ChunkCache::new(1 << 20)).unwrap();
    assert_eq!(read_all(reader.as_ref()), disk);
    let error = store.remove(&"a".parse().unwrap(), None).unwrap_err();
    assert_eq!(error.kind(), headwater_store::StoreErrorKind::InUse);
}

#[test]
fn an_image_of_zeroes_needs_only_a_manifest() {
    let (_dir, store) = store();
    let imported = import_bytes(&store, "empty", &vec![0; 3 << 20]);
    assert_eq!((imported.data_bytes, imported.version.objects.len()), (0, 0));
    assert_eq!(imported.version.stored_bytes, 88);
    let reader = VersionReader::open(&store, imported.version.manifest, ChunkCache::new(0)).unwrap();
    assert_eq!(read_all(reader.as_ref()), vec![0; 3 << 20]);
}

#[test]
fn a_cancelled_or_failed_import_leaves_nothing() {
    let (dir, store) = store();
    let before = fixture::files(dir.path());
    let mut disk = vec![0; 32 << 20];
    noise(&mut disk, 6);

    let cancel = Cancel::new();
    let mut options = ImportOptions::new("disk".parse().unwrap(), 0);
    options.cancel = cancel.clone();
    let mut last = 0;
    let source = disk_of(disk.clone());
    let error = import(source, &store, &options, &mut |progress| {
        assert!(progress.done_bytes >= last && progress.total_bytes == 32 << 20);
        last = progress.done_bytes;
        if last > 8 << 20 {
            cancel.cancel();
        }
    })
    .unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Cancelled);
    assert_eq!(fixture::files(dir.path()), before);

    let source = disk_of(disk);
    source.fail(ByteRange::new(20 << 20, 512).unwrap(), IoErrorKind::Device);
    let options = ImportOptions::new("disk".parse().unwrap(), 0);
    let error = import(source, &store, &options, &mut |_| {}).unwrap_err();
    assert!(error.to_string().starts_with("injected failure of "), "{error}");
    assert_eq!(fixture::files(dir.path()), before);
}

#[test]
fn an_import_from_a_source_that_hangs_can_be_cancelled() {
    let (dir, store) = store();
    let before = fixture::files(dir.path());
    let source = hung_disk();
    let mut options = ImportOptions::new("disk".parse().unwrap(), 0);
    let cancel = Cancel::new();
    options.cancel = cancel.clone();
    let cut = Arc::clone(&source);
    let error = import(source, &store, &options, &mut |progress| {
        assert_eq!(progress.done_bytes, 0);
        cancel.cancel();
        // For example, its server goes away: waiting requests fail, and so do new ones.
        cut.fail(ByteRange::new(0, 8 << 20).unwrap(), IoErrorKind::Closed);
        cut.release();
    })
    .unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Cancelled);
    assert_eq!(fixture::files(dir.path()), before);
}

#[test]
fn odd_sources_are_refused() {
    let (dir, store) = store();
    let before = fixture::files(dir.path());
    // With blocks of 512 bytes it could not have these sizes.
    let blocks_of_eight = ReferenceOptions { logical_block_bytes: 8, ..Default::default() };
    for (len, says) in [(0, "empty"), (1000, "multiple of 512")] {
        let options = ImportOptions::new("disk".parse().unwrap(), 0);
        let source = ReferenceDisk::with_contents(vec![1; len], blocks_of_eight.clone());
        let source = Arc::new(source);
        let error = import(source, &store, &options, &mut |_| {}).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Invalid);
        assert!(error.to_string().contains(says), "{error}");
    }
    assert_eq!(fixture::files(dir.path()), before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Any disk made of a few kinds of pieces, any chunk size, read in any pieces.
    #[test]
    fn any_disk_round_trips(
        pieces in proptest::collection::vec((0u8..5, 1usize..120), 1..30),
        chunk_shift in 12u32..18,
        reads in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..20),
        capacity in 0u64..(2 << 20),
    ) {
        let mut disk = Vec::new();
        for (kind, sectors) in pieces {
            let start = disk.len();
            disk.resize(start + sectors * 512, 0);
            match kind {
                0 | 1 => {}
                2 => disk[start..].fill(9),
                seed => noise(&mut disk[start..], u64::from(seed)),
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(dir.path(), Access::Write { new_chunk_bytes: 1 << chunk_shift }).unwrap();
        let version = import_bytes(&store, "disk", &disk).version;
        let reader = VersionReader::open(&store, version.manifest, ChunkCache::new(capacity)).unwrap();
        for (a, b) in reads {
            let (a, b) = (a.index(disk.len() / 512), b.index(disk.len() / 512));
            let (from, to) = (a.min(b) * 512, (a.max(b) + 1) * 512);
            let mut out = vec![1; to - from];
            blocking::read(reader.as_ref(), from as u64, &mut out).unwrap();
            prop_assert!(out == disk[from..to], "{}..{}", from, to);
        }
        prop_assert!(read_all(reader.as_ref()) == disk);
    }
}
