//! How the database fails.

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
        /// The file.
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
        /// The file.
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
        /// The file.
        path: String,
        /// The number of the change.
        change: i64,
    },
    /// SQLite finds that the file is damaged, or no database. Without it a daemon has no use for the disks that are kept.
    #[error(
        "the database is damaged: {0} (restore it from its backup; persistent disks are of no use without it)"
    )]
    Damaged(String),
    /// Its file system is full.
    #[error("the database cannot be written")]
    NoSpace(#[source] Box<dyn std::error::Error + Send + Sync>),
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
    let code = error.as_database_error()?.code()?;
    code.parse::<u32>().ok().map(|code| code & 0xff)
}
