//! The web console in a real browser, with a machine that runs, and `headwater console`.

mod actions;
pub mod browser;
mod display;
mod terminal;
mod update;

use self::browser::Browser;
use crate::support::{Daemon, short_dir};

/// A link that opens the console of a daemon.
fn link(daemon: &Daemon, more: &[&str]) -> String {
    let args = [&["console", "--print"], more].concat();
    let url = daemon.cli(&args).ok().trim().to_owned();
    assert!(url.starts_with("http://127.0.0.1:") && url.contains("/#ticket="), "{url}");
    url
}

fn with_console(dir: tempfile::TempDir, address: &str) -> Daemon {
    Daemon::start_in(dir, |command| {
        command.args(["--console", address]);
    })
}

/// The state that the table shows of the machine `lab`.
fn state_is(state: &str) -> String {
    format!("document.querySelector('tr[data-machine=lab] td')?.innerText.trim() === '{state}'")
}

const START: &str = "button[aria-label='start lab']";
const STOP: &str = "button[aria-label='stop lab']";

#[test]
fn a_machine_is_started_in_the_browser_and_seen_to_run() {
    let daemon = with_console(short_dir(), "127.0.0.1:0");
    daemon.with_tiny_machine("lab");
    let url = link(&daemon, &[]);
    let address = url.split('/').nth(2).unwrap().to_owned();
    let mut browser = Browser::start();
    browser.open(&url);
    browser.wait("document.body.innerText.includes('No alarms')");
    // The ticket is neither in the address nor in what the browser keeps.
    assert_eq!(browser.value("location.href"), format!("http://{address}/#/"));
    assert_eq!(
        browser.value("document.cookie + Object.keys(localStorage) + Object.keys(sessionStorage)"),
        ""
    );
    browser.value("window.mark = 'not loaded again'");

    browser.value("document.querySelector('nav a[href=\"#/machines\"]').click()");
    browser.wait(&state_is("created"));
    browser.press("/");
    browser.wait("document.activeElement.id === 'filter'");
    browser.press_enter_on(START);
    browser.wait(&state_is("running"));
    assert_eq!(daemon.machine("lab")["state"], "running");
    // Changes by others are seen too.
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    browser.wait(&state_is("stopped"));
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    browser.wait(&state_is("running"));

    // Nothing is lost by one key.
    browser.press_enter_on(STOP);
    browser.wait("document.querySelector('dialog').open && document.activeElement.innerText === 'Cancel'");
    assert!(browser.text().contains("headwater machine stop lab"));
    browser.press("Enter");
    browser.wait("!document.querySelector('dialog')");
    assert_eq!(daemon.machine("lab")["state"], "running");
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();

    // A daemon that starts again has the session still.
    let (_, dir) = daemon.terminate();
    browser.wait("document.body.innerText.includes('These are the figures of')");
    assert_eq!(browser.value(&format!("document.querySelector({START:?}).disabled")), true);
    let daemon = with_console(dir, &address);
    browser.wait("!document.body.innerText.includes('These are the figures of')");
    browser.press_enter_on(START);
    browser.wait(&state_is("running"));
    assert_eq!(browser.value("window.mark"), "not loaded again");
    assert_eq!(browser.value("window.violations.join()"), "");

    browser.new_page();
    browser.open(&link(&daemon, &["--role", "viewer"]));
    browser.wait("document.body.innerText.includes('No alarms')");
    browser.value("document.querySelector('nav a[href=\"#/machines\"]').click()");
    browser.wait(&state_is("running"));
    assert_eq!(browser.value(&format!("document.querySelector({STOP:?}).disabled")), true);
    assert!(browser.text().contains("Your session has the role viewer"));

    assert_eq!(browser.value("window.violations.join()"), "");
    assert_eq!(browser.complaints(), Vec::<&serde_json::Value>::new());
    let own = format!("http://{address}/");
    let foreign: Vec<_> = browser.requests().into_iter().filter(|url| !url.starts_with(&own)).collect();
    assert_eq!(foreign, Vec::<String>::new());
    // The policy is in force, and a violation would have been seen.
    let refused = "fetch('http://localhost:1/').then(() => 'sent', () => 'refused')";
    assert_eq!(browser.value(refused), "refused");
    browser.wait("window.violations.join().includes('connect-src http://localhost:1/')");
}

#[test]
fn a_link_needs_a_console_and_a_role_that_sees_something() {
    let daemon = Daemon::start();
    daemon.cli(&["console"]).fails(4, &["this daemon serves no web console", "--console 127.0.0.1:9471"]);
    let daemon = with_console(short_dir(), "127.0.0.1:0");
    daemon.cli(&["console", "--role", "metrics"]).fails(2, &["role metrics"]);
    let told: serde_json::Value = serde_json::from_str(&daemon.cli(&["--json", "console"]).ok()).unwrap();
    assert!(
        told["url"].as_str().unwrap().contains("/#ticket=hws_") && told["expires_at_ms"].is_u64(),
        "{told}"
    );
}

#[test]
fn a_token_signs_in_over_tls_until_it_is_revoked() {
    let daemon = with_console(short_dir(), "0.0.0.0:0");
    let status: serde_json::Value = serde_json::from_str(&daemon.cli(&["--json", "status"]).ok()).unwrap();
    let url = status["console_url"].as_str().unwrap();
    assert!(
        url.starts_with("https://") && daemon.cli(&["console", "--print"]).ok().starts_with(url),
        "{url}"
    );
    let port = url.trim_end_matches('/').rsplit(':').next().unwrap();
    let token = daemon.cli(&["token", "create", "wall", "--role", "viewer"]).ok().trim().to_owned();
    let mut browser = Browser::start();
    browser.open(&format!("https://127.0.0.1:{port}/"));
    let sign_in = |browser: &mut Browser, token: &str| {
        browser.wait("document.querySelector('#token')");
        browser.value("document.querySelector('#token').focus()");
        browser.type_text(token);
        browser.press("Enter");
    };
    sign_in(&mut browser, "hwt_wrong");
    browser.wait("document.body.innerText.includes('There is no such token')");
    sign_in(&mut browser, &token);
    browser
        .wait("document.body.innerText.includes('Overview') && document.body.innerText.includes('viewer')");
    assert!(!browser.text().contains(&token));
    daemon.cli(&["token", "revoke", "wall"]).ok();
    browser.wait("document.querySelector('#token')");
    assert_eq!(browser.complaints(), Vec::<&serde_json::Value>::new());
}
