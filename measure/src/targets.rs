//! Judges results: compares each figure with a peer or target value, and decides whether its goal is reached.

use serde::Serialize;

use crate::accepted::{self, Accepted};
use crate::bench::{CaseResult, Sample, SystemResult};
use crate::cases::UNALIGNED;
use crate::fuse::FuseResult;
use crate::idle::IdleResult;
use crate::images::ImportResult;
use crate::iscsi::{IscsiResult, TGT_FILE};
use crate::machine::Machine;
use crate::memory::MemoryResult;
use crate::statistics;
use crate::streaming::{Comparison, mib};
use crate::systems::{HEADWATER_ALIGNED, HEADWATER_FITS};

/// All results of one run; `results.json` contains this.
#[derive(Debug, Default, Serialize)]
pub struct Results {
    /// The host.
    pub machine: Machine,
    /// Whether this was one short round on small working sets, whose figures say nothing about speed.
    pub quick: bool,
    /// The comparisons.
    pub rows: Vec<Row>,
    /// Selected cases that gave no result.
    pub left_out: Vec<LeftOut>,
    /// The samples behind the rows.
    pub cases: Vec<CaseResult>,
    /// Resident memory.
    pub memory: Vec<MemoryResult>,
    /// Results over iSCSI; Headwater first.
    pub iscsi: Vec<IscsiResult>,
    /// Results of FUSE files; Headwater first.
    pub fuse: Vec<FuseResult>,
    /// Results of block devices in a guest's kernel.
    pub attach: Vec<Comparison>,
    /// The result of many idle machines.
    pub idle: Option<IdleResult>,
    /// Results of imports and exports; empty without an image.
    pub import: Vec<ImportResult>,
    /// Results of reading images ([`crate::streaming`]).
    pub streaming: Vec<Comparison>,
}

/// The goal for a ratio `ours / theirs`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// At least this value; larger is better.
    AtLeast(f64),
    /// At most this value; smaller is better.
    AtMost(f64),
    /// No goal; the ratio is only reported.
    None,
}

impl Goal {
    fn is_reached(self, ratio: f64) -> Option<bool> {
        match self {
            Goal::AtLeast(goal) => Some(ratio >= goal),
            Goal::AtMost(goal) => Some(ratio <= goal),
            Goal::None => None,
        }
    }
}

impl std::fmt::Display for Goal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Goal::AtLeast(goal) => write!(f, ">= {goal:.2}"),
            Goal::AtMost(goal) => write!(f, "<= {goal:.2}"),
            Goal::None => f.write_str("-"),
        }
    }
}

/// The judgement of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The goal is reached.
    Reached,
    /// The goal is missed, but the bound that a decision accepts is kept.
    Accepted,
    /// The goal is missed.
    Missed,
    /// There is no figure.
    NotMeasured,
    /// The row has no goal.
    Reported,
}

/// One comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The case.
    pub case: String,
    /// What is compared, with its unit.
    pub figure: &'static str,
    /// Our median.
    pub ours: Option<f64>,
    /// The number of rounds.
    pub rounds: usize,
    /// Minimum and maximum of the rounds.
    pub range: Option<(f64, f64)>,
    /// The name of the peer or target.
    pub peer: String,
    /// The peer's median.
    pub theirs: Option<f64>,
    /// `ours / theirs`.
    pub ratio: Option<f64>,
    /// The goal for the ratio.
    pub goal: Goal,
    /// The accepted bound, if the goal is known to be missed.
    pub accepted: Option<Accepted>,
    /// The judgement.
    pub verdict: Verdict,
}

impl Row {
    /// A row with the medians of both, the ratio and the judgement.
    pub fn new(
        case: &str,
        figure: &'static str,
        ours: &[f64],
        peer: &str,
        theirs: &[f64],
        goal: Goal,
    ) -> Self {
        let (rounds, range) = (ours.len(), statistics::range(ours));
        let (ours, theirs) = (statistics::median(ours), statistics::median(theirs));
        let ratio = statistics::ratio(ours, theirs);
        let accepted = accepted::of(case, figure, peer).filter(|_| goal != Goal::None);
        let within = |accepted: Accepted| ratio.and_then(|ratio| accepted.bound.is_reached(ratio));
        let verdict = match (ratio, ratio.and_then(|ratio| goal.is_reached(ratio))) {
            (None, _) => Verdict::NotMeasured,
            (_, None) => Verdict::Reported,
            (_, Some(true)) => Verdict::Reached,
            (_, Some(false)) if accepted.and_then(within) == Some(true) => Verdict::Accepted,
            (_, Some(false)) => Verdict::Missed,
        };
        let (case, peer) = (case.into(), peer.into());
        Self { case, figure, ours, rounds, range, peer, theirs, ratio, goal, accepted, verdict }
    }

    /// Whether the row makes a run with `--check` fail. A row with a goal must have a figure.
    fn fails(&self) -> bool {
        match self.verdict {
            Verdict::Missed => true,
            Verdict::NotMeasured => self.goal != Goal::None,
            Verdict::Reached | Verdict::Accepted | Verdict::Reported => false,
        }
    }

    fn is(&self, verdict: Verdict) -> bool {
        self.verdict == verdict
    }
}

/// A selected case that gave no result.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    /// The case.
    pub case: String,
    /// The reason.
    pub reason: String,
}

/// The error of a case that cannot be measured on this host. The case is skipped, and the run continues.
#[derive(Debug)]
pub struct Unavailable(pub String);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

impl Results {
    /// If the outcome is [`Unavailable`], records the reason and returns the default value.
    pub fn or_left_out<T: Default>(&mut self, case: &str, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
        let error = match outcome {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        let Some(Unavailable(reason)) = error.downcast_ref() else {
            return Err(error.context(format!("case {case}")));
        };
        println!("  skipped: {reason}");
        self.left_out.push(LeftOut { case: case.into(), reason: reason.clone() });
        Ok(T::default())
    }

    /// Makes the rows. A selected case without a result and without a reason counts as skipped.
    pub fn judge<'a>(&mut self, asked: impl Iterator<Item = &'a str>) {
        self.rows = rows(self);
        for case in asked {
            let is_known = self.rows.iter().any(|row| row.case == case)
                || self.left_out.iter().any(|left| left.case == case);
            if !is_known {
                self.left_out.push(LeftOut { case: case.into(), reason: "it gave no result".into() });
            }
        }
    }

    /// The reasons why a run with `--check` fails, one on each line.
    pub fn failures(&self) -> Vec<String> {
        let rows = self.rows.iter().filter(|row| row.fails()).map(|row| {
            let what = if row.is(Verdict::NotMeasured) { "no figure" } else { "not reached" };
            format!("{}, {} beside {}: {what}", row.case, row.figure, row.peer)
        });
        rows.chain(self.left_out.iter().map(|left| format!("{}: skipped, {}", left.case, left.reason)))
            .collect()
    }

    /// The number of rows that miss their goals within an accepted bound.
    pub fn accepted(&self) -> usize {
        self.rows.iter().filter(|row| row.is(Verdict::Accepted)).count()
    }
}

const OURS: &str = "headwater";
const IOPS: &str = "IOPS";
const CPU: &str = "us CPU/op";

/// The rows for all results.
pub fn rows(results: &Results) -> Vec<Row> {
    let mut rows = Vec::new();
    for case in &results.cases {
        if case.name.starts_with("vhost-fits-") {
            vhost_fits_rows(case, &mut rows);
        } else if case.name.ends_with(UNALIGNED) {
            unaligned_rows(case, &mut rows);
        } else if case.name.starts_with("fits-") {
            fits_rows(case, &mut rows);
        } else {
            disk_rows(case, &mut rows);
        }
    }
    for memory in &results.memory {
        memory_row(memory, &mut rows);
    }
    iscsi_rows(&results.iscsi, &mut rows);
    fuse_rows(&results.fuse, &mut rows);
    rows.extend(results.attach.iter().map(comparison_row));
    if let Some(idle) = &results.idle {
        idle_rows(idle, &mut rows);
    }
    import_rows(&results.import, &mut rows);
    rows.extend(results.streaming.iter().map(comparison_row));
    rows
}

fn comparison_row(found: &Comparison) -> Row {
    Row::new(found.case, found.figure, &found.ours, &found.peer, &found.theirs, found.goal)
}

fn fits_rows(case: &CaseResult, rows: &mut Vec<Row>) {
    let Some(ours) = case.system(OURS) else { return };
    for peer in case.systems.iter().filter(|system| system.system != OURS) {
        rows.push(Row::new(case.name, IOPS, &ours.iops(), peer.system, &peer.iops(), Goal::AtLeast(1.0)));
        // CPU time is compared only with the null server, because the other peers do more work per operation.
        if peer.system == "nbdkit null" {
            let cpu = |system: &SystemResult| system.figures(Sample::cpu_us_per_operation);
            rows.push(Row::new(case.name, CPU, &cpu(ours), peer.system, &cpu(peer), Goal::AtMost(0.6)));
        }
    }
}

/// Rows against a server that discards writes, an overlay, and a file in memory. At depth 1 the latency of a request
/// decides.
fn vhost_fits_rows(case: &CaseResult, rows: &mut Vec<Row>) {
    let Some(ours) = case.system(OURS) else { return };
    for peer in case.systems.iter().filter(|system| system.system != OURS) {
        let (us_goal, iops_goal) = match peer.system {
            "storage-daemon null-co" => (1.1, 0.7),
            "storage-daemon qcow2" => (1.0, 5.0),
            _ => (1.0, 1.0),
        };
        if case.depth == 1 {
            let us = |system: &SystemResult| system.figures(|sample| Some(1e6 / sample.fio.iops));
            rows.push(Row::new(case.name, "us/op", &us(ours), peer.system, &us(peer), Goal::AtMost(us_goal)));
            continue;
        }
        let goal = Goal::AtLeast(iops_goal);
        rows.push(Row::new(case.name, IOPS, &ours.iops(), peer.system, &peer.iops(), goal));
    }
}

fn disk_rows(case: &CaseResult, rows: &mut Vec<Row>) {
    let (Some(ours), Some(raw)) = (case.system(OURS), case.system("raw disk")) else { return };
    let goal = match case.name {
        "overflow-64m" | "overflow-64m-fresh" => 1.3,
        "disk" => 1.2,
        "vhost-overflow-64m" => 2.0,
        "vhost-disk" => 1.5,
        _ => 1.0,
    };
    rows.push(Row::new(case.name, IOPS, &ours.iops(), raw.system, &raw.iops(), Goal::AtLeast(goal)));
    // A large RAM cache that does not hold the whole working set, against one that does.
    if let Some(fits) = case.system(HEADWATER_FITS) {
        rows.push(Row::new(case.name, IOPS, &ours.iops(), fits.system, &fits.iops(), Goal::AtLeast(0.8)));
    }
    // If the disk has free space, a block is written to it once; a nearly full disk must clean segments.
    let amplification = match case.name {
        "overflow-64m"
        | "overflow-64m-random"
        | "overflow-4g"
        | "overflow-4g-random"
        | "disk"
        | "disk-random" => Goal::AtMost(1.1),
        "overflow-64m-tight" => Goal::AtMost(2.0),
        _ => return,
    };
    let written = ours.figures(Sample::write_amplification);
    rows.push(Row::new(case.name, "bytes to disk/byte", &written, "written once", &[1.0], amplification));
}

/// Rows against the raw disk with the same requests, and, for a set that fits, against aligned requests.
fn unaligned_rows(case: &CaseResult, rows: &mut Vec<Row>) {
    let Some(ours) = case.system(OURS) else { return };
    for (peer, goal) in [("raw disk", 1.2), (HEADWATER_ALIGNED, 0.95)] {
        if let Some(peer) = case.system(peer) {
            rows.push(Row::new(
                case.name,
                IOPS,
                &ours.iops(),
                peer.system,
                &peer.iops(),
                Goal::AtLeast(goal),
            ));
        }
    }
}

fn memory_row(memory: &MemoryResult, rows: &mut Vec<Row>) {
    let limit = mib(memory.ram_bytes) * 1.03 + 32.0;
    let ours = mib(memory.peak_resident_bytes);
    let goal = Goal::AtMost(1.0);
    rows.push(Row::new(memory.name, "MiB resident", &[ours], "RAM x 1.03 + 32 MiB", &[limit], goal));
    if memory.in_flight_bytes > 0 {
        // Data of requests in flight is in the server's memory, but not in the budget.
        let (peer, limit) = ("the same + requests in flight", limit + mib(memory.in_flight_bytes));
        rows.push(Row::new(memory.name, "MiB resident", &[ours], peer, &[limit], goal));
    }
}

fn iscsi_rows(iscsi: &[IscsiResult], rows: &mut Vec<Row>) {
    let Some((ours, peers)) = iscsi.split_first() else { return };
    for peer in peers {
        let goal = Goal::AtLeast(if peer.system == TGT_FILE { 2.0 } else { 1.2 });
        rows.push(Row::new("iscsi", IOPS, &ours.iops, peer.system, &peer.iops, goal));
        rows.push(Row::new("iscsi", CPU, &ours.cpu_us, peer.system, &peer.cpu_us, Goal::None));
    }
}

fn fuse_rows(fuse: &[FuseResult], rows: &mut Vec<Row>) {
    let Some((ours, peers)) = fuse.split_first() else { return };
    for peer in peers {
        // Also compared with a server that discards writes, although ours stores them.
        rows.push(Row::new("fuse", IOPS, &ours.iops, peer.system, &peer.iops, Goal::AtLeast(1.0)));
        rows.push(Row::new("fuse", CPU, &ours.cpu_us, peer.system, &peer.cpu_us, Goal::None));
    }
}

fn idle_rows(idle: &IdleResult, rows: &mut Vec<Row>) {
    let of_all = format!("1 % for {} machines", idle.machines);
    let goal = Goal::AtMost(1.0);
    let name = crate::idle::NAME;
    rows.push(Row::new(name, "% of a processor", &[idle.cpu_percent], &of_all, &[1.0], goal));
    let each = mib(idle.resident_bytes) / f64::from(idle.machines);
    rows.push(Row::new(name, "MiB each", &[each], "2 MiB each", &[2.0], goal));
}

/// The target of an export. `accepted.rs` uses the same name.
const EXPORT_LIMIT: &str = "1 GB/s, or the disk";

fn import_rows(import: &[ImportResult], rows: &mut Vec<Row>) {
    let Some((ours, peers)) = import.split_first() else { return };
    for peer in peers {
        // Goals: 1.5 times the speed of plain qemu-img, and 0.9 times its speed with more threads than ours and
        // writes out of order.
        let goal = if peer.system == "qemu-img" { 1.0 / 1.5 } else { 1.0 / 0.9 };
        let goal = Goal::AtMost(goal);
        rows.push(Row::new("import", "seconds", &ours.seconds, peer.system, &peer.seconds, goal));
        let (size, theirs) = (mib(ours.size_bytes), mib(peer.size_bytes));
        rows.push(Row::new("import", "MiB", &[size], peer.system, &[theirs], Goal::AtMost(1.02)));
        let (mine, theirs) = (&ours.export_seconds, &peer.export_seconds);
        rows.push(Row::new("import", "export to raw, seconds", mine, peer.system, theirs, Goal::None));
        let (mine, theirs) = (&ours.qcow2_seconds, &peer.qcow2_seconds);
        rows.push(Row::new("import", "export to qcow2, seconds", mine, peer.system, theirs, Goal::None));
    }
    let gigabytes = mib(ours.data_bytes) * 1.048_576e-3;
    let rates = |of: &[f64]| -> Vec<f64> { of.iter().map(|seconds| gigabytes / seconds).collect() };
    // No program can write faster than the disk.
    let limit: Vec<f64> = rates(&ours.disk_seconds).iter().map(|rate| rate.min(1.0)).collect();
    let rate = rates(&ours.export_seconds);
    let figure = "export to raw, GB/s of data";
    rows.push(Row::new("import", figure, &rate, EXPORT_LIMIT, &limit, Goal::AtLeast(1.0)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fio::Measured;

    /// A system with these IOPS in its rounds, and one microsecond of CPU time per operation.
    pub fn system(name: &'static str, iops: &[f64]) -> SystemResult {
        let sample = |iops: &f64| Sample {
            fio: Measured {
                iops: *iops,
                operations: 1_000_000,
                written_bytes: 100 << 20,
                seconds: 10.0,
                write_mean_us: 1.0,
                write_p99_us: 2.0,
                read_p99_us: 3.0,
            },
            cpu_seconds: Some(1.0),
            disk_written_bytes: Some(150 << 20),
        };
        SystemResult { system: name, samples: iops.iter().map(sample).collect(), peak_resident_bytes: None }
    }

    fn case(name: &'static str, systems: Vec<SystemResult>) -> CaseResult {
        CaseResult { name, title: "t", set_bytes: 1, depth: 16, percentage_random: 80, systems }
    }

    fn verdict(results: &Results, case: &str, figure: &str) -> Vec<(Option<f64>, Verdict)> {
        let rows = rows(results);
        let wanted = rows.iter().filter(|row| row.case == case && row.figure == figure);
        wanted.map(|row| (row.ratio, row.verdict)).collect()
    }

    #[test]
    fn medians_are_compared_and_judged() {
        let ours = system("headwater", &[90.0, 130.0, 100.0]);
        let null = system("nbdkit null", &[100.0, 80.0, 500.0]);
        let cow = system("nbdkit file+cow", &[50.0]);
        let fast = system("qemu-nbd qcow2 direct", &[200.0]);
        let systems = vec![ours, null, cow, fast];
        let results = Results { cases: vec![case("fits-qd16", systems)], ..Results::default() };
        assert_eq!(
            verdict(&results, "fits-qd16", IOPS),
            [(Some(1.0), Verdict::Reached), (Some(2.0), Verdict::Reached), (Some(0.5), Verdict::Missed)]
        );
        assert_eq!(verdict(&results, "fits-qd16", CPU), [(Some(1.0), Verdict::Missed)]);
    }

    #[test]
    fn overflow_is_compared_with_the_disk_and_with_what_fits() {
        let (ours, raw) = (system("headwater", &[70.0]), system("raw disk", &[50.0]));
        let overflow = case("overflow-4g", vec![ours, raw, system(HEADWATER_FITS, &[100.0])]);
        let results = Results { cases: vec![overflow], ..Results::default() };
        assert_eq!(
            verdict(&results, "overflow-4g", IOPS),
            [(Some(1.4), Verdict::Reached), (Some(0.7), Verdict::Missed)]
        );
    }

    #[test]
    fn idle_machines_are_judged_together_and_each() {
        let idle = IdleResult { machines: 64, cpu_percent: 0.5, resident_bytes: 192 << 20 };
        let results = Results { idle: Some(idle), ..Results::default() };
        assert_eq!(verdict(&results, "idle-64", "% of a processor"), [(Some(0.5), Verdict::Reached)]);
        assert_eq!(verdict(&results, "idle-64", "MiB each"), [(Some(1.5), Verdict::Missed)]);
    }

    #[test]
    fn the_goal_of_write_amplification_depends_on_free_space() {
        let pair = || vec![system("headwater", &[70.0]), system("raw disk", &[50.0])];
        let cases = vec![case("overflow-64m", pair()), case("overflow-64m-tight", pair())];
        let results = Results { cases, ..Results::default() };
        assert_eq!(verdict(&results, "overflow-64m", "bytes to disk/byte"), [(Some(1.5), Verdict::Missed)]);
        assert_eq!(
            verdict(&results, "overflow-64m-tight", "bytes to disk/byte"),
            [(Some(1.5), Verdict::Reached)]
        );
    }

    #[test]
    fn memory_and_imports_are_judged() {
        let memory = MemoryResult {
            name: "memory-64m",
            title: "t",
            ram_bytes: 64 << 20,
            written_bytes: 1,
            in_flight_bytes: 0,
            peak_resident_bytes: 97 << 20,
        };
        let import_beside = |system, seconds, size_mib: u64, disk_seconds| ImportResult {
            system,
            seconds: vec![seconds],
            size_bytes: size_mib << 20,
            export_seconds: vec![seconds],
            qcow2_seconds: vec![seconds / 2.0],
            data_bytes: 4_000_000_000,
            disk_seconds: vec![disk_seconds],
        };
        let import = |disk_seconds| {
            let beside = |system, seconds, size_mib| import_beside(system, seconds, size_mib, disk_seconds);
            vec![beside("headwater", 2.0, 110), beside("qemu-img", 4.0, 100)]
        };
        let rate = |disk_seconds| {
            let results = Results { import: import(disk_seconds), ..Results::default() };
            verdict(&results, "import", "export to raw, GB/s of data")[0]
        };
        // An export of 2 GB/s, on a disk that can do 4, and on one that can do 0.8.
        for (disk_seconds, expected) in [(1.0, 2.0), (5.0, 2.5)] {
            let (ratio, verdict) = rate(disk_seconds);
            assert!(ratio.is_some_and(|ratio| (ratio - expected).abs() < 0.01), "{ratio:?}");
            assert_eq!(verdict, Verdict::Reached);
        }
        let (memory, import) = (vec![memory], import(1.0));
        let results = Results { memory, import, ..Results::default() };
        assert_eq!(verdict(&results, "memory-64m", "MiB resident")[0].1, Verdict::Reached);
        assert_eq!(verdict(&results, "import", "seconds"), [(Some(0.5), Verdict::Reached)]);
        assert_eq!(verdict(&results, "import", "MiB"), [(Some(1.1), Verdict::Missed)]);
        assert_eq!(verdict(&results, "import", "export to raw, seconds"), [(Some(0.5), Verdict::Reported)]);
        assert_eq!(verdict(&results, "import", "export to qcow2, seconds"), [(Some(0.5), Verdict::Reported)]);
    }

    #[test]
    fn a_miss_that_a_decision_records_passes_down_to_its_bound() {
        let row =
            |ours| Row::new("slow-link", "seconds", &[ours], "on demand", &[1.0], Goal::AtMost(1.0 / 3.0));
        let verdicts = [0.3, 0.45, 0.55].map(|ours| row(ours).verdict);
        assert_eq!(verdicts, [Verdict::Reached, Verdict::Accepted, Verdict::Missed]);
        let results = Results { rows: [0.3, 0.45].map(row).into(), ..Results::default() };
        assert_eq!((results.failures(), results.accepted()), (Vec::new(), 1));
        let results = Results { rows: [0.45, 0.55].map(row).into(), ..Results::default() };
        assert_eq!(results.failures(), ["slow-link, seconds beside on demand: not reached"]);
        // A row without a goal with the same figure has no accepted bound.
        let told = Row::new("slow-link", "seconds", &[0.9], "on demand", &[1.0], Goal::None);
        assert_eq!((told.verdict, told.accepted), (Verdict::Reported, None));
    }

    #[test]
    fn a_selected_case_without_a_result_fails() {
        let disk = case("vhost-disk", vec![system("headwater", &[1.0]), system("raw disk", &[])]);
        let mut results = Results { cases: vec![disk], ..Results::default() };
        let gone: anyhow::Result<Vec<Comparison>> = Err(Unavailable("there is no guest".into()).into());
        assert!(results.or_left_out("slow-link", gone).unwrap().is_empty());
        results.judge(["vhost-disk", "slow-link", "seal-pause"].into_iter());
        let expected = [
            "vhost-disk, IOPS beside raw disk: no figure",
            "slow-link: skipped, there is no guest",
            "seal-pause: skipped, it gave no result",
        ];
        assert_eq!(results.failures(), expected);
        let broken: anyhow::Result<()> = Err(anyhow::anyhow!("fio failed"));
        assert!(results.or_left_out("disk", broken).is_err());
    }
}
