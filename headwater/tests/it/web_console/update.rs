//! The whole job in the web console: import an image, make a catalog, update its machines, take the update back.

use super::browser::Browser;
use super::{link, with_console};
use crate::support::{Daemon, short_dir, tiny_disk};

/// The button that makes something new, at the head of a screen.
const MAKE: &str = ".head .buttons button.primary";
const CONFIRM: &str = "dialog button.primary";

/// Whether the row or card shows a text.
pub fn shows(selector: &str, text: &str) -> String {
    format!("document.querySelector({selector:?})?.innerText.includes({text:?})")
}

/// Waits until a task has ended in this way, and the dialog that began it is gone.
pub fn wait_for_task(browser: &mut Browser, state: &str, outcome: &str) {
    browser.wait("!document.querySelector('dialog')");
    browser.wait(&shows(&format!(".task[data-state={state}]"), outcome));
}

fn import(browser: &mut Browser, daemon: &Daemon, file: &str, last_byte: u8) {
    let mut disk = tiny_disk();
    *disk.last_mut().unwrap() = last_byte;
    let path = daemon.path().join(file);
    std::fs::write(&path, disk).unwrap();
    browser.press_enter_on(MAKE);
    browser.fill("input[name=source]", path.to_str().unwrap());
}

/// From an empty daemon to two machines, one of which runs.
fn make_machines(browser: &mut Browser, daemon: &Daemon) {
    browser.wait("document.body.innerText.includes('three steps to the first machine')");
    browser.follow("#/images");
    browser.wait("document.body.innerText.includes('There are no images yet')");
    browser.press_enter_on(MAKE);
    browser.fill("input[name=source]", "/nowhere/tiny.raw");
    assert!(browser.text().contains("headwater image import /nowhere/tiny.raw --name tiny"));
    browser.press("Enter");
    // On a busy host the task has begun before it fails: then the dialog is gone, and the task says why.
    let (in_dialog, in_task) =
        (shows("dialog [role=alert]", "No such file"), shows(".task[data-state=failed]", "No such file"));
    browser.wait(&format!("{in_dialog} || {in_task}"));
    browser.value("document.querySelector('dialog')?.close()");
    browser.wait("!document.querySelector('dialog')");
    import(browser, daemon, "tiny.raw", 1);
    browser.press("Enter");
    wait_for_task(browser, "done", "Made tiny@1");

    browser.follow("#/catalogs");
    browser.wait("document.body.innerText.includes('There are no catalogs yet')");
    browser.press_enter_on(MAKE);
    browser.fill("input[name=name]", "class");
    browser.fill("input[name=count]", "2");
    assert!(browser.text().contains("headwater catalog create class tiny --count 2"));
    browser.press("Enter");
    wait_for_task(browser, "done", "2 made, 0 removed");
    browser.press_enter_on("button[aria-label='start class-01']");
    browser.wait(&shows("tr[data-machine=class-01]", "running"));
    assert_eq!(daemon.machine("class-01")["version"], "tiny@1");
    assert_eq!(daemon.machine("class-02")["state"], "created");
}

/// A second version, which is old news to no machine yet.
fn promote_a_second_version(browser: &mut Browser, daemon: &Daemon) {
    browser.follow("#/images");
    browser.follow("#/images/tiny");
    import(browser, daemon, "tiny-2.raw", 2);
    browser.press("Enter");
    wait_for_task(browser, "done", "Made tiny@2");
    browser.press_enter_on("button[aria-label='Promote tiny@2']");
    assert!(browser.text().contains("headwater image promote tiny@2 production"));
    browser.press_enter_on(CONFIRM);
    browser.wait(&shows("[data-channel=production]", "@2"));
    browser.follow("#/catalogs");
    browser.follow("#/catalogs/class");
    browser.wait(&shows("tr[data-machine=class-01]", "old"));
    assert_eq!(daemon.machine("class-01")["old"], true);
}

fn roll(browser: &mut Browser, health: &str) {
    browser.press_enter_on("[data-action=roll]");
    browser.fill("input[name=health]", health);
    browser.press_enter_on(CONFIRM);
    browser.wait("!document.querySelector('dialog')");
}

/// The machine's guest has no agent, so nobody says that its users have logged out.
fn roll_waits_for_users(browser: &mut Browser, daemon: &Daemon) {
    browser.press_enter_on("[data-action=roll]");
    browser.fill("input[name=wait-idle]", "soon");
    browser.wait(&shows("dialog", "the wait for users is a time such as 30m"));
    assert_eq!(browser.value(&format!("document.querySelector({CONFIRM:?}).disabled")), true);
    browser.fill("input[name=wait-idle]", "30m");
    browser.fill("input[name=deadline]", "20m");
    browser.wait(&shows("dialog", "--wait-idle 30m --deadline 20m --no-wait"));
    browser.press_enter_on(CONFIRM);
    browser.wait("!document.querySelector('dialog')");
    // The deadline ends the wait before the half hour is over.
    browser.wait(&shows(".task[data-state=running]", "class-01 (no answer; left at"));
    browser.press_enter_on(".task[data-state=running] button[aria-label^='Cancel']");
    wait_for_task(browser, "cancelled", "roll");
    browser.press_enter_on(".task[data-state=cancelled] button");
    browser.wait("!document.querySelector('.task[data-state=cancelled]')");
    assert_eq!(daemon.machine("class-01")["version"], "tiny@1");
}

#[test]
fn an_update_is_rolled_and_taken_back_in_the_browser() {
    let daemon = with_console(short_dir(), "127.0.0.1:0");
    let mut browser = Browser::start();
    browser.open(&link(&daemon, &[]));
    make_machines(&mut browser, &daemon);
    promote_a_second_version(&mut browser, &daemon);
    roll_waits_for_users(&mut browser, &daemon);

    // This guest has no agent that would run the command, so the canary never is healthy.
    roll(&mut browser, "true");
    browser.wait(&shows(".task[data-state=running]", "of 1 machines on tiny@2"));
    browser.press_enter_on(".task[data-state=running] button[aria-label^='Cancel']");
    wait_for_task(&mut browser, "cancelled", "roll");
    browser.wait(&shows("tr[data-machine=class-01]", "tiny@1"));
    assert_eq!(daemon.machine("class-01")["version"], "tiny@1");
    roll(&mut browser, "");
    wait_for_task(&mut browser, "done", "Moved 1 machine from tiny@1 to tiny@2");
    browser.wait(&shows("tr[data-machine=class-01]", "tiny@2"));
    assert_eq!(daemon.machine("class-01")["version"], "tiny@2");

    browser.follow("#/machines");
    // The browser delivers keys before it shows the next screen.
    browser.wait("document.querySelector('#filter')");
    browser.press("/");
    browser.wait("document.activeElement?.id === 'filter'");
    browser.type_text("is:on version:tiny@2");
    browser.wait("[...document.querySelectorAll('tr[data-machine]')].map(row => row.dataset.machine).join() === 'class-01'");
    browser.type_text(" state:run");
    browser.wait("document.body.innerText.includes('is not possible')");
    browser.follow("#/tasks");
    browser.wait("document.querySelectorAll('tr[data-task]').length === 7");
    browser.follow("#/history");
    browser.fill("#subject", "catalog class");
    browser.press("Enter");
    browser.wait("document.querySelectorAll('main tbody tr').length > 3 && !document.querySelector('main tbody').innerText.includes('machine class-01')");

    browser.new_page();
    browser.open(&link(&daemon, &["--role", "operator"]));
    browser.follow("#/images");
    browser.wait("document.querySelector('[data-image=tiny]')");
    assert_eq!(browser.value(&format!("document.querySelector({MAKE:?}).disabled")), true);
    assert!(browser.text().contains("needs admin"));
    assert_eq!(browser.value("window.violations.join()"), "");
    assert_eq!(browser.complaints(), Vec::<&serde_json::Value>::new());
}
