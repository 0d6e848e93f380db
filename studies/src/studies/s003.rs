//! Study 003 with a modelled desktop: it copies files while it works, without a RAM cache and with two sizes of it
//! (2019).

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use headwater_block::size;
use headwater_report::number::{grouped, latency};
use headwater_report::page::{Column, text_table};
use headwater_report::statistics::{Estimate, estimate_mean};
use headwater_report::svg::{Line, LineChart, Phase};
use headwater_volume::{Buffering, CacheMode};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::MIB;
use super::copies_page::Copies;
use super::modelled::{self, Run};
use crate::desktop::run::{self, CounterSample, Machine, Pace, rates};
use crate::desktop::{Generator, Life, Profile, Sessions};
use crate::disks::{self, VolumeSpec};
use crate::files::Files;
use crate::machine::Machine as Hardware;
use crate::model::Model;
use crate::needs::Needs;
use crate::run::is_quiet;
use crate::series::{self, Series};
use crate::trace::{Kind, Request};

/// The format version of `results.json`.
const SCHEMA: u32 = 1;

/// The time between boot and logon, in seconds.
const IDLE_S: f64 = 60.0;

/// A scenario, and its published figures in percent of the baseline.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Scenario {
    /// Title for people.
    pub title: &'static str,
    /// The RAM limit. `None`: the write cache is on disk, and each request counts as one operation.
    pub ram_bytes: Option<u64>,
    /// Published writes of the host's disk, in percent of the baseline.
    pub printed_writes_percent: u32,
    /// Published mean RAM use of the cache in MB, read from a chart.
    pub printed_ram_mb: Option<u32>,
}

const fn scenario(
    title: &'static str,
    ram_bytes: Option<u64>,
    printed_writes_percent: u32,
    printed_ram_mb: Option<u32>,
) -> Scenario {
    Scenario { title, ram_bytes, printed_writes_percent, printed_ram_mb }
}

/// The published scenarios, for the model and for a guest.
pub const SCENARIOS: [Scenario; 3] = [
    scenario("No RAM cache", None, 100, None),
    scenario("256 MB", Some(256 * MIB), 65, Some(238)),
    scenario("512 MB", Some(512 * MIB), 40, Some(470)),
];

/// The parameters of the study.
pub struct Setup {
    profile: Profile,
    sessions: Sessions,
    speed: f64,
    interval_us: u64,
    scenarios: Vec<Scenario>,
    disk_bytes: u64,
    seed: u64,
    /// The model to whose speed the disk is slowed down.
    pub storage: Option<Model>,
    /// Whether this is a quick run with small sizes.
    pub is_quick: bool,
}

/// The result of a scenario. Rates are per interval, in operations per second.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    title: &'static str,
    storage_reads: Vec<f64>,
    storage_writes: Vec<f64>,
    storage_bytes: Vec<f64>,
    ram_bytes: Vec<u64>,
    ram_reads: Vec<f64>,
    ram_writes: Vec<f64>,
    /// CPU time of this program per 1,000 requests, in milliseconds.
    cpu_ms: f64,
    /// The same CPU time as a share of one processor, if the work is spread over the model's time.
    cpu_share: f64,
    /// Latency from the time at which a request was due to its answer, in microseconds: mean and 99th percentile.
    mean_us: f64,
    p99_us: f64,
    late_us: u64,
    #[serde(skip)]
    series: Series,
}

/// All measurements.
#[derive(Default)]
pub struct Results {
    outcomes: Vec<Outcome>,
    interrupted: bool,
    failure: Option<String>,
    machine: Hardware,
    /// IOPS of the raw disk, before and after.
    probes_iops: Vec<f64>,
}

impl Results {
    /// The error that ended the study early, if any.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

impl Setup {
    /// The parameters with a desktop model, for a full or a quick run.
    pub fn new(profile: Profile, seed: u64, is_quick: bool) -> Self {
        // 16 and 32 MiB in a quick run.
        let small = |scenario: Scenario| Scenario {
            ram_bytes: scenario.ram_bytes.map(|bytes| if is_quick { bytes / 16 } else { bytes }),
            ..scenario
        };
        let quick = [
            ("boot_seconds", 20.0),
            ("boot_writes", 400.0),
            ("logon_seconds", 10.0),
            ("logon_writes", 100.0),
            ("loop_seconds", 60.0),
            ("copy_files", 6.0),
            ("copy_file_bytes", 2e6),
            ("copy_kept_seconds", 40.0),
        ];
        Self {
            profile: if is_quick { profile.with(&quick) } else { profile },
            sessions: Sessions {
                users: 1,
                logons_s: 0.0,
                loops: if is_quick { 2 } else { 4 },
                copies_files: true,
            },
            speed: if is_quick { 60.0 } else { 10.0 },
            interval_us: if is_quick { 5_000_000 } else { 30_000_000 },
            scenarios: SCENARIOS.into_iter().map(small).collect(),
            disk_bytes: if is_quick { 512 * MIB } else { 10 << 30 },
            seed,
            storage: None,
            is_quick,
        }
    }

    /// The needs of the study: scenarios run one after the other.
    pub fn needs(&self) -> Needs {
        let ram = self.scenarios.iter().filter_map(|scenario| scenario.ram_bytes).max().unwrap_or(0);
        Needs { ram_bytes: ram + 128 * MIB, disk_bytes: self.disk_bytes }
    }

    fn life(&self) -> Life {
        Generator::new(&self.profile, self.seed).life(&self.sessions)
    }

    fn session_s(&self) -> f64 {
        self.profile.get("logon_seconds") + f64::from(self.sessions.loops) * self.profile.get("loop_seconds")
    }

    /// Runs all scenarios. The results contain the measurements up to a failure.
    pub fn run(&self, dir: &Path, stop: &AtomicBool, progress: &mut dyn FnMut(&str, f64)) -> Results {
        let mut results = Results { machine: Hardware::describe(dir), ..Results::default() };
        if let Err(error) = self.all(&mut results, dir, stop, progress) {
            results.failure = Some(format!("{error:#}"));
        }
        results.machine.note_load();
        results
    }

    fn all(
        &self,
        results: &mut Results,
        dir: &Path,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(&str, f64),
    ) -> Result<()> {
        results.probes_iops.extend(modelled::probe(dir, self.is_quick, stop)?);
        let life = self.life();
        for scenario in &self.scenarios {
            let mut show = |share| progress(scenario.title, share);
            let outcome = self.scenario(&life, scenario, dir, stop, &mut show)?;
            results.interrupted = stop.load(Ordering::Relaxed);
            let Some(outcome) = outcome.filter(|_| !results.interrupted) else { break };
            results.outcomes.push(outcome);
        }
        if !results.interrupted {
            results.probes_iops.extend(modelled::probe(dir, self.is_quick, stop)?);
        }
        Ok(())
    }

    /// Counts each request as one operation.
    fn counted(&self, life: &Life, scenario: &Scenario) -> Outcome {
        let intervals = (self.session_s() * 1e6 / self.interval_us as f64) as usize;
        let per_interval = |is_counted: &dyn Fn(&Request) -> u64| {
            let mut counts = vec![0.0; intervals];
            for request in &life.session {
                if let Some(count) = counts.get_mut((request.time_us / self.interval_us) as usize) {
                    *count += is_counted(request) as f64 / (self.interval_us as f64 / 1e6);
                }
            }
            counts
        };
        Outcome {
            title: scenario.title,
            storage_reads: per_interval(&|request| u64::from(request.kind == Kind::Read)),
            storage_writes: per_interval(&|request| u64::from(request.kind == Kind::Write)),
            storage_bytes: per_interval(&|request| {
                if request.kind == Kind::Discard { 0 } else { request.bytes }
            }),
            ..Outcome::default()
        }
    }

    /// Sends the requests of a scenario. Those of the baseline go to a write cache on disk, to measure CPU time and
    /// latency, and its operations are not counted.
    fn scenario(
        &self,
        life: &Life,
        scenario: &Scenario,
        dir: &Path,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<Option<Outcome>> {
        let shift_us =
            ((self.profile.get("boot_seconds") + IDLE_S) * 1e6) as u64 / self.interval_us * self.interval_us;
        let session =
            life.session.iter().map(|request| Request { time_us: request.time_us + shift_us, ..*request });
        let requests: Vec<Request> = life.boot.iter().copied().chain(session).collect();
        let count = requests.len();
        let spec = VolumeSpec {
            name: scenario.title.into(),
            size_bytes: 64 << 30,
            mode: if scenario.ram_bytes.is_some() { CacheMode::RamDisk } else { CacheMode::Disk },
            ram_bytes: scenario.ram_bytes.unwrap_or(0),
            disk_bytes: self.disk_bytes,
            buffering: Buffering::Direct,
        };
        let machines = [Machine::open(&spec, requests, &disks::engine(self.storage, self.speed)?, dir)?];
        let end_us = shift_us + (self.session_s() * 1e6) as u64;
        let pace = Pace { speed: self.speed, interval_us: self.interval_us, end_us };
        let before = cpu_ms();
        let ran = run::run(&machines, pace, stop, progress)
            .with_context(|| format!("the scenario {} failed", scenario.title))?;
        let total_ms = cpu_ms() - before;
        let (cpu_ms, cpu_share) = (total_ms * 1e3 / count.max(1) as f64, total_ms * 1e3 / end_us as f64);
        if ran.interrupted {
            return Ok(None);
        }
        let (mean_us, p99_us) = (ran.latencies.mean_us(), ran.latencies.percentile_us(99.0));
        if scenario.ram_bytes.is_none() {
            return Ok(Some(Outcome {
                cpu_ms,
                cpu_share,
                mean_us,
                p99_us,
                late_us: ran.late_us,
                ..self.counted(life, scenario)
            }));
        }
        // The requests of the boot are not part of the session.
        let first = (shift_us / self.interval_us) as usize;
        let Some(samples) = ran.samples.first() else { bail!("there is no machine") };
        let rate = |of: &dyn Fn(&CounterSample) -> u64| rates(samples, self.interval_us, of).split_off(first);
        Ok(Some(Outcome {
            title: scenario.title,
            storage_reads: rate(&|sample| sample.counts.disk_reads),
            storage_writes: rate(&|sample| sample.counts.disk_writes),
            storage_bytes: rate(&|sample| sample.counts.disk_read_bytes + sample.counts.disk_write_bytes),
            ram_bytes: samples[first..].iter().map(|sample| sample.counts.ram_bytes).collect(),
            ram_reads: rate(&|sample| sample.read_ram_blocks),
            ram_writes: rate(&|sample| sample.write_ram_blocks),
            cpu_ms,
            cpu_share,
            mean_us,
            p99_us,
            late_us: ran.late_us,
            series: run::series(scenario.title, 0, samples, self.interval_us),
        }))
    }
}

/// CPU time of this program.
fn cpu_ms() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The mean of all intervals, with its 95 % bootstrap interval.
fn with_interval(values: &[f64], seed: u64) -> String {
    match estimate_mean(values, seed) {
        Some(Estimate { median, interval: (low, high) }) => format!("{median:.2} [{low:.2}, {high:.2}]"),
        None => "-".into(),
    }
}

fn mean_mib(values: &[u64]) -> f64 {
    let mib: Vec<f64> = values.iter().map(|bytes| *bytes as f64 / MIB as f64).collect();
    mean(&mib)
}

/// The contents of the report.
pub struct Report<'a> {
    /// The parameters.
    pub setup: &'a Setup,
    /// The measurements.
    pub results: &'a Results,
}

#[derive(Serialize)]
struct Json<'a> {
    schema: u32,
    study: &'static str,
    version: &'static str,
    is_quick: bool,
    seed: u64,
    speed: f64,
    interval_us: u64,
    machine: &'a Hardware,
    interrupted: bool,
    failure: Option<&'a str>,
    storage: String,
    probes_iops: &'a [f64],
    is_quiet: Option<bool>,
    profile: &'a Profile,
    scenarios: &'a [Scenario],
    outcomes: &'a [Outcome],
}

const HEAD: [Column; 13] = [
    Column::Text("Scenario"),
    Column::Figure("Writes/s [95 %]"),
    Column::Figure("of baseline"),
    Column::Figure("published"),
    Column::Figure("Reads/s"),
    Column::Figure("Bytes/s"),
    Column::Figure("RAM, mean"),
    Column::Figure("published"),
    Column::Figure("RAM writes/s"),
    Column::Figure("CPU ms / 1,000"),
    Column::Figure("of baseline"),
    Column::Figure("CPU"),
    Column::Figure("p99"),
];

impl Report<'_> {
    fn outcome(&self, scenario: &Scenario) -> Option<&Outcome> {
        self.results.outcomes.iter().find(|outcome| outcome.title == scenario.title)
    }

    /// Writes of the storage as a share of the baseline's.
    fn share(&self, outcome: &Outcome) -> Option<f64> {
        let baseline = mean(&self.results.outcomes.first()?.storage_writes);
        (baseline > 0.0).then(|| mean(&outcome.storage_writes) / baseline)
    }

    /// CPU time per request in percent of the baseline's.
    fn cpu_percent(&self, outcome: &Outcome) -> Option<f64> {
        let baseline = self.results.outcomes.first()?.cpu_ms;
        (baseline > 0.0).then(|| outcome.cpu_ms / baseline * 100.0)
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |scenario: &Scenario| {
            let printed = format!("{} %", scenario.printed_writes_percent);
            let printed_ram = scenario.printed_ram_mb.map_or("-".into(), |mb| format!("{mb} MB"));
            let Some(outcome) = self.outcome(scenario) else {
                let none = || "not measured".to_owned();
                return vec![
                    scenario.title.into(),
                    none(),
                    none(),
                    printed,
                    none(),
                    none(),
                    none(),
                    printed_ram,
                    none(),
                    none(),
                    none(),
                    none(),
                    none(),
                ];
            };
            let has_ram = !outcome.ram_bytes.is_empty();
            let of_ram = |text: String| if has_ram { text } else { "-".into() };
            vec![
                scenario.title.into(),
                with_interval(&outcome.storage_writes, self.setup.seed),
                self.share(outcome).map_or("-".into(), |share| format!("{:.1} %", share * 100.0)),
                printed,
                format!("{:.2}", mean(&outcome.storage_reads)),
                size::format(mean(&outcome.storage_bytes) as u64),
                of_ram(format!("{:.0} MiB", mean_mib(&outcome.ram_bytes))),
                printed_ram,
                of_ram(grouped(mean(&outcome.ram_writes))),
                format!("{:.1}", outcome.cpu_ms),
                self.cpu_percent(outcome).map_or("-".into(), |percent| format!("{percent:.0} %")),
                format!("{:.2} %", outcome.cpu_share * 100.0),
                latency(outcome.p99_us),
            ]
        };
        self.setup.scenarios.iter().map(row).collect()
    }

    fn warnings(&self) -> Vec<String> {
        let quick = "Quick run: short sessions, small copies, and 16 and 32 MiB of RAM instead of 256 and 512 MB. The figures have no meaning.";
        Run {
            quick: self.setup.is_quick.then_some(quick),
            interrupted: self.results.interrupted,
            failure: self.results.failure(),
            late_us: self.results.outcomes.iter().map(|outcome| outcome.late_us).max().unwrap_or(0),
            interval_us: self.setup.interval_us,
            probes_iops: &self.results.probes_iops,
        }
        .warnings()
    }

    /// The report as text for a terminal.
    pub fn text(&self) -> String {
        let mut text = format!(
            "\nStudy 003 (2019): a desktop that copies files, as a model\n{}",
            text_table(&HEAD, &self.rows())
        );
        self.warnings().iter().for_each(|warning| text.push_str(&format!("\n{warning}\n")));
        text
    }

    fn phases(&self) -> Vec<Phase> {
        let profile = &self.setup.profile;
        let (logon_s, loop_s) = (profile.get("logon_seconds"), profile.get("loop_seconds"));
        let phase = |number: u32| {
            let from = (logon_s + f64::from(number) * loop_s) / 60.0;
            Phase { label: format!("segment {}", number + 1), from, to: from + loop_s / 60.0 }
        };
        (0..self.setup.sessions.loops).map(phase).collect()
    }

    fn chart(&self, y_axis: &str, of: impl Fn(&Outcome) -> Vec<f64>) -> String {
        let minutes = |sample: usize| (sample + 1) as f64 * self.setup.interval_us as f64 / 60e6;
        let series = self.results.outcomes.iter().map(|outcome| Line {
            label: outcome.title.into(),
            points: of(outcome)
                .into_iter()
                .enumerate()
                .map(|(sample, value)| (minutes(sample), value))
                .collect(),
            ..Line::default()
        });
        LineChart {
            x_axis: "minutes".into(),
            y_axis: y_axis.into(),
            lines: series.collect(),
            phases: self.phases(),
        }
        .svg()
    }

    /// The HTML page.
    pub fn html(&self) -> String {
        let with_cache = self.setup.scenarios.iter().filter(|scenario| scenario.ram_bytes.is_some());
        let percent = |scenario| self.share(self.outcome(scenario)?).map(|share| share * 100.0);
        let mib = |bytes: f64| bytes / MIB as f64;
        let copies = Copies {
            introduction: "A study of a write cache in RAM with overflow (2019). The desktop is a model: what its requests are is a set of parameters, \
                 listed below with source and grade. Only the count of one disk operation for each request is fitted to a printed figure.",
            warnings: &self.warnings(),
            shares: with_cache.map(|scenario| (scenario, percent(scenario))).collect(),
            caption: "Means over the session: writes, reads and bytes of the storage",
            head: &HEAD,
            rows: &self.rows(),
            plots: vec![
                ("Writes of the storage.", self.chart("writes/s", |outcome| outcome.storage_writes.clone())),
                (
                    "Reads of the storage: of the overflow, without those of the image.",
                    self.chart("reads/s", |outcome| outcome.storage_reads.clone()),
                ),
                (
                    "Bytes of the storage.",
                    self.chart("MiB/s", |outcome| outcome.storage_bytes.iter().copied().map(mib).collect()),
                ),
                (
                    "RAM of the write cache. It falls when the copies are deleted and discarded.",
                    self.chart("MiB", |outcome| {
                        outcome.ram_bytes.iter().map(|bytes| mib(*bytes as f64)).collect()
                    }),
                ),
                (
                    "Blocks of 4 KiB written to RAM.",
                    self.chart("blocks/s", |outcome| outcome.ram_writes.clone()),
                ),
                (
                    "Blocks of 4 KiB read from RAM.",
                    self.chart("blocks/s", |outcome| outcome.ram_reads.clone()),
                ),
            ],
            notes: &NOTES,
        };
        let mut page = copies.page();
        let mut facts = self.results.machine.facts();
        facts.push(("Storage".into(), modelled::storage(self.setup.storage)));
        facts.push(modelled::probes_fact(&self.results.probes_iops));
        let pace = (self.setup.speed, self.setup.seed);
        modelled::add_model_and_machine(&mut page, &self.setup.profile, facts, pace);
        page.finish()
    }

    /// The files of the report.
    pub fn files(&self) -> Result<Files> {
        let json = Json {
            schema: SCHEMA,
            study: "003",
            version: env!("CARGO_PKG_VERSION"),
            is_quick: self.setup.is_quick,
            seed: self.setup.seed,
            speed: self.setup.speed,
            interval_us: self.setup.interval_us,
            machine: &self.results.machine,
            interrupted: self.results.interrupted,
            failure: self.results.failure(),
            storage: modelled::storage(self.setup.storage),
            probes_iops: &self.results.probes_iops,
            is_quiet: is_quiet(&self.results.probes_iops),
            profile: &self.setup.profile,
            scenarios: &self.setup.scenarios,
            outcomes: &self.results.outcomes,
        };
        let json = serde_json::to_string_pretty(&json).context("cannot write the results as JSON")?;
        let series: Vec<Series> =
            self.results.outcomes.iter().map(|outcome| outcome.series.clone()).collect();
        Ok(Files::new(json, self.html()).with("series.csv.zst", series::packed(&series)?))
    }
}

impl Setup {
    /// The duration of all scenarios.
    pub fn duration(&self) -> Duration {
        let one_s = (self.profile.get("boot_seconds") + IDLE_S + self.session_s()) / self.speed;
        Duration::from_secs_f64(one_s * self.scenarios.len() as f64)
    }
}

const NOTES: [&str; 8] = [
    "Intervals are 95 % bootstrap intervals of the mean over the samples of one session. They say how much the session varies, and nothing \
     about other desktops.",
    "The original ran a Windows desktop with Login VSI's knowledge worker, ten times, and prints means. Here one desktop is a model, and \
     there is no guest.",
    "The baseline is a count: each request is one operation of the disk. With a cache, the operations of its overflow are counted where \
     they go to the disk. One write of the overflow is 2 MiB, so bytes are shown too.",
    "The original's host figures include reads of the image and of Windows. The model has no such reads, so only writes are compared.",
    "RAM of the original is read from its chart. Its bar of the RAM used says 343 %, its curve 198 %.",
    "Processor time is that of this program, including the generation of the written data: for each 1,000 requests, and as a share of one processor if the \
     work is spread over the model's time. In the baseline the requests go to a write cache on disk, as a differencing disk would be.",
    "Latencies go from the time at which a request was to be sent, by our clock, until its answer. Requests are sent one after the other.",
    "Model time runs faster than real time. The write cache spills ahead of need, and this takes as much real time as always.",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_study_reports_its_failure() {
        let setup = Setup::new(Profile::standard().unwrap(), 1, true);
        let results = setup.run(Path::new("/nonexistent"), &AtomicBool::new(false), &mut |_, _| ());
        assert!(
            results.failure().unwrap().contains("cannot measure the raw disk"),
            "{:?}",
            results.failure()
        );
        let report = Report { setup: &setup, results: &results };
        for shown in [report.text(), report.html()] {
            assert!(shown.contains("The study failed: cannot measure the raw disk"), "{shown}");
            assert!(shown.contains("not measured"), "{shown}");
        }
    }

    #[test]
    fn the_baseline_counts_each_write_once() {
        let setup = Setup::new(Profile::standard().unwrap(), 1, true);
        let life = setup.life();
        let outcome = setup.counted(&life, &setup.scenarios[0]);
        let interval_s = setup.interval_us as f64 / 1e6;
        let counted = outcome.storage_writes.iter().sum::<f64>() * interval_s;
        let writes = life.session.iter().filter(|request| request.kind == Kind::Write).count();
        assert_eq!(counted.round() as usize, writes);
        // They include six copies of 2 MB in each of two loops, in requests of 64 KiB.
        assert!(writes > 2 * 6 * 30 + 1000, "{writes}");
    }
}
