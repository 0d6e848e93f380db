//! The log says which machine broke which rule, and a machine that always does so causes a limited number of
//! lines.

#[path = "it/guest/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod guest;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use guest::{FREE, Guest, NEXT};
use headwater_testkit::{Log, ReferenceDisk};
use headwater_vhost_user::{Limits, Options, Server};

/// Waits for the server to end a connection. If bytes were sent and not read, this is a reset.
fn ends(mut connection: UnixStream) {
    connection.set_read_timeout(Some(guest::PATIENCE)).unwrap();
    match connection.read(&mut [0; 1]) {
        Ok(count) => assert_eq!(count, 0),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
}

/// How many windows of ten seconds may have begun since then: on a busy host the test takes several.
fn windows(since: Instant) -> usize {
    1 + since.elapsed().as_secs() as usize / 10
}

#[test]
fn faults_are_logged_with_name_and_reason() {
    let log = Log::of_warnings();
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { warnings_per_10_s: 5, ..Limits::default() };
    let options = Options { name: "lab-7".into(), limits, ..Options::default() };
    let server = Server::bind(&dir.path().join("s"), Arc::new(ReferenceDisk::new(1 << 20)), options).unwrap();
    let mut guest = Guest::start(server.path());
    guest.descriptor(0, (FREE, 16, NEXT, 0));
    guest.offer(0);
    guest.kick();
    guest.wait_broken();
    guest.stop_queue();
    guest.start_queue(0);
    let started = Instant::now();
    for _ in 0..500 {
        assert_eq!(guest.request(0, 1 << 40, &[], 512).0, 1);
    }
    let text = log.text();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("lab-7 queue 0") && lines[0].contains("loop"), "{}", lines[0]);
    assert!(lines[1].contains("lab-7 queue 0") && lines[1].contains("ends past the device"), "{}", lines[1]);
    // One more line in each window counts the omitted ones.
    assert!(lines.len() <= 1 + 6 * windows(started), "{} lines", lines.len());

    // Memory that cannot be sealed is used. It is logged once, however often the front-end connects.
    let file = tempfile::tempfile().unwrap();
    file.set_len(guest::MEMORY_BYTES).unwrap();
    let options = Options { name: "lab-8".into(), ..Options::default() };
    let server = Server::bind(&dir.path().join("t"), Arc::new(ReferenceDisk::new(1 << 20)), options).unwrap();
    for _ in 0..3 {
        let mut guest = Guest::connect_with(server.path(), 0, file.try_clone().unwrap());
        guest.start_queue(0);
        assert_eq!(guest.request(0, 0, &[], 512).0, 0);
    }
    let lines = log.lines_with(&["lab-8"]);
    assert!(lines.len() == 1 && lines[0].contains("whoever can truncate it"), "{lines:?}");

    // A front-end that finds the disk in use is logged, and the number of lines is limited.
    let limits = Limits { warnings_per_10_s: 5, message_timeout_ms: 100, ..Limits::default() };
    let options = Options { name: "lab-9".into(), limits: limits.clone(), ..Options::default() };
    let server = Server::bind(&dir.path().join("u"), Arc::new(ReferenceDisk::new(1 << 20)), options).unwrap();
    let started = Instant::now();
    let guest = Guest::start(server.path());
    for _ in 0..200 {
        ends(UnixStream::connect(server.path()).unwrap());
    }
    let most = 5 * windows(started);
    let lines = log.lines_with(&["lab-9"]);
    let process = std::process::id();
    assert!(
        lines[0].contains(&format!("process {process} was disconnected: another front-end uses")),
        "{lines:?}"
    );
    assert!(lines.len() <= most, "{} lines", lines.len());
    drop(guest);

    // So is a front-end that stops in the middle of a message.
    let options = Options { name: "lab-10".into(), limits, ..Options::default() };
    let server = Server::bind(&dir.path().join("v"), Arc::new(ReferenceDisk::new(1 << 20)), options).unwrap();
    let mut slow = UnixStream::connect(server.path()).unwrap();
    slow.write_all(&[1, 0, 0]).unwrap();
    ends(slow);
    let lines = log.lines_with(&["lab-10"]);
    let why = format!(
        "front-end process {process} is disconnected: it began a message and did not finish it within 100 ms"
    );
    assert!(lines.len() == 1 && lines[0].contains(&why), "{lines:?}");
}
