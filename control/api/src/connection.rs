//! Connections to a cloud, and versions of images that were published there. Only types of requests and answers:
//! `control/service` stores connections, and the program sends requests to the cloud.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::claim::OneTimeSecret;

/// The most replicas of a version in one region of Azure.
pub const MAX_REPLICAS: u32 = 100;

/// The longest client secret of a connection.
pub const MAX_CLIENT_SECRET_BYTES: usize = 64 << 10;

/// How the controller authenticates itself in a cloud.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConnectionAuth {
    /// As an application with a client secret.
    Secret,
    /// As the managed identity of the virtual machine in the cloud on which the controller runs.
    Identity,
    /// As an application that trusts a token of a Kubernetes cluster. The environment of the daemon names the file with
    /// the token: `AZURE_FEDERATED_TOKEN_FILE`.
    Workload,
}

impl ConnectionAuth {
    /// All ways.
    pub const ALL: [Self; 3] = [Self::Secret, Self::Identity, Self::Workload];

    /// The name in requests and in the database.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Secret => "secret",
            Self::Identity => "identity",
            Self::Workload => "workload",
        }
    }

    /// Parses the output of [`ConnectionAuth::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|auth| auth.name() == text);
        found.ok_or_else(|| format!("'{text}' is not known; write secret, identity or workload"))
    }
}

impl std::fmt::Display for ConnectionAuth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A resource group of a subscription of Azure, and the identity with which the controller uses it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Connection {
    /// Its name.
    pub name: String,
    /// The subscription's UUID.
    pub subscription: String,
    /// The tenant of the identity: a UUID or a domain.
    pub tenant: String,
    /// The resource group. All resources are made in it.
    pub group: String,
    /// The region, such as `westeurope`.
    pub region: String,
    /// How the controller authenticates itself.
    pub auth: ConnectionAuth,
    /// The client ID of the application or of the managed identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    /// The URL of the login service.
    pub authority: String,
    /// The URL of the management service.
    pub management: String,
    /// The caller that added it.
    pub created_by: String,
    /// When it was added.
    pub created_at_ms: u64,
}

/// All connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionList {
    /// Ordered by name.
    pub connections: Vec<Connection>,
}

/// The request to add a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateConnection {
    /// Its name: 1 to 63 of a-z, 0-9 and '-'.
    pub name: String,
    /// The subscription's UUID.
    pub subscription: String,
    /// The tenant of the identity: a UUID or a domain.
    pub tenant: String,
    /// The resource group, which must exist.
    pub group: String,
    /// The region, such as `westeurope`.
    pub region: String,
    /// How the controller authenticates itself.
    pub auth: ConnectionAuth,
    /// The client ID of the application or of the managed identity. Needed except for a managed identity, if the
    /// machine has only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    /// The client secret. No answer contains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub secret: Option<OneTimeSecret>,
    /// The URL of the login service. Default: that of the public cloud.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// The URL of the management service. Default: that of the public cloud.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub management: Option<String>,
}

/// The change of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetConnection {
    /// Its new client secret. No answer contains it.
    #[schema(value_type = String)]
    pub secret: OneTimeSecret,
}

/// What a check of a connection found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionCheck {
    /// The connection.
    pub connection: String,
    /// The identity that the cloud sees, as its token names it.
    pub identity: String,
    /// The region of the resource group. The resources may be in another region.
    pub group_region: String,
    /// The rights that are needed and that the identity does not have on the resource group.
    pub lacks: Vec<String>,
    /// Remarks, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
}

/// The request to publish a version of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PublishRequest {
    /// The connection.
    pub connection: String,
    /// The number of replicas in the region, 1 if absent. A version that is published already must have this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Publish a version in which no provisioning agent was found.
    #[serde(default)]
    pub no_agent_check: bool,
    /// The image also boots from NVMe disks, which machine sizes of v6 need.
    #[serde(default)]
    pub nvme: bool,
}

/// The request to remove a published version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UnpublishRequest {
    /// The connection.
    pub connection: String,
}

/// The state of a published version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PublishState {
    /// A task publishes it, or ended before it was published.
    Publishing,
    /// Machines can be made of it.
    Published,
    /// It is being removed, or its removal has failed.
    Removing,
}

impl PublishState {
    /// All states.
    pub const ALL: [Self; 3] = [Self::Publishing, Self::Published, Self::Removing];

    /// The name in answers and in the database.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Publishing => "publishing",
            Self::Published => "published",
            Self::Removing => "removing",
        }
    }

    /// Parses the output of [`PublishState::name`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == text)
    }
}

/// A version of an image in the gallery of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PublishedImage {
    /// The image.
    pub image: String,
    /// The version's number.
    pub version: u64,
    /// The hash of the version's manifest.
    pub hash: String,
    /// The connection.
    pub connection: String,
    /// Its state.
    pub state: PublishState,
    /// The generation of virtual hardware that it boots on: 1 (BIOS) or 2 (UEFI).
    pub generation: u32,
    /// The number of replicas in the region.
    pub replicas: u32,
    /// The identifier in the cloud.
    pub resource: String,
    /// The caller that published it.
    pub created_by: String,
    /// When it was begun.
    pub created_at_ms: u64,
}

/// The published versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PublishedList {
    /// Ordered by image, version and connection.
    pub published: Vec<PublishedImage>,
}

/// The result of publishing a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PublishReport {
    /// The published version.
    pub published: PublishedImage,
    /// Whether this task published it. If not, it was published before.
    pub created: bool,
    /// Bytes that this task sent.
    pub sent_bytes: u64,
    /// Remarks, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
}

/// The request to find resources in a cloud that nothing here needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SweepRequest {
    /// Remove those that were found before, at least 30 minutes ago.
    #[serde(default)]
    pub remove: bool,
}

/// A resource in a cloud that this controller made, and that nothing here needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OrphanResource {
    /// Its identifier.
    pub resource: String,
    /// When a sweep found it first.
    pub seen_at_ms: u64,
    /// Whether a sweep may remove it.
    pub removable: bool,
    /// Whether this sweep removed it.
    pub removed: bool,
    /// Why it could not be removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The result of a sweep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SweepReport {
    /// The connection.
    pub connection: String,
    /// The resources, ordered by their identifiers.
    pub orphans: Vec<OrphanResource>,
}
