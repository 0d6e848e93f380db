//! `GET /api/v1/caller`: who asks.

use axum::Json;
use headwater_api::CallerInfo;

use crate::caller::Caller;

/// Who the daemon takes the caller for, and what they may do.
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
