//! Events of changes that were made while the history could not be written. They wait in memory until it can be written, at most
//! [`MAX_PENDING_EVENTS`] of them. The service adds them, and writes them at its tick.
//!
//! When a disk is full, which alarms report, the database may be unable to write too. A change of the store, or a command that ran in a
//! guest, must not fail because its event could not be written.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use headwater_db::{DbError, NewEvent};

use crate::Service;
use crate::answer::problem;

/// The most events that wait.
const MAX_PENDING_EVENTS: usize = 256;

/// Events that wait to be written to the history, oldest first.
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
                "an event is lost, because {MAX_PENDING_EVENTS} events already wait to be written to the history: {subject}: {action}"
            );
        }
    }

    /// Takes all events, so that no other caller writes them too.
    fn take(&self) -> Taken<'_> {
        Taken { from: self, events: std::mem::take(&mut *self.queue()) }
    }
}

/// Events that are being written. On drop, the remaining ones go back to the queue.
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
                "{too_many} events are lost, because {MAX_PENDING_EVENTS} events already wait to be written to the history"
            );
            self.events.truncate(MAX_PENDING_EVENTS);
        }
        *queue = std::mem::take(&mut self.events);
    }
}

impl Service {
    /// Records an event of a change that was made. If the history cannot be written now, the event waits.
    pub(crate) async fn note(&self, event: NewEvent) {
        if let Err(e) = self.append(event.clone()).await {
            tracing::error!(
                "cannot write event '{}' of {} by {} to the history now; it is written later, unless too many events wait already: {}",
                event.action,
                event.subject,
                event.caller,
                problem(&e)
            );
            self.pending_events().add(event);
        }
    }

    /// Writes the events that wait.
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
