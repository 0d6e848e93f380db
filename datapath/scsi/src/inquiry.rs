//! INQUIRY: standard data and vital product data.

use crate::copies;
use crate::identity::Initiator;
use crate::sense::Fault;
use crate::unit::LogicalUnit;
use crate::wire::{ascii, len8, len16, len32, put};

/// Code sets of designators.
const BINARY: u8 = 1;
const ASCII: u8 = 2;
const UTF8: u8 = 3;

/// Most characters of a serial number.
pub(crate) const SERIAL_CHARS: usize = 64;

/// Standard INQUIRY data.
pub(crate) fn standard(unit: &LogicalUnit) -> Vec<u8> {
    let mut data = vec![0; 96];
    // Direct access block device, not removable, SPC-4, HISUP, response data format 2.
    put(&mut data, 0, &[0x00, 0x00, 0x06, 0x12, 91]);
    // 3PC; CMDQUE.
    put(&mut data, 5, &[0x08, 0, 0x02]);
    put(&mut data, 8, &ascii(&unit.identity.vendor, 8));
    put(&mut data, 16, &ascii(&unit.identity.product, 16));
    put(&mut data, 32, &ascii(&unit.identity.revision, 4));
    // Version descriptors: SAM-5, SPC-4, SBC-3.
    put(&mut data, 58, &[0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0]);
    data
}

/// Standard INQUIRY data of a LUN without a logical unit: qualifier 011b, type 1Fh.
pub(crate) fn absent() -> Vec<u8> {
    let mut data = vec![0; 36];
    put(&mut data, 0, &[0x7f, 0x00, 0x06, 0x12, 31]);
    put(&mut data, 8, &[b' '; 28]);
    data
}

/// A page of vital product data.
pub(crate) fn vpd(
    unit: &LogicalUnit,
    target: &str,
    initiator: &Initiator,
    page: u8,
) -> Result<Vec<u8>, Fault> {
    let body = match page {
        0x00 => vec![0x00, 0x80, 0x83, 0x86, 0x8f, 0xb0, 0xb1, 0xb2],
        0x80 => serial(unit),
        0x83 => identification(unit, target, initiator),
        0x86 => extended(unit),
        0x8f => copies::page(unit),
        0xb0 => block_limits(unit),
        0xb1 => characteristics(),
        0xb2 => provisioning(),
        _ => return Err(Fault::field(2)),
    };
    let mut data = vec![0x00, page];
    data.extend_from_slice(&len16(body.len()));
    data.extend_from_slice(&body);
    Ok(data)
}

fn serial(unit: &LogicalUnit) -> Vec<u8> {
    let chars = unit.identity.serial.chars().filter(char::is_ascii_graphic).count();
    ascii(&unit.identity.serial, chars.min(SERIAL_CHARS))
}

/// A designator of device identification.
pub(crate) struct Designator {
    pub(crate) code_set: u8,
    /// Association and type, as in the second byte.
    pub(crate) kind: u8,
    pub(crate) bytes: Vec<u8>,
}

/// The designators of a logical unit.
pub(crate) fn designators(unit: &LogicalUnit) -> [Designator; 3] {
    // NAA 3, locally assigned: 60 bits of the UUID.
    let mut naa = unit.identity.uuid.first_chunk::<8>().copied().unwrap_or_default();
    if let Some(first) = naa.first_mut() {
        *first = 0x30 | (*first & 0x0f);
    }
    // A locally assigned UUID.
    let mut uuid = vec![0x10, 0];
    uuid.extend_from_slice(&unit.identity.uuid);
    // T10 vendor identification and serial number.
    let mut vendor = ascii(&unit.identity.vendor, 8);
    vendor.extend_from_slice(&serial(unit));
    [
        Designator { code_set: BINARY, kind: 0x03, bytes: naa.to_vec() },
        Designator { code_set: BINARY, kind: 0x0a, bytes: uuid },
        Designator { code_set: ASCII, kind: 0x01, bytes: vendor },
    ]
}

/// Device identification: of the logical unit, of the port that receives the request, and of the target.
fn identification(unit: &LogicalUnit, target: &str, initiator: &Initiator) -> Vec<u8> {
    let mut data = Vec::new();
    let mut add = |code_set: u8, kind: u8, what: &[u8]| {
        data.extend_from_slice(&[code_set, kind, 0, len8(what.len())]);
        data.extend_from_slice(what);
    };
    for own in designators(unit) {
        add(own.code_set, own.kind, &own.bytes);
    }
    // The relative target port.
    let [high, low] = initiator.target_port.to_be_bytes();
    add(BINARY, 0x14, &[0, 0, high, low]);
    if !initiator.target_port_name.is_empty() {
        add(UTF8, 0x18, &name_string(&initiator.target_port_name));
    }
    if !target.is_empty() {
        add(UTF8, 0x28, &name_string(target));
    }
    data
}

/// A SCSI name string: ends with a null, padded to a multiple of four, at most 252 bytes.
fn name_string(name: &str) -> Vec<u8> {
    let mut end = name.len().min(248);
    while !name.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    let mut bytes = name.as_bytes().get(..end).unwrap_or_default().to_vec();
    bytes.push(0);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Extended INQUIRY data: all task attributes except ACA, and the kind of cache.
fn extended(unit: &LogicalUnit) -> Vec<u8> {
    let mut data = vec![0; 60];
    // HEADSUP, ORDSUP, SIMPSUP.
    put(&mut data, 1, &[0x07]);
    if unit.geometry.volatile_cache {
        // V_SUP.
        put(&mut data, 2, &[0x01]);
    }
    data
}

fn block_limits(unit: &LogicalUnit) -> Vec<u8> {
    let mut data = vec![0; 60];
    let block_bytes = unit.geometry.logical_block_bytes;
    let blocks = |bytes: u32| bytes.checked_div(block_bytes).unwrap_or(0).max(1);
    // WSNZ 0: WRITE SAME of zero blocks means everything up to the end.
    put(&mut data, 1, &[unit.limits.compare_and_write_blocks]);
    let physical = blocks(unit.geometry.physical_block_bytes);
    put(&mut data, 2, &u16::try_from(physical).unwrap_or(u16::MAX).to_be_bytes());
    put(&mut data, 4, &unit.limits.transfer_blocks.to_be_bytes());
    put(&mut data, 8, &blocks(OPTIMAL_TRANSFER_BYTES).to_be_bytes());
    put(&mut data, 12, &unit.limits.transfer_blocks.to_be_bytes());
    // UNMAP: any number of blocks, and as many descriptors as fit into a parameter list.
    put(&mut data, 16, &u32::MAX.to_be_bytes());
    put(&mut data, 20, &UNMAP_DESCRIPTORS.to_be_bytes());
    put(&mut data, 24, &blocks(headwater_block::BLOCK_BYTES).to_be_bytes());
    // UGAVALID, alignment 0.
    put(&mut data, 28, &[0x80, 0, 0, 0]);
    // MAXIMUM WRITE SAME LENGTH 0: no limit. Atomic writes are not supported: zeroes.
    data
}

/// OPTIMAL TRANSFER LENGTH.
const OPTIMAL_TRANSFER_BYTES: u32 = 1 << 20;

/// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT: what a parameter list of 65535 bytes holds.
pub(crate) const UNMAP_DESCRIPTORS: u32 = 4095;

fn characteristics() -> Vec<u8> {
    let mut data = vec![0; 60];
    // MEDIUM ROTATION RATE 1: non-rotating.
    put(&mut data, 0, &[0, 1]);
    data
}

fn provisioning() -> Vec<u8> {
    // LBPU, LBPWS, LBPWS10, LBPRZ 001b; thin provisioned.
    vec![0, 0xe4, 0x02, 0]
}

/// READ CAPACITY (10).
pub(crate) fn capacity10(unit: &LogicalUnit) -> Vec<u8> {
    let last = u32::try_from(unit.blocks.saturating_sub(1)).unwrap_or(u32::MAX);
    let mut data = last.to_be_bytes().to_vec();
    data.extend_from_slice(&unit.geometry.logical_block_bytes.to_be_bytes());
    data
}

/// READ CAPACITY (16).
pub(crate) fn capacity16(unit: &LogicalUnit) -> Vec<u8> {
    let mut data = vec![0; 32];
    put(&mut data, 0, &unit.blocks.saturating_sub(1).to_be_bytes());
    put(&mut data, 8, &unit.geometry.logical_block_bytes.to_be_bytes());
    let per_physical =
        unit.geometry.physical_block_bytes.checked_div(unit.geometry.logical_block_bytes).unwrap_or(1);
    let exponent = u8::try_from(per_physical.max(1).trailing_zeros()).unwrap_or(0) & 0x0f;
    // LBPME, LBPRZ, lowest aligned block 0.
    put(&mut data, 13, &[exponent, 0xc0]);
    data
}

/// READ DEFECT DATA: there are none.
pub(crate) fn defects(long: bool, lists: u8) -> Vec<u8> {
    let head = [0, lists];
    let mut data = head.to_vec();
    data.resize(if long { 8 } else { 4 }, 0);
    data
}

/// REPORT LUNS.
pub(crate) fn luns(numbers: impl Iterator<Item = u16>, select: u8) -> Result<Vec<u8>, Fault> {
    let list: Vec<u8> = match select {
        0 | 2 => numbers.flat_map(|n| crate::task::Lun::single(n).0).collect(),
        // Well known logical units: none.
        1 => Vec::new(),
        _ => return Err(Fault::field(2)),
    };
    let mut data = len32(list.len()).to_vec();
    data.extend_from_slice(&[0; 4]);
    data.extend_from_slice(&list);
    Ok(data)
}

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS: ABORT TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET, TARGET
/// RESET.
pub(crate) fn functions(extended: bool) -> Vec<u8> {
    let mut data = vec![0xda, 0, 0, 0];
    if extended {
        data.resize(16, 0);
        put(&mut data, 3, &[0x0c]);
    }
    data
}
