//! `POST /api/v1/tokens`: a new named token.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::{Change, CreateToken, NewToken, Problem, ProblemKind, Role, TokenInfo, name};
use headwater_db::{DbError, TokenRecord};
use serde_json::json;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::certificate::{self, ClientCertificate};
use crate::extract::Body;
use crate::token;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot create token '{0}': a token of that name exists")]
    Exists(String),
    #[error("cannot create token '{0}': the role metrics cannot be limited by scopes")]
    MetricsScopes(String),
    #[error("cannot create token '{0}': a token that is valid for 0 s would expire at once")]
    NoTime(String),
    #[error("cannot create token '{token}': token '{other}' belongs to the same certificate")]
    SameCertificate { token: String, other: String },
    #[error("cannot create token '{token}': the system gave no random numbers")]
    Random {
        token: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot create token '{token}'")]
    Db {
        token: String,
        #[source]
        source: DbError,
    },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Exists(_) | Self::SameCertificate { .. } => ProblemKind::Conflict,
            Self::NoTime(_) | Self::MetricsScopes(_) => ProblemKind::Invalid,
            Self::Random { .. } => ProblemKind::Failed,
            Self::Db { source, .. } => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Exists(name) => {
                Some(format!("'headwater token revoke {name}' first, or choose another name"))
            }
            Self::MetricsScopes(_) => Some("leave the scopes out, or choose the role viewer".to_owned()),
            Self::SameCertificate { other, .. } => {
                Some(format!("use the token '{other}', or 'headwater token revoke {other}' first"))
            }
            Self::NoTime(_) => {
                Some("give a longer time, or leave 'valid_s' out for a token that never expires".to_owned())
            }
            Self::Random { .. } => None,
            Self::Db { source, .. } => source.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db { source, .. } => source.retry_after_s(),
            _ => None,
        }
    }
}

/// Creates a named token with a role. Only this answer contains its secret: the daemon stores a hash. A token with
/// `certificate` has no secret: it belongs to clients that show this certificate in the TLS handshake.
#[utoipa::path(
    post,
    path = "/api/v1/tokens",
    security(("token" = ["admin", "everything"])),
    tag = "access",
    request_body = CreateToken,
    responses(
        (status = 201, body = NewToken),
        (status = 400, description = "The name, a scope or the certificate is not valid, or the validity is 0", body = Problem),
        (status = 409, description = "There is a token of that name, or for that certificate", body = Problem),
    ),
)]
pub(super) async fn create_token(
    State(service): State<Service>,
    caller: Caller,
    Body(request): Body<CreateToken>,
) -> Result<(StatusCode, Json<NewToken>), Failure> {
    let CreateToken { name, role, scopes, valid_s, certificate } = request;
    name::check_label("token", &name)
        .map_err(|problem| Failure(problem.during("cannot create the token")))?;
    if let Some(scopes) = &scopes {
        scopes.check().map_err(|problem| Failure(problem.during("cannot create the token")))?;
        if role == Role::Metrics {
            return Err(Error::MetricsScopes(name).into());
        }
    }
    if valid_s == Some(0) {
        return Err(Error::NoTime(name).into());
    }
    let created_at_ms = service.now_ms();
    let mut expires_at_ms = valid_s.map(|valid| created_at_ms.saturating_add(valid.saturating_mul(1000)));
    let (hash, secret) = match certificate {
        Some(pem) => {
            let certificate = ClientCertificate::parse(&pem, created_at_ms)
                .map_err(|problem| Failure(problem.during(format!("cannot create token '{name}'"))))?;
            let end_ms = certificate.expires_at_ms;
            expires_at_ms = Some(expires_at_ms.map_or(end_ms, |expires_ms| expires_ms.min(end_ms)));
            (certificate.fingerprint, String::new())
        }
        None => {
            let secret = token::new_secret(service.random(), token::NAMED_PREFIX);
            let secret = secret.map_err(|source| Error::Random { token: name.clone(), source })?;
            (token::hash_of(&secret), secret)
        }
    };
    let created_by = caller.principal.clone();
    let record = TokenRecord { name, hash, role, scopes, created_by, created_at_ms, expires_at_ms };
    let handle = service.clone();
    let record = service.to_the_end(async move { add(&handle, &caller, record).await }).await?;
    Ok((StatusCode::CREATED, Json(NewToken { info: info(record), secret })))
}

async fn add(service: &Service, caller: &Caller, record: TokenRecord) -> Result<TokenRecord, Error> {
    let failed = |source| Error::Db { token: record.name.clone(), source };
    let mut repo = service.db().write().await.map_err(failed)?;
    if let Some(other) = repo.tokens().by_hash(&record.hash).await.map_err(failed)? {
        return Err(Error::SameCertificate { token: record.name, other: other.name });
    }
    repo.tokens().add(&record).await.map_err(|e| match e {
        DbError::Taken { .. } => Error::Exists(record.name.clone()),
        e => failed(e),
    })?;
    let scopes = record.scopes.as_ref().map(|scopes| format!(" on {scopes}")).unwrap_or_default();
    let certificate = certificate_of(&record).map(|it| format!(", certificate {it}")).unwrap_or_default();
    let detail = format!("{}{scopes}{certificate}", record.role);
    let event = service.event(caller, format!("token {}", record.name), "created", detail);
    let change = Change::between(&json!({}), &info(record.clone()));
    repo.events().append(event.changing(change)).await.map_err(failed)?;
    repo.save().await.map_err(failed)?;
    Ok(record)
}

/// The fingerprint of the certificate that a token has instead of a secret.
fn certificate_of(record: &TokenRecord) -> Option<String> {
    Some(record.hash.clone()).filter(|hash| hash.starts_with(certificate::PREFIX))
}

/// A token without its secret.
pub(crate) fn info(record: TokenRecord) -> TokenInfo {
    let certificate = certificate_of(&record);
    let TokenRecord { name, role, scopes, created_by, created_at_ms, expires_at_ms, hash: _ } = record;
    TokenInfo { name, role, scopes, created_by, created_at_ms, expires_at_ms, certificate }
}
