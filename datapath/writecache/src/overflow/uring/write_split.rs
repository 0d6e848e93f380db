//! Limits the length of a write's pieces, so that a read need not wait behind the write of a whole segment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// While there are reads, a long write is executed in pieces of this length, one after the other. Reads get
/// in between; otherwise they would wait behind all of it on a disk that executes requests in order.
const PIECE_BYTES: u32 = 256 << 10;
/// Cleaning reads whole segments, for which no request waits. Reads of requests are much shorter.
const AWAITED_READ_BYTES: usize = 1 << 20;
/// For this time after a read has started, it may still be in progress, or more reads may come. Without
/// reads, pieces would only make writes slower.
const QUIET: Duration = Duration::from_millis(100);

/// Records when the last read was.
pub(super) struct WriteSplit {
    opened: Instant,
    /// Microseconds after `opened`; 0: never.
    last_read_us: AtomicU64,
}

impl WriteSplit {
    pub(super) fn new() -> Self {
        Self { opened: Instant::now(), last_read_us: AtomicU64::new(0) }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
    }

    /// A read of `len` bytes starts.
    pub(super) fn read_starts(&self, len: usize) {
        if len <= AWAITED_READ_BYTES {
            self.last_read_us.store(self.now_us(), Ordering::Relaxed);
        }
    }

    /// The most bytes that a write may transfer at once.
    pub(super) fn write_bytes(&self) -> u32 {
        let last = self.last_read_us.load(Ordering::Relaxed);
        let is_quiet = last == 0 || Duration::from_micros(self.now_us().saturating_sub(last)) > QUIET;
        if is_quiet { u32::MAX } else { PIECE_BYTES }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overflow::MAX_READ_SLOTS;
    use crate::overflow::encrypt::{ENCRYPTED_SEGMENT_BYTES, ENCRYPTED_SLOT_BYTES};

    #[test]
    fn writes_are_cut_only_while_somebody_reads() {
        let write_split = WriteSplit::new();
        assert_eq!(write_split.write_bytes(), u32::MAX);
        write_split.read_starts(ENCRYPTED_SEGMENT_BYTES);
        assert_eq!(write_split.write_bytes(), u32::MAX, "cleaning");
        // Repeated, in case the machine stands still for the whole of QUIET between the two.
        let is_cut = (0..1000).any(|_| {
            write_split.read_starts(MAX_READ_SLOTS * ENCRYPTED_SLOT_BYTES + 2 * 4096);
            write_split.write_bytes() == PIECE_BYTES
        });
        assert!(is_cut);
        std::thread::sleep(2 * QUIET);
        assert_eq!(write_split.write_bytes(), u32::MAX);
    }
}
