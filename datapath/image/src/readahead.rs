//! Decides which chunks to prefetch for sequential readers. No I/O: it maps reads to ranges of chunks.
//!
//! | stream | becomes | if |
//! |---|---|---|
//! | none | candidate | a chunk is missing that continues no stream |
//! | candidate | running | the next chunk is read: the first window is fetched |
//! | running | running, with twice the window | its reader reaches the middle of the window, or a chunk after the window |
//!
//! Reads that find everything in memory only compare their chunks with a few numbers. They take no lock until
//! a read enters a new window.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// The most sequential readers of one disk that are tracked.
const STREAMS: usize = 8;
/// The first window, in chunks.
const FIRST_WINDOW: u64 = 2;
/// How far a read of a running stream may be from the expected chunk, because requests overtake one another.
const SLACK: u64 = 16;
/// The same limit for a candidate.
const CANDIDATE_SLACK: u64 = 1;

const NONE: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The chunk after the last one that was read.
    next: u64,
    /// The chunk after the last one that was prefetched.
    ahead: u64,
    /// 0 for a candidate.
    window: u64,
    used: u64,
}

/// Tracks the readers of one disk.
pub(crate) struct Readahead {
    /// For each stream, the chunk that triggers the next prefetch when it is read.
    triggers: [AtomicU64; STREAMS],
    streams: Mutex<Streams>,
    max_window: u64,
}

struct Streams {
    list: [Option<Stream>; STREAMS],
    clock: u64,
}

impl Readahead {
    /// Prefetches at most `max_window` chunks for a reader.
    pub(crate) fn new(max_window: u64) -> Self {
        Self {
            triggers: [const { AtomicU64::new(NONE) }; STREAMS],
            streams: Mutex::new(Streams { list: [None; STREAMS], clock: 0 }),
            max_window,
        }
    }

    /// Records a read of chunks `first` to `last`. Returns the chunks to fetch now.
    pub(crate) fn read(&self, first: u64, last: u64, missed: bool) -> Option<Range<u64>> {
        if self.max_window < FIRST_WINDOW {
            return None;
        }
        let is_hit = |trigger: &AtomicU64| (first..=last).contains(&trigger.load(Ordering::Relaxed));
        let entered = self.triggers.iter().any(is_hit);
        if !missed && !entered {
            return None;
        }
        let mut streams = self.streams.lock();
        streams.clock += 1;
        let clock = streams.clock;
        let fits = |stream: &Stream| {
            // Reads of a running stream are seen only if they miss or reach a trigger, so its reader may be
            // anywhere in the prefetched range.
            let (slack, end) =
                if stream.window == 0 { (CANDIDATE_SLACK, stream.next) } else { (SLACK, stream.ahead) };
            first < end.saturating_add(slack) && last.saturating_add(slack) >= stream.next
        };
        let found = streams.list.iter_mut().zip(&self.triggers).find_map(|(stream, trigger)| {
            stream.as_mut().filter(|stream| fits(stream)).map(|stream| (stream, trigger))
        });
        if let Some((stream, trigger)) = found {
            stream.used = clock;
            return stream.go_on(first, last, missed || is_hit(trigger), self.max_window, trigger);
        }
        if missed {
            let next = last.saturating_add(1);
            let oldest = streams.list.iter_mut().zip(&self.triggers);
            let oldest = oldest.min_by_key(|(stream, _)| stream.map_or(0, |stream| stream.used));
            if let Some((stream, trigger)) = oldest {
                *stream = Some(Stream { next, ahead: next, window: 0, used: clock });
                trigger.store(NONE, Ordering::Relaxed);
            }
        }
        None
    }
}

impl Stream {
    fn go_on(
        &mut self,
        first: u64,
        last: u64,
        more: bool,
        max_window: u64,
        trigger: &AtomicU64,
    ) -> Option<Range<u64>> {
        let next = last.saturating_add(1);
        if next <= self.next {
            return None;
        }
        self.next = next;
        if !more {
            return None;
        }
        let len = next - first.min(last);
        self.window = match self.window {
            0 => FIRST_WINDOW.max(2 * len),
            window => window.saturating_mul(2),
        };
        self.window = self.window.min(max_window);
        let start = self.ahead.max(next);
        let end = next.saturating_add(self.window);
        if end <= start {
            return None;
        }
        self.ahead = end;
        // If half of it is still unread, the next part is fetched.
        trigger.store(start.max(end - self.window / 2), Ordering::Relaxed);
        Some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_of_a_sequential_reader_grows_to_the_limit() {
        let readahead = Readahead::new(32);
        let mut fetched = 0;
        let mut missed = Vec::new();
        for chunk in 0..200 {
            let is_missing = chunk >= fetched;
            if is_missing {
                missed.push(chunk);
            }
            // Sixteen small reads of each chunk, of which only the first can miss.
            for read in 0..16 {
                if let Some(range) = readahead.read(chunk, chunk, is_missing && read == 0) {
                    assert!(range.start >= fetched && range.start > chunk, "{range:?} after {fetched}");
                    assert!(range.end <= chunk + 1 + 32);
                    fetched = range.end;
                }
            }
        }
        assert_eq!(missed, [0, 1]);
        assert!(fetched > 210, "{fetched}");
    }

    #[test]
    fn random_reads_cause_no_prefetch() {
        let readahead = Readahead::new(32);
        let mut chunk = 1u64;
        for _ in 0..1000 {
            chunk = chunk.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (chunk >> 20) * 5 % 1_000_000_007;
            assert_eq!(readahead.read(at, at, true), None);
        }
    }

    #[test]
    fn requests_that_overtake_one_another_are_one_stream() {
        let readahead = Readahead::new(64);
        let mut fetched = 0u64;
        for base in (0..400u64).step_by(4) {
            for chunk in [base + 1, base, base + 3, base + 2] {
                if let Some(range) = readahead.read(chunk, chunk, chunk >= fetched) {
                    fetched = fetched.max(range.end);
                }
            }
        }
        assert!(fetched > 400, "{fetched}");
    }

    #[test]
    fn eight_readers_are_tracked_at_a_time() {
        let readahead = Readahead::new(16);
        let mut fetched = [0u64; 8];
        for chunk in 0..50 {
            for (reader, fetched) in fetched.iter_mut().enumerate() {
                let at = reader as u64 * 1_000_000 + chunk;
                if let Some(range) = readahead.read(at, at, chunk >= *fetched) {
                    *fetched = range.end - reader as u64 * 1_000_000;
                }
            }
        }
        assert!(fetched.iter().all(|fetched| *fetched >= 50), "{fetched:?}");
        assert_eq!(Readahead::new(0).read(0, 0, true), None);
    }
}
