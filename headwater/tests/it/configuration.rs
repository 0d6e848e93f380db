//! The configuration file: `serve --config`, `config check`, `config show`, and SIGHUP.

use std::path::Path;

use crate::support::{Daemon, headwater, run, short_dir, signal};

fn start_with(file: &Path, text: &str) -> Daemon {
    std::fs::write(file, text).unwrap();
    Daemon::start_in(short_dir(), |command| {
        command.arg("--config").arg(file);
    })
}

#[test]
fn a_file_with_errors_is_refused_with_their_lines() {
    let dir = short_dir();
    let file = dir.path().join("headwater.toml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "log = \"info\"\ncache_ram = \"1G\"\nresume = 1\n").unwrap();
    let line = |number: u32| format!("{path}:{number}: ");
    let words = [&line(2)[..], "did you mean 'cache-ram'?", &line(3), "takes true or false"];
    run(headwater().args(["config", "check", path])).fails(2, &words);
    run(headwater().args(["config", "show", path])).fails(2, &words);
    run(headwater().args(["serve", "--config", path])).fails(2, &words);
    run(headwater().args(["config", "check", "/no/such/file"])).fails(3, &["/no/such/file"]);

    std::fs::write(&file, "scrub-pause = 5\n").unwrap();
    run(headwater().args(["config", "check", path])).fails(2, &[path, "--scrub"]);
}

#[test]
fn config_show_says_where_each_value_comes_from() {
    let dir = short_dir();
    let file = dir.path().join("headwater.toml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "\nscrub = \"1M\"\nlog = \"warn\"\n").unwrap();
    assert!(run(headwater().args(["config", "check", path])).ok().contains("2 keys are set"));
    let shown = run(headwater().env("HEADWATER_LOG", "error").args(["config", "show", path, "--json"])).ok();
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let of = |key: &str| {
        let settings = shown["settings"].as_array().unwrap();
        let found = settings.iter().find(|setting| setting["key"] == key).unwrap();
        (found["values"].clone(), found["from"].as_str().unwrap().to_owned())
    };
    assert_eq!(of("scrub"), (serde_json::json!(["1M"]), format!("{path}:2")));
    assert_eq!(of("log"), (serde_json::json!(["error"]), "environment, HEADWATER_LOG".to_owned()));
    assert_eq!(of("boot-http"), (serde_json::json!(["80"]), "default".to_owned()));
    assert_eq!(of("listen"), (serde_json::json!([]), "default".to_owned()));
}

#[test]
fn a_daemon_takes_its_settings_from_the_file() {
    let dir = short_dir();
    let daemon = start_with(&dir.path().join("c.toml"), "listen = \"127.0.0.1:0\"\nlog-format = \"json\"\n");
    let ready = daemon.log.lines().last().unwrap();
    let ready: serde_json::Value = serde_json::from_str(ready).expect("log-format counts");
    assert!(ready["fields"]["api"].as_str().unwrap().starts_with("http://127.0.0.1:"), "{ready}");
}

#[test]
fn sighup_reloads_what_it_can_and_names_the_rest() {
    let dir = short_dir();
    let file = dir.path().join("c.toml");
    let daemon = start_with(&file, "log = \"info\"\n");
    let reload = |text: &str| {
        std::fs::write(&file, text).unwrap();
        signal(daemon.pid(), "HUP");
    };
    reload("log = \"info\"\nscrub = \"1M\"\nresume = true\n");
    daemon.wait_for_log(&["changed settings take effect after a restart", "resume"]);
    daemon.wait_for_log(&["reloaded the configuration", "scrub"]);
    reload("log = inof\n");
    daemon.wait_for_log(&["cannot reload the configuration", "c.toml:1: it is not TOML"]);
    // The filter counts: this level was silent before.
    assert_eq!(daemon.count_in_log("DEBUG"), 0);
    reload("log = \"debug\"\n");
    daemon.wait_for_log(&["reloaded the configuration", "log, scrub"]);
    daemon.cli(&["status"]).ok();
    reload("log = \"debug\"\ngroup-access = true\n");
    daemon.wait_for_log(&["DEBUG"]);
}
