//! Damaged versions: each has an alarm, from the check that finds the damage to a later check that finds none.
//!
//! ```text
//!   no alarm --a check finds damage that it cannot repair--> alarm
//!   alarm    --a later check finds none, or has repaired it; or the version is removed--> no alarm
//! ```
//! Only the end of a check changes an alarm. A check that began before the damage was found may have read the same chunks
//! while they were intact, so it ends no alarm unless it repaired something. A check that began before a repair may have
//! read chunks while they were damaged, so it raises no alarm. A version that was removed from the store has no alarm. If
//! its whole image is missing, two checks must find that, because a wrong answer of a server looks the same.
//!
//! Nothing of this is in the database. A [file](crate::alarms) remembers it across restarts of the daemon.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use headwater_api::name::ImageRef;
use headwater_api::{Alarm, VerifyReport};
use serde::{Deserialize, Serialize};

use crate::{Service, uses};

/// The most damaged versions that are remembered; the log has all.
const KNOWN_MAX: usize = 1_000;

/// The most damaged versions with an alarm each; further ones share an alarm.
const ALARMS_MAX: usize = 100;

/// The most repairs that are remembered.
const REPAIRS_MAX: usize = 100;

/// The most users, and the most files, that an alarm names.
const NAMED_MAX: usize = 8;

/// The most characters of a name, and of a description of damage.
const NAMED_CHARS_MAX: usize = 160;

/// The result of checking one version.
#[derive(Clone, Copy, Debug)]
pub struct Findings<'a> {
    /// The hash of the version's manifest.
    pub hash: &'a str,
    /// The version's names, as `IMAGE@NUMBER`: several versions may have the same contents.
    pub names: &'a [String],
    /// When the check began. If several checks share their results, when the first of them began.
    pub began: Instant,
    /// The number of chunks and data objects that were repaired.
    pub repaired: u64,
    /// The number of chunks that remain damaged.
    pub damaged_chunks: u64,
    /// The damage that remains, one line each. Empty: there is none.
    pub damage: &'a [String],
    /// Files that cannot be read because of the damage.
    pub files: &'a [String],
    /// Why more files may be affected.
    pub remarks: &'a [String],
    /// Users of the damaged versions, as [`Service::users_of`] returns them.
    pub uses: &'a [String],
}

impl Findings<'_> {
    /// What is wrong, in words, with who is touched.
    fn message(&self) -> String {
        self.message_to(touches(self.uses))
    }

    /// The same with these words for who is touched.
    fn message_to(&self, touches: String) -> String {
        let what = match (self.damaged_chunks, self.damage.first()) {
            (0, first) => format!("the version is damaged: {}", cut(first.map_or("", String::as_str))),
            (1, _) => "1 chunk of the version is damaged".to_owned(),
            (chunks, _) => format!("{chunks} chunks of the version are damaged"),
        };
        let files = named("files that cannot be read because of that", self.files);
        let remarks = named("more files may be affected", self.remarks);
        format!("{what}{touches}{files}{remarks}")
    }

    fn alarm(&self, name: &str, since_ms: u64) -> Alarm {
        let advice = format!(
            "'headwater image verify {name} --repair-from STORE' repairs it from a store or server with an intact copy"
        );
        Alarm { subject: format!("image {name}"), since_ms, message: self.message(), advice }
    }
}

/// The users of damaged versions, to append to a description of the damage: `; it affects ..`, machines first, cut to the
/// length of a line. Empty if there are none.
pub fn touches(uses: &[String]) -> String {
    let is_machine = |how: &&str| how.contains(": machine '");
    let (machines, others): (Vec<&str>, Vec<&str>) = uses.iter().map(String::as_str).partition(is_machine);
    match uses.is_empty() {
        true => String::new(),
        false => format!("; it affects {}", brief(&[machines, others].concat())),
    }
}

/// The first of these texts, after a description of what they are. Empty if there are none.
fn named(what: &str, texts: &[String]) -> String {
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    match texts.is_empty() {
        true => String::new(),
        false => format!("; {what}: {}", brief(&texts)),
    }
}

/// The first of these texts, and the number of others.
fn brief(what: &[&str]) -> String {
    let named: Vec<String> = what.iter().take(NAMED_MAX).map(|text| cut(text)).collect();
    let named = named.join(", ");
    match what.len().saturating_sub(NAMED_MAX) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// Cuts and escapes a name, because file names may contain anything, even text that looks like another line of the log.
fn cut(text: &str) -> String {
    text.chars().take(NAMED_CHARS_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// An image whose version list cannot be read.
#[derive(Clone, Debug)]
pub struct UnreadableList {
    /// The image.
    pub image: String,
    /// Why it cannot be read.
    pub why: String,
    /// Whether a later release wrote it, so that it is not damaged.
    pub is_of_later_release: bool,
}

/// A damaged version, or a damaged version list.
#[derive(Debug)]
struct KnownDamage {
    /// The hash of the version's manifest; `None`: the version list of an image.
    hash: Option<String>,
    /// The number of damaged chunks.
    chunks: u64,
    /// When a check last found the damage. Not the time of day, which may be set back.
    seen: Instant,
    /// The image was missing at the last listing.
    was_missed: bool,
    alarm: Alarm,
    /// The message of the alarm for callers who may not see all machines and images: without who is touched.
    to_scoped: String,
}

/// What is known to be damaged, for a later daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedDamage {
    name: String,
    hash: Option<String>,
    chunks: u64,
    alarm: Alarm,
    /// The message of the alarm for callers with scopes.
    to_scoped: String,
}

/// The numbers of damaged versions and chunks, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DamageFigures {
    pub(crate) alarms: u64,
    pub(crate) versions: u64,
    pub(crate) chunks: u64,
}

/// All known damage: by `IMAGE@NUMBER`, or by `IMAGE` for a version list.
#[derive(Debug, Default)]
pub(crate) struct Damage {
    known: Mutex<BTreeMap<String, KnownDamage>>,
    /// The latest complete repairs: hashes of manifests, and when.
    repairs: Mutex<VecDeque<(String, Instant)>>,
}

impl Damage {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, KnownDamage>> {
        // No statement leaves the value inconsistent, so a poisoned lock is harmless.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn repairs(&self) -> MutexGuard<'_, VecDeque<(String, Instant)>> {
        self.repairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of it, for a later daemon.
    pub(crate) fn saved(&self) -> Vec<SavedDamage> {
        let saved = |(name, known): (&String, &KnownDamage)| SavedDamage {
            name: name.clone(),
            hash: known.hash.clone(),
            chunks: known.chunks,
            alarm: known.alarm.clone(),
            to_scoped: known.to_scoped.clone(),
        };
        self.lock().iter().map(saved).collect()
    }

    /// Takes up what an earlier daemon knew: any check from now on may end it.
    pub(crate) fn recall(&self, saved: Vec<SavedDamage>) {
        let now = Instant::now();
        for SavedDamage { name, hash, chunks, alarm, to_scoped } in saved {
            self.put(&name, KnownDamage { hash, chunks, seen: now, was_missed: false, alarm, to_scoped });
        }
    }

    /// An alarm each, but for the many that share the last one.
    pub(crate) fn alarms(&self) -> Vec<Alarm> {
        self.alarms_as(|known| known.alarm.clone())
    }

    /// The same for callers with scopes, to whom no alarm names machines, catalogs and images of others.
    pub(crate) fn alarms_to_scoped(&self) -> Vec<Alarm> {
        self.alarms_as(|known| Alarm { message: known.to_scoped.clone(), ..known.alarm.clone() })
    }

    fn alarms_as(&self, alarm: impl Fn(&KnownDamage) -> Alarm) -> Vec<Alarm> {
        let known = self.lock();
        let mut alarms: Vec<Alarm> = known.values().take(ALARMS_MAX).map(alarm).collect();
        let more = || known.values().skip(ALARMS_MAX);
        if let Some(since_ms) = more().map(|known| known.alarm.since_ms).min() {
            alarms.push(Alarm {
                subject: "images".to_owned(),
                since_ms,
                message: format!("{} more versions are damaged", more().count()),
                advice: "the log names them; with --repair-from, 'image verify' repairs one of them and 'serve --scrub' all"
                    .to_owned(),
            });
        }
        alarms
    }

    pub(crate) fn figures(&self) -> DamageFigures {
        let known = self.lock();
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        DamageFigures {
            alarms: count(known.len().min(ALARMS_MAX.saturating_add(1))),
            versions: count(known.len()),
            chunks: known.values().fold(0, |sum, known| sum.saturating_add(known.chunks)),
        }
    }

    /// Ends the alarms of versions that were removed from the store.
    pub(crate) fn removed(&self, names: &[String]) {
        self.end(|name, _| names.contains(name), "it was removed");
    }

    /// Updates the alarms after a check.
    fn checked(&self, found: &Findings<'_>, now_ms: u64, now: Instant) {
        if found.damage.is_empty() {
            if found.repaired > 0 {
                let mut repairs = self.repairs();
                repairs.truncate(REPAIRS_MAX.saturating_sub(1));
                repairs.push_front((found.hash.to_owned(), now));
            }
            let is_over = |name: &String, known: &mut KnownDamage| {
                let is_it = known.hash.as_deref() == Some(found.hash) || found.names.contains(name);
                is_it && (found.repaired > 0 || known.seen <= found.began)
            };
            return self.end(is_over, "it was read and is intact");
        }
        if self.repairs().iter().any(|(hash, at)| hash == found.hash && *at > found.began) {
            return;
        }
        for name in found.names {
            let hash = Some(found.hash.to_owned());
            let (chunks, alarm) = (found.damaged_chunks, found.alarm(name, now_ms));
            let to_scoped = found.message_to(String::new());
            self.put(name, KnownDamage { hash, chunks, seen: now, was_missed: false, alarm, to_scoped });
        }
    }

    /// Updates the alarms after a listing: the existing versions, and images whose version lists cannot be read.
    fn listed(&self, there: &HashSet<&str>, unreadable: &[UnreadableList], at: Instant) {
        let is_unreadable = |image: &str| unreadable.iter().any(|list| list.image == image);
        let images: HashSet<&str> = there.iter().filter_map(|name| Some(name.split_once('@')?.0)).collect();
        let is_over = |name: &String, known: &mut KnownDamage| match name.split_once('@') {
            // A version that was made and found damaged after the listing began is not in it.
            Some((image, _)) if there.contains(name.as_str()) || known.seen > at || is_unreadable(image) => {
                known.was_missed = false;
                false
            }
            Some((image, _)) => images.contains(image) || std::mem::replace(&mut known.was_missed, true),
            None => !is_unreadable(name),
        };
        self.end(is_over, "it was removed or repaired");
    }

    /// Raises the alarm of a damaged version list.
    fn list_is_damaged(&self, list: &UnreadableList, uses: &[String], (now_ms, now): (u64, Instant)) {
        let UnreadableList { image, why, is_of_later_release } = list;
        let advice = if *is_of_later_release {
            "use the release that wrote it, or a later one"
        } else {
            "first check whether another store has the image, and keep the damaged list until you are certain, because the \
             data of an image without a list is deleted; docs/stores.md says how to copy the image from the other store"
        };
        let to_scoped = format!("its list of versions cannot be read: {}", cut(why));
        let alarm = Alarm {
            subject: format!("image {image}"),
            since_ms: now_ms,
            message: format!("{to_scoped}{}", touches(uses)),
            advice: advice.to_owned(),
        };
        self.put(
            image,
            KnownDamage { hash: None, chunks: 0, seen: now, was_missed: false, alarm, to_scoped },
        );
    }

    /// Raises an alarm, or updates an existing one.
    fn put(&self, name: &str, mut new: KnownDamage) {
        let text = new.alarm.to_string();
        let (is_new, has_room) = {
            let mut known = self.lock();
            let earlier = known.get(name).map(|known| known.alarm.since_ms);
            let has_room = earlier.is_some() || known.len() < KNOWN_MAX;
            new.alarm.since_ms = earlier.unwrap_or(new.alarm.since_ms);
            if has_room {
                known.insert(name.to_owned(), new);
            }
            (earlier.is_none(), has_room)
        };
        if !has_room {
            tracing::error!(
                image = name,
                "damaged, but without an alarm, because {KNOWN_MAX} other versions are damaged: {text}"
            );
        } else if is_new {
            tracing::warn!(image = name, "alarm: {text}");
        }
    }

    /// Ends alarms.
    fn end(&self, mut is_over: impl FnMut(&String, &mut KnownDamage) -> bool, why: &str) {
        let mut ended = Vec::new();
        self.lock().retain(|name, known| {
            let over = is_over(name, known);
            if over {
                ended.push(name.clone());
            }
            !over
        });
        for name in ended {
            tracing::info!(image = name, "the alarm is over: {why}");
        }
    }
}

impl Service {
    /// Updates the alarms at the end of the check of a version. The alarm of a damaged version stays until a later check
    /// finds no damage, or the version is removed.
    pub async fn version_checked(&self, found: Findings<'_>) {
        self.damage().checked(&found, self.now_ms(), Instant::now());
        if found.damage.is_empty() {
            return;
        }
        // If the version was removed during the check, there was no alarm to end then. A removal from now on finds the
        // alarm.
        for name in found.names {
            if self.is_gone(name, found.hash).await {
                self.damage().removed(std::slice::from_ref(name));
            }
        }
    }

    /// Like [`Service::version_checked`], after a user had a version verified.
    pub(crate) async fn version_verified(&self, report: &VerifyReport, began: Instant) {
        let mut names = vec![format!("{}@{}", report.version.image, report.version.number)];
        // Other versions may have the same contents.
        for name in &report.versions {
            if !names.contains(name) && !self.is_gone(name, &report.version.hash).await {
                names.push(name.clone());
            }
        }
        let found = Findings {
            hash: &report.version.hash,
            names: &names,
            began,
            repaired: report.repaired,
            damaged_chunks: report.damaged_chunks,
            damage: &report.damage,
            files: &report.files,
            remarks: &report.remarks,
            uses: &report.uses,
        };
        self.version_checked(found).await;
    }

    /// Ends the alarms of versions that were removed.
    pub fn versions_removed(&self, names: &[String]) {
        self.damage().removed(names);
    }

    /// Updates the alarms after a listing of the store: the versions (`IMAGE@NUMBER`) that it had at a moment, and the
    /// images whose version lists cannot be read.
    pub async fn versions_listed(&self, there: &HashSet<&str>, unreadable: &[UnreadableList], at: Instant) {
        self.damage().listed(there, unreadable, at);
        for list in unreadable {
            let uses = self.users_of_image(&list.image).await;
            self.damage().list_is_damaged(list, &uses, (self.now_ms(), Instant::now()));
        }
    }

    /// Whether a version does not exist any more. If the store fails, the answer is no.
    async fn is_gone(&self, name: &str, hash: &str) -> bool {
        let Ok(reference) = ImageRef::parse(name) else { return false };
        let found = uses::resolve(self, &reference).await;
        found.is_ok_and(|found| found.is_none_or(|version| version.hash != hash))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The instant at so many seconds of a test's clock, which began at `start`.
    fn at(start: Instant, s: u64) -> Instant {
        start + Duration::from_secs(s)
    }

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    /// Checks of versions, and the alarms after them.
    struct Checks {
        damage: Damage,
        start: Instant,
    }

    impl Checks {
        fn new() -> Self {
            Self { damage: Damage::default(), start: Instant::now() }
        }

        /// Ends a check of a version with these names, that found and repaired so many chunks.
        fn end(&self, hash: &str, names: &[&str], chunks: u64, repaired: u64, (began, ended): (u64, u64)) {
            let names = texts(names);
            let damage = if chunks > 0 { texts(&["bytes 0+65536 of the image"]) } else { Vec::new() };
            let found = Findings {
                hash,
                names: &names,
                began: at(self.start, began),
                repaired,
                damaged_chunks: chunks,
                damage: &damage,
                files: &[],
                remarks: &[],
                uses: &[],
            };
            self.damage.checked(&found, ended * 1000, at(self.start, ended));
        }

        fn alarms(&self) -> Vec<String> {
            let alarms = self.damage.alarms().into_iter();
            alarms.map(|it| format!("{} since {}: {}", it.subject, it.since_ms, it.message)).collect()
        }

        fn subjects(&self) -> Vec<String> {
            self.damage.alarms().into_iter().map(|alarm| alarm.subject).collect()
        }
    }

    #[test]
    fn damage_is_an_alarm_until_a_later_check_finds_the_version_whole() {
        let checks = Checks::new();
        checks.end("aa", &["a@1"], 3, 0, (1, 5));
        assert_eq!(checks.alarms(), ["image a@1 since 5000: 3 chunks of the version are damaged"]);
        assert_eq!(checks.damage.figures(), DamageFigures { alarms: 1, versions: 1, chunks: 3 });
        // Found again: the alarm keeps its first time, and describes the present damage.
        checks.end("aa", &["a@1"], 1, 0, (6, 9));
        assert_eq!(checks.alarms(), ["image a@1 since 5000: 1 chunk of the version is damaged"]);
        // A check that may have read the chunks while they were intact, and the check of another version.
        checks.end("aa", &["a@1"], 0, 0, (8, 10));
        checks.end("bb", &["b@1"], 0, 0, (10, 11));
        assert_eq!(checks.subjects(), ["image a@1"]);
        checks.end("aa", &["a@1"], 0, 0, (10, 12));
        assert!(checks.alarms().is_empty());
        assert_eq!(checks.damage.figures(), DamageFigures::default());
    }

    #[test]
    fn a_repair_ends_an_alarm_whenever_its_check_began() {
        let checks = Checks::new();
        checks.end("aa", &["a@1"], 3, 0, (2, 5));
        // Some damage was not repaired.
        checks.end("aa", &["a@1"], 2, 1, (1, 6));
        assert_eq!(checks.damage.figures().chunks, 2);
        checks.end("aa", &["a@1"], 0, 2, (1, 7));
        assert!(checks.alarms().is_empty());
        // A check from before the repair raises no alarm, one from after it does.
        checks.end("aa", &["a@1"], 1, 0, (3, 8));
        assert!(checks.alarms().is_empty());
        checks.end("aa", &["a@1"], 1, 0, (8, 9));
        assert_eq!(checks.subjects(), ["image a@1"]);
    }

    #[test]
    fn versions_with_the_same_contents_are_damaged_and_whole_together() {
        let checks = Checks::new();
        checks.end("aa", &["a@1", "b@7"], 2, 0, (0, 1));
        assert_eq!(checks.damage.figures(), DamageFigures { alarms: 2, versions: 2, chunks: 4 });
        // One of the names is checked.
        checks.end("aa", &["b@7"], 0, 0, (2, 3));
        assert!(checks.alarms().is_empty());
    }

    #[test]
    fn what_is_removed_has_no_alarm() {
        let checks = Checks::new();
        for (hash, name, ended) in
            [("aa", "a@1", 1), ("bb", "a@2", 1), ("cc", "lost@1", 1), ("dd", "new@1", 9)]
        {
            checks.end(hash, &[name], 1, 0, (0, ended));
        }
        let (damage, start) = (&checks.damage, checks.start);
        damage.removed(&texts(&["a@1", "z@1"]));
        assert_eq!(checks.subjects(), ["image a@2", "image lost@1", "image new@1"]);
        // The versions of an image with an unreadable list are unknown; the last version was made after the listing.
        let list = UnreadableList {
            image: "lost".to_owned(),
            why: "it is cut".to_owned(),
            is_of_later_release: false,
        };
        let unreadable = [list.clone()];
        damage.listed(&HashSet::from(["b@1"]), &unreadable, at(start, 5));
        let uses = texts(&["lost: machine 'lab' boots it"]);
        damage.list_is_damaged(&list, &uses, (6, at(start, 6)));
        // A missing image is looked for once more.
        assert_eq!(checks.subjects(), ["image a@2", "image lost", "image lost@1", "image new@1"]);
        damage.listed(&HashSet::from(["b@1"]), &unreadable, at(start, 5));
        assert_eq!(checks.subjects(), ["image lost", "image lost@1", "image new@1"]);
        let says = "its list of versions cannot be read: it is cut; it affects lost: machine 'lab' boots it";
        assert_eq!(checks.alarms().first(), Some(&format!("image lost since 6: {says}")));
        damage.listed(&HashSet::from(["lost@1", "new@1"]), &[], at(start, 10));
        assert_eq!(checks.subjects(), ["image lost@1", "image new@1"]);
        // Another version has the name now, and is intact.
        checks.end("ee", &["lost@1"], 0, 0, (11, 12));
        assert_eq!(checks.subjects(), ["image new@1"]);
    }

    #[test]
    fn an_alarm_names_machines_before_others_and_no_more_than_fit() {
        let mut uses = texts(&["a@1: channel production points to it"]);
        uses.extend((0..20).map(|n| format!("a@1: machine 'm{n}' boots it")));
        let files = texts(&["partition 0: /etc/large.conf", "x".repeat(5000).as_str()]);
        let found = Findings {
            hash: "aa",
            names: &[],
            began: Instant::now(),
            repaired: 0,
            damaged_chunks: 0,
            damage: &texts(&["the manifest aa is damaged"]),
            files: &files,
            remarks: &[],
            uses: &uses,
        };
        let message = found.message();
        let (start, rest) = message.split_once("; it affects a@1: machine 'm0' boots it, ").unwrap();
        assert_eq!(start, "the version is damaged: the manifest aa is damaged");
        let (users, files) = rest.split_once("; files that cannot be read because of that: ").unwrap();
        assert!(users.ends_with("a@1: machine 'm7' boots it and 13 more"), "{message}");
        assert!(files.starts_with("partition 0: /etc/large.conf, xxx") && files.len() < 200, "{message}");
        // A part that could not be examined is not a file.
        let remarks = texts(&["partition 1 is too damaged to be looked into"]);
        let none = Findings { damaged_chunks: 2, files: &[], remarks: &remarks, uses: &[], ..found };
        assert_eq!(
            none.message(),
            "2 chunks of the version are damaged; more files may be affected: partition 1 is too damaged to be looked into"
        );
        assert!(found.alarm("a@1", 0).advice.contains("image verify a@1 --repair-from"));
        assert_eq!(touches(&[]), "");
    }

    #[test]
    fn what_is_known_and_shown_has_limits() {
        let checks = Checks::new();
        for n in 0..=1_000 {
            let (hash, name) = (format!("{n:x}"), format!("a@{n:04}"));
            checks.end(&hash, &[name.as_str()], 1, 0, (0, n));
        }
        let figures = DamageFigures { alarms: 101, versions: 1_000, chunks: 1_000 };
        assert_eq!((checks.damage.figures(), checks.alarms().len()), (figures, 101));
        let last = checks.alarms().pop();
        assert_eq!(last.as_deref(), Some("images since 100000: 900 more versions are damaged"));
    }
}
