//! Signals that end the process or reload its configuration.

use anyhow::Context;
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Makes writes beyond the limit of file sizes (`ulimit -f`, `LimitFSIZE=`) fail instead of ending this process with
/// all disks that it serves. The signal is caught and not ignored, because child processes would inherit that it is
/// ignored.
pub fn outlive_file_limit() -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().build().context("cannot start")?;
    let _within = runtime.enter();
    let kind = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
    // A signal that was caught once stays caught until the process ends.
    signal(kind).map(drop).context("cannot catch SIGXFSZ")
}

/// Ctrl-C, SIGTERM, and the end of the terminal (SIGHUP). While this lives, none of them ends the process directly,
/// because machines would lose their disks.
pub struct EndSignals {
    interrupt: Signal,
    terminate: Signal,
    /// `None` if SIGHUP was ignored from the beginning, as by `nohup`.
    hang_up: Option<Signal>,
}

/// SIGHUP as the request to reload the configuration file.
pub struct ReloadSignal(Option<Signal>);

impl ReloadSignal {
    /// Begins to catch it, if there is a configuration file.
    pub fn catch(has_file: bool) -> anyhow::Result<Self> {
        let caught = has_file.then(|| signal(SignalKind::hangup()).context("cannot catch SIGHUP"));
        caught.transpose().map(Self)
    }

    /// Waits for the next one; without a configuration file forever.
    pub async fn next(&mut self) {
        match &mut self.0 {
            Some(signal) => drop(signal.recv().await),
            None => std::future::pending().await,
        }
    }
}

impl EndSignals {
    /// Begins to catch the signals.
    pub fn catch() -> anyhow::Result<Self> {
        Self::catch_with(!is_hang_up_ignored())
    }

    /// Begins to catch the signals, SIGHUP only if `hang_up` is set.
    pub fn catch_with(hang_up: bool) -> anyhow::Result<Self> {
        let catch = |kind| signal(kind).context("cannot catch signals");
        let hang_up = if hang_up { Some(catch(SignalKind::hangup())?) } else { None };
        Ok(Self {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
            hang_up,
        })
    }

    /// Waits for the next signal, and returns its name.
    pub async fn next(&mut self) -> &'static str {
        let hang_up = async {
            match &mut self.hang_up {
                Some(signal) => signal.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
            _ = hang_up => "SIGHUP",
        }
    }
}

/// Whether SIGHUP is ignored: the first bit of the mask of ignored signals.
pub fn is_hang_up_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}
