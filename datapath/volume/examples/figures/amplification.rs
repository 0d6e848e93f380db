//! Measures how many bytes reach the overflow disk for each byte that a machine writes.

use std::path::Path;

use headwater_block::blocking;
use headwater_testkit::Rng;
use headwater_volume::{CacheMode, Volume};

use crate::measure::{self, progress};
use crate::rows::{Goal, Report, Row};
use crate::work::{self, BLOCK, GIB, MIB};

const SET_BYTES: u64 = 2 * GIB;
const SET_BLOCKS: u64 = SET_BYTES / BLOCK;

/// The order of the writes.
#[derive(Clone, Copy)]
enum Mix {
    /// One in five follows the last one, the others are anywhere.
    Vdi,
    Anywhere,
    /// Four in five are in a fifth of the set.
    Skewed,
}

const MIXES: [(Mix, &str); 3] =
    [(Mix::Vdi, "VDI mix"), (Mix::Anywhere, "all at random"), (Mix::Skewed, "four of five in a fifth")];

fn write(volume: &Volume, blocks: u64, mix: Mix, rng: &mut Rng, data: &[u8]) {
    let mut at = 0;
    for number in 0..blocks {
        at = match mix {
            Mix::Vdi if rng.chance(1, 5) => (at + 1) % SET_BLOCKS,
            Mix::Skewed if rng.chance(4, 5) => rng.below(SET_BLOCKS / 5),
            _ => rng.below(SET_BLOCKS),
        };
        let from = (number * BLOCK % MIB) as usize;
        work::write(volume, at, &data[from..from + BLOCK as usize]);
    }
}

/// Writes over 2 GiB that were written once, with 64 MiB of RAM: with disk space for all of them in addition,
/// and with existing data that takes 80 % of the disk limit, once cleaning runs steadily.
///
/// In the second case the goal cannot be reached with blocks that all die equally soon: cleaning then costs
/// 2.69, whatever segment it takes (docs/decisions/0016-cost-as-work-grows.md). It can be reached if some
/// blocks are written more often.
pub fn run(dir: &Path, report: &mut Report) {
    let host = work::host();
    let mut rng = Rng::new(11);
    let data = rng.bytes(MIB as usize);
    for (room, disk_bytes, before_blocks, goal) in
        [("with room", 4 * SET_BYTES, 0, 1.1), ("80 % live", SET_BYTES * 5 / 4, SET_BLOCKS * 3 / 2, 2.0)]
    {
        for (mix, name) in MIXES {
            let options = work::options(CacheMode::RamDisk, 64 * MIB, disk_bytes, dir);
            let volumes = [work::open(&options, &host)];
            let volume = &volumes[0];
            for offset in (0..SET_BYTES).step_by(MIB as usize) {
                blocking::write(&**volume, offset, &data).expect("there is room");
            }
            write(volume, before_blocks, mix, &mut rng, &data);
            measure::settle(&volumes);
            let before = volume.counters().cache.spilled_bytes;
            write(volume, SET_BLOCKS, mix, &mut rng, &data);
            measure::settle(&volumes);
            let spilled = volume.counters().cache.spilled_bytes - before;
            progress(format_args!("{name}, {room}: done"));
            let value = spilled as f64 / SET_BYTES as f64;
            let figure = format!("bytes to disk for each byte written, {name}, {room}");
            report.add(Row::plain("amplification", figure, value, "x", Goal::AtMost(goal)));
        }
    }
}
