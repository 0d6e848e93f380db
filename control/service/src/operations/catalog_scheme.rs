//! `GET /api/v1/catalogs/{catalog}/scheme` and `POST .../scheme/revert`: the versions of a catalog's scheme. A *scheme* is the settings of
//! the catalog's machines; each change makes a new version.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::platform::Network;
use headwater_api::{
    Catalog, Change, Problem, ProblemKind, RevertScheme, SchemeList, SchemeSettings, SchemeVersion,
};
use headwater_db::{CatalogRecord, SchemeRecord};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::{BackendError, VmPlan};
use crate::caller::Caller;
use crate::catalogs::CatalogError;
use crate::claims::check_pool;
use crate::cloud_catalogs::{OTHER_SETTINGS, not_in_cloud};
use crate::extract::{Body, Name};
use crate::lifecycle::scheme::in_words;
use crate::operations::set_catalog::pool_as_it_is;
use crate::template;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot change the scheme of catalog '{catalog}'")]
    Backend {
        catalog: String,
        #[source]
        source: BackendError,
    },
    #[error("cannot change the scheme of catalog '{catalog}': {what} cannot be changed, because {why}")]
    Fixed { catalog: String, what: &'static str, why: &'static str },
    #[error("there is no version {version} of the scheme of catalog '{catalog}'")]
    Unknown { catalog: String, version: u32 },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Backend { source, .. } => source.kind(),
            Self::Fixed { .. } => ProblemKind::Invalid,
            Self::Unknown { .. } => ProblemKind::NotFound,
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Backend { source, .. } => source.advice().map(str::to_owned),
            Self::Fixed { .. } => Some("create another catalog with these settings".to_owned()),
            Self::Unknown { catalog, .. } => {
                Some(format!("'headwater catalog scheme list {catalog}' shows the versions"))
            }
        }
    }
}

/// The versions of the settings of a catalog's machines, with who made each and which machines have it. 100 versions are kept, and older ones
/// that a machine has.
#[utoipa::path(
    get,
    path = "/api/v1/catalogs/{catalog}/scheme",
    security(("token" = ["viewer"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    responses((status = 200, body = SchemeList), (status = 404, description = "No such catalog", body = Problem)),
)]
pub(super) async fn list_schemes(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<SchemeList>, Failure> {
    let mut repo = service.db().read().await?;
    let found = repo.catalogs().by_name(&name).await?;
    found.ok_or_else(|| CatalogError::Unknown(name.clone()))?;
    let schemes = repo.catalogs().schemes(&name).await?;
    let machines = repo.machines().of_catalog(&name).await?;
    drop(repo);
    let view = |scheme: SchemeRecord| {
        let SchemeRecord { version, mut settings, created_by, created_at_ms, catalog: _ } = scheme;
        if !caller.sees_user_data() {
            settings.user_data = None;
        }
        let theirs = machines.iter().filter(|machine| machine.scheme == Some(version));
        let machines = theirs.map(|machine| machine.name.clone()).collect();
        SchemeVersion { version, created_by, created_at_ms, settings, machines }
    };
    Ok(Json(SchemeList { versions: schemes.into_iter().map(view).collect() }))
}

/// Makes a new version with the settings of an earlier one. Machines take it when the controller next starts them.
#[utoipa::path(
    post,
    path = "/api/v1/catalogs/{catalog}/scheme/revert",
    security(("token" = ["admin"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    request_body = RevertScheme,
    responses(
        (status = 200, body = Catalog),
        (status = 400, description = "Settings that this host cannot give", body = Problem),
        (status = 404, description = "No such catalog or version", body = Problem),
        (status = 409, description = "A task changes its machines", body = Problem),
    ),
)]
pub(super) async fn revert_scheme(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<RevertScheme>,
) -> Result<Json<Catalog>, Failure> {
    let catalog = service.catalog(&name).await?;
    not_in_cloud(&catalog, "change", OTHER_SETTINGS)?;
    let schemes = service.db().read().await?.catalogs().schemes(&name).await?;
    let found = schemes.into_iter().find(|scheme| scheme.version == request.version);
    let Some(earlier) = found else {
        return Err(Error::Unknown { catalog: name, version: request.version }.into());
    };
    check(&service, &caller, &catalog, &earlier.settings).await?;
    let handle = service.clone();
    let change = move |_: &SchemeSettings| earlier.settings.clone();
    let what = format!("as version {}: ", request.version);
    let work = async move { set_scheme(&handle, &caller, name, change, &what).await };
    let record = service.to_the_end(work).await?;
    Ok(Json(service.changed_catalog_view(record).await))
}

/// Why persistent machines keep settings that their disks depend on.
const DISKS_STAY: &str = "its machines are persistent, and their disks depend on this setting";

/// The first changed setting that cannot be changed after the catalog was created, and the reason.
fn fixed(before: &SchemeSettings, after: &SchemeSettings) -> Option<(&'static str, &'static str)> {
    let is_persistent = before.cache.persistent;
    if is_persistent != after.cache.persistent {
        return Some(("whether write caches are persistent", "that is set when a catalog is created"));
    }
    let settings = [
        ("the cache mode", before.cache.mode != after.cache.mode),
        ("the firmware", before.firmware != after.firmware),
        ("Secure Boot", before.secure_boot != after.secure_boot),
        ("the TPM", before.tpm != after.tpm),
    ];
    let found = settings.into_iter().find(|(_, is_other)| is_persistent && *is_other);
    found.map(|(what, _)| (what, DISKS_STAY))
}

/// Refuses settings that this host cannot give, or that the machines of a catalog cannot take. Also refuses changes while a task changes
/// the catalog, and a bridge for a caller without full rights.
pub(super) async fn check(
    service: &Service,
    caller: &Caller,
    catalog: &CatalogRecord,
    settings: &SchemeSettings,
) -> Result<(), Failure> {
    let name = &catalog.name;
    service.is_not_busy(name).await?;
    let before = catalog.settings();
    if let Some((what, why)) = fixed(&before, settings) {
        return Err(Error::Fixed { catalog: name.clone(), what, why }.into());
    }
    if before.network != settings.network && matches!(settings.network, Network::Bridge(_)) {
        caller.must_have_everything().map_err(Failure)?;
    }
    let platform = settings.platform();
    // As the guest of some machine gets it.
    let user_data = settings.user_data.as_deref().map(template::sample).transpose();
    let user_data = user_data.map_err(|problem| {
        Failure(problem.during(format!("cannot change the scheme of catalog '{name}'")))
    })?;
    let plan = VmPlan {
        name,
        memory_bytes: settings.memory_bytes,
        cpus: settings.cpus,
        platform: &platform,
        host_name: name,
        user_data: user_data.as_deref(),
    };
    let failed = |source| Error::Backend { catalog: name.clone(), source };
    service.hypervisor().check(plan).await.map_err(failed)?;
    service.disks().check(&settings.cache).await.map_err(failed)?;
    check_pool(&pool_as_it_is(catalog), &settings.cache)?;
    if before.firmware != settings.firmware {
        let reference = catalog.pin.as_ref().unwrap_or(&catalog.image);
        let reference = ImageRef::parse(reference).map_err(Failure)?;
        let images = service.images();
        let version = images.resolve(&reference).await.map_err(failed)?;
        images.check_bootable(&version, settings.firmware).await.map_err(failed)?;
    }
    Ok(())
}

/// Makes a new version of a scheme, with its event. Settings that do not differ make none.
pub(super) async fn set_scheme(
    service: &Service,
    caller: &Caller,
    name: String,
    change: impl FnOnce(&SchemeSettings) -> SchemeSettings,
    what: &str,
) -> Result<CatalogRecord, Failure> {
    let mut repo = service.db().write().await?;
    let found = repo.catalogs().by_name(&name).await?;
    let mut record = found.ok_or_else(|| CatalogError::Unknown(name.clone()))?;
    let before = record.settings();
    let settings = change(&before);
    if settings == before {
        return Ok(record);
    }
    let version = record.scheme.saturating_add(1);
    let detail = format!("version {version}: {what}{}", in_words(&before.differences(&settings)));
    let scheme = SchemeRecord {
        catalog: name.clone(),
        version,
        settings: settings.clone(),
        created_by: caller.principal.clone(),
        created_at_ms: service.now_ms(),
    };
    repo.catalogs().add_scheme(&scheme).await?;
    let event = service.event(caller, format!("catalog {name}"), "scheme", detail);
    repo.events().append(event.changing(Change::between(&before, &settings))).await?;
    repo.save().await?;
    record.take_settings(settings, version);
    Ok(record)
}
