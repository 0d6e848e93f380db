//! A histogram of latencies. The width of each bucket is 1/16 of its value.

use std::time::Duration;

/// Buckets for each power of two.
const BUCKETS: u64 = 16;

/// Numbers of requests by latency.
pub struct Latencies {
    counts: Vec<u64>,
    total: u64,
    sum_ns: u128,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { counts: vec![0; bucket(u64::MAX) + 1], total: 0, sum_ns: 0 }
    }
}

impl Latencies {
    /// Adds a request.
    pub fn add(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(ns)] += 1;
        self.total += 1;
        self.sum_ns += u128::from(ns);
    }

    /// The number of requests.
    pub fn count(&self) -> u64 {
        self.total
    }

    /// The mean in microseconds; 0 without requests.
    pub fn mean_us(&self) -> f64 {
        let mean = self.sum_ns.checked_div(self.total.into()).unwrap_or(0);
        micros(u64::try_from(mean).unwrap_or(u64::MAX))
    }

    /// The 99th percentile in microseconds: the upper end of its bucket.
    pub fn p99_us(&self) -> f64 {
        let wanted = self.total - self.total / 100;
        let mut seen = 0;
        let found = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        found.filter(|_| self.total > 0).map_or(0.0, |bucket| micros(upper_end_ns(bucket)))
    }
}

fn micros(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64() * 1e6
}

fn bucket(ns: u64) -> usize {
    let exponent = u64::from(ns.max(BUCKETS).ilog2()) - u64::from(BUCKETS.ilog2());
    usize::try_from(exponent * BUCKETS + (ns >> exponent)).unwrap_or(usize::MAX)
}

fn upper_end_ns(bucket: usize) -> u64 {
    let bucket = u64::try_from(bucket).unwrap_or(u64::MAX);
    if bucket < 2 * BUCKETS {
        return bucket;
    }
    let exponent = bucket / BUCKETS - 1;
    let width = 1_u64 << exponent;
    let first = (bucket - exponent * BUCKETS) << exponent;
    first.saturating_add(width - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_adjacent_and_narrow() {
        let mut before = 0;
        for ns in 0..100_000 {
            let bucket = bucket(ns);
            assert!(bucket == before || bucket == before + 1, "{ns}");
            let end = upper_end_ns(bucket);
            assert!(end >= ns && end - ns <= ns / 16, "{ns} {end}");
            before = bucket;
        }
        assert_eq!(upper_end_ns(bucket(u64::MAX)), u64::MAX);
    }

    #[test]
    fn mean_and_percentile() {
        let mut latencies = Latencies::default();
        assert_eq!((latencies.mean_us(), latencies.p99_us()), (0.0, 0.0));
        for _ in 0..990 {
            latencies.add(Duration::from_micros(1));
        }
        for _ in 0..10 {
            latencies.add(Duration::from_micros(101));
        }
        assert_eq!(latencies.count(), 1000);
        assert!((latencies.mean_us() - 2.0).abs() < 1e-9);
        assert!((1.0..1.1).contains(&latencies.p99_us()), "{}", latencies.p99_us());
        latencies.add(Duration::from_micros(101));
        latencies.add(Duration::from_micros(101));
        assert!(latencies.p99_us() > 100.0);
    }
}
