//! An HTTP/1.1 client with TLS and persistent connections. It follows no redirects and does not retry, except if a
//! persistent connection was closed before the request was sent.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{HOST, HeaderMap, HeaderValue};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::error::{AzureError, AzureErrorKind};

/// The longest answer.
pub const ANSWER_MAX_BYTES: usize = 8 << 20;

/// Timeout for a connection, including the TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// Timeout for an answer, including its body.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The most idle connections that are kept for one server.
const IDLE_MAX: usize = 16;

/// The address of Azure's instance metadata service, which has no TLS.
const METADATA_HOST: &str = "169.254.169.254";

/// A complete answer.
#[derive(Clone)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

impl Answer {
    /// The value of a header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The time that the server asks the client to wait.
    pub fn retry_after(&self) -> Option<Duration> {
        self.header("retry-after").and_then(|text| text.trim().parse().ok()).map(Duration::from_secs)
    }
}

impl fmt::Debug for Answer {
    /// Omits the body and the headers, which may contain a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("status", &self.status).finish_non_exhaustive()
    }
}

/// A failed request.
#[derive(Debug)]
pub struct SendError {
    /// Whether the server may have executed the request.
    pub may_be_done: bool,
    /// The reason.
    pub why: String,
}

impl SendError {
    fn not_sent(why: impl fmt::Display) -> Self {
        Self { may_be_done: false, why: why.to_string() }
    }
}

type Sender = SendRequest<Full<Bytes>>;

/// Sends each request over an idle connection or a new one.
pub struct HttpClient {
    tls: TlsConnector,
    idle: Mutex<HashMap<String, Vec<Sender>>>,
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpClient").finish_non_exhaustive()
    }
}

impl HttpClient {
    /// A client that trusts the certificate authorities of this host.
    pub fn new() -> Result<Arc<Self>, AzureError> {
        let mut roots = RootCertStore::empty();
        // A certificate that cannot be parsed is skipped, as in other programs.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| AzureError::new(AzureErrorKind::Invalid, format!("cannot set up TLS: {error}")))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Arc::new(Self { tls: TlsConnector::from(Arc::new(config)), idle: Mutex::default() }))
    }

    /// Sends a request, and reads the whole answer. The request's URI must have a scheme and a host.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Result<Answer, SendError> {
        let origin = Origin::of(request.uri()).map_err(SendError::not_sent)?;
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let path: Uri = path.parse().map_err(SendError::not_sent)?;
        let host = HeaderValue::from_str(&origin.authority).map_err(SendError::not_sent)?;
        parts.uri = path;
        parts.headers.insert(HOST, host);
        let mut request = Request::from_parts(parts, body);
        while let Some(mut sender) = self.idle(&origin.key) {
            match tokio::time::timeout(ANSWER_TIMEOUT, sender.try_send_request(request)).await {
                Err(_) => return Err(late()),
                Ok(Ok(answer)) => return self.read(&origin.key, sender, answer).await,
                // The server has closed the idle connection, and the request was not sent.
                Ok(Err(mut failed)) => match failed.take_message() {
                    Some(again) => request = again,
                    None => return Err(lost(failed.error())),
                },
            }
        }
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, self.connect(&origin));
        let connected = connecting.await.map_err(|_| SendError::not_sent("no connection within 15 s"))?;
        let mut sender = connected.map_err(SendError::not_sent)?;
        match tokio::time::timeout(ANSWER_TIMEOUT, sender.send_request(request)).await {
            Err(_) => Err(late()),
            Ok(Err(error)) => Err(lost(&error)),
            Ok(Ok(answer)) => self.read(&origin.key, sender, answer).await,
        }
    }

    async fn read(&self, key: &str, sender: Sender, answer: Response<Incoming>) -> Result<Answer, SendError> {
        let (parts, body) = answer.into_parts();
        let body = Limited::new(body, ANSWER_MAX_BYTES).collect();
        let body = tokio::time::timeout(ANSWER_TIMEOUT, body).await.map_err(|_| late())?;
        let body = body.map_err(|error| SendError { may_be_done: true, why: error.to_string() })?.to_bytes();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle.entry(key.to_owned()).or_default();
        kept.retain(|sender| !sender.is_closed());
        if kept.len() < IDLE_MAX && !sender.is_closed() {
            kept.push(sender);
        }
        Ok(Answer { status: parts.status, headers: parts.headers, body })
    }

    fn idle(&self, key: &str) -> Option<Sender> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle.get_mut(key)?;
        kept.retain(|sender| !sender.is_closed());
        let ready = kept.iter().position(SendRequest::is_ready)?;
        Some(kept.swap_remove(ready))
    }

    async fn connect(&self, origin: &Origin) -> Result<Sender, String> {
        let text = |error: &dyn fmt::Display| error.to_string();
        let stream = TcpStream::connect((origin.host.as_str(), origin.port)).await.map_err(|e| text(&e))?;
        // If this fails, only the latency of small requests is worse.
        let _ = stream.set_nodelay(true);
        if !origin.is_encrypted {
            let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| text(&e))?;
            tokio::spawn(connection);
            return Ok(sender);
        }
        let name = ServerName::try_from(origin.host.clone()).map_err(|e| text(&e))?;
        let stream = self.tls.connect(name, stream).await.map_err(|e| text(&e))?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| text(&e))?;
        tokio::spawn(connection);
        Ok(sender)
    }
}

fn lost(error: &hyper::Error) -> SendError {
    SendError { may_be_done: true, why: error.to_string() }
}

fn late() -> SendError {
    SendError { may_be_done: true, why: "no answer within 60 s".to_owned() }
}

/// A URL without its query, which may contain a signature.
pub fn without_query(uri: &Uri) -> String {
    let scheme = uri.scheme_str().unwrap_or("https");
    format!("{scheme}://{}{}", uri.authority().map_or("", |it| it.as_str()), uri.path())
}

/// The server that a request goes to.
struct Origin {
    key: String,
    authority: String,
    host: String,
    port: u16,
    is_encrypted: bool,
}

impl Origin {
    fn of(uri: &Uri) -> Result<Self, String> {
        let shown = without_query(uri);
        let authority = uri.authority().ok_or_else(|| format!("{shown} names no server"))?;
        if authority.as_str().contains('@') {
            return Err("the URL holds a user's name".to_owned());
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let is_encrypted = match uri.scheme_str() {
            Some("https") => true,
            Some("http") if is_on_this_machine(&host) => false,
            _ => return Err(format!("{shown} is not https, so secrets would be readable on the network")),
        };
        let port = authority.port_u16().unwrap_or(if is_encrypted { 443 } else { 80 });
        let key = format!("{is_encrypted} {authority}");
        Ok(Self { key, authority: authority.as_str().to_owned(), host, port, is_encrypted })
    }
}

/// Whether a request to the host stays on this machine.
fn is_on_this_machine(host: &str) -> bool {
    matches!(host, "localhost" | "127.0.0.1" | "::1") || host == METADATA_HOST
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(url: &'static str) -> String {
        Origin::of(&Uri::from_static(url)).map(|_| ()).unwrap_err()
    }

    #[test]
    fn secrets_are_sent_over_tls_only() {
        assert!(refusal("http://disks.example/a?sig=hidden").contains("not https"));
        assert!(!refusal("http://disks.example/a?sig=hidden").contains("hidden"));
        assert!(refusal("ftp://127.0.0.1/a").contains("not https"));
        assert!(refusal("/a").contains("names no server"));
        let origin = |url| Origin::of(&Uri::from_static(url)).unwrap();
        assert_eq!(origin("https://disks.example/a").port, 443);
        assert_eq!(origin("http://169.254.169.254/metadata").port, 80);
        assert_eq!(origin("http://[::1]:8080/").host, "::1");
    }
}
