//! How long requests took, counted in classes that are a sixteenth of their value wide.

use std::time::Duration;

/// Classes of each power of two.
const CLASSES: u64 = 16;

/// Counts of requests by the time that they took.
pub struct Latencies {
    counts: Vec<u64>,
    total: u64,
    sum_ns: u128,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { counts: vec![0; class(u64::MAX) + 1], total: 0, sum_ns: 0 }
    }
}

impl Latencies {
    /// Counts a request.
    pub fn add(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counts[class(ns)] += 1;
        self.total += 1;
        self.sum_ns += u128::from(ns);
    }

    /// Requests in all.
    pub fn count(&self) -> u64 {
        self.total
    }

    /// Mean in microseconds; 0 where there was none.
    pub fn mean_us(&self) -> f64 {
        let mean = self.sum_ns.checked_div(self.total.into()).unwrap_or(0);
        micros(u64::try_from(mean).unwrap_or(u64::MAX))
    }

    /// 99 % took no longer, microseconds: the upper end of the class.
    pub fn p99_us(&self) -> f64 {
        let wanted = self.total - self.total / 100;
        let mut seen = 0;
        let found = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        found.filter(|_| self.total > 0).map_or(0.0, |class| micros(upper_end_ns(class)))
    }
}

fn micros(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64() * 1e6
}

fn class(ns: u64) -> usize {
    let exponent = u64::from(ns.max(CLASSES).ilog2()) - u64::from(CLASSES.ilog2());
    usize::try_from(exponent * CLASSES + (ns >> exponent)).unwrap_or(usize::MAX)
}

fn upper_end_ns(class: usize) -> u64 {
    let class = u64::try_from(class).unwrap_or(u64::MAX);
    if class < 2 * CLASSES {
        return class;
    }
    let exponent = class / CLASSES - 1;
    let width = 1_u64 << exponent;
    let first = (class - exponent * CLASSES) << exponent;
    first.saturating_add(width - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_each_other_and_are_narrow() {
        let mut before = 0;
        for ns in 0..100_000 {
            let class = class(ns);
            assert!(class == before || class == before + 1, "{ns}");
            let end = upper_end_ns(class);
            assert!(end >= ns && end - ns <= ns / 16, "{ns} {end}");
            before = class;
        }
        assert_eq!(upper_end_ns(class(u64::MAX)), u64::MAX);
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
