//! Whether a peer takes nothing, or only too little for the kernel to wake who sends to it.
//!
//! A send that waits is woken when a good part of the socket's buffer is free, a third over TCP. One that starts on a full buffer and is not
//! woken within the socket's limit fails, however much the peer took meanwhile: a slow one is told from a dead one by what is left.
#![expect(unsafe_code, reason = "the socket library does not know SIOCOUTQ")]

use std::ffi::c_int;
use std::os::fd::OwnedFd;

use rustix::ioctl::{Getter, Opcode, ioctl};

/// `SIOCOUTQ`: what the peer has not acknowledged (TCP) or not taken (unix), in bytes.
const SIOCOUTQ: Opcode = 0x5411;

/// What was left in a socket when a send last waited in vain.
#[derive(Debug, Default)]
pub(super) struct Stall {
    left: Option<c_int>,
}

impl Stall {
    /// The socket took something: the peer has made progress before.
    pub(super) fn took(&mut self) {
        self.left = None;
    }

    /// The socket took something, and the limit passed before it took the rest.
    pub(super) fn took_some(&mut self, socket: &OwnedFd) {
        self.left = left_bytes(socket);
    }

    /// The limit has passed. Fails with `TimedOut` if the peer took nothing since the last time, or nobody can tell.
    pub(super) fn waited(&mut self, socket: &OwnedFd) -> std::io::Result<()> {
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

fn left_bytes(socket: &OwnedFd) -> Option<c_int> {
    // SAFETY: this request writes one integer, and reads nothing.
    unsafe { ioctl(socket, Getter::<SIOCOUTQ, c_int>::new()) }.ok()
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use headwater_block::{Lent, Pages};
    use rustix::net::sockopt;

    use super::super::{PagePipe, Socket};

    const PIECE: usize = 4096;
    const STEP: Duration = Duration::from_millis(100);

    /// Sends to a reader who takes a piece now and then, over a socket that has far more than its limit in it.
    fn send_to_slow_reader(send: impl Fn(&Socket) -> std::io::Result<()> + Sync) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = Socket::new(ours.into());
        let mut pieces = 0;
        while rustix::net::send(&socket, &[7; PIECE], rustix::net::SendFlags::DONTWAIT).is_ok() {
            pieces += 1;
        }
        // Room is there, and who waits is woken, only when much was taken.
        let size = sockopt::socket_send_buffer_size(&socket).unwrap();
        sockopt::set_socket_send_buffer_size(&socket, size / 4).unwrap();
        // Ten steps of the reader.
        socket.limit_stall(STEP * 10).unwrap();
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| send(&socket));
            let mut piece = [0; PIECE];
            while !sender.is_finished() {
                std::thread::sleep(STEP);
                if pieces > 0 {
                    theirs.read_exact(&mut piece).unwrap();
                    pieces -= 1;
                }
            }
            sender.join().unwrap().unwrap();
        });
        drop(socket);
        let mut rest = Vec::new();
        theirs.read_to_end(&mut rest).unwrap();
        assert_eq!(rest.len(), (pieces + 1) * PIECE);
    }

    #[test]
    fn a_slow_reader_is_waited_for() {
        send_to_slow_reader(|socket| socket.send_all(&mut [IoSlice::new(&[7; PIECE])]));
    }

    #[test]
    fn a_slow_reader_of_what_is_lent_is_waited_for() {
        send_to_slow_reader(|socket| {
            let mut pipe = PagePipe::default();
            let lent = Lent::new(Pages::new(PIECE)?.share(), 0, PIECE).unwrap();
            assert!(pipe.ends().is_some());
            socket.send_lent(&[], &[lent], &mut pipe)
        });
    }
}
