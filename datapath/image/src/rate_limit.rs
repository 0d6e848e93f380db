//! Limits the rate at which scrubs and hydration read, so that they leave bandwidth to machines: a reader
//! that is too fast waits. It sleeps, so requests of machines must not use it.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The longest wait at a time, so that a cancelled operation ends soon.
const WAIT_MAX: Duration = Duration::from_millis(200);

/// A rate limit that several threads share. Unused time is not saved for later.
#[derive(Debug)]
pub struct RateLimit {
    bytes_per_s: Option<u64>,
    /// When the next bytes may be read.
    next: Mutex<Instant>,
}

impl RateLimit {
    /// A limit of `bytes_per_s`, at least one byte per second; `None`: no limit.
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self { bytes_per_s, next: Mutex::new(Instant::now()) }
    }

    /// Whether there is a limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.bytes_per_s.is_some()
    }

    /// Waits until `bytes` more may be read, or `is_over` returns true.
    pub(crate) fn take(&self, bytes: u64, is_over: impl Fn() -> bool) {
        let Some(rate) = self.bytes_per_s else { return };
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
        let cost = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        let mine = {
            let mut next = self.next.lock();
            let mine = (*next).max(Instant::now());
            *next = mine + cost;
            mine
        };
        while !is_over() {
            let left = mine.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(WAIT_MAX));
        }
        // The bytes are not read, so no other reader has to wait for them.
        let mut next = self.next.lock();
        *next = next.checked_sub(cost).unwrap_or(*next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_a_rate() {
        let rate_limit = RateLimit::new(Some(1_000_000));
        let began = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..5).for_each(|_| rate_limit.take(10_000, || false)));
            }
        });
        // 200,000 bytes; no thread waits for the last ones.
        assert!(began.elapsed() >= Duration::from_millis(190), "{:?}", began.elapsed());
        RateLimit::new(None).take(u64::MAX, || false);
        let slow = RateLimit::new(Some(1));
        slow.take(1 << 20, || false);
        slow.take(1 << 20, || true);
        // Abandoned bytes cause no wait; bytes that were read do.
        assert!(*slow.next.lock() < Instant::now() + Duration::from_secs((1 << 20) + 1));
    }
}
