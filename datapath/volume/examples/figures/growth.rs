//! Cost of an operation as changes, and volumes, become more.

use std::path::Path;
use std::sync::Arc;

use headwater_block::blocking;
use headwater_testkit::Rng;
use headwater_volume::{CacheMode, Volume};

use crate::measure::{self, BLOCK, Cost, GIB, MIB};

const HOT_BYTES: u64 = 128 * MIB;
const HOT_OPERATIONS: u64 = 1_000_000;
const COLD_READS: u64 = 4_000;

/// From 1 to 20 GiB of changes under 512 MiB of RAM: what new writes, hits in RAM and reads from disk cost.
pub fn changes(dir: &Path) {
    let host = measure::host();
    let volume = measure::open(&measure::options(CacheMode::RamDisk, 512 * MIB, 24 * GIB, dir), &host);
    let mut rng = Rng::new(4);
    let data = rng.bytes(MIB as usize);
    let mut written = 0;
    let mut first: Option<[Cost; 3]> = None;
    for gib in [1, 5, 10, 20] {
        while written < (gib - 1) * GIB {
            blocking::write(&*volume, written, &data).expect("there is room");
            written += MIB;
        }
        let new = measure::cost(GIB / BLOCK, || {
            while written < gib * GIB {
                for block in 0..MIB / BLOCK {
                    let from = (block * BLOCK) as usize;
                    measure::write(&volume, written / BLOCK + block, &data[from..from + BLOCK as usize]);
                }
                written += MIB;
            }
        });
        let hot = hits(std::slice::from_ref(&volume), written - HOT_BYTES, &mut rng);
        let mut into = vec![0; BLOCK as usize];
        let cold = measure::cost(COLD_READS, || {
            for _ in 0..COLD_READS {
                // The last GiB may still be in RAM.
                let block = rng.below(((written - GIB / 2) / BLOCK).max(1));
                measure::read(&volume, block, &mut into);
            }
        });
        let costs = [new, hot, cold];
        let first = first.get_or_insert(costs);
        for ((what, cost), first) in
            ["new write", "hit in RAM", "read from disk"].into_iter().zip(costs).zip(first)
        {
            report(&format!("{what}, {gib} GiB of changes"), cost, *first);
        }
    }
}

fn report(what: &str, cost: Cost, first: Cost) {
    println!(
        "{what:<44} {:>8.2} us, {:>8.2} us of processor; {:.2} and {:.2} of the first line",
        cost.ns / 1e3,
        cost.processor_ns / 1e3,
        cost.ns / first.ns,
        cost.processor_ns / first.processor_ns,
    );
}

/// Half overwrites, half reads, in a set that is in RAM, spread over the volumes.
fn hits(volumes: &[Arc<Volume>], start: u64, rng: &mut Rng) -> Cost {
    let blocks = HOT_BYTES / BLOCK / volumes.len() as u64;
    let data = rng.bytes(BLOCK as usize);
    let mut into = vec![0; BLOCK as usize];
    for volume in volumes {
        (0..blocks).for_each(|block| measure::write(volume, start / BLOCK + block, &data));
    }
    measure::cost(HOT_OPERATIONS, || {
        for _ in 0..HOT_OPERATIONS / 2 {
            let volume = &volumes[rng.index(volumes.len())];
            measure::write(volume, start / BLOCK + rng.below(blocks), &data);
            measure::read(volume, start / BLOCK + rng.below(blocks), &mut into);
        }
    })
}

/// The same hits in 1 to 64 volumes; and new writes that overflow, as much in all.
pub fn volumes(dir: &Path) {
    let mut first: Option<[Cost; 2]> = None;
    for count in [1usize, 4, 16, 64] {
        let host = measure::host();
        // Memory for the hot set and as much again, in all.
        let ram_bytes = (2 * HOT_BYTES / count as u64).max(16 * MIB) + 16 * MIB;
        let options = measure::options(CacheMode::RamDisk, ram_bytes, 4 * GIB / count as u64, dir);
        let volumes: Vec<Arc<Volume>> = (0..count).map(|_| measure::open(&options, &host)).collect();
        let mut rng = Rng::new(5);
        let hot = hits(&volumes, 0, &mut rng);
        let data = rng.bytes(MIB as usize);
        let blocks = 2 * GIB / BLOCK;
        let new = measure::cost(blocks, || {
            for number in 0..blocks {
                let from = (number * BLOCK % MIB) as usize;
                let volume = &volumes[number as usize % count];
                let block = GIB / BLOCK + number / count as u64;
                measure::write(volume, block, &data[from..from + BLOCK as usize]);
            }
        });
        let costs = [hot, new];
        let first = first.get_or_insert(costs);
        for ((what, cost), first) in ["hit in RAM", "new write, to disk"].into_iter().zip(costs).zip(first) {
            report(&format!("{what}, {count} volumes"), cost, *first);
        }
    }
}
