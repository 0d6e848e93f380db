//! Hydration: copies a whole version to the chunk cache on disk in the background, so that its machines
//! need no server any more.
//!
//! Adjacent chunks are copied in one read. If a group fails, it goes to the end of the list, so damage delays
//! nothing else. If a chunk of the group is damaged, its chunks are then copied one by one, because the
//! others are good. If the object is missing, all remaining groups of the object go to the end too, so that
//! the object is not requested again for each group.
//!
//! Chunks that an earlier process left on the local disk count only after they were read back, because they
//! may have been damaged since.
//!
//! At the end everything is synced, and the manifest is stored. Chunks that are missing at that point,
//! because a sync failed or a read found them damaged, are copied again before the copy counts as finished. A
//! chunk that could not be synced is written once more from the local disk, if it can be read. The more must
//! be copied again, the longer the copy waits before it.
//!
//! A copy that waits for its store ends soon after it is cancelled, and releases the version.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use headwater_store::Hash;
use parking_lot::Mutex;

use crate::error::{ImageError, ImageErrorKind};
use crate::fetch::{MergeLimit, group};
use crate::manifest::{ChunkRef, Manifest};
use crate::prefetch::{Background, Work, pause, start, stored};
use crate::rate_limit::RateLimit;
use crate::reader::VersionReader;
use crate::units::usize_of_u32;

/// Threads that copy a version.
const COPY_THREADS: usize = 2;
/// The first pause before a failed part is tried again. It doubles with each failure.
const COPY_AGAIN_AFTER: Duration = Duration::from_secs(2);
/// The longest such pause.
const COPY_AGAIN_AFTER_MAX: Duration = Duration::from_secs(60);
/// If copied chunks must be copied again, the pause is at least as long as the copying took. It doubles each
/// time, up to this.
const COPY_IN_VAIN_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// The first pause if the cache accepted nothing. It doubles each time. Chunks that are fetched and not accepted
/// waste bandwidth.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(50);
/// The longest such pause.
const NO_ROOM_PAUSE_MAX: Duration = Duration::from_secs(5);

/// Adjacent chunks.
struct Part {
    chunks: Vec<ChunkRef>,
    failures: u32,
}

/// The chunks to copy: first the parts that never failed, in the order of the objects, then the rest. Each
/// chunk of the version is contained at most once.
#[derive(Default)]
struct Parts {
    /// Ordered by the time from which they may be tried, and then by their insertion.
    due: BTreeMap<(Instant, u64), Part>,
    came: u64,
}

enum Next {
    Part(Part),
    Later(Instant),
    /// Other threads may still be copying.
    Nothing,
}

impl Part {
    /// The number of the object to which the part belongs.
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

    /// Puts back a part that failed, for later. Returns whether other parts would fail as well.
    fn failed(&mut self, part: Part, why: ImageErrorKind, now: Instant) -> bool {
        if why == ImageErrorKind::Damaged && part.chunks.len() > 1 {
            for chunk in part.chunks {
                self.push(now, Part { chunks: vec![chunk], failures: 0 });
            }
            return false;
        }
        let pause = doubled(COPY_AGAIN_AFTER, part.failures, COPY_AGAIN_AFTER_MAX);
        let (at, failures) = (now + pause, part.failures.saturating_add(1));
        if why == ImageErrorKind::NotFound {
            let object = part.object();
            let others: Vec<_> = self.due.extract_if(.., |_, other| other.object() == object).collect();
            for (_, other) in others {
                self.push(at, Part { failures, ..other });
            }
        }
        // After those parts, which may have been copied by then.
        self.push(at, Part { failures, ..part });
        !why.is_damage()
    }
}

/// The chunks of a version, each once.
fn distinct(manifest: &Manifest) -> impl Iterator<Item = &ChunkRef> {
    let mut seen: HashSet<Hash> = HashSet::new();
    manifest.data().map(|(_, chunk)| chunk).filter(move |chunk| seen.insert(chunk.hash))
}

/// Sorted by their position in the objects.
fn in_order<'a>(chunks: impl Iterator<Item = &'a ChunkRef>) -> Vec<ChunkRef> {
    let mut chunks: Vec<ChunkRef> = chunks.copied().collect();
    chunks.sort_unstable_by_key(|chunk| (chunk.object, chunk.offset));
    chunks
}

impl VersionReader {
    /// Copies the whole version to the local disk cache, at most at `rate_limit` (in stored bytes), and
    /// retains it there while this reader is open. After it has finished, no server is needed. Until then the
    /// progress is below the total.
    pub fn hydrate(self: &Arc<Self>, rate_limit: &Arc<RateLimit>) -> Result<Background, ImageError> {
        let Some(disk) = self.cache().disk() else {
            let why = "copying an image to this host needs a chunk cache on disk: give one with --chunk-cache DIR:SIZE";
            return Err(ImageError::new(ImageErrorKind::Invalid, why));
        };
        let manifest = self.manifest()?;
        let all = manifest.data().map(|(_, chunk)| (chunk.hash, chunk.stored_bytes));
        let kept = disk.keep(self.id(), all)?;
        self.keep_on_disk(kept);
        let chunks = in_order(distinct(&manifest));
        // Only while the version is open.
        let (reader, rate_limit) = (Arc::downgrade(self), Arc::clone(rate_limit));
        start("hydrate", stored(&chunks), move |work| {
            if !copy_whole(&reader, chunks, &rate_limit, work) {
                // All chunks may be cached without being durable.
                work.falls_short();
            }
        })
    }

    /// Makes the copied chunks durable, and the files that are needed to open the version again. It runs
    /// before the copy is reported as complete, because that must hold after a power cut, too. Fails if some
    /// chunks are missing.
    fn settle(&self) -> Result<(), ImageError> {
        let Some(disk) = self.cache().disk() else { return Ok(()) };
        let manifest = self.manifest()?;
        // If the disk was full when the version was opened, the manifest is not stored yet. This precedes the
        // sync, which also syncs its directory.
        let kept = disk.must_keep_manifest(self.id(), &manifest.encode());
        disk.sync()?;
        kept?;
        // A chunk that a machine found damaged and fetched again during the sync may be cached without being
        // synced.
        let others = distinct(&manifest).filter(|chunk| !disk.is_durable(&chunk.hash));
        let others_bytes: u64 = others.map(|chunk| u64::from(chunk.stored_bytes)).sum();
        if others_bytes > 0 {
            let why = format!(
                "{others_bytes} bytes that were copied to this host were found damaged or could not be synced, and are copied \
                 again where they are missing (if this repeats, check the disk)"
            );
            return Err(ImageError::new(ImageErrorKind::Io, why));
        }
        Ok(())
    }

    /// The chunks that are not on the local disk, or could not be synced there.
    fn missing(&self) -> Result<Vec<ChunkRef>, ImageError> {
        let Some(disk) = self.cache().disk() else { return Ok(Vec::new()) };
        let manifest = self.manifest()?;
        Ok(in_order(distinct(&manifest).filter(|chunk| disk.lacks(&chunk.hash))))
    }

    /// The stored bytes that a copy of the whole version must fetch.
    pub fn to_copy_bytes(&self) -> Result<u64, ImageError> {
        Ok(distinct(&*self.manifest()?).map(|chunk| u64::from(chunk.stored_bytes)).sum())
    }

    /// Tries to copy one part.
    fn copy_part(&self, chunks: &[ChunkRef], rate_limit: &RateLimit, work: &Work) -> Result<(), ImageError> {
        let Some(disk) = self.cache().disk() else { return Ok(()) };
        let source = |chunk: &ChunkRef| self.object(usize_of_u32(chunk.object));
        let is_over = || work.is_cancelled();
        let lacking = || chunks.iter().filter(|chunk| disk.lacks(&chunk.hash)).count();
        let missing = || chunks.iter().filter(|chunk| !disk.has(&chunk.hash)).copied().collect::<Vec<_>>();
        let mut no_room = NoRoom { pause: NO_ROOM_PAUSE, left: chunks.len() };
        while !work.is_cancelled() {
            // A chunk that could not be synced is still cached unless it was evicted, so no server is asked
            // for it.
            if let Some(source) = chunks.first().and_then(source) {
                source.read_back(chunks, is_over);
            }
            if lacking() == 0 {
                work.done_bytes.fetch_add(stored(chunks), Ordering::Relaxed);
                return Ok(());
            }
            rate_limit.take(stored(&missing()), is_over);
            if work.is_cancelled() {
                break;
            }
            // Chunks that a machine fetched during the wait are cached.
            for group in group(missing(), MergeLimit::COPY) {
                if let Some(source) = group.first().and_then(source) {
                    source.copy_to_disk(&group, is_over)?;
                }
            }
            let still = lacking();
            if still > 0 {
                // The cache is making space, or its disk is full or failing.
                pause(no_room.pause(still), work);
            }
        }
        Ok(())
    }
}

/// Copies these chunks, and all chunks that turn out to be missing, until the whole version is durable on
/// this host. `false`: it was cancelled.
fn copy_whole(
    reader: &Weak<VersionReader>,
    chunks: Vec<ChunkRef>,
    rate_limit: &RateLimit,
    work: &Work,
) -> bool {
    let (mut chunks, mut again) = (chunks, Again::default());
    loop {
        let (began, copied_bytes) = (Instant::now(), stored(&chunks));
        copy_all(reader, chunks, rate_limit, work);
        let took = began.elapsed();
        let Some(open) = reader.upgrade().filter(|_| !work.is_cancelled()) else { return false };
        let Err(e) = open.settle() else { return true };
        tracing::warn!(error = %e, version = %open.id().short(), "cannot complete the local copy of an image; retrying later");
        *work.failure.lock() = Some(e);
        // If this fails too, the next round reports why.
        chunks = open.missing().unwrap_or_default();
        let left_bytes = stored(&chunks);
        work.set_left(left_bytes);
        drop(open);
        pause(again.pause(part_of(took, left_bytes, copied_bytes)), work);
    }
}

/// Copies chunks on this thread and on others, if they can be started.
fn copy_all(reader: &Weak<VersionReader>, chunks: Vec<ChunkRef>, rate_limit: &RateLimit, work: &Work) {
    let (mut parts, now) = (Parts::default(), Instant::now());
    for chunks in group(chunks, MergeLimit::COPY) {
        parts.push(now, Part { chunks, failures: 0 });
    }
    let parts = Mutex::new(parts);
    let copies = || copy(reader, &parts, rate_limit, work);
    std::thread::scope(|scope| {
        for _ in 1..COPY_THREADS {
            let started = std::thread::Builder::new().name("hydrate".into()).spawn_scoped(scope, copies);
            if let Err(e) = started {
                tracing::warn!(error = %e, "cannot start an additional thread that copies an image; continuing without it");
            }
        }
        copies();
    });
}

/// Copies part after part, and retries parts that failed.
fn copy(reader: &Weak<VersionReader>, parts: &Mutex<Parts>, rate_limit: &RateLimit, work: &Work) {
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
        let Err(e) = reader.copy_part(&part.chunks, rate_limit, work) else { continue };
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

/// The pauses of a copy that did not become complete or durable.
#[derive(Default)]
struct Again {
    failures: u32,
    /// How many of the last failures were in a row and required copying chunks again.
    in_vain: u32,
}

impl Again {
    /// The pause before a repetition that takes `cost`.
    fn pause(&mut self, cost: Duration) -> Duration {
        let pause = doubled(COPY_AGAIN_AFTER, self.failures, COPY_AGAIN_AFTER_MAX);
        // On a disk that accepts everything and syncs nothing, the whole version would be transferred and
        // dropped again and again. The first failure may be the only one, and chunks that are still cached
        // are read from the cache.
        let pause = match self.in_vain {
            0 => pause,
            before => pause.max(doubled(cost, before.saturating_sub(1), COPY_IN_VAIN_AFTER_MAX)),
        };
        self.failures = self.failures.saturating_add(1);
        self.in_vain = if cost.is_zero() { 0 } else { self.in_vain.saturating_add(1) };
        pause
    }
}

/// `first`, doubled `times` times, up to `most`.
fn doubled(first: Duration, times: u32, most: Duration) -> Duration {
    first.saturating_mul(1 << times.min(16)).min(most)
}

/// The share of `time` that copying `left` of `copied` bytes would take; all of it if more is left than was
/// copied.
fn part_of(time: Duration, left: u64, copied: u64) -> Duration {
    let ms = time.as_millis().saturating_mul(u128::from(left.min(copied))) / u128::from(copied.max(1));
    u64::try_from(ms).map_or(time, Duration::from_millis)
}

/// The pauses of a copy that waits for space in the cache.
struct NoRoom {
    pause: Duration,
    /// The number of chunks that the cache did not accept the last time.
    left: usize,
}

impl NoRoom {
    /// The pause if the cache did not accept this many chunks this time.
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
    use headwater_store::{Access, LocalDir};
    use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, wait_until};

    use super::*;
    use crate::chunk_cache::ChunkCache;
    use crate::disk_cache::tests::fail_syncs;
    use crate::disk_cache::{DISK_CACHE_MIN_BYTES, DiskCache};
    use crate::import::{ImportOptions, import};

    #[test]
    fn unsynced_chunks_are_copied_again_before_completion() {
        let (store_dir, cache_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = LocalDir::open(store_dir.path(), Access::WRITE).unwrap();
        let options = ReferenceOptions { read_only: true, ..Default::default() };
        let source = Arc::new(ReferenceDisk::with_contents(Rng::new(3).bytes(1 << 20), options));
        let options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_000);
        let version = import(source, &store, &options, &mut |_| {}).unwrap().version;

        // Everything goes to a segment that accepts writes and cannot be synced.
        let disk = DiskCache::open(cache_dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        disk.put(&Hash::of(b"another one"), &[1; 4096]);
        fail_syncs(&disk, 0);
        let cache = ChunkCache::with_disk(1 << 20, Arc::clone(&disk));
        let reader = VersionReader::open(&store, version.manifest, cache).unwrap();
        let chunks: Vec<Hash> = distinct(&reader.manifest().unwrap()).map(|chunk| chunk.hash).collect();
        let work = reader.hydrate(&Arc::new(RateLimit::new(None))).unwrap();
        wait_until("the version is copied", || {
            let progress = work.progress();
            let is_whole = progress.done_bytes == progress.total_bytes;
            let mut stored = Vec::new();
            assert!(
                !is_whole || chunks.iter().all(|hash| disk.get(hash, &mut stored)),
                "chunks that are reported as copied are lost"
            );
            progress.is_over
        });
        let progress = work.progress();
        assert_eq!((progress.done_bytes, progress.total_bytes), (1 << 20, 1 << 20));
        assert!(work.failure().unwrap().to_string().contains("segment-0"));
        // Each chunk twice, and the other one.
        assert_eq!(disk.counters().writes, 2 * 16 + 1);
    }

    #[test]
    fn repeated_copies_wait_as_long_as_the_copying_took() {
        let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
        let pauses = |costs: &[Duration]| {
            let mut again = Again::default();
            costs.iter().map(|cost| again.pause(*cost).as_secs()).collect::<Vec<_>>()
        };
        // Nothing must be copied again, as if only the manifest could not be stored.
        assert_eq!(pauses(&[Duration::ZERO; 7]), [2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pauses(&[second; 9]), [2, 4, 8, 16, 32, 60, 60, 64, 128]);
        assert_eq!(pauses(&[hour; 7])[1..], [1, 2, 4, 8, 16, 24].map(|hours| hours * 3600));
        assert_eq!(pauses(&[hour, hour, Duration::ZERO, hour, hour]), [2, 3600, 8, 16, 3600]);
        assert_eq!(part_of(hour, 25, 100), hour / 4);
        assert_eq!(part_of(hour, 1000, 100), hour);
        assert_eq!((part_of(hour, 0, 100), part_of(hour, 1, 0)), (Duration::ZERO, Duration::ZERO));
        assert_eq!(part_of(hour * 1_000_000, u64::MAX, u64::MAX), hour * 1_000_000);
    }

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
    fn damaged_or_missing_parts_do_not_delay_others() {
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
        // The first object is missing: nothing of it is requested now.
        let failed = take(&mut parts, now).unwrap();
        assert!(!parts.failed(failed, ImageErrorKind::NotFound, now));
        let copied = take(&mut parts, now).unwrap();
        assert_eq!(place(&copied), (1, 0));
        // The damage affects one chunk, and the other one is copied at once.
        let failed = take(&mut parts, now).unwrap();
        assert_eq!(place(&failed), (1, 10));
        assert!(!parts.failed(failed, ImageErrorKind::Damaged, now));
        let alone = take(&mut parts, now).unwrap();
        assert_eq!((place(&alone), alone.chunks.len()), ((1, 10), 1));
        assert!(!parts.failed(alone, ImageErrorKind::Damaged, now));
        let copied = take(&mut parts, now).unwrap();
        assert_eq!(place(&copied), (1, 11));
        // All parts of the object are tried again, the part that failed last, and later than before.
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
        // After any other error the state of the store is unknown.
        assert!(parts.failed(alone, ImageErrorKind::Io, again));
    }

    #[test]
    fn a_full_cache_slows_down_fetching() {
        let mut no_room = NoRoom { pause: NO_ROOM_PAUSE, left: 10 };
        let ms: Vec<u128> = (0..9).map(|_| no_room.pause(10).as_millis()).collect();
        assert_eq!(ms, [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        // The cache accepted some chunks, so there is space again.
        assert_eq!(no_room.pause(9), NO_ROOM_PAUSE);
        assert_eq!(no_room.pause(9), NO_ROOM_PAUSE * 2);
    }
}
