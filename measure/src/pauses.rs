//! Measures how long disks pause while `headwater upgrade` replaces the disk process, and after `kill -9` of it; and that no answered
//! write is lost. Called for `--pauses`.
//!
//! A daemon serves disks without machines over NBD, all of whose blocks are in RAM. One thread for each disk writes random blocks, one at
//! a time. If its connection ends, it connects again and sends the write without an answer again, as QEMU does. A pause is the longest
//! time between a write and its answer. After the last round each block is read and compared.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use headwater_block::blocking;
use headwater_nbd::Client;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::systems::{self, Process};
use crate::{Plan, statistics};

const BLOCK: usize = 4096;

/// How long is written before a pause, and after it.
const LOAD: Duration = Duration::from_secs(2);
/// How long all disks may take to go on.
const PAUSE_LIMIT: Duration = Duration::from_secs(60);
const START_LIMIT: Duration = Duration::from_secs(60);
const CONNECT_INTERVAL: Duration = Duration::from_millis(1);

/// What happens to the disk process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Nothing,
    Upgrade,
    Kill,
}

impl Cause {
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing happens",
            Self::Upgrade => "upgrade",
            Self::Kill => "kill -9",
        }
    }

    /// The goals: the most milliseconds of the median round, and of the longest one.
    fn goals_ms(self) -> Option<(f64, f64)> {
        match self {
            Self::Nothing => None,
            Self::Upgrade => Some((300.0, 1000.0)),
            Self::Kill => Some((2000.0, 2000.0)),
        }
    }
}

/// One disk under load.
#[derive(Default)]
struct Load {
    answers: AtomicU64,
    longest_ns: AtomicU64,
    is_over: AtomicBool,
}

/// Measures all rounds, and prints a line for each cause. Fails if a write is lost.
pub fn run(plan: &Plan) -> Result<()> {
    let (disks, blocks) = if plan.quick { (8, 2048) } else { (64, 16384) };
    let bytes = disks * blocks * BLOCK as u64;
    println!("\npauses: {disks} disks over NBD with {} MiB in RAM, one write at a time on each", bytes >> 20);
    let daemon = Daemon::start(plan, bytes)?;
    let version = daemon.import(blocks * BLOCK as u64)?;
    let uris = (0..disks).map(|number| daemon.open(number, &version, blocks)).collect::<Result<Vec<_>>>()?;
    let loads: Vec<Load> = uris.iter().map(|_| Load::default()).collect();
    std::thread::scope(|scope| {
        let writers: Vec<_> = (1..)
            .zip(uris.iter().zip(&loads))
            .map(|(seed, (uri, load))| scope.spawn(move || write(uri, load, seed, blocks)))
            .collect();
        let measured = measure(plan, &daemon, &loads, blocks);
        loads.iter().for_each(|load| load.is_over.store(true, Ordering::SeqCst));
        let mut checked = 0;
        for (writer, uri) in writers.into_iter().zip(&uris) {
            let written = writer.join().map_err(|_| anyhow::anyhow!("a writer has panicked"))?;
            // The pauses count even if the disks are bad.
            checked += check(uri, &written?)?;
        }
        measured?;
        println!("  {checked} blocks were read: each has the last write that was answered");
        Ok(())
    })
}

fn measure(plan: &Plan, daemon: &Daemon, loads: &[Load], blocks: u64) -> Result<()> {
    // Each disk is filled first.
    wait_for(loads, blocks, Duration::from_secs(600)).context("the disks cannot be filled")?;
    for cause in [Cause::Nothing, Cause::Upgrade, Cause::Kill] {
        let mut longest = Vec::new();
        let mut medians = Vec::new();
        for _ in 0..plan.rounds {
            loads.iter().for_each(|load| load.longest_ns.store(0, Ordering::SeqCst));
            std::thread::sleep(LOAD);
            daemon.bring_about(plan, cause)?;
            wait_for(loads, 1, PAUSE_LIMIT)?;
            std::thread::sleep(LOAD);
            let ms = |load: &Load| {
                Duration::from_nanos(load.longest_ns.load(Ordering::SeqCst)).as_secs_f64() * 1e3
            };
            let pauses: Vec<f64> = loads.iter().map(ms).collect();
            longest.extend(statistics::range(&pauses).map(|(_, longest)| longest));
            medians.extend(statistics::median(&pauses));
        }
        let median = statistics::median(&longest).context("no round")?;
        let most = statistics::range(&longest).map_or(median, |(_, most)| most);
        let typical = statistics::median(&medians).unwrap_or_default();
        let judged = cause.goals_ms().map_or_else(String::new, |(goal, limit)| {
            let is_reached = median <= goal && most <= limit;
            format!("; goals {goal:.0} and {limit:.0} ms: {}", if is_reached { "reached" } else { "MISSED" })
        });
        println!(
            "  {:<16} longest pause of a disk: median of {} rounds {median:.0} ms, most {most:.0} ms; of half of the disks \
             {typical:.0} ms{judged}",
            cause.name(),
            longest.len()
        );
    }
    Ok(())
}

/// Waits until each disk has had so many more answers.
fn wait_for(loads: &[Load], more: u64, limit: Duration) -> Result<()> {
    let answers = |load: &Load| load.answers.load(Ordering::SeqCst);
    let wanted: Vec<u64> = loads.iter().map(|load| answers(load) + more).collect();
    let begun = Instant::now();
    while loads.iter().zip(&wanted).any(|(load, wanted)| answers(load) < *wanted) {
        if begun.elapsed() > limit {
            bail!("a disk has not answered as many requests as expected after {} s", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The contents of a block after a write: nothing that can be packed.
fn contents(seed: u64, block: u64, number: u64, into: &mut [u8]) {
    let mut state = (seed << 48) ^ (block << 24) ^ number ^ 0x9e37_79b9_7f4a_7c15;
    for word in into.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
}

fn connect(uri: &str) -> Result<Arc<Client>> {
    let begun = Instant::now();
    loop {
        match Client::open(uri) {
            Ok(client) => return Ok(client),
            Err(error) if begun.elapsed() > PAUSE_LIMIT => {
                return Err(error).with_context(|| format!("cannot connect to {uri}"));
            }
            Err(_) => std::thread::sleep(CONNECT_INTERVAL),
        }
    }
}

/// The writes of one disk: the number of the last one of each block.
struct Written {
    seed: u64,
    numbers: Vec<u64>,
}

/// Fills the disk, and writes random blocks until it is over.
fn write(uri: &str, load: &Load, seed: u64, blocks: u64) -> Result<Written> {
    let mut client = connect(uri)?;
    let (mut numbers, mut bytes) = (vec![0; usize::try_from(blocks)?], vec![0; BLOCK]);
    let mut state = seed;
    for number in 1.. {
        if load.is_over.load(Ordering::SeqCst) {
            break;
        }
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let block = if number <= blocks { number - 1 } else { (state >> 33) % blocks };
        contents(seed, block, number, &mut bytes);
        let sent = Instant::now();
        while blocking::write(&*client, block * BLOCK as u64, &bytes).is_err() {
            ensure!(sent.elapsed() < PAUSE_LIMIT, "a write has no answer after {} s", PAUSE_LIMIT.as_secs());
            client = connect(uri)?;
        }
        let took_ns = u64::try_from(sent.elapsed().as_nanos()).unwrap_or(u64::MAX);
        load.longest_ns.fetch_max(took_ns, Ordering::SeqCst);
        load.answers.fetch_add(1, Ordering::SeqCst);
        if let Some(last) = numbers.get_mut(usize::try_from(block)?) {
            *last = number;
        }
    }
    Ok(Written { seed, numbers })
}

/// Compares a disk with its writes. Returns how many blocks it has.
fn check(uri: &str, written: &Written) -> Result<u64> {
    let client = connect(uri)?;
    let (mut found, mut expected) = (vec![0; BLOCK], vec![0; BLOCK]);
    let mut checked = 0;
    for (block, number) in (0..).zip(&written.numbers).filter(|(_, number)| **number > 0) {
        contents(written.seed, block, *number, &mut expected);
        blocking::read(&*client, block * BLOCK as u64, &mut found).context("cannot read a disk back")?;
        ensure!(
            found == expected,
            "LOST: block {block} of disk {} does not have its last write",
            written.seed
        );
        checked += 1;
    }
    Ok(checked)
}

/// A daemon whose disk process is measured. Its disks end with it.
struct Daemon {
    dir: PathBuf,
    headwater: PathBuf,
    opened: std::cell::RefCell<Vec<String>>,
    _process: Process,
}

impl Daemon {
    fn start(plan: &Plan, bytes: u64) -> Result<Self> {
        // Its sockets need a short path.
        let dir = plan.sockets.join("serve");
        systems::own_dir(&dir)?;
        let mut command = Command::new(&plan.headwater);
        let ram_bytes = bytes + bytes / 4 + (1 << 30);
        command.args(["serve", "--cache-ram", &ram_bytes.to_string(), "--data-dir"]).arg(&dir);
        let mut process = Process::start(&mut command, "headwater")?;
        process.wait_for_output("ready", START_LIMIT)?;
        let (headwater, opened) = (plan.headwater.clone(), std::cell::RefCell::default());
        Ok(Self { dir, headwater, opened, _process: process })
    }

    fn cli(&self, args: &[&str]) -> Result<String> {
        let output = Command::new(&self.headwater).arg("--data-dir").arg(&self.dir).args(args).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "headwater {} failed: {}", args.join(" "), said.trim());
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Makes a call of the protocol between daemon and disk process.
    fn ask(&self, call: &Value) -> Result<Value> {
        let mut stream = BufReader::new(UnixStream::connect(self.dir.join("disks.sock"))?);
        writeln!(stream.get_mut(), "{call}")?;
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let answer: Value = serde_json::from_str(&line).context("the disk process does not answer")?;
        answer.get("done").cloned().with_context(|| format!("the disk process refuses a call: {answer}"))
    }

    /// Imports an empty disk. Returns its version.
    fn import(&self, size_bytes: u64) -> Result<Value> {
        let path = self.dir.join("empty.raw");
        systems::make_file(&path, size_bytes, false)?;
        self.cli(&["image", "import", path.to_str().context("the path is not UTF-8")?])?;
        let shown: Value = serde_json::from_str(&self.cli(&["--json", "image", "show", "empty"])?)?;
        Ok(shown["versions"][0].clone())
    }

    /// Opens a disk, as the daemon does for a machine. Returns where it is served.
    fn open(&self, number: u64, version: &Value, blocks: u64) -> Result<String> {
        let (name, uuid) = (format!("disk-{number}"), format!("6f1c2a54-0000-4000-8000-{number:012}"));
        let run_dir = self.dir.join("run").join(&name);
        std::fs::create_dir_all(&run_dir)?;
        let ram_bytes = blocks * BLOCK as u64 + (16 << 20);
        let cache = json!({
            "mode": "ram", "ram_bytes": ram_bytes, "disk_bytes": 0, "persistent": false, "weight": 100,
        });
        let request = json!({
            "machine": name, "uuid": uuid, "run_dir": run_dir, "version": version, "cache": cache, "kept": null,
            "goes_on": true, "is_recorded": false, "transport": "nbd", "firmware": "uefi", "secure_boot": false,
            "scratch_bytes": 0,
        });
        self.ask(&json!({ "open": { "request": request } }))?;
        self.opened.borrow_mut().push(uuid);
        Ok(format!("nbd+unix:///?socket={}", run_dir.join("disk.sock").display()))
    }

    fn bring_about(&self, plan: &Plan, cause: Cause) -> Result<()> {
        match cause {
            Cause::Nothing => Ok(()),
            Cause::Upgrade => {
                let program = plan.headwater.canonicalize()?;
                let program = program.to_str().context("the program's path is not UTF-8")?;
                self.cli(&["upgrade", "--program", program]).map(drop)
            }
            Cause::Kill => Ok(kill_process(disk_process(&self.dir)?, Signal::KILL)?),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Or the disk process would outlive its daemon.
        for uuid in self.opened.borrow().iter() {
            if let Err(error) = self.ask(&json!({ "close": { "uuid": uuid } })) {
                eprintln!("cannot close a disk: {error:#}");
            }
        }
    }
}

/// The disk process: the child of the keeper, whose PID is in the lock.
fn disk_process(dir: &Path) -> Result<Pid> {
    let keeper = std::fs::read_to_string(dir.join("disks.lock")).context("there is no keeper")?;
    let keeper = keeper.trim();
    let children = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children"))?;
    let child = children.split_whitespace().next().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
    child.context("the keeper has no disk process")
}
