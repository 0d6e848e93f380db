//! `GET /api/v1/catalogs`: all catalogs.

use axum::Json;
use axum::extract::State;
use headwater_api::{CatalogList, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;

/// All catalogs with their machines, by name.
#[utoipa::path(
    get,
    path = "/api/v1/catalogs",
    security(("token" = ["viewer", "scoped"])),
    tag = "catalogs",
    responses((status = 200, body = CatalogList), (status = 500, description = "The database failed", body = Problem)),
)]
pub(super) async fn list_catalogs(
    State(service): State<Service>,
    caller: Caller,
) -> Result<Json<CatalogList>, Failure> {
    let mut records = service.db().read().await?.catalogs().list().await?;
    records.retain(|catalog| caller.must_have_catalog(&catalog.name).is_ok());
    let mut catalogs = service.catalog_views(records).await?;
    if !caller.sees_user_data() {
        catalogs.iter_mut().for_each(|catalog| catalog.user_data = None);
    }
    Ok(Json(CatalogList { catalogs }))
}
