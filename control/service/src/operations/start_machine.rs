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

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Record the requests to the machine's disk until it is off, in a new file in the directory `recordings` of the
    /// daemon's data
    /// directory. The data of requests is never recorded.
    #[serde(default)]
    record: bool,
}

/// Starts a machine on a pristine disk of its image's version, or on its persistent disk. A machine that is on stays as it
/// is. Returns when its VM runs: the guest boots afterwards.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/start",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name"), Query),
    responses(
        (status = 200, body = Machine),
        (status = 404, description = "No such machine, image or version", body = Problem),
        (status = 409, description = "A version is being made of its disk, or its maintenance session was sealed before; or it is on, and a recording was requested", body = Problem),
        (status = 422, description = "Its version or its persistent disk is damaged, or files of that disk are missing", body = Problem),
        (status = 500, description = "It could not be started, or it is on but the database could not record that", body = Problem),
        (status = 503, description = "The daemon is stopping", body = Problem),
        (status = 507, description = "Not enough memory or disk, or no space for the database", body = Problem),
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
