//! The state of the daemon and its host: the answer to `headwater status`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::Alarm;

/// What `headwater status` shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// The daemon's process id.
    pub pid: u32,
    /// The daemon's data directory.
    pub data_dir: String,
    /// When the daemon started.
    pub started_at_ms: u64,
    /// The URL of the API over TCP, if the daemon serves one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_url: Option<String>,
    /// The URL of the web console, if the daemon serves one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_url: Option<String>,
    /// The fingerprint of the certificate of the API and the web console, if the daemon made it: `sha256:` and 64
    /// hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// The number of images. Absent if the store cannot list them, like a plain web server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<u64>,
    /// Bytes of the store's files. Absent if the store cannot tell, like a store that is read from servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_bytes: Option<u64>,
    /// The age of `images` and `store_bytes`. More than a minute if the store answers slowly or not at all. Absent if
    /// neither is
    /// known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_age_ms: Option<u64>,
    /// Whether the store is read-only, like a store that is read from servers: nothing can be imported.
    #[serde(default)]
    pub store_read_only: bool,
    /// Why boots of images are not recorded, for instance because of `--boot-trace off`. Absent if they are recorded, and
    /// in answers of older
    /// daemons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boots_unrecorded: Option<String>,
    /// Whether `images` and `store_bytes` may be outdated, because this daemon changed the store since, or the store does
    /// not answer. If the
    /// store does not answer, there is an alarm with the subject `store`.
    #[serde(default)]
    pub store_outdated: bool,
    /// The number of machines.
    pub machines: u64,
    /// The number of machines that are starting, booting, running or stopping.
    /// The number of running tasks (imports, verifications, comparisons, seals, exports and others).
    pub machines_active: u64,
    /// How many long operations run: imports, verifications, comparisons, seals, exports.
    #[serde(default)]
    pub tasks_running: u64,
    /// The number of tasks that wait for these.
    #[serde(default)]
    pub tasks_waiting: u64,
    /// Alarms: machines that cannot work, a store that does not answer, damaged versions.
    pub alarms: Vec<Alarm>,
    /// Memory that all write caches use.
    pub ram_used_bytes: u64,
    /// The memory that all write caches share.
    pub host_ram: HostRam,
    /// Disk space of the write caches in use, in all.
    pub disk_used_bytes: u64,
    /// Free bytes on the file system of the data directory.
    pub free_bytes: u64,
    /// How machines are run: `KVM`, or `TCG: /dev/kvm does not exist`, or why they cannot be run.
    pub hypervisor: String,
}

/// The memory that the write caches of a host share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostRam {
    /// The configured limit of all write caches together.
    pub configured_bytes: u64,
    /// The present limit: lower than the configured one under memory pressure.
    pub limit_bytes: u64,
    /// The memory that the write caches use, including buffers and index.
    pub used_bytes: u64,
    /// How often memory pressure lowered the limit.
    pub pressure_shrinks: u64,
}
