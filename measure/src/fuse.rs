//! Compares our FUSE file with those of `qemu-storage-daemon`: without storage, on a raw file, and on a qcow2
//! overlay.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::fio::{self, Job, Requests, Target};
use crate::systems::Process;
use crate::targets::Unavailable;
use crate::{Plan, process};

/// Name for `--only`.
pub const NAME: &str = "fuse";
/// Title of the case.
pub const TITLE: &str = "as a file (FUSE): 4 KiB random direct, 80 % writes, set fits in RAM, depth 16";

/// The peer without storage: it discards writes.
const NULL: &str = "qemu-storage-daemon, null-co";
/// The peer with a raw file in the page cache.
const FILE: &str = "qemu-storage-daemon, raw file";
/// The peer with an overlay of changed blocks.
const OVERLAY: &str = "qemu-storage-daemon, qcow2";

/// The results of one system.
#[derive(Clone, Debug, Serialize)]
pub struct FuseResult {
    /// The name of the system.
    pub system: &'static str,
    /// Reads and writes per second, in each round.
    pub iops: Vec<f64>,
    /// CPU time of the server per operation in microseconds, in each round.
    pub cpu_us: Vec<f64>,
}

/// A served file, and its server process.
struct Served {
    process: Option<Process>,
    file: PathBuf,
    folder: PathBuf,
}

impl Drop for Served {
    fn drop(&mut self) {
        // Ending the process unmounts the file system.
        drop(self.process.take());
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            eprintln!("cannot remove {}: {error}", self.folder.display());
        }
    }
}

/// Measures all systems in turn, in each round.
pub fn run(plan: &Plan) -> Result<Vec<FuseResult>> {
    println!("\n{NAME}: {TITLE}");
    if !Path::new("/dev/fuse").exists() {
        return Err(Unavailable("there is no /dev/fuse; 'modprobe fuse' loads the driver".into()).into());
    }
    // The engine is probed in another directory, because no file can be created next to the measured one.
    fio::file_engine(&plan.work_dir.join("fuse.probe"));
    let bytes: u64 = if plan.quick { 256 << 20 } else { 1 << 30 };
    let mut systems = Vec::new();
    for name in ["headwater", NULL, FILE, OVERLAY] {
        let served = start(plan, name, bytes).with_context(|| format!("starting {name}"))?;
        println!("  writing the working set once: {name}");
        fio::run(&Target::File(served.file.clone()), bytes, Job::Fill, 0)
            .context("writing the working set")?;
        systems.push((name, served));
    }
    let mut results: Vec<FuseResult> = systems
        .iter()
        .map(|(system, _)| FuseResult { system, iops: Vec::new(), cpu_us: Vec::new() })
        .collect();
    for round in 0..plan.rounds {
        for turn in 0..systems.len() {
            let index = (round + turn) % systems.len();
            let (name, served) = &systems[index];
            let pid = served.process.as_ref().context("the server has a process")?.pid();
            let before = process::cpu_seconds(pid)?;
            let job = Job::Mix {
                requests: Requests::Blocks,
                percentage_random: 100,
                depth: 16,
                seconds: plan.seconds,
            };
            let measured = fio::run(&Target::File(served.file.clone()), bytes, job, round)
                .with_context(|| format!("measuring {name}"))?;
            let cpu = process::cpu_seconds(pid)? - before;
            let cpu_us = cpu * 1e6 / (measured.iops * measured.seconds);
            let (round, rounds, iops) = (round + 1, plan.rounds, measured.iops);
            println!(
                "  round {round}/{rounds}  {name:<28}{iops:>10.0} IOPS  {cpu_us:7.2} us CPU an operation"
            );
            results[index].iops.push(iops);
            results[index].cpu_us.push(cpu_us);
        }
    }
    Ok(results)
}

fn start(plan: &Plan, name: &'static str, bytes: u64) -> Result<Served> {
    let folder = plan.work_dir.join(format!("fuse-{}", name.replace([' ', ','], "-")));
    std::fs::create_dir_all(folder.join("mount"))?;
    let folder = folder.canonicalize()?;
    let file = folder.join("mount/disk");
    let mut served = Served { process: None, file: file.clone(), folder: folder.clone() };
    let mut command;
    if name == "headwater" {
        command = Command::new(&plan.headwater);
        command.args(["export", &format!("null:{bytes}"), "--cache", "ram"]);
        command.args(["--ram", &(bytes * 2).to_string()]);
        command.arg("--fuse").arg(folder.join("mount"));
    } else {
        // The peer mounts onto an existing file.
        std::fs::File::create(&file)?;
        command = Command::new("qemu-storage-daemon");
        let node = match name {
            NULL => format!("null-co,node-name=disk,size={bytes},read-zeroes=on"),
            FILE => {
                let raw = folder.join("disk.raw");
                std::fs::File::create(&raw)?.set_len(bytes)?;
                format!("file,node-name=disk,filename={}", raw.display())
            }
            _ => {
                let overlay = overlay(&folder, bytes)?;
                command.args(["--blockdev", &format!("file,node-name=file,filename={}", overlay.display())]);
                "qcow2,node-name=disk,file=file".to_owned()
            }
        };
        command.args(["--blockdev", &node, "--export"]).arg(format!(
            "type=fuse,id=disk,node-name=disk,mountpoint={},writable=on,allow-other=off",
            file.display()
        ));
    }
    let process = Process::start(&mut command, name)?;
    let begun = Instant::now();
    while std::fs::metadata(&file).map_or(0, |metadata| metadata.len()) != bytes {
        if begun.elapsed() > Duration::from_secs(30) {
            bail!("the file did not appear within 30 s: {}", process.last_line());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    served.process = Some(process);
    Ok(served)
}

fn overlay(folder: &Path, bytes: u64) -> Result<PathBuf> {
    let (base, overlay) = (folder.join("base.raw"), folder.join("overlay.qcow2"));
    std::fs::File::create(&base)?.set_len(bytes)?;
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&overlay);
    let output = command.output().context("cannot run qemu-img; apt-get install qemu-utils")?;
    if !output.status.success() {
        bail!("qemu-img create failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(overlay)
}
