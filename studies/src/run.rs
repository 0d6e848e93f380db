//! Runs a study: opens all systems of a variant, writes their working sets, and measures them in rounds of rotated
//! order.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use headwater_block::Device;
use headwater_volume::VolumeCounters;
use serde::Serialize;

use crate::disks::{self, Opened, RawDisk};
use crate::load::{self, Content, Job, Line, Outcomes, Until};
use crate::model::Model;
use crate::over::Over;
use crate::series::{self, Series};
use crate::study::{Case, Study, Variant};

/// The parameters of a study's run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The study.
    pub study: Study,
    /// Rounds of each case.
    pub rounds: usize,
    /// Time before each run whose requests do not count, in milliseconds.
    pub ramp_up_ms: u64,
    /// Length of one run, in milliseconds.
    pub run_ms: u64,
    /// Length of a measurement of the raw disk before and after the study, in milliseconds.
    pub probe_ms: u64,
    /// The seed of all random numbers.
    pub seed: u64,
    /// The model to whose speed the disk is slowed down.
    pub storage: Option<Model>,
    /// How the load accesses volumes.
    pub over: Over,
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Name of the case.
    pub case: &'static str,
    /// Name of the variant.
    pub variant: String,
    /// Number of the round.
    pub round: usize,
    /// The results of the load.
    pub outcomes: Outcomes,
    /// The volume's counters after the run, since the volume was opened.
    pub counters: Option<VolumeCounters>,
}

/// The measurements of a study.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Results {
    /// All measurements.
    pub samples: Vec<Sample>,
    /// IOPS of the raw disk, before and after.
    pub probes_iops: Vec<f64>,
    /// Whether the study was interrupted.
    pub interrupted: bool,
    /// The counts of each second of each run.
    #[serde(skip)]
    pub series: Vec<Series>,
}

impl Results {
    /// Whether the raw disk was equally fast before and after, within 15 %. `None`: it was not measured twice.
    pub fn is_quiet(&self) -> Option<bool> {
        is_quiet(&self.probes_iops)
    }
}

impl Results {
    /// The sample of a case and a variant with the median IOPS.
    pub fn median_of(&self, case: &str, variant: &str) -> Option<&Sample> {
        let mut samples: Vec<&Sample> =
            self.samples.iter().filter(|sample| sample.case == case && sample.variant == variant).collect();
        samples.sort_by(|a, b| a.outcomes.iops.total_cmp(&b.outcomes.iops));
        samples.get(samples.len() / 2).copied()
    }
}

/// Shows the progress of a study.
pub trait Progress {
    /// A step begins.
    fn step(&mut self, what: &str, percent: u64, left: Duration);
}

/// The remaining time. Runs have a fixed length; fills are assumed to be as fast as those so far.
struct Remaining {
    started: Instant,
    run_ms: u64,
    fill_bytes: u64,
    filled_bytes: u64,
    filled_ms: u64,
}

impl Remaining {
    /// The assumed speed of fills before the first fill.
    const FILL_BYTES_PER_MS: u64 = 400_000;

    fn left(&self) -> Duration {
        let per_ms = self.filled_bytes.checked_div(self.filled_ms).unwrap_or(Self::FILL_BYTES_PER_MS);
        Duration::from_millis(self.run_ms + self.fill_bytes / per_ms.max(1))
    }

    fn percent(&self) -> u64 {
        let elapsed = self.started.elapsed().as_secs_f64();
        (elapsed * 100.0 / (elapsed + self.left().as_secs_f64()).max(1e-3)) as u64
    }

    fn filled(&mut self, bytes: u64, took: Duration) {
        self.fill_bytes = self.fill_bytes.saturating_sub(bytes);
        self.filled_bytes += bytes;
        self.filled_ms += u64::try_from(took.as_millis()).unwrap_or(u64::MAX).max(1);
    }
}

struct Running<'a> {
    plan: &'a Plan,
    dir: &'a Path,
    stop: &'a AtomicBool,
    progress: &'a mut dyn Progress,
    remaining: Remaining,
    results: Results,
}

/// Runs the study until its end, or until `stop`. The results contain the measurements up to an error.
pub fn run(plan: &Plan, dir: &Path, stop: &AtomicBool, progress: &mut dyn Progress) -> (Results, Result<()>) {
    let (cases, variants) = (&plan.study.cases, plan.study.variants.len() as u64);
    let runs = variants * cases.len() as u64 * plan.rounds as u64;
    let remaining = Remaining {
        started: Instant::now(),
        run_ms: runs * (plan.ramp_up_ms + plan.run_ms) + 2 * plan.probe_ms,
        fill_bytes: variants * cases.iter().map(|case| case.set_bytes).sum::<u64>(),
        filled_bytes: 0,
        filled_ms: 0,
    };
    let mut running = Running { plan, dir, stop, progress, remaining, results: Results::default() };
    let result = running.all();
    running.results.interrupted = stop.load(Ordering::Relaxed);
    (running.results, result)
}

/// IOPS of the raw disk, on a small working set. `None`: it was interrupted.
pub fn probe(
    dir: &Path,
    set_bytes: u64,
    time: Duration,
    seed: u64,
    stop: &AtomicBool,
) -> Result<Option<f64>> {
    let device: Arc<dyn Device> = Arc::new(RawDisk::create(dir, set_bytes, disks::engine(None, 1.0)?)?);
    load::fill(&device, set_bytes, Content::Incompressible, seed, stop)?;
    let line = Line {
        request_bytes: 4096,
        share_percent: 100,
        alignment_bytes: 4096,
        read_percent: 20,
        random_percent: 100,
        burst: 1,
        delay_ms: 0,
    };
    let job =
        Job { start_bytes: 0, set_bytes, lines: vec![line], depth: 16, content: Content::Incompressible };
    let outcomes = load::run(&device, &[job], seed, Until::Elapsed(time), stop)?;
    Ok((!outcomes.interrupted).then_some(outcomes.iops))
}

/// Whether the raw disk was equally fast before and after, within 15 %. `None`: it was not measured twice.
pub fn is_quiet(probes_iops: &[f64]) -> Option<bool> {
    let [before, after] = probes_iops.first_chunk::<2>()?;
    Some((after - before).abs() <= 0.15 * before.max(*after))
}

impl Running<'_> {
    fn all(&mut self) -> Result<()> {
        self.probe()?;
        for variant in &self.plan.study.variants {
            self.variant(variant)?;
        }
        self.probe()
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn step(&mut self, what: &str) {
        self.progress.step(what, self.remaining.percent(), self.remaining.left());
    }

    /// Measures the raw disk, always with the same load.
    fn probe(&mut self) -> Result<()> {
        if self.is_stopped() {
            return Ok(());
        }
        self.step("measuring the raw disk");
        let time = Duration::from_millis(self.plan.probe_ms);
        self.results.probes_iops.extend(probe(self.dir, 64 << 20, time, self.plan.seed, self.stop)?);
        self.remaining.run_ms = self.remaining.run_ms.saturating_sub(self.plan.probe_ms);
        Ok(())
    }

    fn variant(&mut self, variant: &Variant) -> Result<()> {
        let plan = self.plan;
        let mut systems = Vec::new();
        for case in &plan.study.cases {
            if self.is_stopped() {
                return Ok(());
            }
            self.step(&format!("filling {} ({})", case.title, variant.title));
            let in_flight = variant.jobs.iter().map(|job| job.depth).sum();
            let system = disks::open(case, self.dir, (plan.storage, plan.over), in_flight)?;
            let started = Instant::now();
            load::fill(&system.device, case.set_bytes, variant.content(), plan.seed, self.stop)
                .with_context(|| format!("filling {} failed", case.title))?;
            self.remaining.filled(case.set_bytes, started.elapsed());
            systems.push((case, system));
        }
        for round in 0..plan.rounds {
            // Each round begins with another case.
            systems.rotate_left(usize::from(round > 0));
            for (case, system) in &systems {
                if self.is_stopped() {
                    return Ok(());
                }
                self.step(&format!(
                    "round {} of {}: {} ({})",
                    round + 1,
                    plan.rounds,
                    case.title,
                    variant.title
                ));
                self.measure(case, system, variant, round)?;
            }
        }
        Ok(())
    }

    fn measure(&mut self, case: &Case, system: &Opened, variant: &Variant, round: usize) -> Result<()> {
        // All cases of a round get the same requests if their working sets have equal sizes.
        let seed = self.plan.seed.wrapping_add(1 + round as u64);
        let jobs = variant.jobs(case.set_bytes);
        let run_for = |ms, seed| {
            load::run(&system.device, &jobs, seed, Until::Elapsed(Duration::from_millis(ms)), self.stop)
                .with_context(|| format!("measuring {} failed", case.title))
        };
        if self.plan.ramp_up_ms > 0 {
            run_for(self.plan.ramp_up_ms, !seed)?;
        }
        let (outcomes, intervals) =
            series::watched(|| system.counts().unwrap_or_default(), || run_for(self.plan.run_ms, seed));
        let outcomes = outcomes?;
        let took_ms = self.plan.ramp_up_ms + self.plan.run_ms;
        self.remaining.run_ms = self.remaining.run_ms.saturating_sub(took_ms);
        // An interrupted run gives no sample.
        if !outcomes.interrupted {
            let (variant_name, case_name) = (variant.name.clone(), case.name.to_owned());
            if system.counts().is_some() {
                self.results.series.push(Series { variant: variant_name, case: case_name, round, intervals });
            }
            let counters = system.volume.as_ref().map(|volume| volume.counters());
            self.results.samples.push(Sample {
                case: case.name,
                variant: variant.name.clone(),
                round,
                outcomes,
                counters,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_changed_by_more_than_15_percent_is_not_quiet() {
        let quiet =
            |probes: &[f64]| Results { probes_iops: probes.to_vec(), ..Results::default() }.is_quiet();
        assert_eq!(quiet(&[100.0, 86.0]), Some(true));
        assert_eq!(quiet(&[100.0, 84.0]), Some(false));
        assert_eq!(quiet(&[84.0, 100.0]), Some(false));
        assert_eq!(quiet(&[100.0]), None);
    }

    #[test]
    fn time_left_follows_the_fills_that_were_timed() {
        let mut remaining = Remaining {
            started: Instant::now(),
            run_ms: 1000,
            fill_bytes: 800_000_000,
            filled_bytes: 0,
            filled_ms: 0,
        };
        assert_eq!(remaining.left(), Duration::from_secs(3));
        remaining.filled(400_000_000, Duration::from_secs(4));
        assert_eq!(remaining.left(), Duration::from_secs(5));
    }
}
