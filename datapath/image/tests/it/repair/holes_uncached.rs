//! Repairs of a lost data object from a store that at first reports too large holes.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use headwater_image::Manifests;
use headwater_store::{
    Hash, Holes, Image, ImageName, LocalDir, Object, Pin, Publication, Removed, Store, StoreError,
    StoreErrorKind,
};

use super::{CHUNK_BYTES, check, object_path, repair_object};
use crate::fixture::{import_bytes, noise, store};

/// A store whose objects report too large holes at first, like a store with several servers of which some
/// have not answered yet.
struct PartlyAnswered {
    store: LocalDir,
    first: Arc<Holes>,
    asked: Arc<Asked>,
}

/// How often the holes were requested without caches, and what happens then.
#[derive(Default)]
struct Asked {
    times: AtomicU64,
    /// The store reports the true holes.
    helps: AtomicBool,
    /// The request fails.
    fails: AtomicBool,
}

struct PartlyAnsweredObject {
    object: Arc<dyn Object>,
    first: Arc<Holes>,
    asked: Arc<Asked>,
}

impl Object for PartlyAnsweredObject {
    fn id(&self) -> Hash {
        self.object.id()
    }

    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.object.read_range(offset, into)
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        let is_heard =
            self.asked.helps.load(Ordering::Relaxed) && self.asked.times.load(Ordering::Relaxed) > 0;
        if is_heard { self.object.holes() } else { Ok(Arc::clone(&self.first)) }
    }

    fn holes_uncached(&self) -> Result<Arc<Holes>, StoreError> {
        self.asked.times.fetch_add(1, Ordering::Relaxed);
        if self.asked.fails.load(Ordering::Relaxed) {
            return Err(StoreError::new(StoreErrorKind::Unreachable, "it does not answer"));
        }
        self.holes()
    }
}

impl Store for PartlyAnswered {
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
        self.store.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        let (object, first) = (self.store.open_object(id)?, Arc::clone(&self.first));
        Ok(Arc::new(PartlyAnsweredObject { object, first, asked: Arc::clone(&self.asked) }))
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

#[test]
fn an_incomplete_source_is_asked_once_more_for_its_holes() {
    let mut disk = vec![0; 8 * CHUNK_BYTES];
    noise(&mut disk, 1);
    let ((dir, here), (_whole_dir, whole), (_left_dir, left)) = (store(), store(), store());
    let version = import_bytes(&here, "disk", &disk).version;
    import_bytes(&whole, "disk", &disk);
    // A store that removed the version, and keeps only the half of the object that another version needs.
    import_bytes(&left, "disk", &disk);
    noise(&mut disk[..4 * CHUNK_BYTES], 2);
    import_bytes(&left, "disk", &disk);
    left.remove(&"disk".parse().unwrap(), Some(version.number)).unwrap();
    assert!(left.trim(&Manifests).unwrap() > 0);
    let first = left.open_object(version.objects[0]).unwrap().holes().unwrap();
    let asked = Arc::new(Asked::default());
    let source: Arc<dyn Store> = Arc::new(PartlyAnswered { store: whole, first, asked: Arc::clone(&asked) });

    let path = object_path(dir.path(), &version);
    let good = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    // If the request fails, the first answer still counts.
    for fails in [true, false] {
        asked.fails.store(fails, Ordering::Relaxed);
        let done = repair_object(&here, &version, &[Arc::clone(&source)]);
        assert!(!done.left.is_sound() && done.objects == 0, "{done:?}");
        assert!(done.reasons.iter().any(|why| why.contains("has deleted parts")), "{:?}", done.reasons);
        assert_eq!(asked.times.swap(0, Ordering::Relaxed), 1);
    }
    asked.helps.store(true, Ordering::Relaxed);
    let done = repair_object(&here, &version, &[source]);
    assert_eq!((done.objects, done.left.is_sound()), (1, true), "{:?}", done.reasons);
    assert_eq!(asked.times.load(Ordering::Relaxed), 1);
    assert!(fs::read(&path).unwrap() == good && check(&here, &version).is_sound());
}
