//! Computes how many 2 MiB segments a write cache may keep in RAM, and changes its limits while it runs.
//!
//! The cache's RAM budget is its own limit, or its share of the host's limit if that is less. The index, packed
//! segments and staging buffers are subtracted; the rest is for unpacked segments.
//!
//! | number of segments | meaning |
//! |---|---|
//! | `allowed_segments` | the most that may be in RAM |
//! | `dirty_limit` | if more segments without a copy on disk are in RAM, cold segments are packed or spilled |
//! | `least_segments` | always allowed, even if the index has outgrown the limit |
//!
//! This module only computes numbers; other modules pack, spill and evict.

use std::sync::atomic::Ordering;

use headwater_block::{IoError, IoErrorKind, size};

use super::{MIN_DISK_BYTES, MIN_RAM_BYTES, MIN_SEGMENTS, SEGMENTS_BESIDE_INDEX, WriteCache};
use crate::budget::Holding;
use crate::counters::Hot;
use crate::log::Log;
use crate::map::TABLE_BYTES;
use crate::persist;
use crate::segment::RECORD_BYTES;
use crate::sync::UNDER_MODEL_CHECKER;
use crate::units::{SEGMENT_BYTES, SLOTS};

/// If blocks are contiguous, the index takes at most 0.2 % of their size: a table and a record for each 2
/// MiB.
const _: () = assert!(UNDER_MODEL_CHECKER || (TABLE_BYTES + RECORD_BYTES) * 500 <= SEGMENT_BYTES as u64);

impl WriteCache {
    /// RAM that the cache may use now: its own limit, or its share of the host's limit if that is less.
    pub(super) fn ram_limit_bytes(&self) -> u64 {
        self.ram_bytes.load(Ordering::Relaxed).min(self.share.bytes())
    }

    /// The cache's part of the host's staging buffers, and the buffers of a persistent cache's own thread. They count
    /// before they are allocated, so that the allowed number of segments does not jump at the allocation.
    fn staging_bytes(&self) -> u64 {
        let part = if self.overflow.is_some() { self.host.budget.staging_part_bytes() } else { 0 };
        part + if self.persist.is_some() { persist::BUFFERS_BYTES } else { 0 }
    }

    /// The figures from which the host's thread divides the budget.
    pub(crate) fn holding(&self) -> Holding {
        let (segments, index_bytes) = {
            let log = self.log.lock();
            (u64::from(log.ram_segments), self.index_bytes(&log))
        };
        let fixed = index_bytes + self.staging_bytes();
        let hits = [Hot::ReadRam, Hot::ReadPacked, Hot::WriteInPlace, Hot::WriteNew];
        Holding {
            max_bytes: self.most_bytes(index_bytes),
            least_bytes: fixed + MIN_SEGMENTS * SEGMENT_BYTES as u64,
            used_bytes: fixed + self.packed.bytes() + segments * SEGMENT_BYTES as u64,
            hits: hits.into_iter().map(|which| self.counters.total(which)).sum(),
        }
    }

    /// RAM in bytes that the cache may use while the host has enough RAM: the cache's own limit. With an overflow disk
    /// it is more if an index of this size and the fixed buffers leave too little of the limit for segments.
    pub(super) fn most_bytes(&self, index_bytes: u64) -> u64 {
        let own = self.ram_bytes.load(Ordering::Relaxed);
        if self.overflow.is_none() {
            return own;
        }
        own.max(index_bytes + self.staging_bytes() + self.beside_index() * SEGMENT_BYTES as u64)
    }

    /// Whether the cache's share of the host's limit is less than its own limit.
    pub(crate) fn has_less_than_its_limit(&self) -> bool {
        self.share.bytes() < self.ram_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn index_bytes(&self, log: &Log) -> u64 {
        self.map.table_bytes() + self.map.partial_bytes() + u64::from(log.numbers_used()) * RECORD_BYTES
    }

    /// Reports the size of the index to the host's budget. Under the log's lock, so that each change is
    /// reported once.
    pub(crate) fn report_index(&self, log: &Log) {
        let now = self.index_bytes(log);
        let before = self.reported_index.swap(now, Ordering::Relaxed);
        if now >= before {
            self.host.add_ram(now - before);
        } else {
            self.host.give_ram(before - now);
        }
    }

    /// How many unpacked segments may be in RAM.
    pub(crate) fn allowed_segments(&self, log: &Log) -> u32 {
        let growth = if self.overflow.is_none() { self.index_growth_bytes() } else { 0 };
        let fixed = self.index_bytes(log) + growth + self.packed.bytes() + self.staging_bytes();
        let left = self.ram_limit_bytes().saturating_sub(fixed) / SEGMENT_BYTES as u64;
        u32::try_from(left.max(self.least_segments(log))).unwrap_or(u32::MAX)
    }

    /// The number of segments that the cache may have, however large its index is. Without an overflow disk, or if
    /// the share of the host's limit has no space for more, this is [`MIN_SEGMENTS`].
    fn least_segments(&self, log: &Log) -> u64 {
        if self.overflow.is_none() {
            return MIN_SEGMENTS;
        }
        let others = self.index_bytes(log) + self.packed.bytes() + self.staging_bytes();
        let in_share = self.share.bytes().saturating_sub(others) / SEGMENT_BYTES as u64;
        self.beside_index().min(in_share).max(MIN_SEGMENTS)
    }

    /// The number of segments that would fit if there were no index, at most [`SEGMENTS_BESIDE_INDEX`].
    fn beside_index(&self) -> u64 {
        if self.persist.is_some() {
            // Each segment reserves a position on disk when it is begun, and a small disk has few.
            return MIN_SEGMENTS;
        }
        let own = self.ram_bytes.load(Ordering::Relaxed);
        let without_index = own.saturating_sub(self.staging_bytes()) / SEGMENT_BYTES as u64;
        without_index.clamp(MIN_SEGMENTS, SEGMENTS_BESIDE_INDEX)
    }

    /// The most bytes that the segment being filled may add to the index: a table for each of its blocks, but at
    /// most as much as all tables take now. With an overflow disk, a spare segment covers this growth.
    fn index_growth_bytes(&self) -> u64 {
        self.map.table_bytes().min(SLOTS as u64 * TABLE_BYTES)
    }

    /// The size of the index in bytes: its present size, or twice the size of its tables if that is more. Records of
    /// segments stay when tables are removed.
    fn index_estimate_bytes(&self, log: &Log) -> u64 {
        self.index_bytes(log).max(self.map.table_bytes() * 2)
    }

    /// If there are more dirty segments than this, cold ones are packed or spilled.
    pub(crate) fn dirty_limit(&self, log: &Log) -> u32 {
        let allowed = self.ram_limit_bytes() / SEGMENT_BYTES as u64;
        let index = self.index_estimate_bytes(log);
        let taken = (index + self.packed.bytes() + self.staging_bytes()).div_ceil(SEGMENT_BYTES as u64);
        let left = |reserve: u64| allowed.saturating_sub(taken + reserve).max(self.least_segments(log));
        let limit = match self.overflow {
            Some(_) => left(1) * 7 / 10,
            None => left(1).saturating_sub(2),
        };
        u32::try_from(limit).unwrap_or(u32::MAX)
    }

    /// RAM in bytes that packed segments may take.
    pub(crate) fn packed_limit_bytes(&self, log: &Log) -> u64 {
        let ram = self.ram_limit_bytes();
        match self.overflow {
            Some(_) => {
                let segments = self.least_segments(log) * SEGMENT_BYTES as u64;
                let others = self.index_estimate_bytes(log) + self.staging_bytes() + segments;
                (ram / 2).min(ram.saturating_sub(others))
            }
            None => {
                let segments = (MIN_SEGMENTS + 1) * SEGMENT_BYTES as u64;
                ram.saturating_sub(self.index_bytes(log) + self.index_growth_bytes() + segments)
            }
        }
    }

    /// Whether packed segments take all RAM that they may.
    pub(crate) fn packed_is_full(&self) -> bool {
        let limit_bytes = self.packed_limit_bytes(&self.log.lock());
        self.packed.bytes() >= limit_bytes
    }

    /// Refuses limits that a cache which is opened now could not have. `None`: the limit stays.
    pub fn check_limits(&self, ram_bytes: Option<u64>, disk_bytes: Option<u64>) -> Result<(), IoError> {
        ram_bytes.map_or(Ok(()), check_ram_bytes)?;
        disk_bytes.map_or(Ok(()), check_disk_bytes)?;
        match (&self.overflow, disk_bytes) {
            // A lower limit needs no additional disk space.
            (Some(overflow), Some(bytes)) if bytes > self.disk_bytes.load(Ordering::Relaxed) => {
                overflow.check_limit_bytes(bytes)
            }
            _ => Ok(()),
        }
    }

    /// Changes the RAM limit; takes effect at once.
    pub fn set_ram_bytes(&self, ram_bytes: u64) {
        self.ram_bytes.store(ram_bytes.max(MIN_RAM_BYTES), Ordering::Relaxed);
        self.not_full();
        self.host.signal();
    }

    /// Changes the weight among the caches of the host.
    pub fn set_weight(&self, weight: u32) {
        self.share.set_weight(weight);
        self.host.budget.refused();
        self.host.signal();
    }

    /// The weight among the caches of the host.
    pub fn weight(&self) -> u32 {
        self.share.weight()
    }

    /// Changes the disk limit; takes effect at once.
    pub fn set_disk_bytes(&self, disk_bytes: u64) {
        self.disk_bytes.store(disk_bytes, Ordering::Relaxed);
        if let Some(overflow) = &self.overflow {
            overflow.set_limit_bytes(disk_bytes);
        }
        self.not_full();
        self.host.signal();
    }
}

/// Refuses a RAM limit that no cache can have.
pub(super) fn check_ram_bytes(ram_bytes: u64) -> Result<(), IoError> {
    check_least("RAM", MIN_RAM_BYTES, ram_bytes)
}

/// Refuses a disk limit that no cache can have.
pub(super) fn check_disk_bytes(disk_bytes: u64) -> Result<(), IoError> {
    check_least("disk", MIN_DISK_BYTES, disk_bytes)
}

fn check_least(what: &str, least_bytes: u64, asked_bytes: u64) -> Result<(), IoError> {
    if asked_bytes >= least_bytes {
        return Ok(());
    }
    let (least, asked) = (size::format(least_bytes), size::format(asked_bytes));
    let why = format!("a write cache needs at least {least} of {what}, but its limit would be {asked}");
    Err(IoError::new(IoErrorKind::Invalid, why))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::budget::{Budget, DEFAULT_WEIGHT, Divider, Share};
    use crate::cache::{
        Admission, BLOCK, CacheOptions, LittleSpace, OverflowOptions, UnloggedBlocks, WriteResult,
    };
    use crate::host::Host;
    use crate::overflow::buffering::Buffering;
    use crate::units::{BlockNumber, Location};

    fn cache(host: &Host, dir: &Path) -> Arc<WriteCache> {
        let place = OverflowOptions {
            at: dir.to_owned(),
            limit_bytes: 64 << 20,
            buffering: Buffering::Buffered,
            little_space: LittleSpace::Refused,
        };
        let options = CacheOptions {
            name: "test".into(),
            size_bytes: 1 << 40,
            ram_bytes: 64 << 20,
            weight: DEFAULT_WEIGHT,
            overflow: Some(place),
            pause_limit: Duration::from_secs(1),
            persistent: None,
            base: None,
        };
        WriteCache::open(&options, &host.shared()).unwrap()
    }

    #[test]
    fn the_largest_volume_is_what_the_refusal_of_a_larger_one_says() {
        let host = Host::start(u64::MAX).unwrap();
        let open = |size_bytes| {
            let options = CacheOptions {
                name: "test".into(),
                size_bytes,
                ram_bytes: 64 << 20,
                weight: DEFAULT_WEIGHT,
                overflow: None,
                pause_limit: Duration::from_secs(1),
                persistent: None,
                base: None,
            };
            WriteCache::open(&options, &host.shared())
        };
        let most = (16 << 40) - (8 << 10);
        let refused = open(most + 1).err().expect("it is too large").to_string();
        assert!(refused.contains(&format!("the maximum is {most}")), "{refused}");
        open(most).unwrap();
    }

    #[test]
    fn an_index_that_outgrew_the_limit_leaves_what_the_share_has_room_for() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::start(u64::MAX).unwrap();
        let cache = cache(&host, dir.path());
        cache.set_ram_bytes(24 << 20);
        for leaf in 0..20 << 10 {
            let first = leaf * SLOTS as u32;
            cache.clear(BlockNumber(first), BlockNumber(first + 1), Location::ZERO, UnloggedBlocks::Stay);
        }
        let allowed = || cache.allowed_segments(&cache.log.lock());
        let index_bytes = cache.index_bytes(&cache.log.lock());
        assert!(index_bytes >= 40 << 20);
        assert_eq!(allowed(), 8);
        // Another cache wants all that there is.
        let other = Share::new(DEFAULT_WEIGHT);
        let all = Holding { max_bytes: 1 << 30, least_bytes: 16 << 20, used_bytes: 16 << 20, hits: 0 };
        let share = |limit_bytes| {
            other.ask();
            cache.share.ask();
            let both = [(&cache.share, cache.holding()), (&other, all)];
            Divider::default().divide_if_due(&Budget::new(limit_bytes), Instant::now(), &both);
            (cache.share.bytes() - index_bytes, allowed())
        };
        // Index, staging buffers and four segments; then two segments more; then the most that it may ever
        // have.
        let (least, segments) = share(64 << 20);
        assert!(least < 16 << 20 && segments == 4, "{segments} segments in {least} bytes beside the index");
        let (more, segments) = share(((index_bytes + least) << 1) + (9 << 20));
        assert!(segments == 6, "{segments} segments in {more} bytes beside the index");
        let (most, segments) = share(512 << 20);
        assert!(segments == 8 && most < 32 << 20, "{segments} segments in {most} bytes beside the index");
    }

    #[test]
    fn writes_that_take_a_slot_are_paced_where_room_is_short() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::start(u64::MAX).unwrap();
        let cache = cache(&host, dir.path());
        let write = |block, byte| cache.write(BlockNumber(block), &[byte; BLOCK], Admission::New);
        assert_eq!((write(1, 1), cache.snapshot().throttled_writes), (WriteResult::Done, 0));
        // Longer than any pause of this thread.
        cache.throttle.delay_for(1 << 50);
        assert_eq!((write(2, 1), cache.snapshot().throttled_writes), (WriteResult::Done, 1));
        // In place.
        assert_eq!((write(2, 2), cache.snapshot().throttled_writes), (WriteResult::Done, 1));
        // A change of the limits resets the throttle.
        cache.set_ram_bytes(48 << 20);
        assert_eq!((write(3, 1), cache.snapshot().throttled_writes), (WriteResult::Done, 1));
    }

    #[test]
    fn records_of_segments_that_are_free_again_do_not_end_spilling() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::start(u64::MAX).unwrap();
        let cache = cache(&host, dir.path());
        for numbers in [0, 5_000, 12_000, 25_000, 100_000] {
            let mut log = Log::default();
            // All numbers are free, as after the discard of a whole disk: 25,000 segments for 50 GB.
            log.restore(&[numbers]);
            // One segment is being filled, and one is reserved for cleaning.
            let reachable = cache.allowed_segments(&log) - 2;
            let limit = cache.dirty_limit(&log);
            assert!(limit <= reachable, "{limit} of at most {reachable} after {numbers} numbers");
        }
    }
}
