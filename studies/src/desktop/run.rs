//! Sends the requests of machines at their times, those of each machine to a write cache of its own, and reads the counters of the caches at
//! intervals.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use headwater_block::Device;
use headwater_writecache::overflow::io::IoEngine;

use crate::disks::{self, Opened, VolumeSpec};
use crate::load::Latencies;
use crate::series::{Counts, Series};
use crate::sizing::check::Sender;
use crate::trace::Request;

/// A machine that runs.
pub struct Machine {
    device: Arc<dyn Device>,
    cache: Option<Opened>,
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
        let opened = disks::open_volume(spec, dir, Arc::clone(below))?;
        Ok(Self { device: Arc::clone(&opened.device), cache: Some(opened), requests })
    }

    /// A machine whose requests cost nothing.
    pub fn without_cache(requests: Vec<Request>) -> Self {
        Self { device: disks::sink(1 << 43), cache: None, requests }
    }

    fn look(&self) -> Look {
        let Some(volume) = self.cache.as_ref().and_then(|cache| cache.volume.as_ref()) else {
            return Look::default();
        };
        let counters = volume.counters();
        Look {
            counts: Counts::from(&counters),
            read_ram_blocks: counters.cache.read_ram_blocks + counters.cache.read_packed_blocks,
            write_ram_blocks: counters.cache.write_in_place_blocks + counters.cache.write_new_blocks,
        }
    }
}

/// The counts of a machine at one time.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// Requests, and operations of the overflow disk.
    pub counts: Counts,
    /// Blocks read from RAM, packed or not.
    pub read_ram_blocks: u64,
    /// Blocks written to RAM.
    pub write_ram_blocks: u64,
}

/// The looks at a machine as a series of a report. Times are those of the requests.
pub fn series(case: &str, machine: usize, looks: &[Look], interval_us: u64) -> Series {
    let mut before = Counts::default();
    let intervals = (1..).zip(looks).map(|(number, look): (u64, &Look)| {
        let since = look.counts.since(&before);
        before = look.counts;
        ((number * interval_us) as f64 / 1e6, since)
    });
    Series { variant: "model".into(), case: case.to_owned(), round: machine, intervals: intervals.collect() }
}

/// Looks at each machine, one at the end of each interval.
pub type Looks = Vec<Vec<Look>>;

/// How machines are run.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// 10 means ten times faster than the times of the requests.
    pub speed: f64,
    /// The interval between two looks at the counters, in the time of the requests.
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
    /// From the time at which each request was due until its answer. So the latency of a late request has its delay in it.
    pub latencies: Latencies,
    /// Whether `stop` ended the run early.
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
            let due = Duration::from_secs_f64(*time_us as f64 / 1e6 / pace.speed);
            ran.latencies.count_one(began.elapsed().saturating_sub(due));
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

#[cfg(test)]
mod tests {
    use headwater_recorder::Content;

    use super::*;
    use crate::trace::Kind;

    #[test]
    fn a_late_request_has_its_delay_in_its_latency() {
        let request = |time_us, offset| Request {
            time_us,
            offset,
            bytes: 4096,
            kind: Kind::Write,
            content: Content::Packs(16),
        };
        // All are due at once, and each has to wait for those before it.
        let requests = (0..200).map(|number| Request { bytes: 1 << 20, ..request(0, number << 20) });
        let machines = [Machine::without_cache(requests.chain([request(1_000_000, 0)]).collect())];
        let pace = Pace { speed: 10.0, interval_us: 2_000_000, end_us: 2_000_000 };
        let ran = run(&machines, pace, &AtomicBool::new(false), &mut |_| ()).unwrap();
        assert_eq!(ran.latencies.count(), 201);
        // Each latency begins when its request was due, so the longest is no shorter than the longest delay.
        assert!(ran.latencies.max_us() * pace.speed >= ran.late_us as f64, "{ran:?}");
        assert!(ran.late_us > 0);
    }
}
