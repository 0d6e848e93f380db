//! The time, as a parameter, so that a test of waits and of expiry does not wait.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use async_trait::async_trait;

/// A clock that only goes forward.
#[async_trait]
pub trait Clock: Debug + Send + Sync {
    /// The time since some instant.
    fn now(&self) -> Duration;

    /// Waits.
    async fn sleep(&self, duration: Duration);
}

/// The clock of this host.
#[derive(Clone, Copy, Debug)]
pub struct HostClock(Instant);

impl HostClock {
    /// It begins now.
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
