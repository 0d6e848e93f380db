//! `POST /api/v1/join-tokens`: a token with which a node joins.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::{CreateJoinToken, JoinToken, Problem, ProblemKind};
use headwater_db::{DbError, JoinTokenRecord};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::Body;
use crate::fleet::controller::ParsedJoinToken;
use crate::fleet::protocol::JOIN_PREFIX;
use crate::token;

/// How long expired tokens are stored, so that an error can name the reason.
const KEPT_MS: u64 = 7 * 24 * 3_600_000;

/// The longest validity of a token: one day.
const VALID_MAX_S: u64 = 24 * 3600;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot make a join token: this daemon has no port for nodes")]
    NoPort,
    #[error("cannot make a join token that is valid for {0} s: 1 to {VALID_MAX_S} s are allowed")]
    Valid(u64),
    #[error("cannot make a join token: the system gave no random numbers")]
    Random(#[source] std::io::Error),
    #[error("cannot make a join token")]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::NoPort => ProblemKind::Conflict,
            Self::Valid(_) => ProblemKind::Invalid,
            Self::Random(_) => ProblemKind::Failed,
            Self::Db(source) => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::NoPort => Some("start the daemon with 'headwater serve --nodes ADDRESS'".to_owned()),
            Self::Valid(_) | Self::Random(_) => None,
            Self::Db(source) => source.advice(),
        }
    }
}

/// Creates a token with which one node joins. Only this answer contains it: the daemon stores a hash.
#[utoipa::path(
    post,
    path = "/api/v1/join-tokens",
    security(("token" = ["admin", "everything"])),
    tag = "hosts",
    request_body = CreateJoinToken,
    responses(
        (status = 201, body = JoinToken),
        (status = 400, description = "The validity is 0 or too long", body = Problem),
        (status = 409, description = "The daemon has no port for nodes", body = Problem),
    ),
)]
pub(super) async fn create_join_token(
    State(service): State<Service>,
    caller: Caller,
    Body(CreateJoinToken { valid_s }): Body<CreateJoinToken>,
) -> Result<(StatusCode, Json<JoinToken>), Failure> {
    let authority = service.authority().cloned().ok_or(Error::NoPort)?;
    if !(1..=VALID_MAX_S).contains(&valid_s) {
        return Err(Error::Valid(valid_s).into());
    }
    let secret = token::new_secret(service.random(), JOIN_PREFIX).map_err(Error::Random)?;
    let now_ms = service.now_ms();
    let expires_at_ms = now_ms.saturating_add(valid_s.saturating_mul(1000));
    let record = JoinTokenRecord {
        hash: token::hash_of(&secret),
        created_by: caller.principal.clone(),
        created_at_ms: now_ms,
        expires_at_ms,
        used_by: None,
    };
    let handle = service.clone();
    let added = service.to_the_end(async move {
        let mut repo = handle.db().write().await?;
        repo.hosts().add_token(&record, now_ms.saturating_sub(KEPT_MS)).await?;
        let detail = format!("valid for {valid_s} s");
        let event = handle.event(&caller, "daemon".to_owned(), "join token created", detail);
        repo.events().append(event).await?;
        repo.save().await
    });
    added.await.map_err(Error::Db)?;
    let token = ParsedJoinToken { secret, authority: authority.fingerprint() }.text();
    Ok((StatusCode::CREATED, Json(JoinToken { token, url: authority.url(), expires_at_ms })))
}
