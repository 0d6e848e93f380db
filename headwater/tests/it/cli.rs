//! The command line: usage, exit codes, output for people and for programs.

use crate::support::{self, Daemon, headwater, run, short_dir, signal, tiny_disk};
use std::process::{Command, Stdio};

#[test]
fn usage_errors_are_2_and_help_is_0() {
    for args in [
        &["frobnicate"][..],
        &["machine"],
        &["image", "import"],
        &["run", "x", "-n", "0"],
        &["run", "x", "--ram", "64X"],
        &["run", "x", "--cache", "tape"],
        &["run", "x", "--transport", "scsi"],
        &["machine", "create", "a", "b", "--cpus", "0"],
        &["serve", "--listen", "nonsense"],
        &["serve", "--cache-ram", "1"],
        &["export", "null:1M", "--vhost-user", "/nowhere/s", "--serial", "more-than-twenty-bytes"],
        &["export", "null:1M", "--vhost-user", "/nowhere/s", "--serial", "two words"],
        &["export", "null:1M", "--nbd", "unix:/nowhere/s", "--serial", "of-no-disk"],
        &[],
    ] {
        assert_eq!(run(headwater().args(args)).code, 2, "{args:?}");
    }
    let dir = short_dir();
    let mut large = headwater();
    large.args(["serve", "--cache-ram", "999999G", "--data-dir"]).arg(dir.path());
    run(&mut large).fails(2, &["this host has", "(give a smaller --cache-ram)"]);
    let says = |command: &mut Command, words: &[&str]| {
        let ran = run(command);
        assert!(ran.code == 2 && words.iter().all(|word| ran.err.contains(word)), "{words:?}: {ran:?}");
    };
    says(headwater().args(["machine", "create", "a", "b", "--cpus", "256"]), &["1..=255"]);
    for listen in ["127.0.0.1", "localhost:8090"] {
        for command in
            [&["serve", "--listen"][..], &["serve", "--store-listen"], &["store", "serve", "x", "--listen"]]
        {
            says(headwater().args(command).arg(listen), &[listen, "IP:PORT"]);
        }
    }
    let ran = run(headwater().args(["--json", "machine", "create", "--cpus", "0"]));
    let problem: serde_json::Value = serde_json::from_str(&ran.err).unwrap();
    assert_eq!((ran.code, &problem["kind"]), (2, &"invalid".into()));
    assert!(!ran.err.contains("Usage") && !ran.err.contains("\\n"), "{ran:?}");
    assert!(run(headwater().arg("--help")).ok().contains("Exit codes"));
    assert!(run(headwater().arg("--version")).ok().contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn without_a_daemon_every_client_says_so() {
    let dir = short_dir();
    for args in [&["status"][..], &["image", "list"], &["machine", "start", "a"], &["events"]] {
        let ran = run(headwater().arg("--data-dir").arg(dir.path()).args(args));
        ran.fails(7, &["cannot reach the daemon", "api.sock", "headwater serve"]);
    }
    let json = run(headwater().arg("--data-dir").arg(dir.path()).args(["status", "--json"]));
    let problem: serde_json::Value = serde_json::from_str(&json.err).unwrap();
    assert_eq!((json.code, &problem["kind"]), (7, &"unavailable".into()));
}

#[test]
fn an_error_that_cannot_be_written_has_its_exit_code() {
    let dir = short_dir();
    // The first of two failures is told last, and the other one at once.
    let mut command = headwater();
    command.arg("--data-dir").arg(dir.path()).args(["machine", "stop", "a", "b"]);
    let full = std::fs::File::options().write(true).open("/dev/full").expect("it is there");
    let status = command.stdin(Stdio::null()).stderr(full).status().expect("it runs");
    assert_eq!(status.code(), Some(7));
}

#[test]
fn a_file_is_no_data_directory() {
    let dir = short_dir();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let ran = run(headwater().arg("--data-dir").arg(&file).arg("serve"));
    ran.fails(1, &["cannot use the data directory", "not a directory"]);
}

#[test]
fn what_is_in_use_missing_or_too_small_has_its_code() {
    let dir = short_dir();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let taken_socket = dir.path().join("s");
    let _listening = std::os::unix::net::UnixListener::bind(&taken_socket).unwrap();
    let socket = taken_socket.to_str().unwrap();
    let ends = |args: &[&str], code: i32, word: &str| {
        let ran = run(headwater().args(args));
        assert!(ran.code == code && ran.err.contains(word), "{args:?}: {ran:?}");
    };
    let export = |args: &[&str], code, word| ends(&[&["export", "null:1M"], args].concat(), code, word);
    export(&["--nbd", &format!("tcp:{taken}")], 4, "the port is in use");
    export(&["--nbd", &format!("unix:{socket}")], 4, "another process");
    export(&["--vhost-user", socket], 4, "another process");
    // An address for documentation, which no host has.
    export(&["--nbd", "tcp:192.0.2.1:10809"], 2, "does not have that address");
    export(&["--nbd", "unix:/no/such/dir/s"], 3, "its directory does not exist");
    export(&["--nbd", "tcp:127.0.0.1:0", "--tls-certificates", "/no/such"], 3, "no such file");
    let free = format!("unix:{}", dir.path().join("free").display());
    let on_disk = ["--nbd", &free, "--cache", "disk", "--cache-dir"];
    export(&[&on_disk[..], &["/no/such"]].concat(), 3, "/no/such");
    let here = dir.path().to_str().unwrap();
    export(
        &[&on_disk[..], &[here, "--disk", "900T"]].concat(),
        2,
        "free: free space there, or give a lower limit",
    );

    let daemon = Daemon::start();
    let store = daemon.path().join("store");
    let store = store.to_str().unwrap();
    for args in [
        &["image", "remove", ""][..],
        &["image", "verify", ""],
        &["machine", "show", ""],
        &["catalog", "show", ""],
    ] {
        daemon.cli(args).fails(2, &["a name in the request is empty"]);
    }
    ends(&["store", "serve", store, "--listen", &taken], 4, "cannot listen on");
    let tokens = ["--token-file", "/no/such"];
    ends(&[&["store", "serve", store, "--listen", "127.0.0.1:0"], &tokens[..]].concat(), 3, "/no/such");
    ends(&["store", "sync", store, "https://localhost:1"], 2, "is read-only");
    ends(&["store", "sync", "https://localhost:1", store, "--ca", "/no/such"], 3, "/no/such");
    assert!(run(headwater().args(["store", "verify", store])).ok().contains("no version to verify"));
}

#[test]
fn bad_names_and_sizes_are_refused_with_advice() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    let create = |name: &str, image: &str, more: &[&str]| {
        daemon.cli(&[&["machine", "create", name, image], more].concat())
    };
    create("Odd Name", "tiny", &[]).fails(2, &["'Odd Name'", "a-z, 0-9"]);
    create("../up", "tiny", &[]).fails(2, &["'../up'"]);
    create("a\u{1b}[2J", "tiny", &[]).fails(2, &["\\u{1b}"]);
    create("new", "none", &[]).fails(3, &["no image 'none'"]);
    create("new", "tiny@7", &[]).fails(3, &["no version 7"]);
    create("lab", "tiny", &[]).fails(4, &["a machine of that name exists"]);
    create("new", "tiny", &["--ram", "900T"]).fails(2, &["larger than this host's"]);
    create("new", "tiny", &["--memory", "900T"]).fails(2, &["this host has"]);
    create("new", "tiny", &["--memory", "1"]).fails(2, &["cannot run here: 1 bytes of memory are too few"]);
    create("new", "tiny", &["--user-data", "/nowhere"]).fails(3, &["/nowhere"]);
    daemon.cli(&["machine", "show", "nobody"]).fails(3, &["no machine 'nobody'"]);
    let two = daemon.cli(&["machine", "start", "nobody", "lab-2"]);
    assert_eq!(two.code, 3, "{two:?}");
    for name in ["nobody", "lab-2"] {
        let line = format!("headwater: there is no machine '{name}'");
        assert_eq!(two.err.lines().filter(|told| told.starts_with(&line)).count(), 1, "{two:?}");
    }
    daemon.cli(&["image", "show", "none@1"]).fails(3, &["no image 'none'"]);
    daemon.cli(&["image", "remove", "none"]).fails(3, &["no image 'none'"]);
    daemon.cli(&["machine", "exec", "lab", "--", "true"]).fails(4, &["'lab'", "it is created"]);
}

#[test]
fn a_name_whose_sockets_would_be_too_long_is_refused_when_it_is_created() {
    let parent = short_dir();
    let deep = tempfile::Builder::new().prefix(&"d".repeat(50)).tempdir_in(parent.path()).unwrap();
    let daemon = Daemon::start_in(deep, |_| {});
    daemon.with_tiny_machine("ok");
    let long = "m".repeat(60);
    daemon.cli(&["machine", "create", &long, "tiny"]).fails(2, &["at most 107", "shorter"]);
}

#[test]
fn a_reader_that_goes_away_is_no_failure_and_hides_none() {
    let daemon = Daemon::start();
    let list = || {
        let mut child = headwater()
            .arg("--data-dir")
            .arg(daemon.path())
            .args(["image", "list"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        child.wait_with_output().unwrap()
    };
    let output = list();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    std::fs::write(daemon.path().join("store/images/broken"), "no list of versions").unwrap();
    let output = list();
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("broken"), "{output:?}");
}

#[test]
fn completions_offer_commands_and_names_that_the_daemon_has() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("pc-1");
    daemon.create("desk", "tiny", &[]);
    daemon.cli(&["catalog", "create", "class", "tiny"]).ok();
    let dir = daemon.path().to_owned();
    // As bash has it: the words, with the cursor at the last one.
    let offered = |words: &[&str]| {
        let script = "eval \"$(headwater completions bash)\"; COMP_WORDS=(headwater \"$@\"); COMP_CWORD=$#; COMP_LINE=\"headwater $*\"; \
                      COMP_POINT=${#COMP_LINE}; COMP_TYPE=9; $(complete -p headwater | sed 's/.*-F \\([^ ]*\\).*/\\1/') headwater \"${!#}\"; \
                      printf '%s\\n' \"${COMPREPLY[@]}\"";
        let program = std::path::Path::new(env!("CARGO_BIN_EXE_headwater")).parent().unwrap();
        let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
        let mut bash = std::process::Command::new("bash");
        bash.args(["-c", script, "bash"]).args(words).env("PATH", path).env("HEADWATER_DATA_DIR", &dir);
        let output = bash.output().expect("bash runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut offered: Vec<_> =
            text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
        offered.sort();
        (offered, output)
    };
    let check = |words: &[&str], expected: &[&str]| {
        let (found, output) = offered(words);
        assert_eq!(found, expected, "{words:?}: {output:?}");
    };
    check(&["machine", "star"], &["start"]);
    check(&["machine", "start", "p"], &["pc-1"]);
    check(&["machine", "create", "x", "t"], &["tiny"]);
    check(&["catalog", "show", "c"], &["class"]);
    check(
        &["scheme", "check", "--size", "Standard_D8ds_v"],
        &["Standard_D8ds_v4", "Standard_D8ds_v5", "Standard_D8ds_v6"],
    );
    // Of machines and catalogs.
    check(&["image", "pin", "d"], &["desk"]);
    check(&["image", "pin", "c"], &["class"]);
    drop(daemon);
    check(&["machine", "start", "p"], &[]);
}

#[test]
fn completions_and_manual_are_generated() {
    for shell in ["bash", "zsh", "fish"] {
        let script = run(headwater().args(["completions", shell])).ok();
        assert!(script.contains("COMPLETE=") && script.contains("headwater"), "{shell}: {script}");
    }
    let dir = short_dir();
    run(headwater().arg("man").arg(dir.path())).ok();
    for page in ["headwater.1", "headwater-run.1", "headwater-machine-create.1", "headwater-size-advise.1"] {
        assert!(std::fs::read_to_string(dir.path().join(page)).unwrap().contains(".TH"), "{page}");
    }
}

/// `run` in the foreground, until it has said something.
struct Running {
    child: std::process::Child,
    out: std::io::BufReader<std::process::ChildStdout>,
    said: String,
}

impl Running {
    fn start(dir: &std::path::Path, source: &str, more: &[&str]) -> Self {
        // A hang-up that is ignored when a program starts stays ignored, and whoever runs these tests may do
        // so under nohup.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP").arg(headwater().get_program());
        command.env_remove("HEADWATER_DATA_DIR").env_remove("HEADWATER_LOG");
        let mut child = command
            .args(["run", source, "--memory", "64M", "--disk", "1G", "--data-dir"])
            .arg(dir)
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = std::io::BufReader::new(child.stdout.take().unwrap());
        Self { child, out, said: String::new() }
    }

    fn until(&mut self, words: &str) {
        let _watchdog = support::Watchdog::on(self.child.id());
        while !self.said.contains(words) {
            let n = std::io::BufRead::read_line(&mut self.out, &mut self.said).unwrap();
            assert!(n > 0, "it ended after {:?}", self.said);
        }
    }
}

#[test]
fn run_imports_boots_shows_and_cleans_up() {
    let dir = short_dir();
    let disk = dir.path().join("My Disk.raw");
    std::fs::write(&disk, tiny_disk()).unwrap();
    let data = dir.path().join("data");
    let mut running = Running::start(
        &data,
        disk.to_str().unwrap(),
        &["-n", "2", "--record", dir.path().join("recorded").to_str().unwrap()],
    );
    running.until("imported as my-disk@1");
    running.until("my-disk-1 is running, booted in");
    running.until("my-disk-2 is running, booted in");
    // It is a daemon like any other.
    let list = run(headwater().arg("--data-dir").arg(&data).args(["machine", "list"])).ok();
    assert!(list.contains("my-disk-1") && list.contains("my-disk-2"), "{list}");
    // The boot sector knows no ACPI: the second signal ends it.
    signal(running.child.id(), "INT");
    std::thread::sleep(std::time::Duration::from_millis(500));
    signal(running.child.id(), "INT");
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
    assert_eq!(std::fs::read_dir(data.join("run")).unwrap().count(), 0);
    for number in 1..=2 {
        let file = dir.path().join(format!("recorded/my-disk-{number}-1.rec"));
        let mut recording = headwater_recorder::Reader::open(&file).unwrap();
        assert!(recording.next_record().unwrap().is_some());
    }
    assert!(!data.join("api.sock").exists());

    // The image stays; a second run of it needs no file.
    std::fs::remove_file(&disk).unwrap();
    let mut again = Running::start(&data, "my-disk", &[]);
    again.until("my-disk-1 is running");
    // As when the terminal is closed.
    signal(again.child.id(), "HUP");
    std::thread::sleep(std::time::Duration::from_millis(500));
    signal(again.child.id(), "HUP");
    assert_eq!(again.child.wait().unwrap().code(), Some(0));
    assert_eq!(std::fs::read_dir(data.join("run")).unwrap().count(), 0);
}

#[test]
fn run_says_what_is_to_be_known_of_its_import_in_either_form() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    daemon.cli(&["image", "edit", "tiny", "--machine", "lab"]).ok();
    let (_, dir) = daemon.terminate();
    let disk = dir.path().join("tiny.raw");
    let no_qemu = short_dir();
    for (number, more) in [(1, &[][..]), (2, &["--json"])] {
        let mut bytes = tiny_disk();
        *bytes.last_mut().unwrap() = number;
        std::fs::write(&disk, bytes).unwrap();
        let mut command = headwater();
        command.args(["run", disk.to_str().unwrap(), "--data-dir"]).arg(dir.path()).args(more);
        // It is not to go on for long.
        let ran = run(command.env("PATH", no_qemu.path()));
        assert!(ran.err.contains("machine 'lab' edits tiny over an older version"), "{more:?}: {ran:?}");
        // Machines that are not of this run boot it, too.
        let moved = format!("machines that boot 'tiny' boot version {}", number + 1);
        let holds = format!("'headwater image promote tiny@{number} production'");
        assert!(ran.err.contains(&moved) && ran.err.contains(&holds), "{more:?}: {ran:?}");
    }
}

#[test]
fn programs_read_json_only() {
    let daemon = Daemon::start();
    for verb in [&["stop"][..], &["start"], &["remove"], &["remove", "--force"]] {
        let ran = daemon.cli(&[&["--json", "machine"], verb, &["nope1", "nope2", "nope3"]].concat());
        let told: Vec<serde_json::Value> =
            ran.err.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert!(ran.code == 3 && told.len() == 3, "{ran:?}");
        assert!(told.iter().all(|problem| problem["kind"] == "not_found"), "{told:?}");
    }
    let dir = short_dir();
    let disk = dir.path().join("disk.raw");
    std::fs::write(&disk, tiny_disk()).unwrap();
    let mut run = Running::start(&dir.path().join("data"), disk.to_str().unwrap(), &["--json"]);
    run.until("\"state\":\"running\"");
    for _ in 0..2 {
        signal(run.child.id(), "INT");
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    assert_eq!(run.child.wait().unwrap().code(), Some(0));
    let lines = run.said.lines().filter(|line| !line.is_empty());
    assert!(lines.clone().count() > 0);
    for line in lines {
        serde_json::from_str::<serde_json::Value>(line).expect(line);
    }
}

#[test]
fn run_reads_backing_files_elsewhere_where_that_is_allowed() {
    let dir = short_dir();
    let (elsewhere, images) = (dir.path().join("elsewhere"), dir.path().join("images"));
    std::fs::create_dir(&elsewhere).unwrap();
    std::fs::create_dir(&images).unwrap();
    let (base, disk) = (elsewhere.join("base.raw"), images.join("tiny.qcow2"));
    std::fs::write(&base, tiny_disk()).unwrap();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&disk);
    run(&mut create).ok();
    let (data, disk) = (dir.path().join("data"), disk.to_str().unwrap());
    let refused = run(headwater().args(["run", disk, "--data-dir"]).arg(&data));
    assert!(refused.code == 2 && refused.err.contains("--backing"), "{refused:?}");
    let mut running = Running::start(&data, disk, &["--backing"]);
    running.until("imported as tiny@1");
    running.until("tiny-1 is running, booted in");
    signal(running.child.id(), "INT");
    std::thread::sleep(std::time::Duration::from_millis(500));
    signal(running.child.id(), "INT");
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
}

#[test]
fn run_of_what_does_not_exist_or_cannot_be_says_so() {
    let dir = short_dir();
    let data = dir.path().join("data");
    let ran = |args: &[&str]| run(headwater().arg("run").args(args).arg("--data-dir").arg(&data));
    ran(&["none"]).fails(3, &["'none' is neither a file nor an image"]);
    ran(&["./none.qcow2"]).fails(3, &["none.qcow2"]);
    ran(&["https://127.0.0.1:1/debian"])
        .fails(2, &["cannot import 'https://127.0.0.1:1/debian'", "--from STORE"]);
    let disk = dir.path().join("d.raw");
    std::fs::write(&disk, tiny_disk()).unwrap();
    let disk = disk.to_str().unwrap();
    let too_large = ran(&[disk, "--ram", "900T"]);
    assert_eq!(too_large.code, 2, "{too_large:?}");
    assert!(too_large.err.contains("larger than this host's"), "{too_large:?}");
    // The machine that could not be started is gone.
    let too_large = ran(&[disk, "--memory", "64M", "--disk", "9000T"]);
    assert_eq!(too_large.code, 2, "{too_large:?}");
    assert!(too_large.err.contains("(give another limit with --disk SIZE)"), "{too_large:?}");
    assert!(!too_large.err.contains("machine set"), "{too_large:?}");
    let empty = short_dir();
    let mut command: Command = headwater();
    command.args(["run", disk, "--data-dir"]).arg(&data).env("PATH", empty.path());
    let no_qemu = run(&mut command);
    assert_eq!(no_qemu.code, 1, "{no_qemu:?}");
    assert!(no_qemu.err.contains("not installed"), "{no_qemu:?}");
    assert_eq!(std::fs::read_dir(data.join("run")).unwrap().count(), 0, "machines are left");
}
