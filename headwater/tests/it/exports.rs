//! Machines' disks over NBD, read by libnbd's and QEMU's programs: which there are, what they hold, who may have them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Daemon, headwater, run, short_dir, tiny_disk};
use headwater_block::{Device, IoErrorKind, blocking};
use headwater_db::Database;
use headwater_db::sqlite::SqliteDatabase;
use headwater_nbd::Client;
use headwater_testkit::pki::{Authority, CertificateOptions};
use headwater_testkit::wait_until;

const GOOD: CertificateOptions = CertificateOptions { is_expired: false, serial: 0 };
const EXPIRED: CertificateOptions = CertificateOptions { is_expired: true, serial: 0 };

/// The sector that the tiny machine counts its writes in.
const COUNTED: usize = 512;

fn daemon_at_a_socket() -> Daemon {
    let dir = short_dir();
    let address = format!("unix:{}", dir.path().join("nbd").display());
    Daemon::start_in(dir, |command| {
        command.args(["--nbd", &address]);
    })
}

fn uri(daemon: &Daemon, machine: &str) -> String {
    format!("nbd+unix:///{machine}?socket={}", daemon.path().join("nbd").display())
}

/// Names and descriptions as `nbdinfo` lists them.
fn listed(uri: &str) -> Vec<(String, String, u64)> {
    let text = run(Command::new("nbdinfo").args(["--list", "--json", uri])).ok();
    let list: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let exports = list["exports"].as_array().expect("a list").iter();
    exports
        .map(|export| {
            let size = export["export-size"].as_u64().expect("a size");
            (text(&export["export-name"]), text(&export["description"]), size)
        })
        .collect()
}

fn counted(uri: &str) -> u8 {
    counted_by(&Client::open(uri).expect("the export opens"))
}

fn counted_by(client: &Client) -> u8 {
    let mut sector = [0; 512];
    blocking::read(client, COUNTED as u64, &mut sector).expect("the view can be read");
    sector[0]
}

#[test]
fn a_machine_that_is_on_is_read_as_it_was_when_it_was_opened() {
    let daemon = daemon_at_a_socket();
    daemon.with_tiny_machine("one");
    daemon.create("two", "tiny", &[]);
    assert!(listed(&uri(&daemon, "")).is_empty());
    for (machine, why) in [("one", "start the machine"), ("three", "no export has this name")] {
        let none = run(Command::new("nbdinfo").arg(uri(&daemon, machine)));
        // libnbd shows the kind of an error only.
        let shown = if machine == "three" { "No such file" } else { "server replied with error" };
        assert!(none.code != 0 && none.err.contains(shown), "{none:?}");
        let none = run(Command::new("qemu-img").args(["info", &uri(&daemon, machine)]));
        assert!(none.code != 0 && none.err.contains(why), "{none:?}");
        let none = Client::open(&uri(&daemon, machine)).map(drop).expect_err("there is none").to_string();
        assert!(none.contains(why), "{none}");
    }

    daemon.cli(&["machine", "start", "one", "two", "--wait"]).ok();
    daemon.console("one", "w", Some("W"));
    let exports = listed(&uri(&daemon, ""));
    let size = tiny_disk().len() as u64;
    assert_eq!(
        exports.iter().map(|it| (it.0.as_str(), it.2)).collect::<Vec<_>>(),
        [("one", size), ("two", size)]
    );
    for word in ["machine one", "running", "tiny@1"] {
        assert!(exports[0].1.contains(word), "{exports:?}");
    }

    // Whole and right, by programs that open several connections.
    let copy = daemon.path().join("copy.raw");
    run(Command::new("nbdcopy").arg(uri(&daemon, "one")).arg(&copy)).ok();
    let mut expected = tiny_disk();
    expected[COUNTED] = 1;
    assert!(std::fs::read(&copy).expect("a copy") == expected, "nbdcopy gives something else");
    let check = ["compare", "-f", "raw", "-F", "raw"];
    run(Command::new("qemu-img").args(check).arg(uri(&daemon, "one")).arg(&copy)).ok();

    // All who read at the same time see the same moment; who comes later, a later one.
    let first = Client::open(&uri(&daemon, "one")).expect("it opens");
    assert!(first.geometry().read_only);
    daemon.console("one", "w", Some("W"));
    let second = Client::open(&uri(&daemon, "one")).expect("it opens");
    assert_eq!((counted_by(&first), counted_by(&second), counted(&uri(&daemon, "two"))), (1, 1, 0));
    let sealed = || daemon.cli(&["machine", "seal", "one"]);
    wait_until("the programs' connections are over", || sealed().err.contains("2 connection"));
    sealed().fails(4, &["read over NBD", "2 connection", "try again"]);
    drop(first);
    assert_eq!(counted_by(&second), 1);
    drop(second);
    // The server hears of it a moment later; who comes before that still reads the same moment.
    wait_until("the last reader is gone", || counted(&uri(&daemon, "one")) == 2);
    wait_until("the reading is noted", || daemon.history("one").contains("disk read"));

    // What the machine wrote does not live on with those who read it.
    let reader = Client::open(&uri(&daemon, "one")).expect("it opens");
    daemon.cli(&["machine", "stop", "one", "--force"]).ok();
    let gone = blocking::read(&*reader, 0, &mut [0; 512]).expect_err("it has ended");
    assert_eq!(gone.kind(), IoErrorKind::Closed, "{gone}");
    assert_eq!(listed(&uri(&daemon, "")).len(), 1);
    // An end in order, with a client that stays. The guest knows no power button, and its time to switch itself off would be waited out.
    daemon.cli(&["machine", "stop", "two", "--force"]).ok();
    let (code, _dir) = daemon.terminate();
    assert_eq!(code, Some(0));
}

#[test]
fn who_opens_a_disk_does_not_wait_for_the_history() {
    let daemon = daemon_at_a_socket();
    daemon.with_tiny_machine("one");
    daemon.cli(&["machine", "start", "one", "--wait"]).ok();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    // Also where this ends early: a transaction is ended in a runtime.
    let _entered = runtime.enter();
    // As when the database's disk is busy: nothing is written to it for a while.
    let database = daemon.path().join("headwater.db");
    let database = runtime.block_on(SqliteDatabase::open(&database)).expect("it opens");
    let writing = runtime.block_on(database.write()).expect("nobody else writes");
    let reader = Client::open(&uri(&daemon, "one")).expect("it opens");
    assert_eq!(counted_by(&reader), 0);
    assert!(!daemon.history("one").contains("disk read"), "{}", daemon.history("one"));
    drop(writing);
    wait_until("the reading is noted", || daemon.history("one").contains("disk read"));
    runtime.block_on(database.close());
}

#[test]
fn a_kept_disk_is_read_while_its_machine_is_off_and_goes_back_to_it() {
    let daemon = daemon_at_a_socket();
    daemon.with_tiny_machine("plain");
    daemon.create("kept", "tiny", &["--persistent"]);
    assert!(listed(&uri(&daemon, "")).is_empty(), "a disk that was not begun is none");
    daemon.cli(&["image", "edit", "tiny", "--machine", "plain"]).ok();
    assert!(listed(&uri(&daemon, "")).is_empty(), "nor is that of an edit");
    let none = Client::open(&uri(&daemon, "plain")).err().expect("it was not begun").to_string();
    assert!(none.contains("has not created its persistent disk yet"), "{none}");
    daemon.cli(&["image", "discard", "tiny"]).ok();
    daemon.cli(&["machine", "start", "kept", "--wait"]).ok();
    daemon.console("kept", "w", Some("W"));
    daemon.cli(&["machine", "stop", "kept", "--force"]).ok();
    let exports = listed(&uri(&daemon, ""));
    assert_eq!((exports.len(), exports[0].2), (1, tiny_disk().len() as u64));
    assert!(exports[0].1.contains("its persistent disk"), "{exports:?}");

    let reader = Client::open(&uri(&daemon, "kept")).expect("it opens");
    let left = counted_by(&reader);
    assert!(left <= 1, "{left}");
    // The machine comes first.
    daemon.cli(&["machine", "start", "kept", "--wait"]).ok();
    let gone = blocking::read(&*reader, 0, &mut [0; 512]).expect_err("it has ended");
    assert_eq!(gone.kind(), IoErrorKind::Closed, "{gone}");
    assert_eq!(counted(&uri(&daemon, "kept")), left);
    daemon.cli(&["machine", "stop", "kept", "--force"]).ok();
    let reader = Client::open(&uri(&daemon, "kept")).expect("it opens");
    daemon.cli(&["machine", "reset", "kept"]).ok();
    blocking::read(&*reader, 0, &mut [0; 512]).expect_err("the disk is gone");
    assert!(listed(&uri(&daemon, "")).is_empty());
}

/// Clients say what each code means to them: that there is no such export is no word for this one, which they list.
#[test]
fn a_kept_disk_that_cannot_be_opened_is_not_called_unknown() {
    let daemon = daemon_at_a_socket();
    daemon.with_tiny_machine("plain");
    daemon.create("kept", "tiny", &["--persistent"]);
    daemon.cli(&["machine", "start", "kept", "--wait"]).ok();
    daemon.cli(&["machine", "stop", "kept", "--force"]).ok();
    let disks = std::fs::read_dir(daemon.path().join("cache")).unwrap().map(|entry| entry.unwrap().path());
    let disk = disks.into_iter().find(|path| path.is_dir()).expect("a persistent disk");
    std::fs::rename(&disk, daemon.path().join("aside")).unwrap();
    assert_eq!(listed(&uri(&daemon, ""))[0].0, "kept");
    let refused = Client::open(&uri(&daemon, "kept")).err().expect("it is gone").to_string();
    for words in ["refused to open the export", "data is lost", "restore that directory"] {
        assert!(refused.contains(words), "{words:?} is not in {refused}");
    }
    daemon.wait_for_log(&["cannot open the disk of machine kept", "does not exist"]);
    let unknown = Client::open(&uri(&daemon, "plain")).err().expect("it has no disk").to_string();
    assert!(unknown.contains("there is no disk to read"), "{unknown}");
}

struct Secured {
    daemon: Daemon,
    authority: Authority,
    port: String,
}

impl Secured {
    fn start(rights: &[&str]) -> Self {
        let authority = Authority::new("the authority");
        let dir = short_dir();
        let files = authority.write_certificates(&dir.path().join("pki"), &[("server", "localhost", GOOD)]);
        let daemon = Daemon::start_in(dir, |command| {
            command.args(["--nbd", "tcp:localhost:0", "--nbd-certificates"]).arg(files);
            for right in rights {
                command.args(["--nbd-allow", right]);
            }
        });
        let (_, after) = daemon.log.split_once("nbds://localhost:").expect("it says where it listens");
        let port = after.chars().take_while(char::is_ascii_digit).collect();
        Self { daemon, authority, port }
    }

    /// The files of a client, whose certificate `authority` has signed; without a name it has none.
    fn client(&self, authority: &Authority, name: Option<&str>, oddity: CertificateOptions) -> PathBuf {
        let at = self.daemon.path().join(format!("client-{}", name.unwrap_or("nobody")));
        let roles: Vec<_> = name.iter().map(|name| ("client", *name, oddity)).collect();
        authority.write_certificates(&at, &roles);
        std::fs::copy(self.daemon.path().join("pki/ca-cert.pem"), at.join("ca-cert.pem")).expect("copied");
        at
    }

    fn uri(&self, machine: &str, files: &Path) -> String {
        format!("nbds://localhost:{}/{machine}?tls-certificates={}", self.port, files.display())
    }
}

#[test]
fn certificates_decide_who_sees_which_machine() {
    let secured = Secured::start(&["backup", "desk-1=one,other"]);
    let daemon = &secured.daemon;
    daemon.with_tiny_machine("one");
    daemon.create("two", "tiny", &[]);
    daemon.cli(&["machine", "start", "one", "two", "--wait"]).ok();
    let names = |files: &Path| -> Vec<String> {
        listed(&secured.uri("", files)).into_iter().map(|export| export.0).collect()
    };
    let backup = secured.client(&secured.authority, Some("backup"), GOOD);
    let desk = secured.client(&secured.authority, Some("desk-1"), GOOD);
    let other = secured.client(&secured.authority, Some("desk-2"), GOOD);
    assert_eq!(names(&backup), ["one", "two"]);
    assert_eq!(names(&desk), ["one"]);
    assert_eq!(names(&other), [""; 0]);

    let copy = daemon.path().join("copy.raw");
    run(Command::new("nbdcopy").arg(secured.uri("one", &desk)).arg(&copy)).ok();
    assert!(std::fs::read(&copy).expect("a copy") == tiny_disk(), "nbdcopy gives something else");
    let tls = format!("tls-creds-x509,id=t,endpoint=client,dir={}", backup.display());
    let image = format!(
        "driver=nbd,server.type=inet,server.host=localhost,server.port={},export=two,tls-creds=t",
        secured.port
    );
    let info = run(Command::new("qemu-img").args(["info", "--object", &tls, "--image-opts", &image])).ok();
    assert!(info.contains("1 MiB"), "{info}");
    wait_until("the reading is noted", || daemon.history("one").contains("nbd desk-1"));

    // Whether a machine exists is not told to those who may not have it.
    for (files, machine) in [(&desk, "two"), (&desk, "three"), (&other, "one"), (&other, "other")] {
        let refused = run(Command::new("nbdinfo").arg(secured.uri(machine, files)));
        assert!(refused.code != 0 && refused.err.contains("opt_go"), "{refused:?}");
        let refused = Client::open(&secured.uri(machine, files)).map(drop).expect_err("it is refused");
        assert!(refused.to_string().contains("do not allow this export"), "{refused}");
    }
    daemon.wait_for_log(&["NBD: client ", "the export 'two'", "do not allow this export", "names 'desk-1'"]);
    let stranger = Authority::new("somebody else");
    for (authority, name, oddity) in [
        (&stranger, Some("backup-2"), GOOD),
        (&secured.authority, Some("backup-3"), EXPIRED),
        (&secured.authority, None, GOOD),
    ] {
        let files = secured.client(authority, name, oddity);
        let refused = run(Command::new("nbdinfo").args(["--list", &secured.uri("", &files)]));
        assert!(refused.code != 0 && !refused.out.contains("one"), "{name:?}: {refused:?}");
    }
    let plain = run(Command::new("nbdinfo").arg(format!("nbd://localhost:{}/one", secured.port)));
    assert!(plain.code != 0, "{plain:?}");
    assert_eq!(names(&backup), ["one", "two"]);
}

#[test]
fn disks_are_not_offered_to_the_world() {
    let dir = short_dir();
    let serve = |args: &[&str]| run(headwater().arg("--data-dir").arg(dir.path()).arg("serve").args(args));
    serve(&["--nbd", "tcp:0.0.0.0:0"]).fails(2, &["other hosts or guests", "--nbd-allow", "unix:PATH"]);
    let authority = Authority::new("the authority");
    let files = authority.write_certificates(&dir.path().join("pki"), &[("server", "localhost", GOOD)]);
    let files = files.to_str().expect("UTF-8");
    serve(&["--nbd", "tcp:0.0.0.0:0", "--nbd-certificates", files]).fails(2, &["--nbd-allow"]);
    std::fs::remove_file(Path::new(files).join("server-key.pem")).expect("removed");
    // Guests reach the loopback of their host.
    serve(&["--nbd", "tcp:127.0.0.1:0"]).fails(2, &["guests of this one", "--nbd-certificates"]);
    let no_key = serve(&["--nbd", "tcp:127.0.0.1:0", "--nbd-certificates", files, "--nbd-allow", "backup"]);
    no_key.fails(3, &["server-key.pem", "no such file"]);
}
