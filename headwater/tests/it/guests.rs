//! End to end with real guests: two Debian machines on one image, through the real daemon and QEMU, under
//! whatever acceleration this host has.
//!
//! One test, because booting is what costs: both machines boot at once, one writes more than its RAM holds, the
//! other does not notice; a daemon that is killed, and a fresh start, on which one edits the image and the other boots what
//! became of it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::support::{self, Daemon};
use headwater_testkit::wait_until;

/// How many megabytes of random data are written: more than [`RAM_BYTES`]. An emulated processor makes few of them a second.
const FILE_MB: u64 = 40;

/// The write cache in RAM of machine `one`.
const RAM_BYTES: u64 = 24 << 20;

/// Takes its time and leaves its mark: who runs a command in the guest is to find it.
const USER_DATA: &str = "#!/bin/sh\nsleep 3\nhostname >/var/tmp/applied\n";

/// The Debian guest, built unless it is there.
pub fn guest() -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/build");
    let output = Command::new(&script).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.unwrap_or_else(|e| panic!("cannot run {}: {e}", script.display()));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{} failed; its messages are above", script.display());
    text.lines().last().expect("it prints the image's path").to_owned()
}

/// Runs a script in a guest and returns what it printed.
fn sh(daemon: &Daemon, machine: &str, script: &str) -> String {
    daemon.cli(&["machine", "exec", machine, "--", "sh", "-c", script]).ok().trim().to_owned()
}

fn pid(daemon: &Daemon, machine: &str) -> u64 {
    daemon.machine(machine)["pid"].as_u64().unwrap_or_else(|| panic!("{machine} is not on"))
}

fn hash_of(daemon: &Daemon, image: &str) -> serde_json::Value {
    let json = daemon.cli(&["--json", "image", "show", image]).ok();
    let image: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    image["versions"][0]["hash"].clone()
}

/// Prints, if the test fails, what had been done by which time.
struct Steps(Instant);

impl Steps {
    fn done(&self, what: &str) {
        println!("after {:.0} s: {what}", self.0.elapsed().as_secs_f64());
    }
}

#[test]
fn two_guests_share_an_image_and_nothing_else_overflow_and_survive_a_dead_daemon() {
    let steps = Steps(Instant::now());
    // A write that finds no room waits a second in the daemon, not half a minute.
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.args(["--pause", "1"]);
    });
    let user_data = daemon.path().join("user-data");
    std::fs::write(&user_data, USER_DATA).expect("the user data can be written");
    daemon.cli(&["image", "import", &guest(), "--name", "debian"]).ok();
    let hash = hash_of(&daemon, "debian");
    assert!(hash.is_string(), "the image has no hash: {hash}");
    let create =
        ["machine", "create", "one", "debian", "--ram", "24M", "--disk", "4G", "--host-name", "desk-one"];
    daemon.cli(&create).ok();
    let user_data = user_data.to_str().expect("UTF-8");
    daemon
        .cli(&[
            "machine",
            "create",
            "two",
            "debian",
            "--ram",
            "64M",
            "--disk",
            "4G",
            "--user-data",
            user_data,
            "--transport",
            "nbd",
        ])
        .ok();
    steps.done("the machines exist");
    daemon.cli(&["machine", "start", "one", "two", "--wait"]).ok();
    steps.done("both have booted");

    each_guest_is_itself(&daemon);
    output_that_is_cut_is_no_success(&daemon);
    a_command_ends_with_its_client(&daemon);
    a_command_reads_what_it_is_given(&daemon);
    steps.done("commands in guests");
    what_one_writes_overflows_and_is_its_own(&daemon);
    steps.done("a file that overflows");
    a_full_cache_makes_a_guest_wait_and_no_more(&daemon);
    steps.done("a full cache");
    what_a_guest_removed_is_given_back(&daemon);
    the_files_that_fill_a_cache_are_named(&daemon);
    steps.done("trim and contents");

    assert!(daemon.cli(&["image", "verify", "debian"]).ok().contains("intact"));
    assert_eq!(hash_of(&daemon, "debian"), hash, "the image has changed");

    // A daemon that is killed while machines run: they go on, and the next one has them.
    let pids = [pid(&daemon, "one"), pid(&daemon, "two")];
    let daemon = Daemon::start_in(daemon.kill(), |_| {});
    assert_eq!([pid(&daemon, "one"), pid(&daemon, "two")], pids);
    for machine in ["one", "two"] {
        assert_eq!(daemon.machine(machine)["state"], "running");
    }
    assert_eq!(sh(&daemon, "two", "cat /var/tmp/mark"), "two was here");
    daemon.cli(&["machine", "stop", "one", "two", "--force"]).ok();
    assert_eq!(std::fs::read_dir(daemon.path().join("cache")).expect("a directory").count(), 0);
    daemon
        .cli(&["cache", "contents", "two"])
        .fails(4, &["cannot scan the write cache of machine 'two'", "it is stopped"]);
    daemon.cli(&["image", "edit", "debian", "--machine", "two"]).ok();
    // A command for a guest that still boots waits for it.
    daemon.cli(&["machine", "start", "two"]).ok();
    assert_eq!(sh(&daemon, "two", "test -e /var/tmp/mark || echo pristine"), "pristine");
    assert_eq!(sh(&daemon, "two", "cat /var/tmp/applied"), "two");
    steps.done("a killed daemon, and a boot of the editing machine");
    what_one_edits_the_other_boots(&daemon, &steps);
}

/// A version of the guest while it runs, one of what was done to it in all, and the other machine on that.
fn what_one_edits_the_other_boots(daemon: &Daemon, steps: &Steps) {
    let seal = |what: &[&str]| -> serde_json::Value {
        serde_json::from_str(&daemon.cli(&[&["--json"], what].concat()).ok()).expect("JSON")
    };
    // Not written out by the guest yet: freezing its file systems does that.
    sh(daemon, "two", "echo early >/var/tmp/edited");
    wait_until("the guest is up", || daemon.machine("two")["state"] == "running");
    let live = beside_scans(daemon, || seal(&["machine", "seal", "two", "--note", "while it ran"]));
    println!("{}", live["pause"]);
    assert!(live["pause"]["guest_ms"].is_u64(), "its file systems were not frozen: {live}");
    assert_eq!((&live["version"]["number"], &live["parent"]), (&2.into(), &"debian@1".into()), "{live}");
    steps.done("a version of the running machine");
    sh(daemon, "two", "echo late >>/var/tmp/edited");
    a_file_is_copied_in_and_out(daemon);
    let key = sh(daemon, "two", "cat /etc/ssh/ssh_host_ed25519_key");
    daemon.cli(&["machine", "stop", "two"]).ok();
    assert_eq!(daemon.machine("two").get("reason"), None, "the guest did not switch itself off");
    let found = [
        "/etc/ssh/ssh_host_ed25519_key (its private",
        "/etc/machine-id (its",
        "/etc/hostname (its host name)",
    ];
    daemon.cli(&["image", "seal", "debian"]).fails(4, &[&found[..], &["--keep-identity"]].concat());
    daemon.cli(&["machine", "start", "two", "--wait"]).ok();
    steps.done("a second boot of the editing machine");
    let sealed = seal(&["image", "seal", "debian", "--note", "edited"]);
    steps.done("the sealed version");
    what_makes_a_machine_itself_is_in_no_sealed_version(daemon, &live, &sealed, &key);
    steps.done("the sealed version has no identity");
    let size = |name: &str| sealed["version"][name].as_u64().expect("a size");
    assert!(size("stored_bytes") < size("size_bytes") / 10, "it cost as much as an import: {sealed}");
    daemon.cli(&["image", "promote", "debian@2", "test"]).ok();
    daemon.cli(&["image", "promote", "debian@3", "production"]).ok();
    daemon.cli(&["machine", "start", "one"]).ok();
    let found = sh(daemon, "one", "cat /var/tmp/edited; hostname; test -e /var/tmp/random.bin || echo gone");
    assert_eq!(found, "early\nlate\ndesk-one\ngone");
    steps.done("a boot of the sealed version");
    daemon.cli(&["machine", "stop", "one", "--force"]).ok();
    // The version that was made while the guest ran holds what it had written by then, in a sound file system.
    let diff = daemon.cli(&["image", "diff", "debian@2", "debian@3"]).ok();
    let changed = |line: &str| line.starts_with("  M /var/tmp/edited ");
    assert!(diff.lines().any(changed), "{diff}");
    is_a_file_system_at_rest(daemon, "debian@2");
    assert!(daemon.cli(&["image", "verify", "debian:test"]).ok().contains("intact"));
}

/// Counts how often a text is in a sparse file. The holes, most of the file, are not read.
const COUNT: &str = "
import os, sys
file, text = os.open(sys.argv[1], os.O_RDONLY), sys.argv[2].encode()
found = end = 0
while True:
    try:
        start = os.lseek(file, end, os.SEEK_DATA)
    except OSError:
        break
    end = os.lseek(file, start, os.SEEK_HOLE)
    for at in range(start, end, 1 << 24):
        found += os.pread(file, (1 << 24) + len(text) - 1, at).count(text)
print(found)
";

/// A seal removes it; a version of a machine that runs has it, and says so.
fn what_makes_a_machine_itself_is_in_no_sealed_version(
    daemon: &Daemon,
    live: &serde_json::Value,
    sealed: &serde_json::Value,
    key: &str,
) {
    assert_eq!(
        (&live["version"]["keeps_identity"], &sealed["version"]["keeps_identity"]),
        (&true.into(), &false.into())
    );
    let list = |of: &serde_json::Value| {
        of.as_array().expect("a list").iter().map(|it| it.to_string()).collect::<String>()
    };
    assert!(list(&live["identity"]).contains("ssh_host_ed25519_key"), "{live}");
    for removed in [
        "/etc/ssh/ssh_host_ed25519_key",
        "/etc/machine-id",
        "/etc/hostname",
        "user-data",
        "generalise.d/10",
        "fstrim",
    ] {
        assert!(list(&sealed["removed"]).contains(removed), "{removed}: {sealed}");
    }
    assert_eq!(daemon.machine("two")["state"], "stopped");
    let versions = daemon.cli(&["image", "versions", "debian"]).ok();
    assert_eq!(versions.matches("not generalised").count(), 1, "{versions}");
    daemon.cli(&["image", "promote", "debian@2", "production"]).fails(4, &["not generalised", "--force"]);

    // The line of the key that has the secret, wherever it is on the disk.
    let secret = key.lines().nth(4).expect("an OpenSSH key");
    for (version, lines) in [("debian@2", 1), ("debian@3", 0)] {
        let raw = daemon.path().join("sealed.raw");
        daemon.cli(&["image", "export", version, raw.to_str().expect("a path in UTF-8")]).ok();
        let found = Command::new("python3").args(["-c", COUNT]).arg(&raw).arg(secret).output();
        let found = found.expect("python3 runs").stdout;
        let found: u64 = String::from_utf8_lossy(&found).trim().parse().expect("a count");
        assert_eq!(found.min(1), lines, "{version} has the private key {found} times");
        let at = format!("{}?offset={}", raw.display(), 1 << 20);
        let debugfs = |command: &str| {
            let output = Command::new("/sbin/debugfs").args(["-R", command, &at]).output();
            let output = output.unwrap_or_else(|e| panic!("cannot run debugfs (Debian: e2fsprogs): {e}"));
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let is_clean = lines == 0;
        assert_eq!(!debugfs("ls -p /etc/ssh").contains("ssh_host_"), is_clean, "{version}");
        assert_eq!(debugfs("cat /etc/hostname"), if is_clean { "localhost\n" } else { "two\n" }, "{version}");
        assert_eq!(debugfs("cat /etc/machine-id").is_empty(), is_clean, "{version}");
        assert_eq!(!debugfs("ls -p /var/lib/headwater").contains("user-data"), is_clean, "{version}");
        std::fs::remove_file(&raw).expect("it is there");
    }
}

/// More than one piece of each direction, with its mode.
fn a_file_is_copied_in_and_out(daemon: &Daemon) {
    let (there, back) = (daemon.path().join("there"), daemon.path().join("back"));
    let bytes = support::pseudo_random((9 << 20) + 7, 5);
    std::fs::write(&there, &bytes).expect("it can be written");
    std::fs::set_permissions(&there, std::os::unix::fs::PermissionsExt::from_mode(0o751))
        .expect("it can be changed");
    let path = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let said = daemon.cli(&["machine", "cp", &path(&there), "two:/var/tmp"]).ok();
    assert!(said.contains("two:/var/tmp/there"), "{said}");
    assert_eq!(
        sh(daemon, "two", "stat -c '%a %s' /var/tmp/there; ls /var/tmp | grep -c part; true"),
        "751 9437191\n0"
    );
    daemon.cli(&["machine", "cp", "two:/var/tmp/there", &path(&back)]).ok();
    assert!(std::fs::read(&back).expect("it is there") == bytes, "the file came back otherwise");
    daemon
        .cli(&["machine", "cp", "two:/var/tmp/none", &path(&back)])
        .fails(1, &["/var/tmp/none is not an existing file"]);
    daemon.cli(&["machine", "cp", &path(&there), "two:/none/at/all"]).fails(1, &["/none/at/all"]);
    daemon.cli(&["machine", "cp", &path(&there), &path(&back)]).fails(2, &["NAME:/PATH"]);
    // What the image itself adds to a seal.
    let hook = daemon.path().join("10-hook");
    std::fs::write(&hook, "#!/bin/sh\nrm -f /var/tmp/there\n").expect("it can be written");
    std::fs::set_permissions(&hook, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("it can be changed");
    sh(daemon, "two", "mkdir -p /etc/headwater/generalise.d");
    daemon.cli(&["machine", "cp", &path(&hook), "two:/etc/headwater/generalise.d/"]).ok();
}

/// A guest keeps the blocks of removed files until it is told to give them back; this one does so by a timer, too.
fn what_a_guest_removed_is_given_back(daemon: &Daemon) {
    let held = || {
        let disk = daemon.machine("two")["disk"].clone();
        let bytes = |name: &str| disk[name].as_u64().unwrap_or_else(|| panic!("no {name} in {disk}"));
        bytes("ram_used_bytes") + bytes("disk_used_bytes")
    };
    sh(daemon, "two", "head -c 20000000 /dev/urandom >/var/tmp/much; sync; rm /var/tmp/much; sync");
    let before = held();
    assert!(before > 20_000_000, "{before}");
    daemon.cli(&["machine", "trim", "two"]).ok();
    let after = held();
    assert!(after + 16_000_000 < before, "{before} -> {after}");
    assert_eq!(sh(daemon, "two", "systemctl is-active fstrim.timer"), "active");
}

/// Who fills a machine's write cache.
fn contents(daemon: &Daemon, machine: &str) -> serde_json::Value {
    serde_json::from_str(&daemon.cli(&["--json", "cache", "contents", machine]).ok()).expect("JSON")
}

/// The bytes of a file in a write cache.
fn held_by(contents: &serde_json::Value, path: &str) -> u64 {
    let files = contents["files"].as_array().expect("files");
    let file = files.iter().find(|file| file["path"] == path);
    file.map_or(0, |file| file["held"]["total_bytes"].as_u64().expect("bytes"))
}

/// The guest writes all the time, and what it committed is partly in its journal alone.
fn the_files_that_fill_a_cache_are_named(daemon: &Daemon) {
    // A file that is written out, whose directory and inode are in the journal: nothing waits for these to be in their places.
    let write = "mkdir -p /var/tmp/new && dd if=/dev/urandom of=/var/tmp/new/names.bin bs=1M count=40 conv=fsync 2>/dev/null";
    sh(daemon, "two", write);
    let found = contents(daemon, "two");
    let bytes = held_by(&found, "/var/tmp/new/names.bin");
    assert_eq!(bytes, 40 << 20, "{found:#}");
    let sum = |of: &serde_json::Value| -> u64 {
        of.as_array()
            .expect("a list")
            .iter()
            .map(|its| its["held"]["total_bytes"].as_u64().expect("bytes"))
            .sum()
    };
    assert_eq!(sum(&found["kinds"]), found["held"]["total_bytes"].as_u64().expect("bytes"), "{found:#}");
    let table = daemon.cli(&["cache", "contents", "two", "--by", "file"]).ok();
    assert!(
        table.contains("/var/tmp/new/names.bin") && table.contains("journal of the file system"),
        "{table}"
    );
    let table = daemon.cli(&["cache", "contents", "two"]).ok();
    assert!(table.contains("/var/tmp/new\n"), "{table}");
    // The blocks of a removed file are free, until they are trimmed.
    sh(daemon, "two", "rm /var/tmp/new/names.bin; sync");
    let removed = contents(daemon, "two");
    assert_eq!(held_by(&removed, "/var/tmp/new/names.bin"), 0, "{removed:#}");
    let free = |of: &serde_json::Value| -> u64 {
        let partitions = of["partitions"].as_array().expect("partitions");
        partitions.iter().map(|its| its["free_bytes"].as_u64().expect("bytes")).sum()
    };
    assert!(free(&removed) >= 40 << 20, "{removed:#}");
    let command = "headwater machine trim two";
    let hints = removed["hints"].as_array().expect("hints");
    assert!(hints.iter().any(|hint| hint["command"] == command), "{removed:#}");
    daemon.cli(&["machine", "trim", "two"]).ok();
    let trimmed = contents(daemon, "two");
    assert!(free(&trimmed) + (30 << 20) < free(&removed), "{trimmed:#}");
    assert!(daemon.history("two").contains("cache scanned"));
}

/// Scans the write cache again and again, until the work is done.
fn beside_scans<T>(daemon: &Daemon, work: impl FnOnce() -> T) -> T {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let scans = scope.spawn(|| {
            let mut refused = 0;
            while !is_done.load(Ordering::SeqCst) {
                let scan = daemon.cli(&["cache", "contents", "two"]);
                if scan.code != 0 {
                    scan.fails(4, &["cannot scan the write cache of machine 'two'"]);
                    refused += 1;
                }
            }
            refused
        });
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        is_done.store(true, Ordering::SeqCst);
        let refused = scans.join().expect("it does not panic");
        let done = done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        assert!(refused > 0, "no scan met the work");
        done
    })
}

/// One that was frozen has nothing left to do: one that was only written out would have to go through its journal first.
fn is_a_file_system_at_rest(daemon: &Daemon, version: &str) {
    let raw = daemon.path().join("version.raw");
    let raw = raw.to_str().expect("a path in UTF-8");
    daemon.cli(&["image", "export", version, raw]).ok();
    let at = format!("{raw}?offset={}", 1 << 20);
    let run = |program: &str, option: &str| {
        let output = Command::new(format!("/sbin/{program}")).args([option, &at]).output();
        let output = output.unwrap_or_else(|e| panic!("cannot run {program} (Debian: e2fsprogs): {e}"));
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&text).into_owned())
    };
    let (code, features) = run("dumpe2fs", "-h");
    assert!(code == Some(0) && features.contains("has_journal"), "{features}");
    assert!(!features.contains("needs_recovery"), "{features}");
    let (code, checked) = run("e2fsck", "-fn");
    assert_eq!(code, Some(0), "{checked}");
    std::fs::remove_file(raw).expect("it is there");
}

/// The disk limit falls below what is there: what is written then waits, with an alarm, until it is raised.
fn a_full_cache_makes_a_guest_wait_and_no_more(daemon: &Daemon) {
    daemon.cli(&["machine", "set", "one", "--ram", "16M", "--disk", "32M"]).ok();
    let script = "(head -c 32000000 /dev/urandom | tee /var/tmp/more.bin | b2sum >/var/tmp/more.sum; sync; \
                  touch /var/tmp/done) >/dev/null 2>&1 &";
    sh(daemon, "one", script);
    wait_until("the machine's writes wait", || {
        let machine = daemon.machine("one");
        machine["alarm"]["message"].as_str().is_some_and(|text| text.contains("is full and writes wait"))
    });
    let advice = daemon.machine("one")["alarm"]["advice"].to_string();
    assert!(advice.contains("headwater machine trim one"), "{advice}");
    assert_eq!(sh(daemon, "two", "cat /var/tmp/mark"), "two was here", "the other machine is disturbed");
    daemon.cli(&["machine", "set", "one", "--ram", "24M", "--disk", "4G"]).ok();
    wait_until("the alarm is over", || daemon.machine("one").get("alarm").is_none());
    let wait = "while ! test -e /var/tmp/done; do sleep 0.2; done; echo 3 >/proc/sys/vm/drop_caches; \
                cd /var/tmp; sed 's/-$/more.bin/' more.sum | b2sum --check; b2sum --check random.sum; \
                dmesg | grep -ci 'i/o error'";
    assert_eq!(sh_any(daemon, "one", wait), "more.bin: OK\nrandom.bin: OK\n0");
}

/// As [`sh`], whatever the exit code is: `grep -c` fails where it counts none.
fn sh_any(daemon: &Daemon, machine: &str, script: &str) -> String {
    sh(daemon, machine, &format!("{script}; true"))
}

/// Its host name, machine-id and host key are its own, and were there before the first command could run.
fn each_guest_is_itself(daemon: &Daemon) {
    for (machine, host_name) in [("one", "desk-one"), ("two", "two")] {
        let identity = daemon.machine(machine)["identity"].clone();
        let said = sh(daemon, machine, "hostname; cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub");
        let serial = daemon.machine(machine)["uuid"].as_str().expect("a UUID").replace('-', "");
        assert_eq!(sh(daemon, machine, "cat /sys/block/vda/serial"), serial[..20], "{machine}'s disk");
        let lines: Vec<&str> = said.lines().collect();
        let key = identity["ssh_host_key_public"].as_str().expect("a key");
        assert_eq!(lines.first(), Some(&host_name), "{said}");
        assert_eq!(lines.get(1).copied(), identity["machine_id"].as_str(), "{said}");
        assert!(lines.get(2).is_some_and(|line| line.starts_with(key)), "{said} does not hold {key}");
    }
    assert_eq!(sh(daemon, "two", "cat /var/tmp/applied"), "two", "it ran before the user data had");
    assert_eq!(sh(daemon, "one", "test -e /var/tmp/applied || echo none"), "none");
}

fn output_that_is_cut_is_no_success(daemon: &Daemon) {
    let ran = daemon.cli(&["machine", "exec", "two", "--", "head", "-c", "17000000", "/dev/zero"]);
    assert_eq!((ran.code, ran.out.len()), (1, 16 << 20), "{}", ran.err);
    assert!(ran.err.starts_with("headwater: the output was cut"), "{}", ran.err);
    let ran = daemon.cli(&["machine", "exec", "two", "--", "sh", "-c", "head -c 17000000 /dev/zero; exit 3"]);
    assert_eq!(ran.code, 3, "{}", ran.err);
}

fn a_command_ends_with_its_client(daemon: &Daemon) {
    let mut client = support::headwater()
        .arg("--data-dir")
        .arg(daemon.path())
        .args(["machine", "exec", "two", "--", "sleep", "4242"])
        .spawn()
        .expect("it starts");
    let running = || sh(daemon, "two", "pgrep -xf 'sleep 4242' || echo none") != "none";
    wait_until("the command runs", running);
    // Not SIGINT, which programs ignore that were started in the background.
    support::signal(client.id(), "TERM");
    assert_eq!(client.wait().expect("it ends").code(), None, "it ended otherwise than by the signal");
    wait_until("the command ends", || !running());
}

fn a_command_reads_what_it_is_given(daemon: &Daemon) {
    let file = daemon.path().join("input");
    let exec = |more: &[&str]| {
        let mut command = support::headwater();
        command.arg("--data-dir").arg(daemon.path()).args(["machine", "exec", "two"]).args(more);
        command.args(["--", "b2sum"]).stdin(std::fs::File::open(&file).expect("the input"));
        support::Ran::from(command.output().expect("it runs"))
    };
    let sum = || {
        let input = std::fs::File::open(&file).expect("the input");
        String::from_utf8(Command::new("b2sum").stdin(input).output().expect("it runs").stdout).expect("text")
    };
    std::fs::write(&file, "").expect("it can be written");
    let nothing = sum();
    let mut input = support::pseudo_random(1 << 20, 3);
    std::fs::write(&file, &input).expect("it can be written");
    assert_eq!(exec(&["-i"]).ok(), sum());
    assert_eq!(exec(&[]).ok(), nothing);
    input.push(0);
    std::fs::write(&file, &input).expect("it can be written");
    exec(&["--stdin"]).fails(2, &["longer than 1.0 MiB"]);
}

fn what_one_writes_overflows_and_is_its_own(daemon: &Daemon) {
    sh(daemon, "two", "echo two was here >/var/tmp/mark; sync");
    let before = daemon.machine("two")["disk"]["written_bytes"].as_u64().expect("counters");
    // The checksum is of the stream as it was made, not of the file, so that a wrong write shows too.
    let script = format!(
        "set -e; cd /var/tmp; head -c {FILE_MB}000000 /dev/urandom | tee random.bin | b2sum >random.sum; \
         sed -i 's/-$/random.bin/' random.sum; sync; echo 3 >/proc/sys/vm/drop_caches; b2sum --check random.sum"
    );
    assert_eq!(sh(daemon, "one", &script), "random.bin: OK");
    let disk = daemon.machine("one")["disk"].clone();
    let counter = |name: &str| disk[name].as_u64().unwrap_or_else(|| panic!("no {name} in {disk}"));
    assert!(counter("ram_used_bytes") <= RAM_BYTES, "{disk}");
    assert!(counter("spilled_bytes") >= FILE_MB * 1_000_000 - RAM_BYTES, "{disk}");
    // What is in RAM no more came from the overflow disk, not from the image.
    assert!(counter("written_bytes") >= FILE_MB * 1_000_000, "{disk}");

    let said = sh(daemon, "two", "cat /var/tmp/mark; test -e /var/tmp/random.bin || echo nothing else");
    assert_eq!(said, "two was here\nnothing else");
    let after = daemon.machine("two")["disk"]["written_bytes"].as_u64().expect("counters");
    assert!(after - before < FILE_MB * 100_000, "the other machine's disk was written: {before} -> {after}");
}
