//! Makes a version of an image in a gallery from a disk that is uploaded, and removes it again.
//!
//! ```text
//!   disk for the upload --> write access --> pages (upload.rs) --> end of access
//!                                                                       |
//!     disk removed <-- replicas ready <-- version <-- definition <-- gallery
//! ```
//!
//! - [`publish`] may be repeated after a failure or a kill at any point: each step first looks for the result of the
//!   earlier attempt. The disk receives only the pages that it lacks.
//! - The names of all resources follow from the image, its version and its content. The tag [`CONTENT_TAG`] has the
//!   content, so a version of the same number and other content is never taken for this one.
//! - Resources without our owner tag are never changed.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use hyper::Uri;
use serde_json::{Value, json};

use crate::arm::resources::{self, DISK_API, GALLERY_API, Generation, Scope};
use crate::arm::{Arm, Resource, body_tag, foreign, is_deleting, is_failed};
use crate::blob::{PageBlob, SignedUrl};
use crate::error::{AzureError, AzureErrorKind};
use crate::http::HttpClient;
use crate::pacer::{Pacer, PacerOptions};
use crate::upload::{PageSource, UploadOptions, upload};

/// The tag with the hash of the version's content.
pub const CONTENT_TAG: &str = "headwater-content";

/// The parallel requests of an upload.
const UPLOAD_IN_FLIGHT: usize = 8;

/// The duration of the write access to the disk. It is renewed if an upload takes longer.
const ACCESS_S: u64 = 86_400;

/// The interval for polling the replication, and how long to wait for its end.
const REPLICATION_INTERVAL: Duration = Duration::from_secs(10);
const REPLICATION_MAX: Duration = Duration::from_secs(6 * 3600);

/// The longest name of a disk in Azure is 80 characters; this is the part for the image's name.
const DISK_IMAGE_MAX_CHARS: usize = 40;

/// The version to publish, and its place.
#[derive(Clone, Debug)]
pub struct Publication {
    /// The resource group and region.
    pub scope: Scope,
    /// The gallery.
    pub gallery: String,
    /// The image.
    pub image: String,
    /// The number of the version.
    pub number: u32,
    /// The hash of the version's content, in hexadecimal digits.
    pub content: String,
    /// The generation of virtual hardware that it boots on.
    pub generation: Generation,
    /// Whether it boots from NVMe disks too.
    pub has_nvme: bool,
    /// The replicas in the region.
    pub replicas: u32,
}

/// The present step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// In words.
    Doing(String),
    /// Bytes of the disk that are in Azure, and all its bytes.
    Uploaded(u64, u64),
}

/// Gets the present step.
pub type Progress<'a> = &'a (dyn Fn(Step) + Send + Sync);

/// The length of the disk and its footer.
#[derive(Clone, Debug)]
pub struct VhdLayout {
    /// The length of the disk in the file.
    pub data_bytes: u64,
    /// The footer.
    pub footer: [u8; 512],
}

impl Publication {
    /// The name of the gallery of an owner: Azure permits no `-`.
    pub fn gallery_of(owner: &str) -> String {
        let short: String = owner.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
        format!("headwater_{short}")
    }

    /// The path of the version in the gallery.
    pub fn version_path(&self) -> String {
        format!("{}/versions/1.0.{}", self.definition_path(), self.number)
    }

    /// The path of the definition of the image.
    pub fn definition_path(&self) -> String {
        format!("{}/images/{}", self.gallery_path(), self.image)
    }

    /// The path of the gallery.
    pub fn gallery_path(&self) -> String {
        format!("{}/{}", self.scope.compute_path("galleries"), self.gallery)
    }

    /// The path of the disk that receives the upload.
    pub fn disk_path(&self) -> String {
        self.scope.disk_path(&self.disk())
    }

    fn disk(&self) -> String {
        let image: String = self.image.chars().take(DISK_IMAGE_MAX_CHARS).collect();
        let content: String = self.content.chars().take(8).collect();
        format!("headwater-{image}-{}-{content}", self.number)
    }

    fn gallery(&self) -> Resource {
        resources::gallery(&self.scope, &self.gallery)
    }

    fn definition(&self) -> Resource {
        resources::definition(&self.scope, &self.gallery, &self.image, self.generation, self.has_nvme)
    }

    fn version(&self) -> Resource {
        let disk = self.disk();
        let version =
            resources::version(&self.scope, &self.gallery, &self.image, self.number, &disk, self.replicas);
        self.marked(version)
    }

    fn marked(&self, mut resource: Resource) -> Resource {
        resource.body["tags"] = json!({CONTENT_TAG: self.content});
        resource
    }

    /// Fails if Azure cannot have an image of this name.
    fn check_name(&self) -> Result<(), AzureError> {
        if self.image.ends_with(|last: char| last.is_ascii_alphanumeric()) {
            return Ok(());
        }
        let what = format!(
            "cannot publish image '{}': in Azure, the name of an image ends with a letter or digit",
            self.image
        );
        Err(AzureError::new(AzureErrorKind::Invalid, what).advise("pull or import it with another name"))
    }
}

/// Fails if the version cannot be published because of what is in Azure. Changes nothing. Returns the version, if it is in
/// Azure already.
pub async fn check(arm: &Arm, publication: &Publication) -> Result<Option<Value>, AzureError> {
    publication.check_name()?;
    let there = look(arm, publication).await?;
    if there.is_none() {
        check_place(arm, publication).await?;
    }
    Ok(there)
}

/// Whether a version that was published is still in Azure, so that machines can be made of it. Fails if another one is there.
pub async fn is_there(arm: &Arm, publication: &Publication) -> Result<bool, AzureError> {
    Ok(look(arm, publication).await?.is_some_and(|there| !is_deleting(&there) && !is_failed(&there)))
}

/// The version in Azure. Fails if another one is there.
async fn look(arm: &Arm, publication: &Publication) -> Result<Option<Value>, AzureError> {
    let action = format!("cannot publish {}", publication.version_path());
    let Some(there) = arm.find(&publication.version_path(), GALLERY_API).await? else { return Ok(None) };
    if !arm.is_ours(&there) {
        let what = format!("{action}: a version of this number exists that this controller has not created");
        return Err(AzureError::new(AzureErrorKind::Exists, what)
            .advise("nothing was changed; use another resource group, or remove that version"));
    }
    let content = there.pointer("/tags").and_then(|tags| tags.get(CONTENT_TAG)).and_then(Value::as_str);
    if content != Some(publication.content.as_str()) {
        let what = format!("{action}: the version exists already, with other contents");
        return Err(AzureError::new(AzureErrorKind::Exists, what)
            .advise("'headwater image unpublish' removes that version; or publish a newer version"));
    }
    Ok(Some(there))
}

/// Fails if there is a gallery, or a definition of the image, that cannot get the version: it is of another owner, or was made
/// for other versions.
async fn check_place(arm: &Arm, publication: &Publication) -> Result<(), AzureError> {
    let action = format!("cannot publish {}", publication.version_path());
    let of_gallery =
        "unpublish all versions of the connection, which removes the gallery; or use another resource group";
    let of_definition = "all versions of an image have the same generation there, and the same --nvme: unpublish the others first, or pull the \
                         image with another name";
    let needed = [(publication.gallery(), of_gallery), (publication.definition(), of_definition)];
    for (resource, advice) in needed {
        let there = arm.find(&resource.path, resource.api_version).await?;
        // A resource that is being deleted does not count, as in `Arm::make`.
        let Some(there) = there.filter(|there| !is_deleting(there)) else { continue };
        if !arm.is_ours(&there) {
            return Err(foreign(&format!("{action}: cannot use {}", resource.path)));
        }
        if body_tag(&there) != arm.body_tag_of(&resource) {
            let what =
                format!("{action}: {} exists, with other properties than this version needs", resource.path);
            return Err(AzureError::new(AzureErrorKind::Exists, what).advise(advice));
        }
    }
    Ok(())
}

/// Publishes a version, and waits until its replicas are ready. Returns the number of bytes that were sent.
pub fn publish<'a>(
    arm: &'a Arc<Arm>,
    http: &'a Arc<HttpClient>,
    publication: &'a Publication,
    layout: &'a VhdLayout,
    source: &'a dyn PageSource,
    progress: Progress<'a>,
) -> BoxFuture<'a, Result<u64, AzureError>> {
    Box::pin(async move {
        progress(Step::Doing("looking for what an earlier attempt has made".to_owned()));
        publication.check_name()?;
        with_replication(arm, publication, Box::pin(recovered(arm)), progress).await?;
        let mut sent_bytes = 0;
        if !remove_failed(arm, publication).await? {
            sent_bytes = send(arm, http, publication, layout, source, progress).await?;
            make(arm, publication, progress).await?;
        }
        wait_for_replicas(arm, publication, progress).await?;
        progress(Step::Doing("removing the disk of the upload".to_owned()));
        arm.delete(&publication.disk_path(), DISK_API).await?;
        Ok(sent_bytes)
    })
}

async fn recovered(arm: &Arm) -> Result<(), AzureError> {
    arm.recover().await.map(drop)
}

/// Makes the gallery, the definition of the image and the version.
async fn make(arm: &Arm, publication: &Publication, progress: Progress<'_>) -> Result<(), AzureError> {
    progress(Step::Doing("making the gallery".to_owned()));
    arm.make(&publication.gallery()).await?;
    progress(Step::Doing(format!("making the definition of image {}", publication.image)));
    arm.make(&publication.definition()).await?;
    progress(Step::Doing("making the version".to_owned()));
    let version = publication.version();
    let making = async { arm.make(&version).await.map(drop) };
    with_replication(arm, publication, Box::pin(making), progress).await
}

/// Whether the version is in Azure. If Azure could not make it, it is removed first.
async fn remove_failed(arm: &Arm, publication: &Publication) -> Result<bool, AzureError> {
    let there = check(arm, publication).await?;
    if there.as_ref().is_some_and(is_failed) {
        arm.delete(&publication.version_path(), GALLERY_API).await?;
        return Ok(false);
    }
    Ok(there.is_some())
}

/// Makes the disk and uploads the version, unless an earlier attempt has done that.
async fn send(
    arm: &Arc<Arm>,
    http: &Arc<HttpClient>,
    publication: &Publication,
    layout: &VhdLayout,
    source: &dyn PageSource,
    progress: Progress<'_>,
) -> Result<u64, AzureError> {
    progress(Step::Doing("making a disk for the upload".to_owned()));
    let file_bytes = layout.data_bytes.saturating_add(512);
    let disk = resources::disk_for_upload(
        &publication.scope,
        &publication.disk(),
        publication.generation,
        file_bytes,
    )?;
    let disk = publication.marked(disk);
    let there = arm.make(&disk).await?;
    if disk_state(&there) == Some("Unattached") {
        return Ok(0);
    }
    let clock = arm.clock().clone();
    let access = DiskAccess { arm: arm.clone(), path: disk.path.clone() };
    let pacer = Pacer::new(PacerOptions::new(seed(&publication.content)), clock);
    let blob = PageBlob::new(http.clone(), Arc::new(pacer), Box::new(access));
    let options = UploadOptions {
        data_bytes: layout.data_bytes,
        footer: layout.footer,
        content: publication.content.clone(),
        is_created: false,
        in_flight: UPLOAD_IN_FLIGHT,
        read_back: false,
    };
    let report =
        upload(&blob, source, &options, &|done, total| progress(Step::Uploaded(done, total))).await?;
    progress(Step::Doing("ending the upload".to_owned()));
    arm.act(&disk.path, "endGetAccess", DISK_API, &json!({})).await?;
    Ok(report.sent_bytes)
}

/// A number for random waits, which is different for each version.
fn seed(content: &str) -> u64 {
    content.bytes().fold(7, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()))
}

fn disk_state(disk: &Value) -> Option<&str> {
    disk.pointer("/properties/diskState").and_then(Value::as_str)
}

/// The URL with which pages of a disk are written.
struct DiskAccess {
    arm: Arc<Arm>,
    path: String,
}

#[async_trait]
impl SignedUrl for DiskAccess {
    async fn signed(&self, _refused: Option<&Uri>) -> Result<Uri, AzureError> {
        let body = json!({"access": "Write", "durationInSeconds": ACCESS_S});
        let output = self.arm.act(&self.path, "beginGetAccess", DISK_API, &body).await?;
        let url = output.get("accessSAS").and_then(Value::as_str);
        // The URL contains a signature, so it is not shown.
        url.and_then(|url| url.parse().ok()).ok_or_else(|| {
            let what = format!("cannot write to {}: Azure's answer has no URL", self.path);
            AzureError::new(AzureErrorKind::Invalid, what)
        })
    }
}

/// Shows the progress of the replication while a request waits for its end.
async fn with_replication(
    arm: &Arm,
    publication: &Publication,
    mut work: BoxFuture<'_, Result<(), AzureError>>,
    progress: Progress<'_>,
) -> Result<(), AzureError> {
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = arm.clock().sleep(REPLICATION_INTERVAL) => {}
        }
        let looking = async {
            let seen = replication(arm, publication).await;
            // The request itself reports errors.
            if let Ok(Some(Replication { shown: Some(shown), .. })) = seen {
                progress(Step::Doing(shown));
            }
            std::future::pending::<()>().await
        };
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = looking => {}
            () = arm.clock().sleep(REPLICATION_INTERVAL) => {}
        }
    }
}

/// The state of the replicas of a version.
struct Replication {
    is_ready: bool,
    has_failed: bool,
    replicas: Option<u64>,
    shown: Option<String>,
}

async fn replication(arm: &Arm, publication: &Publication) -> Result<Option<Replication>, AzureError> {
    let query = "$expand=ReplicationStatus";
    let there = arm.find_with(&publication.version_path(), GALLERY_API, query).await?;
    Ok(there.map(|there| replication_of(&there)))
}

fn replication_of(there: &Value) -> Replication {
    let text = |pointer: &str| there.pointer(pointer).and_then(Value::as_str);
    let (made, copied) =
        (text("/properties/provisioningState"), text("/properties/replicationStatus/aggregatedState"));
    let regions = there.pointer("/properties/replicationStatus/summary").and_then(Value::as_array);
    let progress = regions.into_iter().flatten().filter_map(|region| {
        let name = region.get("region")?.as_str()?;
        Some(format!("{name} {} %", region.get("progress")?.as_u64()?))
    });
    let progress: Vec<String> = progress.collect();
    let targets = there.pointer("/properties/publishingProfile/targetRegions/0/regionalReplicaCount");
    Replication {
        // Without a status, Azure has nothing to copy.
        is_ready: made == Some("Succeeded") && matches!(copied, None | Some("Completed")),
        has_failed: copied == Some("Failed") || matches!(made, Some("Failed" | "Canceled")),
        replicas: targets.and_then(Value::as_u64),
        shown: (!progress.is_empty()).then(|| format!("copying to the replicas: {}", progress.join(", "))),
    }
}

async fn wait_for_replicas(
    arm: &Arm,
    publication: &Publication,
    progress: Progress<'_>,
) -> Result<(), AzureError> {
    let path = publication.version_path();
    let failed = |kind, why: &str| AzureError::new(kind, format!("cannot publish {path}: {why}"));
    let begun = arm.clock().now();
    progress(Step::Doing("waiting for the replicas".to_owned()));
    loop {
        let seen = replication(arm, publication).await?;
        let removed = || failed(AzureErrorKind::NotFound, "the version was removed in Azure meanwhile");
        let seen = seen.ok_or_else(removed)?;
        if seen.has_failed {
            return Err(failed(AzureErrorKind::Failed, "Azure could not copy the version to its replicas")
                .advise("repeat the command later; if it fails again, 'headwater image unpublish' removes the version"));
        }
        if seen.is_ready {
            return match seen.replicas {
                Some(replicas) if replicas != u64::from(publication.replicas) => {
                    let why = format!("Azure made {replicas} replicas instead of {}", publication.replicas);
                    Err(failed(AzureErrorKind::Failed, &why)
                        .advise("unpublish the version, and publish it again with fewer --replicas"))
                }
                _ => Ok(()),
            };
        }
        if let Some(shown) = seen.shown {
            progress(Step::Doing(shown));
        }
        if arm.clock().now().saturating_sub(begun) > REPLICATION_MAX {
            return Err(failed(AzureErrorKind::Unavailable, "the replicas are not ready after six hours")
                .advise("Azure continues; repeat the command later"));
        }
        arm.clock().sleep(REPLICATION_INTERVAL).await;
    }
}

/// The resources that are removed together with a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// The definition of the image, because no other version needs it.
    pub definition: bool,
    /// The gallery, because no other image needs it.
    pub gallery: bool,
}

/// Removes a version and the disk of its upload, if they exist. A definition or gallery that others use stays.
pub async fn unpublish(
    arm: &Arm,
    publication: &Publication,
    rest: Rest,
    progress: Progress<'_>,
) -> Result<(), AzureError> {
    progress(Step::Doing("completing interrupted requests".to_owned()));
    arm.recover().await?;
    progress(Step::Doing("removing the version".to_owned()));
    arm.delete(&publication.version_path(), GALLERY_API).await?;
    progress(Step::Doing("removing the disk of the upload".to_owned()));
    remove_disk(arm, &publication.disk_path()).await?;
    let (definition, gallery) = (publication.definition_path(), publication.gallery_path());
    for (path, is_to_go) in [(definition, rest.definition), (gallery, rest.gallery)] {
        if is_to_go {
            progress(Step::Doing(format!("removing {path}")));
            match arm.delete(&path, GALLERY_API).await {
                // It has versions or images of others.
                Err(error) if matches!(error.kind(), AzureErrorKind::Busy | AzureErrorKind::Exists) => {
                    return Ok(());
                }
                done => done?,
            }
        }
    }
    Ok(())
}

/// Removes a disk, if it exists and is ours. An upload to it ends.
async fn remove_disk(arm: &Arm, disk: &str) -> Result<(), AzureError> {
    if let Some(there) = arm.find(disk, DISK_API).await?
        && arm.is_ours(&there)
        && matches!(disk_state(&there), Some("ReadyToUpload" | "ActiveUpload"))
        && let Err(error) = arm.act(disk, "endGetAccess", DISK_API, &json!({})).await
    {
        // An upload that is not complete has no valid footer, which Azure reports here. The disk is removed anyway.
        let is_expected =
            matches!(error.kind(), AzureErrorKind::Busy | AzureErrorKind::Failed | AzureErrorKind::Invalid);
        if !is_expected {
            return Err(error);
        }
    }
    arm.delete(disk, DISK_API).await
}

/// Removes a resource that [`owned`] has found. It may be gone already.
pub async fn remove_owned(arm: &Arm, path: &str) -> Result<(), AzureError> {
    if path.to_ascii_lowercase().contains("/microsoft.compute/disks/") {
        remove_disk(arm, path).await
    } else {
        arm.delete(path, GALLERY_API).await
    }
}

/// The paths of the resources in the resource group that have our tag: versions, definitions, galleries and disks, in the
/// order in which they can be removed.
pub async fn owned(arm: &Arm, scope: &Scope) -> Result<Vec<String>, AzureError> {
    let mut found = Vec::new();
    let ours = |listed: &[Value]| -> Vec<String> {
        let ours = listed.iter().filter(|there| arm.is_ours(there));
        ours.filter_map(|there| there.get("id")?.as_str().map(str::to_owned)).collect()
    };
    let galleries = ours(&arm.list(&scope.compute_path("galleries"), GALLERY_API, "").await?);
    for gallery in &galleries {
        let images = ours(&arm.list(&format!("{gallery}/images"), GALLERY_API, "").await?);
        for image in &images {
            found.extend(ours(&arm.list(&format!("{image}/versions"), GALLERY_API, "").await?));
        }
        found.extend(images);
    }
    found.extend(galleries);
    let disks = arm.list(&scope.compute_path("disks"), DISK_API, "").await?;
    // Azure gives the OS disk of a machine the tags of the machine, and deletes it with the machine.
    let unattached: Vec<Value> =
        disks.into_iter().filter(|disk| disk.get("managedBy").is_none_or(Value::is_null)).collect();
    found.extend(ours(&unattached));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publication() -> Publication {
        Publication {
            scope: Scope {
                subscription: "s".to_owned(),
                group: "g".to_owned(),
                region: "westeurope".to_owned(),
            },
            gallery: Publication::gallery_of("1b4e28ba-2fa1-11d2-883f-0016d3cca427"),
            image: "debian".to_owned(),
            number: 4,
            content: "9f2c".repeat(16),
            generation: Generation::Two,
            has_nvme: false,
            replicas: 3,
        }
    }

    #[test]
    fn names_follow_from_image_and_content() {
        let made = publication();
        let at = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute";
        assert_eq!(made.disk_path(), format!("{at}/disks/headwater-debian-4-9f2c9f2c"));
        assert_eq!(
            made.version_path(),
            format!("{at}/galleries/headwater_1b4e28ba2fa1/images/debian/versions/1.0.4")
        );
        assert_eq!(made.version().path, made.version_path());
        let long = Publication { image: "x".repeat(63), number: u32::MAX, ..publication() };
        assert!(long.disk().len() <= 80, "{}", long.disk());
        assert!(Publication { image: "x-".to_owned(), ..publication() }.check_name().is_err());
    }

    #[test]
    fn replicas_are_ready_when_azure_says_so() {
        let version = |made: &str, copied: Option<&str>| {
            replication_of(&json!({"properties": {
                "provisioningState": made,
                "publishingProfile": {"targetRegions": [{"name": "West Europe", "regionalReplicaCount": 3}]},
                "replicationStatus": {
                    "aggregatedState": copied,
                    "summary": [{"region": "West Europe", "state": "Replicating", "progress": 40}],
                },
            }}))
        };
        let copying = version("Creating", Some("InProgress"));
        assert!(!copying.is_ready && !copying.has_failed);
        assert_eq!(copying.shown.as_deref(), Some("copying to the replicas: West Europe 40 %"));
        assert!(!version("Succeeded", Some("InProgress")).is_ready);
        assert!(version("Succeeded", Some("Completed")).is_ready);
        assert_eq!(version("Succeeded", Some("Completed")).replicas, Some(3));
        assert!(version("Succeeded", None).is_ready && !version("Creating", None).is_ready);
        assert!(version("Succeeded", Some("Failed")).has_failed && version("Failed", None).has_failed);
    }
}
