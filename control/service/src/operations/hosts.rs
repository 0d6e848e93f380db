//! `/api/v1/hosts`: the computers that run machines.

use axum::Json;
use axum::extract::State;
use headwater_api::{Change, Host, HostList, HostState, Problem, ProblemKind, SetHost};
use headwater_db::{DbError, HostRecord, MachineRecord};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::{Body, Name, Parameters};

/// Added to the number of a node's connections when the node is accepted, because an old copy of the database may not
/// have counted them: more than a node ever makes.
const ACCEPTED_CONNECTIONS: u64 = 1 << 32;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("there is no host '{0}'")]
    Unknown(String),
    #[error(
        "cannot have host '{0}' accept the controller: it is the controller's own host, which has no node; name another \
         host ('headwater node list')"
    )]
    OwnAccepted(String),
    #[error("cannot remove host '{0}': it is the controller's own host")]
    Own(String),
    #[error("cannot remove host '{host}': it has {} machine(s): {}", .machines.len(), .machines.join(", "))]
    HasMachines { host: String, machines: Vec<String> },
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Unknown(_) => ProblemKind::NotFound,
            Self::Own(_) | Self::OwnAccepted(_) | Self::HasMachines { .. } => ProblemKind::Conflict,
            Self::Db(source) => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Unknown(_) => Some("'headwater node list' shows all hosts".to_owned()),
            Self::Own(_) | Self::OwnAccepted(_) => None,
            Self::HasMachines { .. } => Some(
                "remove the machines first; --force removes them only from the database, and leaves them on the \
                 host"
                    .to_owned(),
            ),
            Self::Db(source) => source.advice(),
        }
    }
}

/// All hosts.
#[utoipa::path(
    get,
    path = "/api/v1/hosts",
    security(("token" = ["viewer", "everything"])),
    tag = "hosts",
    responses((status = 200, body = HostList)),
)]
pub(super) async fn list_hosts(State(service): State<Service>) -> Result<Json<HostList>, Failure> {
    let mut repo = service.db().read().await?;
    let hosts = repo.hosts().list().await?;
    let machines = repo.machines().list().await?;
    Ok(Json(HostList { hosts: hosts.into_iter().map(|host| view(&service, host, &machines)).collect() }))
}

/// One host.
#[utoipa::path(
    get,
    path = "/api/v1/hosts/{host}",
    security(("token" = ["viewer", "everything"])),
    tag = "hosts",
    params(("host" = String, Path, description = "Its name")),
    responses((status = 200, body = Host), (status = 404, description = "No such host", body = Problem)),
)]
pub(super) async fn show_host(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<Host>, Failure> {
    Ok(Json(shown(&service, &name).await?))
}

/// Cordons a host, so that new machines go to other hosts, or uncordons it.
#[utoipa::path(
    patch,
    path = "/api/v1/hosts/{host}",
    security(("token" = ["admin", "everything"])),
    tag = "hosts",
    params(("host" = String, Path, description = "Its name")),
    request_body = SetHost,
    responses((status = 200, body = Host), (status = 404, description = "No such host", body = Problem)),
)]
pub(super) async fn set_host(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(SetHost { cordoned }): Body<SetHost>,
) -> Result<Json<Host>, Failure> {
    let (handle, named) = (service.clone(), name.clone());
    let set = service.to_the_end(async move {
        let mut repo = handle.db().write().await?;
        let hosts = repo.hosts().list().await?;
        let found = hosts.into_iter().find(|host| host.name == named);
        let mut host = found.ok_or_else(|| Error::Unknown(named.clone()))?;
        if host.cordoned != cordoned {
            host.cordoned = cordoned;
            repo.hosts().update(&host).await?;
            let action = if cordoned { "cordoned" } else { "uncordoned" };
            let event = handle.event(&caller, format!("host {named}"), action, "");
            repo.events().append(event.changing(Change::of("cordoned", !cordoned, cordoned))).await?;
            repo.save().await?;
        }
        Ok::<_, Error>(())
    });
    set.await?;
    Ok(Json(shown(&service, &name).await?))
}

/// Accepts the node of a host although the node has seen newer connections than the database here, which may be an old
/// copy.
#[utoipa::path(
    post,
    path = "/api/v1/hosts/{host}/accept",
    security(("token" = ["admin", "everything"])),
    tag = "hosts",
    params(("host" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = Host),
        (status = 404, description = "No such host", body = Problem),
        (status = 409, description = "It is the controller's own", body = Problem),
    ),
)]
pub(crate) async fn accept_host(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<Host>, Failure> {
    let (handle, named) = (service.clone(), name.clone());
    let accepted = service.to_the_end(async move {
        let mut repo = handle.db().write().await?;
        let found = repo.hosts().list().await?.into_iter().find(|host| host.name == named);
        let mut host = found.ok_or_else(|| Error::Unknown(named.clone()))?;
        if host.fingerprint.is_none() {
            return Err(Error::OwnAccepted(named));
        }
        host.generation = host.generation.saturating_add(ACCEPTED_CONNECTIONS);
        repo.hosts().update(&host).await?;
        let detail = "its node accepts the controller although the database may be an old copy";
        repo.events().append(handle.event(&caller, format!("host {named}"), "accepted", detail)).await?;
        repo.save().await?;
        Ok(())
    });
    accepted.await?;
    Ok(Json(shown(&service, &name).await?))
}

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Also remove its machines from the database. They stay as they are on the host.
    #[serde(default)]
    force: bool,
}

/// Removes a host from the fleet. Its certificate is not accepted any more.
#[utoipa::path(
    delete,
    path = "/api/v1/hosts/{host}",
    security(("token" = ["admin", "everything"])),
    tag = "hosts",
    params(("host" = String, Path, description = "Its name"), Query),
    responses(
        (status = 200, description = "The host was removed"),
        (status = 404, description = "No such host", body = Problem),
        (status = 409, description = "It has machines, or is the controller's own", body = Problem),
    ),
)]
pub(super) async fn remove_host(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Parameters(Query { force }): Parameters<Query>,
) -> Result<(), Failure> {
    let handle = service.clone();
    service.to_the_end(async move { remove(&handle, &caller, &name, force).await }).await?;
    Ok(())
}

async fn remove(service: &Service, caller: &Caller, name: &str, force: bool) -> Result<(), Error> {
    let mut repo = service.db().write().await?;
    let found = repo.hosts().list().await?.into_iter().find(|host| host.name == name);
    let host = found.ok_or_else(|| Error::Unknown(name.to_owned()))?;
    if host.id == service.own_host() {
        return Err(Error::Own(host.name));
    }
    let mut machines = repo.machines().list().await?;
    machines.retain(|machine| machine.host == host.id);
    if !machines.is_empty() && !force {
        let machines = machines.into_iter().map(|machine| machine.name).collect();
        return Err(Error::HasMachines { host: host.name, machines });
    }
    for machine in &machines {
        repo.machines().remove(machine.uuid).await?;
        let detail = format!("host '{name}' was removed by force; the machine stays there as it is");
        let event = service.event(caller, format!("machine {}", machine.name), "removed", detail);
        repo.events().append(event).await?;
    }
    repo.hosts().remove(host.id).await?;
    let detail = format!("{}, with {} machine(s)", host.id, machines.len());
    repo.events().append(service.event(caller, format!("host {name}"), "removed", detail)).await?;
    repo.save().await?;
    if let Some(link) = service.link(host.id) {
        link.ending.notify_one();
    }
    service.roots_changed();
    tracing::info!(host = name, caller = %caller.principal, "removed a host");
    Ok(())
}

async fn shown(service: &Service, name: &str) -> Result<Host, Error> {
    let mut repo = service.db().read().await?;
    let found = repo.hosts().list().await?.into_iter().find(|host| host.name == name);
    let host = found.ok_or_else(|| Error::Unknown(name.to_owned()))?;
    let machines = repo.machines().list().await?;
    Ok(view(service, host, &machines))
}

fn view(service: &Service, host: HostRecord, machines: &[MachineRecord]) -> Host {
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let its: Vec<_> = machines.iter().filter(|machine| machine.host == host.id).collect();
    let active = its.iter().filter(|machine| machine.state.is_active()).count();
    let own = host.id == service.own_host();
    let link = service.link(host.id);
    let now_ms = service.now_ms();
    let is_there = own || link.is_some();
    Host {
        own,
        state: if is_there { HostState::Up } else { host.state },
        cordoned: host.cordoned,
        machines: count(its.len()),
        machines_active: count(active),
        memory_bytes: host.memory_bytes,
        memory_free_bytes: u64::try_from(crate::fleet::free_memory(&host, machines).max(0)).unwrap_or(0),
        cpus: host.cpus,
        version: link.as_ref().map(|link| link.release.clone()),
        address: link.as_ref().map(|link| link.address.clone()),
        clock_ahead_ms: link.as_ref().map(|link| link.clock_ahead_ms),
        seen_at_ms: if is_there { Some(now_ms) } else { host.seen_at_ms },
        name: host.name,
        id: host.id,
        fingerprint: host.fingerprint,
        joined_at_ms: host.joined_at_ms,
    }
}
