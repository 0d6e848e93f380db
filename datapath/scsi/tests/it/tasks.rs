//! Tasks in flight: order, aborts, resets, unit attentions, commands that are atomic for others, errors.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, mpsc};

use crate::session::{
    self, Answer, LUN, PATIENCE, initiator, read10, send, sixteen, start, start_as, target_on, ten, wait,
    write10,
};
use headwater_block::{ByteRange, IoErrorKind};
use headwater_scsi::{
    Attribute, Cdb, Command, Function, FunctionResult, LogicalUnit, Lun, Nexus, Now, Options, Reply, Status,
    Target, Task,
};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits};

const OTHER_LUN: Lun = Lun([0, 9, 0, 0, 0, 0, 0, 0]);

/// A disk that lets all requests wait, and answers none until it is released.
fn held() -> (Arc<ReferenceDisk>, Arc<Target>) {
    let options = ReferenceOptions { waits: Waits::Always, ..ReferenceOptions::default() };
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, options));
    disk.hold();
    let target = target_on(&disk, Options::default());
    (disk, target)
}

fn begin(nexus: &Nexus, cdb: &[u8], data_out: &[u8], tag: u64) -> mpsc::Receiver<headwater_scsi::Outcome> {
    start(nexus, LUN, &Cdb::new(cdb), data_out, tag)
}

fn manage(nexus: &Nexus, function: Function) -> mpsc::Receiver<FunctionResult> {
    let (sender, receiver) = mpsc::channel();
    nexus.manage(function, move |result| {
        let _ = sender.send(result);
    });
    receiver
}

/// The unit attentions that TEST UNIT READY returns before GOOD.
fn attentions(nexus: &Nexus) -> Vec<u16> {
    let mut codes = Vec::new();
    loop {
        let answer = send(nexus, &[0; 6], &[]);
        match answer.sense {
            (0, 0) => return codes,
            (6, code) => codes.push(code),
            other => panic!("sense {other:x?}"),
        }
    }
}

#[test]
fn an_abort_is_answered_after_its_task_ended() {
    let (disk, target) = held();
    let nexus = target.nexus(initiator("a"));
    let (one, two) = (begin(&nexus, &read10(0, 8), &[], 1), begin(&nexus, &read10(0, 8), &[], 2));
    let abort = manage(&nexus, Function::AbortTask { lun: LUN, tag: 1 });
    assert!(abort.try_recv().is_err(), "the task is still at the disk");
    let unknown = manage(&nexus, Function::AbortTask { lun: LUN, tag: 3 });
    assert_eq!(unknown.try_recv(), Ok(FunctionResult::TaskDoesNotExist));
    let nowhere = manage(&nexus, Function::AbortTaskSet { lun: OTHER_LUN });
    assert_eq!(nowhere.try_recv(), Ok(FunctionResult::LunDoesNotExist));
    disk.release();
    assert_eq!(wait(&one).reply, None);
    assert_eq!(abort.recv_timeout(PATIENCE), Ok(FunctionResult::Complete));
    assert_eq!(wait(&two).reply.map(|reply| reply.status), Some(Status::Good));
    assert!(attentions(&nexus).is_empty());
}

#[test]
fn functions_are_answered_after_tasks_being_answered() {
    let functions = [
        Function::AbortTask { lun: LUN, tag: 1 },
        Function::AbortTaskSet { lun: LUN },
        Function::ClearTaskSet { lun: LUN },
        Function::LogicalUnitReset { lun: LUN },
    ];
    for function in functions {
        let (disk, target) = held();
        let (a, b) = (Arc::new(target.nexus(initiator("a"))), target.nexus(initiator("b")));
        let cdb = Cdb::new(&read10(0, 8));
        let task = Task {
            lun: LUN,
            attribute: Attribute::Simple,
            tag: 1,
            arrival: a.arrival(LUN),
            cdb,
            data_out: Vec::new(),
            announced_bytes: 0,
            data_in: Vec::new(),
        };
        let (sender, events) = mpsc::channel::<Result<Option<Reply>, FunctionResult>>();
        let asker = Arc::clone(&a);
        a.execute(task, move |outcome| {
            // The function is called before the reply is sent.
            let ended = sender.clone();
            asker.manage(function, move |result| drop(ended.send(Err(result))));
            drop(sender.send(Ok(outcome.reply)));
        });
        disk.release();
        let next = || events.recv_timeout(PATIENCE).unwrap();
        assert!(next().unwrap().is_some_and(|reply| reply.status == Status::Good), "{function:?}");
        assert_eq!(next().unwrap_err(), FunctionResult::Complete, "{function:?}");
        if !matches!(function, Function::LogicalUnitReset { .. }) {
            assert!(attentions(&a).is_empty() && attentions(&b).is_empty(), "{function:?}");
        }
    }
}

#[test]
fn a_task_of_another_nexus_is_not_aborted_by_its_tag() {
    let (disk, target) = held();
    let (a, b) = (target.nexus(initiator("a")), target.nexus(initiator("b")));
    let task = begin(&a, &read10(0, 8), &[], 1);
    let abort = manage(&b, Function::AbortTask { lun: LUN, tag: 1 });
    assert_eq!(abort.try_recv(), Ok(FunctionResult::TaskDoesNotExist));
    let abort = manage(&b, Function::AbortTaskSet { lun: LUN });
    assert_eq!(abort.try_recv(), Ok(FunctionResult::Complete));
    disk.release();
    assert!(wait(&task).reply.is_some());
}

#[test]
fn clearing_the_task_set_notifies_initiators_that_lost_tasks() {
    let (disk, target) = held();
    let [a, b, c] = ["a", "b", "c"].map(|name| target.nexus(initiator(name)));
    let tasks = [begin(&a, &read10(0, 8), &[], 1), begin(&b, &read10(0, 8), &[], 1)];
    let clear = manage(&a, Function::ClearTaskSet { lun: LUN });
    disk.release();
    tasks.iter().for_each(|task| assert_eq!(wait(task).reply, None));
    assert_eq!(clear.recv_timeout(PATIENCE), Ok(FunctionResult::Complete));
    assert_eq!([attentions(&a), attentions(&b), attentions(&c)], [vec![], vec![0x2f00], vec![]]);
}

#[test]
fn a_reset_ends_tasks_modes_and_the_old_reservation_but_no_persistent_one() {
    for function in [Function::LogicalUnitReset { lun: LUN }, Function::TargetWarmReset] {
        let (disk, target) = held();
        let (a, b) = (target.nexus(initiator("a")), target.nexus(initiator("b")));
        let select = [0, 0, 0, 0, 0x0a, 0x0a, 4, 0x10, 8, 0, 0, 0, 0xff, 0xff, 0, 0];
        assert_eq!(send(&a, &[0x15, 0x10, 0, 0, 16, 0], &select), Answer::good(vec![]));
        assert_eq!(attentions(&b), [0x2a01]);
        assert_eq!(send(&a, &[0x16, 0, 0, 0, 0, 0], &[]), Answer::good(vec![]));
        assert_eq!(send(&b, &[0; 6], &[]), Answer::conflict());
        let tasks = [begin(&a, &read10(0, 8), &[], 1), begin(&a, &read10(0, 8), &[], 2)];
        let reset = manage(&b, function);
        assert!(reset.try_recv().is_err());
        disk.release();
        tasks.iter().for_each(|task| assert_eq!(wait(task).reply, None));
        assert_eq!(reset.recv_timeout(PATIENCE), Ok(FunctionResult::Complete));
        assert_eq!([attentions(&a), attentions(&b)], [vec![0x2903], vec![0x2903]]);
        // D_SENSE and SWP have their first values.
        let control = send(&a, &[0x1a, 8, 0x0a, 0, 255, 0], &[]).data;
        assert_eq!((control[6], control[8]), (0, 0));
    }
    let (disk, target) = held();
    disk.release();
    let nexus = target.nexus(initiator("a"));
    let mut list = [0; 24];
    list[15] = 7;
    assert_eq!(send(&nexus, &[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list), Answer::good(vec![]));
    manage(&nexus, Function::LogicalUnitReset { lun: LUN });
    assert_eq!(attentions(&nexus), [0x2903]);
    assert_eq!(send(&nexus, &[0x5e, 0, 0, 0, 0, 0, 0, 0, 99, 0], &[]).data[7], 8);
}

#[test]
fn the_end_of_a_nexus_ends_its_tasks_and_its_old_reservation() {
    let (disk, target) = held();
    let (a, b) = (target.nexus(initiator("a")), target.nexus(initiator("b")));
    assert_eq!(send(&a, &[0x16, 0, 0, 0, 0, 0], &[]), Answer::good(vec![]));
    let task = begin(&a, &read10(0, 8), &[], 1);
    assert_eq!(send(&b, &[0; 6], &[]), Answer::conflict());
    drop(a);
    assert_eq!(send(&b, &[0; 6], &[]), Answer::good(vec![]));
    disk.release();
    assert_eq!(wait(&task).reply, None);
}

#[test]
fn ordered_tasks_wait_for_all_before_and_are_waited_for() {
    let (disk, target) = held();
    let nexus = target.nexus(initiator("a"));
    let first = begin(&nexus, &read10(0, 1), &[], 1);
    let cdb = Cdb::new(&write10(0, 1));
    let ordered = start_as(&nexus, LUN, &cdb, &[7; 512], 2, Attribute::Ordered);
    let last = begin(&nexus, &read10(0, 1), &[], 3);
    assert_eq!(disk.waiting(), 1, "only the first may be at the disk");
    let urgent = start_as(&nexus, LUN, &Cdb::new(&read10(0, 1)), &[], 4, Attribute::HeadOfQueue);
    assert_eq!(disk.waiting(), 2);
    let (cdb, mut data_in) = (Cdb::new(&read10(0, 1)), [0; 512]);
    let command =
        Command { lun: LUN, attribute: Attribute::Simple, cdb: &cdb, data_out: &[], announced_bytes: 0 };
    assert!(matches!(nexus.try_now(&command, &mut data_in), Now::MustWait));
    disk.release();
    assert_eq!(wait(&first).data_in, [0; 512]);
    assert_eq!(wait(&urgent).data_in, [0; 512]);
    assert!(wait(&ordered).reply.is_some());
    assert_eq!(wait(&last).data_in, [7; 512]);
}

#[test]
fn a_task_that_waits_for_its_turn_can_be_aborted_at_once() {
    let (disk, target) = held();
    let nexus = target.nexus(initiator("a"));
    let first = begin(&nexus, &read10(0, 1), &[], 1);
    let cdb = Cdb::new(&write10(0, 1));
    let ordered = start_as(&nexus, LUN, &cdb, &[7; 512], 2, Attribute::Ordered);
    let abort = manage(&nexus, Function::AbortTask { lun: LUN, tag: 2 });
    assert_eq!(abort.try_recv(), Ok(FunctionResult::Complete));
    assert_eq!(wait(&ordered).reply, None);
    disk.release();
    wait(&first);
    assert_eq!(send(&nexus, &read10(0, 1), &[]).data, [0; 512], "the aborted write was carried out");
}

#[test]
fn an_aborted_task_of_several_steps_stops_between_them() {
    let (disk, target) = held();
    let nexus = target.nexus(initiator("a"));
    let mut compare = sixteen(0x89, 0, 0, 0);
    compare[13] = 1;
    let task = begin(&nexus, &compare, &[[0; 512], [7; 512]].concat(), 1);
    let abort = manage(&nexus, Function::AbortTaskSet { lun: LUN });
    disk.release();
    assert_eq!(wait(&task).reply, None);
    assert_eq!(abort.recv_timeout(PATIENCE), Ok(FunctionResult::Complete));
    assert_eq!((disk.counts().reads, disk.counts().writes), (1, 0));
}

#[test]
fn too_many_tasks_are_refused() {
    let (disk, target) = held();
    let nexus = target.nexus(initiator("a"));
    let tasks: Vec<_> = (0..4096).map(|tag| begin(&nexus, &read10(0, 1), &[], tag)).collect();
    let full = wait(&begin(&nexus, &read10(0, 1), &[], 4096));
    assert_eq!(full.reply.map(|reply| reply.status), Some(Status::TaskSetFull));
    disk.release();
    assert!(tasks.iter().all(|task| wait(task).reply.is_some()));
    assert_eq!(send(&nexus, &read10(0, 1), &[]).status, Status::Good);
}

/// Four threads add bits with ORWRITE, four count with COMPARE AND WRITE, on a disk where about half the requests
/// wait and complete out of order: nothing is lost.
#[test]
fn compare_and_write_is_atomic_for_others() {
    let options = ReferenceOptions { waits: Waits::PerMille(500), seed: 9, ..ReferenceOptions::default() };
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, options));
    let target = target_on(&disk, Options::default());
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let nexus = target.nexus(initiator("a"));
            scope.spawn(move || {
                for bit in 0..250 {
                    let mut data = [0; 512];
                    data[(thread * 250 + bit) / 8] = 1 << ((thread * 250 + bit) % 8);
                    assert_eq!(send(&nexus, &sixteen(0x8b, 0, 1, 1), &data).status, Status::Good);
                }
            });
            let nexus = target.nexus(initiator("b"));
            scope.spawn(move || {
                let mut compare = sixteen(0x89, 0, 0, 0);
                compare[13] = 1;
                for _ in 0..100 {
                    loop {
                        let old = send(&nexus, &read10(0, 1), &[]).data;
                        let count = u64::from_be_bytes(old[..8].try_into().unwrap()) + 1;
                        let new = [&count.to_be_bytes()[..], &[0; 504]].concat();
                        match send(&nexus, &compare, &[old, new].concat()) {
                            answer if answer.status == Status::Good => break,
                            answer => assert_eq!(answer, Answer::check(0xe, 0x1d00)),
                        }
                    }
                }
            });
        }
    });
    let contents = disk.contents();
    assert_eq!(contents[..8], 400_u64.to_be_bytes());
    let bits: u32 = contents[512..1024].iter().map(|byte| byte.count_ones()).sum();
    assert_eq!(bits, 1000);
}

/// One thread writes its own values, another replaces each value that it finds with COMPARE AND WRITE. The
/// second thread must have read each written value that was replaced: otherwise a comparison succeeded that
/// was not true any more.
#[test]
fn a_plain_write_does_not_slip_between_comparing_and_writing() {
    for seed in 0..4 {
        let options = ReferenceOptions { waits: Waits::PerMille(300), seed, ..ReferenceOptions::default() };
        let disk = Arc::new(ReferenceDisk::with_options(1 << 20, options));
        let target = target_on(&disk, Options::default());
        // The value that each replacement overwrote.
        let parents: Mutex<HashMap<u64, u64>> = Mutex::default();
        let block = |value: u64| [&value.to_be_bytes()[..], &[0; 504]].concat();
        let value = |bytes: &[u8]| u64::from_be_bytes(bytes[..8].try_into().unwrap());
        std::thread::scope(|scope| {
            let nexus = target.nexus(initiator("writer"));
            let writer = scope.spawn({
                let parents = &parents;
                move || {
                    for number in 1..=500_u64 {
                        let mine = number * 2;
                        assert_eq!(send(&nexus, &write10(0, 1), &block(mine)).status, Status::Good);
                        let mut there = value(&send(&nexus, &read10(0, 1), &[]).data);
                        while there % 2 == 1 {
                            there = parents.lock().unwrap()[&there];
                        }
                        assert_eq!(there, mine, "seed {seed}: a write was lost");
                    }
                }
            });
            let nexus = target.nexus(initiator("replacer"));
            scope.spawn({
                let parents = &parents;
                move || {
                    let mut compare = sixteen(0x89, 0, 0, 0);
                    compare[13] = 1;
                    let mut number = 1;
                    while !writer.is_finished() {
                        let old = value(&send(&nexus, &read10(0, 1), &[]).data);
                        parents.lock().unwrap().insert(number, old);
                        send(&nexus, &compare, &[block(old), block(number)].concat());
                        number += 2;
                    }
                }
            });
        });
    }
}

#[test]
fn durable_writes_are_durable_and_only_they() {
    let disk = Arc::new(ReferenceDisk::new(1 << 20));
    let nexus = target_on(&disk, Options::default()).nexus(initiator("a"));
    let counts = |cdb: &[u8], data: &[u8]| {
        let before = disk.counts();
        assert_eq!(send(&nexus, cdb, data).status, Status::Good);
        let after = disk.counts();
        (after.fua - before.fua, after.flushes - before.flushes)
    };
    assert_eq!(counts(&write10(0, 1), &[1; 512]), (0, 0));
    assert_eq!(counts(&ten(0x2a, 0x08, 0, 1), &[1; 512]), (1, 0));
    assert_eq!(counts(&ten(0x2a, 0x10, 0, 1), &[1; 512]), (0, 0));
    assert_eq!(counts(&ten(0x28, 0x08, 0, 1), &[]), (0, 1));
    assert_eq!(counts(&ten(0x2e, 0, 0, 1), &[1; 512]), (1, 0));
    assert_eq!(counts(&ten(0x35, 0, 0, 0), &[]), (0, 1));
    assert_eq!(counts(&sixteen(0x91, 2, 8, 8), &[]), (0, 1));
    assert_eq!(counts(&[0x1b, 0, 0, 0, 0, 0], &[]), (0, 1));
    assert_eq!(counts(&[0x1b, 0, 0, 0, 1, 0], &[]), (0, 0));
    // Without the write cache, all of them are durable, and so are earlier writes.
    let (select, no_cache) = ([0x15, 0x10, 0, 0, 24, 0], caching_page(false));
    assert_eq!(counts(&select, &no_cache), (0, 1));
    assert_eq!(counts(&write10(0, 1), &[1; 512]), (1, 0));
    assert_eq!(counts(&ten(0x41, 0, 0, 2), &[1; 512]), (1, 0));
    assert_eq!(counts(&ten(0x41, 0, 0, 2), &[0; 512]), (1, 0));
    assert_eq!(counts(&sixteen(0x8b, 0, 0, 1), &[1; 512]), (1, 0));
    let list = [[0, 22, 0, 16, 0, 0, 0, 0], [0; 8], [0, 0, 0, 1, 0, 0, 0, 0]].concat();
    assert_eq!(counts(&ten(0x42, 0, 0, 24), &list), (0, 1));
}

/// A MODE SELECT list with WCE.
fn caching_page(write_cache: bool) -> [u8; 24] {
    let mut list = [0; 24];
    list[4..7].copy_from_slice(&[0x08, 0x12, if write_cache { 0x04 } else { 0 }]);
    list
}

#[test]
fn the_write_cache_is_off_when_all_that_was_written_is_durable() {
    let (disk, target) = held();
    let (writer, other) = (target.nexus(initiator("a")), target.nexus(initiator("b")));
    let written = begin(&writer, &write10(0, 1), &[1; 512], 1);
    let select = [0x15, 0x10, 0, 0, 24, 0];
    // The setting does not change: nothing to wait for.
    assert_eq!(send(&other, &select, &caching_page(true)), Answer::good(vec![]));
    let off = begin(&other, &select, &caching_page(false), 2);
    // A later write is durable by itself, and is executed after the flush.
    assert_eq!(send(&writer, &[0; 6], &[]), Answer::check(6, 0x2a01));
    let durable = begin(&writer, &write10(0, 1), &[2; 512], 3);
    assert_eq!(disk.waiting(), 1);
    assert!(off.try_recv().is_err());
    disk.release();
    assert_eq!(wait(&written).reply, Some(Reply::GOOD));
    assert_eq!(wait(&off).reply, Some(Reply::GOOD));
    assert_eq!(wait(&durable).reply, Some(Reply::GOOD));
    let counts = disk.counts();
    assert_eq!((counts.writes, counts.fua, counts.flushes), (2, 1, 1));
    assert_eq!(disk.contents()[..512], [2; 512]);
    // Setting it again flushes again, in case that the first time failed.
    assert_eq!(send(&other, &select, &caching_page(false)), Answer::good(vec![]));
    assert_eq!(disk.counts().flushes, 2);
}

#[test]
fn errors_of_the_disk_have_their_sense() {
    let cases = [
        (IoErrorKind::Corrupt, Answer::check(3, 0x1100), Answer::check(3, 0x0c00)),
        (IoErrorKind::Device, Answer::check(3, 0x1100), Answer::check(3, 0x0c00)),
        (IoErrorKind::NoSpace, Answer::check(7, 0x2707), Answer::check(7, 0x2707)),
        (IoErrorKind::ReadOnly, Answer::check(7, 0x2700), Answer::check(7, 0x2700)),
        (IoErrorKind::Closed, Answer::check(2, 0x0400), Answer::check(2, 0x0400)),
        (IoErrorKind::Unsupported, Answer::check(5, 0x2000), Answer::check(5, 0x2000)),
        (IoErrorKind::Invalid, Answer::check(4, 0x4400), Answer::check(4, 0x4400)),
    ];
    for waits in [Waits::Never, Waits::Always] {
        let options = ReferenceOptions { waits, ..ReferenceOptions::default() };
        let disk = Arc::new(ReferenceDisk::with_options(1 << 20, options));
        let nexus = target_on(&disk, Options::default()).nexus(initiator("a"));
        for (kind, reading, writing) in &cases {
            disk.fail(ByteRange::new(4096, 4096).unwrap(), *kind);
            assert_eq!(send(&nexus, &read10(8, 8), &[]), *reading);
            assert_eq!(send(&nexus, &write10(8, 8), &[0; 4096]), *writing);
            assert_eq!(send(&nexus, &ten(0x41, 0, 0, 100), &[0; 512]), *writing);
            assert_eq!(send(&nexus, &ten(0x2f, 0, 0, 100), &[]), *reading);
            assert_eq!(send(&nexus, &read10(0, 8), &[]).status, Status::Good);
            disk.heal();
        }
    }
}

#[test]
fn sense_data_comes_in_the_format_that_was_asked_for() {
    let (disk, target) = held();
    disk.release();
    let nexus = target.nexus(initiator("a"));
    let sense = || {
        let outcome = wait(&begin(&nexus, &[0xff], &[], 1));
        outcome.reply.unwrap().sense.unwrap().bytes().to_vec()
    };
    assert_eq!(sense()[..3], [0x70, 0, 5]);
    let select = [0, 0, 0, 0, 0x0a, 0x0a, 4, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0];
    assert_eq!(send(&nexus, &[0x15, 0x10, 0, 0, 16, 0], &select), Answer::good(vec![]));
    assert_eq!(sense()[..4], [0x72, 5, 0x20, 0]);
    // REQUEST SENSE itself selects the format.
    assert_eq!(send(&nexus, &[3, 0, 0, 0, 252, 0], &[]).data[0], 0x70);
    assert_eq!(send(&nexus, &[3, 1, 0, 0, 252, 0], &[]).data, [0x72, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_new_nexus_first_gets_the_power_on_attention() {
    let unit =
        LogicalUnit::new(Arc::new(ReferenceDisk::new(1 << 20)), session::identity(), Options::default());
    let target = Target::new("t", vec![(0, unit)]);
    let nexus = target.nexus(initiator("a"));
    // These are executed even if a unit attention is pending.
    assert_eq!(send(&nexus, &[0x12, 0, 0, 0, 96, 0], &[]).status, Status::Good);
    assert_eq!(send(&nexus, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 99, 0, 0, 0], &[]).status, Status::Good);
    assert_eq!(send(&nexus, &read10(0, 1), &[]), Answer::check(6, 0x2900));
    assert_eq!(send(&nexus, &read10(0, 1), &[]).status, Status::Good);
    // REQUEST SENSE takes the unit attention, too.
    let nexus = target.nexus(initiator("a"));
    assert_eq!(send(&nexus, &[3, 0, 0, 0, 18, 0], &[]).data[2..14], [6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x29, 0]);
    assert!(attentions(&nexus).is_empty());
}

/// Tasks are aborted at any moment: each task is answered once, and so is each function.
#[test]
fn aborts_at_any_time_lose_nothing() {
    let options = ReferenceOptions { waits: Waits::PerMille(700), seed: 3, ..ReferenceOptions::default() };
    let disk = Arc::new(ReferenceDisk::with_options(1 << 20, options));
    let target = target_on(&disk, Options::default());
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let nexus = target.nexus(initiator("a"));
            scope.spawn(move || {
                let mut rng = Rng::new(thread);
                let (mut tasks, mut functions) = (Vec::new(), Vec::new());
                for tag in 0..600 {
                    let mut compare = sixteen(0x89, 0, rng.below(8), 0);
                    compare[13] = 1;
                    let attribute =
                        *rng_pick(&mut rng, &[Attribute::Simple, Attribute::Simple, Attribute::Ordered]);
                    let (cdb, data): (Vec<u8>, Vec<u8>) = match rng.below(5) {
                        0 => (compare.to_vec(), vec![0; 1024]),
                        1 => (write10(rng.below(8) as u32, 1).to_vec(), vec![1; 512]),
                        2 => (ten(0x41, 0, 0, 0).to_vec(), vec![2; 512]),
                        3 => (sixteen(0x8b, 0, 0, 4).to_vec(), vec![4; 2048]),
                        _ => (read10(0, 8).to_vec(), Vec::new()),
                    };
                    tasks.push(start_as(&nexus, LUN, &Cdb::new(&cdb), &data, tag, attribute));
                    match rng.below(20) {
                        0 => functions.push(manage(&nexus, Function::AbortTaskSet { lun: LUN })),
                        1 => functions.push(manage(&nexus, Function::ClearTaskSet { lun: LUN })),
                        2 => functions.push(manage(&nexus, Function::LogicalUnitReset { lun: LUN })),
                        3..6 => functions.push(manage(&nexus, Function::AbortTask { lun: LUN, tag })),
                        _ => {}
                    }
                }
                for task in &tasks {
                    wait(task);
                    assert!(task.try_recv().is_err());
                }
                for function in &functions {
                    function.recv_timeout(PATIENCE).expect("a function was never answered");
                }
            });
        }
    });
    assert_eq!(disk.waiting(), 0);
}

fn rng_pick<'a, T>(rng: &mut Rng, items: &'a [T]) -> &'a T {
    &items[rng.index(items.len())]
}
