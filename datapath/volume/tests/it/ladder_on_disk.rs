//! The overflow disk as space runs out and comes back, and when it fails or returns wrong data: each for an
//! ephemeral volume and for a persistent one.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::filling::{MIB, assert_holds, empty, fill, fill_on, fill_patiently, pattern};
use crate::setup;
use headwater_block::{IoErrorKind, blocking};
use headwater_testkit::{Rng, wait_until};
use headwater_volume::{CacheMode, PersistentOptions, VolumeOptions};

/// Whether the cache outlives its volume.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Forgotten,
    Persistent,
}

impl Life {
    fn options(self, size_mib: u64, ram_mib: u64, disk_mib: u64, at: &Path) -> VolumeOptions {
        self.named("volume", size_mib, ram_mib, disk_mib, at)
    }

    /// For writes that are refused in the end; earlier ones are repeated if other work keeps the disk busy.
    fn fail_fast(self, size_mib: u64, ram_mib: u64, disk_mib: u64, at: &Path) -> VolumeOptions {
        VolumeOptions {
            pause_limit: Duration::from_secs(10),
            ..self.options(size_mib, ram_mib, disk_mib, at)
        }
    }

    fn named(self, name: &str, size_mib: u64, ram_mib: u64, disk_mib: u64, at: &Path) -> VolumeOptions {
        let persistent = PersistentOptions { name: name.into(), key: [3; 16], base_id: [5; 32] };
        VolumeOptions {
            persistent: (self == Life::Persistent).then_some(persistent),
            ..setup::options(&empty(size_mib), CacheMode::RamDisk, ram_mib, disk_mib, at)
        }
    }
}

macro_rules! for_each_life {
    ($($test:ident),* $(,)?) => {
        mod forgotten {
            $(#[test] fn $test() { super::$test(super::Life::Forgotten) })*
        }
        mod persistent {
            $(#[test] fn $test() { super::$test(super::Life::Persistent) })*
        }
    };
}

for_each_life!(
    writers_near_the_limit_of_a_slow_disk_go_at_its_pace,
    a_disk_that_fails_for_a_while_is_used_again,
    a_full_overflow_disk_pauses_then_refuses_and_recovers,
    a_full_cache_is_full_no_more_once_the_machine_has_discarded,
    a_waiting_write_goes_on_as_soon_as_there_is_space,
    a_flipped_bit_on_the_overflow_disk_is_an_error_on_that_block_only,
    a_read_error_of_the_overflow_disk_is_reported_and_passes,
    discarding_gives_ram_and_disk_back,
    zero_writes_give_ram_and_disk_back_over_an_image_with_data,
    a_lower_ram_limit_takes_effect,
    a_lower_disk_limit_takes_effect,
    the_budget_of_the_host_bounds_all_volumes_together,
);

fn a_disk_that_fails_for_a_while_is_used_again(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&life.options(256, 16, 256, dir.path()), &host);
    faults.write_error_every.store(1, Ordering::Relaxed);
    let writer = std::thread::spawn({
        let device = Arc::clone(&device);
        move || fill(&*device, 200)
    });
    let began = Instant::now();
    wait_until("the disk fails", || volume.counters().cache.disk_errors > 3);
    std::thread::sleep(Duration::from_millis(500));
    let errors = volume.counters().cache.disk_errors;
    // However long that took on a busy host: not more than so often each second.
    let most = 50 + began.elapsed().as_millis() / 10;
    assert!(u128::from(errors) < most, "the disk was tried {errors} times in vain, and not {most}");
    faults.write_error_every.store(0, Ordering::Relaxed);
    assert_eq!(writer.join().unwrap(), (200, None));
    assert_holds(&*device, 200);
}

fn a_full_overflow_disk_pauses_then_refuses_and_recovers(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&life.fail_fast(256, 16, 64, dir.path()), &host);
    // All segments of a persistent cache have positions on disk; RAM adds to the capacity of the other.
    let (least, most) = if life == Life::Persistent { (50, 64) } else { (60, 74) };
    fill_patiently(&*device, 0..least);
    let (taken, why) = fill_on(&*device, least..256);
    assert_eq!(why, Some(IoErrorKind::NoSpace));
    assert!(taken <= most, "{taken} MiB were taken by 10 MiB of RAM and 64 of disk");
    assert!(volume.counters().cache.paused_writes > 0);
    assert_holds(&*device, taken);
    volume.set_disk_bytes(512 * MIB);
    fill_patiently(&*device, 0..256);
    assert_holds(&*device, 256);
}

fn a_full_cache_is_full_no_more_once_the_machine_has_discarded(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&life.fail_fast(256, 16, 64, dir.path()), &host);
    assert!(!volume.shortage().refusing);
    for _ in 0..2 {
        // A segment that was being written when a write was refused may have freed space since.
        wait_until("it is full", || {
            fill(&*device, 256).1 == Some(IoErrorKind::NoSpace) && volume.shortage().refusing
        });
        blocking::discard(&*device, 0, 256 * MIB).unwrap();
        wait_until("it is not full any more", || !volume.shortage().refusing);
        fill_patiently(&*device, 0..30);
    }
}

fn a_waiting_write_goes_on_as_soon_as_there_is_space(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&life.options(256, 16, 512, dir.path()), &host);
    faults.full.store(true, Ordering::Relaxed);
    let writer = std::thread::spawn({
        let device = Arc::clone(&device);
        move || fill(&*device, 100)
    });
    wait_until("a write waits", || volume.counters().cache.paused_writes > 0);
    // Reads always continue.
    let mut read = vec![0; MIB as usize];
    blocking::read(&*device, 0, &mut read).unwrap();
    assert!(read == pattern(0));
    faults.full.store(false, Ordering::Relaxed);
    assert_eq!(writer.join().unwrap(), (100, None));
    assert_holds(&*device, 100);
    assert_eq!(volume.counters().cache.refused_writes, 0);
}

fn a_flipped_bit_on_the_overflow_disk_is_an_error_on_that_block_only(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&life.options(128, 16, 256, dir.path()), &host);
    assert_eq!(fill(&*device, 64), (64, None));
    faults.flip.store(true, Ordering::Relaxed);
    let mut errors = 0;
    let mut block = vec![0; 4096];
    for number in 0..(32 * MIB / 4096) {
        match blocking::read(&*device, number * 4096, &mut block) {
            Ok(()) => {
                let from = (number * 4096 % MIB) as usize;
                assert!(block == pattern(number * 4096 / MIB)[from..from + 4096]);
            }
            Err(error) => {
                assert_eq!(error.kind(), IoErrorKind::Corrupt);
                let place = format!("the block at byte {} of volume 'tested' ", number * 4096);
                for part in [place.as_str(), "authentication tag", "check that disk"] {
                    assert!(error.to_string().contains(part), "{error}");
                }
                errors += 1;
            }
        }
        if errors > 8 {
            break;
        }
    }
    assert!(errors > 8);
    assert_eq!(volume.counters().cache.corrupt_blocks, errors);
    faults.flip.store(false, Ordering::Relaxed);
    assert_holds(&*device, 64);
}

fn a_read_error_of_the_overflow_disk_is_reported_and_passes(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (_volume, device) = setup::open(&life.options(128, 16, 256, dir.path()), &host);
    assert_eq!(fill(&*device, 64), (64, None));
    faults.read_error_every.store(1, Ordering::Relaxed);
    let mut read = vec![0; MIB as usize];
    assert_eq!(blocking::read(&*device, 0, &mut read).unwrap_err().kind(), IoErrorKind::Device);
    faults.read_error_every.store(0, Ordering::Relaxed);
    assert_holds(&*device, 64);
}

fn discarding_gives_ram_and_disk_back(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&life.options(256, 32, 512, dir.path()), &host);
    assert_eq!(fill(&*device, 200), (200, None));
    assert!(volume.counters().cache.disk_used_bytes > 150 * MIB);
    blocking::discard(&*device, 0, 256 * MIB).unwrap();
    // Segments that were being written are freed when the write ends; the segment being filled stays, and in
    // a persistent cache its position, too. There, positions are free when it is durable that nothing is in
    // them.
    let stays_bytes = if life == Life::Persistent { 5 * MIB } else { 0 };
    wait_until("space is given back", || {
        blocking::flush(&*device).unwrap();
        let cache = volume.counters().cache;
        cache.disk_used_bytes <= stays_bytes && cache.ram_used_bytes - cache.index_bytes <= 2 * MIB
    });
    let mut read = vec![1; MIB as usize];
    blocking::read(&*device, 7 * MIB, &mut read).unwrap();
    assert!(read.iter().all(|b| *b == 0));
}

fn zero_writes_give_ram_and_disk_back_over_an_image_with_data(life: Life) {
    const COUNT: u64 = 200;
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let base = empty(COUNT + 1);
    let beneath = vec![0x5a; MIB as usize];
    (0..=COUNT).for_each(|number| blocking::write(&*base, number * MIB, &beneath).unwrap());
    let options = VolumeOptions { base, ..life.options(COUNT + 1, 64, 512, dir.path()) };
    let (volume, device) = setup::open(&options, &host);
    // Every other segment is like text.
    let text = |number: u64| Rng::new(number).runs(MIB as usize, 8);
    for number in 0..COUNT {
        let data = if number / 2 % 2 == 0 { text(number) } else { pattern(number) };
        blocking::write(&*device, number * MIB, &data).unwrap();
    }
    assert!(volume.counters().cache.disk_used_bytes > 50 * MIB);
    if life == Life::Forgotten {
        // Data for which a writer waits is spilled instead.
        let mut numbers = (0..COUNT).cycle();
        wait_until("some of it is packed", || {
            let number = numbers.next().unwrap();
            blocking::write(&*device, number * MIB, &text(number)).unwrap();
            volume.counters().cache.packed_bytes > 0
        });
    }
    for block in 0..COUNT * MIB / 4096 {
        if block % 2 == 0 {
            blocking::write(&*device, block * 4096, &[0; 4096]).unwrap();
        } else {
            blocking::write_zeroes(&*device, block * 4096, 4096).unwrap();
        }
    }
    // As after a discard.
    let stays_bytes = if life == Life::Persistent { 5 * MIB } else { 0 };
    wait_until("space is given back", || {
        blocking::flush(&*device).unwrap();
        let cache = volume.counters().cache;
        let ram_bytes = cache.ram_used_bytes - cache.index_bytes;
        cache.disk_used_bytes <= stays_bytes && cache.packed_bytes == 0 && ram_bytes <= 2 * MIB
    });
    let mut read = vec![1; MIB as usize];
    for number in 0..COUNT {
        blocking::read(&*device, number * MIB, &mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 0), "MiB {number}");
    }
    blocking::read(&*device, COUNT * MIB, &mut read).unwrap();
    assert!(read == beneath);
}

fn a_lower_ram_limit_takes_effect(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&life.options(256, 96, 512, dir.path()), &host);
    assert_eq!(fill(&*device, 200), (200, None));
    let used = || volume.counters().cache.ram_used_bytes;
    assert!(used() > 72 * MIB, "{} bytes of 96 MiB are used", used());
    volume.set_ram_bytes(24 * MIB);
    // Dirty segments have to be written first. The host counts the buffers for that, too, while they exist.
    wait_until("the lower limit is kept", || used() <= 24 * MIB && host.used_bytes() <= 24 * MIB);
    assert_holds(&*device, 200);
    for number in 0..64 {
        blocking::write(&*device, number * MIB, &pattern(number)).unwrap();
        assert!(used() <= 24 * MIB, "{:?}", volume.counters().cache);
    }
    assert_holds(&*device, 200);
}

fn a_lower_disk_limit_takes_effect(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&life.fail_fast(256, 16, 256, dir.path()), &host);
    fill_patiently(&*device, 0..120);
    volume.set_disk_bytes(64 * MIB);
    // Data above the new limit stays, and only RAM takes more.
    let more = (120..160).take_while(|mib| blocking::write(&*device, mib * MIB, &pattern(*mib)).is_ok());
    let more = more.count();
    assert!(more <= 16, "{more} MiB were taken above the limit");
    assert_holds(&*device, 120 + more as u64);
    blocking::discard(&*device, 0, 256 * MIB).unwrap();
    wait_until("what was discarded is free", || {
        blocking::flush(&*device).unwrap();
        volume.counters().cache.disk_used_bytes <= 5 * MIB
    });
    fill_patiently(&*device, 0..45);
    let (taken, why) = fill_on(&*device, 45..256);
    assert_eq!(why, Some(IoErrorKind::NoSpace));
    assert!(taken <= 74, "{taken} MiB were taken by 10 MiB of RAM and 64 of disk");
    assert!(volume.counters().cache.disk_used_bytes <= 64 * MIB);
    assert_holds(&*device, taken);
}

#[test]
fn a_lower_disk_limit_is_reached_although_the_disk_failed_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&Life::Forgotten.options(256, 16, 256, dir.path()), &host);
    // Written twice, the second time 64 KiB in each second block of 64 KiB: so half of most segments is dead.
    assert_eq!(fill(&*device, 110), (110, None));
    let again = pattern(7);
    for at in 0..110 * 8 {
        blocking::write(&*device, at * (MIB / 8), &again[..(MIB / 16) as usize]).unwrap();
    }
    let used = || volume.counters().cache.disk_used_bytes;
    let before = used();
    assert!(before > 140 * MIB, "{before}");
    faults.write_error_every.store(1, Ordering::Relaxed);
    volume.set_disk_bytes(124 * MIB);
    wait_until("cleaning meets a disk that takes nothing", || volume.counters().cache.disk_errors > 20);
    faults.write_error_every.store(0, Ordering::Relaxed);
    wait_until("the lower limit is kept", || used() <= 126 * MIB);
    for at in 0..110 * 8 {
        let mut read = vec![0; (MIB / 16) as usize];
        blocking::read(&*device, at * (MIB / 8), &mut read).unwrap();
        assert!(read == again[..(MIB / 16) as usize], "{at}");
    }
}

fn the_budget_of_the_host_bounds_all_volumes_together(life: Life) {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(64 * MIB);
    let volumes: Vec<_> = (0..4)
        .map(|number| {
            let name = format!("volume{number}");
            setup::open(&life.named(&name, 64, 64, 256, dir.path()), &host)
        })
        .collect();
    std::thread::scope(|scope| {
        for (_, device) in &volumes {
            scope.spawn(|| assert_eq!(fill(&**device, 64), (64, None)));
        }
    });
    // The two buffers of each persistent cache are in it.
    assert!(host.used_bytes() <= 65 * MIB, "{} bytes used", host.used_bytes());
    volumes.iter().for_each(|(_, device)| assert_holds(&**device, 64));
    drop(volumes);
    wait_until("the budget is given back", || host.used_bytes() == 0);
}

/// On a disk of at most 2 GB/s, fast enough for throttling by spinning.
#[test]
fn a_lone_writer_near_the_limit_goes_at_the_pace_of_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    faults.nowhere_us.store(1000, Ordering::Relaxed);
    let (volume, device) =
        setup::open(&setup::options(&empty(256), CacheMode::RamDisk, 64, 512, dir.path()), &host);
    let data = pattern(1);
    // A busy host may be slower than that for a while.
    wait_until("somebody is paced", || {
        blocking::discard(&*device, 0, 256 * MIB).unwrap();
        (0..192).for_each(|number| blocking::write(&*device, number * MIB, &data).unwrap());
        volume.counters().cache.throttled_writes > 0
    });
}

/// Several writers on a disk of 300 MB/s: they wait for it before space runs out, and no data is lost.
fn writers_near_the_limit_of_a_slow_disk_go_at_its_pace(life: Life) {
    const WRITERS: u64 = 4;
    const EACH_MIB: u64 = 48;
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    faults.write_delay_ms.store(20, Ordering::Relaxed);
    let (volume, device) = setup::open(&life.options(256, 64, 512, dir.path()), &host);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let device = &device;
            let from = writer * EACH_MIB;
            scope.spawn(move || assert_eq!(fill_on(&**device, from..from + EACH_MIB).1, None));
        }
    });
    let counters = volume.counters().cache;
    assert!(counters.throttled_writes > 0, "{counters:?}");
    assert_eq!(counters.refused_writes, 0);
    faults.write_delay_ms.store(0, Ordering::Relaxed);
    assert_holds(&*device, WRITERS * EACH_MIB);
}
