//! The order of the steps when space runs out, checked by the counters: what is done early, and what only if
//! nothing else helps.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::filling::{MIB, assert_holds, empty, fill, fill_on, pattern};
use crate::setup;
use headwater_block::{Device, IoErrorKind, blocking};
use headwater_testkit::{Rng, wait_until};
use headwater_volume::{CacheMode, Volume};

const BLOCK: u64 = 4096;
const BLOCKS_PER_MIB: u64 = MIB / BLOCK;

/// Waits until nothing is in progress: between two checks nothing was packed, written, cleaned or freed.
fn settle(volume: &Volume, faults: &setup::Faults) {
    let look = || {
        let cache = volume.counters().cache;
        let done = (cache.packed_segments, cache.spilled_segments, cache.cleaned_blocks);
        (done, cache.ram_used_bytes, cache.disk_used_bytes, faults.in_flight.load(Ordering::SeqCst))
    };
    let mut before = None;
    wait_until("nothing is under way", || {
        // Time for a next step to begin.
        std::thread::sleep(Duration::from_millis(10));
        let now = look();
        before.replace(now) == Some(now) && now.3 == 0
    });
}

/// Like text: an eighth of it is random.
fn compressible(seed: u64) -> Vec<u8> {
    Rng::new(seed).runs(MIB as usize, 8)
}

#[test]
fn cold_segments_are_written_out_early_and_their_copies_stay_in_ram() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(128), CacheMode::RamDisk, 64, 256, dir.path()), &host);
    assert_eq!(fill(&*device, 50), (50, None));
    // 18 segments may be dirty, and 27 in RAM: these 25 all fit.
    // The segments are counted before their blocks.
    wait_until("the others are on disk", || {
        let cache = volume.counters().cache;
        cache.spilled_segments >= 4 && cache.spilled_blocks >= 4 * 512
    });
    assert_holds(&*device, 50);
    let cache = volume.counters().cache;
    assert_eq!((cache.evicted_segments, cache.paused_writes, cache.packed_segments), (0, 0, 0), "{cache:?}");
    assert_eq!((cache.read_ram_blocks, cache.read_disk_blocks), (50 * BLOCKS_PER_MIB, 0), "{cache:?}");
}

#[test]
fn nothing_is_written_out_below_the_mark_and_above_it_no_more_than_that() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(128), CacheMode::RamDisk, 64, 256, dir.path()), &host);
    // 18 segments may be dirty: with 10 none has to be written, with 25 seven.
    assert_eq!(fill(&*device, 20), (20, None));
    settle(&volume, &faults);
    assert_eq!(volume.counters().cache.spilled_segments, 0);
    assert_eq!(fill_on(&*device, 20..50), (50, None));
    wait_until("some are on disk", || volume.counters().cache.spilled_segments >= 4);
    settle(&volume, &faults);
    let spilled = volume.counters().cache.spilled_segments;
    assert!(spilled <= 9, "{spilled} segments are on disk");
}

#[test]
fn a_writer_gets_the_ram_of_clean_copies_before_it_has_to_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(128), CacheMode::RamDisk, 64, 256, dir.path()), &host);
    assert_eq!(fill(&*device, 50), (50, None));
    wait_until("there are clean copies", || volume.counters().cache.spilled_segments >= 4);
    settle(&volume, &faults);
    // From here on the disk accepts nothing: the only space is two free segments and the clean copies.
    faults.hold.store(true, Ordering::Relaxed);
    for number in 50..60 {
        blocking::write(&*device, number * MIB, &pattern(number)).unwrap();
    }
    let cache = volume.counters().cache;
    assert!(cache.evicted_segments > 0 && cache.evicted_segments <= cache.spilled_segments, "{cache:?}");
    assert_eq!(cache.paused_writes, 0, "{cache:?}");
    faults.hold.store(false, Ordering::Relaxed);
    assert_holds(&*device, 60);
    assert!(volume.counters().cache.read_disk_blocks > 0);
}

#[test]
fn what_fits_when_it_is_packed_is_not_spilled() {
    let dir = tempfile::tempdir().unwrap();
    for (mode, disk_mib, count) in [(CacheMode::Ram, 0, 96), (CacheMode::RamDisk, 256, 72)] {
        let (host, faults) = setup::host(u64::MAX);
        let mut options = setup::options(&empty(128), mode, 64, disk_mib, dir.path());
        options.pause_limit = Duration::from_secs(60);
        let (volume, device) = setup::open(&options, &host);
        // More than fits into RAM uncompressed. One by one, because the disk serves a waiting writer, which
        // is faster.
        for number in 0..count {
            blocking::write(&*device, number * MIB, &compressible(number)).unwrap();
            settle(&volume, &faults);
        }
        let cache = volume.counters().cache;
        assert!(cache.packed_holds_bytes > 0, "{cache:?}");
        // If a writer had to wait on a busy machine, the disk served it and took segments that would have
        // been packed.
        if cache.paused_writes == 0 || mode == CacheMode::Ram {
            assert!(cache.packed_holds_bytes > 24 * MIB, "{cache:?}");
            let later = (cache.spilled_segments, cache.evicted_segments, cache.refused_writes);
            assert_eq!(later, (0, 0, 0), "{mode}: {cache:?}");
        }
        let mut read = vec![0; MIB as usize];
        for number in 0..count {
            blocking::read(&*device, number * MIB, &mut read).unwrap();
            assert!(read == compressible(number), "MiB {number} was lost in mode {mode}");
        }
    }
}

#[test]
fn what_was_packed_is_spilled_where_packed_segments_have_all_they_may() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(256), CacheMode::RamDisk, 32, 512, dir.path());
    options.pause_limit = Duration::from_secs(60);
    let (volume, device) = setup::open(&options, &host);
    // Nothing is written twice, so a block that is not packed any more was spilled. One segment may be
    // between two states.
    let packed_and_spilled = || {
        let cache = volume.counters().cache;
        cache.packed_blocks * BLOCK > cache.packed_holds_bytes + 4 * MIB
    };
    // One by one: data for which a writer waits is not packed.
    let count = (0..256).find(|number| {
        blocking::write(&*device, number * MIB, &compressible(*number)).unwrap();
        settle(&volume, &faults);
        packed_and_spilled()
    });
    let count = count.unwrap_or_else(|| panic!("{:?}", volume.counters().cache)) + 1;
    let cache = volume.counters().cache;
    assert!(cache.spilled_segments > 0 && cache.packed_bytes > 0, "{cache:?}");
    let mut read = vec![0; MIB as usize];
    for number in 0..count {
        blocking::read(&*device, number * MIB, &mut read).unwrap();
        assert!(read == compressible(number), "MiB {number} was lost");
    }
}

/// Random blocks of a volume that are overwritten repeatedly, with the number of the last write of each.
struct Blocks {
    newest: Vec<u64>,
    writes: u64,
    rng: Rng,
}

impl Blocks {
    fn new(mib: u64) -> Self {
        Self { newest: vec![0; (mib * BLOCKS_PER_MIB) as usize], writes: 0, rng: Rng::new(mib) }
    }

    fn write(&mut self, device: &dyn Device, block: usize) {
        self.writes += 1;
        self.newest[block] = self.writes;
        let data = Rng::new(self.writes).bytes(BLOCK as usize);
        blocking::write(device, block as u64 * BLOCK, &data).unwrap();
    }

    /// Overwrites as many random blocks as fit into a MiB.
    fn write_mib(&mut self, device: &dyn Device) {
        for _ in 0..BLOCKS_PER_MIB {
            let block = self.rng.index(self.newest.len());
            self.write(device, block);
        }
    }

    fn verify(&self, device: &dyn Device) {
        let mut read = vec![0; BLOCK as usize];
        for (block, newest) in self.newest.iter().enumerate().filter(|(_, newest)| **newest != 0) {
            blocking::read(device, block as u64 * BLOCK, &mut read).unwrap();
            assert!(read == Rng::new(*newest).bytes(BLOCK as usize), "block {block} was lost");
        }
    }
}

#[test]
fn nothing_is_cleaned_while_there_are_free_places() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::RamDisk, 16, 256, dir.path());
    options.pause_limit = Duration::from_secs(60);
    let (volume, device) = setup::open(&options, &host);
    let mut blocks = Blocks::new(100);
    // 75 segments in 127 positions, many of them half dead: at least six positions stay free.
    (0..blocks.newest.len()).for_each(|block| blocks.write(&*device, block));
    (0..blocks.newest.len()).step_by(2).for_each(|block| blocks.write(&*device, block));
    let cache = volume.counters().cache;
    assert!(cache.spilled_segments > 60, "{cache:?}");
    assert_eq!((cache.cleaned_segments, cache.cleaned_blocks), (0, 0), "{cache:?}");
    // Then it is.
    let rounds = (0..600).find(|_| {
        blocks.write_mib(&*device);
        volume.counters().cache.cleaned_segments > 0
    });
    assert!(rounds.is_some(), "{:?}", volume.counters().cache);
    assert_eq!(volume.counters().cache.refused_writes, 0);
    blocks.verify(&*device);
}

#[test]
fn while_cleaning_makes_place_no_write_waits() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(128), CacheMode::RamDisk, 64, 80, dir.path()), &host);
    let mut blocks = Blocks::new(80);
    // Not faster than the disk, so that no write waits for it.
    for first in (0..blocks.newest.len()).step_by(BLOCKS_PER_MIB as usize) {
        (first..first + BLOCKS_PER_MIB as usize).for_each(|block| blocks.write(&*device, block));
        settle(&volume, &faults);
    }
    for _ in 0..100 {
        blocks.write_mib(&*device);
        settle(&volume, &faults);
    }
    let cache = volume.counters().cache;
    assert!(cache.cleaned_segments > 10, "{cache:?}");
    assert_eq!((cache.paused_writes, cache.refused_writes), (0, 0), "{cache:?}");
    blocks.verify(&*device);
}

#[test]
fn the_pause_is_bounded_and_whoever_comes_later_is_refused_at_once() {
    const PAUSE: Duration = Duration::from_millis(300);
    const LATER: u64 = 64;
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::Ram, 32, 0, dir.path());
    options.pause_limit = PAUSE;
    let (volume, device) = setup::open(&options, &host);
    let taken = (0..64).find_map(|number| {
        let begin = Instant::now();
        let error = blocking::write(&*device, number * MIB, &pattern(number)).err()?;
        assert_eq!(error.kind(), IoErrorKind::NoSpace);
        let took = begin.elapsed();
        assert!(took >= PAUSE && took < Duration::from_secs(20), "refused after {took:?}");
        Some(number)
    });
    let taken = taken.expect("64 MiB do not fit");
    let first = volume.counters().cache;
    assert_eq!((first.paused_writes, first.refused_writes), (1, 1), "{first:?}");
    assert!(first.paused_ns >= PAUSE.as_nanos() as u64, "{first:?}");
    assert!(volume.shortage().refusing);
    for number in 0..LATER {
        let error = blocking::write(&*device, 100 * MIB + number * BLOCK, &pattern(1)[..BLOCK as usize]);
        assert_eq!(error.unwrap_err().kind(), IoErrorKind::NoSpace);
    }
    let cache = volume.counters().cache;
    assert_eq!(cache.refused_writes, 1 + LATER, "{cache:?}");
    // All of them together waited less than if each had waited for the whole pause.
    assert!(cache.paused_ns - first.paused_ns < LATER * PAUSE.as_nanos() as u64, "{first:?} {cache:?}");
    assert_holds(&*device, taken);
}
