//! Opens sockets on one network interface, and finds its IPv4 address.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::addresses;

/// A UDP socket on this interface. It may send broadcasts.
pub fn udp(interface: &str, port: u16) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(interface.as_bytes()))?;
    socket.set_broadcast(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&any(port))?;
    Ok(socket.into())
}

/// A TCP listener on this interface.
pub fn tcp(interface: &str, port: u16) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(interface.as_bytes()))?;
    socket.set_nonblocking(true)?;
    socket.bind(&any(port))?;
    socket.listen(1024)?;
    Ok(socket.into())
}

/// The first IPv4 address of this interface.
pub fn address(interface: &str) -> io::Result<Ipv4Addr> {
    addresses::of(interface)?.ok_or_else(|| io::Error::other("it has no IPv4 address"))
}

fn any(port: u16) -> SockAddr {
    SockAddr::from(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))
}
