//! `POST /api/v1/machines/{machine}/reset`: give a machine its pristine disk.

use axum::Json;
use axum::extract::State;
use headwater_api::{Machine, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;

/// Discards what a machine wrote, even on a persistent disk. If the machine is on, it is switched off at once and
/// restarted.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/reset",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = Machine),
        (status = 404, description = "No such machine, image or version", body = Problem),
        (status = 409, description = "It has a maintenance session, or a version is being made of its disk", body = Problem),
        (status = 422, description = "Its version is damaged", body = Problem),
        (status = 500, description = "It could not be restarted, or the database could not record that it is on or off", body = Problem),
        (status = 503, description = "The daemon is stopping", body = Problem),
        (status = 507, description = "Not enough memory or disk, or no space to note it", body = Problem),
    ),
)]
pub(super) async fn reset_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<Machine>, Failure> {
    super::change_machine(service, async move |handle| handle.reset(&name, &caller).await).await
}
