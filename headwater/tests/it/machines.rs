//! Machines under the real QEMU, through the real daemon: a boot sector stands in for a guest.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Stdio};

use crate::support::{self, Daemon, headwater, is_alive, run, signal};
use headwater_testkit::wait_until;

#[test]
fn a_machine_boots_writes_and_is_pristine_after_a_reset() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    boots_writes_and_is_pristine_after_a_reset(&daemon, "vhost-user", "vhost-user-blk-pci");
    daemon.cli(&["machine", "remove", "lab", "--force"]).ok();
    daemon.create("lab", "tiny", &["--transport", "nbd"]);
    boots_writes_and_is_pristine_after_a_reset(&daemon, "nbd", "virtio-blk-pci");
    assert!(daemon.cli(&["image", "verify", "tiny"]).ok().contains("intact"));
}

fn boots_writes_and_is_pristine_after_a_reset(daemon: &Daemon, transport: &str, device: &str) {
    assert_eq!(daemon.machine("lab")["state"], "created");
    assert_eq!(daemon.machine("lab")["transport"], transport);
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let up = daemon.machine("lab");
    assert_eq!((&up["state"], &up["version"]), (&"running".into(), &"tiny@1".into()));
    assert!(up["boot_ms"].as_u64().unwrap() > 0 && up["disk"]["image_read_bytes"].as_u64().unwrap() > 0);
    let arguments = std::fs::read(format!("/proc/{}/cmdline", up["pid"])).unwrap();
    let arguments = String::from_utf8_lossy(&arguments).into_owned();
    // The daemon has such variables, and some are secrets.
    let told = std::fs::read(format!("/proc/{}/environ", up["pid"])).unwrap();
    let told = String::from_utf8_lossy(&told).into_owned();
    let is_kept_back = |name: &str| !told.split('\0').any(|variable| variable.starts_with(name));
    assert!(is_kept_back("HEADWATER_") && !is_kept_back("PATH="), "{told}");
    assert!(arguments.split(['\0', ',']).any(|part| part == device), "{arguments}");

    daemon.console("lab", "w", Some("W"));
    daemon.console("lab", "w", Some("W"));
    assert_eq!(daemon.machine("lab")["disk"]["writes"], 2);
    assert!(daemon.cli(&["machine", "console", "lab", "--log"]).ok().contains("0 writes"));

    let before = daemon.machine("lab")["pid"].clone();
    daemon.cli(&["machine", "reset", "lab", "--wait"]).ok();
    let after = daemon.machine("lab");
    assert_ne!(after["pid"], before);
    assert_eq!(after["disk"]["writes"], 0);
    // Had the write survived, this would be "2 writes".
    assert!(daemon.cli(&["machine", "console", "lab", "--log"]).ok().contains("0 writes"));
}

#[test]
fn a_second_console_is_refused_until_the_first_has_ended() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let path = "/api/v1/machines/lab/console/attach";
    let attach = || {
        let mut stream = std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: headwater-console\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        (stream, String::from_utf8_lossy(&status).into_owned())
    };
    let (first, status) = attach();
    assert_eq!(status, "HTTP/1.1 101");
    assert_eq!(attach().1, "HTTP/1.1 409");
    let console = run(headwater().arg("--data-dir").arg(daemon.path()).args(["machine", "console", "lab"]));
    console.fails(4, &["uid ", "is attached to it", "--follow"]);
    drop(first);
    daemon.console("lab", "w", Some("W"));
}

#[test]
fn several_machines_are_removed_as_far_as_they_can_be() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("a");
    daemon.create("c", "tiny", &[]);
    let ran = daemon.cli(&["machine", "remove", "none", "a", "missing", "c"]);
    assert_eq!(ran.code, 3, "{ran:?}");
    assert!(ran.err.contains("'none'") && ran.err.contains("'missing'"), "{ran:?}");
    assert!(ran.out.contains("removed a") && ran.out.contains("removed c"), "{ran:?}");
    for name in ["d", "e"] {
        daemon.create(name, "tiny", &[]);
    }
    let ran = daemon.cli(&["--json", "machine", "remove", "d", "none", "e"]);
    let told: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, told), (3, serde_json::json!({ "removed": ["d", "e"] })));
    assert!(!daemon.cli(&["machine", "list"]).ok().contains("tiny"));
}

#[test]
fn a_guest_that_restarts_gets_a_pristine_disk_and_one_that_powers_off_is_stopped() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let first = daemon.machine("lab")["pid"].clone();
    daemon.console("lab", "w", Some("W"));
    daemon.console("lab", "r", None);
    wait_until("it has started again", || {
        let now = daemon.machine("lab");
        now["state"] == "running" && now["pid"].is_u64() && now["pid"] != first
    });
    assert!(daemon.cli(&["machine", "console", "lab", "--log"]).ok().contains("0 writes"));

    daemon.console("lab", "p", None);
    let off = daemon.wait_for("lab", "stopped");
    assert_eq!((&off["wanted"], off.get("pid")), (&"stopped".into(), None));
    let events = daemon.cli(&["events"]).ok();
    assert!(events.contains("the guest restarted") && events.contains("the guest shut down"), "{events}");
}

#[test]
fn a_crash_of_qemu_is_noticed_and_said() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let pid = daemon.machine("lab")["pid"].as_u64().unwrap();
    signal(u32::try_from(pid).unwrap(), "KILL");
    let crashed = daemon.wait_for("lab", "crashed");
    assert!(crashed["reason"].as_str().unwrap().contains("signal: 9"), "{crashed}");
    assert!(daemon.cli(&["machine", "list"]).ok().contains("crashed"));
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
}

#[test]
fn what_is_in_use_stays() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon
        .cli(&["image", "remove", "tiny"])
        .fails(4, &["'tiny'", "machine 'lab' boots it", "remove the machine"]);
    daemon.cli(&["machine", "start", "lab"]).ok();
    daemon.cli(&["machine", "remove", "lab"]).fails(4, &["'lab'", "stop it first"]);
    daemon.cli(&["image", "remove", "tiny@1"]).fails(4, &["machine 'lab' runs it"]);
    let pid = daemon.machine("lab")["pid"].as_u64().unwrap();
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    assert!(!is_alive(pid));
    daemon.cli(&["machine", "remove", "lab"]).ok();
    assert!(!daemon.path().join("run/lab").exists());
    daemon.cli(&["image", "remove", "tiny"]).ok();
    assert!(daemon.cli(&["image", "list", "--json"]).ok().contains("\"images\": []"));
}

#[test]
fn a_running_machine_changes_its_version_at_its_next_start_only() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let disk = daemon.path().join("tiny.raw");
    let mut changed = support::tiny_disk();
    changed[512] = 5;
    std::fs::write(&disk, changed).unwrap();
    let said = daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    let moved = "machines that boot 'tiny' boot version 2 from their next boot on";
    assert!(said.contains("imported as tiny@2") && said.contains(moved), "{said}");
    assert!(said.contains("'headwater image promote tiny@1 production' holds them"), "{said}");
    // The same bytes again are no version that anything could change to.
    let said = daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    assert!(said.contains("unchanged") && !said.contains("next boot"), "{said}");
    assert_eq!(daemon.machine("lab")["version"], "tiny@1");
    daemon.cli(&["machine", "reset", "lab", "--wait"]).ok();
    assert_eq!(daemon.machine("lab")["version"], "tiny@2");
    assert!(daemon.cli(&["machine", "console", "lab", "--log"]).ok().contains("5 writes"));
    // The first version is free now; the second is not.
    daemon.cli(&["image", "remove", "tiny@1"]).ok();
    daemon.cli(&["image", "remove", "tiny@2"]).fails(4, &["runs it"]);
}

#[test]
fn qemu_that_is_not_installed_is_said_and_leaves_nothing() {
    let empty = support::short_dir();
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.env("PATH", empty.path());
    });
    daemon.with_tiny_machine("lab");
    daemon
        .cli(&["machine", "start", "lab"])
        .fails(1, &["cannot start machine 'lab'", "not installed", "install"]);
    let machine = daemon.machine("lab");
    assert_eq!((&machine["state"], &machine["wanted"]), (&"stopped".into(), &"stopped".into()));
    assert!(!daemon.path().join("run/lab/disk.sock").exists());
    assert!(daemon.cli(&["status"]).ok().contains("not installed"));
}

#[test]
fn memory_and_processors_are_changed_while_a_machine_is_off_and_its_disk_stays() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("other");
    daemon.create("lab", "tiny", &["--persistent"]);
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let set = |args: &[&str]| daemon.cli(&[&["machine", "set", "lab"], args].concat());
    set(&["--cpus", "2"]).fails(4, &["change memory or processors", "'lab' is running", "machine stop lab"]);
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    set(&["--memory", "900T"]).fails(2, &["cannot change machine 'lab'"]);
    assert_eq!(set(&["--memory", "96M", "--cpus", "2"]).ok(), "lab has memory of 96.0 MiB, 2 processors\n");
    let kept = daemon.machine("lab");
    assert_eq!((&kept["memory_bytes"], &kept["cpus"]), (&(96 << 20).into(), &2.into()));
    let history = daemon.history("lab");
    assert!(history.contains("memory of the guest 67109864 B -> 96 MiB, processors 1 -> 2"), "{history}");
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
}

#[test]
fn whoever_waits_is_told_what_for() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon
        .cli(&["machine", "start", "--wait=0", "lab"])
        .fails(1, &["has not booted after 0 s", "'headwater machine console --log lab' shows"]);
    daemon.wait_for("lab", "running");
    let begin = |args: &[&str]| {
        let mut command = headwater();
        command.arg("--data-dir").arg(daemon.path()).args(args);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts")
    };
    let told = |child: &mut Child| {
        let _watchdog = support::Watchdog::on(child.id());
        let (mut err, mut line) = (BufReader::new(child.stderr.take().expect("piped")), String::new());
        err.read_line(&mut line).expect("text");
        line
    };
    // The boot sector knows no ACPI.
    let mut stop = begin(&["machine", "stop", "lab"]);
    let line = told(&mut stop);
    assert!(line.contains("waiting for lab to shut down; 'headwater machine stop --force lab'"), "{line}");
    let mut set = begin(&["machine", "set", "lab", "--weight", "7"]);
    let line = told(&mut set);
    assert!(line.starts_with("waiting for lab: another change of this machine may be in progress"), "{line}");
    daemon.cli(&["machine", "stop", "--force", "lab"]).ok();
    assert!(stop.wait().expect("it ends").success());
    assert!(set.wait().expect("it ends").success());
    assert_eq!(daemon.machine("lab")["cache"]["weight"], 7);
}

#[test]
fn the_daemon_stops_its_machines_when_it_ends() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let pid = daemon.machine("lab")["pid"].as_u64().unwrap();
    let daemon_pid = daemon.pid();
    // The boot sector knows no ACPI; being told twice, the daemon does not wait for it.
    let told_twice = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(1));
        signal(daemon_pid, "TERM");
    });
    let (code, dir) = daemon.terminate();
    told_twice.join().unwrap();
    assert_eq!(code, Some(0));
    assert!(!is_alive(pid));
    assert!(!dir.path().join("api.sock").exists());
    let daemon = Daemon::start_in(dir, |_| {});
    assert_eq!(daemon.machine("lab")["state"], "stopped");
}

#[test]
fn a_reader_who_has_seen_enough_leaves_nothing_undone_and_hides_no_failure() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("one");
    daemon.create("two", "tiny", &[]);
    let unread = |args: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = headwater();
        command.arg("--data-dir").arg(daemon.path()).args(args).stdout(writer);
        run(&mut command)
    };
    unread(&["machine", "remove", "one", "nobody", "two"]).fails(3, &["nobody"]);
    daemon.cli(&["machine", "show", "one"]).fails(3, &["one"]);
    daemon.cli(&["machine", "show", "two"]).fails(3, &["two"]);
    // What has nothing more to do ends well.
    assert_eq!(unread(&["image", "list"]).code, 0);
}

#[test]
fn a_reset_of_a_machine_that_is_off_ends_at_once_and_leaves_it_off() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    for _ in 0..2 {
        let said = daemon.cli(&["machine", "reset", "lab", "--wait"]).ok();
        assert!(said.contains("a reset does not start it"), "{said}");
        daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
        daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    }
    assert_eq!(daemon.machine("lab")["state"], "stopped");
}

#[test]
fn lists_count_as_people_do() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("pc-10");
    for name in ["pc-2", "pc-1"] {
        daemon.create(name, "tiny", &[]);
    }
    let list = daemon.cli(&["machine", "list"]).ok();
    let names: Vec<_> = list.lines().filter_map(|line| line.split_whitespace().next()).skip(1).collect();
    assert_eq!(names, ["pc-1", "pc-2", "pc-10"], "{list}");
}

#[test]
fn host_names_and_user_data_are_taken_where_cloud_init_takes_them() {
    use std::io::Write;
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.create("one", "tiny", &["--host-name", "LAB-1.Example.com"]);
    assert_eq!(daemon.machine("one")["identity"]["host_name"], "LAB-1.Example.com");
    daemon.cli(&["machine", "start", "one"]).ok();
    daemon
        .cli(&["machine", "create", "two", "tiny", "--host-name", "a..b"])
        .fails(2, &["'a..b' is not a host name"]);
    let packed = daemon.path().join("user-data.gz");
    let pack = |text: &[u8]| {
        let mut gzip = std::process::Command::new("gzip")
            .arg("-c")
            .stdin(std::process::Stdio::piped())
            .stdout(std::fs::File::create(&packed).unwrap())
            .spawn()
            .expect("gzip runs");
        gzip.stdin.take().unwrap().write_all(text).unwrap();
        assert!(gzip.wait().unwrap().success());
    };
    let path = packed.to_str().unwrap();
    pack(b"#cloud-config\npackages: [nginx]\n");
    daemon.create("two", "tiny", &["--user-data", path]);
    assert_eq!(daemon.machine("two")["identity"]["user_data"], "#cloud-config\npackages: [nginx]\n");
    // A small file may unpack to anything.
    pack(&vec![b'#'; 5 << 20]);
    let create = ["machine", "create", "three", "tiny", "--user-data", path];
    daemon.cli(&create).fails(2, &["longer than 4.0 MiB after it is unpacked"]);
    std::fs::write(&packed, [0x1f, 0x8b, 8, 0]).unwrap();
    daemon.cli(&create).fails(2, &["cannot be unpacked"]);
}

#[test]
fn machines_that_are_off_get_other_host_keys() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("one");
    daemon.create("two", "tiny", &[]);
    daemon.create("kept", "tiny", &["--persistent"]);
    let key =
        |name: &str| daemon.machine(name)["identity"]["ssh_host_key_public"].as_str().unwrap().to_owned();
    let before = ["one", "two"].map(key);
    let printed = daemon.cli(&["machine", "rotate", "one", "two"]).ok();
    let after = ["one", "two"].map(key);
    assert_eq!(printed, format!("one {}\ntwo {}\n", after[0], after[1]));
    assert!(before.iter().all(|key| !after.contains(key)) && after[0] != after[1], "{before:?}, {after:?}");
    daemon.cli(&["machine", "start", "one", "kept", "--wait"]).ok();
    daemon.cli(&["machine", "rotate", "one"]).fails(4, &["machine 'one' is running", "machine stop one"]);
    // The others of a command get theirs all the same.
    daemon.cli(&["machine", "stop", "kept", "--force"]).ok();
    let some = daemon.cli(&["machine", "rotate", "kept", "two"]);
    assert!(some.code == 4 && some.err.contains("its persistent disk contains the key"), "{some:?}");
    assert_ne!(key("two"), after[1]);
    daemon.cli(&["machine", "rotate", "nobody"]).fails(3, &["nobody"]);
    let history = daemon.history("two");
    assert!(history.contains("rotated") && history.contains("SHA256:"), "{history}");
}
