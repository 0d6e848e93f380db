//! Checks that an answer to a listing is a complete listing, and limits the length of all answers except
//! objects.
//!
//! `object_store` accepts any XML document as a listing. An error, or a page of a proxy, with status 200
//! becomes a listing without keys. A truncated listing without a continuation token becomes a complete one.
//! That would be dangerous, because the store removes data that no listed key needs.

use std::fmt;

use futures_util::future::BoxFuture;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};

use crate::s3::body::read_up_to;
use crate::s3::busy::Busy;

/// The longest answer that is not an object. A page of a listing has a thousand keys of at most a kilobyte
/// each.
const ANSWER_MAX_BYTES: usize = 16 << 20;
/// The longest name of a document in a message, in bytes.
const NAME_MAX_BYTES: usize = 40;

/// Creates the connections of a bucket.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(CheckingClient { client }))
    }
}

/// Sends requests, and checks the answers that `object_store` reads as a whole.
#[derive(Debug)]
struct CheckingClient {
    client: HttpClient,
}

impl CheckingClient {
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_listing = is_listing(request.uri().query().unwrap_or_default());
        let is_post = request.method().as_str() == "POST";
        let answer = self.client.execute(request).await?;
        let is_success = answer.status().is_success();
        if is_success && !is_listing && !is_post {
            // The answer is an object, which is read while it arrives, or its body is not read.
            return Ok(answer);
        }
        let (head, body) = answer.into_parts();
        let body = read_up_to(body.bytes_stream(), ANSWER_MAX_BYTES).await?.ok_or_else(too_long)?;
        let retry_after = head.headers.get("retry-after").and_then(|value| value.to_str().ok());
        if let Some(busy) = Busy::of(head.status.as_u16(), retry_after, &body) {
            // `object_store` drops the headers of an error answer.
            return Err(HttpError::new(HttpErrorKind::Unknown, busy));
        }
        if is_success && is_listing {
            check_listing(&String::from_utf8_lossy(&body))
                .map_err(|e| HttpError::new(HttpErrorKind::Decode, e))?;
        }
        Ok(HttpResponse::from_parts(head, body.into()))
    }
}

// Written as the macro that declares the trait expands.
impl HttpService for CheckingClient {
    fn call<'life0, 'async_trait>(
        &'life0 self,
        request: HttpRequest,
    ) -> BoxFuture<'async_trait, Result<HttpResponse, HttpError>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(self.send(request))
    }
}

fn too_long() -> HttpError {
    let what = format!("the answer has more than {ANSWER_MAX_BYTES} bytes");
    HttpError::new(HttpErrorKind::Decode, std::io::Error::other(what))
}

fn is_listing(query: &str) -> bool {
    query.split('&').any(|pair| pair == "list-type=2")
}

/// Why an answer is not a complete listing.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoListing {
    /// The answer is another document. Contains the name of its root element.
    Other(String),
    /// The listing is truncated, and has no continuation token.
    Endless,
}

impl fmt::Display for NoListing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(name) if name.is_empty() => f.write_str("the answer is not a listing"),
            Self::Other(name) => write!(f, "the answer is not a listing, but '{name}'"),
            Self::Endless => {
                f.write_str("the answer says that there are more keys, but has no continuation token")
            }
        }
    }
}

impl std::error::Error for NoListing {}

/// Checks that a document is a listing and, if it is truncated, has a continuation token. A document that is
/// cut off is detected later by the XML parser, because the end of its root element is missing.
fn check_listing(document: &str) -> Result<(), NoListing> {
    let root = root(document).unwrap_or_default();
    // `ListBucketResult`, which may have a namespace prefix.
    if !root.rsplit(':').next().is_some_and(|name| name.starts_with("ListBucket")) {
        let name = root.chars().filter(char::is_ascii_graphic).take(NAME_MAX_BYTES).collect();
        return Err(NoListing::Other(name));
    }
    let goes_on = text_of(document, "IsTruncated").is_some_and(|text| text.eq_ignore_ascii_case("true"));
    let says_where = text_of(document, "NextContinuationToken").is_some_and(|text| !text.is_empty());
    if goes_on && !says_where { Err(NoListing::Endless) } else { Ok(()) }
}

/// The name of the root element.
fn root(document: &str) -> Option<&str> {
    let mut rest = document.trim_start_matches('\u{feff}').trim_start();
    loop {
        let end = if rest.starts_with("<?") {
            "?>"
        } else if rest.starts_with("<!--") {
            "-->"
        } else {
            break;
        };
        rest = rest.split_once(end)?.1.trim_start();
    }
    rest.strip_prefix('<')?.split(|c: char| c.is_whitespace() || c == '>' || c == '/').next()
}

/// The text of the first element of this name. No key can look like an element, because `<` is escaped in
/// keys.
fn text_of<'a>(document: &'a str, element: &str) -> Option<&'a str> {
    let (_, after) = document.split_once(&format!("{element}>"))?;
    after.split_once('<').map(|(text, _)| text.trim())
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use object_store::client::HttpRequestBody;

    use super::*;

    /// Answers with this many spaces.
    #[derive(Debug)]
    struct Spaces(usize);

    impl HttpService for Spaces {
        fn call<'life0, 'async_trait>(
            &'life0 self,
            _: HttpRequest,
        ) -> BoxFuture<'async_trait, Result<HttpResponse, HttpError>>
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            let answer: Result<HttpResponse, HttpError> = Ok(HttpResponse::new(vec![b' '; self.0].into()));
            Box::pin(std::future::ready(answer))
        }
    }

    #[test]
    fn answers_that_are_read_whole_have_a_limit() {
        let ask = |method: &str, target: &str, len: usize| {
            let mut request = HttpRequest::new(HttpRequestBody::empty());
            *request.method_mut() = method.parse().unwrap();
            *request.uri_mut() = target.parse().unwrap();
            let asked = CheckingClient { client: HttpClient::new(Spaces(len)) };
            let outcome = asked.send(request).now_or_never().unwrap();
            outcome.map(drop).map_err(|e| e.to_string())
        };
        for (method, target) in [("GET", "/b?list-type=2"), ("POST", "/b?delete")] {
            let error = ask(method, target, ANSWER_MAX_BYTES + 1).unwrap_err();
            assert!(error.contains("more than 16777216 bytes"), "{error}");
        }
        assert_eq!(ask("POST", "/b?delete", ANSWER_MAX_BYTES), Ok(()));
        assert_eq!(ask("GET", "/b/objects/a", ANSWER_MAX_BYTES + 1), Ok(()));
    }

    /// As Amazon writes it.
    fn listing(rest: &str) -> String {
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
             <Name>b</Name><Prefix>p/</Prefix>{rest}<Contents><Key>p/a</Key></Contents></ListBucketResult>"
        )
    }

    #[test]
    fn only_a_listing_is_accepted_as_one() {
        let whole = "<KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>";
        assert_eq!(check_listing(&listing(whole)), Ok(()));
        assert_eq!(check_listing(&listing("")), Ok(()));
        assert_eq!(check_listing("<!-- one --> <s3:ListBucketResult/>"), Ok(()));
        let other = |document: &str| match check_listing(document) {
            Err(NoListing::Other(name)) => name,
            outcome => panic!("{document}: {outcome:?}"),
        };
        assert_eq!(other("<?xml version=\"1.0\"?><Error><Code>SlowDown</Code></Error>"), "Error");
        assert_eq!(other("<!DOCTYPE html>\n<html><head/></html>"), "!DOCTYPE");
        assert_eq!(other("<html lang=\"en\"><head/><body>Sign in</body></html>"), "html");
        for odd in ["", "  ", "{}", "<", "<?xml", "ListBucketResult", "<!-- ListBucketResult"] {
            assert_eq!(other(odd), "", "{odd}");
        }
        assert_eq!(other(&format!("<{}>", "x".repeat(500))).len(), NAME_MAX_BYTES);
    }

    #[test]
    fn a_truncated_listing_needs_a_continuation() {
        let goes_on = "<IsTruncated>true</IsTruncated>";
        let token = |token: &str| format!("<NextContinuationToken>{token}</NextContinuationToken>");
        assert_eq!(check_listing(&listing(&(token("1ueGcxLPRx1Tr=") + goes_on))), Ok(()));
        assert_eq!(check_listing(&listing(&(goes_on.to_owned() + &token("p/a")))), Ok(()));
        for without in ["", "<NextContinuationToken/>", "<NextMarker>p/a</NextMarker>", &token("")] {
            let rest = format!("{without}{goes_on}");
            assert_eq!(check_listing(&listing(&rest)), Err(NoListing::Endless), "{without}");
        }
    }

    #[test]
    fn listings_are_distinguished_from_other_requests() {
        assert!(is_listing("list-type=2&prefix=a%2F") && is_listing("continuation-token=x&list-type=2"));
        assert!(!is_listing("") && !is_listing("uploadId=list-type") && !is_listing("prefix=list-type%3D2"));
    }
}
