//! Tasks of the model: how their data arrives, when they run, and how they are answered.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use headwater_scsi::{Attribute, Cdb, Command, Expected, Lun, Now, Reply, Status, Task};

use super::{Event, Model, NONE, Numbered, UNSEEN, is_of_steps, put, reason, word};
use crate::wire::Bhs;

/// Data that one R2T or the command itself permits.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) tag: u32,
    pub(super) r2t: u32,
    pub(super) next: u64,
    pub(super) end: u64,
    pub(super) data_sn: u32,
}

#[derive(Debug)]
pub(super) enum State {
    Collects {
        unsolicited: Option<Sequence>,
        requested: VecDeque<Sequence>,
        next: u64,
        admitted: bool,
        fault: u16,
    },
    Ready,
    Runs,
}

#[derive(Debug)]
pub(super) struct Work {
    pub(super) tag: u32,
    pub(super) serial: u64,
    pub(super) lun: Lun,
    pub(super) attribute: Attribute,
    pub(super) cdb: Cdb,
    pub(super) read: bool,
    pub(super) write: bool,
    pub(super) announced: u32,
    pub(super) announced_read: u32,
    pub(super) moves: Expected,
    pub(super) immediate: bool,
    pub(super) state: State,
    pub(super) data: Vec<u8>,
    pub(super) r2ts: u32,
    /// Bytes that count as collected or, while it runs, as executing.
    pub(super) counts: u64,
}

impl Model {
    pub(super) fn scsi(&mut self, header: &Bhs, ahs: &[u8], data: &[u8]) {
        let attribute = match header[1] & 7 {
            0 | 1 => Attribute::Simple,
            2 => Attribute::Ordered,
            3 => Attribute::HeadOfQueue,
            4 => Attribute::Aca,
            _ => return self.reject(header, reason::FIELD),
        };
        let Some(announced_read) = read_length(ahs) else { return self.reject(header, reason::FIELD) };
        let tag = word(header, 16);
        if self.tasks.iter().any(|task| task.tag == tag) {
            return self.reject(header, reason::IN_PROGRESS);
        }
        let immediate = header[0] & 0x40 != 0;
        let depth = usize::try_from(self.limits.queue_depth).unwrap_or(usize::MAX);
        if immediate && self.tasks.len() >= 2 * depth {
            return self.reject(header, reason::IMMEDIATE);
        }
        let mut lun = [0; 8];
        lun.copy_from_slice(&header[8..16]);
        let (lun, cdb) = (Lun(lun), Cdb::new(&header[32..]));
        let mut task = Work {
            tag,
            serial: 0,
            lun,
            attribute,
            cdb,
            read: header[1] & 0x40 != 0,
            write: header[1] & 0x20 != 0,
            announced: word(header, 20),
            announced_read,
            moves: self.nexus.expected(lun, &cdb),
            immediate,
            state: State::Ready,
            data: Vec::new(),
            r2ts: 0,
            counts: 0,
        };
        let most = task.announced.min(self.agreed.first_burst_bytes);
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let is_legal = len == 0 || task.write && self.agreed.immediate_data && len <= most;
        let more = task.write && header[1] & 0x80 == 0;
        let wanted = task.wanted();
        let is_whole = is_legal && !more && u64::from(len) >= wanted;
        if is_legal {
            task.data = data[..data.len().min(usize::try_from(wanted).unwrap_or(0))].to_vec();
        }
        // It is answered at once if no ordering prevents that, and it reads no data or a single PDU.
        let room = u64::from(self.agreed.send_segment_bytes.min(self.agreed.max_burst_bytes));
        let is_alone = self.waiting().next().is_none();
        let may_run = match attribute {
            Attribute::HeadOfQueue => true,
            Attribute::Ordered => is_alone,
            _ => !self.waiting().any(|other| other.attribute == Attribute::Ordered),
        };
        if is_whole && may_run && header[1] & 0x80 != 0 {
            if task.moves.data_in_bytes <= room
                && let Some((reply, data_in)) = self.try_now(&task)
            {
                return self.reply(&task, &reply, &data_in);
            }
            if is_alone {
                return self.enter(task, true);
            }
        }
        let fault = if more && self.agreed.initial_r2t || !is_legal { 0x0c0c } else { 0 };
        let unsolicited = more.then(|| Sequence {
            tag: NONE,
            r2t: NONE,
            next: u64::from(len),
            end: u64::from(most),
            data_sn: 0,
        });
        task.state =
            State::Collects { unsolicited, requested: VecDeque::new(), next: 0, admitted: false, fault };
        self.enter(task, false);
    }

    /// Adds a task that is not answered at once: it runs or collects data.
    fn enter(&mut self, mut task: Work, is_alone: bool) {
        self.serial += 1;
        task.serial = self.serial;
        let tag = task.tag;
        self.tasks.push(task);
        if is_alone {
            self.start(self.tasks.len() - 1);
        } else {
            self.advance(tag);
            if self.waiting().next().is_some() {
                self.pump();
            }
        }
    }

    /// Whether the second target's handling of a command can be predicted.
    fn check_predictable(&mut self, cdb: &Cdb, attribute: Attribute) {
        let is_simple = !is_of_steps(cdb.bytes()) && attribute != Attribute::Ordered;
        self.is_open |= self.disk.has_or_holds_requests() && !is_simple;
    }

    fn try_now(&mut self, task: &Work) -> Option<(Reply, Vec<u8>)> {
        self.check_predictable(&task.cdb, task.attribute);
        let mut data_in = vec![0; usize::try_from(task.moves.data_in_bytes).unwrap_or(0)];
        let command = Command {
            lun: task.lun,
            attribute: task.attribute,
            cdb: &task.cdb,
            data_out: &task.data,
            announced_bytes: task.announced_out(),
        };
        match self.nexus.try_now(&command, &mut data_in) {
            Now::Done { reply, data_in_bytes } => {
                data_in.truncate(data_in_bytes);
                Some((reply, data_in))
            }
            Now::MustWait => None,
        }
    }

    /// Executes a task, if there is room.
    fn start(&mut self, place: usize) {
        let needs_room = self.tasks[place].moves.needs_room;
        if !admits(self.running(), needs_room, self.limits.bytes_executing) {
            return;
        }
        let (cdb, attribute) = (self.tasks[place].cdb, self.tasks[place].attribute);
        self.check_predictable(&cdb, attribute);
        let task = &mut self.tasks[place];
        let data = std::mem::take(&mut task.data);
        task.state = State::Runs;
        task.counts = task.moves.data_in_bytes + u64::try_from(data.len()).unwrap_or(0);
        let serial = task.serial;
        let task = Task {
            lun: task.lun,
            attribute: task.attribute,
            tag: serial,
            // The target forgets at once the tasks of this nexus that it aborts.
            arrival: self.nexus.arrival(task.lun),
            cdb: task.cdb,
            data_out: data,
            announced_bytes: task.announced_out(),
            data_in: Vec::new(),
        };
        let events = Arc::clone(&self.events);
        self.nexus.execute(task, move |outcome| {
            events.lock().unwrap_or_else(PoisonError::into_inner).push_back(Event::Task(serial, outcome));
        });
    }

    /// Oldest first: ready tasks run unless an ordered task prevents it, and collecting tasks request their
    /// data.
    pub(super) fn pump(&mut self) {
        let waiting: Vec<u64> = self.waiting().map(|task| task.serial).collect();
        for serial in waiting {
            let Some(place) = self.tasks.iter().position(|task| task.serial == serial) else { continue };
            match &self.tasks[place].state {
                State::Ready if self.may_run(place) => self.start(place),
                State::Collects { unsolicited: None, requested, .. } if requested.is_empty() => {
                    self.request_data(place)
                }
                _ => {}
            }
        }
    }

    fn may_run(&self, place: usize) -> bool {
        let task = &self.tasks[place];
        let mut before = self.waiting().filter(|other| other.serial < task.serial);
        match task.attribute {
            Attribute::HeadOfQueue => true,
            Attribute::Ordered => before.next().is_none(),
            _ => !before.any(|other| other.attribute == Attribute::Ordered),
        }
    }

    pub(super) fn data_out(&mut self, header: &Bhs, data: &[u8], is_intact: bool) {
        let (tag, transfer_tag) = (word(header, 16), word(header, 20));
        let Some(place) = self.tasks.iter().position(|task| task.tag == tag) else { return };
        let wanted = self.tasks[place].wanted();
        let task = &mut self.tasks[place];
        let State::Collects { unsolicited, requested, fault, .. } = &mut task.state else { return };
        let sequence = if transfer_tag == NONE { unsolicited.as_mut() } else { requested.front_mut() };
        if transfer_tag != NONE && sequence.as_ref().is_some_and(|sequence| sequence.tag == UNSEEN) {
            self.is_open = true;
            return;
        }
        let Some(sequence) = sequence.filter(|sequence| sequence.tag == transfer_tag) else {
            return self.reject(header, reason::FIELD);
        };
        let is_final = header[1] & 0x80 != 0;
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let end = sequence.next + len;
        let fits = word(header, 36) == sequence.data_sn
            && u64::from(word(header, 40)) == sequence.next
            && end <= sequence.end
            && (end == sequence.end || !is_final || transfer_tag == NONE);
        sequence.next = end.min(sequence.end);
        sequence.data_sn = sequence.data_sn.wrapping_add(1);
        if *fault == 0 {
            match (is_intact, fits) {
                (false, _) => *fault = 0x4705,
                (true, false) => *fault = 0x0c0d,
                (true, true) => {
                    task.data.extend_from_slice(data);
                    task.data.truncate(usize::try_from(wanted).unwrap_or(usize::MAX));
                }
            }
        }
        if !is_final {
            return;
        }
        if transfer_tag == NONE {
            *unsolicited = None;
        } else {
            requested.pop_front();
        }
        self.advance(tag);
        if self.waiting().next().is_some() {
            self.pump();
        }
    }

    /// Called when no data of a task is under way: the task is refused, becomes ready, or requests more.
    fn advance(&mut self, tag: u32) {
        let Some(place) = self.tasks.iter().position(|task| task.tag == tag) else { return };
        let task = &mut self.tasks[place];
        let has = u64::try_from(task.data.len()).unwrap_or(0);
        let wanted = task.wanted();
        let State::Collects { unsolicited: None, requested, fault, .. } = &task.state else { return };
        match (*fault, requested.is_empty()) {
            (0, true) if has >= wanted => task.state = State::Ready,
            (0, _) => self.request_data(place),
            (_, false) => {}
            (code, true) => {
                let task = self.tasks.remove(place);
                let [asc, ascq] = code.to_be_bytes();
                let sense = [0x70, 0, 0x0b, 0, 0, 0, 0, 10, 0, 0, 0, 0, asc, ascq, 0, 0, 0, 0];
                self.answer(&task, Status::CheckCondition.byte(), &sense, &[]);
            }
        }
    }

    fn request_data(&mut self, place: usize) {
        let needs_room = self.tasks[place].moves.needs_room;
        let limits = (u64::from(self.agreed.max_burst_bytes), usize::from(self.agreed.outstanding_r2t));
        let has_room = admits(self.waiting(), needs_room, self.limits.bytes_collected);
        let task = &mut self.tasks[place];
        let wanted = task.wanted();
        let has = u64::try_from(task.data.len()).unwrap_or(0);
        let State::Collects { requested, next, admitted, .. } = &mut task.state else { return };
        if !*admitted {
            if !has_room {
                return;
            }
            (*admitted, *next) = (true, has);
            task.counts = wanted - has;
        }
        let mut r2ts = Vec::new();
        while requested.len() < limits.1 && *next < wanted {
            let end = wanted.min(*next + limits.0);
            requested.push_back(Sequence { tag: UNSEEN, r2t: task.r2ts, next: *next, end, data_sn: 0 });
            r2ts.push((task.r2ts, *next, end - *next));
            task.r2ts += 1;
            *next = end;
        }
        let (tag, lun) = (task.tag, task.lun);
        for (number, offset, len) in r2ts {
            let header = self.say(0x31, 0x80, tag, &[], Numbered::Next);
            header[8..16].copy_from_slice(&lun.0);
            put(header, 36, number);
            put(header, 40, u32::try_from(offset).unwrap_or(u32::MAX));
            put(header, 44, u32::try_from(len).unwrap_or(u32::MAX));
        }
    }

    pub(super) fn reply(&mut self, task: &Work, reply: &Reply, data_in: &[u8]) {
        let sense = reply.sense.map(|sense| sense.bytes().to_vec()).unwrap_or_default();
        self.answer(task, reply.status.byte(), &sense, data_in);
    }

    /// Data-In up to the length that the initiator accepts, and the status: with the last data, or in a PDU
    /// of its own.
    fn answer(&mut self, task: &Work, status: u8, sense: &[u8], data_in: &[u8]) {
        let gives = u64::try_from(data_in.len()).unwrap_or(u64::MAX);
        let takes = match (task.read, task.write) {
            (true, true) => task.announced_read,
            (true, false) => task.announced,
            _ => 0,
        };
        let main = match (task.read, task.write) {
            (_, true) => residual(task.announced, task.moves.data_out_bytes),
            (true, false) => residual(task.announced, gives),
            (false, false) => residual(0, gives.max(task.moves.data_out_bytes)),
        };
        let both = task.read && task.write;
        let mut left = &data_in[..data_in.len().min(usize::try_from(takes).unwrap_or(usize::MAX))];
        let size = |bytes: u32| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (segment, burst) = (size(self.agreed.send_segment_bytes), size(self.agreed.max_burst_bytes));
        let (mut number, mut offset) = (task.r2ts, 0);
        while !left.is_empty() {
            let most = segment.min(burst - offset % burst);
            let (now, rest) = left.split_at(left.len().min(most));
            left = rest;
            let is_last = left.is_empty() && status == 0 && sense.is_empty() && !both;
            let ends = left.is_empty() || (offset + now.len()).is_multiple_of(burst);
            let flags = if ends { 0x80 } else { 0 } | if is_last { 1 | main.0 } else { 0 };
            let numbered = if is_last { Numbered::Status } else { Numbered::Nothing };
            let header = self.say(0x25, flags, task.tag, now, numbered);
            put(header, 20, NONE);
            put(header, 36, number);
            put(header, 40, u32::try_from(offset).unwrap_or(u32::MAX));
            if is_last {
                return put(header, 44, main.1);
            }
            number += 1;
            offset += now.len();
        }
        let mut data = Vec::new();
        if !sense.is_empty() {
            data.extend(u16::try_from(sense.len()).unwrap_or(0).to_be_bytes());
            data.extend(sense);
        }
        let read = if both { residual(task.announced_read, gives) } else { (0, 0) };
        let header = self.say(0x21, 0x80 | main.0 | read.0 << 2, task.tag, &data, Numbered::Status);
        header[3] = status;
        put(header, 36, number);
        put(header, 40, read.1);
        put(header, 44, main.1);
    }
}

impl Work {
    /// The data to request: no more than was announced.
    fn wanted(&self) -> u64 {
        if self.write { self.moves.data_out_bytes.min(u64::from(self.announced)) } else { 0 }
    }

    fn announced_out(&self) -> u64 {
        if self.write { u64::from(self.announced) } else { 0 }
    }
}

/// Whether a limit of bytes admits another task. A task that stores nothing may exceed it by a quarter
/// together with similar tasks, or be the only one.
fn admits<'a>(counted: impl Iterator<Item = &'a Work>, needs_room: bool, limit: u64) -> bool {
    let (mut all, mut others) = (0, 0);
    for task in counted {
        all += task.counts;
        others += if task.moves.needs_room { 0 } else { task.counts };
    }
    all < limit || !needs_room && (others < limit / 4 || others == 0)
}

/// The flags and the count for bytes that were announced and not moved, or the reverse.
fn residual(announced: u32, moved: u64) -> (u8, u32) {
    let announced = u64::from(announced);
    let count = u32::try_from(announced.abs_diff(moved)).unwrap_or(u32::MAX);
    match announced.cmp(&moved) {
        std::cmp::Ordering::Less => (4, count),
        std::cmp::Ordering::Equal => (0, 0),
        std::cmp::Ordering::Greater => (2, count),
    }
}

/// RFC 7143, 11.2.2: additional header segments, one of which may give the read length. `None`: they are
/// invalid.
fn read_length(ahs: &[u8]) -> Option<u32> {
    let (mut at, mut found) = (0, 0);
    while at < ahs.len() {
        let len = usize::from(ahs[at]) << 8 | usize::from(ahs[at + 1]);
        let body = ahs.get(at + 3..at + 3 + len)?;
        match ahs[at + 2] & 0x3f {
            1 if len > 0 => {}
            2 if len == 5 => found = word(body, 1),
            _ => return None,
        }
        at += (3 + len).next_multiple_of(4);
        if at > ahs.len() {
            return None;
        }
    }
    Some(found)
}
