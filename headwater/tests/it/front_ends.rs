//! The front-ends of `headwater export` together: a disk for each of many machines over iSCSI and NBD with real initiators and
//! clients, and clients that break the rules.
//!
//! Where each kind of bad input and fault is tested, by front-end (`hostile.rs` unless another file is named):
//!
//! | what | NBD | iSCSI | vhost-user | FUSE |
//! |---|---|---|---|---|
//! | client or guest gone in the middle | hanging_up_in_the_middle_of_a_write_writes_nothing, hanging_up_with_requests_in_flight_harms_nobody | a_disconnect_during_a_write_writes_nothing, an_initiator_that_goes_leaves_no_task_behind | a_vanished_front_end_leaves_the_disk_usable, a_front_end_that_stops_in_the_middle_of_a_message_holds_up_nobody, an_incomplete_message_does_not_block_the_next_front_end, a_silent_front_end_gives_way_to_another | `file.rs`: programs_that_are_killed_in_the_middle_disturb_no_others |
//! | past the end, unaligned, zero or maximal length | requests_that_do_not_fit_are_answered_and_leave_the_stream_in_step, a_write_longer_than_the_limit_ends_the_connection | `libiscsi.rs` (its tests `BeyondEol`, `ZeroBlocks`, `ResidualOverflow`), `protocol/data.rs`: residuals_are_reported, the_longest_transfers_are_carried_out_and_longer_ones_are_not | requests_that_cannot_be_carried_out_are_answered_with_an_error, the_longest_requests_are_carried_out_and_longer_ones_are_not, `oracle.rs` | `file.rs`: the_size_cannot_be_changed_and_there_is_no_room_behind_the_end, `conformance.rs`: ranges_of_any_length_at_any_byte |
//! | overlapping | the suite of `testkit`, through each front-end: `own_client.rs` | `device.rs` | `conformance.rs` | `conformance.rs` |
//! | more connections than allowed | too_many_connections_are_closed_at_once | more_connections_than_allowed_are_closed_at_once | a_second_front_end_is_turned_away_while_the_first_one_is_served | - |
//! | wrong secrets or certificates | `tls.rs`: clients_without_a_valid_certificate_are_refused | guessing_a_secret_leads_nowhere, here: an_initiator_logs_in_with_its_secret_only | - | - |
//! | replies that nobody takes | a_client_that_never_reads_is_not_served_without_end | an_initiator_that_never_reads_stops_only_itself | a_front_end_that_never_reads_does_not_keep_the_server_from_stopping | - |
//! | memory of many that take or send nothing | greedy_readers_share_one_budget, greedy_writers_share_one_budget_and_leave_room_for_reads, a_stalled_write_does_not_keep_its_memory | greedy_readers_share_one_budget, unsolicited_data_without_memory_is_refused_until_there_is_some, an_initiator_without_data_does_not_keep_its_memory | - | - |
//! | 1,000 half-open logins, and their memory | a_thousand_half_open_handshakes_keep_nobody_out, `tls.rs`: hundreds_of_half_open_tls_handshakes_keep_nobody_out | a_thousand_half_open_logins_keep_nobody_out | - | - |
//! | a log that is flooded, or does not say who and why | here: a_log_is_not_filled_by_those_who_break_the_rules; `log.rs`, `stall.rs` | here; `log_of_limits.rs` | here; `log.rs` | `log.rs`: errors_are_told_with_file_and_reason_and_only_so_often |
//!
//! Block devices of the kernel are tested in a guest, where there is one that may be broken: `guest/attach-test`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Ran, headwater, pseudo_random, run, short_dir, signal};
use headwater_block::{Device, blocking};
use headwater_nbd::address::Address;
use headwater_nbd::server::{Server, SingleExport};
use headwater_testkit::pki::{Authority, CertificateOptions};
use headwater_testkit::vhost::{Setup, VhostDisk};
use headwater_testkit::wait_until;

const MIB: usize = 1 << 20;

/// A running export of an empty disk.
struct Export {
    child: Child,
    log: PathBuf,
    /// A line for each front-end.
    lines: Vec<String>,
}

impl Export {
    fn start(dir: &Path, front_ends: usize, args: &[&str], secrets: Option<&str>) -> Self {
        let mut command = headwater();
        command.args(["export", "null:16M", "--cache", "ram", "--ram", "64M"]).args(args);
        if let Some(secrets) = secrets {
            command.env("HEADWATER_CHAP", secrets);
        }
        Self::start_as(command, dir, front_ends)
    }

    fn start_as(mut command: Command, dir: &Path, front_ends: usize) -> Self {
        let log = dir.join("log");
        let log_file = std::fs::File::create(&log).expect("a log");
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log_file).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let printed = lines.by_ref().take(front_ends).map(|line| line.expect("text")).collect();
        std::thread::spawn(move || lines.for_each(drop));
        let export = Self { child, log, lines: printed };
        assert_eq!(export.lines.len(), front_ends, "{}", export.log());
        export
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("a log")
    }

    fn end(mut self) -> String {
        signal(self.child.id(), "TERM");
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}: {}", self.log());
        self.log()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // Only after a failed test is it still there.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tool(program: &str, args: &[&str]) -> Ran {
    run(Command::new(program).args(args))
}

const GOOD: CertificateOptions = CertificateOptions { is_expired: false, serial: 0 };

#[test]
fn certificates_decide_who_may_open_an_export_over_nbd() {
    let dir = short_dir();
    let authority = Authority::new("the authority");
    let pki = authority.write_certificates(&dir.path().join("pki"), &[("server", "localhost", GOOD)]);
    let stranger = Authority::new("somebody else");
    let client = |authority: &Authority, name: Option<&str>| -> PathBuf {
        let at = dir.path().join(format!("client-{}", name.unwrap_or("nobody")));
        let roles: Vec<_> = name.iter().map(|name| ("client", *name, GOOD)).collect();
        authority.write_certificates(&at, &roles);
        std::fs::copy(pki.join("ca-cert.pem"), at.join("ca-cert.pem")).expect("copied");
        at
    };
    let desk = client(&authority, Some("desk-7"));
    let other = client(&authority, Some("desk-8"));
    let nobody = client(&authority, None);
    let unknown = client(&stranger, Some("stranger"));
    let files = pki.to_str().expect("UTF-8");
    // Who of these gets in: with the right name, another one, none, one that nobody vouches for, without TLS.
    let required: &[&str] = &[];
    let verified = &["--tls-verify-peer"][..];
    let allowed = &["--tls-allow", "desk-9", "--tls-allow", "desk-7"][..];
    let optional = &["--tls", "optional"][..];
    for (flags, expected) in [
        (required, [true, true, true, true, false]),
        (verified, [true, true, false, false, false]),
        (allowed, [true, false, false, false, false]),
        (optional, [true, true, true, true, true]),
    ] {
        let args = ["--nbd", "tcp:localhost:0", "--tls-certificates", files];
        let export = Export::start(dir.path(), 1, &[&args[..], flags].concat(), None);
        let scheme = if flags == optional { "nbd://" } else { "nbds://" };
        let (_, place) = export.lines[0].split_once(scheme).expect("a URI that says whether TLS must be");
        let secured = |files: &Path| format!("nbds://{place}?tls-certificates={}", files.display());
        let uris = [&desk, &other, &nobody, &unknown].map(|files| secured(files));
        let uris = [&uris[..], &[format!("nbd://{place}")]].concat();
        for (uri, expected) in uris.iter().zip(expected) {
            let info = tool("nbdinfo", &[uri]);
            assert_eq!(info.code == 0, expected, "{flags:?}, {uri}: {info:?}, {}", export.log());
            let is_encrypted = info.out.contains("protocol: newstyle-fixed with TLS");
            let is_secure = !expected || is_encrypted == uri.starts_with("nbds://");
            assert!(is_secure, "{flags:?}, {uri}: {info:?}");
        }
        let log = export.end();
        if flags == allowed {
            let why = log.lines().find(|line| line.contains("'desk-8'"));
            assert!(why.is_some_and(|why| why.contains("do not allow this export")), "{log}");
        }
        if !expected[4] {
            assert!(log.contains("does not use TLS"), "{log}");
        }
    }
}

const TARGET: &str = "iqn.2026-01.org.example:disk";

#[test]
fn an_initiator_logs_in_with_its_secret_only() {
    let dir = short_dir();
    let secrets = dir.path().join("chap");
    std::fs::write(&secrets, "# who\ninitiator desk-7 desk-secret-77\ntarget server-1 server-secret-1\n")
        .expect("written");
    let args = [
        "--iscsi",
        "tcp:127.0.0.1:0",
        "--iscsi-target",
        TARGET,
        "--chap-file",
        secrets.to_str().expect("UTF-8"),
    ];
    // Secrets that others can read are none.
    std::fs::set_permissions(&secrets, std::fs::Permissions::from_mode(0o644)).expect("changed");
    let open = run(headwater().args(["export", "null:16M", "--cache", "ram"]).args(args));
    open.fails(2, &["chap", "chmod"]);
    std::fs::set_permissions(&secrets, std::fs::Permissions::from_mode(0o600)).expect("changed");
    let export = Export::start(dir.path(), 1, &args, None);
    let url = export.lines[0].as_str();
    assert!(url.starts_with("iscsi://127.0.0.1:") && url.ends_with(&format!("/{TARGET}/0")), "{url}");
    let with = |login: &str| url.replacen("iscsi://", &format!("iscsi://{login}@"), 1);
    let known = with("desk-7%desk-secret-77");

    // Discovery, with the secret too.
    let (portal, _) = known.split_once(&format!("/{TARGET}")).expect("a portal");
    let found = tool("iscsi-ls", &["--show-luns", portal]).ok();
    assert!(found.contains(TARGET) && found.contains("Lun:0"), "{found}");
    // QEMU's driver and libiscsi's tools see one disk.
    let file = dir.path().join("disk.raw");
    std::fs::write(&file, pseudo_random(16 * MIB, 3)).expect("written");
    let file = file.to_str().expect("UTF-8");
    tool("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", file, &known]).ok();
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", file, &known]).ok();
    let mutual = format!("{known}?target_user=server-1&target_password=server-secret-1");
    let capacity = tool("iscsi-readcapacity16", &[&mutual]).ok();
    assert!(capacity.contains("16777216"), "{capacity}");
    for bad in [
        url.to_owned(),
        with("desk-7%desk-secret-78"),
        with("desk-8%desk-secret-77"),
        format!("{known}?target_user=server-1&target_password=server-secret-2"),
    ] {
        let refused = tool("iscsi-inq", &[&bad]);
        assert!(refused.code != 0, "{bad}: {refused:?}");
    }
    let log = export.end();
    for words in ["the CHAP response of 'desk-7' is wrong", "127.0.0.1"] {
        assert!(log.contains(words), "{words}: {log}");
    }
    assert!(!log.contains("secret-7"), "a secret is in the log: {log}");
    // From the environment, which needs no file.
    let args = ["--iscsi", "tcp:127.0.0.1:0", "--iscsi-target", TARGET];
    let export = Export::start(dir.path(), 1, &args, Some("initiator desk-7 desk-secret-77"));
    let known = export.lines[0].replacen("iscsi://", "iscsi://desk-7%desk-secret-77@", 1);
    tool("iscsi-inq", &[&known]).ok();
    assert!(tool("iscsi-inq", &[&export.lines[0]]).code != 0);
    export.end();
}

#[test]
fn each_target_is_a_machine_of_its_own() {
    let dir = short_dir();
    let secrets = dir.path().join("chap");
    let (one, two) = ("iqn.2026-01.org.example:one", "iqn.2026-01.org.example:two");
    let lines = format!("initiator pc-1 secret-of-pc-1 {one}\ninitiator pc-2 secret-of-pc-2 {two}\n");
    std::fs::write(&secrets, lines).expect("written");
    std::fs::set_permissions(&secrets, std::fs::Permissions::from_mode(0o600)).expect("changed");
    let secrets = secrets.to_str().expect("UTF-8");
    let args =
        ["--iscsi", "tcp:127.0.0.1:0", "--iscsi-target", one, "--iscsi-target", two, "--chap-file", secrets];
    for (code, more, words) in [
        (2, &["--nbd", "unix:/nowhere/x"][..], "--iscsi-target was given 2 times"),
        (2, &["--persistent", "kept"][..], "--persistent is for one disk"),
        (2, &["--iscsi-target", one][..], "was given twice"),
        (2, &["--iscsi-target", "iqn.2026-01.org.example:three"][..], "permit no login to"),
    ] {
        run(headwater().args(["export", "null:16M", "--cache", "ram"]).args(args).args(more))
            .fails(code, &[words]);
    }
    let export = Export::start(dir.path(), 2, &args, None);
    let urls: Vec<String> = [("pc-1", 0), ("pc-2", 1)]
        .map(|(name, line)| {
            export.lines[line].replacen("iscsi://", &format!("iscsi://{name}%secret-of-{name}@"), 1)
        })
        .into();
    assert!(urls[0].ends_with(&format!("/{one}/0")) && urls[1].ends_with(&format!("/{two}/0")), "{urls:?}");
    // What one writes the other does not see.
    let files: Vec<String> = (0..2u64)
        .map(|number| {
            let file = dir.path().join(format!("{number}.raw"));
            std::fs::write(&file, pseudo_random(16 * MIB, 5 + number)).expect("written");
            file.to_str().expect("UTF-8").to_owned()
        })
        .collect();
    for (file, url) in files.iter().zip(&urls) {
        tool("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", file, url]).ok();
    }
    for (file, url) in files.iter().zip(&urls) {
        tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", file, url]).ok();
    }
    // Nor does it get in there.
    let other = urls[0].replacen(one, two, 1);
    assert!(tool("iscsi-inq", &[&other]).code != 0);
    let (portal, _) = urls[1].split_once(&format!("/{two}")).expect("a portal");
    let found = tool("iscsi-ls", &[portal]).ok();
    assert!(found.contains(one) && found.contains(two), "{found}");
    let log = export.end();
    assert!(log.contains("pc-1"), "{log}");
}

/// Writes a byte to the whole of the first 4 MiB, in requests of 64 KiB.
fn fill(uri: &str, byte: u8) -> Child {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw", uri]).stdin(Stdio::null()).stdout(Stdio::null());
    for at in (0..4096).step_by(64) {
        command.arg("-c").arg(format!("write -P {byte} {at}k 64k"));
    }
    command.spawn().expect("qemu-io is needed: apt-get install qemu-utils")
}

#[test]
fn each_nbd_export_is_a_machine_of_its_own_whose_cache_is_on_the_server() {
    let dir = short_dir();
    let address = format!("unix:{}", dir.path().join("nbd").display());
    let args = ["--nbd", &address, "--nbd-export", "desk-1", "--nbd-export", "desk-2"];
    for (code, more, words) in [
        (2, &["--iscsi", "tcp:127.0.0.1:0"][..], "--nbd-export was given 2 times"),
        (2, &["--vhost-user", "/nowhere/x"][..], "--vhost-user is for one disk"),
        (2, &["--persistent", "kept"][..], "--persistent is for one disk"),
        (2, &["--nbd-export", "desk-2"][..], "was given twice"),
    ] {
        run(headwater().args(["export", "null:16M", "--cache", "ram"]).args(args).args(more))
            .fails(code, &[words]);
    }
    // More than the RAM of this mode is written, so the overflow of each takes part.
    let cache_dir = dir.path().to_str().expect("UTF-8");
    let more = ["--cache", "disk", "--disk", "256M", "--cache-dir", cache_dir];
    let mut command = headwater();
    command.args(["export", "null:64M"]).args(args).args(more);
    let export = Export::start_as(command, dir.path(), 2);
    let uris = &export.lines;
    assert!(uris[0].contains("/desk-1?") && uris[1].contains("/desk-2?"), "{uris:?}");

    let list: serde_json::Value =
        serde_json::from_str(&tool("nbdinfo", &["--list", "--json", &uris[0]]).ok()).expect("JSON");
    let exports = list["exports"].as_array().expect("a list");
    let listed: Vec<_> = exports
        .iter()
        .map(|export| (export["export-name"].as_str().expect("a name"), export["can_multi_conn"] == true))
        .collect();
    assert_eq!(listed, [("desk-1", true), ("desk-2", true)]);
    for none in ["", "desk-3"] {
        let uri = uris[0].replacen("desk-1", none, 1);
        assert!(tool("nbdinfo", &[&uri]).code != 0, "{uri} is there");
    }

    // Both write the same blocks at the same time, and again.
    for round in [0, 2] {
        let clients = [fill(&uris[0], 1 + round), fill(&uris[1], 2 + round)];
        for mut client in clients {
            assert!(client.wait().expect("it ends").success());
        }
        for (uri, byte) in uris.iter().zip([1 + round, 2 + round]) {
            let read = format!("read -P {byte} 0 4M");
            let read = tool("qemu-io", &["-r", "-f", "raw", uri, "-c", &read]).ok();
            assert!(!read.contains("failed"), "{uri}: {read}");
        }
    }
    // A disk that one copies as a whole, over several connections, is its own.
    let files = ["1.raw", "2.raw"].map(|name| dir.path().join(name).display().to_string());
    for (seed, (file, uri)) in files.iter().zip(uris).enumerate() {
        std::fs::write(file, pseudo_random(64 * MIB, 11 + seed as u64)).expect("written");
        tool("nbdcopy", &["--connections=4", file, uri]).ok();
    }
    for (file, uri) in files.iter().zip(uris) {
        tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", file, uri]).ok();
    }
    export.end();
}

#[test]
fn a_certificate_opens_the_exports_only_that_it_is_for() {
    let dir = short_dir();
    let authority = Authority::new("the authority");
    let usual = CertificateOptions::default();
    let files = |who: &str, roles: &[(&str, &str, CertificateOptions)]| {
        authority.write_certificates(&dir.path().join(who), roles).display().to_string()
    };
    let server = files("server", &[("server", "localhost", usual)]);
    let args = ["--nbd", "tcp:localhost:0", "--tls-certificates", &server];
    let exports = ["--nbd-export", "desk-1", "--nbd-export", "desk-2"];
    run(headwater()
        .args(["export", "null:16M", "--cache", "ram"])
        .args(args)
        .args(exports)
        .args(["--tls-allow", "pc-1=desk-3"]))
    .fails(2, &["--tls-allow pc-1=desk-3", "there is no --nbd-export desk-3"]);
    let rights = ["--tls-allow", "pc-1=desk-1", "--tls-allow", "pc-2=desk-2", "--tls-allow", "backup"];
    let args = [&args[..], &exports, &rights].concat();
    let export = Export::start(dir.path(), 2, &args, None);
    for (client, seen) in [("pc-1", [true, false]), ("pc-2", [false, true]), ("backup", [true, true])] {
        let pki = files(client, &[("client", client, usual)]);
        let list = tool("nbdinfo", &["--list", &format!("{}?tls-certificates={pki}", export.lines[0])]).ok();
        for (number, is_seen) in seen.into_iter().enumerate() {
            let uri = format!("{}?tls-certificates={pki}", export.lines[number]);
            assert_eq!(tool("nbdinfo", &[&uri]).code == 0, is_seen, "{client}: {uri}");
            assert_eq!(list.contains(&format!("desk-{}", number + 1)), is_seen, "{client}: {list}");
        }
    }
    export.end();
}

/// How often a rule is broken, of each front-end.
const TIMES: usize = 300;

/// The limit of each front-end, and the line that says how many were kept back, in [`WINDOW`].
const MOST_LINES: usize = 21;

/// After this a front-end may say as much again.
const WINDOW: Duration = Duration::from_secs(10);

#[test]
fn a_log_is_not_filled_by_those_who_break_the_rules() {
    let dir = short_dir();
    let (nbd, vhost) = (dir.path().join("nbd"), dir.path().join("vhost"));
    let nbd_address = format!("unix:{}", nbd.display());
    let args =
        ["--nbd", &nbd_address, "--vhost-user", vhost.to_str().expect("UTF-8"), "--iscsi", "tcp:127.0.0.1:0"];
    let begun = Instant::now();
    let export = Export::start(dir.path(), 3, &args, None);
    let (_, iscsi) = export.lines[2].split_once("iscsi://").expect("a URL");
    let (iscsi, _) = iscsi.split_once('/').expect("a portal");
    let garbage = pseudo_random(4096, 7);
    for _ in 0..TIMES {
        for path in [&nbd, &vhost] {
            insult(UnixStream::connect(path).expect("it listens"), &garbage);
        }
        insult(TcpStream::connect(iscsi).expect("it listens"), &garbage);
    }
    // Others are served as before.
    tool("nbdinfo", &[&export.lines[0]]).ok();
    tool("iscsi-inq", &[&export.lines[2]]).ok();
    let log = export.end();
    // A busy host takes its time.
    let windows = 1 + (begun.elapsed().as_secs() / WINDOW.as_secs()) as usize;
    let most_lines = MOST_LINES * windows;
    for (front_end, who, why) in [
        ("NBD: ", "client process", "unknown handshake flags"),
        ("iSCSI: ", "127.0.0.1:", "does not speak iSCSI"),
        ("vhost-user: ", "null:16M", "invalid message"),
    ] {
        let lines: Vec<&str> = log.lines().filter(|line| line.contains(front_end)).collect();
        assert!((1..=most_lines).contains(&lines.len()), "{front_end}{} lines: {log}", lines.len());
        assert!(lines[0].contains(who), "{front_end}: it does not say who: {}", lines[0]);
        assert!(lines[0].contains(why), "{front_end}: it does not say why: {}", lines[0]);
    }
    assert!(log.lines().count() <= 3 * most_lines, "{log}");
}

/// Sends bytes that mean nothing, and waits until it was thrown out.
fn insult(mut stream: impl Read + Write, bytes: &[u8]) {
    // It may be thrown out before all is sent.
    let _ = stream.write_all(bytes);
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn a_front_end_is_needed_and_a_path_in_use_is_an_error() {
    let none = run(headwater().args(["export", "null:1M", "--cache", "ram"]));
    assert!(none.code == 2 && none.err.contains("--vhost-user"), "{none:?}");
    let dir = short_dir();
    let socket = dir.path().join("s");
    let _other = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let export = |path: &Path| {
        run(headwater().args(["export", "null:1M", "--cache", "ram", "--vhost-user"]).arg(path))
    };
    export(&socket).fails(4, &["another process listens"]);
    export(&dir.path().join("no/s")).fails(3, &["directory does not exist"]);
}

#[test]
fn a_file_that_is_said_to_be_raw_is_served_as_it_is() {
    let dir = short_dir();
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let (secret, trap, socket) = (path("secret.raw"), path("trap.raw"), path("nbd"));
    std::fs::write(&secret, pseudo_random(MIB, 1)).expect("written");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &secret, &trap]).ok();
    let file = std::fs::File::options().write(true).open(&trap).expect("it is there");
    file.set_len(MIB as u64).expect("it is as long as a disk");
    let whole = std::fs::read(&trap).expect("it is read");
    let export = |source: &str, more: &[&str]| {
        let mut command = headwater();
        command.args([
            "export",
            source,
            "--cache",
            "ram",
            "--ram",
            "64M",
            "--nbd",
            &format!("unix:{socket}"),
        ]);
        command.args(more);
        command
    };
    // Its bytes are believed where nothing else is said.
    for (format, is_whole) in [(&[][..], false), (&["--format", "raw"], true)] {
        let _ = std::fs::remove_file(&socket);
        let served = Export::start_as(export(&trap, format), dir.path(), 1);
        let client = headwater_nbd::Client::open(&served.lines[0]).expect("it opens");
        let mut bytes = vec![0; MIB];
        blocking::read(&*client, 0, &mut bytes).expect("it is read");
        assert_eq!(bytes == whole, is_whole, "{format:?}");
        drop(client);
        served.end();
    }
    run(&mut export(&trap, &["--format", "vmdk"])).fails(2, &["as VMDK", "another format"]);
    for source in ["null:1M", "debian"] {
        run(&mut export(source, &["--format", "raw"])).fails(2, &["--format is for a file", source]);
    }
}

/// Requests as guests with unaligned partitions and databases send them, far more than fits in RAM.
fn verify_at_any_sector(engine: &[String]) {
    let mut command = Command::new("fio");
    command.args(["--name=sectors", "--rw=randrw", "--rwmixwrite=70", "--bssplit=512/20:1k/20:4k/60"]);
    command.args(["--blockalign=512", "--size=128M", "--io_size=192M", "--iodepth=16", "--norandommap=0"]);
    command.args(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--verify_backlog=4096"]);
    command.args(["--serialize_overlap=1", "--randrepeat=1", "--refill_buffers=1"]).args(engine);
    let text = run(&mut command).ok();
    assert!(text.contains("err= 0"), "{text}");
}

/// Of 128 MiB with 16 MiB of RAM, so that most of the blocks are on the overflow disk.
fn small_export(dir: &Path, front_end: &[&str]) -> Export {
    let mut command = headwater();
    command.args(["export", "null:128M", "--cache", "ram+disk", "--ram", "16M", "--disk", "512M"]);
    command.arg("--cache-dir").arg(dir).args(front_end);
    Export::start_as(command, dir, 1)
}

/// fio's engine for an NBD server at this socket.
fn over_nbd(socket: &Path) -> [String; 2] {
    ["--ioengine=nbd".into(), format!("--uri=nbd+unix:///?socket={}", socket.display())]
}

#[test]
fn fio_verifies_requests_at_any_sector_over_nbd() {
    let dir = short_dir();
    let socket = dir.path().join("nbd");
    let address = format!("unix:{}", socket.display());
    let keys = tempfile::tempdir().expect("a directory");
    let key = keys.path().join("key");
    std::fs::write(&key, "00112233445566778899aabbccddeeff\n").expect("written");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).expect("changed");
    let persistent = ["--persistent", "kept", "--key-file", key.to_str().expect("UTF-8")];
    for more in [&[][..], &persistent] {
        let export = small_export(dir.path(), &[&["--nbd", &address], more].concat());
        verify_at_any_sector(&over_nbd(&socket));
        export.end();
    }
}

/// fio speaks no iSCSI: QEMU's initiator logs in, and offers the disk to fio.
#[test]
fn fio_verifies_requests_at_any_sector_over_iscsi() {
    let dir = short_dir();
    let export = small_export(dir.path(), &["--iscsi", "tcp:127.0.0.1:0", "--iscsi-target", TARGET]);
    let socket = dir.path().join("qemu");
    let mut bridge = Command::new("qemu-nbd");
    bridge.args(["--format=raw", "--cache=none", "--aio=threads", "--persistent", "--socket"]);
    let mut bridge = Killed(bridge.arg(&socket).arg(&export.lines[0]).spawn().expect("qemu-nbd starts"));
    wait_until("qemu-nbd serves the disk, or has ended", || {
        socket.exists() || bridge.0.try_wait().expect("it is our child").is_some()
    });
    verify_at_any_sector(&over_nbd(&socket));
    drop(bridge);
    export.end();
}

/// A child that ends with the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// fio speaks no vhost-user: a driver in this process does, and an NBD server beside it offers the disk to fio.
#[test]
fn fio_verifies_requests_at_any_sector_over_vhost_user() {
    let dir = short_dir();
    let vhost = dir.path().join("vhost");
    let export = small_export(dir.path(), &["--vhost-user", vhost.to_str().expect("UTF-8")]);
    let disk: Arc<dyn Device> = Arc::new(VhostDisk::connect(&vhost, Setup { queues: 1, event_idx: true }));
    let socket = dir.path().join("nbd");
    let exports = SingleExport::new(Arc::clone(&disk), "a disk over vhost-user");
    let options = headwater_nbd::server::Options::default();
    let server = Server::bind(Address::Unix(socket.clone()), exports, options).expect("it is bound");
    verify_at_any_sector(&over_nbd(&socket));
    server.stop();
    drop((server, disk));
    export.end();
}
