//! The errors of the database.

use sqlx::error::DatabaseError as _;
use sqlx::sqlite::SqliteError;

/// A failed operation on the database.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    /// A row with the same unique value (name, MAC address or UUID) exists.
    #[error("{what} exists already")]
    Taken {
        /// What was to be added.
        what: String,
    },
    /// A column has a value that this release does not know.
    #[error(
        "the database has the value {found:?} in column {column}, which this release of headwater does not know"
    )]
    Unreadable {
        /// The column.
        column: &'static str,
        /// The value found.
        found: String,
    },
    /// The database could not be opened, or its tables could not be updated.
    #[error("cannot open the database {path}")]
    Open {
        /// The file, or the URL without secrets.
        path: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A later release made it, or brought it up to date.
    #[error(
        "the database {path} has format {format}; this release reads formats up to {known}: use the release that made it, or a \
         later one"
    )]
    Newer {
        /// The file, or the URL without secrets.
        path: String,
        /// The number of the last migration that was applied.
        format: i64,
        /// The number of the last migration that this release knows.
        known: i64,
    },
    /// A migration was applied that this release does not have, or has with another content.
    #[error(
        "migration {change} of the database {path} differs from that of this release: use the release that \
         made it"
    )]
    Foreign {
        /// The file, or the URL without secrets.
        path: String,
        /// The number of the migration.
        change: i64,
    },
    /// The file is damaged or not a database, or a table of PostgreSQL is damaged. Without the database, persistent disks
    /// cannot be opened.
    #[error(
        "the database is damaged: {0} (restore it from its backup; persistent disks cannot be opened without it)"
    )]
    Damaged(String),
    /// Its secrets are encrypted, and their key was not given.
    #[error("the secrets in the database are encrypted, and this program was not given their key")]
    NoSecretsKey,
    /// Its secrets are encrypted with another key.
    #[error("the secrets in the database {place} are encrypted with another key")]
    OtherSecretsKey {
        /// The file, or the URL without secrets.
        place: String,
    },
    /// A secret could not be encrypted, so it was not stored.
    #[error("a secret cannot be encrypted for the database")]
    NotEncrypted,
    /// A bug: a machine that was read without its secrets, as for a list, was to be saved. Nothing was changed.
    #[error(
        "internal error: machine '{machine}' was loaded without its secrets, and then was to be saved; nothing was changed: \
         report this"
    )]
    WithoutSecrets {
        /// The machine.
        machine: String,
    },
    /// Its file system is full.
    #[error("the database cannot be written")]
    NoSpace(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The database cannot be used now; retry later. Nothing was changed.
    #[error("the database {place} cannot be used now: {why}")]
    Away {
        /// Its URL without secrets.
        place: String,
        /// Why.
        why: String,
    },
    /// The connection failed while a change was committed.
    #[error(
        "the connection to the database {place} failed ({why}); the change may or may not have been saved"
    )]
    Unsure {
        /// Its URL without secrets.
        place: String,
        /// Why.
        why: String,
    },
    /// The database answers, but cannot be used until somebody changes its configuration.
    #[error("the database {place} cannot be used: {why}")]
    Refused {
        /// Its URL without secrets.
        place: String,
        /// Why.
        why: String,
    },
    /// The daemon of another host has the lease on the database, or had it and did not end in order.
    #[error(
        "the database {place} is used by the daemon of {name}{}",
        match .left_s { 0 => ", which ended without giving it up".to_owned(), left => format!(", for at least {left} s more") }
    )]
    Held {
        /// Its URL without secrets.
        place: String,
        /// The host and data directory of that daemon.
        name: String,
        /// The remaining time of its lease, in seconds.
        left_s: u64,
    },
    /// Another daemon has taken the lease from this one.
    #[error("the database {place} was taken over by the daemon of {name}: this one changes nothing any more")]
    Lost {
        /// Its URL without secrets.
        place: String,
        /// The host and data directory of that daemon.
        name: String,
    },
    /// A statement of this unit of work failed before, so its changes were not saved.
    #[error("the database saved nothing of this change, because a part of it failed")]
    StatementFailed,
    /// A statement failed.
    #[error("the database failed")]
    Failed(#[source] sqlx::Error),
}

/// SQLite's code for a full file system: `SQLITE_FULL`.
const FULL: u32 = 13;

/// SQLite's codes for a damaged file: `SQLITE_CORRUPT`, `SQLITE_NOTADB`.
const DAMAGED: [u32; 2] = [11, 26];

impl From<sqlx::Error> for DbError {
    fn from(error: sqlx::Error) -> Self {
        match primary_code(&error) {
            Some(FULL) => Self::NoSpace(Box::new(error)),
            Some(code) if DAMAGED.contains(&code) => Self::Damaged(error.to_string()),
            _ => Self::Failed(error),
        }
    }
}

/// SQLite's primary result code: the lowest byte of the extended code.
fn primary_code(error: &sqlx::Error) -> Option<u32> {
    let code = error.as_database_error()?.try_downcast_ref::<SqliteError>()?.code()?;
    code.parse::<u32>().ok().map(|code| code & 0xff)
}
