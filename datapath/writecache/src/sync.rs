//! The locks and atomics of the write cache for which the order of steps of several threads matters. They are those of
//! parking_lot and std or, with the feature `shuttle`, those of the model checker shuttle. The checker runs one thread at a time, and chooses at
//! each lock and atomic which thread runs next.
//!
//! Only the types that `tests/schedules.rs` explores come from here. Counters and settings use std: they
//! order nothing, and each would double the number of schedules. The checker treats every ordering as
//! `SeqCst`, so it finds wrong orders of steps, not orderings that are too weak.

#[cfg(not(feature = "shuttle"))]
pub(crate) use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(not(feature = "shuttle"))]
pub(crate) use std::{
    sync::{atomic, mpsc},
    thread,
};

#[cfg(feature = "shuttle")]
pub(crate) use checked::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(feature = "shuttle")]
pub(crate) use shuttle::{
    sync::{atomic, mpsc},
    thread,
};

/// Whether the model checker runs this code: then segments of the write cache are tiny, and no thread waits for time to pass.
pub(crate) const UNDER_MODEL_CHECKER: bool = cfg!(feature = "shuttle");

#[cfg(all(feature = "shuttle", not(debug_assertions)))]
compile_error!(
    "the feature `shuttle` is for the tests in tests/schedules.rs, in the dev profile: it makes segments tiny"
);

/// Lets the model checker choose here which thread runs next.
#[inline(always)]
pub(crate) fn point() {
    #[cfg(feature = "shuttle")]
    atomic::AtomicBool::new(false).load(atomic::Ordering::SeqCst);
}

/// Lets the model checker choose whether something happens that depends on time.
#[inline(always)]
pub(crate) fn chance() -> bool {
    #[cfg(feature = "shuttle")]
    // tidy(no-clock): the model checker's own, which it replays with the schedule
    return shuttle::rand::Rng::gen_ratio(&mut shuttle::rand::thread_rng(), 1, 8);
    #[cfg(not(feature = "shuttle"))]
    false
}

/// parking_lot's API over the model checker's types. A thread that panics ends the test, so nothing is ever
/// poisoned.
#[cfg(feature = "shuttle")]
mod checked {
    use std::fmt;
    use std::ops::{Deref, DerefMut};
    use std::sync::PoisonError;
    use std::time::Duration;

    use shuttle::sync as checker;
    pub(crate) use shuttle::sync::{RwLockReadGuard, RwLockWriteGuard};

    /// Time stands still under the model checker: a `wait_for` of at most this time returns without a
    /// notification, and a longer one waits for a notification. So a lost notification is a deadlock here,
    /// although a later poll would repair it in production.
    const SHORT: Duration = Duration::from_millis(500);

    #[derive(Default)]
    pub(crate) struct Mutex<T>(checker::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T> {
        /// `None` only while a condition variable waits.
        guard: Option<checker::MutexGuard<'a, T>>,
        mutex: &'a Mutex<T>,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(checker::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard { guard: Some(self.inner()), mutex: self }
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }

        fn inner(&self) -> checker::MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl<T> fmt::Debug for Mutex<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Mutex(..)")
        }
    }

    #[expect(clippy::expect_used, reason = "only tests under the model checker run this")]
    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.guard.as_ref().expect("locked")
        }
    }

    #[expect(clippy::expect_used, reason = "only tests under the model checker run this")]
    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.guard.as_mut().expect("locked")
        }
    }

    #[derive(Default)]
    pub(crate) struct RwLock<T>(checker::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
            self.0.try_write().ok()
        }
    }

    pub(crate) struct Condvar(checker::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(checker::Condvar::new())
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let inner = guard.guard.take();
            guard.guard = inner.map(|inner| self.0.wait(inner).unwrap_or_else(PoisonError::into_inner));
        }

        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, limit: Duration) {
            if limit > SHORT {
                return self.wait(guard);
            }
            drop(guard.guard.take());
            shuttle::thread::yield_now();
            guard.guard = Some(guard.mutex.inner());
        }
    }
}
