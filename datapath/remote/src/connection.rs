//! One non-blocking TCP connection, with or without TLS.
//!
//! | state | `drive` |
//! |---|---|
//! | connecting | checks whether the connection is established, then sends |
//! | sending | sends the rest of the request (TLS: and of the handshake) |
//! | receiving | nothing to do; `read` returns what arrived |

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

/// How much is received at a time for TLS: many records, so that the cost of system calls is small.
const RECEIVE_BYTES: usize = 128 << 10;

/// How a server's connections are encrypted.
#[derive(Clone)]
pub(crate) struct TlsPeer {
    pub config: Arc<ClientConfig>,
    pub name: ServerName<'static>,
}

struct Tls {
    session: ClientConnection,
    received: Received,
}

/// Received bytes that the TLS session has not taken yet: `start .. end`. The buffer keeps its length,
/// because growing it again would fill it with zeroes before each call.
struct Received {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// What follows an answer on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterAnswer {
    /// Nothing, and the other side has not closed: the connection can be used for another request.
    Quiet,
    /// The connection is closed or broken.
    Ended,
    /// Bytes that were not requested.
    More,
}

pub(crate) struct Connection {
    socket: TcpStream,
    connecting: bool,
    /// When it was established; with TLS, when the handshake was over.
    ready_at: Option<Instant>,
    /// Plaintext that has not been sent yet; with TLS the session keeps it.
    unsent: Vec<u8>,
    tls: Option<Box<Tls>>,
}

impl Connection {
    /// Starts to connect.
    pub(crate) fn start(address: SocketAddr, tls: Option<&TlsPeer>) -> Result<Self, Error> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket: OwnedFd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        let connecting = match rustix::net::connect(&socket, &address) {
            Ok(()) => false,
            Err(rustix::io::Errno::INPROGRESS) => true,
            Err(e) => return Err(e.into()),
        };
        let tls = match tls {
            None => None,
            Some(peer) => {
                let session = ClientConnection::new(Arc::clone(&peer.config), peer.name.clone())
                    .map_err(Error::other)?;
                let bytes = vec![0; RECEIVE_BYTES].into_boxed_slice();
                Some(Box::new(Tls { session, received: Received { bytes, start: 0, end: 0 } }))
            }
        };
        let socket = TcpStream::from(socket);
        Ok(Self { socket, connecting, ready_at: None, unsent: Vec::new(), tls })
    }

    /// Queues bytes for sending.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match &mut self.tls {
            Some(tls) => tls.session.writer().write_all(bytes),
            None => {
                self.unsent.extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Sends as much as is possible without waiting.
    pub(crate) fn drive(&mut self) -> Result<(), Error> {
        if self.connecting {
            let mut ready = [rustix::event::PollFd::new(&self.socket, PollFlags::OUT)];
            let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            if rustix::event::poll(&mut ready, Some(&zero))? == 0 {
                return Ok(());
            }
            sockopt::socket_error(&self.socket)?.map_err(Error::from)?;
            self.connecting = false;
        }
        if self.tls.is_none() {
            self.ready_at.get_or_insert_with(Instant::now);
        }
        match &mut self.tls {
            Some(tls) => {
                while tls.session.wants_write() {
                    match tls.session.write_tls(&mut self.socket) {
                        Ok(_) => {}
                        Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                        Err(e) if e.kind() == ErrorKind::Interrupted => {}
                        Err(e) => return Err(e),
                    }
                }
            }
            None => {
                while !self.unsent.is_empty() {
                    match self.socket.write(&self.unsent) {
                        Ok(0) => return Err(ErrorKind::WriteZero.into()),
                        Ok(sent) => drop(self.unsent.drain(..sent)),
                        Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                        Err(e) if e.kind() == ErrorKind::Interrupted => {}
                        Err(e) => return Err(e),
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether it is not encrypted.
    pub(crate) fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Whether the connection is established.
    pub(crate) fn is_connected(&self) -> bool {
        !self.connecting
    }

    /// When it became ready to send a request, if it did.
    pub(crate) fn ready_at(&self) -> Option<Instant> {
        self.ready_at
    }

    /// Takes bytes that arrived: `Ok(0)` is the end of the stream, `WouldBlock` means later.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> Result<usize, Error> {
        if self.connecting {
            return Err(ErrorKind::WouldBlock.into());
        }
        let Some(tls) = &mut self.tls else {
            return receive(&mut self.socket, into);
        };
        loop {
            match tls.session.reader().read(into) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                // An end without TLS's close message still counts as an end: lengths show whether something
                // is missing.
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                read => return read,
            }
            let received = &mut tls.received;
            if received.start >= received.end {
                (received.start, received.end) = (0, receive(&mut self.socket, &mut received.bytes)?);
            }
            let mut rest = received.bytes.get(received.start..received.end).unwrap_or_default();
            let before = rest.len();
            let taken = tls.session.read_tls(&mut rest)?;
            received.start += before - rest.len();
            if let Err(e) = tls.session.process_new_packets() {
                // Sends the reason to the server, which may be gone.
                let _ = tls.session.write_tls(&mut self.socket);
                return Err(Error::new(ErrorKind::InvalidData, crate::tls::in_words(&e)));
            }
            if !tls.session.is_handshaking() {
                self.ready_at.get_or_insert_with(Instant::now);
            }
            while tls.session.wants_write() {
                match tls.session.write_tls(&mut self.socket) {
                    Ok(_) => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => return Err(e),
                }
            }
            if taken == 0 {
                return match tls.session.reader().read(into) {
                    Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(0),
                    Err(e) if e.kind() == ErrorKind::UnexpectedEof => Ok(0),
                    read => read,
                };
            }
        }
    }

    /// Checks what follows after an answer. If there are bytes, it takes one of them.
    pub(crate) fn after_answer(&mut self) -> AfterAnswer {
        let mut byte = [0];
        match self.read(&mut byte) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => AfterAnswer::Quiet,
            Ok(1..) => AfterAnswer::More,
            Ok(0) | Err(_) => AfterAnswer::Ended,
        }
    }

    #[cfg(test)]
    pub(crate) fn local(&self) -> SocketAddr {
        self.socket.local_addr().unwrap()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The socket events to wait for.
    pub(crate) fn interest(&self) -> PollFlags {
        let sending = self.connecting
            || !self.unsent.is_empty()
            || self.tls.as_ref().is_some_and(|tls| tls.session.wants_write());
        if sending { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

fn receive(socket: &mut TcpStream, into: &mut [u8]) -> Result<usize, Error> {
    loop {
        match socket.read(into) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}
