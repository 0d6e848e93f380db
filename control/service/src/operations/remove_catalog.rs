//! `DELETE /api/v1/catalogs/{catalog}`: remove a catalog.

use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::Problem;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::catalogs::CatalogError;
use crate::extract::Name;

/// Removes a catalog that has no machines.
#[utoipa::path(
    delete,
    path = "/api/v1/catalogs/{catalog}",
    security(("token" = ["admin"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    responses(
        (status = 204, description = "The catalog was removed"),
        (status = 404, description = "No such catalog", body = Problem),
        (status = 409, description = "It has machines", body = Problem),
    ),
)]
pub(super) async fn remove_catalog(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<StatusCode, Failure> {
    service.is_not_busy(&name).await?;
    let handle = service.clone();
    service.to_the_end(async move { remove(&handle, &caller, name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn remove(service: &Service, caller: &Caller, name: String) -> Result<(), Failure> {
    let mut repo = service.db().write().await?;
    if repo.catalogs().by_name(&name).await?.is_none() {
        return Err(CatalogError::Unknown(name).into());
    }
    let machines = repo.machines().list().await?;
    let theirs = machines.into_iter().filter(|machine| machine.catalog.as_deref() == Some(&name));
    let machines: Vec<String> = theirs.map(|machine| machine.name).collect();
    if !machines.is_empty() {
        return Err(CatalogError::InUse { catalog: name, machines }.into());
    }
    repo.catalogs().remove(&name).await?;
    repo.runs().remove_of_catalog(&name).await?;
    repo.events().append(service.event(caller, format!("catalog {name}"), "removed", "")).await?;
    repo.save().await?;
    service.roots_changed();
    Ok(())
}
