//! Figures of a volume without any protocol: opening and freezing, cost as work grows, what is given back, how
//! often a persistent volume can flush, how well changed blocks pack.
//!
//! `cargo run --release -p headwater-volume --example figures -- [--dir DIR] [CASE..]`; the cases are `index`, `open`,
//! `growth` (writes 20 GiB), `volumes`, `back` and `flush`, and without any all of them. `pack BEFORE AFTER` packs the blocks
//! that differ between two raw disk images. Each line is one figure, its goal where there is one, and whether it
//! was reached.

mod growth;
mod measure;
mod memory;
mod pack;
mod persistent;

use std::path::{Path, PathBuf};

fn main() {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let mut dir = std::env::temp_dir();
    if args.first().is_some_and(|arg| arg == "--dir") {
        dir = PathBuf::from(args.get(1).expect("--dir is followed by a directory"));
        args.drain(..2);
    }
    if args.first().is_some_and(|arg| arg == "pack") {
        let (before, after) = (args.get(1), args.get(2));
        let (Some(before), Some(after)) = (before, after) else { panic!("pack is followed by two images") };
        return pack::changed_blocks(Path::new(before), Path::new(after));
    }
    if args.is_empty() {
        args = ["index", "open", "back", "flush", "volumes", "growth"].map(String::from).into();
    }
    for case in &args {
        match case.as_str() {
            "index" => memory::index(),
            "open" => memory::open_and_freeze(&dir),
            "back" => memory::given_back(&dir),
            "flush" => persistent::flushes(&dir),
            "volumes" => growth::volumes(&dir),
            "growth" => growth::changes(&dir),
            other => panic!("there is no case {other}"),
        }
    }
}
