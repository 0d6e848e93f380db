//! `POST /api/v1/catalogs/{catalog}/scale`: give a catalog so many machines.

use axum::extract::State;
use axum::response::Response;
use headwater_api::{Problem, ScaleRequest, TaskEvent};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::tasks;

/// Makes machines by the catalog's rule for names, or removes some: first those that are off, with the highest numbers. Machines
/// that keep their disk, that edit an image or that are pinned are removed only with `force`.
#[utoipa::path(
    post,
    path = "/api/v1/catalogs/{catalog}/scale",
    security(("token" = ["operator"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    request_body = ScaleRequest,
    responses(
        (status = 200, body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "More machines than a catalog may have", body = Problem),
        (status = 404, description = "No such catalog", body = Problem),
        (status = 409, description = "Not enough machines may be removed, or another task changes it", body = Problem),
    ),
)]
pub(super) async fn scale_catalog(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<ScaleRequest>,
) -> Result<Response, Failure> {
    tasks::begin_scale(&service, caller, name, request).await
}
