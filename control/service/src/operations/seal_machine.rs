//! `POST /api/v1/machines/{machine}/seal`: make a version of a machine's disk while it runs.

use axum::extract::State;
use axum::response::Response;
use headwater_api::{Problem, SealRequest, TaskEvent, TaskResult};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::tasks::{self, Work};

/// Makes a version of a machine's disk as it is now, while the machine runs. Its guest's file systems are
/// frozen for a moment if the guest agent can do that. If the machine is off, the version is made of its persistent disk.
/// The version
/// is the newest of its image, to which the channel maintenance points. If the machine does not run the version that was
/// newest before, `newer` of
/// the answer names that version. A machine with a maintenance session is sealed only if `over_newer` is true. If the
/// machine's identity is on its disk: with the machine on, the version is marked as not
/// generalised (`keeps_identity`); with the machine off, the seal fails unless `keep_identity` is true.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/seal",
    security(("token" = ["admin"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    request_body = SealRequest,
    responses(
        (status = 200, description = "Progress, then the version", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "Nothing was changed", body = Problem),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "It is off and has no persistent disk, a version is being made of it, somebody reads its disk, it was stopped before that was frozen, or it edits an image that has newer versions", body = Problem),
        (status = 507, description = "The store's disk is full", body = Problem),
    ),
)]
pub(super) async fn seal_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<SealRequest>,
) -> Result<Response, Failure> {
    must_have_images(&service, &caller, &name).await?;
    let handle = service.clone();
    let what = Work { kind: "seal", subject: format!("machine {name}"), caller: caller.clone() };
    let work = async move |control| {
        let sealed = handle.seal_machine(&name, request, &caller, control).await;
        sealed.map(|sealed| TaskResult::Sealed(Box::new(sealed))).map_err(|e| problem(&e))
    };
    Ok(tasks::run(&service, what, work).await)
}

/// Fails unless a caller with scopes has the images of which a seal of a machine may make a version: those that the machine
/// boots, runs
/// or edits.
pub(crate) async fn must_have_images(service: &Service, caller: &Caller, name: &str) -> Result<(), Failure> {
    if caller.scopes.is_none() {
        return Ok(());
    }
    let record = service.record(name).await?;
    let disks = service.db().read().await?.persistent_disks().of_machine(record.uuid).await?;
    let images = disks.iter().map(|disk| disk.image.as_str()).chain(record.version.as_deref());
    for image in images.chain([record.image.as_str()]) {
        caller.must_have_image(image).map_err(Failure)?;
    }
    Ok(())
}
