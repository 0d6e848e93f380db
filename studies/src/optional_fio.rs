//! Runs the three fio jobs of study 004 on the local disk, with and without the page cache, if fio is installed.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use headwater_report::page::Column;
use serde::Serialize;
use serde_json::Value;

use crate::bundle::Table;
use crate::started::{Directory, Started, is_installed};

const MIB: u64 = 1 << 20;

/// A job of the original study: block size, bytes for each worker, workers, depth.
#[derive(Clone, Copy, Debug)]
struct Job {
    title: &'static str,
    block: &'static str,
    bytes: u64,
    workers: u64,
    depth: u32,
}

const JOBS: [Job; 3] = [
    Job { title: "4 KiB, 1 worker, depth 1", block: "4k", bytes: 4096 * MIB, workers: 1, depth: 1 },
    Job { title: "64 KiB, 16 workers, depth 16", block: "64k", bytes: 256 * MIB, workers: 16, depth: 16 },
    Job { title: "1 MiB, 1 worker, depth 1", block: "1m", bytes: 16_384 * MIB, workers: 1, depth: 1 },
];

/// The result of a job.
#[derive(Clone, Debug, Serialize)]
pub struct Done {
    job: &'static str,
    is_direct: bool,
    mib_per_s: f64,
    iops: f64,
    /// Duration, including the flush at the end.
    seconds: f64,
}

/// Runs each job for this number of seconds. The text says why jobs are missing.
pub fn run(
    dir: &Path,
    seconds: u64,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str),
) -> (Vec<Done>, Option<String>) {
    let mut done = Vec::new();
    if !is_installed("fio") {
        return (done, Some("fio is not installed, so its three jobs are skipped".into()));
    }
    for job in &JOBS {
        for is_direct in [false, true] {
            if stop.load(Ordering::Relaxed) {
                return (done, Some("the study was interrupted before the last job of fio".into()));
            }
            let how = if is_direct { "without the page cache" } else { "through the page cache" };
            progress(&format!("fio, {}, {how}", job.title));
            match one(dir, job, is_direct, seconds, stop) {
                Ok(Some(result)) => done.push(result),
                Ok(None) => {
                    return (done, Some("the study was interrupted before the last job of fio".into()));
                }
                Err(error) => return (done, Some(format!("fio failed ({}): {error:#}", job.title))),
            }
        }
    }
    (done, None)
}

fn one(dir: &Path, job: &Job, is_direct: bool, seconds: u64, stop: &AtomicBool) -> Result<Option<Done>> {
    let stat = rustix::fs::statvfs(dir).context("cannot read the free space")?;
    let half_bytes = stat.f_bavail.saturating_mul(stat.f_frsize) / 2 / job.workers;
    // The files have names, because fio opens them by name. They are deleted at the end.
    let files = Directory::new_in(dir)?;
    let mut command = Command::new("fio");
    command
        .args([
            "--name=study",
            "--output-format=json",
            "--ioengine=posixaio",
            "--rw=randwrite",
            "--time_based",
        ])
        .args(["--end_fsync=1", "--group_reporting=1"])
        .args([format!("--bs={}", job.block), format!("--size={}", job.bytes.min(half_bytes / MIB * MIB))])
        .args([format!("--numjobs={}", job.workers), format!("--iodepth={}", job.depth)])
        .args([format!("--runtime={seconds}"), format!("--direct={}", u8::from(is_direct))])
        .arg(format!("--directory={}", files.path().display()));
    let output = Started::start("fio", &mut command)?.output(|| stop.load(Ordering::Relaxed))?;
    let Some(output) = output else { return Ok(None) };
    let (bytes, operations, elapsed_s) = parse(&output)?;
    Ok(Some(Done {
        job: job.title,
        is_direct,
        mib_per_s: bytes / MIB as f64 / elapsed_s,
        iops: operations / elapsed_s,
        seconds: elapsed_s,
    }))
}

/// Bytes per second, operations per second and duration of the writes.
fn parse(output: &str) -> Result<(f64, f64, f64)> {
    let begin = output.find('{').context("fio printed no JSON")?;
    let json: Value = serde_json::from_str(&output[begin..]).context("fio's JSON has an unexpected form")?;
    let write = &json["jobs"][0]["write"];
    let number = |name: &str| write[name].as_f64().with_context(|| format!("fio's JSON has no field {name}"));
    let (bytes, operations, runtime_ms) = (number("io_bytes")?, number("total_ios")?, number("runtime")?);
    if runtime_ms <= 0.0 || operations <= 0.0 {
        bail!("fio performed no operation");
    }
    Ok((bytes, operations, runtime_ms / 1000.0))
}

/// The table of the jobs.
pub fn table(done: &[Done]) -> Table {
    let head = vec![
        Column::Text("Job of fio, random writes"),
        Column::Text("Path"),
        Column::Figure("MiB/s"),
        Column::Figure("IOPS"),
        Column::Figure("Seconds with the flush"),
    ];
    let row = |done: &Done| {
        vec![
            done.job.to_owned(),
            if done.is_direct { "without the page cache" } else { "through the page cache" }.to_owned(),
            format!("{:.1}", done.mib_per_s),
            headwater_report::number::grouped(done.iops),
            format!("{:.1}", done.seconds),
        ]
    };
    Table {
        caption: "fio on the local disk, not on a model".into(),
        head,
        rows: done.iter().map(row).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_writes_of_fio_are_read_from_its_json() {
        let text = "note: both iodepth >= 1\n{\"jobs\": [{\"write\": {\"io_bytes\": 8388608, \"total_ios\": 128, \"runtime\": 2000}}]}";
        assert_eq!(parse(text).unwrap(), (8_388_608.0, 128.0, 2.0));
        for (broken, why) in
            [("nothing", "no JSON"), ("{}", "has no field"), (&text.replace("128", "0"), "no operation")]
        {
            assert!(format!("{:#}", parse(broken).unwrap_err()).contains(why), "{broken}");
        }
    }
}
