//! Initiators that come in masses, or go, or take nothing: the log says who and why, and is not filled.

mod fixture;

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use fixture::raw::{read10, write10};
use fixture::{Fixture, INITIATOR, Raw};
use headwater_iscsi::Limits;
use headwater_iscsi::wire::request::ScsiCommand;
use headwater_testkit::{Log, ReferenceDisk};

const MIB: u64 = 1 << 20;

/// How often each of them comes.
const TIMES: usize = 100;

fn address(stream: &TcpStream) -> String {
    stream.local_addr().unwrap().to_string()
}

/// Half of a write: its command and no data.
fn begin_to_write(raw: &mut Raw) {
    let command = raw.scsi(&write10(0, 1));
    let command = ScsiCommand { write: true, expected_bytes: 512, ..command };
    let bytes = raw.encode(&command.encode(), &[1; 512]);
    raw.send(&bytes[..100]);
}

#[test]
fn limits_that_are_met_are_told_with_address_and_reason_and_only_so_often() {
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

    // Logins that are begun and not ended: the oldest one gives way.
    let started = Instant::now();
    let fixture = with(Limits { half_open_logins: 2, ..Limits::default() });
    let mut held = Vec::new();
    for number in 0..TIMES {
        let mut stream = TcpStream::connect(("127.0.0.1", fixture.server.port())).unwrap();
        let _ = stream.write_all(&[0x43, 0x87]);
        held.push(stream);
        if number == 2 {
            log.wait_for(&format!(
                "iSCSI: initiator at {}: the connection was closed: more than 2 others wanted to log in, and it had not",
                address(&held[0])
            ));
        }
    }
    drop(held);
    fixture.wait_for_connections(0);
    log.take_bounded("iSCSI", started);

    // Replies that nobody takes.
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
    let told = log.text();
    let is_told = |raw: &Raw| {
        let who = format!("iSCSI: {INITIATOR} at {}", address(&raw.stream));
        told.contains(&format!("{who}: the connection was closed: it took no reply for 200 ms"))
    };
    assert!(stalled.iter().any(is_told), "{told}");
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
            let why = "it hung up in the middle of a command, which was not carried out";
            log.wait_for(&format!("iSCSI: {INITIATOR} at {who}: the connection was closed: {why}"));
        }
    }
    fixture.wait_for_connections(0);
    log.take_bounded("iSCSI", started);
}
