//! The statements that read and change machines.

use std::net::Ipv4Addr;

use async_trait::async_trait;
use headwater_api::name::natural_key;
use headwater_api::{
    BootFrom, CloudMachine, Filter, FixedAddress, Identity, MachineSort, MachineState, OnHostLoss, Position,
    Wanted,
};
use uuid::Uuid;

use crate::error::DbError;
use crate::record::{MachineRecord, Secret};
use crate::repository::MachineRepository;
use crate::secrets::KeySlot;
use crate::sql::Unit;
use crate::sql::filter::{Condition, MACHINES};
use crate::sql::hardware::Hardware;
use crate::sql::statement::{Insert, Row, Statement, loaded, unreadable};

/// Machines with their user data.
const WHOLE: &str = "SELECT machines_and_catalogs.*, user_data.text AS user_data
    FROM machines_and_catalogs LEFT JOIN user_data ON machine = uuid";

pub(super) struct Machines<'a>(pub(super) &'a mut Unit);

/// Columns of secrets, whose rows are named by the UUID of the machine.
const HOST_KEY: &str = "machines.ssh_host_key_private";
const USER_DATA: &str = "user_data.text";

/// A machine of a list: without its secrets, which are seldom needed and take their time.
fn listed(row: &Row) -> Result<MachineRecord, DbError> {
    record(row, None, Secret::unread())
}

/// A machine with its secrets.
fn whole(row: &Row, key: &KeySlot) -> Result<MachineRecord, DbError> {
    let uuid: String = row.get("uuid")?;
    let user_data: Option<Vec<u8>> = row.get("user_data")?;
    let user_data = user_data.map(|stored| key.decrypt(USER_DATA, &uuid, stored)).transpose()?;
    let host_key = key.decrypt(HOST_KEY, &uuid, row.get("ssh_host_key_private")?)?;
    record(row, user_data, Secret::new(host_key))
}

fn record(
    row: &Row,
    user_data: Option<String>,
    ssh_host_key_private: Secret,
) -> Result<MachineRecord, DbError> {
    let Hardware { cache, transport, memory_bytes, cpus, platform } = Hardware::of(row)?;
    let catalog_image: Option<String> = row.get("catalog_image")?;
    let on_host_loss: Option<String> = row.get("catalog_on_host_loss")?;
    let on_host_loss = on_host_loss
        .map(|text| OnHostLoss::parse(&text).map_err(|_| unreadable("catalog_on_host_loss", &text)))
        .transpose()?;
    let cloud: Option<String> = row.get("cloud")?;
    let cloud =
        cloud.map(|text| CloudMachine::parse(&text).ok_or_else(|| unreadable("cloud", &text))).transpose()?;
    let address: Option<String> = row.get("address")?;
    let address = address
        .map(|text| FixedAddress::from_text(&text).ok_or_else(|| unreadable("address", &text)))
        .transpose()?;
    Ok(MachineRecord {
        uuid: row.uuid("uuid")?,
        name: row.get("name")?,
        host: row.uuid("host")?,
        connection: row.get("connection")?,
        cloud,
        mac: row.get("mac")?,
        boot: row.read("boot", |text| BootFrom::parse(text).ok())?,
        image: catalog_image.map_or_else(|| row.get("image"), Ok)?,
        pin: row.get("pin")?,
        catalog: row.get("catalog")?,
        catalog_pin: row.get("catalog_pin")?,
        scheme: row.maybe_count("scheme")?,
        catalog_scheme: row.maybe_count("catalog_scheme")?,
        cache,
        transport,
        memory_bytes,
        cpus,
        platform,
        identity: Identity {
            host_name: row.get("host_name")?,
            machine_id: row.get("machine_id")?,
            ssh_host_key_public: row.get("ssh_host_key_public")?,
            address,
            user_data,
            personality: std::collections::BTreeMap::new(),
        },
        ssh_host_key_private,
        wanted: row.read("wanted", Wanted::parse)?,
        state: row.read("state", MachineState::parse)?,
        reason: row.get("reason")?,
        version: row.get("version")?,
        kept: row.get("kept")?,
        boot_ms: row.maybe_number("boot_ms")?,
        started_at_ms: row.maybe_number("started_at_ms")?,
        fenced: row.get("fenced")?,
        to_start: row.get("to_start")?,
        on_host_loss: on_host_loss.unwrap_or_default(),
        created_at_ms: row.number("created_at_ms")?,
    })
}

impl Machines<'_> {
    async fn one(
        &mut self,
        condition: &str,
        value: impl Into<super::Value>,
    ) -> Result<Option<MachineRecord>, DbError> {
        let found = self.0.row(Statement::new(format!("{WHOLE} WHERE {condition}")).bind(value)).await?;
        let key = self.0.key.clone();
        found.as_ref().map(|row| whole(row, &key)).transpose()
    }

    /// The private half of a host key as it is stored.
    fn host_key(&self, machine: &MachineRecord) -> Result<Vec<u8>, DbError> {
        let Some(text) = machine.ssh_host_key_private.read() else {
            return Err(DbError::WithoutSecrets { machine: machine.name.clone() });
        };
        self.0.key.encrypt(HOST_KEY, &machine.uuid.to_string(), text)
    }
}

#[async_trait]
impl MachineRepository for Machines<'_> {
    async fn add(&mut self, machine: &MachineRecord) -> Result<(), DbError> {
        let MachineRecord { cache, transport, memory_bytes, cpus, ref platform, .. } = *machine;
        let hardware = Hardware { cache, transport, memory_bytes, cpus, platform: platform.clone() };
        let (host_key, address) = (self.host_key(machine)?, machine.identity.address.as_ref());
        let insert = Insert::into("machines")
            .set("uuid", machine.uuid)
            .set("name", &machine.name)
            .set("name_key", natural_key(&machine.name))
            .set("host", machine.host)
            .set("mac", &machine.mac)
            .set("boot", machine.boot.name())
            .set("image", &machine.image)
            .set("pin", &machine.pin)
            .set("catalog", &machine.catalog)
            .set("connection", &machine.connection)
            .set("cloud", &machine.cloud.as_ref().map(CloudMachine::to_text))
            .set("scheme", machine.scheme.map(u64::from))
            .set("host_name", &machine.identity.host_name)
            .set("machine_id", &machine.identity.machine_id)
            .set("ssh_host_key_public", &machine.identity.ssh_host_key_public)
            .set("ssh_host_key_private", host_key)
            .set("ip", &address.map(|it| it.ip.to_string()))
            .set("address", &address.map(FixedAddress::to_text))
            .set("wanted", machine.wanted.name())
            .set("state", machine.state.name())
            .set("reason", &machine.reason)
            .set("version", &machine.version)
            .set("kept", &machine.kept)
            .set("boot_ms", machine.boot_ms)
            .set("started_at_ms", machine.started_at_ms)
            .set("fenced", machine.fenced)
            .set("to_start", machine.to_start)
            .set("created_at_ms", machine.created_at_ms);
        self.0.add(hardware.set_in(insert), || format!("machine '{}'", machine.name)).await?;
        if let Some(text) = &machine.identity.user_data {
            let stored = self.0.key.encrypt(USER_DATA, &machine.uuid.to_string(), text)?;
            let insert = Insert::into("user_data").set("machine", machine.uuid).set("text", stored);
            self.0.add(insert, || format!("user data of machine '{}'", machine.name)).await?;
        }
        Ok(())
    }

    async fn by_name(&mut self, name: &str) -> Result<Option<MachineRecord>, DbError> {
        self.one("name = $1", name).await
    }

    async fn by_uuid(&mut self, uuid: Uuid) -> Result<Option<MachineRecord>, DbError> {
        self.one("uuid = $1", uuid).await
    }

    async fn by_mac(&mut self, mac: &str) -> Result<Option<MachineRecord>, DbError> {
        self.one("mac = $1", mac).await
    }

    async fn by_ip(&mut self, ip: Ipv4Addr) -> Result<Option<MachineRecord>, DbError> {
        self.one("ip = $1", ip.to_string()).await
    }

    async fn list(&mut self) -> Result<Vec<MachineRecord>, DbError> {
        let all = "SELECT * FROM machines_and_catalogs ORDER BY name_key";
        self.0.all(Statement::new(all), listed).await
    }

    async fn page(
        &mut self,
        filter: &Filter,
        sort: MachineSort,
        after: Option<&Position>,
        limit: u32,
    ) -> Result<Vec<MachineRecord>, DbError> {
        let order = match sort {
            MachineSort::State => "state, name_key",
            MachineSort::Boot => "coalesce(boot_ms, 0) DESC, name_key",
            _ => "name_key",
        };
        let condition = Condition::of(filter, &MACHINES, 0);
        let mut condition = match after {
            None => condition,
            Some(Position::Name(name)) => condition.and("name_key > ?", vec![natural_key(name).into()]),
            Some(Position::State(state, name)) => condition
                .and("(state, name_key) > (?, ?)", vec![state.name().into(), natural_key(name).into()]),
            Some(Position::Boot(boot_ms, name)) => condition.and(
                "(coalesce(boot_ms, 0) < ? OR (coalesce(boot_ms, 0) = ? AND name_key > ?))",
                vec![(*boot_ms).into(), (*boot_ms).into(), natural_key(name).into()],
            ),
        };
        let limit = condition.value(limit);
        let page = format!(
            "SELECT * FROM machines_and_catalogs WHERE {} ORDER BY {order} LIMIT {limit}",
            condition.text
        );
        self.0.all(Statement::new(page).bind_all(condition.values), listed).await
    }

    async fn of_catalog(&mut self, catalog: &str) -> Result<Vec<MachineRecord>, DbError> {
        let all = "SELECT * FROM machines_and_catalogs WHERE catalog = $1 ORDER BY name_key";
        self.0.all(Statement::new(all).bind(catalog), listed).await
    }

    async fn of_host(&mut self, host: Uuid) -> Result<Vec<MachineRecord>, DbError> {
        let all = "SELECT * FROM machines_and_catalogs WHERE host = $1 ORDER BY name_key";
        self.0.all(Statement::new(all).bind(host), listed).await
    }

    async fn of_clouds(&mut self) -> Result<Vec<MachineRecord>, DbError> {
        let all = "SELECT * FROM machines_and_catalogs WHERE connection IS NOT NULL ORDER BY name_key";
        self.0.all(Statement::new(all), listed).await
    }

    async fn count(&mut self, filter: &Filter) -> Result<u64, DbError> {
        let condition = Condition::of(filter, &MACHINES, 0);
        // The view costs more than the table, and is needed for what catalogs say.
        let from = if filter.is_empty() { "machines" } else { "machines_and_catalogs" };
        let count = format!("SELECT count(*) AS n FROM {from} WHERE {}", condition.text);
        self.0.number(Statement::new(count).bind_all(condition.values), "n").await.map(loaded)
    }

    async fn update_state(&mut self, machine: &MachineRecord) -> Result<bool, DbError> {
        let update = Statement::new(
            "UPDATE machines SET wanted = $1, state = $2, reason = $3, version = $4, boot_ms = $5, started_at_ms = $6,
               kept = $7, cloud = $8
             WHERE uuid = $9",
        )
        .bind(machine.wanted.name())
        .bind(machine.state.name())
        .bind(&machine.reason)
        .bind(&machine.version)
        .bind(machine.boot_ms)
        .bind(machine.started_at_ms)
        .bind(&machine.kept)
        .bind(&machine.cloud.as_ref().map(CloudMachine::to_text))
        .bind(machine.uuid);
        self.0.changes_one(update).await
    }

    async fn set_host(&mut self, machine: &MachineRecord) -> Result<bool, DbError> {
        let update = Statement::new(
            "UPDATE machines SET host = $1, wanted = $2, state = $3, reason = $4, to_start = $5, fenced = $6, kept = NULL
             WHERE uuid = $7",
        )
        .bind(machine.host)
        .bind(machine.wanted.name())
        .bind(machine.state.name())
        .bind(&machine.reason)
        .bind(machine.to_start)
        .bind(machine.fenced)
        .bind(machine.uuid);
        self.0.changes_one(update).await
    }

    async fn to_start(&mut self) -> Result<Vec<MachineRecord>, DbError> {
        let all = "SELECT * FROM machines_and_catalogs WHERE to_start ORDER BY name_key";
        self.0.all(Statement::new(all), listed).await
    }

    async fn is_started(&mut self, uuid: Uuid) -> Result<bool, DbError> {
        self.0
            .changes_one(Statement::new("UPDATE machines SET to_start = FALSE WHERE uuid = $1").bind(uuid))
            .await
    }

    async fn set_fenced(&mut self, uuid: Uuid, fenced: bool) -> Result<bool, DbError> {
        let update = Statement::new("UPDATE machines SET fenced = $1 WHERE uuid = $2");
        self.0.changes_one(update.bind(fenced).bind(uuid)).await
    }

    async fn set_pin(&mut self, uuid: Uuid, pin: Option<&str>) -> Result<bool, DbError> {
        let update = Statement::new("UPDATE machines SET pin = $1 WHERE uuid = $2").bind(pin).bind(uuid);
        self.0.changes_one(update).await
    }

    async fn set_host_key(&mut self, machine: &MachineRecord) -> Result<bool, DbError> {
        let host_key = self.host_key(machine)?;
        // The key from before is not left in the log of the database.
        self.0.has_removed = true;
        let text = "UPDATE machines SET ssh_host_key_public = $1, ssh_host_key_private = $2 WHERE uuid = $3";
        let update = Statement::new(text)
            .bind(&machine.identity.ssh_host_key_public)
            .bind(host_key)
            .bind(machine.uuid);
        self.0.changes_one(update).await
    }

    async fn set_scheme(&mut self, machine: &MachineRecord) -> Result<bool, DbError> {
        let settings = machine.settings();
        let update = Hardware::of_settings(&settings).update("machines", " WHERE uuid = $16", machine.scheme);
        if !self.0.changes_one(update.bind(machine.uuid)).await? {
            return Ok(false);
        }
        let before = Statement::new("DELETE FROM user_data WHERE machine = $1").bind(machine.uuid);
        // Earlier user data is not left in the log of the database.
        self.0.has_removed |= self.0.changes_one(before).await?;
        if let Some(text) = settings.user_data {
            let stored = self.0.key.encrypt(USER_DATA, &machine.uuid.to_string(), &text)?;
            let insert = Insert::into("user_data").set("machine", machine.uuid).set("text", stored);
            self.0.add(insert, || format!("user data of machine '{}'", machine.name)).await?;
        }
        Ok(true)
    }

    async fn set_limits(&mut self, machine: &MachineRecord) -> Result<bool, DbError> {
        let MachineRecord { cache, memory_bytes, cpus, uuid, .. } = machine;
        let update = Statement::new(
            "UPDATE machines SET cache_ram_bytes = $1, cache_disk_bytes = $2, cache_weight = $3, memory_bytes = $4, cpus = $5
             WHERE uuid = $6",
        )
        .bind(cache.ram_bytes)
        .bind(cache.disk_bytes)
        .bind(cache.weight)
        .bind(*memory_bytes)
        .bind(*cpus)
        .bind(*uuid);
        self.0.changes_one(update).await
    }

    async fn remove(&mut self, uuid: Uuid) -> Result<bool, DbError> {
        self.0.has_removed = true;
        self.0.changes_one(Statement::new("DELETE FROM machines WHERE uuid = $1").bind(uuid)).await
    }
}
