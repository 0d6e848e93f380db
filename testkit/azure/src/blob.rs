//! A fake server of one page blob that injects faults, written from Azure's documentation. It is stricter than the
//! emulator Azurite: it refuses writes longer than 4 MiB, bodies with a wrong MD5, and requests without a valid
//! signature.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use base64::Engine;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use md5::{Digest, Md5};
use tokio::net::TcpListener;

const PAGE: u64 = 512;

/// The fault that one request meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This status; the request is not executed.
    Status(u16),
    /// 429 with `Retry-After: 0`.
    Throttled,
    /// The connection ends; the request is not executed.
    CutBefore,
    /// The request is executed, and the connection ends without an answer.
    CutAfter,
    /// From now on only the next signature is valid.
    Expire,
}

/// A received request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Its method.
    pub method: String,
    /// The query of its URL.
    pub query: String,
    /// The range that it reads or writes.
    pub range: Option<String>,
}

/// The contents of the blob, and the faults of the next requests.
#[derive(Debug, Default)]
pub struct Blob {
    /// The blob's length and content identifier, after it was created.
    pub made: Option<(u64, String)>,
    /// Pages that were written and not cleared.
    pub pages: BTreeMap<u64, Vec<u8>>,
    /// Whether the blob is a block blob, which has no pages.
    pub is_block_blob: bool,
    /// Faults by the number of the request.
    pub faults: HashMap<usize, Fault>,
    /// All requests.
    pub seen: Vec<Seen>,
    /// The number of the oldest valid signature.
    pub signature: usize,
    /// The most ranges in one list of pages.
    pub list_max: usize,
}

impl Blob {
    /// The contents of the blob.
    pub fn bytes(&self) -> Vec<u8> {
        let len = self.made.as_ref().map_or(0, |made| made.0);
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        for (at, page) in &self.pages {
            let at = usize::try_from(*at).unwrap();
            bytes[at..at + page.len()].copy_from_slice(page);
        }
        bytes
    }

    /// How many requests wrote or cleared pages.
    pub fn writes(&self) -> usize {
        self.seen
            .iter()
            .filter(|seen| seen.query.contains("comp=page&") || seen.query.ends_with("comp=page"))
            .count()
    }
}

/// The running server. Dropping it ends it.
#[derive(Debug)]
pub struct BlobServer {
    /// The URL of the blob, without a signature.
    pub url: String,
    blob: Arc<Mutex<Blob>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for BlobServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl BlobServer {
    /// Starts the server on a free port of loopback.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/disks/debian.vhd", listener.local_addr().unwrap());
        let blob = Arc::new(Mutex::new(Blob { list_max: 3, ..Blob::default() }));
        let shared = blob.clone();
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let blob = shared.clone();
                tokio::spawn(async move {
                    let service = service_fn(move |request| collect_and_answer(blob.clone(), request));
                    // A cut connection ends it with an error.
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { url, blob, task }
    }

    /// The URL with the signature of this number.
    pub fn signed(&self, signature: usize) -> String {
        format!("{}?sv=2021-12-02&sig={signature}", self.url)
    }

    /// Locks the blob.
    pub fn blob(&self) -> MutexGuard<'_, Blob> {
        self.blob.lock().unwrap()
    }
}

/// An error that cuts the connection.
#[derive(Debug)]
pub(crate) struct Cut;

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cut")
    }
}

impl std::error::Error for Cut {}

type Reply = Response<Full<Bytes>>;

async fn collect_and_answer(blob: Arc<Mutex<Blob>>, request: Request<Incoming>) -> Result<Reply, Cut> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Cut)?.to_bytes();
    answer(&mut blob.lock().unwrap(), &parts, &body)
}

/// Executes one request.
pub(crate) fn answer(blob: &mut Blob, parts: &Parts, body: &Bytes) -> Result<Reply, Cut> {
    let number = blob.seen.len();
    let fault = blob.faults.get(&number).copied();
    let header = |name: &str| parts.headers.get(name).and_then(|it| it.to_str().ok()).map(str::to_owned);
    let query = parts.uri.query().unwrap_or_default().to_owned();
    let reply = match fault {
        Some(Fault::Status(status)) => reply(status, "ServerBusy", Bytes::new()),
        Some(Fault::Throttled) => {
            let mut throttled = reply(429, "TooManyRequests", Bytes::new());
            throttled.headers_mut().insert("retry-after", HeaderValue::from_static("0"));
            throttled
        }
        Some(Fault::CutBefore) => reply(599, "", Bytes::new()),
        _ => {
            if fault == Some(Fault::Expire) {
                blob.signature += 1;
            }
            let signature =
                query.split('&').find_map(|part| part.strip_prefix("sig=")?.parse::<usize>().ok());
            if header("x-ms-version").is_none() {
                reply(400, "MissingRequiredHeader", Bytes::new())
            } else if signature.is_none_or(|it| it < blob.signature) {
                reply(403, "AuthenticationFailed", Bytes::new())
            } else {
                carry_out(blob, &parts.method, &query, &header, body)
            }
        }
    };
    let method = parts.method.to_string();
    blob.seen.push(Seen { method, query, range: header("x-ms-range") });
    match fault {
        Some(Fault::CutBefore | Fault::CutAfter) => Err(Cut),
        _ => Ok(reply),
    }
}

fn reply(status: u16, code: &'static str, body: Bytes) -> Reply {
    let mut reply = Response::new(Full::new(body));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap();
    if !code.is_empty() {
        reply.headers_mut().insert("x-ms-error-code", HeaderValue::from_static(code));
    }
    reply
}

fn carry_out(
    blob: &mut Blob,
    method: &Method,
    query: &str,
    header: &dyn Fn(&str) -> Option<String>,
    body: &Bytes,
) -> Reply {
    let is = |part: &str| query.split('&').any(|it| it == part);
    let Some((len, content)) = blob.made.clone() else {
        if *method != Method::PUT || is("comp=page") {
            return reply(404, "BlobNotFound", Bytes::new());
        }
        let len: u64 = header("x-ms-blob-content-length").unwrap().parse().unwrap();
        if header("x-ms-blob-type").as_deref() != Some("PageBlob") || !len.is_multiple_of(PAGE) {
            return reply(400, "InvalidHeaderValue", Bytes::new());
        }
        blob.made = Some((len, header("x-ms-meta-headwaterversion").unwrap()));
        return reply(201, "", Bytes::new());
    };
    let range = header("x-ms-range").map(|range| {
        let (start, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        (start.parse::<u64>().unwrap(), last.parse::<u64>().unwrap() + 1)
    });
    match (method, range) {
        (&Method::PUT, None) => {
            assert_eq!(header("if-none-match").as_deref(), Some("*"), "the request would empty the blob");
            reply(409, "BlobAlreadyExists", Bytes::new())
        }
        (&Method::PUT, Some((start, end))) if is("comp=page") => {
            if start % PAGE != 0 || end % PAGE != 0 || end > len {
                return reply(416, "InvalidPageRange", Bytes::new());
            }
            let is_clear = header("x-ms-page-write").as_deref() == Some("clear");
            if is_clear {
                (start..end).step_by(512).for_each(|at| drop(blob.pages.remove(&at)));
                return reply(201, "", Bytes::new());
            }
            let md5 = base64::engine::general_purpose::STANDARD.encode(Md5::digest(body));
            if body.len() as u64 != end - start {
                return reply(400, "InvalidHeaderValue", Bytes::new());
            }
            if body.len() > 4 << 20 {
                return reply(413, "RequestBodyTooLarge", Bytes::new());
            }
            if header("content-md5") != Some(md5) {
                return reply(400, "Md5Mismatch", Bytes::new());
            }
            blob.pages.extend((start..end).step_by(512).zip(body.chunks(512).map(<[u8]>::to_vec)));
            reply(201, "", Bytes::new())
        }
        (&Method::GET, Some((start, end))) => {
            let (start, end) = (usize::try_from(start).unwrap(), usize::try_from(end).unwrap());
            reply(206, "", Bytes::copy_from_slice(&blob.bytes()[start..end]))
        }
        (&Method::GET, None) if is("comp=pagelist") => reply(200, "", list(blob, query)),
        (&Method::HEAD, _) => {
            let mut facts = reply(200, "", Bytes::new());
            let kind = if blob.is_block_blob { "BlockBlob" } else { "PageBlob" };
            let headers = facts.headers_mut();
            headers.insert("x-ms-blob-type", HeaderValue::from_static(kind));
            headers.insert("content-length", HeaderValue::from(len));
            headers.insert("x-ms-meta-headwaterversion", HeaderValue::from_str(&content).unwrap());
            facts
        }
        _ => reply(400, "InvalidQueryParameterValue", Bytes::new()),
    }
}

/// At most `list_max` ranges in one answer; the marker is the offset of the next range.
fn list(blob: &Blob, query: &str) -> Bytes {
    let from =
        query.split('&').find_map(|part| part.strip_prefix("marker=")).map_or(0, |it| it.parse().unwrap());
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for at in blob.pages.range(from..).map(|(at, _)| *at) {
        match ranges.last_mut() {
            Some(last) if last.1 == at => last.1 += PAGE,
            _ => ranges.push((at, at + PAGE)),
        }
    }
    let marker = ranges.get(blob.list_max).map_or(String::new(), |next| next.0.to_string());
    let shown: String = ranges
        .iter()
        .take(blob.list_max)
        .map(|(start, end)| format!("<PageRange><Start>{start}</Start><End>{}</End></PageRange>", end - 1))
        .collect();
    Bytes::from(format!(
        "<?xml version=\"1.0\" encoding=\"utf-8\"?><PageList>{shown}<NextMarker>{marker}</NextMarker></PageList>"
    ))
}
