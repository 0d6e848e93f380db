//! `/api/v1/published`, and `POST /api/v1/images/{image}/publish` and `/unpublish`: versions in the galleries of clouds.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use headwater_api::name::ImageRef;
use headwater_api::{
    Problem, ProblemKind, PublishRequest, PublishState, PublishedImage, PublishedList, TaskEvent, TaskResult,
    UnpublishRequest,
};
use headwater_db::DbError;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::TaskControl;
use crate::caller::Caller;
use crate::extract::{Body, Name, Parameters};
use crate::tasks::publish::{UNPUBLISH, busy, forget, store, unpublish_order, until_cancelled};
use crate::tasks::{self, Work};

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{version} is not published to '{connection}'")]
    NotPublished { version: String, connection: String },
    #[error("cannot unpublish '{0}': it does not name a version by its number")]
    NoNumber(String),
    #[error(
        "cannot unpublish {version} from '{connection}': task {task} is already publishing or removing it"
    )]
    Busy { version: String, connection: String, task: i64 },
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::NotPublished { .. } => ProblemKind::NotFound,
            Self::NoNumber(_) => ProblemKind::Invalid,
            Self::Busy { .. } => ProblemKind::Conflict,
            Self::Db(source) => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::NotPublished { .. } => Some("'headwater image published' shows all".to_owned()),
            Self::NoNumber(_) => Some("write IMAGE@NUMBER".to_owned()),
            Self::Busy { task, .. } => {
                Some(format!("run 'headwater task wait {task}', or cancel the task; then unpublish again"))
            }
            Self::Db(source) => source.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db(source) => source.retry_after_s(),
            _ => None,
        }
    }
}

/// Publishes a version to the gallery of a connection, so that machines can be made of it there. The version is checked
/// first: it must be generalised, and must have a program that reports to the cloud. An interrupted upload continues.
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

/// Removes a published version from the gallery of a connection, with what an incomplete publication has made. The
/// version here stays. The definition of the image and the gallery go with their last version.
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
    let (image, number) = number_of(&name)?;
    let version = format!("{image}@{number}");
    service.connection(&connection).await?;
    let cloud = service.cloud().map_err(Failure)?;
    let mut repo = service.db().read().await?;
    if let Some(task) = busy(&mut *repo, &version, &connection).await? {
        return Err(Error::Busy { version, connection, task }.into());
    }
    let all = repo.clouds().published().await?;
    drop(repo);
    let is_it =
        |row: &PublishedImage| row.connection == connection && row.image == image && row.version == number;
    let Some(mut published) = all.into_iter().find(is_it) else {
        return Err(Error::NotPublished { version, connection }.into());
    };
    published.state = PublishState::Removing;
    let what = Work { kind: UNPUBLISH, subject: format!("image {version}"), caller: caller.clone() };
    let handle = service.clone();
    let work = async move |control: Arc<TaskControl>| {
        let failed =
            |problem: Problem| problem.during(format!("cannot unpublish {version} from '{connection}'"));
        // Again: from now on the connection cannot be removed, because the task is stored.
        let record = handle.connection(&connection).await.map_err(|e| failed(problem(&e)))?;
        store(&handle, published.clone()).await.map_err(failed)?;
        let order = unpublish_order(&handle, record, published.clone()).await;
        let order = order.map_err(|e| failed(problem(&e)))?;
        let removing = cloud.unpublish(&order, Arc::clone(&control));
        let Some(removed) = until_cancelled(&control, removing).await else {
            let why = Problem::new(ProblemKind::Cancelled, "the removal was stopped");
            return Err(failed(why.advise("the same command continues")));
        };
        removed.map_err(|e| failed(problem(&e)))?;
        forget(&handle, &published).await.map_err(failed)?;
        let detail = format!("version {} from connection {connection}", published.version);
        handle.image_changed(&caller, &published.image, "unpublished", detail).await;
        Ok(TaskResult::Unpublished(Box::new(published)))
    };
    Ok(tasks::run(&service, what, work).await)
}

/// The image and the number of a reference. The version here may be gone, so its hash cannot be looked up.
fn number_of(name: &str) -> Result<(String, u64), Failure> {
    let reference = ImageRef::parse(name).map_err(Failure)?;
    let number = reference.version.as_ref().and_then(|version| version.parse().ok());
    let number = number.ok_or_else(|| Error::NoNumber(name.to_owned()))?;
    Ok((reference.image, number))
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
