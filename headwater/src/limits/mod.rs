//! The limits of write caches that `headwater export` and `headwater attach` serve, changed while they do.
//!
//! ```text
//!   headwater cache list|set                             headwater export, attach: one socket each
//!   client --- a line of JSON: Request, at most 4 KiB ---> server     DIR/PID.sock, for this user and root
//!          <-- a line of JSON: Answer, at most 1 MiB -----
//! ```
//!
//! Each connection has one request, and five seconds for it. The daemon's machines have `machine set` instead.

pub mod client;
mod places;
pub mod server;

use std::time::Duration;

use headwater_api::{CacheMode, CacheSettings, Problem};
use serde::{Deserialize, Serialize};

/// Longest request.
const REQUEST_BYTES: u64 = 4 << 10;

/// Longest answer: some thousand volumes.
const ANSWER_BYTES: u64 = 1 << 20;

/// How long one request may take, with its answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// What is asked of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Its write caches.
    List,
    /// Other limits, at once.
    Set(Change),
}

/// Other limits; what is not given stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// Of this volume only; else of all.
    pub volume: Option<String>,
    /// The most memory.
    pub ram_bytes: Option<u64>,
    /// The most disk space.
    pub disk_bytes: Option<u64>,
    /// The weight among the volumes of the process. Absent: it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// What a process answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Its write caches, after a change.
    Caches(Process),
    /// Why it is not done.
    Problem(Problem),
}

/// A process that serves volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// The number of its user, as the kernel has it: what the process itself says of that counts nothing.
    #[serde(default)]
    pub uid: u32,
    /// What its volumes are over, as it was given.
    pub source: String,
    /// Block devices of this kernel that it serves, and what they were called.
    pub devices: Vec<String>,
    /// Its volumes.
    pub caches: Vec<Cache>,
}

/// The write cache of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    /// What the volume is called: the source, or where its machine finds it if there are several.
    pub volume: String,
    /// Where writes go.
    pub mode: CacheMode,
    /// The most memory that it takes.
    pub ram_limit_bytes: u64,
    /// What it takes.
    pub ram_used_bytes: u64,
    /// The most disk space that it takes; 0 in mode `ram`.
    pub disk_limit_bytes: u64,
    /// What it takes.
    pub disk_used_bytes: u64,
    /// Its weight among the volumes of the process.
    #[serde(default = "CacheSettings::default_weight")]
    pub weight: u32,
    /// How writes fare that find no room.
    pub state: State,
}

/// Whether a write cache has room, and keeps what it is to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It has.
    Ok,
    /// Writes wait for room.
    Waiting,
    /// They are refused.
    Full,
    /// The disk of a persistent one did not take what was to be made durable, at the last try.
    Failing,
}
