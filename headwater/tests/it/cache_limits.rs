//! `headwater cache`: limits of an export that runs are seen and changed, by its user only, and count at once.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::support::{Ran, headwater, pseudo_random, run, short_dir, signal};
use headwater_block::{IoError, IoErrorKind, blocking};
use headwater_nbd::Client;
use headwater_testkit::wait_until;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// An export of an empty disk of 1 GiB whose writes wait for longer than a test takes, unless it is told otherwise.
struct Export {
    dir: tempfile::TempDir,
    child: Child,
}

impl Export {
    fn start(args: &[&str]) -> Self {
        let dir = short_dir();
        let log = std::fs::File::create(dir.path().join("log")).expect("a log");
        let mut command = headwater();
        command.env("HEADWATER_RUN_DIR", dir.path().join("run")).stdin(Stdio::null()).stdout(Stdio::null());
        command.args(["export", "null:1G"]);
        if !args.contains(&"--cache-dir") {
            command.arg("--cache-dir").arg(dir.path());
        }
        if !args.contains(&"--pause") {
            command.args(["--pause", "3600"]);
        }
        command.arg(format!("--nbd=unix:{}", dir.path().join("nbd").display())).args(args).stderr(log);
        let export = Self { child: command.spawn().expect("it starts"), dir };
        wait_until("it can be found", || export.socket().exists());
        export
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join(format!("run/caches/{}.sock", self.child.id()))
    }

    fn cli(&self, args: &[&str]) -> Ran {
        run(headwater().env("HEADWATER_RUN_DIR", self.dir.path().join("run")).args(args))
    }

    fn set(&self, args: &[&str]) -> Ran {
        self.cli(&[&["cache", "set", &self.child.id().to_string()], args].concat())
    }

    /// What there is of the volume with this number.
    fn cache(&self, number: usize) -> Value {
        // An export that is slow to answer is left out.
        let mut list = Value::Null;
        wait_until("the export is listed", || {
            list = serde_json::from_str(&self.cli(&["--json", "cache", "list"]).ok()).expect("it is JSON");
            list[0].is_object()
        });
        assert_eq!((&list[0]["pid"], &list[0]["source"]), (&self.child.id().into(), &"null:1G".into()));
        list[0]["caches"][number].clone()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).expect("a log")
    }

    fn client(&self, export: &str) -> Arc<Client> {
        let uri = format!("nbd+unix:///{export}?socket={}", self.dir.path().join("nbd").display());
        Client::open(&uri).expect("it connects")
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // Nobody waits for what waits for room.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes what does not pack, MiB by MiB, on a thread of its own.
fn write(client: &Arc<Client>, from_mib: u64, to_mib: u64) -> JoinHandle<Result<(), IoError>> {
    let client = Arc::clone(client);
    std::thread::spawn(move || {
        (from_mib..to_mib).try_for_each(|at| blocking::write(&*client, at * MIB, &data(at)))
    })
}

fn data(at_mib: u64) -> Vec<u8> {
    pseudo_random(MIB as usize, at_mib + 1)
}

fn reads(client: &Client, to_mib: u64) {
    let mut bytes = vec![0; MIB as usize];
    for at in 0..to_mib {
        blocking::read(client, at * MIB, &mut bytes).expect("it reads");
        assert!(bytes == data(at), "other bytes at {at} MiB");
    }
}

#[test]
fn an_export_that_is_full_goes_on_with_more_disk_and_a_lower_limit_counts_at_once() {
    let export = Export::start(&["--cache", "disk", "--disk", "32M"]);
    let client = export.client("");
    assert_eq!(
        (&export.cache(0)["mode"], &export.cache(0)["disk_limit_bytes"]),
        (&"disk".into(), &(32 * MIB).into())
    );
    let writer = write(&client, 0, 100);
    wait_until("writes wait", || export.cache(0)["state"] == "waiting");
    let advice = format!("'headwater cache set {} --disk SIZE'", export.child.id());
    wait_until("the log says what to do", || export.log().contains(&advice));
    export.set(&["--ram", "1G"]).fails(2, &["--ram was given", "'disk' uses a fixed amount of memory"]);
    export.set(&["--disk", "0"]).fails(2, &["needs disk space"]);
    export.set(&["--disk", "15M"]).fails(2, &["at least 16.0 MiB of disk, but its limit would be 15.0 MiB"]);
    export.set(&["--disk", "1000000000G"]).fails(2, &["the write cache may take", "lower limit"]);
    assert!(!writer.is_finished());

    let told = export.set(&["--disk", "256M"]).ok();
    assert!(told.contains("256.0 MiB"), "{told}");
    writer.join().expect("no panic").expect("all is written");
    reads(&client, 100);
    assert_eq!(export.cache(0)["state"], "ok");

    // By what is served; a limit below what is in use throws nothing away, and lets nothing in.
    export.cli(&["cache", "set", "null:1G", "--disk", "64M"]).ok();
    let cache = export.cache(0);
    assert_eq!(cache["disk_limit_bytes"], 64 * MIB);
    assert!(cache["disk_used_bytes"].as_u64() > Some(64 * MIB), "{cache}");
    let writer = write(&client, 100, 140);
    wait_until("writes wait", || export.cache(0)["state"] == "waiting");
    export.set(&["--disk", "512M"]).ok();
    writer.join().expect("no panic").expect("all is written");
    reads(&client, 140);
}

/// A device of this kernel over a file, until this is dropped.
struct Loop(String);

impl Loop {
    fn over(file: &Path) -> Self {
        let device = run(Command::new("/sbin/losetup").args(["--find", "--show"]).arg(file)).ok();
        Self(device.trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("/sbin/losetup").args(["--detach", &self.0]).status();
    }
}

/// Only root may make its loop device.
#[test]
fn an_overflow_on_a_device_holds_what_is_written_and_gives_back_what_is_discarded() {
    const WRITTEN_MIB: u64 = 150;
    let dir = short_dir();
    let file = dir.path().join("device");
    let device = std::fs::File::create(&file).expect("made");
    device.set_len(256 * MIB).expect("it is sparse");
    let held = || device.metadata().expect("it is open").blocks() * 512;
    let name = Loop::over(&file);
    let export = Export::start(&["--cache", "disk", "--disk", "200M", "--cache-dir", &name.0]);
    let client = export.client("");
    write(&client, 0, WRITTEN_MIB).join().expect("no panic").expect("all is written");
    reads(&client, WRITTEN_MIB);
    // All but what is in RAM.
    wait_until("it is on the device", || held() > (WRITTEN_MIB - 32) * MIB);
    assert!(held() <= 200 * MIB + MIB, "{} bytes on the device", held());
    for at in 1..WRITTEN_MIB {
        blocking::discard(&*client, at * MIB, MIB).expect("it is discarded");
    }
    // 16 places stay, and what the first MiB is in.
    wait_until("it is given back", || held() <= 40 * MIB);
    reads(&client, 1);
    let mut rest = vec![1; MIB as usize];
    blocking::read(&*client, MIB, &mut rest).expect("it reads");
    assert!(rest.iter().all(|byte| *byte == 0));
}

#[test]
fn each_volume_of_a_process_has_limits_of_its_own() {
    let export =
        Export::start(&["--cache", "ram", "--ram", "16M", "--nbd-export", "one", "--nbd-export", "two"]);
    let limits =
        || [0, 1].map(|number| export.cache(number)["ram_limit_bytes"].as_u64().expect("a number") / MIB);
    for (code, args, words) in [
        (2, &["--disk", "1G"][..], "--disk was given, but the cache mode 'ram' has no disk"),
        (
            2,
            &["--ram", "15M"][..],
            "a write cache needs at least 16.0 MiB of RAM, but its limit would be 15.0 MiB",
        ),
        (2, &["--ram", "1000000G"][..], "give a smaller --ram"),
        (3, &["--ram", "32M", "--volume", "three"][..], "there is no volume 'three'"),
        (2, &["--ram", "32M", "--weight", "0"][..], "0 is not a valid weight; use 1 to 10000"),
        (2, &["--weight", "10001"][..], "10001 is not a valid weight"),
        (2, &[][..], "--ram"),
    ] {
        let ran = export.set(args);
        assert!(ran.code == code && ran.err.contains(words), "{args:?}: {ran:?}");
    }
    export.cli(&["cache", "set", "other", "--ram", "32M"]).fails(3, &["'other'", "headwater cache list"]);
    assert_eq!(limits(), [16, 16]);
    let weights = || [0, 1].map(|number| export.cache(number)["weight"].as_u64().expect("a number"));
    assert_eq!(weights(), [100, 100]);
    let told = export.set(&["--weight", "300", "--volume", "two"]).ok();
    assert_eq!((weights(), limits()), ([100, 300], [16, 16]));
    let row = told.lines().find(|line| line.contains("nbd:two")).expect("a row of each volume");
    assert!(row.split_whitespace().any(|word| word == "300"), "{told}");
    let two = export.client("two");
    let writer = write(&two, 0, 40);
    wait_until("writes wait", || export.cache(1)["state"] == "waiting");
    let advice = format!("'headwater cache set {} --volume nbd:two --ram SIZE'", export.child.id());
    wait_until("the log says what to do", || export.log().contains(&advice));
    export.set(&["--ram", "32M", "--volume", "one"]).ok();
    assert_eq!((limits(), writer.is_finished()), ([32, 16], false));
    export.set(&["--ram", "128M", "--volume", "nbd:two"]).ok();
    writer.join().expect("no panic").expect("all is written");
    assert_eq!(limits(), [32, 128]);
    export.set(&["--ram", "64M"]).ok();
    assert_eq!(limits(), [64, 64]);
    reads(&two, 40);
}

#[test]
fn the_volumes_of_a_process_have_one_limit_together() {
    let limit = ["--cache", "ram", "--cache-ram", "64M", "--nbd-export", "one", "--nbd-export", "two"];
    let refused = |args: &[&str], words: &[&str]| {
        let plain = ["export", "null:1G", "--nbd", "unix:/nowhere/s", "--cache", "ram"];
        run(headwater().args(plain).args(args)).fails(2, words);
    };
    refused(
        &["--cache-ram", "32M"],
        &["64.0 MiB of memory (--ram) is larger than the limit of 32.0 MiB", "give a smaller --ram"],
    );
    let many: Vec<_> = ["a", "b", "c"].iter().flat_map(|name| ["--nbd-export", name]).collect();
    refused(
        &[&["--cache-ram", "16M", "--ram", "16M"][..], &many].concat(),
        &["3 write caches need at least 24.0 MiB"],
    );
    refused(&["--cache-ram", "999999G"], &["this host has", "(give a smaller --cache-ram)"]);
    let export = Export::start(&[&limit[..], &["--ram", "60M"]].concat());
    // Both together may be promised more.
    export.set(&["--ram", "64M"]).ok();
    export
        .set(&["--ram", "65M", "--volume", "two"])
        .fails(2, &["larger than the limit of 64.0 MiB for all together"]);
    let (one, two) = (export.client("one"), export.client("two"));
    let writers = [write(&one, 0, 80), write(&two, 0, 80)];
    wait_until("writes wait", || [0, 1].iter().all(|number| export.cache(*number)["state"] == "waiting"));
    wait_until("the log says what would help", || {
        export.log().contains("but first that of all write caches (--cache-ram)")
    });
    // Four segments of a volume always go.
    let used = [0, 1].map(|number| export.cache(number)["ram_used_bytes"].as_u64().expect("a number"));
    assert!(used.iter().sum::<u64>() <= 80 * MIB, "{used:?}");
    assert!(writers.iter().all(|writer| !writer.is_finished()));
}

/// Of the usual 30 s the first refused write would have waited all.
#[test]
fn writes_wait_for_room_as_long_as_the_export_was_told() {
    let dir = short_dir();
    let file = dir.path().join("stats.json");
    let stats = ["--stats", file.to_str().expect("text")];
    let mut export =
        Export::start(&[&["--cache", "ram", "--ram", "16M", "--pause", "0"][..], &stats].concat());
    let client = export.client("");
    let refused = write(&client, 0, 64).join().expect("no panic").expect_err("there is room for 64 MiB");
    assert_eq!(refused.kind(), IoErrorKind::NoSpace, "{refused}");
    drop(client);
    signal(export.child.id(), "TERM");
    assert!(export.child.wait().expect("it ends").success());
    let text = std::fs::read_to_string(&file).expect("the counters");
    let cache = &serde_json::from_str::<Value>(&text).expect("JSON")["cache"];
    assert!(cache["refused_writes"].as_u64() >= Some(1), "{cache}");
    assert!(cache["paused_ns"].as_u64().expect("a number") < 15_000_000_000, "{cache}");
}

#[test]
fn how_the_overflow_is_written_is_measured_where_that_is_asked_for() {
    let dir = short_dir();
    let file = dir.path().join("stats.json");
    let stats = ["--stats", file.to_str().expect("text"), "--log", "info"];
    let export =
        Export::start(&[&["--cache", "disk", "--disk", "64M", "--buffering", "auto"][..], &stats].concat());
    // Of a volume that is open, from the time on when its clients can come.
    let text = std::fs::read_to_string(&file).expect("the counters");
    let cache = &serde_json::from_str::<Value>(&text).expect("JSON")["cache"];
    let buffering = cache["buffering"].as_str().expect("text");
    assert!(buffering.starts_with("auto: "), "{buffering}");
    wait_until("the log says the same", || export.log().contains(buffering));
    let key_memory = cache["key_memory"].as_str().expect("text");
    assert!(["secret", "locked", "unlocked"].contains(&key_memory), "{key_memory}");
}

#[test]
fn a_socket_is_its_users_only_and_goes_with_its_process() {
    let mut export = Export::start(&["--cache", "ram", "--ram", "16M"]);
    let (socket, dir) = (export.socket(), export.dir.path().to_owned());
    let mode = |path: &Path| std::fs::metadata(path).expect("it is there").mode() & 0o777;
    assert_eq!((mode(&socket), mode(&dir.join("run/caches"))), (0o600, 0o700));
    if rustix::process::geteuid().is_root() {
        // Where somebody opened the way to it, another user is refused all the same.
        for (path, mode) in [(dir.clone(), 0o755), (dir.join("run/caches"), 0o755), (socket.clone(), 0o666)] {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("changed");
        }
        let script =
            "$s = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die $!; print $s qq(\"list\"\\n); print <$s>";
        let ask = |who: &[&str]| {
            run(Command::new(who[0]).args(&who[1..]).args(["-MIO::Socket::UNIX", "-e", script]).arg(&socket))
                .ok()
        };
        let other = ask(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "perl"]);
        assert!(other.contains("may not see or change") && !other.contains("null:1G"), "{other}");
        assert!(ask(&["perl"]).contains("null:1G"));
        // And nobody trusts a directory that others may write to.
        export.cli(&["cache", "list"]).fails(1, &["mode 0700"]);
        std::fs::set_permissions(dir.join("run/caches"), PermissionsExt::from_mode(0o700)).expect("changed");
    }
    signal(export.child.id(), "KILL");
    export.child.wait().expect("it ends");
    assert!(socket.exists());
    assert_eq!(export.cli(&["--json", "cache", "list"]).ok().trim(), "[]");
    assert!(!socket.exists(), "what a dead process left is swept");
    let mut ended = Export::start(&["--cache", "ram", "--ram", "16M"]);
    signal(ended.child.id(), "TERM");
    assert!(ended.child.wait().expect("it ends").success());
    assert!(!ended.socket().exists());
}

#[test]
fn root_sees_and_changes_what_any_user_serves_and_says_whose_it_is() {
    let own = rustix::process::geteuid().as_raw();
    // A user sees its own alone, and root that of others, too.
    let user = if own == 0 { 65534 } else { own };
    let dir = short_dir();
    std::os::unix::fs::chown(dir.path(), Some(user), None).expect("changed");
    // The program may lie where that user cannot go, so it is passed on open.
    let program = std::fs::File::open(env!("CARGO_BIN_EXE_headwater")).expect("the program");
    let mut command = Command::new("sh");
    command.args(["-c", "exec /proc/self/fd/0 \"$@\"", "sh"]).stdin(program).stdout(Stdio::null());
    command.args(["export", "null:1G", "--cache", "ram", "--ram", "16M", "--cache-dir"]).arg(dir.path());
    command.arg(format!("--nbd=unix:{}", dir.path().join("nbd").display()));
    command.uid(user).current_dir("/").env("HEADWATER_RUN_DIR", dir.path().join("run"));
    let export = Export { child: command.spawn().expect("it starts"), dir };
    wait_until("it can be found", || export.socket().exists());
    let list = || export.cli(&["--json", "cache", "list"]).ok();
    let list: Value = serde_json::from_str(&list()).expect("it is JSON");
    assert_eq!((&list[0]["uid"], &list[0]["pid"]), (&user.into(), &export.child.id().into()), "{list}");
    let told = export.cli(&["cache", "set", "null:1G", "--ram", "32M"]).ok();
    assert!(told.contains(&user.to_string()) && told.contains("32.0 MiB"), "{told}");
    assert_eq!(export.cache(0)["ram_limit_bytes"], 32 * MIB);
    if own == 0 {
        // What root's own process listens on is asked nothing through another user's directory.
        let root = Export::start(&["--cache", "ram", "--ram", "16M"]);
        let link = export.dir.path().join("run/caches/1.sock");
        std::os::unix::fs::symlink(root.socket(), &link).expect("made");
        let listed = export.cli(&["cache", "list"]);
        assert!(listed.err.contains("but its directory is of user 65534"), "{listed:?}");
        assert_eq!(listed.out.lines().count(), 2, "{listed:?}");
    }
}

#[test]
fn an_export_without_a_socket_serves_all_the_same() {
    let dir = short_dir();
    let file = dir.path().join("file");
    std::fs::write(&file, "").expect("written");
    let log = dir.path().join("log");
    let mut command = headwater();
    command.env("HEADWATER_RUN_DIR", &file).stdin(Stdio::null()).stdout(Stdio::null());
    command.args(["export", "null:16M", "--cache", "ram", "--nbd"]);
    command.arg(format!("unix:{}", dir.path().join("nbd").display()));
    let mut child = command.stderr(std::fs::File::create(&log).expect("a log")).spawn().expect("it starts");
    let is_told =
        || std::fs::read_to_string(&log).expect("a log").contains("'headwater cache' will not find");
    wait_until("it says so", is_told);
    let uri = format!("nbd+unix:///?socket={}", dir.path().join("nbd").display());
    run(Command::new("nbdinfo").arg(&uri)).ok();
    signal(child.id(), "TERM");
    assert!(child.wait().expect("it ends").success());
}
