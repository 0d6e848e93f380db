//! For tests: ends a process between two stores, as far as the memory file and the overflow show it.
//!
//! A test sets the number of counted stores after which its thread ends. The thread then unwinds, and no
//! destructor changes the memory file or the overflow any more. Outside tests, all functions here are empty.

/// A counted store follows: the thread may end here.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn point() {}

/// Whether the thread has ended, so that its stores must have no effect.
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

    /// The panic's payload when the thread ends.
    #[derive(Debug)]
    pub(crate) struct Ended;

    #[cfg(not(feature = "shuttle"))]
    /// Ends this thread after this many counted stores.
    pub(crate) fn after(points: u64) {
        LEFT.set(Some(points));
    }

    #[cfg(not(feature = "shuttle"))]
    /// Starts the next process. Returns how many counted stores were left, if the last process did not end.
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
