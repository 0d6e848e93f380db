//! A client of long operations: reads the daemon's progress lines until the last one.

use anyhow::Context;
use headwater_api::{
    DiffRequest, ExportRequest, ImportRequest, Problem, ProblemKind, Progress, PullRequest, RollRequest,
    ScaleRequest, SealRequest, TaskEvent, TaskResult, VerifyRequest,
};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Method, Response};

use crate::client::{Client, escape};
use crate::signals::EndSignals;

/// The longest line that the daemon may send; a report can name many damaged ranges.
const MAX_LINE_BYTES: usize = 64 << 20;

/// The progress of an operation.
#[derive(Clone, Debug)]
pub enum Step {
    /// It waits for other tasks. The number of these that run.
    Waiting(u64),
    /// It runs.
    Progress(Progress),
}

impl From<Progress> for Step {
    fn from(progress: Progress) -> Self {
        Self::Progress(progress)
    }
}

impl Client {
    /// Imports a disk.
    pub async fn import(
        &self,
        request: &ImportRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        self.run_task("/api/v1/images", Some(serde_json::to_vec(request)?), progress).await
    }

    /// Copies versions from another store.
    pub async fn pull(
        &self,
        request: &PullRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        self.run_task("/api/v1/pull", Some(serde_json::to_vec(request)?), progress).await
    }

    /// Verifies a version, and repairs damage from the stores of the request.
    pub async fn verify(
        &self,
        reference: &str,
        request: &VerifyRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/images/{}/verify", escape(reference));
        self.run_task(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// Compares two versions.
    pub async fn diff(&self, from: &str, to: &str, progress: impl FnMut(Step)) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/images/{}/diff", escape(from));
        let request = DiffRequest { with: to.to_owned() };
        self.run_task(&path, Some(serde_json::to_vec(&request)?), progress).await
    }

    /// Writes a version to a file on the daemon's host.
    pub async fn export(
        &self,
        reference: &str,
        request: &ExportRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/images/{}/export", escape(reference));
        self.run_task(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// Seals a maintenance session.
    pub async fn seal_image(
        &self,
        image: &str,
        request: &SealRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/images/{}/seal", escape(image));
        self.run_task(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// Makes a version of a machine's disk.
    pub async fn seal_machine(
        &self,
        name: &str,
        request: &SealRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/machines/{}/seal", escape(name));
        self.run_task(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    pub(super) async fn run_task(
        &self,
        path: &str,
        body: Option<Vec<u8>>,
        mut progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let mut signals = EndSignals::catch()?;
        let mut sending = std::pin::pin!(self.send(Method::POST, path, body));
        let mut is_interrupted = false;
        let answer = loop {
            tokio::select! {
                answer = &mut sending => break answer?,
                // The task may have begun; its number is in the answer.
                _ = signals.next() => is_interrupted = true,
            }
        };
        let number = number_of(&answer);
        if let Some(number) = number.filter(|_| is_interrupted) {
            self.cancel_task(number).await?;
        }
        let mut lines = std::pin::pin!(read_lines(answer.into_body(), &mut progress));
        loop {
            tokio::select! {
                outcome = &mut lines => return outcome,
                _ = signals.next() => {
                    // Without its number the task cannot be cancelled.
                    let Some(number) = number else { return Err(cancelled()) };
                    self.cancel_task(number).await?;
                }
            }
        }
    }

    /// Follows a task until its end. Ctrl-C ends the command but not the task.
    pub async fn follow_task(&self, id: i64, mut progress: impl FnMut(Step)) -> anyhow::Result<TaskResult> {
        let answer = self.send(Method::GET, &format!("/api/v1/tasks/{id}/follow"), None).await?;
        read_lines(answer.into_body(), &mut progress).await
    }

    /// Begins a task, and returns its number. The task continues without this client.
    async fn begin(&self, path: &str, body: Vec<u8>) -> anyhow::Result<i64> {
        let answer = self.send(Method::POST, path, Some(body)).await?;
        let number = number_of(&answer);
        number.context("the daemon's answer has no number of a task: the daemon may be of another version")
    }

    /// Changes the number of machines of a catalog.
    pub async fn scale_catalog(
        &self,
        name: &str,
        request: &ScaleRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/catalogs/{}/scale", escape(name));
        self.run_task(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// Moves a catalog's machines to a version.
    pub async fn roll_catalog(
        &self,
        name: &str,
        request: &RollRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/catalogs/{}/roll", escape(name));
        self.run_task(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// Begins a roll without waiting for its end. Returns the task's number.
    pub async fn begin_roll(&self, name: &str, request: &RollRequest) -> anyhow::Result<i64> {
        self.begin(&format!("/api/v1/catalogs/{}/roll", escape(name)), serde_json::to_vec(request)?).await
    }

    /// Moves the machines of a host to other hosts.
    pub async fn drain_host(&self, name: &str, progress: impl FnMut(Step)) -> anyhow::Result<TaskResult> {
        self.run_task(&format!("/api/v1/hosts/{}/drain", escape(name)), None, progress).await
    }
}

/// The number of the task in an answer.
fn number_of(answer: &Response<Incoming>) -> Option<i64> {
    answer.headers().get("headwater-task")?.to_str().ok()?.parse().ok()
}

fn cancelled() -> anyhow::Error {
    Problem::new(ProblemKind::Cancelled, "the command was interrupted").into()
}

/// The failure if an answer ends before its task.
const BROKEN: &str =
    "the connection to the daemon broke; the operation may continue ('headwater task list' shows it)";

/// Reads a task's progress until its end.
async fn read_lines(mut answer: Incoming, progress: &mut impl FnMut(Step)) -> anyhow::Result<TaskResult> {
    let mut pending = Vec::new();
    while let Some(frame) = answer.frame().await {
        let frame = frame.context(BROKEN)?;
        pending.extend_from_slice(frame.data_ref().map(|data| &data[..]).unwrap_or_default());
        while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            match event(&line)? {
                Some(TaskEvent::Waiting { running }) => progress(Step::Waiting(running)),
                Some(TaskEvent::Progress(now)) => progress(now.into()),
                Some(TaskEvent::Done { result }) => return Ok(result),
                Some(TaskEvent::Failed { problem }) => return Err(problem.into()),
                None => {}
            }
        }
        if pending.len() > MAX_LINE_BYTES {
            break;
        }
    }
    Err(Problem::new(ProblemKind::Failed, BROKEN).into())
}

/// Parses a line. `None`: an event of a kind that a newer daemon sends.
fn event(line: &[u8]) -> anyhow::Result<Option<TaskEvent>> {
    #[derive(serde::Deserialize)]
    struct Named {
        event: String,
    }
    let read = serde_json::from_slice(line);
    let is_end = |named: Named| matches!(&*named.event, "done" | "failed");
    match (read, serde_json::from_slice(line).map(is_end)) {
        (Ok(event), _) => Ok(Some(event)),
        (Err(_), Ok(false)) => Ok(None),
        (Err(e), _) => Err(e).context(
            "cannot understand the daemon's progress: the daemon may be of another version than this program",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_later_daemon_tells_on_the_way_is_passed_over_and_no_end_is() {
        assert_eq!(event(br#"{"event":"later","x":1}"#).unwrap(), None);
        assert!(event(br#"{"event":"progress","done_bytes":1,"total_bytes":2}"#).unwrap().is_some());
        assert!(event(br#"{"event":"done","result":{"kind":"later"}}"#).is_err());
        assert!(event(b"<html>").is_err());
        // A failure of an unknown kind is shown anyway.
        let failed = br#"{"event":"failed","problem":{"kind":"later","message":"m","advice":"a"}}"#;
        let Some(TaskEvent::Failed { problem }) = event(failed).unwrap() else { panic!("not failed") };
        assert_eq!((problem.kind, &*problem.message), (ProblemKind::Failed, "m"));
    }
}
