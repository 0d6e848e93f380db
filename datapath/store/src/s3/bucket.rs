//! One bucket: requests that end, with bounded retries, and errors that say what was tried on what.
//!
//! A request that fails in a way that may pass (no connection, no answer in time, a cut answer, a status of 500 and
//! above, 429) is sent again, up to [`REQUEST_ATTEMPTS`](super::REQUEST_ATTEMPTS) times, with pauses that double from
//! [`REQUEST_PAUSE`](super::REQUEST_PAUSE) up to [`PAUSE_MAX`]. What the server refuses (401, 403, 404, 412), or has no room
//! for (507, and what says so by its code), is not. Neither is what the server does not know (501).
//!
//! An answer of 503 or 429 with `Retry-After` is no failed attempt: the request is sent again after that time, for as long as
//! [`WhileBusy`] says.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::Either;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    ClientOptions, Error, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutOptions, PutPayload, RetryConfig, UpdateVersion,
};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::error::{StoreError, StoreErrorKind};
use crate::s3::body::read_up_to;
use crate::s3::failure::Failure;
use crate::s3::keys::KeySource;
use crate::s3::listing::Connector;
use crate::s3::part::Parts;
use crate::s3::{Keys, S3Options, S3Url};
use crate::while_busy::WhileBusy;

/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// The longest that an attempt at a mark or at a removal takes, however long others may take: all attempts at one must be over long
/// before a mark is stale that is not renewed meanwhile.
pub(super) const PROMPT_MAX: Duration = Duration::from_secs(30);
/// Threads that wait for S3.
const IO_THREADS: usize = 2;
/// Keys that are removed at the same time.
const REMOVALS: usize = 8;
/// The most pages of a listing: ten million keys, as a page has a thousand.
const LISTED_PAGES_MAX: u32 = 10_000;

/// What is done to a key, and which permission that takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
    /// On a condition.
    WriteIf,
    /// In parts.
    WriteParts,
    Remove,
    List,
}

impl Operation {
    /// The feature that it needs, if not all servers have that.
    pub(super) fn feature(self) -> Option<&'static str> {
        match self {
            Self::WriteIf => Some("conditional writes (If-None-Match and If-Match on PUT)"),
            Self::WriteParts => Some("uploads in parts (multipart uploads)"),
            Self::Read | Self::Write | Self::Remove | Self::List => None,
        }
    }
}

/// What became of a request that can fail in ways that callers deal with.
#[derive(Debug)]
pub(super) enum Refusal {
    /// There is no such key.
    Absent,
    /// The key is not as the condition said.
    Conflict,
    /// The key may have been written, or may yet be, by an attempt that got no answer: something else is there, or all attempts
    /// failed like this.
    Unknown(Option<StoreError>),
    /// Everything else.
    Failed(StoreError),
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

/// What attempts that failed may have done all the same.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Doubt {
    /// Attempts before the last one that failed in a way that may pass.
    pub(super) failed_before: u32,
    /// Whether one may have reached the server without an answer coming back.
    pub(super) unanswered: bool,
}

/// On which condition a key is written.
#[derive(Clone, Debug)]
pub(super) enum Condition {
    /// Whatever is there.
    Any,
    /// Nothing is there.
    Absent,
    /// What is there has this tag.
    Tag(String),
}

/// A key in a listing.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Without the prefix that was listed.
    pub(super) name: String,
    pub(super) len_bytes: u64,
    /// When the server took it, in seconds since 1970 on the server's clock.
    pub(super) at_s: i64,
}

/// A bucket, and the prefix of all keys in it.
#[derive(Clone)]
pub(super) struct Bucket {
    s3: AmazonS3,
    /// Who is asked for keys, where the environment has none.
    key_source: Option<KeySource>,
    url: Arc<S3Url>,
    timeout: Duration,
    attempts: u32,
    pause: Duration,
    while_busy: WhileBusy,
    runtime: &'static Runtime,
    /// Whether reads of objects end, shared by all clones.
    closed: Arc<watch::Sender<bool>>,
    /// Reads of objects that may go on without a thread, shared by all clones.
    parts: Arc<Parts>,
}

impl std::fmt::Debug for Bucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bucket({})", self.url)
    }
}

impl Bucket {
    pub(super) fn new(url: &S3Url, options: &S3Options) -> Result<Self, StoreError> {
        let failed =
            |e: Error| StoreError::new(StoreErrorKind::Invalid, format!("cannot use the store {url}: {e}"));
        let mut builder = match &options.keys {
            Keys::Environment => AmazonS3Builder::from_env(),
            Keys::Given { id, secret } => {
                AmazonS3Builder::new().with_access_key_id(id).with_secret_access_key(secret)
            }
        };
        builder = builder
            .with_bucket_name(&url.bucket)
            .with_virtual_hosted_style_request(url.virtual_hosted)
            .with_http_connector(Connector)
            // Attempts are counted here, for all requests alike, bodies of answers included.
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .with_client_options(
                ClientOptions::new()
                    .with_timeout_disabled()
                    .with_connect_timeout(url.timeout.min(options.connect_timeout))
                    .with_allow_http(url.endpoint.as_ref().is_some_and(|e| e.starts_with("http://"))),
            );
        if let Some(endpoint) = &url.endpoint {
            // Twice, as the environment may name a server of its own (`AWS_ENDPOINT_URL_S3`) that would go before the URL's.
            builder = builder.with_endpoint(endpoint).with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
        }
        if let Some(region) = &url.region {
            builder = builder.with_region(region);
        }
        Ok(Self {
            key_source: KeySource::of(&builder),
            s3: builder.build().map_err(failed)?,
            url: Arc::new(url.clone()),
            timeout: options.timeout.unwrap_or(url.timeout),
            attempts: options.attempts.max(1),
            pause: options.pause,
            while_busy: options.while_busy.clone(),
            runtime: io_threads()?,
            closed: Arc::new(watch::Sender::new(false)),
            parts: Arc::default(),
        })
    }

    /// The same for marks, whose writes and reads do not take as long as others may.
    pub(super) fn prompt(&self) -> Self {
        let while_busy = self.while_busy.at_most(PROMPT_MAX);
        Self { timeout: self.timeout.min(PROMPT_MAX), while_busy, ..self.clone() }
    }

    /// The same for those whose clients wait as well: requests do not wait for a server that is busy.
    pub(super) fn hasty(&self) -> Self {
        Self { while_busy: WhileBusy::not_at_all(), ..self.clone() }
    }

    /// How long an attempt may take. A removal that is under way when others take us for dead could take what they need by then.
    pub(super) fn timeout(&self, operation: Operation) -> Duration {
        if operation == Operation::Remove { self.timeout.min(PROMPT_MAX) } else { self.timeout }
    }

    /// Ends reads of parts of objects, those under way too, and refuses new ones. All else goes on: marks are to be removed.
    pub(super) fn close(&self) {
        self.closed.send_replace(true);
    }

    pub(super) fn parts(&self) -> &Arc<Parts> {
        &self.parts
    }

    pub(super) fn url(&self) -> &S3Url {
        &self.url
    }

    /// A key as people find it again.
    pub(super) fn shown(&self, key: &str) -> String {
        let slash = if self.url.prefix.is_empty() || key.is_empty() { "" } else { "/" };
        format!("s3://{}/{}{slash}{key}", self.url.bucket, self.url.prefix)
    }

    fn path(&self, key: &str) -> Path {
        if self.url.prefix.is_empty() {
            Path::from(key)
        } else {
            Path::from(format!("{}/{key}", self.url.prefix))
        }
    }

    /// Runs something on the threads that wait for S3, and waits for it. Works on every thread, also on those of
    /// another runtime.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (done, outcome) = mpsc::sync_channel(1);
        self.runtime.spawn(async move {
            let outcome = work.await;
            // Nobody waits any more where the caller's thread is gone.
            let _ = done.send(outcome);
        });
        outcome.recv().map_err(|_| {
            StoreError::new(StoreErrorKind::Io, format!("a request to {} was given up", self.url))
        })
    }

    /// Starts something that goes on by itself.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> tokio::task::AbortHandle {
        self.runtime.spawn(work).abort_handle()
    }

    /// How long to wait for a server that is busy, as it is asked to. `None`: no longer.
    fn busy_pause(
        &self,
        operation: Operation,
        failure: &Failure,
        asked: Duration,
        since: Instant,
    ) -> Option<Duration> {
        let Failure::Busy(busy) = failure else { return None };
        let while_busy = match operation {
            // As an attempt at it, it must be over before a mark is stale.
            Operation::Remove => self.while_busy.at_most(PROMPT_MAX),
            _ => self.while_busy.clone(),
        };
        let pause = busy.wait.max(asked);
        while_busy.goes_on(since.elapsed().saturating_add(pause)).then_some(pause)
    }

    /// Sends a request until it succeeds, is refused, or has been sent often enough. An error comes with what the attempts may
    /// have done.
    async fn attempt<T, F>(
        self,
        operation: Operation,
        key: String,
        call: impl Fn(AmazonS3, Path) -> F + Send,
    ) -> Result<T, (Refusal, Doubt)>
    where
        T: Send,
        F: Future<Output = Result<T, Error>> + Send,
    {
        let path = self.path(&key);
        let mut pause = self.pause;
        let mut doubt = Doubt::default();
        let timeout = self.timeout(operation);
        let (started, mut attempt) = (Instant::now(), 0);
        loop {
            attempt += 1;
            let request = call(self.s3.clone(), path.clone());
            let mut asked = self.key_source.as_ref();
            let sent = async {
                // What fails here was never sent to the store.
                if let Some(source) = asked {
                    source.ask(&self.s3).await?;
                    asked = None;
                }
                request.await.map_err(|e| Failure::of(&e))
            };
            let outcome = tokio::time::timeout(timeout, sent).await;
            let failure = match (outcome, asked) {
                (Ok(Ok(value)), _) => return Ok(value),
                (Ok(Err(failure)), _) => failure,
                (Err(_), Some(source)) => source.timed_out(),
                (Err(_), None) => Failure::timed_out(timeout),
            };
            match failure {
                Failure::Absent => return Err((Refusal::Absent, doubt)),
                Failure::Conflict => return Err((Refusal::Conflict, doubt)),
                _ => {}
            }
            if let Some(pause_busy) = self.busy_pause(operation, &failure, pause, started) {
                let why = format!("{}: {failure}", self.url);
                if self.while_busy.wait_later(pause_busy, &why).await {
                    pause = pause.saturating_mul(2).min(PAUSE_MAX);
                    doubt.failed_before += 1;
                    attempt -= 1;
                    continue;
                }
                let error = StoreError::new(StoreErrorKind::Io, format!("stopped while waiting for {why}"));
                return Err((Refusal::Failed(error), doubt));
            }
            // It was waited for long enough.
            let is_over = matches!(failure, Failure::Busy(_)) && self.while_busy.goes_on(Duration::ZERO);
            doubt.unanswered |= matches!(failure, Failure::Broken(_));
            if is_over || attempt >= self.attempts || !failure.may_pass() {
                let error = failure.describe(operation, &self.shown(&key), &self.url, attempt);
                return Err((Refusal::Failed(error), doubt));
            }
            doubt.failed_before += 1;
            tracing::debug!(key = self.shown(&key), attempt, ?operation, %failure, "S3 is asked again");
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(PAUSE_MAX);
        }
    }

    /// An error where "there is no such key" is not an answer.
    fn must(&self, operation: Operation, key: &str, refusal: Refusal) -> StoreError {
        match refusal {
            Refusal::Failed(error) => error,
            Refusal::Absent => Failure::Absent.describe(operation, &self.shown(key), &self.url, 1),
            Refusal::Conflict | Refusal::Unknown(_) => {
                Failure::Conflict.describe(operation, &self.shown(key), &self.url, 1)
            }
        }
    }

    /// A whole object and its tag; `None` if there is none.
    pub(super) fn get(&self, key: &str, max_bytes: u64) -> Result<Option<(Bytes, String)>, StoreError> {
        self.wait(self.clone().get_later(key.to_owned(), max_bytes))?
    }

    /// As [`Bucket::get`], on the threads that wait for S3.
    pub(super) async fn get_later(
        self,
        key: String,
        max_bytes: u64,
    ) -> Result<Option<(Bytes, String)>, StoreError> {
        let too_large = Arc::new(AtomicBool::new(false));
        let noticed = Arc::clone(&too_large);
        let found = self.clone().attempt(Operation::Read, key.clone(), move |s3, path| {
            let noticed = Arc::clone(&noticed);
            async move {
                let found = s3.get(&path).await?;
                let tag = strong(found.meta.e_tag.clone().unwrap_or_default());
                let len_bytes = found.meta.size;
                if len_bytes > max_bytes {
                    noticed.store(true, Ordering::Relaxed);
                    return Ok((Bytes::new(), tag));
                }
                let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
                Ok((exactly(found, len).await?, tag))
            }
        });
        let outcome = found.await;
        if too_large.load(Ordering::Relaxed) {
            return Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!("{} is larger than {max_bytes} bytes", self.shown(&key)),
            ));
        }
        match outcome {
            Ok(found) => Ok(Some(found)),
            Err((Refusal::Absent, _)) => Ok(None),
            Err((refusal, _)) => Err(self.must(Operation::Read, &key, refusal)),
        }
    }

    /// A part of an object, of exactly this length.
    pub(super) fn get_range(&self, key: &str, offset: u64, len: usize) -> Result<Bytes, StoreError> {
        self.wait(self.clone().get_range_later(key.to_owned(), offset, len))?
    }

    /// As [`Bucket::get_range`], on the threads that wait for S3.
    pub(super) async fn get_range_later(
        self,
        key: String,
        offset: u64,
        len: usize,
    ) -> Result<Bytes, StoreError> {
        let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
        let end = end.ok_or_else(|| self.must(Operation::Read, &key, Refusal::Conflict))?;
        let work = self.clone().attempt(Operation::Read, key.clone(), move |s3, path| async move {
            let range = Some(GetRange::Bounded(offset..end));
            let found = s3.get_opts(&path, GetOptions { range, ..GetOptions::default() }).await?;
            if found.range != (offset..end) {
                // It says itself that there is no more, and will not say anything else.
                return Ok(Err(found.meta.size));
            }
            exactly(found, len).await.map(Ok)
        });
        let mut closed = self.closed.subscribe();
        // The sender lives as long as this bucket.
        let closed = pin!(closed.wait_for(|is_closed| *is_closed));
        let outcome = match futures_util::future::select(closed, pin!(work)).await {
            Either::Left(_) => {
                let message = format!("{} was closed during a read", self.url);
                return Err(StoreError::new(StoreErrorKind::Io, message));
            }
            Either::Right((outcome, _)) => outcome,
        };
        match outcome {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(there)) => Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!("cannot read {len} bytes at {offset} of {}: it has {there} bytes", self.shown(&key)),
            )),
            Err((refusal, _)) => Err(self.must(Operation::Read, &key, refusal)),
        }
    }

    /// Length and time of an object; `None` if there is none.
    pub(super) fn head(&self, key: &str) -> Result<Option<(u64, i64)>, StoreError> {
        let work = self.clone().attempt(Operation::Read, key.to_owned(), |s3, path| async move {
            let meta = s3.head(&path).await?;
            Ok((meta.size, meta.last_modified.timestamp()))
        });
        match self.wait(work)? {
            Ok(meta) => Ok(Some(meta)),
            Err((Refusal::Absent, _)) => Ok(None),
            Err((refusal, _)) => Err(self.must(Operation::Read, key, refusal)),
        }
    }

    /// Writes a key and returns its new tag. Where all attempts failed, what that means is looked at for those who write on a
    /// condition: without one the same can be written again.
    pub(super) fn put(&self, key: &str, bytes: &Bytes, condition: &Condition) -> Result<String, Refusal> {
        let work = self.clone().put_later(key.to_owned(), bytes.clone(), condition.clone());
        let (refusal, doubt) = match self.wait(work)? {
            Ok(tag) => return Ok(tag),
            Err(refused) => refused,
        };
        let why = match refusal {
            Refusal::Failed(e) if doubt.unanswered && !matches!(condition, Condition::Any) => Some(e),
            Refusal::Failed(e) => return Err(Refusal::Failed(e)),
            refusal if doubt.failed_before == 0 => return Err(refusal),
            _ => None,
        };
        // An attempt that got no answer may have been the one that wrote it. If something else is there, somebody may have written
        // that since, or the server is still at that attempt. And if that cannot be seen, nothing is known either.
        match self.get(key, u64::try_from(bytes.len()).unwrap_or(u64::MAX)) {
            Ok(Some((there, tag))) if there == *bytes => Ok(tag),
            _ => Err(Refusal::Unknown(why)),
        }
    }

    /// As [`Bucket::put`], without a look at what is there where attempts failed.
    pub(super) fn put_once(&self, key: &str, bytes: &Bytes, condition: Condition) -> Result<String, Refusal> {
        let work = self.clone().put_later(key.to_owned(), bytes.clone(), condition);
        self.wait(work)?.map_err(|(refusal, _)| refusal)
    }

    /// As [`Bucket::put`], on the threads that wait for S3, and with what attempts that failed may have done.
    pub(super) async fn put_later(
        self,
        key: String,
        bytes: Bytes,
        condition: Condition,
    ) -> Result<String, (Refusal, Doubt)> {
        let operation =
            if matches!(condition, Condition::Any) { Operation::Write } else { Operation::WriteIf };
        self.attempt(operation, key, move |s3, path| {
            let payload = PutPayload::from_bytes(bytes.clone());
            let mode = match &condition {
                Condition::Any => PutMode::Overwrite,
                Condition::Absent => PutMode::Create,
                Condition::Tag(tag) => {
                    PutMode::Update(UpdateVersion { e_tag: Some(tag.clone()), version: None })
                }
            };
            async move {
                let options = PutOptions { mode, ..PutOptions::default() };
                let written = s3.put_opts(&path, payload, options).await?;
                Ok(strong(written.e_tag.unwrap_or_default()))
            }
        })
        .await
    }

    /// Removes a key. One that is not there is no error.
    pub(super) fn remove(&self, key: &str) -> Result<(), StoreError> {
        self.wait(self.clone().remove_all_later(vec![key.to_owned()]))?
    }

    /// Removes keys, several at a time, on the threads that wait for S3.
    async fn remove_all_later(self, keys: Vec<String>) -> Result<(), StoreError> {
        let removals = futures_util::stream::iter(keys.into_iter().map(|key| {
            let bucket = self.clone();
            async move {
                let removed = bucket.clone().attempt(Operation::Remove, key.clone(), |s3, path| async move {
                    s3.delete(&path).await
                });
                match removed.await {
                    Ok(_) | Err((Refusal::Absent, _)) => None,
                    Err((refusal, _)) => Some(bucket.must(Operation::Remove, &key, refusal)),
                }
            }
        }));
        let failures: Vec<_> = removals.buffer_unordered(REMOVALS).collect().await;
        failures.into_iter().flatten().next().map_or(Ok(()), Err)
    }

    /// Removes keys until then at the latest: what is not gone by then stays.
    pub(super) fn remove_all_until(&self, keys: Vec<String>, until: Instant) -> Result<(), StoreError> {
        let removals = self.clone().remove_all_later(keys);
        let in_time = async move { tokio::time::timeout_at(until.into(), removals).await };
        match self.wait(in_time)? {
            Ok(removed) => removed,
            Err(_) => Err(StoreError::new(
                StoreErrorKind::Unreachable,
                format!(
                    "{} takes so long to remove keys that others could take this process for dead: it stops, and what is \
                     left is removed later",
                    self.url
                ),
            )),
        }
    }

    /// All keys below `folder`, which is without slashes at its ends. Each page is a request of its own. Where one fails there is no
    /// listing: what is not in one is taken for gone.
    pub(super) fn list(&self, folder: &str) -> Result<Vec<Entry>, StoreError> {
        self.list_beginning(folder, "")
    }

    /// The same, of keys whose names in `folder` begin like this.
    pub(super) fn list_beginning(&self, folder: &str, beginning: &str) -> Result<Vec<Entry>, StoreError> {
        let below = if folder.is_empty() { self.url.prefix.clone() } else { self.path(folder).to_string() };
        let below = if below.is_empty() { below } else { format!("{below}/") };
        let entry = |meta: ObjectMeta| {
            let name = meta.location.as_ref().strip_prefix(&below)?.to_owned();
            Some(Entry { name, len_bytes: meta.size, at_s: meta.last_modified.timestamp() })
        };
        let listed = format!("{below}{beginning}");
        let (mut found, mut next): (Vec<Entry>, Option<String>) = (Vec::new(), None);
        for _ in 0..LISTED_PAGES_MAX {
            let (prefix, page_token) = (listed.clone(), next.clone());
            let work = self.clone().attempt(Operation::List, folder.to_owned(), move |s3, _| {
                let (prefix, page_token) = (prefix.clone(), page_token.clone());
                async move {
                    let options = PaginatedListOptions { page_token, ..PaginatedListOptions::default() };
                    s3.list_paginated(Some(&prefix).filter(|it| !it.is_empty()).map(String::as_str), options)
                        .await
                }
            });
            let outcome = self.wait(work)?;
            let page = outcome.map_err(|(refusal, _)| self.must(Operation::List, folder, refusal))?;
            found.extend(page.result.objects.into_iter().filter_map(entry));
            match page.page_token.filter(|token| !token.is_empty()) {
                None => return Ok(found),
                Some(token) if next.as_deref() == Some(token.as_str()) => break,
                token => next = token,
            }
        }
        let shown = self.shown(folder);
        Err(StoreError::new(
            StoreErrorKind::Io,
            format!("cannot list {shown}: the server's pages come to no end after {} keys", found.len()),
        ))
    }

    /// Starts a key that is sent in parts; it appears when it is complete.
    pub(super) fn begin_parts(&self, key: &str) -> Result<String, StoreError> {
        let work = self.clone().attempt(Operation::WriteParts, key.to_owned(), |s3, path| async move {
            s3.create_multipart(&path).await
        });
        let outcome = self.wait(work)?;
        outcome.map_err(|(refusal, _)| self.must(Operation::WriteParts, key, refusal))
    }

    /// Sends some parts at the same time: their numbers from 0, and their bytes.
    pub(super) fn put_parts(
        &self,
        key: &str,
        upload: &str,
        parts: Vec<(usize, Bytes)>,
    ) -> Result<Vec<(usize, String)>, Refusal> {
        let (bucket, key, upload) = (self.clone(), key.to_owned(), upload.to_owned());
        let outcome = self.wait(async move {
            let sending = parts.into_iter().map(|(number, bytes)| {
                let (upload, bytes) = (upload.clone(), bytes);
                let sent = bucket.clone().attempt(Operation::WriteParts, key.clone(), move |s3, path| {
                    let (upload, payload) = (upload.clone(), PutPayload::from_bytes(bytes.clone()));
                    async move { s3.put_part(&path, &upload, number, payload).await }
                });
                async move { sent.await.map(|part| (number, strong(part.content_id))) }
            });
            futures_util::future::join_all(sending).await
        })?;
        outcome.into_iter().map(|sent| sent.map_err(|(refusal, _)| refusal)).collect()
    }

    /// Puts the parts together, in the order of their numbers. Where an attempt did that whose answer was lost, there is no such upload
    /// any more.
    pub(super) fn complete_parts(&self, key: &str, upload: &str, parts: &[String]) -> Result<(), Refusal> {
        let parts: Vec<PartId> =
            parts.iter().map(|content_id| PartId { content_id: content_id.clone() }).collect();
        let upload = upload.to_owned();
        let work = self.clone().attempt(Operation::WriteParts, key.to_owned(), move |s3, path| {
            let (upload, parts) = (upload.clone(), parts.clone());
            async move { s3.complete_multipart(&path, &upload, parts).await }
        });
        self.wait(work)?.map(drop).map_err(|(refusal, _)| refusal)
    }

    /// Forgets parts that were sent. What the server does not know is no error.
    pub(super) fn abort_parts(&self, key: &str, upload: &str) -> Result<(), StoreError> {
        let upload = upload.to_owned();
        let work = self.clone().attempt(Operation::Remove, key.to_owned(), move |s3, path| {
            let upload = upload.clone();
            async move { s3.abort_multipart(&path, &upload).await }
        });
        match self.wait(work)? {
            Ok(_) | Err((Refusal::Absent, _)) => Ok(()),
            Err((refusal, _)) => Err(self.must(Operation::Remove, key, refusal)),
        }
    }
}

/// A tag as conditions take it. A proxy that changes the form of a body makes the server's tag a weak one, which matches nothing.
fn strong(tag: String) -> String {
    tag.strip_prefix("W/").map_or(tag.clone(), str::to_owned)
}

/// The bytes of an answer, which must be so many.
async fn exactly(found: GetResult, len: usize) -> Result<Bytes, Error> {
    let why = match read_up_to(found.into_stream(), len).await? {
        Some(bytes) if bytes.len() == len => return Ok(bytes),
        Some(_) => format!("the answer ended before its {len} bytes were there"),
        None => format!("the answer went on after its {len} bytes"),
    };
    Err(Error::Generic { store: "S3", source: why.into() })
}

/// The threads that wait for S3, shared by all stores of the process.
fn io_threads() -> Result<&'static Runtime, StoreError> {
    static THREADS: OnceLock<Result<Runtime, String>> = OnceLock::new();
    let made = THREADS.get_or_init(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(IO_THREADS).thread_name("hw-s3").enable_all();
        builder.build().map_err(|e| e.to_string())
    });
    made.as_ref()
        .map_err(|e| StoreError::new(StoreErrorKind::Io, format!("cannot start threads for S3: {e}")))
}
