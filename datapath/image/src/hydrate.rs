//! Copying a whole version to the local disk in the background.
//!
//! Chunks that lie side by side are copied in one read. A group that fails goes to the end of the list: so what is damaged
//! holds up nothing else. Where a chunk of it is damaged its chunks are then copied one by one, as the others are good. Where
//! its object is missing all that is left of that goes to the end with it, and is not asked for group by group.
//!
//! What an earlier process left on the local disk is here once it was read back: nobody knows what became of it meanwhile.
//!
//! A copy that waits for its store ends soon after it is cancelled, and lets go of the version.

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

impl Part {
    /// The number of the object that it lies in.
    fn object(&self) -> Option<u32> {
        self.chunks.first().map(|chunk| chunk.object)
    }
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

    /// Puts back what could not be copied, for later. Whether other parts would fail as well.
    fn failed(&mut self, part: Part, why: ImageErrorKind, now: Instant) -> bool {
        if why == ImageErrorKind::Damaged && part.chunks.len() > 1 {
            for chunk in part.chunks {
                self.push(now, Part { chunks: vec![chunk], failures: 0 });
            }
            return false;
        }
        let pause = COPY_AGAIN_AFTER.saturating_mul(1 << part.failures.min(10)).min(COPY_AGAIN_AFTER_MAX);
        let (at, failures) = (now + pause, part.failures.saturating_add(1));
        if why == ImageErrorKind::NotFound {
            let object = part.object();
            let others: Vec<_> = self.due.extract_if(.., |_, other| other.object() == object).collect();
            for (_, other) in others {
                self.push(at, Part { failures, ..other });
            }
        }
        // Behind those, which may be here already.
        self.push(at, Part { failures, ..part });
        !why.is_damage()
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
        let source = |chunk: &ChunkRef| self.object(usize_of_u32(chunk.object));
        let is_over = || work.is_cancelled();
        if let Some(source) = chunks.first().and_then(source) {
            source.read_back(chunks, is_over);
        }
        let missing = || chunks.iter().filter(|chunk| !disk.has(&chunk.hash)).copied().collect::<Vec<_>>();
        let mut no_room = NoRoom { pause: NO_ROOM_PAUSE, left: chunks.len() };
        while !work.is_cancelled() {
            let wanted = stored(&missing());
            if wanted == 0 {
                work.done_bytes.fetch_add(stored(chunks), Ordering::Relaxed);
                return Ok(());
            }
            pace.take(wanted, is_over);
            if work.is_cancelled() {
                break;
            }
            // What a machine has fetched while this waited is here.
            for group in group(missing(), MergeLimit::COPY) {
                if let Some(source) = group.first().and_then(source) {
                    source.copy_to_disk(&group, is_over)?;
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
        let why = e.kind();
        *work.failure.lock() = Some(e);
        let others_would = parts.lock().failed(part, why, Instant::now());
        if others_would {
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

    fn part(object: u32, offsets: &[u64]) -> Part {
        let chunk = |offset: &u64| ChunkRef {
            hash: Hash::of(&offset.to_le_bytes()),
            object,
            stored_bytes: 1,
            offset: *offset,
        };
        Part { chunks: offsets.iter().map(chunk).collect(), failures: 0 }
    }

    #[test]
    fn what_is_damaged_or_missing_holds_up_no_other_parts() {
        let now = Instant::now();
        let mut parts = Parts::default();
        for (object, offset) in [(0, 0), (0, 10), (1, 0), (0, 20), (1, 10)] {
            parts.push(now, part(object, &[offset, offset + 1]));
        }
        let take = |parts: &mut Parts, at: Instant| match parts.take(at) {
            Next::Part(part) => Ok(part),
            Next::Later(at) => Err(Some(at)),
            Next::Nothing => Err(None),
        };
        let place = |part: &Part| (part.object().unwrap(), part.chunks[0].offset);
        // The first object is missing: nothing of it is asked for now.
        let failed = take(&mut parts, now).unwrap();
        assert!(!parts.failed(failed, ImageErrorKind::NotFound, now));
        let copied = take(&mut parts, now).unwrap();
        assert_eq!(place(&copied), (1, 0));
        // Damage is that of one chunk, and the other one is copied at once.
        let failed = take(&mut parts, now).unwrap();
        assert_eq!(place(&failed), (1, 10));
        assert!(!parts.failed(failed, ImageErrorKind::Damaged, now));
        let alone = take(&mut parts, now).unwrap();
        assert_eq!((place(&alone), alone.chunks.len()), ((1, 10), 1));
        assert!(!parts.failed(alone, ImageErrorKind::Damaged, now));
        let copied = take(&mut parts, now).unwrap();
        assert_eq!(place(&copied), (1, 11));
        // All of the object comes again, what failed last of it, and then later than before.
        let again = now + COPY_AGAIN_AFTER;
        assert_eq!(take(&mut parts, now).err(), Some(Some(again)));
        let missing: Vec<Part> = (0..3).map(|_| take(&mut parts, again).unwrap()).collect();
        assert_eq!(missing.iter().map(place).collect::<Vec<_>>(), [(0, 10), (0, 20), (0, 0)]);
        let alone = take(&mut parts, again).unwrap();
        assert_eq!((place(&alone), alone.failures), ((1, 10), 1));
        assert_eq!(take(&mut parts, again).err(), Some(None));
        for part in missing {
            assert_eq!(part.failures, 1);
            assert!(!parts.failed(part, ImageErrorKind::NotFound, again));
        }
        assert_eq!(take(&mut parts, again).err(), Some(Some(again + COPY_AGAIN_AFTER * 2)));
        // After any other error nothing is known of the store.
        assert!(parts.failed(alone, ImageErrorKind::Io, again));
    }

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
