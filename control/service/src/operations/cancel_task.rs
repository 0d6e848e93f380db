//! `POST /api/v1/tasks/{task}/cancel`: cancel a task.

use axum::Json;
use axum::extract::State;
use headwater_api::{Problem, ProblemKind, Task};

use super::show_task::{number, task};
use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::Name;

#[derive(Debug, thiserror::Error)]
#[error("cannot cancel task {id}: it is {state}")]
struct HasEnded {
    id: i64,
    state: &'static str,
}

impl Explain for HasEnded {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Conflict
    }
}

/// Requests the cancellation of a task, and answers at once. The task cleans up first: a roll moves its machines back to
/// the version that they ran.
#[utoipa::path(
    post,
    path = "/api/v1/tasks/{task}/cancel",
    security(("token" = ["operator"])),
    tag = "tasks",
    params(("task" = i64, Path, description = "Its number")),
    responses(
        (status = 200, body = Task),
        (status = 404, description = "No such task", body = Problem),
        (status = 409, description = "It has ended", body = Problem),
    ),
)]
pub(super) async fn cancel_task(
    State(service): State<Service>,
    caller: Caller,
    Name(id): Name,
) -> Result<Json<Task>, Failure> {
    let id = number(id)?;
    let before = task(&service, id, &caller).await?;
    let (handle, asking) = (service.clone(), caller.clone());
    let work = async move {
        let mut repo = handle.db().write().await?;
        if !repo.tasks().cancel(id).await? {
            return Err(Failure::from(HasEnded { id, state: before.state.name() }));
        }
        let event =
            handle.event(&caller, before.subject.clone(), "cancel", format!("task {id}, {}", before.kind));
        repo.events().append(event).await?;
        repo.save().await?;
        handle.cancel_live(id);
        Ok(())
    };
    service.to_the_end(work).await?;
    Ok(Json(task(&service, id, &asking).await?))
}
