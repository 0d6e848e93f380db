//! `POST /api/v1/images/{image}/diff`: compare two versions.

use axum::extract::State;
use axum::response::Response;
use headwater_api::name::ImageRef;
use headwater_api::{DiffRequest, Problem, TaskEvent, TaskResult};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::tasks::{self, Work};

/// Compares two versions: changed chunks and bytes, and changed files of ext2, ext3, ext4, FAT and NTFS file systems.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/diff",
    security(("token" = ["operator"])),
    tag = "images",
    params(("image" = String, Path, description = "The older version: `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    request_body = DiffRequest,
    responses(
        (status = 200, description = "Progress, then the report", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "The path or the request body does not name an image or version", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
    ),
)]
pub(super) async fn diff_images(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<DiffRequest>,
) -> Result<Response, Failure> {
    caller.must_have_image(&request.with).map_err(Failure)?;
    let from = ImageRef::parse(&name).map_err(Failure)?;
    let to = ImageRef::parse(&request.with).map_err(Failure)?;
    let from = service.images().resolve(&from).await?;
    let to = service.images().resolve(&to).await?;
    let images = service.images().clone();
    let what = Work { kind: "compare", subject: format!("image {name}"), caller: caller.clone() };
    let work = async move |control| {
        let failed = |e| problem(&e).during(format!("cannot compare '{name}' with '{}'", request.with));
        let report = images.diff(&from, &to, control).await.map_err(failed)?;
        Ok(TaskResult::Compared(Box::new(report)))
    };
    Ok(tasks::run(&service, what, work).await)
}
