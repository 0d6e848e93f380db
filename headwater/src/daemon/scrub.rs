//! The background scrub: all versions are read again and again at a set rate, and what is damaged is repaired.

use std::sync::Arc;
use std::time::Duration;

use headwater_image::{Cancel, Round};
use headwater_service::Service;
use headwater_store::Store;
use headwater_store::copy::everything_readable;

use crate::verification::{self, Scrub, distinct};

/// The pause between two rounds, and after a round that failed.
const BETWEEN_ROUNDS: Duration = Duration::from_secs(3600);
/// How often it looks whether it is to end while it pauses.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A scrub that goes on until this is dropped.
pub struct Scrubbing {
    cancel: Cancel,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Scrubbing {
    /// Begins.
    pub fn start(store: Arc<dyn Store>, scrub: Scrub, service: Service) -> anyhow::Result<Self> {
        let cancel = Cancel::new();
        let runtime = tokio::runtime::Handle::current();
        let users = move |version: &str| runtime.block_on(service.users_of(version));
        let told = cancel.clone();
        let thread = std::thread::Builder::new().name("scrub".into()).spawn(move || {
            while !told.is_cancelled() {
                if let Err(e) = round(&store, &scrub, &users, &told)
                    && !told.is_cancelled()
                {
                    tracing::error!("the scrub failed and begins again in an hour: {e:#}");
                }
                let mut left = BETWEEN_ROUNDS;
                while !told.is_cancelled() && !left.is_zero() {
                    std::thread::sleep(LOOK_EVERY);
                    left = left.saturating_sub(LOOK_EVERY);
                }
            }
        })?;
        Ok(Self { cancel, thread: Some(thread) })
    }
}

impl Drop for Scrubbing {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the scrub ended by a bug");
        }
    }
}

fn round(
    store: &Arc<dyn Store>,
    scrub: &Scrub,
    users: &dyn Fn(&str) -> Vec<String>,
    cancel: &Cancel,
) -> anyhow::Result<()> {
    let sources = match scrub.open_sources() {
        Ok(sources) => sources,
        Err(e) => {
            tracing::warn!("the scrub cannot repair in this round: {e}");
            Vec::new()
        }
    };
    let (mut chunks, mut versions) = (0u64, 0u32);
    let there = everything_readable(&**store)?;
    for (_, e) in &there.unreadable {
        tracing::error!("the scrub: {e}");
    }
    // What versions share is read with the first one of them.
    let checks = Round::new(scrub.rate);
    for (hash, names) in distinct(&there.what) {
        let shown = names.join(", ");
        let checked = verification::check(&**store, hash, &names, (&checks, &sources), cancel, &mut |_| {});
        // The others are checked all the same where something fails.
        let checked = match checked {
            Ok(Some(checked)) => checked,
            _ if cancel.is_cancelled() => return Ok(()),
            // It was removed meanwhile.
            Ok(None) => continue,
            Err(e) => {
                tracing::error!(version = shown, "the scrub: cannot verify it: {e}");
                continue;
            }
        };
        chunks = chunks.saturating_add(checked.chunks);
        versions = versions.saturating_add(1);
        if checked.repaired > 0 {
            tracing::warn!(version = shown, places = checked.repaired, "the scrub repaired damage");
        }
        for line in &checked.damage {
            tracing::error!(version = shown, "damaged: {line}");
        }
        for file in &checked.files {
            tracing::error!(version = shown, "cannot be read because of that: {file}");
        }
        for line in checked.versions.iter().flat_map(|version| users(version)) {
            tracing::error!(version = shown, "touched by the damage: {line}");
        }
    }
    tracing::info!(versions, chunks, "the scrub read all versions once");
    Ok(())
}
