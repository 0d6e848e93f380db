//! Starting a daemon with an ear for signals: a store or a host may never answer what a start asks of it.

use std::time::Duration;

use anyhow::Context;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::daemon::{Daemon, Options, STANDING_BY};
use crate::data_dir::DataDir;
use crate::signals::EndSignals;

/// After how long it is said what a start waits for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often that is said again.
const SAID_AGAIN: Duration = Duration::from_secs(10);

/// A signal came before the daemon was ready.
#[derive(Debug, thiserror::Error)]
#[error(
    "ended by {signal} while {step}, before it was ready; what was begun is left as after a crash, and the next start \
     cleans it up"
)]
pub struct EndedAtStart {
    signal: &'static str,
    step: &'static str,
}

/// Starts a daemon, and says what it waits for where that takes its time. A signal ends it with [`EndedAtStart`].
pub async fn start(
    data_dir: DataDir,
    options: Options,
    signals: &mut EndSignals,
    say: impl Fn(&str),
) -> anyhow::Result<Daemon> {
    let (steps, step) = watch::channel("beginning");
    let mut starting = tokio::spawn(Daemon::start(data_dir, options, steps));
    let mut slow = tokio::time::interval_at(Instant::now() + PATIENCE, SAID_AGAIN);
    let mut is_standing_by = false;
    loop {
        tokio::select! {
            started = &mut starting => return started.context("the start broke off")?,
            signal = signals.next() => {
                let step = *step.borrow();
                starting.abort();
                // Dropped, it removes its socket.
                let _ = tokio::time::timeout(PATIENCE, &mut starting).await;
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
