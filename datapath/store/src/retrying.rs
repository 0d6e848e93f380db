//! A store around another one: its reads wait while that one (the store below) cannot be reached, as reads of a
//! disk wait for a slow device. So an outage of a store delays machines, and gives them no read errors.
//!
//! ```text
//!   volume --read_checked--> RetryingObject --> Object of the store below
//!                                 |  it cannot be reached, although the store below tried several times
//!                                 +--> log once, wait, retry --- it answers: log, continue
//! ```
//!
//! Only reads of open objects wait. Opening, lists, manifests and all changes fail as they do in the store
//! below. Opening a version fails at once if another attempt failed a moment ago, because an attempt at a
//! store that hangs takes minutes. Answers of the store are returned at once, even if an object does not
//! exist, its bytes are wrong, or the server refuses access: reads wait only after
//! [`StoreErrorKind::Unreachable`].
//!
//! # How long a read waits
//! Each read waits for its own pauses, whose length doubles. If the store answers any read, all others retry
//! at once, but each of them only once. A read that then fails again, because only a part of the store is
//! away, returns to its pauses. The outage lasts from the first waiting read until the last waiting read was
//! answered, so it is logged once. A read that can wait without a thread ([`Object::read_or_wait`]) uses none
//! during a pause, nor while the store below needs none.
//!
//! # Lock order
//! `Outage::state` and `Outage::away`, each alone; never held across I/O.

mod outage;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::holes::Holes;
use crate::name::ImageName;
use crate::needs::Needs;
use crate::refs::Image;
use crate::retention::RetentionRoot;
use crate::retrying::outage::{Outage, as_ms};
use crate::store::{Check, Listed, Object, Patch, Pin, Publication, Removed, Store, Traffic};
use crate::waiting::Waiting;

/// How long attempts to open a version fail at once after the store could not be reached. Opening a version
/// reads several files, one after the other.
const AWAY_FOR: Duration = Duration::from_secs(3);

/// A store whose reads wait.
pub struct RetryingStore<S> {
    below: S,
    outage: Arc<Outage>,
}

impl<S: Store + Clone> RetryingStore<S> {
    /// Wraps `below` so that its reads wait.
    pub fn new(below: S) -> Self {
        let outage = Arc::new(Outage::new(below.shown()));
        Self { below, outage }
    }

    fn opening<T>(&self, ask: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
        let away = self.outage.away.lock().clone();
        if let Some((since, why)) = away.filter(|(since, _)| since.elapsed() < AWAY_FOR) {
            tracing::debug!(
                ago_ms = as_ms(since.elapsed()),
                "opening fails at once: the store could not be reached a moment ago"
            );
            return Err(why);
        }
        let began = Instant::now();
        let outcome = ask();
        // An attempt that fails quickly costs little to repeat.
        let is_away =
            |e: &&StoreError| e.kind() == StoreErrorKind::Unreachable && began.elapsed() >= AWAY_FOR;
        let why = outcome.as_ref().err().filter(is_away);
        *self.outage.away.lock() = why.map(|why| (Instant::now(), why.clone()));
        outcome
    }

    fn retrying(&self, object: Arc<dyn Object>) -> Arc<dyn Object> {
        Arc::new(RetryingObject { object, outage: Arc::clone(&self.outage) })
    }
}

impl<S: Store + Clone> Store for RetryingStore<S> {
    fn chunk_bytes(&self) -> u32 {
        self.below.chunk_bytes()
    }

    fn is_remote(&self) -> bool {
        self.below.is_remote()
    }

    fn is_read_only(&self) -> bool {
        self.below.is_read_only()
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(self.outage.traffic())
    }

    fn close(&self) {
        self.outage.close();
        self.below.close();
    }

    fn fail_fast(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(self.below.clone()))
    }

    fn with_short_timeout(&self) -> Option<Arc<dyn Store>> {
        self.below.with_short_timeout().or_else(|| self.fail_fast())
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.below.images()
    }

    fn listed(&self) -> Result<Listed, StoreError> {
        self.below.listed()
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        self.below.image(name)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.opening(|| self.below.manifest(id))
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        Ok(self.retrying(self.below.open_object(id)?))
    }

    fn open_object_of(&self, id: Hash, len_bytes: u64) -> Result<Arc<dyn Object>, StoreError> {
        Ok(self.retrying(self.below.open_object_of(id, len_bytes)?))
    }

    fn trace(&self, manifest: Hash) -> Result<Option<Vec<u8>>, StoreError> {
        self.opening(|| self.below.trace(manifest))
    }

    fn set_trace(&self, manifest: Hash, trace: Option<&[u8]>) -> Result<(), StoreError> {
        self.below.set_trace(manifest, trace)
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.opening(|| self.below.pin(manifest))
    }

    fn pin_later(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.below.pin_later(manifest)
    }

    fn keeps_roots(&self) -> bool {
        self.below.keeps_roots()
    }

    fn retain(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        self.below.retain(root)
    }

    fn release(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        self.below.release(root)
    }

    fn roots_of(&self, daemon: &str) -> Result<Vec<RetentionRoot>, StoreError> {
        self.below.roots_of(daemon)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        self.below.publish()
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.below.change(name, change)
    }

    fn shown(&self) -> String {
        self.below.shown()
    }

    fn stored_bytes(&self) -> Result<u64, StoreError> {
        self.below.stored_bytes()
    }

    fn repair_object(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        self.below.repair_object(object, patches)
    }

    fn repair_manifest(&self, id: Hash, bytes: &[u8]) -> Result<(), StoreError> {
        self.below.repair_manifest(id, bytes)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.below.remove(name, number)
    }

    fn remove_unless_promoted(&self, name: &ImageName) -> Result<Removed, StoreError> {
        self.below.remove_unless_promoted(name)
    }

    fn reclaim_left(&self) -> Result<u64, StoreError> {
        self.below.reclaim_left()
    }

    fn trim(&self, needs: &dyn Needs) -> Result<u64, StoreError> {
        self.below.trim(needs)
    }
}

struct RetryingObject {
    object: Arc<dyn Object>,
    outage: Arc<Outage>,
}

impl RetryingObject {
    /// Reads the holes, and waits like a read. If the store below knows the holes without a request, that
    /// does not count as an answer.
    fn holes_when_there(
        &self,
        ask: &dyn Fn() -> Result<Arc<Holes>, StoreError>,
    ) -> Result<Arc<Holes>, StoreError> {
        let mut holes = ask();
        if holes.as_ref().is_err_and(|e| e.kind() == StoreErrorKind::Unreachable) {
            self.outage.read(0, &mut || {
                holes = ask();
                holes.as_ref().map(|_| ()).map_err(Clone::clone)
            })?;
        }
        holes
    }
}

impl Object for RetryingObject {
    fn id(&self) -> Hash {
        self.object.id()
    }

    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.read_checked(offset, into, &mut |_| Ok(()))
    }

    fn read_checked(&self, offset: u64, into: &mut [u8], check: &mut Check<'_>) -> Result<(), StoreError> {
        let len = u64::try_from(into.len()).unwrap_or(u64::MAX);
        self.outage.read(len, &mut || self.object.read_checked(offset, into, check))
    }

    fn read_or_wait(
        &self,
        offset: u64,
        into: &mut [u8],
        check: &mut Check<'_>,
        waiting: &mut Waiting,
    ) -> Result<bool, StoreError> {
        let len = u64::try_from(into.len()).unwrap_or(u64::MAX);
        self.outage
            .read_or_wait(len, waiting, &mut |below| self.object.read_or_wait(offset, into, check, below))
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        self.holes_when_there(&|| self.object.holes())
    }

    fn holes_uncached(&self) -> Result<Arc<Holes>, StoreError> {
        self.holes_when_there(&|| self.object.holes_uncached())
    }

    fn was_wrong(&self) -> bool {
        self.object.was_wrong()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;
    use crate::holes::{Needed, plan_holes};

    /// A test object that may be away and may have wrong bytes.
    #[derive(Default)]
    struct Fickle {
        gone: AtomicBool,
        holes: Holes,
        missing: AtomicBool,
        refused: AtomicBool,
        asked: AtomicU64,
    }

    impl Object for Fickle {
        fn id(&self) -> Hash {
            Hash::of(b"x")
        }

        fn len_bytes(&self) -> u64 {
            1
        }

        fn read_range(&self, _: u64, into: &mut [u8]) -> Result<(), StoreError> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            if self.gone.load(Ordering::SeqCst) {
                return Err(StoreError::new(StoreErrorKind::Unreachable, "connection refused"));
            }
            if self.missing.load(Ordering::SeqCst) {
                return Err(StoreError::new(StoreErrorKind::NotFound, "no such key"));
            }
            if self.refused.load(Ordering::SeqCst) {
                return Err(StoreError::new(StoreErrorKind::Io, "access denied"));
            }
            into.fill(b'x');
            Ok(())
        }

        fn holes(&self) -> Result<Arc<Holes>, StoreError> {
            self.read_range(0, &mut [0]).map(|()| Arc::new(self.holes.clone()))
        }

        /// No holes: another copy has all of it.
        fn holes_uncached(&self) -> Result<Arc<Holes>, StoreError> {
            self.read_range(0, &mut [0]).map(|()| Arc::default())
        }
    }

    fn wait_until(mut done: impl FnMut() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn reads_wait_during_an_outage_and_end_when_the_store_closes() {
        let (below, outage) = (Arc::new(Fickle::default()), Arc::new(Outage::default()));
        let object = RetryingObject { object: below.clone(), outage: Arc::clone(&outage) };
        object.read_range(0, &mut [0]).unwrap();
        assert_eq!((outage.traffic().servers_up, outage.traffic().waits), (1, 0));
        below.gone.store(true, Ordering::SeqCst);
        std::thread::scope(|scope| {
            let readers = [0, 1].map(|_| scope.spawn(|| object.read_range(0, &mut [0])));
            wait_until(|| outage.traffic().waiting == 2);
            let traffic = outage.traffic();
            assert_eq!((traffic.servers_up, traffic.reasons.as_str()), (0, "connection refused"));
            below.gone.store(false, Ordering::SeqCst);
            readers.into_iter().for_each(|reader| reader.join().unwrap().unwrap());
        });
        let traffic = outage.traffic();
        assert_eq!((traffic.servers_up, traffic.waits, traffic.waiting), (1, 2, 0));
        assert_eq!((traffic.fetched_bytes, traffic.reasons.as_str()), (3, ""));

        below.gone.store(true, Ordering::SeqCst);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| object.read_range(0, &mut [0]));
            wait_until(|| outage.traffic().waiting == 1);
            outage.close();
            let error = reader.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Io);
            assert!(
                error.to_string().contains("closed during a read, which waited: connection refused"),
                "{error}"
            );
        });
    }

    #[test]
    fn hole_lists_are_waited_for() {
        let is_needed = Needed::of(8192);
        let made = plan_holes(&is_needed, &Holes::default(), &mut |_, into| {
            into.fill(0);
            Ok(())
        });
        let holes = made.unwrap().holes;
        assert_eq!(holes.bytes(), 4096);
        let below = Arc::new(Fickle { holes: holes.clone(), ..Fickle::default() });
        let outage = Arc::new(Outage::default());
        let object = RetryingObject { object: below.clone(), outage: Arc::clone(&outage) };
        let ask = |again: bool| if again { object.holes_uncached() } else { object.holes() };
        for (again, told) in [(false, holes), (true, Holes::default())] {
            assert_eq!(*ask(again).unwrap(), told);
            below.gone.store(true, Ordering::SeqCst);
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| ask(again));
                wait_until(|| outage.traffic().waiting == 1);
                below.gone.store(false, Ordering::SeqCst);
                assert_eq!(*reader.join().unwrap().unwrap(), told);
            });
        }
        below.refused.store(true, Ordering::SeqCst);
        assert_eq!(object.holes().unwrap_err().kind(), StoreErrorKind::Io);
        below.gone.store(true, Ordering::SeqCst);
        outage.close();
        for again in [false, true] {
            assert_eq!(ask(again).unwrap_err().kind(), StoreErrorKind::Io);
        }
        assert_eq!(outage.traffic().waits, 2);
    }

    #[test]
    fn answers_of_the_store_do_not_cause_a_wait() {
        let (below, outage) = (Arc::new(Fickle::default()), Arc::new(Outage::default()));
        let object = RetryingObject { object: below.clone(), outage: Arc::clone(&outage) };
        let mut refuse = |_: &[u8]| Err(StoreError::new(StoreErrorKind::Io, "not what was asked for"));
        assert!(object.read_checked(0, &mut [0], &mut refuse).is_err());
        below.missing.store(true, Ordering::SeqCst);
        assert_eq!(object.read_range(0, &mut [0]).unwrap_err().kind(), StoreErrorKind::NotFound);
        below.missing.store(false, Ordering::SeqCst);
        below.refused.store(true, Ordering::SeqCst);
        assert_eq!(object.read_range(0, &mut [0]).unwrap_err().kind(), StoreErrorKind::Io);
        assert_eq!(outage.traffic().waits, 0);
    }

    #[test]
    fn an_unavailable_part_keeps_its_pauses_despite_other_answers() {
        let (away, there, outage) =
            (Arc::new(Fickle::default()), Arc::new(Fickle::default()), Arc::new(Outage::default()));
        away.gone.store(true, Ordering::SeqCst);
        let of = |below: &Arc<Fickle>| RetryingObject { object: below.clone(), outage: Arc::clone(&outage) };
        let (object, other) = (of(&away), of(&there));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| object.read_range(0, &mut [0]));
            wait_until(|| outage.traffic().waiting == 1);
            // During its pauses of 0.1, 0.2, 0.4 .. s it is tried four times, and once for the first answer.
            let mut answers = 0u64;
            while away.asked.load(Ordering::SeqCst) < 5 {
                other.read_range(0, &mut [0]).unwrap();
                answers += 1;
                let traffic = outage.traffic();
                assert_eq!((traffic.servers_up, traffic.reasons.as_str()), (0, "connection refused"));
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(answers > 20, "each of {answers} answers woke it");
            away.gone.store(false, Ordering::SeqCst);
            reader.join().unwrap().unwrap();
        });
        let traffic = outage.traffic();
        assert_eq!((traffic.servers_up, traffic.waits, traffic.waiting), (1, 1, 0));
    }

    #[test]
    fn a_read_waiting_without_a_thread_continues_after_the_outage() {
        let (below, there, outage) =
            (Arc::new(Fickle::default()), Arc::new(Fickle::default()), Arc::new(Outage::default()));
        let of = |below: &Arc<Fickle>| RetryingObject { object: below.clone(), outage: Arc::clone(&outage) };
        let (object, other) = (of(&below), of(&there));
        let read = |waiting: &mut Waiting| object.read_or_wait(0, &mut [0], &mut |_| Ok(()), waiting);
        let before = Instant::now();
        let mut waiting = Waiting::default();
        below.gone.store(true, Ordering::SeqCst);
        for asked in 1..4 {
            assert!(!read(&mut waiting).unwrap());
            assert_eq!(below.asked.load(Ordering::SeqCst), asked);
            let traffic = outage.traffic();
            assert_eq!((traffic.waiting, traffic.waits, traffic.servers_up), (1, 0, 0));
            assert!(!waiting.is_due(before) && waiting.is_due(before + Duration::from_secs(3600)));
        }
        // The first answer wakes it, but later answers do not, because the store is still away for it.
        other.read_range(0, &mut [0]).unwrap();
        assert!(waiting.is_due(before));
        assert!(!read(&mut waiting).unwrap());
        other.read_range(0, &mut [0]).unwrap();
        assert!(!waiting.is_due(before));
        below.gone.store(false, Ordering::SeqCst);
        assert!(read(&mut waiting).unwrap());
        let traffic = outage.traffic();
        assert_eq!((traffic.waiting, traffic.waits, traffic.fetched_bytes), (0, 1, 3));
        assert_eq!((traffic.requests, traffic.servers_up), (7, 1));

        below.gone.store(true, Ordering::SeqCst);
        assert!(!read(&mut waiting).unwrap() && outage.traffic().waiting == 1);
        drop(std::mem::take(&mut waiting));
        assert_eq!(outage.traffic().waiting, 0, "the read was cancelled");
        assert!(!read(&mut waiting).unwrap() && !waiting.is_due(before));
        outage.close();
        assert!(waiting.is_due(before));
        assert_eq!(read(&mut waiting).unwrap_err().kind(), StoreErrorKind::Io);
    }
}
