//! Disks that are kept, in SQLite.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{FromRow, Row as _, SqliteConnection};
use uuid::Uuid;

use crate::error::DbError;
use crate::record::{PersistentDisk, Purpose};
use crate::repository::PersistentDiskRepository;
use crate::sqlite::{added, loaded, stored};

pub(super) struct SqlitePersistentDisks<'a> {
    pub(super) connection: &'a mut SqliteConnection,
}

struct Row {
    id: String,
    machine: String,
    purpose: String,
    image: String,
    version: i64,
    hash: String,
    author: String,
    created_at_ms: i64,
    is_begun: bool,
}

impl FromRow<'_, SqliteRow> for Row {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            machine: row.try_get("machine")?,
            purpose: row.try_get("purpose")?,
            image: row.try_get("image")?,
            version: row.try_get("version")?,
            hash: row.try_get("hash")?,
            author: row.try_get("author")?,
            created_at_ms: row.try_get("created_at_ms")?,
            is_begun: row.try_get("is_begun")?,
        })
    }
}

impl TryFrom<Row> for PersistentDisk {
    type Error = DbError;

    fn try_from(row: Row) -> Result<Self, DbError> {
        let unreadable = |column, found: &str| DbError::Unreadable { column, found: found.to_owned() };
        Ok(Self {
            id: Uuid::parse_str(&row.id).map_err(|_| unreadable("id", &row.id))?,
            machine: Uuid::parse_str(&row.machine).map_err(|_| unreadable("machine", &row.machine))?,
            purpose: Purpose::parse(&row.purpose).ok_or_else(|| unreadable("purpose", &row.purpose))?,
            image: row.image,
            version: loaded(row.version),
            hash: row.hash,
            author: row.author,
            created_at_ms: loaded(row.created_at_ms),
            is_begun: row.is_begun,
        })
    }
}

#[async_trait]
impl PersistentDiskRepository for SqlitePersistentDisks<'_> {
    async fn add(&mut self, disk: &PersistentDisk) -> Result<(), DbError> {
        let outcome = sqlx::query(
            "INSERT INTO persistent_disks (id, machine, purpose, image, version, hash, author, created_at_ms, is_begun)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(disk.id.to_string())
        .bind(disk.machine.to_string())
        .bind(disk.purpose.name())
        .bind(&disk.image)
        .bind(stored(disk.version))
        .bind(&disk.hash)
        .bind(&disk.author)
        .bind(stored(disk.created_at_ms))
        .bind(disk.is_begun)
        .execute(&mut *self.connection)
        .await;
        added(outcome, || format!("a disk over '{}'", disk.below()))
    }

    async fn of_machine(&mut self, machine: Uuid) -> Result<Vec<PersistentDisk>, DbError> {
        let rows: Vec<Row> =
            sqlx::query_as("SELECT * FROM persistent_disks WHERE machine = ? ORDER BY purpose")
                .bind(machine.to_string())
                .fetch_all(&mut *self.connection)
                .await?;
        rows.into_iter().map(PersistentDisk::try_from).collect()
    }

    async fn session_of(&mut self, image: &str) -> Result<Option<PersistentDisk>, DbError> {
        let row: Option<Row> =
            sqlx::query_as("SELECT * FROM persistent_disks WHERE image = ? AND purpose = 'edit'")
                .bind(image)
                .fetch_optional(&mut *self.connection)
                .await?;
        row.map(PersistentDisk::try_from).transpose()
    }

    async fn list(&mut self) -> Result<Vec<PersistentDisk>, DbError> {
        let rows: Vec<Row> = sqlx::query_as("SELECT * FROM persistent_disks ORDER BY created_at_ms, id")
            .fetch_all(&mut *self.connection)
            .await?;
        rows.into_iter().map(PersistentDisk::try_from).collect()
    }

    async fn begun(&mut self, id: Uuid) -> Result<(), DbError> {
        sqlx::query("UPDATE persistent_disks SET is_begun = 1 WHERE id = ?")
            .bind(id.to_string())
            .execute(&mut *self.connection)
            .await?;
        Ok(())
    }

    async fn remove(&mut self, id: Uuid) -> Result<bool, DbError> {
        let done = sqlx::query("DELETE FROM persistent_disks WHERE id = ?")
            .bind(id.to_string())
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }
}
