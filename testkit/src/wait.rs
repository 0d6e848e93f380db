//! Waits for other threads and processes, with a timeout.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// How long [`wait_until`] waits. It is generous, because the test machine may be busy, and well below the
/// test runner's limit for a whole program.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `is_so` returns true, and panics with `what` if the time runs out. Without a timeout a test
/// could not name the missing event.
///
/// `what` is evaluated when the time has run out: with [`std::fmt::from_fn`] it can describe the state at
/// that moment.
#[track_caller]
pub fn wait_until(what: impl Display, is_so: impl FnMut() -> bool) {
    assert!(comes_within(PATIENCE, is_so), "not within {} s: {what}", PATIENCE.as_secs());
}

/// Checks at once, then soon, then less and less often, because a waiting thread should leave the processors
/// to the threads it waits for.
fn comes_within(patience: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    let mut pause = Duration::from_micros(200);
    while !is_so() {
        if start.elapsed() > patience {
            return false;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_end_with_the_event_or_the_timeout() {
        let mut asked = 0;
        wait_until("the third time", || {
            asked += 1;
            asked == 3
        });
        assert_eq!(asked, 3);
        assert!(!comes_within(Duration::from_millis(5), || false));
    }
}
