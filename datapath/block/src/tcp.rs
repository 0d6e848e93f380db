//! Socket options of TCP connections that carry disk requests.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::net::sockopt;

/// After this time without data, the peer gets the first keepalive probe.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// The time between two keepalive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// The connection is closed after this many probes without an answer.
const KEEPALIVE_COUNT: u32 = 6;
/// A congestion control that does not pace; every Linux has it.
const UNPACED: &str = "reno";
/// The congestion control that paces: `bbr` and its later versions.
const PACED: &str = "bbr";

/// The system's default congestion control, if that is one that paces.
static USUAL: OnceLock<String> = OnceLock::new();

/// Sets up a listening socket, before its first connection arrives, so that connections within this host are
/// not paced.
///
/// Pacing is meant for lines that are shared with others. With a default that paces (`bbr`), a connection
/// within a host arms a timer for every few packets, which costs more than sending them. A connection that
/// has started with pacing keeps it, even if its congestion control is changed. So all connections start
/// without, and [`tune`] gives those from other hosts the system's default.
pub fn listen(listener: impl AsFd) {
    let listener = listener.as_fd();
    if let Ok(usual) = sockopt::tcp_congestion(listener)
        && usual.starts_with(PACED)
    {
        let _ = USUAL.set(usual);
        // A failure costs processor time, never correctness.
        if let Err(why) = sockopt::set_tcp_congestion(listener, UNPACED) {
            tracing::debug!(%why, "connections within this host are paced");
        }
    }
}

/// Sets up a connected socket: requests and replies are sent without delay, dead peers are detected, and
/// connections to other hosts use the system's congestion control. Does nothing to sockets that are not TCP.
pub fn tune(socket: impl AsFd) {
    // Failures cost latency or the detection of dead peers, never correctness.
    let socket = socket.as_fd();
    if sockopt::set_tcp_nodelay(socket, true).is_err() {
        return;
    }
    let _ = sockopt::set_socket_keepalive(socket, true);
    let _ = sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE);
    let _ = sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL);
    let _ = sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT);
    let local = rustix::net::getsockname(socket).ok().and_then(|address| SocketAddr::try_from(address).ok());
    let peer = rustix::net::getpeername(socket).ok().flatten();
    let peer = peer.and_then(|address| SocketAddr::try_from(address).ok());
    let is_local = local.zip(peer).is_some_and(|(local, peer)| is_here(local, peer));
    if !is_local {
        send_as_usual(socket);
    }
}

fn send_as_usual(socket: BorrowedFd<'_>) {
    // A congestion control that a route sets is kept, as is that of a connection which no listener of this
    // program accepted.
    if let Some(usual) = USUAL.get()
        && sockopt::tcp_congestion(socket).is_ok_and(|now| now == UNPACED)
        && let Err(why) = sockopt::set_tcp_congestion(socket, usual)
    {
        tracing::debug!(%why, "a connection sends by {UNPACED} instead of the system's {usual}");
    }
}

/// Whether both ends are on this host, that is, have the same address.
fn is_here(local: SocketAddr, peer: SocketAddr) -> bool {
    let peer = peer.ip().to_canonical();
    peer.is_loopback() || peer == local.ip().to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn connections_within_the_host_are_not_paced() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let default = sockopt::tcp_congestion(&listener).unwrap();
        // If the congestion control cannot be chosen, nothing can be tested.
        if sockopt::set_tcp_congestion(&listener, PACED).is_err() {
            assert!(!default.starts_with(PACED));
        }
        let usual = sockopt::tcp_congestion(&listener).unwrap();
        listen(&listener);
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        tune(&server);
        tune(&client);
        let sends_by = || sockopt::tcp_congestion(&server).unwrap();
        assert!(!sends_by().starts_with(PACED));
        for socket in [&client, &server] {
            assert!(socket.nodelay().unwrap());
            assert!(sockopt::socket_keepalive(socket).unwrap());
        }
        send_as_usual(server.as_fd());
        assert_eq!(sends_by(), usual, "given back");
    }

    #[test]
    fn only_an_address_of_this_host_is_here() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert!(is_here(at("127.0.0.1:1"), at("127.0.0.2:2")));
        assert!(is_here(at("10.0.0.7:1"), at("10.0.0.7:2")));
        assert!(is_here(at("[::ffff:10.0.0.7]:1"), at("10.0.0.7:2")));
        assert!(is_here(at("[::1]:1"), at("[::1]:2")));
        assert!(!is_here(at("10.0.0.7:1"), at("10.0.0.8:2")));
        assert!(!is_here(at("[fe80::1]:1"), at("[fe80::2]:2")));
    }

    #[test]
    fn other_sockets_are_left_as_they_are() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        tune(&one);
    }
}
