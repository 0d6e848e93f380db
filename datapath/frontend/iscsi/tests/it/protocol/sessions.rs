//! Sessions: logout, reinstatement, discovery, silence, and a server that stops.

use std::sync::Arc;
use std::time::Duration;

use super::{MIB, slow};
use crate::fixture::raw::{read10, write10};
use crate::fixture::{Fixture, INITIATOR, Raw, TARGET, accounts, name, target};
use headwater_iscsi::wire::request::{LogoutRequest, NopOut, ScsiCommand, TextRequest};
use headwater_iscsi::wire::response::{AsyncMessage, NopIn, RejectReason};
use headwater_iscsi::wire::text::{pairs, put_pair};
use headwater_iscsi::wire::{Opcode, RESERVED_TAG};
use headwater_iscsi::{Address, FixedTargets, Limits, Offer, Server};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, wait_until};

#[test]
fn logout_ends_the_session_after_running_commands() {
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
    wait_until("the read to reach the disk", || fixture.disk.waiting() == 1);
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
fn early_commands_numbered_after_the_logout_are_dropped() {
    let fixture = Fixture::new(ReferenceDisk::new(MIB));
    let mut raw = fixture.session(&[]);
    let logout = LogoutRequest {
        immediate: false,
        reason: 0,
        task_tag: raw.next_tag(),
        cid: 1,
        cmd_sn: raw.next_cmd_sn(),
        exp_stat_sn: 0,
    };
    raw.command(&write10(0, 1), 0, Some(&[1; 512]));
    raw.pdu(&logout.encode(), &[]);
    assert_eq!(raw.take().logout().task_tag, logout.task_tag);
    raw.ends();
    assert!(fixture.disk.contents().iter().all(|byte| *byte == 0));
}

#[test]
fn a_text_gives_a_key_once_and_its_answer_is_taken_before_the_next() {
    let fixture = Fixture::new(ReferenceDisk::new(MIB));
    let mut raw = fixture.session(&[("MaxRecvDataSegmentLength", "512")]);
    let twice = b"SendTargets=\0X-a=1\0SendTargets=\0";
    let request = raw.text_request();
    raw.pdu(&request.encode(), twice);
    assert_eq!(raw.take().reject().reason, RejectReason::ProtocolError as u8);
    // A response of several PDUs, and another request before its end.
    let many: Vec<u8> = (0..100).flat_map(|key| format!("X-{key}=\0").into_bytes()).collect();
    let request = TextRequest { is_final: false, ..raw.text_request() };
    raw.pdu(&request.encode(), &many);
    let answer = raw.take();
    assert!(answer.text().go_on && answer.data.len() == 512);
    let request = TextRequest { transfer_tag: answer.text().transfer_tag, ..raw.text_request() };
    raw.pdu(&request.encode(), &many);
    assert_eq!(raw.take().reject().reason, RejectReason::ProtocolError as u8);
    // That exchange has ended.
    let request = TextRequest { transfer_tag: answer.text().transfer_tag, ..raw.text_request() };
    raw.pdu(&request.encode(), &[]);
    assert_eq!(raw.take().reject().reason, RejectReason::InvalidPduField as u8);
    assert_eq!(raw.read(0, 1), [0; 512]);
}

#[test]
fn a_session_is_not_taken_over_under_another_chap_name() {
    let fixture = Fixture::with(ReferenceDisk::new(MIB), Limits::default(), Some(accounts()));
    let mut alice = fixture.raw();
    assert_eq!(alice.log_in_as("alice", "alice-secret-1"), 0);
    alice.clear_attention();
    // By its name, and by its TSIH.
    for tsih in [0, alice.tsih] {
        let mut bob = fixture.raw();
        (bob.isid, bob.tsih, bob.cid) = (alice.isid, tsih, alice.cid);
        assert_eq!(bob.log_in_as("bob", "bob-secret-two"), 0x0202);
        bob.ends();
        alice.read(0, 1);
    }
    let mut other = fixture.raw();
    other.isid = [0x80, 1, 2, 3, 4, 5];
    assert_eq!(other.log_in_as("bob", "bob-secret-two"), 0, "a session of its own");
    let mut again = fixture.raw();
    again.isid = alice.isid;
    assert_eq!(again.log_in_as("alice", "alice-secret-1"), 0);
    alice.ends();
    again.clear_attention();
    again.read(0, 1);
}

#[test]
fn a_second_login_of_a_session_takes_its_place() {
    let fixture = slow();
    let mut first = fixture.session(&[]);
    fixture.disk.hold();
    first.command(&write10(0, 1), 0, Some(&[1; 512]));
    wait_until("the write to reach the disk", || fixture.disk.waiting() == 1);
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
    // The same by its TSIH; a second connection in the session is not supported, and another session does not
    // exist.
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
fn ending_all_tasks_includes_those_awaiting_data() {
    // CLEAR TASK SET, LOGICAL UNIT RESET, TARGET WARM RESET, and the unit attentions of the other initiators.
    for (function, attention) in [(4, 0x2f00), (5, 0x2903), (6, 0x2903)] {
        let fixture = Fixture::new(ReferenceDisk::new(MIB));
        let (mut a, mut b) = (fixture.session(&[]), fixture.session(&[]));
        let write = ScsiCommand { write: true, expected_bytes: 512, ..b.scsi(&write10(0, 1)) };
        b.pdu(&write.encode(), &[]);
        let r2t = b.take().r2t();
        let tag = a.manage(function, 0, 0);
        let answer = a.take();
        assert_eq!((answer.function().task_tag, answer.function().response), (tag, 0));
        if function != 4 {
            b.command(&[0], 0, None);
            assert_eq!(b.take().sense(), (6, attention));
            a.clear_attention();
        }
        b.data_out(&r2t, 0, 0, true, &[1; 512]);
        if function == 4 {
            b.command(&[0], 0, None);
            assert_eq!(b.take().sense(), (6, attention));
        }
        // These are the next responses: there is none to the write.
        for _ in 0..2 {
            let tag = b.command(&[0], 0, None);
            b.good(tag);
        }
        assert_eq!(a.read(0, 1), [0; 512], "function {function}");
        b.write(0, &[2; 512]);
        assert_eq!(a.read(0, 1), [2; 512]);
    }
}

#[test]
fn discovery_lists_all_targets_in_as_many_pdus_as_it_takes() {
    let names: Vec<String> = (0..40).map(|n| format!("iqn.2026-01.org.example:disk-{n}")).collect();
    let offers = names.iter().enumerate().map(|(number, text)| {
        let disk = Arc::new(ReferenceDisk::new(MIB));
        (name(text), Offer { scsi: target(text, disk, number as u8), alias: String::new(), accounts: None })
    });
    let address = Address { host: "127.0.0.1".into(), port: 0 };
    let server = Server::bind(&address, FixedTargets::new(offers.collect()), Limits::default()).unwrap();
    let portal = format!("127.0.0.1:{},1", server.port());
    let ask = |raw: &mut Raw, value: &str| {
        let mut text = Vec::new();
        put_pair(&mut text, "SendTargets", value);
        // The request in two PDUs.
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
    // No SCSI commands in a discovery session.
    let command = raw.scsi(&[0]);
    raw.pdu(&command.encode(), &[]);
    assert_eq!(raw.take().reject().reason, RejectReason::CommandNotSupported as u8);
    raw.log_out();
    // In a normal session: its own target only.
    let mut raw = Raw::connect(server.port());
    raw.log_in(&[("TargetName", &names[3]), ("MaxRecvDataSegmentLength", "512")]);
    assert_eq!(ask(&mut raw, ""), expected(&names[3..4]));
    assert_eq!(ask(&mut raw, &names[4]), vec![]);
    assert_eq!(ask(&mut raw, "All"), vec![("SendTargets".to_string(), "Reject".to_string())]);
}

/// An initiator connects to the address that discovery returns. On a host with many addresses it must be the
/// one that the initiator used.
#[test]
fn a_server_on_all_addresses_tells_the_one_that_was_connected_to() {
    let has_ipv6 = std::net::TcpListener::bind("[::1]:0").is_ok();
    let is_apart = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|v| v.trim() == "1");
    for (bound, host, returned) in [
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.2", "127.0.0.2"),
        ("::", "::1", "[::1]"),
        // The kernel reports ::ffff:127.0.0.3, which an initiator without IPv6 cannot use.
        ("::", "127.0.0.3", "127.0.0.3"),
    ] {
        if bound == "::" && (!has_ipv6 || is_apart && !host.contains(':')) {
            println!("not here: {host} of {bound}");
            continue;
        }
        let offer = Offer {
            scsi: target(TARGET, Arc::new(ReferenceDisk::new(MIB)), 1),
            alias: String::new(),
            accounts: None,
        };
        let address = Address { host: bound.into(), port: 0 };
        let server =
            Server::bind(&address, FixedTargets::new(vec![(name(TARGET), offer)]), Limits::default())
                .unwrap();
        let mut raw = Raw::connect_to(host, server.port());
        let request = raw.login_request();
        let (answer, _) = raw.login(&request, &[("InitiatorName", INITIATOR), ("SessionType", "Discovery")]);
        assert_eq!((answer.status, answer.transit), (0, true));
        let request = raw.text_request();
        let mut text = Vec::new();
        put_pair(&mut text, "SendTargets", "All");
        raw.pdu(&request.encode(), &text);
        let answer = raw.take();
        let portal = format!("{returned}:{},1", server.port());
        assert_eq!(
            pairs(&answer.data).unwrap(),
            [("TargetName", TARGET), ("TargetAddress", portal.as_str())],
            "{host} of {bound}"
        );
    }
}

#[test]
fn targets_of_one_server_do_not_mix() {
    let disk = |seed| {
        let options = ReferenceOptions { waits: Waits::PerMille(500), seed, ..ReferenceOptions::default() };
        Arc::new(ReferenceDisk::with_options(MIB, options))
    };
    let disks = [disk(1), disk(2)];
    let names = ["iqn.2026-01.org.example:one", "iqn.2026-01.org.example:two"];
    let offer = |number: usize| {
        let scsi = target(names[number], disks[number].clone(), number as u8);
        (name(names[number]), Offer { scsi, alias: String::new(), accounts: None })
    };
    let address = Address { host: "127.0.0.1".into(), port: 0 };
    let targets = FixedTargets::new(vec![offer(0), offer(1)]);
    let server = Server::bind(&address, targets, Limits::default()).unwrap();
    // Two sessions of each disk; the first two write the first half of the blocks that are read, the others
    // the second.
    let mut sessions = [0, 1, 0, 1].map(|disk: usize| {
        let mut raw = Raw::connect(server.port());
        raw.log_in(&[("TargetName", names[disk])]);
        raw.clear_attention();
        (disk, raw)
    });
    assert_eq!(server.sessions(), 4);
    let mut models = [vec![0; MIB as usize], vec![0; MIB as usize]];
    let mut rng = Rng::new(10);
    for _ in 0..100 {
        // The same blocks of both disks; all commands are sent before a reply is received.
        let base = rng.below(2000) as u32;
        let mut tags = Vec::new();
        for (number, (disk, raw)) in sessions.iter_mut().enumerate() {
            let (lba, data) = (base + 8 * (number as u32 / 2), rng.bytes(4096));
            tags.push(raw.command(&write10(lba, 8), 0, Some(&data)));
            models[*disk][lba as usize * 512..][..4096].copy_from_slice(&data);
        }
        for ((_, raw), tag) in sessions.iter_mut().zip(&tags) {
            raw.good(*tag);
        }
        let tags = sessions.each_mut().map(|(_, raw)| raw.command(&read10(base, 16), 8192, None));
        for ((disk, raw), tag) in sessions.iter_mut().zip(tags) {
            let expected = &models[*disk][base as usize * 512..][..8192];
            assert!(raw.data(tag, 8192) == expected, "target {} at block {base}", names[*disk]);
        }
    }
    for (disk, model) in disks.iter().zip(&models) {
        assert!(disk.contents() == *model);
    }
}

#[test]
fn a_silent_initiator_is_asked_and_given_up_only_if_it_used_to_answer() {
    // Long enough for replies of a busy host.
    let limits = Limits { keepalive_ms: 1_000, ..Limits::default() };
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
    // From here on it sends nothing: one more ping, then the connection is closed.
    assert_eq!(quiet.take().opcode(), Opcode::NopIn);
    quiet.ends();
    // This initiator never answered pings, and continues to work.
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
fn a_stopping_server_requests_logout_and_finishes_commands() {
    let options = ReferenceOptions { waits: Waits::Always, ..ReferenceOptions::default() };
    let disk = ReferenceDisk::with_options(MIB, options);
    let limits = Limits { logout_grace_ms: 3_000, ..Limits::default() };
    let fixture = Fixture::with(disk, limits, None);
    let mut polite = fixture.session(&[]);
    let mut other = fixture.session(&[]);
    fixture.disk.hold();
    let tag = other.command(&read10(0, 1), 512, None);
    wait_until("the read to reach the disk", || fixture.disk.waiting() == 1);
    let mut half_open = fixture.raw();
    std::thread::scope(|scope| {
        let stopper = scope.spawn(|| fixture.server.stop());
        let message = AsyncMessage::decode(&polite.take().header).unwrap();
        assert_eq!((message.event, message.parameter3), (1, 3));
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
