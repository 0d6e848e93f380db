//! `POST /api/v1/images/{image}/export`: write a version to a file.

use std::path::PathBuf;

use axum::extract::State;
use axum::response::Response;
use headwater_api::name::ImageRef;
use headwater_api::{ExportRequest, Problem, ProblemKind, TaskEvent, TaskResult};

use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::tasks::{self, Work};

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot export to '{0}': it is not an absolute path")]
    Relative(String),
    #[error("cannot export to '{0}': that is the name of a directory")]
    Directory(String),
    #[error("cannot export to '{0}': a file of that name exists")]
    Exists(String),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Relative(_) | Self::Directory(_) => ProblemKind::Invalid,
            Self::Exists(_) => ProblemKind::Conflict,
        }
    }

    fn advice(&self) -> Option<String> {
        Some("name a new file on the daemon's host, beginning with '/'".to_owned())
    }
}

/// Writes a version to a new file, byte for byte the disk that was imported, with zeroes as holes. Formats other than raw
/// and qcow2 are written by qemu-img.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/export",
    security(("token" = ["admin", "everything"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    request_body = ExportRequest,
    responses(
        (status = 200, description = "Progress, then the size", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "Not an absolute path", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
        (status = 409, description = "The file exists", body = Problem),
        (status = 503, description = "The format needs qemu-img, which is not installed", body = Problem),
        (status = 507, description = "The target's disk is full", body = Problem),
    ),
)]
pub(super) async fn export_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<ExportRequest>,
) -> Result<Response, Failure> {
    let reference = ImageRef::parse(&name).map_err(Failure)?;
    let target = PathBuf::from(&request.target);
    if !target.is_absolute() {
        return Err(Error::Relative(request.target).into());
    }
    if request.target.ends_with('/') {
        return Err(Error::Directory(request.target).into());
    }
    // `tokio`, because the path may be on a file server that hangs.
    if tokio::fs::symlink_metadata(&target).await.is_ok() {
        return Err(Error::Exists(request.target).into());
    }
    let version = service.images().resolve(&reference).await?;
    let images = service.images().clone();
    let what = Work { kind: "export", subject: format!("image {name}"), caller: caller.clone() };
    let work = async move |control| {
        let written = images.export(&version, &target, request.format, control).await;
        let failed = |e| problem(&e).during(format!("cannot export '{name}' to '{}'", target.display()));
        written.map(|size_bytes| TaskResult::Exported { version, size_bytes }).map_err(failed)
    };
    Ok(tasks::run(&service, what, work).await)
}
