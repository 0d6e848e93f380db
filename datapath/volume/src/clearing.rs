//! Executes long discards and zero writes one after another, on a thread of the volume.
//!
//! On its caller's thread, each would delay the caller's other requests; with a thread for each, a guest
//! could cause any number of threads.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

/// Clears a range and answers. If it is dropped instead, the answer is an error.
pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// The queue of ranges to clear. Its thread runs while the queue has entries.
#[derive(Default)]
pub(crate) struct Clearing(Mutex<State>);

#[derive(Default)]
struct State {
    /// As many entries as front-ends have requests in flight at most: each entry is a request.
    queue: VecDeque<Work>,
    has_thread: bool,
}

impl Clearing {
    /// Runs `work` after all earlier entries.
    pub(crate) fn push(self: &Arc<Self>, work: Work) {
        let mut state = self.0.lock();
        state.queue.push_back(work);
        if std::mem::replace(&mut state.has_thread, true) {
            return;
        }
        drop(state);
        let this = Arc::clone(self);
        let thread = std::thread::Builder::new().name("hw-clear".into()).spawn(move || this.run());
        if let Err(error) = thread {
            tracing::error!(%error, "cannot start a thread for long discards");
            let mut state = self.0.lock();
            state.has_thread = false;
            let refused = std::mem::take(&mut state.queue);
            drop(state);
            drop(refused);
        }
    }

    fn run(&self) {
        while let Some(work) = self.next() {
            // A panic drops the work, which answers its request with an error; the thread continues with the
            // next one.
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                tracing::error!(
                    "a long discard or zero write panicked, and its request failed: please report this"
                );
            }
        }
    }

    /// The next entry. If there is none, the thread ends, and the next push starts another one.
    fn next(&self) -> Option<Work> {
        let mut state = self.0.lock();
        let next = state.queue.pop_front();
        state.has_thread = next.is_some();
        next
    }
}
