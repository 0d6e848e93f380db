//! Copying a whole version to the local disk in the background.
//!
//! Chunks that lie side by side are copied in one read. A group that fails goes to the end of the list: so what is damaged
//! holds up nothing else. Where a chunk of it is damaged its chunks are then copied one by one, as the others are good.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use headwater_store::Hash;
use parking_lot::Mutex;

use crate::ahead::{Background, Work, pause, start, stored};
use crate::error::{ImageError, ImageErrorKind};
use crate::fetch::{MergeLimit, group};
use crate::manifest::{ChunkRef, Manifest};
use crate::pace::Pace;
use crate::reader::VersionReader;
use crate::units::usize_of_u32;

/// Threads that copy a version.
const COPY_THREADS: usize = 2;
/// How long what could not be copied waits before it is tried again; twice as long each time, up to the second one.
const COPY_AGAIN_AFTER: Duration = Duration::from_secs(2);
const COPY_AGAIN_AFTER_MAX: Duration = Duration::from_secs(60);
/// How long a copy waits of which the cache took nothing; twice as long each time, up to the second one. What is fetched
/// in vain costs others the line.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(50);
const NO_ROOM_PAUSE_MAX: Duration = Duration::from_secs(5);

/// Chunks that lie side by side.
struct Part {
    chunks: Vec<ChunkRef>,
    failures: u32,
}

/// What is to be copied: what never failed in the order of the objects, then the rest. Each chunk of the version is in it at
/// most once.
#[derive(Default)]
struct Parts {
    /// By when they may be tried, and in the order in which they came.
    due: BTreeMap<(Instant, u64), Part>,
    came: u64,
}

enum Next {
    Part(Part),
    Later(Instant),
    /// Others may still be copying.
    Nothing,
}

impl Parts {
    fn push(&mut self, at: Instant, part: Part) {
        self.due.insert((at, self.came), part);
        self.came += 1;
    }

    fn take(&mut self, now: Instant) -> Next {
        match self.due.first_entry() {
            None => Next::Nothing,
            Some(first) if first.key().0 > now => Next::Later(first.key().0),
            Some(first) => Next::Part(first.remove()),
        }
    }

    fn failed(&mut self, part: Part, is_damage: bool, now: Instant) {
        if is_damage && part.chunks.len() > 1 {
            for chunk in part.chunks {
                self.push(now, Part { chunks: vec![chunk], failures: 0 });
            }
            return;
        }
        let pause = COPY_AGAIN_AFTER.saturating_mul(1 << part.failures.min(10)).min(COPY_AGAIN_AFTER_MAX);
        self.push(now + pause, Part { failures: part.failures.saturating_add(1), ..part });
    }
}

/// The chunks of a version, each once.
fn distinct(manifest: &Manifest) -> impl Iterator<Item = &ChunkRef> {
    let mut seen: HashSet<Hash> = HashSet::new();
    manifest.data().map(|(_, chunk)| chunk).filter(move |chunk| seen.insert(chunk.hash))
}

impl VersionReader {
    /// Copies the whole version to the local disk cache, as fast as `pace` allows (as stored), and keeps it there
    /// while this reader is open. From its end on, no server is needed.
    pub fn hydrate(self: &Arc<Self>, pace: &Arc<Pace>) -> Result<Background, ImageError> {
        let Some(disk) = self.cache().disk() else {
            let why = "copying an image to this host needs a chunk cache on disk: give one with --chunk-cache DIR:SIZE";
            return Err(ImageError::new(ImageErrorKind::Invalid, why));
        };
        let manifest = self.manifest()?;
        let all = manifest.data().map(|(_, chunk)| (chunk.hash, chunk.stored_bytes));
        let kept = disk.keep(self.id(), all)?;
        self.keep_on_disk(kept);
        let mut chunks: Vec<ChunkRef> = distinct(&manifest).copied().collect();
        chunks.sort_unstable_by_key(|chunk| (chunk.object, chunk.offset));
        // Only while the version is open.
        let (reader, pace) = (Arc::downgrade(self), Arc::clone(pace));
        start("hydrate", stored(&chunks), move |work| {
            let (mut parts, now) = (Parts::default(), Instant::now());
            for chunks in group(chunks, MergeLimit::COPY) {
                parts.push(now, Part { chunks, failures: 0 });
            }
            let parts = Mutex::new(parts);
            std::thread::scope(|scope| {
                for _ in 0..COPY_THREADS {
                    scope.spawn(|| copy(&reader, &parts, &pace, work));
                }
            });
            // Before it is said that no server is needed: that is to hold after a power cut, too.
            if let Some(reader) = reader.upgrade().filter(|_| !work.is_cancelled())
                && let Some(Err(e)) = reader.cache().disk().map(|disk| disk.sync())
            {
                tracing::warn!(error = %e, version = %reader.id().short(), "what was copied may be lost in a power cut");
            }
        })
    }

    /// What a copy of the whole version has to fetch, as it is stored.
    pub fn to_copy_bytes(&self) -> Result<u64, ImageError> {
        Ok(distinct(&*self.manifest()?).map(|chunk| u64::from(chunk.stored_bytes)).sum())
    }

    /// Copies one part, unless that fails.
    fn copy_part(&self, chunks: &[ChunkRef], pace: &Pace, work: &Work) -> Result<(), ImageError> {
        let Some(disk) = self.cache().disk() else { return Ok(()) };
        let missing = || chunks.iter().filter(|chunk| !disk.has(&chunk.hash)).copied().collect::<Vec<_>>();
        let mut no_room = NoRoom { pause: NO_ROOM_PAUSE, left: chunks.len() };
        while !work.is_cancelled() {
            let wanted = stored(&missing());
            if wanted == 0 {
                work.done_bytes.fetch_add(stored(chunks), Ordering::Relaxed);
                return Ok(());
            }
            pace.take(wanted, || work.is_cancelled());
            if work.is_cancelled() {
                break;
            }
            // What a machine has fetched while this waited is here.
            for group in group(missing(), MergeLimit::COPY) {
                if let Some(source) = group.first().and_then(|chunk| self.object(usize_of_u32(chunk.object)))
                {
                    source.copy_to_disk(&group)?;
                }
            }
            let still = missing().len();
            if still > 0 {
                // The cache makes room at this moment, or its disk is full or fails.
                pause(no_room.pause(still), work);
            }
        }
        Ok(())
    }
}

/// Copies part after part, and does not give up.
fn copy(reader: &Weak<VersionReader>, parts: &Mutex<Parts>, pace: &Pace, work: &Work) {
    while !work.is_cancelled() {
        let next = parts.lock().take(Instant::now());
        let part = match next {
            Next::Part(part) => part,
            Next::Later(at) => {
                pause(at.saturating_duration_since(Instant::now()), work);
                continue;
            }
            Next::Nothing => return,
        };
        let Some(reader) = reader.upgrade() else { return };
        let Err(e) = reader.copy_part(&part.chunks, pace, work) else { continue };
        tracing::warn!(error = %e, version = %reader.id().short(), "cannot copy a part of an image; trying again later");
        drop(reader);
        let is_damage = e.kind() == ImageErrorKind::Damaged;
        *work.failure.lock() = Some(e);
        parts.lock().failed(part, is_damage, Instant::now());
        if !is_damage {
            // Other parts would fail as well.
            pause(COPY_AGAIN_AFTER, work);
        }
    }
}

/// How long to wait for room.
struct NoRoom {
    pause: Duration,
    /// Chunks that did not get in the last time.
    left: usize,
}

impl NoRoom {
    /// The pause when so many chunks did not get in this time.
    fn pause(&mut self, left: usize) -> Duration {
        if left < self.left {
            self.pause = NO_ROOM_PAUSE;
        }
        self.left = left;
        let pause = self.pause;
        self.pause = pause.saturating_mul(2).min(NO_ROOM_PAUSE_MAX);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_full_cache_does_not_take_is_fetched_less_and_less_often() {
        let mut no_room = NoRoom { pause: NO_ROOM_PAUSE, left: 10 };
        let ms: Vec<u128> = (0..9).map(|_| no_room.pause(10).as_millis()).collect();
        assert_eq!(ms, [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        // Some of it got in: there is room again.
        assert_eq!(no_room.pause(9), NO_ROOM_PAUSE);
        assert_eq!(no_room.pause(9), NO_ROOM_PAUSE * 2);
    }
}
