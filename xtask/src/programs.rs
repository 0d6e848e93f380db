//! The test programs: built by cargo, found in what it says, and run side by side.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// These take longest, and so begin first: what is left at the end should be short.
const LONG: &[&str] =
    &["guests", "soak", "debian", "vhost_user", "crash", "s3_crash", "schedules", "queues", "maintenance"];

/// Programs that run for longer say so this often.
const STILL: Duration = Duration::from_secs(30);

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
    /// Those that gave no result.
    pub killed: Vec<String>,
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
    let mut order: Vec<&Program> = programs.iter().collect();
    order.sort_by_key(|p| LONG.iter().position(|name| *name == p.name).unwrap_or(LONG.len()));
    let waiting = Mutex::new(VecDeque::from(order));
    let running = Mutex::new(Vec::<(String, Instant)>::new());
    let over = Mutex::new((Ends { all_good: true, killed: Vec::new() }, output));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers)
            .map(|_| {
                scope.spawn(|| {
                    while let Some(program) = waiting.lock().ok().and_then(|mut list| list.pop_front()) {
                        let begin = Instant::now();
                        if let Ok(mut running) = running.lock() {
                            running.push((program.name.clone(), begin));
                        }
                        let (text, good) = run_one(program, filter);
                        if let Ok(mut running) = running.lock() {
                            running.retain(|(name, since)| *name != program.name || *since != begin);
                        }
                        let Ok(mut over) = over.lock() else { return };
                        println!("== {} in {} s", program.name, begin.elapsed().as_secs());
                        println!("{text}");
                        over.0.all_good &= good;
                        if !text.lines().any(|line| line.starts_with("test result:")) {
                            over.0.killed.push(program.name.clone());
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

/// Runs a program to its end: what it printed on both streams, and whether it passed.
fn run_one(program: &Program, filter: &[&str]) -> (String, bool) {
    // One pipe for both streams keeps their order.
    let both = std::io::pipe().and_then(|(reader, writer)| Ok((reader, writer.try_clone()?, writer)));
    let (mut reader, stdout, stderr) = match both {
        Ok(both) => both,
        Err(error) => return (format!("cannot make a pipe for {}: {error}", program.path.display()), false),
    };
    let mut command = Command::new(&program.path);
    command.args(filter).current_dir(&program.package).env("CARGO_MANIFEST_DIR", &program.package);
    let child = command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn();
    // It holds the writing ends: with them open here the output would have no end.
    drop(command);
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return (format!("cannot run {}: {error}", program.path.display()), false),
    };
    let mut bytes = Vec::new();
    let read = std::io::Read::read_to_end(&mut reader, &mut bytes);
    let good = child.wait().is_ok_and(|status| status.success());
    (String::from_utf8_lossy(&bytes).into_owned(), good && read.is_ok())
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
        assert_eq!(ends.killed, ["a"]);
    }
}
