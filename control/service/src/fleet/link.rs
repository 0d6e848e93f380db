//! A connection to a node, over which the controller asks.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, Method, Request, Response, header};
use headwater_api::{Machine, MachineList, Problem, ProblemKind};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;
use uuid::Uuid;

use crate::caller::Caller;

/// The headers of each request: who asks, what they may do, and over which connection.
pub(crate) const CALLER: &str = "headwater-caller";
pub(crate) const ROLE: &str = "headwater-role";
pub(crate) const GENERATION: &str = "headwater-generation";

/// The longest answer that is taken as a whole.
const ANSWER_MAX_BYTES: usize = 64 << 20;

/// How old a node's list of machines may be that is shown.
const LIST_AGE: Duration = Duration::from_millis(500);

/// How long a list may take before the last one has to do.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);

/// A node that is connected.
pub(crate) struct Link {
    pub(crate) host: Uuid,
    pub(crate) name: String,
    pub(crate) generation: u64,
    pub(crate) address: String,
    pub(crate) release: String,
    /// How far its clock is ahead of ours.
    pub(crate) clock_ahead_ms: i64,
    pub(crate) sender: SendRequest<Body>,
    /// Told when a machine, an image reference or a pin has changed.
    pub(crate) changed: Notify,
    /// The connection is to end.
    pub(crate) ending: Notify,
    pub(crate) machines: Mutex<Option<(Instant, Arc<Vec<Machine>>)>>,
}

impl Link {
    /// Sends a request and gives the answer's head.
    pub(crate) async fn send(
        &self,
        caller: &Caller,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Response<Incoming>, Problem> {
        self.send_request(caller, self.request(method, path, body)?).await
    }

    /// A request for this node.
    pub(crate) fn request(&self, method: Method, path: &str, body: Body) -> Result<Request<Body>, Problem> {
        let request = Request::builder().method(method).uri(format!("http://node{path}"));
        request
            .header(header::CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|error| Problem::new(ProblemKind::Invalid, format!("'{path}' is no path: {error}")))
    }

    /// Sends a request in the name of a caller.
    pub(crate) async fn send_request(
        &self,
        caller: &Caller,
        mut request: Request<Body>,
    ) -> Result<Response<Incoming>, Problem> {
        let headers = request.headers_mut();
        let text =
            |text: &str| HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static("unknown"));
        headers.insert(CALLER, text(&caller.principal));
        headers.insert(ROLE, HeaderValue::from_static(caller.role.name()));
        headers.insert(GENERATION, HeaderValue::from(self.generation));
        let sent = self.sender.clone().send_request(request).await;
        sent.map_err(|error| self.broken(&error))
    }

    /// Sends a request and takes the answer, or the problem of the node.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        caller: &Caller,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<T, Problem> {
        let answer = self.send(caller, method, path, body.map_or_else(Body::empty, Body::from)).await?;
        let status = answer.status();
        let bytes = axum::body::to_bytes(Body::new(answer.into_body()), ANSWER_MAX_BYTES).await;
        let bytes = bytes.map_err(|error| self.broken(&error))?;
        let odd = |error: serde_json::Error| {
            let message =
                format!("the node of host '{}' answers {status} with something else: {error}", self.name);
            Problem::new(ProblemKind::Failed, message)
        };
        if status.is_success() {
            // An answer without a body is nothing.
            let text = if bytes.is_empty() { &b"null"[..] } else { &bytes[..] };
            return serde_json::from_slice(text).map_err(odd);
        }
        Err(serde_json::from_slice(&bytes).unwrap_or_else(odd))
    }

    /// The machines of the node as it shows them, at most [`LIST_AGE`] old if it answers.
    pub(crate) async fn machines(&self) -> Option<Arc<Vec<Machine>>> {
        let mut known = self.machines.lock().await;
        if let Some((at, list)) = &*known
            && at.elapsed() < LIST_AGE
        {
            return Some(list.clone());
        }
        match tokio::time::timeout(LIST_TIMEOUT, self.list()).await {
            Ok(Ok(list)) => {
                let list = Arc::new(list);
                *known = Some((Instant::now(), list.clone()));
                Some(list)
            }
            _ => known.as_ref().map(|(_, list)| list.clone()),
        }
    }

    /// The same, asked now.
    pub(crate) async fn list(&self) -> Result<Vec<Machine>, Problem> {
        let mut path = "/api/v1/machines".to_owned();
        let mut machines = Vec::new();
        loop {
            let page: MachineList = self.ask(&Caller::daemon(), Method::GET, &path, None).await?;
            machines.extend(page.machines);
            let Some(next) = page.next else { return Ok(machines) };
            // A name, which has no characters that a path cannot have.
            path = format!("/api/v1/machines?after={next}");
        }
    }

    /// Has the next list asked from the node.
    pub(crate) async fn forget_list(&self) {
        *self.machines.lock().await = None;
    }

    fn broken(&self, error: &dyn std::error::Error) -> Problem {
        let mut problem = Problem::new(
            ProblemKind::Unavailable,
            format!("the connection to the node of host '{}' broke", self.name),
        );
        problem.causes.push(error.to_string());
        problem.advise("it may have been done: look when the node is connected again ('headwater node list')")
    }
}
