//! How the database fails.

use sqlx::error::DatabaseError as _;
use sqlx::sqlite::SqliteError;

/// A failed operation on the database.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    /// Something with that name, MAC or UUID exists already.
    #[error("{what} exists already")]
    Taken {
        /// What was to be added.
        what: String,
    },
    /// A row holds something that this version does not understand.
    #[error("the database holds {found:?} as {column} of a machine, which this version does not know")]
    Unreadable {
        /// The column.
        column: &'static str,
        /// What it holds.
        found: String,
    },
    /// The database could not be opened or brought up to date.
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
        /// The number of the last change of its tables.
        format: i64,
        /// The number of the last one that this release knows.
        known: i64,
    },
    /// Its tables went through a change that this release does not have, or has another one of that number.
    #[error(
        "the database {path} went through change {change} of its tables, which is another one in this release: use the release that \
         made it"
    )]
    Foreign {
        /// The file, or the URL without secrets.
        path: String,
        /// The number of the change.
        change: i64,
    },
    /// The file is damaged, or no database, or a table of PostgreSQL is damaged. Without it a daemon has no use for the disks that are kept.
    #[error(
        "the database is damaged: {0} (restore it from its backup; persistent disks are of no use without it)"
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
    /// Its file system is full.
    #[error("the database cannot be written")]
    NoSpace(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// It cannot be used now, and may be later. Nothing was changed.
    #[error("the database {place} cannot be used now: {why}")]
    Away {
        /// Its URL without secrets.
        place: String,
        /// Why.
        why: String,
    },
    /// It went away while a change was saved.
    #[error("the database {place} went away ({why}); whether the change was saved is not known")]
    Unsure {
        /// Its URL without secrets.
        place: String,
        /// Why.
        why: String,
    },
    /// It is there, and will not be of use before somebody changes something.
    #[error("the database {place} cannot be used: {why}")]
    Refused {
        /// Its URL without secrets.
        place: String,
        /// Why.
        why: String,
    },
    /// A daemon of another host uses it, or did and has not ended in order.
    #[error(
        "the database {place} is used by the daemon of {name}{}",
        match .left_s { 0 => ", which ended without giving it up".to_owned(), left => format!(", for {left} s more at least") }
    )]
    Held {
        /// Its URL without secrets.
        place: String,
        /// The host and data directory of that daemon.
        name: String,
        /// How many seconds its lease lasts.
        left_s: u64,
    },
    /// Another daemon has taken it over from this one.
    #[error("the database {place} was taken over by the daemon of {name}: this one changes nothing any more")]
    Lost {
        /// Its URL without secrets.
        place: String,
        /// The host and data directory of that daemon.
        name: String,
    },
    /// A statement of this unit of work failed before, so that nothing of it is saved.
    #[error("the database saved nothing of this change, because a part of it failed")]
    Spoilt,
    /// A statement failed.
    #[error("the database failed")]
    Failed(#[source] sqlx::Error),
}

/// What SQLite says of a full file system: `SQLITE_FULL`.
const FULL: u32 = 13;

/// What it says of a damaged file: `SQLITE_CORRUPT`, `SQLITE_NOTADB`.
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

/// What SQLite says, without the details that its extended codes have above the lowest byte.
fn primary_code(error: &sqlx::Error) -> Option<u32> {
    let code = error.as_database_error()?.try_downcast_ref::<SqliteError>()?.code()?;
    code.parse::<u32>().ok().map(|code| code & 0xff)
}
