//! A read that waits for its store without using a thread.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

type IsDue = Arc<dyn Fn(Instant) -> bool + Send + Sync>;

/// Who a read is for. A store with limited capacity keeps some of it for reads that somebody waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadFor {
    /// A client that waits for it.
    #[default]
    Now,
    /// A prediction: a client may ask for it later.
    Later,
    /// A copy of a whole version in the background.
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
    /// Sets who the read is for.
    pub fn set_read_for(&mut self, read_for: ReadFor) {
        self.read_for = read_for;
    }

    /// Who the read is for.
    pub fn read_for(&self) -> ReadFor {
        self.read_for
    }

    /// Whether to repeat the read: its store has changed, or it has waited long enough to look again.
    pub fn is_due(&self, now: Instant) -> bool {
        self.state.as_ref().is_none_or(|(_, is_due)| is_due(now))
    }

    /// Makes the read wait, and keeps what it needs to continue. `is_due` is called often, and must not
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

    /// What the read needs to continue, if it has waited.
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
