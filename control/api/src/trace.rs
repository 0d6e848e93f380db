//! Boot traces: a boot trace lists the chunks (pieces of an image) that boots of a version read first, so that they
//! can be fetched before the next boot reads them. Types of the requests and answers of `headwater image trace`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ImageVersion;

/// Where a boot trace is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TracePlace {
    /// In the store, with its version: every reader of the version gets it.
    Store,
    /// In the chunk cache of the daemon's host, because the store is read-only.
    Host,
}

/// A version's boot trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BootTrace {
    /// The version.
    pub version: ImageVersion,
    /// The number of boots from which it was made.
    pub boots: u32,
    /// The number of boots after which recording ends.
    pub boots_wanted: u32,
    /// The number of chunks of the disk that these boots read.
    pub chunks: u64,
    /// Uncompressed bytes of these chunks.
    pub image_bytes: u64,
    /// Bytes of these chunks in the store, which are fetched before a boot.
    pub stored_bytes: u64,
    /// The time from the start of the machine to the last of these reads, in milliseconds.
    pub lasts_ms: u64,
    /// Where it is kept.
    pub place: TracePlace,
}

/// The request to merge a boot trace from a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MergeTraceRequest {
    /// The file: an absolute path on the daemon's host.
    pub source: String,
}

/// The request to write a boot trace to a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SaveTraceRequest {
    /// The file: an absolute path on the daemon's host. It must not exist yet.
    pub target: String,
}
