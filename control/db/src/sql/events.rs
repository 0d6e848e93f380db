//! The statements that add to the history and read it.

use std::sync::Once;

use async_trait::async_trait;
use headwater_api::{Change, Event, Filter, audit};

use crate::error::DbError;
use crate::record::NewEvent;
use crate::repository::{EventRepository, EventWindow, KEPT_ACTIONS, KEPT_EVENTS};
use crate::sql::Unit;
use crate::sql::filter::{Condition, EVENTS};
use crate::sql::statement::{Insert, Row, Statement};

/// Old events are removed each time this many were added.
const PRUNE_INTERVAL: i64 = 1_000;

/// Removes old events: those of the daemon about machines, and other events if there are enough newer ones.
const PRUNE: &str = "DELETE FROM events WHERE id <= $1 AND (
        (caller = 'daemon' AND subject LIKE 'machine %') OR id <= (
            SELECT id FROM events WHERE NOT (caller = 'daemon' AND subject LIKE 'machine %')
            ORDER BY id DESC LIMIT 1 OFFSET $2))";

/// The columns of an event.
const COLUMNS: &str = "id, at_ms, caller, subject, action, detail, change";

pub(super) struct Events<'a>(pub(super) &'a mut Unit);

/// Whether the log has the warning of an unreadable change. A list may have many.
static IS_UNREADABLE_LOGGED: Once = Once::new();

/// The change of an event. A damaged one must not hide the event, and with it a page of the history.
fn change(row: &Row, id: i64) -> Result<Option<Change>, DbError> {
    let text: Option<String> = row.get("change")?;
    let change = text.as_deref().and_then(Change::parse);
    if text.is_some() && change.is_none() {
        IS_UNREADABLE_LOGGED.call_once(|| {
            tracing::error!(
                event = id,
                "the values that an event changed cannot be read: such events are shown without them"
            );
        });
    }
    Ok(change)
}

fn event(row: &Row) -> Result<Event, DbError> {
    let id = row.get("id")?;
    Ok(Event {
        id,
        at_ms: row.number("at_ms")?,
        caller: row.get("caller")?,
        subject: row.get("subject")?,
        action: row.get("action")?,
        detail: row.get("detail")?,
        change: change(row, id)?,
    })
}

impl Events<'_> {
    /// Adds an event to the audit. There is one writer at a time, so the last event of the audit is the one before it.
    async fn chain(&mut self, event: &Event) -> Result<(), DbError> {
        let last = "SELECT chain FROM events WHERE chain IS NOT NULL ORDER BY id DESC LIMIT 1";
        let last = self.0.row(Statement::new(last)).await?;
        let last: Option<String> = last.map(|row| row.get("chain")).transpose()?;
        let hash = audit::hash(last.as_deref().unwrap_or(audit::BEGINNING), &audit::text_of(event));
        let set = Statement::new("UPDATE events SET chain = $1 WHERE id = $2").bind(hash).bind(event.id);
        self.0.run(set).await.map(drop)
    }
}

#[async_trait]
impl EventRepository for Events<'_> {
    async fn append(&mut self, event: NewEvent) -> Result<(), DbError> {
        let NewEvent { at_ms, caller, subject, action, detail, change } = event;
        let insert = Insert::into("events")
            .set("at_ms", at_ms)
            .set("caller", caller)
            .set("subject", subject)
            .set("action", &*action)
            .set("detail", detail)
            .set("change", &change.as_ref().map(Change::to_text));
        // Numbers ascend and are never reused. The hash is of the row as it was stored, which may differ from the event: a
        // database has a largest number, and may replace characters.
        let stored = self.0.row(insert.statement(&format!("RETURNING {COLUMNS}"))).await?;
        let stored = self::event(&stored.ok_or(DbError::Failed(sqlx::Error::RowNotFound))?)?;
        let id = stored.id;
        if audit::has(&stored.caller, &stored.subject) {
            self.chain(&stored).await?;
        }
        if id % PRUNE_INTERVAL == 0 {
            let prune = Statement::new(PRUNE).bind(id.saturating_sub(KEPT_EVENTS)).bind(KEPT_ACTIONS);
            self.0.run(prune).await?;
        }
        Ok(())
    }

    async fn audit(&mut self, after: i64, limit: u32) -> Result<Vec<(Event, String)>, DbError> {
        let lines = format!(
            "SELECT {COLUMNS}, chain FROM events WHERE chain IS NOT NULL AND id > $1 ORDER BY id LIMIT $2"
        );
        let lines = Statement::new(lines).bind(after).bind(limit);
        self.0.all(lines, |row| Ok((event(row)?, row.get("chain")?))).await
    }

    async fn page(
        &mut self,
        filter: &Filter,
        subject: Option<&str>,
        window: EventWindow,
        limit: u32,
    ) -> Result<Vec<Event>, DbError> {
        let mut condition = Condition::of(filter, &EVENTS, 0);
        // There are two texts, because PostgreSQL would not use the index of subjects for a combined one.
        if let Some(subject) = subject {
            condition = condition.and("subject = ?", vec![subject.into()]);
        }
        let (window, id, order) = match window {
            EventWindow::Before(id) => ("id < ?", id, "DESC"),
            EventWindow::After(id) => ("id > ?", id, "ASC"),
        };
        let mut condition = condition.and(window, vec![id.into()]);
        let limit = condition.value(limit);
        let page = format!(
            "SELECT {COLUMNS} FROM events WHERE {} ORDER BY id {order} LIMIT {limit}",
            condition.text
        );
        self.0.all(Statement::new(page).bind_all(condition.values), event).await
    }

    async fn any(&mut self, prefix: &str) -> Result<bool, DbError> {
        // The first entry of the index that is not before the prefix.
        let first = "SELECT subject FROM events WHERE subject >= $1 ORDER BY subject LIMIT 1";
        let first = self.0.row(Statement::new(first).bind(prefix)).await?;
        let subject: Option<String> = first.map(|row| row.get("subject")).transpose()?;
        Ok(subject.is_some_and(|subject| subject.starts_with(prefix)))
    }
}
