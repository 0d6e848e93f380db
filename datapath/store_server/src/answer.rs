//! Answers HTTP requests: finds the part of the store that a path names, and sends the requested range of it.
//!
//! ```text
//!   GET or HEAD?        otherwise 405
//!   token valid?        otherwise 401; a store without tokens instead answers no browser (400)
//!   connection kept?    503 if it is closed so that a new one can be accepted
//!   path of a file?     otherwise 404
//!   read permitted?     503 if the limit of reads stays reached
//!   found?              404, 500 or 503 otherwise; a list or manifest is read here, an object only opened
//!   ETag matches?       304
//!   range               200, 206 or 416; the first piece of an object is read: 404, 500 or 503 if that fails
//! ```

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use headwater_store::{Hash, ImageName, Object, Store, StoreError, StoreErrorKind, settings_bytes};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::http::uri::Authority;
use hyper::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::body::{Again, AnswerBody, ReadContext};
use crate::contents::{Content, Contents};
use crate::leases::Leases;
use crate::once::Once;
use crate::progress::Progress;
use crate::range::{Wanted, wanted};
use crate::reads::Reads;
use crate::send_memory::SendMemory;
use crate::server::Limits;
use crate::tokens::TokenFile;

/// A request header: the number of this attempt to read an object again from its beginning, after an earlier attempt
/// found the object wrong.
const READING: header::HeaderName = header::HeaderName::from_static("headwater-reading");

/// The part of a store that a path names. *Holes* are the ranges of an object that no version needs and whose bytes the
/// store has deleted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Target {
    Settings,
    Images,
    Image(ImageName),
    Manifest(Hash),
    Object(Hash),
    Holes(Hash),
    Trace(Hash),
}

impl Target {
    pub(crate) fn of(path: &str) -> Option<Self> {
        let path = path.strip_prefix('/')?;
        match path.split_once('/') {
            None => (path == "store").then_some(Self::Settings),
            Some(("images", "")) => Some(Self::Images),
            Some(("images", name)) => name.parse().ok().map(Self::Image),
            Some(("manifests", id)) => id.parse().ok().map(Self::Manifest),
            Some(("objects", id)) => id.parse().ok().map(Self::Object),
            Some(("holes", id)) => id.parse().ok().map(Self::Holes),
            Some(("traces", id)) => id.parse().ok().map(Self::Trace),
            Some(_) => None,
        }
    }

    fn is_immutable(&self) -> bool {
        matches!(self, Self::Manifest(_) | Self::Object(_))
    }
}

/// The content for a path. Its hash becomes the ETag.
enum Found {
    Content(Arc<Content>),
    Object(Arc<dyn Object>),
}

impl Found {
    fn tag(&self) -> String {
        let id = match self {
            Self::Content(content) => content.id,
            Self::Object(object) => object.id(),
        };
        format!("\"{id}\"")
    }

    fn len_bytes(&self) -> u64 {
        match self {
            Self::Content(content) => content.len_bytes(),
            Self::Object(object) => object.len_bytes(),
        }
    }

    fn part(&self, at: u64, len_bytes: u64, context: ReadContext) -> AnswerBody {
        match self {
            Self::Content(content) => AnswerBody::whole(content.part(at, len_bytes)),
            Self::Object(object) => AnswerBody::object(Arc::clone(object), at, len_bytes, context),
        }
    }
}

/// The request headers that decide whether an open object can be used, or must be opened again because it may
/// have been repaired.
#[derive(Default)]
struct RequestOptions {
    /// Set if the request has `Cache-Control: no-cache`: its client found an earlier answer wrong, or got 404.
    again: Option<Again>,
    range: Option<String>,
}

impl RequestOptions {
    fn of(headers: &HeaderMap) -> Self {
        let past_caches = text(headers, &header::CACHE_CONTROL)
            .is_some_and(|wants| wants.split(',').any(|word| word.trim().eq_ignore_ascii_case("no-cache")));
        let reading = text(headers, &READING).and_then(|reading| reading.trim().parse().ok());
        Self {
            again: past_caches.then_some(Again { reading }),
            range: text(headers, &header::RANGE).map(str::to_owned),
        }
    }

    /// Whether an open object of this length can be used: the client did not find an earlier answer wrong, and the object
    /// has bytes in the requested range.
    fn can_use(&self, len_bytes: u64) -> bool {
        self.again.is_none() && wanted(self.range.as_deref(), len_bytes) != Wanted::Nothing
    }
}

/// Answers requests for one store.
pub struct Answers {
    store: Arc<dyn Store>,
    tokens: Option<TokenFile>,
    tls: bool,
    leases: Leases,
    reads: Reads,
    /// Memory for pieces of all answers.
    send_memory: Arc<Semaphore>,
    /// Manifests, lists and traces in memory.
    contents: Contents,
    /// Contents that are being read.
    once: Once<Arc<Content>>,
    /// Open objects of a remote store, most recently opened last.
    objects: Mutex<Vec<Arc<dyn Object>>>,
}

/// The most objects that are kept open.
const OBJECTS_OPEN_MAX: usize = 64;

impl Answers {
    /// Answers requests for `store`, for all clients or those with tokens, over TLS or not.
    pub fn new(store: Arc<dyn Store>, tokens: Option<TokenFile>, tls: bool, limits: &Limits) -> Self {
        let leases = Leases::new(Arc::clone(&store), limits.lease);
        let reads = Reads::new(limits.reads, limits.read_wait);
        let contents = Contents::new(limits.contents_bytes);
        Self {
            store,
            tokens,
            tls,
            leases,
            reads,
            send_memory: SendMemory::of_server(),
            contents,
            once: Once::default(),
            objects: Mutex::default(),
        }
    }

    /// Memory for the answers of one connection.
    pub(crate) fn send_memory(&self) -> SendMemory {
        SendMemory::of_connection(&self.send_memory)
    }

    /// The versions that are kept because they were requested recently.
    pub(crate) fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Answers a request.
    pub(crate) async fn answer<B>(
        self: &Arc<Self>,
        request: &Request<B>,
        send_memory: &SendMemory,
        progress: &Arc<Progress>,
    ) -> Response<AnswerBody> {
        let _busy = progress.busy();
        let mut response = self.respond(request, send_memory, progress).await;
        if request.method() == Method::HEAD {
            // Over HTTP/2 the body of an answer to HEAD would be sent, which breaks the protocol.
            *response.body_mut() = AnswerBody::whole(Bytes::new());
        }
        response.headers_mut().insert("headwater-store", HeaderValue::from_static("1"));
        response
    }

    async fn respond<B>(
        self: &Arc<Self>,
        request: &Request<B>,
        send_memory: &SendMemory,
        progress: &Arc<Progress>,
    ) -> Response<AnswerBody> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut refused =
                problem(StatusCode::METHOD_NOT_ALLOWED, "invalid", "only GET and HEAD are answered");
            refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return refused;
        }
        if let Some(tokens) = &self.tokens
            && tokens.name_of(text(request.headers(), &header::AUTHORIZATION)).is_none()
        {
            let message =
                "this store needs the header 'Authorization: Bearer TOKEN' with a token of its token file";
            let mut refused = problem(StatusCode::UNAUTHORIZED, "unauthorized", message);
            refused.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return refused;
        }
        if self.tokens.is_none() && is_foreign(request, self.tls) {
            let message = "the request comes from a web page or for another host name: a store without tokens answers only \
                           programs that use localhost or a loopback address, and no browser";
            return problem(StatusCode::BAD_REQUEST, "invalid", message);
        }
        if !progress.admit() {
            return closed_for_another();
        }
        let Some(target) = Target::of(request.uri().path()) else {
            return problem(StatusCode::NOT_FOUND, "not_found", "a store has no file with this path");
        };
        let Some(permit) = self.reads.permit_soon().await else { return busy() };
        let (answers, wanted, options) =
            (Arc::clone(self), target.clone(), RequestOptions::of(request.headers()));
        let again = options.again;
        let found = tokio::task::spawn_blocking(move || (answers.find(&wanted, &options), permit)).await;
        match found {
            Ok((Ok(found), permit)) => {
                let (reads, progress) = (self.reads.clone(), Arc::clone(progress));
                let context =
                    ReadContext { reads, permit, send_memory: send_memory.of_answer(), progress, again };
                let mut response = self.send(&target, &found, request, context);
                // A HEAD answer promises a body, so the content must exist, or at least its beginning.
                match response.body_mut().first_piece().await {
                    Ok(()) => response,
                    Err(e) => refused(&target, request.uri().path(), &e),
                }
            }
            Ok((Err(e), _)) => refused(&target, request.uri().path(), &e),
            Err(e) => {
                tracing::error!(path = request.uri().path(), error = %e, "cannot answer");
                failed()
            }
        }
    }

    /// Looks the target up. Blocks on I/O.
    fn find(&self, target: &Target, options: &RequestOptions) -> Result<Found, StoreError> {
        let keep = |bytes: Vec<u8>| self.contents.keep(Hash::of(&bytes), bytes);
        let absent = || StoreError::new(StoreErrorKind::NotFound, "the file does not exist");
        match target {
            Target::Settings => {
                // Clients request this file to learn whether the store is available. A store in a bucket or
                // on servers reports that itself.
                if !self.store.is_remote() {
                    self.store.is_there()?;
                }
                keep(settings_bytes(self.store.chunk_bytes())?).map(Found::Content)
            }
            Target::Images => {
                // Includes damaged lists: a client that requests one gets an error, and the other lists are
                // served.
                let listed = self.store.listed()?;
                let mut names: Vec<_> = listed.images.into_iter().map(|image| image.name).collect();
                names.extend(listed.unreadable.into_iter().map(|(name, _)| name));
                names.sort_unstable();
                let list: String = names.iter().map(|name| format!("{name}\n")).collect();
                keep(list.into_bytes()).map(Found::Content)
            }
            // The list is read again for each request: a read that an earlier request began may miss a version that was
            // published since.
            Target::Image(name) => {
                let image = self.store.image(name)?.ok_or_else(absent)?;
                keep(image.encode()?).map(Found::Content)
            }
            Target::Trace(id) => {
                let read = || keep(self.store.trace(*id)?.ok_or_else(absent)?);
                self.once.read(target, read).map(Found::Content)
            }
            Target::Holes(id) => {
                let read = || keep(self.holes(*id, options)?.ok_or_else(absent)?);
                // A client that found an object wrong asks whether the object has got holes since. The result
                // of a read that began earlier does not answer that.
                let list = if options.again.is_some() { read() } else { self.once.read(target, read) };
                list.map(Found::Content)
            }
            Target::Manifest(id) => self.leased(target, *id).map(Found::Content),
            Target::Object(id) => self.object(*id, options).map(Found::Object),
        }
    }

    /// Returns a manifest. Its version is kept from removal before the manifest is read.
    fn leased(&self, target: &Target, id: Hash) -> Result<Arc<Content>, StoreError> {
        let is_new = self.leases.renew(id, Instant::now())?;
        let manifest = self.manifest(target, id);
        // A store on servers pins every version that it is asked for, so unknown hashes would use up the limit
        // for real versions.
        if is_new && matches!(&manifest, Err(e) if e.kind() == StoreErrorKind::NotFound) {
            self.leases.drop_one(id);
        }
        manifest
    }

    fn manifest(&self, target: &Target, id: Hash) -> Result<Arc<Content>, StoreError> {
        if let Some(kept) = self.contents.kept(id) {
            return Ok(kept);
        }
        self.once.read(target, || match self.contents.kept(id) {
            // Another request has finished reading it.
            Some(kept) => Ok(kept),
            None => self.contents.keep(id, self.store.manifest(id)?),
        })
    }

    /// Opens an object. Objects of a remote store stay open, because opening one needs a request for its
    /// length. A local object is opened each time: opening is fast, and an open file would keep its space
    /// after its removal. If a client found an object wrong, it is opened again, because it may have been
    /// repaired or be elsewhere by now.
    fn object(&self, id: Hash, options: &RequestOptions) -> Result<Arc<dyn Object>, StoreError> {
        if !self.store.is_remote() {
            return self.store.open_object(id);
        }
        let kept = self.objects.lock().iter().find(|object| object.id() == id).cloned();
        if let Some(open) = kept.filter(|open| options.can_use(open.len_bytes())) {
            return Ok(open);
        }
        self.objects.lock().retain(|object| object.id() != id);
        let opened = self.open(id, options)?;
        let mut objects = self.objects.lock();
        objects.push(Arc::clone(&opened));
        if objects.len() > OBJECTS_OPEN_MAX {
            objects.remove(0);
        }
        Ok(opened)
    }

    fn open(&self, id: Hash, options: &RequestOptions) -> Result<Arc<dyn Object>, StoreError> {
        if options.again.is_some() { self.store.open_object_uncached(id) } else { self.store.open_object(id) }
    }

    /// The list of an object's holes; `None` if it has none. The object is opened again, because an open
    /// object may remember earlier holes.
    fn holes(&self, id: Hash, options: &RequestOptions) -> Result<Option<Vec<u8>>, StoreError> {
        let object = self.open(id, options)?;
        let holes = match options.again.and_then(|again| again.reading) {
            Some(reading) => object.holes_of_reading(reading)?,
            None => object.holes()?,
        };
        Ok((!holes.is_empty()).then(|| holes.encode(object.len_bytes())))
    }

    fn send<B>(
        &self,
        target: &Target,
        found: &Found,
        request: &Request<B>,
        context: ReadContext,
    ) -> Response<AnswerBody> {
        let headers = request.headers();
        let (tag, len_bytes) = (found.tag(), found.len_bytes());
        // An ETag that the client knows proves nothing about an object that the client found wrong: a cache may have
        // zeroes where the object has bytes again.
        let may_match = !(matches!(found, Found::Object(_)) && context.again.is_some());
        let etag_matches = may_match
            && text(headers, &header::IF_NONE_MATCH).is_some_and(|tags| {
                tags.split(',')
                    .map(|known| known.trim().trim_start_matches("W/"))
                    .any(|known| known == tag || known == "*")
            });
        let same = text(headers, &header::IF_RANGE).is_none_or(|known| may_match && known.trim() == tag);
        let range = text(headers, &header::RANGE).filter(|_| same);
        let (status, at, part_bytes) = match wanted(range, len_bytes) {
            _ if etag_matches => (StatusCode::NOT_MODIFIED, 0, 0),
            Wanted::All => (StatusCode::OK, 0, len_bytes),
            Wanted::Part(at, part_bytes) => (StatusCode::PARTIAL_CONTENT, at, part_bytes),
            Wanted::Nothing => {
                let message = format!("the range starts beyond the end: the file has {len_bytes} bytes");
                let mut refused = problem(StatusCode::RANGE_NOT_SATISFIABLE, "invalid", &message);
                put(&mut refused, header::CONTENT_RANGE, &format!("bytes */{len_bytes}"));
                return refused;
            }
        };
        // Bytes that would not be sent are not read.
        let is_head = request.method() == Method::HEAD;
        let mut response = Response::new(found.part(at, if is_head { 0 } else { part_bytes }, context));
        *response.status_mut() = status;
        put(&mut response, header::ETAG, &tag);
        put(&mut response, header::CACHE_CONTROL, self.cache_control(target));
        put(&mut response, header::ACCEPT_RANGES, "bytes");
        if status != StatusCode::NOT_MODIFIED {
            put(&mut response, header::CONTENT_LENGTH, &part_bytes.to_string());
            let kind = if *target == Target::Images { "text/plain" } else { "application/octet-stream" };
            put(&mut response, header::CONTENT_TYPE, kind);
        }
        if status == StatusCode::PARTIAL_CONTENT {
            let last = at.saturating_add(part_bytes).saturating_sub(1);
            put(&mut response, header::CONTENT_RANGE, &format!("bytes {at}-{last}/{len_bytes}"));
        }
        response
    }

    fn cache_control(&self, target: &Target) -> &'static str {
        match (target.is_immutable(), self.tokens.is_some()) {
            (false, _) => "no-cache",
            // A shared cache would also answer clients without a token.
            (true, true) => "private, max-age=31536000, immutable",
            (true, false) => "public, max-age=31536000, immutable",
        }
    }
}

/// Whether a web page may have caused the request. Any page can make a browser send requests to loopback
/// ports, and can point its own host name at a loopback address (DNS rebinding). Over TLS the host name is not checked,
/// because such a page has no certificate for its name.
fn is_foreign<B>(request: &Request<B>, tls: bool) -> bool {
    let headers = request.headers();
    // HTTP/2 has the host in the URI.
    let host = text(headers, &header::HOST).or_else(|| request.uri().authority().map(Authority::as_str));
    let authority = host.and_then(|host| host.parse::<Authority>().ok());
    let name = authority.as_ref().map_or("", Authority::host).trim_matches(['[', ']']);
    let is_ours =
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    headers.contains_key(header::ORIGIN) || !(tls || is_ours)
}

fn text<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn put(response: &mut Response<AnswerBody>, name: header::HeaderName, value: &str) {
    // All values here are hexadecimal digits, numbers and words.
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

fn missing(target: &Target) -> String {
    match target {
        Target::Settings | Target::Images => "this store was removed".to_owned(),
        Target::Image(name) => format!("there is no image '{name}' in this store"),
        Target::Manifest(id) => format!("there is no version {id} in this store"),
        Target::Object(id) => format!("there is no data object {id} in this store"),
        Target::Holes(id) => format!("data object {id} has no holes in this store"),
        Target::Trace(id) => format!("no boot trace of version {id} was recorded in this store"),
    }
}

fn refused(target: &Target, path: &str, why: &StoreError) -> Response<AnswerBody> {
    match why.kind() {
        StoreErrorKind::NotFound => problem(StatusCode::NOT_FOUND, "not_found", &missing(target)),
        // A trace is only a hint. If the server answered with an error, its clients would treat the whole
        // server as down.
        StoreErrorKind::Damaged | StoreErrorKind::NoSpace if matches!(target, Target::Trace(_)) => {
            tracing::warn!(path, error = %why, "cannot send a boot trace: its version boots without prefetching");
            problem(StatusCode::NOT_FOUND, "not_found", &missing(target))
        }
        // The client waits, as it would if it read this store itself. `NoSpace` means that memory for answers
        // is used up.
        StoreErrorKind::Unreachable | StoreErrorKind::NoSpace => {
            tracing::warn!(path, error = %why, "cannot answer a request now: its client is asked to try again");
            busy()
        }
        _ => {
            tracing::error!(path, error = %why, "cannot answer a request");
            failed()
        }
    }
}

fn failed() -> Response<AnswerBody> {
    problem(
        StatusCode::INTERNAL_SERVER_ERROR,
        "failed",
        "the store cannot be read; the reason is in the server's log",
    )
}

fn busy() -> Response<AnswerBody> {
    let message = "the server has reached its limit of reads or of unsent data, or the store behind it does \
                   not answer; try again";
    ask_again(message)
}

/// The answer on a connection that is closed so that a new one can be accepted.
fn closed_for_another() -> Response<AnswerBody> {
    ask_again(
        "the limit of connections is reached, and this one is closed for a new one; connect and try again",
    )
}

fn ask_again(message: &str) -> Response<AnswerBody> {
    let mut refused = problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message);
    put(&mut refused, header::RETRY_AFTER, "1");
    refused
}

/// An answer with the reason of a failure. In messages, only quotes and backslashes need escaping for JSON.
fn problem(status: StatusCode, kind: &str, message: &str) -> Response<AnswerBody> {
    let message: String = message.chars().filter(|c| !c.is_control()).collect();
    let message = message.replace('\\', "\\\\").replace('"', "\\\"");
    let body = format!("{{\"kind\": \"{kind}\", \"message\": \"{message}\"}}\n");
    let mut response = Response::new(AnswerBody::whole(Bytes::from(body.clone())));
    *response.status_mut() = status;
    put(&mut response, header::CONTENT_TYPE, "application/problem+json");
    put(&mut response, header::CONTENT_LENGTH, &body.len().to_string());
    put(&mut response, header::CACHE_CONTROL, "no-store");
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_answers_have_their_bytes_once() {
        let dir = tempfile::tempdir().unwrap();
        let store = headwater_store::LocalDir::open(dir.path(), headwater_store::Access::WRITE).unwrap();
        let answers = Answers::new(Arc::new(store), None, false, &Limits::default());
        let bytes = || match answers.find(&Target::Settings, &RequestOptions::default()).unwrap() {
            Found::Content(content) => content.part(0, u64::MAX),
            Found::Object(_) => panic!("the content of the settings was expected"),
        };
        let all = [bytes(), bytes()];
        assert!(all[0].len() == 64 && std::ptr::eq(all[0].as_ptr(), all[1].as_ptr()));
    }

    #[test]
    fn only_paths_of_a_store_directory_are_served() {
        let hash = Hash::of(b"x");
        assert_eq!(Target::of("/store"), Some(Target::Settings));
        assert_eq!(Target::of("/images/"), Some(Target::Images));
        assert_eq!(Target::of("/images/debian-12"), Some(Target::Image("debian-12".parse().unwrap())));
        assert_eq!(Target::of(&format!("/manifests/{hash}")), Some(Target::Manifest(hash)));
        assert_eq!(Target::of(&format!("/objects/{hash}")), Some(Target::Object(hash)));
        assert_eq!(Target::of(&format!("/holes/{hash}")), Some(Target::Holes(hash)));
        assert_eq!(Target::of(&format!("/traces/{hash}")), Some(Target::Trace(hash)));
        let capital = format!("/objects/{}", hash.to_string().to_uppercase());
        for none in [
            "/",
            "",
            "/lock",
            "/tmp/x",
            "/images",
            "/images/..",
            "/images/%2e%2e",
            "/objects/",
            "/holes/",
            "/store/",
            "//store",
            "/images/a/b",
            "/objects/../store",
            "/pins/x",
            "/locks/exclusive",
            &capital,
        ] {
            assert_eq!(Target::of(none), None, "{none}");
        }
    }
}
