//! Model disks: an I/O engine that starts operations no faster than a disk's caps allow, and the arithmetic of those caps.
//!
//! The real disk below must be faster than the model. Operations start in order; the model has one queue.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use headwater_writecache::overflow::io::{IoEngine, IoOp};

/// Caps of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Operations a second.
    pub iops: u64,
    /// Bytes a second.
    pub bytes_per_s: u64,
    /// The least time that an operation takes, without that of the real disk.
    pub latency: Duration,
}

/// When operations may start: one bucket for operations and one for bytes.
#[derive(Clone, Copy, Debug)]
struct Buckets {
    caps: Caps,
    /// Nanoseconds at which each bucket has a token again.
    iops_free_ns: u64,
    bytes_free_ns: u64,
}

impl Buckets {
    /// Tokens that an idle disk saves up, as time: more would let short runs overshoot.
    const BURST_NS: u64 = 2_000_000;

    fn new(caps: Caps) -> Self {
        Self { caps, iops_free_ns: 0, bytes_free_ns: 0 }
    }

    /// The time at which an operation that arrives now is started.
    fn start_ns(&mut self, now_ns: u64, bytes: u64) -> u64 {
        let least = now_ns.saturating_sub(Self::BURST_NS);
        let (iops_ns, bytes_ns) = (self.iops_free_ns.max(least), self.bytes_free_ns.max(least));
        let latency_ns = u64::try_from(self.caps.latency.as_nanos()).unwrap_or(u64::MAX);
        let start_ns = now_ns.max(iops_ns).max(bytes_ns);
        self.iops_free_ns = iops_ns + 1_000_000_000 / self.caps.iops.max(1);
        self.bytes_free_ns = bytes_ns + bytes.saturating_mul(1_000_000_000) / self.caps.bytes_per_s.max(1);
        start_ns.saturating_add(latency_ns)
    }
}

/// The engine of a model disk, over that of a real disk.
pub struct ModelEngine {
    arrived: mpsc::Sender<(Instant, IoOp)>,
}

impl ModelEngine {
    /// Starts the thread that holds operations back. It ends when the engine is dropped.
    pub fn start(caps: Caps, real: Arc<dyn IoEngine>) -> io::Result<Self> {
        let (arrived, waiting) = mpsc::channel::<(Instant, IoOp)>();
        let hold = move || {
            let (began, mut buckets) = (Instant::now(), Buckets::new(caps));
            for (at, op) in waiting {
                let now_ns =
                    u64::try_from(at.saturating_duration_since(began).as_nanos()).unwrap_or(u64::MAX);
                let due = began + Duration::from_nanos(buckets.start_ns(now_ns, op.len as u64));
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                real.submit(op);
            }
        };
        std::thread::Builder::new().name("model-disk".into()).spawn(hold)?;
        Ok(Self { arrived })
    }
}

impl IoEngine for ModelEngine {
    fn submit(&self, op: IoOp) {
        if let Err(mpsc::SendError((_, op))) = self.arrived.send((Instant::now(), op)) {
            (op.done)(Err(io::Error::other("the model disk has ended")), op.buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPS: Caps = Caps { iops: 3500, bytes_per_s: 170 << 20, latency: Duration::from_micros(2500) };

    /// Operations that a closed loop of 256 starts within a time, on a clock of its own.
    fn operations_in(seconds: u64, bytes: u64) -> u64 {
        let mut buckets = Buckets::new(CAPS);
        let mut ends = std::collections::BinaryHeap::from(vec![std::cmp::Reverse(0_u64); 256]);
        let mut count = 0;
        while let Some(std::cmp::Reverse(now_ns)) = ends.pop() {
            if now_ns > seconds * 1_000_000_000 {
                return count;
            }
            ends.push(std::cmp::Reverse(buckets.start_ns(now_ns, bytes)));
            count += 1;
        }
        count
    }

    #[test]
    fn a_closed_loop_is_within_two_percent_of_each_cap() {
        for (bytes, cap) in [(4096, 3500), (1 << 20, 170)] {
            let per_s = operations_in(20, bytes) as f64 / 20.0;
            // The operations in flight at the end were counted too.
            let per_s = per_s - 256.0 / 20.0;
            assert!((per_s / f64::from(cap) - 1.0).abs() < 0.02, "{per_s} for {cap}");
        }
    }

    #[test]
    fn an_idle_disk_starts_an_operation_after_its_latency() {
        let mut buckets = Buckets::new(CAPS);
        assert_eq!(buckets.start_ns(5_000_000_000, 4096), 5_002_500_000);
    }
}
