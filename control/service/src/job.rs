//! Long operations over HTTP: one JSON line for each step, and a client that hangs up cancels.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use headwater_api::{JobEvent, JobResult, Problem, ProblemKind};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::Service;
use crate::answer::Failure;
use crate::backend::JobControl;

/// How many long operations run at once; further ones wait their turn.
pub const MAX_JOBS: usize = 4;

/// How often a progress line is sent. It is also how soon a client that hung up is noticed.
pub const PROGRESS_INTERVAL_MS: u64 = 200;

/// An operation that ends this soon is answered like any other request: with a status of its own.
const PROMPT_MS: u64 = 100;

/// Runs `work` in the background and answers with its progress.
pub(crate) async fn run<F, W>(service: &Service, work: W) -> Response
where
    F: Future<Output = Result<JobResult, Problem>> + Send + 'static,
    W: FnOnce(Arc<JobControl>) -> F,
{
    let control = Arc::new(JobControl::new(service.stopping_flag()));
    let future = work(control.clone());
    let slots = service.job_slots();
    let waiting = control.clone();
    let queued = service.queue_job();
    let is_gone = Arc::new(Notify::new());
    let gone = Arc::clone(&is_gone);
    let task = tokio::spawn(async move {
        let _slot = tokio::select! {
            slot = slots.acquire_owned() => slot.map_err(|_| stopping())?,
            // Nobody waits for it any more, and it has not begun.
            () = gone.notified() => return Err(stopping()),
        };
        drop(queued);
        waiting.begin();
        if waiting.is_cancelled() {
            return Err(stopping());
        }
        future.await
    });
    let mut watched = Watched { task: Some(task), guard: CancelOnDrop(control, is_gone) };
    match tokio::time::timeout(Duration::from_millis(PROMPT_MS), watched.finished()).await {
        Ok(Err(problem)) => Failure(problem).into_response(),
        Ok(Ok(result)) => ndjson(Body::from(line(&JobEvent::Done { result }))),
        Err(_) => ndjson(Body::from_stream(stream::unfold(watched, next_line))),
    }
}

fn stopping() -> Problem {
    Problem::new(ProblemKind::Cancelled, "the operation was stopped before it began")
}

struct Watched {
    task: Option<JoinHandle<Result<JobResult, Problem>>>,
    guard: CancelOnDrop,
}

impl Watched {
    async fn finished(&mut self) -> Result<JobResult, Problem> {
        let Some(task) = &mut self.task else {
            return Err(Problem::new(ProblemKind::Failed, "the operation was asked twice for its end"));
        };
        let outcome = task.await;
        self.task = None;
        outcome.unwrap_or_else(|e| Err(Problem::from_error(ProblemKind::Failed, &e)))
    }
}

/// The stream of lines is dropped when the client is gone.
/// Cancels what runs, and tells what waits.
struct CancelOnDrop(Arc<JobControl>, Arc<Notify>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
        self.1.notify_one();
    }
}

async fn next_line(mut watched: Watched) -> Option<(Result<Bytes, Infallible>, Watched)> {
    watched.task.as_ref()?;
    let interval = Duration::from_millis(PROGRESS_INTERVAL_MS);
    let event = match tokio::time::timeout(interval, watched.finished()).await {
        Err(_) if !watched.guard.0.has_begun() => JobEvent::Waiting { running: MAX_JOBS as u64 },
        Err(_) => JobEvent::Progress(watched.guard.0.progress()),
        Ok(Ok(result)) => JobEvent::Done { result },
        Ok(Err(problem)) => JobEvent::Failed { problem },
    };
    Some((Ok(line(&event)), watched))
}

fn line(event: &JobEvent) -> Bytes {
    let mut text = serde_json::to_string(event).unwrap_or_default();
    text.push('\n');
    Bytes::from(text)
}

fn ndjson(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}
