//! `DELETE /api/v1/machines/{machine}/pin`: remove the pin of a machine.

use axum::Json;
use axum::extract::State;
use headwater_api::{Change, Machine, Problem};
use headwater_db::MachineRecord;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;
use crate::lifecycle::LifecycleError;

/// Removes a machine's pin: from its next boot on it boots the version to which its image resolves. A machine without a pin
/// stays as it is.
#[utoipa::path(
    delete,
    path = "/api/v1/machines/{machine}/pin",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses((status = 200, body = Machine), (status = 404, description = "No such machine", body = Problem)),
)]
pub(super) async fn unpin_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<Machine>, Failure> {
    let handle = service.clone();
    let record = service.to_the_end(async move { unpin(&handle, &caller, name).await }).await?;
    Ok(Json(service.changed_view(record).await))
}

async fn unpin(service: &Service, caller: &Caller, name: String) -> Result<MachineRecord, Failure> {
    let mut repo = service.db().write().await?;
    let found = repo.machines().by_name(&name).await?;
    let mut record = found.ok_or_else(|| LifecycleError::Unknown(name.clone()))?;
    if let Some(pin) = record.pin.take() {
        repo.machines().set_pin(record.uuid, None).await?;
        let event = service.event(caller, format!("machine {name}"), "unpinned", pin.clone());
        repo.events().append(event.changing(Change::of("pin", pin, None::<String>))).await?;
        repo.save().await?;
        service.roots_changed();
    }
    Ok(record)
}
