//! Replays the requests of machines at their times, each machine to its own write cache, and samples the counters of
//! the caches at intervals.

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

/// A machine that is replayed.
pub struct Machine {
    device: Arc<dyn Device>,
    cache: Option<Opened>,
    requests: Vec<Request>,
}

impl Machine {
    /// A machine with its own write cache and its requests, sorted by time.
    pub fn open(
        spec: &VolumeSpec,
        requests: Vec<Request>,
        below: &Arc<dyn IoEngine>,
        dir: &Path,
    ) -> Result<Self> {
        let opened = disks::open_volume(spec, dir, Arc::clone(below))?;
        Ok(Self { device: Arc::clone(&opened.device), cache: Some(opened), requests })
    }

    fn sample(&self) -> CounterSample {
        let Some(volume) = self.cache.as_ref().and_then(|cache| cache.volume.as_ref()) else {
            return CounterSample::default();
        };
        let counters = volume.counters();
        CounterSample {
            counts: Counts::from(&counters),
            read_ram_blocks: counters.cache.read_ram_blocks + counters.cache.read_packed_blocks,
            write_ram_blocks: counters.cache.write_in_place_blocks + counters.cache.write_new_blocks,
        }
    }
}

/// A sample of a machine's counters.
#[derive(Clone, Debug, Default)]
pub struct CounterSample {
    /// Counts of requests, and of operations of the overflow disk.
    pub counts: Counts,
    /// Blocks that were read from RAM, compressed or not.
    pub read_ram_blocks: u64,
    /// Blocks that were written to RAM.
    pub write_ram_blocks: u64,
}

/// The samples of a machine as a series of a report. Times are model times.
pub fn series(case: &str, machine: usize, samples: &[CounterSample], interval_us: u64) -> Series {
    let mut before = Counts::default();
    let intervals = (1..).zip(samples).map(|(number, sample): (u64, &CounterSample)| {
        let since = sample.counts.since(&before);
        before = sample.counts;
        ((number * interval_us) as f64 / 1e6, since)
    });
    Series { variant: "model".into(), case: case.to_owned(), round: machine, intervals: intervals.collect() }
}

/// The samples of each machine, one at the end of each interval.
pub type CounterSamples = Vec<Vec<CounterSample>>;

/// The timing of a replay. *Model time* is the time scale of the requests.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// The speed of model time: 10 means ten times real time.
    pub speed: f64,
    /// The interval between two samples of the counters, in model time.
    pub interval_us: u64,
    /// The end, in model time.
    pub end_us: u64,
}

/// The result of a replay.
#[derive(Debug, Default)]
pub struct Ran {
    /// The samples, by machine.
    pub samples: CounterSamples,
    /// The longest delay between the time of a request and its submission, in model time.
    pub late_us: u64,
    /// Latencies from the time at which a request was due to its answer. So the latency of a late request includes
    /// its delay.
    pub latencies: Latencies,
    /// Whether `stop` ended the run early.
    pub interrupted: bool,
}

/// Replays all requests of all machines at their times.
pub fn run(
    machines: &[Machine],
    pace: Pace,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(f64),
) -> Result<Ran> {
    // All requests sorted by time: time, machine, number.
    let mut order: Vec<(u64, usize, usize)> = Vec::new();
    for (machine, requests) in machines.iter().map(|machine| &machine.requests).enumerate() {
        order.extend(requests.iter().enumerate().map(|(number, request)| (request.time_us, machine, number)));
    }
    order.sort_unstable();
    let mut ran = Ran { samples: vec![Vec::new(); machines.len()], ..Ran::default() };
    let (began, mut sender, mut next) = (Instant::now(), Sender::new(1), order.iter().peekable());
    let wait_until = |time_us: u64| {
        let due = Duration::from_secs_f64(time_us as f64 / 1e6 / pace.speed);
        let now = began.elapsed();
        if due > now + Duration::from_micros(200) {
            std::thread::sleep(due - now);
        }
        (now.saturating_sub(due).as_micros() as f64 * pace.speed) as u64
    };
    let mut sample_us = pace.interval_us;
    while sample_us <= pace.end_us {
        while let Some((time_us, machine, number)) = next.next_if(|(time_us, ..)| *time_us < sample_us) {
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
        wait_until(sample_us);
        if stop.load(Ordering::Relaxed) {
            ran.interrupted = true;
            return Ok(ran);
        }
        for (machine, samples) in machines.iter().zip(&mut ran.samples) {
            samples.push(machine.sample());
        }
        progress(sample_us as f64 / pace.end_us as f64);
        sample_us += pace.interval_us;
    }
    Ok(ran)
}

/// The differences between successive samples, as rates per second.
pub fn rates(samples: &[CounterSample], interval_us: u64, of: impl Fn(&CounterSample) -> u64) -> Vec<f64> {
    let seconds = interval_us as f64 / 1e6;
    let mut before = 0;
    samples
        .iter()
        .map(|sample| {
            let now = of(sample);
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
        // All requests are due at once, and each must wait for those before it.
        let requests = (0..200).map(|number| Request { bytes: 1 << 20, ..request(0, number << 20) });
        let requests = requests.chain([request(1_000_000, 0)]).collect();
        let machines = [Machine { device: disks::sink(1 << 43), cache: None, requests }];
        let pace = Pace { speed: 10.0, interval_us: 2_000_000, end_us: 2_000_000 };
        let ran = run(&machines, pace, &AtomicBool::new(false), &mut |_| ()).unwrap();
        assert_eq!(ran.latencies.count(), 201);
        // Each latency begins at the time at which the request was due, so the longest latency is at least the
        // longest delay.
        assert!(ran.latencies.max_us() * pace.speed >= ran.late_us as f64, "{ran:?}");
        assert!(ran.late_us > 0);
    }
}
