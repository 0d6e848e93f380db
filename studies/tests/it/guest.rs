//! `headwater-study 003 --guest` when its disk fails. The guest itself is in the tests of `headwater`, which build its disk.

use std::process::Command;

use super::{cells_of, directory, read, study, text};

#[test]
fn a_guest_whose_disk_fails_leaves_a_report_that_says_so() {
    let dir = directory();
    let (program, out) = (dir.path().join("disk"), dir.path().join("report"));
    let script = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho the cache is broken >&2\nexit 3\n";
    // Another process writes it: a program that this one has open for writing, as a child of another test may for a moment, cannot be run.
    let mut write = Command::new("sh");
    write.args(["-c", "printf '%s' \"$1\" >\"$2\" && chmod 755 \"$2\"", "sh", script]).arg(&program);
    assert!(write.status().unwrap().success());
    let output = study()
        .args(["003", "--quick", "--guest"])
        .arg(&program)
        .arg("--headwater")
        .arg(&program)
        .arg("--out")
        .arg(&out)
        .output()
        .unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the study failed") && said.contains("the cache is broken"), "{said}");
    assert!(read(&out.join("index.html")).contains("The study failed: the scenario No RAM cache failed"));
    assert!(cells_of(&out).iter().any(|cell| cell == "not measured"));
    let json: serde_json::Value = serde_json::from_str(&read(&out.join("results.json"))).unwrap();
    assert!(json["failure"].as_str().unwrap().contains("the cache is broken"), "{json}");
    let mut left: Vec<String> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["disk", "report"]);
}
