//! Places for connections, and who gives way where all are taken.
//!
//! Every process of this host can connect, and so can guests. Who does and says nothing, or has no token, keeps nobody out: where all
//! places are taken, a new connection ends the oldest of those that were not let in yet. While there are many of these that one goes at
//! once. Where there are few, and nearly all places have those who may have them, it is given time to ask first: otherwise each of many
//! who come at once would end the one before it. Whoever was let in keeps his place.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// The places of a server. One asks for them: who accepts its connections.
pub(crate) struct Places {
    free: Arc<Semaphore>,
    /// From so many strangers on, the oldest has no time.
    many: usize,
    grace: Duration,
    strangers: Mutex<Strangers>,
}

/// Those that were not let in yet.
#[derive(Default)]
struct Strangers {
    last_id: u64,
    by_age: BTreeMap<u64, Stranger>,
}

struct Stranger {
    since: Instant,
    must_go: Arc<Notify>,
}

impl Places {
    pub(crate) fn new(connections: usize, many: usize, grace: Duration) -> Arc<Self> {
        Arc::new(Self {
            free: Arc::new(Semaphore::new(connections)),
            many,
            grace,
            strangers: Mutex::default(),
        })
    }

    /// A place for a stranger. Where all are taken it waits until somebody leaves, of himself or because he must.
    pub(crate) async fn take(self: &Arc<Self>) -> Option<Place> {
        let mut free = std::pin::pin!(Arc::clone(&self.free).acquire_owned());
        let permit = tokio::select! {
            biased;
            permit = free.as_mut() => permit,
            // One alone, however long it takes to leave.
            () = self.make_room() => free.await,
        };
        // Never closed.
        let permit = permit.ok()?;
        let must_go = Arc::<Notify>::default();
        let mut strangers = self.strangers();
        strangers.last_id = strangers.last_id.wrapping_add(1);
        let id = strangers.last_id;
        strangers.by_age.insert(id, Stranger { since: Instant::now(), must_go: Arc::clone(&must_go) });
        Some(Place { entry: Entry { places: Arc::clone(self), id }, must_go, _permit: permit })
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the oldest stranger, when that is due.
    async fn make_room(&self) {
        loop {
            match self.end_oldest() {
                Ok(()) => return,
                Err(Some(due)) => tokio::time::sleep_until(due).await,
                // None come either, as long as a place is waited for.
                Err(None) => std::future::pending().await,
            }
        }
    }

    /// The error is when that is due; `None`: there are none.
    fn end_oldest(&self) -> Result<(), Option<Instant>> {
        let mut strangers = self.strangers();
        let grace = if strangers.by_age.len() < self.many { self.grace } else { Duration::ZERO };
        let Some(oldest) = strangers.by_age.first_entry() else { return Err(None) };
        let due = oldest.get().since + grace;
        if due > Instant::now() {
            return Err(Some(due));
        }
        oldest.remove().must_go.notify_one();
        Ok(())
    }
}

/// A connection's place. It is free when this is dropped.
pub(crate) struct Place {
    entry: Entry,
    must_go: Arc<Notify>,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    /// For whoever finds out that it is let in.
    pub(crate) fn entry(&self) -> Entry {
        self.entry.clone()
    }

    /// Waits until it has to make room.
    pub(crate) async fn must_go(&self) {
        self.must_go.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.entry.let_in();
    }
}

/// A connection among those that were not let in yet.
#[derive(Clone)]
pub(crate) struct Entry {
    places: Arc<Places>,
    id: u64,
}

impl Entry {
    /// It is no stranger any more, and not ended for others.
    pub(crate) fn let_in(&self) {
        self.places.strangers().by_age.remove(&self.id);
    }
}
