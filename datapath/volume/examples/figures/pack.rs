//! Measures how much packing (compression in RAM) gains: a cache of mode `ram` is filled with the blocks that differ between two
//! raw disk images, until a write fails. The figure is stored bytes / RAM limit, and the goal is 2. `packers` compares the
//! algorithms.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use headwater_block::blocking;
use headwater_testkit::Rng;
use headwater_volume::{CacheMode, VolumeOptions};

use crate::rows::{Goal, Report, Row};
use crate::work::{self, BLOCK, MIB};

/// Blocks of the disk image `after` that differ from those of `before` and are not zero, in order.
pub fn changed(before: &Path, after: &Path) -> Vec<(u64, Vec<u8>)> {
    let open = |path: &Path| File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (before, after) = (open(before), open(after));
    let len = |file: &File| file.metadata().expect("it has a length").len();
    let (old_len, new_len) = (len(&before), len(&after));
    let (mut old, mut new) = (vec![0; MIB as usize], vec![0; MIB as usize]);
    let mut found = Vec::new();
    for offset in (0..new_len).step_by(MIB as usize) {
        let count = (new_len - offset).min(MIB) as usize;
        after.read_exact_at(&mut new[..count], offset).expect("it reads");
        old.fill(0);
        let old_count = old_len.saturating_sub(offset).min(count as u64) as usize;
        before.read_exact_at(&mut old[..old_count], offset).expect("it reads");
        for (number, (old, new)) in
            old[..count].chunks(BLOCK as usize).zip(new[..count].chunks(BLOCK as usize)).enumerate()
        {
            if old != new && new.iter().any(|byte| *byte != 0) && new.len() == BLOCK as usize {
                found.push((offset / BLOCK + number as u64, new.to_vec()));
            }
        }
    }
    found
}

/// How many neighbouring blocks the shuffle keeps together.
const RUN: usize = 512;

/// Finds the blocks that differ, and shuffles them in runs of `RUN` neighbouring blocks, so that the stored part is like the
/// whole. Then it fills two caches with them: one of 64 MiB of RAM, and one of a quarter of the blocks' size.
pub fn changed_blocks(before: &Path, after: &Path, report: &mut Report) {
    let blocks = changed(before, after);
    let bytes = blocks.len() as u64 * BLOCK;
    println!("{} MiB of blocks changed, without those that are zero", bytes / MIB);
    let mut runs: Vec<_> = blocks.chunks(RUN).collect();
    Rng::new(1).shuffle(&mut runs);
    let blocks: Vec<_> = runs.into_iter().flatten().collect();
    for ram_bytes in [64 * MIB, bytes / 4] {
        fill(&blocks, ram_bytes, report);
    }
}

fn fill(blocks: &[&(u64, Vec<u8>)], ram_bytes: u64, report: &mut Report) {
    let host = work::host();
    let options = work::options(CacheMode::Ram, ram_bytes, 0, Path::new("/"));
    let options = VolumeOptions { pause_limit: Duration::from_secs(2), ..options };
    let volume = work::open(&options, &host);
    let start = Instant::now();
    let mut last = start;
    let mut fits = |block: &(u64, Vec<u8>)| {
        let done = blocking::write(&*volume, block.0 * BLOCK, &block.1).is_ok();
        last = if done { Instant::now() } else { last };
        done
    };
    let taken = blocks.iter().take_while(|block| fits(block)).count();
    let seconds = last.duration_since(start).as_secs_f64();
    let cache = volume.counters().cache;
    let mut read = vec![0; BLOCK as usize];
    for (block, data) in &blocks[..taken] {
        work::read(&volume, *block, &mut read);
        assert!(read == *data, "block {block} was lost");
    }
    let taken_bytes = taken as u64 * BLOCK;
    let what = format!("held in {} MiB of RAM: {} MiB", ram_bytes / MIB, taken_bytes / MIB);
    report.add(Row::plain("pack", what, taken_bytes as f64 / ram_bytes as f64, "x", Goal::AtLeast(2.0)));
    let reads = volume.counters().latency.read_packed;
    println!(
        "  {} segments packed, {} MiB that hold {} ({:.2} x), {} MiB in use in all; written at {:.0} MiB/s; a packed block is read in {:.1} us, p99 {:.1}",
        cache.packed_segments,
        cache.packed_bytes / MIB,
        cache.packed_holds_bytes / MIB,
        cache.packed_holds_bytes as f64 / cache.packed_bytes as f64,
        cache.ram_used_bytes / MIB,
        taken_bytes as f64 / MIB as f64 / seconds,
        reads.p50_ns as f64 / 1e3,
        reads.p99_ns as f64 / 1e3,
    );
}
