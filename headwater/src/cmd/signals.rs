//! Waiting to be told to end.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Ctrl-C and SIGTERM. While this lives, neither ends the process by itself.
pub struct EndSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl EndSignals {
    /// Begins to catch them.
    pub fn catch() -> anyhow::Result<Self> {
        let catch = |kind| signal(kind).context("cannot catch signals");
        Ok(Self { interrupt: catch(SignalKind::interrupt())?, terminate: catch(SignalKind::terminate())? })
    }

    /// Waits for the next one, and returns its name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}
