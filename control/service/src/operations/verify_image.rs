//! `POST /api/v1/images/{image}/verify`: read a version completely and compare it with its hashes.

use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use headwater_api::name::ImageRef;
use headwater_api::{Problem, ProblemKind, TaskEvent, TaskResult, VerifyRequest};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::backend::BackendError;
use crate::caller::Caller;
use crate::extract::{MaybeBody, Name};
use crate::operations::is_store;
use crate::tasks::{self, Work};

/// Reads every byte of a version, repairs damage of which another store has an intact copy, and lists the remaining damage
/// with the affected files, machines and
/// catalogs. Damage is a result, not a failed request.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/verify",
    security(("token" = ["operator"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    request_body(content = Option<VerifyRequest>, description = "Nothing: verify only"),
    responses(
        (status = 200, description = "Progress, then the report", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "Not a reference to an image or version, a rate of 0, or a directory to repair from that is not an absolute path", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
    ),
)]
pub(super) async fn verify_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    MaybeBody(request): MaybeBody<VerifyRequest>,
) -> Result<Response, Failure> {
    let request = request.unwrap_or_default();
    check(&name, &request).map_err(Failure)?;
    if !request.repair_from.is_empty() {
        // The daemon opens the directories and URLs with its own permissions.
        caller.must_have_everything().map_err(Failure)?;
    }
    let reference = ImageRef::parse(&name).map_err(Failure)?;
    let found = service.images().resolve(&reference).await;
    if found.as_ref().is_err_and(|e| e.kind() == ProblemKind::NotFound) {
        // Another daemon that uses the same bucket may have removed it.
        service.versions_removed(std::slice::from_ref(&name));
    }
    let version = found?;
    let (images, handle) = (service.images().clone(), service.clone());
    let what = Work { kind: "verify", subject: format!("image {name}"), caller };
    let work = async move |control| {
        let failed = |e: BackendError| problem(&e).during(format!("cannot verify '{name}'"));
        let began = Instant::now();
        let mut report = images.verify(&version, &request, control).await.map_err(failed)?;
        for holder in &report.versions {
            report.uses.extend(handle.users_of(holder).await.unwrap_or_else(|line| vec![line]));
        }
        handle.version_verified(&report, began).await;
        Ok(TaskResult::Verified(Box::new(report)))
    };
    Ok(tasks::run(&service, what, work).await)
}

fn check(name: &str, request: &VerifyRequest) -> Result<(), Problem> {
    let refused = |why: String, advice: &str| Err(Problem::new(ProblemKind::Invalid, why).advise(advice));
    if request.rate_bytes_s == Some(0) {
        let why = format!("cannot verify '{name}' at a rate of 0 bytes a second");
        return refused(why, "leave 'rate_bytes_s' out to read without a limit");
    }
    if let Some(store) = request.repair_from.iter().find(|store| !is_store(store)) {
        let why = format!("cannot repair '{name}' from '{store}': it is neither an absolute path nor a URL");
        return refused(
            why,
            "name a directory of the daemon's host, beginning with '/', s3://BUCKET/PREFIX or https://HOST",
        );
    }
    Ok(())
}
