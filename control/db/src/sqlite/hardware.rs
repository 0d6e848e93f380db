//! The columns that machines and catalogs have alike: what a machine is made of.

use headwater_api::platform::{Display, Firmware, Platform};
use headwater_api::{CacheMode, CacheSettings, DiskTransport};
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteRow};
use sqlx::{FromRow, Row as _};

use crate::error::DbError;
use crate::sqlite::{loaded, stored};

/// As they are stored, in the order of [`bind`].
pub(super) struct Columns {
    cache_mode: String,
    cache_ram_bytes: i64,
    cache_disk_bytes: i64,
    cache_weight: i64,
    cache_persistent: bool,
    transport: String,
    memory_bytes: i64,
    cpus: i64,
    firmware: String,
    display: String,
    network: String,
}

impl FromRow<'_, SqliteRow> for Columns {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            cache_mode: row.try_get("cache_mode")?,
            cache_ram_bytes: row.try_get("cache_ram_bytes")?,
            cache_disk_bytes: row.try_get("cache_disk_bytes")?,
            cache_weight: row.try_get("cache_weight")?,
            cache_persistent: row.try_get("cache_persistent")?,
            transport: row.try_get("transport")?,
            memory_bytes: row.try_get("memory_bytes")?,
            cpus: row.try_get("cpus")?,
            firmware: row.try_get("firmware")?,
            display: row.try_get("display")?,
            network: row.try_get("network")?,
        })
    }
}

/// As records have them.
pub(super) struct Hardware {
    pub(super) cache: CacheSettings,
    pub(super) transport: DiskTransport,
    pub(super) memory_bytes: u64,
    pub(super) cpus: u32,
    pub(super) platform: Platform,
}

/// A stored value that is none of its column.
pub(super) fn unreadable(column: &'static str, found: &str) -> DbError {
    DbError::Unreadable { column, found: found.to_owned() }
}

impl TryFrom<Columns> for Hardware {
    type Error = DbError;

    fn try_from(row: Columns) -> Result<Self, DbError> {
        let small =
            |column, number: i64| u32::try_from(number).map_err(|_| unreadable(column, &number.to_string()));
        let mode =
            CacheMode::parse(&row.cache_mode).map_err(|_| unreadable("cache_mode", &row.cache_mode))?;
        Ok(Self {
            cache: CacheSettings {
                mode,
                ram_bytes: loaded(row.cache_ram_bytes),
                disk_bytes: loaded(row.cache_disk_bytes),
                weight: small("cache_weight", row.cache_weight)?,
                persistent: row.cache_persistent,
            },
            transport: DiskTransport::parse(&row.transport)
                .map_err(|_| unreadable("transport", &row.transport))?,
            memory_bytes: loaded(row.memory_bytes),
            cpus: small("cpus", row.cpus)?,
            platform: Platform {
                firmware: Firmware::parse(&row.firmware)
                    .map_err(|_| unreadable("firmware", &row.firmware))?,
                display: Display::parse(&row.display).map_err(|_| unreadable("display", &row.display))?,
                network: row.network.parse().map_err(|_| unreadable("network", &row.network))?,
            },
        })
    }
}

/// A statement that inserts a row.
pub(super) type Insert<'q> = Query<'q, Sqlite, SqliteArguments>;

/// Binds them: `cache_mode, cache_ram_bytes, cache_disk_bytes, cache_weight, cache_persistent, transport, memory_bytes, cpus,
/// firmware, display, network`.
pub(super) fn bind<'q>(insert: Insert<'q>, hardware: &Hardware) -> Insert<'q> {
    let Hardware { cache, transport, memory_bytes, cpus, platform } = hardware;
    insert
        .bind(cache.mode.name())
        .bind(stored(cache.ram_bytes))
        .bind(stored(cache.disk_bytes))
        .bind(i64::from(cache.weight))
        .bind(cache.persistent)
        .bind(transport.name())
        .bind(stored(*memory_bytes))
        .bind(i64::from(*cpus))
        .bind(platform.firmware.name())
        .bind(platform.display.name())
        .bind(platform.network.to_string())
}
