//! `POST /api/v1/catalogs`: a new catalog.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::name::{self, ImageRef};
use headwater_api::{Catalog, CreateCatalog, Problem, ProblemKind};
use headwater_db::{CatalogRecord, DbError};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::VmPlan;
use crate::extract::{Actor, Body};
use crate::holds::{Namer, Place};

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot create catalog '{0}': there is one already")]
    Exists(String),
    #[error("cannot create catalog '{0}': there is a machine of that name, and a pin must mean one of them")]
    IsMachine(String),
    #[error(transparent)]
    Db(DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Exists(_) | Self::IsMachine(_) => ProblemKind::Conflict,
            Self::Db(e) => e.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Exists(_) | Self::IsMachine(_) => None,
            Self::Db(e) => e.advice(),
        }
    }
}

/// Creates a catalog: what its machines boot, and how each is made. It has no machines yet.
#[utoipa::path(
    post,
    path = "/api/v1/catalogs",
    tag = "catalogs",
    request_body = CreateCatalog,
    responses(
        (status = 201, body = Catalog),
        (status = 400, description = "Odd name, or settings that this host cannot give", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
        (status = 409, description = "There is a catalog or a machine of that name", body = Problem),
    ),
)]
pub(super) async fn create_catalog(
    State(service): State<Service>,
    actor: Actor,
    Body(request): Body<CreateCatalog>,
) -> Result<(StatusCode, Json<Catalog>), Failure> {
    name::check_machine(&request.name)
        .map_err(|problem| Failure(problem.during("cannot create the catalog")))?;
    let plan = VmPlan {
        name: &request.name,
        memory_bytes: request.memory_bytes,
        cpus: request.cpus,
        host_name: &request.name,
        user_data: request.user_data.as_deref(),
    };
    service.hypervisor().check(plan).await?;
    service.disks().check(&request.cache).await?;
    let record = CatalogRecord {
        name: request.name,
        image: request.image,
        pin: None,
        cache: request.cache,
        transport: request.transport,
        memory_bytes: request.memory_bytes,
        cpus: request.cpus,
        user_data: request.user_data,
        created_at_ms: service.now_ms(),
    };
    let handle = service.clone();
    let record = service.to_the_end(async move { create(&handle, &actor, record).await }).await?;
    Ok((StatusCode::CREATED, Json(service.changed_catalog_view(record).await)))
}

async fn create(service: &Service, actor: &Actor, record: CatalogRecord) -> Result<CatalogRecord, Failure> {
    let _using = service.using_versions().await;
    let reference = ImageRef::parse(&record.image).map_err(Failure)?;
    let version = service.images().resolve(&reference).await?;
    service.hold_named(Namer::Catalog(&record.name), Place::Image, &reference, &version).await?;
    let mut repo = service.db().write().await?;
    if repo.machines().by_name(&record.name).await?.is_some() {
        return Err(Error::IsMachine(record.name).into());
    }
    repo.catalogs().add(&record).await.map_err(|e| match e {
        DbError::Taken { .. } => Error::Exists(record.name.clone()),
        e => Error::Db(e),
    })?;
    let subject = format!("catalog {}", record.name);
    repo.events().append(service.event(actor, subject, "created", record.image.clone())).await?;
    repo.save().await?;
    tracing::info!(catalog = %record.name, image = %record.image, actor = %actor.0, "created");
    Ok(record)
}
