//! A target device with its logical units, and the nexuses that initiators have with it.
//!
//! A command is processed in this order:
//!
//! 1. The LUN is looked up; a LUN without a unit still answers INQUIRY and REPORT LUNS. The CDB is parsed
//!    ([`crate::cdb`]). Unless it only reads, the command passes the unit's fence ([`crate::queue`]) until it
//!    has finished or is in the set.
//! 2. If a unit attention is pending, it is reported instead (except to INQUIRY, REPORT LUNS, REQUEST SENSE).
//! 3. Reservations are checked.
//! 4. Commands about the unit itself are answered ([`crate::control`]).
//! 5. A READ, a WRITE and a flush are offered to the device. If it cannot execute them at once, they become
//!    tasks, like all other commands to the medium ([`crate::medium`], [`crate::queue`], [`crate::run`]).

use std::sync::Arc;

use headwater_block::{Attempt, IoError, Op as DeviceOp};

use crate::cdb::{self, Op, ReserveOut};
use crate::control::{self, Effect};
use crate::copies::Copies;
use crate::identity::Initiator;
use crate::link::{Attention, Link, NexusId};
use crate::medium::{self, Given};
use crate::queue::{Aborted, Closed, Kind, Pass, Waiter};
use crate::reservation::Access;
use crate::run::{self, Buffers, Done, Run};
use crate::sense::{Code, Fault, Status};
use crate::task::{
    Arrival, Cdb, Command, Expected, Function, FunctionResult, Lun, Now, Outcome, Reply, Task,
};
use crate::unit::LogicalUnit;

/// A SCSI target device.
#[derive(Debug)]
pub struct Target {
    name: String,
    units: Vec<(u16, Arc<LogicalUnit>)>,
}

impl Target {
    /// A target with these logical units, by LUN (0 to 16383; of several with one LUN the first counts). `name` is its
    /// SCSI name string.
    pub fn new(name: impl Into<String>, mut units: Vec<(u16, Arc<LogicalUnit>)>) -> Arc<Self> {
        units.sort_by_key(|(lun, _)| *lun);
        units.dedup_by_key(|(lun, _)| *lun);
        Arc::new(Self { name: name.into(), units })
    }

    /// Its SCSI name string.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The LUNs, ascending.
    pub(crate) fn luns(&self) -> impl Iterator<Item = u16> {
        self.units.iter().map(|(lun, _)| *lun)
    }

    /// A new I_T nexus. It ends when it is dropped; tasks in flight are then aborted.
    pub fn nexus(self: &Arc<Self>, initiator: Initiator) -> Nexus {
        let (id, initiator) = (NexusId::next(), Arc::new(initiator));
        let link = |unit: &Arc<LogicalUnit>| {
            let link = Arc::new(Link {
                unit: Arc::clone(unit),
                nexus: id,
                initiator: Arc::clone(&initiator),
                attention: Attention::default(),
                copies: Copies::default(),
            });
            if unit.options.power_on_attention {
                link.attention.establish(Code::POWER_ON_OR_RESET);
            }
            unit.attach(&link);
            link
        };
        let links = self.units.iter().map(|(lun, unit)| (*lun, link(unit))).collect();
        Nexus { target: Arc::clone(self), id, links }
    }
}

/// One I_T nexus, SCSI's term for a session. It may be used by several threads.
#[derive(Debug)]
pub struct Nexus {
    target: Arc<Target>,
    id: NexusId,
    links: Vec<(u16, Arc<Link>)>,
}

impl Nexus {
    fn link(&self, lun: Lun) -> Option<&Arc<Link>> {
        let number = lun.number()?;
        let place = self.links.binary_search_by_key(&number, |(lun, _)| *lun).ok()?;
        self.links.get(place).map(|(_, link)| link)
    }

    /// The [`Task::arrival`] of a command that arrives now.
    #[inline]
    pub fn arrival(&self, lun: Lun) -> Arrival {
        self.link(lun).map_or(Arrival::default(), |link| link.unit.tasks.arrival())
    }

    /// How much data the command moves. Zero for commands whose CDB will be refused, so that no data is
    /// requested.
    pub fn expected(&self, lun: Lun, cdb: &Cdb) -> Expected {
        let Ok(op) = cdb::parse(cdb) else { return Expected::default() };
        let Some(link) = self.link(lun) else {
            let expected = op.expected(0);
            return Expected { data_out_bytes: 0, ..expected };
        };
        let unit = &link.unit;
        let fits = match op {
            Op::Read { span, .. }
            | Op::Write { span, .. }
            | Op::WriteVerify { span, .. }
            | Op::Verify { span, check: cdb::Check::Data }
            | Op::OrWrite { span, .. } => unit.transfer_range(span).is_ok(),
            Op::CompareAndWrite { span, .. } => unit.range(span).is_ok(),
            Op::ReserveOut(ReserveOut { list_bytes, .. }) | Op::ExtendedCopy { list_bytes } => {
                list_bytes <= 1 << 16
            }
            _ => true,
        };
        if fits { op.expected(unit.geometry.logical_block_bytes) } else { Expected::default() }
    }

    /// Executes the command if that needs no I/O and no waiting (except that GET LBA STATUS may read
    /// metadata, as [`headwater_block::Device::extents`] does). With [`Now::MustWait`] nothing has happened
    /// that the initiator could notice.
    pub fn try_now(&self, command: &Command<'_>, data_in: &mut [u8]) -> Now {
        let Some(link) = self.link(command.lun) else {
            let parsed = cdb::parse(command.cdb);
            let result = control::absent(&self.target, &parsed);
            return self.data_now(parsed.as_ref().ok(), result, data_in);
        };
        let unit = &link.unit;
        let parsed = cdb::parse(command.cdb);
        let pass = parsed.as_ref().is_ok_and(may_change).then(|| unit.tasks.pass());
        let op = match admit(link, command.cdb, parsed) {
            Ok(op) => op,
            Err(reply) => return Now::Done { reply, data_in_bytes: 0 },
        };
        match op {
            Op::Read { span, fua } if !(fua && unit.geometry.volatile_cache) => {
                if !unit.tasks.overtake(command.attribute) {
                    return Now::MustWait;
                }
                let range = match unit.transfer_range(span) {
                    Ok(range) => range,
                    Err(fault) => return now_failed(unit, &fault),
                };
                let len = usize::try_from(range.len()).unwrap_or(usize::MAX);
                let Some(into) = data_in.get_mut(..len) else { return Now::MustWait };
                if len == 0 {
                    return Now::Done { reply: Reply::GOOD, data_in_bytes: 0 };
                }
                let attempt = unit.device.try_now(DeviceOp::Read { range, into });
                attempted(unit, "READ", attempt, len)
            }
            Op::Write { span, fua } => {
                let may = |pass: &Pass<'_>| unit.tasks.overtake_to_change(command.attribute, pass);
                if !pass.as_ref().is_some_and(may) {
                    return Now::MustWait;
                }
                let given = Given { data_out: command.data_out, announced_bytes: command.announced_bytes };
                let range = match medium::check_write(unit, span, given) {
                    Ok(range) => range,
                    Err(fault) => return now_failed(unit, &fault),
                };
                let len = usize::try_from(range.len()).unwrap_or(usize::MAX);
                let from = command.data_out.get(..len).unwrap_or_default();
                if len == 0 {
                    return Now::Done { reply: Reply::GOOD, data_in_bytes: 0 };
                }
                let fua = unit.must_be_durable(fua);
                let attempt = unit.device.try_now(DeviceOp::Write { range, from, fua });
                drop(pass);
                attempted(unit, "WRITE", attempt, 0)
            }
            Op::Synchronize { span, .. } if unit.tasks.overtake(command.attribute) => {
                if let Err(fault) = unit.range(unit.or_to_the_end(span)) {
                    return now_failed(unit, &fault);
                }
                attempted(unit, "SYNCHRONIZE CACHE", unit.device.try_now(DeviceOp::Flush), 0)
            }
            op if control::is_control(&op) && control::may_be_now(&op, data_in.len()) => {
                let result = control::execute(&self.target, link, &op, command.data_out);
                let result = result.map(|effect| match effect {
                    Effect::Data(data) => data,
                    Effect::Abort(_) | Effect::Flush => Vec::new(),
                });
                self.data_now(Some(&op), result, data_in)
            }
            _ => Now::MustWait,
        }
    }

    /// Copies the data of a control command into the transport's buffer, cut to the allocation length.
    fn data_now(&self, op: Option<&Op>, result: Result<Vec<u8>, Reply>, data_in: &mut [u8]) -> Now {
        let data = match result {
            Ok(data) => data,
            Err(reply) => return Now::Done { reply, data_in_bytes: 0 },
        };
        let len = data.len().min(allocation(op));
        let (Some(from), Some(into)) = (data.get(..len), data_in.get_mut(..len)) else {
            return Now::MustWait;
        };
        into.copy_from_slice(from);
        Now::Done { reply: Reply::GOOD, data_in_bytes: len }
    }

    /// Starts the task; `done` is called when it is over, possibly before this returns, on any thread. It must not
    /// block.
    pub fn execute(&self, task: Task, done: impl FnOnce(Outcome) + Send + 'static) {
        let Task { lun, attribute, tag, arrival, cdb, data_out, announced_bytes, data_in } = task;
        let buffers = Buffers { data_in, data_out };
        let done: Done = Box::new(done);
        let Some(link) = self.link(lun) else {
            let parsed = cdb::parse(&cdb);
            let result = control::absent(&self.target, &parsed);
            return answer(parsed.as_ref().ok(), result, buffers, done);
        };
        let unit = &link.unit;
        let parsed = cdb::parse(&cdb);
        if parsed.as_ref().is_ok_and(control::ends_tasks) {
            return self.preempt_and_abort(link, (&cdb, arrival), parsed, buffers, done);
        }
        let pass = unit.tasks.pass();
        if was_ended(link, arrival) {
            drop(pass);
            return end_without_reply(buffers, done);
        }
        let op = match admit(link, &cdb, parsed) {
            Ok(op) => op,
            Err(reply) => {
                drop(pass);
                return answer(None, Err(reply), buffers, done);
            }
        };
        if control::is_control(&op) {
            // A command that only reads may wait for metadata, so it does not hold the fence.
            let pass = may_change(&op).then_some(pass);
            let result = control::execute(&self.target, link, &op, &buffers.data_out);
            if let (Ok(Effect::Flush), Some(pass)) = (&result, pass) {
                let plan = medium::flush_all(unit);
                let kind = Kind { nexus: self.id, tag, attribute, hold: plan.hold };
                return start(link, kind, plan, buffers, done, pass);
            }
            return match result {
                Ok(Effect::Data(data)) => answer(Some(&op), Ok(data), buffers, done),
                Ok(Effect::Abort(_) | Effect::Flush) => answer(None, Ok(Vec::new()), buffers, done),
                Err(reply) => answer(None, Err(reply), buffers, done),
            };
        }
        let given = Given { data_out: &buffers.data_out, announced_bytes };
        let result = match medium::plan(link, &op, given) {
            Ok(Some(plan)) => {
                let kind = Kind { nexus: self.id, tag, attribute, hold: plan.hold };
                return start(link, kind, plan, buffers, done, pass);
            }
            Ok(None) => Ok(Vec::new()),
            Err(fault) => Err(unit.check_condition(&fault)),
        };
        drop(pass);
        answer(None, result, buffers, done);
    }

    /// PERSISTENT RESERVE OUT with PREEMPT AND ABORT. After its answer, no command that passed its check
    /// before changes anything.
    fn preempt_and_abort(
        &self,
        link: &Arc<Link>,
        (cdb, arrival): (&Cdb, Arrival),
        parsed: Result<Op, Fault>,
        buffers: Buffers,
        done: Done,
    ) {
        let unit = &link.unit;
        let closed = unit.tasks.close();
        if was_ended(link, arrival) {
            drop(closed);
            return end_without_reply(buffers, done);
        }
        let result = admit(link, cdb, parsed)
            .and_then(|op| control::execute(&self.target, link, &op, &buffers.data_out));
        let ports = match result {
            Ok(Effect::Abort(ports)) => ports,
            Ok(Effect::Data(_) | Effect::Flush) => Vec::new(),
            Err(reply) => {
                drop(closed);
                return answer(None, Err(reply), buffers, done);
            }
        };
        let nexuses: Vec<NexusId> = unit
            .links()
            .iter()
            .filter(|link| link.nexus != self.id && ports.contains(&link.initiator))
            .map(|link| link.nexus)
            .collect();
        let waiter = Waiter::new(move |_| answer(None, Ok(Vec::new()), buffers, done));
        abort(unit, closed, |nexus, _| nexuses.contains(&nexus), &waiter);
    }

    /// Executes a task management function; `done` is called when the affected tasks have ended, possibly
    /// before this returns.
    pub fn manage(&self, function: Function, done: impl FnOnce(FunctionResult) + Send + 'static) {
        let waiter = Waiter::new(done);
        let lun = match function {
            Function::AbortTask { lun, .. }
            | Function::AbortTaskSet { lun }
            | Function::ClearTaskSet { lun }
            | Function::LogicalUnitReset { lun } => lun,
            Function::TargetWarmReset | Function::TargetColdReset => {
                for (_, link) in &self.links {
                    reset(&link.unit, &waiter);
                }
                return;
            }
        };
        let Some(link) = self.link(lun) else {
            return waiter.answer(FunctionResult::LunDoesNotExist);
        };
        let unit = &link.unit;
        match function {
            Function::AbortTask { tag: wanted, .. } => {
                let mine = |nexus: NexusId, tag: u64| nexus == self.id && tag == wanted;
                if !abort(unit, unit.tasks.close(), mine, &waiter) {
                    waiter.answer(FunctionResult::TaskDoesNotExist);
                }
            }
            Function::AbortTaskSet { .. } => {
                abort(unit, unit.tasks.close(), |nexus, _| nexus == self.id, &waiter);
            }
            Function::ClearTaskSet { .. } => {
                let closed = unit.tasks.close();
                unit.tasks.note_clear(&closed);
                let aborted = unit.tasks.abort(|_, _| true, Some(&waiter));
                for other in unit.links() {
                    if other.nexus != self.id && aborted.whose.contains(&other.nexus) {
                        other.attention.establish(Code::COMMANDS_CLEARED_BY_ANOTHER_INITIATOR);
                    }
                }
                drop(closed);
                end(unit, aborted);
            }
            _ => reset(unit, &waiter),
        }
    }

    /// Aborts all tasks, for a transport whose session has ended and that waits until the device has none of
    /// its requests. The transport is informed of the end of each task, without a reply. Reservations stay
    /// until the nexus is dropped. The transport must give no commands meanwhile.
    pub fn abort_tasks(&self) {
        for (_, link) in &self.links {
            let aborted = link.unit.tasks.abort(|nexus, _| nexus == self.id, None);
            end(&link.unit, aborted);
        }
    }
}

impl Drop for Nexus {
    fn drop(&mut self) {
        // No command of this nexus can be passing, because it would borrow the nexus.
        self.abort_tasks();
        for (_, link) in &self.links {
            link.unit.reservations.nexus_lost(self.id);
        }
    }
}

/// Aborts tasks, and opens the fence. Returns whether there were any.
fn abort(
    unit: &LogicalUnit,
    closed: Closed<'_>,
    is_meant: impl Fn(NexusId, u64) -> bool,
    waiter: &Arc<Waiter>,
) -> bool {
    let aborted = unit.tasks.abort(is_meant, Some(waiter));
    drop(closed);
    let any = !aborted.whose.is_empty() || aborted.were_answered;
    end(unit, aborted);
    any
}

/// Aborts all tasks and resets the unit.
fn reset(unit: &LogicalUnit, waiter: &Arc<Waiter>) {
    let closed = unit.tasks.close();
    unit.tasks.note_reset(&closed);
    unit.reset();
    abort(unit, closed, |_, _| true, waiter);
}

/// Ends aborted tasks that were waiting.
fn end(unit: &LogicalUnit, aborted: Aborted) {
    for startable in aborted.waiting {
        unit.tasks.start(startable);
    }
}

/// Whether all tasks were aborted after the command arrived; called under the fence. A reset informs all
/// initiators; CLEAR TASK SET concerns only initiators that had tasks in the set.
fn was_ended(link: &Link, arrival: Arrival) -> bool {
    let now = link.unit.tasks.arrival();
    if arrival.resets == now.resets && arrival.clears != now.clears {
        link.attention.establish(Code::COMMANDS_CLEARED_BY_ANOTHER_INITIATOR);
    }
    arrival != now
}

/// Ends a command that was aborted before it became a task.
fn end_without_reply(buffers: Buffers, done: Done) {
    done(Outcome { reply: None, data_in: Vec::new(), data_out: buffers.data_out });
}

/// Whether a command must pass the fence: all except those that only read.
#[inline]
fn may_change(op: &Op) -> bool {
    op.access() != Access::Reading
}

/// Steps 2 and 3 of a command: returns its operation if it may be executed.
#[inline]
fn admit(link: &Link, cdb: &Cdb, parsed: Result<Op, Fault>) -> Result<Op, Reply> {
    let unit = &link.unit;
    if link.attention.is_pending()
        && !matches!(cdb.opcode(), 0x03 | 0x12 | 0xa0)
        && let Some(code) = link.attention.take()
    {
        return Err(unit.check_condition(&Fault::unit_attention(code)));
    }
    let op = parsed.map_err(|fault| unit.check_condition(&fault))?;
    if unit.reservations.conflicts(link.nexus, &link.initiator, op.access()) {
        return Err(control::conflict());
    }
    Ok(op)
}

#[cold]
fn now_failed(unit: &LogicalUnit, fault: &Fault) -> Now {
    Now::Done { reply: unit.check_condition(fault), data_in_bytes: 0 }
}

#[inline]
fn attempted(
    unit: &LogicalUnit,
    name: &'static str,
    attempt: Result<Attempt, IoError>,
    data_in_bytes: usize,
) -> Now {
    match attempt {
        Ok(Attempt::Done) => Now::Done { reply: Reply::GOOD, data_in_bytes },
        Ok(Attempt::MustWait) => Now::MustWait,
        Err(error) => {
            unit.log_fault(name, &error);
            now_failed(unit, &Fault::from_device(&error, name != "READ"))
        }
    }
}

/// The most data-in that the command may return, in bytes.
fn allocation(op: Option<&Op>) -> usize {
    op.map_or(0, |op| usize::try_from(op.expected(0).data_in_bytes).unwrap_or(usize::MAX))
}

/// Answers a command that has finished.
fn answer(op: Option<&Op>, result: Result<Vec<u8>, Reply>, buffers: Buffers, done: Done) {
    let (reply, data_in) = match result {
        Ok(mut data) => {
            data.truncate(allocation(op));
            (Reply::GOOD, data)
        }
        Err(reply) => (reply, Vec::new()),
    };
    done(Outcome { reply: Some(reply), data_in, data_out: buffers.data_out });
}

/// Adds a task to the set of its unit.
fn start(
    link: &Arc<Link>,
    kind: Kind,
    plan: medium::Plan,
    mut buffers: Buffers,
    mut done: Done,
    pass: Pass<'_>,
) {
    let medium::Plan { work, immediate, .. } = plan;
    let tasks = &link.unit.tasks;
    if tasks.is_full() {
        drop(pass);
        let reply = Reply { status: Status::TaskSetFull, sense: None };
        return answer(None, Err(reply), buffers, done);
    }
    // IMMED: the later outcome is not reported.
    let answered = immediate.then(|| {
        let nobody = Box::new(|_| {}) as Done;
        (std::mem::take(&mut buffers), std::mem::replace(&mut done, nobody))
    });
    let for_run = Arc::clone(link);
    let started = Box::new(move |ticket| {
        run::drive(Box::new(Run { link: for_run, ticket, work, buffers, done }), None);
    });
    let startable = tasks.add(kind, started, &pass);
    drop(pass);
    if let Some((buffers, done)) = answered {
        answer(None, Ok(Vec::new()), buffers, done);
    }
    if let Some(startable) = startable {
        tasks.start(startable);
    }
}

#[cfg(test)]
mod tests;
