//! A file system below the overflow file that is really full: another user fills it, and frees it again.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::filling::{MIB, assert_holds, empty, fill_on, fill_patiently, pattern};
use crate::setup;
use headwater_block::{IoErrorKind, blocking};
use headwater_testkit::{Rng, on_small_file_system, test_name, wait_until};
use headwater_volume::{CacheMode, PersistentOptions, VolumeOptions};
use rustix::fs::{FallocateFlags, fallocate};

const SIZE_MIB: u64 = 160;
/// The part of the file system that another user takes.
const BALLAST_MIB: u64 = 96;
/// The volume's own limit; as much is free when it is opened, otherwise the open is refused.
const LIMIT_MIB: u64 = 150;

#[test]
fn a_file_system_that_others_fill_is_waited_for_and_used_again_when_it_has_room() {
    let dir = tempfile::tempdir().unwrap();
    let this = test_name(a_file_system_that_others_fill_is_waited_for_and_used_again_when_it_has_room);
    on_small_file_system(this, dir.path(), SIZE_MIB, in_it);
}

/// The child's part of the test above.
fn in_it(dir: &Path) {
    let steps: [&dyn Fn(); 8] = [
        &|| fill_and_free(dir, false),
        &|| overwrite_with_little_more_than_it_takes(dir, false),
        &|| fill_and_free(dir, true),
        &|| overwrite_with_little_more_than_it_takes(dir, true),
        &|| flush_what_was_accepted(dir),
        &|| flush_sectors_that_were_accepted(dir),
        &|| clean_under_a_lowered_limit(dir),
        &|| open_again_while_the_closed_volume_is_still_there(dir),
    ];
    for step in steps {
        step();
        // A closed volume's file is let go by its last thread.
        wait_until("the space of the closed volume is free", || free(dir) >= LIMIT_MIB * MIB);
    }
}

fn free(dir: &Path) -> u64 {
    let stats = rustix::fs::statvfs(dir).unwrap();
    stats.f_bavail * stats.f_frsize
}

fn options(dir: &Path, persistent: Option<&str>, limit_mib: u64) -> VolumeOptions {
    let kept = persistent.map(|name| PersistentOptions { name: name.into(), key: [7; 16], base_id: [5; 32] });
    VolumeOptions {
        persistent: kept,
        // Long compared with the interval between two attempts at the disk, on a busy machine, too.
        pause_limit: Duration::from_secs(3),
        ..setup::options(&empty(256), CacheMode::RamDisk, 16, limit_mib, dir)
    }
}

/// Fills the file system except for this much.
fn leave(dir: &Path, free_mib: u64) -> std::path::PathBuf {
    let ballast = dir.join("ballast");
    let taken = free(dir) - free_mib * MIB;
    fallocate(File::create(&ballast).unwrap(), FallocateFlags::empty(), 0, taken).unwrap();
    ballast
}

/// A block's contents after so many writes to it.
fn block(number: u64, version: u64) -> [u8; 4096] {
    Rng::new(number << 32 | version).bytes(4096).try_into().unwrap()
}

/// The file system has space for half as much again as the live data: cleaning must free space as long as
/// there are writes.
fn overwrite_with_little_more_than_it_takes(dir: &Path, persistent: bool) {
    let (host, _) = setup::host(u64::MAX);
    let options = options(dir, persistent.then_some("worn"), LIMIT_MIB);
    // Cleaning takes its time on a busy host.
    let options = VolumeOptions { pause_limit: Duration::from_secs(60), ..options };
    let (volume, device) = setup::open(&options, &host);
    let ballast = leave(dir, 64);
    let blocks = 40 * MIB / 4096;
    let mut versions = vec![0; blocks as usize];
    let mut rng = Rng::new(11);
    for step in 0..4 * blocks {
        let number = if step < blocks { step } else { rng.below(blocks) };
        versions[number as usize] = step;
        let written = blocking::write(&*device, number * 4096, &block(number, step));
        written.unwrap_or_else(|e| {
            panic!("write {step}, persistent {persistent}: {e}: {:?}", volume.counters())
        });
    }
    let cache = volume.counters().cache;
    assert!(cache.cleaned_segments > 20 && cache.refused_writes == 0, "{cache:?}");
    let mut read = [0; 4096];
    for (number, version) in (0..).zip(&versions) {
        blocking::read(&*device, number * 4096, &mut read).unwrap();
        assert!(read == block(number, *version), "block {number}");
    }
    volume.close();
    drop((volume, device, host));
    std::fs::remove_file(ballast).unwrap();
    let _ = std::fs::remove_dir_all(dir.join("worn"));
}

/// Another user takes the last byte: flushes still work, and discards free space again.
fn flush_what_was_accepted(dir: &Path) {
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options(dir, Some("flushed"), LIMIT_MIB), &host);
    fill_patiently(&*device, 0..60);
    blocking::flush(&*device).unwrap();
    let ballast = leave(dir, 0);
    let mut refused = 0;
    for step in 0..40 * MIB / 4096 {
        // Every other block, so that none shares its record in the map.
        let number = 60 * MIB / 4096 + 2 * step;
        refused += u64::from(blocking::write(&*device, number * 4096, &block(number, step)).is_err());
        if step % 7 == 0 || refused > 0 {
            blocking::flush(&*device)
                .unwrap_or_else(|e| panic!("flush {step} after {refused} refusals: {e}"));
        }
        if refused > 3 {
            break;
        }
    }
    assert!(refused > 0, "the file system was not full");
    blocking::discard(&*device, 0, 40 * MIB).unwrap();
    blocking::flush(&*device).unwrap();
    wait_until("it has room again", || !volume.shortage().refusing);
    for number in 0..1000 {
        wait_until(format!("block {number} is taken"), || {
            blocking::write(&*device, number * 4096, &block(number, 1)).is_ok()
        });
        if number % 50 == 0 {
            blocking::flush(&*device).unwrap();
        }
    }
    volume.close();
    drop((volume, device, host));
    std::fs::remove_file(ballast).unwrap();
    std::fs::remove_dir_all(dir.join("flushed")).unwrap();
}

/// Further sectors of a slot take no slot, but their notes take space in the map.
fn flush_sectors_that_were_accepted(dir: &Path) {
    let (host, _) = setup::host(u64::MAX);
    let pause_limit = Duration::from_millis(200);
    let options = VolumeOptions { pause_limit, ..options(dir, Some("sectors"), LIMIT_MIB) };
    let (volume, device) = setup::open(&options, &host);
    let ballast = leave(dir, 0);
    // Commits with their slots in the map use most of the space that is claimed for it.
    let mut model = vec![0; 256 << 20];
    let mut put = |at: usize, data: &[u8]| {
        let written = blocking::write(&*device, at as u64, data).is_ok();
        if written {
            model[at..][..data.len()].copy_from_slice(data);
        }
        written
    };
    for number in 0..10 {
        assert!(put((200 << 20) + number * 16 * 4096, &[7; 16 * 4096]));
        blocking::flush(&*device).unwrap();
    }
    let mut blocks = 16_000;
    let mut refused = 0;
    for sector in 0..8 {
        for block in 0..blocks {
            refused += usize::from(!put(block * 8192 + sector * 512, &[1; 512]));
            if refused > 2 * sector {
                blocks = blocks.min(block);
                break;
            }
        }
        assert!(refused > 0, "the file system was not full");
    }
    blocking::flush(&*device).unwrap();
    volume.close();
    drop((volume, device));
    std::fs::remove_file(ballast).unwrap();
    let (volume, device) = setup::open(&options, &host);
    for (mib, model) in (0..).zip(model.chunks(MIB as usize)) {
        let mut found = vec![1; MIB as usize];
        blocking::read(&*device, mib * MIB, &mut found).unwrap();
        assert!(found == model, "MiB {mib}");
    }
    volume.close();
    drop((volume, device, host));
    std::fs::remove_dir_all(dir.join("sectors")).unwrap();
}

/// A cache above its lowered limit is cleaned until only live blocks are left, and then stops.
fn clean_under_a_lowered_limit(dir: &Path) {
    {
        let (host, _) = setup::host(u64::MAX);
        let (volume, device) = setup::open(&options(dir, Some("lowered"), LIMIT_MIB), &host);
        fill_patiently(&*device, 0..60);
        // A fifth of each segment dies.
        for number in (0..60 * MIB / 4096).step_by(5) {
            blocking::discard(&*device, number * 4096, 4096).unwrap();
        }
        volume.close();
    }
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options(dir, Some("lowered"), 40), &host);
    let before = volume.counters().cache.disk_used_bytes;
    // More than its RAM and disk can hold: refused, and cleaning begins.
    assert!((64..100).any(|mib| blocking::write(&*device, mib * MIB, &[1; 1 << 20]).is_err()));
    wait_until("it is cleaned", || {
        let cache = volume.counters().cache;
        cache.cleaned_segments > 10 && cache.disk_used_bytes < before
    });
    let mut operations = 0;
    wait_until("it stands still", || {
        let begun = faults.count.load(Ordering::Relaxed);
        let is_still = begun == operations;
        operations = begun;
        std::thread::sleep(Duration::from_millis(500));
        is_still
    });
    volume.close();
    drop((volume, device, host));
    std::fs::remove_dir_all(dir.join("lowered")).unwrap();
}

/// A closed volume may still be referenced, and the file system has no space for a second one.
fn open_again_while_the_closed_volume_is_still_there(dir: &Path) {
    const BEFORE_MIB: u64 = 20;
    const ALL_MIB: u64 = 50;
    let (host, _) = setup::host(u64::MAX);
    let open = |limit_mib| {
        let pause_limit = Duration::from_millis(200);
        setup::open(&VolumeOptions { pause_limit, ..options(dir, Some("again"), limit_mib) }, &host)
    };
    let (closed, device) = open(LIMIT_MIB);
    fill_patiently(&*device, 0..BEFORE_MIB);
    blocking::flush(&*device).unwrap();
    let ballast = leave(dir, 0);
    // Until it lacks positions, and so keeps requesting them.
    let refused = (100..250).any(|mib| blocking::write(&*device, mib * MIB, &[1; 1 << 20]).is_err());
    assert!(refused, "the file system was not full");
    closed.close();

    let (volume, device) = open(BEFORE_MIB);
    volume.set_disk_bytes(LIMIT_MIB * MIB);
    let file = File::options().write(true).open(&ballast).unwrap();
    let mut taken = file.metadata().unwrap().len();
    for mib in BEFORE_MIB..ALL_MIB {
        wait_until("there is room by now", || {
            let written = blocking::write(&*device, mib * MIB, &pattern(mib));
            if written.is_err() {
                taken = taken.saturating_sub(2 * MIB);
                file.set_len(taken).unwrap();
            }
            written.is_ok()
        });
        blocking::flush(&*device).unwrap();
    }
    volume.close();
    drop((volume, device, file));
    // As it is on disk.
    std::fs::remove_file(&ballast).unwrap();
    let (volume, device) = open(LIMIT_MIB);
    assert_holds(&*device, ALL_MIB);
    volume.close();
    drop((closed, volume, device, host));
    std::fs::remove_dir_all(dir.join("again")).unwrap();
}

fn fill_and_free(dir: &Path, persistent: bool) {
    let ballast = dir.join("ballast");
    let take = || {
        let file = File::create(&ballast).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, BALLAST_MIB * MIB).unwrap();
    };
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options(dir, persistent.then_some("kept"), LIMIT_MIB), &host);
    for round in 0..2 {
        take();
        // The volume's own limit is far away: the file system is full.
        fill_patiently(&*device, 0..30);
        let (taken, why) = fill_on(&*device, 30..256);
        assert_eq!(why, Some(IoErrorKind::NoSpace), "round {round}, persistent: {persistent}");
        assert!(taken <= SIZE_MIB - BALLAST_MIB + 16, "round {round}: {taken} MiB were taken");
        let cache = volume.counters().cache;
        assert!(cache.disk_errors > 0 && cache.refused_writes > 0 && cache.corrupt_blocks == 0, "{cache:?}");
        assert_holds(&*device, taken);

        // Only that: no limit is changed, and nothing is written meanwhile.
        std::fs::remove_file(&ballast).unwrap();
        wait_until("it is not full any more", || !volume.shortage().refusing);
        let more = taken + BALLAST_MIB / 2;
        fill_patiently(&*device, 0..more);
        assert_holds(&*device, more);

        blocking::discard(&*device, 0, 256 * MIB).unwrap();
        wait_until("what was discarded is given back to the file system", || {
            blocking::flush(&*device).unwrap();
            free(dir) >= (BALLAST_MIB + 16) * MIB
        });
    }
    volume.close();
    drop((volume, device, host));
    let _ = std::fs::remove_dir_all(dir.join("kept"));
}
