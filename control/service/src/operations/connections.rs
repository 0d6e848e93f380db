//! `/api/v1/connections`: connections to clouds.

use std::collections::HashMap;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::{
    CloudScheme, Connection, ConnectionAuth, ConnectionCheck, ConnectionList, CreateConnection,
    MAX_CLIENT_SECRET_BYTES, OneTimeSecret, Problem, ProblemKind, SetConnection, name,
};
use headwater_db::{ConnectionRecord, DbError, Repository, Secret, TaskRecord};
use serde::Deserialize;
use utoipa::IntoParams;
use uuid::Uuid;

use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::caller::Caller;
use crate::catalogs::CatalogError;
use crate::connections::NoConnection;
use crate::extract::{Body, Name, Parameters};
use crate::tasks::publish::task_using;

/// The services of the public cloud of Azure.
const AUTHORITY: &str = "https://login.microsoftonline.com";
const MANAGEMENT: &str = "https://management.azure.com";

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot add connection '{0}': a connection of that name exists")]
    Exists(String),
    #[error("cannot add connection '{name}': connection '{there}' has the same resource group")]
    SamePlace { name: String, there: String },
    #[error("cannot add connection '{0}': {1}")]
    Invalid(String, String),
    #[error("cannot change the client secret of connection '{0}': {1}")]
    BadSecret(String, &'static str),
    #[error("cannot change the client secret of connection '{0}': it has none, because its auth is '{1}'")]
    NoSecret(String, ConnectionAuth),
    #[error("cannot remove connection '{connection}': these versions are published with it: {}", .versions.join(", "))]
    HasVersions { connection: String, versions: Vec<String> },
    #[error("cannot remove connection '{connection}': machines of these catalogs are created with it: {}", .catalogs.join(", "))]
    HasCatalogs { connection: String, catalogs: Vec<String> },
    #[error("cannot remove connection '{connection}': task {task} ({kind} {subject}) has not ended")]
    InUse { connection: String, task: i64, kind: String, subject: String },
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    Unknown(#[from] NoConnection),
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Exists(_)
            | Self::SamePlace { .. }
            | Self::NoSecret(..)
            | Self::HasVersions { .. }
            | Self::HasCatalogs { .. }
            | Self::InUse { .. } => ProblemKind::Conflict,
            Self::Invalid(..) | Self::BadSecret(..) => ProblemKind::Invalid,
            Self::Catalog(source) => source.kind(),
            Self::Unknown(source) => source.kind(),
            Self::Db(source) => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Exists(name) => {
                Some(format!("'headwater connection remove {name}' first, or choose another name"))
            }
            Self::SamePlace { there, .. } => Some(format!(
                "use '{there}', whose client secret 'headwater connection set {there} --secret-file FILE' replaces; or add \
                 another resource group"
            )),
            Self::HasVersions { connection, .. } => Some(format!(
                "remove each version with 'headwater image unpublish IMAGE@NUMBER --connection {connection}'; if the cloud is \
                 gone, 'headwater connection remove {connection} --forget'"
            )),
            Self::HasCatalogs { connection, .. } => Some(format!(
                "remove each catalog with its machines: 'headwater catalog scale CATALOG 0 --force' and 'headwater catalog \
                 remove CATALOG'; if the cloud is gone, 'headwater connection remove {connection} --forget'"
            )),
            Self::InUse { task, .. } => Some(format!("run 'headwater task wait {task}', or cancel the task")),
            Self::NoSecret(name, _) => {
                Some(format!("'headwater connection remove {name}', and add it again with --auth secret"))
            }
            Self::Invalid(..) | Self::BadSecret(..) => None,
            Self::Catalog(source) => source.advice(),
            Self::Unknown(source) => source.advice(),
            Self::Db(source) => source.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Catalog(source) => source.retry_after_s(),
            Self::Db(source) => source.retry_after_s(),
            _ => None,
        }
    }
}

/// All connections, without their secrets.
#[utoipa::path(
    get,
    path = "/api/v1/connections",
    security(("token" = ["viewer", "everything"])),
    tag = "clouds",
    responses((status = 200, body = ConnectionList)),
)]
pub(super) async fn list_connections(
    State(service): State<Service>,
) -> Result<Json<ConnectionList>, Failure> {
    let records = service.db().read().await?.clouds().list().await?;
    let connections = records.into_iter().map(|record| record.connection).collect();
    Ok(Json(ConnectionList { connections }))
}

/// One connection, without its secret.
#[utoipa::path(
    get,
    path = "/api/v1/connections/{connection}",
    security(("token" = ["viewer", "everything"])),
    tag = "clouds",
    params(("connection" = String, Path, description = "Its name")),
    responses((status = 200, body = Connection), (status = 404, description = "No such connection", body = Problem)),
)]
pub(super) async fn show_connection(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<Connection>, Failure> {
    let records = service.db().read().await?.clouds().list().await?;
    let found = records.into_iter().find(|record| record.connection.name == name);
    let record = found.ok_or(NoConnection::Unknown(name))?;
    Ok(Json(record.connection))
}

/// Adds a connection. Its secret is encrypted in the database, and no answer contains it. Nothing is sent to the cloud: the
/// operation `check` tries the connection.
#[utoipa::path(
    post,
    path = "/api/v1/connections",
    security(("token" = ["admin", "everything"])),
    tag = "clouds",
    request_body = CreateConnection,
    responses(
        (status = 201, body = Connection),
        (status = 400, description = "A setting is not valid, or is missing", body = Problem),
        (status = 409, description = "There is a connection of that name, or to that resource group", body = Problem),
    ),
)]
pub(super) async fn create_connection(
    State(service): State<Service>,
    caller: Caller,
    Body(request): Body<CreateConnection>,
) -> Result<(StatusCode, Json<Connection>), Failure> {
    let named = request.name.clone();
    name::check_label("connection", &named)
        .map_err(|problem| Failure(problem.during("cannot add the connection")))?;
    let during = |problem: Problem| Failure(problem.during(format!("cannot add connection '{named}'")));
    let cloud = service.cloud().map_err(during)?;
    let record = record_of(request, &caller, service.now_ms(), cloud.owner())
        .map_err(|why| Error::Invalid(named.clone(), why.to_owned()))?;
    cloud.accept(&record).map_err(|error| during(problem(&error)))?;
    let handle = service.clone();
    let work = async move {
        let Connection { name, subscription, group, auth, .. } = &record.connection;
        let mut repo = handle.db().write().await?;
        let mut others = repo.clouds().list().await?.into_iter().map(|other| other.connection);
        if let Some(there) = others.find(|other| is_same_place(&record.connection, other)) {
            return Err(Error::SamePlace { name: name.clone(), there: there.name });
        }
        repo.clouds().add(&record).await.map_err(|error| match error {
            DbError::Taken { .. } => Error::Exists(name.clone()),
            error => error.into(),
        })?;
        let detail = format!("resource group {group} of subscription {subscription}, auth {auth}");
        let event = handle.event(&caller, format!("connection {name}"), "added", detail);
        repo.events().append(event).await?;
        repo.save().await?;
        Ok::<_, Error>(record.connection)
    };
    Ok((StatusCode::CREATED, Json(service.to_the_end(work).await?)))
}

/// Whether a connection of another name has the same resource group. Azure ignores the case. The gallery and the owner tag
/// are the same for all connections of this controller, so `unpublish` and `sweep` of one connection would remove versions of
/// the other.
fn is_same_place(added: &Connection, other: &Connection) -> bool {
    added.name != other.name
        && added.subscription.eq_ignore_ascii_case(&other.subscription)
        && added.group.eq_ignore_ascii_case(&other.group)
}

/// The record of a new connection, or why the request is not valid.
fn record_of(
    request: CreateConnection,
    caller: &Caller,
    created_at_ms: u64,
    owner: String,
) -> Result<ConnectionRecord, &'static str> {
    let CreateConnection {
        name,
        subscription,
        tenant,
        group,
        region,
        auth,
        client_id,
        secret,
        authority,
        management,
    } = request;
    let secret = match (auth, secret) {
        (ConnectionAuth::Secret, None) => return Err("a client secret is missing (--secret-file)"),
        (ConnectionAuth::Secret, Some(secret)) => Some(secret_of(secret)?),
        (ConnectionAuth::Identity | ConnectionAuth::Workload, Some(_)) => {
            return Err("a client secret (--secret-file) was given, but --auth is not 'secret'");
        }
        (ConnectionAuth::Identity | ConnectionAuth::Workload, None) => None,
    };
    if auth != ConnectionAuth::Identity && client_id.is_none() {
        return Err("the client ID of the application is missing (--client-id)");
    }
    let url = |given: Option<String>, default: &str| {
        given.map_or_else(|| default.to_owned(), |url| url.trim_end_matches('/').to_owned())
    };
    Ok(ConnectionRecord {
        connection: Connection {
            name,
            subscription,
            tenant,
            group,
            region,
            auth,
            client_id,
            authority: url(authority, AUTHORITY),
            management: url(management, MANAGEMENT),
            created_by: caller.principal.clone(),
            created_at_ms,
        },
        owner,
        secret,
    })
}

/// The client secret of a request, or why it is not valid.
fn secret_of(OneTimeSecret(text): OneTimeSecret) -> Result<Secret, &'static str> {
    match text.trim() {
        "" => Err("the client secret is empty"),
        text if text.len() > MAX_CLIENT_SECRET_BYTES => Err("the client secret is longer than 64 KiB"),
        text => Ok(Secret::new(text.to_owned())),
    }
}

/// Replaces the client secret of a connection. A task that uses the connection now may use the old secret until it ends.
/// Nothing is sent to the cloud: the operation `check` tries the connection.
#[utoipa::path(
    patch,
    path = "/api/v1/connections/{connection}",
    security(("token" = ["admin", "everything"])),
    tag = "clouds",
    params(("connection" = String, Path, description = "Its name")),
    request_body = SetConnection,
    responses(
        (status = 200, body = Connection),
        (status = 400, description = "The client secret is not valid", body = Problem),
        (status = 404, description = "No such connection", body = Problem),
        (status = 409, description = "It does not log in with a client secret", body = Problem),
    ),
)]
pub(super) async fn set_connection(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(SetConnection { secret }): Body<SetConnection>,
) -> Result<Json<Connection>, Failure> {
    let secret = secret_of(secret).map_err(|why| Error::BadSecret(name.clone(), why))?;
    let handle = service.clone();
    let work = async move {
        let mut repo = handle.db().write().await?;
        let all = repo.clouds().list().await?;
        let found = all.into_iter().map(|record| record.connection).find(|it| it.name == name);
        let Some(connection) = found else {
            return Err(Error::Unknown(NoConnection::Unknown(name)));
        };
        if connection.auth != ConnectionAuth::Secret {
            return Err(Error::NoSecret(name, connection.auth));
        }
        repo.clouds().set_secret(&name, &secret).await?;
        let event = handle.event(&caller, format!("connection {name}"), "set", "another client secret");
        repo.events().append(event).await?;
        repo.save().await?;
        Ok(connection)
    };
    Ok(Json(service.to_the_end(work).await?))
}

/// The query parameters of a removal.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Removal {
    /// Also remove its catalogs with their machines, and its published versions, from the database. Their resources in the
    /// cloud stay there.
    #[serde(default)]
    forget: bool,
}

/// Removes a connection, with its secret. Nothing is changed in the cloud.
#[utoipa::path(
    delete,
    path = "/api/v1/connections/{connection}",
    security(("token" = ["admin", "everything"])),
    tag = "clouds",
    params(("connection" = String, Path, description = "Its name"), Removal),
    responses(
        (status = 204),
        (status = 404, description = "No such connection", body = Problem),
        (status = 409, description = "Versions are published there, machines of a catalog are created there, or a task that uses it has not ended", body = Problem),
    ),
)]
pub(super) async fn remove_connection(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Parameters(Removal { forget }): Parameters<Removal>,
) -> Result<StatusCode, Failure> {
    let handle = service.clone();
    let work = async move {
        match forget {
            true => forget_all(&handle, &caller, &name).await,
            false => remove(&handle, &caller, &name).await,
        }
    };
    service.to_the_end(work).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn remove(service: &Service, caller: &Caller, name: &str) -> Result<(), Error> {
    let mut repo = service.db().write().await?;
    is_not_in_use(&mut *repo, name).await?;
    let catalogs = catalogs_of(&mut *repo, name).await?;
    if !catalogs.is_empty() {
        return Err(Error::HasCatalogs { connection: name.to_owned(), catalogs });
    }
    let published = repo.clouds().published().await?;
    let of_here = published.iter().filter(|published| published.connection == name);
    let versions: Vec<_> = of_here.map(|it| format!("{}@{}", it.image, it.version)).collect();
    if !versions.is_empty() {
        return Err(Error::HasVersions { connection: name.to_owned(), versions });
    }
    if !repo.clouds().remove(name).await? {
        return Err(NoConnection::Unknown(name.to_owned()).into());
    }
    repo.events().append(service.event(caller, format!("connection {name}"), "removed", "")).await?;
    repo.save().await?;
    Ok(())
}

/// Fails if a task that uses the connection has not ended.
async fn is_not_in_use(repo: &mut dyn Repository, name: &str) -> Result<(), Error> {
    let Some(task) = task_using(repo, name).await? else { return Ok(()) };
    let TaskRecord { id, kind, subject, .. } = task;
    Err(Error::InUse { connection: name.to_owned(), task: id, kind, subject })
}

/// The names of the catalogs whose machines are created with a connection.
async fn catalogs_of(repo: &mut dyn Repository, name: &str) -> Result<Vec<String>, DbError> {
    let of_connection = |cloud: &CloudScheme| cloud.connection == name;
    let catalogs = repo.catalogs().list().await?.into_iter();
    let catalogs = catalogs.filter(|catalog| catalog.cloud.as_ref().is_some_and(of_connection));
    Ok(catalogs.map(|catalog| catalog.name).collect())
}

/// Removes a connection with all that the database has of it. The cloud is not asked: it may be gone, or refuse the identity
/// for ever.
async fn forget_all(service: &Service, caller: &Caller, name: &str) -> Result<(), Error> {
    let mut repo = service.db().read().await?;
    let found = repo.clouds().list().await?.into_iter().find(|record| record.connection.name == name);
    let record = found.ok_or_else(|| NoConnection::Unknown(name.to_owned()))?;
    is_not_in_use(&mut *repo, name).await?;
    let catalogs = catalogs_of(&mut *repo, name).await?;
    drop(repo);
    for catalog in &catalogs {
        service.is_not_busy(catalog).await?;
    }
    // Ends the work in the cloud for each machine. None is begun as long as these are held.
    let mut turns: HashMap<Uuid, _> = HashMap::new();
    let (mut repo, machines) = loop {
        let mut repo = service.db().write().await?;
        let mut machines = repo.machines().of_clouds().await?;
        machines.retain(|machine| machine.connection.as_deref() == Some(name));
        let uuids = machines.iter().map(|machine| machine.uuid);
        let others: Vec<_> = uuids.filter(|uuid| !turns.contains_key(uuid)).collect();
        if others.is_empty() {
            break (repo, machines);
        }
        drop(repo);
        for uuid in others {
            turns.insert(uuid, service.lock_by_force(uuid).await);
        }
    };
    is_not_in_use(&mut *repo, name).await?;
    let removed = |subject: String| {
        let detail = format!("connection '{name}' was forgotten; its resources in the cloud stay there");
        service.event(caller, subject, "removed", detail)
    };
    for machine in &machines {
        repo.machines().remove(machine.uuid).await?;
        repo.events().append(removed(format!("machine {}", machine.name))).await?;
    }
    let catalogs = catalogs_of(&mut *repo, name).await?;
    for catalog in &catalogs {
        repo.catalogs().remove(catalog).await?;
        repo.runs().remove_of_catalog(catalog).await?;
        repo.events().append(removed(format!("catalog {catalog}"))).await?;
    }
    let published = repo.clouds().published().await?;
    for version in published.iter().filter(|it| it.connection == name) {
        repo.clouds().remove_published(version).await?;
    }
    repo.clouds().remove(name).await?;
    let Connection { group, subscription, .. } = &record.connection;
    let detail = format!(
        "with its catalogs, machines and published versions; what is left in resource group {group} of subscription \
         {subscription} has the mark of owner {}",
        record.owner
    );
    repo.events().append(service.event(caller, format!("connection {name}"), "forgotten", detail)).await?;
    repo.save().await?;
    service.roots_changed();
    for machine in &machines {
        service.forget_lock(machine.uuid);
    }
    Ok(())
}

/// Logs in to the cloud, reads the resource group, and lists the rights that the identity lacks there. Changes nothing.
#[utoipa::path(
    post,
    path = "/api/v1/connections/{connection}/check",
    security(("token" = ["admin", "everything"])),
    tag = "clouds",
    params(("connection" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = ConnectionCheck),
        (status = 404, description = "No such connection, or the resource group does not exist", body = Problem),
        (status = 503, description = "The cloud refuses the identity, or does not answer", body = Problem),
    ),
)]
pub(super) async fn check_connection(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<ConnectionCheck>, Failure> {
    let connection = service.connection(&name).await?;
    let checked = service.cloud().map_err(Failure)?.check(&connection).await;
    let during = |problem: Problem| Failure(problem.during(format!("connection '{name}' does not work")));
    checked.map(Json).map_err(|error| during(problem(&error)))
}
