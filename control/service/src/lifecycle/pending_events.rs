//! Events of what is done already, while the history cannot be written: they wait in memory, and follow as soon as it can be.
//!
//! A full disk, which alarms are often about, may be the database's too; and what was changed in the store, or run in a guest,
//! is no failure because it could not be noted.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use headwater_db::{DbError, NewEvent};

use crate::Service;
use crate::answer::problem;

/// Most events that wait.
const MAX_PENDING_EVENTS: usize = 256;

/// Events that are still to be written to the history, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct PendingEvents(Mutex<VecDeque<NewEvent>>);

impl PendingEvents {
    fn queue(&self) -> MutexGuard<'_, VecDeque<NewEvent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, event: NewEvent) {
        let mut queue = self.queue();
        if queue.len() < MAX_PENDING_EVENTS {
            queue.push_back(event);
        } else {
            let NewEvent { subject, action, .. } = event;
            tracing::error!(
                "not noted in the history, where {MAX_PENDING_EVENTS} events wait already: {subject}: {action}"
            );
        }
    }

    /// Takes all, so that nobody else writes them too.
    fn take(&self) -> Taken<'_> {
        Taken { from: self, events: std::mem::take(&mut *self.queue()) }
    }
}

/// Events that are being written: what is left here goes back.
struct Taken<'a> {
    from: &'a PendingEvents,
    events: VecDeque<NewEvent>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut queue = self.from.queue();
        self.events.append(&mut queue);
        let too_many = self.events.len().saturating_sub(MAX_PENDING_EVENTS);
        if too_many > 0 {
            tracing::error!(
                "{too_many} events are not noted in the history, where {MAX_PENDING_EVENTS} wait already"
            );
            self.events.truncate(MAX_PENDING_EVENTS);
        }
        *queue = std::mem::take(&mut self.events);
    }
}

impl Service {
    /// Notes what is done already: later, where the history cannot be written now.
    pub(crate) async fn note(&self, event: NewEvent) {
        if let Err(e) = self.append(event.clone()).await {
            tracing::error!(
                "cannot note now, and notes when the database can be written: {}: {} by {}: {}",
                event.subject,
                event.action,
                event.caller,
                problem(&e)
            );
            self.pending_events().add(event);
        }
    }

    /// Writes what waits.
    pub(crate) async fn write_pending_events(&self) -> Result<(), DbError> {
        let mut taken = self.pending_events().take();
        if taken.events.is_empty() {
            return Ok(());
        }
        let mut repo = self.db().write().await?;
        for event in &taken.events {
            repo.events().append(event.clone()).await?;
        }
        repo.save().await?;
        taken.events.clear();
        Ok(())
    }
}
