//! Versions that are known to be damaged: an alarm each, from the check that finds it to the one that finds it whole.
//!
//! ```text
//!   no alarm --a check finds damage that it cannot repair--> alarm
//!   alarm    --a later check ends and finds all right, or has repaired it; the version is removed--> no alarm
//! ```
//! An alarm stands while a check is under way: only its end changes anything. A check that began before the damage was seen
//! may have read the same chunks while they were right, and so ends no alarm unless it repaired something; one that began before a
//! repair may have read them while they were wrong, and raises none. A version that is not in the store any more has none; where its
//! image is not there as a whole, that must be seen twice, as a server's wrong answer looks like that, too.
//!
//! Nothing of this is in the database. A [file](crate::alarms) remembers it across restarts of the daemon.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use headwater_api::name::ImageRef;
use headwater_api::{Alarm, VerifyReport};
use serde::{Deserialize, Serialize};

use crate::{Service, uses};

/// Most versions that are known to be damaged at a time; the log has all.
const KNOWN_MAX: usize = 1_000;

/// Most of them that have an alarm each; the others share one.
const ALARMS_MAX: usize = 100;

/// Most repairs that are remembered.
const REPAIRS_MAX: usize = 100;

/// Most users of what is damaged that are named, and most files.
const NAMED_MAX: usize = 8;

/// How much of each of them is shown, and of what is wrong, in characters.
const NAMED_CHARS_MAX: usize = 160;

/// What a check found of one version.
#[derive(Clone, Copy, Debug)]
pub struct Findings<'a> {
    /// The hash of its manifest.
    pub hash: &'a str,
    /// Its names, as `IMAGE@NUMBER`: several versions may have the same contents.
    pub names: &'a [String],
    /// When the check began, or the first of the checks that share what they find right.
    pub began: Instant,
    /// Chunks and data objects that were damaged and are right again.
    pub repaired: u64,
    /// Chunks that are damaged still.
    pub damaged_chunks: u64,
    /// What is damaged still, a line each. Empty: all is well.
    pub damage: &'a [String],
    /// Files that cannot be read because of it.
    pub files: &'a [String],
    /// Why there may be more of them.
    pub remarks: &'a [String],
    /// Who uses versions that hold it, as [`Service::users_of`] says it.
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
            (0, first) => format!("it is damaged: {}", cut(first.map_or("", String::as_str))),
            (1, _) => "1 chunk of it is damaged".to_owned(),
            (chunks, _) => format!("{chunks} chunks of it are damaged"),
        };
        let files = told("cannot be read because of that", self.files);
        let remarks = told("files may be touched that are not named", self.remarks);
        format!("{what}{touches}{files}{remarks}")
    }

    fn alarm(&self, name: &str, since_ms: u64) -> Alarm {
        let advice = format!(
            "'headwater image verify {name} --repair-from STORE' repairs it from a store or server that has it"
        );
        Alarm { subject: format!("image {name}"), since_ms, message: self.message(), advice }
    }
}

/// Who is touched by damage, after what is damaged: `; it touches ..`, machines first, and not more than fits a line. Empty where
/// nobody is.
pub fn touches(uses: &[String]) -> String {
    let is_machine = |how: &&str| how.contains(": machine '");
    let (machines, others): (Vec<&str>, Vec<&str>) = uses.iter().map(String::as_str).partition(is_machine);
    match uses.is_empty() {
        true => String::new(),
        false => format!("; it touches {}", brief(&[machines, others].concat())),
    }
}

/// The first of these, after what they are. Empty where there are none.
fn told(what: &str, texts: &[String]) -> String {
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    match texts.is_empty() {
        true => String::new(),
        false => format!("; {what}: {}", brief(&texts)),
    }
}

/// The first of these, and how many more there are.
fn brief(what: &[&str]) -> String {
    let named: Vec<String> = what.iter().take(NAMED_MAX).map(|text| cut(text)).collect();
    let named = named.join(", ");
    match what.len().saturating_sub(NAMED_MAX) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// Names of files may hold anything, also what would look like another line of the log.
fn cut(text: &str) -> String {
    text.chars().take(NAMED_CHARS_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// An image whose list of versions cannot be read.
#[derive(Clone, Debug)]
pub struct UnreadableList {
    /// The image.
    pub image: String,
    /// Why it cannot be read.
    pub why: String,
    /// A later release has written it: it is not damaged.
    pub is_of_later_release: bool,
}

/// A version, or a list of versions, that is damaged.
#[derive(Debug)]
struct KnownDamage {
    /// The hash of the version's manifest; `None`: it is the list of an image.
    hash: Option<String>,
    /// Chunks of it that are damaged.
    chunks: u64,
    /// When a check last found it damaged. No time of day, which may be set back.
    seen: Instant,
    /// The image was not there when it was last looked for.
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
}

/// How much is known to be damaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DamageFigures {
    pub(crate) alarms: u64,
    pub(crate) versions: u64,
    pub(crate) chunks: u64,
}

/// What is known to be damaged: by `IMAGE@NUMBER`, or by `IMAGE` where its list is.
#[derive(Debug, Default)]
pub(crate) struct Damage {
    known: Mutex<BTreeMap<String, KnownDamage>>,
    /// Manifests of versions that were repaired to the end, and when, the last ones.
    repairs: Mutex<VecDeque<(String, Instant)>>,
}

impl Damage {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, KnownDamage>> {
        // It is whole between any two statements.
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
        };
        self.lock().iter().map(saved).collect()
    }

    /// Takes up what an earlier daemon knew: any check from now on may end it.
    pub(crate) fn recall(&self, saved: Vec<SavedDamage>) {
        let now = Instant::now();
        for SavedDamage { name, hash, chunks, alarm } in saved {
            self.put(&name, KnownDamage { hash, chunks, seen: now, was_missed: false, alarm });
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
                message: format!("{} versions more are damaged", more().count()),
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

    /// These are in the store no more.
    pub(crate) fn removed(&self, names: &[String]) {
        self.end(|name, _| names.contains(name), "it was removed");
    }

    /// Takes up what a check found.
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
            return self.end(is_over, "it was read and is whole");
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

    /// Takes up which versions there were at a moment, and for which images that cannot be told.
    fn listed(&self, there: &HashSet<&str>, unreadable: &[UnreadableList], at: Instant) {
        let is_unreadable = |image: &str| unreadable.iter().any(|list| list.image == image);
        let images: HashSet<&str> = there.iter().filter_map(|name| Some(name.split_once('@')?.0)).collect();
        let is_over = |name: &String, known: &mut KnownDamage| match name.split_once('@') {
            // One that was made, and found damaged, since is not there yet.
            Some((image, _)) if there.contains(name.as_str()) || known.seen > at || is_unreadable(image) => {
                known.was_missed = false;
                false
            }
            Some((image, _)) => images.contains(image) || std::mem::replace(&mut known.was_missed, true),
            None => !is_unreadable(name),
        };
        self.end(is_over, "it was removed, or mended");
    }

    /// The list of versions of an image is damaged.
    fn list_is_damaged(&self, list: &UnreadableList, uses: &[String], (now_ms, now): (u64, Instant)) {
        let UnreadableList { image, why, is_of_later_release } = list;
        let advice = if *is_of_later_release {
            "use the release that wrote it, or a later one"
        } else {
            "see first whether another store has the image, and keep the list until that is certain: without it the \
             data of the image is given back; docs/stores.md says how it is brought from there"
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

    /// Raises an alarm, or brings one up to date that has stood since earlier.
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
            tracing::error!(image = name, "damaged, and in no alarm, as {KNOWN_MAX} others are: {text}");
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
    /// Takes up what a check found of a version, at its end: damage is an alarm until a later check finds none, or the version
    /// is removed.
    pub async fn version_checked(&self, found: Findings<'_>) {
        self.damage().checked(&found, self.now_ms(), Instant::now());
        if found.damage.is_empty() {
            return;
        }
        // One that was removed while it was checked had no alarm to be ended then. One that is removed from now on has.
        for name in found.names {
            if self.is_gone(name, found.hash).await {
                self.damage().removed(std::slice::from_ref(name));
            }
        }
    }

    /// The same of a version that somebody had verified.
    pub(crate) async fn version_verified(&self, report: &VerifyReport, began: Instant) {
        let mut names = vec![format!("{}@{}", report.version.image, report.version.number)];
        // Others may have the same contents.
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

    /// Takes up that versions were removed, or are seen not to be there.
    pub fn versions_removed(&self, names: &[String]) {
        self.damage().removed(names);
    }

    /// Takes up which versions, `IMAGE@NUMBER`, the store had at a moment, and the images whose lists of versions cannot be read,
    /// with why not.
    pub async fn versions_listed(&self, there: &HashSet<&str>, unreadable: &[UnreadableList], at: Instant) {
        self.damage().listed(there, unreadable, at);
        for list in unreadable {
            let uses = self.users_of_image(&list.image).await;
            self.damage().list_is_damaged(list, &uses, (self.now_ms(), Instant::now()));
        }
    }

    /// Whether there is no such version any more. A store that cannot tell says nothing.
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

    /// When a test's clock, which began at `start`, says so many seconds.
    fn at(start: Instant, s: u64) -> Instant {
        start + Duration::from_secs(s)
    }

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    /// Checks of versions, and what is known after them.
    struct Checks {
        damage: Damage,
        start: Instant,
    }

    impl Checks {
        fn new() -> Self {
            Self { damage: Damage::default(), start: Instant::now() }
        }

        /// A check of a version, under these names, ends. It finds so many chunks damaged, and has repaired so many.
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
        assert_eq!(checks.alarms(), ["image a@1 since 5000: 3 chunks of it are damaged"]);
        assert_eq!(checks.damage.figures(), DamageFigures { alarms: 1, versions: 1, chunks: 3 });
        // Found again: it stands since it was found first, and says what there is now.
        checks.end("aa", &["a@1"], 1, 0, (6, 9));
        assert_eq!(checks.alarms(), ["image a@1 since 5000: 1 chunk of it is damaged"]);
        // One that may have read all of it while it was right, and one of another version.
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
        // Not all of it was repaired.
        checks.end("aa", &["a@1"], 2, 1, (1, 6));
        assert_eq!(checks.damage.figures().chunks, 2);
        checks.end("aa", &["a@1"], 0, 2, (1, 7));
        assert!(checks.alarms().is_empty());
        // What was read before the repair raises none, what was read after it does.
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
        // One of them is checked by its name.
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
        // Nobody knows what the image has whose list cannot be read; the last one came after the store was asked.
        let list = UnreadableList {
            image: "lost".to_owned(),
            why: "it is cut".to_owned(),
            is_of_later_release: false,
        };
        let unreadable = [list.clone()];
        damage.listed(&HashSet::from(["b@1"]), &unreadable, at(start, 5));
        let uses = texts(&["lost: machine 'lab' boots it"]);
        damage.list_is_damaged(&list, &uses, (6, at(start, 6)));
        // An image that is not there at all is looked for once more.
        assert_eq!(checks.subjects(), ["image a@2", "image lost", "image lost@1", "image new@1"]);
        damage.listed(&HashSet::from(["b@1"]), &unreadable, at(start, 5));
        assert_eq!(checks.subjects(), ["image lost", "image lost@1", "image new@1"]);
        let says = "its list of versions cannot be read: it is cut; it touches lost: machine 'lab' boots it";
        assert_eq!(checks.alarms().first(), Some(&format!("image lost since 6: {says}")));
        damage.listed(&HashSet::from(["lost@1", "new@1"]), &[], at(start, 10));
        assert_eq!(checks.subjects(), ["image lost@1", "image new@1"]);
        // Another one has the name now, and is whole.
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
        let (start, rest) = message.split_once("; it touches a@1: machine 'm0' boots it, ").unwrap();
        assert_eq!(start, "it is damaged: the manifest aa is damaged");
        let (users, files) = rest.split_once("; cannot be read because of that: ").unwrap();
        assert!(users.ends_with("a@1: machine 'm7' boots it and 13 more"), "{message}");
        assert!(files.starts_with("partition 0: /etc/large.conf, xxx") && files.len() < 200, "{message}");
        // What could not be looked into is no file.
        let remarks = texts(&["partition 1 is too damaged to be looked into"]);
        let none = Findings { damaged_chunks: 2, files: &[], remarks: &remarks, uses: &[], ..found };
        assert_eq!(
            none.message(),
            "2 chunks of it are damaged; files may be touched that are not named: partition 1 is too damaged to be looked into"
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
        assert_eq!(last.as_deref(), Some("images since 100000: 900 versions more are damaged"));
    }
}
