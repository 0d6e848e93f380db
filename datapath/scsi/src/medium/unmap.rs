//! UNMAP: a list of runs, each discarded.

use std::collections::VecDeque;

use headwater_block::{ByteRange, Request};

use super::Plan;
use crate::cdb::Span;
use crate::inquiry::UNMAP_DESCRIPTORS;
use crate::queue::Hold;
use crate::run::{Buffers, Step, Work};
use crate::sense::{Code, Fault};
use crate::unit::LogicalUnit;
use crate::wire::{u16_at, u32_at, u64_at};

/// Length of the header, and of a descriptor.
const HEAD_BYTES: usize = 8;
const DESCRIPTOR_BYTES: usize = 16;

/// Checks the whole list before anything is unmapped.
pub(super) fn plan(unit: &LogicalUnit, list: &[u8]) -> Result<Option<Plan>, Fault> {
    if list.is_empty() {
        return Ok(None);
    }
    let Some(descriptors) = list.get(HEAD_BYTES..) else {
        return Err(Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR));
    };
    // What the header announces and what was sent may differ; what is in both counts, whole descriptors only.
    let announced = usize::from(u16_at(list, 2));
    let descriptors = descriptors.get(..announced.min(descriptors.len())).unwrap_or_default();
    if descriptors.len() / DESCRIPTOR_BYTES > usize::try_from(UNMAP_DESCRIPTORS).unwrap_or(usize::MAX) {
        return Err(Fault::parameter(2));
    }
    let mut ranges = VecDeque::new();
    for descriptor in descriptors.chunks_exact(DESCRIPTOR_BYTES) {
        let span = Span { lba: u64_at(descriptor, 0), blocks: u64::from(u32_at(descriptor, 8)) };
        let range = unit.range(span)?;
        if !range.is_empty() {
            ranges.push_back(range);
        }
    }
    let start = ranges.iter().map(ByteRange::offset).min().unwrap_or(0);
    let end = ranges.iter().map(ByteRange::end).max().unwrap_or(0);
    let Some(hull) = ByteRange::new(start, end.saturating_sub(start)).filter(|hull| !hull.is_empty()) else {
        return Ok(None);
    };
    let work = Unmap { ranges, flush: unit.must_be_durable(false) };
    Ok(Some(Plan { hold: Hold::Changes(hull), work: Box::new(work), immediate: false }))
}

struct Unmap {
    ranges: VecDeque<ByteRange>,
    /// At the end, where each change is to be durable when it is answered.
    flush: bool,
}

impl Work for Unmap {
    fn step(&mut self, _: &mut Buffers, _: Option<Vec<u8>>) -> Step {
        match self.ranges.pop_front() {
            Some(range) => Step::Submit(Request::Discard { range }),
            None if std::mem::take(&mut self.flush) => Step::Submit(Request::Flush),
            None => Step::End(Ok(())),
        }
    }

    fn is_single(&self) -> bool {
        self.ranges.is_empty() && !self.flush
    }

    fn name(&self) -> (&'static str, bool) {
        ("UNMAP", true)
    }
}
