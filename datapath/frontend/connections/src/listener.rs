//! Listens on a unix socket or a TCP port. Each way in which binding can fail has a message of its own, and
//! socket files of dead processes are replaced.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::host_port;

/// Longest path of a unix socket in bytes (`sun_path` without its terminating zero).
pub const UNIX_PATH_BYTES: usize = 107;

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path is too long for a socket address.
    #[error(
        "cannot listen on '{path}': the path has {bytes} bytes, a unix socket's may have {UNIX_PATH_BYTES}; \
         choose a shorter one"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// Another process listens at the path.
    #[error("cannot listen on '{path}': another process listens there; stop it or choose another path")]
    PathInUse {
        /// The path.
        path: PathBuf,
    },
    /// The path is a file of another kind, which must not be removed.
    #[error(
        "cannot listen on '{path}': a file that is not a socket is in the way; remove it or use another path"
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The directory does not exist.
    #[error("cannot listen on '{path}': its directory does not exist; create it or choose another path")]
    NoDirectory {
        /// The path.
        path: PathBuf,
    },
    /// Another process listens on the port.
    #[error(
        "cannot listen on {address}: the port is in use; stop the process that listens there or choose another port"
    )]
    PortInUse {
        /// The address.
        address: String,
    },
    /// The host has no address.
    #[error("cannot listen on {address}: the host name cannot be resolved: {source}")]
    UnknownHost {
        /// The address.
        address: String,
        /// The resolver's error.
        source: std::io::Error,
    },
    /// No interface of this host has the address.
    #[error("cannot listen on {address}: this host does not have that address; see: ip address")]
    NotOurs {
        /// The address.
        address: String,
    },
    /// Any other error.
    #[error("cannot listen on {address}: {source}")]
    System {
        /// The address.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A listening socket. Dropping it removes the file of a unix socket.
#[derive(Debug)]
pub struct Listener {
    address: String,
    socket: ListeningSocket,
}

#[derive(Debug)]
enum ListeningSocket {
    Unix {
        /// Dropped before the socket, so that while the file exists, the socket listens.
        _file: SocketFile,
        socket: UnixListener,
    },
    Tcp(TcpListener),
}

/// The address of a connection's peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this host; its PID, if the system reports it.
    Unix(Option<i32>),
    /// A TCP peer.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(Some(process)) => write!(f, "process {process}"),
            Self::Unix(None) => f.write_str("on the unix socket"),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

impl Listener {
    /// Listens on a unix socket at this path.
    pub fn unix(path: &Path) -> Result<Self, BindError> {
        let address = format!("unix:{}", path.display());
        let failed = system(&address);
        let socket = bind_unix(path, &failed)?;
        let file = SocketFile { path: path.into(), identity: identity(path) };
        socket.set_nonblocking(true).map_err(&failed)?;
        Ok(Self { address, socket: ListeningSocket::Unix { _file: file, socket } })
    }

    /// Listens on the first address of the host on which it can. Port 0 takes a free port. Returns the port,
    /// too.
    pub fn tcp(host: &str, port: u16) -> Result<(Self, u16), BindError> {
        let address = format!("tcp:{}", host_port::join(host, port));
        let failed = system(&address);
        let socket = bind_tcp(&address, host, port)?;
        headwater_block::tcp::listen(&socket);
        socket.set_nonblocking(true).map_err(&failed)?;
        let port = socket.local_addr().map_err(&failed)?.port();
        Ok((Self { address, socket: ListeningSocket::Tcp(socket) }, port))
    }

    /// Makes the error of a server that listens here but cannot start for another reason.
    pub fn failed(&self) -> impl Fn(std::io::Error) -> BindError + use<> {
        system(&self.address)
    }

    /// Accepts the next connection, with the socket options for disk requests. `None`: there is none, or it
    /// has closed already.
    pub fn accept(&self) -> std::io::Result<Option<(OwnedFd, Peer)>> {
        // The listener is non-blocking; an accepted socket must block.
        let accepted = match &self.socket {
            ListeningSocket::Unix { socket, .. } => socket.accept().map(|(stream, _)| {
                let process = rustix::net::sockopt::socket_peercred(&stream).ok();
                let process = process.map(|credentials| credentials.pid.as_raw_nonzero().get());
                (OwnedFd::from(stream), Peer::Unix(process))
            }),
            ListeningSocket::Tcp(socket) => socket.accept().map(|(stream, address)| {
                headwater_block::tcp::tune(&stream);
                (OwnedFd::from(stream), Peer::Tcp(address))
            }),
        };
        match accepted {
            Ok(accepted) => Ok(Some(accepted)),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(error),
            },
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            ListeningSocket::Unix { socket, .. } => socket.as_fd(),
            ListeningSocket::Tcp(socket) => socket.as_fd(),
        }
    }
}

/// The file of a unix socket; removed when dropped.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode of our file, so that no other file is removed.
    identity: Option<(u64, u64)>,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some()
            && self.identity == identity(&self.path)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("cannot remove the socket '{}': {error}", self.path.display());
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

fn system(address: &str) -> impl Fn(std::io::Error) -> BindError + use<> {
    let address = address.to_owned();
    move |source| BindError::System { address: address.clone(), source }
}

fn bind_unix(path: &Path, failed: impl Fn(std::io::Error) -> BindError) -> Result<UnixListener, BindError> {
    let bytes = path.as_os_str().len();
    if bytes > UNIX_PATH_BYTES {
        return Err(BindError::PathTooLong { path: path.into(), bytes });
    }
    let first = match UnixListener::bind(path) {
        Ok(socket) => return Ok(socket),
        Err(error) => error,
    };
    match first.kind() {
        ErrorKind::AddrInUse => {}
        ErrorKind::NotFound => return Err(BindError::NoDirectory { path: path.into() }),
        _ => return Err(failed(first)),
    }
    let there = std::fs::symlink_metadata(path).map_err(&failed)?;
    if !there.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.into() });
    }
    match UnixStream::connect(path) {
        // A process that died left the file: nothing listens there.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
        _ => return Err(BindError::PathInUse { path: path.into() }),
    }
    std::fs::remove_file(path).map_err(&failed)?;
    UnixListener::bind(path).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => BindError::PathInUse { path: path.into() },
        _ => failed(error),
    })
}

fn bind_tcp(address: &str, host: &str, port: u16) -> Result<TcpListener, BindError> {
    let name = || address.to_owned();
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|source| BindError::UnknownHost { address: name(), source })?
        .collect();
    TcpListener::bind(addresses.as_slice()).map_err(|source| match source.kind() {
        ErrorKind::AddrInUse => BindError::PortInUse { address: name() },
        ErrorKind::AddrNotAvailable => BindError::NotOurs { address: name() },
        _ => BindError::System { address: name(), source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn a_path_in_use_is_refused_and_a_stale_one_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = Listener::unix(&path).unwrap();
        assert!(matches!(Listener::unix(&path), Err(BindError::PathInUse { .. })));
        drop(first);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(Listener::unix(&path).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn foreign_socket_files_stay() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(matches!(Listener::unix(&path), Err(BindError::NotASocket { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
        let path = directory.path().join("s");
        let first = Listener::unix(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _later = Listener::unix(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[test]
    fn paths_too_long_or_nowhere_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let error = Listener::unix(&directory.path().join("x".repeat(120))).unwrap_err();
        assert!(
            matches!(error, BindError::PathTooLong { .. }) && error.to_string().contains("107"),
            "{error}"
        );
        let error = Listener::unix(&directory.path().join("missing/s")).unwrap_err();
        assert!(matches!(error, BindError::NoDirectory { .. }), "{error}");
    }

    #[test]
    fn used_ports_and_foreign_addresses_are_named() {
        let (_first, port) = Listener::tcp("127.0.0.1", 0).unwrap();
        let error = Listener::tcp("127.0.0.1", port).unwrap_err();
        assert!(matches!(error, BindError::PortInUse { .. }), "{error}");
        // An address reserved for documentation (RFC 5737).
        let error = Listener::tcp("192.0.2.1", 0).unwrap_err();
        assert!(matches!(error, BindError::NotOurs { .. }), "{error}");
    }

    #[test]
    fn connections_are_accepted_without_delay() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener = Listener::unix(&path).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let _client = UnixStream::connect(&path).unwrap();
        let (_, peer) = listener.accept().unwrap().unwrap();
        assert_eq!(peer, Peer::Unix(i32::try_from(std::process::id()).ok()));
        let (listener, port) = Listener::tcp("127.0.0.1", 0).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (socket, peer) = listener.accept().unwrap().unwrap();
        assert_eq!(peer, Peer::Tcp(client.local_addr().unwrap()));
        // The listener is non-blocking; its connections block.
        assert!(!rustix::fs::fcntl_getfl(&socket).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
    }
}
