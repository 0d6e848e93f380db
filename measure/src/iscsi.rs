//! Compares random reads over iSCSI with tgt, on a file in the page cache and on its null store. The client is
//! libiscsi's `iscsi-perf`.
//!
//! Reads only, because `iscsi-perf` does not write.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::fio::{self, Job, Target};
use crate::systems::Process;
use crate::targets::Unavailable;
use crate::{Plan, process};

/// Name for `--only`.
pub const NAME: &str = "iscsi";
/// Title of the case.
pub const TITLE: &str = "over iSCSI: 4 KiB random reads, set fits in RAM, depth 16";

const DEPTH: &str = "16";
const TARGET: &str = "iqn.2026-01.org.example:measured";

/// The peer tgt on a file.
pub const TGT_FILE: &str = "tgt, file in page cache";
/// The peer tgt without storage.
pub const TGT_NULL: &str = "tgt, null store";

/// The results of one system.
#[derive(Clone, Debug, Serialize)]
pub struct IscsiResult {
    /// The name of the system.
    pub system: &'static str,
    /// Reads per second, in each round.
    pub iops: Vec<f64>,
    /// CPU time of the server per read in microseconds, in each round.
    pub cpu_us: Vec<f64>,
}

/// Measures all systems in turn, in each round.
pub fn run(plan: &Plan) -> Result<Vec<IscsiResult>> {
    println!("\n{NAME}: {TITLE}");
    for (program, package) in [("iscsi-perf", "libiscsi-bin"), ("tgtd", "tgt")] {
        if !process::is_installed(program) {
            let text = format!(
                "{program} is not installed; `make compare` installs it, or: apt-get install {package}"
            );
            return Err(Unavailable(text).into());
        }
    }
    let bytes: u64 = if plan.quick { 256 << 20 } else { 1 << 30 };
    let ours = start_ours(plan, bytes)?;
    let tgt = Tgt::start(plan, bytes)?;
    let systems = [
        ("headwater", &ours.process, ours.url()),
        (TGT_FILE, &tgt.process, tgt.url(1)),
        (TGT_NULL, &tgt.process, tgt.url(2)),
    ];
    let mut results: Vec<IscsiResult> = systems
        .iter()
        .map(|(system, ..)| IscsiResult { system, iops: Vec::new(), cpu_us: Vec::new() })
        .collect();
    for round in 0..plan.rounds {
        for turn in 0..systems.len() {
            let index = (round + turn) % systems.len();
            let (name, process, url) = &systems[index];
            let before = process::cpu_seconds(process.pid())?;
            let iops = perf(url, plan.seconds).with_context(|| format!("measuring {name}"))?;
            let cpu = process::cpu_seconds(process.pid())? - before;
            let cpu_us = cpu * 1e6 / (iops * f64::from(plan.seconds));
            let round = round + 1;
            let rounds = plan.rounds;
            println!(
                "  round {round}/{rounds}  {name:<26}{iops:>10.0} IOPS  {cpu_us:7.2} us CPU an operation"
            );
            results[index].iops.push(iops);
            results[index].cpu_us.push(cpu_us);
        }
    }
    Ok(results)
}

/// Headwater's server. The working set was written over NBD.
struct Ours {
    process: Process,
    folder: PathBuf,
    port: u16,
}

impl Ours {
    fn url(&self) -> String {
        format!("iscsi://127.0.0.1:{}/{TARGET}/0", self.port)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        remove(&self.folder);
    }
}

fn start_ours(plan: &Plan, bytes: u64) -> Result<Ours> {
    let folder = plan.work_dir.join("iscsi");
    std::fs::create_dir_all(&folder)?;
    let socket = plan.sockets.join("iscsi-nbd.sock");
    let _ = std::fs::remove_file(&socket);
    let port = free_port()?;
    let mut command = Command::new(&plan.headwater);
    command.args(["export", &format!("null:{bytes}"), "--cache", "ram", "--ram", &(bytes * 2).to_string()]);
    command.arg("--cache-dir").arg(&folder).arg("--nbd").arg(format!("unix:{}", socket.display()));
    command.args(["--iscsi", &format!("tcp:127.0.0.1:{port}"), "--iscsi-target", TARGET]);
    let ours = Ours { process: Process::start(&mut command, "headwater")?, folder, port };
    wait_for_port(port, &ours.process)?;
    println!("  writing the working set once: headwater");
    fio::run(&Target::Nbd(socket), bytes, Job::Fill, 0).context("writing the working set")?;
    Ok(ours)
}

/// tgt with one target: LUN 1 is a file, LUN 2 has no storage.
struct Tgt {
    process: Process,
    folder: PathBuf,
    port: u16,
    control: String,
}

impl Tgt {
    fn start(plan: &Plan, bytes: u64) -> Result<Self> {
        let folder = plan.work_dir.join("tgt");
        std::fs::create_dir_all(&folder)?;
        let port = free_port()?;
        // An own control socket, so that another tgtd on this host is not disturbed.
        let control = (port % 30_000 + 1_000).to_string();
        let mut command = Command::new("tgtd");
        command.args(["-f", "-C", &control, "--iscsi", &format!("portal=127.0.0.1:{port}")]);
        let tgt = Self { process: Process::start(&mut command, "tgtd")?, folder, port, control };
        wait_for_port(port, &tgt.process)
            .map_err(|error| Unavailable(format!("tgtd does not start on this host: {error:#}")))?;
        let file = tgt.folder.join("disk.raw").display().to_string();
        println!("  writing the working set once: tgt");
        let set = Target::File(PathBuf::from(&file));
        std::fs::File::create(&file)?.set_len(bytes)?;
        fio::run(&set, bytes, Job::Fill, 0).context("writing the working set")?;
        // Read once, so that the file is in the page cache.
        std::io::copy(&mut std::fs::File::open(&file)?, &mut std::io::sink())?;
        let file = Path::new(&file).canonicalize()?.display().to_string();
        tgt.admin(&["--op", "new", "--mode", "target", "--tid", "1", "-T", TARGET])?;
        let unit = ["--op", "new", "--mode", "logicalunit", "--tid", "1"];
        tgt.admin(&[&unit[..], &["--lun", "1", "-b", &file]].concat())?;
        tgt.admin(&[&unit[..], &["--lun", "2", "--bstype", "null", "-b", &file]].concat())?;
        tgt.admin(&["--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL"])?;
        Ok(tgt)
    }

    fn admin(&self, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new("tgtadm");
        command.args(["-C", &self.control, "--lld", "iscsi"]).args(arguments);
        let output = command.output().context("cannot run tgtadm; apt-get install tgt")?;
        if !output.status.success() {
            bail!("tgtadm {arguments:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    fn url(&self, lun: u32) -> String {
        format!("iscsi://127.0.0.1:{}/{TARGET}/{lun}", self.port)
    }
}

impl Drop for Tgt {
    fn drop(&mut self) {
        // tgtd ignores SIGTERM while it has a target.
        let _ = self.admin(&["--op", "delete", "--force", "--mode", "target", "--tid", "1"]);
        let _ =
            Command::new("tgtadm").args(["-C", &self.control, "--op", "delete", "--mode", "system"]).output();
        remove(&self.folder);
    }
}

fn remove(folder: &Path) {
    if let Err(error) = std::fs::remove_dir_all(folder) {
        eprintln!("cannot remove {}: {error}", folder.display());
    }
}

/// A free TCP port of the loopback address.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    Ok(listener.local_addr()?.port())
}

/// Waits until a process listens on the port.
pub fn wait_for_port(port: u16, process: &Process) -> Result<()> {
    let start = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if start.elapsed() > Duration::from_secs(30) {
            bail!(
                "{} does not listen on port {port} after 30 s; its last line: {}",
                process.name(),
                process.last_line()
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Measures reads per second.
fn perf(url: &str, seconds: u32) -> Result<f64> {
    let mut command = Command::new("iscsi-perf");
    command.args(["-r", "-b", "8", "-m", DEPTH, "-t", &seconds.to_string(), url]);
    let output = command.output().context("cannot run iscsi-perf; apt-get install libiscsi-bin")?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    parse(&text).with_context(|| format!("iscsi-perf printed no result: {}", text.trim()))
}

/// The number in the last `iops average 161066 (629 MB/s)`.
fn parse(text: &str) -> Option<f64> {
    let (_, rest) = text.rsplit_once("iops average")?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_average_is_the_figure() {
        let text = "iops current 10 iops average 10 (1 MB/s)\r...\niops average 161066 (629 MB/s)\n";
        assert_eq!(parse(text), Some(161_066.0));
        assert_eq!(parse("login failed"), None);
    }
}
