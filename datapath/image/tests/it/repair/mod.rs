//! Tests of repairs. Shared here: damage, and a store that counts requests.

mod from_other_objects;
mod from_stores;
mod holes_uncached;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use headwater_image::manifest::ChunkRef;
use headwater_image::{Cancel, Manifest, RepairProgress, Verified, VerifyRound, repair, verify};
use headwater_store::{
    Hash, Image, ImageName, LocalDir, Object, Patch, Pin, Publication, Removed, Store, StoreError,
    StoreErrorKind, Version,
};

use crate::fixture::flip;

/// The chunk size of the stores in these tests.
pub(crate) const CHUNK_BYTES: usize = 65_536;

pub(crate) fn object_path(dir: &Path, version: &Version) -> PathBuf {
    dir.join("objects").join(version.objects[0].to_string())
}

pub(crate) fn check(store: &LocalDir, version: &Version) -> Verified {
    verify(store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap()
}

pub(crate) fn repair_object(
    store: &LocalDir,
    version: &Version,
    sources: &[Arc<dyn Store>],
) -> headwater_image::Repaired {
    repair_with_progress(store, version, sources, &mut |_| {})
}

/// The same, with progress reports.
pub(crate) fn repair_with_progress(
    store: &LocalDir,
    version: &Version,
    sources: &[Arc<dyn Store>],
    progress: &mut dyn FnMut(RepairProgress),
) -> headwater_image::Repaired {
    let (found, round) = (check(store, version), VerifyRound::new(None));
    repair(store, version.manifest, &found, (&round, sources), &Cancel::new(), progress).unwrap()
}

/// The data object in which a version has a chunk, and the place of the chunk in it.
pub(crate) fn place(store: &LocalDir, version: &Version, index: u64) -> (Hash, ChunkRef) {
    let manifest = Manifest::decode(&store.manifest(version.manifest).unwrap()).unwrap();
    let chunk = *manifest.chunk(index).unwrap();
    (manifest.objects()[chunk.object as usize].id, chunk)
}

/// Makes bytes in the middle of a chunk wrong.
pub(crate) fn spoil(dir: &Path, (object, chunk): (Hash, ChunkRef)) {
    let middle = chunk.offset + u64::from(chunk.stored_bytes / 2);
    (middle..middle + 32).for_each(|at| flip(&dir.join("objects").join(object.to_string()), at));
}

/// A store that records the largest patch, and how many bytes of its objects were read.
pub(crate) struct Noting {
    pub(crate) store: LocalDir,
    pub(crate) patched_bytes: AtomicUsize,
    pub(crate) read_bytes: Arc<AtomicU64>,
    /// It has no space for another data object.
    pub(crate) is_full: AtomicBool,
    /// How many data objects it refused.
    pub(crate) refusals: AtomicUsize,
    /// How many manifests were requested.
    pub(crate) asked: AtomicUsize,
    /// How many of the next requests for manifests fail without an answer.
    pub(crate) falters: AtomicUsize,
}

impl Noting {
    pub(crate) fn new(store: LocalDir) -> Self {
        let [patched_bytes, refusals, asked, falters] = [0; 4].map(AtomicUsize::new);
        let (read_bytes, is_full) = (Arc::default(), AtomicBool::new(false));
        Self { store, patched_bytes, read_bytes, is_full, refusals, asked, falters }
    }

    /// The number of manifests that were requested since the last call.
    pub(crate) fn take_asked(&self) -> usize {
        self.asked.swap(0, Ordering::Relaxed)
    }

    /// The bytes that were read since the last call.
    pub(crate) fn take_read(&self) -> u64 {
        self.read_bytes.swap(0, Ordering::Relaxed)
    }
}

struct NotingObject(Arc<dyn Object>, Arc<AtomicU64>);

impl Object for NotingObject {
    fn id(&self) -> Hash {
        self.0.id()
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.1.fetch_add(into.len() as u64, Ordering::Relaxed);
        self.0.read_range(offset, into)
    }
}

impl Store for Noting {
    fn chunk_bytes(&self) -> u32 {
        self.store.chunk_bytes()
    }

    fn shown(&self) -> String {
        self.store.shown()
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.store.images()
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        self.store.image(name)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let falters = self.falters.load(Ordering::Relaxed);
        if falters > 0 {
            self.falters.store(falters - 1, Ordering::Relaxed);
            return Err(StoreError::new(StoreErrorKind::Unreachable, "it does not answer"));
        }
        self.store.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(NotingObject(self.store.open_object(id)?, Arc::clone(&self.read_bytes))))
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.store.pin(manifest)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        if self.is_full.load(Ordering::Relaxed) {
            self.refusals.fetch_add(1, Ordering::Relaxed);
            return Err(StoreError::new(StoreErrorKind::NoSpace, "there is no room"));
        }
        self.store.publish()
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.store.change(name, change)
    }

    fn repair_object(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        self.patched_bytes.fetch_max(patches.iter().map(|patch| patch.bytes.len()).sum(), Ordering::Relaxed);
        self.store.repair_object(object, patches)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.store.remove(name, number)
    }
}
