//! Who calls the API and what they may do: roles, the named tokens that carry them, and tickets and links of the web
//! console. Only types of requests and answers: `control/service` makes and checks tokens.

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
    /// All roles, from the least to the most permissions.
    pub const ALL: [Self; 4] = [Self::Metrics, Self::Viewer, Self::Operator, Self::Admin];

    /// The role's name in requests and in the database.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Metrics => "metrics",
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }

    /// Parses the output of [`Role::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|role| role.name() == text);
        found.ok_or_else(|| format!("'{text}' is not a role; write metrics, viewer, operator or admin"))
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The caller of a request: its name in the history, and its permissions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CallerInfo {
    /// For instance `uid 1000 (anna)` or `token nightly`.
    pub principal: String,
    /// The caller's role.
    pub role: Role,
    /// The catalogs and images on which the caller may act. Absent: all of them, and the daemon itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Scopes>,
}

/// The request to create a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// 1 to 63 of a-z, 0-9 and '-': the history names it.
    pub name: String,
    /// The role of callers with this token.
    pub role: Role,
    /// The catalogs and images to which the role is limited. Absent: no limit; the token may also act on the daemon itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Scopes>,
    /// How long the token is valid, in seconds. Absent: until it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid_s: Option<u64>,
    /// The client certificate of its holder, in PEM. The token then has no secret, and expires with the certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
}

/// A token, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenInfo {
    /// The token's name.
    pub name: String,
    /// The role of callers with this token.
    pub role: Role,
    /// The catalogs and images to which the role is limited. Absent: no limit; the token may also act on the daemon itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Scopes>,
    /// The caller that created it.
    pub created_by: String,
    /// When it was created.
    pub created_at_ms: u64,
    /// When it expires. Absent: it is valid until it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<u64>,
    /// The fingerprint of the client certificate, if the token has one instead of a secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
}

/// A new token. Only this answer contains its secret: the daemon stores a hash.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewToken {
    /// The token.
    #[serde(flatten)]
    pub info: TokenInfo,
    /// For the header `Authorization: Bearer SECRET`. Empty if the token has a client certificate instead.
    pub secret: String,
}

impl std::fmt::Debug for NewToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewToken").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Whether people can log in with an identity provider: the answer of `GET /login`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoginOffer {
    /// The URL of the identity provider. Absent: people cannot log in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub issuer: Option<String>,
}

/// The request to begin a login: `POST /login`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BeginLogin {
    /// The URL at which the client waits for the browser.
    pub redirect: String,
}

/// A login that was begun.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BegunLogin {
    /// The page of the identity provider, for the browser.
    pub url: String,
    /// The browser comes back with this state. The client ignores a browser with another one.
    pub state: String,
    /// For the request that finishes the login.
    pub secret: String,
}

impl std::fmt::Debug for BegunLogin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BegunLogin").field("url", &self.url).finish_non_exhaustive()
    }
}

/// The request to finish a login: `POST /login/code`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FinishLogin {
    /// The secret of the login that was begun.
    pub secret: String,
    /// The code that the browser brought.
    pub code: String,
    /// The URL at which the client waited.
    pub redirect: String,
}

impl std::fmt::Debug for FinishLogin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FinishLogin").field("redirect", &self.redirect).finish_non_exhaustive()
    }
}

/// The list of all tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenList {
    /// Ordered by name.
    pub tokens: Vec<TokenInfo>,
}

/// The request to create a link to the web console.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateConsoleTicket {
    /// The role of the session that it opens: `viewer`, `operator` or `admin`.
    pub role: Role,
}

/// A link that opens the web console once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleLink {
    /// The URL, for a browser on the daemon's host. It contains a secret.
    pub url: String,
    /// When the link expires.
    pub expires_at_ms: u64,
}

impl std::fmt::Debug for ConsoleLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConsoleLink").field("expires_at_ms", &self.expires_at_ms).finish_non_exhaustive()
    }
}

/// A ticket that permits one connection to the serial console of a machine.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleTicket {
    /// The secret. The page sends it as a subprotocol of its WebSocket.
    pub ticket: String,
    /// When the ticket expires.
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
