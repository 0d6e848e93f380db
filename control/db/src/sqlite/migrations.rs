//! The migrations of SQLite tables, in order. A released migration never changes: a database stores the hash of each
//! migration that was applied, and a different hash is an error.
//!
//! They are listed here instead of by sqlx's macro, which would compile SQLite a second time for the compiler.

use std::borrow::Cow;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::sqlite::SqlitePool;

/// All migrations.
pub(super) fn all() -> Migrator {
    let all = [(1, "schema", include_str!("../../migrations/sqlite/0001_schema.sql"))];
    let migration = |(version, description, sql): (i64, &'static str, &'static str)| {
        Migration::new(version, Cow::Borrowed(description), MigrationType::Simple, sql.into_sql_str(), false)
    };
    Migrator::with_migrations(all.into_iter().map(migration).collect())
}

/// The number of the last migration that was applied to a file.
pub(super) async fn last(pool: &SqlitePool) -> Result<Option<i64>, sqlx::Error> {
    sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations").fetch_one(pool).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_listed() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations/sqlite");
        let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        let listed = all().migrations.iter().map(|m| m.sql.as_str().to_owned()).collect::<Vec<_>>();
        let there: Vec<_> = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
        assert_eq!(listed, there);
    }
}
