//! Work in the background for a version: fetching what a boot trace lists, and copying the whole to local disk.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_store::Hash;
use parking_lot::{Condvar, Mutex};

use crate::error::{ImageError, ImageErrorKind};
use crate::fetch::{MergeLimit, group};
use crate::manifest::ChunkRef;
use crate::reader::VersionReader;
use crate::trace::Trace;
use crate::units::usize_of_u32;

/// Bytes of a trace, as they are stored, that are asked for at a time: enough to keep a line busy, and little to
/// stand behind for whoever waits for something else.
const PREFETCH_IN_FLIGHT_BYTES: u64 = 768 << 10;
/// Chunks of a trace that are put into the order of the object before they are fetched.
const PREFETCH_WINDOW: usize = 48;
/// Threads that copy a version.
const COPY_THREADS: usize = 2;
/// How long a copy that failed waits before it is tried again.
const COPY_AGAIN_AFTER: Duration = Duration::from_secs(2);
/// How long a copy waits of which the cache took nothing; twice as long each time, up to the second one. What is fetched
/// in vain costs others the line.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(50);
const NO_ROOM_PAUSE_MAX: Duration = Duration::from_secs(5);

/// How far work in the background is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackgroundProgress {
    /// Bytes to fetch, as they are stored.
    pub total_bytes: u64,
    /// Of which are here.
    pub done_bytes: u64,
    /// Whether it ended, well or not.
    pub is_over: bool,
}

#[derive(Default)]
struct Work {
    total_bytes: u64,
    done_bytes: AtomicU64,
    over: AtomicBool,
    cancelled: AtomicBool,
    failure: Mutex<Option<ImageError>>,
}

/// Work in the background. It ends early when this is dropped.
pub struct Background(Arc<Work>);

impl Background {
    /// How far it is.
    pub fn progress(&self) -> BackgroundProgress {
        BackgroundProgress {
            total_bytes: self.0.total_bytes,
            done_bytes: self.0.done_bytes.load(Ordering::Relaxed),
            is_over: self.0.over.load(Ordering::Acquire),
        }
    }

    /// What went wrong last, if it did.
    pub fn failure(&self) -> Option<ImageError> {
        self.0.failure.lock().clone()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.0.cancelled.store(true, Ordering::Release);
    }
}

impl Work {
    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}

/// Starts to fetch `total_bytes`; how much there is to do is known from the first moment on.
fn start(
    name: &str,
    total_bytes: u64,
    work: impl FnOnce(&Work) + Send + 'static,
) -> Result<Background, ImageError> {
    let shared = Arc::new(Work { total_bytes, ..Work::default() });
    let theirs = Arc::clone(&shared);
    let run = move || {
        work(&theirs);
        theirs.over.store(true, Ordering::Release);
    };
    match std::thread::Builder::new().name(name.into()).spawn(run) {
        Ok(_) => Ok(Background(shared)),
        Err(e) => Err(ImageError::from_os("cannot start a thread that fetches in the background", &e)),
    }
}

/// Bytes of chunks, as they are stored.
fn stored(chunks: &[ChunkRef]) -> u64 {
    chunks.iter().map(|chunk| u64::from(chunk.stored_bytes)).sum()
}

/// Bytes on their way, bounded.
#[derive(Default)]
struct Gate {
    bytes: Mutex<u64>,
    less: Condvar,
}

impl Gate {
    /// Waits until there is room.
    fn enter(&self, len: u64, work: &Work) {
        let mut bytes = self.bytes.lock();
        while *bytes > 0 && *bytes + len > PREFETCH_IN_FLIGHT_BYTES && !work.is_cancelled() {
            self.less.wait_for(&mut bytes, Duration::from_millis(200));
        }
        *bytes += len;
    }

    fn leave(&self, len: u64) {
        let mut bytes = self.bytes.lock();
        *bytes = bytes.saturating_sub(len);
        drop(bytes);
        self.less.notify_all();
    }

    fn wait_until_empty(&self, work: &Work) {
        let mut bytes = self.bytes.lock();
        while *bytes > 0 && !work.is_cancelled() {
            self.less.wait_for(&mut bytes, Duration::from_millis(200));
        }
    }
}

impl VersionReader {
    /// Fetches what `trace` lists, in its order, until `budget_bytes` of stored bytes were asked for. What
    /// somebody waits for goes first all the while.
    pub fn prefetch(self: &Arc<Self>, trace: &Trace, budget_bytes: u64) -> Result<Background, ImageError> {
        if trace.manifest != self.id() {
            let why = format!(
                "the boot trace is that of version {}, not of {}",
                trace.manifest.short(),
                self.id().short()
            );
            return Err(ImageError::new(ImageErrorKind::Invalid, why));
        }
        let mut seen: HashSet<Hash> = HashSet::new();
        let mut left = budget_bytes;
        let mut chunks: Vec<ChunkRef> = Vec::new();
        for touched in &trace.chunks {
            let Some(chunk) = self.manifest().chunk(touched.chunk) else { continue };
            if !seen.insert(chunk.hash) {
                continue;
            }
            match left.checked_sub(u64::from(chunk.stored_bytes)) {
                Some(rest) => left = rest,
                None => break,
            }
            chunks.push(*chunk);
        }
        let reader = Arc::clone(self);
        start("prefetch", stored(&chunks), move |work| reader.run_prefetch(&chunks, work))
    }

    fn run_prefetch(&self, chunks: &[ChunkRef], work: &Work) {
        let _prefetching = self.begin_prefetch();
        let gate = Arc::new(Gate::default());
        for window in chunks.chunks(PREFETCH_WINDOW) {
            let mut window: Vec<ChunkRef> = window.to_vec();
            window.sort_unstable_by_key(|chunk| (chunk.object, chunk.offset));
            for group in group(window, MergeLimit::AHEAD) {
                if work.is_cancelled() {
                    return;
                }
                let len = stored(&group);
                gate.enter(len, work);
                self.fetch_ahead(group, &|chunk| {
                    let (gate, len) = (Arc::clone(&gate), u64::from(chunk.stored_bytes));
                    Box::new(move |_| gate.leave(len))
                });
                work.done_bytes.fetch_add(len, Ordering::Relaxed);
            }
        }
        gate.wait_until_empty(work);
    }

    /// Copies the whole version to the local disk cache, at most `bytes_per_s` (as stored), and keeps it there
    /// while this reader is open. From its end on, no server is needed.
    pub fn hydrate(self: &Arc<Self>, bytes_per_s: Option<u64>) -> Result<Background, ImageError> {
        let Some(disk) = self.cache().disk() else {
            let why = "copying an image to this host needs a chunk cache on disk: give one with --chunk-cache DIR:SIZE";
            return Err(ImageError::new(ImageErrorKind::Invalid, why));
        };
        let all = self.manifest().data().map(|(_, chunk)| (chunk.hash, chunk.stored_bytes));
        let kept = disk.keep(self.id(), all)?;
        self.keep_on_disk(kept);
        let mut seen: HashSet<Hash> = HashSet::new();
        let mut chunks: Vec<ChunkRef> =
            self.manifest().data().map(|(_, chunk)| *chunk).filter(|chunk| seen.insert(chunk.hash)).collect();
        chunks.sort_unstable_by_key(|chunk| (chunk.object, chunk.offset));
        let reader = Arc::downgrade(self);
        start("hydrate", stored(&chunks), move |work| {
            let pace = Pace { bytes_per_s, next: Mutex::new(Instant::now()) };
            let groups = group(chunks, MergeLimit::COPY);
            let next = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for _ in 0..COPY_THREADS {
                    scope.spawn(|| {
                        while let Some(group) = usize::try_from(next.fetch_add(1, Ordering::Relaxed))
                            .ok()
                            .and_then(|at| groups.get(at))
                        {
                            // Only while the version is open.
                            let Some(reader) = reader.upgrade() else { return };
                            reader.copy_group(group, work, &pace);
                            if work.is_cancelled() {
                                return;
                            }
                        }
                    });
                }
            });
        })
    }

    /// Copies one group, and does not give up.
    fn copy_group(&self, chunks: &[ChunkRef], work: &Work, pace: &Pace) {
        let Some(disk) = self.cache().disk() else { return };
        let mut no_room = NoRoom { pause: NO_ROOM_PAUSE, left: chunks.len() };
        while !work.is_cancelled() {
            let missing: Vec<ChunkRef> =
                chunks.iter().filter(|chunk| !disk.has(&chunk.hash)).copied().collect();
            if missing.is_empty() {
                work.done_bytes.fetch_add(stored(chunks), Ordering::Relaxed);
                return;
            }
            for group in group(missing, MergeLimit::COPY) {
                pace.wait(stored(&group), work);
                let copied = match group.first().and_then(|chunk| self.object(usize_of_u32(chunk.object))) {
                    Some(source) => source.copy_to_disk(&group),
                    None => return,
                };
                if let Err(e) = copied {
                    tracing::warn!(error = %e, version = %self.id().short(), "cannot copy a part of an image; trying again");
                    *work.failure.lock() = Some(e);
                    pause(COPY_AGAIN_AFTER, work);
                }
            }
            let still = chunks.iter().filter(|chunk| !disk.has(&chunk.hash)).count();
            if still > 0 {
                // The cache makes room at this moment, or its disk is full or fails.
                pause(no_room.pause(still), work);
            }
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

/// Sleeps, unless the work is cancelled.
fn pause(time: Duration, work: &Work) {
    let until = Instant::now() + time;
    while Instant::now() < until && !work.is_cancelled() {
        std::thread::sleep(Duration::from_millis(20).min(until.saturating_duration_since(Instant::now())));
    }
}

/// Keeps copying to a rate.
struct Pace {
    bytes_per_s: Option<u64>,
    next: Mutex<Instant>,
}

impl Pace {
    /// Waits until `len` more bytes may be read.
    fn wait(&self, len: u64, work: &Work) {
        let Some(rate) = self.bytes_per_s.filter(|rate| *rate > 0) else { return };
        let takes = Duration::from_nanos(len.saturating_mul(1_000_000_000) / rate);
        let at = {
            let mut next = self.next.lock();
            let at = (*next).max(Instant::now());
            *next = at + takes;
            at
        };
        pause(at.saturating_duration_since(Instant::now()), work);
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
