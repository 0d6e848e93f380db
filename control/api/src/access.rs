//! Access to the API: roles, and the named tokens that carry them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::scopes::Scopes;

/// The set of permissions of a caller. Each role may also do what the roles before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Read `/metrics`, and nothing else.
    Metrics,
    /// See images, catalogs, machines, tasks and the history, without user data.
    Viewer,
    /// Run machines: create, start, stop, reset, remove them, work in their guests, scale and roll catalogs.
    Operator,
    /// Everything: images, catalogs and tokens too.
    Admin,
}

impl Role {
    /// All of them, from the one that may do least.
    pub const ALL: [Self; 4] = [Self::Metrics, Self::Viewer, Self::Operator, Self::Admin];

    /// As written in requests and in the database.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Metrics => "metrics",
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }

    /// Reads what [`Role::name`] gave.
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|role| role.name() == text);
        found.ok_or_else(|| format!("there is no role '{text}': metrics, viewer, operator and admin are"))
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Who asks, as the history names them, and what they may do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CallerInfo {
    /// For instance `uid 1000 (anna)` or `token nightly`.
    pub principal: String,
    /// Their role.
    pub role: Role,
    /// The catalogs and images that it is for. Absent: all, and the daemon itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Scopes>,
}

/// A token to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// 1 to 63 of a-z, 0-9 and '-': the history names it.
    pub name: String,
    /// The role of its holder.
    pub role: Role,
    /// The catalogs and images that the role is for. Without it: all, and the daemon itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Scopes>,
    /// For how long, in seconds. Without it, until it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid_s: Option<u64>,
}

/// A token, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenInfo {
    /// Its name.
    pub name: String,
    /// The role of its holder.
    pub role: Role,
    /// The catalogs and images that the role is for. Absent: all, and the daemon itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Scopes>,
    /// Who made it.
    pub created_by: String,
    /// When.
    pub created_at_ms: u64,
    /// When it ends. Absent: when it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<u64>,
}

/// A token that was made. Its secret is shown this once: the daemon keeps a hash of it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewToken {
    /// The token.
    #[serde(flatten)]
    pub info: TokenInfo,
    /// For the header `Authorization: Bearer SECRET`.
    pub secret: String,
}

impl std::fmt::Debug for NewToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewToken").field("info", &self.info).finish_non_exhaustive()
    }
}

/// All tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenList {
    /// By name.
    pub tokens: Vec<TokenInfo>,
}

/// A link to the web console to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateConsoleTicket {
    /// The role of the session that it opens: `viewer`, `operator` or `admin`.
    pub role: Role,
}

/// A link that opens the web console, once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleLink {
    /// For a browser on the daemon's host. It holds a secret.
    pub url: String,
    /// When it ends.
    pub expires_at_ms: u64,
}

impl std::fmt::Debug for ConsoleLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConsoleLink").field("expires_at_ms", &self.expires_at_ms).finish_non_exhaustive()
    }
}

/// The right to attach to the serial console of a machine, once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleTicket {
    /// The secret, which the page sends as a protocol of its WebSocket.
    pub ticket: String,
    /// When it ends.
    pub expires_at_ms: u64,
}

impl std::fmt::Debug for ConsoleTicket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConsoleTicket").field("expires_at_ms", &self.expires_at_ms).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_ordered_and_read_back() {
        assert!(Role::ALL.is_sorted());
        for role in Role::ALL {
            assert_eq!(Role::parse(role.name()), Ok(role));
            assert_eq!(serde_json::to_string(&role).unwrap(), format!("\"{role}\""));
        }
        assert!(Role::parse("root").is_err());
    }
}
