//! Writes that equal the image take no space and free the block's space, in whatever place that was.

use std::sync::Arc;

use headwater_block::{Device, blocking};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, wait_until};
use headwater_volume::{CacheMode, Volume};

use crate::setup;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn image(size_mib: u64) -> (Vec<u8>, Arc<dyn Device>) {
    let bytes = Rng::new(8).bytes((size_mib * MIB) as usize);
    let disk = ReferenceDisk::new(size_mib * MIB);
    (0..size_mib).for_each(|mib| {
        let part = &bytes[(mib * MIB) as usize..((mib + 1) * MIB) as usize];
        blocking::write(&disk, mib * MIB, part).unwrap();
    });
    (bytes, Arc::new(disk))
}

fn assert_is_image(device: &dyn Device, image: &[u8]) {
    let mut read = vec![0; MIB as usize];
    for (mib, expected) in (0..).zip(image.chunks(MIB as usize)) {
        blocking::read(device, mib * MIB, &mut read).unwrap();
        assert!(read == expected, "MiB {mib} differs");
    }
}

#[test]
fn writing_the_image_over_an_untouched_volume_takes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (bytes, base) = image(16);
    let (volume, device) = setup::open(&setup::options(&base, CacheMode::Ram, 16, 0, dir.path()), &host);
    // More than RAM would hold, twice.
    for _ in 0..2 {
        for (mib, part) in (0..).zip(bytes.chunks(MIB as usize)) {
            blocking::write(&*device, mib * MIB, part).unwrap();
        }
    }
    let cache = volume.counters().cache;
    assert_eq!(cache.elided_equal_blocks, 2 * 16 * MIB / BLOCK);
    assert_eq!((cache.ram_used_bytes, cache.write_new_blocks), (0, 0), "{cache:?}");
    assert_is_image(&*device, &bytes);
}

#[test]
fn putting_the_image_back_frees_ram_and_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (bytes, base) = image(96);
    let (volume, device) =
        setup::open(&setup::options(&base, CacheMode::RamDisk, 32, 256, dir.path()), &host);
    let mut rng = Rng::new(9);
    for mib in 0..96 {
        // Half of it compresses, so that blocks are in every kind of place.
        let data = if mib % 2 == 0 { rng.bytes(MIB as usize) } else { vec![mib as u8 | 1; MIB as usize] };
        blocking::write(&*device, mib * MIB, &data).unwrap();
    }
    let full = volume.counters().cache;
    assert!(full.disk_used_bytes > 40 * MIB && full.packed_bytes > 0, "{full:?}");
    for (mib, part) in (0..).zip(bytes.chunks(MIB as usize)) {
        blocking::write(&*device, mib * MIB, part).unwrap();
    }
    assert_is_image(&*device, &bytes);
    // A few blocks may have been stored before a run of equal ones was noticed; the dedup scan finds them.
    // Then only the segments that are being filled are left.
    wait_until("space is given back", || {
        let cache = volume.counters().cache;
        cache.elided_equal_blocks == 96 * MIB / BLOCK
            && (cache.disk_used_bytes, cache.packed_bytes) == (0, 0)
            && cache.ram_used_bytes - cache.index_bytes <= 4 * MIB
    });
    assert_is_image(&*device, &bytes);
}

#[test]
fn zeroes_and_the_image_in_parts_of_blocks_take_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (bytes, base) = image(2);
    let empty: Arc<dyn Device> = Arc::new(ReferenceDisk::new(2 * MIB));
    for (base, data) in [(&empty, &vec![0; 2 * MIB as usize]), (&base, &bytes)] {
        let (volume, device) = setup::open(&setup::options(base, CacheMode::Ram, 16, 0, dir.path()), &host);
        for (number, part) in (0..).zip(data.chunks(512)) {
            blocking::write(&*device, number * 512, part).unwrap();
        }
        let cache = volume.counters().cache;
        assert_eq!((cache.ram_used_bytes, cache.write_new_blocks), (0, 0), "{cache:?}");
        assert_is_image(&*device, data);
    }
}

#[test]
fn the_last_bytes_of_a_block_that_are_zeroed_free_it() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (_, base) = image(96);
    let (volume, device) =
        setup::open(&setup::options(&base, CacheMode::RamDisk, 32, 256, dir.path()), &host);
    let mut rng = Rng::new(9);
    for mib in 0..96 {
        let mut data = if mib % 2 == 0 { rng.bytes(MIB as usize) } else { vec![mib as u8 | 1; MIB as usize] };
        data.chunks_mut(BLOCK as usize).for_each(|block| block[3584..].fill(0));
        blocking::write(&*device, mib * MIB, &data).unwrap();
    }
    let full = volume.counters().cache;
    assert!(full.disk_used_bytes > 40 * MIB && full.packed_bytes > 0, "{full:?}");
    for block in 0..96 * MIB / BLOCK {
        if block % 3 == 0 {
            blocking::discard(&*device, block * BLOCK, 3584).unwrap();
        } else {
            blocking::write(&*device, block * BLOCK, &[0; 3584]).unwrap();
        }
    }
    wait_until("space is given back", || {
        let cache = volume.counters().cache;
        (cache.disk_used_bytes, cache.packed_bytes) == (0, 0) && cache.ram_used_bytes <= 4 * MIB
    });
    assert_is_image(&*device, &vec![0; 96 * MIB as usize]);
}

/// Writes differing blocks until the volume does not compare each one any more.
fn write_differing(device: &dyn Device, mib: u64) {
    blocking::write(device, mib * MIB, &Rng::new(77).bytes(MIB as usize)).unwrap();
}

#[test]
fn equal_blocks_among_differing_ones_are_found_later() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (mut bytes, base) = image(8);
    for mode in [CacheMode::Ram, CacheMode::RamDisk, CacheMode::Disk] {
        let (volume, device) = setup::open(&setup::options(&base, mode, 16, 64, dir.path()), &host);
        write_differing(&*device, 7);
        // Each equal block is alone among others, so that no run is noticed; first new blocks, then
        // overwritten ones.
        let lonely = (5..7 * MIB / BLOCK).step_by(101);
        let other = Rng::new(4).bytes(BLOCK as usize);
        for round in 0..2 {
            for block in lonely.clone() {
                if round == 1 {
                    blocking::write(&*device, block * BLOCK, &other).unwrap();
                }
                let same = &bytes[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize];
                blocking::write(&*device, block * BLOCK, same).unwrap();
            }
            wait_until("each takes nothing", || {
                volume.counters().cache.elided_equal_blocks == (round + 1) * lonely.clone().count() as u64
            });
        }
        bytes[7 * MIB as usize..].copy_from_slice(&Rng::new(77).bytes(MIB as usize));
        assert_is_image(&*device, &bytes);
        volume.close();
    }
}

#[test]
fn equal_blocks_are_found_before_they_are_written_out() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (bytes, base) = image(64);
    let (volume, device) =
        setup::open(&setup::options(&base, CacheMode::RamDisk, 16, 256, dir.path()), &host);
    write_differing(&*device, 0);
    let mut expected = bytes.clone();
    expected[..MIB as usize].copy_from_slice(&Rng::new(77).bytes(MIB as usize));
    // Every other block; the hit path compares one in 32, and the 64 after a hit, so at least a few are
    // stored.
    let mut rng = Rng::new(5);
    for block in 256..64 * MIB / BLOCK {
        let at = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
        if block % 2 == 0 {
            expected[at.clone()].copy_from_slice(&rng.bytes(BLOCK as usize));
        }
        blocking::write(&*device, block * BLOCK, &expected[at]).unwrap();
    }
    wait_until("half of it takes nothing", || {
        volume.counters().cache.elided_equal_blocks == (64 * MIB / BLOCK - 256) / 2
    });
    assert_is_image(&*device, &expected);
}

#[test]
fn a_persistent_cache_finds_them_and_comes_back_as_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let (bytes, base) = image(8);
    let options = headwater_volume::VolumeOptions {
        persistent: Some(headwater_writecache::PersistentOptions {
            name: "kept".into(),
            key: [3; 16],
            base_id: [5; 32],
        }),
        ..setup::options(&base, CacheMode::RamDisk, 32, 64, dir.path())
    };
    {
        let (host, _) = setup::host(u64::MAX);
        let (volume, device) = setup::open(&options, &host);
        write_differing(&*device, 7);
        let lonely = (5..7 * MIB / BLOCK).step_by(101);
        for block in lonely.clone() {
            let same = &bytes[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize];
            blocking::write(&*device, block * BLOCK, same).unwrap();
            blocking::flush(&*device).unwrap();
        }
        wait_until("found, although on disk by then", || {
            volume.counters().cache.elided_equal_blocks == lonely.clone().count() as u64
        });
        volume.close();
    }
    let (host, _) = setup::host(u64::MAX);
    let (_volume, device) = setup::open(&options, &host);
    assert_is_image(&*device, &bytes[..7 * MIB as usize]);
}

#[test]
fn what_differs_in_one_byte_is_stored() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (mut bytes, base) = image(2);
    let (volume, device) = setup::open(&setup::options(&base, CacheMode::Ram, 16, 0, dir.path()), &host);
    for (block, at) in [(0usize, 0usize), (1, 511), (2, 512), (3, 4095)] {
        bytes[block * BLOCK as usize + at] ^= 1;
        let part = &bytes[block * BLOCK as usize..(block + 1) * BLOCK as usize];
        blocking::write(&*device, block as u64 * BLOCK, part).unwrap();
    }
    assert_eq!(volume.counters().cache.elided_equal_blocks, 0);
    assert_is_image(&*device, &bytes);
}

#[test]
fn an_image_that_is_not_in_memory_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let slow = ReferenceOptions { waits: Waits::Always, ..ReferenceOptions::default() };
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::with_options(4 * MIB, slow));
    let data = Rng::new(3).bytes(MIB as usize);
    blocking::write(&*base, 0, &data).unwrap();
    let volume: Arc<Volume> = setup::open(&setup::options(&base, CacheMode::Ram, 16, 0, dir.path()), &host).0;
    blocking::write(&*volume, 0, &data).unwrap();
    let cache = volume.counters().cache;
    assert_eq!((cache.elided_equal_blocks, cache.write_new_blocks), (0, MIB / BLOCK));
    assert_is_image(&*volume, &data);
}
