//! SQLite: one file, write-ahead log, one writer.

mod copy;
mod migrations;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::migrate::MigrateError;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{ConnectOptions as _, Connection as _, Sqlite};

use crate::error::DbError;
use crate::repository::{Database, Repository};
use crate::secrets::{KeySlot, Secrets, SecretsKey};
use crate::sql::{Row, Statement, Transaction, Unit};

pub use self::copy::{check, copy, known_format};

/// How long a statement waits for a lock that another process holds (a backup, a shell).
pub const BUSY_TIMEOUT_MS: u64 = 10_000;

/// How long a writer waits for the writers before it. There may be hundreds, each of which waits for the disk. A shorter
/// timeout would lose records of operations that were done.
pub const WRITER_TIMEOUT_MS: u64 = 3_600_000;

/// The most concurrent readers; further readers wait.
pub const MAX_READERS: u32 = 4;

/// A SQLite database file.
///
/// Writers use one connection in turn, and begin with `BEGIN IMMEDIATE`: a transaction that reads first and
/// writes later would otherwise fail with `SQLITE_BUSY` if another one wrote in between.
///
/// Removed data is overwritten, because machines have keys, and user data may contain passwords.
#[derive(Clone, Debug)]
pub struct SqliteDatabase {
    readers: SqlitePool,
    writer: SqlitePool,
    options: Arc<SqliteConnectOptions>,
    key: KeySlot,
    saved: Arc<AtomicU64>,
}

impl SqliteDatabase {
    /// Opens or creates the file and applies missing migrations.
    pub async fn open(path: &Path) -> Result<Self, DbError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| DbError::Open {
            path: path.display().to_string(),
            source,
        };
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // A machine's state must survive a power cut after an operation was answered.
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .pragma("secure_delete", "ON")
            .busy_timeout(Duration::from_millis(BUSY_TIMEOUT_MS));
        let turns = pool(1).acquire_timeout(Duration::from_millis(WRITER_TIMEOUT_MS));
        let writer = turns.connect_with(options.clone()).await.map_err(|e| failed(cause(e)))?;
        let all = migrations::all();
        if let Err(e) = all.run(&writer).await {
            let known = known_format();
            let path = path.display().to_string();
            return Err(match e {
                MigrateError::VersionMissing(change) if change > known => {
                    DbError::Newer { path, format: migrations::last(&writer).await?.unwrap_or(change), known }
                }
                MigrateError::VersionMissing(change) | MigrateError::VersionMismatch(change) => {
                    DbError::Foreign { path, change }
                }
                MigrateError::Execute(e) | MigrateError::ExecuteMigration(e, _) => failed(cause(e)),
                e => failed(Box::new(e)),
            });
        }
        let readers = pool(MAX_READERS).connect_with(options.clone()).await.map_err(|e| failed(cause(e)))?;
        let options = Arc::new(options);
        Ok(Self { readers, writer, options, key: KeySlot::default(), saved: Arc::default() })
    }

    fn unit(&self, transaction: sqlx::Transaction<'static, Sqlite>) -> Unit {
        let unit = SqliteUnit { transaction, options: Arc::clone(&self.options) };
        Unit::new(Transaction::Sqlite(unit), &self.key, &self.saved)
    }

    async fn write_unit(&self) -> Result<Unit, DbError> {
        Ok(self.unit(self.writer.begin_with("BEGIN IMMEDIATE").await?))
    }
}

/// Truncates the write-ahead log, which still contains removed data. Does not wait: while another connection reads or
/// writes, the data stays until the log is overwritten, or the database is closed.
async fn empty_log(options: &SqliteConnectOptions) {
    let at_once = options.clone().busy_timeout(Duration::ZERO);
    let Ok(mut connection) = at_once.connect().await else { return };
    let _ = sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").execute(&mut connection).await;
    let _ = connection.close().await;
}

/// The reason why a file could not be opened.
fn cause(error: sqlx::Error) -> Box<dyn std::error::Error + Send + Sync> {
    match DbError::from(error) {
        DbError::Failed(error) => Box::new(error),
        error => Box::new(error),
    }
}

/// If the disk is full or fails, SQLite ends a transaction by itself. sqlx then fails to roll it back, and counts the
/// transaction as open forever: such a connection cannot begin another transaction, and is replaced. This is checked when
/// a connection is taken from the pool, because the rollback of a dropped transaction is only queued when the connection
/// is returned.
///
/// No connection is closed for its age: with the last one SQLite removes files that the next connection needs disk space to
/// create. On a full disk, reads must still work, so that users find out how to free space.
fn pool(max_connections: u32) -> SqlitePoolOptions {
    let pool =
        SqlitePoolOptions::new().max_connections(max_connections).idle_timeout(None).max_lifetime(None);
    pool.before_acquire(|connection, _| {
        let is_free = !connection.is_in_transaction();
        Box::pin(async move { Ok(is_free) })
    })
}

#[async_trait]
impl Database for SqliteDatabase {
    async fn read(&self) -> Result<Box<dyn Repository>, DbError> {
        Ok(Box::new(self.unit(self.readers.begin().await?)))
    }

    async fn write(&self) -> Result<Box<dyn Repository>, DbError> {
        Ok(Box::new(self.write_unit().await?))
    }

    fn revision(&self) -> u64 {
        self.saved.load(Ordering::SeqCst)
    }

    async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}

#[async_trait]
impl Secrets for SqliteDatabase {
    async fn has_key(&self) -> Result<bool, DbError> {
        self.unit(self.readers.begin().await?).has_key().await
    }

    async fn unlock(&self, key: SecretsKey) -> Result<(), DbError> {
        let mut unit = self.write_unit().await?;
        unit.take_key(&key, &self.options.get_filename().display().to_string()).await?;
        Box::new(unit).save().await?;
        self.key.set(key);
        Ok(())
    }

    async fn rotate(&self, new: &SecretsKey) -> Result<u64, DbError> {
        let mut unit = self.write_unit().await?;
        let count = unit.change_key(new).await?;
        Box::new(unit).save().await?;
        Ok(count)
    }
}

/// A transaction.
pub(crate) struct SqliteUnit {
    transaction: sqlx::Transaction<'static, Sqlite>,
    /// How the database is opened.
    options: Arc<SqliteConnectOptions>,
}

impl SqliteUnit {
    pub(crate) async fn run(&mut self, statement: Statement) -> Result<u64, DbError> {
        Ok(statement.sqlite().execute(&mut *self.transaction).await?.rows_affected())
    }

    pub(crate) async fn rows(&mut self, statement: Statement) -> Result<Vec<Row>, DbError> {
        let rows = statement.sqlite().fetch_all(&mut *self.transaction).await?;
        Ok(rows.into_iter().map(Row::Sqlite).collect())
    }

    pub(crate) async fn save(self, has_removed: bool) -> Result<(), DbError> {
        self.transaction.commit().await?;
        if has_removed {
            empty_log(&self.options).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::NewEvent;

    fn event(detail: &str) -> NewEvent {
        let (caller, subject) = ("uid 0".to_owned(), "daemon".to_owned());
        NewEvent { at_ms: 0, caller, subject, action: "test".into(), detail: detail.to_owned(), change: None }
    }

    #[tokio::test]
    async fn a_database_of_another_release_is_refused_in_words() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("headwater.db");
        let refused = async |changed: &'static str| {
            let db = SqliteDatabase::open(&path).await.unwrap();
            sqlx::query(changed).execute(&db.writer).await.unwrap();
            db.close().await;
            SqliteDatabase::open(&path).await.unwrap_err()
        };
        let known = migrations::all().iter().map(|migration| migration.version).max().unwrap();
        let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
             VALUES (1000, 'later', 1, x'00', 0), (1001, 'later still', 1, x'00', 0)";
        let newer = refused(newer).await;
        let told = format!("has format 1001; this release reads formats up to {known}: use the release");
        assert!(newer.to_string().contains(&told), "{newer}");
        let pool = pool(1).connect_with(SqliteConnectOptions::new().filename(&path)).await.unwrap();
        sqlx::query("DELETE FROM _sqlx_migrations WHERE version >= 1000").execute(&pool).await.unwrap();
        pool.close().await;
        let foreign = refused("UPDATE _sqlx_migrations SET checksum = x'00' WHERE version = 1").await;
        assert!(foreign.to_string().contains("migration 1 of the database"), "{foreign}");
    }

    #[tokio::test]
    async fn a_writer_waits_for_its_turn_however_slow_the_disk_is() {
        let dir = tempfile::tempdir().unwrap();
        let db = SqliteDatabase::open(&dir.path().join("headwater.db")).await.unwrap();
        let timeout = db.writer.options().get_acquire_timeout();
        // Hundreds of machines that stop at once need two synced writes each.
        assert!(timeout >= Duration::from_secs(600), "{timeout:?}");
    }

    #[tokio::test]
    async fn a_damaged_page_is_told_as_damage() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("headwater.db");
        let db = SqliteDatabase::open(&path).await.unwrap();
        let mut repo = db.write().await.unwrap();
        for _ in 0..400 {
            repo.events().append(event(&"x".repeat(1000))).await.unwrap();
        }
        repo.save().await.unwrap();
        db.close().await;
        // The pages before contain the list of tables.
        let mut bytes = std::fs::read(&path).unwrap();
        let half = bytes.len() / 2;
        bytes[half..].fill(0xa5);
        std::fs::write(&path, bytes).unwrap();
        let db = SqliteDatabase::open(&path).await.unwrap();
        let damaged = db.read().await.unwrap().events().newest(None, 100).await.unwrap_err();
        assert!(matches!(damaged, DbError::Damaged(_)), "{damaged:?}");
        assert!(damaged.to_string().contains("malformed"), "{damaged}");
    }

    #[tokio::test]
    async fn a_full_disk_is_got_over_when_there_is_space_again() {
        let dir = tempfile::tempdir().unwrap();
        let db = SqliteDatabase::open(&dir.path().join("headwater.db")).await.unwrap();
        // The database may not grow.
        sqlx::query("PRAGMA max_page_count = 1").execute(&db.writer).await.unwrap();
        let mut repo = db.write().await.unwrap();
        let full = repo.events().append(event(&"x".repeat(1 << 20))).await.unwrap_err();
        assert!(matches!(full, DbError::NoSpace(_)), "{full:?}");
        drop(repo);
        sqlx::query("PRAGMA max_page_count = 1000000").execute(&db.writer).await.unwrap();
        let mut repo = db.write().await.unwrap();
        repo.events().append(event("there is space again")).await.unwrap();
        repo.save().await.unwrap();
        let events = db.read().await.unwrap().events().newest(None, 9).await.unwrap();
        assert!(events.len() == 1 && events[0].detail == "there is space again", "{events:?}");
    }
}
