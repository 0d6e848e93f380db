//! Every cache mode passes the conformance suite, with limits so small that blocks are in every kind of
//! place.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use headwater_block::{ByteRange, Device, blocking};
use headwater_testkit::conformance::{self, Options};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, wait_until};
use headwater_volume::CacheMode;

use crate::setup;

const MIB: u64 = 1 << 20;

/// A base with random contents and a hole at its end, some of whose reads wait.
fn base(size_bytes: u64, seed: u64) -> Arc<dyn Device> {
    let mut contents = Rng::new(seed).bytes(size_bytes as usize);
    let hole = contents.len() / 8 * 7;
    contents[hole..].fill(0);
    Arc::new(ReferenceDisk::with_contents(
        contents,
        ReferenceOptions { read_only: true, ..Default::default() },
    ))
}

fn suite(seed: u64, span_mib: u64) -> Options {
    Options {
        operations: 2500,
        span_bytes: span_mib * MIB,
        max_request_bytes: 512 << 10,
        ..Options::seeded(seed)
    }
}

#[test]
fn ram_mode_over_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let image = base(24 * MIB + 512, 5);
    let (volume, device) = setup::open(&setup::options(&image, CacheMode::Ram, 64, 0, dir.path()), &host);
    conformance::check(&device, &suite(11, 24));
    let counters = volume.counters();
    assert_eq!(counters.cache.spilled_segments, 0);
    assert!(counters.cache.write_in_place_blocks > 0 && counters.cache.read_ram_blocks > 0);
    assert!(counters.image_read_bytes > 0 && counters.cache.elided_zero_blocks > 0);
}

#[test]
fn ram_mode_over_an_image_with_large_sectors() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let options = ReferenceOptions { read_only: true, logical_block_bytes: 4096, ..Default::default() };
    let contents = Rng::new(8).bytes(24 * MIB as usize);
    let image: Arc<dyn Device> = Arc::new(ReferenceDisk::with_contents(contents, options));
    let (_volume, device) = setup::open(&setup::options(&image, CacheMode::Ram, 64, 0, dir.path()), &host);
    assert_eq!(device.geometry().logical_block_bytes, 4096);
    conformance::check(&device, &suite(13, 24));
}

#[test]
fn a_cache_larger_than_the_processors_caches_stays_correct() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let image = base(80 * MIB, 6);
    let (volume, device) = setup::open(&setup::options(&image, CacheMode::Ram, 128, 0, dir.path()), &host);
    // From here on whole blocks are written with non-temporal stores.
    let filling = Rng::new(7).bytes(MIB as usize);
    (0..64).for_each(|piece| blocking::write(&*device, piece * MIB, &filling).unwrap());
    conformance::check(&device, &suite(12, 16));
    assert!(volume.counters().cache.write_in_place_blocks > 0);
}

#[test]
fn writes_together_are_stored_where_they_are_and_others_are_left() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let image = base(24 * MIB, 9);
    let (volume, device) = setup::open(&setup::options(&image, CacheMode::Ram, 64, 0, dir.path()), &host);
    let range = |block: u64, blocks: u64| ByteRange::new(block * 4096, blocks * 4096).unwrap();
    blocking::write(&*device, 0, &[1; 20 * 4096]).unwrap();
    let before = volume.counters();
    let (two, four, part) = ([2; 4096], [4; 4 * 4096], ByteRange::new(512, 4096).unwrap());
    let read = |device: &dyn Device, block: u64| {
        let mut bytes = vec![0; 4096];
        blocking::read(device, block * 4096, &mut bytes).unwrap();
        bytes
    };
    let equal = read(&*device, 3000);
    let writes = [
        (range(0, 1), &two[..]),
        // A block that was never written, and one whose first half was.
        (range(600, 1), &two),
        (range(18, 4), &four),
        (range(4, 4), &four),
        // Not whole blocks; zero; the same block again; equal to the image.
        (part, &two),
        (range(10, 1), &[0; 4096]),
        (range(0, 1), &four[..4096]),
        (range(3000, 1), &equal),
    ];
    let mut done = [true; 8];
    device.write_together(&writes, &mut done);
    assert_eq!(done, [true, false, false, true, false, false, true, false]);
    let after = volume.counters();
    assert_eq!(after.write_ops - before.write_ops, 3);
    assert_eq!(after.write_bytes - before.write_bytes, 6 * 4096);
    let byte = |block: u64| {
        let bytes = read(&*device, block);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "block {block} is torn");
        bytes[0]
    };
    assert_eq!([0, 1, 4, 7, 8, 10].map(byte), [4, 1, 4, 4, 1, 1]);
    // A refused write may be stored in part, each block as a whole or not at all.
    assert!([18, 19].map(byte).iter().all(|byte| [1, 4].contains(byte)));
    assert_eq!(read(&*device, 600), read(&*image, 600));
}

#[test]
fn small_ram_with_overflow_spills_cleans_and_stays_correct() {
    let dir = tempfile::tempdir().unwrap();
    for seed in [1, 2, 3] {
        let (host, _) = setup::host(u64::MAX);
        let image = base(48 * MIB, seed);
        // 48 MiB of blocks in 16 MiB of RAM (of which 6 are buffers) and 60 MiB of disk: cleaning has to work.
        let (volume, device) =
            setup::open(&setup::options(&image, CacheMode::RamDisk, 16, 60, dir.path()), &host);
        conformance::check(&device, &suite(seed, 48));
        let cache = volume.counters().cache;
        assert!(cache.spilled_segments > 20, "{cache:?}");
        assert!(cache.evicted_segments > 0 && cache.read_disk_blocks > 0, "{cache:?}");
        assert!(cache.cleaned_segments > 0 && cache.cleaned_blocks > 0, "{cache:?}");
        assert_eq!((cache.corrupt_blocks, cache.disk_errors, cache.refused_writes), (0, 0, 0));
    }
}

#[test]
fn disk_mode_stays_correct_on_an_empty_image() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let image: Arc<dyn Device> = Arc::new(ReferenceDisk::new(64 * MIB));
    let (volume, device) =
        setup::open(&setup::options(&image, CacheMode::Disk, 1024, 256, dir.path()), &host);
    conformance::check(&device, &suite(21, 64));
    let cache = volume.counters().cache;
    assert!(cache.spilled_segments > 0);
    assert!(cache.ram_used_bytes <= cache.ram_target_bytes, "{cache:?}");
}

#[test]
fn disk_writes_that_fail_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    faults.write_error_every.store(7, Ordering::Relaxed);
    let image = base(40 * MIB, 8);
    let (volume, device) =
        setup::open(&setup::options(&image, CacheMode::RamDisk, 16, 256, dir.path()), &host);
    conformance::check(&device, &suite(31, 40));
    let cache = volume.counters().cache;
    assert!(cache.disk_errors > 0 && cache.spilled_segments > 0, "{cache:?}");
}

#[test]
fn disk_writes_that_end_half_way_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    faults.half_write_every.store(5, Ordering::Relaxed);
    let image = base(40 * MIB, 15);
    let mut options = setup::options(&image, CacheMode::RamDisk, 16, 256, dir.path());
    // After each failure the disk gets no writes for a while.
    options.pause_limit = Duration::from_secs(60);
    let (volume, device) = setup::open(&options, &host);
    conformance::check(&device, &suite(32, 40));
    let cache = volume.counters().cache;
    assert!(cache.disk_errors > 0 && cache.spilled_segments > 0 && cache.read_disk_blocks > 0, "{cache:?}");
    assert_eq!((cache.corrupt_blocks, cache.refused_writes), (0, 0), "{cache:?}");
}

#[test]
fn a_disk_that_writes_late_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    faults.write_delay_ms.store(10, Ordering::Relaxed);
    let image = base(40 * MIB, 16);
    let mut options = setup::options(&image, CacheMode::RamDisk, 16, 64, dir.path());
    options.pause_limit = Duration::from_secs(60);
    let (volume, device) = setup::open(&options, &host);
    conformance::check(&device, &suite(33, 40));
    let cache = volume.counters().cache;
    // Writers exceed the disk's speed, and segments are read, overwritten and freed while they are written.
    assert!(cache.paused_writes > 0 && cache.spilled_segments > 0 && cache.read_disk_blocks > 0, "{cache:?}");
    assert_eq!((cache.disk_errors, cache.corrupt_blocks, cache.refused_writes), (0, 0, 0), "{cache:?}");
}

#[test]
fn ram_mode_that_is_full_refuses_loses_nothing_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let image = base(48 * MIB, 14);
    let mut options = setup::options(&image, CacheMode::Ram, 20, 0, dir.path());
    // Short, because the cache is full many times; but longer than freeing space takes on a busy host.
    options.pause_limit = Duration::from_millis(200);
    let (volume, device) = setup::open(&options, &host);
    conformance::check(&device, &Options { may_refuse: true, ..suite(61, 48) });
    let full = volume.counters().cache;
    assert!(full.refused_writes > 10, "{full:?}");
    assert!(full.ram_used_bytes <= full.ram_target_bytes, "{full:?}");
    // There is space again, and no write is refused any more.
    blocking::discard(&*device, 0, 48 * MIB).unwrap();
    conformance::check(&device, &suite(62, 8));
    assert_eq!(volume.counters().cache.refused_writes, full.refused_writes);
    // The same by a higher limit.
    volume.set_ram_bytes(96 * MIB);
    conformance::check(&device, &suite(63, 48));
    assert_eq!(volume.counters().cache.refused_writes, full.refused_writes);
}

#[test]
fn a_full_disk_refuses_loses_nothing_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let image = base(64 * MIB, 17);
    let mut options = setup::options(&image, CacheMode::RamDisk, 16, 24, dir.path());
    options.pause_limit = Duration::from_millis(10);
    let (volume, device) = setup::open(&options, &host);
    conformance::check(&device, &Options { may_refuse: true, ..suite(71, 64) });
    let full = volume.counters().cache;
    assert!(full.refused_writes > 10 && full.read_disk_blocks > 0, "{full:?}");
    blocking::discard(&*device, 0, 64 * MIB).unwrap();
    wait_until("there is room again", || blocking::write(&*device, 0, &[1; 65536]).is_ok());
}

#[test]
fn limits_change_while_it_runs() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let image = base(48 * MIB, 9);
    let mut options = setup::options(&image, CacheMode::RamDisk, 64, 128, dir.path());
    options.pause_limit = Duration::from_secs(60);
    let (volume, device) = setup::open(&options, &host);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let changes = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::new(4);
            while !stop.load(Ordering::Relaxed) {
                // Little until something was spilled: on a busy host no low limit may last as long as that takes.
                let is_spilled = volume.counters().cache.spilled_segments > 0;
                volume.set_ram_bytes(if is_spilled { rng.between(16, 96) } else { 16 } << 20);
                volume.set_disk_bytes(rng.between(72, 256) << 20);
                changes.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(3));
            }
        });
        conformance::check(&device, &suite(41, 48));
        stop.store(true, Ordering::Relaxed);
    });
    let cache = volume.counters().cache;
    assert!(changes.load(Ordering::Relaxed) > 5 && cache.spilled_segments > 0, "{cache:?}");
    assert_eq!((cache.disk_errors, cache.corrupt_blocks, cache.refused_writes), (0, 0, 0), "{cache:?}");
    // Once more with much RAM, so that there is something to give back.
    volume.set_ram_bytes(96 * MIB);
    volume.set_disk_bytes(256 * MIB);
    let model = conformance::check(&device, &suite(42, 48));
    assert!(volume.counters().cache.ram_used_bytes > 24 * MIB, "{:?}", volume.counters().cache);
    volume.set_ram_bytes(16 * MIB);
    volume.set_disk_bytes(72 * MIB);
    let cache = std::fmt::from_fn(|f| write!(f, "the lower limit is kept: {:?}", volume.counters().cache));
    wait_until(cache, || volume.counters().cache.ram_used_bytes <= 16 * MIB);
    let cache = volume.counters().cache;
    assert_eq!((cache.ram_target_bytes, cache.disk_limit_bytes), (16 * MIB, 72 * MIB));
    conformance::verify(&*device, &model);
}

#[test]
fn volumes_over_one_base_share_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let image = base(24 * MIB, 10);
    let options = setup::options(&image, CacheMode::RamDisk, 16, 64, dir.path());
    let ((_a, first), (_b, second)) = (setup::open(&options, &host), setup::open(&options, &host));
    let untouched = conformance::Model::read(&*second, 24 * MIB);
    let model = conformance::check(&first, &suite(51, 24));
    conformance::verify(&*second, &untouched);
    conformance::check(&second, &suite(52, 24));
    conformance::verify(&*first, &model);
}

#[test]
fn two_sectors_of_one_block_written_at_once_both_survive() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let image = base(8 * MIB, 12);
    let (_volume, device) =
        setup::open(&setup::options(&image, CacheMode::RamDisk, 16, 64, dir.path()), &host);
    for round in 1..=200u8 {
        let block = u64::from(round) * 4096;
        std::thread::scope(|scope| {
            for sector in 0..8u64 {
                let device = &device;
                scope.spawn(move || {
                    blocking::write(&**device, block + sector * 512, &[round ^ sector as u8; 512]).unwrap();
                });
            }
        });
        let mut read = vec![0; 4096];
        blocking::read(&*device, block, &mut read).unwrap();
        for sector in 0..8usize {
            assert!(read[sector * 512..][..512].iter().all(|b| *b == round ^ sector as u8));
        }
    }
}
