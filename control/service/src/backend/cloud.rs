//! The traits through which the service uses clouds: [`Cloud`] checks connections and publishes versions of images, and
//! [`CloudMachines`] creates machines of these versions.

use std::sync::Arc;

use async_trait::async_trait;
use headwater_api::{CloudMachine, CloudScheme, ConnectionCheck, ImageVersion, PublishedImage};
use headwater_db::{ConnectionRecord, Secret};
use uuid::Uuid;

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

/// A machine to create in a cloud.
#[derive(Clone, Debug)]
pub struct CloudOrder {
    /// The connection.
    pub connection: ConnectionRecord,
    /// How machines of its catalog are created.
    pub scheme: CloudScheme,
    /// The version that it boots, which is published with this connection.
    pub published: PublishedImage,
    /// The size of its OS disk, in whole GiB.
    pub os_disk_bytes: u64,
    /// Its permanent identity, from which its resources are named.
    pub uuid: Uuid,
    /// The host name of its guest.
    pub host_name: String,
    /// Its catalog and the version of the catalog's settings, as a mark on its resources.
    pub mark: String,
    /// Its cloud-init user data.
    pub user_data: Option<Secret>,
}

/// A machine that was created, or found as an earlier call has created it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudStarted {
    /// The machine.
    pub machine: CloudMachine,
    /// The sizes and zones that were refused before, with the reasons.
    pub refused: Vec<String>,
}

/// A machine that exists in a cloud.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudState {
    /// The machine.
    pub machine: CloudMachine,
    /// Whether somebody has switched it off there.
    pub is_off: bool,
}

/// Machines in clouds.
///
/// # Contract
/// - There is one call at a time for a machine. Each call may be repeated, and each future may be dropped, at any time:
///   the next call for the machine first completes what was left, also if another daemon makes it.
/// - A call takes minutes. It returns when the cloud has finished.
/// - No machine is created twice, and only machines of this controller are changed.
#[async_trait]
pub trait CloudMachines: Send + Sync + 'static {
    /// Fails if machines with such a scheme cannot be created: the region does not offer a size, or a size cannot hold the
    /// OS disk. Changes nothing in the cloud. The UUID, names and user data of the order are not used.
    async fn check_machines(&self, order: &CloudOrder) -> Result<(), BackendError>;

    /// Fails if a machine that is on could not be created again now: the cloud cannot be asked, or offers none of its sizes.
    /// Changes nothing in the cloud.
    async fn check_reset(&self, order: &CloudOrder) -> Result<(), BackendError>;

    /// Creates a machine with a pristine disk, or finds the one that an earlier call has created. It is on afterwards.
    async fn start_machine(&self, order: &CloudOrder) -> Result<CloudStarted, BackendError>;

    /// Gives a machine a pristine disk of the version in the order, and switches it on.
    async fn reset_machine(&self, order: &CloudOrder) -> Result<CloudStarted, BackendError>;

    /// Deletes a machine with its disk; its address stays. It may be gone already.
    async fn stop_machine(&self, connection: &ConnectionRecord, machine: Uuid) -> Result<(), BackendError>;

    /// Deletes a machine with all that belongs to it. It may be gone already.
    async fn remove_machine(&self, connection: &ConnectionRecord, machine: Uuid) -> Result<(), BackendError>;

    /// A machine as it is now. `None`: it does not exist.
    async fn machine_state(
        &self,
        connection: &ConnectionRecord,
        machine: Uuid,
    ) -> Result<Option<CloudState>, BackendError>;
}

/// Clouds.
///
/// # Contract
/// - Connections were checked by [`Cloud::accept`] before they were stored.
/// - Each call may be repeated, and each future may be dropped, at any time: the next call continues.
/// - No error contains a secret.
#[async_trait]
pub trait Cloud: CloudMachines {
    /// The owner of the resources of a connection that is added now.
    fn owner(&self) -> String;

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
    /// versions and to none of the machines. In the order in which they can be removed.
    async fn orphans(
        &self,
        connection: &ConnectionRecord,
        published: &[PublishedImage],
        machines: &[Uuid],
    ) -> Result<Vec<String>, BackendError>;

    /// Removes such a resource. It may be gone already.
    async fn remove_orphan(&self, connection: &ConnectionRecord, resource: &str) -> Result<(), BackendError>;
}
