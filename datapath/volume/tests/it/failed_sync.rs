//! The disk of a persistent write cache fails during a flush, and works again at once. Writes that the flush
//! covered may be lost, and no later flush may report them as durable. Reads continue, and opening the volume
//! again helps.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use headwater_block::{ByteRange, Device, IoErrorKind, Request, blocking};
use headwater_testkit::{ReferenceDisk, Rng};
use headwater_volume::{CacheMode, PersistentOptions, Volume, VolumeOptions};
use headwater_writecache::Host;

use crate::power::{CrashEngine, Fails};
use crate::setup;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn options(base: &Arc<dyn Device>, at: &Path) -> VolumeOptions {
    VolumeOptions {
        persistent: Some(PersistentOptions { name: "disk".into(), key: [7; 16], base_id: [9; 32] }),
        pause_limit: Duration::from_secs(20),
        ..setup::options(base, CacheMode::RamDisk, 16, 64, at)
    }
}

fn open(options: &VolumeOptions) -> (Arc<CrashEngine>, Host, Arc<Volume>) {
    let engine = CrashEngine::new();
    setup::end_with_a_panic_of_ours();
    let host = Host::with_engine(u64::MAX, Arc::clone(&engine) as _).unwrap();
    let volume = Volume::open(options, &host).unwrap();
    (engine, host, volume)
}

/// Makes so many separate changes that the next commit replaces the map.
fn lengthen_the_map(volume: &Volume) {
    for pair in 0..3000 {
        let at = 8 * MIB + pair % 1024 * BLOCK;
        blocking::write(volume, at, &[pair as u8 | 1; BLOCK as usize]).unwrap();
        blocking::discard(volume, at, BLOCK).unwrap();
    }
    blocking::flush(volume).unwrap();
}

fn read(volume: &Volume) -> Vec<u8> {
    let mut all = vec![0; 24 * MIB as usize];
    blocking::read(volume, 0, &mut all).unwrap();
    all
}

fn assert_fails(result: Result<(), headwater_block::IoError>) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), IoErrorKind::Device);
    assert!(error.to_string().contains("close the volume, check the disk that contains"), "{error}");
}

/// Repeats until a flush fails: the cache may commit by itself before, so that the flush has nothing that
/// could fail.
fn one_that_fails(what: Fails, bytes: u64, crashes: bool, rng: &mut Rng) {
    assert!((0..20).any(|_| has_failed(what, bytes, crashes, rng)), "{what:?} never comes with a flush");
}

/// From a successful flush to the state after a failing one and then a crash or a close. `false`: nothing was
/// left to flush.
fn has_failed(what: Fails, bytes: u64, crashes: bool, rng: &mut Rng) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(24 * MIB));
    let options = options(&base, dir.path());
    let (engine, host, volume) = open(&options);
    lengthen_the_map(&volume);
    if let Fails::SyncOf(_) = what {
        // The next commit adds to the map again.
        blocking::write(&*volume, 0, &rng.bytes(MIB as usize)).unwrap();
        blocking::flush(&*volume).unwrap();
    }
    let flushed = read(&volume);
    assert!(!volume.is_broken());
    blocking::write(&*volume, MIB / 2, &rng.bytes(bytes as usize)).unwrap();
    let written = read(&volume);
    engine.fail(what);
    let flushed_now = blocking::flush(&*volume);
    if flushed_now.is_ok() && !engine.has_failed() {
        return false;
    }
    assert_fails(flushed_now);
    assert!(engine.has_failed() && volume.is_broken());
    assert_eq!(volume.counters().cache.disk_errors, 1);
    // The disk works again, and would report success.
    for _ in 0..2 {
        assert_fails(blocking::flush(&*volume));
    }
    let range = ByteRange::new(0, BLOCK).unwrap();
    let durably = Request::Write { range, buffer: written[..BLOCK as usize].to_vec(), fua: true };
    assert_fails(blocking::wait(&*volume, durably).map(drop));
    assert!(read(&volume) == written, "reads go on");
    assert!(volume.is_broken() && volume.counters().cache.disk_errors == 1);
    if crashes {
        engine.crash(rng);
    }
    volume.close();
    drop((volume, host));
    let (_, _host, volume) = open(&options);
    let found = read(&volume);
    assert!(found == flushed || found == written, "{what:?}: neither what was flushed nor what was written");
    assert!(!volume.is_broken());
    blocking::write(&*volume, 0, &rng.bytes(MIB as usize)).unwrap();
    blocking::flush(&*volume).unwrap();
    volume.close();
    true
}

#[test]
fn a_flush_that_failed_is_never_made_good_by_a_later_one() {
    let mut rng = Rng::new(21);
    for what in [Fails::SyncOf("data"), Fails::SyncOf("map"), Fails::Rename, Fails::SyncDir] {
        for crashes in [false, true, true, true] {
            one_that_fails(what, MIB, crashes, &mut rng);
            if what == Fails::SyncOf("map") {
                // So little that it goes into the map only.
                one_that_fails(what, 2 * BLOCK, crashes, &mut rng);
            }
        }
    }
}

#[test]
fn a_new_map_that_cannot_be_synced_is_left_and_the_old_one_grows() {
    assert!((0..20).any(|_| is_left()), "a new map never comes with a flush");
}

/// `false`: the cache had replaced its map before the failure was due.
fn is_left() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(24 * MIB));
    let options = options(&base, dir.path());
    let (engine, host, volume) = open(&options);
    lengthen_the_map(&volume);
    blocking::write(&*volume, 0, &[7; MIB as usize]).unwrap();
    let written = read(&volume);
    engine.fail(Fails::SyncOf("map.new"));
    blocking::flush(&*volume).unwrap();
    if !engine.has_failed() {
        return false;
    }
    assert!(!volume.is_broken());
    assert_eq!(volume.counters().cache.disk_errors, 1);
    engine.crash(&mut Rng::new(3));
    volume.close();
    drop((volume, host));
    let (_, _host, volume) = open(&options);
    assert!(read(&volume) == written);
    true
}
