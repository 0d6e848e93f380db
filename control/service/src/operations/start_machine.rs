//! `POST /api/v1/machines/{machine}/start`: switch a machine on.

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
    /// Record which requests it sends to its disk until it is off, in a new file in the directory `recordings` of the daemon's data
    /// directory: never what the requests carry.
    #[serde(default)]
    record: bool,
}

/// Starts a machine on a pristine disk of its image's version, or where its disk is kept on that; one that is on stays as it is. Returns when its VM runs: the guest boots afterwards.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/start",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name"), Query),
    responses(
        (status = 200, body = Machine),
        (status = 404, description = "No such machine, image or version", body = Problem),
        (status = 409, description = "It edits an image, or a version is being made of its disk; or it is on, and its requests were to be recorded", body = Problem),
        (status = 422, description = "Its version or its persistent disk is damaged, or files of that are gone", body = Problem),
        (status = 500, description = "It could not be started, or it is on and that could not be noted", body = Problem),
        (status = 503, description = "QEMU is not installed, or the daemon is stopping", body = Problem),
        (status = 507, description = "Not enough memory or disk, or no space to note it", body = Problem),
    ),
)]
pub(super) async fn start_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Parameters(how): Parameters<Query>,
) -> Result<Json<Machine>, Failure> {
    let start = async move |handle: Service| match how.record {
        true => handle.start_recorded(&name, &caller).await,
        false => handle.start(&name, &caller).await,
    };
    super::change_machine(service, start).await
}
