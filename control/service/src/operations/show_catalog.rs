//! `GET /api/v1/catalogs/{catalog}`: one catalog.

use axum::Json;
use axum::extract::State;
use headwater_api::{Catalog, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::extract::Name;

/// One catalog with its machines.
#[utoipa::path(
    get,
    path = "/api/v1/catalogs/{catalog}",
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    responses((status = 200, body = Catalog), (status = 404, description = "No such catalog", body = Problem)),
)]
pub(super) async fn show_catalog(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<Catalog>, Failure> {
    let record = service.catalog(&name).await?;
    Ok(Json(service.catalog_view(record).await?))
}
