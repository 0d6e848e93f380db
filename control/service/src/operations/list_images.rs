//! `GET /api/v1/images`: all images.

use axum::Json;
use axum::extract::State;
use headwater_api::name::natural;
use headwater_api::{ImageList, Problem};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::backend::Listed;
use crate::caller::Caller;

/// All images with their versions, by name. Images whose version lists cannot be read are in `unreadable` instead.
#[utoipa::path(
    get,
    path = "/api/v1/images",
    security(("token" = ["viewer", "scoped"])),
    tag = "images",
    responses((status = 200, body = ImageList), (status = 500, description = "The store failed", body = Problem)),
)]
pub(super) async fn list_images(
    State(service): State<Service>,
    caller: Caller,
) -> Result<Json<ImageList>, Failure> {
    let Listed { mut images, unreadable } = service.images().list().await?;
    images.retain(|image| caller.must_have_image(&image.name).is_ok());
    images.sort_by(|a, b| natural(&a.name, &b.name));
    // The errors name the images only in their text, so they cannot be filtered by scopes.
    let is_told = caller.scopes.is_none();
    let unreadable = unreadable.iter().filter(|_| is_told).map(problem).collect();
    Ok(Json(ImageList { images, unreadable }))
}
