//! Requests to identity providers: HTTPS with the system's authorities, or HTTP on loopback addresses.

use std::time::Duration;

use anyhow::Context as _;
use headwater_api::{Problem, ProblemKind};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};

use super::query;
use crate::client::server::{self, Address};

/// Timeout of an answer.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The longest answer, in bytes.
const ANSWER_MAX_BYTES: usize = 1 << 20;

/// An error of OAuth in an answer.
#[derive(Default, Deserialize)]
struct Refusal {
    #[serde(default)]
    error: String,
    #[serde(default)]
    error_description: String,
}

/// Requests JSON. A form is posted.
pub async fn json<T: DeserializeOwned>(url: &str, form: Option<&[(&str, &str)]>) -> Result<T, Problem> {
    let problem = |kind: ProblemKind, reason: String| {
        Problem::new(kind, format!("cannot ask the identity provider at {}: {reason}", query::plain(url)))
    };
    let failed = |reason: String| problem(ProblemKind::Unavailable, reason);
    let asked = tokio::time::timeout(TIMEOUT, ask(url, form)).await;
    let asked = asked.map_err(|_| failed(format!("it does not answer within {} s", TIMEOUT.as_secs())))?;
    let (status, body) = asked.map_err(|error| failed(format!("{error:#}")))?;
    if !status.is_success() {
        let Refusal { error, error_description } = serde_json::from_slice(&body).unwrap_or_default();
        let reason = query::plain(&format!("it answers {status} {error} {error_description}"));
        let is_refusal = form.is_some() && status.is_client_error();
        return Err(if is_refusal { problem(ProblemKind::Unauthorized, reason) } else { failed(reason) });
    }
    serde_json::from_slice(&body).map_err(|error| failed(format!("its answer cannot be read: {error}")))
}

async fn ask(url: &str, form: Option<&[(&str, &str)]>) -> anyhow::Result<(StatusCode, Bytes)> {
    let (address, path) = parts(url)?;
    let (method, body) = match form {
        Some(form) => (Method::POST, query::encoded(form)),
        None => (Method::GET, String::new()),
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, address.authority())
        .header(header::ACCEPT, "application/json")
        .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
        .body(Full::new(Bytes::from(body)))?;
    if address.is_encrypted {
        exchange(server::connect_web(&address).await?, request).await
    } else {
        exchange(server::connect_web_plain(&address).await?, request).await
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        // An error of the connection also fails the answer, where it is handled.
        let _ = connection.await;
    });
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("its answer ended early, or is too long: {error}"))?;
    Ok((status, body.to_bytes()))
}

/// Whether a URL can be requested, and shown at a terminal.
pub fn is_safe(url: &str) -> bool {
    url.chars().all(|c| c.is_ascii_graphic()) && parts(url).is_ok()
}

/// The server and the path of a URL. HTTP is permitted on loopback addresses.
fn parts(url: &str) -> anyhow::Result<(Address, String)> {
    let uri: Uri = url.parse()?;
    let is_encrypted = uri.scheme_str() == Some("https");
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
    let is_loopback = matches!(host.as_str(), "localhost" | "127.0.0.1" | "::1");
    anyhow::ensure!(
        !host.is_empty() && (is_encrypted || (uri.scheme_str() == Some("http") && is_loopback)),
        "it is not an https URL"
    );
    let authority = uri.authority().map(|it| it.as_str()).unwrap_or_default();
    // After the host, whose address may have colons in brackets.
    let after_host = authority.rsplit(['@', ']']).next().unwrap_or_default();
    let port = match (after_host.rsplit_once(':'), uri.port_u16()) {
        (None, _) => {
            if is_encrypted {
                443
            } else {
                80
            }
        }
        (Some(_), port) => port.filter(|port| *port != 0).context("its port is not 1 to 65535")?,
    };
    let path = uri.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string);
    Ok((Address { host, port, is_encrypted }, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_providers_are_asked_over_https() {
        let (address, path) = parts("https://login.example.com/realms/lab?x=1").unwrap();
        assert_eq!((address.port, address.is_encrypted, path.as_str()), (443, true, "/realms/lab?x=1"));
        assert_eq!(parts("http://127.0.0.1:8080").unwrap().0.port, 8080);
        assert!(is_safe("https://login.example.com/realms/lab?x=1"));
        assert!(!is_safe("https://login.example.com/\u{1b}[2J"));
        for odd in [
            "javascript:alert(1)",
            "http://login.example.com/",
            "ftp://localhost/",
            "/path",
            "https://",
            "",
            "https://x:99999",
            "https://x:",
        ] {
            assert!(parts(odd).is_err() && !is_safe(odd), "{odd}");
        }
    }
}
