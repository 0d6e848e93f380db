//! `POST /api/v1/images/{image}/trace/merge` and `/trace/save`: exchange boot traces with other hosts through files.

use std::path::PathBuf;

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{BootTrace, MergeTraceRequest, Problem, ProblemKind, SaveTraceRequest};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::{Body, Name};

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot use the file '{0}': it is not an absolute path")]
    Relative(String),
    #[error("cannot write the boot trace to '{0}': it exists already")]
    Exists(String),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Relative(_) => ProblemKind::Invalid,
            Self::Exists(_) => ProblemKind::Conflict,
        }
    }

    fn advice(&self) -> Option<String> {
        Some("name a file on the daemon's host, beginning with '/'".to_owned())
    }
}

fn absolute(text: String) -> Result<PathBuf, Error> {
    let path = PathBuf::from(&text);
    if path.is_absolute() { Ok(path) } else { Err(Error::Relative(text)) }
}

/// Merges a boot trace that was saved on another host into that of the version.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/trace/merge",
    security(("token" = ["admin", "everything"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    request_body = MergeTraceRequest,
    responses(
        (status = 200, description = "The merged boot trace", body = BootTrace),
        (status = 400, description = "Not an absolute path, or the trace of another version", body = Problem),
        (status = 404, description = "No such image, version or file", body = Problem),
        (status = 422, description = "The file is damaged, or not a boot trace", body = Problem),
    ),
)]
pub(super) async fn merge_trace(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<MergeTraceRequest>,
) -> Result<Json<BootTrace>, Failure> {
    let reference = ImageRef::parse(&name).map_err(Failure)?;
    let source = absolute(request.source)?;
    let handle = service.clone();
    let work = async move {
        let version = handle.images().resolve(&reference).await?;
        let merged = handle.images().merge_trace(&version, &source).await?;
        let detail = format!("version {}, from {}", version.number, source.display());
        handle.image_changed(&caller, &version.image, "boot trace merged", detail).await;
        Ok(Json(merged))
    };
    service.to_the_end(work).await
}

/// Writes a version's boot trace to a new file, which another host can merge.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/trace/save",
    security(("token" = ["admin", "everything"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    request_body = SaveTraceRequest,
    responses(
        (status = 200, body = BootTrace),
        (status = 400, description = "Not an absolute path", body = Problem),
        (status = 404, description = "No such image or version, or no boot of it was recorded", body = Problem),
        (status = 409, description = "The file exists", body = Problem),
    ),
)]
pub(super) async fn save_trace(
    State(service): State<Service>,
    Name(name): Name,
    Body(request): Body<SaveTraceRequest>,
) -> Result<Json<BootTrace>, Failure> {
    let reference = ImageRef::parse(&name).map_err(Failure)?;
    let target = absolute(request.target)?;
    // `tokio`, because the path may be on a file server that hangs.
    if tokio::fs::symlink_metadata(&target).await.is_ok() {
        return Err(Error::Exists(target.display().to_string()).into());
    }
    let version = service.images().resolve(&reference).await?;
    Ok(Json(service.images().save_trace(&version, &target).await?))
}
