//! `headwater doctor`: its report, and its exit code.

use crate::support::{Daemon, headwater, run, short_dir};

fn checks(ran: &str) -> Vec<serde_json::Value> {
    let report: serde_json::Value = serde_json::from_str(ran).unwrap();
    report["checks"].as_array().unwrap().clone()
}

fn outcome(checks: &[serde_json::Value], name: &str) -> String {
    let found = checks.iter().find(|check| check["check"] == name);
    found.unwrap_or_else(|| panic!("{name}: {checks:?}"))["outcome"].as_str().unwrap().to_owned()
}

#[test]
fn doctor_reports_each_check_and_writes_only_when_told() {
    let dir = short_dir();
    let data = dir.path().join("data");
    let at = |args: &[&str]| run(headwater().arg("--data-dir").arg(&data).arg("doctor").args(args));
    let found = checks(&at(&["--json"]).ok());
    for name in ["qemu", "io_uring", "landlock", "qemu-img", "data directory", "free space"] {
        assert_eq!(outcome(&found, name), "ok");
    }
    assert_eq!(outcome(&found, "daemon"), "warn");
    for check in &found {
        assert_eq!(check["outcome"] == "ok", check["advice"].is_null(), "{check}");
    }
    assert!(!found.iter().any(|check| check["check"] == "write speed"));
    assert!(!data.exists());
    let text = at(&["--write"]).ok();
    assert!(text.contains("write speed") && text.contains("0 failed"), "{text}");
}

#[test]
fn doctor_fails_when_a_port_or_the_file_is_no_use() {
    let dir = short_dir();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let file = dir.path().join("c.toml");
    std::fs::write(&file, format!("listen = \"{}\"\n", taken.local_addr().unwrap())).unwrap();
    let doctor = || {
        let ran = run(headwater()
            .arg("--data-dir")
            .arg(dir.path().join("d"))
            .args(["doctor", "--json", "--config"])
            .arg(&file));
        (ran.code, checks(&ran.out))
    };
    let (code, found) = doctor();
    assert_eq!((code, outcome(&found, "port").as_str()), (1, "fail"));
    let configured = dir.path().join("configured");
    std::fs::write(&file, format!("data-dir = \"{}\"\n", configured.display())).unwrap();
    let ran = run(headwater().args(["doctor", "--config"]).arg(&file)).ok();
    assert!(ran.contains(configured.to_str().unwrap()), "{ran}");
    std::fs::write(&file, "nonsense = 1\n").unwrap();
    let (code, found) = doctor();
    assert_eq!((code, outcome(&found, "configuration").as_str()), (1, "fail"));
}

#[test]
fn doctor_fails_without_qemu_and_says_what_to_install() {
    let dir = short_dir();
    let ran = run(headwater().env("PATH", "/nowhere").arg("--data-dir").arg(dir.path()).arg("doctor"));
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("fail  qemu") && ran.out.contains("apt-get install qemu-system-x86"), "{ran:?}");
}

#[test]
fn doctor_finds_a_daemon_that_runs() {
    let daemon = Daemon::start();
    let found = checks(&daemon.cli(&["doctor", "--json"]).ok());
    assert_eq!(outcome(&found, "daemon"), "ok");
}
