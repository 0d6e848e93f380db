//! The dedup scan: finds written blocks that equal the base (the image below the cache), and frees their
//! slots.
//!
//! The hit path compares few writes with the base, because a comparison costs about half as much as a write.
//! (The volume decides which writes are compared.) Equal blocks that the hit path missed are found here.
//! Segments that were written to since their last scan are compared block by block: some each second, and
//! each segment before it is packed or spilled. A block whose base data is not in memory then stays as it is.

use std::time::{Duration, Instant};

use super::WriteCache;
use crate::cache::BLOCK;
use crate::counters::Hot;
use crate::map::split;
use crate::memory::copy_out;
use crate::segment::Segment;
use crate::sync::{Mutex, UNDER_MODEL_CHECKER};
use crate::units::{BlockNumber, Location, SegmentId, Slot};

/// Interval of the scans.
pub(crate) const INTERVAL: Duration = Duration::from_millis(if UNDER_MODEL_CHECKER { 0 } else { 1000 });

/// The most segments of one scan, over all caches of a host: some milliseconds.
pub(crate) const SEGMENTS_PER_SCAN: u32 = 64;

/// The most segment records that one scan examines to find segments to compare.
const RECORDS_PER_SCAN: u32 = 1 << 16;

/// The bytes that are compared first.
const PROBE_BYTES: usize = 512;

/// The data below a cache.
pub trait BaseImage: std::fmt::Debug + Send + Sync {
    /// Whether the block is known, without waiting, to begin with `data`. Called with the block's lock held:
    /// it must not use the cache.
    fn begins_with(&self, block: BlockNumber, data: &[u8]) -> bool;
}

/// The progress of the scans.
#[derive(Debug, Default)]
pub(crate) struct DedupScan(Mutex<Round>);

#[derive(Debug, Default)]
struct Round {
    /// Blocks that had been written when the round began.
    written: u64,
    /// The next segment.
    next: u32,
    /// Segments of the round that were not examined yet.
    left: u32,
}

impl WriteCache {
    /// Scans up to `most` segments that were written to since their last scan. Returns how many it scanned.
    pub(crate) fn scan_for_duplicates(&self, most: u32) -> u32 {
        // With a frozen map each change would copy its leaf; scanning a little later is as good.
        if self.base.is_none() || self.map.is_frozen() {
            return 0;
        }
        let written = self.blocks_written();
        let mut round = self.dedup_scan.0.lock();
        let numbers = self.log.lock().numbers_used();
        if round.left == 0 {
            if round.written == written {
                return 0;
            }
            (round.written, round.left) = (written, numbers);
        }
        let mut scanned = 0;
        for _ in 0..round.left.min(RECORDS_PER_SCAN) {
            if scanned == most {
                break;
            }
            let id = SegmentId(round.next);
            round.left -= 1;
            round.next = if round.next + 1 < numbers { round.next + 1 } else { 0 };
            if let Some(segment) = self.segments.get(id)
                && segment.word().ram().is_some()
                && self.scan_segment(segment, id)
            {
                scanned += 1;
            }
        }
        scanned
    }

    /// Whether there may be segments to scan.
    pub(crate) fn wants_scan(&self) -> bool {
        let has_work = |round: &Round| round.left > 0 || round.written != self.blocks_written();
        self.base.is_some() && !self.map.is_frozen() && has_work(&self.dedup_scan.0.lock())
    }

    fn blocks_written(&self) -> u64 {
        self.counters.total(Hot::WriteInPlace) + self.counters.total(Hot::WriteNew)
    }

    /// Frees the blocks of a segment in RAM that equal the base, if the segment was written to since its last
    /// scan.
    pub(crate) fn scan_segment(&self, segment: &Segment, id: SegmentId) -> bool {
        if self.base.is_none() || self.map.is_frozen() || !segment.take_changed() {
            return false;
        }
        for (slot, block) in segment.live_slots() {
            if self.equals_base(segment, (id, slot), block) {
                self.free_if_equals_base(segment, (id, slot), block);
            }
        }
        true
    }

    /// Whether the block seems to equal the base; under a lock that admits readers.
    fn equals_base(&self, segment: &Segment, at: (SegmentId, Slot), block: BlockNumber) -> bool {
        let (leaf, index) = split(block);
        let (Some(leaf), Some(base)) = (self.map.read(leaf), &self.base) else { return false };
        let (true, Some(address)) = (leaf.get(index) == Location::at(at.0, at.1), segment.word().ram())
        else {
            return false;
        };
        let mut data = [0; PROBE_BYTES];
        copy_out(address, at.1, 0, &mut data, &leaf);
        base.begins_with(block, &data)
    }

    fn free_if_equals_base(&self, segment: &Segment, at: (SegmentId, Slot), block: BlockNumber) {
        let _entered = self.enter();
        let (leaf, index) = split(block);
        let (Some(mut leaf), Some(base)) = (self.map.write(leaf), &self.base) else { return };
        let (true, Some(address)) = (leaf.get(index) == Location::at(at.0, at.1), segment.word().ram())
        else {
            return;
        };
        let mut data = [0; BLOCK];
        copy_out(address, at.1, 0, &mut data, &leaf);
        if base.begins_with(block, &data) && self.takes_notes() {
            self.elide(&mut leaf, index, block);
            leaf.fold();
        }
    }
}

/// The times of the scans of a host's caches.
#[derive(Debug, Default)]
pub(crate) struct DedupSchedule {
    next: Option<Instant>,
}

impl DedupSchedule {
    /// Scans a part of the caches, if that is due. Returns when the next scan is due, if there is work for
    /// it.
    pub(crate) fn run<'a>(
        &mut self,
        caches: impl Iterator<Item = &'a WriteCache>,
        now: Instant,
    ) -> Option<Instant> {
        let is_due = self.next.is_none_or(|next| next <= now);
        let mut left = SEGMENTS_PER_SCAN;
        let mut has_work = false;
        for cache in caches {
            if is_due {
                left -= cache.scan_for_duplicates(left);
            }
            has_work |= cache.wants_scan();
        }
        if is_due {
            self.next = now.checked_add(INTERVAL);
        }
        self.next.filter(|_| has_work)
    }
}
