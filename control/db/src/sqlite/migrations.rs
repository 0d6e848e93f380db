//! The changes of the tables, in order. What was released stays as it is: a file notes the hash of each that it went
//! through, and refuses one that is another now.
//!
//! The numbers 2 and 4 were never used.
//!
//! They are listed here rather than by sqlx's macro, which would have SQLite compiled a second time for the compiler.

use std::borrow::Cow;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::sqlite::SqlitePool;

/// All migrations.
pub(super) fn all() -> Migrator {
    let all = [
        (1, "machines and events", include_str!("../../migrations/sqlite/0001_machines_and_events.sql")),
        (3, "pins", include_str!("../../migrations/sqlite/0003_pins.sql")),
        (5, "transport", include_str!("../../migrations/sqlite/0005_transport.sql")),
        (6, "maintenance", include_str!("../../migrations/sqlite/0006_maintenance.sql")),
        (7, "begun disks", include_str!("../../migrations/sqlite/0007_begun_disks.sql")),
        (8, "user data", include_str!("../../migrations/sqlite/0008_user_data.sql")),
        (9, "boot", include_str!("../../migrations/sqlite/0009_boot.sql")),
    ];
    let migration = |(version, description, sql): (i64, &'static str, &'static str)| {
        Migration::new(version, Cow::Borrowed(description), MigrationType::Simple, sql.into_sql_str(), false)
    };
    Migrator::with_migrations(all.into_iter().map(migration).collect())
}

/// The number of the last migration that a file went through.
pub(super) async fn last(pool: &SqlitePool) -> Result<Option<i64>, sqlx::Error> {
    sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations").fetch_one(pool).await
}

#[cfg(test)]
mod tests {
    use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};

    use super::*;

    #[tokio::test]
    async fn user_data_survives_its_move() {
        let dir = tempfile::tempdir().unwrap();
        let options = SqliteConnectOptions::new()
            .filename(dir.path().join("db"))
            .create_if_missing(true)
            .foreign_keys(true);
        let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
        let before = all().migrations.iter().filter(|migration| migration.version < 8).cloned().collect();
        Migrator::with_migrations(before).run(&pool).await.unwrap();
        for (machine, user_data) in [("a", Some("#cloud-config")), ("b", None)] {
            let insert = "INSERT INTO machines (uuid, name, mac, image, cache_mode, cache_ram_bytes, cache_disk_bytes,
                   memory_bytes, cpus, host_name, machine_id, ssh_host_key_public, ssh_host_key_private, user_data,
                   wanted, state, created_at_ms)
                 VALUES (?1, ?1, ?1, 'i', 'ram', 1, 1, 1, 1, 'h', 'm', 'k', 'p', ?2, 'stopped', 'created', 1)";
            sqlx::query(insert).bind(machine).bind(user_data).execute(&pool).await.unwrap();
        }
        all().run(&pool).await.unwrap();
        let kept: Vec<(String, String)> =
            sqlx::query_as("SELECT machine, text FROM user_data").fetch_all(&pool).await.unwrap();
        assert_eq!(kept, [("a".to_owned(), "#cloud-config".to_owned())]);
        let machines: Vec<(String, String)> =
            sqlx::query_as("SELECT name, state FROM machines_and_catalogs ORDER BY name")
                .fetch_all(&pool)
                .await
                .unwrap();
        assert_eq!(machines.len(), 2);
    }

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
