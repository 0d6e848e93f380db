//! `POST /api/v1/images/{image}/verify`: read all of a version and compare it with its hashes.

use axum::extract::State;
use axum::response::Response;
use headwater_api::name::ImageRef;
use headwater_api::{JobEvent, JobResult, Problem};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::extract::Name;
use crate::job;

/// Reads every byte of a version and names what is damaged. Damage is a result, not a failed request.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/verify",
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    responses(
        (status = 200, description = "Progress, then the report", body = JobEvent, content_type = "application/x-ndjson"),
        (status = 404, description = "No such image or version", body = Problem),
    ),
)]
pub(super) async fn verify_image(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Response, Failure> {
    let reference = ImageRef::parse(&name).map_err(Failure)?;
    let version = service.images().resolve(&reference).await?;
    let images = service.images().clone();
    let work = async move |control| {
        let report = images.verify(&version, control).await;
        report.map(JobResult::Verified).map_err(|e| problem(&e).during(format!("cannot verify '{name}'")))
    };
    Ok(job::run(&service, work).await)
}
