//! The chunk maps (where each chunk is stored) of open versions. All readers of a version share one map,
//! which is read once.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use headwater_store::Hash;
use parking_lot::{Condvar, Mutex};

use crate::chunk_map::ChunkMap;
use crate::error::ImageError;

/// The chunk maps in use.
#[derive(Default)]
pub(crate) struct OpenMaps {
    slots: Mutex<HashMap<Hash, Slot>>,
    /// Signals that a thread has finished reading a map.
    read: Condvar,
}

enum Slot {
    Reading,
    Open(Weak<ChunkMap>),
}

impl OpenMaps {
    /// Returns the map that another reader has or is reading now, otherwise the result of `read`. If the
    /// other read fails, a waiting caller reads too, and gets an error of its own.
    pub(crate) fn get(
        &self,
        id: Hash,
        read: impl FnOnce() -> Result<ChunkMap, ImageError>,
    ) -> Result<Arc<ChunkMap>, ImageError> {
        let mut slots = self.slots.lock();
        let waits = matches!(slots.get(&id), Some(Slot::Reading));
        self.read.wait_while(&mut slots, |slots| waits && matches!(slots.get(&id), Some(Slot::Reading)));
        if let Some(Slot::Open(open)) = slots.get(&id)
            && let Some(map) = open.upgrade()
        {
            return Ok(map);
        }
        slots.retain(|_, slot| !matches!(slot, Slot::Open(open) if open.strong_count() == 0));
        // Callers that waited for a failed read do not wait for each other.
        let reading = (!waits).then(|| {
            slots.insert(id, Slot::Reading);
            Reading { maps: self, id }
        });
        drop(slots);
        let map = Arc::new(read()?);
        self.slots.lock().insert(id, Slot::Open(Arc::downgrade(&map)));
        drop(reading);
        Ok(map)
    }
}

/// Ends the wait of other callers, even if reading fails.
struct Reading<'a> {
    maps: &'a OpenMaps,
    id: Hash,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut slots = self.maps.slots.lock();
        if matches!(slots.get(&self.id), Some(Slot::Reading)) {
            slots.remove(&self.id);
        }
        drop(slots);
        self.maps.read.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ImageErrorKind;
    use crate::manifest::ManifestBuilder;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn map() -> ChunkMap {
        ChunkMap::Whole(ManifestBuilder::new(4096, 65_536, None).finish(&[]).unwrap())
    }

    #[test]
    fn concurrent_openers_share_one_read_of_a_map() {
        let (open, id) = (OpenMaps::default(), Hash::of(b"m"));
        let reads = AtomicUsize::new(0);
        let (begun, wait_begun) = std::sync::mpsc::channel();
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let (open, reads) = (&open, &reads);
            let first = scope.spawn(move || {
                open.get(id, || {
                    reads.fetch_add(1, Ordering::SeqCst);
                    begun.send(()).unwrap();
                    wait.recv().unwrap();
                    Ok(map())
                })
            });
            wait_begun.recv().unwrap();
            let other = || {
                open.get(id, || {
                    reads.fetch_add(1, Ordering::SeqCst);
                    Ok(map())
                })
            };
            let others: Vec<_> = (0..8).map(|_| scope.spawn(other)).collect();
            go_on.send(()).unwrap();
            let first = first.join().unwrap().unwrap();
            for other in others {
                assert!(Arc::ptr_eq(&first, &other.join().unwrap().unwrap()));
            }
        });
        assert_eq!(reads.load(Ordering::SeqCst), 1);
        // No reader has it any more.
        open.get(id, || {
            reads.fetch_add(1, Ordering::SeqCst);
            Ok(map())
        })
        .unwrap();
        assert_eq!(reads.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_failed_map_read_releases_all_waiters() {
        let (open, id) = (OpenMaps::default(), Hash::of(b"m"));
        let fails = || open.get(id, || Err(ImageError::new(ImageErrorKind::Io, "gone"))).map(drop);
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(fails)).collect();
            assert!(all.into_iter().all(|one| one.join().unwrap().is_err()));
        });
        let panics = || open.get(id, || panic!("a bug")).map(drop);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert!(open.get(id, || Ok(map())).is_ok());
    }
}
