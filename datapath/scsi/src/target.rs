//! A target device with its logical units, and the nexuses that initiators have with it.

use std::sync::Arc;

use crate::identity::Initiator;
use crate::sense::{Code, Sense, SenseKey, Status};
use crate::task::{Cdb, Command, Expected, Function, FunctionResult, Lun, Now, Outcome, Reply, Task};
use crate::unit::LogicalUnit;

/// A SCSI target device.
#[derive(Debug)]
pub struct Target {
    name: String,
    units: Vec<(u16, Arc<LogicalUnit>)>,
}

impl Target {
    /// A target with these logical units, by LUN (0 to 16383). `name` is its SCSI name string.
    pub fn new(name: impl Into<String>, mut units: Vec<(u16, Arc<LogicalUnit>)>) -> Arc<Self> {
        units.sort_by_key(|(lun, _)| *lun);
        units.dedup_by_key(|(lun, _)| *lun);
        Arc::new(Self { name: name.into(), units })
    }

    /// Its SCSI name string.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A new I_T nexus. It ends when it is dropped; tasks in flight are then answered as aborted.
    pub fn nexus(self: &Arc<Self>, initiator: Initiator) -> Nexus {
        Nexus { target: Arc::clone(self), initiator }
    }
}

/// One I_T nexus: what a session is to SCSI.
#[derive(Debug)]
pub struct Nexus {
    target: Arc<Target>,
    #[expect(dead_code, reason = "reservations need it")]
    initiator: Initiator,
}

impl Nexus {
    /// How much data the command moves. Zero for commands that will be refused.
    pub fn expected(&self, lun: Lun, cdb: &Cdb) -> Expected {
        let _ = (lun, cdb);
        Expected::default()
    }

    /// Carries the command out if that needs no I/O and no waiting. With [`Now::MustWait`] nothing has happened that
    /// the initiator could notice.
    pub fn try_now(&self, command: &Command<'_>, data_in: &mut [u8]) -> Now {
        let _ = data_in;
        Now::Done { reply: self.answer(command.lun, command.cdb), data_in_bytes: 0 }
    }

    /// Starts the task; `done` is called when it is over, possibly before this returns, on any thread. It must not
    /// block.
    pub fn execute(&self, task: Task, done: impl FnOnce(Outcome) + Send + 'static) {
        let reply = Some(self.answer(task.lun, &task.cdb));
        done(Outcome { reply, data_in: Vec::new(), data_out: task.data_out });
    }

    /// Carries out a task management function; `done` is called when the tasks concerned have ended.
    pub fn manage(&self, function: Function, done: impl FnOnce(FunctionResult) + Send + 'static) {
        let _ = function;
        done(FunctionResult::Complete);
    }

    fn answer(&self, lun: Lun, cdb: &Cdb) -> Reply {
        let known =
            lun.number().is_some_and(|n| self.target.units.binary_search_by_key(&n, |(lun, _)| *lun).is_ok());
        if !known {
            return refused(0x2500);
        }
        match cdb.opcode() {
            0 => Reply::GOOD,
            _ => refused(0x2000),
        }
    }
}

fn refused(code: u16) -> Reply {
    Reply { status: Status::CheckCondition, sense: Some(Sense::fixed(SenseKey::IllegalRequest, Code(code))) }
}
