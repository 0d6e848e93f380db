//! Initiators that send garbage or false lengths, disconnect or never read: each loses only its own
//! connection, and the server continues.

#[path = "it/fixture/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod fixture;

use std::io::{Read, Write};
use std::time::Duration;

use fixture::raw::{names, read10, write10};
use fixture::{Fixture, Raw, accounts};
use headwater_iscsi::Limits;
use headwater_iscsi::wire::Opcode;
use headwater_iscsi::wire::header::set_segment_bytes;
use headwater_iscsi::wire::request::{LoginRequest, ScsiCommand};
use headwater_iscsi::wire::text::put_pair;
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, alone, resident_bytes, wait_until};

const MIB: u64 = 1 << 20;

fn fixture() -> Fixture {
    Fixture::new(ReferenceDisk::new(4 * MIB))
}

#[test]
fn garbage_ends_the_connection() {
    let fixture = fixture();
    let mut rng = Rng::new(5);
    for round in 0..60 {
        let mut raw = if round % 3 == 0 { fixture.session(&[]) } else { fixture.raw() };
        let len = rng.between(1, 20_000) as usize;
        let mut bytes = rng.bytes(len);
        if round % 3 == 1 {
            // A login request apart from the following bytes.
            bytes[0] = 0x43;
        }
        // The server may close before everything is sent.
        let _ = raw.stream.write_all(&bytes);
        let _ = raw.stream.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let _ = raw.stream.read_to_end(&mut rest);
        assert!(rest.len() < 64 << 10, "{} bytes", rest.len());
    }
    fixture.wait_for_connections(0);
    fixture.is_alive();
}

/// Whole PDUs of random headers: nothing may panic, hang or disturb, and a new initiator is served after each.
#[test]
fn random_pdus_do_no_harm() {
    let fixture = fixture();
    let mut rng = Rng::new(6);
    for _ in 0..20 {
        let mut raw = fixture.session(&[("InitialR2T", "No")]);
        let mut all = Vec::new();
        for _ in 0..200 {
            let mut header: [u8; 48] = rng.bytes(48).try_into().unwrap();
            // Mostly opcodes of initiators, and the expected command numbers.
            header[0] = rng.below(8) as u8 | if rng.chance(1, 2) { 0x40 } else { 0 };
            header[4] = if rng.chance(1, 8) { rng.below(4) as u8 } else { 0 };
            header[16..19].fill(0);
            if rng.chance(3, 4) {
                header[8..16].fill(0);
                header[24..28].copy_from_slice(&raw.cmd_sn.to_be_bytes());
                raw.cmd_sn = raw.cmd_sn.wrapping_add(1);
            }
            let len = rng.below(600) as usize;
            set_segment_bytes(&mut header, len);
            all.extend_from_slice(&header);
            all.extend_from_slice(&rng.bytes(usize::from(header[4]) * 4));
            all.extend_from_slice(&rng.bytes(len.next_multiple_of(4)));
        }
        let reader = raw.stream.try_clone().unwrap();
        let drain = std::thread::spawn(move || {
            let mut reader = reader;
            let mut rest = Vec::new();
            let _ = reader.read_to_end(&mut rest);
        });
        let _ = raw.stream.write_all(&all);
        let _ = raw.stream.shutdown(std::net::Shutdown::Write);
        drain.join().unwrap();
    }
    fixture.wait_for_connections(0);
    fixture.is_alive();
}

#[test]
fn a_segment_that_is_too_long_ends_the_connection_without_being_taken() {
    let fixture = fixture();
    let mut raw = fixture.raw();
    let mut header = raw.login_request().encode();
    set_segment_bytes(&mut header, 8193);
    raw.send(&header);
    raw.ends();
    let mut raw = fixture.session(&[]);
    let mut header = raw.scsi(&write10(0, 1)).encode();
    set_segment_bytes(&mut header, 0x00ff_ffff);
    raw.send(&header);
    assert_eq!(raw.take().reject().reason, 4);
    raw.ends();
    fixture.is_alive();
}

/// Sends 15 KiB of keys of a login text, nearly as much as a target accepts, and does not end the text.
fn begin_text(raw: &mut Raw) {
    let mut text = Vec::new();
    (0..15).for_each(|number| put_pair(&mut text, &format!("X-{number}"), &"v".repeat(1015)));
    let request = LoginRequest { transit: false, go_on: true, next_stage: 0, ..raw.security_request() };
    // The longest PDU that a login may have, and a shorter one.
    for piece in text.chunks(8192) {
        raw.pdu(&request.encode(), piece);
        let (answer, pairs) = raw.login_answer();
        assert_eq!((answer.status, answer.transit, pairs), (0, false, Vec::new()), "it may go on");
    }
}

#[test]
fn a_thousand_half_open_logins_keep_nobody_out() {
    let _alone = alone();
    let limits = Limits {
        half_open_logins: 50,
        login_timeout_ms: 8_000,
        // An initiator that only waits gets no pings.
        keepalive_ms: 600_000,
        ..Limits::default()
    };
    let fixture = Fixture::with(ReferenceDisk::new(MIB), limits, Some(accounts()));
    let log_in = || {
        let mut raw = fixture.raw();
        assert_eq!(raw.log_in_as("alice", "alice-secret-1"), 0);
        raw.clear_attention();
        raw
    };
    let is_served = |raw: &mut Raw| assert_eq!(raw.read(0, 1), [0; 512]);
    let is_alive = || {
        let mut raw = log_in();
        is_served(&mut raw);
        raw.log_out();
    };
    let mut working = log_in();
    let mut held = Vec::new();
    let (before, mut most) = (resident_bytes(), 0);
    for round in 0..1000 {
        let mut raw = fixture.raw();
        // Every third connection stops before it answers a challenge.
        if round % 3 == 0 {
            raw.ask_for_challenge();
        }
        // Every fourth connection is in the middle of a text. Of the others some send nothing more, and some
        // send half of a PDU.
        if round % 4 == 0 {
            begin_text(&mut raw);
        } else if round % 2 == 0 {
            let _ = raw.stream.write_all(&[0x43, 0x87]);
        }
        held.push(raw);
        if round % 250 == 0 {
            is_alive();
            is_served(&mut working);
        }
        most = most.max(resident_bytes());
    }
    is_alive();
    // The connections that were closed for others have freed their memory. Each remaining one has its thread,
    // and at most a text.
    let taken = most.max(resident_bytes()).saturating_sub(before);
    assert!(taken < 32 << 20, "{taken} bytes");
    wait_until("most to be closed", || fixture.server.connections() <= 51);
    // The others are closed when the login's time-out expires, even if they do not hang up. The one that has
    // logged in stays.
    fixture.wait_for_connections(1);
    is_served(&mut working);
    drop(held);
}

#[test]
fn more_connections_than_allowed_are_closed_at_once() {
    let limits = Limits { connections: 3, ..Limits::default() };
    let fixture = Fixture::with(ReferenceDisk::new(MIB), limits, None);
    let mut sessions: Vec<Raw> = (0..3).map(|_| fixture.session(&[])).collect();
    fixture.raw().ends();
    sessions.pop().unwrap().log_out();
    fixture.wait_for_connections(2);
    fixture.is_alive();
    for session in &mut sessions {
        session.read(0, 1);
    }
}

#[test]
fn one_chap_name_cannot_occupy_all_connections() {
    let limits = Limits { connections: 16, ..Limits::default() };
    let fixture = Fixture::with(ReferenceDisk::new(MIB), limits, Some(accounts()));
    let log_in = |account: &str, secret: &str| {
        let mut raw = fixture.raw();
        let status = raw.log_in_as(account, secret);
        if status == 0 {
            raw.clear_attention();
        }
        (raw, status)
    };
    let alice = || log_in("alice", "alice-secret-1");
    let mut greedy: Vec<(Raw, u16)> = (0..16).map(|_| alice()).collect();
    assert!(greedy.iter().all(|(_, status)| *status == 0));
    assert_eq!(alice().1, headwater_iscsi::login::status::OUT_OF_RESOURCES);
    let (mut other, status) = log_in("bob", "bob-secret-two");
    assert_eq!(status, 0);
    other.read(0, 1);
    let (mut newest, _) = greedy.pop().unwrap();
    newest.ends();
    for (raw, _) in &mut greedy {
        raw.read(0, 1);
    }
}

#[test]
fn a_login_that_never_ends_is_ended() {
    let limits = Limits { login_pdus: 10, ..Limits::default() };
    let fixture = Fixture::with(ReferenceDisk::new(MIB), limits, None);
    let mut raw = fixture.raw();
    let names = names();
    let names: Vec<(&str, &str)> = names.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    let request = LoginRequest { transit: false, next_stage: 0, ..raw.login_request() };
    raw.login(&request, &names);
    for _ in 0..9 {
        raw.login(&request, &[]);
    }
    raw.ends();
}

#[test]
fn guessing_a_secret_leads_nowhere() {
    let fixture = Fixture::with(ReferenceDisk::new(MIB), Limits::default(), Some(accounts()));
    for response in ["0x00", "0x", "nonsense", &format!("0x{}", "00".repeat(16)), &"0".repeat(4000)] {
        let mut raw = fixture.raw();
        let security = raw.security_request();
        let names = names();
        let mut keys: Vec<(&str, &str)> = names.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        keys.push(("AuthMethod", "CHAP"));
        let (answer, _) = raw.login(&security, &keys);
        assert_eq!((answer.status, answer.transit), (0, false));
        let stay = LoginRequest { transit: false, next_stage: 0, ..security };
        raw.login(&stay, &[("CHAP_A", "5")]);
        let (answer, _) = raw.login(&security, &[("CHAP_N", "alice"), ("CHAP_R", response)]);
        assert_ne!(answer.status, 0);
        raw.ends();
    }
}

/// An initiator that sends more and more reads and receives no data: its session stops, memory stays bounded,
/// and other sessions continue.
#[test]
fn an_initiator_that_never_reads_stops_only_itself() {
    let _alone = alone();
    let limits = Limits { send_stall_ms: 1_000, ..Limits::default() };
    let fixture = Fixture::with(ReferenceDisk::new(16 * MIB), limits, None);
    let mut greedy = fixture.session(&[("MaxRecvDataSegmentLength", "262144")]);
    let command = greedy.scsi(&read10(0, 32768));
    let command = ScsiCommand { read: true, expected_bytes: 16 << 20, ..command };
    greedy.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let before = resident_bytes();
    for number in 0..10_000_u32 {
        let next =
            ScsiCommand { task_tag: 100 + number, cmd_sn: command.cmd_sn.wrapping_add(number), ..command };
        if greedy.stream.write_all(&next.encode()).is_err() {
            break;
        }
        if number % 100 == 0 {
            let mut other = fixture.session(&[]);
            other.read(0, 8);
            other.log_out();
        }
        // The window holds 128 such reads, 2 GiB.
        if number > 300 {
            break;
        }
    }
    let taken = resident_bytes().saturating_sub(before);
    assert!(taken < 300 << 20, "{taken} bytes");
    // It is disconnected when it has accepted no bytes for too long.
    fixture.wait_for_connections(0);
    fixture.is_alive();
}

#[test]
fn a_disconnect_during_a_write_writes_nothing() {
    let fixture = fixture();
    for cut in [10, 48, 60, 48 + 511] {
        let mut raw = fixture.session(&[]);
        let command = raw.scsi(&write10(0, 1));
        let command = ScsiCommand { write: true, expected_bytes: 512, ..command };
        let bytes = raw.encode(&command.encode(), &[1; 512]);
        raw.send(&bytes[..cut]);
        drop(raw);
    }
    // All data but the last burst.
    let mut raw = fixture.session(&[("MaxBurstLength", "512"), ("ImmediateData", "No")]);
    let command = raw.scsi(&write10(0, 2));
    let command = ScsiCommand { write: true, expected_bytes: 1024, ..command };
    raw.pdu(&command.encode(), &[]);
    let r2t = raw.take().r2t();
    raw.data_out(&r2t, 0, 0, true, &[1; 512]);
    raw.take().r2t();
    drop(raw);
    fixture.wait_for_connections(0);
    assert!(fixture.disk.contents().iter().all(|byte| *byte == 0));
}

#[test]
fn an_initiator_that_goes_leaves_no_task_behind() {
    let options = ReferenceOptions { waits: Waits::Always, ..ReferenceOptions::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(4 * MIB, options));
    fixture.disk.hold();
    for _ in 0..5 {
        let mut raw = fixture.raw();
        raw.log_in(&[]);
        for block in 0..20 {
            raw.command(&read10(block, 1), 512, None);
        }
        wait_until("a read to reach the disk", || fixture.disk.waiting() > 0);
        drop(raw);
    }
    fixture.disk.release();
    fixture.wait_for_connections(0);
    fixture.is_alive();
}

/// Writes that announce much data and send none take no memory.
#[test]
fn announced_data_takes_memory_only_when_it_comes() {
    let _alone = alone();
    let limits = Limits { shared_bytes: 2 << 30, ..Limits::default() };
    let fixture = Fixture::with(ReferenceDisk::new(64 * MIB), limits, None);
    let mut sessions = Vec::new();
    let before = resident_bytes();
    for _ in 0..8 {
        let mut raw = fixture.session(&[("ImmediateData", "No")]);
        for _ in 0..100 {
            let command = raw.scsi(&write10(0, 32768));
            let command = ScsiCommand { write: true, expected_bytes: 16 << 20, ..command };
            raw.pdu(&command.encode(), &[]);
        }
        // Two writes of 16 MiB are admitted, with one R2T each.
        raw.take().r2t();
        raw.take().r2t();
        sessions.push(raw);
    }
    let taken = resident_bytes().saturating_sub(before);
    assert!(taken < 64 << 20, "{taken} bytes");
    drop(sessions);
    fixture.wait_for_connections(0);
}

/// Fifty sessions that request 16 MiB each and receive nothing share one budget. Other sessions are served,
/// and the waiting ones are served later.
#[test]
fn greedy_readers_share_one_budget() {
    let _alone = alone();
    let fixture = Fixture::new(ReferenceDisk::new(16 * MIB));
    let before = resident_bytes();
    let greedy: Vec<_> = (0..50)
        .map(|_| {
            let mut raw = fixture.session(&[("MaxRecvDataSegmentLength", "262144")]);
            let tag = raw.command(&read10(0, 32768), 16 << 20, None);
            (raw, tag)
        })
        .collect();
    wait_until("the budget is taken", || fixture.server.shared_bytes_used() > 170 << 20);
    let mut other = fixture.session(&[]);
    for _ in 0..100 {
        other.read(0, 512);
    }
    let taken = resident_bytes().saturating_sub(before);
    assert!(fixture.server.shared_bytes_used() <= 256 << 20);
    // This includes other buffers of the sessions.
    assert!(taken < 450 << 20, "{taken} bytes");
    // They are answered in any order: the waiting sessions get memory when others have received their data.
    std::thread::scope(|scope| {
        for (mut raw, tag) in greedy {
            scope.spawn(move || raw.data(tag, 16 << 20));
        }
    });
    wait_until("all is given back", || fixture.server.shared_bytes_used() == 0);
}

#[test]
fn an_initiator_without_data_does_not_keep_its_memory() {
    let limits =
        Limits { shared_bytes: 64 << 20, send_stall_ms: 200, keepalive_ms: 1_000, ..Limits::default() };
    let fixture = Fixture::with(ReferenceDisk::new(32 * MIB), limits, None);
    let write = |raw: &mut Raw| {
        let command = raw.scsi(&write10(0, 65_535));
        let command = ScsiCommand { write: true, expected_bytes: 65_535 * 512, ..command };
        raw.pdu(&command.encode(), &[]);
    };
    let mut silent = fixture.session(&[]);
    write(&mut silent);
    silent.take().r2t();
    let mut other = fixture.session(&[]);
    write(&mut other);
    // Pings may arrive before it.
    while other.take().opcode() != Opcode::ReadyToTransfer {}
    wait_until("the silent one is gone", || fixture.server.connections() == 1);
}

#[test]
fn a_trickling_initiator_does_not_keep_its_memory() {
    // Commands that store data and commands that do not (VERIFY) have separate memory.
    for operation in [0x2a, 0x2f] {
        let limits = Limits { shared_bytes: 64 << 20, send_stall_ms: 300, ..Limits::default() };
        let fixture = Fixture::with(ReferenceDisk::new(32 * MIB), limits, None);
        let ask = |raw: &mut Raw| {
            let mut cdb = write10(0, 65_535);
            cdb[0] = operation;
            // BYTCHK of VERIFY.
            cdb[1] = if operation == 0x2f { 2 } else { 0 };
            let command = raw.scsi(&cdb);
            let command = ScsiCommand { write: true, expected_bytes: 65_535 * 512, ..command };
            raw.pdu(&command.encode(), &[]);
        };
        let mut slow = fixture.session(&[]);
        ask(&mut slow);
        let r2t = slow.take().r2t();
        let mut other = fixture.session(&[]);
        ask(&mut other);
        let mut number = 0;
        wait_until("the slow one is gone", || {
            // The initiator continues until the server closes the connection.
            let pdu = slow.encode(&Raw::data_out_header(&r2t, number, number * 4), &[1; 4]);
            let _ = slow.stream.write_all(&pdu);
            number += 1;
            fixture.server.connections() == 1
        });
        assert_eq!(other.take().opcode(), Opcode::ReadyToTransfer);
    }
}

#[test]
fn missing_announced_data_does_not_keep_its_memory() {
    let _alone = alone();
    let options = ReferenceOptions { waits: Waits::Always, ..ReferenceOptions::default() };
    let limits = Limits {
        shared_bytes: 64 << 20,
        send_stall_ms: 300,
        // An initiator that waits for its data sends no bytes.
        keepalive_ms: 60_000,
        ..Limits::default()
    };
    for late in ["data", "a command before"] {
        let fixture = Fixture::with(ReferenceDisk::with_options(MIB, options.clone()), limits.clone(), None);
        let keys =
            [("FirstBurstLength", "131072"), ("MaxRecvDataSegmentLength", "262144"), ("InitialR2T", "No")];
        fixture.disk.hold();
        let data = vec![3; 128 << 10];
        let mut silent: Vec<Raw> = (0..8).map(|_| fixture.session(&keys)).collect();
        for raw in &mut silent {
            if late == "data" {
                for _ in 0..46 {
                    let command = raw.scsi(&write10(0, 256));
                    let command =
                        ScsiCommand { write: true, is_final: false, expected_bytes: 128 << 10, ..command };
                    raw.pdu(&command.encode(), &[]);
                }
            } else {
                raw.next_cmd_sn();
                for _ in 0..46 {
                    raw.command(&write10(0, 256), 0, Some(&data));
                }
            }
        }
        wait_until("memory is taken", || fixture.server.shared_bytes_used() > 40 << 20);
        let mut other = fixture.session(&keys);
        // More than the session's own share, both of executed commands and of requested data.
        const COUNT: u32 = 250;
        let mut asked = 0;
        wait_until("the silent ones are gone", || {
            let more = 50.min(COUNT - asked);
            for _ in 0..more {
                other.command(&write10(0, 256), 0, Some(&data));
            }
            asked += more;
            fixture.server.connections() == 1
        });
        fixture.disk.release();
        let statuses: Vec<u8> = (0..asked).map(|_| other.take().scsi().status).collect();
        assert!(statuses.contains(&0x28) && statuses.contains(&0), "{late}: {statuses:x?}");
        other.write(0, &data);
    }
}

/// Unsolicited data that waits for the device: if there is no memory for it, its command is refused until
/// there is memory.
#[test]
fn unsolicited_data_without_memory_is_refused_until_there_is_some() {
    let _alone = alone();
    let options = ReferenceOptions { waits: Waits::Always, ..ReferenceOptions::default() };
    let limits = Limits { shared_bytes: 64 << 20, ..Limits::default() };
    let fixture = Fixture::with(ReferenceDisk::with_options(MIB, options), limits, None);
    let keys = [("FirstBurstLength", "131072"), ("MaxRecvDataSegmentLength", "262144")];
    let mut sessions: Vec<Raw> = (0..4).map(|_| fixture.session(&keys)).collect();
    fixture.disk.hold();
    let data = vec![3; 128 << 10];
    let write = write10(0, 256);
    const COUNT: u32 = 250;
    // One session alone may use all this memory.
    for _ in 0..COUNT {
        sessions[0].command(&write, 0, Some(&data));
    }
    wait_until("memory is taken", || fixture.server.shared_bytes_used() > 30 << 20);
    fixture.disk.release();
    (0..COUNT).for_each(|_| assert_eq!(sessions[0].take().scsi().status, 0));
    fixture.disk.hold();
    for raw in &mut sessions {
        for _ in 0..COUNT {
            raw.command(&write, 0, Some(&data));
        }
    }
    // Three quarters of the budget, and as much as the least share for unsolicited data.
    wait_until("memory is taken", || fixture.server.shared_bytes_used() > 90 << 20);
    assert!(fixture.server.shared_bytes_used() <= 112 << 20);
    fixture.disk.release();
    let mut full = 0;
    for raw in &mut sessions {
        let statuses: Vec<u8> = (0..COUNT).map(|_| raw.take().scsi().status).collect();
        assert!(statuses.iter().all(|status| matches!(status, 0 | 0x28)), "{statuses:x?}");
        assert!(statuses.contains(&0));
        full += statuses.iter().filter(|status| **status == 0x28).count();
        raw.write(0, &data);
    }
    assert!(full > 0);
    wait_until("all is given back", || fixture.server.shared_bytes_used() == 0);
}

#[test]
fn commands_held_for_a_missing_one_are_bounded() {
    let fixture = fixture();
    let mut raw = fixture.session(&[("FirstBurstLength", "131072")]);
    raw.next_cmd_sn();
    let data = vec![0; 128 << 10];
    for _ in 0..100 {
        let command = raw.scsi(&write10(0, 256));
        let command = ScsiCommand { write: true, expected_bytes: 128 << 10, ..command };
        let bytes = raw.encode(&command.encode(), &data);
        if raw.stream.write_all(&bytes).is_err() {
            break;
        }
    }
    // Without the limit, the server would wait for the missing command for ever.
    raw.ends();
    fixture.is_alive();
}
