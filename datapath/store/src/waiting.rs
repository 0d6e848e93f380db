//! The state of a read that waits for its store without occupying a thread.
//!
//! 1. The caller passes a [`Waiting`] to [`Object::read_or_wait`](crate::Object::read_or_wait).
//! 2. A store that has no bytes yet calls [`Waiting::begin`], and the call returns `false`.
//! 3. The caller polls [`Waiting::is_due`], and then repeats the call. The store gets its state back with
//!    [`Waiting::end`].
//!
//! Nothing wakes the caller.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

type IsDue = Arc<dyn Fn(Instant) -> bool + Send + Sync>;

/// The purpose of a read. A store with limited capacity reserves some of it for reads that a client waits
/// for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadFor {
    /// A client waits for the bytes.
    #[default]
    Now,
    /// A prediction: a client may request the bytes later.
    Later,
    /// A background copy of a whole version.
    Copy,
}

/// The progress of a waiting read; see [`Object::read_or_wait`](crate::Object::read_or_wait). Dropping it
/// cancels the read.
#[derive(Default)]
pub struct Waiting {
    state: Option<(Box<dyn Any + Send>, IsDue)>,
    read_for: ReadFor,
}

impl Waiting {
    /// Sets the purpose of the read.
    pub fn set_read_for(&mut self, read_for: ReadFor) {
        self.read_for = read_for;
    }

    /// The purpose of the read.
    pub fn read_for(&self) -> ReadFor {
        self.read_for
    }

    /// Whether to repeat the read: the state of its store has changed, or it has waited long enough to check
    /// again. True if the read does not wait.
    pub fn is_due(&self, now: Instant) -> bool {
        self.state.as_ref().is_none_or(|(_, is_due)| is_due(now))
    }

    /// Makes the read wait, and stores what it needs to continue. `is_due` is called often, and must not
    /// block.
    pub fn begin(
        &mut self,
        state: impl Any + Send,
        is_due: impl Fn(Instant) -> bool + Send + Sync + 'static,
    ) {
        self.state = Some((Box::new(state), Arc::new(is_due)));
    }

    /// [`Waiting::is_due`], for an outer read of which this one is a part.
    pub(crate) fn due(&self) -> impl Fn(Instant) -> bool + Send + Sync + use<> {
        let is_due = self.state.as_ref().map(|(_, is_due)| Arc::clone(is_due));
        move |now| is_due.as_ref().is_none_or(|is_due| is_due(now))
    }

    /// Whether the read waits.
    pub(crate) fn has_begun(&self) -> bool {
        self.state.is_some()
    }

    /// What the read needs to continue. `None` if it has not waited, or if its state has another type.
    pub fn end<T: Any>(&mut self) -> Option<T> {
        let (state, _) = self.state.take()?;
        state.downcast().ok().map(|state| *state)
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.state.is_some() { "Waiting(..)" } else { "Waiting(none)" })
    }
}
