//! Measures how the cost of an operation changes when the same RAM and data are divided among 1, 8 or 64
//! volumes.
//!
//! For comparison, it also measures plain memory without volumes: copies to random blocks of 1, 8 or 64
//! regions with the same bytes in all.

use std::path::Path;
use std::sync::Arc;

use headwater_testkit::Rng;
use headwater_volume::{CacheMode, Volume};

use crate::growth::{Arm, GOAL, compare, settled_cost};
use crate::measure;
use crate::rows::{Goal, Report, Row};
use crate::work::{self, BLOCK, GIB, MIB};

const COUNTS: [u64; 3] = [1, 8, 64];
const RAM_BYTES: u64 = 4 * GIB;
const DISK_BYTES: u64 = 20 * GIB;
const ROUNDS: usize = 15;

/// Overwritten and read in RAM.
const HOT_BYTES: u64 = 512 * MIB;
const HITS: u64 = 100_000;

/// Bytes written from the empty cache to the first spills, in all: all RAM is touched then.
const FIRST_BYTES: u64 = 6 * GIB;
const FIRST_ROUNDS: usize = 12;
const BURST_BLOCKS: u64 = 128 * MIB / BLOCK;

/// Written in one go: more than the clean copies that can be dropped, so that writes wait for the disk. Every
/// other round writes the same blocks, which are on disk by then.
const LONG_BLOCKS: u64 = 4 * GIB / BLOCK;
const LONG_ROUNDS: usize = 5;

const COLD_READS: u64 = 1_000;

/// The RAM of the three cases together (12 GiB), and 2 GiB for everything else.
const NEEDED_BYTES: u64 = 14 * GIB;

pub fn run(dir: &Path, report: &mut Report) {
    if measure::available_bytes() < NEEDED_BYTES {
        println!("    skipped: it needs {} GiB of available RAM", NEEDED_BYTES / GIB);
        return report.add(Row::missing("volumes", "what an operation costs in 1, 8 and 64 volumes", GOAL));
    }
    bare_memory(report);
    let host = work::host();
    let mut arms = Vec::new();
    for count in COUNTS {
        let options = work::options(CacheMode::RamDisk, RAM_BYTES / count, DISK_BYTES / count, dir);
        let volumes: Vec<Arc<Volume>> = (0..count).map(|_| work::open(&options, &host)).collect();
        arms.push(Arm::new(format!("{count}"), volumes));
    }
    let name = |arm: &Arm| arm.name.clone();
    let each = |arm: &Arm, blocks: u64| blocks / arm.volumes.len() as u64;
    let hot = |arm: &Arm| each(arm, HOT_BYTES / BLOCK);
    arms.iter_mut().for_each(|arm| arm.write_new(HOT_BYTES / BLOCK));
    let overwrite = |arm: &mut Arm| {
        let blocks = hot(arm);
        measure::cost(HITS, || arm.overwrite(0, blocks, HITS))
    };
    compare(("volumes", "overwrite in RAM"), ROUNDS, &mut arms, name, overwrite, (GOAL, report));
    let read = |arm: &mut Arm| {
        let blocks = hot(arm);
        measure::cost(HITS, || arm.read(0, blocks, HITS))
    };
    compare(("volumes", "read from RAM"), ROUNDS, &mut arms, name, read, (GOAL, report));
    let blocks = FIRST_BYTES / BLOCK / FIRST_ROUNDS as u64;
    let first = |arm: &mut Arm| settled_cost(arm, blocks, |arm| arm.write_new(blocks));
    let what = ("volumes", "new block, RAM used for the first time");
    compare(what, FIRST_ROUNDS, &mut arms, name, first, (Goal::None, report));
    let new = |arm: &mut Arm| settled_cost(arm, BURST_BLOCKS, |arm| arm.write_new(BURST_BLOCKS));
    compare(("volumes", "new block, spilled later"), ROUNDS, &mut arms, name, new, (GOAL, report));
    let cold = |arm: &mut Arm| {
        let blocks = each(arm, GIB / BLOCK);
        measure::cost(COLD_READS, || arm.read(0, blocks, COLD_READS))
    };
    compare(("volumes", "read from disk"), ROUNDS, &mut arms, name, cold, (GOAL, report));
    let mut turns = 0;
    let long = |arm: &mut Arm| {
        let half = turns / COUNTS.len() as u64 % 2;
        turns += 1;
        let first = arm.next + half * each(arm, LONG_BLOCKS);
        settled_cost(arm, LONG_BLOCKS, |arm| arm.write_in_order(first, LONG_BLOCKS))
    };
    let what = ("volumes", "block that was spilled, waiting for the disk");
    compare(what, LONG_ROUNDS, &mut arms, name, long, (GOAL, report));
    measure::warn_if_short(&host);
}

/// Copies to random blocks of 1, 8 or 64 regions.
fn bare_memory(report: &mut Report) {
    let region = |count: u64| vec![1u8; (HOT_BYTES / count) as usize];
    let mut all: Vec<Vec<Vec<u8>>> =
        COUNTS.iter().map(|count| (0..*count).map(|_| region(*count)).collect()).collect();
    let mut rng = Rng::new(9);
    let data = rng.bytes(BLOCK as usize);
    let copy = |regions: &mut Vec<Vec<u8>>| {
        measure::cost(HITS, || {
            for _ in 0..HITS {
                let region = rng.index(regions.len());
                let region = &mut regions[region];
                let start = rng.index(region.len() / BLOCK as usize) * BLOCK as usize;
                region[start..start + BLOCK as usize].copy_from_slice(&data);
            }
        })
    };
    let name = |regions: &Vec<Vec<u8>>| regions.len().to_string();
    compare(("volumes", "limit: bare copy, regions"), ROUNDS, &mut all, name, copy, (Goal::None, report));
}
