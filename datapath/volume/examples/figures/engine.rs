//! Measures blocks in RAM against bare memory, and blocks on their way to disk against the bare disk.

use std::hint::black_box;
use std::path::Path;
use std::time::Duration;

use headwater_block::blocking;
use headwater_testkit::Rng;
use headwater_volume::{CacheMode, Volume};

use crate::measure::progress;
use crate::rows::{Goal, Report, Row, Series};
use crate::work::{self, BLOCK, GIB, MIB};

const ROUNDS: usize = 5;
const SET_BYTES: u64 = GIB;
const BLOCKS: u64 = SET_BYTES / BLOCK;
const OPERATIONS: u64 = 1_000_000;
const SUSTAINED_BYTES: u64 = 4 * GIB;

/// Nanoseconds of an operation, in each round.
#[derive(Default)]
struct Times {
    copy_in: Vec<f64>,
    overwrite: Vec<f64>,
    copy_out: Vec<f64>,
    read: Vec<f64>,
    one_thread: Vec<f64>,
    two_threads: Vec<f64>,
    one_copy: Vec<f64>,
    two_copy: Vec<f64>,
}

fn timed(mut operation: impl FnMut()) -> f64 {
    let start = std::time::Instant::now();
    (0..OPERATIONS).for_each(|_| operation());
    start.elapsed().as_nanos() as f64 / OPERATIONS as f64
}

/// Random blocks of 1 GiB: overwritten and read in the cache, and by a bare copy in as much memory.
pub fn memory(_dir: &Path, report: &mut Report) {
    let mut rng = Rng::new(1);
    let host = work::host();
    let volume = work::open(&work::options(CacheMode::Ram, SET_BYTES + 64 * MIB, 0, Path::new("/")), &host);
    let data = rng.bytes(MIB as usize);
    (0..SET_BYTES / MIB).for_each(|number| blocking::write(&*volume, number * MIB, &data).expect("it fits"));
    let mut bare = vec![1u8; SET_BYTES as usize];
    let (block, mut into) = (&data[..BLOCK as usize], vec![0; BLOCK as usize]);
    let mut times = Times::default();
    for round in 0..ROUNDS {
        let place = |rng: &mut Rng| (rng.below(BLOCKS) * BLOCK) as usize;
        times.copy_in.push(timed(|| {
            let start = place(&mut rng);
            bare[start..start + BLOCK as usize].copy_from_slice(black_box(block));
        }));
        times.overwrite.push(timed(|| work::write(&volume, rng.below(BLOCKS), black_box(block))));
        times.copy_out.push(timed(|| {
            let start = place(&mut rng);
            black_box(&mut into).copy_from_slice(&bare[start..start + BLOCK as usize]);
        }));
        times.read.push(timed(|| work::read(&volume, rng.below(BLOCKS), black_box(&mut into))));
        let ns = |time: Duration, threads: u64| time.as_nanos() as f64 / (OPERATIONS * threads) as f64;
        times.one_thread.push(ns(work::together(&volume, BLOCKS, 1, OPERATIONS), 1));
        times.two_threads.push(ns(work::together(&volume, BLOCKS, 2, OPERATIONS), 2));
        let (first, second) = bare.split_at_mut(SET_BYTES as usize / 2);
        times.one_copy.push(ns(copy_together(&mut [first]), 1));
        times.two_copy.push(ns(copy_together(&mut [first, second]), 2));
        progress(format_args!("round {} of {ROUNDS}", round + 1));
    }
    let pair = |ours, limit| (Series::new("headwater", ours), Series::new("bare copy", limit));
    let goal = Goal::AtLeast(0.6);
    let figure = "4 KiB random overwrite in RAM, one thread";
    report.add(Row::part("memory", figure, pair(times.overwrite, times.copy_in), "ns", goal));
    let figure = "4 KiB random read in RAM, one thread";
    report.add(Row::part("memory", figure, pair(times.read, times.copy_out), "ns", goal));
    let threads = (Series::new("two threads", times.two_threads), Series::new("one", times.one_thread));
    let figure = "two threads on one volume, operations a second";
    report.add(Row::part("memory", figure, threads, "ns", Goal::AtLeast(1.7)));
    let threads = (Series::new("two threads", times.two_copy), Series::new("one", times.one_copy));
    report.add(Row::part("memory", "limit: bare copy, two threads", threads, "ns", Goal::None));
}

/// Random blocks of 1 GiB are overwritten in turn in memory of the process, and in a file of memory with the headers from which the next
/// process rebuilds the map.
pub fn headers(_dir: &Path, report: &mut Report) {
    let mut rng = Rng::new(1);
    let host = work::host();
    let options = work::options(CacheMode::Ram, SET_BYTES + 64 * MIB, 0, Path::new("/"));
    let memory = rustix::fs::memfd_create("headwater-cache", rustix::fs::MemfdFlags::CLOEXEC);
    let memory = std::fs::File::from(memory.expect("the kernel has memfds"));
    let volumes =
        [work::open(&options, &host), Volume::open_in(memory, &options, &host).expect("it is opened")];
    let data = rng.bytes(MIB as usize);
    for volume in &volumes {
        (0..SET_BYTES / MIB)
            .for_each(|number| blocking::write(&**volume, number * MIB, &data).expect("it fits"));
    }
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for (volume, times) in volumes.iter().zip(&mut times) {
            let block = &data[..BLOCK as usize];
            times.push(timed(|| work::write(volume, rng.below(BLOCKS), black_box(block))));
        }
        progress(format_args!("round {} of {ROUNDS}", round + 1));
    }
    let [plain, outliving] = times;
    let pair = (Series::new("outlives the process", outliving), Series::new("does not", plain));
    let figure = "4 KiB random overwrite in RAM that outlives the process";
    report.add(Row::part("headers", figure, pair, "ns", Goal::AtLeast(0.98)));
}

/// Half copies into, half copies out of random blocks of memory, with a thread for each part of it: the most
/// that two threads of this machine can do together.
fn copy_together(parts: &mut [&mut [u8]]) -> Duration {
    let start = std::time::Instant::now();
    std::thread::scope(|scope| {
        for (thread, part) in parts.iter_mut().enumerate() {
            scope.spawn(move || {
                let mut rng = Rng::new(thread as u64 + 7);
                let data = rng.bytes(BLOCK as usize);
                let mut into = vec![0; BLOCK as usize];
                let blocks = part.len() as u64 / BLOCK;
                let mut place = || (rng.below(blocks) * BLOCK) as usize;
                for _ in 0..OPERATIONS / 2 {
                    let at = place();
                    part[at..at + BLOCK as usize].copy_from_slice(black_box(&data));
                    let at = place();
                    black_box(&mut into).copy_from_slice(&part[at..at + BLOCK as usize]);
                }
            });
        }
    });
    start.elapsed()
}

/// Random blocks into an empty volume, as fast as it accepts them, and the disk's own sequential writes.
pub fn sustained(dir: &Path, report: &mut Report) {
    let host = work::host();
    let (mut disk, mut small, mut none) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let seconds_a_gib = |time: Duration| time.as_secs_f64() * GIB as f64 / SUSTAINED_BYTES as f64;
        disk.push(seconds_a_gib(work::sequential(SUSTAINED_BYTES, dir)));
        small.push(seconds_a_gib(work::random_writes(&host, CacheMode::RamDisk, SUSTAINED_BYTES, dir)));
        none.push(seconds_a_gib(work::random_writes(&host, CacheMode::Disk, SUSTAINED_BYTES, dir)));
        progress(format_args!("round {} of {ROUNDS}", round + 1));
    }
    let disk = Series::new("disk, sequential", disk);
    for (figure, ours, goal) in [
        ("4 KiB random writes, 64 MiB of RAM, encrypted", small, Goal::AtLeast(0.7)),
        ("4 KiB random writes, disk mode, encrypted", none, Goal::None),
    ] {
        let pair = (Series::new("headwater", ours), disk.clone());
        report.add(Row::part("sustained", figure, pair, "s/GiB", goal));
    }
}
