//! `POST /api/v1/images/{image}/seal`: seal a maintenance session.

use axum::extract::State;
use axum::response::Response;
use headwater_api::{Problem, SealRequest, TaskEvent, TaskResult};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::promotions::named_image;
use crate::tasks::{self, Work};

/// Makes a version of the private disk of an image's maintenance session, and ends the session. Only changed chunks are
/// read and stored. The
/// version is the newest of the image, to which the channel maintenance points. If other versions were made since the
/// session began, their changes would be missing,
/// so the seal fails unless `over_newer` is true. If the machine is on, its identity (SSH host key, machine-id, host name)
/// is removed in its guest, and
/// it is switched off. If a part of the identity is still on its disk, the seal fails unless `keep_identity` is true.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/seal",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`")),
    request_body = SealRequest,
    responses(
        (status = 200, description = "Progress, then the version", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "Nothing was changed", body = Problem),
        (status = 404, description = "The image has no maintenance session", body = Problem),
        (status = 409, description = "The machine is on, and its guest has not booted or could not remove the identity; its identity is on its disk; or the image has newer versions than the one that was edited", body = Problem),
        (status = 507, description = "The store's disk is full", body = Problem),
    ),
)]
pub(super) async fn seal_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<SealRequest>,
) -> Result<Response, Failure> {
    let image = named_image(&name).map_err(Failure)?;
    let handle = service.clone();
    let what = Work { kind: "seal", subject: format!("image {image}"), caller: caller.clone() };
    let work = async move |control| {
        let sealed = handle.seal_session(&image, request, &caller, control).await;
        sealed.map(|sealed| TaskResult::Sealed(Box::new(sealed))).map_err(|e| problem(&e))
    };
    Ok(tasks::run(&service, what, work).await)
}
