//! Listening: the unix socket, and TCP on request.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use axum::Router;
use axum::extract::connect_info::Connected;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::serve::IncomingStream;
use headwater_api::{Problem, ProblemKind};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::watch;

use crate::answer::Failure;
use crate::extract::Peer;
use crate::token::Token;

/// The longest path of a unix socket on Linux, without its closing zero.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Why the daemon cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The path does not fit into a socket address.
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
    /// Somebody answers on the socket.
    #[error(
        "cannot listen on {path}: another process listens there (stop it, or choose another data directory)"
    )]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Something else lies at the path.
    #[error("cannot listen on {path}: something that is not a socket is in the way (move it away)")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// A TCP address that others can reach.
    #[error(
        "cannot listen on {address}: TCP connections are not encrypted, so only loopback addresses are \
         allowed (listen on 127.0.0.1 and forward it, for instance with ssh -L)"
    )]
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

/// Binds the unix socket, for its owner only. A stale socket of a process that died is replaced.
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

/// Binds a TCP address of the loopback interface.
pub async fn bind_tcp(address: SocketAddr) -> Result<TcpListener, ListenError> {
    if !address.ip().is_loopback() {
        return Err(ListenError::NotLoopback { address });
    }
    TcpListener::bind(address).await.map_err(ListenError::failed(address))
}

/// Serves the unix socket until `stop` says true and the requests in flight are answered.
pub async fn serve_unix(
    listener: UnixListener,
    router: Router,
    stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let service = router.into_make_service_with_connect_info::<Peer>();
    axum::serve(listener, service).with_graceful_shutdown(stopped(stop)).await
}

/// Serves a TCP port, likewise. Requests without the token, and those that a web page could have caused, are
/// refused: every process of every user of this host can connect.
pub async fn serve_tcp(
    listener: TcpListener,
    router: Router,
    token: Token,
    stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let service = router
        .layer(middleware::from_fn_with_state(token, require_token))
        .layer(middleware::from_fn(refuse_browsers))
        .into_make_service_with_connect_info::<Peer>();
    axum::serve(listener, service).with_graceful_shutdown(stopped(stop)).await
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop too.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// A page from anywhere can make a browser talk to loopback ports, and can point a name of its own at them.
async fn refuse_browsers(request: Request, next: Next) -> Response {
    if is_foreign(request.headers()) {
        let problem = Problem::new(ProblemKind::Invalid, "the request comes from a web page or another host")
            .advise("use the name localhost or 127.0.0.1, and no browser");
        return Failure(problem).into_response();
    }
    next.run(request).await
}

async fn require_token(State(token): State<Token>, request: Request, next: Next) -> Response {
    if token.is_in(request.headers()) {
        return next.run(request).await;
    }
    let what = if request.headers().contains_key(header::AUTHORIZATION) { "another" } else { "none" };
    let message = format!("requests over TCP must present the daemon's token, and this one has {what}");
    let problem = Problem::new(ProblemKind::Unauthorized, message).advise(
        "send 'Authorization: Bearer TOKEN'; the token is in the file api.token of the data directory",
    );
    ([(header::WWW_AUTHENTICATE, "Bearer")], Failure(problem)).into_response()
}

fn is_foreign(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, _port)| name);
    headers.contains_key(header::ORIGIN) || !matches!(name, "localhost" | "127.0.0.1" | "[::1]")
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Peer::Unix { uid: stream.io().peer_cred().ok().map(|credentials| credentials.uid()) }
    }
}

impl Connected<IncomingStream<'_, TcpListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TcpListener>) -> Self {
        Peer::Tcp(*stream.remote_addr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(matches!(bind_tcp(everywhere).await, Err(ListenError::NotLoopback { .. })));
    }

    #[test]
    fn web_pages_and_other_names_are_foreign() {
        let headers = |pairs: &[(header::HeaderName, &str)]| -> HeaderMap {
            pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
        };
        assert!(!is_foreign(&headers(&[(header::HOST, "127.0.0.1:8080")])));
        assert!(!is_foreign(&headers(&[(header::HOST, "localhost")])));
        assert!(!is_foreign(&headers(&[(header::HOST, "[::1]:80")])));
        assert!(is_foreign(&headers(&[(header::HOST, "evil.example:8080")])));
        assert!(is_foreign(&headers(&[(header::HOST, "localhost"), (header::ORIGIN, "http://a.b")])));
        assert!(is_foreign(&headers(&[])));
    }
}
