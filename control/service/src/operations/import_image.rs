//! `POST /api/v1/images`: make a version of a file or an NBD export.

use axum::extract::State;
use axum::response::Response;
use headwater_api::{ImportRequest, Problem, ProblemKind, SourceFormat, TaskEvent, TaskResult, name};

use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::ImportOrder;
use crate::caller::Caller;
use crate::extract::Body;
use crate::tasks::{self, Work};

/// The schemes of URIs of NBD servers, including those that are refused with a reason. Any other source must be an absolute
/// path, because
/// it would otherwise be relative to the daemon's working directory.
const NBD_SCHEMES: [&str; 6] = ["nbd:", "nbds:", "nbd+unix:", "nbds+unix:", "nbd+vsock:", "nbds+vsock:"];

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot import '{0}': the source is neither an absolute path nor an NBD URI")]
    Source(String),
    #[error("cannot import '{0}' as {format}: an NBD server serves the bytes of a disk, without a format", format = .1.name())]
    NoFile(String, SourceFormat),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Invalid
    }

    fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::Source(_) => {
                "write /path/to/disk.qcow2, nbd://127.0.0.1:10809/name or nbd+unix:///name?socket=/path"
            }
            Self::NoFile(..) => "leave the format out, and give it to the NBD server instead",
        };
        Some(advice.to_owned())
    }
}

/// Imports a disk as the next version of an image. If the newest version has the same bytes, no version is made.
#[utoipa::path(
    post,
    path = "/api/v1/images",
    security(("token" = ["admin", "everything"])),
    tag = "images",
    request_body = ImportRequest,
    responses(
        (status = 200, description = "Progress, then the version", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "The image name or source is not valid, or a format is given for a source that is not a file", body = Problem),
        (status = 404, description = "No such source", body = Problem),
        (status = 422, description = "The source is damaged or not a disk image", body = Problem),
        (status = 507, description = "The store's disk is full", body = Problem),
    ),
)]
pub(super) async fn import_image(
    State(service): State<Service>,
    caller: Caller,
    Body(request): Body<ImportRequest>,
) -> Result<Response, Failure> {
    name::check_image(&request.name).map_err(Failure)?;
    if !request.source.starts_with('/') && !NBD_SCHEMES.iter().any(|it| request.source.starts_with(it)) {
        return Err(Error::Source(request.source).into());
    }
    if let Some(format) = request.format.filter(|_| !request.source.starts_with('/')) {
        return Err(Error::NoFile(request.source, format).into());
    }
    let handle = service.clone();
    let what = Work { kind: "import", subject: format!("image {}", request.name), caller: caller.clone() };
    let work = async move |control| {
        let order = ImportOrder {
            name: request.name.clone(),
            source: request.source.clone(),
            format: request.format,
            backing: request.backing,
            source_name: request.source_name.clone(),
            source_id: request.source_id,
            sector_bytes: request.sector_bytes,
            note: request.note,
            author: caller.principal.clone(),
        };
        let called = request.source_name.unwrap_or(request.source);
        let failed = |e| problem(&e).during(format!("cannot import '{called}'"));
        let outcome = handle.images().import(order, control).await;
        let tried = ("import tried", called.as_str());
        let outcome = handle.or_tried(&caller, &request.name, tried, outcome).await.map_err(failed)?;
        let version = outcome.version;
        let mut edited_by = None;
        if outcome.created {
            handle.store_changed();
            let detail = format!("version {} of {}, {}", version.number, version.source, version.hash);
            let event = handle.event(&caller, format!("image {}", version.image), "imported", detail);
            handle.note(event).await;
            // The machine is only a remark: without it, the import does not fail, because the version was made.
            edited_by = handle.maintainer_of(&version.image).await.unwrap_or_else(|e| {
                tracing::error!(image = %version.image, "cannot determine the maintenance session of the image: {}", problem(&e));
                None
            });
        }
        let (created, damaged_chunks, remarks) = (outcome.created, outcome.damaged_chunks, outcome.remarks);
        Ok(TaskResult::Imported { version, created, damaged_chunks, remarks, edited_by })
    };
    Ok(tasks::run(&service, what, work).await)
}
