//! Data of commands: immediate, unsolicited, requested by R2Ts, with digests, too much and too little.

use super::{fixture, slow};
use crate::fixture::raw::{read10, write10};
use crate::fixture::{Fixture, Raw};
use headwater_iscsi::wire::RESERVED_TAG;
use headwater_iscsi::wire::request::{NopOut, ScsiCommand};
use headwater_iscsi::wire::response::{RejectReason, Residual};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits};

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

/// Writes with as much immediate data as is allowed, and sends the rest as R2Ts request it.
fn write(raw: &mut Raw, lba: u32, data: &[u8], first: usize, burst: usize) {
    write_as(raw, &write10(lba, (data.len() / 512) as u16), data, first, burst);
}

fn write_as(raw: &mut Raw, cdb: &[u8], data: &[u8], first: usize, burst: usize) {
    let immediate = data.len().min(first).min(4096);
    let command = raw.scsi(cdb);
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

/// READ(16) or WRITE(16) at block 8.
fn long(operation: u8, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = operation;
    cdb[9] = 8;
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

#[test]
fn the_longest_transfers_are_carried_out_and_longer_ones_are_not() {
    const LONGEST: u32 = 32 << 20;
    let keys = [
        ("MaxRecvDataSegmentLength", "262144"),
        ("MaxBurstLength", "1048576"),
        ("FirstBurstLength", "65536"),
        ("ImmediateData", "Yes"),
    ];
    let mut rng = Rng::new(17);
    let (old, new) = (rng.bytes(34 << 20), rng.bytes(LONGEST as usize));
    for waits in [Waits::Never, Waits::Always] {
        let options = ReferenceOptions { waits, ..ReferenceOptions::default() };
        let fixture = Fixture::new(ReferenceDisk::with_contents(old.clone(), options));
        let mut raw = fixture.session(&keys);
        // A command with one block more than the limit changes nothing, and its data is not requested.
        for operation in [0x88, 0x8a] {
            let command = raw.scsi(&long(operation, LONGEST / 512 + 1));
            let (read, write) = (operation == 0x88, operation == 0x8a);
            let command = ScsiCommand { read, write, expected_bytes: LONGEST + 512, ..command };
            raw.pdu(&command.encode(), &[]);
            let answer = raw.take();
            assert_eq!((answer.scsi().task_tag, answer.scsi().status), (command.task_tag, 2));
            // ILLEGAL REQUEST, INVALID FIELD IN CDB.
            assert_eq!(answer.sense(), (5, 0x2400), "{operation:#x}");
        }
        assert!(fixture.disk.contents() == old);
        let tag = raw.command(&long(0x88, LONGEST / 512), LONGEST, None);
        assert!(raw.data(tag, LONGEST) == old[8 * 512..][..LONGEST as usize], "{waits:?}");
        write_as(&mut raw, &long(0x8a, LONGEST / 512), &new, 65_536, 1 << 20);
        let contents = fixture.disk.contents();
        assert!(contents[8 * 512..][..LONGEST as usize] == new, "{waits:?}");
        let (before, behind) = (&contents[..8 * 512], &contents[8 * 512 + LONGEST as usize..]);
        assert!(*before == old[..8 * 512] && *behind == old[8 * 512 + LONGEST as usize..], "{waits:?}");
    }
}

#[test]
fn unsolicited_data_is_accepted_up_to_the_first_burst() {
    let fixture = fixture();
    let mut raw =
        fixture.session(&[("InitialR2T", "No"), ("ImmediateData", "Yes"), ("FirstBurstLength", "8192")]);
    let data = Rng::new(1).bytes(16384);
    let command = raw.scsi(&write10(8, 32));
    let command = ScsiCommand { write: true, is_final: false, expected_bytes: 16384, ..command };
    raw.pdu(&command.encode(), &data[..1000]);
    raw.unsolicited(command.task_tag, 0, 1000, false, &data[1000..5000]);
    raw.unsolicited(command.task_tag, 1, 5000, true, &data[5000..8192]);
    let r2t = raw.take().r2t();
    assert_eq!((r2t.offset, r2t.desired_bytes), (8192, 8192));
    raw.data_out(&r2t, 0, 8192, true, &data[8192..]);
    raw.take();
    assert!(raw.read(8, 32) == data);
}

#[test]
fn fast_reads_overtake_a_write_waiting_for_data() {
    let fixture = fixture();
    let mut raw = fixture.session(&[("ImmediateData", "Yes")]);
    let data = Rng::new(5).bytes(65_536);
    raw.write(0, &data);
    let command = raw.scsi(&write10(500, 128));
    let command = ScsiCommand { write: true, expected_bytes: 65_536, ..command };
    raw.pdu(&command.encode(), &[]);
    let r2t = raw.take().r2t();
    let before = fixture.disk.counts();
    assert!(raw.read(8, 8) == data[4096..8192]);
    raw.write(8, &data[..512]);
    let after = fixture.disk.counts();
    assert_eq!((after.reads - before.reads, after.writes - before.writes), (1, 1));
    assert_eq!(after.submitted, before.submitted);
    raw.data_out(&r2t, 0, 0, true, &data);
    raw.good(command.task_tag);
    assert!(raw.read(500, 128) == data);
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
    // A wrong number, a wrong offset, too much, too little: reported when the sequence ends.
    for (data_sn, at, bytes) in [(1, 0, 2048), (0, 512, 1536), (0, 0, 4096)] {
        let tag = start(&mut raw, false, &[]);
        raw.unsolicited(tag, data_sn, at, true, &data[..bytes]);
        failed(&mut raw, tag, 0x0c0d);
    }
    let tag = start(&mut raw, true, &[]);
    let r2t = raw.take().r2t();
    raw.data_out(&r2t, 0, 0, true, &data[..512]);
    failed(&mut raw, tag, 0x0c0d);
    // The tag of an R2T that was never sent.
    let tag = start(&mut raw, true, &[]);
    let r2t = raw.take().r2t();
    let wrong =
        headwater_iscsi::wire::response::ReadyToTransfer { transfer_tag: r2t.transfer_tag ^ 1, ..r2t };
    raw.data_out(&wrong, 0, 0, true, &data[..2048]);
    assert_eq!(raw.take().reject().reason, RejectReason::InvalidPduField as u8);
    raw.data_out(&r2t, 0, 0, true, &data[..2048]);
    raw.good(tag);
    // Data of an unknown task is ignored.
    raw.unsolicited(0xdead, 0, 0, true, &data[..512]);
    // More at once than the first burst, and immediate data although its use was negotiated off.
    let mut strict = fixture.session(&[("ImmediateData", "No")]);
    for raw in [&mut raw, &mut strict] {
        let command = raw.scsi(&write10(0, 8));
        let command = ScsiCommand { write: true, expected_bytes: 4096, ..command };
        raw.pdu(&command.encode(), &data);
        failed(raw, command.task_tag, 0x0c0c);
    }
    let tag = start(&mut strict, false, &[]);
    strict.unsolicited(tag, 0, 0, true, &data[..2048]);
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
fn residuals_are_reported() {
    let fixture = fixture();
    let mut raw = fixture.session(&[]);
    // A read with more announced than is read, and with less.
    let tag = raw.command(&read10(0, 1), 2000, None);
    let answer = raw.take();
    assert_eq!((answer.data_in().task_tag, answer.data.len()), (tag, 512));
    assert_eq!(answer.data_in().status, Some((0, Residual::Underflow(1488))));
    raw.command(&read10(0, 2), 600, None);
    let answer = raw.take();
    assert_eq!((answer.data.len(), answer.data_in().status), (600, Some((0, Residual::Overflow(424)))));
    // A failed read transfers no data.
    raw.command(&read10(0xffff_fff0, 1), 512, None);
    let answer = raw.take();
    assert_eq!((answer.scsi().status, answer.scsi().residual), (2, Residual::Underflow(512)));
    // A write that announces more than it needs: only the needed data is requested.
    let command = raw.scsi(&write10(0, 1));
    let command = ScsiCommand { write: true, expected_bytes: 4096, ..command };
    raw.pdu(&command.encode(), &[]);
    let r2t = raw.take().r2t();
    assert_eq!(r2t.desired_bytes, 512);
    raw.data_out(&r2t, 0, 0, true, &[1; 512]);
    assert_eq!(raw.take().scsi().residual, Residual::Underflow(3584));
}
