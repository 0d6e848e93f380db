//! Pins versions that were requested recently, so that they are not removed while a client reads them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_store::{Hash, Pin, Store, StoreError};
use parking_lot::Mutex;

/// How long a version is pinned after a request for its manifest.
pub const LEASE: Duration = Duration::from_secs(3600);
/// The most versions that are pinned.
pub const LEASES_MAX: usize = 4096;

/// The pinned versions.
pub(crate) struct Leases {
    store: Arc<dyn Store>,
    lease: Duration,
    held: Mutex<HashMap<Hash, (Pin, Instant)>>,
}

impl Leases {
    /// Pins versions of `store`, each for `lease`.
    pub(crate) fn new(store: Arc<dyn Store>, lease: Duration) -> Self {
        Self { store, lease, held: Mutex::new(HashMap::new()) }
    }

    /// Pins a version until `now` plus the lease. Returns whether this pinned it (`false`: it was pinned
    /// already, or the limit is reached). Blocks on I/O if it was not pinned.
    pub(crate) fn renew(&self, manifest: Hash, now: Instant) -> Result<bool, StoreError> {
        if let Some((_, until)) = self.held.lock().get_mut(&manifest) {
            *until = now + self.lease;
            return Ok(false);
        }
        let pin = self.store.pin(manifest)?;
        // A pin that is not kept is released after the lock, because that may be network I/O.
        let (is_new, _superfluous) = {
            let mut held = self.held.lock();
            if held.len() < LEASES_MAX || held.contains_key(&manifest) {
                let before = held.insert(manifest, (pin, now + self.lease)).map(|(pin, _)| pin);
                (before.is_none(), before)
            } else {
                (false, Some(pin))
            }
        };
        Ok(is_new)
    }

    /// Unpins a version. Blocks on I/O.
    pub(crate) fn drop_one(&self, manifest: Hash) {
        let held = self.held.lock().remove(&manifest);
        drop(held);
    }

    /// Unpins versions whose lease has expired. Blocks on I/O.
    pub(crate) fn expire(&self, now: Instant) {
        let over: Vec<_> = self.held.lock().extract_if(|_, (_, until)| *until <= now).collect();
        drop(over);
    }

    /// Unpins all versions. Blocks on I/O.
    pub(crate) fn end(&self) {
        let all = std::mem::take(&mut *self.held.lock());
        drop(all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_store::{Access, LocalDir, NewVersion};

    #[test]
    fn a_version_is_pinned_for_an_hour_after_the_last_request() {
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
            newest_at_most: None,
            is_sealed: false,
            keeps_identity: false,
        };
        let version = store.publish().unwrap().commit(new).unwrap().version;
        let leases = Leases::new(Arc::new(store.clone()), LEASE);
        let start = Instant::now();
        assert!(leases.renew(version.manifest, start).unwrap());
        assert!(!leases.renew(version.manifest, start + LEASE / 2).unwrap());
        leases.expire(start + LEASE);
        assert!(store.remove(&name, Some(1)).is_err());
        leases.expire(start + LEASE * 3 / 2);
        store.remove(&name, Some(1)).unwrap();
    }
}
