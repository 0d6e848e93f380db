//! Masses of initiators, and initiators that disconnect, receive nothing or do not have the secret: the log
//! says who and why, and the number of lines is limited.

#[path = "it/fixture/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod fixture;

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use fixture::raw::{read10, write10};
use fixture::{Fixture, INITIATOR, Raw, accounts};
use headwater_iscsi::Limits;
use headwater_iscsi::login::status;
use headwater_iscsi::wire::request::ScsiCommand;
use headwater_testkit::{Log, ReferenceDisk, wait_until};

const MIB: u64 = 1 << 20;

/// How many initiators of each kind connect.
const TIMES: usize = 100;

fn address(stream: &TcpStream) -> String {
    stream.local_addr().unwrap().to_string()
}

/// Half of a write: its command without its data.
fn begin_to_write(raw: &mut Raw) {
    let command = raw.scsi(&write10(0, 1));
    let command = ScsiCommand { write: true, expected_bytes: 512, ..command };
    let bytes = raw.encode(&command.encode(), &[1; 512]);
    raw.send(&bytes[..100]);
}

#[test]
fn reached_limits_are_logged_with_address_and_reason() {
    let log = Log::of_warnings();
    let with = |limits| Fixture::with(ReferenceDisk::new(16 * MIB), limits, None);

    // More connections than allowed.
    let started = Instant::now();
    let fixture = with(Limits { connections: 3, ..Limits::default() });
    let sessions: Vec<Raw> = (0..3).map(|_| fixture.session(&[])).collect();
    for number in 0..TIMES {
        let mut raw = fixture.raw();
        let who = address(&raw.stream);
        raw.ends();
        if number == 0 {
            log.wait_for(&format!(
                "iSCSI: initiator at {who}: refused: 3 initiators are connected, which is the limit"
            ));
        }
    }
    drop(sessions);
    fixture.wait_for_connections(0);
    log.take_bounded("iSCSI", started);

    // Logins that are begun and not ended: the oldest one is cut.
    let started = Instant::now();
    let fixture = with(Limits { half_open_logins: 2, ..Limits::default() });
    let mut held = Vec::new();
    for number in 0..TIMES {
        let mut stream = TcpStream::connect(("127.0.0.1", fixture.server.port())).unwrap();
        let _ = stream.write_all(&[0x43, 0x87]);
        held.push(stream);
        if number == 2 {
            log.wait_for(&format!(
                "iSCSI: initiator at {}: the connection was closed: 2 connections had not logged in, which is the limit, and this one was the oldest",
                address(&held[0])
            ));
        }
    }
    drop(held);
    fixture.wait_for_connections(0);
    log.take_bounded("iSCSI", started);

    // Replies that nobody receives.
    let started = Instant::now();
    let fixture = with(Limits { send_stall_ms: 200, ..Limits::default() });
    let stalled: Vec<Raw> = (0..8)
        .map(|_| {
            let mut raw = fixture.session(&[("MaxRecvDataSegmentLength", "262144")]);
            raw.command(&read10(0, 32768), 16 << 20, None);
            raw
        })
        .collect();
    fixture.wait_for_connections(0);
    let text = log.text();
    let is_logged = |raw: &Raw| {
        let who = format!("iSCSI: {INITIATOR} at {}", address(&raw.stream));
        text.contains(&format!(
            "{who}: the connection was closed: the initiator accepted no bytes of replies for 200 ms"
        ))
    };
    assert!(stalled.iter().any(is_logged), "{text}");
    log.take_bounded("iSCSI", started);

    // Hanging up in the middle of a command.
    let started = Instant::now();
    let fixture = with(Limits::default());
    for number in 0..TIMES {
        let mut raw = fixture.session(&[]);
        begin_to_write(&mut raw);
        raw.stream.shutdown(Shutdown::Write).unwrap();
        raw.ends();
        if number == 0 {
            let who = address(&raw.stream);
            let why = "the initiator hung up in the middle of a command, which was not executed";
            log.wait_for(&format!("iSCSI: {INITIATOR} at {who}: the connection was closed: {why}"));
        }
    }
    fixture.wait_for_connections(0);
    log.take_bounded("iSCSI", started);

    wrong_secrets_are_logged_or_counted(&log);
}

/// Secrets are guessed, one after the other: guesses that are not logged are counted, and an initiator with
/// the right secret can log in meanwhile.
fn wrong_secrets_are_logged_or_counted(log: &Log) {
    let started = Instant::now();
    let fixture = Fixture::with(ReferenceDisk::new(MIB), Limits::default(), Some(accounts()));
    let guess = || {
        let mut raw = fixture.raw();
        assert_eq!(raw.prove("alice", "not-her-secret").status, status::AUTHENTICATION_FAILURE);
        raw.ends();
        let who = address(&raw.stream);
        drop(raw);
        // After its end, the guess was logged or counted.
        fixture.wait_for_connections(0);
        who
    };
    for number in 0..TIMES {
        let who = guess();
        if number == 0 {
            let why = "the CHAP response of 'alice' is wrong: the secrets differ";
            log.wait_for(&format!(
                "iSCSI: initiator at {who}: the connection was closed: the login was refused: initiator {INITIATOR}: {why}"
            ));
        }
    }
    let mut alice = fixture.raw();
    assert_eq!(alice.log_in_as("alice", "alice-secret-1"), status::SUCCESS);
    alice.clear_attention();
    assert_eq!(alice.read(0, 1), [0; 512]);
    alice.log_out();
    fixture.wait_for_connections(0);
    // The first line after ten seconds counts the omitted ones. On a busy host some of them were logged
    // before.
    let kept_back = || log.lines_with(&["iSCSI: further warnings were kept back"]);
    let (mut tried, before) = (TIMES, kept_back().len());
    wait_until("a line counts the omitted ones", || {
        guess();
        tried += 1;
        kept_back().len() > before
    });
    let counted: usize = kept_back().iter().map(|line| kept_back_in(line)).sum();
    let logged = log.lines_with(&["the secrets differ"]).len();
    let text = log.text();
    assert_eq!(logged + counted, tried, "{logged} logged and {counted} counted: {text}");
    assert!(!text.contains("not-her-secret") && !text.contains("alice-secret-1"), "{text}");
    log.take_bounded("iSCSI", started);
}

/// The number of omitted lines in such a line.
fn kept_back_in(line: &str) -> usize {
    let (_, count) = line.split_once("kept_back=").unwrap();
    count.trim().parse().unwrap()
}
