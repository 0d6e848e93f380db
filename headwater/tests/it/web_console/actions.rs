//! Single machines, seals, many machines at once and tokens in the web console.

use serde_json::Value;

use super::browser::Browser;
use super::update::{shows, wait_for_task};
use super::{link, with_console};
use crate::support::{Daemon, short_dir};

const CREATE: &str = ".head .buttons button.primary";
const CONFIRM: &str = "dialog button.primary";
const CONFIRM_LOSS: &str = "dialog button.danger";

/// Goes to a screen, and waits for its heading.
fn go(browser: &mut Browser, address: &str, heading: &str) {
    browser.value(&format!("location.hash = {address:?}"));
    browser.wait(&format!("document.querySelector('h1').innerText.includes({heading:?})"));
}

/// A machine that has written, made in the page.
fn make_a_machine(browser: &mut Browser, daemon: &Daemon) {
    go(browser, "#/machines", "Machines");
    browser.press_enter_on(CREATE);
    browser.fill("input[name=name]", "desk-1");
    browser.fill("input[name=memory]", "64M");
    browser.fill("input[name=disk]", "1G");
    // The form knows the images a little later than the page is there.
    browser.wait(
        "document.body.innerText.includes('headwater machine create desk-1 tiny --memory 64M --disk 1G')",
    );
    browser.press("Enter");
    browser.wait("document.querySelector('h1').innerText.includes('desk-1')");
    daemon.cli(&["machine", "start", "desk-1", "--wait"]).ok();
    daemon.console("desk-1", "w", Some("W"));
}

#[test]
fn a_machine_is_made_sealed_and_removed_in_the_browser() {
    let daemon = with_console(short_dir(), "127.0.0.1:0");
    daemon.with_tiny_machine("lab");
    let mut browser = Browser::start();
    browser.open(&link(&daemon, &[]));
    browser.wait("document.body.innerText.includes('No alarms')");
    make_a_machine(&mut browser, &daemon);
    browser.press_enter_on("button[aria-label='Seal desk-1']");
    browser.fill("input[name=note]", "of the page");
    assert!(browser.text().contains("headwater machine seal desk-1 --note 'of the page'"));
    browser.press("Enter");
    wait_for_task(&mut browser, "done", "Made tiny@2");
    let sealed: Value =
        serde_json::from_str(&daemon.cli(&["--json", "image", "show", "tiny@2"]).ok()).unwrap();
    assert_eq!(sealed["versions"][0]["note"], "of the page", "{sealed}");

    // All that match the filter, and no other.
    daemon.cli(&["machine", "start", "lab", "--wait"]).ok();
    go(&mut browser, "#/machines?q=desk", "Machines");
    browser.wait("document.querySelectorAll('tr[data-machine]').length === 1");
    browser.press_enter_on("button[data-bulk=stop]");
    assert!(browser.text().contains("headwater machine stop --filter desk --expect 1"));
    browser.press_enter_on(CONFIRM_LOSS);
    // This guest does not shut down by itself.
    daemon.cli(&["machine", "stop", "desk-1", "--force"]).ok();
    browser.wait(&shows("tr[data-machine=desk-1]", "stopped"));
    browser.wait("!document.querySelector('dialog')");
    assert_eq!(daemon.machine("lab")["state"], "running");
    go(&mut browser, "#/machines/desk-1", "desk-1");
    browser.press_enter_on("button[aria-label='Remove desk-1']");
    browser.press_enter_on(CONFIRM_LOSS);
    browser.wait("document.querySelector('h1').innerText === 'Machines'");
    assert!(!daemon.cli(&["machine", "list"]).ok().contains("desk-1"));

    go(&mut browser, "#/images/tiny", "tiny");
    browser.press_enter_on("button[aria-label='Verify tiny@2']");
    browser.press_enter_on(CONFIRM);
    wait_for_task(&mut browser, "done", "No damage in tiny@2");
    assert_eq!(browser.value("window.violations.join()"), "");
    assert_eq!(browser.complaints(), Vec::<&Value>::new());
}

#[test]
fn a_token_is_made_shown_once_and_revoked_in_the_browser() {
    let daemon = with_console(short_dir(), "127.0.0.1:0");
    let mut browser = Browser::start();
    browser.open(&link(&daemon, &[]));
    browser.wait("document.body.innerText.includes('No alarms')");
    go(&mut browser, "#/server", "Server");
    browser.wait("document.body.innerText.includes('There are no tokens')");
    browser.press_enter_on("button[data-action=token]");
    browser.fill("input[name=token]", "wall");
    browser.press("Enter");
    browser.wait(&shows("tr[data-token=wall]", "viewer"));
    let secret = browser.value("document.querySelector('.made code').innerText");
    let secret = secret.as_str().unwrap();
    assert!(secret.starts_with("hwt_"), "{secret}");
    assert!(daemon.cli(&["token", "list"]).ok().contains("wall"));
    // It lets its holder in, by another page.
    let url = link(&daemon, &[]);
    browser.new_page();
    browser.open(url.split('#').next().unwrap());
    browser.fill("#token", secret);
    browser.press("Enter");
    browser.wait("document.body.innerText.includes('viewer')");
    go(&mut browser, "#/server", "Server");
    browser.wait("document.body.innerText.includes('needs admin')");
    assert!(!browser.text().contains("hwt_"));

    browser.new_page();
    browser.open(&url);
    browser.wait("document.body.innerText.includes('No alarms')");
    go(&mut browser, "#/server", "Server");
    browser.press_enter_on("button[aria-label='Revoke wall']");
    browser.press_enter_on(CONFIRM_LOSS);
    browser.wait("document.body.innerText.includes('There are no tokens')");
    assert!(!daemon.cli(&["token", "list"]).ok().contains("wall"));
    assert_eq!(browser.value("window.violations.join()"), "");
}
