//! The counters of a volume, for people and programs.

use headwater_writecache::Snapshot;
use headwater_writecache::counters::Sharded;
use serde::{Deserialize, Serialize};

use crate::latency::{Class, LatencySnapshot};

/// Indexes of the volume's own counters.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Own {
    // The first five count reads, by the slowest place that served a part of the read.
    ReadRamOps,
    ReadPackedOps,
    ReadZeroOps,
    ReadDiskOps,
    ReadImageOps,
    ReadBytes,
    WriteOps,
    WriteBytes,
    DiscardOps,
    ImageBytes,
}

/// The volume's own counters.
#[derive(Debug, Default)]
pub(crate) struct OwnCounters(Sharded<10>);

impl OwnCounters {
    /// Counts a read request that was answered.
    #[inline]
    pub(crate) fn read(&self, class: Class, bytes: u64) {
        let which = match class {
            Class::ReadPacked => Own::ReadPackedOps,
            Class::ReadZero => Own::ReadZeroOps,
            Class::ReadDisk => Own::ReadDiskOps,
            Class::ReadImage => Own::ReadImageOps,
            // The classes of writes do not occur here.
            Class::ReadRam | Class::Write | Class::WriteWaited => Own::ReadRamOps,
        };
        self.add(which, 1);
        self.add(Own::ReadBytes, bytes);
    }

    #[inline]
    pub(crate) fn add(&self, which: Own, count: u64) {
        self.0.add(which as usize, count);
    }

    pub(crate) fn view(&self, latency: LatencySnapshot, cache: Snapshot) -> VolumeCounters {
        let total = |which: Own| self.0.total(which as usize);
        let reads = ReadOps {
            ram: total(Own::ReadRamOps),
            packed: total(Own::ReadPackedOps),
            zero: total(Own::ReadZeroOps),
            disk: total(Own::ReadDiskOps),
            image: total(Own::ReadImageOps),
        };
        VolumeCounters {
            read_ops: reads.ram + reads.packed + reads.zero + reads.disk + reads.image,
            reads,
            read_bytes: total(Own::ReadBytes),
            write_ops: total(Own::WriteOps),
            write_bytes: total(Own::WriteBytes),
            discard_ops: total(Own::DiscardOps),
            image_read_bytes: total(Own::ImageBytes),
            latency,
            cache,
        }
    }
}

/// Read requests by the place that served them. A request that is served from several places counts for the
/// slowest of them. From slowest to fastest: image, overflow disk, packed RAM, RAM, zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadOps {
    /// From RAM.
    pub ram: u64,
    /// From packed RAM.
    pub packed: u64,
    /// Zero blocks, which are not stored anywhere.
    pub zero: u64,
    /// From the overflow disk.
    pub disk: u64,
    /// From the image.
    pub image: u64,
}

/// A volume's counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeCounters {
    /// Read requests answered.
    pub read_ops: u64,
    /// Read requests by the place that served them.
    #[serde(default)]
    pub reads: ReadOps,
    /// Bytes that they requested.
    pub read_bytes: u64,
    /// Write requests answered.
    pub write_ops: u64,
    /// Bytes that they wrote.
    pub write_bytes: u64,
    /// Discards and zero writes answered.
    pub discard_ops: u64,
    /// Bytes read from the image.
    pub image_read_bytes: u64,
    /// Latencies of requests.
    pub latency: LatencySnapshot,
    /// The write cache's own counters.
    pub cache: Snapshot,
}
