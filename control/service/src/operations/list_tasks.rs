//! `GET /api/v1/tasks`: running and ended tasks.

use axum::Json;
use axum::extract::State;
use headwater_api::{Filter, MAX_TASKS, Problem, ProblemKind, TaskList};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::Parameters;
use crate::operations::page;

/// The limit if the client gives none.
const DEFAULT_TASKS: u32 = 100;

#[derive(Debug, thiserror::Error)]
#[error("cannot list {0} tasks in one answer: the maximum is {MAX_TASKS}")]
struct TooMany(u32);

impl Explain for TooMany {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Invalid
    }

    fn advice(&self) -> Option<String> {
        Some(format!(
            "request at most {MAX_TASKS} (limit=), and then the next page with before=ID, where ID is the id of the last task received"
        ))
    }
}

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Only tasks that have not ended.
    #[serde(default)]
    unended: bool,
    /// Only tasks that match this filter, for instance `state:failed kind:roll`. A word alone is searched in the subject.
    #[serde(default)]
    filter: String,
    /// Only tasks with smaller numbers: the next page.
    before: Option<i64>,
    /// The maximum number of tasks in the answer; default 100, at most 1000.
    limit: Option<u32>,
}

/// The newest tasks, newest first. The daemon stores the newest 10,000. An answer has at most 200 KB: request pages with
/// `before` until one is empty.
#[utoipa::path(
    get,
    path = "/api/v1/tasks",
    security(("token" = ["viewer", "scoped"])),
    tag = "tasks",
    params(Query),
    responses((status = 200, body = TaskList), (status = 400, body = Problem)),
)]
pub(super) async fn list_tasks(
    State(service): State<Service>,
    caller: Caller,
    Parameters(wanted): Parameters<Query>,
) -> Result<Json<TaskList>, Failure> {
    let limit = wanted.limit.unwrap_or(DEFAULT_TASKS);
    if limit > MAX_TASKS {
        return Err(TooMany(limit).into());
    }
    let filter = Filter::parse_for_tasks(&wanted.filter).map_err(Failure)?.within(caller.scopes.as_ref());
    let before = wanted.before.unwrap_or(i64::MAX);
    let records = service.db().read().await?.tasks().page(&filter, wanted.unended, before, limit).await?;
    let mut tasks: Vec<_> = records.into_iter().map(|record| service.task_view(record, &caller)).collect();
    page::cut(&mut tasks);
    Ok(Json(TaskList { tasks }))
}
