//! `GET /api/v1/machines`: all machines, or those that match a filter.

use axum::Json;
use axum::extract::State;
use headwater_api::{Filter, MachineList, MachineSort, Problem};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::Failure;
use crate::extract::Parameters;

/// Which machines.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Only those that match, for instance `state:running catalog:class ram>80%`.
    #[serde(default)]
    filter: String,
    /// In this order; the largest first, but names and states from a to z.
    #[serde(default)]
    sort: MachineSort,
    /// At most so many.
    limit: Option<u32>,
}

/// Machines with their state and counters, by name unless `sort` says otherwise.
#[utoipa::path(
    get,
    path = "/api/v1/machines",
    security(("token" = ["viewer"])),
    tag = "machines",
    params(Query),
    responses(
        (status = 200, body = MachineList),
        (status = 400, description = "A filter that cannot be read", body = Problem),
        (status = 500, description = "The database failed", body = Problem),
    ),
)]
pub(super) async fn list_machines(
    State(service): State<Service>,
    Parameters(wanted): Parameters<Query>,
) -> Result<Json<MachineList>, Failure> {
    let filter = Filter::parse(&wanted.filter).map_err(Failure)?;
    let records = service.db().read().await?.machines().list().await?;
    let total = count(records.len());
    let mut machines = service.views(records).await?;
    machines.retain(|machine| filter.matches(machine));
    let matching = count(machines.len());
    wanted.sort.sort(&mut machines);
    if let Some(limit) = wanted.limit {
        machines.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    }
    Ok(Json(MachineList { total, matching, machines }))
}

fn count(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
