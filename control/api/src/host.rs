//! Hosts: computers that run machines. On each host a node, which is our program, obeys the controller; it joins with
//! a token. Types of the requests and answers of `headwater node`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::roll::LeftMachine;

/// Whether the node of a host is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    /// Its node has joined, and was never connected.
    Joined,
    /// Its node is connected, or it is the controller's own host.
    Up,
    /// Its node has not been connected for 15 seconds. The state of its machines is unknown.
    Lost,
}

impl HostState {
    /// As stored and shown.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Joined => "joined",
            Self::Up => "up",
            Self::Lost => "lost",
        }
    }

    /// Parses the output of [`HostState::name`].
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Joined, Self::Up, Self::Lost].into_iter().find(|state| state.name() == text)
    }
}

impl std::fmt::Display for HostState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A computer that runs machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its permanent identity.
    pub id: Uuid,
    /// Whether it is the controller's own host, which needs no node.
    pub own: bool,
    /// Whether its node is connected.
    pub state: HostState,
    /// Whether new machines are placed on other hosts.
    pub cordoned: bool,
    /// The number of its machines.
    pub machines: u64,
    /// The number of its machines that are on, as far as is known.
    pub machines_active: u64,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// The memory that would be free if all its machines were on, with full write caches.
    pub memory_free_bytes: u64,
    /// The number of its processors.
    pub cpus: u32,
    /// The release of its node; absent unless the node is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The address of its node; absent unless the node is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// How far its clock is ahead of the controller's, in milliseconds; absent unless its node is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_ahead_ms: Option<i64>,
    /// The fingerprint of its certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// When it joined.
    pub joined_at_ms: u64,
    /// When its node was last connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_at_ms: Option<u64>,
}

/// All hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostList {
    /// Ordered by name.
    pub hosts: Vec<Host>,
}

/// The change of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetHost {
    /// Whether new machines are placed on other hosts.
    pub cordoned: bool,
}

/// A machine that was moved to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MovedMachine {
    /// Its name.
    pub machine: String,
    /// Its new host.
    pub to: String,
}

/// The result of draining a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainReport {
    /// The host.
    pub host: String,
    /// The machines that were moved. A machine that was on is started on its new host.
    pub moved: Vec<MovedMachine>,
    /// Machines that are still on the host, or that were moved but do not start.
    pub left: Vec<LeftMachine>,
}

/// The request to create a token with which one node joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateJoinToken {
    /// How long the token is valid, in seconds. Default: one hour.
    #[serde(default = "CreateJoinToken::default_valid_s")]
    pub valid_s: u64,
}

impl CreateJoinToken {
    /// One hour.
    pub const fn default_valid_s() -> u64 {
        3600
    }
}

/// A token with which one node joins.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JoinToken {
    /// The secret, with the fingerprint of the controller's authority.
    pub token: String,
    /// The URL at which nodes reach the controller.
    pub url: String,
    /// When the token expires.
    pub expires_at_ms: u64,
}

impl std::fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinToken").field("url", &self.url).finish_non_exhaustive()
    }
}
