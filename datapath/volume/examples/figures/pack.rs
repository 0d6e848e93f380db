//! How much more the RAM of a cache holds, of blocks that a real machine changed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use headwater_block::blocking;
use headwater_volume::{CacheMode, VolumeOptions};

use crate::rows::{Goal, Report, Row};
use crate::work::{self, BLOCK, MIB};

/// Blocks of `after` that differ from those of `before` and are not zero, in order.
fn changed(before: &Path, after: &Path) -> Vec<(u64, Vec<u8>)> {
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

/// Fills a cache in RAM alone with them, with a third of their size, until it is full.
pub fn changed_blocks(before: &Path, after: &Path, report: &mut Report) {
    let blocks = changed(before, after);
    let bytes = blocks.len() as u64 * BLOCK;
    println!("{} MiB of blocks changed, without those that are zero", bytes / MIB);
    let ram_bytes = (bytes / 4).max(16 * MIB);
    let host = work::host();
    let options = work::options(CacheMode::Ram, ram_bytes, 0, Path::new("/"));
    let options = VolumeOptions { pause_limit: Duration::from_secs(2), ..options };
    let volume = work::open(&options, &host);
    let taken = blocks
        .iter()
        .take_while(|(block, data)| blocking::write(&*volume, block * BLOCK, data).is_ok())
        .count() as u64;
    let cache = volume.counters().cache;
    let mut read = vec![0; BLOCK as usize];
    for (block, data) in blocks.iter().take(taken as usize) {
        work::read(&volume, *block, &mut read);
        assert!(read == *data, "block {block} was lost");
    }
    let what = format!("{} MiB of {} in {} MiB of RAM", taken * BLOCK / MIB, bytes / MIB, ram_bytes / MIB);
    report.add(Row::plain("pack", what, (taken * BLOCK) as f64 / ram_bytes as f64, "x", Goal::AtLeast(2.0)));
    println!("{} segments packed, {} MiB in all in use", cache.packed_segments, cache.ram_used_bytes / MIB);
}
