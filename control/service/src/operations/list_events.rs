//! `GET /api/v1/events`: who changed what, and when.

use axum::Json;
use axum::extract::State;
use headwater_api::{EventList, Problem};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::Failure;
use crate::extract::Parameters;

/// How many events are given at most.
pub const MAX_EVENTS: u32 = 1000;

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    /// Only those of one subject, for instance `machine web-1` or `image debian`.
    subject: Option<String>,
    /// At most so many; 100 where absent, 1000 at most.
    limit: Option<u32>,
}

/// The newest events, newest first.
#[utoipa::path(
    get,
    path = "/api/v1/events",
    tag = "daemon",
    params(Wanted),
    responses((status = 200, body = EventList), (status = 400, body = Problem)),
)]
pub(super) async fn list_events(
    State(service): State<Service>,
    Parameters(wanted): Parameters<Wanted>,
) -> Result<Json<EventList>, Failure> {
    let limit = wanted.limit.unwrap_or(100).min(MAX_EVENTS);
    let mut repo = service.db().read().await?;
    Ok(Json(EventList { events: repo.events().newest(wanted.subject.as_deref(), limit).await? }))
}
