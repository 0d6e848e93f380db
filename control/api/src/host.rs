//! Hosts: computers that run machines, and the tokens with which they join.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::roll::LeftMachine;

/// Whether the node of a host is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    /// It has joined, and was never connected.
    Joined,
    /// It is connected, or is the host of the controller itself.
    Up,
    /// It has not been connected for 15 seconds. Nobody knows what its machines do.
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

    /// Reads what [`HostState::name`] gave.
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
    /// Its identity for good.
    pub id: Uuid,
    /// Whether it is the host of the controller, which needs no node.
    pub own: bool,
    /// Whether its node is connected.
    pub state: HostState,
    /// New machines go to other hosts.
    pub cordoned: bool,
    /// How many machines it has.
    pub machines: u64,
    /// How many of them are on, as far as is known.
    pub machines_active: u64,
    /// Its memory.
    pub memory_bytes: u64,
    /// What is left of its memory if all its machines are on, with their write caches.
    pub memory_free_bytes: u64,
    /// Its processors.
    pub cpus: u32,
    /// The release of its node, while that is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The address of its node, while that is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// How many milliseconds its clock is ahead of that of the controller, while its node is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_ahead_ms: Option<i64>,
    /// The fingerprint of its certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// When it joined.
    pub joined_at_ms: u64,
    /// When its node was connected last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_at_ms: Option<u64>,
}

/// All hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostList {
    /// By name.
    pub hosts: Vec<Host>,
}

/// What to change of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetHost {
    /// Whether new machines go to other hosts.
    pub cordoned: bool,
}

/// A machine that is on another host now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MovedMachine {
    /// Its name.
    pub machine: String,
    /// Its host.
    pub to: String,
}

/// What draining a host did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainReport {
    /// The host.
    pub host: String,
    /// The machines that were moved. A machine that was on is started on its new host.
    pub moved: Vec<MovedMachine>,
    /// Machines that are on the host still, or were moved and do not start.
    pub left: Vec<LeftMachine>,
}

/// A token to make, with which a node joins once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateJoinToken {
    /// For how long, in seconds; an hour unless given.
    #[serde(default = "CreateJoinToken::default_valid_s")]
    pub valid_s: u64,
}

impl CreateJoinToken {
    /// One hour.
    pub const fn default_valid_s() -> u64 {
        3600
    }
}

/// A token with which a node joins once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JoinToken {
    /// The secret, with the fingerprint of the controller's authority.
    pub token: String,
    /// Where nodes reach the controller.
    pub url: String,
    /// When it ends.
    pub expires_at_ms: u64,
}

impl std::fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinToken").field("url", &self.url).finish_non_exhaustive()
    }
}
