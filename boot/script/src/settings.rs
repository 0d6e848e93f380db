//! The settings of the agent in a machine's initramfs.

use serde::{Deserialize, Serialize};

/// The directory in the initramfs that contains the settings.
pub const DIRECTORY: &str = "headwater";
/// The settings, as JSON.
pub const SETTINGS_FILE: &str = "settings.json";
/// The file of the token that the image servers demand.
pub const TOKEN_FILE: &str = "token";
/// The certificate authorities of the image servers, in PEM.
pub const CA_FILE: &str = "ca.pem";

/// The identity of a machine, and what it boots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The machine's name.
    pub machine: String,
    /// Its host name.
    pub host_name: String,
    /// Its machine-id: 32 hexadecimal digits.
    pub machine_id: String,
    /// The hardware address of the card that it boots from.
    pub mac: String,
    /// The version, as `IMAGE@NUMBER`, for people.
    pub version: String,
    /// The hash of the version's manifest. Every byte of the image is verified with it.
    pub manifest: String,
    /// The image servers, separated by commas.
    pub servers: String,
    /// The partition with the root file system; 0 is the whole disk.
    pub root_partition: u32,
    /// The largest write cache, in bytes of memory.
    pub cache_ram_bytes: u64,
    /// The time at the boot server, in milliseconds since 1970. Without a correct clock, certificates cannot be
    /// verified.
    pub now_ms: u64,
}

impl Settings {
    /// As JSON.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Parses what [`Settings::to_json`] wrote.
    pub fn from_json(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}
