//! Claims in SQLite.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{FromRow, Row as _, SqliteConnection};
use uuid::Uuid;

use crate::error::DbError;
use crate::record::ClaimRecord;
use crate::repository::ClaimRepository;
use crate::sqlite::hardware::unreadable;
use crate::sqlite::{added, loaded, stored};

pub(super) struct SqliteClaims<'a> {
    pub(super) connection: &'a mut SqliteConnection,
}

struct Row {
    id: String,
    machine: String,
    holder: String,
    key: Option<String>,
    claimed_by: String,
    created_at_ms: i64,
    expires_at_ms: Option<i64>,
    ended: Option<String>,
}

impl FromRow<'_, SqliteRow> for Row {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            machine: row.try_get("machine")?,
            holder: row.try_get("holder")?,
            key: row.try_get("key")?,
            claimed_by: row.try_get("claimed_by")?,
            created_at_ms: row.try_get("created_at_ms")?,
            expires_at_ms: row.try_get("expires_at_ms")?,
            ended: row.try_get("ended")?,
        })
    }
}

impl TryFrom<Row> for ClaimRecord {
    type Error = DbError;

    fn try_from(row: Row) -> Result<Self, DbError> {
        Ok(Self {
            id: Uuid::parse_str(&row.id).map_err(|_| unreadable("id", &row.id))?,
            machine: Uuid::parse_str(&row.machine).map_err(|_| unreadable("machine", &row.machine))?,
            holder: row.holder,
            key: row.key,
            claimed_by: row.claimed_by,
            created_at_ms: loaded(row.created_at_ms),
            expires_at_ms: row.expires_at_ms.map(loaded),
            ended: row.ended,
        })
    }
}

#[async_trait]
impl ClaimRepository for SqliteClaims<'_> {
    async fn add(&mut self, claim: &ClaimRecord) -> Result<(), DbError> {
        let outcome = sqlx::query(
            "INSERT INTO claims (machine, id, holder, key, claimed_by, created_at_ms, expires_at_ms, ended)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(claim.machine.to_string())
        .bind(claim.id.to_string())
        .bind(&claim.holder)
        .bind(&claim.key)
        .bind(&claim.claimed_by)
        .bind(stored(claim.created_at_ms))
        .bind(claim.expires_at_ms.map(stored))
        .bind(&claim.ended)
        .execute(&mut *self.connection)
        .await;
        added(outcome, || format!("claim of machine {}", claim.machine))
    }

    async fn list(&mut self) -> Result<Vec<ClaimRecord>, DbError> {
        let rows: Vec<Row> = sqlx::query_as("SELECT * FROM claims ORDER BY created_at_ms, id")
            .fetch_all(&mut *self.connection)
            .await?;
        rows.into_iter().map(ClaimRecord::try_from).collect()
    }

    async fn end(&mut self, id: Uuid, why: &str) -> Result<bool, DbError> {
        let done = sqlx::query("UPDATE claims SET ended = ? WHERE id = ? AND ended IS NULL")
            .bind(why)
            .bind(id.to_string())
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn remove(&mut self, id: Uuid) -> Result<bool, DbError> {
        let done = sqlx::query("DELETE FROM claims WHERE id = ?")
            .bind(id.to_string())
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }
}
