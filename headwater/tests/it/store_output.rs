//! What `headwater store` says: its log, how far it is on a terminal, and what it found where it ends early.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::support::{self, Daemon, headwater, pseudo_random, run};
use headwater_store::{Access, Channel, Image, LocalDir, Pointer, Store, StoreError};
use headwater_testkit::{FileServer, HttpFault, wait_until};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A directory with the first version of each of these images, as a daemon leaves it.
fn made_by_a_daemon(names: &[&str]) -> tempfile::TempDir {
    let daemon = Daemon::start();
    for (seed, name) in (7..).zip(names.iter().copied()) {
        let raw = daemon.path().join("disk.raw");
        std::fs::write(&raw, pseudo_random(2 << 20, seed)).unwrap();
        daemon.cli(&["image", "import", text(&raw), "--name", name]).ok();
    }
    daemon.terminate().1
}

/// A process, until this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// All that was written to a terminal.
#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Screen {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

/// The end of a terminal that a program gets, what is written there, and the thread that reads it until nobody has that end open.
fn terminal() -> (OwnedFd, Screen, JoinHandle<()>) {
    let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&person).unwrap();
    unlockpt(&person).unwrap();
    let name = ptsname(&person, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let program = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap();
    tcsetwinsize(&program, Winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let screen = Screen::default();
    let seen = screen.clone();
    let reading = std::thread::spawn(move || {
        let (mut person, mut piece) = (File::from(person), [0; 4096]);
        while let Ok(n) = person.read(&mut piece) {
            if n == 0 {
                break;
            }
            seen.0.lock().unwrap().extend_from_slice(&piece[..n]);
        }
    });
    (program, screen, reading)
}

#[test]
fn a_copy_on_a_terminal_says_what_it_reads_and_that_it_waits() {
    let data_dir = made_by_a_daemon(&["disk"]);
    let mut server = FileServer::start(&data_dir.path().join("store"), None);
    // Some of the data comes, so that there is a bar.
    server.fail(HttpFault::HangAfter(100_000));
    let dir = support::short_dir();
    let copy = dir.path().join("copy");
    let (terminal, screen, reading) = terminal();
    let mut command = headwater();
    command.env("TERM", "xterm").args(["store", "copy", &server.url(), text(&copy), "disk@1"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(terminal);
    let mut copying = Running(command.spawn().unwrap());
    // It has the terminal open, too.
    drop(command);
    wait_until("the data is asked for", || server.object_requests() > 0);
    server.kill();
    wait_until("it says that it waits", || screen.text().contains("reads wait until one is back"));
    server.fail(HttpFault::None);
    server.revive();
    let mut ended = None;
    wait_until("it ends", || {
        ended = copying.0.try_wait().unwrap();
        ended.is_some()
    });
    reading.join().unwrap();
    let screen = screen.text();
    assert!(ended.is_some_and(|status| status.success()), "{screen:?}");
    assert!(screen.contains("copy: reading the lists of versions"), "{screen:?}");
    // Each line of the log begins one, where the bar was taken away.
    let logged: Vec<usize> = screen.match_indices(" headwater_remote").map(|(at, _)| at).collect();
    assert!(!logged.is_empty(), "{screen:?}");
    for at in logged {
        let line = screen[..at].rsplit(['\n', '\r']).next().unwrap();
        let line = line.strip_prefix("\u{1b}[2K").unwrap_or(line);
        assert!(line.starts_with("20"), "{line:?} in {screen:?}");
    }
    assert!(run(headwater().args(["store", "verify", text(&copy)])).ok().contains("disk@1 is intact"));
}

#[test]
fn a_server_of_a_store_logs_why_it_cannot_answer() {
    let data_dir = made_by_a_daemon(&["disk"]);
    let here = data_dir.path().join("store");
    let manifest = std::fs::read_dir(here.join("manifests")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&manifest).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&manifest, bytes).unwrap();
    let path = format!("/manifests/{}", manifest.file_name().unwrap().to_str().unwrap());
    let log = data_dir.path().join("log");
    let logged = |more: &[&str]| {
        let mut command = headwater();
        command.args(["store", "serve", text(&here), "--listen", "127.0.0.1:0"]).args(more);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&log).unwrap());
        let mut served = Running(command.spawn().unwrap());
        let mut url = String::new();
        BufReader::new(served.0.stdout.take().unwrap()).read_line(&mut url).unwrap();
        let address = url.trim().trim_start_matches("http://").trim_end_matches('/');
        let mut asking = TcpStream::connect(address).unwrap();
        write!(asking, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let answer = std::io::read_to_string(asking).unwrap();
        assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");
        // At its end it writes what it has logged.
        support::signal(served.0.id(), "TERM");
        assert!(served.0.wait().unwrap().success());
        std::fs::read_to_string(&log).unwrap()
    };
    let said = logged(&[]);
    let is_told =
        |line: &str| [" ERROR ", "cannot answer", path.as_str()].iter().all(|word| line.contains(word));
    assert!(said.lines().any(is_told), "{said}");
    assert!(!logged(&["--log", "off"]).contains("cannot answer"));
    let refused = ["store", "serve", text(&here), "--listen", "127.0.0.1:0", "--log", "inof"];
    run(headwater().args(refused)).fails(2, &["'inof' is not a level"]);
}

#[test]
fn a_check_that_ends_early_reports_what_it_found_until_then() {
    let data_dir = made_by_a_daemon(&["a", "b", "c"]);
    let here = data_dir.path().join("store");
    let opened = LocalDir::open(&here, Access::Read).unwrap();
    let version = opened.resolve(&"b@1".parse().unwrap()).unwrap();
    // A link to itself cannot be read, and is no damage: the check cannot know what is there.
    let object = here.join("objects").join(version.objects[0].to_string());
    std::fs::remove_file(&object).unwrap();
    std::os::unix::fs::symlink(&object, &object).unwrap();
    let verify = |more: &[&str]| {
        let ran = run(headwater().args(["--json", "store", "verify", text(&here)]).args(more));
        let report: Value = serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{e}: {ran:?}"));
        (ran, report)
    };
    let (ran, report) = verify(&[]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let versions = report["versions"].as_array().unwrap();
    assert_eq!((versions.len(), &versions[0]["names"][0]), (1, &Value::from("a@1")), "{report}");
    assert!(report["ended_early"].as_str().unwrap().contains("cannot verify b@1"), "{report}");
    assert_eq!(report["unchecked"], serde_json::json!(["b@1", "c@1"]));
    let problem: Value = serde_json::from_str(&ran.err).unwrap();
    assert_eq!(problem["message"], report["ended_early"]);

    let (ran, report) = verify(&["a", "c"]);
    assert_eq!((ran.code, report["versions"].as_array().unwrap().len()), (0, 2), "{report}");
    assert_eq!((&report["unchecked"], report.get("ended_early")), (&serde_json::json!([]), None));
}

#[test]
fn an_error_that_names_thousands_of_images_is_told_whole() {
    const IMAGES: usize = 6000;
    let dir = support::short_dir();
    let (here, copy) = (dir.path().join("here"), dir.path().join("copy"));
    drop(LocalDir::open(&here, Access::WRITE).unwrap());
    std::fs::create_dir_all(here.join("images")).unwrap();
    for number in 0..IMAGES {
        std::fs::write(here.join("images").join(format!("{number:063}")), b"no list of versions").unwrap();
    }
    let sync = |more: &[&str]| run(headwater().args(["store", "sync", text(&here), text(&copy)]).args(more));
    // More than the log keeps.
    let all_of_it = |told: &str| {
        assert!(told.len() > 1 << 20, "{} bytes", told.len());
        assert_eq!(told.matches(" (its list of versions in ").count(), IMAGES);
    };
    let ran = sync(&[]);
    assert_eq!(ran.code, 6, "{}", ran.out);
    let told = ran.err.lines().next_back().unwrap();
    assert!(told.starts_with("headwater: not copied: "));
    all_of_it(told);
    let ran = sync(&["--json"]);
    assert_eq!(ran.code, 6, "{}", ran.out);
    let problem: Value = serde_json::from_str(&ran.err).unwrap();
    assert_eq!(problem["kind"], "damaged");
    all_of_it(problem["message"].as_str().unwrap());
}

#[test]
fn a_server_that_is_away_is_no_reason_to_warn_of_boot_traces_that_never_were() {
    let data_dir = made_by_a_daemon(&["a"]);
    let here = data_dir.path().join("store");
    let (there, mut away) = (FileServer::start(&here, None), FileServer::start(&here, None));
    away.kill();
    let copy = data_dir.path().join("copy");
    let servers = format!("{},{}", there.url(), away.url());
    let mut command = headwater();
    let ran = run(command.env_remove("HEADWATER_LOG").args(["store", "copy", &servers, text(&copy), "a@1"]));
    assert!(ran.code == 0 && !ran.err.contains("boot trace"), "{ran:?}");
}

#[test]
fn a_program_that_reads_along_gets_one_object_unless_it_asks_for_a_log() {
    let data_dir = made_by_a_daemon(&["a", "b"]);
    let here = data_dir.path().join("store");
    let opened = LocalDir::open(&here, Access::Read).unwrap();
    let version = |name: &str| opened.resolve(&name.parse().unwrap()).unwrap();
    // A boot trace that cannot be read is logged, and an object that is gone is an error.
    let traces = here.join("traces");
    std::fs::create_dir_all(&traces).unwrap();
    let trace = traces.join(version("a@1").manifest.to_string());
    std::os::unix::fs::symlink(&trace, &trace).unwrap();
    std::fs::remove_file(here.join("objects").join(version("b@1").objects[0].to_string())).unwrap();
    let copy = data_dir.path().join("copy");
    let sync = |more: &[&str], wanted: Option<&str>| {
        let mut command = headwater();
        command.env_remove("HEADWATER_LOG").args(["store", "sync", text(&here), text(&copy)]).args(more);
        if let Some(filter) = wanted {
            command.env("HEADWATER_LOG", filter);
        }
        let ran = run(&mut command);
        assert_eq!(ran.code, 6, "{ran:?}");
        ran.err
    };
    let is_logged = |line: &str| line.contains(" WARN ") && line.contains("the boot trace");
    assert!(sync(&[], None).lines().any(is_logged));
    assert!(!sync(&[], Some("off")).lines().any(is_logged));
    let problem =
        |text: &str| -> Value { serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}")) };
    assert_eq!(problem(&sync(&["--json"], None))["kind"], "damaged");
    for (more, wanted) in [(&["--json", "--log", "warn"][..], None), (&["--json"][..], Some("warn"))] {
        let told = sync(more, wanted);
        assert!(told.lines().any(is_logged), "{told}");
        assert_eq!(problem(told.lines().next_back().unwrap())["kind"], "damaged");
    }
}

fn change_disk(store: &Path, change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>) {
    let store = LocalDir::open(store, Access::WRITE).unwrap();
    store.change(&"disk".parse().unwrap(), change).unwrap();
}

#[test]
fn a_sync_that_changes_channels_alone_says_so() {
    let data_dir = made_by_a_daemon(&["disk"]);
    let (here, copy) = (data_dir.path().join("store"), data_dir.path().join("copy"));
    let sync =
        |more: &[&str]| run(headwater().args(["store", "sync", text(&here), text(&copy)]).args(more)).ok();
    assert!(sync(&[]).contains("1 versions copied"));
    let to = Pointer { channel: Channel::Production, version: 1, at_s: 3, author: "ben".into() };
    change_disk(&here, &mut |image| image.promote(to.clone()).map(drop));
    let said = sync(&[]);
    assert!(said.starts_with("nothing to copy: the version is in "), "{said}");
    assert!(
        said.ends_with("; channels, notes and retired marks of an image were set to those of the source\n"),
        "{said}"
    );
    assert!(!sync(&[]).contains("those of the source"));
    change_disk(&here, &mut |image| image.set_note(1, "another one").map(drop));
    for followed in [1, 0] {
        let report: Value = serde_json::from_str(&sync(&["--json"])).unwrap();
        assert_eq!((&report["present"], &report["followed"]), (&Value::from(1), &Value::from(followed)));
    }
}
