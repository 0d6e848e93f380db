//! Parses a CDB into an operation. It looks only at the CDB, not at the state of the unit.
//!
//! The table of commands is [`crate::opcodes`]; this module defines their fields. Bits that the standards
//! reserve are ignored, as the standards require of a target. Fields with unsupported values are refused, and
//! the error names their byte.

use crate::medium::CHUNK_BYTES;
use crate::sense::{Code, Fault};
use crate::task::{Cdb, Expected};
use crate::wire::{bit_at, number_at, u8_at, u16_at, u32_at, u64_at};

/// A run of logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) lba: u64,
    pub(crate) blocks: u64,
}

/// The data with which a command compares the medium (BYTCHK).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// No data: the medium is only read.
    Medium,
    /// The data-out, block by block.
    Data,
    /// Each block with the one block of data-out.
    OneBlock,
}

/// PERSISTENT RESERVE OUT's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReserveOut {
    pub(crate) action: u8,
    pub(crate) scope: u8,
    pub(crate) kind: u8,
    pub(crate) list_bytes: u32,
}

/// MODE SENSE's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModeSense {
    pub(crate) long: bool,
    pub(crate) long_lba: bool,
    pub(crate) no_descriptors: bool,
    pub(crate) control: u8,
    pub(crate) page: u8,
    pub(crate) subpage: u8,
    pub(crate) allocation: u32,
}

/// REPORT SUPPORTED OPERATION CODES' fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReportOpcodes {
    pub(crate) timeouts: bool,
    pub(crate) options: u8,
    pub(crate) opcode: u8,
    pub(crate) action: u16,
    pub(crate) allocation: u32,
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    TestUnitReady,
    RequestSense { descriptors: bool, allocation: u32 },
    Inquiry { vpd: Option<u8>, allocation: u32 },
    ReportLuns { select: u8, allocation: u32 },
    Read { span: Span, fua: bool },
    Write { span: Span, fua: bool },
    WriteVerify { span: Span, check: Check },
    Verify { span: Span, check: Check },
    OrWrite { span: Span, fua: bool },
    CompareAndWrite { span: Span, fua: bool },
    WriteSame { span: Span, unmap: bool, no_data: bool },
    Unmap { list_bytes: u32 },
    ExtendedCopy { list_bytes: u32 },
    CopyStatus { list_id: u8, allocation: u32 },
    CopyParameters { allocation: u32 },
    Synchronize { span: Span, immediate: bool },
    Prefetch { span: Span, immediate: bool },
    ReadCapacity10,
    ReadCapacity16 { allocation: u32 },
    GetLbaStatus { lba: u64, allocation: u32 },
    ReadDefects { long: bool, lists: u8, allocation: u32 },
    ModeSense(ModeSense),
    ModeSelect { long: bool, list_bytes: u32 },
    StartStop { start: bool, flush: bool },
    PreventAllow { prevent: bool },
    SelfTest,
    Reserve,
    Release,
    ReserveIn { action: u8, allocation: u32 },
    ReserveOut(ReserveOut),
    ReportOpcodes(ReportOpcodes),
    ReportFunctions { extended: bool, allocation: u32 },
}

/// The length of a CDB by the operation code's group; `None` for groups of variable or vendor specific length.
pub(crate) fn cdb_bytes(opcode: u8) -> Option<usize> {
    match opcode >> 5 {
        0 => Some(6),
        1 | 2 => Some(10),
        4 => Some(16),
        5 => Some(12),
        _ => None,
    }
}

/// Parses the operation.
pub(crate) fn parse(cdb: &Cdb) -> Result<Op, Fault> {
    let b = cdb.bytes().as_slice();
    let op = match cdb.opcode() {
        0x03 | 0x12 | 0x1d | 0x1e | 0xa0 | 0xa3 | 0x37 | 0xb7 => about_the_unit(b)?,
        0x00 => Op::TestUnitReady,
        0x08 | 0x28 | 0x88 | 0xa8 => {
            let (span, fua) = transfer(b)?;
            Op::Read { span, fua }
        }
        0x0a | 0x2a | 0x8a | 0xaa => {
            let (span, fua) = transfer(b)?;
            Op::Write { span, fua }
        }
        0x8b => {
            let (span, fua) = transfer(b)?;
            Op::OrWrite { span, fua }
        }
        0x2e | 0x8e | 0xae | 0x2f | 0x8f | 0xaf => verify(b)?,
        0x89 => {
            no_protection(b)?;
            let span = Span { lba: u64_at(b, 2), blocks: u64::from(u8_at(b, 13)) };
            Op::CompareAndWrite { span, fua: bit_at(b, 1, 3) }
        }
        0x41 | 0x93 => write_same(b)?,
        0x42 if bit_at(b, 1, 0) => return Err(Fault::field(1)),
        0x42 => Op::Unmap { list_bytes: u32::from(u16_at(b, 7)) },
        0x35 | 0x91 => Op::Synchronize { span: plain_span(b), immediate: bit_at(b, 1, 1) },
        0x34 | 0x90 => Op::Prefetch { span: plain_span(b), immediate: bit_at(b, 1, 1) },
        0x25 if !bit_at(b, 8, 0) && u32_at(b, 2) != 0 => return Err(Fault::field(2)),
        0x25 => Op::ReadCapacity10,
        0x83 if u8_at(b, 1) & 0x1f == 0 => Op::ExtendedCopy { list_bytes: u32_at(b, 10) },
        0x84 if u8_at(b, 1) & 0x1f == 0 => Op::CopyStatus { list_id: u8_at(b, 2), allocation: u32_at(b, 10) },
        0x84 if u8_at(b, 1) & 0x1f == 3 => Op::CopyParameters { allocation: u32_at(b, 10) },
        0x83 | 0x84 => return Err(Fault::field(1)),
        0x9e => service_action_in(b)?,
        0x1a | 0x5a => mode_sense(b),
        0x15 | 0x55 => mode_select(b)?,
        0x1b => start_stop(b)?,
        0x16 | 0x56 => reserve(b).map(|()| Op::Reserve)?,
        0x17 | 0x57 => reserve(b).map(|()| Op::Release)?,
        0x5e => Op::ReserveIn { action: u8_at(b, 1) & 0x1f, allocation: u32::from(u16_at(b, 7)) },
        0x5f => Op::ReserveOut(ReserveOut {
            action: u8_at(b, 1) & 0x1f,
            scope: u8_at(b, 2) >> 4,
            kind: u8_at(b, 2) & 0x0f,
            list_bytes: u32_at(b, 5),
        }),
        _ => return Err(Fault::illegal(Code::INVALID_COMMAND_OPERATION_CODE)),
    };
    // NACA requests an auto-contingent allegiance, and INQUIRY reports that it is not supported (NORMACA).
    let control = cdb_bytes(cdb.opcode()).map_or(0, |len| len.saturating_sub(1));
    if bit_at(b, control, 2) && control != 0 {
        return Err(Fault::field(u16::try_from(control).unwrap_or(0)));
    }
    Ok(op)
}

fn about_the_unit(b: &[u8]) -> Result<Op, Fault> {
    Ok(match u8_at(b, 0) {
        0x03 => Op::RequestSense { descriptors: bit_at(b, 1, 0), allocation: u32::from(u8_at(b, 4)) },
        0x12 if !bit_at(b, 1, 0) && u8_at(b, 2) != 0 => return Err(Fault::field(2)),
        0x12 => {
            Op::Inquiry { vpd: bit_at(b, 1, 0).then(|| u8_at(b, 2)), allocation: u32::from(u16_at(b, 3)) }
        }
        0x1d if !bit_at(b, 1, 2) || u8_at(b, 1) & 0xe3 != 0 => return Err(Fault::field(1)),
        0x1d if u16_at(b, 3) != 0 => return Err(Fault::field(3)),
        0x1d => Op::SelfTest,
        0x1e => Op::PreventAllow { prevent: u8_at(b, 4) & 3 != 0 },
        0x37 => {
            Op::ReadDefects { long: false, lists: u8_at(b, 2) & 0x1f, allocation: u32::from(u16_at(b, 7)) }
        }
        0xb7 => Op::ReadDefects { long: true, lists: u8_at(b, 1) & 0x1f, allocation: u32_at(b, 6) },
        0xa0 => Op::ReportLuns { select: u8_at(b, 2), allocation: u32_at(b, 6) },
        // MAINTENANCE IN
        _ => match u8_at(b, 1) & 0x1f {
            0x0c => Op::ReportOpcodes(ReportOpcodes {
                timeouts: bit_at(b, 2, 7),
                options: u8_at(b, 2) & 7,
                opcode: u8_at(b, 3),
                action: u16_at(b, 4),
                allocation: u32_at(b, 6),
            }),
            0x0d => Op::ReportFunctions { extended: bit_at(b, 2, 7), allocation: u32_at(b, 6) },
            _ => return Err(Fault::field(1)),
        },
    })
}

/// LBA and length of the commands that have no other fields, depending on the CDB's length.
fn plain_span(b: &[u8]) -> Span {
    match cdb_bytes(u8_at(b, 0)) {
        Some(6) => {
            let blocks = u64::from(u8_at(b, 4));
            Span { lba: number_at(b, 1, 3) & 0x1f_ffff, blocks: if blocks == 0 { 256 } else { blocks } }
        }
        Some(10) => Span { lba: u64::from(u32_at(b, 2)), blocks: u64::from(u16_at(b, 7)) },
        Some(12) => Span { lba: u64::from(u32_at(b, 2)), blocks: u64::from(u32_at(b, 6)) },
        _ => Span { lba: u64_at(b, 2), blocks: u64::from(u32_at(b, 10)) },
    }
}

/// Protection information is not supported: RDPROTECT, WRPROTECT, VRPROTECT and ORPROTECT must be 0.
fn no_protection(b: &[u8]) -> Result<(), Fault> {
    if u8_at(b, 1) & 0xe0 != 0 { Err(Fault::field(1)) } else { Ok(()) }
}

/// READ, WRITE and ORWRITE: the span and FUA. DPO, a hint, is ignored.
fn transfer(b: &[u8]) -> Result<(Span, bool), Fault> {
    let span = plain_span(b);
    if cdb_bytes(u8_at(b, 0)) == Some(6) {
        return Ok((span, false));
    }
    no_protection(b)?;
    Ok((span, bit_at(b, 1, 3)))
}

fn verify(b: &[u8]) -> Result<Op, Fault> {
    no_protection(b)?;
    let span = plain_span(b);
    let writes = u8_at(b, 0) & 0x0f == 0x0e;
    let check = match (u8_at(b, 1) >> 1) & 3 {
        0 => Check::Medium,
        1 => Check::Data,
        3 if !writes => Check::OneBlock,
        _ => return Err(Fault::field(1)),
    };
    Ok(if writes { Op::WriteVerify { span, check } } else { Op::Verify { span, check } })
}

fn write_same(b: &[u8]) -> Result<Op, Fault> {
    no_protection(b)?;
    // ANCHOR is not supported, PBDATA and LBDATA are obsolete.
    let flags = u8_at(b, 1);
    if flags & 0x16 != 0 {
        return Err(Fault::field(1));
    }
    let no_data = u8_at(b, 0) == 0x93 && flags & 1 != 0;
    Ok(Op::WriteSame { span: plain_span(b), unmap: flags & 0x08 != 0, no_data })
}

fn service_action_in(b: &[u8]) -> Result<Op, Fault> {
    match u8_at(b, 1) & 0x1f {
        0x10 if !bit_at(b, 14, 0) && u64_at(b, 2) != 0 => Err(Fault::field(2)),
        0x10 => Ok(Op::ReadCapacity16 { allocation: u32_at(b, 10) }),
        0x12 => Ok(Op::GetLbaStatus { lba: u64_at(b, 2), allocation: u32_at(b, 10) }),
        _ => Err(Fault::field(1)),
    }
}

fn mode_sense(b: &[u8]) -> Op {
    let long = u8_at(b, 0) == 0x5a;
    Op::ModeSense(ModeSense {
        long,
        long_lba: long && bit_at(b, 1, 4),
        no_descriptors: bit_at(b, 1, 3),
        control: u8_at(b, 2) >> 6,
        page: u8_at(b, 2) & 0x3f,
        subpage: u8_at(b, 3),
        allocation: if long { u32::from(u16_at(b, 7)) } else { u32::from(u8_at(b, 4)) },
    })
}

fn mode_select(b: &[u8]) -> Result<Op, Fault> {
    let long = u8_at(b, 0) == 0x55;
    // PF must be 1, because vendor specific pages are not supported. SP must be 0, because nothing is saved.
    if u8_at(b, 1) & 0x11 != 0x10 {
        return Err(Fault::field(1));
    }
    let list_bytes = if long { u32::from(u16_at(b, 7)) } else { u32::from(u8_at(b, 4)) };
    Ok(Op::ModeSelect { long, list_bytes })
}

fn start_stop(b: &[u8]) -> Result<Op, Fault> {
    let [power, no_flush, load_eject, start] =
        [u8_at(b, 4) >> 4, u8_at(b, 4) >> 2 & 1, u8_at(b, 4) >> 1 & 1, u8_at(b, 4) & 1];
    match power {
        // No medium can be ejected.
        0 if load_eject == 1 && start == 0 => Err(Fault::field(4)),
        0 => Ok(Op::StartStop { start: start == 1, flush: start == 0 && no_flush == 0 }),
        // ACTIVE, IDLE, STANDBY, LU_CONTROL, FORCE_IDLE_0, FORCE_STANDBY_0: nothing to do.
        1 | 2 | 3 | 7 | 0xa | 0xb => Ok(Op::StartStop { start: true, flush: false }),
        _ => Err(Fault::field(4)),
    }
}

/// RESERVE and RELEASE: only for the whole unit, and only for the initiator itself.
fn reserve(b: &[u8]) -> Result<(), Fault> {
    let unsupported = if cdb_bytes(u8_at(b, 0)) == Some(6) { 0x11 } else { 0x13 };
    if u8_at(b, 1) & unsupported != 0 { Err(Fault::field(1)) } else { Ok(()) }
}

impl Op {
    /// How much data the command moves, with blocks of this size.
    pub(crate) fn expected(&self, block_bytes: u32) -> Expected {
        let bytes = |span: &Span| span.blocks.saturating_mul(u64::from(block_bytes));
        let data_in = |bytes: u64| Expected { data_in_bytes: bytes, ..Expected::default() };
        let data_out = |bytes: u64| Expected { data_out_bytes: bytes, ..Expected::default() };
        let moved = match self {
            Op::Read { span, .. } => data_in(bytes(span)),
            Op::Write { span, .. } | Op::WriteVerify { span, .. } | Op::OrWrite { span, .. } => {
                data_out(bytes(span))
            }
            Op::Verify { span, check: Check::Data } => data_out(bytes(span)),
            Op::Verify { span, check: Check::OneBlock } if span.blocks > 0 => {
                data_out(u64::from(block_bytes))
            }
            Op::CompareAndWrite { span, .. } => data_out(bytes(span).saturating_mul(2)),
            Op::WriteSame { no_data: false, .. } => data_out(u64::from(block_bytes)),
            Op::Unmap { list_bytes }
            | Op::ExtendedCopy { list_bytes }
            | Op::ModeSelect { list_bytes, .. } => data_out(u64::from(*list_bytes)),
            Op::ReserveOut(out) => data_out(u64::from(out.list_bytes)),
            Op::ReadCapacity10 => data_in(8),
            Op::RequestSense { allocation, .. }
            | Op::Inquiry { allocation, .. }
            | Op::ReportLuns { allocation, .. }
            | Op::ReadCapacity16 { allocation }
            | Op::GetLbaStatus { allocation, .. }
            | Op::ReadDefects { allocation, .. }
            | Op::CopyStatus { allocation, .. }
            | Op::CopyParameters { allocation }
            | Op::ReserveIn { allocation, .. }
            | Op::ReportFunctions { allocation, .. } => data_in(u64::from(*allocation)),
            Op::ModeSense(sense) => data_in(u64::from(sense.allocation)),
            Op::ReportOpcodes(report) => data_in(u64::from(report.allocation)),
            _ => Expected::default(),
        };
        let needs_room = matches!(
            self,
            Op::Write { .. }
                | Op::WriteVerify { .. }
                | Op::OrWrite { .. }
                | Op::CompareAndWrite { .. }
                | Op::WriteSame { unmap: false, no_data: false, .. }
                | Op::ExtendedCopy { .. }
        );
        let buffer_bytes = match self {
            // Zero blocks mean everything up to the end.
            Op::WriteSame { span, .. } if span.blocks == 0 => CHUNK_BYTES,
            Op::Verify { span, .. } | Op::WriteVerify { span, .. } | Op::WriteSame { span, .. } => {
                bytes(span).min(CHUNK_BYTES)
            }
            Op::OrWrite { span, .. } | Op::CompareAndWrite { span, .. } => bytes(span),
            Op::ExtendedCopy { .. } => CHUNK_BYTES,
            _ => 0,
        };
        Expected { buffer_bytes, needs_room, ..moved }
    }
}

#[cfg(test)]
mod oracle;
