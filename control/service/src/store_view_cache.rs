//! What the store said last, for whoever only looks: a store across a network may take minutes to answer, and that must
//! not hide the rest.
//!
//! ```text
//!   look --> the last answer is young --> it
//!        --> else one question is asked, by a task of its own --> answered within PATIENCE --> the new answer
//!                                                             --> not yet, or failed -------> the last one, with its age
//! ```
//! For what a reference means it is waited longer where the daemon itself changed that, or does not know it yet: whoever has just
//! changed something looks for what came of it.
//!
//! Where that is older than what the daemon changed since, or the store does not answer, it is said to be outdated.
//! What decides anything waits for the store itself. Where one across a network cannot be reached, what a reference means is as it was
//! when its image was last looked up (`StoredImages::resolve` of the program), so that machines start; all else fails then.

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

/// How long whoever looks waits for an answer, counted from the question's beginning.
const PATIENCE: Duration = Duration::from_secs(1);

/// The same for an answer that is not known, or that the daemon changed, of a store that answered so far.
const PATIENCE_CHANGED: Duration = Duration::from_secs(10);

/// For so long the number of images is not asked for again, unless this daemon changes it.
const IMAGES_MAX_AGE: Duration = Duration::from_secs(10);

/// The same for the store's size, for which a store may list all that it has.
const BYTES_MAX_AGE: Duration = Duration::from_secs(60);

/// After so long without an answer to it, a store is said not to answer.
const SILENT_AFTER: Duration = Duration::from_secs(10);

/// References that are remembered; with more of them, all are forgotten.
const MAX_REFERENCES: usize = 4_096;

/// Questions for versions that the store is asked at once: each takes a thread for as long as it does.
const MAX_QUESTIONS: usize = 8;

/// An answer, and how old it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer<T> {
    pub(crate) value: T,
    pub(crate) age: Duration,
    /// Whether the daemon changed since what it is about.
    pub(crate) outdated: bool,
}

/// That a store does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Silence {
    /// How long ago the first question began that it did not answer.
    pub(crate) age: Duration,
    /// What came instead, where something did.
    pub(crate) why: Option<String>,
}

/// One question and its last answer. Cloning is cheap; all clones are one.
#[derive(Clone)]
struct StoreView<T>(Arc<Mutex<State<T>>>);

struct State<T> {
    /// The answer, and when it was asked for.
    last: Option<(T, Instant)>,
    /// When the question that was asked last began; what ends with it.
    question: Option<(Instant, watch::Receiver<()>)>,
    /// When the daemon itself changed what the answer is about.
    changed: Option<Instant>,
    /// When the first of the questions began that failed since the last answer, and how the last one did.
    failing: Option<(Instant, String)>,
}

impl<T> State<T> {
    /// How long whoever looks waits, at most.
    fn patience(&self, when_changed: Option<Duration>) -> Duration {
        let is_known = self.last.is_some() && !self.is_outdated();
        when_changed.filter(|_| !is_known && self.failing.is_none()).unwrap_or(PATIENCE)
    }

    fn is_outdated(&self) -> bool {
        self.last.as_ref().is_some_and(|(_, store_view_cache)| {
            self.changed.is_some_and(|changed| *store_view_cache <= changed)
        })
    }
}

impl<T> Default for StoreView<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State { last: None, question: None, changed: None, failing: None })))
    }
}

impl<T: Clone + Send + 'static> StoreView<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // It is whole between any two statements.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last answer is old from now on.
    fn changed(&self) {
        self.lock().changed = Some(Instant::now());
    }

    /// The last answer, where it is younger than `max_age`; else the question is asked, unless that is under way, before
    /// this returns, and the future waits for it. With `when_changed` it waits for so long where the answer is not known, or the
    /// daemon changed it, and for no question from before that.
    fn ask<F>(
        self,
        max_age: Duration,
        when_changed: Option<Duration>,
        question: impl FnOnce() -> F,
    ) -> impl Future<Output = Option<Answer<T>>> + Send
    where
        F: Future<Output = Result<T, BackendError>> + Send + 'static,
    {
        let waits_for = (!self.is_young(max_age)).then(|| self.begin(when_changed.is_some(), question));
        async move {
            if let Some((since, mut ended)) = waits_for {
                // Both ends mean the same: what there is now is what is known.
                let patience = self.lock().patience(when_changed);
                let _ = tokio::time::timeout_at(since + patience, ended.changed()).await;
            }
            let state = self.lock();
            let outdated = state.is_outdated();
            state.last.clone().map(|(value, store_view_cache)| Answer {
                value,
                age: store_view_cache.elapsed(),
                outdated,
            })
        }
    }

    fn is_young(&self, max_age: Duration) -> bool {
        let state = self.lock();
        let store_view_cache = state.last.as_ref().map(|(_, store_view_cache)| *store_view_cache);
        store_view_cache
            .is_some_and(|store_view_cache| store_view_cache.elapsed() < max_age && !state.is_outdated())
    }

    /// Whether there was no answer yet, and a question is under way.
    fn is_awaited(&self) -> bool {
        let state = self.lock();
        state.last.is_none() && state.question.as_ref().is_some_and(|(_, ended)| ended.has_changed().is_ok())
    }

    /// That the store does not answer, where the last question failed, or has been waited for too long.
    fn silence(&self) -> Option<Silence> {
        let state = self.lock();
        let begun = state.question.as_ref().filter(|(_, ended)| ended.has_changed().is_ok());
        let begun = begun.map(|(since, _)| *since).filter(|since| since.elapsed() >= SILENT_AFTER);
        match (&state.failing, begun) {
            (Some((since, why)), _) => Some(Silence { age: since.elapsed(), why: Some(why.clone()) }),
            (None, Some(since)) => Some(Silence { age: since.elapsed(), why: None }),
            (None, None) => None,
        }
    }

    fn begin<F>(&self, after_changes: bool, question: impl FnOnce() -> F) -> (Instant, watch::Receiver<()>)
    where
        F: Future<Output = Result<T, BackendError>> + Send + 'static,
    {
        let mut state = self.lock();
        let changed = state.changed.filter(|_| after_changes);
        // The sender is dropped when the question ends, however it does.
        if let Some((since, ended)) = state.question.clone()
            && ended.has_changed().is_ok()
            && changed.is_none_or(|changed| since > changed)
        {
            return (since, ended);
        }
        let (ending, ended) = watch::channel(());
        let since = Instant::now();
        state.question = Some((since, ended.clone()));
        let (this, question) = (self.clone(), question());
        tokio::spawn(async move {
            let answer = question.await;
            let mut state = this.lock();
            match answer {
                // A later question was answered before this one.
                _ if state.last.as_ref().is_some_and(|(_, store_view_cache)| *store_view_cache > since) => {}
                Ok(value) => (state.last, state.failing) = (Some((value, since)), None),
                // One that fails leaves what was known: a store that is away has the images that it had.
                Err(e) if e.kind() == ProblemKind::Failed => {
                    let since = state.failing.take().map_or(since, |(first, _)| first);
                    state.failing = Some((since, e.to_string()));
                }
                // Such as a store that does not tell: that is an answer, too.
                Err(_) => state.failing = None,
            }
            drop(state);
            drop(ending);
        });
        (since, ended)
    }
}

/// All that the store is asked for by those who only look.
pub(crate) struct StoreViews {
    images: StoreView<u64>,
    bytes: StoreView<u64>,
    /// By reference. `None`: the store has none.
    versions: Mutex<HashMap<String, StoreView<Option<ImageVersion>>>>,
    question_places: Arc<Semaphore>,
}

impl Default for StoreViews {
    fn default() -> Self {
        Self {
            images: StoreView::default(),
            bytes: StoreView::default(),
            versions: Mutex::default(),
            question_places: Arc::new(Semaphore::new(MAX_QUESTIONS)),
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

/// What there is in the store, as far as it is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoreFigures {
    /// How many images.
    pub(crate) images: Option<u64>,
    /// What they take.
    pub(crate) bytes: Option<u64>,
    /// How old the older one of the two is.
    pub(crate) age: Option<Duration>,
    /// Whether they may be others by now: this daemon changed the store since, or that does not answer.
    pub(crate) outdated: bool,
    /// That the store does not answer.
    pub(crate) silence: Option<Silence>,
}

impl Service {
    /// How many images there are and what they take, where the store tells: one that is read from servers does not tell
    /// its size, a plain web server not its images.
    pub(crate) async fn store_figures(&self) -> StoreFigures {
        let (lister, measurer) = (Arc::clone(self.images()), Arc::clone(self.images()));
        let images = self.answers().images.clone().ask(IMAGES_MAX_AGE, None, || async move {
            let count = |list: Listed| list.images.len().saturating_add(list.unreadable.len());
            lister.list().await.map(|list| u64::try_from(count(list)).unwrap_or(u64::MAX))
        });
        let measure = || async move { measurer.stored_bytes().await };
        let bytes = self.answers().bytes.clone().ask(BYTES_MAX_AGE, None, measure);
        let (images, bytes) = tokio::join!(images, bytes);
        let silence = self.answers().images.silence();
        let changed = images.iter().chain(&bytes).any(|answer| answer.outdated);
        StoreFigures {
            outdated: changed || silence.is_some() || self.answers().images.is_awaited(),
            silence,
            images: images.map(|answer| answer.value),
            bytes: bytes.map(|answer| answer.value),
            age: images.iter().chain(&bytes).map(|answer| answer.age).max(),
        }
    }

    /// The alarm that the store does not answer.
    pub(crate) fn store_alarm(&self, figures: &StoreFigures) -> Option<Alarm> {
        let Silence { age, why } = figures.silence.as_ref()?;
        let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        let why = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        Some(Alarm {
            subject: "store".to_owned(),
            since_ms: self.now_ms().saturating_sub(age_ms),
            message: format!("the store does not answer{why}"),
            advice: "bring it back: until then no image can be changed, and machines may not start"
                .to_owned(),
        })
    }

    /// The alarm that some of the store's servers are gone, while others are there.
    pub(crate) fn servers_alarm(&self) -> Option<Alarm> {
        let ServersGone { gone, servers, gone_for, why } = self.images().servers_gone()?;
        let gone_ms = u64::try_from(gone_for.as_millis()).unwrap_or(u64::MAX);
        let are = if gone == 1 { "is" } else { "are" };
        Some(Alarm {
            subject: "store".to_owned(),
            since_ms: self.now_ms().saturating_sub(gone_ms),
            message: format!("{gone} of {servers} servers of the store {are} gone: {why}"),
            advice:
                "bring it back: machines go on with the others, and wait for their disks if these go, too"
                    .to_owned(),
        })
    }

    /// What the store has was changed here: the figures are asked for anew.
    pub(crate) fn store_changed(&self) {
        self.answers().images.changed();
        self.answers().bytes.changed();
        let versions = self.answers().versions.lock().unwrap_or_else(PoisonError::into_inner);
        versions.values().for_each(StoreView::changed);
    }

    /// What a reference means now, or meant when the store answered last; `None` where it means nothing. It is asked
    /// for before this returns, so that several are asked for at the same time.
    pub(crate) fn version_to_show(
        &self,
        reference: &str,
    ) -> impl Future<Output = Option<ImageVersion>> + Send + use<> {
        // What cannot be resolved is told when a machine is started.
        let store_view_cache = ImageRef::parse(reference).ok().map(|parsed| {
            let (images, places) = (Arc::clone(self.images()), self.answers().question_places.clone());
            self.answers().version(&parsed).ask(Duration::ZERO, Some(PATIENCE_CHANGED), || async move {
                let _place = places.acquire_owned().await;
                match images.resolve(&parsed).await {
                    Err(e) if e.kind() == ProblemKind::NotFound => Ok(None),
                    resolved => resolved.map(Some),
                }
            })
        });
        async move { store_view_cache?.await?.value }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A store that answers with how often it was asked, when it is let to.
    struct Slow {
        store_view_cache: AtomicU64,
        answers: Semaphore,
    }

    async fn ask(store_view_cache: &StoreView<u64>, store: &Arc<Slow>, max_age: Duration) -> Option<u64> {
        let store = Arc::clone(store);
        let answer = store_view_cache.clone().ask(max_age, None, || async move {
            let number = store.store_view_cache.fetch_add(1, Ordering::SeqCst) + 1;
            store.answers.acquire().await.unwrap().forget();
            Ok(number)
        });
        answer.await.map(|answer| answer.value)
    }

    #[tokio::test]
    async fn a_store_that_is_away_holds_nobody_up_and_is_asked_once() {
        let (store_view_cache, store) = (
            StoreView::default(),
            Arc::new(Slow { store_view_cache: AtomicU64::new(0), answers: Semaphore::new(0) }),
        );
        let (any, none) = (Duration::MAX, Duration::ZERO);
        let times = || store.store_view_cache.load(Ordering::SeqCst);
        for _ in 0..3 {
            assert_eq!(ask(&store_view_cache, &store, any).await, None);
        }
        assert_eq!(times(), 1);
        // It is back: who comes next sees the answer, and nothing is asked while that is young.
        let mut ended = store_view_cache.lock().question.clone().unwrap().1;
        store.answers.add_permits(1);
        assert!(ended.changed().await.is_err());
        assert_eq!((ask(&store_view_cache, &store, any).await, times()), (Some(1), 1));
        // Old, and the store is away again: the last answer.
        assert_eq!((ask(&store_view_cache, &store, none).await, times()), (Some(1), 2));
        assert_eq!((ask(&store_view_cache, &store, none).await, times()), (Some(1), 2));
        let mut ended = store_view_cache.lock().question.clone().unwrap().1;
        store.answers.add_permits(1);
        assert!(ended.changed().await.is_err());
        assert_eq!((ask(&store_view_cache, &store, any).await, times()), (Some(2), 2));
        // Young, and not what there is any more.
        store_view_cache.changed();
        store.answers.add_permits(1);
        assert_eq!((ask(&store_view_cache, &store, any).await, times()), (Some(3), 3));
    }

    #[tokio::test]
    async fn a_question_from_before_a_change_does_not_tell_what_came_of_it() {
        let store_view_cache = StoreView::default();
        let (goes_on, waits) = tokio::sync::oneshot::channel::<()>();
        let slow = store_view_cache.begin(true, || async move {
            let _ = waits.await;
            Ok(1)
        });
        let minute = Some(Duration::from_secs(60));
        assert_eq!(store_view_cache.lock().patience(minute), Duration::from_secs(60), "nothing is known");
        store_view_cache.changed();
        let answer = store_view_cache.clone().ask(Duration::ZERO, minute, || async { Ok(2) }).await;
        assert_eq!(answer.map(|answer| (answer.value, answer.outdated)), Some((2, false)));
        assert_eq!(store_view_cache.lock().patience(minute), PATIENCE);
        // The one that was asked first is answered last, and tells nothing new.
        drop(goes_on);
        let mut ended = slow.1;
        assert!(ended.changed().await.is_err());
        assert_eq!(store_view_cache.lock().last.map(|(value, _)| value), Some(2));
        store_view_cache.changed();
        assert_eq!(store_view_cache.lock().patience(minute), Duration::from_secs(60));
        let away = || BackendError::new(ProblemKind::Failed, "away");
        let failed =
            store_view_cache.clone().ask(Duration::ZERO, minute, || async move { Err(away()) }).await;
        assert!(failed.is_some_and(|answer| answer.outdated));
        assert_eq!(
            store_view_cache.lock().patience(minute),
            PATIENCE,
            "a store that is away is not waited for so long"
        );
    }

    #[tokio::test]
    async fn a_failure_leaves_what_was_known() {
        let store_view_cache = StoreView::default();
        let failed = || BackendError::new(ProblemKind::Failed, "away");
        assert!(store_view_cache.clone().ask(Duration::ZERO, None, || async { Ok(7) }).await.is_some());
        let answer =
            store_view_cache.clone().ask(Duration::ZERO, None, || async move { Err(failed()) }).await;
        assert_eq!(answer.map(|answer| (answer.value, answer.outdated)), Some((7, false)));
        assert!(
            store_view_cache
                .silence()
                .is_some_and(|silence| silence.why.is_some_and(|why| why.contains("away")))
        );
        // Changed since: it is not what there is.
        store_view_cache.changed();
        let answer = store_view_cache.clone().ask(Duration::MAX, None, || async move { Err(failed()) }).await;
        assert_eq!(answer.map(|answer| (answer.value, answer.outdated)), Some((7, true)));
        // A store that does not tell does answer.
        let untold = || BackendError::new(ProblemKind::Invalid, "it does not tell");
        store_view_cache.clone().ask(Duration::ZERO, None, || async move { Err(untold()) }).await;
        assert_eq!(store_view_cache.silence(), None);
        let answer = store_view_cache.clone().ask(Duration::ZERO, None, || async { Ok(8) }).await;
        assert_eq!(answer.map(|answer| (answer.value, answer.outdated)), Some((8, false)));
    }
}
