//! The columns that the tables of machines and catalogs share: the settings of a machine.

use headwater_api::platform::{Display, Firmware, Platform};
use headwater_api::{CacheMode, CacheSettings, DiskTransport, SchemeSettings};

use crate::error::DbError;
use crate::sql::statement::{Insert, Row, Statement};

/// The settings as in records.
pub(super) struct Hardware {
    pub(super) cache: CacheSettings,
    pub(super) transport: DiskTransport,
    pub(super) memory_bytes: u64,
    pub(super) cpus: u32,
    pub(super) platform: Platform,
}

impl Hardware {
    /// Reads them from a row.
    pub(super) fn of(row: &Row) -> Result<Self, DbError> {
        Ok(Self {
            cache: CacheSettings {
                mode: row.read("cache_mode", |text| CacheMode::parse(text).ok())?,
                ram_bytes: row.number("cache_ram_bytes")?,
                disk_bytes: row.number("cache_disk_bytes")?,
                weight: row.count("cache_weight")?,
                persistent: row.get("cache_persistent")?,
            },
            transport: row.read("transport", |text| DiskTransport::parse(text).ok())?,
            memory_bytes: row.number("memory_bytes")?,
            cpus: row.count("cpus")?,
            platform: Platform {
                firmware: row.read("firmware", |text| Firmware::parse(text).ok())?,
                secure_boot: row.get("secure_boot")?,
                tpm: row.get("tpm")?,
                display: row.read("display", |text| Display::parse(text).ok())?,
                network: row.read("network", |text| text.parse().ok())?,
                scratch_bytes: row.number("scratch_bytes")?,
            },
        })
    }

    /// Of a scheme.
    pub(super) fn of_settings(settings: &SchemeSettings) -> Self {
        let SchemeSettings { cache, memory_bytes, cpus, transport, .. } = *settings;
        Self { cache, transport, memory_bytes, cpus, platform: settings.platform() }
    }

    /// The settings of a scheme.
    pub(super) fn settings(self, user_data: Option<String>) -> SchemeSettings {
        let Self { cache, transport, memory_bytes, cpus, platform } = self;
        SchemeSettings::new(cache, memory_bytes, cpus, transport).on(&platform).with_user_data(user_data)
    }

    /// A statement that changes these columns of a table, and the column `scheme`. It has 15 values.
    pub(super) fn update(&self, table: &'static str, end: &'static str, scheme: Option<u32>) -> Statement {
        let text = format!(
            "UPDATE {table} SET cache_mode = $1, cache_ram_bytes = $2, cache_disk_bytes = $3, cache_weight = $4, cache_persistent = $5,
               transport = $6, memory_bytes = $7, cpus = $8, firmware = $9, secure_boot = $10, tpm = $11, display = $12,
               network = $13, scratch_bytes = $14, scheme = $15{end}"
        );
        let Self { cache, transport, memory_bytes, cpus, platform } = self;
        Statement::new(text)
            .bind(cache.mode.name())
            .bind(cache.ram_bytes)
            .bind(cache.disk_bytes)
            .bind(cache.weight)
            .bind(cache.persistent)
            .bind(transport.name())
            .bind(*memory_bytes)
            .bind(*cpus)
            .bind(platform.firmware.name())
            .bind(platform.secure_boot)
            .bind(platform.tpm)
            .bind(platform.display.name())
            .bind(platform.network.to_string())
            .bind(platform.scratch_bytes)
            .bind(scheme.map(u64::from))
    }

    /// A row to add, with these columns.
    pub(super) fn set_in(&self, insert: Insert) -> Insert {
        let Self { cache, transport, memory_bytes, cpus, platform } = self;
        insert
            .set("cache_mode", cache.mode.name())
            .set("cache_ram_bytes", cache.ram_bytes)
            .set("cache_disk_bytes", cache.disk_bytes)
            .set("cache_weight", cache.weight)
            .set("cache_persistent", cache.persistent)
            .set("transport", transport.name())
            .set("memory_bytes", *memory_bytes)
            .set("cpus", *cpus)
            .set("firmware", platform.firmware.name())
            .set("secure_boot", platform.secure_boot)
            .set("tpm", platform.tpm)
            .set("display", platform.display.name())
            .set("network", platform.network.to_string())
            .set("scratch_bytes", platform.scratch_bytes)
    }
}
