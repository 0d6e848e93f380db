//! Measures CPU time and memory of one process that serves many idle machines.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::systems::Process;
use crate::vhost::Client;
use crate::{Plan, process};

/// Name for `--only`.
pub const NAME: &str = "idle-64";
/// Title of the case.
pub const TITLE: &str = "64 machines over vhost-user in one process, each having read a block and idle since";

/// Number of machines.
pub const MACHINES: u32 = 64;

/// Time for the threads to become idle before the measurement.
const SETTLE: Duration = Duration::from_secs(2);

/// CPU time is counted in ticks of 10 ms, so a shorter measurement could not resolve one percent.
const LEAST_SECONDS: u32 = 10;

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct IdleResult {
    /// Number of machines.
    pub machines: u32,
    /// CPU use of the idle process, in percent of one processor.
    pub cpu_percent: f64,
    /// Resident memory of the process, without the memory of the machines themselves.
    pub resident_bytes: u64,
}

/// Starts one process with many machines, connects to all, and sends no further requests.
pub fn run(plan: &Plan) -> Result<IdleResult> {
    println!("\n{NAME}: {TITLE}");
    let folder = plan.work_dir.join(NAME);
    std::fs::create_dir_all(&folder)?;
    let sockets: Vec<PathBuf> =
        (0..MACHINES).map(|number| plan.sockets.join(format!("idle-{number}"))).collect();
    let mut command = Command::new(&plan.headwater);
    command.args(["export", "null:10G", "--cache", "ram+disk", "--ram", "64M", "--disk", "1G"]);
    command.arg("--cache-dir").arg(&folder);
    for socket in &sockets {
        command.arg("--vhost-user").arg(socket);
    }
    let server = Process::start(&mut command, "headwater")?;
    let begun = Instant::now();
    while !sockets.iter().all(|socket| socket.exists()) {
        if begun.elapsed() > Duration::from_secs(30) {
            bail!("not all sockets appeared within 30 s: {}", server.last_line());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut machines = Vec::new();
    for socket in &sockets {
        let mut machine = Client::connect(socket)?;
        machine.read_once()?;
        machines.push(machine);
    }
    std::thread::sleep(SETTLE);
    let before = process::cpu_seconds(server.pid())?;
    let seconds = plan.seconds.max(LEAST_SECONDS);
    std::thread::sleep(Duration::from_secs(seconds.into()));
    let cpu_percent = (process::cpu_seconds(server.pid())? - before) / f64::from(seconds) * 100.0;
    let resident_bytes = process::private_resident_bytes(server.pid())?;
    drop(machines);
    println!("  {cpu_percent:.2} % CPU in {seconds} s, {} MiB resident", resident_bytes >> 20);
    Ok(IdleResult { machines: MACHINES, cpu_percent, resident_bytes })
}
