//! Sessions of the web console in SQLite.

use async_trait::async_trait;
use headwater_api::Role;
use sqlx::sqlite::SqliteRow;
use sqlx::{FromRow, Row as _, SqliteConnection};

use crate::error::DbError;
use crate::record::SessionRecord;
use crate::repository::{KEPT_SESSIONS, SessionRepository};
use crate::sqlite::hardware::unreadable;
use crate::sqlite::{added, loaded, stored};

pub(super) struct SqliteSessions<'a> {
    pub(super) connection: &'a mut SqliteConnection,
}

struct Row {
    hash: String,
    principal: String,
    role: String,
    created_at_ms: i64,
    used_at_ms: i64,
}

impl FromRow<'_, SqliteRow> for Row {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            hash: row.try_get("hash")?,
            principal: row.try_get("principal")?,
            role: row.try_get("role")?,
            created_at_ms: row.try_get("created_at_ms")?,
            used_at_ms: row.try_get("used_at_ms")?,
        })
    }
}

impl TryFrom<Row> for SessionRecord {
    type Error = DbError;

    fn try_from(row: Row) -> Result<Self, DbError> {
        Ok(Self {
            role: Role::parse(&row.role).map_err(|_| unreadable("role", &row.role))?,
            hash: row.hash,
            principal: row.principal,
            created_at_ms: loaded(row.created_at_ms),
            used_at_ms: loaded(row.used_at_ms),
        })
    }
}

#[async_trait]
impl SessionRepository for SqliteSessions<'_> {
    async fn add(&mut self, session: &SessionRecord) -> Result<(), DbError> {
        let outcome = sqlx::query(
            "INSERT INTO sessions (hash, principal, role, created_at_ms, used_at_ms) VALUES (?, ?, ?, ?, ?)",
        )
        .bind(&session.hash)
        .bind(&session.principal)
        .bind(session.role.name())
        .bind(stored(session.created_at_ms))
        .bind(stored(session.used_at_ms))
        .execute(&mut *self.connection)
        .await;
        added(outcome, || "the session".to_owned())?;
        let excess = "DELETE FROM sessions WHERE hash NOT IN
            (SELECT hash FROM sessions ORDER BY used_at_ms DESC, rowid DESC LIMIT ?)";
        sqlx::query(excess).bind(KEPT_SESSIONS).execute(&mut *self.connection).await?;
        Ok(())
    }

    async fn by_hash(&mut self, hash: &str) -> Result<Option<SessionRecord>, DbError> {
        let row: Option<Row> = sqlx::query_as("SELECT * FROM sessions WHERE hash = ?")
            .bind(hash)
            .fetch_optional(&mut *self.connection)
            .await?;
        row.map(SessionRecord::try_from).transpose()
    }

    async fn used(&mut self, hash: &str, at_ms: u64) -> Result<(), DbError> {
        sqlx::query("UPDATE sessions SET used_at_ms = ? WHERE hash = ?")
            .bind(stored(at_ms))
            .bind(hash)
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }

    async fn remove(&mut self, hash: &str) -> Result<bool, DbError> {
        let done = sqlx::query("DELETE FROM sessions WHERE hash = ?")
            .bind(hash)
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn remove_ended(&mut self, created_ms: u64, used_ms: u64) -> Result<(), DbError> {
        sqlx::query("DELETE FROM sessions WHERE created_at_ms < ? OR used_at_ms < ?")
            .bind(stored(created_ms))
            .bind(stored(used_ms))
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }
}
