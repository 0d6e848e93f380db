//! The result of one worker, or of several workers together.

use std::time::Duration;

use super::{Direction, Latencies};

/// Upper ends of Iometer's latency bins, in microseconds. The last bin has no upper end.
const BIN_ENDS_US: [u64; 20] = [
    50, 100, 200, 500, 1000, 2000, 5000, 10_000, 15_000, 20_000, 30_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 2_000_000, 4_700_000, 5_000_000, 10_000_000,
];

/// The requests of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// The number of requests.
    pub count: u64,
    /// Their total length, in bytes.
    pub bytes: u64,
    /// The sum of their latencies.
    pub sum_ns: u128,
    /// Their longest latency.
    pub max_ns: u64,
}

/// Requests and their latencies.
#[derive(Clone, Debug, Default)]
pub struct Part {
    tallies: [Tally; 2],
    pub(super) latencies: Latencies,
    bins: [u64; 21],
    elapsed: Duration,
}

impl Part {
    /// Adds an answered request.
    pub fn count_one(&mut self, direction: Direction, bytes: u32, latency: Duration) {
        self.latencies.count_one(latency);
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        let tally = &mut self.tallies[usize::from(direction == Direction::Write)];
        tally.count += 1;
        tally.bytes += u64::from(bytes);
        tally.sum_ns += u128::from(ns);
        tally.max_ns = tally.max_ns.max(ns);
        self.bins[BIN_ENDS_US.partition_point(|end_us| ns >= end_us * 1000)] += 1;
    }

    /// Adds the result of another worker that ran at the same time.
    pub fn add(&mut self, other: &Self) {
        for (tally, other) in self.tallies.iter_mut().zip(&other.tallies) {
            tally.count += other.count;
            tally.bytes += other.bytes;
            tally.sum_ns += other.sum_ns;
            tally.max_ns = tally.max_ns.max(other.max_ns);
        }
        self.latencies.add(&other.latencies);
        self.bins.iter_mut().zip(&other.bins).for_each(|(bin, other)| *bin += other);
        self.elapsed = self.elapsed.max(other.elapsed);
    }

    /// Sets the time from the first request to the last answer.
    pub fn set_elapsed(&mut self, elapsed: Duration) {
        self.elapsed = elapsed;
    }

    /// The time from the first request to the last answer.
    pub fn elapsed_s(&self) -> f64 {
        self.elapsed.as_secs_f64()
    }

    /// The requests of a direction.
    pub fn of(&self, direction: Direction) -> Tally {
        self.tallies[usize::from(direction == Direction::Write)]
    }

    /// Numbers of requests by latency, in Iometer's bins.
    pub fn bins(&self) -> &[u64; 21] {
        &self.bins
    }
}
