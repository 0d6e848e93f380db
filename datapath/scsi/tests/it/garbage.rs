//! CDBs and parameter lists of any bytes: never a panic, always a valid reply.

use crate::session::{self, initiator, start, target_with, wait};
use headwater_scsi::{Attribute, Cdb, Command, Lun, Nexus, Now, Options, Reply, Status};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Waits};
use proptest::prelude::*;

const BLOCKS: u64 = 64;

/// Operation codes of commands, and all others.
fn cdb() -> impl Strategy<Value = [u8; 16]> {
    let known = prop::sample::select(vec![
        0x00_u8, 0x03, 0x08, 0x0a, 0x12, 0x15, 0x16, 0x17, 0x1a, 0x1b, 0x1d, 0x1e, 0x25, 0x28, 0x2a, 0x2e,
        0x2f, 0x34, 0x35, 0x37, 0x41, 0x42, 0x55, 0x56, 0x57, 0x5a, 0x5e, 0x5f, 0x83, 0x84, 0x88, 0x89, 0x8a,
        0x8b, 0x8e, 0x8f, 0x90, 0x91, 0x93, 0x9e, 0xa0, 0xa3, 0xa8, 0xaa, 0xae, 0xaf, 0xb7,
    ]);
    let sparse = prop::collection::vec(prop_oneof![4 => Just(0_u8), 1 => any::<u8>(), 1 => 0..3_u8], 16);
    (
        prop_oneof![8 => known, 1 => any::<u8>()],
        prop_oneof![3 => sparse, 1 => prop::collection::vec(any::<u8>(), 16)],
    )
        .prop_map(|(code, rest)| {
            let mut cdb = [0; 16];
            cdb.copy_from_slice(&rest);
            cdb[0] = code;
            cdb
        })
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    let sparse = prop_oneof![3 => Just(0_u8), 1 => 0..32_u8, 1 => any::<u8>()];
    prop_oneof![
        1 => Just(Vec::new()),
        2 => prop::collection::vec(sparse, 0..80),
        1 => prop::collection::vec(any::<u8>(), 0..80),
        1 => (0..20_usize).prop_map(|blocks| vec![0x5a; blocks * 512]),
    ]
}

fn check(reply: &Reply, data_in: &[u8], nexus: &Nexus, lun: Lun, cdb: &Cdb) {
    match reply.status {
        Status::Good => {
            let expected = nexus.expected(lun, cdb);
            assert!(data_in.len() as u64 <= expected.data_in_bytes, "{cdb:?}: more data than announced");
        }
        Status::CheckCondition => {
            let sense = reply.sense.expect("CHECK CONDITION without sense data");
            assert!(sense.bytes().len() >= 8);
            assert!([0x2, 0x3, 0x4, 0x5, 0x6, 0x7, 0xa, 0xe].contains(&sense.key()), "{cdb:?}: {sense:?}");
            assert!(![0x3, 0x4].contains(&sense.key()), "{cdb:?}: blames a sound disk: {sense:?}");
            assert!(data_in.is_empty());
        }
        Status::ReservationConflict => assert!(data_in.is_empty()),
        other => panic!("{cdb:?}: {other:?}"),
    }
}

fn one(nexus: &Nexus, lun: Lun, bytes: &[u8; 16], data_out: &[u8], attribute: Attribute) {
    let cdb = Cdb::new(bytes);
    let announced_bytes = data_out.len() as u64;
    let mut room = [0; 2048];
    let command = Command { lun, attribute, cdb: &cdb, data_out, announced_bytes };
    if let Now::Done { reply, data_in_bytes } = nexus.try_now(&command, &mut room) {
        check(&reply, &room[..data_in_bytes], nexus, lun, &cdb);
        return;
    }
    let outcome = wait(&start(nexus, lun, &cdb, data_out, 1));
    check(&outcome.reply.expect("nobody aborted it"), &outcome.data_in, nexus, lun, &cdb);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_have_an_answer(
        commands in prop::collection::vec((cdb(), data(), 0..40_u8, 0..2_usize), 1..120),
    ) {
        let options = ReferenceOptions { waits: Waits::PerMille(300), ..ReferenceOptions::default() };
        let disk = ReferenceDisk::with_options(BLOCKS * 512, options);
        let target = target_with(disk, Options { transfer_bytes: 8192, ..Options::default() });
        let nexuses = [target.nexus(initiator("a")), target.nexus(initiator("b"))];
        for (cdb, data, lun, who) in commands {
            let lun = if lun == 0 { Lun([cdb[1], cdb[2], 0, 0, 0, 0, 0, 0]) } else { session::LUN };
            let attribute = if cdb[3] == 1 { Attribute::Ordered } else { Attribute::Simple };
            one(&nexuses[who], lun, &cdb, &data, attribute);
        }
        // The unit still works: a reservation cannot lock everybody out, since a reset and another port can
        // always clear it.
        let mut list = [0; 24];
        list[15] = 9;
        nexuses[0].manage(headwater_scsi::Function::LogicalUnitReset { lun: session::LUN }, |_| {});
        for nexus in &nexuses {
            while session::send(nexus, &[0; 6], &[]).status != Status::Good {}
            let register = session::send(nexus, &[0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0], &list);
            prop_assert_eq!(register.status, Status::Good);
        }
        let clear = session::send(&nexuses[0], &[0x5f, 3, 0, 0, 0, 0, 0, 0, 24, 0], &{
            let mut list = [0; 24];
            list[7] = 9;
            list
        });
        prop_assert_eq!(clear.status, Status::Good);
        let read = session::send(&nexuses[0], &session::read10(0, 8), &[]);
        prop_assert_eq!(read.status, Status::Good);
    }
}
