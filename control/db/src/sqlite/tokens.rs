//! Named tokens in SQLite.

use async_trait::async_trait;
use headwater_api::Role;
use headwater_api::name::natural;
use sqlx::sqlite::SqliteRow;
use sqlx::{FromRow, Row as _, SqliteConnection};

use crate::error::DbError;
use crate::record::TokenRecord;
use crate::repository::TokenRepository;
use crate::sqlite::hardware::unreadable;
use crate::sqlite::{added, loaded, stored};

pub(super) struct SqliteTokens<'a> {
    pub(super) connection: &'a mut SqliteConnection,
}

struct Row {
    name: String,
    hash: String,
    role: String,
    created_by: String,
    created_at_ms: i64,
    expires_at_ms: Option<i64>,
}

impl FromRow<'_, SqliteRow> for Row {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            name: row.try_get("name")?,
            hash: row.try_get("hash")?,
            role: row.try_get("role")?,
            created_by: row.try_get("created_by")?,
            created_at_ms: row.try_get("created_at_ms")?,
            expires_at_ms: row.try_get("expires_at_ms")?,
        })
    }
}

impl TryFrom<Row> for TokenRecord {
    type Error = DbError;

    fn try_from(row: Row) -> Result<Self, DbError> {
        Ok(Self {
            role: Role::parse(&row.role).map_err(|_| unreadable("role", &row.role))?,
            name: row.name,
            hash: row.hash,
            created_by: row.created_by,
            created_at_ms: loaded(row.created_at_ms),
            expires_at_ms: row.expires_at_ms.map(loaded),
        })
    }
}

#[async_trait]
impl TokenRepository for SqliteTokens<'_> {
    async fn add(&mut self, token: &TokenRecord) -> Result<(), DbError> {
        let outcome = sqlx::query(
            "INSERT INTO tokens (name, hash, role, created_by, created_at_ms, expires_at_ms) VALUES (?, ?, ?, ?, ?, ?)",
        )
        .bind(&token.name)
        .bind(&token.hash)
        .bind(token.role.name())
        .bind(&token.created_by)
        .bind(stored(token.created_at_ms))
        .bind(token.expires_at_ms.map(stored))
        .execute(&mut *self.connection)
        .await;
        added(outcome, || format!("token '{}'", token.name))
    }

    async fn by_hash(&mut self, hash: &str) -> Result<Option<TokenRecord>, DbError> {
        let row: Option<Row> = sqlx::query_as("SELECT * FROM tokens WHERE hash = ?")
            .bind(hash)
            .fetch_optional(&mut *self.connection)
            .await?;
        row.map(TokenRecord::try_from).transpose()
    }

    async fn list(&mut self) -> Result<Vec<TokenRecord>, DbError> {
        let rows: Vec<Row> = sqlx::query_as("SELECT * FROM tokens").fetch_all(&mut *self.connection).await?;
        let records: Result<Vec<_>, _> = rows.into_iter().map(TokenRecord::try_from).collect();
        let mut records = records?;
        records.sort_by(|a, b| natural(&a.name, &b.name));
        Ok(records)
    }

    async fn remove(&mut self, name: &str) -> Result<bool, DbError> {
        let done = sqlx::query("DELETE FROM tokens WHERE name = ?")
            .bind(name)
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }
}
