//! The full feature phase, PDU by PDU.

mod fixture;

use std::time::Duration;

use fixture::raw::{read10, write10};
use fixture::{Fixture, INITIATOR, Raw, TARGET, name, target, wait_for};
use headwater_iscsi::wire::request::{LogoutRequest, NopOut, ScsiCommand, SnackRequest, TextRequest};
use headwater_iscsi::wire::response::{AsyncMessage, NopIn, RejectReason, Residual};
use headwater_iscsi::wire::text::{pairs, put_pair};
use headwater_iscsi::wire::{Opcode, RESERVED_TAG};
use headwater_iscsi::{Address, FixedTargets, Limits, Offer, Server};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits};

const MIB: u64 = 1 << 20;

fn fixture() -> Fixture {
    Fixture::new(ReferenceDisk::new(4 * MIB))
}

fn slow() -> Fixture {
    let options = ReferenceOptions { waits: Waits::Always, ..ReferenceOptions::default() };
    Fixture::new(ReferenceDisk::with_options(4 * MIB, options))
}

/// Digests, segments and bursts of all sizes, on a disk that answers at once and on one that never does.
#[test]
fn data_arrives_whole_with_every_negotiation() {
    let mut rng = Rng::new(3);
    for fixture in [fixture(), slow()] {
        for digest in ["None", "CRC32C"] {
            for (segment, burst, first) in
                [("512", "512", "512"), ("8192", "65536", "8192"), ("262144", "1048576", "65536")]
            {
                let mut raw = fixture.session(&[
                    ("HeaderDigest", digest),
                    ("DataDigest", digest),
                    ("MaxRecvDataSegmentLength", segment),
                    ("MaxBurstLength", burst),
                    ("FirstBurstLength", first),
                ]);
                for blocks in [1, 3, 16, 200, 512] {
                    let lba = rng.below(1000) as u32;
                    let data = rng.bytes(blocks * 512);
                    write(&mut raw, lba, &data, first.parse().unwrap(), burst.parse().unwrap());
                    assert!(raw.read(lba, blocks as u16) == data, "{digest} {segment} {burst} {blocks}");
                }
                raw.log_out();
            }
        }
    }
}

/// Writes with as much immediate data as is allowed, and the rest as it is asked for.
fn write(raw: &mut Raw, lba: u32, data: &[u8], first: usize, burst: usize) {
    let immediate = data.len().min(first).min(4096);
    let command = raw.scsi(&write10(lba, (data.len() / 512) as u16));
    let command = ScsiCommand { write: true, expected_bytes: data.len() as u32, ..command };
    raw.pdu(&command.encode(), &data[..immediate]);
    let mut at = immediate;
    let mut r2ts = 0;
    while at < data.len() {
        let r2t = raw.take().r2t();
        assert_eq!((r2t.task_tag, r2t.r2t_sn, r2t.offset as usize), (command.task_tag, r2ts, at));
        assert!(r2t.desired_bytes as usize <= burst);
        r2ts += 1;
        let end = at + r2t.desired_bytes as usize;
        let pieces: Vec<&[u8]> = data[at..end].chunks(5000).collect();
        for (data_sn, piece) in pieces.iter().enumerate() {
            raw.data_out(&r2t, data_sn as u32, at as u32, data_sn + 1 == pieces.len(), piece);
            at += piece.len();
        }
    }
    let answer = raw.take();
    assert_eq!((answer.scsi().task_tag, answer.scsi().status), (command.task_tag, 0));
    assert_eq!(answer.scsi().exp_data_sn, r2ts);
}

#[test]
fn data_that_comes_unasked_is_taken_up_to_the_first_burst() {
    let fixture = fixture();
    let mut raw =
        fixture.session(&[("InitialR2T", "No"), ("ImmediateData", "Yes"), ("FirstBurstLength", "8192")]);
    let data = Rng::new(1).bytes(16384);
    let command = raw.scsi(&write10(8, 32));
    let command = ScsiCommand { write: true, is_final: false, expected_bytes: 16384, ..command };
    raw.pdu(&command.encode(), &data[..1000]);
    raw.unasked(command.task_tag, 0, 1000, false, &data[1000..5000]);
    raw.unasked(command.task_tag, 1, 5000, true, &data[5000..8192]);
    let r2t = raw.take().r2t();
    assert_eq!((r2t.offset, r2t.desired_bytes), (8192, 8192));
    raw.data_out(&r2t, 0, 8192, true, &data[8192..]);
    raw.take();
    assert!(raw.read(8, 32) == data);
}

#[test]
fn several_r2ts_are_outstanding_where_that_was_agreed_on() {
    let fixture = fixture();
    let mut raw =
        fixture.session(&[("MaxOutstandingR2T", "3"), ("MaxBurstLength", "1024"), ("ImmediateData", "No")]);
    let data = Rng::new(2).bytes(5120);
    let command = raw.scsi(&write10(0, 10));
    let command = ScsiCommand { write: true, expected_bytes: 5120, ..command };
    raw.pdu(&command.encode(), &[]);
    let mut asked: Vec<_> = (0..3).map(|_| raw.take().r2t()).collect();
    for turn in 0..5 {
        let r2t = asked.remove(0);
        let at = r2t.offset as usize;
        raw.data_out(&r2t, 0, r2t.offset, true, &data[at..at + 1024]);
        if turn < 2 {
            asked.push(raw.take().r2t());
        }
    }
    raw.good(command.task_tag);
    assert!(raw.read(0, 10) == data);
}

#[test]
fn faulty_data_fails_its_command_and_no_other() {
    let fixture = fixture();
    let keys = [("InitialR2T", "No"), ("FirstBurstLength", "2048"), ("MaxBurstLength", "2048")];
    let mut raw = fixture.session(&keys);
    let data = [7; 4096];
    let start = |raw: &mut Raw, is_final, immediate: &[u8]| {
        let command = raw.scsi(&write10(0, 4));
        let command = ScsiCommand { write: true, is_final, expected_bytes: 2048, ..command };
        raw.pdu(&command.encode(), immediate);
        command.task_tag
    };
    let failed = |raw: &mut Raw, tag, code| {
        let answer = raw.take();
        assert_eq!((answer.scsi().task_tag, answer.scsi().status), (tag, 2));
        assert_eq!(answer.sense(), (0xb, code));
    };
    // A wrong number, a wrong place, too much, too little: told when the sequence ends.
    for (data_sn, at, bytes) in [(1, 0, 2048), (0, 512, 1536), (0, 0, 4096)] {
        let tag = start(&mut raw, false, &[]);
        raw.unasked(tag, data_sn, at, true, &data[..bytes]);
        failed(&mut raw, tag, 0x0c0d);
    }
    let tag = start(&mut raw, true, &[]);
    let r2t = raw.take().r2t();
    raw.data_out(&r2t, 0, 0, true, &data[..512]);
    failed(&mut raw, tag, 0x0c0d);
    // An R2T's tag that was never given.
    let tag = start(&mut raw, true, &[]);
    let r2t = raw.take().r2t();
    let wrong =
        headwater_iscsi::wire::response::ReadyToTransfer { transfer_tag: r2t.transfer_tag ^ 1, ..r2t };
    raw.data_out(&wrong, 0, 0, true, &data[..2048]);
    assert_eq!(raw.take().reject().reason, RejectReason::InvalidPduField as u8);
    raw.data_out(&r2t, 0, 0, true, &data[..2048]);
    raw.good(tag);
    // Data of no task is as if it had not come.
    raw.unasked(0xdead, 0, 0, true, &data[..512]);
    // More at once than the first burst, and data that was agreed not to come.
    let mut strict = fixture.session(&[("ImmediateData", "No")]);
    for raw in [&mut raw, &mut strict] {
        let command = raw.scsi(&write10(0, 8));
        let command = ScsiCommand { write: true, expected_bytes: 4096, ..command };
        raw.pdu(&command.encode(), &data);
        failed(raw, command.task_tag, 0x0c0c);
    }
    let tag = start(&mut strict, false, &[]);
    strict.unasked(tag, 0, 0, true, &data[..2048]);
    failed(&mut strict, tag, 0x0c0c);
    raw.read(0, 8);
    strict.read(0, 8);
}

#[test]
fn a_wrong_data_digest_fails_the_task_and_a_wrong_header_digest_the_connection() {
    let fixture = fixture();
    let keys = [("HeaderDigest", "CRC32C"), ("DataDigest", "CRC32C"), ("ImmediateData", "No")];
    let mut raw = fixture.session(&keys);
    let command = raw.scsi(&write10(0, 1));
    let command = ScsiCommand { write: true, expected_bytes: 512, ..command };
    raw.pdu(&command.encode(), &[]);
    let r2t = raw.take().r2t();
    let pdu = headwater_iscsi::wire::request::DataOut {
        is_final: true,
        lun: [0; 8],
        task_tag: r2t.task_tag,
        transfer_tag: r2t.transfer_tag,
        exp_stat_sn: 0,
        data_sn: 0,
        offset: 0,
    };
    let mut bytes = raw.encode(&pdu.encode(), &[9; 512]);
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    raw.send(&bytes);
    assert_eq!(raw.take().reject().reason, RejectReason::DataDigestError as u8);
    let answer = raw.take();
    assert_eq!(
        (answer.scsi().task_tag, answer.scsi().status, answer.sense()),
        (command.task_tag, 2, (0xb, 0x4705))
    );
    assert_eq!(raw.read(0, 1), [0; 512]);
    let ping = NopOut {
        immediate: true,
        lun: [0; 8],
        task_tag: 1,
        transfer_tag: RESERVED_TAG,
        cmd_sn: 0,
        exp_stat_sn: 0,
    };
    let mut bytes = raw.encode(&ping.encode(), &[]);
    bytes[20] ^= 1;
    raw.send(&bytes);
    raw.ends();
    fixture.is_alive();
}

#[test]
fn commands_run_in_the_order_of_their_numbers_and_only_within_the_window() {
    let fixture = fixture();
    let mut raw = fixture.session(&[]);
    let mut commands: Vec<_> = (0..4).map(|_| raw.scsi(&[0])).collect();
    commands.swap(0, 3);
    commands.swap(1, 2);
    for command in &commands[..3] {
        raw.pdu(&command.encode(), &[]);
    }
    // Nothing until the first comes; an immediate one does not wait.
    let ping = raw.ping(b"hello");
    let answer = raw.take();
    assert_eq!((answer.nop().task_tag, &answer.data[..]), (ping, &b"hello"[..]));
    raw.pdu(&commands[3].encode(), &[]);
    for command in commands.iter().rev() {
        raw.good(command.task_tag);
    }
    // Below and above the window: as if they had not come. Twice the same: once.
    let base = raw.cmd_sn;
    for cmd_sn in [base.wrapping_sub(1), base + 128, base + 0x8000_0000] {
        let stray = ScsiCommand { cmd_sn, ..raw.scsi(&[0]) };
        raw.cmd_sn = base;
        raw.pdu(&stray.encode(), &[]);
    }
    let held = ScsiCommand { cmd_sn: base + 1, ..raw.scsi(&[0]) };
    raw.cmd_sn = base;
    raw.pdu(&held.encode(), &[]);
    raw.pdu(&held.encode(), &[]);
    let first = raw.command(&[0], 0, None);
    raw.good(first);
    raw.good(held.task_tag);
    raw.cmd_sn = base + 2;
    let ping = raw.ping(&[]);
    let answer = raw.take();
    assert_eq!((answer.nop().task_tag, answer.nop().numbers.exp_cmd_sn), (ping, base + 2));
}

#[test]
fn the_window_closes_when_too_many_commands_wait() {
    let limits = Limits { queue_depth: 4, ..Limits::default() };
    let disk =
        ReferenceDisk::with_options(MIB, ReferenceOptions { waits: Waits::Always, ..Default::default() });
    let fixture = Fixture::with(disk, limits, None);
    let mut raw = fixture.session(&[]);
    fixture.disk.hold();
    let tags: Vec<u32> = (0..4).map(|block| raw.command(&read10(block, 1), 512, None)).collect();
    let ping = raw.ping(&[]);
    let answer = raw.take();
    let numbers = answer.nop().numbers;
    assert_eq!(answer.nop().task_tag, ping);
    assert_eq!(numbers.max_cmd_sn, numbers.exp_cmd_sn.wrapping_sub(1));
    // One that comes all the same is as if it had not.
    let base = raw.cmd_sn;
    raw.command(&read10(9, 1), 512, None);
    raw.cmd_sn = base;
    let ping = raw.ping(&[]);
    assert_eq!(raw.take().nop().task_tag, ping);
    fixture.disk.release();
    let mut answered: Vec<u32> = (0..4).map(|_| raw.take().data_in().task_tag).collect();
    answered.sort_unstable();
    assert_eq!(answered, tags);
    raw.read(0, 1);
}

#[test]
fn residuals_are_told() {
    let fixture = fixture();
    let mut raw = fixture.session(&[]);
    // Read: more announced than there is, and less.
    let tag = raw.command(&read10(0, 1), 2000, None);
    let answer = raw.take();
    assert_eq!((answer.data_in().task_tag, answer.data.len()), (tag, 512));
    assert_eq!(answer.data_in().status, Some((0, Residual::Underflow(1488))));
    raw.command(&read10(0, 2), 600, None);
    let answer = raw.take();
    assert_eq!((answer.data.len(), answer.data_in().status), (600, Some((0, Residual::Overflow(424)))));
    // A failed read moves nothing.
    raw.command(&read10(0xffff_fff0, 1), 512, None);
    let answer = raw.take();
    assert_eq!((answer.scsi().status, answer.scsi().residual), (2, Residual::Underflow(512)));
    // A write with more than it takes: only what it takes is asked for.
    let command = raw.scsi(&write10(0, 1));
    let command = ScsiCommand { write: true, expected_bytes: 4096, ..command };
    raw.pdu(&command.encode(), &[]);
    let r2t = raw.take().r2t();
    assert_eq!(r2t.desired_bytes, 512);
    raw.data_out(&r2t, 0, 0, true, &[1; 512]);
    assert_eq!(raw.take().scsi().residual, Residual::Underflow(3584));
}

#[test]
fn tasks_are_aborted() {
    let fixture = slow();
    let mut raw = fixture.session(&[]);
    // One that waits for data: gone at once, and data for it is not missed.
    let command = raw.scsi(&write10(0, 8));
    let command = ScsiCommand { write: true, expected_bytes: 4096, ..command };
    raw.pdu(&command.encode(), &[]);
    let r2t = raw.take().r2t();
    let function = raw.manage(1, command.task_tag, command.cmd_sn);
    let answer = raw.take();
    assert_eq!((answer.function().task_tag, answer.function().response), (function, 0));
    raw.data_out(&r2t, 0, 0, true, &[1; 4096]);
    assert_eq!(raw.read(0, 1), [0; 512]);
    // One that the disk works on: it has ended when the function is answered, and is not answered itself.
    fixture.disk.hold();
    let tag = raw.command(&read10(0, 1), 512, None);
    wait_for("the read to reach the disk", || fixture.disk.waiting() == 1);
    let function = raw.manage(1, tag, 0);
    let ping = raw.ping(&[]);
    assert_eq!(raw.take().nop().task_tag, ping);
    fixture.disk.release();
    let answer = raw.take();
    assert_eq!((answer.function().task_tag, answer.function().response), (function, 0));
    // One that is not there; reassignment; what nobody knows.
    for (function, response) in [(1, 1), (8, 4), (3, 5), (99, 5)] {
        raw.manage(function, 0xdead, 0);
        assert_eq!(raw.take().function().response, response, "function {function}");
    }
    // A reset takes all of them, and tells with a unit attention.
    let command = raw.scsi(&write10(0, 8));
    let command = ScsiCommand { write: true, expected_bytes: 4096, ..command };
    raw.pdu(&command.encode(), &[]);
    raw.take().r2t();
    let function = raw.manage(5, RESERVED_TAG, 0);
    assert_eq!((raw.take().function().task_tag, raw.cmd_sn), (function, raw.cmd_sn));
    raw.clear_attention();
    assert_eq!(raw.read(0, 1), [0; 512]);
    // A cold reset ends the session.
    raw.manage(7, RESERVED_TAG, 0);
    assert_eq!(raw.take().function().response, 0);
    raw.ends();
    fixture.is_alive();
}

#[test]
fn what_has_no_place_is_rejected_and_the_session_goes_on() {
    let fixture = fixture();
    let mut raw = fixture.session(&[]);
    let mut unknown = [0; 48];
    unknown[0] = 0x1c;
    unknown[16] = 5;
    raw.pdu(&unknown, b"data");
    let answer = raw.take();
    assert_eq!(answer.reject().reason, RejectReason::CommandNotSupported as u8);
    assert_eq!((answer.data.len(), answer.data[16]), (48, 5));
    let snack = SnackRequest {
        kind: 0,
        lun: [0; 8],
        task_tag: 1,
        transfer_tag: RESERVED_TAG,
        exp_stat_sn: 0,
        begin: 0,
        run: 0,
    };
    raw.pdu(&snack.encode(), &[]);
    assert_eq!(raw.take().reject().reason, RejectReason::SnackReject as u8);
    // An attribute that there is not, and additional headers that are none.
    let command = ScsiCommand { attribute: 7, ..raw.scsi(&[0]) };
    raw.pdu(&command.encode(), &[]);
    assert_eq!(raw.take().reject().reason, RejectReason::InvalidPduField as u8);
    let mut header = raw.scsi(&[0]).encode();
    header[4] = 1;
    let mut bytes = header.to_vec();
    bytes.extend_from_slice(&[0, 1, 9, 0]);
    raw.send(&bytes);
    assert_eq!(raw.take().reject().reason, RejectReason::InvalidPduField as u8);
    // A tag that is in use.
    let command = raw.scsi(&write10(0, 8));
    let command = ScsiCommand { write: true, expected_bytes: 4096, ..command };
    raw.pdu(&command.encode(), &[]);
    let r2t = raw.take().r2t();
    let again = ScsiCommand { task_tag: command.task_tag, ..raw.scsi(&[0]) };
    raw.pdu(&again.encode(), &[]);
    assert_eq!(raw.take().reject().reason, RejectReason::TaskInProgress as u8);
    raw.data_out(&r2t, 0, 0, true, &[3; 4096]);
    raw.good(command.task_tag);
    assert_eq!(raw.read(0, 8), [3; 4096]);
    // A login in the full feature phase ends it.
    let request = raw.login_request();
    raw.pdu(&request.encode(), &[]);
    assert_eq!(raw.take().reject().reason, RejectReason::ProtocolError as u8);
    raw.ends();
}

#[test]
fn logout_ends_the_session_when_what_runs_has_ended() {
    let fixture = slow();
    let mut raw = fixture.session(&[]);
    let logout = |raw: &mut Raw, reason, cid| LogoutRequest {
        immediate: false,
        reason,
        task_tag: raw.next_tag(),
        cid,
        cmd_sn: raw.next_cmd_sn(),
        exp_stat_sn: 0,
    };
    for (reason, cid, response) in [(1, 77, 1), (2, 1, 2)] {
        let request = logout(&mut raw, reason, cid);
        raw.pdu(&request.encode(), &[]);
        assert_eq!(raw.take().logout().response, response);
    }
    fixture.disk.hold();
    let tag = raw.command(&read10(0, 1), 512, None);
    wait_for("the read to reach the disk", || fixture.disk.waiting() == 1);
    let request = logout(&mut raw, 1, 1);
    raw.pdu(&request.encode(), &[]);
    fixture.disk.release();
    assert_eq!(raw.take().data_in().task_tag, tag);
    let answer = raw.take();
    assert_eq!((answer.logout().task_tag, answer.logout().response), (request.task_tag, 0));
    raw.ends();
    fixture.wait_for_connections(0);
}

#[test]
fn a_second_login_of_a_session_takes_its_place() {
    let fixture = slow();
    let mut first = fixture.session(&[]);
    fixture.disk.hold();
    first.command(&write10(0, 1), 0, Some(&[1; 512]));
    wait_for("the write to reach the disk", || fixture.disk.waiting() == 1);
    let mut second = fixture.raw();
    second.isid = first.isid;
    // The new session starts when the old one's write has ended.
    let waiter = std::thread::spawn(move || {
        second.log_in(&[]);
        second.clear_attention();
        second
    });
    std::thread::sleep(Duration::from_millis(100));
    assert!(!waiter.is_finished());
    fixture.disk.release();
    let mut second = waiter.join().unwrap();
    first.ends();
    assert_eq!(second.read(0, 1), [1; 512]);
    assert_eq!(fixture.server.sessions(), 1);
    // The same by its number; another connection beside it is not possible, another session is none.
    let attempt = |tsih, cid| {
        let mut raw = fixture.raw();
        (raw.isid, raw.tsih, raw.cid) = (second.isid, tsih, cid);
        let request = raw.login_request();
        let (response, _) = raw.login(&request, &[("InitiatorName", INITIATOR), ("TargetName", TARGET)]);
        (response.status, response.tsih)
    };
    assert_eq!(attempt(second.tsih, 2).0, 0x0206);
    assert_eq!(attempt(second.tsih ^ 1, 1).0, 0x020a);
    assert_eq!(attempt(second.tsih, 1), (0, second.tsih));
    second.ends();
}

#[test]
fn discovery_lists_all_targets_in_as_many_pdus_as_it_takes() {
    let names: Vec<String> = (0..40).map(|n| format!("iqn.2026-01.org.example:disk-{n}")).collect();
    let offers = names.iter().enumerate().map(|(number, text)| {
        let disk = std::sync::Arc::new(ReferenceDisk::new(MIB));
        (name(text), Offer { scsi: target(text, disk, number as u8), alias: String::new(), accounts: None })
    });
    let address = Address { host: "127.0.0.1".into(), port: 0 };
    let server = Server::bind(&address, FixedTargets::new(offers.collect()), Limits::default()).unwrap();
    let portal = format!("127.0.0.1:{},1", server.port());
    let ask = |raw: &mut Raw, value: &str| {
        let mut text = Vec::new();
        put_pair(&mut text, "SendTargets", value);
        // The question in two PDUs.
        let request = raw.text_request();
        raw.pdu(&TextRequest { is_final: false, go_on: true, ..request }.encode(), &text[..5]);
        let mut answer = raw.take();
        assert!(answer.data.is_empty() && !answer.text().is_final);
        let request = TextRequest { transfer_tag: answer.text().transfer_tag, ..request };
        raw.pdu(&request.encode(), &text[5..]);
        let mut whole = Vec::new();
        loop {
            answer = raw.take();
            whole.extend_from_slice(&answer.data);
            assert!(answer.data.len() <= 512);
            if answer.text().is_final {
                assert_eq!(answer.text().transfer_tag, RESERVED_TAG);
                break;
            }
            assert!(answer.text().go_on);
            raw.pdu(&TextRequest { transfer_tag: answer.text().transfer_tag, ..request }.encode(), &[]);
        }
        let pairs = pairs(&whole).unwrap();
        pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect::<Vec<_>>()
    };
    let mut raw = Raw::connect(server.port());
    let request = raw.login_request();
    let keys =
        [("InitiatorName", INITIATOR), ("SessionType", "Discovery"), ("MaxRecvDataSegmentLength", "512")];
    let (response, _) = raw.login(&request, &keys);
    assert_eq!((response.status, response.transit), (0, true));
    let expected = |names: &[String]| -> Vec<(String, String)> {
        let both =
            |name: &String| [("TargetName".into(), name.clone()), ("TargetAddress".into(), portal.clone())];
        names.iter().flat_map(both).collect()
    };
    assert_eq!(ask(&mut raw, "All"), expected(&names));
    assert_eq!(ask(&mut raw, &names[7]), expected(&names[7..8]));
    assert_eq!(ask(&mut raw, "iqn.2026-01.org.example:none"), vec![]);
    assert_eq!(ask(&mut raw, ""), vec![("SendTargets".to_string(), "Reject".to_string())]);
    // No SCSI in a discovery.
    let command = raw.scsi(&[0]);
    raw.pdu(&command.encode(), &[]);
    assert_eq!(raw.take().reject().reason, RejectReason::CommandNotSupported as u8);
    raw.log_out();
    // In a session: its own target only.
    let mut raw = Raw::connect(server.port());
    raw.log_in(&[("TargetName", &names[3]), ("MaxRecvDataSegmentLength", "512")]);
    assert_eq!(ask(&mut raw, ""), expected(&names[3..4]));
    assert_eq!(ask(&mut raw, &names[4]), vec![]);
    assert_eq!(ask(&mut raw, "All"), vec![("SendTargets".to_string(), "Reject".to_string())]);
}

#[test]
fn a_silent_initiator_is_asked_and_given_up_only_if_it_used_to_answer() {
    let limits = Limits { keepalive_ms: 100, ..Limits::default() };
    let fixture = Fixture::with(ReferenceDisk::new(MIB), limits, None);
    let mut dumb = fixture.session(&[]);
    let mut quiet = fixture.session(&[]);
    let answer = |raw: &mut Raw| {
        let ping = raw.take();
        assert_eq!(ping.nop().task_tag, RESERVED_TAG);
        let NopIn { transfer_tag, lun, .. } = ping.nop();
        assert_ne!(transfer_tag, RESERVED_TAG);
        let pong = NopOut {
            immediate: true,
            lun,
            task_tag: RESERVED_TAG,
            transfer_tag,
            cmd_sn: raw.cmd_sn,
            exp_stat_sn: 0,
        };
        raw.pdu(&pong.encode(), &[]);
    };
    answer(&mut quiet);
    answer(&mut quiet);
    // From here on it says nothing: one more ping, and the end.
    assert_eq!(quiet.take().opcode(), Opcode::NopIn);
    quiet.ends();
    // This one never answered, and works on.
    for _ in 0..3 {
        assert_eq!(dumb.take().opcode(), Opcode::NopIn);
    }
    let tag = dumb.command(&read10(0, 1), 512, None);
    loop {
        let answer = dumb.take();
        if answer.opcode() == Opcode::DataIn {
            assert_eq!(answer.data_in().task_tag, tag);
            break;
        }
    }
}

#[test]
fn a_server_that_stops_asks_for_logout_and_finishes_what_runs() {
    let options = ReferenceOptions { waits: Waits::Always, ..ReferenceOptions::default() };
    let disk = ReferenceDisk::with_options(MIB, options);
    let limits = Limits { logout_grace_ms: 500, ..Limits::default() };
    let fixture = Fixture::with(disk, limits, None);
    let mut polite = fixture.session(&[]);
    let mut other = fixture.session(&[]);
    fixture.disk.hold();
    let tag = other.command(&read10(0, 1), 512, None);
    wait_for("the read to reach the disk", || fixture.disk.waiting() == 1);
    let mut half_open = fixture.raw();
    std::thread::scope(|scope| {
        let stopper = scope.spawn(|| fixture.server.stop());
        let message = AsyncMessage::decode(&polite.take().header).unwrap();
        assert_eq!((message.event, message.parameter3), (1, 1));
        polite.log_out();
        half_open.ends();
        fixture.disk.release();
        loop {
            let answer = other.take();
            if answer.opcode() == Opcode::DataIn {
                assert_eq!(answer.data_in().task_tag, tag);
                break;
            }
            assert_eq!(answer.opcode(), Opcode::AsyncMessage);
        }
        stopper.join().unwrap();
    });
    assert_eq!(fixture.server.connections(), 0);
}

#[test]
fn ordered_commands_wait_for_those_whose_data_is_still_to_come() {
    let fixture = fixture();
    let mut raw = fixture.session(&[("ImmediateData", "No")]);
    let command = raw.scsi(&write10(0, 1));
    let command = ScsiCommand { write: true, expected_bytes: 512, ..command };
    raw.pdu(&command.encode(), &[]);
    let r2t = raw.take().r2t();
    let ordered = raw.scsi(&read10(0, 1));
    let ordered = ScsiCommand { attribute: 2, read: true, expected_bytes: 512, ..ordered };
    raw.pdu(&ordered.encode(), &[]);
    let later = raw.scsi(&read10(1, 1));
    let later = ScsiCommand { read: true, expected_bytes: 512, ..later };
    raw.pdu(&later.encode(), &[]);
    // Nothing is answered before the data is here, but for what is ahead of the queue.
    let first = raw.scsi(&read10(2, 1));
    let first = ScsiCommand { attribute: 3, read: true, expected_bytes: 512, ..first };
    raw.pdu(&first.encode(), &[]);
    raw.data(first.task_tag, 512);
    raw.data_out(&r2t, 0, 0, true, &[5; 512]);
    raw.good(command.task_tag);
    let answers = [raw.take(), raw.take()];
    let of = |tag| answers.iter().find(|answer| answer.data_in().task_tag == tag).unwrap();
    assert_eq!(of(ordered.task_tag).data, [5; 512]);
    assert_eq!(of(later.task_tag).data, [0; 512]);
}
