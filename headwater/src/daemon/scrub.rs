//! The background scrub: all versions are read again and again at a set rate, and what is damaged is repaired.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_image::{Cancel, VerifyRound};
use headwater_service::{Findings, Service, UnreadableList, touches};
use headwater_store::copy::everything_readable;
use headwater_store::{Hash, ImageName, Store, StoreError, StoreErrorKind};

use crate::show::printable;
use crate::verification::{self, Checked, Scrub, distinct};

/// The pause between two rounds, and after a round that failed, unless another one is given.
const BETWEEN_ROUNDS: Duration = Duration::from_secs(3600);
/// How often it looks whether it is to end while it pauses.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The history has so many damaged versions at most of one run of the daemon, and so many repairs; the log has all.
const NOTED_MAX: usize = 100;
/// How much of a report the history has, in characters. Who is touched follows, which has a limit of its own.
const NOTED_CHARS_MAX: usize = 300;

/// A scrub that goes on until this is dropped.
pub struct Scrubbing {
    cancel: Cancel,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Scrubbing {
    /// Begins.
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
                    tracing::error!("the scrub failed and begins again in {} s: {e:#}", pause.as_secs());
                }
                let mut left = pause;
                while !told.is_cancelled() && !left.is_zero() {
                    std::thread::sleep(LOOK_EVERY.min(left));
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
    /// Of this round.
    users: Users,
}

/// How long an answer holds of who uses a version, since a round may take days; and one that it cannot be told.
const USERS_KEPT: Duration = Duration::from_secs(300);
const UNKNOWN_KEPT: Duration = Duration::from_secs(60);

/// Who uses versions, as was told in this round. Much that is damaged can touch the same versions, and each answer takes a look at
/// all machines and questions to the store. It has no more than the versions of the store.
#[derive(Default)]
struct Users(HashMap<String, Told>);

#[derive(Default)]
struct Told {
    until: Option<Instant>,
    lines: Vec<String>,
}

impl Users {
    /// Who uses these versions; and of that, what was not said last of the same version.
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
    /// Says what came of a version: in the log, by an alarm, and in the history.
    fn tell(&mut self, hash: Hash, names: &[String], checked: &Checked, began: Instant) {
        let shown = names.join(", ");
        if checked.repaired > 0 {
            tracing::warn!(version = shown, places = checked.repaired, "the scrub repaired damage");
        }
        for line in &checked.damage {
            tracing::error!(version = shown, "damaged: {}", printable(line));
        }
        for file in &checked.files {
            tracing::error!(version = shown, "cannot be read because of that: {}", printable(file));
        }
        for remark in &checked.remarks {
            tracing::error!(version = shown, "{}", verification::not_named(remark));
        }
        let ask = |version: &str| self.runtime.block_on(self.service.users_of(version));
        let (uses, new) = self.users.of(&checked.versions, ask);
        for line in &new {
            tracing::error!(version = shown, "touched by the damage: {}", printable(line));
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

    /// Notes what was repaired, and damage when it is found, and again where it comes back after it was gone.
    fn note(&mut self, hash: Hash, names: &[String], checked: &Checked, uses: &[String]) {
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
        let detail = damage_noted(&format!("{shown}: {first}{}", more_than_first(checked)), uses);
        self.runtime.block_on(self.service.note_damage(image, detail));
    }
}

/// What there is beside the first line. Lines do not count: some say why a repair failed, and very many chunks have none.
fn more_than_first(checked: &Checked) -> String {
    match (checked.damaged_chunks, checked.damage.len()) {
        (chunks @ 2.., _) => format!("; {chunks} chunks are damaged in all, see the log"),
        (_, 2..) => "; the log says more".to_owned(),
        _ => String::new(),
    }
}

/// What the history has of damage.
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
            tracing::warn!("the scrub cannot repair in this round: {e}");
            Vec::new()
        }
    };
    history.users = Users::default();
    let (mut chunks, mut versions) = (0u64, 0u32);
    // What versions share is read with the first one of them, and so perhaps long before the last one is checked.
    let (began, checks) = (Instant::now(), VerifyRound::new(scrub.rate));
    let there = everything_readable(&**store)?;
    for (_, e) in &there.unreadable {
        tracing::error!("the scrub: {e}");
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
        // The others are checked all the same where something fails.
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
                // Nobody uses the second one, which is an answer, too.
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
        // What could not be told is not kept as long as an answer is.
        let unknown = vec!["a@4: cannot tell who uses it".to_owned()];
        let began = Instant::now();
        assert_eq!(users.of(&["a@4".to_owned()], ask), (unknown.clone(), unknown));
        assert!(users.0["a@4"].until.unwrap() < began + USERS_KEPT);
        // When it is asked again, what was said already is not new.
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
        // The second one says why the first was not repaired.
        assert_eq!(found(1, &["bytes 0+65536", "bytes 0+65536: no source has it"]), "; the log says more");
        let many = ["bytes 0+65536", "bytes 65536+65536", "11998 chunks more"];
        assert_eq!(found(12_000, &many), "; 12000 chunks are damaged in all, see the log");
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
