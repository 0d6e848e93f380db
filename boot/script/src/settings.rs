//! The settings of the agent in a machine's initramfs.

use serde::{Deserialize, Serialize};

/// The directory of the initramfs that the settings are in.
pub const DIRECTORY: &str = "headwater";
/// The settings, as JSON.
pub const SETTINGS_FILE: &str = "settings.json";
/// The token for the servers of the image.
pub const TOKEN_FILE: &str = "token";
/// The authorities of the certificates of these servers, in PEM.
pub const CA_FILE: &str = "ca.pem";

/// What a machine boots, and who it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The machine's name.
    pub machine: String,
    /// Its host name.
    pub host_name: String,
    /// Its machine-id: 32 hexadecimal digits.
    pub machine_id: String,
    /// The card that it boots from.
    pub mac: String,
    /// The version, as `IMAGE@NUMBER`, for people.
    pub version: String,
    /// The hash of the version's manifest, by which every byte of the image is checked.
    pub manifest: String,
    /// The servers of the image, with commas in between.
    pub servers: String,
    /// The partition with the root file system; 0 is the whole disk.
    pub root_partition: u32,
    /// The most memory that the write cache takes.
    pub cache_ram_bytes: u64,
    /// The time at the server, in milliseconds since 1970: a certificate needs a clock.
    pub now_ms: u64,
}

impl Settings {
    /// As JSON.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Reads what [`Settings::to_json`] gave.
    pub fn from_json(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}
