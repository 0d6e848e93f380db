//! Versions whose store fails once they are made, and tasks that end.

use std::sync::{Mutex, mpsc};

use headwater_image::ChunkCache;
use headwater_store::{Access, LocalDir, Object, Pin, Publication};

use super::*;
use crate::traces::Traces;

/// A store that cannot look one image up, once it is there: it fails when a version was made.
pub(in crate::adapters) struct Unlisted(pub(in crate::adapters) LocalDir);

impl Store for Unlisted {
    fn chunk_bytes(&self) -> u32 {
        self.0.chunk_bytes()
    }
    fn images(&self) -> Result<Vec<headwater_store::Image>, StoreError> {
        self.0.images()
    }
    fn image(&self, name: &ImageName) -> Result<Option<headwater_store::Image>, StoreError> {
        match self.0.image(name)? {
            Some(_) => Err(StoreError::new(StoreErrorKind::Io, "the disk is away")),
            None => Ok(None),
        }
    }
    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.0.manifest(id)
    }
    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        self.0.open_object(id)
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
        change: &mut dyn FnMut(&mut headwater_store::Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.0.change(name, change)
    }
    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<headwater_store::Removed, StoreError> {
        self.0.remove(name, number)
    }
}

#[test]
fn a_version_that_was_made_is_no_failure_where_it_cannot_be_looked_up() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("disk.raw");
    std::fs::write(&source, [7; 8192]).unwrap();
    let store = Unlisted(LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap());
    let order = ImportOrder {
        sector_bytes: None,
        name: "disk".to_owned(),
        source: source.display().to_string(),
        format: None,
        backing: false,
        source_name: None,
        source_id: None,
        note: "a note".to_owned(),
        author: "uid 7".to_owned(),
    };
    let outcome = sources::import(&store, &order, &Arc::default()).unwrap();
    assert!(outcome.created);
    let image = store.0.image(&"disk".parse().unwrap()).unwrap().unwrap();
    let there = version_of(&image, image.newest().unwrap());
    assert_eq!(outcome.version, ImageVersion { channels: Vec::new(), ..there });
}

#[test]
fn a_change_whose_answer_was_lost_is_told_from_one_that_was_not_made() {
    use StoreErrorKind::{Io, Unknown, Unreachable};
    for (kind, is_unknown) in [(Io, false), (Unreachable, false), (Unknown, true)] {
        let error = || StoreError::new(kind, "nobody answered");
        for told in [store_failed(error()), image_failed(error().into())] {
            assert_eq!((told.is_unknown(), told.kind()), (is_unknown, ProblemKind::Failed), "{kind:?}");
        }
    }
}

#[test]
fn a_task_that_is_cancelled_ends_what_tells_no_progress() {
    let (control, stopping) = (Arc::new(TaskControl::default()), Arc::default());
    let (cancel, other) =
        (cancel_of(&control), cancel_of(&Arc::new(TaskControl::new(Arc::clone(&stopping)))));
    assert!(!cancel.is_cancelled() && !other.is_cancelled());
    control.cancel();
    assert!(cancel.is_cancelled() && !other.is_cancelled());
    stopping.store(true, Ordering::Relaxed);
    assert!(other.is_cancelled());
}

#[tokio::test(flavor = "multi_thread")]
async fn looks_at_a_store_that_hangs_leave_threads_for_disks() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap());
    let traces = Arc::new(Traces::new(Arc::clone(&store), ChunkCache::new(1 << 20)));
    let (last_known, daemon) =
        (Arc::new(LastKnown::new("", None)), DaemonName::here(String::new(), dir.path()));
    let images = StoredImages::new(store, traces, NamedServers::default(), last_known, daemon);
    let ((goes_on, hangs), held) = (mpsc::channel::<()>(), Arc::new(AtomicU64::new(0)));
    let hangs = Arc::new(Mutex::new(hangs));
    let begun = || held.load(Ordering::SeqCst);
    // Each of these clients goes away, and leaves its thread, or its place in the queue.
    for _ in 0..2 * MAX_OPERATIONS {
        let (hangs, held) = (Arc::clone(&hangs), Arc::clone(&held));
        let look = images.blocking("look", move || {
            held.fetch_add(1, Ordering::SeqCst);
            // Until the sender is gone.
            drop(hangs.lock().map(|hangs| hangs.recv()));
            Ok(())
        });
        tokio::select! {
            biased;
            _ = look => panic!("the store hangs"),
            () = std::future::ready(()) => {}
        }
    }
    let most = MAX_OPERATIONS as u64;
    headwater_testkit::wait_until("as many threads as may hang", || begun() == most);
    drop(goes_on);
    // The store is back, and nothing is done for those who are gone.
    assert!(images.list().await.unwrap().images.is_empty());
    assert_eq!(begun(), most);
}
