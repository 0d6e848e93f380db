//! The order of commands, their window, aborts, and PDUs that are not allowed in their place.

use super::{MIB, fixture, slow};
use crate::fixture::raw::{read10, write10};
use crate::fixture::{Fixture, Raw};
use headwater_iscsi::Limits;
use headwater_iscsi::wire::RESERVED_TAG;
use headwater_iscsi::wire::header::Opcode;
use headwater_iscsi::wire::request::{NopOut, ScsiCommand, SnackRequest};
use headwater_iscsi::wire::response::RejectReason;
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits, wait_until};

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
    // No reply until the first command has arrived. An immediate command does not wait.
    let ping = raw.ping(b"hello");
    let answer = raw.take();
    assert_eq!((answer.nop().task_tag, &answer.data[..]), (ping, &b"hello"[..]));
    raw.pdu(&commands[3].encode(), &[]);
    for command in commands.iter().rev() {
        raw.good(command.task_tag);
    }
    // Commands below and above the window are ignored. A command that is sent twice is executed once.
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
    // A command that is sent nevertheless is ignored.
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
fn tasks_are_aborted() {
    let fixture = slow();
    let mut raw = fixture.session(&[]);
    // A command that waits for data is removed at once, and the target does not wait for its data.
    let command = raw.scsi(&write10(0, 8));
    let command = ScsiCommand { write: true, expected_bytes: 4096, ..command };
    raw.pdu(&command.encode(), &[]);
    let r2t = raw.take().r2t();
    let function = raw.manage(1, command.task_tag, command.cmd_sn);
    let answer = raw.take();
    assert_eq!((answer.function().task_tag, answer.function().response), (function, 0));
    raw.data_out(&r2t, 0, 0, true, &[1; 4096]);
    assert_eq!(raw.read(0, 1), [0; 512]);
    // A command that the disk works on: it has ended when the function is answered, and gets no response of
    // its own.
    fixture.disk.hold();
    let tag = raw.command(&read10(0, 1), 512, None);
    wait_until("the read to reach the disk", || fixture.disk.waiting() == 1);
    let function = raw.manage(1, tag, 0);
    let ping = raw.ping(&[]);
    assert_eq!(raw.take().nop().task_tag, ping);
    fixture.disk.release();
    let answer = raw.take();
    assert_eq!((answer.function().task_tag, answer.function().response), (function, 0));
    // A task that does not exist, reassignment, and an unknown function.
    for (function, response) in [(1, 1), (8, 4), (3, 5), (99, 5)] {
        raw.manage(function, 0xdead, 0);
        assert_eq!(raw.take().function().response, response, "function {function}");
    }
    // A reset removes all commands, and is reported with a unit attention.
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
fn misplaced_pdus_are_rejected_and_the_session_continues() {
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
    // An attribute that does not exist, and invalid additional headers.
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
    // A login in the full feature phase ends the connection.
    let request = raw.login_request();
    raw.pdu(&request.encode(), &[]);
    assert_eq!(raw.take().reject().reason, RejectReason::ProtocolError as u8);
    raw.ends();
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
    // Before the data has arrived, only commands with the attribute HEAD OF QUEUE are executed.
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

/// A write of the first block that is lost to a wrong data digest.
fn lose_a_write(raw: &mut Raw) -> ScsiCommand {
    let lost = ScsiCommand { write: true, expected_bytes: 512, ..raw.scsi(&write10(0, 1)) };
    let mut bytes = raw.encode(&lost.encode(), &[9; 512]);
    bytes[100] ^= 1;
    raw.send(&bytes);
    assert_eq!(raw.take().reject().reason, RejectReason::DataDigestError as u8);
    lost
}

/// A command is lost because of a wrong data digest, and is aborted: the commands after it continue.
#[test]
fn a_lost_and_aborted_command_delays_no_others() {
    let fixture = fixture();
    let mut raw = fixture.session(&[("DataDigest", "CRC32C")]);
    let lost = lose_a_write(&mut raw);
    // Two commands that were sent after it, one of which is aborted as well.
    let unwanted = raw.scsi(&[0]);
    raw.pdu(&unwanted.encode(), &[]);
    let next = raw.command(&[0], 0, None);
    let abort = |raw: &mut Raw, tag: u32, cmd_sn: u32| {
        let function = raw.manage(1, tag, cmd_sn);
        let answer = raw.take();
        assert_eq!(answer.function().task_tag, function);
        answer.function().response
    };
    // The abort has no effect for a command number that was not sent yet, or under another tag.
    let not_sent = raw.cmd_sn;
    assert_eq!(abort(&mut raw, 77, not_sent), 1);
    assert_eq!(abort(&mut raw, unwanted.task_tag + 77, unwanted.cmd_sn), 1);
    assert_eq!(abort(&mut raw, unwanted.task_tag, unwanted.cmd_sn), 0);
    assert_eq!(abort(&mut raw, lost.task_tag, lost.cmd_sn), 0);
    raw.good(next);
    assert_eq!(raw.read(0, 1), [0; 512]);
}

/// A command is lost because of a wrong data digest, and everything that was sent is aborted: the commands
/// that waited for it are not executed later.
#[test]
fn commands_waiting_for_a_lost_one_are_aborted_too() {
    for function in [2, 4, 5, 6] {
        let fixture = fixture();
        let mut raw = fixture.session(&[("DataDigest", "CRC32C")]);
        let lost = lose_a_write(&mut raw);
        let waits = ScsiCommand { write: true, expected_bytes: 512, ..raw.scsi(&write10(1, 1)) };
        raw.pdu(&waits.encode(), &[8; 512]);
        // A PDU that is no SCSI command is answered, even if it arrived out of order.
        let ping = NopOut {
            immediate: false,
            lun: [0; 8],
            task_tag: raw.next_tag(),
            transfer_tag: RESERVED_TAG,
            cmd_sn: raw.next_cmd_sn(),
            exp_stat_sn: 0,
        };
        raw.pdu(&ping.encode(), &[]);
        let tag = raw.manage(function, RESERVED_TAG, 0);
        let answers = [raw.take(), raw.take()];
        let done = answers
            .iter()
            .find(|answer| answer.opcode() == Opcode::TaskManagementResponse)
            .unwrap()
            .function();
        assert_eq!((done.task_tag, done.response), (tag, 0));
        let pong = answers.iter().find(|answer| answer.opcode() == Opcode::NopIn).unwrap().nop();
        assert_eq!(pong.task_tag, ping.task_tag);
        // Too late: its number counts as received.
        raw.pdu(&lost.encode(), &[9; 512]);
        // The next command is answered with the unit attention of the reset.
        let next_tag = raw.command(&[0], 0, None);
        assert_eq!(raw.take().scsi().task_tag, next_tag);
        assert_eq!(raw.read(0, 2), [0; 1024], "function {function}");
    }
}

/// The memory limit counts what is held.
#[test]
fn a_command_that_comes_again_before_its_turn_is_held_once() {
    let fixture = fixture();
    let mut raw = fixture.session(&[]);
    let first = raw.scsi(&[0]);
    let early = NopOut {
        immediate: false,
        lun: [0; 8],
        task_tag: raw.next_tag(),
        transfer_tag: RESERVED_TAG,
        cmd_sn: raw.next_cmd_sn(),
        exp_stat_sn: 0,
    };
    // This would be ten megabytes if each were held.
    for _ in 0..160 {
        raw.pdu(&early.encode(), &[7; 64 << 10]);
    }
    raw.pdu(&first.encode(), &[]);
    raw.good(first.task_tag);
    assert_eq!(raw.take().nop().task_tag, early.task_tag);
}
