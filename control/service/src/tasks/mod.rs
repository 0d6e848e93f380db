//! Tasks: long operations that continue if their client disconnects.
//!
//! ```text
//!   handler --run()--> task in the background --ends--> row in the database
//!      |                  ^ cancel (POST /tasks/ID/cancel)      |
//!      +--NDJSON lines----+                                     +--> GET /tasks
//! ```
//!
//! A task has a row, unless the database cannot be written, because a check or a copy must work even on a full disk. Tasks
//! that change machines (`scale`, `roll`, `drain`), `publish` and `unpublish` store a plan in their row, and continue after a restart of the
//! daemon.
//! Other tasks (imports, seals and others, whose work is in `operations`) end with the daemon, and their row says so.

mod drain;
pub(crate) mod publish;
mod roll;
mod roll_ask;
mod roll_idle;
mod roll_plan;
mod roll_remote;
mod scale;
mod unpublish;

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use headwater_api::{Problem, ProblemKind, Progress, Task, TaskEvent, TaskResult, TaskState};
use headwater_db::{DbError, NewTask, Repository, TaskRecord};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::Service;
use crate::answer::{Failure, problem};
use crate::backend::TaskControl;
use crate::caller::Caller;

pub(crate) use self::drain::begin as begin_drain;
pub(crate) use self::publish::begin as begin_publish;
pub(crate) use self::roll::begin as begin_roll;
pub(crate) use self::scale::begin as begin_scale;
pub(crate) use self::unpublish::begin as begin_unpublish;

/// Whether a task changes the machines of a catalog now. A roll that waits for its window does not.
pub(crate) async fn is_changing(repo: &mut dyn Repository, catalog: &str) -> Result<bool, DbError> {
    let Some(id) = scale::changing(repo, catalog).await? else { return Ok(false) };
    let task = repo.tasks().by_id(id).await?.filter(|task| task.kind == roll::KIND);
    let plan = task.and_then(|task| stored::<roll_plan::Plan>(task.plan.as_deref()));
    Ok(plan.is_none_or(|plan| plan.waits_until_ms.is_none() || plan.back.is_some()))
}

/// The most concurrent tasks; further tasks wait. Tasks with a plan mostly wait for machines, and do not count.
pub const MAX_TASKS: usize = 4;

/// How often a progress line is sent.
pub const PROGRESS_INTERVAL_MS: u64 = 200;

/// An operation that ends within this time is answered like any other request, with its own HTTP status.
const PROMPT_MS: u64 = 100;

/// The pause before a failed write to the database is retried.
const RETRY: Duration = Duration::from_secs(1);

/// The header with a task's number.
const HEADER: HeaderName = HeaderName::from_static("headwater-task");

type Outcome = Result<TaskResult, Problem>;

/// The kind and subject of a task, and its caller.
pub(crate) struct Work {
    /// The kind: `import`, `roll`.
    pub(crate) kind: &'static str,
    /// The subject: `image debian`, `catalog class`.
    pub(crate) subject: String,
    /// The caller.
    pub(crate) caller: Caller,
}

/// A task that has not ended.
struct RunningTask {
    control: Arc<TaskControl>,
    end: watch::Receiver<Option<Outcome>>,
}

/// The tasks that have not ended, by number.
#[derive(Default)]
pub(crate) struct Tasks(Mutex<HashMap<i64, Arc<RunningTask>>>);

impl Tasks {
    fn map(&self) -> MutexGuard<'_, HashMap<i64, Arc<RunningTask>>> {
        // No statement leaves the map inconsistent, so a poisoned lock is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `work` as a task and answers with its progress.
pub(crate) async fn run<F, W>(service: &Service, what: Work, work: W) -> Response
where
    F: Future<Output = Outcome> + Send + 'static,
    W: FnOnce(Arc<TaskControl>) -> F,
{
    let control = Arc::new(TaskControl::new(service.stopping_flag()));
    let caller = what.caller.clone();
    let future = work(control.clone());
    let id = match service.add_task(&what, None).await {
        Ok(id) => Some(id),
        Err(error) => {
            tracing::warn!(
                kind = what.kind,
                subject = what.subject,
                "cannot write a task to the database, so 'task list' does not show it: {}",
                problem(&error)
            );
            None
        }
    };
    let slots = service.task_slots();
    let queued = service.queue_task();
    let (handle, waiting) = (service.clone(), control.clone());
    let turn = async move {
        let _slot = tokio::select! {
            slot = slots.acquire_owned() => slot.map_err(|_| not_begun())?,
            () = waiting.cancelled() => return Err(not_begun()),
        };
        drop(queued);
        waiting.begin();
        if waiting.is_cancelled() {
            return Err(not_begun());
        }
        if let Some(id) = id {
            handle.task_began(id).await;
        }
        future.await
    };
    let live = service.spawn_task(id, control, turn);
    answer(id, live, caller).await
}

/// The problem with which a task with a plan ends when the daemon stops.
fn stopped() -> Problem {
    Problem::new(ProblemKind::Cancelled, "the daemon is stopping; the task continues after its restart")
}

fn not_begun() -> Problem {
    Problem::new(ProblemKind::Cancelled, "the task was cancelled before it began, and has changed nothing")
}

/// The progress of a task, as lines for a caller. One that ended at once is answered with its outcome.
async fn answer(id: Option<i64>, live: Arc<RunningTask>, caller: Caller) -> Response {
    let mut end = live.end.clone();
    let prompt = tokio::time::timeout(Duration::from_millis(PROMPT_MS), ended(&mut end)).await;
    let mut response = match prompt {
        Ok(Err(problem)) => Failure(problem).into_response(),
        Ok(Ok(result)) => ndjson(Body::from(line(&TaskEvent::Done { result: caller.may_see(result) }))),
        Err(_) => ndjson(Body::from_stream(stream::unfold(Some((live, end, caller)), next_line))),
    };
    if let Some(value) = id.and_then(|id| HeaderValue::from_str(&id.to_string()).ok()) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

/// Waits for a task's end.
async fn ended(end: &mut watch::Receiver<Option<Outcome>>) -> Outcome {
    match end.wait_for(Option::is_some).await {
        Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(panicked())),
        Err(_) => Err(panicked()),
    }
}

fn panicked() -> Problem {
    Problem::new(
        ProblemKind::Failed,
        "the operation crashed: this is a bug in the daemon, whose log has the details",
    )
}

type Followed = (Arc<RunningTask>, watch::Receiver<Option<Outcome>>, Caller);

async fn next_line(followed: Option<Followed>) -> Option<(Result<Bytes, Infallible>, Option<Followed>)> {
    let (live, mut end, caller) = followed?;
    let interval = Duration::from_millis(PROGRESS_INTERVAL_MS);
    let event = match tokio::time::timeout(interval, ended(&mut end)).await {
        Err(_) if !live.control.has_begun() => TaskEvent::Waiting { running: MAX_TASKS as u64 },
        Err(_) => TaskEvent::Progress(live.control.progress()),
        Ok(Ok(result)) => {
            let result = caller.may_see(result);
            return Some((Ok(line(&TaskEvent::Done { result })), None));
        }
        Ok(Err(problem)) => return Some((Ok(line(&TaskEvent::Failed { problem })), None)),
    };
    Some((Ok(line(&event)), Some((live, end, caller))))
}

fn line(event: &TaskEvent) -> Bytes {
    let mut text = serde_json::to_string(event).unwrap_or_default();
    text.push('\n');
    Bytes::from(text)
}

fn ndjson(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

/// Parses JSON from a row. A row of a later release may contain something else.
fn stored<T: DeserializeOwned>(text: Option<&str>) -> Option<T> {
    serde_json::from_str(text?).ok()
}

fn text_of(value: &impl Serialize) -> Option<String> {
    serde_json::to_string(value).ok()
}

/// Begins work after the nodes of an earlier daemon have reconnected. Without them, it would fail.
async fn after_nodes(service: Service, work: impl Future<Output = Outcome>) -> Outcome {
    service.wait_until_nodes_are_back().await;
    work.await
}

impl Service {
    /// Adds a task to the database, and returns its number.
    async fn add_task(&self, what: &Work, plan: Option<String>) -> Result<i64, DbError> {
        let mut repo = self.db().write().await?;
        let id = repo.tasks().add(&self.new_task(what, plan)).await?;
        repo.save().await?;
        Ok(id)
    }

    fn new_task(&self, what: &Work, plan: Option<String>) -> NewTask {
        let (kind, subject, caller) = (what.kind, what.subject.clone(), what.caller.principal.clone());
        NewTask { kind, subject, caller, plan, created_at_ms: self.now_ms() }
    }

    /// Runs a task to its end, whether or not a client follows it.
    fn spawn_task(
        &self,
        id: Option<i64>,
        control: Arc<TaskControl>,
        work: impl Future<Output = Outcome> + Send + 'static,
    ) -> Arc<RunningTask> {
        let (told, end) = watch::channel(None);
        let live = Arc::new(RunningTask { control: control.clone(), end });
        if let Some(id) = id {
            self.tasks().map().insert(id, live.clone());
        }
        let service = self.clone();
        let under_way = self.begin_operation();
        tokio::spawn(async move {
            let outcome = match tokio::spawn(work).await {
                Ok(outcome) => outcome,
                Err(_) => Err(panicked()),
            };
            let Some(id) = id else {
                told.send_replace(Some(outcome));
                return;
            };
            let progress = control.progress();
            let mut noted = service.note_end(id, &outcome, &progress).await;
            told.send_replace(Some(outcome.clone()));
            // The client has its answer, even if the database fails. Retry, because a task that looks unended would block
            // others.
            while let Err(error) = noted {
                tracing::error!(
                    id,
                    "cannot record that a task ended; it is tried again: {}",
                    problem(&error)
                );
                if service.is_stopping() {
                    break;
                }
                tokio::time::sleep(RETRY).await;
                noted = service.note_end(id, &outcome, &progress).await;
            }
            service.tasks().map().remove(&id);
            drop(under_way);
        });
        live
    }

    async fn task_began(&self, id: i64) {
        let now = self.now_ms();
        let began = self.change_task(id, |task| {
            task.state = TaskState::Running;
            task.started_at_ms.get_or_insert(now);
        });
        if let Err(error) = began.await {
            tracing::warn!(id, "cannot record that a task began: {}", problem(&error));
        }
    }

    /// Records a task's end.
    async fn note_end(&self, id: i64, outcome: &Outcome, progress: &Progress) -> Result<(), DbError> {
        // If the daemon stops, a task with a plan stays unended and continues at the next start.
        let is_left = self.is_stopping() && outcome.is_err();
        let now = self.now_ms();
        let ended = self.change_task(id, |task| {
            task.progress = text_of(progress);
            if is_left && task.plan.is_some() {
                return;
            }
            task.state = match outcome {
                Ok(_) => TaskState::Done,
                Err(problem) if problem.kind == ProblemKind::Cancelled => TaskState::Cancelled,
                Err(_) => TaskState::Failed,
            };
            task.outcome = match outcome {
                Ok(result) => text_of(result),
                Err(problem) => text_of(problem),
            };
            task.ended_at_ms = Some(now);
        });
        ended.await
    }

    async fn change_task(&self, id: i64, change: impl FnOnce(&mut TaskRecord)) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        let Some(mut task) = repo.tasks().by_id(id).await? else { return Ok(()) };
        change(&mut task);
        repo.tasks().update(&task).await?;
        repo.save().await
    }

    /// Stores a task's plan, so that the task continues from it after a restart. Retries while the database fails; an
    /// error means that the daemon stops.
    async fn save_plan(&self, id: i64, plan: &impl Serialize, control: &TaskControl) -> Result<(), Problem> {
        let (plan, progress) = (text_of(plan), text_of(&control.progress()));
        let save = || {
            let (plan, progress) = (plan.clone(), progress.clone());
            self.change_task(id, move |task| {
                task.plan = plan;
                task.progress = progress;
            })
        };
        self.until_saved("the plan of a task", save).await
    }

    /// Repeats a write until it succeeds. An error means that the daemon stops.
    async fn until_saved<F>(&self, what: &str, save: impl Fn() -> F) -> Result<(), Problem>
    where
        F: Future<Output = Result<(), DbError>>,
    {
        while let Err(error) = save().await {
            tracing::error!("cannot save {what}; it is tried again: {}", problem(&error));
            if self.is_stopping() {
                return Err(stopped());
            }
            tokio::time::sleep(RETRY).await;
        }
        Ok(())
    }

    /// The unended tasks of an earlier daemon. Must be called before any task begins.
    pub async fn left_tasks(&self) -> Result<Vec<i64>, DbError> {
        let unended = self.db().read().await?.tasks().unended().await?;
        Ok(unended.into_iter().map(|task| task.id).collect())
    }

    /// Continues the tasks of an earlier daemon that have a plan, and ends the others.
    pub async fn recover_tasks(&self, left: Vec<i64>) -> Result<(), DbError> {
        for id in left {
            // Read it again, because it may have been cancelled meanwhile.
            let found = self.db().read().await?.tasks().by_id(id).await?;
            let Some(task) = found.filter(|task| task.ended_at_ms.is_none()) else { continue };
            let caller = Caller::admin(task.caller.clone());
            let control = Arc::new(TaskControl::new(self.stopping_flag()));
            control.begin();
            if task.cancelling {
                control.cancel();
            }
            let service = self.clone();
            match (task.kind.as_str(), task.plan.as_deref()) {
                (scale::KIND, plan @ Some(_)) if let Some(plan) = stored::<scale::Plan>(plan) => {
                    let work = scale::go_on(service.clone(), caller, id, plan, control.clone());
                    self.spawn_task(Some(id), control, after_nodes(service, work));
                }
                (roll::KIND, plan @ Some(_)) if let Some(plan) = stored::<roll_plan::Plan>(plan) => {
                    let work = roll::go_on(service.clone(), caller, id, plan, control.clone());
                    self.spawn_task(Some(id), control, after_nodes(service, work));
                }
                (drain::KIND, plan @ Some(_)) if let Some(plan) = stored::<drain::Plan>(plan) => {
                    let work = drain::go_on(service.clone(), caller, id, plan, control.clone());
                    self.spawn_task(Some(id), control, after_nodes(service, work));
                }
                (publish::KIND, plan @ Some(_)) if let Some(plan) = stored::<publish::Plan>(plan) => {
                    let work = publish::go_on(service.clone(), caller, id, plan, control.clone());
                    self.spawn_task(Some(id), control, work);
                }
                (unpublish::KIND, plan @ Some(_)) if let Some(plan) = stored::<unpublish::Plan>(plan) => {
                    let work = unpublish::go_on(service.clone(), caller, id, plan, control.clone());
                    self.spawn_task(Some(id), control, work);
                }
                _ => {
                    let why = "the daemon ended while the task ran, and a task of this kind does not continue after a restart";
                    let problem = Problem::new(ProblemKind::Failed, why).advise("start the task again");
                    let progress = stored(task.progress.as_deref()).unwrap_or_default();
                    self.note_end(id, &Err(problem), &progress).await?;
                }
            }
        }
        Ok(())
    }

    /// A task as a client sees it.
    pub(crate) fn task_view(&self, record: TaskRecord, caller: &Caller) -> Task {
        let live = self.tasks().map().get(&record.id).cloned();
        let (mut result, mut problem) = (None, None);
        match record.state {
            TaskState::Done => {
                let outcome: Option<TaskResult> = stored(record.outcome.as_deref());
                result = outcome.map(|outcome| Box::new(caller.may_see(outcome)));
            }
            TaskState::Failed | TaskState::Cancelled => problem = stored(record.outcome.as_deref()),
            TaskState::Waiting | TaskState::Running => {}
        }
        let progress = match live {
            Some(live) => Some(live.control.progress()),
            None => stored(record.progress.as_deref()),
        };
        Task {
            id: record.id,
            kind: record.kind,
            subject: record.subject,
            caller: record.caller,
            state: record.state,
            cancelling: record.cancelling,
            progress,
            result,
            problem,
            created_at_ms: record.created_at_ms,
            started_at_ms: record.started_at_ms,
            ended_at_ms: record.ended_at_ms,
        }
    }

    /// The progress of a task that has not ended, as lines.
    pub(crate) async fn follow_task(&self, id: i64, caller: Caller) -> Option<Response> {
        let live = self.tasks().map().get(&id).cloned()?;
        Some(answer(Some(id), live, caller).await)
    }

    /// Cancels a task. The task itself records that before it ends.
    pub(crate) fn cancel_live(&self, id: i64) {
        if let Some(live) = self.tasks().map().get(&id) {
            live.control.cancel();
        }
    }
}

/// The lines of a task that has ended.
pub(crate) fn ended_lines(task: Task) -> Response {
    let event = match (task.result, task.problem) {
        (Some(result), _) => TaskEvent::Done { result: *result },
        (None, Some(problem)) => TaskEvent::Failed { problem },
        (None, None) => TaskEvent::Failed {
            problem: Problem::new(ProblemKind::Failed, "the outcome of the task is not in the database"),
        },
    };
    ndjson(Body::from(line(&event)))
}
