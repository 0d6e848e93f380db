//! `/api/v1/published`, and `POST /api/v1/images/{image}/publish` and `/unpublish`: versions in the galleries of clouds.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use headwater_api::name::ImageRef;
use headwater_api::{Problem, PublishRequest, PublishedList, TaskEvent, UnpublishRequest};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::{Body, Name, Parameters};
use crate::tasks;

/// Publishes a version to the gallery of a connection, so that machines can be made of it there. The version is checked
/// first: it must be generalised and, unless `no_agent_check` is set, have a program that reports to the cloud. An
/// interrupted upload continues.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/publish",
    security(("token" = ["admin", "everything"])),
    tag = "clouds",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    request_body = PublishRequest,
    responses(
        (status = 200, description = "Progress, then the published version", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "The version cannot boot there, or the number of replicas is not possible", body = Problem),
        (status = 404, description = "No such image, version or connection", body = Problem),
        (status = 409, description = "Retired, not generalised, or published already with another content or number of replicas", body = Problem),
        (status = 503, description = "The cloud refuses the identity, or does not answer", body = Problem),
    ),
)]
pub(super) async fn publish_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<PublishRequest>,
) -> Result<Response, Failure> {
    tasks::begin_publish(&service, caller, &name, request).await
}

/// Removes a published version from the gallery of a connection, or what an interrupted publication left there. The
/// version here stays. The image definition and the gallery are removed with their last version.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/unpublish",
    security(("token" = ["admin", "everything"])),
    tag = "clouds",
    params(("image" = String, Path, description = "`IMAGE@NUMBER`")),
    request_body = UnpublishRequest,
    responses(
        (status = 200, description = "Progress, then the version that was removed", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "The reference is not `IMAGE@NUMBER`", body = Problem),
        (status = 404, description = "It is not published there", body = Problem),
        (status = 409, description = "A task publishes or removes it", body = Problem),
    ),
)]
pub(super) async fn unpublish_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(UnpublishRequest { connection }): Body<UnpublishRequest>,
) -> Result<Response, Failure> {
    tasks::begin_unpublish(&service, caller, &name, connection).await
}

/// The selection of published versions.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Selection {
    /// Only versions of this image.
    image: Option<String>,
}

/// The versions in the galleries of all connections, as the daemon knows them. The clouds are not asked.
#[utoipa::path(
    get,
    path = "/api/v1/published",
    security(("token" = ["viewer", "everything"])),
    tag = "clouds",
    params(Selection),
    responses((status = 200, body = PublishedList)),
)]
pub(super) async fn list_published(
    State(service): State<Service>,
    Parameters(Selection { image }): Parameters<Selection>,
) -> Result<Json<PublishedList>, Failure> {
    let mut published = service.db().read().await?.clouds().published().await?;
    if let Some(image) = image {
        let reference = ImageRef::parse(&image).map_err(Failure)?;
        published.retain(|row| row.image == reference.image);
    }
    Ok(Json(PublishedList { published }))
}
