//! Copies of a database file, made while a daemon uses it.

use std::path::Path;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};

use super::{cause, migrations};
use crate::error::DbError;

/// The number of the last migration that this release knows.
pub fn known_format() -> i64 {
    migrations::all().iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// Writes a copy of the database at `from` to `to`, which does not exist or is empty. Returns the format of the database.
///
/// The copy is the state of one instant: each change is in it completely or not at all. Other users of the database do not
/// wait, and removed rows are not copied. The copy is checked, because damage would otherwise be noticed only when the
/// copy is needed.
pub async fn copy(from: &Path, to: &Path) -> Result<i64, DbError> {
    let failed =
        |source: sqlx::Error| DbError::Open { path: from.display().to_string(), source: cause(source) };
    let target = to.to_str().ok_or_else(|| DbError::Open {
        path: to.display().to_string(),
        source: "its path is not UTF-8".into(),
    })?;
    // If no process has the database open, this creates its log files again. It writes no row.
    let options = SqliteConnectOptions::new().filename(from).create_if_missing(false);
    let mut connection = options.connect().await.map_err(failed)?;
    let copied = sqlx::query("VACUUM INTO ?").bind(target).execute(&mut connection).await;
    let _ = connection.close().await;
    copied.map_err(failed)?;
    check(to).await
}

/// Reads a database file completely, and changes nothing. Returns its format.
pub async fn check(path: &Path) -> Result<i64, DbError> {
    let failed =
        |source: sqlx::Error| DbError::Open { path: path.display().to_string(), source: cause(source) };
    let options = SqliteConnectOptions::new().filename(path).read_only(true).immutable(true);
    let mut connection = options.connect().await.map_err(failed)?;
    let checked = async {
        let found: Vec<String> =
            sqlx::query_scalar("PRAGMA integrity_check").fetch_all(&mut connection).await?;
        let format: Option<i64> = sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations")
            .fetch_one(&mut connection)
            .await?;
        Ok::<_, sqlx::Error>((found, format))
    };
    let checked = checked.await;
    let _ = connection.close().await;
    let (found, format) = checked.map_err(failed)?;
    match found.first().filter(|found| *found != "ok") {
        Some(found) => Err(DbError::Damaged(format!("{}: {found}", path.display()))),
        None => Ok(format.unwrap_or(0)),
    }
}
