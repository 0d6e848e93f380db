//! Tickets and sessions of the console.
//!
//! ```text
//!   ticket: issued --used within 60 s--> session --used--> session        (only hashes are stored)
//!                  --60 s, or the daemon ends--> gone      --30 min without use, 12 h, signed out--> gone
//! ```
//! Sessions are in the database, so that an open page continues to work after a restart of the daemon. Tickets are in
//! memory.

use std::sync::{Mutex, PoisonError};

use headwater_api::{ProblemKind, Role};
use headwater_db::{DbError, SessionRecord};

use crate::Service;
use crate::answer::Explain;
use crate::backend::Random;
use crate::caller::Caller;
use crate::token::{self, hash_of};

/// How long a ticket is valid.
pub(crate) const TICKET_MS: u64 = 60_000;

/// The most tickets that wait to be used.
const TICKETS_MAX: usize = 64;

/// How long a session lasts without a request.
const SESSION_IDLE_MS: u64 = 30 * 60_000;

/// The longest duration of a session.
const SESSION_MS: u64 = 12 * 3_600_000;

/// The precision of the recorded last use of a session, so that not each request writes to the database.
const USED_EXACT_MS: u64 = 60_000;

/// The right to do one thing, once.
#[derive(Debug)]
struct Ticket<T> {
    hash: String,
    right: T,
    expires_at_ms: u64,
}

/// The right to open a session.
#[derive(Debug)]
pub(crate) struct SessionRight {
    principal: String,
    role: Role,
}

/// The tickets that are not used yet.
#[derive(Debug)]
pub(crate) struct Tickets<T>(Mutex<Vec<Ticket<T>>>);

impl<T> Default for Tickets<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Tickets<T> {
    /// Issues a ticket. Returns its secret, and when it expires.
    pub(super) fn issue(
        &self,
        right: T,
        prefix: &str,
        random: &dyn Random,
        now_ms: u64,
    ) -> Result<(String, u64), TicketError> {
        let secret = token::new_secret(random, prefix).map_err(TicketError::Random)?;
        let expires_at_ms = now_ms.saturating_add(TICKET_MS);
        let ticket = Ticket { hash: hash_of(&secret), right, expires_at_ms };
        if self.add(ticket, now_ms) { Ok((secret, expires_at_ms)) } else { Err(TicketError::TooMany) }
    }

    /// Adds a ticket. Returns `false` if too many wait.
    fn add(&self, ticket: Ticket<T>, now_ms: u64) -> bool {
        let mut tickets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tickets.retain(|ticket| ticket.expires_at_ms > now_ms);
        let has_space = tickets.len() < TICKETS_MAX;
        if has_space {
            tickets.push(ticket);
        }
        has_space
    }

    /// Removes and returns the ticket with this secret, if it is still valid.
    pub(super) fn take(&self, secret: &str, now_ms: u64) -> Option<T> {
        let hash = hash_of(secret);
        let mut tickets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = tickets.iter().position(|ticket| ticket.hash == hash)?;
        let ticket = tickets.swap_remove(at);
        (ticket.expires_at_ms > now_ms).then_some(ticket.right)
    }
}

/// Why a ticket or a session could not be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TicketError {
    #[error("cannot open the console: this daemon serves no web console")]
    NoConsole,
    #[error("cannot open the console: {TICKETS_MAX} tickets wait to be used")]
    TooMany,
    #[error("cannot open the console with the role metrics: this role may not see machines")]
    Role,
    #[error("cannot open the console: the system gave no random numbers")]
    Random(#[source] std::io::Error),
    #[error("cannot open the console")]
    Db(#[from] DbError),
}

impl Explain for TicketError {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::NoConsole => ProblemKind::Conflict,
            Self::TooMany => ProblemKind::Unavailable,
            Self::Role => ProblemKind::Invalid,
            Self::Random(_) => ProblemKind::Failed,
            Self::Db(error) => error.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::NoConsole => Some("start it with 'headwater serve --console 127.0.0.1:9471'".to_owned()),
            Self::TooMany => Some("open one of the links, or wait a minute".to_owned()),
            Self::Role => Some("choose viewer, operator or admin".to_owned()),
            Self::Random(_) => None,
            Self::Db(error) => error.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db(error) => error.retry_after_s(),
            _ => None,
        }
    }
}

impl Service {
    /// Makes a ticket for the console. Returns its secret, and when it expires.
    pub(crate) fn make_ticket(&self, caller: &Caller, role: Role) -> Result<(String, u64), TicketError> {
        if role == Role::Metrics {
            return Err(TicketError::Role);
        }
        let right = SessionRight { principal: format!("console of {}", caller.principal), role };
        self.web().tickets.issue(right, token::SESSION_PREFIX, self.random(), self.now_ms())
    }

    /// Opens a session for a ticket. Returns the session's secret too.
    pub(super) async fn open_session(
        &self,
        right: SessionRight,
    ) -> Result<(String, SessionRecord), TicketError> {
        let secret = token::new_secret(self.random(), token::SESSION_PREFIX).map_err(TicketError::Random)?;
        let now_ms = self.now_ms();
        let session = SessionRecord {
            hash: hash_of(&secret),
            principal: right.principal,
            role: right.role,
            created_at_ms: now_ms,
            used_at_ms: now_ms,
        };
        let caller = Caller { principal: session.principal.clone(), role: session.role, scopes: None };
        let event = self.event(&caller, "daemon".to_owned(), "console opened", session.role.name());
        let mut repo = self.db().write().await?;
        let (oldest_ms, unused_ms) =
            (now_ms.saturating_sub(SESSION_MS), now_ms.saturating_sub(SESSION_IDLE_MS));
        repo.sessions().remove_ended(oldest_ms, unused_ms).await?;
        repo.sessions().add(&session).await?;
        repo.events().append(event).await?;
        repo.save().await?;
        Ok((secret, session))
    }

    /// The session with this secret, if it has not ended. Records that it is used.
    pub(super) async fn session(&self, secret: &str) -> Result<Option<SessionRecord>, DbError> {
        let hash = hash_of(secret);
        let Some(session) = self.db().read().await?.sessions().by_hash(&hash).await? else { return Ok(None) };
        let now_ms = self.now_ms();
        let unused_ms = now_ms.saturating_sub(session.used_at_ms);
        if unused_ms >= SESSION_IDLE_MS || now_ms.saturating_sub(session.created_at_ms) >= SESSION_MS {
            return Ok(None);
        }
        if unused_ms >= USED_EXACT_MS
            && let Err(error) = self.note_use(&hash, now_ms).await
        {
            // The request succeeds anyway; the session may end early.
            tracing::warn!(%error, "cannot record the use of a session of the console; it may end early");
        }
        Ok(Some(session))
    }

    async fn note_use(&self, hash: &str, now_ms: u64) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        repo.sessions().used(hash, now_ms).await?;
        repo.save().await
    }

    /// Ends a session, if there is one.
    pub(super) async fn close_session(&self, secret: &str) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        repo.sessions().remove(&hash_of(secret)).await?;
        repo.save().await
    }
}
