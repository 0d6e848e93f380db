//! `PUT` and `DELETE /api/v1/catalogs/{catalog}/pin`: have the catalog's machines boot one version, whatever the channels
//! say.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{Catalog, Change, PinRequest, Problem};
use headwater_db::{CatalogRecord, Repository};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::caller::Caller;
use crate::catalogs::CatalogError;
use crate::extract::{Body, Name};
use crate::promotions::named_version;
use crate::retention::{ReferenceKind, Referrer};

/// Pins a catalog to a version of its image: from their next boot on its machines boot the version, except machines with a
/// pin of
/// their own. While it is pinned, the version is not removed.
#[utoipa::path(
    put,
    path = "/api/v1/catalogs/{catalog}/pin",
    security(("token" = ["admin"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    request_body = PinRequest,
    responses(
        (status = 200, body = Catalog),
        (status = 400, description = "Not a version, or a version of another image", body = Problem),
        (status = 404, description = "No such catalog, image or version", body = Problem),
    ),
)]
pub(super) async fn pin_catalog(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<PinRequest>,
) -> Result<Json<Catalog>, Failure> {
    service.is_not_busy(&name).await?;
    let handle = service.clone();
    let record = service.to_the_end(async move { pin(&handle, &caller, name, request).await }).await?;
    Ok(Json(service.changed_catalog_view(record).await))
}

async fn pin(
    service: &Service,
    caller: &Caller,
    name: String,
    request: PinRequest,
) -> Result<CatalogRecord, Failure> {
    let _using = service.using_versions().await;
    let tried = || format!("cannot pin catalog '{name}' to '{}'", request.version);
    let version = named_version(service, &request.version).await;
    let version = version.map_err(|e| Failure(e.during(tried())))?;
    let pinned = ImageRef::parse(&request.version).map_err(Failure)?;
    check_image(&service.catalog(&name).await?, &pinned, &request.version)?;
    let held = service.retain_named(Referrer::Catalog(&name), ReferenceKind::Pin, &pinned, &version).await;
    held.map_err(|e| Failure(problem(&e).during(tried())))?;
    let pin = format!("{}@{}", version.image, version.number);
    let mut repo = service.db().write().await?;
    let found = repo.catalogs().by_name(&name).await?;
    let record = found.ok_or(CatalogError::Unknown(name))?;
    // Check again: the catalog's image may have been changed while the store was asked.
    check_image(&record, &pinned, &request.version)?;
    set_pin(service, repo, caller, record, Some(pin)).await
}

/// Fails for a version of another image than that of the catalog.
fn check_image(record: &CatalogRecord, pinned: &ImageRef, version: &str) -> Result<(), Failure> {
    let image = ImageRef::parse(&record.image).map_err(Failure)?.image;
    if image == pinned.image {
        return Ok(());
    }
    let (catalog, version) = (record.name.clone(), version.to_owned());
    Err(CatalogError::OtherImage { catalog, version, image }.into())
}

/// Removes a catalog's pin: from their next boot on its machines boot the version to which its image resolves.
#[utoipa::path(
    delete,
    path = "/api/v1/catalogs/{catalog}/pin",
    security(("token" = ["admin"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    responses((status = 200, body = Catalog), (status = 404, description = "No such catalog", body = Problem)),
)]
pub(super) async fn unpin_catalog(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<Catalog>, Failure> {
    service.is_not_busy(&name).await?;
    let handle = service.clone();
    let record = service.to_the_end(async move { unpin(&handle, &caller, name).await }).await?;
    Ok(Json(service.changed_catalog_view(record).await))
}

async fn unpin(service: &Service, caller: &Caller, name: String) -> Result<CatalogRecord, Failure> {
    let mut repo = service.db().write().await?;
    let found = repo.catalogs().by_name(&name).await?;
    let record = found.ok_or(CatalogError::Unknown(name))?;
    let record = set_pin(service, repo, caller, record, None).await?;
    service.roots_changed();
    Ok(record)
}

async fn set_pin(
    service: &Service,
    mut repo: Box<dyn Repository>,
    caller: &Caller,
    mut record: CatalogRecord,
    pin: Option<String>,
) -> Result<CatalogRecord, Failure> {
    if record.pin != pin {
        let (action, detail) = match (&pin, &record.pin) {
            (Some(pin), _) => ("pinned", pin.clone()),
            (None, before) => ("unpinned", before.clone().unwrap_or_default()),
        };
        repo.catalogs().set_pin(&record.name, pin.as_deref()).await?;
        let subject = format!("catalog {}", record.name);
        let event = service.event(caller, subject, action, detail);
        repo.events().append(event.changing(Change::of("pin", record.pin, pin.clone()))).await?;
        repo.save().await?;
        record.pin = pin;
    }
    Ok(record)
}
