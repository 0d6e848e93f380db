//! A machine whose write cache is full: it stands still with an alarm, loses nothing, and goes on when a limit is
//! raised.

use std::process::Command;
use std::time::Duration;

use crate::support::{self, Daemon, pseudo_random, short_dir};
use headwater_testkit::wait_until;

/// The machine's disk, and what is written to it at most.
const DISK_BYTES: usize = 96 << 20;

/// Not written there: what the guest writes is to need room of its own.
const SKIP_BYTES: usize = 1 << 20;

/// A daemon that lets writes wait a second, with the boot sector on a disk of [`DISK_BYTES`].
fn daemon() -> Daemon {
    let daemon = Daemon::start_in(short_dir(), |command| {
        command.args(["--pause", "1"]);
    });
    import_tiny(&daemon);
    daemon
}

/// Imports the boot sector on a disk of [`DISK_BYTES`].
fn import_tiny(daemon: &Daemon) {
    let path = daemon.path().join("tiny.raw");
    std::fs::write(&path, support::tiny_disk()).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(DISK_BYTES as u64).unwrap();
    daemon.cli(&["image", "import", path.to_str().unwrap()]).ok();
}

fn create_and_start(daemon: &Daemon, limits: &[&str]) {
    // Over NBD the disk can be filled beside its guest, and QEMU is told of a write that finds no room.
    let create = ["machine", "create", "lab", "tiny", "--memory", "64M", "--transport", "nbd"];
    daemon.cli(&[&create[..], limits].concat()).ok();
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
}

/// Writes to the machine's disk from [`SKIP_BYTES`] on, beside its guest. Returns whether that went well, and what
/// was said.
fn write(daemon: &Daemon, bytes: &[u8]) -> (bool, String) {
    let random = daemon.path().join("random.raw");
    std::fs::write(&random, bytes).unwrap();
    let socket = daemon.path().join("run/lab/disk.sock");
    let server = format!("file.driver=nbd,file.server.type=unix,file.server.path={}", socket.display());
    let output = Command::new("qemu-img")
        .args(["convert", "-n", "-t", "writeback", "-f", "raw", "--target-image-opts"])
        .arg(&random)
        .arg(format!("driver=raw,offset={SKIP_BYTES},{server}"))
        .output()
        .expect("qemu-img is needed: apt-get install qemu-utils");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Writes what no packing makes smaller to the machine's disk, beside its guest, until it is refused, and nothing is on its
/// way to the overflow that makes room after that.
fn fill(daemon: &Daemon) {
    let bytes = pseudo_random(DISK_BYTES - SKIP_BYTES, 7);
    let mut spilled = None;
    wait_until("no room comes back", || {
        let (is_written, said) = write(daemon, &bytes);
        assert!(!is_written && said.contains("No space left"), "{said}");
        std::thread::sleep(Duration::from_secs(1));
        let now = daemon.machine("lab")["disk"]["spilled_bytes"].as_u64();
        now.is_some() && spilled.replace(now) == Some(now)
    });
}

/// The guest writes once into a full cache. Returns what then was to be seen; `raise` makes room.
fn stands_still_until(daemon: &Daemon, raise: &[&str]) -> serde_json::Value {
    let before = daemon.machine("lab");
    fill(daemon);
    let (alarmed, after) = std::thread::scope(|scope| {
        // `W` is printed when the write is done: not before there is room.
        let guest = scope.spawn(|| daemon.console("lab", "w", Some("W")));
        let mut seen = serde_json::Value::Null;
        wait_until("the machine is paused and says so", || {
            seen = daemon.machine("lab");
            // For a moment a segment that was on its way to the disk may make room, and its alarm says only that it is paused.
            let says = |text: &str| text.contains("is paused") && text.contains("in use");
            seen["alarm"]["message"].as_str().is_some_and(says)
        });
        assert!(!guest.is_finished(), "the guest's write was done although there was no room");
        let list = daemon.cli(&["machine", "list"]).ok();
        assert!(list.contains("running (!)") && list.contains("ALARM: the machine is paused"), "{list}");
        assert!(daemon.cli(&["machine", "show", "lab"]).ok().contains("ALARM: the machine is paused"));
        let status = daemon.cli(&["status"]).ok();
        assert!(status.contains("ALARM: machine lab since 20"), "{status}");
        daemon.cli(&[&["machine", "set", "lab"], raise].concat()).ok();
        guest.join().unwrap();
        wait_until("the alarm is over", || {
            let machine = daemon.machine("lab");
            machine.get("alarm").is_none() && machine["state"] == "running"
        });
        (seen, daemon.machine("lab"))
    });
    assert_eq!(after["pid"], before["pid"], "the machine did not survive");
    // It is noted just after it is over.
    wait_until("the history has it", || daemon.history("lab").contains("alarm over"));
    let history = daemon.history("lab");
    for words in ["alarm", "writes are refused", "all is well again"] {
        assert!(history.contains(words), "{words:?} is not in {history}");
    }
    assert!(daemon.cli(&["status"]).ok().contains("alarms                none"));
    alarmed
}

#[test]
fn a_full_cache_in_ram_is_an_alarm_and_more_ram_ends_it() {
    let daemon = daemon();
    create_and_start(&daemon, &["--cache", "ram", "--ram", "16M"]);
    let alarmed = stands_still_until(&daemon, &["--ram", "256M"]);
    let alarm = &alarmed["alarm"];
    assert!(alarm["message"].as_str().unwrap().contains("of 16.0 MiB RAM in use"), "{alarm}");
    assert!(alarm["advice"].as_str().unwrap().contains("'headwater machine set lab --ram SIZE'"), "{alarm}");
    assert_eq!(
        (&alarm["subject"], alarmed["disk"]["spilled_bytes"].as_u64()),
        (&"machine lab".into(), Some(0))
    );

    // The new limit is for later starts, too, and survives the daemon.
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    let (_, dir) = daemon.terminate();
    let daemon = Daemon::start_in(dir, |_| {});
    assert_eq!(daemon.machine("lab")["cache"]["ram_bytes"], 256 << 20);
}

#[test]
fn a_full_overflow_is_an_alarm_and_more_disk_ends_it() {
    let daemon = daemon();
    create_and_start(&daemon, &["--cache", "ram+disk", "--ram", "16M", "--disk", "32M"]);
    let alarmed = stands_still_until(&daemon, &["--disk", "1G"]);
    let alarm = &alarmed["alarm"];
    assert!(alarm["message"].as_str().unwrap().contains("of 32.0 MiB disk in use"), "{alarm}");
    assert!(alarm["advice"].as_str().unwrap().contains("'headwater machine set lab --disk SIZE'"), "{alarm}");
}

/// Of the usual 30 s the first refused write would have waited all.
#[test]
fn writes_of_machines_wait_for_room_as_long_as_the_daemon_was_told() {
    let daemon = Daemon::start_in(short_dir(), |command| {
        command.args(["--pause", "0"]);
    });
    import_tiny(&daemon);
    create_and_start(&daemon, &["--cache", "ram", "--ram", "16M"]);
    fill(&daemon);
    let stats: serde_json::Value =
        serde_json::from_str(&daemon.cli(&["stats", "lab", "--json"]).ok()).unwrap();
    let value = |metric: &str| {
        let sample = stats["samples"].as_array().unwrap().iter().find(|s| s["metric"] == metric);
        sample.and_then(|s| s["value"].as_f64()).unwrap_or_else(|| panic!("no {metric}"))
    };
    assert!(value("headwater_refused_writes_total") >= 1.0);
    let paused_s = value("headwater_paused_seconds_total");
    assert!(paused_s < 15.0, "writes were paused for {paused_s} s in all");
}

#[test]
fn a_seal_into_a_full_store_loses_nothing() {
    let daemon = daemon();
    daemon.create("lab", "tiny", &["--transport", "nbd"]);
    daemon.cli(&["image", "edit", "tiny", "--machine", "lab"]).ok();
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let bytes = pseudo_random(16 << 20, 9);
    let (is_written, said) = write(&daemon, &bytes);
    assert!(is_written, "{said}");
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    let (_, dir) = daemon.terminate();

    // The version's object would have 16 MiB.
    let daemon = Daemon::start_on_full_disk_in(dir, 4 << 20);
    let objects = || std::fs::read_dir(daemon.path().join("store/objects")).unwrap().count();
    let before = objects();
    daemon.cli(&["image", "seal", "tiny"]).fails(5, &["cannot seal machine 'lab'", "cannot write"]);
    let shown = |daemon: &Daemon| -> serde_json::Value {
        serde_json::from_str(&daemon.cli(&["--json", "image", "show", "tiny"]).ok()).unwrap()
    };
    let image = shown(&daemon);
    assert_eq!(image["versions"].as_array().unwrap().len(), 1, "{image}");
    assert_eq!(image["edit"]["machine"], "lab", "{image}");
    assert_eq!(objects(), before);
    let (_, dir) = daemon.terminate();

    // With room it is sealed, with all that was written.
    let daemon = Daemon::start_in(dir, |_| {});
    daemon.cli(&["image", "seal", "tiny"]).ok();
    let out = daemon.path().join("out.raw");
    daemon.cli(&["image", "export", "tiny@2", out.to_str().unwrap()]).ok();
    let sealed = std::fs::read(&out).unwrap();
    assert!(sealed[..SKIP_BYTES].starts_with(&support::tiny_disk()[..512]));
    assert!(sealed[SKIP_BYTES..].starts_with(&bytes));
    assert_eq!(sealed.len(), DISK_BYTES);
}

#[test]
fn write_caches_of_all_machines_have_one_limit_and_are_written_in_one_way() {
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.args(["--cache-ram", "256M", "--buffering", "auto", "--pause", "1"]);
    });
    daemon.with_tiny_machine("lab");
    daemon.cli(&["machine", "start", "lab"]).ok();
    let large = ["machine", "create", "large", "tiny", "--memory", "64M", "--ram", "300M"];
    daemon.cli(&large).fails(2, &["larger than this host's 256.0 MiB for all write caches"]);
    let stats: serde_json::Value = serde_json::from_str(&daemon.cli(&["stats", "--json"]).ok()).unwrap();
    let samples = stats["samples"].as_array().unwrap();
    let limit = samples.iter().find(|s| s["metric"] == "headwater_host_ram_configured_bytes").unwrap();
    assert_eq!(limit["value"].as_f64(), Some(256.0 * 1048576.0), "{limit}");
    let info = samples.iter().find(|s| s["metric"] == "headwater_cache_info").unwrap();
    assert!(info["labels"]["buffering"].as_str().unwrap().starts_with("auto: "), "{info}");
}

#[test]
fn limits_that_cannot_be_are_refused_and_change_nothing() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.cli(&["machine", "create", "ram", "tiny", "--cache", "ram", "--memory", "64M"]).ok();
    daemon.cli(&["machine", "create", "disk", "tiny", "--cache", "disk", "--memory", "64M"]).ok();
    assert!(daemon.cli(&["machine", "show", "disk"]).ok().contains("disk, RAM 24.0 MiB, disk 10.0 GiB"));
    let before = daemon.cli(&["machine", "list", "--json"]).ok();
    let set = |name: &str, limits: &[&str]| daemon.cli(&[&["machine", "set", name], limits].concat());
    assert_eq!(set("lab", &[]).code, 2);
    set("lab", &["--ram", "1M"]).fails(2, &["cannot change machine 'lab'", "too small", "16.0 MiB or more"]);
    set("lab", &["--ram", "900T"]).fails(2, &["larger than this host's"]);
    set("lab", &["--disk", "0"]).fails(2, &["needs disk space"]);
    set("lab", &["--disk", "15M"]).fails(2, &["15.0 MiB of disk is too small; it takes 16.0 MiB or more"]);
    set("ram", &["--disk", "1G"]).fails(2, &["'ram' has no limit for disk"]);
    set("disk", &["--ram", "64M"]).fails(2, &["'disk' has no limit for memory"]);
    set("nobody", &["--ram", "64M"]).fails(3, &["no machine 'nobody'"]);
    assert_eq!(daemon.cli(&["machine", "list", "--json"]).ok(), before);
    let said = set("lab", &["--ram", "128M", "--disk", "2G"]).ok();
    assert_eq!(said, "lab has a write cache of ram+disk, RAM 128.0 MiB, disk 2.0 GiB\n");
    assert!(daemon.history("lab").contains("RAM 64 MiB -> 128 MiB"));
}

#[test]
fn limits_that_no_start_finds_room_for_are_warned_of_while_the_machine_is_off() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("small");
    let cli = |args: &[&str]| daemon.cli(args);
    let lacks = "could not be started now: the write cache may take 1.0 PiB on disk";
    let create = ["machine", "create", "lab", "tiny", "--memory", "64M", "--disk", "1024T"];
    let created = cli(&create);
    assert!(created.code == 0 && created.err.contains(&format!("machine 'lab' {lacks}")), "{created:?}");
    // It says what the start does.
    let start = || cli(&["machine", "start", "lab"]);
    start().fails(2, &["the write cache may take 1.0 PiB on disk"]);
    cli(&["machine", "set", "lab", "--disk", "64M"]).ok();
    let set = cli(&["--json", "machine", "set", "small", "--disk", "1024T"]);
    let machine: serde_json::Value = serde_json::from_str(&set.out).expect("JSON");
    assert!(set.code == 0 && machine["warning"].as_str().expect("a warning").contains(lacks), "{set:?}");
    let raised = cli(&["machine", "set", "small", "--disk", "64M"]);
    assert!(raised.code == 0 && !raised.err.contains("could not be started"), "{raised:?}");
    // The private disk of an edit is another one.
    let lab = |limit: &str| cli(&["machine", "set", "lab", "--disk", limit]);
    assert_eq!(lab("1024T").code, 0);
    let edited = cli(&["image", "edit", "tiny", "--machine", "lab"]);
    assert!(edited.code == 0 && edited.err.contains(&format!("machine 'lab' {lacks}")), "{edited:?}");
    cli(&["image", "discard", "tiny"]).ok();
    lab("64M").ok();
    // One that is on is refused it.
    start().ok();
    cli(&["machine", "set", "lab", "--disk", "1024T"]).fails(2, &["the write cache may take 1.0 PiB"]);
}
