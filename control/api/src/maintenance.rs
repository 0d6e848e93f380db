//! Maintenance of images: editing one on a machine, and making versions of disks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::image::ImageVersion;

/// The machine that is to edit an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MaintenanceRequest {
    /// Its name.
    pub machine: String,
}

/// An image that is being edited: one machine has a private disk over one of its versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MaintenanceSession {
    /// The image.
    pub image: String,
    /// The number of the version below.
    pub version: u64,
    /// The machine.
    pub machine: String,
    /// Since when.
    pub since_ms: u64,
    /// Who began it.
    pub author: String,
    /// Why the machine could not be started on its disk now for want of space, in the answer to `POST` of an edit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// What a version that is made of a disk is called.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SealRequest {
    /// A line about the version, for people.
    #[serde(default)]
    pub note: String,
    /// Whether what was edited becomes a version also where the image has versions that are newer than the one it was edited
    /// over: what they changed is not in it. What a machine that edits nothing has is sealed in any case.
    // Daemons that do not know it refuse it: so only where it is asked for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub over_newer: bool,
    /// Whether the version may hold the machine's identity: nothing is removed in its guest, and what is found on its disk
    /// does not refuse the seal.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_identity: bool,
}

/// How a running machine was stopped for the instant of which a version was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pause {
    /// How long its disk answered nothing.
    pub disk_us: u64,
    /// How long its guest's file systems stood still at most, from the request to freeze them to the answer that they
    /// go on, so that the version needs no repair; absent where the guest agent did not do that: then the version is
    /// as after a power cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_ms: Option<u64>,
    /// Why the guest's file systems were not frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
}

/// A version that was made of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sealed {
    /// It.
    pub version: ImageVersion,
    /// The version that it was made from, as `IMAGE@NUMBER`.
    pub parent: String,
    /// The newest version there was, as `IMAGE@NUMBER`, where that is not the one that it was made from: what it changed is in this
    /// one only where the machine did it, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newer: Option<String>,
    /// Bytes in chunks that the machine changed: so much was read.
    pub changed_bytes: u64,
    /// The version that `production` was set to before, as it was not set and machines would have booted this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub production: Option<u64>,
    /// The pause, where the machine was on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause: Option<Pause>,
    /// The files and settings that were removed in the guest before the machine was switched off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<String>,
    /// The parts of the machine's identity that are in the version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub identity: Vec<String>,
    /// File systems that could not be looked into for that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_looked_into: Vec<String>,
}
