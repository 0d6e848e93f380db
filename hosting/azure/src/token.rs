//! Gets tokens for Azure Resource Manager with a client secret, a managed identity or a workload identity.
//!
//! | flow | asks | authenticates with |
//! |---|---|---|
//! | client secret | `AUTHORITY/TENANT/oauth2/v2.0/token` | the secret, read from its file for each request |
//! | workload identity | the same URL | the token in the file that the cluster renews, read for each request |
//! | managed identity | the metadata service of the machine | nothing: Azure recognises the machine |
//!
//! A token is reused until five minutes before it expires. If several callers need a new token at the same time, only
//! one request is sent. A secret or token never appears in errors, logs or debug output.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, StatusCode, Uri};
use serde::Deserialize;
use tokio::sync::Mutex;

use crate::clock::Clock;
use crate::error::{AzureError, AzureErrorKind};
use crate::escape::escaped;
use crate::http::{Answer, HttpClient};
use crate::pacer::Pacer;

/// The longest file of a secret or token.
const SECRET_MAX_BYTES: usize = 64 << 10;

/// A token is replaced this long before it expires, because a clock may be wrong and a request takes time.
const EXPIRES_EARLY: Duration = Duration::from_secs(300);

/// The path and API version of a machine's metadata service.
const METADATA_PATH: &str = "/metadata/identity/oauth2/token?api-version=2018-02-01";

/// URLs of Azure's services. Clouds other than the public one have other URLs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoints {
    /// The login service, without a trailing slash.
    pub authority: String,
    /// The management service, without a trailing slash.
    pub management: String,
    /// The metadata service, without a trailing slash.
    pub metadata: String,
}

impl Default for Endpoints {
    /// The URLs of the public cloud.
    fn default() -> Self {
        Self {
            authority: "https://login.microsoftonline.com".to_owned(),
            management: "https://management.azure.com".to_owned(),
            metadata: "http://169.254.169.254".to_owned(),
        }
    }
}

/// A client secret. Its `Debug` output hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct ClientSecret(String);

impl ClientSecret {
    /// Wraps a secret.
    pub fn new(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for ClientSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientSecret(..)")
    }
}

/// The identity of this program in Azure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// An application and its secret.
    ClientSecret {
        /// The tenant of the application: a UUID or a domain.
        tenant: String,
        /// The client ID of the application.
        client: String,
        /// The file with the secret.
        secret_file: PathBuf,
    },
    /// An application and its secret, which is not in a file.
    KnownSecret {
        /// The tenant of the application: a UUID or a domain.
        tenant: String,
        /// The client ID of the application.
        client: String,
        /// The secret.
        secret: ClientSecret,
    },
    /// An application that trusts tokens of a Kubernetes cluster.
    WorkloadIdentity {
        /// The tenant of the application: a UUID or a domain.
        tenant: String,
        /// The client ID of the application.
        client: String,
        /// The file with the cluster's token; usually `AZURE_FEDERATED_TOKEN_FILE` contains its path.
        token_file: PathBuf,
    },
    /// The machine on which this program runs.
    ManagedIdentity {
        /// The client ID of the identity, if the machine has several.
        client: Option<String>,
    },
}

struct Token {
    text: Arc<str>,
    /// Expiry, by the clock of the source.
    good_until: Duration,
}

/// Provides valid tokens.
pub struct TokenSource {
    http: Arc<HttpClient>,
    pacer: Pacer,
    clock: Arc<dyn Clock>,
    endpoints: Endpoints,
    credential: Credential,
    kept: Mutex<Option<Token>>,
}

impl fmt::Debug for TokenSource {
    /// Omits the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenSource").field("credential", &self.credential).finish_non_exhaustive()
    }
}

/// A successful answer. The metadata service sends numbers as text.
#[derive(Deserialize)]
struct Granted {
    access_token: String,
    expires_in: Number,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Plain(u64),
    Text(String),
}

/// A refusal.
#[derive(Default, Deserialize)]
struct Refused {
    #[serde(default)]
    error: String,
    #[serde(default)]
    error_codes: Vec<u64>,
}

impl TokenSource {
    /// Sends no request yet.
    pub fn new(
        http: Arc<HttpClient>,
        pacer: Pacer,
        clock: Arc<dyn Clock>,
        endpoints: Endpoints,
        credential: Credential,
    ) -> Self {
        Self { http, pacer, clock, endpoints, credential, kept: Mutex::default() }
    }

    /// The URL of the management service that the tokens are for.
    pub fn management(&self) -> &str {
        &self.endpoints.management
    }

    /// A token that is valid for at least a few minutes.
    pub async fn token(&self) -> Result<Arc<str>, AzureError> {
        let mut kept = self.kept.lock().await;
        if let Some(token) = kept.as_ref().filter(|token| self.clock.now() < token.good_until) {
            return Ok(token.text.clone());
        }
        let asked_at = self.clock.now();
        let action = self.action();
        let request = self.request(&action)?;
        let answer = self.pacer.send(&action, || self.http.send(request.clone())).await?;
        if answer.status != StatusCode::OK {
            return Err(self.refused(&action, &answer));
        }
        // The parser's error may quote the token, so it is not shown.
        let odd =
            || AzureError::new(AzureErrorKind::Invalid, format!("{action}: the answer contains no token"));
        let granted: Granted = serde_json::from_slice(&answer.body).map_err(|_| odd())?;
        let expires_in_s = match granted.expires_in {
            Number::Plain(seconds) => seconds,
            Number::Text(text) => text.parse().map_err(|_| odd())?,
        };
        if granted.access_token.is_empty() || HeaderValue::from_str(&granted.access_token).is_err() {
            return Err(odd());
        }
        let good_for = Duration::from_secs(expires_in_s).saturating_sub(EXPIRES_EARLY);
        let text: Arc<str> = granted.access_token.into();
        // At most a day: more than Azure grants, and no overflow.
        *kept = Some(Token {
            text: text.clone(),
            good_until: asked_at + good_for.min(Duration::from_secs(86_400)),
        });
        Ok(text)
    }

    /// Discards a token that Azure has refused, so that the next call gets another.
    pub async fn forget(&self, refused: &str) {
        let mut kept = self.kept.lock().await;
        if kept.as_ref().is_some_and(|token| *token.text == *refused) {
            *kept = None;
        }
    }

    fn action(&self) -> String {
        match &self.credential {
            Credential::ClientSecret { tenant, client, .. }
            | Credential::KnownSecret { tenant, client, .. } => {
                format!("cannot log in to Azure as application {client} of tenant {tenant}")
            }
            Credential::WorkloadIdentity { tenant, client, .. } => {
                format!("cannot log in to Azure with the workload identity {client} of tenant {tenant}")
            }
            Credential::ManagedIdentity { client: Some(client) } => {
                format!("cannot log in to Azure with the managed identity {client} of this machine")
            }
            Credential::ManagedIdentity { client: None } => {
                "cannot log in to Azure with the managed identity of this machine".to_owned()
            }
        }
    }

    /// The identity that Azure has put into the token, for people. `None`: the token does not contain it. The token
    /// is not verified, because only Azure can do that.
    pub async fn identity(&self) -> Result<Option<String>, AzureError> {
        Ok(identity_in(&self.token().await?))
    }

    fn request(&self, action: &str) -> Result<Request<Full<Bytes>>, AzureError> {
        let scope = format!("{}/.default", self.endpoints.management);
        match &self.credential {
            Credential::ClientSecret { tenant, client, secret_file } => {
                let secret = read_secret(action, secret_file)?;
                self.login_with(action, tenant, client, &secret)
            }
            Credential::KnownSecret { tenant, client, secret } => {
                self.login_with(action, tenant, client, &secret.0)
            }
            Credential::WorkloadIdentity { tenant, client, token_file } => {
                let assertion = read_secret(action, token_file)?;
                let form = [
                    ("client_id", client.as_str()),
                    ("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"),
                    ("client_assertion", assertion.as_str()),
                    ("grant_type", "client_credentials"),
                    ("scope", scope.as_str()),
                ];
                self.login(action, tenant, &form)
            }
            Credential::ManagedIdentity { client } => {
                let resource = escaped(&format!("{}/", self.endpoints.management));
                let client =
                    client.as_deref().map_or(String::new(), |id| format!("&client_id={}", escaped(id)));
                let url = format!("{}{METADATA_PATH}&resource={resource}{client}", self.endpoints.metadata);
                let mut request = Request::new(Full::default());
                *request.uri_mut() = parsed(action, &url)?;
                // The service refuses requests without this header, because a request that was forwarded by mistake
                // lacks it.
                request.headers_mut().insert("metadata", HeaderValue::from_static("true"));
                Ok(request)
            }
        }
    }

    fn login_with(
        &self,
        action: &str,
        tenant: &str,
        client: &str,
        secret: &str,
    ) -> Result<Request<Full<Bytes>>, AzureError> {
        let scope = format!("{}/.default", self.endpoints.management);
        let form = [
            ("client_id", client),
            ("client_secret", secret),
            ("grant_type", "client_credentials"),
            ("scope", scope.as_str()),
        ];
        self.login(action, tenant, &form)
    }

    fn login(
        &self,
        action: &str,
        tenant: &str,
        form: &[(&str, &str)],
    ) -> Result<Request<Full<Bytes>>, AzureError> {
        let url = format!("{}/{}/oauth2/v2.0/token", self.endpoints.authority, escaped(tenant));
        let form: Vec<String> =
            form.iter().map(|(name, value)| format!("{name}={}", escaped(value))).collect();
        let mut request = Request::new(Full::new(Bytes::from(form.join("&"))));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = parsed(action, &url)?;
        let form_type = HeaderValue::from_static("application/x-www-form-urlencoded");
        request.headers_mut().insert(CONTENT_TYPE, form_type);
        Ok(request)
    }

    /// The error for a refusal. The service's own text is omitted, because it may quote the secret; the code
    /// distinguishes the reasons.
    fn refused(&self, action: &str, answer: &Answer) -> AzureError {
        let refused: Refused = serde_json::from_slice(&answer.body).unwrap_or_default();
        let code = refused.error_codes.first().copied().unwrap_or_default();
        let (why, advice) = match code {
            7_000_222 => (
                "its secret has expired (AADSTS7000222)".to_owned(),
                "create a new secret for the application, and give its Value instead",
            ),
            7_000_215 => (
                "its secret is wrong (AADSTS7000215)".to_owned(),
                "give the secret's Value (shown once by Azure), not its Secret ID",
            ),
            90_002 | 900_023 => (
                format!("there is no such tenant (AADSTS{code})"),
                "give the tenant of the application as a UUID or a domain",
            ),
            700_016 => (
                "the tenant has no such application (AADSTS700016)".to_owned(),
                "check that the application belongs to the tenant",
            ),
            700_024 => (
                "the cluster's token has expired (AADSTS700024)".to_owned(),
                "check that the cluster still renews the token in the file, and that the clocks are right",
            ),
            70_021 | 700_213 => (
                format!("the application does not trust the cluster's token (AADSTS{code})"),
                "add a federated credential with the issuer and subject of the cluster to the application",
            ),
            0 if matches!(self.credential, Credential::ManagedIdentity { .. }) => (
                format!("the metadata service answers {}", answer.status),
                "assign an identity to the machine, and name it if the machine has several",
            ),
            _ => {
                let known = [
                    "invalid_client",
                    "invalid_grant",
                    "invalid_request",
                    "unauthorized_client",
                    "invalid_scope",
                ];
                let error = known.iter().find(|known| **known == refused.error).unwrap_or(&"another error");
                (
                    format!("Microsoft Entra answers {} ({error}, AADSTS{code})", answer.status),
                    "look up the code at https://login.microsoftonline.com/error",
                )
            }
        };
        AzureError::new(AzureErrorKind::Denied, format!("{action}: {why}")).advise(advice)
    }
}

/// The fields of a token that name the identity.
#[derive(Deserialize)]
struct Named {
    appid: Option<String>,
    /// The same in tokens of version 2.
    azp: Option<String>,
    oid: Option<String>,
    tid: Option<String>,
}

/// The identity in a token (RFC 7519).
fn identity_in(token: &str) -> Option<String> {
    let payload = token.split('.').nth(1)?;
    let Named { appid, azp, oid, tid } =
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()?;
    let parts = [("application", appid.or(azp)), ("object", oid), ("tenant", tid)];
    let shown: Vec<String> =
        parts.into_iter().filter_map(|(what, id)| Some(format!("{what} {}", id?.escape_debug()))).collect();
    (!shown.is_empty()).then(|| shown.join(", "))
}

fn parsed(action: &str, url: &str) -> Result<Uri, AzureError> {
    url.parse().map_err(|_| {
        AzureError::new(
            AzureErrorKind::Invalid,
            format!("{action}: an endpoint of the connection is not a valid URL"),
        )
    })
}

fn read_secret(action: &str, path: &std::path::Path) -> Result<String, AzureError> {
    let invalid = |why: &dyn fmt::Display| {
        let what = format!("{action}: cannot read {}: {why}", path.display());
        AzureError::new(AzureErrorKind::Denied, what).advise("write only the secret to the file")
    };
    let length = std::fs::metadata(path).map_err(|error| invalid(&error))?.len();
    if length > SECRET_MAX_BYTES as u64 {
        return Err(invalid(&"the file is too long for a secret"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| invalid(&error))?;
    let secret = text.trim();
    if secret.is_empty() {
        return Err(invalid(&"the file is empty"));
    }
    Ok(secret.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_its_identity() {
        let token = |payload: &str| format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(payload));
        let named = identity_in(&token(r#"{"appid":"a-1","oid":"o-1","tid":"t-1","exp":1}"#));
        assert_eq!(named.as_deref(), Some("application a-1, object o-1, tenant t-1"));
        assert_eq!(identity_in(&token(r#"{"azp":"a-2"}"#)).as_deref(), Some("application a-2"));
        for odd in ["opaque", "e30.e30.c2ln", "a.b.c", &token("[]")] {
            assert_eq!(identity_in(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_known_secret_is_not_shown() {
        let secret = ClientSecret::new("hidden".to_owned());
        let credential = Credential::KnownSecret { tenant: "t".to_owned(), client: "c".to_owned(), secret };
        assert!(!format!("{credential:?}").contains("hidden"));
    }
}
