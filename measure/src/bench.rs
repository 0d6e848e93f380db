//! Runs one case (see [`crate::cases`]): starts its systems, fills their disks, measures them one after the other in
//! each round, and stops them. Each round begins with another system.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::cases::{Case, State, device_bytes};
use crate::fio::{self, Job, Measured};
use crate::systems::{Running, System};
use crate::targets::Unavailable;
use crate::{Plan, process, statistics};

/// One measurement of one system in one round.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sample {
    /// The figures of fio.
    pub fio: Measured,
    /// CPU seconds (user and system) of the serving process.
    pub cpu_seconds: Option<f64>,
    /// Bytes that the serving process wrote to disks; `None` if the kernel does not count them.
    pub disk_written_bytes: Option<u64>,
}

impl Sample {
    /// CPU time of the server per operation. It stays comparable if one system performs more operations.
    pub fn cpu_us_per_operation(&self) -> Option<f64> {
        let operations = u32::try_from(self.fio.operations).ok().filter(|count| *count > 0)?;
        self.cpu_seconds.map(|seconds| seconds * 1e6 / f64::from(operations))
    }

    /// Bytes written to the disk per byte written to the volume.
    pub fn write_amplification(&self) -> Option<f64> {
        let mib = |bytes: u64| u32::try_from(bytes >> 20).ok().map(f64::from);
        statistics::ratio(mib(self.disk_written_bytes?), mib(self.fio.written_bytes))
    }
}

/// All measurements of one system in one case.
#[derive(Clone, Debug, Serialize)]
pub struct SystemResult {
    /// The name of the system.
    pub system: &'static str,
    /// The measurements: one for each round.
    pub samples: Vec<Sample>,
    /// The highest resident memory of the server process, in bytes; `None` if the system has no process.
    pub peak_resident_bytes: Option<u64>,
}

impl SystemResult {
    /// The value of `figure` in each round.
    pub fn figures(&self, figure: impl Fn(&Sample) -> Option<f64>) -> Vec<f64> {
        self.samples.iter().filter_map(figure).collect()
    }

    /// Reads and writes per second, in each round.
    pub fn iops(&self) -> Vec<f64> {
        self.figures(|sample| Some(sample.fio.iops))
    }
}

/// All measurements of one case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseResult {
    /// The short name of the case.
    pub name: &'static str,
    /// The title of the case.
    pub title: &'static str,
    /// Size of the working set, in bytes.
    pub set_bytes: u64,
    /// The number of requests in flight.
    pub depth: u32,
    /// Percentage of random offsets.
    pub percentage_random: u8,
    /// The results: Headwater first, then its peers.
    pub systems: Vec<SystemResult>,
}

impl CaseResult {
    /// The results of one system.
    pub fn system(&self, name: &str) -> Option<&SystemResult> {
        self.systems.iter().find(|system| system.system == name)
    }
}

/// Measures one case.
pub fn run(plan: &Plan, case: &Case) -> Result<CaseResult> {
    println!("\n{}: {}", case.name, case.title);
    // Dirty pages of earlier cases must not be written back during this case.
    rustix::fs::sync();
    check_space(plan, wanted_bytes(case, plan.quick, plan.work_dir.join("raw.img").exists()))?;
    let mut results: Vec<SystemResult> = Vec::new();
    for system in &case.systems {
        results.push(SystemResult { system: system.name(), samples: Vec::new(), peak_resident_bytes: None });
    }
    let mut running: Vec<Option<Running>> = case.systems.iter().map(|_| None).collect();
    for round in 0..plan.rounds {
        for turn in 0..case.systems.len() {
            let index = (round + turn) % case.systems.len();
            let (system, slot) = (case.systems[index], &mut running[index]);
            let measured = measure(plan, case, system, slot, round);
            let sample = measured.with_context(|| format!("measuring {}", system.name()))?;
            print_sample(round, plan.rounds, system, &sample);
            let result = &mut results[index];
            if let Some(process) = slot.as_ref().and_then(|running| running.process.as_ref()) {
                result.peak_resident_bytes =
                    result.peak_resident_bytes.max(Some(process::peak_resident_bytes(process.pid())?));
            }
            result.samples.push(sample);
            if case.state == State::Fresh {
                *slot = None;
            }
        }
    }
    let Case { name, title, set_bytes, depth, percentage_random, .. } = *case;
    Ok(CaseResult { name, title, set_bytes, depth, percentage_random, systems: results })
}

/// Measures one system once. Starts and fills the system first if `slot` is empty.
fn measure(
    plan: &Plan,
    case: &Case,
    system: System,
    slot: &mut Option<Running>,
    round: usize,
) -> Result<Sample> {
    let running = match slot {
        Some(running) => running,
        None => slot.insert(start(plan, case, system)?),
    };
    let pid = running.process.as_ref().map(crate::systems::Process::pid);
    settle(pid)?;
    let cpu_before = pid.map(process::cpu_seconds).transpose()?;
    let disk_before = pid.and_then(process::disk_written_bytes);
    let set_bytes = case.set_bytes_of(system, plan.quick);
    let fio = fio::run(&running.target, set_bytes, case.job_of(system, plan.seconds), round)?;
    let cpu_after = pid.map(process::cpu_seconds).transpose()?;
    let disk_after = pid.and_then(process::disk_written_bytes);
    Ok(Sample {
        fio,
        cpu_seconds: cpu_after.zip(cpu_before).map(|(after, before)| after - before),
        disk_written_bytes: disk_after.zip(disk_before).map(|(after, before)| after.saturating_sub(before)),
    })
}

fn start(plan: &Plan, case: &Case, system: System) -> Result<Running> {
    let running = system.start(plan, device_bytes(plan.quick))?;
    let is_raw = system == System::RawDisk;
    if !running.is_filled && (case.state == State::Filled || is_raw) {
        println!("  writing the working set once: {}", system.name());
        // Later cases use the raw file too, so all of it is written.
        let bytes = if is_raw { device_bytes(plan.quick) } else { case.set_bytes_of(system, plan.quick) };
        fio::run(&running.target, bytes, Job::Fill, 0).context("writing the working set")?;
    }
    Ok(running)
}

/// Waits until a server is idle, at most ten seconds.
fn settle(pid: Option<u32>) -> Result<()> {
    const STEP: Duration = Duration::from_millis(250);
    let Some(pid) = pid else { return Ok(()) };
    let start = Instant::now();
    let mut before = process::cpu_seconds(pid)?;
    while start.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(STEP);
        let now = process::cpu_seconds(pid)?;
        if now - before < 0.02 {
            break;
        }
        before = now;
    }
    Ok(())
}

/// Disk space that a case may need. At its start, our server demands that its whole disk limit is free.
fn wanted_bytes(case: &Case, quick: bool, has_raw_disk: bool) -> u64 {
    let mut wanted_bytes: u64 = 1 << 30;
    for system in &case.systems {
        wanted_bytes += match system {
            _ if system.cache().is_some() => system.cache().map_or(0, |cache| cache.disk_bytes),
            System::NbdkitCow | System::QemuNbdWriteback | System::QemuNbdDirect | System::QsdQcow2 => {
                case.set_bytes
            }
            System::RawDisk if has_raw_disk => 0,
            System::RawDisk => device_bytes(quick),
            _ => 0,
        };
    }
    wanted_bytes
}

/// Fails if the disk does not have enough space for the case.
pub fn check_space(plan: &Plan, wanted_bytes: u64) -> Result<()> {
    let space =
        rustix::fs::statvfs(&plan.work_dir).context("cannot read the free space of the work directory")?;
    let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
    if free_bytes < wanted_bytes {
        let text = format!(
            "{} has {} free, but this case may need {}; free some space, choose another disk with --work-dir, or use --quick",
            plan.work_dir.display(),
            headwater_block::size::format(free_bytes),
            headwater_block::size::format(wanted_bytes)
        );
        return Err(Unavailable(text).into());
    }
    Ok(())
}

fn print_sample(round: usize, rounds: usize, system: System, sample: &Sample) {
    let cpu =
        sample.cpu_us_per_operation().map_or_else(String::new, |us| format!("{us:7.2} us CPU an operation"));
    let round = round + 1;
    println!("  round {round}/{rounds}  {:<26}{:>10.0} IOPS  {cpu}", system.name(), sample.fio.iops);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_asks_for_all_that_our_server_will_and_for_no_more_than_the_documents_say() {
        for case in crate::cases::all(false) {
            let wanted_bytes = wanted_bytes(&case, false, false);
            let ours = case.systems.iter().filter_map(|system| Some(system.cache()?.disk_bytes));
            assert!(
                ours.sum::<u64>() < wanted_bytes && wanted_bytes <= 45 << 30,
                "{}: {wanted_bytes}",
                case.name
            );
        }
    }

    fn sample(operations: u64, cpu_seconds: f64, disk_mib: u64) -> Sample {
        let fio = Measured {
            iops: 100.0,
            operations,
            written_bytes: 100 << 20,
            seconds: 10.0,
            write_mean_us: 1.0,
            write_p99_us: 2.0,
            read_p99_us: 3.0,
        };
        Sample { fio, cpu_seconds: Some(cpu_seconds), disk_written_bytes: Some(disk_mib << 20) }
    }

    #[test]
    fn cpu_is_counted_by_operation_and_amplification_by_byte() {
        let sample = sample(2_000_000, 4.0, 105);
        assert_eq!(sample.cpu_us_per_operation(), Some(2.0));
        assert_eq!(sample.write_amplification(), Some(1.05));
    }

    #[test]
    fn a_result_has_a_figure_of_each_round() {
        let samples = vec![sample(100, 3.0, 1), sample(100, 1.0, 1), sample(100, 2.0, 1)];
        let result = SystemResult { system: "x", samples, peak_resident_bytes: None };
        assert_eq!(result.figures(|s| s.cpu_seconds), [3.0, 1.0, 2.0]);
        assert!(result.figures(|_| None).is_empty());
    }
}
