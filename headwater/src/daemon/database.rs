//! The database of a daemon: the SQLite file of its data directory, or one in PostgreSQL that it alone changes.

use std::sync::Arc;

use headwater_api::{Problem, ProblemKind};
use headwater_db::postgres::{Holder, PostgresDatabase};
use headwater_db::sqlite::SqliteDatabase;
use headwater_db::{Database, DbError};
use tokio::task::JoinHandle;

use crate::adapters::retention::DaemonName;
use crate::data_dir::DataDir;
use crate::database::Shared;

/// An open database.
pub struct OpenDatabase {
    /// What the service uses.
    pub repository: Arc<dyn Database>,
    lease: Option<Lease>,
}

/// The lease on a database, and who renews it.
struct Lease {
    database: PostgresDatabase,
    keeper: JoinHandle<()>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl OpenDatabase {
    /// Opens the database of the data directory, or the one that was named. Another daemon's is refused.
    pub async fn open(data_dir: &DataDir, shared: Option<Shared>) -> anyhow::Result<Self> {
        let Some(Shared { place, taking }) = shared else {
            let repository = SqliteDatabase::open(&data_dir.database()).await?;
            return Ok(Self { repository: Arc::new(repository), lease: None });
        };
        let DaemonName { id, place: name } = DaemonName::here(data_dir.identity()?, data_dir.path());
        let holder = Holder { id, name: name.trim_start_matches("of ").to_owned() };
        let database = PostgresDatabase::open_for(place, &holder, taking).await.map_err(explained)?;
        let renewing = database.clone();
        let keeper = tokio::spawn(async move { renewing.keep_lease().await });
        let lease = Some(Lease { database: database.clone(), keeper });
        Ok(Self { repository: Arc::new(database), lease })
    }

    /// Closes it. A daemon that leaves no machine on gives it up for others.
    pub async fn close(self, leaves_machines_on: bool) {
        if let Some(lease) = &self.lease
            && !leaves_machines_on
            && let Err(error) = lease.database.end_lease().await
        {
            tracing::warn!("the database is not given up, and only this host's daemon can use it: {error}");
        }
        self.repository.close().await;
    }
}

/// With what to do about it.
fn explained(error: DbError) -> anyhow::Error {
    let advice = match &error {
        DbError::Held { left_s: 0, .. } => {
            "start that daemon again, or, if its host is gone for good, take the database over with --take-over-database"
        }
        DbError::Held { .. } => "stop that daemon first, or give this one another database",
        _ => return error.into(),
    };
    Problem::from_error(ProblemKind::Conflict, &error).advise(advice).into()
}
