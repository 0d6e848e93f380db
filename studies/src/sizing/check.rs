//! Checks the model with the real write cache: replays the whole trace of one desktop, at three sizes of RAM, on a
//! volume in this program.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use headwater_block::{Device, blocking};
use headwater_recorder::Content;
use headwater_volume::{Buffering, CacheMode, VolumeCounters};
use serde::Serialize;

use super::curve::Point;
use super::model::{Cache, Counts};
use crate::disks::{self, VolumeSpec};
use crate::needs::Needs;
use crate::trace::blocks::{Blocks, Step};
use crate::trace::{Kind, Request, Volume};

const MIB: u64 = 1 << 20;

/// The most bytes that are written for one size.
pub const MOST_BYTES: u64 = 16 << 30;

/// The largest deviation that is not marked.
pub const TOLERANCE: f64 = 0.15;

/// The highest rate of the replay. The model has no notion of time, and an overloaded cache has less time to
/// compress.
const BYTES_PER_S: f64 = 400.0 * MIB as f64;

/// After this many written bytes, the replay waits until the cache has done what the model has done.
const STEP_BYTES: u64 = 2 * MIB;

/// If the real cache spills nothing for this time, it will not spill what the model has spilled: that is a deviation.
/// A limit for the whole wait would also affect a busy host.
const STILL: Duration = Duration::from_secs(1);

/// The limit for the sum of all waits.
const MOST_WAIT: Duration = Duration::from_secs(60);

/// Runs the model in step with the real cache while the trace is replayed. On a busy host the cache spills segments
/// later than on an idle one, and a segment that is spilled later contains more dead blocks. The model only decides
/// when the next request is sent; it does not influence the cache otherwise.
struct Pace<'a> {
    model: Cache<'a>,
    steps: &'a [Step],
    real: &'a headwater_volume::Volume,
    /// Segments that the model has spilled, and that the real cache does not spill.
    not_spilled: u64,
    /// The sum of all waits.
    waited: Duration,
}

impl Pace<'_> {
    /// Waits until the cache has done what the model has done by this time of the trace.
    fn wait(&mut self, time_us: u64) {
        let count = self.steps.iter().take_while(|step| step.time_us <= time_us).count();
        let (now, later) = self.steps.split_at(count);
        now.iter().for_each(|step| self.model.step(step));
        self.steps = later;
        let (spilled, began) = (self.model.counts().spilled_segments, Instant::now());
        let (mut least, mut since) = (u64::MAX, began);
        loop {
            let not_spilled = spilled.saturating_sub(self.real.counters().cache.spilled_segments);
            if not_spilled < least {
                (least, since) = (not_spilled, Instant::now());
            }
            let is_still = since.elapsed() > STILL || self.waited + began.elapsed() > MOST_WAIT;
            if not_spilled > self.not_spilled && is_still {
                self.not_spilled = not_spilled;
            }
            if not_spilled <= self.not_spilled {
                self.waited += began.elapsed();
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The result for one size of RAM.
#[derive(Clone, Debug, Serialize)]
pub struct Checked {
    /// The RAM limit.
    pub ram_bytes: u64,
    /// The model's counts.
    pub model: Counts,
    /// Blocks that the real cache wrote to its overflow disk.
    pub spilled_blocks: u64,
    /// Writes of the real cache to its overflow disk.
    pub spilled_segments: u64,
}

impl Checked {
    /// The share of written blocks that stayed in RAM.
    pub fn ram_share(&self) -> f64 {
        1.0 - (self.spilled_blocks as f64 / self.model.written.max(1) as f64).min(1.0)
    }

    /// The deviation of the model's disk writes, as a share of the real ones. Up to 1 % of all writes counts as zero.
    pub fn deviation(&self) -> f64 {
        let (model, real) = (self.model.spilled as f64, self.spilled_blocks as f64);
        let nothing = self.model.written as f64 / 100.0;
        if model.max(real) <= nothing { 0.0 } else { (model - real).abs() / real.max(nothing) }
    }
}

/// Three sizes of the curve at which a desktop's writes are spilled in part, or else the next larger ones.
pub fn three_sizes(points: &[Point], desktop: usize) -> Vec<(u64, Counts)> {
    let all: Vec<(u64, Counts)> =
        points.iter().filter_map(|point| Some((point.ram_bytes, *point.alone.get(desktop)?))).collect();
    let partly = all.iter().filter(|(_, counts)| counts.spilled * 50 > counts.written).count();
    let last = partly.max(3).min(all.len());
    let middle = last / 2;
    [0, middle, last.saturating_sub(1)].into_iter().filter_map(|index| all.get(index).copied()).collect()
}

/// Generates the data of writes.
struct Contents {
    random: Vec<u8>,
    at: usize,
}

const POOL_BYTES: usize = 8 << 20;

impl Contents {
    fn new(seed: u64) -> Self {
        let mut random = vec![0; POOL_BYTES + (64 << 10)];
        crate::random::Random::new(seed).fill(&mut random);
        Self { random, at: 0 }
    }

    /// Generates data of a class: of each block, this many sixteenths are incompressible.
    fn fill(&mut self, buffer: &mut [u8], content: Content) {
        let parts = if let Content::Packs(parts) = content { usize::from(parts) } else { 16 };
        for block in buffer.chunks_mut(4096) {
            // Slightly less than a sixteenth, because the compressed format has a few bytes of overhead.
            let plain = if parts >= 16 { block.len() } else { (block.len() * parts / 16).saturating_sub(48) };
            self.at = (self.at + 4099) % POOL_BYTES;
            block[..plain].copy_from_slice(&self.random[self.at..self.at + plain]);
            block[plain..].fill(0x5a);
        }
    }
}

/// The needs of a check with these sizes.
pub fn needs(sizes: &[(u64, Counts)]) -> Needs {
    let largest = sizes.iter().map(|(ram_bytes, _)| *ram_bytes).max().unwrap_or(0);
    let spilled = sizes.iter().map(|(_, counts)| counts.spilled_segments * 2 * MIB).max().unwrap_or(0);
    Needs { ram_bytes: largest + 128 * MIB, disk_bytes: spilled + spilled / 4 + 64 * MIB }
}

/// Replays a desktop's requests on a real cache of each size.
pub fn check(
    volume: &Volume,
    blocks: &Blocks,
    sizes: &[(u64, Counts)],
    dir: &Path,
    stop: &AtomicBool,
    progress: &dyn Fn(&str, usize, usize),
) -> Result<Vec<Checked>> {
    let disk_bytes = needs(sizes).disk_bytes;
    let mut all = Vec::new();
    for (number, (ram_bytes, model)) in sizes.iter().enumerate() {
        progress("the real write cache", number, sizes.len());
        let Some(counters) = real(volume, blocks, (*ram_bytes, disk_bytes), dir, stop)? else { break };
        all.push(Checked {
            ram_bytes: *ram_bytes,
            model: *model,
            spilled_blocks: counters.cache.spilled_blocks,
            spilled_segments: counters.cache.spilled_segments,
        });
    }
    Ok(all)
}

/// Replays a desktop's requests on a real cache with these limits of RAM and disk. `None`: `stop` ended it.
pub fn real(
    volume: &Volume,
    blocks: &Blocks,
    (ram_bytes, disk_bytes): (u64, u64),
    dir: &Path,
    stop: &AtomicBool,
) -> Result<Option<VolumeCounters>> {
    let end = volume.requests.iter().map(|request| request.offset + request.bytes).max().unwrap_or(0);
    let spec = VolumeSpec {
        name: "sizing".into(),
        size_bytes: end.next_multiple_of(MIB),
        mode: CacheMode::RamDisk,
        ram_bytes,
        disk_bytes,
        buffering: Buffering::Direct,
    };
    let opened = disks::open_volume(&spec, dir, disks::engine(None, 1.0)?)?;
    let real = opened.volume.as_deref().ok_or_else(|| anyhow!("the volume has no counters"))?;
    let model = Cache::new(blocks, ram_bytes);
    let pace = Pace { model, steps: &blocks.steps, real, not_spilled: 0, waited: Duration::ZERO };
    send(&opened.device, &volume.requests, pace, stop)?;
    Ok((!stop.load(Ordering::Relaxed)).then(|| disks::settled(real)))
}

fn send(device: &Arc<dyn Device>, requests: &[Request], mut pace: Pace<'_>, stop: &AtomicBool) -> Result<()> {
    let mut sender = Sender::new(1);
    let (began, mut written, mut waited_at) = (Instant::now(), 0, 0);
    for request in requests {
        if stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        if request.kind == Kind::Write {
            written += request.bytes;
            let due = Duration::from_secs_f64(written as f64 / BYTES_PER_S);
            let early = due.saturating_sub(began.elapsed());
            if early > Duration::from_millis(2) {
                std::thread::sleep(early);
            }
        }
        sender.send(device, request)?;
        if written >= waited_at + STEP_BYTES {
            waited_at = written;
            pace.wait(request.time_us);
        }
    }
    Ok(())
}

/// Sends the requests of a trace with data of their classes, one after the other.
pub struct Sender {
    contents: Contents,
    buffer: Vec<u8>,
}

impl Sender {
    /// A sender whose data has this seed.
    pub fn new(seed: u64) -> Self {
        Self { contents: Contents::new(seed), buffer: Vec::new() }
    }

    /// Sends a request, and waits for its answer.
    pub fn send(&mut self, device: &Arc<dyn Device>, request: &Request) -> Result<()> {
        // Requests of published traces may be longer than a device accepts.
        let most = 1 << 20;
        let mut offset = request.offset;
        while offset < request.offset + request.bytes {
            let bytes = most.min(request.offset + request.bytes - offset);
            self.part(device, request, offset, bytes)
                .with_context(|| format!("a request of {bytes} bytes at {offset} failed"))?;
            offset += bytes;
        }
        Ok(())
    }

    fn part(&mut self, device: &Arc<dyn Device>, request: &Request, offset: u64, bytes: u64) -> Result<()> {
        // Some published traces have lengths that are not multiples of a sector.
        let (offset, end) = (offset / 512 * 512, (offset + bytes).next_multiple_of(512));
        let bytes = end - offset;
        self.buffer.resize(bytes as usize, 0);
        match (request.kind, request.content) {
            (Kind::Read, _) => blocking::read(&**device, offset, &mut self.buffer)?,
            // Data that equals the image is removed from the cache, like discarded data. Here the image is empty.
            (Kind::Write, Content::Equal) | (Kind::Discard, _) => {
                blocking::discard(&**device, offset, bytes)?
            }
            (Kind::Write, Content::Zero) | (Kind::WriteZeroes, _) => {
                blocking::write_zeroes(&**device, offset, bytes)?;
            }
            (Kind::Write, content) => {
                self.contents.fill(&mut self.buffer, content);
                blocking::write(&**device, offset, &self.buffer)?;
            }
        }
        Ok(())
    }
}
