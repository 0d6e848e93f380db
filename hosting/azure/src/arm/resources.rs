//! Describes the resources that an image needs in Azure: a disk for an upload, and a definition and a version in a
//! gallery. Their names are derived from the image and its version.

use serde_json::json;

use crate::arm::Resource;
use crate::error::{AzureError, AzureErrorKind};

/// The API version of disks.
pub const DISK_API: &str = "2025-01-02";
/// The API version of galleries.
pub const GALLERY_API: &str = "2024-03-03";

/// The scope of resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// The subscription's UUID.
    pub subscription: String,
    /// The resource group.
    pub group: String,
    /// The region, such as `westeurope`.
    pub region: String,
}

impl Scope {
    /// The path of the resource group.
    pub fn group_path(&self) -> String {
        format!("/subscriptions/{}/resourceGroups/{}", self.subscription, self.group)
    }

    /// The path of a resource of a provider, such as `Microsoft.Network`.
    pub fn path(&self, provider: &str, kind: &str, name: &str) -> String {
        format!("{}/providers/{provider}/{kind}/{name}", self.group_path())
    }

    /// The path of a kind of compute resources.
    pub fn compute_path(&self, kind: &str) -> String {
        format!("{}/providers/Microsoft.Compute/{kind}", self.group_path())
    }

    fn compute(&self, kind: &str, name: &str) -> String {
        self.path("Microsoft.Compute", kind, name)
    }

    /// The path of the disk that receives an upload.
    pub fn disk_path(&self, name: &str) -> String {
        self.compute("disks", name)
    }
}

/// The generation of virtual hardware that an image boots on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// BIOS.
    One,
    /// UEFI.
    Two,
}

impl Generation {
    const fn name(self) -> &'static str {
        match self {
            Self::One => "V1",
            Self::Two => "V2",
        }
    }
}

/// A disk that waits for an upload of a fixed VHD with this file length.
pub fn disk_for_upload(
    scope: &Scope,
    name: &str,
    generation: Generation,
    file_bytes: u64,
) -> Result<Resource, AzureError> {
    const MIN_BYTES: u64 = (20 << 20) + 512;
    if file_bytes < MIN_BYTES || file_bytes % (1 << 20) != 512 {
        let why = format!(
            "cannot create a disk for a VHD of {file_bytes} bytes: Azure accepts a multiple of 1 MiB plus 512 bytes, at least 20 MiB"
        );
        return Err(AzureError::new(AzureErrorKind::Invalid, why));
    }
    Ok(Resource {
        path: scope.disk_path(name),
        api_version: DISK_API,
        body: json!({
            "location": scope.region,
            "sku": {"name": "Standard_LRS"},
            "properties": {
                "osType": "Linux",
                "hyperVGeneration": generation.name(),
                "creationData": {"createOption": "Upload", "uploadSizeBytes": file_bytes},
            },
        }),
        is_conditional: false,
    })
}

/// A gallery. Its name must not contain `-`.
pub fn gallery(scope: &Scope, name: &str) -> Resource {
    Resource {
        path: scope.compute("galleries", name),
        api_version: GALLERY_API,
        body: json!({"location": scope.region, "properties": {"description": "Images of Headwater"}}),
        is_conditional: false,
    }
}

/// The definition of an image in a gallery.
pub fn definition(
    scope: &Scope,
    gallery: &str,
    image: &str,
    generation: Generation,
    has_nvme: bool,
) -> Resource {
    let controllers = if has_nvme { "SCSI, NVMe" } else { "SCSI" };
    Resource {
        path: format!("{}/images/{image}", scope.compute("galleries", gallery)),
        api_version: GALLERY_API,
        body: json!({
            "location": scope.region,
            "properties": {
                "osType": "Linux",
                "osState": "Generalized",
                "hyperVGeneration": generation.name(),
                "architecture": "x64",
                "identifier": {"publisher": "headwater", "offer": gallery, "sku": image},
                "features": [{"name": "DiskControllerTypes", "value": controllers}],
            },
        }),
        is_conditional: false,
    }
}

/// A version of an image in a gallery, made from a disk. Azure's `latest` never selects it, because a channel of
/// Headwater decides which version boots.
pub fn version(
    scope: &Scope,
    gallery: &str,
    image: &str,
    number: u32,
    disk: &str,
    replicas: u32,
) -> Resource {
    let images = scope.compute("galleries", gallery);
    Resource {
        path: format!("{images}/images/{image}/versions/1.0.{number}"),
        api_version: GALLERY_API,
        body: json!({
            "location": scope.region,
            "properties": {
                "publishingProfile": {
                    "replicationMode": "Full",
                    "excludeFromLatest": true,
                    "targetRegions": [{
                        "name": scope.region,
                        "regionalReplicaCount": replicas,
                        "storageAccountType": "Standard_LRS",
                    }],
                },
                "storageProfile": {
                    "osDiskImage": {"hostCaching": "ReadOnly", "source": {"id": scope.disk_path(disk)}},
                },
                "safetyProfile": {"allowDeletionOfReplicatedLocations": false},
            },
        }),
        is_conditional: false,
    }
}
