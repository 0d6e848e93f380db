//! What the cases share: volumes, clocks, lines of the report.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
    blocking,
};
use headwater_volume::{Buffering, CacheMode, DEFAULT_WEIGHT, Volume, VolumeOptions};
use headwater_writecache::Host;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
pub const BLOCK: u64 = 4096;

/// An empty disk of 64 GiB, without memory of its own.
struct Empty;

fn read_only() -> IoError {
    IoError::new(IoErrorKind::ReadOnly, "the base is never written")
}

impl Device for Empty {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: 64 * GIB,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: true,
            volatile_cache: false,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { into, .. } => into.fill(0),
            Op::Flush => {}
            _ => return Err(read_only()),
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { mut buffer, .. } => {
                buffer.fill(0);
                done.complete(Ok(()), buffer);
            }
            Request::Prefetch { .. } | Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Hole }])
    }
}

/// A volume over that.
pub fn options(mode: CacheMode, ram_bytes: u64, disk_bytes: u64, dir: &Path) -> VolumeOptions {
    VolumeOptions {
        base: Arc::new(Empty),
        mode,
        ram_bytes,
        weight: DEFAULT_WEIGHT,
        buffering: Buffering::Direct,
        disk_bytes,
        cache_dir: dir.to_path_buf(),
        pause_limit: Duration::from_secs(60),
        persistent: None,
    }
}

pub fn open(options: &VolumeOptions, host: &Host) -> Arc<Volume> {
    Volume::open(options, host).expect("the volume opens")
}

pub fn host() -> Host {
    Host::start(u64::MAX).expect("the host starts")
}

/// Writes a block, on this thread where there is room.
pub fn write(volume: &Volume, block: u64, data: &[u8]) {
    let range = ByteRange::new(block * BLOCK, BLOCK).expect("in range");
    match volume.try_now(Op::Write { range, from: data, fua: false }) {
        Ok(Attempt::Done) => {}
        _ => blocking::write(volume, block * BLOCK, data).expect("the write is taken"),
    }
}

/// Reads a block, wherever it is.
pub fn read(volume: &Volume, block: u64, into: &mut [u8]) {
    let range = ByteRange::new(block * BLOCK, BLOCK).expect("in range");
    match volume.try_now(Op::Read { range, into }) {
        Ok(Attempt::Done) => {}
        _ => blocking::read(volume, block * BLOCK, into).expect("it reads"),
    }
}

/// Processor time of this process so far, in hundredths of a second.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("the kernel counts it");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("a name").split_whitespace().collect();
    let ticks = |at: usize| fields[at].parse::<u64>().expect("a number");
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

/// Memory of this process, by the system's count.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the kernel counts it");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the kernel counts it");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * KIB
}

/// What so many operations cost, each.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    pub ns: f64,
    pub processor_ns: f64,
}

pub fn cost(operations: u64, run: impl FnOnce()) -> Cost {
    let (start, before) = (Instant::now(), processor_time());
    run();
    let each = |time: Duration| time.as_nanos() as f64 / operations as f64;
    Cost { ns: each(start.elapsed()), processor_ns: each(processor_time() - before) }
}

/// One line of the report, with a goal.
pub fn at_most(what: &str, value: f64, unit: &str, goal: f64) {
    let verdict = if value <= goal { "reached" } else { "MISSED" };
    println!("{what:<64} {value:>10.2} {unit:<6} goal: at most {goal:.2}, {verdict}");
}

/// The same for what should be large.
pub fn at_least(what: &str, value: f64, unit: &str, goal: f64) {
    let verdict = if value >= goal { "reached" } else { "MISSED" };
    println!("{what:<64} {value:>10.2} {unit:<6} goal: at least {goal:.2}, {verdict}");
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
