//! `headwater upgrade`: another program serves the disks, and machines go on.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use headwater_block::blocking;
use headwater_nbd::Client;
use headwater_testkit::{Rng, on_small_file_system, test_name, wait_until};
use rustix::fs::{FallocateFlags, fallocate};
use serde_json::json;

use crate::support::disks::{Calls, LoneDisk, ask, import_big};
use crate::support::{Daemon, headwater, is_alive, run, short_dir, signal};

/// A line of a script: the versions are this project's, except for that of the protocol.
fn with_protocol(version: u32) -> String {
    let sed = format!(r#"sed 's/"protocol": *[0-9]*/"protocol": {version}/'"#);
    format!(r#"case "$*" in *--versions*) "$REAL" "$@" | {sed}; exit ;; esac"#)
}

/// A program that is a script. `$0` of the script is of no use; `$REAL` is this project's program.
fn script(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    let text = format!("#!/bin/sh\nREAL={}\n{text}\n", env!("CARGO_BIN_EXE_headwater"));
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn machines_go_on_when_another_program_serves_their_disks() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.create("kept", "tiny", &["--persistent", "--scratch", "64M"]);
    for machine in ["ran", "kept"] {
        daemon.cli(&["machine", "start", machine, "--wait"]).ok();
        daemon.console(machine, "w", Some("W"));
    }
    let pid = |machine: &str| daemon.machine(machine)["pid"].as_u64().unwrap();
    let before = (pid("ran"), pid("kept"), daemon.disk_process());
    for _ in 0..2 {
        let said = daemon.cli(&["upgrade"]).ok();
        assert!(said.contains("serves the disks of 2 machines"), "{said}");
        for machine in ["ran", "kept"] {
            daemon.console(machine, "w", Some("W"));
        }
    }
    assert_eq!((pid("ran"), pid("kept")), (before.0, before.1));
    assert_ne!(daemon.disk_process(), before.2);
    // A persistent disk is saved by the process that had it, and a crash after that ends its machine.
    signal(daemon.disk_process(), "KILL");
    daemon.wait_for("kept", "crashed");
    assert!(!is_alive(before.1));
    daemon.console("ran", "w", Some("W"));
    daemon.cli(&["machine", "start", "kept", "--wait"]).ok();
    assert!(daemon.cli(&["machine", "console", "kept", "--log"]).ok().contains("3 writes"));
    // The program that serves now counts, and not the program of the keeper.
    let newer = script(daemon.path(), "newer", &format!("{}\nexec \"$REAL\" \"$@\"", with_protocol(99)));
    daemon.cli(&["upgrade", "--program", newer.to_str().unwrap()]).ok();
    daemon.cli(&["upgrade"]).fails(1, &["which is older than 99", "nothing has changed"]);
    daemon.console("ran", "w", Some("W"));
}

/// An old program that has handed its disks over, and a new one that does not take them until it may.
#[test]
fn changes_during_an_upgrade_are_made_by_the_next_program() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("one");
    for machine in ["two", "three", "four"] {
        daemon.create(machine, "tiny", &[]);
    }
    for machine in ["one", "two", "three"] {
        daemon.cli(&["machine", "start", machine, "--wait"]).ok();
    }
    let (waits, may_go) = (daemon.path().join("waits"), daemon.path().join("may-go"));
    let text = format!(
        "case \"$*\" in *--versions*) exec \"$REAL\" \"$@\" ;; esac\n: >{}\nuntil [ -e {} ]; do sleep 0.05; done\nexec \"$REAL\" \"$@\"",
        waits.display(),
        may_go.display()
    );
    let program = script(daemon.path(), "slow", &text);
    let qemu = daemon.machine("one")["pid"].as_u64().unwrap();
    std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| daemon.cli(&["upgrade", "--program", program.to_str().unwrap()]).ok());
        wait_until("the old program has ended", || waits.exists());
        let stop = scope.spawn(|| daemon.cli(&["machine", "stop", "two", "--force"]).ok());
        let start = scope.spawn(|| daemon.cli(&["machine", "start", "four", "--wait"]).ok());
        signal(u32::try_from(qemu).unwrap(), "KILL");
        wait_until("QEMU is gone", || !is_alive(qemu));
        File::create(&may_go).unwrap();
        let said = upgrade.join().unwrap();
        assert!(said.contains("serves the disks of 3 machines"), "{said}");
        stop.join().unwrap();
        start.join().unwrap();
    });
    daemon.wait_for("one", "crashed");
    for machine in ["three", "four"] {
        daemon.console(machine, "w", Some("W"));
    }
    let left = ask(daemon.path(), &"left_open".into());
    let mut left: Vec<_> = left["done"].as_array().unwrap().iter().map(|disk| &disk["machine"]).collect();
    left.sort_by_key(|machine| machine.to_string());
    assert_eq!(left, ["four", "three"]);
    daemon.cli(&["machine", "start", "one", "--wait"]).ok();
}

#[test]
fn an_upgrade_is_refused_while_a_disk_cannot_be_handed_over() {
    // The memory of a write cache is a long file.
    let daemon = Daemon::start_on_full_disk(256 << 20);
    let version = import_big(&daemon, 16 << 20);
    let disk = LoneDisk::open(&daemon, 1, &version, false);
    let before = daemon.disk_process();
    // A seal is under way.
    let mut seal = Calls::to(daemon.path());
    let frozen = seal.call(&json!({ "freeze": { "uuid": disk.uuid } })).unwrap();
    assert!(frozen["done"].is_object(), "{frozen}");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                let figures = disk.figures();
                assert!(figures.is_object(), "{figures}");
                seal.read(0, &mut [0; 4096]).unwrap();
            }
        });
        let refused = daemon.cli(&["upgrade"]);
        is_over.store(true, Ordering::SeqCst);
        asking.join().unwrap();
        refused.fails(1, &["'load-1' cannot be handed over", "nothing has changed"]);
    });
    drop(seal);
    assert_eq!(daemon.disk_process(), before);
    blocking::write(&*Client::open(&disk.uri).unwrap(), 0, &[7; 4096]).unwrap();
    disk.close();
    assert!(daemon.cli(&["upgrade"]).ok().contains("serves the disks of 0 machines"));
    // The next process opens the store, if the daemon has not asked for that yet.
    LoneDisk::open(&daemon, 2, &version, false);
}

const BLOCK: usize = 4096;

/// Writes random blocks. Returns how many were answered.
fn fill(client: &Client, seed: u64, blocks: std::ops::Range<usize>) -> usize {
    let block = |number: &usize| Rng::new(seed + *number as u64).bytes(BLOCK);
    let is_written =
        |number: &usize| blocking::write(client, (number * BLOCK) as u64, &block(number)).is_ok();
    blocks.take_while(is_written).count()
}

fn check(client: &Client, seed: u64, blocks: std::ops::Range<usize>) {
    for number in blocks {
        let mut bytes = vec![0; BLOCK];
        blocking::read(client, (number * BLOCK) as u64, &mut bytes).unwrap();
        assert!(bytes == Rng::new(seed + number as u64).bytes(BLOCK), "block {number} of disk {seed}");
    }
}

#[test]
fn disks_are_handed_over_while_the_file_system_of_the_overflow_is_full() {
    let place = short_dir();
    let this = test_name(disks_are_handed_over_while_the_file_system_of_the_overflow_is_full);
    on_small_file_system(this, place.path(), 96, hand_over_on_a_full_file_system);
}

fn hand_over_on_a_full_file_system(place: &Path) {
    let dir = short_dir();
    std::os::unix::fs::symlink(place, dir.path().join("cache")).unwrap();
    let daemon = Daemon::start_in(dir, |command| {
        command.args(["--pause", "1"]);
    });
    let version = import_big(&daemon, 64 << 20);
    let disks = [1, 2].map(|number| LoneDisk::open(&daemon, number, &version, number == 2));
    let open = || disks.each_ref().map(|disk| Client::open(&disk.uri).unwrap());
    let [fresh, saved] = open();
    // More than the RAM: the rest is in the overflow.
    assert_eq!(fill(&fresh, 1000, 0..8000), 8000);
    assert_eq!(fill(&saved, 2000, 0..500), 500);
    blocking::flush(&*saved).unwrap();
    let (stats, ballast) = (rustix::fs::statvfs(place).unwrap(), place.join("ballast"));
    let left = stats.f_bavail * stats.f_frsize;
    fallocate(File::create(&ballast).unwrap(), FallocateFlags::empty(), 0, left).unwrap();
    // The process that ends saves the writes that are answered now.
    let end = 500 + fill(&saved, 2000, 500..600);
    let said = daemon.cli(&["upgrade"]).ok();
    assert!(said.contains("serves the disks of 2 machines"), "{said}");
    let [fresh, saved] = open();
    check(&fresh, 1000, 0..8000);
    check(&saved, 2000, 0..end);
    // It has room again.
    std::fs::remove_file(&ballast).unwrap();
    wait_until("writes are answered again", || fill(&saved, 2000, end..700) == 700 - end);
    blocking::flush(&*saved).unwrap();
    daemon.cli(&["upgrade"]).ok();
    let [fresh, saved] = open();
    check(&fresh, 1000, 0..8000);
    check(&saved, 2000, 0..700);
    assert_eq!(ask(daemon.path(), &"left_open".into())["done"].as_array().unwrap().len(), 2);
}

#[test]
fn programs_that_cannot_take_the_disks_over_change_nothing() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    daemon.console("ran", "w", Some("W"));
    let before = daemon.disk_process();
    let dir = daemon.path();
    let foreign = dir.join("foreign");
    let mut elf = std::fs::read("/bin/true").unwrap();
    // The processor in its header.
    elf[18..20].copy_from_slice(&[0xff, 0x7f]);
    std::fs::write(&foreign, elf).unwrap();
    std::fs::set_permissions(&foreign, std::fs::Permissions::from_mode(0o755)).unwrap();
    let writable = script(dir, "writable", "exit 0");
    std::fs::set_permissions(&writable, std::fs::Permissions::from_mode(0o777)).unwrap();
    for (program, words) in [
        (writable, "can be written by others than its owner"),
        (PathBuf::from("/bin/false"), "cannot report its versions"),
        (PathBuf::from("/bin/true"), "does not report its versions"),
        (foreign, "cannot be started"),
        (
            script(dir, "older", &with_protocol(0)),
            "speaks version 0 of the protocol of daemons, which is older than",
        ),
        (dir.join("missing"), "cannot open"),
    ] {
        let refused = daemon.cli(&["upgrade", "--program", program.to_str().unwrap()]);
        assert!(refused.code != 0 && refused.err.contains(words), "{refused:?}");
        assert_eq!(daemon.disk_process(), before, "{program:?}");
    }
    // These run, and do not serve the disks then.
    let versions = r#"case "$*" in *--versions*) exec "$REAL" "$@" ;; esac"#;
    for (name, then) in [("crashes", "kill -SEGV $$"), ("ends", "exit 0")] {
        let program = script(dir, name, &format!("{versions}\n{then}"));
        let refused = daemon.cli(&["upgrade", "--program", program.to_str().unwrap()]);
        refused.fails(
            1,
            &["the new program has ended before it served", "the old program serves the disks again"],
        );
        daemon.console("ran", "w", Some("W"));
    }
    assert_eq!(daemon.machine("ran")["state"], "running");
}

/// A new program that has taken one persistent disk over and waits for the key of another: it finds no key, or it is late.
#[test]
fn a_new_program_that_fails_or_is_late_gives_persistent_disks_back() {
    let daemon = Daemon::start();
    let version = import_big(&daemon, 16 << 20);
    let [disk, other] = [1, 2].map(|number| LoneDisk::open(&daemon, number, &version, true));
    assert_eq!(fill(&Client::open(&disk.uri).unwrap(), 1000, 0..8), 8);
    let key = daemon.path().join(format!("keys/disk-{}", other.uuid));
    let aside = key.with_file_name("aside");
    let reasons = ["has ended before it served", "has not served the disks within 10 s"];
    for (round, why) in reasons.into_iter().enumerate() {
        let before = daemon.disk_process();
        let pipe = daemon.path().join(format!("pipe-{round}"));
        assert!(Command::new("mkfifo").args(["-m", "600"]).arg(&pipe).status().unwrap().success());
        std::fs::rename(&key, &aside).unwrap();
        std::fs::hard_link(&pipe, &key).unwrap();
        std::thread::scope(|scope| {
            let upgrade = scope.spawn(|| daemon.cli(&["upgrade"]));
            let mut opened = None;
            wait_until("the new program opens the key", || {
                let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
                opened = File::options().write(true).custom_flags(nonblocking).open(&pipe).ok();
                opened.is_some()
            });
            // Another program finds it again.
            std::fs::rename(&aside, &key).unwrap();
            let mut client = None;
            wait_until("the new program serves the other disk", || {
                client = Client::open(&disk.uri).ok();
                client.is_some()
            });
            assert_ne!(daemon.disk_process(), before);
            // Nobody flushes these writes.
            let blocks = 8 * (round + 1)..8 * (round + 2);
            assert_eq!(fill(&client.unwrap(), 1000, blocks), 8);
            if round == 0 {
                opened.as_mut().unwrap().write_all(b"no key").unwrap();
                drop(opened.take());
            }
            upgrade.join().unwrap().fails(1, &[why, "the old program serves the disks again"]);
        });
        let mut clients = [&disk, &other].map(|_| None);
        wait_until("the old program serves both disks", || {
            clients = [&disk, &other].map(|disk| Client::open(&disk.uri).ok());
            clients.iter().all(Option::is_some)
        });
        check(clients[0].as_ref().unwrap(), 1000, 0..8 * (round + 2));
    }
}

#[test]
fn an_upgrade_without_a_disk_process_is_refused() {
    let dir = short_dir();
    run(headwater().arg("upgrade").arg("--data-dir").arg(dir.path()))
        .fails(3, &["no keeper of disks answers"]);
}
