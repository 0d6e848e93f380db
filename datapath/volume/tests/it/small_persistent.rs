//! Persistent caches with few positions: each segment holds one from its beginning, and a freed one is used
//! again only after a commit. They can be overwritten at random for any time, as long as their live blocks
//! fit.

use std::sync::Arc;
use std::time::Duration;

use headwater_block::{Device, blocking};
use headwater_testkit::{ReferenceDisk, Rng};
use headwater_volume::{CacheMode, LittleSpace, PersistentOptions, VolumeOptions};
use headwater_writecache::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;

use crate::setup;

const BLOCK: usize = 4096;
const SLOTS: u64 = 512;
/// Positions without a full segment: two are reserved for cleaning, and two segments are being filled.
const OTHER_PLACES: u64 = 4;
/// With fewer dead slots a segment is not cleaned.
const MIN_GAIN: u64 = 16;

/// Events after which a write takes a new slot although its segment is in RAM.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// Everything is flushed now and then.
    Flushes,
    /// The block is discarded before it is written again.
    Discards,
}

/// Writes all blocks once, and then those of the last part repeatedly.
fn overwrite_at_random(places: u64, (mode, ram_mib): (CacheMode, u64), part: u64, by: By, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let blocks = (places - OTHER_PLACES) * (SLOTS - MIN_GAIN);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(blocks * BLOCK as u64));
    let options = VolumeOptions {
        disk_bytes: places * ENCRYPTED_SEGMENT_BYTES as u64,
        persistent: Some(PersistentOptions { name: "small".into(), key: [7; 16], base_id: [9; 32] }),
        pause_limit: Duration::from_secs(20),
        // Some are smaller than the minimum of a new cache, as caches of earlier releases may be.
        little_space: LittleSpace::Accepted,
        ..setup::options(&base, mode, ram_mib, 0, dir.path())
    };
    let (volume, device) = setup::open(&options, &host);
    let mut rng = Rng::new(seed);
    let data = rng.bytes(1 << 20);
    let mut times = vec![0u64; blocks as usize];
    let mut write = |block: u64| {
        let count = &mut times[block as usize];
        *count += 1;
        let mut bytes = data[block as usize % 200 * 4096..][..BLOCK].to_vec();
        bytes[..8].copy_from_slice(&count.to_le_bytes());
        let wrote = blocking::write(&*device, block * BLOCK as u64, &bytes);
        let cache = || volume.counters().cache;
        wrote
            .unwrap_or_else(|error| panic!("{places} places, {mode:?}, seed {seed}: {error}: {:?}", cache()));
    };
    (0..blocks).for_each(&mut write);
    for number in 0..4 * blocks {
        let block = blocks - 1 - rng.below(blocks / part);
        if by == By::Discards {
            blocking::discard(&*device, block * BLOCK as u64, BLOCK as u64).unwrap();
        }
        write(block);
        if by == By::Flushes && number % 1500 == 1499 {
            blocking::flush(&*device).unwrap();
        }
    }
    let mut found = vec![0; BLOCK];
    for (block, count) in times.iter().enumerate() {
        blocking::read(&*device, (block * BLOCK) as u64, &mut found).unwrap();
        assert_eq!(found[..8], count.to_le_bytes(), "block {block}");
    }
}

#[test]
fn what_fits_can_be_overwritten_for_ever() {
    for (places, seed) in [(5, 1), (6, 2), (7, 3), (9, 4), (15, 5)] {
        for cache in [(CacheMode::Disk, 16), (CacheMode::RamDisk, 64)] {
            overwrite_at_random(places, cache, 1, By::Flushes, seed);
        }
    }
}

/// If all segments fit into RAM, none is written for lack of it, and without flushes none is written for
/// those. Cleaning finds their dead blocks once they are on disk.
#[test]
fn what_is_dead_in_ram_is_found_where_places_are_short() {
    for (places, part) in [(9, 1), (9, 8), (15, 1), (15, 4), (15, 16)] {
        for cache in [(CacheMode::Disk, 16), (CacheMode::RamDisk, 32), (CacheMode::RamDisk, 64)] {
            overwrite_at_random(places, cache, part, By::Discards, 7);
        }
    }
}
