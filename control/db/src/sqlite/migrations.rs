//! The changes of the tables, in order. What was released stays as it is: a file notes the hash of each that it went
//! through, and refuses one that is another now.
//!
//! They are listed here rather than by sqlx's macro, which would have SQLite compiled a second time for the compiler.

use std::borrow::Cow;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};

/// All migrations.
pub(super) fn all() -> Migrator {
    let all = [
        (1, "machines and events", include_str!("../../migrations/sqlite/0001_machines_and_events.sql")),
        (3, "pins", include_str!("../../migrations/sqlite/0003_pins.sql")),
        (5, "transport", include_str!("../../migrations/sqlite/0005_transport.sql")),
        (6, "maintenance", include_str!("../../migrations/sqlite/0006_maintenance.sql")),
        (7, "begun disks", include_str!("../../migrations/sqlite/0007_begun_disks.sql")),
    ];
    let migration = |(version, description, sql): (i64, &'static str, &'static str)| {
        Migration::new(version, Cow::Borrowed(description), MigrationType::Simple, sql.into_sql_str(), false)
    };
    Migrator::with_migrations(all.into_iter().map(migration).collect())
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
