//! `POST /api/v1/images/{image}/retire`: retire a version, or bring it back.

use axum::Json;
use axum::extract::State;
use headwater_api::{Change, ImageVersion, Problem, RetireRequest};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::promotions::named_version;

/// Retires a version: it does not count as the newest any more, and no channel can point to it. Machines that name it by
/// number still boot it. Nothing is removed.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/retire",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE@NUMBER` or `IMAGE@HASH`")),
    request_body = RetireRequest,
    responses(
        (status = 200, body = ImageVersion),
        (status = 400, description = "The reference names no version", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
        (status = 409, description = "A channel points to it, now or by schedule", body = Problem),
    ),
)]
pub(super) async fn retire_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<RetireRequest>,
) -> Result<Json<ImageVersion>, Failure> {
    let mut version = named_version(&service, &name).await.map_err(Failure)?;
    let handle = service.clone();
    let work = async move {
        let detail = format!("version {}, {}", version.number, version.hash);
        let (action, tried) =
            if request.retired { ("retired", "retirement tried") } else { ("brought back", "return tried") };
        let retired = handle.images().retire(&version, request.retired).await;
        handle.or_tried(&caller, &version.image, (tried, &detail), retired).await?;
        let change = Change::of("retired", version.retired, request.retired);
        handle.image_settings_changed(&caller, &version.image, action, detail, change).await;
        version.retired = request.retired;
        Ok(Json(version))
    };
    service.to_the_end(work).await
}
