//! The scrub: verifies all versions in the background, again and again, at a set rate, and repairs damage.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_image::{Cancel, VerifyRound};
use headwater_service::{Findings, Service, UnreadableList, touches};
use headwater_store::copy::everything_readable;
use headwater_store::{Hash, ImageName, Store, StoreError, StoreErrorKind};

use crate::show::printable;
use crate::verification::{self, Checked, Scrub, distinct};

/// The default pause between two rounds, and after a round that failed.
const BETWEEN_ROUNDS: Duration = Duration::from_secs(3600);
/// How often it checks during a pause whether it must end.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The most events about damage, and the most about repairs, that one run of the daemon writes to the history; the
/// log has all.
const NOTED_MAX: usize = 100;
/// The most characters of a report in the history, without the affected users, which have their own limit.
const NOTED_CHARS_MAX: usize = 300;

/// A running scrub. Dropping it ends it.
pub struct Scrubbing {
    cancel: Cancel,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Scrubbing {
    /// Starts the scrub.
    pub fn start(
        store: Arc<dyn Store>,
        scrub: Scrub,
        pause: Option<Duration>,
        service: Service,
    ) -> anyhow::Result<Self> {
        let pause = pause.unwrap_or(BETWEEN_ROUNDS);
        let cancel = Cancel::new();
        let runtime = tokio::runtime::Handle::current();
        let users = Users::default();
        let mut history = History { service, runtime, noted: HashSet::new(), repairs: 0, users };
        let told = cancel.clone();
        let thread = std::thread::Builder::new().name("scrub".into()).spawn(move || {
            while !told.is_cancelled() {
                if let Err(e) = round(&store, &scrub, &mut history, &told)
                    && !told.is_cancelled()
                {
                    tracing::error!("the scrub failed, and is restarted in {} s: {e:#}", pause.as_secs());
                }
                let mut left = pause;
                while !told.is_cancelled() && !left.is_zero() {
                    std::thread::sleep(POLL_INTERVAL.min(left));
                    left = left.saturating_sub(POLL_INTERVAL);
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
            tracing::error!("the scrub crashed because of a bug");
        }
    }
}

/// Reports findings to the control plane.
struct History {
    service: Service,
    runtime: tokio::runtime::Handle,
    /// Damaged versions with an event already. Each round finds them again.
    noted: HashSet<Hash>,
    /// The number of events about repairs.
    repairs: usize,
    /// The cached users of versions in this round.
    users: Users,
}

/// How long the users of a version, or the failure to find them, are cached. A round may take days.
const USERS_KEPT: Duration = Duration::from_secs(300);
const UNKNOWN_KEPT: Duration = Duration::from_secs(60);

/// The users of versions, cached within a round. Much damage can affect the same versions, and each query reads
/// all machines and asks the store. The cache has at most as many entries as the store has versions.
#[derive(Default)]
struct Users(HashMap<String, Told>);

#[derive(Default)]
struct Told {
    until: Option<Instant>,
    lines: Vec<String>,
}

impl Users {
    /// The users of these versions; and of them, the lines that were not reported last for the same version.
    fn of(
        &mut self,
        versions: &[String],
        ask: impl Fn(&str) -> Result<Vec<String>, String>,
    ) -> (Vec<String>, Vec<String>) {
        let (mut uses, mut new) = (Vec::new(), Vec::new());
        for version in versions {
            let told = self.0.entry(version.clone()).or_default();
            if told.until.is_none_or(|until| until <= Instant::now()) {
                let (kept, lines) = match ask(version) {
                    Ok(lines) => (USERS_KEPT, lines),
                    Err(line) => (UNKNOWN_KEPT, vec![line]),
                };
                new.extend(lines.iter().filter(|line| !told.lines.contains(line)).cloned());
                *told = Told { until: Instant::now().checked_add(kept), lines };
            }
            uses.extend_from_slice(&told.lines);
        }
        (uses, new)
    }
}

impl History {
    /// Reports the result of a version: in the log, as an alarm, and in the history.
    fn tell(&mut self, hash: Hash, names: &[String], checked: &Checked, began: Instant) {
        let shown = names.join(", ");
        if checked.repaired > 0 {
            tracing::warn!(version = shown, places = checked.repaired, "the scrub repaired damage");
        }
        for line in &checked.damage {
            tracing::error!(version = shown, "damaged: {}", printable(line));
        }
        for file in &checked.files {
            tracing::error!(
                version = shown,
                "a file cannot be read because of the damage: {}",
                printable(file)
            );
        }
        for remark in &checked.remarks {
            tracing::error!(version = shown, "{}", verification::not_named(remark));
        }
        let ask = |version: &str| self.runtime.block_on(self.service.users_of(version));
        let (uses, new) = self.users.of(&checked.versions, ask);
        for line in &new {
            tracing::error!(version = shown, "affected by the damage: {}", printable(line));
        }
        let manifest = hash.to_string();
        let found = Findings {
            hash: &manifest,
            names,
            began,
            repaired: checked.repaired,
            damaged_chunks: checked.damaged_chunks,
            damage: &checked.damage,
            files: &checked.files,
            remarks: &checked.remarks,
            uses: &uses,
        };
        self.runtime.block_on(self.service.version_checked(found));
        self.note(hash, names, checked, &uses);
    }

    /// Writes events: for repairs, and for damage when it is found, or found again after it was gone.
    fn note(&mut self, hash: Hash, names: &[String], checked: &Checked, uses: &[String]) {
        let image = names.first().map_or("", |name| name.split_once('@').map_or(name, |(image, _)| image));
        let shown = names.join(", ");
        if checked.repaired > 0 && self.repairs < NOTED_MAX {
            self.repairs = self.repairs.saturating_add(1);
            let detail =
                format!("{shown}: damaged chunks or data objects that were repaired: {}", checked.repaired);
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
        let detail = damage_noted(&format!("{shown}: {first}{}", more_than_first(checked)), uses);
        self.runtime.block_on(self.service.note_damage(image, detail));
    }
}

/// The rest of a report after its first line. Counts chunks, not lines: some lines say why a repair failed, and some
/// chunks have none.
fn more_than_first(checked: &Checked) -> String {
    match (checked.damaged_chunks, checked.damage.len()) {
        (chunks @ 2.., _) => format!("; {chunks} chunks are damaged in total, see the log"),
        (_, 2..) => "; the log says more".to_owned(),
        _ => String::new(),
    }
}

/// The text of an event about damage.
fn damage_noted(damage: &str, uses: &[String]) -> String {
    let mut detail: String = damage.chars().take(NOTED_CHARS_MAX).collect();
    detail.push_str(&touches(uses));
    detail
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
            tracing::warn!(
                "the scrub cannot open a store to repair from, so it only verifies in this round: {e}"
            );
            Vec::new()
        }
    };
    history.users = Users::default();
    let (mut chunks, mut versions) = (0u64, 0u32);
    // Data that versions share is read with the first of them, perhaps long before the last one is verified.
    let (began, checks) = (Instant::now(), VerifyRound::new(scrub.rate));
    let there = everything_readable(&**store)?;
    for (name, e) in &there.unreadable {
        tracing::error!(image = %name, "the scrub cannot verify the versions of an image: {e}");
    }
    let contents = distinct(&there.what);
    let all: HashSet<&str> = contents.iter().flat_map(|(_, names)| names).map(String::as_str).collect();
    let list = |(name, e): &(ImageName, StoreError)| UnreadableList {
        image: name.to_string(),
        why: e.to_string(),
        is_of_later_release: e.kind() == StoreErrorKind::UnknownFormat,
    };
    let unreadable: Vec<UnreadableList> = there.unreadable.iter().map(list).collect();
    history.runtime.block_on(history.service.versions_listed(&all, &unreadable, began));
    for (hash, names) in &contents {
        let shown = names.join(", ");
        let checked = verification::check(&**store, *hash, names, (&checks, &sources), cancel, &mut |_| {});
        // After a failure the other versions are verified anyway.
        let checked = match checked {
            Ok(Some(checked)) => checked,
            _ if cancel.is_cancelled() => return Ok(()),
            // It was removed meanwhile.
            Ok(None) => {
                history.service.versions_removed(names);
                continue;
            }
            Err(e) => {
                tracing::error!(version = shown, "the scrub cannot verify the version: {e}");
                continue;
            }
        };
        chunks = chunks.saturating_add(checked.chunks);
        versions = versions.saturating_add(1);
        history.tell(*hash, names, &checked, began);
    }
    tracing::info!(versions, chunks, "the scrub read all versions once");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_round_asks_once_who_uses_a_version_and_says_it_once() {
        let asked = RefCell::new(Vec::new());
        let ask = |version: &str| {
            asked.borrow_mut().push(version.to_owned());
            match version {
                // The second version has no users, which is an answer too.
                "a@2" => Ok(Vec::new()),
                "a@4" => Err("a@4: cannot tell who uses it".to_owned()),
                _ => Ok(vec![format!("{version}: machine 'lab' runs it")]),
            }
        };
        let mut users = Users::default();
        let [one, two, three] = ["a@1", "a@2", "a@3"].map(str::to_owned);
        let runs = |version: &str| format!("{version}: machine 'lab' runs it");
        let found = users.of(&[one.clone(), two.clone()], ask);
        assert_eq!(found, (vec![runs("a@1")], vec![runs("a@1")]));
        let found = users.of(&[one, two, three], ask);
        assert_eq!(found, (vec![runs("a@1"), runs("a@3")], vec![runs("a@3")]));
        assert_eq!(*asked.borrow(), ["a@1", "a@2", "a@3"]);
        // A failure is not cached as long as an answer.
        let unknown = vec!["a@4: cannot tell who uses it".to_owned()];
        let began = Instant::now();
        assert_eq!(users.of(&["a@4".to_owned()], ask), (unknown.clone(), unknown));
        assert!(users.0["a@4"].until.unwrap() < began + USERS_KEPT);
        // When it is asked again, lines that were reported before are not new.
        users.0.get_mut("a@1").unwrap().until = Some(began);
        assert_eq!(users.of(&["a@1".to_owned()], ask), (vec![runs("a@1")], Vec::new()));
        assert_eq!(asked.borrow().len(), 5);
    }

    #[test]
    fn the_history_counts_chunks_and_no_lines() {
        let found = |damaged_chunks, lines: &[&str]| {
            let damage = lines.iter().map(|&line| line.to_owned()).collect();
            more_than_first(&Checked { damaged_chunks, damage, ..Checked::default() })
        };
        assert_eq!(found(1, &["bytes 0+65536"]), "");
        assert_eq!(found(0, &["the manifest is damaged"]), "");
        // The second line says why the first one was not repaired.
        assert_eq!(found(1, &["bytes 0+65536", "bytes 0+65536: no source has it"]), "; the log says more");
        let many = ["bytes 0+65536", "bytes 65536+65536", "11998 chunks more"];
        assert_eq!(found(12_000, &many), "; 12000 chunks are damaged in total, see the log");
    }

    #[test]
    fn the_history_names_machines_however_long_the_report_is() {
        let uses = ["a@1: channel test points to it", "a@1: machine 'lab' runs it"].map(str::to_owned);
        let touched = "; it affects a@1: machine 'lab' runs it, a@1: channel test points to it";
        assert_eq!(damage_noted("a@1: bytes 0+65536", &uses), format!("a@1: bytes 0+65536{touched}"));
        let long = damage_noted(&"x".repeat(5000), &uses);
        assert_eq!(long, "x".repeat(NOTED_CHARS_MAX) + touched);
        let many: Vec<String> = (0..1000).map(|n| format!("a@1: machine 'm{n}' boots it")).collect();
        let noted = damage_noted("a@1: bytes 0+65536", &many);
        assert!(noted.ends_with("a@1: machine 'm7' boots it and 992 more") && noted.len() < 400, "{noted}");
        assert_eq!(damage_noted("a@1: bytes 0+65536", &[]), "a@1: bytes 0+65536");
    }
}
