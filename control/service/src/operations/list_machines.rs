//! `GET /api/v1/machines`: all machines.

use axum::Json;
use axum::extract::State;
use headwater_api::{MachineList, Problem};

use crate::Service;
use crate::answer::Failure;

/// All machines with their state and counters, by name.
#[utoipa::path(
    get,
    path = "/api/v1/machines",
    security(("token" = ["viewer"])),
    tag = "machines",
    responses((status = 200, body = MachineList), (status = 500, description = "The database failed", body = Problem)),
)]
pub(super) async fn list_machines(State(service): State<Service>) -> Result<Json<MachineList>, Failure> {
    let records = service.db().read().await?.machines().list().await?;
    Ok(Json(MachineList { machines: service.views(records).await? }))
}
