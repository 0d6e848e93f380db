//! Warnings of a front-end about clients, guests and devices at a bounded rate, so that a hostile one cannot fill a log.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

const WINDOW: Duration = Duration::from_secs(10);

/// Tells what goes wrong, some lines in ten seconds, and counts the rest.
#[derive(Debug)]
pub struct FaultLog {
    front_end: &'static str,
    limit: u32,
    window: Mutex<Window>,
}

#[derive(Debug)]
struct Window {
    started: Instant,
    told: u32,
    kept_back: u64,
}

impl FaultLog {
    /// For a front-end of this name, which starts each line; at most `limit` lines in ten seconds.
    pub fn new(front_end: &'static str, limit: u32) -> Self {
        Self {
            front_end,
            limit,
            window: Mutex::new(Window { started: Instant::now(), told: 0, kept_back: 0 }),
        }
    }

    /// Tells who did what, unless too much was told lately.
    pub fn warn(&self, who: &dyn Display, what: &dyn Display) {
        let Some(kept_back) = self.admit(Instant::now()) else { return };
        if kept_back > 0 {
            tracing::warn!(kept_back, "{}: further warnings were kept back to bound the log", self.front_end);
        }
        tracing::warn!("{}: {who}: {what}", self.front_end);
    }

    /// `None` to keep quiet, else how many were kept back in the window before.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut window = self.window.lock();
        let mut kept_back = 0;
        if now.saturating_duration_since(window.started) >= WINDOW {
            kept_back = window.kept_back;
            *window = Window { started: now, told: 0, kept_back: 0 };
        }
        if window.told >= self.limit {
            window.kept_back = window.kept_back.saturating_add(1);
            return None;
        }
        window.told = window.told.saturating_add(1);
        Some(kept_back)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_lets_its_limit_pass_and_the_next_tells_what_was_kept_back() {
        let log = FaultLog::new("test", 2);
        let start = Instant::now();
        assert_eq!(log.admit(start), Some(0));
        assert_eq!(log.admit(start), Some(0));
        assert_eq!(log.admit(start), None);
        assert_eq!(log.admit(start + Duration::from_secs(9)), None);
        assert_eq!(log.admit(start + Duration::from_secs(11)), Some(2));
        assert_eq!(log.admit(start + Duration::from_secs(12)), Some(0));
    }
}
