//! Checks whether a message has arrived completely. Without the check, the only control thread could block
//! inside the message layer, waiting for a front-end that stopped in the middle of a message.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use vhost::vhost_user::message::MAX_MSG_SIZE;

/// Request, flags and size of the body, each of 32 bits in the byte order of this host.
const HEADER_BYTES: usize = 12;

/// How often to check for the rest of a message. A socket with a part of a message is always readable, so
/// poll(2) cannot wait for more.
const CHECK_EVERY: Duration = Duration::from_millis(10);

/// Whether the message layer can take the next message without waiting: it has arrived, or enough of it to
/// see that it is invalid, or the end of the connection.
pub(crate) fn is_whole(stream: &UnixStream) -> bool {
    let mut header = [0_u8; HEADER_BYTES];
    match rustix::net::recv(stream, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => true,
        Ok((_, HEADER_BYTES)) => {
            let [.., a, b, c, d] = header;
            let body = usize::try_from(u32::from_ne_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            let has = rustix::io::ioctl_fionread(stream).map_or(u64::MAX, |has| has);
            body > MAX_MSG_SIZE
                || u64::try_from(HEADER_BYTES.saturating_add(body)).is_ok_and(|all| all <= has)
        }
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => false,
        // The message layer gets the same error, and reports it.
        Err(_) => true,
    }
}

/// The state of an incomplete message after a wait.
pub(crate) enum Next {
    /// More of it may come: check again.
    CheckAgain,
    /// No more will come.
    End,
}

/// Waits a moment for more of a message, or for one of the descriptors `also`.
pub(crate) fn wait_for_more(stream: &UnixStream, also: [PollFd<'_>; 2]) -> Next {
    let [first, second] = also;
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP), first, second];
    let moment = Timespec::try_from(CHECK_EVERY).ok();
    let _ = rustix::event::poll(&mut fds, moment.as_ref());
    let [stream, ..] = &fds;
    if stream.revents().is_empty() { Next::CheckAgain } else { Next::End }
}
