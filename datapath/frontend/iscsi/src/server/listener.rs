//! Binding and accepting: each way in which binding can fail has a message of its own.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

use crate::address::Address;
use crate::socket::Socket;

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
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
    /// This machine does not have the address.
    #[error("cannot listen on {address}: this machine does not have that address; see: ip address")]
    NotOurs {
        /// The address.
        address: String,
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

pub(super) fn bind(address: &Address) -> Result<TcpListener, BindError> {
    let name = || address.to_string();
    let system = |source| BindError::System { address: name(), source };
    let addresses: Vec<SocketAddr> = (address.host.as_str(), address.port)
        .to_socket_addrs()
        .map_err(|source| BindError::UnknownHost { address: name(), source })?
        .collect();
    let listener = TcpListener::bind(addresses.as_slice()).map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => BindError::PortInUse { address: name() },
        std::io::ErrorKind::AddrNotAvailable => BindError::NotOurs { address: name() },
        _ => system(source),
    })?;
    listener.set_nonblocking(true).map_err(system)?;
    headwater_block::tcp::listen(&listener);
    Ok(listener)
}

/// The next connection, or `None` if it is gone already.
pub(super) fn accept(listener: &TcpListener) -> std::io::Result<Option<(Socket, SocketAddr)>> {
    use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    match listener.accept() {
        Ok((stream, address)) => {
            stream.set_nonblocking(false)?;
            Ok(Some((Socket::new(stream), address)))
        }
        Err(e) if matches!(e.kind(), WouldBlock | Interrupted | ConnectionAborted) => Ok(None),
        Err(e) => Err(e),
    }
}
