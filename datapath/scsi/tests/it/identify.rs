//! The data that describes a unit, field by field as in the standards.

use crate::session::{self, Answer, initiator, send, send_with, target, target_with};
use headwater_scsi::{Identity, LogicalUnit, Lun, Options, Target};
use headwater_testkit::{ReferenceDisk, ReferenceOptions};

const BLOCKS: u64 = 1 << 13;

fn unit() -> headwater_scsi::Nexus {
    target(BLOCKS, ReferenceOptions::default()).nexus(initiator("a"))
}

fn inquiry(page: Option<u8>, allocation: u16) -> Vec<u8> {
    let [high, low] = allocation.to_be_bytes();
    let answer = send(&unit(), &[0x12, u8::from(page.is_some()), page.unwrap_or(0), high, low, 0], &[]);
    assert_eq!(answer.status, headwater_scsi::Status::Good);
    answer.data
}

#[test]
fn standard_inquiry_data() {
    let data = inquiry(None, 260);
    assert_eq!(data.len(), 96);
    // Disk; fixed; SPC-4; HISUP and format 2; additional length; 3PC; CMDQUE.
    assert_eq!(data[..8], [0x00, 0x00, 0x06, 0x12, 91, 0x08, 0, 0x02]);
    assert_eq!(&data[8..16], b"HEADWATR");
    assert_eq!(&data[16..32], b"Volume          ");
    assert_eq!(&data[32..36], b"0001");
    assert!(data[36..58].iter().all(|b| *b == 0));
    assert_eq!(data[58..66], [0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0, 0, 0]);
    assert_eq!(inquiry(None, 36).len(), 36);
    assert!(inquiry(None, 0).is_empty());
}

#[test]
fn vital_product_data_pages() {
    assert_eq!(inquiry(Some(0x00), 255), [0, 0x00, 0, 8, 0x00, 0x80, 0x83, 0x86, 0x8f, 0xb0, 0xb1, 0xb2]);
    assert_eq!(inquiry(Some(0x80), 255), b"\x00\x80\x00\x08serial-7");
    let extended = inquiry(Some(0x86), 255);
    assert_eq!((extended.len(), &extended[..7]), (64, &[0, 0x86, 0, 60, 0, 0x07, 0x01][..]));
    let characteristics = inquiry(Some(0xb1), 255);
    assert_eq!((characteristics.len(), &characteristics[..6]), (64, &[0, 0xb1, 0, 60, 0, 1][..]));
    assert!(characteristics[6..].iter().all(|b| *b == 0));
    assert_eq!(inquiry(Some(0xb2), 255), [0, 0xb2, 0, 4, 0, 0xe4, 2, 0]);
}

#[test]
fn designators() {
    let data = inquiry(Some(0x83), 1000);
    assert_eq!(data[..2], [0, 0x83]);
    assert_eq!(usize::from(u16::from_be_bytes([data[2], data[3]])), data.len() - 4);
    let mut rest = &data[4..];
    let mut designators = Vec::new();
    while !rest.is_empty() {
        let len = usize::from(rest[3]);
        designators.push((rest[0], rest[1], rest[4..4 + len].to_vec()));
        rest = &rest[4 + len..];
    }
    let uuid = session::identity().uuid;
    let mut naa = uuid[..8].to_vec();
    naa[0] = 0x3b;
    let expected: Vec<(u8, u8, Vec<u8>)> = vec![
        (1, 0x03, naa),
        (1, 0x0a, [&[0x10, 0][..], &uuid].concat()),
        (2, 0x01, b"HEADWATRserial-7".to_vec()),
        (1, 0x14, vec![0, 0, 0, 1]),
        (3, 0x18, b"naa.target,t,0x0001\0".to_vec()),
        (3, 0x28, b"naa.target\0\0".to_vec()),
    ];
    assert_eq!(designators, expected);
}

#[test]
fn block_limits() {
    let data = inquiry(Some(0xb0), 255);
    assert_eq!(data.len(), 64);
    assert_eq!(data[..4], [0, 0xb0, 0, 60]);
    // WSNZ 0; COMPARE AND WRITE up to 255 blocks; granularity of transfers 4 KiB.
    assert_eq!(data[4..8], [0, 255, 0, 8]);
    let word = |at: usize| u32::from_be_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]);
    assert_eq!(word(8), (32 << 20) / 512);
    assert_eq!(word(12), (1 << 20) / 512);
    assert_eq!(word(16), word(8));
    assert_eq!((word(20), word(24), word(28)), (u32::MAX, 4095, 8));
    assert_eq!(word(32), 0x8000_0000);
    assert!(data[36..].iter().all(|b| *b == 0));
}

#[test]
fn unknown_pages_are_refused_with_the_byte() {
    let nexus = unit();
    assert_eq!(send(&nexus, &[0x12, 1, 0xc0, 0, 255, 0], &[]), Answer::check(5, 0x2400));
    assert_eq!(send(&nexus, &[0x12, 0, 0x80, 0, 255, 0], &[]), Answer::check(5, 0x2400));
}

#[test]
fn capacities() {
    let nexus = unit();
    assert_eq!(send(&nexus, &[0x25; 1], &[]).data, [0, 0, 0x1f, 0xff, 0, 0, 2, 0]);
    let mut cdb = [0; 16];
    cdb[..2].copy_from_slice(&[0x9e, 0x10]);
    cdb[13] = 32;
    let data = send(&nexus, &cdb, &[]).data;
    assert_eq!(data.len(), 32);
    assert_eq!(data[..16], [0, 0, 0, 0, 0, 0, 0x1f, 0xff, 0, 0, 2, 0, 0, 3, 0xc0, 0]);
    cdb[13] = 12;
    assert_eq!(send(&nexus, &cdb, &[]).data, data[..12]);
    // An address without PMI is refused.
    assert_eq!(send(&nexus, &[0x25, 0, 0, 0, 0, 1], &[]), Answer::check(5, 0x2400));
}

#[test]
fn a_disk_with_more_blocks_than_32_bits_count() {
    #[derive(Debug, Default)]
    struct Huge(std::sync::Mutex<Vec<String>>);
    impl headwater_block::Device for Huge {
        fn geometry(&self) -> headwater_block::Geometry {
            headwater_block::Geometry {
                size_bytes: 1 << 42,
                logical_block_bytes: 512,
                physical_block_bytes: 4096,
                read_only: false,
                volatile_cache: false,
            }
        }
        fn try_now(
            &self,
            _: headwater_block::Op<'_>,
        ) -> Result<headwater_block::Attempt, headwater_block::IoError> {
            Ok(headwater_block::Attempt::Done)
        }
        fn submit(&self, request: headwater_block::Request, done: headwater_block::Completion) {
            self.0.lock().unwrap().push(format!("{request:?}"));
            done.complete(Ok(()), request.into_buffer());
        }
        fn extents(
            &self,
            range: headwater_block::ByteRange,
            _: usize,
        ) -> Result<Vec<headwater_block::Extent>, headwater_block::IoError> {
            Ok(vec![headwater_block::Extent { len: range.len(), kind: headwater_block::ExtentKind::Hole }])
        }
    }
    let disk = std::sync::Arc::new(Huge::default());
    let unit = LogicalUnit::new(std::sync::Arc::clone(&disk) as _, session::identity(), Options::default());
    let nexus = Target::new("t", vec![(0, unit)]).nexus(initiator("a"));
    assert_eq!(send(&nexus, &[0; 6], &[]), Answer::check(6, 0x2900));
    assert_eq!(send(&nexus, &[0x25; 1], &[]).data, [0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]);
    let data = send(&nexus, &session::sixteen(0x9e, 0x10, 0, 32), &[]).data;
    assert_eq!(data[..8], ((1_u64 << 33) - 1).to_be_bytes());
    // Long discards and zero writes are executed in parts, so that they can be aborted; a prefetch is
    // shortened.
    let list = [&[0, 22, 0, 16, 0, 0, 0, 0][..], &1_u64.to_be_bytes(), &(5_u32 << 20).to_be_bytes(), &[0; 4]]
        .concat();
    assert_eq!(send(&nexus, &session::ten(0x42, 0, 0, 24), &list), Answer::good(vec![]));
    assert_eq!(send(&nexus, &session::sixteen(0x93, 1, 0, 3 << 20), &[]), Answer::good(vec![]));
    assert_eq!(send(&nexus, &session::sixteen(0x90, 0, 8, 0), &[]), Answer::good(vec![]));
    let range = |offset, len| headwater_block::ByteRange::new(offset, len).unwrap();
    let discard = |offset, len| headwater_block::Request::Discard { range: range(offset, len) };
    let zeroes = |offset, len| {
        let range = range(offset, len);
        headwater_block::Request::WriteZeroes { range, may_unmap: false, fua: false }
    };
    let expected = [
        discard(512, 1 << 30),
        discard((1 << 30) + 512, 1 << 30),
        discard((2 << 30) + 512, 512 << 20),
        zeroes(0, 1 << 30),
        zeroes(1 << 30, 512 << 20),
        headwater_block::Request::Prefetch { range: range(4096, 32 << 20) },
    ];
    assert_eq!(*disk.0.lock().unwrap(), expected.map(|request| format!("{request:?}")));
    // The whole disk is one hole, longer than one descriptor can describe.
    let data = send(&nexus, &session::sixteen(0x9e, 0x12, 0, 4096), &[]).data;
    assert_eq!(
        data[..24],
        [0, 0, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]
    );
}

#[test]
fn mode_pages() {
    let nexus = unit();
    let recovery = [0x01, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut caching = [0; 20];
    caching[..3].copy_from_slice(&[0x08, 0x12, 0x04]);
    let control = [0x0a, 0x0a, 0, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0];
    let exceptions = [0x1c, 0x0a, 0x08, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let all = [&recovery[..], &caching, &control, &exceptions].concat();
    let descriptor = [0, 0, 0x20, 0, 0, 0, 2, 0];

    let six = send(&nexus, &[0x1a, 0, 0x3f, 0, 255, 0], &[]).data;
    assert_eq!(six, [&[11 + 56, 0, 0x10, 8][..], &descriptor, &all].concat());
    let ten = send(&nexus, &[0x5a, 0x08, 0x3f, 0, 0, 0, 0, 1, 0, 0], &[]).data;
    assert_eq!(ten, [&[0, 62, 0, 0x10, 0, 0, 0, 0][..], &all].concat());
    let long = send(&nexus, &[0x5a, 0x10, 0x08, 0, 0, 0, 0, 1, 0, 0], &[]).data;
    let long_descriptor = [0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    assert_eq!(long, [&[0, 42, 0, 0x10, 1, 0, 0, 16][..], &long_descriptor, &caching].concat());

    // The changeable fields: WCE; D_SENSE and SWP.
    let changeable = send(&nexus, &[0x1a, 8, 0x40 | 0x0a, 0, 255, 0], &[]).data;
    assert_eq!(changeable[4..], [0x0a, 0x0a, 4, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    let changeable = send(&nexus, &[0x1a, 8, 0x40 | 0x08, 0, 255, 0], &[]).data;
    assert_eq!(changeable[4..], caching);
    // Saved values are not supported; there are no other pages or subpages.
    assert_eq!(send(&nexus, &[0x1a, 8, 0xc8, 0, 255, 0], &[]), Answer::check(5, 0x3900));
    assert_eq!(send(&nexus, &[0x1a, 8, 0x02, 0, 255, 0], &[]), Answer::check(5, 0x2400));
    assert_eq!(send(&nexus, &[0x1a, 8, 0x08, 1, 255, 0], &[]), Answer::check(5, 0x2400));
}

#[test]
fn a_disk_without_a_volatile_cache_has_no_write_cache_to_enable() {
    let options = ReferenceOptions { volatile_cache: false, ..ReferenceOptions::default() };
    let nexus = target(BLOCKS, options).nexus(initiator("a"));
    let page = |cdb: &[u8]| send(&nexus, cdb, &[]).data[6];
    assert_eq!(page(&[0x1a, 8, 0x08, 0, 255, 0]), 0);
    assert_eq!(page(&[0x1a, 8, 0x48, 0, 255, 0]), 0);
    let select = [0, 0, 0, 0, 0x08, 0x12, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(send(&nexus, &[0x15, 0x10, 0, 0, 24, 0], &select), Answer::check(5, 0x2600));
    assert_eq!(send(&nexus, &[0x12, 1, 0x86, 0, 255, 0], &[]).data[6], 0);
}

#[test]
fn luns_and_their_absence() {
    let unit = || {
        let disk = ReferenceDisk::new(1 << 20);
        let options = Options { power_on_attention: false, ..Options::default() };
        LogicalUnit::new(std::sync::Arc::new(disk), session::identity(), options)
    };
    let nexus = Target::new("t", vec![(300, unit()), (2, unit())]).nexus(initiator("a"));
    let luns = send(&nexus, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[]).data;
    let expected = [[0, 0, 0, 16, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0, 0, 0], [0x41, 0x2c, 0, 0, 0, 0, 0, 0]];
    assert_eq!(luns, expected.concat());
    let at = |lun: [u8; 8], cdb: &[u8]| send_with(&nexus, Lun(lun), cdb, &[], 512);
    let there = [[0, 2, 0, 0, 0, 0, 0, 0], [0x40, 2, 0, 0, 0, 0, 0, 0], [0x41, 0x2c, 0, 0, 0, 0, 0, 0]];
    for lun in there {
        assert_eq!(at(lun, &[0; 6]), Answer::good(vec![]), "{lun:?}");
    }
    for lun in [[0; 8], [0, 2, 0, 1, 0, 0, 0, 0], [0xc1, 1, 0, 0, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0, 0, 0]] {
        assert_eq!(at(lun, &[0; 6]), Answer::check(5, 0x2500), "{lun:?}");
        let inquiry = at(lun, &[0x12, 0, 0, 0, 36, 0]);
        assert_eq!((inquiry.status, inquiry.data[0]), (headwater_scsi::Status::Good, 0x7f));
        assert_eq!(at(lun, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]).data, luns);
        assert_eq!(at(lun, &[0x12, 1, 0, 0, 36, 0]), Answer::check(5, 0x2500));
        assert_eq!(at(lun, &[0x03, 0, 0, 0, 18, 0]).data[12], 0x25);
    }
    assert_eq!(Lun::single(2).0, there[0]);
    assert_eq!(Lun::single(300).0, there[2]);
}

#[test]
fn names_that_do_not_fit_are_cut() {
    let identity = Identity {
        vendor: "a very long vendor".into(),
        product: "p\u{fc}roduct name that is too long".into(),
        revision: String::new(),
        serial: "s".repeat(300),
        uuid: [0; 16],
    };
    let disk = ReferenceDisk::new(1 << 20);
    let options = Options { power_on_attention: false, ..Options::default() };
    let unit = LogicalUnit::new(std::sync::Arc::new(disk), identity, options);
    let nexus = Target::new("\u{e4}".repeat(200), vec![(0, unit)]).nexus(initiator("a"));
    let data = send(&nexus, &[0x12, 0, 0, 0, 96, 0], &[]).data;
    assert_eq!(&data[8..36], b"a very lproduct name tha    ");
    assert_eq!(send(&nexus, &[0x12, 1, 0x80, 4, 0, 0], &[]).data.len(), 4 + 64);
    let page = send(&nexus, &[0x12, 1, 0x83, 4, 0, 0], &[]).data;
    assert_eq!(usize::from(u16::from_be_bytes([page[2], page[3]])), page.len() - 4);
}

#[test]
fn expected_lengths() {
    let nexus = target_with(ReferenceDisk::new(1 << 20), Options::default()).nexus(initiator("a"));
    let expected = |cdb: &[u8]| {
        let expected = nexus.expected(session::LUN, &headwater_scsi::Cdb::new(cdb));
        (expected.data_out_bytes, expected.data_in_bytes)
    };
    assert_eq!(expected(&session::read10(0, 8)), (0, 4096));
    assert_eq!(expected(&session::write10(0, 8)), (4096, 0));
    assert_eq!(expected(&[0x08, 0, 0, 0, 0, 0]), (0, 256 * 512));
    assert_eq!(expected(&session::write10(2047, 2)), (0, 0));
    assert_eq!(expected(&session::sixteen(0x8a, 0, 0, u32::MAX)), (0, 0));
    let mut compare = session::sixteen(0x89, 0, 0, 0);
    compare[13] = 3;
    assert_eq!(expected(&compare), (3072, 0));
    assert_eq!(expected(&session::ten(0x41, 0, 0, 9)), (512, 0));
    assert_eq!(expected(&session::sixteen(0x93, 1, 0, 9)), (0, 0));
    assert_eq!(expected(&session::ten(0x2f, 0x02, 0, 9)), (9 * 512, 0));
    assert_eq!(expected(&session::ten(0x2f, 0x06, 0, 9)), (512, 0));
    assert_eq!(expected(&session::ten(0x2f, 0, 0, 9)), (0, 0));
    assert_eq!(expected(&session::ten(0x42, 0, 0, 24)), (24, 0));
    assert_eq!(expected(&[0x12, 0, 0, 1, 0, 0]), (0, 256));
    assert_eq!(expected(&[0xff]), (0, 0));
    let buffer = |cdb: &[u8]| nexus.expected(session::LUN, &headwater_scsi::Cdb::new(cdb)).buffer_bytes;
    for (cdb, bytes) in [
        (session::read10(0, 8).to_vec(), 0),
        (session::write10(0, 8).to_vec(), 0),
        (session::ten(0x2f, 0, 0, 9).to_vec(), 9 * 512),
        (session::ten(0x41, 0, 0, 9).to_vec(), 9 * 512),
        (session::sixteen(0x93, 0, 0, 0).to_vec(), 1 << 20),
        (session::sixteen(0x8f, 0, 0, 1 << 20).to_vec(), 1 << 20),
        (compare.to_vec(), 3 * 512),
    ] {
        assert_eq!(buffer(&cdb), bytes, "{cdb:x?}");
    }
}
