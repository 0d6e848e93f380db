//! Catalogs in SQLite.

use async_trait::async_trait;
use headwater_api::{CacheMode, CacheSettings, DiskTransport};
use sqlx::{FromRow, SqliteConnection};

use crate::error::DbError;
use crate::record::CatalogRecord;
use crate::repository::CatalogRepository;
use crate::sqlite::{added, loaded, stored};

pub(super) struct SqliteCatalogs<'a> {
    pub(super) connection: &'a mut SqliteConnection,
}

#[derive(FromRow)]
struct Row {
    name: String,
    image: String,
    pin: Option<String>,
    cache_mode: String,
    cache_ram_bytes: i64,
    cache_disk_bytes: i64,
    cache_weight: i64,
    cache_persistent: bool,
    transport: String,
    memory_bytes: i64,
    cpus: i64,
    user_data: Option<String>,
    created_at_ms: i64,
}

impl TryFrom<Row> for CatalogRecord {
    type Error = DbError;

    fn try_from(row: Row) -> Result<Self, DbError> {
        let unreadable = |column, found: &str| DbError::Unreadable { column, found: found.to_owned() };
        let small =
            |column, number: i64| u32::try_from(number).map_err(|_| unreadable(column, &number.to_string()));
        Ok(Self {
            cache: CacheSettings {
                mode: CacheMode::parse(&row.cache_mode)
                    .map_err(|_| unreadable("cache_mode", &row.cache_mode))?,
                ram_bytes: loaded(row.cache_ram_bytes),
                disk_bytes: loaded(row.cache_disk_bytes),
                weight: small("cache_weight", row.cache_weight)?,
                persistent: row.cache_persistent,
            },
            transport: DiskTransport::parse(&row.transport)
                .map_err(|_| unreadable("transport", &row.transport))?,
            memory_bytes: loaded(row.memory_bytes),
            cpus: small("cpus", row.cpus)?,
            name: row.name,
            image: row.image,
            pin: row.pin,
            user_data: row.user_data,
            created_at_ms: loaded(row.created_at_ms),
        })
    }
}

#[async_trait]
impl CatalogRepository for SqliteCatalogs<'_> {
    async fn add(&mut self, catalog: &CatalogRecord) -> Result<(), DbError> {
        let outcome = sqlx::query(
            "INSERT INTO catalogs (name, image, pin, cache_mode, cache_ram_bytes, cache_disk_bytes, cache_weight,
               cache_persistent, transport, memory_bytes, cpus, user_data, created_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(&catalog.name)
        .bind(&catalog.image)
        .bind(&catalog.pin)
        .bind(catalog.cache.mode.name())
        .bind(stored(catalog.cache.ram_bytes))
        .bind(stored(catalog.cache.disk_bytes))
        .bind(i64::from(catalog.cache.weight))
        .bind(catalog.cache.persistent)
        .bind(catalog.transport.name())
        .bind(stored(catalog.memory_bytes))
        .bind(i64::from(catalog.cpus))
        .bind(&catalog.user_data)
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
            sqlx::query_as("SELECT * FROM catalogs ORDER BY name").fetch_all(&mut *self.connection).await?;
        rows.into_iter().map(CatalogRecord::try_from).collect()
    }

    async fn set_image(&mut self, name: &str, image: &str) -> Result<bool, DbError> {
        let done = sqlx::query("UPDATE catalogs SET image = ? WHERE name = ?")
            .bind(image)
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

    async fn remove(&mut self, name: &str) -> Result<bool, DbError> {
        let done = sqlx::query("DELETE FROM catalogs WHERE name = ?")
            .bind(name)
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }
}
