//! The columns that machines and catalogs have alike: what a machine is made of.

use headwater_api::platform::{Display, Firmware, Platform};
use headwater_api::{CacheMode, CacheSettings, DiskTransport};

use crate::error::DbError;
use crate::sql::statement::{Insert, Row};

/// As records have them.
pub(super) struct Hardware {
    pub(super) cache: CacheSettings,
    pub(super) transport: DiskTransport,
    pub(super) memory_bytes: u64,
    pub(super) cpus: u32,
    pub(super) platform: Platform,
}

impl Hardware {
    /// As stored in a row.
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
