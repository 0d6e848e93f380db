//! `GET`, `DELETE /api/v1/images/{image}/trace`: show or remove the boot trace of a version.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{BootTrace, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;

/// Shows a version's boot trace: the chunks that its first boots read. Later boots prefetch them if the image is on another
/// host.
#[utoipa::path(
    get,
    path = "/api/v1/images/{image}/trace",
    security(("token" = ["viewer"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    responses(
        (status = 200, body = BootTrace),
        (status = 404, description = "No such image or version, or no boot of it was recorded", body = Problem),
    ),
)]
pub(super) async fn show_trace(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<BootTrace>, Failure> {
    let reference = ImageRef::parse(&name).map_err(Failure)?;
    let version = service.images().resolve(&reference).await?;
    Ok(Json(service.images().trace(&version).await?))
}

/// Removes a version's boot trace. Its next boots are recorded again.
#[utoipa::path(
    delete,
    path = "/api/v1/images/{image}/trace",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    responses(
        (status = 200, description = "The removed boot trace", body = BootTrace),
        (status = 404, description = "No such image or version, or no boot of it was recorded", body = Problem),
        (status = 409, description = "It is stored on servers that are read-only", body = Problem),
    ),
)]
pub(super) async fn remove_trace(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<BootTrace>, Failure> {
    let reference = ImageRef::parse(&name).map_err(Failure)?;
    let handle = service.clone();
    let work = async move {
        let version = handle.images().resolve(&reference).await?;
        let removed = handle.images().remove_trace(&version).await?;
        let detail = format!("version {}, of {} boots", version.number, removed.boots);
        handle.image_changed(&caller, &version.image, "boot trace removed", detail).await;
        Ok(Json(removed))
    };
    service.to_the_end(work).await
}
