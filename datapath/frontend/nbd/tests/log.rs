//! Masses of clients, and clients that hang up in the middle: the log says who and why, and the number of
//! lines is limited.

#[path = "it/fixture/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod fixture;

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use fixture::{PATIENCE, Raw};
use headwater_nbd::wire::transmission::command;
use headwater_nbd::{Address, Client, Limits, Options, Server, ServerTls, ServerTlsOptions, SingleExport};
use headwater_testkit::pki::{Authority, CertificateOptions};
use headwater_testkit::{Log, ReferenceDisk, wait_until};

/// How many clients of each kind connect.
const TIMES: usize = 100;

/// A server on a TCP port, because a log line names such a client by its address.
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
fn reached_limits_are_logged_with_address_and_reason() {
    let log = Log::of_warnings();

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
    log.take_bounded("NBD", started);

    // Handshakes that are begun and not ended: the oldest one is cut.
    let started = Instant::now();
    let port = Port::with(Limits { half_open: 2, ..Limits::default() });
    let mut held = Vec::new();
    for number in 0..TIMES {
        let mut raw = port.raw();
        let _ = raw.0.write_all(b"\0\0\0\x03IHAVEO");
        held.push(raw);
        if number == 2 {
            let why =
                "2 connections were in their handshake, which is the limit, and this one was the oldest";
            log.wait_for(&format!("{}: the connection was closed: {why}", client(&held[0])));
        }
    }
    drop(held);
    port.wait_for_connections(0);
    log.take_bounded("NBD", started);

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
            let why = "the client hung up in the middle of a request, which was not executed";
            log.wait_for(&format!("{}: the connection was closed: {why}", client(&raw)));
        }
    }
    port.wait_for_connections(0);
    log.take_bounded("NBD", started);

    // Certificates of an authority that the server does not trust.
    let started = Instant::now();
    let directory = tempfile::tempdir().unwrap();
    let [ours, theirs] = ["ours", "theirs"].map(|name| {
        let roles = [
            ("server", "localhost", CertificateOptions::default()),
            ("client", "desk-7", CertificateOptions::default()),
        ];
        Authority::new(name).write_certificates(&directory.path().join(name), &roles)
    });
    // The client trusts this server, so that only the server refuses.
    std::fs::copy(ours.join("ca-cert.pem"), theirs.join("ca-cert.pem")).unwrap();
    let tls = ServerTls::load(&ours, ServerTlsOptions { is_required: true, verifies_clients: true }).unwrap();
    let export = SingleExport::new(Arc::new(ReferenceDisk::new(1 << 20)), "a secret disk");
    let address = Address::Tcp { host: "localhost".into(), port: 0 };
    let options = Options { limits: Limits::default(), tls: Some(tls) };
    let server = Server::bind(address, export, options).unwrap();
    let uri = server.uri().replacen("nbd:", "nbds:", 1);
    let uri = |files: &Path| format!("{uri}?tls-certificates={}", files.display());
    for number in 0..TIMES {
        assert!(Client::open(&uri(&theirs)).is_err());
        if number == 0 {
            log.wait_for("TLS did not start: ");
            let lines = log.lines_with(&["NBD: client ", "TLS did not start: "]);
            assert!(lines[0].contains("UnknownIssuer"), "{lines:?}");
        }
    }
    wait_until("they are gone", || server.connections() == 0);
    Client::open(&uri(&ours)).unwrap();
    log.take_bounded("NBD", started);
}
