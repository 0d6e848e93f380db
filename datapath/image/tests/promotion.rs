//! A prefetch for which a read waits is served before later reads. This test has its own process because it
//! occupies all threads of the pool.

#[path = "it/fixture/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod fixture;

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use fixture::{import_bytes, noise, store};
use headwater_block::{ByteRange, Completion, Device, Request};
use headwater_image::{ChunkCache, FETCH_THREADS, VersionReader};
use headwater_store::{
    Hash, Image, ImageName, LocalDir, Object, Pin, Publication, Removed, Store, StoreError,
};
use parking_lot::{Condvar, Mutex};

/// Reads in progress, in the order in which they began, and how many of them may continue.
#[derive(Default)]
struct Gate {
    state: Mutex<(Vec<u64>, usize)>,
    changed: Condvar,
}

impl Gate {
    fn enter(&self, offset: u64) {
        let mut state = self.state.lock();
        let turn = state.0.len();
        state.0.push(offset);
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| state.1 <= turn);
    }

    /// Waits until this many reads have begun.
    fn began(&self, reads: usize) {
        let until = Instant::now() + Duration::from_secs(60);
        let mut state = self.state.lock();
        while state.0.len() < reads {
            assert!(Instant::now() < until, "{:?}", state.0);
            self.changed.wait_for(&mut state, Duration::from_millis(100));
        }
    }

    /// Lets one more read continue, or all.
    fn open(&self, one: bool) {
        let mut state = self.state.lock();
        state.1 = if one { state.1 + 1 } else { usize::MAX };
        self.changed.notify_all();
    }
}

struct GatedStore(LocalDir, Arc<Gate>);

struct GatedObject(Arc<dyn Object>, Arc<Gate>);

impl Object for GatedObject {
    fn id(&self) -> Hash {
        self.0.id()
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.1.enter(offset);
        self.0.read_range(offset, into)
    }
}

impl Store for GatedStore {
    fn chunk_bytes(&self) -> u32 {
        self.0.chunk_bytes()
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.0.images()
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        self.0.image(name)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.0.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(GatedObject(self.0.open_object(id)?, Arc::clone(&self.1))))
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.0.pin(manifest)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        self.0.publish()
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.0.change(name, change)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.0.remove(name, number)
    }
}

#[test]
fn an_awaited_prefetch_precedes_later_reads() {
    let (_dir, store) = store();
    let mut disk = vec![0; 8 << 20];
    noise(&mut disk, 3);
    let version = import_bytes(&store, "disk", &disk).version;
    let gate = Arc::new(Gate::default());
    let store = GatedStore(store, Arc::clone(&gate));
    let reader = VersionReader::open(&store, version.manifest, ChunkCache::new(64 << 20)).unwrap();
    reader.stop_readahead();
    let (tx, rx) = mpsc::channel();
    let submit = |chunk: u64, ahead: bool| {
        let range = ByteRange::new(chunk * 65_536, 4096).unwrap();
        let buffer = vec![0; 4096];
        let tx = tx.clone();
        let done = Completion::new(move |o| tx.send(o.result.is_ok()).unwrap());
        reader
            .submit(if ahead { Request::Prefetch { range } } else { Request::Read { range, buffer } }, done);
    };
    let of = |chunk: u64| reader.manifest().unwrap().chunk(chunk).unwrap().offset;
    // All threads are busy. Then come a prefetch, reads, a read of the prefetched chunk, and later reads.
    (0..FETCH_THREADS as u64).for_each(|n| submit(n * 2, false));
    gate.began(FETCH_THREADS);
    submit(100, true);
    [50, 52].into_iter().for_each(|chunk| submit(chunk, false));
    submit(100, false);
    [60, 62, 64].into_iter().for_each(|chunk| submit(chunk, false));
    for more in 1..=6 {
        gate.open(true);
        gate.began(FETCH_THREADS + more);
    }
    let began = gate.state.lock().0[FETCH_THREADS..].to_vec();
    gate.open(false);
    assert_eq!(began, [50, 52, 100, 60, 62, 64].map(of));
    (0..FETCH_THREADS + 7).for_each(|_| assert!(rx.recv().unwrap()));
}
