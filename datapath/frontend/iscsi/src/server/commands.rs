//! SCSI commands: from the PDU to the logical unit and back.
//!
//! 1. If all data of a command has arrived, and the order of tasks permits it, the command is tried at once,
//!    even while other commands wait. Its data-in goes directly after its header in the batch.
//! 2. A command that must wait is handed over with its data, and answered when the inbox has its outcome. If
//!    others wait already, it queues behind them.
//! 3. A command whose data has not arrived collects the data first (`data_out`).

use std::sync::Arc;

use headwater_scsi::{Attribute, Cdb, Command, Lun, Nexus, Now, Outcome, SenseKey, Status, Task};

use super::batch::INLINE_BYTES;
use super::event::Event;
use super::replies::{Ending, data_offset};
use super::serve::End;
use super::session::Session;
use super::tasks::{Collecting, Fault, Order, Sequence, State};
use crate::wire::RESERVED_TAG;
use crate::wire::header::Bhs;
use crate::wire::request::ScsiCommand;
use crate::wire::response::RejectReason;

impl Session<'_> {
    pub(super) fn scsi_command(&mut self, header: &Bhs, ahs: &[u8], data: &[u8]) -> Result<(), End> {
        let (Ok(command), Some(nexus)) = (ScsiCommand::decode(header), &self.nexus) else {
            // A discovery session has no logical units.
            return self.reject(header, RejectReason::CommandNotSupported);
        };
        let Some(attribute) = attribute(command.attribute) else {
            return self.reject(header, RejectReason::InvalidPduField);
        };
        let announced_read = match bidirectional_read(ahs) {
            Ok(announced) => announced,
            Err(()) => return self.reject(header, RejectReason::InvalidPduField),
        };
        if self.tasks.contains(command.task_tag) {
            return self.reject(header, RejectReason::TaskInProgress);
        }
        if !data.is_empty() {
            // This data counts: it arrived before data that other commands of this session wait for.
            self.pace.received(data.len());
        }
        let depth = usize::try_from(self.limits.queue_depth).unwrap_or(usize::MAX);
        if command.immediate && self.tasks.len() >= depth.saturating_mul(2) {
            return self.reject(header, RejectReason::ImmediateCommandReject);
        }
        let lun = Lun(command.lun);
        let cdb = Cdb::new(&command.cdb);
        let order = Order {
            tag: command.task_tag,
            lun,
            attribute,
            cdb,
            read: command.read,
            write: command.write,
            announced: command.expected_bytes,
            announced_read,
            expected: nexus.expected(lun, &cdb),
            arrival: nexus.arrival(lun),
            immediate: command.immediate,
        };
        let wanted = usize::try_from(order.wanted()).unwrap_or(usize::MAX);
        if command.is_final
            && self.tasks.may_run_next(attribute)
            && self.is_legal(&order, data.len())
            && let Some(data) = data.get(..wanted)
        {
            if self.answer_at_once(&order, data)? {
                return Ok(());
            }
            if self.tasks.is_clear() {
                return self.start(&order, data);
            }
        }
        self.collect(order, command.is_final, data)
    }

    /// Whether this much immediate data was negotiated.
    fn is_legal(&self, order: &Order, len: usize) -> bool {
        let limit = self.parameters.first_burst_bytes.min(order.announced);
        len == 0
            || (order.write
                && self.parameters.immediate_data
                && len <= usize::try_from(limit).unwrap_or(usize::MAX))
    }

    fn collect(&mut self, order: Order, is_final: bool, data: &[u8]) -> Result<(), End> {
        let since = self.pace.since_now(self.refused_others());
        let mut collecting = Collecting { since, ..Collecting::default() };
        if !self.is_legal(&order, data.len()) {
            collecting.fault = Some(Fault::Unexpected);
        } else {
            let wanted = usize::try_from(order.wanted()).unwrap_or(usize::MAX);
            collecting.data = data.get(..wanted).unwrap_or(data).to_vec();
        }
        if !is_final && order.write {
            if self.parameters.initial_r2t {
                collecting.fault = Some(Fault::Unexpected);
            }
            collecting.unsolicited = Some(Sequence {
                transfer_tag: RESERVED_TAG,
                next: u32::try_from(data.len()).unwrap_or(u32::MAX),
                end: self.parameters.first_burst_bytes.min(order.announced),
                data_sn: 0,
            });
        }
        let unsolicited = match &collecting.unsolicited {
            Some(unsolicited) => unsolicited.end.min(order.wanted()),
            None => u32::try_from(collecting.data.len()).unwrap_or(u32::MAX),
        };
        let mut unsolicited_bytes = u64::from(unsolicited);
        if collecting.fault.is_some() {
            unsolicited_bytes = 0;
        } else if !self.unsolicited.take_unasked(unsolicited_bytes, false) {
            unsolicited_bytes = 0;
            collecting.data = Vec::new();
            collecting.fault = Some(Fault::NoMemory);
            self.count_refused();
        }
        let serial = self.tasks.next_serial();
        if !order.immediate {
            self.window.open();
        }
        self.tasks.add(order, serial, State::Collecting(collecting), unsolicited_bytes);
        self.advance(order.tag)?;
        if self.tasks.is_clear() { Ok(()) } else { self.pump() }
    }

    /// Executes a command that needs not wait for others, and answers it. Returns `false` if the device must
    /// wait.
    #[inline]
    fn answer_at_once(&mut self, order: &Order, data: &[u8]) -> Result<bool, End> {
        let Some(nexus) = &self.nexus else { return Ok(false) };
        let limit = self.parameters.send_segment_bytes.min(self.parameters.max_burst_bytes);
        let inline = usize::try_from(order.expected.data_in_bytes)
            .ok()
            .filter(|bytes| *bytes <= INLINE_BYTES && order.expected.data_in_bytes <= u64::from(limit));
        if let Some(room) = inline {
            if self.batch.is_full() {
                self.flush_batch(&[])?;
            }
            let Some(nexus) = &self.nexus else { return Ok(false) };
            let head = data_offset(self.parameters.header_digest);
            let room = self.batch.room(head.saturating_add(room));
            let data_in = room.get_mut(head..).unwrap_or_default();
            if let Now::Done { reply, data_in_bytes } = try_now(nexus, order, data, data_in) {
                return self.reply_in_place(order, Ending::of(&reply), data_in_bytes).map(|()| true);
            }
        } else if order.expected.data_in_bytes == 0
            && let Now::Done { reply, .. } = try_now(nexus, order, data, &mut [])
        {
            return self.reply(order, 0, Ending::of(&reply), &[]).map(|()| true);
        }
        Ok(false)
    }

    /// Starts a command that must wait for the device, if no earlier one waits.
    fn start(&mut self, order: &Order, data: &[u8]) -> Result<(), End> {
        let charge = charge(order, data.len());
        let received_bytes = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let memory_bytes = order.memory_bytes(received_bytes);
        let is_admitted = self.may_execute(order) && self.share.take(memory_bytes, order.expected.needs_room);
        if !is_admitted && !self.unsolicited.take_unasked(received_bytes, false) {
            self.count_refused();
            return self.reply(order, 0, FULL, &[]);
        }
        let serial = self.tasks.next_serial();
        if !order.immediate {
            self.window.open();
        }
        if !is_admitted {
            self.tasks.add(*order, serial, State::Ready(data.to_vec()), received_bytes);
            return Ok(());
        }
        self.tasks.add_running(*order, serial, charge, memory_bytes);
        self.hand_over(order, serial, data.to_vec());
        Ok(())
    }

    /// Whether there is memory to give the command to the device.
    fn may_execute(&self, order: &Order) -> bool {
        self.tasks.executing().admits(order.expected.needs_room, self.limits.bytes_executing)
    }

    /// Starts all that can start: ready tasks in order while limits permit, then R2Ts.
    pub(super) fn pump(&mut self) -> Result<(), End> {
        for tag in self.tasks.waiting() {
            let Some(task) = self.tasks.get_mut(tag) else { continue };
            let (serial, order) = (task.serial, task.order);
            match &task.state {
                State::Ready(data) => {
                    let charge = charge(&order, data.len());
                    let more_bytes = task.more_bytes(u64::try_from(data.len()).unwrap_or(u64::MAX));
                    if self.may_execute(&order)
                        && self.tasks.may_run(serial, order.attribute)
                        && self.share.take(more_bytes, order.expected.needs_room)
                        && let Some((order, serial, _, data)) = self.tasks.start(tag, charge, more_bytes)
                    {
                        self.hand_over(&order, serial, data);
                    }
                }
                State::Collecting(collecting) if !collecting.awaits_data() => self.request_data(tag)?,
                State::Collecting(_) | State::Running(_) => {}
            }
        }
        Ok(())
    }

    fn hand_over(&mut self, order: &Order, serial: u64, data_out: Vec<u8>) {
        let Some(nexus) = &self.nexus else { return };
        let inbox = Arc::clone(&self.inbox);
        let tag = order.tag;
        let task = Task {
            lun: order.lun,
            attribute: order.attribute,
            tag: serial,
            arrival: order.arrival,
            cdb: order.cdb,
            data_out,
            announced_bytes: order.announced_out(),
            data_in: Vec::new(),
        };
        nexus.execute(task, move |outcome| inbox.post(Event::Task { tag, serial, outcome }));
    }

    pub(super) fn task_ended(&mut self, tag: u32, serial: u64, outcome: Outcome) -> Result<(), End> {
        if self.tasks.serial_of(tag) != Some(serial) {
            return Ok(());
        }
        let Some(task) = self.tasks.remove(tag) else { return Ok(()) };
        if !task.order.immediate {
            self.window.close();
        }
        let answered = match &outcome.reply {
            // The task was aborted: the answer to the function informs the initiator.
            None => Ok(()),
            Some(reply) => self.reply(&task.order, task.r2ts, Ending::of(reply), &outcome.data_in),
        };
        drop(outcome);
        self.give_back(&task);
        answered
    }

    /// Returns the memory of a task that has ended.
    pub(super) fn give_back(&mut self, task: &super::tasks::Task) {
        self.share.give(task.memory_bytes, task.order.expected.needs_room);
        self.unsolicited.give(task.unsolicited_bytes, false);
    }

    /// Answers a task that is refused because its data arrived in a wrong way.
    pub(super) fn refuse(&mut self, tag: u32, fault: Fault) -> Result<(), End> {
        let Some(task) = self.tasks.remove(tag) else { return Ok(()) };
        self.give_back(&task);
        if !task.order.immediate {
            self.window.close();
        }
        if fault == Fault::NoMemory {
            return self.reply(&task.order, task.r2ts, FULL, &[]);
        }
        self.shared.faults.warn(&self.who, &format_args!("a command was refused: {}", fault.words()));
        let [asc, ascq] = fault.code().to_be_bytes();
        // Fixed format: sense data of the transport does not follow the logical unit's mode pages.
        let sense =
            [0x70, 0, SenseKey::AbortedCommand as u8, 0, 0, 0, 0, 10, 0, 0, 0, 0, asc, ascq, 0, 0, 0, 0];
        let ending = Ending { status: Status::CheckCondition, sense: &sense };
        self.reply(&task.order, task.r2ts, ending, &[])
    }
}

/// The answer if there is no memory for a command's unsolicited data. The initiator sends the command again
/// when others of its commands have ended. A session without other commands always has enough memory of its
/// own.
const FULL: Ending<'static> = Ending { status: Status::TaskSetFull, sense: &[] };

#[inline]
fn try_now(nexus: &Nexus, order: &Order, data_out: &[u8], data_in: &mut [u8]) -> Now {
    let Order { lun, attribute, ref cdb, .. } = *order;
    let command = Command { lun, attribute, cdb, data_out, announced_bytes: order.announced_out() };
    nexus.try_now(&command, data_in)
}

/// The memory that a task counts while it runs.
fn charge(order: &Order, data_out_bytes: usize) -> u64 {
    order.expected.data_in_bytes.saturating_add(u64::try_from(data_out_bytes).unwrap_or(u64::MAX))
}

fn attribute(number: u8) -> Option<Attribute> {
    match number {
        0 | 1 => Some(Attribute::Simple),
        2 => Some(Attribute::Ordered),
        3 => Some(Attribute::HeadOfQueue),
        4 => Some(Attribute::Aca),
        _ => None,
    }
}

/// The read length in the additional header segments of a command that moves data both ways. A longer CDB is
/// legal too, but no supported command has one: its first 16 bytes show that.
fn bidirectional_read(mut ahs: &[u8]) -> Result<Option<u32>, ()> {
    let mut announced = None;
    while let [high, low, kind, rest @ ..] = ahs {
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        // The length counts from after the type; the segment is padded to a multiple of four.
        let padded = length.saturating_add(3).next_multiple_of(4).saturating_sub(3);
        let (body, after) = rest.split_at_checked(padded).ok_or(())?;
        let body = body.get(..length).ok_or(())?;
        match (kind & 0x3f, body) {
            (1, [_, ..]) => {}
            (2, [_, a, b, c, d]) => announced = Some(u32::from_be_bytes([*a, *b, *c, *d])),
            _ => return Err(()),
        }
        ahs = after;
    }
    Ok(announced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn additional_headers_are_read_and_bad_ones_refused() {
        assert_eq!(bidirectional_read(&[]), Ok(None));
        // A read length: five bytes after the type, padded to a multiple of four together with the three
        // bytes before.
        assert_eq!(bidirectional_read(&[0, 5, 2, 0, 0, 0, 2, 0]), Ok(Some(512)));
        // 16 more bytes of a CDB: 17 bytes after the type.
        let mut long = vec![0, 17, 1, 0];
        long.resize(20, 7);
        assert_eq!(bidirectional_read(&long), Ok(None));
        long.extend_from_slice(&[0, 5, 2, 0, 0, 0, 0, 9]);
        assert_eq!(bidirectional_read(&long), Ok(Some(9)));
        for bad in
            [&[0_u8, 5, 2, 0][..], &[0, 4, 2, 0, 0, 0, 0, 0], &[0, 1, 9, 0], &[0, 0, 1, 0], &[255, 255, 1, 0]]
        {
            assert_eq!(bidirectional_read(bad), Err(()), "{bad:?}");
        }
    }
}
