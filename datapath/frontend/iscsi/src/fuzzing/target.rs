//! A second, very simple implementation of a target's full feature phase: a list of tasks, and a list of
//! expected answers.
//!
//! It does not implement SCSI commands: it gives them to a second SCSI target, whose disk waits whenever the
//! first target's disk does. It builds each PDU byte by byte, following the figures of RFC 7143, section 11.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use headwater_block::fuzzing::PlainDisk;
use headwater_scsi::{Cdb, Function, FunctionResult, Lun, Nexus, Outcome};

mod tasks;

use tasks::{State, Work};

use super::texts::Exchange;
use crate::limits::Limits;
use crate::login::keys::Parameters;
use crate::server::session::alone::{Counts, Ended};
use crate::wire::Bhs;
use crate::wire::digest::digest;

pub(super) const NONE: u32 = u32::MAX;
/// A target tag that the model has not seen yet. Real tags count up from 1 and never reach this value.
pub(super) const UNSEEN: u32 = 0x7fff_ffff;

/// Reasons of a Reject.
pub(super) mod reason {
    pub(crate) const DATA_DIGEST: u8 = 2;
    pub(crate) const SNACK: u8 = 3;
    pub(crate) const PROTOCOL: u8 = 4;
    pub(crate) const NOT_SUPPORTED: u8 = 5;
    pub(crate) const IMMEDIATE: u8 = 6;
    pub(crate) const IN_PROGRESS: u8 = 7;
    pub(crate) const FIELD: u8 = 9;
    pub(crate) const LONG: u8 = 10;
}

/// Which numbers a reply carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbered {
    /// It uses up a status number.
    Status,
    /// It carries the next status number without using it up.
    Next,
    /// It carries none (Data-In without a status).
    Nothing,
}

/// A PDU that is expected, without its numbers.
#[derive(Clone, Debug)]
pub(super) struct Expectation {
    pub(super) header: Bhs,
    pub(super) data: Vec<u8>,
    pub(super) numbered: Numbered,
    /// It carries a tag that the target chooses: for the text exchange with this number, or for an R2T (0).
    pub(super) tagged: Option<u64>,
}

#[derive(Debug)]
enum Event {
    Task(u64, Outcome),
    Function(u64, FunctionResult),
}

/// Three numbers of four bytes, if the header has them.
fn word(header: &[u8], at: usize) -> u32 {
    header[at..at + 4].iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

fn put(header: &mut Bhs, at: usize, number: u32) {
    header[at..at + 4].copy_from_slice(&number.to_be_bytes());
}

pub(super) struct Model {
    limits: Limits,
    pub(super) agreed: Parameters,
    nexus: Nexus,
    disk: Arc<PlainDisk>,
    cid: u16,
    events: Arc<Mutex<VecDeque<Event>>>,
    stream: Vec<u8>,
    next: u32,
    /// Commands that arrived out of order: header, additional headers, data.
    early: BTreeMap<u32, (Bhs, Vec<u8>, Vec<u8>)>,
    tasks: Vec<Work>,
    serial: u64,
    functions: Vec<(u64, u32, bool)>,
    pub(super) texts: Exchange,
    pub(super) said_texts: u64,
    pub(super) expected: Vec<Expectation>,
    closing: Option<u32>,
    end: Option<Ended>,
    /// The result cannot be predicted: a tag that was not seen yet, or a command of several steps on a
    /// waiting disk, which another thread continues.
    pub(super) is_open: bool,
}

/// Commands that take more than one request to the disk, or block others.
const OF_STEPS: [u8; 12] = [0x2e, 0x2f, 0x41, 0x42, 0x83, 0x89, 0x8b, 0x8e, 0x8f, 0x93, 0xae, 0xaf];

pub(super) fn is_of_steps(cdb: &[u8]) -> bool {
    OF_STEPS.contains(&cdb[0])
}

impl Model {
    pub(super) fn new(
        limits: Limits,
        agreed: Parameters,
        (nexus, disk): (Nexus, Arc<PlainDisk>),
        cid: u16,
        next: u32,
    ) -> Self {
        Self {
            limits,
            agreed,
            nexus,
            disk,
            cid,
            events: Arc::default(),
            stream: Vec::new(),
            next,
            early: BTreeMap::new(),
            tasks: Vec::new(),
            serial: 0,
            functions: Vec::new(),
            texts: Exchange::default(),
            said_texts: 0,
            expected: Vec::new(),
            closing: None,
            end: None,
            is_open: false,
        }
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The most bytes that a command transfers, in either direction.
    pub(super) fn moves(&self, lun: Lun, cdb: &Cdb) -> u64 {
        let moves = self.nexus.expected(lun, cdb);
        moves.data_in_bytes.max(moves.data_out_bytes)
    }

    pub(super) fn end(&self) -> Option<Ended> {
        self.end
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something has ended and was not answered yet.
    pub(super) fn has_events(&self) -> bool {
        self.end.is_none() && !self.lock().is_empty()
    }

    fn open(&self) -> u32 {
        let open = self.tasks.iter().filter(|task| !task.immediate).count();
        u32::try_from(open).unwrap_or(u32::MAX)
    }

    /// How many numbers from the next one on are accepted.
    fn window(&self) -> u32 {
        self.limits.queue_depth.saturating_sub(self.open())
    }

    fn running(&self) -> impl Iterator<Item = &Work> {
        self.tasks.iter().filter(|task| matches!(task.state, State::Runs))
    }

    fn waiting(&self) -> impl Iterator<Item = &Work> {
        self.tasks.iter().filter(|task| !matches!(task.state, State::Runs))
    }

    pub(super) fn counts(&self) -> Counts {
        let held = self.early.values();
        Counts {
            exp_cmd_sn: self.next,
            max_cmd_sn: self.next.wrapping_add(self.window()).wrapping_sub(1),
            tasks: self.tasks.len(),
            running: self.running().count(),
            bytes_collected: self.waiting().map(|task| task.counts).sum(),
            bytes_executing: self.running().map(|task| task.counts).sum(),
            held: self.early.len(),
            held_bytes: held.map(|(_, ahs, data)| ahs.len() + data.len()).sum(),
        }
    }

    /// R2Ts that were seen: task, tag of the R2T, and which data is still expected.
    pub(super) fn wanted(&self) -> Vec<(u32, u32, u32, u32, u32)> {
        let mut wanted = Vec::new();
        for task in &self.tasks {
            if let State::Collects { requested, .. } = &task.state {
                let number = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
                let each = requested.iter().filter(|sequence| sequence.tag != UNSEEN);
                wanted.extend(
                    each.map(|s| (task.tag, s.tag, s.data_sn, number(s.next), number(s.end - s.next))),
                );
            }
        }
        wanted
    }

    /// An R2T was seen, with its tag.
    pub(super) fn learn(&mut self, task_tag: u32, r2t: u32, tag: u32) {
        for task in self.tasks.iter_mut().filter(|task| task.tag == task_tag) {
            if let State::Collects { requested, .. } = &mut task.state {
                requested.iter_mut().filter(|sequence| sequence.r2t == r2t).for_each(|s| s.tag = tag);
            }
        }
    }

    pub(super) fn say(
        &mut self,
        opcode: u8,
        flags: u8,
        tag: u32,
        data: &[u8],
        numbered: Numbered,
    ) -> &mut Bhs {
        let mut header = [0; 48];
        (header[0], header[1]) = (opcode, flags);
        put(&mut header, 16, tag);
        let len = u32::try_from(data.len()).unwrap_or(0).to_be_bytes();
        header[5..8].copy_from_slice(&len[1..]);
        let tagged = (opcode == 0x31).then_some(0);
        self.expected.push(Expectation { header, data: data.to_vec(), numbered, tagged });
        let last = self.expected.len() - 1;
        &mut self.expected[last].header
    }

    pub(super) fn reject(&mut self, header: &Bhs, reason: u8) {
        self.say(0x3f, 0x80, NONE, header, Numbered::Status)[2] = reason;
    }

    fn fault(&mut self) {
        self.end = Some(Ended::Fault);
    }

    /// A round: takes these bytes, and does everything that can be done.
    pub(super) fn round(&mut self, bytes: &[u8]) {
        if self.end.is_some() {
            return;
        }
        if self.closing.is_none() {
            self.stream.extend_from_slice(bytes);
        }
        self.take_events();
        while self.end.is_none() && self.closing.is_none() && self.take_pdu() {}
        if self.end.is_none() {
            self.take_events();
        }
        self.close();
    }

    /// The initiator sends nothing more.
    pub(super) fn hang_up(&mut self) {
        if self.end.is_some() || self.closing.is_some() {
            return self.close();
        }
        if self.stream.is_empty() && self.waiting().next().is_none() {
            // This is not a valid tag, so nothing is answered.
            self.closing = Some(NONE);
        } else {
            self.fault();
        }
        self.close();
    }

    fn close(&mut self) {
        let Some(tag) = self.closing.filter(|_| self.end.is_none() && self.running().next().is_none()) else {
            return;
        };
        if tag != NONE {
            self.answer_logout(tag, 0);
        }
        self.end = Some(Ended::Orderly);
    }

    fn answer_logout(&mut self, tag: u32, response: u8) {
        let wait = self.agreed.time_to_wait_s.to_be_bytes();
        let header = self.say(0x26, 0x80, tag, &[], Numbered::Status);
        header[2] = response;
        header[40..42].copy_from_slice(&wait);
    }

    fn take_events(&mut self) {
        let events = std::mem::take(&mut *self.lock());
        let any = !events.is_empty();
        for event in events {
            if self.end.is_some() {
                break;
            }
            match event {
                Event::Task(serial, outcome) => {
                    let place = self.tasks.iter().position(|task| task.serial == serial);
                    let Some(task) = place.map(|place| self.tasks.remove(place)) else { continue };
                    if let Some(reply) = outcome.reply {
                        self.reply(&task, &reply, &outcome.data_in);
                    }
                }
                Event::Function(serial, result) => self.function_ended(serial, result),
            }
        }
        if any && self.end.is_none() && self.waiting().next().is_some() {
            self.pump();
        }
    }

    /// Takes the PDU at the front, if it has arrived completely.
    fn take_pdu(&mut self) -> bool {
        let stream = std::mem::take(&mut self.stream);
        let Some(header) = stream.first_chunk::<48>().copied() else {
            self.stream = stream;
            return false;
        };
        let ahs_bytes = usize::from(header[4]) * 4;
        let mut at = 48 + ahs_bytes;
        if self.agreed.header_digest {
            if stream.len() < at + 4 {
                self.stream = stream;
                return false;
            }
            if digest(&[&stream[..at]]) != stream[at..at + 4] {
                self.fault();
                return false;
            }
            at += 4;
        }
        let len = word(&[0, header[5], header[6], header[7]], 0);
        if len > self.limits.receive_segment_bytes {
            self.reject(&header, reason::PROTOCOL);
            self.fault();
            return false;
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let padded = len.next_multiple_of(4);
        let has_digest = self.agreed.data_digest && len > 0;
        let total = at + padded + if has_digest { 4 } else { 0 };
        if stream.len() < total {
            self.stream = stream;
            return false;
        }
        let data = &stream[at..at + padded];
        let is_intact = !has_digest || digest(&[data]) == stream[total - 4..total];
        self.pdu(&header, &stream[48..48 + ahs_bytes], &data[..len], is_intact);
        self.stream = stream[total..].to_vec();
        true
    }

    fn pdu(&mut self, header: &Bhs, ahs: &[u8], data: &[u8], is_intact: bool) {
        let opcode = header[0] & 0x3f;
        if !is_intact {
            self.reject(header, reason::DATA_DIGEST);
            if opcode == 0x05 {
                self.data_out(header, data, false);
            }
            return;
        }
        match opcode {
            0x00 | 0x01 | 0x02 | 0x04 | 0x06 => self.numbered(header, ahs, data),
            0x05 => self.data_out(header, data, true),
            0x10 => self.reject(header, reason::SNACK),
            // A login, and everything that only targets send.
            0x03 | 0x20..=0x26 | 0x31 | 0x32 | 0x3f => {
                self.reject(header, reason::PROTOCOL);
                self.fault();
            }
            _ => self.reject(header, reason::NOT_SUPPORTED),
        }
    }

    /// Processes commands in the order of their numbers, and immediate commands at once.
    fn numbered(&mut self, header: &Bhs, ahs: &[u8], data: &[u8]) {
        if header[0] & 0x40 != 0 {
            return self.command(header, ahs, data);
        }
        let number = word(header, 24);
        let ahead = number.wrapping_sub(self.next);
        if ahead >= self.window() {
            return;
        }
        self.early.entry(number).or_insert_with(|| (*header, ahs.to_vec(), data.to_vec()));
        self.take_early();
    }

    fn take_early(&mut self) {
        while self.end.is_none() && self.closing.is_none() && self.window() > 0 {
            let Some((header, ahs, data)) = self.early.remove(&self.next) else { break };
            self.next = self.next.wrapping_add(1);
            self.command(&header, &ahs, &data);
        }
    }

    fn command(&mut self, header: &Bhs, ahs: &[u8], data: &[u8]) {
        let tag = word(header, 16);
        match header[0] & 0x3f {
            0x01 => self.scsi(header, ahs, data),
            _ if !ahs.is_empty() => self.reject(header, reason::FIELD),
            0x00 if tag == NONE => {}
            0x00 => {
                let limit = usize::try_from(self.agreed.send_segment_bytes).unwrap_or(0);
                let echo = &data[..data.len().min(limit)];
                put(self.say(0x20, 0x80, tag, echo, Numbered::Status), 20, NONE);
            }
            0x02 => self.function(header),
            0x04 => self.text(header, data),
            _ => self.logout(header),
        }
    }

    fn logout(&mut self, header: &Bhs) {
        let tag = word(header, 16);
        let cid = u16::from_be_bytes([header[20], header[21]]);
        match header[1] & 0x7f {
            1 if cid != self.cid => self.answer_logout(tag, 1),
            0 | 1 => {
                self.tasks.retain(|task| matches!(task.state, State::Runs));
                self.closing = Some(tag);
            }
            2 => self.answer_logout(tag, 2),
            _ => self.reject(header, reason::FIELD),
        }
    }

    fn function(&mut self, header: &Bhs) {
        let tag = word(header, 16);
        let mut lun = [0; 8];
        lun.copy_from_slice(&header[8..16]);
        let lun = Lun(lun);
        let function = match header[1] & 0x7f {
            1 => return self.abort(header, lun),
            2 => Function::AbortTaskSet { lun },
            4 => Function::ClearTaskSet { lun },
            5 => Function::LogicalUnitReset { lun },
            6 => Function::TargetWarmReset,
            7 => Function::TargetColdReset,
            8 => return self.answer_function(tag, 4),
            _ => return self.answer_function(tag, 5),
        };
        let of_all = matches!(function, Function::TargetWarmReset | Function::TargetColdReset);
        self.tasks.retain(|task| matches!(task.state, State::Runs) || !of_all && task.lun != lun);
        let is_more = self.abort_all_early(word(header, 24), (!of_all).then_some(lun));
        self.manage(tag, function);
        if is_more {
            self.take_early();
        }
    }

    /// Commands that were sent before an immediate function count as received, and those that wait for their
    /// turn are dropped. Returns whether there were any.
    fn abort_all_early(&mut self, own: u32, concerned: Option<Lun>) -> bool {
        let before = own.wrapping_sub(self.next);
        if before > u32::MAX / 2 {
            return false;
        }
        let next = self.next;
        let mut is_any = false;
        for number in (0..before.min(self.window())).map(|ahead| next.wrapping_add(ahead)) {
            let stays = self.early.get(&number).is_some_and(|(early, ..)| {
                early[0] & 0x3f != 0x01 || concerned.is_some_and(|lun| early[8..16] != lun.0)
            });
            if !stays {
                self.early.insert(number, nothing());
                is_any = true;
            }
        }
        is_any
    }

    fn abort(&mut self, header: &Bhs, lun: Lun) {
        let (tag, wanted) = (word(header, 16), word(header, 20));
        let Some(place) = self.tasks.iter().position(|task| task.tag == wanted) else {
            return self.abort_early(header);
        };
        if self.tasks[place].lun != lun {
            return self.answer_function(tag, 1);
        }
        if matches!(self.tasks[place].state, State::Runs) {
            let serial = self.tasks[place].serial;
            return self.manage(tag, Function::AbortTask { lun, tag: serial });
        }
        self.tasks.remove(place);
        self.answer_function(tag, 0);
        if self.waiting().next().is_some() {
            self.pump();
        }
    }

    /// A command that has not arrived, or waits for its turn. If it was sent before the request, its number
    /// counts as received.
    fn abort_early(&mut self, header: &Bhs) {
        let (tag, number, own) = (word(header, 16), word(header, 32), word(header, 24));
        // The waiting command may be the referenced one, or another one.
        let is_another = |(early, ..): &(Bhs, Vec<u8>, Vec<u8>)| word(early, 16) != word(header, 20);
        let was_sent = own.wrapping_sub(number).wrapping_sub(1) < u32::MAX / 2;
        let could_come = number.wrapping_sub(self.next) < self.window();
        if !was_sent || !could_come || self.early.get(&number).is_some_and(is_another) {
            return self.answer_function(tag, 1);
        }
        self.answer_function(tag, 0);
        self.early.insert(number, nothing());
        self.take_early();
    }

    fn manage(&mut self, tag: u32, function: Function) {
        if self.functions.len() >= 32 {
            return self.answer_function(tag, 255);
        }
        self.serial += 1;
        let serial = self.serial;
        self.functions.push((serial, tag, function == Function::TargetColdReset));
        let events = Arc::clone(&self.events);
        self.nexus.manage(function, move |result| {
            events.lock().unwrap_or_else(PoisonError::into_inner).push_back(Event::Function(serial, result));
        });
    }

    fn function_ended(&mut self, serial: u64, result: FunctionResult) {
        let Some(place) = self.functions.iter().position(|function| function.0 == serial) else { return };
        let (_, tag, ends) = self.functions.remove(place);
        self.answer_function(
            tag,
            match result {
                FunctionResult::Complete => 0,
                FunctionResult::TaskDoesNotExist => 1,
                FunctionResult::LunDoesNotExist => 2,
            },
        );
        if ends {
            self.end = Some(Ended::Orderly);
        }
    }

    fn answer_function(&mut self, tag: u32, response: u8) {
        self.say(0x22, 0x80, tag, &[], Numbered::Status)[2] = response;
    }
}

/// A NOP-Out that requests no answer.
fn nothing() -> (Bhs, Vec<u8>, Vec<u8>) {
    let mut nothing = [0; 48];
    put(&mut nothing, 16, NONE);
    (nothing, Vec::new(), Vec::new())
}
