//! The commands (tasks) of one session that were not answered at once: their state, their order, and how many bytes each
//! counts against which limit. Only bookkeeping: `commands.rs` starts and answers tasks, `data_out.rs` sends R2Ts.
//!
//! Two limits of the session: `bytes_collected` for data-out that arrives or waits, and `bytes_executing` for the data of
//! running tasks. Two budgets are shared by all sessions: memory (`memory_bytes`), and memory for unsolicited data
//! (`unsolicited_bytes`).
//!
//! | state | waits for | next |
//! |---|---|---|
//! | collecting | unsolicited data, then the data that R2Ts request | ready; or, after an error, refused when its remaining data has arrived |
//! | ready | earlier ordered tasks (an ordered task: all earlier tasks that do not run yet), or room in `bytes_executing` | running |
//! | running | the device | answered and removed |
//!
//! Tasks that store data may wait long for disk space. So other tasks, such as reads and unmaps, have another
//! quarter of each limit of bytes ([`Counted::admits`]).
//!
//! Tasks are numbered in the order of their arrival. Those that do not run yet are also listed by that
//! number, so that the ordered tasks among them are found.

use std::collections::{BTreeMap, HashMap, VecDeque};

use headwater_block::MAX_REQUEST_BYTES;
use headwater_scsi::{Arrival, Attribute, Cdb, Expected, Lun};

use super::pace::Since;

/// The command of a task, without its data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) tag: u32,
    pub(super) lun: Lun,
    pub(super) attribute: Attribute,
    pub(super) cdb: Cdb,
    /// The initiator expects data.
    pub(super) read: bool,
    /// The initiator sends data.
    pub(super) write: bool,
    /// How many bytes the initiator announced: the Expected Data Transfer Length of RFC 7143.
    pub(super) announced: u32,
    /// How many bytes a bidirectional command announced to read.
    pub(super) announced_read: Option<u32>,
    /// How many bytes the command moves according to its CDB.
    pub(super) expected: Expected,
    /// Its order of arrival: an abort of all tasks of the unit also aborts this task before it is given to
    /// the device.
    pub(super) arrival: Arrival,
    pub(super) immediate: bool,
}

impl Order {
    /// How many bytes the target requests: at most as many as announced, and at most as many as the command
    /// needs.
    pub(super) fn wanted(&self) -> u32 {
        if !self.write {
            return 0;
        }
        u32::try_from(self.expected.data_out_bytes).unwrap_or(u32::MAX).min(self.announced)
    }

    /// All memory that the task needs to run with this many bytes of data-out, in bytes.
    pub(super) fn memory_bytes(&self, data_out_bytes: u64) -> u64 {
        let Expected { data_in_bytes, buffer_bytes, .. } = self.expected;
        // Some commands give only the size of the initiator's buffer; no answer is longer than the limit.
        let data_in_bytes = data_in_bytes.min(u64::from(MAX_REQUEST_BYTES));
        data_in_bytes.saturating_add(buffer_bytes).saturating_add(data_out_bytes)
    }

    /// The announced length of data-out, in bytes.
    #[inline]
    pub(super) fn announced_out(&self) -> u64 {
        if self.write { u64::from(self.announced) } else { 0 }
    }

    /// The most data-in that the initiator accepts, in bytes.
    pub(super) fn takes(&self) -> u32 {
        match (self.read, self.write) {
            (false, _) => 0,
            (true, false) => self.announced,
            (true, true) => self.announced_read.unwrap_or(0),
        }
    }
}

/// Data that is permitted together: unsolicited data, or the data of one R2T.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    /// The tag of its R2T.
    pub(super) transfer_tag: u32,
    /// The offset of the next PDU.
    pub(super) next: u32,
    /// The largest end offset.
    pub(super) end: u32,
    /// The number of the next PDU.
    pub(super) data_sn: u32,
}

/// Why a task is refused after its data has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A data digest was wrong.
    Digest,
    /// Data arrived that was not requested.
    Unexpected,
    /// A number, an offset or a length was wrong.
    Sequence,
    /// There is no memory for unsolicited data.
    NoMemory,
}

impl Fault {
    /// The fault, for the log.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Digest => "a digest of its data was wrong",
            Self::Unexpected => "data arrived that the target had not requested",
            Self::Sequence => "its data had a wrong number, offset or length",
            Self::NoMemory => "there is no memory for its unsolicited data",
        }
    }

    /// Additional sense code and qualifier (RFC 7143, 11.4.7.2).
    pub(super) fn code(self) -> u16 {
        match self {
            Self::Digest => 0x4705,
            Self::Unexpected => 0x0c0c,
            // The RFC has no code for a wrong number, offset or length; "not enough unsolicited data" is the nearest.
            // A task without memory is answered TASK SET FULL, without sense data.
            Self::Sequence | Self::NoMemory => 0x0c0d,
        }
    }
}

/// The data of a task as it arrives.
#[derive(Debug, Default)]
pub(super) struct Collecting {
    pub(super) data: Vec<u8>,
    /// The sequence of unsolicited data, if it has not ended.
    pub(super) unsolicited: Option<Sequence>,
    /// The sequences of R2Ts that are not complete, in order.
    pub(super) requested: VecDeque<Sequence>,
    /// Offset of the next R2T.
    pub(super) next: u32,
    /// Memory for all of the data is reserved.
    pub(super) admitted: bool,
    /// When it began to wait for the data that is under way.
    pub(super) since: Since,
    pub(super) fault: Option<Fault>,
}

impl Collecting {
    /// Whether data is under way.
    pub(super) fn awaits_data(&self) -> bool {
        self.unsolicited.is_some() || !self.requested.is_empty()
    }
}

#[derive(Debug)]
pub(super) enum State {
    Collecting(Collecting),
    Ready(Vec<u8>),
    /// Running; holds the bytes that it counts in `bytes_executing`.
    Running(u64),
}

#[derive(Debug)]
pub(super) struct Task {
    pub(super) order: Order,
    pub(super) serial: u64,
    pub(super) state: State,
    /// R2Ts sent.
    pub(super) r2ts: u32,
    /// The bytes that it counts in `bytes_collected`.
    pub(super) collected: u64,
    /// The shared memory, and the session's own memory, that it uses.
    pub(super) memory_bytes: u64,
    /// The memory for unsolicited data that it uses.
    pub(super) unsolicited_bytes: u64,
}

impl Task {
    /// The additional shared memory that the task needs to run with this many bytes of data-out.
    pub(super) fn more_bytes(&self, data_out_bytes: u64) -> u64 {
        let have = self.memory_bytes.saturating_add(self.unsolicited_bytes);
        self.order.memory_bytes(data_out_bytes).saturating_sub(have)
    }
}

/// Bytes that count against a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    all: u64,
    /// How many of them belong to tasks that need no disk space.
    others: u64,
}

impl Counted {
    /// Whether one more task may be counted: under the limit, or under another quarter of it if it needs no
    /// disk space.
    #[inline]
    pub(super) fn admits(self, needs_room: bool, limit: u64) -> bool {
        self.all < limit || (!needs_room && (self.others == 0 || self.others < limit / 4))
    }

    fn add(&mut self, order: &Order, bytes: u64) {
        self.all = self.all.saturating_add(bytes);
        if !order.expected.needs_room {
            self.others = self.others.saturating_add(bytes);
        }
    }

    fn remove(&mut self, order: &Order, bytes: u64) {
        self.all = self.all.saturating_sub(bytes);
        if !order.expected.needs_room {
            self.others = self.others.saturating_sub(bytes);
        }
    }
}

/// All tasks of a session, and the bytes that they count.
#[derive(Default)]
pub(super) struct Tasks {
    by_tag: HashMap<u32, Task>,
    /// Tags of tasks that do not run yet, by serial number.
    waiting: BTreeMap<u64, u32>,
    /// Serial numbers of the ordered tasks among them.
    ordered: VecDeque<u64>,
    last_serial: u64,
    running: usize,
    collected: Counted,
    executing: Counted,
}

impl Tasks {
    pub(super) fn next_serial(&mut self) -> u64 {
        self.last_serial = self.last_serial.wrapping_add(1);
        self.last_serial
    }

    #[inline]
    pub(super) fn contains(&self, tag: u32) -> bool {
        !self.by_tag.is_empty() && self.by_tag.contains_key(&tag)
    }

    pub(super) fn len(&self) -> usize {
        self.by_tag.len()
    }

    pub(super) fn running(&self) -> usize {
        self.running
    }

    /// Whether no task waits.
    #[inline]
    pub(super) fn is_clear(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn collected(&self) -> Counted {
        self.collected
    }

    pub(super) fn executing(&self) -> Counted {
        self.executing
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn bytes_collected(&self) -> u64 {
        self.collected.all
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn bytes_executing(&self) -> u64 {
        self.executing.all
    }

    pub(super) fn get_mut(&mut self, tag: u32) -> Option<&mut Task> {
        self.by_tag.get_mut(&tag)
    }

    /// The serial number of a task.
    pub(super) fn serial_of(&self, tag: u32) -> Option<u64> {
        self.by_tag.get(&tag).map(|task| task.serial)
    }

    /// Adds a task that does not run yet, with the memory for the data that came with it.
    pub(super) fn add(&mut self, order: Order, serial: u64, state: State, unsolicited_bytes: u64) {
        self.waiting.insert(serial, order.tag);
        if order.attribute == Attribute::Ordered {
            self.ordered.push_back(serial);
        }
        let task = Task { order, serial, state, r2ts: 0, collected: 0, memory_bytes: 0, unsolicited_bytes };
        self.by_tag.insert(order.tag, task);
    }

    /// Adds a running task.
    pub(super) fn add_running(&mut self, order: Order, serial: u64, charge: u64, memory_bytes: u64) {
        self.running = self.running.saturating_add(1);
        self.executing.add(&order, charge);
        let state = State::Running(charge);
        let task = Task { order, serial, state, r2ts: 0, collected: 0, memory_bytes, unsolicited_bytes: 0 };
        self.by_tag.insert(order.tag, task);
    }

    /// Counts memory for a task's data.
    pub(super) fn charge_collected(&mut self, tag: u32, bytes: u64) {
        if let Some(task) = self.by_tag.get_mut(&tag) {
            task.collected = task.collected.saturating_add(bytes);
            self.collected.add(&task.order, bytes);
        }
    }

    /// Tags of tasks that do not run yet, oldest first.
    pub(super) fn waiting(&self) -> Vec<u32> {
        self.waiting.values().copied().collect()
    }

    /// Tasks whose data is under way, oldest first.
    pub(super) fn awaiting_data(&self) -> impl Iterator<Item = (&Order, &Collecting)> {
        self.waiting.values().filter_map(|tag| self.by_tag.get(tag)).filter_map(|task| match &task.state {
            State::Collecting(collecting) if collecting.awaits_data() => Some((&task.order, collecting)),
            _ => None,
        })
    }

    /// Whether the order of tasks permits this task to run.
    pub(super) fn may_run(&self, serial: u64, attribute: Attribute) -> bool {
        match attribute {
            Attribute::HeadOfQueue => true,
            Attribute::Ordered => self.waiting.keys().next().is_none_or(|first| *first >= serial),
            _ => self.ordered.front().is_none_or(|first| *first > serial),
        }
    }

    /// Whether the order of tasks permits a new task to run.
    #[inline]
    pub(super) fn may_run_next(&self, attribute: Attribute) -> bool {
        self.is_clear()
            || match attribute {
                Attribute::HeadOfQueue => true,
                Attribute::Ordered => false,
                _ => self.ordered.is_empty(),
            }
    }

    /// Takes a ready task's data. The task counts as running from now on, with this much additional memory.
    pub(super) fn start(
        &mut self,
        tag: u32,
        charge: u64,
        more_bytes: u64,
    ) -> Option<(Order, u64, u32, Vec<u8>)> {
        let task = self.by_tag.get_mut(&tag)?;
        let State::Ready(data) = &mut task.state else { return None };
        let data = std::mem::take(data);
        task.state = State::Running(charge);
        task.memory_bytes = task.memory_bytes.saturating_add(more_bytes);
        self.collected.remove(&task.order, task.collected);
        task.collected = 0;
        self.running = self.running.saturating_add(1);
        self.executing.add(&task.order, charge);
        let started = (task.order, task.serial, task.r2ts, data);
        let serial = task.serial;
        self.stop_waiting(serial);
        Some(started)
    }

    /// Removes a task.
    pub(super) fn remove(&mut self, tag: u32) -> Option<Task> {
        let task = self.by_tag.remove(&tag)?;
        self.collected.remove(&task.order, task.collected);
        if let State::Running(charge) = task.state {
            self.running = self.running.saturating_sub(1);
            self.executing.remove(&task.order, charge);
        } else {
            self.stop_waiting(task.serial);
        }
        Some(task)
    }

    /// Tags of tasks on a logical unit (`None`: on all) that do not run yet.
    pub(super) fn waiting_on(&self, lun: Option<Lun>) -> Vec<u32> {
        let mut tags = self.waiting();
        tags.retain(|tag| {
            lun.is_none_or(|lun| self.by_tag.get(tag).is_some_and(|task| task.order.lun == lun))
        });
        tags
    }

    fn stop_waiting(&mut self, serial: u64) {
        self.waiting.remove(&serial);
        self.ordered.retain(|ordered| *ordered != serial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(tag: u32, attribute: Attribute) -> Order {
        Order {
            tag,
            lun: Lun::single(0),
            attribute,
            cdb: Cdb::new(&[0x2a]),
            read: false,
            write: true,
            announced: 1000,
            announced_read: None,
            expected: Expected { data_out_bytes: 4096, needs_room: true, ..Expected::default() },
            arrival: Arrival::default(),
            immediate: false,
        }
    }

    #[test]
    fn ordered_tasks_wait_for_earlier_ones_and_hold_up_later_ones() {
        let mut tasks = Tasks::default();
        let kinds = [Attribute::Simple, Attribute::Ordered, Attribute::Simple, Attribute::HeadOfQueue];
        for (tag, attribute) in (1..).zip(kinds) {
            let serial = tasks.next_serial();
            tasks.add(order(tag, attribute), serial, State::Ready(vec![tag as u8]), 0);
        }
        let may = |tasks: &Tasks| -> Vec<u64> {
            (1..).zip(kinds).filter(|(serial, kind)| tasks.may_run(*serial, *kind)).map(|(s, _)| s).collect()
        };
        let next =
            |tasks: &Tasks| kinds[1..].iter().map(|kind| tasks.may_run_next(*kind)).collect::<Vec<bool>>();
        assert_eq!((may(&tasks), next(&tasks)), (vec![1, 4], vec![false, false, true]));
        assert_eq!(tasks.start(1, 10, 0).unwrap().3, [1]);
        assert_eq!(may(&tasks), [1, 2, 4]);
        assert!(tasks.start(2, 10, 0).is_some());
        assert_eq!((may(&tasks), next(&tasks)), (vec![1, 2, 3, 4], vec![false, true, true]));
        assert_eq!((tasks.running(), tasks.bytes_executing()), (2, 20));
        tasks.remove(1);
        tasks.remove(2);
        assert_eq!((tasks.running(), tasks.bytes_executing(), tasks.len()), (0, 0, 2));
    }

    #[test]
    fn requested_data_is_the_smaller_of_announced_and_needed() {
        let write = order(1, Attribute::Simple);
        assert_eq!(write.wanted(), 1000);
        assert_eq!(Order { announced: 10_000, ..write }.wanted(), 4096);
        assert_eq!(Order { write: false, ..write }.wanted(), 0);
        assert_eq!(write.takes(), 0);
        assert_eq!(Order { read: true, write: false, ..write }.takes(), 1000);
        assert_eq!(Order { read: true, announced_read: Some(7), ..write }.takes(), 7);
    }

    #[test]
    fn waiting_writes_leave_a_quarter_to_other_commands() {
        let write = order(1, Attribute::Simple);
        let read = Order { expected: Expected { needs_room: false, ..write.expected }, ..write };
        let mut counted = Counted::default();
        counted.add(&write, 800);
        assert!(!counted.admits(true, 800) && counted.admits(false, 800));
        counted.add(&read, 200);
        assert!(!counted.admits(false, 800));
        counted.remove(&read, 200);
        assert!(counted.admits(false, 1), "the first one always may");
        counted.remove(&write, 800);
        assert_eq!(counted, Counted::default());
    }

    #[test]
    fn memory_is_counted_until_the_task_runs_or_goes() {
        let mut tasks = Tasks::default();
        for tag in [1, 2] {
            let serial = tasks.next_serial();
            tasks.add(order(tag, Attribute::Simple), serial, State::Ready(Vec::new()), 0);
            tasks.charge_collected(tag, 100);
        }
        assert_eq!(tasks.bytes_collected(), 200);
        tasks.start(1, 50, 0);
        assert_eq!((tasks.bytes_collected(), tasks.bytes_executing()), (100, 50));
        tasks.remove(2);
        assert_eq!(tasks.bytes_collected(), 0);
        assert!(tasks.is_clear());
    }
}
