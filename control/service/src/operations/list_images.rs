//! `GET /api/v1/images`: all images.

use axum::Json;
use axum::extract::State;
use headwater_api::name::natural;
use headwater_api::{ImageList, Problem};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::backend::Listed;

/// All images with their versions, by name. Those whose list of versions cannot be read are left out, and told apart.
#[utoipa::path(
    get,
    path = "/api/v1/images",
    security(("token" = ["viewer"])),
    tag = "images",
    responses((status = 200, body = ImageList), (status = 500, description = "The store failed", body = Problem)),
)]
pub(super) async fn list_images(State(service): State<Service>) -> Result<Json<ImageList>, Failure> {
    let Listed { mut images, unreadable } = service.images().list().await?;
    images.sort_by(|a, b| natural(&a.name, &b.name));
    Ok(Json(ImageList { images, unreadable: unreadable.iter().map(problem).collect() }))
}
