//! Writes of parts of blocks: nothing is read first, and every sector is the one that was written last, wherever it lies.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use headwater_block::{Attempt, ByteRange, Device, IoErrorKind, Op, blocking};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, wait_until};
use headwater_volume::{CacheMode, FrozenView, Volume};

use crate::setup;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const SECTOR: u64 = 512;

fn image(contents: &[u8]) -> Arc<dyn Device> {
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    Arc::new(ReferenceDisk::with_contents(contents.to_vec(), options))
}

/// A volume, and what it has to hold.
struct Life {
    rng: Rng,
    device: Arc<dyn Device>,
    model: Vec<u8>,
    view: Option<(Arc<FrozenView>, Vec<u8>)>,
}

impl Life {
    fn range(&mut self, most_sectors: u64) -> (u64, usize) {
        let sectors = self.model.len() as u64 / SECTOR;
        let len = self.rng.between(1, most_sectors);
        (self.rng.below(sectors - len) * SECTOR, (len * SECTOR) as usize)
    }

    fn put(&mut self, at: u64, data: &[u8]) {
        self.model[at as usize..][..data.len()].copy_from_slice(data);
    }

    fn step(&mut self, volume: &Volume, limits: [u64; 2]) {
        match self.rng.below(100) {
            0..60 => {
                // Mostly 4 KiB, which end one block and begin the next.
                let most_sectors = if self.rng.chance(2, 3) { 8 } else { 40 };
                let (at, len) = self.range(most_sectors);
                let data = self.rng.bytes(len);
                blocking::write(&*self.device, at, &data).unwrap();
                self.put(at, &data);
            }
            60..66 => {
                let (at, len) = self.range(24);
                blocking::write(&*self.device, at, &vec![0; len]).unwrap();
                self.put(at, &vec![0; len]);
            }
            66..70 => {
                let (at, len) = self.range(64);
                blocking::write_zeroes(&*self.device, at, len as u64).unwrap();
                self.put(at, &vec![0; len]);
            }
            70..73 => {
                let (at, len) = self.range(64);
                blocking::discard(&*self.device, at, len as u64).unwrap();
                // What becomes of parts of blocks at its ends is the volume's.
                let mut found = vec![1; len];
                blocking::read(&*self.device, at, &mut found).unwrap();
                for (sector, found) in found.chunks(SECTOR as usize).enumerate() {
                    let old = &self.model[at as usize + sector * SECTOR as usize..][..SECTOR as usize];
                    assert!(
                        found == old || found == [0; SECTOR as usize],
                        "a discard at {at} made sectors up"
                    );
                }
                self.put(at, &found);
            }
            73..75 => {
                let ram_mib = self.rng.between(limits[0], 2 * limits[0]);
                volume.set_ram_bytes(ram_mib * MIB);
                volume.set_disk_bytes(self.rng.between(limits[1], limits[1] + 16) * MIB);
            }
            75..77 => {
                if self.view.take().is_none() {
                    self.view = Some((volume.freeze().unwrap(), self.model.clone()));
                }
            }
            77..85 if self.view.is_some() => {
                let (at, len) = self.range(200);
                let (view, model) = self.view.as_ref().unwrap();
                let mut found = vec![1; len];
                blocking::read(&**view, at, &mut found).unwrap();
                assert!(found == model[at as usize..][..len], "a view of {len} bytes at {at}");
            }
            _ => {
                let (at, len) = self.range(100);
                self.check(at, len);
            }
        }
    }

    fn check(&self, at: u64, len: usize) {
        let mut found = vec![1; len];
        blocking::read(&*self.device, at, &mut found).unwrap();
        let wrong = found.iter().zip(&self.model[at as usize..]).position(|(found, model)| found != model);
        assert_eq!(wrong.map(|byte| at + byte as u64), None, "the first wrong byte, of {len} from {at}");
    }

    fn check_all(&self) {
        (0..self.model.len() as u64 / MIB).for_each(|mib| self.check(mib * MIB, MIB as usize));
    }
}

/// Many small requests at any sector. What the cache went through.
fn lives(mode: CacheMode, [size_mib, ram_mib, disk_mib]: [u64; 3], seed: u64, steps: u64) -> Arc<Volume> {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut rng = Rng::new(seed);
    let mut model = rng.bytes((size_mib * MIB) as usize);
    let hole = model.len() / 2;
    model[hole..].fill(0);
    let base = image(&model);
    let mut options = setup::options(&base, mode, ram_mib, disk_mib, dir.path());
    options.pause_limit = std::time::Duration::from_secs(60);
    let (volume, device) = setup::open(&options, &host);
    let mut life = Life { rng, device, model, view: None };
    for _ in 0..steps {
        life.step(&volume, [ram_mib, disk_mib]);
    }
    life.check_all();
    drop(life.view.take());
    life.check_all();
    blocking::discard(&*life.device, 0, size_mib * MIB).unwrap();
    wait_until("nothing is left of partial blocks", || {
        let cache = volume.counters().cache;
        cache.disk_used_bytes == 0 && cache.packed_bytes == 0
    });
    volume
}

#[test]
fn in_ram() {
    let cache = lives(CacheMode::Ram, [12, 32, 0], 1, 40_000).counters().cache;
    assert!(cache.write_in_place_blocks > 0 && cache.elided_zero_blocks > 0, "{cache:?}");
}

#[test]
fn through_an_overflow_that_is_cleaned() {
    for seed in [2, 3] {
        let cache = lives(CacheMode::RamDisk, [32, 16, 96], seed, 60_000).counters().cache;
        assert!(cache.spilled_segments > 40 && cache.cleaned_blocks > 0, "{cache:?}");
        assert_eq!((cache.corrupt_blocks, cache.refused_writes), (0, 0), "{cache:?}");
    }
}

#[test]
fn in_disk_mode() {
    let cache = lives(CacheMode::Disk, [32, 16, 128], 4, 40_000).counters().cache;
    assert!(cache.spilled_segments > 10, "{cache:?}");
}

/// Blocks that are on disk alone, written at once, and the volume.
fn on_disk(
    size_mib: u64,
    dir: &std::path::Path,
    host: &headwater_writecache::Host,
) -> (Arc<Volume>, Vec<u8>) {
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(size_mib * MIB));
    let mut options = setup::options(&base, CacheMode::RamDisk, 16, 512, dir);
    options.pause_limit = std::time::Duration::from_secs(60);
    let (volume, device) = setup::open(&options, host);
    let model = Rng::new(7).bytes((size_mib * MIB) as usize);
    for mib in 0..size_mib {
        blocking::write(&*device, mib * MIB, &model[(mib * MIB) as usize..][..MIB as usize]).unwrap();
    }
    (volume, model)
}

#[test]
fn writes_that_straddle_blocks_on_disk_read_nothing_and_take_one_slot() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, mut model) = on_disk(64, dir.path(), &host);
    let before = volume.counters().cache;
    let mut rng = Rng::new(8);
    const WRITES: u64 = 4000;
    for number in 0..WRITES {
        // Each pair of blocks once.
        let at = number * 4 * BLOCK + rng.between(1, 7) * SECTOR;
        let data = rng.bytes(BLOCK as usize);
        blocking::write(&*volume, at, &data).unwrap();
        model[at as usize..][..data.len()].copy_from_slice(&data);
    }
    let after = volume.counters().cache;
    assert_eq!(after.read_disk_blocks, before.read_disk_blocks, "something was read first");
    // Both blocks are counted, but for those that are in RAM still.
    assert!(after.write_new_blocks - before.write_new_blocks > 2 * WRITES * 8 / 10, "{after:?}");
    // 15.6 MiB in 2 MiB segments, and what was in RAM before; two slots for each would be twice as much.
    let segments = after.spilled_segments - before.spilled_segments;
    assert!(segments < 16, "{segments} segments");
    let life = Life { rng, device: Arc::clone(&volume) as _, model, view: None };
    life.check_all();
}

#[test]
fn a_damaged_slot_is_an_error_of_its_sectors_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, model) = on_disk(48, dir.path(), &host);
    let sector = |number: u64| ByteRange::new(number * SECTOR, SECTOR).unwrap();
    let mut into = [0; SECTOR as usize];
    let at_once = volume.try_now(Op::Read { range: sector(0), into: &mut into }).unwrap();
    assert_eq!(at_once, Attempt::MustWait, "the block is on disk");
    blocking::write(&*volume, 2 * SECTOR, &[9; 3 * SECTOR as usize]).unwrap();
    faults.flip.store(true, Ordering::Relaxed);
    let mut read = |number: u64| {
        blocking::read(&*volume, number * SECTOR, &mut into).map(|()| into).map_err(|error| error.kind())
    };
    for number in 0..8 {
        let expected =
            if (2..5).contains(&number) { Ok([9; SECTOR as usize]) } else { Err(IoErrorKind::Corrupt) };
        assert_eq!(read(number), expected, "sector {number}");
    }
    faults.flip.store(false, Ordering::Relaxed);
    assert_eq!(read(7).unwrap(), model[7 * SECTOR as usize..][..SECTOR as usize]);
}

#[test]
fn as_many_partial_blocks_as_a_leaf_has_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let contents = Rng::new(5).bytes(4 << 20);
    let base = image(&contents);
    let (volume, device) = setup::open(&setup::options(&base, CacheMode::Ram, 64, 0, dir.path()), &host);
    let mut model = contents;
    for round in 1..4u8 {
        for block in 0..1024 {
            let at = block * BLOCK + u64::from(round) * SECTOR;
            blocking::write(&*device, at, &[round; SECTOR as usize]).unwrap();
            model[at as usize..][..SECTOR as usize].fill(round);
        }
    }
    let life = Life { rng: Rng::new(1), device, model, view: None };
    life.check_all();
    assert!(volume.counters().cache.index_bytes > 1024 * 32, "{:?}", volume.counters().cache);
}

#[test]
fn partial_blocks_take_three_eighths_of_the_ram_at_most() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(4096 * MIB));
    let (volume, device) =
        setup::open(&setup::options(&base, CacheMode::RamDisk, 16, 1536, dir.path()), &host);
    // One block in each 16 KiB: 262,144 entries of 32 bytes would be 8 MiB.
    const STEP: u64 = 16 << 10;
    let data = |number: u64| Rng::new(number).bytes(SECTOR as usize);
    for number in 0..4096 * MIB / STEP {
        blocking::write(&*device, number * STEP + SECTOR, &data(number)).unwrap();
    }
    let cache = volume.counters().cache;
    // Map and records of what is on disk: 4 MiB, and 1.1 MiB.
    assert!(cache.index_bytes < 12 * MIB, "{cache:?}");
    let mut block = vec![1; BLOCK as usize];
    for number in (0..4096 * MIB / STEP).step_by(97) {
        blocking::read(&*device, number * STEP, &mut block).unwrap();
        let (before, rest) = block.split_at(SECTOR as usize);
        let (sector, after) = rest.split_at(SECTOR as usize);
        assert!(before.iter().chain(after).all(|byte| *byte == 0) && sector == data(number), "{number}");
    }
}
