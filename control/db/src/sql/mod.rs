//! The statements of all tables, written once for both databases, and the unit of work that runs them.
//!
//! A statement is plain SQL that SQLite and PostgreSQL accept with the same meaning. What differs (how a unit begins and ends, what an error means) is in
//! `sqlite/` and `postgres/`.

mod catalogs;
mod claims;
mod clouds;
mod events;
mod filter;
mod hardware;
mod hosts;
mod keys;
mod machines;
mod persistent_disks;
mod personality;
mod runs;
mod secrets;
mod sessions;
mod statement;
mod tasks;
mod tokens;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;

use crate::error::DbError;
use crate::postgres::PostgresUnit;
use crate::repository::{
    CatalogRepository, ClaimRepository, CloudRepository, EventRepository, HostRepository, KeyRepository,
    MachineRepository, PersistentDiskRepository, PersonalityRepository, Repository, RunRepository,
    SessionRepository, TaskRepository, TokenRepository,
};
use crate::secrets::KeySlot;
use crate::sql::statement::Insert;
pub(crate) use crate::sql::statement::{Row, Statement, Value};
use crate::sqlite::SqliteUnit;

/// A transaction of one of the databases.
pub(crate) enum Transaction {
    Sqlite(SqliteUnit),
    Postgres(Box<PostgresUnit>),
}

/// A unit of work. Each statement runs through [`Unit::run`] or [`Unit::rows`]. Once a statement has failed, the unit is
/// not saved: PostgreSQL would roll the transaction back, but report success.
pub(crate) struct Unit {
    transaction: Transaction,
    /// A statement failed, or its future was dropped.
    has_failed: bool,
    /// Data was removed that may be secret, so the commit must leave no copy of it in SQLite's WAL.
    has_removed: bool,
    /// The key of the secrets.
    key: KeySlot,
    /// The number of commits that succeeded or may have succeeded. By this number, readers notice that the database changed.
    saved: Arc<AtomicU64>,
}

impl Unit {
    pub(crate) fn new(transaction: Transaction, key: &KeySlot, saved: &Arc<AtomicU64>) -> Self {
        let (key, saved) = (key.clone(), Arc::clone(saved));
        Self { transaction, has_failed: false, has_removed: false, key, saved }
    }

    /// Runs a statement, and returns the number of rows that it changed.
    async fn run(&mut self, statement: Statement) -> Result<u64, DbError> {
        let was_failed = std::mem::replace(&mut self.has_failed, true);
        let changed = match &mut self.transaction {
            Transaction::Sqlite(unit) => unit.run(statement).await?,
            Transaction::Postgres(unit) => unit.run(statement).await?,
        };
        self.has_failed = was_failed;
        Ok(changed)
    }

    /// Returns the rows of a statement.
    async fn rows(&mut self, statement: Statement) -> Result<Vec<Row>, DbError> {
        let was_failed = std::mem::replace(&mut self.has_failed, true);
        let rows = match &mut self.transaction {
            Transaction::Sqlite(unit) => unit.rows(statement).await?,
            Transaction::Postgres(unit) => unit.rows(statement).await?,
        };
        self.has_failed = was_failed;
        Ok(rows)
    }

    /// Returns the rows of a statement, each converted.
    async fn all<T>(
        &mut self,
        statement: Statement,
        record: impl Fn(&Row) -> Result<T, DbError>,
    ) -> Result<Vec<T>, DbError> {
        self.rows(statement).await?.iter().map(record).collect()
    }

    /// The first row, if there is one.
    async fn row(&mut self, statement: Statement) -> Result<Option<Row>, DbError> {
        Ok(self.rows(statement).await?.into_iter().next())
    }

    /// The number that a statement returns.
    async fn number(&mut self, statement: Statement, column: &'static str) -> Result<i64, DbError> {
        let row = self.row(statement).await?;
        row.map_or(Err(DbError::Failed(sqlx::Error::RowNotFound)), |row| row.get(column))
    }

    /// Whether a statement changed a row.
    async fn changes_one(&mut self, statement: Statement) -> Result<bool, DbError> {
        Ok(self.run(statement).await? == 1)
    }

    /// Adds a row whose keys must be new. The unit can continue after `Taken` (an error in PostgreSQL would end it).
    async fn add(&mut self, insert: Insert, what: impl FnOnce() -> String) -> Result<(), DbError> {
        match self.run(insert.statement("ON CONFLICT DO NOTHING")).await? {
            0 => Err(DbError::Taken { what: what() }),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl Repository for Unit {
    fn machines(&mut self) -> Box<dyn MachineRepository + '_> {
        Box::new(machines::Machines(self))
    }

    fn hosts(&mut self) -> Box<dyn HostRepository + '_> {
        Box::new(hosts::Hosts(self))
    }

    fn catalogs(&mut self) -> Box<dyn CatalogRepository + '_> {
        Box::new(catalogs::Catalogs(self))
    }

    fn persistent_disks(&mut self) -> Box<dyn PersistentDiskRepository + '_> {
        Box::new(persistent_disks::PersistentDisks(self))
    }

    fn keys(&mut self) -> Box<dyn KeyRepository + '_> {
        Box::new(keys::Keys(self))
    }

    fn personality(&mut self) -> Box<dyn PersonalityRepository + '_> {
        Box::new(personality::Personalities(self))
    }

    fn claims(&mut self) -> Box<dyn ClaimRepository + '_> {
        Box::new(claims::Claims(self))
    }

    fn tokens(&mut self) -> Box<dyn TokenRepository + '_> {
        Box::new(tokens::Tokens(self))
    }

    fn sessions(&mut self) -> Box<dyn SessionRepository + '_> {
        Box::new(sessions::Sessions(self))
    }

    fn clouds(&mut self) -> Box<dyn CloudRepository + '_> {
        Box::new(clouds::Clouds(self))
    }

    fn runs(&mut self) -> Box<dyn RunRepository + '_> {
        Box::new(runs::Runs(self))
    }

    fn tasks(&mut self) -> Box<dyn TaskRepository + '_> {
        Box::new(tasks::Tasks(self))
    }

    fn events(&mut self) -> Box<dyn EventRepository + '_> {
        Box::new(events::Events(self))
    }

    async fn save(self: Box<Self>) -> Result<(), DbError> {
        let Self { transaction, has_failed, has_removed, saved, key: _ } = *self;
        if has_failed {
            return Err(DbError::StatementFailed);
        }
        let outcome = match transaction {
            Transaction::Sqlite(unit) => unit.save(has_removed).await,
            Transaction::Postgres(unit) => unit.save().await,
        };
        // This includes failures, because the commit may have succeeded.
        saved.fetch_add(1, Ordering::SeqCst);
        outcome
    }
}
