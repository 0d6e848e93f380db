//! The load generator: workers that keep a number of requests in flight on a device, like Iometer.
//!
//! The loop is closed: a worker has `depth` slots, and sends a new request as soon as a slot is free, unless the line
//! has a delay before each burst. The sequence of requests depends only on the job and the seed; how many are sent
//! depends on the device.

mod answers;
mod content;
mod latencies;
mod part;
mod requests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use headwater_block::{Attempt, ByteRange, Device, Op, Outcome, Request};
use serde::Serialize;

use answers::{Answers, Wait};
use content::Source;
pub use content::{Content, Sample};
pub use latencies::Latencies;
pub use part::{Part, Tally};
pub use requests::{Direction, Item, Requests};

/// The percentiles of latency in results.
const PERCENTILES: [f64; 19] = [
    0.1, 1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 85.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.9,
    99.99,
];

/// How long a worker sleeps at most before it checks again whether the run is over, while it waits for a burst.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A kind of request, and its share of a worker's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// Length of each request.
    pub request_bytes: u32,
    /// Its share among the lines of a job, in percent.
    pub share_percent: u8,
    /// Offsets of random requests are multiples of this.
    pub alignment_bytes: u32,
    /// Percentage of reads.
    pub read_percent: u8,
    /// Percentage of requests at random offsets. The others begin where the previous request ended.
    pub random_percent: u8,
    /// The number of requests before the line is chosen again.
    pub burst: u32,
    /// The delay before each burst, in milliseconds. Requests in flight are completed meanwhile.
    pub delay_ms: u32,
}

/// The requests of one worker. Each worker has its own thread and its own sequential position.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Job {
    /// First byte of the working set.
    pub start_bytes: u64,
    /// Length of the working set, in bytes.
    pub set_bytes: u64,
    /// Kinds of requests; their shares add up to 100.
    pub lines: Vec<Line>,
    /// Requests in flight; at least 1.
    pub depth: usize,
    /// The data of writes.
    pub content: Content,
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// After this time.
    Elapsed(Duration),
    /// After this number of requests by each worker.
    Requests(u64),
}

/// The results of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcomes {
    /// Number of answered requests.
    pub requests: u64,
    /// The number of reads among them.
    pub reads: u64,
    /// From the first request to the last answer, in seconds.
    pub elapsed_s: f64,
    /// Requests per second.
    pub iops: f64,
    /// Mean latency in microseconds.
    pub mean_us: f64,
    /// 99th percentile of the latency in microseconds.
    pub p99_us: f64,
    /// Longest latency in microseconds.
    pub max_us: f64,
    /// Percentiles of the latency: percent and microseconds.
    pub percentiles_us: Vec<(f64, f64)>,
    /// Whether the run was interrupted.
    pub interrupted: bool,
    /// The result of each worker.
    #[serde(skip)]
    pub workers: Vec<Part>,
}

/// Runs one job on each worker. `stop` ends the run early, after the requests in flight.
pub fn run(
    device: &Arc<dyn Device>,
    jobs: &[Job],
    seed: u64,
    until: Until,
    stop: &AtomicBool,
) -> Result<Outcomes> {
    // Generating data takes a while, so the time begins when all workers are ready.
    let ready = Barrier::new(jobs.len());
    let parts: Vec<Result<Part>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0_u64..)
            .zip(jobs)
            .map(|(number, job)| {
                let seed = seed.wrapping_add(number << 32);
                let ready = &ready;
                scope.spawn(move || {
                    let worker = Worker::new(device, job, seed);
                    ready.wait();
                    worker?.run(until, stop)
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| Err(anyhow!("a worker thread panicked"))))
            .collect()
    });
    let workers = parts.into_iter().collect::<Result<Vec<Part>>>()?;
    let mut all = Part::default();
    workers.iter().for_each(|part| all.add(part));
    let requests = all.latencies.count();
    let elapsed_s = all.elapsed_s();
    Ok(Outcomes {
        requests,
        reads: all.of(Direction::Read).count,
        elapsed_s,
        iops: requests as f64 / elapsed_s.max(1e-9),
        mean_us: all.latencies.mean_us(),
        p99_us: all.latencies.percentile_us(99.0),
        max_us: all.latencies.max_us(),
        percentiles_us: PERCENTILES.map(|percent| (percent, all.latencies.percentile_us(percent))).to_vec(),
        interrupted: stop.load(Ordering::Relaxed),
        workers,
    })
}

/// Writes the whole working set once, with requests of 64 KiB at depth 16, like Iometer's preparation of its file.
pub fn fill(
    device: &Arc<dyn Device>,
    set_bytes: u64,
    content: Content,
    seed: u64,
    stop: &AtomicBool,
) -> Result<()> {
    const FILL_BYTES: u32 = 64 << 10;
    let line = Line {
        request_bytes: FILL_BYTES,
        share_percent: 100,
        alignment_bytes: FILL_BYTES,
        read_percent: 0,
        random_percent: 0,
        burst: 1,
        delay_ms: 0,
    };
    let job = Job { start_bytes: 0, set_bytes, lines: vec![line], depth: 16, content };
    run(device, &[job], seed, Until::Requests(set_bytes / u64::from(FILL_BYTES)), stop).map(drop)
}

/// A submitted request.
struct Slot {
    direction: Direction,
    len: u32,
    since: Instant,
}

struct Worker<'a> {
    device: &'a Arc<dyn Device>,
    job: &'a Job,
    requests: Requests,
    source: Source,
    /// One buffer for each free slot.
    buffers: Vec<Vec<u8>>,
    /// The first request of a burst, and the earliest time at which it may be sent.
    held: Option<(Item, Instant)>,
    part: Part,
    answers: Answers,
    failure: Option<anyhow::Error>,
}

impl<'a> Worker<'a> {
    fn new(device: &'a Arc<dyn Device>, job: &'a Job, seed: u64) -> Result<Self> {
        let longest = job.lines.iter().map(|line| line.request_bytes as usize).max().unwrap_or(0);
        Ok(Self {
            device,
            job,
            requests: Requests::new(job.clone(), seed),
            source: Source::new(job.content, longest, seed),
            buffers: vec![Vec::with_capacity(longest); job.depth],
            held: None,
            part: Part::default(),
            answers: Answers::new(device.as_ref())?,
            failure: None,
        })
    }

    fn run(mut self, until: Until, stop: &AtomicBool) -> Result<Part> {
        let started = Instant::now();
        let mut sent = 0_u64;
        loop {
            let mut is_over = stop.load(Ordering::Relaxed)
                || match until {
                    Until::Elapsed(time) => started.elapsed() >= time,
                    Until::Requests(_) => false,
                };
            // Requests with a delay start together, so answers are taken after at most `depth` requests.
            for _ in 0..self.job.depth {
                is_over |= self.failure.is_some() || matches!(until, Until::Requests(count) if sent >= count);
                if is_over || self.buffers.is_empty() {
                    break;
                }
                let Some(item) = self.next_item() else { break };
                sent += 1;
                if let Err(error) = self.send(item) {
                    self.failure = Some(error);
                }
            }
            let in_flight = self.job.depth - self.buffers.len();
            if is_over && in_flight == 0 {
                break;
            }
            let wait = match self.held {
                _ if in_flight > 0 && (is_over || self.buffers.is_empty()) => Wait::ForAnswer,
                Some((_, at)) if !is_over => Wait::Until(at.min(Instant::now() + STOP_CHECK_INTERVAL)),
                _ => Wait::No,
            };
            for (slot, outcome) in self.answers.take(wait)? {
                self.answered(&slot, outcome);
            }
        }
        match self.failure {
            Some(error) => Err(error),
            None => {
                self.part.set_elapsed(started.elapsed());
                Ok(self.part)
            }
        }
    }

    fn answered(&mut self, slot: &Slot, outcome: Outcome) {
        self.buffers.push(outcome.buffer);
        match outcome.result {
            Ok(()) => self.count(slot),
            Err(error) => self.failure = Some(anyhow!("a request failed: {error}")),
        }
    }

    /// The next request, unless it must wait for its burst.
    fn next_item(&mut self) -> Option<Item> {
        let (item, at) = match self.held.take() {
            Some(held) => held,
            None => {
                let item = self.requests.draw();
                if item.delay_ms == 0 {
                    return Some(item);
                }
                (item, Instant::now() + Duration::from_millis(item.delay_ms.into()))
            }
        };
        if Instant::now() >= at {
            return Some(item);
        }
        self.held = Some((item, at));
        None
    }

    /// Executes a request immediately, or submits it. A buffer must be free.
    fn send(&mut self, item: Item) -> Result<()> {
        let Item { direction, offset, len, .. } = item;
        let mut buffer = self.buffers.pop().unwrap_or_default();
        let Some(range) = ByteRange::new(offset, u64::from(len)) else { bail!("a request ends beyond 2^64") };
        buffer.resize(len as usize, 0);
        if direction == Direction::Write {
            self.source.fill(&mut buffer);
        }
        let slot = Slot { direction, len, since: Instant::now() };
        let op = match direction {
            Direction::Read => Op::Read { range, into: &mut buffer },
            Direction::Write => Op::Write { range, from: &buffer, fua: false },
        };
        match self.device.try_now(op) {
            Ok(Attempt::Done) => {
                self.count(&slot);
                self.buffers.push(buffer);
            }
            Ok(Attempt::MustWait) => {
                let request = match direction {
                    Direction::Read => Request::Read { range, buffer },
                    Direction::Write => Request::Write { range, buffer, fua: false },
                };
                self.device.submit(request, self.answers.completion(slot));
            }
            Err(error) => {
                self.buffers.push(buffer);
                return Err(anyhow!("a request failed: {error}"));
            }
        }
        Ok(())
    }

    fn count(&mut self, slot: &Slot) {
        self.part.count_one(slot.direction, slot.len, slot.since.elapsed());
    }
}

#[cfg(test)]
mod tests;
