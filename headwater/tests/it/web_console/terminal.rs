//! The terminal on a serial console in the page: what it shows is what another terminal emulator shows of the same bytes.

use std::num::NonZeroU16;

use headwater_testkit::Rng;
use serde_json::{Value, json};

use super::browser::Browser;
use super::{link, with_console};
use crate::support::{Daemon, short_dir};

const ROWS: u16 = 24;
const COLUMNS: u16 = 80;

/// Sequences without the keys that the guest takes for commands. It prints everything else as it is.
const PIECES: [&str; 30] = [
    "hello ",
    "\u{1b}[2J",
    "\u{1b}[H",
    "\u{1b}[7;33H",
    "\u{1b}[24;70H",
    "\u{1b}[K",
    "\u{1b}[1K",
    "\u{1b}[2K",
    "\u{1b}[1J",
    "\u{1b}[J",
    "\u{1b}[2L\r",
    "\u{1b}[M\r",
    "\u{1b}[3@",
    "\u{1b}[2P",
    "\u{1b}[4X",
    "\u{1b}[A",
    "\u{1b}[3B",
    "\u{1b}[5C",
    "\u{1b}[2D",
    "\u{1b}[12G",
    "\u{1b}[9d",
    "\u{1b}[S",
    "\u{1b}[2T",
    "\u{1b}M",
    "\u{1b}7",
    "\u{1b}8",
    "\u{1b}[1;31mbold\u{1b}[0m",
    "\t",
    "\u{8}",
    "a long line that meets the end of the glass and goes on in the next one ",
];

/// The rows of the page's terminal.
const SHOWN: &str = "[...document.querySelectorAll('.screen .line')].slice(-24)\
    .map(line => line.textContent.replaceAll('\\u00a0', ' ').trimEnd())";

const ATTACH: &str = "[...document.querySelectorAll('button')].find(button => button.innerText === 'Attach')";

/// Opens the console of the machine `lab`.
fn open(browser: &mut Browser, daemon: &Daemon, more: &[&str]) {
    browser.open(&link(daemon, more));
    browser.wait("document.body.innerText.includes('No alarms')");
    browser.value("location.hash = '#/machines/lab'");
    let console = "[...document.querySelectorAll('button')].find(button => button.innerText === 'Console')";
    browser.wait(&format!("{console}?.disabled === false"));
    browser.value(&format!("{console}.click()"));
}

fn attach(browser: &mut Browser) {
    browser.wait(&format!("{ATTACH}?.disabled === false"));
    browser.value(&format!("{ATTACH}.click()"));
}

/// Types or pastes a text.
fn send(browser: &mut Browser, text: &str) {
    let field = "document.querySelector('.terminal textarea')";
    browser.value(&format!(
        "{field}.value = {}, {field}.dispatchEvent(new Event('input', {{ bubbles: true }}))",
        json!(text)
    ));
}

#[test]
fn the_terminal_in_the_page_shows_what_another_emulator_shows() {
    let daemon = with_console(short_dir(), "127.0.0.1:0");
    daemon.with_tiny_machine("lab");
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    let mut browser = Browser::start();
    open(&mut browser, &daemon, &[]);
    browser.wait("document.querySelector('pre')?.innerText.includes('login: ')");
    attach(&mut browser);
    browser.wait("document.activeElement.matches('.terminal textarea')");
    // The keyboard is not caught: Ctrl-] leads out of the terminal.
    browser.value(
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: ']', ctrlKey: true, bubbles: true }))",
    );
    assert_eq!(browser.value("document.activeElement.innerText"), "Detach");

    let cells = |count| NonZeroU16::new(count).unwrap();
    let mut rng = Rng::new(40);
    for round in 0..4 {
        let mut emulator = vt100::Parser::new(cells(ROWS), cells(COLUMNS), 0);
        let mut text = String::new();
        let mut print = |piece: &str| {
            emulator.process(piece.as_bytes());
            text.push_str(piece);
            // Emulators differ in what moves a cursor that waits behind the last column.
            if emulator.screen().cursor_position().1 >= COLUMNS {
                emulator.process(b"x");
                text.push('x');
            }
        };
        print("\u{1b}[0m\u{1b}[2J\u{1b}[H\u{1b}7");
        for _ in 0..60 {
            print(PIECES[rng.index(PIECES.len())]);
        }
        print(&format!("\u{1b}[24;1H\u{1b}[2Kend {round}"));
        send(&mut browser, &text);
        browser.wait(&format!("{SHOWN}.at(-1) === 'end {round}'"));
        let expected: Vec<String> =
            emulator.screen().rows(0, COLUMNS).map(|row| row.trim_end().to_owned()).collect();
        assert_eq!(browser.value(SHOWN), Value::from(expected), "{text:?}");
    }

    // One client at a time has it, and a second page shows who that is.
    let mut other = Browser::start();
    open(&mut other, &daemon, &["--role", "operator"]);
    attach(&mut other);
    other.wait("document.body.innerText.includes('is attached to it')");
    browser.value("document.activeElement.click()");
    browser.wait("!document.querySelector('.terminal')");
    attach(&mut other);
    other.wait("document.activeElement.matches('.terminal textarea')");
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    other.wait("document.body.innerText.includes('The console was closed')");
    assert_eq!(browser.value("window.violations.join()"), "");
    assert_eq!(browser.complaints(), Vec::<&Value>::new());
}
