//! Study 003 in a real guest (2019): a Debian that boots, logs on and copies files, with a cache on disk and with two
//! sizes of a RAM cache.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use aws_lc_rs::digest::{Context as Digest, SHA256};
use headwater_block::size;
use headwater_report::number::grouped;
use headwater_report::page::{Column, text_table};
use headwater_report::statistics::estimate_mean;
use headwater_report::svg::{Line, LineChart, Phase as Shaded};
use serde::Serialize;

use super::MIB;
use super::copies_page::Copies;
use super::modelled;
use super::s003::{SCENARIOS, Scenario, mean};
use crate::files::Files;
use crate::guest::{self, CounterSample, MEMORY_BYTES, Options, Phase, Ran, Work};
use crate::machine::Machine as Hardware;
use crate::needs::Needs;
use crate::run::is_quiet;
use crate::series::{self, Counts, Series};

/// The format version of `results.json`.
const SCHEMA: u32 = 1;

/// The parameters of the study.
pub struct Setup {
    image: PathBuf,
    image_sha256: String,
    program: PathBuf,
    work: Work,
    interval: Duration,
    scenarios: Vec<Scenario>,
    disk_bytes: u64,
    rounds: usize,
    /// Whether this is a quick run with small sizes.
    pub is_quick: bool,
}

/// The result of one scenario in one round. Rates are per interval of the session, in operations per second.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    title: &'static str,
    round: usize,
    phases: Vec<Phase>,
    acceleration: String,
    /// The end of each interval, in seconds since the logon began.
    end_s: Vec<f64>,
    storage_reads: Vec<f64>,
    storage_writes: Vec<f64>,
    storage_bytes: Vec<f64>,
    ram_bytes: Vec<u64>,
    ram_reads: Vec<f64>,
    ram_writes: Vec<f64>,
    /// CPU time of the export, as a share of one processor.
    cpu_share: Vec<f64>,
    /// The sums over the whole session.
    totals: Totals,
    #[serde(skip)]
    series: Series,
    #[serde(skip)]
    recording: Vec<u8>,
}

/// Sums over a session.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Totals {
    /// Requests of the guest.
    requests: u64,
    /// Operations of the storage: all of the overflow, and reads of the image.
    storage_reads: u64,
    storage_writes: u64,
    storage_bytes: u64,
    /// CPU time of the export per 1,000 requests, in milliseconds.
    cpu_ms: f64,
}

/// All measurements.
#[derive(Default)]
pub struct Results {
    outcomes: Vec<Outcome>,
    interrupted: bool,
    failure: Option<String>,
    machine: Hardware,
    probes_iops: Vec<f64>,
}

impl Results {
    /// The error that ended the study early, if any.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

fn sha256(path: &Path) -> Result<String> {
    let failed = || format!("cannot read {}", path.display());
    let mut file = std::fs::File::open(path).with_context(failed)?;
    let (mut digest, mut buffer) = (Digest::new(&SHA256), vec![0; 1 << 20]);
    loop {
        let count = file.read(&mut buffer).with_context(failed)?;
        if count == 0 {
            return Ok(digest.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect());
        }
        digest.update(&buffer[..count]);
    }
}

impl Setup {
    /// The parameters for a full or a quick run. Fails if the image or a program is missing.
    pub fn new(image: PathBuf, program: PathBuf, rounds: usize, is_quick: bool) -> Result<Self> {
        guest::check(&image, &program)?;
        let work = if is_quick {
            Work { segments: 1, files: 8, file_bytes: 4_000_000, work_s: 3 }
        } else {
            Work { segments: 4, files: 50, file_bytes: 5_368_709, work_s: 60 }
        };
        let small = |scenario: Scenario| Scenario {
            // 16 MiB in a quick run.
            ram_bytes: scenario.ram_bytes.map(|bytes| if is_quick { bytes / 16 } else { bytes }),
            ..scenario
        };
        Ok(Self {
            image_sha256: sha256(&image)?,
            image,
            program,
            work,
            interval: if is_quick { Duration::from_secs(1) } else { Duration::from_secs(5) },
            // A boot is most of a quick run's time, so a quick run has one RAM size.
            scenarios: SCENARIOS.into_iter().take(if is_quick { 2 } else { 3 }).map(small).collect(),
            disk_bytes: if is_quick { 1 << 30 } else { 10 << 30 },
            rounds,
            is_quick,
        })
    }

    /// The needs of the study: guests run one after the other.
    pub fn needs(&self) -> Needs {
        let ram = self.scenarios.iter().filter_map(|scenario| scenario.ram_bytes).max().unwrap_or(0);
        Needs { ram_bytes: ram + MEMORY_BYTES + 512 * MIB, disk_bytes: self.disk_bytes }
    }

    /// Runs all scenarios. The results contain the measurements up to a failure.
    pub fn run(&self, dir: &Path, stop: &AtomicBool, progress: &mut dyn FnMut(&str)) -> Results {
        let mut results = Results { machine: Hardware::describe(dir), ..Results::default() };
        if let Err(error) = self.all(&mut results, dir, stop, progress) {
            results.failure = Some(format!("{error:#}"));
        }
        results.interrupted = stop.load(Ordering::Relaxed);
        results.machine.note_load();
        results
    }

    fn all(
        &self,
        results: &mut Results,
        dir: &Path,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        results.probes_iops.extend(modelled::probe(dir, self.is_quick, stop)?);
        for round in 0..self.rounds {
            for number in 0..self.scenarios.len() {
                // Each round begins with another scenario.
                let scenario = &self.scenarios[(number + round) % self.scenarios.len()];
                if stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let of = format!("{}, round {} of {}", scenario.title, round + 1, self.rounds);
                let options = Options {
                    image: &self.image,
                    program: &self.program,
                    dir,
                    ram_bytes: scenario.ram_bytes,
                    disk_bytes: self.disk_bytes,
                    interval: self.interval,
                    work: self.work,
                };
                let ran = guest::run(&options, stop, &mut |phase| progress(&format!("{of}: {phase}")));
                let ran = ran.with_context(|| format!("the scenario {} failed", scenario.title))?;
                let Some(ran) = ran else { return Ok(()) };
                results.outcomes.push(outcome(scenario, round, ran));
            }
        }
        results.probes_iops.extend(modelled::probe(dir, self.is_quick, stop)?);
        Ok(())
    }
}

/// Operations of the storage so far: reads, writes, bytes. Without a RAM cache, each request of the guest counts as
/// one operation.
fn storage(scenario: &Scenario, sample: &CounterSample) -> [u64; 3] {
    let Counts { reads, writes, served, disk_reads, disk_read_bytes, disk_writes, disk_write_bytes, .. } =
        sample.counts;
    let image_reads = served[4];
    match scenario.ram_bytes {
        None => [reads, writes, sample.request_bytes],
        Some(_) => [
            disk_reads + image_reads,
            disk_writes,
            sample.image_read_bytes + disk_read_bytes + disk_write_bytes,
        ],
    }
}

fn outcome(scenario: &Scenario, round: usize, ran: Ran) -> Outcome {
    let session = (
        ran.phases.iter().find(|phase| phase.name == "logon").map_or(0.0, |phase| phase.from_s),
        ran.phases.last().map_or(0.0, |phase| phase.to_s),
    );
    let mut outcome = Outcome {
        title: scenario.title,
        round,
        acceleration: ran.acceleration,
        recording: ran.recording,
        ..Outcome::default()
    };
    let mut before = CounterSample::default();
    let mut intervals = Vec::new();
    for sample in &ran.samples {
        let seconds = (sample.at_s - before.at_s).max(1e-3);
        let rate = |now: u64, before: u64| (now - before) as f64 / seconds;
        intervals.push((sample.at_s, sample.counts.since(&before.counts)));
        // There is a sample shortly before each phase, and one after the last phase.
        if (session.0..session.1).contains(&f64::midpoint(before.at_s, sample.at_s)) {
            let (now, then) = (storage(scenario, sample), storage(scenario, &before));
            outcome.end_s.push(sample.at_s - session.0);
            outcome.storage_reads.push(rate(now[0], then[0]));
            outcome.storage_writes.push(rate(now[1], then[1]));
            outcome.storage_bytes.push(rate(now[2], then[2]));
            outcome.ram_bytes.push(sample.counts.ram_bytes);
            outcome.ram_reads.push(rate(sample.read_ram_blocks, before.read_ram_blocks));
            outcome.ram_writes.push(rate(sample.write_ram_blocks, before.write_ram_blocks));
            outcome.cpu_share.push((sample.cpu_ms - before.cpu_ms) / 1000.0 / seconds);
            let totals = &mut outcome.totals;
            totals.requests +=
                sample.counts.reads + sample.counts.writes - before.counts.reads - before.counts.writes;
            totals.storage_reads += now[0] - then[0];
            totals.storage_writes += now[1] - then[1];
            totals.storage_bytes += now[2] - then[2];
            totals.cpu_ms += sample.cpu_ms - before.cpu_ms;
        }
        before = *sample;
    }
    outcome.totals.cpu_ms *= 1000.0 / outcome.totals.requests.max(1) as f64;
    outcome.phases = ran.phases;
    outcome.series = Series { variant: "guest".into(), case: scenario.title.to_owned(), round, intervals };
    outcome
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
    is_guest: bool,
    /// Emulated guests take different times for the same work.
    is_emulated: Option<bool>,
    rounds: usize,
    image_sha256: &'a str,
    guest_work: Work,
    storage: &'static str,
    machine: &'a Hardware,
    interrupted: bool,
    failure: Option<&'a str>,
    probes_iops: &'a [f64],
    is_quiet: Option<bool>,
    scenarios: &'a [Scenario],
    outcomes: &'a [Outcome],
}

const HEAD: [Column; 12] = [
    Column::Text("Scenario"),
    Column::Figure("Requests"),
    Column::Figure("Storage writes"),
    Column::Figure("of baseline"),
    Column::Figure("published"),
    Column::Figure("Storage reads"),
    Column::Figure("of baseline"),
    Column::Figure("Storage bytes"),
    Column::Figure("RAM used, mean"),
    Column::Figure("published"),
    Column::Figure("CPU ms / 1,000"),
    Column::Figure("of baseline"),
];

/// The mean over the rounds, with its interval if there are several.
fn over_rounds(values: &[f64], digits: usize) -> String {
    let number = |value: f64| if digits == 0 { grouped(value) } else { format!("{value:.digits$}") };
    match estimate_mean(values, 1) {
        None => "not measured".into(),
        Some(estimate) if values.len() < 2 => number(estimate.median),
        Some(estimate) => {
            let (low, high) = estimate.interval;
            format!("{} [{}, {}]", number(estimate.median), number(low), number(high))
        }
    }
}

impl Report<'_> {
    /// A figure of a scenario in each round.
    fn each(&self, scenario: &Scenario, of: impl Fn(&Outcome) -> f64) -> Vec<f64> {
        let outcomes = self.results.outcomes.iter().filter(|outcome| outcome.title == scenario.title);
        outcomes.map(of).collect()
    }

    /// A figure in each round, as a share of the baseline's mean.
    fn shares(&self, scenario: &Scenario, of: impl Fn(&Outcome) -> f64) -> Vec<f64> {
        let baseline = mean(&self.each(&self.setup.scenarios[0], &of));
        self.each(scenario, of)
            .into_iter()
            .filter(|_| baseline > 0.0)
            .map(|value| value / baseline * 100.0)
            .collect()
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let writes = |outcome: &Outcome| outcome.totals.storage_writes as f64;
        let reads = |outcome: &Outcome| outcome.totals.storage_reads as f64;
        let cpu = |outcome: &Outcome| outcome.totals.cpu_ms;
        let ram = |outcome: &Outcome| {
            let mib: Vec<f64> = outcome.ram_bytes.iter().map(|bytes| *bytes as f64 / MIB as f64).collect();
            mean(&mib)
        };
        let row = |scenario: &Scenario| {
            let percent = |shares: &[f64]| match shares {
                [] => "-".into(),
                shares => format!("{} %", over_rounds(shares, 1)),
            };
            vec![
                scenario.title.to_owned(),
                over_rounds(&self.each(scenario, |outcome| outcome.totals.requests as f64), 0),
                over_rounds(&self.each(scenario, writes), 0),
                percent(&self.shares(scenario, writes)),
                format!("{} %", scenario.printed_writes_percent),
                over_rounds(&self.each(scenario, reads), 0),
                percent(&self.shares(scenario, reads)),
                match self.each(scenario, |outcome| outcome.totals.storage_bytes as f64).as_slice() {
                    [] => "not measured".into(),
                    bytes => size::format(mean(bytes) as u64),
                },
                match self.each(scenario, ram).as_slice() {
                    [] => "not measured".into(),
                    mib => format!("{} MiB", over_rounds(mib, 0)),
                },
                scenario.printed_ram_mb.map_or("-".into(), |mb| format!("{mb} MB")),
                over_rounds(&self.each(scenario, cpu), 1),
                percent(&self.shares(scenario, cpu)),
            ]
        };
        self.setup.scenarios.iter().map(row).collect()
    }

    fn warnings(&self) -> Vec<String> {
        let quick = "Quick run: one short segment, small copies, and 16 MiB of RAM instead of 256 and 512 MB. The figures have no meaning.";
        let mut warnings: Vec<String> = self.setup.is_quick.then(|| quick.to_owned()).into_iter().collect();
        if let Some(failure) = &self.results.failure {
            warnings.push(format!(
                "The study failed: {failure}. The report contains the measurements up to then."
            ));
        } else if self.results.interrupted {
            warnings
                .push("The study was interrupted. The report contains the measurements up to then.".into());
        }
        warnings.extend(modelled::unquiet(&self.results.probes_iops));
        warnings
    }

    /// The report as text for a terminal.
    pub fn text(&self) -> String {
        let mut text = format!(
            "\nStudy 003 (2019): a desktop that copies files, as a real guest\n{}",
            text_table(&HEAD, &self.rows())
        );
        self.warnings().iter().for_each(|warning| text.push_str(&format!("\n{warning}\n")));
        text
    }

    /// The first round of each scenario over time. The phases are those of the first scenario, because each guest
    /// takes its own time.
    fn chart(&self, y_axis: &str, of: impl Fn(&Outcome) -> Vec<f64>) -> String {
        let first: Vec<&Outcome> =
            self.results.outcomes.iter().filter(|outcome| outcome.round == 0).collect();
        let lines = first.iter().map(|outcome| Line {
            label: outcome.title.into(),
            points: outcome.end_s.iter().map(|end| end / 60.0).zip(of(outcome)).collect(),
            ..Line::default()
        });
        let shaded = |outcome: &&Outcome| -> Vec<Shaded> {
            let logon = outcome.phases.iter().find(|phase| phase.name == "logon").map_or(0.0, |it| it.from_s);
            let session = outcome.phases.iter().filter(|phase| phase.from_s >= logon);
            let minutes = |at_s: f64| (at_s - logon) / 60.0;
            session
                .map(|phase| Shaded {
                    label: phase.name.clone(),
                    from: minutes(phase.from_s),
                    to: minutes(phase.to_s),
                })
                .collect()
        };
        LineChart {
            x_axis: "minutes since the logon".into(),
            y_axis: y_axis.into(),
            lines: lines.collect(),
            phases: first.first().map(shaded).unwrap_or_default(),
        }
        .svg()
    }

    /// The HTML page.
    pub fn html(&self) -> String {
        let with_cache = self.setup.scenarios.iter().filter(|scenario| scenario.ram_bytes.is_some());
        let percent = |scenario: &Scenario| {
            let shares = self.shares(scenario, |outcome| outcome.totals.storage_writes as f64);
            (!shares.is_empty()).then(|| mean(&shares))
        };
        let copies = Copies {
            introduction: "A study of a write cache in RAM with overflow (2019), in a real guest: a Debian under QEMU, whose disk is an export of this product's \
                 program. Nothing is modelled, and nothing is fitted to a printed figure.",
            warnings: &self.warnings(),
            shares: with_cache.map(|scenario| (scenario, percent(scenario))).collect(),
            caption: "Totals of the session, which begins with the logon",
            head: &HEAD,
            rows: &self.rows(),
            plots: if self.results.outcomes.is_empty() { Vec::new() } else { self.plots() },
            notes: &NOTES,
        };
        let mut page = copies.page();
        page.heading("Machine and run");
        let facts: Vec<Vec<String>> =
            self.facts().into_iter().map(|(what, value)| vec![what, value]).collect();
        page.table("", &[Column::Text("What"), Column::Text("Value")], &facts);
        page.finish()
    }

    fn plots(&self) -> Vec<(&'static str, String)> {
        let mib = |bytes: f64| bytes / MIB as f64;
        vec![
            (
                "CPU time of the export, which includes the write cache, as a share of one processor.",
                self.chart("% of a processor", |outcome| {
                    outcome.cpu_share.iter().map(|share| share * 100.0).collect()
                }),
            ),
            ("Writes of the storage.", self.chart("writes/s", |outcome| outcome.storage_writes.clone())),
            (
                "Reads of the storage: of the overflow, and of the image.",
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
            ("Blocks of 4 KiB written to RAM.", self.chart("blocks/s", |outcome| outcome.ram_writes.clone())),
            ("Blocks of 4 KiB read from RAM.", self.chart("blocks/s", |outcome| outcome.ram_reads.clone())),
        ]
    }

    fn facts(&self) -> Vec<(String, String)> {
        let Setup { image, image_sha256, work, rounds, .. } = self.setup;
        let Work { segments, files, file_bytes, work_s } = work;
        let mut facts = self.results.machine.facts();
        facts.push(modelled::probes_fact(&self.results.probes_iops));
        let acceleration = self.results.outcomes.first().map(|outcome| outcome.acceleration.clone());
        facts.push(("The guest's processor".into(), acceleration.unwrap_or_else(|| "unknown".into())));
        facts.push(("Guest".into(), format!("{}, SHA-256 {image_sha256}", image.display())));
        facts.push(("Memory of the guest".into(), size::format(MEMORY_BYTES)));
        let work = format!(
            "{segments} segments; in each {files} files of {} are copied, documents are saved for {work_s} s, an archive is packed, and the copies are deleted",
            size::format(*file_bytes)
        );
        facts.push(("Work".into(), work));
        facts.push(("Rounds".into(), rounds.to_string()));
        facts.push(("Program".into(), format!("headwater-study {}", env!("CARGO_PKG_VERSION"))));
        facts
    }

    /// The files of the report, including the recording of each guest and its phases.
    pub fn files(&self) -> Result<Files> {
        let json = Json {
            schema: SCHEMA,
            study: "003",
            version: env!("CARGO_PKG_VERSION"),
            is_quick: self.setup.is_quick,
            is_guest: true,
            is_emulated: self.results.outcomes.first().map(|outcome| outcome.acceleration != "KVM"),
            rounds: self.setup.rounds,
            image_sha256: &self.setup.image_sha256,
            guest_work: self.setup.work,
            storage: "real",
            machine: &self.results.machine,
            interrupted: self.results.interrupted,
            failure: self.results.failure(),
            probes_iops: &self.results.probes_iops,
            is_quiet: is_quiet(&self.results.probes_iops),
            scenarios: &self.setup.scenarios,
            outcomes: &self.results.outcomes,
        };
        let json = serde_json::to_string_pretty(&json).context("cannot write the results as JSON")?;
        let series: Vec<Series> =
            self.results.outcomes.iter().map(|outcome| outcome.series.clone()).collect();
        let mut files = Files::new(json, self.html()).with("series.csv.zst", series::packed(&series)?);
        for (number, outcome) in (1..).zip(&self.results.outcomes) {
            files = files
                .with(format!("guest-{number}.rec"), outcome.recording.clone())
                .with(format!("guest-{number}.phases"), guest::phases_text(&outcome.phases).into_bytes());
        }
        Ok(files)
    }
}

const NOTES: [&str; 6] = [
    "The original ran a Windows desktop with Login VSI's knowledge worker, ten times, and prints means. Here a Debian runs a script, which does the same kinds \
     of work in each segment, but not at the original's times. The files that are copied are in the guest's memory and are random, so they do not pack.",
    "Without a RAM cache, the cache is on disk, and each request of the guest is counted as one operation of the storage, as the original's \
     difference disk did it. With RAM, operations of the overflow are counted where they go to the disk, and reads of the image where they leave the cache.",
    "One write of the overflow is 2 MiB, so bytes are shown too. Without a RAM cache, they are those of the requests.",
    "Guests under emulation take different times for the same work, so sums are compared instead of rates.",
    "Processor time is that of the export, which includes the write cache and its server, for each 1,000 requests. The time of QEMU is not \
     included. In the baseline, the write cache is on disk.",
    "RAM of the original is read from its chart. Its bar of the RAM used says 343 %, its curve 198 %.",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_s: f64, writes: u64, disk_writes: u64, image_reads: u64) -> CounterSample {
        let counts = Counts {
            reads: image_reads,
            writes,
            served: [0, 0, 0, 0, image_reads],
            disk_writes,
            disk_write_bytes: disk_writes * 2 * MIB,
            ram_bytes: MIB,
            ..Counts::default()
        };
        CounterSample {
            at_s,
            counts,
            cpu_ms: at_s * 10.0,
            image_read_bytes: image_reads * 4096,
            ..CounterSample::default()
        }
    }

    fn ran() -> Ran {
        let phase = |name: &str, from_s, to_s| Phase { name: name.into(), from_s, to_s };
        Ran {
            phases: vec![phase("boot", 0.0, 9.0), phase("logon", 9.5, 12.0), phase("segment 1", 12.0, 30.0)],
            samples: vec![sample(10.0, 500, 2, 100), sample(20.0, 1500, 4, 150), sample(30.0, 1600, 10, 150)],
            recording: vec![1],
            acceleration: "KVM".into(),
        }
    }

    #[test]
    fn a_session_counts_from_its_logon_to_its_end() {
        let with_ram = outcome(&SCENARIOS[1], 0, ran());
        assert_eq!(with_ram.end_s, [10.5, 20.5]);
        assert_eq!(with_ram.storage_writes, [0.2, 0.6]);
        assert_eq!(with_ram.storage_reads, [5.0, 0.0]);
        let totals = with_ram.totals;
        assert_eq!((totals.requests, totals.storage_writes, totals.storage_reads), (1150, 8, 50));
        assert_eq!(totals.storage_bytes, 16 * MIB + 50 * 4096);
        // 200 ms for 1,150 requests.
        assert!((totals.cpu_ms - 173.9).abs() < 0.1, "{totals:?}");
        // Without a RAM cache, each write is an operation.
        assert_eq!(outcome(&SCENARIOS[0], 0, ran()).totals.storage_writes, 1100);
        assert_eq!(with_ram.series.intervals.len(), 3);
    }

    #[test]
    fn a_failed_run_is_not_shown_as_complete() {
        let setup = Setup {
            image: "guest.qcow2".into(),
            image_sha256: "00".into(),
            program: "headwater".into(),
            work: Work { segments: 1, files: 1, file_bytes: 1, work_s: 1 },
            interval: Duration::from_secs(1),
            scenarios: SCENARIOS.to_vec(),
            disk_bytes: 1 << 30,
            rounds: 1,
            is_quick: false,
        };
        let results = Results {
            outcomes: vec![outcome(&SCENARIOS[0], 0, ran())],
            failure: Some("the guest does not boot".into()),
            ..Results::default()
        };
        let report = Report { setup: &setup, results: &results };
        let (page, text) = (report.html(), report.text());
        assert!(
            page.contains("The study failed: the guest does not boot") && text.contains("The study failed")
        );
        assert_eq!(report.rows()[1][1], "not measured");
        assert!(report.rows()[0][2] == "1,100" && report.rows()[0][3] == "100.0 %", "{:?}", report.rows());
    }
}
