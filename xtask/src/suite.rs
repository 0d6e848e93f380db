//! Runs the whole test suite. The last line is a summary.
//!
//! All steps run even if one fails, so that one run shows everything. A failed check (formatting, tidy,
//! clippy, or a build that does not compile) counts as one failure in the sum.
//!
//! The test programs run in parallel: one while others are being built, then one more than there are
//! processors, because many of them wait for guests, disks or the clock.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::programs;
use crate::runs::{self, Queue};

/// All tests except the schedules below, and all other targets for clippy.
const TESTS: &[&str] = &["--workspace", "--all-targets"];

/// Tests of the write cache under a model checker, which replaces locks and atomics, so the crate is built a
/// second time. The command names the whole workspace, so that all other crates keep the features with which they
/// were built.
const SCHEDULES: &[&str] =
    &["--workspace", "--features", "headwater-writecache/shuttle", "--test", "schedules"];

/// The builds. If clippy finds something, tests are built without it, so that their results are known too.
const BUILDS: [(&str, &str, &[&str]); 2] = [
    ("clippy and building the tests", "building the tests without clippy", TESTS),
    ("clippy and building the schedules", "building the schedules without clippy", SCHEDULES),
];

/// The results of the tests.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Tally {
    /// Adds a line of the form `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
    fn add_line(&mut self, line: &str) {
        let Some(counts) = line.trim().strip_prefix("test result:") else { return };
        for part in counts.split([';', '.']) {
            let mut words = part.split_whitespace();
            let (Some(number), Some(what)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<u64>() else { continue };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

/// The steps, and which of them failed.
#[derive(Default)]
struct Checks {
    failed: Vec<&'static str>,
}

impl Checks {
    fn run(
        &mut self,
        name: &'static str,
        step: impl FnOnce() -> Result<bool, String>,
    ) -> Result<bool, String> {
        println!("== {name}");
        let start = Instant::now();
        let good = step()?;
        println!("== {name}: {} in {} s", if good { "ok" } else { "FAILED" }, start.elapsed().as_secs());
        if !good {
            self.failed.push(name);
        }
        Ok(good)
    }
}

/// Runs everything; `Ok(false)` if something failed. `filter` is passed to the tests.
pub fn run(root: &Path, filter: &[&str]) -> Result<bool, String> {
    let mut checks = Checks::default();
    let mut tally = Tally::default();
    let output = |text: &str| text.lines().for_each(|line| tally.add_line(line));
    let (built, ends) = runs::beside(filter, output, |queue| build(root, filter, &mut checks, queue));
    let Built { at: built_at, examples } = built?;
    // A failed test is in the tally; a program that was killed is not.
    for program in &ends.killed {
        let (name, last) = (&program.name, &program.last_lines);
        println!(
            "{name} ended without a result: killed, or it could not be started. Its last lines:\n{last}"
        );
    }
    tally.failed += ends.killed.len() as u64;
    if !ends.all_good && tally.failed == 0 {
        println!("a program failed after all of its tests had passed");
        tally.failed += 1;
    }
    let end = if ends.all_good { "ok" } else { "FAILED" };
    println!("== tests: {end}, {} s after the last was built", built_at.elapsed().as_secs());
    checks.run("examples in the documentation", || {
        let output = examples.join().map_err(|_| "the examples' thread panicked".to_owned())?;
        let output = output.map_err(|error| format!("cannot run cargo test --doc: {error}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        text.lines().for_each(|line| tally.add_line(line));
        if !output.status.success() {
            println!("{text}{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(output.status.success())
    })?;
    for failure in &ends.failures {
        println!("== failed in {failure}");
    }
    if !checks.failed.is_empty() {
        println!("failed: {}", checks.failed.join(", "));
    }
    if tally.ignored > 0 {
        println!("{} ignored", tally.ignored);
    }
    let failed = tally.failed + checks.failed.len() as u64;
    println!("{} passed, {failed} failed", tally.passed);
    Ok(failed == 0)
}

/// The state when everything is built and the tests run.
struct Built {
    at: Instant,
    /// Runs the examples in the documentation in parallel with the tests: `rustdoc` mostly waits for the
    /// linker.
    examples: JoinHandle<io::Result<Output>>,
}

/// Runs all checks that are not tests, and queues all tests. Returns when that was done.
fn build(root: &Path, filter: &[&str], checks: &mut Checks, queue: &Queue) -> Result<Built, String> {
    // From a clean checkout it takes two minutes, mostly waiting, so it runs beside the compiler. If tests
    // are selected by name, those that need the guest build it.
    let mut guest = filter.is_empty().then(|| Guest::start(root)).transpose()?;
    checks.run("formatting", || cargo(root, &["fmt", "--all", "--check"]))?;
    checks.run("tidy", || crate::tidy::run(root))?;
    for (name, without_clippy, what) in BUILDS {
        let mut begun = Vec::new();
        let is_built = checks.run(name, || {
            programs::build(linting(root), what, |program| {
                begun.push((program.name.clone(), program.package.clone()));
                queue.add(program);
            })
        })?;
        if !is_built {
            checks.run(without_clippy, || {
                programs::build(command(root), what, |program| {
                    let is_same =
                        |(name, package): &(_, _)| *name == program.name && *package == program.package;
                    match begun.iter().position(is_same) {
                        // It was built together with clippy.
                        Some(at) => drop(begun.swap_remove(at)),
                        None => queue.add(program),
                    }
                })
            })?;
        }
    }
    if let Some(guest) = &mut guest {
        checks.run("the Debian guest", || guest.wait())?;
    }
    let mut examples = linting(root);
    examples.args(["test", "--workspace", "--doc", "--locked", "--quiet"]).args(filter);
    let examples = std::thread::spawn(move || examples.output());
    Ok(Built { at: Instant::now(), examples })
}

/// `guest/build` in progress; it prints its own messages.
struct Guest(Child);

impl Guest {
    fn start(root: &Path) -> Result<Self, String> {
        let program = root.join("guest/build");
        // The path of the image is for scripts.
        let started = Command::new(&program).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let mut guest = Self(started.map_err(|error| format!("cannot run {}: {error}", program.display()))?);
        // It asks for a password, which would be lost among the compiler's messages.
        if !is_root() && !guest.wait()? {
            return Err("guest/build failed: see above".to_owned());
        }
        Ok(guest)
    }

    /// Waits for the guest. Returns whether it exists now.
    fn wait(&mut self) -> Result<bool, String> {
        let status = self.0.wait().map_err(|error| format!("cannot wait for guest/build: {error}"))?;
        Ok(status.success())
    }
}

impl Drop for Guest {
    /// If an earlier step could not be run at all, nothing is left behind.
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            println!("waiting for guest/build to end");
            let _ = self.0.wait();
        }
    }
}

fn is_root() -> bool {
    // The owner of this process's files.
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

fn command(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

/// Cargo with a compiler that is also clippy: `cargo clippy` would check all libraries and all of our crates
/// once more. It gets its options as `cargo clippy` passes them.
fn linting(root: &Path) -> Command {
    let mut command = command(root);
    command.env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver");
    command.env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
    command
}

fn cargo(root: &Path, arguments: &[&str]) -> Result<bool, String> {
    let status = command(root).args(arguments).status();
    status.map(|s| s.success()).map_err(|error| format!("cannot run cargo {}: {error}", arguments.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_result_lines_are_summed() {
        let mut tally = Tally::default();
        for line in [
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s",
            "test a::b ... ok",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 4 filtered out; finished in 1.20s",
            "5 passed; 5 failed",
        ] {
            tally.add_line(line);
        }
        assert_eq!(tally, Tally { passed: 15, failed: 2, ignored: 1 });
    }
}
