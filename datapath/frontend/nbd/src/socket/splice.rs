//! Sends memory without copying: its pages go into a pipe, and from the pipe to the socket.
#![expect(unsafe_code, reason = "vmsplice hands pages to the kernel, which reads them later; see `hand_out`")]

use std::os::fd::OwnedFd;

use headwater_block::{Pages, SharedSlice};
use rustix::io::Errno;
use rustix::pipe::{IoSliceRaw, PipeFlags, SpliceFlags};

use headwater_connections::{Socket as Plain, Stall};

/// The requested size of the pipe: the most that an unprivileged process may ask for
/// (`/proc/sys/fs/pipe-max-size`).
const PIPE_BYTES: usize = 1 << 20;
/// The smallest useful size: with a smaller pipe the system calls cost more than a copy. Unprivileged users with
/// many pipes get only small ones.
const PIPE_MIN_BYTES: usize = 256 << 10;
/// Parts that go into the pipe with one system call.
const PARTS: usize = 32;

/// The pipe through which pages go to a socket; one per sender.
#[derive(Debug, Default)]
pub(crate) enum PagePipe {
    /// Created when memory is shared for the first time: most connections never share any.
    #[default]
    NotMade,
    /// The pipe exists; it is empty between messages.
    Made(Ends),
    /// The system provides no usable pipe, so shared memory is copied into the socket like other data.
    Refused,
}

#[derive(Debug)]
pub(crate) struct Ends {
    read: OwnedFd,
    write: OwnedFd,
}

impl PagePipe {
    /// The pipe, if the system gives one.
    pub(super) fn ends(&mut self) -> Option<&Ends> {
        if matches!(self, Self::NotMade) {
            *self = match Ends::new() {
                Ok(ends) => Self::Made(ends),
                Err(why) => {
                    tracing::debug!(%why, "no pipe for sending without a copy; replies are copied");
                    Self::Refused
                }
            };
        }
        match self {
            Self::Made(ends) => Some(ends),
            _ => None,
        }
    }
}

impl Ends {
    fn new() -> std::io::Result<Self> {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // What counts is the size that the pipe then has.
        for bytes in [PIPE_BYTES, PIPE_MIN_BYTES] {
            if rustix::pipe::fcntl_setpipe_size(&write, bytes).is_ok() {
                break;
            }
        }
        let bytes = rustix::pipe::fcntl_getpipe_size(&write)?;
        if bytes < PIPE_MIN_BYTES {
            return Err(std::io::Error::other(format!("pipes of this user have {bytes} bytes now")));
        }
        let ends = Self { read, write };
        ends.probe()?;
        Ok(ends)
    }

    /// Fails if a sandbox forbids `vmsplice`, before any part of a reply was sent.
    fn probe(&self) -> std::io::Result<()> {
        let byte = SharedSlice::new(Pages::new(1)?.share(), 0, 1);
        fill(self, byte.as_slice(), 0)?;
        rustix::io::read(&self.read, &mut [0])?;
        Ok(())
    }
}

/// Sends all of `slices`, waiting for the peer as [`super::Socket::send_all`] does. After an error the pipe
/// may still hold bytes, and the connection has to end.
///
/// `splice` has no flag against SIGPIPE; programs in Rust ignore that signal from their start.
pub(super) fn send_pages(plain: &Plain, pipe: &Ends, mut slices: &[SharedSlice]) -> std::io::Result<()> {
    // How much of the first part is on its way already.
    let mut begun = 0_usize;
    while !slices.is_empty() {
        let filled = fill(pipe, slices, begun)?;
        begun = begun.saturating_add(filled);
        while let Some((first, rest)) = slices.split_first()
            && begun >= first.len()
        {
            begun = begun.saturating_sub(first.len());
            slices = rest;
        }
        drain(plain, pipe, filled, !slices.is_empty())?;
    }
    Ok(())
}

/// Moves `left` bytes from the pipe to the socket; `more` follow.
fn drain(plain: &Plain, pipe: &Ends, mut left: usize, more: bool) -> std::io::Result<()> {
    let flags = if more { SpliceFlags::MORE } else { SpliceFlags::empty() };
    let mut stall = Stall::default();
    while left > 0 {
        match rustix::pipe::splice(&pipe.read, None, plain, None, left, flags) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(moved) => {
                left = left.saturating_sub(moved);
                stall.took();
            }
            Err(Errno::INTR) => {}
            // The send buffer of the socket stayed full for the socket's timeout.
            Err(Errno::AGAIN) => stall.waited(plain)?,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Puts as much into the empty pipe as fits, beginning `begun` bytes into the first part.
fn fill(pipe: &Ends, slices: &[SharedSlice], begun: usize) -> std::io::Result<usize> {
    let parts: [IoSliceRaw<'_>; PARTS] = std::array::from_fn(|at| {
        let bytes = slices.get(at).map_or(&[][..], SharedSlice::hand_out);
        IoSliceRaw::from_slice(if at == 0 { bytes.get(begun..).unwrap_or_default() } else { bytes })
    });
    let parts = parts.get(..slices.len().min(PARTS)).unwrap_or_default();
    loop {
        // SAFETY: the memory is shared, so nobody writes to it any more. When it is freed, its pages stay
        // with the kernel for as long as the kernel reads them.
        match unsafe { rustix::pipe::vmsplice(&pipe.write, parts, SpliceFlags::NONBLOCK) } {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(filled) => return Ok(filled),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_testkit::send_to_slow_reader;
    use headwater_testkit::slow_reader::PIECE_BYTES;
    use rustix::net::sockopt;

    use super::super::Socket;
    use super::*;

    #[test]
    fn slow_readers_of_shared_pages_are_waited_for() {
        send_to_slow_reader(|socket| {
            let size = sockopt::socket_send_buffer_size(&socket)?;
            sockopt::set_socket_send_buffer_size(&socket, size / 4)?;
            let mut pipe = PagePipe::default();
            let slices = SharedSlice::new(Pages::new(PIECE_BYTES)?.share(), 0, PIECE_BYTES).unwrap();
            assert!(pipe.ends().is_some());
            Socket::new(socket.into()).send_shared(&[], &[slices], &mut pipe)
        });
    }
}
