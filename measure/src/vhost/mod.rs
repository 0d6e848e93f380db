//! A client of vhost-user-blk disks that sends the same load as fio does to other devices.
//!
//! It polls the used ring and never sleeps, so that the server is the bottleneck. Buffers contain random data, and
//! each write changes a part of its buffer, so that data is neither equal to existing data nor compressible. Read
//! data is not examined.

mod latencies;
mod memory;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use virtio_driver::{QueueNotifier, VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};

use crate::fio::{Job, Measured, Requests};
use latencies::Latencies;
use memory::{Buffers, Direction, Request};

/// Entries of the queue; a request uses three.
const QUEUE_ENTRIES: u16 = 256;

/// The most requests in flight that the queue can hold.
pub const MOST_DEPTH: u32 = QUEUE_ENTRIES as u32 / 3;

/// The block device features that are negotiated: multi-queue, flush.
const BLOCK_FEATURES: u64 = 1 << 12 | 1 << 9;

const BLOCK_BYTES: usize = 4096;
const SECTOR_BYTES: usize = 512;
const FILL_BYTES: usize = 256 << 10;

/// A request without an answer in this time counts as lost.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A connected disk with one queue.
pub struct Client {
    queue: VirtioBlkQueue<'static, Ticket>,
    notifier: Box<dyn QueueNotifier>,
    transport: Box<VirtioBlkTransport>,
}

/// The state of a request in flight.
#[derive(Clone, Copy)]
struct Ticket {
    slot: usize,
    direction: Direction,
    since: Instant,
}

impl Client {
    /// Connects to the server.
    pub fn connect(socket: &Path) -> Result<Self> {
        let path = socket.to_str().context("the socket's path is not valid UTF-8")?;
        let features = (VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX).bits();
        let transport = VhostUser::new(path, features | BLOCK_FEATURES);
        let transport = transport.map_err(|e| anyhow::anyhow!("cannot connect to {path}: {e}"))?;
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let mut queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, QUEUE_ENTRIES)?;
        let queue = queues.pop().context("no queue")?;
        let notifier = transport.get_submission_notifier(0);
        Ok(Self { queue, notifier, transport })
    }

    /// Runs a job on the first `set_bytes` of the disk.
    pub fn run(&mut self, set_bytes: u64, job: Job, seed: usize) -> Result<Measured> {
        self.carry_out(Work::new(set_bytes, job, seed)?)
    }

    /// Reads one block.
    pub fn read_once(&mut self) -> Result<()> {
        self.carry_out(Work::one_read()).map(drop)
    }

    fn carry_out(&mut self, mut work: Work) -> Result<Measured> {
        let mut buffers = Buffers::share(&mut *self.transport, work.depth, work.bytes, work.random.next())?;
        self.queue.set_used_notif_enabled(false);
        let started = Instant::now();
        let deadline = work.runs_for.map(|time| started + time);
        let mut in_flight = 0;
        let mut now = started;
        for slot in 0..work.depth {
            in_flight += usize::from(self.submit(&mut work, &mut buffers, slot, now)?);
        }
        self.kick()?;
        let mut last = now;
        let mut done: Vec<Ticket> = Vec::with_capacity(work.depth);
        while in_flight > 0 {
            for completion in self.queue.completions() {
                if completion.ret != 0 {
                    bail!("a request failed with error {}", -completion.ret);
                }
                done.push(completion.context);
            }
            now = Instant::now();
            if done.is_empty() {
                if now.duration_since(last) > REQUEST_TIMEOUT {
                    bail!("the server has not answered for {} s", REQUEST_TIMEOUT.as_secs());
                }
                std::hint::spin_loop();
                continue;
            }
            last = now;
            if deadline.is_some_and(|deadline| now >= deadline) {
                work.is_over = true;
            }
            for ticket in done.drain(..) {
                work.count(ticket, now);
                in_flight -= 1;
                in_flight += usize::from(self.submit(&mut work, &mut buffers, ticket.slot, now)?);
            }
            self.kick()?;
        }
        work.measured(now - started)
    }

    /// Submits the next request; returns `false` if the job has no more requests.
    fn submit(&mut self, work: &mut Work, buffers: &mut Buffers, slot: usize, now: Instant) -> Result<bool> {
        let Some((direction, at)) = work.next() else { return Ok(false) };
        let ticket = Ticket { slot, direction, since: now };
        let request = Request { slot, direction, at, stamp: work.random.next() };
        buffers.queue(&mut self.queue, request, ticket)?;
        Ok(true)
    }

    fn kick(&mut self) -> Result<()> {
        if self.queue.avail_notif_needed() {
            self.notifier.notify().context("cannot kick the server")?;
        }
        Ok(())
    }
}

/// The state of a job: the requests that are left, and the latencies so far.
struct Work {
    set_blocks: u64,
    depth: usize,
    /// Length of a request, in bytes.
    bytes: usize,
    /// The number of sectors at which a random request may begin, within the length of one request.
    shifts: u64,
    kind: WorkKind,
    runs_for: Option<Duration>,
    is_over: bool,
    random: Random,
    /// Position of the next sequential request, in units of `bytes / shifts`.
    next_part: u64,
    left: u64,
    reads: Latencies,
    writes: Latencies,
}

#[derive(Clone, Copy)]
enum WorkKind {
    Mix { percentage_random: u64 },
    Sequential,
    Random,
    Read,
}

impl Work {
    fn new(set_bytes: u64, job: Job, seed: usize) -> Result<Self> {
        let (kind, depth, bytes, runs_for, left) = match job {
            Job::Mix { requests: Requests::Sizes, .. } => {
                bail!("requests of several sizes are measured over NBD only")
            }
            Job::Mix { percentage_random, depth, seconds, .. } => (
                WorkKind::Mix { percentage_random: percentage_random.into() },
                depth.min(MOST_DEPTH),
                BLOCK_BYTES,
                Some(Duration::from_secs(seconds.into())),
                u64::MAX,
            ),
            Job::Fill => (WorkKind::Sequential, 8, FILL_BYTES, None, set_bytes / FILL_BYTES as u64),
            Job::RandomWrites { total_bytes } => {
                (WorkKind::Random, 16, BLOCK_BYTES, None, total_bytes / BLOCK_BYTES as u64)
            }
            Job::Large { .. } => bail!("requests of 1 MiB are measured over NBD only"),
        };
        let is_shifted = matches!(job, Job::Mix { requests: Requests::Sectors, .. });
        let shifts = if is_shifted { (bytes / SECTOR_BYTES) as u64 } else { 1 };
        // If requests may be unaligned, the last one must still end within the set.
        let set_blocks = set_bytes / bytes as u64 - u64::from(is_shifted);
        if set_blocks == 0 {
            bail!("a working set of {set_bytes} bytes is smaller than a request");
        }
        Ok(Self {
            set_blocks,
            depth: usize::try_from(depth)?,
            bytes,
            shifts,
            kind,
            runs_for,
            is_over: false,
            random: Random::new(seed),
            next_part: 0,
            left,
            reads: Latencies::default(),
            writes: Latencies::default(),
        })
    }

    fn one_read() -> Self {
        Self {
            set_blocks: 1,
            depth: 1,
            bytes: BLOCK_BYTES,
            shifts: 1,
            kind: WorkKind::Read,
            runs_for: None,
            is_over: false,
            random: Random::new(0),
            next_part: 0,
            left: 1,
            reads: Latencies::default(),
            writes: Latencies::default(),
        }
    }

    fn next(&mut self) -> Option<(Direction, u64)> {
        if self.is_over || self.left == 0 {
            return None;
        }
        self.left -= 1;
        let (random_share, write_share) = match self.kind {
            WorkKind::Mix { percentage_random } => (percentage_random, 80),
            WorkKind::Sequential => (0, 100),
            WorkKind::Random => (100, 100),
            WorkKind::Read => (0, 0),
        };
        let is_random = self.random.below(100) < random_share;
        // In units of `bytes / shifts`.
        let end = self.set_blocks * self.shifts;
        let part = if is_random { self.random.below(end) } else { self.next_part };
        self.next_part = (part + self.shifts) % end;
        let is_write = self.random.below(100) < write_share;
        let direction = if is_write { Direction::Write } else { Direction::Read };
        Some((direction, part * (self.bytes as u64 / self.shifts)))
    }

    fn count(&mut self, ticket: Ticket, now: Instant) {
        let took = now.duration_since(ticket.since);
        match ticket.direction {
            Direction::Read => self.reads.add(took),
            Direction::Write => self.writes.add(took),
        }
    }

    fn measured(&self, took: Duration) -> Result<Measured> {
        let operations = self.reads.count() + self.writes.count();
        let count = |n: u64| u32::try_from(n).map(f64::from).context("more operations than can be counted");
        if operations == 0 {
            bail!("no operation was performed");
        }
        Ok(Measured {
            iops: count(operations)? / took.as_secs_f64(),
            operations,
            written_bytes: self.writes.count() * self.bytes as u64,
            seconds: took.as_secs_f64(),
            write_mean_us: self.writes.mean_us(),
            write_p99_us: self.writes.p99_us(),
            read_p99_us: self.reads.p99_us(),
        })
    }
}

/// A small random number generator (xorshift64*): equal seeds give equal offsets.
struct Random(u64);

impl Random {
    fn new(seed: usize) -> Self {
        let seed = u64::try_from(seed).unwrap_or(0).wrapping_add(1);
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`, from the high bits.
    fn below(&mut self, end: u64) -> u64 {
        let product = u128::from(self.next()) * u128::from(end);
        u64::try_from(product >> 64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_is_the_one_of_the_studies() {
        for (requests, unit) in [(Requests::Blocks, 4096), (Requests::Sectors, 512)] {
            let job = Job::Mix { requests, percentage_random: 80, depth: 16, seconds: 1 };
            let mut work = Work::new(1 << 30, job, 3).unwrap();
            let (mut writes, mut sequential, mut whole, mut before) = (0, 0, 0, u64::MAX);
            for _ in 0..100_000 {
                let (direction, at) = work.next().unwrap();
                assert!(at % unit == 0 && at <= (1 << 30) - 4096);
                writes += u32::from(direction == Direction::Write);
                sequential += u32::from(before.checked_add(4096) == Some(at));
                whole += u32::from(at % 4096 == 0);
                before = at;
            }
            assert!((79_000..81_000).contains(&writes), "{writes}");
            assert!((19_000..21_000).contains(&sequential), "{sequential}");
            let expected = if requests == Requests::Blocks { 100_000..100_001 } else { 11_000..14_000 };
            assert!(expected.contains(&whole), "{whole}");
            work.is_over = true;
            assert!(work.next().is_none());
        }
    }

    #[test]
    fn a_fill_writes_each_block_once_in_order() {
        let mut work = Work::new(4 << 20, Job::Fill, 0).unwrap();
        let all: Vec<_> = std::iter::from_fn(|| work.next()).collect();
        let expected: Vec<_> = (0..16).map(|n| (Direction::Write, n * (256 << 10))).collect();
        assert_eq!(all, expected);
        assert!(Work::new(100, Job::Fill, 0).is_err());
    }
}
