//! `PATCH /api/v1/machines/{machine}`: new limits of a machine's write cache, new memory and processors.

use axum::Json;
use axum::extract::State;
use headwater_api::{CacheMode, Machine, Problem, ProblemKind, SetMachine};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::{Body, Name};

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot change machine '{0}': nothing to change was given")]
    Nothing(String),
    #[error("cannot change machine '{machine}': its cache mode '{mode}' has no limit for {what}")]
    NoSuchLimit { machine: String, mode: CacheMode, what: &'static str },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Invalid
    }
}

/// Changes the limits of a machine's write cache: at once if the machine is on, and for its later starts. A write
/// cache that is above its new limit of memory shrinks as fast as its disk accepts spilled segments. If there is no space
/// now for a higher limit of disk,
/// the request fails if the machine is on, and the answer has a warning if it is off. Memory and processors of the guest
/// can be changed while the machine is off; a persistent disk stays.
#[utoipa::path(
    patch,
    path = "/api/v1/machines/{machine}",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    request_body = SetMachine,
    responses(
        (status = 200, body = Machine),
        (status = 400, description = "Limits that this host or its cache mode cannot have", body = Problem),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "The machine is on, and memory or processors were given", body = Problem),
        (status = 507, description = "The machine is on, and there is no space for the higher limit of disk", body = Problem),
    ),
)]
pub(super) async fn set_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(limits): Body<SetMachine>,
) -> Result<Json<Machine>, Failure> {
    check(&service, &name, limits).await?;
    let changed = super::change_machine(service.clone(), async move |handle| {
        handle.set_limits(&name, limits, &caller).await
    });
    let Json(mut machine) = changed.await?;
    machine.warning = service.lacks_space(&machine).await;
    Ok(Json(machine))
}

async fn check(service: &Service, name: &str, limits: SetMachine) -> Result<(), Failure> {
    if limits == SetMachine::default() {
        return Err(Error::Nothing(name.to_owned()).into());
    }
    let record = service.record(name).await?;
    let mode = service.cache_in_use(&record).await?.mode;
    let what = match (mode, limits.ram_bytes, limits.disk_bytes) {
        (CacheMode::Disk, Some(_), _) => "memory",
        (CacheMode::Ram, _, Some(_)) => "disk",
        _ => return Ok(()),
    };
    Err(Error::NoSuchLimit { machine: name.to_owned(), mode, what }.into())
}
