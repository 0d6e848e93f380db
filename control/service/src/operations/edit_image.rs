//! `POST /api/v1/images/{image}/edit`: begin a maintenance session.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::{MaintenanceRequest, MaintenanceSession, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::promotions::named_image;

/// Begins a maintenance session: gives one machine a private disk over the newest version of an image. From its next start
/// on the machine boots
/// that disk, until the disk is sealed into a new version or discarded. A persistent disk of the machine is not used
/// meanwhile.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/edit",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`")),
    request_body = MaintenanceRequest,
    responses(
        (status = 201, body = MaintenanceSession),
        (status = 400, description = "The reference names a version or a channel", body = Problem),
        (status = 404, description = "No such image or machine", body = Problem),
        (status = 409, description = "The machine is on or about to be restarted, or has a maintenance session, or another machine edits the image", body = Problem),
    ),
)]
pub(super) async fn edit_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<MaintenanceRequest>,
) -> Result<(StatusCode, Json<MaintenanceSession>), Failure> {
    let image = named_image(&name).map_err(Failure)?;
    service.must_have_named_machine(&caller, &request.machine).await.map_err(Failure)?;
    let handle = service.clone();
    let work = async move { handle.edit_image(&image, &request.machine, &caller).await };
    let (disk, record) = service.to_the_end(work).await?;
    let warning = service.lacks_space(&service.view(record.clone())).await;
    Ok((StatusCode::CREATED, Json(MaintenanceSession { warning, ..super::session_view(disk, record.name) })))
}
