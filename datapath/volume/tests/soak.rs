//! Mixed load on eight volumes in one budget, while limits change at random and the disk fills up, fails to
//! write and to read, and flips bits in the data it returns. Every block is compared with its last written
//! contents, and frozen states are read meanwhile. Two of the volumes are persistent, and are opened again at
//! the end. Memory must stay within the budget, by our own count and by the system's.
//!
//! Half a minute by default; `make soak` sets `HEADWATER_SOAK_SECONDS` to half an hour. A line each minute.

#![expect(unsafe_code, reason = "a signal is ignored, which has no other way")]

#[path = "it/setup/mod.rs"]
mod setup;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_block::{Device, IoError, IoErrorKind, blocking};
use headwater_testkit::{ReferenceDisk, Rng, resident_bytes, wait_until};
use headwater_volume::{CacheMode, FrozenView, PersistentOptions, Volume, VolumeOptions};
use headwater_writecache::Host;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const SPAN_MIB: u64 = 96;
const BLOCKS: usize = (SPAN_MIB * MIB / BLOCK) as usize;
const MODES: [CacheMode; 8] = {
    use CacheMode::{Disk, Ram, RamDisk};
    [RamDisk, RamDisk, RamDisk, RamDisk, RamDisk, Ram, Disk, Disk]
};
/// Which volumes are persistent.
const PERSISTENT: [bool; 8] = [false, false, false, true, false, false, false, true];
const MOST_HOST_MIB: u64 = 400;
/// The limit at the end, without faults.
const LAST_HOST_MIB: u64 = 320;
/// Four segments of each volume are always allowed.
const SLACK_MIB: u64 = 8 * 8;
/// A run of this time certainly meets each fault.
const LONG_SECONDS: u64 = 60;

/// The number of a block's last write; 0 for none, or for a discard.
type Generation = u32;

/// One volume under load, with the oracle of its contents. Both are used by its own thread only.
struct Worker {
    number: u64,
    volume: Arc<Volume>,
    device: Arc<dyn Device>,
    written: Vec<Generation>,
    /// A frozen state, and its expected contents.
    frozen: Option<(Arc<FrozenView>, Vec<Generation>)>,
    rng: Rng,
    next: Generation,
    operations: u64,
    freezes: u64,
    flushes: u64,
    /// Reads that failed because the disk could not be read.
    unread: u64,
}

impl Worker {
    fn contents(&self, block: usize, generation: Generation) -> Vec<u8> {
        // One block in sixteen is zero in each generation, another one each time.
        if generation == 0 || (generation as usize + block).is_multiple_of(16) {
            return vec![0; BLOCK as usize];
        }
        let seed = (self.number << 56) ^ ((block as u64) << 32) ^ u64::from(generation);
        let mut rng = Rng::new(seed);
        // A quarter of the blocks compress.
        if block.is_multiple_of(4) {
            return rng.runs(BLOCK as usize, 8);
        }
        rng.bytes(BLOCK as usize)
    }

    /// One random operation on 1 to 16 blocks.
    fn step(&mut self, lies: &AtomicU64) {
        let len = 1 + self.rng.index(16);
        let first = self.rng.index(BLOCKS - len);
        self.operations += 1;
        if self.rng.chance(1, 500) {
            self.freeze_or_let_go();
        }
        if PERSISTENT[self.number as usize] && self.rng.chance(1, 300) {
            // It may fail while the disk is full; the data stays, and is flushed later.
            self.flushes += u64::from(blocking::flush(&*self.device).is_ok());
        }
        match self.rng.below(10) {
            0..=5 => self.write(first, len),
            6..=8 => {
                let before = lies.load(Ordering::SeqCst);
                let read = if self.rng.chance(1, 4) && self.frozen.is_some() {
                    self.verify_frozen(first, len)
                } else {
                    self.verify(first, len)
                };
                // However long the read took: the disk returned wrong data when it began, or has begun to
                // since.
                let may_fail = before % 2 == 1 || lies.load(Ordering::SeqCst) != before;
                if let Err(error) = read {
                    assert!(may_fail && is_of_the_disk(&error), "volume {}: {error}", self.number);
                    self.unread += u64::from(error.kind() == IoErrorKind::Device);
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

    fn freeze_or_let_go(&mut self) {
        if self.frozen.take().is_none() {
            let view = self.volume.freeze().expect("a volume can be frozen");
            self.frozen = Some((view, self.written.clone()));
            self.freezes += 1;
        }
    }

    fn verify_frozen(&self, first: usize, len: usize) -> Result<(), IoError> {
        let Some((view, written)) = &self.frozen else { return Ok(()) };
        let mut found = vec![1; len * BLOCK as usize];
        blocking::read(&**view, first as u64 * BLOCK, &mut found)?;
        for (block, found) in (first..first + len).zip(found.chunks(BLOCK as usize)) {
            assert!(
                found == self.contents(block, written[block]),
                "volume {}, block {block}: the frozen state changed",
                self.number
            );
        }
        Ok(())
    }

    fn write(&mut self, first: usize, len: usize) {
        self.next += 1;
        let generation = self.next;
        let blocks = (first..first + len).map(|block| self.contents(block, generation));
        let data = blocks.collect::<Vec<_>>().concat();
        match blocking::write(&*self.device, first as u64 * BLOCK, &data) {
            Ok(()) => self.written[first..first + len].fill(generation),
            Err(error) => {
                assert_eq!(error.kind(), IoErrorKind::NoSpace, "volume {}: {error}", self.number);
                // Each block of a refused write has either its old or its new contents.
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
                // The disk returns wrong data, or fails to read, only for a moment.
                Err(error) => assert!(is_of_the_disk(&error), "{error}"),
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

/// Whether the error says that the disk flipped a bit, or failed to read.
fn is_of_the_disk(error: &IoError) -> bool {
    matches!(error.kind(), IoErrorKind::Corrupt | IoErrorKind::Device)
}

/// Makes the disk full or not: for writes, and for reserving space, which no engine sees. Files then cannot
/// grow beyond this size.
fn set_full(faults: &setup::Faults, is_full: bool) {
    const FULL_FILE_BYTES: u64 = 16 * MIB;
    faults.full.store(is_full, Ordering::Relaxed);
    let Rlimit { maximum, .. } = getrlimit(Resource::Fsize);
    let current = if is_full { Some(FULL_FILE_BYTES) } else { maximum };
    setrlimit(Resource::Fsize, Rlimit { current, maximum })
        .expect("a process may lower its limit, and raise it again");
}

/// The memory that a volume uses and may use, in KiB.
fn uses(volume: &Volume) -> [(&'static str, u64); 5] {
    let cache = volume.counters().cache;
    [
        ("used", cache.ram_used_bytes >> 10),
        ("packed", cache.packed_bytes >> 10),
        ("index", cache.index_bytes >> 10),
        ("share", cache.ram_share_bytes >> 10),
        ("target", cache.ram_target_bytes >> 10),
    ]
}

/// The maxima that were reached.
#[derive(Debug, Default)]
struct Peaks {
    used_mib: u64,
    resident_mib: u64,
}

/// The memory that may be in use under a changing limit: after the limit has fallen, earlier use may take any
/// time to shrink on a failing disk, but must not grow.
struct Ceiling {
    limit_mib: u64,
    mib: u64,
}

impl Ceiling {
    /// This limit is in force from now on.
    fn limit(&mut self, mib: u64) {
        self.limit_mib = mib;
        self.mib = self.mib.max(mib);
    }

    /// Records that so much is used now.
    fn used(&mut self, mib: u64) {
        self.mib = self.limit_mib.max(self.mib.min(mib));
    }
}

/// Changes limits and breaks the disk until the time is over; then restores everything.
fn disturb(
    host: &Host,
    volumes: &[Arc<Volume>],
    faults: &setup::Faults,
    lies: &AtomicU64,
    until: Instant,
    resident_before_mib: u64,
) -> Peaks {
    let mut rng = Rng::new(99);
    let mut peaks = Peaks::default();
    let began = Instant::now();
    let mut minutes = 0;
    let mut ceiling = Ceiling { limit_mib: MOST_HOST_MIB, mib: MOST_HOST_MIB };
    while Instant::now() < until {
        let volume = &volumes[rng.index(volumes.len())];
        match rng.below(8) {
            0 => volume.set_ram_bytes(rng.between(16, 96) * MIB),
            1 | 2 => volume.set_disk_bytes(rng.between(32, 256) * MIB),
            // Seldom, so that a low limit is in force for a while.
            3 if rng.chance(1, 16) => {
                let mib = rng.between(160, MOST_HOST_MIB);
                host.set_limit_bytes(mib * MIB);
                ceiling.limit(mib);
            }
            3 => {}
            4 => set_full(faults, rng.chance(1, 3)),
            5 => faults.write_error_every.store(rng.below(3) * 7, Ordering::Relaxed),
            fault => {
                lies.fetch_add(1, Ordering::SeqCst);
                if fault == 6 {
                    faults.flip.store(true, Ordering::SeqCst);
                } else {
                    faults.read_error_every.store(rng.between(1, 5), Ordering::SeqCst);
                }
                std::thread::sleep(Duration::from_millis(rng.between(1, 20)));
                faults.flip.store(false, Ordering::SeqCst);
                faults.read_error_every.store(0, Ordering::SeqCst);
                lies.fetch_add(1, Ordering::SeqCst);
            }
        }
        let used_mib = host.used_bytes() / MIB;
        assert!(
            used_mib <= ceiling.mib + SLACK_MIB,
            "{used_mib} MiB of at most {} in use: {:?}",
            ceiling.mib,
            volumes.iter().map(|volume| uses(volume)).collect::<Vec<_>>()
        );
        ceiling.used(used_mib);
        peaks.used_mib = peaks.used_mib.max(used_mib);
        // Pages of the program itself are dropped if memory is short.
        let resident_mib = (resident_bytes() >> 20).saturating_sub(resident_before_mib);
        assert!(resident_mib <= (MOST_HOST_MIB + SLACK_MIB) * 103 / 100 + 32, "{resident_mib} MiB resident");
        peaks.resident_mib = peaks.resident_mib.max(resident_mib);
        if began.elapsed().as_secs() / 60 > minutes {
            minutes += 1;
            println!("{minutes} min: {used_mib} MiB in use, {resident_mib} resident; most: {peaks:?}");
        }
        std::thread::sleep(Duration::from_millis(rng.between(5, 60)));
    }
    set_full(faults, false);
    faults.write_error_every.store(0, Ordering::Relaxed);
    for (volume, mode) in volumes.iter().zip(MODES) {
        // Volumes without a disk need RAM for everything; the others have to spill down to their limit.
        volume.set_ram_bytes(if mode == CacheMode::Ram { SPAN_MIB + 16 } else { 24 } * MIB);
        volume.set_disk_bytes(512 * MIB);
    }
    host.set_limit_bytes(LAST_HOST_MIB * MIB);
    peaks
}

fn options(number: usize, base: &Arc<dyn Device>, at: &Path) -> VolumeOptions {
    let options = setup::options(base, MODES[number], 32, 256, at);
    let name = format!("volume{number}");
    let persistent =
        PERSISTENT[number].then_some(PersistentOptions { name, key: [number as u8; 16], base_id: [1; 32] });
    // So short that writes are refused while the disk is full.
    VolumeOptions { persistent, pause_limit: Duration::from_secs(3), ..options }
}

fn worker(number: usize, (volume, device): (Arc<Volume>, Arc<dyn Device>)) -> Worker {
    Worker {
        number: number as u64,
        volume,
        device,
        written: vec![0; BLOCKS],
        frozen: None,
        rng: Rng::new(number as u64),
        next: 0,
        operations: 0,
        freezes: 0,
        flushes: 0,
        unread: 0,
    }
}

/// The disk works again: checks all data, frozen states too, and that writes are accepted.
fn check(worker: &mut Worker, host: &Host) {
    for first in (0..BLOCKS).step_by(64) {
        worker.verify(first, 64).expect("the disk is well again");
        worker.verify_frozen(first, 64).expect("the disk is well again");
    }
    worker.frozen = None;
    // There is space again, so writes are accepted; the first may still be refused at once.
    let data = worker.contents(0, 1);
    let recovered = std::fmt::from_fn(|f| {
        let (used_mib, cache) = (host.used_bytes() / MIB, worker.volume.counters().cache);
        write!(f, "volume {} recovers; {used_mib} MiB in use; {cache:?}", worker.number)
    });
    wait_until(recovered, || blocking::write(&*worker.device, 0, &data).is_ok());
    worker.written[0] = 1;
}

/// Checks that a persistent volume has all data after it was closed and opened again.
fn check_reopened(worker: &mut Worker, options: &VolumeOptions, host: &Host) {
    blocking::flush(&*worker.device).expect("the disk is well again");
    worker.volume.close();
    (worker.volume, worker.device) = setup::open(options, host);
    for first in (0..BLOCKS).step_by(64) {
        worker.verify(first, 64).expect("it was flushed");
    }
}

#[test]
fn nothing_is_lost_while_limits_change_and_the_disk_misbehaves() {
    let seconds =
        std::env::var("HEADWATER_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(30);
    // SAFETY: no handler is set. Exceeding a limit on the file size is then an error, and does not end the
    // process.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let resident_before_mib = resident_bytes() >> 20;
    let until = Instant::now() + Duration::from_secs(seconds);
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(MOST_HOST_MIB * MIB);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(SPAN_MIB * MIB));
    let all: Vec<VolumeOptions> = (0..MODES.len()).map(|number| options(number, &base, dir.path())).collect();
    let mut workers: Vec<Worker> =
        (0..).zip(&all).map(|(number, options)| worker(number, setup::open(options, &host))).collect();
    let volumes: Vec<Arc<Volume>> = workers.iter().map(|worker| Arc::clone(&worker.volume)).collect();
    // Odd while the disk returns wrong data.
    let lies = AtomicU64::new(0);
    let mut peaks = Peaks::default();
    std::thread::scope(|scope| {
        for worker in &mut workers {
            let lies = &lies;
            scope.spawn(move || {
                while Instant::now() < until {
                    worker.step(lies);
                }
            });
        }
        peaks = disturb(&host, &volumes, &faults, &lies, until, resident_before_mib);
    });
    let sum = |of: fn(&Volume) -> u64| volumes.iter().map(|volume| of(volume)).sum::<u64>();
    let spilled = sum(|v| v.counters().cache.spilled_segments);
    let cleaned = sum(|v| v.counters().cache.cleaned_segments);
    let packed = sum(|v| v.counters().cache.packed_segments);
    let (damaged, errors) =
        (sum(|v| v.counters().cache.corrupt_blocks), sum(|v| v.counters().cache.disk_errors));
    let (paused, refused) =
        (sum(|v| v.counters().cache.paused_writes), sum(|v| v.counters().cache.refused_writes));
    let reached = [
        ("evicted", sum(|v| v.counters().cache.evicted_segments)),
        ("read from RAM", sum(|v| v.counters().cache.read_ram_blocks)),
        ("read packed", sum(|v| v.counters().cache.read_packed_blocks)),
        ("read from disk", sum(|v| v.counters().cache.read_disk_blocks)),
        ("zero", sum(|v| v.counters().cache.elided_zero_blocks)),
        ("discarded", sum(|v| v.counters().cache.discarded_blocks)),
    ];
    drop(volumes);
    for (worker, options) in workers.iter_mut().zip(&all) {
        check(worker, &host);
        if options.persistent.is_some() {
            check_reopened(worker, options, &host);
        }
    }
    let resident_mib = || (resident_bytes() >> 20).saturating_sub(resident_before_mib);
    let most_mib = (LAST_HOST_MIB + SLACK_MIB) * 103 / 100 + 32;
    let goes = std::fmt::from_fn(|f| write!(f, "{} MiB resident go down to {most_mib}", resident_mib()));
    wait_until(goes, || resident_mib() <= most_mib);
    let operations: u64 = workers.iter().map(|worker| worker.operations).sum();
    let freezes: u64 = workers.iter().map(|worker| worker.freezes).sum();
    let unread: u64 = workers.iter().map(|worker| worker.unread).sum();
    let flushes: u64 = workers.iter().map(|worker| worker.flushes).sum();
    println!(
        "{operations} operations, {freezes} frozen states, {flushes} flushes; {packed} segments packed, {spilled} spilled, \
         {cleaned} cleaned; {errors} disk errors, {unread} reads failed, {damaged} damaged blocks reported; {paused} writes waited, {refused} were \
         refused; nothing was lost; most: {peaks:?}, {} MiB in use at the end, {} resident",
        host.used_bytes() / MIB,
        resident_mib()
    );
    assert!(operations > 1000 && spilled > 0 && freezes > 0 && flushes > 0);
    // Each step was taken, and the disk did fail.
    assert!(packed > 0 && cleaned > 0 && paused > 0 && errors > 0);
    assert!(reached.iter().all(|(_, count)| *count > 0), "{reached:?}");
    let seen = [damaged, refused, unread];
    assert!(seconds < LONG_SECONDS || !seen.contains(&0), "damaged, refused, and unread: {seen:?}");
}
