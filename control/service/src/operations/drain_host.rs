//! `POST /api/v1/hosts/{host}/drain`: move the machines of a host to other hosts.

use axum::extract::State;
use axum::response::Response;
use headwater_api::{Problem, TaskEvent};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;
use crate::tasks;

/// Cordons a host and moves its machines of catalogs to hosts with free capacity: first those that are off, then those that are
/// on, which are stopped and restarted. Machines with a persistent disk, claimed machines and machines without a catalog stay,
/// each with its reason.
#[utoipa::path(
    post,
    path = "/api/v1/hosts/{host}/drain",
    security(("token" = ["admin", "everything"])),
    tag = "hosts",
    params(("host" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 404, description = "No such host", body = Problem),
        (status = 409, description = "Another task is draining the host, or is changing a catalog that has machines on this host", body = Problem),
    ),
)]
pub(super) async fn drain_host(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Response, Failure> {
    tasks::begin_drain(&service, caller, name).await
}
