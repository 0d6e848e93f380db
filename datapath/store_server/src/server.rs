//! The server: accepts connections, serves TLS and HTTP on them, and closes them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_admission::{Admission, Entry, Permit};
use headwater_store::Store;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use crate::answer::Answers;
use crate::contents::CONTENTS_BYTES;
use crate::error::ServeError;
use crate::leases::LEASE;
use crate::progress::{Progress, Watched};
use crate::reads::{READ_WAIT, READS_MAX};
use crate::tls;
use crate::tokens::TokenFile;

/// The most connections. Further ones wait to be accepted, or replace unauthenticated ones.
pub const CONNECTIONS_MAX: usize = 1024;
/// If the limit of connections is reached and this many of them have had no admitted request, a new
/// connection closes the oldest of these at once.
pub const UNAUTHENTICATED_MANY: usize = 128;
/// If fewer of them have had no admitted request, the oldest is closed after it has existed for this long.
pub const UNAUTHENTICATED_GRACE: Duration = Duration::from_secs(2);
/// The most concurrent requests on an HTTP/2 connection.
pub const STREAMS_MAX: u32 = 128;
/// A connection is closed if for this time its client neither completes a request nor reads a byte of an answer.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a connection lasts without a request with a known token, however many were refused.
pub const ADMISSION_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a TLS handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long answers in progress may take when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How often expired leases are searched for during the time of one lease.
const LEASE_CHECKS: u32 = 60;
/// An HTTP/2 answer reads its next piece when less than this of the previous one waits to be sent.
const SEND_BUFFER_BYTES: usize = 64 << 10;
/// The pause after a connection could not be accepted, for instance because the limit of open files is reached.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Certificate and key, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, and the intermediate certificates up to one that clients trust.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// How a store is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// With TLS; needed unless `listen` is loopback.
    pub tls: Option<TlsFiles>,
    /// The tokens of permitted readers; needed unless `listen` is loopback.
    pub token_file: Option<PathBuf>,
    /// Limits.
    pub limits: Limits,
}

/// Limits for clients.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// See [`CONNECTIONS_MAX`].
    pub connections: usize,
    /// See [`UNAUTHENTICATED_MANY`].
    pub unauthenticated_many: usize,
    /// See [`UNAUTHENTICATED_GRACE`].
    pub unauthenticated_grace: Duration,
    /// See [`IDLE_TIMEOUT`].
    pub idle: Duration,
    /// See [`ADMISSION_TIMEOUT`].
    pub admission: Duration,
    /// How long a version is pinned after a request for its manifest; see [`LEASE`].
    pub lease: Duration,
    /// The most threads that block on the store at a time; see [`READS_MAX`].
    pub reads: usize,
    /// See [`READ_WAIT`].
    pub read_wait: Duration,
    /// See [`CONTENTS_BYTES`].
    pub contents_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: CONNECTIONS_MAX,
            unauthenticated_many: UNAUTHENTICATED_MANY,
            unauthenticated_grace: UNAUTHENTICATED_GRACE,
            idle: IDLE_TIMEOUT,
            admission: ADMISSION_TIMEOUT,
            lease: LEASE,
            reads: READS_MAX,
            read_wait: READ_WAIT,
            contents_bytes: CONTENTS_BYTES,
        }
    }
}

/// A store that is served. It ends when [`StoreServer::run`] ends.
pub struct StoreServer {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    answers: Arc<Answers>,
    limits: Limits,
}

impl StoreServer {
    /// Starts to listen. Requests are answered by [`StoreServer::run`].
    pub async fn bind(store: Arc<dyn Store>, options: &Options) -> Result<Self, ServeError> {
        Self::bind_with_issued(store, options, None).await
    }

    /// As [`StoreServer::bind`], for a program that makes tokens itself and stores their hashes in this file.
    pub async fn bind_with_issued(
        store: Arc<dyn Store>,
        options: &Options,
        issued: Option<&Path>,
    ) -> Result<Self, ServeError> {
        let listen = options.listen;
        if !listen.ip().is_loopback() {
            let missing = match (&options.tls, options.token_file.as_deref().or(issued)) {
                (None, _) => Some("TLS (--tls-cert and --tls-key)"),
                (_, None) => Some("tokens (--token-file)"),
                _ => None,
            };
            if let Some(missing) = missing {
                return Err(ServeError::Invalid(format!(
                    "serving a store to other hosts needs {missing}: {listen} is not a loopback address"
                )));
            }
        }
        let tls = options
            .tls
            .as_ref()
            .map(|files| tls::config(files, &tls::HTTP, None))
            .transpose()?
            .map(TlsAcceptor::from);
        let tokens = options.token_file.as_deref().map(TokenFile::open).transpose()?;
        let issued = issued.map(TokenFile::open_issued).transpose()?;
        let tokens = match (tokens, issued) {
            (Some(tokens), Some(issued)) => Some(tokens.and(issued)),
            (tokens, issued) => tokens.or(issued),
        };
        let failed = |source| ServeError::Listen { on: listen.to_string(), source };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        headwater_block::tcp::listen(&listener);
        let address = listener.local_addr().map_err(failed)?;
        let limits = options.limits;
        // The client has other servers, or retries, and may disconnect long before an unreachable store is
        // back.
        let store = store.with_short_timeout().unwrap_or(store);
        let answers = Arc::new(Answers::new(store, tokens, tls.is_some(), &limits));
        Ok(Self { listener, address, tls, answers, limits })
    }

    /// Its address, with the actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The base URL of the store, for clients on this host.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }

    /// Serves until `stop` becomes true, and then gives requests in progress some seconds (`STOP_GRACE`) to finish.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let Limits { connections, unauthenticated_many, unauthenticated_grace, .. } = self.limits;
        let admission = Admission::new(connections, unauthenticated_many, unauthenticated_grace);
        let mut connections = tokio::task::JoinSet::new();
        let expiring = tokio::spawn(expire_leases(Arc::clone(&self.answers), self.limits.lease));
        loop {
            while connections.try_join_next().is_some() {}
            let accepted = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                accepted = accept(&self.listener, &admission) => accepted,
            };
            let Some((stream, permit)) = accepted else { continue };
            let (tls, stop) = (self.tls.clone(), stop.clone());
            let (answers, limits) = (Arc::clone(&self.answers), self.limits);
            connections.spawn(async move {
                tokio::select! {
                    // `serve` is polled first: a request that has arrived is answered, if only with the advice to
                    // retry.
                    biased;
                    () = serve(stream, tls, answers, permit.entry(), limits, stop) => {}
                    () = permit.must_go() => tracing::debug!("an unauthenticated connection was closed for a new one"),
                }
            });
        }
        drop(self.listener);
        let all = async { while connections.join_next().await.is_some() {} };
        // Answers that take longer are cut off: their clients continue at another server.
        let _ = tokio::time::timeout(STOP_GRACE, all).await;
        connections.shutdown().await;
        expiring.abort();
        let answers = self.answers;
        let ending = tokio::task::spawn_blocking(move || answers.leases().end());
        // An unreachable bucket must not delay the end.
        let _ = tokio::time::timeout(STOP_GRACE, ending).await;
    }
}

/// Expires leases even if no requests arrive any more.
async fn expire_leases(answers: Arc<Answers>, lease: Duration) {
    loop {
        tokio::time::sleep(lease / LEASE_CHECKS).await;
        let answers = Arc::clone(&answers);
        // On a bucket this is network I/O. It fails only after a panic, which the next attempt may avoid.
        let _ = tokio::task::spawn_blocking(move || answers.leases().expire(Instant::now())).await;
    }
}

/// Accepts a connection. If all permits are taken, it waits for one, and further connections wait to be
/// accepted.
async fn accept(listener: &TcpListener, admission: &Arc<Admission>) -> Option<(TcpStream, Permit)> {
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, admission.take().await?)),
        Err(e) => {
            tracing::warn!(error = %e, "cannot accept a connection");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}

async fn serve(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    answers: Arc<Answers>,
    entry: Entry,
    limits: Limits,
    stop: watch::Receiver<bool>,
) {
    headwater_block::tcp::tune(&stream);
    let Some(tls) = tls else { return serve_http(stream, answers, entry, limits, stop).await };
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await {
        Ok(Ok(stream)) => serve_http(stream, answers, entry, limits, stop).await,
        Ok(Err(e)) => tracing::debug!(error = %e, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

async fn serve_http<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    answers: Arc<Answers>,
    entry: Entry,
    limits: Limits,
    mut stop: watch::Receiver<bool>,
) {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.idle).max_buf_size(64 << 10);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .keep_alive_interval(limits.idle)
        .keep_alive_timeout(limits.idle)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_frame_size(64 << 10);
    let progress = Progress::new(entry);
    let watched = Watched::new(stream, Arc::clone(&progress));
    let (request_progress, send_memory) = (Arc::clone(&progress), answers.send_memory());
    let service = service_fn(move |request| {
        let (answers, send_memory, progress) =
            (Arc::clone(&answers), send_memory.clone(), Arc::clone(&request_progress));
        async move { Ok::<_, std::convert::Infallible>(answers.answer(&request, &send_memory, &progress).await) }
    });
    let connection = builder.serve_connection(TokioIo::new(watched), service);
    let mut connection = std::pin::pin!(connection);
    let stopped = async { drop(stop.wait_for(|stop| *stop).await) };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        // hyper does not watch a connection before its first 24 bytes, and counts an answered ping as
        // activity.
        () = progress.stalled(limits.idle, limits.admission) => {
            tracing::debug!("a connection is closed because its client sends no request, reads no answer, or has no token");
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(limits.idle.min(STOP_GRACE), connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(e) = ended {
        tracing::debug!(error = %e, "a connection failed");
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn an_evicted_connection_begins_no_request() {
        let dir = tempfile::tempdir().unwrap();
        let store = headwater_store::LocalDir::open(dir.path(), headwater_store::Access::WRITE).unwrap();
        let answers = Arc::new(Answers::new(Arc::new(store), None, false, &Limits::default()));
        for (is_admitted, expected) in [(false, "HTTP/1.1 503"), (true, "HTTP/1.1 200")] {
            let admission = Admission::new(1, 1, UNAUTHENTICATED_GRACE);
            let permit = admission.take().await.unwrap();
            if is_admitted {
                permit.entry().let_in();
            }
            let is_taken = tokio::select! {
                biased;
                other = admission.take() => other.is_none(),
                () = std::future::ready(()) => true,
            };
            assert!(is_taken);
            let (mut client, server) = tokio::io::duplex(64 << 10);
            let (_stop, stopped) = watch::channel(false);
            let serving =
                serve_http(server, Arc::clone(&answers), permit.entry(), Limits::default(), stopped);
            let serving = tokio::spawn(serving);
            // Later requests of this client are not answered either.
            let request = "GET /store HTTP/1.1\r\nHost: localhost\r\n";
            let requests = format!("{request}\r\n{request}Connection: close\r\n\r\n");
            client.write_all(requests.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            let read = tokio::time::timeout(Duration::from_secs(60), client.read_to_end(&mut answer));
            read.await.unwrap().unwrap();
            let answer = String::from_utf8_lossy(&answer);
            assert!(answer.starts_with(expected) && answer.matches(expected).count() == 2, "{answer}");
            assert!(is_admitted || answer.contains("is closed for a new one"), "{answer}");
            serving.await.unwrap();
        }
    }
}
