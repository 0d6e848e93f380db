//! EXTENDED COPY within a unit, RECEIVE COPY RESULTS, and the third-party copy page.

use crate::session::{self, Answer, initiator, read10, send, sixteen, target_on, target_with, write10};
use headwater_block::{ByteRange, IoErrorKind};
use headwater_scsi::{Nexus, Options, Status};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits};

const BLOCKS: u64 = 16 << 10;

fn unit() -> Nexus {
    target_with(ReferenceDisk::new(BLOCKS * 512), Options::default()).nexus(initiator("a"))
}

/// The identification descriptor of the unit, with its NAA designator.
fn ours() -> Vec<u8> {
    let mut naa = session::identity().uuid[..8].to_vec();
    naa[0] = 0x30 | (naa[0] & 0x0f);
    descriptor(0x03, &naa)
}

fn descriptor(kind: u8, designator: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xe4, 0, 0, 0, 1, kind, 0, designator.len() as u8];
    bytes.extend_from_slice(designator);
    bytes.resize(29, 0);
    bytes.extend_from_slice(&[0, 2, 0]);
    bytes
}

fn segment(targets: [u16; 2], blocks: u16, from: u64, to: u64) -> Vec<u8> {
    let mut bytes = vec![0x02, 0, 0, 24];
    bytes.extend(targets.iter().flat_map(|index| index.to_be_bytes()));
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&blocks.to_be_bytes());
    bytes.extend_from_slice(&from.to_be_bytes());
    bytes.extend_from_slice(&to.to_be_bytes());
    bytes
}

fn list(id: u8, usage: u8, targets: &[Vec<u8>], segments: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![id, usage << 3];
    bytes.extend_from_slice(&(targets.concat().len() as u16).to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&(segments.concat().len() as u32).to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    [bytes, targets.concat(), segments.concat()].concat()
}

fn copy(nexus: &Nexus, list: &[u8]) -> Answer {
    send(nexus, &sixteen(0x83, 0, 0, list.len() as u32), list)
}

fn status(nexus: &Nexus, id: u8) -> Answer {
    let mut cdb = sixteen(0x84, 0, 0, 255);
    cdb[2] = id;
    send(nexus, &cdb, &[])
}

#[test]
fn random_segments_copy_the_present_content() {
    let options = ReferenceOptions { waits: Waits::PerMille(500), ..ReferenceOptions::default() };
    let disk = std::sync::Arc::new(ReferenceDisk::with_options(BLOCKS * 512, options));
    let nexus = target_on(&disk, Options::default()).nexus(initiator("a"));
    let mut rng = Rng::new(5);
    for at in (0..BLOCKS).step_by(16) {
        assert_eq!(send(&nexus, &write10(at as u32, 16), &rng.bytes(16 * 512)).status, Status::Good);
    }
    let mut model = disk.contents();
    for round in 0..40 {
        let mut segments = Vec::new();
        for _ in 0..rng.between(1, 4) {
            // Up to 4 MiB, more than one chunk; source and destination often overlap.
            let blocks = rng.below(8000);
            let [from, to] = [0, 1].map(|_| rng.below(BLOCKS - blocks + 1));
            segments.push(segment([0, 0], blocks as u16, from, to));
            let bytes = |at: u64| at as usize * 512..(at + blocks) as usize * 512;
            model.copy_within(bytes(from), to as usize * 512);
        }
        assert_eq!(copy(&nexus, &list(round, 0, &[ours()], &segments)), Answer::good(vec![]));
        assert!(disk.contents() == model, "round {round}: {segments:?}");
        let data = status(&nexus, round).data;
        assert_eq!(
            data[..7],
            [0, 0, 0, 8, 1, 0, segments.iter().filter(|s| s[10..12] != [0, 0]).count() as u8]
        );
    }
    assert_eq!(status(&nexus, 0), Answer::check(5, 0x2400), "older copies are forgotten");
    let other = target_on(&disk, Options::default()).nexus(initiator("b"));
    assert_eq!(status(&other, 39), Answer::check(5, 0x2400));
}

#[test]
fn any_designator_names_the_unit() {
    let nexus = unit();
    let uuid = [&[0x10, 0][..], &session::identity().uuid].concat();
    for target in [ours(), descriptor(0x0a, &uuid), descriptor(0x01, b"HEADWATRserial-7")] {
        assert_eq!(copy(&nexus, &list(0, 3, &[target], &[segment([0, 0], 1, 0, 9)])), Answer::good(vec![]));
    }
    assert_eq!(status(&nexus, 0), Answer::check(5, 0x2400), "it asked for nothing to be remembered");
    let elsewhere = descriptor(0x03, b"\x30another");
    let refused = Answer::check(0xa, 0x0d02);
    assert_eq!(
        copy(&nexus, &list(1, 0, std::slice::from_ref(&elsewhere), &[segment([0, 0], 1, 0, 9)])),
        refused
    );
    // A wrong target that no segment uses is ignored.
    let targets = [elsewhere, ours()];
    assert_eq!(copy(&nexus, &list(1, 0, &targets, &[segment([1, 1], 1, 0, 9)])), Answer::good(vec![]));
    assert_eq!(copy(&nexus, &list(1, 0, &targets, &[segment([1, 0], 1, 0, 9)])), refused);
    // NUL: the descriptor names no target.
    let mut null = ours();
    null[1] = 0x20;
    assert_eq!(copy(&nexus, &list(1, 0, &[null], &[segment([0, 0], 1, 0, 9)])), refused);
}

#[test]
fn lists_that_are_refused() {
    let nexus = unit();
    let one = || segment([0, 0], 1, 0, 9);
    let whole = list(1, 0, &[ours()], &[one()]);
    assert_eq!(copy(&nexus, &[]), Answer::good(vec![]));
    for len in [1, 15, 16, 47, 48, 75] {
        assert_eq!(copy(&nexus, &whole[..len]), Answer::check(5, 0x1a00), "{len} bytes");
    }
    // Fewer bytes than the CDB says.
    assert_eq!(send(&nexus, &sixteen(0x83, 0, 0, 76), &whole[..75]), Answer::check(5, 0x1a00));
    let mut inline = whole.clone();
    inline[15] = 1;
    assert_eq!(copy(&nexus, &inline), Answer::check(5, 0x2600));
    let mut fibre_channel = ours();
    fibre_channel[0] = 0xe0;
    assert_eq!(copy(&nexus, &list(1, 0, &[fibre_channel], &[one()])), Answer::check(5, 0x2607));
    let mut stream = one();
    stream[0] = 0x03;
    assert_eq!(copy(&nexus, &list(1, 0, &[ours()], &[stream])), Answer::check(5, 0x2609));
    assert_eq!(copy(&nexus, &list(1, 0, &vec![ours(); 17], &[one()])), Answer::check(5, 0x2606));
    assert_eq!(copy(&nexus, &list(1, 0, &[ours()], &vec![one(); 65])), Answer::check(5, 0x2608));
    assert_eq!(copy(&nexus, &list(1, 0, &vec![ours(); 17], &vec![one(); 65])), Answer::check(5, 0x1a00));
    assert_eq!(copy(&nexus, &list(1, 0, &vec![ours(); 16], &vec![one(); 64])), Answer::good(vec![]));
    assert_eq!(copy(&nexus, &list(1, 0, &[ours()], &[segment([0, 1], 1, 0, 9)])), Answer::check(0xa, 0x0804));
    let past_the_end = segment([0, 0], 2, 0, BLOCKS - 1);
    assert_eq!(copy(&nexus, &list(1, 0, &[ours()], &[past_the_end])), Answer::check(0xa, 0));
    assert_eq!(send(&nexus, &sixteen(0x83, 1, 0, 0), &[]), Answer::check(5, 0x2400));
    assert_eq!(send(&nexus, &sixteen(0x84, 1, 0, 255), &[]), Answer::check(5, 0x2400));
}

#[test]
fn a_copy_that_fails_says_how_far_it_came() {
    let disk = std::sync::Arc::new(ReferenceDisk::new(BLOCKS * 512));
    let nexus = target_on(&disk, Options::default()).nexus(initiator("a"));
    disk.fail(ByteRange::new(8000 * 512, 512).unwrap(), IoErrorKind::Corrupt);
    let segments = [segment([0, 0], 2048, 0, 2048), segment([0, 0], 4096, 4096, 0)];
    assert_eq!(copy(&nexus, &list(3, 0, &[ours()], &segments)), Answer::check(3, 0x1100));
    // The first segment, and the first MiB of the second one.
    assert_eq!(status(&nexus, 3).data, [0, 0, 0, 8, 2, 0, 1, 1, 0, 0, 8, 0]);
    // The last write fails.
    assert_eq!(
        copy(&nexus, &list(4, 0, &[ours()], &[segment([0, 0], 8, 0, 8000)])),
        Answer::check(3, 0x0c00),
    );
    assert_eq!(status(&nexus, 4).data, [0, 0, 0, 8, 2, 0, 0, 1, 0, 0, 0, 0]);
    disk.heal();
    assert_eq!(copy(&nexus, &list(3, 0, &[ours()], &segments)), Answer::good(vec![]));
    assert_eq!(status(&nexus, 3).data, [0, 0, 0, 8, 1, 0, 2, 1, 0, 0, 12, 0]);
    assert_eq!(send(&nexus, &read10(0, 1), &[]).status, Status::Good);
}

#[test]
fn parameters_and_the_page_follow_the_standard() {
    let nexus = unit();
    let parameters = send(&nexus, &sixteen(0x84, 3, 0, 1024), &[]).data;
    let mut expected = vec![0; 46];
    expected[3] = 42;
    expected[4] = 1;
    expected[9] = 16;
    expected[11] = 64;
    expected[12..16].copy_from_slice(&(16 * 32 + 64 * 28_u32).to_be_bytes());
    expected[16..20].copy_from_slice(&(65535 * 512_u32).to_be_bytes());
    expected[35..38].copy_from_slice(&[1, 1, 9]);
    expected[43..46].copy_from_slice(&[2, 0x02, 0xe4]);
    assert_eq!(parameters, expected);

    let page = send(&nexus, &[0x12, 1, 0x8f, 4, 0, 0], &[]).data;
    assert_eq!(page[..2], [0, 0x8f]);
    assert_eq!(usize::from(u16::from_be_bytes([page[2], page[3]])), page.len() - 4);
    let mut rest = &page[4..];
    let mut found = Vec::new();
    while !rest.is_empty() {
        let len = usize::from(u16::from_be_bytes([rest[2], rest[3]]));
        assert_eq!(len % 4, 0);
        found.push((u16::from_be_bytes([rest[0], rest[1]]), rest[4..4 + len].to_vec()));
        rest = &rest[4 + len..];
    }
    assert_eq!(found.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [1, 4, 8, 0xc, 0x8001]);
    assert_eq!(found[0].1, [7, 0x83, 1, 0, 0x84, 2, 0, 3]);
    assert_eq!(found[1].1[4..12], expected[8..16]);
    assert_eq!(found[2].1, [2, 0x02, 0xe4, 0]);
    assert_eq!(found[4].1[..13], [&[0, 0, 0, 1, 0, 0, 0, 1][..], &expected[16..20], &[9]].concat());
}
