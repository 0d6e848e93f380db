//! Runs fio: builds the command line of a job, and parses the JSON result.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// The device under test.
#[derive(Clone, Debug)]
pub enum Target {
    /// An NBD server on a unix socket.
    Nbd(PathBuf),
    /// A vhost-user-blk server. fio cannot drive it; our own client sends the same requests.
    VhostUser(PathBuf),
    /// A file, opened with O_DIRECT.
    File(PathBuf),
}

/// Alignment and length of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    /// 4 KiB, aligned to 4 KiB.
    Blocks,
    /// 4 KiB, aligned to 512 bytes only: most requests span two blocks.
    Sectors,
    /// 512 bytes to 64 KiB, aligned to 512 bytes, like a guest with databases on an unaligned partition.
    Sizes,
}

/// Sizes of [`Requests::Sizes`], with their shares in percent.
const SIZES: &str = "512/10:1k/5:2k/5:4k/50:8k/10:16k/10:64k/10";

/// The load.
#[derive(Clone, Copy, Debug)]
pub enum Job {
    /// The VDI mix: 80 % writes, `percentage_random` of all requests at random offsets.
    Mix {
        /// Alignment and length of requests.
        requests: Requests,
        /// 80 for the VDI mix, 100 for its random variant.
        percentage_random: u8,
        /// Requests in flight.
        depth: u32,
        /// The duration, in seconds.
        seconds: u32,
    },
    /// Writes every block of the working set once, in order.
    Fill,
    /// Writes `total_bytes` in 4 KiB blocks at random offsets.
    RandomWrites {
        /// Bytes in total.
        total_bytes: u64,
    },
    /// The mix with requests of [`LARGE_BYTES`] at random offsets, by several clients.
    Large {
        /// The number of clients, each on a connection of its own.
        clients: u32,
        /// Requests in flight for each client.
        depth: u32,
        /// Bytes in total.
        total_bytes: u64,
    },
}

/// Length of a request of [`Job::Large`], in bytes.
pub const LARGE_BYTES: u64 = 1 << 20;

/// The result of one fio run. `iops` and `operations` are the sums of reads and writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Reads and writes per second.
    pub iops: f64,
    /// Number of reads and writes.
    pub operations: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Mean latency of writes, in microseconds.
    pub write_mean_us: f64,
    /// 99th percentile of write latency, in microseconds.
    pub write_p99_us: f64,
    /// 99th percentile of read latency, in microseconds.
    pub read_p99_us: f64,
}

/// Runs a job on the first `set_bytes` of the target. An equal `seed` gives equal offsets.
pub fn run(target: &Target, set_bytes: u64, job: Job, seed: usize) -> Result<Measured> {
    if let Target::VhostUser(socket) = target {
        return crate::vhost::Client::connect(socket)?.run(set_bytes, job, seed);
    }
    let output = Command::new("fio")
        .args(arguments(target, set_bytes, job, seed))
        .stdin(Stdio::null())
        .output()
        .context("cannot run fio; is it installed?")?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("fio failed ({}): {}", output.status, last_line(&stderr, &stdout));
    }
    parse(&stdout).with_context(|| format!("fio printed: {}", last_line(&stderr, &stdout)))
}

/// fio's engine for files on this host: io_uring, or libaio if a container forbids io_uring.
pub fn file_engine(probe: &Path) -> &'static str {
    static ENGINE: std::sync::OnceLock<&str> = std::sync::OnceLock::new();
    ENGINE.get_or_init(|| {
        let status = Command::new("fio")
            .args([
                "--name=probe",
                "--ioengine=io_uring",
                "--rw=write",
                "--bs=4k",
                "--size=64k",
                "--direct=1",
            ])
            .arg(format!("--filename={}", probe.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        let works = status.is_ok_and(|status| status.success());
        // If the probe file cannot be removed here, it is removed with the work directory.
        let _ = std::fs::remove_file(probe);
        if works { "io_uring" } else { "libaio" }
    })
}

/// A read load on an image over NBD.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Length of a request, in bytes.
    pub block_bytes: u64,
    /// Number of concurrent readers, each on a connection of its own.
    pub readers: u32,
    /// Requests in flight for each reader.
    pub depth: u32,
    /// Whether offsets are random; otherwise each reader reads from the first byte to the last.
    pub random: bool,
    /// The duration in seconds; `None`: each reader reads everything once.
    pub seconds: Option<u32>,
}

/// The result of a read load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadRate {
    bytes: u64,
    operations: u64,
    seconds: f64,
}

impl ReadRate {
    /// Megabytes (10^6 bytes) that were read.
    pub fn megabytes(&self) -> f64 {
        u32::try_from(self.bytes / 1000).map_or(f64::MAX, |kilobytes| f64::from(kilobytes) / 1e3)
    }

    /// Megabytes (10^6 bytes) per second.
    pub fn megabytes_per_s(&self) -> f64 {
        self.megabytes() / self.seconds
    }

    /// Requests per second.
    pub fn iops(&self) -> f64 {
        u32::try_from(self.operations).map_or(f64::MAX, f64::from) / self.seconds
    }
}

/// Reads the first `set_bytes` of an NBD export.
pub fn read(uri: &str, set_bytes: u64, reading: Reading) -> Result<ReadRate> {
    let mut command = Command::new("fio");
    command.args([
        "--name=read",
        "--output-format=json",
        "--ioengine=nbd",
        "--group_reporting=1",
        "--norandommap=1",
    ]);
    command.args([
        format!("--uri={uri}"),
        format!("--size={set_bytes}"),
        format!("--bs={}", reading.block_bytes),
    ]);
    command.args([format!("--numjobs={}", reading.readers), format!("--iodepth={}", reading.depth)]);
    command.arg(if reading.random { "--rw=randread" } else { "--rw=read" });
    if let Some(seconds) = reading.seconds {
        command.args(["--time_based=1".to_owned(), format!("--runtime={seconds}")]);
    }
    let output = command.stdin(Stdio::null()).output().context("cannot run fio; is it installed?")?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("fio failed ({}): {}", output.status, last_line(&stderr, &stdout));
    }
    let job = job_of(&stdout).with_context(|| format!("fio printed: {}", last_line(&stderr, &stdout)))?;
    let seconds = std::time::Duration::from_millis(job.read.runtime).as_secs_f64();
    Ok(ReadRate { bytes: job.read.io_bytes, operations: job.read.total_ios, seconds })
}

fn last_line<'a>(stderr: &'a str, stdout: &'a str) -> &'a str {
    let said = |text: &'a str| text.lines().rev().find(|line| !line.trim().is_empty());
    said(stderr).or_else(|| said(stdout)).unwrap_or("nothing")
}

fn arguments(target: &Target, set_bytes: u64, job: Job, seed: usize) -> Vec<String> {
    let mut all = vec!["--name=measure".to_owned(), "--output-format=json".to_owned()];
    let mut add = |text: String| all.push(text);
    match target {
        Target::Nbd(socket) => {
            add("--ioengine=nbd".into());
            add(format!("--uri=nbd+unix:///?socket={}", socket.display()));
        }
        // Handled in `run`: fio does not drive this target.
        Target::VhostUser(_) => {}
        Target::File(path) => {
            add(format!("--ioengine={}", file_engine(&path.with_extension("probe"))));
            add("--direct=1".into());
            add("--allow_file_create=0".into());
            add(format!("--filename={}", path.display()));
        }
    }
    add(format!("--size={set_bytes}"));
    add(format!("--randseed={}", seed + 1));
    // New random data in each buffer, so that compression gains nothing.
    add("--refill_buffers=1".into());
    match job {
        Job::Mix { requests, percentage_random, depth, seconds } => {
            add(match requests {
                Requests::Blocks | Requests::Sectors => "--bs=4k".into(),
                Requests::Sizes => format!("--bssplit={SIZES}"),
            });
            if requests != Requests::Blocks {
                add("--blockalign=512".into());
            }
            add("--rw=randrw".into());
            add("--rwmixwrite=80".into());
            add(format!("--percentage_random={percentage_random}"));
            add("--norandommap=1".into());
            add(format!("--iodepth={depth}"));
            add("--time_based=1".into());
            add(format!("--runtime={seconds}"));
        }
        Job::Fill => {
            add("--bs=256k".into());
            add("--rw=write".into());
            add("--iodepth=8".into());
        }
        Job::RandomWrites { total_bytes } => {
            add("--bs=4k".into());
            add("--rw=randwrite".into());
            add("--norandommap=1".into());
            add("--iodepth=16".into());
            add(format!("--io_size={total_bytes}"));
        }
        Job::Large { clients, depth, total_bytes } => {
            add(format!("--bs={LARGE_BYTES}"));
            add("--rw=randrw".into());
            add("--rwmixwrite=80".into());
            add("--norandommap=1".into());
            add(format!("--iodepth={depth}"));
            add(format!("--numjobs={clients}"));
            add("--group_reporting=1".into());
            add(format!("--io_size={}", total_bytes / u64::from(clients.max(1))));
        }
    }
    all
}

#[derive(Deserialize)]
struct Report {
    jobs: Vec<JobReport>,
}

#[derive(Deserialize)]
struct JobReport {
    error: i64,
    read: Direction,
    write: Direction,
}

#[derive(Deserialize)]
struct Direction {
    io_bytes: u64,
    iops: f64,
    runtime: u64,
    total_ios: u64,
    clat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    mean: f64,
    #[serde(default)]
    percentile: std::collections::BTreeMap<String, f64>,
}

impl Latency {
    fn p99_us(&self) -> f64 {
        let p99 = self.percentile.iter().find(|(name, _)| name.starts_with("99.00"));
        p99.map_or(0.0, |(_, ns)| ns / 1000.0)
    }
}

/// Parses fio's JSON. Other lines may come before it.
fn job_of(output: &str) -> Result<JobReport> {
    let start = output.find("\n{").map(|at| at + 1).or_else(|| output.starts_with('{').then_some(0));
    let json = &output[start.context("fio printed no JSON")?..];
    let mut documents = serde_json::Deserializer::from_str(json).into_iter::<Report>();
    let report =
        documents.next().context("fio printed no JSON")?.context("fio's JSON has an unexpected form")?;
    let jobs = report.jobs.len();
    let Ok([job]) = <[JobReport; 1]>::try_from(report.jobs) else { bail!("fio reported {jobs} jobs, not 1") };
    if job.error != 0 {
        bail!("fio reports error {}", job.error);
    }
    if job.read.total_ios + job.write.total_ios == 0 {
        bail!("fio performed no operation");
    }
    Ok(job)
}

fn parse(output: &str) -> Result<Measured> {
    let job = job_of(output)?;
    let operations = job.read.total_ios + job.write.total_ios;
    let runtime_ms = job.read.runtime.max(job.write.runtime);
    Ok(Measured {
        iops: job.read.iops + job.write.iops,
        operations,
        written_bytes: job.write.io_bytes,
        seconds: std::time::Duration::from_millis(runtime_ms).as_secs_f64(),
        write_mean_us: job.write.clat_ns.mean / 1000.0,
        write_p99_us: job.write.clat_ns.p99_us(),
        read_p99_us: job.read.clat_ns.p99_us(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = r#"fio: connected to NBD server
{
  "fio version" : "fio-3.33",
  "jobs" : [ { "jobname" : "measure", "error" : 0,
    "read"  : { "io_bytes" : 409600, "iops" : 33.5, "runtime" : 3000, "total_ios" : 100,
                "clat_ns" : { "mean" : 1500.0, "percentile" : { "50.000000" : 1000, "99.000000" : 9000 } } },
    "write" : { "io_bytes" : 1638400, "iops" : 133.5, "runtime" : 3001, "total_ios" : 400,
                "clat_ns" : { "mean" : 2500.0, "percentile" : { "99.000000" : 12000, "99.900000" : 90000 } } },
    "trim"  : { "io_bytes" : 0, "iops" : 0.0, "runtime" : 0, "total_ios" : 0, "clat_ns" : { "mean" : 0.0 } } } ]
}
"#;

    #[test]
    fn reads_and_writes_are_summed() {
        let measured = parse(SAMPLE).unwrap();
        assert_eq!(measured.iops, 167.0);
        assert_eq!(measured.operations, 500);
        assert_eq!(measured.written_bytes, 1_638_400);
        assert_eq!(measured.seconds, 3.001);
        assert_eq!((measured.write_mean_us, measured.write_p99_us, measured.read_p99_us), (2.5, 12.0, 9.0));
    }

    #[test]
    fn reading_has_a_rate() {
        let rate = ReadRate { bytes: 3_000_000_000, operations: 1000, seconds: 2.0 };
        assert_eq!((rate.megabytes_per_s(), rate.iops()), (1500.0, 500.0));
        assert_eq!(job_of(SAMPLE).unwrap().read.io_bytes, 409_600);
    }

    #[test]
    fn a_job_that_failed_or_did_nothing_is_no_result() {
        let failed = SAMPLE.replace("\"error\" : 0", "\"error\" : 5");
        assert!(parse(&failed).unwrap_err().to_string().contains("error 5"));
        let idle = SAMPLE.replace("\"total_ios\" : 100", "\"total_ios\" : 0").replace(": 400,", ": 0,");
        assert!(parse(&idle).unwrap_err().to_string().contains("no operation"));
        assert!(parse("fio: nothing").is_err());
        assert!(parse("{ \"jobs\" : [] }").unwrap_err().to_string().contains("0 jobs"));
    }

    #[test]
    fn the_mix_is_the_one_of_the_studies() {
        let requests = Requests::Blocks;
        let job = Job::Mix { requests, percentage_random: 80, depth: 16, seconds: 10 };
        let all = arguments(&Target::Nbd("/x/s".into()), 1 << 30, job, 0);
        for wanted in [
            "--bs=4k",
            "--rw=randrw",
            "--rwmixwrite=80",
            "--percentage_random=80",
            "--refill_buffers=1",
            "--iodepth=16",
            "--size=1073741824",
            "--uri=nbd+unix:///?socket=/x/s",
        ] {
            assert!(all.iter().any(|argument| argument == wanted), "{wanted}");
        }
    }
}
