//! EXTENDED COPY (LID1) within one logical unit: the parameter list, and the answers of RECEIVE COPY RESULTS.
//!
//! Two descriptors of SPC-4 are supported: the identification descriptor (E4h) names the unit by any of its
//! designators, and the block to block descriptor (02h) describes a run to copy. Copying between units is not
//! supported: a descriptor of another unit counts as that of an unreachable device.

use std::collections::VecDeque;

use headwater_block::ByteRange;
use parking_lot::Mutex;

use crate::cdb::Span;
use crate::inquiry;
use crate::sense::{Code, Fault, SenseKey};
use crate::unit::LogicalUnit;
use crate::wire::{bit_at, len16, len32, put, u8_at, u16_at, u32_at, u64_at};

const TARGETS: usize = 16;
const SEGMENTS: usize = 64;
const HEAD_BYTES: usize = 16;
const TARGET_BYTES: usize = 32;
const SEGMENT_BYTES: usize = 28;
const LIST_BYTES: usize = TARGETS * TARGET_BYTES + SEGMENTS * SEGMENT_BYTES;
const IDENTIFICATION: u8 = 0xe4;
const BLOCK_TO_BLOCK: u8 = 0x02;
/// A segment's length is a 16-bit number of blocks.
const SEGMENT_BLOCKS: u32 = 0xffff;

/// One run to copy; source and destination have the same length, which is not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) from: ByteRange,
    pub(crate) to: ByteRange,
}

/// The contents of a parameter list.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The list identifier; `None` if the copy need not be recorded.
    pub(crate) list_id: Option<u8>,
    pub(crate) segments: Vec<Segment>,
}

/// Parses a parameter list; `None` for an empty one.
pub(crate) fn parse(unit: &LogicalUnit, list: &[u8]) -> Result<Option<Request>, Fault> {
    if list.is_empty() {
        return Ok(None);
    }
    let too_short = Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR);
    let Some(descriptors) = list.get(HEAD_BYTES..) else { return Err(too_short) };
    let target_bytes = usize::from(u16_at(list, 2));
    let segment_bytes = usize::try_from(u32_at(list, 8)).unwrap_or(usize::MAX);
    if u32_at(list, 12) != 0 {
        return Err(Fault::parameter(12));
    }
    if target_bytes.saturating_add(segment_bytes) > LIST_BYTES {
        return Err(too_short);
    }
    let (Some(targets), Some(segments)) = (
        descriptors.get(..target_bytes),
        descriptors.get(target_bytes..target_bytes.saturating_add(segment_bytes)),
    ) else {
        return Err(too_short);
    };
    let is_known = check_targets(unit, targets)?;
    let segments = parse_segments(unit, segments, &is_known)?;
    let usage = (u8_at(list, 1) >> 3) & 3;
    Ok(Some(Request { list_id: (usage != 3).then(|| u8_at(list, 0)), segments }))
}

/// Which of the target descriptors name this unit.
fn check_targets(unit: &LogicalUnit, targets: &[u8]) -> Result<Vec<bool>, Fault> {
    let mut known = Vec::new();
    for target in targets.chunks(TARGET_BYTES) {
        if u8_at(target, 0) != IDENTIFICATION {
            return Err(Fault::illegal(Code::UNSUPPORTED_TARGET_DESCRIPTOR));
        }
        if target.len() < TARGET_BYTES {
            return Err(Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR));
        }
        if known.len() >= TARGETS {
            return Err(Fault::illegal(Code::TOO_MANY_TARGET_DESCRIPTORS));
        }
        let designator = target.get(8..).and_then(|rest| rest.get(..usize::from(u8_at(target, 7))));
        let kind = u8_at(target, 5) & 0x3f;
        let is_null = bit_at(target, 1, 5);
        let is_ours =
            |what: &[u8]| inquiry::designators(unit).iter().any(|own| own.kind == kind && own.bytes == what);
        known.push(!is_null && designator.is_some_and(is_ours));
    }
    Ok(known)
}

fn parse_segments(unit: &LogicalUnit, segments: &[u8], known: &[bool]) -> Result<Vec<Segment>, Fault> {
    let aborted = |code: Code| Fault::new(SenseKey::CopyAborted, code);
    let mut parsed = Vec::new();
    for (number, segment) in segments.chunks(SEGMENT_BYTES).enumerate() {
        if u8_at(segment, 0) != BLOCK_TO_BLOCK {
            return Err(Fault::illegal(Code::UNSUPPORTED_SEGMENT_DESCRIPTOR));
        }
        if number >= SEGMENTS {
            return Err(Fault::illegal(Code::TOO_MANY_SEGMENT_DESCRIPTORS));
        }
        if segment.len() < SEGMENT_BYTES {
            return Err(Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR));
        }
        for index in [u16_at(segment, 4), u16_at(segment, 6)] {
            match known.get(usize::from(index)) {
                Some(true) => {}
                Some(false) => return Err(aborted(Code::COPY_TARGET_NOT_REACHABLE)),
                None => return Err(aborted(Code::UNREACHABLE_COPY_TARGET)),
            }
        }
        let blocks = u64::from(u16_at(segment, 10));
        let range = |at| {
            let span = Span { lba: u64_at(segment, at), blocks };
            unit.range(span).map_err(|_| aborted(Code::NONE))
        };
        let (from, to) = (range(12)?, range(20)?);
        if !from.is_empty() {
            parsed.push(Segment { from, to });
        }
    }
    Ok(parsed)
}

/// The state of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Running,
    Done,
    Failed,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    list_id: u8,
    progress: Progress,
    segments: u16,
    bytes: u64,
}

/// The most copies that a nexus can ask about; older records are dropped.
const RECORDS: usize = 16;

/// The copies of a nexus, by list identifier.
#[derive(Debug, Default)]
pub(crate) struct Copies(Mutex<VecDeque<Record>>);

impl Copies {
    /// Records the state of a copy.
    pub(crate) fn note(&self, list_id: u8, progress: Progress, segments: usize, bytes: u64) {
        let mut records = self.0.lock();
        records.retain(|record| record.list_id != list_id);
        if records.len() >= RECORDS {
            records.pop_front();
        }
        let segments = u16::try_from(segments).unwrap_or(u16::MAX);
        records.push_back(Record { list_id, progress, segments, bytes });
    }

    /// COPY STATUS.
    pub(crate) fn status(&self, list_id: u8) -> Result<Vec<u8>, Fault> {
        let records = self.0.lock();
        let Some(record) = records.iter().find(|record| record.list_id == list_id) else {
            return Err(Fault::field(2));
        };
        let progress = match record.progress {
            Progress::Running => 0,
            Progress::Done => 1,
            Progress::Failed => 2,
        };
        let mut data = vec![0; 12];
        put(&mut data, 0, &[0, 0, 0, 8, progress]);
        put(&mut data, 5, &record.segments.to_be_bytes());
        // In KiB.
        put(&mut data, 7, &[1]);
        put(&mut data, 8, &u32::try_from(record.bytes / 1024).unwrap_or(u32::MAX).to_be_bytes());
        Ok(data)
    }
}

fn granularity(unit: &LogicalUnit) -> u8 {
    u8::try_from(unit.geometry.logical_block_bytes.max(1).trailing_zeros()).unwrap_or(0)
}

fn segment_bytes(unit: &LogicalUnit) -> [u8; 4] {
    SEGMENT_BLOCKS.saturating_mul(unit.geometry.logical_block_bytes).to_be_bytes()
}

/// OPERATING PARAMETERS.
pub(crate) fn parameters(unit: &LogicalUnit) -> Vec<u8> {
    let mut data = vec![0; 46];
    put(&mut data, 0, &[0, 0, 0, 42]);
    // SNLID: a list identifier need not be given.
    put(&mut data, 4, &[1]);
    put(&mut data, 8, &len16(TARGETS));
    put(&mut data, 10, &len16(SEGMENTS));
    put(&mut data, 12, &len32(LIST_BYTES));
    put(&mut data, 16, &segment_bytes(unit));
    put(&mut data, 34, &[0, 1, 1, granularity(unit)]);
    put(&mut data, 43, &[2, BLOCK_TO_BLOCK, IDENTIFICATION]);
    data
}

/// The third-party copy page of the vital product data.
pub(crate) fn page(unit: &LogicalUnit) -> Vec<u8> {
    let mut parameters = [0; 28];
    put(&mut parameters, 4, &len16(TARGETS));
    put(&mut parameters, 6, &len16(SEGMENTS));
    put(&mut parameters, 8, &len32(LIST_BYTES));
    let mut general = [0; 32];
    put(&mut general, 3, &[1, 0, 0, 0, 1]);
    put(&mut general, 8, &segment_bytes(unit));
    put(&mut general, 12, &[granularity(unit)]);
    let descriptors: [(u16, &[u8]); 5] = [
        // Commands: EXTENDED COPY (LID1); COPY STATUS and OPERATING PARAMETERS.
        (0x0001, &[7, 0x83, 1, 0x00, 0x84, 2, 0x00, 0x03]),
        (0x0004, &parameters),
        (0x0008, &[2, BLOCK_TO_BLOCK, IDENTIFICATION, 0]),
        // Identifiers are supported only in descriptors.
        (0x000c, &[0, 0, 0, 0]),
        (0x8001, &general),
    ];
    let mut data = Vec::new();
    for (kind, body) in descriptors {
        data.extend_from_slice(&kind.to_be_bytes());
        data.extend_from_slice(&len16(body.len()));
        data.extend_from_slice(body);
    }
    data
}
