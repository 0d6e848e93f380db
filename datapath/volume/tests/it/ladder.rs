//! The order of steps as space runs out and comes back; damage on the overflow disk; memory that is returned.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::filling::{MIB, assert_holds, empty, fill, fill_patiently, pattern};
use crate::setup;
use headwater_block::{IoErrorKind, blocking};
use headwater_testkit::{Rng, wait_until};
use headwater_volume::{CacheMode, Volume};

/// Like text: compresses to a quarter.
fn compressible(seed: u64) -> Vec<u8> {
    Rng::new(seed).runs(MIB as usize, 8)
}

#[test]
fn compressible_data_is_packed_and_ram_holds_twice_as_much() {
    let dir = tempfile::tempdir().unwrap();
    for (mode, disk_mib) in [(CacheMode::Ram, 0), (CacheMode::RamDisk, 256)] {
        let (host, _) = setup::host(u64::MAX);
        let (volume, device) =
            setup::open(&setup::options(&empty(256), mode, 64, disk_mib, dir.path()), &host);
        let count = if mode == CacheMode::Ram { 120 } else { 240 };
        for round in 0..2 {
            for number in 0..count {
                blocking::write(&*device, number * MIB, &compressible(number + round)).unwrap();
            }
        }
        // Parts of blocks, wherever the rest is.
        for number in 0..count {
            blocking::write(&*device, number * MIB + 512, &[7; 512]).unwrap();
        }
        let mut read = vec![0; MIB as usize];
        for number in 0..count {
            blocking::read(&*device, number * MIB, &mut read).unwrap();
            let mut expected = compressible(number + 1);
            expected[512..1024].fill(7);
            assert!(read == expected, "MiB {number} was lost in mode {mode}");
        }
        let cache = volume.counters().cache;
        assert!(cache.packed_segments > 0 && cache.read_packed_blocks > 0, "{cache:?}");
        assert!(cache.packed_holds_bytes > 2 * cache.packed_bytes, "{cache:?}");
        assert!(cache.ram_used_bytes <= cache.ram_target_bytes, "{cache:?}");
        assert_eq!(cache.spilled_segments > 0, mode == CacheMode::RamDisk, "{cache:?}");
        blocking::discard(&*device, 0, 256 * MIB).unwrap();
        wait_until("packed RAM is given back", || volume.counters().cache.packed_bytes == 0);
        drop((volume, device));
        wait_until("the budget is given back", || host.used_bytes() == 0);
    }
}

#[test]
fn a_disk_that_takes_nothing_leaves_packing() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::RamDisk, 64, 512, dir.path());
    // Packing is slow on a busy host.
    options.pause_limit = Duration::from_secs(60);
    let (volume, device) = setup::open(&options, &host);
    faults.full.store(true, Ordering::Relaxed);
    for number in 0..60 {
        // More than fits into RAM uncompressed, and less than fits if half of it is packed.
        blocking::write(&*device, number * MIB, &six_bits(number)).unwrap();
    }
    let cache = volume.counters().cache;
    assert!(cache.packed_segments > 0 && cache.refused_writes == 0, "{cache:?}");
    assert_eq!(cache.spilled_segments, 0, "{cache:?}");
    faults.full.store(false, Ordering::Relaxed);
    for number in 60..120 {
        blocking::write(&*device, number * MIB, &six_bits(number)).unwrap();
    }
    assert!(volume.counters().cache.spilled_segments > 0, "the disk takes segments again");
    let mut read = vec![0; MIB as usize];
    for number in 0..120 {
        blocking::read(&*device, number * MIB, &mut read).unwrap();
        assert!(read == six_bits(number), "MiB {number}");
    }
}

#[test]
fn what_was_not_worth_packing_beside_a_disk_is_packed_when_the_disk_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::RamDisk, 64, 512, dir.path());
    options.pause_limit = Duration::from_secs(20);
    let (volume, device) = setup::open(&options, &host);
    // The disk accepts nothing yet, and has not failed: only the weak packer tries the segments that wait for
    // it.
    faults.hold.store(true, Ordering::Relaxed);
    for number in 0..50 {
        blocking::write(&*device, number * MIB, &six_bits(number)).unwrap();
    }
    std::thread::sleep(Duration::from_millis(200));
    faults.full.store(true, Ordering::Relaxed);
    faults.hold.store(false, Ordering::Relaxed);
    for number in 50..66 {
        blocking::write(&*device, number * MIB, &six_bits(number)).unwrap();
    }
    assert!(volume.counters().cache.packed_segments > 0);
    let mut read = vec![0; MIB as usize];
    for number in 0..66 {
        blocking::read(&*device, number * MIB, &mut read).unwrap();
        assert!(read == six_bits(number), "MiB {number}");
    }
}

#[test]
fn a_segment_that_the_disk_did_not_read_once_is_cleaned_later() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(64), CacheMode::RamDisk, 16, 80, dir.path()), &host);
    let mut rng = Rng::new(5);
    let write = |rng: &mut Rng| {
        let at = rng.below(64 * MIB / 4096) * 4096;
        blocking::write(&*device, at, &rng.bytes(4096)).unwrap();
    };
    for number in 0..64 {
        blocking::write(&*device, number * MIB, &rng.bytes(MIB as usize)).unwrap();
    }
    faults.read_error_every.store(1, Ordering::Relaxed);
    let before = volume.counters().cache;
    // So little that there is space without cleaning, but cleaning is tried.
    wait_until("cleaning is tried without success", || {
        (0..5).for_each(|_| write(&mut rng));
        volume.counters().cache.disk_errors > before.disk_errors + 2
    });
    faults.read_error_every.store(0, Ordering::Relaxed);
    // Several times as much as the disk holds: each position is cleaned repeatedly.
    for _ in 0..80_000 {
        write(&mut rng);
    }
    let cache = volume.counters().cache;
    assert!(cache.cleaned_segments > 20 && cache.refused_writes == 0, "{cache:?}");
}

#[test]
fn a_few_places_that_stay_unreadable_do_not_keep_cleaning_from_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(64), CacheMode::RamDisk, 16, 80, dir.path()), &host);
    let mut rng = Rng::new(6);
    for number in 0..64 {
        blocking::write(&*device, number * MIB, &rng.bytes(MIB as usize)).unwrap();
    }
    *faults.unreadable.lock().unwrap() = [5, 19, 31, 44].map(|place| place * MIB).to_vec();
    let mut write = || {
        // Half of the blocks, so that the others stay in their segments, which age.
        let at = rng.below(32 * MIB / 4096) * 8192;
        blocking::write(&*device, at, &rng.bytes(4096)).unwrap();
    };
    (0..60_000).for_each(|_| write());
    let before = volume.counters().cache;
    assert!(before.disk_errors > 3, "the places were met: {before:?}");
    (0..60_000).for_each(|_| write());
    let cache = volume.counters().cache;
    assert!(cache.cleaned_segments > before.cleaned_segments + 20, "{before:?} and then {cache:?}");
    assert!(cache.refused_writes == 0, "{cache:?}");
}

/// Six random bits in each byte: zstd compresses it to three quarters, LZ4 not at all.
fn six_bits(seed: u64) -> Vec<u8> {
    Rng::new(seed).bytes(MIB as usize).iter().map(|byte| byte & 63).collect()
}

#[test]
fn data_that_hardly_packs_is_packed_where_it_cannot_go_to_a_disk() {
    let dir = tempfile::tempdir().unwrap();
    for (mode, disk_mib) in [(CacheMode::Ram, 0), (CacheMode::RamDisk, 256)] {
        let (host, _) = setup::host(u64::MAX);
        let mut options = setup::options(&empty(128), mode, 64, disk_mib, dir.path());
        // Packing so little at a time is slow on a busy host.
        options.pause_limit = Duration::from_secs(60);
        let (volume, device) = setup::open(&options, &host);
        for number in 0..72 {
            blocking::write(&*device, number * MIB, &six_bits(number)).unwrap();
        }
        let cache = volume.counters().cache;
        if mode == CacheMode::Ram {
            assert!(cache.packed_holds_bytes * 10 > cache.packed_bytes * 12, "{cache:?}");
            assert!(cache.ram_used_bytes <= cache.ram_target_bytes, "{cache:?}");
        } else {
            assert!(cache.packed_segments == 0 && cache.spilled_segments > 0, "{cache:?}");
        }
        let mut read = vec![0; MIB as usize];
        for number in 0..72 {
            blocking::read(&*device, number * MIB, &mut read).unwrap();
            assert!(read == six_bits(number), "MiB {number} was lost in mode {mode}");
        }
    }
}

#[test]
fn overwritten_packed_blocks_are_space_again() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(128), CacheMode::Ram, 48, 0, dir.path()), &host);
    let mut rng = Rng::new(77);
    let mut newest = vec![0u64; 80 * 256];
    // 80 MiB that compress to a tenth, overwritten ten times, block by block, in random order.
    for write in 1..=200_000u64 {
        let block = rng.index(newest.len());
        newest[block] = write;
        blocking::write(&*device, block as u64 * 4096, &block_of(write)).unwrap();
    }
    let mut read = vec![0; 4096];
    for (block, write) in newest.iter().enumerate() {
        blocking::read(&*device, block as u64 * 4096, &mut read).unwrap();
        let expected = if *write == 0 { vec![0; 4096] } else { block_of(*write) };
        assert!(read == expected, "block {block}");
    }
    assert_eq!(volume.counters().cache.refused_writes, 0);
}

fn block_of(seed: u64) -> Vec<u8> {
    Rng::new(seed).runs(4096, 64)
}

#[test]
fn zeroing_a_whole_disk_takes_no_index() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(4096), CacheMode::Ram, 16, 0, dir.path()), &host);
    let zeroes = vec![0; 4 << 20];
    for number in 0..1024 {
        blocking::write(&*device, number * 4 * MIB, &zeroes).unwrap();
    }
    let cache = volume.counters().cache;
    assert!(cache.index_bytes < 64 << 10, "{cache:?}");
}

fn eighth(seed: u64) -> Vec<u8> {
    Rng::new(seed).runs(4096, 8)
}

/// The index of scattered blocks takes as much as the packed blocks.
#[test]
fn blocks_far_apart_on_a_large_disk_stay_within_the_ram() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(4096), CacheMode::Ram, 24, 0, dir.path());
    // As long as packing takes on a busy host; otherwise the first write that waits for it would end the
    // test.
    options.pause_limit = Duration::from_secs(10);
    let (volume, device) = setup::open(&options, &host);
    let mut rng = Rng::new(3);
    let (mut most_bytes, mut refused) = (0, 0);
    for write in 0..100_000 {
        let at = rng.below(4096 * MIB / 4096) * 4096;
        refused += u32::from(blocking::write(&*device, at, &eighth(write)).is_err());
        let cache = volume.counters().cache;
        most_bytes = most_bytes.max(cache.ram_used_bytes);
        assert!(cache.ram_used_bytes <= cache.ram_target_bytes, "write {write}: {cache:?}");
        if refused > 2 {
            break;
        }
    }
    // Nearly all of it was used.
    let cache = volume.counters().cache;
    assert!(refused > 2 && most_bytes > 20 * MIB, "{refused} refused, {most_bytes} bytes: {cache:?}");
    assert!(cache.packed_segments > 10 && cache.index_bytes > 3 * MIB, "{cache:?}");
}

#[test]
fn a_full_ram_cache_refuses_writes_keeps_what_it_has_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::Ram, 32, 0, dir.path());
    options.pause_limit = Duration::from_secs(3);
    let (volume, device) = setup::open(&options, &host);
    let (taken, why) = fill(&*device, 64);
    assert_eq!(why, Some(IoErrorKind::NoSpace));
    assert!((29..=32).contains(&taken), "{taken} MiB of 32 were usable");
    assert_holds(&*device, taken);
    assert!(volume.counters().cache.refused_writes > 0);
    // Overwriting needs no space, and a discard frees some.
    blocking::write(&*device, 0, &pattern(0)).unwrap();
    blocking::discard(&*device, MIB, 4 * MIB).unwrap();
    blocking::write(&*device, 100 * MIB, &pattern(100)).unwrap();
    // So does a higher limit.
    volume.set_ram_bytes(96 * MIB);
    fill_patiently(&*device, 0..64);
    assert_holds(&*device, 64);
}

#[test]
fn a_lower_limit_of_a_ram_cache_is_reached_by_packing() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(128), CacheMode::Ram, 96, 0, dir.path()), &host);
    for number in 0..60 {
        blocking::write(&*device, number * MIB, &compressible(number)).unwrap();
    }
    assert!(volume.counters().cache.ram_used_bytes > 48 * MIB);
    volume.set_ram_bytes(48 * MIB);
    wait_until("the lower limit is kept", || volume.counters().cache.ram_used_bytes <= 48 * MIB);
    let mut read = vec![0; MIB as usize];
    for number in 0..60 {
        blocking::read(&*device, number * MIB, &mut read).unwrap();
        assert!(read == compressible(number), "MiB {number} was lost");
    }
}

#[test]
fn a_ram_cache_keeps_what_does_not_pack_above_a_lower_limit() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::Ram, 96, 0, dir.path());
    options.pause_limit = Duration::from_secs(3);
    let (volume, device) = setup::open(&options, &host);
    fill_patiently(&*device, 0..60);
    volume.set_ram_bytes(48 * MIB);
    // Twice as much as fits into the segment being filled.
    let refused = (60..64).find_map(|number| blocking::write(&*device, number * MIB, &pattern(number)).err());
    assert_eq!(refused.map(|error| error.kind()), Some(IoErrorKind::NoSpace));
    let cache = volume.counters().cache;
    assert!(cache.ram_used_bytes >= 60 * MIB && cache.paused_writes > 0, "{cache:?}");
    assert_holds(&*device, 60);
    blocking::discard(&*device, 0, 128 * MIB).unwrap();
    fill_patiently(&*device, 0..40);
    assert!(volume.counters().cache.ram_used_bytes <= 48 * MIB);
    assert_holds(&*device, 40);
}

#[test]
fn zeroes_of_less_than_a_block_need_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::Ram, 32, 0, dir.path());
    options.pause_limit = Duration::from_millis(200);
    let (volume, device) = setup::open(&options, &host);
    blocking::write_zeroes(&*device, 100 * MIB, 4096).unwrap();
    blocking::write(&*device, 101 * MIB, &[0; 4096]).unwrap();
    let (taken, why) = fill(&*device, 64);
    assert_eq!(why, Some(IoErrorKind::NoSpace));
    let refused = volume.counters().cache.refused_writes;
    // Never written; discarded or zeroed as a whole before.
    for at in [110 * MIB, 100 * MIB, 101 * MIB] {
        blocking::discard(&*device, at + 512, 512).unwrap();
        blocking::write_zeroes(&*device, at + 1024, 8192).unwrap();
        blocking::write(&*device, at + 2048, &[0; 512]).unwrap();
    }
    assert_eq!(volume.counters().cache.refused_writes, refused);
    assert_holds(&*device, taken);
}

/// If the rest of a block has to be kept, that needs a slot; whole blocks of the same discard are freed
/// nevertheless.
#[test]
fn discards_of_less_than_a_block_are_not_refused() {
    // Compressible data in RAM only, and incompressible data with a disk.
    for (mode, packs) in [(CacheMode::Ram, true), (CacheMode::RamDisk, false)] {
        let dir = tempfile::tempdir().unwrap();
        let (host, _) = setup::host(u64::MAX);
        let mut options = setup::options(&empty(512), mode, 16, 48, dir.path());
        options.pause_limit = Duration::from_millis(200);
        let (volume, device) = setup::open(&options, &host);
        let contents = if packs { compressible } else { pattern };
        let refused =
            (0..512).find(|number| blocking::write(&*device, number * MIB, &contents(*number)).is_err());
        let taken = refused.expect("it is full at some time");
        let mut left = 0;
        for number in 0..taken {
            // The second half of a block, a whole one, and the first half of another.
            blocking::discard(&*device, number * MIB + 2048, 8192).unwrap();
            let mut expected = contents(number);
            expected[4096..8192].fill(0);
            let mut found = vec![0; MIB as usize];
            blocking::read(&*device, number * MIB, &mut found).unwrap();
            for part in [2048..4096, 8192..10240] {
                left += u32::from(found[part.clone()] == expected[part.clone()]);
                let is_zero = found[part.clone()].iter().all(|byte| *byte == 0);
                assert!(is_zero || found[part.clone()] == expected[part.clone()], "MiB {number} is torn");
                expected[part.clone()].copy_from_slice(&found[part]);
            }
            assert!(found == expected, "MiB {number} holds something else");
        }
        let cache = volume.counters().cache;
        assert!(left > 0 && (cache.packed_blocks > 0) == packs, "{mode}: {left} parts, {cache:?}");
        // A zero write makes zeroes, or is refused.
        let zeroed = (0..taken).find(|number| {
            blocking::write_zeroes(&*device, number * MIB + 65536 + 2048, 512).map_err(|e| e.kind())
                == Err(IoErrorKind::NoSpace)
        });
        assert!(zeroed.is_some(), "{mode}: no zero write was refused");
        // Whatever frees space helps here, too.
        blocking::discard(&*device, 2048, taken * MIB - 4096).unwrap();
        wait_until("there is room again", || blocking::write(&*device, 0, &pattern(1)).is_ok());
    }
}

#[test]
fn a_few_dead_blocks_in_each_segment_are_space_too() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::Ram, 32, 0, dir.path());
    options.pause_limit = Duration::from_secs(10);
    let (_volume, device) = setup::open(&options, &host);
    let (taken, why) = fill(&*device, 64);
    assert_eq!(why, Some(IoErrorKind::NoSpace));
    // A tenth of each MiB is discarded; as much fits again elsewhere.
    for number in 0..taken {
        blocking::discard(&*device, number * MIB, MIB / 10 / 4096 * 4096).unwrap();
    }
    for number in 0..2 {
        blocking::write(&*device, (100 + number) * MIB, &pattern(number)).unwrap();
    }
    let mut read = vec![0; MIB as usize];
    for number in 0..2 {
        blocking::read(&*device, (100 + number) * MIB, &mut read).unwrap();
        assert!(read == pattern(number));
    }
}

/// A slot of a packed segment is not reused: a dead slot is free space only when the segment is made smaller.
#[test]
fn a_few_dead_blocks_in_each_packed_segment_are_space_too() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(512), CacheMode::Ram, 48, 0, dir.path());
    // As long as packing takes on a busy host, or the first write that waits for it is the end.
    options.pause_limit = Duration::from_secs(10);
    let (volume, device) = setup::open(&options, &host);
    let refused =
        (0..400).find(|number| blocking::write(&*device, number * MIB, &compressible(*number)).is_err());
    let taken = refused.expect("it is full at some time");
    // Less than a quarter of each segment.
    for block in (0..taken * 256).step_by(5) {
        blocking::discard(&*device, block * 4096, 4096).unwrap();
    }
    let cache = volume.counters().cache;
    assert!(cache.packed_bytes > 24 * MIB, "{cache:?}");
    let unpacked_bytes = cache.ram_used_bytes - cache.packed_bytes - cache.index_bytes;
    let at = |number: u64| 400 * MIB + number * 4096;
    let incompressible = |number: u64| Rng::new(1000 + number).bytes(4096);
    let refused =
        (0..28_000).find(|number| blocking::write(&*device, at(*number), &incompressible(*number)).is_err());
    let written = refused.expect("it is full again");
    // The dead blocks of the others are a fifth of them.
    assert!(written * 4096 > unpacked_bytes / 5 + 2 * MIB, "{written} blocks: {:?}", volume.counters().cache);
    let mut found = vec![0; MIB as usize];
    for number in 0..taken {
        blocking::read(&*device, number * MIB, &mut found).unwrap();
        let mut expected = compressible(number);
        for (block, part) in (number * 256..).zip(expected.chunks_mut(4096)) {
            if block.is_multiple_of(5) {
                part.fill(0);
            }
        }
        assert!(found == expected, "MiB {number}");
    }
    let mut found = vec![0; 4096];
    for number in 0..written {
        blocking::read(&*device, at(number), &mut found).unwrap();
        assert!(found == incompressible(number), "block {number}");
    }
}

/// Cleaning may take RAM beyond the limit because it frees more; but not if the disk only reads.
#[test]
fn a_disk_that_reads_and_does_not_write_does_not_end_up_in_ram() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::RamDisk, 16, 64, dir.path());
    options.pause_limit = Duration::from_secs(10);
    let (volume, device) = setup::open(&options, &host);
    fill_patiently(&*device, 0..56);
    faults.write_error_every.store(1, Ordering::Relaxed);
    // A quarter of each segment is dead, so each is worth cleaning; and writers need space.
    let mut rng = Rng::new(5);
    let mut most = 0;
    for number in 0..150 {
        for block in 0..24 {
            blocking::discard(&*device, (number * 24 + block) * 4 * 4096, 4096).unwrap();
        }
        let _ = blocking::write(&*device, (100 * 256 + number) * 4096, &rng.bytes(4096));
        std::thread::sleep(Duration::from_millis(10));
        most = most.max(volume.counters().cache.ram_used_bytes);
    }
    assert!(most <= 18 * MIB, "{most} bytes in use: {:?}", volume.counters().cache);
}

#[test]
fn a_write_that_waits_is_refused_when_the_volume_closes() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(128), CacheMode::Ram, 32, 0, dir.path());
    options.pause_limit = Duration::from_secs(600);
    let (volume, device) = setup::open(&options, &host);
    let writer = std::thread::spawn(move || fill(&*device, 64).1);
    wait_until("a write waits", || volume.counters().cache.paused_writes > 0);
    volume.close();
    assert_eq!(writer.join().unwrap(), Some(IoErrorKind::Closed));
}

#[test]
fn the_overflow_file_has_no_name() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (_volume, device) =
        setup::open(&setup::options(&empty(128), CacheMode::RamDisk, 16, 256, dir.path()), &host);
    assert_eq!(fill(&*device, 100), (100, None));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn what_cannot_work_is_refused_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let refuse = |ram_mib, at: &std::path::Path| {
        let options = setup::options(&empty(16), CacheMode::RamDisk, ram_mib, 64, at);
        Volume::open(&options, &host).err().expect("it was accepted").to_string()
    };
    assert!(refuse(4, dir.path()).contains("at least 16.0 MiB"));
    assert!(refuse(64, &dir.path().join("missing")).contains("missing"));
}
