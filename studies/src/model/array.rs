//! A model of a RAID 5 array of disks with 15,000 revolutions per minute.
//!
//! | operation | operations of the spindles |
//! |---|---|
//! | read | one read for each stripe unit in its range |
//! | write of a whole stripe | one write for each data unit, and one of the parity |
//! | write of a part of a stripe | reads of the old data and the old parity, then writes of both |
//!
//! Each spindle serves its queue in order of arrival. An operation takes a seek and half a revolution, and the
//! transfer time of its bytes. The seek and half revolution are skipped if the operation begins at or shortly after
//! the end of the spindle's last operation. There is no cache and no reordering.

/// The most spindles of an array.
pub const MOST_SPINDLES: u32 = 64;

/// Length of a stripe unit, in bytes.
const UNIT_BYTES: u64 = 64 << 10;

/// A seek of 3.5 ms and half a revolution of 2 ms: 180 operations per second.
const SEEK_NS: u64 = 5_500_000;

/// An operation that begins at most this far after the end of the last one needs no seek.
const NEAR_BYTES: u64 = 64 << 10;

/// Transfer rate of a spindle, in bytes per second.
const BYTES_PER_S: u64 = 150_000_000;

/// Numbers of operations of all spindles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpindleOperations {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Spindle {
    free_ns: u64,
    /// The end of its last operation; `None` before the first.
    last_end: Option<u64>,
}

/// The array.
#[derive(Clone, Debug)]
pub struct Array {
    spindles: Vec<Spindle>,
    operations: SpindleOperations,
}

/// The part of an operation in one stripe unit: the unit, and the range in it.
#[derive(Clone, Copy, Debug)]
struct Piece {
    unit: u64,
    from: u64,
    bytes: u64,
}

impl Array {
    /// An idle array of at least 3 spindles.
    pub fn new(spindles: u32) -> Self {
        let spindles = vec![Spindle::default(); spindles.max(3) as usize];
        Self { spindles, operations: SpindleOperations::default() }
    }

    /// The numbers of operations so far.
    pub fn operations(&self) -> SpindleOperations {
        self.operations
    }

    fn data_units(&self) -> u64 {
        self.spindles.len() as u64 - 1
    }

    /// The time at which an operation that arrives now is completed.
    pub fn due_ns(&mut self, now_ns: u64, is_write: bool, offset: u64, bytes: u64) -> u64 {
        let stripe_bytes = UNIT_BYTES * self.data_units();
        let (mut at, end, mut due_ns) = (offset, offset + bytes, now_ns);
        while at < end {
            let stripe = at / stripe_bytes;
            let stripe_end = ((stripe + 1) * stripe_bytes).min(end);
            let done_ns = self.stripe(now_ns, is_write, stripe, (at % stripe_bytes, stripe_end - at));
            due_ns = due_ns.max(done_ns);
            at = stripe_end;
        }
        due_ns
    }

    /// Processes the part of an operation in one stripe: offset `from` and length.
    fn stripe(&mut self, now_ns: u64, is_write: bool, stripe: u64, (from, bytes): (u64, u64)) -> u64 {
        let is_whole = bytes == UNIT_BYTES * self.data_units();
        let (mut at, end, mut pieces) = (from, from + bytes, Vec::new());
        while at < end {
            let piece_end = ((at / UNIT_BYTES + 1) * UNIT_BYTES).min(end);
            pieces.push(Piece { unit: at / UNIT_BYTES, from: at % UNIT_BYTES, bytes: piece_end - at });
            at = piece_end;
        }
        let count = self.spindles.len() as u64;
        // The parity unit rotates over the spindles, and the data units follow it.
        let parity = count - 1 - stripe % count;
        let place = |piece: &Piece| (parity + 1 + piece.unit) % count;
        let mut due_ns = now_ns;
        let mut go = |array: &mut Self, spindle: u64, is_write: bool, from: u64, bytes: u64| {
            let done_ns = array.one(now_ns, spindle, is_write, stripe * UNIT_BYTES + from, bytes);
            due_ns = due_ns.max(done_ns);
        };
        if !is_write {
            pieces.iter().for_each(|piece| go(self, place(piece), false, piece.from, piece.bytes));
            return due_ns;
        }
        // The range of the parity that any changed unit affects.
        let first = pieces.iter().map(|piece| piece.from).min().unwrap_or(0);
        let last = pieces.iter().map(|piece| piece.from + piece.bytes).max().unwrap_or(0);
        // On each spindle, the write follows its read directly. The model does not wait for the reads of the other
        // spindles, so that no spindle idles.
        for is_write in [false, true].into_iter().filter(|is_write| *is_write || !is_whole) {
            pieces.iter().for_each(|piece| go(self, place(piece), is_write, piece.from, piece.bytes));
            go(self, parity, is_write, first, last - first);
        }
        due_ns
    }

    /// One operation of a spindle. Returns the time of its end.
    fn one(&mut self, now_ns: u64, spindle: u64, is_write: bool, at: u64, bytes: u64) -> u64 {
        let counter = if is_write { &mut self.operations.writes } else { &mut self.operations.reads };
        *counter += 1;
        let spindle = &mut self.spindles[spindle as usize];
        let is_near = spindle.last_end.is_some_and(|end| at >= end && at - end <= NEAR_BYTES);
        let seek_ns = if is_near { 0 } else { SEEK_NS };
        let took_ns = seek_ns + bytes.saturating_mul(1_000_000_000) / BYTES_PER_S;
        spindle.free_ns = spindle.free_ns.max(now_ns) + took_ns;
        spindle.last_end = Some(at + bytes);
        spindle.free_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Random 4 KiB operations per second of an array that is always busy.
    fn iops(spindles: u32, write_percent: u64) -> (f64, SpindleOperations, u64) {
        const SECONDS: u64 = 60;
        let (mut array, mut random) = (Array::new(spindles), Random::new(1));
        let mut ends = std::collections::BinaryHeap::from(vec![std::cmp::Reverse(0_u64); 256]);
        let mut count = 0;
        while let Some(std::cmp::Reverse(now_ns)) = ends.pop() {
            if now_ns > SECONDS * 1_000_000_000 {
                break;
            }
            let (is_write, at) = (random.below(100) < write_percent, random.below(1 << 26) * 4096);
            ends.push(std::cmp::Reverse(array.due_ns(now_ns, is_write, at, 4096)));
            count += 1;
        }
        ((count - 256) as f64 / SECONDS as f64, array.operations(), count)
    }

    #[test]
    fn small_operations_cost_as_raid_5_arithmetic_says() {
        // 5.5 ms, and 4 KiB at 150 MB/s.
        let one = 1e9 / (5_500_000.0 + 4096.0 / 0.15);
        for (write_percent, cost) in [(0, 1.0), (90, 3.7), (100, 4.0)] {
            let (found, ..) = iops(8, write_percent);
            let expected = 8.0 * one / cost;
            assert!((found / expected - 1.0).abs() < 0.06, "{write_percent} %: {found}, expected {expected}");
        }
    }

    #[test]
    fn operations_of_the_spindles_are_counted_exactly() {
        let (_, reads, count) = iops(5, 0);
        assert_eq!(reads, SpindleOperations { reads: count, writes: 0 });
        let (_, writes, count) = iops(5, 100);
        assert_eq!(writes, SpindleOperations { reads: 2 * count, writes: 2 * count });
        // Four spindles have stripes of 192 KiB. 2 MiB from the beginning of a stripe are 10 whole stripes and 128
        // KiB, which are two units.
        let mut array = Array::new(4);
        array.due_ns(0, true, 0, 2 << 20);
        assert_eq!(array.operations(), SpindleOperations { reads: 3, writes: 10 * 4 + 3 });
    }

    #[test]
    fn single_and_sequential_operations_take_calculated_times() {
        let mut array = Array::new(3);
        assert_eq!(
            array.due_ns(1_000_000_000, false, 0, 150_000),
            1_000_000_000 + 5_500_000 + 65_536 * 1000 / 150
        );
        // In the next stripe, units 0 and 1 directly follow the last ones of two spindles, or begin one unit later.
        let idle_ns = 2_000_000_000;
        let next_ns = array.due_ns(idle_ns, false, 262_144, 65_536);
        assert_eq!(next_ns - idle_ns, 65_536 * 1000 / 150);
        // A small write: read and write of data and parity, on two spindles at the same time.
        let mut array = Array::new(3);
        let one_ns = 5_500_000 + 4096 * 1000 / 150;
        assert_eq!(array.due_ns(0, true, 4096, 4096), 2 * one_ns);
    }
}
