//! Accesses one page blob through a URL with a shared access signature (SAS): creates it, writes, clears, reads and
//! lists pages.
//!
//! The same calls write to a blob of a storage account and to a managed disk that was created for an upload. Such a
//! disk exists already, so it is not created here.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use base64::Engine;
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_LENGTH, HeaderName, HeaderValue, IF_NONE_MATCH};
use hyper::{Method, Request, StatusCode, Uri};
use md5::{Digest, Md5};
use quick_xml::Reader;
use quick_xml::events::Event;

use crate::error::{AzureError, AzureErrorKind};
use crate::escape::escaped;
use crate::http::{Answer, HttpClient, without_query};
use crate::pacer::Pacer;

/// The unit of a page blob.
pub const PAGE_BYTES: u64 = 512;

/// The largest write that Azure accepts.
pub const WRITE_MAX_BYTES: u64 = 4 << 20;

/// The API version.
const API_VERSION: &str = "2021-12-02";

/// Metadata of the blob that identifies the disk whose contents it receives.
const CONTENT_HEADER: &str = "x-ms-meta-headwaterversion";

/// The most list segments that are read; a longer list is refused.
const LIST_PIECES_MAX: usize = 10_000;

/// Provides URLs with a signature for a blob.
#[async_trait]
pub trait SignedUrl: Send + Sync {
    /// A URL with a signature. `refused`: the URL that Azure has refused; `None` at the first call.
    async fn signed(&self, refused: Option<&Uri>) -> Result<Uri, AzureError>;
}

/// A fixed URL, which cannot be renewed.
#[derive(Clone)]
pub struct GivenUrl(pub Uri);

#[async_trait]
impl SignedUrl for GivenUrl {
    async fn signed(&self, refused: Option<&Uri>) -> Result<Uri, AzureError> {
        match refused {
            None => Ok(self.0.clone()),
            Some(uri) => {
                let why = format!("Azure refuses the signature of {}", without_query(uri));
                Err(AzureError::new(AzureErrorKind::Denied, why).advise(
                    "the signature has expired, or does not allow to read, write and create: make a new one and repeat the command",
                ))
            }
        }
    }
}

/// The properties of a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobFacts {
    /// Its length.
    pub len_bytes: u64,
    /// Whether it is a page blob.
    pub has_pages: bool,
    /// The identifier of its disk, if [`PageBlob::create`] created it.
    pub content: Option<String>,
}

/// A page blob.
pub struct PageBlob {
    http: Arc<HttpClient>,
    pacer: Arc<Pacer>,
    urls: Box<dyn SignedUrl>,
    current: Mutex<Option<Uri>>,
}

impl std::fmt::Debug for PageBlob {
    /// Omits the signature.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageBlob").finish_non_exhaustive()
    }
}

type Headers<'a> = &'a [(&'static str, &'a str)];

impl PageBlob {
    /// Sends no request yet.
    pub fn new(http: Arc<HttpClient>, pacer: Arc<Pacer>, urls: Box<dyn SignedUrl>) -> Self {
        Self { http, pacer, urls, current: Mutex::default() }
    }

    /// Creates an empty blob, unless one exists. `content` identifies the disk whose contents it receives.
    pub async fn create(&self, len_bytes: u64, content: &str) -> Result<(), AzureError> {
        let len = len_bytes.to_string();
        let headers: Headers<'_> = &[
            ("x-ms-blob-type", "PageBlob"),
            ("x-ms-blob-content-length", len.as_str()),
            (CONTENT_HEADER, content),
        ];
        let action = "cannot create the page blob";
        let made = self.send(action, Method::PUT, "", headers, &Bytes::new()).await?;
        match made.status {
            StatusCode::CREATED => Ok(()),
            // Also the result if an earlier attempt succeeded but its answer was lost: the caller then checks the
            // existing blob.
            StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED => {
                Err(AzureError::new(AzureErrorKind::Exists, "a blob of this name exists"))
            }
            _ => Err(refused(action, &made)),
        }
    }

    /// The properties of the blob; `None` if it does not exist.
    pub async fn facts(&self) -> Result<Option<BlobFacts>, AzureError> {
        let action = "cannot read the properties of the blob";
        let answer = self.send(action, Method::HEAD, "", &[], &Bytes::new()).await?;
        match answer.status {
            StatusCode::OK => Ok(Some(BlobFacts {
                len_bytes: answer.header("content-length").and_then(|it| it.parse().ok()).unwrap_or(0),
                has_pages: answer.header("x-ms-blob-type") == Some("PageBlob"),
                content: answer.header(CONTENT_HEADER).map(str::to_owned),
            })),
            StatusCode::NOT_FOUND => Ok(None),
            _ => Err(refused(action, &answer)),
        }
    }

    /// Writes pages at this offset. Azure verifies the body with its MD5.
    pub async fn write(&self, at: u64, bytes: &Bytes) -> Result<(), AzureError> {
        let range = checked(at, bytes.len() as u64)?;
        let md5 = base64::engine::general_purpose::STANDARD.encode(Md5::digest(bytes));
        let headers: Headers<'_> =
            &[("x-ms-page-write", "update"), ("x-ms-range", range.as_str()), ("content-md5", md5.as_str())];
        let action = format!("cannot write pages ({range})");
        let answer = self.send(&action, Method::PUT, "comp=page", headers, bytes).await?;
        if answer.status == StatusCode::CREATED { Ok(()) } else { Err(refused(&action, &answer)) }
    }

    /// Makes pages read as zeroes.
    pub async fn clear(&self, pages: Range<u64>) -> Result<(), AzureError> {
        let range = checked(pages.start, pages.end.saturating_sub(pages.start))?;
        let headers: Headers<'_> = &[("x-ms-page-write", "clear"), ("x-ms-range", range.as_str())];
        let action = format!("cannot clear pages ({range})");
        let answer = self.send(&action, Method::PUT, "comp=page", headers, &Bytes::new()).await?;
        if answer.status == StatusCode::CREATED { Ok(()) } else { Err(refused(&action, &answer)) }
    }

    /// Reads a range of pages.
    pub async fn read(&self, pages: Range<u64>) -> Result<Bytes, AzureError> {
        let len = pages.end.saturating_sub(pages.start);
        let range = checked(pages.start, len)?;
        let action = format!("cannot read pages ({range})");
        let answer =
            self.send(&action, Method::GET, "", &[("x-ms-range", range.as_str())], &Bytes::new()).await?;
        match answer.status {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT if answer.body.len() as u64 == len => {
                Ok(answer.body)
            }
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => Err(AzureError::new(
                AzureErrorKind::Damaged,
                format!("{action}: the answer has {} bytes", answer.body.len()),
            )),
            _ => Err(refused(&action, &answer)),
        }
    }

    /// The ranges of bytes that were written and not cleared, in order.
    pub async fn pages(&self) -> Result<Vec<Range<u64>>, AzureError> {
        let action = "cannot list the pages of the blob";
        let mut found: Vec<Range<u64>> = Vec::new();
        let mut marker = String::new();
        for _ in 0..LIST_PIECES_MAX {
            let query = match marker.as_str() {
                "" => "comp=pagelist".to_owned(),
                marker => format!("comp=pagelist&marker={}", escaped(marker)),
            };
            let answer = self.send(action, Method::GET, &query, &[], &Bytes::new()).await?;
            if answer.status != StatusCode::OK {
                return Err(refused(action, &answer));
            }
            let odd = |why: String| AzureError::new(AzureErrorKind::Invalid, format!("{action}: {why}"));
            let (ranges, next) = page_list(&answer.body).map_err(odd)?;
            for range in ranges {
                match found.last_mut() {
                    Some(last) if range.start < last.end => {
                        return Err(odd("the list is not in order".to_owned()));
                    }
                    Some(last) if range.start == last.end => last.end = range.end,
                    _ => found.push(range),
                }
            }
            match next {
                None => return Ok(found),
                Some(next) => marker = next,
            }
        }
        Err(AzureError::new(AzureErrorKind::Invalid, format!("{action}: the list has too many segments")))
    }

    async fn send(
        &self,
        action: &str,
        method: Method,
        query: &str,
        headers: Headers<'_>,
        body: &Bytes,
    ) -> Result<Answer, AzureError> {
        let mut url = self.url().await?;
        let mut is_renewed = false;
        loop {
            let invalid = |why: &dyn std::fmt::Display| {
                AzureError::new(AzureErrorKind::Invalid, format!("{action}: {why}"))
            };
            let request = request(&url, &method, query, headers, body).map_err(|why| invalid(&why))?;
            let answer = self.pacer.send(action, || self.http.send(request.clone())).await?;
            if !matches!(answer.status, StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED) {
                return Ok(answer);
            }
            // Another request may have renewed the URL in the meantime.
            let current = self.url().await?;
            if current == url {
                if is_renewed {
                    return Err(refused(action, &answer));
                }
                let new = self.urls.signed(Some(&url)).await.map_err(|error| error.during(action))?;
                *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(new.clone());
                url = new;
            } else {
                url = current;
            }
            is_renewed = true;
        }
    }

    async fn url(&self) -> Result<Uri, AzureError> {
        if let Some(url) = self.current.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            return Ok(url);
        }
        let url = self.urls.signed(None).await?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(url.clone());
        Ok(url)
    }
}

fn request(
    url: &Uri,
    method: &Method,
    query: &str,
    headers: Headers<'_>,
    body: &Bytes,
) -> Result<Request<Full<Bytes>>, String> {
    let mut url_text = url.to_string();
    if !query.is_empty() {
        url_text.push(if url.query().is_some() { '&' } else { '?' });
        url_text.push_str(query);
    }
    // The parser's error does not contain the URL.
    let uri: Uri = url_text.parse().map_err(|_| format!("the URL {} is invalid", without_query(url)))?;
    let mut request = Request::new(Full::new(body.clone()));
    *request.method_mut() = method.clone();
    *request.uri_mut() = uri;
    let into = request.headers_mut();
    into.insert("x-ms-version", HeaderValue::from_static(API_VERSION));
    if *method == Method::PUT {
        into.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    }
    for &(name, value) in headers {
        let value =
            HeaderValue::from_str(value).map_err(|_| format!("the value of the header {name} is invalid"))?;
        into.insert(HeaderName::from_static(name), value);
    }
    if headers.iter().any(|(name, _)| *name == "x-ms-blob-type") {
        into.insert(IF_NONE_MATCH, HeaderValue::from_static("*"));
    }
    Ok(request)
}

/// The text of a range, if Azure accepts the range.
fn checked(at: u64, len: u64) -> Result<String, AzureError> {
    let is_whole = at.is_multiple_of(PAGE_BYTES) && len.is_multiple_of(PAGE_BYTES);
    match at.checked_add(len) {
        Some(end) if is_whole && (1..=WRITE_MAX_BYTES).contains(&len) => {
            Ok(format!("bytes={at}-{}", end - 1))
        }
        _ => Err(AzureError::new(
            AzureErrorKind::Invalid,
            format!("{len} bytes at {at} are not a range of whole pages of at most 4 MiB"),
        )),
    }
}

/// The error for an unexpected answer.
fn refused(action: &str, answer: &Answer) -> AzureError {
    let code = answer.header("x-ms-error-code").unwrap_or("no error code");
    let kind = match answer.status.as_u16() {
        401 | 403 => AzureErrorKind::Denied,
        404 => AzureErrorKind::NotFound,
        409 | 412 => AzureErrorKind::Busy,
        _ => AzureErrorKind::Invalid,
    };
    let error = AzureError::new(kind, format!("{action}: Azure answers {} ({code})", answer.status));
    match kind {
        AzureErrorKind::Denied => error.advise("the signature needs the rights to read, write and create"),
        AzureErrorKind::Busy => {
            error.advise("check whether another program has a lease on the blob, or writes to it")
        }
        _ => error,
    }
}

/// The ranges of `<PageList>`, and the marker of the next segment. Ranges in `<ClearRange>` are not written pages.
fn page_list(xml: &[u8]) -> Result<(Vec<Range<u64>>, Option<String>), String> {
    let text = std::str::from_utf8(xml).map_err(|_| "the list is not text".to_owned())?;
    let mut reader = Reader::from_str(text.trim_start_matches('\u{feff}'));
    let (mut ranges, mut marker) = (Vec::new(), None);
    let (mut name, mut start) = (Vec::new(), None);
    let mut in_range = false;
    loop {
        match reader.read_event().map_err(|error| format!("the list is not XML: {error}"))? {
            Event::Start(element) => {
                name = element.name().as_ref().to_vec();
                in_range |= name == b"PageRange";
            }
            Event::End(element) => {
                if element.name().as_ref() == b"PageRange" {
                    in_range = false;
                }
                name.clear();
            }
            Event::Text(text) => {
                let text = String::from_utf8_lossy(&text).trim().to_owned();
                match name.as_slice() {
                    b"Start" if in_range => start = Some(number(&text)?),
                    b"End" if in_range => {
                        let end = number(&text)?.checked_add(1).ok_or("a range is too long")?;
                        let start: u64 = start.take().ok_or("a range has no start")?;
                        if start >= end
                            || !start.is_multiple_of(PAGE_BYTES)
                            || !end.is_multiple_of(PAGE_BYTES)
                        {
                            return Err(format!("the range from {start} to {end} is invalid"));
                        }
                        ranges.push(start..end);
                    }
                    b"NextMarker" if !text.is_empty() => marker = Some(text),
                    _ => {}
                }
            }
            Event::Eof => return Ok((ranges, marker)),
            _ => {}
        }
    }
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("'{text}' is not an offset"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_lists_are_read_with_their_marker() {
        let xml = "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><PageList><PageRange><Start>0</Start><End>511</End></PageRange>\
                   <ClearRange><Start>512</Start><End>1023</End></ClearRange>\
                   <PageRange><Start>4096</Start><End>8191</End></PageRange><NextMarker>2!8=</NextMarker></PageList>";
        assert_eq!(page_list(xml.as_bytes()), Ok((vec![0..512, 4096..8192], Some("2!8=".to_owned()))));
        assert_eq!(page_list(b"<PageList/>"), Ok((vec![], None)));
        for odd in
            ["<PageRange><Start>1</Start><End>511</End></PageRange>", "<PageRange><End>511</End></PageRange>"]
        {
            assert!(page_list(odd.as_bytes()).is_err(), "{odd}");
        }
    }

    #[test]
    fn ranges_are_whole_pages_of_at_most_four_mebibytes() {
        assert_eq!(checked(512, 1024).unwrap(), "bytes=512-1535");
        assert!(checked(0, WRITE_MAX_BYTES).is_ok());
        for (at, len) in [(0, 0), (1, 512), (0, 100), (0, WRITE_MAX_BYTES + 512), (u64::MAX - 511, 512)] {
            assert!(checked(at, len).is_err(), "{at} {len}");
        }
    }
}
