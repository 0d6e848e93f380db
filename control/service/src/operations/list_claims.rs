//! `GET /api/v1/claims`: all claims.

use axum::Json;
use axum::extract::State;
use headwater_api::{ClaimList, Problem};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Parameters;

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Which {
    /// Only the claims of this catalog.
    catalog: Option<String>,
}

/// All claims, oldest first.
#[utoipa::path(
    get,
    path = "/api/v1/claims",
    security(("token" = ["viewer", "scoped"])),
    tag = "claims",
    params(Which),
    responses((status = 200, body = ClaimList), (status = 500, description = "The database failed", body = Problem)),
)]
pub(super) async fn list_claims(
    State(service): State<Service>,
    caller: Caller,
    Parameters(which): Parameters<Which>,
) -> Result<Json<ClaimList>, Failure> {
    let mut claims = service.claims(which.catalog.as_deref()).await?;
    claims.retain(|claim| caller.must_have_catalog(&claim.catalog).is_ok());
    Ok(Json(ClaimList { claims }))
}
