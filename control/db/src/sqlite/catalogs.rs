//! Catalogs in SQLite.

use async_trait::async_trait;
use headwater_api::name::natural;
use sqlx::sqlite::SqliteRow;
use sqlx::{FromRow, Row as _, SqliteConnection};

use crate::error::DbError;
use crate::record::CatalogRecord;
use crate::repository::CatalogRepository;
use crate::sqlite::hardware::{self, Columns, Hardware, unreadable};
use crate::sqlite::{added, loaded, stored};

pub(super) struct SqliteCatalogs<'a> {
    pub(super) connection: &'a mut SqliteConnection,
    pub(super) has_removed: &'a mut bool,
}

struct Row {
    name: String,
    image: String,
    pin: Option<String>,
    hardware: Columns,
    user_data: Option<String>,
    name_rule: String,
    first_number: i64,
    keep_ready: i64,
    /// A line each.
    seal_removes: String,
    created_at_ms: i64,
}

impl FromRow<'_, SqliteRow> for Row {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            name: row.try_get("name")?,
            image: row.try_get("image")?,
            pin: row.try_get("pin")?,
            hardware: Columns::from_row(row)?,
            user_data: row.try_get("user_data")?,
            name_rule: row.try_get("name_rule")?,
            first_number: row.try_get("first_number")?,
            keep_ready: row.try_get("keep_ready")?,
            seal_removes: row.try_get("seal_removes")?,
            created_at_ms: row.try_get("created_at_ms")?,
        })
    }
}

impl TryFrom<Row> for CatalogRecord {
    type Error = DbError;

    fn try_from(row: Row) -> Result<Self, DbError> {
        let Hardware { cache, transport, memory_bytes, cpus, platform } = row.hardware.try_into()?;
        Ok(Self {
            cache,
            transport,
            memory_bytes,
            cpus,
            platform,
            name: row.name,
            image: row.image,
            pin: row.pin,
            user_data: row.user_data,
            name_rule: row.name_rule,
            first_number: u32::try_from(row.first_number)
                .map_err(|_| unreadable("first_number", &row.first_number.to_string()))?,
            keep_ready: u32::try_from(row.keep_ready)
                .map_err(|_| unreadable("keep_ready", &row.keep_ready.to_string()))?,
            seal_removes: row.seal_removes.lines().map(str::to_owned).collect(),
            created_at_ms: loaded(row.created_at_ms),
        })
    }
}

#[async_trait]
impl CatalogRepository for SqliteCatalogs<'_> {
    async fn add(&mut self, catalog: &CatalogRecord) -> Result<(), DbError> {
        let CatalogRecord { cache, transport, memory_bytes, cpus, ref platform, .. } = *catalog;
        let hardware = Hardware { cache, transport, memory_bytes, cpus, platform: platform.clone() };
        let insert = sqlx::query(
            "INSERT INTO catalogs (name, image, pin, cache_mode, cache_ram_bytes, cache_disk_bytes, cache_weight,
               cache_persistent, transport, memory_bytes, cpus, firmware, display, network, user_data, name_rule, first_number, keep_ready,
               seal_removes, created_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(&catalog.name)
        .bind(&catalog.image)
        .bind(&catalog.pin);
        let outcome = hardware::bind(insert, &hardware)
            .bind(&catalog.user_data)
            .bind(&catalog.name_rule)
            .bind(i64::from(catalog.first_number))
            .bind(i64::from(catalog.keep_ready))
            .bind(catalog.seal_removes.join("\n"))
            .bind(stored(catalog.created_at_ms))
            .execute(&mut *self.connection)
            .await;
        added(outcome, || format!("catalog '{}'", catalog.name))
    }

    async fn by_name(&mut self, name: &str) -> Result<Option<CatalogRecord>, DbError> {
        let row: Option<Row> = sqlx::query_as("SELECT * FROM catalogs WHERE name = ?")
            .bind(name)
            .fetch_optional(&mut *self.connection)
            .await?;
        row.map(CatalogRecord::try_from).transpose()
    }

    async fn list(&mut self) -> Result<Vec<CatalogRecord>, DbError> {
        let rows: Vec<Row> =
            sqlx::query_as("SELECT * FROM catalogs").fetch_all(&mut *self.connection).await?;
        let records: Result<Vec<_>, _> = rows.into_iter().map(CatalogRecord::try_from).collect();
        let mut records = records?;
        records.sort_by(|a, b| natural(&a.name, &b.name));
        Ok(records)
    }

    async fn set_image(&mut self, name: &str, image: &str) -> Result<bool, DbError> {
        let done = sqlx::query("UPDATE catalogs SET image = ? WHERE name = ?")
            .bind(image)
            .bind(name)
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn set_seal_removes(&mut self, name: &str, paths: &[String]) -> Result<bool, DbError> {
        let done = sqlx::query("UPDATE catalogs SET seal_removes = ? WHERE name = ?")
            .bind(paths.join("\n"))
            .bind(name)
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn set_pin(&mut self, name: &str, pin: Option<&str>) -> Result<bool, DbError> {
        let done = sqlx::query("UPDATE catalogs SET pin = ? WHERE name = ?")
            .bind(pin)
            .bind(name)
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn pools(&mut self) -> Result<Vec<(String, u32)>, DbError> {
        let rows: Vec<(String, i64)> =
            sqlx::query_as("SELECT name, keep_ready FROM catalogs WHERE keep_ready > 0")
                .fetch_all(&mut *self.connection)
                .await?;
        let count = |(name, count): (String, i64)| match u32::try_from(count) {
            Ok(count) => Ok((name, count)),
            Err(_) => Err(unreadable("keep_ready", &count.to_string())),
        };
        rows.into_iter().map(count).collect()
    }

    async fn set_keep_ready(&mut self, name: &str, count: u32) -> Result<bool, DbError> {
        let done = sqlx::query("UPDATE catalogs SET keep_ready = ? WHERE name = ?")
            .bind(i64::from(count))
            .bind(name)
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn remove(&mut self, name: &str) -> Result<bool, DbError> {
        let done = sqlx::query("DELETE FROM catalogs WHERE name = ?")
            .bind(name)
            .execute(&mut *self.connection)
            .await?;
        *self.has_removed = true;
        Ok(done.rows_affected() == 1)
    }
}
