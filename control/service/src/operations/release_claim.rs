//! `DELETE /api/v1/claims/{claim}`: end a claim.

use axum::Json;
use axum::extract::State;
use headwater_api::{Claim, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;

/// Ends a claim. Its machine is reset, or switched off if enough others are ready; then it can be claimed again.
#[utoipa::path(
    delete,
    path = "/api/v1/claims/{claim}",
    security(("token" = ["operator"])),
    tag = "claims",
    params(("claim" = String, Path, description = "Its id, or the name of its machine")),
    responses(
        (status = 200, body = Claim),
        (status = 404, description = "No such claim", body = Problem),
    ),
)]
pub(super) async fn release_claim(
    State(service): State<Service>,
    caller: Caller,
    Name(which): Name,
) -> Result<Json<Claim>, Failure> {
    let handle = service.clone();
    let ended = service.to_the_end(async move { handle.release(&caller, &which).await }).await?;
    Ok(Json(ended))
}
