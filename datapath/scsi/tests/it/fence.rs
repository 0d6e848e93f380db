//! A write that the disk is executing while another initiator ends tasks: the request to end them is answered
//! after the write.

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::session::{self, Answer, LUN, PATIENCE, identity, initiator, read10, send, start, write10};
use headwater_block::{Attempt, ByteRange, Completion, Device, Extent, Geometry, IoError, Op, Request};
use headwater_scsi::{Attribute, Cdb, Command, Function, LogicalUnit, Now, Options, Reply, Status, Target};
use headwater_testkit::ReferenceDisk;

/// A disk whose first write is reported, and then held until it is released.
struct Gated {
    disk: ReferenceDisk,
    gate: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Device for Gated {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        if matches!(op, Op::Write { .. })
            && let Some((come, go)) = self.gate.lock().unwrap().take()
        {
            come.send(()).unwrap();
            go.recv_timeout(PATIENCE).unwrap();
        }
        self.disk.try_now(op)
    }

    fn submit(&self, request: Request, done: Completion) {
        self.disk.submit(request, done);
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.disk.extents(range, max_extents)
    }
}

fn list(key: u64, other_key: u64) -> Vec<u8> {
    [key.to_be_bytes(), other_key.to_be_bytes(), [0; 8]].concat()
}

fn reserve_out(action: u8, kind: u8) -> [u8; 10] {
    [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0]
}

/// A's write is held in the disk while B executes `what`, which reports when it was answered. Checks that it
/// is answered after the write. Returns the answer to A's next write.
fn ended_behind_a_write(what: impl FnOnce(&headwater_scsi::Nexus, Sender<()>) + Send) -> Answer {
    let ((come, came), (go, gone)) = (mpsc::channel(), mpsc::channel());
    let disk = Gated { disk: ReferenceDisk::new(1 << 20), gate: Mutex::new(Some((come, gone))) };
    let options = Options { power_on_attention: false, ..Options::default() };
    let unit = LogicalUnit::new(Arc::new(disk), identity(), options);
    let target = Target::new("naa.target", vec![(0, unit)]);
    let (a, b) = (target.nexus(initiator("a")), target.nexus(initiator("b")));
    for (nexus, key) in [(&a, 1), (&b, 2)] {
        assert_eq!(send(nexus, &reserve_out(0, 0), &list(0, key)), Answer::good(vec![]));
    }
    assert_eq!(send(&a, &reserve_out(1, 5), &list(1, 0)), Answer::good(vec![]));
    std::thread::scope(|scope| {
        let a = &a;
        let writer = scope.spawn(move || {
            let (cdb, data_out, attribute) = (Cdb::new(&write10(0, 1)), [0xaa; 512], Attribute::Simple);
            let announced_bytes = 512;
            let command = Command { lun: LUN, attribute, cdb: &cdb, data_out: &data_out, announced_bytes };
            a.try_now(&command, &mut [])
        });
        came.recv_timeout(PATIENCE).unwrap();
        let (answered, answer) = mpsc::channel();
        let b = &b;
        let other = scope.spawn(move || {
            what(b, answered);
            b
        });
        let early = answer.recv_timeout(Duration::from_millis(100));
        go.send(()).unwrap();
        assert!(early.is_err(), "answered while a write was under way");
        answer.recv_timeout(PATIENCE).expect("it was never answered");
        other.join().unwrap();
        assert!(matches!(writer.join().unwrap(), Now::Done { reply: Reply::GOOD, .. }));
        while send(b, &[0; 6], &[]).sense.0 == 6 {}
        assert_eq!(send(b, &read10(0, 1), &[]), Answer::good(vec![0xaa; 512]));
        send(a, &write10(0, 1), &[0xaa; 512])
    })
}

#[test]
fn preempt_and_abort_is_answered_behind_writes_and_keeps_further_ones_off() {
    let answer = ended_behind_a_write(|b, answered| {
        let outcome = start(b, LUN, &Cdb::new(&reserve_out(5, 1)), &list(2, 1), 1);
        let outcome = session::wait(&outcome);
        assert_eq!(outcome.reply.map(|reply| reply.status), Some(Status::Good));
        answered.send(()).unwrap();
    });
    assert_eq!(answer, Answer::check(6, 0x2a05));
}

#[test]
fn task_management_is_answered_behind_writes() {
    let other_initiators_task = Answer::good(vec![]);
    let functions = [
        (Function::LogicalUnitReset { lun: LUN }, Answer::check(6, 0x2903)),
        (Function::TargetWarmReset, Answer::check(6, 0x2903)),
        (Function::ClearTaskSet { lun: LUN }, other_initiators_task.clone()),
        (Function::AbortTaskSet { lun: LUN }, other_initiators_task),
    ];
    for (function, expected) in functions {
        let answer = ended_behind_a_write(|b, answered| {
            b.manage(function, move |_| answered.send(()).unwrap());
        });
        assert_eq!(answer, expected, "{function:?}");
    }
}
