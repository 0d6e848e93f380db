//! Limits operations per second and bytes per second, with one token bucket for each.

use std::time::Duration;

/// The limits of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Operations per second.
    pub iops: u64,
    /// Bytes per second.
    pub bytes_per_s: u64,
    /// The least latency of an operation; the latency of the real disk is not added.
    pub latency: Duration,
}

/// The two token buckets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buckets {
    caps: Caps,
    /// The time at which each bucket has a token again, in nanoseconds.
    iops_free_ns: u64,
    bytes_free_ns: u64,
}

impl Buckets {
    /// How much an idle disk can save up, as time. With more, short runs would exceed the limits.
    const BURST_NS: u64 = 2_000_000;

    pub(super) fn new(caps: Caps) -> Self {
        Self { caps, iops_free_ns: 0, bytes_free_ns: 0 }
    }

    /// The time at which an operation that arrives now is completed.
    pub(super) fn due_ns(&mut self, now_ns: u64, bytes: u64) -> u64 {
        let least = now_ns.saturating_sub(Self::BURST_NS);
        let (iops_ns, bytes_ns) = (self.iops_free_ns.max(least), self.bytes_free_ns.max(least));
        let latency_ns = u64::try_from(self.caps.latency.as_nanos()).unwrap_or(u64::MAX);
        let start_ns = now_ns.max(iops_ns).max(bytes_ns);
        self.iops_free_ns = iops_ns + 1_000_000_000 / self.caps.iops.max(1);
        self.bytes_free_ns = bytes_ns + bytes.saturating_mul(1_000_000_000) / self.caps.bytes_per_s.max(1);
        start_ns.saturating_add(latency_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{EPHEMERAL, P10};
    use super::*;

    /// Operations per second of a closed loop with depth 256, on a simulated clock.
    fn operations_per_s(caps: Caps, bytes: u64) -> f64 {
        const SECONDS: u64 = 20;
        let mut buckets = Buckets::new(caps);
        let mut ends = std::collections::BinaryHeap::from(vec![std::cmp::Reverse(0_u64); 256]);
        let mut count = 0;
        while let Some(std::cmp::Reverse(now_ns)) = ends.pop() {
            if now_ns > SECONDS * 1_000_000_000 {
                break;
            }
            ends.push(std::cmp::Reverse(buckets.due_ns(now_ns, bytes)));
            count += 1;
        }
        // The operations in flight at the end were counted too.
        f64::from(count - 256) / SECONDS as f64
    }

    #[test]
    fn a_closed_loop_is_within_two_percent_of_each_cap() {
        for (caps, bytes, cap) in [
            (P10, 4096, 3500.0),
            (P10, 1 << 20, 170.0),
            (EPHEMERAL, 4096, 16_000.0),
            (EPHEMERAL, 64_000, 2000.0),
        ] {
            let per_s = operations_per_s(caps, bytes);
            assert!((per_s / cap - 1.0).abs() < 0.02, "{per_s} for {cap}");
        }
    }

    #[test]
    fn an_idle_disk_answers_an_operation_after_its_latency() {
        let mut buckets = Buckets::new(P10);
        assert_eq!(buckets.due_ns(5_000_000_000, 4096), 5_002_500_000);
    }
}
