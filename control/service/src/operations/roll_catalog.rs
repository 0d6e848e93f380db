//! `POST /api/v1/catalogs/{catalog}/roll`: move a catalog's machines to a version.

use axum::extract::State;
use axum::response::Response;
use headwater_api::{Problem, RollRequest, TaskEvent};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::cloud_catalogs::not_in_cloud;
use crate::extract::{Body, Name};
use crate::tasks;

/// Moves the machines of a catalog that are on to a version: first some canaries, and if these are healthy the others in
/// batches.
/// If too many fail, all are moved back to the version that they ran. Machines that are off boot the version when they are
/// started
/// after the roll.
#[utoipa::path(
    post,
    path = "/api/v1/catalogs/{catalog}/roll",
    security(("token" = ["operator"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    request_body = RollRequest,
    responses(
        (status = 200, body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "A version of another image, or a retired one", body = Problem),
        (status = 404, description = "No such catalog or version", body = Problem),
        (status = 409, description = "Its machines run that version, or another task changes it", body = Problem),
    ),
)]
pub(super) async fn roll_catalog(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<RollRequest>,
) -> Result<Response, Failure> {
    not_in_cloud(&service.catalog(&name).await?, "roll", "a roll")?;
    tasks::begin_roll(&service, caller, name, request).await
}
