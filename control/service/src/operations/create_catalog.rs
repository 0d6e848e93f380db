//! `POST /api/v1/catalogs`: a new catalog.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::name::{self, ImageRef, NameRule};
use headwater_api::platform::{Network, Platform};
use headwater_api::{Catalog, CreateCatalog, DEFAULT_STOP_IDLE_S, Problem, ProblemKind, check_seal_removes};
use headwater_db::{CatalogRecord, DbError, PoolRecord, SchemeRecord};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::{BackendError, VmPlan};
use crate::caller::Caller;
use crate::catalogs::check_on_host_loss;
use crate::claims::check_pool;
use crate::clock_hours;
use crate::cloud_catalogs;
use crate::extract::Body;
use crate::retention::{ReferenceKind, Referrer};
use crate::template;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot create catalog '{0}': a catalog of that name exists")]
    Exists(String),
    #[error(
        "cannot create catalog '{0}': a machine of that name exists, and 'image pin NAME' could mean either"
    )]
    IsMachine(String),
    #[error("cannot create catalog '{catalog}'")]
    Backend {
        catalog: String,
        #[source]
        source: BackendError,
    },
    #[error("cannot create catalog '{catalog}'")]
    Db {
        catalog: String,
        #[source]
        source: DbError,
    },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Exists(_) | Self::IsMachine(_) => ProblemKind::Conflict,
            Self::Backend { source, .. } => source.kind(),
            Self::Db { source, .. } => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Exists(_) | Self::IsMachine(_) => None,
            Self::Backend { source, .. } => source.advice().map(str::to_owned),
            Self::Db { source, .. } => source.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db { source, .. } => source.retry_after_s(),
            _ => None,
        }
    }
}

/// Creates a catalog: what its machines boot, and how they are made. It has no machines yet.
#[utoipa::path(
    post,
    path = "/api/v1/catalogs",
    security(("token" = ["admin", "scoped"])),
    tag = "catalogs",
    request_body = CreateCatalog,
    responses(
        (status = 201, body = Catalog),
        (status = 400, description = "The name is not valid, or the host cannot provide the settings", body = Problem),
        (status = 404, description = "No such image, version or connection", body = Problem),
        (status = 409, description = "A catalog or machine of that name exists, or the version is not published to the connection", body = Problem),
    ),
)]
pub(super) async fn create_catalog(
    State(service): State<Service>,
    caller: Caller,
    Body(request): Body<CreateCatalog>,
) -> Result<(StatusCode, Json<Catalog>), Failure> {
    caller.must_have_catalog(&request.name).map_err(Failure)?;
    caller.must_have_image(&request.image).map_err(Failure)?;
    if matches!(request.network, Network::Bridge(_)) || request.cloud.is_some() {
        caller.must_have_everything().map_err(Failure)?;
    }
    name::check_machine(&request.name)
        .map_err(|problem| Failure(problem.during("cannot create the catalog")))?;
    let CreateCatalog { firmware, secure_boot, tpm, display, ref network, scratch_bytes, .. } = request;
    let platform = Platform { firmware, secure_boot, tpm, display, network: network.clone(), scratch_bytes };
    let user_data = request.user_data.as_deref().map(template::sample).transpose();
    let user_data = user_data.map_err(|problem| Failure(problem.during("cannot create the catalog")))?;
    let plan = VmPlan {
        name: &request.name,
        memory_bytes: request.memory_bytes,
        cpus: request.cpus,
        platform: &platform,
        host_name: &request.name,
        user_data: user_data.as_deref(),
    };
    let failed = |source| Error::Backend { catalog: request.name.clone(), source };
    if let Some(cloud) = &request.cloud {
        cloud_catalogs::check_new(&service, &request, cloud).await?;
    } else {
        service.hypervisor().check(plan).await.map_err(failed)?;
        service.disks().check(&request.cache).await.map_err(failed)?;
    }
    let pool = pool_of(&request).map_err(|problem| Failure(problem.during("cannot create the catalog")))?;
    check_pool(&pool, &request.cache)?;
    let name_rule = request.name_rule.unwrap_or_else(|| format!("{}-##", request.name));
    NameRule::parse(&name_rule).map_err(|problem| Failure(problem.during("cannot create the catalog")))?;
    check_seal_removes(&request.seal_removes)
        .map_err(|problem| Failure(problem.during("cannot create the catalog")))?;
    check_on_host_loss(&request.name, request.on_host_loss, &request.cache)?;
    let record = CatalogRecord {
        seal_removes: request.seal_removes,
        on_host_loss: request.on_host_loss,
        cloud: request.cloud,
        name_rule,
        first_number: request.first_number,
        keep_ready: pool.keep_ready,
        ready_hours: pool.ready_hours,
        stop_idle_s: pool.stop_idle_s,
        name: request.name,
        image: request.image,
        pin: None,
        scheme: 1,
        cache: request.cache,
        transport: request.transport,
        memory_bytes: request.memory_bytes,
        cpus: request.cpus,
        platform,
        user_data: request.user_data,
        created_at_ms: service.now_ms(),
    };
    let handle = service.clone();
    let record = service.to_the_end(async move { create(&handle, &caller, record).await }).await?;
    Ok((StatusCode::CREATED, Json(service.changed_catalog_view(record).await)))
}

/// The number of machines that are kept ready, and when.
fn pool_of(request: &CreateCatalog) -> Result<PoolRecord, Problem> {
    let ready_hours = request.ready_hours.clone().map(clock_hours::with_zone).transpose()?;
    let usual = if ready_hours.is_some() { DEFAULT_STOP_IDLE_S } else { 0 };
    Ok(PoolRecord {
        catalog: request.name.clone(),
        keep_ready: request.keep_ready,
        ready_hours,
        stop_idle_s: request.stop_idle_s.unwrap_or(usual),
    })
}

async fn create(service: &Service, caller: &Caller, record: CatalogRecord) -> Result<CatalogRecord, Failure> {
    let _using = service.using_versions().await;
    let reference = ImageRef::parse(&record.image).map_err(Failure)?;
    let name = record.name.clone();
    let lacking = |source| Error::Backend { catalog: name.clone(), source };
    let version = service.images().resolve(&reference).await.map_err(lacking)?;
    let held =
        service.retain_named(Referrer::Catalog(&name), ReferenceKind::Image, &reference, &version).await;
    held.map_err(lacking)?;
    let failed = |source| Error::Db { catalog: name.clone(), source };
    let mut repo = service.db().write().await.map_err(failed)?;
    if repo.machines().by_name(&name).await.map_err(failed)?.is_some() {
        return Err(Error::IsMachine(name).into());
    }
    repo.catalogs().add(&record).await.map_err(|e| match e {
        DbError::Taken { .. } => Error::Exists(name.clone()),
        e => failed(e),
    })?;
    let scheme = SchemeRecord {
        catalog: name.clone(),
        version: record.scheme,
        settings: record.settings(),
        created_by: caller.principal.clone(),
        created_at_ms: record.created_at_ms,
    };
    repo.catalogs().add_scheme(&scheme).await.map_err(failed)?;
    let event = service.event(caller, format!("catalog {name}"), "created", record.image.clone());
    repo.events().append(event).await.map_err(failed)?;
    repo.save().await.map_err(failed)?;
    tracing::info!(catalog = %name, image = %record.image, caller = %caller.principal, "created");
    Ok(record)
}
