//! Long discards and zero writes, one after another on a thread of the volume's own.
//!
//! Each would hold up its caller's other requests, and a thread for each would be as many as a guest asks for.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

/// Clears something and answers; where it is dropped instead, the answer is an error.
pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// What is to be cleared. The thread is there as long as there is something.
#[derive(Default)]
pub(crate) struct Clearing(Mutex<State>);

#[derive(Default)]
struct State {
    /// No longer than what front-ends have under way: each is a request.
    queue: VecDeque<Work>,
    has_thread: bool,
}

impl Clearing {
    /// Has `work` done after what is there already.
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
            tracing::error!(%error, "no thread for long discards");
            let mut state = self.0.lock();
            state.has_thread = false;
            let refused = std::mem::take(&mut state.queue);
            drop(state);
            drop(refused);
        }
    }

    fn run(&self) {
        while let Some(work) = self.next() {
            // One that fails by a bug has been answered with an error, and those behind it go on.
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                tracing::error!("a long discard failed by a bug");
            }
        }
    }

    /// Whoever adds something afterwards starts another thread.
    fn next(&self) -> Option<Work> {
        let mut state = self.0.lock();
        let next = state.queue.pop_front();
        state.has_thread = next.is_some();
        next
    }
}
