//! Writes of parts of blocks: nothing is read first, and every sector has its last written contents, in
//! whatever place it is.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use headwater_block::{Attempt, ByteRange, Device, IoErrorKind, Op, blocking};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, rounds, wait_until};
use headwater_volume::{CacheMode, FrozenView, PersistentOptions, Volume};
use headwater_writecache::overflow::encrypt::{ENCRYPTED_SEGMENT_BYTES, ENCRYPTED_SLOT_BYTES};
use headwater_writecache::persist::format::{HEADER_BYTES, Record, decode};

use crate::setup;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const SECTOR: u64 = 512;

fn image(contents: &[u8]) -> Arc<dyn Device> {
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    Arc::new(ReferenceDisk::with_contents(contents.to_vec(), options))
}

/// A volume, and its expected contents.
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
                // Mostly 4 KiB across a block boundary.
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
                // The volume may leave partial blocks at its ends as they are.
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

/// Many small requests at any sector. Returns the cache's counters.
fn lives(mode: CacheMode, [size_mib, ram_mib, disk_mib]: [u64; 3], seed: u64, steps: usize) -> Arc<Volume> {
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
    let cache = lives(CacheMode::Ram, [12, 32, 0], 1, rounds(120_000)).counters().cache;
    assert!(cache.write_in_place_blocks > 0 && cache.elided_zero_blocks > 0, "{cache:?}");
}

#[test]
fn through_an_overflow_that_is_cleaned() {
    for seed in [2, 3] {
        let cache = lives(CacheMode::RamDisk, [32, 16, 96], seed, rounds(200_000)).counters().cache;
        assert!(cache.spilled_segments > 20 && cache.cleaned_blocks > 0, "{cache:?}");
        assert_eq!((cache.corrupt_blocks, cache.refused_writes), (0, 0), "{cache:?}");
    }
}

#[test]
fn in_disk_mode() {
    let cache = lives(CacheMode::Disk, [32, 16, 128], 4, rounds(120_000)).counters().cache;
    assert!(cache.spilled_segments > 10, "{cache:?}");
}

fn kept() -> PersistentOptions {
    PersistentOptions { name: "kept".into(), key: [7; 16], base_id: [9; 32] }
}

/// Openings of a cache of 40 MiB of blocks in 72 MiB of disk, between which its volume is closed.
#[test]
fn in_a_persistent_cache_that_is_opened_again_and_again() {
    for (mode, seed) in [(CacheMode::RamDisk, 5), (CacheMode::Disk, 6)] {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = Rng::new(seed);
        let mut model = rng.bytes((40 * MIB) as usize);
        let base = image(&model);
        let mut cleaned = 0;
        for opening in 0..rounds(24) {
            let (host, _) = setup::host(u64::MAX);
            let mut options = setup::options(&base, mode, 16, 72, dir.path());
            options.pause_limit = std::time::Duration::from_secs(60);
            options.persistent = Some(kept());
            let (volume, device) = setup::open(&options, &host);
            let mut life = Life { rng, device, model, view: None };
            life.check_all();
            for _ in 0..6000 {
                life.step(&volume, [16, 72]);
                if life.rng.chance(1, 40) {
                    blocking::flush(&*life.device).unwrap();
                }
            }
            life.view = None;
            life.check_all();
            let cache = volume.counters().cache;
            assert_eq!((cache.corrupt_blocks, cache.refused_writes), (0, 0), "opening {opening}: {cache:?}");
            cleaned += cache.cleaned_blocks;
            volume.close();
            (rng, model) = (life.rng, life.model);
        }
        assert!(cleaned > 0);
    }
}

/// Returns blocks that are only on disk and were written at once, and the volume.
fn on_disk(
    size_mib: u64,
    dir: &std::path::Path,
    persistent: Option<PersistentOptions>,
    host: &headwater_writecache::Host,
) -> (Arc<Volume>, Vec<u8>) {
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(size_mib * MIB));
    let mut options = setup::options(&base, CacheMode::RamDisk, 16, 512, dir);
    options.persistent = persistent;
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
    straddle(None);
    straddle(Some(kept()));
}

fn straddle(persistent: Option<PersistentOptions>) {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, mut model) = on_disk(64, dir.path(), persistent, &host);
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
    // Both blocks are counted, except those that are still in RAM.
    assert!(after.write_new_blocks - before.write_new_blocks > 2 * WRITES * 8 / 10, "{after:?}");
    // 15.6 MiB in segments of 2 MiB, and earlier segments in RAM; two slots for each would be twice as much.
    let segments = after.spilled_segments - before.spilled_segments;
    assert!(segments < 16, "{segments} segments");
    let life = Life { rng, device: Arc::clone(&volume) as _, model, view: None };
    life.check_all();
}

#[test]
fn a_damaged_slot_is_an_error_of_its_sectors_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, model) = on_disk(48, dir.path(), None, &host);
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
fn a_damaged_shared_slot_is_an_error_of_its_sectors_after_opening() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let contents = Rng::new(9).bytes(MIB as usize);
    let mut options = setup::options(&image(&contents), CacheMode::RamDisk, 16, 64, dir.path());
    options.persistent = Some(kept());
    let (volume, device) = setup::open(&options, &host);
    // More slots than a commit takes into the map, so they are in the data file.
    for pair in 0..20 {
        blocking::write(&*device, 4 * pair * BLOCK + 5 * SECTOR, &[9; BLOCK as usize]).unwrap();
    }
    volume.close();
    drop((volume, device));
    let map = std::fs::read(dir.path().join("kept/map")).unwrap();
    let (mut at, mut slots) = (HEADER_BYTES, Vec::new());
    while let Some((_, record, next)) = decode(&map, at) {
        if let Record::Parts(parts) = record {
            slots.extend(parts.iter().filter(|part| part.block == 5).filter_map(|part| part.slot));
        }
        at = next;
    }
    let [(position, _, slot)] = slots[..] else { panic!("block 5 is in {slots:?}") };
    let byte = position as usize * ENCRYPTED_SEGMENT_BYTES + usize::from(slot) * ENCRYPTED_SLOT_BYTES + 7;
    let data = std::fs::File::options().read(true).write(true).open(dir.path().join("kept/data")).unwrap();
    let mut flipped = [0];
    data.read_exact_at(&mut flipped, byte as u64).unwrap();
    data.write_all_at(&[flipped[0] ^ 0x10], byte as u64).unwrap();

    let (volume, device) = setup::open(&options, &host);
    let sector = |number: u64| {
        let mut into = [0; SECTOR as usize];
        blocking::read(&*device, number * SECTOR, &mut into).map(|()| into).map_err(|error| error.kind())
    };
    let old = |number: u64| Ok(contents[(number * SECTOR) as usize..][..SECTOR as usize].try_into().unwrap());
    // Of blocks 4 and 5, the slot has the last three sectors and the first five.
    for number in 32..48 {
        let expected = if (37..45).contains(&number) { Err(IoErrorKind::Corrupt) } else { old(number) };
        assert_eq!(sector(number), expected, "sector {number}");
    }
    assert_eq!((sector(68), sector(69)), (old(68), Ok([9; SECTOR as usize])));
    // When it is written again, block 4 is whole, and block 5 is unchanged.
    blocking::write(&*device, 4 * BLOCK, &[8; BLOCK as usize]).unwrap();
    assert_eq!((sector(39), sector(40)), (Ok([8; SECTOR as usize]), Err(IoErrorKind::Corrupt)));
    volume.close();
}

#[test]
fn as_many_partial_blocks_as_a_leaf_has_blocks() {
    fill_leaves(None);
    fill_leaves(Some(kept()));
}

fn fill_leaves(persistent: Option<PersistentOptions>) {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let contents = Rng::new(5).bytes(4 << 20);
    let base = image(&contents);
    let mode = if persistent.is_some() { CacheMode::RamDisk } else { CacheMode::Ram };
    let mut options = setup::options(&base, mode, 64, 512, dir.path());
    options.persistent = persistent;
    let (volume, device) = setup::open(&options, &host);
    let mut model = contents;
    for round in 1..4u8 {
        for block in 0..1024 {
            let at = block * BLOCK + u64::from(round) * SECTOR;
            blocking::write(&*device, at, &[round; SECTOR as usize]).unwrap();
            model[at as usize..][..SECTOR as usize].fill(round);
        }
    }
    let mut life = Life { rng: Rng::new(1), device, model, view: None };
    life.check_all();
    let has_all = |volume: &Volume| {
        let cache = volume.counters().cache;
        assert!(cache.index_bytes > 1024 * 32, "{cache:?}");
    };
    has_all(&volume);
    if options.persistent.is_some() {
        volume.close();
        drop(volume);
        let (volume, device) = setup::open(&options, &host);
        has_all(&volume);
        life.device = device;
        life.check_all();
        // The tables are full: a further block of a leaf is stored whole, and a partial block can still
        // change.
        for block in 0..1024 {
            blocking::write(&*life.device, block * BLOCK + 6 * SECTOR, &[6; SECTOR as usize]).unwrap();
            life.put(block * BLOCK + 6 * SECTOR, &[6; SECTOR as usize]);
        }
        life.check_all();
        volume.close();
    }
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
