//! What a panic on a thread that serves everybody costs: that turn, and not the thread. Whoever waited for the turn gets an
//! error, as what it held is dropped; all others go on.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::sync::UNDER_MODEL_CHECKER;

/// Runs one turn of a thread. `false`: it panicked, which is in the log.
///
/// Locks are given back on the way out, and what they guard may be half changed: callers give up what that may concern.
pub(crate) fn without_panic(whose: &str, turn: impl FnOnce()) -> bool {
    if UNDER_MODEL_CHECKER {
        // A panic is what the explorer looks for.
        turn();
        return true;
    }
    let survived = catch_unwind(AssertUnwindSafe(turn)).is_ok();
    if !survived {
        tracing::error!("{whose} panicked; it goes on, and what it was doing failed: please report this");
    }
    survived
}

/// What is to be done where something is dropped without having been answered: by a panic, or by a disk that never calls back.
pub(crate) struct UnlessAnswered(Option<Box<dyn FnOnce() + Send>>);

impl UnlessAnswered {
    pub(crate) fn new(undo: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(undo)))
    }

    /// With another undoing before it: both are done, or neither.
    pub(crate) fn after(mut self, undo: impl FnOnce() + Send + 'static) -> Self {
        // Not this one itself: it would do its part wherever it goes without being asked, and so where both were answered.
        let then = self.0.take();
        Self::new(move || {
            undo();
            if let Some(then) = then {
                then();
            }
        })
    }

    /// Nothing is left to be done.
    pub(crate) fn answered(mut self) {
        self.0 = None;
    }
}

impl Drop for UnlessAnswered {
    fn drop(&mut self) {
        if let Some(undo) = self.0.take() {
            undo();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::UnlessAnswered;

    #[test]
    fn what_is_answered_undoes_nothing_and_what_is_dropped_all_of_it() {
        let (tell, told) = mpsc::channel();
        let otherwise = || {
            let (first, then) = (tell.clone(), tell.clone());
            UnlessAnswered::new(move || then.send("then").unwrap())
                .after(move || first.send("first").unwrap())
        };
        otherwise().answered();
        assert_eq!(told.try_iter().count(), 0);
        drop(otherwise());
        assert!(told.try_iter().eq(["first", "then"]));
    }
}
