//! The history in SQLite.

use async_trait::async_trait;
use headwater_api::Event;
use sqlx::sqlite::SqliteRow;
use sqlx::{FromRow, Row as _, SqliteConnection};

use crate::error::DbError;
use crate::record::NewEvent;
use crate::repository::{EventRepository, KEPT_ACTIONS, KEPT_EVENTS};
use crate::sqlite::{loaded, stored};

/// How often old events are removed: at every so many new ones.
const PRUNE_INTERVAL: i64 = 1_000;

/// Old events: the daemon's own about machines, and the others where there are enough newer ones of these.
const PRUNE: &str = "DELETE FROM events WHERE id <= ?1 AND (
        (caller = 'daemon' AND subject LIKE 'machine %') OR id <= (
            SELECT id FROM events WHERE NOT (caller = 'daemon' AND subject LIKE 'machine %')
            ORDER BY id DESC LIMIT 1 OFFSET ?2))";

pub(super) struct SqliteEvents<'a> {
    pub(super) connection: &'a mut SqliteConnection,
}

struct Row {
    id: i64,
    at_ms: i64,
    caller: String,
    subject: String,
    action: String,
    detail: String,
}

impl FromRow<'_, SqliteRow> for Row {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            at_ms: row.try_get("at_ms")?,
            caller: row.try_get("caller")?,
            subject: row.try_get("subject")?,
            action: row.try_get("action")?,
            detail: row.try_get("detail")?,
        })
    }
}

impl From<Row> for Event {
    fn from(row: Row) -> Self {
        Self {
            id: row.id,
            at_ms: loaded(row.at_ms),
            caller: row.caller,
            subject: row.subject,
            action: row.action,
            detail: row.detail,
        }
    }
}

#[async_trait]
impl EventRepository for SqliteEvents<'_> {
    async fn append(&mut self, event: NewEvent) -> Result<(), DbError> {
        let added =
            sqlx::query("INSERT INTO events (at_ms, caller, subject, action, detail) VALUES (?, ?, ?, ?, ?)")
                .bind(stored(event.at_ms))
                .bind(event.caller)
                .bind(event.subject)
                .bind(event.action)
                .bind(event.detail)
                .execute(&mut *self.connection)
                .await?;
        // Numbers are given in order and never twice.
        let id = added.last_insert_rowid();
        if id % PRUNE_INTERVAL == 0 {
            sqlx::query(PRUNE)
                .bind(id.saturating_sub(KEPT_EVENTS))
                .bind(KEPT_ACTIONS)
                .execute(&mut *self.connection)
                .await?;
        }
        Ok(())
    }

    async fn older(&mut self, subject: Option<&str>, before: i64, limit: u32) -> Result<Vec<Event>, DbError> {
        let rows: Vec<Row> = sqlx::query_as(
            "SELECT id, at_ms, caller, subject, action, detail FROM events
             WHERE (?1 IS NULL OR subject = ?1) AND id < ?2 ORDER BY id DESC LIMIT ?3",
        )
        .bind(subject)
        .bind(before)
        .bind(i64::from(limit))
        .fetch_all(&mut *self.connection)
        .await?;
        Ok(rows.into_iter().map(Event::from).collect())
    }

    async fn newer(&mut self, subject: Option<&str>, after: i64, limit: u32) -> Result<Vec<Event>, DbError> {
        let rows: Vec<Row> = sqlx::query_as(
            "SELECT id, at_ms, caller, subject, action, detail FROM events
             WHERE (?1 IS NULL OR subject = ?1) AND id > ?2 ORDER BY id LIMIT ?3",
        )
        .bind(subject)
        .bind(after)
        .bind(i64::from(limit))
        .fetch_all(&mut *self.connection)
        .await?;
        Ok(rows.into_iter().map(Event::from).collect())
    }

    async fn any(&mut self, prefix: &str) -> Result<bool, DbError> {
        // From where the prefix is in the index on.
        let first: Option<String> =
            sqlx::query_scalar("SELECT subject FROM events WHERE subject >= ? ORDER BY subject LIMIT 1")
                .bind(prefix)
                .fetch_optional(&mut *self.connection)
                .await?;
        Ok(first.is_some_and(|subject| subject.starts_with(prefix)))
    }
}
