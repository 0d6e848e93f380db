//! `DELETE /api/v1/images/{image}/edit`: give up what was edited.

use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::Problem;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;
use crate::promotions::named_image;

/// Forgets what a machine did to an image since the edit began. The machine boots as before from its next start on.
#[utoipa::path(
    delete,
    path = "/api/v1/images/{image}/edit",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`")),
    responses(
        (status = 204, description = "It is forgotten"),
        (status = 400, description = "A version or a channel is named, and no image", body = Problem),
        (status = 404, description = "Nobody edits the image", body = Problem),
        (status = 409, description = "The machine is on, or a version is being made", body = Problem),
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
