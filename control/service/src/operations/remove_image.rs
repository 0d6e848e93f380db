//! `DELETE /api/v1/images/{image}`: remove an image, or one version of it.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{ImageVersion, Problem, ProblemKind, Removed};
use headwater_db::MachineRecord;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::extract::{Actor, Name};

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot remove '{what}': machine '{machine}' {how}")]
    InUse { what: String, machine: String, how: &'static str },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Conflict
    }

    fn advice(&self) -> Option<String> {
        let Self::InUse { machine, .. } = self;
        Some(format!("remove the machine first: 'headwater machine remove {machine}'"))
    }
}

/// Removes an image with all its versions, or one version. What a machine uses or refers to stays.
#[utoipa::path(
    delete,
    path = "/api/v1/images/{image}",
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    responses(
        (status = 200, body = Removed),
        (status = 404, description = "No such image or version", body = Problem),
        (status = 409, description = "A machine uses it", body = Problem),
    ),
)]
pub(super) async fn remove_image(
    State(service): State<Service>,
    actor: Actor,
    Name(name): Name,
) -> Result<Json<Removed>, Failure> {
    let mut reference = ImageRef::parse(&name).map_err(Failure)?;
    let version = service.images().resolve(&reference).await?;
    if reference.version.is_some() {
        // What the beginning of a hash means must not change between the check and the removal.
        reference.version = Some(version.number.to_string());
    }
    // Machines are added and started in write transactions, so none can begin to use it meanwhile.
    let mut repo = service.db().write().await?;
    for machine in repo.machines().list().await? {
        if let Some(how) = use_of(&service, &machine, &reference, &version).await {
            return Err(Error::InUse { what: name, machine: machine.name, how }.into());
        }
    }
    let removed = service.images().remove(&reference).await?;
    let event =
        service.event(&actor, format!("image {}", reference.image), "removed", removed.removed.join(", "));
    repo.events().append(event).await?;
    repo.save().await?;
    Ok(Json(removed))
}

/// How a machine uses what is to be removed, if it does.
async fn use_of(
    service: &Service,
    machine: &MachineRecord,
    reference: &ImageRef,
    version: &ImageVersion,
) -> Option<&'static str> {
    let theirs = ImageRef::parse(&machine.image).ok().filter(|theirs| theirs.image == reference.image)?;
    if reference.version.is_none() {
        return Some("boots it");
    }
    if service.active(machine.uuid).is_some_and(|active| active.version_hash == version.hash) {
        return Some("runs it");
    }
    let next = service.images().resolve(&theirs).await.ok()?;
    (next.number == version.number).then_some("boots it")
}
