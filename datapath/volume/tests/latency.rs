//! Times of requests are told by where they were served.

mod setup;

use std::sync::Arc;

use headwater_block::{Device, blocking};
use headwater_testkit::{ReferenceDisk, Rng};
use headwater_volume::CacheMode;

const BLOCK: usize = 4096;
const MIB: u64 = 1 << 20;

#[test]
fn each_place_has_its_own_times() {
    let (host, _) = setup::host(u64::MAX);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(64 * MIB));
    // Not empty, or a zeroed block would be one of the image.
    blocking::write(&*base, 63 * MIB, &[1; BLOCK]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (volume, _) = setup::open(&setup::options(&base, CacheMode::RamDisk, 16, 256, dir.path()), &host);
    let mut rng = Rng::new(3);
    for mib in 0..32 {
        blocking::write(&*volume, mib * MIB, &rng.bytes(1 << 20)).unwrap();
    }
    blocking::write_zeroes(&*volume, 0, 64 << 10).unwrap();
    let mut block = vec![0; BLOCK];
    let mut read = |from: u64, to: u64, count: u64| {
        for _ in 0..count {
            let at = from + rng.below((to - from) / BLOCK as u64) * BLOCK as u64;
            blocking::read(&*volume, at, &mut block).unwrap();
        }
    };
    // The end of what was written is in RAM, the beginning is on disk, and after both is the image.
    read(31 * MIB, 32 * MIB, 4000);
    read(MIB, 3 * MIB, 200);
    read(0, 64 << 10, 4000);
    let counters = volume.counters();
    let latency = counters.latency;
    let near = |told: u64, true_count: u64| told.abs_diff(true_count) < true_count / 2;
    assert!(near(latency.read_ram.count, 4000), "{latency:?}");
    assert!(near(latency.read_zero.count, 4000), "{latency:?}");
    assert_eq!(latency.read_disk.count, counters.cache.read_disk_blocks, "{latency:?}");
    assert!(latency.read_disk.count >= 100, "{latency:?}");
    for one in [latency.read_ram, latency.read_zero, latency.read_disk] {
        assert!(one.p50_ns > 0 && one.p50_ns <= one.p99_ns && one.p99_ns <= one.p999_ns, "{one:?}");
    }
    assert_eq!(latency.read_image.count, 0, "{latency:?}");
}
