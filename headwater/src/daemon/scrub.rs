//! The background scrub: all versions are read again and again at a set rate, and what is damaged is repaired.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use headwater_image::{Cancel, Round};
use headwater_service::Service;
use headwater_store::copy::everything_readable;
use headwater_store::{Hash, Store};

use crate::verification::{self, Checked, Scrub, distinct};

/// The pause between two rounds, and after a round that failed.
const BETWEEN_ROUNDS: Duration = Duration::from_secs(3600);
/// How often it looks whether it is to end while it pauses.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The history has so many damaged versions at most of one run of the daemon, and so many repairs; the log has all.
const NOTED_MAX: usize = 100;
/// How much of a report the history has, in characters.
const NOTED_CHARS_MAX: usize = 300;

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
        let mut history = History { service, runtime, noted: HashSet::new(), repairs: 0 };
        let told = cancel.clone();
        let thread = std::thread::Builder::new().name("scrub".into()).spawn(move || {
            while !told.is_cancelled() {
                if let Err(e) = round(&store, &scrub, &mut history, &told)
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

/// The control plane, as far as the scrub needs it.
struct History {
    service: Service,
    runtime: tokio::runtime::Handle,
    /// What was found damaged, and noted: it is found again in each round.
    noted: HashSet<Hash>,
    /// How many repairs were noted.
    repairs: usize,
}

impl History {
    fn users_of(&self, version: &str) -> Vec<String> {
        self.runtime.block_on(self.service.users_of(version))
    }

    /// Notes what was repaired, and damage when it is found, and again where it comes back after it was gone.
    fn note(&mut self, hash: Hash, names: &[String], checked: &Checked) {
        let image = names.first().map_or("", |name| name.split_once('@').map_or(name, |(image, _)| image));
        let shown = names.join(", ");
        if checked.repaired > 0 && self.repairs < NOTED_MAX {
            self.repairs = self.repairs.saturating_add(1);
            let detail = format!("{shown}: damaged places that were repaired: {}", checked.repaired);
            let detail = detail.chars().take(NOTED_CHARS_MAX).collect();
            self.runtime.block_on(self.service.note_repair(image, detail));
        }
        let Some(first) = checked.damage.first() else {
            self.noted.remove(&hash);
            return;
        };
        if self.noted.len() >= NOTED_MAX || !self.noted.insert(hash) {
            return;
        }
        let more = match checked.damage.len() {
            1 => String::new(),
            count => format!("; {} places more, see the log", count - 1),
        };
        let detail: String = format!("{shown}: {first}{more}").chars().take(NOTED_CHARS_MAX).collect();
        self.runtime.block_on(self.service.note_damage(image, detail));
    }
}

fn round(
    store: &Arc<dyn Store>,
    scrub: &Scrub,
    history: &mut History,
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
        history.note(hash, &names, &checked);
        for line in &checked.damage {
            tracing::error!(version = shown, "damaged: {line}");
        }
        for file in &checked.files {
            tracing::error!(version = shown, "cannot be read because of that: {file}");
        }
        for line in checked.versions.iter().flat_map(|version| history.users_of(version)) {
            tracing::error!(version = shown, "touched by the damage: {line}");
        }
    }
    tracing::info!(versions, chunks, "the scrub read all versions once");
    Ok(())
}
