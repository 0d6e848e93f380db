//! A disk process that is killed under load: the next one takes its disks over, and machines go on.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use headwater_block::{Device, blocking};
use headwater_nbd::Client;
use headwater_testkit::rounds::is_long;
use headwater_testkit::{Rng, wait_until};
use serde_json::{Value, json};

use crate::support::disks::{Calls, LoneDisk, ask, import_big};
use crate::support::{Daemon, is_alive, signal};

const BLOCK: usize = 4096;
const WRITERS: usize = 4;
/// Blocks of one writer: together more than the memory of the write cache.
const BLOCKS: usize = 3072;

fn kills() -> u64 {
    if is_long() { 1000 } else { 4 }
}

/// What a block of a writer may have: the number of a write that was answered, and of one that was not.
#[derive(Default)]
struct Expected {
    answered: AtomicU32,
    sent: AtomicU32,
}

impl Expected {
    fn answered(&self) -> u32 {
        self.answered.load(Ordering::SeqCst)
    }

    fn sent(&self) -> u32 {
        self.sent.load(Ordering::SeqCst)
    }

    fn is(&self, number: u32) {
        self.answered.store(number, Ordering::SeqCst);
        self.sent.store(number, Ordering::SeqCst);
    }
}

/// Which of the writes from `first` to `last` a block has.
fn found(block: usize, first: u32, last: u32, bytes: &[u8]) -> Option<u32> {
    (first..=last).find(|number| contents(block, *number) == bytes)
}

fn contents(block: usize, number: u32) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    let seed = u64::from(number) << 32 | block as u64;
    if number > 0 && (block + number as usize).is_multiple_of(2) {
        Rng::new(seed).fill(&mut bytes);
    } else if number > 0 {
        // Packs well, and segments with both still pack.
        bytes.chunks_mut(8).for_each(|word| word.copy_from_slice(&seed.to_le_bytes()));
    }
    bytes
}

/// Writes until the disk process ends.
fn write(client: &dyn Device, seed: u64, first: usize, expected: &[Expected], count: &AtomicUsize) {
    let mut rng = Rng::new(seed);
    loop {
        let index = rng.index(expected.len());
        let number = expected[index].sent() + 1;
        expected[index].sent.store(number, Ordering::SeqCst);
        let block = first + index;
        if blocking::write(client, (block * BLOCK) as u64, &contents(block, number)).is_err() {
            return;
        }
        expected[index].answered.store(number, Ordering::SeqCst);
        count.fetch_add(1, Ordering::SeqCst);
    }
}

/// Freezes the disk and reads some of it, as a seal does, again and again until the disk process ends. Each block has a write that was
/// sent before the end of the freeze, and no earlier one than was answered before its beginning. Returns how often.
fn seal(dir: &Path, uuid: &str, seed: u64, expected: &[Expected], is_over: &AtomicBool) -> usize {
    let (mut rng, mut seals, mut bytes) = (Rng::new(seed), 0, vec![0; BLOCK]);
    while !is_over.load(Ordering::SeqCst) {
        let mut calls = Calls::to(dir);
        let first: Vec<u32> = expected.iter().map(Expected::answered).collect();
        let Some(frozen) = calls.call(&json!({ "freeze": { "uuid": uuid } })) else { return seals };
        let last: Vec<u32> = expected.iter().map(Expected::sent).collect();
        if frozen.get("done").is_none() {
            // The view before it has not ended yet.
            continue;
        }
        let all = json!({ "changed": { "offset": 0, "len": expected.len() * BLOCK, "max": expected.len() } });
        let Some(changed) = calls.call(&all) else { return seals };
        let runs: Vec<(u64, bool)> = serde_json::from_value(changed["done"].clone()).unwrap();
        let is_changed: Vec<bool> = runs
            .iter()
            .flat_map(|(len, is_changed)| std::iter::repeat_n(*is_changed, *len as usize / BLOCK))
            .collect();
        for _ in 0..64 {
            let block = rng.index(expected.len());
            // The next disk process may have answered.
            if calls.read(block * BLOCK, &mut bytes).is_none() || is_over.load(Ordering::SeqCst) {
                return seals;
            }
            let found = found(block, first[block], last[block], &bytes);
            let found = found.unwrap_or_else(|| panic!("block {block} has none of the possible writes"));
            // A block that is not changed is read from the version below.
            assert!(
                found == 0 || is_changed.get(block).is_none_or(|is_changed| *is_changed),
                "block {block}"
            );
        }
        seals += 1;
    }
    seals
}

/// Each block has the last write that was answered, or a later one, or bytes of both: this client does not send again what had no answer.
/// Returns how many blocks were ever written.
fn check(client: &dyn Device, expected: &[Expected]) -> usize {
    let mut bytes = vec![0; BLOCK];
    for (block, expected) in expected.iter().enumerate() {
        let (answered, sent) = (expected.answered(), expected.sent());
        blocking::read(client, (block * BLOCK) as u64, &mut bytes).unwrap();
        if let Some(found) = found(block, answered, sent, &bytes) {
            expected.is(found);
            continue;
        }
        let (old, new) = (contents(block, answered), contents(block, sent));
        let wrong = (0..BLOCK).find(|at| bytes[*at] != old[*at] && bytes[*at] != new[*at]);
        assert_eq!(wrong, None, "block {block} has bytes of neither write {answered} nor write {sent}");
        // Now its contents are known again.
        blocking::write(client, (block * BLOCK) as u64, &contents(block, sent + 1)).unwrap();
        expected.is(sent + 1);
    }
    expected.iter().filter(|expected| expected.answered() > 0).count()
}

/// Connects to a disk once the next disk process serves it.
fn connect(disk: &LoneDisk) -> Arc<Client> {
    let mut client = None;
    wait_until("the next disk process serves the disk", || {
        client = Client::open(&disk.uri).ok();
        client.is_some()
    });
    client.unwrap()
}

/// Whether the keeper holds memory of write caches, and has none of it in its own address space.
fn is_held_and_not_mapped(keeper: u32) -> bool {
    const MEMORY: &str = "memfd:headwater-cache";
    let fds = std::fs::read_dir(format!("/proc/{keeper}/fd")).unwrap();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    let held = links.filter(|link| link.to_string_lossy().contains(MEMORY)).count();
    let maps = std::fs::read_to_string(format!("/proc/{keeper}/maps")).unwrap();
    held > 0 && !maps.contains("memfd:")
}

#[test]
fn disks_and_machines_outlive_kills_of_the_disk_process() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    daemon.console("ran", "w", Some("W"));
    let pid = daemon.machine("ran")["pid"].as_u64().unwrap();
    let disk = LoneDisk::open(&daemon, 1, &import_big(&daemon, 128 << 20), false);
    assert!(is_held_and_not_mapped(daemon.keeper()));
    let expected: Vec<Expected> = std::iter::repeat_with(Expected::default).take(WRITERS * BLOCKS).collect();
    // The first block of the image is not empty.
    expected[0].is(1);
    let mut client = Client::open(&disk.uri).unwrap();
    blocking::write(&*client, 0, &contents(0, 1)).unwrap();
    let (mut seals, mut spilled, mut packed) = (0, 0, 0.0);
    for kill in 0..kills() {
        let (count, is_over) = (Arc::new(AtomicUsize::new(0)), AtomicBool::new(false));
        let disks = daemon.disk_process();
        std::thread::scope(|scope| {
            for (writer, expected) in expected.chunks(BLOCKS).enumerate() {
                let (client, count) = (Arc::clone(&client), Arc::clone(&count));
                let seed = kill * 16 + writer as u64;
                scope.spawn(move || write(&*client, seed, writer * BLOCKS, expected, &count));
            }
            let sealing = scope.spawn(|| seal(daemon.path(), &disk.uuid, kill, &expected, &is_over));
            wait_until("the load is under way", || count.load(Ordering::SeqCst) > 4000);
            let figures = disk.figures();
            spilled += figures["counters"]["disk_used_bytes"].as_u64().unwrap();
            packed += metric(&figures, "headwater_cache_packed_bytes");
            is_over.store(true, Ordering::SeqCst);
            signal(disks, "KILL");
            seals += sealing.join().unwrap();
        });
        client = connect(&disk);
        let written = check(&*client, &expected);
        assert!(written > 1500, "{written}");
        // The machine has its disk again, with what it wrote.
        daemon.console("ran", "w", Some("W"));
    }
    assert!(seals > 0 && spilled > 0 && packed > 0.0, "{seals} seals, spilled {spilled}, packed {packed}");
    assert_eq!(
        (daemon.machine("ran")["pid"].as_u64(), daemon.machine("ran")["state"].as_str()),
        (Some(pid), Some("running"))
    );
    daemon.wait_for_log(&["the next disk process serves the disks"]);
    client.close();
    disk.close();
    daemon.cli(&["machine", "stop", "ran", "--force"]).ok();
    assert!(!is_alive(pid));
    assert_eq!(std::fs::read_dir(daemon.path().join("cache")).unwrap().count(), 0);
}

/// The value of a metric of a disk.
fn metric(figures: &Value, name: &str) -> f64 {
    let samples = figures["metrics"].as_array().unwrap().iter();
    samples.filter(|sample| sample["metric"] == name).filter_map(|sample| sample["value"].as_f64()).sum()
}

#[test]
fn a_persistent_disk_keeps_what_was_flushed_before_a_kill() {
    let daemon = Daemon::start();
    let disk = LoneDisk::open(&daemon, 1, &import_big(&daemon, 64 << 20), true);
    let expected: Vec<Expected> = std::iter::repeat_with(Expected::default).take(256).collect();
    let (mut rng, kills) = (Rng::new(3), if is_long() { 100 } else { 3 });
    for kill in 0..kills {
        let (client, flushes) = (connect(&disk), AtomicUsize::new(0));
        // The first block of the image is not empty.
        if kill == 0 {
            blocking::write(&*client, 0, &contents(0, 0)).unwrap();
            blocking::flush(&*client).unwrap();
        }
        let before = daemon.disk_process();
        std::thread::scope(|scope| {
            let killing = scope.spawn(|| {
                wait_until("it is flushed", || flushes.load(Ordering::SeqCst) > 3);
                signal(before, "KILL");
            });
            // Here a write counts as answered once it is flushed.
            let mut unflushed = Vec::new();
            loop {
                let block = rng.index(expected.len());
                let number = expected[block].sent() + 1;
                expected[block].sent.store(number, Ordering::SeqCst);
                if blocking::write(&*client, (block * BLOCK) as u64, &contents(block, number)).is_err() {
                    break;
                }
                unflushed.push((block, number));
                if rng.chance(1, 40) {
                    if blocking::flush(&*client).is_err() {
                        break;
                    }
                    for (block, number) in unflushed.drain(..) {
                        expected[block].answered.store(number, Ordering::SeqCst);
                    }
                    flushes.fetch_add(1, Ordering::SeqCst);
                }
            }
            killing.join().unwrap();
        });
        wait_until("there is another disk process", || daemon.disk_process() != before);
        let snapshot = || ask(daemon.path(), &"snapshot".into())["done"].clone();
        wait_until("the daemon uses it", || snapshot().is_object());
        // The disk is not served until its machine is started again.
        assert!(snapshot()["disks"].get(&disk.uuid).is_none(), "kill {kill}");
        // Nor is a version made of it without the writes that may be missing.
        let refused = disk.freeze()["failed"]["problem"].clone();
        assert_eq!(refused["kind"], "conflict", "{refused}");
        assert!(refused["message"].as_str().unwrap().contains("last writes may be missing"), "{refused}");
        disk.open_again(true);
        let written = check(&*connect(&disk), &expected);
        assert!(written > 50, "kill {kill}: {written}");
    }
    disk.close();
    assert!(disk.freeze()["done"].is_object());
}

#[test]
fn a_disk_process_that_crashes_again_and_again_is_given_up() {
    let mut daemon = Daemon::start();
    let mut before = 0;
    for _ in 0..4 {
        wait_until("there is another disk process", || daemon.disk_process() != before);
        before = daemon.disk_process();
        signal(before, "ABRT");
    }
    assert_eq!(daemon.wait(), Some(1));
    daemon.wait_for_log(&["the disk process has crashed 4 times within 60 s"]);
}

#[test]
fn a_disk_that_is_taken_over_at_the_third_crash_is_given_up_alone() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("one");
    daemon.create("two", "tiny", &[]);
    for machine in ["one", "two"] {
        daemon.cli(&["machine", "start", machine, "--wait"]).ok();
        daemon.console(machine, "w", Some("W"));
    }
    for _ in 0..2 {
        let before = daemon.disk_process();
        signal(before, "ABRT");
        wait_until("there is another disk process", || daemon.disk_process() != before);
    }
    daemon.wait_for_log(&["before the next disk is taken over"]);
    signal(daemon.disk_process(), "ABRT");
    daemon.wait_for_log(&["a disk is given up, and its machine with it"]);
    let state = |machine: &str| daemon.machine(machine)["state"].as_str().unwrap().to_owned();
    wait_until("a machine has lost its disk", || {
        ["one", "two"].iter().any(|machine| state(machine) != "running")
    });
    let (lost, other) = if state("one") == "running" { ("two", "one") } else { ("one", "two") };
    assert_eq!(state(other), "running");
    daemon.console(other, "w", Some("W"));
    let reason = daemon.machine(lost)["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("its disk was lost when the disk process crashed"), "{reason}");
    daemon.cli(&["machine", "start", lost, "--wait"]).ok();
}
