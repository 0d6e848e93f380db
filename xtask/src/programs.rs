//! The test programs: built by cargo, found in what it says, and run side by side.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// These take longest, or mostly wait, and so begin first: what is left at the end should be short, and compute.
const LONG: &[&str] = &[
    "guests",
    "schedules",
    "crash",
    "debian",
    "ladder_on_disk",
    "soak",
    "s3",
    "s3_crash",
    "headwater_service",
    "stores",
    "ladder",
    "outage",
    "full_file_system",
    "queues",
    "xtask",
    "maintenance",
];

/// Real clients for minutes: built for their lints, and run by `make conformance`.
const CONFORMANCE: &[&str] = &["vhost_user"];

/// Programs that run for longer say so this often.
const STILL: Duration = Duration::from_secs(30);

/// A program that takes longer hangs: it is ended, and has failed. The longest take some minutes on a busy host.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// In the environment of a program, and of all that it starts.
const MARK: &str = "HEADWATER_TEST_PROGRAM";

/// How many of the last lines are told again of a program that gave no result.
const LAST_LINES: usize = 10;

/// One program of tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    name: String,
    path: PathBuf,
    /// Where it runs: its package, as under `cargo test`.
    package: PathBuf,
}

/// How the programs ended.
#[derive(Debug, Default)]
pub struct Ends {
    /// Whether each of them said that it passed.
    pub all_good: bool,
    /// Those that gave no result, or did not end.
    pub killed: Vec<Killed>,
}

/// A program that gave no result, or did not end.
#[derive(Debug, PartialEq, Eq)]
pub struct Killed {
    pub name: String,
    pub last_lines: String,
}

/// Builds test programs with `cargo test --no-run` and these arguments. `None`: they do not build.
pub fn build(mut cargo: Command, what: &[&str]) -> Result<Option<Vec<Program>>, String> {
    let fail = |error: std::io::Error| format!("cannot run cargo test --no-run: {error}");
    let mut child = cargo
        .args(["test", "--locked", "--no-run", "--message-format", "json-render-diagnostics"])
        .args(what)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(fail)?;
    let mut programs = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            programs.extend(program_of(&line.map_err(fail)?));
        }
    }
    let good = child.wait().map_err(fail)?.success();
    Ok(good.then_some(programs))
}

/// The program that a message of cargo tells of, if it is one of tests.
fn program_of(message: &str) -> Option<Program> {
    // A target says too whether it has tests; that this is the program of them its profile says.
    let (_, profile) = message.split_once(r#""profile":{"#)?;
    if !message.contains(r#""reason":"compiler-artifact""#)
        || !profile.split('}').next()?.contains(r#""test":true"#)
        || message.contains(r#""kind":["bench"]"#)
    {
        return None;
    }
    let path = PathBuf::from(text_of(message, "executable")?);
    let package = Path::new(&text_of(message, "manifest_path")?).parent()?.to_path_buf();
    let file = path.file_stem()?.to_str()?;
    let name = file.rsplit_once('-').map_or(file, |(name, _hash)| name).to_owned();
    Some(Program { name, path, package })
}

/// The text that a key has in a line of JSON, which holds it once. Paths with quotes or backslashes are not understood.
fn text_of(message: &str, key: &str) -> Option<String> {
    let (_, rest) = message.split_once(&format!("\"{key}\":\""))?;
    let (text, _) = rest.split_once('"')?;
    (!text.contains('\\')).then(|| text.to_owned())
}

/// Runs all of them; `output` is called with what each printed, when it is over.
pub fn run(programs: &[Program], filter: &[&str], output: impl FnMut(&str) + Send) -> Ends {
    run_within(LIMIT, programs, filter, output)
}

fn run_within(
    limit: Duration,
    programs: &[Program],
    filter: &[&str],
    output: impl FnMut(&str) + Send,
) -> Ends {
    let mut order: Vec<&Program> = programs.iter().collect();
    order.sort_by_key(|p| LONG.iter().position(|name| *name == p.name).unwrap_or(LONG.len()));
    // Who names tests gets them wherever they are.
    order.retain(|p| !filter.is_empty() || !CONFORMANCE.contains(&p.name.as_str()));
    let waiting = Mutex::new(VecDeque::from(order));
    let running = Mutex::new(Vec::<(String, Instant)>::new());
    let over = Mutex::new((Ends { all_good: true, killed: Vec::new() }, output));
    // One more than there are processors: there is mostly one that waits for a disk, a guest or the clock.
    let workers = std::thread::available_parallelism().map_or(1, usize::from) + 1;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers)
            .map(|_| {
                scope.spawn(|| {
                    while let Some(program) = waiting.lock().ok().and_then(|mut list| list.pop_front()) {
                        let begin = Instant::now();
                        if let Ok(mut running) = running.lock() {
                            running.push((program.name.clone(), begin));
                        }
                        let (text, end) = run_one(program, filter, limit);
                        if let Ok(mut running) = running.lock() {
                            running.retain(|(name, since)| *name != program.name || *since != begin);
                        }
                        let Ok(mut over) = over.lock() else { return };
                        println!("== {} in {} s", program.name, begin.elapsed().as_secs());
                        println!("{text}");
                        over.0.all_good &= end == End::Good;
                        if end == End::Late || !text.lines().any(|line| line.starts_with("test result:")) {
                            over.0
                                .killed
                                .push(Killed { name: program.name.clone(), last_lines: last_lines(&text) });
                        }
                        (over.1)(&text);
                    }
                })
            })
            .collect();
        let mut said = Instant::now();
        while !workers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(100));
            if said.elapsed() < STILL {
                continue;
            }
            said = Instant::now();
            let running = running.lock().map(|list| list.clone()).unwrap_or_default();
            let names: Vec<_> = running
                .iter()
                .map(|(name, since)| format!("{name} ({} s)", since.elapsed().as_secs()))
                .collect();
            println!("== running: {}", names.join(", "));
        }
    });
    over.into_inner().map(|(ends, _)| ends).unwrap_or_default()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Good,
    Failed,
    Late,
}

/// Runs a program to its end, or to the limit: what it printed on both streams, and whether it passed.
fn run_one(program: &Program, filter: &[&str], limit: Duration) -> (String, End) {
    // One pipe for both streams keeps their order.
    let both = std::io::pipe().and_then(|(reader, writer)| Ok((reader, writer.try_clone()?, writer)));
    let (mut reader, stdout, stderr) = match both {
        Ok(both) => both,
        Err(error) => {
            return (format!("cannot make a pipe for {}: {error}", program.path.display()), End::Failed);
        }
    };
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let begin = Instant::now();
    let mut command = Command::new(&program.path);
    command.args(filter).current_dir(&program.package).env("CARGO_MANIFEST_DIR", &program.package);
    let child = command.env(MARK, &mark).stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn();
    // It holds the writing ends: with them open here the output would have no end.
    drop(command);
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return (format!("cannot run {}: {error}", program.path.display()), End::Failed),
    };
    let printed = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&printed);
    let reading = std::thread::spawn(move || {
        let mut part = [0; 1 << 16];
        while let Ok(count @ 1..) = reader.read(&mut part) {
            let Ok(mut printed) = into.lock() else { return };
            printed.extend_from_slice(part.get(..count).unwrap_or_default());
        }
    });
    // What it has started may hold the pipe when it is gone itself: both have to end.
    let is_over = |child: &mut Child, limit: Duration| {
        while begin.elapsed() < limit {
            if reading.is_finished() && !matches!(child.try_wait(), Ok(None)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    };
    let end = if !is_over(&mut child, limit) {
        end_all(&mark);
        // What is printed last is worth a moment, and no more: who wiped the mark off may hold the pipe still.
        is_over(&mut child, begin.elapsed() + Duration::from_secs(10));
        End::Late
    } else if child.wait().is_ok_and(|status| status.success()) {
        End::Good
    } else {
        End::Failed
    };
    let mut text =
        printed.lock().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    if end == End::Late {
        text += &format!("\n{} is not over after {} s, and was killed\n", program.name, limit.as_secs());
    }
    (text, end)
}

/// Ends a program and all that it started. By their mark, and not as a process group: one of its own would not hear of
/// an interrupt from the keyboard.
fn end_all(mark: &str) {
    let mark = format!("{MARK}={mark}");
    // Twice: one may have been starting another one.
    for _ in 0..2 {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let is_marked = |dir: &Path| {
            let environment = std::fs::read(dir.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        };
        let marked =
            processes.filter(|process| is_marked(&process.path())).map(|process| process.file_name());
        // One that has ended meanwhile is told of, and nothing is wrong.
        let _ = Command::new("kill").arg("-KILL").args(marked).stderr(Stdio::null()).status();
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    lines.get(lines.len().saturating_sub(LAST_LINES)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_tests_are_found_in_messages() {
        let message = r#"{"reason":"compiler-artifact","manifest_path":"/p/disk/Cargo.toml","target":{"doctest":false,"test":true},"profile":{"opt_level":"1","test":true},"executable":"/t/deps/soak-12ab"}"#;
        let soak =
            Program { name: "soak".into(), path: "/t/deps/soak-12ab".into(), package: "/p/disk".into() };
        assert_eq!(program_of(message), Some(soak));
        assert_eq!(program_of(&message.replace("\"1\",\"test\":true", "\"1\",\"test\":false")), None);
        assert_eq!(program_of(&message.replace(r#""doctest":false"#, r#""kind":["bench"]"#)), None);
        assert_eq!(program_of(&message.replace("\"/t/deps/soak-12ab\"", "null")), None);
    }

    fn shell(name: &str) -> Program {
        Program { name: name.into(), path: "/bin/sh".into(), package: "/".into() }
    }

    #[test]
    fn results_are_collected_and_a_program_without_one_is_told() {
        let mut seen = String::new();
        let script = ["-c", "echo out; echo err >&2; echo 'test result: ok. 1 passed'"];
        let ends = run(&[shell("a"), shell("b"), shell("c")], &script, |text| seen.push_str(text));
        assert!(ends.all_good && ends.killed.is_empty());
        assert_eq!(seen, "out\nerr\ntest result: ok. 1 passed\n".repeat(3));
        let ends = run(&[shell("a")], &["-c", "kill -9 $$"], |_| {});
        assert!(!ends.all_good);
        assert_eq!(ends.killed, [Killed { name: "a".into(), last_lines: String::new() }]);
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_all_that_it_started() {
        // The second one is not even in its process group, and holds the pipe.
        let dir = std::env::temp_dir().join(format!("headwater-xtask-{}", std::process::id()));
        let script = format!("echo begun; setsid sleep 1000 & echo $! >{}; sleep 1000", dir.display());
        // Longer than a busy host takes to begin.
        let ends = run_within(Duration::from_secs(20), &[shell("a")], &["-c", &script], |_| {});
        assert!(!ends.all_good);
        let last_lines = "begun\na is not over after 20 s, and was killed".into();
        assert_eq!(ends.killed, [Killed { name: "a".into(), last_lines }]);
        let sleeper = std::fs::read_to_string(&dir).unwrap();
        std::fs::remove_file(dir).unwrap();
        // It lets go of the pipe a moment before it is gone.
        let killed = Instant::now();
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", sleeper.trim())).unwrap_or_default();
            if stat.is_empty() || stat.contains(") Z ") {
                break;
            }
            assert!(killed.elapsed() < Duration::from_secs(60), "it lives: {stat}");
            std::thread::sleep(Duration::from_millis(10));
        }
        // So where only what it left behind does not end.
        let script = "echo 'test result: ok. 1 passed'; sleep 1000 & exit 0";
        let ends = run_within(Duration::from_secs(1), &[shell("a")], &["-c", script], |_| {});
        assert!(!ends.all_good && ends.killed.len() == 1);
    }
}
