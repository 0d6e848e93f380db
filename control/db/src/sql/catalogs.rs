//! The statements that read and change catalogs.

use async_trait::async_trait;
use headwater_api::name::natural;
use headwater_api::scheme::KEPT_SCHEMES;
use headwater_api::{CloudScheme, Hours, OnHostLoss};

use crate::error::DbError;
use crate::record::{CatalogRecord, PoolRecord, SchemeRecord};
use crate::repository::CatalogRepository;
use crate::secrets::KeySlot;
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

/// The column of user data, whose rows are named by their catalogs.
const USER_DATA: &str = "catalogs.user_data";
/// The same of versions of schemes, whose rows are named by [`scheme_name`].
const SCHEME_USER_DATA: &str = "schemes.user_data";

fn record(row: &Row, key: &KeySlot) -> Result<CatalogRecord, DbError> {
    let Hardware { cache, transport, memory_bytes, cpus, platform } = Hardware::of(row)?;
    // One path per line.
    let seal_removes: String = row.get("seal_removes")?;
    let name: String = row.get("name")?;
    let user_data: Option<Vec<u8>> = row.get("user_data")?;
    let user_data = user_data.map(|stored| key.decrypt(USER_DATA, &name, stored)).transpose()?;
    let cloud: Option<String> = row.get("cloud")?;
    let cloud =
        cloud.map(|text| CloudScheme::parse(&text).ok_or_else(|| unreadable("cloud", &text))).transpose()?;
    Ok(CatalogRecord {
        name,
        image: row.get("image")?,
        pin: row.get("pin")?,
        scheme: row.count("scheme")?,
        cache,
        transport,
        memory_bytes,
        cpus,
        platform,
        user_data,
        name_rule: row.get("name_rule")?,
        first_number: row.count("first_number")?,
        keep_ready: row.count("keep_ready")?,
        ready_hours: ready_hours(row)?,
        stop_idle_s: row.number("stop_idle_s")?,
        seal_removes: seal_removes.lines().map(str::to_owned).collect(),
        on_host_loss: row.read("on_host_loss", |text| OnHostLoss::parse(text).ok())?,
        cloud,
        created_at_ms: row.number("created_at_ms")?,
    })
}

/// The name of a version of a scheme in the encryption of its user data.
fn scheme_name(catalog: &str, version: u32) -> String {
    format!("{catalog} {version}")
}

fn scheme(row: &Row, key: &KeySlot) -> Result<SchemeRecord, DbError> {
    let (catalog, version): (String, u32) = (row.get("catalog")?, row.count("version")?);
    let user_data: Option<Vec<u8>> = row.get("user_data")?;
    let name = scheme_name(&catalog, version);
    let user_data = user_data.map(|stored| key.decrypt(SCHEME_USER_DATA, &name, stored)).transpose()?;
    Ok(SchemeRecord {
        catalog,
        version,
        settings: Hardware::of(row)?.settings(user_data),
        created_by: row.get("created_by")?,
        created_at_ms: row.number("created_at_ms")?,
    })
}

/// Old versions of a scheme that no machine has.
const PRUNE: &str = "DELETE FROM schemes WHERE catalog = $1 AND version <= $2
    AND NOT EXISTS (SELECT 1 FROM machines WHERE machines.catalog = schemes.catalog AND machines.scheme = schemes.version)";

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
        let user_data = catalog.user_data.as_deref();
        let user_data =
            user_data.map(|text| self.0.key.encrypt(USER_DATA, &catalog.name, text)).transpose()?;
        let insert = Insert::into("catalogs")
            .set("name", &catalog.name)
            .set("image", &catalog.image)
            .set("pin", &catalog.pin)
            .set("scheme", catalog.scheme)
            .set("user_data", user_data)
            .set("name_rule", &catalog.name_rule)
            .set("first_number", catalog.first_number)
            .set("keep_ready", catalog.keep_ready)
            .set("ready_hours", &catalog.ready_hours.as_ref().map(ToString::to_string))
            .set("stop_idle_s", catalog.stop_idle_s)
            .set("seal_removes", catalog.seal_removes.join("\n"))
            .set("on_host_loss", catalog.on_host_loss.name())
            .set("connection", catalog.cloud.as_ref().map(|cloud| cloud.connection.as_str()))
            .set("cloud", &catalog.cloud.as_ref().map(CloudScheme::to_text))
            .set("created_at_ms", catalog.created_at_ms);
        self.0.add(hardware.set_in(insert), || format!("catalog '{}'", catalog.name)).await
    }

    async fn by_name(&mut self, name: &str) -> Result<Option<CatalogRecord>, DbError> {
        let found = self.0.row(Statement::new("SELECT * FROM catalogs WHERE name = $1").bind(name)).await?;
        let key = self.0.key.clone();
        found.as_ref().map(|row| record(row, &key)).transpose()
    }

    async fn list(&mut self) -> Result<Vec<CatalogRecord>, DbError> {
        let key = self.0.key.clone();
        let all = Statement::new("SELECT * FROM catalogs");
        let mut records = self.0.all(all, |row| record(row, &key)).await?;
        records.sort_by(|a, b| natural(&a.name, &b.name));
        Ok(records)
    }

    async fn add_scheme(&mut self, scheme: &SchemeRecord) -> Result<bool, DbError> {
        let SchemeRecord { catalog, version, settings, created_by, created_at_ms } = scheme;
        let hardware = Hardware::of_settings(settings);
        let encrypted = |column: &str, name: &str| {
            let text = settings.user_data.as_deref();
            text.map(|text| self.0.key.encrypt(column, name, text)).transpose()
        };
        let of_catalog = encrypted(USER_DATA, catalog)?;
        let of_scheme = encrypted(SCHEME_USER_DATA, &scheme_name(catalog, *version))?;
        let update = hardware.update("catalogs", ", user_data = $16 WHERE name = $17", Some(*version));
        if !self.0.changes_one(update.bind(of_catalog).bind(catalog)).await? {
            return Ok(false);
        }
        let insert = Insert::into("schemes")
            .set("catalog", catalog)
            .set("version", *version)
            .set("user_data", of_scheme)
            .set("created_by", created_by)
            .set("created_at_ms", *created_at_ms);
        let what = || format!("version {version} of the scheme of catalog '{catalog}'");
        self.0.add(hardware.set_in(insert), what).await?;
        let prune = Statement::new(PRUNE).bind(catalog).bind(version.saturating_sub(KEPT_SCHEMES));
        self.0.run(prune).await?;
        // Earlier user data is not left in the log of the database.
        self.0.has_removed = true;
        Ok(true)
    }

    async fn schemes(&mut self, catalog: &str) -> Result<Vec<SchemeRecord>, DbError> {
        let all = "SELECT * FROM schemes WHERE catalog = $1 ORDER BY version DESC";
        let key = self.0.key.clone();
        self.0.all(Statement::new(all).bind(catalog), |row| scheme(row, &key)).await
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
