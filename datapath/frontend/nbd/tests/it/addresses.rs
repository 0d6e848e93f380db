//! Binding to addresses that are taken, stale, wrong or too long.

use std::os::unix::net::UnixListener;

use crate::fixture::Fixture;
use headwater_nbd::{Address, BindError, Client, Limits, Server, SingleExport};
use headwater_testkit::ReferenceDisk;

fn bind(address: Address) -> Result<Server, BindError> {
    let disk = std::sync::Arc::new(ReferenceDisk::new(1 << 20));
    Server::bind(address, SingleExport::new(disk, ""), Limits::default())
}

fn refused(address: Address) -> BindError {
    match bind(address) {
        Ok(server) => panic!("it listens on {}", server.uri()),
        Err(error) => error,
    }
}

#[test]
fn a_path_in_use_is_refused_and_its_server_lives_on() {
    let fixture = Fixture::new(ReferenceDisk::new(1 << 20));
    let error = refused(Address::Unix(fixture.socket()));
    assert!(matches!(error, BindError::PathInUse { .. }), "{error}");
    fixture.is_alive();
}

#[test]
fn a_stale_socket_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stale");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let server = bind(Address::Unix(path.clone())).unwrap();
    Client::open(&server.uri()).unwrap();
    drop(server);
    assert!(!path.exists());
}

#[test]
fn a_file_that_is_no_socket_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("precious");
    std::fs::write(&path, "data").unwrap();
    let error = refused(Address::Unix(path.clone()));
    assert!(matches!(error, BindError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
}

#[test]
fn paths_too_long_or_nowhere_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let error = refused(Address::Unix(directory.path().join("x".repeat(120))));
    assert!(matches!(error, BindError::PathTooLong { .. }), "{error}");
    assert!(error.to_string().contains("107"), "{error}");
    let error = refused(Address::Unix(directory.path().join("missing/sock")));
    assert!(matches!(error, BindError::NoDirectory { .. }), "{error}");
}

#[test]
fn a_port_in_use_is_refused() {
    let first = bind(Address::Tcp { host: "127.0.0.1".into(), port: 0 }).unwrap();
    let port = first.uri().trim_end_matches('/').rsplit_once(':').unwrap().1.parse().unwrap();
    let error = refused(Address::Tcp { host: "127.0.0.1".into(), port });
    assert!(matches!(error, BindError::PortInUse { .. }), "{error}");
    Client::open(&first.uri()).unwrap();
}

#[test]
fn a_socket_of_a_later_server_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let first = bind(Address::Unix(path.clone())).unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = bind(Address::Unix(path.clone())).unwrap();
    drop(first);
    Client::open(&second.uri()).unwrap();
}
