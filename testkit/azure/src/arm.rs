//! A fake Azure Resource Manager: the server, the faults of its requests, and their log. `management.rs` has the
//! resources.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Notify;

mod address;
mod disks;
mod galleries;
mod machines;
mod management;
mod networks;
mod offers;
mod operations;
mod rates;

pub use machines::MachineFacts;
pub use management::Management;
pub use offers::{Family, Size};

/// The fault that one request meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArmFault {
    /// 429 with `Retry-After: 3`.
    Throttled,
    /// 429 without `Retry-After`.
    ThrottledSilently,
    /// 503.
    Unavailable,
    /// The connection ends without an answer; the request is not executed.
    CutBefore,
    /// The request is executed, and the connection ends without an answer.
    CutAfter,
    /// The token is refused.
    Unauthorized,
    /// The client is killed before the request is executed.
    KillBefore,
    /// The client is killed after the request is executed, before it gets the answer.
    KillAfter,
    /// The request is refused with this status, error code and message.
    Refused(u16, &'static str, &'static str),
}

/// A fault for a request that is chosen by its resource.
#[derive(Clone, Debug)]
pub struct FaultRule {
    /// The method of the request, or any.
    pub method: Option<&'static str>,
    /// A text that the path of the resource contains. A poll of an operation has the path of its resource. For a blob, the
    /// path and the query, such as `comp=page`; it knows only cuts and kills.
    pub contains: String,
    /// How many such requests pass before the fault. The rule then ends.
    pub skip: usize,
    /// The fault.
    pub fault: ArmFault,
}

/// A received request.
#[derive(Clone, Debug)]
pub struct LoggedRequest {
    /// Its method.
    pub method: String,
    /// Its path.
    pub path: String,
    /// Its query.
    pub query: String,
    /// Its body; `Null` without a body.
    pub body: Value,
    /// The status of the answer; 0 if the connection was cut or the client killed.
    pub status: u16,
    /// The time of the server's clock.
    pub at: Duration,
}

/// The clock of the server: the time since an arbitrary instant.
pub type ServerClock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// The running server. Dropping it ends it.
#[derive(Debug)]
pub struct ArmServer {
    /// Its URL, without a trailing slash: the authority, the management endpoint and the metadata service.
    pub url: String,
    /// Notified by the faults that kill a client.
    pub killed: Arc<Notify>,
    management: Arc<Mutex<Management>>,
    task: tokio::task::JoinHandle<()>,
}

/// The token that the server grants: a JWT without a signature, with `appid`, `oid` and `tid`.
pub const TOKEN: &str = concat!(
    "eyJhbGciOiJub25lIn0.",
    "eyJhcHBpZCI6IjExMTExMTExLTIyMjItMzMzMy00NDQ0LTU1NTU1NTU1NTU1NSIsIm9pZCI6IjIyMjIyMjIyLTMzMzMtNDQ0NC01",
    "NTU1LTY2NjY2NjY2NjY2NiIsInRpZCI6IjMzMzMzMzMzLTQ0NDQtNTU1NS02NjY2LTc3Nzc3Nzc3Nzc3NyJ9",
    "."
);

/// The file to which the bodies of requests are added, for `oracle/` of this package.
const BODIES_VARIABLE: &str = "HEADWATER_AZURE_BODIES";

impl Drop for ArmServer {
    fn drop(&mut self) {
        self.task.abort();
        if let Some(file) = std::env::var_os(BODIES_VARIABLE) {
            let bodies = self.management().bodies();
            let mut file = OpenOptions::new().create(true).append(true).open(file).unwrap();
            // One call, because other tests write to the file, too.
            file.write_all(bodies.as_bytes()).unwrap();
        }
    }
}

#[derive(Clone)]
struct Server {
    management: Arc<Mutex<Management>>,
    killed: Arc<Notify>,
    url: String,
}

impl ArmServer {
    /// Starts the server on a free port of loopback, with the clock of this host.
    pub async fn start() -> Self {
        let begun = Instant::now();
        Self::start_with(Arc::new(move || begun.elapsed())).await
    }

    /// Starts the server with this clock.
    pub async fn start_with(clock: ServerClock) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let management = Arc::new(Mutex::new(Management::new(clock)));
        let server = Server { management: management.clone(), killed: Arc::default(), url: url.clone() };
        let killed = server.killed.clone();
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let server = server.clone();
                tokio::spawn(async move {
                    let service = service_fn(|request| answer(server.clone(), request));
                    // A cut connection ends it with an error.
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { url, killed, management, task }
    }

    /// Locks the resources.
    pub fn management(&self) -> MutexGuard<'_, Management> {
        self.management.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) type Reply = Response<Full<Bytes>>;

async fn answer(server: Server, request: Request<Incoming>) -> Result<Reply, io::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let path = parts.uri.path();
    if path.ends_with("/oauth2/v2.0/token") || path == "/metadata/identity/oauth2/token" {
        let mut management = server.management();
        management.logins.push(String::from_utf8_lossy(&body).into_owned());
        if management.is_login_refused {
            return Ok(reply(401, &json!({"error": "invalid_client", "error_codes": [7_000_215]})));
        }
        return Ok(reply(200, &json!({"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})));
    }
    if path.starts_with("/blobs/") {
        let (reply, fault) = server.blob(&parts, &body);
        return server.faulty(reply?, fault).await;
    }
    if path.starts_with("/fake/") {
        return Ok(server.control(path, &body));
    }
    let (reply, fault) = server.execute(&parts, &body);
    server.faulty(reply, fault).await
}

impl Server {
    fn management(&self) -> MutexGuard<'_, Management> {
        self.management.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The end of a request with a fault.
    async fn faulty(&self, reply: Reply, fault: Option<ArmFault>) -> Result<Reply, io::Error> {
        match fault {
            Some(ArmFault::CutBefore | ArmFault::CutAfter) => Err(io::Error::other("cut")),
            Some(ArmFault::KillBefore | ArmFault::KillAfter) => {
                self.killed.notify_one();
                std::future::pending().await
            }
            _ => Ok(reply),
        }
    }

    /// A request for the blob of a disk. Of faults it knows only cuts and kills.
    fn blob(&self, parts: &Parts, body: &Bytes) -> (Result<Reply, io::Error>, Option<ArmFault>) {
        let number = parts.uri.path().trim_start_matches("/blobs/").parse::<usize>();
        let (blob, fault) = {
            let mut management = self.management();
            let shown = parts.uri.path_and_query().map_or("", |it| it.as_str());
            let fault = management.fault_of(parts.method.as_str(), shown);
            (number.ok().and_then(|number| management.blobs.get(number).cloned()), fault)
        };
        let Some(blob) = blob else { return (Ok(reply(404, &Value::Null)), fault) };
        if matches!(fault, Some(ArmFault::KillBefore | ArmFault::CutBefore)) {
            return (Ok(reply(500, &Value::Null)), fault);
        }
        let mut blob = blob.lock().unwrap_or_else(PoisonError::into_inner);
        (crate::blob::answer(&mut blob, parts, body).map_err(io::Error::other), fault)
    }

    /// Faults and the log, for clients in other languages.
    fn control(&self, path: &str, body: &Bytes) -> Reply {
        let mut management = self.management();
        match path {
            "/fake/log" => {
                let log: Vec<Value> = management.log.iter().map(logged).collect();
                reply(200, &Value::Array(log))
            }
            "/fake/throttle-next" => {
                let next = management.requests;
                management.faults.insert(next, ArmFault::Throttled);
                reply(200, &json!({}))
            }
            "/fake/resources" => {
                let resources: Value = management.resources.clone().into_iter().collect();
                reply(200, &resources)
            }
            "/fake/settings" => {
                let wanted: Value = serde_json::from_slice(body).unwrap_or_default();
                if let Some(looks) = wanted["looks"].as_u64() {
                    management.looks = usize::try_from(looks).unwrap_or(usize::MAX);
                }
                management.retry_after_s = wanted["retryAfter"].as_u64();
                reply(200, &json!({}))
            }
            _ => reply(404, &Value::Null),
        }
    }

    /// Executes a request unless its fault prevents it, and logs it.
    fn execute(&self, parts: &Parts, body: &Bytes) -> (Reply, Option<ArmFault>) {
        let header = |name: &str| parts.headers.get(name).and_then(|it| it.to_str().ok());
        let call = Call {
            method: parts.method.as_str(),
            path: parts.uri.path(),
            query: parts.uri.query().unwrap_or_default(),
            body,
            is_conditional: header("if-none-match").is_some(),
            url: &self.url,
        };
        let is_known =
            header("authorization").and_then(|it| it.strip_prefix("Bearer ")).is_some_and(|it| it == TOKEN);
        let mut management = self.management();
        let fault = management.next_fault(&call);
        let reply = match fault {
            Some(ArmFault::Throttled) => {
                let mut throttled = refusal(429, "TooManyRequests", "wait");
                throttled.headers_mut().insert("retry-after", HeaderValue::from_static("3"));
                throttled
            }
            Some(ArmFault::ThrottledSilently) => refusal(429, "TooManyRequests", "wait"),
            Some(ArmFault::Unavailable) => reply(503, &Value::Null),
            Some(ArmFault::Unauthorized) => refusal(401, "ExpiredAuthenticationToken", "it has expired"),
            Some(ArmFault::Refused(status, code, message)) => refusal(status, code, message),
            Some(ArmFault::KillBefore | ArmFault::CutBefore) => reply(500, &Value::Null),
            _ if !is_known => refusal(401, "AuthenticationFailed", "there is no valid token"),
            None | Some(ArmFault::CutAfter | ArmFault::KillAfter) => management.carry_out(&call),
        };
        let is_answered = !matches!(
            fault,
            Some(ArmFault::CutBefore | ArmFault::CutAfter | ArmFault::KillBefore | ArmFault::KillAfter)
        );
        let status = if is_answered { reply.status().as_u16() } else { 0 };
        management.record(&call, status);
        (reply, fault)
    }
}

fn logged(request: &LoggedRequest) -> Value {
    json!({
        "method": request.method, "path": request.path, "query": request.query, "body": request.body,
        "status": request.status,
    })
}

/// One request.
pub(crate) struct Call<'a> {
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    pub(crate) query: &'a str,
    pub(crate) body: &'a Bytes,
    pub(crate) is_conditional: bool,
    /// The URL of the server.
    pub(crate) url: &'a str,
}

impl Call<'_> {
    pub(crate) fn has(&self, part: &str) -> bool {
        self.query.split('&').any(|it| it.eq_ignore_ascii_case(part))
    }

    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        self.query.split('&').filter_map(|it| it.split_once('=')).find(|it| it.0 == name).map(|it| it.1)
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(self.body).unwrap_or_default()
    }
}

pub(crate) fn reply(status: u16, body: &Value) -> Reply {
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let mut reply = Response::new(Full::new(Bytes::from(text)));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap();
    reply.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
    reply
}

pub(crate) fn refusal(status: u16, code: &str, message: &str) -> Reply {
    reply(status, &json!({"error": {"code": code, "message": message}}))
}

/// A refused request: status, error code, message.
pub(crate) type Refusal = (u16, &'static str, String);

pub(crate) fn refuse<T>(status: u16, code: &'static str, message: impl Into<String>) -> Result<T, Refusal> {
    Err((status, code, message.into()))
}
