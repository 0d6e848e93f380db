//! `GET /api/v1/images`: all images.

use axum::Json;
use axum::extract::State;
use headwater_api::{ImageList, Problem};

use crate::Service;
use crate::answer::Failure;

/// All images with their versions, by name.
#[utoipa::path(
    get,
    path = "/api/v1/images",
    tag = "images",
    responses((status = 200, body = ImageList), (status = 500, description = "The store failed", body = Problem)),
)]
pub(super) async fn list_images(State(service): State<Service>) -> Result<Json<ImageList>, Failure> {
    Ok(Json(ImageList { images: service.images().list().await? }))
}
