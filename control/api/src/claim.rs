//! Claims: machines of a catalog that are lent to somebody, and given to nobody else before they were reset.

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
