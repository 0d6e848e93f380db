//! Claims: a claim lends a machine of a catalog to one holder. Nobody else gets the machine until it was reset. Types
//! of the requests of holders (`headwater catalog claim`) and of the answers; `control/service` chooses and resets
//! the machines.
/// The request to claim a machine.
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// The longest name of a holder, in characters.
pub const MAX_HOLDER_CHARS: usize = 200;

/// The longest time that a claim waits for a machine, in seconds.
pub const MAX_CLAIM_WAIT_S: u64 = 3600;

/// The longest key of a claim, in characters.
pub const MAX_KEY_CHARS: usize = 100;

/// A machine to claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimRequest {
    /// The holder, as free text: for instance the name of a person or of a CI job.
    #[serde(rename = "for")]
    pub holder: String,
    /// The duration of the claim in seconds. Absent: until the claim is released or the guest shuts down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<u64>,
    /// How long to wait, in seconds, if no machine is ready. A machine that is off is then started. At most 3,600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_s: Option<u64>,
    /// An idempotency key. If a claim with this key exists, the answer is that claim, so that a client can repeat a request
    /// whose answer was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Create a secret that only the guest and the holder know. The guest must run the QEMU guest agent, and gets the
    /// secret in `/run/headwater/claim.json`.
    #[serde(default)]
    pub secret: bool,
    /// The event in the guest that ends the claim.
    #[serde(default)]
    pub reset_on: ResetOn,
}

/// The event in a guest that ends its claim. A claim also ends when it is released or expires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResetOn {
    /// The guest is off.
    #[default]
    Shutdown,
    /// The guest is off, or its guest agent reports that the last user has logged off.
    Logoff,
}

impl ResetOn {
    /// The name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shutdown => "shutdown",
            Self::Logoff => "logoff",
        }
    }

    /// Parses the output of [`ResetOn::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        let all = [Self::Shutdown, Self::Logoff];
        all.into_iter()
            .find(|one| one.name() == text)
            .ok_or_else(|| format!("'{text}' is neither shutdown nor logoff"))
    }
}

/// A secret that only one answer contains. Its `Debug` output hides it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct OneTimeSecret(pub String);

impl std::fmt::Debug for OneTimeSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OneTimeSecret(..)")
    }
}

/// A claim: one holder has a machine of a catalog until the claim ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Claim {
    /// Its identity.
    pub id: Uuid,
    /// The catalog.
    pub catalog: String,
    /// The machine.
    pub machine: String,
    /// The machine's network address.
    pub mac: String,
    /// The guest's addresses as its guest agent reports them, IPv4 first. Empty until the agent has reported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// The command that opens its console.
    #[serde(default)]
    pub console: String,
    /// The secret that the guest knows. Only the answer to the request that created it contains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub secret: Option<OneTimeSecret>,
    /// The holder, as given in the request.
    #[serde(rename = "for")]
    pub holder: String,
    /// The key of the request, if it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The caller that sent the request.
    pub claimed_by: String,
    /// When the claim was created.
    pub created_at_ms: u64,
    /// When the claim expires. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<u64>,
    /// The event in the guest that ends the claim.
    #[serde(default)]
    pub reset_on: ResetOn,
    /// Why the claim has ended. Its machine is being reset; then the claim is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
}

/// All claims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClaimList {
    /// Oldest first.
    pub claims: Vec<Claim>,
}
