//! The daemon's side of a login: requests to the identity provider, and the checks of its ID token.

use std::time::Duration;

use async_trait::async_trait;
use headwater_api::{Problem, ProblemKind, words};
use headwater_service::backend::{Attempt, IdentityProvider, Person};
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{Jwk, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey, Header, Validation, decode, decode_header};
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::rules::{RoleRule, Settings, groups, role_of};
use super::{query, web};

/// The default duration of a login, in seconds.
const SESSION_S: u64 = 12 * 3600;

/// The default claim with the groups of a person.
const CLAIM: &str = "groups";

/// The default scope of a login, which asks for the claims of an ID token.
const SCOPE: &str = "openid profile email groups";

/// How far the clocks of the identity provider and of the daemon may differ.
const CLOCK_SKEW_MS: u64 = 60_000;

/// How long the addresses and keys of the identity provider are used.
const KEPT: Duration = Duration::from_secs(3600);

/// The shortest interval between two requests for them, if the first one failed, or did not have a key or the right one.
const PAUSE: Duration = Duration::from_secs(1);

/// The longest name of a person that is shown, in bytes.
const NAME_MAX_BYTES: usize = 100;

/// The longest subject (OpenID Connect Core, section 2).
const SUBJECT_MAX_BYTES: usize = 255;

/// An identity provider.
pub struct Provider {
    issuer: String,
    client_id: String,
    /// That of the settings.
    scope: Option<String>,
    claim: String,
    rules: Vec<RoleRule>,
    session_s: u64,
    known: Mutex<Known>,
}

/// What is known of an identity provider.
#[derive(Default)]
struct Known {
    metadata: Option<(Instant, Metadata)>,
    /// The time of the last request for it, and its error, if it failed.
    asked: Option<(Instant, Option<Problem>)>,
}

/// The addresses and the keys of an identity provider.
#[derive(Clone)]
struct Metadata {
    addresses: Addresses,
    keys: JwkSet,
}

/// The answer of `/.well-known/openid-configuration`.
#[derive(Clone, Deserialize)]
struct Addresses {
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
    #[serde(default)]
    scopes_supported: Vec<String>,
}

impl Addresses {
    /// The default scope. Some identity providers refuse a login that asks for a scope that they do not have.
    fn scope(&self) -> String {
        let known = &self.scopes_supported;
        let is_known = |word: &&str| *word != CLAIM || known.is_empty() || known.iter().any(|it| it == word);
        SCOPE.split(' ').filter(is_known).collect::<Vec<_>>().join(" ")
    }
}

/// The answer of the token endpoint.
#[derive(Deserialize)]
struct Tokens {
    id_token: String,
}

impl Provider {
    /// The identity provider of the settings, if they have one. Nothing is requested yet.
    pub fn of(settings: Settings) -> Option<Self> {
        let Settings { oidc_issuer, oidc_client_id, oidc_scope, oidc_claim, oidc_role, oidc_session } =
            settings;
        Some(Self {
            issuer: oidc_issuer?,
            client_id: oidc_client_id?,
            scope: oidc_scope,
            claim: oidc_claim.unwrap_or_else(|| CLAIM.to_owned()),
            rules: oidc_role,
            session_s: oidc_session.unwrap_or(SESSION_S),
            known: Mutex::default(),
        })
    }

    /// The addresses and the keys of the identity provider. They are requested again if they are old, or if they do not
    /// have what `is_enough` asks for.
    async fn metadata(&self, is_enough: impl Fn(&Metadata) -> bool + Send) -> Result<Metadata, Problem> {
        // Held during the request: other logins wait for its answer, instead of sending the same request.
        let mut known = self.known.lock().await;
        if let Some((at, metadata)) = &known.metadata
            && at.elapsed() < KEPT
            && is_enough(metadata)
        {
            return Ok(metadata.clone());
        }
        if known.asked.as_ref().is_none_or(|(at, _)| at.elapsed() >= PAUSE) {
            let error = match self.request_metadata().await {
                Ok(metadata) => {
                    known.metadata = Some((Instant::now(), metadata));
                    None
                }
                Err(problem) => Some(problem),
            };
            known.asked = Some((Instant::now(), error));
        }
        match (&known.asked, &known.metadata) {
            (Some((_, Some(error))), _) => Err(error.clone()),
            (_, Some((_, metadata))) => Ok(metadata.clone()),
            // Cannot happen: a request without an error has set the metadata.
            (_, None) => {
                Err(Problem::new(ProblemKind::Unavailable, "the identity provider was not asked yet"))
            }
        }
    }

    async fn request_metadata(&self) -> Result<Metadata, Problem> {
        let url = format!("{}/.well-known/openid-configuration", self.issuer.trim_end_matches('/'));
        let addresses: Addresses = web::json(&url, None).await.map_err(unanswered)?;
        if addresses.issuer != self.issuer {
            let message =
                format!("cannot log in: {url} names another issuer, '{}'", query::plain(&addresses.issuer));
            return Err(Problem::new(ProblemKind::Unavailable, message).advise(
                "if that is the right provider, start the daemon with exactly this text as --oidc-issuer",
            ));
        }
        let Addresses { authorization_endpoint, token_endpoint, jwks_uri, .. } = &addresses;
        if let Some(odd) =
            [authorization_endpoint, token_endpoint, jwks_uri].iter().find(|it| !web::is_safe(it))
        {
            let message =
                format!("cannot log in: {url} names '{}', which is not an https URL", query::plain(odd));
            return Err(Problem::new(ProblemKind::Unavailable, message)
                .advise("the addresses of the identity provider must be https URLs"));
        }
        let keys = web::json(jwks_uri, None).await.map_err(unanswered)?;
        Ok(Metadata { addresses, keys })
    }

    /// Exchanges a code for an ID token.
    async fn exchange(&self, attempt: &Attempt, code: &str, redirect: &str) -> Result<String, Problem> {
        let addresses = self.metadata(|_| true).await?.addresses;
        let form: [(&str, &str); 5] = [
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", redirect),
            ("client_id", &self.client_id),
            ("code_verifier", &attempt.verifier()),
        ];
        let Tokens { id_token } =
            web::json(&addresses.token_endpoint, Some(&form)).await.map_err(unanswered)?;
        Ok(id_token)
    }

    /// The person of an ID token for this daemon and this attempt.
    async fn person_of(&self, id_token: &str, nonce: &str, now_ms: u64) -> Result<Person, Problem> {
        let header = decode_header(id_token)
            .map_err(|error| refused(format!("the identity provider sent no valid ID token: {error}")))?;
        if matches!(header.alg, Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512) {
            let message = "the ID token is signed with a client secret, and this client has none";
            return Err(
                refused(message).advise("choose RS256 or ES256 for this client at the identity provider")
            );
        }
        let keys = self.metadata(|metadata| find(&metadata.keys, &header).is_some()).await?.keys;
        let mut claims = self.claims_of(id_token, &header, &keys)?;
        if claims.as_ref().is_err_and(|error| {
            matches!(error.kind(), ErrorKind::InvalidSignature | ErrorKind::InvalidAlgorithm)
        }) {
            // The identity provider may have replaced the key by another one of the same name.
            let newer = self.metadata(|metadata| metadata.keys != keys).await?.keys;
            if newer != keys {
                claims = self.claims_of(id_token, &header, &newer)?;
            }
        }
        let claims = claims.map_err(|error| self.explain(&error))?;
        check_times(&claims, now_ms)?;
        let is_other = |party: &Value| party.as_str() != Some(self.client_id.as_str());
        if claims.get("azp").is_some_and(is_other) {
            return Err(refused("the ID token was issued to another client")
                .advise("ask the administrator of the daemon to check --oidc-client-id"));
        }
        if claims.get("nonce").and_then(Value::as_str) != Some(nonce) {
            return Err(refused("the ID token belongs to another login"));
        }
        self.with_role(&claims)
    }

    /// The claims of an ID token that is signed with one of these keys. The inner error says why they do not count.
    fn claims_of(
        &self,
        id_token: &str,
        header: &Header,
        keys: &JwkSet,
    ) -> Result<jsonwebtoken::errors::Result<Value>, Problem> {
        let Some(jwk) = find(keys, header) else {
            let name = query::plain(header.kid.as_deref().unwrap_or("without a name"));
            let message =
                format!("the ID token is signed with the key {name}, and {} has no such key", self.issuer);
            return Err(refused(message).advise("log in again in a minute"));
        };
        let mut validation = Validation::new(header.alg);
        validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
        validation.set_audience(&[&self.client_id]);
        validation.set_issuer(&[&self.issuer]);
        // These are checked with the daemon's clock, below.
        (validation.validate_exp, validation.validate_nbf) = (false, false);
        let decoded = DecodingKey::from_jwk(jwk).and_then(|key| decode::<Value>(id_token, &key, &validation));
        Ok(decoded.map(|token| token.claims))
    }

    fn with_role(&self, claims: &Value) -> Result<Person, Problem> {
        let name = name_of(claims).ok_or_else(|| {
            bad_claim("sub", "the ID token's claim 'sub' is not 1 to 255 plain ASCII characters")
        })?;
        let groups = groups(claims.get(&self.claim));
        if let Some((role, scopes)) = role_of(&self.rules, &groups) {
            return Ok(Person { name, role, scopes });
        }
        let reason = match groups.as_slice() {
            [] => format!("the ID token has no groups in the claim '{}'", self.claim),
            _ => format!("no group in the claim '{}' has a role", self.claim),
        };
        Err(Problem::new(ProblemKind::Forbidden, format!("{name} has no role here: {reason}"))
            .advise("ask an administrator to give a group a role: 'headwater serve --oidc-role GROUP=ROLE'"))
    }

    /// Why an ID token with a known key is refused.
    fn explain(&self, error: &jsonwebtoken::errors::Error) -> Problem {
        let Self { issuer, client_id, .. } = self;
        match error.kind() {
            ErrorKind::InvalidAudience => {
                refused(format!("the ID token is for another client than {client_id}"))
                    .advise("ask the administrator of the daemon to check --oidc-client-id")
            }
            ErrorKind::InvalidIssuer => refused(format!("the ID token is of another issuer than {issuer}"))
                .advise("ask the administrator of the daemon to check --oidc-issuer"),
            ErrorKind::InvalidSignature => {
                refused(format!("the signature of the ID token is not valid for {issuer}"))
            }
            ErrorKind::MissingRequiredClaim(claim) => {
                bad_claim(claim, format!("the ID token has no valid claim '{claim}'"))
            }
            _ => refused(format!("the ID token is not valid: {error}")),
        }
    }
}

#[async_trait]
impl IdentityProvider for Provider {
    fn issuer(&self) -> &str {
        &self.issuer
    }

    fn session_s(&self) -> u64 {
        self.session_s
    }

    async fn page(&self, attempt: &Attempt, redirect: &str) -> Result<String, Problem> {
        let addresses = self.metadata(|_| true).await?.addresses;
        let (page, scope) = (&addresses.authorization_endpoint, self.scope.clone());
        let scope = scope.unwrap_or_else(|| addresses.scope());
        let separator = if page.contains('?') { '&' } else { '?' };
        let query = query::encoded(&[
            ("response_type", "code"),
            ("client_id", &self.client_id),
            ("redirect_uri", redirect),
            ("scope", &scope),
            ("state", &attempt.state()),
            ("nonce", &attempt.nonce()),
            ("code_challenge", &attempt.challenge()),
            ("code_challenge_method", "S256"),
        ]);
        Ok(format!("{page}{separator}{query}"))
    }

    async fn person(
        &self,
        attempt: &Attempt,
        code: &str,
        redirect: &str,
        now_ms: u64,
    ) -> Result<Person, Problem> {
        let id_token = self.exchange(attempt, code, redirect).await?;
        self.person_of(&id_token, &attempt.nonce(), now_ms).await
    }
}

/// The key that a token names. If the token names none, the only key.
fn find<'a>(keys: &'a JwkSet, header: &Header) -> Option<&'a Jwk> {
    match (&header.kid, keys.keys.as_slice()) {
        (Some(name), _) => keys.find(name),
        (None, [only]) => Some(only),
        (None, _) => None,
    }
}

fn refused(message: impl Into<String>) -> Problem {
    Problem::new(ProblemKind::Unauthorized, message).during("cannot log in").advise("log in again")
}

/// The problem of an ID token with a missing or invalid claim. Another login would get the same claims.
fn bad_claim(claim: &str, message: impl Into<String>) -> Problem {
    refused(message).advise(format!(
        "ask the administrator of the identity provider: its ID tokens must contain the claim '{claim}'"
    ))
}

/// Adds what to do if a request to the identity provider failed.
fn unanswered(problem: Problem) -> Problem {
    let advice = match problem.kind {
        ProblemKind::Unauthorized => "log in again",
        _ => "log in again later; tokens and earlier logins work meanwhile",
    };
    problem.during("cannot log in").advise(advice)
}

/// Fails if a token has expired or is not valid yet, by the daemon's clock.
fn check_times(claims: &Value, now_ms: u64) -> Result<(), Problem> {
    let time = |claim: &str| {
        // Some identity providers send fractions of a second.
        let seconds = claims.get(claim).and_then(Value::as_f64).filter(|it| (0.0..1e12).contains(it));
        seconds.map(|seconds| Duration::from_secs_f64(seconds).as_millis())
    };
    let shown = |ms: u128| words::time(u64::try_from(ms).unwrap_or(u64::MAX));
    let (now, skew) = (u128::from(now_ms), u128::from(CLOCK_SKEW_MS));
    let advice =
        "log in again; if the times differ much, correct the clock of the server or of the identity provider";
    let Some(end) = time("exp") else {
        return Err(bad_claim("exp", "the ID token has no valid claim 'exp'"));
    };
    if end + skew <= now {
        let message =
            format!("the ID token expired at {}, and the server's clock shows {}", shown(end), shown(now));
        return Err(refused(message).advise(advice));
    }
    let begin = time("iat").max(time("nbf")).unwrap_or(0);
    if begin > now + skew {
        let message = format!(
            "the ID token is not valid before {}, and the server's clock shows {}",
            shown(begin),
            shown(now)
        );
        return Err(refused(message).advise(advice));
    }
    Ok(())
}

/// A person's name in the history: the name, which the person may be able to change, and the subject, which never changes.
/// `None`: the subject could not be told from others.
fn name_of(claims: &Value) -> Option<String> {
    let text = |claim: &str, max_bytes: usize| {
        let is_plain =
            |text: &&str| (1..=max_bytes).contains(&text.len()) && text.chars().all(|c| c.is_ascii_graphic());
        claims.get(claim).and_then(Value::as_str).filter(is_plain)
    };
    let subject = text("sub", SUBJECT_MAX_BYTES)?;
    let name = text("preferred_username", NAME_MAX_BYTES).or_else(|| text("email", NAME_MAX_BYTES));
    Some(match name.filter(|name| *name != subject) {
        Some(name) => format!("{name} ({subject})"),
        None => subject.to_owned(),
    })
}

#[cfg(test)]
mod tests;
