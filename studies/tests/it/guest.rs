//! Tests `headwater-study 003 --guest` with a failing disk, and `validate`. The guest itself is tested in
//! `headwater`, whose tests build its disk.

use std::process::Command;

use headwater_recorder::format::Writer;
use headwater_recorder::{Content, Entry, Kind, Record};

use super::{cells_of, check_files, directory, read, study, text};

#[test]
fn a_failed_guest_disk_is_in_the_report() {
    let dir = directory();
    let (program, out) = (dir.path().join("disk"), dir.path().join("report"));
    let script = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho the cache is broken >&2\nexit 3\n";
    // Another process writes the script: Linux cannot execute a file that this program has open for writing, and a
    // child of another test may have inherited the descriptor.
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

/// Writes a recording that writes this many MiB in its session, once.
fn recording(path: &std::path::Path, mib: u64) {
    let mut writer = Writer::new(std::fs::File::create(path).unwrap(), 0, &[1 << 30]).unwrap();
    for number in 0..mib * 16 {
        let (bytes, content) = (64 << 10, Content::Packs(16));
        let entry = Entry {
            time_us: number * 1000 + 1,
            offset: number * bytes,
            bytes,
            volume: 0,
            kind: Kind::Write,
            content,
        };
        writer.add(Record::Request(entry)).unwrap();
    }
    writer.add(Record::End { time_us: mib * 16_000 }).unwrap();
    writer.finish().unwrap();
}

#[test]
fn recordings_are_validated_with_the_model_deviation() {
    let dir = directory();
    let (file, out) = (dir.path().join("desk.rec"), dir.path().join("report"));
    recording(&file, 64);
    let validate = |arguments: &[&str]| {
        let mut command = study();
        command.arg("validate").arg(&file).args(arguments).arg("--out").arg(&out).output().unwrap()
    };
    // The phases are not known, so nothing is created.
    let refused = validate(&[]);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused);
    assert!(said.contains("cannot use the recording") && said.contains("--boot-seconds"), "{said}");
    assert!(!out.exists());
    let output = validate(&["--boot-seconds", "0.5"]);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("the model is not within 20 % of the guests") && said.contains("Recorded desktops: 1."),
        "{said}"
    );
    let json: serde_json::Value = serde_json::from_str(&read(&out.join("results.json"))).unwrap();
    let phases = json["recorded"][0].as_array().unwrap();
    assert_eq!((phases[0][0].as_str(), phases[0][1]["writes"].as_f64()), (Some("boot"), Some(500.0)));
    assert_eq!((phases[1][0].as_str(), phases[1][1]["writes"].as_f64()), (Some("session"), Some(524.0)));
    // The recording writes all blocks once, and 16 MiB of RAM cannot hold them.
    let least = &json["caches"][0];
    assert_eq!(least["ram_bytes"], 16 << 20);
    assert!(least["recorded"][0]["spilled_bytes"].as_u64().unwrap() > 40 << 20, "{least}");
    assert_eq!(least["agrees"], false);
    let cells = cells_of(&out);
    for cell in ["Writes", "Rewritten blocks", "16.0 MiB"] {
        assert!(cells.iter().any(|found| found == cell), "{cell}: {cells:?}");
    }
    check_files(&out, &["SHA256SUMS", "index.html", "results.json"]);
    // Another run must not overwrite the report.
    let again = text(&validate(&["--boot-seconds", "0.5"]));
    assert!(again.contains("is in use"), "{again}");
}
