//! Clients that come in masses, or go in the middle: the log says who and why, and is not filled.

mod fixture;

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use fixture::{PATIENCE, Raw};
use headwater_nbd::wire::transmission::command;
use headwater_nbd::{Address, Limits, Server, SingleExport};
use headwater_testkit::{ReferenceDisk, wait_until};

/// How often each of them comes.
const TIMES: usize = 100;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Waits for a warning with these words.
    fn wait_for(&self, words: &str) {
        wait_until(words, || String::from_utf8_lossy(&self.0.lock().unwrap()).contains(words));
    }

    /// Ends a case that began then: nobody has more than its share of the warnings, which is a quarter of 20 in ten seconds, and one line
    /// says how many were kept back. A busy host may take longer than ten seconds.
    fn is_bounded(&self, since: Instant) {
        let text = String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap();
        let lines = text.lines().filter(|line| line.contains("NBD")).count();
        let windows = 1 + since.elapsed().as_secs() as usize / 10;
        assert!((1..=6 * windows).contains(&lines), "{lines} lines: {text}");
    }
}

/// A server on a port, where a log line names a client by its address.
struct Port(Server);

impl Port {
    fn with(limits: Limits) -> Self {
        let address = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
        let export = SingleExport::new(Arc::new(ReferenceDisk::new(1 << 20)), "a test disk");
        Self(Server::bind(address, export, limits).unwrap())
    }

    fn raw(&self) -> Raw<TcpStream> {
        let uri = self.0.uri();
        let stream = TcpStream::connect(uri.trim_start_matches("nbd://").trim_end_matches('/')).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Raw(stream)
    }

    fn started(&self) -> Raw<TcpStream> {
        let mut raw = self.raw();
        raw.shake_hands(true);
        raw
    }

    fn wait_for_connections(&self, count: usize) {
        wait_until(format!("{count} connections"), || self.0.connections() == count);
    }
}

fn client(raw: &Raw<TcpStream>) -> String {
    format!("NBD: client {}", raw.0.local_addr().unwrap())
}

#[test]
fn limits_that_are_met_are_told_with_address_and_reason_and_only_so_often() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .init();

    // More connections than allowed.
    let started = Instant::now();
    let port = Port::with(Limits { connections: 3, ..Limits::default() });
    let three: Vec<_> = (0..3).map(|_| port.started()).collect();
    for number in 0..TIMES {
        let mut raw = port.raw();
        let who = client(&raw);
        raw.ends();
        if number == 0 {
            log.wait_for(&format!("{who}: refused: 3 clients are connected, which is the limit"));
        }
    }
    drop(three);
    port.wait_for_connections(0);
    log.is_bounded(started);

    // Handshakes that are begun and not ended: the oldest one gives way.
    let started = Instant::now();
    let port = Port::with(Limits { half_open: 2, ..Limits::default() });
    let mut held = Vec::new();
    for number in 0..TIMES {
        let mut raw = port.raw();
        let _ = raw.0.write_all(b"\0\0\0\x03IHAVEO");
        held.push(raw);
        if number == 2 {
            let why = "2 others were in their handshake, and its was the oldest";
            log.wait_for(&format!("{}: the connection was closed: {why}", client(&held[0])));
        }
    }
    drop(held);
    port.wait_for_connections(0);
    log.is_bounded(started);

    // Hanging up in the middle of a write.
    let started = Instant::now();
    let port = Port::with(Limits::default());
    for number in 0..TIMES {
        let mut raw = port.started();
        raw.request(command::WRITE, 0, 1, 0, 4096);
        raw.send(&[7; 4095]);
        raw.0.shutdown(Shutdown::Write).unwrap();
        raw.ends();
        if number == 0 {
            let why = "it hung up in the middle of a request, which was not carried out";
            log.wait_for(&format!("{}: the connection was closed: {why}", client(&raw)));
        }
    }
    port.wait_for_connections(0);
    log.is_bounded(started);
}
