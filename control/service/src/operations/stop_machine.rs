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

/// How.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// End it at once instead of asking the guest first.
    #[serde(default)]
    force: bool,
}

/// Asks the guest to switch itself off, ends it after 30 seconds, and forgets what it wrote, unless its disk is kept. Returns when it
/// is off; a machine that is off stays off.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/stop",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name"), Query),
    responses(
        (status = 200, body = Machine),
        (status = 404, description = "No such machine", body = Problem),
        (status = 500, description = "It could not be ended, or it is off and that could not be noted", body = Problem),
        (status = 507, description = "It is off, and there is no space to note that", body = Problem),
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
