//! Long operations: reading the daemon's progress lines until the last one.

use anyhow::Context;
use headwater_api::{
    DiffRequest, ExportRequest, ImportRequest, JobEvent, JobResult, Problem, ProblemKind, Progress,
    SealRequest, VerifyRequest,
};
use http_body_util::BodyExt;
use hyper::Method;

use crate::client::{Client, escape};

/// The longest line that the daemon may send, in bytes: a report can name many damaged places.
const MAX_LINE_BYTES: usize = 64 << 20;

/// How far an operation is.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// It waits for others, of which so many run.
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
    /// Imports a disk. Dropping the future cancels the import.
    pub async fn import(
        &self,
        request: &ImportRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<JobResult> {
        self.job("/api/v1/images", Some(serde_json::to_vec(request)?), progress).await
    }

    /// Verifies a version, and repairs what one of the request's stores has.
    pub async fn verify(
        &self,
        reference: &str,
        request: &VerifyRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<JobResult> {
        let path = format!("/api/v1/images/{}/verify", escape(reference));
        self.job(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// Compares two versions.
    pub async fn diff(&self, from: &str, to: &str, progress: impl FnMut(Step)) -> anyhow::Result<JobResult> {
        let path = format!("/api/v1/images/{}/diff", escape(from));
        let request = DiffRequest { with: to.to_owned() };
        self.job(&path, Some(serde_json::to_vec(&request)?), progress).await
    }

    /// Writes a version to a file on the daemon's host.
    pub async fn export(
        &self,
        reference: &str,
        request: &ExportRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<JobResult> {
        let path = format!("/api/v1/images/{}/export", escape(reference));
        self.job(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// Makes a version of what was edited of an image.
    pub async fn seal_image(
        &self,
        image: &str,
        request: &SealRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<JobResult> {
        let path = format!("/api/v1/images/{}/seal", escape(image));
        self.job(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// Makes a version of a machine's disk.
    pub async fn seal_machine(
        &self,
        name: &str,
        request: &SealRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<JobResult> {
        let path = format!("/api/v1/machines/{}/seal", escape(name));
        self.job(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    async fn job(
        &self,
        path: &str,
        body: Option<Vec<u8>>,
        mut progress: impl FnMut(Step),
    ) -> anyhow::Result<JobResult> {
        let mut answer = self.send(Method::POST, path, body).await?.into_body();
        let mut pending = Vec::new();
        while let Some(frame) = answer.frame().await {
            let frame = frame.context("the daemon ended in the middle of the operation")?;
            pending.extend_from_slice(frame.data_ref().map(|data| &data[..]).unwrap_or_default());
            while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                match serde_json::from_slice(&line).context("cannot understand the daemon's progress")? {
                    JobEvent::Waiting { running } => progress(Step::Waiting(running)),
                    JobEvent::Progress(now) => progress(now.into()),
                    JobEvent::Done { result } => return Ok(result),
                    JobEvent::Failed { problem } => return Err(problem.into()),
                }
            }
            if pending.len() > MAX_LINE_BYTES {
                break;
            }
        }
        Err(Problem::new(ProblemKind::Failed, "the daemon ended in the middle of the operation").into())
    }
}
