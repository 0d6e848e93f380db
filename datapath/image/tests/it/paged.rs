//! Versions with manifests so long that they are read in pages, when parts of the disk are used.

use std::fs::File;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::fixture::{flip, import_bytes, noise, read_all};
use headwater_block::{
    Attempt, ByteRange, Completion, Device, ExtentKind, IoError, IoErrorKind, Op, Request, blocking,
};
use headwater_image::{ChunkCache, Manifest, VersionReader, repair_manifest};
use headwater_store::{Access, Hash, LocalDir, Store};
use headwater_testkit::{Rng, wait_until};

const CHUNK: usize = 4096;
/// Chunks of a page.
const PAGE: usize = 1024;
const CHUNKS: usize = 9000;

/// A store of small chunks, so that a small disk has a long manifest.
fn small_chunks() -> (tempfile::TempDir, LocalDir) {
    let dir = tempfile::tempdir().unwrap();
    let access = Access::Write { new_chunk_bytes: CHUNK as u32 };
    let store = LocalDir::open(dir.path(), access).unwrap();
    (dir, store)
}

/// The disk in such a store.
struct Published {
    dir: tempfile::TempDir,
    store: LocalDir,
    disk: Vec<u8>,
    id: Hash,
}

fn published() -> Published {
    let (dir, store) = small_chunks();
    let disk = disk();
    let id = import_bytes(&store, "disk", &disk).version.manifest;
    Published { dir, store, disk, id }
}

/// Noise, with holes of chunks among it and a long one at its end.
fn disk() -> Vec<u8> {
    let mut disk = vec![0; CHUNKS * CHUNK];
    noise(&mut disk, 7);
    for chunk in (0..CHUNKS).filter(|chunk| chunk % 10 == 3 || *chunk > CHUNKS - 500) {
        disk[chunk * CHUNK..][..CHUNK].fill(0);
    }
    disk
}

fn open(store: &LocalDir, id: Hash) -> Arc<VersionReader> {
    VersionReader::open(store, id, ChunkCache::new(256 << 20)).unwrap()
}

/// Where the chunks of a manifest begin.
fn chunks_at(store: &LocalDir, id: Hash) -> u64 {
    let bytes = store.manifest(id).unwrap();
    bytes.len() as u64 - 48 * Manifest::decode(&bytes).unwrap().data_chunks()
}

fn read(device: &dyn Device, at: usize, len: usize) -> Result<Vec<u8>, IoError> {
    let mut bytes = vec![1; len];
    blocking::read(device, at as u64, &mut bytes).map(|()| bytes)
}

#[test]
fn every_part_reads_as_written_in_any_order() {
    let Published { dir: _dir, store, disk, id } = published();
    assert!(store.manifest_parts(id).unwrap().is_some(), "the manifest is too short for this test");
    assert!(read_all(&*open(&store, id)) == disk);
    let reader = open(&store, id);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (reader, disk) = (&reader, &disk);
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                for _ in 0..500 {
                    let at = rng.below(disk.len() as u64 - 512) as usize / 512 * 512;
                    // Within a chunk, across some, and across pages.
                    let most = [512, 64 << 10, 6 << 20][rng.below(3) as usize];
                    let len = (512 + rng.below(most) as usize / 512 * 512).min(disk.len() - at);
                    assert!(read(&**reader, at, len).unwrap() == disk[at..at + len], "{len} bytes at {at}");
                }
            });
        }
    });
    let whole = Manifest::decode(&store.manifest(id).unwrap()).unwrap();
    assert_eq!(*reader.manifest().unwrap(), whole);
    let all = ByteRange::new(0, disk.len() as u64).unwrap();
    let extents = open(&store, id).extents(all, usize::MAX).unwrap();
    let data: u64 = extents.iter().filter(|one| one.kind == ExtentKind::Data).map(|one| one.len).sum();
    assert_eq!(data, whole.data_chunks() * CHUNK as u64);
}

#[test]
fn only_requests_that_may_wait_wait_for_a_page() {
    let Published { dir: _dir, store, disk, id } = published();
    let reader = open(&store, id);
    let at = 2 * PAGE * CHUNK;
    let range = ByteRange::new(at as u64, CHUNK as u64).unwrap();
    let mut into = vec![1; CHUNK];
    let now = |into: &mut Vec<u8>| reader.try_now(Op::Read { range, into }).unwrap();
    assert_eq!(now(&mut into), Attempt::MustWait);
    let mut lent = Vec::new();
    assert!(!reader.peek(range, &mut into) && !reader.read_shared(range, &mut lent) && lent.is_empty());
    // A prefetch reads the page as well.
    blocking::wait(&*reader, Request::Prefetch { range }).unwrap();
    assert_eq!(now(&mut into), Attempt::Done);
    assert!(
        into == disk[at..at + CHUNK] && reader.peek(range, &mut into) && reader.read_shared(range, &mut lent)
    );
}

#[test]
fn boots_are_recorded_and_sequential_reads_prefetched() {
    let Published { dir: _dir, store, id, .. } = published();
    let reader = open(&store, id);
    reader.record(Duration::from_secs(600));
    // Up to the end of a page, because the next chunks are described in a page that nobody reads. Pages
    // describe chunks with data.
    let whole = Manifest::decode(&store.manifest(id).unwrap()).unwrap();
    let number = |place: usize| whole.data().nth(place).unwrap().0 as usize;
    let (first, end) = (number(PAGE - 64), number(PAGE));
    for chunk in first..end {
        read(&*reader, chunk * CHUNK, CHUNK).unwrap();
    }
    let next = ByteRange::new((number(PAGE + 10) * CHUNK) as u64, CHUNK as u64).unwrap();
    wait_until("the next page was fetched ahead", || reader.peek(next, &mut vec![0; CHUNK]));
    let trace = reader.recorded().unwrap();
    let mut noted: Vec<u64> = trace.chunks.iter().map(|touched| touched.chunk).collect();
    noted.sort_unstable();
    let expected: Vec<u64> = (first..end).filter(|chunk| chunk % 10 != 3).map(|chunk| chunk as u64).collect();
    assert_eq!(noted, expected);
}

#[test]
fn damage_in_a_page_affects_only_its_reads_until_repaired() {
    let Published { dir, store, disk, id } = published();
    let (_other_dir, other) = small_chunks();
    import_bytes(&other, "disk", &disk);
    // The damage is in the entry of the 3000th chunk with data, on the third page.
    let path = dir.path().join("manifests").join(id.to_string());
    flip(&path, chunks_at(&store, id) + 48 * 3000 + 5);
    let reader = open(&store, id);
    let whole = Manifest::decode(&other.manifest(id).unwrap()).unwrap();
    let number = whole.data().nth(3000).unwrap().0 as usize;
    let range = |chunk: usize| chunk * CHUNK..(chunk + 1) * CHUNK;
    for good in [0, number - 2 * PAGE, number + 2 * PAGE] {
        assert!(read(&*reader, good * CHUNK, CHUNK).unwrap() == disk[range(good)], "chunk {good}");
    }
    for _ in 0..2 {
        let error = read(&*reader, number * CHUNK, CHUNK).unwrap_err();
        assert_eq!(error.kind(), IoErrorKind::Corrupt);
        assert!(error.to_string().contains("manifest") && error.to_string().contains("damaged"), "{error}");
    }
    assert!(reader.manifest().is_err());
    assert!(repair_manifest(&store, id, &[Arc::new(other)]).unwrap());
    assert!(read(&*reader, number * CHUNK, CHUNK).unwrap() == disk[range(number)]);
    assert!(read_all(&*reader) == disk);
}

#[test]
fn damage_before_the_chunk_table_is_found_at_opening() {
    let Published { dir, store, id, .. } = published();
    let path = dir.path().join("manifests").join(id.to_string());
    for at in [0, 20, 60, 90, chunks_at(&store, id) - 1] {
        flip(&path, at);
        let error = VersionReader::open(&store, id, ChunkCache::new(0)).unwrap_err();
        assert!(error.to_string().contains("damaged"), "byte {at}: {error}");
        flip(&path, at);
    }
    assert!(VersionReader::open(&store, id, ChunkCache::new(0)).is_ok());
}

#[test]
fn a_version_can_be_removed_after_the_last_answer() {
    let Published { dir, store, disk, id } = published();
    let manifest = File::open(dir.path().join("manifests").join(id.to_string())).unwrap();
    let cache = ChunkCache::new(256 << 20);
    // The chunk is first fetched, and then comes from the cache.
    for round in 0..16 {
        let reader = VersionReader::open(&store, id, Arc::clone(&cache)).unwrap();
        let at = round / 2 * PAGE * CHUNK;
        let range = ByteRange::new(at as u64, CHUNK as u64).unwrap();
        let manifest = manifest.try_clone().unwrap();
        let (closed, is_closed) = mpsc::channel();
        let (answer, answered) = mpsc::channel();
        let done = Completion::new(move |outcome| {
            is_closed.recv().unwrap();
            let locked = manifest.try_lock().map(|()| manifest.unlock().unwrap());
            answer.send((outcome, locked)).unwrap();
        });
        reader.submit(Request::Read { range, buffer: vec![1; CHUNK] }, done);
        drop(reader);
        closed.send(()).unwrap();
        let (outcome, locked) = answered.recv().unwrap();
        assert!(outcome.result.is_ok() && outcome.buffer == disk[at..at + CHUNK]);
        assert!(locked.is_ok(), "round {round}: the version is still in use");
    }
}
