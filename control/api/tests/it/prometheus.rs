//! The alert rules: Prometheus' own tool accepts them and sees each of them fire, and each has a runbook.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::expressions::unknown;

fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(tree().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

const RULES: &str = "packaging/prometheus/headwater.rules.yml";
const TESTS: &str = "packaging/prometheus/headwater.test.yml";

/// The values of a key, in a file that has each on a line of its own.
fn values<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines()
        .filter_map(move |line| line.trim_start_matches([' ', '-', '{']).strip_prefix(key))
        .map(str::trim)
}

/// Runs promtool in the directory of the rules.
fn promtool(arguments: &[&str]) {
    let output = Command::new("promtool")
        .args(arguments)
        .current_dir(tree().join("packaging/prometheus"))
        .output()
        .expect("promtool (Debian package prometheus) runs");
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", said(&output.stdout), said(&output.stderr));
}

#[test]
fn prometheus_accepts_the_rules_and_each_fires() {
    promtool(&["check", "rules", "headwater.rules.yml"]);
    promtool(&["test", "rules", "headwater.test.yml"]);
    // Of each rule, the tests expect an alert, and also that it does not come too early.
    let (rules, tests) = (read(RULES), read(TESTS));
    for alert in values(&rules, "alert:") {
        let fires = format!("- alertname: {alert}\n");
        let waits = format!("{{alertname: {alert}, ");
        assert!(tests.contains(&fires), "{TESTS} has no test in which {alert} fires");
        assert!(tests.contains(&waits), "{TESTS} has no test in which {alert} does not fire yet");
    }
}

#[test]
fn the_rules_use_metrics_that_exist() {
    for path in [RULES, TESTS] {
        assert_eq!(unknown(&read(path)), [""; 0], "{path}");
    }
}

#[test]
fn each_rule_has_a_runbook() {
    let (rules, page) = (read(RULES), read("docs/alerts.md"));
    let alerts: Vec<&str> = values(&rules, "alert:").collect();
    let headings: Vec<&str> = values(&page, "## ").filter(|name| name.starts_with("Headwater")).collect();
    assert_eq!(alerts, headings, "the rules, and the headings of docs/alerts.md, in the same order");
    assert_eq!(alerts.len(), alerts.iter().collect::<BTreeSet<_>>().len());
    let runbooks: Vec<&str> = values(&rules, "runbook:").collect();
    let expected: Vec<String> = alerts
        .iter()
        .map(|alert| format!("/usr/share/doc/headwater/alerts.md#{}", alert.to_lowercase()))
        .collect();
    assert_eq!(runbooks, expected);
    for section in page.split("\n## ").filter(|section| section.starts_with("Headwater")) {
        let name = section.lines().next().unwrap_or_default();
        for part in ["**Means**", "**Look at**", "**Do**"] {
            assert!(section.contains(part), "docs/alerts.md: {name} has no {part}");
        }
    }
}
