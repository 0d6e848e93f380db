//! Latencies of requests, by the place that served them, in a fixed amount of memory.
//!
//! A request that is finished at once takes well under a microsecond, and reading the clock twice would be a
//! good part of that. So only about one in [`SAMPLE_EVERY`] of those is timed, and counts for that many. All
//! requests that have to wait are timed. The gaps between samples vary, so that a pattern in the requests
//! does not always put the same kind of request before the clock.
//!
//! A histogram has [`STEPS`] buckets for each doubling of the time, so its figures are wrong by 1/16 at most.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_writecache::{ReadTally, Residence};
use serde::{Deserialize, Serialize};

/// One in this many requests that are finished at once is timed.
pub const SAMPLE_EVERY: u64 = 64;

/// Buckets for each doubling of the time.
const STEP_BITS: u32 = 3;
const STEPS: u64 = 1 << STEP_BITS;

/// Times up to `2^LEAST_BITS` ns share the first bucket.
const LEAST_BITS: u32 = 5;

/// Times from `2^MOST_BITS` ns (about 137 s) on share the last bucket.
const MOST_BITS: u32 = 37;

const BUCKETS: usize = ((MOST_BITS - LEAST_BITS) as usize) * (1 << STEP_BITS) + 1;

/// The kinds of requests that are timed, by the place that served them. A request that is served from several
/// places counts for the slowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    ReadRam,
    ReadPacked,
    ReadZero,
    ReadDisk,
    ReadImage,
    /// Stored at once.
    Write,
    /// Stored after the rest of a block was fetched, or after a wait for space.
    WriteWaited,
}

const CLASSES: usize = 7;

impl Class {
    /// The class of a read that was finished at once: the slowest place that served a part of it.
    #[inline]
    pub(crate) fn at_once(tally: ReadTally, image_bytes: u64) -> Self {
        match tally.slowest() {
            _ if image_bytes > 0 => Self::ReadImage,
            Residence::Packed => Self::ReadPacked,
            Residence::Ram => Self::ReadRam,
            Residence::Zero | Residence::Disk | Residence::Absent => Self::ReadZero,
        }
    }
}

struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

impl Histogram {
    fn new() -> Self {
        Self { buckets: std::array::from_fn(|_| AtomicU64::new(0)), sum_ns: AtomicU64::new(0) }
    }

    fn add(&self, ns: u64, weight: u64) {
        if let Some(bucket) = self.buckets.get(bucket_of(ns)) {
            bucket.fetch_add(weight, Ordering::Relaxed);
        }
        self.sum_ns.fetch_add(ns.saturating_mul(weight), Ordering::Relaxed);
    }

    fn view(&self) -> Latency {
        let counts: Vec<u64> = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        let count: u64 = counts.iter().sum();
        let at = |per_mille: u64| quantile(&counts, count, per_mille);
        Latency {
            count,
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
            p50_ns: at(500),
            p99_ns: at(990),
            p999_ns: at(999),
        }
    }
}

/// The bucket of a time.
fn bucket_of(ns: u64) -> usize {
    let bits = ns.checked_ilog2().unwrap_or(0);
    if bits < LEAST_BITS {
        return 0;
    }
    if bits >= MOST_BITS {
        return BUCKETS - 1;
    }
    let step = (ns >> (bits - STEP_BITS)) & (STEPS - 1);
    let index = u64::from(bits - LEAST_BITS) * STEPS + step + 1;
    usize::try_from(index).map_or(BUCKETS - 1, |index| index.min(BUCKETS - 1))
}

/// The time in the middle of a bucket.
fn middle_ns(bucket: usize) -> u64 {
    let Some(index) = (bucket as u64).checked_sub(1) else { return 1 << (LEAST_BITS - 1) };
    let bits = u32::try_from(index / STEPS).unwrap_or(0) + LEAST_BITS;
    let width = 1u64 << (bits - STEP_BITS);
    (STEPS + index % STEPS) * width + width / 2
}

/// The time that `per_mille` of `count` requests did not exceed; 0 if there were none.
fn quantile(counts: &[u64], count: u64, per_mille: u64) -> u64 {
    let wanted = (u128::from(count) * u128::from(per_mille)).div_ceil(1000).max(1);
    let mut seen = 0u128;
    for (bucket, n) in counts.iter().enumerate() {
        seen += u128::from(*n);
        if seen >= wanted {
            return middle_ns(bucket);
        }
    }
    0
}

/// The histograms of one volume.
pub(crate) struct Latencies([Histogram; CLASSES]);

impl Default for Latencies {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Histogram::new()))
    }
}

impl Latencies {
    /// Records a request that was sampled and finished at once.
    #[cold]
    pub(crate) fn sampled(&self, class: Class, since: Instant) {
        self.add(class, since.elapsed(), SAMPLE_EVERY);
    }

    /// Records a request that had to wait.
    pub(crate) fn waited(&self, class: Class, since: Instant) {
        self.add(class, since.elapsed(), 1);
    }

    fn add(&self, class: Class, took: Duration, weight: u64) {
        if let Some(histogram) = self.0.get(class as usize) {
            histogram.add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), weight);
        }
    }

    pub(crate) fn view(&self) -> LatencySnapshot {
        let of = |class: Class| self.0.get(class as usize).map(Histogram::view).unwrap_or_default();
        LatencySnapshot {
            read_ram: of(Class::ReadRam),
            read_packed: of(Class::ReadPacked),
            read_zero: of(Class::ReadZero),
            read_disk: of(Class::ReadDisk),
            read_image: of(Class::ReadImage),
            write: of(Class::Write),
            write_waited: of(Class::WriteWaited),
        }
    }
}

thread_local! {
    /// The number of requests until the next one that is timed, and the state of the generator of gaps.
    static GAP: Cell<u32> = const { Cell::new(0) };
    static SEED: Cell<u32> = const { Cell::new(0x9e37_79b9) };
}

/// The time, for one in [`SAMPLE_EVERY`] requests on average.
#[inline]
pub(crate) fn sample() -> Option<Instant> {
    let left = GAP.get();
    if left > 0 {
        GAP.set(left - 1);
        return None;
    }
    Some(begin_sample())
}

#[cold]
fn begin_sample() -> Instant {
    let mut seed = SEED.get();
    seed ^= seed << 13;
    seed ^= seed >> 17;
    seed ^= seed << 5;
    SEED.set(seed);
    // From 0 to 126, so 63 requests are left out on average.
    GAP.set(seed % 127);
    Instant::now()
}

/// Latencies of one kind of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// The number of requests; an estimate if only a sample is timed.
    pub count: u64,
    /// The sum of their latencies in nanoseconds; an estimate likewise.
    pub sum_ns: u64,
    /// Half of them took no longer; 0 if there were none.
    pub p50_ns: u64,
    /// 99 of 100 took no longer.
    pub p99_ns: u64,
    /// 999 of 1,000 took no longer.
    pub p999_ns: u64,
}

/// Latencies of requests, by the place that served them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencySnapshot {
    /// Reads from RAM.
    pub read_ram: Latency,
    /// Reads from packed RAM.
    pub read_packed: Latency,
    /// Reads of blocks that are zero.
    pub read_zero: Latency,
    /// Reads that fetched from the overflow disk, and not from the image.
    pub read_disk: Latency,
    /// Reads that needed the image, from memory or from the store.
    pub read_image: Latency,
    /// Writes that were stored at once.
    pub write: Latency,
    /// Writes that first fetched the rest of a block, or waited for space.
    pub write_waited: Latency,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_in_order_and_hold_what_they_say() {
        let mut last = 0;
        for shift in 0..64 {
            for part in 0..16u64 {
                let ns = (1u64 << shift) + (((1u128 << shift) * u128::from(part) / 16) as u64);
                let bucket = bucket_of(ns);
                assert!(bucket >= last && bucket < BUCKETS, "{ns}");
                last = bucket;
                if (1 << LEAST_BITS..1 << MOST_BITS).contains(&ns) {
                    let off = middle_ns(bucket).abs_diff(ns);
                    assert!(off * 16 <= ns, "{ns} is reported as {}", middle_ns(bucket));
                }
            }
        }
        assert_eq!((bucket_of(0), bucket_of(u64::MAX)), (0, BUCKETS - 1));
    }

    #[test]
    fn quantiles_are_those_of_what_was_added() {
        let latencies = Latencies::default();
        assert_eq!(latencies.view(), LatencySnapshot::default());
        for ns in 1..=1000u64 {
            latencies.add(Class::ReadDisk, Duration::from_nanos(ns * 1000), 1);
        }
        latencies.add(Class::Write, Duration::from_nanos(300), SAMPLE_EVERY);
        let view = latencies.view();
        let near = |told: u64, true_ns: u64| told.abs_diff(true_ns) * 16 <= true_ns;
        let disk = view.read_disk;
        assert_eq!((disk.count, disk.sum_ns), (1000, 500_500_000));
        assert!(
            near(disk.p50_ns, 500_000) && near(disk.p99_ns, 990_000) && near(disk.p999_ns, 999_000),
            "{disk:?}"
        );
        assert_eq!((view.write.count, view.write.sum_ns), (64, 300 * 64));
        assert!(near(view.write.p50_ns, 300) && view.write.p999_ns == view.write.p50_ns);
        assert_eq!(view.read_ram, Latency::default());
    }

    #[test]
    fn about_one_in_so_many_is_sampled() {
        let requests = 640_000;
        let sampled = (0..requests).filter(|_| sample().is_some()).count() as u64;
        let want = requests / SAMPLE_EVERY;
        assert!(sampled.abs_diff(want) * 20 < want, "{sampled} of {requests}");
    }
}
