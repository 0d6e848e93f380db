//! The RAM that is advised, with real write caches: a cache with all of it spills nothing, and a cache with a quarter less spills.

use std::path::Path;

use headwater_api::advice::ram_without_spilling;
use headwater_block::blocking;
use headwater_studies::disks::{VolumeSpec, engine, open_volume, settled};
use headwater_testkit::Rng;
use headwater_volume::{Buffering, CacheMode};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// Bytes that a write cache spills in which so many bytes live at the end, of blocks all over a disk of 4 GiB. They do not pack.
fn spilled_bytes(dir: &Path, live_bytes: u64, ram_bytes: u64) -> u64 {
    let spec = VolumeSpec {
        name: "advised".to_owned(),
        size_bytes: 4 << 30,
        mode: CacheMode::RamDisk,
        ram_bytes,
        disk_bytes: 1 << 30,
        buffering: Buffering::Buffered,
    };
    let opened = open_volume(&spec, dir, engine(None, 1.0).unwrap()).unwrap();
    let volume = opened.volume.clone().unwrap();
    let mut rng = Rng::new(live_bytes);
    let pool: Vec<u8> = (0..MIB as usize).map(|_| rng.below(256) as u8).collect();
    // Runs of 16 blocks, in an order that looks random: an odd step visits each of them once.
    let runs = (4_u64 << 30) / (16 * BLOCK);
    for number in 0..live_bytes / (16 * BLOCK) {
        let at = number * 40_503 % runs * 16 * BLOCK;
        let from = (number as usize * 4096 + number as usize) % (pool.len() - 16 * BLOCK as usize);
        blocking::write(&*opened.device, at, &pool[from..from + 16 * BLOCK as usize]).unwrap();
    }
    let counters = settled(&volume).cache;
    assert_eq!(counters.live_bytes, live_bytes);
    counters.spilled_bytes
}

#[test]
fn advised_ram_is_enough_and_hardly_more() {
    let dir = tempfile::tempdir().unwrap();
    for live_bytes in [160 * MIB, 240 * MIB, 400 * MIB] {
        let advised = ram_without_spilling(live_bytes);
        assert_eq!(spilled_bytes(dir.path(), live_bytes, advised), 0, "{live_bytes} in {advised}");
        // On a slow disk, a cache with 15 % less sometimes keeps all of it.
        let less = advised / 4 * 3;
        assert!(spilled_bytes(dir.path(), live_bytes, less) > 0, "{live_bytes} in {less}");
    }
}
