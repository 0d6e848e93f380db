//! Time limits and quantities for reading from servers.

use std::time::Duration;

/// Time limits and quantities, with default values.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A server that sends nothing for this long is down.
    pub stall: Duration,
    /// A read is sent to a second server after this time at the earliest.
    pub hedge_after: Duration,
    /// A read is sent to a second server after this time without a byte at the latest. A connection may also
    /// take at most this long to be ready.
    pub hedge_after_max: Duration,
    /// The time from a server's first failure to its first probe. It doubles with each further failure.
    pub probe_after: Duration,
    /// The longest time between two probes.
    pub probe_after_max: Duration,
    /// A server whose bytes were wrong is distrusted for this long.
    pub distrust: Duration,
    /// If no reachable server has the right bytes, a read waits this long for the others.
    pub wait_for_better: Duration,
    /// How often available servers are informed which versions are in use, so that they keep them.
    pub keep_every: Duration,
    /// The most idle connections that are kept for each server.
    pub idle_connections: usize,
    /// How long an idle connection is kept.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            stall: Duration::from_secs(5),
            hedge_after: Duration::from_millis(50),
            hedge_after_max: Duration::from_secs(1),
            probe_after: Duration::from_millis(100),
            probe_after_max: Duration::from_secs(3),
            distrust: Duration::from_secs(60),
            wait_for_better: Duration::from_secs(10),
            keep_every: Duration::from_secs(600),
            idle_connections: 16,
            idle: Duration::from_secs(20),
        }
    }
}
