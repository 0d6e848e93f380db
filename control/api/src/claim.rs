//! Claims: machines of a catalog that are lent to somebody, and given to nobody else before they were reset.

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
    /// Who gets it, in words: a person, a job.
    #[serde(rename = "for")]
    pub holder: String,
    /// For how long, in seconds. Without it, until it is released or the guest switches itself off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<u64>,
    /// How long to wait for a machine if none is ready; a machine that is off is started then. At most 3,600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_s: Option<u64>,
    /// A request with the key of a claim that lasts is answered with that claim: a client that lost the answer asks again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Make a secret that the guest and the holder alone know. The guest needs the agent of QEMU, and gets it in `/run/headwater/claim.json`.
    #[serde(default)]
    pub secret: bool,
    /// When it ends by itself.
    #[serde(default)]
    pub reset_on: ResetOn,
}

/// What of a guest ends its claim, besides its release and the end of its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResetOn {
    /// It is off.
    #[default]
    Shutdown,
    /// It is off, or its last user has logged off, as its agent says.
    Logoff,
}

impl ResetOn {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shutdown => "shutdown",
            Self::Logoff => "logoff",
        }
    }

    /// The one of that name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let all = [Self::Shutdown, Self::Logoff];
        all.into_iter()
            .find(|one| one.name() == text)
            .ok_or_else(|| format!("'{text}' is neither shutdown nor logoff"))
    }
}

/// A secret that is in one answer only: its `Debug` says nothing.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct OneTimeSecret(pub String);

impl std::fmt::Debug for OneTimeSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OneTimeSecret(..)")
    }
}

/// A claim.
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
    /// Where others reach the guest, as its agent says, IPv4 first. Empty if it has not said so yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// The command that opens its console.
    #[serde(default)]
    pub console: String,
    /// The secret that the guest knows, only in the answer to the request that made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub secret: Option<OneTimeSecret>,
    /// Who has it.
    #[serde(rename = "for")]
    pub holder: String,
    /// The key of the request, if it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Who asked for it.
    pub claimed_by: String,
    /// When.
    pub created_at_ms: u64,
    /// When it ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<u64>,
    /// What of the guest ends it.
    #[serde(default)]
    pub reset_on: ResetOn,
    /// Why it has ended. Its machine is being reset, and the claim is gone after that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
}

/// All claims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClaimList {
    /// Oldest first.
    pub claims: Vec<Claim>,
}
