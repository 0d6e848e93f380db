//! A moment in which a guest wants less than all of its processors, by the system's count of QEMU's threads.
//!
//! What is asked of a busy guest waits for its processors. A thread counts while it runs and while it waits to be run, so that a host
//! without a free processor does not make its guests look idle.

use std::time::Duration;

use tokio::time::Instant;

/// How long a moment is. A kernel's tick is 1 to 10 ms.
const MOMENT: Duration = Duration::from_millis(20);

/// So much of one processor, a part of eight, is wanted by a guest that does nothing: its ticks, and QEMU's own work.
const IDLE_EIGHTHS: u32 = 1;

/// Waits for such a moment of a process that runs `cpus` virtual processors, for as long as `patience`. Returns whether that is over, without
/// one; where the process is gone, or the system does not count, there is nothing to wait for.
pub async fn was_busy(pid: u32, cpus: u32, patience: Duration) -> bool {
    let begin = Instant::now();
    let Some(mut before) = wanted(pid) else { return false };
    let mut since = begin;
    while begin.elapsed() < patience {
        tokio::time::sleep(MOMENT).await;
        let Some(now) = wanted(pid) else { return false };
        // Less than before: a thread has ended, and nothing is known of this moment.
        if now.checked_sub(before).is_some_and(|wanted| leaves_one(wanted, since.elapsed(), cpus)) {
            return false;
        }
        (before, since) = (now, Instant::now());
    }
    true
}

/// Whether one of the processors was as good as idle for that long.
fn leaves_one(wanted: Duration, length: Duration, cpus: u32) -> bool {
    wanted * 8 <= length * (8 * cpus.saturating_sub(1) + IDLE_EIGHTHS)
}

/// How long the threads of a process have run, and waited to be run.
fn wanted(pid: u32) -> Option<Duration> {
    let mut sum_ns = 0_u64;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let path = task.ok()?.path().join("schedstat");
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            // A thread that has ended meanwhile.
            Err(_) if std::fs::exists("/proc/self/schedstat").unwrap_or(false) => continue,
            Err(_) => return None,
        };
        // Nanoseconds on a processor, nanoseconds of waiting for one, and how often.
        let mut numbers = text.split_whitespace().map_while(|number| number.parse::<u64>().ok());
        sum_ns = sum_ns.saturating_add(numbers.next()?).saturating_add(numbers.next()?);
    }
    Some(Duration::from_nanos(sum_ns))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn one_processor_is_enough() {
        for (wanted_ms, cpus, expected) in [
            (0, 1, true),
            (2, 1, true),
            (3, 1, false),
            (20, 1, false),
            (22, 2, true),
            (23, 2, false),
            (40, 2, false),
        ] {
            assert_eq!(leaves_one(wanted_ms * MS, 20 * MS, cpus), expected, "{wanted_ms} ms of {cpus}");
        }
    }

    struct Shell(Child);

    impl Shell {
        fn run(script: &str) -> Self {
            Self(Command::new("sh").args(["-c", script]).spawn().unwrap())
        }
    }

    impl Drop for Shell {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[tokio::test]
    async fn who_sleeps_is_quiet_and_who_computes_is_not() {
        let (idle, busy) = (Shell::run("exec sleep 1000"), Shell::run("while :; do :; done"));
        assert!(!was_busy(idle.0.id(), 1, Duration::from_secs(60)).await);
        assert!(was_busy(busy.0.id(), 1, 200 * MS).await);
        // With a second processor it would have one to spare.
        assert!(!was_busy(busy.0.id(), 2, Duration::from_secs(60)).await);
    }

    #[tokio::test]
    async fn a_process_that_is_gone_is_not_waited_for() {
        let mut gone = Command::new("true").spawn().unwrap();
        let pid = gone.id();
        gone.wait().unwrap();
        assert!(!was_busy(pid, 1, Duration::from_secs(60)).await);
    }
}
