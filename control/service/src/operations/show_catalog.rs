//! `GET /api/v1/catalogs/{catalog}`: one catalog.

use axum::Json;
use axum::extract::State;
use headwater_api::{Catalog, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;

/// One catalog with its machines.
#[utoipa::path(
    get,
    path = "/api/v1/catalogs/{catalog}",
    security(("token" = ["viewer"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    responses((status = 200, body = Catalog), (status = 404, description = "No such catalog", body = Problem)),
)]
pub(super) async fn show_catalog(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<Catalog>, Failure> {
    let record = service.catalog(&name).await?;
    let mut catalog = service.catalog_view(record).await?;
    if !caller.sees_user_data() {
        catalog.user_data = None;
    }
    Ok(Json(catalog))
}
