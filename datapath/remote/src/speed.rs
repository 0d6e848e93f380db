//! Moving averages of how fast a server answers, from which the next server to ask is chosen.

use std::time::Duration;

/// The first-byte time that is assumed for a server that has not been measured yet.
const FIRST_BYTE_ASSUMED_NS: u64 = 1_000_000;
/// The time for each byte that is assumed for such a server.
const BYTE_ASSUMED_PS: u64 = 10_000;
/// Answers shorter than this are not used to measure the rate.
const RATE_FROM_BYTES: u64 = 32 << 10;
/// The weight of a new sample is 1 / `WEIGHT`.
const WEIGHT: u64 = 8;

/// Moving averages of one server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Speed {
    first_byte_ns: Option<u64>,
    /// Picoseconds for each byte after the first.
    byte_ps: Option<u64>,
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn average(before: Option<u64>, sample: u64) -> Option<u64> {
    Some(match before {
        None => sample,
        Some(before) => before.saturating_sub(before / WEIGHT).saturating_add(sample / WEIGHT),
    })
}

impl Speed {
    /// Records an answer of `len` bytes. Its first byte came after `first_byte`, the last one after `whole`.
    pub(crate) fn answered(&mut self, len: u64, first_byte: Duration, whole: Duration) {
        self.first_byte_ns = average(self.first_byte_ns, nanoseconds(first_byte));
        if len >= RATE_FROM_BYTES {
            let sample = nanoseconds(whole.saturating_sub(first_byte)).saturating_mul(1000) / len;
            self.byte_ps = average(self.byte_ps, sample);
        }
    }

    /// Records a probe. It does not measure the rate, so the known time for each byte is only reduced a
    /// little. In this way a slow server is tried again.
    pub(crate) fn probed(&mut self, first_byte: Duration) {
        self.first_byte_ns = average(self.first_byte_ns, nanoseconds(first_byte));
        self.byte_ps = self.byte_ps.map(|ps| ps.saturating_sub(ps / WEIGHT));
    }

    /// Records that an answer had not arrived after `waited`, when another server's did.
    pub(crate) fn was_late(&mut self, waited: Duration) {
        let waited = nanoseconds(waited).max(self.first_byte_ns.unwrap_or(0));
        // Set at once, not averaged: a server that hangs must not be chosen for the next reads.
        self.first_byte_ns = Some(waited);
    }

    /// How long an answer of `len` bytes is expected to take.
    pub(crate) fn estimate(&self, len: u64) -> Duration {
        let bytes_ns = self.byte_ps.unwrap_or(BYTE_ASSUMED_PS).saturating_mul(len) / 1000;
        Duration::from_nanos(self.first_byte_ns.unwrap_or(FIRST_BYTE_ASSUMED_NS).saturating_add(bytes_ns))
    }

    /// The time to the first byte, if it was measured.
    pub(crate) fn first_byte(&self) -> Option<Duration> {
        self.first_byte_ns.map(Duration::from_nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_follow_measurements() {
        let ms = Duration::from_millis;
        let mut speed = Speed::default();
        for _ in 0..50 {
            speed.answered(1_000_000, ms(2), ms(12));
        }
        let estimate = speed.estimate(2_000_000);
        assert!(estimate > ms(21) && estimate < ms(23), "{estimate:?}");
        speed.was_late(ms(500));
        assert!(speed.estimate(0) >= ms(500));
        for _ in 0..50 {
            speed.probed(ms(1));
        }
        assert!(speed.estimate(0) < ms(2));
    }
}
