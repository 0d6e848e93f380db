//! The real cache under the model checker shuttle: map, segments, slots in RAM, packing, spilling, cleaning and
//! waiting, with a disk that answers late, out of order, and sometimes with an error.
//!
//! Threads that write, read, discard, freeze and change limits use the same few blocks, beside the host's own
//! loop and two disk threads. The model checker runs one thread at a time, and may switch at every lock and
//! atomic, and in the middle of every copy. In every order:
//! - a read returns a whole block that was written, never one that was overwritten before the read began;
//! - a frozen state is the state of one moment, and does not change while it exists;
//! - no thread waits for ever: a missed wake-up is a deadlock here, which the model checker reports;
//! - after a power cut, a persistent cache has the state of one moment, at or after the beginning of the last
//!   answered flush;
//! - in the end, every byte of RAM and every position of the disk is free.
//!
//! Each run explores other schedules. On failure the model checker prints the seed or the schedule: run the test
//! again with `SHUTTLE_RANDOM_SEED` set to that seed.

mod schedule;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use headwater_testkit::rounds;
use headwater_writecache::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;
use headwater_writecache::units::SEGMENT_BYTES;
use headwater_writecache::{
    BaseImage, BlockNumber, Buffering, CacheOptions, DEFAULT_WEIGHT, Host, LittleSpace, Location,
    OverflowOptions, PersistentOptions, Snapshot, WriteCache,
};
use schedule::client::{Client, image};
use schedule::disk::Disk;
use schedule::oracle::{BLOCK, Oracle};
use schedule::power::Cut;
use schedule::{close, settle};
use shuttle::rand::Rng;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, MaxSteps, Runner, thread};

/// Blocks of a volume with a disk: five leaves, and as many segments if each block is stored once.
const BLOCKS_WITH_DISK: u32 = 20;

/// Blocks of a volume in RAM alone: as many as fit when some are packed.
const BLOCKS_IN_RAM: u32 = 28;

const BLOCK_BYTES: u64 = 4096;

/// RAM of a volume without a disk, in segments, including its index.
const RAM_ALONE: std::ops::Range<u64> = 9..12;

/// Number of operations of each thread.
const STEPS: usize = 8;

fn random(range: std::ops::Range<u64>) -> u64 {
    shuttle::rand::thread_rng().gen_range(range)
}

fn options(overflow: Option<PathBuf>, blocks: u32, base: &Arc<ImageBeneath>) -> CacheOptions {
    // Less than is written, so that segments are spilled or packed.
    let ram_segments = if overflow.is_some() { random(8..14) } else { random(RAM_ALONE) };
    CacheOptions {
        name: "explored".into(),
        size_bytes: u64::from(blocks) * BLOCK_BYTES,
        ram_bytes: ram_segments * SEGMENT_BYTES as u64,
        weight: DEFAULT_WEIGHT,
        overflow: overflow.map(|at| OverflowOptions {
            at,
            limit_bytes: random(10..14) * ENCRYPTED_SEGMENT_BYTES as u64,
            buffering: Buffering::Buffered,
            little_space: LittleSpace::Refused,
        }),
        pause_limit: Duration::from_secs(3600),
        persistent: None,
        base: Some(Arc::clone(base) as Arc<dyn BaseImage>),
    }
}

fn change_limits(cache: &WriteCache, has_disk: bool) {
    for _ in 0..STEPS / 2 {
        let range = if has_disk { 8..16 } else { RAM_ALONE };
        cache.set_ram_bytes(random(range) * SEGMENT_BYTES as u64);
        if has_disk {
            cache.set_disk_bytes(random(10..16) * ENCRYPTED_SEGMENT_BYTES as u64);
        }
    }
}

/// The image, and how often the dedup scan found equal blocks.
#[derive(Debug, Default)]
struct ImageBeneath {
    found: std::sync::atomic::AtomicU64,
}

impl BaseImage for ImageBeneath {
    fn begins_with(&self, block: BlockNumber, data: &[u8]) -> bool {
        let is_same = image(block.0).starts_with(data);
        if is_same && data.len() == BLOCK {
            self.found.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        is_same
    }
}

/// How often each case occurred in all executions together.
#[derive(Default)]
struct Reached(BTreeMap<&'static str, u64>);

impl Reached {
    fn add(&mut self, now: &Snapshot, base: &ImageBeneath) {
        for (what, count) in [
            ("overwritten in place", now.write_in_place_blocks),
            ("equal to the image", now.elided_equal_blocks),
            ("found by the dedup scan", base.found.load(std::sync::atomic::Ordering::Relaxed)),
            ("read from RAM", now.read_ram_blocks),
            ("read as zeroes", now.read_zero_blocks),
            ("packed", now.packed_segments),
            ("read from packed RAM", now.read_packed_blocks),
        ] {
            *self.0.entry(what).or_default() += count;
        }
    }

    fn add_together(&mut self, client: &Client) {
        *self.0.entry("overwritten together").or_default() += client.stored_together();
        *self.0.entry("stored in pairs").or_default() += client.stored_in_pairs();
    }

    fn add_disk(&mut self, now: &Snapshot) {
        for (what, count) in [
            ("spilled", now.spilled_segments),
            ("read from disk", now.read_disk_blocks),
            ("evicted", now.evicted_segments),
            ("cleaned", now.cleaned_blocks),
            ("failed", now.disk_errors),
            ("waited", now.paused_writes),
            ("waited for the disk", now.throttled_writes),
        ] {
            *self.0.entry(what).or_default() += count;
        }
    }

    fn add_given_up(&mut self, disk: &Disk) {
        *self.0.entry("dropped").or_default() += u64::from(disk.given_up());
    }
}

impl Reached {
    fn add_persistent(&mut self, now: &Snapshot, maps: u32, cuts: &[Cut]) {
        let encrypted = cuts.iter().filter(|cut| cut.has_encrypted()).count();
        for (what, count) in [
            ("committed", now.commits),
            ("replaced the map", u64::from(maps > 1)),
            ("cut with slots in the map", encrypted as u64),
        ] {
            *self.0.entry(what).or_default() += count;
        }
    }
}

/// One execution, from the opening of a cache to its end.
fn execution(overflow: Option<PathBuf>, reached: &std::sync::Mutex<Reached>) {
    let has_disk = overflow.is_some();
    let blocks = if has_disk { BLOCKS_WITH_DISK } else { BLOCKS_IN_RAM };
    let disk = Arc::new(Disk::new(u32::try_from(random(0..4)).unwrap()));
    let (host, run) = Host::without_thread(1 << 30, disk.clone());
    let mut machinery = vec![thread::spawn(run)];
    for _ in 0..2 {
        let disk = Arc::clone(&disk);
        machinery.push(thread::spawn(move || disk.run()));
    }
    let base = Arc::default();
    let cache = WriteCache::open(&options(overflow, blocks, &base), &host.shared()).unwrap();
    let client = Client::new(&cache, &Arc::new(Oracle::new(blocks)));
    for block in 0..blocks {
        client.write_whole(block);
    }
    let mut workers = Vec::new();
    for work in [Client::write_some, Client::write_some, Client::read_some, Client::clear_some] {
        let client = client.clone();
        workers.push(thread::spawn(move || work(&client, STEPS)));
    }
    let frozen = client.clone();
    workers.push(thread::spawn(move || frozen.freeze_some(2)));
    let limited = Arc::clone(&cache);
    workers.push(thread::spawn(move || change_limits(&limited, has_disk)));
    for worker in workers {
        worker.join().unwrap();
    }
    for block in 0..blocks {
        client.read(block);
    }
    client.clear(0..blocks, Location::ABSENT);
    settle("no block is left, so no packed segment and no position", || {
        let now = cache.snapshot();
        now.packed_bytes == 0 && now.disk_used_bytes == 0
    });
    let now = cache.snapshot();
    {
        let mut reached = reached.lock().unwrap();
        reached.add(&now, &base);
        reached.add_together(&client);
        if has_disk {
            reached.add_disk(&now);
            reached.add_given_up(&disk);
        }
    }
    drop(client);
    close(cache, &host);
    drop(host);
    disk.stop();
    for thread in machinery {
        thread.join().unwrap();
    }
}

/// Cuts the power at moments anywhere among the other threads' steps.
fn cut_some(times: usize, cut: impl Fn() -> Cut) -> Vec<Cut> {
    let mut cuts = Vec::new();
    for _ in 0..times {
        for _ in 0..random(0..600) {
            shuttle::sync::atomic::AtomicBool::new(false).load(Ordering::SeqCst);
        }
        cuts.push(cut());
    }
    cuts
}

/// One execution with a persistent cache: threads that write and flush, and power cuts at any moment.
fn persistent_execution(within: &Path, reached: &std::sync::Mutex<Reached>) {
    const NAME: &str = "kept";
    let dir = tempfile::tempdir_in(within).unwrap();
    let disk = Arc::new(Disk::new(0));
    let (host, run) = Host::without_thread(1 << 30, disk.clone());
    let mut machinery = vec![thread::spawn(run)];
    for _ in 0..2 {
        let disk = Arc::clone(&disk);
        machinery.push(thread::spawn(move || disk.run()));
    }
    let persistent = PersistentOptions { name: NAME.into(), key: [7; 16], base_id: [1; 32] };
    let options = CacheOptions {
        persistent: Some(persistent),
        ..options(Some(dir.path().to_owned()), BLOCKS_WITH_DISK, &Arc::default())
    };
    let cache = WriteCache::open(&options, &host.shared()).unwrap();
    disk.fail_some(u32::try_from(random(0..3)).unwrap());
    let oracle = Arc::new(Oracle::new(BLOCKS_WITH_DISK));
    let flushed = Arc::new(AtomicU64::new(0));
    let client = Client::new(&cache, &oracle);
    for block in 0..BLOCKS_WITH_DISK {
        client.write_whole(block);
    }
    let cut = {
        let (disk, dir) = (Arc::clone(&disk), dir.path().join(NAME));
        let (oracle, flushed) = (Arc::clone(&oracle), Arc::clone(&flushed));
        move || Cut::now(&disk, &dir, &oracle, &flushed)
    };
    let cutter = {
        let cut = cut.clone();
        thread::spawn(move || cut_some(2, cut))
    };
    let mut workers = Vec::new();
    for work in [Client::write_some, Client::write_some, Client::read_some, Client::clear_some] {
        let client = client.clone();
        workers.push(thread::spawn(move || work(&client, STEPS)));
    }
    for work in [Client::flush_some, Client::flush_some] {
        let (client, flushed) = (client.clone(), Arc::clone(&flushed));
        workers.push(thread::spawn(move || work(&client, STEPS / 2, &flushed)));
    }
    let frozen = client.clone();
    workers.push(thread::spawn(move || frozen.freeze_some(1)));
    let limited = Arc::clone(&cache);
    workers.push(thread::spawn(move || change_limits(&limited, true)));
    for worker in workers {
        worker.join().unwrap();
    }
    let mut cuts = cutter.join().unwrap();
    for block in 0..BLOCKS_WITH_DISK {
        client.read(block);
    }
    settle("a flush works, once the disk does", || client.flush(&flushed));
    cuts.push(cut());
    client.clear(0..BLOCKS_WITH_DISK, Location::ABSENT);
    // Segments that are being filled keep theirs.
    settle("no block is left, so positions come back", || {
        client.flush(&flushed) && cache.snapshot().disk_used_bytes <= 2 * ENCRYPTED_SEGMENT_BYTES as u64
    });
    let now = cache.snapshot();
    // The disk may fail even now.
    let _ = cache.close();
    cuts.push(cut());
    {
        let mut reached = reached.lock().unwrap();
        reached.add_disk(&now);
        reached.add_together(&client);
        reached.add_persistent(&now, disk.renames(), &cuts);
    }
    drop(client);
    close(cache, &host);
    drop(host);
    disk.stop();
    for thread in machinery {
        thread.join().unwrap();
    }
    for cut in cuts {
        cut.check(options.clone(), &oracle, within);
    }
}

/// The kind of cache in an exploration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Ram,
    RamAndDisk,
    Persistent,
}

/// More steps than any execution needs in which all threads make progress.
const STEPS_MAX: usize = 400_000;

/// At least this many of ten executions must end. If all must end, the model checker fails on one that does not.
const LEAST_VERDICTS: usize = 9;
const VERDICTS_OF: usize = 10;

/// Runs executions until the scheduler has enough.
fn explore(scheduler: impl Scheduler + 'static, mode: Mode, max_steps: MaxSteps) {
    let mut config = Config::new();
    config.stack_size = 1 << 18;
    config.silence_warnings = true;
    config.max_steps = max_steps;
    // The directory has only the few files that a test writes besides its disk in memory: in RAM, if
    // possible.
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let at = dir.path().to_owned();
    let reached = Arc::new(std::sync::Mutex::new(Reached::default()));
    let seen = Arc::clone(&reached);
    let ended = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = Arc::clone(&ended);
    let begun = Runner::new(scheduler, config).run(move || {
        match mode {
            Mode::Ram => execution(None, &seen),
            Mode::RamAndDisk => execution(Some(at.clone()), &seen),
            Mode::Persistent => persistent_execution(&at, &seen),
        }
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    });
    let ended = ended.load(std::sync::atomic::Ordering::Relaxed);
    println!("{ended} of {begun} executions ended");
    assert!(
        begun > 0 && ended * VERDICTS_OF >= begun * LEAST_VERDICTS,
        "{ended} of {begun} executions ended"
    );
    let reached = reached.lock().unwrap();
    println!("{:?}", reached.0);
    assert!(reached.0.values().all(|count| *count > 0), "a case never occurred: {:?}", reached.0);
}

/// Prints how to explore the same schedules again.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("SHUTTLE_RANDOM_SEED={} explores the same schedules again", self.0);
        }
    }
}

fn explore_with_few_preemptions(depth: usize, executions: usize, mode: Mode) {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = Seed(clock.as_nanos() as u64);
    // This scheduler is not fair: a thread that retries after a fault, without a pause because time stands
    // still, may keep all others from running. Such an execution ends without a verdict.
    let max_steps = match mode {
        Mode::Persistent => MaxSteps::ContinueAfter(STEPS_MAX),
        Mode::Ram | Mode::RamAndDisk => MaxSteps::FailAfter(STEPS_MAX),
    };
    explore(PctScheduler::new_from_seed(seed.0, depth, executions), mode, max_steps);
}

#[test]
fn ram_and_disk_at_random() {
    explore(RandomScheduler::new(rounds(6_000)), Mode::RamAndDisk, MaxSteps::FailAfter(STEPS_MAX));
}

#[test]
fn ram_and_disk_with_few_preemptions() {
    explore_with_few_preemptions(5, rounds(6_000), Mode::RamAndDisk);
}

#[test]
fn ram_alone_at_random() {
    explore(RandomScheduler::new(rounds(3_000)), Mode::Ram, MaxSteps::FailAfter(STEPS_MAX));
}

#[test]
fn ram_alone_with_few_preemptions() {
    explore_with_few_preemptions(5, rounds(3_000), Mode::Ram);
}

#[test]
fn persistent_at_random() {
    explore(RandomScheduler::new(rounds(2_400)), Mode::Persistent, MaxSteps::FailAfter(STEPS_MAX));
}

#[test]
fn persistent_with_few_preemptions() {
    explore_with_few_preemptions(5, rounds(2_400), Mode::Persistent);
}
