//! `GET /api/v1/events`: who changed what, and when.

use axum::Json;
use axum::extract::State;
use headwater_api::{EventList, MAX_EVENTS, Problem, ProblemKind};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::extract::Parameters;

/// How many are given to who does not say.
const DEFAULT_EVENTS: u32 = 100;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot give {0} events in one answer: the most are {MAX_EVENTS}")]
    TooMany(u32),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Invalid
    }

    fn advice(&self) -> Option<String> {
        Some("ask for the others with before=ID, the id of the last one of the answer before".into())
    }
}

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Only those of one subject, for instance `machine web-1` or `image debian`.
    subject: Option<String>,
    /// Only those older than the event with this id: the next page, with the id of the last event of a page.
    before: Option<i64>,
    /// At most so many; 100 where absent, and no more than 1000.
    limit: Option<u32>,
}

/// The newest events, or the newest of those before one, newest first.
#[utoipa::path(
    get,
    path = "/api/v1/events",
    tag = "daemon",
    params(Query),
    responses((status = 200, body = EventList), (status = 400, body = Problem)),
)]
pub(super) async fn list_events(
    State(service): State<Service>,
    Parameters(wanted): Parameters<Query>,
) -> Result<Json<EventList>, Failure> {
    let limit = wanted.limit.unwrap_or(DEFAULT_EVENTS);
    if limit > MAX_EVENTS {
        return Err(Error::TooMany(limit).into());
    }
    let before = wanted.before.unwrap_or(i64::MAX);
    let mut repo = service.db().read().await?;
    Ok(Json(EventList { events: repo.events().older(wanted.subject.as_deref(), before, limit).await? }))
}
