//! Evaluates a trace with the model: the curve over sizes of RAM, the needs of each desktop, and of desktops that
//! share RAM.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde::Serialize;

use super::model::{Cache, Counts, replay};
use crate::trace::Trace;
use crate::trace::blocks::Blocks;

const MIB: u64 = 1 << 20;
const BLOCK_BYTES: u64 = 4096;

/// The smallest RAM of a cache, in bytes.
const LEAST_BYTES: u64 = 16 * MIB;

/// The number of times at which the live data is sampled.
const SAMPLES: usize = 400;

/// The share of writes that counts as nearly all.
pub const NEARLY_ALL: f64 = 0.99;

/// Numbers of desktops that share a pool.
const POOLS: [usize; 4] = [1, 10, 100, 500];

/// The number of random choices of a pool's desktops and starting times.
const DRAWS: usize = 200;

/// A RAM limit, and the counts of each desktop with it.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// The limit for each desktop.
    pub ram_bytes: u64,
    /// The counts of each desktop with its own cache.
    pub alone: Vec<Counts>,
    /// The counts of all desktops in one cache with the sum of the limits. `None`: there is only one desktop.
    pub pooled: Option<Counts>,
}

/// The needs of a desktop.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Desktop {
    /// Its name in the trace.
    pub name: String,
    /// The number of requests.
    pub requests: usize,
    /// Bytes written.
    pub written_bytes: u64,
    /// The most live data in the cache at one time, in bytes.
    pub peak_bytes: u64,
    /// The smallest RAM limit with which nearly all writes stay in RAM.
    pub nearly_all_bytes: u64,
    /// The smallest RAM limit with which nothing is spilled.
    pub all_bytes: u64,
    /// Live bytes over time.
    pub live_bytes: Vec<u64>,
}

/// The needs of desktops that share RAM.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Pool {
    /// The number of desktops.
    pub desktops: usize,
    /// The most live bytes at one time, per desktop: the median of the random choices.
    pub live_bytes: u64,
    /// The 95th percentile of the random choices.
    pub p95_live_bytes: u64,
}

/// The results of the model.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Analysis {
    /// The curve, beginning with the smallest limit.
    pub points: Vec<Point>,
    /// The desktops of the trace.
    pub desktops: Vec<Desktop>,
    /// Pools of these desktops.
    pub pools: Vec<Pool>,
    /// Length of the trace.
    pub duration_s: f64,
    /// The desktops of a pool start at random times within this period.
    pub spread_s: f64,
    /// The 95th percentile over the desktops of `nearly_all_bytes`, rounded up to 16 MiB.
    pub advised_bytes: u64,
    /// Overflow disk that a desktop may need, in bytes.
    pub disk_bytes: u64,
    /// Whether the analysis was interrupted.
    pub interrupted: bool,
}

/// The sizes of the curve: 16, 24, 32, 48 MiB and so on, up to the first that is at least twice the peak.
fn sizes(peak_bytes: u64) -> Vec<u64> {
    let steps = (0..).flat_map(|power| [LEAST_BYTES << power, (LEAST_BYTES + LEAST_BYTES / 2) << power]);
    let mut sizes = Vec::new();
    for size in steps {
        sizes.push(size);
        if size >= 2 * peak_bytes && sizes.len() >= 5 {
            return sizes;
        }
    }
    sizes
}

/// Live bytes over time with unlimited RAM.
fn live(blocks: &Blocks, duration_us: u64) -> Vec<u64> {
    let mut cache = Cache::new(blocks, u64::MAX / 4);
    let mut steps = blocks.steps.iter().peekable();
    let sampled_at = |number: usize| duration_us / SAMPLES as u64 * (number as u64 + 1);
    (0..SAMPLES)
        .map(|number| {
            let is_last = number + 1 == SAMPLES;
            while let Some(step) = steps.next_if(|step| is_last || step.time_us <= sampled_at(number)) {
                cache.step(step);
            }
            cache.live() * BLOCK_BYTES
        })
        .collect()
}

/// The smallest limit, in steps of 2 MiB, with which enough writes stay in RAM. It assumes that more RAM is never
/// worse.
fn least(blocks: &Blocks, peak_bytes: u64, is_enough: impl Fn(&Counts) -> bool) -> u64 {
    let (mut low, mut high) = (LEAST_BYTES / 2 / MIB, (4 * peak_bytes + 4 * LEAST_BYTES) / 2 / MIB);
    while low < high {
        let middle = u64::midpoint(low, high);
        if is_enough(&replay(blocks, middle * 2 * MIB)) { high = middle } else { low = middle + 1 }
    }
    low * 2 * MIB
}

/// The nearest-rank percentile of the values.
pub fn percentile(values: &mut [u64], percent: usize) -> u64 {
    values.sort_unstable();
    let rank = (values.len() * percent).div_ceil(100).max(1);
    values.get(rank - 1).copied().unwrap_or(0)
}

/// Pools of desktops that are drawn with replacement, each started at a random time within `spread` samples.
fn pools(desktops: &[Desktop], spread: usize, seed: u64) -> Vec<Pool> {
    let mut random = crate::random::Random::new(seed);
    let pool = |count: usize| {
        let mut peaks: Vec<u64> = (0..DRAWS)
            .map(|_| {
                let mut sums = vec![0_u64; SAMPLES + spread];
                for _ in 0..count {
                    let desktop = &desktops[random.below(desktops.len() as u64) as usize];
                    let begin = random.below(spread as u64 + 1) as usize;
                    // After its end, a desktop's live data stays.
                    let last = desktop.live_bytes.last().copied().unwrap_or(0);
                    let lives = desktop.live_bytes.iter().copied().chain(std::iter::repeat(last));
                    sums.iter_mut().skip(begin).zip(lives).for_each(|(sum, live)| *sum += live);
                }
                sums.into_iter().max().unwrap_or(0) / count as u64
            })
            .collect();
        let p95_live_bytes = percentile(&mut peaks, 95);
        Pool { desktops: count, live_bytes: percentile(&mut peaks, 50), p95_live_bytes }
    };
    POOLS.into_iter().map(pool).collect()
}

/// Executes numbered work items on all processors, and reports progress.
fn on_all_processors<T: Send>(
    count: usize,
    stop: &AtomicBool,
    work: impl Fn(usize) -> T + Sync,
    progress: &(dyn Fn(usize) + Sync),
) -> Vec<Option<T>> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new((0..count).map(|_| None).collect::<Vec<_>>()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count || stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let result = work(number);
                    done.lock().unwrap_or_else(PoisonError::into_inner)[number] = Some(result);
                    progress(number + 1);
                }
            });
        }
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Evaluates a trace with the model. `progress` gets the kind of work, the finished items and the number of items.
pub fn analyse(
    trace: &Trace,
    disks: &[Blocks],
    seed: u64,
    stop: &AtomicBool,
    progress: &(dyn Fn(&str, usize, usize) + Sync),
) -> Analysis {
    let duration_us = trace.duration_us();
    let desktop = |number: usize| {
        let (volume, blocks) = (&trace.volumes[number], &disks[number]);
        let live_bytes = live(blocks, duration_us);
        let peak_bytes = replay(blocks, u64::MAX / 4).peak_live * BLOCK_BYTES;
        Desktop {
            name: volume.name.clone(),
            requests: volume.requests.len(),
            written_bytes: blocks.written_bytes,
            peak_bytes,
            nearly_all_bytes: least(blocks, peak_bytes, |counts| counts.ram_share() >= NEARLY_ALL),
            all_bytes: least(blocks, peak_bytes, |counts| counts.spilled == 0),
            live_bytes,
        }
    };
    let count = disks.len();
    let desktops =
        on_all_processors(count, stop, desktop, &|done| progress("needs of desktops", done, count));
    let desktops: Vec<Desktop> = desktops.into_iter().flatten().collect();
    let mut analysis = Analysis { duration_s: duration_us as f64 / 1e6, ..Analysis::default() };
    if desktops.len() < count {
        return Analysis { desktops, interrupted: true, ..analysis };
    }
    let peak_bytes = desktops.iter().map(|desktop| desktop.peak_bytes).max().unwrap_or(0);
    let sizes = sizes(peak_bytes);
    let pooled = (count > 1).then(|| Blocks::together(disks));
    // One more item for the pool.
    let of_size = disks.len() + usize::from(pooled.is_some());
    let counts = |number: usize| {
        let ram_bytes = sizes[number / of_size];
        match disks.get(number % of_size) {
            Some(blocks) => replay(blocks, ram_bytes),
            None => pooled.as_ref().map_or_else(Counts::default, |all| replay(all, ram_bytes * count as u64)),
        }
    };
    let all = sizes.len() * of_size;
    let counts = on_all_processors(all, stop, counts, &|done| progress("the curve", done, all));
    for (of_size, ram_bytes) in counts.chunks(of_size).zip(&sizes) {
        let mut alone: Vec<Counts> = of_size.iter().copied().flatten().collect();
        if alone.len() < of_size.len() {
            analysis.interrupted = true;
            break;
        }
        let pooled = if alone.len() > count { alone.pop() } else { None };
        analysis.points.push(Point { ram_bytes: *ram_bytes, alone, pooled });
    }
    let spread = SAMPLES / 2;
    let spread_us = (duration_us / 2).min(3_600_000_000);
    let spread = spread.min((spread_us * SAMPLES as u64 / duration_us.max(1)) as usize);
    analysis.spread_s = spread_us as f64 / 1e6;
    analysis.pools = pools(&desktops, spread, seed);
    let mut needs: Vec<u64> = desktops.iter().map(|desktop| desktop.nearly_all_bytes).collect();
    analysis.advised_bytes = percentile(&mut needs, 95).next_multiple_of(LEAST_BYTES);
    // The peak of live data, a quarter more for dead blocks in between, and some space for moving segments.
    analysis.disk_bytes = (peak_bytes + peak_bytes / 4 + 64 * MIB).next_multiple_of(64 * MIB);
    analysis.desktops = desktops;
    analysis
}

#[cfg(test)]
mod tests {
    use headwater_recorder::Content;

    use super::*;
    use crate::trace::{Kind, Request, Volume};

    /// A desktop that writes this many MiB once, at 1 MiB per second.
    fn volume(name: &str, mib: u64) -> Volume {
        let requests = (0..mib).map(|number| Request {
            time_us: number * 1_000_000,
            offset: number * MIB,
            bytes: MIB,
            kind: Kind::Write,
            content: Content::Unknown,
        });
        Volume { name: name.into(), requests: requests.collect() }
    }

    fn analysis(volumes: Vec<Volume>) -> Analysis {
        let disks: Vec<Blocks> = volumes.iter().map(Blocks::of).collect();
        let trace = Trace { volumes, ..Trace::default() };
        analyse(&trace, &disks, 1, &AtomicBool::new(false), &|_, _, _| ())
    }

    #[test]
    fn the_curve_goes_from_16_mib_to_twice_the_peak_and_does_not_fall() {
        let found = analysis(vec![volume("one", 100)]);
        let sizes: Vec<u64> = found.points.iter().map(|point| point.ram_bytes / MIB).collect();
        assert_eq!(sizes, [16, 24, 32, 48, 64, 96, 128, 192, 256]);
        let shares: Vec<f64> = found.points.iter().map(|point| point.alone[0].ram_share()).collect();
        assert!(shares.is_sorted() && shares[0] < 0.2 && shares[8] == 1.0, "{shares:?}");
        let desktop = &found.desktops[0];
        assert_eq!((desktop.peak_bytes, desktop.requests), (100 * MIB, 100));
        assert_eq!(desktop.live_bytes.last(), Some(&(100 * MIB)));
        // The data is written once. RAM above 70 % is spilled ahead of need, so keeping all data needs 100/70 of it,
        // and the cache's overhead.
        assert!((142..170).contains(&(desktop.all_bytes / MIB)), "{}", desktop.all_bytes / MIB);
        assert_eq!(replay(&Blocks::of(&volume("one", 100)), desktop.all_bytes).spilled, 0);
        assert!(replay(&Blocks::of(&volume("one", 100)), desktop.all_bytes - 2 * MIB).spilled > 0);
    }

    #[test]
    fn a_pool_needs_the_mean_of_its_desktops() {
        let found = analysis(vec![volume("small", 20), volume("large", 100)]);
        let mib: Vec<u64> = found.pools.iter().map(|pool| pool.live_bytes / MIB).collect();
        assert!(mib[3].abs_diff(60) < 5 && found.pools[0].p95_live_bytes == 100 * MIB, "{mib:?}");
        // Both in one cache: the large desktop uses what the small one leaves free.
        let at_64 = found.points.iter().find(|point| point.ram_bytes == 64 * MIB).unwrap();
        let alone: u64 = at_64.alone.iter().map(|counts| counts.spilled).sum();
        assert!(at_64.pooled.unwrap().spilled < alone, "{at_64:?}");
    }

    #[test]
    fn percentiles_use_the_nearest_rank() {
        let mut values: Vec<u64> = (1..=20).rev().collect();
        assert_eq!([5, 50, 95, 100].map(|percent| percentile(&mut values, percent)), [1, 10, 19, 20]);
        assert_eq!(percentile(&mut [], 95), 0);
    }
}
