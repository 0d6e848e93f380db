//! The boot traces of a store's versions: found, merged, kept with the version or on this host, removed.

use std::sync::Arc;

use headwater_image::{ChunkCache, ImageError, ImageErrorKind, Trace};
use headwater_store::{Hash, Store, StoreErrorKind};
use parking_lot::Mutex;

/// A version whose trace has so many boots is not recorded any more.
pub const BOOTS_RECORDED: u32 = 4;

/// Where a trace is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the store, with its version.
    Store,
    /// In the chunk cache on this host's disk, because the store is only read.
    Host,
}

/// The traces of one store, and of this host for its versions.
pub struct Traces {
    store: Arc<dyn Store>,
    chunks: Arc<ChunkCache>,
    /// Held from reading a trace to writing it: machines that boot at the same time are all taken in.
    changing: Mutex<()>,
}

impl Traces {
    /// Those of `store`, and of the cache over it.
    pub fn new(store: Arc<dyn Store>, chunks: Arc<ChunkCache>) -> Self {
        Self { store, chunks, changing: Mutex::new(()) }
    }

    /// The trace that knows most boots: that of the store, or the one recorded on this host. One that cannot be
    /// read only makes a boot slower.
    pub fn find(&self, manifest: Hash) -> Option<(Trace, Place)> {
        let theirs = self.store.trace(manifest).unwrap_or_else(|e| {
            tracing::info!(version = %manifest.short(), error = %e, "no boot trace");
            None
        });
        let ours = self.chunks.disk().and_then(|disk| disk.trace(manifest));
        // Of two that know as many, the last one counts: that of the store.
        let both = [(ours, Place::Host), (theirs, Place::Store)].into_iter();
        let decoded = both.filter_map(|(bytes, place)| match Trace::decode(&bytes?) {
            Ok(trace) if trace.manifest == manifest => Some((trace, place)),
            Ok(_) => None,
            Err(e) => {
                tracing::warn!(version = %manifest.short(), error = %e, "the boot trace is not used");
                None
            }
        });
        decoded.max_by_key(|(trace, _)| trace.boots)
    }

    /// Takes boots into what is kept, and keeps that. Returns it.
    pub fn merge(&self, boots: Trace) -> Result<(Trace, Place), ImageError> {
        let _alone = self.changing.lock();
        let merged = match self.find(boots.manifest) {
            Some((mut known, _)) => {
                known.merge(&boots);
                known
            }
            None => boots,
        };
        let place = self.keep(&merged)?;
        Ok((merged, place))
    }

    /// Keeps a trace with the version, or where the store is only read, on this host.
    fn keep(&self, trace: &Trace) -> Result<Place, ImageError> {
        match self.store.set_trace(trace.manifest, Some(&trace.encode())) {
            Err(e) if e.kind() == StoreErrorKind::ReadOnly => {}
            kept => return kept.map(|()| Place::Store).map_err(ImageError::from),
        }
        match self.chunks.disk() {
            Some(disk) => disk.set_trace(trace.manifest, Some(&trace.encode())).map(|()| Place::Host),
            None => Err(ImageError::new(
                ImageErrorKind::Unsupported,
                "the store is only read, and there is no chunk cache on disk (--chunk-cache) to keep it in",
            )),
        }
    }

    /// Forgets the trace, wherever it is.
    pub fn remove(&self, manifest: Hash) -> Result<(), ImageError> {
        let _alone = self.changing.lock();
        if let Some(disk) = self.chunks.disk() {
            disk.set_trace(manifest, None)?;
        }
        match self.store.set_trace(manifest, None) {
            Err(e) if e.kind() == StoreErrorKind::ReadOnly => match self.store.trace(manifest) {
                Ok(Some(_)) => Err(ImageError::new(
                    ImageErrorKind::Busy,
                    "the boot trace is kept by servers, which are only read: remove it on their host",
                )),
                _ => Ok(()),
            },
            removed => removed.map_err(ImageError::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_image::{ImportOptions, import, null_device};
    use headwater_store::{Access, LocalDir};

    #[test]
    fn boots_of_many_machines_are_all_taken_in_and_forgotten_together() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        let options = ImportOptions::new("disk".parse().unwrap(), 0);
        let imported = import(null_device(1 << 20).unwrap(), &store, &options, &mut |_| {}).unwrap();
        let manifest = imported.version.manifest;
        let traces = Traces::new(Arc::new(store), ChunkCache::new(16 << 20));
        assert!(traces.find(manifest).is_none());
        std::thread::scope(|scope| {
            for boot in 0..3u64 {
                let traces = &traces;
                scope.spawn(move || {
                    traces.merge(Trace::of_boot(manifest, &[(1, 0), (10 + boot, 5)])).unwrap();
                });
            }
        });
        let (trace, place) = traces.find(manifest).unwrap();
        // What one of three touched is left out, but for the latest.
        assert_eq!((trace.boots, trace.chunks.len(), place), (3, 2, Place::Store));
        traces.remove(manifest).unwrap();
        assert!(traces.find(manifest).is_none());
        traces.remove(manifest).unwrap();
    }
}
