//! Starts a daemon, and ends the start at a signal: a store or a host may never answer.

use std::time::Duration;

use anyhow::Context;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::daemon::{Daemon, Options, STANDING_BY};
use crate::data_dir::DataDir;
use crate::signals::EndSignals;

/// The present step of a slow start is printed after this time.
const REPORT_AFTER: Duration = Duration::from_secs(1);

/// How often that is repeated.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// A signal arrived before the daemon was ready.
#[derive(Debug, thiserror::Error)]
#[error(
    "ended by {signal} while {step}, before it was ready; what was begun is left as after a crash, and the next start \
     cleans it up"
)]
pub struct EndedAtStart {
    signal: &'static str,
    step: &'static str,
}

/// Starts a daemon, and prints the present step if that is slow. A signal ends the start with [`EndedAtStart`].
pub async fn start(
    data_dir: DataDir,
    options: Options,
    signals: &mut EndSignals,
    say: impl Fn(&str),
) -> anyhow::Result<Daemon> {
    let (steps, step) = watch::channel("beginning");
    let mut starting = tokio::spawn(Daemon::start(data_dir, options, steps));
    let mut slow = tokio::time::interval_at(Instant::now() + REPORT_AFTER, REPORT_INTERVAL);
    let mut is_standing_by = false;
    loop {
        tokio::select! {
            started = &mut starting => return started.context("the start failed")?,
            signal = signals.next() => {
                let step = *step.borrow();
                starting.abort();
                // Dropping it removes its socket.
                let _ = tokio::time::timeout(REPORT_AFTER, &mut starting).await;
                return Err(EndedAtStart { signal, step }.into());
            }
            _ = slow.tick() => {
                let step = *step.borrow();
                // A controller may stand by for months.
                if step != STANDING_BY || !is_standing_by {
                    say(&format!("still starting: {step}"));
                }
                is_standing_by = step == STANDING_BY;
            }
        }
    }
}
