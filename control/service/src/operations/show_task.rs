//! `GET /api/v1/tasks/{task}` and `/follow`: one task, and its progress until its end.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use headwater_api::{Problem, ProblemKind, Task, TaskEvent};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::Name;
use crate::tasks;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("'{0}' is not the number of a task")]
    NoNumber(String),
    #[error("there is no task {0}")]
    Unknown(i64),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::NoNumber(_) => ProblemKind::Invalid,
            Self::Unknown(_) => ProblemKind::NotFound,
        }
    }

    fn advice(&self) -> Option<String> {
        Some("'headwater task list' shows the numbers".to_owned())
    }
}

/// The number in a path.
pub(super) fn number(text: String) -> Result<i64, Error> {
    text.parse().map_err(|_| Error::NoNumber(text))
}

/// The task with a number, as a caller may see it.
pub(super) async fn task(service: &Service, id: i64, caller: &Caller) -> Result<Task, Failure> {
    let found = service.db().read().await?.tasks().by_id(id).await?;
    Ok(service.task_view(found.ok_or(Error::Unknown(id))?, caller))
}

/// One task.
#[utoipa::path(
    get,
    path = "/api/v1/tasks/{task}",
    security(("token" = ["viewer"])),
    tag = "tasks",
    params(("task" = i64, Path, description = "Its number")),
    responses((status = 200, body = Task), (status = 404, description = "No such task", body = Problem)),
)]
pub(super) async fn show_task(
    State(service): State<Service>,
    caller: Caller,
    Name(id): Name,
) -> Result<Json<Task>, Failure> {
    Ok(Json(task(&service, number(id)?, &caller).await?))
}

/// A task's progress until it ends, in the format of the answer to the request that began it: one JSON object per line.
#[utoipa::path(
    get,
    path = "/api/v1/tasks/{task}/follow",
    security(("token" = ["viewer"])),
    tag = "tasks",
    params(("task" = i64, Path, description = "Its number")),
    responses(
        (status = 200, body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 404, description = "No such task", body = Problem),
    ),
)]
pub(super) async fn follow_task(
    State(service): State<Service>,
    caller: Caller,
    Name(id): Name,
) -> Result<Response, Failure> {
    let id = number(id)?;
    if let Some(lines) = service.follow_task(id, caller.clone()).await {
        return Ok(lines);
    }
    Ok(tasks::ended_lines(task(&service, id, &caller).await?))
}
