//! Task management functions.
//!
//! The session itself drops tasks that do not run yet. The logical unit aborts all others, and answers when
//! the affected tasks have ended. Tasks of other sessions that do not run yet are aborted when they are given
//! to the device. An aborted task is not answered.

use std::collections::VecDeque;
use std::sync::Arc;

use headwater_scsi::{Function, FunctionResult, Lun};

use super::event::Event;
use super::serve::End;
use super::session::Session;
use super::tasks::State;
use super::window::Verdict;
use crate::wire::header::Bhs;
use crate::wire::request::TaskManagementRequest;
use crate::wire::response::{RejectReason, TaskManagementResponse};

/// Functions under way in one session; further ones are refused.
const PENDING: usize = 32;

const COMPLETE: u8 = 0;
const NO_SUCH_TASK: u8 = 1;
const NO_SUCH_LUN: u8 = 2;
const NO_REASSIGNMENT: u8 = 4;
const NOT_SUPPORTED: u8 = 5;
const REJECTED: u8 = 255;

/// The functions that have not been answered.
#[derive(Default)]
pub(super) struct Functions {
    last_serial: u64,
    pending: VecDeque<Pending>,
}

#[derive(Clone, Copy)]
struct Pending {
    serial: u64,
    tag: u32,
    ends_sessions: bool,
}

impl Functions {
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }
}

impl Session<'_> {
    pub(super) fn function(&mut self, header: &Bhs) -> Result<(), End> {
        let Ok(request) = TaskManagementRequest::decode(header) else {
            return self.reject(header, RejectReason::InvalidPduField);
        };
        if self.nexus.is_none() {
            return self.reject(header, RejectReason::CommandNotSupported);
        }
        tracing::debug!("iSCSI: {}: task management function {}", self.who, request.function);
        let lun = Lun(request.lun);
        let function = match request.function {
            1 => return self.abort_task(&request),
            2 => Function::AbortTaskSet { lun },
            4 => Function::ClearTaskSet { lun },
            5 => Function::LogicalUnitReset { lun },
            6 => Function::TargetWarmReset,
            7 => Function::TargetColdReset,
            8 => return self.answer_function(request.task_tag, NO_REASSIGNMENT),
            // 3 is CLEAR ACA, which no logical unit supports.
            _ => return self.answer_function(request.task_tag, NOT_SUPPORTED),
        };
        let concerned = match function {
            Function::TargetWarmReset | Function::TargetColdReset => None,
            _ => Some(lun),
        };
        for tag in self.tasks.waiting_on(concerned) {
            self.forget(tag);
        }
        let gave_up = self.give_up_before(request.cmd_sn, concerned);
        self.manage(request.task_tag, function)?;
        if gave_up { self.take_held() } else { Ok(()) }
    }

    fn abort_task(&mut self, request: &TaskManagementRequest) -> Result<(), End> {
        let tag = request.referenced_tag;
        let Some(task) = self.tasks.get_mut(tag) else {
            return self.abort_missing(request);
        };
        if task.order.lun != Lun(request.lun) {
            return self.answer_function(request.task_tag, NO_SUCH_TASK);
        }
        let function = Function::AbortTask { lun: task.order.lun, tag: task.serial };
        if let State::Running(_) = task.state {
            return self.manage(request.task_tag, function);
        }
        self.forget(tag);
        self.answer_function(request.task_tag, COMPLETE)?;
        // If an ordered task is dropped, others may run.
        if self.tasks.is_clear() { Ok(()) } else { self.pump() }
    }

    /// Aborts a command that was lost on its way (a wrong data digest), or that waits for a lost one. If it
    /// was sent before the request, its number counts as received (RFC 7143, 11.5.1). Otherwise all later
    /// commands would wait for ever.
    fn abort_missing(&mut self, request: &TaskManagementRequest) -> Result<(), End> {
        let number = request.referenced_cmd_sn;
        // How many command numbers lie between the command and the request; `None` if the command is not
        // before the request.
        let before = request.cmd_sn.wrapping_sub(number);
        let was_sent = before != 0 && before <= u32::MAX / 2;
        if !was_sent
            || self.window.judge(number) == Verdict::Ignore
            || !self.give_up(number, request.referenced_tag)
        {
            return self.answer_function(request.task_tag, NO_SUCH_TASK);
        }
        self.answer_function(request.task_tag, COMPLETE)?;
        self.take_held()
    }

    /// Gives up commands that were sent before an immediate function and wait for a lost command. The
    /// function affects them too, and its answer says that none of them will be executed (RFC 7143, 4.2.3.3).
    /// A lost command counts as received. Returns whether there were any such commands.
    fn give_up_before(&mut self, cmd_sn: u32, concerned: Option<Lun>) -> bool {
        let next = self.window.next();
        // None if the function is not immediate: then it is the last command that arrived.
        let before = cmd_sn.wrapping_sub(next);
        if before > u32::MAX / 2 {
            return false;
        }
        let mut gave_up = false;
        // There are at most as many as the window has numbers.
        let numbers = (0..before).map(|ahead| next.wrapping_add(ahead));
        let numbers: Vec<u32> =
            numbers.take_while(|number| self.window.judge(*number) != Verdict::Ignore).collect();
        for number in numbers {
            if let Some(tag) = self.held_task(number, concerned) {
                gave_up |= self.give_up(number, tag);
            }
        }
        gave_up
    }

    /// Drops a task that does not run yet.
    pub(super) fn forget(&mut self, tag: u32) {
        let Some(task) = self.tasks.remove(tag) else { return };
        self.give_back(&task);
        if !task.order.immediate {
            self.window.close();
        }
    }

    fn manage(&mut self, tag: u32, function: Function) -> Result<(), End> {
        if self.functions.pending.len() >= PENDING {
            return self.answer_function(tag, REJECTED);
        }
        self.functions.last_serial = self.functions.last_serial.wrapping_add(1);
        let serial = self.functions.last_serial;
        let ends_sessions = function == Function::TargetColdReset;
        self.functions.pending.push_back(Pending { serial, tag, ends_sessions });
        let inbox = Arc::clone(&self.inbox);
        if let Some(nexus) = &self.nexus {
            nexus.manage(function, move |result| inbox.post(Event::Managed { serial, result }));
        }
        Ok(())
    }

    pub(super) fn function_ended(&mut self, serial: u64, result: FunctionResult) -> Result<(), End> {
        let pending = &mut self.functions.pending;
        let Some(at) = pending.iter().position(|pending| pending.serial == serial) else { return Ok(()) };
        let Some(pending) = pending.remove(at) else { return Ok(()) };
        let response = match result {
            FunctionResult::Complete => COMPLETE,
            FunctionResult::TaskDoesNotExist => NO_SUCH_TASK,
            FunctionResult::LunDoesNotExist => NO_SUCH_LUN,
        };
        self.answer_function(pending.tag, response)?;
        if pending.ends_sessions
            && let Some(target) = &self.target
        {
            self.shared.sessions.end_sessions_of(target, self.permit.id());
            self.flush_batch(&[])?;
            return Err(End::Orderly("the initiator reset the target, which ends all sessions"));
        }
        Ok(())
    }

    fn answer_function(&mut self, task_tag: u32, response: u8) -> Result<(), End> {
        let reply = TaskManagementResponse { response, task_tag, numbers: self.next_numbers() };
        self.put_pdu(&reply.encode(), &[])
    }
}
