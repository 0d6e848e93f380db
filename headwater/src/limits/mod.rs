//! `headwater cache`: shows and changes the limits of write caches while `headwater export` and `headwater attach`
//! serve them.
//!
//! ```text
//!   headwater cache list|set                             headwater export, attach: one socket each
//!   client --- a line of JSON: Request, at most 4 KiB ---> server     DIR/PID.sock, for this user and root
//!          <-- a line of JSON: Answer, at most 1 MiB -----
//! ```
//!
//! Each connection carries one request, with a timeout of five seconds. For the daemon's machines use `machine set`
//! instead.

pub mod client;
mod places;
pub mod server;

use std::time::Duration;

use headwater_api::{CacheMode, CacheSettings, Problem};
use serde::{Deserialize, Serialize};

/// The longest request.
const REQUEST_BYTES: u64 = 4 << 10;

/// The longest answer, which suffices for some thousand volumes.
const ANSWER_BYTES: u64 = 1 << 20;

/// Timeout of a request with its answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// A request to a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Show its write caches.
    List,
    /// Change limits at once.
    Set(Change),
}

/// New limits of the volumes of one process. A limit that is absent stays unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// Only of this volume. Absent: of all volumes.
    pub volume: Option<String>,
    /// The most memory.
    pub ram_bytes: Option<u64>,
    /// The most disk space.
    pub disk_bytes: Option<u64>,
    /// The weight among the volumes of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// The answer of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Its write caches; after `Set` with the new limits.
    Caches(Process),
    /// Why the request failed.
    Problem(Problem),
}

/// A process that serves volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its process id.
    pub pid: u32,
    /// Its user id, which the client takes from the kernel and not from the process.
    #[serde(default)]
    pub uid: u32,
    /// The source of its volumes, as the user gave it.
    pub source: String,
    /// The block devices of this kernel that it serves, and the user's own names for them.
    pub devices: Vec<String>,
    /// Its volumes.
    pub caches: Vec<Cache>,
}

/// The write cache of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    /// The volume's name: the source, or the address of its export if there are several.
    pub volume: String,
    /// Where writes go.
    pub mode: CacheMode,
    /// The memory limit.
    pub ram_limit_bytes: u64,
    /// The memory in use.
    pub ram_used_bytes: u64,
    /// The limit of overflow disk space; 0 in mode `ram`.
    pub disk_limit_bytes: u64,
    /// The overflow disk space in use.
    pub disk_used_bytes: u64,
    /// Its weight among the volumes of the process.
    #[serde(default = "CacheSettings::default_weight")]
    pub weight: u32,
    /// The state.
    pub state: State,
}

/// Whether a write cache has space, and can make data durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It has space.
    Ok,
    /// Writes wait for space.
    Waiting,
    /// Writes fail for lack of space.
    Full,
    /// The last flush of a persistent cache failed, because its disk failed or is full.
    Failing,
}
