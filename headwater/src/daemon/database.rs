//! Opens the daemon's database: the SQLite file of its data directory, or one in PostgreSQL, on which it takes a
//! lease.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_db::postgres::{Holder, Place, PostgresDatabase, Taking};
use headwater_db::sqlite::SqliteDatabase;
use headwater_db::{Database, DbError, Secrets};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::adapters::retention::DaemonName;
use crate::data_dir::DataDir;
use crate::database::{Shared, Usage};
use crate::fleet::authority::Authority;
use crate::secrets_key::SecretsKeyFile;

/// How often a daemon on standby checks whether the database is free.
const STANDBY_INTERVAL: Duration = Duration::from_millis(500);

/// How long the server must have answered before a lease counts as over, so that its holder had time to renew it.
const RENEWAL_TIME: Duration = Duration::from_secs(5);

/// How long one of several controllers continues without the database. After that another one may have it.
const AWAY_LIMIT: Duration = Duration::from_secs(30);

/// An open database.
pub struct OpenDatabase {
    /// The database, for the service.
    pub repository: Arc<dyn Database>,
    /// The secrets in it, which can be read.
    pub secrets: Arc<dyn Secrets>,
    lease: Option<Lease>,
}

/// The lease on a database, and the task that renews it.
struct Lease {
    database: PostgresDatabase,
    keeper: JoinHandle<()>,
    /// Whether other daemons wait for the lease.
    is_in_turn: bool,
    /// Why the lease was lost.
    lost: watch::Receiver<Option<String>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl OpenDatabase {
    /// Opens the database of the data directory, or the one that was named. Another daemon's is refused.
    pub async fn open(
        data_dir: &DataDir,
        shared: Option<Shared>,
        keys: &SecretsKeyFile,
    ) -> anyhow::Result<Self> {
        let name = shared.as_ref().map_or_else(|| OWN.to_owned(), |shared| shared.place.to_string());
        let former = Former::of(data_dir);
        former.allows(data_dir, &name)?;
        let opened = Self::open_this(data_dir, shared, keys).await?;
        former.replace(&name)?;
        Ok(opened)
    }

    async fn open_this(
        data_dir: &DataDir,
        shared: Option<Shared>,
        keys: &SecretsKeyFile,
    ) -> anyhow::Result<Self> {
        let Some(Shared { place, usage }) = shared else {
            let repository = SqliteDatabase::open(&data_dir.database()).await?;
            keys.unlock(&repository).await?;
            let repository = Arc::new(repository);
            return Ok(Self { secrets: repository.clone(), repository, lease: None });
        };
        let DaemonName { id, place: name } = DaemonName::here(data_dir.identity()?, data_dir.path());
        let holder = Holder { id, name: name.trim_start_matches("of ").to_owned() };
        let (database, limit) = match usage {
            Usage::Alone(taking) => {
                (PostgresDatabase::open_for(place, &holder, taking).await.map_err(explained)?, None)
            }
            Usage::InTurn => (wait_for(place, &holder).await.map_err(explained)?, Some(AWAY_LIMIT)),
        };
        if let Err(error) = keys.unlock(&database).await {
            // Only if others wait for it: a daemon that is alone may have left machines on, and another host must not take it over.
            if usage == Usage::InTurn
                && let Err(kept) = database.end_lease().await
            {
                tracing::warn!(
                    "cannot release the lease on the database, so other controllers wait until it expires: {kept}"
                );
            }
            return Err(error);
        }
        let renewing = database.clone();
        let (losing, lost) = watch::channel(None);
        let keeper = tokio::spawn(async move {
            let error = renewing.keep_lease(limit).await;
            losing.send_replace(Some(error.to_string()));
        });
        let lease =
            Some(Lease { database: database.clone(), keeper, is_in_turn: usage == Usage::InTurn, lost });
        let repository = Arc::new(database);
        Ok(Self { secrets: repository.clone(), repository, lease })
    }

    /// The database, if other controllers wait for it.
    pub fn shared(&self) -> Option<PostgresDatabase> {
        self.lease.as_ref().filter(|lease| lease.is_in_turn).map(|lease| lease.database.clone())
    }

    /// The identity of the owner of retention roots in a store: the data directory, or the database if several
    /// controllers share it.
    pub async fn identity(&self, data_dir: &DataDir) -> anyhow::Result<String> {
        match self.shared() {
            Some(_) => Ok(Authority::load_or_make(&*self.repository, String::new()).await?.identity()),
            None => data_dir.identity(),
        }
    }

    /// Waits until the lease is lost, and returns the reason.
    pub fn lost(&self) -> impl Future<Output = String> + Send + 'static {
        let lost = self.lease.as_ref().map(|lease| lease.lost.clone());
        async move {
            match lost {
                Some(mut lost) => {
                    let why = lost.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
                    match why {
                        Some(why) => why,
                        // The renewing task ended in order, together with the database.
                        None => std::future::pending().await,
                    }
                }
                None => std::future::pending().await,
            }
        }
    }

    /// Closes the database. Releases the lease if the daemon leaves no machine on, or is one of several controllers.
    pub async fn close(self, leaves_machines_on: bool) {
        if let Some(lease) = &self.lease
            && (lease.is_in_turn || !leaves_machines_on)
            && let Err(error) = lease.database.end_lease().await
        {
            tracing::warn!(
                "cannot release the lease on the database, so only this host's daemon can use it: {error}"
            );
        }
        self.repository.close().await;
    }
}

/// Waits until no other daemon has the lease, and takes it. Also waits for a server that does not answer.
///
/// After an outage of the server all leases are over. The daemon that has the database then gets time to renew its
/// lease.
async fn wait_for(place: Place, holder: &Holder) -> Result<PostgresDatabase, DbError> {
    let mut told = None;
    let mut answers_since: Option<Instant> = None;
    loop {
        let is_long = answers_since.is_some_and(|since| since.elapsed() > RENEWAL_TIME);
        let taking = if is_long { Taking::IfOver } else { Taking::IfFree };
        let opened = PostgresDatabase::open_for(place.clone(), holder, taking).await;
        answers_since = match &opened {
            Err(DbError::Held { .. }) => answers_since.or_else(|| Some(Instant::now())),
            _ => None,
        };
        let error = match opened {
            Ok(database) => return Ok(database),
            Err(error @ (DbError::Held { .. } | DbError::Away { .. })) => error,
            Err(error) => return Err(error),
        };
        let why = match &error {
            DbError::Held { name, .. } => format!("the daemon of {name} has the database"),
            other => other.to_string(),
        };
        if told.as_ref() != Some(&why) {
            tracing::info!("standing by: {why}");
            told = Some(why);
        }
        tokio::time::sleep(STANDBY_INTERVAL).await;
    }
}

/// The name of the data directory's SQLite file in `database.place`.
const OWN: &str = "SQLite";

/// The file `database.place` of a data directory, which names the database of its last daemon. A daemon removes disks
/// that its database does not know, so a daemon that was started with another database would remove all disks.
struct Former {
    note: PathBuf,
    name: Option<String>,
}

impl Former {
    fn of(data_dir: &DataDir) -> Self {
        let note = data_dir.path().join("database.place");
        let name = std::fs::read_to_string(&note).ok();
        Self { note, name }
    }

    /// Fails for another database if disks would be lost.
    fn allows(&self, data_dir: &DataDir, name: &str) -> Result<(), Problem> {
        let Some(former) = self.name.as_deref().filter(|former| *former != name) else { return Ok(()) };
        if !has_persistent_disks(data_dir) && !has_open_disks(data_dir) {
            return Ok(());
        }
        let message = format!(
            "cannot use the database {name}: the last daemon of this data directory used {former}, and only {former} lists some \
             of the disks here"
        );
        let advice = format!(
            "start with that database; or, if these disks may be deleted, switch their machines off and remove {}",
            self.note.display()
        );
        Err(Problem::new(ProblemKind::Conflict, message).advise(advice))
    }

    fn replace(&self, name: &str) -> anyhow::Result<()> {
        if self.name.as_deref() == Some(name) {
            return Ok(());
        }
        let failed = || format!("cannot write {}", self.note.display());
        crate::replace::replace(&self.note, name.as_bytes(), 0o600).with_context(failed)
    }
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

/// Whether machines have persistent disks: each has a key. Disks of `headwater export` are in no database, and no
/// daemon removes them.
fn has_persistent_disks(data_dir: &DataDir) -> bool {
    let is_of_machine =
        |key: &Path| key.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"disk-"));
    entries(&data_dir.keys()).any(|key| is_of_machine(&key))
}

/// Whether a machine may be on: its disk then has a socket.
pub fn has_open_disks(data_dir: &DataDir) -> bool {
    entries(&data_dir.run()).any(|machine| machine.join("disk.sock").exists())
}

/// Adds the advice.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_database_is_refused_while_there_are_disks() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::locate(Some(dir.path().to_owned())).unwrap();
        let allows = |name| Former::of(&data_dir).allows(&data_dir, name);
        let other = "postgres://anna@db/hw";
        assert!(allows(other).is_ok(), "no daemon was here before");
        Former::of(&data_dir).replace(OWN).unwrap();
        assert!(allows(other).is_ok(), "there is no disk");
        std::fs::create_dir_all(data_dir.keys()).unwrap();
        std::fs::write(data_dir.keys().join("exported"), "").unwrap();
        assert!(allows(other).is_ok(), "the disk is of an export");
        for file in ["keys/disk-one", "run/desk/disk.sock"] {
            let file = dir.path().join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, "").unwrap();
            let refused = allows(other).unwrap_err().to_string();
            assert!(refused.contains("used SQLite"), "{refused}");
            assert!(allows(OWN).is_ok());
            std::fs::remove_file(&file).unwrap();
        }
        Former::of(&data_dir).replace(other).unwrap();
        assert!(allows(other).is_ok());
    }
}
