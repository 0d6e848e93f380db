//! For tests: the process ends between two stores, as seen by what outlives it.
//!
//! A test sets after how many stores that count its thread ends. There the thread unwinds, and no destructor on the way changes a
//! memory file or an overflow any more. In a program all this is nothing.

/// A store that counts follows: the thread may end here.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn point() {}

/// Whether the thread has ended, so that nothing it does is seen.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn is_dead() -> bool {
    false
}

#[cfg(all(test, not(feature = "shuttle")))]
pub(crate) use armed::{Ended, after, revive};
#[cfg(test)]
pub(crate) use armed::{is_dead, point};

#[cfg(test)]
mod armed {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
        static DEAD: Cell<bool> = const { Cell::new(false) };
    }

    /// What the thread unwinds with.
    #[derive(Debug)]
    pub(crate) struct Ended;

    #[cfg(not(feature = "shuttle"))]
    /// Ends this thread after so many points.
    pub(crate) fn after(points: u64) {
        LEFT.set(Some(points));
    }

    #[cfg(not(feature = "shuttle"))]
    /// The next process begins. How many points were left, if the last one did not end by them.
    pub(crate) fn revive() -> Option<u64> {
        DEAD.set(false);
        LEFT.take()
    }

    pub(crate) fn is_dead() -> bool {
        DEAD.get()
    }

    pub(crate) fn point() {
        match LEFT.get() {
            Some(0) => {
                LEFT.set(None);
                DEAD.set(true);
                std::panic::resume_unwind(Box::new(Ended));
            }
            Some(left) => LEFT.set(Some(left - 1)),
            None => {}
        }
    }
}
