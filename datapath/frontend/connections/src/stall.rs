//! Detects whether a peer accepts nothing, or only too little for the kernel to wake a blocked sender.
//!
//! The kernel wakes a blocked send when a good part of the socket's buffer is free (a third for TCP). A send
//! that starts on a full buffer and is not woken within the socket's limit fails, although the peer may have
//! accepted bytes meanwhile. Comparing the number of unsent bytes before and after tells a slow peer from a
//! dead one.
#![expect(unsafe_code, reason = "the socket library does not know SIOCOUTQ")]

use std::ffi::c_int;
use std::os::fd::AsFd;

use rustix::ioctl::{Getter, Opcode, ioctl};

/// `SIOCOUTQ`: the number of bytes that the peer has not acknowledged (TCP) or not read (unix).
const SIOCOUTQ: Opcode = 0x5411;

/// The number of unsent bytes when a send last timed out.
#[derive(Debug, Default)]
pub struct Stall {
    left: Option<c_int>,
}

impl Stall {
    /// The whole send succeeded: forget earlier time-outs.
    pub fn took(&mut self) {
        self.left = None;
    }

    /// The socket accepted a part, and the limit passed before it accepted the rest.
    pub fn took_some(&mut self, socket: impl AsFd) {
        self.left = left_bytes(socket);
    }

    /// The limit has passed. Fails with `TimedOut` if the peer accepted nothing since the last call, or the
    /// system cannot tell.
    pub fn waited(&mut self, socket: impl AsFd) -> std::io::Result<()> {
        let left = left_bytes(socket);
        let is_progress = match (left, self.left) {
            (Some(left), Some(before)) => left < before,
            (left, None) => left.is_some(),
            (None, Some(_)) => false,
        };
        self.left = left;
        if is_progress { Ok(()) } else { Err(std::io::ErrorKind::TimedOut.into()) }
    }
}

fn left_bytes(socket: impl AsFd) -> Option<c_int> {
    // SAFETY: this request writes one integer, and reads nothing.
    unsafe { ioctl(socket, Getter::<SIOCOUTQ, c_int>::new()) }.ok()
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use headwater_testkit::send_to_slow_reader;
    use headwater_testkit::slow_reader::PIECE_BYTES;
    use rustix::net::sockopt;

    use crate::Socket;

    #[test]
    fn a_slow_reader_is_waited_for() {
        send_to_slow_reader(|socket| {
            let size = sockopt::socket_send_buffer_size(&socket)?;
            sockopt::set_socket_send_buffer_size(&socket, size / 4)?;
            Socket::new(socket.into()).send(&mut [IoSlice::new(&[7; PIECE_BYTES])], None)
        });
    }
}
