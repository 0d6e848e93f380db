//! Reads of images across a network, from a store that says it is remote: the disk cache, boot traces,
//! readahead, copying.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::fixture::{flip, import_bytes, noise, read_all, store};
use headwater_block::{Attempt, ByteRange, Completion, Device, Op, Request, blocking};
use headwater_image::{
    Background, Cancel, ChunkCache, DISK_CACHE_MIN_BYTES, DamagedChunk, DiskCache, ImageErrorKind, Manifest,
    Progress, RateLimit, Trace, VerifyRound, VersionReader, diff, export_raw, verify_in,
};
use headwater_store::{
    Check, Hash, Image, ImageName, LocalDir, Object, Pin, Publication, ReadFor, Removed, Store, StoreError,
    StoreErrorKind, Waiting,
};
use headwater_testkit::{run, wait_until};

const CHUNK: usize = 65_536;

/// State that all objects of a store share.
#[derive(Default)]
struct Line {
    requests: AtomicU64,
    bytes: AtomicU64,
    /// Each of the next answers has a wrong bit. A repeated request is answered correctly.
    lies: AtomicU64,
    gone: AtomicBool,
    /// Reads wait, as they do when all servers are down.
    waits: AtomicBool,
    waiting: AtomicU64,
    /// The server that has this object is away: reads of the object wait, without a thread if they can.
    away: Mutex<Option<Hash>>,
    /// No server has this object. Also how often it was asked for.
    missing: Mutex<Option<Hash>>,
    asked_in_vain: AtomicU64,
    /// The offsets of reads that the reader marked as awaited.
    waited_for: Mutex<BTreeSet<u64>>,
    delay_us: AtomicU64,
}

/// A store on another host.
struct Far {
    store: LocalDir,
    line: Arc<Line>,
}

struct FarObject {
    object: Arc<dyn Object>,
    line: Arc<Line>,
}

impl Object for FarObject {
    fn id(&self) -> Hash {
        self.object.id()
    }

    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        if self.line.gone.load(Ordering::SeqCst) {
            return Err(StoreError::new(StoreErrorKind::Io, "the line is cut"));
        }
        if *self.line.missing.lock().unwrap() == Some(self.id()) {
            self.line.asked_in_vain.fetch_add(1, Ordering::SeqCst);
            return Err(StoreError::new(StoreErrorKind::NotFound, "nobody has it"));
        }
        self.line.waiting.fetch_add(1, Ordering::SeqCst);
        while self.line.waits.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.line.waiting.fetch_sub(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(self.line.delay_us.load(Ordering::SeqCst)));
        self.line.requests.fetch_add(1, Ordering::SeqCst);
        self.line.bytes.fetch_add(into.len() as u64, Ordering::SeqCst);
        self.object.read_range(offset, into)
    }

    fn read_checked(&self, offset: u64, into: &mut [u8], check: &mut Check<'_>) -> Result<(), StoreError> {
        let is_away = || *self.line.away.lock().unwrap() == Some(self.id());
        if is_away() {
            self.line.waiting.fetch_add(1, Ordering::SeqCst);
            while is_away() {
                std::thread::sleep(Duration::from_millis(2));
            }
            self.line.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        self.read_range(offset, into)?;
        let lies = self.line.lies.load(Ordering::SeqCst);
        if lies > 0 {
            self.line.lies.store(lies - 1, Ordering::SeqCst);
            let middle = into.len() / 2;
            into[middle] ^= 1;
            assert!(check(into).is_err(), "a wrong bit was accepted");
            into[middle] ^= 1;
        }
        check(into)
    }

    fn read_or_wait(
        &self,
        offset: u64,
        into: &mut [u8],
        check: &mut Check<'_>,
        waiting: &mut Waiting,
    ) -> Result<bool, StoreError> {
        let (line, id) = (Arc::clone(&self.line), self.id());
        if waiting.read_for() == ReadFor::Now {
            line.waited_for.lock().unwrap().insert(offset);
        }
        let is_away = move || *line.away.lock().unwrap() == Some(id);
        match waiting.end::<()>() {
            None if is_away() => self.line.waiting.fetch_add(1, Ordering::SeqCst),
            Some(()) if !is_away() => self.line.waiting.fetch_sub(1, Ordering::SeqCst),
            None => return self.read_checked(offset, into, check).map(|()| true),
            Some(()) => 0,
        };
        if is_away() {
            waiting.begin((), move |_| !is_away());
            return Ok(false);
        }
        self.read_checked(offset, into, check).map(|()| true)
    }
}

impl Store for Far {
    fn chunk_bytes(&self) -> u32 {
        self.store.chunk_bytes()
    }

    fn is_remote(&self) -> bool {
        true
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
        Ok(Arc::new(FarObject { object: self.store.open_object(id)?, line: Arc::clone(&self.line) }))
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

struct Setup {
    store_dir: tempfile::TempDir,
    cache_dir: tempfile::TempDir,
    disk: Vec<u8>,
    manifest: Hash,
    far: Far,
}

/// A disk of this many MiB whose chunks do not compress, in a remote store.
fn setup(mib: usize) -> Setup {
    let (store_dir, local) = store();
    let mut disk = vec![0; mib << 20];
    noise(&mut disk, 5);
    let manifest = import_bytes(&local, "disk", &disk).version.manifest;
    let far = Far { store: local, line: Arc::default() };
    Setup { store_dir, cache_dir: tempfile::tempdir().unwrap(), disk, manifest, far }
}

impl Setup {
    /// Opens the directory. It is free only when an earlier reader has finished its prefetches.
    fn disk_cache(&self) -> Arc<DiskCache> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            match DiskCache::open(self.cache_dir.path(), DISK_CACHE_MIN_BYTES) {
                Err(e) if e.kind() == ImageErrorKind::Busy && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                opened => return opened.unwrap(),
            }
        }
    }

    fn open(&self, cache: Arc<ChunkCache>) -> Arc<VersionReader> {
        VersionReader::open(&self.far, self.manifest, cache).unwrap()
    }

    /// Damages a chunk of the disk in the store. Returns its length in the store.
    fn damage(&self, index: usize) -> u64 {
        let manifest = Manifest::decode(&self.far.store.manifest(self.manifest).unwrap()).unwrap();
        let chunk = manifest.chunk(index as u64).unwrap();
        let object = manifest.objects()[chunk.object as usize].id;
        let file = self.store_dir.path().join("objects").join(object.to_string());
        let file = std::fs::File::options().write(true).open(file).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[0; 64], chunk.offset + 1000).unwrap();
        u64::from(chunk.stored_bytes)
    }

    fn requests(&self) -> u64 {
        self.far.line.requests.load(Ordering::SeqCst)
    }

    fn bytes(&self) -> u64 {
        self.far.line.bytes.load(Ordering::SeqCst)
    }
}

fn wait_for(work: &Background) {
    let state = std::fmt::from_fn(|f| write!(f, "the end of {:?} {:?}", work.progress(), work.failure()));
    wait_until(state, || work.progress().is_over);
}

fn read_chunk(reader: &VersionReader, chunk: usize) -> Vec<u8> {
    let mut into = vec![0; 4096];
    blocking::read(reader, (chunk * CHUNK) as u64, &mut into).unwrap();
    into
}

#[test]
fn sequential_reads_are_prefetched_and_fetched_once() {
    let setup = setup(32);
    let cache = ChunkCache::new(64 << 20);
    let reader = setup.open(Arc::clone(&cache));
    setup.far.line.delay_us.store(500, Ordering::SeqCst);
    let mut into = vec![0; 16 << 10];
    for at in (0..setup.disk.len()).step_by(into.len()) {
        blocking::read(reader.as_ref(), at as u64, &mut into).unwrap();
        assert!(into == setup.disk[at..at + into.len()]);
    }
    assert_eq!(setup.bytes(), 32 << 20);
    let counters = cache.counters();
    assert_eq!(counters.fetched_bytes, 32 << 20);
    assert!(counters.ahead >= 500, "{counters:?}");
    // Adjacent chunks are fetched together.
    assert!(setup.requests() <= 512 / 3, "{} requests", setup.requests());
}

#[test]
fn a_comparison_fetches_shared_chunks_once() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    let mut large = vec![0; 6 << 20];
    noise(&mut large, 7);
    std::fs::write(tree.join("large"), &large).unwrap();
    std::fs::write(tree.join("motd"), "hello there").unwrap();
    let image = dir.path().join("fs.img");
    let (tree, path) = (tree.to_str().unwrap(), image.to_str().unwrap());
    run("e2fsprogs", "mke2fs", &["-q", "-t", "ext4", "-d", tree, path, "16M"]);
    let before = std::fs::read(&image).unwrap();
    // A byte that was changed without a write through the file system.
    let mut after = before.clone();
    let at = after.windows(11).position(|window| window == b"hello there").unwrap();
    after[at] ^= 1;
    let (_kept, local) = store();
    let [from, to] = [&before, &after].map(|disk| import_bytes(&local, "disk", disk).version.manifest);
    let far = Far { store: local, line: Arc::default() };
    let found = diff(&far, from, to, &Cancel::new(), &mut |_| {}).unwrap();
    let files = found.partitions[0].files.as_ref().unwrap();
    assert_eq!(files.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), ["/motd"]);
    let (fetched, once) = (far.line.bytes.load(Ordering::SeqCst), large.len() as u64);
    assert!((once..once * 3 / 2).contains(&fetched), "{fetched}");
}

#[test]
fn random_reads_fetch_only_what_they_touch() {
    let setup = setup(32);
    let reader = setup.open(ChunkCache::new(64 << 20));
    for n in 0..60 {
        let chunk = n * 37 % 512;
        assert!(read_chunk(&reader, chunk) == setup.disk[chunk * CHUNK..chunk * CHUNK + 4096]);
    }
    assert_eq!(setup.bytes(), 60 * CHUNK as u64);
}

#[test]
fn second_reads_use_the_local_disk_and_replace_damage() {
    let setup = setup(16);
    // Memory for everything: otherwise chunks that were read ahead may leave memory before they are on the
    // disk, and are fetched again.
    let memory = 64 << 20;
    {
        let reader = setup.open(ChunkCache::with_disk(memory, setup.disk_cache()));
        assert!(read_all(reader.as_ref()) == setup.disk);
    }
    assert_eq!(setup.bytes(), 16 << 20);
    setup.far.line.gone.store(true, Ordering::SeqCst);
    {
        let disk = setup.disk_cache();
        let reader = setup.open(ChunkCache::with_disk(memory, Arc::clone(&disk)));
        assert!(read_all(reader.as_ref()) == setup.disk);
        assert!(disk.counters().hits >= 256 && disk.counters().damaged == 0, "{:?}", disk.counters());
    }
    // A changed byte in each of three chunks, which only their hashes show.
    let path = setup.cache_dir.path().join("segment-0");
    let mut bytes = std::fs::read(&path).unwrap();
    for record in [3, 17, 31] {
        bytes[record * (CHUNK + 48) + 1000] ^= 1;
    }
    std::fs::write(&path, bytes).unwrap();
    setup.far.line.gone.store(false, Ordering::SeqCst);
    let before = setup.bytes();
    let disk = setup.disk_cache();
    let reader = setup.open(ChunkCache::with_disk(memory, Arc::clone(&disk)));
    assert!(read_all(reader.as_ref()) == setup.disk);
    assert_eq!(disk.counters().damaged, 3);
    assert_eq!(setup.bytes() - before, 3 * CHUNK as u64);
    wait_until("they are cached", || disk.counters().writes == 3);
    // Now they are correct again.
    setup.far.line.gone.store(true, Ordering::SeqCst);
    drop(reader);
    let reader = setup.open(ChunkCache::with_disk(memory, disk));
    assert!(read_all(reader.as_ref()) == setup.disk);
}

#[test]
fn many_readers_share_one_fetch_through_both_caches() {
    let setup = setup(8);
    let cache = ChunkCache::with_disk(64 << 20, setup.disk_cache());
    let readers: Vec<_> = (0..8).map(|_| setup.open(Arc::clone(&cache))).collect();
    std::thread::scope(|scope| {
        for reader in &readers {
            scope.spawn(|| assert!(read_all(reader.as_ref()) == setup.disk));
        }
    });
    assert_eq!(setup.bytes(), 8 << 20);
    let disk = cache.disk().unwrap();
    wait_until("all of it is cached", || disk.counters().writes >= 128);
    assert_eq!(disk.counters().writes, 128);
}

#[test]
fn wrong_bytes_are_refused_in_merged_reads_too() {
    let setup = setup(8);
    let reader = setup.open(ChunkCache::new(64 << 20));
    setup.far.line.lies.store(5, Ordering::SeqCst);
    assert!(read_all(reader.as_ref()) == setup.disk);
    assert_eq!(setup.far.line.lies.load(Ordering::SeqCst), 0);
}

#[test]
fn the_chunks_of_a_recorded_boot_are_in_memory_at_the_next_one() {
    let setup = setup(32);
    let boot: Vec<usize> = (0..100).map(|n| n * 41 % 512).collect();
    let trace = {
        let reader = setup.open(ChunkCache::new(64 << 20));
        reader.record(Duration::from_secs(3600));
        for chunk in &boot {
            read_chunk(&reader, *chunk);
        }
        assert!(!reader.is_recording_over());
        reader.recorded().unwrap()
    };
    assert_eq!(trace.chunks.iter().map(|t| t.chunk as usize).collect::<Vec<_>>(), boot);
    setup.far.store.set_trace(setup.manifest, Some(&trace.encode())).unwrap();
    let stored = setup.far.store.trace(setup.manifest).unwrap().unwrap();
    let trace = Trace::decode(&stored).unwrap();

    let cache = ChunkCache::new(64 << 20);
    let reader = setup.open(Arc::clone(&cache));
    assert_eq!(trace.stored_bytes(&reader.manifest().unwrap()), 100 * CHUNK as u64);
    let before = setup.bytes();
    wait_for(&reader.prefetch(&trace, u64::MAX).unwrap());
    // Exactly what the boot needs was fetched, and the boot itself fetches nothing.
    assert_eq!(setup.bytes() - before, 100 * CHUNK as u64);
    for chunk in &boot {
        assert!(read_chunk(&reader, *chunk) == setup.disk[chunk * CHUNK..chunk * CHUNK + 4096]);
    }
    assert_eq!(setup.bytes() - before, 100 * CHUNK as u64);

    // The budget is respected, and a trace of another version is refused.
    let reader = setup.open(ChunkCache::new(64 << 20));
    let before = setup.bytes();
    let work = reader.prefetch(&trace, 10 * CHUNK as u64 + 5).unwrap();
    wait_for(&work);
    assert_eq!(setup.bytes() - before, 10 * CHUNK as u64);
    assert_eq!(work.progress().done_bytes, 10 * CHUNK as u64);
    let other = Trace::of_boot(Hash::of(b"other"), &[(1, 1)]);
    assert_eq!(reader.prefetch(&other, 1).err().unwrap().kind(), ImageErrorKind::Invalid);
}

#[test]
fn a_budget_is_spent_on_the_start_of_a_trace() {
    let setup = setup(32);
    // The order is neither that of the disk nor its reverse.
    let boot: Vec<usize> = (0..100).map(|n| (n * 41 + 200) % 512).collect();
    let listed: Vec<_> = boot.iter().map(|chunk| (*chunk as u64, 0)).collect();
    let trace = Trace::of_boot(setup.manifest, &listed);
    let reader = setup.open(ChunkCache::new(64 << 20));
    wait_for(&reader.prefetch(&trace, 60 * CHUNK as u64 + 5).unwrap());
    assert_eq!(setup.bytes(), 60 * CHUNK as u64);
    // The chunks at the beginning of the trace are cached, and the later ones are not.
    setup.far.line.gone.store(true, Ordering::SeqCst);
    for chunk in &boot[..60] {
        assert!(read_chunk(&reader, *chunk) == setup.disk[chunk * CHUNK..chunk * CHUNK + 4096]);
    }
    for chunk in &boot[60..] {
        let mut into = [0; 4096];
        assert!(blocking::read(reader.as_ref(), (chunk * CHUNK) as u64, &mut into).is_err(), "{chunk}");
    }
}

#[test]
fn readers_of_a_version_have_one_manifest() {
    let setup = setup(1);
    let cache = ChunkCache::new(1 << 20);
    let readers = [0; 3].map(|_| setup.open(Arc::clone(&cache)));
    assert!(readers.iter().all(|reader| std::ptr::eq(reader.outline(), readers[0].outline())));
}

#[test]
fn a_read_that_waits_for_its_last_chunk_copies_nothing_yet() {
    let setup = setup(1);
    let cache = ChunkCache::new(1 << 20);
    let reader = setup.open(Arc::clone(&cache));
    reader.stop_readahead();
    read_chunk(&reader, 0);
    let hits = cache.counters().hits;
    let range = ByteRange::new(512, 2 * CHUNK as u64 - 512).unwrap();
    let mut into = vec![1; 2 * CHUNK - 512];
    assert_eq!(reader.try_now(Op::Read { range, into: &mut into }).unwrap(), Attempt::MustWait);
    assert!(into.iter().all(|byte| *byte == 1) && cache.counters().hits == hits);
    read_chunk(&reader, 1);
    assert_eq!(reader.try_now(Op::Read { range, into: &mut into }).unwrap(), Attempt::Done);
    assert!(into == setup.disk[512..2 * CHUNK]);
}

#[test]
fn shared_pages_count_as_read() {
    let setup = setup(8);
    let cache = ChunkCache::new(64 << 20);
    let reader = setup.open(Arc::clone(&cache));
    reader.record(Duration::from_secs(3600));
    let mut parts = Vec::new();
    let whole = |chunk: u64| ByteRange::new(chunk * CHUNK as u64, CHUNK as u64).unwrap();
    assert!(!reader.read_shared(whole(0), &mut parts));
    for chunk in 0..128 {
        // A chunk is lent if it is in memory, as in the NBD server, and read if not.
        if !reader.read_shared(whole(chunk), &mut parts) {
            read_chunk(&reader, chunk as usize);
        }
    }
    assert!(parts.len() > 8, "only {} were lent", parts.len());
    assert_eq!(reader.recorded().unwrap().chunks.len(), 128);
    assert!(cache.counters().ahead > 100, "{:?}", cache.counters());
}

#[test]
fn awaited_reads_overtake_prefetches() {
    let setup = setup(32);
    let trace = Trace::of_boot(setup.manifest, &(0..512).map(|n| (n, 0)).collect::<Vec<_>>());
    let reader = setup.open(ChunkCache::new(64 << 20));
    let line = &setup.far.line;
    line.waits.store(true, Ordering::SeqCst);
    let work = reader.prefetch(&trace, u64::MAX).unwrap();
    // As many prefetches as are allowed at a time.
    wait_until("what is prefetched waits", || line.waiting.load(Ordering::SeqCst) >= 6);
    let at = 511 * CHUNK;
    let (sender, receiver) = std::sync::mpsc::channel();
    let range = ByteRange::new(at as u64, 4096).unwrap();
    let done = Completion::new(move |out| sender.send(out.result.map(|()| out.buffer)).unwrap());
    reader.submit(Request::Read { range, buffer: vec![0; 4096] }, done);
    wait_until("it is read before the prefetches", || line.waiting.load(Ordering::SeqCst) >= 7);
    let progress = work.progress();
    assert!(progress.done_bytes < progress.total_bytes / 2, "{progress:?}");
    line.waits.store(false, Ordering::SeqCst);
    assert!(receiver.recv().unwrap().unwrap() == setup.disk[at..][..4096]);
}

#[test]
fn awaited_reads_overtake_prefetches_of_two_machines() {
    let setup = setup(4);
    // No two chunks are adjacent, so each needs a read of its own. No more than the limit are asked for at a
    // time.
    let boot: Vec<(u64, u32)> = (0..12).map(|n| (2 * n, 0)).collect();
    let trace = Trace::of_boot(setup.manifest, &boot);
    let cache = ChunkCache::new(64 << 20);
    let readers = [0; 2].map(|_| setup.open(Arc::clone(&cache)));
    let line = &setup.far.line;
    *line.away.lock().unwrap() = Some(readers[0].outline().objects()[0].id);
    let works = readers.each_ref().map(|reader| reader.prefetch(&trace, u64::MAX).unwrap());
    for work in &works {
        // The last byte counts when the work is finished.
        wait_until("all of it was asked for", || work.progress().done_bytes == 12 * CHUNK as u64 - 1);
    }
    let waited_for = 6;
    let offset = readers[0].manifest().unwrap().chunk(waited_for).unwrap().offset;
    let range = ByteRange::new(waited_for * CHUNK as u64, 4096).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let done = Completion::new(move |out| sender.send(out.result.map(|()| out.buffer)).unwrap());
    readers[0].submit(Request::Read { range, buffer: vec![0; 4096] }, done);
    wait_until("the read is marked as awaited", || line.waited_for.lock().unwrap().contains(&offset));
    *line.away.lock().unwrap() = None;
    assert!(receiver.recv().unwrap().unwrap() == setup.disk[6 * CHUNK..][..4096]);
    works.iter().for_each(wait_for);
    // All other chunks were not marked as awaited, although two readers requested each of them.
    assert_eq!(*line.waited_for.lock().unwrap(), BTreeSet::from([offset]));
    assert_eq!(setup.bytes(), 12 * CHUNK as u64);
}

#[test]
fn a_cancelled_copy_releases_its_version() {
    let setup = setup(28);
    let mut other = vec![0; 28 << 20];
    noise(&mut other, 6);
    let other_manifest = import_bytes(&setup.far.store, "other", &other).version.manifest;
    let cache = ChunkCache::with_disk(1 << 20, setup.disk_cache());
    let reader = setup.open(Arc::clone(&cache));
    let others = VersionReader::open(&setup.far, other_manifest, cache).unwrap();
    let (line, rate_limit) = (&setup.far.line, Arc::new(RateLimit::new(None)));
    *line.away.lock().unwrap() = Some(reader.outline().objects()[0].id);
    let work = reader.hydrate(&rate_limit).unwrap();
    wait_until("the copy waits", || line.waiting.load(Ordering::SeqCst) >= 2);
    // There is a slot for one of them.
    assert_eq!(others.hydrate(&rate_limit).err().unwrap().kind(), ImageErrorKind::NoSpace);
    // The machine stops.
    let held = Arc::downgrade(&reader);
    drop(work);
    drop(reader);
    wait_until("no copy uses the version", || held.strong_count() == 0);
    let mut copied = None;
    wait_until("there is a slot for the other one", || {
        copied = others.hydrate(&rate_limit).ok();
        copied.is_some()
    });
    wait_for(&copied.unwrap());
    assert!(line.away.lock().unwrap().is_some());
    line.gone.store(true, Ordering::SeqCst);
    assert!(read_all(others.as_ref()) == other);
}

#[test]
fn leftover_chunks_are_read_back_before_they_count() {
    let setup = setup(16);
    let rate_limit = Arc::new(RateLimit::new(None));
    {
        let reader = setup.open(ChunkCache::with_disk(1 << 20, setup.disk_cache()));
        wait_for(&reader.hydrate(&rate_limit).unwrap());
    }
    // A changed byte in each of three chunks, which only their hashes show.
    for record in [3, 17, 31] {
        flip(&setup.cache_dir.path().join("segment-0"), record * (CHUNK as u64 + 48) + 1000);
    }
    let before = setup.bytes();
    let disk = setup.disk_cache();
    let reader = setup.open(ChunkCache::with_disk(1 << 20, Arc::clone(&disk)));
    wait_for(&reader.hydrate(&rate_limit).unwrap());
    assert_eq!(disk.counters().damaged, 3);
    assert_eq!(setup.bytes() - before, 3 * CHUNK as u64);
    setup.far.line.gone.store(true, Ordering::SeqCst);
    assert!(read_all(reader.as_ref()) == setup.disk);
}

#[test]
fn a_copied_version_needs_no_server() {
    let setup = setup(24);
    let disk = setup.disk_cache();
    let reader = setup.open(ChunkCache::with_disk(1 << 20, Arc::clone(&disk)));
    let none = setup.open(ChunkCache::new(1 << 20)).hydrate(&Arc::new(RateLimit::new(None)));
    assert_eq!(none.err().unwrap().kind(), ImageErrorKind::Invalid);
    // The connection breaks for a moment.
    setup.far.line.gone.store(true, Ordering::SeqCst);
    let work = reader.hydrate(&Arc::new(RateLimit::new(None))).unwrap();
    wait_until("the broken connection is noticed", || work.failure().is_some());
    setup.far.line.gone.store(false, Ordering::SeqCst);
    wait_for(&work);
    let progress = work.progress();
    assert_eq!((progress.done_bytes, progress.total_bytes), (24 << 20, 24 << 20));
    assert_eq!(setup.bytes(), 24 << 20);
    setup.far.line.gone.store(true, Ordering::SeqCst);
    assert!(read_all(reader.as_ref()) == setup.disk);
}

#[test]
fn a_copied_version_does_not_wait_behind_a_remote_one() {
    let setup = setup(8);
    let mut other = vec![0; 4 << 20];
    noise(&mut other, 6);
    let other_manifest = import_bytes(&setup.far.store, "other", &other).version.manifest;
    let cache = ChunkCache::with_disk(1 << 20, setup.disk_cache());
    let copied = setup.open(Arc::clone(&cache));
    let others = VersionReader::open(&setup.far, other_manifest, cache).unwrap();
    others.stop_readahead();
    wait_for(&copied.hydrate(&Arc::new(RateLimit::new(None))).unwrap());
    setup.far.line.waits.store(true, Ordering::SeqCst);
    // More waiting reads than there are threads. No two of their chunks are adjacent.
    let (waiting, answers) = std::sync::mpsc::channel();
    for at in (0..other.len() as u64).step_by(2 * CHUNK) {
        let waiting = waiting.clone();
        let range = ByteRange::new(at, 4096).unwrap();
        let done = Completion::new(move |out| waiting.send((at, out.result.map(|()| out.buffer))).unwrap());
        others.submit(Request::Read { range, buffer: vec![0; 4096] }, done);
    }
    wait_until("the reads wait", || setup.far.line.waiting.load(Ordering::SeqCst) >= 8);
    let (all, read) = std::sync::mpsc::channel();
    std::thread::spawn(move || all.send(read_all(copied.as_ref())));
    let read = read.recv_timeout(Duration::from_secs(60));
    setup.far.line.waits.store(false, Ordering::SeqCst);
    assert!(read.expect("a copied version waits for servers") == setup.disk);
    drop(waiting);
    for (at, read) in answers {
        assert!(read.unwrap() == other[at as usize..][..4096], "{at}");
    }
}

#[test]
fn reads_waiting_for_missing_servers_delay_no_others() {
    let setup = setup(8);
    let mut other = vec![0; 4 << 20];
    noise(&mut other, 6);
    let other_manifest = import_bytes(&setup.far.store, "other", &other).version.manifest;
    let cache = ChunkCache::new(64 << 20);
    let here = setup.open(Arc::clone(&cache));
    let away = VersionReader::open(&setup.far, other_manifest, cache).unwrap();
    *setup.far.line.away.lock().unwrap() = Some(away.outline().objects()[0].id);
    // More waiting reads and readahead than there are threads.
    let (waiting, answers) = std::sync::mpsc::channel();
    let offsets: Vec<u64> = (0..other.len() as u64).step_by(2 * CHUNK).collect();
    for at in offsets.clone() {
        let waiting = waiting.clone();
        let range = ByteRange::new(at, 4096).unwrap();
        let done = Completion::new(move |out| waiting.send((at, out.result.map(|()| out.buffer))).unwrap());
        away.submit(Request::Read { range, buffer: vec![0; 4096] }, done);
    }
    drop(waiting);
    wait_until("the reads wait", || setup.far.line.waiting.load(Ordering::SeqCst) >= 8);
    let (all, read) = std::sync::mpsc::channel();
    let reader = Arc::clone(&here);
    std::thread::spawn(move || all.send(read_all(reader.as_ref())));
    let read = read.recv_timeout(Duration::from_secs(60));
    assert!(answers.try_recv().is_err(), "who is away has answered");
    *setup.far.line.away.lock().unwrap() = None;
    assert!(read.expect("what is there waits for what is away") == setup.disk);
    let answers: Vec<_> = answers.iter().collect();
    assert_eq!(answers.len(), offsets.len());
    for (at, read) in answers {
        assert!(read.unwrap() == other[at as usize..][..4096], "{at}");
    }
    wait_until("no read waits any more", || setup.far.line.waiting.load(Ordering::SeqCst) == 0);
}

#[test]
fn a_read_does_not_wait_for_an_object_that_only_another_version_needs() {
    const AT: usize = 5 * CHUNK;
    let setup = setup(1);
    // The chunk was damaged on the disk, so the next version has it in its own object.
    setup.damage(AT / CHUNK);
    let newer = import_bytes(&setup.far.store, "disk", &setup.disk).version.manifest;
    let open = |cache: &Arc<ChunkCache>| {
        let newer = VersionReader::open(&setup.far, newer, Arc::clone(cache)).unwrap();
        let readers = [setup.open(Arc::clone(cache)), newer];
        readers.iter().for_each(|reader| reader.stop_readahead());
        readers
    };
    let submit = |reader: &VersionReader| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let range = ByteRange::new(AT as u64, 4096).unwrap();
        let done = Completion::new(move |out| sender.send(out.result.map(|()| out.buffer)).unwrap());
        reader.submit(Request::Read { range, buffer: vec![0; 4096] }, done);
        receiver
    };
    let line = &setup.far.line;
    let waiting = || line.waiting.load(Ordering::SeqCst);
    let cache = ChunkCache::new(64 << 20);
    let [older, newer] = open(&cache);
    *line.away.lock().unwrap() = Some(older.outline().objects()[0].id);
    let first = submit(&older);
    wait_until("the older version waits for its object", || waiting() == 1);
    let second = submit(&newer).recv_timeout(Duration::from_secs(60));
    assert!(second.expect("it waits for the object of the other one").unwrap() == setup.disk[AT..][..4096]);
    // These bytes are also the content of that chunk in the older version.
    let first = first.recv_timeout(Duration::from_secs(60));
    assert!(first.expect("it goes on waiting").unwrap() == setup.disk[AT..][..4096]);
    assert_eq!((cache.counters().fetches, cache.counters().joined), (2, 0));
    *line.away.lock().unwrap() = None;

    // The damage is reported for the older version, whichever is read first.
    let cache = ChunkCache::new(64 << 20);
    let [older, newer] = open(&cache);
    let before = waiting();
    line.waits.store(true, Ordering::SeqCst);
    let (first, second) = (submit(&older), submit(&newer));
    wait_until("both are read", || waiting() == before + 2);
    line.waits.store(false, Ordering::SeqCst);
    assert!(second.recv().unwrap().unwrap() == setup.disk[AT..][..4096]);
    // Damaged, or correct if the other read was faster.
    if let Ok(read) = first.recv().unwrap() {
        assert!(read == setup.disk[AT..][..4096]);
    }
}

#[test]
fn a_copy_is_complete_only_if_its_version_can_be_reopened() {
    let setup = setup(4);
    let disk = setup.disk_cache();
    // As on a full disk: the manifest is not cached when the version is opened.
    let manifests = setup.cache_dir.path().join("manifests");
    std::fs::write(&manifests, "").unwrap();
    let reader = setup.open(ChunkCache::with_disk(1 << 20, disk));
    let work = reader.hydrate(&Arc::new(RateLimit::new(None))).unwrap();
    let state = std::fmt::from_fn(|f| write!(f, "it cannot be kept: {:?}", work.progress()));
    wait_until(state, || work.failure().is_some());
    let (progress, failure) = (work.progress(), work.failure().unwrap().to_string());
    assert!(!progress.is_over && progress.done_bytes < progress.total_bytes, "{progress:?}");
    assert!(failure.contains("cannot write the manifest"), "{failure}");
    std::fs::remove_file(&manifests).unwrap();
    wait_for(&work);
    let progress = work.progress();
    assert_eq!((progress.done_bytes, progress.total_bytes), (4 << 20, 4 << 20));
    let kept = std::fs::read(manifests.join(setup.manifest.to_string())).unwrap();
    assert_eq!(Hash::of(&kept), setup.manifest);
    assert_eq!(setup.bytes(), 4 << 20, "nothing was copied twice");
}

#[test]
fn export_and_verify_merge_reads_of_adjacent_chunks() {
    let setup = setup(4);
    let dir = tempfile::tempdir().unwrap();
    let (to, cancel) = (dir.path().join("disk.raw"), Cancel::new());
    let mut reported = Vec::new();
    let mut progress = |progress: Progress| reported.push(progress.done_bytes);
    export_raw(&setup.far, setup.manifest, &to, &cancel, &mut progress).unwrap();
    assert!(std::fs::read(&to).unwrap() == setup.disk);
    assert!(reported.is_sorted() && reported.last() == Some(&(4 << 20)), "{reported:?}");
    assert!(setup.requests() <= 64 / 8, "{} requests", setup.requests());

    let verify = |round: &VerifyRound, cancel: &Cancel| {
        let before = setup.requests();
        let found = verify_in(&setup.far, setup.manifest, round, cancel, &mut |_| {});
        (found, setup.requests() - before)
    };
    let round = VerifyRound::new(None);
    let (found, requests) = verify(&round, &cancel);
    assert!(found.as_ref().is_ok_and(|found| found.is_sound() && found.chunks == 64), "{found:?}");
    // One more request for the object itself.
    assert!(requests <= 64 / 8 + 1, "{requests} requests");
    // What was correct in a round is not read again.
    let (found, requests) = verify(&round, &cancel);
    assert!(found.is_ok_and(|found| found.is_sound() && found.chunks == 64) && requests == 1);

    setup.damage(10);
    setup.damage(13);
    let found = verify(&VerifyRound::new(None), &cancel).0.unwrap();
    let damaged: Vec<u64> = found.damaged.iter().map(|damaged| damaged.image_offset / CHUNK as u64).collect();
    assert_eq!((damaged, found.damaged_chunks, found.chunks), (vec![10, 13], 2, 64));
    let names = |damaged: &DamagedChunk| damaged.reason.contains(&format!("at {}+", damaged.object_offset));
    assert!(found.damaged.iter().all(names), "{found:?}");
    let failed = export_raw(&setup.far, setup.manifest, &to.with_extension("new"), &cancel, &mut |_| {});
    assert_eq!(failed.unwrap_err().kind(), ImageErrorKind::Damaged);
    cancel.cancel();
    assert_eq!(verify(&round, &cancel).0.unwrap_err().kind(), ImageErrorKind::Cancelled);
    setup.far.line.gone.store(true, Ordering::SeqCst);
    assert_eq!(verify(&VerifyRound::new(None), &Cancel::new()).0.unwrap_err().kind(), ImageErrorKind::Io);
}

#[test]
fn a_damaged_chunk_blocks_the_copy_of_no_other() {
    let setup = setup(24);
    let reader = setup.open(ChunkCache::with_disk(1 << 20, setup.disk_cache()));
    // One chunk in each of this many groups. If each waited for a thread of its own, no thread would be left.
    let damaged: Vec<usize> = (0..4).map(|n| n * 90 + 7).collect();
    let damaged_bytes: u64 = damaged.iter().map(|index| setup.damage(*index)).sum();
    let work = reader.hydrate(&Arc::new(RateLimit::new(None))).unwrap();
    let state = std::fmt::from_fn(|f| write!(f, "all but what is damaged is copied: {:?}", work.progress()));
    wait_until(state, || work.progress().done_bytes >= work.progress().total_bytes - damaged_bytes);
    assert!(!work.progress().is_over);
    assert_eq!(work.failure().unwrap().kind(), ImageErrorKind::Damaged);
    setup.far.line.gone.store(true, Ordering::SeqCst);
    for index in (0..setup.disk.len() / CHUNK).filter(|index| !damaged.contains(index)) {
        assert!(read_chunk(&reader, index) == setup.disk[index * CHUNK..][..4096], "chunk {index}");
    }
}

#[test]
fn a_missing_object_delays_no_other_and_is_requested_once() {
    const HALF: usize = 16 << 20;
    let setup = setup(HALF >> 20);
    let mut longer = setup.disk.clone();
    longer.resize(2 * HALF, 0);
    noise(&mut longer[HALF..], 6);
    let manifest = import_bytes(&setup.far.store, "longer", &longer).version.manifest;
    let cache = ChunkCache::with_disk(1 << 20, setup.disk_cache());
    let reader = VersionReader::open(&setup.far, manifest, cache).unwrap();
    // Its first half is also a part of the other image, and is copied first.
    let objects: Vec<Hash> = reader.outline().objects().iter().map(|object| object.id).collect();
    assert_eq!(objects.len(), 2);
    let line = &setup.far.line;
    *line.missing.lock().unwrap() = Some(objects[0]);
    let work = reader.hydrate(&Arc::new(RateLimit::new(None))).unwrap();
    wait_until("the other one is copied", || work.progress().done_bytes >= HALF as u64);
    assert!(!work.progress().is_over);
    assert_eq!(work.failure().unwrap().kind(), ImageErrorKind::NotFound);
    // It has 16 parts of 1 MiB. Each thread tries one from time to time.
    let asked = line.asked_in_vain.load(Ordering::SeqCst);
    assert!((1..16).contains(&asked), "asked for {asked} times");
    for chunk in HALF / CHUNK..2 * HALF / CHUNK {
        assert!(read_chunk(&reader, chunk) == longer[chunk * CHUNK..][..4096], "chunk {chunk}");
    }
    *line.missing.lock().unwrap() = None;
    wait_for(&work);
    line.gone.store(true, Ordering::SeqCst);
    assert!(read_all(reader.as_ref()) == longer);
}

#[test]
fn copying_keeps_to_its_rate_and_ends_with_its_handle() {
    let setup = setup(32);
    let reader = setup.open(ChunkCache::with_disk(1 << 20, setup.disk_cache()));
    let started = Instant::now();
    let work = reader.hydrate(&Arc::new(RateLimit::new(Some(4 << 20)))).unwrap();
    wait_until("4 MiB are copied", || work.progress().done_bytes >= 4 << 20);
    // 4 MiB at 4 MiB/s, but the first MiB of each thread comes at once. Copying everything would take seconds
    // longer.
    assert!(started.elapsed() >= Duration::from_millis(450), "{:?}", started.elapsed());
    drop(work);
    let at_the_end = setup.bytes();
    std::thread::sleep(Duration::from_millis(1200));
    assert!(setup.bytes() <= at_the_end + (3 << 20));
    assert!(setup.bytes() < 32 << 20);
}

#[test]
fn a_lost_connection_fails_requests_and_not_the_reader() {
    let setup = setup(4);
    let reader = setup.open(ChunkCache::new(64 << 20));
    setup.far.line.gone.store(true, Ordering::SeqCst);
    let range = ByteRange::new(0, 1 << 20).unwrap();
    let read = blocking::wait(reader.as_ref(), Request::Read { range, buffer: vec![0; 1 << 20] });
    assert!(read.unwrap_err().to_string().contains("cut"));
    setup.far.line.gone.store(false, Ordering::SeqCst);
    assert!(read_all(reader.as_ref()) == setup.disk);
    assert_eq!(reader.geometry().size_bytes, 4 << 20);
}
