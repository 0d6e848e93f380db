//! How evenly writes are slowed down: latencies of 4 KiB random writes that come faster than the overflow
//! disk takes them, with 64 MiB of RAM.
//!
//! `cargo run --release -p headwater-volume --example overload_latency -- DIR [THREADS] [MIB] [ROUNDS] [MB/S] [THINK_US] [persistent]`
//!
//! With a speed above 0, writes to the overflow are held up until a disk of that speed would begin the next one. A writer sleeps for
//! THINK_US after each answer, as a client does that has to hear of it first. The last is for a persistent cache, which is not flushed meanwhile.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use headwater_block::{CompletionQueue, Device, blocking};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng};
use headwater_volume::{
    Buffering, CacheMode, DEFAULT_WEIGHT, LittleSpace, PersistentOptions, Volume, VolumeOptions,
};
use headwater_writecache::Host;
use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp, open_engine};

const BLOCK: usize = 4096;
const SPAN_BYTES: u64 = 4 << 30;

fn main() {
    let mut args = std::env::args().skip(1);
    let dir = args.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let mut number = |default: u64| args.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (threads, mib, rounds, mb_per_s) = (number(4), number(2048), number(5), number(0));
    let think = Duration::from_micros(number(0));
    let is_persistent = args.next().as_deref() == Some("persistent");
    println!(
        "{:>8} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "MiB/s", "p50 us", "p99 us", "p99.9 us", "p99.99 us", "max us"
    );
    for round in 0..rounds {
        let load = Load { threads, mib, think, mb_per_s, is_persistent };
        let (elapsed, mut ns) = run(&dir, load, round);
        ns.sort_unstable();
        let at = |per_mille: f64| {
            let index = (ns.len() as f64 * per_mille / 1000.0) as usize;
            f64::from(ns[index.min(ns.len() - 1)]) / 1000.0
        };
        println!(
            "{:>8.0} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
            mib as f64 / elapsed.as_secs_f64(),
            at(500.0),
            at(990.0),
            at(999.0),
            at(999.9),
            at(1000.0)
        );
    }
}

/// The disk, as if it wrote no faster than so.
struct SlowDisk {
    real: Arc<dyn IoEngine>,
    writes: mpsc::Sender<IoOp>,
}

impl SlowDisk {
    fn new(mb_per_s: u64) -> Self {
        let real = open_engine().expect("a disk engine");
        let (writes, waiting) = mpsc::channel::<IoOp>();
        let below = Arc::clone(&real);
        std::thread::spawn(move || {
            let mut due = Instant::now();
            for op in waiting {
                due = due.max(Instant::now()) + Duration::from_nanos(op.len as u64 * 1000 / mb_per_s);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                below.submit(op);
            }
        });
        Self { real, writes }
    }
}

impl IoEngine for SlowDisk {
    fn submit(&self, op: IoOp) {
        match op.direction {
            Direction::Write => self.writes.send(op).expect("its thread lives"),
            Direction::Read => self.real.submit(op),
        }
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.real.completion_queue()
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        self.real.sync(file)
    }
}

/// What a round writes, and to what.
#[derive(Clone, Copy)]
struct Load {
    threads: u64,
    mib: u64,
    think: Duration,
    mb_per_s: u64,
    is_persistent: bool,
}

/// One round on a new volume: how long it took, and each write's nanoseconds.
fn run(dir: &std::path::Path, load: Load, round: u64) -> (Duration, Vec<u32>) {
    let Load { threads, mib, think, mb_per_s, is_persistent } = load;
    let host = match mb_per_s {
        0 => Host::start(u64::MAX),
        _ => Host::with_engine(u64::MAX, Arc::new(SlowDisk::new(mb_per_s))),
    };
    let host = host.expect("the host starts");
    let read_only = ReferenceOptions { read_only: true, ..ReferenceOptions::default() };
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::with_options(SPAN_BYTES, read_only));
    let options = VolumeOptions {
        name: "overload_latency".into(),
        base,
        mode: CacheMode::RamDisk,
        ram_bytes: 64 << 20,
        weight: DEFAULT_WEIGHT,
        buffering: Buffering::Direct,
        little_space: LittleSpace::Refused,
        persistent: is_persistent.then(|| PersistentOptions {
            name: format!("overload-latency-{}-{round}", std::process::id()),
            key: [1; 16],
            base_id: [2; 32],
        }),
        disk_bytes: 3 * SPAN_BYTES,
        cache_dir: dir.to_path_buf(),
        pause_limit: Duration::from_secs(60),
    };
    let volume = Volume::open(&options, &host).expect("the volume opens");
    let writes = (mib << 20) / BLOCK as u64 / threads;
    let start = Instant::now();
    let all = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..threads)
            .map(|thread| {
                let volume = &*volume;
                scope.spawn(move || writer(volume, round * threads + thread, writes, think))
            })
            .collect();
        writers.into_iter().flat_map(|w| w.join().expect("it writes")).collect()
    });
    let elapsed = start.elapsed();
    if let Some(kept) = &options.persistent {
        volume.close();
        std::fs::remove_dir_all(dir.join(&kept.name)).expect("its cache can be removed");
    }
    (elapsed, all)
}

fn writer(volume: &Volume, seed: u64, writes: u64, think: Duration) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    let data = rng.bytes(1 << 20);
    (0..writes)
        .map(|_| {
            let from = rng.index(255) * BLOCK;
            let offset = rng.below(SPAN_BYTES / BLOCK as u64) * BLOCK as u64;
            let start = Instant::now();
            blocking::write(volume, offset, &data[from..from + BLOCK]).expect("the write is taken");
            let took = start.elapsed();
            if !think.is_zero() {
                std::thread::sleep(think);
            }
            u32::try_from(took.as_nanos()).unwrap_or(u32::MAX)
        })
        .collect()
}
