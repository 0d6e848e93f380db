//! `POST /api/v1/machines`: a new machine.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::name::{self, ImageRef};
use headwater_api::{CreateMachine, Machine, MachineState, Problem, ProblemKind, Wanted};
use headwater_db::{DbError, MachineRecord};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::{BackendError, VmPlan};
use crate::extract::{Actor, Body};
use crate::identity::{self, IdentityError};
use crate::server::MAX_SOCKET_PATH_BYTES;

/// The longest name of a socket in a machine's directory, with its separator.
const MAX_SOCKET_NAME_BYTES: usize = "/console.sock".len();

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot create machine '{0}': there is one already")]
    Exists(String),
    #[error(
        "cannot create machine '{machine}': sockets in its directory {run_dir} would have paths of {len} bytes, and \
         a socket's path has at most {MAX_SOCKET_PATH_BYTES}"
    )]
    PathTooLong { machine: String, run_dir: String, len: usize },
    #[error("cannot create machine '{machine}'")]
    Backend {
        machine: String,
        #[source]
        source: BackendError,
    },
    #[error("cannot create machine '{machine}'")]
    Identity {
        machine: String,
        #[source]
        source: IdentityError,
    },
    #[error(transparent)]
    Db(DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Exists(_) => ProblemKind::Conflict,
            Self::PathTooLong { .. } => ProblemKind::Invalid,
            Self::Backend { source, .. } => source.kind(),
            Self::Identity { .. } => ProblemKind::Failed,
            Self::Db(e) => e.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::PathTooLong { .. } => {
                Some("use a shorter name or a data directory with a shorter path".to_owned())
            }
            Self::Backend { source, .. } => source.advice().map(str::to_owned),
            Self::Exists(_) | Self::Identity { .. } | Self::Db(_) => None,
        }
    }
}

/// Creates a machine with an identity of its own. It is not started.
#[utoipa::path(
    post,
    path = "/api/v1/machines",
    tag = "machines",
    request_body = CreateMachine,
    responses(
        (status = 201, body = Machine),
        (status = 400, description = "Odd name, or settings that this host cannot give", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
        (status = 409, description = "There is a machine of that name", body = Problem),
    ),
)]
pub(super) async fn create_machine(
    State(service): State<Service>,
    actor: Actor,
    Body(request): Body<CreateMachine>,
) -> Result<(StatusCode, Json<Machine>), Failure> {
    check(&service, &request).await?;
    let record = record(&service, request)?;
    let detail = format!("{}, {}", record.uuid, record.image);
    let event = service.event(&actor, format!("machine {}", record.name), "created", detail);
    let mut repo = service.db().write().await?;
    repo.machines().add(&record).await.map_err(|e| match e {
        DbError::Taken { .. } => Error::Exists(record.name.clone()),
        e => Error::Db(e),
    })?;
    // Again, now that no image can be removed until this is saved.
    resolve(&service, &record.name, &record.image).await?;
    repo.events().append(event).await?;
    repo.save().await?;
    tracing::info!(machine = %record.name, image = %record.image, actor = %actor.0, "created");
    Ok((StatusCode::CREATED, Json(service.view(record))))
}

async fn check(service: &Service, request: &CreateMachine) -> Result<(), Failure> {
    name::check_machine(&request.name).map_err(Failure)?;
    if let Some(host_name) = &request.host_name {
        name::check_machine(host_name).map_err(|problem| {
            Failure(problem.during(format!("'{}' is not a host name", host_name.escape_debug())))
        })?;
    }
    let run_dir = service.run_dir(&request.name);
    let len = run_dir.as_os_str().len() + MAX_SOCKET_NAME_BYTES;
    if len > MAX_SOCKET_PATH_BYTES {
        let (machine, run_dir) = (request.name.clone(), run_dir.display().to_string());
        return Err(Error::PathTooLong { machine, run_dir, len }.into());
    }
    let failed = |source| Error::Backend { machine: request.name.clone(), source };
    let plan = VmPlan {
        name: &request.name,
        memory_bytes: request.memory_bytes,
        cpus: request.cpus,
        host_name: host_name(request),
        user_data: request.user_data.as_deref(),
    };
    service.hypervisor().check(plan).await.map_err(failed)?;
    service.disks().check(&request.cache).await.map_err(failed)?;
    resolve(service, &request.name, &request.image).await
}

async fn resolve(service: &Service, machine: &str, image: &str) -> Result<(), Failure> {
    let reference = ImageRef::parse(image).map_err(Failure)?;
    let failed = |source| Error::Backend { machine: machine.to_owned(), source };
    service.images().resolve(&reference).await.map_err(failed)?;
    Ok(())
}

fn host_name(request: &CreateMachine) -> &str {
    request.host_name.as_ref().unwrap_or(&request.name)
}

fn record(service: &Service, request: CreateMachine) -> Result<MachineRecord, Error> {
    let new = identity::make(service.random(), host_name(&request), request.user_data.clone())
        .map_err(|source| Error::Identity { machine: request.name.clone(), source })?;
    Ok(MachineRecord {
        uuid: new.uuid,
        name: request.name,
        mac: new.mac,
        image: request.image,
        pin: None,
        cache: request.cache,
        transport: request.transport,
        memory_bytes: request.memory_bytes,
        cpus: request.cpus,
        identity: new.identity,
        ssh_host_key_private: new.ssh_host_key_private,
        wanted: Wanted::Stopped,
        state: MachineState::Created,
        reason: None,
        version: None,
        boot_ms: None,
        started_at_ms: None,
        created_at_ms: service.now_ms(),
    })
}
