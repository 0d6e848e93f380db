//! Runs machines: their requests at their times, each on a write cache of its own whose disk operations are counted.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use headwater_block::{CompletionQueue, Device};
use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp};
use serde::Serialize;

use crate::disks::{self, Opened, VolumeSpec};
use crate::sizing::check::Sender;
use crate::trace::Request;

/// Operations of a disk, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Operations {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes of both.
    pub bytes: u64,
}

impl Operations {
    /// Reads and writes.
    pub fn all(self) -> u64 {
        self.reads + self.writes
    }
}

/// An engine that counts what passes to the disk below.
pub struct CountingEngine {
    below: Arc<dyn IoEngine>,
    reads: AtomicU64,
    writes: AtomicU64,
    bytes: AtomicU64,
}

impl CountingEngine {
    /// Over an engine.
    pub fn new(below: Arc<dyn IoEngine>) -> Arc<Self> {
        let zero = || AtomicU64::new(0);
        Arc::new(Self { below, reads: zero(), writes: zero(), bytes: zero() })
    }

    /// Its counts.
    pub fn operations(&self) -> Operations {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Operations { reads: load(&self.reads), writes: load(&self.writes), bytes: load(&self.bytes) }
    }
}

impl IoEngine for CountingEngine {
    fn submit(&self, op: IoOp) {
        let counter = if op.direction == Direction::Read { &self.reads } else { &self.writes };
        counter.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(op.len as u64, Ordering::Relaxed);
        self.below.submit(op);
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.below.completion_queue()
    }
}

/// A machine that runs.
pub struct Machine {
    device: Arc<dyn Device>,
    cache: Option<(Opened, Arc<CountingEngine>)>,
    requests: Vec<Request>,
}

impl Machine {
    /// A machine with a write cache of its own, and the requests that it is to send, by time.
    pub fn open(
        spec: &VolumeSpec,
        requests: Vec<Request>,
        below: &Arc<dyn IoEngine>,
        dir: &Path,
    ) -> Result<Self> {
        let engine = CountingEngine::new(Arc::clone(below));
        let opened = disks::open_volume(spec, dir, Arc::clone(&engine) as Arc<dyn IoEngine>)?;
        Ok(Self { device: Arc::clone(&opened.device), cache: Some((opened, engine)), requests })
    }

    /// A machine whose requests cost nothing.
    pub fn without_cache(requests: Vec<Request>) -> Self {
        Self { device: disks::sink(1 << 43), cache: None, requests }
    }

    fn look(&self) -> Look {
        let Some((opened, engine)) = &self.cache else { return Look::default() };
        let cache = opened.volume.as_ref().map(|volume| volume.counters()).unwrap_or_default().cache;
        Look {
            disk: engine.operations(),
            ram_bytes: cache.ram_used_bytes,
            read_ram_blocks: cache.read_ram_blocks + cache.read_packed_blocks,
            write_ram_blocks: cache.write_in_place_blocks + cache.write_new_blocks,
        }
    }
}

/// The counts of a machine at one time.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Look {
    /// Operations of its overflow disk.
    pub disk: Operations,
    /// RAM of its write cache.
    pub ram_bytes: u64,
    /// Blocks read from RAM, packed or not.
    pub read_ram_blocks: u64,
    /// Blocks written to RAM.
    pub write_ram_blocks: u64,
}

/// Looks at each machine, one at the end of each interval.
pub type Looks = Vec<Vec<Look>>;

/// How machines are run.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// So many times faster than the requests say.
    pub speed: f64,
    /// From one look to the next, in the time of the requests.
    pub interval_us: u64,
    /// The end, in the time of the requests.
    pub end_us: u64,
}

/// What came of a run.
#[derive(Debug, Default)]
pub struct Ran {
    /// Looks by machine.
    pub looks: Looks,
    /// The longest time that a request was sent late, in the time of the requests.
    pub late_us: u64,
    /// It was ended early.
    pub interrupted: bool,
}

/// Sends all requests of all machines at their times.
pub fn run(
    machines: &[Machine],
    pace: Pace,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(f64),
) -> Result<Ran> {
    // All requests by time: machine and number.
    let mut order: Vec<(u64, usize, usize)> = Vec::new();
    for (machine, requests) in machines.iter().map(|machine| &machine.requests).enumerate() {
        order.extend(requests.iter().enumerate().map(|(number, request)| (request.time_us, machine, number)));
    }
    order.sort_unstable();
    let mut ran = Ran { looks: vec![Vec::new(); machines.len()], ..Ran::default() };
    let (began, mut sender, mut next) = (Instant::now(), Sender::new(1), order.iter().peekable());
    let wait_until = |time_us: u64| {
        let due = Duration::from_secs_f64(time_us as f64 / 1e6 / pace.speed);
        let now = began.elapsed();
        if due > now + Duration::from_micros(200) {
            std::thread::sleep(due - now);
        }
        (now.saturating_sub(due).as_micros() as f64 * pace.speed) as u64
    };
    let mut look_us = pace.interval_us;
    while look_us <= pace.end_us {
        while let Some((time_us, machine, number)) = next.next_if(|(time_us, ..)| *time_us < look_us) {
            if stop.load(Ordering::Relaxed) {
                ran.interrupted = true;
                return Ok(ran);
            }
            ran.late_us = ran.late_us.max(wait_until(*time_us));
            let machine = &machines[*machine];
            sender.send(&machine.device, &machine.requests[*number]).context("a machine's request failed")?;
        }
        wait_until(look_us);
        if stop.load(Ordering::Relaxed) {
            ran.interrupted = true;
            return Ok(ran);
        }
        for (machine, looks) in machines.iter().zip(&mut ran.looks) {
            looks.push(machine.look());
        }
        progress(look_us as f64 / pace.end_us as f64);
        look_us += pace.interval_us;
    }
    Ok(ran)
}

/// Differences from look to look, each as a rate a second.
pub fn rates(looks: &[Look], interval_us: u64, of: impl Fn(&Look) -> u64) -> Vec<f64> {
    let seconds = interval_us as f64 / 1e6;
    let mut before = 0;
    looks
        .iter()
        .map(|look| {
            let now = of(look);
            (now - std::mem::replace(&mut before, now)) as f64 / seconds
        })
        .collect()
}
