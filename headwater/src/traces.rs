//! The boot traces of a store's versions: finds, merges, stores and removes them, in the store or on this host.

use std::collections::HashMap;
use std::sync::Arc;

use headwater_image::{ChunkCache, ImageError, ImageErrorKind, Trace};
use headwater_store::{Hash, Store, StoreErrorKind};
use parking_lot::Mutex;

/// A version whose trace has this number of boots is not recorded any more.
pub const BOOTS_RECORDED: u32 = 4;

/// The number of incomplete boots of a version that this process merges: otherwise machines that all end soon would
/// make the trace grow forever.
const PARTS_MAX: u32 = 4;
/// The number of versions for which these are counted.
const PARTS_VERSIONS_MAX: usize = 256;

/// Why boots are not recorded if that is disabled.
const SWITCHED_OFF: &str = "the daemon was started with --boot-trace off";
/// Why boots are not recorded if a trace cannot be stored.
const NO_PLACE: &str =
    "the store is read-only, and there is no chunk cache on disk (--chunk-cache) for traces";

/// Where a trace is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the store, with its version.
    Store,
    /// In the chunk cache on this host's disk, because the store is read-only.
    Host,
}

/// Traces for a store that another process of this host writes. They stay here until that process has stored them.
#[derive(Default)]
pub struct TraceOutbox(Mutex<HashMap<Hash, Vec<u8>>>);

impl TraceOutbox {
    /// A waiting trace, and its version.
    pub fn next(&self) -> Option<(Hash, Vec<u8>)> {
        self.0.lock().iter().next().map(|(manifest, trace)| (*manifest, trace.clone()))
    }

    /// The number of waiting traces.
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Removes a trace that the other process has stored, unless there is a newer one.
    pub fn remove_stored(&self, manifest: Hash, stored: &[u8]) {
        let mut waiting = self.0.lock();
        if waiting.get(&manifest).is_some_and(|trace| trace == stored) {
            waiting.remove(&manifest);
        }
    }
}

/// The traces of one store's versions, in the store and on this host.
pub struct Traces {
    store: Arc<dyn Store>,
    chunks: Arc<ChunkCache>,
    /// Locked from reading a trace to writing it, so that no concurrent boot is lost.
    changing: Mutex<()>,
    /// The number of incomplete boots that were merged, by version.
    parts: Mutex<HashMap<Hash, u32>>,
    /// Whether recording is disabled.
    is_off: bool,
    /// The traces that wait for the process that writes the store, if this process does not.
    outbox: Option<Arc<TraceOutbox>>,
}

impl Traces {
    /// The traces of `store`, and of the cache over it.
    pub fn new(store: Arc<dyn Store>, chunks: Arc<ChunkCache>) -> Self {
        Self { store, chunks, changing: Mutex::new(()), parts: Mutex::default(), is_off: false, outbox: None }
    }

    /// Disables recording.
    #[must_use]
    pub fn without_recordings(self) -> Self {
        Self { is_off: true, ..self }
    }

    /// Sends traces to another process, which writes the store.
    #[must_use]
    pub fn through(self, outbox: Option<Arc<TraceOutbox>>) -> Self {
        Self { outbox, ..self }
    }

    /// Why boots are not recorded or stored, if that is known in advance.
    pub fn unrecorded(&self) -> Option<&'static str> {
        let has_place = !self.store.is_read_only() || self.outbox.is_some() || self.chunks.disk().is_some();
        match (self.is_off, has_place) {
            (true, _) => Some(SWITCHED_OFF),
            (false, false) => Some(NO_PLACE),
            (false, true) => None,
        }
    }

    /// The trace with most boots: that of the store, or that of this host. A trace that cannot be
    /// read only makes a boot slower, so it is not an error.
    pub fn find(&self, manifest: Hash) -> Option<(Trace, Place)> {
        let theirs = self.store.trace(manifest).unwrap_or_else(|e| {
            tracing::info!(version = %manifest.short(), error = %e, "no boot trace");
            None
        });
        self.best_of(manifest, theirs)
    }

    /// The present trace before a merge. A store that does not answer is an error, because its trace could be lost
    /// otherwise.
    fn known(&self, manifest: Hash) -> Result<Option<Trace>, ImageError> {
        let theirs = match self.store.trace(manifest) {
            // A damaged trace is ignored. On a remote store other errors may be temporary.
            Err(e) if e.kind() == StoreErrorKind::Damaged || !self.store.is_remote() => None,
            theirs => theirs?,
        };
        Ok(self.best_of(manifest, theirs).map(|(trace, _)| trace))
    }

    /// The better one of the store's and this host's trace.
    fn best_of(&self, manifest: Hash, theirs: Option<Vec<u8>>) -> Option<(Trace, Place)> {
        let ours = self.chunks.disk().and_then(|disk| disk.trace(manifest));
        // With the same number of boots, the last one wins: that of the store.
        let sent = self.outbox.as_ref().and_then(|outbox| outbox.0.lock().get(&manifest).cloned());
        let all = [(ours, Place::Host), (theirs, Place::Store), (sent, Place::Store)].into_iter();
        let decoded = all.filter_map(|(bytes, place)| match Trace::decode(&bytes?) {
            Ok(trace) if trace.manifest == manifest => Some((trace, place)),
            Ok(_) => None,
            Err(e) => {
                tracing::warn!(version = %manifest.short(), error = %e, "a boot trace cannot be read, and is not used");
                None
            }
        });
        decoded.max_by_key(|(trace, _)| trace.boots)
    }

    /// Merges boots with the stored trace, stores and returns the result.
    pub fn merge(&self, boots: Trace) -> Result<(Trace, Place), ImageError> {
        let _alone = self.changing.lock();
        let merged = match self.known(boots.manifest)? {
            Some(mut known) => {
                known.merge(&boots);
                known
            }
            None => boots,
        };
        let place = self.keep(&merged)?;
        Ok((merged, place))
    }

    /// Merges the reads of a machine that ended before its guest was up. They are no full boot, but better than
    /// nothing: if there is no trace, they become one of one boot. `None`: they contain nothing new, or enough
    /// such parts were merged.
    pub fn merge_part(&self, part: Trace) -> Result<Option<(Trace, Place)>, ImageError> {
        let _alone = self.changing.lock();
        let manifest = part.manifest;
        if self.parts.lock().get(&manifest).is_some_and(|count| *count >= PARTS_MAX) {
            return Ok(None);
        }
        let merged = match self.known(manifest)? {
            Some(mut known) => {
                if !known.add(&part) {
                    return Ok(None);
                }
                known
            }
            None => part,
        };
        let place = self.keep(&merged)?;
        let mut parts = self.parts.lock();
        if parts.len() >= PARTS_VERSIONS_MAX && !parts.contains_key(&manifest) {
            parts.clear();
        }
        *parts.entry(manifest).or_default() += 1;
        Ok(Some((merged, place)))
    }

    /// Stores a trace with the version, or on this host if the store is read-only.
    fn keep(&self, trace: &Trace) -> Result<Place, ImageError> {
        if let Some(outbox) = &self.outbox {
            outbox.0.lock().insert(trace.manifest, trace.encode());
            return Ok(Place::Store);
        }
        match self.store.set_trace(trace.manifest, Some(&trace.encode())) {
            Err(e) if e.kind() == StoreErrorKind::ReadOnly => {}
            kept => return kept.map(|()| Place::Store).map_err(ImageError::from),
        }
        match self.chunks.disk() {
            Some(disk) => disk.set_trace(trace.manifest, Some(&trace.encode())).map(|()| Place::Host),
            None => Err(ImageError::new(ImageErrorKind::Unsupported, NO_PLACE)),
        }
    }

    /// Removes the trace from the store and this host.
    pub fn remove(&self, manifest: Hash) -> Result<(), ImageError> {
        let _alone = self.changing.lock();
        self.parts.lock().remove(&manifest);
        if let Some(disk) = self.chunks.disk() {
            disk.set_trace(manifest, None)?;
        }
        match self.store.set_trace(manifest, None) {
            Err(e) if e.kind() == StoreErrorKind::ReadOnly => match self.store.trace(manifest) {
                Ok(Some(_)) => Err(ImageError::new(
                    ImageErrorKind::Busy,
                    "the boot trace is stored on servers, which are read-only: remove it on their host",
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
        // Chunks that only one of three boots read are dropped, except for the latest boot.
        assert_eq!((trace.boots, trace.chunks.len(), place), (3, 2, Place::Store));
        traces.remove(manifest).unwrap();
        assert!(traces.find(manifest).is_none());
        traces.remove(manifest).unwrap();
    }
}
