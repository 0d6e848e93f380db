//! Limits the damage of a panic on a thread that serves all caches: the present piece of work fails, and the
//! thread continues. Requests that wait for this work get an error, because it drops them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::sync::UNDER_MODEL_CHECKER;

/// Runs a piece of work of a thread. `false`: it panicked, which was logged.
///
/// Locks are released during the panic, and the data that they guard may be half changed: the caller has to
/// give up what may be affected.
pub(crate) fn without_panic(whose: &str, work: impl FnOnce()) -> bool {
    if UNDER_MODEL_CHECKER {
        // The model checker looks for panics, so it must see them.
        work();
        return true;
    }
    let survived = catch_unwind(AssertUnwindSafe(work)).is_ok();
    if !survived {
        tracing::error!("{whose} panicked; it continues, but its present work failed: please report this");
    }
    survived
}

/// A function that runs if this value is dropped without [`UnlessAnswered::answered`]: after a panic, or if a
/// disk never calls back.
pub(crate) struct UnlessAnswered(Option<Box<dyn FnOnce() + Send>>);

impl UnlessAnswered {
    pub(crate) fn new(undo: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(undo)))
    }

    /// Adds a function that runs before the present one: both run, or neither.
    pub(crate) fn after(mut self, undo: impl FnOnce() + Send + 'static) -> Self {
        // Not `self` itself: the closure would run it when it is dropped without being called, although both
        // were answered.
        let then = self.0.take();
        Self::new(move || {
            undo();
            if let Some(then) = then {
                then();
            }
        })
    }

    /// Drops the function without running it.
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
