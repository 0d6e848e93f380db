//! `GET /api/v1/catalogs/{catalog}/advice`: how much RAM and disk the write caches of a catalog's machines need.

use axum::Json;
use axum::extract::State;
use headwater_api::{CatalogAdvice, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::extract::Name;

/// Advises RAM and disk for the write caches of a catalog's machines, from what they took in their runs on this host.
#[utoipa::path(
    get,
    path = "/api/v1/catalogs/{catalog}/advice",
    security(("token" = ["viewer"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = CatalogAdvice),
        (status = 404, description = "No such catalog", body = Problem),
    ),
)]
pub(super) async fn show_advice(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<CatalogAdvice>, Failure> {
    let record = service.catalog(&name).await?;
    Ok(Json(service.advice(&record).await?))
}
