//! What stands in the way of a machine's disk, for its alarm.

use std::time::Duration;

use headwater_api::{CacheMode, DiskTransport};
use headwater_block::size;
use headwater_service::backend::Shortage;

use super::served::ServedVolume;
use crate::streaming::reads_wait;

/// A write that waited so long found no room; shorter waits are a disk that is slower than its machine.
const SHORTAGE_AFTER: Duration = Duration::from_secs(2);

/// An overflow file that has less than so many bytes left below its limit is full: it grows by segments.
const DISK_FULL_MARGIN_BYTES: u64 = 8 << 20;

impl ServedVolume {
    /// The worst of what there is.
    pub(super) fn trouble(&self) -> Option<Shortage> {
        match (self.not_durable(), self.full_cache()) {
            // What it has on disk comes back only when the disk is opened again.
            (Some(broken), Some(full)) => {
                Some(Shortage { message: format!("{}; {}", broken.message, full.message), ..broken })
            }
            (broken, full) => broken.or(full).or_else(|| self.no_server()),
        }
    }

    fn not_durable(&self) -> Option<Shortage> {
        self.volume.is_broken().then(|| Shortage {
            message: "its kept disk cannot be made durable any more, because the disk below failed at a flush: \
                      what it wrote since may be lost, and its flushes fail"
                .into(),
            advice: format!(
                "check the disk of {}, then stop the machine and start it again: it goes on from its last flush that \
                 succeeded, or later",
                self.cache_dir.display()
            ),
        })
    }

    fn no_server(&self) -> Option<Shortage> {
        // The store counts the reads of all machines, and one whose image is here needs no server.
        let copied = self.copied();
        if copied.total_bytes > 0 && copied.done_bytes >= copied.total_bytes {
            return None;
        }
        reads_wait(&*self.store).map(|reasons| Shortage {
            message: format!("no server of its image answers, and its reads wait: {reasons}"),
            advice: "they go on by themselves when a server is back".into(),
        })
    }

    /// Whether writes find no room, or did not for long.
    pub(super) fn is_full(&self) -> bool {
        let shortage = self.volume.shortage();
        let waiting = || self.parts.lock().as_ref().map_or(0, |parts| parts.server.waiting_writes());
        shortage.refusing || shortage.waited >= SHORTAGE_AFTER || waiting() > 0
    }

    fn full_cache(&self) -> Option<Shortage> {
        if !self.is_full() {
            return None;
        }
        let cache = self.volume.counters().cache;
        let told = self.volume.shortage().refusing && self.transport == DiskTransport::Nbd;
        let fare = if told { "are refused" } else { "wait" };
        let ram =
            format!("{} of {} RAM", size::format(cache.ram_used_bytes), size::format(cache.ram_target_bytes));
        let disk = format!(
            "{} of {} disk",
            size::format(cache.disk_used_bytes),
            size::format(cache.disk_limit_bytes)
        );
        let used = match self.mode {
            CacheMode::Ram => ram,
            CacheMode::Disk => disk,
            CacheMode::RamDisk => format!("{ram}, {disk}"),
        };
        let set = format!("headwater machine set {}", self.machine);
        let is_disk_full =
            cache.disk_used_bytes.saturating_add(DISK_FULL_MARGIN_BYTES) > cache.disk_limit_bytes;
        let advice = match self.mode {
            CacheMode::Ram => format!("'{set} --ram SIZE' gives it more memory at once"),
            _ if is_disk_full => format!("'{set} --disk SIZE' gives it more disk at once"),
            _ => format!("free space on the file system of {}", self.cache_dir.display()),
        };
        let message = format!("its write cache is full and writes {fare}: {used} in use");
        Some(Shortage { message, advice: format!("{advice}; files deleted in the guest free some, too") })
    }
}
