//! A connected socket: receiving and sending with and without waiting, by system calls that never raise SIGPIPE.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};

/// A connected stream socket, unix or TCP.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

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
        Self(fd)
    }

    /// Sets what TCP needs; on a unix socket this does nothing.
    pub(crate) fn tune_tcp(&self) {
        // Failures cost latency or the detection of dead peers, never correctness.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&self.0, true);
        let _ = rustix::net::sockopt::set_socket_keepalive(&self.0, true);
    }

    /// Bounds how long one receive that waits does so; it says [`Received::Nothing`] then.
    pub(crate) fn limit_wait(&self, limit: Duration) -> std::io::Result<()> {
        let which = rustix::net::sockopt::Timeout::Recv;
        Ok(rustix::net::sockopt::set_socket_timeout(&self.0, which, Some(limit))?)
    }

    /// Receives what is there, at most `into.len()`; waits for the first byte if `wait`.
    pub(crate) fn receive(&self, into: &mut [u8], wait: bool) -> std::io::Result<Received> {
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
    pub(crate) fn receive_exact(&self, into: &mut [u8], deadline: Option<Instant>) -> std::io::Result<bool> {
        let mut have = 0_usize;
        while let Some(rest) = into.get_mut(have..)
            && !rest.is_empty()
        {
            match self.receive(rest, deadline.is_none())? {
                Received::Bytes(count) => have = have.saturating_add(count),
                Received::End if have == 0 => return Ok(false),
                Received::End => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Received::Nothing => self.wait_until(PollFlags::IN, deadline)?,
            }
        }
        Ok(true)
    }

    /// Sends both slices whole, waiting for the peer as long as it takes.
    pub(crate) fn send_all(&self, first: &[u8], second: &[u8]) -> std::io::Result<()> {
        self.send_parts(first, second, None)
    }

    /// The same before `deadline`.
    pub(crate) fn send_before(&self, bytes: &[u8], deadline: Instant) -> std::io::Result<()> {
        self.send_parts(bytes, &[], Some(deadline))
    }

    fn send_parts(
        &self,
        mut first: &[u8],
        mut second: &[u8],
        deadline: Option<Instant>,
    ) -> std::io::Result<()> {
        let mut flags = SendFlags::NOSIGNAL;
        if deadline.is_some() {
            flags |= SendFlags::DONTWAIT;
        }
        while !first.is_empty() || !second.is_empty() {
            let sent = if second.is_empty() {
                rustix::net::send(&self.0, first, flags)
            } else if first.is_empty() {
                rustix::net::send(&self.0, second, flags)
            } else {
                let parts = [IoSlice::new(first), IoSlice::new(second)];
                rustix::net::sendmsg(&self.0, &parts, &mut SendAncillaryBuffer::default(), flags)
            };
            let sent = match sent {
                Ok(sent) => sent,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    self.wait_until(PollFlags::OUT, deadline)?;
                    continue;
                }
                Err(errno) => return Err(errno.into()),
            };
            let of_first = sent.min(first.len());
            first = first.get(of_first..).unwrap_or_default();
            second = second.get(sent.saturating_sub(of_first)..).unwrap_or_default();
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

    /// Ends receiving: what has arrived can still be read, and replies can be sent.
    pub(crate) fn stop_receiving(&self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Read);
    }

    /// Ends both directions; wakes whoever waits in a system call on it.
    pub(crate) fn cut(&self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }

    /// The process at the other end of a unix socket.
    pub(crate) fn peer_process(&self) -> Option<i32> {
        rustix::net::sockopt::socket_peercred(&self.0).ok().map(|c| c.pid.as_raw_nonzero().get())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
