//! The node's side of the connection: `headwater/src/fleet` connects to the controller and calls `Service::serve_controller`, which
//! answers the controller's requests over the same connection. A node also refuses requests of others that only its controller may make.

use std::path::PathBuf;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::put;
use axum::{Json, Router};
use headwater_api::{Problem, ProblemKind, Role};
use hyper::body::Incoming;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

use crate::Service;
use crate::answer::{Failure, problem};
use crate::caller::Caller;
use crate::extract::Body as JsonBody;
use crate::fleet::fence::{LEASE, renew};
use crate::fleet::link::{
    CALLER, CONNECTION_WINDOW_BYTES, GENERATION, ROLE, STREAM_WINDOW_BYTES, STREAMS_MAX,
};
use crate::fleet::protocol::{
    AssignedMachine, FromNode, Hello, PROTOCOL, ToNode, read_line, unexpected_answer, wait_until_ready,
    write_line,
};
use crate::fleet::{BEAT, BEAT_TIMEOUT};
use crate::operations::{self, create_machine};

/// The path at which the controller assigns a machine. Only the controller can reach it.
pub(super) const MACHINES: &str = "/node/v1/machines";

/// The path at which the controller asks whether this host can run a machine. Nothing is changed.
pub(super) const CHECK: &str = "/node/v1/check";

/// The action of the event that a machine was put there.
pub(super) const ASSIGNED: &str = "assigned";

/// The protocol of a console over HTTP/2, which has no upgrades.
pub(super) const CONSOLE: &str = "headwater-console";

/// Timeout of requests of the controller when the daemon stops.
const ANSWERS_GRACE: Duration = Duration::from_secs(10);

/// The fleet of which a daemon is a node.
#[derive(Clone, Debug)]
pub struct Membership {
    /// The URL of its controller.
    pub controller: String,
    /// The name of the host there.
    pub name: String,
    /// The file for the guard, with the node's lease.
    pub lease_file: PathBuf,
}

/// The caller of a request that came from the controller, which has authenticated the caller.
#[derive(Clone)]
pub(crate) struct OfController(pub(crate) Caller);

impl Service {
    /// Makes this daemon a node, whose controller assigns its machines.
    pub fn is_node_of(&self, membership: Membership) {
        // Called once, at the start.
        let _ = self.fleet().membership.set(membership);
        self.read_lease();
    }

    pub(crate) fn membership(&self) -> Option<&Membership> {
        self.fleet().membership.get()
    }

    /// Handshakes with the controller on a new connection, and answers its requests until the connection ends. An error
    /// means that the controller refused the node.
    pub async fn serve_controller<S>(&self, mut stream: S, stop: watch::Receiver<bool>) -> Result<(), Problem>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let own = self.host_parts();
        let known = self.db().read().await.map_err(|e| problem(&e))?.hosts().by_id(self.own_host()).await;
        let hello = Hello {
            protocol: PROTOCOL,
            release: env!("CARGO_PKG_VERSION").to_owned(),
            host: own.id,
            now_ms: self.now_ms(),
            generation: known.map_err(|e| problem(&e))?.map_or(0, |host| host.generation),
            memory_bytes: own.memory_bytes,
            cpus: own.cpus,
        };
        wait_until_ready(&mut stream).await?;
        write_line(&mut stream, &FromNode::Hello(hello)).await?;
        let generation = match read_line(&mut stream, "the controller").await? {
            ToNode::Welcome { generation, name } => {
                self.take_generation(generation).await?;
                tracing::info!(host = name, generation, "connected to the controller");
                generation
            }
            ToNode::Refused(problem) => return Err(problem.during("the controller refuses this node")),
            ToNode::Joined { .. } | ToNode::Ready => return Err(unexpected_answer()),
        };
        self.answer_controller(stream, generation, stop).await;
        Ok(())
    }

    /// Fails for a connection with a smaller number than a previous one: the controller, or its database, is then an old
    /// copy.
    async fn take_generation(&self, generation: u64) -> Result<(), Problem> {
        let mut repo = self.db().write().await.map_err(|e| problem(&e))?;
        let own = repo.hosts().by_id(self.own_host()).await.map_err(|e| problem(&e))?;
        let Some(mut own) = own else {
            return Err(Problem::new(ProblemKind::Failed, "the database has no entry for its own host"));
        };
        if generation <= own.generation {
            return Err(old_copy(generation, own.generation));
        }
        own.generation = generation;
        repo.hosts().update(&own).await.map_err(|e| problem(&e))?;
        repo.save().await.map_err(|e| problem(&e))
    }

    async fn answer_controller<S>(&self, stream: S, generation: u64, mut stop: watch::Receiver<bool>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        self.fleet().fence.connected();
        let own =
            Router::new().route(MACHINES, put(assign)).route(CHECK, put(check)).route(LEASE, put(renew));
        let router = operations::router(self.clone()).merge(own.with_state(self.clone()));
        let service = TowerToHyperService::new(router);
        let controller = self.membership().map(|it| it.controller.clone()).unwrap_or_default();
        let answer = service_fn(move |request: hyper::Request<Incoming>| {
            let service = service.clone();
            let admitted = admitted(request, generation, &controller);
            async move {
                let is_console = matches!(&admitted, Ok((_, true)));
                let answered = match admitted {
                    Ok((request, _)) => service.call(request).await?,
                    Err(problem) => Failure(*problem).into_response(),
                };
                Ok::<_, std::convert::Infallible>(if is_console {
                    without_upgrade(answered)
                } else {
                    answered
                })
            }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(BEAT)
            .keep_alive_timeout(BEAT_TIMEOUT)
            .max_concurrent_streams(STREAMS_MAX)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .enable_connect_protocol()
            .serve_connection(TokioIo::new(stream), answer);
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = stopped(&mut stop) => {
                connection.as_mut().graceful_shutdown();
                // A console would last as long as its client likes.
                tokio::time::timeout(ANSWERS_GRACE, connection).await.unwrap_or(Ok(()))
            }
        };
        match ended {
            Ok(()) => tracing::warn!("the connection to the controller has ended"),
            Err(error) => tracing::warn!("the connection to the controller broke: {error}"),
        }
    }
}

/// The error if controller and node disagree about the number of connections.
pub(super) fn old_copy(counted: u64, seen: u64) -> Problem {
    let message = format!(
        "the controller has counted {counted} connections of this node, and the node has seen number {seen}: the controller's database is \
         an old copy"
    );
    Problem::new(ProblemKind::Conflict, message)
        .advise("restore the newest copy; if there is none, run 'headwater node accept HOST' on the controller, which makes its database the valid one")
}

/// Checks a request of the controller. Returns it with the caller that it names, and whether it asks for a console.
fn admitted(
    mut request: hyper::Request<Incoming>,
    generation: u64,
    controller: &str,
) -> Result<(hyper::Request<Incoming>, bool), Box<Problem>> {
    let text = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    let its = text(GENERATION).and_then(|text| text.parse::<u64>().ok());
    if its != Some(generation) {
        let its = its.map_or_else(|| "no number".to_owned(), |its| its.to_string());
        let message = format!("the request belongs to connection {its}, but this is connection {generation}");
        return Err(Box::new(Problem::new(ProblemKind::Conflict, message)));
    }
    let role = text(ROLE).and_then(|role| Role::parse(role).ok());
    let (Some(principal), Some(role)) = (text(CALLER), role) else {
        let message = "the controller's request names no caller";
        return Err(Box::new(Problem::new(ProblemKind::Unauthorized, message)));
    };
    let principal = match principal {
        "daemon" => format!("controller {controller}"),
        principal => format!("{principal} by controller {controller}"),
    };
    let is_console = request.method() == Method::CONNECT;
    request.extensions_mut().insert(OfController(Caller { principal, role, scopes: None }));
    if is_console {
        *request.method_mut() = Method::GET;
        let path = request.uri().path_and_query().cloned();
        let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
        *request.uri_mut() = Uri::from(path);
        request.headers_mut().insert(header::UPGRADE, HeaderValue::from_static(CONSOLE));
    }
    Ok((request, is_console))
}

/// Converts the answer to an upgrade: HTTP/2 uses status 200 for HTTP/1's 101.
fn without_upgrade(mut answer: Response) -> Response {
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        *answer.status_mut() = StatusCode::OK;
        answer.headers_mut().remove(header::CONNECTION);
        answer.headers_mut().remove(header::UPGRADE);
    }
    answer
}

/// `PUT /node/v1/machines`: assigns a machine to this node, or changes what it boots.
async fn assign(
    State(service): State<Service>,
    JsonBody(machine): JsonBody<AssignedMachine>,
) -> Result<Json<()>, Failure> {
    let handle = service.clone();
    service.to_the_end(async move { create_machine::assign(&handle, machine).await }).await?;
    Ok(Json(()))
}

/// `PUT /node/v1/check`: whether this node could have a machine.
async fn check(
    State(service): State<Service>,
    JsonBody(machine): JsonBody<AssignedMachine>,
) -> Result<Json<()>, Failure> {
    create_machine::check_assigned(&service, &machine).await?;
    Ok(Json(()))
}

/// What of a machine its controller keeps: that is changed there.
const MANAGED: [(&str, &Method); 13] = [
    ("/api/v1/machines", &Method::POST),
    ("/api/v1/machines/{machine}", &Method::PATCH),
    ("/api/v1/machines/{machine}", &Method::DELETE),
    ("/api/v1/machines/{machine}/personality", &Method::PATCH),
    ("/api/v1/machines/{machine}/pin", &Method::PUT),
    ("/api/v1/machines/{machine}/pin", &Method::DELETE),
    ("/api/v1/catalogs", &Method::POST),
    ("/api/v1/join-tokens", &Method::POST),
    ("/api/v1/hosts/{host}", &Method::PATCH),
    ("/api/v1/hosts/{host}", &Method::DELETE),
    ("/api/v1/hosts/{host}/accept", &Method::POST),
    ("/api/v1/hosts/{host}/drain", &Method::POST),
    ("/api/v1/images/{image}/edit", &Method::POST),
];

/// Why a node refuses a request that does not come from its controller, if it does.
pub(super) fn kept_elsewhere(service: &Service, request: &Request<Body>, path: &str) -> Option<Problem> {
    let membership = service.membership()?;
    let is_kept = MANAGED.iter().any(|(kept, method)| *kept == path && *method == request.method());
    // A machine that the controller does not know can be removed only here.
    let is_forced = *request.method() == Method::DELETE
        && path == "/api/v1/machines/{machine}"
        && request.uri().query() == Some("force=true");
    if !is_kept || is_forced || request.extensions().get::<OfController>().is_some() {
        return None;
    }
    let Membership { controller, name, .. } = membership;
    let message =
        format!("this daemon is the node of host '{name}', and its controller {controller} manages that");
    Some(
        Problem::new(ProblemKind::Conflict, message)
            .advise(
                "send the request to the controller; start, stop and reset also work here. A machine that the controller does not know is removed here with --force",
            ),
    )
}

/// Waits until the daemon ends.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped, which is an end too.
    let _ = stop.wait_for(|stop| *stop).await;
}
