//! The connection to a node, over which the controller sends requests, with a cached list of the node's machines. `controller.rs` creates
//! a [`Link`] after the handshake, and all of `fleet` uses it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
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

/// The headers of each request: the caller, its permissions, and the generation of the connection.
pub(crate) const CALLER: &str = "headwater-caller";
pub(crate) const ROLE: &str = "headwater-role";
pub(crate) const GENERATION: &str = "headwater-generation";

/// The largest body of an answer.
const ANSWER_MAX_BYTES: usize = 64 << 20;

/// A node's list of machines is requested again if it is older than this.
const LIST_AGE: Duration = Duration::from_millis(500);

/// Timeout of a new list, after which the last one is used.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);

/// The oldest list that is used after a timeout.
const LIST_AGE_MAX: Duration = Duration::from_secs(10);

/// Timeout of a read request; changes have a longer one, because stopping a machine may take minutes.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(60);
const CHANGE_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// HTTP/2 flow control windows of a stream and of the connection. A console whose output nobody reads fills
/// its own stream, and not the connection.
pub(super) const STREAM_WINDOW_BYTES: u32 = 128 << 10;
pub(super) const CONNECTION_WINDOW_BYTES: u32 = STREAM_WINDOW_BYTES * STREAMS_MAX;

/// How many machines are asked for by their names. For more of them, the whole list is asked for.
const NAMED_MAX: usize = 50;

/// How many requests a node answers at a time.
pub(super) const STREAMS_MAX: u32 = 1024;

/// The connection to a node. There is none for a node that is not connected.
pub(crate) struct Link {
    pub(crate) host: Uuid,
    pub(crate) name: String,
    pub(crate) generation: u64,
    pub(crate) address: String,
    pub(crate) release: String,
    /// How far its clock is ahead of ours, in milliseconds.
    pub(crate) clock_ahead_ms: i64,
    pub(crate) sender: SendRequest<Body>,
    /// Notified when a machine, an image reference or a pin has changed.
    pub(crate) changed: Notify,
    /// Whether the node has removed the machines that were moved to other hosts.
    pub(crate) is_cleared: AtomicBool,
    /// Notified to end the connection.
    pub(crate) ending: Notify,
    pub(crate) lists: Lists,
}

/// The cached list of a node's machines.
#[derive(Default)]
pub(crate) struct Lists {
    /// When the list was last requested, even if the node did not answer.
    asked: Mutex<Option<Instant>>,
    last: std::sync::Mutex<Option<(Instant, Arc<Vec<Machine>>)>>,
    /// Whether a change was made since the last answer.
    is_stale: AtomicBool,
}

impl Lists {
    fn last(&self) -> MutexGuard<'_, Option<(Instant, Arc<Vec<Machine>>)>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    /// Sends a request and returns the head of the answer.
    pub(crate) async fn send(
        &self,
        caller: &Caller,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Response<Incoming>, Problem> {
        self.send_request(caller, self.request(method, path, body)?).await
    }

    /// Builds a request for this node.
    pub(crate) fn request(&self, method: Method, path: &str, body: Body) -> Result<Request<Body>, Problem> {
        let request = Request::builder().method(method).uri(format!("http://node{path}"));
        request.header(header::CONTENT_TYPE, "application/json").body(body).map_err(|error| {
            Problem::new(ProblemKind::Invalid, format!("'{path}' is not a valid path: {error}"))
        })
    }

    /// Sends a request on behalf of a caller.
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

    /// Sends a request, and returns the body of the answer, or the node's problem.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        caller: &Caller,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<T, Problem> {
        let is_change = method != Method::GET;
        let limit = if is_change { CHANGE_TIMEOUT } else { QUESTION_TIMEOUT };
        let answered = async {
            let answer = self.send(caller, method, path, body.map_or_else(Body::empty, Body::from)).await?;
            let status = answer.status();
            let bytes = axum::body::to_bytes(Body::new(answer.into_body()), ANSWER_MAX_BYTES).await;
            Ok((status, bytes.map_err(|error| self.broken(&error))?))
        };
        let answered = tokio::time::timeout(limit, answered).await;
        let (status, bytes) = answered.map_err(|_| self.late(limit))??;
        let odd = |error: serde_json::Error| {
            let message = format!(
                "the node of host '{}' sent an answer ({status}) that cannot be read: {error}",
                self.name
            );
            Problem::new(ProblemKind::Failed, message)
        };
        if status.is_success() {
            // An empty body means `null`.
            let text = if bytes.is_empty() { &b"null"[..] } else { &bytes[..] };
            return serde_json::from_slice(text).map_err(odd);
        }
        Err(serde_json::from_slice(&bytes).unwrap_or_else(odd))
    }

    /// The node's list of machines, at most [`LIST_AGE`] old if the node answers.
    pub(crate) async fn machines(&self) -> Option<Arc<Vec<Machine>>> {
        let mut asked = self.lists.asked.lock().await;
        let is_stale = self.lists.is_stale.swap(false, Ordering::AcqRel);
        if is_stale || asked.is_none_or(|at| at.elapsed() >= LIST_AGE) {
            let answer = tokio::time::timeout(LIST_TIMEOUT, self.list()).await;
            // Set even without an answer, so that callers that wait for the lock do not each wait for a timeout.
            *asked = Some(Instant::now());
            if let Ok(Ok(list)) = answer {
                *self.lists.last() = Some((Instant::now(), Arc::new(list)));
            }
        }
        let last = self.lists.last().clone();
        last.filter(|(at, _)| at.elapsed() < LIST_AGE_MAX).map(|(_, list)| list)
    }

    /// Some machines of the node as it shows them, and perhaps others. A page of the machines of a fleet has few of each node, whose lists are
    /// long.
    pub(crate) async fn machines_named(&self, names: &[&str]) -> Option<Arc<Vec<Machine>>> {
        let is_stale = self.lists.is_stale.load(Ordering::Acquire);
        let last = self.lists.last().clone();
        if let Some((at, list)) = &last
            && !is_stale
            && at.elapsed() < LIST_AGE
        {
            return Some(Arc::clone(list));
        }
        if names.len() > NAMED_MAX {
            return self.machines().await;
        }
        // Names have no characters that a query cannot have.
        let path = format!("/api/v1/machines?filter=name:{}", names.join(","));
        let caller = Caller::daemon();
        let asked = self.ask::<MachineList>(&caller, Method::GET, &path, None);
        match tokio::time::timeout(LIST_TIMEOUT, asked).await {
            Ok(Ok(list)) => Some(Arc::new(list.machines)),
            _ => last.filter(|(at, _)| at.elapsed() < LIST_AGE_MAX).map(|(_, list)| list),
        }
    }

    /// One machine as the node shows it, asked now.
    pub(crate) async fn machine(&self, name: &str) -> Option<Machine> {
        let path = format!("/api/v1/machines/{name}");
        let caller = Caller::daemon();
        let asked = self.ask::<Machine>(&caller, Method::GET, &path, None);
        tokio::time::timeout(LIST_TIMEOUT, asked).await.ok()?.ok()
    }

    /// The present list, from the node.
    pub(crate) async fn list(&self) -> Result<Vec<Machine>, Problem> {
        let mut path = "/api/v1/machines".to_owned();
        let mut machines = Vec::new();
        loop {
            let page: MachineList = self.ask(&Caller::daemon(), Method::GET, &path, None).await?;
            machines.extend(page.machines);
            let Some(next) = page.next else { return Ok(machines) };
            // The name of a machine, whose characters are all valid in a path.
            path = format!("/api/v1/machines?after={next}");
        }
    }

    /// Has the list requested again at its next use.
    pub(crate) fn forget_list(&self) {
        self.lists.is_stale.store(true, Ordering::Release);
    }

    fn late(&self, limit: Duration) -> Problem {
        let message =
            format!("the node of host '{}' has not answered within {} s", self.name, limit.as_secs());
        Problem::new(ProblemKind::Unavailable, message)
            .advise("the node may still do it: check with 'headwater machine list'")
    }

    fn broken(&self, error: &dyn std::error::Error) -> Problem {
        let mut problem = Problem::new(
            ProblemKind::Unavailable,
            format!("the connection to the node of host '{}' broke", self.name),
        );
        problem.causes.push(error.to_string());
        problem.advise("the node may have done it: check when it is connected again ('headwater node list')")
    }
}
