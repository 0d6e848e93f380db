//! Mixed load on eight volumes in one budget, while limits change at random, the disk fills up and its
//! reads flip bits. Every block is compared with what was last written to it.
//!
//! Twenty seconds by default; `make soak` sets `HEADWATER_SOAK_SECONDS` to half an hour.

mod setup;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use headwater_block::{Device, IoError, IoErrorKind, blocking};
use headwater_testkit::{ReferenceDisk, Rng};
use headwater_volume::{CacheMode, Volume};
use headwater_writecache::Host;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const SPAN_MIB: u64 = 96;
const BLOCKS: usize = (SPAN_MIB * MIB / BLOCK) as usize;
const MODES: [CacheMode; 8] = {
    use CacheMode::{Disk, Ram, RamDisk};
    [RamDisk, RamDisk, RamDisk, RamDisk, RamDisk, Ram, Disk, Disk]
};
const MOST_HOST_MIB: u64 = 400;
/// Four segments of each volume are always allowed, and a limit that falls takes effect by spilling.
const SLACK_MIB: u64 = 8 * 8;

/// What a block holds: which write was the last; 0 for none, or for a discard.
type Generation = u32;

/// One volume under load, with the oracle of its contents. Only its own thread touches either.
struct Worker {
    number: u64,
    device: Arc<dyn Device>,
    written: Vec<Generation>,
    rng: Rng,
    next: Generation,
    operations: u64,
}

impl Worker {
    fn contents(&self, block: usize, generation: Generation) -> Vec<u8> {
        if generation == 0 {
            return vec![0; BLOCK as usize];
        }
        let seed = (self.number << 56) ^ ((block as u64) << 32) ^ u64::from(generation);
        Rng::new(seed).bytes(BLOCK as usize)
    }

    /// One random operation on 1 to 16 blocks.
    fn step(&mut self, disk_lies: &AtomicBool) {
        let len = 1 + self.rng.index(16);
        let first = self.rng.index(BLOCKS - len);
        self.operations += 1;
        match self.rng.below(10) {
            0..=5 => self.write(first, len),
            6..=8 => {
                let lied_before = disk_lies.load(Ordering::SeqCst);
                let read = self.verify(first, len);
                let may_fail = lied_before || disk_lies.load(Ordering::SeqCst);
                if let Err(error) = read {
                    assert!(
                        may_fail && error.kind() == IoErrorKind::Corrupt,
                        "volume {}: {error}",
                        self.number
                    );
                }
            }
            _ => {
                let (offset, bytes) = (first as u64 * BLOCK, len as u64 * BLOCK);
                let cleared = if self.rng.chance(1, 2) {
                    blocking::discard(&*self.device, offset, bytes)
                } else {
                    blocking::write_zeroes(&*self.device, offset, bytes)
                };
                cleared.expect("clearing whole blocks needs no space");
                self.written[first..first + len].fill(0);
            }
        }
    }

    fn write(&mut self, first: usize, len: usize) {
        self.next += 1;
        let generation = self.next;
        let data: Vec<u8> = (first..first + len).flat_map(|block| self.contents(block, generation)).collect();
        match blocking::write(&*self.device, first as u64 * BLOCK, &data) {
            Ok(()) => self.written[first..first + len].fill(generation),
            Err(error) => {
                assert_eq!(error.kind(), IoErrorKind::NoSpace, "volume {}: {error}", self.number);
                // Each block of a refused write holds the whole of the old or of the new contents.
                for block in first..first + len {
                    self.settle(block, generation);
                }
            }
        }
    }

    fn settle(&mut self, block: usize, maybe: Generation) {
        let is_new = loop {
            match self.read(block, 1) {
                Ok(found) if found == self.contents(block, maybe) => break true,
                Ok(found) => {
                    assert!(found == self.contents(block, self.written[block]), "block {block} is torn");
                    break false;
                }
                // The disk lies for a moment only.
                Err(error) => assert_eq!(error.kind(), IoErrorKind::Corrupt, "{error}"),
            }
        };
        if is_new {
            self.written[block] = maybe;
        }
    }

    fn verify(&self, first: usize, len: usize) -> Result<(), IoError> {
        let found = self.read(first, len)?;
        for (block, found) in (first..first + len).zip(found.chunks(BLOCK as usize)) {
            let generation = self.written[block];
            assert!(
                found == self.contents(block, generation),
                "volume {}, block {block}: write {generation} was lost",
                self.number
            );
        }
        Ok(())
    }

    fn read(&self, first: usize, len: usize) -> Result<Vec<u8>, IoError> {
        let mut into = vec![1; len * BLOCK as usize];
        blocking::read(&*self.device, first as u64 * BLOCK, &mut into)?;
        Ok(into)
    }
}

/// Changes limits and breaks the disk, until the time is over; then mends everything.
fn disturb(host: &Host, volumes: &[Arc<Volume>], faults: &setup::Faults, lies: &AtomicBool, until: Instant) {
    let mut rng = Rng::new(99);
    while Instant::now() < until {
        let volume = &volumes[rng.index(volumes.len())];
        match rng.below(6) {
            0 => volume.set_ram_bytes(rng.between(16, 96) * MIB),
            1 | 2 => volume.set_disk_bytes(rng.between(32, 256) * MIB),
            3 => host.set_limit_bytes(rng.between(160, MOST_HOST_MIB) * MIB),
            4 => faults.full.store(rng.chance(1, 3), Ordering::Relaxed),
            _ => {
                lies.store(true, Ordering::SeqCst);
                faults.flip.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(rng.between(1, 20)));
                faults.flip.store(false, Ordering::SeqCst);
                // Reads that were flipped may still be on their way to the worker.
                std::thread::sleep(Duration::from_millis(300));
                lies.store(false, Ordering::SeqCst);
            }
        }
        let used_mib = host.used_bytes() / MIB;
        assert!(used_mib <= MOST_HOST_MIB + SLACK_MIB, "{used_mib} MiB of at most {MOST_HOST_MIB} in use");
        std::thread::sleep(Duration::from_millis(rng.between(5, 60)));
    }
    faults.full.store(false, Ordering::Relaxed);
    for (volume, mode) in volumes.iter().zip(MODES) {
        // What is kept in RAM only needs room for all of it; the others have to spill down to their limit.
        volume.set_ram_bytes(if mode == CacheMode::Ram { SPAN_MIB + 16 } else { 24 } * MIB);
        volume.set_disk_bytes(512 * MIB);
    }
    host.set_limit_bytes(320 * MIB);
}

fn open(host: &Host, at: &Path) -> Vec<(Arc<Volume>, Arc<dyn Device>)> {
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(SPAN_MIB * MIB));
    MODES.map(|mode| setup::open(&setup::options(&base, mode, 32, 256, at), host)).into()
}

#[test]
fn nothing_is_lost_while_limits_change_and_the_disk_misbehaves() {
    let seconds =
        std::env::var("HEADWATER_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let until = Instant::now() + Duration::from_secs(seconds);
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(MOST_HOST_MIB * MIB);
    let opened = open(&host, dir.path());
    let volumes: Vec<Arc<Volume>> = opened.iter().map(|(volume, _)| Arc::clone(volume)).collect();
    let lies = AtomicBool::new(false);
    let mut workers: Vec<Worker> = (0..)
        .zip(opened)
        .map(|(number, (_, device))| Worker {
            number,
            device,
            written: vec![0; BLOCKS],
            rng: Rng::new(number),
            next: 0,
            operations: 0,
        })
        .collect();
    std::thread::scope(|scope| {
        for worker in &mut workers {
            let lies = &lies;
            scope.spawn(move || {
                while Instant::now() < until {
                    worker.step(lies);
                }
            });
        }
        disturb(&host, &volumes, &faults, &lies, until);
    });
    for worker in &mut workers {
        for first in (0..BLOCKS).step_by(64) {
            worker.verify(first, 64).expect("the disk is well again");
        }
        // There is room again, so writes are taken again; the first may still be refused at once.
        let data = worker.contents(0, 1);
        let taken = (0..100).any(|_| {
            let taken = blocking::write(&*worker.device, 0, &data).is_ok();
            std::thread::sleep(Duration::from_millis(if taken { 0 } else { 100 }));
            taken
        });
        let cache = volumes.iter().map(|v| v.counters().cache).nth(worker.number as usize);
        let used_mib = host.used_bytes() / MIB;
        assert!(taken, "volume {} does not recover; {used_mib} MiB in use; {cache:?}", worker.number);
    }
    let spilled: u64 = volumes.iter().map(|volume| volume.counters().cache.spilled_segments).sum();
    let operations: u64 = workers.iter().map(|worker| worker.operations).sum();
    println!("{operations} operations, {spilled} segments spilled, {} MiB in use", host.used_bytes() / MIB);
    assert!(operations > 1000 && spilled > 0);
}
