//! Runs test programs in parallel, starting while others are still being built.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::programs::Program;

/// Programs that take longest or mostly wait. They start first, so that only short programs that use the processor
/// are left at the end.
const LONG: &[&str] = &[
    "guests",
    "boot",
    "study_guest",
    "schedules",
    "crash",
    "claims",
    "ladder_on_disk",
    "soak",
    "s3",
    "headwater_store",
    "headwater_writecache",
    "s3_crash",
    "partial",
    "headwater_service",
    "web_console",
    "stores",
    "nodes",
    "restart",
    "ladder",
    "outage",
    "full_file_system",
    "queues",
    "xtask",
    "maintenance",
];

/// The packages whose tests run the product's program, or boot the guest. Both exist only when everything is built: the
/// program may be linked after the tests.
const WITH_PROGRAM: &[&str] = &["headwater", "studies"];

/// Tests that take minutes, built here for their lints: `vhost_user` and `libvirt`, with real clients, are run by `make conformance`, and
/// `debian`, most of which the guests of other tests show too, by `make long`.
const ELSEWHERE: &[&str] = &["vhost_user", "libvirt", "debian"];

/// How often a program that runs for longer is reported.
const STILL: Duration = Duration::from_secs(30);

/// A program that takes longer hangs: it is ended, and counts as failed. The longest take some minutes on a
/// busy host.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Set in the environment of a program, and inherited by everything that it starts.
const MARK: &str = "HEADWATER_TEST_PROGRAM";

/// How many of the last lines are repeated if a program gave no result.
const LAST_LINES: usize = 10;

/// How many lines about the failed tests of a program are repeated at the end.
const FAILURE_LINES: usize = 40;

/// How the programs ended.
#[derive(Debug, Default)]
pub struct Ends {
    /// Whether each program reported that it passed.
    pub all_good: bool,
    /// Programs that gave no result, or did not end.
    pub killed: Vec<Killed>,
    /// What failed tests printed. It is repeated at the end, because it may be thousands of lines above.
    pub failures: Vec<String>,
}

/// A program that gave no result, or did not end.
#[derive(Debug, PartialEq, Eq)]
pub struct Killed {
    pub name: String,
    pub last_lines: String,
}

/// Programs to run, and running ones.
#[derive(Default)]
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Set if tests are selected by name: they are run in whatever program they are.
    takes_all: bool,
}

#[derive(Default)]
struct State {
    waiting: Vec<Program>,
    running: Vec<(String, Instant)>,
    /// No more programs will be added.
    is_whole: bool,
}

impl Queue {
    /// Adds a program, divided into parts if it has any. If tests are selected by name, it is not divided.
    pub fn add(&self, program: Program) {
        if self.takes_all {
            lock(&self.state).waiting.push(program);
        } else if !ELSEWHERE.contains(&program.name.as_str()) {
            let parts = program.parts();
            lock(&self.state).waiting.extend(parts);
        }
        self.changed.notify_all();
    }

    /// The next program to run, for the first worker or another one. `None`: there are no more.
    fn next(&self, is_first: bool) -> Option<Program> {
        let mut state = lock(&self.state);
        loop {
            // While the compiler runs, one program runs beside it, so that the processors are busy when
            // either waits.
            let is_whole = state.is_whole;
            let is_ready =
                |program: &Program| !WITH_PROGRAM.iter().any(|package| program.package.ends_with(package));
            let fits = |program: &Program| is_whole || (is_first && is_ready(program));
            let place = |name: &str| LONG.iter().position(|long| *long == name).unwrap_or(LONG.len());
            let programs = state.waiting.iter().enumerate().filter(|(_, program)| fits(program));
            if let Some((at, _)) = programs.min_by_key(|(_, program)| place(&program.name)) {
                let program = state.waiting.remove(at);
                state.running.push((program.name.clone(), Instant::now()));
                return Some(program);
            }
            if is_whole {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn ended(&self, program: &Program) {
        let mut state = lock(&self.state);
        if let Some(at) = state.running.iter().position(|(name, _)| *name == program.name) {
            state.running.remove(at);
        }
    }
}

/// Ends the wait for more programs, even after a panic.
struct Whole<'a>(&'a Queue);

impl Drop for Whole<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).is_whole = true;
        self.0.changed.notify_all();
    }
}

/// Runs all programs that `feed` adds: one at a time while it runs, and several after it has ended. Returns
/// the result of `feed`. `output` is called with the output of each program when it has ended.
pub fn beside<T>(
    filter: &[&str],
    output: impl FnMut(&str) + Send,
    feed: impl FnOnce(&Queue) -> T,
) -> (T, Ends) {
    run_within(LIMIT, filter, output, feed)
}

fn run_within<T>(
    limit: Duration,
    filter: &[&str],
    output: impl FnMut(&str) + Send,
    feed: impl FnOnce(&Queue) -> T,
) -> (T, Ends) {
    let queue = Queue { takes_all: !filter.is_empty(), ..Queue::default() };
    let over = Mutex::new((Ends { all_good: true, ..Ends::default() }, output));
    // One more than there are processors, because mostly one of them waits for a disk, a guest or the clock.
    let workers = std::thread::available_parallelism().map_or(1, usize::from) + 1;
    let fed = std::thread::scope(|scope| {
        let (queue, over) = (&queue, &over);
        let work = move |number: usize| {
            while let Some(program) = queue.next(number == 0) {
                let begin = Instant::now();
                let (text, end) = run_one(&program, filter, limit);
                queue.ended(&program);
                let mut over = lock(over);
                println!("== {} in {} s", program.name, begin.elapsed().as_secs());
                println!("{text}");
                over.0.all_good &= end == End::Good;
                if end == End::Late || !text.lines().any(|line| line.starts_with("test result:")) {
                    let last_lines = last_lines(&text);
                    over.0.killed.push(Killed { name: program.name, last_lines });
                } else if end == End::Failed {
                    over.0.failures.push(failures(&program.name, &text));
                }
                (over.1)(&text);
            }
        };
        let workers: Vec<_> = (0..workers).map(|number| scope.spawn(move || work(number))).collect();
        scope.spawn(move || {
            let mut said = Instant::now();
            while !workers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                std::thread::sleep(Duration::from_millis(100));
                if said.elapsed() >= STILL {
                    said = Instant::now();
                    print_running(queue);
                }
            }
        });
        let _whole = Whole(queue);
        feed(queue)
    });
    (fed, over.into_inner().unwrap_or_else(PoisonError::into_inner).0)
}

fn print_running(queue: &Queue) {
    let state = lock(&queue.state);
    let names = state.running.iter().map(|(name, since)| format!("{name} ({} s)", since.elapsed().as_secs()));
    let names: Vec<_> = names.collect();
    if !names.is_empty() {
        println!("== running: {}", names.join(", "));
    }
}

/// A panic while holding the lock leaves the data valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Good,
    Failed,
    Late,
}

/// Runs a program to its end, or to the limit. Returns its output on both streams, and whether it passed.
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
    if !program.only.is_empty() {
        command.arg("--exact").args(&program.only);
    }
    command.args(filter).current_dir(&program.package).env("CARGO_MANIFEST_DIR", &program.package);
    let child = command.env(MARK, &mark).stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn();
    // It holds the writing ends: while they are open here, the output would not end.
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
    // Processes that the program started may hold the pipe after its end, so both must end.
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
        // Waits a moment for the last output, and no longer: a process that removed the mark from its
        // environment may still hold the pipe.
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
        text += &format!("\n{} did not end within {} s, and was killed\n", program.name, limit.as_secs());
    }
    (text, end)
}

/// Ends a program and everything that it started. They are found by their mark, and not by a process group: a
/// process group of its own would not receive an interrupt from the keyboard.
fn end_all(mark: &str) {
    let mark = format!("{MARK}={mark}");
    // Twice, because a process may have been starting another one.
    for _ in 0..2 {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let is_marked = |dir: &Path| {
            let environment = std::fs::read(dir.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        };
        let marked =
            processes.filter(|process| is_marked(&process.path())).map(|process| process.file_name());
        // kill reports a process that has ended meanwhile, which is no error.
        let _ = Command::new("kill").arg("-KILL").args(marked).stderr(Stdio::null()).status();
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    lines.get(lines.len().saturating_sub(LAST_LINES)..).unwrap_or_default().join("\n")
}

/// What the failed tests of a program printed. `libtest` puts it after the line `failures:`.
fn failures(name: &str, text: &str) -> String {
    let lines = text.lines().skip_while(|line| *line != "failures:").filter(|line| !line.is_empty());
    let lines: Vec<&str> = lines.skip(1).take(FAILURE_LINES).collect();
    format!("{name}:\n{}", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str) -> Program {
        Program { name: name.into(), path: "/bin/sh".into(), package: "/".into(), only: Vec::new() }
    }

    /// Runs it once with this script.
    fn run(limit: Duration, script: &str) -> Ends {
        run_within(limit, &["-c", script], |_| {}, |queue| queue.add(shell("a"))).1
    }

    #[test]
    fn results_are_collected_and_missing_ones_reported() {
        let mut seen = String::new();
        let script = ["-c", "echo out; echo err >&2; echo 'test result: ok. 1 passed'"];
        let feed = |queue: &Queue| ["a", "b", "c"].iter().for_each(|name| queue.add(shell(name)));
        let ((), ends) = beside(&script, |text| seen.push_str(text), feed);
        assert!(ends.all_good && ends.killed.is_empty());
        assert_eq!(seen, "out\nerr\ntest result: ok. 1 passed\n".repeat(3));
        let failed = "test a::b ... FAILED\n\nfailures:\n\n---- a::b stdout ----\nwrong\n\ntest result: FAILED. 0 passed";
        let ends = run(LIMIT, &format!("echo '{failed}'; exit 1"));
        assert!(!ends.all_good && ends.killed.is_empty());
        assert_eq!(ends.failures, ["a:\n---- a::b stdout ----\nwrong\ntest result: FAILED. 0 passed"]);
        let ends = run(LIMIT, "kill -9 $$");
        assert!(!ends.all_good);
        assert_eq!(ends.killed, [Killed { name: "a".into(), last_lines: String::new() }]);
    }

    #[test]
    fn during_the_build_one_program_runs_without_dependencies() {
        let dir = std::env::temp_dir().join(format!("headwater-xtask-beside-{}", std::process::id()));
        let add = |queue: &Queue, name: &str| {
            let package = dir.join(name);
            std::fs::create_dir_all(&package).unwrap();
            queue.add(Program { package, ..shell(name) });
        };
        let has_begun = |name: &str| dir.join(name).join("begun").exists();
        let wait_for = |name: &str| {
            let begin = Instant::now();
            while !has_begun(name) {
                assert!(begin.elapsed() < Duration::from_secs(60), "{name} does not begin");
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        // Each program ends only when permitted, so that the test sees how many run at a time.
        let script =
            "touch begun; until [ -e ../end ]; do sleep 0.01; done; echo 'test result: ok. 1 passed'";
        let (fed, ends) = run_within(
            Duration::from_secs(120),
            &["-c", script],
            |_| {},
            |queue| {
                add(queue, "headwater");
                add(queue, "studies");
                add(queue, "first");
                wait_for("first");
                add(queue, "second");
                std::thread::sleep(Duration::from_millis(300));
                let others = ["headwater", "studies", "second"].map(has_begun);
                std::fs::write(dir.join("end"), "").unwrap();
                wait_for("second");
                (others, ["headwater", "studies"].map(has_begun))
            },
        );
        assert_eq!(fed, ([false; 3], [false; 2]));
        assert!(ends.all_good && has_begun("headwater") && has_begun("studies"));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_hanging_program_is_ended_with_its_children() {
        // The second process is not even in its process group, and holds the pipe.
        let dir = std::env::temp_dir().join(format!("headwater-xtask-{}", std::process::id()));
        let script = format!("echo begun; setsid sleep 1000 & echo $! >{}; sleep 1000", dir.display());
        // Longer than a busy host takes to start.
        let ends = run(Duration::from_secs(20), &script);
        assert!(!ends.all_good);
        let last_lines = "begun\na did not end within 20 s, and was killed".into();
        assert_eq!(ends.killed, [Killed { name: "a".into(), last_lines }]);
        let sleeper = std::fs::read_to_string(&dir).unwrap();
        std::fs::remove_file(dir).unwrap();
        // It closes the pipe a moment before it ends.
        let killed = Instant::now();
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", sleeper.trim())).unwrap_or_default();
            if stat.is_empty() || stat.contains(") Z ") {
                break;
            }
            assert!(killed.elapsed() < Duration::from_secs(60), "it lives: {stat}");
            std::thread::sleep(Duration::from_millis(10));
        }
        // The same happens if only a process that it started does not end.
        let script = "echo 'test result: ok. 1 passed'; sleep 1000 & exit 0";
        let ends = run(Duration::from_secs(1), script);
        assert!(!ends.all_good && ends.killed.len() == 1);
    }
}
