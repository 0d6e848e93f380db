//! A server from its first connection to its end, over real sockets.

use std::io::{IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::FaultLog;
use headwater_connections::{Acceptor, FrontEnd, Limits, Listener, Peer, Permit, Socket};
use headwater_testkit::wait_until;

const LIMITS: Limits = Limits { connections: 3, half_open: 2 };

/// Opens a connection at its first byte, and sends every byte back. After `!` it sends zeroes without end.
struct Echo(FaultLog);

impl FrontEnd for Echo {
    const PROTOCOL: &'static str = "echo";
    const CLIENTS: &'static str = "callers";
    const THREADS: &'static str = "echo";

    type Socket = Socket;

    fn socket(fd: OwnedFd) -> Socket {
        Socket::new(fd)
    }

    fn client(peer: &Peer) -> String {
        format!("caller {peer}")
    }

    fn faults(&self) -> &FaultLog {
        &self.0
    }

    fn serve(&self, permit: &Permit<Socket>, socket: &Arc<Socket>, _peer: &Peer) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut byte = [0];
        while let Ok(true) = socket.receive_exact(&mut byte, deadline) {
            // A second call has no effect.
            let _ = permit.open(None);
            assert_ne!(byte, *b"?", "a panic leaves its seat too");
            if byte == *b"!" {
                while socket.send(&mut [IoSlice::new(&[0; 4096])], None).is_ok() {}
                return;
            }
            if socket.send(&mut [IoSlice::new(&byte)], None).is_err() {
                return;
            }
        }
    }
}

fn start(listener: Listener, stop_timeout: Duration) -> Acceptor<Echo> {
    let echo = Arc::new(Echo(FaultLog::shared("echo", 20)));
    Acceptor::start(listener, echo, LIMITS, stop_timeout).unwrap()
}

fn call(mut client: impl Read + Write) {
    client.write_all(b"a").unwrap();
    let mut back = [0];
    client.read_exact(&mut back).unwrap();
    assert_eq!(back, *b"a");
}

#[test]
fn the_connection_limit_holds_and_silent_ones_give_way() {
    let (listener, port) = Listener::tcp("127.0.0.1", 0).unwrap();
    let server = start(listener, Duration::from_secs(10));
    let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let is_closed = |mut client: &TcpStream| client.read(&mut [0]).map_or(true, |count| count == 0);
    let first = connect();
    call(&first);
    let silent = [connect(), connect()];
    wait_until("all are registered", || server.connections() == 3);
    // The oldest connection that sent nothing is cut, and its place is free once it has ended.
    let refused = connect();
    assert!(is_closed(&silent[0]) && is_closed(&refused));
    wait_until("it has left", || server.connections() == 2);
    let fourth = connect();
    call(&fourth);
    call(&first);
    call(&silent[1]);
    let fifth = connect();
    assert!(is_closed(&fifth));
}

#[test]
fn arrived_requests_are_answered_before_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let server = start(Listener::unix(&path).unwrap(), Duration::from_secs(60));
    let client = UnixStream::connect(&path).unwrap();
    call(&client);
    server.stop();
    assert_eq!((server.connections(), path.exists()), (0, false));
    assert_eq!((&client).read(&mut [0]).unwrap(), 0);
    assert!(UnixStream::connect(&path).is_err());
    server.stop();
}

#[test]
fn clients_without_reads_are_cut_at_the_stop() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let server = start(Listener::unix(&path).unwrap(), Duration::from_millis(50));
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"!").unwrap();
    client.read_exact(&mut [0; 4096]).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    drop(server);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest.iter().all(|byte| *byte == 0));
}

#[test]
fn a_panic_ends_its_connection_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let server = start(Listener::unix(&path).unwrap(), Duration::from_secs(10));
    let other = UnixStream::connect(&path).unwrap();
    call(&other);
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"?").unwrap();
    wait_until("it has left", || server.connections() == 1);
    call(&other);
}
