//! A read that waits for its store, and takes no thread meanwhile.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

type IsDue = Arc<dyn Fn(Instant) -> bool + Send + Sync>;

/// Who a read is for. A store that does only so much at a time leaves room for those that somebody waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadFor {
    /// Somebody who waits.
    #[default]
    Now,
    /// Somebody who will perhaps ask.
    Later,
    /// A copy, which nobody asks for.
    Copy,
}

/// How far a read has come that waits; see [`Object::read_or_wait`](crate::Object::read_or_wait). Dropping it gives the read up.
#[derive(Default)]
pub struct Waiting {
    state: Option<(Box<dyn Any + Send>, IsDue)>,
    read_for: ReadFor,
}

impl Waiting {
    /// Says who the read is for.
    pub fn set_read_for(&mut self, read_for: ReadFor) {
        self.read_for = read_for;
    }

    /// Who the read is for.
    pub fn read_for(&self) -> ReadFor {
        self.read_for
    }

    /// Whether the read is to go on: its store has changed, or it has waited long enough to look again.
    pub fn is_due(&self, now: Instant) -> bool {
        self.state.as_ref().is_none_or(|(_, is_due)| is_due(now))
    }

    /// Has the read wait, with what it needs to go on. `is_due` is asked often, and must not block.
    pub fn begin(
        &mut self,
        state: impl Any + Send,
        is_due: impl Fn(Instant) -> bool + Send + Sync + 'static,
    ) {
        self.state = Some((Box::new(state), Arc::new(is_due)));
    }

    /// [`Waiting::is_due`] for a read that waits with this one as a part of it.
    pub(crate) fn due(&self) -> impl Fn(Instant) -> bool + Send + Sync + use<> {
        let is_due = self.state.as_ref().map(|(_, is_due)| Arc::clone(is_due));
        move |now| is_due.as_ref().is_none_or(|is_due| is_due(now))
    }

    /// Whether the read waits.
    pub(crate) fn has_begun(&self) -> bool {
        self.state.is_some()
    }

    /// What the read needs to go on, where it has waited.
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
