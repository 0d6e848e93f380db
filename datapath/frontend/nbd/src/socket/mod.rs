//! A connected socket that can send memory without copying it (see [`splice`]) and starts TLS if both sides
//! agree to it.

mod secure;
mod splice;

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use headwater_block::SharedSlice;
pub(crate) use headwater_connections::Received;
use headwater_connections::Socket as Plain;

use secure::Secure;
pub(crate) use splice::PagePipe;

/// A connected stream socket, unix or TCP.
pub(crate) struct Socket {
    plain: Plain,
    /// Set once, when TLS starts.
    secure: OnceLock<Box<Secure>>,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { plain: Plain::new(fd), secure: OnceLock::new() }
    }

    /// Limits how long one blocking receive waits; it then returns [`Received::Nothing`].
    pub(crate) fn limit_wait(&self, limit: Duration) -> std::io::Result<()> {
        self.plain.limit_wait(limit)
    }

    /// Limits how long the peer of a send without a deadline may accept no bytes. The send then fails with
    /// `TimedOut`, after one to three times this time.
    pub(crate) fn limit_stall(&self, limit: Duration) -> std::io::Result<()> {
        self.plain.limit_stall(limit)
    }

    /// Encrypts everything that follows, after a handshake before `deadline`. May be called only once.
    pub(crate) fn secure(&self, connection: rustls::Connection, deadline: Instant) -> std::io::Result<()> {
        let secure = Secure::start(&self.plain, connection, deadline)?;
        self.secure.set(Box::new(secure)).map_err(|_| std::io::ErrorKind::AlreadyExists.into())
    }

    /// Names in the certificate that the peer has shown; none without TLS.
    pub(crate) fn peer_names(&self) -> Vec<String> {
        self.secure.get().map(|secure| secure.peer_names()).unwrap_or_default()
    }

    /// Receives what has arrived, at most `into.len()`; waits for the first byte if `wait`. If only a part of
    /// a TLS record has arrived, it returns [`Received::Nothing`].
    pub(crate) fn receive(&self, into: &mut [u8], wait: bool) -> std::io::Result<Received> {
        match self.secure.get() {
            None => self.plain.receive(into, wait),
            Some(secure) => secure.receive(&self.plain, into, wait),
        }
    }

    /// Receives exactly `into.len()` bytes before `deadline`. `Ok(false)`: the peer closed before the first byte.
    pub(crate) fn receive_exact(&self, into: &mut [u8], deadline: Instant) -> std::io::Result<bool> {
        self.plain.receive_exact_by(into, deadline, |into| self.receive(into, false))
    }

    /// Sends all parts completely, waiting for the peer up to the limit that was set, or else as long as it
    /// takes. Empties `parts`, which belong to one message.
    pub(crate) fn send_all(&self, parts: &mut [IoSlice<'_>]) -> std::io::Result<()> {
        self.send_parts(parts, None)
    }

    /// Like [`Socket::send_all`], with a deadline.
    pub(crate) fn send_before(&self, bytes: &[u8], deadline: Instant) -> std::io::Result<()> {
        self.send_parts(&mut [IoSlice::new(bytes)], Some(deadline))
    }

    fn send_parts(&self, parts: &mut [IoSlice<'_>], deadline: Option<Instant>) -> std::io::Result<()> {
        match self.secure.get() {
            None => self.plain.send(parts, deadline),
            Some(secure) => secure.send(&self.plain, parts, deadline),
        }
    }

    /// Sends `first` and then memory that the device shares, without copying it if possible; waits like
    /// [`Socket::send_all`].
    pub(crate) fn send_shared(
        &self,
        first: &[u8],
        slices: &[SharedSlice],
        pipe: &mut PagePipe,
    ) -> std::io::Result<()> {
        // Encrypted data is copied anyway.
        let ends = if self.secure.get().is_none() { pipe.ends() } else { None };
        if let Some(ends) = ends {
            self.plain.send_more(&mut [IoSlice::new(first)])?;
            return splice::send_pages(&self.plain, ends, slices);
        }
        let parts = std::iter::once(first).chain(slices.iter().map(|part| &**part));
        self.send_parts(&mut parts.map(IoSlice::new).collect::<Vec<IoSlice<'_>>>(), None)
    }

    /// Ends receiving: bytes that have arrived can still be read, and replies can be sent.
    pub(crate) fn stop_receiving(&self) {
        self.plain.stop_receiving();
    }

    /// Ends both directions; wakes every thread that waits in a system call on it.
    pub(crate) fn cut(&self) {
        self.plain.cut();
    }

    /// Sends the TLS close alert, if that is possible without waiting.
    pub(crate) fn say_goodbye(&self) {
        if let Some(secure) = self.secure.get() {
            secure.close(&self.plain);
        }
    }
}

impl AsRef<Plain> for Socket {
    fn as_ref(&self) -> &Plain {
        &self.plain
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.plain.as_fd()
    }
}
