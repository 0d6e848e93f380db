//! A connected TCP socket: receiving with and without waiting, sending whole, without SIGPIPE.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};

/// What a receive found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// This many bytes; never 0.
    Bytes(usize),
    /// Nothing yet.
    Nothing,
    /// The peer sends no more.
    End,
}

/// A connection to an initiator.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    local: Option<SocketAddr>,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let local = rustix::net::getsockname(&fd).ok().and_then(|address| address.try_into().ok());
        Self { fd, local }
    }

    /// The address that the initiator connected to.
    pub(crate) fn local(&self) -> Option<SocketAddr> {
        self.local
    }

    /// Bounds how long a receive that waits does so, and how long a send may make no progress.
    pub(crate) fn limit_waits(&self, receive: Duration, send: Duration) -> std::io::Result<()> {
        sockopt::set_socket_timeout(&self.fd, Timeout::Recv, Some(receive))?;
        sockopt::set_socket_timeout(&self.fd, Timeout::Send, Some(send))?;
        Ok(())
    }

    /// Receives what is there, at most `into.len()`; waits for the first byte if `wait`, up to the limit that was set.
    pub(crate) fn receive(&self, into: &mut [u8], wait: bool) -> std::io::Result<Received> {
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        match rustix::net::recv(&self.fd, &mut *into, flags) {
            Ok((_, 0)) => Ok(Received::End),
            Ok((_, count)) => Ok(Received::Bytes(count.min(into.len()))),
            // The caller comes back.
            Err(Errno::INTR | Errno::AGAIN) => Ok(Received::Nothing),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Receives exactly `into.len()` bytes before `deadline`. `Ok(false)`: the peer closed before the first byte.
    pub(crate) fn receive_exact(&self, into: &mut [u8], deadline: Instant) -> std::io::Result<bool> {
        let mut have = 0_usize;
        while let Some(rest) = into.get_mut(have..)
            && !rest.is_empty()
        {
            match self.receive(rest, false)? {
                Received::Bytes(count) => have = have.saturating_add(count),
                Received::End if have == 0 => return Ok(false),
                Received::End => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Received::Nothing => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(std::io::ErrorKind::TimedOut.into());
                    }
                    let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
                    match rustix::event::poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
            }
        }
        Ok(true)
    }

    /// Sends both slices whole, waiting for the peer up to the limit that was set.
    pub(crate) fn send_all(&self, mut first: &[u8], mut second: &[u8]) -> std::io::Result<()> {
        let flags = SendFlags::NOSIGNAL;
        while !first.is_empty() || !second.is_empty() {
            let sent = if second.is_empty() {
                rustix::net::send(&self.fd, first, flags)
            } else {
                let parts = [IoSlice::new(first), IoSlice::new(second)];
                rustix::net::sendmsg(&self.fd, &parts, &mut SendAncillaryBuffer::default(), flags)
            };
            let sent = match sent {
                Ok(sent) => sent,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Err(std::io::ErrorKind::TimedOut.into()),
                Err(errno) => return Err(errno.into()),
            };
            let of_first = sent.min(first.len());
            first = first.get(of_first..).unwrap_or_default();
            second = second.get(sent.saturating_sub(of_first)..).unwrap_or_default();
        }
        Ok(())
    }

    /// Ends receiving: a receive that waits returns, what has arrived or still arrives can be read.
    pub(crate) fn stop_receiving(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Read);
    }

    /// Says that nothing more is sent, and waits a moment for the peer to close: closing with bytes unread would reset
    /// the connection, and the peer might lose what was sent last.
    pub(crate) fn finish(&self, patience: Duration) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
        let Some(deadline) = Instant::now().checked_add(patience) else { return };
        let mut rest = [0; 4096];
        // What still comes is of no interest, and a peer that sends on and on is left after the deadline.
        while Instant::now() < deadline && matches!(self.receive_exact(&mut rest, deadline), Ok(true)) {}
    }

    /// Ends both directions; wakes whoever waits in a system call on it.
    pub(crate) fn cut(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
