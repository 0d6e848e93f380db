//! Background work for a version: its progress and cancellation, and the prefetch of the chunks in a boot
//! trace. (`hydrate` copies a whole version in the same way; `readahead` prefetches for sequential
//! readers.)

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

/// Stored bytes of a trace that are requested at a time: enough to keep a line busy, and few enough not to
/// delay reads that a request waits for.
const PREFETCH_IN_FLIGHT_BYTES: u64 = 768 << 10;
/// How many chunks of a trace are sorted by their position in the object before they are fetched.
const PREFETCH_WINDOW: usize = 48;

/// The progress of background work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackgroundProgress {
    /// Bytes to fetch, as they are stored.
    pub total_bytes: u64,
    /// How many of them are cached. When the work has ended successfully, these are all, and the chunks on
    /// the local disk have been synced as well.
    pub done_bytes: u64,
    /// Whether it ended, successfully or not.
    pub is_over: bool,
}

#[derive(Default)]
pub(crate) struct Work {
    total_bytes: u64,
    pub done_bytes: AtomicU64,
    over: AtomicBool,
    cancelled: AtomicBool,
    pub failure: Mutex<Option<ImageError>>,
}

/// Work in the background. Dropping this cancels it.
pub struct Background(Arc<Work>);

impl Background {
    /// The current progress.
    pub fn progress(&self) -> BackgroundProgress {
        let total_bytes = self.0.total_bytes;
        // Read first. Otherwise work that ends between the two reads would look finished with fewer bytes
        // than it has.
        let is_over = self.0.over.load(Ordering::Acquire);
        let most = if is_over { total_bytes } else { total_bytes.saturating_sub(1) };
        let done_bytes = self.0.done_bytes.load(Ordering::Relaxed).min(most);
        BackgroundProgress { total_bytes, done_bytes, is_over }
    }

    /// The last error, if there was one.
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
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Sets how many bytes are still missing, or missing again.
    pub(crate) fn set_left(&self, left_bytes: u64) {
        self.done_bytes.store(self.total_bytes.saturating_sub(left_bytes), Ordering::Relaxed);
    }

    /// Records that the work ends before everything was done, so that it is not considered complete.
    pub(crate) fn falls_short(&self) {
        self.done_bytes.fetch_min(self.total_bytes.saturating_sub(1), Ordering::Relaxed);
    }
}

/// Ends the work on drop, even after a panic. Otherwise a caller that waits for the end would wait for ever.
struct Over<'a>(&'a Work);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = "the thread that fetches in the background panicked: the remaining chunks are fetched when they are read";
            *self.0.failure.lock() = Some(ImageError::new(ImageErrorKind::Io, why));
            self.0.falls_short();
        }
        self.0.over.store(true, Ordering::Release);
    }
}

/// Starts to fetch `total_bytes`. The total is known from the first moment on.
pub(crate) fn start(
    name: &str,
    total_bytes: u64,
    work: impl FnOnce(&Work) + Send + 'static,
) -> Result<Background, ImageError> {
    let shared = Arc::new(Work { total_bytes, ..Work::default() });
    let theirs = Arc::clone(&shared);
    let run = move || {
        let _over = Over(&theirs);
        work(&theirs);
    };
    match std::thread::Builder::new().name(name.into()).spawn(run) {
        Ok(_) => Ok(Background(shared)),
        Err(e) => Err(ImageError::from_os("cannot start a thread that fetches in the background", &e)),
    }
}

/// The stored bytes of chunks.
pub(crate) fn stored(chunks: &[ChunkRef]) -> u64 {
    chunks.iter().map(|chunk| u64::from(chunk.stored_bytes)).sum()
}

/// Limits the bytes in flight.
#[derive(Default)]
struct Gate {
    bytes: Mutex<u64>,
    less: Condvar,
}

impl Gate {
    /// Waits until the limit permits `len` more bytes.
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
    /// Fetches the chunks of `trace` in its order, until `budget_bytes` of stored bytes were requested. Reads
    /// that a request waits for always have precedence.
    pub fn prefetch(self: &Arc<Self>, trace: &Trace, budget_bytes: u64) -> Result<Background, ImageError> {
        if trace.manifest != self.id() {
            let why = format!(
                "the boot trace belongs to version {}, not to {}",
                trace.manifest.short(),
                self.id().short()
            );
            return Err(ImageError::new(ImageErrorKind::Invalid, why));
        }
        let manifest = self.manifest()?;
        let mut seen: HashSet<Hash> = HashSet::new();
        let mut left = budget_bytes;
        let mut chunks: Vec<ChunkRef> = Vec::new();
        for touched in &trace.chunks {
            let Some(chunk) = manifest.chunk(touched.chunk) else { continue };
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
}

/// Sleeps, but ends early if the work is cancelled.
pub(crate) fn pause(time: Duration, work: &Work) {
    let until = Instant::now() + time;
    while Instant::now() < until && !work.is_cancelled() {
        std::thread::sleep(Duration::from_millis(20).min(until.saturating_duration_since(Instant::now())));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use headwater_testkit::wait_until;

    use super::*;

    #[test]
    fn the_last_byte_is_counted_when_the_work_is_over() {
        let (copied, is_copied) = mpsc::channel();
        let (sync, is_synced) = mpsc::channel();
        let work = start("test", 10, move |work| {
            work.done_bytes.fetch_add(10, Ordering::Relaxed);
            copied.send(()).unwrap();
            is_synced.recv().unwrap();
        });
        let work = work.unwrap();
        is_copied.recv().unwrap();
        assert_eq!(work.progress(), BackgroundProgress { total_bytes: 10, done_bytes: 9, is_over: false });
        sync.send(()).unwrap();
        wait_until("the work is over", || work.progress().is_over);
        assert_eq!(work.progress().done_bytes, 10);
    }

    #[test]
    fn work_that_panics_is_over_and_incomplete() {
        let at_once = start("x", 10, |_| panic!("a bug")).unwrap();
        let at_the_end = start("x", 10, |work| {
            work.done_bytes.fetch_add(10, Ordering::Relaxed);
            panic!("a bug");
        });
        for (work, done_bytes) in [(at_once, 0), (at_the_end.unwrap(), 9)] {
            wait_until("the work is over", || work.progress().is_over);
            assert_eq!(work.progress().done_bytes, done_bytes);
            assert!(work.failure().unwrap().to_string().contains("panicked"));
        }
    }
}
