//! The statements that read and change catalogs.

use async_trait::async_trait;
use headwater_api::name::natural;
use headwater_api::{Hours, OnHostLoss};

use crate::error::DbError;
use crate::record::{CatalogRecord, PoolRecord};
use crate::repository::CatalogRepository;
use crate::sql::Unit;
use crate::sql::hardware::Hardware;
use crate::sql::statement::{Insert, Row, Statement, Value, unreadable};

pub(super) struct Catalogs<'a>(pub(super) &'a mut Unit);

fn ready_hours(row: &Row) -> Result<Option<Hours>, DbError> {
    let text: Option<String> = row.get("ready_hours")?;
    text.map(|text| Hours::parse(&text).map_err(|_| unreadable("ready_hours", &text))).transpose()
}

fn pool(row: &Row) -> Result<PoolRecord, DbError> {
    Ok(PoolRecord {
        catalog: row.get("name")?,
        keep_ready: row.count("keep_ready")?,
        ready_hours: ready_hours(row)?,
        stop_idle_s: row.number("stop_idle_s")?,
    })
}

fn record(row: &Row) -> Result<CatalogRecord, DbError> {
    let Hardware { cache, transport, memory_bytes, cpus, platform } = Hardware::of(row)?;
    // A line each.
    let seal_removes: String = row.get("seal_removes")?;
    Ok(CatalogRecord {
        name: row.get("name")?,
        image: row.get("image")?,
        pin: row.get("pin")?,
        cache,
        transport,
        memory_bytes,
        cpus,
        platform,
        user_data: row.get("user_data")?,
        name_rule: row.get("name_rule")?,
        first_number: row.count("first_number")?,
        keep_ready: row.count("keep_ready")?,
        ready_hours: ready_hours(row)?,
        stop_idle_s: row.number("stop_idle_s")?,
        seal_removes: seal_removes.lines().map(str::to_owned).collect(),
        on_host_loss: row.read("on_host_loss", |text| OnHostLoss::parse(text).ok())?,
        created_at_ms: row.number("created_at_ms")?,
    })
}

impl Catalogs<'_> {
    async fn set(&mut self, name: &str, column: &str, value: impl Into<Value>) -> Result<bool, DbError> {
        let text = format!("UPDATE catalogs SET {column} = $1 WHERE name = $2");
        self.0.changes_one(Statement::new(text).bind(value).bind(name)).await
    }
}

#[async_trait]
impl CatalogRepository for Catalogs<'_> {
    async fn add(&mut self, catalog: &CatalogRecord) -> Result<(), DbError> {
        let CatalogRecord { cache, transport, memory_bytes, cpus, ref platform, .. } = *catalog;
        let hardware = Hardware { cache, transport, memory_bytes, cpus, platform: platform.clone() };
        let insert = Insert::into("catalogs")
            .set("name", &catalog.name)
            .set("image", &catalog.image)
            .set("pin", &catalog.pin)
            .set("user_data", &catalog.user_data)
            .set("name_rule", &catalog.name_rule)
            .set("first_number", catalog.first_number)
            .set("keep_ready", catalog.keep_ready)
            .set("ready_hours", &catalog.ready_hours.as_ref().map(ToString::to_string))
            .set("stop_idle_s", catalog.stop_idle_s)
            .set("seal_removes", catalog.seal_removes.join("\n"))
            .set("on_host_loss", catalog.on_host_loss.name())
            .set("created_at_ms", catalog.created_at_ms);
        self.0.add(hardware.set_in(insert), || format!("catalog '{}'", catalog.name)).await
    }

    async fn by_name(&mut self, name: &str) -> Result<Option<CatalogRecord>, DbError> {
        let found = self.0.row(Statement::new("SELECT * FROM catalogs WHERE name = $1").bind(name)).await?;
        found.as_ref().map(record).transpose()
    }

    async fn list(&mut self) -> Result<Vec<CatalogRecord>, DbError> {
        let mut records = self.0.all(Statement::new("SELECT * FROM catalogs"), record).await?;
        records.sort_by(|a, b| natural(&a.name, &b.name));
        Ok(records)
    }

    async fn set_image(&mut self, name: &str, image: &str) -> Result<bool, DbError> {
        self.set(name, "image", image).await
    }

    async fn set_seal_removes(&mut self, name: &str, paths: &[String]) -> Result<bool, DbError> {
        self.set(name, "seal_removes", paths.join("\n")).await
    }

    async fn set_on_host_loss(&mut self, name: &str, on_host_loss: OnHostLoss) -> Result<bool, DbError> {
        self.set(name, "on_host_loss", on_host_loss.name()).await
    }

    async fn set_pin(&mut self, name: &str, pin: Option<&str>) -> Result<bool, DbError> {
        self.set(name, "pin", pin).await
    }

    async fn pools(&mut self) -> Result<Vec<PoolRecord>, DbError> {
        let pools = Statement::new(
            "SELECT name, keep_ready, ready_hours, stop_idle_s FROM catalogs WHERE keep_ready > 0 OR stop_idle_s > 0 ORDER BY name",
        );
        self.0.all(pools, pool).await
    }

    async fn set_pool(&mut self, pool: &PoolRecord) -> Result<bool, DbError> {
        let text = "UPDATE catalogs SET keep_ready = $1, ready_hours = $2, stop_idle_s = $3 WHERE name = $4";
        let statement = Statement::new(text)
            .bind(pool.keep_ready)
            .bind(&pool.ready_hours.as_ref().map(ToString::to_string))
            .bind(pool.stop_idle_s)
            .bind(&pool.catalog);
        self.0.changes_one(statement).await
    }

    async fn remove(&mut self, name: &str) -> Result<bool, DbError> {
        self.0.has_removed = true;
        self.0.changes_one(Statement::new("DELETE FROM catalogs WHERE name = $1").bind(name)).await
    }
}
