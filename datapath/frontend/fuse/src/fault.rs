//! Warnings about a mount, at a bounded rate.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

const WINDOW: Duration = Duration::from_secs(10);

/// Tells what goes wrong, some lines in ten seconds, and counts the rest.
pub(crate) struct FaultLog {
    lines: u32,
    who: String,
    window: Mutex<Window>,
}

struct Window {
    started: Instant,
    told: u32,
    silent: u64,
}

impl FaultLog {
    pub(crate) fn new(who: String, lines: u32) -> Self {
        Self { lines, who, window: Mutex::new(Window { started: Instant::now(), told: 0, silent: 0 }) }
    }

    /// Tells what happened, unless enough was told lately.
    pub(crate) fn warn(&self, what: &dyn Display) {
        let Some(silent) = self.window.lock().admit(Instant::now(), self.lines) else { return };
        if silent > 0 {
            tracing::warn!(silent, "fuse: {}: warnings were left out to bound the log", self.who);
        }
        tracing::warn!("fuse: {}: {what}", self.who);
    }
}

impl Window {
    /// `None` to be silent, else how many lines the window before was silent about.
    fn admit(&mut self, now: Instant, lines: u32) -> Option<u64> {
        let mut silent = 0;
        if now.saturating_duration_since(self.started) >= WINDOW {
            silent = self.silent;
            *self = Self { started: now, told: 0, silent: 0 };
        }
        if self.told >= lines {
            self.silent = self.silent.saturating_add(1);
            return None;
        }
        self.told = self.told.saturating_add(1);
        Some(silent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted_and_told_in_the_next_window() {
        let start = Instant::now();
        let mut window = Window { started: start, told: 0, silent: 0 };
        let told: Vec<_> = [0, 5, 9, 11].map(|at| window.admit(start + Duration::from_secs(at), 2)).into();
        assert_eq!(told, [Some(0), Some(0), None, Some(1)]);
    }
}
