//! A disk process that is killed under load: the next one takes its disks over, and machines go on.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use headwater_block::{Device, blocking};
use headwater_nbd::Client;
use headwater_testkit::rounds::is_long;
use headwater_testkit::{Rng, wait_until};

use crate::support::{Daemon, is_alive, signal, tiny_disk};

const BLOCK: usize = 4096;
const WRITERS: usize = 4;
/// Blocks of one writer: together more than the memory of the write cache.
const BLOCKS: usize = 1536;

fn kills() -> u64 {
    if is_long() { 1000 } else { 4 }
}

/// Makes a call to the disk process, as a daemon does.
fn ask(dir: &Path, call: &serde_json::Value) -> serde_json::Value {
    let mut connection = BufReader::new(UnixStream::connect(dir.join("disks.sock")).unwrap());
    writeln!(connection.get_mut(), "{call}").unwrap();
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

/// What a block of a writer may have: the number of a write that was answered, and of one that was not.
#[derive(Clone, Copy, Default)]
struct Expected {
    answered: u32,
    sent: u32,
}

fn contents(block: usize, number: u32) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    if number > 0 {
        // They pack badly.
        Rng::new(u64::from(number) << 32 | block as u64).fill(&mut bytes);
    }
    bytes
}

/// Writes until the disk process ends.
fn write(client: &dyn Device, seed: u64, first: usize, expected: &mut [Expected], count: &AtomicUsize) {
    let mut rng = Rng::new(seed);
    loop {
        let index = rng.index(expected.len());
        let number = expected[index].sent + 1;
        expected[index].sent = number;
        let block = first + index;
        if blocking::write(client, (block * BLOCK) as u64, &contents(block, number)).is_err() {
            return;
        }
        expected[index].answered = number;
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Each block has the last write that was answered, or a later one. Returns how many blocks were ever written.
fn check(client: &dyn Device, expected: &mut [Expected]) -> usize {
    let mut bytes = vec![0; BLOCK];
    for (block, expected) in expected.iter_mut().enumerate() {
        blocking::read(client, (block * BLOCK) as u64, &mut bytes).unwrap();
        let found = [expected.answered, expected.sent].into_iter().find(|n| contents(block, *n) == bytes);
        let found = found.unwrap_or_else(|| panic!("block {block} has not write {}", expected.answered));
        (expected.answered, expected.sent) = (found, found);
    }
    expected.iter().filter(|expected| expected.answered > 0).count()
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
    let big = daemon.path().join("big.raw");
    std::fs::write(&big, tiny_disk()).unwrap();
    std::fs::File::options().write(true).open(&big).unwrap().set_len(128 << 20).unwrap();
    daemon.cli(&["image", "import", big.to_str().unwrap()]).ok();
    daemon.create("big", "big", &[]);
    daemon.cli(&["machine", "start", "ran", "big", "--wait"]).ok();
    daemon.console("ran", "w", Some("W"));
    let pid = daemon.machine("ran")["pid"].as_u64().unwrap();
    let left = ask(daemon.path(), &"left_open".into());
    let disks = left["done"].as_array().unwrap();
    let version = disks.iter().find(|disk| disk["machine"] == "big").unwrap()["version"].clone();
    daemon.cli(&["machine", "stop", "big", "--force"]).ok();

    // A disk without a machine, for a client that verifies.
    let run_dir = daemon.path().join("run/load");
    std::fs::create_dir(&run_dir).unwrap();
    let uuid = "6f1c2a54-0000-4000-8000-000000000001";
    let opened = ask(
        daemon.path(),
        &serde_json::json!({ "open": { "request": {
            "machine": "load", "uuid": uuid, "run_dir": run_dir, "version": version, "kept": null, "goes_on": false,
            "cache": { "mode": "ram+disk", "ram_bytes": 16 << 20, "disk_bytes": 1 << 30, "persistent": false, "weight": 100 },
            "transport": "nbd", "firmware": "bios", "secure_boot": false, "scratch_bytes": 0, "is_recorded": false,
        } } }),
    );
    assert!(opened["done"].is_object(), "{opened}");
    assert!(is_held_and_not_mapped(daemon.keeper()));
    let uri = format!("nbd+unix:///?socket={}", run_dir.join("disk.sock").display());
    let mut expected = vec![Expected::default(); WRITERS * BLOCKS];
    // The first block of the image is not empty.
    expected[0].sent = 1;
    let mut client = Client::open(&uri).unwrap();
    blocking::write(&*client, 0, &contents(0, 1)).unwrap();
    for kill in 0..kills() {
        let count = Arc::new(AtomicUsize::new(0));
        let disks = daemon.disk_process();
        std::thread::scope(|scope| {
            for (writer, expected) in expected.chunks_mut(BLOCKS).enumerate() {
                let (client, count) = (Arc::clone(&client), Arc::clone(&count));
                let seed = kill * 16 + writer as u64;
                scope.spawn(move || write(&*client, seed, writer * BLOCKS, expected, &count));
            }
            wait_until("the load is under way", || count.load(Ordering::Relaxed) > 2500);
            signal(disks, "KILL");
        });
        wait_until("the next disk process serves the disk", || match Client::open(&uri) {
            Ok(next) => {
                client = next;
                true
            }
            Err(_) => false,
        });
        let written = check(&*client, &mut expected);
        assert!(written > 1500, "{written}");
        // The machine has its disk again, with what it wrote.
        daemon.console("ran", "w", Some("W"));
    }
    assert_eq!(
        (daemon.machine("ran")["pid"].as_u64(), daemon.machine("ran")["state"].as_str()),
        (Some(pid), Some("running"))
    );
    daemon.wait_for_log(&["the next disk process serves the disks"]);
    client.close();
    let closed = ask(daemon.path(), &serde_json::json!({ "close": { "uuid": uuid } }));
    assert!(closed.get("done").is_some(), "{closed}");
    daemon.cli(&["machine", "stop", "ran", "--force"]).ok();
    assert!(!is_alive(pid));
    assert_eq!(std::fs::read_dir(daemon.path().join("cache")).unwrap().count(), 0);
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
    daemon.wait_for_log(&["the next disk waits"]);
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
