//! A connected socket: receiving and sending with and without waiting, by system calls that raise no SIGPIPE (but see [`splice`]);
//! encrypted from the moment on that both ends agree to.

mod secure;
mod splice;
mod stall;

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use headwater_block::Lent;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};

use secure::Secure;
pub(crate) use splice::PagePipe;
use stall::Stall;

/// Parts of one system call: what every kernel takes (`UIO_MAXIOV`).
const SEND_PARTS: usize = 1024;

/// A connected stream socket, unix or TCP.
pub(crate) struct Socket {
    plain: Plain,
    /// Set once, when TLS starts.
    secure: OnceLock<Box<Secure>>,
}

/// The socket itself.
struct Plain(OwnedFd);

/// What a receive without waiting found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// This many bytes; never 0.
    Bytes(usize),
    /// Nothing yet.
    Nothing,
    /// The peer sends no more.
    End,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { plain: Plain(fd), secure: OnceLock::new() }
    }

    /// Bounds how long one receive that waits does so; it says [`Received::Nothing`] then.
    pub(crate) fn limit_wait(&self, limit: Duration) -> std::io::Result<()> {
        let which = rustix::net::sockopt::Timeout::Recv;
        Ok(rustix::net::sockopt::set_socket_timeout(self, which, Some(limit))?)
    }

    /// Bounds how long the peer of a send without a deadline may take nothing; it fails with `TimedOut` then, or up to two such times
    /// later.
    pub(crate) fn limit_stall(&self, limit: Duration) -> std::io::Result<()> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        set_socket_timeout(self, Timeout::Recv, Some(limit))?;
        Ok(set_socket_timeout(self, Timeout::Send, Some(limit))?)
    }

    /// Encrypts all that follows, after a handshake before `deadline`. Once only.
    pub(crate) fn secure(&self, connection: rustls::Connection, deadline: Instant) -> std::io::Result<()> {
        let secure = Secure::start(&self.plain, connection, deadline)?;
        self.secure.set(Box::new(secure)).map_err(|_| std::io::ErrorKind::AlreadyExists.into())
    }

    /// Names in the certificate that the peer has shown; none without TLS.
    pub(crate) fn peer_names(&self) -> Vec<String> {
        self.secure.get().map(|secure| secure.peer_names()).unwrap_or_default()
    }

    /// Receives what is there, at most `into.len()`; waits for the first byte if `wait`.
    pub(crate) fn receive(&self, into: &mut [u8], wait: bool) -> std::io::Result<Received> {
        match self.secure.get() {
            None => self.plain.receive(into, wait),
            Some(secure) => secure.receive(&self.plain, into, wait),
        }
    }

    /// Receives exactly `into.len()` bytes before `deadline`. `Ok(false)`: the peer closed before the first byte.
    pub(crate) fn receive_exact(&self, into: &mut [u8], deadline: Option<Instant>) -> std::io::Result<bool> {
        let mut have = 0_usize;
        while let Some(rest) = into.get_mut(have..)
            && !rest.is_empty()
        {
            match self.receive(rest, deadline.is_none())? {
                Received::Bytes(count) => have = have.saturating_add(count),
                Received::End if have == 0 => return Ok(false),
                Received::End => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Received::Nothing => self.plain.wait_until(PollFlags::IN, deadline)?,
            }
        }
        Ok(true)
    }

    /// Sends all parts whole, waiting for the peer up to the limit that was set, else as long as it takes. Empties `parts`, which are those of one message.
    pub(crate) fn send_all(&self, parts: &mut [IoSlice<'_>]) -> std::io::Result<()> {
        self.send_parts(parts, None)
    }

    /// The same before `deadline`.
    pub(crate) fn send_before(&self, bytes: &[u8], deadline: Instant) -> std::io::Result<()> {
        self.send_parts(&mut [IoSlice::new(bytes)], Some(deadline))
    }

    fn send_parts(&self, parts: &mut [IoSlice<'_>], deadline: Option<Instant>) -> std::io::Result<()> {
        match self.secure.get() {
            None => self.plain.send_parts(parts, deadline),
            Some(secure) => secure.send(&self.plain, parts, deadline),
        }
    }

    /// Sends `first` and then what is lent, without copying that where it can be avoided; waits like [`Socket::send_all`].
    pub(crate) fn send_lent(&self, first: &[u8], lent: &[Lent], pipe: &mut PagePipe) -> std::io::Result<()> {
        // What is encrypted is copied anyway.
        let ends = if self.secure.get().is_none() { pipe.ends() } else { None };
        if let Some(ends) = ends {
            self.plain.send(&mut [IoSlice::new(first)], SendFlags::NOSIGNAL | SendFlags::MORE, None)?;
            return self.plain.send_pages(ends, lent);
        }
        let parts = std::iter::once(first).chain(lent.iter().map(|part| &**part));
        self.send_parts(&mut parts.map(IoSlice::new).collect::<Vec<IoSlice<'_>>>(), None)
    }

    /// Ends receiving: what has arrived can still be read, and replies can be sent.
    pub(crate) fn stop_receiving(&self) {
        let _ = rustix::net::shutdown(&self.plain.0, Shutdown::Read);
    }

    /// Ends both directions; wakes whoever waits in a system call on it.
    pub(crate) fn cut(&self) {
        let _ = rustix::net::shutdown(&self.plain.0, Shutdown::Both);
    }

    /// Tells the other end of an encrypted connection that nothing follows, if it can be told at once.
    pub(crate) fn say_goodbye(&self) {
        if let Some(secure) = self.secure.get() {
            secure.close(&self.plain);
        }
    }
}

impl Plain {
    fn receive(&self, into: &mut [u8], wait: bool) -> std::io::Result<Received> {
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        loop {
            return match rustix::net::recv(&self.0, &mut *into, flags) {
                Ok((_, 0)) => Ok(Received::End),
                Ok((_, count)) => Ok(Received::Bytes(count.min(into.len()))),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Ok(Received::Nothing),
                Err(errno) => Err(errno.into()),
            };
        }
    }

    fn send_parts(&self, parts: &mut [IoSlice<'_>], deadline: Option<Instant>) -> std::io::Result<()> {
        let wait = if deadline.is_some() { SendFlags::DONTWAIT } else { SendFlags::empty() };
        self.send(parts, SendFlags::NOSIGNAL | wait, deadline)
    }

    fn send(
        &self,
        mut parts: &mut [IoSlice<'_>],
        flags: SendFlags,
        deadline: Option<Instant>,
    ) -> std::io::Result<()> {
        let mut stall = Stall::default();
        // Empty ones in front go too.
        IoSlice::advance_slices(&mut parts, 0);
        while let Some(first) = parts.first() {
            let sent = if parts.len() == 1 {
                rustix::net::send(&self.0, first, flags)
            } else {
                let most = parts.len().min(SEND_PARTS);
                let now = parts.get(..most).unwrap_or_default();
                rustix::net::sendmsg(&self.0, now, &mut SendAncillaryBuffer::default(), flags)
            };
            match sent {
                Ok(sent) => {
                    IoSlice::advance_slices(&mut parts, sent);
                    if !parts.is_empty() && deadline.is_none() {
                        stall.took_some(&self.0);
                    }
                }
                Err(Errno::INTR) => {}
                // Without a deadline it has waited already.
                Err(Errno::AGAIN) if deadline.is_none() => stall.waited(&self.0)?,
                Err(Errno::AGAIN) => self.wait_until(PollFlags::OUT, deadline)?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn wait_until(&self, flags: PollFlags, deadline: Option<Instant>) -> std::io::Result<()> {
        let timeout = match deadline {
            None => None,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(std::io::ErrorKind::TimedOut.into());
                }
                Timespec::try_from(left).ok()
            }
        };
        let mut fds = [PollFd::new(&self.0, flags)];
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            // The caller tries again and finds out.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.plain.0.as_fd()
    }
}
