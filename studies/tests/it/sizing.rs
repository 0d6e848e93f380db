//! Tests `headwater-study sizing` with small generated traces.

use std::fmt::Write;
use std::path::Path;

use headwater_testkit::Rng;

use super::{cells_and_plots, check_files, directory, read, study, text};

/// A trace in the format of MSR Cambridge: two disks, each of which writes 48 MiB of new blocks and then rewrites
/// them.
fn trace() -> String {
    let (mut rng, mut lines) = (Rng::new(7), String::new());
    let mut time = 128_166_372_003_061_629_u64;
    for number in 0..3072_u64 {
        for disk in 0..2 {
            time += 10_000_000;
            let fresh = number * 16_384;
            writeln!(lines, "{time},desk,{disk},Write,{fresh},16384,100").unwrap();
            let again = rng.below(number + 1) * 16_384;
            writeln!(lines, "{time},desk,{disk},Write,{again},4096,100").unwrap();
            writeln!(lines, "{time},desk,{disk},Read,{again},8192,100").unwrap();
        }
    }
    lines
}

fn size(trace: &Path, out: &Path) -> std::process::Output {
    study().arg("sizing").arg(trace).arg("--out").arg(out).output().unwrap()
}

#[test]
fn a_trace_is_sized_and_checked_with_the_real_cache() {
    let dir = directory();
    let (file, out) = (dir.path().join("desks.csv"), dir.path().join("report"));
    std::fs::write(&file, trace()).unwrap();
    let output = size(&file, &out);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    let json: serde_json::Value = serde_json::from_str(&read(&out.join("results.json"))).unwrap();
    assert_eq!(json["desktops"].as_array().unwrap().len(), 2);
    assert_eq!(json["desktops"][0]["peak_bytes"], 48 << 20);
    let advised = json["advised_bytes"].as_u64().unwrap();
    assert!((48 << 20..=112 << 20).contains(&advised), "{advised}");
    assert!(said.contains(&format!("machine set NAME --ram {}M --disk", advised >> 20)), "{said}");
    // The sender waits for the cache, so a busy host gives the same result.
    let checked = json["checked"].as_array().unwrap();
    assert_eq!(checked.len(), 3);
    for size in checked {
        let (model, real) = (&size["model"]["spilled"], &size["spilled_blocks"]);
        let (model, real) = (model.as_f64().unwrap(), real.as_f64().unwrap());
        assert!((model - real).abs() <= 0.15 * real, "{model} {real}");
    }
    let page = read(&out.join("index.html"));
    let (cells, plots) = cells_and_plots(&page);
    assert_eq!(plots, 2);
    assert!(cells.iter().any(|cell| cell == "agrees") && page.contains("upper bound"), "{page}");
    check_files(&out, &["SHA256SUMS", "index.html", "results.json"]);
}

#[test]
fn a_broken_trace_is_refused_before_anything_is_written() {
    let dir = directory();
    let (file, out) = (dir.path().join("desks.csv"), dir.path().join("report"));
    std::fs::write(&file, trace().replacen(",Read,", ",Raed,", 1)).unwrap();
    let output = size(&file, &out);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output);
    assert!(said.contains("desks.csv: line 3: column 27: the kind is \"Raed\""), "{said}");
    assert!(!out.exists());
    let missing = size(&dir.path().join("nothing.csv"), &out);
    assert!(text(&missing).contains("nothing.csv: No such file"), "{}", text(&missing));
    let nothing = study().arg("sizing").output().unwrap();
    assert!(!nothing.status.success() && text(&nothing).contains("FILES"), "{}", text(&nothing));
}
