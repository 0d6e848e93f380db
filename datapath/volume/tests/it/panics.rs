//! A panic on a thread that serves all volumes fails only the work in progress, and leaves no request
//! waiting.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headwater_block::{Device, IoErrorKind, blocking};
use headwater_testkit::{ReferenceDisk, Rng, wait_until};
use headwater_volume::{CacheMode, PersistentOptions, Volume, VolumeOptions};

use crate::setup;

const MIB: u64 = 1 << 20;

fn empty() -> Arc<dyn Device> {
    Arc::new(ReferenceDisk::new(64 * MIB))
}

fn persistent(at: &Path) -> VolumeOptions {
    let persistent = PersistentOptions { name: "disk1".into(), key: [3; 16], base_id: [5; 32] };
    VolumeOptions { persistent: Some(persistent), ..setup::options(&empty(), CacheMode::RamDisk, 16, 64, at) }
}

#[test]
fn a_flush_that_panics_fails_and_so_do_those_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&persistent(dir.path()), &host);
    blocking::write(&*device, 0, &[1; 4096]).unwrap();
    blocking::flush(&*device).unwrap();
    blocking::write(&*device, 4096, &[2; 4096]).unwrap();
    faults.panics.store(true, Ordering::SeqCst);
    assert!(blocking::flush(&*device).is_err());
    faults.panics.store(false, Ordering::SeqCst);
    wait_until("it is known", || volume.is_broken());
    // The state of the data is unknown, so nothing is reported as durable any more.
    assert_eq!(blocking::flush(&*device).unwrap_err().kind(), IoErrorKind::Device);
    let mut read = vec![0; 8192];
    blocking::read(&*device, 0, &mut read).unwrap();
    assert!(read[..4096] == [1; 4096] && read[4096..] == [2; 4096]);
    // The volume can be closed, and flushed data is there.
    volume.close();
    drop((volume, device));
    let (_volume, device) = setup::open(&persistent(dir.path()), &host);
    blocking::read(&*device, 0, &mut read).unwrap();
    assert!(read[..4096] == [1; 4096]);
}

#[test]
fn a_spill_that_panics_stops_neither_its_cache_nor_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let options = || VolumeOptions {
        pause_limit: Duration::from_secs(60),
        ..setup::options(&empty(), CacheMode::RamDisk, 16, 64, dir.path())
    };
    let open = || {
        let volume = Volume::open(&options(), &host).unwrap();
        let device: Arc<dyn Device> = Arc::clone(&volume) as Arc<dyn Device>;
        (volume, device)
    };
    let ((_first, first), (_second, second)) = (open(), open());
    let data = Rng::new(4).bytes(48 << 20);
    faults.panics.store(true, Ordering::SeqCst);
    let writing = std::thread::spawn({
        let (first, data) = (Arc::clone(&first), data.clone());
        // More than its RAM: this waits for the work that panics.
        move || {
            data.chunks(MIB as usize)
                .zip(0..)
                .try_for_each(|(part, n)| blocking::write(&*first, n * MIB, part))
        }
    });
    std::thread::sleep(Duration::from_millis(500));
    assert!(!writing.is_finished());
    faults.panics.store(false, Ordering::SeqCst);
    writing.join().unwrap().unwrap();
    for (n, part) in (0..).zip(data.chunks(MIB as usize)) {
        blocking::write(&*second, n * MIB, part).unwrap();
    }
    for device in [&first, &second] {
        for (n, part) in (0..).zip(data.chunks(MIB as usize)) {
            let mut read = vec![0; part.len()];
            blocking::read(&**device, n * MIB, &mut read).unwrap();
            assert!(read == part, "MiB {n}");
        }
    }
}
