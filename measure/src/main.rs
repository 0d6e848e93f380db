//! `headwater-measure` measures Headwater and its peers with the same loads in the same run.
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
//! - The systems of a case are measured in turn in each round, in rotated order. A figure is the median of the
//!   rounds, and a ratio compares only figures of the same run.
//! - Data is incompressible. Working sets are written once before the measurement, unless a case says "fresh".
//! - Only processes that this program started are ended. The work directory is removed, even after Ctrl-C.
//!
//! # Not here
//! Measuring the write cache without a protocol (`make bench`). Tests: on a slow host a goal is reported as missed,
//! but nothing fails.
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
mod pauses;
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

/// Measure Headwater and its peers: nbdkit, QEMU and the raw disk.
#[derive(Parser, Debug)]
#[command(name = "headwater-measure", version, args_override_self = true)]
struct Arguments {
    /// Rounds of each case; figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 10)]
    seconds: u32,
    /// One round of three seconds on working sets of 256 MiB and 1 GiB: shows that everything runs, not how fast it
    /// is.
    #[arg(long)]
    quick: bool,
    /// Only cases whose name contains this; may be given several times. `--list` shows the names.
    #[arg(long)]
    only: Vec<String>,
    /// List the cases and exit.
    #[arg(long)]
    list: bool,
    /// The headwater program to measure [default: the program in the same directory as this one].
    #[arg(long)]
    headwater: Option<PathBuf>,
    /// Directory on the disk to measure; all cases together need about 45 GiB of free space.
    #[arg(long, default_value = "build/compare/work")]
    work_dir: PathBuf,
    /// Directory for the results.
    #[arg(long, default_value = "build/compare")]
    out: PathBuf,
    /// Only send the VDI mix to the first GiB of this vhost-user-blk socket, and print the result
    #[arg(long, value_name = "SOCKET")]
    drive: Option<PathBuf>,
    /// Requests in flight with --drive
    #[arg(long, default_value_t = 16, requires = "drive")]
    depth: u32,
    /// Only measure how long disks pause while the disk process is upgraded, and after it is killed; needs 6 GiB of memory (--quick: 2)
    #[arg(long)]
    pauses: bool,
    /// Exit with code 1 if a goal is missed by more than its decision accepts, or if a case gave no result
    #[arg(long)]
    check: bool,
    /// Only relay TCP from LISTEN to TARGET (LISTEN=TARGET), with each byte delayed by --delay-ms; used for the slow
    /// line
    #[arg(long, value_name = "LISTEN=TARGET", hide = true)]
    relay: Option<String>,
    #[arg(long, value_name = "MS", requires = "relay", default_value_t = 0, hide = true)]
    delay_ms: u64,
    /// Only read the ranges on standard input (OFFSET LENGTH on each line) from this NBD server, and print the time;
    /// used for the slow link
    #[arg(long, value_name = "URI", hide = true)]
    read_over: Option<String>,
    /// Raw image of the guest; if it is missing, comparisons that need it are skipped with a message.
    #[arg(long, default_value = "build/guest/guest.raw")]
    image: PathBuf,
}

/// The part of a disk that --drive uses.
const DRIVEN_BYTES: u64 = 1 << 30;

/// The configuration that all measurements share.
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
    /// Whether the user selected the case.
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
    if arguments.pauses {
        return pauses::run(&plan).map(|()| ExitCode::SUCCESS);
    }
    std::fs::create_dir_all(&arguments.out)
        .with_context(|| format!("cannot create the output directory {}", arguments.out.display()))?;
    let mut results = Results { machine: machine::describe(), quick: plan.quick, ..Results::default() };
    println!("{}", results.machine.summary());
    if plan.quick {
        println!(
            "quick: one short round on small working sets; the figures show that everything runs, not how fast it is"
        );
    }
    measure(&arguments, &plan, &mut results)?;
    let names = names();
    results.judge(names.iter().map(|(name, _)| *name).filter(|name| plan.wants(name)));
    save(&arguments, &mut results)?;
    println!("\n{}", report::table::render(&results));
    println!("wrote {0}/results.json and {0}/index.html", arguments.out.display());
    let failures = results.failures();
    println!(
        "{} goals, {} missed within the bound of a decision, {} failures",
        results.rows.len(),
        results.accepted(),
        failures.len()
    );
    failures.iter().for_each(|failure| println!("  {failure}"));
    let failed = arguments.check && !failures.is_empty();
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs the selected cases. A case that cannot run on this host is skipped. Results are written after each case,
/// because a run takes hours.
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
    let headwater =
        arguments.headwater.clone().or(beside).context("cannot find the directory of this program")?;
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
    let peers = [
        ("fio", "fio"),
        ("nbdkit", "nbdkit"),
        ("qemu-nbd", "qemu-utils"),
        ("qemu-storage-daemon", "qemu-system-common"),
    ];
    for (program, package) in peers.into_iter().filter(|_| !arguments.pauses) {
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
