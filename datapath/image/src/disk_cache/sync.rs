//! Makes the contents of the chunk cache on disk durable, for copies of whole versions that must survive a
//! power cut (hydration). Chunks that are cached only because somebody read them are not synced one by one.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use headwater_store::Hash;

use crate::disk_cache::moving::places_in;
use crate::disk_cache::{DiskCache, State, Synced};
use crate::error::ImageError;

/// The prefix of the name of a segment that could not be synced. Its number follows.
pub(super) const LOST: &str = "lost-";

/// Whether a file's name says that it could not be synced.
pub(super) fn is_lost(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(LOST))
}

/// A segment with chunks that are not durable yet.
pub(super) struct ToSync {
    path: PathBuf,
    file: Arc<File>,
    /// These chunks, and their offsets. A chunk that arrives or is replaced during the sync may not be
    /// covered by it.
    pub(super) chunks: Vec<(Hash, u64)>,
}

impl DiskCache {
    /// Makes the cache durable. Chunks that could not be synced count as missing from then on. The system
    /// reports a failed sync only once, so a later sync would not notice. After the first error, which is
    /// returned, all other files are still synced.
    pub(crate) fn sync(&self) -> Result<(), ImageError> {
        let _one_at_a_time = self.syncing.lock();
        let numbers: Vec<u64> = self.state.lock().segments.iter().map(|segment| segment.number).collect();
        let mut first_failure = None;
        for number in numbers {
            // One segment at a time, because readers wait for this lock.
            let to_sync = self.state.lock().to_sync(number);
            let Some(ToSync { path, file, chunks }) = to_sync else { continue };
            match file.sync_data() {
                Ok(()) => self.state.lock().was_synced(number, &chunks),
                Err(e) => {
                    self.state.lock().was_not_synced(number);
                    self.counters.failures.fetch_add(1, Ordering::Relaxed);
                    first_failure = first_failure.or(Some(cannot_sync(&path, &e)));
                }
            }
        }
        if let Some(failure) = first_failure {
            return Err(failure);
        }
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(|e| cannot_sync(&self.dir, &e))
    }
}

impl State {
    /// What a sync of a segment makes durable. `None`: nothing in it needs a sync.
    pub(super) fn to_sync(&self, number: u64) -> Option<ToSync> {
        let segment = self.segments.iter().find(|segment| segment.number == number)?;
        let not_yet = places_in(self, segment).filter(|(_, place)| place.synced == Synced::NotYet);
        let chunks: Vec<(Hash, u64)> = not_yet.map(|(hash, place)| (hash, place.offset)).collect();
        let (path, file) = (segment.path.clone(), Arc::clone(&segment.file));
        (!chunks.is_empty()).then_some(ToSync { path, file, chunks })
    }

    /// Marks these chunks of a segment as durable, if they have not moved.
    pub(super) fn was_synced(&mut self, number: u64, chunks: &[(Hash, u64)]) {
        for (hash, offset) in chunks {
            if let Some(place) = self.index.get_mut(hash)
                && (place.segment, place.offset) == (number, *offset)
            {
                place.synced = Synced::Yes;
            }
        }
    }

    /// Called if a segment could not be synced: its chunks that were not durable will not become durable.
    fn was_not_synced(&mut self, number: u64) {
        let Some(segment) = self.segments.iter_mut().find(|segment| segment.number == number) else { return };
        segment.is_lost = true;
        // The system reports the failure once. A daemon that starts before the next power cut would sync the
        // file without an error. Durable chunks in the file stay durable now, and after a restart they are
        // written once more as well.
        let lost = segment.path.with_file_name(format!("{LOST}{number}"));
        match std::fs::rename(&segment.path, &lost) {
            Ok(()) => segment.path = lost,
            Err(e) => {
                tracing::warn!(path = %segment.path.display(), error = %e, "cannot mark a segment that was not synced");
            }
        }
        for hash in &segment.hashes {
            if let Some(place) = self.index.get_mut(hash)
                && place.segment == number
                && place.synced == Synced::NotYet
            {
                place.synced = Synced::Failed;
            }
        }
    }
}

fn cannot_sync(path: &Path, error: &std::io::Error) -> ImageError {
    let tried = format!(
        "cannot sync {}: chunks that were copied to this host may be lost in a power cut (the sync is tried again; if it \
         keeps failing, check the disk)",
        path.display()
    );
    ImageError::from_os(tried, error)
}
