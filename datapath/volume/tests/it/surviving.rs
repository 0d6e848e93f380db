//! Volumes whose write cache is in a file that outlives the process.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use headwater_block::{Device, IoErrorKind, blocking};
use headwater_testkit::conformance::{self, Options};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, on_small_file_system, test_name, wait_until};
use headwater_volume::{CacheMode, PersistentOptions, Volume, VolumeOptions};

use crate::setup;

const MIB: u64 = 1 << 20;

fn memfd() -> File {
    File::from(rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
}

fn base(size_bytes: u64) -> Arc<dyn Device> {
    let contents = Rng::new(3).bytes(size_bytes as usize);
    Arc::new(ReferenceDisk::with_contents(
        contents,
        ReferenceOptions { read_only: true, ..Default::default() },
    ))
}

fn device(volume: &Arc<Volume>) -> Arc<dyn Device> {
    Arc::clone(volume) as Arc<dyn Device>
}

/// Hands a volume over as an ending process does, and opens it again.
fn next(volume: Arc<Volume>, options: &VolumeOptions) -> Arc<Volume> {
    let left = volume.handover().unwrap().unwrap();
    volume.close();
    let gone = Arc::downgrade(&volume);
    drop(volume);
    wait_until("the volume is gone", || gone.strong_count() == 0);
    let (host, _) = setup::host(u64::MAX);
    Volume::recover(left, options, &host).unwrap()
}

#[test]
fn a_volume_in_a_file_behaves_as_all_others() {
    for (mode, ram_mib, disk_mib) in [(CacheMode::Ram, 64, 0), (CacheMode::RamDisk, 16, 64)] {
        let dir = tempfile::tempdir().unwrap();
        let (host, _) = setup::host(u64::MAX);
        let options = setup::options(&base(24 * MIB), mode, ram_mib, disk_mib, dir.path());
        let volume = Volume::open_in(memfd(), &options, &host).unwrap();
        let suite = Options {
            operations: 1500,
            span_bytes: 24 * MIB,
            max_request_bytes: 512 << 10,
            ..Options::seeded(21)
        };
        conformance::check(&device(&volume), &suite);
        let cache = volume.counters().cache;
        assert_eq!(cache.spilled_segments > 0, mode == CacheMode::RamDisk, "{cache:?}");
    }
}

#[test]
fn the_next_process_finds_what_the_machine_wrote() {
    for (mode, ram_mib, disk_mib) in [(CacheMode::Ram, 64, 0), (CacheMode::RamDisk, 16, 96)] {
        let dir = tempfile::tempdir().unwrap();
        let (host, _) = setup::host(u64::MAX);
        let base = base(48 * MIB);
        let options = setup::options(&base, mode, ram_mib, disk_mib, dir.path());
        let mut volume = Volume::open_in(memfd(), &options, &host).unwrap();
        let mut expected = vec![0; 48 << 20];
        read_all(&*base, &mut expected);
        let mut rng = Rng::new(9);
        for round in 0..4 {
            for _ in 0..400 {
                let offset = rng.below(48 * MIB / 512 - 256) * 512;
                let len = (1 + rng.index(128)) * 512;
                let place = &mut expected[offset as usize..][..len];
                match rng.below(8) {
                    0 => {
                        place.fill(0);
                        blocking::write_zeroes(&*volume, offset, len as u64).unwrap();
                    }
                    _ => {
                        place.copy_from_slice(&rng.bytes(len));
                        blocking::write(&*volume, offset, place).unwrap();
                    }
                }
            }
            volume = next(volume, &options);
            let mut found = vec![0; expected.len()];
            read_all(&*volume, &mut found);
            let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
            assert_eq!(wrong, None, "{mode}, round {round}");
        }
        let left = volume.handover().unwrap().unwrap();
        volume.end();
        let gone = Arc::downgrade(&volume);
        drop(volume);
        wait_until("the volume is gone", || gone.strong_count() == 0);
        assert_eq!(blocks(&left.memory), 8, "only the head is left");
        if let Some(overflow) = &left.overflow {
            assert_eq!(blocks(overflow), 0);
        }
        let error = Volume::recover(left, &options, &host).err().expect("it was ended");
        assert_eq!(error.kind(), IoErrorKind::Corrupt);
        assert!(error.to_string().contains("was ended"), "{error}");
    }
}

fn read_all(device: &dyn Device, into: &mut [u8]) {
    for (part, at) in into.chunks_mut(MIB as usize).zip((0..).step_by(MIB as usize)) {
        blocking::read(device, at, part).unwrap();
    }
}

/// Blocks of 512 bytes that a file occupies.
fn blocks(fd: &impl std::os::fd::AsFd) -> i64 {
    rustix::fs::fstat(fd).unwrap().st_blocks
}

#[test]
fn a_persistent_volume_is_not_opened_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let persistent = PersistentOptions { name: "kept".into(), key: [7; 16], base_id: [9; 32] };
    let options = VolumeOptions {
        persistent: Some(persistent),
        ..setup::options(&base(16 * MIB), CacheMode::RamDisk, 16, 64, dir.path())
    };
    let error = Volume::open_in(memfd(), &options, &host).err().expect("it is opened");
    assert_eq!(error.kind(), IoErrorKind::Invalid);
    assert!(error.to_string().contains("recovered from its disk"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Without reservations, a write to a page that the file system cannot allocate would be a signal that ends
/// the process.
#[test]
fn a_full_file_system_of_the_memory_is_no_space() {
    let dir = tempfile::tempdir().unwrap();
    let this = test_name(a_full_file_system_of_the_memory_is_no_space);
    on_small_file_system(this, dir.path(), 40, fill_file_system);
}

fn fill_file_system(dir: &Path) {
    let (host, _) = setup::host(u64::MAX);
    let memory = tempfile::tempfile_in(dir).unwrap();
    let mut options = setup::options(&base(128 * MIB), CacheMode::Ram, 96, 0, dir);
    options.pause_limit = Duration::from_millis(500);
    let volume = Volume::open_in(memory, &options, &host).unwrap();
    let contents = |number: u64| Rng::new(number + 1).bytes(MIB as usize);
    let refused = (0..96).find(|number| blocking::write(&*volume, number * MIB, &contents(*number)).is_err());
    let taken = refused.expect("there is no end of it");
    assert!((20..40).contains(&taken), "{taken} MiB of 40 were usable");
    let error = blocking::write(&*volume, 120 * MIB, &contents(7)).unwrap_err();
    assert_eq!(error.kind(), IoErrorKind::NoSpace);
    // Stored blocks can be read and overwritten, and the next process finds them.
    blocking::write(&*volume, 0, &contents(500)).unwrap();
    let check = |volume: &Volume| {
        let mut found = vec![0; MIB as usize];
        for number in 0..taken {
            blocking::read(volume, number * MIB, &mut found).unwrap();
            assert!(found == contents(if number == 0 { 500 } else { number }), "MiB {number}");
        }
    };
    check(&volume);
    let left = volume.handover().unwrap().unwrap();
    volume.close();
    let gone = Arc::downgrade(&volume);
    drop(volume);
    wait_until("the volume is gone", || gone.strong_count() == 0);
    let volume = Volume::recover(left, &options, &host).unwrap();
    check(&volume);
    // A discard frees space.
    blocking::discard(&*volume, MIB, (taken - 1) * MIB).unwrap();
    wait_until("there is space", || blocking::write(&*volume, 100 * MIB, &contents(1)).is_ok());
}
