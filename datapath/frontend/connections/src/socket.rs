//! A connected stream socket. [`Socket::receive`] returns the bytes that have arrived;
//! [`Socket::receive_exact`] and [`Socket::send`] transfer everything. No call raises SIGPIPE.

use std::io::{ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};

use crate::stall::Stall;

/// The most parts of one system call (`UIO_MAXIOV`).
const SEND_PARTS: usize = 1024;

/// A connected stream socket, unix or TCP.
#[derive(Debug)]
pub struct Socket(OwnedFd);

/// The result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// This many bytes arrived; never 0.
    Bytes(usize),
    /// Nothing has arrived.
    Nothing,
    /// The peer sends no more.
    End,
}

impl Socket {
    /// Wraps the descriptor and changes no socket option.
    pub fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Limits how long one blocking receive waits; after that it returns [`Received::Nothing`].
    pub fn limit_wait(&self, limit: Duration) -> std::io::Result<()> {
        Ok(set_socket_timeout(self, Timeout::Recv, Some(limit))?)
    }

    /// Sets the stall limit: a send without a deadline fails with `TimedOut` if the peer accepts no bytes for
    /// this time (detected after one to three times the limit).
    pub fn limit_stall(&self, limit: Duration) -> std::io::Result<()> {
        Ok(set_socket_timeout(self, Timeout::Send, Some(limit))?)
    }

    /// Receives the bytes that have arrived, at most `into.len()`. If `wait`, waits for the first byte, up to
    /// the limit of [`Socket::limit_wait`].
    pub fn receive(&self, into: &mut [u8], wait: bool) -> std::io::Result<Received> {
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

    /// Receives exactly `into.len()` bytes before `deadline`. `Ok(false)`: the peer closed before the first byte.
    pub fn receive_exact(&self, into: &mut [u8], deadline: Instant) -> std::io::Result<bool> {
        self.receive_exact_by(into, deadline, |into| self.receive(into, false))
    }

    /// Like [`Socket::receive_exact`], but reads with `receive`, which must not block; for TLS.
    pub fn receive_exact_by(
        &self,
        into: &mut [u8],
        deadline: Instant,
        receive: impl Fn(&mut [u8]) -> std::io::Result<Received>,
    ) -> std::io::Result<bool> {
        let mut have = 0_usize;
        while let Some(rest) = into.get_mut(have..)
            && !rest.is_empty()
        {
            match receive(rest)? {
                Received::Bytes(count) => have = have.saturating_add(count),
                Received::End if have == 0 => return Ok(false),
                Received::End => return Err(ErrorKind::UnexpectedEof.into()),
                Received::Nothing => self.wait_until(PollFlags::IN, deadline)?,
            }
        }
        Ok(true)
    }

    /// Sends all parts. With a `deadline`, fails with `TimedOut` at it. Without one, fails if the peer
    /// accepts no bytes for the time of [`Socket::limit_stall`]; without that limit too, blocks indefinitely.
    /// Consumes `parts`.
    pub fn send(&self, parts: &mut [IoSlice<'_>], deadline: Option<Instant>) -> std::io::Result<()> {
        let wait = if deadline.is_some() { SendFlags::DONTWAIT } else { SendFlags::empty() };
        self.send_with(wait, parts, deadline)
    }

    /// Sends with `MSG_MORE` and without a deadline: the caller sends more right after.
    pub fn send_more(&self, parts: &mut [IoSlice<'_>]) -> std::io::Result<()> {
        self.send_with(SendFlags::MORE, parts, None)
    }

    fn send_with(
        &self,
        flags: SendFlags,
        mut parts: &mut [IoSlice<'_>],
        deadline: Option<Instant>,
    ) -> std::io::Result<()> {
        let flags = flags | SendFlags::NOSIGNAL;
        let mut stall = Stall::default();
        // Removes empty parts at the front, too.
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
                        stall.took_some(self);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => match deadline {
                    // The kernel has waited for the stall limit.
                    None => stall.waited(self)?,
                    Some(deadline) => self.wait_until(PollFlags::OUT, deadline)?,
                },
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Waits until the socket is ready. Fails with `TimedOut` at `deadline`.
    pub fn wait_until(&self, flags: PollFlags, deadline: Instant) -> std::io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let mut fds = [PollFd::new(&self.0, flags)];
        match rustix::event::poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            // The caller repeats its call and gets any error there.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Ends receiving: a blocked receive returns, bytes that have arrived can still be read, and replies can
    /// be sent.
    pub fn stop_receiving(&self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Read);
    }

    /// Shuts down the sending direction.
    pub fn stop_sending(&self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Write);
    }

    /// Shuts down both directions; wakes threads that wait in a system call on the socket.
    pub fn cut(&self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

impl AsRef<Self> for Socket {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
