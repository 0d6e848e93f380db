//! Commands that are executed at once on the caller's thread: information about a unit, modes, reservations.

use std::sync::Arc;

use headwater_block::{ByteRange, ExtentKind};

use crate::cdb::Op;
use crate::copies;
use crate::inquiry;
use crate::link::Link;
use crate::mode;
use crate::opcodes;
use crate::reservation::Refusal;
use crate::sense::{Code, Fault, SenseKey, Status};
use crate::target::Target;
use crate::task::Reply;
use crate::wire::{len32, put};

/// Most descriptors of GET LBA STATUS.
const STATUS_DESCRIPTORS: usize = 1024;

/// The result of a command of this module.
pub(crate) enum Effect {
    /// The command has finished with this data, cut to the allocation length.
    Data(Vec<u8>),
    /// The command finishes after the tasks of these initiator ports were aborted.
    Abort(Vec<Arc<crate::identity::Initiator>>),
    /// The command finishes after all earlier writes were made durable.
    Flush,
}

/// Whether the command belongs to this module.
pub(crate) fn is_control(op: &Op) -> bool {
    match op {
        Op::Read { .. }
        | Op::Write { .. }
        | Op::WriteVerify { .. }
        | Op::Verify { .. }
        | Op::OrWrite { .. }
        | Op::CompareAndWrite { .. }
        | Op::WriteSame { .. }
        | Op::Unmap { .. }
        | Op::ExtendedCopy { .. }
        | Op::Synchronize { .. }
        | Op::Prefetch { .. } => false,
        Op::StartStop { flush, .. } => !flush,
        _ => true,
    }
}

/// Whether [`crate::Nexus::try_now`] may execute the command: its answer certainly fits, and it need not wait
/// for the device.
pub(crate) fn may_be_now(op: &Op, room_bytes: usize) -> bool {
    match op {
        Op::RequestSense { .. } => room_bytes >= 32,
        Op::ModeSelect { .. } => false,
        _ => !ends_tasks(op),
    }
}

/// Whether the command is PREEMPT AND ABORT, which waits for tasks.
pub(crate) fn ends_tasks(op: &Op) -> bool {
    matches!(op, Op::ReserveOut(out) if out.action == 5)
}

/// Executes the command.
pub(crate) fn execute(target: &Target, link: &Link, op: &Op, data_out: &[u8]) -> Result<Effect, Reply> {
    let unit = &link.unit;
    let refuse = |fault: Fault| unit.check_condition(&fault);
    let data = match op {
        Op::Inquiry { vpd: None, .. } => inquiry::standard(unit),
        Op::Inquiry { vpd: Some(page), .. } => {
            inquiry::vpd(unit, target.name(), &link.initiator, *page).map_err(refuse)?
        }
        Op::RequestSense { descriptors, .. } => {
            let fault = match link.attention.take() {
                Some(code) => Fault::unit_attention(code),
                None => Fault::new(SenseKey::NoSense, Code::NONE),
            };
            fault.sense(*descriptors).bytes().to_vec()
        }
        Op::ReportLuns { select, .. } => inquiry::luns(target.luns(), *select).map_err(refuse)?,
        Op::ReadCapacity10 => inquiry::capacity10(unit),
        Op::ReadCapacity16 { .. } => inquiry::capacity16(unit),
        Op::GetLbaStatus { lba, allocation } => lba_status(link, *lba, *allocation)?,
        Op::ReadDefects { long, lists, .. } => inquiry::defects(*long, *lists),
        Op::ModeSense(request) => mode::sense(unit, request).map_err(refuse)?,
        Op::ModeSelect { long, list_bytes } => {
            let list = parameter_list(data_out, *list_bytes).map_err(refuse)?;
            let selected = mode::select(unit, *long, list).map_err(refuse)?;
            if selected.any {
                unit.notify_others(Some(link.nexus), Code::MODE_PARAMETERS_CHANGED);
            }
            // If no write cache is reported, initiators send no flush: flush once now.
            if selected.no_cache {
                return Ok(Effect::Flush);
            }
            Vec::new()
        }
        Op::CopyStatus { list_id, .. } => link.copies.status(*list_id).map_err(refuse)?,
        Op::CopyParameters { .. } => copies::parameters(unit),
        Op::ReportOpcodes(request) => opcodes::report(request).map_err(refuse)?,
        Op::ReportFunctions { extended, .. } => inquiry::functions(*extended),
        Op::Reserve if !unit.reservations.reserve_simple(link.nexus) => return Err(conflict()),
        Op::Release if !unit.reservations.release_simple(link.nexus) => return Err(conflict()),
        Op::ReserveIn { action, .. } => unit.reservations.report(*action).map_err(refuse)?,
        Op::ReserveOut(request) => {
            let list = parameter_list(data_out, request.list_bytes).map_err(refuse)?;
            let effects = unit.reservations.persistent_out(link.nexus, &link.initiator, request, list);
            let effects = effects.map_err(|refusal| match refusal {
                Refusal::Conflict => conflict(),
                Refusal::Fault(fault) => refuse(fault),
            })?;
            for other in unit.links() {
                let attentions = effects.attentions.iter().filter(|(port, _)| **port == *other.initiator);
                attentions.for_each(|(_, code)| other.attention.establish(*code));
            }
            if request.action == 5 {
                return Ok(Effect::Abort(effects.aborts));
            }
            Vec::new()
        }
        _ => Vec::new(),
    };
    Ok(Effect::Data(data))
}

/// The parameter list, which must have been sent completely.
fn parameter_list(data_out: &[u8], list_bytes: u32) -> Result<&[u8], Fault> {
    let len = usize::try_from(list_bytes).unwrap_or(usize::MAX);
    data_out.get(..len).ok_or(Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR))
}

/// RESERVATION CONFLICT.
pub(crate) fn conflict() -> Reply {
    Reply { status: Status::ReservationConflict, sense: None }
}

/// GET LBA STATUS: holes are reported as deallocated, everything else as mapped.
fn lba_status(link: &Link, lba: u64, allocation: u32) -> Result<Vec<u8>, Reply> {
    let unit = &link.unit;
    let refuse = |fault: Fault| unit.check_condition(&fault);
    if lba >= unit.blocks {
        return Err(refuse(Fault::illegal(Code::LBA_OUT_OF_RANGE)));
    }
    let block_bytes = u64::from(unit.geometry.logical_block_bytes);
    let start = lba.saturating_mul(block_bytes);
    let room = usize::try_from(allocation).unwrap_or(usize::MAX).saturating_sub(8) / 16;
    let most = room.clamp(1, STATUS_DESCRIPTORS);
    // A descriptor counts blocks in 32 bits.
    let len =
        unit.geometry.size_bytes.saturating_sub(start).min(block_bytes.saturating_mul(u64::from(u32::MAX)));
    let Some(range) = ByteRange::new(start, len) else {
        return Err(refuse(Fault::illegal(Code::LBA_OUT_OF_RANGE)));
    };
    let extents = unit.device.extents(range, most).map_err(|error| {
        unit.log_fault("GET LBA STATUS", &error);
        refuse(Fault::from_device(&error, false))
    })?;
    let mut runs: Vec<(u64, bool)> = Vec::new();
    let mut left = len;
    for extent in extents {
        let bytes = extent.len.min(left);
        left = left.saturating_sub(bytes);
        let deallocated = extent.kind == ExtentKind::Hole;
        match runs.last_mut() {
            Some((run, kind)) if *kind == deallocated => *run = run.saturating_add(bytes),
            _ => runs.push((bytes, deallocated)),
        }
    }
    let mut body = Vec::new();
    let mut at = lba;
    for (bytes, deallocated) in runs.into_iter().take(most) {
        let blocks = u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX);
        let mut descriptor = [0; 16];
        put(&mut descriptor, 0, &at.to_be_bytes());
        put(&mut descriptor, 8, &blocks.to_be_bytes());
        put(&mut descriptor, 12, &[u8::from(deallocated)]);
        body.extend_from_slice(&descriptor);
        at = at.saturating_add(u64::from(blocks));
    }
    let mut data = len32(body.len().saturating_add(4)).to_vec();
    data.extend_from_slice(&[0; 4]);
    data.extend_from_slice(&body);
    Ok(data)
}

/// Answers commands to a LUN without a logical unit. Only inquiries are answered: about the LUN, and about
/// existing units.
pub(crate) fn absent(target: &Target, op: &Result<Op, Fault>) -> Result<Vec<u8>, Reply> {
    let unsupported = Fault::illegal(Code::LOGICAL_UNIT_NOT_SUPPORTED);
    let refuse = |fault: Fault| Reply { status: Status::CheckCondition, sense: Some(fault.sense(false)) };
    match op {
        Ok(Op::Inquiry { vpd: None, .. }) => Ok(inquiry::absent()),
        Ok(Op::ReportLuns { select, .. }) => inquiry::luns(target.luns(), *select).map_err(refuse),
        Ok(Op::RequestSense { descriptors, .. }) => Ok(unsupported.sense(*descriptors).bytes().to_vec()),
        _ => Err(refuse(unsupported)),
    }
}
