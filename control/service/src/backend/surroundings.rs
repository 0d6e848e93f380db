//! The clock and the source of random numbers, as traits, so that tests can replace them.

use std::time::{SystemTime, UNIX_EPOCH};

/// A clock.
pub trait Clock: Send + Sync + 'static {
    /// Milliseconds since 1970 UTC.
    fn now_ms(&self) -> u64;

    /// Milliseconds since the host was booted, including those in which it was suspended. This clock cannot be set.
    fn since_boot_ms(&self) -> u64;
}

/// A source of random bytes.
pub trait Random: Send + Sync + 'static {
    /// Fills `bytes` with unpredictable bytes.
    fn fill(&self, bytes: &mut [u8]) -> std::io::Result<()>;
}

/// The host's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        // tidy(no-clock): this is the only place that reads the host's clock; logic gets a `Clock`.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    fn since_boot_ms(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let (seconds, nanoseconds) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
        seconds.unwrap_or(0).saturating_mul(1_000).saturating_add(nanoseconds.unwrap_or(0) / 1_000_000)
    }
}

/// The kernel's random numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&self, bytes: &mut [u8]) -> std::io::Result<()> {
        use std::io::Read;
        std::fs::File::open("/dev/urandom")?.read_exact(bytes)
    }
}
