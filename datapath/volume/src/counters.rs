//! What a volume counts, for people and programs.

use headwater_writecache::Snapshot;
use headwater_writecache::counters::Sharded;
use serde::{Deserialize, Serialize};

use crate::latency::LatencySnapshot;

/// Indexes of the volume's own counters.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Own {
    ReadOps,
    ReadBytes,
    WriteOps,
    WriteBytes,
    DiscardOps,
    ImageBytes,
}

/// The volume's own counters.
#[derive(Debug, Default)]
pub(crate) struct OwnCounters(Sharded<6>);

impl OwnCounters {
    #[inline]
    pub(crate) fn add(&self, which: Own, count: u64) {
        self.0.add(which as usize, count);
    }

    pub(crate) fn view(&self, latency: LatencySnapshot, cache: Snapshot) -> VolumeCounters {
        let total = |which: Own| self.0.total(which as usize);
        VolumeCounters {
            read_ops: total(Own::ReadOps),
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

/// A moment's view of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeCounters {
    /// Read requests answered.
    pub read_ops: u64,
    /// Bytes they asked for.
    pub read_bytes: u64,
    /// Write requests answered.
    pub write_ops: u64,
    /// Bytes they brought.
    pub write_bytes: u64,
    /// Discards and zero writes answered.
    pub discard_ops: u64,
    /// Bytes read from the image.
    pub image_read_bytes: u64,
    /// How long requests took.
    pub latency: LatencySnapshot,
    /// The write cache's own counters.
    pub cache: Snapshot,
}
