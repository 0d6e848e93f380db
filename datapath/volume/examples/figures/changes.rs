//! Measures what an operation costs as the changes of one volume grow: 1, 5 and 20 GiB, with 512 MiB of RAM.
//!
//! With so little RAM, most of 1 GiB is on disk, too: the sizes differ in the amount of data, not in its
//! place.

use std::path::Path;

use headwater_block::blocking;
use headwater_testkit::Rng;
use headwater_volume::CacheMode;

use crate::growth::{Arm, GOAL, compare, settled_cost};
use crate::measure::{self, progress};
use crate::rows::{Goal, Report};
use crate::work::{self, BLOCK, GIB, MIB};

const SIZES_GIB: [u64; 3] = [1, 5, 20];
const RAM_BYTES: u64 = 512 * MIB;
const ROUNDS: usize = 15;

/// Overwritten and read in RAM, at the end of the disk.
const HOT_BLOCKS: u64 = 64 * MIB / BLOCK;
const HOT_FIRST: u64 = 60 * GIB / BLOCK;
const HITS: u64 = 100_000;

/// Written in one go: less than the clean copies that can be dropped, so no write waits for the disk.
const BURST_BLOCKS: u64 = 32 * MIB / BLOCK;

const COLD_READS: u64 = 1_000;

/// The last of the written blocks may still be in RAM.
const WARM_BLOCKS: u64 = RAM_BYTES / BLOCK;

pub fn run(dir: &Path, report: &mut Report) {
    bare_index(report);
    let host = work::host();
    let mut arms = Vec::new();
    for gib in SIZES_GIB {
        let options = work::options(CacheMode::RamDisk, RAM_BYTES, (gib + 4) * GIB, dir);
        let mut arm = Arm::new(format!("{gib} GiB"), vec![work::open(&options, &host)]);
        for number in 0..gib * GIB / MIB {
            blocking::write(&*arm.volumes[0], number * MIB, &arm.data).expect("there is room");
        }
        arm.next = gib * GIB / BLOCK;
        measure::settle(&arm.volumes);
        progress(format_args!("{gib} GiB written"));
        arms.push(arm);
    }
    let name = |arm: &Arm| arm.name.clone();
    let hot = HOT_FIRST..HOT_FIRST + HOT_BLOCKS;
    let warm = |arm: &Arm| {
        arm.write_in_order(hot.start, HOT_BLOCKS);
        measure::settle(&arm.volumes);
    };
    arms.iter().for_each(warm);
    let overwrite = |arm: &mut Arm| measure::cost(HITS, || arm.overwrite(hot.start, hot.end, HITS));
    compare(("changes", "overwrite in RAM"), ROUNDS, &mut arms, name, overwrite, (GOAL, report));
    let read = |arm: &mut Arm| measure::cost(HITS, || arm.read(hot.start, hot.end, HITS));
    compare(("changes", "read from RAM"), ROUNDS, &mut arms, name, read, (GOAL, report));
    let new = |arm: &mut Arm| settled_cost(arm, BURST_BLOCKS, |arm| arm.write_new(BURST_BLOCKS));
    compare(("changes", "new block, spilled later"), ROUNDS, &mut arms, name, new, (GOAL, report));
    // Below this, all blocks are on disk by now. They are read before blocks there are written again, which
    // brings them back into RAM.
    let on_disk = |arm: &Arm| arm.next - ROUNDS as u64 * BURST_BLOCKS - WARM_BLOCKS;
    let cold = |arm: &mut Arm| {
        let end = on_disk(arm);
        measure::cost(COLD_READS, || arm.read(0, end, COLD_READS))
    };
    compare(("changes", "read from disk"), ROUNDS, &mut arms, name, cold, (GOAL, report));
    let again = |arm: &mut Arm| {
        let end = on_disk(arm);
        settled_cost(arm, BURST_BLOCKS, |arm| arm.overwrite_each_once(end, BURST_BLOCKS))
    };
    compare(("changes", "block that was spilled"), ROUNDS, &mut arms, name, again, (GOAL, report));
    measure::warn_if_short(&host);
}

/// Measures the memory's own cost of looking up a block: its place in one table, the segment's record and the
/// owner of the slot in others, one after the other in as much memory as the index takes; and a copy of the
/// block.
fn bare_index(report: &mut Report) {
    const LOOKS: u64 = 4;
    let mut rng = Rng::new(5);
    let data = rng.bytes(BLOCK as usize);
    let mut into = vec![1; 64 * MIB as usize];
    let mut tables: Vec<(u64, Vec<u32>)> = SIZES_GIB
        .iter()
        .map(|gib| {
            // 0.2 % of the cached data, in entries of four bytes.
            let entries = gib * GIB / 512 / 4;
            (*gib, (0..entries).map(|_| rng.below(entries) as u32).collect())
        })
        .collect();
    let looked_up = |(_, table): &mut (u64, Vec<u32>)| {
        measure::cost(HITS, || {
            for number in 0..HITS {
                let mut at = rng.index(table.len());
                (0..LOOKS).for_each(|_| at = table[at] as usize);
                let start = ((number * BLOCK) % (64 * MIB)) as usize;
                into[start..start + BLOCK as usize].copy_from_slice(&data);
                into[start] = at as u8;
            }
        })
    };
    let name = |(gib, _): &(u64, Vec<u32>)| format!("{gib} GiB");
    let what = ("changes", "limit: bare lookup and copy, index of");
    compare(what, ROUNDS, &mut tables, name, looked_up, (Goal::None, report));
}
