//! `GET /api/v1/caller`: the caller itself.

use axum::Json;
use headwater_api::CallerInfo;

use crate::caller::Caller;

/// The caller as the daemon identifies it, and its permissions.
#[utoipa::path(
    get,
    path = "/api/v1/caller",
    security(("token" = ["metrics", "scoped"])),
    tag = "access",
    responses((status = 200, body = CallerInfo)),
)]
pub(super) async fn show_caller(caller: Caller) -> Json<CallerInfo> {
    Json(CallerInfo { principal: caller.principal, role: caller.role, scopes: caller.scopes })
}
