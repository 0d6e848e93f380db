//! Command-line options for the database: which one, its password, the key file of its secrets, and whether several
//! controllers take turns with it. Opens nothing: `headwater_db` opens the database and takes its lease.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueHint};
use headwater_api::{Problem, ProblemKind};
use headwater_db::postgres::{Place, Taking};

/// The name of the password among the service manager's credentials.
const CREDENTIAL: &str = "database-password";

/// The longest password.
const PASSWORD_MAX_BYTES: u64 = 4096;

/// Options that name the database: for `headwater serve`, and for commands that open the database while no daemon runs.
#[derive(Debug, Args)]
pub struct DatabaseArgs {
    /// Store machines, catalogs and the history in this PostgreSQL database instead of DIR/headwater.db:
    /// postgres://USER@HOST/DATABASE, or postgres:///DATABASE?host=DIRECTORY for a socket in a directory
    #[arg(long, value_name = "URL")]
    pub database: Option<String>,
    /// File with the password of the database [default: the credential 'database-password' of the service, the
    /// variable PGPASSWORD or ~/.pgpass]
    #[arg(long, value_name = "FILE", requires = "database")]
    pub database_password_file: Option<PathBuf>,
    /// The file with the key that encrypts the secrets in the database, which is made if the database has no key yet [default: the
    /// credential 'secrets-key' of the service, or DIR/secrets.key]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub secrets_key: Option<PathBuf>,
}

/// How `headwater serve` shares its database with other daemons.
#[derive(Debug, Args)]
pub struct SharingArgs {
    /// Use the database although the daemon of another host had it last and did not release it. Only if that host is
    /// lost for good
    #[arg(long, requires = "database")]
    pub take_over_database: bool,
    /// Be one of several controllers: wait while another one has the database, and take it over within seconds when
    /// that one ends or fails
    #[arg(long, requires = "database", conflicts_with = "take_over_database")]
    pub standby: bool,
}

impl SharingArgs {
    /// `Taking::IfOver`: even if the last holder did not release the lease, once its time is over.
    fn usage(&self) -> Usage {
        match (self.standby, self.take_over_database) {
            (true, _) => Usage::InTurn,
            (false, true) => Usage::Alone(Taking::IfOver),
            (false, false) => Usage::Alone(Taking::IfFree),
        }
    }
}

/// A PostgreSQL database, and whether this process fails if another one has its lease (`Alone`) or waits for it (`InTurn`).
#[derive(Clone)]
pub struct Shared {
    pub place: Place,
    pub usage: Usage,
}

/// How a daemon uses a database on a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// As its only user.
    Alone(Taking),
    /// In turn with other controllers.
    InTurn,
}

impl DatabaseArgs {
    /// Fails for an invalid URL. Opens nothing.
    pub fn check(&self) -> anyhow::Result<()> {
        self.without_password().map(drop)
    }

    fn without_password(&self) -> anyhow::Result<Option<Place>> {
        let place = self.database.as_deref().map(Place::parse).transpose();
        Ok(place.map_err(|error| {
            Problem::from_error(ProblemKind::Invalid, &error).during("cannot use --database")
        })?)
    }

    /// The PostgreSQL database, if one was given, with the rules by which `sharing` takes it.
    pub fn shared(&self, sharing: &SharingArgs) -> anyhow::Result<Option<Shared>> {
        self.used(sharing.usage())
    }

    /// The same for a command that uses a database only while no daemon has it.
    pub fn alone(&self) -> anyhow::Result<Option<Shared>> {
        self.used(Usage::Alone(Taking::IfFree))
    }

    fn used(&self, usage: Usage) -> anyhow::Result<Option<Shared>> {
        Ok(self.place()?.map(|place| Shared { place, usage }))
    }

    fn place(&self) -> anyhow::Result<Option<Place>> {
        let Some(place) = self.without_password()? else { return Ok(None) };
        let credential =
            std::env::var_os("CREDENTIALS_DIRECTORY").map(|dir| Path::new(&dir).join(CREDENTIAL));
        let file = self.database_password_file.clone().or_else(|| credential.filter(|file| file.exists()));
        let Some(file) = file else { return Ok(Some(place)) };
        Ok(Some(place.with_password(&password(&file)?)))
    }
}

/// The first line of a file.
fn password(file: &Path) -> anyhow::Result<String> {
    let failed = || format!("cannot read the password of the database from {}", file.display());
    let invalid = |why: &str| Problem::new(ProblemKind::Invalid, format!("{}: {why}", failed()));
    if file.metadata().with_context(failed)?.len() > PASSWORD_MAX_BYTES {
        return Err(invalid(&format!("it has more than {PASSWORD_MAX_BYTES} bytes")).into());
    }
    let text = std::fs::read_to_string(file).with_context(failed)?;
    let line = text.lines().next().unwrap_or_default();
    if line.is_empty() {
        return Err(invalid("its first line is empty").into());
    }
    Ok(line.to_owned())
}
