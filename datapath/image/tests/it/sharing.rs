//! Many machines on one image: fetches are shared, limits hold, and cached reads need no thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use crate::fixture::{disk_of, files, import_bytes, noise, read_all, store};
use headwater_block::{Attempt, ByteRange, Completion, Device, Op, Request, blocking};
use headwater_image::{Basis, ChunkCache, ImageErrorKind, ImportOptions, VersionReader, import};
use headwater_store::{
    Hash, Image, ImageName, LocalDir, Object, Pin, Publication, Removed, Store, StoreError, StoreErrorKind,
};

const CHUNK: usize = 65_536;

/// A store whose objects count the bytes that are read, and answer slowly.
struct SlowStore {
    store: LocalDir,
    read_bytes: Arc<AtomicU64>,
    delay: Duration,
    /// Whether reads fail for a reason that is unrelated to the bytes.
    fails: Arc<AtomicBool>,
    /// Whether opening the next object fails for such a reason.
    fails_to_open: AtomicBool,
}

struct SlowObject {
    object: Arc<dyn Object>,
    read_bytes: Arc<AtomicU64>,
    delay: Duration,
    /// Whether reads fail for a reason that is unrelated to the bytes.
    fails: Arc<AtomicBool>,
}

impl Object for SlowObject {
    fn id(&self) -> Hash {
        self.object.id()
    }

    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.read_bytes.fetch_add(into.len() as u64, Ordering::SeqCst);
        std::thread::sleep(self.delay);
        if self.fails.load(Ordering::SeqCst) {
            return Err(StoreError::new(StoreErrorKind::Io, "the disk is away"));
        }
        self.object.read_range(offset, into)
    }
}

impl Store for SlowStore {
    fn chunk_bytes(&self) -> u32 {
        self.store.chunk_bytes()
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.store.images()
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        self.store.image(name)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.store.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        if self.fails_to_open.swap(false, Ordering::SeqCst) {
            return Err(StoreError::new(StoreErrorKind::Io, "the disk is away"));
        }
        let object = self.store.open_object(id)?;
        let (read_bytes, fails) = (Arc::clone(&self.read_bytes), Arc::clone(&self.fails));
        Ok(Arc::new(SlowObject { object, read_bytes, delay: self.delay, fails }))
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.store.pin(manifest)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        self.store.publish()
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.store.change(name, change)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.store.remove(name, number)
    }
}

fn slow(store: LocalDir, delay_ms: u64) -> SlowStore {
    let delay = Duration::from_millis(delay_ms);
    let (read_bytes, fails, fails_to_open) = (Arc::default(), Arc::default(), AtomicBool::new(false));
    SlowStore { store, read_bytes, delay, fails, fails_to_open }
}

#[test]
fn thirty_two_machines_booting_read_each_chunk_once() {
    let (_dir, store) = store();
    let mut disk = vec![0; 6 << 20];
    noise(&mut disk, 1);
    let version = import_bytes(&store, "disk", &disk).version;
    let store = slow(store, 1);
    let cache = ChunkCache::new(64 << 20);
    let readers: Vec<_> =
        (0..32).map(|_| VersionReader::open(&store, version.manifest, Arc::clone(&cache)).unwrap()).collect();
    let start = Barrier::new(readers.len());
    std::thread::scope(|scope| {
        for reader in &readers {
            scope.spawn(|| {
                start.wait();
                let mut part = vec![0; 40_960];
                for offset in (0..disk.len() - part.len()).step_by(part.len()) {
                    blocking::read(reader.as_ref(), offset as u64, &mut part).unwrap();
                    assert!(part == disk[offset..offset + part.len()]);
                }
            });
        }
    });
    assert_eq!(store.read_bytes.load(Ordering::SeqCst), 6 << 20);
    let counters = cache.counters();
    assert_eq!((counters.fetches, counters.evictions, counters.failures), (96, 0, 0));
    assert!(counters.joined > 0, "no fetch was shared");
    // On some processors each chunk takes one page more.
    let takes = (6 << 20)..=(6 << 20) + 96 * 4096;
    assert!(takes.contains(&counters.held_bytes), "{counters:?}");
}

#[test]
fn a_temporarily_unreadable_store_is_not_reported_as_damaged() {
    let (_dir, store) = store();
    let mut disk = vec![0; 2 << 20];
    noise(&mut disk, 1);
    import_bytes(&store, "disk", &disk);
    let store = slow(store, 0);
    let again = || {
        let options = ImportOptions::new("again".parse().unwrap(), 1_700_000_000);
        import(disk_of(disk.clone()), &store, &options, &mut |_| {})
    };
    store.fails.store(true, Ordering::SeqCst);
    let error = again().unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Io, "{error}");
    assert!(error.to_string().contains("cannot read back a chunk that the store has"), "{error}");
    assert!(store.image(&"again".parse().unwrap()).unwrap().is_none());
    store.fails.store(false, Ordering::SeqCst);
    let found = again().unwrap();
    assert_eq!((found.shared_bytes, found.damaged_chunks), (found.data_bytes, 0));
}

#[test]
fn a_temporarily_unreadable_object_is_not_reported_as_lost() {
    let (dir, store) = store();
    let mut disk = vec![0; 2 << 20];
    noise(&mut disk, 1);
    let parent = import_bytes(&store, "disk", &disk).version.manifest;
    let before = files(dir.path());
    let store = slow(store, 0);
    let again = ImportOptions::new("again".parse().unwrap(), 1_700_000_000);
    let mut seal = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
    // The first chunk differs.
    let changes = |range: ByteRange, _: usize| {
        let differs = (CHUNK as u64).saturating_sub(range.offset()).min(range.len());
        let runs = [(differs, true), (range.len() - differs, false)];
        runs.into_iter().filter(|(len, _)| *len > 0).collect::<Vec<_>>()
    };
    seal.basis = Some(Basis { parent, changes: Arc::new(changes) });
    let mut changed = disk.clone();
    noise(&mut changed[..CHUNK], 2);
    for (options, disk) in [(&again, &disk), (&seal, &changed)] {
        store.fails_to_open.store(true, Ordering::SeqCst);
        let error = import(disk_of(disk.clone()), &store, options, &mut |_| {}).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Io, "{error}");
        assert!(error.to_string().contains("cannot check the data objects of the store"), "{error}");
        assert_eq!(files(dir.path()), before, "something is left");
    }
    let imported = import(disk_of(disk), &store, &again, &mut |_| {}).unwrap();
    assert_eq!(imported.shared_bytes, imported.data_bytes);
    let sealed = import(disk_of(changed), &store, &seal, &mut |_| {}).unwrap();
    assert_eq!(sealed.data_bytes - sealed.shared_bytes, CHUNK as u64);
}

#[test]
fn a_small_cache_keeps_to_its_limit_and_returns_correct_bytes() {
    let (_dir, store) = store();
    let mut disk = vec![0; 8 << 20];
    noise(&mut disk, 2);
    let version = import_bytes(&store, "disk", &disk).version;
    let cache = ChunkCache::new(1 << 20);
    let reader = VersionReader::open(&store, version.manifest, Arc::clone(&cache)).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..3 {
                    assert!(read_all(reader.as_ref()) == disk);
                    assert!(cache.counters().held_bytes <= 1 << 20);
                }
            });
        }
    });
    assert!(cache.counters().evictions > 0);
}

#[test]
fn chunks_in_memory_need_no_other_thread() {
    let (_dir, store) = store();
    let mut disk = vec![0; 1 << 20];
    noise(&mut disk[..512 << 10], 3);
    let version = import_bytes(&store, "disk", &disk).version;
    let store = slow(store, 0);
    let reader = VersionReader::open(&store, version.manifest, ChunkCache::new(8 << 20)).unwrap();
    let mut into = vec![1; 8192];
    let mut now = |offset| {
        let range = ByteRange::new(offset, 8192).unwrap();
        let attempt = reader.try_now(Op::Read { range, into: &mut into }).unwrap();
        (attempt, into == disk[offset as usize..offset as usize + 8192])
    };
    assert_eq!(now(65_536 - 4096).0, Attempt::MustWait);
    assert_eq!(now(768 << 10), (Attempt::Done, true), "zeroes need no fetch");
    let (tx, rx) = mpsc::channel();
    let range = ByteRange::new(65_536 - 4096, 8192).unwrap();
    reader.submit(Request::Prefetch { range }, Completion::new(move |o| tx.send(o.result.is_ok()).unwrap()));
    assert!(rx.recv().unwrap());
    assert_eq!(store.read_bytes.load(Ordering::SeqCst), 2 * 65_536);
    assert_eq!(now(65_536 - 4096), (Attempt::Done, true));
    assert_eq!(now(0), (Attempt::Done, true));
    assert_eq!(store.read_bytes.load(Ordering::SeqCst), 2 * 65_536);
}

#[test]
fn a_peek_leaves_no_trace() {
    let (_dir, store) = store();
    let mut disk = vec![0; 1 << 20];
    noise(&mut disk[..512 << 10], 3);
    let version = import_bytes(&store, "disk", &disk).version;
    let store = slow(store, 0);
    let cache = ChunkCache::new(8 << 20);
    let reader = VersionReader::open(&store, version.manifest, Arc::clone(&cache)).unwrap();
    reader.record(Duration::from_secs(3600));
    let peek = |offset: u64| {
        let mut into = vec![1; 8192];
        let has = reader.peek(ByteRange::new(offset, 8192).unwrap(), &mut into);
        has && into == disk[offset as usize..offset as usize + 8192]
    };
    assert!(!peek(0) && peek(768 << 10));
    assert_eq!(store.read_bytes.load(Ordering::SeqCst), 0);
    assert!(reader.recorded().is_none());
    blocking::read(reader.as_ref(), 0, &mut [0; 4096]).unwrap();
    let hits = cache.counters().hits;
    assert!(peek(0));
    assert_eq!(cache.counters().hits, hits);
}

#[test]
fn reads_by_others_than_the_machine_are_not_recorded() {
    let (_dir, store) = store();
    let mut disk = vec![0; 1 << 20];
    noise(&mut disk, 3);
    let version = import_bytes(&store, "disk", &disk).version;
    let reader = VersionReader::open(&store, version.manifest, ChunkCache::new(8 << 20)).unwrap();
    reader.record(Duration::from_secs(3600));
    let other = (Arc::clone(&reader) as Arc<dyn Device>).unrecorded().unwrap();
    assert_eq!(other.geometry(), reader.geometry());
    // The first read fetches, and the second one reads from memory.
    for _ in 0..2 {
        assert!(read_all(&*other) == disk);
    }
    assert!(reader.recorded().is_none());
}

#[test]
fn a_prefetch_of_everything_is_limited_and_yields_to_reads() {
    let (_dir, store) = store();
    let mut disk = vec![0; 48 << 20];
    noise(&mut disk, 6);
    let version = import_bytes(&store, "disk", &disk).version;
    let store = slow(store, 5);
    let reader = VersionReader::open(&store, version.manifest, ChunkCache::new(64 << 20)).unwrap();
    let (tx, rx) = mpsc::channel();
    let prefetch = || {
        let (range, tx) = (ByteRange::new(0, 48 << 20).unwrap(), tx.clone());
        reader.submit(
            Request::Prefetch { range },
            Completion::new(move |o| tx.send(o.result.is_ok()).unwrap()),
        );
    };
    (0..100).for_each(|_| prefetch());
    let mut part = vec![0; 4096];
    blocking::read(reader.as_ref(), 40 << 20, &mut part).unwrap();
    assert!(part == disk[40 << 20..(40 << 20) + 4096]);
    let early = rx.try_iter().count();
    assert!(early < 100, "the read came after all prefetches");
    // Cancelled prefetches are answered, too.
    assert!((early..100).all(|_| rx.recv().unwrap()));
    let read_bytes = store.read_bytes.load(Ordering::SeqCst);
    // Other tests of this process prefetch, too, and may have used some of the limit.
    assert!(((16 << 20)..(33 << 20)).contains(&read_bytes), "{read_bytes} bytes were read");
    prefetch();
    assert!(rx.recv().unwrap());
}

#[test]
fn requests_far_beyond_the_threads_are_all_answered() {
    let (_dir, store) = store();
    let mut disk = vec![0; 16 << 20];
    noise(&mut disk, 4);
    let version = import_bytes(&store, "disk", &disk).version;
    let path = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(path.path(), &disk).unwrap();
    let raw = headwater_image::raw_file(path.path()).unwrap();
    let reader = VersionReader::open(&store, version.manifest, ChunkCache::new(0)).unwrap();
    let devices: [Arc<dyn Device>; 2] = [raw, reader];
    let (tx, rx) = mpsc::channel();
    let requests = 10_000u64;
    for n in 0..requests {
        let offset = (n * 7919 % 4096) * 4096;
        let range = ByteRange::new(offset, 4096).unwrap();
        let tx = tx.clone();
        let request = Request::Read { range, buffer: vec![0; 4096] };
        let done = Completion::new(move |o| tx.send((offset, o.result.is_ok(), o.buffer)).unwrap());
        devices[n as usize % 2].submit(request, done);
    }
    for _ in 0..requests {
        let (offset, good, buffer) = rx.recv().unwrap();
        assert!(good && buffer == disk[offset as usize..offset as usize + 4096]);
    }
}
