//! `GET /api/v1/machines`: a page of the machines that match a filter.
//!
//! The database filters, sorts and pages by the columns that it stores. Terms and orders that depend on present use (`ram`,
//! `disk`, `iops`, alarms,
//! `version:old`) are applied afterwards to the machines that the other terms leave. The same applies to states while a
//! host is lost.

use axum::Json;
use axum::extract::State;
use headwater_api::{Filter, HostState, Machine, MachineList, MachineSort, Position, Problem};
use headwater_db::DbError;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Parameters;
use crate::operations::page;

/// The most machines that are read for one answer. More do not fit into an answer.
const PAGE_MAX: u32 = 300;

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Only machines that match this filter, for instance `state:running catalog:class ram>80%`.
    #[serde(default)]
    filter: String,
    /// The order: the largest first, but names and states from a to z.
    #[serde(default)]
    sort: MachineSort,
    /// The maximum number of machines in the answer.
    limit: Option<u32>,
    /// The position after which the page begins: `next` of the previous answer. The orders `ram`, `disk`, `cache` and
    /// `iops` have no pages.
    after: Option<String>,
}

/// Machines with their state and counters, by name unless `sort` is given. An answer has at most 200 KB; `next` leads to
/// the next page.
#[utoipa::path(
    get,
    path = "/api/v1/machines",
    security(("token" = ["viewer", "scoped"])),
    tag = "machines",
    params(Query),
    responses(
        (status = 200, body = MachineList),
        (status = 400, description = "The filter or position is not valid", body = Problem),
        (status = 500, description = "The database failed", body = Problem),
        (status = 503, description = "The database cannot be used now", body = Problem),
    ),
)]
pub(super) async fn list_machines(
    State(service): State<Service>,
    caller: Caller,
    Parameters(wanted): Parameters<Query>,
) -> Result<Json<MachineList>, Failure> {
    let filter = Filter::parse(&wanted.filter).map_err(Failure)?;
    let own = Filter::default().within(caller.scopes.as_ref());
    let filter = filter.within(caller.scopes.as_ref());
    let sort = wanted.sort;
    let after =
        wanted.after.as_deref().map(|after| sort.read_position(after)).transpose().map_err(Failure)?;
    let limit = wanted.limit.unwrap_or(PAGE_MAX).min(PAGE_MAX);
    let is_of_shown_state =
        (filter.is_about_state() || sort == MachineSort::State) && is_a_host_lost(&service).await?;
    let (total, matching, mut machines) = if is_of_shown_state {
        live_page(&service, &own, &own, &filter, sort, after.as_ref()).await?
    } else if filter.live().is_empty() && !sort.is_live() {
        // One more than the limit shows whether there is a next page.
        stored_page(&service, &own, &filter, sort, after.as_ref(), limit + 1).await?
    } else {
        live_page(&service, &own, &filter.stored(), &filter.live(), sort, after.as_ref()).await?
    };
    let found = machines.len();
    machines.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
    page::cut(&mut machines);
    let last = machines.last().filter(|_| machines.len() < found);
    let next = last.and_then(|machine| sort.position(machine)).map(|position| position.to_string());
    Ok(Json(MachineList { total, matching, machines, next }))
}

/// A page of the machines that the database finds. `own` restricts them to those that the caller may see.
async fn stored_page(
    service: &Service,
    own: &Filter,
    filter: &Filter,
    sort: MachineSort,
    after: Option<&Position>,
    limit: u32,
) -> Result<(u64, u64, Vec<Machine>), DbError> {
    let mut repo = service.db().read().await?;
    let total = repo.machines().count(own).await?;
    let matching = if filter == own { total } else { repo.machines().count(filter).await? };
    let records = repo.machines().page(filter, sort, after, limit).await?;
    drop(repo);
    Ok((total, matching, service.views(records).await?))
}

/// Whether a host is lost: its machines are shown with another state than the stored one.
async fn is_a_host_lost(service: &Service) -> Result<bool, DbError> {
    let hosts = service.db().read().await?.hosts().list().await?;
    Ok(hosts.iter().any(|host| host.state == HostState::Lost))
}

/// All machines that match now, in order, after a position.
async fn live_page(
    service: &Service,
    own: &Filter,
    stored: &Filter,
    live: &Filter,
    sort: MachineSort,
    after: Option<&Position>,
) -> Result<(u64, u64, Vec<Machine>), DbError> {
    let mut repo = service.db().read().await?;
    let total = repo.machines().count(own).await?;
    let records = repo.machines().page(stored, MachineSort::Name, None, u32::MAX).await?;
    drop(repo);
    let mut machines = service.views(records).await?;
    machines.retain(|machine| live.matches(machine));
    let matching = u64::try_from(machines.len()).unwrap_or(u64::MAX);
    sort.sort(&mut machines);
    if let Some(after) = after {
        machines.retain(|machine| sort.position(machine).is_some_and(|position| position.is_after(after)));
    }
    Ok((total, matching, machines))
}
