//! `DELETE /api/v1/machines/{machine}`: remove a machine.

use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::Problem;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::{Name, Parameters};

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Stop it first if it is on.
    #[serde(default)]
    force: bool,
}

/// Removes a machine that is off, with its identity, its disk and its console log. Its image stays.
#[utoipa::path(
    delete,
    path = "/api/v1/machines/{machine}",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name"), Query),
    responses(
        (status = 204, description = "The machine was removed"),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "It is on or about to be restarted, has a maintenance session, or a version is being made of its disk", body = Problem),
    ),
)]
pub(super) async fn remove_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Parameters(how): Parameters<Query>,
) -> Result<StatusCode, Failure> {
    let handle = service.clone();
    service.to_the_end(async move { handle.remove(&name, how.force, &caller).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
