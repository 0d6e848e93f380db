//! `PUT /api/v1/machines/{machine}/pin`: have a machine boot one version, whatever the channels say.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{Change, Machine, PinRequest, Problem, ProblemKind};
use headwater_db::MachineRecord;

use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::lifecycle::LifecycleError;
use crate::promotions::named_version;
use crate::retention::{ReferenceKind, Referrer};

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot pin machine '{machine}' to '{version}': the machine boots image '{image}'")]
    OtherImage { machine: String, version: String, image: String },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Invalid
    }

    fn advice(&self) -> Option<String> {
        let Self::OtherImage { image, .. } = self;
        Some(format!("'headwater image versions {image}' shows the possible versions"))
    }
}

/// Pins a machine to a version of its image. It boots that version from its next boot on. While it is pinned, the version
/// is not removed.
#[utoipa::path(
    put,
    path = "/api/v1/machines/{machine}/pin",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    request_body = PinRequest,
    responses(
        (status = 200, body = Machine),
        (status = 400, description = "Not a version, or a version of another image", body = Problem),
        (status = 404, description = "No such machine, image or version", body = Problem),
    ),
)]
pub(super) async fn pin_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<PinRequest>,
) -> Result<Json<Machine>, Failure> {
    service.record(&name).await?;
    let handle = service.clone();
    let work = async move { pin(&handle, &caller, name, request).await };
    let record = service.to_the_end(work).await?;
    Ok(Json(service.changed_view(record).await))
}

async fn pin(
    service: &Service,
    caller: &Caller,
    name: String,
    request: PinRequest,
) -> Result<MachineRecord, Failure> {
    let _using = service.using_versions().await;
    let tried = || format!("cannot pin machine '{name}' to '{}'", request.version);
    let version = named_version(service, &request.version).await;
    let version = version.map_err(|e| Failure(e.during(tried())))?;
    let pinned = ImageRef::parse(&request.version).map_err(Failure)?;
    let held = service.retain_named(Referrer::Machine(&name), ReferenceKind::Pin, &pinned, &version).await;
    held.map_err(|e| Failure(problem(&e).during(tried())))?;
    let mut repo = service.db().write().await?;
    let found = repo.machines().by_name(&name).await?;
    let mut record = found.ok_or_else(|| LifecycleError::Unknown(name.clone()))?;
    let image = ImageRef::parse(&record.image).map_err(Failure)?.image;
    if image != version.image {
        return Err(Error::OtherImage { machine: name, version: request.version, image }.into());
    }
    let pin = format!("{}@{}", version.image, version.number);
    repo.machines().set_pin(record.uuid, Some(&pin)).await?;
    let event = service.event(caller, format!("machine {name}"), "pinned", pin.clone());
    repo.events().append(event.changing(Change::of("pin", record.pin, &*pin))).await?;
    repo.save().await?;
    service.boots_changed();
    record.pin = Some(pin);
    Ok(record)
}
