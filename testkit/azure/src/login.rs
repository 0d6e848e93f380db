//! A fake login service and instance metadata service, written from Microsoft's documentation.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

/// The only tenant.
pub const TENANT: &str = "contoso.example";
/// The client ID of the only application.
pub const CLIENT: &str = "11111111-2222-3333-4444-555555555555";
/// Its secret. Contains each character that a form must escape.
pub const SECRET: &str = "s3cret~+/=&%x y";
/// The cluster's token that the application trusts.
pub const ASSERTION: &str = "eyJ.cluster-token.sig";

/// The state of the service.
#[derive(Debug, Default)]
pub struct Login {
    /// How many tokens were granted.
    pub given: usize,
    /// The next answers, which do not depend on the request: status and AADSTS code.
    pub next: Vec<(u16, u64)>,
    /// Whether the secret has expired.
    pub is_expired: bool,
    /// The query of the last metadata request.
    pub metadata_query: String,
}

/// The running server. Dropping it ends it.
#[derive(Debug)]
pub struct LoginServer {
    /// Its URL, without a trailing slash.
    pub url: String,
    login: Arc<Mutex<Login>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for LoginServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl LoginServer {
    /// Starts the server on a free port of loopback.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let login = Arc::new(Mutex::new(Login::default()));
        let shared = login.clone();
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let login = shared.clone();
                let service = service_fn(move |request| answer(login.clone(), request));
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { url, login, task }
    }

    /// Locks the state.
    pub fn login(&self) -> MutexGuard<'_, Login> {
        self.login.lock().unwrap()
    }
}

type Reply = Response<Full<Bytes>>;

async fn answer(login: Arc<Mutex<Login>>, request: Request<Incoming>) -> Result<Reply, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let mut login = login.lock().unwrap();
    if let Some((status, code)) = login.next.pop() {
        return Ok(refusal(status, code));
    }
    let path = parts.uri.path().to_owned();
    if path == "/metadata/identity/oauth2/token" {
        let has_header = parts.headers.get("metadata").is_some_and(|value| value == "true");
        if parts.method != Method::GET || !has_header || parts.headers.contains_key("x-forwarded-for") {
            return Ok(refusal(400, 0));
        }
        login.metadata_query = parts.uri.query().unwrap_or_default().to_owned();
        return Ok(grant(&mut login, true));
    }
    let form = form(&body);
    let field = |name: &str| form.get(name).map(String::as_str).unwrap_or_default();
    let is_login = parts.method == Method::POST
        && parts.headers.get("content-type").is_some_and(|it| it == "application/x-www-form-urlencoded")
        && field("grant_type") == "client_credentials"
        && field("scope") == "https://management.azure.com/.default";
    if !is_login {
        return Ok(refusal(400, 900_144));
    }
    if path != format!("/{TENANT}/oauth2/v2.0/token") {
        return Ok(refusal(400, 90_002));
    }
    if field("client_id") != CLIENT {
        return Ok(refusal(400, 700_016));
    }
    let is_right = match field("client_assertion") {
        "" => field("client_secret") == SECRET,
        assertion => {
            assertion == ASSERTION
                && field("client_assertion_type") == "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
        }
    };
    Ok(match (is_right, login.is_expired) {
        (false, _) => refusal(401, 7_000_215),
        (true, true) => refusal(401, 7_000_222),
        (true, false) => grant(&mut login, false),
    })
}

fn form(body: &[u8]) -> BTreeMap<String, String> {
    let text = std::str::from_utf8(body).unwrap();
    text.split('&')
        .filter_map(|field| field.split_once('='))
        .map(|(name, value)| (name.to_owned(), plain(value)))
        .collect()
}

fn plain(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, tail)) = rest.split_first() {
        if *first == b'%' {
            bytes.push(u8::from_str_radix(std::str::from_utf8(&tail[..2]).unwrap(), 16).unwrap());
            rest = &tail[2..];
        } else {
            bytes.push(if *first == b'+' { b' ' } else { *first });
            rest = tail;
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn grant(login: &mut Login, as_text: bool) -> Reply {
    login.given += 1;
    let expires = if as_text { "\"3600\"" } else { "3600" };
    let body = format!(
        "{{\"token_type\":\"Bearer\",\"expires_in\":{expires},\"access_token\":\"token-{}\"}}",
        login.given
    );
    Response::new(Full::new(Bytes::from(body)))
}

/// Quotes the secret in its text, as the real service does.
fn refusal(status: u16, code: u64) -> Reply {
    let body = format!(
        "{{\"error\":\"invalid_client\",\"error_description\":\"AADSTS{code}: not with '{SECRET}'\",\"error_codes\":[{code}]}}"
    );
    let mut reply = Response::new(Full::new(Bytes::from(body)));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap();
    reply
}
