//! The rows, as the service sees them.

use headwater_api::{CacheSettings, DiskTransport, Identity, MachineState, Wanted};
use uuid::Uuid;

/// Text that must not reach a log: its `Debug` says nothing.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The secret.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineRecord {
    /// Its identity for good.
    pub uuid: Uuid,
    /// Its name; unique.
    pub name: String,
    /// Its network address; unique.
    pub mac: String,
    /// The image reference as given.
    pub image: String,
    /// The version that it boots in place of that, as `IMAGE@NUMBER`.
    pub pin: Option<String>,
    /// Its write cache.
    pub cache: CacheSettings,
    /// How it reaches its disk.
    pub transport: DiskTransport,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// The guest's processors.
    pub cpus: u32,
    /// What its guest is told.
    pub identity: Identity,
    /// The private half of its SSH host key, as an OpenSSH file.
    pub ssh_host_key_private: Secret,
    /// What it should do.
    pub wanted: Wanted,
    /// What it does.
    pub state: MachineState,
    /// Why.
    pub reason: Option<String>,
    /// The version it runs, or ran last: `debian@3 (9f2c...)`.
    pub version: Option<String>,
    /// How long the last boot took.
    pub boot_ms: Option<u64>,
    /// When it was started last.
    pub started_at_ms: Option<u64>,
    /// When it was created.
    pub created_at_ms: u64,
}

impl MachineRecord {
    /// What it boots: its pin, else its image.
    pub fn reference(&self) -> &str {
        self.pin.as_ref().unwrap_or(&self.image)
    }
}

/// An event to append; the database numbers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// When.
    pub at_ms: u64,
    /// Who.
    pub actor: String,
    /// On what.
    pub subject: String,
    /// What happened.
    pub action: &'static str,
    /// In words.
    pub detail: String,
}
