//! `POST /api/v1/images/{image}/seal`: make a version of what was edited.

use axum::extract::State;
use axum::response::Response;
use headwater_api::{Problem, SealRequest, TaskEvent, TaskResult};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::promotions::named_image;
use crate::tasks::{self, Work};

/// Makes a version of what a machine did to an image, and ends the edit. Only what was changed is read and stored. The
/// version is the newest one, and so in the channel maintenance. Where versions came since the edit began, whose changes it would lack, it is
/// refused unless `over_newer` is true. If the machine is on, its identity (SSH host key, machine-id, host name) is removed in its guest, and
/// it is switched off. If something of that is on its disk then, the seal is refused unless `keep_identity` is true.
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
        (status = 404, description = "Nobody edits the image", body = Problem),
        (status = 409, description = "The machine is on and its guest is not up, or removes nothing; its identity is on its disk; or the image has newer versions than the one that was edited", body = Problem),
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
