//! Ends a cache's process between any two stores, and checks the cache that the next process recovers.

mod disk;
mod lives;
mod steps;
mod wrong;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use headwater_testkit::Rng;

use self::disk::LateDisk;
use super::{Handover, crash};
use crate::cache::{
    Admission, CacheOptions, FetchedOld, Found, FrozenCache, LittleSpace, Old, OverflowOptions, Ticket,
    UnloggedBlocks, WriteCache, WriteResult,
};
use crate::fetch::Fetched;
use crate::host::Host;
use crate::overflow::buffering::Buffering;
use crate::pressure::NoPressure;
use crate::units::{BlockNumber, Location, SEGMENT_BYTES};

const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const MIB: u64 = 1 << 20;

/// The image under the cache.
fn image(block: u32) -> Vec<u8> {
    let mut bytes = vec![0x11; BLOCK];
    bytes[..4].copy_from_slice(&block.to_le_bytes());
    bytes[4000..4004].copy_from_slice(&block.to_le_bytes());
    bytes
}

/// Bytes that occur nowhere else: some compress, and some do not.
fn bytes(rng: &mut Rng, len: usize) -> Vec<u8> {
    if rng.chance(1, 3) { rng.bytes(len) } else { rng.runs(len, 64) }
}

fn memfd() -> File {
    File::from(rustix::fs::memfd_create("cache", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
}

fn options(ram_mib: u64, overflow: Option<(&std::path::Path, u64)>, size_bytes: u64) -> CacheOptions {
    CacheOptions {
        name: "tested".into(),
        size_bytes,
        ram_bytes: ram_mib * MIB,
        weight: crate::DEFAULT_WEIGHT,
        overflow: overflow.map(|(at, limit_bytes)| OverflowOptions {
            at: at.to_owned(),
            limit_bytes,
            buffering: Buffering::Buffered,
            little_space: LittleSpace::Refused,
        }),
        pause_limit: Duration::ZERO,
        persistent: None,
        base: None,
    }
}

/// A copy of the descriptors for the next process.
fn again(handover: &Handover) -> Handover {
    let copy = |fd: &std::os::fd::OwnedFd| fd.try_clone().unwrap();
    Handover {
        memory: copy(&handover.memory),
        overflow: handover.overflow.as_ref().map(copy),
        key: handover.key.as_ref().map(copy),
    }
}

/// The contents that each block must have, and those that a request in flight may have stored.
#[derive(Default)]
struct Model {
    blocks: BTreeMap<u32, Vec<u8>>,
    under_way: BTreeMap<u32, Vec<u8>>,
}

impl Model {
    fn now(&self, block: u32) -> Vec<u8> {
        self.blocks.get(&block).cloned().unwrap_or_else(|| image(block))
    }

    fn begin(&mut self, block: u32, skip: usize, data: &[u8]) {
        let mut after = self.under_way.get(&block).cloned().unwrap_or_else(|| self.now(block));
        after[skip..skip + data.len()].copy_from_slice(data);
        self.under_way.insert(block, after);
    }

    fn end(&mut self) {
        self.blocks.append(&mut self.under_way);
    }

    fn refuse(&mut self) {
        self.under_way.clear();
    }

    /// Of a request in flight, each byte may be old or new.
    fn check(&mut self, block: u32, found: &[u8], what: &str) {
        let before = self.now(block);
        let after = self.under_way.get(&block).unwrap_or(&before);
        if found == before || found == *after {
            self.note(block, found);
            return;
        }
        let wrong = (0..BLOCK).find(|at| found[*at] != before[*at] && found[*at] != after[*at]);
        if let Some(at) = wrong {
            let is_image = found == image(block);
            let is_zero = found.iter().all(|byte| *byte == 0);
            panic!(
                "{what}: block {block} is wrong from byte {at} on: {:#x}, not {:#x} or {:#x}; image: {is_image}, zero: {is_zero}",
                found[at], before[at], after[at]
            );
        }
        self.note(block, found);
    }

    fn note(&mut self, block: u32, found: &[u8]) {
        if self.under_way.contains_key(&block) {
            self.blocks.insert(block, found.to_vec());
        }
    }
}

/// A process: a cache, its host without the host's thread, and its disk.
struct Process {
    cache: Arc<WriteCache>,
    _host: Host,
    disk: Arc<LateDisk>,
    view: Option<(FrozenCache, BTreeMap<u32, Vec<u8>>)>,
}

impl Process {
    fn new(open: impl FnOnce(&Host) -> Arc<WriteCache>) -> Self {
        let disk = Arc::new(LateDisk::default());
        let host = Host::prepare(u64::MAX, Arc::clone(&disk) as _, NoPressure).0;
        Self { cache: open(&host), _host: host, disk, view: None }
    }

    fn fetch(&self, ticket: Ticket) -> Option<Vec<u8>> {
        let found: Arc<Mutex<Option<Option<Vec<u8>>>>> = Arc::default();
        let tell = Arc::clone(&found);
        self.cache.fetch(vec![ticket], move |_, fetched| {
            *tell.lock().unwrap() = Some(match fetched {
                Fetched::Data(data) => Some(data.to_vec()),
                Fetched::Moved => None,
                Fetched::Failed(error) => panic!("a block cannot be read: {error}"),
            });
        });
        while found.lock().unwrap().is_none() {
            self.disk.run_reads();
        }
        found.lock().unwrap().take().unwrap()
    }

    /// The contents of a block, by `read` and `parts` of the cache or of a view.
    fn contents(
        &self,
        block: u32,
        read: impl Fn(&mut [u8]) -> Found,
        parts: impl Fn(&mut [u8], &mut dyn FnMut(usize, usize, Found)),
    ) -> Vec<u8> {
        loop {
            let mut into = vec![0xee; BLOCK];
            let mut places = Vec::new();
            match read(&mut into) {
                Found::Partial => parts(&mut into, &mut |at, len, found| places.push((at, len, found))),
                found => places.push((0, BLOCK, found)),
            }
            let mut moved = false;
            for (at, len, found) in places {
                match found {
                    Found::Done(_) => {}
                    Found::Absent => into[at..at + len].copy_from_slice(&image(block)[at..at + len]),
                    Found::Spilled(ticket) => match self.fetch(ticket) {
                        Some(slot) => into[at..at + len].copy_from_slice(&slot[at..at + len]),
                        None => moved = true,
                    },
                    Found::Partial => panic!("a part of a partial block is a partial block"),
                }
            }
            if !moved {
                return into;
            }
        }
    }

    fn read(&self, block: u32) -> Vec<u8> {
        let number = BlockNumber(block);
        let parts = |into: &mut [u8], each: &mut dyn FnMut(usize, usize, Found)| {
            self.cache.read_parts(number, 0, into, each);
        };
        self.contents(block, |into| self.cache.read(number, 0, into), parts)
    }

    /// Does the work of the host's thread.
    fn work(&self) {
        let _ = self.cache.work(Instant::now());
    }

    /// Completes a write. Returns whether it was stored: a write that finds no space is refused after some
    /// rounds.
    fn settle(&self, mut write: impl FnMut(&[FetchedOld]) -> WriteResult, block: u32) -> bool {
        let mut fetched: Vec<FetchedOld> = Vec::new();
        let mut turns = 0;
        loop {
            match write(&fetched) {
                WriteResult::Done => return true,
                WriteResult::NeedOld(old @ Old::Absent) => fetched.push((old, image(block))),
                WriteResult::NeedOld(old @ Old::Spilled(ticket)) => {
                    if let Some(slot) = self.fetch(ticket) {
                        fetched.push((old, slot));
                    }
                }
                WriteResult::NoRoom | WriteResult::Queued | WriteResult::Throttled => {
                    if turns == 40 {
                        return false;
                    }
                    turns += 1;
                    if !self.cache.make_room() {
                        self.work();
                        self.disk.run_all();
                    }
                }
                WriteResult::Closed => panic!("the cache is closed"),
            }
        }
    }

    fn write(&self, model: &mut Model, block: u32, data: &[u8]) {
        model.begin(block, 0, data);
        let same = data == image(block);
        let write =
            |_: &[FetchedOld]| self.cache.write_unless(BlockNumber(block), data, Admission::Waited, |_| same);
        if self.settle(write, block) { model.end() } else { model.refuse() }
    }

    fn write_part(&self, model: &mut Model, block: u32, skip: usize, data: &[u8]) {
        model.begin(block, skip, data);
        let number = BlockNumber(block);
        let same = || data == &image(block)[skip..skip + data.len()];
        let write = |fetched: &[FetchedOld]| match fetched {
            [] => self.cache.write_part(number, skip, data, Admission::Waited, same),
            fetched => self.cache.merge(number, skip, data, fetched, Admission::Waited),
        };
        if self.settle(write, block) { model.end() } else { model.refuse() }
    }

    /// Returns whether both parts were stored together.
    fn write_pair(&self, model: &mut Model, block: u32, skip: usize, data: &[u8]) -> bool {
        let (first, second) = data.split_at(BLOCK - skip);
        model.begin(block, skip, first);
        model.begin(block + 1, 0, second);
        let mut is_pair = true;
        let write = |_: &[FetchedOld]| {
            let wrote = self.cache.write_pair(BlockNumber(block), skip, data, Admission::Waited, || false);
            wrote.unwrap_or_else(|| {
                is_pair = false;
                WriteResult::Done
            })
        };
        let stored = self.settle(write, block) && is_pair;
        if stored {
            model.end()
        } else {
            model.refuse()
        }
        stored
    }

    fn clear(&self, model: &mut Model, first: u32, end: u32, to: Location) {
        for block in first..end {
            let data = if to == Location::ZERO { vec![0; BLOCK] } else { image(block) };
            model.begin(block, 0, &data);
        }
        self.cache.clear(BlockNumber(first), BlockNumber(end), to, UnloggedBlocks::Stay);
        model.end();
    }

    fn check(&self, model: &mut Model, blocks: impl Iterator<Item = u32>, what: &str) {
        for block in blocks {
            model.check(block, &self.read(block), what);
        }
        model.under_way.clear();
    }
}

/// The remains of an ended process: its descriptors, and writes that the kernel still has.
struct Left {
    handover: Handover,
    late: Vec<disk::LateWrite>,
}

/// Ends a process at a counted store, if `work` comes that far. Returns its remains, or how many counted
/// stores were left.
fn end_after<T>(
    points: u64,
    process: Process,
    work: impl FnOnce(&mut Process) -> T,
) -> Result<Left, (Process, u64)> {
    let handover = process.cache.handover().unwrap().unwrap();
    let process = Rc::new(RefCell::new(process));
    let running = Rc::clone(&process);
    crash::after(points);
    let ended = catch_unwind(AssertUnwindSafe(move || {
        work(&mut running.borrow_mut());
    }));
    match ended {
        Ok(()) => {
            let left = crash::revive().unwrap_or(0);
            let process = Rc::into_inner(process).unwrap().into_inner();
            Err((process, left))
        }
        Err(why) if why.is::<crash::Ended>() => {
            let disk = Arc::clone(&process.borrow().disk);
            let late = disk.left();
            // Destructors have no effect any more.
            let _ = catch_unwind(AssertUnwindSafe(move || drop(process)));
            crash::revive();
            Ok(Left { handover, late })
        }
        Err(why) => std::panic::resume_unwind(why),
    }
}

fn recover(left: &Handover, options: &CacheOptions) -> Result<Process, headwater_block::IoError> {
    let mut failed = None;
    let disk = Arc::new(LateDisk::default());
    let host = Host::prepare(u64::MAX, Arc::clone(&disk) as _, NoPressure).0;
    let cache = match WriteCache::recover(again(left), options, &host.shared()) {
        Ok(cache) => Some(cache),
        Err(error) => {
            failed = Some(error);
            None
        }
    };
    match (cache, failed) {
        (Some(cache), _) => Ok(Process { cache, _host: host, disk, view: None }),
        (None, Some(error)) => Err(error),
        (None, None) => unreachable!(),
    }
}

/// Like [`recover`], in a process that may end during the recovery.
fn recover_at_last(left: &Handover, options: &CacheOptions, points: &[u64]) -> Process {
    for points in points {
        crash::after(*points);
        let recovered = catch_unwind(AssertUnwindSafe(|| recover(left, options)));
        crash::revive();
        match recovered {
            Ok(process) => return process.unwrap(),
            Err(why) => assert!(why.is::<crash::Ended>(), "it panicked"),
        }
    }
    recover(left, options).unwrap()
}

const _: () = assert!(SEGMENT_BYTES == 2 << 20);
