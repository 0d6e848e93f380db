//! Logins of people with an identity provider: `/login` on the ports of the API and of the web console, without a token.
//!
//! ```text
//!   command line, or page of the console           daemon                          identity provider
//!     |-- POST /login {redirect} ------------------> |                                  |
//!     |<-- {url, state, secret} -------------------- |                                  |
//!     |-- browser: url; the person logs in -------------------------------------------> |
//!     |<-- browser: redirect?code=..&state=.. ----------------------------------------- |
//!     |-- POST /login/code {secret, code, redirect}->|-- code, verifier --------------> |
//!     |                                              |<-- ID token -------------------- |
//!     |<-- a named token with role and scopes ------ |  it checks signature, issuer, client, nonce, times, groups
//! ```
//! The daemon stores nothing about a login that was begun ([`Attempt`]). The ID token stays in the daemon. Refresh tokens
//! are not used: the token ends by itself, and is listed and revoked as all named tokens.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post};
use axum::{Json, Router};
use headwater_api::{BeginLogin, BegunLogin, FinishLogin, LoginOffer, NewToken, Problem, ProblemKind};
use headwater_db::{DbError, TokenRecord};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::{Attempt, IdentityProvider, Person};
use crate::caller::Caller;
use crate::extract::Body;
use crate::operations::create_token::info;
use crate::token::{self, bearer};

/// The longest request body, in bytes: identity providers make codes of a few kilobytes.
const BODY_MAX_BYTES: usize = 16 << 10;

/// The most requests that wait for the identity provider.
const WAITING_MAX: usize = 16;

static WAITING: Semaphore = Semaphore::const_new(WAITING_MAX);

/// How long a request waits for its turn. The turns are in the order of arrival, so that clients that ask again and again
/// keep nobody out.
const TURN_TIMEOUT: Duration = Duration::from_secs(15);

/// The same refusal is recorded once in this time: a person without a role could fill the history otherwise.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(60);

/// The most refusals that are remembered for that; further ones are not recorded.
const REFUSALS_MAX: usize = 1000;

static REFUSALS: Mutex<BTreeMap<String, Instant>> = Mutex::new(BTreeMap::new());

/// The most logins of one person. A new login then ends the oldest one.
const LOGINS_MAX: usize = 50;

/// How much of a person's name the name of the token has, in bytes: the rest are `-` and eight digits.
const STEM_MAX_BYTES: usize = 54;

/// The beginning of a person's principal. Only logins create tokens with such a creator: what a person does later is done
/// with the token.
const PERSON: &str = "oidc ";

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("people cannot log in to this daemon: it has no identity provider")]
    NoProvider,
    #[error("cannot log in: {WAITING_MAX} logins wait for the identity provider")]
    Busy,
    #[error("cannot log in: the system gave no random numbers")]
    Random(#[source] std::io::Error),
    #[error("cannot log {person} in")]
    Db {
        person: String,
        #[source]
        source: DbError,
    },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::NoProvider => ProblemKind::Invalid,
            Self::Busy => ProblemKind::Unavailable,
            Self::Random(_) => ProblemKind::Failed,
            Self::Db { source, .. } => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::NoProvider => {
                Some("use a token, or start the daemon with 'headwater serve --oidc-issuer URL'".to_owned())
            }
            Self::Busy => Some("log in again in a minute".to_owned()),
            Self::Random(_) => None,
            Self::Db { source, .. } => source.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Busy => Some(60),
            Self::Db { source, .. } => source.retry_after_s(),
            _ => None,
        }
    }
}

/// The requests of logins.
pub(crate) fn routes(service: Service) -> Router {
    Router::new()
        .route("/login", get(offer).post(begin).delete(end))
        .route("/login/code", post(finish))
        .layer(DefaultBodyLimit::max(BODY_MAX_BYTES))
        .with_state(service)
}

async fn offer(State(service): State<Service>) -> Json<LoginOffer> {
    Json(LoginOffer { issuer: service.people().map(|people| people.issuer().to_owned()) })
}

async fn begin(
    State(service): State<Service>,
    Body(BeginLogin { redirect }): Body<BeginLogin>,
) -> Result<Json<BegunLogin>, Failure> {
    let (people, _permit) = provider(&service).await?;
    let attempt = Attempt::new(service.random()).map_err(Error::Random)?;
    let url = people.page(&attempt, &redirect).await.map_err(Failure)?;
    Ok(Json(BegunLogin { url, state: attempt.state(), secret: attempt.secret().to_owned() }))
}

async fn finish(
    State(service): State<Service>,
    Body(request): Body<FinishLogin>,
) -> Result<(StatusCode, Json<NewToken>), Failure> {
    let FinishLogin { secret, code, redirect } = request;
    let (people, _permit) = provider(&service).await?;
    let person = people.person(&Attempt::of(secret), &code, &redirect, service.now_ms()).await;
    let person = match person {
        Ok(person) => person,
        Err(problem) => {
            if problem.kind == ProblemKind::Forbidden {
                note_refusal(&service, &problem).await;
            }
            return Err(Failure(problem));
        }
    };
    let (handle, session_s) = (service.clone(), people.session_s());
    let token = service.to_the_end(async move { handle.log_in(person, session_s).await }).await?;
    Ok((StatusCode::CREATED, Json(token)))
}

/// Ends the login whose token the request has. Other tokens stay.
async fn end(State(service): State<Service>, headers: HeaderMap) -> Result<StatusCode, Failure> {
    if let Some(secret) = bearer(&headers) {
        service.log_out(secret).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

async fn provider(service: &Service) -> Result<(Arc<dyn IdentityProvider>, SemaphorePermit<'static>), Error> {
    let people = service.people().cloned().ok_or(Error::NoProvider)?;
    let turn = tokio::time::timeout(TURN_TIMEOUT, WAITING.acquire()).await;
    Ok((people, turn.ok().and_then(Result::ok).ok_or(Error::Busy)?))
}

/// Whether this refusal was not recorded lately.
fn is_new_refusal(message: &str) -> bool {
    let now = Instant::now();
    let mut refusals = REFUSALS.lock().unwrap_or_else(PoisonError::into_inner);
    refusals.retain(|_, at| now.duration_since(*at) < REFUSAL_INTERVAL);
    if refusals.len() >= REFUSALS_MAX || refusals.contains_key(message) {
        return false;
    }
    refusals.insert(message.to_owned(), now);
    true
}

/// Records that a person whom the identity provider knows has no role here.
async fn note_refusal(service: &Service, problem: &Problem) {
    if !is_new_refusal(&problem.message) {
        return;
    }
    tracing::warn!("refused a login: {}", problem.message);
    let detail = format!("login: {}", problem.message);
    service.note(service.event(&Caller::daemon(), "daemon".to_owned(), "refused", detail)).await;
}

impl Service {
    /// Creates a token for a person. Removes the tokens of logins that have ended, and of the person's oldest login if there
    /// are too many.
    async fn log_in(&self, who: Person, session_s: u64) -> Result<NewToken, Error> {
        let secret = token::new_secret(self.random(), token::NAMED_PREFIX).map_err(Error::Random)?;
        let mut number = [0; 4];
        self.random().fill(&mut number).map_err(Error::Random)?;
        let now_ms = self.now_ms();
        let person = format!("{PERSON}{}", who.name);
        let record = TokenRecord {
            name: format!("{}-{:08x}", stem(&who.name), u32::from_be_bytes(number)),
            hash: token::hash_of(&secret),
            role: who.role,
            scopes: who.scopes.clone(),
            created_by: person.clone(),
            created_at_ms: now_ms,
            expires_at_ms: Some(now_ms.saturating_add(session_s.saturating_mul(1000))),
        };
        let caller = Caller { principal: person.clone(), role: who.role, scopes: who.scopes };
        self.add_login(&caller, &record).await?;
        Ok(NewToken { info: info(record), secret })
    }

    async fn add_login(&self, caller: &Caller, record: &TokenRecord) -> Result<(), Error> {
        let person = &caller.principal;
        let failed = |source| Error::Db { person: person.clone(), source };
        let mut repo = self.db().write().await.map_err(failed)?;
        let tokens = repo.tokens().list().await.map_err(failed)?;
        let logins = tokens.into_iter().filter(|token| token.created_by.starts_with(PERSON));
        let has_ended =
            |token: &TokenRecord| token.expires_at_ms.is_some_and(|end| end <= record.created_at_ms);
        let (mut ended, mut valid): (Vec<_>, Vec<_>) = logins.partition(has_ended);
        valid.retain(|token| token.created_by == *person);
        valid.sort_by_key(|token| token.created_at_ms);
        ended.extend(valid.iter().rev().skip(LOGINS_MAX - 1).cloned());
        for token in ended {
            repo.tokens().remove(&token.name).await.map_err(failed)?;
        }
        repo.tokens().add(record).await.map_err(failed)?;
        let scopes = record.scopes.as_ref().map(|scopes| format!(" on {scopes}")).unwrap_or_default();
        let detail = format!("{}{scopes}", record.role);
        let event = self.event(caller, format!("token {}", record.name), "logged in", detail);
        repo.events().append(event).await.map_err(failed)?;
        repo.save().await.map_err(failed)
    }

    /// Removes the token with this secret, if it is that of a login.
    pub(crate) async fn log_out(&self, secret: &str) -> Result<(), DbError> {
        let found = self.token_of(secret).await?;
        let Some(record) = found.filter(|token| token.created_by.starts_with(PERSON)) else { return Ok(()) };
        let handle = self.clone();
        let work = async move {
            let mut repo = handle.db().write().await?;
            // Two requests may end the same login: the second changes nothing.
            if repo.tokens().remove(&record.name).await? {
                let caller = Caller {
                    principal: format!("token {}", record.name),
                    role: record.role,
                    scopes: record.scopes,
                };
                let event = handle.event(&caller, format!("token {}", record.name), "logged out", "");
                repo.events().append(event).await?;
            }
            repo.save().await
        };
        self.to_the_end(work).await
    }
}

/// The beginning of the name of a person's token: the end of the person's name, which has the subject.
fn stem(person: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let all: String = person.chars().map(plain).collect();
    let stem = all.get(all.len().saturating_sub(STEM_MAX_BYTES)..).unwrap_or(&all).trim_matches('-');
    if stem.is_empty() { "person".to_owned() } else { stem.to_owned() }
}

#[cfg(test)]
mod tests;
