//! `headwater-study 003 --guest`: a real guest, whose disk is this program's export.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use headwater_studies::studies::guest_copies::{Report, Setup};
use headwater_studies::trace::{Kind, Trace};

use crate::guests::guest;

/// Files that the guest copies in a quick run.
const COPIED_BYTES: u64 = 8 * 4_000_000;

/// On a disk: memory has no direct I/O.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

fn setup() -> Setup {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_headwater"));
    Setup::new(guest().into(), program, 1, true).expect("guest and programs are there")
}

/// One study at a time: all guests of studies have the same name.
static ONE: Mutex<()> = Mutex::new(());

/// Exports and guests of a study that this process started.
fn left_over() -> Vec<String> {
    let own = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").expect("/proc").filter_map(Result::ok);
    let of_own = processes.filter(|process| {
        let stat = std::fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        fields.split_whitespace().nth(1) == Some(&own)
    });
    let lines = of_own.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    let is_of_study = |line: &String| line.contains("guest=study,") || line.contains("requests.rec");
    lines.filter(is_of_study).collect()
}

#[test]
fn a_guest_that_copies_files_writes_less_with_ram() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (dir, setup) = (directory(), setup());
    let results = setup.run(dir.path(), &AtomicBool::new(false), &mut |_| ());
    let report = Report { setup: &setup, results: &results };
    assert_eq!(results.failure(), None);
    // Programs that the study started are gone, with their files.
    assert_eq!(left_over(), Vec::<String>::new());
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 0);
    report.files().and_then(|files| files.write(dir.path())).expect("the report is written");
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).expect(name);
    let json: serde_json::Value = serde_json::from_str(&read("results.json")).expect("JSON");
    let outcomes = json["outcomes"].as_array().expect("outcomes");
    assert_eq!(outcomes.len(), 2);
    let total = |number: usize, name: &str| outcomes[number]["totals"][name].as_u64().expect("a count");
    // Each request of the guest is an operation without a RAM cache. With one, a write of the overflow is up to 2 MiB.
    assert_eq!(total(0, "storage_reads") + total(0, "storage_writes"), total(0, "requests"));
    assert!(total(0, "storage_bytes") > COPIED_BYTES, "{outcomes:?}");
    assert!(total(1, "storage_writes") < total(0, "storage_writes") / 2, "{outcomes:?}");
    let ram = outcomes[1]["ram_bytes"].as_array().expect("RAM over time");
    assert!(ram.iter().all(|bytes| bytes.as_u64().is_some_and(|bytes| bytes <= 16 << 20)), "{ram:?}");
    // The copies do not fit in 16 MiB.
    assert!(total(1, "storage_writes") >= 4, "{outcomes:?}");
    // The recordings have all that was copied, and the phases of the guest.
    for number in 1..=2 {
        let recording = dir.path().join(format!("guest-{number}.rec"));
        let trace = Trace::load(&[recording]).expect("a recording");
        let writes = trace.volumes[0].requests.iter().filter(|request| request.kind == Kind::Write);
        assert!(writes.map(|write| write.bytes).sum::<u64>() > COPIED_BYTES);
        assert_eq!(trace.notes, Vec::<String>::new());
        let phases = read(&format!("guest-{number}.phases"));
        let names: Vec<&str> = phases.lines().filter_map(|line| line.split('\t').next()).collect();
        assert_eq!(names, ["boot", "logon", "segment 1"]);
    }
    let page = read("index.html");
    assert!(page.contains("in a real guest") && !page.contains("not measured"), "{page}");
}

#[test]
fn an_interrupted_guest_leaves_no_program_and_no_file() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (dir, setup) = (directory(), setup());
    let stop = AtomicBool::new(false);
    // The export runs, and the guest is about to boot.
    let mut running = Vec::new();
    let results = setup.run(dir.path(), &stop, &mut |_| {
        running = left_over();
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(running.len(), 1, "{running:?}");
    assert_eq!(results.failure(), None);
    assert_eq!(left_over(), Vec::<String>::new());
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 0);
    let text = Report { setup: &setup, results: &results }.text();
    assert!(text.contains("The study was interrupted") && text.contains("not measured"), "{text}");
}
