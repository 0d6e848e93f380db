//! `POST /api/v1/catalogs/{catalog}/claims`: claim a machine.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::{Claim, ClaimRequest, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::cloud_catalogs::not_in_cloud;
use crate::extract::{Body, Name};

/// Claims a machine of a catalog that has booted and was not used since. Nobody else gets the machine until it was reset.
#[utoipa::path(
    post,
    path = "/api/v1/catalogs/{catalog}/claims",
    security(("token" = ["operator"])),
    tag = "claims",
    params(("catalog" = String, Path, description = "Its name")),
    request_body = ClaimRequest,
    responses(
        (status = 201, body = Claim),
        (status = 400, description = "The holder, the key, `ttl_s` or `wait_s` is not valid, or the catalog's machines have persistent disks or are in a cloud", body = Problem),
        (status = 404, description = "No such catalog", body = Problem),
        (status = 409, description = "No machine is ready, or the claim with this key has ended", body = Problem),
        (status = 503, description = "The daemon is stopping", body = Problem),
    ),
)]
pub(super) async fn claim_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(catalog): Name,
    Body(request): Body<ClaimRequest>,
) -> Result<(StatusCode, Json<Claim>), Failure> {
    not_in_cloud(&service.catalog(&catalog).await?, "claim a machine of", "a claim")?;
    Ok((StatusCode::CREATED, Json(service.claim(caller, catalog, request).await?)))
}
