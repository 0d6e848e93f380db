//! `headwater-study` repeats a published experiment on this host, and prints the published figures next to its own.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use headwater_studies::bundle::{self, Report};
use headwater_studies::compare;
use headwater_studies::desktop::Profile;
use headwater_studies::guest;
use headwater_studies::icf::Configuration;
use headwater_studies::load::Sample;
use headwater_studies::machine::Machine;
use headwater_studies::model::Model;
use headwater_studies::needs::Needs;
use headwater_studies::optional_fio;
use headwater_studies::over::Over;
use headwater_studies::peers;
use headwater_studies::run::{self, Plan, Progress};
use headwater_studies::sizing;
use headwater_studies::started;
use headwater_studies::studies::{
    guest_copies, iometer_results, lifecycle, lifecycle_report, placement, s000, s003, study_001, study_002,
    study_004, study_icf,
};
use headwater_studies::study::{Study, System};
use headwater_studies::trace::Trace;
use headwater_studies::validate::{self, Recorded};

/// Exit code of shells for a program that was ended by SIGINT.
const INTERRUPTED: u8 = 130;

/// Repeat a published study of write caches on this host.
#[derive(Parser, Clone, Debug)]
#[command(name = "headwater-study", version)]
struct Arguments {
    /// The study.
    study: StudyName,
    /// Files of the study: the configuration for `icf`, the traces for `sizing`, the recordings for `validate`, or
    /// the two directories for `compare`.
    #[arg(required_if_eq_any([("study", "icf"), ("study", "sizing"), ("study", "validate"), ("study", "compare")]))]
    files: Vec<PathBuf>,
    /// Short runs on small working sets: shows that everything runs, not how fast it is.
    #[arg(long)]
    quick: bool,
    /// Rounds of each case.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: Option<u16>,
    /// Seconds of each run.
    #[arg(long, value_parser = seconds)]
    seconds: Option<Duration>,
    /// Size of the disk for a configuration that uses the whole disk, such as 2G.
    #[arg(long, value_parser = headwater_block::size::parse)]
    size: Option<u64>,
    /// Only the calculations of 000, without measurements.
    #[arg(long)]
    arithmetic: bool,
    /// Number of desktops in 000 [default: as many as half of the RAM can hold, at most 40].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=500))]
    desktops: Option<u32>,
    /// The desktop model of 000, 003 and validate, as a TOML file [default: the built-in model].
    #[arg(long)]
    profile: Option<PathBuf>,
    /// Seconds of the boot in recordings without a file of their phases.
    #[arg(long, value_parser = seconds)]
    boot_seconds: Option<Duration>,
    /// Run 003 in a real guest, from this image of a Debian with the QEMU guest agent.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "build/guest/guest.qcow2")]
    guest: Option<PathBuf>,
    /// The program that serves the guest's disk [default: headwater in the directory of this program, or in PATH].
    #[arg(long, value_name = "FILE", requires = "guest")]
    headwater: Option<PathBuf>,
    /// The seed of all random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The disk: real, or a model to whose speed the real disk is slowed down (p10, ephemeral or sas15k:N:raid5). The
    /// disk of --work-dir must be faster than the model.
    #[arg(long, default_value = "real", value_parser = storage)]
    storage: Storage,
    /// Write blocks of this raw file, for example of a guest's disk, instead of random bytes in 001, 002, 004 and
    /// icf.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// How 001, 002, 004 and icf access write caches. The raw disk is always accessed directly.
    #[arg(long, value_enum, default_value_t)]
    over: Over,
    /// An empty or new directory for the report [default: headwater-study-NUMBER].
    #[arg(long)]
    out: Option<PathBuf>,
    /// A directory on the disk under test [default: that of the report]. Files there have no names, and are deleted
    /// at the end.
    #[arg(long)]
    work_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StudyName {
    /// Boots, logons and work of desktops, and the number of disks that the write caches of 500 users need (2014).
    #[value(name = "000")]
    S000,
    /// Five configurations of write caches and the raw disk, 4 KiB, 80 % writes, 80 % random (2015).
    #[value(name = "001")]
    S001,
    /// A cache on disk with and without buffering, and the raw disk, 4 KiB, 80 % writes, random (2013).
    #[value(name = "002")]
    S002,
    /// A desktop that copies files, without a RAM cache and with two sizes of it, as a model or with --guest (2019).
    #[value(name = "003")]
    S003,
    /// Model disks with the limits of Azure's P10 and of an ephemeral disk, plain and with a RAM cache (2020).
    #[value(name = "004")]
    S004,
    /// All studies above, and a sizing of model desktops; each writes a report to its own directory.
    All,
    /// The workers and access specifications of an Iometer configuration.
    Icf,
    /// How much RAM a desktop needs, from traces of its requests.
    Sizing,
    /// Compare recordings of guests with the desktop model, by phase, and the effect of a write cache on both.
    Validate,
    /// Compare two reports of the same study: compare DIR-A DIR-B.
    Compare,
}

fn main() -> ExitCode {
    match study(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            say(&mut std::io::stderr(), &format!("headwater-study: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Prints a line. An error is ignored: if nobody reads the output, the study still continues.
fn say(to: &mut dyn Write, line: &str) {
    let _ = writeln!(to, "{line}");
}

/// The model of the disk, if any.
#[derive(Clone, Copy, Debug)]
struct Storage(Option<Model>);

fn storage(text: &str) -> Result<Storage, String> {
    Model::parse(text).map(Storage)
}

/// Parses the length of a run.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.01..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "it must be a number from 0.01 to 3600".into())
}

/// The length of a run, and of the time before it whose requests do not count.
struct Times {
    run: Duration,
    ramp_up: Duration,
}

/// A study that measures, with its parameters.
struct Chosen {
    study: Study,
    times: Times,
    /// The configuration of Iometer, for `icf`.
    configuration: Option<Configuration>,
    /// Skipped cases, with reasons.
    left_out: Vec<String>,
}

/// The study that the arguments name.
fn chosen(arguments: &Arguments) -> Result<Chosen> {
    let (mut of_iometer, mut left_out) = (None, Vec::new());
    let quick = arguments.quick;
    let run = if quick { Duration::from_millis(500) } else { Duration::from_secs(10) };
    let mut times = Times { run: arguments.seconds.unwrap_or(run), ramp_up: Duration::ZERO };
    let study = match (arguments.study, arguments.files.as_slice()) {
        (StudyName::Icf, [file]) => {
            let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            // Iometer writes text in the code page of its system. Only names can be affected, and they are only
            // displayed.
            let configuration = Configuration::parse(&String::from_utf8_lossy(&bytes))
                .with_context(|| format!("cannot run the configuration {}", file.display()))?;
            if !quick && arguments.seconds.is_none() {
                times.ramp_up = Duration::from_secs(configuration.ramp_up_s);
                times.run = Duration::from_secs(configuration.run_s.max(1));
            }
            let study = study_icf(&configuration, &file.display().to_string(), arguments.size)?;
            of_iometer = Some(configuration);
            study
        }
        (StudyName::Icf, _) => bail!("name one configuration: headwater-study icf FILE"),
        (
            StudyName::S000
            | StudyName::S003
            | StudyName::All
            | StudyName::Sizing
            | StudyName::Validate
            | StudyName::Compare,
            _,
        ) => bail!("this command does not run a study that measures"),
        (StudyName::S001, _) => study_001(quick),
        (StudyName::S002, _) => {
            let mut study = study_002(quick);
            let why = arguments.storage.0.map(|model| {
                format!(
                    "the qcow2 overlays, because the disk of another program cannot be slowed down to {model}"
                )
            });
            if let Some(why) = why.or_else(peers::missing) {
                study.cases.retain(|case| !matches!(case.system, System::Peer(_)));
                left_out.push(why);
            }
            study
        }
        (StudyName::S004, _) => study_004(quick),
    };
    let study = match &arguments.data {
        Some(file) => study.with_data(Sample::read(file)?),
        None => study,
    };
    Ok(Chosen { study, times, configuration: of_iometer, left_out })
}

fn study(arguments: &Arguments) -> Result<ExitCode> {
    check_options(arguments)?;
    let takes_files = matches!(
        arguments.study,
        StudyName::Icf | StudyName::Sizing | StudyName::Validate | StudyName::Compare
    );
    if let Some(file) = arguments.files.first().filter(|_| !takes_files) {
        bail!("only icf, sizing, validate and compare take files: {}", file.display());
    }
    match arguments.study {
        StudyName::S000 if arguments.arithmetic => {
            say(&mut std::io::stdout(), s000::text().trim_end());
            Ok(ExitCode::SUCCESS)
        }
        StudyName::S000 => live(arguments, stop_on_signals()?.as_ref()),
        StudyName::S003 if arguments.guest.is_some() => {
            copy_files_in_a_guest(arguments, stop_on_signals()?.as_ref())
        }
        StudyName::S003 => copy_files(arguments, stop_on_signals()?.as_ref()),
        StudyName::Sizing => size(arguments, stop_on_signals()?.as_ref()),
        StudyName::Validate => validate(arguments, stop_on_signals()?.as_ref()),
        StudyName::All => all(arguments),
        StudyName::Compare => {
            let [a, b] = arguments.files.as_slice() else {
                bail!("name two reports: headwater-study compare DIR-A DIR-B")
            };
            say(&mut std::io::stdout(), compare::text(a, b)?.trim_end());
            Ok(ExitCode::SUCCESS)
        }
        _ => measure(arguments, stop_on_signals()?.as_ref()),
    }
}

/// Refuses options that the study does not support.
fn check_options(arguments: &Arguments) -> Result<()> {
    use StudyName::{All, Compare, S000, S003, S004, Sizing, Validate};
    if arguments.storage.0.is_some() && matches!(arguments.study, S004 | All | Sizing | Validate | Compare) {
        bail!("--storage is for studies 000, 001, 002, 003 and icf: study 004 has two storages of its own");
    }
    if arguments.data.is_some() && matches!(arguments.study, S000 | S003 | Sizing | Validate | Compare) {
        bail!(
            "--data is for studies 001, 002, 004, icf and all: desktops are models whose parameters say how their data packs"
        );
    }
    if arguments.guest.is_some() {
        if !matches!(arguments.study, S003) {
            bail!("--guest is for study 003");
        }
        if arguments.storage.0.is_some() || arguments.profile.is_some() || arguments.over != Over::InProcess {
            bail!(
                "--guest cannot be combined with --storage, --profile or --over: the guest is not a model, and another program serves its disk"
            );
        }
    }
    if arguments.over != Over::InProcess
        && matches!(arguments.study, S000 | S003 | Sizing | Validate | Compare)
    {
        bail!("--over is for studies 001, 002, 004, icf and all: desktops are models in this process");
    }
    Ok(())
}

/// The largest needs of all studies, because they run one after the other.
fn needs_of_all(arguments: &Arguments) -> Result<Needs> {
    let quick = arguments.quick;
    let lives = lifecycle::Setup::new(profile(arguments)?, arguments.desktops, arguments.seed, quick);
    let copies = s003::Setup::new(profile(arguments)?, arguments.seed, quick);
    let measured =
        [study_001(quick), study_002(quick), study_004(quick)].map(|study| Needs::of(&study.cases));
    let all = measured.into_iter().chain([lives.needs(), copies.needs()]);
    Ok(all.fold(Needs { ram_bytes: 0, disk_bytes: 0 }, |most, needs| Needs {
        ram_bytes: most.ram_bytes.max(needs.ram_bytes),
        disk_bytes: most.disk_bytes.max(needs.disk_bytes),
    }))
}

/// Runs all studies that need no input files. If one fails, the others still run.
fn all(arguments: &Arguments) -> Result<ExitCode> {
    // Checked before the first study, because the largest is not the first.
    let out_of_all = arguments.out.clone().unwrap_or_else(|| "headwater-studies".into());
    let of_all = Arguments { out: Some(out_of_all), ..arguments.clone() };
    let (out, _) = begin(&of_all, "all", needs_of_all(arguments)?)?;
    let stop = stop_on_signals()?;
    let mut failed = Vec::new();
    for (study, number) in [
        (StudyName::S000, "000"),
        (StudyName::S001, "001"),
        (StudyName::S002, "002"),
        (StudyName::S003, "003"),
        (StudyName::S004, "004"),
        (StudyName::Sizing, "sizing"),
    ] {
        let arguments = Arguments { study, out: Some(out.join(number)), ..arguments.clone() };
        let ended = match study {
            StudyName::S000 => live(&arguments, &stop),
            StudyName::S003 => copy_files(&arguments, &stop),
            StudyName::Sizing => size_models(&arguments, &stop),
            _ => measure(&arguments, &stop),
        };
        if let Err(error) = ended {
            say(&mut std::io::stderr(), &format!("headwater-study: study {number}: {error:#}"));
            failed.push(number);
        }
        if stop.load(Ordering::Relaxed) {
            return Ok(ExitCode::from(INTERRUPTED));
        }
    }
    if !failed.is_empty() {
        bail!(
            "these studies failed: {}; their reports, if written, contain the measurements up to then",
            failed.join(", ")
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Sizes the RAM of the desktops in a trace, and writes a report.
fn size(arguments: &Arguments, stop: &AtomicBool) -> Result<ExitCode> {
    let out = arguments.out.clone().unwrap_or_else(|| "headwater-sizing".into());
    bundle::check_unused(&out)?;
    // Read before any directory is created, because most mistakes are in the trace.
    let trace = Trace::load(&arguments.files)?;
    let source = arguments.files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
    size_trace(arguments, &trace, source, &out, stop)
}

/// Sizes the RAM of desktops of the model, without a trace.
fn size_models(arguments: &Arguments, stop: &AtomicBool) -> Result<ExitCode> {
    let out = arguments.out.clone().unwrap_or_else(|| "headwater-sizing".into());
    let (count, loops) = if arguments.quick { (2, 1) } else { (10, 4) };
    let trace = sizing::modelled(&profile(arguments)?, arguments.seed, count, loops);
    let source = format!("{count} desktops of the model with {loops} loops each");
    size_trace(arguments, &trace, source, &out, stop)
}

fn size_trace(
    arguments: &Arguments,
    trace: &Trace,
    source: String,
    out: &Path,
    stop: &AtomicBool,
) -> Result<ExitCode> {
    bundle::prepare(out)?;
    let work_dir = arguments.work_dir.as_deref().unwrap_or(out);
    let progress = |what: &str, done: usize, all: usize| {
        // If the output is not a terminal, ten lines suffice, because each stays visible.
        if std::io::stderr().is_terminal() || done.is_multiple_of(all.div_ceil(10)) {
            Terminal.show(&format!("{what}: {done} of {all}"));
        }
    };
    let sizing = sizing::size(trace, work_dir, arguments.seed, stop, &progress);
    let report = sizing::Report { trace, source, sizing: &sizing, seed: arguments.seed };
    report.files()?.write(out)?;
    finished(&report.text(), out);
    concluded(sizing.failure.as_deref(), stop)
}

/// Compares recordings with the desktop model, and writes a report.
fn validate(arguments: &Arguments, stop: &AtomicBool) -> Result<ExitCode> {
    let out = arguments.out.clone().unwrap_or_else(|| "headwater-validation".into());
    bundle::check_unused(&out)?;
    // Read before any directory is created, because most mistakes are in the files.
    let profile = profile(arguments)?;
    let recorded = Recorded::load(&arguments.files, arguments.boot_seconds.map(|time| time.as_secs_f64()))?;
    let models = validate::modelled(&profile, &recorded, arguments.seed);
    bundle::prepare(&out)?;
    let work_dir = arguments.work_dir.as_ref().unwrap_or(&out);
    let progress = |what: &str, done: usize, all: usize| Terminal.show(&format!("{what}: {done} of {all}"));
    let validation = validate::run(&recorded, &models, work_dir, stop, &progress);
    let validation = validation.inspect_err(|_| {
        // It is empty, because nothing was written.
        let _ = std::fs::remove_dir(&out);
    })?;
    let source = arguments.files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
    let seed = arguments.seed;
    let report =
        validate::Report { recorded: &recorded, source, profile: &profile, seed, validation: &validation };
    report.files()?.write(&out)?;
    finished(&report.text(), &out);
    concluded(validation.failure.as_deref(), stop)
}

/// The desktop model that the arguments name.
fn profile(arguments: &Arguments) -> Result<Profile> {
    arguments.profile.as_deref().map_or_else(Profile::standard, Profile::load)
}

/// Creates the directory of a report, and prints the needs of the study. If the host does not meet them, the
/// directory is removed.
fn begin(arguments: &Arguments, number: &str, needs: Needs) -> Result<(PathBuf, PathBuf)> {
    let out = arguments.out.clone().unwrap_or_else(|| format!("headwater-study-{number}").into());
    let existed = out.exists();
    bundle::prepare(&out)?;
    let work_dir = arguments.work_dir.clone().unwrap_or_else(|| out.clone());
    let summary = needs.summary();
    say(&mut std::io::stderr(), &format!("study {number} needs {summary} in {}", work_dir.display()));
    if let Err(error) = needs.check(&work_dir) {
        if !existed {
            let _ = std::fs::remove_dir(&out);
        }
        return Err(error);
    }
    Ok((out, work_dir))
}

/// Runs study 003.
fn copy_files(arguments: &Arguments, stop: &AtomicBool) -> Result<ExitCode> {
    let mut setup = s003::Setup::new(profile(arguments)?, arguments.seed, arguments.quick);
    setup.storage = arguments.storage.0;
    let (out, work_dir) = begin(arguments, "003", setup.needs())?;
    let mut progress = by_tenths(setup.duration());
    let results = setup.run(&work_dir, stop, &mut progress);
    let report = s003::Report { setup: &setup, results: &results };
    report.files()?.write(&out)?;
    finished(&report.text(), &out);
    concluded(results.failure(), stop)
}

/// Runs study 003 in a guest.
fn copy_files_in_a_guest(arguments: &Arguments, stop: &AtomicBool) -> Result<ExitCode> {
    let image = arguments.guest.clone().unwrap_or_default();
    let program = arguments.headwater.clone().map_or_else(guest::find_program, Ok)?;
    let rounds = arguments.rounds.map_or(1, usize::from);
    let setup = guest_copies::Setup::new(image, program, rounds, arguments.quick)?;
    let (out, work_dir) = begin(arguments, "003", setup.needs())?;
    let results = setup.run(&work_dir, stop, &mut |step| Terminal.show(step));
    let report = guest_copies::Report { setup: &setup, results: &results };
    report.files()?.write(&out)?;
    finished(&report.text(), &out);
    concluded(results.failure(), stop)
}

/// Runs study 000.
fn live(arguments: &Arguments, stop: &AtomicBool) -> Result<ExitCode> {
    let (desktops, seed, quick) = (arguments.desktops, arguments.seed, arguments.quick);
    let mut setup = lifecycle::Setup::new(profile(arguments)?, desktops, seed, quick);
    setup.storage = arguments.storage.0;
    let (out, work_dir) = begin(arguments, "000", setup.needs())?;
    let mut progress = by_tenths(Duration::from_secs_f64(setup.seconds()));
    let results = setup.run(&work_dir, stop, &mut progress);
    let report = lifecycle_report::Report::new(&setup, &results);
    report.files()?.write(&out)?;
    finished(&report.text(), &out);
    concluded(results.failure.as_deref(), stop)
}

/// Shows each tenth of a part of a study. `all`: the duration of the whole study.
fn by_tenths(all: Duration) -> impl FnMut(&str, f64) {
    let minutes = all.as_secs().div_ceil(60).max(1);
    let mut shown = String::new();
    move |what, share| {
        let percent = (share * 10.0).floor() * 10.0;
        let line = format!("{what}: {percent:.0} % (all parts take {minutes} min)");
        if line != shown {
            Terminal.show(&line);
            shown = line;
        }
    }
}

/// The exit code of a study that has written its report.
fn ended(stop: &AtomicBool) -> ExitCode {
    if stop.load(Ordering::Relaxed) { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS }
}

/// The exit code of a study that may have failed.
fn concluded(failure: Option<&str>, stop: &AtomicBool) -> Result<ExitCode> {
    if let Some(failure) = failure {
        bail!("the study failed: {failure}; the report contains the measurements up to then");
    }
    Ok(ended(stop))
}

/// Prints the tables and the path of the report.
fn finished(text: &str, out: &Path) {
    if std::io::stderr().is_terminal() {
        say(&mut std::io::stderr(), "");
    }
    say(&mut std::io::stdout(), text.trim_end());
    say(&mut std::io::stderr(), &format!("report: {}", out.join("index.html").display()));
}

/// Runs one study, and writes its report.
fn measure(arguments: &Arguments, stop: &AtomicBool) -> Result<ExitCode> {
    let quick = arguments.quick;
    let Chosen { study, times, configuration, left_out } = chosen(arguments)?;
    let run_ms = u64::try_from(times.run.as_millis())?;
    let plan = Plan {
        study,
        rounds: arguments.rounds.map_or(if quick { 2 } else { 5 }, usize::from),
        ramp_up_ms: u64::try_from(times.ramp_up.as_millis())?,
        run_ms,
        probe_ms: run_ms.min(if quick { 500 } else { 5000 }),
        seed: arguments.seed,
        storage: arguments.storage.0,
        over: arguments.over,
    };
    let has_peers = plan.study.cases.iter().any(|case| matches!(case.system, System::Peer(_)));
    let programs = if has_peers { vec![peers::version()?] } else { Vec::new() };
    let (out, work_dir) = begin(arguments, plan.study.number, Needs::of(&plan.study.cases))?;
    let mut machine = Machine::describe(&work_dir);
    let (results, ended) = run::run(&plan, &work_dir, stop, &mut Terminal);
    machine.note_load();
    let failure = ended.err().map(|error| format!("{error:#}"));
    let mut report = Report {
        plan: &plan,
        results: &results,
        machine,
        failure,
        is_quick: quick,
        tables: Vec::new(),
        left_out,
        programs,
        data: arguments.data.as_ref().map(|file| file.display().to_string()),
        fio: Vec::new(),
    };
    if matches!(arguments.study, StudyName::S001) {
        let cases = ("ram-4g-set-10g", "ram-4g-set-1g");
        report.tables.push(report.shares(
            "4 GB RAM + overflow: IOPS on the 10 GB set, as a share of those on a set that fits",
            cases,
        ));
    }
    if matches!(arguments.study, StudyName::S004) {
        add_tables_of_004(&mut report, &work_dir, stop);
    }
    let mut files = report.files()?;
    if let Some(configuration) = &configuration {
        files =
            files.with("iometer.csv", iometer_results(configuration, &plan, &results, now()).into_bytes());
    }
    files.write(&out)?;
    finished(&report.text(), &out);
    concluded(report.failure.as_deref(), stop)
}

/// Adds the placement of the OS disk, and the fio jobs if fio is installed. A quick run skips both.
fn add_tables_of_004(report: &mut Report<'_>, work_dir: &Path, stop: &AtomicBool) {
    report.tables.push(placement::table());
    if report.is_quick {
        report.left_out.push("the jobs of fio, in a quick run".into());
        return;
    }
    let seconds = (report.plan.run_ms * 6).div_ceil(1000);
    let (done, left_out) = optional_fio::run(work_dir, seconds, stop, &mut |step| Terminal.show(step));
    if !done.is_empty() {
        report.tables.push(optional_fio::table(&done));
    }
    report.fio = done;
    report.left_out.extend(left_out);
}

/// Seconds since 1970.
fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A flag that Ctrl-C and SIGTERM set. A second signal ends the program immediately.
fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    use tokio::signal::unix::{SignalKind, signal};
    let stop = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&stop);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = runtime.context("cannot listen for signals")?;
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime.block_on(async {
            let (Ok(mut interrupt), Ok(mut terminate)) =
                (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
            else {
                return;
            };
            let _ = ready.send(());
            loop {
                tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
                if raised.swap(true, Ordering::Relaxed) {
                    started::clean_up_and_exit(INTERRUPTED.into());
                }
                say(&mut std::io::stderr(), "\ninterrupted: writing a report of the measurements so far");
            }
        });
    });
    is_ready.recv().context("cannot listen for signals")?;
    Ok(stop)
}

/// Shows progress with the remaining time: on a terminal in one line, otherwise in a new line for each step.
struct Terminal;

impl Progress for Terminal {
    fn step(&mut self, what: &str, percent: u64, left: Duration) {
        let left = left.as_secs();
        self.show(&format!("{percent:3} %, {:2}:{:02} left: {what}", left / 60, left % 60));
    }
}

impl Terminal {
    fn show(&self, line: &str) {
        let mut err = std::io::stderr();
        if err.is_terminal() {
            let _ = write!(err, "\r\x1b[K{line}");
            let _ = err.flush();
        } else {
            say(&mut err, line);
        }
    }
}
