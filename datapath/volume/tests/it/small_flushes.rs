//! Flushes of a few blocks make a persistent volume durable in its map only. Blocks that the data file lacks
//! after a crash are restored from the map, whatever else happened since: other contents in the same
//! position, a new map, a crash during the restore.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use headwater_block::{Device, blocking};
use headwater_testkit::{ReferenceDisk, Rng};
use headwater_volume::{CacheMode, PersistentOptions, Volume, VolumeOptions};
use headwater_writecache::Host;
use headwater_writecache::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;
use headwater_writecache::persist::format::{HEADER_BYTES, Record, decode};

use crate::power::{CrashEngine, Fails};
use crate::setup;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
const KEY: [u8; 16] = [7; 16];
const SIZE_MIB: u64 = 16;

fn options(at: &Path) -> VolumeOptions {
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(SIZE_MIB * MIB));
    VolumeOptions {
        persistent: Some(PersistentOptions { name: "kept".into(), key: KEY, base_id: [9; 32] }),
        pause_limit: Duration::from_secs(20),
        ..setup::options(&base, CacheMode::RamDisk, 32, 64, at)
    }
}

/// A volume and its host, which must live as long.
type Opened = (Arc<Volume>, Host);

fn try_open(at: &Path, engine: &Arc<CrashEngine>) -> Result<Opened, headwater_block::IoError> {
    setup::end_with_a_panic_of_ours();
    let host = Host::with_engine(u64::MAX, Arc::clone(engine) as _).unwrap();
    Volume::open(&options(at), &host).map(|volume| (volume, host))
}

fn open(at: &Path) -> Opened {
    try_open(at, &CrashEngine::new()).unwrap()
}

/// The contents of the cache if it were opened now.
fn found(at: &Path) -> Vec<u8> {
    let (volume, _host) = open(at);
    let found = contents(&volume);
    volume.close();
    found
}

fn contents(volume: &Volume) -> Vec<u8> {
    let mut all = vec![0; (SIZE_MIB * MIB) as usize];
    blocking::read(volume, 0, &mut all).unwrap();
    all
}

/// The contents of a map.
struct Records {
    /// Position and generation of each record with encrypted slots.
    encrypted: Vec<(u32, u64)>,
    extents: usize,
}

fn records(at: &Path) -> Records {
    let bytes = std::fs::read(at.join("kept/map")).unwrap();
    let (mut found, mut place) = (Records { encrypted: Vec::new(), extents: 0 }, HEADER_BYTES);
    while let Some((_, record, next)) = decode(&bytes, place) {
        match record {
            Record::Encrypted { position, generation, .. } => found.encrypted.push((position, generation)),
            Record::Extent { .. } => found.extents += 1,
            _ => {}
        }
        place = next;
    }
    found
}

/// Writes blocks and flushes them.
fn put(volume: &Volume, model: &mut [u8], first: usize, data: &[u8]) {
    blocking::write(volume, (first * BLOCK) as u64, data).unwrap();
    model[first * BLOCK..][..data.len()].copy_from_slice(data);
    blocking::flush(volume).unwrap();
}

/// The cache's files as they are now, in another directory.
fn copied(at: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (from, to): (PathBuf, PathBuf) = (at.join("kept"), dir.path().join("kept"));
    let done = std::process::Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(done.success());
    dir
}

#[test]
fn what_was_never_written_to_the_data_file_comes_from_the_map() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(1);
    let (volume, _host) = open(dir.path());
    let mut model = contents(&volume);
    for round in 0..40 {
        let count = rng.between(1, 16) as usize;
        put(&volume, &mut model, round * 90, &rng.bytes(count * BLOCK));
    }
    let cache = volume.counters().cache;
    assert_eq!((cache.spilled_blocks, cache.spilled_bytes, cache.commits), (0, 0, 40), "{cache:?}");
    let map = records(dir.path());
    assert!(map.encrypted.len() >= 40 && map.extents == 0);
    // As after a crash, with the claimed space of the data file and without.
    for data_bytes in [None, Some(0), Some(ENCRYPTED_SEGMENT_BYTES as u64 / 2)] {
        let copy = copied(dir.path());
        let data = std::fs::OpenOptions::new().write(true).open(copy.path().join("kept/data")).unwrap();
        data.set_len(data_bytes.unwrap_or_else(|| data.metadata().unwrap().len())).unwrap();
        for _ in 0..2 {
            assert!(found(copy.path()) == model, "{data_bytes:?}");
        }
        // Continued, with a new map.
        let (volume, _host) = open(copy.path());
        let mut model = model.clone();
        put(&volume, &mut model, 7, &rng.bytes(BLOCK));
        put(&volume, &mut model, 100, &rng.bytes(BLOCK));
        volume.close();
        let map = records(copy.path());
        assert!(map.encrypted.len() == 1 && map.extents > 0);
        assert!(found(copy.path()) == model, "{data_bytes:?}");
    }
    volume.close();
}

#[test]
fn a_position_that_another_generation_has_since_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(2);
    let (volume, _host) = open(dir.path());
    let mut model = contents(&volume);
    // Overwritten at random, so that whole segments die; with some writes of more blocks, which go to the
    // data file.
    let mut reused = false;
    for round in 0..600 {
        let large = round % 40 == 39;
        let count = if large { 32 } else { rng.between(1, 8) as usize };
        put(&volume, &mut model, rng.index(64), &rng.bytes(count * BLOCK));
        if round % 60 == 45 {
            assert!(found(copied(dir.path()).path()) == model, "round {round}");
            let mut encrypted = records(dir.path()).encrypted;
            encrypted.sort_unstable();
            encrypted.dedup();
            reused |= encrypted.windows(2).any(|two| two[0].0 == two[1].0);
        }
    }
    assert!(reused, "no position had two generations in one map");
    assert!(volume.counters().cache.spilled_blocks > 0);
    volume.close();
}

#[test]
fn slots_in_the_map_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(3);
    let (volume, _host) = open(dir.path());
    let mut model = contents(&volume);
    let map = dir.path().join("kept/map");
    let (mut most, mut replaced) = (0, 0);
    for _ in 0..200 {
        let before = std::fs::metadata(&map).unwrap().len();
        put(&volume, &mut model, rng.index(2000), &rng.bytes(16 * BLOCK));
        let now = std::fs::metadata(&map).unwrap().len();
        most = most.max(now);
        replaced += u64::from(now < before);
    }
    assert!((8 * MIB..9 * MIB + MIB / 2).contains(&most) && replaced == 1, "{most} bytes, {replaced} times");
    assert!(found(copied(dir.path()).path()) == model);
    volume.close();
}

#[test]
fn a_crash_while_slots_are_written_back_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(4);
    let (volume, _host) = open(dir.path());
    let mut model = contents(&volume);
    // Some of them again, so that not all live blocks are contiguous.
    for _ in 0..12 {
        put(&volume, &mut model, rng.index(20), &rng.bytes(2 * BLOCK));
    }
    for after in 1..60 {
        let copy = copied(dir.path());
        std::fs::write(copy.path().join("kept/data"), b"").unwrap();
        let engine = CrashEngine::new();
        engine.crash_after(after);
        let opened = try_open(copy.path(), &engine);
        assert_eq!(opened.is_err(), engine.is_gone(), "{after}");
        if let Ok((volume, _host)) = opened {
            volume.close();
        }
        engine.crash(&mut rng);
        assert!(found(copy.path()) == model, "{after}");
    }
    // If the data file cannot be written, the volume is not opened.
    let copy = copied(dir.path());
    let engine = CrashEngine::new();
    engine.fail(Fails::SyncOf("data"));
    let error = try_open(copy.path(), &engine).err().expect("it was opened");
    assert!(engine.has_failed() && error.to_string().contains("kept/data"), "{error}");
    volume.close();
}

#[test]
fn a_new_map_that_cannot_be_made_is_not_tried_again_at_each_flush() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(6);
    let mut model = vec![0; (SIZE_MIB * MIB) as usize];
    let (volume, _host) = open(dir.path());
    std::fs::create_dir(dir.path().join("kept/map.new")).unwrap();
    // The map soon exceeds its minimum: the same blocks are in new slots each time.
    let mut rounds = 0;
    while volume.counters().cache.disk_errors == 0 {
        put(&volume, &mut model, 0, &rng.bytes(512 * BLOCK));
        rounds += 1;
        assert!(rounds < 200, "the map was not to be replaced");
    }
    for round in 0..20 {
        put(&volume, &mut model, 2000 + 2 * round, &rng.bytes(BLOCK));
    }
    assert_eq!(volume.counters().cache.disk_errors, 1);
    volume.close();
    assert!(found(dir.path()) == model);
}
