//! Tests the programs that study 002 runs: they are optional, and none of them outlives the study.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use headwater_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};

use super::{cells_of, check_files, directory, read, study, text};

const SHORT: [&str; 6] = ["002", "--quick", "--seconds", "0.05", "--rounds", "1"];

/// Command lines of programs that mention a directory, without the study itself.
fn programs_in(dir: &Path) -> Vec<String> {
    let name = dir.file_name().unwrap().as_bytes().to_vec();
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let lines = processes.filter_map(|process| std::fs::read(process.join("cmdline")).ok());
    let of_dir = lines.filter(|line| {
        line.starts_with(b"qemu-") && line.windows(name.len()).any(|window| window == name.as_slice())
    });
    of_dir.map(|line| OsStr::from_bytes(&line).to_string_lossy().replace('\0', " ")).collect()
}

/// Runs study 002 until it measures the overlay.
fn measuring(dir: &Path) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut child = study()
        .args(["002", "--quick", "--seconds", "600", "--out"])
        .arg(dir.join("report"))
        .arg("--work-dir")
        .arg(dir)
        // Sockets are in this directory too.
        .env("TMPDIR", dir)
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut lines = lines.skip_while(|line| !line.contains("left: round 1"));
    assert!(lines.next().is_some());
    assert_eq!(programs_in(dir).len(), 2);
    (child, lines)
}

/// The names of a directory's entries.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn study_002_measures_both_overlays_in_the_same_run() {
    let dir = directory();
    let out = dir.path().join("report");
    let output = study().args(SHORT).arg("--out").arg(&out).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let json: serde_json::Value = serde_json::from_str(&read(&out.join("results.json"))).unwrap();
    assert!(json["programs"][0].as_str().unwrap().starts_with("qemu-nbd"), "{}", json["programs"]);
    for name in ["qcow2-none", "qcow2-writeback"] {
        let samples = json["samples"].as_array().unwrap().iter().filter(|sample| sample["case"] == name);
        let requests: Vec<u64> =
            samples.map(|sample| sample["outcomes"]["requests"].as_u64().unwrap()).collect();
        assert!(requests.len() == 3 && requests.iter().all(|requests| *requests > 0), "{name} {requests:?}");
    }
    for title in ["qcow2 overlay, cache=none", "qcow2 overlay, cache=writeback"] {
        assert_eq!(cells_of(&out).iter().filter(|cell| *cell == title).count(), 3, "{title}");
    }
    check_files(&out, &["SHA256SUMS", "index.html", "results.json", "series.csv.zst"]);
}

#[test]
fn without_its_programs_study_002_names_skipped_cases() {
    let dir = directory();
    let without = |out: &Path, arguments: &[&str], path: &str| {
        let mut command: Command = study();
        let output =
            command.args(SHORT).args(arguments).arg("--out").arg(out).env("PATH", path).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let page = read(&out.join("index.html"));
        let cells = cells_of(out);
        assert!(!cells.iter().any(|cell| cell.starts_with("qcow2")), "{cells:?}");
        assert_eq!(cells.iter().filter(|cell| *cell == "Raw disk").count(), 3);
        (page, text(&output))
    };
    let (page, said) = without(&dir.path().join("missing"), &[], "/nonexistent");
    let why = "Skipped: the qcow2 overlays, because qemu-nbd is not installed (Debian's qemu-utils has it).";
    assert!(said.contains(why), "{said}");
    assert!(page.contains("because qemu-nbd is not installed"), "{page}");
    // A model can slow down only the disk of this program.
    let path = std::env::var("PATH").unwrap();
    let (_, said) = without(&dir.path().join("model"), &["--storage", "sas15k:64:raid5"], &path);
    assert!(said.contains("cannot be slowed down to sas15k:64:raid5"), "{said}");
}

#[test]
fn an_interrupted_study_ends_the_programs_that_it_started() {
    let dir = directory();
    let (mut child, lines) = measuring(dir.path());
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    assert_eq!(programs_in(dir.path()), Vec::<String>::new());
    assert_eq!(names(dir.path()), ["report"]);
    assert!(read(&dir.path().join("report/index.html")).contains("The study was interrupted"));
}

#[test]
fn a_killed_study_leaves_no_program_and_no_file() {
    let dir = directory();
    let (mut child, _lines) = measuring(dir.path());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the servers end without their client", || programs_in(dir.path()).is_empty());
    assert_eq!(names(dir.path()), ["report"]);
}
