//! The state of the daemon and its host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::Alarm;

/// What `headwater status` shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Its data directory.
    pub data_dir: String,
    /// Since when it runs.
    pub started_at_ms: u64,
    /// The URL of the API over TCP, if the daemon serves one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_url: Option<String>,
    /// The URL of the web console, if the daemon serves one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_url: Option<String>,
    /// The fingerprint of the certificate of both, if the daemon made it: `sha256:` and 64 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// How many images there are; absent where the store does not tell, as a plain web server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<u64>,
    /// Bytes that the store's files take. Absent where the store does not tell, as one that is read from servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_bytes: Option<u64>,
    /// How long ago the store was asked for the two: more than a minute where it does not answer soon. Absent where
    /// neither is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_age_ms: Option<u64>,
    /// Whether images are only read here, as where the store is one of servers: nothing can be imported.
    #[serde(default)]
    pub store_read_only: bool,
    /// Why boots of images are not recorded, as where `--boot-trace off` says so. Absent where they are, and from a daemon that does
    /// not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boots_unrecorded: Option<String>,
    /// Whether the two may be others by now: this daemon changed the store since, or that does not answer. It answers where no
    /// alarm has `store` as its subject.
    #[serde(default)]
    pub store_outdated: bool,
    /// How many machines there are.
    pub machines: u64,
    /// How many of them are starting, booting, running or stopping.
    pub machines_active: u64,
    /// How many long operations run: imports, verifications, comparisons, seals, exports.
    #[serde(default)]
    pub tasks_running: u64,
    /// How many wait for these.
    #[serde(default)]
    pub tasks_waiting: u64,
    /// What stands in machines' way, a store that does not answer, and versions that were found damaged.
    pub alarms: Vec<Alarm>,
    /// Memory of the write caches in use, in all.
    pub ram_used_bytes: u64,
    /// The memory that all write caches share.
    pub host_ram: HostRam,
    /// Disk space of the write caches in use, in all.
    pub disk_used_bytes: u64,
    /// Free bytes on the file system of the data directory.
    pub free_bytes: u64,
    /// How machines are run: for instance `KVM`, `TCG: /dev/kvm does not exist`, or why they cannot be.
    pub hypervisor: String,
}

/// The memory that the write caches of a host share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostRam {
    /// How much they may take together, as configured.
    pub configured_bytes: u64,
    /// How much now: less under memory pressure.
    pub limit_bytes: u64,
    /// How much they take, buffers and index included.
    pub used_bytes: u64,
    /// How often memory pressure lowered the limit.
    pub pressure_shrinks: u64,
}
