//! Binding: each way in which it can fail has a message of its own, and stale sockets are removed.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::UriBase;
use crate::address::{Address, UNIX_PATH_BYTES};
use crate::socket::Socket;

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path does not fit into a socket address.
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
    /// Somebody else listens there.
    #[error("cannot listen on '{path}': another process listens there; stop it or choose another path")]
    PathInUse {
        /// The path.
        path: PathBuf,
    },
    /// There is something that must not be removed.
    #[error(
        "cannot listen on '{path}': a file that is no socket is in the way; remove it or choose another path"
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The directory is not there.
    #[error("cannot listen on '{path}': its directory does not exist; create it or choose another path")]
    NoDirectory {
        /// The path.
        path: PathBuf,
    },
    /// Somebody else listens on the port.
    #[error(
        "cannot listen on {address}: the port is in use; stop the process that has it or choose another port"
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
        /// Why.
        source: std::io::Error,
    },
    /// Anything else.
    #[error("cannot listen on {address}: {source}")]
    System {
        /// The address.
        address: String,
        /// Why.
        source: std::io::Error,
    },
}

/// A listening socket.
pub(super) enum Listener {
    Unix {
        listener: UnixListener,
        path: PathBuf,
        /// Device and inode of the socket file, so that only our own is removed.
        identity: Option<(u64, u64)>,
    },
    Tcp(TcpListener),
}

/// Who is at the other end, for logs.
pub(super) enum Peer {
    Unix(Option<i32>),
    Tcp(SocketAddr),
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(Some(process)) => write!(f, "client process {process}"),
            Self::Unix(None) => f.write_str("client on the unix socket"),
            Self::Tcp(address) => write!(f, "client {address}"),
        }
    }
}

impl Listener {
    pub(super) fn bind(address: &Address) -> Result<Self, BindError> {
        let listener = match address {
            Address::Unix(path) => {
                let listener = bind_unix(path)?;
                let identity = std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()));
                Self::Unix { listener, path: path.clone(), identity }
            }
            Address::Tcp { host, port } => {
                let listener = bind_tcp(address, host, *port)?;
                headwater_block::tcp::listen(&listener);
                Self::Tcp(listener)
            }
        };
        let nonblocking = match &listener {
            Self::Unix { listener, .. } => listener.set_nonblocking(true),
            Self::Tcp(listener) => listener.set_nonblocking(true),
        };
        nonblocking.map_err(|source| BindError::System { address: address.to_string(), source })?;
        Ok(listener)
    }

    pub(super) fn uri_base(&self, address: &Address) -> UriBase {
        match (self, address) {
            (Self::Unix { path, .. }, _) => {
                UriBase::Unix(std::path::absolute(path).unwrap_or_else(|_| path.clone()))
            }
            (Self::Tcp(listener), Address::Tcp { host, port }) => {
                UriBase::Tcp { host: host.clone(), port: listener.local_addr().map_or(*port, |a| a.port()) }
            }
            (Self::Tcp(_), Address::Unix(path)) => UriBase::Unix(path.clone()),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix { listener, .. } => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }

    /// The next connection, or `None` if it is gone already.
    pub(super) fn accept(&self) -> std::io::Result<Option<(Socket, Peer)>> {
        use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
        let accepted = match self {
            Self::Unix { listener, .. } => listener.accept().map(|(stream, _)| {
                let socket = Socket::new(OwnedFd::from(stream));
                let peer = Peer::Unix(socket.peer_process());
                (socket, peer)
            }),
            Self::Tcp(listener) => listener.accept().map(|(stream, address)| {
                let socket = Socket::new(OwnedFd::from(stream));
                headwater_block::tcp::tune(&socket);
                (socket, Peer::Tcp(address))
            }),
        };
        match accepted {
            Ok(accepted) => Ok(Some(accepted)),
            Err(e) if matches!(e.kind(), WouldBlock | Interrupted | ConnectionAborted) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Closes, and removes the socket file if it is still ours.
    pub(super) fn close(self) {
        if let Self::Unix { path, identity, .. } = &self
            && let Ok(now) = std::fs::symlink_metadata(path)
            && *identity == Some((now.dev(), now.ino()))
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::warn!("cannot remove the socket '{}': {error}", path.display());
        }
    }
}

fn bind_unix(path: &Path) -> Result<UnixListener, BindError> {
    let bytes = path.as_os_str().len();
    if bytes > UNIX_PATH_BYTES {
        return Err(BindError::PathTooLong { path: path.into(), bytes });
    }
    let system = |source| BindError::System { address: format!("unix:{}", path.display()), source };
    let first = match UnixListener::bind(path) {
        Ok(listener) => return Ok(listener),
        Err(error) => error,
    };
    match first.kind() {
        std::io::ErrorKind::AddrInUse => {}
        std::io::ErrorKind::NotFound => return Err(BindError::NoDirectory { path: path.into() }),
        _ => return Err(system(first)),
    }
    let metadata = std::fs::symlink_metadata(path).map_err(system)?;
    if !metadata.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.into() });
    }
    match UnixStream::connect(path) {
        // Left behind by a process that died: nobody answers, nobody ever will.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {}
        _ => return Err(BindError::PathInUse { path: path.into() }),
    }
    std::fs::remove_file(path).map_err(system)?;
    UnixListener::bind(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => BindError::PathInUse { path: path.into() },
        _ => system(error),
    })
}

fn bind_tcp(address: &Address, host: &str, port: u16) -> Result<TcpListener, BindError> {
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|source| BindError::UnknownHost { address: address.to_string(), source })?
        .collect();
    TcpListener::bind(addresses.as_slice()).map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => BindError::PortInUse { address: address.to_string() },
        _ => BindError::System { address: address.to_string(), source },
    })
}
