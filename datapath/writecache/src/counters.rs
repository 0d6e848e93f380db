//! The counters of a write cache. Hot counters are spread over cache lines by thread, so that two threads on
//! one volume do not wait for each other's counting.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Number of copies of each hot counter.
const SHARDS: usize = 8;

/// The counters of the hit path: blocks that were served or stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hot {
    /// Blocks read from RAM.
    ReadRam,
    /// Blocks read as zeroes from the map.
    ReadZero,
    /// Blocks overwritten in place.
    WriteInPlace,
    /// Blocks that took a new slot.
    WriteNew,
    /// Blocks not stored because they were all zero.
    ElidedZero,
    /// Blocks freed by a discard or zero write.
    Discarded,
    /// Blocks read from packed RAM.
    ReadPacked,
    /// Blocks not stored because the image holds the same.
    ElidedEqual,
}

const HOT: usize = 8;

#[derive(Debug)]
#[repr(align(128))]
struct Shard<const N: usize>([AtomicU64; N]);

/// `N` counters, with a copy of each for every few threads.
#[derive(Debug)]
pub struct Sharded<const N: usize>([Shard<N>; SHARDS]);

impl<const N: usize> Default for Sharded<N> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Shard(std::array::from_fn(|_| AtomicU64::new(0)))))
    }
}

impl<const N: usize> Sharded<N> {
    /// Adds to the counter with this index.
    #[inline]
    pub fn add(&self, index: usize, count: u64) {
        let shard = self.0.get(shard_of_thread());
        if let Some(counter) = shard.and_then(|s| s.0.get(index)) {
            counter.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// The sum over all copies.
    pub fn total(&self, index: usize) -> u64 {
        self.0.iter().filter_map(|s| s.0.get(index)).map(|c| c.load(Ordering::Relaxed)).sum()
    }
}

/// The counters of one cache.
#[derive(Debug, Default)]
pub struct Counters {
    hot: Sharded<HOT>,
    /// Blocks read from the overflow disk.
    pub read_disk_blocks: AtomicU64,
    /// Segments packed.
    pub packed_segments: AtomicU64,
    /// Live blocks in the packed segments.
    pub packed_blocks: AtomicU64,
    /// Segments written to the overflow disk.
    pub spilled_segments: AtomicU64,
    /// Live blocks in the spilled segments.
    pub spilled_blocks: AtomicU64,
    /// Bytes written to the overflow disk.
    pub spilled_bytes: AtomicU64,
    /// Segments cleaned.
    pub cleaned_segments: AtomicU64,
    /// Blocks moved by cleaning.
    pub cleaned_blocks: AtomicU64,
    /// Clean copies dropped to free RAM.
    pub evicted_segments: AtomicU64,
    /// Writes that had to wait for space.
    pub paused_writes: AtomicU64,
    /// Nanoseconds that these writes waited, in all.
    pub paused_ns: AtomicU64,
    /// Writes refused with "no space".
    pub refused_writes: AtomicU64,
    /// Failed reads or writes of the overflow disk.
    pub disk_errors: AtomicU64,
    /// Slots whose authentication failed.
    pub corrupt_blocks: AtomicU64,
}

thread_local! {
    static SHARD: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn shard_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    SHARD.with(|shard| {
        if shard.get() == usize::MAX {
            shard.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        shard.get()
    })
}

impl Counters {
    /// Adds to a hot counter.
    #[inline]
    pub fn hot(&self, which: Hot, count: u64) {
        self.hot.add(which as usize, count);
    }

    /// Reads a hot counter.
    pub fn total(&self, which: Hot) -> u64 {
        self.hot.total(which as usize)
    }
}

/// Adds to a counter that is not hot.
pub fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// The counters of a cache at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Snapshot {
    /// Blocks that live in the cache, wherever they are. A packed block counts with its unpacked size.
    pub live_bytes: u64,
    /// RAM limit of the cache, in bytes.
    pub ram_target_bytes: u64,
    /// RAM that the cache may use now: less than its limit if the host's RAM is short.
    pub ram_share_bytes: u64,
    /// RAM that all caches of the host together may use now.
    pub host_limit_bytes: u64,
    /// How often memory pressure lowered the host's limit.
    pub pressure_shrinks: u64,
    /// RAM in use: segments, packed segments, and index.
    pub ram_used_bytes: u64,
    /// The part of it for the map and segment records.
    pub index_bytes: u64,
    /// The part of it for packed segments.
    pub packed_bytes: u64,
    /// Uncompressed size of the blocks in packed segments.
    #[serde(default)]
    pub packed_holds_bytes: u64,
    /// Disk limit of the cache, in bytes.
    pub disk_limit_bytes: u64,
    /// How the overflow is written and read (`direct`, `buffered`, or what `auto` found); empty without one.
    pub buffering: String,
    /// Storage of the overflow's key: `secret` (memory that only this process can access), `locked` (never
    /// swapped) or `unlocked` (the system refused to lock it); empty without an overflow.
    pub key_memory: String,
    /// Disk in use.
    pub disk_used_bytes: u64,
    /// Blocks read from RAM.
    pub read_ram_blocks: u64,
    /// Blocks read from packed RAM.
    pub read_packed_blocks: u64,
    /// Blocks read as zeroes from the map.
    pub read_zero_blocks: u64,
    /// Blocks read from the overflow disk.
    pub read_disk_blocks: u64,
    /// Blocks overwritten in place.
    pub write_in_place_blocks: u64,
    /// Blocks that took a new slot.
    pub write_new_blocks: u64,
    /// Blocks not stored because they were all zero.
    pub elided_zero_blocks: u64,
    /// Blocks not stored because the image holds the same.
    pub elided_equal_blocks: u64,
    /// Blocks freed by a discard or zero write.
    pub discarded_blocks: u64,
    /// Segments packed.
    pub packed_segments: u64,
    /// Live blocks in the packed segments.
    pub packed_blocks: u64,
    /// Segments written to the overflow disk.
    pub spilled_segments: u64,
    /// Live blocks in the spilled segments.
    pub spilled_blocks: u64,
    /// Bytes written to the overflow disk.
    pub spilled_bytes: u64,
    /// Reads of the overflow disk, including those of cleaning.
    #[serde(default)]
    pub disk_read_ops: u64,
    /// Bytes that these reads requested.
    #[serde(default)]
    pub disk_read_bytes: u64,
    /// Writes to the overflow disk.
    #[serde(default)]
    pub disk_write_ops: u64,
    /// Bytes that these writes wrote.
    #[serde(default)]
    pub disk_write_bytes: u64,
    /// Segments cleaned.
    pub cleaned_segments: u64,
    /// Blocks moved by cleaning.
    pub cleaned_blocks: u64,
    /// Clean copies dropped to free RAM.
    pub evicted_segments: u64,
    /// Writes that had to wait for space.
    pub paused_writes: u64,
    /// Nanoseconds that these writes waited, in all.
    pub paused_ns: u64,
    /// Writes that were delayed a little, because the overflow disk is slower than the writers and space is
    /// short.
    #[serde(default)]
    pub throttled_writes: u64,
    /// Writes refused with "no space".
    pub refused_writes: u64,
    /// Failed reads or writes of the overflow disk.
    pub disk_errors: u64,
    /// Slots whose authentication failed.
    pub corrupt_blocks: u64,
    /// Commits of a persistent cache: flushes that arrive together share a commit, and some commits are made
    /// to free space.
    #[serde(default)]
    pub commits: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_counters_add_up_over_threads() {
        let counters = Counters::default();
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| counters.hot(Hot::WriteNew, 3));
            }
        });
        assert_eq!(counters.total(Hot::WriteNew), 36);
        assert_eq!(counters.total(Hot::ReadRam), 0);
    }
}
