//! Compares the parser with the table of commands, and with the fields as the standards' figures number their
//! bits.

use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::opcodes;

/// A field by its first byte and bit (7 is the highest) and its length in bits.
fn field(cdb: &[u8; 16], byte: usize, bit: u32, bits: u32) -> u64 {
    let mut value: u128 = 0;
    for b in cdb {
        value = (value << 8) | u128::from(*b);
    }
    let from_the_left = byte as u32 * 8 + (7 - bit);
    ((value << from_the_left) >> (128 - bits)) as u64
}

/// LBA and length of the commands that have both: code, bytes of the LBA, bytes of the length.
const SPANS: [(u8, Range<usize>, Range<usize>); 22] = [
    (0x28, 2..6, 7..9),
    (0x2a, 2..6, 7..9),
    (0x2e, 2..6, 7..9),
    (0x2f, 2..6, 7..9),
    (0x34, 2..6, 7..9),
    (0x35, 2..6, 7..9),
    (0x41, 2..6, 7..9),
    (0x88, 2..10, 10..14),
    (0x89, 2..10, 13..14),
    (0x8a, 2..10, 10..14),
    (0x8b, 2..10, 10..14),
    (0x8e, 2..10, 10..14),
    (0x8f, 2..10, 10..14),
    (0x90, 2..10, 10..14),
    (0x91, 2..10, 10..14),
    (0x93, 2..10, 10..14),
    (0xa8, 2..6, 6..10),
    (0xaa, 2..6, 6..10),
    (0xae, 2..6, 6..10),
    (0xaf, 2..6, 6..10),
    (0x08, 1..4, 4..5),
    (0x0a, 1..4, 4..5),
];

fn span_of(op: &Op) -> Option<Span> {
    match *op {
        Op::Read { span, .. }
        | Op::Write { span, .. }
        | Op::WriteVerify { span, .. }
        | Op::Verify { span, .. }
        | Op::OrWrite { span, .. }
        | Op::CompareAndWrite { span, .. }
        | Op::WriteSame { span, .. }
        | Op::Synchronize { span, .. }
        | Op::Prefetch { span, .. } => Some(span),
        _ => None,
    }
}

fn bytes(cdb: &[u8; 16], at: &Range<usize>) -> u64 {
    field(cdb, at.start, 7, at.len() as u32 * 8)
}

/// The usage data of a CDB's command or, if the command has service actions, of its action.
fn usage(cdb: &[u8; 16]) -> Option<Vec<u8>> {
    let ask = |options, action| {
        opcodes::report(&ReportOpcodes { timeouts: false, options, opcode: cdb[0], action, allocation: 0 })
    };
    let data = ask(1, 0).or_else(|_| ask(2, u16::from(cdb[1] & 0x1f))).ok()?;
    (data[1] & 7 == 3).then(|| data[4..].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Bits that are not in the table change nothing; a code that is not in the table is refused as unknown.
    #[test]
    fn the_table_and_the_parser_agree(bytes: [u8; 16], noise: [u8; 16], code in 0..=255_u8, action in 0..32_u8) {
        let mut cdb = bytes;
        cdb[0] = code;
        if matches!(code, 0x5e | 0x5f | 0x83 | 0x84 | 0x9e | 0xa3) {
            cdb[1] = (cdb[1] & 0xe0) | action;
        }
        let parsed = parse(&Cdb::new(&cdb));
        let Some(mut usage) = usage(&cdb) else {
            let fault = match code {
                // Unknown actions are reported when the command is executed.
                0x5e | 0x5f => return Ok(()),
                0x83 | 0x84 | 0x9e | 0xa3 => Fault::field(1),
                _ => Fault::illegal(Code::INVALID_COMMAND_OPERATION_CODE),
            };
            prop_assert_eq!(parsed, Err(fault));
            return Ok(());
        };
        prop_assert!(parsed != Err(Fault::illegal(Code::INVALID_COMMAND_OPERATION_CODE)));
        prop_assert_eq!(Some(usage.len()), cdb_bytes(code));
        usage[0] = 0xff;
        if matches!(code, 0x5e | 0x5f | 0x83 | 0x84 | 0x9e | 0xa3) {
            usage[1] |= 0x1f;
        }
        usage.resize(16, 0);
        let mut noisy = cdb;
        for ((byte, used), noise) in noisy.iter_mut().zip(&usage).zip(noise) {
            *byte = (*byte & used) | (noise & !used);
        }
        prop_assert_eq!(parse(&Cdb::new(&noisy)), parsed, "{:02x?} and {:02x?}", cdb, noisy);
    }

    #[test]
    fn spans_are_where_the_standards_put_them(cdb: [u8; 16], pick in 0..SPANS.len()) {
        let (code, lba, blocks) = &SPANS[pick];
        let mut cdb = cdb;
        (cdb[0], cdb[5]) = (*code, if code >> 5 == 0 { 0 } else { cdb[5] });
        if code >> 5 != 0 {
            cdb[1] &= 0x02;
            let control = cdb_bytes(*code).unwrap() - 1;
            cdb[control] = 0;
        }
        let mut expected = Span { lba: bytes(&cdb, lba), blocks: bytes(&cdb, blocks) };
        if code >> 5 == 0 {
            expected.lba &= 0x1f_ffff;
            expected.blocks = if expected.blocks == 0 { 256 } else { expected.blocks };
        }
        // WRITE SAME's second bit is the obsolete LBDATA.
        match parse(&Cdb::new(&cdb)) {
            Ok(op) => prop_assert_eq!(span_of(&op), Some(expected)),
            Err(fault) => {
                prop_assert!(matches!(code, 0x41 | 0x93) && cdb[1] & 2 != 0);
                prop_assert_eq!(fault, Fault::field(1));
            }
        }
    }

    #[test]
    fn flags_are_where_the_standards_put_them(cdb: [u8; 16], code in prop::sample::select(vec![0x2a_u8, 0x28, 0x8a, 0x88, 0x8b, 0xa8, 0xaa])) {
        let mut cdb = cdb;
        cdb[0] = code;
        let control = cdb_bytes(code).unwrap() - 1;
        let naca = field(&cdb, control, 2, 1) == 1;
        let protect = field(&cdb, 1, 7, 3);
        let expected_fua = field(&cdb, 1, 3, 1) == 1;
        match parse(&Cdb::new(&cdb)) {
            Ok(Op::Read { fua, .. } | Op::Write { fua, .. } | Op::OrWrite { fua, .. }) => {
                prop_assert!(!naca && protect == 0);
                prop_assert_eq!(fua, expected_fua);
            }
            Ok(other) => prop_assert!(false, "{:?}", other),
            Err(fault) if protect != 0 => prop_assert_eq!(fault, Fault::field(1)),
            Err(fault) => {
                prop_assert!(naca);
                prop_assert_eq!(fault, Fault::field(control as u16));
            }
        }
    }

    #[test]
    fn mode_sense_and_reports(cdb: [u8; 16], long: bool) {
        let mut cdb = cdb;
        cdb[0] = if long { 0x5a } else { 0x1a };
        (cdb[5], cdb[9]) = if long { (cdb[5], 0) } else { (0, cdb[9]) };
        let allocation = if long { field(&cdb, 7, 7, 16) } else { field(&cdb, 4, 7, 8) };
        let expected = ModeSense {
            long,
            long_lba: long && field(&cdb, 1, 4, 1) == 1,
            no_descriptors: field(&cdb, 1, 3, 1) == 1,
            control: field(&cdb, 2, 7, 2) as u8,
            page: field(&cdb, 2, 5, 6) as u8,
            subpage: field(&cdb, 3, 7, 8) as u8,
            allocation: allocation as u32,
        };
        prop_assert_eq!(parse(&Cdb::new(&cdb)), Ok(Op::ModeSense(expected)));
        (cdb[0], cdb[1], cdb[11]) = (0xa3, 0x0c, 0);
        let expected = ReportOpcodes {
            timeouts: field(&cdb, 2, 7, 1) == 1,
            options: field(&cdb, 2, 2, 3) as u8,
            opcode: field(&cdb, 3, 7, 8) as u8,
            action: field(&cdb, 4, 7, 16) as u16,
            allocation: field(&cdb, 6, 7, 32) as u32,
        };
        prop_assert_eq!(parse(&Cdb::new(&cdb)), Ok(Op::ReportOpcodes(expected)));
        (cdb[0], cdb[1], cdb[9]) = (0x5f, 0x24, 0);
        let expected = ReserveOut {
            action: 4,
            scope: field(&cdb, 2, 7, 4) as u8,
            kind: field(&cdb, 2, 3, 4) as u8,
            list_bytes: field(&cdb, 5, 7, 32) as u32,
        };
        prop_assert_eq!(parse(&Cdb::new(&cdb)), Ok(Op::ReserveOut(expected)));
    }
}

#[test]
fn the_list_of_codes_is_sorted_and_whole() {
    let ask = |options, opcode, action, timeouts| {
        opcodes::report(&ReportOpcodes { timeouts, options, opcode, action, allocation: 0 })
    };
    let list = ask(0, 0, 0, false).unwrap();
    assert_eq!(u32_at(&list, 0) as usize, list.len() - 4);
    let entries: Vec<&[u8]> = list[4..].chunks(8).collect();
    let keys: Vec<(u8, u16)> = entries.iter().map(|e| (e[0], u16_at(e, 2))).collect();
    assert!(keys.is_sorted());
    for (entry, (code, action)) in entries.iter().zip(&keys) {
        let has_actions = entry[5] & 1 == 1;
        assert_eq!(usize::from(u16_at(entry, 6)), cdb_bytes(*code).unwrap());
        // A command is found either by its code alone or by its code and action, and never the other way.
        assert_eq!(ask(1, *code, 0, false).is_err(), has_actions, "{code:x}");
        assert_eq!(ask(2, *code, *action, false).is_err(), !has_actions, "{code:x}");
        let one = ask(3, *code, *action, true).unwrap();
        assert_eq!(one[1], 0x83);
        assert_eq!(one[4], *code);
        let usage_bytes = usize::from(u16_at(&one, 2));
        assert_eq!(one.len(), 4 + usage_bytes + 12);
        assert_eq!(one[4 + usage_bytes..4 + usage_bytes + 2], [0, 10]);
        if has_actions {
            assert_eq!(u16::from(one[5] & 0x1f), *action);
        }
    }
    let long = ask(0, 0, 0, true).unwrap();
    assert_eq!(long.len() - 4, entries.len() * 20);
    assert!(long[4..].chunks(20).all(|entry| entry[5] & 2 == 2 && entry[8..10] == [0, 10]));
    assert_eq!(ask(1, 0xff, 0, false), Ok(vec![0, 1, 0, 0]));
    assert_eq!(ask(2, 0x9e, 0x1f, false), Ok(vec![0, 1, 0, 0]));
    assert!(ask(4, 0, 0, false).is_err());
}
