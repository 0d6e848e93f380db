//! Servers of stores that are there, and answer that they are busy: commands wait for them, and say so. And servers that are gone while
//! others are there: that is an alarm.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use headwater_testkit::{FileServer, HttpFault, wait_until};
use serde_json::Value;

use crate::stores::{exported, made_by_a_daemon, store, text};
use crate::support::{self, Daemon, headwater, run};

const FOURTH: HttpFault = HttpFault::Busy { each: 4, status: 503, retry_after: 1 };
const ALWAYS: HttpFault = HttpFault::Busy { each: 1, status: 429, retry_after: 1 };

#[test]
fn a_server_that_is_now_and_then_busy_fails_no_command() {
    let (data_dir, disk) = made_by_a_daemon();
    let server = FileServer::start(&data_dir.path().join("store"), None);
    let (url, dir) = (server.url(), support::short_dir());
    server.fail_all(FOURTH);
    // Each command begins with another one of the four.
    for number in 0..4 {
        let target = dir.path().join(number.to_string());
        store(&["copy", &url, text(&target), "disk@1"]).ok();
        store(&["verify", text(&target)]).ok();
        store(&["verify", &url, "disk@1"]).ok();
        assert!(exported(&["disk", "--from", &url]) == disk);
        run(headwater().args(["store", "verify", "http://127.0.0.1:1", "disk"])).fails(1, &["refused"]);
    }
    let daemon = Daemon::start();
    daemon.cli(&["image", "pull", &url, "disk@1"]).ok();
    daemon.cli(&["image", "verify", "disk@1"]).ok();
}

#[test]
fn a_copy_waits_as_long_as_it_takes_for_a_busy_server_and_says_so() {
    let (data_dir, _) = made_by_a_daemon();
    let server = FileServer::start(&data_dir.path().join("store"), None);
    let dir = support::short_dir();
    server.fail_all(ALWAYS);
    let mut copy = headwater()
        .args(["store", "copy", &server.url(), text(&dir.path().join("copy")), "disk@1", "--log", "off"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(copy.stderr.take().unwrap()).lines().map_while(Result::ok);
    let waits = said.find(|line| line.contains("waiting for a busy server"));
    assert!(waits.expect("it says that it waits").contains("too busy"));
    server.fail_all(HttpFault::None);
    said.for_each(drop);
    assert!(copy.wait().unwrap().success());
    store(&["verify", text(&dir.path().join("copy"))]).ok();
}

#[test]
fn one_of_two_servers_that_is_gone_is_an_alarm_until_it_is_back() {
    let (data_dir, _) = made_by_a_daemon();
    let start = || FileServer::start(&data_dir.path().join("store"), None);
    let (stays, mut goes) = (start(), start());
    let from = format!("{},{}", stays.url(), goes.url());
    let daemon = Daemon::start_in(support::short_dir(), |command| {
        command.args(["--from", &from]);
    });
    let alarms = || -> Vec<Value> {
        let status: Value = serde_json::from_str(&daemon.cli(&["status", "--json"]).ok()).unwrap();
        let of_store = |alarm: &&Value| alarm["message"].as_str().unwrap().contains("servers of the store");
        status["alarms"].as_array().unwrap().iter().filter(of_store).cloned().collect()
    };
    assert!(alarms().is_empty());
    goes.kill();
    wait_until("there is an alarm", || !alarms().is_empty());
    let raised = alarms();
    let message = raised[0]["message"].as_str().unwrap();
    assert_eq!((raised.len(), raised[0]["subject"].as_str()), (1, Some("store")));
    assert!(
        message.contains(&format!("1 of 2 servers of the store cannot be reached: {}", goes.url())),
        "{message}"
    );
    goes.revive();
    wait_until("the alarm is over", || alarms().is_empty());
}
