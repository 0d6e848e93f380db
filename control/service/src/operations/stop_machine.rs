//! `POST /api/v1/machines/{machine}/stop`: switch a machine off.

use axum::Json;
use axum::extract::State;
use headwater_api::{Machine, Problem};
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
    /// End it at once instead of asking the guest to shut down.
    #[serde(default)]
    force: bool,
}

/// Asks the guest to shut down, ends the machine after 30 seconds if it has not, and discards its disk unless that is
/// persistent. Returns when the machine
/// is off. A machine that is off stays off.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/stop",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name"), Query),
    responses(
        (status = 200, body = Machine),
        (status = 404, description = "No such machine", body = Problem),
        (status = 500, description = "It could not be ended, or it is off but the database could not record that", body = Problem),
        (status = 507, description = "It is off, and there is no space to record that in the database", body = Problem),
    ),
)]
pub(super) async fn stop_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Parameters(how): Parameters<Query>,
) -> Result<Json<Machine>, Failure> {
    super::change_machine(service, async move |handle| handle.stop(&name, how.force, &caller).await).await
}
