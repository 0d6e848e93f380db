//! The SCSI command UNMAP: checks its parameter list, then discards each listed range in order, in parts of at most 1 GiB.

use std::collections::VecDeque;

use headwater_block::{ByteRange, Request};

use super::{CLEAR_BYTES, Plan, broken, split_chunk};
use crate::cdb::Span;
use crate::inquiry::UNMAP_DESCRIPTORS;
use crate::queue::Hold;
use crate::run::{Buffers, ErrorContext, Step, Work};
use crate::sense::{Code, Fault};
use crate::unit::LogicalUnit;
use crate::wire::{u16_at, u32_at, u64_at};

/// Length of the header of the parameter list.
const HEAD_BYTES: usize = 8;
/// Length of a block descriptor, which names one range.
const DESCRIPTOR_BYTES: usize = 16;

/// Checks the whole list before anything is unmapped.
pub(super) fn plan(unit: &LogicalUnit, list: &[u8]) -> Result<Option<Plan>, Fault> {
    if list.is_empty() {
        return Ok(None);
    }
    let Some(descriptors) = list.get(HEAD_BYTES..) else {
        return Err(Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR));
    };
    // The header may announce another length than the list has. Only whole descriptors within both lengths
    // count.
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
    // The smallest range that contains all listed ranges. Other commands wait for it as a whole.
    let Some(enclosing) =
        ByteRange::new(start, end.saturating_sub(start)).filter(|enclosing| !enclosing.is_empty())
    else {
        return Ok(None);
    };
    let work = Unmap { ranges, done: 0, flush: unit.must_be_durable(false) };
    Ok(Some(Plan { hold: Hold::Changes(enclosing), work: Box::new(work), immediate: false }))
}

struct Unmap {
    /// The ranges that are not completely unmapped yet.
    ranges: VecDeque<ByteRange>,
    /// How many bytes of the first range are unmapped.
    done: u64,
    /// A flush at the end, if each change has to be durable before its answer.
    flush: bool,
}

impl Work for Unmap {
    fn step(&mut self, _: &mut Buffers, _: Option<Vec<u8>>) -> Step {
        let Some(first) = self.ranges.front() else {
            return if std::mem::take(&mut self.flush) {
                Step::Submit(Request::Flush)
            } else {
                Step::End(Ok(()))
            };
        };
        let Some(range) = split_chunk(*first, self.done, CLEAR_BYTES) else {
            return Step::End(Err(broken()));
        };
        self.done = self.done.saturating_add(range.len());
        if self.done >= first.len() {
            self.ranges.pop_front();
            self.done = 0;
        }
        Step::Submit(Request::Discard { range })
    }

    fn is_single(&self) -> bool {
        self.ranges.is_empty() && !self.flush
    }

    fn error_context(&self) -> ErrorContext {
        ErrorContext { name: "UNMAP", is_write_error: true }
    }
}
