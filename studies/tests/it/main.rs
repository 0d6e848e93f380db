//! Tests the program `headwater-study` as a user runs it.

mod guest;
mod peers;
mod sizing;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

fn study() -> Command {
    Command::new(env!("CARGO_BIN_EXE_headwater-study"))
}

/// A directory on a disk, because tmpfs may have no direct I/O.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// Parses the page with an independent XML parser. Returns the texts of all table cells, and the number of plots.
fn cells_and_plots(page: &str) -> (Vec<String>, usize) {
    use quick_xml::events::Event;
    let mut reader = quick_xml::Reader::from_str(page);
    let (mut cells, mut plots, mut is_cell) = (Vec::new(), 0, false);
    loop {
        match reader.read_event().unwrap() {
            Event::Start(tag) => {
                is_cell = tag.name().as_ref() == b"td";
                plots += usize::from(tag.name().as_ref() == b"svg");
                assert_ne!(tag.name().as_ref(), b"script");
            }
            Event::Text(text) if is_cell => cells.push(String::from_utf8(text.to_vec()).unwrap()),
            Event::End(_) => is_cell = false,
            Event::Eof => return (cells, plots),
            _ => {}
        }
    }
}

/// Checks that study 001 ran each case once with each variant, and shows the results.
fn check_study_001(out: &Path, text: &str) {
    let json: serde_json::Value = serde_json::from_str(&read(&out.join("results.json"))).unwrap();
    let samples = json["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 5 * 4);
    assert!(samples.iter().all(|sample| sample["outcomes"]["requests"].as_u64().unwrap() > 0));
    let page = read(&out.join("index.html"));
    let (cells, plots) = cells_and_plots(&page);
    assert_eq!(plots, 2);
    for case in json["cases"].as_array().unwrap() {
        let title = case["title"].as_str().unwrap();
        assert_eq!(cells.iter().filter(|cell| *cell == title).count(), 4, "{title}");
        assert!(text.contains(title), "{title}");
    }
    assert!(!page.contains("not measured"));
    // Nothing but the report is left.
    check_files(out, &["SHA256SUMS", "index.html", "results.json", "series.csv.zst"]);
    check_series(out, &json);
}

/// Checks that the report has these files, and verifies its checksums with `sha256sum`.
fn check_files(out: &Path, expected: &[&str]) {
    let mut names: Vec<String> = std::fs::read_dir(out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, expected);
    let mut check = Command::new("sha256sum");
    let checked = check.args(["--check", "--strict", "SHA256SUMS"]).current_dir(out).output().unwrap();
    assert!(checked.status.success(), "{}", text(&checked));
    assert_eq!(text(&checked).matches(": OK").count(), expected.len() - 1);
}

/// Checks that the counts of each run's seconds add up to its requests. For a raw disk, requests are operations of
/// the disk.
fn check_series(out: &Path, json: &serde_json::Value) {
    let packed = std::fs::read(out.join("series.csv.zst")).unwrap();
    let table = String::from_utf8(zstd::decode_all(&packed[..]).unwrap()).unwrap();
    let head: Vec<&str> = table.lines().next().unwrap().split(',').collect();
    let column = |name: &str| head.iter().position(|found| *found == name).unwrap();
    let rows: Vec<Vec<&str>> = table.lines().skip(1).map(|line| line.split(',').collect()).collect();
    for sample in json["samples"].as_array().unwrap() {
        let (case, round) = (sample["case"].as_str().unwrap(), sample["round"].to_string());
        let is_of = |row: &&Vec<&str>| row[0] == sample["variant"] && row[1] == case && row[2] == round;
        let sum = |names: &[&str]| {
            let figure = |row: &Vec<&str>| {
                names.iter().map(|name| row[column(name)].parse::<u64>().unwrap()).sum::<u64>()
            };
            rows.iter().filter(is_of).map(figure).sum::<u64>()
        };
        let requests = sample["outcomes"]["requests"].as_u64().unwrap();
        assert_eq!(sum(&["reads", "writes"]), requests, "{case}");
        if case.starts_with("raw") {
            assert_eq!(sum(&["disk_reads", "disk_writes"]), requests, "{case}");
        } else {
            let places = ["reads_ram", "reads_packed", "reads_zero", "reads_overflow", "reads_image"];
            assert_eq!(sum(&places), sum(&["reads"]), "{case}");
        }
    }
}

#[test]
fn an_interrupted_study_writes_a_report() {
    let dir = directory();
    let out = dir.path().join("report");
    let mut child = study()
        .args(["001", "--quick", "--seconds", "600", "--out"])
        .arg(&out)
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut lines = lines.skip_while(|line| !line.contains("left: round 1"));
    assert!(lines.next().is_some());
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    let page = read(&out.join("index.html"));
    cells_and_plots(&page);
    assert!(page.contains("The study was interrupted") && page.contains("not measured"));
    let json: serde_json::Value = serde_json::from_str(&read(&out.join("results.json"))).unwrap();
    assert_eq!(json["interrupted"], true);
    check_files(&out, &["SHA256SUMS", "index.html", "results.json", "series.csv.zst"]);
}

#[test]
fn bad_input_is_refused_before_anything_is_written() {
    let dir = directory();
    let unknown = study().args(["007"]).current_dir(dir.path()).output().unwrap();
    assert!(!unknown.status.success());
    assert!(text(&unknown).contains("007") && text(&unknown).contains("001"), "{}", text(&unknown));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    let used = dir.path().join("used");
    std::fs::create_dir(&used).unwrap();
    std::fs::write(used.join("precious"), "x").unwrap();
    let in_use = study().args(["001", "--quick", "--out"]).arg(&used).output().unwrap();
    assert!(!in_use.status.success());
    assert!(text(&in_use).contains("is in use"), "{}", text(&in_use));
    assert_eq!(read(&used.join("precious")), "x");

    let new = dir.path().join("new");
    let options: [(&[&str], &str); 10] = [
        (&["004", "--storage", "p10"], "004 has two storages of its own"),
        (&["001", "--storage", "sas15k:2:raid5"], "RAID 5 has 3 to 64 disks"),
        (&["001", "--storage", "tape"], "one of real, p10, ephemeral and sas15k:N:raid5"),
        (&["000", "--over", "nbd"], "desktops are models in this process"),
        (&["compare", "one"], "name two reports"),
        (&["001", "--guest", "/bin/sh"], "--guest is for study 003"),
        (&["003", "--headwater", "/bin/true"], "--guest"),
        (&["003", "--guest", "no.qcow2", "--headwater", "/bin/true"], "there is no guest at no.qcow2"),
        (&["003", "--guest", "/bin/sh", "--headwater", "/bin/false"], "cannot run /bin/false"),
        (&["003", "--guest", "/bin/sh", "--storage", "p10"], "--guest cannot be combined with --storage"),
    ];
    for (arguments, why) in options {
        let refused = study().args(arguments).current_dir(dir.path()).output().unwrap();
        assert!(
            !refused.status.success() && text(&refused).contains(why),
            "{arguments:?}: {}",
            text(&refused)
        );
    }

    let nowhere =
        study().args(["001", "--quick", "--work-dir", "/proc", "--out"]).arg(&new).output().unwrap();
    assert!(!nowhere.status.success());
    assert!(text(&nowhere).contains("not enough disk"), "{}", text(&nowhere));
    assert!(!new.exists());
    // The largest study is not the first, but its needs are checked before the first study begins.
    let all = study().args(["all", "--quick", "--work-dir", "/proc", "--out"]).arg(&new).output().unwrap();
    assert!(!all.status.success());
    let said = text(&all);
    assert!(said.contains("not enough disk: the study needs") && !said.contains("study 000"), "{said}");
    assert!(!new.exists());
}

#[test]
fn the_arithmetic_of_study_000_is_printed_without_a_report() {
    let dir = directory();
    let output = study().args(["000", "--arithmetic"]).current_dir(dir.path()).output().unwrap();
    assert!(output.status.success() && text(&output).contains("41 (41)"), "{}", text(&output));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

const CONFIGURATION: &str = "Version 1.1.0
'ACCESS SPECIFICATIONS
'Access specification name,default assignment
\tmixed <80/20>,ALL
'size,% of size,% reads,% random,delay,burst,align,reply
\t4096,50,20,80,0,1,0,0
\t16384,50,100,0,0,1,0,0
'END access specifications
'MANAGER LIST
'Worker
\tWorker 1
'Disk maximum size,starting sector
\t16384,0
'Worker
\tWorker 2
'Number of outstanding IOs
\t8
'Disk maximum size,starting sector
\t16384,16384
'END manager list
";

#[test]
fn a_configuration_of_iometer_runs_on_every_system() {
    let dir = directory();
    let (file, out) = (dir.path().join("mix.icf"), dir.path().join("report"));
    std::fs::write(&file, CONFIGURATION).unwrap();
    let output = study()
        .args(["icf", "--quick", "--seconds", "0.05"])
        .arg(&file)
        .arg("--out")
        .arg(&out)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let json: serde_json::Value = serde_json::from_str(&read(&out.join("results.json"))).unwrap();
    assert_eq!(json["samples"].as_array().unwrap().len(), 4 * 2);
    assert_eq!(json["cases"][0]["set_bytes"], 16 << 20);
    check_files(&out, &["SHA256SUMS", "index.html", "iometer.csv", "results.json", "series.csv.zst"]);
    let csv = read(&out.join("iometer.csv"));
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    let of_workers: Vec<&Vec<&str>> = rows.iter().filter(|row| row[0] == "WORKER").collect();
    assert_eq!(of_workers.len(), 4 * 2, "{csv}");
    assert!(of_workers.iter().all(|row| row.len() == 80 && row[7].parse::<f64>().unwrap() > 0.0), "{csv}");
    let kinds = ["ALL", "MANAGER", "WORKER", "DISK"];
    assert!(rows.iter().filter(|row| kinds.contains(&row[0])).all(|row| row.len() == 80), "{csv}");
    assert_eq!((of_workers[0][1], of_workers[0][47], of_workers[1][47]), ("Worker 1", "1", "8"));
    let compared = study().arg("compare").args([&out, &out]).output().unwrap();
    let compared_text = text(&compared);
    assert!(compared.status.success() && compared_text.contains("ram-64m, step-1: ratio"), "{compared_text}");
    let page = read(&out.join("index.html"));
    assert_eq!(cells_and_plots(&page).1, 2);
    assert!(page.contains("Mixed &lt;80/20&gt;</caption>") && !page.contains("rinted"), "{page}");
}

#[test]
fn a_configuration_runs_on_a_model_disk_and_over_each_protocol() {
    let dir = directory();
    let file = dir.path().join("mix.icf");
    std::fs::write(&file, CONFIGURATION).unwrap();
    for over in ["nbd", "vhost-user"] {
        let out = dir.path().join(over);
        let mut command = study();
        command.args([
            "icf",
            "--quick",
            "--seconds",
            "0.05",
            "--rounds",
            "1",
            "--storage",
            "sas15k:64:raid5",
        ]);
        let output = command.args(["--over", over]).arg(&file).arg("--out").arg(&out).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let json: serde_json::Value = serde_json::from_str(&read(&out.join("results.json"))).unwrap();
        assert_eq!((json["over"].as_str(), json["storage"].as_str()), (Some(over), Some("sas15k:64:raid5")));
        assert_eq!(json["samples"].as_array().unwrap().len(), 4);
        let page = read(&out.join("index.html"));
        assert!(
            page.contains("The disk is a model, sas15k:64:raid5") && page.contains("are accessed over"),
            "{page}"
        );
    }
}

#[test]
fn a_broken_configuration_is_refused_with_line_and_column() {
    let dir = directory();
    let (file, out) = (dir.path().join("mix.icf"), dir.path().join("report"));
    std::fs::write(&file, CONFIGURATION.replace("\t16384,50", "\t16384,5O")).unwrap();
    let output = study().arg("icf").arg(&file).arg("--out").arg(&out).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = text(&output);
    assert!(text.contains("mix.icf: line 7, column 8: the share of the size is \"5O\""), "{text}");
    assert!(!out.exists());
}

/// The cells of a report's page.
fn cells_of(out: &Path) -> Vec<String> {
    cells_and_plots(&read(&out.join("index.html"))).0
}

#[test]
fn all_quick_studies_leave_reports_that_show_their_cases() {
    let dir = directory();
    let out = dir.path().join("all");
    let arguments = ["all", "--quick", "--seconds", "0.05", "--rounds", "1", "--out"];
    let output = study().args(arguments).arg(&out).output().unwrap();
    let text = text(&output);
    assert!(output.status.success() && text.contains("41 (41)"), "{text}");
    assert!(text.contains("study 001 needs") && text.contains("left: round 1 of 1"), "{text}");
    check_study_001(&out.join("001"), &text);
    let buffering = cells_of(&out.join("002"));
    let cases = [
        "Raw disk",
        "Cache on disk, direct",
        "Cache on disk, buffered",
        "Cache on disk, auto",
        "qcow2 overlay, cache=none",
        "qcow2 overlay, cache=writeback",
    ];
    for case in cases {
        assert_eq!(buffering.iter().filter(|cell| *cell == case).count(), 3, "{case}");
    }
    let lifecycle = cells_of(&out.join("000"));
    for cell in ["XenDesktop, Hyper-V", "Session hosts", "loop_write_iops"] {
        assert!(lifecycle.iter().any(|found| found == cell), "{cell}");
    }
    let copies = cells_of(&out.join("003"));
    for cell in ["No RAM cache", "256 MB", "512 MB", "65 %"] {
        assert!(copies.iter().any(|found| found == cell), "{cell}");
    }
    for number in ["000", "003"] {
        let page = read(&out.join(number).join("index.html"));
        assert!(page.contains("Quick run") && !page.contains("not measured"), "{number}");
    }
    // Two model desktops, and the real cache at three sizes.
    let sizing = cells_of(&out.join("sizing"));
    for cell in ["16.0 MiB", "500"] {
        assert!(sizing.iter().any(|found| found == cell), "{cell}: {sizing:?}");
    }
    let json: serde_json::Value = serde_json::from_str(&read(&out.join("sizing/results.json"))).unwrap();
    assert_eq!(json["checked"].as_array().unwrap().len(), 3, "{}", json["unchecked"]);
    assert!(text.contains("as a share of those on a set that fits"), "{text}");
    let models = cells_of(&out.join("004"));
    for case in [
        "P10",
        "P10 + 256 MB RAM",
        "Ephemeral disk",
        "Ephemeral disk + 256 MB RAM",
        "Standard_D8s_v3",
        "cache",
    ] {
        assert!(models.iter().any(|cell| cell == case), "{case}");
    }
}
