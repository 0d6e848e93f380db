//! `headwater top` in a pseudo-terminal, whose screen a terminal emulator keeps, and its output for scripts.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use headwater_testkit::wait_until;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;

use crate::support::{Daemon, headwater, signal};

/// A terminal with `headwater top` in it.
struct Terminal {
    child: Child,
    keys: File,
    /// The other end, which is the program's terminal.
    end: File,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Terminal {
    fn start(daemon: &Daemon, args: &[&str]) -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let path = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
        tcsetwinsize(&ours, size(24, 80)).unwrap();
        let end = File::options().read(true).write(true).open(&path).unwrap();
        let stdio = || Stdio::from(end.try_clone().unwrap());
        let program = headwater();
        // A session of its own, whose terminal this is.
        let mut command = std::process::Command::new("setsid");
        command
            .arg("--ctty")
            .arg(program.get_program())
            .arg("--data-dir")
            .arg(daemon.path())
            .arg("top")
            .args(args);
        command
            .env_remove("HEADWATER_DATA_DIR")
            .env_remove("NO_COLOR")
            .env("TERM", "xterm")
            .env("LC_ALL", "C.UTF-8");
        let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        let keys = File::from(ours);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(cells(24), cells(80), 0)));
        let (mut output, shown) = (keys.try_clone().unwrap(), Arc::clone(&screen));
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut piece) {
                shown.lock().unwrap().process(&piece[..n]);
            }
        });
        Self { child, keys, end, screen }
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    fn wait_for(&self, text: &str) {
        wait_until(format!("the screen has {text:?}"), || self.text().contains(text));
    }

    fn wait_until_gone(&self, text: &str) {
        wait_until(format!("the screen has no {text:?}"), || !self.text().contains(text));
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn resize(&self, rows: u16, columns: u16) {
        self.screen.lock().unwrap().screen_mut().set_size(cells(rows), cells(columns));
        tcsetwinsize(&self.keys, size(rows, columns)).unwrap();
    }

    /// It has the whole screen, and gets each key.
    fn is_taken(&self) -> bool {
        let modes = tcgetattr(&self.end).unwrap().local_modes;
        let screen = self.screen.lock().unwrap();
        screen.screen().alternate_screen() && !modes.contains(LocalModes::ICANON)
    }

    /// The program ends with `code`, and the terminal is as it was before.
    fn ends(mut self, code: i32) {
        assert_eq!(self.child.wait().unwrap().code(), Some(code));
        let modes = tcgetattr(&self.end).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO), "{modes:?}");
        wait_until("the screen is given back", || {
            let screen = self.screen.lock().unwrap();
            !screen.screen().alternate_screen() && !screen.screen().hide_cursor()
        });
    }
}

fn cells(count: u16) -> NonZeroU16 {
    NonZeroU16::new(count).unwrap()
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// The names of the machines in a JSON answer, in order.
fn names(answer: &Value) -> Vec<&str> {
    answer["machines"].as_array().unwrap().iter().map(|machine| machine["name"].as_str().unwrap()).collect()
}

#[test]
fn top_once_is_a_table_or_json_in_the_order_asked_for() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab-2");
    daemon.create("lab-10", "tiny", &[]);
    daemon.cli(&["machine", "start", "lab-10", "--wait"]).ok();
    let json = |args: &[&str]| -> Value {
        serde_json::from_str(&daemon.cli(&[&["--json", "top"], args].concat()).ok()).unwrap()
    };
    daemon.console("lab-10", "w", Some("W"));
    // The machine that has written takes memory, so it is first.
    let mut all = Value::Null;
    wait_until("the write cache is counted", || {
        all = json(&["--once"]);
        names(&all) == ["lab-10", "lab-2"]
    });
    assert_eq!((names(&all), &all["total"]), (vec!["lab-10", "lab-2"], &Value::from(2)));
    let status: Value = serde_json::from_str(&daemon.cli(&["--json", "status"]).ok()).unwrap();
    for same in ["pid", "data_dir", "machines", "machines_active"] {
        assert_eq!(all["status"][same], status[same], "{same}");
    }
    assert!(all["machines"][0]["disk"]["ram_used_bytes"].as_u64().unwrap() > 0);
    assert_eq!(names(&json(&["--sort", "name"])), ["lab-2", "lab-10"]);
    let few = json(&["is:off"]);
    assert_eq!((names(&few), &few["matching"]), (vec!["lab-2"], &Value::from(1)));
    assert_eq!(names(&json(&["!is:off"])), ["lab-10"]);
    // The output is no terminal.
    let text = daemon.cli(&["top"]).ok();
    assert!(text.starts_with("machines    1 of 2 on\n") && text.contains("\nlab-10   running "), "{text}");
    daemon.cli(&["top", "state:odd"]).fails(2, &["cannot read the filter", "odd"]);
    assert_eq!(daemon.cli(&["top", "--interval", "0"]).code, 2);
}

#[test]
fn top_shows_machines_live_and_changes_one_after_a_second_key() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab-1");
    daemon.create("lab-2", "tiny", &[]);
    let mut terminal = Terminal::start(&daemon, &[]);
    terminal.wait_for("0 of 2 machines on");
    assert!(terminal.is_taken());
    daemon.cli(&["machine", "start", "lab-2", "--wait"]).ok();
    terminal.wait_for("1 of 2 machines on");
    terminal.wait_for("running");

    terminal.press("/");
    terminal.press("is:off");
    terminal.wait_until_gone("lab-2");
    terminal.press("\r");
    terminal.wait_for("/is:off  1 of 2");
    terminal.press("s");
    terminal.wait_for("start lab-1?");
    terminal.press("n");
    terminal.wait_for("nothing was changed");
    assert_eq!(daemon.machine("lab-1")["state"], "created");
    terminal.press("sy");
    daemon.wait_for("lab-1", "running");
    terminal.wait_for("No machine matches is:off");
    terminal.press("\x1b");
    terminal.wait_for("lab-2");

    terminal.press("\r");
    terminal.wait_for("of memory, 1 processors");
    terminal.wait_for("uid 0 (root)");
    terminal.press("?");
    terminal.wait_for("Any key closes this");
    terminal.press("??");
    terminal.press("x\x1b");
    terminal.wait_for("MACHINE");

    for (rows, columns) in [(8, 30), (2, 5), (50, 200)] {
        terminal.resize(rows, columns);
    }
    terminal.wait_for("VERSION");
    terminal.press("q");
    terminal.ends(0);
}

#[test]
fn top_keeps_the_figures_of_a_daemon_that_is_gone_and_gives_the_terminal_back() {
    let daemon = Daemon::start();
    daemon.with_tiny_machine("lab");
    let terminal = Terminal::start(&daemon, &["--read-only"]);
    terminal.wait_for("0 of 1 machines on");
    let (_, dir) = daemon.terminate();
    terminal.wait_for("the daemon does not answer");
    assert!(terminal.text().contains("lab"));
    let daemon = Daemon::start_in(dir, |_| {});
    terminal.wait_until_gone("the daemon does not answer");
    signal(terminal.child.id(), "TERM");
    terminal.ends(0);

    let mut terminal = Terminal::start(&daemon, &["--read-only"]);
    terminal.wait_for("0 of 1 machines on");
    terminal.press("s");
    terminal.wait_for("--read-only");
    terminal.press("\x03");
    terminal.ends(0);
}

#[test]
fn top_shows_a_server_of_another_host() {
    let daemon = Daemon::start_in(crate::support::short_dir(), |command| {
        command.args(["--listen", "127.0.0.1:0"]);
    });
    daemon.with_tiny_machine("lab");
    let status: Value = serde_json::from_str(&daemon.cli(&["--json", "status"]).ok()).unwrap();
    let token = daemon.path().join("viewer");
    std::fs::write(&token, daemon.cli(&["token", "create", "wall", "--role", "viewer"]).ok()).unwrap();
    let config = tempfile::tempdir().unwrap();
    let remote = |args: &[&str]| {
        let mut command = headwater();
        command.env("XDG_CONFIG_HOME", config.path()).args(args);
        crate::support::run(&mut command)
    };
    remote(&["login", status["api_url"].as_str().unwrap(), "--token-file", token.to_str().unwrap()]).ok();
    let all: Value = serde_json::from_str(&remote(&["--json", "top", "--once"]).ok()).unwrap();
    assert_eq!((names(&all), &all["status"]["pid"]), (vec!["lab"], &status["pid"]));
}
