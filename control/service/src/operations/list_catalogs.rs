//! `GET /api/v1/catalogs`: all catalogs.

use axum::Json;
use axum::extract::State;
use headwater_api::{CatalogList, Problem};

use crate::Service;
use crate::answer::Failure;

/// All catalogs with their machines, by name.
#[utoipa::path(
    get,
    path = "/api/v1/catalogs",
    tag = "catalogs",
    responses((status = 200, body = CatalogList), (status = 500, description = "The database failed", body = Problem)),
)]
pub(super) async fn list_catalogs(State(service): State<Service>) -> Result<Json<CatalogList>, Failure> {
    let records = service.db().read().await?.catalogs().list().await?;
    Ok(Json(CatalogList { catalogs: service.catalog_views(records).await? }))
}
