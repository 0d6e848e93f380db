//! Classifies failed requests to S3 by what a caller can do about them, and makes their messages.

use std::time::Duration;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

use crate::error::{StoreError, StoreErrorKind};
use crate::s3::S3Url;
use crate::s3::bucket::Operation;
use crate::s3::busy::Busy;
use crate::s3::listing::NoListing;

/// The longest quotation of a server's answer in a message, in bytes.
const QUOTED_MAX_BYTES: usize = 200;

/// Why one attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// No such key.
    Absent,
    /// A condition was not met.
    Conflict,
    /// No such bucket.
    NoBucket,
    /// The environment has no credentials, and their source gave none. The server received no request.
    /// Contains the details.
    NoKeys(String),
    /// No permission, or invalid credentials. Contains the server's answer.
    Denied(String),
    /// The server's disks are full, or a quota is used up. Contains the server's answer.
    Full(String),
    /// Another status, and the server's answer.
    Status(u16, String),
    /// The server is overloaded and says when to retry.
    Busy(Busy),
    /// The answer is not a complete listing. Contains what it is instead.
    NoListing(String),
    /// No connection, so the server received no request. Contains the details.
    Unconnected(String),
    /// No answer, or an incomplete one. The server may have performed the request. Contains the details.
    Broken(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Absent => f.write_str("it does not exist"),
            Self::Conflict => f.write_str("another process changed it at the same time"),
            Self::NoBucket => f.write_str("there is no such bucket"),
            Self::NoKeys(what) => write!(f, "no AWS_ACCESS_KEY_ID is set, and {what}"),
            Self::Denied(said) => write!(f, "the server refuses the request ({said})"),
            Self::Full(said) => write!(f, "the server has no free space ({said})"),
            Self::Status(status, said) => write!(f, "the server answered {status} ({said})"),
            Self::Busy(busy) => {
                write!(f, "the server is busy: it answered {} ({})", busy.status, said(&busy.to_string()))
            }
            Self::NoListing(what) | Self::Unconnected(what) | Self::Broken(what) => f.write_str(what),
        }
    }
}

impl Failure {
    pub(super) fn timed_out(after: Duration) -> Self {
        Self::Broken(format!("the server did not answer in full within {:.1} s", after.as_secs_f64()))
    }

    /// The failure if the source of credentials gave none.
    pub(super) fn no_keys(failure_text: &str, error: &Error) -> Self {
        Self::NoKeys(format!("{failure_text}: {}", shorten(&innermost(error))))
    }

    pub(super) fn of(error: &Error) -> Self {
        let reply = innermost(error);
        if let Some(no_listing) = cause::<NoListing>(error) {
            return Self::NoListing(shorten(&no_listing.to_string()));
        }
        if let Some(busy) = cause::<Busy>(error) {
            return Self::Busy(busy.clone());
        }
        if lacks_parts(&reply) {
            return Self::Absent;
        }
        if let Some(failure) = in_body(&reply) {
            return failure;
        }
        // Checked first, because Ceph answers 403 if space is missing, as it does for credentials without
        // permission.
        if status(&reply).is_some_and(|status| is_full(status, &reply)) {
            return Self::Full(said(&reply));
        }
        match error {
            Error::NotFound { .. } if reply.contains("NoSuchBucket") => Self::NoBucket,
            Error::NotFound { .. } => Self::Absent,
            Error::AlreadyExists { .. } | Error::Precondition { .. } => Self::Conflict,
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Self::Denied(said(&reply)),
            _ => match status(&reply) {
                Some(404) if reply.contains("NoSuchBucket") => Self::NoBucket,
                Some(404) => Self::Absent,
                Some(401 | 403) => Self::Denied(said(&reply)),
                // A second process wrote at the same time. S3 asks the client to check again, which callers
                // do after a conflict.
                Some(409) => Self::Conflict,
                Some(status) => Self::Status(status, said(&reply)),
                None if is_unconnected(error) => Self::Unconnected(shorten(&reply)),
                None => Self::Broken(shorten(&reply)),
            },
        }
    }

    /// Whether the same request may succeed a moment later. If a store is full, somebody must remove
    /// something first.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            Self::Absent | Self::Conflict | Self::NoBucket | Self::Denied(_) | Self::Full(_) => false,
            // 501: the server does not know the request, and never will.
            Self::Status(status, _) => *status >= 500 && *status != 501 || *status == 429 || *status == 408,
            Self::Busy(_) | Self::NoKeys(_) | Self::NoListing(_) | Self::Unconnected(_) | Self::Broken(_) => {
                true
            }
        }
    }

    pub(super) fn describe(
        &self,
        operation: Operation,
        shown: &str,
        url: &S3Url,
        attempts: u32,
    ) -> StoreError {
        let server = url.endpoint.as_deref().unwrap_or("Amazon S3");
        let verb = match operation {
            Operation::Read => "read",
            Operation::Write | Operation::WriteIf | Operation::WriteParts => "write",
            Operation::Remove => "remove",
            Operation::List => "list",
        };
        let times = if attempts > 1 { format!(", {attempts} times") } else { String::new() };
        let advice = self.advice(operation, server, url);
        let kind = match self {
            Self::Absent | Self::NoBucket => StoreErrorKind::NotFound,
            Self::Conflict => StoreErrorKind::Locked,
            // A read takes no space, so the quota is one for traffic.
            Self::Full(_) if !matches!(operation, Operation::Read | Operation::List) => {
                StoreErrorKind::NoSpace
            }
            // The range does not exist: the object is shorter than a manifest says.
            Self::Status(416, _) => StoreErrorKind::Damaged,
            _ if self.may_pass() => StoreErrorKind::Unreachable,
            _ => StoreErrorKind::Io,
        };
        StoreError::new(kind, format!("cannot {verb} {shown} at {server}{times}: {self}{advice}"))
    }

    /// Advice for the user, as one more sentence.
    fn advice(&self, operation: Operation, server: &str, url: &S3Url) -> String {
        let permission = match operation {
            Operation::Read => "s3:GetObject",
            Operation::Write | Operation::WriteIf | Operation::WriteParts => "s3:PutObject",
            Operation::Remove => "s3:DeleteObject",
            Operation::List => "s3:ListBucket",
        };
        let bucket = &url.bucket;
        match self {
            Self::Absent => String::new(),
            Self::Conflict => ". Try again".to_owned(),
            Self::NoBucket => {
                format!(". Make the bucket '{bucket}' first, or correct its name or the region")
            }
            Self::NoKeys(_) => ". Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY".to_owned(),
            Self::Denied(_) => format!(
                ". Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that this key may {permission} in the \
                 bucket '{bucket}'"
            ),
            Self::Full(_) => format!(
                ". Raise the quota of the bucket '{bucket}', or free space ('headwater image remove' removes a version, if \
                 there is space to record that)"
            ),
            Self::Status(400 | 405 | 501, _) if let Some(feature) = operation.feature() => format!(
                ". If the endpoint and the region of {url} are right, this server does not support {feature}, which writing \
                 to a store needs: use another server; existing versions can still be read"
            ),
            Self::Status(501, _) => format!(
                ". This server does not support the request, which a store needs: use another server, or correct the \
                 endpoint of {url}"
            ),
            Self::Busy(_) => ". Try again later".to_owned(),
            Self::Status(status, _) if *status >= 500 || *status == 429 => {
                ". The server has a problem: try again later".to_owned()
            }
            Self::Status(416, _) => ". The object in the bucket is shorter than it should be".to_owned(),
            Self::Status(..) => format!(". Check the endpoint and the region of {url}"),
            Self::NoListing(_) => {
                format!(
                    ". Check that {server} supports ListObjectsV2, and that no proxy answers in its place"
                )
            }
            Self::Unconnected(_) | Self::Broken(_) => {
                format!(". Check that {server} is up and can be reached from here")
            }
        }
    }
}

/// Why a change of a list of versions failed.
#[derive(Debug)]
pub(super) enum Unchanged {
    /// The change was not made.
    Known(StoreError),
    /// The change may have been made, or may still be made.
    Unknown(StoreError),
}

impl From<StoreError> for Unchanged {
    fn from(error: StoreError) -> Self {
        Self::Known(error)
    }
}

impl From<Unchanged> for StoreError {
    fn from(unchanged: Unchanged) -> Self {
        match unchanged {
            Unchanged::Known(error) | Unchanged::Unknown(error) => error,
        }
    }
}

/// The last messages in the chain of causes, which are nearest to the network.
fn innermost(error: &Error) -> String {
    let mut reply = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let text = cause.to_string();
        // If an answer has a body, the body says more than its cause.
        if !reply.contains("status code") || text.contains("status code") {
            reply = text;
        }
        source = cause.source();
    }
    reply
}

/// Whether no connection was established. For a timeout the error kind does not say at which step, but
/// hyper's message does.
fn is_unconnected(error: &Error) -> bool {
    let mut next = std::error::Error::source(error);
    while let Some(cause) = next {
        let is_connect = |e: &HttpError| e.kind() == HttpErrorKind::Connect;
        if cause.downcast_ref().is_some_and(is_connect) || cause.to_string() == "client error (Connect)" {
            return true;
        }
        next = cause.source();
    }
    false
}

/// The cause of this type, if there is one.
fn cause<T: std::error::Error + 'static>(error: &Error) -> Option<&T> {
    let mut next = std::error::Error::source(error);
    while let Some(cause) = next {
        if let Some(found) = cause.downcast_ref() {
            return Some(found);
        }
        next = cause.source();
    }
    None
}

/// Whether the upload or one of its parts no longer exists, or another process has replaced a part since.
fn lacks_parts(reply: &str) -> bool {
    matches!(tag(reply, "Code"), Some("NoSuchUpload" | "InvalidPart"))
}

/// A failure that an answer with status 200 reports in its body. The server finds out only after the header
/// whether it could remove keys or complete an upload.
fn in_body(reply: &str) -> Option<Failure> {
    if reply.starts_with("Server returned error response: ") {
        return Some(Failure::Status(500, said(reply)));
    }
    let (key_and_message, code) =
        reply.strip_prefix("DeleteObjects request failed for key ")?.rsplit_once(" (code: ")?;
    let code = code.trim_end_matches(')');
    let message = key_and_message.split_once(": ").map_or("", |(_, message)| message);
    let said = shorten(&format!("{code}: {message}"));
    Some(match code {
        "AccessDenied" => Failure::Denied(said),
        "NoSuchKey" => Failure::Absent,
        _ if means_no_room(code) => Failure::Full(said),
        _ => Failure::Status(500, said),
    })
}

/// Whether space is missing. If a quota is used up, Ceph answers 403 and MinIO 400; if disks are full,
/// servers answer 507.
fn is_full(status: u16, reply: &str) -> bool {
    // With these statuses, a quota code means a quota of requests, which is temporary.
    let may_pass = matches!(status, 408 | 429 | 503);
    status == 507 || !may_pass && tag(reply, "Code").is_some_and(means_no_room)
}

/// Whether a code means that space is missing: `QuotaExceeded`, `XMinioAdminBucketQuotaExceeded`,
/// `XMinioStorageFull`.
fn means_no_room(code: &str) -> bool {
    let code = code.to_ascii_lowercase();
    code.contains("quota") || code.contains("storagefull")
}

fn status(reply: &str) -> Option<u16> {
    let (_, after) = reply.split_once("status code: ")?;
    after.get(..3)?.parse().ok()
}

fn tag<'a>(reply: &'a str, name: &str) -> Option<&'a str> {
    let (_, after) = reply.split_once(&format!("<{name}>"))?;
    after.split_once(&format!("</{name}>")).map(|(text, _)| text)
}

/// The code and the message from the XML of the server's answer.
fn said(reply: &str) -> String {
    match (tag(reply, "Code"), tag(reply, "Message")) {
        (Some(code), Some(message)) if !message.is_empty() => shorten(&format!("{code}: {message}")),
        (Some(code), _) => shorten(code),
        _ => shorten(reply.split_once("status code: ").map_or(reply, |(_, after)| after)),
    }
}

fn shorten(text: &str) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let line = line.trim().trim_end_matches(':');
    let mut end = line.len().min(QUOTED_MAX_BYTES);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line.get(..end).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_recognised_by_code_and_message() {
        let xml = "Server returned non-2xx status code: 403 Forbidden: <?xml?><Error><Code>AccessDenied</Code>\
                   <Message>no\nway</Message></Error>";
        assert_eq!(status(xml), Some(403));
        assert_eq!(said(xml), "AccessDenied: no way");
        assert_eq!(said("status code: 500 Internal Server Error: "), "500 Internal Server Error");
        assert_eq!(shorten(&"x".repeat(500)).len(), QUOTED_MAX_BYTES);
    }

    #[test]
    fn unsent_requests_differ_from_unanswered_ones() {
        use object_store::ObjectStoreExt;

        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let ask = |address: std::net::SocketAddr| {
            let s3 = object_store::aws::AmazonS3Builder::new()
                .with_bucket_name("b")
                .with_endpoint(format!("http://{address}"))
                .with_access_key_id("k")
                .with_secret_access_key("s")
                .with_retry(object_store::RetryConfig { max_retries: 0, ..Default::default() })
                .with_client_options(object_store::ClientOptions::new().with_allow_http(true))
                .build()
                .unwrap();
            let asked =
                runtime.block_on(s3.put(&"key".into(), object_store::PutPayload::from_static(b"text")));
            Failure::of(&asked.unwrap_err())
        };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let hanging_up = std::thread::spawn(move || drop(listener.accept().unwrap()));
        let heard = ask(address);
        assert!(matches!(heard, Failure::Broken(_)), "{heard:?}");
        hanging_up.join().unwrap();
        let unheard = ask(address);
        assert!(matches!(unheard, Failure::Unconnected(_)), "{unheard:?}");
    }

    #[test]
    fn messages_name_key_server_and_remedy() {
        let url: S3Url = "s3://images/a?endpoint=http://h:1".parse().unwrap();
        let reply = |failure: &Failure| failure.describe(Operation::Write, "s3://images/a/store", &url, 2);
        let denied = reply(&Failure::Denied("AccessDenied".into()));
        assert_eq!(
            denied.to_string(),
            "cannot write s3://images/a/store at http://h:1, 2 times: the server refuses the request (AccessDenied). \
             Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that this key may s3:PutObject in the bucket 'images'"
        );
        assert_eq!(reply(&Failure::NoBucket).kind(), StoreErrorKind::NotFound);
        assert!(
            !Failure::Status(400, String::new()).may_pass() && Failure::Status(503, String::new()).may_pass()
        );
        for (failure, kind) in [
            (Failure::Denied("AccessDenied".into()), StoreErrorKind::Io),
            (Failure::Status(400, String::new()), StoreErrorKind::Io),
            (Failure::Status(416, String::new()), StoreErrorKind::Damaged),
            (Failure::Status(429, String::new()), StoreErrorKind::Unreachable),
            (Failure::Status(503, String::new()), StoreErrorKind::Unreachable),
            (Failure::NoListing("it is something else".into()), StoreErrorKind::Unreachable),
            (Failure::Broken("connection refused".into()), StoreErrorKind::Unreachable),
        ] {
            assert_eq!(reply(&failure).kind(), kind, "{failure}");
        }
    }

    /// The failure that an answer becomes, as `object_store` reports it.
    fn answered(status: &str, code: &str) -> Failure {
        let body = format!("<?xml?><Error><Code>{code}</Code><Message>so it is</Message></Error>");
        let reply = format!("Server returned non-2xx status code: {status}: {body}");
        let (path, source) = ("key".to_owned(), reply.into());
        Failure::of(&match status.get(..3) {
            Some("403") => Error::PermissionDenied { path, source },
            Some("409") => Error::AlreadyExists { path, source },
            _ => Error::Generic { store: "S3", source },
        })
    }

    #[test]
    fn a_full_server_is_not_retried_and_differs_from_a_refusal() {
        let url: S3Url = "s3://images/a?endpoint=http://h:1".parse().unwrap();
        let room = "Raise the quota of the bucket 'images', or free space ('headwater image remove' removes a version, if \
                    there is space to record that)";
        let (keys, later) = ("Check AWS_ACCESS_KEY_ID", "The server has a problem: try again later");
        let (full, refused, away) =
            (StoreErrorKind::NoSpace, StoreErrorKind::Io, StoreErrorKind::Unreachable);
        for (status, code, kind, advice) in [
            ("403 Forbidden", "QuotaExceeded", full, room),
            ("403 Forbidden", "UserSizeQuotaExceeded", full, room),
            ("400 Bad Request", "XMinioAdminBucketQuotaExceeded", full, room),
            ("507 Insufficient Storage", "XMinioStorageFull", full, room),
            ("507 Insufficient Storage", "Odd", full, room),
            ("500 Internal Server Error", "QUOTA_EXCEEDED", full, room),
            ("403 Forbidden", "AccessDenied", refused, keys),
            ("400 Bad Request", "InvalidArgument", refused, "Check the endpoint and the region"),
            ("500 Internal Server Error", "InternalError", away, later),
            // Quotas of requests.
            ("503 Service Unavailable", "BucketThrottleQuotaExceeded", away, later),
            ("429 Too Many Requests", "QuotaExceeded", away, later),
        ] {
            let failure = answered(status, code);
            assert_eq!(failure.may_pass(), kind == away, "{status} {code}");
            let reply = failure.describe(Operation::Write, "s3://images/a/store", &url, 1);
            assert_eq!(reply.kind(), kind, "{reply}");
            let message = reply.to_string();
            assert!(message.contains(advice) && message.contains(code), "{message}");
            assert_eq!(message.contains("quota of the bucket"), kind == full, "{message}");
        }
        let read =
            answered("403 Forbidden", "QuotaExceeded").describe(Operation::Read, "s3://images/a", &url, 1);
        assert_eq!(read.kind(), StoreErrorKind::Io, "{read}");
        assert_eq!(answered("409 Conflict", "OperationAborted"), Failure::Conflict);
        assert_eq!(answered("400 Bad Request", "InvalidPart"), Failure::Absent);
    }

    #[test]
    fn errors_in_the_body_of_a_200_answer_count() {
        let of = |reply: &str| Failure::of(&Error::Generic { store: "S3", source: reply.into() });
        let removed =
            |code: &str| of(&format!("DeleteObjects request failed for key a/b: so it is (code: {code})"));
        assert_eq!(removed("AccessDenied"), Failure::Denied("AccessDenied: so it is".into()));
        assert_eq!(removed("NoSuchKey"), Failure::Absent);
        assert_eq!(removed("XMinioStorageFull"), Failure::Full("XMinioStorageFull: so it is".into()));
        let trouble = Failure::Status(500, "InternalError: so it is".into());
        assert_eq!(removed("InternalError"), trouble);
        let xml = "<Error><Code>InternalError</Code><Message>so it is</Message></Error>";
        assert_eq!(of(&format!("Server returned error response: {xml}")), trouble);
        let lost = "<Error><Code>NoSuchUpload</Code><Message>so it is</Message></Error>";
        assert_eq!(of(&format!("Server returned error response: {lost}")), Failure::Absent);
    }
}
