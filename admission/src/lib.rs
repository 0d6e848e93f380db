//! Places for connections, and who gives way where all are taken: for servers in asynchronous code, of either plane.
//!
//! # Guarantees
//! - Who connects and says nothing, or has no token, keeps nobody out: where all places are taken, a new connection ends the oldest of
//!   those that were not let in yet ([`Entry::let_in`]).
//! - While there are many of these that one goes at once. Where there are few, and nearly all places have those who may have them, it is
//!   given time to ask first: otherwise each of many who come at once would end the one before it.
//! - Whoever was let in keeps his place. Who had been chosen to leave before is not let in, and told so, so that nothing is begun for him
//!   that would be cut off in the middle.
//!
//! # Limits
//! The caller's: how many places, from how many strangers on the oldest has no time, and how long that is ([`Admission::new`]).
//!
//! # Not here
//! No sockets and no tokens: ending a connection that must go is the server's ([`Permit::must_go`]). Servers with a thread for each
//! connection have theirs in `headwater-connections`.

#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::todo,
        clippy::unimplemented,
        clippy::indexing_slicing,
        clippy::string_slice,
        clippy::get_unwrap,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// The places of a server. One asks for them: who accepts its connections.
pub struct Admission {
    free: Arc<Semaphore>,
    /// From so many strangers on, the oldest has no time.
    many: usize,
    grace: Duration,
    unauthenticated: Mutex<UnauthenticatedList>,
}

/// Those that were not let in yet.
#[derive(Default)]
struct UnauthenticatedList {
    last_id: u64,
    by_age: BTreeMap<u64, Unauthenticated>,
}

struct Unauthenticated {
    since: Instant,
    end: Arc<End>,
}

/// Whether a connection must make room.
#[derive(Default)]
struct End {
    /// Changes under the lock of the strangers.
    is_due: AtomicBool,
    told: Notify,
}

impl Admission {
    /// So many `connections` at once. From `many` strangers on the oldest has no time, below it has `grace` since it came.
    pub fn new(connections: usize, many: usize, grace: Duration) -> Arc<Self> {
        Arc::new(Self {
            free: Arc::new(Semaphore::new(connections)),
            many,
            grace,
            unauthenticated: Mutex::default(),
        })
    }

    /// A place for a stranger. Where all are taken it waits until somebody leaves, of himself or because he must.
    pub async fn take(self: &Arc<Self>) -> Option<Permit> {
        let mut free = std::pin::pin!(Arc::clone(&self.free).acquire_owned());
        let permit = tokio::select! {
            biased;
            permit = free.as_mut() => permit,
            // One alone, however long it takes to leave.
            () = self.make_room() => free.await,
        };
        // Never closed.
        let permit = permit.ok()?;
        let end = Arc::<End>::default();
        let mut unauthenticated = self.unauthenticated.lock();
        unauthenticated.last_id = unauthenticated.last_id.wrapping_add(1);
        let id = unauthenticated.last_id;
        unauthenticated.by_age.insert(id, Unauthenticated { since: Instant::now(), end: Arc::clone(&end) });
        Some(Permit { entry: Entry { places: Arc::clone(self), id, end }, _permit: permit })
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
        let mut unauthenticated = self.unauthenticated.lock();
        let grace = if unauthenticated.by_age.len() < self.many { self.grace } else { Duration::ZERO };
        let Some(oldest) = unauthenticated.by_age.first_entry() else { return Err(None) };
        let due = oldest.get().since + grace;
        if due > Instant::now() {
            return Err(Some(due));
        }
        let end = oldest.remove().end;
        end.is_due.store(true, Ordering::Release);
        end.told.notify_one();
        Ok(())
    }
}

/// A connection's place. It is free when this is dropped.
pub struct Permit {
    entry: Entry,
    _permit: OwnedSemaphorePermit,
}

impl Permit {
    /// For whoever finds out that it is let in.
    pub fn entry(&self) -> Entry {
        self.entry.clone()
    }

    /// Waits until it has to make room.
    pub async fn must_go(&self) {
        self.entry.end.told.notified().await;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.entry.let_in();
    }
}

/// A connection among those that were not let in yet.
#[derive(Clone)]
pub struct Entry {
    places: Arc<Admission>,
    id: u64,
    end: Arc<End>,
}

impl Entry {
    /// It is no stranger any more, and not ended for others. `false`: it was chosen before to make room, and will be ended; nothing is
    /// to be begun for it.
    pub fn let_in(&self) -> bool {
        // Chosen under the same lock: either it is no stranger by then, or this finds that it was.
        let mut unauthenticated = self.places.unauthenticated.lock();
        unauthenticated.by_age.remove(&self.id);
        !self.must_go()
    }

    /// Whether it was chosen to make room. One that was let in never is.
    pub fn must_go(&self) -> bool {
        self.end.is_due.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For what would else be waited for for ever.
    const SOON: Duration = Duration::from_secs(60);

    async fn taken(places: &Arc<Admission>) -> Permit {
        tokio::time::timeout(SOON, places.take()).await.unwrap().unwrap()
    }

    /// Whether nobody makes room now.
    async fn is_full(places: &Arc<Admission>) -> bool {
        tokio::select! {
            biased;
            place = places.take() => place.is_none(),
            () = std::future::ready(()) => true,
        }
    }

    fn must_go(place: &Permit) -> bool {
        let mut must_go = std::pin::pin!(place.must_go());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        must_go.as_mut().poll(&mut context).is_ready()
    }

    #[tokio::test]
    async fn the_oldest_of_many_strangers_goes_at_once_and_who_was_let_in_stays() {
        let places = Admission::new(4, 3, SOON * 60);
        let guest = taken(&places).await;
        guest.entry().let_in();
        let unauthenticated = [taken(&places).await, taken(&places).await, taken(&places).await];
        assert!(is_full(&places).await, "he who must go has not left");
        let [first, second, third] = unauthenticated;
        assert!(must_go(&first) && !must_go(&second) && !must_go(&third) && !must_go(&guest));
        drop(first);
        let fourth = taken(&places).await;
        // Whoever has left is not asked to go.
        drop(second);
        let fifth = taken(&places).await;
        third.entry().let_in();
        fourth.entry().let_in();
        fifth.entry().let_in();
        assert!(is_full(&places).await);
        assert!([&guest, &third, &fourth, &fifth].into_iter().all(|place| !must_go(place)));
    }

    #[tokio::test]
    async fn who_was_chosen_to_leave_is_not_let_in_and_who_was_let_in_is_not_chosen() {
        let places = Admission::new(2, 1, SOON * 60);
        let (first, second) = (taken(&places).await, taken(&places).await);
        assert!(first.entry().let_in());
        assert!(is_full(&places).await);
        assert!(first.entry().let_in() && !first.entry().must_go() && !must_go(&first), "it stays");
        // Chosen, and not gone yet.
        assert!(second.entry().must_go() && !second.entry().let_in());
        assert!(!second.entry().let_in(), "nor later");
        assert!(must_go(&second));
    }

    #[tokio::test]
    async fn one_of_a_few_strangers_goes_when_he_had_time_to_ask() {
        let places = Admission::new(2, 2, SOON * 60);
        let (guest, stranger) = (taken(&places).await, taken(&places).await);
        guest.entry().let_in();
        assert!(is_full(&places).await && !must_go(&stranger));
        let places = Admission::new(2, 2, Duration::from_millis(50));
        let (guest, stranger) = (taken(&places).await, taken(&places).await);
        guest.entry().let_in();
        let leaving = tokio::spawn(async move {
            stranger.must_go().await;
            drop(stranger);
        });
        let _next = taken(&places).await;
        leaving.await.unwrap();
        assert!(!must_go(&guest));
    }
}
