//! A histogram of latencies with 16 buckets for each power of two.

use std::time::Duration;

const STEPS: u64 = 16;
const BUCKETS: usize = 64 * STEPS as usize;

/// Numbers of requests by latency.
#[derive(Clone, Debug)]
pub struct Latencies {
    buckets: Vec<u64>,
    count: u64,
    sum_ns: u128,
    max_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS], count: 0, sum_ns: 0, max_ns: 0 }
    }
}

/// The bucket of a latency.
fn bucket_of(ns: u64) -> usize {
    if ns < STEPS {
        return ns as usize;
    }
    let octave = u64::from(ns.ilog2());
    let step = (ns >> (octave - 4)) & (STEPS - 1);
    ((octave - 3) * STEPS + step) as usize
}

/// The lower end of a bucket.
fn least_ns(bucket: u64) -> f64 {
    if bucket < STEPS {
        return bucket as f64;
    }
    let (octave, step) = (bucket / STEPS + 3, bucket % STEPS);
    ((STEPS + step) as f64) * ((octave - 4) as f64).exp2()
}

impl Latencies {
    /// Adds one request.
    pub fn count_one(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        if let Some(bucket) = self.buckets.get_mut(bucket_of(ns)) {
            *bucket += 1;
        }
        self.count += 1;
        self.sum_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds all requests of another histogram.
    pub(super) fn add(&mut self, other: &Self) {
        for (bucket, count) in self.buckets.iter_mut().zip(&other.buckets) {
            *bucket += count;
        }
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The number of requests.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean latency.
    pub fn mean_us(&self) -> f64 {
        self.sum_ns as f64 / 1000.0 / self.count.max(1) as f64
    }

    /// The longest latency.
    pub fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1000.0
    }

    /// A percentile, rounded down by at most 1/16; 0 if there were no requests.
    pub fn percentile_us(&self, percent: f64) -> f64 {
        let rank = (percent / 100.0 * self.count as f64).ceil() as u64;
        let mut seen = 0;
        for (number, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank.max(1) {
                return least_ns(number as u64) / 1000.0;
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_near_those_of_the_sorted_list() {
        let mut latencies = Latencies::default();
        let all: Vec<u64> = (1..=10_000).map(|n| n * n * 10).collect();
        all.iter().for_each(|ns| latencies.count_one(Duration::from_nanos(*ns)));
        for percent in [1.0, 50.0, 99.0, 100.0] {
            let exact = all[(percent / 100.0 * 10_000.0) as usize - 1] as f64 / 1000.0;
            let found = latencies.percentile_us(percent);
            assert!(found <= exact && found > exact * 15.0 / 16.0, "{percent}: {found} for {exact}");
        }
        assert_eq!(latencies.max_us(), 1e6);
    }
}
