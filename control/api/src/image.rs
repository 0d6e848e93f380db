//! Images and their versions.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One immutable state of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageVersion {
    /// The image.
    pub image: String,
    /// Counts from 1 for each image.
    pub number: u64,
    /// BLAKE3 of the version's manifest: its identity, 64 hexadecimal digits.
    pub hash: String,
    /// Size of the disk.
    pub size_bytes: u64,
    /// What this version added to the store, compressed.
    pub stored_bytes: u64,
    /// When it was made.
    pub created_at_ms: u64,
    /// Where it came from.
    pub source: String,
}

/// A named golden disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// Its versions, oldest first.
    pub versions: Vec<ImageVersion>,
}

/// All images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageList {
    /// Ordered by name.
    pub images: Vec<Image>,
}

/// What to import, and under which name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportRequest {
    /// The image's name. An image that exists gets a new version.
    pub name: String,
    /// An absolute path on the daemon's host (raw or qcow2), or an NBD URI such as
    /// `nbd+unix:///name?socket=/path` or `nbd://127.0.0.1:10809/name`.
    pub source: String,
}

/// Where to write a version as a raw disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    /// An absolute path on the daemon's host. It must not exist yet.
    pub target: String,
}

/// What a verification found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VerifyReport {
    /// The version that was read.
    pub version: ImageVersion,
    /// Bytes that were read and compared with their hashes.
    pub checked_bytes: u64,
    /// What is damaged, one line each: where in the disk, and what is wrong. Empty: all is well.
    pub damage: Vec<String>,
}

/// What was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Removed {
    /// The names of what is gone.
    pub removed: Vec<String>,
    /// Space that became free.
    pub freed_bytes: u64,
}
