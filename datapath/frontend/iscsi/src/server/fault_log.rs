//! Warnings about initiators at a bounded rate, so that a hostile initiator cannot fill a log.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

const WINDOW: Duration = Duration::from_secs(10);

/// Counts warnings in windows of ten seconds.
pub(crate) struct FaultLog {
    limit: u32,
    window: Mutex<Window>,
}

struct Window {
    started: Instant,
    told: u32,
    kept_back: u64,
}

impl FaultLog {
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit, window: Mutex::new(Window { started: Instant::now(), told: 0, kept_back: 0 }) }
    }

    /// Tells who did what, unless too much was told lately.
    pub(crate) fn warn(&self, who: &dyn Display, what: &dyn Display) {
        let Some(kept_back) = self.admit(Instant::now()) else { return };
        if kept_back > 0 {
            tracing::warn!(kept_back, "iSCSI: further warnings were kept back to bound the log");
        }
        tracing::warn!("iSCSI: {who}: {what}");
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
        let log = FaultLog::new(2);
        let start = Instant::now();
        assert_eq!(log.admit(start), Some(0));
        assert_eq!(log.admit(start), Some(0));
        assert_eq!(log.admit(start), None);
        assert_eq!(log.admit(start + Duration::from_secs(9)), None);
        assert_eq!(log.admit(start + Duration::from_secs(11)), Some(2));
        assert_eq!(log.admit(start + Duration::from_secs(12)), Some(0));
    }
}
