//! Machines in SQLite.

use async_trait::async_trait;
use headwater_api::name::natural;
use headwater_api::{BootFrom, Identity, MachineState, Wanted};
use sqlx::sqlite::SqliteRow;
use sqlx::{FromRow, Row as _, SqliteConnection};
use uuid::Uuid;

use crate::error::DbError;
use crate::record::{MachineRecord, Secret};
use crate::repository::MachineRepository;
use crate::sqlite::hardware::{self, Columns, Hardware, unreadable};
use crate::sqlite::{loaded, stored};

const WHOLE_BY_NAME: &str = "SELECT machines_and_catalogs.*, user_data.text AS user_data
    FROM machines_and_catalogs LEFT JOIN user_data ON machine = uuid WHERE name = ?";

const WHOLE_BY_UUID: &str = "SELECT machines_and_catalogs.*, user_data.text AS user_data
    FROM machines_and_catalogs LEFT JOIN user_data ON machine = uuid WHERE uuid = ?";

const WHOLE_BY_MAC: &str = "SELECT machines_and_catalogs.*, user_data.text AS user_data
    FROM machines_and_catalogs LEFT JOIN user_data ON machine = uuid WHERE mac = ?";

pub(super) struct SqliteMachines<'a> {
    pub(super) connection: &'a mut SqliteConnection,
    pub(super) has_removed: &'a mut bool,
}

struct Row {
    uuid: String,
    name: String,
    mac: String,
    boot: String,
    image: String,
    pin: Option<String>,
    catalog: Option<String>,
    catalog_image: Option<String>,
    catalog_pin: Option<String>,
    hardware: Columns,
    host_name: String,
    machine_id: String,
    ssh_host_key_public: String,
    ssh_host_key_private: String,
    user_data: Option<String>,
    wanted: String,
    state: String,
    reason: Option<String>,
    version: Option<String>,
    boot_ms: Option<i64>,
    started_at_ms: Option<i64>,
    created_at_ms: i64,
}

impl FromRow<'_, SqliteRow> for Row {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            uuid: row.try_get("uuid")?,
            name: row.try_get("name")?,
            mac: row.try_get("mac")?,
            boot: row.try_get("boot")?,
            image: row.try_get("image")?,
            pin: row.try_get("pin")?,
            catalog: row.try_get("catalog")?,
            catalog_image: row.try_get("catalog_image")?,
            catalog_pin: row.try_get("catalog_pin")?,
            hardware: Columns::from_row(row)?,
            host_name: row.try_get("host_name")?,
            machine_id: row.try_get("machine_id")?,
            ssh_host_key_public: row.try_get("ssh_host_key_public")?,
            ssh_host_key_private: row.try_get("ssh_host_key_private")?,
            user_data: row.try_get("user_data")?,
            wanted: row.try_get("wanted")?,
            state: row.try_get("state")?,
            reason: row.try_get("reason")?,
            version: row.try_get("version")?,
            boot_ms: row.try_get("boot_ms")?,
            started_at_ms: row.try_get("started_at_ms")?,
            created_at_ms: row.try_get("created_at_ms")?,
        })
    }
}

impl TryFrom<Row> for MachineRecord {
    type Error = DbError;

    fn try_from(row: Row) -> Result<Self, DbError> {
        let Hardware { cache, transport, memory_bytes, cpus, platform } = row.hardware.try_into()?;
        Ok(Self {
            uuid: Uuid::parse_str(&row.uuid).map_err(|_| unreadable("uuid", &row.uuid))?,
            cache,
            transport,
            memory_bytes,
            cpus,
            platform,
            wanted: Wanted::parse(&row.wanted).ok_or_else(|| unreadable("wanted", &row.wanted))?,
            state: MachineState::parse(&row.state).ok_or_else(|| unreadable("state", &row.state))?,
            boot: BootFrom::parse(&row.boot).map_err(|_| unreadable("boot", &row.boot))?,
            name: row.name,
            mac: row.mac,
            image: row.catalog_image.unwrap_or(row.image),
            pin: row.pin,
            catalog: row.catalog,
            catalog_pin: row.catalog_pin,
            identity: Identity {
                host_name: row.host_name,
                machine_id: row.machine_id,
                ssh_host_key_public: row.ssh_host_key_public,
                user_data: row.user_data,
            },
            ssh_host_key_private: Secret::new(row.ssh_host_key_private),
            reason: row.reason,
            version: row.version,
            boot_ms: row.boot_ms.map(loaded),
            started_at_ms: row.started_at_ms.map(loaded),
            created_at_ms: loaded(row.created_at_ms),
        })
    }
}

#[async_trait]
impl MachineRepository for SqliteMachines<'_> {
    async fn add(&mut self, machine: &MachineRecord) -> Result<(), DbError> {
        let MachineRecord { cache, transport, memory_bytes, cpus, ref platform, .. } = *machine;
        let hardware = Hardware { cache, transport, memory_bytes, cpus, platform: platform.clone() };
        let insert = sqlx::query(
            "INSERT INTO machines (uuid, name, mac, boot, image, pin, catalog, cache_mode, cache_ram_bytes, cache_disk_bytes, cache_weight, cache_persistent,
               transport, memory_bytes, cpus, firmware, display, network, host_name, machine_id, ssh_host_key_public, ssh_host_key_private,
               wanted, state, reason, version, boot_ms, started_at_ms, created_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(machine.uuid.to_string())
        .bind(&machine.name)
        .bind(&machine.mac)
        .bind(machine.boot.name())
        .bind(&machine.image)
        .bind(&machine.pin)
        .bind(&machine.catalog);
        let added = hardware::bind(insert, &hardware)
            .bind(&machine.identity.host_name)
            .bind(&machine.identity.machine_id)
            .bind(&machine.identity.ssh_host_key_public)
            .bind(machine.ssh_host_key_private.reveal())
            .bind(machine.wanted.name())
            .bind(machine.state.name())
            .bind(&machine.reason)
            .bind(&machine.version)
            .bind(machine.boot_ms.map(stored))
            .bind(machine.started_at_ms.map(stored))
            .bind(stored(machine.created_at_ms))
            .execute(&mut *self.connection)
            .await;
        super::added(added, || format!("machine '{}'", machine.name))?;
        if let Some(text) = &machine.identity.user_data {
            sqlx::query("INSERT INTO user_data (machine, text) VALUES (?, ?)")
                .bind(machine.uuid.to_string())
                .bind(text)
                .execute(&mut *self.connection)
                .await?;
        }
        Ok(())
    }

    async fn by_name(&mut self, name: &str) -> Result<Option<MachineRecord>, DbError> {
        let row: Option<Row> =
            sqlx::query_as(WHOLE_BY_NAME).bind(name).fetch_optional(&mut *self.connection).await?;
        row.map(MachineRecord::try_from).transpose()
    }

    async fn by_uuid(&mut self, uuid: Uuid) -> Result<Option<MachineRecord>, DbError> {
        let row: Option<Row> = sqlx::query_as(WHOLE_BY_UUID)
            .bind(uuid.to_string())
            .fetch_optional(&mut *self.connection)
            .await?;
        row.map(MachineRecord::try_from).transpose()
    }

    async fn by_mac(&mut self, mac: &str) -> Result<Option<MachineRecord>, DbError> {
        let row: Option<Row> =
            sqlx::query_as(WHOLE_BY_MAC).bind(mac).fetch_optional(&mut *self.connection).await?;
        row.map(MachineRecord::try_from).transpose()
    }

    async fn list(&mut self) -> Result<Vec<MachineRecord>, DbError> {
        let rows: Vec<Row> = sqlx::query_as("SELECT *, NULL AS user_data FROM machines_and_catalogs")
            .fetch_all(&mut *self.connection)
            .await?;
        let records: Result<Vec<_>, _> = rows.into_iter().map(MachineRecord::try_from).collect();
        let mut records = records?;
        records.sort_by(|a, b| natural(&a.name, &b.name));
        Ok(records)
    }

    async fn update_state(&mut self, machine: &MachineRecord) -> Result<bool, DbError> {
        let done = sqlx::query(
            "UPDATE machines SET wanted = ?, state = ?, reason = ?, version = ?, boot_ms = ?, started_at_ms = ?
             WHERE uuid = ?",
        )
        .bind(machine.wanted.name())
        .bind(machine.state.name())
        .bind(&machine.reason)
        .bind(&machine.version)
        .bind(machine.boot_ms.map(stored))
        .bind(machine.started_at_ms.map(stored))
        .bind(machine.uuid.to_string())
        .execute(&mut *self.connection)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn set_pin(&mut self, uuid: Uuid, pin: Option<&str>) -> Result<bool, DbError> {
        let done = sqlx::query("UPDATE machines SET pin = ? WHERE uuid = ?")
            .bind(pin)
            .bind(uuid.to_string())
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn set_limits(&mut self, machine: &MachineRecord) -> Result<bool, DbError> {
        let MachineRecord { cache, memory_bytes, cpus, uuid, .. } = machine;
        let done = sqlx::query(
            "UPDATE machines SET cache_ram_bytes = ?, cache_disk_bytes = ?, cache_weight = ?, memory_bytes = ?, cpus = ?
             WHERE uuid = ?",
        )
        .bind(stored(cache.ram_bytes))
        .bind(stored(cache.disk_bytes))
        .bind(i64::from(cache.weight))
        .bind(stored(*memory_bytes))
        .bind(i64::from(*cpus))
        .bind(uuid.to_string())
        .execute(&mut *self.connection)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn remove(&mut self, uuid: Uuid) -> Result<bool, DbError> {
        let done = sqlx::query("DELETE FROM machines WHERE uuid = ?")
            .bind(uuid.to_string())
            .execute(&mut *self.connection)
            .await?;
        *self.has_removed = true;
        Ok(done.rows_affected() == 1)
    }
}
