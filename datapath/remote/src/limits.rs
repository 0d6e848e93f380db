//! Times and amounts of reading from servers.

use std::time::Duration;

/// Times and amounts, with values that suit most.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A server from which nothing arrives for so long is down.
    pub stall: Duration,
    /// A read is asked for a second time from another server at the earliest after so long ..
    pub hedge_after: Duration,
    /// .. and at the latest after so long without a byte. So long a connection may take to be ready at most.
    pub hedge_after_max: Duration,
    /// A server that failed is tried again after so long, and after twice that for each further failure ..
    pub probe_after: Duration,
    /// .. but at least so often.
    pub probe_after_max: Duration,
    /// A server whose bytes were wrong is distrusted for so long.
    pub distrust: Duration,
    /// A read that no reachable server has the right bytes for waits so long for the others.
    pub wait_for_better: Duration,
    /// How often servers that are up are told which versions are in use.
    pub keep_every: Duration,
    /// Connections that are kept for each server while nothing is read.
    pub idle_connections: usize,
    /// How long they are kept.
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
