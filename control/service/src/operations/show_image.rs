//! `GET /api/v1/images/{image}`: one image, or one version of it.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{Image, Problem, ProblemKind};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::extract::Name;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("there is no image '{0}'")]
    Unknown(String),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::NotFound
    }

    fn advice(&self) -> Option<String> {
        Some("'headwater image list' shows all images".to_owned())
    }
}

/// One image with all its versions, or with the one version that the reference names.
#[utoipa::path(
    get,
    path = "/api/v1/images/{image}",
    security(("token" = ["viewer"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    responses(
        (status = 200, body = Image),
        (status = 400, description = "Not a reference", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
    ),
)]
pub(super) async fn show_image(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<Image>, Failure> {
    let reference = ImageRef::parse(&name).map_err(Failure)?;
    let found = service.images().image(&reference.image).await?;
    let mut image = found.ok_or_else(|| Error::Unknown(reference.image.clone()))?;
    if reference.version.is_some() || reference.channel.is_some() {
        let wanted = service.images().resolve(&reference).await?;
        image.versions.retain(|version| version.number == wanted.number);
    }
    let mut repo = service.db().read().await?;
    let edit = repo.persistent_disks().session_of(&image.name).await?;
    if let Some(edit) = edit
        && let Some(machine) = repo.machines().by_uuid(edit.machine).await?
    {
        image.edit = Some(super::session_view(edit, machine.name));
    }
    Ok(Json(image))
}
