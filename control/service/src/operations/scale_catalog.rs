//! `POST /api/v1/catalogs/{catalog}/scale`: change the number of machines of a catalog.

use axum::extract::State;
use axum::response::Response;
use headwater_api::{Problem, ScaleRequest, TaskEvent};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::tasks;

/// Creates machines with names by the catalog's pattern, or those of a list, or removes machines: first those that are off, with the highest
/// numbers. Claimed and pinned machines, and machines with a persistent disk, are removed only with `force`; machines with a
/// maintenance session always stay.
#[utoipa::path(
    post,
    path = "/api/v1/catalogs/{catalog}/scale",
    security(("token" = ["operator"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    request_body = ScaleRequest,
    responses(
        (status = 200, body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "More machines than a catalog may have, or a mistake in the list", body = Problem),
        (status = 404, description = "No such catalog", body = Problem),
        (status = 409, description = "Not enough machines may be removed, a name or address of the list is taken, or another task changes the catalog", body = Problem),
    ),
)]
pub(super) async fn scale_catalog(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<ScaleRequest>,
) -> Result<Response, Failure> {
    if request.machines.iter().any(|machine| machine.mac.is_some()) {
        // Network cards belong to the whole fleet.
        caller.must_have_everything().map_err(Failure)?;
    }
    tasks::begin_scale(&service, caller, name, request).await
}
