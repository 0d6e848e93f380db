//! A daemon that is killed, and what the next one makes of it.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{Daemon, Ran, Watchdog, headwater, is_alive, run, short_dir, signal, wait_for_child};
use headwater_testkit::wait_until;

#[test]
fn a_machine_outlives_a_killed_daemon_and_is_taken_over() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("idle");
    daemon.create("ran", "tiny", &["--tpm"]);
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    let tpm_of_ran = |dir: &Path| -> u64 {
        let line = std::fs::read_to_string(dir.join("run/ran/tpm.pid")).unwrap();
        line.split(' ').next().unwrap().parse().unwrap()
    };
    let tpm = tpm_of_ran(daemon.path());
    daemon.console("ran", "w", Some("W"));
    let before = daemon.machine("ran");
    let (pid, writes) = (before["pid"].as_u64().unwrap(), before["disk"]["writes"].as_u64().unwrap());
    assert!(writes > 0, "{before}");
    let dir = daemon.kill();
    run(headwater().arg("--data-dir").arg(dir.path()).args(["machine", "list"]))
        .fails(7, &["cannot reach the daemon"]);
    assert!(is_alive(pid) && is_alive(tpm), "QEMU or its TPM ended with the daemon");

    let daemon = Daemon::start_in(dir, |_| {});
    let after = daemon.machine("ran");
    assert_eq!((&after["state"], &after["pid"]), (&"running".into(), &pid.into()), "{after}");
    assert!(after["disk"]["writes"].as_u64().unwrap() >= writes, "its counters began anew: {after}");
    assert_eq!(daemon.machine("idle")["state"], "created");
    assert!(daemon.history("ran").contains("taken over"));
    // Its console and its disk still work, and what it wrote is there until it is reset.
    daemon.console("ran", "w", Some("W"));
    assert!(daemon.machine("ran")["disk"]["writes"].as_u64().unwrap() > writes);
    daemon.cli(&["machine", "reset", "ran", "--wait"]).ok();
    let fresh = daemon.machine("ran");
    assert_ne!(fresh["pid"].as_u64(), Some(pid));
    assert!(!is_alive(pid) && !is_alive(tpm));
    let tpm = tpm_of_ran(daemon.path());
    daemon.cli(&["machine", "stop", "ran", "--force"]).ok();
    assert!(!is_alive(tpm));
    assert_eq!(std::fs::read_dir(daemon.path().join("cache")).unwrap().count(), 0);
}

#[test]
fn machines_stay_on_when_a_daemon_is_told_to_keep_them() {
    let keep = |command: &mut Command| {
        command.arg("--keep-machines");
    };
    let daemon = Daemon::start_in(short_dir(), keep);
    daemon.with_tiny_machine("ran");
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    let pid = daemon.machine("ran")["pid"].as_u64().unwrap();
    let (code, dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    assert!(is_alive(pid));
    let daemon = Daemon::start_in(dir, |_| {});
    assert_eq!(daemon.machine("ran")["pid"].as_u64(), Some(pid));
    // This one was not told to keep them. Told twice, it does not wait for the guest.
    let mut daemon = daemon;
    signal(daemon.pid(), "TERM");
    daemon.wait_for_log(&["stopping"]);
    signal(daemon.pid(), "TERM");
    assert_eq!(daemon.wait(), Some(0));
    assert!(!is_alive(pid));
    let socket = daemon.path().join("disks.sock");
    wait_until("the disk process ends with its last disk", || UnixStream::connect(&socket).is_err());
}

#[test]
fn machines_end_with_their_disks_if_both_units_are_stopped() {
    for (job, stays) in [("", true), ("12 headwater-disks.service stop waiting", false)] {
        let dir = short_dir();
        // What the service manager of the host would say.
        let says = format!(
            "#!/bin/sh\ncase $1 in is-system-running) echo running ;; list-jobs) echo '{job}' ;; esac\n"
        );
        let bin = dir.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        std::fs::write(bin.join("systemctl"), says).unwrap();
        std::fs::set_permissions(bin.join("systemctl"), Permissions::from_mode(0o755)).unwrap();
        let notified = UnixDatagram::bind(dir.path().join("notify")).unwrap();
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let daemon = Daemon::start_in(dir, |command| {
            command.arg("--keep-machines").env("PATH", path);
            command.env("NOTIFY_SOCKET", notified.local_addr().unwrap().as_pathname().unwrap());
        });
        daemon.with_tiny_machine("ran");
        daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
        let pid = daemon.machine("ran")["pid"].as_u64().unwrap();
        let mut daemon = daemon;
        signal(daemon.pid(), "TERM");
        daemon.wait_for_log(&["stopping"]);
        if !stays {
            // Told twice, it does not wait for the guest.
            signal(daemon.pid(), "TERM");
        }
        assert_eq!((daemon.wait(), is_alive(pid)), (Some(0), stays), "{job}");
        if stays {
            let dir = std::mem::replace(&mut daemon.dir, short_dir());
            Daemon::start_in(dir, |_| {}).cli(&["machine", "stop", "ran", "--force"]).ok();
        }
    }
}

#[test]
fn what_ended_while_no_daemon_ran_is_lost_and_cleaned_up() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    let pid = daemon.machine("ran")["pid"].as_u64().unwrap();
    let dir = daemon.kill();
    signal(u32::try_from(pid).unwrap(), "KILL");
    wait_until("QEMU is gone", || !is_alive(pid));

    let daemon = Daemon::start_in(dir, |_| {});
    let lost = daemon.machine("ran");
    assert_eq!((&lost["state"], &lost["wanted"]), (&"lost".into(), &"running".into()));
    assert!(lost["reason"].as_str().unwrap().contains("its process was gone"), "{lost}");
    assert_eq!(lost.get("disk"), None);
    assert!(daemon.cli(&["machine", "list"]).ok().contains("lost"));
    assert!(daemon.history("ran").contains("the daemon ended while it was running"));
    assert_eq!(std::fs::read_dir(daemon.path().join("cache")).unwrap().count(), 0);
    let mut left: Vec<_> = std::fs::read_dir(daemon.path().join("run/ran"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["console.log", "qemu.log"]);
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    assert!(daemon.cli(&["machine", "console", "ran", "--log"]).ok().contains("0 writes"));
}

#[test]
fn a_daemon_whose_keeper_ends_with_the_disks_ends_its_machines_and_says_so() {
    let mut daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    let pid = daemon.machine("ran")["pid"].as_u64().unwrap();
    let (keeper, disks) = (daemon.keeper(), daemon.disk_process());
    signal(keeper, "KILL");
    wait_until("the keeper is gone", || !is_alive(keeper.into()));
    daemon.console("ran", "w", Some("W"));
    daemon
        .cli(&["upgrade"])
        .fails(4, &["no keeper of disks answers", "a disk process runs without a keeper"]);
    signal(disks, "KILL");
    assert_eq!(daemon.wait(), Some(1));
    daemon.wait_for_log(&["the process that had the disks of all machines has ended"]);
    assert!(!is_alive(pid));
    let daemon = Daemon::start_in(std::mem::replace(&mut daemon.dir, short_dir()), |command| {
        command.arg("--resume");
    });
    daemon.wait_for("ran", "running");
}

#[test]
fn a_disk_process_of_a_service_manager_is_used_and_begins_anew_between_daemons() {
    let dir = short_dir();
    let pid = |dir: &Path| std::fs::read_to_string(dir.join("disks.lock")).unwrap_or_default();
    // As a service manager does it: it is started whenever it has ended.
    let mut manager = Command::new("sh");
    let script = "while :; do \"$0\" --data-dir \"$1\" disks & echo $! >\"$1/child\"; wait; sleep 0.2; done";
    manager.args(["-c", script, env!("CARGO_BIN_EXE_headwater")]).arg(dir.path()).env_remove("NOTIFY_SOCKET");
    let mut manager = manager.stderr(Stdio::null()).spawn().unwrap();
    wait_until("it listens", || dir.path().join("disks.sock").exists());
    let first = pid(dir.path());
    let daemon = Daemon::start_in(dir, |_| {});
    assert_eq!(pid(daemon.path()), first, "another disk process was started");
    daemon.with_tiny_machine("ran");
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    daemon.cli(&["machine", "stop", "ran", "--force"]).ok();
    let (code, dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    // The stop closed its store, so the next daemon has the service manager start another disk process.
    let daemon = Daemon::start_in(dir, |_| {});
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    let child = std::fs::read_to_string(daemon.path().join("child")).unwrap();
    assert_eq!(pid(daemon.path()), child.trim(), "the daemon did not wait for the service manager");
    assert_ne!(pid(daemon.path()), first);
    daemon.cli(&["machine", "stop", "ran", "--force"]).ok();
    // Whoever would run machines in this process finds the disks in use.
    let (code, dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    run(headwater().args(["run", "tiny", "--data-dir"]).arg(dir.path())).fails(4, &["serves the disks"]);
    manager.kill().unwrap();
    manager.wait().unwrap();
    signal(pid(dir.path()).parse().unwrap(), "TERM");
}

#[test]
fn a_machine_waits_with_an_alarm_while_the_disk_process_is_stopped() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    let disks = daemon.disk_process();
    signal(disks, "STOP");
    daemon.wait_for_log(&["alarm: the process that has its disk does not answer"]);
    daemon.cli(&["upgrade"]).fails(1, &["the disk process is stopped", "nothing has changed"]);
    signal(disks, "CONT");
    daemon.console("ran", "w", Some("W"));
    daemon.wait_for_log(&["the alarm is over", "ran"]);
    assert_eq!(daemon.machine("ran")["state"], "running");
}

#[test]
fn a_daemon_says_that_it_waits_for_the_disk_process() {
    let dir = short_dir();
    let start = |command: &str| {
        let mut started = headwater();
        started.args([command, "--data-dir"]).arg(dir.path()).stdin(Stdio::null()).stderr(Stdio::piped());
        started.spawn().unwrap()
    };
    let mut keeper = start("disks");
    wait_until("it listens", || dir.path().join("disks.sock").exists());
    let disks = wait_for_child(keeper.id());
    signal(disks, "STOP");
    let mut daemon = start("serve");
    let _watchdog = Watchdog::on(daemon.id());
    let mut log = BufReader::new(daemon.stderr.take().unwrap()).lines();
    let mut read_until = |words: &str| {
        let found = log.by_ref().map_while(Result::ok).find(|line| line.contains(words));
        assert!(found.is_some(), "the daemon ended and has not said {words:?}");
    };
    read_until("the disk process does not answer yet");
    signal(disks, "CONT");
    read_until("ready");
    std::thread::spawn(move || log.for_each(drop));
    signal(daemon.id(), "TERM");
    assert_eq!(daemon.wait().unwrap().code(), Some(0));
    signal(keeper.id(), "TERM");
    keeper.wait().unwrap();
}

#[test]
fn the_disk_process_of_a_daemon_cannot_leave_its_files() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.cli(&["machine", "start", "ran", "--wait"]).ok();
    let pid = daemon.disk_process();
    let mut threads = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let status = std::fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
        assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1", "2"), "{status}");
        // CAP_DAC_OVERRIDE and CAP_IPC_LOCK are kept if it had them.
        let left = u64::from_str_radix(field("CapPrm:"), 16).unwrap();
        assert_eq!(left & !(1 << 1 | 1 << 14), 0, "{status}");
        threads += 1;
    }
    assert!(threads > 1);
    // Even if a daemon asks it to.
    let mut connection = BufReader::new(UnixStream::connect(daemon.path().join("disks.sock")).unwrap());
    let mut ask = |call: serde_json::Value| -> serde_json::Value {
        writeln!(connection.get_mut(), "{call}").unwrap();
        let mut line = String::new();
        connection.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    };
    let version = ask("left_open".into())["done"][0]["version"].clone();
    let mut open = |run_dir: &Path, uuid: &str| {
        ask(serde_json::json!({ "open": { "request": {
            "machine": uuid, "uuid": uuid, "run_dir": run_dir, "version": version, "kept": null, "goes_on": false,
            "cache": { "mode": "ram", "ram_bytes": 16 << 20, "disk_bytes": 0, "persistent": false, "weight": 100 },
            "transport": "nbd", "firmware": "bios", "secure_boot": false, "scratch_bytes": 0, "is_recorded": false,
        } } }))
    };
    let (outside, inside) = (short_dir(), daemon.path().join("run/other"));
    std::fs::create_dir(&inside).unwrap();
    let refused = open(outside.path(), "6f1c2a54-0000-4000-8000-000000000001").to_string();
    assert!(refused.contains("failed") && refused.contains("Permission denied"), "{refused}");
    let opened = open(&inside, "6f1c2a54-0000-4000-8000-000000000002");
    assert!(opened["done"].is_object(), "{opened}");
    ask(serde_json::json!({ "close": { "uuid": "6f1c2a54-0000-4000-8000-000000000002" } }));
}

#[test]
fn a_daemon_that_finds_a_disk_process_at_its_end_starts_another() {
    let dir = short_dir();
    // A process that nobody used: it listens, then no longer, and its lock goes last.
    let (socket, lock) = (dir.path().join("disks.sock"), dir.path().join("disks.lock"));
    let listener = UnixListener::bind(socket).unwrap();
    let lock = std::fs::File::create(lock).unwrap();
    lock.lock().unwrap();
    let ending = std::thread::spawn(move || {
        let found = listener.accept().unwrap();
        drop(listener);
        std::thread::sleep(Duration::from_millis(300));
        drop((found, lock));
    });
    let daemon = Daemon::start_in(dir, |_| {});
    ending.join().unwrap();
    daemon.with_tiny_machine("vm");
}

#[test]
fn a_second_disk_process_is_refused() {
    let daemon = Daemon::start();
    let pid = std::fs::read_to_string(daemon.path().join("disks.lock")).unwrap();
    run(headwater().args(["disks", "--data-dir"]).arg(daemon.path())).fails(4, &["serves the disks", &pid]);
    daemon.cli(&["status"]).ok();
}

#[test]
fn of_disk_processes_that_start_at_once_one_serves() {
    let dir = short_dir();
    let start = |_| {
        let mut command = headwater();
        command.args(["disks", "--data-dir"]).arg(dir.path()).stdin(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut all = [0; 4].map(start);
    let mut serves = Vec::new();
    wait_until("all but one have ended", || {
        let runs = all
            .iter_mut()
            .enumerate()
            .filter_map(|(at, child)| child.try_wait().unwrap().is_none().then_some(at));
        serves = runs.collect();
        serves.len() == 1
    });
    wait_until("the other one listens", || UnixStream::connect(dir.path().join("disks.sock")).is_ok());
    for (at, child) in all.into_iter().enumerate() {
        if at == serves[0] {
            let holder = std::fs::read_to_string(dir.path().join("disks.lock")).unwrap();
            assert_eq!(holder, child.id().to_string());
            signal(child.id(), "TERM");
            child.wait_with_output().unwrap();
        } else {
            let refused = Ran::from(child.wait_with_output().unwrap());
            refused.fails(4, &["serves the disks of"]);
        }
    }
}

#[test]
fn a_second_daemon_is_refused_and_the_first_goes_on() {
    let daemon = Daemon::start();
    let second = run(headwater().args(["serve", "--data-dir"]).arg(daemon.path()));
    let pid = daemon.pid().to_string();
    second.fails(4, &["in use by process", &pid]);
    run(headwater().args(["run", "x", "--data-dir"]).arg(daemon.path()))
        .fails(4, &["in use by process", &pid]);
    daemon.cli(&["status"]).ok();
}

#[test]
fn a_socket_that_cannot_be_is_refused() {
    let dir = short_dir();
    let deep = dir.path().join("x".repeat(120));
    run(headwater().args(["serve", "--data-dir"]).arg(&deep)).fails(2, &["at most 107", "shorter path"]);
    std::fs::write(dir.path().join("api.sock"), "precious").unwrap();
    run(headwater().args(["serve", "--data-dir"]).arg(dir.path())).fails(4, &["api.sock", "not a socket"]);
    assert_eq!(std::fs::read(dir.path().join("api.sock")).unwrap(), b"precious");
}

#[test]
fn a_port_in_use_is_said() {
    let dir = short_dir();
    let serve =
        |address: &str| run(headwater().args(["serve", "--listen", address, "--data-dir"]).arg(dir.path()));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    serve(&address).fails(4, &[&address, "in use"]);
    // Nothing is left that would keep the next one from starting.
    assert!(!dir.path().join("api.sock").exists());
    Daemon::start_in(dir, |_| {});
}

/// A daemon on a bucket whose server accepts connections and never answers.
fn serve_from(silent: &TcpListener, data_dir: &Path) -> Command {
    let store = format!("s3://images/golden?endpoint=http://{}&region=x", silent.local_addr().unwrap());
    let mut command = headwater();
    command.args(["serve", "--store", &store, "--data-dir"]).arg(data_dir);
    command.env("AWS_ACCESS_KEY_ID", "x").env("AWS_SECRET_ACCESS_KEY", "x");
    command
}

#[test]
fn a_start_that_waits_for_a_store_says_so_and_ends_when_told() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let dir = short_dir();
    let mut serve = serve_from(&silent, dir.path()).stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(serve.stderr.take().unwrap());
    let mut seen = String::new();
    while !seen.contains("opening the store") {
        assert!(log.read_line(&mut seen).unwrap() > 0, "it ended: {seen}");
    }
    signal(serve.id(), "TERM");
    log.read_to_string(&mut seen).unwrap();
    assert_eq!(serve.wait().unwrap().code(), Some(0), "{seen}");
    assert!(seen.contains("ended by SIGTERM while opening the store"), "{seen}");
    assert!(!dir.path().join("api.sock").exists());
    Daemon::start_in(dir, |_| {});
}

#[test]
fn a_start_that_waits_for_the_disk_of_the_chunk_cache_says_so() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let (dir, cache) = (short_dir(), tempfile::tempdir().unwrap());
    // To open it waits for a reader who never comes.
    assert!(Command::new("mkfifo").arg(cache.path().join("lock")).status().unwrap().success());
    let mut command = serve_from(&silent, dir.path());
    command.arg("--chunk-cache").arg(format!("{}:64M", cache.path().display()));
    let mut serve = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(serve.stderr.take().unwrap());
    let mut seen = String::new();
    while !seen.contains("still starting: opening the chunk cache") {
        assert!(log.read_line(&mut seen).unwrap() > 0, "it ended: {seen}");
    }
    signal(serve.id(), "TERM");
    log.read_to_string(&mut seen).unwrap();
    assert_eq!(serve.wait().unwrap().code(), Some(0), "{seen}");
    assert!(seen.contains("ended by SIGTERM while opening the chunk cache"), "{seen}");
}

#[test]
fn a_data_directory_that_cannot_be_made_is_said() {
    let dir = short_dir();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let inside = file.join("data");
    run(headwater().args(["serve", "--data-dir"]).arg(&inside)).fails(1, &["cannot use the data directory"]);
}

#[test]
fn damaged_files_of_a_data_directory_are_said_to_be_damaged() {
    let serve =
        |dir: &Path| run(headwater().args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(dir));
    let dir = short_dir();
    for (name, words) in
        [("api.token", ["api.token", "remove the file"]), ("daemon.id", ["daemon.id", "remove it"])]
    {
        for text in ["0123", "\u{e4}"] {
            std::fs::write(dir.path().join(name), &text.as_bytes()[..text.len().div_ceil(2)]).unwrap();
            serve(dir.path()).fails(6, &words);
        }
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    // In a directory of its own: what an earlier start left in the log of its database would repair it.
    let dir = short_dir();
    std::fs::write(dir.path().join("headwater.db"), "no database, ".repeat(100)).unwrap();
    serve(dir.path()).fails(6, &["headwater.db", "not a database", "backup"]);
}

#[test]
fn a_database_that_was_lost_leaves_the_persistent_disks_alone() {
    let dir = short_dir();
    let disk = "disk-00000000-0000-0000-0000-000000000007";
    let (map, key) = (dir.path().join("cache").join(disk).join("map"), dir.path().join("keys").join(disk));
    for file in [&map, &key] {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "").unwrap();
    }
    // Also the second time, with the database that the first one made.
    for _ in 0..2 {
        run(headwater().args(["serve", "--data-dir"]).arg(dir.path()))
            .fails(1, &["has no machines", disk, "restore the database"]);
        assert!(map.exists() && key.exists());
    }
    std::fs::remove_file(key).unwrap();
    // Without a key here it may be another daemon's, with which this one shares the directory.
    let _daemon = Daemon::start_in(dir, |_| {});
    assert!(map.exists());
}

#[test]
fn a_store_that_is_gone_is_not_replaced_by_an_empty_one() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    let (_, dir) = daemon.terminate();
    let (store, aside) = (dir.path().join("store"), dir.path().join("aside"));
    std::fs::rename(&store, &aside).unwrap();
    // Also where it is the place of another file system that is not mounted.
    for is_empty in [false, true] {
        if is_empty {
            std::fs::create_dir(&store).unwrap();
        }
        let gone = ["there is no store in", "1 machine(s)", "--new-store"];
        run(headwater().args(["serve", "--data-dir"]).arg(dir.path())).fails(3, &gone);
        run(headwater().args(["serve", "--store"]).arg(&store).arg("--data-dir").arg(dir.path()))
            .fails(3, &gone);
        assert_eq!(store.exists(), is_empty, "what is moved there would be inside of it");
    }
    let inside = store.join("aside");
    std::fs::rename(&aside, &inside).unwrap();
    run(headwater().args(["serve", "--data-dir"]).arg(dir.path()))
        .fails(3, &["there is no store in", "a store was found in", inside.to_str().unwrap()]);
    std::fs::rename(&inside, &aside).unwrap();
    std::fs::remove_dir_all(&store).unwrap();
    std::fs::rename(&aside, &store).unwrap();
    let daemon = Daemon::start_in(dir, |_| {});
    assert!(daemon.cli(&["image", "list"]).ok().contains("tiny"));
    let (_, dir) = daemon.terminate();
    std::fs::remove_dir_all(&store).unwrap();
    let _daemon = Daemon::start_in(dir, |command| {
        command.arg("--new-store");
    });

    // Also where there are no machines.
    let daemon = Daemon::start();
    let (_, dir) = daemon.terminate();
    std::fs::remove_dir_all(dir.path().join("store")).unwrap();
    let daemon = Daemon::start_in(dir, |_| {});
    let disk = daemon.path().join("d.raw");
    std::fs::write(&disk, [1; 4096]).unwrap();
    daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    let (_, dir) = daemon.terminate();
    std::fs::remove_dir_all(dir.path().join("store")).unwrap();
    run(headwater().args(["serve", "--data-dir"]).arg(dir.path()))
        .fails(3, &["there is no store in", "the history has events about images", "--new-store"]);
}

#[test]
fn the_service_manager_is_told() {
    let dir = short_dir();
    let path = dir.path().join("notify");
    let notify = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    notify.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let told = || {
        let mut message = [0; 200];
        let n = notify.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..n]).into_owned()
    };
    // A start that takes its time.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut serve = serve_from(&silent, dir.path()).env("NOTIFY_SOCKET", &path).spawn().unwrap();
    assert!(told().contains("EXTEND_TIMEOUT_USEC=60000000"));
    signal(serve.id(), "TERM");
    assert_eq!(serve.wait().unwrap().code(), Some(0));

    let daemon = Daemon::start_in(short_dir(), |command| {
        command.env("NOTIFY_SOCKET", &path);
    });
    let mut said = told();
    // On a busy host this start is slow, too.
    while said.contains("EXTEND_TIMEOUT_USEC") {
        said = told();
    }
    assert!(said.contains("READY=1"), "{said}");
    let (code, _dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    assert!(told().contains("STOPPING=1"));
    assert!(told().contains("EXTEND_TIMEOUT_USEC=60000000"));
}

#[test]
fn what_was_on_when_the_daemon_stopped_is_started_again_by_resume() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("ran");
    daemon.create("off", "tiny", &[]);
    daemon.cli(&["machine", "start", "ran", "off", "--wait"]).ok();
    daemon.cli(&["machine", "stop", "off", "--force"]).ok();
    let (code, dir) = daemon.terminate();
    assert_eq!(code, Some(0));
    let daemon = Daemon::start_in(dir, |_| {});
    let ran = daemon.machine("ran");
    assert_eq!((&ran["state"], &ran["wanted"]), (&"stopped".into(), &"running".into()));
    assert!(daemon.cli(&["machine", "list"]).ok().contains("serve --resume"));
    let (_, dir) = daemon.terminate();
    let daemon = Daemon::start_in(dir, |command| {
        command.arg("--resume");
    });
    assert_eq!(daemon.wait_for("ran", "running")["wanted"], "running");
    assert_eq!(daemon.machine("off")["state"], "stopped");
    // So is what a crash left.
    let daemon = Daemon::start_in(daemon.kill(), |command| {
        command.arg("--resume");
    });
    daemon.wait_for("ran", "running");
}
