//! Making durable what is in the chunk cache.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use headwater_store::Hash;

use crate::disk_cache::moving::places_in;
use crate::disk_cache::{DiskCache, State, Synced};
use crate::error::ImageError;

/// What a file is called that could not be synced, before its number.
pub(super) const LOST: &str = "lost-";

/// Whether a file could not be synced, as its name says.
pub(super) fn is_lost(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(LOST))
}

/// A segment with something that is not durable yet.
pub(super) struct ToSync {
    path: PathBuf,
    file: Arc<File>,
    /// What that is, and where each chunk starts: one that comes meanwhile, also in place of one of these, may come after the sync.
    pub(super) chunks: Vec<(Hash, u64)>,
}

impl DiskCache {
    /// Makes what is here durable. What could not be synced is lacking from then on, for the system tells of that once: a later sync
    /// would know nothing of it. After an error, the first one, all other files are synced.
    pub(crate) fn sync(&self) -> Result<(), ImageError> {
        let _one_at_a_time = self.syncing.lock();
        let numbers: Vec<u64> = self.state.lock().segments.iter().map(|segment| segment.number).collect();
        let mut first_failure = None;
        for number in numbers {
            // One at a time: readers wait for this lock.
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
    /// What a sync of a segment makes durable. `None`: nothing in it is waiting for one.
    pub(super) fn to_sync(&self, number: u64) -> Option<ToSync> {
        let segment = self.segments.iter().find(|segment| segment.number == number)?;
        let not_yet = places_in(self, segment).filter(|(_, place)| place.synced == Synced::NotYet);
        let chunks: Vec<(Hash, u64)> = not_yet.map(|(hash, place)| (hash, place.offset)).collect();
        let (path, file) = (segment.path.clone(), Arc::clone(&segment.file));
        (!chunks.is_empty()).then_some(ToSync { path, file, chunks })
    }

    /// These chunks of a segment are durable, as far as they are where they were.
    pub(super) fn was_synced(&mut self, number: u64, chunks: &[(Hash, u64)]) {
        for (hash, offset) in chunks {
            if let Some(place) = self.index.get_mut(hash)
                && (place.segment, place.offset) == (number, *offset)
            {
                place.synced = Synced::Yes;
            }
        }
    }

    /// A segment could not be synced: what was not durable before will not be.
    fn was_not_synced(&mut self, number: u64) {
        let Some(segment) = self.segments.iter_mut().find(|segment| segment.number == number) else { return };
        segment.is_lost = true;
        // The system tells of it once: a daemon that starts before the next power cut would sync it and hear nothing. What was durable
        // in it stays so now, and is put once more then, too.
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
        "cannot sync {}, without which what was copied to this host may be lost in a power cut (it is tried again; if that \
         goes on, look after the disk)",
        path.display()
    );
    ImageError::from_os(tried, error)
}
