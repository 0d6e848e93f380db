//! Properties that must hold for every command that an initiator can send; used by the fuzzers in `fuzz/` and
//! by a bounded test.
//!
//! `scsi_parameters` is in `parameters`: commands with their data-out, compared with a model of the unit
//! (`model`, `registrations`). `scsi_cdb` is here. It parses each command twice: with [`crate::cdb::parse`],
//! and with a second parser that follows the figures of SPC-4 and SBC-3 with their numbering of bits. The two
//! must agree on the operation, on each of its fields, and on the byte because of which a command is refused.
//! The table that initiators see (REPORT SUPPORTED OPERATION CODES) must agree with both.

mod model;
mod parameters;
mod registrations;

pub use parameters::scsi_parameters;

use crate::cdb::{Check, ModeSense, Op, ReportOpcodes, ReserveOut, Span, parse};
use crate::opcodes;
use crate::sense::{Code, Fault};
use crate::task::Cdb;

pub use headwater_block::fuzzing::Oracle;

/// All checks, each with a name and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let commands = [
        [0x2a, 0x08, 0, 0, 0, 9, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0],
        [0x08, 0x1f, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0x89, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 5, 0, 0],
        [0x93, 0x09, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0, 0, 0, 0],
        [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0],
        [0xa3, 0x0c, 0x83, 0x5e, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        [0x5f, 0x03, 0x15, 0, 0, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0],
        [0x5a, 0x18, 0x08, 0xff, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        [0x1b, 1, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0xaf, 0x06, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0],
    ];
    vec![
        ("scsi_cdb", scsi_cdb, commands.map(|cdb| [cdb, [0xa5; 16]].concat()).to_vec()),
        ("scsi_parameters", scsi_parameters, parameters::samples()),
    ]
}

/// A CDB with its bits numbered as in the standards: byte, and bit of it, 7 being the highest.
struct Figure([u8; 16]);

impl Figure {
    /// `bits` bits from `bit` of `byte` on.
    fn field(&self, byte: u32, bit: u32, bits: u32) -> u64 {
        let whole = u128::from_be_bytes(self.0);
        let left = byte * 8 + (7 - bit);
        u64::try_from(whole << left >> (128 - bits)).unwrap_or(u64::MAX)
    }

    fn bytes(&self, first: u32, count: u32) -> u64 {
        self.field(first, 7, count * 8)
    }

    fn number(&self, first: u32, count: u32) -> u32 {
        u32::try_from(self.bytes(first, count)).unwrap_or(u32::MAX)
    }

    fn byte(&self, at: u32) -> u8 {
        u8::try_from(self.bytes(at, 1)).unwrap_or(u8::MAX)
    }

    fn small(&self, byte: u32, bit: u32, bits: u32) -> u8 {
        u8::try_from(self.field(byte, bit, bits)).unwrap_or(u8::MAX)
    }

    fn flag(&self, byte: u32, bit: u32) -> bool {
        self.field(byte, bit, 1) == 1
    }

    fn span(&self, lba: (u32, u32), blocks: (u32, u32)) -> Span {
        Span { lba: self.bytes(lba.0, lba.1), blocks: self.bytes(blocks.0, blocks.1) }
    }
}

/// First byte and length of a field.
type Place = (u32, u32);

/// Length of the CDB, and the positions of its address and its number of blocks, for the codes that have
/// them.
fn extent(code: u8) -> Option<(u32, Place, Place)> {
    Some(match code {
        0x28 | 0x2a | 0x2e | 0x2f | 0x34 | 0x35 | 0x41 => (10, (2, 4), (7, 2)),
        0xa8 | 0xaa | 0xae | 0xaf => (12, (2, 4), (6, 4)),
        0x88 | 0x8a | 0x8b | 0x8e | 0x8f | 0x90 | 0x91 | 0x93 => (16, (2, 8), (10, 4)),
        0x89 => (16, (2, 8), (13, 1)),
        _ => return None,
    })
}

/// A command to the medium: the operation and its blocks.
fn medium(f: &Figure, code: u8, span: Span) -> Result<Op, Fault> {
    let protect = f.field(1, 7, 3) != 0;
    let (fua, immediate) = (f.flag(1, 3), f.flag(1, 1));
    match code {
        0x34 | 0x90 => return Ok(Op::Prefetch { span, immediate }),
        0x35 | 0x91 => return Ok(Op::Synchronize { span, immediate }),
        _ if protect => return Err(Fault::field(1)),
        _ => {}
    }
    let bytchk = f.field(1, 2, 2);
    Ok(match code {
        0x28 | 0x88 | 0xa8 => Op::Read { span, fua },
        0x2a | 0x8a | 0xaa => Op::Write { span, fua },
        0x8b => Op::OrWrite { span, fua },
        0x89 => Op::CompareAndWrite { span, fua },
        0x2e | 0x8e | 0xae => match bytchk {
            0 => Op::WriteVerify { span, check: Check::Medium },
            1 => Op::WriteVerify { span, check: Check::Data },
            _ => return Err(Fault::field(1)),
        },
        0x2f | 0x8f | 0xaf => match bytchk {
            0 => Op::Verify { span, check: Check::Medium },
            1 => Op::Verify { span, check: Check::Data },
            3 => Op::Verify { span, check: Check::OneBlock },
            _ => return Err(Fault::field(1)),
        },
        // WRITE SAME: neither ANCHOR nor the obsolete PBDATA and LBDATA; NDOB in the long form only.
        _ if f.flag(1, 4) || f.flag(1, 2) || f.flag(1, 1) => return Err(Fault::field(1)),
        _ => Op::WriteSame { span, unmap: f.flag(1, 3), no_data: code == 0x93 && f.flag(1, 0) },
    })
}

/// The operation that the standards define for a CDB, and the length of the CDB.
fn expected(cdb: [u8; 16]) -> Result<(Op, u32), Fault> {
    let f = Figure(cdb);
    let code = f.byte(0);
    if let Some((len, lba, blocks)) = extent(code) {
        return Ok((medium(&f, code, f.span(lba, blocks))?, len));
    }
    let field = |byte| Err(Fault::field(byte));
    let action = f.field(1, 4, 5);
    let op = match code {
        0x00 => Op::TestUnitReady,
        0x03 => Op::RequestSense { descriptors: f.flag(1, 0), allocation: f.number(4, 1) },
        0x08 | 0x0a => {
            let blocks = if f.byte(4) == 0 { 256 } else { f.bytes(4, 1) };
            let span = Span { lba: f.field(1, 4, 21), blocks };
            if code == 0x08 { Op::Read { span, fua: false } } else { Op::Write { span, fua: false } }
        }
        0x12 if !f.flag(1, 0) && f.byte(2) != 0 => return field(2),
        0x12 => Op::Inquiry { vpd: f.flag(1, 0).then(|| f.byte(2)), allocation: f.number(3, 2) },
        0x15 | 0x55 if !f.flag(1, 4) || f.flag(1, 0) => return field(1),
        0x15 => Op::ModeSelect { long: false, list_bytes: f.number(4, 1) },
        0x55 => Op::ModeSelect { long: true, list_bytes: f.number(7, 2) },
        0x16 | 0x17 if f.flag(1, 4) || f.flag(1, 0) => return field(1),
        0x56 | 0x57 if f.flag(1, 4) || f.flag(1, 1) || f.flag(1, 0) => return field(1),
        0x16 | 0x56 => Op::Reserve,
        0x17 | 0x57 => Op::Release,
        0x1a | 0x5a => Op::ModeSense(ModeSense {
            long: code == 0x5a,
            long_lba: code == 0x5a && f.flag(1, 4),
            no_descriptors: f.flag(1, 3),
            control: f.small(2, 7, 2),
            page: f.small(2, 5, 6),
            subpage: f.byte(3),
            allocation: if code == 0x5a { f.number(7, 2) } else { f.number(4, 1) },
        }),
        0x1b => start_stop(&f)?,
        // SELF-TEST CODE 0, not PF's reserved neighbour nor the unit or device off line; no parameters.
        0x1d if f.field(1, 7, 3) != 0 || !f.flag(1, 2) || f.flag(1, 1) || f.flag(1, 0) => return field(1),
        0x1d if f.bytes(3, 2) != 0 => return field(3),
        0x1d => Op::SelfTest,
        0x1e => Op::PreventAllow { prevent: f.field(4, 1, 2) != 0 },
        0x25 if !f.flag(8, 0) && f.bytes(2, 4) != 0 => return field(2),
        0x25 => Op::ReadCapacity10,
        0x37 => Op::ReadDefects { long: false, lists: f.small(2, 4, 5), allocation: f.number(7, 2) },
        0xb7 => Op::ReadDefects { long: true, lists: f.small(1, 4, 5), allocation: f.number(6, 4) },
        0x42 if f.flag(1, 0) => return field(1),
        0x42 => Op::Unmap { list_bytes: f.number(7, 2) },
        0x5e => Op::ReserveIn { action: f.small(1, 4, 5), allocation: f.number(7, 2) },
        0x5f => Op::ReserveOut(ReserveOut {
            action: f.small(1, 4, 5),
            scope: f.small(2, 7, 4),
            kind: f.small(2, 3, 4),
            list_bytes: f.number(5, 4),
        }),
        0x83 if action == 0 => Op::ExtendedCopy { list_bytes: f.number(10, 4) },
        0x84 if action == 0 => Op::CopyStatus { list_id: f.byte(2), allocation: f.number(10, 4) },
        0x84 if action == 3 => Op::CopyParameters { allocation: f.number(10, 4) },
        0x9e if action == 0x10 && !f.flag(14, 0) && f.bytes(2, 8) != 0 => return field(2),
        0x9e if action == 0x10 => Op::ReadCapacity16 { allocation: f.number(10, 4) },
        0x9e if action == 0x12 => Op::GetLbaStatus { lba: f.bytes(2, 8), allocation: f.number(10, 4) },
        0xa0 => Op::ReportLuns { select: f.byte(2), allocation: f.number(6, 4) },
        0xa3 if action == 0x0c => Op::ReportOpcodes(ReportOpcodes {
            timeouts: f.flag(2, 7),
            options: f.small(2, 2, 3),
            opcode: f.byte(3),
            action: u16::try_from(f.bytes(4, 2)).unwrap_or(u16::MAX),
            allocation: f.number(6, 4),
        }),
        0xa3 if action == 0x0d => Op::ReportFunctions { extended: f.flag(2, 7), allocation: f.number(6, 4) },
        0x83 | 0x84 | 0x9e | 0xa3 => return field(1),
        _ => return Err(Fault::illegal(Code::INVALID_COMMAND_OPERATION_CODE)),
    };
    let len = match code {
        0x00..=0x1f => 6,
        0x20..=0x5f => 10,
        0xa0..=0xbf => 12,
        _ => 16,
    };
    Ok((op, len))
}

/// Like [`expected`], but refuses NACA, which is not supported.
fn decoded(cdb: [u8; 16]) -> Result<Op, Fault> {
    let (op, len) = expected(cdb)?;
    let naca = Figure(cdb).flag(len - 1, 2);
    if naca { Err(Fault::field(u16::try_from(len - 1).unwrap_or(0))) } else { Ok(op) }
}

fn start_stop(f: &Figure) -> Result<Op, Fault> {
    let (no_flush, load_eject, start) = (f.flag(4, 2), f.flag(4, 1), f.flag(4, 0));
    match f.field(4, 7, 4) {
        // START_VALID; nothing can be ejected.
        0 if load_eject && !start => Err(Fault::field(4)),
        0 => Ok(Op::StartStop { start, flush: !start && !no_flush }),
        1 | 2 | 3 | 7 | 10 | 11 => Ok(Op::StartStop { start: true, flush: false }),
        _ => Err(Fault::field(4)),
    }
}

/// The usage data that initiators see for a command: one bit for each bit of the CDB that is evaluated.
fn usage(cdb: [u8; 16]) -> Option<Vec<u8>> {
    let [opcode, second, ..] = cdb;
    let ask = |options, action| {
        opcodes::report(&ReportOpcodes { timeouts: false, options, opcode, action, allocation: 0 })
    };
    let data = ask(1, 0).or_else(|_| ask(2, u16::from(second & 0x1f))).ok()?;
    let is_supported = data.get(1)? & 7 == 3;
    data.get(4..).filter(|_| is_supported).map(<[u8]>::to_vec)
}

/// A CDB in the first 16 bytes; the next 16 bytes are noise for the bits that are not evaluated.
pub fn scsi_cdb(bytes: &[u8]) {
    let mut given = [[0u8; 16]; 2];
    for (to, from) in given.iter_mut().flatten().zip(bytes) {
        *to = *from;
    }
    let [cdb, noise] = given;
    let parsed = parse(&Cdb::new(&cdb));
    assert_eq!(parsed, decoded(cdb), "{cdb:02x?}");
    if let Ok(op) = parsed {
        let data = op.expected(512);
        assert!(data.data_in_bytes == 0 || data.data_out_bytes == 0, "{cdb:02x?} moves data both ways");
    }

    // Bits that are not in the table change nothing, and a command that is not in the table is refused.
    let Some(mut usage) = usage(cdb) else {
        let has_action = matches!(cdb[0], 0x5e | 0x5f);
        assert!(parsed.is_err() || has_action, "{cdb:02x?} is executed, but not listed");
        return;
    };
    usage.resize(16, 0);
    let mut noisy = cdb;
    for (index, byte) in noisy.iter_mut().enumerate() {
        let actions = matches!(cdb[0], 0x5e | 0x5f | 0x83 | 0x84 | 0x9e | 0xa3);
        let used = match index {
            0 => 0xff,
            1 if actions => usage[1] | 0x1f,
            _ => usage[index],
        };
        *byte = (*byte & used) | (noise[index] & !used);
    }
    assert_eq!(parse(&Cdb::new(&noisy)), parsed, "{cdb:02x?} and {noisy:02x?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small version of the fuzzers' work.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }

    /// Each code with bytes that are mostly zero, so that most of them pass the checks.
    #[test]
    fn every_code_is_read_as_the_standards_say() {
        let mut rng = headwater_testkit::Rng::new(1);
        for code in 0..=255u8 {
            for _ in 0..400 {
                let mut bytes = rng.bytes(32);
                let keep = rng.next_u64();
                for (index, byte) in bytes.iter_mut().take(16).enumerate() {
                    *byte &= if keep >> (index * 4) & 3 == 0 { 0xff } else { 0 };
                }
                bytes[0] = code;
                scsi_cdb(&bytes);
            }
        }
    }
}
