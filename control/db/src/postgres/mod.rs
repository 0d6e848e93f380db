//! The daemon's database in PostgreSQL, a server that several hosts can reach: connections, migrations, the lease of one
//! daemon, and how a unit of work (a transaction) begins and ends. The statements are in `crate::sql`.
//!
//! # Units of work
//! - A writer first takes an advisory lock that all writers of the database take ([`WRITE`]), before it reads anything.
//!   The rows that it reads do not change until it ends, as with SQLite. So writers use `READ COMMITTED`: with
//!   `REPEATABLE READ`, the snapshot would be older than the lock.
//! - Because of that lock, the numbers of events are in the order of the commits: a reader that continues after the last
//!   number that it saw misses no event.
//! - A reader sees one state of the database.
//! - With a lease ([`PostgresDatabase::open_for`]), a writer's transaction begins only if no other daemon has taken the
//!   lease.
//! - A unit in which a statement failed is not saved, and returns [`DbError::StatementFailed`]: PostgreSQL reports success
//!   for the `COMMIT` of such a unit.

mod connections;
mod failure;
mod lease;
mod migrations;
mod place;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::migrate::MigrateError;
use sqlx::postgres::PgConnection;

use crate::error::DbError;
use crate::postgres::connections::Connections;
pub(crate) use crate::postgres::connections::PostgresUnit;
pub use crate::postgres::lease::{Holder, LEASE_S, RENEW_INTERVAL, Taking};
pub use crate::postgres::place::{Place, PlaceError};
use crate::repository::{Database, Repository};
use crate::secrets::{KeySlot, Secrets, SecretsKey};
use crate::sql::{Transaction, Unit};

/// The first statements of a writer. The number of the lock is `headwate` in ASCII.
const WRITE: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SELECT pg_advisory_xact_lock(7522525836719780965)";

/// The first statement of a reader.
const READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// Timeout of one renewal of the lease.
const RENEW_LIMIT: Duration = Duration::from_secs(10);

/// The oldest release of PostgreSQL that is supported: 13.
const OLDEST: i64 = 130_000;

/// A PostgreSQL database.
#[derive(Clone)]
pub struct PostgresDatabase {
    connections: Arc<Connections>,
    /// The fencing token of the lease, if it was taken: a number that grows each time that a daemon takes the lease.
    fence: Arc<Mutex<Option<i64>>>,
    key: KeySlot,
    saved: Arc<AtomicU64>,
}

impl PostgresDatabase {
    /// Connects and applies missing migrations. If the database cannot be used, nothing in it is changed.
    pub async fn open(place: Place) -> Result<Self, DbError> {
        Self::connect(place, None).await
    }

    /// Like [`PostgresDatabase::open`], but takes the lease. Fails if another daemon has it. Later writes fail if another
    /// daemon takes it.
    pub async fn open_for(place: Place, holder: &Holder, taking: Taking) -> Result<Self, DbError> {
        let opened = Self::connect(place, Some((holder, taking))).await?;
        let (mut unit, _) = opened.connections.begin(true, WRITE.to_owned()).await?;
        let fence = lease::take(&opened.connections.place, &mut unit, holder, taking).await?;
        unit.save().await?;
        *opened.fence() = Some(fence);
        Ok(opened)
    }

    async fn connect(place: Place, user: Option<(&Holder, Taking)>) -> Result<Self, DbError> {
        let connections = Connections::new(place);
        let mut connection = connections.connect().await?;
        is_usable(&connections.place, &mut connection).await?;
        if let Some((holder, taking)) = user {
            lease::look(&connections.place, &mut connection, holder, taking).await?;
        }
        migrate(&connections.place, &mut connection).await?;
        let connections = Arc::new(connections);
        Ok(Self { connections, fence: Arc::default(), key: KeySlot::default(), saved: Arc::default() })
    }

    /// Renews the lease until another daemon has it, or until the database could not be reached for `limit`. Returns the
    /// reason.
    pub async fn keep_lease(&self, limit: Option<Duration>) -> DbError {
        let mut renewed_at = Instant::now();
        let mut logged = None;
        loop {
            tokio::time::sleep(RENEW_INTERVAL).await;
            let renewed = async {
                let mut unit = self.begin_write().await?;
                lease::renew(&mut unit).await?;
                unit.save().await
            };
            let renewed = tokio::time::timeout(RENEW_LIMIT, renewed).await;
            let renewed = renewed.unwrap_or_else(|_| {
                let why = format!("it has not answered within {} s", RENEW_LIMIT.as_secs());
                Err(DbError::Away { place: self.connections.place.to_string(), why })
            });
            let error = match renewed {
                Ok(()) => {
                    (renewed_at, logged) = (Instant::now(), None);
                    continue;
                }
                Err(error @ DbError::Lost { .. }) => return error,
                Err(error) => error,
            };
            if limit.is_some_and(|limit| renewed_at.elapsed() > limit) {
                return error;
            }
            let text = error.to_string();
            // A failure that repeats is logged once.
            if logged.as_ref() != Some(&text) {
                tracing::warn!("cannot renew the lease on the database now (it is tried again): {text}");
                logged = Some(text);
            }
        }
    }

    /// Ends the lease: a daemon of another host may take it at once.
    pub async fn end_lease(&self) -> Result<(), DbError> {
        if self.fence().is_none() {
            return Ok(());
        }
        let mut unit = self.begin_write().await?;
        lease::end(&mut unit).await?;
        unit.save().await
    }

    fn fence(&self) -> MutexGuard<'_, Option<i64>> {
        self.fence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a writer's transaction, if the lease is still ours.
    async fn begin_write(&self) -> Result<PostgresUnit, DbError> {
        let fence = *self.fence();
        let Some(fence) = fence else { return Ok(self.connections.begin(true, WRITE.to_owned()).await?.0) };
        let begin = format!("{WRITE}; {}", lease::check(fence));
        let (mut unit, rows) = self.connections.begin(true, begin).await?;
        // One row is that of the lock, one that of the fence.
        if rows == 2 {
            return Ok(unit);
        }
        let name = lease::holder(&mut unit).await?;
        Err(DbError::Lost { place: self.connections.place.to_string(), name })
    }
}

impl std::fmt::Debug for PostgresDatabase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresDatabase").field("place", &self.connections.place).finish_non_exhaustive()
    }
}

/// Fails if the server is too old, read-only, or has another encoding than UTF-8.
async fn is_usable(place: &Place, connection: &mut PgConnection) -> Result<(), DbError> {
    let refused = |why: String| Err(DbError::Refused { place: place.to_string(), why });
    let found: (i64, bool, String) = sqlx::query_as(
        "SELECT current_setting('server_version_num')::bigint,
           pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean, current_setting('server_encoding')",
    )
    .fetch_one(connection)
    .await
    .map_err(|error| failure::of_statement(place, error))?;
    let (version, is_read_only, encoding) = found;
    if version < OLDEST {
        return refused(format!(
            "it is PostgreSQL {}, and the oldest that works is {}",
            version / 10_000,
            OLDEST / 10_000
        ));
    }
    if is_read_only {
        let why = "it is read-only: a standby, or one whose settings say so; name the primary server";
        return refused(why.to_owned());
    }
    if encoding != "UTF8" {
        return refused(format!(
            "its encoding is {encoding}: make one with 'createdb --encoding UTF8 --template template0'"
        ));
    }
    Ok(())
}

/// Applies missing migrations.
async fn migrate(place: &Place, connection: &mut PgConnection) -> Result<(), DbError> {
    let all = migrations::all();
    // Not `run`: the compiler does not see that its future can be sent to another thread.
    let Err(error) = all.run_direct(None, &mut *connection, false).await else { return Ok(()) };
    let known = all.iter().map(|migration| migration.version).max().unwrap_or(0);
    let path = place.to_string();
    Err(match error {
        MigrateError::VersionMissing(change) if change > known => {
            let last = migrations::last(connection).await;
            let last = last.map_err(|error| failure::of_statement(place, error))?;
            DbError::Newer { path, format: last.unwrap_or(change), known }
        }
        MigrateError::VersionMissing(change) | MigrateError::VersionMismatch(change) => {
            DbError::Foreign { path, change }
        }
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            match failure::of_statement(place, error) {
                DbError::Failed(source) => DbError::Open { path, source: Box::new(source) },
                error => error,
            }
        }
        error => DbError::Open { path, source: Box::new(error) },
    })
}

impl PostgresDatabase {
    fn unit(&self, unit: PostgresUnit) -> Unit {
        Unit::new(Transaction::Postgres(Box::new(unit)), &self.key, &self.saved)
    }

    async fn read_unit(&self) -> Result<Unit, DbError> {
        let (unit, _) = self.connections.begin(false, READ.to_owned()).await?;
        Ok(self.unit(unit))
    }

    async fn write_unit(&self) -> Result<Unit, DbError> {
        Ok(self.unit(self.begin_write().await?))
    }
}

#[async_trait]
impl Secrets for PostgresDatabase {
    async fn has_key(&self) -> Result<bool, DbError> {
        self.read_unit().await?.has_key().await
    }

    async fn unlock(&self, key: SecretsKey) -> Result<(), DbError> {
        let mut unit = self.write_unit().await?;
        unit.take_key(&key, &self.connections.place.to_string()).await?;
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

#[async_trait]
impl Database for PostgresDatabase {
    async fn read(&self) -> Result<Box<dyn Repository>, DbError> {
        Ok(Box::new(self.read_unit().await?))
    }

    async fn write(&self) -> Result<Box<dyn Repository>, DbError> {
        Ok(Box::new(self.write_unit().await?))
    }

    fn revision(&self) -> u64 {
        self.saved.load(Ordering::SeqCst)
    }

    async fn close(&self) {
        self.connections.close().await;
    }
}
