//! Executes a task in steps: each step is one request to the device.
//!
//! ```text
//!   start --> step --Submit--> device --completed--> step .. --End--> answer, next tasks
//!                                 |
//!                                 +-- aborted meanwhile: ends without a reply
//! ```
//!
//! If a device answers immediately, the thread that gave the command continues, for at most
//! [`BYTES_IN_A_ROW`]. After that the unit's own thread continues, in turns with other tasks, because the
//! transport's thread has to notice aborts and closed connections. If the device answers later, the thread that
//! completes the request continues if the request is the task's only one, or else the unit's own thread.

use std::sync::Arc;

use headwater_block::{Completion, Outcome as Completed, Request};
use parking_lot::Mutex;

use crate::link::Link;
use crate::queue::Ticket;
use crate::sense::Fault;
use crate::task::{Outcome, Reply};

/// How many bytes a task moves on a thread before other tasks continue. Cleared bytes count as a 64th.
const BYTES_IN_A_ROW: u64 = 64 << 20;

/// Receives the outcome of a task.
pub(crate) type Done = Box<dyn FnOnce(Outcome) + Send>;

/// The buffers of a task.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    pub(crate) data_in: Vec<u8>,
    pub(crate) data_out: Vec<u8>,
}

/// The next action.
pub(crate) enum Step {
    Submit(Request),
    End(Result<(), Fault>),
}

/// The parts of an error report that the command decides.
pub(crate) struct ErrorContext {
    /// For the log.
    pub(crate) name: &'static str,
    /// Whether the failed request was a write, for the sense data.
    pub(crate) is_write_error: bool,
}

/// A task in steps.
pub(crate) trait Work: Send {
    /// The next step. `completed` is the buffer of the previous request, which succeeded; `None` at the start.
    fn step(&mut self, buffers: &mut Buffers, completed: Option<Vec<u8>>) -> Step;

    /// Whether the request in flight is the only one, so that the answer can be given on the thread that
    /// completes it.
    fn is_single(&self) -> bool;

    /// The command's name, and whether an error that it has now is a write error.
    fn error_context(&self) -> ErrorContext;
}

/// A task that was started.
pub(crate) struct Run {
    pub(crate) link: Arc<Link>,
    pub(crate) ticket: Ticket,
    pub(crate) work: Box<dyn Work>,
    pub(crate) buffers: Buffers,
    pub(crate) done: Done,
}

/// Hands the task over between the thread that submits and the thread that completes.
enum Slot {
    Submitting,
    Completed(Completed),
    Parked(Box<Run>),
    Taken,
}

/// Runs steps until a request does not complete at once, or until other tasks have to continue.
pub(crate) fn drive(mut run: Box<Run>, mut completed: Option<Completed>) {
    let mut left = BYTES_IN_A_ROW;
    loop {
        if left == 0 {
            let unit = Arc::clone(&run.link.unit);
            if unit.worker.is_there() {
                return unit.worker.post(Box::new(move || drive(run, completed)));
            }
            // There is no worker thread: everything is done here.
            left = u64::MAX;
        }
        if run.ticket.is_aborted() {
            return finish(*run, None);
        }
        let buffer = match completed.take().map(|completed| (completed.result, completed.buffer)) {
            None => None,
            Some((Ok(()), buffer)) => Some(buffer),
            Some((Err(error), _)) => {
                let ErrorContext { name, is_write_error } = run.work.error_context();
                run.link.unit.log_fault(name, &error);
                let fault = Fault::from_device(&error, is_write_error);
                return end(*run, Err(fault));
            }
        };
        let request = match run.work.step(&mut run.buffers, buffer) {
            Step::End(result) => return end(*run, result),
            Step::Submit(request) => request,
        };
        left = left.saturating_sub(weight(&request));
        let slot = Arc::new(Mutex::new(Slot::Submitting));
        let theirs = Arc::clone(&slot);
        let unit = Arc::clone(&run.link.unit);
        let single = run.work.is_single();
        unit.device.submit(request, Completion::new(move |outcome| complete(&theirs, outcome, single)));
        let mut slot = slot.lock();
        match std::mem::replace(&mut *slot, Slot::Taken) {
            Slot::Completed(outcome) => completed = Some(outcome),
            _ => {
                *slot = Slot::Parked(run);
                return;
            }
        }
    }
}

/// The bytes that a request counts for [`BYTES_IN_A_ROW`].
fn weight(request: &Request) -> u64 {
    match request {
        Request::Read { range, .. } | Request::Write { range, .. } => range.len(),
        Request::WriteZeroes { range, .. } | Request::Discard { range } => range.len() / 64,
        Request::Flush | Request::Prefetch { .. } => 0,
    }
}

/// Handles a completed request, on the thread that submitted it or on another one.
fn complete(slot: &Mutex<Slot>, outcome: Completed, single: bool) {
    let parked = {
        let mut slot = slot.lock();
        match std::mem::replace(&mut *slot, Slot::Taken) {
            Slot::Parked(run) => run,
            _ => {
                *slot = Slot::Completed(outcome);
                return;
            }
        }
    };
    if single {
        return drive(parked, Some(outcome));
    }
    let unit = Arc::clone(&parked.link.unit);
    unit.worker.post(Box::new(move || drive(parked, Some(outcome))));
}

fn end(run: Run, result: Result<(), Fault>) {
    let reply = match result {
        Ok(()) => Reply::GOOD,
        Err(fault) => run.link.unit.check_condition(&fault),
    };
    finish(run, Some(reply));
}

/// Answers, leaves the task set, and starts the tasks that waited for this one. The order matters: a task
/// management function that aborts tasks is answered after these tasks (RFC 7143), and waits only for tasks in the set.
fn finish(run: Run, reply: Option<Reply>) {
    let Run { link, ticket, buffers, done, .. } = run;
    // An abort after the last step still suppresses the answer.
    let reply = reply.filter(|_| ticket.answer());
    let good = reply.as_ref().is_some_and(|reply| *reply == Reply::GOOD);
    let data_in = if good { buffers.data_in } else { Vec::new() };
    done(Outcome { reply, data_in, data_out: buffers.data_out });
    let (waiters, ready) = link.unit.tasks.finish(&ticket);
    // This answers the task management functions that waited for this task.
    drop(waiters);
    for startable in ready {
        let unit = Arc::clone(&link.unit);
        link.unit.worker.post(Box::new(move || unit.tasks.start(startable)));
    }
}
