//! The web console: static files, sessions, and the API, on a port of its own.
//!
//! ```text
//!   headwater console --API--> ticket (60 s, one use)
//!   browser: GET /#ticket=..  --> POST /session {ticket} --> secret, kept by the page alone
//!            GET /api/v1/..  Authorization: Bearer SECRET --> the operations of the API, with the session's role
//!                            Authorization: Bearer hwt_.. --> the same with the role of a named token
//!            /login --> the identity provider and back to /?code=.. --> a named token (`login.rs`)
//!            POST /api/v1/machines/NAME/console/ticket --> WebSocket /console with that ticket, once, within 60 s
//!            POST /api/v1/machines/NAME/display/ticket --> WebSocket /display in the same way
//! ```
//!
//! A browser also sends requests that pages of other sites cause (CSRF). So there are no cookies, and the `Origin` of a
//! request, if it has one, must be the console itself: a foreign page can neither read nor change anything. Without TLS,
//! `Host` must be a loopback name too, so that a foreign name that resolves to this port is refused. With TLS the
//! certificate ensures that.

mod assets;
mod machine_socket;
mod sessions;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use headwater_api::{Problem, ProblemKind, Role};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Presented;
use crate::extract::Body;
use crate::login;
use crate::server::{self, Port};
use crate::token::{self, bearer};

use machine_socket::MachineRight;
pub(crate) use machine_socket::MachineSocket;
pub(crate) use sessions::TicketError;
use sessions::{SessionRight, Tickets};

/// The longest request body of `/session`, in bytes.
const SESSION_BODY_MAX_BYTES: usize = 1024;

/// The Content-Security-Policy of the page: it loads nothing from elsewhere, and nobody may frame it. Svelte creates its
/// templates through the only trusted-types policy.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
     trusted-types svelte-trusted-html";

/// The headers of every answer.
const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=()"),
];

/// The URLs of a service over TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reachable {
    /// The URL of the API.
    pub api: Option<String>,
    /// The URL of the console, with the slash at its end.
    pub console: Option<String>,
    /// The fingerprint of the certificate, if the daemon made that itself: `sha256:` and 64 hexadecimal digits.
    pub fingerprint: Option<String>,
}

/// The URLs of the service, and the tickets with which a browser opens sessions and WebSockets.
#[derive(Debug, Default)]
pub(crate) struct WebState {
    reachable: OnceLock<Reachable>,
    tickets: Tickets<SessionRight>,
    sockets: Tickets<MachineRight>,
}

impl WebState {
    /// The URLs of the service.
    pub(crate) fn reachable(&self) -> Reachable {
        self.reachable.get().cloned().unwrap_or_default()
    }
}

impl Service {
    /// Sets the URLs under which the service is reached, once. The daemon calls it when its ports are open.
    pub fn is_reached_at(&self, reachable: Reachable) {
        // A second call changes nothing.
        let _ = self.web().reachable.set(reachable);
    }
}

/// Serves the console until `stop` is true and the requests in flight are answered. `router` has all operations.
pub async fn serve(
    port: Port,
    router: Router,
    service: Service,
    stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let router = console(router, service, Hosts::new(port.address()?, port.is_encrypted()));
    server::serve_bounded(port, router, server::Limits::TCP, stop).await;
    Ok(())
}

fn console(router: Router, service: Service, hosts: Hosts) -> Router {
    let api = router.layer(middleware::from_fn_with_state(service.clone(), require_caller));
    let session = Router::new()
        .route("/session", post(open).delete(close))
        .route("/console", get(machine_socket::attach).layer(Extension(MachineSocket::Console)))
        .route("/display", get(machine_socket::attach).layer(Extension(MachineSocket::Display)))
        .layer(DefaultBodyLimit::max(SESSION_BODY_MAX_BYTES))
        .with_state(service.clone());
    let files = assets::ALL.iter().fold(Router::new(), |router, asset| {
        router.route(asset.path, get(async |headers| asset.answer(&headers)))
    });
    files
        .merge(session)
        .merge(login::routes(service))
        .merge(api)
        .layer(middleware::from_fn_with_state(hosts, refuse_foreign))
        .layer(middleware::map_response(protect))
}

/// The host names under which a browser may reach the console.
#[derive(Clone)]
enum Hosts {
    /// Over HTTP, only these.
    Loopback(Arc<[String; 2]>),
    /// Over HTTPS, any.
    Encrypted,
}

impl Hosts {
    fn new(address: SocketAddr, is_encrypted: bool) -> Self {
        if is_encrypted {
            return Self::Encrypted;
        }
        Self::Loopback(Arc::new([address.to_string(), format!("localhost:{}", address.port())]))
    }

    fn has(&self, host: &str) -> bool {
        match self {
            Self::Loopback(names) => names.iter().any(|own| own == host),
            Self::Encrypted => true,
        }
    }

    fn scheme(&self) -> &'static str {
        match self {
            Self::Loopback(_) => "http://",
            Self::Encrypted => "https://",
        }
    }

    fn advice(&self) -> String {
        match self {
            Self::Loopback(names) => {
                let [address, name] = &**names;
                format!("open http://{address}/ or http://{name}/, with the same port if you forward it")
            }
            Self::Encrypted => "open the console itself, and not a page of another site".to_owned(),
        }
    }

    /// Why a request is refused, if it is.
    fn refusal(&self, method: &Method, path: &str, headers: &HeaderMap) -> Option<&'static str> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok()).filter(|_| hosts.next().is_none());
        let Some(host) = host.filter(|host| self.has(host)) else {
            return Some("its header Host does not name this console");
        };
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let own = |origin: &HeaderValue| {
            origin.to_str().is_ok_and(|origin| origin.strip_prefix(self.scheme()) == Some(host))
        };
        if origins.any(|origin| !own(origin)) {
            return Some("its header Origin names another site");
        }
        // A link on any site may lead to the page, but everything else is requested by the page itself.
        let is_page = method == Method::GET && assets::ALL.iter().any(|asset| asset.path == path);
        let mut sites = headers.get_all("sec-fetch-site").iter();
        if !is_page && sites.any(|site| site.as_bytes() != b"same-origin") {
            return Some("another site caused the request");
        }
        None
    }
}

async fn refuse_foreign(State(hosts): State<Hosts>, request: Request, next: Next) -> Response {
    let Some(reason) = hosts.refusal(request.method(), request.uri().path(), request.headers()) else {
        return next.run(request).await;
    };
    let problem = Problem::new(ProblemKind::Invalid, format!("the console refuses the request: {reason}"));
    server::refusal(problem.advise(hosts.advice()))
}

async fn protect(mut response: Response) -> Response {
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    // Static files have their own value.
    response.headers_mut().entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

async fn require_caller(State(service): State<Service>, request: Request, next: Next) -> Response {
    let presented = match bearer(request.headers()) {
        Some(secret) if secret.starts_with(token::NAMED_PREFIX) => {
            return match server::named(&service, secret).await {
                Ok(presented) => server::let_in(request, presented, next).await,
                Err(problem) => server::refusal(problem),
            };
        }
        Some(secret) if !secret.starts_with(token::SESSION_PREFIX) => {
            let message = "the console accepts only named tokens, which begin with hwt_";
            let problem = Problem::new(ProblemKind::Unauthorized, message).advise(OPEN_ANOTHER);
            return ([(header::WWW_AUTHENTICATE, "Bearer")], server::refusal(problem)).into_response();
        }
        Some(secret) => service.session(secret).await,
        None => Ok(None),
    };
    match presented {
        Ok(Some(session)) => {
            let presented = Presented::Session { principal: session.principal, role: session.role };
            server::let_in(request, presented, next).await
        }
        Ok(None) => {
            let problem =
                Problem::new(ProblemKind::Unauthorized, "there is no such session, or it has ended");
            let refusal = server::refusal(problem.advise(OPEN_ANOTHER));
            ([(header::WWW_AUTHENTICATE, "Bearer")], refusal).into_response()
        }
        Err(error) => Failure::from(error).into_response(),
    }
}

/// The advice to a page without a session.
const OPEN_ANOTHER: &str =
    "'headwater console' prints a new link, and 'headwater token create NAME' makes a token to sign in with";

/// The ticket of a link.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OpenSession {
    ticket: String,
}

/// A session that was opened, for the page that opened it.
#[derive(Serialize)]
struct OpenedSession {
    secret: String,
    principal: String,
    role: Role,
}

async fn open(
    State(service): State<Service>,
    Body(request): Body<OpenSession>,
) -> Result<Json<OpenedSession>, Failure> {
    let Some(ticket) = service.web().tickets.take(&request.ticket, service.now_ms()) else {
        let message = "the link was used already, or it is older than a minute";
        return Err(Failure(Problem::new(ProblemKind::Unauthorized, message).advise(OPEN_ANOTHER)));
    };
    let handle = service.clone();
    let (secret, session) = service.to_the_end(async move { handle.open_session(ticket).await }).await?;
    Ok(Json(OpenedSession { secret, principal: session.principal, role: session.role }))
}

async fn close(
    State(service): State<Service>,
    headers: HeaderMap,
) -> Result<axum::http::StatusCode, Failure> {
    let Some(secret) = bearer(&headers) else { return Ok(axum::http::StatusCode::NO_CONTENT) };
    // Only a caller with a session or a login uses a writer's transaction.
    if secret.starts_with(token::NAMED_PREFIX) {
        service.log_out(secret).await?;
    } else if service.session(secret).await?.is_some() {
        service.close_session(secret).await?;
    }
    Ok(axum::http::StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests;
