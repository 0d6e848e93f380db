//! What a guest can do wrong with its rings, and warnings about it at a bounded rate.

use std::fmt::Display;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A queue that cannot be understood any more. It is stopped until the machine resets its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RingFault {
    #[error("a queue of {0} entries; possible are powers of two up to {max}", max = crate::queue::QUEUE_SIZE)]
    QueueSize(u16),
    #[error("the {name} at {addr:#x} is not aligned or not in the machine's memory")]
    RingAddress { name: &'static str, addr: u64 },
    #[error("the available index went {0} entries ahead, more than the queue has")]
    IndexJump(u16),
    #[error("descriptor {0} is not in the table")]
    DescriptorIndex(u16),
    #[error("a chain of descriptors is longer than its table: it has a loop")]
    Loop,
    #[error("an indirect table inside an indirect table, or one that goes on")]
    NestedIndirect,
    #[error("an indirect table of {0} bytes")]
    IndirectLength(u32),
    #[error("an indirect table at {0:#x}, which is not in the machine's memory")]
    IndirectAddress(u64),
    #[error("an indirect table, which was not negotiated")]
    IndirectForbidden,
    #[error("a buffer to read behind a buffer to write")]
    Order,
    #[error("a request without a byte for its status, or with one that is not in the machine's memory")]
    NoStatus,
    #[error("the kick descriptor is broken")]
    Kick,
}

const WINDOW: Duration = Duration::from_secs(10);

/// Tells what guests and devices do wrong, some lines in ten seconds, and counts the rest.
pub(crate) struct FaultLog {
    lines: u32,
    window: Mutex<Window>,
}

struct Window {
    started: Instant,
    told: u32,
    silent: u64,
}

impl FaultLog {
    pub(crate) fn new(lines: u32) -> Self {
        Self { lines, window: Mutex::new(Window { started: Instant::now(), told: 0, silent: 0 }) }
    }

    /// Tells who did what, unless enough was told lately.
    pub(crate) fn warn(&self, who: &dyn Display, what: &dyn Display) {
        let Some(silent) = self.window.lock().admit(Instant::now(), self.lines) else { return };
        if silent > 0 {
            tracing::warn!(silent, "vhost-user: {who}: warnings were left out to bound the log");
        }
        tracing::warn!("vhost-user: {who}: {what}");
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
        let seconds = |count| start + Duration::from_secs(count);
        let told: Vec<_> = [0, 1, 2, 9, 10, 11].map(|at| window.admit(seconds(at), 2)).into();
        assert_eq!(told, [Some(0), Some(0), None, None, Some(2), Some(0)]);
    }
}
