//! `DELETE /api/v1/images/{image}/edit`: discard a maintenance session.

use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::Problem;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;
use crate::promotions::named_image;

/// Discards the maintenance session of an image, with all changes on its private disk. From its next start on the machine
/// boots as before the session.
#[utoipa::path(
    delete,
    path = "/api/v1/images/{image}/edit",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`")),
    responses(
        (status = 204, description = "The session is discarded"),
        (status = 400, description = "The reference names a version or a channel", body = Problem),
        (status = 404, description = "The image has no maintenance session", body = Problem),
        (status = 409, description = "The machine is on, or a version of its disk is being made", body = Problem),
    ),
)]
pub(super) async fn discard_session(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<StatusCode, Failure> {
    let image = named_image(&name).map_err(Failure)?;
    let handle = service.clone();
    service.to_the_end(async move { handle.discard_session(&image, &caller).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
