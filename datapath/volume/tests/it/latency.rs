//! Latencies of requests are reported by the place that served them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headwater_block::{ByteRange, Device, IoErrorKind, Request, blocking};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, wait_until};
use headwater_volume::{CacheMode, LatencySnapshot, PersistentOptions, Volume, VolumeOptions};

use crate::setup;

const BLOCK: usize = 4096;
const MIB: u64 = 1 << 20;

/// Whether a count is plausible if only a sample is timed.
fn near(told: u64, true_count: u64) -> bool {
    told.abs_diff(true_count) < true_count / 2
}

/// Counts since `before`, in the order of the fields.
fn counts_since(volume: &Volume, before: &LatencySnapshot) -> [u64; 7] {
    let of = |l: &LatencySnapshot| {
        [l.read_ram, l.read_packed, l.read_zero, l.read_disk, l.read_image, l.write, l.write_waited]
            .map(|l| l.count)
    };
    let (now, before) = (of(&volume.counters().latency), of(before));
    std::array::from_fn(|class| now[class] - before[class])
}

/// Reads single random blocks.
fn read(device: &dyn Device, (from, to): (u64, u64), count: u64, rng: &mut Rng) {
    let mut block = vec![0; BLOCK];
    for _ in 0..count {
        let at = from + rng.below((to - from) / BLOCK as u64) * BLOCK as u64;
        blocking::read(device, at, &mut block).unwrap();
    }
}

#[test]
fn packed_blocks_and_those_of_the_image_have_their_own_times() {
    for waits in [Waits::Never, Waits::Always] {
        let (host, _) = setup::host(u64::MAX);
        let how = ReferenceOptions { waits, ..Default::default() };
        let base: Arc<dyn Device> = Arc::new(ReferenceDisk::with_contents(Rng::new(4).bytes(96 << 20), how));
        let dir = tempfile::tempdir().unwrap();
        let mut options = setup::options(&base, CacheMode::Ram, 32, 0, dir.path());
        options.pause_limit = Duration::from_secs(60);
        let (volume, _) = setup::open(&options, &host);
        let mut rng = Rng::new(5);
        for mib in 0..48 {
            let data = rng.runs(1 << 20, 8);
            blocking::write(&*volume, mib * MIB, &data).unwrap();
        }
        // The first written blocks are the first that are packed, and stay packed.
        wait_until("much is packed", || volume.counters().cache.packed_segments >= 6);
        let before = volume.counters();
        read(&*volume, (0, 4 * MIB), 4000, &mut rng);
        assert_eq!(volume.counters().cache.read_packed_blocks - before.cache.read_packed_blocks, 4000);
        let counts = counts_since(&volume, &before.latency);
        assert!(near(counts[1], 4000) && counts.iter().sum::<u64>() == counts[1], "{counts:?}");

        let before = volume.counters();
        read(&*volume, (64 * MIB, 96 * MIB), 4000, &mut rng);
        assert_eq!(volume.counters().image_read_bytes - before.image_read_bytes, 4000 * BLOCK as u64);
        let counts = counts_since(&volume, &before.latency);
        // All requests that wait are timed.
        let as_told = if waits == Waits::Always { counts[4] == 4000 } else { near(counts[4], 4000) };
        assert!(as_told && counts.iter().sum::<u64>() == counts[4], "{counts:?}");
    }
}

#[test]
fn writes_that_waited_have_times_of_their_own() {
    let (host, _) = setup::host(u64::MAX);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(128 * MIB));
    let dir = tempfile::tempdir().unwrap();
    let mut options = setup::options(&base, CacheMode::Ram, 32, 0, dir.path());
    options.pause_limit = Duration::from_secs(60);
    let (volume, device) = setup::open(&options, &host);
    let mut rng = Rng::new(6);
    let block = rng.bytes(BLOCK);
    for _ in 0..4000 {
        blocking::write(&*volume, rng.below(1024) * BLOCK as u64, &block).unwrap();
    }
    let counts = counts_since(&volume, &LatencySnapshot::default());
    assert!(near(counts[5], 4000) && counts.iter().sum::<u64>() == counts[5], "{counts:?}");
    // More than there is space for, so that one write waits.
    let before = volume.counters().latency;
    let writer = std::thread::spawn(move || {
        for mib in 8..64 {
            blocking::write(&*device, mib * MIB, &rng.bytes(1 << 20)).unwrap();
        }
    });
    wait_until("a write waits", || volume.counters().cache.paused_writes > 0);
    std::thread::sleep(Duration::from_millis(50));
    volume.set_ram_bytes(128 * MIB);
    writer.join().unwrap();
    let counts = counts_since(&volume, &before);
    assert_eq!((counts[6], volume.counters().cache.paused_writes), (1, 1), "{counts:?}");
    assert_eq!(counts.iter().sum::<u64>(), counts[5] + counts[6], "{counts:?}");
    let waited = volume.counters().latency.write_waited;
    // Reported times are accurate to 1/16.
    assert!(waited.sum_ns >= 50_000_000 && waited.p50_ns >= 46_000_000, "{waited:?}");
}

#[test]
fn a_write_to_sectors_on_disk_reads_nothing_unless_it_may_free_a_block() {
    let (host, _) = setup::host(u64::MAX);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(64 * MIB));
    let dir = tempfile::tempdir().unwrap();
    let mut options = setup::options(&base, CacheMode::RamDisk, 16, 256, dir.path());
    options.pause_limit = Duration::from_secs(60);
    let (volume, _) = setup::open(&options, &host);
    let mut rng = Rng::new(7);
    for mib in 0..48 {
        blocking::write(&*volume, mib * MIB, &rng.bytes(1 << 20)).unwrap();
    }
    // Sectors, and zeroes after which the block may be free.
    for (data, first, reads) in [(&[1; 512][..], 0, 0), (&[0; 512], 50, 50)] {
        let before = volume.counters();
        for number in 0..50 {
            blocking::write(&*volume, (first + number) * BLOCK as u64 + 512, data).unwrap();
        }
        let counters = volume.counters();
        let read = counters.cache.read_disk_blocks - before.cache.read_disk_blocks;
        assert_eq!(read, reads, "{data:?}");
    }
}

#[test]
fn each_place_has_its_own_times() {
    let (host, _) = setup::host(u64::MAX);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(64 * MIB));
    // Not empty; otherwise a zeroed block would come from the image.
    blocking::write(&*base, 63 * MIB, &[1; BLOCK]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (volume, _) = setup::open(&setup::options(&base, CacheMode::RamDisk, 16, 256, dir.path()), &host);
    let mut rng = Rng::new(3);
    for mib in 0..32 {
        blocking::write(&*volume, mib * MIB, &rng.bytes(1 << 20)).unwrap();
    }
    blocking::write_zeroes(&*volume, 0, 64 << 10).unwrap();
    // The last written blocks are in RAM, the first are on disk, and the rest is in the image.
    read(&*volume, (31 * MIB, 32 * MIB), 4000, &mut rng);
    read(&*volume, (MIB, 3 * MIB), 200, &mut rng);
    read(&*volume, (0, 64 << 10), 4000, &mut rng);
    let counters = volume.counters();
    let latency = counters.latency;
    assert!(near(latency.read_ram.count, 4000), "{latency:?}");
    assert!(near(latency.read_zero.count, 4000), "{latency:?}");
    assert_eq!(latency.read_disk.count, counters.cache.read_disk_blocks, "{latency:?}");
    assert!(latency.read_disk.count >= 100, "{latency:?}");
    for one in [latency.read_ram, latency.read_zero, latency.read_disk] {
        assert!(one.p50_ns > 0 && one.p50_ns <= one.p99_ns && one.p99_ns <= one.p999_ns, "{one:?}");
    }
    assert_eq!(latency.read_image.count, 0, "{latency:?}");
}

/// Some front-ends repeat such a write each second as long as there is no space.
#[test]
fn a_write_that_found_no_room_is_counted_as_refused_alone() {
    let (host, _) = setup::host(u64::MAX);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(128 * MIB));
    let dir = tempfile::tempdir().unwrap();
    let mut options = setup::options(&base, CacheMode::Ram, 32, 0, dir.path());
    options.pause_limit = Duration::from_millis(200);
    let (volume, _) = setup::open(&options, &host);
    let mut rng = Rng::new(8);
    let filled = (0..64).find_map(|mib| blocking::write(&*volume, mib * MIB, &rng.bytes(1 << 20)).err());
    assert_eq!(filled.expect("there is no end of its room").kind(), IoErrorKind::NoSpace);
    let (before, data) = (volume.counters(), rng.bytes(16 * BLOCK));
    let write = || blocking::write(&*volume, 100 * MIB, &data);
    let since = || {
        let now = volume.counters();
        let refused = now.cache.refused_writes - before.cache.refused_writes;
        (now.write_ops - before.write_ops, now.write_bytes - before.write_bytes, refused)
    };
    for _ in 0..3 {
        assert_eq!(write().unwrap_err().kind(), IoErrorKind::NoSpace);
    }
    assert_eq!((since(), counts_since(&volume, &before.latency)[6]), ((0, 0, 3), 0));
    volume.set_ram_bytes(128 * MIB);
    write().unwrap();
    assert_eq!(since(), (1, 16 * BLOCK as u64, 3));
}

#[test]
fn a_write_that_is_flushed_before_its_answer_is_timed_to_the_end() {
    let (host, faults) = setup::host(u64::MAX);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(16 * MIB));
    let dir = tempfile::tempdir().unwrap();
    let options = VolumeOptions {
        persistent: Some(PersistentOptions { name: "flushed".into(), key: [3; 16], base_id: [5; 32] }),
        ..setup::options(&base, CacheMode::RamDisk, 32, 64, dir.path())
    };
    let (volume, device) = setup::open(&options, &host);
    let counts = || {
        let waited = counts_since(&volume, &LatencySnapshot::default())[6];
        (volume.counters().write_ops, waited)
    };
    faults.hold.store(true, Ordering::Relaxed);
    let writer = std::thread::spawn(move || {
        // More than go into the map only.
        let (range, buffer) = (ByteRange::new(0, 32 * BLOCK as u64).unwrap(), vec![1; 32 * BLOCK]);
        blocking::wait(&*device, Request::Write { range, buffer, fua: true }).unwrap();
    });
    wait_until("its flush is under way", || faults.in_flight.load(Ordering::SeqCst) != 0);
    assert_eq!(counts(), (0, 0));
    faults.hold.store(false, Ordering::Relaxed);
    writer.join().unwrap();
    assert_eq!(counts(), (1, 1));
    volume.close();
}

#[test]
fn what_is_lent_has_the_times_of_the_image() {
    let (host, _) = setup::host(u64::MAX);
    let how = ReferenceOptions { lends: true, ..Default::default() };
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::with_contents(Rng::new(9).bytes(1 << 20), how));
    let dir = tempfile::tempdir().unwrap();
    let (volume, _) = setup::open(&setup::options(&base, CacheMode::Ram, 32, 0, dir.path()), &host);
    let mut rng = Rng::new(10);
    for _ in 0..4000 {
        let range = ByteRange::new(rng.below(256) * BLOCK as u64, BLOCK as u64).unwrap();
        assert!(volume.read_shared(range, &mut Vec::new()));
    }
    let counts = counts_since(&volume, &LatencySnapshot::default());
    assert!(near(counts[4], 4000) && counts.iter().sum::<u64>() == counts[4], "{counts:?}");
}
