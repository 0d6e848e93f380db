//! Compares an image with many versions with the same bytes as one version: a lookup must not search the versions one
//! by one.

use std::os::unix::fs::FileExt;
use std::process::Command;

use anyhow::{Context, Result};

use super::server::{Export, Exported};
use super::stores::{Blocks, Made, make_disk};
use super::{Comparison, Rounds};
use crate::Plan;
use crate::fio::{self, Reading};
use crate::targets::Goal;

const MANY: u64 = 200;
const IMAGE_BYTES: u64 = 128 << 20;

/// Each version changes 1/200 of the image, so that the data of the newest version is spread over all versions.
pub fn run(plan: &Plan) -> Result<Vec<Comparison>> {
    let versions = if plan.quick { 20 } else { MANY };
    let raw = plan.work_dir.join("versions.raw");
    make_disk(&raw, IMAGE_BYTES, 3)?;
    let many = Made::new(plan, "versions-many")?;
    let daemon = many.daemon(plan)?;
    println!("  importing {versions} versions");
    daemon.import(&raw, "many")?;
    let disk = std::fs::OpenOptions::new().write(true).open(&raw)?;
    let part_blocks = IMAGE_BYTES / 4096 / versions;
    for version in 1..versions {
        let mut blocks = Blocks::new(1000 + version);
        for block in 0..part_blocks {
            disk.write_all_at(&blocks.next_block(), (version * part_blocks + block) * 4096)?;
        }
        daemon.import(&raw, "many").with_context(|| format!("version {}", version + 1))?;
    }
    drop((daemon, disk));
    let one = Made::import(plan, "versions-one", &raw, "one")?;
    std::fs::remove_file(&raw)?;
    let mut rounds = Rounds::new();
    // With much memory the lookup dominates; with little memory most reads go to the store.
    for (memory, figure) in [("256M", "IOPS from memory"), ("16M", "IOPS from the store")] {
        let start = |made: &Made, image| {
            let from = made.store().display().to_string();
            let more = ["--chunk-memory", memory, "--boot-trace", "off"];
            let what = Exported { image, from: &from, nbd: None, more: &more };
            Export::start(plan, Command::new(&plan.headwater), &what)
        };
        let systems = [start(&many, "many")?, start(&one, "one")?];
        for system in &systems {
            let once = Reading { block_bytes: 1 << 20, readers: 1, depth: 4, random: false, seconds: None };
            fio::read(system.uri(), IMAGE_BYTES, once)?;
        }
        for round in 0..plan.rounds {
            let mut iops = [0.0; 2];
            for turn in 0..2 {
                let index = (round + turn) % 2;
                let seconds = Some(plan.seconds);
                let reading = Reading { block_bytes: 4096, readers: 1, depth: 16, random: true, seconds };
                iops[index] = fio::read(systems[index].uri(), IMAGE_BYTES, reading)?.iops();
            }
            let [ours, theirs] = iops;
            println!(
                "  round {}/{}  {figure}: {ours:.0} with {versions} versions, {theirs:.0} with one",
                round + 1,
                plan.rounds
            );
            rounds.add(Comparison {
                case: "versions-200",
                figure,
                ours: vec![ours],
                peer: "one version".into(),
                theirs: vec![theirs],
                goal: Goal::AtLeast(0.95),
            });
        }
    }
    Ok(rounds.0)
}
