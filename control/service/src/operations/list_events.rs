//! `GET /api/v1/events`: who changed what, and when.

use axum::Json;
use axum::extract::State;
use headwater_api::{EventList, Filter, MAX_EVENTS, Problem, ProblemKind};
use headwater_db::repository::EventWindow;
use serde::Deserialize;
use tokio::time::{Duration, Instant};
use utoipa::IntoParams;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::Parameters;
use crate::operations::page;

/// The limit if the client gives none.
const DEFAULT_EVENTS: u32 = 100;

/// The longest wait for an event, in seconds.
const WAIT_MAX_S: u64 = 60;

/// How often the history is read while a client waits.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot list {0} events in one answer: the maximum is {MAX_EVENTS}")]
    TooMany(u32),
    #[error("cannot list events with both 'before' and 'after'")]
    BothWays,
    #[error("cannot wait {0} s for events: waiting works without 'before', and for at most {WAIT_MAX_S} s")]
    Wait(u64),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Invalid
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::TooMany(_) => Some(format!(
                "request at most {MAX_EVENTS} (limit=), and then the next page with before=ID (after=ID, if the request had 'after'), where ID is the id of the last event received"
            )),
            Self::BothWays | Self::Wait(_) => None,
        }
    }
}

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Only the events of one subject, for instance `machine web-1` or `image debian`.
    subject: Option<String>,
    /// Only events that match this filter, for instance `action:created,removed -caller:daemon`. A word alone is searched
    /// in subject and detail.
    #[serde(default)]
    filter: String,
    /// Only events older than the event with this id. For the next page, the id of the last event of a page.
    before: Option<i64>,
    /// Only events newer than the event with this id, oldest first. A client that gives the id of the last event as the
    /// next `after` sees each event once.
    after: Option<i64>,
    /// With `after`: if there is no event, wait for one for this number of seconds, at most 60.
    wait_s: Option<u64>,
    /// The maximum number of events in the answer; default 100, at most 1000.
    limit: Option<u32>,
}

/// The newest events, newest first; with `before`, older ones; with `after`, newer ones, oldest first. An answer has at
/// most 200 KB: request
/// pages until one is empty.
#[utoipa::path(
    get,
    path = "/api/v1/events",
    security(("token" = ["viewer", "scoped"])),
    tag = "daemon",
    params(Query),
    responses((status = 200, body = EventList), (status = 400, body = Problem)),
)]
pub(super) async fn list_events(
    State(service): State<Service>,
    caller: Caller,
    Parameters(wanted): Parameters<Query>,
) -> Result<Json<EventList>, Failure> {
    let limit = wanted.limit.unwrap_or(DEFAULT_EVENTS);
    if limit > MAX_EVENTS {
        return Err(Error::TooMany(limit).into());
    }
    let filter = Filter::parse_for_events(&wanted.filter).map_err(Failure)?.within(caller.scopes.as_ref());
    let subject = wanted.subject.as_deref();
    let Some(after) = wanted.after else {
        if let Some(wait_s) = wanted.wait_s {
            return Err(Error::Wait(wait_s).into());
        }
        let before = wanted.before.unwrap_or(i64::MAX);
        let mut repo = service.db().read().await?;
        let window = EventWindow::Before(before);
        let mut events = repo.events().page(&filter, subject, window, limit).await?;
        page::cut(&mut events);
        return Ok(Json(EventList { events }));
    };
    if wanted.before.is_some() {
        return Err(Error::BothWays.into());
    }
    let wait_s = wanted.wait_s.unwrap_or(0);
    if wait_s > WAIT_MAX_S {
        return Err(Error::Wait(wait_s).into());
    }
    let end = Instant::now() + Duration::from_secs(wait_s);
    let mut looked_at = None;
    loop {
        let is_over = Instant::now() >= end || service.is_stopping();
        // Before the look: a later change is seen at the next one. While nothing has changed, the database is not asked.
        let revision = service.db().revision();
        if looked_at.replace(revision) != Some(revision) || is_over {
            let mut repo = service.db().read().await?;
            let mut events = repo.events().page(&filter, subject, EventWindow::After(after), limit).await?;
            drop(repo);
            page::cut(&mut events);
            if !events.is_empty() || is_over {
                return Ok(Json(EventList { events }));
            }
        }
        tokio::time::sleep_until(end.min(Instant::now() + POLL_INTERVAL)).await;
    }
}
