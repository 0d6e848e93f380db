//! Versions that somebody asked for lately are held, so that they are not removed under a reader.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_store::{Hash, Pin, Store, StoreError};
use parking_lot::Mutex;

/// How long a version is held after its manifest was asked for.
pub const LEASE: Duration = Duration::from_secs(3600);
/// The most versions that are held.
pub const LEASES_MAX: usize = 4096;

/// The versions that are held.
pub(crate) struct Leases {
    store: Arc<dyn Store>,
    held: Mutex<HashMap<Hash, (Pin, Instant)>>,
}

impl Leases {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, held: Mutex::new(HashMap::new()) }
    }

    /// Holds a version from `now` on. Blocks on I/O where it is not held yet.
    pub(crate) fn renew(&self, manifest: Hash, now: Instant) -> Result<(), StoreError> {
        {
            let mut held = self.held.lock();
            held.retain(|_, (_, until)| *until > now);
            if let Some((_, until)) = held.get_mut(&manifest) {
                *until = now + LEASE;
                return Ok(());
            }
        }
        let pin = self.store.pin(manifest)?;
        let mut held = self.held.lock();
        if held.len() < LEASES_MAX {
            held.insert(manifest, (pin, now + LEASE));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_store::{Access, LocalDir, NewVersion};

    #[test]
    fn a_version_is_held_for_an_hour_after_the_last_time() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        let name = "a".parse().unwrap();
        let new = NewVersion {
            name: &name,
            manifest: b"m",
            objects: &[],
            size_bytes: 512,
            created_at_s: 0,
            source: "",
            note: "",
            author: "",
            unless_newest: false,
        };
        let version = store.publish().unwrap().commit(new).unwrap();
        let leases = Leases::new(Arc::new(store.clone()));
        let start = Instant::now();
        leases.renew(version.manifest, start).unwrap();
        leases.renew(version.manifest, start + LEASE / 2).unwrap();
        assert!(leases.renew(Hash::of(b"other"), start + LEASE).is_err());
        assert!(store.remove(&name, Some(1)).is_err());
        assert!(leases.renew(Hash::of(b"other"), start + LEASE * 3 / 2).is_err());
        store.remove(&name, Some(1)).unwrap();
    }
}
