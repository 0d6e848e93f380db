//! Caches the last answers of the store for requests that only show them: a remote store may take minutes to answer,
//! which must not delay the rest of a page or list.
//!
//! ```text
//!   view --> the last answer is recent --> that answer
//!        --> else one query runs in a task of its own --> answered within TIMEOUT --> the new answer
//!                                                     --> not yet, or failed -------> the last answer, with its age
//! ```
//! A view waits up to TIMEOUT_CHANGED for the version of a reference if this daemon has no answer yet, or if it has just changed the
//! store: the user who made the change wants to see the result.
//!
//! An [`Answer`] is marked as outdated if this daemon changed the store since; [`StoreFigures`] also if the store does not answer.
//! Operations that decide something do not use the cache. If a remote store cannot be reached, a reference resolves as
//! when its image was last looked up (`StoredImages::resolve` of the program), so that machines start; all other operations
//! fail.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_api::name::ImageRef;
use headwater_api::{Alarm, ImageVersion, ProblemKind};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use crate::Service;
use crate::backend::{BackendError, Listed, ServersGone};

/// How long a view waits for an answer, from the beginning of the query.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The longer wait for an answer that is unknown or that this daemon changed, if the store has answered so far.
const TIMEOUT_CHANGED: Duration = Duration::from_secs(10);

/// The number of images is queried again after this time, or when this daemon changes it.
const IMAGES_MAX_AGE: Duration = Duration::from_secs(10);

/// The same for the store's size. A store may have to list all its files for it.
const BYTES_MAX_AGE: Duration = Duration::from_secs(60);

/// A store counts as not answering if a query has taken this long.
const SILENT_AFTER: Duration = Duration::from_secs(10);

/// The most references that are cached; beyond that the cache is emptied.
const MAX_REFERENCES: usize = 4_096;

/// The most concurrent queries for versions. Each occupies a thread.
const MAX_QUERIES: usize = 8;

/// An answer and its age.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer<T> {
    pub(crate) value: T,
    pub(crate) age: Duration,
    /// Whether the daemon changed its subject since.
    pub(crate) outdated: bool,
}

/// The store does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Silence {
    /// How long ago the first unanswered query began.
    pub(crate) age: Duration,
    /// The error, if there was one.
    pub(crate) why: Option<String>,
}

/// A query and its last answer. Clones share their state.
#[derive(Clone)]
struct StoreView<T>(Arc<Mutex<State<T>>>);

struct State<T> {
    /// The answer, and when its query began.
    last: Option<(T, Instant)>,
    /// When the latest query began; the channel closes when it ends.
    query: Option<(Instant, watch::Receiver<()>)>,
    /// When the daemon itself changed the subject of the answer.
    changed: Option<Instant>,
    /// When the first failed query since the last answer began, and the error of the last one.
    failing: Option<(Instant, String)>,
}

impl<T> State<T> {
    /// How long a view waits at most.
    fn timeout(&self, when_changed: Option<Duration>) -> Duration {
        let is_known = self.last.is_some() && !self.is_outdated();
        when_changed.filter(|_| !is_known && self.failing.is_none()).unwrap_or(TIMEOUT)
    }

    fn is_outdated(&self) -> bool {
        self.last
            .as_ref()
            .is_some_and(|(_, begun_at)| self.changed.is_some_and(|changed| *begun_at <= changed))
    }
}

impl<T> Default for StoreView<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State { last: None, query: None, changed: None, failing: None })))
    }
}

impl<T: Clone + Send + 'static> StoreView<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // No statement leaves the value inconsistent, so a poisoned lock is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the last answer as outdated.
    fn changed(&self) {
        self.lock().changed = Some(Instant::now());
    }

    /// Returns the last answer if it is younger than `max_age`. Otherwise begins a query, unless one runs, before
    /// this returns; the future waits for it. `when_changed`: if there is no answer, or the daemon changed its subject since,
    /// the future waits for this time instead of [`TIMEOUT`], and ignores queries from before the change.
    fn ask<F>(
        self,
        max_age: Duration,
        when_changed: Option<Duration>,
        query: impl FnOnce() -> F,
    ) -> impl Future<Output = Option<Answer<T>>> + Send
    where
        F: Future<Output = Result<T, BackendError>> + Send + 'static,
    {
        let waits_for = (!self.is_young(max_age)).then(|| self.begin(when_changed.is_some(), query));
        async move {
            if let Some((since, mut ended)) = waits_for {
                // Answered or timed out: in both cases return what is known now.
                let timeout = self.lock().timeout(when_changed);
                let _ = tokio::time::timeout_at(since + timeout, ended.changed()).await;
            }
            let state = self.lock();
            let outdated = state.is_outdated();
            state.last.clone().map(|(value, begun_at)| Answer { value, age: begun_at.elapsed(), outdated })
        }
    }

    fn is_young(&self, max_age: Duration) -> bool {
        let state = self.lock();
        let begun_at = state.last.as_ref().map(|(_, begun_at)| *begun_at);
        begun_at.is_some_and(|begun_at| begun_at.elapsed() < max_age && !state.is_outdated())
    }

    /// Whether there was no answer yet, and a query runs.
    fn awaits_first_answer(&self) -> bool {
        let state = self.lock();
        state.last.is_none() && state.query.as_ref().is_some_and(|(_, ended)| ended.has_changed().is_ok())
    }

    /// Whether the store does not answer: the last query failed, or takes too long.
    fn silence(&self) -> Option<Silence> {
        let state = self.lock();
        let begun = state.query.as_ref().filter(|(_, ended)| ended.has_changed().is_ok());
        let begun = begun.map(|(since, _)| *since).filter(|since| since.elapsed() >= SILENT_AFTER);
        match (&state.failing, begun) {
            (Some((since, why)), _) => Some(Silence { age: since.elapsed(), why: Some(why.clone()) }),
            (None, Some(since)) => Some(Silence { age: since.elapsed(), why: None }),
            (None, None) => None,
        }
    }

    fn begin<F>(&self, after_changes: bool, query: impl FnOnce() -> F) -> (Instant, watch::Receiver<()>)
    where
        F: Future<Output = Result<T, BackendError>> + Send + 'static,
    {
        let mut state = self.lock();
        let changed = state.changed.filter(|_| after_changes);
        // The sender is dropped when the query ends in any way.
        if let Some((since, ended)) = state.query.clone()
            && ended.has_changed().is_ok()
            && changed.is_none_or(|changed| since > changed)
        {
            return (since, ended);
        }
        let (ending, ended) = watch::channel(());
        let since = Instant::now();
        state.query = Some((since, ended.clone()));
        let (this, query) = (self.clone(), query());
        tokio::spawn(async move {
            let answer = query.await;
            let mut state = this.lock();
            match answer {
                // A later query was answered first.
                _ if state.last.as_ref().is_some_and(|(_, begun_at)| *begun_at > since) => {}
                Ok(value) => (state.last, state.failing) = (Some((value, since)), None),
                // A failure leaves the last answer: the images of a store that cannot be reached still exist.
                Err(e) if e.kind() == ProblemKind::Failed => {
                    let since = state.failing.take().map_or(since, |(first, _)| first);
                    state.failing = Some((since, e.to_string()));
                }
                // For instance a store that cannot tell: that is an answer too.
                Err(_) => state.failing = None,
            }
            drop(state);
            drop(ending);
        });
        (since, ended)
    }
}

/// The cached answers of the store.
pub(crate) struct StoreViews {
    images: StoreView<u64>,
    bytes: StoreView<u64>,
    /// By reference. `None`: the store has no such version.
    versions: Mutex<HashMap<String, StoreView<Option<ImageVersion>>>>,
    query_permits: Arc<Semaphore>,
}

impl Default for StoreViews {
    fn default() -> Self {
        Self {
            images: StoreView::default(),
            bytes: StoreView::default(),
            versions: Mutex::default(),
            query_permits: Arc::new(Semaphore::new(MAX_QUERIES)),
        }
    }
}

impl StoreViews {
    fn version(&self, reference: &ImageRef) -> StoreView<Option<ImageVersion>> {
        let mut versions = self.versions.lock().unwrap_or_else(PoisonError::into_inner);
        let reference = reference.to_string();
        if versions.len() >= MAX_REFERENCES && !versions.contains_key(&reference) {
            versions.clear();
        }
        versions.entry(reference).or_default().clone()
    }
}

/// The size of the store, as far as it is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoreFigures {
    /// The number of images.
    pub(crate) images: Option<u64>,
    /// The bytes of its files.
    pub(crate) bytes: Option<u64>,
    /// The age of the older of the two answers.
    pub(crate) age: Option<Duration>,
    /// Whether they may be outdated: this daemon changed the store since, or the store does not answer.
    pub(crate) outdated: bool,
    /// Whether the store does not answer.
    pub(crate) silence: Option<Silence>,
}

impl Service {
    /// The number of images and the size of the store, as far as the store can tell: a store that is read from servers
    /// does not know its size, a plain web server not its images.
    pub(crate) async fn store_figures(&self) -> StoreFigures {
        self.store_figures_of(IMAGES_MAX_AGE).await
    }

    /// The same for alarms, which are looked for all the time, also if nobody shows figures: they query the store once a minute.
    pub(crate) async fn store_figures_for_alarms(&self) -> StoreFigures {
        self.store_figures_of(BYTES_MAX_AGE).await
    }

    async fn store_figures_of(&self, images_max_age: Duration) -> StoreFigures {
        let (lister, measurer) = (Arc::clone(self.images()), Arc::clone(self.images()));
        let images = self.answers().images.clone().ask(images_max_age, None, || async move {
            let count = |list: Listed| list.images.len().saturating_add(list.unreadable.len());
            lister.list().await.map(|list| u64::try_from(count(list)).unwrap_or(u64::MAX))
        });
        let measure = || async move { measurer.stored_bytes().await };
        let bytes = self.answers().bytes.clone().ask(BYTES_MAX_AGE, None, measure);
        let (images, bytes) = tokio::join!(images, bytes);
        let silence = self.answers().images.silence();
        let changed = images.iter().chain(&bytes).any(|answer| answer.outdated);
        StoreFigures {
            outdated: changed || silence.is_some() || self.answers().images.awaits_first_answer(),
            silence,
            images: images.map(|answer| answer.value),
            bytes: bytes.map(|answer| answer.value),
            age: images.iter().chain(&bytes).map(|answer| answer.age).max(),
        }
    }

    /// The alarm if the store does not answer.
    pub(crate) fn store_alarm(&self, figures: &StoreFigures) -> Option<Alarm> {
        let Silence { age, why } = figures.silence.as_ref()?;
        let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        let why = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        Some(Alarm {
            subject: "store".to_owned(),
            since_ms: self.now_ms().saturating_sub(age_ms),
            message: format!("the store does not answer{why}"),
            advice: "check the store and the network: until it answers no image can be changed, and machines may not start"
                .to_owned(),
        })
    }

    /// The alarm if some servers of the store cannot be reached, although others can.
    pub(crate) fn servers_alarm(&self) -> Option<Alarm> {
        let ServersGone { gone, servers, gone_for, why } = self.images().servers_gone()?;
        let gone_ms = u64::try_from(gone_for.as_millis()).unwrap_or(u64::MAX);
        Some(Alarm {
            subject: "store".to_owned(),
            since_ms: self.now_ms().saturating_sub(gone_ms),
            message: format!("{gone} of {servers} servers of the store cannot be reached: {why}"),
            advice:
                "check these servers: machines continue with the others, and would wait if those fail too"
                    .to_owned(),
        })
    }

    /// This daemon changed the store: its size and number of images are queried again.
    pub(crate) fn store_changed(&self) {
        self.answers().images.changed();
        self.answers().bytes.changed();
        let versions = self.answers().versions.lock().unwrap_or_else(PoisonError::into_inner);
        versions.values().for_each(StoreView::changed);
    }

    /// The version to which a reference resolves now, or did when the store last answered; `None` if it resolves to
    /// nothing. The query begins before this returns, so that several run at the same time.
    pub(crate) fn version_to_show(
        &self,
        reference: &str,
    ) -> impl Future<Output = Option<ImageVersion>> + Send + use<> {
        // The start of the machine reports a reference that cannot be resolved.
        let answer = ImageRef::parse(reference).ok().map(|parsed| {
            let (images, permits) = (Arc::clone(self.images()), self.answers().query_permits.clone());
            self.answers().version(&parsed).ask(Duration::ZERO, Some(TIMEOUT_CHANGED), || async move {
                let _permit = permits.acquire_owned().await;
                match images.resolve(&parsed).await {
                    Err(e) if e.kind() == ProblemKind::NotFound => Ok(None),
                    resolved => resolved.map(Some),
                }
            })
        });
        async move { answer?.await?.value }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A store that answers with its number of queries, when the test allows it.
    struct Slow {
        queries: AtomicU64,
        answers: Semaphore,
    }

    async fn ask(view: &StoreView<u64>, store: &Arc<Slow>, max_age: Duration) -> Option<u64> {
        let store = Arc::clone(store);
        let answer = view.clone().ask(max_age, None, || async move {
            let number = store.queries.fetch_add(1, Ordering::SeqCst) + 1;
            store.answers.acquire().await.unwrap().forget();
            Ok(number)
        });
        answer.await.map(|answer| answer.value)
    }

    #[tokio::test]
    async fn a_store_that_does_not_answer_delays_no_view_and_is_asked_once() {
        let store = Arc::new(Slow { queries: AtomicU64::new(0), answers: Semaphore::new(0) });
        let view = StoreView::default();
        let (any, none) = (Duration::MAX, Duration::ZERO);
        let times = || store.queries.load(Ordering::SeqCst);
        for _ in 0..3 {
            assert_eq!(ask(&view, &store, any).await, None);
        }
        assert_eq!(times(), 1);
        // The store answers again: the next view has the new answer, and makes no query while that is recent.
        let mut ended = view.lock().query.clone().unwrap().1;
        store.answers.add_permits(1);
        assert!(ended.changed().await.is_err());
        assert_eq!((ask(&view, &store, any).await, times()), (Some(1), 1));
        // The answer is old and the store fails again: the last answer.
        assert_eq!((ask(&view, &store, none).await, times()), (Some(1), 2));
        assert_eq!((ask(&view, &store, none).await, times()), (Some(1), 2));
        let mut ended = view.lock().query.clone().unwrap().1;
        store.answers.add_permits(1);
        assert!(ended.changed().await.is_err());
        assert_eq!((ask(&view, &store, any).await, times()), (Some(2), 2));
        // Recent, but outdated.
        view.changed();
        store.answers.add_permits(1);
        assert_eq!((ask(&view, &store, any).await, times()), (Some(3), 3));
    }

    #[tokio::test]
    async fn an_answer_to_a_query_from_before_a_change_is_ignored() {
        let view = StoreView::default();
        let (goes_on, waits) = tokio::sync::oneshot::channel::<()>();
        let slow = view.begin(true, || async move {
            let _ = waits.await;
            Ok(1)
        });
        let minute = Some(Duration::from_secs(60));
        assert_eq!(view.lock().timeout(minute), Duration::from_secs(60), "nothing is known");
        view.changed();
        let answer = view.clone().ask(Duration::ZERO, minute, || async { Ok(2) }).await;
        assert_eq!(answer.map(|answer| (answer.value, answer.outdated)), Some((2, false)));
        assert_eq!(view.lock().timeout(minute), TIMEOUT);
        // The first query is answered last, and its answer is ignored.
        drop(goes_on);
        let mut ended = slow.1;
        assert!(ended.changed().await.is_err());
        assert_eq!(view.lock().last.map(|(value, _)| value), Some(2));
        view.changed();
        assert_eq!(view.lock().timeout(minute), Duration::from_secs(60));
        let away = || BackendError::new(ProblemKind::Failed, "away");
        let failed = view.clone().ask(Duration::ZERO, minute, || async move { Err(away()) }).await;
        assert!(failed.is_some_and(|answer| answer.outdated));
        assert_eq!(view.lock().timeout(minute), TIMEOUT, "a store that is away is not waited for so long");
    }

    #[tokio::test]
    async fn a_failure_leaves_the_last_answer() {
        let view = StoreView::default();
        let failed = || BackendError::new(ProblemKind::Failed, "away");
        assert!(view.clone().ask(Duration::ZERO, None, || async { Ok(7) }).await.is_some());
        let answer = view.clone().ask(Duration::ZERO, None, || async move { Err(failed()) }).await;
        assert_eq!(answer.map(|answer| (answer.value, answer.outdated)), Some((7, false)));
        assert!(view.silence().is_some_and(|silence| silence.why.is_some_and(|why| why.contains("away"))));
        // Changed since, so outdated.
        view.changed();
        let answer = view.clone().ask(Duration::MAX, None, || async move { Err(failed()) }).await;
        assert_eq!(answer.map(|answer| (answer.value, answer.outdated)), Some((7, true)));
        // A store that cannot tell does answer.
        let untold = || BackendError::new(ProblemKind::Invalid, "it does not tell");
        view.clone().ask(Duration::ZERO, None, || async move { Err(untold()) }).await;
        assert_eq!(view.silence(), None);
        let answer = view.clone().ask(Duration::ZERO, None, || async { Ok(8) }).await;
        assert_eq!(answer.map(|answer| (answer.value, answer.outdated)), Some((8, false)));
    }
}
