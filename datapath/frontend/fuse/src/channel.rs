//! Receives requests from the kernel and sends answers, over one descriptor of `/dev/fuse`.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::wire::{ANSWER_HEADER_BYTES, answer_header};

/// The result of reading a request.
pub(crate) enum Taken {
    /// A request of this many bytes.
    Request(usize),
    /// Nothing; try again.
    Nothing,
    /// The file system is unmounted, or the connection was cut.
    Unmounted,
}

/// One descriptor. An answer must go to the channel that its request came from.
pub(crate) struct Channel {
    device: OwnedFd,
}

impl Channel {
    pub(crate) fn new(device: OwnedFd) -> Self {
        Self { device }
    }

    /// Waits for a request.
    pub(crate) fn take(&self, buffer: &mut [u8]) -> rustix::io::Result<Taken> {
        match rustix::io::read(&self.device, buffer) {
            Ok(0) | Err(Errno::NODEV) => Ok(Taken::Unmounted),
            Ok(len) => Ok(Taken::Request(len)),
            // ENOENT: the request was cancelled while it was read.
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => Ok(Taken::Nothing),
            Err(errno) => Err(errno),
        }
    }

    /// Answers with an error.
    pub(crate) fn fail(&self, unique: u64, errno: Errno) {
        self.send(&answer_header(unique, 0, Some(errno)));
    }

    /// Answers with `body`.
    pub(crate) fn answer(&self, unique: u64, body: &[u8]) {
        let header = answer_header(unique, body.len(), None);
        self.ignore_gone(rustix::io::writev(&self.device, &[IoSlice::new(&header), IoSlice::new(body)]));
    }

    /// Sends a complete answer, header and body in one piece.
    pub(crate) fn send(&self, answer: &[u8]) {
        debug_assert!(answer.len() >= ANSWER_HEADER_BYTES);
        self.ignore_gone(rustix::io::write(&self.device, answer));
    }

    /// Ignores errors that mean that the program was killed or the file system unmounted; logs others.
    fn ignore_gone(&self, written: rustix::io::Result<usize>) {
        if let Err(errno) = written
            && !matches!(errno, Errno::NOENT | Errno::NODEV | Errno::CONNABORTED | Errno::PERM)
        {
            tracing::warn!("fuse: the kernel did not take an answer: {errno}");
        }
    }
}
