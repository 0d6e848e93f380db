//! A connected socket: receiving and sending with and without waiting, whole, by system calls that raise no SIGPIPE.

use std::io::{ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};

use crate::stall::Stall;

/// Parts of one system call: what every kernel takes (`UIO_MAXIOV`).
const SEND_PARTS: usize = 1024;

/// A connected stream socket, unix or TCP.
#[derive(Debug)]
pub struct Socket(OwnedFd);

/// What a receive found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// This many bytes; never 0.
    Bytes(usize),
    /// Nothing yet.
    Nothing,
    /// The peer sends no more.
    End,
}

impl Socket {
    /// A socket as it is set up.
    pub fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Bounds how long one receive that waits does so; it says [`Received::Nothing`] then.
    pub fn limit_wait(&self, limit: Duration) -> std::io::Result<()> {
        Ok(set_socket_timeout(self, Timeout::Recv, Some(limit))?)
    }

    /// Bounds how long the peer of a send without a deadline may take nothing; it fails with `TimedOut` then, or up to two such times
    /// later.
    pub fn limit_stall(&self, limit: Duration) -> std::io::Result<()> {
        Ok(set_socket_timeout(self, Timeout::Send, Some(limit))?)
    }

    /// Receives what is there, at most `into.len()`; waits for the first byte if `wait`, up to the limit that was set.
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

    /// The same for bytes that are received another way, without waiting.
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

    /// Sends all parts whole, waiting for the peer before `deadline`, else up to the limit that was set, else as long as it takes. Empties
    /// `parts`, which are those of one message.
    pub fn send(&self, parts: &mut [IoSlice<'_>], deadline: Option<Instant>) -> std::io::Result<()> {
        let wait = if deadline.is_some() { SendFlags::DONTWAIT } else { SendFlags::empty() };
        self.send_with(wait, parts, deadline)
    }

    /// The same without a deadline, for what is followed by more at once.
    pub fn send_first(&self, parts: &mut [IoSlice<'_>]) -> std::io::Result<()> {
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
                        stall.took_some(self);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => match deadline {
                    // It has waited already.
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
            // The caller tries again and finds out.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Ends receiving: a receive that waits returns, what has arrived can still be read, and replies can be sent.
    pub fn stop_receiving(&self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Read);
    }

    /// Says that nothing more is sent.
    pub fn stop_sending(&self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Write);
    }

    /// Ends both directions; wakes whoever waits in a system call on it.
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
