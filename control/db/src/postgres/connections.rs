//! Connections to PostgreSQL: a pool of idle connections, and the transactions (units of work) on them.
//!
//! sqlx's own pool is not used: it retries until a timeout and then does not say why it failed, and it hands a broken
//! connection to the next user.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, ConnectOptions as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::DbError;
use crate::postgres::failure;
use crate::postgres::place::Place;
use crate::sql::{Row, Statement};

/// Timeout of a new connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of an answer. The server's own timeout is shorter.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(70);

/// Timeout of the first answer on a connection that was idle.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// The most concurrent readers; further readers wait.
const MAX_READERS: usize = 8;

/// The connections to a database.
pub(super) struct Connections {
    pub(super) place: Place,
    idle: Mutex<Vec<PgConnection>>,
    readers: Arc<Semaphore>,
    /// Serialises writers, so that they wait here instead of at the server, each with a connection.
    writer: Arc<Semaphore>,
    /// The time and the cause of the last failure.
    away: Mutex<Option<(Instant, String)>>,
    /// The last use failed. The log then reports the failure once, and the recovery once.
    is_away: AtomicBool,
}

impl Connections {
    pub(super) fn new(place: Place) -> Self {
        Self {
            place,
            idle: Mutex::default(),
            readers: Arc::new(Semaphore::new(MAX_READERS)),
            writer: Arc::new(Semaphore::new(1)),
            away: Mutex::default(),
            is_away: AtomicBool::new(false),
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<PgConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new connection.
    pub(super) async fn connect(&self) -> Result<PgConnection, DbError> {
        let connecting = self.place.options().connect();
        match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(connected) => connected.map_err(|error| failure::of_connection(&self.place, error)),
            Err(_) => Err(self.is_away(format!("it does not answer within {} s", CONNECT_TIMEOUT.as_secs()))),
        }
    }

    fn is_away(&self, why: String) -> DbError {
        DbError::Away { place: self.place.to_string(), why }
    }

    /// Begins a transaction with some statements. A writer waits for the other writers of this process, a reader for a free
    /// permit. Returns the number of rows that the statements returned.
    pub(super) async fn begin(
        self: &Arc<Self>,
        is_writer: bool,
        statements: String,
    ) -> Result<(PostgresUnit, usize), DbError> {
        let came = Instant::now();
        let places = if is_writer { &self.writer } else { &self.readers };
        let permit = Arc::clone(places).acquire_owned().await;
        let permit = permit.map_err(|_| self.is_away("the daemon ends".to_owned()))?;
        // The connection failed during the wait: all waiting writers fail at once, not one after another.
        if let Some((at, why)) = &*self.away.lock().unwrap_or_else(PoisonError::into_inner)
            && *at > came
        {
            return Err(self.is_away(why.clone()));
        }
        let begun = self.begin_now(permit, statements).await;
        if begun.is_ok() && self.is_away.swap(false, Ordering::Relaxed) {
            tracing::info!("the database {} can be used again", self.place);
        }
        if let Err(error @ DbError::Away { why, .. }) = &begun {
            if !self.is_away.swap(true, Ordering::Relaxed) {
                tracing::error!("{error}");
            }
            self.idle().clear();
            let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
            *away = Some((Instant::now(), why.clone()));
        }
        begun
    }

    async fn begin_now(
        self: &Arc<Self>,
        permit: OwnedSemaphorePermit,
        statements: String,
    ) -> Result<(PostgresUnit, usize), DbError> {
        let idle = self.idle().pop();
        let begun = match idle {
            // The server may have closed the idle connection, or a firewall may have dropped it: then there is no answer.
            Some(connection) => {
                let begun = self.begin_on(connection, statements.clone());
                match tokio::time::timeout(IDLE_TIMEOUT, begun).await {
                    Ok(Err(DbError::Away { .. })) => self.begin_on(self.connect().await?, statements).await,
                    Ok(begun) => begun,
                    Err(_) => {
                        self.idle().clear();
                        self.begin_on(self.connect().await?, statements).await
                    }
                }
            }
            None => self.begin_on(self.connect().await?, statements).await,
        };
        let (mut unit, rows) = begun?;
        unit.permit = Some(permit);
        Ok((unit, rows))
    }

    async fn begin_on(
        self: &Arc<Self>,
        connection: PgConnection,
        statements: String,
    ) -> Result<(PostgresUnit, usize), DbError> {
        let connections = Arc::clone(self);
        let mut unit =
            PostgresUnit { connection: Some(connection), connections, is_broken: true, permit: None };
        let rows = unit.begin(statements).await?;
        Ok((unit, rows))
    }

    /// Closes all connections; later units of work fail.
    pub(super) async fn close(&self) {
        use sqlx::Connection as _;

        self.readers.close();
        self.writer.close();
        let idle = std::mem::take(&mut *self.idle());
        for connection in idle {
            let _ = tokio::time::timeout(CONNECT_TIMEOUT, connection.close()).await;
        }
    }
}

/// A transaction.
pub(crate) struct PostgresUnit {
    /// Is set until the unit is dropped.
    connection: Option<PgConnection>,
    connections: Arc<Connections>,
    /// A statement failed, or its future was dropped: the connection is closed and not reused.
    is_broken: bool,
    permit: Option<OwnedSemaphorePermit>,
}

impl PostgresUnit {
    /// Uses the connection, with a timeout.
    async fn with<'a, T, F>(&'a mut self, act: impl FnOnce(&'a mut PgConnection) -> F) -> Result<T, DbError>
    where
        F: Future<Output = Result<T, sqlx::Error>>,
    {
        let place = &self.connections.place;
        let Some(connection) = &mut self.connection else { return Err(DbError::StatementFailed) };
        self.is_broken = true;
        match tokio::time::timeout(ANSWER_TIMEOUT, act(connection)).await {
            Ok(Ok(done)) => {
                self.is_broken = false;
                Ok(done)
            }
            Ok(Err(error)) => Err(failure::of_statement(place, error)),
            Err(_) => Err(DbError::Away {
                place: place.to_string(),
                why: format!("it does not answer within {} s", ANSWER_TIMEOUT.as_secs()),
            }),
        }
    }

    async fn begin(&mut self, statements: String) -> Result<usize, DbError> {
        self.with(|connection| async {
            // The statements are constants of this crate, except for one number.
            Ok(sqlx::raw_sql(AssertSqlSafe(statements)).fetch_all(connection).await?.len())
        })
        .await
    }

    pub(crate) async fn run(&mut self, statement: Statement) -> Result<u64, DbError> {
        self.with(|connection| async { Ok(statement.postgres().execute(connection).await?.rows_affected()) })
            .await
    }

    pub(crate) async fn rows(&mut self, statement: Statement) -> Result<Vec<Row>, DbError> {
        let rows = self.with(|connection| statement.postgres().fetch_all(connection)).await?;
        Ok(rows.into_iter().map(Row::Postgres).collect())
    }

    pub(crate) async fn save(mut self) -> Result<(), DbError> {
        let saved = self.with(|connection| sqlx::raw_sql("COMMIT").execute(connection)).await;
        match saved {
            Ok(_) => {
                self.give_back();
                Ok(())
            }
            // The answer is lost, but the commit may have succeeded.
            Err(DbError::Away { place, why }) => Err(DbError::Unsure { place, why }),
            Err(e) => Err(e),
        }
    }

    /// Returns the connection to the idle ones after the transaction has ended.
    fn give_back(&mut self) {
        if let Some(connection) = self.connection.take()
            && !self.connections.writer.is_closed()
        {
            self.connections.idle().push(connection);
        }
    }
}

impl Drop for PostgresUnit {
    fn drop(&mut self) {
        // Dropping a connection closes it, and the server rolls back.
        if self.is_broken || self.connection.is_none() {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (connection, connections) = (self.connection.take(), Arc::clone(&self.connections));
        let permit = self.permit.take();
        runtime.spawn(async move {
            let mut unit = Self { connection, connections, is_broken: true, permit };
            if unit.with(|connection| sqlx::raw_sql("ROLLBACK").execute(connection)).await.is_ok() {
                unit.give_back();
            }
            unit.is_broken = true;
        });
    }
}
