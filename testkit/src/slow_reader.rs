//! A peer that reads slowly. Code that disconnects peers that read nothing must not disconnect it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The number of bytes to send.
pub const PIECE_BYTES: usize = 4096;

/// The interval in which the reader reads that many bytes.
const STEP: Duration = Duration::from_millis(100);

/// Calls `send` to send [`PIECE_BYTES`] over a full socket, to a reader that reads ten such pieces in the time that a
/// call may block. The buffer is not small: with a small one (`SO_SNDBUF`, a quarter) the kernel wakes the sender
/// only after most of it was read.
pub fn send_to_slow_reader(send: impl FnOnce(UnixStream) -> std::io::Result<()> + Send) {
    let (mut ours, mut theirs) = UnixStream::pair().expect("no sockets");
    ours.set_nonblocking(true).expect("no socket that does not wait");
    let mut pieces = 0;
    while ours.write(&[7; PIECE_BYTES]).is_ok() {
        pieces += 1;
    }
    ours.set_nonblocking(false).expect("no socket that waits");
    ours.set_read_timeout(Some(STEP * 10)).expect("no limit");
    ours.set_write_timeout(Some(STEP * 10)).expect("no limit");
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(ours));
        let mut piece = [0; PIECE_BYTES];
        while !sender.is_finished() {
            std::thread::sleep(STEP);
            if pieces > 0 {
                theirs.read_exact(&mut piece).expect("what was sent does not come");
                pieces -= 1;
            }
        }
        sender.join().expect("sending panicked").expect("a slow reader was given up");
    });
    let mut rest = Vec::new();
    theirs.read_to_end(&mut rest).expect("the rest does not come");
    assert_eq!(rest.len(), (pieces + 1) * PIECE_BYTES);
}
