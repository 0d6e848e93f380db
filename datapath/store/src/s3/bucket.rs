//! Sends requests to one bucket, with timeouts and a bounded number of retries. Errors say which operation
//! failed on which key.
//!
//! A request is sent again if its failure may be temporary: no connection, no credentials yet, no answer in time, a
//! cut answer, a status of 500 and above, 429, or 408. It is sent at most
//! [`REQUEST_ATTEMPTS`](super::REQUEST_ATTEMPTS) times. The pauses double from [`REQUEST_PAUSE`](super::REQUEST_PAUSE) up to [`PAUSE_MAX`]. There is no retry if
//! the server refuses the request (401, 403, 404, 412), lacks space (507, or a code that says so), or does
//! not know the request (501).
//!
//! An answer of 503 or 429 with `Retry-After` does not count as a failed attempt. The request is sent again
//! after that time, for as long as [`WhileBusy`] allows. Without such a wait it is an attempt like any other.

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
/// The longest time of one attempt to write a mark ([`super::mark`]) or to remove keys, even if other requests have a longer
/// timeout. All attempts at a mark must end long before an unrenewed mark is stale.
pub(super) const PROMPT_MAX: Duration = Duration::from_secs(30);
/// Threads that wait for answers of S3.
const IO_THREADS: usize = 2;
/// Keys that are removed concurrently.
const REMOVALS: usize = 8;
/// The most pages of a listing. A page has a thousand keys, so this is ten million keys.
const LISTED_PAGES_MAX: u32 = 10_000;

/// What a request does to a key. It decides the permission that the request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
    /// A conditional write.
    WriteIf,
    /// A write in parts.
    WriteParts,
    Remove,
    List,
}

impl Operation {
    /// The feature that the operation needs, if some servers lack it.
    pub(super) fn feature(self) -> Option<&'static str> {
        match self {
            Self::WriteIf => Some("conditional writes (If-None-Match and If-Match on PUT)"),
            Self::WriteParts => Some("uploads in parts (multipart uploads)"),
            Self::Read | Self::Write | Self::Remove | Self::List => None,
        }
    }
}

/// The outcomes of a failed request that callers handle.
#[derive(Debug)]
pub(super) enum Refusal {
    /// There is no such key.
    Absent,
    /// The condition of the write is not met.
    Conflict,
    /// The key may have been written, or may still be written: an attempt got no answer, and either the key now has
    /// another value, or no attempt succeeded.
    Unknown(Option<StoreError>),
    /// Everything else.
    Failed(StoreError),
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

/// What failed attempts may have done on the server.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Doubt {
    /// Attempts before the last one that failed in a way that may be temporary.
    pub(super) failed_before: u32,
    /// Whether an attempt may have reached the server although no answer came back.
    pub(super) unanswered: bool,
}

/// The condition on which a key is written.
#[derive(Clone, Debug)]
pub(super) enum Condition {
    /// None: the write replaces whatever is there.
    Any,
    /// The key does not exist.
    Absent,
    /// The key has this tag.
    Tag(String),
}

/// A key in a listing.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// The name without the prefix that was listed.
    pub(super) name: String,
    pub(super) len_bytes: u64,
    /// When the server took it, in seconds since 1970 on the server's clock.
    pub(super) at_s: i64,
}

/// A bucket, and the prefix of all keys in it.
#[derive(Clone)]
pub(super) struct Bucket {
    s3: AmazonS3,
    /// The source of credentials, if the environment has none.
    key_source: Option<KeySource>,
    url: Arc<S3Url>,
    timeout: Duration,
    attempts: u32,
    pause: Duration,
    while_busy: WhileBusy,
    runtime: &'static Runtime,
    /// Whether reads of objects have been ended. All clones share it.
    closed: Arc<watch::Sender<bool>>,
    /// Range reads in progress, for which the caller need not wait on a thread (see [`super::part`]). All clones share them.
    range_reads: Arc<Parts>,
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
            // This module counts the attempts of all requests, including those that read the bodies of
            // answers.
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .with_client_options(
                ClientOptions::new()
                    .with_timeout_disabled()
                    .with_connect_timeout(url.timeout.min(options.connect_timeout))
                    .with_allow_http(url.endpoint.as_ref().is_some_and(|e| e.starts_with("http://"))),
            );
        if let Some(endpoint) = &url.endpoint {
            // The endpoint is set twice. Otherwise a server in the environment (`AWS_ENDPOINT_URL_S3`) would
            // override the endpoint of the URL.
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
            range_reads: Arc::default(),
        })
    }

    /// The same bucket for marks, whose reads and writes have a shorter timeout than those of other keys.
    pub(super) fn prompt(&self) -> Self {
        let while_busy = self.while_busy.at_most(PROMPT_MAX);
        Self { timeout: self.timeout.min(PROMPT_MAX), while_busy, ..self.clone() }
    }

    /// The same bucket for a server whose own clients retry: requests do not wait for a busy bucket.
    pub(super) fn without_busy_wait(&self) -> Self {
        Self { while_busy: WhileBusy::not_at_all(), ..self.clone() }
    }

    /// The timeout of one attempt. If a removal were still in progress when others consider this process
    /// dead, it could remove keys that they need by then.
    pub(super) fn timeout(&self, operation: Operation) -> Duration {
        if operation == Operation::Remove { self.timeout.min(PROMPT_MAX) } else { self.timeout }
    }

    /// Ends reads of parts of objects, including those in progress, and refuses new ones. All other requests
    /// continue, because marks must be removed.
    pub(super) fn close(&self) {
        self.closed.send_replace(true);
    }

    pub(super) fn range_reads(&self) -> &Arc<Parts> {
        &self.range_reads
    }

    pub(super) fn url(&self) -> &S3Url {
        &self.url
    }

    /// A key as messages show it, so that people can find it.
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

    /// Runs a future on the threads that wait for S3, and blocks until it ends. It works on every thread,
    /// including threads of another runtime.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (done, outcome) = mpsc::sync_channel(1);
        self.runtime.spawn(async move {
            let outcome = work.await;
            // If the caller's thread has ended, nobody receives the outcome.
            let _ = done.send(outcome);
        });
        outcome.recv().map_err(|_| {
            StoreError::new(StoreErrorKind::Io, format!("a request to {} was cancelled", self.url))
        })
    }

    /// Starts a future that nobody waits for.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> tokio::task::AbortHandle {
        self.runtime.spawn(work).abort_handle()
    }

    /// How long to wait for a busy server that said when to retry. `None`: the limit is reached.
    fn busy_pause(
        &self,
        operation: Operation,
        failure: &Failure,
        asked: Duration,
        since: Instant,
    ) -> Option<Duration> {
        let Failure::Busy(busy) = failure else { return None };
        let while_busy = match operation {
            // As an attempt at a mark, the wait must end before the mark is stale.
            Operation::Remove => self.while_busy.at_most(PROMPT_MAX),
            _ => self.while_busy.clone(),
        };
        let pause = busy.wait.max(asked);
        while_busy.allows_waiting(since.elapsed().saturating_add(pause)).then_some(pause)
    }

    /// Sends a request until it succeeds, is refused, or has used up its attempts. The error says what the
    /// attempts may have done.
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
                // A failure here happens before anything is sent to the store.
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
                if self.while_busy.pause_and_report(pause_busy, &why).await {
                    pause = pause.saturating_mul(2).min(PAUSE_MAX);
                    doubt.failed_before += 1;
                    attempt -= 1;
                    continue;
                }
                let message = format!("the request was stopped while waiting for {why}");
                let error = StoreError::new(StoreErrorKind::Io, message);
                return Err((Refusal::Failed(error), doubt));
            }
            // The request has waited for the busy server as long as it may.
            let is_over =
                matches!(failure, Failure::Busy(_)) && self.while_busy.allows_waiting(Duration::ZERO);
            doubt.unanswered |= matches!(failure, Failure::Broken(_));
            if is_over || attempt >= self.attempts || !failure.may_pass() {
                let error = failure.describe(operation, &self.shown(&key), &self.url, attempt);
                return Err((Refusal::Failed(error), doubt));
            }
            doubt.failed_before += 1;
            tracing::debug!(key = self.shown(&key), attempt, ?operation, %failure, "a request to S3 is repeated");
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(PAUSE_MAX);
        }
    }

    /// Converts a refusal to an error, for callers for which "no such key" is an error.
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

    /// Reads a part of an object, of exactly this length.
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
                // The server itself reports that the object ends earlier. A retry would get the same answer.
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

    /// Writes a key and returns its new tag. If a conditional write failed after an attempt that may have reached the
    /// server, or is refused after a failed attempt, it reads the key to learn what the attempts did. An unconditional
    /// write can simply be repeated.
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
        // An attempt without an answer may have written the key. If the key has another value, somebody may
        // have written it since, or the server may still be working on that attempt. If the key cannot be
        // read, the outcome is unknown, too.
        match self.get(key, u64::try_from(bytes.len()).unwrap_or(u64::MAX)) {
            Ok(Some((there, tag))) if there == *bytes => Ok(tag),
            _ => Err(Refusal::Unknown(why)),
        }
    }

    /// As [`Bucket::put`], without reading the key after failed attempts.
    pub(super) fn put_once(&self, key: &str, bytes: &Bytes, condition: Condition) -> Result<String, Refusal> {
        let work = self.clone().put_later(key.to_owned(), bytes.clone(), condition);
        self.wait(work)?.map_err(|(refusal, _)| refusal)
    }

    /// As [`Bucket::put`], on the threads that wait for S3. An error says what failed attempts may have done.
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

    /// Removes a key. A key that does not exist is no error.
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

    /// Removes keys until a deadline. Keys that are not removed by then stay.
    pub(super) fn remove_all_until(&self, keys: Vec<String>, until: Instant) -> Result<(), StoreError> {
        let removals = self.clone().remove_all_later(keys);
        let in_time = async move { tokio::time::timeout_at(until.into(), removals).await };
        match self.wait(in_time)? {
            Ok(removed) => removed,
            Err(_) => Err(StoreError::new(
                StoreErrorKind::Unreachable,
                format!(
                    "{} takes so long to remove keys that other processes could consider this process dead: the removal \
                     stops, and a later removal continues",
                    self.url
                ),
            )),
        }
    }

    /// All keys below `folder`, which has no slash at its ends. Each page is a request of its own. If one
    /// page fails the whole listing fails, because callers treat unlisted keys as removed.
    pub(super) fn list(&self, folder: &str) -> Result<Vec<Entry>, StoreError> {
        self.list_beginning(folder, "")
    }

    /// As [`Bucket::list`], for keys whose names in `folder` have this prefix.
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
            format!("cannot list {shown}: the server's listing has no end after {} keys", found.len()),
        ))
    }

    /// Begins an upload in parts. The key appears when the upload is completed.
    pub(super) fn begin_parts(&self, key: &str) -> Result<String, StoreError> {
        let work = self.clone().attempt(Operation::WriteParts, key.to_owned(), |s3, path| async move {
            s3.create_multipart(&path).await
        });
        let outcome = self.wait(work)?;
        outcome.map_err(|(refusal, _)| self.must(Operation::WriteParts, key, refusal))
    }

    /// Sends some parts concurrently, given by their numbers from 0 and their bytes.
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

    /// Completes an upload from its parts, in the order of their numbers. If an earlier attempt completed it
    /// and its answer was lost, the server no longer knows the upload, which shows as [`Refusal::Absent`].
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

    /// Discards the parts of an upload. An upload that the server does not know is no error.
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

/// A tag as conditions accept it. A proxy that changes the form of a body makes the server's tag weak, and a
/// weak tag matches nothing.
fn strong(tag: String) -> String {
    tag.strip_prefix("W/").map_or(tag.clone(), str::to_owned)
}

/// The bytes of an answer, which must have this length.
async fn exactly(found: GetResult, len: usize) -> Result<Bytes, Error> {
    let why = match read_up_to(found.into_stream(), len).await? {
        Some(bytes) if bytes.len() == len => return Ok(bytes),
        Some(_) => format!("the answer ended before its {len} bytes had arrived"),
        None => format!("the answer is longer than its {len} bytes"),
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
