//! Commands that read or write the medium: their checks and their steps.

mod compare;
mod copy;
mod fill;
mod simple;
mod unmap;
mod verify;

use std::sync::Arc;

use headwater_block::ByteRange;

use crate::cdb::{Check, Op, Span};
use crate::link::Link;
use crate::queue::Hold;
use crate::run::Work;
use crate::sense::{Code, Fault};
use crate::unit::LogicalUnit;

/// How many bytes such a command reads and compares at a time.
pub(crate) const CHUNK_BYTES: u64 = 1 << 20;

/// How many bytes are cleared at a time, so that a task that clears a whole disk can be aborted.
const CLEAR_BYTES: u64 = 1 << 30;

/// A command that was checked.
pub(crate) struct Plan {
    pub(crate) hold: Hold,
    pub(crate) work: Box<dyn Work>,
    /// Answer before the work is done (IMMED).
    pub(crate) immediate: bool,
}

/// The transport's data for a command.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub(crate) data_out: &'a [u8],
    pub(crate) announced_bytes: u64,
}

impl Given<'_> {
    /// Checks that at least so many bytes were sent; more bytes are ignored.
    fn at_least(&self, bytes: u64) -> Result<(), Fault> {
        if u64::try_from(self.data_out.len()).unwrap_or(0) < bytes {
            return Err(Fault::illegal(Code::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT));
        }
        Ok(())
    }

    /// Checks that the initiator announced exactly this length. If parts of the data have different meanings,
    /// another length would be a misunderstanding.
    fn exactly(&self, bytes: u64) -> Result<(), Fault> {
        self.at_least(bytes)?;
        if self.announced_bytes != bytes {
            return Err(Fault::illegal(Code::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT));
        }
        Ok(())
    }
}

/// The range of a permitted write. [`crate::Nexus::try_now`] and this module check it in the same way. If the
/// initiator announced less data than the CDB requires, the range covers the whole blocks that were sent, and
/// the transport reports the rest.
#[inline]
pub(crate) fn check_write(unit: &LogicalUnit, span: Span, given: Given<'_>) -> Result<ByteRange, Fault> {
    unit.check_writable()?;
    let range = unit.transfer_range(span)?;
    let there = u64::try_from(given.data_out.len()).unwrap_or(0);
    if there >= range.len() {
        return Ok(range);
    }
    given.at_least(given.announced_bytes)?;
    let block_bytes = u64::from(unit.geometry.logical_block_bytes);
    let whole = there.saturating_sub(there % block_bytes);
    ByteRange::new(range.offset(), whole).ok_or(Fault::illegal(Code::LBA_OUT_OF_RANGE))
}

/// The steps of a command; `None`: nothing to do, or the command does not concern the medium.
pub(crate) fn plan(link: &Arc<Link>, op: &Op, given: Given<'_>) -> Result<Option<Plan>, Fault> {
    let unit = &*link.unit;
    let plan = |hold: Hold, work: Box<dyn Work>| Some(Plan { hold, work, immediate: false });
    Ok(match *op {
        Op::Read { span, fua } => {
            let range = unit.transfer_range(span)?;
            let flush_first = fua && unit.geometry.volatile_cache;
            plan(Hold::Nothing, Box::new(simple::Read::new(range, flush_first))).filter(|_| !range.is_empty())
        }
        Op::Write { span, fua } => {
            let range = check_write(unit, span, given)?;
            let fua = unit.must_be_durable(fua);
            plan(Hold::Changes(range), Box::new(simple::Write::new(range, fua))).filter(|_| !range.is_empty())
        }
        Op::WriteVerify { span, check } => {
            let range = check_write(unit, span, given)?;
            let compare = check != Check::Medium;
            plan(Hold::Changes(range), Box::new(verify::WriteVerify::new(range, compare)))
                .filter(|_| !range.is_empty())
        }
        Op::Verify { span, check } => plan_verify(unit, span, check, given)?,
        Op::OrWrite { span, fua } => {
            let range = check_write(unit, span, given)?;
            let work = compare::OrWrite::new(range, unit.must_be_durable(fua));
            plan(Hold::Exclusive(range), Box::new(work)).filter(|_| !range.is_empty())
        }
        Op::CompareAndWrite { span, fua } => {
            unit.check_writable()?;
            let range = unit.range(span)?;
            if span.blocks > u64::from(unit.limits.compare_and_write_blocks) {
                return Err(Fault::field(13));
            }
            let bytes = range.len().saturating_mul(2);
            if given.announced_bytes > bytes {
                // The same answer as for 256 blocks, which do not fit the field.
                return Err(Fault::field(13));
            }
            given.exactly(bytes)?;
            let work = compare::CompareAndWrite::new(range, unit.must_be_durable(fua));
            plan(Hold::Exclusive(range), Box::new(work)).filter(|_| !range.is_empty())
        }
        Op::WriteSame { span, unmap, no_data } => plan_fill(unit, span, unmap, no_data, given)?,
        Op::ExtendedCopy { list_bytes } => copy::plan(link, list_bytes, given)?,
        Op::Unmap { .. } => {
            unit.check_writable()?;
            unmap::plan(unit, given.data_out)?
        }
        Op::Synchronize { span, immediate } => {
            unit.range(unit.or_to_the_end(span))?;
            plan(Hold::Nothing, Box::new(simple::Flush)).map(|plan| Plan { immediate, ..plan })
        }
        Op::Prefetch { span, immediate } => {
            let range = unit.range(unit.or_to_the_end(span))?;
            // A hint, which is limited to the longest transfer.
            let range = range.clipped_to(range.offset().saturating_add(unit.transfer_bytes()));
            plan(Hold::Nothing, Box::new(simple::Prefetch::new(range)))
                .map(|plan| Plan { immediate, ..plan })
                .filter(|_| !range.is_empty())
        }
        Op::StartStop { flush: true, .. } => plan(Hold::Nothing, Box::new(simple::Flush)),
        _ => None,
    })
}

/// Makes everything durable that was written before now. This includes tasks under way, because the flush
/// waits for them like a write to the whole disk.
pub(crate) fn flush_all(unit: &LogicalUnit) -> Plan {
    let hold = ByteRange::new(0, unit.geometry.size_bytes).map_or(Hold::Nothing, Hold::Exclusive);
    Plan { hold, work: Box::new(simple::Flush), immediate: false }
}

fn plan_verify(
    unit: &LogicalUnit,
    span: Span,
    check: Check,
    given: Given<'_>,
) -> Result<Option<Plan>, Fault> {
    let range = unit.range(span)?;
    let block_bytes = u64::from(unit.geometry.logical_block_bytes);
    match check {
        Check::Medium => {}
        Check::Data => {
            unit.transfer_range(span)?;
            given.at_least(range.len())?;
        }
        Check::OneBlock => given.at_least(block_bytes.min(range.len()))?,
    }
    if range.is_empty() {
        return Ok(None);
    }
    let work = verify::Verify::new(range, check, block_bytes);
    Ok(Some(Plan { hold: Hold::Nothing, work: Box::new(work), immediate: false }))
}

fn plan_fill(
    unit: &LogicalUnit,
    span: Span,
    unmap: bool,
    no_data: bool,
    given: Given<'_>,
) -> Result<Option<Plan>, Fault> {
    unit.check_writable()?;
    let range = unit.range(unit.or_to_the_end(span))?;
    let block_bytes = u64::from(unit.geometry.logical_block_bytes);
    let mut pattern = Vec::new();
    if !no_data {
        given.exactly(block_bytes)?;
        let block = usize::try_from(block_bytes).ok().and_then(|bytes| given.data_out.get(..bytes));
        pattern.extend_from_slice(block.unwrap_or_default());
    }
    if range.is_empty() {
        return Ok(None);
    }
    // UNMAP asks for blocks without contents, whatever block was sent. Other targets do the same, and
    // libiscsi's suite expects it. (According to SBC-3, data other than zeroes would have to be written.)
    if unmap {
        pattern.clear();
    }
    let work = fill::Fill::new(range, pattern, unmap, unit.must_be_durable(false));
    Ok(Some(Plan { hold: Hold::Changes(range), work: Box::new(work), immediate: false }))
}

/// The part of `range` that begins after its first `done` bytes: at most `chunk_bytes`; `None` at the end.
fn split_chunk(range: ByteRange, done: u64, chunk_bytes: u64) -> Option<ByteRange> {
    let left = range.len().checked_sub(done).filter(|left| *left > 0)?;
    ByteRange::new(range.offset().checked_add(done)?, left.min(chunk_bytes))
}

/// A length as `usize`, for memory.
fn memory(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The error for a device that broke its contract.
fn broken() -> Fault {
    Fault::new(crate::sense::SenseKey::HardwareError, Code::INTERNAL_TARGET_FAILURE)
}
