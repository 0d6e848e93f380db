//! The trait [`Cloud`], through which the service uses clouds: it checks connections, and publishes versions of images.

use std::sync::Arc;

use async_trait::async_trait;
use headwater_api::{ConnectionCheck, ImageVersion, PublishedImage};
use headwater_db::ConnectionRecord;

use crate::backend::{BackendError, TaskControl};

/// Whether a version can report to the cloud that it has booted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProvisioningAgent {
    /// It has this program.
    Found(String),
    /// It has no such program. The text says what it lacks.
    Missing(String),
    /// Its file system cannot be read. The text says why.
    Unreadable(String),
}

/// The properties of a version that decide which machines of a cloud can boot it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloudFacts {
    /// The generation of virtual hardware: 1 (BIOS) or 2 (UEFI).
    pub generation: u32,
    /// The program that reports to the cloud.
    pub agent: ProvisioningAgent,
}

/// A version to publish.
#[derive(Clone, Debug)]
pub struct PublishOrder {
    /// The connection.
    pub connection: ConnectionRecord,
    /// The version.
    pub version: ImageVersion,
    /// Its row; `resource` is not set in [`Cloud::check_publish`].
    pub published: PublishedImage,
    /// Whether it boots from NVMe disks too.
    pub nvme: bool,
}

/// A published version to remove.
#[derive(Clone, Debug)]
pub struct UnpublishOrder {
    /// The connection.
    pub connection: ConnectionRecord,
    /// Its row.
    pub published: PublishedImage,
    /// Whether no other version of the image is published there.
    pub is_last_of_image: bool,
    /// Whether no other version is published there.
    pub is_last: bool,
}

/// The result of looking for what stands in the way of publishing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublishCheck {
    /// The identifier that the version has or will have in the cloud.
    pub resource: String,
    /// Remarks, for people.
    pub remarks: Vec<String>,
}

/// Clouds.
///
/// # Contract
/// - Connections were checked by [`Cloud::accept`] before they were stored.
/// - Each call may be repeated, and each future may be dropped, at any time: the next call continues.
/// - No error contains a secret.
#[async_trait]
pub trait Cloud: Send + Sync + 'static {
    /// Fails if the settings of a connection cannot be right. Sends no request.
    fn accept(&self, connection: &ConnectionRecord) -> Result<(), BackendError>;

    /// Logs in, reads the resource group, and finds the rights that lack.
    async fn check(&self, connection: &ConnectionRecord) -> Result<ConnectionCheck, BackendError>;

    /// The properties of a version, read from the store.
    async fn inspect(&self, version: &ImageVersion) -> Result<CloudFacts, BackendError>;

    /// Fails if the version cannot be published with this connection: a right lacks, another content has its number, or the gallery
    /// cannot get it.
    /// Changes nothing in the cloud.
    async fn check_publish(&self, order: &PublishOrder) -> Result<PublishCheck, BackendError>;

    /// Whether a version that was published is still there. Fails if another one is there. Changes nothing in the cloud.
    async fn is_published(&self, order: &PublishOrder) -> Result<bool, BackendError>;

    /// Publishes a version, and waits until machines can be made of it. Returns the number of bytes that were sent.
    async fn publish(&self, order: &PublishOrder, control: Arc<TaskControl>) -> Result<u64, BackendError>;

    /// Removes a published version, with all that an incomplete [`Cloud::publish`] has made.
    async fn unpublish(&self, order: &UnpublishOrder, control: Arc<TaskControl>) -> Result<(), BackendError>;

    /// The identifiers of resources that this controller made in the cloud, and that belong to none of the published
    /// versions. In the order in which they can be removed.
    async fn orphans(
        &self,
        connection: &ConnectionRecord,
        published: &[PublishedImage],
    ) -> Result<Vec<String>, BackendError>;

    /// Removes such a resource. It may be gone already.
    async fn remove_orphan(&self, connection: &ConnectionRecord, resource: &str) -> Result<(), BackendError>;
}
