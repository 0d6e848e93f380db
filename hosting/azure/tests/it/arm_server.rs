//! A fake Azure Resource Manager that creates and deletes resources and injects faults, written from Microsoft's
//! documentation. An operation ends at its second poll, and a new resource may not be visible at first.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Notify;

/// The fault that one request meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArmFault {
    /// 429 with `Retry-After: 3`.
    Throttled,
    Unavailable,
    /// The request is executed, and the connection ends without an answer.
    CutAfter,
    /// The token is refused.
    Unauthorized,
    /// The client is killed before the request is executed, or after.
    KillBefore,
    KillAfter,
}

#[derive(Default)]
pub struct Management {
    pub resources: BTreeMap<String, Value>,
    /// How many times each resource was created.
    pub created: BTreeMap<String, usize>,
    /// How many times an existing resource was changed.
    pub changed: usize,
    pub requests: usize,
    pub faults: HashMap<usize, ArmFault>,
    /// A new resource is not visible in the first `lag` requests.
    pub lag: usize,
    /// Creations fail with this error code and message.
    pub failure: Option<(&'static str, &'static str)>,
    unseen: BTreeMap<String, usize>,
    operations: Vec<Operation>,
}

struct Operation {
    path: String,
    looks: usize,
    error: Value,
}

pub struct ArmServer {
    pub url: String,
    pub killed: Arc<Notify>,
    management: Arc<Mutex<Management>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for ArmServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ArmServer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (management, killed) = (Arc::new(Mutex::new(Management::default())), Arc::new(Notify::new()));
        let shared = (management.clone(), killed.clone(), url.clone());
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (management, killed, url) = shared.clone();
                tokio::spawn(async move {
                    let service = service_fn(|request| {
                        let (management, killed, url) = (management.clone(), killed.clone(), url.clone());
                        answer(management, killed, url, request)
                    });
                    // A cut connection ends it with an error.
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { url, killed, management, task }
    }

    pub fn management(&self) -> MutexGuard<'_, Management> {
        self.management.lock().unwrap()
    }
}

type Reply = Response<Full<Bytes>>;

async fn answer(
    management: Arc<Mutex<Management>>,
    killed: Arc<Notify>,
    url: String,
    request: Request<Incoming>,
) -> Result<Reply, std::io::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let header = |name: &str| parts.headers.get(name).and_then(|it| it.to_str().ok()).map(str::to_owned);
    let path = parts.uri.path().to_owned();
    if path.ends_with("/oauth2/v2.0/token") {
        return Ok(reply(200, &json!({"access_token": "a-token", "expires_in": 3600})));
    }
    let (reply, fault) = {
        let mut management = management.lock().unwrap();
        let fault = management.faults.get(&management.requests).copied();
        management.requests += 1;
        let is_known = header("authorization").as_deref() == Some("Bearer a-token");
        let reply = match fault {
            Some(ArmFault::Throttled) => {
                let mut throttled = reply(429, &json!({"error": {"code": "TooManyRequests"}}));
                throttled.headers_mut().insert("retry-after", HeaderValue::from_static("3"));
                throttled
            }
            Some(ArmFault::Unavailable) => reply(503, &Value::Null),
            Some(ArmFault::Unauthorized) => {
                reply(401, &json!({"error": {"code": "ExpiredAuthenticationToken"}}))
            }
            Some(ArmFault::KillBefore) => reply(500, &Value::Null),
            _ if !is_known => reply(401, &Value::Null),
            _ => {
                let is_conditional = header("if-none-match").is_some();
                management.carry_out(&parts.method, &path, &url, &body, is_conditional)
            }
        };
        (reply, fault)
    };
    match fault {
        Some(ArmFault::CutAfter) => Err(std::io::Error::other("cut")),
        Some(ArmFault::KillBefore | ArmFault::KillAfter) => {
            killed.notify_one();
            std::future::pending().await
        }
        _ => Ok(reply),
    }
}

fn reply(status: u16, body: &Value) -> Reply {
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let mut reply = Response::new(Full::new(Bytes::from(text)));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap();
    reply
}

impl Management {
    fn carry_out(
        &mut self,
        method: &Method,
        path: &str,
        url: &str,
        body: &Bytes,
        is_conditional: bool,
    ) -> Reply {
        if let Some(number) = path.strip_prefix("/operations/") {
            return self.look_at(number.parse().unwrap());
        }
        match *method {
            Method::GET => {
                let last = self.operations.iter().rposition(|operation| operation.path == path);
                if let Some(last) = last {
                    self.advance(last);
                }
                let unseen = self.unseen.get_mut(path).filter(|left| **left > 0);
                match (unseen, self.resources.get(path)) {
                    (None, Some(there)) => reply(200, there),
                    (Some(left), _) => {
                        *left -= 1;
                        missing()
                    }
                    (None, None) => missing(),
                }
            }
            Method::PUT => {
                if self.resources.contains_key(path) && is_conditional {
                    return reply(412, &json!({"error": {"code": "PreconditionFailed"}}));
                }
                let mut wanted: Value = serde_json::from_slice(body).unwrap();
                if let Some(there) = self.resources.get(path) {
                    let is_same = there["tags"] == wanted["tags"];
                    self.changed += usize::from(!is_same);
                    return reply(200, there);
                }
                *self.created.entry(path.to_owned()).or_default() += 1;
                self.unseen.insert(path.to_owned(), self.lag);
                wanted["properties"]["provisioningState"] = "Creating".into();
                self.resources.insert(path.to_owned(), wanted);
                let error = self
                    .failure
                    .map_or(Value::Null, |(code, message)| json!({"code": code, "message": message}));
                self.accepted(201, path, url, error)
            }
            Method::DELETE => {
                if self.resources.remove(path).is_none() {
                    return reply(204, &Value::Null);
                }
                self.accepted(202, path, url, Value::Null)
            }
            _ => reply(405, &Value::Null),
        }
    }

    fn accepted(&mut self, status: u16, path: &str, url: &str, error: Value) -> Reply {
        let mut accepted = reply(status, &json!({}));
        let operation = format!("{url}/operations/{}?api-version=1", self.operations.len());
        accepted.headers_mut().insert("azure-asyncoperation", HeaderValue::from_str(&operation).unwrap());
        self.operations.push(Operation { path: path.to_owned(), looks: 0, error });
        accepted
    }

    fn look_at(&mut self, number: usize) -> Reply {
        if !self.advance(number) {
            return reply(200, &json!({"status": "InProgress"}));
        }
        match &self.operations[number].error {
            Value::Null => reply(200, &json!({"status": "Succeeded"})),
            error => reply(200, &json!({"status": "Failed", "error": error})),
        }
    }

    /// An operation ends at the second poll of the operation or of its resource.
    fn advance(&mut self, number: usize) -> bool {
        let operation = &mut self.operations[number];
        operation.looks += 1;
        if operation.looks < 2 {
            return false;
        }
        let state = if operation.error.is_null() { "Succeeded" } else { "Failed" };
        if let Some(there) = self.resources.get_mut(&operation.path) {
            there["properties"]["provisioningState"] = state.into();
        }
        true
    }
}

fn missing() -> Reply {
    reply(404, &json!({"error": {"code": "ResourceNotFound", "message": "it does not exist"}}))
}
