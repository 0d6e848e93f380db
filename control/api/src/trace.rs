//! Boot traces: what boots of a version read first.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ImageVersion;

/// Where a boot trace is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TracePlace {
    /// In the store, with its version: all who read the version there have it.
    Store,
    /// In the chunk cache of the daemon's host, because the store is only read.
    Host,
}

/// A version's boot trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BootTrace {
    /// The version.
    pub version: ImageVersion,
    /// Boots that it was made from.
    pub boots: u32,
    /// Boots from which on nothing more is recorded.
    pub boots_wanted: u32,
    /// Chunks of the disk that they read.
    pub chunks: u64,
    /// What these are of the disk.
    pub image_bytes: u64,
    /// What these take in the store: so much is fetched before a boot.
    pub stored_bytes: u64,
    /// How long after the start the last of them was read, in milliseconds.
    pub lasts_ms: u64,
    /// Where it is kept.
    pub place: TracePlace,
}

/// A file with a boot trace to take in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MergeTraceRequest {
    /// An absolute path on the daemon's host.
    pub source: String,
}

/// Where to write a boot trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SaveTraceRequest {
    /// An absolute path on the daemon's host. It must not exist yet.
    pub target: String,
}
