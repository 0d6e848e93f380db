//! `GET /api/v1/audit`: the audit, as lines whose hashes form a chain.

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use headwater_api::{MAX_EVENTS, Problem, audit};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::Failure;
use crate::extract::Parameters;

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Only events newer than the event with this id. For the next page, the id of the last event of a page.
    #[serde(default)]
    after: i64,
}

/// The events of the audit, oldest first, one JSON object a line: `{"chain":HASH,"event":EVENT}`. HASH is the SHA-256 of the HASH of the line
/// before, a line feed, and the text of EVENT. An answer has at most 1,000 lines: request pages until one is empty.
#[utoipa::path(
    get,
    path = "/api/v1/audit",
    security(("token" = ["viewer", "everything"])),
    tag = "daemon",
    params(Query),
    responses(
        (status = 200, description = "Lines", body = String, content_type = "application/x-ndjson"),
        (status = 400, body = Problem),
    ),
)]
pub(super) async fn list_audit(
    State(service): State<Service>,
    Parameters(Query { after }): Parameters<Query>,
) -> Result<Response, Failure> {
    let mut repo = service.db().read().await?;
    let events = repo.events().audit(after, MAX_EVENTS).await?;
    drop(repo);
    let lines = events.iter().map(|(event, hash)| audit::line(hash, &audit::text_of(event)) + "\n");
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], lines.collect::<String>()).into_response())
}
