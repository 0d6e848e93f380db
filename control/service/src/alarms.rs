//! Alarms that are sent by webhook, mail or journal, and that outlive a restart of the daemon.
//!
//! ```text
//!   alarms now --each LOOK_INTERVAL, if they changed--> DIR/alarms.json: alarms, damage, what each channel sent
//!        |
//!        +--each ROUND_INTERVAL--> channel: what it sent before, compared with now --> one message with the news,
//!                                     |                                                at most NEWS_MAX of each kind
//!                                     fails --> compared and sent again after 1, 2, 4 .. MISSED_ROUNDS_MAX rounds
//! ```
//! A channel is compared with what it sent, and has no queue. So an alarm that begins and ends within a round, or while the channel
//! fails, is in the history only.
//!
//! After a restart, damage of versions is known from the file. If the cause of an alarm of a machine or of the store is seen again within [`GRACE`], the
//! alarm keeps its start time. Otherwise it ends after [`GRACE`], and only then channels report that it is over.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use headwater_api::Alarm;
use headwater_api::name::natural;
use headwater_db::{DbError, Repository};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::Service;
use crate::answer::problem;
use crate::backend::{AlarmChannel, AlarmMessage};
use crate::caller::Caller;
use crate::damage::SavedDamage;

/// The file in the data directory.
const FILE: &str = "alarms.json";

/// How often the alarms are collected.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// How often a channel sends news at most.
const ROUND_INTERVAL: Duration = Duration::from_secs(15);

/// How long a channel may take.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

/// The most rounds between two attempts of a channel that fails: 16 minutes.
const MISSED_ROUNDS_MAX: u32 = 64;

/// How long after a restart the cause of an earlier alarm can be seen again before the alarm ends.
const GRACE: Duration = Duration::from_secs(60);

/// The most alarms in one message that began, and the most that are over. The rest follows a round later.
const NEWS_MAX: usize = 100;

/// The longest file that is read.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// What the file remembers.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Saved {
    /// Alarms when it was written.
    alarms: Vec<Alarm>,
    /// What is known to be damaged.
    damage: Vec<SavedDamage>,
    /// Alarms that each channel sent and has not reported as over.
    sent: BTreeMap<String, Vec<Alarm>>,
}

/// What a service knows of alarms besides their causes.
#[derive(Debug, Default)]
pub(crate) struct AlarmState {
    /// Alarms of machines and of the store when the last daemon ended, by subject, until their causes are seen
    /// again.
    earlier: Mutex<BTreeMap<String, Alarm>>,
    sent: Mutex<BTreeMap<String, Vec<Alarm>>>,
    /// Held by who writes the file.
    saving: tokio::sync::Mutex<()>,
}

impl AlarmState {
    fn earlier(&self) -> MutexGuard<'_, BTreeMap<String, Alarm>> {
        self.earlier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sent(&self) -> MutexGuard<'_, BTreeMap<String, Vec<Alarm>>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The start time of an alarm that was known before the restart; forgets it. `Some`: the history has its beginning
    /// already.
    pub(crate) fn take_earlier_start(&self, subject: &str) -> Option<u64> {
        self.earlier().remove(subject).map(|alarm| alarm.since_ms)
    }
}

/// How often alarms are collected and sent, and how long earlier alarms are kept.
#[derive(Clone, Copy)]
struct Pace {
    look: Duration,
    round: Duration,
    grace: Duration,
}

/// What a channel that sent `sent` has to send if there are the alarms `now`: alarms that began, and alarms that are over.
fn news(sent: &[Alarm], now: &[Alarm]) -> (Vec<Alarm>, Vec<Alarm>) {
    let without = |all: &[Alarm], others: &[Alarm]| -> Vec<Alarm> {
        let is_new = |alarm: &&Alarm| others.iter().all(|other| other.subject != alarm.subject);
        all.iter().filter(is_new).take(NEWS_MAX).cloned().collect()
    };
    (without(now, sent), without(sent, now))
}

impl Service {
    /// All alarms: of the store, of images, and of machines.
    pub(crate) async fn alarms(&self, repo: &mut dyn Repository) -> Result<Vec<Alarm>, DbError> {
        let of_machines = self.alarms_of_machines(repo).await?;
        let store = self.store_figures_for_alarms().await;
        let of_store = self.store_alarm(&store).or_else(|| self.servers_alarm());
        Ok(of_store.into_iter().chain(self.damage().alarms()).chain(of_machines).collect())
    }

    /// Takes up the alarms of an earlier daemon, as far as a file has them.
    pub(crate) async fn recall_alarms(&self) {
        let path = self.data_dir().join(FILE);
        let named = path.clone();
        let read = tokio::task::spawn_blocking(move || load(&path)).await;
        let saved = match read {
            Ok(Ok(saved)) => saved,
            Ok(Err(error)) => {
                tracing::warn!(
                    "the alarms of the time before the restart are unknown: cannot read {}: {error}",
                    named.display()
                );
                return;
            }
            Err(_) => return,
        };
        self.damage().recall(saved.damage);
        let is_kept = |alarm: &Alarm| alarm.subject.starts_with("machine ") || alarm.subject == "store";
        let earlier = saved.alarms.into_iter().filter(is_kept);
        *self.alarm_state().earlier() = earlier.map(|alarm| (alarm.subject.clone(), alarm)).collect();
        *self.alarm_state().sent() = saved.sent;
    }

    /// Sends alarms by these channels and keeps the alarms in a file. Never returns.
    pub async fn keep_alarms(&self, channels: Vec<Arc<dyn AlarmChannel>>) {
        let pace = Pace { look: LOOK_INTERVAL, round: ROUND_INTERVAL, grace: GRACE };
        self.keep_alarms_at(channels, pace).await;
    }

    async fn keep_alarms_at(&self, channels: Vec<Arc<dyn AlarmChannel>>, pace: Pace) {
        // A channel that was switched off and on again gets all present alarms.
        self.alarm_state().sent().retain(|name, _| channels.iter().any(|channel| channel.name() == name));
        let (sender, receiver) = watch::channel(None);
        let sending = channels.into_iter().map(|channel| self.keep_sending(channel, receiver.clone(), pace));
        tokio::join!(self.keep_looking(&sender, pace), join_all(sending));
    }

    async fn keep_looking(&self, alarms: &watch::Sender<Option<Vec<Alarm>>>, pace: Pace) {
        let began = Instant::now();
        let mut tick = tokio::time::interval(pace.look);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut saved: Option<Vec<(String, u64)>> = None;
        loop {
            tick.tick().await;
            if began.elapsed() >= pace.grace {
                self.end_earlier_alarms();
            }
            // Copied first, because `self.alarms()` removes from them the alarms whose causes it sees again.
            let earlier: Vec<Alarm> = self.alarm_state().earlier().values().cloned().collect();
            let found = match self.db().read().await {
                Ok(mut repo) => self.alarms(&mut *repo).await,
                Err(error) => Err(error),
            };
            // Channels and file wait for a database that is away.
            let Ok(mut now) = found else { continue };
            self.alarm_state()
                .earlier()
                .retain(|subject, _| now.iter().all(|alarm| alarm.subject != *subject));
            now.extend(earlier);
            now.sort_by(|a, b| natural(&a.subject, &b.subject));
            now.dedup_by(|a, b| a.subject == b.subject);
            let known: Vec<(String, u64)> =
                now.iter().map(|alarm| (alarm.subject.clone(), alarm.since_ms)).collect();
            alarms.send_replace(Some(now.clone()));
            if saved.as_ref() != Some(&known) {
                self.save_alarms(now).await;
                saved = Some(known);
            }
        }
    }

    /// Ends the alarms of an earlier daemon whose causes were not seen again.
    fn end_earlier_alarms(&self) {
        let earlier = std::mem::take(&mut *self.alarm_state().earlier());
        for subject in earlier.into_keys().filter(|subject| subject.starts_with("machine ")) {
            let text = "its cause was not seen again after the daemon started";
            tracing::info!(subject, "the alarm is over: {text}");
            self.pending_events().add(self.event(&Caller::daemon(), subject, "alarm over", text));
        }
    }

    async fn keep_sending(
        &self,
        channel: Arc<dyn AlarmChannel>,
        alarms: watch::Receiver<Option<Vec<Alarm>>>,
        pace: Pace,
    ) {
        let name = channel.name();
        let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + pace.round, pace.round);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut failures, mut rounds_to_skip) = (0_u32, 0_u32);
        loop {
            tick.tick().await;
            if rounds_to_skip > 0 {
                rounds_to_skip -= 1;
                continue;
            }
            let Some(now) = alarms.borrow().clone() else { continue };
            let sent = self.alarm_state().sent().get(name).cloned().unwrap_or_default();
            let (began, over) = news(&sent, &now);
            if began.is_empty() && over.is_empty() {
                continue;
            }
            let news = AlarmMessage {
                host: self.host_parts().name.clone(),
                at_ms: self.now_ms(),
                began,
                over,
                standing: now.len(),
            };
            let failed = match tokio::time::timeout(SEND_TIMEOUT, channel.send(&news)).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(problem(&error).to_string()),
                Err(_) => Some(format!("no answer within {} s", SEND_TIMEOUT.as_secs())),
            };
            if let Some(why) = failed {
                rounds_to_skip = (1_u32 << failures.min(6)).min(MISSED_ROUNDS_MAX) - 1;
                failures = failures.saturating_add(1);
                tracing::error!(channel = name, failures, "cannot send alarms, will try again: {why}");
                continue;
            }
            tracing::info!(channel = name, "sent: {}", news.title());
            failures = 0;
            {
                let mut all = self.alarm_state().sent();
                let sent = all.entry(name.to_owned()).or_default();
                sent.retain(|alarm| news.over.iter().all(|over| over.subject != alarm.subject));
                sent.extend(news.began);
            }
            // What is known by now: the send may have lasted a minute.
            let now = alarms.borrow().clone().unwrap_or(now);
            self.save_alarms(now).await;
        }
    }

    /// Writes the file. If that fails, a restart forgets alarms, which the log says.
    async fn save_alarms(&self, alarms: Vec<Alarm>) {
        let _turn = self.alarm_state().saving.lock().await;
        let (damage, sent) = (self.damage().saved(), self.alarm_state().sent().clone());
        let path = self.data_dir().join(FILE);
        let named = path.clone();
        let written = tokio::task::spawn_blocking(move || store(&path, &Saved { alarms, damage, sent }));
        if let Ok(Err(error)) = written.await {
            tracing::warn!(
                "cannot write {}, so a restart of the daemon would forget alarms: {error}",
                named.display()
            );
        }
    }
}

fn load(path: &Path) -> std::io::Result<Saved> {
    match std::fs::metadata(path) {
        Ok(found) if found.len() > FILE_BYTES_MAX => {
            return Err(std::io::Error::other(format!("it has more than {} MiB", FILE_BYTES_MAX >> 20)));
        }
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Saved::default()),
        Err(error) => return Err(error),
    }
    Ok(serde_json::from_slice(&std::fs::read(path)?)?)
}

fn store(path: &Path, saved: &Saved) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(saved)?;
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    std::fs::write(&new, bytes)?;
    std::fs::File::open(&new)?.sync_all()?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use headwater_api::ProblemKind;
    use tokio::task::JoinHandle;

    use super::*;
    use crate::backend::BackendError;
    use crate::lifecycle::tests::{Fixture, until};

    const FAST: Pace = Pace {
        look: Duration::from_millis(5),
        round: Duration::from_millis(20),
        grace: Duration::from_millis(200),
    };

    /// A channel that keeps what it is sent, after it failed so many times.
    #[derive(Default)]
    struct Kept {
        news: Mutex<Vec<(Vec<String>, Vec<String>)>>,
        failures: Mutex<u32>,
    }

    #[async_trait]
    impl AlarmChannel for Kept {
        fn name(&self) -> &'static str {
            "kept"
        }

        async fn send(&self, news: &AlarmMessage) -> Result<(), BackendError> {
            let mut failures = self.failures.lock().unwrap();
            if *failures > 0 {
                *failures -= 1;
                return Err(BackendError::new(ProblemKind::Failed, "nobody listens"));
            }
            let subjects = |all: &[Alarm]| all.iter().map(|alarm| alarm.subject.clone()).collect();
            self.news.lock().unwrap().push((subjects(&news.began), subjects(&news.over)));
            Ok(())
        }
    }

    impl Kept {
        fn sent(&self) -> Vec<(Vec<String>, Vec<String>)> {
            self.news.lock().unwrap().clone()
        }
    }

    fn begin(service: &Service, channel: &Arc<Kept>) -> JoinHandle<()> {
        let (service, channel) = (service.clone(), Arc::clone(channel));
        tokio::spawn(async move { service.keep_alarms_at(vec![channel], FAST).await })
    }

    fn alarm(subject: &str) -> Alarm {
        let (message, advice) = ("full".to_owned(), "more".to_owned());
        Alarm { subject: subject.to_owned(), since_ms: 7, message, advice }
    }

    #[test]
    fn news_are_what_changed_since_the_last_message() {
        let [a, b, c] = ["machine a", "machine b", "machine c"].map(alarm);
        let changed = Alarm { message: "fuller".to_owned(), ..a.clone() };
        let (began, over) = news(&[a, b.clone()], &[changed, c.clone()]);
        assert_eq!((began, over), (vec![c], vec![b]));
        let many: Vec<Alarm> = (0..NEWS_MAX + 5).map(|n| alarm(&format!("machine {n}"))).collect();
        let (first, _) = news(&[], &many);
        let (second, _) = news(&first, &many);
        assert_eq!((first.len(), second.len()), (NEWS_MAX, 5));
    }

    #[test]
    fn a_title_has_the_subject_or_the_number() {
        let of = |began: usize, over: usize| {
            let some = |count: usize| (0..count).map(|n| alarm(&format!("machine {n}"))).collect();
            let news = AlarmMessage { host: "lab1".to_owned(), ..AlarmMessage::default() };
            AlarmMessage { began: some(began), over: some(over), ..news }.title()
        };
        assert_eq!(of(1, 0), "lab1: machine 0 has an alarm");
        assert_eq!(of(3, 1), "lab1: 3 alarms began, machine 0 is well again");
        assert_eq!(of(0, 2), "lab1: 2 alarms are over");
    }

    #[tokio::test]
    async fn alarms_are_sent_once_also_across_failures_and_restarts() {
        let fixture = Fixture::new().await;
        let damaged = vec!["image image@1".to_owned()];
        fixture.damage_of_first_version().await;
        let channel = Arc::new(Kept::default());
        *channel.failures.lock().unwrap() = 2;
        let keeping = begin(&fixture.service, &channel);
        until("it is sent", async || !channel.sent().is_empty()).await;
        let path = fixture.service.data_dir().join(FILE);
        until("that is saved", async || load(&path).is_ok_and(|saved| saved.sent.contains_key("kept"))).await;
        keeping.abort();
        let _ = keeping.await;
        assert_eq!(channel.sent(), [(damaged.clone(), Vec::new())]);

        // Another daemon knows of the damage, and that it was sent.
        let later = fixture.another_service();
        later.recall_alarms().await;
        let subjects: Vec<String> = later.damage().alarms().into_iter().map(|it| it.subject).collect();
        assert_eq!(subjects, damaged);
        let keeping = begin(&later, &channel);
        later.damage().removed(&["image@1".to_owned()]);
        until("its end is sent", async || channel.sent().len() > 1).await;
        keeping.abort();
        assert_eq!(channel.sent()[1..], [(Vec::new(), damaged)]);
    }

    #[tokio::test]
    async fn an_alarm_of_a_machine_goes_on_after_a_restart_or_is_over() {
        let fixture = Fixture::new().await;
        let path = fixture.service.data_dir().join(FILE);
        let (lab, gone) = (alarm("machine lab"), alarm("machine gone"));
        let sent = BTreeMap::from([("kept".to_owned(), vec![lab.clone(), gone.clone()])]);
        store(&path, &Saved { alarms: vec![lab, gone], damage: Vec::new(), sent }).unwrap();
        fixture.service.recall_alarms().await;
        assert_eq!(fixture.service.alarm_state().take_earlier_start("machine lab"), Some(7));
        assert_eq!(fixture.service.alarm_state().take_earlier_start("machine other"), None);
        let channel = Arc::new(Kept::default());
        let keeping = begin(&fixture.service, &channel);
        let over = || -> Vec<String> { channel.sent().into_iter().flat_map(|(_, over)| over).collect() };
        until("both are sent to be over", async || over().len() == 2).await;
        keeping.abort();
        assert_eq!(over(), ["machine lab", "machine gone"]);
        let events = fixture.db_events().await;
        let ended: Vec<&str> = events
            .iter()
            .filter(|event| event.action == "alarm over")
            .map(|event| event.subject.as_str())
            .collect();
        assert_eq!(ended, ["machine gone"]);
        std::fs::write(&path, "no JSON").unwrap();
        assert!(load(&path).is_err());
        fixture.service.recall_alarms().await;
    }
}
