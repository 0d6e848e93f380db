//! Tests of fetches together with chunks from copies, other versions and earlier processes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use headwater_block::IoError;
use headwater_store::Hash;

use super::*;
use crate::chunk_cache::{ChunkPlace, Joined};
use crate::disk_cache::DISK_CACHE_MIN_BYTES;
use crate::disk_cache::tests::sync_in_vain;
use crate::fetch_pool::{Task, Urgency};

/// An object of uncompressed chunks of 4 KiB.
struct Bytes(Vec<u8>);

impl Object for Bytes {
    fn id(&self) -> Hash {
        Hash([0; 32])
    }

    fn len_bytes(&self) -> u64 {
        u64_of(self.0.len())
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let at = usize::try_from(offset).unwrap();
        into.copy_from_slice(&self.0[at..at + into.len()]);
        Ok(())
    }
}

/// Three adjacent chunks.
fn three_chunks() -> (Vec<u8>, Vec<ChunkRef>) {
    let bytes: Vec<u8> = (1..=3).flat_map(|n| [n; 4096]).collect();
    let chunks = bytes.chunks(4096).zip(0..).map(|(chunk, n)| ChunkRef {
        hash: Hash::of(chunk),
        object: 0,
        stored_bytes: 4096,
        offset: n * 4096,
    });
    let chunks = chunks.collect();
    (bytes, chunks)
}

/// An object whose server is never available.
struct Away;

impl Object for Away {
    fn id(&self) -> Hash {
        Hash([0; 32])
    }

    fn len_bytes(&self) -> u64 {
        3 * 4096
    }

    fn read_range(&self, _: u64, _: &mut [u8]) -> Result<(), StoreError> {
        Err(StoreError::new(StoreErrorKind::Unreachable, "the server is away"))
    }

    fn read_or_wait(
        &self,
        _: u64,
        _: &mut [u8],
        _: &mut Check<'_>,
        waiting: &mut Waiting,
    ) -> Result<bool, StoreError> {
        waiting.begin((), |_| false);
        Ok(false)
    }
}

#[test]
fn chunks_that_arrive_elsewhere_end_the_wait_for_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let disk = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
    let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
    let (bytes, chunks) = three_chunks();
    let told = Arc::new(Mutex::new(Vec::new()));
    let join = |chunk: &ChunkRef, object: Hash| {
        let (told, place) = (Arc::clone(&told), ChunkPlace::new(object, chunk));
        let tell = move |chunk: Result<&[u8], &IoError>| told.lock().unwrap().push(chunk.unwrap()[0]);
        assert_eq!(cache.join(&chunk.hash, place, Urgency::Waited, Box::new(tell)), Joined::MustFetch);
        Fetch::new(&cache, *chunk, place)
    };
    let fetches = chunks.iter().map(|chunk| join(chunk, Away.id())).collect();
    let source =
        Source { object: Arc::new(Away), cache: Arc::clone(&cache), chunk_bytes: 4096, is_remote: true };
    let task = Box::new(Fetching::new(source, fetches, Urgency::Waited)).run().expect("the task must wait");
    assert!(!task.is_due(Instant::now()));
    // Another version has the last chunk in another object, and a background copy brings the middle one.
    join(&chunks[2], Hash([1; 32])).end(Ok(Pages::copy_of(&bytes[8192..]).unwrap()));
    disk.put(&chunks[1].hash, &bytes[4096..8192]);
    assert_eq!(*told.lock().unwrap(), [3, 3]);
    assert!(task.is_due(Instant::now()));
    let task = task.run().expect("the task must wait for the first chunk");
    assert_eq!(*told.lock().unwrap(), [3, 3, 2]);
    assert!(!task.is_due(Instant::now()));
    disk.put(&chunks[0].hash, &bytes[..4096]);
    assert!(task.is_due(Instant::now()) && task.run().is_none());
    assert_eq!(*told.lock().unwrap(), [3, 3, 2, 1]);
}

/// As [`Bytes`], but the bytes are in transit until the test says that they have arrived.
struct Coming {
    bytes: Vec<u8>,
    are_here: Arc<AtomicBool>,
    /// How often bytes were requested, and how often a transfer was cancelled.
    asked: AtomicU64,
    given_up: Arc<AtomicU64>,
}

/// Bytes in transit.
struct Transfer(Arc<AtomicU64>);

impl Drop for Transfer {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Object for Coming {
    fn id(&self) -> Hash {
        Hash([0; 32])
    }

    fn len_bytes(&self) -> u64 {
        u64_of(self.bytes.len())
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let at = usize::try_from(offset).unwrap();
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
        Ok(())
    }

    fn read_or_wait(
        &self,
        offset: u64,
        into: &mut [u8],
        check: &mut Check<'_>,
        waiting: &mut Waiting,
    ) -> Result<bool, StoreError> {
        let transfer = waiting.end::<Transfer>().unwrap_or_else(|| {
            self.asked.fetch_add(1, Ordering::SeqCst);
            Transfer(Arc::clone(&self.given_up))
        });
        if !self.are_here.load(Ordering::SeqCst) {
            let are_here = Arc::clone(&self.are_here);
            waiting.begin(transfer, move |_| are_here.load(Ordering::SeqCst));
            return Ok(false);
        }
        self.read_checked(offset, into, check)?;
        // The transfer has ended and was not cancelled.
        self.given_up.fetch_sub(1, Ordering::SeqCst);
        Ok(true)
    }
}

#[test]
fn a_read_in_progress_is_not_repeated_for_partial_arrivals() {
    for is_late in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let disk = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
        let (bytes, chunks) = three_chunks();
        let told = Arc::new(Mutex::new(Vec::new()));
        let join = |chunk: &ChunkRef, object: Hash| {
            let (told, place) = (Arc::clone(&told), ChunkPlace::new(object, chunk));
            let tell = move |chunk: Result<&[u8], &IoError>| told.lock().unwrap().push(chunk.unwrap()[0]);
            let joined = cache.join(&chunk.hash, place, Urgency::Waited, Box::new(tell));
            assert_eq!(joined, Joined::MustFetch);
            Fetch::new(&cache, *chunk, place)
        };
        let (are_here, given_up) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let object = Arc::new(Coming {
            bytes: bytes.clone(),
            are_here: Arc::clone(&are_here),
            asked: AtomicU64::new(0),
            given_up: Arc::clone(&given_up),
        });
        let counts = || (object.asked.load(Ordering::SeqCst), given_up.load(Ordering::SeqCst));
        let start = |chunks: &[ChunkRef]| {
            let fetches = chunks.iter().map(|chunk| join(chunk, Hash([0; 32]))).collect();
            let source = Source {
                object: Arc::clone(&object) as Arc<dyn Object>,
                cache: Arc::clone(&cache),
                chunk_bytes: 4096,
                is_remote: true,
            };
            let task = Box::new(Fetching::new(source, fetches, Urgency::Waited));
            task.run().expect("the task must wait")
        };
        let mut task = start(&chunks);
        // Another version has the last chunk in another object, and a background copy brings the middle one.
        join(&chunks[2], Hash([1; 32])).end(Ok(Pages::copy_of(&bytes[8192..]).unwrap()));
        disk.put(&chunks[1].hash, &bytes[4096..8192]);
        assert!(task.is_due(Instant::now()));
        if is_late {
            // Waiters for these chunks get an answer, and the other chunk is still in transit.
            task = task.run().expect("the task must wait for the first chunk");
            assert_eq!(*told.lock().unwrap(), [3, 3, 2]);
            assert!(!task.is_due(Instant::now()));
        }
        are_here.store(true, Ordering::SeqCst);
        assert!(task.is_due(Instant::now()) && task.run().is_none());
        let mut told_last = told.lock().unwrap().split_off(2);
        told_last.sort_unstable();
        assert_eq!(told_last, [1, 2]);
        assert_eq!(counts(), (1, 0), "the transfer was cancelled");
        assert_eq!(cache.counters().fetched_bytes, 3 * 4096);

        // The bytes in transit are not needed any more.
        are_here.store(false, Ordering::SeqCst);
        let other = [4_u8; 4096];
        let chunk = ChunkRef { hash: Hash::of(&other), object: 0, stored_bytes: 4096, offset: 0 };
        let task = start(&[chunk]);
        disk.put(&chunk.hash, &other);
        assert!(task.is_due(Instant::now()) && task.run().is_none());
        assert_eq!((told.lock().unwrap().last(), counts()), (Some(&4), (2, 1)));
    }
}

#[test]
fn unsynced_chunks_are_put_again_without_fetching() {
    let dir = tempfile::tempdir().unwrap();
    let disk = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
    let (bytes, chunks) = three_chunks();
    // The last chunk has wrong bytes.
    chunks.iter().zip([&bytes[..4096], &bytes[4096..8192], &[9; 4096][..]]).for_each(|(chunk, stored)| {
        disk.put(&chunk.hash, stored);
    });
    sync_in_vain(&disk, 0);
    assert!(chunks.iter().all(|chunk| disk.lacks(&chunk.hash) && disk.has(&chunk.hash)));
    let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
    let object = Arc::new(Bytes(Vec::new()));
    Source { object, cache, chunk_bytes: 4096, is_remote: true }.read_back(&chunks, || false);
    disk.sync().unwrap();
    let durable: Vec<bool> = chunks.iter().map(|chunk| disk.is_durable(&chunk.hash)).collect();
    assert_eq!((durable, disk.has(&chunks[2].hash)), (vec![true, true, false], false));
    assert_eq!((disk.counters().writes, disk.counters().damaged), (5, 1));
    // Once is enough.
    assert!(!disk.get_unread(&chunks[0].hash, &mut Vec::new()));
}

#[test]
fn waiters_are_answered_before_chunks_are_kept_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let disk = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
    let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
    let (bytes, chunks) = three_chunks();
    // The middle chunk is cached: its neighbours are read one after the other.
    disk.put(&chunks[1].hash, &bytes[4096..8192]);
    let kept_then = Arc::new(Mutex::new(Vec::new()));
    let fetch = |chunk: &ChunkRef| {
        let (disk, kept_then) = (Arc::clone(&disk), Arc::clone(&kept_then));
        let waiter = move |chunk: Result<&[u8], &IoError>| {
            assert_eq!(chunk.unwrap().len(), 4096);
            kept_then.lock().unwrap().push(disk.counters().writes);
        };
        let place = ChunkPlace::new(Hash([0; 32]), chunk);
        assert_eq!(cache.join(&chunk.hash, place, Urgency::Waited, Box::new(waiter)), Joined::MustFetch);
        Fetch::new(&cache, *chunk, place)
    };
    let fetches = chunks.iter().map(fetch).collect();
    let object = Arc::new(Bytes(bytes));
    let source = Source { object, cache: Arc::clone(&cache), chunk_bytes: 4096, is_remote: true };
    assert!(Box::new(Fetching::new(source, fetches, Urgency::Waited)).run().is_none());
    assert_eq!(*kept_then.lock().unwrap(), [1; 3]);
    assert!(chunks.iter().all(|chunk| disk.has(&chunk.hash)));
}

#[test]
fn chunks_of_an_earlier_process_are_read_back_once() {
    let dir = tempfile::tempdir().unwrap();
    let open = || DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
    let chunk_of = |n: u8| {
        let bytes = [n; 4096];
        ChunkRef { hash: Hash::of(&bytes), object: 0, stored_bytes: 4096, offset: u64::from(n) * 4096 }
    };
    let chunks: Vec<ChunkRef> = (0..4).map(chunk_of).collect();
    let before = open();
    // The first chunk has wrong bytes.
    before.put(&chunks[0].hash, &[9; 4096]);
    (1..3).for_each(|n: u8| before.put(&chunks[usize::from(n)].hash, &[n; 4096]));
    drop(before);
    let disk = open();
    disk.put(&chunks[3].hash, &[3; 4096]);
    let packed = &mut Vec::new();
    // Chunks that this process put are not read back.
    let unread: Vec<bool> = chunks.iter().map(|chunk| disk.get_unread(&chunk.hash, packed)).collect();
    assert_eq!(unread, [true, true, true, false]);
    let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
    let source = Source { object: Arc::new(Bytes(Vec::new())), cache, chunk_bytes: 4096, is_remote: true };
    // Cancelled at once.
    source.read_back(&chunks, || true);
    assert!(disk.get_unread(&chunks[1].hash, packed) && disk.counters().damaged == 0);
    source.read_back(&chunks[..2], || false);
    let unread: Vec<bool> = chunks.iter().map(|chunk| disk.get_unread(&chunk.hash, packed)).collect();
    assert_eq!(unread, [false, false, true, false]);
    assert_eq!(disk.counters().damaged, 1);
    assert!(!disk.has(&chunks[0].hash) && chunks[1..].iter().all(|chunk| disk.has(&chunk.hash)));
    // If a segment is removed, the state of its chunks is removed too.
    let of_both = [(chunks[1].hash, 4096), (chunks[2].hash, 4096)];
    let _kept = disk.keep(Hash([1; 32]), of_both.into_iter()).unwrap();
    let large = vec![7; 1 << 20];
    (0..70_u32).for_each(|n| disk.put(&Hash::of(&n.to_le_bytes()), &large));
    assert!(!dir.path().join("segment-0").exists(), "the first segment was not moved");
    assert!(disk.has(&chunks[1].hash) && !disk.get_unread(&chunks[1].hash, packed));
    assert!(disk.get_unread(&chunks[2].hash, packed));
}

#[test]
fn only_adjacent_chunks_are_read_together() {
    let chunk = |object, offset, stored_bytes| ChunkRef { hash: Hash([0; 32]), object, stored_bytes, offset };
    let limit = MergeLimit { chunks: 3, stored_bytes: 1000 };
    let sizes =
        |chunks: &[ChunkRef]| group(chunks.iter().copied(), limit).iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(&[]), [0; 0]);
    // Adjacent; a gap; another object; too many; too long.
    assert_eq!(sizes(&[chunk(0, 0, 100), chunk(0, 100, 50), chunk(0, 150, 10)]), [3]);
    assert_eq!(sizes(&[chunk(0, 0, 100), chunk(0, 101, 50)]), [1, 1]);
    assert_eq!(sizes(&[chunk(0, 0, 100), chunk(1, 100, 50)]), [1, 1]);
    assert_eq!(sizes(&(0..4).map(|n| chunk(0, n * 10, 10)).collect::<Vec<_>>()), [3, 1]);
    assert_eq!(sizes(&[chunk(0, 0, 600), chunk(0, 600, 401)]), [1, 1]);
    assert_eq!(sizes(&[chunk(0, 0, 5000)]), [1]);
}
