//! A second look at what was written: blocks that hold what is beneath the cache need no space.
//!
//! The hit path compares few writes with the image, for a look costs about as much as half a write (what it looks at,
//! and why so seldom, is the volume's). What it missed is found here, off the hit path: a segment that was written to
//! since the last look is compared block by block, some of them each second, and each one before it is packed or
//! spilled. A block whose image is not in memory by then stays as it is.

use std::time::{Duration, Instant};

use super::WriteCache;
use crate::cache::BLOCK;
use crate::counters::Hot;
use crate::map::split;
use crate::memory::copy_out;
use crate::segment::Segment;
use crate::sync::{Mutex, UNDER_MODEL_CHECKER};
use crate::units::{BlockNumber, Location, SegmentId, Slot};

/// Segments are looked at this often.
pub(crate) const INTERVAL: Duration = Duration::from_millis(if UNDER_MODEL_CHECKER { 0 } else { 1000 });

/// So many at a time, of all caches of a host together: some milliseconds.
pub(crate) const SEGMENTS_A_LOOK: u32 = 64;

/// Records of segments that one turn goes through, for those to look at.
const RECORDS_A_LOOK: u32 = 1 << 16;

/// Compared before the whole block is.
const PROBE_BYTES: usize = 512;

/// What a cache lies over.
pub trait BaseImage: std::fmt::Debug + Send + Sync {
    /// Whether it is known, without waiting, that this block begins with `data` there. Called with the block's lock
    /// held: it must not use the cache.
    fn begins_with(&self, block: BlockNumber, data: &[u8]) -> bool;
}

/// How far the looks came.
#[derive(Debug, Default)]
pub(crate) struct DedupScan(Mutex<Round>);

#[derive(Debug, Default)]
struct Round {
    /// Blocks that had been written when the round began.
    written: u64,
    /// The next segment.
    next: u32,
    /// Segments that are left of the round.
    left: u32,
}

impl WriteCache {
    /// Looks at up to `most` segments that were written to since they were looked at. How many it looked at.
    pub(crate) fn scan_for_duplicates(&self, most: u32) -> u32 {
        // A change to a leaf of a frozen map copies it; what is found a little later is as good.
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
        let mut looked = 0;
        for _ in 0..round.left.min(RECORDS_A_LOOK) {
            if looked == most {
                break;
            }
            let id = SegmentId(round.next);
            round.left -= 1;
            round.next = if round.next + 1 < numbers { round.next + 1 } else { 0 };
            if let Some(segment) = self.segments.get(id)
                && segment.word().ram().is_some()
                && self.look_at(segment, id)
            {
                looked += 1;
            }
        }
        looked
    }

    /// Whether there are segments to look at, or may be.
    pub(crate) fn wants_scan(&self) -> bool {
        let is_behind = |round: &Round| round.left > 0 || round.written != self.blocks_written();
        self.base.is_some() && !self.map.is_frozen() && is_behind(&self.dedup_scan.0.lock())
    }

    fn blocks_written(&self) -> u64 {
        self.counters.total(Hot::WriteInPlace) + self.counters.total(Hot::WriteNew)
    }

    /// Frees the blocks of a segment in RAM that hold what is beneath, if it was written to since the last look.
    pub(crate) fn look_at(&self, segment: &Segment, id: SegmentId) -> bool {
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

    /// Whether the block seems to be what is beneath; under a lock that lets its readers through.
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

/// When the caches of a host are looked at again.
#[derive(Debug, Default)]
pub(crate) struct DedupSchedule {
    next: Option<Instant>,
}

impl DedupSchedule {
    /// Looks at a part of what these caches hold, where it is time. Returns when it will be again, if ever.
    pub(crate) fn turn<'a>(
        &mut self,
        caches: impl Iterator<Item = &'a WriteCache>,
        now: Instant,
    ) -> Option<Instant> {
        let is_due = self.next.is_none_or(|next| next <= now);
        let mut left = SEGMENTS_A_LOOK;
        let mut is_behind = false;
        for cache in caches {
            if is_due {
                left -= cache.scan_for_duplicates(left);
            }
            is_behind |= cache.wants_scan();
        }
        if is_due {
            self.next = now.checked_add(INTERVAL);
        }
        self.next.filter(|_| is_behind)
    }
}
