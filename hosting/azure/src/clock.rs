//! An interface to the clock, so that tests of waits and expiry need not wait.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use async_trait::async_trait;

/// A monotonic clock.
#[async_trait]
pub trait Clock: Debug + Send + Sync {
    /// The time since an arbitrary instant.
    fn now(&self) -> Duration;

    /// Waits for this time.
    async fn sleep(&self, duration: Duration);
}

/// The monotonic clock of this host.
#[derive(Clone, Copy, Debug)]
pub struct HostClock(Instant);

impl HostClock {
    /// A clock that starts at zero now.
    pub fn start() -> Self {
        Self(Instant::now())
    }
}

#[async_trait]
impl Clock for HostClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}
