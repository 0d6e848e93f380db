//! Data that arrives after its command: first unsolicited data, then data that R2Ts request.
//!
//! All data arrives in order, as negotiated, so it is only ever appended. Memory grows as it arrives. A fault
//! does not end the task at once: data that is still on its way is received first, so that it cannot be
//! mistaken for data of another task.
//!
//! A task's `order` is its command. Of the session, `share` is the memory for the data of commands, and `pace`
//! notices data that arrives too slowly. A command with `needs_room` adds data to the disk (a write), so it may
//! have to wait until the disk has space.

use super::serve::End;
use super::session::Session;
use super::tasks::{Collecting, Fault, Sequence, State, Task};
use crate::wire::RESERVED_TAG;
use crate::wire::header::Bhs;
use crate::wire::request::DataOut;
use crate::wire::response::{ReadyToTransfer, RejectReason};

impl Session<'_> {
    pub(super) fn data_out(&mut self, header: &Bhs, data: &[u8], is_intact: bool) -> Result<(), End> {
        let Ok(pdu) = DataOut::decode(header) else {
            return self.reject(header, RejectReason::InvalidPduField);
        };
        let Some(Task { state: State::Collecting(collecting), order, .. }) = self.tasks.get_mut(pdu.task_tag)
        else {
            // Data of a task that was aborted or has ended, which the initiator could not know.
            tracing::debug!("iSCSI: {}: data for no task, tag {:#x}", self.who, pdu.task_tag);
            return Ok(());
        };
        self.pace.received(data.len());
        let wanted = order.wanted();
        let Some(sequence) = sequence(collecting, pdu.transfer_tag) else {
            return self.reject(header, RejectReason::InvalidPduField);
        };
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let end = sequence.next.saturating_add(len);
        let in_order = pdu.data_sn == sequence.data_sn && pdu.offset == sequence.next && end <= sequence.end;
        sequence.next = end.min(sequence.end);
        sequence.data_sn = sequence.data_sn.wrapping_add(1);
        let is_short = pdu.is_final && pdu.transfer_tag != RESERVED_TAG && end < sequence.end;
        if !is_intact {
            collecting.fault.get_or_insert(Fault::Digest);
        } else if !in_order || is_short {
            collecting.fault.get_or_insert(Fault::Sequence);
        } else if collecting.fault.is_none() {
            let have = u32::try_from(collecting.data.len()).unwrap_or(u32::MAX);
            let take = usize::try_from(wanted.saturating_sub(have)).unwrap_or(usize::MAX);
            collecting.data.extend_from_slice(data.get(..take).unwrap_or(data));
        }
        if pdu.is_final {
            if pdu.transfer_tag == RESERVED_TAG {
                collecting.unsolicited = None;
            } else {
                collecting.requested.pop_front();
            }
            self.advance(pdu.task_tag)?;
            if !self.tasks.is_clear() {
                return self.pump();
            }
        }
        Ok(())
    }

    /// Moves a task on after a sequence has ended: refuses it, marks it ready, or requests more data. A task with
    /// a fault is refused only when none of its data is on the way.
    pub(super) fn advance(&mut self, tag: u32) -> Result<(), End> {
        let Some(task) = self.tasks.get_mut(tag) else { return Ok(()) };
        let wanted = task.order.wanted();
        let State::Collecting(collecting) = &mut task.state else { return Ok(()) };
        let is_complete = u32::try_from(collecting.data.len()).unwrap_or(u32::MAX) >= wanted;
        if collecting.unsolicited.is_some()
            || (collecting.fault.is_some() && !collecting.requested.is_empty())
        {
            return Ok(());
        }
        if let Some(fault) = collecting.fault {
            return self.refuse(tag, fault);
        }
        if is_complete && collecting.requested.is_empty() {
            task.state = State::Ready(std::mem::take(&mut collecting.data));
            return Ok(());
        }
        self.request_data(tag)
    }

    /// Sends as many R2Ts as are allowed, once memory is reserved for all of the task's data.
    pub(super) fn request_data(&mut self, tag: u32) -> Result<(), End> {
        let counted = self.tasks.collected();
        let Some(task) = self.tasks.get_mut(tag) else { return Ok(()) };
        let wanted = task.order.wanted();
        let has_room = counted.admits(task.order.expected.needs_room, self.limits.bytes_collected);
        // Includes all memory that the task needs to run. Otherwise a task could hold memory for its data
        // while it waits for more, and block others.
        let more_bytes = task.more_bytes(u64::from(wanted));
        let State::Collecting(collecting) = &mut task.state else { return Ok(()) };
        if !collecting.admitted {
            if !has_room || !self.share.take(more_bytes, task.order.expected.needs_room) {
                return Ok(());
            }
            task.memory_bytes = task.memory_bytes.saturating_add(more_bytes);
            collecting.admitted = true;
            // 0, because the number of commands that were refused for lack of memory matters only for unsolicited
            // data.
            collecting.since = self.pace.since_now(0);
            collecting.next = u32::try_from(collecting.data.len()).unwrap_or(u32::MAX);
            let bytes = u64::from(wanted.saturating_sub(collecting.next));
            self.tasks.charge_collected(tag, bytes);
        }
        while let Some(r2t) = self.next_r2t(tag) {
            self.put_pdu(&r2t.encode(), &[])?;
        }
        Ok(())
    }

    fn next_r2t(&mut self, tag: u32) -> Option<ReadyToTransfer> {
        let limit = usize::from(self.parameters.outstanding_r2t);
        let burst = self.parameters.max_burst_bytes;
        let transfer_tag = self.new_transfer_tag();
        let numbers = self.numbers();
        let task = self.tasks.get_mut(tag)?;
        let wanted = task.order.wanted();
        let State::Collecting(collecting) = &mut task.state else { return None };
        if collecting.requested.len() >= limit || collecting.next >= wanted {
            return None;
        }
        let offset = collecting.next;
        let desired_bytes = wanted.saturating_sub(offset).min(burst);
        let end = offset.saturating_add(desired_bytes);
        collecting.next = end;
        collecting.requested.push_back(Sequence { transfer_tag, next: offset, end, data_sn: 0 });
        let r2t_sn = task.r2ts;
        task.r2ts = task.r2ts.wrapping_add(1);
        let (lun, task_tag) = (task.order.lun.0, tag);
        Some(ReadyToTransfer { lun, task_tag, transfer_tag, numbers, r2t_sn, offset, desired_bytes })
    }
}

/// The sequence to which a PDU belongs. Sequences arrive in the order of their R2Ts.
fn sequence(collecting: &mut Collecting, transfer_tag: u32) -> Option<&mut Sequence> {
    if transfer_tag == RESERVED_TAG {
        collecting.unsolicited.as_mut()
    } else {
        collecting.requested.front_mut().filter(|front| front.transfer_tag == transfer_tag)
    }
}
