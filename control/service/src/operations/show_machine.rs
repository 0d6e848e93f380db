//! `GET /api/v1/machines/{machine}`: one machine.

use axum::Json;
use axum::extract::State;
use headwater_api::{Machine, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;

/// One machine with its state and counters.
#[utoipa::path(
    get,
    path = "/api/v1/machines/{machine}",
    security(("token" = ["viewer"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses((status = 200, body = Machine), (status = 404, description = "No such machine", body = Problem)),
)]
pub(super) async fn show_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<Machine>, Failure> {
    let record = service.record(&name).await?;
    let personality = service.personality_of_guest(&record).await?;
    let mut machine = service.full_view(record).await?;
    machine.identity.personality = personality;
    if !caller.sees_user_data() {
        machine.identity.user_data = None;
    }
    Ok(Json(machine))
}
