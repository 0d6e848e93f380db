//! A peer that takes what it is sent, but slowly: who cuts off those that take nothing must not cut it off.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// What is to be sent, in bytes.
pub const PIECE_BYTES: usize = 4096;

/// How often the reader takes as much.
const STEP: Duration = Duration::from_millis(100);

/// Has `send` send [`PIECE_BYTES`] over a socket that is full, to a reader who takes ten such pieces in the time that a call may wait.
/// With a smaller buffer (`SO_SNDBUF`, a quarter) it finds room, and is woken, only when most was taken.
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
