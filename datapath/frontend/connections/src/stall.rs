//! Whether a peer takes nothing, or only too little for the kernel to wake who sends to it.
//!
//! A send that waits is woken when a good part of the socket's buffer is free, a third over TCP. One that starts on a full buffer and is not
//! woken within the socket's limit fails, however much the peer took meanwhile: a slow one is told from a dead one by what is left.
#![expect(unsafe_code, reason = "the socket library does not know SIOCOUTQ")]

use std::ffi::c_int;
use std::os::fd::AsFd;

use rustix::ioctl::{Getter, Opcode, ioctl};

/// `SIOCOUTQ`: what the peer has not acknowledged (TCP) or not taken (unix), in bytes.
const SIOCOUTQ: Opcode = 0x5411;

/// What was left in a socket when a send last waited in vain.
#[derive(Debug, Default)]
pub struct Stall {
    left: Option<c_int>,
}

impl Stall {
    /// The socket took something: the peer has made progress before.
    pub fn took(&mut self) {
        self.left = None;
    }

    /// The socket took something, and the limit passed before it took the rest.
    pub fn took_some(&mut self, socket: impl AsFd) {
        self.left = left_bytes(socket);
    }

    /// The limit has passed. Fails with `TimedOut` if the peer took nothing since the last time, or nobody can tell.
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
