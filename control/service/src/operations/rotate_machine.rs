//! `POST /api/v1/machines/{machine}/rotate`: give a machine a new SSH host key.

use axum::Json;
use axum::extract::State;
use headwater_api::{Machine, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;

/// Makes a new SSH host key for a machine that is off. Its guest gets the key at its next boot.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/rotate",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = Machine),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "It is on, has a persistent disk or a maintenance session, boots from the network or is on another host", body = Problem),
    ),
)]
pub(super) async fn rotate_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<Machine>, Failure> {
    super::change_machine(service, async move |handle| handle.rotate(&name, &caller).await).await
}
