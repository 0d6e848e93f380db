//! `GET /api/v1/openapi.json`: the description of all operations.

use axum::Json;

/// This description.
#[utoipa::path(
    get,
    path = "/api/v1/openapi.json",
    security(("token" = ["viewer", "scoped"])),
    tag = "daemon",
    responses((status = 200, description = "An OpenAPI document", body = Object)),
)]
pub(super) async fn get_openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(super::openapi())
}
