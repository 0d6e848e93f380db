//! The counters of a cache at one moment.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{BLOCK, WriteCache};
use crate::counters::{Hot, Snapshot};
use crate::units::{SEGMENT_BYTES, SegmentId};

impl WriteCache {
    /// The counters at this moment.
    pub fn snapshot(&self) -> Snapshot {
        let (segments, numbers, index_bytes) = {
            let log = self.log.lock();
            (u64::from(log.ram_segments), log.numbers_used(), self.index_bytes(&log))
        };
        let live =
            |number| self.segments.get(SegmentId(number)).map_or(0, |segment| u64::from(segment.live()));
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counters;
        let disk = self.overflow.as_ref().map(|overflow| overflow.operations()).unwrap_or_default();
        Snapshot {
            ram_target_bytes: load(&self.ram_bytes),
            ram_share_bytes: self.ram_limit_bytes(),
            host_limit_bytes: self.host.budget.limit_bytes(),
            pressure_shrinks: self.host.pressure_shrinks(),
            ram_used_bytes: segments * SEGMENT_BYTES as u64
                + index_bytes
                + self.packed.bytes()
                + self.persist.as_ref().map_or(0, |persist| persist.buffer_bytes()),
            packed_bytes: self.packed.bytes(),
            packed_holds_bytes: self.packed.held_bytes(|id| self.segments.get(id)),
            live_bytes: (0..numbers).map(live).sum::<u64>() * BLOCK as u64,
            index_bytes,
            disk_limit_bytes: load(&self.disk_bytes),
            buffering: self.overflow.as_ref().map_or_else(String::new, |o| o.buffering().to_owned()),
            key_memory: self.overflow.as_ref().map_or_else(String::new, |o| o.key_memory().to_owned()),
            disk_used_bytes: self.overflow.as_ref().map_or(0, |o| o.used_bytes()),
            read_ram_blocks: c.total(Hot::ReadRam),
            read_packed_blocks: c.total(Hot::ReadPacked),
            read_zero_blocks: c.total(Hot::ReadZero),
            read_disk_blocks: load(&c.read_disk_blocks),
            write_in_place_blocks: c.total(Hot::WriteInPlace),
            write_new_blocks: c.total(Hot::WriteNew),
            elided_zero_blocks: c.total(Hot::ElidedZero),
            elided_equal_blocks: c.total(Hot::ElidedEqual),
            discarded_blocks: c.total(Hot::Discarded),
            packed_segments: load(&c.packed_segments),
            packed_blocks: load(&c.packed_blocks),
            spilled_segments: load(&c.spilled_segments),
            spilled_blocks: load(&c.spilled_blocks),
            spilled_bytes: load(&c.spilled_bytes),
            disk_read_ops: disk.reads,
            disk_read_bytes: disk.read_bytes,
            disk_write_ops: disk.writes,
            disk_write_bytes: disk.write_bytes,
            cleaned_segments: load(&c.cleaned_segments),
            cleaned_blocks: load(&c.cleaned_blocks),
            evicted_segments: load(&c.evicted_segments),
            paused_writes: load(&c.paused_writes),
            paused_ns: load(&c.paused_ns),
            throttled_writes: self.throttle.throttled_writes(),
            refused_writes: load(&c.refused_writes),
            disk_errors: load(&c.disk_errors),
            corrupt_blocks: load(&c.corrupt_blocks),
            commits: self.persist.as_ref().map_or(0, |persist| persist.commits()),
        }
    }
}
