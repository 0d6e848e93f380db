//! Permits for connections, and which connection ends if all permits are taken. For asynchronous servers of both
//! planes.
//!
//! A connection is unauthenticated until the server calls [`Entry::let_in`].
//!
//! # Guarantees
//! - Silent connections, and connections without a token, do not block the server: if all permits are taken, a new
//!   connection ends the oldest unauthenticated one.
//! - If many connections are unauthenticated, the oldest ends at once. If there are few, it has a grace period to
//!   authenticate. Without that period, each of many simultaneous connections would end the one before it.
//! - An authenticated connection keeps its permit. A connection that was already chosen to end cannot authenticate:
//!   [`Entry::let_in`] returns `false`, so that the server starts no work that would be cut off.
//!
//! # Limits
//! The caller sets them in [`Admission::new`]: the number of permits, how many unauthenticated connections count as
//! many, and the grace period.
//!
//! # Not here
//! Sockets and tokens: the server itself ends a connection that must go ([`Permit::must_go`]). Servers with a thread
//! for each connection use `headwater-connections`.

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

/// The permits of a server. Only the task that accepts connections takes them.
pub struct Admission {
    free: Arc<Semaphore>,
    /// With this many unauthenticated connections or more, the oldest has no grace period.
    many: usize,
    grace: Duration,
    unauthenticated: Mutex<UnauthenticatedList>,
}

/// The unauthenticated connections.
#[derive(Default)]
struct UnauthenticatedList {
    last_id: u64,
    by_age: BTreeMap<u64, Unauthenticated>,
}

struct Unauthenticated {
    since: Instant,
    end: Arc<End>,
}

/// Whether a connection must end for a new one.
#[derive(Default)]
struct End {
    /// Changes only under the lock of the list of unauthenticated connections.
    is_due: AtomicBool,
    notify: Notify,
}

impl Admission {
    /// Permits for `connections` at once. With fewer than `many` unauthenticated connections, the oldest has `grace`
    /// from its start; with `many` or more it has no grace period.
    pub fn new(connections: usize, many: usize, grace: Duration) -> Arc<Self> {
        Arc::new(Self {
            free: Arc::new(Semaphore::new(connections)),
            many,
            grace,
            unauthenticated: Mutex::default(),
        })
    }

    /// A permit for a new, unauthenticated connection. If all permits are taken, waits until a connection ends by
    /// itself or must end.
    pub async fn take(self: &Arc<Self>) -> Option<Permit> {
        let mut free = std::pin::pin!(Arc::clone(&self.free).acquire_owned());
        let permit = tokio::select! {
            biased;
            permit = free.as_mut() => permit,
            // Ends one connection only, however long that takes.
            () = self.make_room() => free.await,
        };
        // The semaphore is never closed.
        let permit = permit.ok()?;
        let end = Arc::<End>::default();
        let mut unauthenticated = self.unauthenticated.lock();
        unauthenticated.last_id = unauthenticated.last_id.wrapping_add(1);
        let id = unauthenticated.last_id;
        unauthenticated.by_age.insert(id, Unauthenticated { since: Instant::now(), end: Arc::clone(&end) });
        Some(Permit { entry: Entry { admission: Arc::clone(self), id, end }, _permit: permit })
    }

    /// Ends the oldest unauthenticated connection when its grace period is over.
    async fn make_room(&self) {
        loop {
            match self.end_oldest() {
                Ok(()) => return,
                Err(Some(due)) => tokio::time::sleep_until(due).await,
                // No unauthenticated connection can arrive while this one waits for a permit.
                Err(None) => std::future::pending().await,
            }
        }
    }

    /// `Err(Some(due))`: the grace period ends at `due`. `Err(None)`: no connection is unauthenticated.
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
        end.notify.notify_one();
        Ok(())
    }
}

/// A connection's permit. Dropping it frees the permit.
pub struct Permit {
    entry: Entry,
    _permit: OwnedSemaphorePermit,
}

impl Permit {
    /// A handle for the code that authenticates the connection.
    pub fn entry(&self) -> Entry {
        self.entry.clone()
    }

    /// Waits until this connection must end for a new one.
    pub async fn must_go(&self) {
        self.entry.end.notify.notified().await;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.entry.let_in();
    }
}

/// A connection's entry in the list of unauthenticated connections.
#[derive(Clone)]
pub struct Entry {
    admission: Arc<Admission>,
    id: u64,
    end: Arc<End>,
}

impl Entry {
    /// Marks the connection as authenticated, so that it never ends for a new one. `false`: it was already chosen to
    /// end, and the server must start no work for it.
    pub fn let_in(&self) -> bool {
        // `end_oldest` chooses under the same lock: either this entry is gone from the list by then, or `must_go` is
        // true here.
        let mut unauthenticated = self.admission.unauthenticated.lock();
        unauthenticated.by_age.remove(&self.id);
        !self.must_go()
    }

    /// Whether this connection was chosen to end. An authenticated connection never is.
    pub fn must_go(&self) -> bool {
        self.end.is_due.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Timeout of waits that would otherwise never end.
    const SOON: Duration = Duration::from_secs(60);

    async fn taken(admission: &Arc<Admission>) -> Permit {
        tokio::time::timeout(SOON, admission.take()).await.unwrap().unwrap()
    }

    /// Whether no permit can be had now.
    async fn is_full(admission: &Arc<Admission>) -> bool {
        tokio::select! {
            biased;
            permit = admission.take() => permit.is_none(),
            () = std::future::ready(()) => true,
        }
    }

    fn must_go(permit: &Permit) -> bool {
        let mut must_go = std::pin::pin!(permit.must_go());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        must_go.as_mut().poll(&mut context).is_ready()
    }

    #[tokio::test]
    async fn a_full_server_ends_the_oldest_unauthenticated_connection() {
        let admission = Admission::new(4, 3, SOON * 60);
        let guest = taken(&admission).await;
        guest.entry().let_in();
        let unauthenticated = [taken(&admission).await, taken(&admission).await, taken(&admission).await];
        assert!(is_full(&admission).await, "the connection that must go has not left");
        let [first, second, third] = unauthenticated;
        assert!(must_go(&first) && !must_go(&second) && !must_go(&third) && !must_go(&guest));
        drop(first);
        let fourth = taken(&admission).await;
        // A connection that has left is not chosen.
        drop(second);
        let fifth = taken(&admission).await;
        third.entry().let_in();
        fourth.entry().let_in();
        fifth.entry().let_in();
        assert!(is_full(&admission).await);
        assert!([&guest, &third, &fourth, &fifth].into_iter().all(|permit| !must_go(permit)));
    }

    #[tokio::test]
    async fn a_connection_chosen_to_end_cannot_authenticate() {
        let admission = Admission::new(2, 1, SOON * 60);
        let (first, second) = (taken(&admission).await, taken(&admission).await);
        assert!(first.entry().let_in());
        assert!(is_full(&admission).await);
        assert!(first.entry().let_in() && !first.entry().must_go() && !must_go(&first), "it is not ended");
        // It was chosen to end, and has not ended yet.
        assert!(second.entry().must_go() && !second.entry().let_in());
        assert!(!second.entry().let_in(), "nor later");
        assert!(must_go(&second));
    }

    #[tokio::test]
    async fn one_of_few_unauthenticated_connections_has_a_grace_period() {
        let admission = Admission::new(2, 2, SOON * 60);
        let (guest, unauthenticated) = (taken(&admission).await, taken(&admission).await);
        guest.entry().let_in();
        assert!(is_full(&admission).await && !must_go(&unauthenticated));
        let admission = Admission::new(2, 2, Duration::from_millis(50));
        let (guest, unauthenticated) = (taken(&admission).await, taken(&admission).await);
        guest.entry().let_in();
        let leaving = tokio::spawn(async move {
            unauthenticated.must_go().await;
            drop(unauthenticated);
        });
        let _next = taken(&admission).await;
        leaving.await.unwrap();
        assert!(!must_go(&guest));
    }
}
