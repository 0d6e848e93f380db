//! Listens on the unix socket, and on TCP if requested; checks the tokens of TCP clients.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::serve::IncomingStream;
use headwater_admission::{Admission, Entry, Permit};
use headwater_api::{Problem, ProblemKind, words};
use headwater_db::{DbError, TokenRecord};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

use crate::answer::{Failure, problem};
use crate::caller::{Peer, Presented};
use crate::certificate::Shown;
use crate::login;
use crate::token::{self, Token};

/// The longest path of a unix socket on Linux, without its closing zero.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The most concurrent TCP connections. Further clients wait to be accepted, or displace connections that are not
/// authenticated.
pub const TCP_CONNECTIONS_MAX: usize = 512;

/// If all connections are in use, a new client displaces the oldest one without a valid token: at once if there are this
/// many of those,
pub const TCP_UNAUTHENTICATED_MANY: usize = 128;
/// and otherwise if that connection is older than this.
pub const TCP_UNAUTHENTICATED_GRACE: Duration = Duration::from_secs(2);

/// Timeout of the head of a request over TCP, including the wait for the next request of a connection.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The read buffer of a TCP connection, which is the longest head of a request.
const BUFFER_MAX_BYTES: usize = 64 << 10;

/// TCP keep-alive: idle time before the first probe.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEP_ALIVE_TRIES: u32 = 4;

/// The pause after accepting a connection failed, which happens if there are too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why the daemon cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The path is too long for a socket address.
    #[error(
        "cannot listen on {path}: the path has {len} bytes, and a socket's path has at most \
         {MAX_SOCKET_PATH_BYTES} (choose a data directory with a shorter path)"
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        len: usize,
    },
    /// Another process listens on the socket.
    #[error(
        "cannot listen on {path}: another process listens there (stop it, or choose another data directory)"
    )]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("cannot listen on {path}: a file that is not a socket has this name (move it away)")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// A TCP address outside of the loopback interface, without TLS.
    #[error("cannot listen on {address} without TLS: without TLS only loopback addresses are allowed")]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// The system refused.
    #[error("cannot listen on {what}")]
    Failed {
        /// Path or address.
        what: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl ListenError {
    fn failed(what: impl ToString) -> impl FnOnce(io::Error) -> Self {
        let what = what.to_string();
        move |source| Self::Failed { what, source }
    }
}

/// Binds the unix socket, with access for its owner only. A stale socket of a dead process is replaced.
pub async fn bind_unix(path: &Path) -> Result<UnixListener, ListenError> {
    let len = path.as_os_str().len();
    if len > MAX_SOCKET_PATH_BYTES {
        return Err(ListenError::TooLong { path: path.to_owned(), len });
    }
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(ListenError::failed(path.display())(e)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {
            if UnixStream::connect(path).await.is_ok() {
                return Err(ListenError::InUse { path: path.to_owned() });
            }
            std::fs::remove_file(path).map_err(ListenError::failed(path.display()))?;
        }
    }
    let listener = UnixListener::bind(path).map_err(ListenError::failed(path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(ListenError::failed(path.display()))?;
    Ok(listener)
}

/// A TCP port.
pub struct Port {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
}

impl Port {
    /// Binds an address. Without TLS it must be a loopback address.
    pub async fn bind(address: SocketAddr, tls: Option<Arc<ServerConfig>>) -> Result<Self, ListenError> {
        if tls.is_none() && !address.ip().is_loopback() {
            return Err(ListenError::NotLoopback { address });
        }
        let listener = TcpListener::bind(address).await.map_err(ListenError::failed(address))?;
        Ok(Self { listener, tls: tls.map(TlsAcceptor::from) })
    }

    /// The address, with the port that the system chose if none was given.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Whether its connections are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }
}

/// Serves the unix socket until `stop` is true and the requests in flight are answered.
pub async fn serve_unix(
    listener: UnixListener,
    router: Router,
    stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let service = router.into_make_service_with_connect_info::<Peer>();
    axum::serve(listener, service).with_graceful_shutdown(stopped(stop)).await
}

/// The tokens that are accepted over TCP.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// The token of the data directory.
    pub own: Token,
    /// The service, which knows the named tokens.
    pub named: crate::Service,
}

/// Serves a TCP port in the same way. Requests without a token, except logins, and requests that a web page could have
/// caused, are refused. Every process of every user of this host can connect, so the resources of connections without a
/// token are limited: their number, their time (one refusal, or the timeout of a head), and they are displaced if others
/// need a connection.
pub async fn serve_tcp(
    port: Port,
    router: Router,
    tokens: Tokens,
    stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let router = login::routes(tokens.named.clone())
        .merge(router.layer(middleware::from_fn_with_state(tokens, require_token)))
        .layer(middleware::from_fn_with_state(Reached { by_any_name: port.is_encrypted() }, refuse_browsers));
    serve_bounded(port, router, Limits::TCP, stop).await;
    Ok(())
}

/// Limits of TCP clients.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    connections: usize,
    unauthenticated_many: usize,
    unauthenticated_grace: Duration,
    head: Duration,
}

impl Limits {
    /// The limits of each TCP port.
    pub(crate) const TCP: Self = Self {
        connections: TCP_CONNECTIONS_MAX,
        unauthenticated_many: TCP_UNAUTHENTICATED_MANY,
        unauthenticated_grace: TCP_UNAUTHENTICATED_GRACE,
        head: HEAD_TIMEOUT,
    };
}

pub(crate) async fn serve_bounded(
    port: Port,
    router: Router,
    limits: Limits,
    mut stop: watch::Receiver<bool>,
) {
    let permits =
        Admission::new(limits.connections, limits.unauthenticated_many, limits.unauthenticated_grace);
    let mut connections = JoinSet::new();
    let Port { listener, tls } = port;
    loop {
        while connections.try_join_next().is_some() {}
        let accepted = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => break,
            accepted = accept(&listener, &permits) => accepted,
        };
        let Some((stream, address, place)) = accepted else { continue };
        let (router, tls, stop) = (router.clone(), tls.clone(), stop.clone());
        connections.spawn(async move {
            tokio::select! {
                // First the request: a request that has arrived is answered, even if only with an error that says to repeat
                // it.
                biased;
                () = serve_stream(stream, tls, (address, place.entry()), router, limits, stop) => {}
                () = place.must_go() => {
                    tracing::debug!(client = %address, "closed a connection without a token, because a new client needed it");
                }
            }
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Accepts a client. If all permits are in use it waits for one; further clients wait in the kernel's queue.
async fn accept(listener: &TcpListener, permits: &Arc<Admission>) -> Option<(TcpStream, SocketAddr, Permit)> {
    match listener.accept().await {
        Ok((stream, address)) => Some((stream, address, permits.take().await?)),
        Err(e) => {
            tracing::warn!(error = %e, "cannot accept a connection");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}

async fn serve_stream(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    client: (SocketAddr, Entry),
    router: Router,
    limits: Limits,
    stop: watch::Receiver<bool>,
) {
    // Without Nagle's algorithm, the echo of a console is not delayed. A failure only costs speed.
    let _ = stream.set_nodelay(true);
    // Without keep-alive, a client whose computer sleeps would keep a console forever. A failure is harmless otherwise.
    let _ = keep_alive(&stream);
    let (address, entry) = client;
    let Some(tls) = tls else {
        return serve_connection(stream, (address, entry, None), router, limits, stop).await;
    };
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(limits.head, tls.accept(stream)) => accepted,
        // A client that sends nothing must not delay the end of the daemon.
        () = stopped(stop.clone()) => return,
    };
    match accepted {
        Ok(Ok(stream)) => {
            let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first()).map(Shown::of);
            serve_connection(stream, (address, entry, shown), router, limits, stop).await;
        }
        Ok(Err(error)) => tracing::debug!(client = %address, %error, "a TLS handshake failed"),
        Err(_) => tracing::debug!(client = %address, "a TLS handshake took too long"),
    }
}

/// Enables TCP keep-alive, so that the kernel closes a connection whose peer is gone.
pub fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_IDLE / 4)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_TRIES)?;
    Ok(())
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    (address, entry, shown): (SocketAddr, Entry, Option<Shown>),
    router: Router,
    limits: Limits,
    stop: watch::Receiver<bool>,
) {
    let service = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(ConnectInfo(Peer::Tcp(address)));
        request.extensions_mut().insert(entry.clone());
        if let Some(shown) = &shown {
            request.extensions_mut().insert(shown.clone());
        }
        service.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(BUFFER_MAX_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        // For consoles.
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped(stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = ended {
        tracing::debug!(client = %address, error = %e, "a connection ended");
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // An error means that the sender was dropped, which is a stop too.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// The host names under which clients reach a port.
#[derive(Clone, Copy)]
struct Reached {
    /// Any name, because with TLS the certificate proves the name.
    by_any_name: bool,
}

/// Refuses requests of web pages: a page can make a browser connect to loopback ports, and can point a DNS name of its own
/// at them.
async fn refuse_browsers(State(reached): State<Reached>, request: Request, next: Next) -> Response {
    if is_foreign(request.headers(), reached) {
        let (message, advice) = if reached.by_any_name {
            (
                "the request comes from a web page",
                "do not use a browser here: the web console has a separate port",
            )
        } else {
            (
                "the request comes from a web page or another host",
                "use the name localhost or 127.0.0.1, and not a browser",
            )
        };
        return refusal(Problem::new(ProblemKind::Invalid, message).advise(advice));
    }
    next.run(request).await
}

async fn require_token(State(tokens): State<Tokens>, request: Request, next: Next) -> Response {
    let shown = request.extensions().get();
    let presented = match presented(&tokens, request.headers(), shown).await {
        Ok(presented) => presented,
        Err(problem) if problem.kind == ProblemKind::Unauthorized => {
            return ([(header::WWW_AUTHENTICATE, "Bearer")], refusal(problem)).into_response();
        }
        Err(problem) => return refusal(problem),
    };
    let_in(request, presented, next).await
}

/// Answers an authenticated request, unless its connection was already chosen to be displaced.
pub(crate) async fn let_in(mut request: Request, presented: Presented, next: Next) -> Response {
    if let Err(problem) = admit(request.extensions().get()) {
        return refusal(problem);
    }
    request.extensions_mut().insert(presented);
    next.run(request).await
}

/// Marks the connection of a request as authenticated. Fails if the connection was already chosen to be displaced.
pub(crate) fn admit(entry: Option<&Entry>) -> Result<(), Problem> {
    if entry.is_none_or(Entry::let_in) {
        return Ok(());
    }
    // The connection is about to be closed, perhaps in the middle of the request.
    let message = "all connections are in use, and this one is being closed for another client";
    let problem = Problem::new(ProblemKind::Unavailable, message);
    Err(problem.advise("connect again and repeat the request: nothing was begun"))
}

/// The token of a request, or why it is refused. A token in the header has precedence over a certificate.
async fn presented(
    tokens: &Tokens,
    headers: &HeaderMap,
    shown: Option<&Shown>,
) -> Result<Presented, Problem> {
    if tokens.own.is_in(headers) {
        return Ok(Presented::OfDirectory);
    }
    match (token::bearer(headers), shown) {
        (Some(secret), _) => named(&tokens.named, secret).await,
        (None, Some(shown)) => of_certificate(&tokens.named, shown).await,
        (None, None) => {
            let message = "requests over TCP must have a token, and this one has none";
            Err(Problem::new(ProblemKind::Unauthorized, message).advise(
                "send 'Authorization: Bearer TOKEN'; 'headwater token create' makes a token, and the file api.token of the data \
                 directory holds one that may do everything",
            ))
        }
    }
}

/// The named token of a client certificate, or why the certificate is not accepted.
async fn of_certificate(service: &crate::Service, shown: &Shown) -> Result<Presented, Problem> {
    match look_up(service.token_of_certificate(&shown.0).await)? {
        Some(found) => unless_expired(service, found),
        None => {
            let message = format!("there is no token for the client certificate {}", shown.0);
            Err(Problem::new(ProblemKind::Unauthorized, message)
                .advise("'headwater token create NAME --certificate FILE' on the server makes a token"))
        }
    }
}

fn look_up(found: Result<Option<TokenRecord>, DbError>) -> Result<Option<TokenRecord>, Problem> {
    found.map_err(|error| {
        let problem = problem(&error).during("cannot look a token up");
        Problem { kind: ProblemKind::Unavailable, ..problem }
    })
}

fn unauthorized(message: String) -> Problem {
    Problem::new(ProblemKind::Unauthorized, message)
        .advise("'headwater token create NAME' on the server makes a token")
}

fn unless_expired(service: &crate::Service, found: TokenRecord) -> Result<Presented, Problem> {
    if let Some(end) = found.expires_at_ms.filter(|end| *end <= service.now_ms()) {
        let message = format!("the token '{}' expired at {}", found.name, words::time(end));
        return Err(unauthorized(message));
    }
    Ok(Presented::Named { name: found.name, role: found.role, scopes: found.scopes })
}

/// The named token with this secret, or why it is not accepted.
pub(crate) async fn named(service: &crate::Service, secret: &str) -> Result<Presented, Problem> {
    match look_up(service.token_of(secret).await)? {
        Some(found) => unless_expired(service, found),
        None => Err(unauthorized("there is no such token, or it was revoked".to_owned())),
    }
}

/// The last answer of a connection: an unauthenticated client does not keep its connection.
pub(crate) fn refusal(problem: Problem) -> Response {
    ([(header::CONNECTION, "close")], Failure(problem)).into_response()
}

fn is_foreign(headers: &HeaderMap, reached: Reached) -> bool {
    // Browsers name the site of a request, even of one without an origin. Their users may have a client certificate.
    if headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site") {
        return true;
    }
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    // Without a port, the last colon belongs to an IPv6 address.
    let port = host.rsplit_once(':').filter(|(_, port)| !port.ends_with(']'));
    let name = port.map_or(host, |(name, _)| name);
    !reached.by_any_name && !matches!(name, "localhost" | "127.0.0.1" | "[::1]")
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Peer::Unix { uid: stream.io().peer_cred().ok().map(|credentials| credentials.uid()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::lifecycle::tests::Fixture;

    const LOOPBACK: Reached = Reached { by_any_name: false };

    /// Timeout for waits that would otherwise never end.
    const SOON: Duration = Duration::from_secs(60);

    /// Limits with this many connections, all of which may be unauthenticated.
    fn permits(connections: usize) -> Limits {
        Limits { connections, unauthenticated_many: usize::MAX, unauthenticated_grace: SOON * 60, head: SOON }
    }

    /// The tokens of a service that lives as long as the fixture.
    async fn tokens() -> (Tokens, Fixture) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "ab".repeat(32)).unwrap();
        let own = Token::load_or_make(&dir.path().join("token"), &crate::backend::SystemRandom).unwrap();
        let fixture = Fixture::new().await;
        (Tokens { own, named: fixture.service.clone() }, fixture)
    }

    /// A server with one path, the highest number of concurrent requests, and its address.
    async fn served(limits: Limits) -> (SocketAddr, Arc<AtomicUsize>, watch::Sender<bool>) {
        let port = Port::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
        let address = port.address().unwrap();
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::clone(&most);
        let answer = move |ConnectInfo(peer): ConnectInfo<Peer>| async move {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(50)).await;
            now.fetch_sub(1, Ordering::SeqCst);
            format!("{peer:?}")
        };
        let (tokens, fixture) = tokens().await;
        let router = Router::new()
            .route("/", get(answer))
            .layer(middleware::from_fn_with_state(tokens, require_token))
            .layer(middleware::from_fn_with_state(LOOPBACK, refuse_browsers));
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(async move {
            serve_bounded(port, router, limits, stopped).await;
            drop(fixture);
        });
        (address, seen, stop)
    }

    /// The whole answer.
    async fn ask(address: SocketAddr, headers: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET / HTTP/1.1\r\n{headers}\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(SOON, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        answer
    }

    fn with_token() -> String {
        format!("host: localhost\r\nconnection: close\r\nauthorization: Bearer {}\r\n", "ab".repeat(32))
    }

    #[tokio::test]
    async fn who_says_nothing_does_not_keep_others_out() {
        let (address, _, stop) = served(Limits { head: Duration::from_millis(200), ..permits(4) }).await;
        let mut silent = Vec::new();
        for n in 0..12 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            // Every second client begins a request.
            stream.write_all(if n % 2 == 0 { b"" } else { b"GET / HT" }).await.unwrap();
            silent.push(stream);
        }
        let answer = ask(address, &with_token()).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("Tcp(127.0.0.1:"), "{answer}");
        for mut stream in silent {
            let mut rest = Vec::new();
            let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut rest)).await.unwrap();
        }
        stop.send(true).unwrap();
    }

    #[tokio::test]
    async fn where_all_places_are_taken_who_has_no_token_gives_way() {
        let (address, _, _stop) = served(Limits { unauthenticated_many: 2, ..permits(4) }).await;
        let mut guest = TcpStream::connect(address).await.unwrap();
        let request = with_token().replace("close", "keep-alive");
        let answered = async |guest: &mut TcpStream| {
            guest.write_all(format!("GET / HTTP/1.1\r\n{request}\r\n").as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b")") {
                let read = tokio::time::timeout(SOON, guest.read_buf(&mut answer)).await.unwrap().unwrap();
                assert!(read > 0, "{}", String::from_utf8_lossy(&answer));
            }
            assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
        };
        answered(&mut guest).await;
        let mut silent = Vec::new();
        for n in 0..12 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            // Connections that were closed fail here.
            let _ = stream.write_all(if n % 2 == 0 { b"" } else { b"GET / HT" }).await;
            silent.push(stream);
        }
        assert!(ask(address, &with_token()).await.starts_with("HTTP/1.1 200"));
        // The last two clients have connections beside the guest, and one more is free now.
        for mut stream in silent.into_iter().take(10) {
            let mut rest = Vec::new();
            let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut rest)).await.unwrap();
        }
        answered(&mut guest).await;
    }

    #[tokio::test]
    async fn nothing_is_begun_for_who_was_chosen_to_give_way_before_he_showed_the_token() {
        for (is_let_in, connection, expected, runs) in
            [(false, "keep-alive", "HTTP/1.1 503", 0), (true, "close", "HTTP/1.1 200", 1)]
        {
            let all = Admission::new(1, 1, SOON * 60);
            let place = all.take().await.unwrap();
            if is_let_in {
                place.entry().let_in();
            }
            let is_taken = tokio::select! {
                biased;
                other = all.take() => other.is_none(),
                () = std::future::ready(()) => true,
            };
            assert!(is_taken && place.entry().must_go() != is_let_in);
            let ran = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&ran);
            let answer = move || async move {
                counted.fetch_add(1, Ordering::SeqCst);
                "done"
            };
            let (tokens, _fixture) = tokens().await;
            let router = Router::new()
                .route("/", get(answer))
                .layer(middleware::from_fn_with_state(tokens, require_token));
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (_stop, stopped) = watch::channel(false);
            let serving = tokio::spawn(async move {
                let (stream, client) = listener.accept().await.unwrap();
                serve_connection(stream, (client, place.entry(), None), router, permits(1), stopped).await;
            });
            // The client itself ends the connection.
            let answer = ask(address, &with_token().replace("close", connection)).await;
            assert!(answer.starts_with(expected), "{answer}");
            assert_eq!(ran.load(Ordering::SeqCst), runs);
            serving.await.unwrap();
        }
    }

    #[tokio::test]
    async fn so_many_connections_are_served_at_a_time_and_one_that_was_refused_ends() {
        let (address, most, _stop) = served(permits(3)).await;
        let headers = with_token();
        let asking: Vec<_> = (0..12)
            .map(|_| {
                let headers = headers.clone();
                tokio::spawn(async move { ask(address, &headers).await })
            })
            .collect();
        for answer in asking {
            assert!(answer.await.unwrap().starts_with("HTTP/1.1 200"));
        }
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
        // These requests do not ask for the end of the connection.
        assert!(ask(address, "host: localhost\r\n").await.starts_with("HTTP/1.1 401"));
        assert!(ask(address, "host: evil.example\r\n").await.starts_with("HTTP/1.1 4"));
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        drop(bind_unix(&path).await.unwrap());
        let live = bind_unix(&path).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(bind_unix(&path).await, Err(ListenError::InUse { .. })));
        drop(live);
    }

    #[tokio::test]
    async fn what_cannot_be_a_socket_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(bind_unix(&path).await, Err(ListenError::NotASocket { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let long = dir.path().join("x".repeat(120));
        assert!(matches!(bind_unix(&long).await, Err(ListenError::TooLong { .. })));
        let everywhere = "0.0.0.0:0".parse().unwrap();
        assert!(matches!(Port::bind(everywhere, None).await, Err(ListenError::NotLoopback { .. })));
    }

    #[test]
    fn web_pages_and_other_names_are_foreign() {
        let headers = |pairs: &[(header::HeaderName, &str)]| -> HeaderMap {
            pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
        };
        assert!(!is_foreign(&headers(&[(header::HOST, "127.0.0.1:8080")]), LOOPBACK));
        assert!(!is_foreign(&headers(&[(header::HOST, "localhost")]), LOOPBACK));
        assert!(!is_foreign(&headers(&[(header::HOST, "[::1]:80")]), LOOPBACK));
        assert!(!is_foreign(&headers(&[(header::HOST, "[::1]")]), LOOPBACK));
        assert!(is_foreign(&headers(&[(header::HOST, "evil.example:8080")]), LOOPBACK));
        assert!(is_foreign(
            &headers(&[(header::HOST, "localhost"), (header::ORIGIN, "http://a.b")]),
            LOOPBACK
        ));
        assert!(is_foreign(&headers(&[]), LOOPBACK));
        let encrypted = Reached { by_any_name: true };
        assert!(!is_foreign(&headers(&[(header::HOST, "lab1.example:9470")]), encrypted));
        let page = headers(&[(header::HOST, "lab1:9470"), (header::ORIGIN, "https://a.b")]);
        assert!(is_foreign(&page, encrypted));
        let site = header::HeaderName::from_static("sec-fetch-site");
        assert!(is_foreign(&headers(&[(header::HOST, "lab1:9470"), (site, "cross-site")]), encrypted));
    }
}
