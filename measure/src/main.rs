//! `headwater-measure`: Headwater and its peers on the same work, in the same minutes.
//!
//! ```text
//!   cases --> bench: start systems -> fill -> rounds of fio, alternating -> stop --> samples
//!                                                                                      |
//!   targets: medians, ratios, reached or not  <----------------------------------------+
//!      |
//!      +--> report: table, results.json, index.html with plots
//! ```
//!
//! # Guarantees
//! - Systems of a case run in turn, in every round, in rotated order; a figure is the median of the rounds,
//!   and a ratio compares only figures of the same run.
//! - Data is incompressible. Sets are written once before they are measured, unless a case says "fresh".
//! - Only processes that were started here are ended, and the work directory is removed, also on Ctrl-C.
//!
//! # Not here
//! The engine without a protocol (`make bench`), and tests: a slow machine makes a row say "no", not fail.
//!
//! Start reading at [`cases`].

mod accepted;
mod attach;
mod bench;
mod cases;
mod fio;
mod fuse;
mod idle;
mod images;
mod interrupt;
mod iscsi;
mod machine;
mod memory;
mod process;
mod report;
mod statistics;
mod streaming;
mod systems;
mod targets;
mod vhost;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;

use crate::targets::Results;

/// Measure Headwater beside nbdkit, QEMU and the raw disk.
#[derive(Parser, Debug)]
#[command(name = "headwater-measure", version, args_override_self = true)]
struct Arguments {
    /// Rounds of each case; figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 10)]
    seconds: u32,
    /// One round of three seconds on sets of 256 MiB and 1 GiB: shows that everything runs, not how fast.
    #[arg(long)]
    quick: bool,
    /// Only cases whose name contains this; may be given several times. `--list` shows the names.
    #[arg(long)]
    only: Vec<String>,
    /// List the cases and stop.
    #[arg(long)]
    list: bool,
    /// The headwater program to measure [default: the one beside this program].
    #[arg(long)]
    headwater: Option<PathBuf>,
    /// Directory on the disk to measure; needs about 45 GiB free for all cases.
    #[arg(long, default_value = "build/compare/work")]
    work_dir: PathBuf,
    /// Where the results go.
    #[arg(long, default_value = "build/compare")]
    out: PathBuf,
    /// Only send the VDI mix to this vhost-user-blk socket, on its first GiB, and say what came of it
    #[arg(long, value_name = "SOCKET")]
    drive: Option<PathBuf>,
    /// Requests in flight with --drive
    #[arg(long, default_value_t = 16, requires = "drive")]
    depth: u32,
    /// End with exit code 1 if a target is not reached, nor within what a decision accepts of it, or if a case gave no figure
    #[arg(long)]
    check: bool,
    /// Only relay TCP between LISTEN=TARGET, each byte later by --delay-ms: an end of the slow line
    #[arg(long, value_name = "LISTEN=TARGET", hide = true)]
    relay: Option<String>,
    #[arg(long, value_name = "MS", requires = "relay", default_value_t = 0, hide = true)]
    delay_ms: u64,
    /// Only read from this NBD server what standard input lists, OFFSET LENGTH each, and say how long it took: from an end of the slow line
    #[arg(long, value_name = "URI", hide = true)]
    read_over: Option<String>,
    /// Raw image of the guest; without one the comparisons that need it are left out, and say so.
    #[arg(long, default_value = "build/guest/guest.raw")]
    image: PathBuf,
}

/// The part of a disk that --drive uses.
const DRIVEN_BYTES: u64 = 1 << 30;

/// What every measurement needs to know.
struct Plan {
    rounds: usize,
    seconds: u32,
    quick: bool,
    headwater: PathBuf,
    work_dir: PathBuf,
    /// Short path for sockets, which may have at most 107 bytes.
    sockets: PathBuf,
    image: PathBuf,
    only: Vec<String>,
}

impl Plan {
    /// Whether a case was asked for.
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part.as_str()))
    }
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    if arguments.list {
        names().iter().for_each(|(name, title)| println!("{name:<22} {title}"));
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(between) = &arguments.relay {
        return streaming::relay(between, arguments.delay_ms).map(|()| ExitCode::SUCCESS);
    }
    if let Some(uri) = &arguments.read_over {
        return streaming::read_over(uri).map(|()| ExitCode::SUCCESS);
    }
    if let Some(socket) = &arguments.drive {
        return drive(&arguments, socket).map(|()| ExitCode::SUCCESS);
    }
    let plan = plan(&arguments)?;
    let _folders = interrupt::WorkDir::create(&plan.work_dir, &plan.sockets)?;
    std::fs::create_dir_all(&arguments.out)
        .with_context(|| format!("cannot create the output directory {}", arguments.out.display()))?;
    let mut results = Results { machine: machine::describe(), quick: plan.quick, ..Results::default() };
    println!("{}", results.machine.summary());
    if plan.quick {
        println!("quick: one short round on small sets; the figures show that it runs, not how fast it is");
    }
    measure(&arguments, &plan, &mut results)?;
    let names = names();
    results.judge(names.iter().map(|(name, _)| *name).filter(|name| plan.wants(name)));
    save(&arguments, &mut results)?;
    println!("\n{}", report::table::render(&results));
    println!("wrote {0}/results.json and {0}/index.html", arguments.out.display());
    let failures = results.failures();
    println!(
        "{} targets, {} not reached as a decision accepts, {} failures",
        results.rows.len(),
        results.accepted(),
        failures.len()
    );
    failures.iter().for_each(|failure| println!("  {failure}"));
    let failed = arguments.check && !failures.is_empty();
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs all cases that were asked for. One that cannot run here is left out, and what was measured is written after each: a run takes hours.
fn measure(arguments: &Arguments, plan: &Plan, results: &mut Results) -> Result<()> {
    for case in cases::all(plan.quick).iter().filter(|case| plan.wants(case.name)) {
        let found = results.or_left_out(case.name, bench::run(plan, case).map(Some))?;
        results.cases.extend(found);
        save(arguments, results)?;
    }
    for case in memory::cases(plan.quick).iter().filter(|case| plan.wants(case.name)) {
        let found = results.or_left_out(case.name, memory::run(plan, case).map(Some))?;
        results.memory.extend(found);
        save(arguments, results)?;
    }
    if plan.wants(iscsi::NAME) {
        results.iscsi = results.or_left_out(iscsi::NAME, iscsi::run(plan))?;
        save(arguments, results)?;
    }
    if plan.wants(fuse::NAME) {
        results.fuse = results.or_left_out(fuse::NAME, fuse::run(plan))?;
        save(arguments, results)?;
    }
    if plan.wants(attach::NAME) {
        results.attach = results.or_left_out(attach::NAME, attach::run(plan))?;
        save(arguments, results)?;
    }
    if plan.wants(idle::NAME) {
        results.idle = results.or_left_out(idle::NAME, idle::run(plan).map(Some))?;
        save(arguments, results)?;
    }
    if plan.wants(images::NAME) {
        results.import = results.or_left_out(images::NAME, images::run(plan))?;
        save(arguments, results)?;
    }
    for case in streaming::CASES.iter().filter(|case| plan.wants(case.name)) {
        println!("\n{}: {}", case.name, case.title);
        rustix::fs::sync();
        let found = results.or_left_out(case.name, (case.run)(plan))?;
        results.streaming.extend(found);
        save(arguments, results)?;
    }
    Ok(())
}

/// Names and titles of all cases.
fn names() -> Vec<(&'static str, &'static str)> {
    let mut all: Vec<_> = cases::all(false).iter().map(|case| (case.name, case.title)).collect();
    all.extend(memory::cases(false).iter().map(|case| (case.name, case.title)));
    all.extend([
        (iscsi::NAME, iscsi::TITLE),
        (fuse::NAME, fuse::TITLE),
        (attach::NAME, attach::TITLE),
        (idle::NAME, idle::TITLE),
        (images::NAME, images::TITLE),
    ]);
    all.extend(streaming::CASES.iter().map(|case| (case.name, case.title)));
    all
}

fn plan(arguments: &Arguments) -> Result<Plan> {
    let beside = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.join("headwater")));
    let headwater = arguments.headwater.clone().or(beside).context("cannot tell where this program lies")?;
    if !headwater.is_file() {
        bail!(
            "there is no program {}; build it with `cargo build --release -p headwater`, or name one with \
             --headwater",
            headwater.display()
        );
    }
    if arguments.rounds == 0 || arguments.seconds == 0 {
        bail!("--rounds and --seconds must be at least 1");
    }
    for (program, package) in [
        ("fio", "fio"),
        ("nbdkit", "nbdkit"),
        ("qemu-nbd", "qemu-utils"),
        ("qemu-storage-daemon", "qemu-system-common"),
    ] {
        if !process::is_installed(program) {
            bail!("{program} is not installed; `make compare` installs it, or: apt-get install {package}");
        }
    }
    let plan = Plan {
        rounds: if arguments.quick { 1 } else { arguments.rounds },
        seconds: if arguments.quick { 3 } else { arguments.seconds },
        quick: arguments.quick,
        headwater,
        work_dir: arguments.work_dir.clone(),
        sockets: std::env::temp_dir().join(format!("headwater-measure-{}", std::process::id())),
        image: arguments.image.clone(),
        only: arguments.only.clone(),
    };
    if !names().iter().any(|(name, _)| plan.wants(name)) {
        bail!("no case has '{}' in its name; --list shows them", plan.only.join("' or '"));
    }
    Ok(plan)
}

fn drive(arguments: &Arguments, socket: &Path) -> Result<()> {
    let mut client = vhost::Client::connect(socket)?;
    client.run(DRIVEN_BYTES, fio::Job::Fill, 0)?;
    let (requests, depth, seconds) = (fio::Requests::Blocks, arguments.depth, arguments.seconds);
    let job = fio::Job::Mix { requests, percentage_random: 80, depth, seconds };
    for round in 0..arguments.rounds {
        println!("{}", serde_json::to_string(&client.run(DRIVEN_BYTES, job, round)?)?);
    }
    Ok(())
}

fn save(arguments: &Arguments, results: &mut Results) -> Result<()> {
    results.rows = targets::rows(results);
    let json = serde_json::to_string_pretty(results)?;
    let html = report::html::render(results);
    for (name, text) in [("results.json", json), ("index.html", html)] {
        let path = arguments.out.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
