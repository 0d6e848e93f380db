//! A connection to a node, over which the controller asks.

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

/// How old that one may be.
const LIST_AGE_MAX: Duration = Duration::from_secs(10);

/// How long a node may take to answer: a question, and a change. A machine that is stopped may take minutes.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(60);
const CHANGE_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// What HTTP/2 holds of one stream and of all of a connection before the other side has to wait. A console that nobody reads fills
/// its own stream, and not the connection.
pub(super) const STREAM_WINDOW_BYTES: u32 = 128 << 10;
pub(super) const CONNECTION_WINDOW_BYTES: u32 = STREAM_WINDOW_BYTES * STREAMS_MAX;

/// How many machines are asked for by their names. For more of them, the whole list is asked for.
const NAMED_MAX: usize = 50;

/// How many requests a node answers at a time.
pub(super) const STREAMS_MAX: u32 = 1024;

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
    /// It has removed the machines that are another host's.
    pub(crate) is_cleared: AtomicBool,
    /// The connection is to end.
    pub(crate) ending: Notify,
    pub(crate) lists: Lists,
}

/// What a node has answered to the question for its machines.
#[derive(Default)]
pub(crate) struct Lists {
    /// When it was asked last, whether it answered or not.
    asked: Mutex<Option<Instant>>,
    last: std::sync::Mutex<Option<(Instant, Arc<Vec<Machine>>)>>,
    /// The last answer is older than a change.
    is_stale: AtomicBool,
}

impl Lists {
    fn last(&self) -> MutexGuard<'_, Option<(Instant, Arc<Vec<Machine>>)>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        let mut asked = self.lists.asked.lock().await;
        let is_stale = self.lists.is_stale.swap(false, Ordering::AcqRel);
        if is_stale || asked.is_none_or(|at| at.elapsed() >= LIST_AGE) {
            let answer = tokio::time::timeout(LIST_TIMEOUT, self.list()).await;
            // Also if there was no answer: those who wait here do not wait again, one after the other.
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
    pub(crate) fn forget_list(&self) {
        self.lists.is_stale.store(true, Ordering::Release);
    }

    fn late(&self, limit: Duration) -> Problem {
        let message =
            format!("the node of host '{}' has not answered within {} s", self.name, limit.as_secs());
        Problem::new(ProblemKind::Unavailable, message)
            .advise("it may still be done: look again ('headwater machine list')")
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
