//! Maintenance sessions, in which one machine edits an image on a private disk, and seals, which make a version of a
//! machine's disk. Types of their requests and answers.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::image::ImageVersion;

/// The request to begin a maintenance session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MaintenanceRequest {
    /// The name of the machine that edits the image.
    pub machine: String,
}

/// A maintenance session: one machine has a private disk over a version of the image, until the disk is sealed or
/// discarded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MaintenanceSession {
    /// The image.
    pub image: String,
    /// The number of the version below the private disk.
    pub version: u64,
    /// The machine.
    pub machine: String,
    /// When the session began.
    pub since_ms: u64,
    /// The caller that began it.
    pub author: String,
    /// Why the machine could not be started now for lack of disk space; only in the answer to the request that begins the
    /// session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// The options of a seal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SealRequest {
    /// One line about the new version, for people.
    #[serde(default)]
    pub note: String,
    /// Whether a maintenance session may be sealed although the image has versions newer than the one below its disk; the
    /// changes of those
    /// versions are not in the new one. Other machines are sealed in any case.
    // Older daemons refuse unknown fields, so clients send this field only if it is set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub over_newer: bool,
    /// Whether the version may contain the machine's identity: nothing is removed in its guest, and an identity found on
    /// its disk
    /// does not make the seal fail.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_identity: bool,
}

/// How long a running machine was paused for the snapshot from which a version was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pause {
    /// How long its disk did not answer requests.
    pub disk_us: u64,
    /// The longest time for which its guest's file systems were frozen, from the request to freeze them to the answer that
    /// they are thawed. Absent if the guest agent could not freeze them: the version is then
    /// as after a power cut, and its file systems may need a check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_ms: Option<u64>,
    /// Why the guest's file systems were not frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
}

/// A version that was made of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sealed {
    /// The new version.
    pub version: ImageVersion,
    /// The version that it was made from, as `IMAGE@NUMBER`.
    pub parent: String,
    /// The newest version at that time, as `IMAGE@NUMBER`, if it is not `parent`. Its changes are not in the new version,
    /// unless the
    /// machine made them too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newer: Option<String>,
    /// Bytes of the chunks that the machine changed, all of which were read.
    pub changed_bytes: u64,
    /// The version to which `production` was set by this seal. It was not set before, and machines would have booted the
    /// new version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub production: Option<u64>,
    /// The pause, if the machine was on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause: Option<Pause>,
    /// The files and settings that were removed in the guest before the machine was switched off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<String>,
    /// The parts of the machine's identity that are in the version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub identity: Vec<String>,
    /// File systems that could not be searched for the machine's identity.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_looked_into: Vec<String>,
}
