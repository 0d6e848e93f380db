//! Waits for an idle window: a moment in which a guest leaves one of its processors idle, by the kernel's accounting of
//! QEMU's threads. The daemon waits for one before it freezes the guest's file systems for a seal: a guest whose
//! processors are all busy answers and thaws slowly.
//!
//! A thread counts as busy while it runs and while it waits to run, so that a host without a free processor does not
//! make its guests look idle.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// Length of an idle window. Longer than a kernel's tick (1 to 10 ms).
const MOMENT: Duration = Duration::from_millis(20);

/// The load of an idle guest in eighths of one processor: its ticks, and QEMU's own work.
const IDLE_EIGHTHS: u32 = 1;

/// How a wait for an idle window ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleWait {
    /// There was an idle window.
    Idle,
    /// The timeout ended first.
    TimedOut,
    /// The process is gone, or the kernel has no accounting. The wait ended at once.
    Unknown,
}

/// Waits for an idle window of a process with `cpus` virtual processors.
pub async fn wait_until_idle(pid: u32, cpus: u32, timeout: Duration) -> IdleWait {
    let begin = Instant::now();
    let Some(mut before) = threads(pid) else { return IdleWait::Unknown };
    let mut since = begin;
    while begin.elapsed() < timeout {
        tokio::time::sleep(MOMENT).await;
        let Some(now) = threads(pid) else { return IdleWait::Unknown };
        if leaves_one(demand(&before, &now, since.elapsed()), since.elapsed(), cpus) {
            return IdleWait::Idle;
        }
        (before, since) = (now, Instant::now());
    }
    IdleWait::TimedOut
}

/// Whether one of the processors was nearly idle for this length of time.
fn leaves_one(demand: Duration, length: Duration, cpus: u32) -> bool {
    demand * 8 <= length * (8 * cpus.saturating_sub(1) + IDLE_EIGHTHS)
}

/// The kernel's accounting of a thread.
struct Thread {
    /// How long it ran, and waited to run.
    demand: Duration,
    /// Whether it runs or waits now.
    is_runnable: bool,
}

/// How long all threads together ran or waited to run, within a window of this length.
fn demand(before: &BTreeMap<u32, Thread>, now: &BTreeMap<u32, Thread>, length: Duration) -> Duration {
    let of_one = |(id, thread): (&u32, &Thread)| {
        let then = before.get(id);
        let demand = thread.demand.saturating_sub(then.map_or(Duration::ZERO, |then| then.demand));
        // The kernel adds a wait when the wait ends. So a runnable thread may have waited all the time, or since its
        // last run.
        let waits = demand.is_zero() || then.is_some_and(|then| then.is_runnable);
        if thread.is_runnable && waits { demand.max(length) } else { demand }
    };
    // A thread that has ended counts as busy for the whole window.
    let ended = before.keys().filter(|id| !now.contains_key(id)).map(|_| length);
    now.iter().map(of_one).chain(ended).sum()
}

/// The threads of a process; `None` if it is gone, or the kernel has no accounting.
fn threads(pid: u32) -> Option<BTreeMap<u32, Thread>> {
    let mut threads = BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let task = task.ok()?;
        let id = task.file_name().to_str()?.parse().ok()?;
        let text = match std::fs::read_to_string(task.path().join("schedstat")) {
            Ok(text) => text,
            // A thread that has ended meanwhile.
            Err(_) if std::fs::exists("/proc/self/schedstat").unwrap_or(false) => continue,
            Err(_) => return None,
        };
        // Nanoseconds on a processor, nanoseconds of waiting for one, and how often.
        let mut numbers = text.split_whitespace().map_while(|number| number.parse::<u64>().ok());
        let demand = Duration::from_nanos(numbers.next()?.saturating_add(numbers.next()?));
        // The state comes behind the name, which may contain any character.
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        let is_runnable = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'));
        threads.insert(id, Thread { demand, is_runnable });
    }
    Some(threads)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn one_processor_is_enough() {
        for (demand_ms, cpus, expected) in [
            (0, 1, true),
            (2, 1, true),
            (3, 1, false),
            (20, 1, false),
            (22, 2, true),
            (23, 2, false),
            (40, 2, false),
        ] {
            assert_eq!(leaves_one(demand_ms * MS, 20 * MS, cpus), expected, "{demand_ms} ms of {cpus}");
        }
    }

    #[test]
    fn a_wait_that_is_not_over_counts() {
        let thread = |demand_ms: u32, is_runnable| Thread { demand: demand_ms * MS, is_runnable };
        for (then, now, expected_ms) in [
            // It sleeps. Between the two samples it slept, or ran and went back to sleep.
            ((5, false), (5, false), 0),
            ((5, true), (7, false), 2),
            // It has waited since it woke up, or it was woken up and ran.
            ((5, false), (5, true), 20),
            ((5, false), (7, true), 2),
            // It ran for a moment and waits again; or it ran all the time, and an earlier wait is counted only now.
            ((5, true), (6, true), 20),
            ((5, true), (25, true), 20),
            ((5, true), (95, true), 90),
        ] {
            let [then, now] =
                [then, now].map(|(ms, is_runnable)| BTreeMap::from([(1, thread(ms, is_runnable))]));
            assert_eq!(demand(&then, &now, 20 * MS), expected_ms * MS, "{expected_ms}");
        }
    }

    struct Shell(Child);

    impl Shell {
        /// Runs until it has written a line.
        fn run(script: &str) -> Self {
            let mut command = Command::new("sh");
            let mut child = command.args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
            Self(child)
        }
    }

    impl Drop for Shell {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[tokio::test]
    async fn a_sleeping_process_is_idle_and_a_computing_one_is_not() {
        let (idle, busy) = (Shell::run("echo; exec sleep 1000"), Shell::run("echo; while :; do :; done"));
        assert_eq!(wait_until_idle(idle.0.id(), 1, Duration::from_secs(60)).await, IdleWait::Idle);
        assert_eq!(wait_until_idle(busy.0.id(), 1, 200 * MS).await, IdleWait::TimedOut);
        // With a second processor, one would be idle.
        assert_eq!(wait_until_idle(busy.0.id(), 2, Duration::from_secs(60)).await, IdleWait::Idle);
    }

    /// The idle-priority process runs for one millisecond of about a hundred, and waits in all others.
    #[tokio::test]
    async fn a_process_that_waits_for_a_processor_is_not_idle() {
        let _other = Shell::run("taskset -cp 0 $$ >/dev/null; echo; while :; do :; done");
        let waits = Shell::run("taskset -cp 0 $$ >/dev/null; chrt -i -p 0 $$; echo; while :; do :; done");
        for _ in 0..10 {
            assert_eq!(wait_until_idle(waits.0.id(), 1, 200 * MS).await, IdleWait::TimedOut);
        }
    }

    #[tokio::test]
    async fn a_process_that_is_gone_is_not_waited_for() {
        let mut gone = Command::new("true").spawn().unwrap();
        let pid = gone.id();
        gone.wait().unwrap();
        assert_eq!(wait_until_idle(pid, 1, Duration::from_secs(60)).await, IdleWait::Unknown);
    }
}
