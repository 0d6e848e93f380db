//! A persistent volume loses power at random points, hundreds of times, while it is written, flushed,
//! discarded and cleaned. Each time it must have exactly the state of some moment at or after the last
//! answered flush.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use headwater_block::{Attempt, ByteRange, Device, IoErrorKind, Op, Request, blocking};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, rounds};
use headwater_volume::{CacheMode, FrozenView, PersistentOptions, Volume, VolumeOptions};
use headwater_writecache::Host;
use headwater_writecache::persist::format::{HEADER_BYTES, Record, decode};

use crate::power::CrashEngine;
use crate::setup;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const SIZE_MIB: u64 = 20;
const BLOCKS: usize = (SIZE_MIB * MIB) as usize / BLOCK;

/// The contents of every block over time: step 0 is the state at opening, and each change of one block is a
/// step.
struct Oracle {
    contents: Vec<u8>,
    /// For each block, ascending: the step from which on its contents had this checksum.
    history: Vec<Vec<(usize, u32)>>,
    steps: usize,
    /// The last step that an answered flush covers.
    flushed: usize,
    /// Blocks that changed since the last view was made: the view may keep their old slots.
    changed: BTreeSet<usize>,
}

impl Oracle {
    fn new(contents: Vec<u8>) -> Self {
        let history = contents.chunks(BLOCK).map(|block| vec![(0, crc32c::crc32c(block))]).collect();
        Self { contents, history, steps: 0, flushed: 0, changed: BTreeSet::new() }
    }

    /// Records the bytes of one request, block by block, in order.
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.contents[offset..offset + bytes.len()].copy_from_slice(bytes);
        for block in offset / BLOCK..(offset + bytes.len()).div_ceil(BLOCK) {
            self.steps += 1;
            self.changed.insert(block);
            let sum = crc32c::crc32c(&self.contents[block * BLOCK..][..BLOCK]);
            self.history[block].push((self.steps, sum));
        }
    }

    /// Records zeroes: first whole blocks, then the part of a block at an end.
    fn clear(&mut self, offset: usize, len: usize) {
        let end = offset + len;
        let first = offset.next_multiple_of(BLOCK).min(end);
        let last = (end - end % BLOCK).max(first);
        for (from, to) in [(first, last), (offset, first), (last, end)] {
            self.write(from, &vec![0; to - from]);
        }
    }

    /// For messages: the blocks that do not fit together.
    fn misfits(&self, found: &[u8]) -> String {
        let mut out = String::new();
        for (number, (block, history)) in found.chunks(BLOCK).zip(&self.history).enumerate() {
            let sum = crc32c::crc32c(block);
            let is_zero = block.iter().all(|byte| *byte == 0);
            let at = history.iter().position(|(_, s)| *s == sum);
            if history.len() > 1 || at.is_none() {
                let steps: Vec<usize> = history.iter().map(|(step, _)| *step).collect();
                out += &format!("\nblock {number}: of steps {steps:?} the one at {at:?}, zero: {is_zero}");
            }
        }
        out
    }

    /// The latest step at which the whole disk was as it is now.
    fn step_of(&self, found: &[u8]) -> Option<usize> {
        // At each step: the number of blocks that begin to match, minus those that cease to.
        let mut change = vec![0i64; self.steps + 2];
        for (block, history) in found.chunks(BLOCK).zip(&self.history) {
            let sum = crc32c::crc32c(block);
            for (index, (from, _)) in history.iter().enumerate().filter(|(_, (_, s))| *s == sum) {
                let end = history.get(index + 1).map_or(self.steps + 1, |(next, _)| *next);
                change[*from] += 1;
                change[end] -= 1;
            }
        }
        let mut same = 0;
        let mut last = None;
        for (step, change) in change.iter().enumerate().take(self.steps + 1) {
            same += change;
            if same == BLOCKS as i64 {
                last = Some(step);
            }
        }
        last
    }
}

/// A view is dropped when this many blocks have changed, besides those of one request: what it keeps takes
/// space in a small cache, and nothing else would free it while a write waits.
const MOST_KEPT: usize = 512;

/// A frozen view, and its expected contents.
type View = (Arc<FrozenView>, Vec<u8>);

/// Marks the end when it is dropped.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Life {
    seed: u64,
    base: Arc<dyn Device>,
    mode: CacheMode,
    oracle: Oracle,
    rng: Rng,
    /// Nearly all writes are of a few blocks, with a flush after each second one.
    small: bool,
    /// Nearly all writes begin and end at any sector.
    sectors: bool,
    /// The disk reports syncs as done without doing them.
    lies: bool,
    cleaned: u64,
    spilled: u64,
    /// Records of partial blocks that a crash left.
    partial: u64,
    crashes: u64,
}

impl Life {
    fn options(&self, at: &Path) -> VolumeOptions {
        // 20 MiB of blocks in a disk of 15 segments: cleaning has to work, and positions come back by commits.
        VolumeOptions {
            persistent: Some(PersistentOptions { name: "life".into(), key: [7; 16], base_id: [9; 32] }),
            pause_limit: Duration::from_secs(20),
            ..setup::options(&self.base, self.mode, 16, 31, at)
        }
    }

    /// From opening to a crash, or a clean end.
    fn session(&mut self, at: &Path) {
        let engine = CrashEngine::new();
        let clean = self.rng.chance(1, 8);
        let early = self.rng.chance(1, 10);
        if !clean {
            let most = if self.rng.chance(1, 2) { 12 } else { 120 };
            engine.crash_after(self.rng.between(if early { 1 } else { 6 }, most));
        }
        if self.lies {
            engine.lie();
        }
        setup::end_with_a_panic_of_ours();
        let host = Host::with_engine(u64::MAX, Arc::clone(&engine) as _).unwrap();
        match Volume::open(&self.options(at), &host) {
            Err(error) => assert!(engine.is_gone(), "seed {}: cannot open: {error}", self.seed),
            Ok(volume) => {
                self.check(&*volume);
                let over = AtomicBool::new(false);
                std::thread::scope(|scope| {
                    // Also if a check fails: otherwise the thread below would keep the test from ending.
                    let _ended = Ended(&over);
                    // Writes that wait for a disk without power would wait for long.
                    scope.spawn(|| {
                        while !over.load(Ordering::Relaxed) && !engine.is_gone() {
                            std::thread::sleep(Duration::from_millis(2));
                        }
                        if engine.is_gone() {
                            volume.close();
                        }
                    });
                    let operations = self.rng.between(1, 120);
                    let mut view = None;
                    for _ in 0..operations {
                        if engine.is_gone() || !self.operation(&*volume, &engine) {
                            break;
                        }
                        self.freeze(&volume, &mut view, &engine);
                    }
                });
                let cache = volume.counters().cache;
                self.cleaned += cache.cleaned_segments;
                self.spilled += cache.spilled_segments;
                volume.close();
                if clean {
                    assert_eq!(cache.disk_errors, 0, "seed {}: {cache:?}", self.seed);
                    self.oracle.flushed = self.oracle.steps;
                }
            }
        }
        if !clean {
            self.crashes += 1;
            engine.crash(&mut self.rng);
            self.partial += partial_records(at);
        }
    }

    /// Checks that the state after opening is that of some step; it becomes step 0.
    fn check(&mut self, device: &dyn Device) {
        let mut found = vec![0; BLOCKS * BLOCK];
        for (number, chunk) in found.chunks_mut(1 << 20).enumerate() {
            if let Err(error) = blocking::read(device, number as u64 * MIB, chunk) {
                // The power may have failed by now; then this session says nothing about the disk.
                assert_eq!(error.kind(), IoErrorKind::Device, "seed {}: {error}", self.seed);
                return;
            }
        }
        let Oracle { steps, flushed, .. } = self.oracle;
        let Some(step) = self.oracle.step_of(&found) else {
            panic!(
                "seed {}, crash {}: not a state of {steps} steps ({flushed} flushed): {}",
                self.seed,
                self.crashes,
                self.oracle.misfits(&found)
            )
        };
        assert!(
            step >= flushed,
            "seed {}, crash {}: step {step} of {steps}, but {flushed} were flushed",
            self.seed,
            self.crashes
        );
        self.oracle = Oracle::new(found);
    }

    /// Sometimes makes a view, checks it, and drops it: what only the view needs must not reappear after a
    /// crash.
    fn freeze(&mut self, volume: &Volume, view: &mut Option<View>, engine: &CrashEngine) {
        match view {
            None if self.rng.chance(1, 12) => {
                self.oracle.changed.clear();
                *view = Some((volume.freeze().unwrap(), self.oracle.contents.clone()));
            }
            Some(_) if self.oracle.changed.len() > MOST_KEPT => *view = None,
            Some((frozen, kept)) if self.rng.chance(1, 3) => {
                let offset = self.rng.index(BLOCKS - 64) * BLOCK;
                let mut found = vec![0; 64 * BLOCK];
                match blocking::read(&**frozen, offset as u64, &mut found) {
                    Ok(()) => assert!(found == kept[offset..][..found.len()], "seed {}: a view", self.seed),
                    Err(error) => assert!(engine.is_gone(), "seed {}: {error}", self.seed),
                }
            }
            Some(_) if self.rng.chance(1, 10) => *view = None,
            _ => {}
        }
    }

    /// Executes a request. `false`: it failed, because the power failed.
    fn operation(&mut self, device: &dyn Device, engine: &CrashEngine) -> bool {
        let count = match self.small {
            true if self.rng.chance(15, 16) => self.rng.between(1, 4),
            false if self.rng.chance(3, 4) => self.rng.between(1, 24),
            _ => self.rng.between(1, 256),
        };
        let first = self.rng.below(BLOCKS as u64 - count);
        let (mut offset, mut len) = (first as usize * BLOCK, count as usize * BLOCK);
        // Half of the requests begin or end at any sector. Not both: the two ends of a zero write are written
        // separately.
        let sectors = self.rng.between(0, 7) as usize * SECTOR;
        match self.rng.below(4) {
            0 => (offset, len) = (offset + sectors, len - sectors),
            1 => len += sectors,
            _ => {}
        }
        let range = ByteRange::new(offset as u64, len as u64).unwrap();
        let kinds = if self.small { 27 } else { 20 };
        let kind = if self.sectors && self.rng.chance(2, 3) { 10 } else { self.rng.below(kinds) };
        let done = match kind {
            0..9 => self.write(device, offset, len, false),
            9 => self.write(device, offset, len.min(4 * BLOCK), true),
            // Parts of blocks, and the end of one block with the beginning of the next one.
            10 | 11 => {
                let (skip, sectors) = (self.rng.below(8), self.rng.between(1, 8));
                let offset = first as usize * BLOCK + skip as usize * SECTOR;
                self.write(device, offset, sectors as usize * SECTOR, false)
            }
            12 => {
                self.oracle.clear(offset, len);
                blocking::discard(device, offset as u64, len as u64)
            }
            13 => {
                self.oracle.clear(offset, len);
                let fua = self.rng.chance(1, 3);
                let step = self.oracle.steps;
                let request = Request::WriteZeroes { range, may_unmap: true, fua };
                let now = device.try_now(Op::WriteZeroes { range, may_unmap: true, fua });
                let done = match now {
                    Ok(Attempt::Done) => Ok(()),
                    Ok(Attempt::MustWait) => blocking::wait(device, request).map(drop),
                    Err(error) => Err(error),
                };
                if fua && done.is_ok() {
                    self.oracle.flushed = step;
                }
                done
            }
            14..17 | 20.. => {
                let step = self.oracle.steps;
                let done = blocking::flush(device);
                if done.is_ok() {
                    self.oracle.flushed = step;
                }
                done
            }
            _ => {
                let mut found = vec![0; len];
                let done = blocking::read(device, offset as u64, &mut found);
                assert!(
                    done.is_err() || found == self.oracle.contents[offset..offset + len],
                    "seed {}: a read differs",
                    self.seed
                );
                done
            }
        };
        if let Err(error) = &done {
            let changed = self.oracle.changed.len();
            assert!(engine.is_gone(), "seed {}: {error}; {changed} blocks changed since a view", self.seed);
        }
        done.is_ok()
    }

    fn write(
        &mut self,
        device: &dyn Device,
        offset: usize,
        len: usize,
        fua: bool,
    ) -> Result<(), headwater_block::IoError> {
        let bytes = self.rng.bytes(len);
        self.oracle.write(offset, &bytes);
        if !fua {
            return blocking::write(device, offset as u64, &bytes);
        }
        let step = self.oracle.steps;
        let range = ByteRange::new(offset as u64, len as u64).unwrap();
        blocking::wait(device, Request::Write { range, buffer: bytes, fua })?;
        self.oracle.flushed = step;
        Ok(())
    }
}

fn live(seed: u64, mode: CacheMode, image: bool, crashes: usize) {
    let is_enough = |life: &Life| life.spilled > 20 && life.cleaned > 5;
    let life = lived_until(born(seed, mode, image), crashes, is_enough);
    assert!(is_enough(&life), "{} written, {} cleaned", life.spilled, life.cleaned);
}

fn lived(life: Life, crashes: usize) -> Life {
    lived_until(life, crashes, |_| true)
}

/// Goes on after the crashes until enough has happened, at most for ten times as many: a busy computer spills less between two
/// crashes.
fn lived_until(mut life: Life, crashes: usize, is_enough: impl Fn(&Life) -> bool) -> Life {
    let dir = tempfile::tempdir().unwrap();
    let crashes = crashes as u64;
    while life.crashes < crashes || (!is_enough(&life) && life.crashes < 10 * crashes) {
        life.session(dir.path());
    }
    println!("{} crashes, {} segments written, {} cleaned", life.crashes, life.spilled, life.cleaned);
    life
}

fn born(seed: u64, mode: CacheMode, image: bool) -> Life {
    let mut rng = Rng::new(seed);
    let contents = if image { rng.bytes(BLOCKS * BLOCK) } else { vec![0; BLOCKS * BLOCK] };
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::with_contents(contents.clone(), options));
    let oracle = Oracle::new(contents);
    Life {
        seed,
        base,
        mode,
        oracle,
        rng,
        small: false,
        sectors: false,
        lies: false,
        cleaned: 0,
        spilled: 0,
        partial: 0,
        crashes: 0,
    }
}

#[test]
fn over_an_image() {
    live(1, CacheMode::RamDisk, true, rounds(150));
}

#[test]
fn over_nothing() {
    live(2, CacheMode::RamDisk, false, rounds(150));
}

#[test]
fn in_disk_mode() {
    live(3, CacheMode::Disk, true, rounds(150));
}

/// A flush makes blocks durable mostly in the map only; at the next opening they go to the data file.
#[test]
fn of_small_flushes() {
    for (seed, mode) in [(6, CacheMode::RamDisk), (7, CacheMode::Disk)] {
        lived(Life { small: true, ..born(seed, mode, true) }, rounds(150));
    }
}

/// How many records of partial blocks are in the map.
fn partial_records(at: &Path) -> u64 {
    let Ok(bytes) = std::fs::read(at.join("life/map")) else { return 0 };
    let (mut count, mut place) = (0, HEADER_BYTES);
    while let Some((_, record, next)) = decode(&bytes, place) {
        count += u64::from(matches!(record, Record::Parts(_)));
        place = next;
    }
    count
}

/// Most writes make partial blocks, and end one block and begin the next.
#[test]
fn of_writes_at_any_sector() {
    for (seed, mode, small) in
        [(8, CacheMode::RamDisk, false), (9, CacheMode::Disk, false), (10, CacheMode::RamDisk, true)]
    {
        let life = lived(Life { sectors: true, small, ..born(seed, mode, true) }, rounds(150));
        assert!(life.partial > 30, "crashes left {} records of partial blocks", life.partial);
    }
}

/// Checks the oracle: it must detect a disk that loses synced data.
#[test]
fn a_disk_that_lies_about_syncs_is_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let mut life = born(4, CacheMode::RamDisk, false);
    life.lies = true;
    let honest = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        while life.crashes < 60 {
            life.session(dir.path());
        }
    }));
    assert!(honest.is_err(), "60 crashes lost nothing that was flushed");
}

/// The writes of one of several writers: of one block each, in order, with the times of their beginnings and
/// ends.
struct Track {
    blocks: Vec<usize>,
    began: Vec<u64>,
    ended: Vec<u64>,
}

/// Blocks of each writer.
const OWN: usize = 1200;
const WRITERS: usize = 4;

impl Track {
    fn run(
        &mut self,
        device: &dyn Device,
        writer: usize,
        clock: &AtomicU64,
        flushed: &AtomicU64,
        rng: &mut Rng,
    ) {
        loop {
            if rng.chance(1, 60) {
                let before = clock.fetch_add(1, Ordering::SeqCst);
                if blocking::flush(device).is_err() {
                    return;
                }
                flushed.fetch_max(before, Ordering::SeqCst);
            }
            let block = writer * OWN + rng.index(OWN);
            self.blocks.push(block);
            self.began.push(clock.fetch_add(1, Ordering::SeqCst));
            let data = (self.blocks.len() as u64).to_le_bytes().repeat(BLOCK / 8);
            if blocking::write(device, (block * BLOCK) as u64, &data).is_err() {
                return;
            }
            self.ended.push(clock.fetch_add(1, Ordering::SeqCst));
        }
    }

    /// The number of writes that were recovered: all up to that number, and no others.
    fn recovered(&self, writer: usize, found: &[u8]) -> usize {
        let word =
            |block: usize| u64::from_le_bytes(found[block * BLOCK..][..8].try_into().unwrap()) as usize;
        let own = writer * OWN..(writer + 1) * OWN;
        let count = own.clone().map(word).max().unwrap();
        let mut expected = vec![0; OWN];
        for (number, block) in (1..=count).zip(&self.blocks) {
            expected[block - own.start] = number;
        }
        assert!(own.map(word).eq(expected), "writer {writer}: not its first {count} writes");
        count
    }
}

/// Several threads write: the recovered state is a consistent cut through all their writes. If a write is in
/// it, so are all writes that ended before it began, of whatever thread.
#[test]
fn writers_side_by_side_are_cut_at_one_moment() {
    let mut rng = Rng::new(77);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(SIZE_MIB * MIB));
    let life = Life { base, ..born(5, CacheMode::RamDisk, false) };
    let mut written = 0;
    for round in 0..60 {
        let dir = tempfile::tempdir().unwrap();
        let engine = CrashEngine::new();
        setup::end_with_a_panic_of_ours();
        let host = Host::with_engine(u64::MAX, Arc::clone(&engine) as _).unwrap();
        let volume = Volume::open(&life.options(dir.path()), &host).unwrap();
        engine.crash_after(rng.between(1, 60));
        let (clock, flushed) = (AtomicU64::new(1), AtomicU64::new(0));
        let mut tracks: Vec<Track> = (0..WRITERS)
            .map(|_| Track { blocks: Vec::new(), began: Vec::new(), ended: Vec::new() })
            .collect();
        std::thread::scope(|scope| {
            for (writer, track) in tracks.iter_mut().enumerate() {
                let (volume, clock, flushed, mut rng) = (&volume, &clock, &flushed, rng.fork());
                scope.spawn(move || track.run(&**volume, writer, clock, flushed, &mut rng));
            }
            scope.spawn(|| {
                while !engine.is_gone() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                volume.close();
            });
        });
        drop(volume);
        engine.crash(&mut rng);
        setup::end_with_a_panic_of_ours();
        let host = Host::with_engine(u64::MAX, CrashEngine::new()).unwrap();
        let volume = Volume::open(&life.options(dir.path()), &host).unwrap();
        let mut found = vec![0; BLOCKS * BLOCK];
        blocking::read(&*volume, 0, &mut found).unwrap();
        volume.close();
        let counts: Vec<usize> =
            tracks.iter().enumerate().map(|(writer, track)| track.recovered(writer, &found)).collect();
        written += counts.iter().sum::<usize>();
        // When the last recovered write began, and when the first missing one ended.
        let last = tracks.iter().zip(&counts).filter_map(|(t, n)| t.began.get(n.checked_sub(1)?)).max();
        let missing = tracks.iter().zip(&counts).filter_map(|(t, n)| t.ended.get(*n)).min();
        if let (Some(last), Some(missing)) = (last, missing) {
            assert!(
                missing > last,
                "round {round}: a write that ended at {missing} is missing, one of {last} is there"
            );
        }
        let flushed = flushed.load(Ordering::SeqCst);
        assert!(missing.is_none_or(|m| *m > flushed), "round {round}: {missing:?} was flushed at {flushed}");
    }
    assert!(written > 1000, "{written} writes were recovered in all");
}
