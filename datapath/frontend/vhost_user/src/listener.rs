//! Listening on a unix socket: each way in which it can fail has a message of its own, and sockets left behind
//! by a dead process are replaced.

use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Longest path of a unix socket in bytes (`sun_path` without its final zero).
pub const SOCKET_PATH_BYTES: usize = 107;

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path does not fit into a socket address.
    #[error(
        "cannot listen on '{path}': the path has {bytes} bytes, and a unix socket's may have \
         {SOCKET_PATH_BYTES}; choose a shorter one"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        bytes: usize,
    },
    /// Somebody listens there.
    #[error("cannot listen on '{path}': another process listens there; stop it or choose another path")]
    InUse {
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
    /// Anything else.
    #[error("cannot listen on '{path}': {source}")]
    System {
        /// The path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// A listening socket and its file.
pub(crate) struct Listener {
    pub(crate) socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the file, so that only our own is removed.
    identity: Option<(u64, u64)>,
}

impl Listener {
    pub(crate) fn bind(path: &Path) -> Result<Self, BindError> {
        let socket = bind(path)?;
        socket.set_nonblocking(true).map_err(|source| BindError::System { path: path.into(), source })?;
        Ok(Self { socket, path: path.into(), identity: identity(path) })
    }

    /// The next connection; `None` if it went away meanwhile.
    pub(crate) fn accept(&self) -> std::io::Result<Option<UnixStream>> {
        match self.socket.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                Ok(Some(stream))
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(error),
            },
        }
    }
}

impl Drop for Listener {
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

fn bind(path: &Path) -> Result<UnixListener, BindError> {
    let bytes = path.as_os_str().len();
    if bytes > SOCKET_PATH_BYTES {
        return Err(BindError::PathTooLong { path: path.into(), bytes });
    }
    let fail = |source: std::io::Error| match source.kind() {
        ErrorKind::AddrInUse => BindError::InUse { path: path.into() },
        ErrorKind::NotFound => BindError::NoDirectory { path: path.into() },
        _ => BindError::System { path: path.into(), source },
    };
    match UnixListener::bind(path) {
        Ok(socket) => return Ok(socket),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {}
        Err(error) => return Err(fail(error)),
    }
    let there = std::fs::symlink_metadata(path).map_err(fail)?;
    if !there.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.into() });
    }
    match UnixStream::connect(path) {
        // Nobody listens there, and nobody can any more: its process has died.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
        _ => return Err(BindError::InUse { path: path.into() }),
    }
    std::fs::remove_file(path).map_err(fail)?;
    UnixListener::bind(path).map_err(fail)
}
