//! Measures a volume without any protocol against the limits of memory and disk. Each line is a figure, its
//! goal if there is one, and whether it was reached.
//!
//! `cargo run --release -p headwater-volume --example figures -- [--dir DIR] [--json FILE] [CASE..]`
//!
//! | case | measures |
//! |---|---|
//! | `memory` | overwrites and reads in RAM, against a bare copy; two threads against one |
//! | `sustained` | random writes with 64 MiB of RAM and in `disk` mode, against the disk's own sequential writes |
//! | `index` | the memory of the index of a dense cache |
//! | `open` | opening a volume on a disk of 64 GiB without data, freezing one with 4 GiB of changes |
//! | `resident` | memory while more is written than the budget allows, and memory that a discard frees |
//! | `amplification` | bytes to the overflow disk for each written byte |
//! | `changes` | the cost of an operation with 1, 5 and 20 GiB of changes |
//! | `volumes` | the same with 1, 8 and 64 volumes that have as much data in all |
//! | `flush` | how often a persistent volume can flush, against a raw file |
//! | `headers` | overwrites in RAM that outlives the process, whose segments name their blocks, against RAM that does not |
//!
//! | `pack BEFORE AFTER` | how many more blocks that differ between two raw disk images fit into RAM |
//! | `packers BEFORE AFTER` | algorithms for packing these blocks, compared |
//!
//! Without a case, all except the last two: about ten minutes, 60 GiB of disk and 14 GiB of RAM.

mod amplification;
mod changes;
mod engine;
mod growth;
mod measure;
mod memory;
mod pack;
mod packers;
mod persistent;
mod rows;
mod volumes;
mod work;

use std::path::{Path, PathBuf};

use crate::rows::Report;

/// A name, and what measures it on a disk.
type Case = (&'static str, fn(&Path, &mut Report));

const CASES: [Case; 10] = [
    // First: later cases leave memory in the process, and memory that is added to it would not show.
    ("resident", memory::resident),
    ("memory", engine::memory),
    ("sustained", engine::sustained),
    ("index", memory::index),
    ("open", memory::open_and_freeze),
    ("amplification", amplification::run),
    ("changes", changes::run),
    ("volumes", volumes::run),
    ("flush", persistent::flushes),
    ("headers", engine::headers),
];

/// The command line.
struct Asked {
    dir: PathBuf,
    json: Option<PathBuf>,
    cases: Vec<String>,
    pack: Option<(PathBuf, PathBuf)>,
    packers: Option<(PathBuf, PathBuf)>,
}

fn asked() -> Asked {
    let mut asked =
        Asked { dir: std::env::temp_dir(), json: None, cases: Vec::new(), pack: None, packers: None };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut next =
            |what: &str| PathBuf::from(args.next().unwrap_or_else(|| panic!("{arg} is followed by {what}")));
        match arg.as_str() {
            "--dir" => asked.dir = next("a directory"),
            "--json" => asked.json = Some(next("a file")),
            "pack" => asked.pack = Some((next("two images"), next("two images"))),
            "packers" => asked.packers = Some((next("two images"), next("two images"))),
            "all" => asked.cases.extend(CASES.map(|(name, _)| name.to_owned())),
            name if CASES.iter().any(|(case, _)| *case == name) => asked.cases.push(arg),
            _ => panic!(
                "there is no case {arg}; there are {}, pack, packers",
                CASES.map(|(name, _)| name).join(", ")
            ),
        }
    }
    if asked.cases.is_empty() && asked.pack.is_none() && asked.packers.is_none() {
        asked.cases = CASES.map(|(name, _)| name.to_owned()).into();
    }
    asked
}

fn main() {
    let asked = asked();
    let mut report = Report::default();
    for (name, run) in CASES.iter().filter(|(name, _)| asked.cases.iter().any(|case| case == name)) {
        println!("{name}");
        run(&asked.dir, &mut report);
    }
    if let Some((before, after)) = &asked.pack {
        println!("pack");
        pack::changed_blocks(before, after, &mut report);
    }
    if let Some((before, after)) = &asked.packers {
        println!("packers");
        packers::compare(before, after);
    }
    println!("\n{}", report.table());
    if report.missed() > 0 {
        println!("{} of the {} goals are missed", report.missed(), report.goals());
        println!(
            "why some are, on every machine: docs/decisions/0014-packing.md and 0016-cost-as-work-grows.md"
        );
    }
    if let Some(json) = &asked.json {
        let text = serde_json::to_string_pretty(&report).expect("rows are plain data");
        std::fs::write(json, text).unwrap_or_else(|error| panic!("cannot write {}: {error}", json.display()));
        println!("wrote {}", json.display());
    }
}
