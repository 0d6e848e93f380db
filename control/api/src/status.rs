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
    /// How many images there are.
    pub images: u64,
    /// Bytes that the store's files take.
    pub store_bytes: u64,
    /// How many machines there are.
    pub machines: u64,
    /// How many of them are starting, booting, running or stopping.
    pub machines_active: u64,
    /// What stands in machines' way.
    pub alarms: Vec<Alarm>,
    /// Memory of the write caches in use, in all.
    pub ram_used_bytes: u64,
    /// Disk space of the write caches in use, in all.
    pub disk_used_bytes: u64,
    /// Free bytes on the file system of the data directory.
    pub free_bytes: u64,
    /// How machines are run: for instance `KVM`, `TCG: /dev/kvm does not exist`, or why they cannot be.
    pub hypervisor: String,
}
